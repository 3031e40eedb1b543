"""Taking an unfinished run up again: which pause a decision is on, and what must hold before anything of the run goes on.

Everything is checked before a pause is taken from its store, so a run that is refused can still be taken up by the right agent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import (
    StoreParts,
    approval_not_found,
    approval_orphaned,
    check_pending,
    check_tools,
    read_decision,
)
from lousho_ray.errors import AgentDriftError, LoushoError, ResumeToolMissingError, StorageError
from lousho_ray.fingerprint import Drift, drift
from lousho_ray.loop.checkpoint import Recorder, RunFacts, check_record, thaw
from lousho_ray.loop.state import Decision, ResolvedApproval, RunDeps, RunState
from lousho_ray.messages import Message, tool_result, unanswered_calls
from lousho_ray.ports import ApprovalStore
from lousho_ray.tools.registry import find_tool
from lousho_ray.tools.results import error_result
from lousho_ray.tools.spill import READ_RESULT

log = logging.getLogger("lousho_ray")

CLAIM_TIMEOUT_S = 60.0
"""How long a decider has, from taking a pause to writing its decision into the checkpoint, before it counts as dead."""


@dataclass(frozen=True, slots=True)
class Pause:
    """An open pause. `saved` is the checkpoint of its run, when the run is durable."""

    pending: Mapping[str, Any]
    snapshot: Mapping[str, Any]
    saved: Mapping[str, Any] | None = None

    @property
    def call_id(self) -> str:
        """The call of the run itself that is paused: the one to decide on, or the one that runs the sub-agent which made that."""
        return str(self.snapshot.get("pausedToolCall", self.pending["toolCallId"]))


@dataclass(slots=True)
class Unfinished:
    """A run that goes on from a record: its checkpoint, or the snapshot of a pause.

    `decisions` are those on its calls, by call id; `resolved` is the one that it goes on with right now; `waiting` is input that
    joins behind its open calls.
    """

    record: Mapping[str, Any]
    state: RunState
    waiting: tuple[Message, ...]
    facts: RunFacts
    recorder: Recorder | None
    decisions: dict[str, Decision] = field(default_factory=dict)
    resolved: ResolvedApproval | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any], run_id: str, facts: RunFacts, recorder: Recorder | None) -> Unfinished:
        state, waiting = thaw(record, run_id)
        return cls(record, state, tuple(waiting), facts, recorder)


async def open_pause(parts: StoreParts, approval_id: str, session_id: str | None) -> Pause:
    """Reads a pause without taking it. `session_id` is the session that is to go on with it, if one is.

    Raises:
        LoushoError: `LOUSHO_APPROVAL_NOT_FOUND`: unknown or already decided. `LOUSHO_APPROVAL_ORPHANED`: its turn was dropped, or
            its session is in another store.
    """
    record = await parts.approvals.load(approval_id)
    if record is None:
        raise approval_not_found(approval_id)
    pending, snapshot = check_pending(record[0]), record[1]
    key = snapshot.get("sessionId")
    if parts.checkpoints is None or key is None:
        # A turn that is not durable has left a transcript behind when it paused.
        if snapshot.get("session") is not None and session_id is not None and await parts.sessions.load(session_id) is None:
            raise approval_orphaned(approval_id)
        return Pause(pending, snapshot)
    saved = await parts.checkpoints.load(key)
    if saved is None or saved.get("approvalId") != approval_id:
        raise approval_orphaned(approval_id)
    return Pause(pending, snapshot, check_record(saved))


def answer_forgotten(pause: Pause, state: RunState) -> None:
    """A snapshot of an older version does not say which calls come after the one that waited: they are answered as not run."""
    for call in unanswered_calls(state.messages) if "remainingToolCalls" not in pause.snapshot else ():
        if call.id != pause.call_id:
            answer = error_result(call.name, "not-run", "The call was not run: the run paused before it, and did not keep it.")
            state.settled.setdefault(call.id, tool_result(call, answer.text, is_error=True))


async def take_pause(
    store: ApprovalStore, pause: Pause, decision: Decision, recorder: Recorder | None, state: RunState, waiting: tuple[Message, ...]
) -> None:
    """Takes a pause: of several deciders exactly one gets it. Its decision is in the checkpoint when this returns.

    The decision is kept with the claim, too: it is not lost when this process dies before it has written the checkpoint.

    Raises:
        LoushoError: `LOUSHO_APPROVAL_NOT_FOUND`: somebody else was first.
    """
    answer_forgotten(pause, state)
    approval_id = pause.pending["id"]
    keeps_claims: Any = store if hasattr(store, "claimed") else None
    kept = {key: value for key, value in asdict(decision).items() if value is not None}
    taken = await (
        # The run's id makes it repeatable: a store whose answer was lost on the way is asked again.
        keeps_claims.resolve(approval_id, token=state.run_id, decision=kept)
        if keeps_claims is not None
        else store.resolve(approval_id)
    )
    if taken is None:
        raise approval_not_found(approval_id)
    if recorder is None:
        return
    try:
        await recorder.decide(pause.call_id, decision, state, waiting)
    except Exception:
        with suppress(Exception):  # The store fails already: the claim then runs out by itself.
            await put_back(store, pause)
        raise


async def put_back(store: ApprovalStore, pause: Pause) -> None:
    """Undoes a claim."""
    restore = getattr(store, "restore", None)
    if restore is not None:
        await restore(pause.pending["id"])
    else:
        await store.save(pause.pending, pause.snapshot)


async def left_decision(store: ApprovalStore, saved: Mapping[str, Any], now: float, lost: str | None = None) -> dict[str, Decision]:
    """The decision on a paused run whose decider died before it could go on with it; empty while the pause is undecided.

    Args:
        store: Where the pause is.
        saved: The checkpoint that names it.
        now: Seconds since the epoch.
        lost: The run of a decider that is known to have died, or one that took over from it (`<run>-<n>`).
    """
    claimed: Any = getattr(store, "claimed", None)
    call_id, approval_id = saved.get("approvalCallId"), saved.get("approvalId")
    claim = await claimed(approval_id) if claimed is not None and call_id is not None else None
    if claim is None or claim["decision"] is None:
        return {}
    known_dead = lost is not None and lost.partition("-")[0] == (claim["token"] or "").partition("-")[0]
    if not known_dead and now - datetime.fromisoformat(claim["claimed_at"]).timestamp() < CLAIM_TIMEOUT_S:
        return {}  # Whoever took it may be about to go on.
    return {str(call_id): read_decision(claim["decision"], f"The decision on approval '{approval_id}'")}


def check_resumable(
    definition: AgentDefinition, saved: Mapping[str, Any], state: RunState, deps: RunDeps, decided: str | None = None
) -> None:
    """Whether the agent may go on with a saved run. What changed under `on_agent_drift="warn"` is put into `deps` to be reported.

    Args:
        definition: The agent of now.
        saved: The checkpoint, or the snapshot of a pause.
        state: The run.
        deps: Its live side, with the tools of now.
        decided: The id of the call that a person decided on.

    Raises:
        AgentDriftError: `LOUSHO_AGENT_DRIFT` under `on_agent_drift="error"`.
        ResumeToolMissingError: `LOUSHO_RESUME_TOOL_MISSING`: an open call's tool is gone.
    """
    changed = _drift(definition, definition, saved)
    check_tools(state, deps.tools, decided)
    _check_children(definition, state.children)
    if changed is not None:
        deps.drift = changed.fields


def _drift(root: AgentDefinition, agent: AgentDefinition, saved: Mapping[str, Any]) -> Drift | None:
    """How an agent differs from what was saved, as the agent at the top wants it: an error, a warning in the log, or not at all."""
    changed = None if root.on_agent_drift == "ignore" else drift(saved.get("agentFingerprint"), agent.fingerprint)
    if changed is not None and root.on_agent_drift == "error":
        raise AgentDriftError(
            f"Agent '{agent.name}' changed since the run was saved ({changed}); the run was left as it was.",
            changes=changed.fields,
        )
    if changed is not None:
        log.warning("Agent %r goes on with a run that was saved before it changed: %s", agent.name, changed)
    return changed


def _check_children(root: AgentDefinition, children: Mapping[str, Mapping[str, Any]]) -> None:
    """Every sub-agent that paused, however deep, must still be there, with the tools of its open calls."""
    for saved in children.values():
        agent = _paused_agent(root, saved)
        _drift(root, agent, saved)
        state, _ = thaw(saved, "")
        if not callable(agent.tools):
            check_tools(state, _known_tools(agent), saved["pausedToolCall"])
        _check_children(root, state.children)


def _paused_agent(root: AgentDefinition, saved: Mapping[str, Any]) -> AgentDefinition:
    try:
        return root.find(saved["path"])
    except KeyError:
        raise ResumeToolMissingError(
            f"The run waits on a call of sub-agent '{saved['path']}', which the agent no longer has.", tool_name="task"
        ) from None


def _known_tools(agent: AgentDefinition) -> dict[str, Any]:
    """The tools of an agent whose run is not open: its own, and those of its features."""
    assert not callable(agent.tools)
    features = {"task": bool(agent.subagents), READ_RESULT: agent.spill_tool_results}
    return {**agent.tools, **{name: True for name, offered in features.items() if offered}}


def check_decider(pause: Pause, decision: Decision) -> None:
    """Some calls may not be decided by the one they are for, and what is approved is what the run paused for.

    Raises:
        LoushoError: `LOUSHO_APPROVAL_FORBIDDEN`.
        StorageError: `LOUSHO_STORAGE_FAILED`: somebody has changed the arguments in the stored record since.
    """
    kept, shown = pause.snapshot.get("pausedArgs"), pause.pending.get("args")
    tool = pause.snapshot.get("pausedTool", pause.pending["toolName"])
    if decision.approved and tool != pause.pending["toolName"]:
        raise StorageError(
            f"The record of approval '{pause.pending['id']}' was changed in its store: the call that paused is one of '{tool}'. "
            "It was not run; reject it."
        )
    if decision.approved and decision.args is None and kept is not None and kept != shown:
        raise StorageError(
            f"The record of approval '{pause.pending['id']}' was changed in its store: its arguments are not those of the call "
            "that paused. The tool was not run; reject the call, or approve it with args= of your own."
        )
    if pause.pending.get("decidedBy") != "other":
        return
    principal = pause.pending.get("principal")
    own = {str(principal.get(key)) for key in ("id", "name")} if isinstance(principal, Mapping) else {str(principal)}
    if decision.by is None or decision.by in own:
        raise LoushoError(
            f"The call of tool '{pause.pending['toolName']}' must be decided by somebody else than the one it is for: "
            "pass by= with the decider's id.",
            code="LOUSHO_APPROVAL_FORBIDDEN",
        )


def check_edit(root: AgentDefinition, pause: Pause, state: RunState, decision: Decision, deps: RunDeps) -> None:
    """Edited arguments must fit the tool, before the pause is taken.

    Raises:
        ToolArgumentsValidationError: `LOUSHO_TOOL_ARGS_INVALID` with every issue.
    """
    if decision.args is None:
        return
    tools: Any = deps.tools
    child = state.children.get(pause.call_id)
    while child is not None:
        tools = _paused_agent(root, child).tools
        child = thaw(child, "")[0].children.get(child["pausedToolCall"])
    tool = None if callable(tools) else find_tool(tools, pause.pending["toolName"])
    if tool is not None:
        tool.parse_plain(dict(decision.args))
