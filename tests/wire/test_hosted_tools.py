"""Hosted tools over the wire: what the vendors' APIs are sent, and what a run makes of the calls they report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from lousho_ray import HostedTool, code_interpreter, file_search, hosted_tool, memory_store, web_search
from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions
from lousho_ray.testing.fake_server import (
    FakeServer,
    Reply,
    anthropic_message,
    block_start,
    block_stop,
    message_delta,
    message_item,
    message_start,
    message_stop,
    output_item_added,
    output_item_done,
    output_text_delta,
    response_completed,
    response_created,
    response_object,
    status,
    text_delta,
)
from tests.wire.matrix_support import Played, Route, an_agent, play, provider_for


def check_reports(played: Played, streamed: bool, name: str, args: Any, sources: Sequence[Any], text: str) -> None:
    """One hosted call, reported before the text, counted, and kept beside the reply."""
    assert played.error is None, played.error
    assert played.result is not None
    result = played.result
    assert (result.text, result.finish_reason, result.steps, result.tool_calls) == (text, "stop", 1, [])
    assert result.usage.hosted_tool_calls == {name: 1}
    assert result.messages[-1].metadata is not None
    (record,) = result.messages[-1].metadata["hostedToolCalls"]
    assert (record["name"], record["args"], record["isError"], record["sources"]) == (name, args, False, list(sources))
    if streamed:
        kinds = [event.type for event in played.events if event.type.startswith(("tool.", "text."))]
        assert kinds == ["tool.start", "tool.done", *["text.delta"] * (len(kinds) - 3), "text.done"]
        assert {event.executed_by for event in (*played.of("tool.start"), *played.of("tool.done"))} == {"provider"}


# --------------------------------------------------------------------------------------------------------- OpenAI's Responses API

SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
SOURCES = [{"type": "url", "url": "https://x.test"}]
ACTION = {"type": "search", "query": "x", "sources": SOURCES}

SENT: list[Any] = [
    pytest.param(web_search(), {"type": "web_search"}, ["web_search_call.action.sources"], id="bare"),
    pytest.param(
        web_search(allowed_domains=["x.test"], search_context_size="low", user_location={"country": "CH"}),
        {
            "type": "web_search",
            "filters": {"allowed_domains": ["x.test"]},
            "search_context_size": "low",
            "user_location": {"type": "approximate", "country": "CH"},
        },
        ["web_search_call.action.sources"],
        id="search",
    ),
    pytest.param(
        code_interpreter(),
        {"type": "code_interpreter", "container": {"type": "auto"}},
        ["code_interpreter_call.outputs"],
        id="code",
    ),
    pytest.param(
        code_interpreter(file_ids=["f"]),
        {"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["f"]}},
        ["code_interpreter_call.outputs"],
        id="files",
    ),
    pytest.param(
        code_interpreter(container="c_1"),
        {"type": "code_interpreter", "container": "c_1"},
        ["code_interpreter_call.outputs"],
        id="container",
    ),
    pytest.param(
        file_search(vector_store_ids=["v"], max_results=3, filters={"type": "eq", "key": "a", "value": 1}),
        {
            "type": "file_search",
            "vector_store_ids": ["v"],
            "max_num_results": 3,
            "filters": {"type": "eq", "key": "a", "value": 1},
        },
        ["file_search_call.results"],
        id="file-search",
    ),
    pytest.param(
        hosted_tool("crm", {"type": "mcp", "server_label": "crm", "server_url": "https://crm.test"}),
        {"type": "mcp", "server_label": "crm", "server_url": "https://crm.test"},
        None,
        id="raw",
    ),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("tool", "wire", "include"), SENT)
async def test_responses_is_sent_each_tool_in_its_own_form(
    fake_server: FakeServer, tool: HostedTool, wire: Any, include: Any, streamed: bool
) -> None:
    # HOST-01, PRV-D11
    fake_server.respond(Reply("done"))
    async with an_agent(provider_for("responses", fake_server), [tool]) as agent:
        assert (await play(agent, "Hi", streamed=streamed)).error is None
    assert (fake_server.bodies[0]["tools"], fake_server.bodies[0].get("include")) == ([wire], include)


async def test_a_call_with_hosted_tools_goes_to_responses_whatever_its_settings(fake_server: FakeServer) -> None:
    # PRV-D1, PRV-D11
    fake_server.respond(Reply("done"))
    provider = provider_for("responses", fake_server, api="auto")
    provider.is_vendor = True  # type: ignore[attr-defined]
    async with an_agent(provider, [web_search()], model_settings={"seed": 1}) as agent:
        await agent.send("Hi")
    assert fake_server.requests[0].route == "responses"


async def test_options_it_cannot_take_are_dropped_with_one_warning_each(
    fake_server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    # HOST-03
    fake_server.respond(Reply("done"))
    provider = provider_for("responses", fake_server)
    with caplog.at_level(logging.WARNING):
        async with an_agent(provider, [web_search(max_uses=1, blocked_domains=["b.test"])]) as agent:
            await agent.send("Hi")
            await agent.send("Hi")
        async with an_agent(provider, [web_search(max_uses=1)]) as agent:
            await agent.send("Hi")
    assert [body["tools"] for body in fake_server.bodies] == [[{"type": "web_search"}]] * 3
    assert [record.getMessage() for record in caplog.records if "takes no" in record.getMessage()] == [
        "openai: OpenAI's web_search takes no blocked_domains, max_uses; the tool is sent without.",
        "openai: OpenAI's web_search takes no max_uses; the tool is sent without.",
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_search_of_responses_is_reported_and_its_conversation_goes_on(fake_server: FakeServer, streamed: bool) -> None:
    # HOST-04, HOST-05, HOST-06
    done = {**SEARCHED, "action": ACTION}
    if streamed:
        fake_server.on(
            "responses",
            response_created(),
            output_item_added({**SEARCHED, "status": "in_progress"}),
            output_item_done(done),
            output_text_delta("It is so.", output_index=1),
            output_item_done(message_item("It is so."), 1),
            response_completed([done, message_item("It is so.")]),
        )
    else:
        fake_server.on("responses", status(200, body=response_object([done, message_item("It is so.")])))
    fake_server.respond(Reply("again"))
    async with memory_store() as store, an_agent(provider_for("responses", fake_server), [web_search()], store=store) as agent:
        session = agent.session("s")
        check_reports(await play(session, "Hi", streamed=streamed), streamed, "web_search", ACTION, SOURCES, "It is so.")
        await session.send("Go on")
    assert [item.get("role") for item in fake_server.bodies[1]["input"]] == ["user", "assistant", "user"]
    assert fake_server.bodies[1]["input"][1]["content"] == "It is so."


async def test_a_turn_of_hosted_calls_alone_is_not_replayed(fake_server: FakeServer) -> None:
    # HOST-06: the next request holds no empty turn
    fake_server.on("responses", status(200, body=response_object([{**SEARCHED, "action": ACTION}])))
    fake_server.respond(Reply("again"))
    async with memory_store() as store, an_agent(provider_for("responses", fake_server), [web_search()], store=store) as agent:
        session = agent.session("s")
        first = await session.send("Hi")
        assert (first.finish_reason, first.text, first.usage.hosted_tool_calls) == ("stop", "", {"web_search": 1})
        assert (await session.send("Go on")).text == "again"
    assert [item["role"] for item in fake_server.bodies[1]["input"]] == ["user", "user"]


async def test_a_failed_call_of_responses_is_an_error_event(fake_server: FakeServer) -> None:
    # HOST-04
    failed = {"type": "mcp_call", "id": "m_1", "name": "find", "arguments": "{}", "error": "no access", "status": "failed"}
    started = {**failed, "error": None, "status": "in_progress"}
    fake_server.on(
        "responses",
        response_created(),
        output_item_added(started),
        output_item_done(failed),
        output_text_delta("Sorry.", output_index=1),
        response_completed([failed, message_item("Sorry.")]),
    )
    tool = hosted_tool("crm", {"type": "mcp", "server_label": "crm", "server_url": "https://crm.test"})
    async with an_agent(provider_for("responses", fake_server), [tool]) as agent:
        played = await play(agent, "Hi", streamed=True)
    (error,) = played.of("tool.error")
    assert (error.tool_name, error.error.name, error.error.message, error.executed_by) == (
        "find",
        "HostedToolError",
        "no access",
        "provider",
    )
    assert played.result is not None
    assert played.result.tool_errors == 0


# ------------------------------------------------------------------------------------------------------------------- Anthropic

RAW = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
BLOCKS: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [{"type": "web_search_result", "url": "https://x.test", "title": "X"}],
    },
]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_search_of_anthropic_is_reported_and_its_conversation_goes_on(fake_server: FakeServer, streamed: bool) -> None:
    # HOST-01, HOST-04, HOST-05, PRV-D11
    if streamed:
        text = {"type": "text", "text": ""}
        blocks = [*BLOCKS, text]
        events = [part for index, block in enumerate(blocks) for part in (block_start(index, block), block_stop(index))]
        events.insert(-1, text_delta(2, "It is so."))
        fake_server.on("messages", message_start(), *events, message_delta("end_turn"), message_stop())
    else:
        fake_server.on("messages", status(200, body=anthropic_message([*BLOCKS, {"type": "text", "text": "It is so."}])))
    fake_server.respond(Reply("again"))
    tools = [hosted_tool("web_search", RAW)]
    async with memory_store() as store, an_agent(provider_for("messages", fake_server), tools, store=store) as agent:
        session = agent.session("s")
        sources = [{"url": "https://x.test", "title": "X"}]
        played = await play(session, "Hi", streamed=streamed)
        check_reports(played, streamed, "web_search", {"query": "x"}, sources, "It is so.")
        await session.send("Go on")
    sent = [{key: value for key, value in body["tools"][0].items() if key != "cache_control"} for body in fake_server.bodies]
    assert sent == [RAW, RAW]
    assert fake_server.bodies[1]["messages"][1] == {"role": "assistant", "content": [{"type": "text", "text": "It is so."}]}


# ------------------------------------------------------------------------------------------------------------- where there is none

WITHOUT: list[Any] = [
    ("chat", web_search()),
    ("compatible", web_search()),
    ("openrouter", code_interpreter()),
    ("ollama", hosted_tool("x", {"type": "x"})),
    ("messages", web_search()),
    ("messages", file_search(vector_store_ids=["v"])),
]


@pytest.mark.parametrize(("route", "tool"), WITHOUT)
async def test_a_provider_that_does_not_run_one_is_sent_nothing(fake_server: FakeServer, route: Route, tool: HostedTool) -> None:
    # HOST-02, PRV-D11
    provider: Any = provider_for(route, fake_server)
    async with an_agent(provider, [tool]) as agent:
        played = await play(agent, "Hi", streamed=False)
        with pytest.raises(ConfigurationError, match=tool.name) as caught:
            await provider.generate(GenerateOptions([user("Hi")], hosted_tools=(tool,)))
    assert played.error is not None
    assert played.error.code == caught.value.code == "LOUSHO_HOSTED_TOOL_UNSUPPORTED"
    assert fake_server.requests == []


async def test_a_fallback_that_does_not_run_one_is_passed_over(fake_server: FakeServer) -> None:
    # HOST-02: the first provider is asked; one behind it that cannot run the tool never answers without it
    fake_server.on("responses", status(401, body={"error": {"message": "no key"}}))
    fake_server.on("responses", Reply("done"))
    fallbacks = [provider_for("chat", fake_server), provider_for("responses", fake_server)]
    async with an_agent(provider_for("responses", fake_server), [web_search()], fallback_models=fallbacks) as agent:
        assert (await agent.send("Hi")).text == "done"
    assert [request.route for request in fake_server.requests] == ["responses", "responses"]
