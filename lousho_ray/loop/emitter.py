"""Emitting events: the envelope (`run_id`, `seq`, `timestamp`) is put on in one place, for a run and for all its sub-agents.

The loop calls `emit(TextDelta, text=...)`; with nobody listening that builds nothing. A sub-agent in the same process shares its
lead's counter through `child()`; one in another process stamps its events itself and the lead stamps them again in `forward()`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from lousho_ray.clock import SYSTEM_CLOCK, Clock, timestamp
from lousho_ray.events import ErrorEvent, ErrorInfo, Event, RunDone, RunStart, SubagentInfo
from lousho_ray.ports import Observer
from lousho_ray.spans import TraceExporter

log = logging.getLogger("lousho_ray")

Drain = Callable[[], Awaitable[None]]


class Stamp:
    """The counter of one stream of events: gapless `seq`, and timestamps that never go back."""

    __slots__ = ("_clock", "_latest", "run_id", "seq")

    def __init__(self, run_id: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.run_id = run_id
        self.seq = 0
        self._clock = clock
        self._latest = 0.0

    def next(self) -> dict[str, Any]:
        now = self._clock.wall()
        if now > self._latest:
            self._latest = now
        seq = self.seq
        self.seq = seq + 1
        return {"run_id": self.run_id, "seq": seq, "timestamp": timestamp(self._latest)}


class Emitter:
    """Builds events and hands them to the sinks. `on` is false when nobody listens: then `emit` does nothing.

    `spans` gets the spans of the run and of its sub-agents, if anybody wants them.
    """

    __slots__ = ("_drain", "_sinks", "_slow", "_stamp", "_subagent", "on", "spans")

    def __init__(
        self,
        stamp: Stamp,
        sinks: Sequence[Observer] = (),
        *,
        drain: Drain | None = None,
        subagent: SubagentInfo | None = None,
        spans: TraceExporter | None = None,
    ) -> None:
        self.spans = spans
        self._stamp = stamp
        self._sinks = tuple(sinks)
        self._drain = drain
        self._subagent = subagent
        self._slow: tuple[Drain, ...] = tuple(filter(None, (getattr(sink, "settled", None) for sink in sinks)))
        self.on = bool(sinks)

    @property
    def run_id(self) -> str:
        return self._stamp.run_id

    @property
    def subagent(self) -> SubagentInfo | None:
        return self._subagent

    def emit(self, kind: type[Any], /, **fields: Any) -> None:
        if not self.on or (self._subagent is not None and kind in _OWN_RUN_ONLY):
            return
        self._send(kind(**self._stamp.next(), subagent=self._subagent, **fields))

    def forward(self, events: Sequence[Event]) -> None:
        """Passes on events that a sub-agent emitted in another process, under this run's own counter."""
        if self.on:
            for event in events:
                self._send(replace(event, **self._stamp.next()))

    def fail(self, error: BaseException) -> None:
        """The two events of a run that failed before it began."""
        self.emit(ErrorEvent, error=ErrorInfo.of(error))
        self.emit(RunDone, finish_reason="error", text="")

    def child(self, subagent: SubagentInfo) -> Emitter:
        """The emitter of a sub-agent in this process."""
        return Emitter(self._stamp, self._sinks, drain=self._drain, subagent=subagent, spans=self.spans)

    async def drain(self) -> None:
        """Waits while a consumer that reads the stream is too far behind, and for sinks that take their time."""
        if self._drain is not None:
            await self._drain()
        for settled in self._slow:
            await settled()

    def _send(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)


_OWN_RUN_ONLY = frozenset({RunStart, RunDone})


def guarded(listener: Observer) -> Observer:
    """A listener that cannot fail the run: what it raises is logged, once per run."""
    failed = False

    def call(event: Event) -> None:
        nonlocal failed
        try:
            listener(event)
        except (Exception, SystemExit):
            if not failed:
                failed = True
                log.exception("An event listener raised on %r; the run goes on. Further failures of it are not logged.", event.type)

    return call
