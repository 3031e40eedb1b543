"""Scorers of the classic form: functions of a result that give a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lousho_ray.errors import ConfigurationError
from lousho_ray.loop.result import ExecutionResult

Scorer = Callable[[ExecutionResult[object]], float]


def exact_match(expected: str) -> Scorer:
    """Scores 1 when the reply is `expected`, blanks around it aside; else 0."""
    wanted = expected.strip()
    return lambda result: float(result.text.strip() == wanted)


def tool_call_order(names: Sequence[str]) -> Scorer:
    """The share of `names` that were called in that order, others may lie between: 1 when all were."""
    wanted = list(names)
    if not wanted:
        raise ConfigurationError("tool_call_order() needs at least one tool name.", field="names")
    return lambda result: in_order(wanted, [call.name for call in result.tool_calls]) / len(wanted)


def budget(*, max_tokens: int | None = None, max_steps: int | None = None, max_cost_usd: float | None = None) -> Scorer:
    """Scores 1 when a run kept all the given limits, else 0. A run whose cost is not known did not keep a limit of it."""
    if max_tokens is None and max_steps is None and max_cost_usd is None:
        raise ConfigurationError("budget() needs max_tokens, max_steps or max_cost_usd.", field="budget")

    def score(result: ExecutionResult[object]) -> float:
        cost = result.usage.cost_usd
        kept = (
            max_tokens is None or result.usage.total_tokens <= max_tokens,
            max_steps is None or result.steps <= max_steps,
            max_cost_usd is None or (cost is not None and cost <= max_cost_usd),
        )
        return float(all(kept))

    return score


def in_order(wanted: Sequence[str], called: Sequence[str]) -> int:
    """How many of `wanted`, from the first on, are a subsequence of `called`."""
    found = 0
    for name in called:
        if found < len(wanted) and name == wanted[found]:
            found += 1
    return found
