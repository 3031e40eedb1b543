"""`kill -9` of a session actor in the middle of a durable turn, at every point where something was done and is not yet written
down, or the reverse. The caller's own call goes on: the turn is resumed on the actor that takes over.

The actor stands still at the point that the file `point` names, whatever it was about to do; the file is then `reached`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray.actors.cluster import NAMESPACE
from lousho_ray.actors.store import RemoteStore, StoreReference
from lousho_ray.errors import AgentExecutionError, LoushoError
from lousho_ray.testing.fake_server import FakeServer
from tests.contract.s3_server import S3Server, store_of
from tests.e2e.durable_child import ALONE, SESSION, STAGES, agent_on, answer, open_store
from tests.e2e.test_kill_durable import GUARDED, TWICE, check_whole
from tests.ray.processes import eventually, kill_process
from tests.unit.loop_support import results, shape

# An actor that was killed takes its time to come back.
pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]


def reached(folder: Path, point: str) -> bool:
    """Whether this is the point to stand still at. It is so once."""
    file = folder / "point"
    if not file.exists() or file.read_text() != point:
        return False
    file.rename(folder / "reached")
    return True


def stop_at_stages(_: Any, folder: Path) -> None:
    """Runs in a session actor: it stands still before or after the call of its store that is the point."""
    call = RemoteStore.call

    async def stopping(store: RemoteStore, part: str, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        stage = STAGES.get(f"{part}.{method}")
        if stage is None:
            return await call(store, part, method, args, options)
        name = stage(*args)
        if reached(folder, f"before {name}") or name == ALONE.get(_point(folder)):
            await asyncio.Event().wait()
        value = await call(store, part, method, args, options)
        if reached(folder, f"after {name}"):
            await asyncio.Event().wait()
        return value

    RemoteStore.call = stopping  # type: ignore[method-assign]


def _point(folder: Path) -> str:
    """The point of this test, before and after it was reached."""
    return next((file.read_text() for name in ("point", "reached") if (file := folder / name).exists()), "")


@dataclass
class World:
    """A session whose actor can be killed."""

    server: FakeServer
    folder: Path
    agent: Any
    session: Any

    @property
    def lines(self) -> list[str]:
        file = self.folder / "lines"
        return file.read_text().split("\n")[:-1] if file.exists() else []

    async def killed_at(self, point: str, input: str, *, decided: str | None = None) -> Any:
        """Streams a turn whose actor is killed at `point`; its result, once the caller's stream has come to its end.

        With `decided` the turn is the one that an approval of that pause continues.
        """
        await eventually(self._there, timeout_s=90)
        _, actor = await self.session.link.reach()
        await actor.__ray_call__.remote(stop_at_stages, self.folder)
        (self.folder / "point").write_text(point)
        turn = self.session.stream(input) if decided is None else await self.agent.approvals.stream_resolve(decided, approved=True)
        events = asyncio.create_task(_all(turn))
        await eventually(self._reached, timeout_s=90)
        await kill_process(actor)
        (self.folder / "reached").unlink()
        told = await events  # R6: the stream goes on over the death of the actor
        assert [event.seq for event in told] == list(range(len(told)))
        assert told[-1].type == "run.done"
        assert sum(event.type == "run.done" for event in told) == 1
        result = await turn.result
        assert told[-1].finish_reason == result.finish_reason
        return result

    async def _there(self) -> bool:
        """Whether the session's actor answers: the test before may have killed it."""
        try:
            await self.session.load()
        except AgentExecutionError:
            return False
        return True

    async def _reached(self) -> bool:
        return (self.folder / "reached").exists()

    async def check_end(self, expected: list[str]) -> None:
        saved = await self.session.load()
        assert shape(saved) == expected
        check_whole(saved)
        assert await self.session.pending() is None
        assert (await self.session.send("next")).text == "next done"


async def _all(turn: Any) -> list[Any]:
    return [event async for event in turn]


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with FakeServer(timeout_s=90) as server, AsyncExitStack() as closing:
        server.respond(answer)
        if request.param == "s3":
            store = store_of(closing.enter_context(S3Server()))
        else:
            store = open_store(f"sqlite:{tmp_path / 'runs.db'}", 0)
        await closing.enter_async_context(store)
        folder = tmp_path

        def stop(point: str) -> None:
            if reached(folder, point):
                threading.Event().wait()

        agent = agent_on(
            server.compatible_url, store, folder / "lines", stop, slow=lambda: (folder / "point").exists(), runtime="ray"
        )
        yield World(server, folder, agent, agent.session(SESSION))
        assert server.violations == []
        with suppress(ValueError):  # a test that failed early has none
            ray.kill(ray.get_actor(StoreReference.of_location(store.location, store).name, NAMESPACE))


SLOW = pytest.mark.slow

TURNS = [
    # the model has answered, nobody has written it down: the model is asked again, no tool had run
    ("before asked", ["a c1", "b c2"], 4),
    # the answer is written down, no tool has run
    ("after asked", ["a c1", "b c2"], 3),
    # in a tool, and after it but before its result is written down: that call runs again under the same id
    ("in a", ["a c1", "a c1", "b c2"], 3),
    ("before result 1", ["a c1", "a c1", "b c2"], 3),
    # the result is written down
    ("after result 1", ["a c1", "b c2"], 3),
    ("in b", ["a c1", "b c2", "b c2"], 3),
    ("before result 2", ["a c1", "b c2", "b c2"], 3),
    ("after result 2", ["a c1", "b c2"], 3),
]
SQLITE = [
    ("before open", ["a c1", "b c2"], 3),  # nothing of the turn is in the store: it is sent again
    ("after open", ["a c1", "b c2"], 3),  # its input is in the store
    ("before end", ["a c1", "b c2"], 4),  # the last reply alone was not in the store
    ("after end", ["a c1", "b c2"], 3),
]
S3 = [
    ("after opened", ["a c1", "b c2"], 3),
    ("after finished", ["a c1", "b c2"], 3),
    ("after transcript", ["a c1", "b c2"], 3),
    ("before delete", ["a c1", "b c2"], 3),
    ("after delete", ["a c1", "b c2"], 3),
]
USUAL = {("sqlite", point) for point in ("in a", "after result 1", "after end")} | {("s3", "after finished")}


