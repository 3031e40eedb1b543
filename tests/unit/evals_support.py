"""What the tests of evals share: eval files written to a folder of the test's own, and a suite run on them."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console

from lousho_ray.evals.definition import EvalDefinition, collecting, define_eval
from lousho_ray.evals.suite import Outcome, Suite, SuiteOptions

HEAD = """
import asyncio
from lousho_ray import create_agent, tool
from lousho_ray.evals import *
from lousho_ray.testing import mock_model

def says(*script, **options):
    return lambda: create_agent(provider=mock_model(list(script)), **options)
"""


def write_evals(folder: Path, body: str, name: str = "some.eval.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + textwrap.dedent(body), "utf-8")
    return path


def console() -> Console:
    return Console(file=io.StringIO(), width=200, soft_wrap=True)


async def run_suite(folder: Path, screen: Console | None = None, **options: Any) -> Outcome:
    return await Suite(SuiteOptions(root=folder, **options), screen or console()).run()


async def run_body(folder: Path, body: str, **options: Any) -> Outcome:
    """Writes one eval file and runs it."""
    write_evals(folder, body)
    return await run_suite(folder, **options)


def defined(**options: Any) -> EvalDefinition:
    """A definition as an eval file would make it."""
    with collecting(Path("some.eval.py")):
        return define_eval(**options)


def printed(screen: Console) -> str:
    file = screen.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()
