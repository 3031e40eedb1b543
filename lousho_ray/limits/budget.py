"""The arithmetic of budgets: what the runs of a tree have spent, each run's total including everything below it.

`LedgerCore` decides and knows no clock and no I/O; `LocalLedger` is its form in one process. Memory follows the runs that are open:
a closed run leaves nothing but its figures in the accounts above it, a closed root takes its tree along, and trees nobody touches
for `ABANDONED_AFTER_S` are dropped.

A *reservation* sets an estimate aside in all accounts of a line while a call is in flight; the report of the call settles it.

A ledger that has lost its memory is told by its clients what they know (`restore`): of each account the highest total that one of
them was ever told counts. Whoever got the last answer was told everything.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import AgentExecutionError
from lousho_ray.limits.checks import Breach, Cap
from lousho_ray.usage import ZERO, Spend

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
    restored: Spend = field(default_factory=Spend)
    booked: Spend = field(default_factory=Spend)
    reserved: Spend = field(default_factory=Spend)
    calls: set[str] = field(default_factory=set)
    in_flight: dict[str, Spend] = field(default_factory=dict)
    children: int = 0
    closed: bool = False

    @property
    def total(self) -> Spend:
        return self.restored + self.booked


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call must not be made (now).

    Attributes:
        cap: Which of the caps: its index.
        breach: The limit, and what it would have come to.
        for_now: It fits as soon as calls in flight cost less than was set aside for them.
    """

    cap: int
    breach: Breach
    for_now: bool


