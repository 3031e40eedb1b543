"""Joining a cluster, and calling its actors: attach once per process, a bound on every wait, Ray's errors in our own terms."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    AuthenticationError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lousho_ray import semconv
from lousho_ray.errors import AgentExecutionError, ConfigurationError, LoushoError, OperationTimeoutError
from lousho_ray.loop_thread import LoopThread

T = TypeVar("T")

NAMESPACE = "lousho"
"""All our actors live in one namespace, whatever the driver's own is: independent jobs find the same limiters and stores."""

CONNECT_TIMEOUT_S = 5.0

HEAD_IS_BACK_IN_S = 20.0
"""How long a head that does not answer is waited for: one that keeps its tables in Redis is back after some seconds."""

CALL_TIMEOUT_S = 60.0
"""The bound of a call that should answer at once; long-polls and turns have bounds of their own."""

KNOWN_TO_LIVE_S = 2.0
"""For how long after an answer an actor is taken to be there. One that may not be is asked before work is sent to it: a turn or a
sub-agent that was sent once must not be sent again."""

_ATTACH_THREAD = LoopThread()
# Ray's processes ask the kernel to die with the *thread* that started them, so a cluster is only ever started from a thread that
# lives as long as the process.

_ATTACHING = threading.Lock()

LOOK_UP_AGAIN_S = 5.0
"""How long a named actor counts as found. One that is not detached ends with the process that made it: another one is made then."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A named actor's handle, which process of which cluster asked for it, and when that was."""

    process: str
    handle: Any
    at: float


_HELD: dict[str, _Held] = {}
# An actor that is not detached ends with the handle that made it: this process holds those it asked for, by name.

_HOLDING = threading.Lock()


@functools.cache
def this_actor() -> Mapping[str, str]:
    """The attributes of spans that name the actor this process is."""
    context = ray.get_runtime_context()
    return {semconv.NODE_ID: context.get_node_id(), semconv.ACTOR_ID: context.get_actor_id() or ""}


