"""What a rate limiter costs, in one process and over Ray.

    python benchmarks/limiter.py                       # passes, fairness and waiting
    python benchmarks/limiter.py passes --callers 1,100 --seconds 5
    python benchmarks/limiter.py accuracy              # three minutes against a fake server

- passes: admissions per second when the limits let every call pass, from 1 and 4 processes. Each caller acquires, gives other tasks
  a turn, settles and releases, in a loop.
- fairness: the wait for one of 64 slots, each held for 5 ms, and how evenly processes get them.
- waiting: memory and CPU of 10,000 calls that wait.
- accuracy: the most requests that a fake server saw in any 60 s; how much of the limit was used, which is 60 s by the mean time in
  which as many requests came as the limit allows; and the least such time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lousho_ray import OpenAICompatibleProvider, with_rate_limit
from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions

FREE = {"requests_per_minute": 1e9, "tokens_per_minute": 1e12, "max_concurrent": 100_000}
HELLO = GenerateOptions(messages=(user("Hello."),))
SLOTS, HOLD_S = 64, 0.005


@dataclass
class Passed:
    """What the callers of one process did: how long each admission took, in seconds, and the CPU time of the process."""

    waits: list[float]
    took_s: float
    cpu_s: float


async def pass_through(limiter: RateLimiter, callers: int, seconds: float, hold_s: float = 0.0) -> Passed:
    """Callers that acquire, hold and release until the time is over."""
    waits: list[float] = []
    (await limiter.acquire(1)).release()
    end = time.perf_counter() + seconds

    async def call() -> None:
        while (begin := time.perf_counter()) < end:
            permit = await limiter.acquire(100)
            waits.append(time.perf_counter() - begin)
            await asyncio.sleep(hold_s)
            permit.settle(90)
            permit.release()

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[call() for _ in range(callers)])
    return Passed(waits, time.perf_counter() - began, time.process_time() - cpu)


class Caller:
    """A process of its own that makes limited calls."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._waiting: list[asyncio.Task[Any]] = []

    async def pass_through(self, callers: int, seconds: float, hold_s: float) -> Passed:
        return await pass_through(self._limiter, callers, seconds, hold_s)

    async def wait(self, calls: int) -> None:
        """Starts calls that wait."""
        self._waiting = [asyncio.create_task(self._limiter.acquire(100)) for _ in range(calls)]
        await asyncio.sleep(0)

    async def give_up(self) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        self._waiting = []
        gc.collect()

    async def usage(self) -> tuple[float, int]:
        return process_usage()

    async def connect(self, url: str, callers: int) -> None:
        """Opens the callers' connections; the first call of a process also imports the vendor's client, which takes a second."""
        self._provider = OpenAICompatibleProvider(base_url=url, default_model="fake")
        await asyncio.gather(*[self._provider.generate(HELLO) for _ in range(callers)])

    async def call(self, callers: int, seconds: float) -> None:
        """Calls the model through the limiter until the time is over."""
        provider = with_rate_limit(self._provider, self._limiter)
        end = time.monotonic() + seconds

        async def call() -> None:
            while time.monotonic() < end:
                await provider.generate(HELLO)

        calls = [asyncio.create_task(call()) for _ in range(callers)]
        await asyncio.sleep(seconds)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def process_usage() -> tuple[float, int]:
    """CPU seconds and resident bytes of this process."""
    import psutil

    process = psutil.Process()
    times = process.cpu_times()
    return times.user + times.system, process.memory_info().rss


@contextmanager
def cluster() -> Iterator[Any]:
    """A local Ray with a limiter actor; gives a function that makes limiters, and the actor."""
    import logging

    import ray

    from lousho_ray.actors.limiter import ACTOR_OPTIONS, LimiterReference, RateLimiterActor

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, namespace="benchmark")
    actor = ray.remote(RateLimiterActor).options(name="limits", **ACTOR_OPTIONS).remote()

    def make(limits: dict[str, float], name: str) -> RateLimiter:
        return create_rate_limiter(
            limits, name, connect=lambda limits, name: LimiterReference("limits", "benchmark", name, limits).connect()
        )

    try:
        yield make, actor
    finally:
        ray.shutdown()


async def usage_of(actor: Any) -> tuple[float, int]:
    found: tuple[float, int] = await actor.__ray_call__.remote(lambda _: process_usage())
    return found


def processes(limiter: RateLimiter, count: int) -> list[Any]:
    import ray

    actor: Any = ray.remote(Caller)
    callers = [actor.options(num_cpus=0, max_concurrency=10).remote(limiter) for _ in range(count)]
    ray.get([caller.usage.remote() for caller in callers])
    return callers


