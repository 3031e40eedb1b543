"""Nodes that are lost with sessions, a store and the limiters on them, and one that joins: a cluster in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import MockProvider, SqliteStore, StorageError, create_agent
from lousho_ray.actors.cluster import agreed, this_process
from lousho_ray.actors.store import StoreReference

ROOT = Path(__file__).parents[2]

QUICK_CHECKS = {f"RAY_health_check_{name}": value for name, value in (("period_ms", "1000"), ("timeout_ms", "1000"))}
"""With `failure_threshold` 3 a node that is gone is noticed after 4 s; by default after 15 s."""


def run_cluster(module: str, *arguments: str, timeout_s: float = 160, **more: str) -> dict[str, Any]:
    """Runs a module that starts a cluster of its own, with `more` variables in its environment; gives what it reports."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    variables |= {
        **QUICK_CHECKS,
        "RAY_health_check_failure_threshold": "3",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **more,
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    return report


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_what_a_lost_node_held_goes_on_elsewhere_and_a_new_node_is_used(tmp_path: Path) -> None:
    # STO-45, RL-34, RL-36, DEC-R2, DEC-R6
    report = run_cluster("tests.ray.node_loss_script", str(tmp_path))
    assert report["were_there"] == ["lousho-limite", "lousho-store-"]
    assert report["before"] == ["one", "heard one"]
    assert report["after"] == "heard three"
    assert report["kept"] == ["one", "heard one", "two", "heard two", "three", "heard three"]
    assert report["left"] == []
    assert report["on_lost"] > 0
    assert report["ok"] == [True] * 12
    assert report["requests"] == 12 + report["on_lost"], "only the reply that was lost is asked for again"
    assert report["same_actors"], "a session keeps its actor when the number of CPUs changes"
    assert report["children_on_new_node"] > 0


@pytest.mark.usefixtures("ray_cluster")
async def test_a_file_is_opened_on_its_own_machine_or_not_at_all(tmp_path: Path) -> None:
    # STO-41: elsewhere the path would be another file, and an empty one
    async with SqliteStore(tmp_path / "s.db") as store:
        assert agreed(StoreReference.of_location(store.location).name, "203.0.113.7", this_process()) == "203.0.113.7"
        with pytest.raises(StorageError) as raised:
            await create_agent(provider=MockProvider(), store=store, runtime="ray").session("talk").send("Hi.")
    assert raised.value.code == "LOUSHO_STORAGE_FAILED"
    assert all(word in raised.value.detail for word in ("203.0.113.7", "s.db", "S3Store"))


@pytest.mark.usefixtures("ray_cluster")
async def test_the_number_of_session_actors_is_settled_once_for_a_job(fresh_name: str) -> None:
    # DEC-R2: a session keeps its actor while nodes come and go
    assert await settled.remote(fresh_name, 3) == "3"
    assert await settled.remote(fresh_name, 5) == "3"
    assert agreed(fresh_name, "7", this_process()) == "3"


@ray.remote(num_cpus=0)
def settled(name: str, proposal: int) -> str:
    return agreed(name, str(proposal), this_process())
