"""One suite for every form of a rate limiter: in this process, and in an actor (here on this process's background loop)."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lousho_ray.actors.limiter import LimiterReference, RateLimiterActor, RemoteLink
from lousho_ray.actors.limiter_client import LimiterClient
from lousho_ray.clock import SYSTEM_CLOCK, Clock, SystemClock
from lousho_ray.errors import LoushoError
from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter
from lousho_ray.limits.link import Ticket
from lousho_ray.limits.rate import WAITING
from lousho_ray.limits.shared import LEASE_S, Reply
from lousho_ray.options import RateLimits
from lousho_ray.testing.clock import FakeClock
from tests.contract.in_process import InProcessHandle

Make = Callable[..., RateLimiter]


def remote_limiter(handle: InProcessHandle, limits: dict[str, Any], clock: Clock = SYSTEM_CLOCK) -> RateLimiter:
    parsed = RateLimits(**limits)
    client = LimiterClient(lambda: handle, clock)
    return RateLimiter(parsed, RemoteLink(client, LimiterReference("in-process", None, "x", parsed)))


@pytest.fixture(params=["local", "actor", "actor-over-a-bad-network", "promoted"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.001,) * 30)
    chance = random.Random(3)

    def make(**limits: Any) -> RateLimiter:
        if request.param == "local":
            return create_rate_limiter(limits)
        lose = (lambda: chance.random() < 0.2) if "bad" in request.param else (lambda: False)
        limiter = remote_limiter(InProcessHandle(RateLimiterActor(restarted=False), lose), limits)
        if request.param != "promoted":
            return limiter
        local = create_rate_limiter(limits)
        local.promote(lambda _: limiter.link)
        return local

    return make


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await check():
            await asyncio.sleep(0.001)


async def settled(limiter: RateLimiter) -> Any:
    """The stats once releases that nobody waits for have arrived."""

    async def idle() -> bool:
        stats = await limiter.stats()
        return stats.running == 0 and stats.waiting == 0

    await until(idle)
    return await limiter.stats()


async def test_calls_pass_first_in_first_out_and_never_too_many(make: Make) -> None:
    # RL-06, RL-07, RL-16
    limiter = make(max_concurrent=3)
    started: list[int] = []
    running = most = 0

    async def call(number: int) -> None:
        nonlocal running, most
        permit = await limiter.acquire(10)
        started.append(number)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        permit.settle(7)
        permit.release()

    await asyncio.gather(*[call(number) for number in range(200)])
    assert started == list(range(200))
    assert most == 3
    stats = await settled(limiter)
    assert (stats.requests_in_window, stats.tokens_in_window) == (200, 1400)


async def test_a_settled_estimate_lets_the_next_call_pass(make: Make) -> None:
    # RL-12
    limiter = make(tokens_per_minute=100)
    first = await limiter.acquire(100)
    second = asyncio.create_task(limiter.acquire(60))
    await until_waiting(limiter, 1)
    first.settle(40)
    await asyncio.wait_for(second, 5)


async def until_waiting(limiter: RateLimiter, count: int) -> None:
    async def waiting() -> bool:
        return (await limiter.stats()).waiting == count

    await until(waiting)


async def test_a_cancelled_call_books_nothing_and_those_behind_move_up(make: Make) -> None:
    # RL-20
    limiter = make(tokens_per_minute=100)
    await limiter.acquire(60)
    large, small = (asyncio.create_task(limiter.acquire(tokens)) for tokens in (50, 10))
    await until_waiting(limiter, 2)
    large.cancel()
    await asyncio.wait_for(small, 5)
    assert (await limiter.stats()).tokens_in_window == 70


async def test_cancelling_half_of_a_hundred_at_random_moments_leaks_nothing(make: Make) -> None:
    # RL-21
    limiter = make(max_concurrent=3)
    chance = random.Random(5)
    made = itertools.count()

    async def call() -> None:
        permit = await limiter.acquire(10)
        next(made)
        try:
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
        finally:
            permit.release()

    tasks = [asyncio.create_task(call()) for _ in range(100)]
    for task in chance.sample(tasks, 50):
        await asyncio.sleep(chance.choice([0, 0, 0.001]))
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    stats = await settled(limiter)
    assert stats.requests_in_window == next(made), "no booking belongs to a call that was not made"


async def test_an_oversize_call_passes_alone(make: Make) -> None:
    # RL-14
    limiter = make(tokens_per_minute=100)
    await asyncio.wait_for(limiter.acquire(1000), 5)
    after = asyncio.create_task(limiter.acquire(1))
    await until_waiting(limiter, 1)
    after.cancel()


def test_loops_in_threads_share_the_slots(make: Make) -> None:
    # RL-D3
    limiter = make(max_concurrent=2)
    lock = threading.Lock()
    running = most = total = 0

    async def work() -> None:
        nonlocal running, most, total
        for _ in range(10):
            permit = await limiter.acquire(1)
            with lock:
                running, total = running + 1, total + 1
                most = max(most, running)
            await asyncio.sleep(0)
            with lock:
                running -= 1
            permit.release()

    async def three() -> None:
        await asyncio.gather(*[work() for _ in range(3)])

    threads = [threading.Thread(target=lambda: asyncio.run(three())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (total, most) == (90, 2)


async def test_a_new_life_of_the_actor_goes_on_with_everything_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # RL-36
    monkeypatch.setattr("lousho_ray.limits.shared.RECOVERY_S", 0.05)
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.01, 0.05))
    handle = InProcessHandle(RateLimiterActor(restarted=False))
    limiter = remote_limiter(handle, {"max_concurrent": 2})
    held = [await limiter.acquire(1) for _ in range(2)]
    order: list[int] = []

    async def call(number: int) -> None:
        permit = await limiter.acquire(1)
        order.append(number)
        permit.release()

    waiting = [asyncio.create_task(call(number)) for number in range(20)]
    await until_waiting(limiter, 20)
    handle.replace(RateLimiterActor(restarted=True))
    late = asyncio.create_task(call(20))

    async def recovered() -> bool:
        stats = await limiter.stats()
        return (stats.running, stats.waiting) == (2, 21)

    await until(recovered)
    assert order == []
    held[0].release()
    await asyncio.wait_for(asyncio.gather(*waiting, late), 10)
    assert order == list(range(21))
    held[1].release()
    assert (await settled(limiter)).running == 0


async def test_a_process_stops_listening_to_an_old_life_that_it_knows_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # RL-36: the old life's node is cut off, so its open calls do not end
    monkeypatch.setattr("lousho_ray.limits.shared.RECOVERY_S", 0.05)
    handle = InProcessHandle(RateLimiterActor(restarted=False))
    limiter = remote_limiter(handle, {"max_concurrent": 1})
    held = await limiter.acquire(1)
    waiting = asyncio.create_task(limiter.acquire(1))
    await until_waiting(limiter, 1)
    handle.actor = RateLimiterActor(restarted=True)
    later = asyncio.create_task(limiter.acquire(1))
    await until_waiting(limiter, 2)
    held.release()
    (await asyncio.wait_for(waiting, 5)).release()
    (await asyncio.wait_for(later, 5)).release()


async def test_what_a_process_gives_back_to_a_lost_life_hurts_no_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    # RL-36: at rest but for a release, there is nothing to register with the new life
    monkeypatch.setattr("lousho_ray.limits.shared.RECOVERY_S", 0.05)
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.001,) * 1_000)
    handle = InProcessHandle(RateLimiterActor(restarted=False))
    limiter = remote_limiter(handle, {"max_concurrent": 1, "tokens_per_minute": 1_000})
    held = await limiter.acquire(1)
    handle.replace(None)
    held.settle(5)
    held.release()
    for _ in range(20):
        await asyncio.sleep(0.001)  # it is on its way by now, and alone
    later = asyncio.create_task(limiter.acquire(1))
    await asyncio.sleep(0)
    handle.replace(RateLimiterActor(restarted=True))
    (await asyncio.wait_for(later, 5)).release()
    assert (await settled(limiter)).running == 0


async def test_the_clocks_of_the_processes_do_not_matter() -> None:
    # RL-35
    class Apart(SystemClock):
        def __init__(self, ahead_s: float) -> None:
            self.ahead_s = ahead_s

        def now(self) -> float:
            return super().now() + self.ahead_s

    clock = FakeClock()
    handle = InProcessHandle(RateLimiterActor(restarted=False, clock=clock))
    limits = {"requests_per_minute": 2}
    past, future = (remote_limiter(handle, limits, Apart(seconds)) for seconds in (-5_000.0, 5_000.0))
    (await asyncio.wait_for(past.acquire(1), 5)).release()
    (await asyncio.wait_for(future.acquire(1), 5)).release()
    waiting = [asyncio.create_task(limiter.acquire(1)) for limiter in (future, past)]
    await until_waiting(past, 2)
    assert (await past.stats()).next_admission_ms == (await future.stats()).next_admission_ms
    for call in waiting:
        call.cancel()


async def test_an_answer_given_before_a_loss_is_void_after_it() -> None:
    # RL-36: what an old life granted is not admitted, the new one will say so again
    limiter = remote_limiter(InProcessHandle(None), {"max_concurrent": 1})
    link = limiter.link
    assert isinstance(link, RemoteLink)
    client = link._client
    client._sending = True
    ticket = Ticket(limiter, 1, asyncio.get_running_loop())
    client.enter(link, ticket)
    losses = client._losses
    client._lose()
    assert not client._accept(Reply("old", True, 5, 0, [(ticket.number, 7)]), losses, 0.0, [ticket.number])
    assert (ticket.state, ticket.arrival, client._received) == (WAITING, 0, 0)


async def test_an_answer_that_took_longer_than_the_lease_is_void() -> None:
    # RL-34: the process was stopped (SIGSTOP) when it came; the slots it brings are others' by now
    limiter = remote_limiter(InProcessHandle(None), {"max_concurrent": 1})
    link = limiter.link
    assert isinstance(link, RemoteLink)
    client = link._client
    client._sending = True
    ticket = Ticket(limiter, 1, asyncio.get_running_loop())
    client.enter(link, ticket)
    reply = Reply("life", True, 5, 0, [(ticket.number, 7)])
    losses = client._losses
    assert not client._accept(reply, losses, client._now() - LEASE_S - 0.001, [ticket.number])
    assert (ticket.state, client._losses) == (WAITING, losses + 1), "it gets in line again"
    assert client._accept(reply, client._losses, client._now(), [ticket.number])
    ticket.release()


async def test_calls_that_come_fast_do_not_wait_and_leave_nothing_behind(make: Make) -> None:
    # RL-21, RL-38
    limiter = make(max_concurrent=1000, tokens_per_minute=1_000_000)
    made = 0
    for _ in range(40):
        for _ in range(10):
            permit = await limiter.acquire(7)
            made += 1
            permit.settle(5)
            permit.release()
        await asyncio.sleep(0)

    async def none_held() -> bool:
        stats = await limiter.stats()
        return (stats.running, stats.requests_in_window, stats.tokens_in_window) == (0, made, 5 * made)

    await until(none_held)


async def test_lives_that_end_again_and_again_lose_no_call_and_admit_none_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    # RL-07, RL-36: two processes, and an actor that is killed eight times
    monkeypatch.setattr("lousho_ray.limits.shared.RECOVERY_S", 0.15)
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.001, 0.002))
    handle = InProcessHandle(RateLimiterActor(restarted=False))
    limiters = [remote_limiter(handle, {"max_concurrent": 5}) for _ in range(2)]
    chance = random.Random(6)
    passed = running = most = 0

    async def call(limiter: RateLimiter) -> None:
        nonlocal passed, running, most
        permit = await limiter.acquire(1)
        passed, running = passed + 1, running + 1
        most = max(most, running)
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        running -= 1
        permit.release()

    async def kill() -> None:
        for _ in range(8):
            before = passed
            while passed < min(before + 20, 400):
                await asyncio.sleep(0.001)
            handle.replace(RateLimiterActor(restarted=True))

    await asyncio.wait_for(asyncio.gather(kill(), *[call(limiters[n % 2]) for n in range(400)]), 50)
    assert passed == 400
    assert most == 5
    for limiter in limiters:
        await settled(limiter)


async def test_an_actor_that_cannot_be_reached_fails_waiting_calls_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # RL-37
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.001, 0.001))
    monkeypatch.setattr("lousho_ray.actors.limiter_client.RETRY_LATER_S", 0.01)
    handle = InProcessHandle(RateLimiterActor(restarted=False))
    limiter = remote_limiter(handle, {"max_concurrent": 1})
    held = await limiter.acquire(1)
    waiting = asyncio.create_task(limiter.acquire(1))
    await until_waiting(limiter, 1)
    actor = handle.replace(None)
    for _ in range(2):
        with pytest.raises(LoushoError) as raised:
            await asyncio.wait_for(limiter.acquire(1), 5)
        assert raised.value.code == "LOUSHO_AGENT_EXECUTION_FAILED"
    with pytest.raises(LoushoError):
        await asyncio.wait_for(waiting, 5)
    handle.actor = actor
    again = asyncio.create_task(limiter.acquire(1))
    await until_waiting(limiter, 1)
    held.release()
    (await asyncio.wait_for(again, 5)).release()
    assert (await settled(limiter)).running == 0, "calls that failed while it was away hold nothing"
