"""A shared limiter and the processes that use it, simulated: every message takes its time, and a provider keeps a log."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from lousho_ray.actors.limiter import LimiterReference, RemoteLink
from lousho_ray.actors.limiter_outbox import Outbox
from lousho_ray.limits.ahead import AHEAD_S
from lousho_ray.limits.link import Ticket
from lousho_ray.limits.rate import RUNNING, WindowState
from lousho_ray.limits.shared import TRAVEL_S, Exchange, Listen, Reply, SharedLimits
from lousho_ray.options import RateLimits


class World:
    """Time, what happens when, and an actor."""

    def __init__(self, seed: int, slowest_message_s: float) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self._slowest_s = slowest_message_s
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tick_at = 0.0
        self.processes: dict[str, Process] = {}
        self.actor = SharedLimits(epoch="life", now=0.0, on_news=self._news, first_arrival=1)

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), what))

    def send(self, what: Callable[[], None]) -> None:
        """Something that is on its way for a while."""
        self.after(self.chance.uniform(0.0002, self._slowest_s), what)

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self._set_tick()

    def _news(self, process: str) -> None:
        self.after(0.0, lambda: self.tell(process, self.actor.news(process)))

    def tell(self, process: str, reply: Reply | None) -> None:
        if reply is not None:
            self.send(lambda: self.processes[process].take_news(reply))

    def _set_tick(self) -> None:
        at = self.actor.next_wakeup()
        if at > self.now and at != self._tick_at:
            self._tick_at = at
            self.after(at - self.now, lambda: self.actor.tick(self.now))


class Provider:
    """Counts what arrives. A request is on its way for up to `slowest_s`, which `TRAVEL_S` must cover."""

    def __init__(self, world: World, slowest_s: float) -> None:
        self.world = world
        self.slowest_s = slowest_s
        self.arrived: list[float] = []
        self.running = self.most_running = 0

    def call(self, then: Callable[[], None]) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        on_its_way = self.world.chance.uniform(0.0, self.slowest_s)
        self.world.after(on_its_way, lambda: self.arrived.append(self.world.now))

        def end() -> None:
            self.running -= 1
            then()

        self.world.after(on_its_way + self.world.chance.uniform(0.1, 2.0), end)


class Process:
    """`LimiterClient` and its callers, written out: each caller makes one call after the other."""

    def __init__(self, name: str, world: World, provider: Provider, limits: RateLimits, callers: int) -> None:
        self.name, self.world, self.provider = name, world, provider
        self.outbox = Outbox()
        self.link = RemoteLink(cast("Any", None), LimiterReference("actor", None, "x", limits))
        self.confirmed = self.seq = 0
        self.sending = False
        self.ahead = 0
        world.processes[name] = self
        world.actor.register(name, 0, self.outbox.registrations([self.link], WindowState()), 0.0)
        self._listen()
        for _ in range(callers):
            world.send(self.call)

    def call(self) -> None:
        ticket = Ticket(cast("Any", None), 10, cast("Any", Loop()))
        if self.outbox.enter(self.link, ticket, self.world.now):
            self.ahead += 1
            self._start(ticket)
        self._send()

    def _start(self, ticket: Ticket) -> None:
        def end() -> None:
            self.outbox.release(ticket)
            self._send()
            self.call()

        assert ticket.state == RUNNING
        self.provider.call(end)

    def _send(self) -> None:
        batch = None if self.sending else self.outbox.take(self.world.now)
        if batch is None:
            return
        self.sending = True
        self.seq += 1
        until = self.world.now + AHEAD_S
        entries = [("x", ticket.number, ticket.tokens) for _, ticket in batch.entering]
        ahead = [("x", lot.first, lot.number, lot.tokens) for lot in batch.ahead]
        state = (self.name, "life", self.seq, self.confirmed, True, batch.withdrawals, batch.rebookings, batch.releases)
        message = Exchange(*state, entries, ahead)

        def arrive() -> None:
            reply = self.world.actor.exchange(message, self.world.now)
            self.world.send(lambda: back(reply))

        def back(reply: Reply) -> None:
            assert reply.known
            self.outbox.arrived([number for _, number, _ in entries], reply.arrived)
            self._take(reply)
            for ticket in self.outbox.lend(batch.ahead, reply.lent, until, self.world.now):
                self._start(ticket)
            self.world.after(max(0.0, until - self.world.now), self._give_back)
            self.sending = False
            self._send()

        self.world.send(arrive)

    def _give_back(self) -> None:
        if self.outbox.give_back(self.world.now):
            self._send()

    def take_news(self, reply: Reply) -> None:
        self._take(reply)
        self.world.send(self._ask)

    def _listen(self) -> None:
        self._ask()
        self.world.after(10.0, self._listen)

    def _ask(self) -> None:
        message = Listen(self.name, "life", self.confirmed)
        self.world.tell(self.name, self.world.actor.listen(message, self.world.now))

    def _take(self, reply: Reply) -> None:
        new = reply.grants[max(0, self.confirmed - reply.first) :]
        self.confirmed = max(self.confirmed, reply.first + len(reply.grants))
        for ticket in self.outbox.grant(new):
            self._start(ticket)


class Loop:
    """Nobody awaits in a simulation."""

    def create_future(self) -> asyncio.Future[None] | None:
        return None


def most_in_a_minute(times: Sequence[float]) -> int:
    return max(index + 1 - bisect_right(times, at - 60.0) for index, at in enumerate(times))


@pytest.mark.parametrize(
    ("limits", "processes", "callers", "slowest_message_s"),
    [
        (RateLimits(requests_per_minute=600), 4, 25, 0.02),
        (RateLimits(requests_per_minute=600, max_concurrent=40), 4, 25, 0.02),
        (RateLimits(requests_per_minute=1000), 1, 60, 0.001),
        (RateLimits(requests_per_minute=120, tokens_per_minute=600), 3, 10, 0.05),
        (RateLimits(requests_per_minute=3000), 4, 60, 0.005),
    ],
)
def test_a_provider_counts_no_call_too_many_in_any_minute_and_98_percent_of_the_limit(
    limits: RateLimits, processes: int, callers: int, slowest_message_s: float
) -> None:
    # RL-07, RL-08, RL-32, RL-35: grants and requests are on their way for up to TRAVEL_S
    slowest_s = TRAVEL_S - 2 * slowest_message_s - AHEAD_S
    world = World(7, slowest_message_s)
    provider = Provider(world, slowest_s)
    for number in range(processes):
        Process(f"p{number}", world, provider, limits, callers)
    world.run(300.0)
    arrived = sorted(provider.arrived)
    assert limits.requests_per_minute is not None
    most = min(int(limits.requests_per_minute), int((limits.tokens_per_minute or 1e9) / 10))
    assert most_in_a_minute(arrived) <= most
    gaps = [later - earlier for earlier, later in zip(arrived, arrived[most:], strict=False)]
    assert 60.0 / statistics.mean(gaps) >= 0.98
    assert provider.most_running <= (limits.max_concurrent or processes * callers)


def test_leases_ahead_are_used_in_a_simulation_with_calls_that_come_fast() -> None:
    # RL-38: the accuracy above holds with them, not for lack of them
    world = World(7, 0.001)
    provider = Provider(world, 0.1)
    limits = RateLimits(requests_per_minute=60_000)
    processes = [Process(f"p{number}", world, provider, limits, 300) for number in range(2)]
    world.run(20.0)
    assert sum(process.ahead for process in processes) > 100
    assert most_in_a_minute(sorted(provider.arrived)) <= 60_000
