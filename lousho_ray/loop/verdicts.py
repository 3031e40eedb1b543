"""What the gate says of a tool call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from lousho_ray.loop.state import Ask
from lousho_ray.ports import Approval
from lousho_ray.tools.registry import AnyTool
from lousho_ray.tools.results import ErrorResult, error_result
from lousho_ray.tools.schema import ParsedArguments


@dataclass(frozen=True, slots=True)
class Run:
    """The call may run."""

    tool: AnyTool
    arguments: ParsedArguments
    approval: Approval | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The call does not run; the model reads this error."""

    error: ErrorResult


@dataclass(frozen=True, slots=True)
class Answer:
    """The call does not run; a hook supplied its result."""

    value: Any
    hook: str


Verdict: TypeAlias = Run | Refuse | Answer | Ask


def denied(name: str, reason: str) -> ErrorResult:
    return error_result(name, "denied", f"The call was denied: {reason}", reason=reason)
