"""OllamaProvider against the strict fake server."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from lousho_ray.errors import OperationTimeoutError
from lousho_ray.messages import ImagePart, Message, ReasoningBlock, TextPart, ToolCall, assistant, system, tool_result, user
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    Reasoning,
    ReasoningChunk,
    ReasoningEndChunk,
    ResponseFormat,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers.failures import Failure, TruncatedStreamError, classify
from lousho_ray.providers.ollama import OllamaProvider
from lousho_ray.testing.fake_server import (
    FakeServer,
    Reply,
    cut,
    drop,
    gate,
    hold,
    ollama_answer,
    ollama_done,
    ollama_error,
    ollama_line,
    send,
    split,
    status,
)
from lousho_ray.usage import ProviderUsage

ADD = ToolDefinition("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
Make = Callable[..., OllamaProvider]


@pytest.fixture
async def make(fake_server: FakeServer) -> AsyncIterator[Make]:
    made: list[OllamaProvider] = []

    def provider(**options: Any) -> OllamaProvider:
        made.append(OllamaProvider(base_url=fake_server.url, **options))
        return made[-1]

    yield provider
    for one in made:
        await one.aclose()


def options(*messages: Message, **rest: Any) -> GenerateOptions:
    return GenerateOptions(messages or [user("Hi")], **rest)


async def chunks(provider: OllamaProvider, call: GenerateOptions) -> list[Chunk]:
    return [chunk async for chunk in provider.stream(call)]


async def failed(awaitable: Awaitable[Any]) -> Failure:
    with pytest.raises(Exception) as caught:
        await awaitable
    return classify(caught.value)


async def test_a_whole_reply(fake_server: FakeServer, make: Make) -> None:
    # PRV-04, PRV-58b, W04
    fake_server.respond(Reply(text="Adding.", tool_calls=[("add", {"a": 1})], reasoning="hm", usage=(7, 3)))
    result = await make(default_model="qwen3").generate(options(tools=(ADD,), reasoning=Reasoning("low")))
    assert (result.text, result.finish_reason, result.usage) == ("Adding.", "tool_calls", ProviderUsage(7, 3))
    assert result.tool_calls == (ToolCall("call_0", "add", '{"a":1}'),)
    assert result.reasoning == (ReasoningBlock("hm", provider="ollama"),)
    assert fake_server.bodies[0]["think"] is True
    assert fake_server.requests[0].path == "/api/chat"


async def test_a_stream_gives_the_same_turn(fake_server: FakeServer, make: Make) -> None:
    # PRV-05
    fake_server.respond(Reply(text="naïve 漢字 🧑🏽‍🚀", tool_calls=[("add", {"a": 1})], reasoning="hm"))
    streamed = await chunks(make(), options(tools=(ADD,)))
    assert "".join(chunk.text for chunk in streamed if isinstance(chunk, TextChunk)) == "naïve 漢字 🧑🏽‍🚀"
    others = [chunk for chunk in streamed if not isinstance(chunk, TextChunk)]
    assert others[:3] == [ReasoningChunk("hm"), ReasoningEndChunk(), ToolCallChunk(ToolCall("call_0", "add", '{"a":1}'))]
    assert isinstance(others[-1], FinishChunk)
    assert len(others) == 4


async def test_a_stream_cut_into_single_bytes_loses_nothing(fake_server: FakeServer, make: Make) -> None:
    # W20
    fake_server.on("ollama", split(1), send(ollama_line({"content": "naïve 漢字 🧑🏽‍🚀"}) + ollama_done()))
    assert (await chunks(make(), options()))[0] == TextChunk("naïve 漢字 🧑🏽‍🚀")


async def test_a_second_turn_is_accepted_by_the_api(fake_server: FakeServer, make: Make) -> None:
    # PRV-58
    fake_server.respond([Reply(tool_calls=[("add", {"a": 1})]), Reply(text="done")])
    provider = make(context_window=8_192)
    first = await provider.generate(options(system("S"), user("Q"), tools=(ADD,)))
    history = (
        system("S"),
        user([TextPart("Q"), ImagePart(b"\x89PNG\r\n\x1a\n")]),
        assistant("", first.tool_calls),
        tool_result(first.tool_calls[0], ""),
        user("go on"),
    )
    call = options(
        *history, tools=(ADD,), response_format=ResponseFormat({"type": "object"}), settings={"max_tokens": 9, "seed": 1}
    )
    assert (await provider.generate(call)).text == "done"
    assert fake_server.bodies[1]["options"] == {"num_predict": 9, "seed": 1, "num_ctx": 8_192}


# ----------------------------------------------------------------------------------------------------------------- failures


async def test_a_model_that_was_not_pulled_says_how_to_pull_it(fake_server: FakeServer, make: Make) -> None:
    # W31: no retry
    fake_server.on("ollama", status(404, body={"error": 'model "qwen9" not found, try pulling it first'}))
    failure = await failed(make().generate(options(model="qwen9")))
    assert (failure.category, failure.retryable, failure.status) == ("unknown", False, 404)
    assert failure.message.startswith('model "qwen9" not found')
    assert failure.message.endswith("Run: ollama pull qwen9")


async def test_a_wrong_address_is_not_taken_for_a_missing_model(fake_server: FakeServer, make: Make) -> None:
    # W31
    fake_server.on("ollama", status(404, body="404 page not found"))
    failure = await failed(make().generate(options()))
    assert "pull" not in failure.message
    assert f"{fake_server.url}/api" in failure.message


async def test_a_closed_port_says_that_nothing_listens_there() -> None:
    # W31, LES-07
    async with FakeServer() as server:
        url = server.url
    provider = OllamaProvider(base_url=url)
    failure = await failed(provider.generate(options()))
    await provider.aclose()
    assert failure.retryable
    assert url.removeprefix("http://") in failure.message
    assert "connection refused" in failure.message
    assert "Is the server running there?" in failure.message


async def test_a_model_that_loads_slowly_is_waited_for(fake_server: FakeServer, make: Make) -> None:
    # W31: connecting is bounded by a limit of its own, the first byte is not
    limit_ms = 1_000  # long enough to connect on a busy machine
    fake_server.on("ollama", gate("loaded"), Reply(text="ok"))
    task = asyncio.create_task(make(connect_timeout_ms=limit_ms, idle_timeout_ms=100).generate(options()))
    await fake_server.reached("loaded")
    done, _ = await asyncio.wait({task}, timeout=1.2 * limit_ms / 1000)
    assert not done
    fake_server.release("loaded")
    assert (await task).text == "ok"


async def test_an_error_line_inside_a_stream_is_a_failure(fake_server: FakeServer, make: Make) -> None:
    # PRV-58b
    fake_server.on("ollama", ollama_line({"content": "par"}), ollama_error("model runner has unexpectedly stopped"))
    stream = make().stream(options())
    assert await anext(stream) == TextChunk("par")
    failure = await failed(anext(stream))
    assert (failure.message, failure.retryable) == ("model runner has unexpectedly stopped", True)


@pytest.mark.parametrize("ending", [[], [cut], [drop], [b"{broken\n"]], ids=["end", "cut", "reset", "broken-json"])
async def test_a_stream_that_breaks_off_is_a_retryable_failure(ending: list[Any], fake_server: FakeServer, make: Make) -> None:
    # PRV-58b
    fake_server.on("ollama", ollama_line({"content": "par"}), *ending)
    assert (await failed(chunks(make(), options()))).retryable


async def test_a_stream_without_done_is_truncated(fake_server: FakeServer, make: Make) -> None:
    # PRV-58b
    fake_server.on("ollama", ollama_line({"content": "par"}))
    with pytest.raises(TruncatedStreamError):
        await chunks(make(), options())


@pytest.mark.parametrize("body", [b"", b"<html>busy</html>", b"[]", b"{}", b'{"error": "no"}'])
async def test_a_200_without_an_answer_is_a_retryable_failure(body: bytes, fake_server: FakeServer, make: Make) -> None:
    fake_server.on("ollama", status(200, {}, body))
    assert (await failed(make().generate(options()))).retryable


async def test_an_overflow_is_known_by_its_text(fake_server: FakeServer, make: Make) -> None:
    # L08, LES-05
    text = "the request exceeds the available context size (4096 tokens), try increasing it"
    fake_server.on("ollama", status(400, body={"error": text}))
    assert (await failed(make().generate(options()))).category == "context-length-exceeded"


async def test_retry_after_of_a_hosted_ollama_is_kept(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("ollama", status(429, {"retry-after": "7"}, {"error": "too many requests"}))
    failure = await failed(chunks(make(), options()))
    assert (failure.category, failure.retry_after_ms) == ("rate-limit", 7_000)


async def test_a_prompt_that_was_cut_is_warned_of_once(
    fake_server: FakeServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    # L08
    fake_server.respond(Reply(text="?", usage=(2_048, 5)))
    provider, long = make(), options(user("word " * 6_000))
    await provider.generate(long)
    await chunks(provider, long)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "2048" in record.getMessage()
    assert "context_window=" in record.getMessage()


async def test_a_prompt_that_fits_is_not_warned_of(fake_server: FakeServer, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    # L08
    fake_server.respond(Reply(text="ok", usage=(5_000, 5)))
    await make().generate(options(user("word " * 6_000)))
    assert not caplog.records or all(record.levelno < logging.WARNING for record in caplog.records)


# ----------------------------------------------------------------------------------- cancellation, time limits, loops, keys


async def test_cancelling_a_call_closes_its_connection(fake_server: FakeServer, make: Make) -> None:
    # PRV-09
    fake_server.on("ollama", hold)
    task = asyncio.create_task(make().generate(options()))
    await fake_server.wait_for_requests(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake_server.wait_closed(fake_server.requests[0])


async def test_closing_a_stream_early_closes_its_connection(fake_server: FakeServer, make: Make) -> None:
    # PRV-09
    fake_server.on("ollama", ollama_line({"content": "one"}), hold)
    stream = make().stream(options())
    assert await anext(stream) == TextChunk("one")
    await stream.aclose()
    await fake_server.wait_closed(fake_server.requests[0])


async def test_a_silent_server_is_left_after_timeout_ms(fake_server: FakeServer, make: Make) -> None:
    # LES-02
    fake_server.on("ollama", hold)
    with pytest.raises(OperationTimeoutError):
        await make(timeout_ms=500).generate(options())
    await fake_server.wait_closed(fake_server.requests[0])


async def test_a_stream_that_stalls_is_left_after_idle_timeout_ms(fake_server: FakeServer, make: Make) -> None:
    # LES-02
    fake_server.on("ollama", ollama_line({"content": "one"}), hold)
    with pytest.raises(OperationTimeoutError):
        await chunks(make(idle_timeout_ms=50), options())
    await fake_server.wait_closed(fake_server.requests[0])


def test_a_provider_works_in_one_loop_after_another_and_travels() -> None:
    # PRV-14
    with FakeServer.in_thread() as server:
        server.respond(Reply(text="ok"))
        provider = OllamaProvider(base_url=server.url)
        assert [asyncio.run(provider.generate(options())).text for _ in range(2)] == ["ok", "ok"]
        copy = pickle.loads(pickle.dumps(provider))
        assert asyncio.run(copy.generate(options())).text == "ok"


async def test_the_key_of_a_hosted_ollama_is_sent_and_never_shown(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("ollama", status(401, body={"error": "bad key secret-key"}))
    failure = await failed(make(api_key="secret-key").generate(options()))
    assert fake_server.requests[0].headers["authorization"] == "Bearer secret-key"
    assert (failure.category, failure.message) == ("auth-failure", "bad key ***")


async def test_models_are_listed(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("/api/tags", status(200, body={"models": [{"name": "llama3:latest"}, {"name": "qwen3:8b"}]}))
    assert await make().get_models() == ["llama3:latest", "qwen3:8b"]


async def test_a_json_line_with_a_message_and_no_tools_is_enough(fake_server: FakeServer, make: Make) -> None:
    fake_server.on("ollama", status(200, body=ollama_answer({"content": "ok"})))
    result = await make().generate(options())
    assert (result.text, result.finish_reason, result.usage) == ("ok", "stop", None)
