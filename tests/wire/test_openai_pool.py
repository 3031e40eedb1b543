"""Calls whose head was made once are what the vendor's client would have sent, and end as its own would."""

from __future__ import annotations

import gzip
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions
from lousho_ray.providers.compatible import OpenAICompatibleProvider
from lousho_ray.providers.failures import classify
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, completion, status

ASK = GenerateOptions(messages=(user("hi"),))
YES = completion({"content": "yes"})


@pytest.fixture
async def provider(fake_server: FakeServer) -> AsyncIterator[OpenAICompatibleProvider]:
    made = OpenAICompatibleProvider(
        base_url=f"{fake_server.compatible_url}?version=2&tag=a%20b", api_key="k", default_model="m", headers={"X-Own": "1"}
    )
    yield made
    await made.aclose()


@pytest.fixture
def by_the_client() -> Iterator[Callable[[], None]]:
    """Makes the client send by itself: it does while its calls are logged."""
    logger = logging.getLogger("httpx2")
    before = logger.level
    yield lambda: logger.setLevel(logging.INFO)
    logger.setLevel(before)


async def test_a_request_is_what_the_client_sends(
    fake_server: FakeServer, provider: OpenAICompatibleProvider, by_the_client: Callable[[], None]
) -> None:
    # PRV-11, PRV-15
    fake_server.respond("yes")
    for _ in range(2):
        await provider.generate(ASK)
        _ = [chunk async for chunk in provider.stream(ASK)]
    by_the_client()
    await provider.generate(ASK)
    _ = [chunk async for chunk in provider.stream(ASK)]
    whole, streamed = ([_told(request) for request in fake_server.requests[start::2]] for start in (0, 1))
    assert whole[0] == whole[1] == whole[2]
    assert streamed[0] == streamed[1] == streamed[2]
    assert whole[0][0].endswith("?version=2&tag=a+b")


def _told(request: RecordedRequest) -> tuple[Any, ...]:
    return request.path, request.headers, request.raw


async def test_its_calls_are_logged_when_somebody_listens(
    fake_server: FakeServer, provider: OpenAICompatibleProvider, by_the_client: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    fake_server.respond("yes")
    await provider.generate(ASK)
    by_the_client()
    await provider.generate(ASK)
    assert sum("HTTP Request: POST" in record.getMessage() for record in caplog.records) == 1


async def test_redirects_are_followed(fake_server: FakeServer, provider: OpenAICompatibleProvider) -> None:
    fake_server.respond("yes")
    await provider.generate(ASK)
    moved = status(307, {"Location": f"{fake_server.compatible_url}/moved/chat/completions"}, b"")
    fake_server.on("chat", moved)
    fake_server.on("chat", moved)
    assert (await provider.generate(ASK)).text == "yes"
    assert fake_server.requests[-1].path.endswith("/moved/chat/completions")
    assert (await provider.generate(ASK)).text == "yes"


async def test_cookies_come_back(fake_server: FakeServer, provider: OpenAICompatibleProvider) -> None:
    fake_server.respond("yes")
    fake_server.on("chat", status(200, {"Set-Cookie": "route=a; Path=/", "Content-Type": "application/json"}, json.dumps(YES)))
    await provider.generate(ASK)
    for _ in range(2):
        await provider.generate(ASK)
    assert [request.headers.get("cookie") for request in fake_server.requests] == [None, "route=a", "route=a"]


async def test_packed_bodies_are_unpacked(fake_server: FakeServer, provider: OpenAICompatibleProvider) -> None:
    packed = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    fake_server.on("chat", status(200, packed, gzip.compress(json.dumps(YES).encode())))
    fake_server.on("chat", status(429, {**packed, "Retry-After": "3"}, gzip.compress(b'{"error": {"message": "slowly"}}')))
    assert (await provider.generate(ASK)).text == "yes"
    with pytest.raises(openai.RateLimitError) as caught:
        await provider.generate(ASK)
    judged = classify(caught.value)
    assert (judged.message, judged.status, judged.retry_after_ms) == ("slowly", 429, 3000)


async def test_no_form_of_a_body_is_offered_that_the_session_may_not_read(fake_server: FakeServer) -> None:
    fake_server.respond("yes")
    offers = {"Accept-Encoding": "gzip, deflate, br, zstd"}
    provider = OpenAICompatibleProvider(base_url=fake_server.compatible_url, api_key="k", default_model="m", headers=offers)
    await provider.generate(ASK)
    await provider.aclose()
    assert fake_server.requests[0].headers["accept-encoding"] == "gzip, deflate"


async def test_calls_go_through_the_proxy_of_the_environment(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # The server plays the proxy: it is asked for a whole URL of another host.
    monkeypatch.setenv("HTTP_PROXY", fake_server.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    fake_server.respond("yes")
    provider = OpenAICompatibleProvider(base_url="http://model.test/v1", api_key="k", default_model="m")
    try:
        for _ in range(2):
            assert (await provider.generate(ASK)).text == "yes"
    finally:
        await provider.aclose()
    assert [request.headers["host"] for request in fake_server.requests] == ["model.test", "model.test"]


async def test_certificates_are_read_once_and_again_when_others_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lousho_ray.providers.openai_pool import Pool

    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with Pool() as first, Pool() as second:
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
        async with Pool() as third:
            own = [pool.session_for(httpx2.URL("https://a.test")) for pool in (first, second, third)]
            contexts = [session.connector._ssl for session in own if session is not None]  # type: ignore[union-attr]
            assert contexts[0] is contexts[1]
            assert contexts[2] is not contexts[0]
            assert all(context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname for context in contexts)