def attach() -> None:
    """Joins the cluster of this process; blocks. Does nothing when it has joined one (or runs inside one) already.

    Order: the cluster the process is in, the one of `RAY_ADDRESS` (set inside a submitted job), else a local one of its own,
    without dashboard and log forwarding.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: no cluster answers at that address, or it cannot be joined.
    """
    with _ATTACHING:
        if ray.is_initialized():
            return
        address = os.environ.get("RAY_ADDRESS", "").strip()
        try:
            if address:
                _knock(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            else:
                ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises plain ones, too: for a machine that is too busy to start a node in time.
            where = f"the cluster at RAY_ADDRESS={address}" if address else "a local cluster"
            token = " It asks for a token: set RAY_AUTH_MODE=token where the token file is." if _wants_token(error) else ""
            raise ConfigurationError(
                f"Cannot join {where}: {error}.{token} Start one with `ray start --head`, set RAY_ADDRESS to a running one, "
                "or use runtime='local'.",
                field="runtime",
            ) from error


@contextmanager
def local_cluster(cpus: int) -> Iterator[None]:
    """A local cluster for tests. One that this process is in already, or that `RAY_ADDRESS` names, is used as it is."""
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS", "").strip():
        yield
        return
    ray.init("local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises `OSError` when nobody listens at `host:port`: Ray itself would try for more than a minute."""
    host, _, port = address.rpartition(":")
    if host and "//" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _wants_token(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, AuthenticationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def reach_head() -> None:
    """Makes sure that the head of the cluster is there before it is asked: Ray's own calls would wait for it for ever. Blocks.

    A head that is started again is waited for.

    Raises:
        AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`: it did not answer within `HEAD_IS_BACK_IN_S`, or this process has left
            the cluster.
    """
    _joined()
    address: str = ray.get_runtime_context().gcs_address
    deadline = time.monotonic() + HEAD_IS_BACK_IN_S
    while True:
        try:
            return _knock(address)
        except OSError as error:
            if time.monotonic() > deadline:
                raise AgentExecutionError(
                    f"The Ray cluster is gone: its head at {address} has not answered for {HEAD_IS_BACK_IN_S:g} s ({error}). "
                    "Ray itself ends a process that has lost its cluster for a minute: start a cluster and this process again."
                ) from error
            time.sleep(0.2)


async def attached() -> None:
    """`attach()` without blocking the event loop."""
    if ray.is_initialized():
        return
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_attach(), _ATTACH_THREAD.loop()))


def attach_sync() -> None:
    """`attach()` from a thread that need not live on."""
    if not ray.is_initialized():
        _ATTACH_THREAD.run(_attach())


async def _attach() -> None:
    attach()


class ActorLostError(AgentExecutionError):
    """The process behind a call died or cannot be reached; whether the call took effect is unknown."""


class ActorSilentError(OperationTimeoutError):
    """An actor has not answered a call in the time it was given. It may be busy, frozen, or still starting."""


async def ask(call: Awaitable[T], what: str, *, timeout_s: float = CALL_TIMEOUT_S) -> T:
    """Awaits an actor call with a bound and returns its answer or raises what the actor raised, as the same object it was there.

    Args:
        call: The call's object reference.
        what: Names the actor in errors, such as `the session actor of 'user-42'`.
        timeout_s: Seconds. What may take longer is asked for by long-polls.

    Raises:
        ActorLostError: `LOUSHO_AGENT_EXECUTION_FAILED`: the actor's process died or is out of reach.
        ActorSilentError: `LOUSHO_OPERATION_TIMEOUT`: it did not answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        if isinstance(error, LoushoError):
            raise
        ms = timeout_s * 1000
        raise ActorSilentError(f"{what} did not answer within {ms:g} ms.", operation=what, timeout_ms=ms) from None
    except RayError as error:
        cause = unwrapped(error)
        if cause is None:
            raise translated(error, what) from error
        if isinstance(cause, LoushoError):
            raise cause from cause.__cause__
        raise cause from error  # Ray's own error holds the traceback of the other process.


def translated(error: BaseException, what: str) -> BaseException:
    """A Ray error in our own terms: a lost actor, or a time-out."""
    match error:
        case GetTimeoutError():
            return OperationTimeoutError(f"{what} did not answer in time.", operation=what)
        case ActorDiedError() | ActorUnavailableError() | RayActorError():
            return ActorLostError(f"{what} was lost: {_first_line(error)}")
        case TaskCancelledError():
            return ActorLostError(f"A call of {what} was cancelled; whether it took effect is unknown.")
        case RayError():
            return AgentExecutionError(f"{what} failed: {_first_line(error)}")
        case _:
            return error


def unwrapped(error: BaseException) -> BaseException | None:
    """The exception an actor method raised, out of Ray's wrapper."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, BaseException) and not isinstance(cause, RayTaskError) else None
    return None


def live(actor: Any) -> Any:
    """The actor, to be called. Every call is made through this: in a process that has left its cluster Ray would start another one.

    Raises:
        ActorLostError: `LOUSHO_AGENT_EXECUTION_FAILED`: this process is in no cluster any more.
    """
    _joined()
    return actor


def _joined() -> None:
    if not ray.is_initialized():
        raise ActorLostError("This process has left its Ray cluster, and what it had there was lost.")


def job_id() -> str:
    _joined()
    return str(ray.get_runtime_context().get_job_id())


@dataclass(frozen=True, slots=True)
class Place:
    """A CPU of a node: where an actor is to run. Ray's own `SPREAD` does not keep actors apart that ask for nothing."""

    node: str
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.node[:16]}-{self.number}"

    @property
    def bound(self) -> dict[str, Any]:
        """The options of an actor that comes with the node and goes with it."""
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False)}

    @property
    def preferred(self) -> dict[str, Any]:
        """The options of an actor that is started again elsewhere when the node is lost.

        A soft affinity is heeded only for actors that ask for something: here for one byte.
        """
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=True), "memory": 1}


