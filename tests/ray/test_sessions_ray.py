"""Sessions in session actors: order, turn policies over handles, streams, aborts, killed actors, two drivers."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import (
    Agent,
    AgentExecutionError,
    CancelToken,
    GenerateResult,
    LoushoError,
    MemorySessionStore,
    MockProvider,
    OpenAICompatibleProvider,
    SqliteStore,
    create_agent,
    memory_store,
)
from lousho_ray.actors import session_link
from lousho_ray.actors.cluster import NAMESPACE
from lousho_ray.messages import user
from lousho_ray.testing.fake_server import FakeServer, Reply, gate
from lousho_ray.usage import ProviderUsage
from tests.ray.processes import eventually, kill_process, session_actors, where

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(timeout_s=20) as server:
        server.respond(lambda request: Reply(f"heard {request.body['messages'][-1]['content']}"))
        yield server
    assert server.violations == []


def agent_of(server: FakeServer, **options: Any) -> Agent[Any]:
    model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
    return create_agent(provider=model, retry=False, runtime="ray", **options)


def texts(messages: Any) -> list[str]:
    return [message.text for message in messages]


async def test_calls_run_one_after_another_in_their_order(server: FakeServer) -> None:
    # SES-15, DEC-R9
    session = agent_of(server).session()
    results = await asyncio.gather(*[session.send(f"m{number}") for number in range(12)])
    expected = [text for number in range(12) for text in (f"m{number}", f"heard m{number}")]
    assert [result.text for result in results] == expected[1::2]
    assert texts(await session.load()) == expected
    assert server.max_concurrent == 1


async def test_each_result_has_the_whole_conversation_however_little_of_it_was_sent(server: FakeServer, tmp_path: Path) -> None:
    # SES-04, SES-16
    async with SqliteStore(tmp_path / "s.db") as store:
        agent, expected = agent_of(server, store=store), list[str]()
        for number in range(5):
            result = await agent.session("talk").send(f"m{number}")
            expected += [f"m{number}", f"heard m{number}"]
            assert texts(result.messages[1:]) == expected
            assert texts(result.new_messages) == expected[-2:]
            result.messages.clear()
            if number == 2:
                await agent.session("talk").clear()
                expected = []
        assert texts(await agent.session("talk").load()) == expected


async def test_a_hundred_sessions_share_the_actors_and_run_side_by_side(server: FakeServer) -> None:
    # DEC-R2
    server.respond(lambda request: [gate("go"), Reply("hello")])
    sessions = [agent_of(server).session() for _ in range(100)]
    turns = [asyncio.create_task(session.send("hi")) for session in sessions]
    await server.reached("go", 100)
    server.release("go")
    assert {result.text for result in await asyncio.gather(*turns)} == {"hello"}
    assert 1 <= len(session_actors()) <= 2


async def test_a_call_of_another_handle_joins_the_running_turn(server: FakeServer, tmp_path: Path) -> None:
    # SES-27, SES-29, SES-31, SES-74
    server.on("chat", Reply(tool_calls=[("where", {})]))
    server.on("chat", gate("second"), Reply("both heard"))
    store = SqliteStore(tmp_path / "s.db")
    agent = agent_of(server, tools=[where], store=store)
    first, second = agent.session("talk"), agent.session("talk", turn_policy="queue")
    turn = first.stream("one")
    events = []
    async for event in turn:
        events.append(event.type)
        if event.type == "tool.start":
            joined = asyncio.create_task(second.send("two"))
            await eventually(both_have_arrived)
        if event.type == "tool.done":
            server.release("second")
    result, same = await turn.result, await joined
    assert (same.text, same.run_id, same.messages) == (result.text, result.run_id, result.messages)
    assert [message.text for message in await first.load() if message.role == "user"] == ["one", "two"]
    await store.aclose()


async def both_have_arrived() -> bool:
    return sum(await asyncio.gather(*[actor.turns.remote() for actor in session_actors()])) == 2


async def test_enqueued_input_joins_the_run(server: FakeServer) -> None:
    # SES-35, SES-37
    server.on("chat", gate("first"), Reply("one heard"))
    session = agent_of(server).session()
    turn = session.stream("one")
    await server.reached("first")
    queued = turn.enqueue("two")
    await eventually(lambda: input_arrived(1))
    server.release("first")
    assert await queued.applied
    result = await turn.result
    assert result.text == "heard two"
    assert texts(await session.load()) == ["one", "one heard", "two", "heard two"]
    late = turn.enqueue("three")
    assert not await late.applied


async def input_arrived(count: int) -> bool:
    counts = await asyncio.gather(*[actor.__ray_call__.remote(_inputs) for actor in session_actors()])
    return sum(counts) >= count


def _inputs(actor: Any) -> int:
    return sum(len(turn.inputs) for turn in actor._turns.values() if not turn.run.task.done())


async def test_a_steer_makes_the_model_call_again(server: FakeServer) -> None:
    # SES-39
    server.on("chat", gate("never"), Reply("too late"))
    session = agent_of(server).session()
    turn = session.stream("one")
    await server.reached("never")
    steered = turn.steer("two")
    assert await steered.joined
    assert (await turn.result).text == "heard two"
    await server.wait_closed(server.requests[0])
    assert texts(await session.load()) == ["one", "two", "heard two"]


async def test_a_turn_that_is_steered_by_another_handle(server: FakeServer, tmp_path: Path) -> None:
    # SES-28
    server.on("chat", gate("never"), Reply("too late"))
    async with SqliteStore(tmp_path / "s.db") as store:
        agent = agent_of(server, store=store)
        running = asyncio.create_task(agent.session("talk").send("one"))
        await server.reached("never")
        joined = await agent.session("talk", turn_policy="steer").send("two")
        assert joined.text == (await running).text == "heard two"


async def test_a_stream_brings_every_event_once_and_in_order(server: FakeServer) -> None:
    # SES-15, DEC-R10
    server.respond(Reply("word " * 2_000))
    session, heard = agent_of(server).session(), []
    session.on(heard.append)
    turn = session.stream("Go.")
    events = [event async for event in turn]
    assert [event.seq for event in events] == list(range(len(events)))
    assert events[0].type == "run.start"
    assert events[-1].type == "run.done"
    assert sum(event.type == "text.delta" for event in events) >= 2_000
    await eventually(lambda: same_length(heard, events))
    assert heard == events


async def same_length(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other)


@pytest.mark.parametrize("how", ["abort", "break", "cancelled", "token"])
async def test_an_aborted_turn_leaves_the_conversation_as_it_was(server: FakeServer, how: str) -> None:
    # SES-19, SES-30
    session = agent_of(server).session()
    await session.send("one")
    server.on("chat", gate("never"), Reply("too late"))
    if how in ("abort", "break"):
        async with session.stream("two") as turn:
            async for event in turn:
                if event.type == "step.start":
                    await server.reached("never")
                    if how == "break":
                        break
                    turn.abort("Enough.")
        result = await turn.result
        assert result.abort_reason is not None
        assert result.abort_reason["message"] == ("Enough." if how == "abort" else "The consumer left the stream.")
    elif how == "token":
        result = await session.send("two", cancel=CancelToken.after_ms(300))
        assert result.abort_reason is not None
        assert result.abort_reason["name"] == "TimeoutError"
    else:
        turn = asyncio.create_task(session.send("two"))
        await server.reached("never")
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
    await server.wait_closed(server.requests[1])
    assert texts(await session.load()) == ["one", "heard one"]
    assert (await session.send("three")).text == "heard three"
    assert texts(session.messages) == ["one", "heard one", "three", "heard three"]


async def test_a_waiting_turn_that_is_cancelled_never_runs(server: FakeServer) -> None:
    # SES-19
    server.on("chat", gate("first"), Reply("heard one"))
    session = agent_of(server).session()
    first, second, third = (asyncio.create_task(session.send(text)) for text in ("one", "two", "three"))
    await server.reached("first")
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    server.release("first")
    assert ((await first).text, (await third).text) == ("heard one", "heard three")
    assert len(server.requests) == 2


async def test_limits_count_over_the_turns_of_a_session(tmp_path: Path) -> None:
    # SES-61, SES-62, SES-63, BUD-25, BUD-27
    store = SqliteStore(tmp_path / "s.db")
    model = MockProvider(policy=lambda request: GenerateResult("Yes", usage=ProviderUsage(100, 20)))
    agent = create_agent(provider=model, store=store, runtime="ray")
    session = agent.session("s", limits={"max_tokens": 240})
    assert [(await session.send("Hi")).finish_reason for _ in range(3)] == ["stop", "stop", "budget-exceeded"]
    assert session.messages == await session.load()
    assert (session.messages[-1].metadata or {})["sessionUsage"]["totalTokens"] == 240
    fork = await session.fork(1)
    results = [await fork.send("Hi") for _ in range(2)]
    assert [result.budget.to_dict() if result.budget else None for result in results] == [
        None,
        {"limit": "maxTokens", "value": 240, "max": 240, "scope": "session"},
    ]


async def test_clear_while_a_turn_runs_is_refused(server: FakeServer) -> None:
    # SES-58, SES-60
    server.on("chat", gate("first"), Reply("heard one"))
    session = agent_of(server).session()
    turn = asyncio.create_task(session.send("one"))
    await server.reached("first")
    with pytest.raises(LoushoError) as raised:
        await session.clear()
    assert raised.value.code == "LOUSHO_SESSION_BUSY"
    server.release("first")
    await turn
    await session.clear()
    assert await session.load() == []


async def test_a_session_without_a_store_lives_as_long_as_its_handle(server: FakeServer) -> None:
    # SES-09, SES-78
    agent = agent_of(server)
    first, second = agent.session("same"), agent.session("same")
    await first.send("one")
    assert await second.load() == []
    kept = [first.link._key.private, second.link._key.private]  # type: ignore[attr-defined]
    assert set(kept) <= await kept_stores()
    del first
    gc.collect()

    async def forgotten() -> bool:
        return kept[0] not in await kept_stores()

    await eventually(forgotten)
    await second.send("two")
    assert texts(await second.load()) == ["two", "heard two"]


async def kept_stores() -> set[str]:
    names = await asyncio.gather(*[actor.__ray_call__.remote(_stores) for actor in session_actors()])
    return {name for kept in names for name in kept}


def _stores(actor: Any) -> list[str]:
    return list(actor._stores)


async def test_a_store_in_memory_goes_along_with_what_it_holds_and_outlives_the_session_actor(server: FakeServer) -> None:
    # STO-42
    store = memory_store()
    await store.sessions.save("talk", [user("before")])
    session = agent_of(server, store=store).session("talk")
    await session.send("one")
    for actor in session_actors():
        await kill_process(actor)
    again = agent_of(server, store=store).session("talk")
    await eventually(lambda: loads(again))
    assert texts(await again.load()) == ["before", "one", "heard one"]


async def loads(session: Any) -> bool:
    try:
        await session.load()
    except AgentExecutionError:
        return False
    return True


@pytest.mark.parametrize("how", ["send", "stream"])
async def test_a_killed_actor_is_an_error_and_the_next_turn_works(server: FakeServer, how: str) -> None:
    # SES-22, SES-76, SES-77
    session = agent_of(server).session("talk", store=MemorySessionStore())
    await session.send("one")
    server.on("chat", gate("never"), Reply("too late"))
    turn = session.stream("two")
    await server.reached("never")
    for actor in session_actors():
        await kill_process(actor)
    if how == "stream":
        events = [event async for event in turn]
        assert [event.type for event in events][-2:] == ["error", "run.done"]
        assert [event.seq for event in events] == list(range(len(events)))
        assert events[-1].finish_reason == "error"
    with pytest.raises(AgentExecutionError) as raised:
        await turn.result
    assert raised.value.code == "LOUSHO_AGENT_EXECUTION_FAILED"
    assert raised.value.hint
    assert "'talk'" in raised.value.detail
    assert raised.value.__cause__ is not None
    await eventually(lambda: loads(session))
    assert texts(await session.load()) == ["one", "heard one"]
    assert (await session.send("three")).text == "heard three"
    assert texts(await session.load()) == ["one", "heard one", "three", "heard three"]
    assert sum(request.body["messages"][-1]["content"] == "two" for request in server.requests) == 1, "Ray repeats no turn"


async def test_a_durable_turn_of_a_killed_actor_is_finished(server: FakeServer, tmp_path: Path) -> None:
    # SES-47, SES-48, SES-55
    async with SqliteStore(tmp_path / "s.db") as store:
        session = agent_of(server, tools=[where], store=store).session("talk")
        assert await session.load() == []
        server.on("chat", Reply(tool_calls=[("where", {})]))
        server.on("chat", gate("never"), Reply("too late"))
        turn = asyncio.create_task(session.send("one"))
        await server.reached("never")
        for actor in session_actors():
            await kill_process(actor)
        assert (await turn).ok, "it is resumed on the actor that takes over"
        assert (await session.send("two")).text == "heard two"
        assert [message.role for message in await session.load()] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
        assert [message.text for message in await session.load() if message.role == "user"] == ["one", "two"]
        calls = [request for request in server.requests if len(request.body["messages"]) == 2]
        assert len(calls) == 1, "the recorded reply is not asked for again"


async def test_a_turn_of_a_killed_actor_waits_to_be_resumed_where_that_is_asked_for(server: FakeServer, tmp_path: Path) -> None:
    # DEC-R6, DUR-D7, SES-77
    async with SqliteStore(tmp_path / "s.db") as store:
        session = agent_of(server, tools=[where], store=store, auto_resume=False).session("waits")
        server.on("chat", Reply(tool_calls=[("where", {})]))
        server.on("chat", gate("cut"), Reply("too late"))
        turn = asyncio.create_task(session.send("one"))
        await server.reached("cut")
        for actor in session_actors():
            await kill_process(actor)
        with pytest.raises(AgentExecutionError, match="resume"):
            await turn
        pending = await session.pending()
        assert pending is not None
        assert pending.status == "in-progress"
        resumed = await session.resume()
        assert resumed is not None
        assert resumed.ok
        assert [message.role for message in await session.load()] == ["user", "assistant", "tool", "assistant"]


async def test_an_actor_that_is_killed_at_rest_costs_a_delay_and_nothing_else(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SES-76, R: a turn is sent to an actor that is known to be there
    monkeypatch.setattr(session_link, "KNOWN_TO_LIVE_S", 0.0)
    sessions = [agent_of(server).session(f"rest-{number}", store=MemorySessionStore()) for number in range(4)]
    await asyncio.gather(*[session.send("one") for session in sessions])
    for actor in session_actors():
        await kill_process(actor)
    results = await asyncio.gather(*[session.send("two") for session in sessions])
    assert [result.text for result in results] == ["heard two"] * 4
    for session in sessions:
        assert texts(await session.load()) == ["one", "heard one", "two", "heard two"]


SECOND_DRIVER = """
import asyncio, sys
from lousho_ray import MockProvider, SqliteStore, create_agent

