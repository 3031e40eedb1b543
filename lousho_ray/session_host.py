"""`SessionHost`: runs the turns of a session, one at a time, and keeps what they leave in a store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lousho_ray.cancellation import Aborted
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import (
    PendingTurn,
    StoredPauses,
    StoreParts,
    awaiting,
    decisions_of,
    facts_of,
    failed_for_good,
    settled_decision,
)
from lousho_ray.errors import LoushoError, SessionTurnFailedError
from lousho_ray.events import EventUsage, RunDone
from lousho_ray.handle import LocalRun
from lousho_ray.ids import new_id
from lousho_ray.loop.checkpoint import Recorder, RunFacts, thaw
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.gate import tool_ran
from lousho_ray.loop.inbox import QueuedInput
from lousho_ray.loop.open import CallOptions, RunContext
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.run import run
from lousho_ray.loop.state import Decision, ResolvedApproval, RunDeps
from lousho_ray.messages import Message, complete_prefix
from lousho_ray.options import Compaction
from lousho_ray.ports import Observer
from lousho_ray.resuming import Unfinished, check_decider, check_edit, check_resumable, left_decision, open_pause, take_pause
from lousho_ray.session import DecisionRequest, Request, ResumeRequest, TurnRequest, transcript
from lousho_ray.session_account import TurnAccount
from lousho_ray.session_compaction import Continuation, SessionCompaction, compact_session, transcript_digest, turn_pending
from lousho_ray.session_records import SessionRecords
from lousho_ray.stores.entries import turn_key, turn_length
from lousho_ray.subagents import Spawner, open_with_subagents
from lousho_ray.turn_lease import TurnLease, end_lease
from lousho_ray.turn_start import begin_turn, joined_result, refuse_joining, reported, taken_by, unless_aborted
from lousho_ray.turns import Place, TurnLine

T = TypeVar("T")

log = logging.getLogger("lousho_ray")


class SessionHost(SessionRecords):
    """Runs the turns of one session: one at a time, in the order of the calls.

    A finished turn is saved in one write before its `run.done` is reported. An aborted turn saves nothing. With a checkpoint store
    a turn is durable: what it has done so far is stored as it goes on, and a later call finishes it. An `anonymous` host continues
    the paused run of a plain `send()`, whose tools see no session.
    """

    def __init__(
        self,
        definition: AgentDefinition,
        session_id: str,
        parts: StoreParts,
        line: TurnLine[LocalRun],
        spawner: Callable[[], Spawner] | None,
        *,
        anonymous: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(definition, session_id, parts, line, clock)
        self._name = None if anonymous else session_id
        self._spawner = spawner

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
                body = self._in_line(turn, place, emitter, lambda lease: self._finish_pending(turn, emitter, lease))
                turn.start(self._after_death(request.lost, body))
        return turn

    async def set_mode(self, mode: Any) -> None:
        """Switches the permission mode of the turns that run or wait, from their next tool call on."""
        for turn in self._line.turns:
            turn.mode.set(mode)

    def _enter_or_join(self, turn: LocalRun, request: TurnRequest, emitter: Emitter) -> None:
        target = self._line.last() if request.policy != "wait" else None
        if target is None:
            place = self._line.enter(turn)
            turn.start(self._in_line(turn, place, emitter, lambda lease: self._new_turn(turn, request, emitter, lease)))
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

    async def _in_line(
        self, turn: LocalRun, place: Place[LocalRun], emitter: Emitter, body: Callable[[TurnLease], Awaitable[Any]]
    ) -> Any:
        """Waits for the turn's place in line, then for the session's lease, and runs it."""
        try:
            if not place.ready:
                await unless_aborted(place.wait(), turn)
            lease = self._lease(turn.run_id, turn.signal)
            await reported(lease.__aenter__(), emitter)
            try:
                return await body(lease)
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
        except Aborted as aborted:
            place.leave()
            emitter.emit(RunDone, finish_reason="aborted", text="")
            reason = aborted.reason.to_dict()
            return ExecutionResult(
                finish_reason="aborted", abort_reason=reason, run_id=turn.run_id, agent_name=self._definition.name
            )
        place.stand_alone()
        own: ExecutionResult[Any] = await self._in_line(
            turn, place, emitter, lambda lease: self._new_turn(turn, request, emitter, lease)
        )
        return own

    # --------------------------------------------------------------------------------------------------------------- the turns

    async def _new_turn(self, turn: LocalRun, request: TurnRequest, emitter: Emitter, lease: TurnLease) -> ExecutionResult[Any]:
        if self._parts.checkpoints is not None:
            left_behind = LocalRun(turn.run_id, abort=turn.signal)
            left_behind.trace = turn.trace
            silent = Emitter(Stamp(turn.run_id), spans=emitter.spans)
            history = await reported(self._after_pending(left_behind, silent, lease), emitter)
        else:
            history = await reported(lease.load(), emitter)
        facts = RunFacts(
            self._definition.name, self._name, request.call.principal, request.call.metadata, self._definition.fingerprint
        )
        recorder = self._recorder(turn_key(self._id, len(history)), facts)
        context = self._context(turn, emitter, facts, recorder)
        context.input, context.history, context.call = request.input, history, request.call
        context.approve_in_code = not request.observed
        account = TurnAccount(self._definition.session_limits, history, lease, self._clock)
        context.session_budget = account.budget
        context.commit = lambda result: self._commit(account.book(result), recorder, lease)
        return await self._drive(context, recorder, emitter, account=account)

    async def _after_pending(self, turn: LocalRun, emitter: Emitter, lease: TurnLease) -> list[Message]:
        """Finishes what an earlier turn left behind; the transcript as it is then."""
        history = await lease.load()
        assert self._parts.checkpoints is not None
        if await lease.unfinished(self._parts.checkpoints, len(history)) is None:
            return history
        await self._finish_pending(turn, emitter, lease, fresh=False)
        return await lease.load()

    async def _finish_pending(
        self, turn: LocalRun, emitter: Emitter, lease: TurnLease, *, fresh: bool = True
    ) -> ExecutionResult[Any] | None:
        """Finishes the turn an earlier process (or a failure) left behind; `None` when there is none.

        `fresh` says that this is a `resume()`, which also retries a turn that failed for good.
        """
        checkpoints = self._parts.checkpoints
        if checkpoints is None:
            return None
        history = await lease.load()
        key = turn_key(self._id, len(history))
        saved = await checkpoints.load(key)
        if saved is None:
            return None
        pending = PendingTurn.of(saved)
        decided: Mapping[str, Decision] = {}
        if pending.status == "awaiting-approval":
            decided = await left_decision(self._parts.approvals, saved, self._clock.wall())
            if not decided:
                raise awaiting(self._id, pending)
        if pending.last_error is not None and not fresh:
            raise SessionTurnFailedError(
                f"The last turn of session '{self._id}' failed and was not retried: {pending.last_error.get('message')}",
                last_error=pending.last_error,
                attempts=pending.attempts,
            )
        if pending.status == "finished":
            if saved.get("replaces") in (None, transcript_digest(history)):  # else a later turn has come to this length again
                await lease.save(complete_prefix(thaw(saved, turn.run_id)[0].messages[1:]))
            await checkpoints.delete(key)
            return None
        left = self._unfinished(saved, turn, key, saved)
        left.decisions.update(decided or decisions_of(saved))
        return await self._continue(turn, emitter, lease, left, lambda deps: self._check(left, deps))

    async def _decided_turn(
        self, turn: LocalRun, request: DecisionRequest, emitter: Emitter, lease: TurnLease
    ) -> ExecutionResult[Any]:
        """Takes a paused turn up again with the decision. Of several deciders one gets it."""
        pause = await reported(open_pause(self._parts, request.approval_id, self._name), emitter)
        decision = settled_decision(request.decision, pause.pending, self._clock.wall())
        left = self._unfinished(pause.snapshot, turn, str(pause.snapshot.get("sessionId")), pause.saved)
        left.decisions[pause.call_id] = decision
        left.resolved = ResolvedApproval(
            request.approval_id, pause.pending["toolCallId"], pause.pending["toolName"], decision, pause.pending.get("createdAt")
        )

        async def take(deps: RunDeps) -> None:
            await self._check(left, deps, pause.call_id)
            check_decider(pause, decision)
            check_edit(self._definition, pause, left.state, decision, deps)
            await take_pause(self._parts.approvals, pause, decision, left.recorder, left.state, left.waiting)

        return await self._continue(turn, emitter, lease, left, take, observed=request.observed)

    def _unfinished(self, record: Mapping[str, Any], turn: LocalRun, key: str, saved: Mapping[str, Any] | None) -> Unfinished:
        """A run from its checkpoint, or from the snapshot of its pause. Without a checkpoint (`saved`) it is not recorded."""
        facts = facts_of(record, self._definition, self._name)
        return Unfinished.of(record, turn.run_id, facts, None if saved is None else self._recorder(key, facts, saved))

    async def _check(self, left: Unfinished, deps: RunDeps, decided: str | None = None) -> None:
        check_resumable(self._definition, left.record, left.state, deps, decided or next(iter(left.decisions), None))

    async def _continue(
        self,
        turn: LocalRun,
        emitter: Emitter,
        lease: TurnLease,
        left: Unfinished,
        ready: Callable[[RunDeps], Awaitable[None]],
        *,
        call: CallOptions | None = None,
        observed: bool = False,
    ) -> ExecutionResult[Any]:
        """Drives an unfinished turn on from its state, once it is `ready`."""
        recorder = left.recorder
        context = self._context(turn, emitter, left.facts, recorder)
        context.resume, context.decisions, context.resolved = left.state, left.decisions, left.resolved
        context.approve_in_code = not observed
        if recorder is not None:
            recorder.decisions.update(left.decisions)
        context.call = replace(call or CallOptions(), principal=left.facts.principal, metadata=left.facts.metadata)
        begun = Continuation.of(left.state.messages) if recorder is None else None
        history = await reported(lease.load(), emitter)
        account = TurnAccount(self._definition.session_limits, history, lease, self._clock, left=left, continuation=begun)
        context.session_budget = account.budget
        context.commit = lambda result: self._commit(account.book(result), recorder, lease, continuation=begun)
        if left.waiting:
            turn.inbox.enqueue(QueuedInput(left.waiting, restored=True))
        return await self._drive(context, recorder, emitter, ready, account=account)

    async def _drive(
        self,
        context: RunContext,
        recorder: Recorder | None,
        emitter: Emitter,
        ready: Callable[[RunDeps], Awaitable[None]] | None = None,
        *,
        account: TurnAccount | None = None,
    ) -> ExecutionResult[Any]:
        spawner = self._spawner() if self._spawner is not None else None
        depth = self._definition.max_subagent_depth
        opening = open_with_subagents(self._definition, "", context, depth, spawner)
        state, deps = await reported(opening, emitter)
        if ready is not None:
            await reported(ready(deps), emitter)
        elif recorder is not None:
            await reported(recorder.save(state), emitter)
        try:
            return await run(state, deps)
        except Exception as error:
            if recorder is None and account is not None:
                await account.failed(state)
            elif recorder is not None and failed_for_good(error):
                await recorder.failed(error)
            raise

    async def _commit(
        self, result: ExecutionResult[Any], recorder: Recorder | None, lease: TurnLease, continuation: Continuation | None = None
    ) -> None:
        """Saves a turn that has ended. An aborted one is dropped; a durable one that pauses stays in its checkpoint."""
        if result.finish_reason == "aborted":
            skipped = {message.tool_call_id for message in result.messages if message.role == "tool" and not tool_ran(message)}
            if ran := {call.name for call in result.tool_calls if call.id not in skipped}:
                log.warning("Session %r dropped an aborted turn whose tools had run: %s", self._id, ", ".join(sorted(ran)))
            if recorder is not None:
                await recorder.delete()
            return
        if result.finish_reason == "awaiting-approval" and recorder is not None:
            return
        messages = transcript(result)
        if continuation is not None:
            messages = continuation.transcript(await lease.load(), messages)
        if recorder is None:
            await lease.save(messages)
            return
        shortened = len(messages) <= turn_length(recorder.key)
        if await lease.end(messages, recorder, shortened=shortened):
            return
        replaces = transcript_digest(await lease.load()) if shortened else None
        # Both in one go: either alone is enough to find the turn again after a crash.
        await asyncio.gather(recorder.finished(result, replaces), lease.save(messages))
        await recorder.delete()
        if shortened:
            await self._forget_old_turns()

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

    def _recorder(self, key: str, facts: RunFacts, saved: Mapping[str, Any] | None = None) -> Recorder | None:
        store, asked = self._parts.checkpoints, self._definition
        if store is None:
            return None
        return Recorder(store, key, facts, saved=saved, timeout_ms=asked.store_timeout_ms, keeps_results=asked.spill_tool_results)

    def _context(self, turn: LocalRun, emitter: Emitter, facts: RunFacts, recorder: Recorder | None) -> RunContext:
        key = None if recorder is None else recorder.key
        return RunContext(
            run_id=turn.run_id,
            input=(),
            emitter=emitter,
            abort=turn.signal,
            inbox=turn.inbox,
            mode=turn.mode,
            trace=turn.trace,
            session_id=self._name,
            clock=self._clock,
            recorder=recorder,
            pauses=StoredPauses(self.approvals, facts, self._definition, key=key, clock=self._clock),
        )
