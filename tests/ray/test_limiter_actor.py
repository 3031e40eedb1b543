"""Rate limiters over Ray: several processes, one queue; processes and actors that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from lousho_ray.actors.limiter import ACTOR_OPTIONS, LimiterReference, RateLimiterActor
from lousho_ray.errors import AgentExecutionError, ConfigurationError
from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter
from lousho_ray.options import RateLimits


@pytest.fixture
def actor(ray_cluster: str, fresh_name: str) -> Iterator[Any]:
    handle = ray.remote(RateLimiterActor).options(name=fresh_name, **ACTOR_OPTIONS).remote()
    yield handle
    ray.kill(handle)


@pytest.fixture
def connect(actor: Any, ray_cluster: str, fresh_name: str) -> Any:
    return lambda limits, name: LimiterReference(fresh_name, ray_cluster, name, limits).connect()


@ray.remote(num_cpus=0)
class Worker:
    """A process that makes limited calls."""

    def __init__(self, limiter: RateLimiter) -> None:
        self.limiter = limiter
        self.permits: list[Any] = []
        self.waiting: list[asyncio.Task[tuple[float, int]]] = []

    async def pid(self) -> int:
        return os.getpid()

    async def calls(self, count: int, hold_s: float) -> list[tuple[float, float]]:
        """Start and end of each call, on the machine's clock."""

        async def call() -> tuple[float, float]:
            permit = await self.limiter.acquire(10)
            begin = time.monotonic()
            await asyncio.sleep(hold_s)
            end = time.monotonic()
            permit.settle(5)
            permit.release()
            return begin, end

        return list(await asyncio.gather(*[call() for _ in range(count)]))

    async def hold(self, count: int) -> None:
        for _ in range(count):
            self.permits.append(await self.limiter.acquire(1))

    async def release(self) -> None:
        while self.permits:
            self.permits.pop().release()

    async def get_in_line(self, numbers: range) -> None:
        """Calls that wait, and note when they started."""

        async def call(number: int) -> tuple[float, int]:
            permit = await self.limiter.acquire(1)
            started = time.monotonic()
            permit.release()
            return started, number

        self.waiting += [asyncio.create_task(call(number)) for number in numbers]

    async def passed(self) -> list[tuple[float, int]]:
        """When each of these calls started, on the machine's clock, and its number."""
        return list(await asyncio.gather(*self.waiting))

    async def same(self, other: RateLimiter) -> bool:
        return self.limiter is other


def most_at_once(calls: list[tuple[float, float]]) -> int:
    edges = sorted([(begin, 1) for begin, _ in calls] + [(end, -1) for _, end in calls])
    running = most = 0
    for _, step in edges:
        running += step
        most = max(most, running)
    return most


async def eventually(check: Any, timeout_s: float = 10.0) -> None:
    """Waits for what another process does in its own time."""
    async with asyncio.timeout(timeout_s):
        while not await check():
            await asyncio.sleep(0.02)


async def test_processes_share_one_limit(connect: Any) -> None:
    # RL-32, RL-38
    limiter = create_rate_limiter({"max_concurrent": 3}, "shared", connect=connect)
    workers = [Worker.remote(limiter) for _ in range(2)]
    results = await asyncio.gather(*[worker.calls.remote(40, 0.005) for worker in workers])
    calls = [call for result in results for call in result]
    assert len(calls) == 80
    assert most_at_once(calls) == 3
    stats = await limiter.stats()
    assert (stats.waiting, stats.running, stats.requests_in_window, stats.tokens_in_window) == (0, 0, 80, 400)


DRIVER = """
import asyncio, json, logging, sys, time
import ray
from lousho_ray.actors.limiter import LimiterReference
from lousho_ray.limits.limiter import create_rate_limiter

address, namespace, actor = sys.argv[1:]
ray.init(address=address, namespace="another-job", log_to_driver=False, logging_level=logging.ERROR)
limiter = create_rate_limiter(
    {"max_concurrent": 3}, "jobs", connect=lambda limits, name: LimiterReference(actor, namespace, name, limits).connect()
)

async def call():
    permit = await limiter.acquire(1)
    begin = time.monotonic()
    await limiter.stats()
    end = time.monotonic()
    permit.release()
    return begin, end

async def calls():
    return await asyncio.gather(*[call() for _ in range(40)])

print(json.dumps(asyncio.run(calls())))
"""


async def test_independent_jobs_share_a_named_limiter(connect: Any, ray_cluster: str, fresh_name: str) -> None:
    # RL-32
    limiter = create_rate_limiter({"max_concurrent": 3}, "jobs", connect=connect)
    address = ray.get_runtime_context().gcs_address
    drivers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", DRIVER, address, ray_cluster, fresh_name, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [(await driver.communicate())[0] for driver in drivers]
    calls = [(begin, end) for output in outputs for begin, end in json.loads(output)]
    assert len(calls) == 80
    assert most_at_once(calls) <= 3
    assert (await limiter.stats()).requests_in_window == 80


