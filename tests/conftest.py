"""What holds for every test: no key and no setting of the machine it runs on, strict error codes, no task left behind."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import lousho_ray.errors

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", max_examples=2_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
"""A test run gives the same answer twice; `make search` looks for new inputs that break something."""

FOREIGN_PREFIXES = ("ANTHROPIC_", "LOUSHO_", "OLLAMA_", "OPENAI_", "OPENROUTER_")
FOREIGN_SUFFIXES = ("_API_KEY",)
FOREIGN = frozenset({"RAY_ADDRESS", "RAY_NAMESPACE", "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"})
"""Variables of a developer's machine that would change what is tested (in small letters, too)."""

FOLDER = Path(__file__).parent
ON_RAY = (FOLDER / "ray", FOLDER / "e2e")
"""Folders whose tests choose the runtime themselves; everywhere else agents run in this process."""

SETTLE_S = 2.0
"""How long tasks that a test has told to end may take for it."""


def pytest_configure() -> None:
    # Before any fixture: a Ray that is started for the whole session inherits the environment, too.
    for name in list(os.environ):
        if name.upper() in FOREIGN or name.startswith(FOREIGN_PREFIXES) or name.endswith(FOREIGN_SUFFIXES):
            del os.environ[name]
    lousho_ray.errors.STRICT = True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `-n`: what starts clusters and kills processes runs in one process, one after the other; the rest goes by files."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            on_ray = any((config.rootpath / file).is_relative_to(folder) for folder in ON_RAY)
            return "processes" if on_ray else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(request.path.is_relative_to(folder) for folder in ON_RAY):
        monkeypatch.setenv("LOUSHO_RUNTIME", "local")
    if inspect.iscoroutinefunction(inspect.unwrap(request.node.obj)):
        # Asked for before the fixtures of the test, it ends after them.
        request.getfixturevalue("_no_task_left")


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = {task for task in asyncio.all_tasks() if task not in before and task is not asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=SETTLE_S)
    assert not left, f"The test left tasks running: {[repr(task.get_coro()) for task in left]}"
