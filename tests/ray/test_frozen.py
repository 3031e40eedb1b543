"""Actors that freeze (`SIGSTOP`) are started again, and what waited for them goes on or fails; busy ones are left alone.

Each takes its time: most are for `make slow`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import (
    Agent,
    AgentExecutionError,
    MockProvider,
    OpenAICompatibleProvider,
    SqliteStore,
    StorageError,
    create_agent,
    create_rate_limiter,
    memory_store,
    tool,
)
from lousho_ray.actors import (
    budget,
    budget_client,
    hosted_turn,
    limiter_client,
    liveness,
    session_conversation,
    session_link,
    store,
    worker_pool,
)
from lousho_ray.actors.cluster import NAMESPACE, job_id
from lousho_ray.messages import user
from lousho_ray.testing.fake_server import FakeServer, Reply, gate
from tests.ray.processes import (
    alive,
    eventually,
    gone,
    lead_of,
    no_child_runs,
    pid_of,
    session_actors,
    task_results,
    where,
    workers,
)

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(150)]

SILENT_S = 2.0


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(timeout_s=30) as server:
        server.respond(lambda request: Reply(f"heard {request.body['messages'][-1]['content']}", usage=(10, 1)))
        yield server
    assert server.violations == []


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls time out after `SILENT_S`, where 15 to 30 s are usual; an actor that lives has longer to say so."""
    monkeypatch.setattr(liveness, "CONTROL_ANSWERS_IN_S", 5.0)
    for module, name, seconds in (
        (session_link, "ANSWERS_IN_S", SILENT_S),
        (hosted_turn, "ANSWERS_IN_S", SILENT_S),
        (session_conversation, "ANSWERS_IN_S", SILENT_S),
        (worker_pool, "POLL_TIMEOUT_S", SILENT_S),
        (store, "CALL_TIMEOUT_S", 2 * SILENT_S),
        (limiter_client, "CALL_TIMEOUT_S", 2 * SILENT_S),
        (budget_client, "CALL_TIMEOUT_S", 2 * SILENT_S + budget.RESTORE_S),
    ):
        monkeypatch.setattr(module, name, seconds)


def poll_for(actor: Any, seconds: float) -> float:
    """Runs in an actor: how long its polls stay open from now on; returns how long they did."""
    from lousho_ray.actors import session, worker

    before = session.POLL_S
    session.POLL_S = worker.POLL_S = seconds
    return before


@asynccontextmanager
async def short_polls(actors: Iterable[Any]) -> AsyncIterator[None]:
    """Polls end before the calls that wait for them time out; as they do with the usual times."""
    handles = list(actors)
    usual = await asyncio.gather(*[actor.__ray_call__.remote(poll_for, SILENT_S / 4) for actor in handles])
    yield

    async def restored() -> bool:
        try:
            await asyncio.gather(*[actor.__ray_call__.remote(poll_for, usual[0]) for actor in handles])
        except ray.exceptions.ActorUnavailableError:
            return False
        return True

    await eventually(restored, 30)


def agent_of(server: FakeServer, **options: Any) -> Agent[Any]:
    model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
    return create_agent(provider=model, retry=False, runtime="ray", **options)


@asynccontextmanager
async def frozen(actors: Iterable[Any]) -> AsyncIterator[list[int]]:
    """The processes of actors, stopped. In the end those that are still there go on: nobody had asked them anything."""
    pids = [await pid_of(actor) for actor in actors]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def named(prefix: str) -> Any:
    """The actor of this job (or the cluster) whose name begins so."""
    entries: Any = ray.util.list_named_actors(all_namespaces=True)
    names = [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix)]
    return ray.get_actor(names[0], NAMESPACE)


