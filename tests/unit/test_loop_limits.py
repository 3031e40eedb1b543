"""What a run may spend: every limit, when it is looked at, how it ends a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lousho_ray.agent import Agent
from lousho_ray.cancellation import AbortSignal
from lousho_ray.create import create_agent
from lousho_ray.errors import BudgetExceededError, ConfigurationError
from lousho_ray.events import Event
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.open import RunContext
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.run import run
from lousho_ray.messages import user
from lousho_ray.ports import FinishChunk, GenerateOptions, GenerateResult, TextChunk
from lousho_ray.providers.prices import register_model
from lousho_ray.runtime import create_runtime
from lousho_ray.subagents import open_with_subagents
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import (
    Gate,
    PolicyProvider,
    ScriptedStream,
    agent_of,
    asks,
    calls,
    check_events,
    check_transcript,
    failing,
    kinds,
    names,
    plain,
)

USED = {"input_tokens": 100, "output_tokens": 20}


def looping(**options: Any) -> Agent[Any]:
    """An agent whose model asks for a tool again and again; each call takes 100 + 20 tokens."""
    model = mock_model([calls("look", usage=USED)], on_exhausted="repeat-last")
    return create_agent(provider=model, tools=[plain("look")], **options)


# ------------------------------------------------------------------------------------------------------------------ the values


@pytest.mark.parametrize("key", ["max_tokens", "max_input_tokens", "max_output_tokens", "max_steps", "max_tool_errors"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3", float("nan"), float("inf")])
def test_whole_numbers_only(key: str, value: Any) -> None:
    # BUD-02, CA-06
    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", limits={key: value})
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", f"limits.{key}")


@pytest.mark.parametrize("key", ["max_cost_usd", "max_duration_ms"])
@pytest.mark.parametrize("value", [0, -1, True, "3", float("nan"), float("inf")])
def test_numbers_above_zero_only(key: str, value: Any) -> None:
    # BUD-02, CA-06
    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", limits={key: value})
    assert caught.value.field == f"limits.{key}"


def test_an_unknown_key_has_a_suggestion() -> None:
    # BUD-02, RUN-58
    with pytest.raises(ConfigurationError, match="max_tokens") as caught:
        agent_of("x", limits={"max_token": 5})
    assert caught.value.field == "limits.max_token"
    with pytest.raises(ConfigurationError, match="max_steps"):
        agent_of("x", limits={"maxSteps": 5})


async def test_no_limits_limit_nothing_but_steps() -> None:
    # BUD-02, BUD-12
    result = await looping(limits={}).send("Go")
    assert (result.finish_reason, result.steps, result.budget) == ("max-steps", 10, None)


async def test_limits_are_no_option_of_a_call() -> None:
    # BUD-01, CA-33
    with pytest.raises(ConfigurationError, match=r"create_agent\(\)"):
        await agent_of("x").send("Hi", limits={"max_tokens": 1})


# ------------------------------------------------------------------------------------------------------------ tokens and cost


@pytest.mark.parametrize(
    ("limits", "limit", "value", "steps"),
    [
        ({"max_tokens": 240}, "maxTokens", 240, 2),
        ({"max_tokens": 241}, "maxTokens", 360, 3),
        ({"max_input_tokens": 100}, "maxInputTokens", 100, 1),
        ({"max_output_tokens": 60}, "maxOutputTokens", 60, 3),
    ],
)
async def test_a_limit_trips_when_it_is_reached(limits: dict[str, Any], limit: str, value: int, steps: int) -> None:
    # BUD-03, BUD-04, BUD-06, BUD-08, RUN-59, RUN-60, RUN-64
    result = await looping(limits=limits).send("Go")
    assert (result.finish_reason, result.steps) == ("budget-exceeded", steps)
    assert result.budget is not None
    assert result.budget.to_dict() == {"limit": limit, "value": value, "max": next(iter(limits.values())), "scope": "run"}
    assert kinds(result.messages) == ["ok"] * (steps - 1) + ["not-run"]
    check_transcript(result.messages)


async def test_cost_is_what_the_price_table_says() -> None:
    # COST-10, RUN-62
    register_model(id="priced-1", provider="mock", context_window=1000, input_cost_per_mtok=10_000.0, output_cost_per_mtok=0.0)
    model = mock_model([calls("look", usage=USED)], on_exhausted="repeat-last", default_model="priced-1")
    result = await create_agent(provider=model, tools=[plain("look")], limits={"max_cost_usd": 2.0}).send("Go")
    assert result.budget is not None
    assert (result.budget.limit, result.budget.value, result.steps) == ("maxCostUsd", 2.0, 2)
    assert result.usage.cost_usd == 2.0


async def test_a_cost_the_provider_reports_wins_over_the_table() -> None:
    # COST-10, RUN-62
    usage = ProviderUsage(100, 20, cost_usd=0.5)
    provider = PolicyProvider(lambda options: asks("look", usage=usage), default_model="priced-1")
    result = await create_agent(provider=provider, tools=[plain("look")], limits={"max_cost_usd": 1.5}).send("Go")
    assert (result.steps, result.usage.cost_usd) == (3, 1.5)
    assert result.finish_reason == "budget-exceeded"


async def test_an_unknown_price_is_not_checked_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    # COST-11, COST-12, RUN-62, RUN-71
    result = await looping(limits={"max_cost_usd": 0.000001}, max_steps=3).send("Go")
    warnings = [record.getMessage() for record in caplog.records if "register_model" in record.getMessage()]
    assert len(warnings) == 1
    assert "mock-model" in warnings[0]
    assert result.finish_reason == "max-steps"
    assert result.usage.cost_usd is None
    assert result.usage.by_model["mock-model"].cost_usd is None


async def test_a_run_that_ends_by_itself_keeps_its_reason() -> None:
    # BUD-05, RUN-60
    for reason in ("stop", "length"):
        result = await agent_of({"text": "Done", "usage": USED, "finish_reason": reason}, limits={"max_tokens": 1}).send("Go")
        assert (result.finish_reason, result.budget, result.text) == (reason, None, "Done")


async def test_an_estimated_call_counts() -> None:
    # BUD-15, COST-05, RUN-70
    result = await agent_of(calls("look"), tools=[plain("look")], limits={"max_tokens": 1}).send("Go")
    assert result.finish_reason == "budget-exceeded"
    assert result.usage.estimated
    assert result.step_usage[0].estimated


async def test_of_several_limits_the_first_of_the_table_is_reported() -> None:
    # BUD-10
    limits = {"max_output_tokens": 1, "max_input_tokens": 1, "max_tokens": 1}
    result = await looping(limits=limits).send("Go")
    assert result.budget is not None
    assert result.budget.limit == "maxTokens"


async def test_text_of_a_stopped_reply_stands() -> None:
    # BUD-14
    result = await agent_of(calls("look", text="Let me see", usage=USED), tools=[plain("look")], limits={"max_tokens": 1}).send(
        "Go"
    )
    assert result.text == "Let me see"
    assert [call.name for call in result.tool_calls] == ["look"]  # RUN-49: asked for, though it did not run


async def test_throw_raises_with_the_budget_and_the_usage() -> None:
    # BUD-09, RUN-64, ERR-14
    with pytest.raises(BudgetExceededError) as caught:
        await looping(limits={"max_tokens": 200, "on_exceeded": "throw"}).send("Go")
    error: Any = caught.value
    assert error.code == "LOUSHO_BUDGET_EXCEEDED"
    assert error.budget == {"limit": "maxTokens", "value": 240, "max": 200, "scope": "run"}
    assert error.usage.total_tokens == 240


# ------------------------------------------------------------------------------------------------------- steps and tool errors


@pytest.mark.parametrize(
    ("option", "limit", "reason", "steps"),
    [
        (None, None, "max-steps", 10),
        (3, None, "max-steps", 3),
        (None, 3, "budget-exceeded", 3),
        (None, 12, "budget-exceeded", 12),
        (5, 3, "budget-exceeded", 3),
        (3, 5, "max-steps", 3),
        (3, 3, "max-steps", 3),
        (1, None, "max-steps", 1),
        (None, 1, "budget-exceeded", 1),
    ],
)
@pytest.mark.parametrize("per_call", [False, True])
async def test_max_steps_of_option_and_limit(
    option: int | None, limit: int | None, reason: str, steps: int, per_call: bool
) -> None:
    # BUD-12, RUN-20, RUN-63, RUN-D3, CA-34
    limits = {} if limit is None else {"max_steps": limit}
    if per_call:
        result = await looping(limits=limits, max_steps=None if option is None else 7).send("Go", max_steps=option)
    else:
        result = await looping(limits=limits, max_steps=option).send("Go")
    assert (result.finish_reason, result.steps) == (reason, steps)
    assert kinds(result.messages) == ["ok"] * steps  # the last allowed step's tools ran
    if reason == "budget-exceeded":
        assert result.budget is not None
        assert (result.budget.limit, result.budget.value, result.budget.max) == ("maxSteps", steps, limit)
    check_transcript(result.messages)


async def test_a_final_reply_in_the_last_step_keeps_stop() -> None:
    # RUN-48
    result = await agent_of(calls("look"), "Done", tools=[plain("look")], max_steps=2).send("Go")
    assert (result.finish_reason, result.text, result.steps) == ("stop", "Done", 2)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3"])
async def test_a_bad_max_steps_is_refused_at_creation_and_at_a_call(value: Any) -> None:
    # RUN-03
    for attempt in (lambda: agent_of("x", max_steps=value), lambda: agent_of("x").stream("Hi", max_steps=value)):
        with pytest.raises(ConfigurationError) as caught:
            attempt()
        assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", "max_steps")
    with pytest.raises(ConfigurationError):
        await agent_of("x").send("Hi", max_steps=value)


async def test_tool_errors_stop_the_run_before_its_next_model_call() -> None:
    # RUN-44, RUN-D3, BUD-04, TOOL-33
    turn = calls("bad", "bad", "nope", usage=USED)
    agent = agent_of(turn, turn, tools=[failing("bad", ValueError("no"))], limits={"max_tool_errors": 3})
    result = await agent.send("Go")
    assert (result.finish_reason, result.steps, result.tool_errors) == ("budget-exceeded", 1, 3)
    assert result.budget is not None
    assert result.budget.to_dict() == {"limit": "maxToolErrors", "value": 3, "max": 3, "scope": "run"}
    assert kinds(result.messages) == ["execution", "execution", "not-found"]


# ------------------------------------------------------------------------------------------------------------------ duration


async def opened(agent: Agent[Any], clock: FakeClock) -> tuple[asyncio.Task[ExecutionResult[Any]], list[Event], AbortSignal]:
    """A run on a clock that stands still; its events; its abort signal."""
    log: list[Event] = []
    context = RunContext("run_1", (user("Go"),), Emitter(Stamp("run_1", clock), [log.append]), AbortSignal(), clock=clock)
    spawner = create_runtime("local").spawner()
    state, deps = await open_with_subagents(agent.definition, "", context, 1, spawner)
    return asyncio.ensure_future(run(state, deps)), log, context.abort


async def test_the_deadline_interrupts_a_model_call() -> None:
    # BUD-07, RUN-61
    clock, provider = FakeClock(), ScriptedStream([TextChunk("Part"), asyncio.Event()])
    running, log, _ = await opened(create_agent(provider=provider, limits={"max_duration_ms": 1000}), clock)
    await provider.reached(0, 1).wait()
    clock.advance(999)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not running.done()
    clock.advance(1)
    result = await running
    assert (result.finish_reason, result.abort_reason) == ("budget-exceeded", None)
    assert result.budget is not None
    assert result.budget.to_dict() == {"limit": "maxDurationMs", "value": 1000, "max": 1000, "scope": "run"}
    assert names(log)[-3:] == ["step.done 1 aborted", "budget.exceeded maxDurationMs", "run.done budget-exceeded"]
    check_events(log)
    assert clock.waiting == 0
    assert provider.closed == 1


async def test_the_deadline_interrupts_a_tool() -> None:
    # BUD-07, RUN-61
    clock, gate = FakeClock(), Gate("slow")
    agent = agent_of(calls("quick", "slow"), tools=[plain("quick"), gate.tool], limits={"max_duration_ms": 1000})
    running, log, _ = await opened(agent, clock)
    await gate.running.wait()
    clock.advance(1000)
    result = await running
    assert result.finish_reason == "budget-exceeded"
    assert gate.cancelled == 1
    assert kinds(result.messages) == ["ok", "not-run"]
    check_events(log)
    check_transcript(result.messages)


async def test_the_deadline_of_a_lead_interrupts_its_subagents() -> None:
    # BUD-20, SUB-33
    clock, gate = FakeClock(), Gate("slow")
    child = agent_of(calls("slow", usage=USED), name="child", description="Works.", tools=[gate.tool])
    task = ("task", {"agent": "child", "prompt": "Work", "description": "work"})
    lead = agent_of(calls(task, usage=USED), subagents={"child": child}, limits={"max_duration_ms": 1000})
    running, log, _ = await opened(lead, clock)
    await gate.running.wait()
    clock.advance(1000)
    result = await running
    assert result.finish_reason == "budget-exceeded"
    assert result.budget is not None
    assert result.budget.limit == "maxDurationMs"
    assert result.usage.total_tokens == 240  # the child's call counts although it was stopped
    assert gate.cancelled == 1
    check_events(log)
    check_transcript(result.messages)


async def test_an_abort_that_came_first_wins() -> None:
    # BUD-10
    clock, gate = FakeClock(), Gate("slow")
    running, _, abort = await opened(agent_of(calls("slow"), tools=[gate.tool], limits={"max_duration_ms": 1000}), clock)
    await gate.running.wait()
    abort.abort("user")
    clock.advance(1000)
    result = await running
    assert (result.finish_reason, result.budget) == ("aborted", None)


async def test_a_run_that_ends_before_its_deadline_leaves_no_timer() -> None:
    # BUD-D3
    clock = FakeClock()
    running, _, _ = await opened(agent_of("Done", limits={"max_duration_ms": 1000}), clock)
    assert (await running).ok
    assert clock.waiting == 0


async def test_a_duration_reached_between_calls_stops_before_the_next() -> None:
    # BUD-04, BUD-07
    clock = FakeClock()

    async def policy(options: GenerateOptions) -> GenerateResult:
        clock.advance(600)
        return asks("look", usage=ProviderUsage(1, 1))

    provider = PolicyProvider(policy)
    agent = create_agent(provider=provider, tools=[plain("look")], limits={"max_duration_ms": 1000})
    running, log, _ = await opened(agent, clock)
    result = await running
    assert provider.calls == 2
    assert result.finish_reason == "budget-exceeded"
    assert result.budget is not None
    assert result.budget.limit == "maxDurationMs"
    assert result.budget.value >= 1000
    check_events(log)


async def test_the_real_clock_interrupts_too() -> None:
    # BUD-07
    provider = ScriptedStream([asyncio.Event()])
    result = await create_agent(provider=provider, limits={"max_duration_ms": 20}).send("Go")
    assert result.finish_reason == "budget-exceeded"
    assert result.budget is not None
    assert result.budget.value >= 20


# ------------------------------------------------------------------------------------------------------------- shared with a tree


def task(agent: str, prompt: str = "Do it") -> tuple[str, dict[str, str]]:
    return ("task", {"agent": agent, "prompt": prompt, "description": "a task"})


async def test_eight_parallel_subagents_overshoot_by_at_most_one_call_each() -> None:
    # BUD-17, BUD-18, BUD-21, RUN-65, RUN-66, SUB-33, SUB-35
    register_model(id="dollar", provider="x", context_window=1000, input_cost_per_mtok=1_000_000.0, output_cost_per_mtok=0.0)
    arrived = 0
    everyone = asyncio.Event()

    async def work(options: GenerateOptions) -> GenerateResult:
        nonlocal arrived
        arrived += 1
        if arrived == 8:
            everyone.set()
        await everyone.wait()
        return asks("look", usage=ProviderUsage(1, 0))

    worker = PolicyProvider(work, default_model="dollar")
    child = create_agent(provider=worker, name="worker", description="Works.", tools=[plain("look")])
    leader = PolicyProvider(lambda options: asks(*[task("worker")] * 8, usage=ProviderUsage(1, 0)), default_model="dollar")
    lead = create_agent(provider=leader, subagents={"worker": child}, limits={"max_cost_usd": 3.0})
    result = await lead.send("Go")
    assert leader.calls == 1
    assert worker.calls == 8
    assert leader.calls + worker.calls <= 3 + 8
    assert result.finish_reason == "budget-exceeded"
    assert result.budget is not None
    assert (result.budget.limit, result.budget.value) == ("maxCostUsd", 9.0)
    assert result.usage.cost_usd == 9.0
    texts = [message.text for message in result.messages if message.role == "tool"]
    assert len(texts) == 8
    assert all("Sub-agent 'worker' stopped at the maxCostUsd limit" in text for text in texts)
    check_transcript(result.messages)


async def test_subagents_one_after_another_stop_at_the_shared_limit() -> None:
    # BUD-17, BUD-19, SUB-34
    worker = PolicyProvider(lambda options: asks("look", usage=ProviderUsage(10, 0)))
    child = create_agent(provider=worker, name="worker", description="Works.", tools=[plain("look")], max_steps=50)
    leader = PolicyProvider(lambda options: asks(task("worker"), usage=ProviderUsage(10, 0)))
    for on_exceeded in ("stop", "throw"):
        worker.calls = leader.calls = 0
        limits = {"max_tokens": 55, "on_exceeded": on_exceeded}
        lead = create_agent(provider=leader, subagents={"worker": child}, limits=limits)
        if on_exceeded == "throw":
            with pytest.raises(BudgetExceededError):
                await lead.send("Go")
        else:
            result = await lead.send("Go")
            assert result.finish_reason == "budget-exceeded"
            assert result.usage.total_tokens == 60
        assert (leader.calls, worker.calls) == (1, 5)


async def test_a_childs_own_limit_comes_first_and_stops_only_the_child() -> None:
    # BUD-18, SUB-11, SUB-33
    worker = PolicyProvider(lambda options: asks("look", usage=ProviderUsage(10, 0)))
    child = create_agent(
        provider=worker, name="worker", description="Works.", tools=[plain("look")], limits={"max_input_tokens": 20}
    )
    lead = agent_of(calls(task("worker")), "Done", subagents={"worker": child}, limits={"max_tokens": 100_000})
    result = await lead.send("Go")
    assert result.ok
    assert kinds(result.messages) == ["execution"]
    assert "Sub-agent 'worker' stopped at the maxInputTokens limit" in result.messages[-2].text
    assert worker.calls == 2


async def test_steps_and_tool_errors_of_a_lead_are_not_shared() -> None:
    # BUD-20, BUD-D1, SUB-33
    child = agent_of(
        calls("bad"), calls("bad"), calls("bad"), "Found", name="w", description="Works.", tools=[failing("bad", ValueError("no"))]
    )
    lead = agent_of(calls(task("w")), "Done", subagents={"w": child}, limits={"max_steps": 2, "max_tool_errors": 2})
    result = await lead.send("Go")
    assert (result.finish_reason, result.tool_errors) == ("stop", 0)


async def test_a_nested_subagent_is_held_to_every_lead_above() -> None:
    # BUD-22, RUN-66, SUB-35
    worker = PolicyProvider(lambda options: asks("look", usage=ProviderUsage(10, 0)))
    low = create_agent(provider=worker, name="low", description="Works.", tools=[plain("look")], max_steps=50)
    middle = agent_of(
        calls(task("low"), usage={"input_tokens": 10}), "M", name="middle", description="Leads.", subagents={"low": low}
    )
    top = agent_of(
        calls(task("middle"), usage={"input_tokens": 10}),
        subagents={"middle": middle},
        max_subagent_depth=2,
        limits={"max_input_tokens": 50},
    )
    result = await top.send("Go")
    assert worker.calls == 3
    assert result.finish_reason == "budget-exceeded"
    assert result.usage.input_tokens == 50
    assert result.usage.delegated is not None
    assert result.usage.delegated.input_tokens == 40


async def test_a_failed_childs_spend_counts_in_usage_and_budget() -> None:
    # SUB-32, BUD-33
    turns: list[Any] = [asks("look", usage=ProviderUsage(10, 0)), RuntimeError("broken")]

    def work(options: GenerateOptions) -> GenerateResult:
        turn = turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn  # type: ignore[no-any-return]

    child = create_agent(provider=PolicyProvider(work), name="worker", description="Works.", tools=[plain("look")])
    lead = agent_of(
        calls(task("worker"), usage={"input_tokens": 10}), "never", subagents={"worker": child}, limits={"max_tokens": 20}
    )
    result = await lead.send("Go")
    assert (result.finish_reason, result.usage.total_tokens) == ("budget-exceeded", 20)
    assert result.usage.delegated is not None
    assert (result.usage.delegated.total_tokens, result.usage.delegated.runs) == (10, 1)


# ----------------------------------------------------------------------------------------------------------------- queued input


@pytest.mark.parametrize("limits", [{"max_steps": 1}, {"max_tokens": 1}])
async def test_input_during_the_final_reply_of_a_spent_run_is_not_applied_and_the_reply_stands(limits: dict[str, int]) -> None:
    # BUD-05, RUN-21, SES-37
    go = asyncio.Event()
    provider = ScriptedStream([TextChunk("Done"), go, FinishChunk("stop", ProviderUsage(1, 1))])
    handle = create_agent(provider=provider, limits=limits).stream("Hi")
    await provider.reached(0, 1).wait()
    queued = handle.enqueue("And then?")
    go.set()
    result = await handle.result
    assert (result.finish_reason, result.text) == ("stop", "Done")
    assert await queued.applied is False
