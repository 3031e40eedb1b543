"""Durable runs: the parts of a store a run uses, how a pause is written down, and what an unfinished run left behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from lousho_ray.clock import SYSTEM_CLOCK, Clock, timestamp
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import CompactedLLMProviderError, LoushoError, ResumeToolMissingError, SessionAwaitingApprovalError
from lousho_ray.ids import new_id
from lousho_ray.loop.checkpoint import RunFacts, freeze
from lousho_ray.loop.state import Ask, Decision, RunState
from lousho_ray.messages import Message, ToolCall, decode_bytes, encode_bytes, unanswered_calls
from lousho_ray.ports import ApprovalStore, CheckpointStore, SessionStore
from lousho_ray.stores.durable_turns import DurableTurns, turns_of
from lousho_ray.stores.json_form import damaged
from lousho_ray.stores.memory import MemorySessionStore
from lousho_ray.stores.parts import has_parts, part_of
from lousho_ray.stores.saving import save_in_time
from lousho_ray.tools.registry import find_tool


@dataclass(frozen=True, slots=True)
class StoreParts:
    """Where a session keeps its transcript, its unfinished turn (`None`: not durable) and its pauses."""

    sessions: SessionStore
    checkpoints: CheckpointStore | None
    approvals: ApprovalStore
    turns: DurableTurns | None = None
    """Both ends of a turn in one step each, where the store has that."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Which object each part of a session is taken from: a store, or a part by itself.

    `None` means: transcripts and pauses in memory, and no checkpoints.
    """

    sessions: Any = None
    checkpoints: Any = None
    approvals: Any = None

    @classmethod
    def chosen(cls, definition: AgentDefinition, store: Any = None, checkpoint_store: Any = None) -> Sources:
        """Part by part: what a session was given, else the agent's."""
        whole = store if has_parts(store) else None
        return cls(
            _first("sessions", store, definition.store),
            _first("checkpoints", checkpoint_store, whole, definition.store),
            _first("approvals", whole, definition.approval_store, definition.store),
        )

    def parts(self, approvals: ApprovalStore) -> StoreParts:
        """The parts themselves, in this process."""
        sessions, pauses = part_of(self.sessions, "sessions"), part_of(self.approvals, "approvals")
        return StoreParts(
            MemorySessionStore() if sessions is None else sessions,
            part_of(self.checkpoints, "checkpoints"),
            approvals if pauses is None else pauses,
            turns_of(self.sessions) if self.sessions is self.checkpoints else None,
        )


