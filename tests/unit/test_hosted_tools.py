"""Hosted tools: their descriptions, how an agent takes them, and what becomes of the calls that a provider ran."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lousho_ray import (
    HostedTool,
    Message,
    ToolRegistry,
    code_interpreter,
    create_agent,
    file_search,
    hosted_tool,
    memory_store,
    web_search,
    with_fallback,
    with_rate_limit,
    with_retry,
)
from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import GenerateOptions, GenerateResult, HostedToolCall, HostedToolCallChunk
from lousho_ray.providers.ollama_wire import chat_request
from lousho_ray.testing.mock_model import mock_model
from tests.unit.loop_support import PolicyProvider, ScriptedStream, agent_of, calls, check_transcript, collect, names, plain, say

FOUND = {
    "text": "Found",
    "hosted_tool_calls": [{"name": "web_search", "args": {"query": "x"}, "result": ["r"], "sources": [{"url": "u"}]}],
}


def refused(field: str, *arguments: Any, make: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make(*arguments, **options)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", field)
    return caught.value.detail


# ---------------------------------------------------------------------------------------------------------------- descriptions


def test_descriptions_hold_what_was_given_and_nothing_else() -> None:
    # HOST-01
    assert web_search().options == {}
    everything = web_search(
        allowed_domains=["a.org"],
        blocked_domains=("b.org",),
        max_uses=2,
        search_context_size="low",
        user_location={"city": "Bern", "country": "CH"},
    )
    assert everything.options == {
        "allowed_domains": ["a.org"],
        "blocked_domains": ["b.org"],
        "max_uses": 2,
        "search_context_size": "low",
        "user_location": {"city": "Bern", "country": "CH"},
    }
    assert code_interpreter(file_ids=["f1"]).options == {"file_ids": ["f1"]}
    assert file_search(vector_store_ids=["v1"], max_results=3).options == {"vector_store_ids": ["v1"], "max_results": 3}
    assert [tool.type for tool in (web_search(), code_interpreter(), hosted_tool("x", {"type": "y"}))] == [
        "web_search",
        "code_interpreter",
        "hosted_tool",
    ]


def test_a_raw_description_is_a_copy() -> None:
    raw: dict[str, Any] = {"type": "mcp", "allowed": ["a"]}
    made = hosted_tool("crm", raw)
    raw["allowed"].append("b")
    assert (made.name, made.raw) == ("crm", {"type": "mcp", "allowed": ["a"]})


@pytest.mark.parametrize("ids", [[], (), "v1", ["v1", ""], None])
def test_a_file_search_without_stores_is_refused_at_once(ids: Any) -> None:
    # HOST-01
    assert "at least one text" in refused("vector_store_ids", make=file_search, vector_store_ids=ids)


@pytest.mark.parametrize(
    ("field", "make", "options"),
    [
        ("allowed_domains", web_search, {"allowed_domains": "a.org"}),
        ("blocked_domains", web_search, {"blocked_domains": []}),
        ("max_uses", web_search, {"max_uses": True}),
        ("search_context_size", web_search, {"search_context_size": "huge"}),
        ("user_location", web_search, {"user_location": {"planet": "Mars"}}),
        ("user_location", web_search, {"user_location": {}}),
        ("container", code_interpreter, {"container": ""}),
        ("file_ids", code_interpreter, {"container": "c", "file_ids": ["f"]}),
        ("max_results", file_search, {"vector_store_ids": ["v"], "max_results": 0}),
        ("filters", file_search, {"vector_store_ids": ["v"], "filters": {"a": object()}}),
        ("name", hosted_tool, {"name": "a b", "raw": {"type": "x"}}),
        ("raw", hosted_tool, {"name": "a", "raw": {"name": "x"}}),
        ("raw", hosted_tool, {"name": "a", "raw": {"type": "x", "limit": float("nan")}}),
    ],
)
def test_options_that_cannot_be_used_are_named(field: str, make: Any, options: dict[str, Any]) -> None:
    # HOST-01
    refused(field, make=make, **options)


# -------------------------------------------------------------------------------------------------------- giving them to agents


def test_a_registry_refuses_them() -> None:
    # HOST-07
    assert "give it to create_agent(tools=)" in refused("tools", [web_search()], make=ToolRegistry)
    assert "'web_search' is a hosted tool" in refused("tools", web_search(), make=ToolRegistry().register)


@pytest.mark.parametrize(
    "tools",
    [
        [web_search(), plain("web_search")],
        [plain("web_search"), [web_search()]],
        {"web_search": plain("anything"), "more": web_search},
        [web_search(), web_search(max_uses=1)],
        [web_search(), hosted_tool("web_search", {"type": "web_search_20250305"})],
    ],
    ids=["tool", "nested", "mapping", "twice", "raw"],
)
def test_a_name_is_taken_once(tools: Any) -> None:
    # HOST-07
    assert "web_search" in refused("tools", make=agent_of, tools=tools)


def test_a_mapping_calls_a_hosted_tool_by_its_name() -> None:
    # HOST-07
    assert agent_of("x", tools={"web_search": web_search(), "a": plain("b")}).definition.hosted_tools == (web_search(),)
    assert "stands under the key 'search'" in refused("tools", make=agent_of, tools={"search": web_search()})


def test_a_reserved_name_and_a_constructor_that_was_not_called_are_refused() -> None:
    assert "reserved" in refused("tools", make=agent_of, tools=[hosted_tool("task", {"type": "x"})])
    assert "call it" in refused("tools", make=agent_of, tools=[web_search])


async def test_they_are_sent_with_every_model_call_and_not_to_sub_agents() -> None:
    # HOST-07, SUB-43, MOCK-14
    model, child = mock_model([calls("look"), calls("task_", ("task", _task())), "Done"]), mock_model(["Read"])
    reader = create_agent(provider=child, description="Reads.")
    tools = [plain("look"), plain("task_"), web_search()]
    await create_agent(provider=model, tools=tools, subagents={"reader": reader}, runtime="local").send("Hi")
    assert [request.hosted_tools for request in model.calls] == [(web_search(),)] * 3
    assert [request.hosted_tools for request in child.calls] == [()]


def _task() -> dict[str, str]:
    return {"agent": "reader", "prompt": "Read it.", "description": "Reads a page"}


async def test_a_tools_function_may_return_them() -> None:
    # HOST-07, TOOL-06
    model = mock_model(["Done"])
    await create_agent(provider=model, tools=lambda ctx: [plain("look"), code_interpreter()]).send("Hi")
    assert model.calls[0].hosted_tools == (code_interpreter(),)
    clash = create_agent(provider=mock_model(["x"]), tools=lambda ctx: [plain("web_search"), web_search()])
    with pytest.raises(ConfigurationError, match="one name"):
        await clash.send("Hi")


async def test_a_tool_choice_is_sent_when_hosted_tools_are_all_there_is() -> None:
    # CA-30
    model = mock_model(["Done"])
    await create_agent(provider=model, tools=[web_search()], model_settings={"tool_choice": "required"}).send("Hi")
    assert model.calls[0].settings == {"tool_choice": "required"}


async def test_a_forced_answer_goes_without_them() -> None:
    # RUN-D4
    model = mock_model([calls("look"), '{"n": 1}'])
    agent = create_agent(provider=model, tools=[plain("look"), web_search()], max_steps=1, output=dict[str, int])
    assert (await agent.send("Hi")).object == {"n": 1}
    assert [len(request.hosted_tools) for request in model.calls] == [1, 0]


# ------------------------------------------------------------------------------------------------------- providers without them


class Picky(PolicyProvider):
    """Runs web searches only."""

    def supports_hosted_tool(self, type: str) -> bool:
        return type == "web_search"


WRAPPERS: dict[str, Any] = {
    "bare": lambda provider: provider,
    "retry": with_retry,
    "fallback": lambda provider: with_fallback([provider, mock_model(["Never"])]),
    "limit": lambda provider: with_rate_limit(provider, {"max_concurrent": 1}),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
async def test_a_provider_that_cannot_run_one_ends_the_run_before_its_first_call(wrap: Any) -> None:
    # HOST-02, PRV-70
    silent, picky = PolicyProvider(lambda options: "Never"), Picky(lambda options: "Done")
    for provider, tool in ((silent, web_search()), (picky, code_interpreter())):
        with pytest.raises(ConfigurationError) as caught:
            await create_agent(provider=wrap(provider), tools=[tool]).send("Hi")
        assert (caught.value.code, caught.value.field, provider.calls) == ("LOUSHO_HOSTED_TOOL_UNSUPPORTED", "tools", 0)
        assert f"'policy' does not run the hosted tool '{tool.name}'" in caught.value.detail
        assert "OpenAI's Responses API runs web_search()" in caught.value.detail
    assert (await create_agent(provider=wrap(picky), tools=[web_search()]).send("Hi")).text == "Done"


async def test_a_streamed_run_ends_with_the_error_and_a_session_keeps_its_transcript() -> None:
    # HOST-02
    agent = create_agent(
        provider=PolicyProvider(lambda options: "Never"), tools=[web_search()], store=memory_store(), runtime="local"
    )
    assert names(await collect(agent.stream("Hi"))) == ["error ConfigurationError", "run.done error"]
    session = agent.session("s")
    with pytest.raises(ConfigurationError):
        await session.send("Hi")
    assert await session.history() == []


# ------------------------------------------------------------------------------------------------------------ what comes of calls


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_hosted_call_is_reported_counted_and_kept_beside_the_text(streamed: bool) -> None:
    # HOST-04, HOST-05, MOCK-03, MOCK-13, MOCK-14, RUN-68
    hooked: list[str] = []
    agent = agent_of(FOUND, tools=[web_search()], hooks=[Watching(hooked)])
    if streamed:
        run = agent.stream("Hi")
        events = await collect(run)
        assert names(events)[2:6] == ["tool.start web_search", "tool.done web_search", "text.delta Found", "text.done Found"]
        assert [event.to_dict()["executedBy"] for event in events[2:4]] == ["provider", "provider"]
        assert events[-1].to_dict()["usage"]["hostedToolCalls"] == {"web_search": 1}
        result = await run.result
    else:
        result = await agent.send("Hi")
    assert (result.finish_reason, result.steps, result.tool_calls, hooked) == ("stop", 1, [], [])  # HOST-06, HOOK-17
    assert result.usage.hosted_tool_calls == {"web_search": 1}
    call = {"id": "hosted_1", "name": "web_search", "args": {"query": "x"}, "result": ["r"], "isError": False}
    assert result.messages[-1].metadata == {"hostedToolCalls": [{**call, "sources": [{"url": "u"}]}]}


class Watching:
    name = "watching"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def pre_tool_call(self, ctx: Any) -> None:
        self._log.append(ctx.tool_name)

    def post_tool_call(self, ctx: Any, outcome: Any) -> None:
        self._log.append(ctx.tool_name)


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_step_of_hosted_calls_alone_ends_the_run(reason: str, streamed: bool) -> None:
    # HOST-06, RUN-D6
    agent = agent_of({**FOUND, "text": "", "finish_reason": reason}, tools=[web_search()])
    result = await (agent.stream("Hi").result if streamed else agent.send("Hi"))
    assert (result.finish_reason, result.steps, result.text) == ("stop", 1, "")
    assert result.messages[-1].metadata is not None
    check_transcript(result.messages)  # no server is sent the turn without text


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_provider_is_sent_a_turn_of_hosted_calls_alone(streamed: bool) -> None:
    # HOST-05, HOST-06: also one of your own, which would have to know that its API refuses a turn without text
    model = mock_model([{**FOUND, "text": " "}, "More"])
    store = memory_store()
    session = create_agent(provider=model, tools=[web_search()], store=store, runtime="local").session("s")
    for text in ("Hi", "Go on"):
        await (session.stream(text).result if streamed else session.send(text))
    assert [(message.role, message.text) for message in model.calls[1].messages[1:]] == [("user", "Hi"), ("user", "Go on")]
    stored = await store.sessions.load("s")
    assert stored is not None
    assert [message.role for message in stored] == ["user", "assistant", "user", "assistant"]
    body = json.loads(chat_request(model.calls[1], "llama3.2", check_no_warning, stream=streamed))
    assert body["messages"][1:] == [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Go on"}]


def check_no_warning(key: str, text: str) -> None:
    raise AssertionError(f"{key}: {text}")


async def test_a_turn_without_text_that_has_calls_is_sent() -> None:
    model = mock_model([{**calls("look"), "hosted_tool_calls": [{"name": "web_search"}]}, "Done"])
    await create_agent(provider=model, tools=[plain("look"), web_search()]).send("Hi")
    assert [(message.role, message.text) for message in model.calls[1].messages][1:3] == [("user", "Hi"), ("assistant", "")]


async def test_only_the_text_is_replayed_and_the_record_is_stored() -> None:
    # HOST-05, RUN-16
    store = memory_store()
    agent = agent_of({**FOUND, "tool_calls": [{"name": "look"}]}, "Done", "More", tools=[plain("look"), web_search()], store=store)
    session = agent.session("s")
    await session.send("Hi")
    await session.send("Go on")
    stored = await store.sessions.load("s")
    assert stored is not None
    kept: list[Message] = [message for message in stored if message.metadata and "hostedToolCalls" in message.metadata]
    assert [(message.text, message.tool_calls[0].name) for message in kept] == [("Found", "look")]
    check_transcript(stored)


async def test_a_long_result_is_cut_with_a_count_in_the_record_too() -> None:
    # HOST-04
    turn = {"text": "x", "hosted_tool_calls": [{"name": "web_search", "result": "y" * 30_000}]}
    (record,) = ((await agent_of(turn, tools=[web_search()]).send("Hi")).messages[-1].metadata or {})["hostedToolCalls"]
    assert record["result"].endswith("... [truncated 10002 characters]")
    assert len(record["result"]) < 20_100
    json.dumps(record)


async def test_a_call_that_a_stream_never_ended_is_an_error_and_is_counted() -> None:
    # HOST-04
    call = HostedToolCall("h1", "web_search", {"query": "x"})
    provider = ScriptedStream([HostedToolCallChunk(call), *say("Found")])
    run = create_agent(provider=provider).stream("Hi")
    assert "tool.error web_search" in names(await collect(run))
    assert (await run.result).usage.hosted_tool_calls == {"web_search": 1}


async def test_counts_of_sub_agents_are_added_to_those_of_the_lead() -> None:
    # HOST-05, SUB-32
    reader = create_agent(provider=mock_model([FOUND]), description="Reads.", tools=[web_search()])
    lead = mock_model([{**FOUND, "tool_calls": [{"name": "task", "args": _task()}]}, "Done"])
    result = await create_agent(provider=lead, tools=[web_search()], subagents={"reader": reader}, runtime="local").send("Hi")
    assert result.usage.hosted_tool_calls == {"web_search": 2}
    assert result.usage.delegated is not None
    assert result.usage.delegated.hosted_tool_calls == {"web_search": 1}


async def test_a_limit_on_tool_errors_does_not_count_them() -> None:
    # HOST-06
    failed = {"text": "x", "tool_calls": [{"name": "look"}], "hosted_tool_calls": [{"name": "web_search", "is_error": True}]}
    agent = agent_of(failed, "Done", tools=[plain("look"), web_search()], limits={"max_tool_errors": 1})
    result = await agent.send("Hi")
    assert (result.finish_reason, result.tool_errors) == ("stop", 0)


def test_a_changed_hosted_tool_is_drift() -> None:
    # DUR-37
    def parts(*tools: HostedTool) -> Any:
        return agent_of("x", tools=list(tools)).definition.fingerprint["tools"]

    assert parts(web_search()) == parts(web_search())
    assert parts(web_search()) != parts(web_search(max_uses=1))
    assert list(parts(web_search(), code_interpreter())) == ["web_search", "code_interpreter"]


async def test_a_provider_of_ones_own_gets_the_descriptions_as_they_are() -> None:
    # HOST-01
    seen: list[GenerateOptions] = []

    def answer(options: GenerateOptions) -> GenerateResult:
        seen.append(options)
        return GenerateResult("Done")

    await create_agent(provider=Picky(answer), tools=[web_search(max_uses=1)]).send("Hi")
    assert seen[0].hosted_tools == (web_search(max_uses=1),)
