"""The event classes, one per documented `type`. Import them from `lousho_ray.events`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lousho_ray.event_values import BaseEvent, ErrorInfo, EventUsage, Failure
from lousho_ray.records import named, record

# ------------------------------------------------------------------------------------------------------------- run and steps


@record
class RunStart(BaseEvent):
    """First event of a run. `continues` names what it goes on from: `{"approvalId": ...}` or `{"sessionId": ...}`."""

    type: ClassVar[Literal["run.start"]] = "run.start"
    agent_name: str
    agent_id: str | None = None
    continues: Mapping[str, str] | None = None


@record
class StepStart(BaseEvent):
    """A step begins. Steps count from 1; a resumed run goes on counting."""

    type: ClassVar[Literal["step.start"]] = "step.start"
    step: int


@record
class StepDone(BaseEvent):
    """A step ended: the model's reason, or `awaiting-approval`, `aborted`, `steered`, `guardrail`, `error`."""

    type: ClassVar[Literal["step.done"]] = "step.done"
    step: int
    finish_reason: str
    usage: EventUsage | None = None


@record
class RunDone(BaseEvent):
    """Last event of a run, exactly once. `object` is the JSON form of a valid `result.object`."""

    type: ClassVar[Literal["run.done"]] = "run.done"
    finish_reason: str
    text: str
    usage: EventUsage | None = None
    object: Any | None = None
    output_repaired: bool | None = None


@record
class ErrorEvent(BaseEvent):
    """An error. The run ends, unless the error was shown to the model."""

    type: ClassVar[Literal["error"]] = "error"
    error: ErrorInfo


# --------------------------------------------------------------------------------------------------------- text and reasoning


@record
class TextDelta(BaseEvent):
    """A chunk of model text."""

    type: ClassVar[Literal["text.delta"]] = "text.delta"
    text: str


@record
class TextDone(BaseEvent):
    """The step's whole text; only for steps with text."""

    type: ClassVar[Literal["text.done"]] = "text.done"
    text: str


@record
class ReasoningStart(BaseEvent):
    """The model starts to reason."""

    type: ClassVar[Literal["reasoning.start"]] = "reasoning.start"


@record
class ReasoningDelta(BaseEvent):
    """A chunk of reasoning; never part of the reply's text."""

    type: ClassVar[Literal["reasoning.delta"]] = "reasoning.delta"
    text: str


@record
class ReasoningDone(BaseEvent):
    """Reasoning ended. `tokens` is set when the provider told."""

    type: ClassVar[Literal["reasoning.done"]] = "reasoning.done"
    text: str
    tokens: int | None = None


# -------------------------------------------------------------------------------------------------------------------- tools


@record
class ToolStart(BaseEvent):
    """A call starts. `args` is the parsed object, `{}` when it is not valid JSON. On all events of a call, `executed_by` is
    `provider` when the model provider runs it itself, and `parent_tool_call_id` names the `run_code` call whose script made it.
    """

    type: ClassVar[Literal["tool.start"]] = "tool.start"
    tool_call_id: str
    tool_name: str
    args: Mapping[str, Any]
    executed_by: Literal["provider"] | None = None
    parent_tool_call_id: str | None = None


@record
class ToolResume(BaseEvent):
    """A call that was reported before a pause goes on; it has no second `tool.start`."""

    type: ClassVar[Literal["tool.resume"]] = "tool.resume"
    tool_call_id: str
    tool_name: str
    args: Mapping[str, Any]


@record
class ToolPartial(BaseEvent):
    """A snapshot of a streaming tool. `index` counts from 0 per call."""

    type: ClassVar[Literal["tool.partial"]] = "tool.partial"
    tool_call_id: str
    tool_name: str
    output: Any
    index: int
    parent_tool_call_id: str | None = None


@record
class ToolDone(BaseEvent):
    """A call returned. `duration_ms` counts from its `tool.start`."""

    type: ClassVar[Literal["tool.done"]] = "tool.done"
    tool_call_id: str
    tool_name: str
    result: Any
    duration_ms: float
    replaced_by_hook: str | None = None
    executed_by: Literal["provider"] | None = None
    parent_tool_call_id: str | None = None


@record
class ToolError(BaseEvent):
    """A call failed, was refused, or has invalid arguments or an unknown name."""

    type: ClassVar[Literal["tool.error"]] = "tool.error"
    tool_call_id: str
    tool_name: str
    error: ErrorInfo
    duration_ms: float
    executed_by: Literal["provider"] | None = None
    parent_tool_call_id: str | None = None


@record
class TodoUpdated(BaseEvent):
    """The to-do list after a `todo_write`. Items are `{"id", "content", "status"}`; `counts` has one figure per status."""

    type: ClassVar[Literal["todo.updated"]] = "todo.updated"
    todos: Sequence[Mapping[str, Any]]
    counts: Mapping[str, int]
    tool_call_id: str


# -------------------------------------------------------------------------------------- approvals, permissions, guardrails


@record
class ApprovalRequested(BaseEvent):
    """A call waits for a decision; the run then ends. A plain approval has no `kind`.

    `question` is `{"text", "options"?, "allowFreeText"?}`, `sign_in` what the person must sign in to, `expires_at` ISO 8601, and
    `subagent_path` the names of the sub-agents that lead to the call.
    """

    type: ClassVar[Literal["approval.requested"]] = "approval.requested"
    approval_id: str
    tool_call_id: str
    tool_name: str
    args: Mapping[str, Any]
    kind: Literal["question", "sign-in"] | None = None
    question: Mapping[str, Any] | None = None
    sign_in: Mapping[str, Any] | None = None
    expires_at: str | None = None
    subagent_path: Sequence[str] | None = None


