"""`docs/guarantees.md` names a test for each promise: every one of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_is_shown_by_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    named = re.findall(r"`((?:[\w/]+/)?test_\w+\.py)::(\w+)`", text)
    assert len(named) > 10
    missing = []
    for file, function in named:
        path = ROOT / file if "/" in file else ROOT / "tests" / "ray" / file
        if not path.exists() or function not in functions_of(path):
            missing.append(f"{file}::{function}")
    assert missing == []
