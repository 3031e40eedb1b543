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

_latest: tuple[int, str] = (0, "1970-01-01T00:00:00.000Z")


def timestamp(epoch_seconds: float) -> str:
    """ISO 8601 in UTC with milliseconds: `2026-01-01T00:00:00.000Z`. Formats each millisecond once while it lasts."""
    global _latest
    at_ms = round(epoch_seconds * 1000)
    cached, text = _latest
    if cached != at_ms:
        second, milliseconds = divmod(at_ms, 1000)
        # Another millisecond of the second that was formatted last shares its calendar part.
        calendar = text[:-5] if cached // 1000 == second else time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        text = f"{calendar}.{milliseconds:03d}Z"
        _latest = (at_ms, text)
    return text
