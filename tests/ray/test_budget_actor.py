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
from lousho_ray.actors.budget import ACTOR_OPTIONS, BudgetActor
from lousho_ray.actors.budget_client import RemoteLedger, remote_ledger
from lousho_ray.actors.cluster import NAMESPACE, job_id
from lousho_ray.errors import AgentExecutionError
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply, gate
from lousho_ray.usage import ProviderUsage, Spend
from tests.ray.processes import kill_process, lead_of, task_results


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


async def test_a_killed_accountant_is_told_what_it_knew(actor: Any, ledger: RemoteLedger) -> None:
    # BUD-33
    await ledger.open("lead")
    await ledger.report("lead", "1", Spend(5))
    seen = child_run.remote(ledger, "child", 50)
    assert await seen == 505
    holds = Holder.options(num_cpus=0).remote(ledger)
    assert await holds.report.remote("other", 20) == 525
    os.kill(await actor.__ray_call__.remote(lambda self: __import__("os").getpid()), signal.SIGKILL)
    assert await asyncio.wait_for(holds.report.remote("other", 1), 50) == 526
    assert (await ledger.report("lead", "2", Spend(1)))["lead"].input_tokens == 527
    await ledger.close("lead")
    ray.kill(holds)


@ray.remote
class Holder:
    """Another process with a run under way."""

    def __init__(self, ledger: RemoteLedger) -> None:
        self._ledger = ledger
        self._count = 0

    async def report(self, run_id: str, tokens: int) -> int:
        await self._ledger.open(run_id, "lead")
        self._count += 1
        return (await self._ledger.report(run_id, str(self._count), Spend(tokens)))["lead"].input_tokens


async def test_a_fan_out_goes_on_when_the_accountant_is_killed_and_keeps_its_limit(ray_cluster: str) -> None:
    # BUD-31, BUD-33: with what was spent before the death its sub-agents may make a few calls more, and no others
    async with FakeServer(timeout_s=30) as server:
        children, calls = 4, 24
        server.respond(AfterTheDeath(children * 2))
        lead = lead_of(server, children, limits={"max_tokens": calls * 100, "max_steps": 3}, child={"max_steps": 50})
        running = asyncio.create_task(lead.send("Go."))
        await server.reached("go", children)
        await kill_process(ray.get_actor(f"lousho-budget-{job_id()}", NAMESPACE))
        server.release("go")
        result = await asyncio.wait_for(running, 50)
        assert result.finish_reason == "budget-exceeded"
        own_calls = 4  # the lead has spent some, too
        assert calls - own_calls <= len(server.requests) <= calls + children


async def test_without_a_limit_nothing_is_asked_of_the_accountant(ray_cluster: str) -> None:
    # BUD-31: a limit of a sub-agent of its own counts in its process
    async with FakeServer(timeout_s=30) as server:
        server.respond(lambda request: Reply(tool_calls=[("where", {})], usage=(100, 0)))
        lead = lead_of(server, 2, limits={"max_steps": 5}, child={"limits": {"max_tokens": 250}})
        await lead.send("Go.")
        accountant = ray.get_actor(f"lousho-budget-{job_id()}", NAMESPACE)
        asked = await accountant.__ray_call__.remote(asks)
        result = await lead.send("Go.")
        assert all("stopped at the maxTokens limit" in message.text for message in task_results(result.messages).values())
        assert await accountant.__ray_call__.remote(asks) == asked


def asks(actor: Any) -> int:
    """Runs in the budget actor: how many calls it has had."""
    return sum(seq for seq, _, _ in actor._last.values())


class AfterTheDeath:
    """Calls cost 100 tokens each; those behind the first `early` wait for a gate."""

    def __init__(self, early: int) -> None:
        self._early = early
        self._asked = 0

    def __call__(self, request: RecordedRequest) -> Any:
        self._asked += 1
        reply = Reply(tool_calls=[("where", {})], usage=(100, 0))
        return reply if self._asked <= self._early else [gate("go"), reply]


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
