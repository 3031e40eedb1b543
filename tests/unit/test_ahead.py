"""Leases taken before there are calls for them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.limits.ahead import AHEAD_S, MOST_AHEAD, Ahead, Lease
from lousho_ray.limits.rate import MOST_SURPLUS, Call, LimiterCore
from lousho_ray.limits.shared import LEASE_S, Exchange, Registration, Reply, SharedLimits
from lousho_ray.options import RateLimits


def busy(calls: int, elapsed_s: float, tokens: int = 10) -> tuple[int, int]:
    """What a process asks for after so many calls in that time."""
    ahead = Ahead()
    ahead.ask(0.0)
    for _ in range(calls):
        ahead.note(tokens)
    return ahead.ask(elapsed_s)


def test_only_calls_that_come_fast_ask_for_leases_ahead() -> None:
    # RL-38
    assert Ahead().ask(0.0) == (0, 0)
    assert busy(0, 0.002) == (0, 0)
    assert busy(5, AHEAD_S * 1.01) == (0, 0), "that slow, each call is its own round trip"
    assert busy(1, 0.002) == (10, 10), "as many as come in AHEAD_S"
    assert busy(10_000, 0.002) == (MOST_AHEAD, 10)


def test_a_lease_is_used_once_in_its_time_and_by_a_call_it_is_large_enough_for() -> None:
    ahead = Ahead()
    ahead.lend(7, 2, 99, 10, until=1.0)
    assert ahead.take(11, 0.5) is None, "a larger call gets in line"
    assert ahead.take(10, 0.5) == Lease(7, 99, 10)
    assert ahead.take(1, 0.999) == Lease(8, 99, 10)
    assert ahead.take(1, 0.999) is None
    assert ahead.idle


def test_a_lease_that_is_too_old_is_never_used_and_given_back() -> None:
    # RL-08: a process that was stopped (SIGSTOP) holds leases from before
    ahead = Ahead()
    ahead.lend(1, 3, 99, 10, until=1.0)
    assert ahead.take(1, 0.5) is not None
    assert ahead.take(1, 1.0) is None
    assert ahead.unused(1.0) == [2, 3]
    assert ahead.unused(1.0) == []
    assert ahead.idle


def test_what_is_held_is_not_asked_for_again() -> None:
    ahead = Ahead()
    ahead.ask(0.0)
    ahead.lend(1, 8, 99, 10, until=1.0)
    ahead.note(10)
    assert ahead.ask(0.002) == (2, 10)


@given(st.lists(st.tuples(st.sampled_from(["lend", "take", "wait", "back"]), st.integers(1, 5)), max_size=60))
def test_every_lease_is_used_once_or_given_back_once(steps: list[tuple[str, int]]) -> None:
    ahead, now, first, used, returned = Ahead(), 0.0, 0, [], []
    for step, count in steps:
        if step == "lend":
            ahead.lend(first, count, 1, 1, until=now + AHEAD_S)
            first += count
        elif step == "take":
            used += [lease.number for _ in range(count) if (lease := ahead.take(1, now)) is not None]
        elif step == "wait":
            now += AHEAD_S / 4 * count
        else:
            returned += ahead.unused(now)
    returned += ahead.unused(float("inf"))
    assert sorted(used + returned) == list(range(first))


# ------------------------------------------------------------------------------------------------------ what the actor lends


@pytest.mark.parametrize(
    ("limits", "tokens", "surplus"),
    [
        (RateLimits(max_concurrent=80), 1, 10),
        (RateLimits(requests_per_minute=80), 1, 10),
        (RateLimits(tokens_per_minute=8000), 100, 10),
        (RateLimits(max_concurrent=80, requests_per_minute=8), 1, 1),
        (RateLimits(max_concurrent=7), 1, 0),
        (RateLimits(), 1, MOST_SURPLUS),
    ],
)
def test_an_eighth_of_what_is_free_is_lent(limits: RateLimits, tokens: int, surplus: int) -> None:
    assert LimiterCore[Call](limits).surplus(tokens, 0.0) == surplus


def test_nothing_is_lent_while_somebody_waits_or_before_it_opens() -> None:
    # RL-06
    core = LimiterCore[Call](RateLimits(max_concurrent=80, tokens_per_minute=100))
    core.enter(Call(90))
    core.admit(0.0)
    core.enter(Call(50))
    core.admit(0.0)
    assert core.surplus(1, 0.0) == 0
    closed = LimiterCore[Call](RateLimits(max_concurrent=80))
    closed.open_at(3.0)
    assert closed.surplus(1, 2.9) == 0
    assert closed.surplus(1, 3.0) == 10


def ask(shared: SharedLimits, seq: int, count: int, now: float = 0.0, **rest: object) -> Reply:
    ahead = [("x", 1000 * seq, count, 5)] if count else []
    return shared.exchange(Exchange("a", "life", seq, 0, ahead=ahead, **rest), now)  # type: ignore[arg-type]


def shared_by(limits: RateLimits) -> SharedLimits:
    shared = SharedLimits(epoch="life", now=0.0, on_news=lambda _: None)
    shared.register("a", 0, [Registration("x", limits)], 0.0)
    return shared


def figures(shared: SharedLimits, now: float = 0.0) -> tuple[int, int, int]:
    stats = shared.stats("x", now)
    assert stats is not None
    return stats.running, stats.requests_in_window, stats.tokens_in_window


def test_leases_ahead_are_booked_once_and_given_back_with_their_bookings() -> None:
    # RL-21
    shared = shared_by(RateLimits(max_concurrent=80, tokens_per_minute=8000))
    for _ in range(2):
        assert [count for count, _ in ask(shared, 1, 4).lent] == [4], "sent twice, lent once"
    assert figures(shared) == (4, 4, 20)
    ask(shared, 2, 0, releases=[1000], withdrawals=[1001, 1002, 1003])
    assert figures(shared) == (0, 1, 5), "one was used, three were not"


def test_the_leases_ahead_of_a_dead_process_end_like_all_others() -> None:
    # RL-34
    shared = shared_by(RateLimits(max_concurrent=80))
    ask(shared, 1, 10)
    shared.tick(LEASE_S)
    assert figures(shared, LEASE_S)[0] == 0


def test_what_is_lent_again_and_again_never_passes_the_limits() -> None:
    # RL-07
    chance = random.Random(4)
    shared = shared_by(RateLimits(max_concurrent=50, requests_per_minute=60))
    for seq in range(1, 200):
        ask(shared, seq, chance.randrange(30), seq / 1000, entries=[("x", seq, 5)])
        running, requests, _ = figures(shared, seq / 1000)
        assert running <= 50
        assert requests <= 60
    assert figures(shared, 0.2)[0] == 50, "the last slots are for those in line"
