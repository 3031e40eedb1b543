"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

SETTLE_ROUNDS = 20
"""Event-loop rounds `run_for` gives the tasks between two timers."""


@dataclass(order=True, slots=True)
class FakeTimer:
    """A pending call of a `FakeClock`; timers of one moment fire in the order they were set."""

    at: float
    number: int
    fn: Callable[[], object] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """A `Clock` whose time moves only by `advance` and `run_for`.

    Args:
        start: What `now()` says at first, in seconds.
        wall: What `wall()` says at first, in seconds since the epoch (default 2026-01-01T00:00:00Z).
    """

    def __init__(self, start: float = 0.0, wall: float = 1_767_225_600.0) -> None:
        self._now = start
        self._wall_offset = wall - start
        self._timers: list[FakeTimer] = []
        self._count = 0

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    @property
    def waiting(self) -> int:
        """How many sleeps and timers are pending."""
        return sum(not timer.cancelled for timer in self._timers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        timer = self.call_later(seconds, wake)
        try:
            await woken
        finally:
            timer.cancel()

    def call_later(self, seconds: float, fn: Callable[[], object]) -> FakeTimer:
        self._count += 1
        timer = FakeTimer(self._now + max(seconds, 0.0), self._count, fn)
        heapq.heappush(self._timers, timer)
        return timer

    def advance(self, ms: float) -> None:
        """Moves time on by `ms` milliseconds and fires what falls due, in order, each at its own moment.

        Tasks woken by it run when the caller next awaits. A task that sleeps again does so from the new time: use `run_for` to
        walk through a chain of sleeps.
        """
        end = self._now + ms / 1000
        while (timer := self._due(end)) is not None:
            self._fire(timer)
        self._now = end

    async def run_for(self, ms: float) -> None:
        """Like `advance`, but lets the tasks run between two timers, so that chains of sleeps see every moment."""
        end = self._now + ms / 1000
        await self._settle()
        while (timer := self._due(end)) is not None:
            self._fire(timer)
            await self._settle()
        self._now = end
        await self._settle()

    def _due(self, end: float) -> FakeTimer | None:
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        return heapq.heappop(self._timers) if self._timers and self._timers[0].at <= end else None

    def _fire(self, timer: FakeTimer) -> None:
        self._now = max(self._now, timer.at)
        timer.fn()

    async def _settle(self) -> None:
        for _ in range(SETTLE_ROUNDS):
            await asyncio.sleep(0)
