"""The contract suite of durable sessions and runs, with sessions in actors and the store behind its actor."""

from __future__ import annotations

import pytest

from tests.contract.test_durable_runtimes import (
    lines,
    make,
    server,
    store,
    test_a_failed_turn_is_finished_ahead_of_the_next,
    test_a_pause_is_decided_by_another_agent_object,
    test_a_question_is_answered,
    test_a_rejection_and_edited_arguments,
    test_a_session_without_a_store_is_forked_in_memory,
    test_a_turn_that_failed_for_good_says_so,
    test_an_agent_that_may_not_go_on_leaves_the_pause,
    test_dropping_and_clearing,
    test_durable_runs,
    test_history_and_fork,
    test_of_two_deciders_one_wins,
)

__all__ = [
    "lines",
    "make",
    "server",
    "store",
    "test_a_failed_turn_is_finished_ahead_of_the_next",
    "test_a_pause_is_decided_by_another_agent_object",
    "test_a_question_is_answered",
    "test_a_rejection_and_edited_arguments",
    "test_a_session_without_a_store_is_forked_in_memory",
    "test_a_turn_that_failed_for_good_says_so",
    "test_an_agent_that_may_not_go_on_leaves_the_pause",
    "test_dropping_and_clearing",
    "test_durable_runs",
    "test_history_and_fork",
    "test_of_two_deciders_one_wins",
]

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def runtime() -> str:
    return "ray"
