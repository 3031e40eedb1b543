"""What the wire matrices share: a row says what a server sends and what has to come of it, `check` plays it and looks.

A row is played against the strict fake server, which refuses every request that breaks a rule of the vendor (and fails the test):
so the request after a strange reply is checked by being sent.
"""

from __future__ import annotations

import functools
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest

from lousho_ray import (
    AnthropicProvider,
    ExecutionResult,
    OllamaProvider,
    OpenAICompatibleProvider,
    OpenAIProvider,
    OpenRouterProvider,
    SqliteStore,
    create_agent,
    define_tool,
    memory_store,
)
from lousho_ray.agent import Agent, Session
from lousho_ray.errors import LoushoError
from lousho_ray.events import Event
from lousho_ray.providers.base import HTTPProvider
from lousho_ray.testing.fake_server import FakeServer, Reply, split, status

KEY = "sk-test-0123456789abcdef"
SSE = {"content-type": "text/event-stream"}
QUICK: dict[str, Any] = {"max_retries": 2, "backoff": {"initial_ms": 1, "max_ms": 60_000}}

Route = Literal["chat", "compatible", "mistral", "openrouter", "responses", "messages", "ollama"]
Place = Literal["plain", "session", "reloaded"]

MODELS = {
    "chat": "gpt-4o-mini",
    "responses": "gpt-4o-mini",
    "messages": "claude-haiku-4-5",
    "ollama": "llama3",
    "openrouter": "openai/gpt-4o-mini",
}


def provider_for(route: Route, server: FakeServer, **options: Any) -> HTTPProvider:
    """A built-in provider that speaks to a route of the server."""
    options = {"default_model": MODELS.get(route, "some-model"), **options}
    match route:
        case "messages":
            return AnthropicProvider(**{"api_key": KEY, "base_url": server.url, **options})
        case "ollama":
            return OllamaProvider(**{"base_url": server.url, **options})
        case "compatible":
            return OpenAICompatibleProvider(**{"base_url": server.compatible_url, **options})
        case "mistral":
            return OpenAICompatibleProvider(**{"base_url": server.mistral_url, "api_key": KEY, "call_ids": "mistral", **options})
        case "openrouter":
            return OpenRouterProvider(**{"api_key": KEY, "base_url": server.openrouter_url, **options})
        case _:
            return OpenAIProvider(**{"api": route, "api_key": KEY, "base_url": server.openai_url, **options})


def wire_route(route: Route) -> str:
    """The route of the server that a provider's requests come in at."""
    return "chat" if route in ("compatible", "mistral", "openrouter") else route


# ----------------------------------------------------------------------------------------------------------------------- tools


class Toolbox:
    """The tools of a row, which note every run. They take any object."""

    def __init__(self, names: Sequence[str] = ("f", "g", "now", "delete_all")) -> None:
        self.runs: list[tuple[str, Any]] = []
        self.tools = [self._tool(name) for name in names]

    def _tool(self, name: str) -> Any:
        def execute(args: Any) -> Any:
            self.runs.append((name, args))
            return {"ran": name, "args": args}

        schema = {"type": "object", "properties": {}, "additionalProperties": True}

        async def run(args: Any) -> Any:
            return execute(args)

        return define_tool(name=name, description=f"Does {name}.", input=schema, execute=run)


# ------------------------------------------------------------------------------------------------------------------------ rows


@dataclass(frozen=True, slots=True)
class Row:
    """One case: what the server answers first, streamed (`events`) and whole (`body`), and what has to come of it.

    Attributes:
        runs: The tool runs that follow, in order. Every other call of the reply is answered with an error.
        kinds: The kinds of those errors, in order.
        text: The final text; with calls that are answered the model is asked again and says `done`.
        requests: How many requests the turn makes.
        used: What the first reply's usage is booked as; `"estimated"`: it told none.
        error: The category of the error that the turn ends with in place of a result.
    """

    id: str
    events: Sequence[Any] | None = None
    body: Any = None
    runs: Sequence[tuple[str, Any]] = ()
    kinds: Sequence[str] = ()
    text: str | None = None
    finish: str = "stop"
    requests: int | None = None
    used: tuple[int, int] | Literal["estimated"] | None = None
    error: str | None = None
    route: Route = "chat"
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asks_again(self) -> bool:
        return bool(self.runs or self.kinds) and self.finish == "stop"

    @property
    def final_text(self) -> str:
        return self.text if self.text is not None else "done" if self.asks_again else ""

    @property
    def request_count(self) -> int:
        return self.requests if self.requests is not None else 2 if self.asks_again else 1


Mode = Literal["whole", "streamed", "bytewise"]
PLACES: tuple[Place, ...] = ("plain", "session", "reloaded")


def cells(rows: Sequence[Row], places: Sequence[Place] = PLACES) -> list[Any]:
    """`(row, mode, place)`: each mode alone, in a session with a second turn, and with the transcript reloaded from a store."""
    made = []
    for row in rows:
        modes: list[Mode] = ["whole"] if row.body is not None else []
        modes += ["streamed", "bytewise"] if row.events is not None else []
        for mode in modes:
            made += [
                pytest.param(row, mode, place, id=f"{row.id}-{mode}-{place}") for place in _places(mode, modes) if place in places
            ]
    assert len({param.id for param in made}) == len(made), "two rows have one id"
    return made


def _places(mode: Mode, modes: Sequence[Mode]) -> tuple[Place, ...]:
    """Where a mode is played: what a session keeps is the same for all of them, so each place has one mode besides `plain`."""
    if mode == "streamed":
        return ("plain", "session") if "whole" in modes else PLACES
    return ("plain", "reloaded") if mode == "whole" and len(modes) > 1 else PLACES if mode == "whole" else ("plain",)


