"""Which limit is reached."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from lousho_ray.limits.checks import Breach, Moment, check_limits, check_shared_limits, duration_breach
from lousho_ray.options import Limits
from lousho_ray.usage import Spend

SPEND = Spend(input_tokens=70, output_tokens=30, cost=Decimal("0.25"), calls=3)


def check(moment: Moment = "before-call", spend: Spend = SPEND, **limits: Any) -> Breach | None:
    return check_limits(Limits(**limits), spend, elapsed_ms=1500.5, moment=moment, steps=4, tool_errors=2)


@pytest.mark.parametrize(
    ("limit", "value", "key"),
    [
        ("max_tokens", 100, "maxTokens"),
        ("max_input_tokens", 70, "maxInputTokens"),
        ("max_output_tokens", 30, "maxOutputTokens"),
        ("max_cost_usd", 0.25, "maxCostUsd"),
        ("max_duration_ms", 1500.5, "maxDurationMs"),
        ("max_tool_errors", 2, "maxToolErrors"),
        ("max_steps", 4, "maxSteps"),
    ],
)
def test_a_limit_is_reached_at_its_value_and_not_below(limit: str, value: float, key: str) -> None:
    # BUD-03, BUD-08, RUN-59, RUN-64
    breach = check(**{limit: value})
    assert breach == Breach(key, value, value)
    assert breach.to_dict("session") == {"limit": key, "value": value, "max": value, "scope": "session"}
    more = value + 1 if isinstance(value, int) else value + 0.0001
    assert check(**{limit: more}) is None


def test_no_limits_are_never_reached() -> None:
    # BUD-02
    assert check() is None


def test_of_several_limits_the_first_of_the_table_is_reported() -> None:
    # BUD-10
    order = [
        "max_tokens",
        "max_input_tokens",
        "max_output_tokens",
        "max_cost_usd",
        "max_duration_ms",
        "max_tool_errors",
        "max_steps",
    ]
    limits: dict[str, Any] = dict.fromkeys(order, 1) | {"max_cost_usd": 0.01}
    named = []
    for limit in order:
        breach = check(**limits)
        assert breach is not None
        named.append(breach.limit)
        del limits[limit]
    assert named == ["maxTokens", "maxInputTokens", "maxOutputTokens", "maxCostUsd", "maxDurationMs", "maxToolErrors", "maxSteps"]


@pytest.mark.parametrize("limit", ["max_tool_errors", "max_steps"])
def test_steps_and_tool_errors_let_the_last_steps_tools_run(limit: str) -> None:
    # BUD-04
    assert check("before-call", **{limit: 1}) is not None
    assert check("after-tools-asked", **{limit: 1}) is None


def test_spend_is_checked_at_both_moments() -> None:
    # BUD-04, RUN-59
    assert check("before-call", max_tokens=100) == check("after-tools-asked", max_tokens=100) == Breach("maxTokens", 100, 100)


def test_an_unknown_cost_reaches_no_cost_limit_but_the_others() -> None:
    # COST-12, RUN-62
    unknown = Spend(70, 30, None, 3)
    assert check(spend=unknown, max_cost_usd=0.0001) is None
    assert check(spend=unknown, max_cost_usd=0.0001, max_steps=4) == Breach("maxSteps", 4, 4)


def test_a_free_call_is_a_known_cost() -> None:
    assert check(spend=Spend(1, 1, Decimal(0), 1), max_cost_usd=0.0001) is None


def test_cents_add_up_before_they_are_compared() -> None:
    # COST-14
    total = Spend()
    for _ in range(10_000):
        total += Spend(0, 0, Decimal("0.0001"), 1)
    assert check(spend=total, max_cost_usd=1.0) == Breach("maxCostUsd", 1.0, 1.0)


def test_a_lead_shares_tokens_cost_and_duration_but_not_steps_and_tool_errors() -> None:
    # BUD-18, BUD-20, RUN-65
    assert check_shared_limits(Limits(max_steps=1, max_tool_errors=1), SPEND, elapsed_ms=10) is None
    for key in ("max_tokens", "max_cost_usd", "max_duration_ms"):
        assert check_shared_limits(Limits(**{key: 0.01 if key == "max_cost_usd" else 1}), SPEND, elapsed_ms=10) is not None


def test_an_interrupted_run_never_reports_less_than_its_limit() -> None:
    # BUD-07: a timer may fire a little early
    assert duration_breach(Limits(max_duration_ms=100), 99.98) == Breach("maxDurationMs", 100, 100)
    assert duration_breach(Limits(max_duration_ms=100), 103.5) == Breach("maxDurationMs", 103.5, 100)
