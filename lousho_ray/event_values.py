"""The envelope of events and the values inside them. Import them from `lousho_ray.events`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lousho_ray.errors import LoushoError, error_name, message_of
from lousho_ray.records import Record, record
from lousho_ray.usage import ProviderUsage, StepUsage, Usage

AGENT_EVENT_SCHEMA_VERSION = 1
"""`v` of every event; raised only for an incompatible change of an existing one."""

# ------------------------------------------------------------------------------------------------------ values inside events


@record
class SubagentInfo(Record):
    """Which sub-agent sent an event. `depth` 1 is a sub-agent of the top run; `tool_call_id` the call that started it."""

    name: str
    depth: int
    tool_call_id: str
    description: str | None = None
    parent: SubagentInfo | None = None


@record
class ErrorInfo(Record):
    """An error as readers of events see it."""

    name: str
    message: str
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """The class name and bare text of an exception, and its code when it is one of ours."""
        return cls(name=error_name(error), message=message_of(error), code=error.code if isinstance(error, LoushoError) else None)


@record
class Failure(Record):
    """A failure the run went on from: `category` is that of the provider failure, when there was one."""

    message: str
    category: str | None = None


@record
class EventUsage(Record):
    """The usage figures of `step.done` and `run.done`; the JSON form has them under both customary sets of names."""

    input_tokens: int
    output_tokens: int
    estimated: bool = False
    cost_usd: float | None = None
    model_calls: int | None = None
    hosted_tool_calls: Mapping[str, int] | None = None

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def _write(self, data: dict[str, Any]) -> None:
        data["promptTokens"] = self.input_tokens
        data["completionTokens"] = self.output_tokens
        data["totalTokens"] = self.total_tokens
        Record._write(self, data)

    @classmethod
    def of(cls, usage: Usage | StepUsage | ProviderUsage) -> EventUsage:
        """The figures of a whole run (`Usage`, which adds the number of calls), of one step, or of one reported call."""
        if isinstance(usage, Usage):
            return cls(
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
                estimated=usage.estimated,
                cost_usd=usage.cost_usd,
                model_calls=usage.model_calls,
                hosted_tool_calls=usage.hosted_tool_calls,
            )
        reported = usage.usage if isinstance(usage, StepUsage) else usage
        return cls(
            input_tokens=reported.prompt_tokens,
            output_tokens=reported.completion_tokens,
            estimated=isinstance(usage, StepUsage) and usage.estimated,
            cost_usd=usage.cost_usd,
        )


# --------------------------------------------------------------------------------------------------------------- the envelope


@record
class BaseEvent(Record):
    """The envelope. `timestamp` is ISO 8601 in UTC with milliseconds and `Z`."""

    type: ClassVar[str]
    run_id: str
    seq: int
    timestamp: str
    v: int = AGENT_EVENT_SCHEMA_VERSION
    subagent: SubagentInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form. Shares nested lists and dicts with the event: do not change them."""
        data: dict[str, Any] = {"type": self.type}
        self._write(data)
        return data
