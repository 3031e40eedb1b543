"""One agent on several event loops, one after another and at once, with connections that are kept (W29)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from lousho_ray import create_agent
from lousho_ray.agent import Agent
from lousho_ray.loop_thread import SYNC_LOOP
from lousho_ray.testing.fake_server import FakeServer
from tests.wire.matrix_support import QUICK, Route, Toolbox, provider_for

ROUTES: tuple[Route, ...] = ("chat", "responses", "messages", "ollama")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer.in_thread() as server:
        server.respond("hi")
        yield server
    assert server.violations == []


@contextmanager
def agent_of(route: Route, server: FakeServer) -> Iterator[Agent[str]]:
    """An agent whose connections on the loop of the `*_sync` calls are closed in the end."""
    agent: Agent[str] = create_agent(provider=provider_for(route, server), tools=Toolbox().tools, runtime="local", retry=QUICK)
    try:
        yield agent
    finally:
        SYNC_LOOP.run(agent.close())


async def twice(agent: Agent[str], *, streamed: bool) -> list[str]:
    """Two calls on one loop, the second over the connection of the first."""
    return [(await agent.stream("hi").result if streamed else await agent.send("hi")).text for _ in range(2)]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_one_agent_on_loops_one_after_another(server: FakeServer, route: Route, streamed: bool) -> None:
    with agent_of(route, server) as agent:
        for _ in range(3):
            assert asyncio.run(twice(agent, streamed=streamed)) == ["hi", "hi"]
        assert len(server.requests) == 6
        connections = [request.connection for request in server.requests]
        assert len(set(connections)) == 3, "a loop keeps its connection, and no loop gets another's"


@pytest.mark.parametrize("route", ROUTES)
def test_one_agent_on_loops_of_several_threads_at_once(server: FakeServer, route: Route) -> None:
    with agent_of(route, server) as agent:
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(lambda number: asyncio.run(twice(agent, streamed=bool(number % 2))), range(8)))
        assert outcomes == [["hi", "hi"]] * 8
        assert len(server.requests) == 16


@pytest.mark.parametrize("route", ROUTES)
def test_plain_calls_from_several_threads(server: FakeServer, route: Route) -> None:
    with agent_of(route, server) as agent:
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(lambda _: [agent.send_sync("hi").text, *_deltas(agent)], range(8)))
        assert outcomes == [["hi", "hi"]] * 8
        assert agent.send_sync("hi").text == "hi"
        assert asyncio.run(twice(agent, streamed=True)) == ["hi", "hi"]
        assert len(server.requests) == 19


def test_a_session_is_spoken_to_from_several_threads_and_loops(server: FakeServer) -> None:
    # W29 with S: every turn sees the ones before it
    with agent_of("chat", server) as agent:
        session = agent.session("s")
        for _ in range(2):
            assert session.send_sync("hi").text == "hi"
        with ThreadPoolExecutor(3) as pool:
            assert [result.text for result in pool.map(lambda _: session.send_sync("hi"), range(6))] == ["hi"] * 6
        assert len(session.load_sync()) == 16
        counts = [len(request.body["messages"]) for request in server.requests]
        assert counts == [2 * turn + 2 for turn in range(8)]


def _deltas(agent: Agent[str]) -> list[str]:
    return [event.text for event in agent.stream_sync("hi") if event.type == "text.delta"]