def _first(name: str, *sources: Any) -> Any:
    return next((source for source in sources if part_of(source, name) is not None), None)


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A turn that has not ended: `session.pending()`."""

    status: str
    approval_id: str | None = None
    approval_kind: str | None = None
    last_error: Mapping[str, Any] | None = None
    attempts: int = 0

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> PendingTurn:
        return cls(
            checkpoint.get("status", "in-progress"),
            checkpoint.get("approvalId"),
            checkpoint.get("approvalKind"),
            checkpoint.get("lastError"),
            checkpoint.get("attempts", 0),
        )


class StoredPauses:
    """Writes pauses into an approval store, which is only reached when there is one to write."""

    def __init__(
        self,
        store: Callable[[], Awaitable[ApprovalStore]],
        facts: RunFacts,
        definition: AgentDefinition,
        *,
        key: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = store
        self._facts = facts
        self._key = key
        self._ttl_ms = definition.approval_ttl_ms
        self._timeout_ms = definition.store_timeout_ms
        self._clock = clock

    async def open(self, state: RunState, ask: Ask, waiting: tuple[Message, ...]) -> Mapping[str, Any]:
        """Saves the pause and the snapshot to go on from; returns the pending record."""
        now = self._clock.wall()
        pending: dict[str, Any] = {
            "id": new_id("appr_"),
            "toolCallId": ask.decides.id,
            "toolName": ask.decides.name,
            "args": encode_bytes(dict(ask.args)),
            "agentId": self._facts.agent_id,
            "createdAt": timestamp(now),
            "kind": ask.kind,
        }
        if ask.path:
            pending["subagentPath"] = list(ask.path)
        if (ttl_ms := ask.ttl_ms if ask.ttl_ms is not None else self._ttl_ms) is not None:
            pending["expiresAt"] = timestamp(now + ttl_ms / 1000)
        if ask.decided_by is not None:
            pending["decidedBy"] = ask.decided_by
        if ask.question is not None:
            pending["question"] = dict(ask.question)
        if self._facts.principal is not None:
            pending["principal"] = encode_bytes(self._facts.principal)
        store, snapshot = await self._store(), self._snapshot(state, ask, waiting)
        await save_in_time(lambda: store.save(pending, snapshot), self._timeout_ms, f"Approval '{pending['id']}'")
        return pending

    def _snapshot(self, state: RunState, ask: Ask, waiting: tuple[Message, ...]) -> dict[str, Any]:
        snapshot = freeze(state)
        snapshot["messages"] += [message.to_dict() for message in waiting]
        calls = unanswered_calls(state.messages)
        snapshot["pausedToolCall"] = ask.call.id
        snapshot["pausedTool"] = ask.decides.name
        snapshot["pausedArgs"] = encode_bytes(dict(ask.args))
        snapshot["remainingToolCalls"] = [call.id for call in calls if call.id != ask.call.id]
        snapshot["metadata"] = encode_bytes(dict(self._facts.metadata))
        if self._key is not None:
            snapshot["sessionId"] = self._key
        if self._facts.session_id is not None and self._facts.session_id != self._key:
            snapshot["session"] = self._facts.session_id
        return snapshot | self._facts.optional()


def awaiting(session_id: str, pending: PendingTurn) -> SessionAwaitingApprovalError:
    kind = pending.approval_kind or "tool"
    return SessionAwaitingApprovalError(
        f"Session '{session_id}' waits for a decision on approval '{pending.approval_id}'.",
        session_id=session_id,
        approval_id=pending.approval_id or "",
        approval_kind=kind,
    )


def approval_not_found(approval_id: str) -> LoushoError:
    return LoushoError(f"There is no open approval '{approval_id}'.", code="LOUSHO_APPROVAL_NOT_FOUND")


def approval_orphaned(approval_id: str) -> LoushoError:
    return LoushoError(
        f"The turn that paused for approval '{approval_id}' no longer exists; the tool was not run.",
        code="LOUSHO_APPROVAL_ORPHANED",
    )


def settled_decision(decision: Decision, pending: Mapping[str, Any], now: float) -> Decision:
    """The decision on what was asked, or a denial when it comes at or after the expiry. A late rejection stays a rejection."""
    expires_at = pending.get("expiresAt")
    if expires_at is not None and decision.approved and timestamp(now) >= expires_at:
        return Decision(False, decision.note, decision.by, expired=True)
    return replace(decision, asked=pending.get("args")) if decision.approved else decision


def decisions_of(checkpoint: Mapping[str, Any]) -> dict[str, Decision]:
    """The decisions a run in progress was taken up with: calls decided on are not asked for again."""
    what = f"The record of run {checkpoint.get('sessionId')!r}"
    return {call_id: read_decision(decision, what) for call_id, decision in checkpoint.get("decisions", {}).items()}


def read_decision(record: Mapping[str, Any], what: str) -> Decision:
    """A stored decision, exactly as one was written: nothing else may let a call run.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`, naming `what`: the record is damaged.
    """
    try:
        made = Decision(**record)
    except TypeError as error:
        raise damaged(what, f"it has a decision that is none ({error})") from error
    valid = (
        all(isinstance(value, bool) for value in (made.approved, made.expired))
        and all(isinstance(value, str | None) for value in (made.note, made.by))
        and all(value is None or isinstance(value, Mapping) for value in (made.args, made.asked))
        and made.remember in (None, "args", "tool")
    )
    if not valid:
        raise damaged(what, "it has a decision with a value that none has")
    return made


def check_pending(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored pause, with what a decision on it hangs on.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the record is damaged.
    """
    what = f"The record of approval {record.get('id')!r}"
    for key in ("id", "toolCallId", "toolName"):
        if not isinstance(record.get(key), str):
            raise damaged(what, f"its {key} is no text")
    if not isinstance(record.get("args", {}), Mapping) or not isinstance(record.get("subagentPath", []), list | tuple):
        raise damaged(what, "its args or its subagentPath have another form")
    if record.get("kind", "tool") not in ("tool", "question") or record.get("decidedBy") not in (None, "other"):
        raise damaged(what, "its kind or its decidedBy is unknown")
    for key in ("createdAt", "expiresAt"):
        try:
            datetime.fromisoformat(record.get(key, "1970-01-01"))
        except (TypeError, ValueError) as error:
            raise damaged(what, f"its {key} is no time ({error})") from error
    return record


def failed_for_good(error: BaseException) -> bool:
    """Whether a turn failed in a way that trying it again cannot mend: credentials, an invalid request, a context overflow."""
    if not isinstance(error, CompactedLLMProviderError) or error.compacted is None:
        return False
    status = error.compacted.status
    if error.compacted.category in ("auth-failure", "context-length-exceeded"):
        return True
    return status is not None and 400 <= status < 500 and status not in (408, 409, 425, 429)


def check_tools(state: RunState, tools: Mapping[str, Any], decided: str | None) -> None:
    """A resumed run needs the tools of its open calls.

    Raises:
        ResumeToolMissingError: `LOUSHO_RESUME_TOOL_MISSING`.
    """
    open_calls: tuple[ToolCall, ...] = unanswered_calls(state.messages)
    for call in open_calls:
        known = any(record.id == call.id for record in state.tool_calls) or call.id == decided
        if known and find_tool(tools, call.name) is None:
            raise ResumeToolMissingError(
                f"The run waits on a call of tool '{call.name}', which the agent no longer has.", tool_name=call.name
            )


def facts_of(record: Mapping[str, Any], definition: AgentDefinition, session_id: str | None) -> RunFacts:
    """As whom an unfinished run goes on: as the caller it was started by, with the agent of now."""
    metadata, state = decode_bytes(record.get("metadata", {})), decode_bytes(record.get("businessState"))
    return RunFacts(definition.name, session_id, decode_bytes(record.get("principal")), metadata, definition.fingerprint, state)
