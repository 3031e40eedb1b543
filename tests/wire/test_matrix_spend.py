"""What calls that break off cost, and what runs spend (C07, COST-06, C05, C11)."""

from __future__ import annotations

from typing import Any

import pytest

from lousho_ray.errors import BudgetExceededError
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions, GenerateResult
from lousho_ray.providers.failures import classify
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.fake_server import (
    D,
    FakeServer,
    Reply,
    block_start,
    cut,
    eof,
    error_event,
    gate,
    hold,
    message_start,
    response_created,
    response_event,
    response_object,
    response_usage,
    status,
    text_delta,
)
from tests.wire.matrix_support import Route, Toolbox, an_agent, play, provider_for, wire_route

START = message_start({"input_tokens": 1000, "output_tokens": 1, "cache_read_input_tokens": 24})
TEXT_BLOCK = block_start(0, {"type": "text", "text": ""})
LONG = "word " * 200
FAILED = response_object(status="failed", error={"code": "server_error", "message": "no"}, usage=response_usage(70, 30))
TOLD = {"prompt_tokens": 70, "completion_tokens": 1}
WHOLE = {"prompt_tokens": 70, "completion_tokens": 30}
THOUGHT = block_start(0, {"type": "thinking", "thinking": "hm", "signature": ""})

# fmt: off
BROKEN: dict[str, tuple[Route, list[Any], tuple[int, int] | None]] = {  # how a stream breaks off -> booked input, least output
    "messages-cut": ("messages", [START, TEXT_BLOCK, text_delta(0, "hi"), cut], (1024, 1)),
    "messages-eof": ("messages", [START, TEXT_BLOCK, text_delta(0, "hi"), eof], (1024, 1)),
    "messages-cut-after-much": ("messages", [START, TEXT_BLOCK, text_delta(0, LONG), cut], (1024, 100)),
    "messages-error": ("messages", [START, TEXT_BLOCK, text_delta(0, "hi"), error_event("overloaded_error", "no"), eof], (1024, 1)),
    "chat-cut-before-usage": ("chat", [D({"content": "hi"}), cut], None),
    "chat-usage-on-every-chunk": ("chat", [D({"content": LONG}, usage=TOLD), cut], (70, 100)),
    "responses-failed-with-usage": ("responses", [response_created(), response_event("response.output_text.delta", delta="hi"),
        response_event("response.failed", response=FAILED)], (70, 30)),
    "responses-cut": ("responses", [response_created(), response_event("response.output_text.delta", delta="hi"), cut], None),
}
# fmt: on


@pytest.mark.parametrize(("route", "steps", "booked"), list(BROKEN.values()), ids=list(BROKEN))
async def test_a_call_that_breaks_off_costs_what_its_server_told(
    fake_server: FakeServer, route: Route, steps: list[Any], booked: tuple[int, int] | None
) -> None:
    # C07, COST-06
    fake_server.on(route, *steps)
    async with an_agent(provider_for(route, fake_server), ()) as agent:
        played = await play(agent, "first", streamed=True)
    assert played.error is not None
    usage = played.error.usage
    assert usage is not None
    step = played.of("step.done")[-1]
    if booked is None:
        assert (usage.total_tokens, usage.model_calls, step.usage) == (0, 0, None)
        return
    assert usage.input_tokens == booked[0] == step.usage.input_tokens
    assert usage.output_tokens >= booked[1]
    assert (usage.estimated, usage.model_calls) == (True, 1)
    assert usage.cost_usd is not None
    assert usage.cost_usd > 0


@pytest.mark.parametrize("told", [True, False], ids=["told", "not-told"])
async def test_an_aborted_call_costs_what_its_server_told(fake_server: FakeServer, told: bool) -> None:
    # C07, COST-06: 50 chunks, then the user stops the run
    route: Route = "messages" if told else "chat"
    chunks = [START, TEXT_BLOCK, *[text_delta(0, "word ")] * 50] if told else [D({"content": "word "})] * 50
    fake_server.on(route, *chunks, gate("shown"), hold)
    async with an_agent(provider_for(route, fake_server), ()) as agent:
        run = agent.stream("first")
        seen = 0
        async for event in run:
            seen += event.type == "text.delta"
            if seen == 50:
                run.abort()
        result = await run.result
    assert result.finish_reason == "aborted"
    if told:
        assert (result.usage.input_tokens, result.usage.estimated, result.usage.model_calls) == (1024, True, 1)
        assert result.usage.output_tokens >= 50
        assert result.step_usage[0].estimated
    else:
        assert (result.usage.total_tokens, result.usage.model_calls) == (0, 0)


