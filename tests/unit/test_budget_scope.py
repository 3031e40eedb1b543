"""What counts towards which limit, and from when on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import GenerateOptions, GenerateResult
from lousho_ray.providers.prices import register_model
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.tools.tool import tool
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import PolicyProvider, agent_of, asks, calls, plain


async def test_a_price_registered_while_a_run_goes_on_counts_for_later_calls() -> None:
    # BUD-D8
    def price(usd_per_mtok: float) -> None:
        register_model(id="changing", provider="x", context_window=1000, input_cost_per_mtok=usd_per_mtok, output_cost_per_mtok=0.0)

    @tool
    def dearer() -> str:
        """Raises the price."""
        price(3_000_000.0)
        return "done"

    def reply(options: GenerateOptions) -> GenerateResult:
        done = options.messages[-1].role == "tool"
        usage = ProviderUsage(2, 0)
        return GenerateResult("Done", usage=usage) if done else asks("dearer", usage=usage)

    price(1_000_000.0)
    agent = create_agent(provider=PolicyProvider(reply, default_model="changing"), tools=[dearer])
    result = await agent.send("Go")
    assert [entry.cost_usd for entry in result.step_usage] == [2.0, 6.0]
    assert result.usage.cost_usd == 8.0


async def test_without_a_session_limits_are_those_of_the_run() -> None:
    # BUD-D2
    agent = agent_of(calls("look", usage={"input_tokens": 5}), tools=[plain("look")], limits={"max_tokens": 5})
    for _ in range(2):
        result = await agent_of(calls("look", usage={"input_tokens": 5}), tools=[plain("look")], limits={"max_tokens": 5}).send(
            "Go"
        )
        assert result.budget is not None
        assert (result.budget.scope, result.usage.total_tokens) == ("run", 5)
    with pytest.raises(ConfigurationError):
        await agent.send("Go", limits={"max_tokens": 5})  # type: ignore[call-arg]


async def test_two_agents_over_one_store_go_on_from_each_others_account(tmp_path: Path) -> None:
    # BUD-D4: one after the other; at the same time the store's last write wins, and over Ray the session's actor adds up
    store = SqliteStore(tmp_path / "s.db")
    model = PolicyProvider(lambda options: GenerateResult("Yes", usage=ProviderUsage(10, 0)))
    sessions = [create_agent(provider=model, store=store).session("s", limits={"max_tokens": 25}) for _ in range(2)]
    reasons = [(await sessions[turn % 2].send("Go")).finish_reason for turn in range(4)]
    assert reasons == ["stop", "stop", "stop", "budget-exceeded"]
    assert model.calls == 3
    await store.aclose()
