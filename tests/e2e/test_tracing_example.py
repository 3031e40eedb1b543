"""`examples/tracing.py` as people run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "tracing.py"
CHILD = ["│  └─ invoke_agent forecaster", "│     ├─ chat mock-1", "│     ├─ execute_tool temperature", "│     └─ chat mock-1"]
TREE = ["invoke_agent lead", "├─ chat mock-1", *["├─ execute_tool task", *CHILD] * 3, "└─ chat mock-1"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_both_runtimes_print_the_same_tree(runtime: str, tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), "--dir", "traces", "--runtime", runtime],
        cwd=tmp_path,
        env={**inherited, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(EXAMPLE.parents[1])},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said, _, line, _, head, *tree = done.stdout.splitlines()
    assert said == "Asked for 3 cities."
    assert line.endswith("8 model calls  6 tool calls  960 in / 240 out  $0.0016  ok")
    assert head.endswith("  ok")
    assert [next(expected for expected in TREE if line.startswith(expected)) for line in tree] == TREE
    assert tree[0].endswith("960 in / 240 out  $0.0016  stop")
    assert "ValueError: no station in Atlantis" in done.stdout
    assert len(list((tmp_path / "traces").rglob("*.jsonl"))) == 1
