"""Leases that a process takes before it has calls for them, so that a fast series of calls does not wait for one answer each.

Pure like `LimiterCore`. How it stays within the rules of a limiter:

- The actor lends a small part of what is free, and nothing while a call waits (`LimiterCore.surplus`). Near a limit there are none,
  and every call stands in line.
- A lease taken ahead is used within `AHEAD_S` of being asked for, or given back with its booking. So a booking is at most that much
  older than its call, and whoever must wait because of an unused one waits no longer than that.
- It counts as having arrived when it was asked for. A process uses none while calls of its own wait.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

AHEAD_S = 0.02
"""How long a lease may be held for a call to come."""

MOST_AHEAD = 1000

SHORTEST_S = 0.001
"""Below this the time between two exchanges says nothing about the demand."""


class Lease(NamedTuple):
    """One call's lease: the process's number of it, where it is booked, and for how many tokens."""

    number: int
    booking: int
    tokens: int


class _Lent:
    """What one exchange brought: leases with successive numbers. `until` is a time of this process."""

    __slots__ = ("booking", "count", "first", "tokens", "until")

    def __init__(self, first: int, count: int, booking: int, tokens: int, until: float) -> None:
        self.first = first
        self.count = count
        self.booking = booking
        self.tokens = tokens
        self.until = until


class Ahead:
    """The leases of one limiter that a process holds for calls to come, and how many it should ask for."""

    __slots__ = ("_asked_at", "_entered", "_largest", "_lent", "_spare", "_stale")

    def __init__(self) -> None:
        self._lent: deque[_Lent] = deque()
        self._spare = 0
        self._stale: list[int] = []
        self._entered = 0
        self._largest = 0
        self._asked_at = -math.inf

    def note(self, tokens: int) -> None:
        """A call has come: the demand is measured."""
        self._entered += 1
        self._largest = max(self._largest, tokens)

    def take(self, tokens: int, now: float) -> Lease | None:
        """A lease for a call of `tokens` tokens; `None` when it must get in line."""
        self._drop_old(now)
        if not self._lent or self._lent[0].tokens < tokens:
            return None
        lent = self._lent[0]
        lease = Lease(lent.first, lent.booking, lent.tokens)
        lent.first += 1
        lent.count -= 1
        self._spare -= 1
        if not lent.count:
            self._lent.popleft()
        return lease

    def ask(self, now: float) -> tuple[int, int]:
        """How many leases to ask for now, and for how many tokens each: what the calls of `AHEAD_S` will need."""
        elapsed, entered, largest = now - self._asked_at, self._entered, self._largest
        self._asked_at, self._entered, self._largest = now, 0, 0
        if elapsed > AHEAD_S:
            return 0, 0
        wanted = int(entered * AHEAD_S / max(elapsed, SHORTEST_S))
        return max(0, min(wanted, MOST_AHEAD) - self._spare), largest

    @property
    def idle(self) -> bool:
        """Whether nothing is held or noted."""
        return not (self._spare or self._stale or self._entered)

    def lend(self, first: int, count: int, booking: int, tokens: int, until: float) -> None:
        """Takes in what the actor lent."""
        if count:
            self._lent.append(_Lent(first, count, booking, tokens, until))
            self._spare += count

    def unused(self, now: float) -> list[int]:
        """The numbers of leases to give back because their time is over; at `inf` all of them."""
        self._drop_old(now)
        stale, self._stale = self._stale, []
        return stale

    def _drop_old(self, now: float) -> None:
        while self._lent and self._lent[0].until <= now:
            lent = self._lent.popleft()
            self._spare -= lent.count
            self._stale += range(lent.first, lent.first + lent.count)
