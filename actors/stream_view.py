"""`StreamView`: the one stream of events that a handle shows of a turn, whichever actors the turn has run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lousho_ray.errors import AgentExecutionError
from lousho_ray.events import Event, EventUsage, RunDone, RunStart, StepDone, StepStart
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.result import ExecutionResult


class StreamView:
    """Numbers the events of one turn without gaps, over all homes it had. Pure: no I/O.

    Attributes:
        cursor: Where to go on in the log of the present home.
        done: Whether `run.done` was shown.
    """

    def __init__(self, run_id: str) -> None:
        self.cursor = 0
        self.done = False
        self._taken = 0
        self._stamp = Stamp(run_id)
        self._moved = False
        self._step: int | None = None
        self._cut: list[Event] = []

    def take(self, events: Sequence[Event], cursor: int) -> list[Event]:
        """The events of a batch, as this stream shows them.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`: events are missing, or came twice.
        """
        for wanted, event in enumerate(events, start=self._taken):
            if event.seq != wanted:
                raise AgentExecutionError(f"The stream of events is broken: event {event.seq} came where {wanted} was due.")
        self.cursor, self._taken = cursor, self._taken + len(events)
        cut, self._cut = self._cut, []
        shown = [*cut, *(event for event in events if not (self._moved and isinstance(event, RunStart)))]
        if self._moved:
            shown = [replace(event, run_id=self._stamp.run_id, seq=self._stamp.seq + number) for number, event in enumerate(shown)]
        self._stamp.seq += len(shown)
        for event in shown:
            if isinstance(event, StepStart) and event.subagent is None:
                self._step = event.step
            elif isinstance(event, StepDone) and event.subagent is None:
                self._step = None
            self.done = self.done or isinstance(event, RunDone)
        return shown

    def cut(self) -> None:
        """The home was lost: its open step ends with `error`, and the next home's log is read from its beginning."""
        self.cursor, self._taken, self._moved = 0, 0, True
        if self._step is not None:
            emitter = Emitter(Stamp(self._stamp.run_id), (self._cut.append,))
            emitter.emit(StepDone, step=self._step, finish_reason="error")
            self._step = None

    def failed(self, error: BaseException) -> list[Event]:
        """The two events that end a stream whose turn was lost, or could not start; nothing after `run.done`."""
        if self.done:
            return []
        self.done = True
        shown: list[Event] = []
        Emitter(self._stamp, (shown.append,)).fail(error)
        return shown

    def ended(self, error: BaseException | None, result: ExecutionResult[Any] | None) -> list[Event]:
        """The end of a stream whose last events were lost with its actor: from the turn's result, or its error."""
        if error is not None or result is None:
            return self.failed(error or AgentExecutionError("The run ended without its last event."))
        self.done = True
        shown: list[Event] = []
        usage = EventUsage.of(result.usage)
        Emitter(self._stamp, (shown.append,)).emit(RunDone, finish_reason=result.finish_reason, text=result.text, usage=usage)
        return shown