class Ledger(Protocol):
    """Adds up what the runs of one tree spend, and sets estimates aside. A run's total includes all of its descendants, finished or
    not. A port: `LocalLedger` in one process, `RemoteLedger` over the budget actor."""

    async def open(self, run_id: str, parent: str | None = None) -> None:
        """Starts a run's account. Opening an open account again changes nothing."""
        ...

    async def report(self, run_id: str, call_id: str, spend: Spend) -> Mapping[str, Spend]:
        """Books one finished model call and returns the totals of the run and of every run above it. A `call_id` counts once."""
        ...

    async def note(self, run_id: str, call_id: str, spend: Spend) -> None:
        """A `report` whose answer nobody looks at. It is booked soon, and before anything that is asked for the run later."""
        ...

    async def reserve(self, run_id: str, call_id: str, estimate: Spend, caps: Sequence[Cap]) -> Refusal | None:
        """Sets an estimate aside in the run's account and those above, if it fits under all caps together with what is set aside
        already; at once or not at all. The report of the same `call_id` settles it."""
        ...

    async def release(self, run_id: str, call_id: str) -> None:
        """Gives back what was set aside for a call that spent nothing. Does nothing when there is nothing."""
        ...

    async def totals(self, run_id: str) -> Mapping[str, Spend]:
        """The totals of the run and of every run above it."""
        ...

    async def close(self, run_id: str) -> None:
        """Ends a run's account; what it spent stays in the accounts above it."""
        ...


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
        self._settle(run_id, call_id)
        if call_id not in account.calls:
            account.calls.add(call_id)
            for above in self._upwards(run_id):
                self._accounts[above].booked += spend
        return self.totals(run_id, now)

    def reserve(self, run_id: str, call_id: str, estimate: Spend, caps: Sequence[Cap], now: float) -> Refusal | None:
        """Sets an estimate aside in the run's account and those above, if it fits under all caps. A `call_id` counts once.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, the run has no account (any more).
        """
        account = self._account(run_id, now)
        if call_id in account.in_flight or call_id in account.calls:
            return None
        for_now: Refusal | None = None
        for index, cap in enumerate(caps):
            if (capped := self._accounts.get(cap.run_id)) is None:
                continue
            alone = capped.total + estimate
            if (breach := cap.passed_by(alone)) is not None:
                return Refusal(index, breach, for_now=False)
            if for_now is None and (breach := cap.passed_by(alone + capped.reserved)) is not None:
                for_now = Refusal(index, breach, for_now=True)
        if for_now is None:
            account.in_flight[call_id] = estimate
            self._set_aside(run_id, estimate)
        return for_now

    def release(self, run_id: str, call_id: str) -> None:
        """Gives back what was set aside for a call that spent nothing. Does nothing when there is nothing."""
        if run_id in self._accounts:
            self._settle(run_id, call_id)

    def totals(self, run_id: str, now: float) -> dict[str, Spend]:
        """The totals of the run and of every run above it, nearest first.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, the run has no account (any more).
        """
        self._account(run_id, now)
        return {above: self._accounts[above].total for above in self._upwards(run_id)}

    def close(self, run_id: str) -> None:
        """Ends an account; the accounts above keep what it spent. Does nothing when there is none.

        What was set aside for it, and for runs below that were lost with it, is given back.
        """
        account = self._accounts.get(run_id)
        if account is None:
            return
        ended = [run_id] if not account.children else [run for run in account.tree.runs if run_id in self._upwards(run)]
        for run in ended:
            for call_id in list(self._accounts[run].in_flight):
                self._settle(run, call_id)
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

    def restore(self, line: Mapping[str, Spend], in_flight: Mapping[str, Spend], now: float) -> None:
        """Takes in what a client knows from an earlier life of the ledger. May be repeated.

        Args:
            line: The totals of a run and of those above it, nearest first, as it was told last.
            in_flight: What was set aside for the run's calls, by call id.
        """
        above: str | None = None
        for run_id, total in reversed(list(line.items())):
            self.open(run_id, above, now)
            self._accounts[run_id].restored = _most(self._accounts[run_id].restored, total)
            above = run_id
        for run_id in list(line)[:1]:
            account = self._accounts[run_id]
            for call_id, estimate in in_flight.items():
                if call_id not in account.in_flight and call_id not in account.calls:
                    account.in_flight[call_id] = estimate
                    self._set_aside(run_id, estimate)

    def _account(self, run_id: str, now: float) -> Account:
        account = self._accounts.get(run_id)
        if account is None:
            raise AgentExecutionError(
                f"The budget of run {run_id!r} is not known: the run was closed, or what keeps its account was restarted and lost "
                f"it. The run cannot go on, because nobody could tell when its limits are reached."
            )
        account.tree.used_at = now
        return account

    def _settle(self, run_id: str, call_id: str) -> None:
        estimate = self._accounts[run_id].in_flight.pop(call_id, None)
        if estimate is not None:
            self._set_aside(run_id, _negative(estimate))

    def _set_aside(self, run_id: str, estimate: Spend) -> None:
        known = estimate if estimate.cost is not None else replace(estimate, cost=ZERO)
        for above in self._upwards(run_id):
            self._accounts[above].reserved += known

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


def _most(one: Spend, other: Spend) -> Spend:
    cost = None if one.cost is None or other.cost is None else max(one.cost, other.cost)
    tokens = max(one.input_tokens, other.input_tokens), max(one.output_tokens, other.output_tokens)
    return Spend(*tokens, cost, max(one.calls, other.calls))


def _negative(spend: Spend) -> Spend:
    return Spend(-spend.input_tokens, -spend.output_tokens, None if spend.cost is None else -spend.cost, -spend.calls)


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

    async def note(self, run_id: str, call_id: str, spend: Spend) -> None:
        await self.report(run_id, call_id, spend)

    async def reserve(self, run_id: str, call_id: str, estimate: Spend, caps: Sequence[Cap]) -> Refusal | None:
        with self._lock:
            return self._core.reserve(run_id, call_id, estimate, caps, self._clock.now())

    async def release(self, run_id: str, call_id: str) -> None:
        with self._lock:
            self._core.release(run_id, call_id)

    async def totals(self, run_id: str) -> Mapping[str, Spend]:
        with self._lock:
            return self._core.totals(run_id, self._clock.now())

    async def close(self, run_id: str) -> None:
        with self._lock:
            self._core.close(run_id)
