"""A turn that runs in a session actor, as its handle sees it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lousho_ray.actors.cluster import ActorLostError, ask, live
from lousho_ray.actors.event_parcel import unpacked
from lousho_ray.actors.session import ANSWERS_IN_S
from lousho_ray.actors.stream_view import StreamView
from lousho_ray.cancellation import AbortReason
from lousho_ray.errors import SessionAwaitingApprovalError
from lousho_ray.eventlog import EventLog
from lousho_ray.events import Event
from lousho_ray.handle import BATCH
from lousho_ray.ids import new_id
from lousho_ray.limits.session_spend import without_spend
from lousho_ray.loop.result import ExecutionResult, final_text
from lousho_ray.messages import Message
from lousho_ray.ports import FinishReason, Observer
from lousho_ray.session import DecisionRequest, Request, ResumeRequest, TurnRequest, transcript
from lousho_ray.spans import SpanBook, SpanRecord
from lousho_ray.tools.approval_policies import MARK

if TYPE_CHECKING:
    from lousho_ray.actors.session_link import HostedLink

MOST_RECOVERIES = 3
"""How often a durable turn is resumed after its actor was lost; a turn that kills its actor each time is given up."""


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a turn runs: the actor, the run's id there, and its end. `resumed` says that it goes on from what a lost actor left."""

    actor: Any
    run_id: str
    ended: asyncio.Future[ExecutionResult[Any]]
    resumed: bool = False


