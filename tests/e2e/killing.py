"""A child process that is killed where it stands still."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


async def kill_when_reached(module: str, *arguments: str, point: str, env: Mapping[str, str] | None = None) -> None:
    """Runs a module of the tests, which says `reached` when it stands still at `point`, and kills it there."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module, *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=env,
    )
    assert child.stdout is not None
    try:
        said = await child.stdout.readline()
    finally:
        child.kill()
        await child.communicate()
    assert said == b"reached\n", f"the child never came to {point!r}: {said!r}"
