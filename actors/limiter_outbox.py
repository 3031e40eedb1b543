"""What the calls of one process want of the limiter actor, gathered for the next exchange. Pure: `LimiterClient` carries it.

Every method is called with the client's lock held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lousho_ray.limits.ahead import Lease
from lousho_ray.limits.link import Ticket
from lousho_ray.limits.rate import ENDED, RUNNING, WAITING, WindowState
from lousho_ray.limits.shared import Registration

if TYPE_CHECKING:
    from lousho_ray.actors.limiter import RemoteLink

MOST_ENTRIES = 2000
"""Entries of one exchange: it stays below the 100 KB above which Ray stores arguments instead of sending them along."""


class Lot(NamedTuple):
    """Leases for calls to come that an exchange asks for."""

    link: RemoteLink
    first: int
    number: int
    tokens: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.number)


class Batch(NamedTuple):
    """What has gathered between two exchanges."""

    withdrawals: list[int]
    rebookings: dict[tuple[str, int], int]
    releases: list[int]
    entering: list[tuple[RemoteLink, Ticket]]
    ahead: list[Lot]


class Outbox:
    """The calls of a process that wait or are in flight, by number, and what is to be said about them.

    A ticket has an arrival number once the actor knows it. A limiter is busy while calls come, or leases are held for some to come.
    """

    def __init__(self) -> None:
        self._number = 0
        self._calls: dict[int, tuple[RemoteLink, Ticket]] = {}
        self._busy: set[RemoteLink] = set()
        self._entering: dict[int, tuple[RemoteLink, Ticket]] = {}
        self._withdrawals: list[int] = []
        self._rebookings: dict[tuple[str, int], int] = {}
        self._releases: list[int] = []

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def waits(self) -> bool:
        """Whether calls wait for the next exchange."""
        return bool(self._entering)

    @property
    def urgent(self) -> bool:
        """Whether others wait for what is to be said."""
        return bool(self._withdrawals or self._releases or self._entering)

    def add(self, link: RemoteLink, ticket: Ticket) -> None:
        """Gives a call its number."""
        self._number += 1
        ticket.number = self._number
        self._calls[ticket.number] = (link, ticket)
        link.waiting += ticket.state == WAITING

    def enter(self, link: RemoteLink, ticket: Ticket, now: float) -> bool:
        """Puts a call in line; `True` when it starts at once, with a lease that this process has already."""
        self._busy.add(link)
        link.ahead.note(ticket.tokens)
        lease = None if link.waiting else link.ahead.take(ticket.tokens, now)
        if lease is not None:
            self._start(link, ticket, lease)
            return True
        self.add(link, ticket)
        self._entering[ticket.number] = (link, ticket)
        return False

    def withdraw(self, ticket: Ticket) -> bool:
        """The call is not made. `True` when the actor must hear of it."""
        known = self._remove(ticket) and self._entering.pop(ticket.number, None) is None
        if known:
            self._withdrawals.append(ticket.number)
        ticket.state = ENDED
        return known

    def release(self, ticket: Ticket) -> bool:
        """The call has ended. `True` when the actor must hear of it."""
        known = self._remove(ticket)
        if known:
            self._releases.append(ticket.number)
        ticket.state = ENDED
        return known

    def rebook(self, link: RemoteLink, booking: int, difference: int) -> None:
        key = (link.reference.name, booking)
        self._rebookings[key] = self._rebookings.get(key, 0) + difference

    def forget(self, tickets: Iterable[Ticket]) -> None:
        """Calls that go on elsewhere; the actor may have heard of them."""
        for ticket in tickets:
            self._remove(ticket)
            self._withdrawals.append(ticket.number)

    def take(self, now: float) -> Batch | None:
        """What the next exchange says; `None` when there is nothing."""
        numbers = list(self._entering)[:MOST_ENTRIES]
        entering = [self._entering.pop(number) for number in numbers]
        if not (entering or self._withdrawals or self._rebookings or self._releases):
            return None
        batch = Batch(self._withdrawals, self._rebookings, self._releases, entering, self._lots(now))
        self._withdrawals, self._rebookings, self._releases = [], {}, []
        return batch

    def put_back(self, batch: Batch) -> None:
        """An exchange failed for good: what must be said all the same, in case the actor comes back."""
        self._withdrawals[:0], self._releases[:0] = batch.withdrawals, batch.releases
        self._withdrawals += [number for lot in batch.ahead for number in lot.numbers]

    def arrived(self, numbers: Sequence[int], first: int) -> None:
        """The actor has put calls in line."""
        for arrival, number in enumerate(numbers, start=first):
            if (call := self._calls.get(number)) is not None:
                call[1].arrival = arrival

    def grant(self, grants: Iterable[tuple[int, int]]) -> list[Ticket]:
        """Calls may start; returns those that still want to."""
        admitted = []
        for number, booking in grants:
            if (call := self._calls.get(number)) is not None:
                link, ticket = call
                link.waiting -= ticket.state == WAITING
                ticket.booking, ticket.state = booking, RUNNING
                admitted.append(ticket)
        return admitted

    def lend(self, lots: Sequence[Lot], lent: Sequence[tuple[int, int]], until: float, now: float) -> list[Ticket]:
        """Takes in leases for calls to come, as many of each lot as the actor could spare. Returns the calls that start with them:
        those that have come meanwhile, in their order, unless others of this process wait in the actor already."""
        for lot, (count, booking) in zip(lots, lent, strict=True):
            self._busy.add(lot.link)
            lot.link.ahead.lend(lot.first, count, booking, lot.tokens, until)
        started: list[Ticket] = []
        for link in {lot.link for lot, (count, _) in zip(lots, lent, strict=True) if count}:
            here = [ticket for owner, ticket in self._entering.values() if owner is link]
            for ticket in here if len(here) == link.waiting else ():
                if (lease := link.ahead.take(ticket.tokens, now)) is None:
                    break
                del self._entering[ticket.number]
                self._remove(ticket)
                self._start(link, ticket, lease)
                started.append(ticket)
        return started

    def give_back(self, now: float) -> bool:
        """Gives back leases whose time is over (at `inf`: all); `True` when the actor must hear of it."""
        unused = [number for link in self._busy for number in link.ahead.unused(now)]
        self._withdrawals += unused
        return bool(unused)

    def fail(self, link: RemoteLink | None) -> list[Ticket]:
        """Takes out the waiting calls, of one limiter or of all."""
        failed = [ticket for owner, ticket in self._calls.values() if ticket.state == WAITING and link in (None, owner)]
        for ticket in failed:
            self._remove(ticket)
            if self._entering.pop(ticket.number, None) is None:
                self._withdrawals.append(ticket.number)
        return failed

    def known_links(self) -> set[RemoteLink]:
        """The limiters in which the actor knows calls of this process."""
        return {link for link, ticket in self._calls.values() if ticket.arrival}

    def registrations(self, links: Collection[RemoteLink], windows: WindowState) -> list[Registration]:
        """What the actor must know of these limiters."""
        calls = [(link, ticket) for link, ticket in self._calls.values() if ticket.arrival and link in links]
        return [_registration(link, [ticket for owner, ticket in calls if owner is link], windows) for link in links]

    def _start(self, link: RemoteLink, ticket: Ticket, lease: Lease) -> None:
        ticket.number, ticket.booking, ticket.arrival, ticket.state = lease.number, lease.booking, lease.booking, RUNNING
        self._calls[ticket.number] = (link, ticket)
        if lease.tokens != ticket.tokens:
            self.rebook(link, ticket.booking, ticket.tokens - lease.tokens)

    def _remove(self, ticket: Ticket) -> bool:
        """Whether it was still there."""
        call = self._calls.pop(ticket.number, None)
        if call is None:
            return False
        call[0].waiting -= ticket.state == WAITING
        return True

    def _lots(self, now: float) -> list[Lot]:
        lots = []
        for link in list(self._busy):
            count, tokens = link.ahead.ask(now)
            if link.ahead.idle:
                self._busy.discard(link)
            if count:
                lots.append(Lot(link, self._number + 1, count, tokens))
                self._number += count
        return lots


def _registration(link: RemoteLink, tickets: Collection[Ticket], windows: WindowState) -> Registration:
    return Registration(
        link.reference.name,
        link.reference.limits,
        link.epoch,
        [(ticket.number, ticket.tokens, ticket.arrival) for ticket in tickets if ticket.state == WAITING],
        [(ticket.number, ticket.tokens, ticket.booking) for ticket in tickets if ticket.state == RUNNING],
        windows,
    )
