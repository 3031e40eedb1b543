"""Keys show nowhere: not in events, errors, log records, results, representations or stored sessions (X01)."""

from __future__ import annotations

import base64
import logging
import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import SqliteStore, define_tool, with_fallback, with_retry
from lousho_ray.testing.fake_server import (
    D,
    FakeServer,
    RecordedRequest,
    Reply,
    cut,
    eof,
    error_event,
    message_start,
    ollama_error,
    response_error,
    sse,
    status,
)
from tests.wire.matrix_support import SSE, Played, Route, Toolbox, an_agent, play, provider_for, wire_route

KEY = "sk-canary-0123456789abcdef"
ODD_KEY = "canary.odd/key+value=="
PASSWORD = "canary p@ss"
QUERY = "canary-query-42"
HEADERS = {"apikey": "canary-header-1", "X-Auth-Token": "canary-header-2", "Cookie": "session=canary-cookie"}
USERINFO = "user:canary%20p%40ss"
BASIC = base64.b64encode(f"user:{PASSWORD}".encode()).decode()

ROUTES: tuple[Route, ...] = ("chat", "responses", "messages", "ollama", "compatible")


def all_secrets(request: RecordedRequest | None) -> str:
    """What a careless server or gateway repeats: the key, the headers and the URL of the request."""
    told = "" if request is None else f"{request.headers} {request.path}"
    return f"bad key {KEY} {ODD_KEY} {PASSWORD} {QUERY} {BASIC} {USERINFO} {HEADERS} {told}"


def canaries(text: str) -> list[str]:
    """The secrets in a text, in whatever form."""
    wanted = [KEY, ODD_KEY, PASSWORD, QUERY, *HEADERS.values(), USERINFO.partition(":")[2], BASIC, "canary"]
    return [secret for secret in wanted if secret in text]


def provider_with_secrets(route: Route, server: FakeServer, key: str) -> Any:
    base = {
        "chat": server.openai_url,
        "responses": server.openai_url,
        "messages": server.url,
        "ollama": server.url,
        "compatible": server.compatible_url,
    }[route]
    base = base.replace("http://", f"http://{USERINFO}@") + f"?code={QUERY}"
    return provider_for(route, server, api_key=key, base_url=base, headers=HEADERS)


async def seen(agent: Any, target: Any, played: Played, caplog: pytest.LogCaptureFixture, store: Path | None = None) -> str:
    """Everything that can be seen of a run."""
    told = [repr(event) + str(event.to_dict()) for event in played.events]
    told += [record.getMessage() + str(record.exc_text or "") + str(record.args) for record in caplog.records]
    told += [
        repr(agent),
        repr(target),
        repr(agent.definition.provider),
        repr(played.result),
        repr(played.result and played.result.messages),
    ]
    if played.error is not None:
        error = played.error
        told += [str(error), repr(error), str(error.__dict__), "".join(traceback.format_exception(error))]
        told += [str(pickle.loads(pickle.dumps(error)).__dict__), repr(pickle.loads(pickle.dumps(error)).__cause__)]
        cause = error.__cause__
        while cause is not None:
            told += [str(cause), repr(cause), str(getattr(cause, "body", "")), str(getattr(cause, "message", ""))]
            cause = cause.__cause__ or cause.__context__
    if store is not None:
        told += [path.read_bytes().decode("utf-8", "replace") for path in store.parent.iterdir()]
    return "\n".join(told)


def failures(route: Route) -> dict[str, Any]:
    """Steps of a server that repeats what it was sent."""
    text = all_secrets(None)
    inside = {
        "messages": [message_start(), error_event("authentication_error", text), eof],
        "responses": [response_error("invalid_prompt", text), eof],
        "ollama": [ollama_error(text), eof],
    }.get(wire_route(route), [D({"role": "assistant"}), sse({"error": {"message": text, "code": 400}}), eof])
    return {
        "401": None,
        "500": 500,
        "html": [status(502, {"content-type": "text/html"}, f"<html>{text}</html>")],
        "not-json": [status(200, {"content-type": "application/json"}, f"oops {text}")],
        "error-under-200": [status(200, body={"error": {"message": text}})],
        "stream-error": inside,
        "broken-event": [status(200, SSE), f"data: {{{text}\n\n", eof],
        "cut": [status(200, SSE), cut],
    }


def listen(caplog: pytest.LogCaptureFixture, *, to_clients: bool) -> None:
    """Keeps all that is logged. A client whose calls nobody logs sends them by a shorter way."""
    caplog.set_level(logging.DEBUG)
    if not to_clients:
        for name in ("httpx2", "openai"):
            caplog.set_level(logging.WARNING, name)