async def test_a_durable_turn_of_a_frozen_session_actor_is_finished(server: FakeServer, tmp_path: Path) -> None:
    # DEC-R6
    async with SqliteStore(tmp_path / "s.db") as kept:
        session = agent_of(server, tools=[where], store=kept).session("talk")
        assert await session.load() == []
        server.on("chat", Reply(tool_calls=[("where", {})]))
        server.on("chat", gate("never"), Reply("too late"))
        async with short_polls(session_actors()):
            turn = asyncio.create_task(session.send("one"))
            await server.reached("never")
            async with frozen(session_actors()) as pids:
                result = await asyncio.wait_for(turn, 120)
                assert len(gone(pids, 0.0)) == len(pids) - 1, "its process was ended, no other one"
            assert result.ok
            assert result.text.startswith("heard")
            assert (await session.send("two")).text == "heard two"
        assert [message.role for message in await session.load()] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
        first_calls = [request for request in server.requests if len(request.body["messages"]) == 2]
        assert len(first_calls) == 1, "the recorded step is not asked for again"


@pytest.mark.slow
async def test_a_turn_without_checkpoints_of_a_frozen_session_actor_is_an_error_that_says_so(server: FakeServer) -> None:
    # SES-77
    session = agent_of(server).session()
    assert (await session.send("one")).text == "heard one"
    server.on("chat", gate("never"), Reply("too late"))
    async with short_polls(session_actors()):
        events = session.stream("two")
        turn = asyncio.ensure_future(events.result)
        await server.reached("never")
        async with frozen(session_actors()):
            with pytest.raises(AgentExecutionError, match=r"was frozen.*outcome is unknown"):
                await asyncio.wait_for(turn, 120)
        assert [event.type async for event in events][-2:] == ["error", "run.done"]


