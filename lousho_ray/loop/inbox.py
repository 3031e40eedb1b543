"""Input that reaches a run while it runs: `enqueue()` waits for the next safe point, `steer()` may cut the model call short.

An `Inbox` belongs to one run. It may be used from other threads (the control calls of a session actor): everything that touches
the run happens on the run's own event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lousho_ray.cancellation import AbortSignal
from lousho_ray.events import InputApplied, InputQueued, InputSteered
from lousho_ray.ids import new_id
from lousho_ray.loop.emitter import Emitter
from lousho_ray.messages import Message


@dataclass(slots=True, eq=False)
class QueuedInput:
    """One input that waits. `applied` resolves to whether it joined the transcript of the run.

    `restored` input comes from a checkpoint: whoever gave it is gone and cannot send it again.
    """

    messages: tuple[Message, ...]
    id: str = field(default_factory=lambda: new_id("in_"))
    steers: bool = False
    restored: bool = False
    applied: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def text(self) -> str:
        return "\n".join(message.text for message in self.messages)

    def settle(self, applied: bool) -> None:
        if not self.applied.done():
            self.applied.set_result(applied)


class Inbox:
    """What waits to join a run, and the model call that a steer may cut short."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedInput] = deque()
        self._call: AbortSignal | None = None
        self._steered = False
        self._emitter: Emitter | None = None
        self._taken: Callable[[], None] | None = None
        self._closed = False

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def pending(self) -> tuple[Message, ...]:
        """The messages that wait, in order: what a checkpoint keeps of them."""
        return tuple(message for item in self._waiting for message in item.messages)

    @property
    def restored(self) -> tuple[Message, ...]:
        """Those of them that a checkpoint brought: a pause keeps them. Other input goes back to its sender when the run pauses."""
        return tuple(message for item in self._waiting if item.restored for message in item.messages)

    @property
    def steered(self) -> bool:
        """Whether a steer came since the calls of the last reply began: those that have not started are then skipped."""
        return self._steered

    @property
    def closed(self) -> bool:
        return self._closed

    def open(self, emitter: Emitter, on_input: Callable[[], None] | None = None) -> None:
        """The run has started: report what was queued before, and everything from now on. `on_input` is told of new input."""
        self._emitter = emitter
        self._taken = on_input
        for item in self._waiting:
            self._report(item)
        if self._waiting and on_input is not None:
            on_input()

    def enqueue(self, item: QueuedInput) -> None:
        """Adds an input; when the run is over it is settled as not applied at once."""
        if self._closed:
            item.settle(False)
            return
        self._waiting.append(item)
        self._report(item)
        if self._taken is not None:
            self._taken()

    def steer(self, item: QueuedInput) -> None:
        """Adds an input and, when a model call is in flight that has put nothing out yet, cuts that call short."""
        if self._closed:
            item.settle(False)
            return
        item.steers = True
        self._waiting.append(item)
        self._steered = True
        call, self._call = self._call, None
        self._report(item, immediate=call is not None)
        if self._taken is not None:
            self._taken()
        if call is not None:
            call.abort("steered")

    def _report(self, item: QueuedInput, *, immediate: bool = False) -> None:
        if self._emitter is None:
            return
        if item.steers:
            self._emitter.emit(InputSteered, id=item.id, text=item.text, mode="immediate" if immediate else "queued")
        else:
            self._emitter.emit(InputQueued, id=item.id, text=item.text)

    def watch(self, call: AbortSignal) -> None:
        """A model call starts: until `unwatch()` a steer aborts it."""
        self._call = call

    def unwatch(self) -> None:
        """The model call put something out, or ended."""
        self._call = None

    def tools_begin(self) -> None:
        """A reply is in and its calls are about to start. A steer that came while it was written only waits for their results."""
        self._steered = False

    def take(self) -> list[QueuedInput]:
        """Everything that waits, in order. The caller puts it into the transcript and calls `applied()`."""
        items = list(self._waiting)
        self._waiting.clear()
        self._steered = False
        return items

    def applied(self, items: Sequence[QueuedInput], step: int) -> None:
        for item in items:
            if self._emitter is not None:
                self._emitter.emit(InputApplied, id=item.id, step=step)
            item.settle(True)

    def close(self) -> None:
        """The run is over: what still waits was not applied."""
        self._closed = True
        self._taken = None  # it knows the run, which knows this inbox: both go at once, without the garbage collector
        for item in self._waiting:
            item.settle(False)
        self._waiting.clear()
