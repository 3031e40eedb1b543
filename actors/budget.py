"""Budgets that processes share: the actor that keeps the accounts of all runs of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lousho_ray.actors.calling import was_restarted
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import AgentExecutionError
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import LedgerCore, Refusal
from lousho_ray.limits.checks import Cap
from lousho_ray.usage import Spend

NOTHING = Spend()

FORGET_PROCESS_AFTER_S = 3600.0

WATCH_S = 60.0
"""How long a `watch` stays open."""

RESTORE_S = 3.0
"""How long an actor that was started again waits for all processes to tell what they know: they notice its end within 2 s."""

ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": 10_000}
"""How to start `BudgetActor`. What a restarted one knows, its clients tell it."""


class Ask(NamedTuple):
    """One thing a process wants of its ledger: `open`, `reserve`, `release`, `report`, `totals` or `close`."""

    method: str
    run_id: str
    call_id: str = ""
    spend: Spend = NOTHING
    parent: str | None = None
    caps: Sequence[Cap] = ()


class Answer(NamedTuple):
    """Totals by run, nearest first, or why there are none; to `reserve` why the call must not be made."""

    totals: Mapping[str, Spend]
    error: str | None = None
    refusal: Refusal | None = None


class Replied(NamedTuple):
    """What came of a process's asks. Without answers nothing was done: in this life of the actor it has to `restore` first."""

    life: str
    answers: list[Answer] | None


class Known(NamedTuple):
    """What a process knows of a run: the totals it was told last, nearest first, and what is set aside for its calls."""

    line: Mapping[str, Spend]
    in_flight: Mapping[str, Spend]


class BudgetActor:
    """The accounts of all runs of a job. Runs no user code.

    Args:
        restarted: Whether an earlier life of this actor was lost; by default Ray is asked.
        clock: Its own monotonic clock.
    """

    def __init__(self, restarted: bool | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._life = new_id()
        self._core = LedgerCore()
        self._last: dict[str, tuple[int, list[Answer], float]] = {}
        now = self._swept_at = clock.now()
        self._serves_at = now + RESTORE_S if (was_restarted() if restarted is None else restarted) else now

    async def apply(self, process_id: str, life: str, seq: int, asks: Sequence[Ask]) -> Replied:
        """Does what a process asks for, in order. Sent again with the same `seq` it is answered again and not done again."""
        if life and life != self._life:
            return Replied(self._life, None)
        while (wait_s := self._serves_at - self._clock.now()) > 0:
            await self._clock.sleep(wait_s)
        now = self._clock.now()
        last = self._last.get(process_id)
        if last is not None and last[0] == seq:
            return Replied(self._life, last[1])
        answers = [self._answer(ask, now) for ask in asks]
        self._last[process_id] = (seq, answers, now)
        self._sweep(now)
        return Replied(self._life, answers)

    async def restore(self, runs: Sequence[Known]) -> str:
        """Takes in what a process knows; returns the life it was told."""
        now = self._clock.now()
        for known in runs:
            self._core.restore(known.line, known.in_flight, now)
        return self._life

    async def watch(self, life: str) -> str:
        """Says which life this is; for a process that knows it already after `WATCH_S`. So it learns of the next one soon."""
        if life == self._life:
            await self._clock.sleep(WATCH_S)
        return self._life

    def _answer(self, ask: Ask, now: float) -> Answer:
        try:
            match ask.method:
                case "open":
                    self._core.open(ask.run_id, ask.parent, now)
                    return Answer(self._core.totals(ask.run_id, now))
                case "reserve":
                    return Answer({}, refusal=self._core.reserve(ask.run_id, ask.call_id, ask.spend, ask.caps, now))
                case "release":
                    self._core.release(ask.run_id, ask.call_id)
                case "report":
                    return Answer(self._core.report(ask.run_id, ask.call_id, ask.spend, now))
                case "totals":
                    return Answer(self._core.totals(ask.run_id, now))
                case _:
                    self._core.close(ask.run_id)
        except AgentExecutionError as error:
            return Answer({}, error.detail)
        return Answer({})

    def _sweep(self, now: float) -> None:
        if now - self._swept_at >= FORGET_PROCESS_AFTER_S:
            self._swept_at = now
            self._last = {key: last for key, last in self._last.items() if now - last[2] < FORGET_PROCESS_AFTER_S}