@pytest.mark.slow
async def test_a_session_actor_that_froze_at_rest_costs_a_delay_and_nothing_else(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # SES-76
    monkeypatch.setattr(session_link, "KNOWN_TO_LIVE_S", 0.0)
    async with SqliteStore(tmp_path / "s.db") as kept:
        session = agent_of(server, store=kept).session("rest")
        assert (await session.send("one")).text == "heard one"
        async with frozen(session_actors()):
            assert (await asyncio.wait_for(session.send("two"), 120)).text == "heard two"
        assert len(await session.load()) == 4


@tool
async def block(seconds: float) -> str:
    """Blocks the event loop, as a tool that is not written for it does.

    Args:
        seconds: For how long.
    """
    time.sleep(seconds)
    return str(os.getpid())


async def test_a_busy_session_actor_is_waited_for_and_left_alone(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "CONTROL_ANSWERS_IN_S", 30.0)
    session = agent_of(server, tools=[block]).session()
    assert await session.load() == []
    pids = [await pid_of(actor) for actor in session_actors()]
    server.on("chat", Reply(tool_calls=[("block", {"seconds": 3 * SILENT_S})]))
    async with short_polls(session_actors()):
        result = await session.send("Go.")
    assert result.ok
    assert {message.text.strip('"') for message in result.messages if message.role == "tool"} <= set(map(str, pids))
    assert [await pid_of(actor) for actor in session_actors()] == pids


@pytest.mark.slow
async def test_a_caller_that_blocks_its_own_event_loop_ends_no_actor(server: FakeServer) -> None:
    session = agent_of(server).session()
    assert await session.load() == []
    pids = [await pid_of(actor) for actor in session_actors()]
    server.on("chat", gate("go"), Reply("done"))
    async with short_polls(session_actors()):
        turn = asyncio.create_task(session.send("Go."))
        await server.reached("go")
        for _ in range(3):
            time.sleep(3 * SILENT_S)
            await asyncio.sleep(0.1)
        server.release("go")
        assert (await turn).text == "done"
    assert [await pid_of(actor) for actor in session_actors()] == pids


@pytest.mark.slow
async def test_a_busy_session_actor_is_given_up_in_the_end(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "CONTROL_ANSWERS_IN_S", 30.0)
    monkeypatch.setattr(liveness, "BUSY_S", 0.0)
    session = agent_of(server, tools=[block]).session()
    assert await session.load() == []
    server.on("chat", Reply(tool_calls=[("block", {"seconds": 3 * SILENT_S})]))
    async with short_polls(session_actors()):
        with pytest.raises(TimeoutError, match="did not answer within"):
            await session.send("Go.")


async def test_a_frozen_worker_is_started_again_and_a_busy_one_is_waited_for(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.respond(lambda request: [gate("go"), Reply("late")])
    lead = lead_of(server, 4)
    running = asyncio.create_task(lead.send("Go."))
    await server.reached("go", 4)
    async with short_polls(workers()[1:]):
        async with frozen(workers()[:1]) as pids:
            assert await asyncio.to_thread(gone, pids, 40) == []
        server.release("go")
        results = task_results((await asyncio.wait_for(running, 120)).messages).values()
    assert sorted(message.is_error for message in results) == [False, False, True, True]

    monkeypatch.setattr(liveness, "CONTROL_ANSWERS_IN_S", 30.0)
    server.respond(lambda request: Reply("done") if len(request.body["messages"]) > 1 else block_call())
    await eventually(all_alive, 30)
    pids = [await pid_of(worker) for worker in workers()]
    async with short_polls(workers()):
        again = await asyncio.wait_for(lead_of(server, 2, tools=[block]).send("Go."), 120)
    assert not any(message.is_error for message in task_results(again.messages).values())
    assert [await pid_of(worker) for worker in workers()] == pids
    assert await no_child_runs()


async def all_alive() -> bool:
    return all([await alive(worker) for worker in workers()])


def block_call() -> Reply:
    return Reply(tool_calls=[("block", {"seconds": 3 * SILENT_S})])


@pytest.mark.slow
async def test_a_frozen_store_actor_is_started_again_and_saves_under_way_are_kept(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "s.db") as kept:
        remote = await create_agent(provider=MockProvider(), store=kept, runtime="ray").runtime().reach(kept)
        await remote.sessions.save("first", [user("x")])
        async with frozen([remote.reference.actor()]) as pids:
            await asyncio.wait_for(asyncio.gather(*[remote.sessions.save(f"k{number}", [user("x")]) for number in range(20)]), 120)
            assert gone(pids) == []
        assert len(await remote.sessions.list()) == 21


@pytest.mark.slow
async def test_a_store_in_memory_is_not_ended_when_it_freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RETRY_DELAYS_S", (0.1,))
    agent = create_agent(provider=MockProvider(), runtime="ray")
    remote = await agent.runtime().reach(memory_store())
    await remote.sessions.save("kept", [user("x")])
    async with frozen([remote.reference.actor()]) as pids:
        with pytest.raises(StorageError, match="cannot be reached"):
            await remote.sessions.load("kept")
    assert len(await remote.sessions.load("kept")) == 1
    assert await pid_of(remote.reference.actor()) == pids[0]


@pytest.mark.slow
async def test_calls_that_wait_for_a_frozen_limiter_actor_pass_once_it_was_started_again(fresh_name: str) -> None:
    # RL-37
    limiter = create_rate_limiter({"max_concurrent": 1}, fresh_name)
    agent = create_agent(provider=MockProvider(policy=lambda request: "yes"), rate_limit=limiter, runtime="ray")
    assert (await agent.session().send("Hi.")).ok
    async with frozen([named("lousho-limiters")]) as pids:
        results = await asyncio.wait_for(asyncio.gather(*[agent.send("Hi.") for _ in range(3)]), 120)
        assert all(result.ok for result in results)
        assert gone(pids) == []


@pytest.mark.slow
async def test_a_run_goes_on_when_the_budget_actor_froze(server: FakeServer) -> None:
    # BUD-33
    server.respond(lambda request: [gate("go"), Reply("done", usage=(100, 0))])
    running = asyncio.create_task(lead_of(server, 2, limits={"max_tokens": 10_000}).send("Go."))
    await server.reached("go", 2)
    async with frozen([named(f"lousho-budget-{job_id()}")]) as pids:
        server.release("go")
        assert (await asyncio.wait_for(running, 120)).ok
        assert gone(pids) == []
