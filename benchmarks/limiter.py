"""Admissions per second of a rate limiter: how fast calls pass when the limits let them.

    python benchmarks/limiter.py [--seconds 3] [--callers 1,10,100,1000] [--forms local,ray]

Each caller acquires, settles and releases in a loop. Prints the admissions per second and the time of one acquire.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter

LIMITS = {"requests_per_minute": 1e9, "tokens_per_minute": 1e12, "max_concurrent": 100_000}


@contextmanager
def limiters(form: str) -> Iterator[RateLimiter]:
    if form == "local":
        yield create_rate_limiter(LIMITS)
        return
    import logging

    import ray

    from lousho_ray.actors.limiter import ACTOR_OPTIONS, LimiterReference, RateLimiterActor

    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="benchmark",
    )
    try:
        actor = ray.remote(RateLimiterActor).options(name="limits", **ACTOR_OPTIONS).remote()
        yield create_rate_limiter(
            LIMITS, "benchmark", connect=lambda limits, name: LimiterReference("limits", "benchmark", name, limits).connect()
        )
        del actor
    finally:
        ray.shutdown()


async def measure(limiter: RateLimiter, callers: int, seconds: float) -> tuple[float, float, float]:
    """Admissions per second, and median and 99th percentile of an acquire in milliseconds."""
    waits: list[float] = []
    (await limiter.acquire(1)).release()
    end = time.perf_counter() + seconds

    async def call() -> None:
        while (begin := time.perf_counter()) < end:
            permit = await limiter.acquire(100)
            waits.append(time.perf_counter() - begin)
            permit.settle(90)
            permit.release()
            if not limiter.shared:
                await asyncio.sleep(0)

    began = time.perf_counter()
    await asyncio.gather(*[call() for _ in range(callers)])
    took = time.perf_counter() - began
    percentiles = statistics.quantiles(waits, n=100)
    return len(waits) / took, percentiles[49] * 1000, percentiles[98] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--callers", default="1,10,100,1000")
    parser.add_argument("--forms", default="local,ray")
    options = parser.parse_args()
    print(f"{'form':<8}{'callers':>8}{'admissions/s':>15}{'p50 ms':>10}{'p99 ms':>10}")
    for form in options.forms.split(","):
        with limiters(form) as limiter:
            for callers in map(int, options.callers.split(",")):
                rate, median, worst = asyncio.run(measure(limiter, callers, options.seconds))
                print(f"{form:<8}{callers:>8}{rate:>15,.0f}{median:>10.3f}{worst:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