async def test_a_limiter_that_travels_is_the_same_one_everywhere(connect: Any) -> None:
    # RL-03, RL-32, RL-33
    limiter = create_rate_limiter({"max_concurrent": 1}, "travels", connect=connect)
    assert pickle.loads(pickle.dumps(limiter)) is limiter
    assert create_rate_limiter({"max_concurrent": 1}, "travels", connect=connect) is limiter
    worker = Worker.remote(limiter)
    assert await worker.same.remote(limiter)


def test_one_name_with_two_limits_is_refused(connect: Any) -> None:
    # RL-32
    limiter = create_rate_limiter({"max_concurrent": 1}, "conflict", connect=connect)
    with pytest.raises(ConfigurationError) as raised:
        create_rate_limiter({"max_concurrent": 7}, "conflict", connect=connect)
    assert "'max_concurrent': 1" in str(raised.value)
    assert "'max_concurrent': 7" in str(raised.value)
    assert limiter.limits.max_concurrent == 1


async def test_a_process_that_asks_for_other_limits_is_refused_and_its_other_limiters_work(
    connect: Any, ray_cluster: str, fresh_name: str
) -> None:
    # RL-32
    limiter = create_rate_limiter({"max_concurrent": 1}, "conflict", connect=connect)
    (await limiter.acquire(1)).release()
    outcomes = await first_calls.remote(
        [
            LimiterReference(fresh_name, ray_cluster, "conflict", RateLimits(max_concurrent=7)),
            LimiterReference(fresh_name, ray_cluster, "other", RateLimits(max_concurrent=7)),
        ]
    )
    assert outcomes[0].startswith("ConfigurationError")
    assert "'max_concurrent': 1" in outcomes[0]
    assert outcomes[1] == "admitted"


@ray.remote(num_cpus=0)
def first_calls(references: list[LimiterReference]) -> list[str]:
    limiters = [RateLimiter(reference.limits, reference.connect()) for reference in references]

    async def call(limiter: RateLimiter) -> str:
        try:
            (await limiter.acquire(1)).release()
        except ConfigurationError as error:
            return f"{type(error).__name__}: {error}"
        return "admitted"

    async def calls() -> list[str]:
        return list(await asyncio.gather(*map(call, limiters)))

    return asyncio.run(calls())


async def test_promotion_moves_queue_and_calls_in_flight_into_the_actor(connect: Any) -> None:
    # RL-33
    limiter = create_rate_limiter({"tokens_per_minute": 1000, "max_concurrent": 2})
    first, second = await limiter.acquire(100), await limiter.acquire(200)
    waiting = [asyncio.create_task(limiter.acquire(50)) for _ in range(3)]
    await asyncio.sleep(0)
    limiter.promote(lambda limits: connect(limits, limiter.key))
    stats = await limiter.stats()
    assert (stats.waiting, stats.running, stats.tokens_in_window) == (3, 2, 300)
    worker = Worker.remote(limiter)
    far = worker.calls.remote(1, 0)
    first.settle(10)
    first.release()
    (await asyncio.wait_for(waiting[0], 10)).release()
    (await asyncio.wait_for(waiting[1], 10)).release()
    (await asyncio.wait_for(waiting[2], 10)).release()
    assert len(await far) == 1
    second.release()

    async def idle() -> bool:
        return (await limiter.stats()).running == 0

    await eventually(idle)
    assert (await limiter.stats()).tokens_in_window == 10 + 200 + 150 + 5


async def test_the_slots_of_a_killed_process_come_back(ray_cluster: str, fresh_name: str) -> None:
    # RL-34
    actor = ray.remote(RateLimiterActor).options(name=fresh_name, **ACTOR_OPTIONS).remote(lease_s=3.0)
    reference = LimiterReference(fresh_name, ray_cluster, "killed-holder", RateLimits(max_concurrent=2))
    limiter = RateLimiter(reference.limits, reference.connect())
    worker = Worker.options(max_restarts=0).remote(limiter)
    await worker.hold.remote(2)
    waiting = asyncio.create_task(limiter.acquire(1))
    os.kill(await worker.pid.remote(), signal.SIGKILL)
    (await asyncio.wait_for(waiting, 30)).release()
    assert (await limiter.stats()).requests_in_window == 3, "the calls were made: their bookings stay"
    ray.kill(actor)


