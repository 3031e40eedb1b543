"""One process's conversation with the actor that holds its shared rate limiters.

It gathers what the calls of a process want (`Outbox`) and sends it in one `exchange` at a time, whose answer brings what could be
granted at once, and leases for calls to come when they come fast. While calls wait or are in flight it also keeps one `listen`
open, which brings later grants and renews the process's lease. So the cost of an admission falls with the load: a thousand callers,
or one that calls a thousand times, share each exchange.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from lousho_ray.actors.calling import ACTOR_LOOP, ActorCaller, end_if_frozen
from lousho_ray.actors.limiter_outbox import Batch, Lot, Outbox
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import AgentExecutionError, LoushoError
from lousho_ray.ids import new_id
from lousho_ray.limits.ahead import AHEAD_S
from lousho_ray.limits.limiter import conflicting_limits
from lousho_ray.limits.link import Ticket, post, running_loop, wake
from lousho_ray.limits.rate import LimiterStats, WindowState
from lousho_ray.limits.shared import LEASE_S, Exchange, Listen, Registered, Reply

if TYPE_CHECKING:
    from lousho_ray.actors.limiter import RemoteLink

CALL_TIMEOUT_S = 15.0
LISTEN_TIMEOUT_S = CALL_TIMEOUT_S + LEASE_S / 3
"""A `listen` stays open for a third of the lease when there are no news."""

GATHER_S = 0.004
"""While nobody waits for it, what is given back may gather for so long: fewer exchanges, less CPU for each call."""

RELOST_PAUSES_S = (0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Waits after an exchange whose answer was void, because the actor did not know this process (any more) when it was given."""

RETRY_LATER_S = 5.0
"""After the last failed attempt: when to try again to keep the leases of calls in flight, and to give back slots."""


