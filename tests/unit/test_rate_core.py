"""The arithmetic of the rate limiter, on a hand-moved time."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.limits.rate import RUNNING, WINDOW_S, BucketState, Call, LimiterCore, WindowState
from lousho_ray.options import RateLimits


def core(**limits: float) -> LimiterCore[Call]:
    return LimiterCore(RateLimits(**limits))


def enter(limiter: LimiterCore[Call], *tokens: int) -> list[Call]:
    calls = [Call(amount, arrival) for arrival, amount in enumerate(tokens, start=limiter._last_arrival + 1)]
    for call in calls:
        limiter.enter(call)
    return calls


def run_until(limiter: LimiterCore[Call], now: float, end: float) -> list[tuple[float, Call]]:
    """Follows the limiter's own wake-ups, and nothing else, from `now` to `end`."""
    started = [(now, call) for call in limiter.admit(now)]
    while (at := limiter.next_wakeup()) is not None and at <= end:
        started += [(at, call) for call in limiter.admit(at)]
    return started


def test_a_fresh_limiter_starts_the_first_calls_at_once_and_each_start_counts_for_a_minute_from_its_own_moment() -> None:
    # RL-07, RL-08
    limiter = core(requests_per_minute=3)
    first = enter(limiter, 1, 1)
    assert limiter.admit(100.0) == first
    later = enter(limiter, 1, 1, 1)
    assert limiter.admit(130.0) == later[:1]
    assert limiter.admit(159.999) == []
    assert limiter.admit(160.0) == later[1:]
    assert limiter.admit(189.0) == []


def test_slots_are_freed_by_release_and_one_release_of_many_admits_many() -> None:
    # RL-07, RL-10, RL-16
    limiter = core(max_concurrent=2)
    calls = enter(limiter, *[1] * 6)
    assert limiter.admit(0.0) == calls[:2]
    assert limiter.next_wakeup() is None
    limiter.release(calls[0])
    assert limiter.admit(0.0) == calls[2:3]
    limiter.release(calls[1])
    limiter.release(calls[2])
    assert limiter.admit(0.0) == calls[3:5]


def test_releasing_twice_frees_one_slot() -> None:
    limiter = core(max_concurrent=1)
    calls = enter(limiter, 1, 1, 1)
    limiter.admit(0.0)
    limiter.release(calls[0])
    limiter.release(calls[0])
    assert limiter.admit(0.0) == [calls[1]]
    assert limiter.stats(0.0).running == 1


def test_a_small_call_never_overtakes_a_large_one_at_the_head() -> None:
    # RL-06
    limiter = core(tokens_per_minute=100)
    first, large, small = enter(limiter, 60, 50, 1)
    assert limiter.admit(0.0) == [first]
    assert limiter.admit(59.0) == []
    assert limiter.admit(60.0) == [large, small]


def test_the_estimate_is_replaced_at_the_same_start() -> None:
    # RL-12
    limiter = core(tokens_per_minute=100)
    a, b, c = enter(limiter, 80, 80, 80)
    assert limiter.admit(0.0) == [a]
    limiter.rebook(a.booking, -60)
    assert limiter.admit(10.0) == [b], "a lower figure admits at once"
    limiter.rebook(b.booking, 15)
    assert limiter.admit(60.0) == [], "a higher one delays"
    assert limiter.admit(70.0) == [c], "and leaves the window 60 s after its start, not after its re-booking"


def test_a_rebooking_after_the_window_changes_nothing() -> None:
    # RL-12
    limiter = core(tokens_per_minute=100)
    (a,) = enter(limiter, 80)
    limiter.admit(0.0)
    limiter.admit(60.0)
    limiter.rebook(a.booking, -75)
    assert limiter.stats(60.0).tokens_in_window == 0


def test_calls_of_one_moment_share_a_bucket_and_are_rebooked_apart() -> None:
    # RL-12
    limiter = core(tokens_per_minute=100)
    a, b = enter(limiter, 30, 30)
    limiter.admit(5.0)
    assert a.booking == b.booking
    limiter.rebook(a.booking, -20)
    limiter.rebook(b.booking, -29)
    assert limiter.stats(5.0).tokens_in_window == 11


def test_an_oversize_call_waits_for_an_empty_window_and_runs_alone_in_it() -> None:
    # RL-14
    limiter = core(tokens_per_minute=100)
    first, big, after = enter(limiter, 10, 250, 1)
    assert limiter.admit(0.0) == [first]
    assert limiter.admit(59.0) == []
    assert limiter.admit(60.0) == [big]
    assert limiter.admit(119.0) == []
    assert limiter.admit(120.0) == [after]


def test_all_limits_must_allow_a_call() -> None:
    # RL-07
    limiter = core(requests_per_minute=2, tokens_per_minute=100, max_concurrent=1)
    a, b, c = enter(limiter, 40, 40, 40)
    assert limiter.admit(0.0) == [a]
    limiter.release(a)
    assert limiter.admit(1.0) == [b]
    limiter.release(b)
    assert limiter.admit(2.0) == []
    assert limiter.admit(60.0) == [c]


