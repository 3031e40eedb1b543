"""The limiter a program holds: `RateLimiter`, a queue that model calls pass before they are made.

A `RateLimiter` talks to a `Link`, which decides: `LocalLink` has the arithmetic in this process; the one in `lousho_ray.actors` has
it in an actor that many processes share. A limiter changes from the first to the second in place (`promote`), keeping its queue,
windows and calls in flight: copying it would double the limit.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from lousho_ray.clock import SYSTEM_CLOCK, Clock, TimerHandle
from lousho_ray.errors import ConfigurationError
from lousho_ray.ids import new_id
from lousho_ray.limits.rate import RUNNING, Call, LimiterCore, LimiterStats, WindowState
from lousho_ray.options import RateLimits, parse_options
from lousho_ray.ports import Permit

logger = logging.getLogger(__name__)


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


class RateLimiter:
    """Queues model calls, first in first out, over everything that shares it. Made by `create_rate_limiter`.

    Usable from several event loops and threads at once. Pickles only after `promote`, as a reference to the shared limiter.

    Attributes:
        key: Names this limiter and no other, in every process that shares it. Who enters several limiters does so in the order
            of their keys, so that two calls never wait for each other.
        enabled: `False` lets every call pass (a replay of recorded answers needs no limit).
    """

    def __init__(self, limits: RateLimits, link: Link, *, name: str | None = None) -> None:
        self._limits = limits
        self._name = name
        self.key = name or (new_id("limiter-") if link.reference is None else link.reference.name)
        self._promotion = threading.Lock()
        self._warned_at: float | None = None
        self.link = link
        self.enabled = True

    @property
    def limits(self) -> RateLimits:
        return self._limits

    @property
    def name(self) -> str | None:
        return self._name

    @property
    def shared(self) -> bool:
        """Whether other processes can reach this limiter, so that it may be pickled."""
        return self.link.reference is not None

    async def acquire(self, tokens: int) -> Permit:
        """Waits until a call of `tokens` estimated tokens may start.

        Cancelling the wait leaves the queue at once and books nothing.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, a shared limiter could not be reached.
        """
        if not self.enabled:
            return FREE_PERMIT
        ticket = Ticket(self, tokens, asyncio.get_running_loop())
        if not self.link.enter(ticket):
            try:
                await ticket.future
            except BaseException:
                self.link.withdraw(ticket)
                raise
        return ticket

    async def stats(self) -> LimiterStats:
        return await self.link.stats()

    def promote(self, link_factory: Callable[[RateLimits], Link]) -> None:
        """Turns a limiter of this process into a shared one, in place: queue, windows and calls in flight go over.

        Blocks for the round trip. Does nothing to a limiter that is shared already.

        Args:
            link_factory: Makes the link to the new home from the limits; the limiter's `key` is a name for it that no other has.

        Raises:
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, the new home could not be reached; nothing has changed.
        """
        with self._promotion:
            if self.link.reference is not None or not isinstance(self.link, LocalLink):
                return
            successor = link_factory(self._limits)
            self.link.hand_over(successor)
            self.link = successor
            if successor.reference is not None:
                self.key = successor.reference.name
                _SHARED[successor.reference] = self

    def note_rejection(self, now: float, provider: str) -> None:
        """A provider answered 429 although this limiter let the call pass: says so once a minute."""
        if self._warned_at is None or now - self._warned_at >= 60:
            self._warned_at = now
            logger.warning(
                "%s rejected a call for its rate although rate_limit %s let it pass: these limits are above the provider's.",
                provider,
                show_limits(self._limits),
            )

    def __reduce__(self) -> tuple[Any, ...]:
        reference = self.link.reference
        if reference is None:
            raise ConfigurationError(
                f"{self!r} lives in this process and cannot be pickled: a copy would double the limit. Give it a name "
                f"(create_rate_limiter(limits, name='openai')) to share it between processes.",
                field="rate_limit",
            )
        return (restore, (reference, self.enabled))

    def __repr__(self) -> str:
        named = "" if self._name is None else f", name={self._name!r}"
        return f"RateLimiter({show_limits(self._limits)}{named})"


class FreePermit:
    """The permit of a limiter that is switched off."""

    def settle(self, tokens: int) -> None: ...

    def release(self) -> None: ...


FREE_PERMIT = FreePermit()

_SHARED: weakref.WeakValueDictionary[Reference, RateLimiter] = weakref.WeakValueDictionary()
_NAMED: weakref.WeakValueDictionary[str, RateLimiter] = weakref.WeakValueDictionary()
_REGISTRIES = threading.Lock()


def create_rate_limiter(
    limits: RateLimits | Mapping[str, Any],
    name: str | None = None,
    *,
    connect: Connect | None = None,
    clock: Clock = SYSTEM_CLOCK,
    field: str = "rate_limit",
) -> RateLimiter:
    """A limiter that several providers and agents may share. Two made from equal limits share nothing, unless they have one name.

    Args:
        limits: `requests_per_minute`, `tokens_per_minute` (numbers above 0), `max_concurrent` (a whole number of at least 1); each
            optional.
        name: One limiter for everybody who asks for this name: in this process, or with `connect` wherever that reaches.
        connect: Makes the link of a named limiter.
        clock: Its time, when it lives in this process.
        field: What an error calls `limits`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: a wrong limit, or `name` has other limits already.
    """
    parsed = parse_options(RateLimits, limits, field=field)
    if name is None:
        return RateLimiter(parsed, LocalLink(parsed, clock))
    if connect is not None:
        link = connect(parsed, name)
        return RateLimiter(parsed, link, name=name) if link.reference is None else restore(link.reference, link=link)
    with _REGISTRIES:
        limiter = _NAMED.get(name)
        if limiter is None:
            limiter = _NAMED[name] = RateLimiter(parsed, LocalLink(parsed, clock), name=name)
        elif limiter.limits != parsed:
            raise conflicting_limits(name, limiter.limits, parsed)
        return limiter


def restore(reference: Reference, enabled: bool = True, link: Link | None = None) -> RateLimiter:
    """The limiter of this process behind a reference: the same object each time while it is in use."""
    with _REGISTRIES:
        limiter = _SHARED.get(reference)
        if limiter is None:
            limiter = RateLimiter(reference.limits, link or reference.connect(), name=reference.name)
            limiter.enabled = enabled
            _SHARED[reference] = limiter
        elif limiter.limits != reference.limits:
            raise conflicting_limits(reference.name, limiter.limits, reference.limits)
        return limiter


def conflicting_limits(name: str, known: RateLimits, asked: RateLimits) -> ConfigurationError:
    return ConfigurationError(
        f"The rate limiter {name!r} exists with {show_limits(known)} and was asked for with {show_limits(asked)}. "
        f"Use the same limits everywhere, or another name.",
        field="rate_limit",
    )


def show_limits(limits: RateLimits) -> str:
    return str({key: value for key, value in limits.model_dump().items() if value is not None})


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
