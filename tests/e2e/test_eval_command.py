"""The `lousho` command as a process: the example, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lousho_ray.evals.results import read_results

ROOT = Path(__file__).parents[2]
SLOW = """
import asyncio
from lousho_ray import create_agent
from lousho_ray.evals import define_eval
from lousho_ray.testing import mock_model

async def test(t, case):
    await t.send("x")
    if case:
        await asyncio.Event().wait()

define_eval(name="slow", agent=lambda: create_agent(provider=mock_model(["x"])), test=test, cases=[0, 1, 2])
"""


def command(folder: Path, *options: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "lousho_ray.cli", "eval", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "LOUSHO_RUNTIME": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_example_passes(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "evals")
    done = command(tmp_path, example, "--html=report.html", "--junit=report.xml")
    said, _ = done.communicate(timeout=55)
    assert done.returncode == 0, said
    assert "PASSED: 3 cases, 3 passed" in said
    assert (tmp_path / "report.html").stat().st_size > 1_000


def test_ctrl_c_stops_what_runs_writes_the_reports_and_is_130(tmp_path: Path) -> None:
    # CLI-05, EVAL-24
    (tmp_path / "slow.eval.py").write_text(SLOW)
    results = tmp_path / "r.jsonl"
    running = command(tmp_path, f"--results={results}", "--json=report.json", "--concurrency=3")
    deadline = time.monotonic() + 50
    while not read_results(results).records and time.monotonic() < deadline:
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=50)
    assert running.returncode == 130, said
    assert (tmp_path / "report.json").stat().st_size > 100
    assert sorted(record.status for record in read_results(results).records.values()) == ["outage", "outage", "passed"]
    assert "The same command goes on with the rest:\n  lousho eval" in said
