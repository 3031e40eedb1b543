"""One process's conversation with the actor that holds its shared rate limiters.

It gathers what the calls of a process want and sends it in one `exchange` at a time, whose answer brings what could be granted at
once; while calls wait or are in flight it also keeps one `listen` open, which brings later grants and renews the process's lease.
So the cost of an admission falls with the load: a thousand callers share each exchange.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lousho_ray.actors.calling import ACTOR_LOOP, ActorCaller
from lousho_ray.errors import AgentExecutionError, LoushoError
from lousho_ray.ids import new_id
from lousho_ray.limits.limiter import conflicting_limits
from lousho_ray.limits.link import Ticket, post, running_loop, wake
from lousho_ray.limits.rate import ENDED, RUNNING, WAITING, LimiterStats, WindowState
from lousho_ray.limits.shared import LEASE_S, Exchange, Listen, Registered, Registration, Reply

if TYPE_CHECKING:
    from lousho_ray.actors.limiter import RemoteLink

CALL_TIMEOUT_S = 15.0
LISTEN_TIMEOUT_S = CALL_TIMEOUT_S + LEASE_S / 3
"""A `listen` stays open for a third of the lease when there are no news."""

RETRY_LATER_S = 5.0
"""After three failed attempts: when to try again to keep the leases of calls in flight, and to give back slots."""

MOST_ENTRIES = 2000
"""Entries of one exchange: it stays below the 100 KB above which Ray stores arguments instead of sending them along."""


class Batch(NamedTuple):
    """What has gathered between two exchanges."""

    withdrawals: list[int]
    rebookings: dict[tuple[str, int], int]
    releases: list[int]
    entering: list[tuple[RemoteLink, Ticket]]


class LimiterClient:
    """The conversation, for any number of limiters, event loops and threads.

    Tickets wait here; their place in line is in the actor. A ticket has an arrival number once the actor knows it. When the actor
    starts a new life, or has given up this process, everything it knew is registered again and keeps its place.

    Args:
        connect: Returns the actor's handle.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.id = new_id()
        self._call = ActorCaller(connect, "rate limiter")
        self._loop = ACTOR_LOOP.loop()
        self._tasks: set[asyncio.Task[None]] = set()
        # Guarded by the lock: what any thread may touch.
        self._lock = threading.Lock()
        self._number = 0
        self._calls: dict[int, tuple[RemoteLink, Ticket]] = {}
        self._entering: dict[int, tuple[RemoteLink, Ticket]] = {}
        self._withdrawals: list[int] = []
        self._rebookings: dict[tuple[str, int], int] = {}
        self._releases: list[int] = []
        self._gathering: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._sending = False
        self._listening = False
        # Touched on the background loop only.
        self._listen_call: asyncio.Task[Any] | None = None
        self._registering = asyncio.Lock()
        self._registered: weakref.WeakSet[RemoteLink] = weakref.WeakSet()
        self._epoch: str | None = None
        self._losses = 0
        self._lost = False
        self._seq = 0
        self._received = 0

    # -------------------------------------------------------------------------------------------------- from any thread

    def enter(self, link: RemoteLink, ticket: Ticket) -> None:
        with self._lock:
            self._entering[self._add(link, ticket)] = (link, ticket)
            self._send_soon()

    def withdraw(self, ticket: Ticket) -> None:
        with self._lock:
            if self._calls.pop(ticket.number, None) is not None and self._entering.pop(ticket.number, None) is None:
                self._withdrawals.append(ticket.number)
                self._send_soon()
            ticket.state = ENDED

    def release(self, ticket: Ticket) -> None:
        with self._lock:
            if self._calls.pop(ticket.number, None) is not None:
                self._releases.append(ticket.number)
                self._send_soon()
            ticket.state = ENDED

    def rebook(self, link: RemoteLink, ticket: Ticket, difference: int) -> None:
        with self._lock:
            key = (link.reference.name, ticket.booking)
            self._rebookings[key] = self._rebookings.get(key, 0) + difference
            self._send_soon()

    def adopt(self, link: RemoteLink, waiting: Sequence[Ticket], running: Sequence[Ticket], windows: WindowState) -> None:
        """Registers a limiter with what it held before. Blocks."""
        with self._lock:
            numbers = [self._add(link, ticket) for ticket in (*running, *waiting)]
        try:
            self._block(self._declare(link, windows))
        except BaseException:
            with self._lock:
                for number in numbers:
                    self._calls.pop(number, None)
                self._withdrawals += numbers
            raise

    def declare(self, link: RemoteLink) -> None:
        """Registers a limiter. Blocks."""
        self._block(self._declare(link, WindowState()))

    async def stats(self, link: RemoteLink) -> LimiterStats:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._stats(link), self._loop))

    def _add(self, link: RemoteLink, ticket: Ticket) -> int:
        self._number += 1
        ticket.number = self._number
        self._calls[ticket.number] = (link, ticket)
        return ticket.number

    def _send_soon(self) -> None:
        """Sends once the caller's event loop has run everything that is ready now: that goes in one exchange. Holds the lock."""
        here = running_loop()
        if here is None or here is self._loop:
            self._wake_sender()
        elif not self._sending and here not in self._gathering:
            self._gathering.add(here)
            here.call_soon(self._gathered, here)

    def _gathered(self, here: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._gathering.discard(here)
            self._wake_sender()

    def _wake_sender(self) -> None:
        if not self._sending:
            self._sending = True
            self._loop.call_soon_threadsafe(self._start, self._send)

    def _block(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # --------------------------------------------------------------------------------------------- on the background loop

    def _start(self, conversation: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._loop.create_task(conversation())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        """Sends what has gathered, one exchange at a time, until there is nothing left."""
        while (batch := self._take()) is not None:
            try:
                await self._exchange(batch)
            except Exception as error:
                self._fail(_as_ours(error))
                with self._lock:
                    self._withdrawals[:0], self._releases[:0] = batch.withdrawals, batch.releases
                    self._sending = False
                    self._loop.call_later(RETRY_LATER_S, self._retry)
                return

    def _take(self) -> Batch | None:
        with self._lock:
            numbers = list(self._entering)[:MOST_ENTRIES]
            entering = [self._entering.pop(number) for number in numbers]
            if not (entering or self._withdrawals or self._rebookings or self._releases):
                self._sending = False
                return None
            batch = Batch(self._withdrawals, self._rebookings, self._releases, entering)
            self._withdrawals, self._rebookings, self._releases = [], {}, []
            return batch

    async def _exchange(self, batch: Batch) -> None:
        withdrawals, rebookings, releases, entering = batch
        entries = [(link.reference.name, ticket.number, ticket.tokens) for link, ticket in entering]
        self._seq += 1
        for _ in range(5):
            refused = await self._register({link for link, _ in entering})
            if refused:
                entries = [entry for entry in entries if entry[0] not in refused]
            losses = self._losses
            state = (self.id, self._epoch or "", self._seq, self._received, self._listening)
            message = Exchange(*state, withdrawals, rebookings, releases, entries)
            reply: Reply = await self._call("exchange", message, timeout_s=CALL_TIMEOUT_S)
            if self._accept(reply, losses, [number for _, number, _ in entries]):
                return
        raise AgentExecutionError("The rate limiter actor is lost again each time it is found: five lives in one exchange.")

    async def _listen(self) -> None:
        """Keeps one `listen` open while there are calls that wait or are in flight."""
        again = False
        while self._keep_listening():
            try:
                await self._register(())
                losses = self._losses
                message = Listen(self.id, self._epoch or "", self._received, again)
                self._listen_call = self._loop.create_task(self._call("listen", message, timeout_s=LISTEN_TIMEOUT_S))
                await asyncio.wait([self._listen_call])
                again = self._listen_call.cancelled()
                reply: Reply | None = None if again else self._listen_call.result()
                if reply is not None:
                    self._accept(reply, losses, ())
            except Exception as error:
                again = True
                self._fail(_as_ours(error))
                await asyncio.sleep(RETRY_LATER_S)

    def _keep_listening(self) -> bool:
        with self._lock:
            if self._withdrawals or self._releases or self._entering:
                self._wake_sender()
            self._listening = bool(self._calls)
            return self._listening

    def _accept(self, reply: Reply, losses: int, entered: Sequence[int]) -> bool:
        """Takes in an answer; `False` when it is none, because the actor lost this process before or after it was given."""
        if losses != self._losses:
            return False
        if not reply.known:
            self._lose()
            return False
        with self._lock:
            for arrival, number in enumerate(entered, start=reply.arrived):
                if (call := self._calls.get(number)) is not None:
                    call[1].arrival = arrival
            admitted = []
            for number, booking in reply.grants[max(0, self._received - reply.first) :]:
                if (call := self._calls.get(number)) is not None:
                    ticket = call[1]
                    ticket.booking, ticket.state = booking, RUNNING
                    admitted.append(ticket)
            self._received = max(self._received, reply.first + len(reply.grants))
            for ticket in wake(admitted):
                del self._calls[ticket.number]
                self._withdrawals.append(ticket.number)
            if self._withdrawals:
                self._send_soon()
            if self._calls and not self._listening:
                self._listening = True
                self._start(self._listen)
        return True

    def _lose(self) -> None:
        """The actor does not know this process (any more): what it said before is void, and what it knew must be registered."""
        self._losses += 1
        self._lost = True
        self._registered.clear()
        if self._listen_call is not None:
            self._listen_call.cancel()

    async def _register(self, links: Collection[RemoteLink]) -> set[str]:
        """Makes the actor know these limiters, and after a loss every one that has calls there. Returns the refused names."""
        refused: set[str] = set()
        if not self._lost and not self._registering.locked() and all(link in self._registered for link in links):
            return refused
        async with self._registering:
            while missing := self._missing(links, refused):
                answer = await self._send_registrations(missing, WindowState())
                for link in missing:
                    if (known := answer.refused.get(link.reference.name)) is not None:
                        refused.add(link.reference.name)
                        self._fail(conflicting_limits(link.reference.name, known, link.reference.limits), link)
        return refused

    def _missing(self, links: Collection[RemoteLink], refused: set[str]) -> set[RemoteLink]:
        wanted = set(links)
        if self._lost:
            with self._lock:
                wanted |= {link for link, ticket in self._calls.values() if ticket.arrival}
        missing = {link for link in wanted if link not in self._registered and link.reference.name not in refused}
        self._lost = self._lost and bool(missing)
        return missing

    async def _send_registrations(self, links: Collection[RemoteLink], windows: WindowState) -> Registered:
        with self._lock:
            calls = [(link, ticket) for link, ticket in self._calls.values() if ticket.arrival and link in links]
        registrations = [_registration(link, [ticket for owner, ticket in calls if owner is link], windows) for link in links]
        answer: Registered = await self._call("register", self.id, self._received, registrations, timeout_s=CALL_TIMEOUT_S)
        if answer.epoch != self._epoch:
            if self._epoch is not None:
                self._lose()
            self._epoch = answer.epoch
        for link in links:
            if link.reference.name not in answer.refused:
                link.epoch = answer.epoch
                self._registered.add(link)
        return answer

    async def _declare(self, link: RemoteLink, windows: WindowState) -> None:
        async with self._registering:
            answer = await self._send_registrations([link], windows)
        if link.reference.name in answer.refused:
            raise conflicting_limits(link.reference.name, answer.refused[link.reference.name], link.reference.limits)
        with self._lock:
            if self._calls and not self._listening:
                self._listening = True
                self._start(self._listen)

    async def _stats(self, link: RemoteLink) -> LimiterStats:
        for _ in range(3):
            await self._register([link])
            stats: LimiterStats | None = await self._call("stats", link.reference.name, timeout_s=CALL_TIMEOUT_S)
            if stats is not None:
                return stats
            self._registered.discard(link)
        raise AgentExecutionError(f"The rate limiter {link.reference.name!r} is forgotten as soon as it is registered.")

    def _fail(self, error: LoushoError, link: RemoteLink | None = None) -> None:
        """Ends the waiting calls, of one limiter or of all, with an error: never without a limit."""
        with self._lock:
            failed = [
                ticket for owner, ticket in self._calls.values() if ticket.state == WAITING and (link is None or owner is link)
            ]
            for ticket in failed:
                del self._calls[ticket.number]
                if self._entering.pop(ticket.number, None) is None:
                    self._withdrawals.append(ticket.number)
        if link is None:
            self._lose()
        for ticket in failed:
            post(ticket.loop, functools.partial(_refuse, ticket, error))

    def _retry(self) -> None:
        with self._lock:
            if self._withdrawals or self._releases:
                self._send_soon()


def _registration(link: RemoteLink, tickets: Collection[Ticket], windows: WindowState) -> Registration:
    return Registration(
        link.reference.name,
        link.reference.limits,
        link.epoch,
        [(ticket.number, ticket.tokens, ticket.arrival) for ticket in tickets if ticket.state == WAITING],
        [(ticket.number, ticket.tokens, ticket.booking) for ticket in tickets if ticket.state == RUNNING],
        windows,
    )


def _refuse(ticket: Ticket, error: LoushoError) -> None:
    if not ticket.future.done():
        ticket.future.set_exception(error)


def _as_ours(error: Exception) -> LoushoError:
    """A failure of the conversation itself ends the waiting calls too, instead of leaving them in line for ever."""
    return error if isinstance(error, LoushoError) else AgentExecutionError(f"The rate limiter failed: {error!r}")