async def test_a_broken_call_counts_beside_the_whole_ones(fake_server: FakeServer) -> None:
    # C07: a tool turn first
    box = Toolbox()
    fake_server.on("messages", Reply(tool_calls=[("f", {})], usage=(11, 7)))
    fake_server.on("messages", START, TEXT_BLOCK, text_delta(0, "hi"), cut)
    async with an_agent(provider_for("messages", fake_server), box.tools) as agent:
        played = await play(agent, "first", streamed=True)
    assert played.error is not None
    assert played.error.usage is not None
    assert (played.error.usage.input_tokens, played.error.usage.model_calls) == (11 + 1024, 2)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_same_call_over_and_over_ends_at_the_step_limit(fake_server: FakeServer, streamed: bool) -> None:
    # C11
    fake_server.respond(Reply(tool_calls=[("f", {"x": 1})], usage=(10, 5)))
    box = Toolbox()
    async with an_agent(provider_for("chat", fake_server), box.tools) as agent:
        played = await play(agent, "first", streamed=streamed)
    assert played.result is not None
    assert (played.result.finish_reason, len(fake_server.requests), len(box.runs)) == ("max-steps", 10, 10)
    assert (played.result.usage.input_tokens, played.result.usage.output_tokens) == (100, 50)


@pytest.mark.parametrize("told", [None, {"prompt_tokens": None, "completion_tokens": None}])
async def test_unknown_usage_still_reaches_a_limit(fake_server: FakeServer, told: Any) -> None:
    # W25, C05: an unknown is not zero
    fake_server.respond(Reply("word " * 400, tool_calls=[("f", {})], usage=told))
    box = Toolbox()
    async with an_agent(provider_for("chat", fake_server), box.tools, limits={"max_cost_usd": 0.0001}) as agent:
        played = await play(agent, "first", streamed=True)
    assert played.result is not None
    assert played.result.finish_reason == "budget-exceeded"
    assert len(fake_server.requests) == 1
    assert box.runs == []


# fmt: off
TRIED: dict[str, tuple[Route, list[Any], bool, tuple[int, int] | None]] = {  # a failed attempt -> streamed or not, what it told
    "messages-overloaded": ("messages", [START, error_event("overloaded_error", "no"), eof], True, (1024, 1)),
    "messages-thinking-cut": ("messages", [START, THOUGHT, cut], True, (1024, 1)),
    "messages-no-start": ("messages", [error_event("overloaded_error", "no"), eof], True, None),
    "responses-failed": ("responses", [response_created(), response_event("response.failed", response=FAILED)], True, (70, 30)),
    "responses-failed-whole": ("responses", [status(200, body=FAILED)], False, (70, 30)),
    "chat-error-with-usage": ("chat", [status(200, body={"error": {"message": "no"}, "usage": WHOLE})], False, (70, 30)),
    "chat-usage-then-cut": ("chat", [D({}, usage=TOLD), cut], True, (70, 1)),
    "chat-503": ("chat", [status(503)], False, None),
}
# fmt: on


@pytest.mark.parametrize(("route", "steps", "streamed", "told"), list(TRIED.values()), ids=list(TRIED))
async def test_an_attempt_that_was_retried_costs_what_its_server_told(
    fake_server: FakeServer, route: Route, steps: list[Any], streamed: bool, told: tuple[int, int] | None
) -> None:
    # COST-06, C07
    fake_server.on(wire_route(route), *steps)
    fake_server.respond(Reply("done", usage=(11, 7)))
    async with an_agent(provider_for(route, fake_server), ()) as agent:
        played = await play(agent, "first", streamed=streamed)
    assert played.result is not None, played.error
    assert len(fake_server.requests) == 2
    usage, entries = played.result.usage, played.result.step_usage
    spent = (0, 0) if told is None else told
    assert (usage.input_tokens, usage.output_tokens) == (11 + spent[0], 7 + spent[1])
    assert (usage.model_calls, len(entries), usage.estimated) == ((1, 1, False) if told is None else (2, 2, True))
    assert (entries[-1].usage.prompt_tokens, entries[-1].estimated) == (11, False)
    assert usage.cost_usd == pytest.approx(sum(entry.cost_usd or 0 for entry in entries))
    if streamed:
        assert played.of("step.done")[-1].usage.input_tokens == 11


