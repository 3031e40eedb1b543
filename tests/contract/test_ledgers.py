"""One suite for every form of a ledger: in this process, and in an actor (here on this process's background loop)."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from decimal import Decimal

import pytest

from lousho_ray.actors.budget import BudgetActor
from lousho_ray.actors.budget_client import RemoteLedger
from lousho_ray.errors import AgentExecutionError
from lousho_ray.limits.budget import Ledger, LocalLedger
from lousho_ray.limits.checks import Cap
from lousho_ray.usage import Spend
from tests.contract.in_process import InProcessHandle


@pytest.fixture(params=["local", "actor", "actor-over-a-bad-network"])
def ledger(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.001,) * 30)
    chance = random.Random(3)
    if request.param == "local":
        return LocalLedger()
    lose = (lambda: chance.random() < 0.3) if "bad" in request.param else (lambda: False)
    handle = InProcessHandle(BudgetActor(restarted=False), lose)
    return RemoteLedger(lambda: handle)


async def test_a_tree_adds_up_while_its_runs_report_at_once(ledger: Ledger) -> None:
    # BUD-17, BUD-22, BUD-31, BUD-32
    await ledger.open("lead")
    await asyncio.gather(*[ledger.open(f"child-{n}", "lead") for n in range(8)])
    await ledger.open("grandchild", "child-0")
    spend = Spend(3, 1, Decimal("0.0001"), 1)
    calls = [ledger.report(f"child-{n}", str(call), spend) for n in range(8) for call in range(25)]
    totals = await asyncio.gather(*calls, ledger.report("grandchild", "0", spend))
    assert list(totals[-1]) == ["grandchild", "child-0", "lead"]
    assert max(total["lead"].calls for total in totals) == 201
    assert await ledger.totals("child-0") == {
        "child-0": Spend(78, 26, Decimal("0.0026"), 26),
        "lead": Spend(603, 201, Decimal("0.0201"), 201),
    }


async def test_an_answer_holds_the_callers_own_report(ledger: Ledger) -> None:
    # BUD-32
    await ledger.open("run")
    for number in range(1, 20):
        assert (await ledger.report("run", str(number), Spend(1)))["run"].input_tokens == number


async def test_a_repeated_report_counts_once(ledger: Ledger) -> None:
    # BUD-32
    await ledger.open("run")
    for _ in range(3):
        totals = await ledger.report("run", "step-1", Spend(5))
    assert totals["run"].input_tokens == 5


async def test_opening_and_closing_may_be_repeated(ledger: Ledger) -> None:
    await ledger.open("lead")
    for _ in range(2):
        await ledger.open("child", "lead")
    await ledger.report("child", "1", Spend(5))
    for _ in range(2):
        await ledger.close("child")
    assert (await ledger.totals("lead"))["lead"].input_tokens == 5
    await ledger.close("lead")


async def test_a_run_may_close_while_its_last_report_is_under_way(ledger: Ledger) -> None:
    # BUD-32, BUD-33: repeated together after a lost answer, neither fails and the report counts once
    await ledger.open("lead")
    for number in range(30):
        run = f"last-{number}"
        await ledger.open(run, "lead")
        totals, _ = await asyncio.gather(ledger.report(run, "1", Spend(1)), ledger.close(run))
        assert totals["lead"].input_tokens == number + 1


async def test_an_unknown_run_is_an_error_and_hurts_no_other(ledger: Ledger) -> None:
    # BUD-33
    await ledger.open("run")
    results = await asyncio.gather(
        ledger.report("run", "1", Spend(1)), ledger.report("lost", "1", Spend(1)), ledger.totals("run"), return_exceptions=True
    )
    assert isinstance(results[1], AgentExecutionError)
    assert results[1].code == "LOUSHO_AGENT_EXECUTION_FAILED"
    assert "'lost'" in str(results[1])
    assert results[0] == results[2] == {"run": Spend(1)}


async def test_of_many_reservations_at_once_as_many_are_made_as_fit(ledger: Ledger) -> None:
    # BUD-21, BUD-32
    await ledger.open("lead")
    await asyncio.gather(*[ledger.open(f"child-{n}", "lead") for n in range(20)])
    caps = [Cap("lead", max_tokens=50)]
    made = await asyncio.gather(*[ledger.reserve(f"child-{n}", "1", Spend(9), caps) for n in range(20)])
    fitting = [n for n, refusal in enumerate(made) if refusal is None]
    assert len(fitting) == 5
    assert all(refusal.for_now and refusal.breach.value == 54 for refusal in made if refusal is not None)
    await ledger.release(f"child-{fitting[0]}", "1")
    await ledger.report(f"child-{fitting[1]}", "1", Spend(3))
    assert await ledger.reserve("lead", "1", Spend(20), caps) is None
    last = await ledger.reserve("lead", "2", Spend(1), caps)
    assert last is not None
    assert last.breach.value == 3 + 27 + 20 + 1


async def test_a_report_nobody_waits_for_counts(ledger: Ledger) -> None:
    # BUD-16, BUD-33: a run that is aborted while it reports has spent all the same
    await ledger.open("run")
    report = asyncio.create_task(ledger.report("run", "1", Spend(5)))
    await asyncio.sleep(0)
    report.cancel()
    await asyncio.gather(report, return_exceptions=True)
    assert (await ledger.totals("run"))["run"].input_tokens == 5


def test_loops_in_threads_report_to_one_lead(ledger: Ledger) -> None:
    asyncio.run(ledger.open("lead"))

    async def work(run: str) -> None:
        await ledger.open(run, "lead")
        await asyncio.gather(*[ledger.report(run, str(call), Spend(1)) for call in range(40)])

    threads = [threading.Thread(target=lambda n=n: asyncio.run(work(f"child-{n}"))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert asyncio.run(ledger.totals("lead"))["lead"].input_tokens == 160


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.001,) * 30)
    monkeypatch.setattr("lousho_ray.actors.budget.RESTORE_S", 0.3)


@pytest.mark.usefixtures("soon")
async def test_a_new_life_of_the_accountant_is_told_what_the_processes_know() -> None:
    # BUD-33: no run gets room that it did not have, also when another process knew more of its lead
    handle = InProcessHandle(BudgetActor(restarted=False))
    here, there, idle = (RemoteLedger(lambda: handle) for _ in range(3))
    await here.open("lead")
    await here.report("lead", "1", Spend(5, 0, Decimal("0.5"), 1))
    for ledger, child in ((here, "a"), (there, "b"), (idle, "c")):
        await ledger.open(child, "lead")
        await ledger.totals(child)
    for number in range(10):
        await there.report("b", str(number), Spend(10, 0, Decimal("0.1"), 1))
    await there.close("b")
    assert await idle.reserve("c", "1", Spend(30), [Cap("lead", max_tokens=140)]) is None
    await idle.totals("c")
    handle.replace(BudgetActor(restarted=True))
    # Of `b` only `idle` knows; it asks for nothing, and tells it all the same.
    assert (await here.report("a", "1", Spend(1)))["lead"] == Spend(106, 0, Decimal("1.5"), 11)
    refusal = await here.reserve("a", "2", Spend(5), [Cap("lead", max_tokens=140)])
    assert refusal is not None
    assert refusal.breach.value == 106 + 30 + 5
    assert (await idle.report("c", "1", Spend(1)))["lead"].input_tokens == 107
    assert await here.reserve("a", "2", Spend(5), [Cap("lead", max_tokens=140)]) is None


@pytest.mark.usefixtures("soon")
async def test_an_accountant_that_dies_again_and_again_forgets_nothing_and_counts_little_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # BUD-32, BUD-33
    monkeypatch.setattr("lousho_ray.actors.budget.RESTORE_S", 0.05)
    handle = InProcessHandle(BudgetActor(restarted=False))
    clients = [RemoteLedger(lambda: handle) for _ in range(4)]
    await clients[0].open("lead")
    await clients[0].totals("lead")
    lives, calls, told = 4, 30, 0

    async def child(number: int) -> None:
        nonlocal told
        run, ledger = f"child-{number}", clients[number % 4]
        await ledger.open(run, "lead")
        for call in range(calls):
            total = (await ledger.report(run, str(call), Spend(1)))["lead"].input_tokens
            told += 1
            assert total >= told, "an answer holds everything that was answered before"
        await ledger.close(run)

    children = asyncio.gather(*[child(number) for number in range(8)])
    for life in range(1, lives + 1):
        while told < life * 40:
            await asyncio.sleep(0.001)
        handle.replace(BudgetActor(restarted=True))
    await children
    total = (await clients[0].totals("lead"))["lead"].input_tokens
    assert 8 * calls <= total <= 8 * calls + lives * 8, "at most the calls whose answers were lost are counted twice"


@pytest.mark.usefixtures("soon")
async def test_an_accountant_that_is_gone_is_an_error_also_for_what_nobody_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # BUD-33
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.001,))
    handle = InProcessHandle(BudgetActor(restarted=False))
    ledger = RemoteLedger(lambda: handle)
    await ledger.open("run")
    await ledger.totals("run")
    actor = handle.replace(None)
    with pytest.raises(AgentExecutionError, match="2 attempts failed"):
        await ledger.report("run", "1", Spend(1))
    await ledger.note("run", "2", Spend(1))

    async def noted() -> bool:
        return not ledger._entries and not ledger._awake

    while not await noted():
        await asyncio.sleep(0.001)
    handle.replace(actor)
    with pytest.raises(AgentExecutionError, match="2 attempts failed"):
        await ledger.close("run")


async def test_what_nobody_waits_for_goes_with_the_next_ask_or_soon(ledger: Ledger) -> None:
    await ledger.open("run")
    await ledger.note("run", "1", Spend(1))
    assert (await ledger.report("run", "2", Spend(2)))["run"].input_tokens == 3
    await ledger.note("run", "3", Spend(4))
    await ledger.open("child", "run")
    assert (await ledger.totals("run"))["run"].input_tokens == 7
    assert await ledger.totals("child") == {"child": Spend(), "run": Spend(7)}


async def test_a_child_of_a_run_that_is_not_known_fails_at_the_latest_when_it_asks(ledger: Ledger) -> None:
    # BUD-33
    results = await asyncio.gather(ledger.open("child", "gone"), ledger.totals("child"), return_exceptions=True)
    first = next(result for result in results if isinstance(result, AgentExecutionError))
    assert "'gone'" in str(first)


def test_a_ledger_without_an_address_does_not_pickle() -> None:
    with pytest.raises(TypeError, match="remote_ledger"):
        pickle.dumps(RemoteLedger(lambda: None))