class HostedTurn:
    """A turn that runs in a session actor, as its handle sees it. Events come by long-poll with a cursor.

    When the actor of a durable session dies, the turn is resumed where the session is hosted next, and the handle goes on with
    that: what was recorded is not done again. The step that was cut off is reported as ended with `error` and begins anew.
    """

    def __init__(self, link: HostedLink, request: Request, observers: Sequence[Observer]) -> None:
        self.run_id = request.run_id
        self._link = link
        trace, exporter = link.trace()
        self._request = replace(request, observed=request.observed or bool(observers), trace=trace)
        self._observers = tuple(observers)
        self._spans = None if exporter is None else SpanBook(exporter)
        self._listens = bool(observers) or self._spans is not None
        # With listeners there are two readers, but an actor's log has one: it is read here and kept for the handle.
        self._log: EventLog[Event] | None = EventLog() if self._listens and request.observed else None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._result: asyncio.Task[ExecutionResult[Any]] | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._events = StreamView(request.run_id)
        self._home: asyncio.Task[_Home]
        self._recovering = asyncio.Lock()
        self._moved = asyncio.Event()
        self._recoveries = 0
        self._seen = link.seen

    def begin(self, after: concurrent.futures.Future[None] | None) -> concurrent.futures.Future[None]:
        """Starts the turn once `after` is done; the future it returns is done when it has. It may be awaited on any event loop."""
        begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._home = self._task(self._start(after))
        self._home.add_done_callback(lambda _: begun.set_result(None))
        self._result = self._task(self._fetch_result())
        if self._listens:
            self._pumping = self._task(self._pump())
        self._result.add_done_callback(self._over)
        return begun

    def _over(self, _: asyncio.Task[Any]) -> None:
        """What is left to read is bounded now: the observers get it, whether the handle's own reader goes on or not."""
        if self._log is not None:
            self._log.stop_reading()

    async def read(self, cursor: int) -> tuple[list[Event], int, bool]:
        if self._log is not None:
            events, cursor = await self._log.read(cursor, most=BATCH)
            return events, cursor, self._log.at_end(cursor)
        events, end = await self._read()
        return events, cursor + len(events), end

    async def result(self) -> ExecutionResult[Any]:
        """The turn's result, once the observers have been told all of its events."""
        assert self._result is not None
        try:
            return await asyncio.shield(self._result)
        finally:
            if self._pumping is not None and self._result.done():
                await asyncio.wait({self._pumping})
                self._lose_spans("The run is over.")

    def stop_reading(self) -> None:
        if self._log is not None:
            self._log.stop_reading()

    def enqueue(self, messages: tuple[Message, ...]) -> tuple[str, Awaitable[bool]]:
        return self._add_input(messages, steer=False)

    def steer(self, messages: tuple[Message, ...]) -> tuple[str, Awaitable[bool]]:
        return self._add_input(messages, steer=True)

    def abort(self, reason: object | None) -> None:
        portable = AbortReason.of(reason)
        self._task(self._control(lambda home: live(home.actor).abort.remote(home.run_id, portable, False)))

    def leave(self) -> None:
        if self._result is not None and not self._result.done():
            reason = AbortReason.of("The consumer left the stream.")
            self._task(self._control(lambda home: live(home.actor).abort.remote(home.run_id, reason, True)))

    async def _start(self, after: concurrent.futures.Future[None] | None) -> _Home:
        if after is not None:
            await asyncio.wait({asyncio.wrap_future(after)})
        return await self._begin(self._request)

    async def _begin(self, request: Request, *, resumed: bool = False) -> _Home:
        _, actor = await self._link.reach()
        entry = await self._link.start_on(actor, request)
        try:
            await entry.accepted
        except ActorLostError:
            self._link.lost(actor)
            if not self._link.durable:
                raise
        return _Home(actor, request.run_id, entry.ended, resumed)  # A durable turn is lost, and gone on with.

    async def _fetch_result(self) -> ExecutionResult[Any]:
        home = await asyncio.shield(self._home)
        while True:
            try:
                result: ExecutionResult[Any] | None = await asyncio.shield(home.ended)
            except ActorLostError as error:
                self._link.lost(home.actor)
                home = await self._recover(home, error)
                continue
            except SessionAwaitingApprovalError as error:
                if not home.resumed or not self._decides(error.approval_id):
                    raise
                home = await self._recover(home, None)  # The pause had not been taken.
                continue
            if result is None and home.resumed:
                result = await self._what_was_saved()
                if result is None:
                    home = await self._recover(home, None)
                    continue
            if result is not None and result.finish_reason not in ("aborted", "awaiting-approval"):
                self._link.seen = len(transcript(result))
            return result  # type: ignore[return-value]  # a resume that found nothing has none

    def _decides(self, approval_id: str) -> bool:
        return isinstance(self._request, DecisionRequest) and self._request.approval_id == approval_id

    async def _recover(self, lost: _Home, error: ActorLostError | None) -> _Home:
        """The turn's next home after its actor was lost: where what it left is resumed. Without an error nothing had been left, so
        that the request itself is sent again."""
        async with self._recovering:
            home = await asyncio.shield(self._home)
            if home is not lost:
                return home
            self._recoveries += 1
            if error is not None and (not self._link.resumes or self._recoveries > MOST_RECOVERIES):
                advice = "resume() the session, or" if self._link.durable else "load the session, then"
                raise ActorLostError(f"{error.detail} The turn's outcome is unknown: {advice} send again.") from error
            self._events.cut()
            self._lose_spans(str(error))
            run_id = f"{self.run_id}-{self._recoveries}"
            again: Request = replace(self._request, run_id=run_id)
            if error is not None:
                again = ResumeRequest(
                    run_id, self._request.observed, lost=lost.run_id, mode=self._link.mode, trace=self._request.trace
                )
            self._home = self._task(self._begin(again, resumed=error is not None))
            self._moved.set()
            self._moved = asyncio.Event()
            return await asyncio.shield(self._home)

    async def _what_was_saved(self) -> ExecutionResult[Any] | None:
        """The result of a turn that had been saved before its actor died, as the transcript tells it; `None` when it had not.

        What was there before the turn is not looked at: the same may have been asked before.
        """
        messages = [without_spend(message) for message in await self._link.load()]
        if not isinstance(self._request, TurnRequest):
            return self._last_of(messages)
        asked = list(self._request.input)
        first = self._seen if len(messages) >= self._seen else 0  # a compaction has shortened it
        for start in range(len(messages) - len(asked), first - 1, -1):
            if messages[start : start + len(asked)] == asked and len(messages) > start + len(asked):
                return ExecutionResult(
                    text=final_text(messages), messages=messages, new_messages=messages[start:], run_id=self.run_id
                )
        return None

    def _last_of(self, messages: Sequence[Message]) -> ExecutionResult[Any]:
        """The result of a turn that went on from what was stored, and was saved: the last turn of the transcript, of those with an
        approved call if this one went on with an approval."""
        starts = [index for index, message in enumerate(messages) if message.role == "user"] or [0]
        turns = [list(messages[start:end]) for start, end in zip(starts, [*starts[1:], len(messages)], strict=True)]
        decided = isinstance(self._request, DecisionRequest) and self._request.decision.approved
        own = next((turn for turn in reversed(turns) if not decided or any(map(_was_approved, turn))), turns[-1])
        reason: FinishReason = "stop" if own and own[-1].role == "assistant" and own[-1].text else "other"
        return ExecutionResult(
            text=final_text(own), messages=list(messages), new_messages=own, finish_reason=reason, run_id=self.run_id
        )

    async def _read(self) -> tuple[list[Event], bool]:
        home: _Home | None = None
        try:
            home = await asyncio.shield(self._home)
            cursor = self._events.cursor
            batch = await self._link.ask(home.actor, live(home.actor).read.remote(home.run_id, cursor), timeout_s=ANSWERS_IN_S)
            items = unpacked(batch.parcel)
            events = self._events.take(self._without_spans(items), batch.cursor)
        except ActorLostError as error:
            try:
                assert home is not None
                await self._recover(home, error)
            except Exception as final:
                return self._events.failed(final), True
            return self._events.take((), 0), False
        except Exception as error:
            return self._events.failed(error), True
        if not batch.end or self._events.done:
            return events, batch.end
        assert self._result is not None
        if home.resumed and not items:
            # The resume found nothing left behind: either the turn's result is known by now, or the turn is sent again.
            moved = self._task(self._moved.wait())
            await asyncio.wait({self._result, moved}, return_when=asyncio.FIRST_COMPLETED)
            moved.cancel()
            if not self._result.done():
                return events, False
        failure = await _error_of(self._result)
        return [*events, *self._events.ended(failure, None if failure is not None else self._result.result())], True

    def _without_spans(self, items: Sequence[Event | SpanRecord]) -> list[Event]:
        """The events of a batch. What came of spans between them goes to the exporter here, where the caller is."""
        events = []
        for item in items:
            if not isinstance(item, SpanRecord):
                events.append(item)
            elif self._spans is not None:
                self._spans.take(item)
        return events

    def _lose_spans(self, why: str) -> None:
        if self._spans is not None:
            self._spans.lose("RayActorError", why)

    async def _pump(self) -> None:
        """Hands the events to the observers here, where the caller is, and keeps them for the handle's own reader."""
        end = False
        while not end:
            events, end = await self._read()
            for event in events:
                for observer in self._observers:
                    observer(event)
                if self._log is not None:
                    self._log.append(event)
                    await self._log.drain()
        if self._log is not None:
            self._log.close()

    def _add_input(self, messages: tuple[Message, ...], *, steer: bool) -> tuple[str, Awaitable[bool]]:
        input_id = new_id("in_")
        return input_id, asyncio.shield(self._task(self._input_applied(input_id, messages, steer)))

    async def _input_applied(self, input_id: str, messages: tuple[Message, ...], steer: bool) -> bool:
        home = await asyncio.shield(self._home)
        await self._link.ask(home.actor, live(home.actor).add_input.remote(home.run_id, input_id, messages, steer))
        applied: bool | None = None
        while applied is None:
            applied = await self._link.ask(
                home.actor, live(home.actor).applied.remote(home.run_id, input_id), timeout_s=ANSWERS_IN_S
            )
        return applied

    async def _control(self, call: Callable[[_Home], Awaitable[Any]]) -> None:
        home = await asyncio.shield(self._home)
        await ask(call(home), self._link.what)

    def _task(self, coroutine: Any) -> asyncio.Task[Any]:
        """A task of this turn; what it raises belongs to whoever awaits it, and makes no noise when nobody does."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


def _was_approved(message: Message) -> bool:
    return message.role == "tool" and message.metadata is not None and MARK in message.metadata


async def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    await asyncio.wait({task})
    return None if task.cancelled() else task.exception()
