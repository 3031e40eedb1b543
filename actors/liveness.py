"""Telling a busy actor from a frozen one.

An actor whose calls time out is asked whether it is there, on threads that user code does not block. One that answers is busy, and
is waited for. One that does not (it was stopped, it swaps, an extension holds the interpreter's lock) is taken for dead: its
process is ended, and Ray starts it again. If it went on by itself all the same, what it writes later is fenced off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from enum import Enum
from typing import Any, TypeVar

import ray

from lousho_ray.actors.cluster import ActorLostError, ActorSilentError, ask, live, reach_head

T = TypeVar("T")

CONTROL_ANSWERS_IN_S = 10.0
"""How long an actor, a call of which has timed out, may take to say that it is there."""

ON_ITS_WAY_S = 1.0
"""How much longer an answer is looked for: this process may have been stopped itself, and find it only now."""

BUSY_S = 600.0
"""How long an actor is waited for that is there, but whose work loop does not answer: code of the user's blocks it."""

CONTROL = "control"
"""The concurrency group of the questions that an actor answers on threads of their own."""

_ALIVE = 2
"""Ray's number for an actor that has been started; one that is just starting does not answer either."""


class Verdict(Enum):
    """What an actor is that has not answered a call."""

    BUSY = "busy"
    STARTING = "starting"
    ENDED = "ended"


async def judge(actor: Any, group: str | None = CONTROL) -> Verdict:
    """Finds out why an actor has not answered a call, and ends its process when it is frozen.

    Args:
        actor: Its handle.
        group: The concurrency group to ask in; `None` for an actor that runs no user code and has none.

    Raises:
        AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`: the cluster itself is gone.
    """
    options = {} if group is None else {"concurrency_group": group}
    question = live(actor).__ray_ready__.options(**options).remote()
    # In a thread: an event loop that user code blocks here takes an answer for late that came in time.
    if await asyncio.to_thread(_answered, question):
        return Verdict.BUSY
    if actor._get_local_state() != _ALIVE:
        return Verdict.STARTING
    await asyncio.to_thread(_end, actor)
    return Verdict.ENDED


def _answered(question: Any) -> bool:
    """Whether the actor answers in time, or has died: the call that is under way says so then."""
    return any(ray.wait([question], timeout=bound_s)[0] for bound_s in (CONTROL_ANSWERS_IN_S, ON_ITS_WAY_S))


def _end(actor: Any) -> None:
    reach_head()
    ray.kill(actor, no_restart=False)


async def ask_busy(actor: Any, call: Awaitable[T], what: str, *, timeout_s: float) -> T:
    """`ask` for a call of an actor that runs user code: while it is busy, the answer is waited for up to `BUSY_S`.

    Args:
        timeout_s: Seconds after which the actor is asked whether it is there, again and again.

    Raises:
        ActorLostError: `LOUSHO_AGENT_EXECUTION_FAILED`: it is gone, or was frozen and its process has been ended.
        ActorSilentError: `LOUSHO_OPERATION_TIMEOUT`: it is there, but did not answer.
    """
    until = time.monotonic() + BUSY_S
    while True:
        try:
            return await ask(call, what, timeout_s=timeout_s)
        except ActorSilentError as silent:
            verdict = await judge(actor)
            if verdict is Verdict.ENDED:
                raise ActorLostError(
                    f"{what} was frozen: it answered neither a call within {timeout_s:g} s nor whether it is there within "
                    f"{CONTROL_ANSWERS_IN_S:g} s. Its process was ended and is being started again."
                ) from silent
            if verdict is Verdict.STARTING or time.monotonic() > until:
                raise
