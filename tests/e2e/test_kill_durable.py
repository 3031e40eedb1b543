"""`kill -9` in the middle of a durable turn, at every point where something was done and is not yet written down, or the reverse.

A child process runs the turn and stands still at the point; it is killed there; this process then goes on from the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import LoushoError
from lousho_ray.errors import SessionAwaitingApprovalError
from lousho_ray.messages import Message, complete_prefix
from lousho_ray.testing.fake_server import FakeServer
from tests.contract.s3_server import S3Server
from tests.e2e.durable_child import SESSION, agent_on, answer, open_store
from tests.e2e.killing import kill_when_reached
from tests.unit.loop_support import check_transcript, results, shape

LEASE_S = 60.0
"""More than the lease of a process that has died."""


@dataclass
class World:
    """The server, where the store is, and the lines that tools have written."""

    server: FakeServer
    place: str
    lines_file: Path
    store: Any
    agent: Any = field(init=False)

    def __post_init__(self) -> None:
        self.agent = agent_on(self.server.compatible_url, self.store, self.lines_file)
        self.session = self.agent.session(SESSION)

    @property
    def lines(self) -> list[str]:
        return self.lines_file.read_text().split("\n")[:-1] if self.lines_file.exists() else []

    async def kill_at(self, point: str, input: str, later_s: float = 0.0) -> None:
        """Runs a turn in a process of its own, which is killed at `point`."""
        await kill_when_reached(
            "tests.e2e.durable_child",
            *(self.server.compatible_url, self.place, str(self.lines_file), input, point, str(later_s)),
            point=point,
            env={**os.environ, "SLOW": "for ever", "LOUSHO_RUNTIME": "local"},
        )

    async def go_on(self, how: str) -> None:
        """Finishes the interrupted turn, by `resume()` or ahead of the next turn."""
        if how == "resume":
            await self.session.resume()
        else:
            assert (await self.session.send("next")).text == "next done"


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """`parts` is a store whose parts are called one by one, `sqlite` one that begins and ends a turn in one step, `s3` a bucket."""
    kind = getattr(request, "param", "parts")
    async with FakeServer() as server, AsyncExitStack() as closing:
        server.respond(answer)
        where = closing.enter_context(S3Server()).endpoint if kind == "s3" else str(tmp_path / "runs.db")
        store = await closing.enter_async_context(open_store(f"{kind}:{where}", 2 * LEASE_S))
        yield World(server, f"{kind}:{where}", tmp_path / "lines", store)
        assert server.violations == []


STORES = [pytest.param("parts", id="parts"), pytest.param("s3", id="s3", marks=pytest.mark.slow)]


async def check_end(world: World, how: str, expected: Sequence[str]) -> None:
    """The session is whole: every provider accepts it, each call has one result, nothing is pending."""
    saved = await world.session.load()
    after = ["user:next", "assistant:next done"] if how == "send" else []
    assert shape(saved) == [*expected, *after]
    check_whole(saved)
    assert await world.session.pending() is None


def check_whole(saved: Sequence[Message]) -> None:
    check_transcript(saved)  # DUR-32
    assert complete_prefix(saved) == list(saved)
    called = [call.id for message in saved for call in message.tool_calls]
    assert [message.tool_call_id for message in saved if message.role == "tool"] == called  # DUR-30


TWO = ["user:two", "assistant:+mark,mark", "tool:mark", "tool:mark", "assistant:two done"]
TWICE = ["user:twice", "assistant:+mark", "tool:mark", "assistant:+mark", "tool:mark", "assistant:twice done"]


@pytest.mark.parametrize("world", STORES, indirect=True)
@pytest.mark.parametrize(
    ("point", "input", "lines", "requests", "how"),
    [
        # the model has answered, nobody has written it down: the model is asked again, no tool had run
        ("before asked", "two", ["a c1", "b c2"], 3, "resume"),
        # the answer is written down, no tool has run
        ("after asked", "two", ["a c1", "b c2"], 2, "send"),
        # in a tool, and after it but before its result is written down: that call runs again under the same id
        ("in a", "twice", ["a c1", "a c1", "b c2"], 3, "resume"),
        ("before result 1", "twice", ["a c1", "a c1", "b c2"], 3, "send"),
        # the result is written down
        ("after result 1", "twice", ["a c1", "b c2"], 3, "resume"),
        ("in b", "twice", ["a c1", "b c2", "b c2"], 3, "send"),
        ("before result 2", "twice", ["a c1", "b c2", "b c2"], 3, "resume"),
        ("after result 2", "twice", ["a c1", "b c2"], 3, "send"),
        # the turn has ended: its transcript is in the checkpoint, in the session, or in both
        ("after finished", "twice", ["a c1", "b c2"], 3, "resume"),
        ("after transcript", "twice", ["a c1", "b c2"], 3, "send"),
        ("before delete", "twice", ["a c1", "b c2"], 3, "resume"),
    ],
)
async def test_a_killed_turn_goes_on_where_it_was(  # S01, DUR-D8, DUR-11, DUR-12, DUR-20, DUR-31, DUR-33, SES-45, SES-47, SES-48
    world: World, point: str, input: str, lines: list[str], requests: int, how: str
) -> None:
    await world.kill_at(point, input)
    await world.go_on(how)
    assert sorted(world.lines) == lines
    assert len(world.server.requests) == requests + (how == "send")
    await check_end(world, how, TWO if input == "two" else TWICE)


@pytest.mark.parametrize(
    ("world", "point", "lines", "requests"),
    [
        ("sqlite", "before open", ["a c1", "b c2"], 3),  # nothing of the turn is in the file: its caller sends it again
        ("sqlite", "after open", ["a c1", "b c2"], 3),
        ("sqlite", "after result 1", ["a c1", "b c2"], 3),
        ("sqlite", "before end", ["a c1", "b c2"], 4),  # the last reply alone was not in the file
        ("sqlite", "after end", ["a c1", "b c2"], 3),
        ("s3", "after result 1", ["a c1", "b c2"], 3),
        ("s3", "after finished", ["a c1", "b c2"], 3),
    ],
    indirect=["world"],
)
async def test_a_killed_turn_goes_on_in_each_kind_of_store(  # DUR-D8, DUR-31, SES-45
    world: World, point: str, lines: list[str], requests: int
) -> None:
    await world.kill_at(point, "twice")
    if point == "before open":
        assert await world.session.pending() is None
        await world.session.send("twice")
    else:
        await world.go_on("resume")
    assert sorted(world.lines) == lines
    assert len(world.server.requests) == requests
    await check_end(world, "resume", TWICE)


@pytest.mark.parametrize("world", STORES, indirect=True)
@pytest.mark.parametrize("point", ["before finished", "before transcript"])
async def test_a_turn_killed_at_its_end_asks_for_nothing_it_has_written_down(world: World, point: str) -> None:  # DUR-D8
    await world.kill_at(point, "twice")
    await world.go_on("resume")
    assert sorted(world.lines) == ["a c1", "b c2"]
    assert len(world.server.requests) <= 4  # the last reply alone was not in the file
    await check_end(world, "resume", TWICE)


async def test_a_turn_killed_before_its_first_reply_is_asked_for_again(world: World) -> None:  # DUR-20
    await world.kill_at("after opened", "plain")
    assert await world.session.pending() is not None
    result = await world.session.resume()
    assert result.text == "plain done"
    assert len(world.server.requests) == 1
    await check_end(world, "resume", ["user:plain", "assistant:plain done"])


@pytest.mark.parametrize("world", STORES, indirect=True)
async def test_results_behind_a_slower_call_survive(world: World) -> None:  # LES-64
    await world.kill_at("after ahead", "behind")
    before = world.lines
    assert "slow c1" in before
    await world.go_on("resume")
    ran_again = world.lines[len(before) :]
    assert "slow c1" in ran_again
    assert len([line for line in ran_again if line != "slow c1"]) < 2  # the result that was written down is not made again
    calls = ["assistant:+slow,mark,mark", "tool:slow", "tool:mark", "tool:mark"]
    await check_end(world, "resume", ["user:behind", *calls, "assistant:behind done"])
    assert len(world.server.requests) == 2


@pytest.mark.parametrize("point", ["in pay", "before result 1"])
async def test_an_interrupted_once_only_call_is_not_repeated(world: World, point: str) -> None:  # S02, DEC-R7
    await world.kill_at(point, "once")
    assert world.lines == ["pay c1"]
    await world.go_on("resume")
    assert world.lines == ["pay c1"]
    saved = await world.session.load()
    assert results(saved)[0]["outcome"] == "unknown"
    await check_end(world, "resume", ["user:once", "assistant:+pay", "tool:pay", "assistant:once done"])


async def test_a_once_only_call_that_never_began_runs(world: World) -> None:  # DEC-R7
    await world.kill_at("after asked", "once")
    await world.go_on("resume")
    assert world.lines == ["pay c1"]


async def test_a_once_only_call_with_a_recorded_result_keeps_it(world: World) -> None:  # S02, DEC-R7, DUR-31
    await world.kill_at("after result 1", "once")
    await world.go_on("resume")
    assert world.lines == ["pay c1"]
    assert results(await world.session.load()) == ["paid"]


GUARDED = ["user:guarded", "assistant:+mark,guarded,mark", "tool:mark", "tool:guarded", "tool:mark", "assistant:guarded done"]


@pytest.mark.parametrize("world", STORES, indirect=True)
async def test_killed_between_the_approval_and_the_checkpoint_it_pauses_again(world: World) -> None:  # DUR-19, APR-13
    await world.kill_at("after approval", "guarded")
    pending = await world.session.pending()
    assert pending.status == "in-progress"
    result = await world.session.resume()
    assert result.finish_reason == "awaiting-approval"
    assert world.lines == ["a c1"]
    assert len(world.server.requests) == 1
    await world.agent.approvals.resolve(result.approval_id, approved=True)
    assert world.lines == ["a c1", "g c2", "b c3"]
    await check_end(world, "resume", GUARDED)


@pytest.mark.parametrize("world", STORES, indirect=True)
async def test_a_pause_outlives_its_process(world: World) -> None:  # SES-49, SES-52, LES-61, APR-54
    await world.kill_at("after paused", "guarded")
    pending = await world.session.pending()
    for refused in (world.session.resume, lambda: world.session.send("next")):
        with pytest.raises(SessionAwaitingApprovalError) as raised:
            await refused()
        assert raised.value.approval_id == pending.approval_id
    result = await world.agent.approvals.resolve(pending.approval_id, approved=True)
    assert result.text == "guarded done"
    assert world.lines == ["a c1", "g c2", "b c3"]
    assert len(world.server.requests) == 2
    await check_end(world, "resume", GUARDED)


async def paused(world: World) -> str:
    """A pause in the file; its process is dead."""
    await world.kill_at("after paused", "guarded")
    return str((await world.session.pending()).approval_id)


@pytest.mark.parametrize(
    ("point", "lines"),
    [
        ("after decided 1", ["a c1", "g c2", "b c3"]),  # the decision is written down, the call has not run
        ("in g", ["a c1", "g c2", "g c2", "b c3"]),
        ("before decided 2", ["a c1", "g c2", "g c2", "b c3"]),
        ("in b", ["a c1", "g c2", "b c3", "b c3"]),
        ("after finished", ["a c1", "g c2", "b c3"]),
    ],
)
async def test_a_decided_call_is_not_asked_for_again(world: World, point: str, lines: list[str]) -> None:  # S05, DUR-D2
    approval_id = await paused(world)
    await world.kill_at(point, f"approve {approval_id}", LEASE_S)
    await world.go_on("send")
    assert world.lines == lines
    await check_end(world, "send", GUARDED)
    with pytest.raises(LoushoError) as raised:
        await world.agent.approvals.resolve(approval_id, approved=True)
    assert raised.value.code == "LOUSHO_APPROVAL_NOT_FOUND"


async def test_a_rejection_outlives_its_process(world: World) -> None:  # DUR-D2
    approval_id = await paused(world)
    await world.kill_at("after decided 1", f"reject {approval_id}", LEASE_S)
    await world.go_on("resume")
    assert world.lines == ["a c1", "b c3"]
    rejected = results(await world.session.load())[1]
    assert rejected["kind"] == "rejected"
    assert "No." in json.dumps(rejected)
    await check_end(world, "resume", GUARDED)


async def test_a_decision_whose_process_died_before_it_was_written_down_is_used(  # APR-D5
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    approval_id = await paused(world)
    await world.kill_at("after claim", f"approve {approval_id}", LEASE_S)
    with pytest.raises(SessionAwaitingApprovalError):
        await world.session.resume()  # whoever took it may still be about to go on
    monkeypatch.setattr("lousho_ray.resuming.CLAIM_TIMEOUT_S", -2 * LEASE_S)
    await world.go_on("resume")
    assert world.lines == ["a c1", "g c2", "b c3"]
    await check_end(world, "resume", GUARDED)
