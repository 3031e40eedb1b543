"""`ExecutionResult`: how a run ended and what it made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lousho_ray.errors import AgentExecutionError
from lousho_ray.messages import Message
from lousho_ray.ports import FinishReason
from lousho_ray.usage import StepUsage, Usage, format_usage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """A call of the run. `args` is the parsed object, or the model's raw text when that was not JSON."""

    id: str
    name: str
    args: Any


@dataclass(frozen=True, slots=True)
class BudgetBreach:
    """Which limit stopped a run: `limit` is its documented camelCase name, `scope` is `run` or `session`."""

    limit: str
    value: float
    max: float
    scope: str = "run"

    def to_dict(self) -> dict[str, Any]:
        return {"limit": self.limit, "value": self.value, "max": self.max, "scope": self.scope}


@dataclass(slots=True)
class ExecutionResult(Generic[T]):
    """What `send()` returns. Fields that do not apply are `None`.

    Attributes:
        text: The final reply's text (empty when the run ended before one).
        messages: The whole conversation, system prompt first.
        new_messages: Only what this run added, its input included.
        tool_calls: Every call of the run, in order, also one that was cancelled before it ran. Calls behind one that waits for a
            decision join when they start.
        tool_errors: How many of them ended in an error result.
        usage: Tokens and cost of the run, its sub-agents included. `step_usage` has one entry per model call.
        finish_reason: See `FinishReason`; `ok` is true only for `stop`.
        steps: Model calls taken by the loop.
        object: The validated value of an `output` schema; `output_error` says why there is none. One that came from the repair step
            is marked `output_repaired` (with the first reply's `output_repair_issues`): check what the repair may have bent.
        budget: The limit that stopped the run. `abort_reason`: `{name, message}` of an aborted one.
        agent_name: Who wrote the final reply.
    """

    text: str = ""
    reasoning: str | None = None
    messages: list[Message] = field(default_factory=list)
    new_messages: list[Message] = field(default_factory=list)
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    tool_errors: int = 0
    usage: Usage = field(default_factory=Usage)
    step_usage: list[StepUsage] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    steps: int = 0
    run_id: str = ""
    agent_name: str = "agent"
    approval_id: str | None = None
    object: T | None = None
    output_error: dict[str, Any] | None = None
    output_repaired: bool = False
    output_repair_issues: list[dict[str, str]] | None = None
    budget: BudgetBreach | None = None
    guardrail: dict[str, Any] | None = None
    abort_reason: dict[str, str] | None = None
    background_tasks: list[dict[str, Any]] | None = None

    @property
    def ok(self) -> bool:
        """True only when the model ended the run by itself (`stop`)."""
        return self.finish_reason == "stop"

    def raise_if_incomplete(self) -> ExecutionResult[T]:
        """Returns the result when it is `ok`.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, naming the finish reason and what to do about it.
        """
        if self.ok:
            return self
        advice = _ADVICE.get(self.finish_reason, "Look at result.messages for what happened.")
        raise AgentExecutionError(f"The run ended with finish reason {self.finish_reason!r}. {advice}", agent_id=self.agent_name)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        return (
            f"<ExecutionResult {self.finish_reason} {text!r} steps={self.steps} "
            f"tool_calls={len(self.tool_calls)} {format_usage(self.usage)}>"
        )


_ADVICE = {
    "length": "The reply was cut: raise model_settings max_tokens.",
    "max-steps": "Raise max_steps, or give the agent a smaller job.",
    "budget-exceeded": "Raise the limit named in result.budget.",
    "awaiting-approval": "Decide result.approval_id with agent.approvals.resolve().",
    "aborted": "See result.abort_reason.",
    "content_filter": "The provider refused: change the input.",
    "output-invalid": "See result.output_error.",
}


def final_text(messages: Sequence[Message]) -> str:
    """The text of the last assistant message."""
    for message in reversed(messages):
        if message.role == "assistant":
            return message.text
    return ""