def percentiles(waits: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds."""
    cuts = statistics.quantiles(waits, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


def heading(*names: str) -> None:
    print("".join(f"{name:>11}" for name in ("", *names)))


def row(*cells: str | float) -> None:
    print("".join(f"{cell:>11.3f}" if isinstance(cell, float) else f"{cell:>11}" for cell in ("", *cells)), flush=True)


async def passes(callers_list: Sequence[int], seconds: float) -> None:
    heading("passes", "processes", "callers", "per s", "p50 ms", "p99 ms", "CPU us", "actor us")

    def show(form: str, count: int, callers: int, done: Sequence[Passed], actor_cpu: float) -> None:
        waits = [wait for one in done for wait in one.waits]
        rate = sum(len(one.waits) / one.took_s for one in done)
        median, worst = percentiles(waits)
        cpu_us = sum(one.cpu_s for one in done) / len(waits) * 1e6
        actor_us = actor_cpu / len(waits) * 1e6
        print(
            f"{form:<10}{count:>10}{callers:>9}{rate:>10,.0f}{median:>9.2f}{worst:>9.2f}{cpu_us:>9.1f}{actor_us:>10.1f}", flush=True
        )

    for callers in callers_list:
        limiter = create_rate_limiter(FREE)
        show("local", 1, callers, [await pass_through(limiter, callers, seconds)], 0.0)
    with cluster() as (make, actor):
        limiter = make(FREE, "passes")
        for count in (1, 4):
            others = processes(limiter, count)
            for callers in callers_list:
                each = max(1, callers // count)
                if each * count != callers:
                    continue
                before = (await usage_of(actor))[0]
                done = await asyncio.gather(*[other.pass_through.remote(each, seconds, 0.0) for other in others])
                show("Ray", count, callers, done, (await usage_of(actor))[0] - before)
            del others


async def fairness(seconds: float) -> None:
    heading("fairness", "processes", "callers", "per s", "p50 ms", "p99 ms", "least", "most")
    with cluster() as (make, _):
        for count in (1, 4):
            others = processes(make({"max_concurrent": SLOTS}, f"slots-{count}"), count)
            done = await asyncio.gather(*[other.pass_through.remote(400 // count, seconds, HOLD_S) for other in others])
            waits = [wait for one in done for wait in one.waits]
            median, worst = percentiles(waits)
            shares = [len(one.waits) / len(waits) * count for one in done]
            rate = len(waits) / max(one.took_s for one in done)
            row("Ray", count, 400, f"{rate:,.0f}", median, worst, min(shares), max(shares))
            del others


async def waiting(calls: int, seconds: float) -> None:
    print(
        f"\n{'waiting':<10}{'processes':>10}{'calls':>9}{'KB each':>10}{'actor KB':>10}{'CPU %':>8}{'actor %':>9}{'to wait s':>11}"
    )
    with cluster() as (make, actor):
        for count in (1, 4):
            limiter = make({"requests_per_minute": 1}, f"waiting-{count}")
            (await limiter.acquire(1)).release()
            others = processes(limiter, count)
            idle, idle_actor = [await other.usage.remote() for other in others], await usage_of(actor)
            began = time.perf_counter()
            await asyncio.gather(*[other.wait.remote(calls // count) for other in others])
            await all_wait(limiter, calls)
            took = time.perf_counter() - began
            full, full_actor = [await other.usage.remote() for other in others], await usage_of(actor)
            await asyncio.sleep(seconds)
            later, later_actor = [await other.usage.remote() for other in others], await usage_of(actor)
            each = sum(b[1] - a[1] for a, b in zip(idle, full, strict=True)) / calls / 1024
            actor_each = (full_actor[1] - idle_actor[1]) / calls / 1024
            cpu = sum(b[0] - a[0] for a, b in zip(full, later, strict=True)) / seconds * 100
            actor_cpu = (later_actor[0] - full_actor[0]) / seconds * 100
            row("Ray", count, calls, each, actor_each, cpu, actor_cpu, took)
            await asyncio.gather(*[other.give_up.remote() for other in others])
            del others


async def all_wait(limiter: RateLimiter, calls: int) -> None:
    while (await limiter.stats()).waiting < calls:  # noqa: ASYNC110 - the actor tells nobody
        await asyncio.sleep(0.01)


async def accuracy(limit: int, count: int, seconds: float) -> None:
    from lousho_ray.testing.fake_server import FakeServer, Reply

    heading("accuracy", "processes", "limit", "requests", "in 60 s", "used", "least s")
    with cluster() as (make, _), FakeServer.in_thread(timeout_s=600) as server:
        server.respond(lambda request: Reply("ok"))
        others = processes(make({"requests_per_minute": limit, "max_concurrent": 40}, "accuracy"), count)
        each = 100 // count
        await asyncio.gather(*[other.connect.remote(server.compatible_url, each) for other in others])
        before = len(server.requests)
        await asyncio.gather(*[other.call.remote(each, seconds) for other in others])
        times = sorted(request.arrived for request in server.requests[before:])
        most = max(index + 1 - bisect_right(times, at - 60.0) for index, at in enumerate(times))
        gaps = [later - earlier for earlier, later in zip(times, times[limit:], strict=False)]
        row("Ray", count, limit, len(times), most, 60.0 / statistics.mean(gaps), min(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["passes", "fairness", "waiting"])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--callers", default="1,10,100,1000")
    options = parser.parse_args()
    runs = {
        "passes": lambda: passes([int(count) for count in options.callers.split(",")], options.seconds),
        "fairness": lambda: fairness(options.seconds),
        "waiting": lambda: waiting(10_000, 10.0),
        "accuracy": lambda: accuracy(600, 4, 190.0),
    }
    for what in options.what:
        asyncio.run(runs[what]())


if __name__ == "__main__":
    main()
