"""Durable runs of plain sends: `agent.send(input, session_id=...)` and `agent.resume(id)`.

The checkpoint of such a run is the conversation itself: an unfinished one goes on, a finished one takes new input, a paused one
waits. The runs of an id go through the same host as the turns of a session; what they read and leave behind differs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import PendingTurn, StoreParts, awaiting, decisions_of
from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.handle import LocalRun
from lousho_ray.ids import is_session_id
from lousho_ray.loop.checkpoint import Recorder, RunFacts, stored_messages
from lousho_ray.loop.emitter import Emitter
from lousho_ray.loop.open import CallOptions
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.state import RunDeps, RunState
from lousho_ray.messages import Message, decode_bytes
from lousho_ray.option_checks import UNSET
from lousho_ray.ports import Observer
from lousho_ray.resuming import left_decision
from lousho_ray.session import DecisionRequest, Request, TurnRequest
from lousho_ray.session_compaction import Continuation
from lousho_ray.session_host import SessionHost
from lousho_ray.stores.entries import turn_key
from lousho_ray.subagents import Spawner
from lousho_ray.turn_lease import TurnLease
from lousho_ray.turn_start import begin_turn, reported
from lousho_ray.turns import Place, TurnLine


class RunLink:
    """Starts the runs of one id, one at a time. Nothing is opened before the first of them.

    `anonymous` is for the paused run of a plain `send()`, whose tools see no session.
    """

    def __init__(
        self,
        definition: AgentDefinition,
        id: str,
        parts: Callable[[], Awaitable[StoreParts]],
        line: TurnLine[LocalRun],
        spawner: Callable[[], Spawner],
        *,
        anonymous: bool = False,
    ) -> None:
        self._anonymous = anonymous
        self._definition = definition
        self._id = id
        self._parts = parts
        self._line = line
        self._spawner = spawner

    def start(self, request: Request, observers: Sequence[Observer]) -> LocalRun:
        """Starts a run. Its result raises `LOUSHO_SESSION_BUSY` while another one of this id is going on; a decision waits for it,
        to find that somebody else was first."""
        turn = LocalRun(request.run_id)
        emitter = begin_turn(turn, request, self._definition, observers)
        if self._line.idle or isinstance(request, DecisionRequest):
            turn.start(self._run(turn, self._line.enter(turn), request, emitter))
        else:
            turn.start(reported(_busy(self._id), emitter))
        return turn

    async def approval(self, approval_id: str) -> Mapping[str, Any] | None:
        record = await (await self._parts()).approvals.load(approval_id)
        return None if record is None else record[0]

    async def _run(self, turn: LocalRun, place: Place[LocalRun], request: Request, emitter: Emitter) -> Any:
        try:
            parts = await reported(self._parts(), emitter)
        except BaseException:
            place.leave()
            raise
        host = RunHost(self._definition, self._id, parts, self._line, self._spawner, anonymous=self._anonymous)
        return await host.run(turn, place, request, emitter)


class RunHost(SessionHost):
    """Carries out the runs of one id."""

    async def run(self, turn: LocalRun, place: Place[LocalRun], request: Request, emitter: Emitter) -> Any:
        """The run that a request asks for, when it is its turn."""

        def body(lease: TurnLease) -> Awaitable[Any]:
            if isinstance(request, TurnRequest):
                return self._new_turn(turn, request, emitter, lease)
            if isinstance(request, DecisionRequest):
                return self._decided_turn(turn, request, emitter, lease)
            return self._finish_pending(turn, emitter, lease, lost=request.lost, business_state=request.business_state)

        return await self._in_line(turn, place, emitter, body)

    async def _new_turn(self, turn: LocalRun, request: TurnRequest, emitter: Emitter, lease: TurnLease) -> ExecutionResult[Any]:
        saved = await reported(self._record(), emitter)
        if saved is not None and saved.get("status", "in-progress") != "finished":
            await reported(_as(request.call.principal, saved, self._id), emitter)
            return await self._go_on(turn, emitter, lease, saved, request, request.call)
        call = request.call
        facts = RunFacts(self._definition.name, self._name, call.principal, call.metadata, self._definition.fingerprint)
        facts.business_state = _kept(call.business_state, saved)
        recorder = self._recorder(self._id, facts, saved)
        if recorder is not None:
            recorder.held = lease.held
        context = self._context(turn, emitter, facts, recorder)
        context.input, context.call, context.approve_in_code = request.input, call, not request.observed
        context.commit = lambda result: self._commit(result, recorder, lease)
        if saved is None or recorder is None:
            return await self._drive(context, recorder, emitter)
        told = stored_messages(saved)
        state = context.resume = RunState(turn.run_id, [*told, *_new_part(told, request.input)], opened_at=len(told))
        return await self._drive(context, recorder, emitter, lambda deps: recorder.save(state))

    async def _finish_pending(
        self,
        turn: LocalRun,
        emitter: Emitter,
        lease: TurnLease,
        *,
        fresh: bool = True,
        lost: str | None = None,
        business_state: Any = UNSET,
    ) -> ExecutionResult[Any] | None:
        saved = await self._record()
        if saved is None or saved.get("status") == "finished":
            return None
        return await self._go_on(turn, emitter, lease, saved, None, CallOptions(business_state=business_state), lost)

    async def _go_on(
        self,
        turn: LocalRun,
        emitter: Emitter,
        lease: TurnLease,
        saved: Mapping[str, Any],
        request: TurnRequest | None,
        call: CallOptions,
        lost: str | None = None,
    ) -> ExecutionResult[Any]:
        """Goes on with an unfinished run. New input joins behind its open calls; the input it was started with is a retry."""
        left = self._unfinished(saved, turn, self._id, saved)
        left.facts.business_state = _kept(call.business_state, saved)
        left.decisions.update(await self._decisions(saved, lost) or decisions_of(saved))
        if request is not None and not _same(request.input, _opening(left.state)):
            left.waiting = (*left.waiting, *_new_part([*left.state.messages, *left.waiting], request.input))

        async def ready(deps: RunDeps) -> None:
            await self._check(left, deps)
            if left.waiting and left.recorder is not None:
                await left.recorder.save(left.state, lambda: left.waiting)

        observed = request is not None and request.observed
        return await self._continue(turn, emitter, lease, left, ready, call=call, observed=observed)

    async def _decisions(self, saved: Mapping[str, Any], lost: str | None) -> Mapping[str, Any]:
        """The decision that a paused run was left with; raises while there is none."""
        if saved.get("status") != "awaiting-approval":
            return {}
        decided = await left_decision(self._parts.approvals, saved, self._clock.wall(), lost)
        if not decided:
            raise awaiting(self._id, PendingTurn.of(saved))
        return decided

    async def _record(self) -> dict[str, Any] | None:
        """The checkpoint of the run. A paused turn of the session of this name locks the id."""
        checkpoints = self._parts.checkpoints
        assert checkpoints is not None
        key = turn_key(self._id, len(await self.load())) if is_session_id(self._id) else None
        paused = None if key is None else await checkpoints.load(key)
        if paused is not None and paused.get("status") == "awaiting-approval":
            raise awaiting(self._id, PendingTurn.of(paused))
        return await checkpoints.load(self._id)

    async def _commit(
        self, result: ExecutionResult[Any], recorder: Recorder | None, lease: TurnLease, continuation: Continuation | None = None
    ) -> None:
        """A finished run stays in its checkpoint: it is the conversation. An aborted one can be taken up again."""
        if recorder is None or result.finish_reason == "awaiting-approval":
            return
        if result.finish_reason == "aborted":
            if await lease.held():
                await recorder.stopped(result)
        else:
            await recorder.finished(result)


def _kept(given: Any, saved: Mapping[str, Any] | None) -> Any:
    """The business state of a run that goes on: what was given, `None` included, else what was stored."""
    return decode_bytes((saved or {}).get("businessState")) if given is UNSET else given


async def _busy(id: str) -> ExecutionResult[Any]:
    raise LoushoError(f"A run with session_id '{id}' is going on; await it, or use another id.", code="LOUSHO_SESSION_BUSY")


async def _as(principal: Any, saved: Mapping[str, Any], id: str) -> None:
    """An unfinished run goes on as the caller it was started by."""
    if principal is not None and principal != decode_bytes(saved.get("principal")):
        raise ConfigurationError(
            f"The unfinished run '{id}' belongs to another principal; finish it as that one.", field="principal"
        )


def _opening(state: RunState) -> list[Message]:
    """The user messages that opened a run."""
    opening: list[Message] = []
    for message in state.messages[state.opened_at :]:
        if message.role != "user":
            break
        opening.append(message)
    return opening


def _new_part(told: Sequence[Message], input: Sequence[Message]) -> list[Message]:
    """What `input` adds to a conversation: it may repeat the history, and its system messages do not count any more."""
    history = [message for message in told if message.role != "system"]
    given = [message for message in input if message.role != "system"]
    if history and len(given) >= len(history) and _same(given[: len(history)], history):
        return given[len(history) :]
    return given


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether messages have the same roles and contents."""
    return len(one) == len(other) and all(_core(left) == _core(right) for left, right in zip(one, other, strict=True))


def _core(message: Message) -> dict[str, Any]:
    kept = replace(message, metadata=None, reasoning=()).to_dict()
    return {key: value for key, value in kept.items() if key in ("role", "content", "toolCalls", "toolCallId")}
