"""A suite of evals that loses a node: a cluster of several, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.test_node_loss import run_cluster


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_lost_node_costs_the_cases_on_it_and_the_same_command_runs_only_these(tmp_path: Path) -> None:
    report = run_cluster("tests.ray.eval_node_loss_script", str(tmp_path))
    assert report["nodes"] == 3, "one worker a node"
    assert report["left"] == []
    assert report["states"] == ["running"], "the board stays with the driver"
    assert 0 < len(report["expected"]) < 12
    assert report["outages"] == report["expected"], report["errors"]
    assert report["first"] == [0, 60], "every case was started once: none ran twice, the account and the limiter are still there"
    assert report["again"] == report["expected"]
    assert not report["homes_again"]
    assert report["equal"], "the report is that of an undisturbed run"
    assert (report["totals"]["passed"], report["totals"]["failed"]) == (45, 15)


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_driver_that_is_lost_with_its_node_leaves_nothing_running_and_the_same_command_goes_on(tmp_path: Path) -> None:
    report = run_cluster("tests.ray.eval_driver_loss_script", str(tmp_path))
    assert report["nodes"] == 3, "one worker a node"
    assert report["left"] == [], "workers on other nodes end as well"
    assert report["suites"] == 0
    assert 0 < report["finished"] <= 20
    assert report["again"] == report["missing"]
    assert report["equal"], "the report is that of an undisturbed run"
    assert (report["totals"]["passed"], report["totals"]["failed"]) == (45, 15)
