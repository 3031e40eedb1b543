"""Streams of session turns: a slow reader holds the model back, and nothing runs on for a reader that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import ray

from lousho_ray import Agent, OpenAICompatibleProvider, create_agent
from lousho_ray.eventlog import HIGH_WATER, EventLog
from lousho_ray.testing.fake_server import FakeServer, Reply, gate
from tests.ray.processes import eventually, session_actors

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(timeout_s=60) as server:
        yield server
    assert server.violations == []


def agent_of(url: str) -> Agent[Any]:
    return create_agent(provider=OpenAICompatibleProvider(base_url=url, default_model="fake"), retry=False, runtime="ray")


async def in_actors(function: Any, *args: Any) -> list[Any]:
    return list(await asyncio.gather(*[actor.__ray_call__.remote(function, *args) for actor in session_actors()]))


def events_made(actor: Any) -> int:
    """How far the run of this actor has come, in events."""
    return max((turn.run.log.next_index for turn in actor._turns.values() if not turn.run.task.done()), default=0)


def is_held_up(actor: Any) -> bool:
    return any(len(turn.run.log._items) >= HIGH_WATER for turn in actor._turns.values() if not turn.run.task.done())


def be_patient(actor: Any, patience_s: float) -> float:
    """How long new turns wait for a reader that is behind; returns how long they did."""
    (high_water, before), EventLog.__init__.__defaults__ = EventLog.__init__.__defaults__, (HIGH_WATER, patience_s)  # type: ignore[misc]
    assert high_water == HIGH_WATER
    return float(before)


def set_times(actor: Any, lease_s: float, poll_s: float) -> tuple[float, float]:
    """How long a silent reader is waited for, and how long polls stay open."""
    from lousho_ray.actors import session, session_clients

    before = session_clients.READER_LEASE_S, session.POLL_S
    session_clients.READER_LEASE_S, session.POLL_S = lease_s, poll_s
    return before


async def test_a_slow_reader_holds_the_model_stream_back(server: FakeServer) -> None:
    # DEC-R10: memory stays bounded wherever the turn runs
    words = 30_000
    server.respond(lambda request: Reply("word " * words))
    session = agent_of(server.compatible_url).session()
    await session.load()
    patience_s = (await in_actors(be_patient, 60.0))[0]
    try:
        turn = session.stream("Go.")
        count = 0
        async for event in turn:
            if event.type != "text.delta":
                continue
            count += 1
            if count == 1:
                await eventually(held_up, 40)
                assert max(await in_actors(events_made)) < HIGH_WATER + 4_000, "the model is not read on"
    finally:
        await in_actors(be_patient, patience_s)
    assert count >= words
    assert (await turn.result).ok


async def held_up() -> bool:
    return any(await in_actors(is_held_up))


async def test_a_reader_that_takes_its_time_is_not_taken_for_a_dead_one(server: FakeServer) -> None:
    # SES-15
    server.respond(lambda request: [gate("two"), Reply("two")])
    agent = agent_of(server.compatible_url)
    session = agent.session()
    server.release("two")
    await session.send("Start the actors.")
    before = (await in_actors(set_times, 1.0, 0.2))[0]
    try:
        turn = session.stream("Go.")
        async for event in turn:
            if event.type == "run.start":
                await asyncio.sleep(2.5)  # longer than the lease of a silent reader
        assert (await turn.result).finish_reason == "stop"
        unread_turn = session.stream("Again.")
        await asyncio.sleep(2.5)
        assert (await unread_turn.result).finish_reason == "stop", "a stream runs, iterated or not"
    finally:
        await in_actors(set_times, *before)


@ray.remote(num_cpus=0, max_restarts=0)
class Reader:
    """A process that reads a stream."""

    def __init__(self, url: str) -> None:
        self._agent = agent_of(url)
        self._seen = 0

    async def read(self) -> None:
        async for _ in self._agent.session("read").stream("Go."):
            self._seen += 1

    async def seen(self) -> int:
        return self._seen

    async def pid(self) -> int:
        return os.getpid()


async def test_nothing_runs_on_for_a_reader_that_was_killed(server: FakeServer) -> None:
    # DEC-R10
    server.respond(lambda request: [gate("never"), Reply("late")])
    agent = agent_of(server.compatible_url)
    await agent.session().load()
    before = (await in_actors(set_times, 1.0, 0.2))[0]
    try:
        reader = Reader.remote(server.compatible_url)
        reader.read.remote()
        await server.reached("never")

        async def reads() -> bool:
            return bool(await reader.seen.remote())

        await eventually(reads, 30)
        os.kill(await reader.pid.remote(), signal.SIGKILL)
        await server.wait_closed(server.requests[0])

        async def no_turns() -> bool:
            return sum(await asyncio.gather(*[actor.turns.remote() for actor in session_actors()])) == 0

        await eventually(no_turns, 30)
    finally:
        await in_actors(set_times, *before)


async def test_a_hundred_streams_at_once_are_whole(server: FakeServer) -> None:
    # SES-15, DEC-R9
    tokens = 100
    server.respond(lambda request: [gate("go"), Reply("word " * tokens)])
    agent = agent_of(server.compatible_url)

    async def read() -> list[Any]:
        return [event async for event in agent.session().stream("Go.")]

    readers = [asyncio.create_task(read()) for _ in range(100)]
    await server.reached("go", 100)
    server.release("go")
    for events in await asyncio.gather(*readers):
        assert [event.seq for event in events] == list(range(len(events)))
        assert sum(event.type == "text.delta" for event in events) == tokens
        assert events[-1].type == "run.done"
