"""AnthropicProvider against the strict fake server: replies, streams, failures, timeouts."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError, OperationTimeoutError
from lousho_ray.messages import (
    FilePart,
    ImagePart,
    Message,
    ReasoningBlock,
    TextPart,
    ToolCall,
    assistant,
    system,
    tool_result,
    user,
)
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    HostedToolCallChunk,
    HostedToolResultChunk,
    Reasoning,
    ReasoningChunk,
    ReasoningEndChunk,
    ServedBy,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers import prices
from lousho_ray.providers.anthropic import AnthropicProvider
from lousho_ray.providers.failures import Failure, TruncatedStreamError, classify
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.fake_server import (
    FakeServer,
    Reply,
    anthropic_event,
    anthropic_message,
    block_delta,
    block_start,
    block_stop,
    cut,
    drop,
    error_body,
    error_event,
    gate,
    hold,
    input_json_delta,
    message_delta,
    message_start,
    message_stop,
    ping,
    send,
    signature_delta,
    split,
    sse,
    status,
    text_delta,
    thinking_delta,
)
from lousho_ray.usage import ProviderUsage

ADD = ToolDefinition("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
CONVERSATION = [user("Hi")]
TEXT_BLOCK = {"type": "text", "text": ""}


Make = Callable[..., AnthropicProvider]


@pytest.fixture
async def make(fake_server: FakeServer) -> AsyncIterator[Make]:
    made: list[AnthropicProvider] = []

    def provider(**options: Any) -> AnthropicProvider:
        made.append(AnthropicProvider(api_key="sk-secret-key", base_url=fake_server.url, **options))
        return made[-1]

    yield provider
    for one in made:
        await one.aclose()


def options(*messages: Message, **rest: Any) -> GenerateOptions:
    return GenerateOptions(messages or CONVERSATION, **{"prompt_caching": False, **rest})


async def chunks(provider: AnthropicProvider, call: GenerateOptions) -> list[Chunk]:
    return [chunk async for chunk in provider.stream(call)]


async def failed(awaitable: Awaitable[Any]) -> Failure:
    with pytest.raises(Exception) as caught:
        await awaitable
    return classify(caught.value)


# ------------------------------------------------------------------------------------------------------------------ replies


async def test_a_reply_has_text_calls_signed_reasoning_and_usage(fake_server: FakeServer, make: Make) -> None:
    # PRV-04, PRV-51, PRV-D4
    fake_server.respond(Reply(text="Let me add.", tool_calls=[("add", {"a": 1}, "toolu_9")], reasoning="hm", model="claude-x-1"))
    result = await make().generate(options(tools=(ADD,), reasoning=Reasoning("low")))
    assert result.text == "Let me add."
    assert result.tool_calls == (ToolCall("toolu_9", "add", '{"a":1}'),)
    assert result.finish_reason == "tool_calls"
    assert result.usage == ProviderUsage(10, 5)
    assert result.reasoning == (ReasoningBlock("hm", "signature_1", None, "anthropic", "claude-sonnet-4-5"),)  # PRV-07
    assert result.served_by == ServedBy("anthropic", "claude-sonnet-4-5")
    assert result.response_model == "claude-x-1"


async def test_a_stream_gives_the_same_turn_as_a_whole_reply(fake_server: FakeServer, make: Make) -> None:
    # PRV-05, PRV-54
    fake_server.respond(
        Reply(text="naïve 漢字 🧑🏽‍🚀", tool_calls=[("add", {"a": 1}, "toolu_9")], reasoning="hm", redacted_reasoning="blob")
    )
    streamed = await chunks(make(), options(tools=(ADD,)))
    assert "".join(chunk.text for chunk in streamed if isinstance(chunk, TextChunk)) == "naïve 漢字 🧑🏽‍🚀"
    assert [chunk for chunk in streamed if not isinstance(chunk, TextChunk)] == [
        ReasoningChunk("hm"),
        ReasoningEndChunk(ReasoningBlock("hm", "signature_1", None, "anthropic", "claude-sonnet-4-5")),
        ReasoningEndChunk(ReasoningBlock("", None, "blob", "anthropic", "claude-sonnet-4-5")),
        ToolCallChunk(ToolCall("toolu_9", "add", '{"a": 1}')),
        FinishChunk("tool_calls", ProviderUsage(10, 5), ServedBy("anthropic", "claude-sonnet-4-5"), "claude-sonnet-4-5"),
    ]


async def test_a_stream_cut_into_single_bytes_loses_nothing(fake_server: FakeServer, make: Make) -> None:
    # W19, W20
    body = b"\xef\xbb\xbf: hello\r\n\r\n" + b"".join(
        [
            message_start(),
            block_start(0, TEXT_BLOCK),
            text_delta(0, "naïve 漢字 🧑🏽‍🚀").replace(b"\n", b"\r\n"),
            block_stop(0),
            message_delta("end_turn"),
            message_stop(),
        ]
    )
    fake_server.on("messages", split(1), send(body))
    assert (await chunks(make(), options()))[0] == TextChunk("naïve 漢字 🧑🏽‍🚀")


async def test_an_end_mark_of_another_api_is_ignored(fake_server: FakeServer, make: Make) -> None:
    # W19
    ending = message_delta("end_turn") + message_stop() + sse("[DONE] ")
    fake_server.on("messages", send(message_start() + block_start(0, TEXT_BLOCK) + text_delta(0, "ok") + ending))
    assert [type(chunk) for chunk in await chunks(make(), options())] == [TextChunk, FinishChunk]


async def test_halves_of_a_surrogate_pair_are_joined_across_deltas(fake_server: FakeServer, make: Make) -> None:
    # W22
    halves = [
        sse('{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a\\ud83d"}}'),
        sse('{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"\\ude00b"}}'),
    ]
    lone = sse('{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"\\ud83d"}}')
    ending = [block_stop(0), message_delta("end_turn"), message_stop()]
    fake_server.on("messages", message_start(), block_start(0, TEXT_BLOCK), *halves, lone, *ending)
    text = "".join(chunk.text for chunk in await chunks(make(), options()) if isinstance(chunk, TextChunk))
    assert text == "a😀b\ufffd"


async def test_interleaved_blocks_are_gathered_by_index(fake_server: FakeServer, make: Make) -> None:
    # A08, PRV-54
    fake_server.on(
        "messages",
        message_start(),
        block_start(1, {"type": "tool_use", "id": "t1", "name": "add", "input": {}}),
        block_start(2, {"type": "tool_use", "id": "t2", "name": "add", "input": {}}),
        input_json_delta(1, '{"a":'),
        ping(),
        input_json_delta(2, '{"a"'),
        input_json_delta(1, "1}"),
        block_start(3, {"type": "invented"}),
        block_delta(3, {"type": "invented_delta", "x": 1}),
        anthropic_event("invented"),
        input_json_delta(2, ":2}"),
        block_stop(3),
        block_stop(2),
        block_stop(1),
        message_delta("tool_use"),
        message_stop(),
    )
    streamed = await chunks(make(), options(tools=(ADD,)))
    assert streamed[:-1] == [ToolCallChunk(ToolCall("t1", "add", '{"a":1}')), ToolCallChunk(ToolCall("t2", "add", '{"a":2}'))]


async def test_arguments_are_passed_on_as_the_model_wrote_them(fake_server: FakeServer, make: Make) -> None:
    # PRV-26, PRV-27
    fake_server.on(
        "messages",
        message_start(),
        block_start(0, {"type": "tool_use", "id": "t1", "name": "add", "input": {}}),
        block_stop(0),
        block_start(1, {"type": "tool_use", "id": "t1", "name": "add", "input": {}}),
        input_json_delta(1, '{"a": oops'),
        block_stop(1),
        block_start(2, {"type": "tool_use", "id": "", "name": "add", "input": {"a": 3}}),
        message_delta("tool_use"),
        message_stop(),
    )
    history = (user("Q"), assistant("", [ToolCall("call_2", "add")]), Message("tool", "r", tool_call_id="call_2", tool_name="add"))
    calls = [chunk.tool_call for chunk in await chunks(make(), options(*history)) if isinstance(chunk, ToolCallChunk)]
    assert [call.arguments for call in calls] == ["{}", '{"a": oops', '{"a":3}']
    assert calls[0].id == "t1"
    assert len({"call_2", *(call.id for call in calls)}) == 4


async def test_thinking_and_its_signature_come_in_fragments(fake_server: FakeServer, make: Make) -> None:
    fake_server.on(
        "messages",
        message_start(),
        block_start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        thinking_delta(0, "one "),
        thinking_delta(0, "two"),
        signature_delta(0, "si"),
        signature_delta(0, "g"),
        block_stop(0),
        message_delta("end_turn"),
        message_stop(),
    )
    streamed = await chunks(make(), options())
    assert streamed[:2] == [ReasoningChunk("one "), ReasoningChunk("two")]
    assert streamed[2] == ReasoningEndChunk(ReasoningBlock("one two", "sig", None, "anthropic", "claude-sonnet-4-5"))


@pytest.mark.parametrize(
    ("stop_reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
        ("zzz", "other"),
        (None, "other"),
    ],
)
async def test_stop_reasons(stop_reason: str | None, finish: str, fake_server: FakeServer, make: Make) -> None:
    # PRV-52, A07
    fake_server.on("messages", status(200, body=anthropic_message([], stop_reason)))
    fake_server.on("messages", message_start(), message_delta(stop_reason), message_stop())
    provider = make()
    assert (await provider.generate(options())).finish_reason == finish
    last = (await chunks(provider, options()))[-1]
    assert isinstance(last, FinishChunk)
    assert last.finish_reason == finish


async def test_a_reply_with_calls_finishes_as_tool_calls_whatever_the_server_says(fake_server: FakeServer, make: Make) -> None:
    # PRV-28, A07
    block = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
    fake_server.on("messages", status(200, body=anthropic_message([block], "pause_turn")))
    result = await make().generate(options(tools=(ADD,)))
    assert (result.finish_reason, len(fake_server.requests)) == ("tool_calls", 1)


@pytest.mark.parametrize(("stop_reason", "finish"), [("max_tokens", "length"), ("refusal", "content_filter")])
async def test_calls_of_a_cut_or_refused_reply_are_not_given_out(
    stop_reason: str, finish: str, fake_server: FakeServer, make: Make
) -> None:
    # PRV-28, A07
    fake_server.on(
        "messages",
        message_start(),
        block_start(0, {"type": "tool_use", "id": "t1", "name": "add", "input": {}}),
        input_json_delta(0, '{"a": "half'),
        block_stop(0),
        message_delta(stop_reason),
        message_stop(),
    )
    (last,) = await chunks(make(), options(tools=(ADD,)))
    assert isinstance(last, FinishChunk)
    assert last.finish_reason == finish


async def test_the_model_registry_says_how_long_a_reply_may_be(
    fake_server: FakeServer, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PRV-44
    monkeypatch.setattr(prices, "_registered", {})
    fake_server.respond(Reply(text="ok"))
    prices.register_model(id="claude-own", provider="anthropic", max_output_tokens=12_345)
    await make(default_model="claude-own").generate(options())
    assert fake_server.bodies[0]["max_tokens"] == 12_345


async def test_usage_counts_cache_traffic_and_takes_the_last_figure_of_a_stream(fake_server: FakeServer, make: Make) -> None:
    # PRV-53, PRV-53b
    started = {"input_tokens": 100, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 300, "output_tokens": 1}
    ended = {"output_tokens": 50, "input_tokens": None, "output_tokens_details": {"thinking_tokens": 7}}
    fake_server.on("messages", message_start(started), message_delta("end_turn", ended), message_stop())
    last = (await chunks(make(), options()))[-1]
    assert isinstance(last, FinishChunk)
    assert last.usage == ProviderUsage(420, 50, 300, 20, 7)


@pytest.mark.parametrize("usage", [None, {"input_tokens": 0, "output_tokens": 0}])
async def test_usage_that_was_not_reported_is_none(usage: Any, fake_server: FakeServer, make: Make) -> None:
    # PRV-08
    fake_server.on("messages", status(200, body={**anthropic_message([]), "usage": usage}))
    assert (await make().generate(options())).usage is None


async def test_a_json_body_where_a_stream_was_asked_for_is_read(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("messages", status(200, body=anthropic_message([{"type": "text", "text": "whole"}])))
    streamed = await chunks(make(), options())
    assert streamed[0] == TextChunk("whole")
    assert isinstance(streamed[-1], FinishChunk)


# ------------------------------------------------------------------------------------------------- hosted tools, pause_turn


SEARCH = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [{"type": "web_search_result", "url": "https://x.test", "title": "X"}],
    },
]


async def test_a_paused_turn_is_sent_back_and_continued_in_one_call(fake_server: FakeServer, make: Make) -> None:
    # PRV-D11, PRV-51, A07
    fake_server.on("messages", status(200, body=anthropic_message([*SEARCH, {"type": "text", "text": "so "}], "pause_turn")))
    fake_server.on("messages", status(200, body=anthropic_message([{"type": "text", "text": "far"}])))
    result = await make().generate(options())
    assert (result.text, result.finish_reason, result.usage) == ("so far", "stop", ProviderUsage(20, 2))
    (hosted,) = result.hosted_tool_calls
    assert (hosted.id, hosted.name, hosted.args, hosted.is_error) == ("s1", "web_search", {"query": "x"}, False)
    assert hosted.sources == ({"url": "https://x.test", "title": "X"},)
    assert fake_server.bodies[1]["messages"][1] == {"role": "assistant", "content": [*SEARCH, {"type": "text", "text": "so"}]}


async def test_a_stream_continues_a_paused_turn_and_gives_up_after_three(fake_server: FakeServer, make: Make) -> None:
    paused = [
        message_start(),
        block_start(0, {**SEARCH[0], "input": {}}),
        input_json_delta(0, '{"query": "x"}'),
        block_stop(0),
        block_start(1, SEARCH[1]),
        block_stop(1),
        message_delta("pause_turn"),
        message_stop(),
    ]
    for _ in range(4):
        fake_server.on("messages", *paused)
    streamed = await chunks(make(), options())
    assert [type(chunk) for chunk in streamed] == [HostedToolCallChunk, HostedToolResultChunk] * 4 + [FinishChunk]
    last = streamed[-1]
    assert isinstance(last, FinishChunk)
    assert (last.finish_reason, last.usage) == ("other", ProviderUsage(40, 20))
    assert fake_server.bodies[3]["messages"][1]["content"] == SEARCH * 3


async def test_a_pause_without_content_is_not_sent_back(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("messages", status(200, body=anthropic_message([], "pause_turn")))
    assert (await make().generate(options())).finish_reason == "other"


# ----------------------------------------------------------------------------------------------------------------- failures


async def test_an_overloaded_error_inside_a_stream_is_retryable_by_its_type(fake_server: FakeServer, make: Make) -> None:
    # A01, PRV-55
    overloaded = error_event("overloaded_error", "Overloaded")
    fake_server.on("messages", message_start(), block_start(0, TEXT_BLOCK), text_delta(0, "par"), overloaded)
    fake_server.on("messages", overloaded)
    fake_server.on("messages", error_event("rate_limit_error", "slow down"))
    provider = make()
    stream = provider.stream(options())
    assert await anext(stream) == TextChunk("par")
    failure = await failed(anext(stream))
    assert (failure.category, failure.retryable, failure.code) == ("unknown", True, "overloaded_error")
    assert (await failed(chunks(provider, options()))).retryable
    assert (await failed(chunks(provider, options()))).category == "rate-limit"


@pytest.mark.parametrize(
    ("code", "type", "category", "retryable"),
    [
        (529, "overloaded_error", "unknown", True),
        (500, "api_error", "unknown", True),
        (429, "rate_limit_error", "rate-limit", True),
        (401, "authentication_error", "auth-failure", False),
        (400, "invalid_request_error", "unknown", False),
        (413, "request_too_large", "context-length-exceeded", False),
    ],
)
async def test_error_statuses(code: int, type: str, category: str, retryable: bool, fake_server: FakeServer, make: Make) -> None:
    # A02, A10, PRV-12: one request, whatever the status
    fake_server.on("messages", status(code, body=error_body("messages", "the server's words", type=type)))
    failure = await failed(make().generate(options()))
    assert (failure.category, failure.retryable, failure.status) == (category, retryable, code)
    assert failure.message == "the server's words"
    assert len(fake_server.requests) == 1


async def test_overload_before_any_output_is_tried_again(fake_server: FakeServer, make: Make) -> None:
    # A01, A02: as the first event of a 200, as status 529, and after a call that was not given out yet
    fake_server.on("messages", error_event("overloaded_error", "Overloaded"))
    fake_server.on("messages", status(529, body=error_body("messages", "Overloaded", type="overloaded_error")))
    call = block_start(0, {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}) + block_stop(0)
    fake_server.on("messages", message_start(), call, error_event("overloaded_error", "Overloaded"))
    fake_server.on("messages", Reply(text="ok"))
    provider = with_retry(make(), max_retries=3, backoff={"initial_ms": 1})
    streamed = [chunk async for chunk in provider.stream(options(tools=(ADD,)))]
    assert [type(chunk) for chunk in streamed] == [TextChunk, FinishChunk]
    assert len(fake_server.requests) == 4


async def test_an_html_413_is_shown_without_its_tags(fake_server: FakeServer, make: Make) -> None:
    # A10, LES-06
    fake_server.on("messages", status(413, {"content-type": "text/html"}, "<html><h1>Too Large</h1></html>"))
    failure = await failed(chunks(make(), options()))
    assert (failure.category, failure.message) == ("context-length-exceeded", "Too Large")


async def test_a_prompt_that_is_too_long_is_a_context_overflow(fake_server: FakeServer, make: Make) -> None:
    # LES-05, PRV-73
    body = error_body("messages", "prompt is too long: 210000 tokens > 200000 maximum")
    fake_server.on("messages", status(400, body=body))
    assert (await failed(make().generate(options()))).category == "context-length-exceeded"


@pytest.mark.parametrize("body", [b"", b"<html>busy</html>", b"[]", b'{"id": "m"}', b'{"type":"error","error":{"message":"no"}}'])
async def test_a_200_without_an_answer_is_a_retryable_failure(body: bytes, fake_server: FakeServer, make: Make) -> None:
    fake_server.on("messages", status(200, {"content-type": "application/json"}, body))
    fake_server.on("messages", status(200, {"content-type": "application/json"}, body))
    provider = make()
    for failure in (await failed(provider.generate(options())), await failed(chunks(provider, options()))):
        assert (failure.category, failure.retryable) == ("unknown", True)


@pytest.mark.parametrize("ending", [[], [cut], [drop], [sse("{broken")]], ids=["end", "cut", "reset", "broken-json"])
async def test_a_stream_that_breaks_off_is_a_retryable_failure(ending: list[Any], fake_server: FakeServer, make: Make) -> None:
    # PRV-54, PRV-55b
    fake_server.on("messages", message_start(), block_start(0, TEXT_BLOCK), text_delta(0, "par"), *ending)
    failure = await failed(chunks(make(), options()))
    assert (failure.category, failure.retryable) == ("unknown", True)


async def test_a_stream_without_message_stop_is_truncated(fake_server: FakeServer, make: Make) -> None:
    # PRV-54
    fake_server.on("messages", message_start(), message_delta("end_turn"))
    with pytest.raises(TruncatedStreamError):
        await chunks(make(), options())


async def test_a_refused_connection_names_where_and_why() -> None:
    # LES-07
    async with FakeServer() as server:
        url = server.url
    provider = AnthropicProvider(api_key="k", base_url=url)
    failure = await failed(provider.generate(options()))
    await provider.aclose()
    assert failure.retryable
    assert url.removeprefix("http://") in failure.message
    assert "refused" in failure.message


async def test_the_key_shows_in_no_error(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("messages", status(401, body=error_body("messages", "bad key sk-secret-key")))
    with pytest.raises(Exception, match="bad key") as caught:
        await make().generate(options())
    assert "sk-secret-key" not in f"{caught.value!r} {caught.value} {classify(caught.value)}"


async def test_without_a_key_no_request_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        await AnthropicProvider().generate(options())
    assert caught.value.code == "LOUSHO_PROVIDER_MISSING_API_KEY"


# --------------------------------------------------------------------------------------------- cancellation and time limits


async def test_cancelling_a_call_closes_its_connection(fake_server: FakeServer, make: Make) -> None:
    # PRV-09
    fake_server.on("messages", hold)
    task = asyncio.create_task(make().generate(options()))
    await fake_server.wait_for_requests(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake_server.wait_closed(fake_server.requests[0])


async def test_closing_a_stream_early_closes_its_connection(fake_server: FakeServer, make: Make) -> None:
    # PRV-09
    fake_server.on("messages", message_start(), block_start(0, TEXT_BLOCK), text_delta(0, "one"), hold)
    stream = make().stream(options())
    assert await anext(stream) == TextChunk("one")
    await stream.aclose()
    await fake_server.wait_closed(fake_server.requests[0])


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_silent_server_is_left_after_timeout_ms(streaming: bool, fake_server: FakeServer, make: Make) -> None:
    # LES-02, PRV-46
    fake_server.on("messages", hold)
    provider = make(timeout_ms=500)
    with pytest.raises(OperationTimeoutError):
        await (chunks(provider, options()) if streaming else provider.generate(options()))
    await fake_server.wait_closed(fake_server.requests[0])


async def test_a_stream_that_stalls_is_left_after_idle_timeout_ms(fake_server: FakeServer, make: Make) -> None:
    # LES-02
    fake_server.on("messages", message_start(), block_start(0, TEXT_BLOCK), text_delta(0, "one"), hold)
    with pytest.raises(OperationTimeoutError):
        await chunks(make(idle_timeout_ms=50), options())
    await fake_server.wait_closed(fake_server.requests[0])


async def test_a_large_max_tokens_needs_no_stream(fake_server: FakeServer, make: Make) -> None:
    # PRV-46
    fake_server.respond(Reply(text="ok"))
    call = options(reasoning=Reasoning("high"), settings={"max_tokens": 30_000})
    result: GenerateResult = await make(timeout_ms=None).generate(call)
    assert result.text == "ok"
    assert fake_server.bodies[0]["max_tokens"] == 30_000 + 24_576


async def test_finished_streams_leave_their_connection_to_the_next_call(fake_server: FakeServer, make: Make) -> None:
    fake_server.respond(Reply(text="ok"))
    provider = make()
    for _ in range(3):
        await chunks(provider, options())
    await provider.generate(options())
    assert len({request.connection for request in fake_server.requests}) == 1


# ------------------------------------------------------------------------------------------------------- loops, pickles, logs


def test_a_provider_works_in_one_loop_after_another() -> None:
    # PRV-14
    with FakeServer.in_thread() as server:
        server.respond(Reply(text="ok"))
        provider = AnthropicProvider(api_key="k", base_url=server.url)
        assert [asyncio.run(provider.generate(options())).text for _ in range(2)] == ["ok", "ok"]


def test_a_provider_travels_as_its_configuration() -> None:
    # PRV-14
    provider = AnthropicProvider(api_key="k", structured_outputs=True, default_model="claude-x")
    provider.accepts_file_parts = False
    copy = pickle.loads(pickle.dumps(provider))
    assert (copy.configuration(), copy.accepts_file_parts) == (provider.configuration(), False)


def test_an_unknown_option_is_refused_with_the_closest_name() -> None:
    # PRV-11
    with pytest.raises(ConfigurationError, match="structured_outputs") as caught:
        AnthropicProvider(api_key="k", structured_output=True)
    assert caught.value.field == "structured_output"


async def test_the_environment_is_read_once_where_the_provider_is_made(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "made-here")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", fake_server.url)
    provider = AnthropicProvider(headers={"x-mine": "1"})
    monkeypatch.setenv("ANTHROPIC_API_KEY", "elsewhere")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "elsewhere")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "X-Account: elsewhere\nx-mine: elsewhere")
    fake_server.respond(Reply(text="ok"))
    await provider.generate(options())
    await provider.aclose()
    headers = fake_server.requests[0].headers
    assert headers["x-mine"] == "1"
    assert "elsewhere" not in str(headers)
    assert "made-here" in str(headers)


async def test_a_pdf_is_sent(fake_server: FakeServer, make: Make) -> None:
    # PRV-22
    fake_server.respond(Reply(text="ok"))
    await make().generate(options(user([FilePart(b"%PDF", "application/pdf", "a.pdf"), TextPart("Sum up.")])))


async def test_models_are_listed(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("/v1/models", status(200, body={"data": [{"id": "claude-a"}, {"id": "claude-b"}], "has_more": False}))
    assert await make().get_models() == ["claude-a", "claude-b"]


async def test_bodies_are_logged_only_at_debug(fake_server: FakeServer, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    # PRV-D12
    fake_server.respond(Reply(text="answer"))
    provider = make()
    with caplog.at_level(logging.INFO):
        await provider.generate(options())
    assert "answer" not in caplog.text
    with caplog.at_level(logging.DEBUG, "lousho_ray.http"):
        await provider.generate(options(user("the key is sk-secret-key")))
    assert "answer" in caplog.text
    assert "sk-secret-key" not in caplog.text


# ------------------------------------------------------------------------------------------------ histories the API accepts


async def test_a_whole_tool_turn_with_thinking_is_accepted(fake_server: FakeServer, make: Make) -> None:
    # PRV-47, PRV-81, A04
    fake_server.respond(
        [Reply(text="t ", tool_calls=[("add", {"a": 1}), ("add", {"a": 2}), ("add", {"a": 3})], reasoning="hm"), Reply(text="6")]
    )
    provider = make()
    first = await provider.generate(options(system("S"), user("Add"), tools=(ADD,), reasoning=Reasoning("low")))
    history = [
        system("S"),
        user("Add"),
        assistant(first.text, first.tool_calls, first.reasoning),
        tool_result(first.tool_calls[1], "two"),
        tool_result(first.tool_calls[0], "\n"),
        user([TextPart("hurry"), ImagePart(b"\x89PNG\r\n\x1a\n")]),
        tool_result(first.tool_calls[2], "boom", is_error=True),
    ]
    second = await provider.generate(options(*history, tools=(ADD,), reasoning=Reasoning("low"), prompt_caching="auto"))
    assert second.text == "6"
    sent = fake_server.bodies[1]["messages"]
    assert [block["type"] for block in sent[1]["content"]] == ["thinking", "text", "tool_use", "tool_use", "tool_use"]
    assert [block["type"] for block in sent[2]["content"]] == ["tool_result"] * 3 + ["text", "image"]


async def test_a_history_of_another_provider_is_accepted(fake_server: FakeServer, make: Make) -> None:
    # L07, PRV-D4
    fake_server.respond(Reply(text="ok"))
    call = ToolCall("functions.add:0|fc_1", "functions.add", "{broken")
    foreign = ReasoningBlock("x", "their signature", None, "openai", "gpt-x")
    history = (user("Q"), assistant(" ", [call], [foreign]), tool_result(call, ""))
    assert (await make().generate(options(*history, reasoning=Reasoning("high")))).text == "ok"
    assert "thinking" not in json.dumps(fake_server.bodies[0])


async def test_a_held_answer_is_waited_for(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("messages", gate("g"), Reply(text="late"))
    task = asyncio.create_task(make().generate(options()))
    await fake_server.reached("g")
    fake_server.release("g")
    assert (await task).text == "late"
