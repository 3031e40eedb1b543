"""The arithmetic of budgets, and the ledger of one process."""

from __future__ import annotations

import threading
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.errors import AgentExecutionError
from lousho_ray.limits.budget import ABANDONED_AFTER_S, LedgerCore, LocalLedger
from lousho_ray.usage import Spend


def spend(tokens: int = 10, cost: str | None = "0.1") -> Spend:
    return Spend(tokens, 1, None if cost is None else Decimal(cost), 1)


def tree() -> LedgerCore:
    ledger = LedgerCore()
    ledger.open("lead", None, 0.0)
    ledger.open("child", "lead", 0.0)
    ledger.open("other", "lead", 0.0)
    ledger.open("grandchild", "child", 0.0)
    return ledger


def test_a_report_counts_for_the_run_and_everything_above_it_at_once() -> None:
    # BUD-17, BUD-22, BUD-31
    ledger = tree()
    totals = ledger.report("grandchild", "1", spend(5), 0.0)
    assert list(totals) == ["grandchild", "child", "lead"], "nearest first"
    assert {run: total.input_tokens for run, total in totals.items()} == {"grandchild": 5, "child": 5, "lead": 5}
    assert {run: total.input_tokens for run, total in ledger.report("other", "1", spend(2), 0.0).items()} == {"other": 2, "lead": 7}
    assert ledger.totals("child", 0.0)["child"].input_tokens == 5


def test_a_report_counts_once() -> None:
    # BUD-32
    ledger = tree()
    ledger.report("child", "step-1", spend(5), 0.0)
    assert ledger.report("child", "step-1", spend(5), 0.0)["lead"].input_tokens == 5
    assert ledger.report("other", "step-1", spend(5), 0.0)["lead"].input_tokens == 10, "ids are the run's own"


def test_sums_are_exact_and_an_unknown_cost_stays_unknown() -> None:
    # COST-11, COST-14
    ledger = LedgerCore()
    ledger.open("run", None, 0.0)
    for number in range(10_000):
        total = ledger.report("run", str(number), spend(1, "0.0001"), 0.0)["run"]
    assert total.cost == 1
    ledger.report("run", "unpriced", spend(1, None), 0.0)
    assert ledger.report("run", "priced", spend(1), 0.0)["run"].cost is None


def test_a_closed_runs_spend_stays_above_and_its_account_goes() -> None:
    # BUD-33
    ledger = tree()
    ledger.report("other", "1", spend(5), 0.0)
    ledger.close("other")
    ledger.close("other")
    assert ledger.totals("lead", 0.0)["lead"].input_tokens == 5
    assert len(ledger) == 3


def test_a_run_closed_before_its_children_still_passes_their_spend_up() -> None:
    ledger = tree()
    ledger.close("child")
    assert ledger.report("grandchild", "1", spend(5), 0.0)["lead"].input_tokens == 5
    ledger.close("grandchild")
    assert len(ledger) == 2, "both are gone now"


def test_closing_the_root_drops_its_tree() -> None:
    ledger = tree()
    ledger.open("stranger", None, 0.0)
    ledger.close("lead")
    assert len(ledger) == 1
    with pytest.raises(AgentExecutionError, match="grandchild"):
        ledger.report("grandchild", "1", spend(), 0.0)


def test_an_unknown_run_is_an_error_never_a_fresh_budget() -> None:
    # BUD-33
    ledger = LedgerCore()
    for ask in (
        lambda: ledger.report("run", "1", spend(), 0.0),
        lambda: ledger.totals("run", 0.0),
        lambda: ledger.open("b", "run", 0.0),
    ):
        with pytest.raises(AgentExecutionError) as raised:
            ask()
        assert raised.value.code == "LOUSHO_AGENT_EXECUTION_FAILED"
    assert len(ledger) == 0


def test_opening_again_changes_nothing() -> None:
    ledger = tree()
    ledger.report("lead", "1", spend(5), 0.0)
    ledger.open("lead", None, 1.0)
    ledger.open("child", "lead", 1.0)
    assert ledger.totals("lead", 1.0)["lead"].input_tokens == 5
    ledger.close("grandchild")
    ledger.close("child")
    ledger.close("other")
    assert len(ledger) == 1


def test_abandoned_trees_are_dropped_and_used_ones_are_not() -> None:
    ledger = tree()
    ledger.open("used", None, 0.0)
    ledger.totals("used", ABANDONED_AFTER_S / 2)
    ledger.open("new", None, ABANDONED_AFTER_S)
    assert len(ledger) == 2
    assert ledger.totals("used", ABANDONED_AFTER_S)


def test_many_runs_leave_nothing_behind() -> None:
    ledger = LedgerCore()
    ledger.open("lead", None, 0.0)
    for number in range(1000):
        run = f"child-{number}"
        ledger.open(run, "lead", 0.0)
        ledger.report(run, "1", spend(1), 0.0)
        ledger.close(run)
    assert len(ledger) == 1
    assert ledger.totals("lead", 0.0)["lead"].input_tokens == 1000


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 3), st.integers(0, 100), st.booleans()), max_size=60),
)
def test_a_total_is_the_sum_of_its_subtree_whatever_is_repeated_or_closed(
    shape: list[int], calls: list[tuple[int, int, int, bool]]
) -> None:
    # BUD-17, BUD-32
    parents: dict[int, int | None] = {0: None} | {node + 1: pick % (node + 1) for node, pick in enumerate(shape)}
    ledger = LedgerCore()
    for node, parent in parents.items():
        ledger.open(str(node), None if parent is None else str(parent), 0.0)
    expected = dict.fromkeys(parents, 0)
    seen: set[tuple[int, int]] = set()
    closed: set[int] = set()
    for pick, call_id, tokens, close in calls:
        node = pick % len(parents)
        if node in closed:
            continue
        if (node, call_id) not in seen:
            seen.add((node, call_id))
            above: int | None = node
            while above is not None:
                expected[above] += tokens
                above = parents[above]
        totals = ledger.report(str(node), str(call_id), Spend(tokens), 0.0)
        assert {int(run): total.input_tokens for run, total in totals.items()}.items() <= expected.items()
        if close and node:
            ledger.close(str(node))
            closed.add(node)
    assert ledger.totals("0", 0.0)["0"].input_tokens == expected[0]
    for node in reversed(parents):
        ledger.close(str(node))
    assert len(ledger) == 0


def test_threads_share_a_ledger() -> None:
    # RL-D3 for budgets: runs of several event loops report to one lead
    import asyncio

    ledger = LocalLedger()
    asyncio.run(ledger.open("lead"))

    async def work(child: str) -> None:
        await ledger.open(child, "lead")
        for number in range(500):
            await ledger.report(child, str(number), Spend(1, 0, Decimal("0.01"), 1))
        await ledger.close(child)

    threads = [threading.Thread(target=lambda n=n: asyncio.run(work(f"child-{n}"))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert asyncio.run(ledger.totals("lead"))["lead"] == Spend(2000, 0, Decimal(20), 2000)
