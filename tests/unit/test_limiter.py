"""`RateLimiter` in one process: event loops, threads, cancellation, hand-over."""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from lousho_ray.clock import SystemClock, TimerHandle
from lousho_ray.errors import ConfigurationError
from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter
from lousho_ray.limits.link import LocalLink
from lousho_ray.limits.rate import LimiterStats
from lousho_ray.options import RateLimits
from lousho_ray.ports import Permit
from lousho_ray.testing.clock import FakeClock, FakeTimer


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def start(limiter: RateLimiter, *tokens: int) -> list[asyncio.Task[Permit]]:
    return [asyncio.create_task(limiter.acquire(amount)) for amount in tokens]


def done(tasks: list[asyncio.Task[Permit]]) -> list[bool]:
    return [task.done() for task in tasks]


async def cancel(tasks: list[asyncio.Task[Permit]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_calls_wait_for_the_window_and_start_when_it_opens() -> None:
    # RL-07, RL-08, RL-09, RL-10
    clock = FakeClock()
    limiter = create_rate_limiter({"requests_per_minute": 2}, clock=clock)
    tasks = start(limiter, 1, 1, 1, 1, 1)
    await settle()
    assert done(tasks) == [True, True, False, False, False]
    assert clock.waiting == 1, "one timer for all waiting calls"
    clock.advance(59_999)
    await settle()
    assert done(tasks) == [True, True, False, False, False]
    clock.advance(1)
    await settle()
    assert done(tasks) == [True, True, True, True, False]
    clock.advance(60_000)
    await settle()
    assert all(done(tasks))


async def test_release_admits_the_next_at_once_and_once() -> None:
    # RL-16
    limiter = create_rate_limiter({"max_concurrent": 1})
    first = await limiter.acquire(1)
    tasks = start(limiter, 1, 1)
    await settle()
    assert done(tasks) == [False, False]
    first.release()
    first.release()
    await settle()
    assert done(tasks) == [True, False]
    await cancel(tasks[1:])
    (await tasks[0]).release()


async def test_settling_lower_admits_waiting_calls_at_once() -> None:
    # RL-12
    limiter = create_rate_limiter({"tokens_per_minute": 100}, clock=FakeClock())
    permit = await limiter.acquire(90)
    tasks = start(limiter, 50)
    await settle()
    assert done(tasks) == [False]
    permit.release()
    permit.settle(40)
    permit.settle(0)
    await settle()
    assert done(tasks) == [True], "settling works after the release too"
    assert (await limiter.stats()).tokens_in_window == 90, "and counts once"


async def test_a_cancelled_call_leaves_the_queue_and_those_behind_move_up() -> None:
    # RL-20
    limiter = create_rate_limiter({"tokens_per_minute": 100}, clock=FakeClock())
    await limiter.acquire(60)
    large, small = start(limiter, 50, 10)
    await settle()
    await cancel([large])
    await settle()
    assert small.done()
    assert await limiter.stats() == LimiterStats(0, 2, 2, 70, 0.0)


async def test_cancelling_half_of_a_hundred_at_random_moments_leaks_nothing() -> None:
    # RL-21
    chance = random.Random(7)
    for _ in range(30):
        limiter = create_rate_limiter({"max_concurrent": 3})
        made: list[int] = []

        async def call(number: int, limiter: RateLimiter = limiter, made: list[int] = made) -> None:
            permit = await limiter.acquire(10)
            made.append(number)
            try:
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                permit.release()

        tasks = [asyncio.create_task(call(number)) for number in range(100)]
        for task in chance.sample(tasks, 50):
            if chance.random() < 0.7:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await limiter.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.requests_in_window == len(made)
        assert stats.tokens_in_window == 10 * len(made)
        assert made == sorted(made), "first in, first out"


async def test_an_admission_that_is_cancelled_before_it_is_seen_is_given_back() -> None:
    # RL-21
    limiter = create_rate_limiter({"max_concurrent": 1, "requests_per_minute": 100})
    first = await limiter.acquire(1)
    (task,) = start(limiter, 1)
    await settle()
    first.release()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = await limiter.stats()
    assert (stats.running, stats.waiting, stats.requests_in_window) == (0, 0, 1)


async def test_a_switched_off_limiter_lets_everything_pass() -> None:
    # RL-30
    limiter = create_rate_limiter({"max_concurrent": 1})
    limiter.enabled = False
    for _ in range(3):
        permit = await limiter.acquire(1)
    permit.settle(3)
    permit.release()
    assert (await limiter.stats()).requests_in_window == 0


def test_threads_with_loops_of_their_own_share_the_slots() -> None:
    # RL-D3
    limiter = create_rate_limiter({"max_concurrent": 2})
    lock, inside, most, total = threading.Lock(), 0, 0, 0

    async def work() -> None:
        nonlocal inside, most, total
        for _ in range(50):
            permit = await limiter.acquire(1)
            with lock:
                inside, total = inside + 1, total + 1
                most = max(most, inside)
            await asyncio.sleep(0)
            with lock:
                inside -= 1
            permit.release()

    async def four() -> None:
        await asyncio.gather(*[work() for _ in range(4)])

    threads = [threading.Thread(target=lambda: asyncio.run(four())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert total == 800
    assert most == 2
    assert asyncio.run(limiter.stats()).running == 0


def test_a_window_opens_for_a_loop_although_the_loop_that_waited_first_has_ended() -> None:
    # RL-D3
    clock = FakeClock()
    limiter = create_rate_limiter({"requests_per_minute": 1}, clock=clock)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(limiter.acquire(1), 0.01)

    async def one() -> None:
        await limiter.acquire(1)
        await give_up()

    async def two() -> None:
        task = asyncio.create_task(limiter.acquire(1))
        await settle()
        clock.advance(60_000)
        await asyncio.wait_for(task, 5)

    asyncio.run(one())
    asyncio.run(two())


class FastClock(SystemClock):
    """A minute in 60 ms."""

    def now(self) -> float:
        return super().now() * 1000

    def call_later(self, seconds: float, fn: Callable[[], object]) -> TimerHandle:
        return super().call_later(seconds / 1000, fn)


class EarlyClock(FakeClock):
    """Its timers fire a little early, as an event loop's may."""

    def call_later(self, seconds: float, fn: Callable[[], object]) -> FakeTimer:
        return super().call_later(max(seconds - 0.001, seconds / 2), fn)


def test_a_release_in_another_thread_sets_the_timer_on_the_loop_that_waits() -> None:
    # RL-D3
    limiter = create_rate_limiter({"max_concurrent": 1, "requests_per_minute": 1}, clock=FastClock())
    held = asyncio.run(limiter.acquire(1))
    in_line, admitted = threading.Event(), threading.Event()

    async def wait() -> None:
        task = asyncio.create_task(limiter.acquire(1))
        await settle()
        in_line.set()
        await asyncio.wait_for(task, 10)
        admitted.set()

    async def release() -> None:
        held.release()

    thread = threading.Thread(target=lambda: asyncio.run(wait()))
    thread.start()
    assert in_line.wait(10)
    asyncio.run(release())
    assert admitted.wait(10)
    thread.join(10)


async def test_a_timer_that_fires_early_is_set_again() -> None:
    # RL-10
    clock = EarlyClock()
    limiter = create_rate_limiter({"requests_per_minute": 1}, clock=clock)
    await limiter.acquire(1)
    (task,) = start(limiter, 1)
    await settle()
    clock.advance(59_999.5)
    await settle()
    assert not task.done()
    clock.advance(1)
    await settle()
    assert task.done()


def test_a_waiting_call_whose_loop_was_closed_does_not_block_the_others() -> None:
    # RL-D3
    limiter = create_rate_limiter({"max_concurrent": 1})
    held = asyncio.run(limiter.acquire(1))
    dead = asyncio.new_event_loop()
    waiting = dead.create_task(limiter.acquire(1))
    dead.run_until_complete(settle())
    dead.close()

    async def live() -> None:
        task = asyncio.create_task(limiter.acquire(1))
        await settle()
        held.release()
        (await asyncio.wait_for(task, 5)).release()

    asyncio.run(live())
    assert asyncio.run(limiter.stats()).running == 0
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = waiting.get_coro()
    assert coroutine is not None
    coroutine.close()


async def test_stats_and_limits_are_readable() -> None:
    # RL-05
    limiter = create_rate_limiter(RateLimits(max_concurrent=1), name="readable")
    assert (limiter.limits, limiter.name, limiter.enabled) == (RateLimits(max_concurrent=1), "readable", True)
    assert "max_concurrent" in repr(limiter)
    await limiter.acquire(5)
    assert await limiter.stats() == LimiterStats(
        waiting=0, running=1, requests_in_window=1, tokens_in_window=5, next_admission_ms=None
    )


def test_equal_limits_share_nothing_and_equal_names_everything() -> None:
    # RL-03
    limits = {"max_concurrent": 1}
    one, other = create_rate_limiter(limits), create_rate_limiter(limits)
    assert one is not other
    assert one.key != other.key
    named = create_rate_limiter(limits, "one-name")
    assert create_rate_limiter(limits, "one-name") is named
    with pytest.raises(ConfigurationError) as raised:
        create_rate_limiter({"max_concurrent": 2}, "one-name")
    assert raised.value.code == "LOUSHO_CONFIG_INVALID"
    assert "'max_concurrent': 1" in str(raised.value)
    assert "'max_concurrent': 2" in str(raised.value)


@pytest.mark.parametrize("limits", [{"max_concurrent": 0}, {"requests_per_minute": float("nan")}, {"tokens_per_minute": True}])
def test_wrong_limits_name_their_field(limits: dict[str, Any]) -> None:
    # RL-02
    with pytest.raises(ConfigurationError) as raised:
        create_rate_limiter(limits)
    assert raised.value.field == f"rate_limit.{next(iter(limits))}"


def test_a_limiter_of_one_process_is_never_copied() -> None:
    # RL-33
    with pytest.raises(ConfigurationError, match="double the limit"):
        pickle.dumps(create_rate_limiter({"max_concurrent": 1}))


class SharedReference:
    """A shared limiter that happens to live here."""

    name = "shared"

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits

    def connect(self) -> LocalLink:
        return SharedLink(self.limits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedReference)

    def __hash__(self) -> int:
        return 1


class SharedLink(LocalLink):
    clock = FakeClock()

    def __init__(self, limits: RateLimits) -> None:
        super().__init__(limits, self.clock)
        self.reference = SharedReference(limits)  # type: ignore[assignment]


async def test_promotion_keeps_queue_windows_and_calls_in_flight() -> None:
    # RL-33
    clock = FakeClock(1000.0)
    SharedLink.clock = FakeClock(5.0)
    limiter = create_rate_limiter({"tokens_per_minute": 100, "max_concurrent": 2}, clock=clock)
    first, second = await limiter.acquire(40), await limiter.acquire(30)
    waiting = start(limiter, 20, 40)
    await settle()
    clock.advance(10_000)
    limiter.promote(SharedLink)
    limiter.promote(SharedLink)
    assert limiter.shared
    assert limiter.key == "shared"
    stats = await limiter.stats()
    assert (stats.waiting, stats.running, stats.tokens_in_window) == (2, 2, 70)
    first.settle(10)
    first.release()
    await settle()
    assert done(waiting) == [True, False]
    second.release()
    await settle()
    assert done(waiting) == [True, True], "fits only because the figure settled after the move replaced the one before it"
    assert pickle.loads(pickle.dumps(limiter)) is limiter


async def test_a_failed_promotion_changes_nothing() -> None:
    limiter = create_rate_limiter({"max_concurrent": 1})
    permit = await limiter.acquire(1)

    def fail(limits: RateLimits) -> LocalLink:
        raise ConnectionError("nobody there")

    with pytest.raises(ConnectionError):
        limiter.promote(fail)
    (task,) = start(limiter, 1)
    await settle()
    assert not task.done()
    permit.release()
    await settle()
    assert task.done()


def test_rejections_by_the_provider_are_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    # RL-D5
    limiter = create_rate_limiter({"max_concurrent": 4})
    with caplog.at_level(logging.WARNING):
        for now in (0.0, 1.0, 59.0, 60.0):
            limiter.note_rejection(now, "openai")
    assert len(caplog.records) == 2
    assert "max_concurrent" in caplog.text
