"""Eval files under pytest. Each test runs pytest in a process of its own, on files of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.evals_support import write_evals

ROOT = Path(__file__).parents[2]

EVALS = """
async def test(t, case):
    await t.send("x")
    t.check("first", case["n"], equals(1))
    t.check("second", case["n"], at_most(1))
    t.soft("soft", case["n"], at_least(2))

cases = [{"name": "one", "n": 1}, {"name": "two", "n": 2}]
define_eval(name="numbers", agent=says("Hi"), test=test, cases=cases, tags=["quick-one"])
"""


def run(folder: Path, *options: str, timeout_s: float = 55, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "lousho_ray.evals.pytest_plugin", *options]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "LOUSHO_EVAL_RESULTS")}
    return subprocess.run(
        command,
        cwd=folder,
        env={**clean, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_each_case_is_an_item_and_its_soft_failures_are_warnings(tmp_path: Path) -> None:
    # EVAL-44
    write_evals(tmp_path, EVALS)
    write_evals(tmp_path, "raise RuntimeError", "some.judge.eval.py")  # EVAL-20: not even loaded
    results = tmp_path / "r.jsonl"
    done = run(tmp_path, "-v", LOUSHO_EVAL_RESULTS=str(results))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "some.eval.py::numbers[one] PASSED" in done.stdout
    assert "some.eval.py::numbers[two] FAILED" in done.stdout
    assert "first: expected 1, got 2\nsecond: 2 is not at most 1" in done.stdout
    assert "EvalWarning: numbers[one] soft: 1 is not at least 2" in done.stdout
    assert results.read_text().count('"type":"case"') == 2


def test_tags_are_markers(tmp_path: Path) -> None:
    # EVAL-44
    write_evals(tmp_path, EVALS)
    assert "2 deselected" in run(tmp_path, "-m", "not quick_one", "--strict-markers").stdout


def test_a_file_that_does_not_load_is_an_error_of_collection(tmp_path: Path) -> None:
    write_evals(tmp_path, "raise RuntimeError('broken')")
    done = run(tmp_path)
    assert done.returncode == 2
    assert "RuntimeError: broken" in done.stdout


def test_fixtures_for_tests_of_agents(tmp_path: Path) -> None:
    (tmp_path / "test_agent.py").write_text(
        "from lousho_ray import create_agent\n"
        "def test_it(lousho_mock_model, lousho_store, lousho_clock):\n"
        "    agent = create_agent(provider=lousho_mock_model(['Hi']), store=lousho_store, runtime='local')\n"
        "    assert agent.session('s').send_sync('x').text == 'Hi'\n"
        "    assert lousho_clock.now() == lousho_clock.now()\n"
    )
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout


def test_a_test_runs_in_both_runtimes_and_only_one_of_them_needs_ray(tmp_path: Path) -> None:
    (tmp_path / "test_agent.py").write_text("def test_it(lousho_runtime):\n    assert lousho_runtime in ('local', 'ray')\n")
    done = run(tmp_path, "-v", "-m", "not ray_local", "--strict-markers")
    assert "test_it[local] PASSED" in done.stdout
    assert "1 passed, 1 deselected" in done.stdout
