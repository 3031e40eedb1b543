"""What a run may spend: its own limits, those of its session over all turns, and those of every lead above it.

Without a ledger a run is alone and its own usage is the sum. With one, a run's total includes all its sub-agents, running or
finished, wherever they run: the ledger's answer is what is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from lousho_ray.cancellation import AbortReason, AbortSignal
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import AgentExecutionError
from lousho_ray.limits.budget import Ledger, Refusal
from lousho_ray.limits.checks import Breach, Cap, Moment, check_limits, check_shared_limits, duration_breach
from lousho_ray.limits.session_spend import SessionSpend
from lousho_ray.loop.result import BudgetBreach
from lousho_ray.options import Limits
from lousho_ray.usage import Spend

NOTHING = Spend()

FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 0.5
"""How long a call waits between two looks at whether those in flight leave room for it."""


@dataclass(frozen=True, slots=True)
class LeadBudget:
    """The limits of a run above this one: tokens and cost are shared, steps and tool errors are not.

    `before` is what counts besides the run's own total: for the limits of a session, its earlier turns.
    """

    name: str
    run_id: str
    limits: Limits
    before: Spend = field(default_factory=Spend)


@dataclass(frozen=True, slots=True)
class SessionBudget:
    """The limits of a session, and what its earlier turns have spent."""

    limits: Limits
    before: SessionSpend


class Budget:
    """The limits of one run, checked before each model call and once more when a reply asks for tools.

    `spent_before` is what a run spent before it paused, when the ledger it goes on in has that under its lead.
    """

    def __init__(
        self,
        run_id: str,
        limits: Limits | None = None,
        *,
        ledger: Ledger | None = None,
        leads: Sequence[LeadBudget] = (),
        session: SessionBudget | None = None,
        parent: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
        started: float | None = None,
        spent_before: Spend = NOTHING,
    ) -> None:
        self.run_id = run_id
        self.limits = limits if limits is not None else Limits()
        self.leads = tuple(leads)
        self.session = session
        self._limited = session is not None or bool(self.limits.model_fields_set)
        self.ledger = ledger
        self._closed = False
        self._parent = parent
        self._before = spent_before
        self._clock = clock
        self._started = clock.now() if started is None else started

    @property
    def elapsed_ms(self) -> float:
        return (self._clock.now() - self._started) * 1000

    @property
    def limits_cost(self) -> bool:
        """Whether a limit on the cost is checked: one of the run, of a run above it, or of a session that knows its cost."""
        session = self.session
        capped = session is not None and session.limits.max_cost_usd is not None and session.before.spend.cost is not None
        return capped or any(limits.max_cost_usd is not None for limits in (self.limits, *(lead.limits for lead in self.leads)))

    @property
    def limits_spend(self) -> bool:
        """Whether anything limits the tokens or the cost of this run and those below it: else no sum is needed."""
        session = () if self.session is None else (self.session.limits,)
        return any(
            most is not None
            for limits in (self.limits, *session, *(lead.limits for lead in self.leads))
            for most in (limits.max_tokens, limits.max_input_tokens, limits.max_output_tokens, limits.max_cost_usd)
        )

    def for_children(self, name: str) -> tuple[LeadBudget, ...]:
        """What the sub-agents of this run are held to, nearest first."""
        own = [LeadBudget(name, self.run_id, self.limits)]
        if self.session is not None:
            own.append(LeadBudget(name, self.run_id, self.session.limits, self.session.before.spend))
        return (*own, *self.leads)

    def throws(self, breach: BudgetBreach) -> bool:
        """Whether a breach is raised in the end. Sub-agents always stop instead."""
        session = self.session
        limits = session.limits if breach.scope == "session" and session is not None else self.limits
        return limits.on_exceeded == "throw" and not self.leads

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
        """Ends the account, once everything the run has spent is booked. Does nothing the second time.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`: what keeps the account is lost.
        """
        if self.ledger is not None and not self._closed:
            self._closed = True
            await self.ledger.close(self.run_id)

    async def abandon(self) -> None:
        """Ends the account of a run that has failed, which is error enough. Does nothing after `close()`."""
        with suppress(AgentExecutionError):
            await self.close()

    def arm(self, abort: AbortSignal) -> Callable[[], None]:
        """Starts the clock of `max_duration_ms`, which interrupts what is in flight. Returns a function that stops it."""
        deadline = self._deadline()
        if deadline is None:
            return lambda: None
        left_ms, breach = deadline
        whose = "run" if breach.scope == "run" else "session"
        reason = AbortReason("TimeoutError", f"The {whose} reached its limit of {breach.max:g} ms.", deadline=True)
        return self._clock.call_later(max(0.0, left_ms) / 1000, lambda: abort.abort(reason)).cancel

    def deadline_breach(self) -> BudgetBreach:
        """The breach to report when a deadline interrupted the run: its own, else that of the nearest lead with one."""
        deadline = self._deadline()
        leads = (lead.limits for lead in self.leads if lead.limits.max_duration_ms is not None)
        if deadline is None or deadline[0] > 0:
            above = next((_breach(duration_breach(limits, 0.0)) for limits in leads), None)
            if above is not None:
                return above
        assert deadline is not None
        return deadline[1]

    def _deadline(self) -> tuple[float, BudgetBreach] | None:
        """The deadline that comes first, the run's or its session's: the milliseconds left, and the breach it is."""
        found: list[tuple[float, BudgetBreach]] = []
        scopes: list[tuple[Literal["run", "session"], Limits, float]] = [("run", self.limits, self.elapsed_ms)]
        if self.session is not None:
            scopes.append(("session", self.session.limits, self.session.before.duration_ms + self.elapsed_ms))
        for scope, limits, elapsed_ms in scopes:
            if limits.max_duration_ms is not None:
                found.append((limits.max_duration_ms - elapsed_ms, _breach(duration_breach(limits, elapsed_ms), scope)))
        return min(found, key=lambda deadline: deadline[0], default=None)

    async def before_call(self, spent: Spend, *, steps: int, tool_errors: int) -> BudgetBreach | None:
        """The first limit that is reached before another model call, or `None`."""
        return self._reached(await self._totals(spent), "before-call", steps, tool_errors)

    async def after_tools_asked(self, call_id: str, call: Spend, spent: Spend) -> BudgetBreach | None:
        """Books a finished model call under an id that counts once; the first limit that keeps its tool calls from running."""
        totals = {self.run_id: spent} if self.ledger is None else await self.ledger.report(self.run_id, call_id, call)
        return self._reached(totals, "after-tools-asked")

    async def note(self, call_id: str, call: Spend) -> None:
        """Books a call when nobody looks at the totals: they are asked for before the next one."""
        if self.ledger is not None:
            await self.ledger.note(self.run_id, call_id, call)

    @property
    def reserves(self) -> bool:
        """Whether a limit of this run, of its session or of a run above it wants estimates set aside."""
        return bool(self._caps())

    async def reserve(self, call_id: str, estimate: Spend, spent: Spend) -> BudgetBreach | None:
        """Sets a call's estimate aside under the limits that ask for it; returns the first one it does not fit under.

        While it does not fit only because of calls in flight, it waits for how they end.
        """
        caps = self._caps()
        delay_s = FIRST_WAIT_S
        while caps:
            refusal = await self._reserve(call_id, estimate, spent, [cap for _, cap in caps])
            if refusal is None:
                return None
            if not refusal.for_now:
                return _breach(refusal.breach, caps[refusal.cap][0])
            await self._clock.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_WAIT_S)
        return None

    async def release(self, call_id: str) -> None:
        """Gives back what was set aside for a call that ended without a report."""
        if self.ledger is not None and self._caps():
            await self.ledger.release(self.run_id, call_id)

    async def _reserve(self, call_id: str, estimate: Spend, spent: Spend, caps: Sequence[Cap]) -> Refusal | None:
        if self.ledger is not None:
            return await self.ledger.reserve(self.run_id, call_id, estimate, caps)
        for index, cap in enumerate(caps):
            if (breach := cap.passed_by(spent + estimate)) is not None:
                return Refusal(index, breach, for_now=False)
        return None

    def _caps(self) -> list[tuple[Literal["run", "session"], Cap]]:
        """The limits under which estimates are set aside, in the order in which they are named."""
        own: Spend = NOTHING if self.ledger is None else self._before
        found: list[tuple[Literal["run", "session"], Cap]] = []
        if self.limits.reserve:
            found.append(("run", Cap.of(self.run_id, self.limits, own)))
        if self.session is not None and self.session.limits.reserve:
            found.append(("session", Cap.of(self.run_id, self.session.limits, self.session.before.spend + own)))
        return found + [("run", Cap.of(lead.run_id, lead.limits, lead.before)) for lead in self.leads if lead.limits.reserve]

    async def _totals(self, spent: Spend) -> Mapping[str, Spend]:
        return {self.run_id: spent} if self.ledger is None else await self.ledger.totals(self.run_id)

    def _reached(self, totals: Mapping[str, Spend], moment: Moment, steps: int = 0, tool_errors: int = 0) -> BudgetBreach | None:
        """The first limit that is reached: of the run, then of its session, then of the runs above it."""
        if not self._limited:
            return self._shared(totals)
        total, elapsed_ms = self._own(totals), self.elapsed_ms
        own = check_limits(self.limits, total, elapsed_ms=elapsed_ms, moment=moment, steps=steps, tool_errors=tool_errors)
        if own is not None:
            return _breach(own)
        if self.session is not None:
            spent = self.session.before.plus(total, steps=steps, duration_ms=elapsed_ms)
            of_session = check_limits(
                self.session.limits,
                spent.spend,
                elapsed_ms=spent.duration_ms,
                moment=moment,
                steps=spent.steps,
                tool_errors=tool_errors,
            )
            if of_session is not None:
                return _breach(of_session, "session")
        return self._shared(totals)

    def _own(self, totals: Mapping[str, Spend]) -> Spend:
        return totals[self.run_id] if self.ledger is None else totals[self.run_id] + self._before

    def _shared(self, totals: Mapping[str, Spend]) -> BudgetBreach | None:
        for lead in self.leads:
            total = totals.get(lead.run_id)
            # A lead's deadline is not checked here: it aborts its sub-agents in flight.
            if total is not None and (breach := check_shared_limits(lead.limits, lead.before + total, elapsed_ms=0.0)):
                return _breach(breach)
        return None


def _breach(breach: Breach, scope: Literal["run", "session"] = "run") -> BudgetBreach:
    return BudgetBreach(breach.limit, breach.value, breach.max, scope)