def script(server: FakeServer, row: Row, mode: Mode) -> None:
    """The row's answer to the next request, and `done` to all after it."""
    route = wire_route(row.route)
    if mode == "whole":
        server.on(route, row.body if not isinstance(row.body, Mapping) else status(200, body=row.body))
    else:
        assert row.events is not None
        server.on(route, *([split(1)] if mode == "bytewise" else []), *row.events)
    server.respond(Reply("done", usage=(20, 4)))


# ---------------------------------------------------------------------------------------------------------------------- playing


@dataclass(slots=True)
class Played:
    """What came of one turn."""

    result: ExecutionResult[Any] | None = None
    error: LoushoError | None = None
    events: list[Event] = field(default_factory=list)

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.type == kind]


async def play(target: Agent[Any] | Session[Any], text: str, *, streamed: bool, **options: Any) -> Played:
    """One turn; its error is kept in place of being raised."""
    played = Played()
    try:
        if streamed:
            run = target.stream(text, **options)
            async for event in run:
                played.events.append(event)
            played.result = await run.result
        else:
            played.result = await target.send(text, **options)
    except LoushoError as error:
        played.error = error
    return played


_one_tls_context = functools.cache(ssl.create_default_context)
"""Every client makes a TLS context, which reads all certificates of the machine: most of the time of a short test."""


@asynccontextmanager
async def an_agent(provider: HTTPProvider, tools: Sequence[Any], **options: Any) -> AsyncIterator[Agent[Any]]:
    agent = create_agent(provider=provider, tools=list(tools), runtime="local", **{"retry": QUICK, **options})
    with patch.object(ssl, "create_default_context", lambda *given, **named: _one_tls_context()):
        try:
            yield agent
        finally:
            await agent.close()


async def check(server: FakeServer, row: Row, mode: Mode, place: Place, tmp_path: Path) -> Played:
    """Plays a row and checks everything it says; in a session a second turn has to follow."""
    box = Toolbox()
    script(server, row, mode)
    options = {"model_settings": dict(row.settings), **row.options}
    if place == "plain":
        async with an_agent(provider_for(row.route, server), box.tools, **options) as agent:
            played = await play(agent, "first", streamed=mode != "whole")
        check_turn(server, row, played, box)
        return played
    path = tmp_path / "s.db"
    store = memory_store() if place == "session" else SqliteStore(path)
    async with store, an_agent(provider_for(row.route, server), box.tools, store=store, **options) as agent:
        session = agent.session("s")
        played = await play(session, "first", streamed=mode != "whole")
        check_turn(server, row, played, box)
        if place == "session":
            await check_next_turn(server, row, session, mode)
    if place == "reloaded":
        async with SqliteStore(path) as again, an_agent(provider_for(row.route, server), box.tools, store=again) as agent:
            await check_next_turn(server, row, agent.session("s"), mode)
    return played


def check_turn(server: FakeServer, row: Row, played: Played, box: Toolbox) -> None:
    assert len(server.requests) == row.request_count, played.error
    assert box.runs == list(row.runs)
    check_events(played)
    if row.error is not None:
        assert played.error is not None, played.result
        compacted = getattr(played.error, "compacted", None)
        assert (compacted.category if compacted is not None else played.error.code) == row.error
        return
    assert played.result is not None, played.error
    result = played.result
    assert (result.finish_reason, result.text) == (row.finish, row.final_text)
    kinds = [json.loads(m.text)["kind"] for m in result.new_messages if m.role == "tool" and m.is_error]
    assert kinds == list(row.kinds)
    assert all(message.text or message.tool_calls for message in result.messages if message.role == "assistant")
    if row.used is not None:
        entry = result.step_usage[0]
        if row.used == "estimated":
            assert entry.estimated
            assert entry.usage.prompt_tokens > 0
        else:
            assert (entry.usage.prompt_tokens, entry.usage.completion_tokens, entry.estimated) == (*row.used, False)
        assert result.usage.estimated == entry.estimated


def check_events(played: Played) -> None:
    """Counted from 0 without gaps, one `run.done` and that last, and every started tool call ended."""
    events = played.events
    if not events:
        return
    assert [event.seq for event in events] == list(range(len(events)))
    assert [event.type for event in events].count("run.done") == 1
    assert events[-1].type == "run.done"
    started = [event.tool_call_id for event in played.of("tool.start")]
    ended = [event.tool_call_id for event in events if event.type in ("tool.done", "tool.error")]
    assert sorted(started) == sorted(ended)
    assert len(set(started)) == len(started)
    done: Any = events[-1]
    if played.result is None:
        assert done.finish_reason == "error"
        assert len(played.of("error")) == 1
    else:
        assert (done.finish_reason, done.text) == (played.result.finish_reason, played.result.text)
        written = "".join(message.text for message in played.result.new_messages if message.role == "assistant")
        assert "".join(event.text for event in played.of("text.delta")).strip() == written.strip()


async def check_next_turn(server: FakeServer, row: Row, session: Session[Any], mode: Mode) -> None:
    """The conversation goes on: the strict server takes the next request, and the model is told what came before."""
    before = len(server.requests)
    server.respond(Reply("again", usage=(30, 6)))
    if row.error is not None:
        await session.discard_pending()  # a failed turn would be resumed, or stand in the way
    played = await play(session, "second", streamed=mode != "whole")
    assert played.error is None, played.error
    assert played.result is not None
    assert (played.result.text, played.result.finish_reason) == ("again", "stop")
    assert len(server.requests) == before + 1
    sent = server.requests[-1].raw.decode()
    assert "second" in sent
    if row.error is None:
        assert "first" in sent
        assert all(name in sent for name, _ in row.runs)
    check_events(played)
