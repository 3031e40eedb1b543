"""A column of the table of turn policies (`docs/sessions.md`) with the turn in a session actor: `steer`, while the turn streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import MemorySessionStore, SqliteStore, create_agent
from lousho_ray.stores.parts import Parts
from tests.ray.processes import eventually, session_actors
from tests.unit.loop_support import check_transcript, shape
from tests.unit.test_turn_policy_matrix import CELLS, Model, seen, tools_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

HERE_ONLY = ("between steps", "just after the end")
"""Moments at which only something in the turn's own process can hold it."""

COLUMN = [
    pytest.param(moment, outcome, id=moment)
    for moment, policy, started, call, outcome in (cell.values for cell in CELLS)
    if (policy, started, call) == ("steer", "stream", "send") and moment not in HERE_ONLY
]


@ray.remote(num_cpus=0)
class Held:
    """Where the turn and the test meet."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def ask(self, told: list[str]) -> int:
        self.requests.append(told)
        return len(self.requests)

    async def hold(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            await self.open.wait()

    async def wait_reached(self) -> None:
        await self.reached.wait()

    async def release(self) -> list[list[str]]:
        self.open.set()
        return self.requests

    async def asked(self) -> list[list[str]]:
        return self.requests


class RemoteMoment:
    """A moment of a turn that runs in another process."""

    def __init__(self, name: str, held: Any) -> None:
        self.name = name
        self.held = held

    async def asked(self, told: list[str]) -> int:
        return int(await self.held.ask.remote(told))

    async def here(self, name: str) -> None:
        if name == self.name:
            await self.held.hold.remote()


@pytest.mark.parametrize(("moment", "outcome"), COLUMN)
async def test_a_steering_call_on_ray(moment: str, outcome: str, tmp_path: Path) -> None:
    # SES-28, SES-39, SES-40, SES-41, SES-49, SES-74, SES-D7
    held: Any = Held.remote()
    remote = RemoteMoment(moment, held)
    file = SqliteStore(tmp_path / "s.db")
    store: Any = file
    if moment != "while paused, durable":
        store = Parts(MemorySessionStore())
    agent = create_agent(provider=Model(remote), tools=tools_of(remote), store=store, tool_concurrency=1, runtime="ray")
    run = agent.session("s").stream("a")
    if moment.startswith("while paused"):
        assert (await run.result).finish_reason == "awaiting-approval"
    else:
        await held.wait_reached.remote()
    late = asyncio.ensure_future(agent.session("s", turn_policy="steer").send("b"))

    async def arrived() -> bool:
        return late.done() or sum(await asyncio.gather(*[actor.turns.remote() for actor in session_actors()])) == 2

    if not moment.startswith("while paused"):
        await eventually(arrived)
    await held.release.remote()
    first, second = await asyncio.gather(run.result, late, return_exceptions=True)
    saved = await agent.session("s").load()
    check_transcript(saved)
    assert seen(await held.asked.remote(), first, second, shape(saved)) == outcome
    await file.aclose()
    ray.kill(held)
