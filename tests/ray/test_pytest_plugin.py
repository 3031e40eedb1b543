"""The pytest plugin's fixture that runs a test in both runtimes, in a pytest of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_evals_plugin import run

TESTS = """
import os
import pytest
from lousho_ray import MockProvider, create_agent

@pytest.mark.parametrize("number", [1, 2])
def test_a_session(lousho_runtime, number):
    agent = create_agent(provider=MockProvider(), runtime=lousho_runtime)
    assert agent.session(f"s{number}").send_sync("x").finish_reason == "stop"

@pytest.mark.ray_local
def test_in_the_cluster():
    import ray
    assert ray.is_initialized()
    assert ray.cluster_resources()["CPU"] == 2
"""


@pytest.mark.timeout(170)
def test_a_test_runs_in_this_process_and_on_one_ray_of_the_session(tmp_path: Path) -> None:
    (tmp_path / "test_both.py").write_text(TESTS)
    done = run(tmp_path, "-v", "--strict-markers", timeout_s=150, RAY_ADDRESS="", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("test_a_session[local") == done.stdout.count("test_a_session[ray") == 2
    assert "5 passed" in done.stdout
