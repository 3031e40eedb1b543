"""Spans of runs on the cluster: they reach the exporter where the caller is, before the result, with their parents. What was open
in a process that dies ends as an error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import OpenAICompatibleProvider, SqliteStore, create_agent, semconv, tool
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply
from tests.ray.processes import eventually, kill_process, lead_of, tool_texts, workers
from tests.unit.span_support import Recorder

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
async def server() -> Any:
    async with FakeServer(timeout_s=30) as server:
        yield server
    assert server.violations == []


def looking(request: RecordedRequest) -> Reply:
    """Looks once, then says so."""
    last = request.body["messages"][-1]["role"]
    return Reply("seen") if last == "tool" else Reply(tool_calls=[("look", {})])


@tool
def look() -> str:
    """Looks."""
    return "something"


async def test_spans_of_workers_arrive_before_the_result_with_their_parents_and_places(server: FakeServer) -> None:
    # OBS-07, OBS-39, OBS-40
    server.respond(looking)
    spans = Recorder()
    result = await lead_of(server, 6, tools=(look,), exporter=spans, name="lead").send("Go.")
    child = ["    invoke_agent agent", "      chat fake", "      execute_tool look", "      chat fake"]
    assert sorted(spans.tree()) == sorted(
        ["invoke_agent lead", "  chat mock-1", "  chat mock-1", *["  execute_tool task", *child] * 6]
    )
    children = spans.named("invoke_agent agent")
    actors = {await worker.__ray_call__.remote(lambda _: _actor_id()) for worker in workers()}
    assert {span.attributes[semconv.ACTOR_ID] for span in children} == actors
    assert all(span.attributes[semconv.NODE_ID] for span in children)
    root = spans.one("invoke_agent lead")
    assert semconv.ACTOR_ID not in root.attributes
    assert root.attributes.get(semconv.COST_USD) == result.usage.cost_usd


def _actor_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_actor_id())


@pytest.mark.parametrize("how", ["send", "stream", "observed"])
async def test_turns_of_a_session_actor_are_traced_where_the_caller_is(server: FakeServer, how: str) -> None:
    # OBS-07, OBS-14, OBS-39, DEC-R5
    server.respond(looking)
    spans, heard = Recorder(), list[Any]()
    options: dict[str, Any] = {"on_event": heard.append} if how == "observed" else {}
    provider = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
    agent = create_agent(provider=provider, tools=[look], exporter=spans, runtime="ray", name="talker", **options)
    session = agent.session("s1")
    for _ in range(2):
        spans.ended.clear()
        if how == "stream":
            run = session.stream("Hi")
            events = [event async for event in run]
            assert [event.seq for event in events] == list(range(len(events)))
            await run.result
        else:
            await session.send("Hi")
        assert spans.tree() == ["invoke_agent talker", "  chat fake", "  execute_tool look", "  chat fake"]
        assert {span.attributes.get(semconv.CONVERSATION_ID) for span in spans.ended} == {"s1"}
    assert all(event.type != "span" for event in heard)


async def test_sub_agents_of_a_session_are_two_hops_away_and_hang_where_they_belong(server: FakeServer) -> None:
    # OBS-39
    server.respond(looking)
    spans = Recorder()
    await lead_of(server, 2, tools=(look,), exporter=spans, name="lead").session("s2").send("Go.")
    child = ["    invoke_agent agent", "      chat fake", "      execute_tool look", "      chat fake"]
    assert sorted(spans.tree()) == sorted(
        ["invoke_agent lead", "  chat mock-1", "  chat mock-1", *["  execute_tool task", *child] * 2]
    )


async def test_content_is_recorded_as_the_caller_says(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # OBS-D6, OBS-21
    server.respond(looking)
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    spans = Recorder()
    await lead_of(server, 1, tools=(look,), exporter=spans).send("Go.")
    assert "something" in spans.one("execute_tool look").attributes[semconv.TOOL_CALL_RESULT]


async def test_the_open_spans_of_a_killed_worker_end_as_errors(server: FakeServer) -> None:
    # OBS-03, OBS-39
    asked, never = asyncio.Event(), asyncio.Event()

    async def reply(request: RecordedRequest) -> Reply:
        if tool_texts(request):
            asked.set()
            await never.wait()
        return looking(request)

    server.respond(reply)
    spans = Recorder()
    sending = asyncio.create_task(lead_of(server, 1, tools=(look,), exporter=spans, name="lead").send("Go."))
    await asked.wait()

    async def two_are_open_there() -> bool:
        looked = any(span.name == "execute_tool look" for span in spans.ended)
        return looked and any(span.name.startswith("chat") for span in spans.open.values())

    await eventually(two_are_open_there)
    for worker in workers():
        await kill_process(worker)
    result = await sending
    never.set()
    assert result.text == "done"
    assert spans.tree() == [
        "invoke_agent lead",
        "  chat mock-1",
        "  execute_tool task!",
        "    invoke_agent agent!",
        "      chat fake",
        "      execute_tool look",
        "      chat fake!",
        "  chat mock-1",
    ]
    lost = spans.one("invoke_agent agent")
    assert lost.attributes[semconv.ERROR_TYPE] == "RayActorError"


async def test_a_turn_that_goes_on_elsewhere_is_a_trace_of_its_own_and_the_lost_one_ends_as_an_error(
    server: FakeServer, tmp_path: Path
) -> None:
    # OBS-14, OBS-39
    asked, go = asyncio.Event(), asyncio.Event()

    async def reply(request: RecordedRequest) -> Reply:
        if tool_texts(request) and not go.is_set():
            asked.set()
            await go.wait()
        return looking(request)

    server.respond(reply)
    spans = Recorder()
    provider = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
    store = SqliteStore(tmp_path / "sessions.db")
    agent = create_agent(provider=provider, tools=[look], exporter=spans, runtime="ray", name="talker", store=store)
    session = agent.session("s3")
    sending = asyncio.create_task(session.send("Hi"))
    await asked.wait()
    _, actor = await session.link.reach()
    await kill_process(actor)
    go.set()
    assert (await sending).text == "seen"
    first, second = spans.named("invoke_agent")
    assert (first.attributes[semconv.ERROR_TYPE], first.trace_id == second.trace_id) == ("RayActorError", False)
    assert second.attributes[semconv.FINISH_REASON] == "stop"
    assert spans.tree() == [
        "invoke_agent talker!",
        "  chat fake",
        "  execute_tool look",
        "  chat fake!",
        "invoke_agent talker",
        "  chat fake",
    ]
