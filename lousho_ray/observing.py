"""What listens to runs where the caller is: `on_event` and `session.on()` hear each event, `on_run_end` each end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

from lousho_ray.audit import attach
from lousho_ray.cancellation import CancelToken
from lousho_ray.events import Event
from lousho_ray.handle import RunSource
from lousho_ray.loop.emitter import guarded
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.ports import Observer
from lousho_ray.session import DecisionRequest
from lousho_ray.turn_start import joined_runs

log = logging.getLogger("lousho_ray")

RunEndListener: TypeAlias = Callable[[ExecutionResult[Any] | None, BaseException | None], object]
"""`fn(result, error)`: one of the two is `None`."""


def observers_of(*listeners: Observer | None) -> list[Observer]:
    """Those that are there, each guarded so that it cannot fail a run."""
    return [guarded(listener) for listener in listeners if listener is not None]


class Listeners(list[Observer]):
    """Those of one session."""


class SessionListeners:
    """The listeners of the sessions of this process, by store and id: all handles of a session share them."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[tuple[int, str], Listeners] = WeakValueDictionary()

    def of(self, store: object, session_id: str) -> Listeners:
        """Without a store a session is its one handle's."""
        if store is None:
            return Listeners()
        listeners = self._of.get((id(store), session_id))
        if listeners is None:
            listeners = self._of[id(store), session_id] = Listeners()
        return listeners


def tell_end(listener: RunEndListener | None, run_id: str, ended: asyncio.Future[Any]) -> None:
    """Tells `on_run_end` how a run ended: once, and only of a run of its own.

    A call that joined a running turn has that turn's outcome, and a resume that found nothing to resume has none.
    """
    if listener is None:
        return
    error: BaseException | None = asyncio.CancelledError() if ended.cancelled() else ended.exception()
    result = None if error is not None else ended.result()
    if error is None and (result is None or not _is_own(result.run_id, run_id)):
        return
    if error is not None and run_id in joined_runs(error):
        return
    try:
        listener(result, error)
    except (Exception, SystemExit):
        log.exception("on_run_end raised for run %s; the run has ended all the same.", run_id)


def _is_own(ended: str, run_id: str) -> bool:
    """Whether the run that ended is the one asked for, or what it was resumed as after its actor was lost."""
    return ended == run_id or ended.startswith(f"{run_id}-")


class WatchedRun:
    """A run as its handle sees it: what its end has to bring about is done before anybody gets its result, and also when nobody
    awaits it."""

    def __init__(
        self,
        source: RunSource,
        listener: RunEndListener | None,
        saw: Callable[[ExecutionResult[Any]], None] | None = None,
        cancel: CancelToken | None = None,
    ) -> None:
        self.run_id = source.run_id
        self.enqueue = source.enqueue
        self.steer = source.steer
        self.abort = source.abort
        self.leave = source.leave
        self.stop_reading = source.stop_reading
        self._source = source
        self._ended = asyncio.ensure_future(self._end(saw))
        self._ended.add_done_callback(lambda ended: tell_end(listener, self.run_id, ended))
        self._ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if cancel is not None:
            let_go = cancel.watch(source.abort)
            self._ended.add_done_callback(lambda _: let_go())

    async def read(self, cursor: int) -> tuple[list[Event], int, bool]:
        events, cursor, end = await self._source.read(cursor)
        if end:
            await asyncio.wait({self._ended})  # When the loop over the events ends, what the run left has been taken over.
        return events, cursor, end

    async def result(self) -> ExecutionResult[Any]:
        with suppress(Exception):  # raised below, once it was told
            await self._source.result()
        return await asyncio.shield(self._ended)

    async def _end(self, saw: Callable[[ExecutionResult[Any]], None] | None) -> ExecutionResult[Any]:
        result: ExecutionResult[Any] = await self._source.result()
        if saw is not None and result is not None:
            saw(result)
        return result


class PausedPlace(Protocol):
    """Where a pause is, and where a decision on it is carried out."""

    def start(self, request: DecisionRequest, observers: Sequence[Observer], /) -> RunSource: ...

    def approval(self, approval_id: str, /) -> Awaitable[Mapping[str, Any] | None]: ...


class ObservedPlace:
    """Continues a paused run so that those who listen to the agent hear of it."""

    def __init__(self, place: PausedPlace, observers: Callable[[Any], Sequence[Observer]], listener: RunEndListener | None) -> None:
        self._place = place
        self._observers = observers
        self._listener = listener
        self.approval = place.approval

    def start(self, request: DecisionRequest, observers: Sequence[Observer], /) -> RunSource:
        own = self._observers(request.principal)
        source = self._place.start(request, (*own, *observers))
        attach(own, source.abort)
        return source if self._listener is None else WatchedRun(source, self._listener)
