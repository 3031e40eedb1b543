"""Which limit a run has reached, if any: pure comparisons of a `Limits` with what was spent."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from lousho_ray.options import Limits
from lousho_ray.usage import Spend

Moment = Literal["before-call", "after-tools-asked"]
"""When limits are looked at: before each model call, and after one that asked for tools."""


Figure = tuple[str, float, float | None]
"""A limit's key, what counts towards it, and the configured maximum."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A limit that was reached: its camelCase key, the figure that reached it (unrounded) and the configured maximum."""

    limit: str
    value: float
    max: float

    def to_dict(self, scope: Literal["run", "session"] = "run") -> dict[str, Any]:
        """The documented `result.budget`."""
        return {"limit": self.limit, "value": self.value, "max": self.max, "scope": scope}


def check_limits(
    limits: Limits, spend: Spend, *, elapsed_ms: float, moment: Moment, steps: int = 0, tool_errors: int = 0
) -> Breach | None:
    """The first limit that is reached, in the documented order; a limit is reached at its value, not above it.

    Args:
        spend: What the run and its sub-agents have spent. While its cost is unknown `max_cost_usd` is not looked at.
        elapsed_ms: How long the run has taken, waits for a rate limiter included.
        moment: `max_tool_errors` and `max_steps` count before a call only: the last allowed step's tools still run.
    """
    figures = _spent(limits, spend, elapsed_ms)
    if moment == "before-call":
        figures += [("maxToolErrors", tool_errors, limits.max_tool_errors), ("maxSteps", steps, limits.max_steps)]
    return _first(figures)


def check_shared_limits(limits: Limits, spend: Spend, *, elapsed_ms: float) -> Breach | None:
    """What a sub-agent checks of a lead's limits: tokens, cost and duration, never steps and tool errors.

    Args:
        limits: The lead's.
        spend: The lead's total: its own calls and those of everything below it.
        elapsed_ms: How long the lead has run.
    """
    return _first(_spent(limits, spend, elapsed_ms))


@dataclass(frozen=True, slots=True)
class Cap:
    """What a run's calls may come to, those in flight included: its account, and the most of each figure.

    `before` is what counts besides the account's total.
    """

    run_id: str
    max_tokens: float | None = None
    max_input_tokens: float | None = None
    max_output_tokens: float | None = None
    max_cost_usd: float | None = None
    before: Spend = field(default_factory=Spend)

    @classmethod
    def of(cls, run_id: str, limits: Limits, before: Spend) -> Cap:
        return cls(run_id, limits.max_tokens, limits.max_input_tokens, limits.max_output_tokens, limits.max_cost_usd, before)

    def passed_by(self, total: Spend) -> Breach | None:
        """The first figure that would be above its limit. While the cost is unknown `max_cost_usd` is not looked at."""
        spend = self.before + total
        figures = [
            ("maxTokens", spend.total_tokens, self.max_tokens),
            ("maxInputTokens", spend.input_tokens, self.max_input_tokens),
            ("maxOutputTokens", spend.output_tokens, self.max_output_tokens),
            ("maxCostUsd", spend.cost, self.max_cost_usd),
        ]
        for key, value, most in figures:
            if most is not None and value is not None and value > Decimal(str(most)):
                return Breach(key, float(value), most)
        return None


def duration_breach(limits: Limits, elapsed_ms: float) -> Breach:
    """The breach of a run that `max_duration_ms` interrupted: its value is never below the limit, whatever the timer's accuracy."""
    assert limits.max_duration_ms is not None
    return Breach("maxDurationMs", max(elapsed_ms, limits.max_duration_ms), limits.max_duration_ms)


def _spent(limits: Limits, spend: Spend, elapsed_ms: float) -> list[Figure]:
    most_usd = None if spend.cost is None else limits.max_cost_usd
    return [
        ("maxTokens", spend.total_tokens, limits.max_tokens),
        ("maxInputTokens", spend.input_tokens, limits.max_input_tokens),
        ("maxOutputTokens", spend.output_tokens, limits.max_output_tokens),
        ("maxCostUsd", float(spend.cost or 0), most_usd),
        ("maxDurationMs", elapsed_ms, limits.max_duration_ms),
    ]


def _first(figures: list[Figure]) -> Breach | None:
    for key, value, most in figures:
        if most is not None and value >= most:
            return Breach(key, value, most)
    return None
