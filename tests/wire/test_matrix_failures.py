"""Failed model calls as an agent run meets them: how often they are sent, what the run ends with, what was shown (L01 to L14, A01, A02, A10, W23, W31)."""

# ruff: noqa: E501 - one row of a table a line

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import SqliteStore, with_retry
from lousho_ray.errors import CompactedLLMProviderError, OperationTimeoutError, RateLimitError
from lousho_ray.events import ProviderRetry
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.fake_server import (
    DONE,
    FIN,
    TC,
    D,
    FakeServer,
    Reply,
    block_start,
    block_stop,
    cut,
    drop,
    eof,
    error_body,
    error_event,
    function_call_item,
    gate,
    hold,
    message_start,
    ollama_error,
    ollama_line,
    output_item_done,
    output_text_delta,
    repeat,
    response_created,
    response_error,
    response_failed,
    sse,
    status,
    text_delta,
)
from tests.wire.matrix_support import (
    MODELS,
    SSE,
    Mode,
    Place,
    Route,
    Row,
    Toolbox,
    an_agent,
    cells,
    check,
    play,
    provider_for,
    wire_route,
)

ROUTES: tuple[Route, ...] = ("chat", "responses", "messages", "ollama")
TEXT_BLOCK = block_start(0, {"type": "text", "text": ""})
OVERLOADED = error_event("overloaded_error", "Overloaded")

# ------------------------------------------------------------------------------------------------------------ one answer, again and again


@dataclass(frozen=True, slots=True)
class Refused:
    """An error answer that the server gives to every try: how many there are, and how the run ends."""

    id: str
    code: int
    requests: int
    category: str
    body: Mapping[str, Any] | str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    routes: Sequence[Route] = ROUTES
    says: str = ""


