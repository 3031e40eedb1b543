"""The arithmetic of a rate limiter: a queue, slots and rolling windows. No clock, no I/O, no locks: whoever holds a
`LimiterCore` passes the time in and wakes the calls that `admit` returns.

An admission costs O(1) amortised whatever the number of waiting calls: only the head of the queue is looked at, and each booking
enters and leaves its window once. Calls booked at the same moment share one `Bucket`, named by a *booking* number that a caller
keeps to replace its estimate later; so the core remembers nothing of a call that has ended.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lousho_ray.options import RateLimits

WINDOW_S = 60.0
"""Length of a rolling window. A limit below one per minute stretches it instead: 0.5 a minute is one in 120 s."""

SURPLUS = 1 / 8
"""The part of what is free that may be lent to calls to come."""

MOST_SURPLUS = 10_000
"""What a limiter without limits lends at once."""

WAITING, RUNNING, ENDED = 0, 1, 2


class Call:
    """One model call in a limiter. Compared by identity.

    Attributes:
        tokens: The call's estimate.
        arrival: Its place in line; lower goes first.
        booking: Which bucket holds its tokens, once admitted.
        state: `WAITING`, `RUNNING` or `ENDED`.
    """

    __slots__ = ("arrival", "booking", "state", "tokens")

    def __init__(self, tokens: int, arrival: int = 0) -> None:
        self.tokens = tokens
        self.arrival = arrival
        self.booking = 0
        self.state = WAITING


C = TypeVar("C", bound=Call)


class Bucket:
    """What was booked at one moment."""

    __slots__ = ("booking", "start", "weight")

    def __init__(self, start: float, weight: int, booking: int) -> None:
        self.start = start
        self.weight = weight
        self.booking = booking


@dataclass(frozen=True, slots=True)
class BucketState:
    """A bucket on its way to another clock: how long ago it was booked instead of when."""

    age_s: float
    weight: int
    booking: int


class Window:
    """At most `limit` units within any `seconds` seconds, each unit counted from its own start. Without a limit it only counts."""

    __slots__ = ("_buckets", "_by_booking", "limit", "seconds", "used")

    def __init__(self, per_minute: float | None, margin_s: float = 0.0) -> None:
        self.limit = math.inf if per_minute is None else max(1, math.floor(per_minute))
        self.seconds = margin_s + (WINDOW_S if per_minute is None or per_minute >= 1 else WINDOW_S / per_minute)
        self.used = 0
        self._buckets: deque[Bucket] = deque()
        self._by_booking: dict[int, Bucket] = {}

    def expire(self, now: float) -> None:
        """Forgets what has left the window."""
        while self._buckets and self._buckets[0].start + self.seconds <= now:
            bucket = self._buckets.popleft()
            self.used -= bucket.weight
            del self._by_booking[bucket.booking]

    def fits(self, weight: int) -> bool:
        """Whether `weight` more may start now. A weight above the limit fits an empty window only."""
        return self.used + weight <= self.limit or (self.used == 0 and weight > self.limit)

    def book(self, now: float, weight: int, booking: int) -> int:
        """Books `weight` at `now` under `booking`, or in the bucket of this very moment; returns that bucket's booking number."""
        self.used += weight
        if self._buckets and self._buckets[-1].start == now:
            bucket = self._buckets[-1]
            bucket.weight += weight
            return bucket.booking
        bucket = self._by_booking[booking] = Bucket(now, weight, booking)
        self._buckets.append(bucket)
        return booking

    def change(self, booking: int, difference: int) -> None:
        """Adds `difference` to what was booked, at the same start; nothing when that has left the window."""
        bucket = self._by_booking.get(booking)
        if bucket is not None:
            bucket.weight += difference
            self.used += difference

    def next_expiry(self) -> float | None:
        return self._buckets[0].start + self.seconds if self._buckets else None

    def fits_at(self, weight: int, now: float) -> float:
        """When `weight` will fit if nothing else is booked."""
        at, used = now, self.used
        for bucket in self._buckets:
            if used + weight <= self.limit or used == 0:
                break
            at, used = bucket.start + self.seconds, used - bucket.weight
        return at

    def state(self, now: float) -> list[BucketState]:
        return [BucketState(now - bucket.start, bucket.weight, bucket.booking) for bucket in self._buckets]

    def load(self, now: float, buckets: Iterable[BucketState]) -> None:
        """Adds buckets booked elsewhere. One that is here already is not added twice."""
        for state in buckets:
            if state.booking not in self._by_booking:
                self._by_booking[state.booking] = Bucket(now - state.age_s, state.weight, state.booking)
                self.used += state.weight
        self._buckets = deque(sorted(self._by_booking.values(), key=lambda bucket: bucket.start))


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """What a limiter is doing: `await limiter.stats()`.

    Attributes:
        waiting: Calls in the queue.
        running: Calls in flight.
        requests_in_window: Calls started in the last 60 s.
        tokens_in_window: Tokens booked in the last 60 s.
        next_admission_ms: Milliseconds until the windows let the next call start, 0 when it could start now; `None` while it
            waits for a call in flight to end.
    """

    waiting: int
    running: int
    requests_in_window: int
    tokens_in_window: int
    next_admission_ms: float | None


@dataclass(frozen=True, slots=True)
class WindowState:
    """Both windows of a limiter on their way to another clock."""

    requests: Sequence[BucketState] = field(default=())
    tokens: Sequence[BucketState] = field(default=())


