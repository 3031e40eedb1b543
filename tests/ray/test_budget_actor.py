"""Budgets over Ray: several processes report to one lead; the accountant dies."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import GenerateResult, MockProvider, create_agent
from lousho_ray.actors.budget import ACTOR_OPTIONS, BudgetActor, RemoteLedger, remote_ledger
from lousho_ray.errors import AgentExecutionError
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.usage import ProviderUsage, Spend


@pytest.fixture
def actor(ray_cluster: str, fresh_name: str) -> Iterator[Any]:
    handle = ray.remote(BudgetActor).options(name=fresh_name, **ACTOR_OPTIONS).remote()
    yield handle
    ray.kill(handle)


@pytest.fixture
def ledger(actor: Any, ray_cluster: str, fresh_name: str) -> RemoteLedger:
    return remote_ledger(fresh_name, ray_cluster)


@ray.remote(num_cpus=0)
def child_run(ledger: RemoteLedger, run_id: str, calls: int) -> int:
    """A sub-agent's process; returns the lead's tokens as its last report told them."""

    async def work() -> int:
        await ledger.open(run_id, "lead")
        totals = await asyncio.gather(*[ledger.report(run_id, str(n), Spend(10, 0, Decimal("0.01"), 1)) for n in range(calls)])
        await ledger.close(run_id)
        return max(total["lead"].input_tokens for total in totals)

    return asyncio.run(work())


async def test_processes_report_to_one_lead(ledger: RemoteLedger) -> None:
    # BUD-17, BUD-31, BUD-33
    await ledger.open("lead")
    await ledger.report("lead", "1", Spend(1, 1, Decimal("0.5"), 1))
    seen = await asyncio.gather(*[child_run.remote(ledger, f"child-{n}", 50) for n in range(2)])
    assert max(seen) == 1001
    assert (await ledger.totals("lead"))["lead"] == Spend(1001, 1, Decimal("1.50"), 101)
    await ledger.close("lead")


async def test_a_ledger_travels_as_the_address_of_its_actor(ledger: RemoteLedger) -> None:
    assert pickle.loads(pickle.dumps(ledger)) is ledger


async def test_a_killed_accountant_ends_the_runs_under_way_and_serves_later_ones(actor: Any, ledger: RemoteLedger) -> None:
    # BUD-33
    await ledger.open("old")
    await ledger.report("old", "1", Spend(1))
    os.kill(await actor.__ray_call__.remote(lambda self: __import__("os").getpid()), signal.SIGKILL)
    with pytest.raises(AgentExecutionError) as raised:
        await asyncio.wait_for(ledger.report("old", "2", Spend(1)), 50)
    assert raised.value.code == "LOUSHO_AGENT_EXECUTION_FAILED"
    await asyncio.wait_for(ledger.open("new"), 50)
    assert (await ledger.report("new", "1", Spend(7)))["new"].input_tokens == 7


async def test_an_accountant_that_is_gone_is_an_error(
    actor: Any, ray_cluster: str, fresh_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # BUD-33
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.1, 0.2))
    ledger = remote_ledger(fresh_name, ray_cluster)
    await ledger.open("run")
    ray.kill(actor)
    with pytest.raises(AgentExecutionError, match="cannot be reached"):
        await asyncio.wait_for(ledger.report("run", "1", Spend(1)), 50)


async def test_a_session_of_two_handles_at_once_adds_up_exactly(ray_cluster: str, tmp_path: Path) -> None:
    # BUD-D4: its turns run in its actor, one at a time
    store = SqliteStore(tmp_path / "s.db")
    model = MockProvider(policy=lambda request: GenerateResult("Yes", usage=ProviderUsage(10, 0)))
    agents = [create_agent(provider=model, store=store, runtime="ray") for _ in range(2)]
    sessions = [agent.session("added-up", limits={"max_tokens": 55}) for agent in agents]
    results = await asyncio.gather(*[session.send("Go") for session in sessions for _ in range(4)])
    assert sorted(result.finish_reason for result in results) == ["budget-exceeded"] * 2 + ["stop"] * 6
    transcript = await sessions[0].load()
    assert transcript[-1].metadata is not None
    assert transcript[-1].metadata["sessionUsage"]["totalTokens"] == 60
    await store.aclose()
