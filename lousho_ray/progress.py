"""Live progress of a run: which agent does what, tokens, cost, budget left and the limiter's queue.

`RunProgress` is an event listener: `create_agent(on_event=progress)`. In a terminal or notebook it draws a table that updates in
place, elsewhere (job logs, pipes) it prints a line when something of note happens.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lousho_ray.events import (
    BudgetExceeded,
    ErrorEvent,
    Event,
    ProviderRetry,
    RunDone,
    RunStart,
    StepDone,
    StepStart,
    TextDelta,
    ToolDone,
    ToolError,
    ToolStart,
)
from lousho_ray.options import Limits
from lousho_ray.usage import Spend

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from lousho_ray.limits.limiter import RateLimiter

POLL_LIMITER_S = 0.5


@dataclass(slots=True)
class AgentProgress:
    """One agent's part of a run: the lead, or one sub-agent's task."""

    name: str
    label: str = ""
    status: str = "waiting"
    step: int = 0
    doing: str = ""
    spend: Spend = field(default_factory=Spend)


class RunProgressModel:
    """Folds the events of a run into one row per agent. No I/O; `feed` returns a line worth printing, or `None`."""

    def __init__(self) -> None:
        self.lead = AgentProgress("agent")
        self.children: dict[str, AgentProgress] = {}
        self.note = ""

    @property
    def rows(self) -> list[AgentProgress]:
        return [self.lead, *self.children.values()]

    @property
    def total(self) -> Spend:
        """What lead and sub-agents have spent so far."""
        total = Spend()
        for row in self.rows:
            total += row.spend
        return total

    def feed(self, event: Event) -> str | None:
        row = self._row(event)
        match event:
            case RunStart(agent_name=name):
                self.lead.name, self.lead.status = name, "running"
            case StepStart(step=step):
                first = row.status == "waiting"
                row.status, row.step, row.doing = "running", step, "thinking"
                return f"{_who(row)} started" if first and row is not self.lead else None
            case TextDelta():
                row.doing = "writing"
            case ToolStart(tool_name=tool, args=args):
                row.doing = f"{tool}({_brief(args)})"
                if event.tool_name == "task" and event.subagent is None:
                    self.children.setdefault(event.tool_call_id, _task_row(args))
            case ToolDone() | ToolError():
                return self._tool_ended(event)
            case StepDone(usage=usage):
                if usage is not None:
                    cost = None if usage.cost_usd is None else Decimal(str(usage.cost_usd))
                    row.spend += Spend(usage.input_tokens, usage.output_tokens, cost, 1)
            case ProviderRetry(attempt=attempt, error=error):
                self.note = f"{_who(row)}: try {attempt} failed ({error.message}); trying again"
                return self.note
            case BudgetExceeded(limit=limit, value=value, max=most):
                self.note = f"{_who(row)} stopped at the {limit} limit ({value:g} of {most:g})"
                return self.note
            case ErrorEvent(error=failure):
                row.status = "failed"
                return f"{_who(row)} failed: {failure.message}"
            case RunDone(finish_reason=reason):
                self.lead.status, self.lead.doing = ("done" if reason == "stop" else reason), ""
                return f"{_who(self.lead)} ended: {reason}"
            case _:
                pass
        return None

    def _tool_ended(self, event: ToolDone | ToolError) -> str | None:
        child = self.children.get(event.tool_call_id) if event.subagent is None else None
        if child is None:
            self._row(event).doing = ""
            return None
        child.status, child.doing = ("done", "") if isinstance(event, ToolDone) else ("failed", _cut(event.error.message, 120))
        spent = f"{child.spend.calls} calls, {child.spend.total_tokens:,} tokens"
        return f"{_who(child)} {child.status} ({spent}){': ' + child.doing if child.doing else ''}"

    def _row(self, event: Event) -> AgentProgress:
        info = event.subagent
        if info is None:
            return self.lead
        while info.parent is not None:
            info = info.parent
        return self.children.setdefault(info.tool_call_id, AgentProgress(info.name, info.description or ""))


class RunProgress:
    """Shows a run as it happens; pass it as `create_agent(on_event=...)` and use it as a context manager around the run.

    Args:
        limits: The agent's limits, for the budget that is left.
        limiter: Shows its queue, asked twice a second.
        console: A rich console; default standard output.
        live: Draw in place; default: when the console is a terminal or a notebook.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        limiter: RateLimiter | None = None,
        console: Console | None = None,
        live: bool | None = None,
    ) -> None:
        from rich.console import Console

        self.model = RunProgressModel()
        self._console = console or Console()
        self._live_wanted = self._console.is_terminal or self._console.is_jupyter if live is None else live
        self._live: Any = None
        self._limits = limits or Limits()
        self._limiter = limiter
        self._queue = ""
        self._poller: asyncio.Task[None] | None = None
        self._started = time.monotonic()

    def __call__(self, event: Event) -> None:
        line = self.model.feed(event)
        if line is not None and self._live is None:
            self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {line}", markup=False, highlight=False)

    def __enter__(self) -> RunProgress:
        self._started = time.monotonic()
        if self._live_wanted:
            from rich.live import Live

            self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=8, transient=False)
            self._live.start()
        if self._limiter is not None:
            with suppress(RuntimeError):
                self._poller = asyncio.get_running_loop().create_task(self._poll())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._poller is not None:
            self._poller.cancel()
        self._queue = ""
        if self._live is not None:
            self._live.stop()
            self._live = None

    async def _poll(self) -> None:
        """Asks the limiter for its queue while the display is shown."""
        assert self._limiter is not None
        while True:
            stats = await self._limiter.stats()
            self._queue = f"limiter: {stats.running} running, {stats.waiting} waiting"
            await asyncio.sleep(POLL_LIMITER_S)

    def render(self) -> RenderableType:
        """The table as it stands."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column, justify in (("agent", "left"), ("status", "left"), ("step", "right"), ("tokens", "right"), ("now", "left")):
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for row in self.model.rows:
            indent = "" if row is self.model.lead else "  "
            style = {"done": "green", "failed": "red", "running": "cyan"}.get(row.status, "dim")
            name = Text(f"{indent}{row.name}{' · ' + row.label if row.label else ''}")
            table.add_row(
                name,
                Text(row.status, style),
                str(row.step or ""),
                f"{row.spend.total_tokens:,}",
                Text(row.doing, overflow="ellipsis"),
            )
        return Group(table, Text(self.status_line(), "bold"))

    def status_line(self) -> str:
        """Calls, tokens, cost, budget left, limiter queue and time."""
        total = self.model.total
        parts = [f"{total.calls} model calls", f"{total.total_tokens:,} tokens"]
        if total.cost is not None:
            parts.append(f"${total.cost:.4f}")
        parts += _left(self._limits, total)
        if self._queue:
            parts.append(self._queue)
        return " · ".join([*parts, f"{time.monotonic() - self._started:.1f} s"])

    def usage_table(self) -> RenderableType:
        """What each agent spent, sub-agents of one name together."""
        from rich.table import Table

        table = Table(title="Usage by agent", title_justify="left")
        for column in ("agent", "runs", "model calls", "input tokens", "output tokens", "cost (USD)"):
            table.add_column(column, justify="left" if column == "agent" else "right")
        for name, (runs, spend) in self.usage_by_agent().items():
            cost = "unknown" if spend.cost is None else f"{spend.cost:.4f}"
            table.add_row(name, str(runs), str(spend.calls), f"{spend.input_tokens:,}", f"{spend.output_tokens:,}", cost)
        return table

    def usage_by_agent(self) -> dict[str, tuple[int, Spend]]:
        """Runs and spend by agent name, the lead first."""
        found: dict[str, tuple[int, Spend]] = {}
        for row in self.model.rows:
            runs, spend = found.get(row.name, (0, Spend()))
            found[row.name] = (runs + 1, spend + row.spend)
        return found


def _left(limits: Limits, spent: Spend) -> list[str]:
    left: list[str] = []
    if limits.max_cost_usd is not None and spent.cost is not None:
        left.append(f"${max(Decimal(0), Decimal(str(limits.max_cost_usd)) - spent.cost):.4f} left")
    if limits.max_tokens is not None:
        left.append(f"{max(0, limits.max_tokens - spent.total_tokens):,} tokens left")
    return left


def _task_row(args: Any) -> AgentProgress:
    return AgentProgress(str(args.get("agent", "sub-agent")), str(args.get("description", "")))


def _who(row: AgentProgress) -> str:
    return f"{row.name} ({row.label})" if row.label else row.name


def _brief(args: Any) -> str:
    return _cut(", ".join(str(value) for value in args.values()) if isinstance(args, dict) else str(args), 48)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 3]}..."
