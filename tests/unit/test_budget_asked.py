"""When the ledger of a tree of runs is asked, and what limits hold without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lousho_ray import Agent, GenerateResult, MockProvider, ToolCall, create_agent
from lousho_ray.limits.budget import LocalLedger
from lousho_ray.ports import GenerateOptions
from lousho_ray.usage import ProviderUsage, Spend


class Counting(LocalLedger):
    """Writes down what it is asked."""

    asked: Sequence[str] = ()

    async def open(self, run_id: str, parent: str | None = None) -> None:
        Counting.asked = [*Counting.asked, "open"]
        await super().open(run_id, parent)

    async def report(self, run_id: str, call_id: str, spend: Spend) -> Mapping[str, Spend]:
        Counting.asked = [*Counting.asked, "report"]
        return await super().report(run_id, call_id, spend)


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lousho_ray.runtime.LocalLedger", Counting)
    monkeypatch.setattr(Counting, "asked", ())


def hands_out(tasks: int, rounds: int = 1) -> MockProvider:
    """A lead that gives out so many tasks in each of so many turns. Each of its calls costs 10 tokens."""

    def policy(request: GenerateOptions) -> GenerateResult:
        done = sum(message.role == "assistant" for message in request.messages)
        given = {"agent": "child", "prompt": "p", "description": "d"}
        calls = tuple(ToolCall(f"t{done}-{number}", "task", json.dumps(given)) for number in range(tasks))
        if done < rounds:
            return GenerateResult(tool_calls=calls, finish_reason="tool_calls", usage=ProviderUsage(10, 0))
        return GenerateResult("done", usage=ProviderUsage(10, 0))

    return MockProvider(policy=policy)


def answers(**options: Any) -> Agent[Any]:
    reply = GenerateResult("yes", usage=ProviderUsage(100, 0))
    return create_agent(provider=MockProvider(policy=lambda request: reply), description="Answers.", **options)


@pytest.mark.parametrize("limits", [None, {"max_steps": 9}, {"max_duration_ms": 60_000}, {"max_tool_errors": 3}])
async def test_without_a_limit_on_what_is_spent_no_sum_is_kept(limits: Any) -> None:
    # BUD-31, COST-07
    lead = create_agent(provider=hands_out(2), subagents={"child": answers()}, limits=limits)
    result = await lead.send("Go")
    assert result.text == "done"
    assert Counting.asked == ()
    assert result.usage.total_tokens == 220


@pytest.mark.parametrize("limit", ["max_tokens", "max_input_tokens", "max_output_tokens", "max_cost_usd"])
async def test_with_one_every_run_of_the_tree_reports(limit: str) -> None:
    # BUD-17
    lead = create_agent(provider=hands_out(2), subagents={"child": answers()}, limits={limit: 100_000})
    await lead.send("Go")
    assert Counting.asked.count("open") == 3
    assert Counting.asked.count("report") == 4, "of the lead before and after its sub-agents, and of each of them"


async def test_the_limit_of_a_session_is_one_of_all_runs_of_its_turns() -> None:
    # SES-62, BUD-17
    session = create_agent(provider=hands_out(1, rounds=9), subagents={"child": answers()}).session(limits={"max_tokens": 250})
    result = await session.send("Go")
    assert result.finish_reason == "budget-exceeded"
    assert result.usage.total_tokens == 330, "the third round is the first after the limit"


async def test_the_limit_of_a_sub_agent_alone_holds_for_what_is_below_it() -> None:
    # SUB-33
    middle = create_agent(
        provider=hands_out(1, rounds=9), subagents={"child": answers()}, description="Leads.", limits={"max_tokens": 250}
    )
    lead = create_agent(provider=hands_out(1), subagents={"child": middle}, max_subagent_depth=2)
    result = await lead.send("Go")
    (message,) = [message for message in result.messages if message.role == "tool"]
    assert "stopped at the maxTokens limit" in message.text
    assert Counting.asked.count("open") > 0
    assert result.usage.delegated is not None
    assert result.usage.delegated.input_tokens == 330