@pytest.mark.parametrize(
    ("key", "clients"), [(KEY, True), (ODD_KEY, True), (KEY, False)], ids=["usual-key", "odd-key", "clients-unheard"]
)
@pytest.mark.parametrize("kind", list(failures("chat")))
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_no_secret_shows_when_a_call_fails(
    fake_server: FakeServer,
    route: Route,
    kind: str,
    key: str,
    clients: bool,
    streamed: bool,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    # X01, TEST-09
    listen(caplog, to_clients=clients)
    if kind in ("stream-error", "broken-event") and not streamed:
        kind = "error-under-200"
    steps = failures(route)[kind]

    def answer(request: RecordedRequest) -> Any:
        code = {"401": 401, "500": 500}.get(kind)
        return steps if code is None else [status(code, body={"error": {"message": all_secrets(request), "type": "x"}})]

    fake_server.respond(answer)
    provider = provider_with_secrets(route, fake_server, key)
    path = tmp_path / "s.db"
    async with SqliteStore(path) as store, an_agent(provider, Toolbox().tools, store=store) as agent:
        session = agent.session("s")
        played = await play(session, "first", streamed=streamed)
        assert played.error is not None, played.result
        sent = fake_server.requests[0]
        assert sent.headers["apikey"] == HEADERS["apikey"]  # they are sent, only not shown
        assert sent.path.endswith(f"?code={QUERY}")
        everything = await seen(agent, session, played, caplog, path)
    # The other key and the form of the credentials that this provider was not given are nobody's secret here.
    known = {secret for secret in canaries(everything) if secret not in ("canary", *({KEY, ODD_KEY} - {key}))}
    assert known == set()


@pytest.mark.parametrize(
    "url", ["http://user:canary%20p%40ss@127.0.0.1:9/v1?code=canary-query-42", "http://canary-user-key@127.0.0.1:9/v1"]
)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("clients", [True, False], ids=["clients-heard", "clients-unheard"])
async def test_no_secret_shows_when_nothing_listens(
    route: Route, url: str, clients: bool, fake_server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    # X01, TEST-09: connection errors name the URL
    listen(caplog, to_clients=clients)
    provider = provider_for(route, fake_server, base_url=url, api_key=KEY, headers=HEADERS)
    async with an_agent(provider, ()) as agent:
        played = await play(agent, "first", streamed=True)
        assert played.error is not None
        assert canaries(await seen(agent, agent, played, caplog)) == []


@pytest.mark.parametrize("route", ROUTES)
async def test_no_secret_shows_when_all_goes_well(
    fake_server: FakeServer, route: Route, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    # X01, TEST-09
    caplog.set_level(logging.DEBUG)
    fake_server.respond([Reply(tool_calls=[("f", {"x": 1})]), Reply("done")])
    path = tmp_path / "s.db"
    provider = provider_with_secrets(route, fake_server, KEY)
    async with SqliteStore(path) as store, an_agent(provider, Toolbox().tools, store=store) as agent:
        session = agent.session("s")
        played = await play(session, "first", streamed=True)
        assert played.result is not None, played.error
        assert canaries(await seen(agent, session, played, caplog, path)) == []


async def test_no_secret_shows_through_wrappers(fake_server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    # X01, TEST-09: notices, notes of failed providers and the final error
    caplog.set_level(logging.DEBUG)
    fake_server.respond(lambda request: [status(500, body={"error": {"message": all_secrets(request)}})])
    chat, ollama = (provider_with_secrets(route, fake_server, KEY) for route in ("chat", "ollama"))
    chain = with_fallback([with_retry(chat, max_retries=1, backoff={"initial_ms": 1}), with_retry(ollama, max_retries=0)])
    async with an_agent(chain, (), retry=False) as agent:  # type: ignore[arg-type]
        played = await play(agent, "first", streamed=True)
        assert len(played.of("provider.retry")) == len(played.of("provider.fallback")) == 1
        everything = await seen(agent, agent, played, caplog)
        everything += str(getattr(played.error, "__notes__", ""))
    await chat.aclose()
    await ollama.aclose()
    assert {secret for secret in canaries(everything) if secret not in ("canary", ODD_KEY)} == set()


async def test_an_error_that_a_tool_raises_about_its_environment_is_masked(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # X01: the model and the transcript read it
    monkeypatch.setenv("SOME_API_KEY", KEY)

    async def fail() -> Any:
        raise RuntimeError(str(dict(os.environ)))

    broken = define_tool(name="broken", description="Fails.", execute=lambda args: fail())
    fake_server.respond([Reply(tool_calls=[("broken", {})]), Reply("done")])
    async with an_agent(provider_for("chat", fake_server), [broken]) as agent:
        played = await play(agent, "first", streamed=True)
    assert played.result is not None, played.error
    told = fake_server.requests[1].raw.decode() + repr(played.events) + repr(played.result.messages)
    assert KEY not in told
