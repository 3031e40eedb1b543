"""The spans of runs: their tree, what is on them, how they end, and that without being asked they hold no content."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lousho_ray import semconv
from lousho_ray.create import create_agent
from lousho_ray.errors import PropagatingToolError
from lousho_ray.messages import FilePart, ImagePart, TextPart, user
from lousho_ray.permissions import allow, deny
from lousho_ray.ports import FinishChunk, GenerateOptions, GenerateResult, ServedBy, TextChunk
from lousho_ray.providers.fallback import with_fallback
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.prices import register_model
from lousho_ray.providers.retry import with_retry
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool, tool
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import Gate, PolicyProvider, ScriptedStream, agent_of, asks, calls, failing, plain, say, until
from tests.unit.span_support import Recorder


def task(agent: str, prompt: str = "Do it") -> tuple[str, dict[str, str]]:
    return ("task", {"agent": agent, "prompt": prompt, "description": "a task"})


def traced(*turns: Any, **options: Any) -> tuple[Any, Recorder]:
    recorder = Recorder()
    return agent_of(*turns, exporter=recorder, **options), recorder


def paying() -> Any:
    return define_tool(name="pay", description="Pays.", execute=lambda args: "paid", needs_approval=True)


# ---------------------------------------------------------------------------------------------------------------------- the tree


@pytest.mark.parametrize("how", ["send", "stream"])
async def test_a_run_has_a_span_for_itself_each_model_call_and_each_tool(how: str) -> None:
    # OBS-03, OBS-07, OBS-08
    agent, spans = traced(calls("look", "think"), "Done", tools=[plain("look"), plain("think")], name="helper")
    if how == "send":
        await agent.send("Hi")
    else:
        assert [event.type async for event in agent.stream("Hi")][-1] == "run.done"
    assert spans.tree() == [
        "invoke_agent helper",
        "  chat mock-model",
        "  execute_tool look",
        "  execute_tool think",
        "  chat mock-model",
    ]
    assert [span.kind for span in spans.ended if span.kind == "client"] == ["client"] * 2
    assert {span.kind for span in spans.ended if not span.name.startswith("chat")} == {"internal"}
    root = spans.one("invoke_agent")
    assert {span.trace_id for span in spans.ended} == {root.id}


async def test_sub_agents_hang_under_the_call_that_started_them_and_their_own_exporter_is_not_asked() -> None:
    # OBS-07, SUB-41
    own = Recorder()
    reader = agent_of("read", name="reader", description="Reads.", exporter=own)
    asker = agent_of(calls(task("reader")), "asked", name="asker", description="Asks.", subagents={"reader": reader})
    lead, spans = traced(calls(task("asker")), "Done", subagents={"asker": asker}, name="lead", max_subagent_depth=2)
    await lead.send("Hi")
    assert spans.tree() == [
        "invoke_agent lead",
        "  chat mock-model",
        "  execute_tool task",
        "    invoke_agent asker",
        "      chat mock-model",
        "      execute_tool task",
        "        invoke_agent reader",
        "          chat mock-model",
        "      chat mock-model",
        "  chat mock-model",
    ]
    assert own.ended == []


async def test_runs_side_by_side_do_not_mix_their_trees() -> None:
    # OBS-15
    worker = agent_of(*["worked"] * 40, name="worker", description="Works.")
    provider = PolicyProvider(lambda options: asks(task("worker"), task("worker")) if len(options.messages) < 3 else "Done")
    spans = Recorder()
    lead = create_agent(provider=provider, subagents={"worker": worker}, exporter=spans, name="lead")
    await asyncio.gather(*(lead.send("Hi") for _ in range(20)))
    tree = [
        "invoke_agent lead",
        "  chat policy-1",
        *["  execute_tool task", "    invoke_agent worker", "      chat mock-model"] * 2,
        "  chat policy-1",
    ]
    assert spans.tree() == tree * 20


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ("unknown", {}),
        (("strict", {"n": "no number"}), {}),
        ("guarded", {"permissions": [deny("guarded")]}),
        ("capped", {}),
        ("answered", {"hooks": "answers"}),
    ],
)
async def test_a_call_that_does_not_run_has_no_span(asked: Any, options: dict[str, Any]) -> None:
    # OBS-10

    class Answers:
        name = "answers"

        async def pre_tool_call(self, ctx: Any) -> Any:
            return {"result": "from the hook"}

    def strict(n: int) -> int:
        """Takes a number."""
        return n

    if options.get("hooks"):
        options = {"hooks": [Answers()]}
    capped = define_tool(name="capped", description="Once.", execute=lambda args: "x", max_calls_per_run=1)
    tools = [tool(strict), plain("guarded"), capped]
    first = calls("capped") if asked == "capped" else "skip"
    turns = [first, calls(asked), "Done"] if asked == "capped" else [calls(asked), "Done"]
    agent, spans = traced(*turns, tools=[*tools, plain("answered")], **options)
    await agent.send("Hi")
    assert len(spans.named("execute_tool")) == (1 if asked == "capped" else 0)


async def test_a_run_that_goes_on_after_a_decision_is_a_trace_of_its_own_that_names_the_paused_one() -> None:
    # OBS-11
    agent, spans = traced(calls("pay"), "Paid", calls("pay"), "Not paid", tools=[paying()], name="payer")
    paused = await agent.send("Pay")
    assert spans.tree() == ["invoke_agent payer", "  chat mock-model"]
    first = spans.one("invoke_agent")
    assert first.attributes[semconv.FINISH_REASON] == "awaiting-approval"
    spans.ended.clear()
    await agent.approvals.resolve(paused.approval_id, approved=True)
    assert spans.tree() == ["invoke_agent payer", "  execute_tool pay", "  chat mock-model"]
    second = spans.one("invoke_agent")
    assert second.attributes[semconv.RESUMED_FROM] == first.trace_id != second.trace_id
    rejected = await agent.send("Pay")
    spans.ended.clear()
    await agent.approvals.resolve(rejected.approval_id, approved=False)
    assert spans.tree() == ["invoke_agent payer", "  chat mock-model"]


async def test_a_pause_inside_a_sub_agent_goes_on_under_its_call() -> None:
    # OBS-11
    child = agent_of(calls("pay"), "Paid", name="payer", description="Pays.", tools=[paying()])
    lead, spans = traced(calls(task("payer")), "Done", subagents={"payer": child}, name="lead")
    paused = await lead.send("Go")
    assert spans.tree() == [
        "invoke_agent lead",
        "  chat mock-model",
        "  execute_tool task?",
        "    invoke_agent payer",
        "      chat mock-model",
    ]
    spans.ended.clear()
    await lead.approvals.resolve(paused.approval_id, approved=True)
    assert spans.tree() == [
        "invoke_agent lead",
        "  execute_tool task",
        "    invoke_agent payer",
        "      execute_tool pay",
        "      chat mock-model",
        "  chat mock-model",
    ]


async def test_a_turn_of_a_session_and_its_resume_are_traces_of_the_same_conversation() -> None:
    # OBS-14
    store = memory_store()
    broken, spans = traced(calls("look"), RuntimeError("gone"), tools=[plain("look")], store=store, name="talker")
    with pytest.raises(Exception, match="gone"):
        await broken.session("s1").send("Hi")
    assert spans.tree() == ["invoke_agent talker!", "  chat mock-model", "  execute_tool look", "  chat mock-model!"]
    first = spans.one("invoke_agent")
    agent = agent_of("Back", tools=[plain("look")], store=store, name="talker", exporter=spans)
    spans.ended.clear()
    await agent.session("s1").resume()
    assert spans.tree() == ["invoke_agent talker", "  chat mock-model"]
    second = spans.one("invoke_agent")
    assert second.trace_id != first.trace_id
    for span in (first, second, spans.one("chat")):
        assert span.attributes[semconv.CONVERSATION_ID] == "s1"


async def test_a_pending_turn_that_a_new_one_finishes_first_is_a_trace_too() -> None:
    # OBS-07, OBS-14
    store = memory_store()
    with pytest.raises(Exception, match="gone"):
        await agent_of(calls("look"), RuntimeError("gone"), tools=[plain("look")], store=store).session("s1").send("Hi")
    agent, spans = traced("Back", "New", tools=[plain("look")], store=store, name="talker")
    await agent.session("s1").resume()
    await agent.session("s1").send("More")
    assert spans.tree() == ["invoke_agent talker", "  chat mock-model"] * 2


async def test_durable_runs_of_plain_sends_are_traced() -> None:
    # OBS-07
    agent, spans = traced("One", "Two", store=memory_store(), name="keeper")
    await agent.send("Hi", session_id="r1")
    await agent.send("More", session_id="r1")
    assert spans.tree() == ["invoke_agent keeper", "  chat mock-model"] * 2


async def test_a_side_call_is_a_chat_with_its_purpose() -> None:
    # OBS-13
    judge = mock_model(["fine"])

    class Asks:
        name = "asks"

        async def pre_generate(self, ctx: Any) -> None:
            await ctx.generate(judge, GenerateOptions([user("Fine?")]), "judge")

    agent, spans = traced("Done", hooks=[Asks()])
    result = await agent.send("Hi")
    assert spans.tree() == ["invoke_agent agent", "  chat mock-model", "  chat mock-model"]
    side, own = spans.named("chat")
    assert side.attributes[semconv.PURPOSE] == "judge"
    assert semconv.PURPOSE not in own.attributes
    for span, entry in zip((side, own), result.step_usage, strict=True):
        assert span.attributes[semconv.INPUT_TOKENS] == entry.usage.prompt_tokens


# ------------------------------------------------------------------------------------------------------------------ how they end


async def test_a_model_call_that_fails_ends_its_span_and_the_runs_with_the_error_of_the_run() -> None:
    # OBS-03, OBS-18
    agent, spans = traced(RuntimeError("broken pipe"), name="x")
    with pytest.raises(Exception, match="broken pipe") as caught:
        await agent.send("Hi")
    assert spans.tree() == ["invoke_agent x!", "  chat mock-model!"]
    for span in spans.ended:
        assert span.attributes[semconv.ERROR_TYPE] == type(caught.value).__name__
        assert span.status is not None
        assert "broken pipe" in (span.status.message or "")
        assert span.attributes["error"] == span.status.message


async def test_a_tool_that_raises_fails_its_own_span_only() -> None:
    # OBS-18
    agent, spans = traced(calls("bad"), "Done", tools=[failing("bad", ValueError("no such row"))])
    await agent.send("Hi")
    assert spans.tree() == ["invoke_agent agent", "  chat mock-model", "  execute_tool bad!", "  chat mock-model"]
    span = spans.one("execute_tool")
    assert (span.attributes[semconv.ERROR_TYPE], span.attributes["error"]) == ("ValueError", "no such row")


async def test_a_tool_that_ends_the_run_fails_all_above_it() -> None:
    # OBS-18
    error = PropagatingToolError("stop everything", tool_name="bad")
    agent, spans = traced(calls("bad"), tools=[failing("bad", error)])
    with pytest.raises(PropagatingToolError):
        await agent.send("Hi")
    assert spans.tree() == ["invoke_agent agent!", "  chat mock-model", "  execute_tool bad!"]


async def test_an_aborted_run_has_no_verdict_and_what_it_cut_short_is_an_error() -> None:
    # OBS-18
    gate = Gate("slow")
    agent, spans = traced(calls("slow"), tools=[gate.tool])
    run = agent.stream("Hi")
    await gate.running.wait()
    run.abort("enough")
    assert (await run.result).finish_reason == "aborted"
    assert spans.tree() == ["invoke_agent agent?", "  chat mock-model", "  execute_tool slow!"]
    assert spans.one("invoke_agent").attributes[semconv.ERROR_TYPE] == "AbortError"
    tool = spans.one("execute_tool")
    assert (tool.attributes[semconv.ERROR_TYPE], tool.attributes["error"]) == ("AbortError", "enough")


async def test_a_reply_that_is_cut_by_an_abort_is_an_error() -> None:
    # OBS-03, OBS-18
    provider, spans = ScriptedStream([TextChunk("Part"), asyncio.Event(), FinishChunk("stop")]), Recorder()
    run = create_agent(provider=provider, exporter=spans).stream("Hi")
    await provider.reached(0, 1).wait()
    run.abort("enough")
    await run.result
    assert spans.tree() == ["invoke_agent agent?", "  chat scripted-1!"]
    assert spans.one("chat").attributes[semconv.ERROR_TYPE] == "AbortError"


async def test_leaving_a_stream_early_ends_every_span() -> None:
    # OBS-03
    provider, spans = ScriptedStream([TextChunk("Part"), asyncio.Event(), FinishChunk("stop")]), Recorder()
    async with create_agent(provider=provider, exporter=spans).stream("Hi") as run:
        async for event in run:
            if event.type == "text.delta":
                break
    assert spans.tree() == ["invoke_agent agent?", "  chat scripted-1!"]


async def test_a_cancelled_task_ends_every_span() -> None:
    # OBS-03, OBS-18
    gate = Gate("slow")
    agent, spans = traced(calls("slow"), tools=[gate.tool])
    sending = asyncio.create_task(agent.send("Hi"))
    await gate.running.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert spans.tree() == ["invoke_agent agent?", "  chat mock-model", "  execute_tool slow!"]


async def test_a_tool_left_behind_by_an_abort_ends_with_the_run() -> None:
    # OBS-03
    started, go = asyncio.Event(), asyncio.Event()

    async def deaf() -> str:
        """Ignores being cancelled."""
        started.set()
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    agent, spans = traced(calls("deaf"), tools=[tool(deaf)], abort_grace_ms=1)
    run = agent.stream("Hi")
    await started.wait()
    run.abort()
    await run.result
    assert spans.tree() == ["invoke_agent agent?", "  chat mock-model", "  execute_tool deaf!"]
    go.set()
    await asyncio.sleep(0)
    assert len(spans.ended) == 3


async def test_a_steer_cuts_a_call_short_without_an_error() -> None:
    # OBS-09
    provider, spans = ScriptedStream([asyncio.Event()], say("Now")), Recorder()
    run = create_agent(provider=provider, exporter=spans).stream("Hi")
    await provider.reached(0, 0).wait()
    run.steer("Wait")
    await run.result
    assert spans.tree() == ["invoke_agent agent", "  chat scripted-1?", "  chat scripted-1"]
    assert spans.named("chat")[0].attributes[semconv.FINISH_REASON] == "steered"


async def test_a_run_without_a_consumer_ends_its_spans() -> None:
    # OBS-D4
    agent, spans = traced("Done")
    run = agent.stream("Hi")
    await run.result
    assert spans.tree() == ["invoke_agent agent", "  chat mock-model"]


# ------------------------------------------------------------------------------------------------------------------- attributes


async def test_what_is_on_the_span_of_a_run() -> None:
    # OBS-04, OBS-16, OBS-20
    register_model(id="priced-1", provider="policy", input_cost_per_mtok=1.0, output_cost_per_mtok=10.0)
    usage = ProviderUsage(1000, 100)
    child = create_agent(provider=_priced("priced-1", usage), name="child", description="Does.")
    spans = Recorder()
    provider = _priced("priced-1", usage, first=asks(task("child"), usage=usage))
    lead = create_agent(provider=provider, subagents={"child": child}, exporter=spans, name="lead")
    result = await lead.session("s7").send("Hi")
    root = next(span for span in spans.named("invoke_agent") if span.parent_id is None)
    assert spans.at_start[root.id] == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "lead",
        "gen_ai.provider.name": "policy",
        "gen_ai.conversation.id": "s7",
    }
    added = {key: value for key, value in root.attributes.items() if key not in spans.at_start[root.id]}
    assert added.pop("latencyMs") >= 0
    assert added == {
        "lousho.cost_usd": result.usage.cost_usd,
        "lousho.finish_reason": "stop",
        "finishReason": "stop",
        "lousho.steps": 2,
    }
    assert result.usage.cost_usd == pytest.approx(3 * 0.002)
    assert sum(span.attributes[semconv.COST_USD] for span in spans.named("chat")) == pytest.approx(result.usage.cost_usd)
    below = next(span for span in spans.named("invoke_agent") if span.parent_id is not None)
    assert below.attributes[semconv.COST_USD] == pytest.approx(0.002)


def _priced(model: str, usage: ProviderUsage, *, first: GenerateResult | None = None) -> PolicyProvider:
    def policy(options: GenerateOptions) -> GenerateResult:
        if first is not None and len(options.messages) == 2:
            return GenerateResult("", first.tool_calls, "tool_calls", usage)
        return GenerateResult("Done", usage=usage)

    return PolicyProvider(policy, default_model=model)


async def test_one_call_of_unknown_cost_leaves_the_cost_of_all_above_it_out() -> None:
    # OBS-20
    register_model(id="priced-1", provider="policy", input_cost_per_mtok=1.0, output_cost_per_mtok=10.0)
    usage = ProviderUsage(1000, 100)
    child = create_agent(provider=_priced("of-no-price", usage), name="child", description="Does.")
    spans = Recorder()
    provider = _priced("priced-1", usage, first=asks(task("child")))
    await create_agent(provider=provider, subagents={"child": child}, exporter=spans, name="lead").send("Hi")
    assert [semconv.COST_USD in span.attributes for span in spans.named("invoke_agent")] == [False, False]
    assert [semconv.COST_USD in span.attributes for span in spans.named("chat priced-1")] == [True, True]
    assert semconv.COST_USD not in spans.one("chat of-no-price").attributes


async def test_what_is_on_the_span_of_a_model_call() -> None:
    # OBS-16, OBS-19, OBS-27, OBS-D3
    usage = ProviderUsage(100, 20, cached_input_tokens=60, cache_write_tokens=5, reasoning_tokens=8, cost_usd=0.5)
    reply = GenerateResult("Hi", usage=usage, response_model="asked-1-2026", served_by=ServedBy("other", "asked-1"))
    spans = Recorder()
    settings = {"temperature": 0.5, "max_tokens": 50, "top_p": 0.9, "stop": ["END"], "seed": 7}
    agent = create_agent(provider=PolicyProvider(lambda _: reply), model="asked-1", model_settings=settings, exporter=spans)
    await agent.session("s1").send("Hi")
    span = spans.one("chat asked-1")
    at_start = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "policy",
        "gen_ai.request.model": "asked-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.stop_sequences": ["END"],
        "gen_ai.request.seed": 7,
        "gen_ai.conversation.id": "s1",
        "model": "asked-1",
    }
    assert spans.at_start[span.id] == at_start
    assert span.attributes.pop("latencyMs") >= 0
    assert span.attributes == {
        **at_start,
        "gen_ai.provider.name": "other",
        "gen_ai.response.model": "asked-1-2026",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 60,
        "gen_ai.usage.cache_creation.input_tokens": 5,
        "lousho.usage.reasoning_tokens": 8,
        "lousho.cost_usd": 0.5,
        "promptTokens": 100,
        "completionTokens": 20,
        "totalTokens": 120,
        "finishReason": "stop",
    }


async def test_estimated_figures_are_marked_up_to_the_root() -> None:
    # OBS-19, OBS-20
    agent, spans = traced(calls("look"), "Done", tools=[plain("look")])
    result = await agent.send("Hi")
    assert [span.attributes.get(semconv.USAGE_ESTIMATED) for span in spans.ended] == [True, None, True, True]
    first, second = spans.named("chat")
    assert first.attributes[semconv.RESPONSE_FINISH_REASONS] == ["tool_call"]
    assert first.attributes["finishReason"] == "tool_calls"
    for span, entry in zip((first, second), result.step_usage, strict=True):
        assert span.attributes[semconv.INPUT_TOKENS] == entry.usage.prompt_tokens
        assert span.attributes[semconv.OUTPUT_TOKENS] == entry.usage.completion_tokens


async def test_what_is_on_the_span_of_a_tool() -> None:
    # OBS-16, OBS-27
    agent, spans = traced(calls("look"), "Done", tools=[plain("look")], name="helper")
    await agent.session("s1").send("Hi")
    span = spans.one("execute_tool look")
    assert span.attributes.pop("latencyMs") >= 0
    assert span.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.call.id": "call_1",
        "gen_ai.tool.description": plain("look").definition.description,
        "gen_ai.tool.type": "function",
        "gen_ai.agent.name": "helper",
        "gen_ai.conversation.id": "s1",
        "toolName": "look",
    }


async def test_retries_and_fallbacks_are_on_the_one_span_of_their_call() -> None:
    # OBS-09
    class RateLimited(Exception):
        status_code, body = 429, None

    def flaky(options: GenerateOptions) -> Any:
        raise RateLimited("x" * 300)

    quick = {"max_retries": 1, "backoff": {"initial_ms": 0.01, "max_ms": 0.01}}
    first = with_retry(PolicyProvider(flaky, name="first", default_model="m1"), quick)
    second = PolicyProvider(lambda _: "Hello", name="second", default_model="m2")
    spans = Recorder()
    await create_agent(provider=with_fallback([first, second]), exporter=spans).send("Hi")
    span = spans.one("chat m1")
    assert span.attributes[semconv.PROVIDER_NAME] == "second"
    assert span.attributes[semconv.RETRY_COUNT] == 2
    errors = span.attributes[semconv.RETRY_ERRORS]
    assert [text.split(":")[0] for text in errors] == ["rate-limit", "fallback"]
    assert all(len(text) <= 200 for text in errors)
    assert span.status is not None
    assert span.status.code == "ok"


async def test_the_wait_for_a_limiter_is_on_the_span_of_the_call_that_waited() -> None:
    # OBS-09, RL-25
    clock, spans = FakeClock(), Recorder()
    provider = with_rate_limit(mock_model([calls("look"), "Done"]), {"requests_per_minute": 1}, clock=clock)
    run = asyncio.create_task(create_agent(provider=provider, tools=[plain("look")], exporter=spans).send("Hi"))
    await until(lambda: len(spans.named("execute_tool")) == 1)
    await clock.run_for(60_001)
    await run
    first, second = spans.named("chat")
    assert semconv.RATE_LIMIT_WAIT_MS not in first.attributes
    assert second.attributes[semconv.RATE_LIMIT_WAIT_MS] == pytest.approx(60_000)


# ---------------------------------------------------------------------------------------------------------------------- content

MARK = "ocelot-7316"


async def _all_content(**options: Any) -> Recorder:
    """A run, traced, with a marker in its prompt, reply, arguments, results, and in what the principal and metadata hold."""
    spans = Recorder()

    @tool
    def look(q: str) -> str:
        """Looks."""
        return f"{MARK} found"

    child = agent_of(calls(("look", {"q": MARK})), f"{MARK} said", name="child", description="Does.", tools=[look])
    lead = agent_of(
        calls(("look", {"q": MARK}), task("child", MARK), text=MARK),
        f"The {MARK}.",
        tools=[look],
        subagents={"child": child},
        instructions=f"Speak of {MARK}.",
        exporter=spans,
        **options,
    )
    result = await lead.send(f"Where is {MARK}?", principal={"name": MARK}, metadata={"key": MARK})
    assert MARK in result.text
    assert spans.tree()
    return spans


async def test_by_default_a_trace_holds_no_content() -> None:
    # OBS-17, OBS-25
    spans = await _all_content()
    assert MARK not in repr(spans.ended)
    assert MARK not in repr(spans.at_start)


async def test_content_is_recorded_when_it_is_asked_for() -> None:
    # OBS-21, OBS-22, OBS-23, OBS-26
    spans = await _all_content(capture_content=True)
    root = spans.one("invoke_agent agent")
    assert json.loads(root.attributes[semconv.INPUT_MESSAGES]) == [
        {"role": "user", "parts": [{"type": "text", "content": f"Where is {MARK}?"}]}
    ]
    (rules,) = json.loads(root.attributes[semconv.SYSTEM_INSTRUCTIONS])
    assert rules["content"].startswith(f"Speak of {MARK}.")
    last = spans.named("chat")[-1]
    told = json.loads(last.attributes[semconv.INPUT_MESSAGES])
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "tool"]
    assert told[1]["parts"][0] == {"type": "text", "content": MARK}
    assert told[1]["parts"][1] == {"type": "tool_call", "id": "call_1", "name": "look", "arguments": {"q": MARK}}
    assert told[2]["parts"] == [{"type": "tool_call_response", "id": "call_1", "response": json.dumps(f"{MARK} found")}]
    assert json.loads(last.attributes[semconv.OUTPUT_MESSAGES]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": f"The {MARK}."}]}
    ]
    tool = spans.named("execute_tool look")[0]
    assert json.loads(tool.attributes[semconv.TOOL_CALL_ARGUMENTS]) == {"q": MARK}
    assert json.loads(tool.attributes[semconv.TOOL_CALL_RESULT]) == f"{MARK} found"
    child = spans.one("invoke_agent child")
    assert MARK in child.attributes[semconv.INPUT_MESSAGES]
    assert not {"input", "prompt", "args", "result"} & {name for span in spans.ended for name in span.attributes}


async def test_a_tool_that_failed_has_no_result() -> None:
    # OBS-22
    agent, spans = traced(calls("bad"), "Done", tools=[failing("bad", ValueError("no"))], capture_content=True)
    await agent.send("Hi")
    tool = spans.one("execute_tool")
    assert semconv.TOOL_CALL_ARGUMENTS in tool.attributes
    assert semconv.TOOL_CALL_RESULT not in tool.attributes


async def test_bytes_are_named_and_not_recorded() -> None:
    # OBS-23
    agent, spans = traced("Seen", capture_content=True)
    parts = [TextPart("Look"), ImagePart(b"\x89PNG1234", "image/png"), FilePart(b"12345", "application/pdf", "a.pdf")]
    await agent.send([*parts, ImagePart("https://example.org/a.png")])
    (message,) = json.loads(spans.one("invoke_agent").attributes[semconv.INPUT_MESSAGES])
    assert message["parts"] == [
        {"type": "text", "content": "Look"},
        {"type": "blob", "mime_type": "image/png", "size": 8},
        {"type": "blob", "mime_type": "application/pdf", "size": 5},
        {"type": "uri", "mime_type": None, "uri": "https://example.org/a.png"},
    ]


async def test_the_deprecated_names_of_content_are_kept_when_asked_for() -> None:
    # OBS-24, OBS-27
    spans = await _all_content(redact_content=False)
    assert MARK in spans.one("invoke_agent agent").attributes["input"]
    assert MARK in spans.named("chat")[-1].attributes["prompt"]
    assert spans.named("chat")[-1].attributes["result"] == f"The {MARK}."
    tool = spans.named("execute_tool look")[0]
    assert json.loads(tool.attributes["args"]) == {"q": MARK}
    assert json.loads(tool.attributes["result"]) == f"{MARK} found"
    assert not any(
        name.startswith("gen_ai") and MARK in str(value) for span in spans.ended for name, value in span.attributes.items()
    )


@pytest.mark.parametrize(
    ("option", "variable", "recorded"),
    [
        (None, "true", True),
        (None, "TRUE", True),
        (None, "1", False),
        (None, None, False),
        (False, "true", False),
        (True, None, True),
    ],
)
async def test_the_environment_decides_where_the_option_does_not(
    monkeypatch: pytest.MonkeyPatch, option: bool | None, variable: str | None, recorded: bool
) -> None:
    # OBS-21
    agent, spans = traced("Done", **({} if option is None else {"capture_content": option}))
    if variable is not None:
        monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", variable)
    await agent.send("Hi")
    assert (semconv.INPUT_MESSAGES in spans.one("invoke_agent").attributes) is recorded


@pytest.mark.parametrize("redact", [True, False])
async def test_arguments_are_in_decisions_unless_content_is_left_out(redact: bool) -> None:
    # OBS-24, OBS-D1, EVT-21, PERM-47, CA-24
    agent = agent_of(calls("look"), "Done", tools=[plain("look")], permissions=[allow("look")], redact_content=redact)
    (decision,) = [event async for event in agent.stream("Hi") if event.type == "permission.decision"]
    assert (decision.args is None) is redact


# -------------------------------------------------------------------------------------------------------------- broken exporters


async def test_an_exporter_that_raises_changes_nothing_and_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    # OBS-05

    class Broken:
        def on_span_start(self, span: Any) -> None:
            raise RuntimeError("start")

        def on_span_end(self, span: Any) -> None:
            raise SystemExit(3)

    agent = agent_of(calls("look"), "Done", "Again", tools=[plain("look")], exporter=Broken())
    assert (await agent.send("Hi")).text == "Done"
    assert (await agent.send("Hi")).text == "Again"
    assert [record.message.split(" raised")[0] for record in caplog.records] == ["The exporter Broken"]
