"""The rate limiters that many processes share: all limiters of a namespace by name, and the processes that use them.

Pure like `LimiterCore`: an actor passes the time in and carries what is said here to and fro. What it adds to the arithmetic:

- **Leases.** A process that says nothing for `LEASE_S` is dead: its waiting calls leave the queue and its slots are freed. Bookings
  stay, because those calls were made.
- **Delivery.** A message may be lost or come twice. What a process asks for carries a sequence number and is done once; grants are
  numbered and repeated until the process has confirmed them.
- **Travel.** A grant takes time to arrive and to become a request, and not always the same: bookings stay `TRAVEL_S` longer than
  their window, so that a provider does not count more calls in a minute than were granted in one.
- **Leases ahead.** A process whose calls come fast is lent some in advance (`lousho_ray.limits.ahead`).
- **Epochs.** A new life of the actor knows nothing. It says so, and processes then register what they hold and wait for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lousho_ray.limits.rate import Call, LimiterCore, LimiterStats, WindowState
from lousho_ray.options import RateLimits

LEASE_S = 30.0
"""How long a process may be silent before its slots are given to others. It speaks up three times as often."""

RECOVERY_S = 3.0
"""After a restart nobody is admitted for so long: whoever holds a slot must have time to say so."""

TRAVEL_S = 0.75
"""By how much two grants may differ in the time they take to become requests that the provider counts: one over a connection that
is open, one over a new one from a process that is busy. It costs 1.2 % of the limit."""

FORGET_AFTER_S = 600.0
"""A limiter nobody used for so long is forgotten; its name is then free for other limits."""


class Exchange(NamedTuple):
    """What a process wants, in the order in which it is done. Calls are named by the process's own numbers.

    Attributes:
        epoch: The life of the actor that knows the process.
        seq: Number of this exchange; sent again it is not done again.
        confirmed: How many grants the process has got.
        holding: It has calls here already, so it must be known.
        withdrawals: Calls that are not made.
        rebookings: By limiter and booking: how many tokens more (or fewer) than estimated were used.
        releases: Calls that have ended.
        entries: Limiter, call and tokens of each call that gets in line.
        ahead: Limiter, first number, count and tokens of each lot of leases for calls to come; as many of them as can be spared.
    """

    process: str
    epoch: str
    seq: int
    confirmed: int
    holding: bool = False
    withdrawals: Sequence[int] = ()
    rebookings: Mapping[tuple[str, int], int] = {}
    releases: Sequence[int] = ()
    entries: Sequence[tuple[str, int, int]] = ()
    ahead: Sequence[tuple[str, int, int, int]] = ()


class Listen(NamedTuple):
    """A process wants to know what is granted to it.

    Attributes:
        again: The last answer may have been lost: what is not confirmed is news.
    """

    process: str
    epoch: str
    confirmed: int
    again: bool = False


class Reply(NamedTuple):
    """The answer to a process.

    Attributes:
        epoch: Which life of the actor answers.
        known: `False`: nothing was done, because the process or a limiter is not known (any more); it must register.
        arrived: Arrival number of the first entry; the others follow one by one.
        first: Number of the first grant; the process has confirmed those before it.
        grants: Call and booking of each admitted call.
        lent: How many leases of each lot that the exchange asked for were lent, and their booking.
    """

    epoch: str
    known: bool
    arrived: int = 0
    first: int = 0
    grants: Sequence[tuple[int, int]] = ()
    lent: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Registration:
    """A limiter that a process uses, with what it has there.

    Attributes:
        epoch: The life of the actor in which the process registered it before; `None` at first.
        waiting: Call, tokens and arrival number.
        running: Call, tokens and booking.
        windows: Bookings made before the limiter was shared.
    """

    name: str
    limits: RateLimits
    epoch: str | None = None
    waiting: Sequence[tuple[int, int, int]] = ()
    running: Sequence[tuple[int, int, int]] = ()
    windows: WindowState = field(default_factory=WindowState)


@dataclass(frozen=True, slots=True)
class Registered:
    """The answer to registrations: `refused` holds the limits of limiters that exist with other ones.

    Attributes:
        lease_s: How long the process may be silent.
    """

    epoch: str
    refused: dict[str, RateLimits]
    lease_s: float = LEASE_S


class HeldCall(Call):
    """A call of some process."""

    __slots__ = ("limiter", "number", "process")

    def __init__(self, process: str, number: int, limiter: str, tokens: int, arrival: int = 0) -> None:
        super().__init__(tokens, arrival)
        self.process = process
        self.number = number
        self.limiter = limiter


class Process:
    """One process that uses limiters."""

    __slots__ = ("arrived", "calls", "expires_at", "first", "grants", "lent", "sent", "seq")

    def __init__(self, confirmed: int, expires_at: float) -> None:
        self.calls: dict[int, HeldCall] = {}
        self.seq = -1
        self.arrived = 0
        self.first = confirmed
        self.grants: list[tuple[int, int]] = []
        self.lent: list[tuple[int, int]] = []
        self.sent = confirmed
        self.expires_at = expires_at

    def confirm(self, confirmed: int) -> None:
        if confirmed > self.first:
            del self.grants[: confirmed - self.first]
            self.first = confirmed

    @property
    def has_news(self) -> bool:
        return self.first + len(self.grants) > self.sent


class SharedLimits:
    """All limiters of a namespace.

    Args:
        epoch: Names this life.
        now: Monotonic seconds; the only clock that counts.
        restarted: An earlier life ended without handing its history over.
        first_arrival: Above every arrival number of earlier lives.
        on_news: Called with a process's id when something it did not just ask for was granted.
        lease_s: `LEASE_S`, or less for a test.
    """

    def __init__(
        self,
        *,
        epoch: str,
        now: float,
        restarted: bool = False,
        first_arrival: int = 0,
        on_news: Callable[[str], None],
        lease_s: float = LEASE_S,
    ) -> None:
        self.epoch = epoch
        self._lease_s = lease_s
        self._restarted_at = now if restarted else None
        self._next_arrival = first_arrival
        self._on_news = on_news
        self._limiters: dict[str, LimiterCore[HeldCall]] = {}
        self._used_at: dict[str, float] = {}
        self._processes: dict[str, Process] = {}
        self._wakeups: dict[str, float] = {}
        self._wakeup_heap: list[tuple[float, str]] = []
        self._check_leases_at = now + self._lease_s

    def register(self, process_id: str, confirmed: int, registrations: Sequence[Registration], now: float) -> Registered:
        """Makes limiters and calls known. Doing it again changes nothing."""
        process = self._process(process_id, confirmed, now)
        refused = {}
        for wanted in registrations:
            core = self._limiter(wanted, now)
            if core.limits != wanted.limits:
                refused[wanted.name] = core.limits
                continue
            core.load(now, wanted.windows)
            for number, tokens, booking in wanted.running:
                if number not in process.calls:
                    call = process.calls[number] = HeldCall(process_id, number, wanted.name, tokens)
                    call.booking = booking
                    core.resume(call)
            for number, tokens, arrival in wanted.waiting:
                if number not in process.calls:
                    call = process.calls[number] = HeldCall(process_id, number, wanted.name, tokens, arrival)
                    core.enter(call)
        self._admit((wanted.name for wanted in registrations), now)
        return Registered(self.epoch, refused, self._lease_s)

    def exchange(self, message: Exchange, now: float) -> Reply:
        """Does what a process asks for, once per `seq`, and answers with what was granted to it."""
        known = message.process in self._processes or not message.holding
        wanted = (*message.entries, *message.ahead)
        if not known or message.epoch != self.epoch or any(entry[0] not in self._limiters for entry in wanted):
            return Reply(self.epoch, known=False)
        process = self._process(message.process, message.confirmed, now)
        if message.seq > process.seq:
            process.seq, process.arrived = message.seq, self._next_arrival
            self._admit(self._do(process, message), now, asking=message.process)
            process.lent = [self._lend(process, message.process, lot, now) for lot in message.ahead]
        return self._reply(process)

    def listen(self, message: Listen, now: float) -> Reply | None:
        """Renews a process's lease and answers like `news`."""
        if message.epoch != self.epoch or message.process not in self._processes:
            return Reply(self.epoch, known=False)
        process = self._process(message.process, message.confirmed, now)
        if message.again:
            process.sent = process.first
        return self.news(message.process)

    def news(self, process_id: str) -> Reply | None:
        """What was granted to a process since it was last told; `None` when nothing was. It may have died since it asked."""
        process = self._processes.get(process_id)
        if process is None:
            return Reply(self.epoch, known=False)
        return self._reply(process) if process.has_news else None

    def stats(self, name: str, now: float) -> LimiterStats | None:
        """`None` when the limiter is not known (any more)."""
        core = self._limiters.get(name)
        return None if core is None else core.stats(now)

    def tick(self, now: float) -> None:
        """Admits what the windows allow by now, and ends the leases of silent processes."""
        due = []
        while self._wakeup_heap and self._wakeup_heap[0][0] <= now:
            at, name = heapq.heappop(self._wakeup_heap)
            if self._wakeups.get(name) == at:
                del self._wakeups[name]
                due.append(name)
        self._admit(due, now)
        if now >= self._check_leases_at:
            self._end_leases(now)

    def next_wakeup(self) -> float:
        """When to call `tick`."""
        while self._wakeup_heap and self._wakeups.get(self._wakeup_heap[0][1]) != self._wakeup_heap[0][0]:
            heapq.heappop(self._wakeup_heap)
        return min(self._wakeup_heap[0][0], self._check_leases_at) if self._wakeup_heap else self._check_leases_at

    def _do(self, process: Process, message: Exchange) -> set[str]:
        """Carries out what is asked and returns the limiters it touched."""
        touched: set[str] = set()
        for number in message.withdrawals:
            if (call := process.calls.pop(number, None)) is not None:
                self._limiters[call.limiter].withdraw(call)
                touched.add(call.limiter)
        for (name, booking), difference in message.rebookings.items():
            if (core := self._limiters.get(name)) is not None:
                core.rebook(booking, difference)
                touched.add(name)
        for number in message.releases:
            if (call := process.calls.pop(number, None)) is not None:
                self._limiters[call.limiter].release(call)
                touched.add(call.limiter)
        for arrival, (name, number, tokens) in enumerate(message.entries, start=self._next_arrival):
            if number not in process.calls:
                call = process.calls[number] = HeldCall(message.process, number, name, tokens, arrival)
                self._limiters[name].enter(call)
                touched.add(name)
        self._next_arrival += len(message.entries)
        return touched

    def _lend(self, process: Process, process_id: str, lot: tuple[str, int, int, int], now: float) -> tuple[int, int]:
        name, first, wanted, tokens = lot
        core, booking = self._limiters[name], 0
        count = min(wanted, core.surplus(tokens, now))
        for number in range(first, first + count):
            call = process.calls[number] = HeldCall(process_id, number, name, tokens, self._next_arrival)
            core.start(call, now)
            booking = call.booking
        self._next_arrival += 1
        self._used_at[name] = now
        return count, booking

    def _admit(self, names: Iterable[str], now: float, asking: str | None = None) -> None:
        told = set() if asking is None else {asking}
        for name in names:
            core = self._limiters[name]
            for call in core.admit(now):
                self._processes[call.process].grants.append((call.number, call.booking))
                if call.process not in told:
                    told.add(call.process)
                    self._on_news(call.process)
            self._used_at[name] = now
            at = core.next_wakeup()
            if at is None:
                self._wakeups.pop(name, None)
            elif self._wakeups.get(name) != at:
                self._wakeups[name] = at
                heapq.heappush(self._wakeup_heap, (at, name))

    def _limiter(self, wanted: Registration, now: float) -> LimiterCore[HeldCall]:
        core = self._limiters.get(wanted.name)
        if core is not None:
            return core
        core = self._limiters[wanted.name] = LimiterCore(wanted.limits, TRAVEL_S)
        self._used_at[wanted.name] = now
        lost_at = now if wanted.epoch not in (None, self.epoch) and self._restarted_at is None else self._restarted_at
        if lost_at is not None:
            core.assume_half_used(lost_at, now, self._arrival())
            core.open_at(lost_at + RECOVERY_S)
        return core

    def _process(self, process_id: str, confirmed: int, now: float) -> Process:
        process = self._processes.get(process_id)
        if process is None:
            process = self._processes[process_id] = Process(confirmed, now + self._lease_s)
        process.expires_at = now + self._lease_s
        process.confirm(confirmed)
        return process

    def _reply(self, process: Process) -> Reply:
        process.sent = process.first + len(process.grants)
        return Reply(self.epoch, True, process.arrived, process.first, list(process.grants), process.lent)

    def _arrival(self) -> int:
        self._next_arrival += 1
        return self._next_arrival - 1

    def _end_leases(self, now: float) -> None:
        for process_id in [process_id for process_id, process in self._processes.items() if process.expires_at <= now]:
            calls = self._processes.pop(process_id).calls.values()
            for call in calls:
                self._limiters[call.limiter].release(call)
            self._admit({call.limiter for call in calls}, now)
        for name in [name for name, used_at in self._used_at.items() if now - used_at >= FORGET_AFTER_S]:
            if self._limiters[name].stats(now) and self._limiters[name].idle:
                del self._limiters[name], self._used_at[name]
        self._check_leases_at = min([now + self._lease_s, *(process.expires_at for process in self._processes.values())])
