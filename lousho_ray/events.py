"""The events of a run: what `stream()`, listeners and server routes deliver.

Every event is a frozen dataclass whose `type` is the documented string and whose `to_dict()` is the documented JSON. All carry the
same envelope: `run_id`, `seq` (0, 1, 2, ... without gaps in a run), `timestamp`, the schema version `v` and, when a sub-agent sent
it, `subagent`. Readers must accept event types and fields they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, get_args

from lousho_ray.errors import ValidationError
from lousho_ray.event_types import (
    AgentDrift,
    ApprovalRequested,
    ApprovalResolved,
    BudgetExceeded,
    CompactionDone,
    CompactionStart,
    ContextCleared,
    ErrorEvent,
    GuardrailRewrote,
    GuardrailTripped,
    Handoff,
    InputApplied,
    InputQueued,
    InputSteered,
    PermissionDecision,
    ProviderFallback,
    ProviderRetry,
    ReasoningDelta,
    ReasoningDone,
    ReasoningStart,
    RunDone,
    RunStart,
    StepDone,
    StepStart,
    TextDelta,
    TextDone,
    TodoUpdated,
    ToolDone,
    ToolError,
    ToolPartial,
    ToolResume,
    ToolStart,
)
from lousho_ray.event_values import (
    AGENT_EVENT_SCHEMA_VERSION,
    BaseEvent,
    ErrorInfo,
    EventUsage,
    Failure,
    SubagentInfo,
)

__all__ = [
    "AGENT_EVENT_SCHEMA_VERSION",
    "EVENT_TYPES",
    "AgentDrift",
    "ApprovalRequested",
    "ApprovalResolved",
    "BaseEvent",
    "BudgetExceeded",
    "CompactionDone",
    "CompactionStart",
    "ContextCleared",
    "ErrorEvent",
    "ErrorInfo",
    "Event",
    "EventUsage",
    "Failure",
    "GuardrailRewrote",
    "GuardrailTripped",
    "Handoff",
    "InputApplied",
    "InputQueued",
    "InputSteered",
    "PermissionDecision",
    "ProviderFallback",
    "ProviderRetry",
    "ReasoningDelta",
    "ReasoningDone",
    "ReasoningStart",
    "RunDone",
    "RunStart",
    "StepDone",
    "StepEvent",
    "StepStart",
    "SubagentInfo",
    "TextDelta",
    "TextDone",
    "TextEvent",
    "TodoUpdated",
    "ToolDone",
    "ToolError",
    "ToolEvent",
    "ToolPartial",
    "ToolResume",
    "ToolStart",
    "UnknownEvent",
    "event_from_dict",
    "is_agent_event",
    "is_step_event",
    "is_text_event",
    "is_tool_event",
]

TextEvent: TypeAlias = TextDelta | TextDone
ToolEvent: TypeAlias = ToolStart | ToolResume | ToolPartial | ToolDone | ToolError
StepEvent: TypeAlias = StepStart | StepDone

Event: TypeAlias = (
    RunStart
    | StepStart
    | TextDelta
    | TextDone
    | ReasoningStart
    | ReasoningDelta
    | ReasoningDone
    | ToolStart
    | ToolResume
    | ToolPartial
    | ToolDone
    | ToolError
    | TodoUpdated
    | ApprovalRequested
    | ApprovalResolved
    | PermissionDecision
    | StepDone
    | ErrorEvent
    | ProviderRetry
    | ProviderFallback
    | CompactionStart
    | CompactionDone
    | ContextCleared
    | BudgetExceeded
    | InputQueued
    | InputSteered
    | InputApplied
    | GuardrailTripped
    | GuardrailRewrote
    | Handoff
    | AgentDrift
    | RunDone
)

EVENT_TYPES: dict[str, type[Event]] = {cls.type: cls for cls in get_args(Event)}
"""Every event class by its `type`."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """An event of a newer version: `data` is its whole JSON form."""

    type: str
    data: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)


def is_agent_event(value: object) -> bool:
    """Whether a received value has the envelope of an event, of a known type or not."""
    return isinstance(value, Mapping) and not _envelope_problems(value)


def event_from_dict(data: Mapping[str, Any]) -> Event | UnknownEvent:
    """Rebuilds an event from its JSON form. An unknown type becomes an `UnknownEvent`; unknown fields are ignored.

    Raises:
        ValidationError: `LOUSHO_VALIDATION_FAILED`: the envelope or a field of the event is missing or of the wrong type.
    """
    problems = _envelope_problems(data) if isinstance(data, Mapping) else {"event": ["must be an object"]}
    if problems:
        listed = ", ".join(f"'{key}' {texts[0]}" for key, texts in problems.items())
        raise ValidationError(f"Not an agent event: {listed}.", errors=problems)
    cls = EVENT_TYPES.get(data["type"])
    return UnknownEvent(data["type"], dict(data)) if cls is None else cls.from_dict(data)


def is_text_event(event: object) -> TypeGuard[TextEvent]:
    """Whether the event is `text.delta` or `text.done`."""
    return isinstance(event, TextEvent)


def is_tool_event(event: object) -> TypeGuard[ToolEvent]:
    """Whether the event is one of the `tool.*` events."""
    return isinstance(event, ToolEvent)


def is_step_event(event: object) -> TypeGuard[StepEvent]:
    """Whether the event is `step.start` or `step.done`."""
    return isinstance(event, StepEvent)


_ENVELOPE: dict[str, tuple[type, str]] = {
    "type": (str, "a string"),
    "runId": (str, "a string"),
    "seq": (int, "a whole number"),
    "timestamp": (str, "a string"),
    "v": (int, "a whole number"),
}


def _envelope_problems(data: Mapping[str, Any]) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    for key, (kind, words) in _ENVELOPE.items():
        value = data.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            problems[key] = [f"must be {words}" if key in data else "is missing"]
    if "subagent" in data and not isinstance(data["subagent"], Mapping):
        problems["subagent"] = ["must be an object"]
    return problems
