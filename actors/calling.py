"""Calls of actors that may die: bounded in time, tried several times, and an error of ours in the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from lousho_ray.errors import AgentExecutionError
from lousho_ray.loop_thread import LoopThread

ACTOR_LOOP = LoopThread()
"""The event loop on which a process talks to its limiter and budget actors. User code runs on loops that come and go (`send_sync`,
notebooks, threads); one conversation for all of them must outlive each. Apart from `SYNC_LOOP`, whose code may block on it."""

RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits between attempts. A killed actor is back after about 0.6 s, and later on a busy machine or when its node is lost; an open
call notices its death after about 1.8 s."""


class ActorCaller:
    """Calls methods of one actor, which is looked up again after a failure.

    Args:
        connect: Returns the actor's handle. May block, and raise when there is none now.
        what: The actor's name in errors, for example "rate limiter".
        delays_s: The waits between attempts, `RETRY_DELAYS_S` by default; how often a call is tried follows from it.
        if_silent: What to do with the handle of an actor that does not answer in time, before the next attempt.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        what: str,
        delays_s: Sequence[float] | None = None,
        if_silent: Callable[[Any], Awaitable[object]] | None = None,
    ) -> None:
        self._connect = connect
        self._what = what
        self._delays_s = RETRY_DELAYS_S if delays_s is None else delays_s
        self._if_silent = if_silent
        self._handle: Any = None

    async def __call__(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls an idempotent method.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, every attempt failed.
        """
        for delay in (*self._delays_s, None):
            try:
                return await self._attempt(method, args, timeout_s)
            except Exception as error:
                silent, self._handle = self._handle, None
                if isinstance(error, TimeoutError) and self._if_silent is not None and _is_actor(silent):
                    await self._if_silent(silent)
                if delay is None:
                    raise AgentExecutionError(
                        f"The {self._what} actor cannot be reached: {len(self._delays_s) + 1} attempts failed, the last with "
                        f"{type(error).__name__}: {_first_line(error)}. Check that the Ray cluster is up."
                    ) from error
                await asyncio.sleep(delay)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            if self._handle is None:
                self._handle = await asyncio.to_thread(self._connect)  # It asks the head of the cluster, which may not answer.
            _check_connected(self._handle)
            return await getattr(self._handle, method).remote(*args)


def find_actor(name: str, namespace: str | None) -> Any:
    """The handle of a named actor.

    Raises:
        ValueError: There is none now.
        ConnectionError: This process has left its cluster. Asking Ray all the same would start a new one.
    """
    import ray

    if not ray.is_initialized():
        raise ConnectionError(_NOT_CONNECTED)
    return ray.get_actor(name, namespace=namespace)


def was_restarted() -> bool:
    """Whether this process is an actor of which an earlier life was lost."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _check_connected(handle: Any) -> None:
    """Raises `ConnectionError` for an actor of a cluster that this process has left: Ray would start a new one for the call."""
    if _is_actor(handle) and not sys.modules["ray"].is_initialized():
        raise ConnectionError(_NOT_CONNECTED)


def _is_actor(handle: Any) -> bool:
    """Whether it is a handle of Ray's. Does not load Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(handle, ray.actor.ActorHandle)


async def end_if_frozen(handle: Any) -> None:
    """For an actor of ours that runs no user code: one that does not even say that it is there is started again."""
    from lousho_ray.actors.liveness import judge

    with suppress(AgentExecutionError):  # The cluster itself is gone, which the next attempt finds out.
        await judge(handle, group=None)


_NOT_CONNECTED = "this process is not connected to a Ray cluster"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