def cpu_places() -> list[Place]:
    """The CPUs of the cluster's nodes as they are now; this node when there are none. Blocks."""
    places = [Place(node["NodeID"], number) for node in _nodes() for number in range(int(node["Resources"].get("CPU", 0)))]
    return places or [own_place()]


def cluster_cpus() -> int:
    """CPUs of the cluster, at least 1. Blocks."""
    return len(cpu_places())


def _nodes() -> list[dict[str, Any]]:
    reach_head()
    every_node: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return sorted((node for node in every_node if node["Alive"]), key=lambda node: str(node["NodeID"]))


def own_place() -> Place:
    """The node of this process: an actor there is lost only with that."""
    _joined()
    return Place(ray.get_runtime_context().get_node_id())


def home_of(name: str) -> tuple[str, Place | None]:
    """The machine that something named stays on, the first time this one; and a node there, if there is one now. Blocks."""
    nodes, here = _nodes(), own_place()
    own = next(str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] == here.node)
    home = agreed(name, own, this_process())
    if home == own:
        return home, here
    there = [Place(node["NodeID"]) for node in nodes if node["NodeManagerAddress"] == home]
    return home, there[0] if there else None


@functools.lru_cache(maxsize=1_000)
def agreed(name: str, proposal: str, process: str) -> str:
    """What the processes of a cluster agree on under a name: the first that was proposed. Blocks.

    Args:
        process: This process, as the cluster knows it: in another cluster nothing is agreed yet.
    """
    reach_head()
    if _internal_kv_put(name, proposal, overwrite=False, namespace=NAMESPACE):
        return _internal_kv_get(name, namespace=NAMESPACE).decode()
    return proposal


def this_process() -> str:
    """What names this process in its cluster: another one after it has joined another cluster."""
    _joined()
    context = ray.get_runtime_context()
    return f"{context.get_node_id()}/{context.get_worker_id()}"  # The first driver of every cluster has the same worker id.


def named_actor(cls: type[Any], name: str, *args: Any, options: dict[str, Any], fresh: bool = False) -> Any:
    """The actor of that name, made when it is not there. Of several callers at once, in any process, one makes it. Blocks.

    `fresh`: looks it up, however recently that was done.
    """
    me = this_process()
    with _HOLDING:
        held = _HELD.get(name)
        if held is not None and held.process != me:
            held = None
        if held is not None and not fresh and time.monotonic() - held.at < LOOK_UP_AGAIN_S:
            return held.handle
        reach_head()
        groups = options.get("concurrency_groups")
        remote: Any = ray.remote(cls) if groups is None else ray.remote(concurrency_groups=groups)(cls)  # type: ignore[call-overload]
        rest = {key: value for key, value in options.items() if key != "concurrency_groups"}
        handle = remote.options(name=name, namespace=NAMESPACE, get_if_exists=True, **{"num_cpus": 0, **rest}).remote(*args)
        if held is not None and held.handle == handle:
            handle = held.handle  # It may be the one that made the actor, and whose end would end it.
        _HELD[name] = _Held(me, handle, time.monotonic())
        return handle


def held_actor(name: str) -> Any:
    """The handle that `named_actor` has returned for this name a moment ago, else `None`."""
    held = _HELD.get(name)
    fresh = held is not None and held.process == this_process() and time.monotonic() - held.at < LOOK_UP_AGAIN_S
    return held.handle if held is not None and fresh else None


def let_go(prefix: str, but: Collection[str]) -> None:
    """Ends, where they are not detached, the actors this process made and needs no more: those whose name begins with `prefix`."""
    with _HOLDING:
        for name in [name for name in _HELD if name.startswith(prefix) and name not in but]:
            del _HELD[name]


def look_up_again(handle: Any) -> None:
    """This actor did not answer: the next `named_actor` finds out whether it is still the one of its name."""
    with _HOLDING:
        for name, held in list(_HELD.items()):
            if held.handle == handle:
                _HELD[name] = replace(held, at=float("-inf"))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
