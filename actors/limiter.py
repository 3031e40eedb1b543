"""Rate limiters that processes share: the actor that holds them, and a process's link to one of them."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lousho_ray.actors.calling import find_actor, was_restarted
from lousho_ray.actors.limiter_client import LimiterClient
from lousho_ray.clock import SYSTEM_CLOCK, Clock, TimerHandle
from lousho_ray.ids import new_id
from lousho_ray.limits.ahead import Ahead
from lousho_ray.limits.limiter import conflicting_limits
from lousho_ray.limits.link import Ticket
from lousho_ray.limits.rate import LimiterStats, WindowState
from lousho_ray.limits.shared import LEASE_S, Exchange, Listen, Registered, Registration, Reply, SharedLimits
from lousho_ray.options import RateLimits

ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": 10_000}
"""How to start `RateLimiterActor`. Each process holds a call open; retries are the client's, which knows what a new life means."""


class RateLimiterActor:
    """All rate limiters of a namespace, by name. Runs no user code.

    Args:
        restarted: Whether an earlier life of this actor was lost; by default Ray is asked.
        clock: Its own monotonic clock decides the windows.
        lease_s: How long a process may be silent before its slots are given to others, in seconds.
    """

    def __init__(self, restarted: bool | None = None, clock: Clock = SYSTEM_CLOCK, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._listen_s = lease_s / 3
        self._shared = SharedLimits(
            epoch=new_id(),
            now=clock.now(),
            restarted=was_restarted() if restarted is None else restarted,
            first_arrival=time.time_ns(),
            on_news=self._wake,
            lease_s=lease_s,
        )
        self._listeners: dict[str, asyncio.Event] = {}
        self._timer: TimerHandle | None = None
        self._timer_at: float | None = None

    async def register(self, process_id: str, confirmed: int, registrations: Sequence[Registration]) -> Registered:
        answer = self._shared.register(process_id, confirmed, registrations, self._clock.now())
        self._set_timer()
        return answer

    async def exchange(self, message: Exchange) -> Reply:
        """Does what a process asks for and answers at once."""
        reply = self._shared.exchange(message, self._clock.now())
        self._set_timer()
        return reply

    async def listen(self, message: Listen) -> Reply | None:
        """Answers when there is news, or with `None` after a third of the lease. A process's newer call ends its older one."""
        event = asyncio.Event()
        if (older := self._listeners.get(message.process)) is not None:
            older.set()
        self._listeners[message.process] = event
        timer = self._clock.call_later(self._listen_s, event.set)
        try:
            if (reply := self._shared.listen(message, self._clock.now())) is not None:
                return reply
            await event.wait()
            if self._listeners.get(message.process) is not event:
                return None
            return self._shared.news(message.process)
        finally:
            timer.cancel()
            if self._listeners.get(message.process) is event:
                del self._listeners[message.process]

    async def stats(self, name: str) -> LimiterStats | None:
        return self._shared.stats(name, self._clock.now())

    def _wake(self, process_id: str) -> None:
        if (event := self._listeners.get(process_id)) is not None:
            event.set()

    def _set_timer(self) -> None:
        at = self._shared.next_wakeup()
        if at != self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = self._clock.call_later(max(0.0, at - self._clock.now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = None
        self._shared.tick(self._clock.now())
        self._set_timer()


@dataclass(frozen=True, slots=True)
class LimiterReference:
    """Where a shared limiter is: the pickled form of its `RateLimiter`.

    Attributes:
        actor: Name of the actor.
        namespace: Ray namespace of the actor.
        name: The limiter's own name in it.
    """

    actor: str
    namespace: str | None
    name: str
    limits: RateLimits = field(compare=False)

    def connect(self) -> RemoteLink:
        """This process's link to it. Does not wait: the actor hears of it with the first call, or by `declare`.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_INVALID`, this process knows it with other limits.
        """
        with _REGISTRY_LOCK:
            link = _LINKS.get(self)
            if link is None:
                client = _CLIENTS.get((self.actor, self.namespace))
                if client is None:
                    client = LimiterClient(functools.partial(find_actor, self.actor, self.namespace))
                    _CLIENTS[self.actor, self.namespace] = client
                link = _LINKS[self] = RemoteLink(client, self)
            elif link.reference.limits != self.limits:
                raise conflicting_limits(self.name, link.reference.limits, self.limits)
            return link


class RemoteLink:
    """A limiter that lives in an actor. Its state is the client's.

    Attributes:
        epoch: The life of the actor in which it was registered last.
        waiting: How many calls of this process wait.
        ahead: The leases this process holds for calls to come.
    """

    def __init__(self, client: LimiterClient, reference: LimiterReference) -> None:
        self.reference = reference
        self.epoch: str | None = None
        self.waiting = 0
        self.ahead = Ahead()
        self._client = client

    def declare(self) -> None:
        """Makes sure that the limiter exists. Blocks for one round trip; not for event loops with other work.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_INVALID`, it exists with other limits.
            AgentExecutionError: `LOUSHO_AGENT_EXECUTION_FAILED`, the actor cannot be reached.
        """
        self._client.declare(self)

    def enter(self, ticket: Ticket) -> bool:
        return self._client.enter(self, ticket)

    def withdraw(self, ticket: Ticket) -> None:
        self._client.withdraw(ticket)

    def release(self, ticket: Ticket) -> None:
        self._client.release(ticket)

    def rebook(self, ticket: Ticket, difference: int) -> None:
        self._client.rebook(self, ticket, difference)

    def adopt(self, waiting: Sequence[Ticket], running: Sequence[Ticket], windows: WindowState) -> None:
        self._client.adopt(self, waiting, running, windows)

    async def stats(self) -> LimiterStats:
        return await self._client.stats(self)


_CLIENTS: weakref.WeakValueDictionary[tuple[str, str | None], LimiterClient] = weakref.WeakValueDictionary()
_LINKS: weakref.WeakValueDictionary[LimiterReference, RemoteLink] = weakref.WeakValueDictionary()
_REGISTRY_LOCK = threading.Lock()
