"""The public types, as a strict type checker sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).with_name("sample.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_results_options_and_tools_keep_their_types() -> None:
    # LES-50, CA-07
    # `--warn-unused-ignores` (part of strict) makes an error that is no longer one a failure, too.
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(SAMPLE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_sample_is_what_its_checks_say_it_is() -> None:
    """A sample that asserts nothing would pass."""
    text = SAMPLE.read_text()
    assert text.count("assert_type(") >= 25
    assert text.count("# type: ignore[") >= 6
