"""Usage figures: sums, unknown costs, JSON forms, and what runs report."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.ports import FinishChunk, GenerateResult, HostedToolCall, ServedBy, TextChunk
from lousho_ray.providers.prices import register_model
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.usage import ModelUsage, ProviderUsage, Spend, StepUsage, Usage, format_usage
from tests.unit.loop_support import PolicyProvider, ScriptedStream, agent_of, asks, calls, plain


def used(cost: str | None = "0.5", **fields: Any) -> Usage:
    usage = Usage()
    usage.add_call("m", ProviderUsage(10, 5, **fields), None if cost is None else Decimal(cost))
    return usage


def test_ten_thousand_small_costs_are_exact() -> None:
    # COST-14
    usage = Usage()
    for _ in range(10_000):
        usage.add_call("m", ProviderUsage(1, 1), Decimal("0.0001"))
    assert usage.cost_usd == 1.0
    assert usage.by_model["m"].cost_usd == 1.0
    assert usage.by_model["m"].calls == usage.model_calls == 10_000


def test_a_cost_that_is_unknown_once_stays_unknown() -> None:
    # COST-11, RUN-71
    usage = used()
    usage.add_call("other", ProviderUsage(1, 1), None)
    usage.add_call("m", ProviderUsage(1, 1), Decimal(1))
    assert usage.cost_usd is None
    assert usage.by_model["m"].cost_usd == 1.5
    assert usage.by_model["other"].cost_usd is None
    assert usage.spend.cost is None


def test_optional_figures_are_absent_until_there_is_something_to_tell() -> None:
    # COST-01, COST-02, RUN-68
    usage = used()
    assert (usage.cached_input_tokens, usage.cache_write_tokens, usage.reasoning_tokens, usage.delegated) == (
        None,
        None,
        None,
        None,
    )
    usage.add_call("m", ProviderUsage(10, 5, cached_input_tokens=4, cache_write_tokens=2, reasoning_tokens=3), Decimal(0))
    usage.add_call("m", ProviderUsage(10, 5, cached_input_tokens=1), Decimal(0))
    assert (usage.cached_input_tokens, usage.cache_write_tokens, usage.reasoning_tokens) == (5, 2, 3)
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (30, 15, 45)
    assert (usage.prompt_tokens, usage.completion_tokens) == (30, 15)


def test_usages_add_up() -> None:
    # BUD-D7
    a, b = used(cached_input_tokens=1), used("0.25")
    a.hosted_tool_calls = {"search": 1}
    b.hosted_tool_calls = {"search": 2, "code": 1}
    b.estimated = True
    total = a + b
    assert (total.input_tokens, total.output_tokens, total.model_calls, total.cost_usd) == (20, 10, 2, 0.75)
    assert total.estimated
    assert total.hosted_tool_calls == {"search": 3, "code": 1}
    assert total.by_model["m"].calls == 2
    assert (a.input_tokens, b.input_tokens) == (10, 10)  # the parts are as they were
    assert a.by_model["m"].calls == 1


def test_delegated_usage_is_a_view_of_a_part_of_the_totals() -> None:
    # COST-07
    lead, child, grandchild = used(), used(), used()
    child.add_delegated(grandchild)
    lead.add_delegated(child)
    lead.add_delegated(used())
    assert (lead.input_tokens, lead.model_calls, lead.cost_usd) == (40, 4, 2.0)
    assert lead.delegated is not None
    assert (lead.delegated.input_tokens, lead.delegated.model_calls, lead.delegated.runs) == (30, 3, 2)
    total = lead + lead
    assert total.delegated is not None
    assert (total.delegated.input_tokens, total.delegated.runs) == (60, 4)
    assert lead.delegated.runs == 2
    assert (lead + used()).delegated == lead.delegated


def test_adding_does_not_share_the_parts() -> None:
    lead = used()
    lead.add_delegated(used())
    total = lead + Usage()
    total.add_delegated(used())
    assert lead.delegated is not None
    assert lead.delegated.input_tokens == 10


@pytest.mark.parametrize("cost", ["0.1", None])
def test_the_json_form_round_trips(cost: str | None) -> None:
    usage = used(cost, cached_input_tokens=3, reasoning_tokens=1)
    usage.add_delegated(used(cost))
    usage.hosted_tool_calls = {"search": 1}
    data = json.loads(json.dumps(usage.to_dict()))
    assert Usage.from_dict(data) == usage
    assert usage.copy() == usage
    assert usage.copy() is not usage
    assert data["inputTokens"] == 20
    assert None not in data.values()
    assert data.get("costUsd") == (None if cost is None else "0.2")


def test_a_form_without_cost_goes_on_with_cost_unknown() -> None:
    # COST-08
    usage = Usage.from_dict({"inputTokens": 5, "outputTokens": 1, "modelCalls": 1})
    usage.add_call("m", ProviderUsage(1, 1), Decimal(1))
    assert usage.cost_usd is None
    assert usage.total_tokens == 8


def test_spends_add_up() -> None:
    total = Spend(1, 2, Decimal("0.1"), 1) + Spend(3, 4, Decimal("0.2"), 2)
    assert total == Spend(4, 6, Decimal("0.3"), 3)
    assert total.total_tokens == 10
    assert (total + Spend(cost=None)).cost is None
    assert ModelUsage(cost=None).cost_usd is None


@pytest.mark.parametrize(
    ("usage", "wanted"),
    [
        (Usage(1234, 567, Decimal("0.0042"), model_calls=2), "1,234 in / 567 out tokens · $0.0042 (2 model calls)"),
        (Usage(1, 2, Decimal(0), model_calls=1), "1 in / 2 out tokens · $0.0000 (1 model call)"),
        (Usage(1, 2, Decimal("12.346"), model_calls=1), "1 in / 2 out tokens · $12.35 (1 model call)"),
        (Usage(1, 2, Decimal("1234.5"), model_calls=1000), "1 in / 2 out tokens · $1,234.50 (1,000 model calls)"),
        (Usage(1, 2, None, estimated=True, model_calls=0), "~1 in / 2 out tokens (0 model calls)"),
    ],
)
def test_format_usage(usage: Usage, wanted: str) -> None:
    # COST-17
    assert format_usage(usage) == wanted


# ---------------------------------------------------------------------------------------------------------------- what runs say


async def test_each_model_call_has_an_entry() -> None:
    # RUN-69, COST-04
    turns = [
        calls("a", usage={"input_tokens": 10, "output_tokens": 5}),
        {"text": "Done", "usage": {"input_tokens": 20, "output_tokens": 1}},
    ]
    result = await create_agent(provider=mock_model(turns), tools=[plain("a")]).send("Hi")
    assert result.step_usage == [
        StepUsage(1, "mock-model", ProviderUsage(10, 5)),
        StepUsage(2, "mock-model", ProviderUsage(20, 1)),
    ]
    assert result.usage.total_tokens == 36
    assert not result.usage.estimated


async def test_usage_is_booked_under_the_model_that_served() -> None:
    # RUN-25, COST-03
    served = GenerateResult("Done", usage=ProviderUsage(3, 1), served_by=ServedBy("x", "the-other"))
    result = await create_agent(provider=PolicyProvider(lambda options: served), model="asked-for").send("Hi")
    assert list(result.usage.by_model) == ["the-other"]
    chunks = [TextChunk("Done"), FinishChunk("stop", ProviderUsage(3, 1), ServedBy("x", "the-other"))]
    streamed = await create_agent(provider=ScriptedStream(chunks), model="asked-for").stream("Hi").result
    assert list(streamed.usage.by_model) == ["the-other"]


async def test_a_call_without_figures_is_estimated_and_marks_the_run() -> None:
    # RUN-70, COST-05
    reported = {"input_tokens": 10, "output_tokens": 5}
    result = await agent_of(calls("a", usage=reported), "Done and dusted", tools=[plain("a")]).send("Hi there, how are you?")
    assert [entry.estimated for entry in result.step_usage] == [False, True]
    assert result.usage.estimated
    assert result.step_usage[1].usage.prompt_tokens > 5
    assert result.step_usage[1].usage.completion_tokens > 0


async def test_an_estimated_call_has_an_estimated_cost() -> None:
    # COST-05
    register_model(id="m-est", provider="x", context_window=10, input_cost_per_mtok=1.0, output_cost_per_mtok=1.0)
    result = await create_agent(provider=mock_model(["Done"], default_model="m-est")).send("Hi")
    assert result.usage.estimated
    assert result.usage.cost_usd is not None
    assert result.usage.cost_usd > 0


async def test_a_reported_cost_of_nothing_is_a_cost() -> None:
    # COST-10
    free = GenerateResult("Done", usage=ProviderUsage(3, 1, cost_usd=0.0))
    result = await create_agent(provider=PolicyProvider(lambda options: free)).send("Hi")
    assert result.usage.cost_usd == 0.0


async def test_an_error_tells_what_was_spent() -> None:
    provider = PolicyProvider(lambda options: asks("a", usage=ProviderUsage(10, 5)) if provider.calls == 1 else _fail())
    with pytest.raises(Exception, match="broken") as caught:
        await create_agent(provider=provider, tools=[plain("a")]).send("Hi")
    error: Any = caught.value
    assert error.usage.total_tokens == 15


def _fail() -> GenerateResult:
    raise RuntimeError("broken")


async def test_calls_that_the_provider_ran_are_counted() -> None:
    # COST-16, RUN-68, RUN-D6
    hosted = (HostedToolCall("h1", "web_search"), HostedToolCall("h2", "web_search"))
    reply = GenerateResult("Found", usage=ProviderUsage(3, 1), hosted_tool_calls=hosted)
    provider = PolicyProvider(lambda options: reply)
    result = await create_agent(provider=provider).send("Hi")
    assert result.usage.hosted_tool_calls == {"web_search": 2}
    assert (result.steps, result.finish_reason) == (1, "stop")
    assert provider.calls == 1


def test_the_short_form_of_a_result() -> None:
    result = agent_of({"text": "Done " * 30, "usage": {"input_tokens": 3, "output_tokens": 4}}).send_sync("Hi")
    assert repr(result).startswith("<ExecutionResult stop 'Done Done")
    assert "steps=1" in repr(result)
    assert len(repr(result)) < 200


async def test_raise_if_incomplete() -> None:
    from lousho_ray.errors import AgentExecutionError

    done = await agent_of("Done").send("Hi")
    assert done.raise_if_incomplete() is done
    cut = await agent_of({"text": "Half", "finish_reason": "length"}, name="writer").send("Hi")
    assert not cut.ok
    with pytest.raises(AgentExecutionError, match="max_tokens") as caught:
        cut.raise_if_incomplete()
    assert caught.value.agent_id == "writer"
