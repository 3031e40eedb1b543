"""The arithmetic of budgets: what the runs of a tree have spent, each run's total including everything below it.

`LedgerCore` decides and knows no clock and no I/O; `LocalLedger` is its form in one process. Memory follows the runs that are open:
a closed run leaves nothing but its figures in the accounts above it, a closed root takes its tree along, and trees nobody touches
for `ABANDONED_AFTER_S` are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import AgentExecutionError
from lousho_ray.usage import Spend

ABANDONED_AFTER_S = 24 * 3600.0
"""After this long without an open, report or question a tree belongs to nobody: its runs' processes died without closing them."""


@dataclass(slots=True, eq=False)
class Tree:
    """The runs below one top-level run."""

    used_at: float
    runs: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Account:
    """One run's."""

    parent: str | None
    tree: Tree
    total: Spend = field(default_factory=Spend)
    calls: set[str] = field(default_factory=set)
    children: int = 0
    closed: bool = False


class LedgerCore:
    """Accounts of runs, by run id."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._trees: dict[str, Tree] = {}
        self._swept_at = 0.0

    def __len__(self) -> int:
        """How many accounts are kept."""
        return len(self._accounts)

    def open(self, run_id: str, parent: str | None, now: float) -> None:
        """Starts an account below `parent`'s. Does nothing when it exists.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, the parent has no account (any more).
        """
        self._sweep(now)
        if run_id in self._accounts:
            return
        if parent is None:
            tree = self._trees[run_id] = Tree(now)
        else:
            above = self._account(parent, now)
            above.children += 1
            tree = above.tree
        tree.runs.add(run_id)
        self._accounts[run_id] = Account(parent, tree)

    def report(self, run_id: str, call_id: str, spend: Spend, now: float) -> dict[str, Spend]:
        """Books a finished model call in the run's account and those above; returns their totals. A `call_id` counts once.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, the run has no account (any more).
        """
        account = self._account(run_id, now)
        if call_id not in account.calls:
            account.calls.add(call_id)
            for above in self._upwards(run_id):
                self._accounts[above].total += spend
        return self.totals(run_id, now)

    def totals(self, run_id: str, now: float) -> dict[str, Spend]:
        """The totals of the run and of every run above it, nearest first.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, the run has no account (any more).
        """
        self._account(run_id, now)
        return {above: self._accounts[above].total for above in self._upwards(run_id)}

    def close(self, run_id: str) -> None:
        """Ends an account; the accounts above keep what it spent. Does nothing when there is none."""
        account = self._accounts.get(run_id)
        if account is None:
            return
        account.closed = True
        account.calls.clear()
        if account.parent is None:
            self._drop(run_id)
            return
        here: str | None = run_id
        while here is not None and (account := self._accounts[here]).closed and not account.children and account.parent is not None:
            del self._accounts[here]
            account.tree.runs.discard(here)
            self._accounts[account.parent].children -= 1
            here = account.parent

    def _account(self, run_id: str, now: float) -> Account:
        account = self._accounts.get(run_id)
        if account is None:
            raise AgentExecutionError(
                f"The budget of run {run_id!r} is not known: the run was closed, or what keeps its account was restarted and lost "
                f"it. The run cannot go on, because nobody could tell when its limits are reached."
            )
        account.tree.used_at = now
        return account

    def _upwards(self, run_id: str) -> list[str]:
        line, here = [], self._accounts[run_id]
        line.append(run_id)
        while here.parent is not None:
            line.append(here.parent)
            here = self._accounts[here.parent]
        return line

    def _drop(self, root: str) -> None:
        for run_id in self._trees.pop(root).runs:
            del self._accounts[run_id]

    def _sweep(self, now: float) -> None:
        if now - self._swept_at >= ABANDONED_AFTER_S / 24:
            self._swept_at = now
            for root in [root for root, tree in self._trees.items() if now - tree.used_at >= ABANDONED_AFTER_S]:
                self._drop(root)


class LocalLedger:
    """A `Ledger` in this process, for any number of threads."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._core = LedgerCore()
        self._clock = clock
        self._lock = threading.Lock()

    async def open(self, run_id: str, parent: str | None = None) -> None:
        with self._lock:
            self._core.open(run_id, parent, self._clock.now())

    async def report(self, run_id: str, call_id: str, spend: Spend) -> Mapping[str, Spend]:
        with self._lock:
            return self._core.report(run_id, call_id, spend, self._clock.now())

    async def totals(self, run_id: str) -> Mapping[str, Spend]:
        with self._lock:
            return self._core.totals(run_id, self._clock.now())

    async def close(self, run_id: str) -> None:
        with self._lock:
            self._core.close(run_id)
