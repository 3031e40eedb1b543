"""Calls whose head was made once are what the vendor's client would have sent, and end as its own would."""

from __future__ import annotations

import gzip
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import anthropic
import httpx2
import openai
import pytest

from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions
from lousho_ray.providers import direct_calls
from lousho_ray.providers.anthropic import AnthropicProvider
from lousho_ray.providers.base import HTTPProvider
from lousho_ray.providers.compatible import OpenAICompatibleProvider
from lousho_ray.providers.failures import classify
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, anthropic_message, completion, status

ASK = GenerateOptions(messages=(user("hi"),))


class Vendor(NamedTuple):
    """A vendor's client, its provider, and the server's side of one call."""

    client: ModuleType
    provider: type[HTTPProvider]
    api: str
    path: str
    yes: Any

    def base(self, server: FakeServer) -> str:
        return server.compatible_url if self.api == "chat" else server.url


OPENAI = Vendor(openai, OpenAICompatibleProvider, "chat", "/chat/completions", completion({"content": "yes"}))
ANTHROPIC = Vendor(anthropic, AnthropicProvider, "messages", "/v1/messages", anthropic_message([{"type": "text", "text": "yes"}]))


@pytest.fixture(params=[OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def vendor(request: pytest.FixtureRequest) -> Vendor:
    given: Vendor = request.param
    return given


@pytest.fixture
async def provider(fake_server: FakeServer, vendor: Vendor) -> AsyncIterator[HTTPProvider]:
    url = f"{vendor.base(fake_server)}?version=2&tag=a%20b"
    made = vendor.provider(base_url=url, api_key="k", default_model="m", headers={"X-Own": "1"})
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
    fake_server: FakeServer, provider: HTTPProvider, by_the_client: Callable[[], None]
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
    assert whole[0][0].replace("+", "%20").endswith("?version=2&tag=a%20b")


def _told(request: RecordedRequest) -> tuple[Any, ...]:
    return request.path, request.headers, request.raw


async def test_its_calls_are_logged_when_somebody_listens(
    fake_server: FakeServer, provider: HTTPProvider, by_the_client: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    fake_server.respond("yes")
    await provider.generate(ASK)
    by_the_client()
    await provider.generate(ASK)
    assert sum("HTTP Request: POST" in record.getMessage() for record in caplog.records) == 1


async def test_redirects_are_followed(fake_server: FakeServer, provider: HTTPProvider, vendor: Vendor) -> None:
    fake_server.respond("yes")
    await provider.generate(ASK)
    elsewhere = f"{vendor.base(fake_server).replace(fake_server.url, fake_server.url + '/moved')}{vendor.path}"
    moved = status(307, {"Location": elsewhere}, b"")
    fake_server.on(vendor.api, moved)
    fake_server.on(vendor.api, moved)
    assert (await provider.generate(ASK)).text == "yes"
    assert fake_server.requests[-1].path.startswith("/moved/")
    assert (await provider.generate(ASK)).text == "yes"


async def test_cookies_come_back(fake_server: FakeServer, provider: HTTPProvider, vendor: Vendor) -> None:
    fake_server.respond("yes")
    headers = {"Set-Cookie": "route=a; Path=/", "Content-Type": "application/json"}
    fake_server.on(vendor.api, status(200, headers, json.dumps(vendor.yes)))
    await provider.generate(ASK)
    for _ in range(2):
        await provider.generate(ASK)
    assert [request.headers.get("cookie") for request in fake_server.requests] == [None, "route=a", "route=a"]


async def test_packed_bodies_are_unpacked(fake_server: FakeServer, provider: HTTPProvider, vendor: Vendor) -> None:
    packed = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    fake_server.on(vendor.api, status(200, packed, gzip.compress(json.dumps(vendor.yes).encode())))
    fake_server.on(vendor.api, status(429, {**packed, "Retry-After": "3"}, gzip.compress(b'{"error": {"message": "slowly"}}')))
    assert (await provider.generate(ASK)).text == "yes"
    with pytest.raises(vendor.client.RateLimitError) as caught:
        await provider.generate(ASK)
    judged = classify(caught.value)
    assert (judged.message, judged.status, judged.retry_after_ms) == ("slowly", 429, 3000)


async def test_no_form_of_a_body_is_offered_that_the_session_may_not_read(fake_server: FakeServer, vendor: Vendor) -> None:
    fake_server.respond("yes")
    offers = {"Accept-Encoding": "gzip, deflate, br, zstd"}
    provider = vendor.provider(base_url=vendor.base(fake_server), api_key="k", default_model="m", headers=offers)
    await provider.generate(ASK)
    await provider.aclose()
    assert fake_server.requests[0].headers["accept-encoding"] == "gzip, deflate"


async def test_calls_go_through_the_proxy_of_the_environment(
    fake_server: FakeServer, vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server plays the proxy: it is asked for a whole URL of another host.
    monkeypatch.setenv("HTTP_PROXY", fake_server.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    fake_server.respond("yes")
    base = "http://model.test/v1" if vendor is OPENAI else "http://model.test"
    provider = vendor.provider(base_url=base, api_key="k", default_model="m")
    try:
        for _ in range(2):
            assert (await provider.generate(ASK)).text == "yes"
    finally:
        await provider.aclose()
    assert [request.headers["host"] for request in fake_server.requests] == ["model.test", "model.test"]


async def test_certificates_are_read_once_and_again_when_others_are_named(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with (first := _pool(vendor)), (second := _pool(vendor)):
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
        async with (third := _pool(vendor)):
            own = [direct_calls.session_for(pool, httpx2.URL("https://a.test")) for pool in (first, second, third)]
            contexts = [session.connector._ssl for session in own if session is not None]  # type: ignore[union-attr]
            assert contexts[0] is contexts[1]
            assert contexts[2] is not contexts[0]
            assert all(context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname for context in contexts)


def _pool(vendor: Vendor) -> httpx2.AsyncClient:
    return direct_calls.pool(vendor.client, httpx2.Timeout(None))
