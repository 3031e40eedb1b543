"""What a run may spend: its own limits, and those of every lead above it.

Without a ledger a run is alone and its own usage is the sum. With one, a run's total includes all its sub-agents, running or
finished, wherever they run: the ledger's answer is what is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lousho_ray.cancellation import AbortReason, AbortSignal
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.limits.checks import Breach, check_limits, check_shared_limits, duration_breach
from lousho_ray.loop.result import BudgetBreach
from lousho_ray.options import Limits
from lousho_ray.ports import Ledger
from lousho_ray.usage import Spend


@dataclass(frozen=True, slots=True)
class LeadBudget:
    """The limits of a run above this one: tokens and cost are shared, steps and tool errors are not."""

    name: str
    run_id: str
    limits: Limits


class Budget:
    """The limits of one run, checked before each model call and once more when a reply asks for tools."""

    def __init__(
        self,
        run_id: str,
        limits: Limits | None = None,
        *,
        ledger: Ledger | None = None,
        leads: Sequence[LeadBudget] = (),
        parent: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
        started: float | None = None,
    ) -> None:
        self.run_id = run_id
        self.limits = limits if limits is not None else Limits()
        self.leads = tuple(leads)
        self.ledger = ledger
        self._parent = parent
        self._clock = clock
        self._started = clock.now() if started is None else started

    @property
    def elapsed_ms(self) -> float:
        return (self._clock.now() - self._started) * 1000

    @property
    def limits_cost(self) -> bool:
        """Whether the run's own limits or those of a run above it cap the cost."""
        return any(limits.max_cost_usd is not None for limits in (self.limits, *(lead.limits for lead in self.leads)))

    async def open(self) -> None:
        if self.ledger is not None:
            await self.ledger.open(self.run_id, self._parent)

    async def join(self, ledger: Ledger, spent: Spend) -> None:
        """Puts a run that was alone into a ledger, with what it has spent so far: its first sub-agent is about to start."""
        if self.ledger is None:
            await ledger.open(self.run_id, self._parent)
            await ledger.report(self.run_id, "before-join", spent)
            self.ledger = ledger

    async def close(self) -> None:
        if self.ledger is not None:
            await self.ledger.close(self.run_id)

    def arm(self, abort: AbortSignal) -> Callable[[], None]:
        """Starts the clock of `max_duration_ms`, which interrupts what is in flight. Returns a function that stops it."""
        if self.limits.max_duration_ms is None:
            return lambda: None
        reason = AbortReason("TimeoutError", f"The run reached its limit of {self.limits.max_duration_ms:g} ms.", deadline=True)
        left_s = max(0.0, self.limits.max_duration_ms - self.elapsed_ms) / 1000
        return self._clock.call_later(left_s, lambda: abort.abort(reason)).cancel

    def deadline_breach(self) -> BudgetBreach:
        """The breach to report when a deadline interrupted the run: its own, else that of the nearest lead with one."""
        limits, elapsed_ms = self.limits, self.elapsed_ms
        own = limits.max_duration_ms
        if own is None or elapsed_ms < own:
            leads = (lead.limits for lead in self.leads if lead.limits.max_duration_ms is not None)
            limits, elapsed_ms = next(((lead, 0.0) for lead in leads), (limits, elapsed_ms))
        breach = duration_breach(limits, elapsed_ms)
        return BudgetBreach(breach.limit, breach.value, breach.max)

    async def before_call(self, spent: Spend, *, steps: int, tool_errors: int) -> BudgetBreach | None:
        """The first limit that is reached before another model call, or `None`."""
        totals = await self._totals(spent)
        own = check_limits(
            self.limits, totals[self.run_id], elapsed_ms=self.elapsed_ms, steps=steps, tool_errors=tool_errors, moment="before-call"
        )
        return _breach(own) or self._shared(totals)

    async def after_tools_asked(self, call_id: str, call: Spend, spent: Spend) -> BudgetBreach | None:
        """Books a finished model call; the first limit that keeps its tool calls from running, or `None`."""
        totals = await self.report(call_id, call, spent)
        own = check_limits(self.limits, totals[self.run_id], elapsed_ms=self.elapsed_ms, moment="after-tools-asked")
        return _breach(own) or self._shared(totals)

    async def report(self, call_id: str, call: Spend, spent: Spend) -> Mapping[str, Spend]:
        """Books a finished model call under an id that counts once."""
        if self.ledger is None:
            return {self.run_id: spent}
        return await self.ledger.report(self.run_id, call_id, call)

    async def _totals(self, spent: Spend) -> Mapping[str, Spend]:
        return {self.run_id: spent} if self.ledger is None else await self.ledger.totals(self.run_id)

    def _shared(self, totals: Mapping[str, Spend]) -> BudgetBreach | None:
        for lead in self.leads:
            total = totals.get(lead.run_id)
            # A lead's deadline is not checked here: it aborts its sub-agents in flight.
            if total is not None and (breach := _breach(check_shared_limits(lead.limits, total, elapsed_ms=0.0))) is not None:
                return breach
        return None


def _breach(breach: Breach | None) -> BudgetBreach | None:
    return None if breach is None else BudgetBreach(breach.limit, breach.value, breach.max)
