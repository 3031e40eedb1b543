"""What a session actor knows of the processes whose turns it runs: their turns that ended, and whether they are still there."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ray.cloudpickle import cloudpickle

from lousho_ray.actors.cluster import ActorLostError
from lousho_ray.actors.shared_lists import same_start
from lousho_ray.actors.shipping import portable
from lousho_ray.errors import AgentExecutionError, LoushoError
from lousho_ray.eventlog import EventLog
from lousho_ray.handle import LocalRun
from lousho_ray.ids import new_id
from lousho_ray.loop.inbox import QueuedInput
from lousho_ray.loop.result import ExecutionResult

KEPT_S = 60.0
"""How long a finished turn can still be read by a handle that lost its connection."""

READER_LEASE_S = 30.0
"""A streamed turn is stopped when the process of its handle has been silent for this long: nobody would see the rest. A reader that
takes its time is not silent: its process asks how its turns end meanwhile."""

MOST_ENDINGS = 200
"""Turns whose ends are told at once."""

NO_LIFE = ""
"""The life of a client that the actor does not know."""


class Ending(NamedTuple):
    """How a turn ended.

    Attributes:
        run_id: The turn's.
        result: Its result, without the messages at the start that its client has.
        same: How many those are: the messages at the start of the result that the client has named as its base.
        error: What it raised.
        trace: The traceback of an error of the user's code, as text.
    """

    run_id: str
    result: ExecutionResult[Any] | None = None
    same: int = 0
    error: BaseException | None = None
    trace: str = ""

    @classmethod
    def of(cls, run: LocalRun, base: LocalRun | None) -> Ending:
        if run.task.cancelled():
            return cls(run.run_id, error=ActorLostError("The run was cancelled where it ran; what it has done is unknown."))
        error = run.task.exception()
        if error is None:
            return cls(run.run_id, *_beyond(base, run.task.result()))
        trace = "" if isinstance(error, LoushoError) else "".join(traceback.format_exception(error))
        return cls(run.run_id, error=portable(error), trace=trace)


class Parcel(NamedTuple):
    """The endings of some turns, as the pickle of a list."""

    run_ids: Sequence[str]
    data: bytes


class Endings(NamedTuple):
    """The answer to a poll, and the next cursor. `life` is another one once the actor has lost or forgotten the client, with its
    turns."""

    life: str
    parcels: Sequence[Parcel]
    cursor: int


class Turn:
    """A turn, its session, and the process that asked for it.

    Attributes:
        read: Whether somebody still reads its events, or the records of spans among them.
    """

    def __init__(self, run: LocalRun, session: str, client: Client, *, read: bool) -> None:
        self.run = run
        self.session = session
        self.client = client
        self.read = read
        self.inputs: dict[str, QueuedInput] = {}


class Client:
    """One event loop of a process that has turns here.

    Args:
        forget: Called when the process has been silent for long.
        told: Called with turns that it knows the end of.
    """

    def __init__(self, forget: Callable[[], Any], told: Callable[[Sequence[str]], Any]) -> None:
        self.life = new_id()
        self._forget = forget
        self._told = told
        self._last: tuple[int, Sequence[str]] = (0, ())
        self._loop = asyncio.get_running_loop()
        self._ended: EventLog[Ending] = EventLog()
        self._running: set[LocalRun] = set()
        self._observed: set[LocalRun] = set()
        self._seen = time.monotonic()
        self._watching: asyncio.TimerHandle | None = None
        self._leaving = self._loop.call_later(KEPT_S, self._forget_silent)

    def seen(self) -> None:
        """The process is there."""
        self._seen = time.monotonic()

    def add(self, run: LocalRun, base: LocalRun | None, *, observed: bool) -> None:
        """A turn of this client runs, which has the result of `base`. Of one that is `observed` somebody reads the events."""
        self._running.add(run)
        if observed:
            self._observed.add(run)
            if self._watching is None:
                self._watching = self._loop.call_later(READER_LEASE_S, self._watch)
        run.task.add_done_callback(lambda _: self._end(run, base))

    async def endings(self, cursor: int, wait_s: float, *, apart: bool) -> Endings:
        """How turns ended, from `cursor` on; waits for the first. `apart`: each in a pickle of its own."""
        self.seen()
        if self._last[0] == cursor:  # it asks for what comes behind the last answer
            self._told(self._last[1])
        endings, cursor = await self._ended.read(cursor, wait_s=wait_s, most=MOST_ENDINGS)
        self._last = (cursor, [ending.run_id for ending in endings])
        self.seen()
        return Endings(self.life, parcels_of(endings, apart=apart), cursor)

    def _end(self, run: LocalRun, base: LocalRun | None) -> None:
        self._running.discard(run)
        self._observed.discard(run)
        self._ended.append(Ending.of(run, base))

    def _watch(self) -> None:
        """Leaves the streamed turns of a client that has been silent for the length of its lease."""
        self._watching = None
        left_s = self._seen + READER_LEASE_S - time.monotonic()
        if left_s <= 0:
            for run in self._observed:
                run.leave()
        elif self._observed:
            self._watching = self._loop.call_later(left_s, self._watch)

    def _forget_silent(self) -> None:
        left_s = self._seen + KEPT_S - time.monotonic()
        if left_s <= 0 and not self._running:
            self._forget()
        else:
            self._leaving = self._loop.call_later(max(left_s, 1.0), self._forget_silent)


def _beyond(base: LocalRun | None, result: ExecutionResult[Any] | None) -> tuple[ExecutionResult[Any] | None, int]:
    """A result without what its client has of it from the result of an earlier turn, and how many messages that is."""
    if base is None or result is None or not base.task.done() or base.task.cancelled() or base.task.exception() is not None:
        return result, 0
    earlier: ExecutionResult[Any] | None = base.task.result()
    same = 0 if earlier is None else same_start(earlier.messages, result.messages)
    return (replace(result, messages=result.messages[same:]), same) if same else (result, 0)


def parcels_of(endings: Sequence[Ending], *, apart: bool) -> list[Parcel]:
    """One parcel of all, or one of each. An ending that cannot be sent becomes an error of its own."""
    if not endings:
        return []
    if not apart:
        try:
            return [Parcel([ending.run_id for ending in endings], cloudpickle.dumps(list(endings)))]
        except Exception:
            return parcels_of(endings, apart=True)
    return [Parcel([ending.run_id], _packed(ending)) for ending in endings]


def _packed(ending: Ending) -> bytes:
    try:
        data: bytes = cloudpickle.dumps([ending])
    except Exception as error:
        told = AgentExecutionError(f"The result cannot be sent to another process: {type(error).__name__}: {error}")
        data = cloudpickle.dumps([Ending(ending.run_id, error=told)])
    return data


def endings_in(parcel: Parcel) -> list[Ending]:
    """Unpacks a parcel.

    Raises:
        Exception: One of several cannot be read here: they have to be sent one by one.
    """
    try:
        endings: list[Ending] = cloudpickle.loads(parcel.data)
    except Exception as error:
        if len(parcel.run_ids) > 1:
            raise
        told = AgentExecutionError(f"The result cannot be read in this process: {type(error).__name__}: {error}")
        return [Ending(parcel.run_ids[0], error=told)]
    return endings