# fmt: off
STATUSES = [  # L13, A02, A10
    *[Refused(f"L13-{code}", code, 1, "unknown") for code in (400, 402, 404, 405, 409, 410, 415, 422, 425, 451)],
    Refused("L13-401", 401, 1, "auth-failure"),
    Refused("L13-401-names-the-variable", 401, 1, "auth-failure", routes=["chat", "responses"], says="OPENAI_API_KEY"),
    Refused("L13-401-names-its-variable", 401, 1, "auth-failure", routes=["messages"], says="ANTHROPIC_API_KEY"),
    Refused("L13-403", 403, 1, "auth-failure"),
    *[Refused(f"L13-{code}", code, 3, "timeout") for code in (408, 504)],
    *[Refused(f"L13-{code}", code, 3, "unknown") for code in (500, 501, 502, 503, 507, 520, 522, 529, 599)],
    Refused("L13-429", 429, 3, "rate-limit"),
    Refused("L13-html", 502, 3, "unknown", "<html><h1>Bad gateway</h1></html>", {"content-type": "text/html"}),
    Refused("L13-empty-500", 500, 3, "unknown", ""),
    Refused("A02-529", 529, 3, "unknown", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}, "request_id": "r"},
            routes=["messages"], says="Overloaded"),
    Refused("A10-413", 413, 1, "context-length-exceeded", {"type": "error", "error": {"type": "request_too_large", "message": "too large"}},
            says="too large"),
    Refused("A10-413-html", 413, 1, "context-length-exceeded", "<html>413 Request Entity Too Large</html>", {"content-type": "text/html"}),
    Refused("L08-ollama-overflow", 400, 1, "context-length-exceeded",
            {"error": "input length exceeds the available context size (4096 tokens)"}, routes=["ollama"]),
    Refused("L13-overflow", 400, 1, "context-length-exceeded", {"error": {"code": "context_length_exceeded", "message": "This model's maximum context length is 8192 tokens"}},
            routes=["chat", "responses"]),
    Refused("A10-prompt-too-long", 400, 1, "context-length-exceeded",
            {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens > 200000 maximum"}}, routes=["messages"]),
    Refused("W31-not-pulled", 404, 1, "unknown", {"error": 'model "x" not found, try pulling it first'}, routes=["ollama"], says="ollama pull"),
]
QUOTA = [  # L04
    Refused("L04-insufficient_quota", 429, 1, "rate-limit", {"error": {"code": "insufficient_quota", "message": "You exceeded your current quota"}}, says="quota"),
    Refused("L04-quota-as-type", 429, 1, "rate-limit", {"error": {"type": "insufficient_quota", "message": "no"}}),
    Refused("L04-usage_limit_reached", 429, 1, "rate-limit", {"error": {"type": "usage_limit_reached", "resets_in_seconds": 3600}}),
    Refused("L04-billing", 429, 1, "rate-limit", {"error": {"code": "billing_hard_limit_reached", "message": "no"}}),
    Refused("L04-402", 402, 1, "unknown", {"error": {"code": 402, "message": "Insufficient credits"}}, routes=["openrouter"], says="credits"),
    Refused("L04-credit-balance", 400, 1, "unknown",
            {"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is too low"}}, routes=["messages"], says="credit balance"),
    Refused("L04-403", 403, 1, "auth-failure", {"error": {"code": "insufficient_user_quota", "message": "no"}}, routes=["compatible"]),
    Refused("L04-tokens-per-minute-is-no-overflow", 429, 3, "rate-limit",
            {"error": {"code": "rate_limit_exceeded", "message": "Request too large: exceeds the context window of tokens per minute"}}),
]
# fmt: on


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("row", "route"), [pytest.param(row, route, id=f"{row.id}-{route}") for row in [*STATUSES, *QUOTA] for route in row.routes]
)
async def test_an_error_status(fake_server: FakeServer, row: Refused, route: Route, streamed: bool) -> None:
    body = error_body(wire_route(route), "the server's words", type="some_error") if row.body is None else row.body
    for _ in range(4):
        fake_server.on(wire_route(route), status(row.code, row.headers, body))
    async with an_agent(provider_for(route, fake_server), Toolbox().tools) as agent:
        played = await play(agent, "first", streamed=streamed)
    assert len(fake_server.requests) == row.requests
    error = played.error
    assert isinstance(error, CompactedLLMProviderError)
    assert (error.compacted.category, error.compacted.status) == (row.category, row.code)
    assert isinstance(error, RateLimitError) == (row.category == "rate-limit")
    assert (row.says or ("the server's words" if row.body is None else "")) in error.detail
    if streamed:
        assert [event.attempt for event in played.of("provider.retry")] == list(range(1, row.requests))
        assert played.events[-1].finish_reason == "error"  # type: ignore[attr-defined]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("code", "requests"), [(500, 6), (429, 6), (400, 2), (401, 2), (529, 6)])