def test_no_limits_admit_everything_but_are_counted() -> None:
    # RL-02, RL-05
    limiter = core()
    calls = enter(limiter, *range(500))
    assert limiter.admit(0.0) == calls
    stats = limiter.stats(1.0)
    assert (stats.running, stats.requests_in_window, stats.tokens_in_window) == (500, 500, sum(range(500)))


@pytest.mark.parametrize(("per_minute", "at_once", "next_at"), [(0.5, 1, 120.0), (2.9, 2, 60.0), (1, 1, 60.0), (0.1, 1, 600.0)])
def test_fractions_stretch_the_window_below_one_and_round_down_above(per_minute: float, at_once: int, next_at: float) -> None:
    # RL-D1
    limiter = core(requests_per_minute=per_minute)
    calls = enter(limiter, *[1] * 5)
    assert limiter.admit(0.0) == calls[:at_once]
    assert limiter.admit(next_at - 0.01) == []
    assert limiter.admit(next_at) == calls[at_once : 2 * at_once]


def test_withdrawing_a_waiting_call_books_nothing_and_moves_up_those_behind() -> None:
    # RL-20
    limiter = core(tokens_per_minute=100)
    first, large, small = enter(limiter, 60, 50, 1)
    limiter.admit(0.0)
    limiter.withdraw(large)
    assert limiter.admit(0.0) == [small]
    assert limiter.stats(0.0).tokens_in_window == 61
    assert first.state == RUNNING


def test_withdrawing_an_admitted_call_gives_slot_and_bookings_back() -> None:
    # RL-21
    limiter = core(requests_per_minute=1, tokens_per_minute=10, max_concurrent=1)
    a, b = enter(limiter, 10, 10)
    limiter.admit(0.0)
    limiter.withdraw(a)
    limiter.withdraw(a)
    assert limiter.admit(0.0) == [b]
    assert limiter.stats(0.0).tokens_in_window == 10


def test_stats_tell_when_the_next_call_starts() -> None:
    # RL-05
    limiter = core(requests_per_minute=2, tokens_per_minute=100, max_concurrent=2)
    assert limiter.stats(0.0).next_admission_ms == 0
    a, b, _ = enter(limiter, 60, 30, 50)
    limiter.admit(0.0)
    assert limiter.stats(0.0).next_admission_ms is None, "both slots are taken: nobody knows"
    limiter.release(a)
    limiter.release(b)
    stats = limiter.stats(15.0)
    assert (stats.waiting, stats.running, stats.requests_in_window, stats.tokens_in_window) == (1, 0, 2, 90)
    assert stats.next_admission_ms == 45_000


def test_ten_thousand_waiting_calls_cost_one_look_at_the_head() -> None:
    # RL-09
    limiter = core(requests_per_minute=100)
    calls = enter(limiter, *[1] * 10_000)
    wakeups = 0
    now, started = 0.0, limiter.admit(0.0)
    while limiter.stats(now).waiting:
        at = limiter.next_wakeup()
        assert at is not None
        now, wakeups = at, wakeups + 1
        started += limiter.admit(now)
    assert started == calls
    assert wakeups == 99, "one wake-up a minute, not one per waiting call"


def test_nothing_to_wake_up_for_without_waiting_calls() -> None:
    limiter = core(requests_per_minute=1)
    enter(limiter, 1)
    limiter.admit(0.0)
    assert limiter.next_wakeup() is None


def test_calls_that_come_back_go_before_those_that_came_later() -> None:
    # RL-36
    limiter = core(max_concurrent=1)
    running = Call(1, 0)
    limiter.resume(running)
    late, early, middle = Call(1, 30), Call(1, 10), Call(1, 20)
    for call in (late, early, middle):
        limiter.enter(call)
    assert limiter.head is early
    assert limiter.waiting == [early, middle, late]
    limiter.release(running)
    assert limiter.admit(0.0) == [early]


def test_calls_in_flight_elsewhere_take_slots_without_being_asked() -> None:
    # RL-36
    limiter = core(max_concurrent=2)
    held = [Call(1, n) for n in range(3)]
    for call in held:
        limiter.resume(call)
    (waiting,) = enter(limiter, 1)
    assert limiter.admit(0.0) == []
    limiter.release(held[0])
    assert limiter.admit(0.0) == []
    limiter.release(held[1])
    assert limiter.admit(0.0) == [waiting]


def test_a_lost_history_counts_as_half_a_window() -> None:
    # RL-36
    limiter = core(requests_per_minute=5, tokens_per_minute=101)
    limiter.assume_half_used(10.0, 12.0, booking=-1)
    calls = enter(limiter, *[20] * 4)
    assert limiter.admit(12.0) == calls[:2]
    assert limiter.stats(12.0).tokens_in_window == 51 + 40
    assert limiter.admit(69.9) == []
    assert limiter.admit(70.0) == calls[2:]


