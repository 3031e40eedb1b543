"""Time, injectable: everything that waits or measures takes a `Clock`, so that a test can drive it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    """A pending `call_later`."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The time of one run. Seconds as floats."""

    def now(self) -> float:
        """Monotonic seconds: durations and deadlines."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch: timestamps."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, fn: Callable[[], object]) -> TimerHandle:
        """Calls `fn()` on the running event loop after `seconds`."""
        ...


class SystemClock:
    """The machine's clock and the running event loop's timers."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, fn: Callable[[], object]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, fn)


SYSTEM_CLOCK: Clock = SystemClock()

_last_second: tuple[int, str] = (0, "1970-01-01T00:00:00")


def timestamp(epoch_seconds: float) -> str:
    """ISO 8601 in UTC with milliseconds: `2026-01-01T00:00:00.000Z`. Formats the calendar part once a second."""
    global _last_second
    second, milliseconds = divmod(round(epoch_seconds * 1000), 1000)
    cached, prefix = _last_second
    if cached != second:
        prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        _last_second = (second, prefix)
    return f"{prefix}.{milliseconds:03d}Z"
