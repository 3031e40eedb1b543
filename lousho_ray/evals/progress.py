"""How far a suite is: figures, a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lousho_ray.evals.records import CaseRecord

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.25
NAMED_FAILURES = 20
"""How many failing cases plain lines name; the report has them all."""


@dataclass(slots=True)
class SuiteProgress:
    """The figures of a running suite. No I/O. `earlier` cases were finished by an earlier run."""

    total: int
    earlier: int = 0
    passed: int = 0
    failed: int = 0
    errors: int = 0
    outages: int = 0
    running: int = 0
    tokens: int = 0
    cost: Decimal | None = Decimal(0)
    started: float = field(default_factory=time.monotonic)
    state: str = "running"

    @property
    def done(self) -> int:
        """Cases that ended in this run."""
        return self.passed + self.failed + self.errors + self.outages

    def take(self, record: CaseRecord) -> None:
        """Counts a case that ended."""
        counter = {"passed": "passed", "failed": "failed", "error": "errors", "outage": "outages"}[record.status]
        setattr(self, counter, getattr(self, counter) + 1)
        self.tokens += record.tokens
        cost = record.usage.get("costUsd") if record.usage.get("modelCalls") else "0"
        self.cost = None if self.cost is None or cost is None else self.cost + Decimal(str(cost))

    def per_second(self, now: float | None = None) -> float:
        """Cases that end in a second, over this run."""
        elapsed = (time.monotonic() if now is None else now) - self.started
        return self.done / elapsed if elapsed > 0 else 0.0

    def left_s(self, now: float | None = None) -> float | None:
        """The time left at this pace, in seconds; `None` before the first case has ended."""
        rate = self.per_second(now)
        return (self.total - self.earlier - self.done) / rate if rate > 0 else None

    def line(self, now: float | None = None) -> str:
        """`320/1,000 done, 300 passed, 12 failed, 8 errors, 64 running, $0.42, 31.5/s, 0:22 left`."""
        parts = [f"{self.earlier + self.done:,}/{self.total:,} done", f"{self.passed:,} passed"]
        named = (("failed", self.failed), ("errors", self.errors), ("not finished", self.outages), ("running", self.running))
        parts += [f"{count:,} {name}" for name, count in named if count]
        if self.earlier:
            parts.append(f"{self.earlier:,} of an earlier run")
        parts.append("cost unknown" if self.cost is None else f"${self.cost:.4f}")
        parts.append(f"{self.per_second(now):.1f}/s")
        left = self.left_s(now)
        if left is not None and self.total > self.earlier + self.done:
            parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
        if self.state != "running":
            parts.append(self.state)
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """What `lousho eval status` shows."""
        left = self.left_s()
        return {
            "state": self.state,
            "total": self.total,
            "done": self.earlier + self.done,
            "earlier": self.earlier,
            "passed": self.passed,
            "failed": self.failed,
            "errors": self.errors,
            "outages": self.outages,
            "running": self.running,
            "tokens": self.tokens,
            "costUsd": None if self.cost is None else float(self.cost),
            "perSecond": round(self.per_second(), 3),
            "leftSeconds": None if left is None else round(left, 1),
            "line": self.line(),
        }


class ProgressDisplay:
    """Shows a suite as it runs; use it as an async context manager. Drawn in place in a terminal, else printed now and then."""

    def __init__(self, progress: SuiteProgress, console: Console, *, live: bool | None = None) -> None:
        self._progress = progress
        self._console = console
        self._live_wanted = console.is_terminal if live is None else live
        self._bar: Any = None
        self._task: Any = None
        self._ticker: asyncio.Task[None] | None = None
        self._named = 0

    def ended(self, record: CaseRecord) -> None:
        """A case has ended: one that did not pass is named at once."""
        if record.status == "passed" or self._named > NAMED_FAILURES:
            return
        self._named += 1
        if self._named > NAMED_FAILURES:
            self._say("... more are in the report")
            return
        said = record.error["message"] if record.error else "; ".join(f"{a.name}: {a.message}" for a in record.failed_gates)
        self._say(f"{record.status}: {record.title}: {str(said).splitlines()[0][:200] if said else ''}")

    async def __aenter__(self) -> ProgressDisplay:
        if self._live_wanted:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                BarColumn(bar_width=24), TextColumn("{task.description}"), console=self._console, auto_refresh=False
            )
            self._task = self._bar.add_task("", total=self._progress.total)
            self._bar.start()
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait({self._ticker})
        if self._bar is not None:
            self._draw()
            self._bar.stop()
        else:
            self._say(self._progress.line())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(REDRAW_EVERY_S if self._bar is not None else LINE_EVERY_S)
            if self._bar is not None:
                self._draw()
            else:
                self._say(self._progress.line())

    def _draw(self) -> None:
        self._bar.update(self._task, completed=self._progress.earlier + self._progress.done, description=self._progress.line())
        self._bar.refresh()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