class LimiterClient:
    """The conversation, for any number of limiters, event loops and threads.

    Tickets wait here; their place in line is in the actor. When the actor starts a new life, or has given up this process,
    everything it knew is registered again and keeps its place.

    Args:
        connect: Returns the actor's handle.
        clock: Tells how old an answer and a lease are.
    """

    def __init__(self, connect: Callable[[], Any], clock: Clock = SYSTEM_CLOCK) -> None:
        self.id = new_id()
        self._now = clock.now
        self._call = ActorCaller(connect, "rate limiter", if_silent=end_if_frozen)
        self._loop = ACTOR_LOOP.loop()
        self._tasks: set[asyncio.Task[None]] = set()
        # Guarded by the lock: what any thread may touch.
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._gathering: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._sending = False
        self._gathered_enough: asyncio.Event | None = None
        self._listening = False
        # Touched on the background loop only.
        self._listen_call: asyncio.Task[Any] | None = None
        self._registering = asyncio.Lock()
        self._registered: weakref.WeakSet[RemoteLink] = weakref.WeakSet()
        self._epoch: str | None = None
        self._lease_s = LEASE_S
        self._losses = 0
        self._lost = False
        self._seq = 0
        self._received = 0

    # -------------------------------------------------------------------------------------------------- from any thread

    def enter(self, link: RemoteLink, ticket: Ticket) -> bool:
        """Puts a call in line; `True` when it starts at once, with a lease that this process has already."""
        with self._lock:
            if self._outbox.enter(link, ticket, self._now()):
                self._listen_on()
                return True
            if self._gathered_enough is not None:
                self._loop.call_soon_threadsafe(self._gathered_enough.set)
                self._gathered_enough = None
            self._send_soon()
            return False

    def withdraw(self, ticket: Ticket) -> None:
        with self._lock:
            if self._outbox.withdraw(ticket):
                self._send_soon()

    def release(self, ticket: Ticket) -> None:
        with self._lock:
            if self._outbox.release(ticket):
                self._send_soon()

    def rebook(self, link: RemoteLink, ticket: Ticket, difference: int) -> None:
        with self._lock:
            self._outbox.rebook(link, ticket.booking, difference)
            self._send_soon()

    def adopt(self, link: RemoteLink, waiting: Sequence[Ticket], running: Sequence[Ticket], windows: WindowState) -> None:
        """Registers a limiter with what it held before. Blocks."""
        with self._lock:
            for ticket in (*running, *waiting):
                self._outbox.add(link, ticket)
        try:
            self._block(self._declare(link, windows))
        except BaseException:
            with self._lock:
                self._outbox.forget((*running, *waiting))
            raise

    def declare(self, link: RemoteLink) -> None:
        """Registers a limiter. Blocks."""
        self._block(self._declare(link, WindowState()))

    async def stats(self, link: RemoteLink) -> LimiterStats:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._stats(link), self._loop))

    def _send_soon(self) -> None:
        """Sends once the caller's event loop has run everything that is ready now: that goes in one exchange. Holds the lock."""
        if self._sending:
            return
        here = running_loop()
        if here is None or here is self._loop:
            self._wake_sender()
        elif here not in self._gathering:
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

    def _listen_on(self) -> None:
        """Keeps the lease while there are calls. Holds the lock."""
        if self._outbox.has_calls and not self._listening:
            self._listening = True
            self._loop.call_soon_threadsafe(self._start, self._listen)

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
                if await self._exchange(batch):
                    await self._gather()
            except Exception as error:
                self._fail(_as_ours(error))
                with self._lock:
                    self._outbox.put_back(batch)
                    self._sending = False
                    self._loop.call_later(RETRY_LATER_S, self._retry)
                return

    async def _gather(self) -> None:
        """Waits a moment, or until a call waits."""
        with self._lock:
            if self._outbox.waits:
                return
            enough = self._gathered_enough = asyncio.Event()
        timer = self._loop.call_later(GATHER_S, enough.set)
        await enough.wait()
        timer.cancel()
        with self._lock:
            self._gathered_enough = None

    def _take(self) -> Batch | None:
        with self._lock:
            batch = self._outbox.take(self._now())
            self._sending = batch is not None
            return batch

    async def _exchange(self, batch: Batch) -> bool:
        """Whether leases for calls to come were lent: nobody waits then."""
        entries = [(link.reference.name, ticket.number, ticket.tokens) for link, ticket in batch.entering]
        lots = batch.ahead
        self._seq += 1
        asked_at = self._now()
        for pause_s in (*RELOST_PAUSES_S, None):
            refused = await self._register({*(link for link, _ in batch.entering), *(lot.link for lot in lots)})
            if refused:
                entries = [entry for entry in entries if entry[0] not in refused]
                lots = [lot for lot in lots if lot.link.reference.name not in refused]
            losses, sent_at = self._losses, self._now()
            state = (self.id, self._epoch or "", self._seq, self._received, self._listening)
            ahead = [(lot.link.reference.name, lot.first, lot.number, lot.tokens) for lot in lots]
            message = Exchange(*state, batch.withdrawals, batch.rebookings, batch.releases, entries, ahead)
            reply: Reply = await self._call("exchange", message, timeout_s=CALL_TIMEOUT_S)
            if self._accept(reply, losses, sent_at, [number for _, number, _ in entries]):
                return self._borrow(lots, reply.lent, asked_at + AHEAD_S)
            if not entries and not lots:
                return False  # What a lost life was to be told is void; with what goes on this process registers anew.
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        lives = len(RELOST_PAUSES_S) + 1
        raise AgentExecutionError(f"The rate limiter actor is lost again each time it is found: {lives} lives in one exchange.")

    async def _listen(self) -> None:
        """Keeps one `listen` open while there are calls that wait or are in flight."""
        again = False
        while self._keep_listening():
            try:
                await self._register(())
                losses, sent_at = self._losses, self._now()
                message = Listen(self.id, self._epoch or "", self._received, again)
                self._listen_call = self._loop.create_task(self._call("listen", message, timeout_s=LISTEN_TIMEOUT_S))
                await asyncio.wait([self._listen_call])
                again = self._listen_call.cancelled()
                reply: Reply | None = None if again else self._listen_call.result()
                if reply is not None:
                    again = not self._accept(reply, losses, sent_at, ())
            except Exception as error:
                again = True
                self._fail(_as_ours(error))
                await asyncio.sleep(RETRY_LATER_S)

    def _keep_listening(self) -> bool:
        with self._lock:
            if self._outbox.urgent:
                self._wake_sender()
            self._listening = self._outbox.has_calls
            return self._listening

    def _accept(self, reply: Reply, losses: int, sent_at: float, entered: Sequence[int]) -> bool:
        """Takes in an answer; `False` when it is none, because the actor lost this process before or after it was given.

        One that took longer than the lease (this process was stopped meanwhile) is none either: its slots are others' by now.
        """
        if losses != self._losses:
            return False
        if not reply.known or self._now() - sent_at > self._lease_s:
            self._lose()
            return False
        with self._lock:
            self._outbox.arrived(entered, reply.arrived)
            admitted = self._outbox.grant(reply.grants[max(0, self._received - reply.first) :])
            self._received = max(self._received, reply.first + len(reply.grants))
            self._wake(admitted)
        return True

    def _borrow(self, lots: Sequence[Lot], lent: Sequence[tuple[int, int]], until: float) -> bool:
        now = self._now()
        with self._lock:
            self._wake(self._outbox.lend(lots, lent, until, now))
        borrowed = any(count for count, _ in lent)
        if borrowed:
            self._loop.call_later(max(0.0, until - now), self._give_back)
        return borrowed

    def _wake(self, admitted: Sequence[Ticket]) -> None:
        """Starts admitted calls; those whose event loop is gone are not made. Holds the lock."""
        for ticket in wake(admitted):
            if self._outbox.withdraw(ticket):
                self._send_soon()
        self._listen_on()

    def _give_back(self) -> None:
        with self._lock:
            if self._outbox.give_back(self._now()):
                self._send_soon()

    def _lose(self) -> None:
        """The actor does not know this process (any more): what it said before is void, and what it knew must be registered."""
        with self._lock:
            self._outbox.give_back(math.inf)
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
                wanted |= self._outbox.known_links()
        missing = {link for link in wanted if link not in self._registered and link.reference.name not in refused}
        self._lost = self._lost and bool(missing)
        return missing

    async def _send_registrations(self, links: Collection[RemoteLink], windows: WindowState) -> Registered:
        with self._lock:
            registrations = self._outbox.registrations(links, windows)
        answer: Registered = await self._call("register", self.id, self._received, registrations, timeout_s=CALL_TIMEOUT_S)
        self._lease_s = answer.lease_s
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
            self._listen_on()

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
            failed = self._outbox.fail(link)
        if link is None:
            self._lose()
        for ticket in failed:
            post(ticket.loop, functools.partial(_refuse, ticket, error))

    def _retry(self) -> None:
        with self._lock:
            if self._outbox.urgent:
                self._send_soon()


def _refuse(ticket: Ticket, error: LoushoError) -> None:
    if not ticket.future.done():
        ticket.future.set_exception(error)


def _as_ours(error: Exception) -> LoushoError:
    """A failure of the conversation itself ends the waiting calls too, instead of leaving them in line for ever."""
    return error if isinstance(error, LoushoError) else AgentExecutionError(f"The rate limiter failed: {error!r}")