async def test_what_the_first_provider_had_used_is_filed_under_its_model(fake_server: FakeServer) -> None:
    # COST-06, COST-03: one attempt, its retry, and the fallback
    fake_server.on("messages", START, error_event("overloaded_error", "no"), eof)
    fake_server.on("messages", START, error_event("overloaded_error", "no"), eof)
    fake_server.respond(Reply("done", usage=(11, 7)))
    first, second = provider_for("messages", fake_server), provider_for("chat", fake_server)
    options = {"fallback_models": [second], "retry": {"max_retries": 1, "backoff": {"initial_ms": 1}}}
    async with an_agent(first, (), **options) as agent:
        played = await play(agent, "first", streamed=True)
        await second.aclose()
    assert played.result is not None, played.error
    by_model = played.result.usage.by_model
    assert {model: (used.input_tokens, used.calls) for model, used in by_model.items()} == {
        "claude-haiku-4-5": (2048, 2),
        "gpt-4o-mini": (11, 1),
    }
    assert played.result.usage.cost_usd is not None


async def test_a_fallback_that_breaks_off_is_filed_under_its_own_model(fake_server: FakeServer) -> None:
    # COST-03, C07
    fake_server.on("chat", status(401))
    fake_server.on("messages", START, TEXT_BLOCK, text_delta(0, "hi"), cut)
    first, second = provider_for("chat", fake_server), provider_for("messages", fake_server)
    async with an_agent(first, (), fallback_models=[second]) as agent:
        played = await play(agent, "first", streamed=True)
        await second.aclose()
    assert played.error is not None
    assert played.error.usage is not None
    assert list(played.error.usage.by_model) == ["claude-haiku-4-5"]


async def test_a_budget_counts_the_attempts_that_failed(fake_server: FakeServer) -> None:
    # COST-06, BUD-15
    fake_server.on("messages", START, error_event("overloaded_error", "no"), eof)
    fake_server.respond(Reply(tool_calls=[("f", {})], usage=(11, 7)))
    box = Toolbox()
    async with an_agent(provider_for("messages", fake_server), box.tools, limits={"max_tokens": 1000}) as agent:
        played = await play(agent, "first", streamed=True)
    assert played.result is not None
    assert (played.result.finish_reason, box.runs) == ("budget-exceeded", [])


@pytest.mark.parametrize("on_exceeded", ["stop", "throw"])
async def test_a_reached_budget_is_an_end_that_nothing_tries_again(fake_server: FakeServer, on_exceeded: str) -> None:
    # C10: neither the retries of the provider nor those around the agent spend again
    fake_server.respond(Reply(tool_calls=[("f", {})], usage=(900, 200)))
    limits = {"max_tokens": 1000, "on_exceeded": on_exceeded}
    async with an_agent(provider_for("chat", fake_server), Toolbox().tools, limits=limits, retry={"max_retries": 3}) as agent:
        played = await play(agent, "first", streamed=True)
    assert len(fake_server.requests) == 1
    if on_exceeded == "stop":
        assert played.result is not None
        assert (played.result.finish_reason, played.result.ok) == ("budget-exceeded", False)
        return
    assert isinstance(played.error, BudgetExceededError)
    assert not classify(played.error).retryable
    outer = ScriptedFailure(played.error)
    with pytest.raises(BudgetExceededError):
        await with_retry(outer, max_retries=3, backoff={"initial_ms": 0}).generate(GenerateOptions([user("again")]))
    assert outer.calls == 1


class ScriptedFailure:
    """A provider that fails with one error."""

    name = "scripted"
    default_model = "m"

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        self.calls += 1
        raise self.error