def test_the_assumed_half_never_swallows_a_later_rebooking() -> None:
    limiter = core(requests_per_minute=10)
    limiter.assume_half_used(5.0, 5.0, booking=-1)
    (call,) = enter(limiter, 30)
    limiter.admit(5.0)
    limiter.rebook(call.booking, -23)
    assert limiter.stats(5.0).tokens_in_window == 7


def test_nobody_is_admitted_before_it_opens() -> None:
    # RL-36
    limiter = core(max_concurrent=1)
    limiter.open_at(3.0)
    calls = enter(limiter, 1)
    assert limiter.admit(2.9) == []
    assert limiter.next_wakeup() == 3.0
    assert limiter.admit(3.0) == calls


def test_windows_move_to_another_clock_with_their_ages() -> None:
    # RL-33
    old = core(requests_per_minute=2, tokens_per_minute=100)
    a, _ = enter(old, 40, 30)
    old.admit(1000.0)
    new = core(requests_per_minute=2, tokens_per_minute=100)
    state = old.windows(1010.0)
    new.load(7.0, state)
    new.load(7.0, state)
    assert new.stats(7.0).tokens_in_window == 70, "loading twice adds once"
    new.rebook(a.booking, -30)
    assert new.stats(7.0).tokens_in_window == 40
    calls = [Call(5, 10_000)]
    new.enter(calls[0])
    assert new.admit(56.9) == []
    assert new.admit(57.0) == calls


def test_a_limiter_is_idle_when_nothing_would_be_lost() -> None:
    limiter = core(requests_per_minute=1)
    assert limiter.idle
    (call,) = enter(limiter, 1)
    assert not limiter.idle
    limiter.admit(0.0)
    limiter.release(call)
    assert not limiter.idle
    limiter.stats(60.0)
    assert limiter.idle


def test_loaded_buckets_leave_in_the_order_of_their_starts() -> None:
    limiter = core(requests_per_minute=3)
    state = [BucketState(50.0, 1, 1), BucketState(10.0, 1, 2), BucketState(30.0, 1, 3)]
    limiter.load(100.0, WindowState(requests=state))
    calls = enter(limiter, 1, 1, 1)
    assert [at for at, _ in run_until(limiter, 100.0, 1000.0)] == pytest.approx([110.0, 130.0, 150.0])
    assert len(calls) == 3


limits_strategy = st.builds(
    RateLimits,
    requests_per_minute=st.none() | st.integers(1, 6) | st.floats(1.0, 6.0),
    tokens_per_minute=st.none() | st.integers(1, 120),
    max_concurrent=st.none() | st.integers(1, 3),
)
arrivals_strategy = st.lists(
    st.tuples(st.floats(0, 40), st.integers(0, 90), st.floats(0, 30), st.integers(0, 60) | st.none()), max_size=40
)


@given(limits_strategy, arrivals_strategy)
def test_no_window_slot_or_order_is_ever_broken(limits: RateLimits, arrivals: list[tuple[float, int, float, int | None]]) -> None:
    """RL-06, RL-07, RL-08, RL-14: any arrivals, durations and reported figures; time goes from event to event."""
    limiter: LimiterCore[Call] = LimiterCore(limits)
    now, started, entered = 0.0, [], []
    todo = deque()
    at = 0.0
    for gap, tokens, duration, used in arrivals:
        at += gap
        todo.append((at, tokens, duration, used))
    ends: list[tuple[float, Call, int | None]] = []
    plans: dict[Call, tuple[float, int | None]] = {}
    while todo or ends or limiter.waiting:
        moments = [todo[0][0]] if todo else []
        moments += [end for end, _, _ in ends]
        wakeup = limiter.next_wakeup()
        moments += [] if wakeup is None else [wakeup]
        now = max(now, min(moments))
        while todo and todo[0][0] <= now:
            _, tokens, duration, used = todo.popleft()
            call = Call(tokens, len(entered))
            entered.append(call)
            plans[call] = (duration, used)
            limiter.enter(call)
        for end in [end for end in ends if end[0] <= now]:
            ends.remove(end)
            if end[2] is not None and end[2] <= end[1].tokens:
                limiter.rebook(end[1].booking, end[2] - end[1].tokens)
            limiter.release(end[1])
        for call in limiter.admit(now):
            duration, used = plans[call]
            started.append((now, call))
            ends.append((now + duration, call, used))
        assert limits.max_concurrent is None or len(ends) <= limits.max_concurrent
        assert limiter.stats(now).running == len(ends)
    assert [call for _, call in started] == entered
    for index, (begin, _) in enumerate(started):
        inside = [call for start, call in started[index:] if start - begin < WINDOW_S - 1e-6]
        assert limits.requests_per_minute is None or len(inside) <= int(limits.requests_per_minute)
        if limits.tokens_per_minute is not None:
            figures = [min(call.tokens, plans[call][1]) if plans[call][1] is not None else call.tokens for call in inside]
            assert sum(figures) <= limits.tokens_per_minute or sum(figure > 0 for figure in figures) == 1
