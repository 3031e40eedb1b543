"""What a `RateLimiter` is made of: the ticket of each call, and the link to where the decisions are made.

`LocalLink` has the arithmetic in this process; the one in `lousho_ray.actors` has it in an actor that many processes share.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lousho_ray.clock import SYSTEM_CLOCK, Clock, TimerHandle
from lousho_ray.limits.rate import RUNNING, Call, LimiterCore, LimiterStats, WindowState
from lousho_ray.options import RateLimits

if TYPE_CHECKING:
    from lousho_ray.limits.limiter import RateLimiter


class Ticket(Call):
    """One call's way through a `RateLimiter`: it waits on `future` and is the `Permit` afterwards."""

    __slots__ = ("_limiter", "_settled", "future", "loop", "number")

    def __init__(self, limiter: RateLimiter, tokens: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(tokens)
        self._limiter = limiter
        self._settled = False
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.number = 0

    def settle(self, tokens: int) -> None:
        """Replaces the estimate by what the provider reported, input plus output, at the same start. Once; does not wait."""
        if not self._settled:
            self._settled = True
            self._limiter.link.rebook(self, tokens - self.tokens)

    def release(self) -> None:
        """Frees the slot. Once; does not wait."""
        if self.state == RUNNING:
            self._limiter.link.release(self)

    def undo(self) -> None:
        """Gives slot and bookings back: the call is not made after all."""
        self._limiter.link.withdraw(self)


class Link(Protocol):
    """Where a limiter's decisions are made. All methods but `stats` may be called from any thread and never wait."""

    @property
    def reference(self) -> Reference | None:
        """How another process reaches the same limiter; `None` when it cannot."""
        ...

    def enter(self, ticket: Ticket) -> bool:
        """Puts a call in line. `True` when it was admitted at once; otherwise its future tells."""
        ...

    def withdraw(self, ticket: Ticket) -> None:
        """The call is not made: leaves the queue, or gives slot and bookings back."""
        ...

    def release(self, ticket: Ticket) -> None: ...

    def rebook(self, ticket: Ticket, difference: int) -> None: ...

    def adopt(self, waiting: Sequence[Ticket], running: Sequence[Ticket], windows: WindowState) -> None:
        """Takes over what another link held; returns when it is done."""
        ...

    async def stats(self) -> LimiterStats: ...


class Reference(Protocol):
    """The pickled form of a shared limiter. Hashable: equal references are one limiter."""

    @property
    def limits(self) -> RateLimits: ...

    @property
    def name(self) -> str: ...

    def connect(self) -> Link: ...


Connect: TypeAlias = Callable[[RateLimits, str], Link]
"""Makes the link to the shared limiter of a name."""


class LocalLink:
    """A limiter in this process, for any number of event loops and threads.

    One lock guards the arithmetic and one timer waits for the windows, on the event loop of the call whose turn is next.
    """

    reference = None

    def __init__(self, limits: RateLimits, clock: Clock = SYSTEM_CLOCK) -> None:
        self._core: LimiterCore[Ticket] = LimiterCore(limits)
        self._clock = clock
        self._lock = threading.Lock()
        self._next_arrival = time.time_ns()
        self._timer: TimerHandle | None = None
        self._timer_for: tuple[asyncio.AbstractEventLoop, float] | None = None
        self._successor: Link | None = None

    def enter(self, ticket: Ticket) -> bool:
        with self._lock:
            if self._successor is None:
                ticket.arrival = self._next_arrival
                self._next_arrival += 1
                self._core.enter(ticket)
                self._admit(ticket)
                return ticket.state == RUNNING
        return self._successor.enter(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        with self._lock:
            if self._successor is None:
                self._core.withdraw(ticket)
                return self._admit()
        return self._successor.withdraw(ticket)

    def release(self, ticket: Ticket) -> None:
        with self._lock:
            if self._successor is None:
                self._core.release(ticket)
                return self._admit()
        return self._successor.release(ticket)

    def rebook(self, ticket: Ticket, difference: int) -> None:
        with self._lock:
            if self._successor is None:
                self._core.rebook(ticket.booking, difference)
                return self._admit()
        return self._successor.rebook(ticket, difference)

    def adopt(self, waiting: Sequence[Ticket], running: Sequence[Ticket], windows: WindowState) -> None:
        with self._lock:
            self._core.load(self._clock.now(), windows)
            for ticket in running:
                self._core.resume(ticket)
            for ticket in waiting:
                self._core.enter(ticket)
            self._admit()

    async def stats(self) -> LimiterStats:
        with self._lock:
            if self._successor is None:
                return self._core.stats(self._clock.now())
        return await self._successor.stats()

    def hand_over(self, successor: Link) -> None:
        """Gives everything to `successor`; from here on this link only forwards to it."""
        with self._lock:
            waiting, running = self._core.waiting, self._core.running
            successor.adopt(waiting, running, self._core.windows(self._clock.now()))
            self._successor = successor
            if self._timer is not None:
                self._timer.cancel()

    def _admit(self, entering: Ticket | None = None) -> None:
        """Starts whose turn it is and wakes them, but for `entering`, which is not asleep. Holds the lock."""
        if self._core.empty:
            return
        admitted = self._core.admit(self._clock.now())
        while lost := wake([ticket for ticket in admitted if ticket is not entering]):
            for ticket in lost:
                self._core.withdraw(ticket)
            admitted = self._core.admit(self._clock.now())
        if not self._core.empty:
            self._set_timer()

    def _set_timer(self) -> None:
        """Keeps one timer for the next moment at which the windows may let somebody in. Holds the lock."""
        at, head = self._core.next_wakeup(), self._core.head
        if at is None or head is None or self._timer_for == (head.loop, at):
            return
        here = running_loop()
        if self._timer is not None and self._timer_for is not None and self._timer_for[0] is here:
            self._timer.cancel()
        self._timer, self._timer_for = None, (head.loop, at)
        fire = functools.partial(self._on_timer, self._timer_for)
        if head.loop is here:
            self._timer = self._clock.call_later(max(0.0, at - self._clock.now()), fire)
        elif not post(head.loop, fire):
            self._core.withdraw(head)
            self._admit()

    def _on_timer(self, timer_for: tuple[asyncio.AbstractEventLoop, float]) -> None:
        with self._lock:
            if self._successor is None:
                if self._timer_for is timer_for:
                    self._timer_for = None
                self._admit()


def wake(tickets: Sequence[Ticket]) -> list[Ticket]:
    """Tells admitted calls to start, each on its own event loop, with one wake-up per loop. Returns those whose loop is gone."""
    if not tickets:
        return []
    by_loop: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
    for ticket in tickets:
        by_loop.setdefault(ticket.loop, []).append(ticket)
    here, lost = running_loop(), []
    for loop, group in by_loop.items():
        if loop is here:
            _resolve(group)
        elif not post(loop, functools.partial(_resolve, group)):
            lost += group
    return lost


def post(loop: asyncio.AbstractEventLoop, fn: Callable[[], object]) -> bool:
    """Runs `fn()` on another thread's event loop; `False` when that is closed."""
    try:
        loop.call_soon_threadsafe(fn)
    except RuntimeError:
        return False
    return True


def _resolve(tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        if not ticket.future.done():
            ticket.future.set_result(None)


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