async def test_three_tries_of_two_models_are_six_requests(
    fake_server: FakeServer, code: int, requests: int, streamed: bool
) -> None:
    # L04, L11: the client libraries' own retries would make more
    for route in ("chat", "messages"):
        for _ in range(9):
            fake_server.on(route, status(code, {}, error_body(route, "no")))
    second = provider_for("messages", fake_server)
    async with an_agent(provider_for("chat", fake_server), (), fallback_models=[second]) as agent:
        played = await play(agent, "first", streamed=streamed)
    await second.aclose()
    assert [request.route for request in fake_server.requests] == ["chat"] * (requests // 2) + ["messages"] * (requests // 2)
    assert isinstance(played.error, CompactedLLMProviderError)
    if streamed:
        assert len(played.of("provider.fallback")) == 1
        assert len(played.of("provider.retry")) == requests - 2


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("step", [drop, status(529, {}, {"error": {"message": "no"}}), status(503, {"retry-after": "0"}, {}), eof])
async def test_one_failure_and_then_an_answer(fake_server: FakeServer, step: Any, route: Route, streamed: bool) -> None:
    # A02, L13: a reset before the headers, an overload, a body that ends before it began
    fake_server.on(wire_route(route), step)
    fake_server.respond("back")
    async with an_agent(provider_for(route, fake_server), ()) as agent:
        played = await play(agent, "first", streamed=streamed)
    assert played.result is not None, played.error
    assert (played.result.text, len(fake_server.requests)) == ("back", 2)
    assert played.result.usage.model_calls == 1


# ----------------------------------------------------------------------------------------------------------------- errors inside a stream

# fmt: off
GOOGLE = sse({"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "slow down"}})
FIRST = [  # A01, L10, L11: the stream begins with the error, three times
    Row("A01-overloaded-first", [OVERLOADED, eof], route="messages", error="unknown"),
    Row("A01-overloaded-after-start", [message_start(), OVERLOADED, eof], route="messages", error="unknown"),
    Row("A01-rate-limit-first", [error_event("rate_limit_error", "slow"), eof], route="messages", error="rate-limit"),
    Row("A01-api_error-in-an-empty-block", [message_start(), TEXT_BLOCK, error_event("api_error", "no"), eof], route="messages", error="unknown"),
    Row("L10-429-first", [GOOGLE, hold], error="rate-limit"),
    Row("L11-502-first", [sse({"error": {"message": "overloaded", "code": 502}}), eof], error="unknown"),
    Row("L11-error-text", [sse({"error": "overloaded"}), eof], error="unknown"),
    Row("L11-error-event", [b'event: error\ndata: {"message": "overloaded"}\n\n', eof], error="unknown"),
    Row("L11-choice-error", [D({"content": ""}).replace(b'"finish_reason": null', b'"finish_reason": null, "error": {"code": 502, "message": "x"}'), eof],
        route="openrouter", error="unknown"),
    Row("L11-broken-json", [b'data: {"choices": [\n\n', eof], error="unknown"),
    Row("R02-failed-first", [response_created(), response_failed("server_error"), eof], route="responses", error="unknown"),
    Row("R02-rate-limit-first", [response_error("rate_limit_exceeded", "slow"), eof], route="responses", error="rate-limit"),
    Row("L11-ollama-first", [ollama_error("llama runner process has terminated"), eof], route="ollama", error="unknown"),
]
FATAL = [  # an error that trying again cannot cure
    Row("L11-invalid-first", [sse({"error": {"message": "bad schema", "code": 400}}), eof], requests=1, error="unknown"),
    Row("L04-quota-first", [sse({"error": {"message": "no", "code": "insufficient_quota", "type": "insufficient_quota"}}), eof], requests=1, error="unknown"),
    Row("A01-auth-first", [error_event("authentication_error", "bad key"), eof], requests=1, route="messages", error="auth-failure"),
    Row("A01-invalid-first", [error_event("invalid_request_error", "bad"), eof], requests=1, route="messages", error="unknown"),
    Row("A01-overflow-first", [error_event("invalid_request_error", "prompt is too long: 3 > 2"), eof], requests=1, route="messages", error="context-length-exceeded"),
    Row("R02-invalid", [response_failed("invalid_prompt"), eof], requests=1, route="responses", error="unknown"),
]
LATER = [  # A01, L05, L10: text is out already
    Row("A01-overloaded-later", [message_start(), TEXT_BLOCK, text_delta(0, "Hello "), OVERLOADED, eof], route="messages", error="unknown"),
    Row("A01-overloaded-after-a-block", [message_start(), TEXT_BLOCK, text_delta(0, "Hello "), block_stop(0), OVERLOADED, hold], route="messages", error="unknown"),
    Row("L10-429-later", [D({"content": "Hello "}), GOOGLE, hold], error="rate-limit"),
    Row("L05-cut-later", [D({"content": "Hello "}), cut], error="unknown"),
    Row("L05-eof-later", [D({"content": "Hello "}), eof], error="unknown"),
    Row("L05-call-and-cut", [D({"content": "Hello "}), TC(0, "a", "f", "{}"), cut], error="unknown"),
    Row("L05-broken-json-later", [D({"content": "Hello "}), b"data: {oops\n\n", eof], error="unknown"),
    Row("R02-failed-later", [response_created(), output_text_delta("Hello "), response_failed("server_error"), eof], route="responses", error="unknown"),
    Row("L11-ollama-later", [ollama_line({"content": "Hello "}), ollama_error("terminated"), eof], route="ollama", error="unknown"),
    Row("L05-ollama-cut", [ollama_line({"content": "Hello "}), cut], route="ollama", error="unknown"),
]
# fmt: on


@pytest.mark.parametrize(("row", "mode", "place"), cells([*FIRST, *FATAL, *LATER], ("plain", "session")))
async def test_an_error_inside_a_stream(fake_server: FakeServer, row: Row, mode: Mode, place: Place, tmp_path: Path) -> None:
    # L11, A01: a first event that is an error is tried again; L05, L10: what was shown is not shown twice
    if row in FIRST:
        row = Row(row.id, row.events, error=row.error, requests=3, route=row.route)
        for _ in range(2):
            fake_server.on(wire_route(row.route), *(row.events or ()))
    async with asyncio.timeout(10):
        played = await check(fake_server, row, mode, place, tmp_path)
    shown = "".join(event.text for event in played.of("text.delta"))
    assert shown == ("Hello " if row in LATER else "")
    assert played.of("tool.start") == []


async def test_an_error_first_is_answered_by_the_fallback(fake_server: FakeServer) -> None:
    # A01, L11
    fake_server.on("messages", OVERLOADED, eof)
    fake_server.respond("from chat", route="chat")
    second = provider_for("chat", fake_server)
    async with an_agent(provider_for("messages", fake_server), (), retry=False, fallback_models=[second]) as agent:
        played = await play(agent, "first", streamed=True)
    await second.aclose()
    assert played.result is not None
    assert played.result.text == "from chat"
    assert list(played.result.usage.by_model) == [MODELS["chat"]]


async def test_a_call_that_was_not_out_is_asked_for_again_and_run_once(fake_server: FakeServer) -> None:
    # L05
    box = Toolbox()
    for route, events in {
        "chat": [TC(0, "a", "f", "{}"), cut],
        "responses": [response_created(), output_item_done(function_call_item("c", "f", "{}")), cut],
        "messages": [
            message_start(),
            block_start(0, {"type": "tool_use", "id": "t", "name": "f", "input": {}}),
            block_stop(0),
            cut,
        ],
    }.items():
        box.runs.clear()
        fake_server.on(route, *events)
        fake_server.respond([Reply(tool_calls=[("f", {})]), Reply("done")], route=route)
        async with an_agent(provider_for(route, fake_server), box.tools) as agent:  # type: ignore[arg-type]
            played = await play(agent, "first", streamed=True)
        assert played.result is not None, played.error
        assert (box.runs, played.result.text) == ([("f", {})], "done")
        assert len(fake_server.requests_of(route)) == 3


async def test_a_tool_turn_and_then_failures_end_in_an_error_with_what_was_spent(fake_server: FakeServer, tmp_path: Path) -> None:
    # L14: the run is not a success, the time to try again is told, the tool ran once, the session keeps nothing of it
    box = Toolbox()
    fake_server.on("chat", Reply(tool_calls=[("f", {"x": 1})], usage=(11, 7)))
    for _ in range(3):
        fake_server.on("chat", status(429, {"retry-after-ms": "2"}, {"error": {"message": "later"}}))
    async with (
        SqliteStore(tmp_path / "s.db") as store,
        an_agent(provider_for("chat", fake_server), box.tools, store=store) as agent,
    ):
        session = agent.session("s")
        played = await play(session, "first", streamed=True)
        assert await session.load() == []
        fake_server.respond("again")
        await session.discard_pending()
        assert (await session.send("second")).text == "again"
    assert isinstance(played.error, RateLimitError)
    assert played.error.compacted.retry_after_ms == 2
    assert played.error.usage is not None
    assert (played.error.usage.input_tokens, played.error.usage.output_tokens) == (11, 7)
    assert box.runs == [("f", {"x": 1})]
    assert [event.finish_reason for event in played.of("step.done")] == ["tool_calls", "error"]
    assert len(fake_server.requests) == 5


# -------------------------------------------------------------------------------------------------------------------------- how long to wait

OWN = 500.0
"""The backoff's first delay, in milliseconds."""

# fmt: off
WAITS: dict[str, tuple[list[tuple[str, str]], float | None]] = {  # L01, L02: headers -> the delay in ms; None: the call fails at once
    "seconds": ([("retry-after", "7")], 7_000),
    "fraction": ([("retry-after", "0.25")], 250),
    "blanks": ([("retry-after", "  7  ")], 7_000),
    "milliseconds": ([("retry-after-ms", "20")], 20),
    "milliseconds-win": ([("retry-after-ms", "20"), ("retry-after", "5")], 20),
    "unreadable-milliseconds": ([("retry-after-ms", "soon"), ("retry-after", "5")], 5_000),
    "date": ([("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT")], 5_000),
    "date-past": ([("retry-after", "Wed, 21 Oct 2026 07:27:50 GMT")], OWN),
    "date-now": ([("retry-after", "Wed, 21 Oct 2026 07:27:55 GMT")], OWN),
    "date-rfc-850": ([("retry-after", "Wednesday, 21-Oct-26 07:28:00 GMT")], 5_000),
    "date-asctime": ([("retry-after", "Wed Oct 21 07:28:00 2026")], 5_000),
    "date-minus-zero": ([("retry-after", "Wed, 21 Oct 2026 07:28:00 -0000")], 5_000),
    "date-with-zone": ([("retry-after", "Wed, 21 Oct 2026 09:28:00 +0200")], 5_000),
    "date-impossible": ([("retry-after", "Fri, 31 Dec 99999 23:59:59 GMT")], OWN),
    "date-february-30": ([("retry-after", "Mon, 30 Feb 2026 99:99:99 GMT")], OWN),
    "zero": ([("retry-after", "0")], 0),
    "negative": ([("retry-after", "-5")], OWN),
    "exponent": ([("retry-after", "1e9")], OWN),
    "word": ([("retry-after", "abc")], OWN),
    "empty": ([("retry-after", "")], OWN),
    "two": ([("retry-after", "3"), ("retry-after", "7")], 7_000),
    "two-and-one-is-odd": ([("retry-after", "abc"), ("retry-after", "7")], 7_000),
    "none": ([], OWN),
    "at-the-limit": ([("retry-after", "30")], 30_000),
    "days": ([("retry-after", "411000")], None),
    "years": ([("retry-after", "9999999999")], None),
    "endless": ([("retry-after", "9" * 400)], None),
    "date-far": ([("retry-after", "Thu, 31 Dec 2099 23:59:59 GMT")], None),
}
# fmt: on


@pytest.mark.parametrize(("headers", "delay_ms"), list(WAITS.values()), ids=list(WAITS))
@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("route", ["chat", "messages", "ollama"])
async def test_the_wait_a_server_asks_for(
    fake_server: FakeServer, headers: list[tuple[str, str]], delay_ms: float | None, code: int, route: Route
) -> None:
    # L01, L02, with the clock 5 s before the date
    clock = FakeClock(wall=1_792_567_675.0)
    told: list[float] = []
    fake_server.on(route, status(code, headers, error_body(route, "later")))
    fake_server.respond("back")
    retry = with_retry(provider_for(route, fake_server), clock=clock, jitter=False, max_retries=1)

    def listen(event: Any) -> None:
        if isinstance(event, ProviderRetry):
            told.append(event.delay_ms)

    async with an_agent(retry, (), retry=None, on_event=listen) as agent:  # type: ignore[arg-type]
        task = asyncio.create_task(play(agent, "first", streamed=False))
        if delay_ms:
            async with asyncio.timeout(10):
                while not clock.waiting:
                    await fake_server.wait_idle()
                    await asyncio.sleep(0)
            assert len(fake_server.requests) == 1  # nothing is sent while it waits
            clock.advance(delay_ms - 1)
            assert clock.waiting == 1
            clock.advance(1)
        played = await task
    if delay_ms is None:
        assert (told, len(fake_server.requests)) == ([], 1)
        assert isinstance(played.error, CompactedLLMProviderError)
        assert played.error.compacted.retry_after_ms is not None
        assert played.error.compacted.retry_after_ms > 30_000
    else:
        assert (told, len(fake_server.requests)) == ([delay_ms], 2)
        assert played.result is not None
        assert played.result.text == "back"


# ---------------------------------------------------------------------------------------------------------------------- silence and keep-alives

SILENT = [
    ("headers-then-nothing", {"timeout_ms": 150}, [status(200, SSE), hold], 3),
    ("no-headers", {"timeout_ms": 150}, [hold], 3),
    ("only-comments", {"timeout_ms": 150}, [status(200, SSE), repeat(b": ping\n\n", gate("slow"))], 3),
    ("comments-for-ever", {"progress_timeout_ms": 150}, [D({"content": "hi"}), repeat(b": ping\n\n")], 1),
    ("one-chunk-then-nothing", {"idle_timeout_ms": 150}, [D({"content": "hi"}), hold], 1),
    ("a-role-then-nothing", {"idle_timeout_ms": 150}, [D({"role": "assistant"}), hold], 3),
]


@pytest.mark.parametrize(("options", "steps", "requests"), [row[1:] for row in SILENT], ids=[row[0] for row in SILENT])
async def test_a_silent_server(fake_server: FakeServer, options: dict[str, Any], steps: list[Any], requests: int) -> None:
    # W23: tried again only while nothing was shown; every connection is closed
    for _ in range(requests):
        fake_server.on("chat", *steps)
    async with asyncio.timeout(20), an_agent(provider_for("chat", fake_server, **options), ()) as agent:
        played = await play(agent, "first", streamed=True)
    assert isinstance(played.error, OperationTimeoutError), played.error
    assert len(fake_server.requests) == requests
    for request in fake_server.requests:
        await fake_server.wait_ended(request)


async def test_keep_alives_of_a_slow_answer_are_signs_of_life(fake_server: FakeServer) -> None:
    # W23: longer without an event than the idle limit allows without a byte
    from lousho_ray.testing.fake_server import pause

    slow = repeat(b": ping\n\n", pause(0.05), times=12)
    fake_server.on("chat", D({"role": "assistant"}), slow, D({"content": "hi"}), FIN("stop"), DONE)
    async with an_agent(provider_for("chat", fake_server, idle_timeout_ms=400, progress_timeout_ms=5_000), ()) as agent:
        played = await play(agent, "first", streamed=True)
    assert played.result is not None, played.error
    assert (played.result.text, len(fake_server.requests)) == ("hi", 1)


@pytest.mark.parametrize("route", ["ollama", "compatible"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_model_that_is_being_loaded_is_waited_for(fake_server: FakeServer, route: Route, streamed: bool) -> None:
    # W31: the limit of the connecting is not the limit of the first byte
    fake_server.on(wire_route(route), gate("loaded"), Reply("hi"))
    async with an_agent(provider_for(route, fake_server, connect_timeout_ms=100), ()) as agent:
        task = asyncio.create_task(play(agent, "first", streamed=streamed))
        await fake_server.reached("loaded")
        await asyncio.wait([task], timeout=0.2)
        assert not task.done()
        fake_server.release("loaded")
        played = await task
    assert played.result is not None, played.error
    assert (played.result.text, len(fake_server.requests)) == ("hi", 1)


@pytest.mark.parametrize("route", ["ollama", "compatible", "chat", "messages"])
async def test_nothing_listens_there(fake_server: FakeServer, route: Route) -> None:
    # W31, L13: the address is named
    async with an_agent(provider_for(route, fake_server, base_url="http://127.0.0.1:9"), ()) as agent:
        played = await play(agent, "first", streamed=False)
    assert isinstance(played.error, CompactedLLMProviderError)
    assert "127.0.0.1:9" in played.error.detail
    assert fake_server.requests == []
