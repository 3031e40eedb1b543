"""Retries, fallbacks and rate limits around the built-in providers, over real connections."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.errors import CompactedLLMProviderError, OperationTimeoutError, RateLimitError
from lousho_ray.limits.limiter import create_rate_limiter
from lousho_ray.messages import user
from lousho_ray.ports import FallbackNotice, FinishChunk, GenerateOptions, RetryNotice, ServedBy, TextChunk
from lousho_ray.providers.anthropic import AnthropicProvider
from lousho_ray.providers.base import HTTPProvider
from lousho_ray.providers.fallback import with_fallback
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.ollama import OllamaProvider
from lousho_ray.providers.openai import OpenAIProvider
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.fake_server import (
    DONE,
    FIN,
    TC,
    D,
    FakeServer,
    Reply,
    drop,
    eof,
    gate,
    hold,
    status,
)

KEY = "sk-test-0123456789abcdef"
REQUEST = GenerateOptions(messages=[user("hi")])
QUICK: dict[str, Any] = {"backoff": {"initial_ms": 1}, "jitter": False}
SSE = {"content-type": "text/event-stream"}


@pytest.fixture(params=["openai", "anthropic", "ollama"])
async def provider(request: pytest.FixtureRequest, fake_server: FakeServer) -> AsyncIterator[HTTPProvider]:
    made: HTTPProvider
    if request.param == "openai":
        made = OpenAIProvider(api="chat", api_key=KEY, base_url=fake_server.openai_url, default_model="gpt-4o-mini")
    elif request.param == "anthropic":
        made = AnthropicProvider(api_key=KEY, base_url=fake_server.url, default_model="claude-haiku-4-5")
    else:
        made = OllamaProvider(base_url=fake_server.url, default_model="llama3")
    yield made
    await made.aclose()


@pytest.fixture
async def chat(fake_server: FakeServer) -> AsyncIterator[OpenAIProvider]:
    made = OpenAIProvider(api="chat", api_key=KEY, base_url=fake_server.openai_url, default_model="gpt-4o-mini")
    yield made
    await made.aclose()


def route_of(provider: HTTPProvider) -> str:
    return {"openai": "chat", "anthropic": "messages", "ollama": "ollama"}[provider.name]


async def read(provider: Any, options: GenerateOptions = REQUEST) -> list[Any]:
    return [chunk async for chunk in provider.stream(options)]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_two_retries_are_at_most_three_requests(provider: HTTPProvider, code: int, fake_server: FakeServer) -> None:
    # PRV-12: the client's own retries are off
    for _ in range(9):
        fake_server.on(route_of(provider), status(code, {}, {"error": {"message": "no"}}))
    with pytest.raises(CompactedLLMProviderError) as caught:
        await with_retry(provider, max_retries=2, **QUICK).generate(REQUEST)
    assert len(fake_server.requests) == 3
    assert caught.value.compacted.status == code
    assert isinstance(caught.value, RateLimitError) == (code == 429)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.compacted == caught.value.compacted  # Q01


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
async def test_a_refused_request_is_sent_once(provider: HTTPProvider, code: int, fake_server: FakeServer) -> None:
    # L13
    fake_server.on(route_of(provider), status(code, {}, {"error": {"message": "no"}}))
    with pytest.raises(CompactedLLMProviderError):
        await with_retry(provider, **QUICK).generate(REQUEST)
    assert len(fake_server.requests) == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_dropped_connection_is_tried_again(provider: HTTPProvider, streamed: bool, fake_server: FakeServer) -> None:
    # PRV-66, L11
    fake_server.on(route_of(provider), drop)
    fake_server.respond("back")
    retried = with_retry(provider, **QUICK)
    text = text_of(await read(retried)) if streamed else (await retried.generate(REQUEST)).text
    assert text == "back"
    assert len(fake_server.requests) == 2


async def test_a_server_that_is_not_there_is_tried_as_often_as_asked(fake_server: FakeServer) -> None:
    # L13
    gone = OpenAIProvider(api="chat", api_key=KEY, base_url="http://127.0.0.1:9/v1", default_model="m")
    told: list[RetryNotice] = []
    with pytest.raises(CompactedLLMProviderError, match=r"127\.0\.0\.1"):
        await with_retry(gone, on_retry=told.append, **QUICK).generate(REQUEST)
    assert len(told) == 2
    await gone.aclose()


async def test_an_exhausted_quota_is_sent_once_and_the_fallback_answers(chat: OpenAIProvider, fake_server: FakeServer) -> None:
    # L04, PRV-D3
    fake_server.on("chat", status(429, {}, {"error": {"code": "insufficient_quota", "message": "no credit"}}))
    fake_server.respond("from ollama", route="ollama")
    second = OllamaProvider(base_url=fake_server.url, default_model="llama3")
    told: list[Any] = []
    options = GenerateOptions(messages=[user("hi")], notify=told.append)
    result = await with_fallback([with_retry(chat, **QUICK), with_retry(second, **QUICK)]).generate(options)
    assert result.text == "from ollama"
    assert result.served_by == ServedBy("ollama", "llama3")
    assert [request.route for request in fake_server.requests] == ["chat", "ollama"]
    assert [type(notice) for notice in told] == [FallbackNotice]
    await second.aclose()


async def test_text_that_is_out_is_never_repeated(chat: OpenAIProvider, fake_server: FakeServer) -> None:
    # L05
    fake_server.on("chat", status(200, SSE), D({"content": "Hello "}), gate("half"), drop)
    fake_server.respond("Hello world")
    seen: list[Any] = []

    async def read_on() -> None:
        async for chunk in with_fallback([with_retry(chat, **QUICK), chat]).stream(REQUEST):
            seen.append(chunk)
            fake_server.release("half")

    with pytest.raises(CompactedLLMProviderError):
        await read_on()
    assert text_of(seen) == "Hello "
    assert len(fake_server.requests) == 1


async def test_a_tool_call_that_was_cut_is_asked_for_again(chat: OpenAIProvider, fake_server: FakeServer) -> None:
    # L05: it had not left the provider, which passes calls on when the choice is complete
    fake_server.on("chat", status(200, SSE), TC(0, "a", "f", "{}"), drop)
    fake_server.on("chat", status(200, SSE), TC(0, "b", "g", "{}"), FIN("tool_calls"), DONE)
    chunks = await read(with_retry(chat, **QUICK))
    assert [getattr(chunk, "tool_call", None) and chunk.tool_call.name for chunk in chunks] == ["g", None]


async def test_an_error_in_mid_stream_ends_the_call_and_the_loop_stays_responsive(
    chat: OpenAIProvider, fake_server: FakeServer
) -> None:
    # L10
    error = b'data: {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "slow down"}}\n\n'
    fake_server.on("chat", status(200, SSE), D({"content": "Hel"}), error, hold)
    with pytest.raises(RateLimitError):
        await asyncio.wait_for(read(with_retry(chat, **QUICK)), 5)
    assert len(fake_server.requests) == 1


async def test_an_error_event_before_any_output_is_retried(chat: OpenAIProvider, fake_server: FakeServer) -> None:
    # L11
    fake_server.on("chat", status(200, SSE), b'data: {"error": {"message": "overloaded", "code": 502}}\n\n', eof)
    fake_server.respond("ok")
    assert text_of(await read(with_retry(chat, **QUICK))) == "ok"
    assert len(fake_server.requests) == 2


async def test_a_stalled_stream_is_closed_and_retried(chat: OpenAIProvider, fake_server: FakeServer) -> None:
    # PRV-65, L11
    fake_server.on("chat", status(200, SSE), hold)
    fake_server.respond("ok")
    assert text_of(await read(with_retry(chat, timeout_ms=200, **QUICK))) == "ok"
    await fake_server.wait_closed(fake_server.requests[0])
    assert fake_server.requests[0].client_closed


async def test_an_idle_stream_is_closed_with_a_timeout(chat: OpenAIProvider, fake_server: FakeServer) -> None:
    # PRV-65, ERR-26
    fake_server.on("chat", status(200, SSE), D({"content": "Hel"}), hold)
    with pytest.raises(OperationTimeoutError) as caught:
        await read(with_retry(chat, idle_timeout_ms=200, **QUICK))
    assert caught.value.timeout_ms == 200
    await fake_server.wait_closed(fake_server.requests[0])
    assert len(fake_server.requests) == 1


async def test_a_retry_after_longer_than_the_cap_is_passed_on(provider: HTTPProvider, fake_server: FakeServer) -> None:
    # L02, L14
    fake_server.on(route_of(provider), status(429, {"retry-after": "411000"}, {"error": {"message": "later"}}))
    with pytest.raises(RateLimitError) as caught:
        await with_retry(provider, **QUICK).generate(REQUEST)
    assert caught.value.compacted.retry_after_ms == 411_000_000
    assert len(fake_server.requests) == 1


async def test_the_limiter_holds_calls_back_until_streams_end(provider: HTTPProvider, fake_server: FakeServer) -> None:
    # RL-16
    fake_server.respond(Reply(text="one two three", usage=(5, 3)))
    limiter = create_rate_limiter({"max_concurrent": 2})
    limited = with_rate_limit(with_retry(provider), limiter)
    results = await asyncio.gather(*(read(limited) for _ in range(6)))
    assert all(isinstance(chunks[-1], FinishChunk) for chunks in results)
    assert fake_server.max_concurrent <= 2
    assert (await limiter.stats()).tokens_in_window == 6 * 8


async def test_a_cancelled_stream_closes_its_connection_and_frees_its_slot(provider: HTTPProvider, fake_server: FakeServer) -> None:
    # PRV-09, RL-22
    fake_server.on(route_of(provider), status(200, SSE), gate("never"), hold)
    limiter = create_rate_limiter({"max_concurrent": 1})
    task = asyncio.create_task(read(with_rate_limit(with_fallback([with_retry(provider)]), limiter)))
    await fake_server.reached("never")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake_server.wait_closed(fake_server.requests[0])
    stats = await limiter.stats()
    assert (stats.running, stats.requests_in_window) == (0, 1)
    assert len(fake_server.requests) == 1


async def test_connections_are_used_again_under_all_wrappers(provider: HTTPProvider, fake_server: FakeServer) -> None:
    # The finish is not the end of the body: a stream closed at the finish would cost a new connection each call.
    fake_server.respond("hello")
    wrapped = with_rate_limit(with_fallback([with_retry(provider)]), {"max_concurrent": 1})
    for _ in range(5):
        await read(wrapped)
    assert len({request.connection for request in fake_server.requests}) == 1