def cases() -> list[Any]:
    """The whole matrix; all but a few that stand for it are slow."""
    found = [("sqlite", *case) for case in [*TURNS, *SQLITE]] + [("s3", *case) for case in [*TURNS, *S3]]
    return [
        pytest.param(*case, id=f"{case[0]}-{case[1]}".replace(" ", "-"), marks=() if case[:2] in USUAL else SLOW) for case in found
    ]


@pytest.mark.parametrize(("world", "point", "lines", "requests"), cases(), indirect=["world"])
async def test_the_turn_of_a_killed_actor_goes_on_where_it_was(  # DUR-D8, DEC-R6, DUR-20, DUR-31, DUR-33, SES-45, SES-76
    world: World, point: str, lines: list[str], requests: int
) -> None:
    result = await world.killed_at(point, "twice")
    assert result.text == "twice done"
    assert sorted(world.lines) == lines
    assert len(world.server.requests) == requests
    await world.check_end(TWICE)


BOTH = pytest.mark.parametrize("world", ["sqlite", pytest.param("s3", marks=SLOW)], indirect=True)


@BOTH
async def test_results_behind_a_slower_call_survive_the_actor(world: World) -> None:  # LES-64
    result = await world.killed_at("after ahead", "behind")
    assert result.text == "behind done"
    assert world.lines.count("slow c1") == 2
    once = sum(world.lines.count(line) == 1 for line in ("b c2", "c c3"))
    assert once >= 1, "the result that was written down is not made again"
    assert len(world.server.requests) == 2
    calls = ["assistant:+slow,mark,mark", "tool:slow", "tool:mark", "tool:mark"]
    await world.check_end(["user:behind", *calls, "assistant:behind done"])


@pytest.mark.parametrize("world", [pytest.param(kind, marks=SLOW) for kind in ("sqlite", "s3")], indirect=True)
@pytest.mark.parametrize("point", ["in pay", "before result 1"])
async def test_a_once_only_call_is_not_repeated_by_the_actor_that_takes_over(world: World, point: str) -> None:  # DEC-R7
    await world.killed_at(point, "once")
    assert world.lines == ["pay c1"]
    assert results(await world.session.load())[0]["outcome"] == "unknown"
    await world.check_end(["user:once", "assistant:+pay", "tool:pay", "assistant:once done"])


@BOTH
@pytest.mark.parametrize("point", ["after approval", pytest.param("after paused", marks=SLOW)])
async def test_an_actor_killed_while_it_pauses_leaves_one_pause(world: World, point: str) -> None:  # DUR-19, DUR-D8, SES-52
    if point == "after paused":
        with pytest.raises(Exception, match="waits for a decision"):
            await world.killed_at(point, "guarded")
        approval_id = (await world.session.pending()).approval_id
    else:
        approval_id = (await world.killed_at(point, "guarded")).approval_id
    assert world.lines == ["a c1"]
    assert len(world.server.requests) == 1
    await world.agent.approvals.resolve(approval_id, approved=True)
    assert world.lines == ["a c1", "g c2", "b c3"]
    await world.check_end(GUARDED)


DECIDED = [
    # the pause is still open: the approval is sent again
    ("before claim", ["a c1", "g c2", "b c3"]),
    # it was taken, and nothing else is written down: the approval is in the claim, and its actor is known to have died
    ("after claim", ["a c1", "g c2", "b c3"]),
    ("before decided 1", ["a c1", "g c2", "b c3"]),
    # the approval is in the record of the turn
    ("after decided 1", ["a c1", "g c2", "b c3"]),
    ("in g", ["a c1", "g c2", "g c2", "b c3"]),
    ("after decided 2", ["a c1", "g c2", "b c3"]),
    ("before end", ["a c1", "g c2", "b c3"]),
    # the turn is saved, and its caller had not been told
    ("after end", ["a c1", "g c2", "b c3"]),
]


def decisions() -> list[Any]:
    """The matrix; all but three are slow. An S3 store ends a turn in several steps, so that its end is none of its points."""
    ends = ("before end", "after end")
    found = [(kind, *case) for kind in ("sqlite", "s3") for case in DECIDED if kind == "sqlite" or case[0] not in ends]
    usual = {("sqlite", "before claim"), ("sqlite", "after claim"), ("sqlite", "after end")}
    return [
        pytest.param(*case, id=f"{case[0]}-{case[1]}".replace(" ", "-"), marks=() if case[:2] in usual else SLOW) for case in found
    ]


@pytest.mark.parametrize(("world", "point", "lines"), decisions(), indirect=["world"])
async def test_an_approval_outlives_the_actor_that_was_to_carry_it_out(world: World, point: str, lines: list[str]) -> None:
    # field cases S05, S07: approved once, asked for once, and run by whoever takes over
    paused = await world.session.send("guarded")
    result = await world.killed_at(point, "guarded", decided=paused.approval_id)
    assert result.text == "guarded done"
    assert world.lines == lines
    await world.check_end(GUARDED)
    with pytest.raises(LoushoError) as raised:
        await world.agent.approvals.resolve(paused.approval_id, approved=False)
    assert raised.value.code == "LOUSHO_APPROVAL_NOT_FOUND"
