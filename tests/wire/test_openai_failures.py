"""The OpenAI family against a server that stalls, drops and fails: limits, closing, event loops, errors."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.errors import OperationTimeoutError
from lousho_ray.messages import Message, ToolCall, user
from lousho_ray.ports import (
    FinishChunk,
    GenerateOptions,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers.compatible import OpenAICompatibleProvider
from lousho_ray.providers.failures import ErrorBodyError, MalformedReplyError, TruncatedStreamError, classify
from lousho_ray.providers.openai import OpenAIProvider
from lousho_ray.testing.fake_server import DONE, FIN, TC, D, FakeServer, U, cut, drop, gate, hold, split, sse, status


def call(*messages: Message, **options: Any) -> GenerateOptions:
    return GenerateOptions(messages=messages or (user("hi"),), **options)


async def chunks_of(provider: Any, options: GenerateOptions) -> list[Any]:
    return [chunk async for chunk in provider.stream(options)]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))


def stream_head() -> Any:
    return status(200, {"content-type": "text/event-stream"})


@pytest.fixture
async def chat(fake_server: FakeServer) -> AsyncIterator[OpenAIProvider]:
    provider = OpenAIProvider(
        api="chat", api_key="sk-test-0123456789", base_url=fake_server.openai_url, default_model="gpt-4o-mini"
    )
    yield provider
    await provider.aclose()


@pytest.fixture
async def compatible(fake_server: FakeServer) -> AsyncIterator[OpenAICompatibleProvider]:
    provider = OpenAICompatibleProvider(base_url=fake_server.compatible_url, default_model="llama")
    yield provider
    await provider.aclose()


# -------------------------------------------------------------------------------------------------------- limits, closing


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_closing_the_iterator_early_closes_the_connection(fake_server: FakeServer, api: Any) -> None:
    # PRV-09
    provider = OpenAIProvider(api=api, api_key="k" * 8, base_url=fake_server.openai_url)
    first = D({"content": "x"}) if api == "chat" else sse({"type": "response.output_text.delta", "delta": "x"})
    fake_server.on("chat" if api == "chat" else "responses", stream_head(), first, hold)
    stream = provider.stream(call())
    assert await anext(stream) == TextChunk("x")
    await stream.aclose()
    await fake_server.wait_closed(fake_server.requests[0])
    await provider.aclose()


async def test_cancelling_the_task_closes_the_connection(fake_server: FakeServer, chat: OpenAIProvider) -> None:
    # PRV-09
    for streamed in (False, True):
        fake_server.on("chat", gate("never"), hold)
        task = asyncio.ensure_future(chunks_of(chat, call()) if streamed else chat.generate(call()))
        await fake_server.reached("never", 1 + streamed)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await fake_server.wait_closed(fake_server.requests[-1])


async def test_every_wait_has_a_limit(fake_server: FakeServer) -> None:
    # LES-02, field case W23 (a)
    def limited(**limits: float) -> OpenAICompatibleProvider:
        return OpenAICompatibleProvider(base_url=fake_server.compatible_url, default_model="m", **limits)

    cases = [
        (limited(timeout_ms=50), [hold], "first event"),
        (limited(timeout_ms=50), [stream_head(), hold], "first event"),
        (limited(idle_timeout_ms=50), [stream_head(), D({"content": "x"}), hold], "data after the last event"),
        (limited(progress_timeout_ms=50), [stream_head(), D({"content": "x"}), b": ping\n\n", hold], "event after the last one"),
    ]
    for provider, steps, waited_for in cases:
        fake_server.on("chat", *steps)
        with pytest.raises(OperationTimeoutError) as caught:
            await chunks_of(provider, call())
        assert caught.value.operation == waited_for
        assert classify(caught.value).category == "timeout"
        await fake_server.wait_closed(fake_server.requests[-1])
        await provider.aclose()
    fake_server.on("chat", hold)
    whole = limited(timeout_ms=50)
    with pytest.raises(OperationTimeoutError, match="no reply"):
        await whole.generate(call())
    await whole.aclose()


async def test_keep_alives_alone_do_not_end_a_stream_that_makes_progress_later(fake_server: FakeServer) -> None:
    # Field case W23 (b): comments are signs of life.
    provider = OpenAICompatibleProvider(base_url=fake_server.compatible_url, default_model="m", idle_timeout_ms=1000)
    steps: list[Any] = [stream_head(), D({"content": "a"})]
    for _ in range(3):
        steps += [gate("slow"), b": ping\n\n"]
    fake_server.on("chat", *steps, D({"content": "b"}), FIN("stop"), DONE)
    task = asyncio.ensure_future(chunks_of(provider, call()))
    loop = asyncio.get_running_loop()
    for n in range(1, 4):
        await fake_server.reached("slow", n)
        release_at = loop.create_future()
        loop.call_later(0.4, release_at.set_result, None)
        await release_at
        fake_server.release("slow")
    assert text_of(await task) == "ab"
    await provider.aclose()


async def test_a_finished_stream_that_holds_its_connection_returns_at_once(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider
) -> None:
    # Field case W16 (5)
    fake_server.on("chat", stream_head(), D({"content": "x"}), FIN("stop"), DONE, hold)
    chunks = await asyncio.wait_for(chunks_of(compatible, call()), 5)
    assert chunks[-1].finish_reason == "stop"


async def test_a_whole_stream_leaves_its_connection_for_the_next_call(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider
) -> None:
    fake_server.respond("ok")
    await chunks_of(compatible, call())
    await chunks_of(compatible, call())
    await compatible.generate(call())
    assert len({request.connection for request in fake_server.requests}) == 1


# ---------------------------------------------------------------------------------------------------------- loops, processes


def test_one_provider_serves_several_event_loops_one_after_another() -> None:
    # PRV-14, field case W29
    with FakeServer.in_thread() as server:
        server.respond("ok")
        provider = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="m")
        for _ in range(2):
            assert asyncio.run(provider.generate(call())).text == "ok"
        assert [chunk for chunk in asyncio.run(chunks_of(provider, call())) if isinstance(chunk, TextChunk)]


def test_a_provider_travels_as_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-D2, PRV-14
    monkeypatch.setenv("OPENAI_API_KEY", "sk-here-0123456789")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://eu.api.openai.com/v1")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-here")
    provider = OpenAIProvider(default_model="gpt-5", api="responses", timeout_ms=5, headers={"X": "1"}, context_window=8192)
    provider.accepts_file_parts = False
    packed = pickle.dumps(provider)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID"):
        monkeypatch.setenv(name, "elsewhere")
    there = pickle.loads(packed)
    assert there.configuration() == provider.configuration()
    assert there.api_key == "sk-here-0123456789"
    assert there.headers["OpenAI-Organization"] == "org-here"
    assert there.accepts_file_parts is False
    assert "sk-here" not in repr(provider)


# ------------------------------------------------------------------------------------------------------------------ errors


async def test_a_key_in_an_error_body_is_masked(fake_server: FakeServer) -> None:
    # Field case X01, ERR-07
    key = "plainsecretvalue99"
    provider = OpenAIProvider(api="chat", api_key=key, base_url=fake_server.openai_url, headers={"X-Api-Key": "othersecret77"})
    body = {"error": {"message": f"Incorrect API key provided: {key} / othersecret77", "type": "authentication_error"}}
    fake_server.on("chat", status(401, body=body))
    with pytest.raises(Exception, match="Incorrect API key") as caught:
        await provider.generate(call())
    texts = f"{caught.value} {caught.value!r} {caught.value.__dict__.get('body')} {classify(caught.value)}"
    assert key not in texts
    assert "othersecret77" not in texts
    assert classify(caught.value).category == "auth-failure"
    await provider.aclose()


async def test_an_unreachable_server_is_named_with_the_reason() -> None:
    # LES-07
    provider = OpenAICompatibleProvider(base_url="http://127.0.0.1:9/v1", default_model="m")
    with pytest.raises(Exception) as caught:
        await provider.generate(call())
    failure = classify(caught.value)
    assert failure.message == "Cannot reach 127.0.0.1:9: connection refused. Is the server running there?"
    assert (failure.category, failure.retryable) == ("unknown", True)
    await provider.aclose()


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([status(200, body={"error": {"message": "boom", "code": 502}})], ErrorBodyError),  # PRV-36
        ([status(200, {"content-type": "text/html"}, "<html><b>Gateway</b> down</html>")], MalformedReplyError),
        ([status(200, body="")], MalformedReplyError),
        ([status(200, body={"choices": []})], MalformedReplyError),
        ([status(200, body=b"[]")], MalformedReplyError),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_200_that_is_no_reply_is_an_error_that_may_be_retried(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider, steps: list[Any], error: type[Exception], streamed: bool
) -> None:
    fake_server.on("chat", *steps)
    with pytest.raises((error, TruncatedStreamError) if streamed else error) as caught:
        await (chunks_of(compatible, call()) if streamed else compatible.generate(call()))
    assert classify(caught.value).retryable
    assert caught.value.provider == "openai-compatible"  # type: ignore[attr-defined]


@pytest.mark.parametrize("ending", [drop, cut])
async def test_a_connection_lost_in_the_middle_is_an_error_that_may_be_retried(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider, ending: Any
) -> None:
    # PRV-55b, ERR-23
    fake_server.on("chat", stream_head(), D({"content": "x"}), ending)
    stream = compatible.stream(call())
    assert await anext(stream) == TextChunk("x")
    with pytest.raises(Exception) as caught:
        await anext(stream)
    failure = classify(caught.value)
    assert (failure.category, failure.retryable) == ("unknown", True)


async def test_a_connection_reset_before_the_answer_is_no_timeout(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider
) -> None:
    fake_server.on("chat", drop)
    with pytest.raises(Exception) as caught:
        await compatible.generate(call())
    failure = classify(caught.value)
    assert (failure.category, failure.retryable) == ("unknown", True)
    assert failure.message == f"The connection to 127.0.0.1:{fake_server.port} was closed before the answer was complete."


async def test_models_are_listed(fake_server: FakeServer, compatible: OpenAICompatibleProvider) -> None:
    fake_server.on("/compatible/v1/models", status(200, body={"object": "list", "data": [{"id": "a"}, {"id": "b"}]}))
    assert await compatible.get_models() == ["a", "b"]


async def test_a_stream_is_the_same_when_every_byte_comes_alone(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider
) -> None:
    # Field cases W19, W20
    words = "naïve 漢字 🧑🏽‍🚀"
    call_parts = [TC(0, "a", "f", '{"x"'), TC(0, None, None, ":1}"), FIN("tool_calls")]
    parts = [b": note\r\n\r\n", D({"content": words}), *call_parts, U(5, 2)]
    fake_server.on("chat", stream_head(), split(1), b"".join(parts).replace(b"\n\n", b"\r\n\r\n"), DONE)
    chunks = await chunks_of(compatible, call())
    assert text_of(chunks) == words
    assert [chunk.tool_call for chunk in chunks if isinstance(chunk, ToolCallChunk)] == [ToolCall("a", "f", '{"x":1}')]
    assert chunks[-1].usage.total_tokens == 7


async def test_text_that_came_before_an_error_is_delivered_first(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider
) -> None:
    # Field case L05: whoever retries must know that something was shown.
    fake_server.on("chat", stream_head(), D({"content": "Hello "}) + sse({"error": {"message": "late", "code": 500}}))
    stream = compatible.stream(call())
    assert await anext(stream) == TextChunk("Hello ")
    with pytest.raises(ErrorBodyError, match="late"):
        await anext(stream)


@pytest.mark.parametrize("ending", [drop, cut])
async def test_an_answer_that_is_whole_survives_a_broken_end(
    fake_server: FakeServer, compatible: OpenAICompatibleProvider, ending: Any
) -> None:
    fake_server.on("chat", stream_head(), D({"content": "x"}), FIN("stop"), gate("end"), ending)
    stream = compatible.stream(call())
    assert await anext(stream) == TextChunk("x")
    fake_server.release("end")
    assert [type(chunk) for chunk in [chunk async for chunk in stream]] == [FinishChunk]


async def test_bodies_are_logged_at_debug_only_and_without_the_key(
    fake_server: FakeServer, chat: OpenAIProvider, caplog: pytest.LogCaptureFixture
) -> None:
    # PRV-D12
    fake_server.respond("a reply with sk-test-0123456789")
    await chat.generate(call(user("a question")))
    assert not [record for record in caplog.records if record.name == "lousho_ray.http"]
    with caplog.at_level("DEBUG", "lousho_ray.http"):
        await chat.generate(call(user("a question")))
    logged = [record.getMessage() for record in caplog.records if record.name == "lousho_ray.http"]
    assert "a question" in logged[0]
    assert "a reply" in logged[1]
    assert "sk-test" not in "".join(logged)