def parrot(request):
    return "heard " + request.messages[-1].text

async def main(path):
    session = create_agent(provider=MockProvider(policy=parrot), store=SqliteStore(path)).session("talk")
    print("SAYS", [message.text for message in await session.load()], flush=True)
    for line in sys.stdin:
        print("SAYS", (await session.send(line.strip())).text, flush=True)

asyncio.run(main(sys.argv[1]))
"""


def parrot(request: Any) -> str:
    return f"heard {request.messages[-1].text}"


async def said(driver: asyncio.subprocess.Process) -> str:
    """The next thing the second driver says; Ray writes notices of its own to the standard output of a driver."""
    assert driver.stdout is not None
    async for line in driver.stdout:
        if line.startswith(b"SAYS "):
            return line.decode().removeprefix("SAYS ").strip()
    assert driver.stderr is not None
    raise AssertionError((await driver.stderr.read()).decode())


async def test_two_drivers_share_a_file_through_one_store_actor(tmp_path: Path) -> None:
    # STO-41, SES-05, DEC-R4
    path, script = tmp_path / "shared.db", tmp_path / "driver.py"
    script.write_text(textwrap.dedent(SECOND_DRIVER))
    store = SqliteStore(path)
    session = create_agent(provider=MockProvider(policy=parrot), store=store, runtime="ray").session("talk")
    await session.send("one")
    before = store_actors()
    token = ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
    environment = {
        **os.environ,
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_AUTH_MODE": "token" if token else "disabled",
    }
    driver = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        str(script),
        str(path),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert driver.stdin is not None
    try:
        assert await said(driver) == "['one', 'heard one']"
        driver.stdin.write(b"two\n")
        assert await said(driver) == "heard two"
        assert (await session.send("three")).text == "heard three"
        driver.stdin.write(b"four\n")
        assert await said(driver) == "heard four"
        assert store_actors() == before, "the second driver found the actor of the first"
        driver.stdin.close()
        _, errors = await asyncio.wait_for(driver.communicate(), 20)
        assert (driver.returncode, errors.decode()) == (0, "")
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
    words = [word for number in ("one", "two", "three", "four") for word in (number, f"heard {number}")]
    assert texts(await session.load()) == words
    await store.aclose()


def store_actors() -> set[str]:
    names = (entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == NAMESPACE)
    return {name for name in names if name.startswith("lousho-store-")}
