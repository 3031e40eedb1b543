"""Steering a running suite from elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.cli.eval_control import _control
from lousho_ray.errors import AgentExecutionError, ConfigurationError
from lousho_ray.evals import control
from lousho_ray.evals.suite import Outcome, Suite, SuiteOptions, running_folder
from tests.unit.evals_support import console, write_evals

BODY = """
from pathlib import Path
here = Path(__file__).parent
running = most = 0

async def model(request):
    global running, most
    running += 1
    most = max(most, running)
    (here / "most").write_text(str(most))
    while not (here / "go").exists():
        await asyncio.sleep(0.005)
    running -= 1
    return "x"

async def test(t):
    await t.send("x")

define_eval(name="e", agent=lambda: create_agent(provider=mock_model([model])), test=test, repeat=12)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(control, "EXCHANGE_S", 0.01)
    monkeypatch.chdir(tmp_path)


@asynccontextmanager
async def suite_under_way(folder: Path, **options: Any) -> AsyncIterator[asyncio.Task[Outcome]]:
    write_evals(folder, BODY)
    task = asyncio.create_task(Suite(SuiteOptions(root=folder, **options), console()).run())
    await until(lambda: (folder / "most").exists() and list(running_folder(folder).glob("*.json")))
    try:
        yield task
    finally:
        (folder / "go").touch()
        await asyncio.wait({task})


async def until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def ask(verb: str, wanted: str | None = None, **options: Any) -> dict[str, Any]:
    status = await _control(wanted, {"verb": verb, "concurrency": None, "limits": {}, **options})
    return dict(status)


async def test_a_suite_shows_how_it_stands(tmp_path: Path) -> None:
    async with suite_under_way(tmp_path, concurrency=3, limits={"max_concurrent": 50}):
        await until(lambda: _status(tmp_path).get("running") == 3)
        status = await ask("status")
        assert (status["state"], status["total"], status["concurrency"]) == ("running", 12, 3)
        assert status["limits"] == {"max_concurrent": 50}
        assert await ask("status", status["id"][:4])
    assert list(running_folder(tmp_path).iterdir()) == []


async def test_a_paused_suite_starts_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    async with suite_under_way(tmp_path, concurrency=3) as task:
        await until(lambda: _status(tmp_path).get("running") == 3)
        assert (await ask("pause"))["state"] == "paused"
        (tmp_path / "go").touch()
        await until(lambda: _status(tmp_path).get("done") == 3)
        assert not task.done()
        assert _status(tmp_path)["running"] == 0
        await ask("resume")
        assert (await task).summary.totals()["passed"] == 12


async def test_a_cancelled_suite_keeps_what_has_ended(tmp_path: Path) -> None:
    async with suite_under_way(tmp_path, concurrency=2) as task:
        await until(lambda: _status(tmp_path).get("running") == 2)
        await ask("cancel")
        outcome = await task
        assert (outcome.exit_code, outcome.summary.totals()["outage"], outcome.summary.not_run) == (130, 2, 10)


async def test_concurrency_and_limits_change_while_it_runs(tmp_path: Path) -> None:
    async with suite_under_way(tmp_path, concurrency=2) as task:
        status = await ask("retune", concurrency=5, limits={"max_concurrent": 4})
        assert (status["concurrency"], status["limits"]) == (5, {"max_concurrent": 4})
        await until(lambda: (tmp_path / "most").read_text() == "5")
        assert (await ask("retune", concurrency=1))["concurrency"] == 1
        (tmp_path / "go").touch()
        assert (await task).summary.totals()["passed"] == 12
    assert (tmp_path / "most").read_text() == "5"


async def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No suite runs here"):
        await ask("pause")
    async with suite_under_way(tmp_path):
        with pytest.raises(ConfigurationError, match="has the id 'zzz'"):
            await ask("pause", "zzz")
        with pytest.raises(ConfigurationError, match="could not do it: retune"):
            await ask("retune", limits={"requests_per_minute": -1})
        assert _status(tmp_path)["state"] == "running"


async def test_a_board_that_is_lost_leaves_the_suite_and_its_other_boards() -> None:
    class Lost:
        async def exchange(self, status: control.Status) -> list[control.Command]:
            raise AgentExecutionError("The board of the suite was lost.")

        async def close(self) -> None: ...

    class Kept(Lost):
        seen = 0

        async def exchange(self, status: control.Status) -> list[control.Command]:
            self.seen += 1
            return []

    async def use_limiter(limiter: Any) -> None: ...

    def done(*arguments: Any) -> None: ...

    kept = Kept()
    steering = control.Steering([Lost(), kept], dict, done, done, done, done, use_limiter, {})
    task = asyncio.create_task(steering.run())
    await until(lambda: kept.seen > 2)
    task.cancel()
    await asyncio.wait({task})


async def test_a_suite_that_died_is_told_from_one_that_runs(tmp_path: Path) -> None:
    folder = running_folder(tmp_path)
    folder.mkdir(parents=True)
    base = {"writtenAt": time.time(), "host": socket.gethostname(), "state": "running"}
    (folder / "dead.json").write_text(json.dumps({**base, "id": "dead", "pid": 2**22 + 1}))
    (folder / "quiet.json").write_text(json.dumps({**base, "id": "quiet", "pid": os.getpid(), "writtenAt": 0}))
    states = {(await suite.status())["id"]: (await suite.status())["state"] for suite in control.suites_in(folder)}
    assert states == {"dead": "died", "quiet": "silent"}
    assert (await ask("status"))["id"] == "quiet"


def _status(folder: Path) -> dict[str, Any]:
    found = list(running_folder(folder).glob("*.json"))
    status: dict[str, Any] = json.loads(found[0].read_text()) if found else {}
    return status