@record
class ApprovalResolved(BaseEvent):
    """A person decided. Comes at the head of the continuation; `waited_ms` is the time since the request.

    `edited` is true when the call runs with arguments that the person changed.
    """

    type: ClassVar[Literal["approval.resolved"]] = "approval.resolved"
    approval_id: str
    tool_call_id: str
    approved: bool
    waited_ms: float
    by: str | None = None
    note: str | None = None
    edited: bool | None = None


@record
class PermissionDecision(BaseEvent):
    """How rules, hooks, the mode or a person decided a call. `at` is ISO 8601; `rule` is `{"index", "reason"?}`.

    `by` tells who decided, `edited` that this person changed the arguments. Under `shadow` a rule is only tried, not enforced.
    """

    type: ClassVar[Literal["permission.decision"]] = "permission.decision"
    tool_call_id: str
    tool_name: str
    decision: Literal["allow", "deny", "ask", "default", "approved", "rejected"]
    at: str
    rule: Mapping[str, Any] | None = None
    args: Mapping[str, Any] | None = None
    mode: str | None = None
    reason: str | None = None
    hook: str | None = None
    by: str | None = None
    edited: bool | None = None
    shadow: bool | None = None
    parent_tool_call_id: str | None = None


@record
class GuardrailTripped(BaseEvent):
    """A guardrail blocked. `info` has types, labels and offsets, never the matched text."""

    type: ClassVar[Literal["guardrail.tripped"]] = "guardrail.tripped"
    name: str
    kind: Literal["input", "output", "tool"]
    reason: str
    tool_name: str | None = None
    info: Mapping[str, Any] | None = None


@record
class GuardrailRewrote(BaseEvent):
    """A guardrail rewrote text or arguments; the run goes on."""

    type: ClassVar[Literal["guardrail.rewrote"]] = "guardrail.rewrote"
    name: str
    kind: Literal["input", "output", "tool"]
    reason: str
    tool_name: str | None = None
    info: Mapping[str, Any] | None = None


# ----------------------------------------------------------------------------------------- providers, compaction and budget


@record
class ProviderRetry(BaseEvent):
    """A model call failed and is tried again after `delay_ms`. `attempt` 1 = the first try failed."""

    type: ClassVar[Literal["provider.retry"]] = "provider.retry"
    attempt: int
    max_retries: int
    delay_ms: float
    error: Failure
    provider: str


@record
class ProviderFallback(BaseEvent):
    """The next provider takes over."""

    type: ClassVar[Literal["provider.fallback"]] = "provider.fallback"
    from_provider: str = named("from")
    to_provider: str = named("to")
    from_model: str | None = None
    to_model: str | None = None
    error: Failure


@record
class CompactionStart(BaseEvent):
    """A compaction begins. `trigger` is set when somebody asked for it."""

    type: ClassVar[Literal["compaction.start"]] = "compaction.start"
    strategy: str
    tokens_before: int
    context_window: int
    threshold_tokens: int
    trigger: Literal["manual"] | None = None


@record
class CompactionDone(BaseEvent):
    """A compaction ended; exactly one per start.

    Attributes:
        summary: Whether a summary was written (its text is never in an event).
        applied: The strategy that did the work, when it was not `strategy` but its fallback.
        noop: True when nothing was changed.
    """

    type: ClassVar[Literal["compaction.done"]] = "compaction.done"
    strategy: str
    tokens_before: int
    tokens_after: int
    pruned_tool_call_ids: Sequence[str]
    summary: bool | None = None
    error: Failure | None = None
    trigger: Literal["manual"] | None = None
    applied: str | None = None
    noop: bool | None = None


@record
class ContextCleared(BaseEvent):
    """`session.clear()`; goes to the listeners of the session only."""

    type: ClassVar[Literal["context.cleared"]] = "context.cleared"
    session_id: str
    messages_cleared: int


@record
class BudgetExceeded(BaseEvent):
    """A limit tripped. `limit` is its documented camelCase key, `value` the figure that reached `max`."""

    type: ClassVar[Literal["budget.exceeded"]] = "budget.exceeded"
    limit: str
    value: float
    max: float
    scope: Literal["run", "session"]


# ------------------------------------------------------------------------------------------------- queued input and handoffs


@record
class InputQueued(BaseEvent):
    """`enqueue()` took an input."""

    type: ClassVar[Literal["input.queued"]] = "input.queued"
    id: str
    text: str


@record
class InputSteered(BaseEvent):
    """`steer()` took an input."""

    type: ClassVar[Literal["input.steered"]] = "input.steered"
    id: str
    text: str
    mode: Literal["immediate", "queued"]


@record
class InputApplied(BaseEvent):
    """The input joined the transcript just before the model call of `step`."""

    type: ClassVar[Literal["input.applied"]] = "input.applied"
    id: str
    step: int


@record
class Handoff(BaseEvent):
    """The conversation moved to another agent."""

    type: ClassVar[Literal["handoff"]] = "handoff"
    from_agent: str = named("from")
    to_agent: str = named("to")
    tool_call_id: str


@record
class AgentDrift(BaseEvent):
    """A resume runs on an agent that changed. `model` is `{"from", "to"}`; `instructions` tells whether they changed."""

    type: ClassVar[Literal["agent.drift"]] = "agent.drift"
    tools_added: Sequence[str]
    tools_removed: Sequence[str]
    tools_changed: Sequence[str]
    instructions: bool
    model: Mapping[str, Any] | None = None
