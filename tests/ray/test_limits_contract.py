"""The contract suites of limiters and ledgers, over real actors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from lousho_ray.actors import budget, budget_client, limiter
from lousho_ray.limits.budget import Ledger
from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter
from lousho_ray.options import RateLimits
from tests.contract.test_ledgers import (
    test_a_repeated_report_counts_once,
    test_a_report_nobody_waits_for_counts,
    test_a_run_may_close_while_its_last_report_is_under_way,
    test_a_tree_adds_up_while_its_runs_report_at_once,
    test_an_answer_holds_the_callers_own_report,
    test_an_unknown_run_is_an_error_and_hurts_no_other,
    test_loops_in_threads_report_to_one_lead,
    test_of_many_reservations_at_once_as_many_are_made_as_fit,
    test_opening_and_closing_may_be_repeated,
)
from tests.contract.test_limiters import (
    Make,
    test_a_cancelled_call_books_nothing_and_those_behind_move_up,
    test_a_settled_estimate_lets_the_next_call_pass,
    test_an_oversize_call_passes_alone,
    test_calls_pass_first_in_first_out_and_never_too_many,
    test_calls_that_come_fast_do_not_wait_and_leave_nothing_behind,
    test_cancelling_half_of_a_hundred_at_random_moments_leaks_nothing,
    test_loops_in_threads_share_the_slots,
)

__all__ = [
    "test_a_cancelled_call_books_nothing_and_those_behind_move_up",
    "test_a_repeated_report_counts_once",
    "test_a_report_nobody_waits_for_counts",
    "test_a_run_may_close_while_its_last_report_is_under_way",
    "test_a_settled_estimate_lets_the_next_call_pass",
    "test_a_tree_adds_up_while_its_runs_report_at_once",
    "test_an_answer_holds_the_callers_own_report",
    "test_an_oversize_call_passes_alone",
    "test_an_unknown_run_is_an_error_and_hurts_no_other",
    "test_calls_pass_first_in_first_out_and_never_too_many",
    "test_calls_that_come_fast_do_not_wait_and_leave_nothing_behind",
    "test_cancelling_half_of_a_hundred_at_random_moments_leaks_nothing",
    "test_loops_in_threads_report_to_one_lead",
    "test_loops_in_threads_share_the_slots",
    "test_of_many_reservations_at_once_as_many_are_made_as_fit",
    "test_opening_and_closing_may_be_repeated",
]


@pytest.fixture(scope="module")
def actors(ray_cluster: str) -> Iterator[tuple[str, str]]:
    """Names of a limiter actor and a budget actor for all tests of this module."""
    handles: list[Any] = [
        ray.remote(limiter.RateLimiterActor).options(name="contract-limits", **limiter.ACTOR_OPTIONS).remote(),
        ray.remote(budget.BudgetActor).options(name="contract-budgets", **budget.ACTOR_OPTIONS).remote(),
    ]
    yield "contract-limits", "contract-budgets"
    for handle in handles:
        ray.kill(handle)


_numbers = itertools.count()


@pytest.fixture
def make(actors: tuple[str, str], ray_cluster: str) -> Make:
    def connect(limits: RateLimits, name: str) -> limiter.RemoteLink:
        return limiter.LimiterReference(actors[0], ray_cluster, name, limits).connect()

    def make(**limits: Any) -> RateLimiter:
        return create_rate_limiter(limits, f"contract-{next(_numbers)}", connect=connect)

    return make


@pytest.fixture
def ledger(actors: tuple[str, str], ray_cluster: str) -> Iterator[Ledger]:
    shared = budget_client.remote_ledger(actors[1], ray_cluster)
    yield shared
    for run in ("lead", "run"):
        asyncio.run(shared.close(run))