class LimiterCore(Generic[C]):
    """One limiter. Every method that takes `now` must get a time that never goes back.

    Args:
        margin_s: How much longer than its window a booking stays.
    """

    def __init__(self, limits: RateLimits, margin_s: float = 0.0) -> None:
        self.limits = limits
        self._requests = Window(limits.requests_per_minute, margin_s)
        self._tokens = Window(limits.tokens_per_minute, margin_s)
        self._slots = math.inf if limits.max_concurrent is None else limits.max_concurrent
        self._queue: OrderedDict[C, None] = OrderedDict()
        self._running: set[C] = set()
        self._last_arrival = -1
        self._unsorted = False
        self._opens_at: float | None = None

    def enter(self, call: C) -> None:
        """Puts a call in line. One with a lower arrival number than others goes before them (it waited already elsewhere)."""
        self._unsorted = self._unsorted or (call.arrival < self._last_arrival and bool(self._queue))
        self._last_arrival = max(self._last_arrival, call.arrival)
        call.state = WAITING
        self._queue[call] = None

    def resume(self, call: C) -> None:
        """Counts a call that was admitted elsewhere as in flight, whatever the limits say."""
        call.state = RUNNING
        self._running.add(call)

    def admit(self, now: float) -> list[C]:
        """Starts every call whose turn it is, in order, and books it."""
        self._expire(now)
        if not self._queue or (self._opens_at is not None and now < self._opens_at):
            return []
        self._sort()
        admitted: list[C] = []
        while self._queue:
            call = next(iter(self._queue))
            if len(self._running) >= self._slots or not self._requests.fits(1) or not self._tokens.fits(call.tokens):
                break
            del self._queue[call]
            self.start(call, now)
            admitted.append(call)
        return admitted

    def surplus(self, tokens: int, now: float) -> int:
        """How many calls of `tokens` tokens may start beyond those in line: a part of what is free, none while somebody waits."""
        self._expire(now)
        if self._queue or self._opens_at is not None:
            return 0
        calls = min(self._slots - len(self._running), self._requests.limit - self._requests.used)
        free = min(calls, (self._tokens.limit - self._tokens.used) / max(tokens, 1))
        return MOST_SURPLUS if math.isinf(free) else max(0, int(free * SURPLUS))

    def start(self, call: C, now: float) -> None:
        """Books a call and counts it as in flight: the head of the line, or one within the `surplus`."""
        call.booking = self._requests.book(now, 1, call.arrival)
        self._tokens.book(now, call.tokens, call.booking)
        self.resume(call)

    def release(self, call: C) -> None:
        """Frees the slot of a call in flight; its bookings stay."""
        self._queue.pop(call, None)
        self._running.discard(call)
        call.state = ENDED

    def withdraw(self, call: C) -> None:
        """Takes a call out as if it had never come: out of the queue, or its slot and bookings given back."""
        if call.state == WAITING:
            self._queue.pop(call, None)
        elif call.state == RUNNING:
            self._running.discard(call)
            self._requests.change(call.booking, -1)
            self._tokens.change(call.booking, -call.tokens)
        call.state = ENDED

    def rebook(self, booking: int, difference: int) -> None:
        """Adds to what was estimated how many tokens more (or fewer) were used, at the same start."""
        self._tokens.change(booking, difference)

    def assume_half_used(self, since: float, now: float, booking: int) -> None:
        """Books half of both windows at `since`: the history before that is lost, so some of it must be assumed."""
        for window in (self._requests, self._tokens):
            weight = math.ceil(window.limit / 2) if math.isfinite(window.limit) else 0
            window.load(now, [BucketState(now - since, weight, booking)])

    def open_at(self, at: float) -> None:
        """Admits nobody before `at`: calls in flight elsewhere must have time to say so."""
        self._opens_at = at

    def next_wakeup(self) -> float | None:
        """When to call `admit` again although nothing else happens; `None` while only a release can help, or nobody waits.

        It is the next moment at which something leaves a window, so each booking causes one wake-up at most.
        """
        if not self._queue:
            return None
        if self._opens_at is not None:
            return self._opens_at
        if len(self._running) >= self._slots:
            return None
        return self._requests.next_expiry() if not self._requests.fits(1) else self._tokens.next_expiry()

    @property
    def head(self) -> C | None:
        """The call whose turn is next."""
        self._sort()
        return next(iter(self._queue), None)

    @property
    def empty(self) -> bool:
        """Whether nobody waits."""
        return not self._queue

    @property
    def idle(self) -> bool:
        """Whether forgetting this limiter would lose nothing."""
        return not (self._queue or self._running or self._requests.used or self._tokens.used)

    @property
    def waiting(self) -> list[C]:
        """The queue, in order."""
        self._sort()
        return list(self._queue)

    @property
    def running(self) -> list[C]:
        """The calls in flight, in the order of their arrival."""
        return sorted(self._running, key=lambda call: call.arrival)

    def windows(self, now: float) -> WindowState:
        self._expire(now)
        return WindowState(self._requests.state(now), self._tokens.state(now))

    def load(self, now: float, windows: WindowState) -> None:
        """Adds bookings made elsewhere."""
        self._requests.load(now, windows.requests)
        self._tokens.load(now, windows.tokens)

    def stats(self, now: float) -> LimiterStats:
        self._expire(now)
        next_ms: float | None = None
        if len(self._running) < self._slots:
            head = self.head
            at = max(self._requests.fits_at(1, now), self._tokens.fits_at(head.tokens if head else 1, now), self._opens_at or now)
            next_ms = max(0.0, (at - now) * 1000)
        return LimiterStats(len(self._queue), len(self._running), self._requests.used, self._tokens.used, next_ms)

    def _expire(self, now: float) -> None:
        self._requests.expire(now)
        self._tokens.expire(now)
        if self._opens_at is not None and now >= self._opens_at:
            self._opens_at = None

    def _sort(self) -> None:
        if self._unsorted:
            self._queue = OrderedDict.fromkeys(sorted(self._queue, key=lambda call: call.arrival))
            self._unsorted = False
