"""`SessionHost`: runs the turns of a session, one at a time, and keeps what they leave in a store."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lousho_ray.cancellation import Aborted
from lousho_ray.durable import (
    awaiting,
)
from lousho_ray.errors import LoushoError
from lousho_ray.events import EventUsage, RunDone
from lousho_ray.handle import LocalRun
from lousho_ray.ids import new_id
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.inbox import QueuedInput
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.messages import Message
from lousho_ray.options import Compaction
from lousho_ray.ports import Observer
from lousho_ray.session import DecisionRequest, Request, ResumeRequest, TurnRequest
from lousho_ray.session_compaction import SessionCompaction, compact_session, turn_pending
from lousho_ray.session_turns import SessionTurns
from lousho_ray.turn_lease import Opening, TurnLease, end_lease
from lousho_ray.turn_start import begin_turn, joined_result, refuse_joining, reported, taken_by, unless_aborted
from lousho_ray.turns import Place

T = TypeVar("T")

log = logging.getLogger("lousho_ray")


class SessionHost(SessionTurns):
    """Runs the turns of one session: one at a time, in the order of the calls.

    A finished turn is saved in one write before its `run.done` is reported. An aborted turn saves nothing. With a checkpoint store
    a turn is durable: what it has done so far is stored as it goes on, and a later call finishes it. An `anonymous` host continues
    the paused run of a plain `send()`, whose tools see no session.
    """

    # -------------------------------------------------------------------------------------------------- taking a place in line

    def start(self, request: Request, observers: Sequence[Observer] = ()) -> LocalRun:
        """Puts a request in line and returns its run. Must be called on the event loop that runs the session's turns."""
        turn = LocalRun(request.run_id)
        emitter = begin_turn(turn, request, self._definition, observers)
        match request:
            case TurnRequest():
                self._enter_or_join(turn, request, emitter)
            case DecisionRequest():
                place = self._line.enter(turn)
                turn.start(self._in_line(turn, place, emitter, lambda lease: self._decided_turn(turn, request, emitter, lease)))
            case ResumeRequest():
                place = self._line.enter(turn)
                lost = request.lost
                body = self._in_line(turn, place, emitter, lambda lease: self._finish_pending(turn, emitter, lease, lost=lost))
                turn.start(self._after_death(lost, body))
        return turn

    async def set_mode(self, mode: Any) -> None:
        """Switches the permission mode of the turns that run or wait, from their next tool call on."""
        for turn in self._line.turns:
            turn.mode.set(mode)

    def _enter_or_join(self, turn: LocalRun, request: TurnRequest, emitter: Emitter) -> None:
        target = self._line.last() if request.policy != "wait" else None
        if target is None:
            place = self._line.enter(turn)
            turn.start(self._own_turn(turn, place, request, emitter))
            return
        option = request.call.shaping_option()
        if option is not None:
            turn.start(reported(refuse_joining(option, self._id), emitter))
            return
        item = QueuedInput(request.input)
        (target.inbox.steer if request.policy == "steer" else target.inbox.enqueue)(item)
        place = self._line.join(turn, lambda: item.applied.done() and item.applied.result())
        turn.start(self._joined_turn(turn, place, target, item, request, emitter))

    async def _after_death(self, lost: str | None, body: Awaitable[Any]) -> Any:
        if lost is not None:
            await end_lease(self._parts.sessions, self._id, lost)
        return await body

    async def _own_turn(
        self, turn: LocalRun, place: Place[LocalRun], request: TurnRequest, emitter: Emitter
    ) -> ExecutionResult[Any]:
        result: ExecutionResult[Any] = await self._in_line(
            turn,
            place,
            emitter,
            lambda lease: self._new_turn(turn, request, emitter, lease),
            lambda: self._opening(turn, request),
        )
        return result

    async def _in_line(
        self,
        turn: LocalRun,
        place: Place[LocalRun],
        emitter: Emitter,
        body: Callable[[TurnLease], Awaitable[Any]],
        opening: Opening = lambda: None,
    ) -> Any:
        """Waits for the turn's place in line, then for the session's lease, and runs it."""
        try:
            if not place.ready:
                await unless_aborted(place.wait(), turn)
                if not place.ready:
                    return self._given_up(turn, emitter)
            lease = self._lease(turn.run_id, turn.signal, opening)
            await reported(lease.__aenter__(), emitter)
            try:
                return self._given_up(turn, emitter) if lease.given_up else await body(lease)
            finally:
                await lease.__aexit__()
        finally:
            turn.inbox.close()
            place.leave()

    async def _joined_turn(
        self, turn: LocalRun, place: Place[LocalRun], target: LocalRun, item: QueuedInput, request: TurnRequest, emitter: Emitter
    ) -> ExecutionResult[Any]:
        """Waits for the turn that was joined; its own turn after all when that one ended without taking the input.

        An abort ends the wait and touches neither the joined turn nor the input, which it may take all the same.
        """
        try:
            taken = await turn.signal.guard(taken_by(item, target))
            if taken or (not target.task.cancelled() and target.task.exception() is not None):
                place.leave()
                result = await reported(joined_result(turn, target), emitter)
                emitter.emit(RunDone, finish_reason=result.finish_reason, text=result.text, usage=EventUsage.of(result.usage))
                return result
        except Aborted:
            place.leave()
            return self._given_up(turn, emitter)
        place.stand_alone()
        return await self._own_turn(turn, place, request, emitter)

    # -------------------------------------------------------------------------------------------------------------- compaction

    async def compact(self, options: Compaction | None = None) -> tuple[SessionCompaction, list[Message]]:
        """Compacts the transcript now, by `options`, else by the agent's own. Turns that are asked for meanwhile wait."""
        if not self._line.idle:
            raise LoushoError(f"Session '{self._id}' cannot be compacted while a turn runs or waits.", code="LOUSHO_SESSION_BUSY")
        turn = LocalRun(new_id("run_"))
        place = self._line.reserve(turn)
        try:
            async with TurnLease(self._parts.sessions, self._id, turn.run_id, turn.signal, wait_ms=0, clock=self._clock) as lease:
                await self._nothing_pending(turn, lease)
                definition = self._definition if options is None else replace(self._definition, compaction=options)
                report, messages = await compact_session(lease, definition, self._id)
                if report.messages_after != report.messages_before:
                    await self._forget_old_turns()
                return report, messages
        finally:
            turn.inbox.close()
            place.leave()

    async def _nothing_pending(self, turn: LocalRun, lease: TurnLease) -> None:
        """Raises while a turn is unfinished: its record is found by the length of the transcript."""
        pending = await self.pending()
        if pending is None:
            await self._finish_pending(turn, Emitter(Stamp(turn.run_id)), lease)  # a finished one may only have to be saved
        elif pending.status == "awaiting-approval":
            raise awaiting(self._id, pending)
        else:
            raise turn_pending(self._id)
