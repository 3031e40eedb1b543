"""`SessionTurns`: what happens in a turn of a session, from the lease on its transcript to what it leaves in the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from lousho_ray.errors import SessionTurnFailedError
from lousho_ray.events import RunDone
from lousho_ray.handle import LocalRun
from lousho_ray.loop.checkpoint import OPENING, Recorder, RunFacts, check_record, opening_record, stored_messages, thaw
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.gate import tool_ran
from lousho_ray.loop.inbox import QueuedInput
from lousho_ray.loop.open import CallOptions, RunContext
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.run import run
from lousho_ray.loop.state import Decision, ResolvedApproval, RunDeps, RunState
from lousho_ray.messages import Message, complete_prefix
from lousho_ray.resuming import Unfinished, check_decider, check_edit, check_resumable, left_decision, open_pause, take_pause
from lousho_ray.session import DecisionRequest, TurnRequest, transcript
from lousho_ray.session_account import TurnAccount
from lousho_ray.session_compaction import Continuation, transcript_digest
from lousho_ray.session_records import SessionRecords
from lousho_ray.stores.entries import turn_key, turn_length
from lousho_ray.subagents import Spawner, open_with_subagents
from lousho_ray.turn_lease import TurnLease
from lousho_ray.turn_start import reported
from lousho_ray.turns import TurnLine

log = logging.getLogger("lousho_ray")


class SessionTurns(SessionRecords):
    """The turns of one session, each of which has the session's lease.

    An `anonymous` host continues the paused run of a plain `send()`, whose tools see no session.
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

    async def _new_turn(self, turn: LocalRun, request: TurnRequest, emitter: Emitter, lease: TurnLease) -> ExecutionResult[Any]:
        if self._parts.checkpoints is not None:
            left_behind = LocalRun(turn.run_id, abort=turn.signal)
            left_behind.trace = turn.trace
            silent = Emitter(Stamp(turn.run_id), spans=emitter.spans)
            found = await reported(self._after_pending(left_behind, silent, lease), emitter)
            if found is None:
                return self._given_up(turn, emitter)
            history = found
        else:
            history = await reported(lease.load(), emitter)
        facts = self._facts(request)
        recorder = self._recorder(turn_key(self._id, len(history)), facts, lease.begun)
        begin = self._begin(
            turn, emitter, lease, history, request.input, request.call, recorder, facts=facts, observed=request.observed
        )
        return await begin

    async def _begin(
        self,
        turn: LocalRun,
        emitter: Emitter,
        lease: TurnLease,
        history: list[Message],
        input: Sequence[Message],
        call: CallOptions,
        recorder: Recorder | None,
        *,
        facts: RunFacts,
        observed: bool,
        ready: Callable[[RunDeps], Awaitable[None]] | None = None,
    ) -> ExecutionResult[Any]:
        """Runs a turn from its start."""
        if recorder is not None:
            recorder.held = lease.held
        context = self._context(turn, emitter, facts, recorder)
        context.input, context.history, context.call = input, history, call
        context.approve_in_code = not observed
        account = TurnAccount(self._definition.session_limits, history, lease, self._clock)
        context.session_budget = account.budget
        context.commit = lambda result: self._commit(account.book(result), recorder, lease)
        return await self._drive(context, recorder, emitter, ready, account=account)

    def _given_up(self, turn: LocalRun, emitter: Emitter) -> ExecutionResult[Any]:
        """The end of a call that was aborted before its turn began: nothing in the store is its own."""
        emitter.emit(RunDone, finish_reason="aborted", text="")
        reason = None if turn.signal.reason is None else turn.signal.reason.to_dict()
        return ExecutionResult(finish_reason="aborted", abort_reason=reason, run_id=turn.run_id, agent_name=self._definition.name)

    async def _after_pending(self, turn: LocalRun, emitter: Emitter, lease: TurnLease) -> list[Message] | None:
        """Finishes what an earlier turn left behind; the transcript as it is then, `None` when the call was aborted meanwhile.

        Raises:
            SessionAwaitingApprovalError: It has paused on the way: the new turn would stand in its place.
        """
        history = await lease.load()
        assert self._parts.checkpoints is not None
        if await lease.unfinished(self._parts.checkpoints, len(history)) is None:
            return history
        result = await self._finish_pending(turn, emitter, lease, fresh=False)
        if result is not None and result.approval_id is not None and (pending := await self.pending()) is not None:
            raise awaiting(self._id, pending)
        return None if turn.signal.aborted and await self.pending() is not None else await lease.load()

    async def _finish_pending(
        self, turn: LocalRun, emitter: Emitter, lease: TurnLease, *, fresh: bool = True, lost: str | None = None
    ) -> ExecutionResult[Any] | None:
        """Finishes the turn an earlier process (or a failure) left behind; `None` when there is none.

        `fresh` says that this is a `resume()`, which also retries a turn that failed for good; `lost` is the run of a decider that
        has died.
        """
        checkpoints = self._parts.checkpoints
        if checkpoints is None:
            return None
        history = await lease.load()
        key = turn_key(self._id, len(history))
        saved = await checkpoints.load(key)
        if saved is None:
            return None
        pending = PendingTurn.of(check_record(saved))
        decided: Mapping[str, Decision] = {}
        if pending.status == "awaiting-approval":
            decided = await left_decision(self._parts.approvals, saved, self._clock.wall(), lost)
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
        if saved.get(OPENING):
            return await self._begin_again(turn, emitter, lease, history, saved, fresh=fresh)
        left = self._unfinished(saved, turn, key, saved)
        assert left.recorder is not None
        left.recorder.own = fresh
        left.decisions.update(decided or decisions_of(saved))
        return await self._continue(turn, emitter, lease, left, lambda deps: self._check(left, deps))

    async def _begin_again(
        self, turn: LocalRun, emitter: Emitter, lease: TurnLease, history: list[Message], saved: Mapping[str, Any], *, fresh: bool
    ) -> ExecutionResult[Any]:
        """Runs a turn of which nothing but its input was recorded."""
        facts = facts_of(saved, self._definition, self._name)
        recorder = self._recorder(saved["sessionId"], facts, saved)
        assert recorder is not None
        recorder.own = fresh
        asked = stored_messages(saved)
        call = CallOptions(principal=facts.principal, metadata=facts.metadata)

        async def check(deps: RunDeps) -> None:
            check_resumable(self._definition, saved, RunState(turn.run_id, [], opened_at=0), deps)

        return await self._begin(turn, emitter, lease, history, asked, call, recorder, facts=facts, observed=False, ready=check)

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
            recorder.held = lease.held
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
        try:
            state, deps = await reported(opening, emitter)
        except Exception:
            if recorder is not None and recorder.begun and ready is None:
                await recorder.delete()  # A turn that could not begin leaves nothing behind.
            raise
        if ready is not None:
            await reported(ready(deps), emitter)
        elif recorder is not None and not recorder.begun:
            await reported(recorder.save(state), emitter)
        try:
            return await run(state, deps)
        except Exception as error:
            if recorder is not None:
                await recorder.noted()  # the input that came last stays with the turn
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
            if recorder is not None and await lease.held():
                await (recorder.delete() if recorder.own else recorder.stopped(result))
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
        # One that is finished on the way keeps the lease for the turn that comes after it.
        if recorder.own and await lease.end(messages, recorder, shortened=shortened):
            return
        replaces = transcript_digest(await lease.load()) if shortened else None
        # Both in one go: either alone is enough to find the turn again after a crash.
        await asyncio.gather(recorder.finished(result, replaces), lease.save(messages))
        await recorder.delete()
        if shortened:
            await self._forget_old_turns()

    def _opening(self, turn: LocalRun, request: TurnRequest) -> dict[str, Any] | None:
        """What is saved with the lease of a turn, where the store can do both in one step."""
        if self._parts.turns is None or self._parts.checkpoints is None:
            return None
        return opening_record(self._facts(request), turn.run_id, request.input)

    def _facts(self, request: TurnRequest) -> RunFacts:
        call, asked = request.call, self._definition
        return RunFacts(asked.name, self._name, call.principal, call.metadata, asked.fingerprint)

    def _recorder(self, key: str, facts: RunFacts, saved: Mapping[str, Any] | None = None) -> Recorder | None:
        store, asked = self._parts.checkpoints, self._definition
        if store is None:
            return None
        if saved is not None:
            check_record(saved)
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
