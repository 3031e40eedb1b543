"""`limits={"reserve": True}`: estimates are set aside before model calls, so that those in flight cannot pass a limit together."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.create import create_agent
from lousho_ray.errors import AgentExecutionError, BudgetExceededError
from lousho_ray.events import StepDone
from lousho_ray.limits.budget import LedgerCore, Refusal
from lousho_ray.limits.checks import Breach, Cap
from lousho_ray.loop.hooks import HookContext
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions, GenerateResult
from lousho_ray.usage import ProviderUsage, Spend
from tests.unit.loop_support import PolicyProvider, asks, check_transcript, plain
from tests.unit.test_loop_limits import task


def tokens(count: int) -> Spend:
    return Spend(count, 0, Decimal(0), 1)


def lead_with(*children: str) -> LedgerCore:
    ledger = LedgerCore()
    ledger.open("lead", None, 0.0)
    for child in children:
        ledger.open(child, "lead", 0.0)
    return ledger


def refused(ledger: LedgerCore, run: str, call: str, estimate: Spend, *caps: Cap) -> Refusal | None:
    return ledger.reserve(run, call, estimate, caps, 0.0)


# -------------------------------------------------------------------------------------------------------------- the arithmetic


def test_an_estimate_fits_up_to_the_limit_together_with_what_is_in_flight() -> None:
    # BUD-21
    ledger, cap = lead_with("a", "b", "c"), Cap("lead", max_tokens=30)
    assert refused(ledger, "a", "1", tokens(20), cap) is None
    assert refused(ledger, "b", "1", tokens(11), cap) == Refusal(0, Breach("maxTokens", 31.0, 30), for_now=True)
    assert refused(ledger, "b", "1", tokens(10), cap) is None, "exactly"
    assert refused(ledger, "c", "1", tokens(31), cap) == Refusal(0, Breach("maxTokens", 31.0, 30), for_now=False)


def test_a_report_settles_what_was_set_aside_for_it() -> None:
    ledger, cap = lead_with("a", "b"), Cap("lead", max_tokens=30)
    assert refused(ledger, "a", "1", tokens(30), cap) is None
    assert ledger.report("a", "1", tokens(5), 0.0)["lead"].input_tokens == 5
    assert refused(ledger, "b", "1", tokens(25), cap) is None
    ledger.report("b", "1", tokens(26), 0.0)
    assert refused(ledger, "b", "2", tokens(1), cap) == Refusal(0, Breach("maxTokens", 32.0, 30), for_now=False)


def test_a_call_that_spent_nothing_gives_its_estimate_back() -> None:
    ledger, cap = lead_with("a", "b"), Cap("lead", max_tokens=30)
    assert refused(ledger, "a", "1", tokens(30), cap) is None
    for _ in range(2):
        ledger.release("a", "1")
    ledger.release("nobody", "1")
    assert refused(ledger, "b", "1", tokens(30), cap) is None


def test_a_repeated_reservation_counts_once_and_none_is_made_for_a_finished_call() -> None:
    # BUD-32
    ledger, cap = lead_with("a"), Cap("lead", max_tokens=30)
    for _ in range(3):
        assert refused(ledger, "a", "1", tokens(20), cap) is None
    ledger.report("a", "1", tokens(20), 0.0)
    assert refused(ledger, "a", "1", tokens(20), cap) is None
    assert refused(ledger, "a", "2", tokens(10), cap) is None


def test_under_several_caps_an_estimate_is_set_aside_under_all_or_none() -> None:
    # BUD-18, BUD-22
    ledger = lead_with("a")
    caps = Cap("a", max_tokens=100), Cap("lead", max_tokens=30)
    assert refused(ledger, "a", "1", tokens(50), *caps) == Refusal(1, Breach("maxTokens", 50.0, 30), for_now=False)
    assert refused(ledger, "a", "1", tokens(30), *caps) is None, "nothing stuck from the first try"
    assert refused(ledger, "a", "2", tokens(101), *caps) == Refusal(0, Breach("maxTokens", 101.0, 100), for_now=False)


def test_each_figure_has_its_own_cap_and_an_unknown_cost_has_none() -> None:
    # BUD-10, COST-12
    ledger, call = lead_with(), Spend(10, 5, Decimal("0.2"), 1)
    for cap, breach in (
        (Cap("lead", max_tokens=14), Breach("maxTokens", 15.0, 14)),
        (Cap("lead", max_input_tokens=9), Breach("maxInputTokens", 10.0, 9)),
        (Cap("lead", max_output_tokens=4), Breach("maxOutputTokens", 5.0, 4)),
    ):
        assert refused(ledger, "lead", "1", call, cap) == Refusal(0, breach, for_now=False)
    cap = Cap("lead", max_cost_usd=0.1)
    assert refused(ledger, "lead", "1", call, cap) == Refusal(0, Breach("maxCostUsd", 0.2, 0.1), False)
    assert refused(ledger, "lead", "1", Spend(10, 5, None, 1), cap) is None
    assert refused(ledger, "lead", "2", Spend(1, 1, Decimal("0.1"), 1), cap) is None, "what has no price takes no room"


def test_what_a_lost_run_and_those_below_it_had_in_flight_is_given_back() -> None:
    # BUD-33
    ledger, cap = lead_with("a", "b"), Cap("lead", max_tokens=30)
    ledger.open("below", "a", 0.0)
    assert refused(ledger, "a", "1", tokens(10), cap) is None
    assert refused(ledger, "below", "1", tokens(20), cap) is None
    ledger.close("a")
    assert refused(ledger, "b", "1", tokens(30), cap) is None
    assert ledger.report("below", "1", tokens(7), 0.0)["lead"].input_tokens == 7, "what it spends all the same counts"


def test_an_unknown_run_reserves_nothing() -> None:
    # BUD-33
    with pytest.raises(AgentExecutionError, match="'lost'"):
        lead_with().reserve("lost", "1", tokens(1), (), 0.0)


CALLS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 25)), min_size=1, max_size=5)
"""Estimate and spend of each call of a child, one after the other."""


@given(st.lists(CALLS, min_size=1, max_size=8), st.integers(1, 150), st.booleans(), st.randoms(use_true_random=False))
def test_no_fan_out_passes_its_limit_by_more_than_the_bound(
    fan_out: list[list[tuple[int, int]]], limit: int, reserve: bool, order: Any
) -> None:
    """BUD-16, BUD-21: with `reserve` the error of the estimates made, without it the calls in flight when the limit was reached."""
    ledger, cap = lead_with(*map(str, range(len(fan_out)))), Cap("lead", max_tokens=limit)
    left = {str(child): list(calls) for child, calls in enumerate(fan_out)}
    in_flight: dict[str, tuple[int, int]] = {}
    error = most_in_flight = steps = 0
    while left or in_flight:
        child = order.choice(sorted({*left, *in_flight}))
        steps += 1
        if child in in_flight:
            estimate, spent = in_flight.pop(child)
            error += max(0, spent - estimate)
            ledger.report(child, str(len(left.get(child, ()))), tokens(spent), 0.0)
            if not left.get(child):
                left.pop(child, None)
            continue
        total = ledger.totals("lead", 0.0)["lead"].total_tokens
        refusal = refused(ledger, child, str(len(left[child]) - 1), tokens(left[child][0][0]), cap) if reserve else None
        if total >= limit or (refusal is not None and not refusal.for_now):
            del left[child]
        elif refusal is None:
            in_flight[child] = left[child].pop(0)
            most_in_flight = max(most_in_flight, sum(spent for _, spent in in_flight.values()))
        else:
            assert in_flight, "a call waits only for calls in flight: it is decided once they have ended"
    total = ledger.totals("lead", 0.0)["lead"].total_tokens
    assert total <= limit + error if reserve else total < limit + max(most_in_flight, 1)


# -------------------------------------------------------------------------------------------------------------------- the runs


def spending(output: int, then: Any = "Done") -> PolicyProvider:
    """A model whose first reply asks for `look` and whose later ones are final; each is `output` tokens long."""

    async def reply(options: GenerateOptions) -> GenerateResult:
        await asyncio.sleep(0)
        usage = ProviderUsage(1, output)
        if any(message.role == "tool" for message in options.messages):
            return GenerateResult(str(then), usage=usage)
        return asks("look", usage=usage)

    return PolicyProvider(reply)


def fanning_out(children: int, output: int) -> PolicyProvider:
    def reply(options: GenerateOptions) -> GenerateResult:
        usage = ProviderUsage(1, output)
        if any(message.role == "tool" for message in options.messages):
            return GenerateResult("All done", usage=usage)
        return asks(*[task("worker")] * children, usage=usage)

    return PolicyProvider(reply)


def fan_out(children: int, output: int, settings: dict[str, Any], limits: dict[str, Any]) -> tuple[Any, PolicyProvider]:
    worker = spending(output)
    child = create_agent(provider=worker, name="worker", description="Works.", tools=[plain("look")], model_settings=settings)
    lead = create_agent(provider=fanning_out(children, output), subagents={"worker": child}, limits=limits, model_settings=settings)
    return lead, worker


async def test_parallel_subagents_do_not_pass_the_limit_at_all_when_the_estimate_holds() -> None:
    # BUD-21: without `reserve` eight calls would be in flight
    lead, worker = fan_out(8, 10, {"max_tokens": 10}, {"max_output_tokens": 40, "reserve": True})
    result = await lead.send("Go")
    assert worker.calls == 3
    assert result.usage.output_tokens == 40
    assert result.finish_reason == "budget-exceeded"
    assert result.budget.to_dict() == {"limit": "maxOutputTokens", "value": 40, "max": 40, "scope": "run"}
    texts = [message.text for message in result.messages if message.role == "tool"]
    assert all("Sub-agent 'worker' stopped at the maxOutputTokens limit" in text for text in texts)
    check_transcript(result.messages)


async def test_calls_that_do_not_fit_beside_those_in_flight_wait_for_them() -> None:
    # BUD-21: each may be 20 tokens long and is 2, so that all fit in the end
    lead, worker = fan_out(8, 2, {"max_tokens": 20}, {"max_output_tokens": 62, "reserve": True})
    result = await asyncio.wait_for(lead.send("Go"), 30)
    assert (result.finish_reason, result.usage.output_tokens) == ("stop", 2 * (1 + 16 + 1))
    assert worker.calls == 16
    assert worker.most <= 3, "60 tokens are left, 20 for each call in flight"


async def test_a_run_by_itself_stops_before_the_call_that_would_pass_the_limit() -> None:
    model = PolicyProvider(lambda options: asks("look", usage=ProviderUsage(1, 10)))
    events: list[Any] = []
    agent = create_agent(
        provider=model,
        tools=[plain("look")],
        model_settings={"max_tokens": 10},
        limits={"max_output_tokens": 35, "reserve": True},
        on_event=events.append,
    )
    result = await agent.send("Go")
    assert (result.finish_reason, result.usage.output_tokens, model.calls) == ("budget-exceeded", 30, 3)
    assert result.budget is not None
    assert result.budget.to_dict() == {"limit": "maxOutputTokens", "value": 40.0, "max": 35, "scope": "run"}
    assert [event.finish_reason for event in events if isinstance(event, StepDone)][-1] == "budget-exceeded"
    check_transcript(result.messages)
    without = create_agent(
        provider=model, tools=[plain("look")], model_settings={"max_tokens": 10}, limits={"max_output_tokens": 35}
    )
    assert (await without.send("Go")).usage.output_tokens == 40


async def test_a_reply_without_max_tokens_is_taken_to_be_as_long_as_the_longest_so_far() -> None:
    model = PolicyProvider(lambda options: asks("look", usage=ProviderUsage(1, 300)))
    agent = create_agent(provider=model, tools=[plain("look")], limits={"max_output_tokens": 1100, "reserve": True})
    result = await agent.send("Go")
    assert (result.usage.output_tokens, result.budget and result.budget.value) == (900, 1200.0)
    small = create_agent(provider=model, tools=[plain("look")], limits={"max_output_tokens": 999, "reserve": True})
    assert (await small.send("Go")).steps == 1, "the first is taken for 1,000 tokens"
    assert model.calls == 3


async def test_throw_and_reserve() -> None:
    # BUD-09
    model = PolicyProvider(lambda options: asks("look", usage=ProviderUsage(1, 10)))
    limits = {"max_output_tokens": 5, "reserve": True, "on_exceeded": "throw"}
    agent = create_agent(provider=model, tools=[plain("look")], model_settings={"max_tokens": 10}, limits=limits)
    with pytest.raises(BudgetExceededError) as raised:
        await agent.send("Go")
    assert model.calls == 0
    assert raised.value.budget is not None
    assert raised.value.budget["value"] == 10.0


async def test_the_limits_of_a_session_reserve_over_its_turns() -> None:
    # BUD-25, BUD-27
    model = PolicyProvider(lambda options: GenerateResult("Yes", usage=ProviderUsage(1, 10)))
    agent = create_agent(provider=model, model_settings={"max_tokens": 10})
    session = agent.session(limits={"max_output_tokens": 25, "reserve": True})
    reasons = [(await session.send("Go")).finish_reason for _ in range(3)]
    assert reasons == ["stop", "stop", "budget-exceeded"]
    assert model.calls == 2


async def test_a_side_call_that_does_not_fit_ends_the_run() -> None:
    # BUD-15
    judge = PolicyProvider(lambda options: GenerateResult("Fine", usage=ProviderUsage(1, 10)))

    class Judged:
        name = "judged"

        async def pre_generate(self, ctx: HookContext) -> None:
            await ctx.generate(judge, GenerateOptions([user("Fine?")], settings={"max_tokens": 10}), "judge")

    model = PolicyProvider(lambda options: asks("look", usage=ProviderUsage(1, 10)))
    agent = create_agent(
        provider=model,
        tools=[plain("look")],
        hooks=[Judged()],
        model_settings={"max_tokens": 10},
        limits={"max_output_tokens": 25, "reserve": True},
    )
    result = await agent.send("Go")
    assert (judge.calls, model.calls, result.finish_reason) == (1, 1, "budget-exceeded")
    assert result.usage.output_tokens == 20


async def test_an_abort_ends_a_call_that_waits_for_room() -> None:
    # BUD-10
    started = asyncio.Event()

    async def work(options: GenerateOptions) -> GenerateResult:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    child = create_agent(
        provider=PolicyProvider(work), name="worker", description="Works.", tools=[plain("look")], model_settings={"max_tokens": 10}
    )
    lead = create_agent(
        provider=fanning_out(2, 10),
        subagents={"worker": child},
        limits={"max_output_tokens": 20, "reserve": True},
        model_settings={"max_tokens": 10},
    )
    stream = lead.stream("Go")
    running = asyncio.ensure_future(stream.result)
    await asyncio.wait_for(started.wait(), 10)
    stream.abort("user")
    result = await asyncio.wait_for(running, 10)
    assert result.finish_reason == "aborted"


async def test_without_steps_left_a_run_without_room_for_its_forced_answer_ends_as_before() -> None:
    # BUD-13
    model = PolicyProvider(lambda options: asks("look", usage=ProviderUsage(1, 10)))
    agent = create_agent(
        provider=model,
        tools=[plain("look")],
        output=int,
        max_steps=1,
        model_settings={"max_tokens": 10},
        limits={"max_output_tokens": 15, "reserve": True},
    )
    result = await agent.send("Go")
    assert (result.finish_reason, model.calls) == ("max-steps", 1)
