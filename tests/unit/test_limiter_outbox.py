"""What a process gathers for the limiter actor, and how it uses what it gets."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from lousho_ray.actors.limiter import LimiterReference, RemoteLink
from lousho_ray.actors.limiter_outbox import Batch, Lot, Outbox
from lousho_ray.limits.ahead import AHEAD_S
from lousho_ray.limits.link import Ticket
from lousho_ray.limits.rate import RUNNING, WAITING
from lousho_ray.options import RateLimits


class Here:
    """An outbox with one limiter."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.link = RemoteLink(cast("Any", None), LimiterReference("actor", None, "x", RateLimits()))

    def ticket(self, tokens: int = 10) -> Ticket:
        return Ticket(cast("Any", None), tokens, asyncio.get_running_loop())

    def enter(self, count: int = 1, tokens: int = 10, now: float = 0.0) -> list[Ticket]:
        tickets = [self.ticket(tokens) for _ in range(count)]
        for ticket in tickets:
            self.outbox.enter(self.link, ticket, now)
        return tickets

    def take(self, now: float = 0.0) -> Batch:
        batch = self.outbox.take(now)
        assert batch is not None
        return batch

    def lend(self, first: int, count: int, tokens: int = 10, now: float = 0.0) -> list[Ticket]:
        return self.outbox.lend([Lot(self.link, first, count, tokens)], [(count, 99)], now + AHEAD_S, now)


@pytest.fixture
async def here() -> Here:
    return Here()


async def test_calls_that_came_meanwhile_start_with_what_an_answer_lends_in_their_order(here: Here) -> None:
    # RL-10
    tickets = here.enter(3)
    assert here.lend(100, 2) == tickets[:2]
    assert [(ticket.state, ticket.number, ticket.booking) for ticket in tickets[:2]] == [(RUNNING, 100, 99), (RUNNING, 101, 99)]
    assert tickets[2].state == WAITING
    assert [ticket for _, ticket in here.take().entering] == [tickets[2]], "the others need not be asked for"
    for ticket in tickets[:2]:
        here.outbox.release(ticket)
    assert here.take().releases == [100, 101]


async def test_no_call_goes_before_one_that_waits_in_the_actor(here: Here) -> None:
    # RL-06
    (first,) = here.enter()
    batch = here.take()
    (second,) = here.enter()
    assert here.lend(100, 5) == []
    (third,) = here.enter()
    assert third.state == WAITING
    here.outbox.grant([(first.number, 1)])
    assert here.lend(200, 5) == [second, third]
    assert [ticket for _, ticket in batch.entering] == [first]


async def test_a_large_call_is_not_overtaken_by_small_ones_behind_it(here: Here) -> None:
    # RL-06
    (large,) = here.enter(tokens=50)
    (small,) = here.enter(tokens=1)
    assert here.lend(100, 5, tokens=10) == []
    assert (large.state, small.state) == (WAITING, WAITING)


async def test_the_difference_between_a_lease_and_its_call_is_booked(here: Here) -> None:
    # RL-12, RL-15
    here.lend(100, 1, tokens=10)
    (ticket,) = here.enter(tokens=4)
    assert ticket.state == RUNNING
    assert here.take().rebookings == {("x", 99): -6}


async def test_what_is_not_used_is_given_back_with_the_next_exchange(here: Here) -> None:
    # RL-21
    here.lend(100, 3)
    here.enter(1, now=0.0)
    assert not here.outbox.give_back(0.0)
    assert here.outbox.give_back(AHEAD_S)
    assert here.take(AHEAD_S).withdrawals == [101, 102]
    assert not here.outbox.give_back(1.0)


async def test_an_exchange_that_failed_for_good_gives_up_the_leases_it_asked_for(here: Here) -> None:
    # RL-37
    here.enter(1)
    here.take(0.0)
    here.enter(4, now=0.001)
    batch = here.take(0.001)
    (lot,) = batch.ahead
    here.outbox.put_back(batch)
    here.outbox.fail(None)
    again = here.take(1.0)
    assert set(again.withdrawals) >= set(lot.numbers)
    assert again.entering == []