async def test_thousands_of_waiting_calls_of_several_processes_pass_in_the_order_of_their_arrival(connect: Any) -> None:
    # RL-06, RL-09, RL-32
    slots, turn = 20, 500
    limiter = create_rate_limiter({"max_concurrent": slots}, "in-order", connect=connect)
    held = [await limiter.acquire(1) for _ in range(slots)]
    workers = [Worker.remote(limiter) for _ in range(3)]
    calls = 0
    for worker in workers * 2:
        await worker.get_in_line.remote(range(calls, calls + turn))
        calls += turn

        async def all_in_line(calls: int = calls) -> bool:
            return (await limiter.stats()).waiting == calls

        await eventually(all_in_line, 30)
    for permit in held:
        permit.release()
    passed = await asyncio.wait_for(asyncio.gather(*[worker.passed.remote() for worker in workers]), 60)
    for own in passed:
        assert sorted(own) == own, "each process's calls start in their order"
    order = [number for _, number in sorted(call for own in passed for call in own)]
    assert len(order) == calls == 3000
    late = max(abs(place - number) for place, number in enumerate(order))
    assert late < slots, "calls that are in flight together may be seen in any order, no others"


async def test_a_process_that_was_stopped_loses_its_slots_and_its_waiting_calls_get_in_line_again(
    ray_cluster: str, fresh_name: str
) -> None:
    # RL-34
    actor = ray.remote(RateLimiterActor).options(name=fresh_name, **ACTOR_OPTIONS).remote(lease_s=3.0)
    reference = LimiterReference(fresh_name, ray_cluster, "stopped-holder", RateLimits(max_concurrent=2))
    limiter = RateLimiter(reference.limits, reference.connect())
    worker = Worker.remote(limiter)
    await worker.hold.remote(2)
    mine = [asyncio.create_task(limiter.acquire(1)) for _ in range(2)]
    await worker.get_in_line.remote(range(1))

    async def counts(running: int, waiting: int) -> bool:
        stats = await limiter.stats()
        return (stats.running, stats.waiting) == (running, waiting)

    await eventually(lambda: counts(2, 3))
    pid = await worker.pid.remote()
    os.kill(pid, signal.SIGSTOP)
    try:
        permits = [await asyncio.wait_for(call, 30) for call in mine]
        assert await counts(2, 0), "a stopped process has no place in line"
    finally:
        os.kill(pid, signal.SIGCONT)
    await eventually(lambda: counts(4, 1), 30)
    for permit in permits:
        permit.release()
    await eventually(lambda: counts(2, 1))
    await worker.release.remote()
    assert len(await asyncio.wait_for(worker.passed.remote(), 30)) == 1
    await eventually(lambda: counts(0, 0))
    ray.kill(actor)


async def test_waiting_calls_survive_the_death_of_the_actor(actor: Any, connect: Any) -> None:
    # RL-34, RL-36
    limiter = create_rate_limiter({"max_concurrent": 2}, "killed-actor", connect=connect)
    held = [await limiter.acquire(1), await limiter.acquire(1)]
    order: list[int] = []

    async def call(number: int) -> None:
        permit = await limiter.acquire(1)
        order.append(number)
        permit.release()

    waiting = [asyncio.create_task(call(number)) for number in range(10)]

    async def all_in_line() -> bool:
        return (await limiter.stats()).waiting == 10

    await eventually(all_in_line)
    os.kill(await pid_of(actor), signal.SIGKILL)

    async def back() -> bool:
        stats = await limiter.stats()
        return (stats.running, stats.waiting) == (2, 10)

    await eventually(back, 30)
    assert order == [], "the slots are still held, although the actor that gave them is gone"
    held[0].release()
    await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert order == list(range(10))
    held[1].release()


async def pid_of(actor: Any) -> int:
    return int(await actor.__ray_call__.remote(lambda self: __import__("os").getpid()))


async def test_an_actor_that_is_gone_never_means_unlimited(actor: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # RL-37
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.1, 0.2))
    limiter = create_rate_limiter({"max_concurrent": 1}, "gone", connect=connect)
    held = await limiter.acquire(1)
    waiting = asyncio.create_task(limiter.acquire(1))
    ray.kill(actor)
    with pytest.raises(AgentExecutionError) as raised:
        await asyncio.wait_for(waiting, 60)
    assert raised.value.code == "LOUSHO_AGENT_EXECUTION_FAILED"
    with pytest.raises(AgentExecutionError):
        await asyncio.wait_for(limiter.acquire(1), 60)
    held.release()


async def test_a_process_that_left_its_cluster_starts_no_other(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # RL-37
    monkeypatch.setattr("lousho_ray.actors.calling.RETRY_DELAYS_S", (0.1, 0.2))
    limiter = create_rate_limiter({"max_concurrent": 1}, "left", connect=connect)
    with monkeypatch.context() as left:
        left.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(AgentExecutionError, match="not connected to a Ray cluster"):
            await asyncio.wait_for(limiter.acquire(1), 30)
