"""By how much parallel sub-agents pass the budget of their lead, with and without `reserve`.

    python benchmarks/budgets.py [--runs 1000] [--where local,workers,nodes]

Each run is a lead that gives 2 to 12 sub-agents one task each; they make 1 to 4 model calls of 50 to 240 output tokens, where 200
are expected (`max_tokens`). The limit on output tokens is drawn so that most runs reach it. The bound of a run is one call for each
sub-agent without `reserve`, and with it what the calls made can be longer than expected.

Printed are, of all runs, how many passed that bound and how many passed the limit at all; the mean, the 99th percentile and the
most by which they passed it, as a part of it; and how much of it was used by those that it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lousho_ray import Agent, create_agent, tool
from lousho_ray.messages import ToolCall
from lousho_ray.ports import GenerateOptions, GenerateResult
from lousho_ray.usage import ProviderUsage

EXPECTED, LONGEST = 200, 240
LIMITS = range(400, 4400, 400)
AT_ONCE = 8


@tool
def look() -> str:
    """Looks."""
    return "seen"


class Model:
    """Does what the prompt says: `fan <n>` gives n tasks, `calls <n> <seed>` asks for a tool until its n-th call."""

    name, default_model = "model", "model"

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        what, count, *seed = next(message.text for message in options.messages if message.role == "user").split()
        done = sum(message.role == "assistant" for message in options.messages)
        chance = random.Random(f"{seed} {done}")
        await asyncio.sleep(chance.uniform(0.0, 0.01))
        if what == "fan":
            calls = tuple(self._task(number, chance) for number in range(int(count))) if not done else ()
        else:
            calls = (ToolCall(f"look-{done}", "look", "{}"),) if done + 1 < int(count) else ()
        usage = ProviderUsage(1, chance.randint(50, LONGEST))
        return GenerateResult("done", calls, "tool_calls" if calls else "stop", usage)

    def _task(self, number: int, chance: random.Random) -> ToolCall:
        prompt = f"calls {chance.randint(1, 4)} {chance.random()}"
        return ToolCall(f"t{number}", "task", json.dumps({"agent": "child", "prompt": prompt, "description": "A task"}))


def lead(limit: int, reserve: bool, runtime: Any) -> Agent[Any]:
    common: dict[str, Any] = {"provider": Model(), "model_settings": {"max_tokens": EXPECTED}, "runtime": runtime}
    child = create_agent(description="Looks around.", tools=[look], **common)
    return create_agent(subagents={"child": child}, limits={"max_output_tokens": limit, "reserve": reserve}, **common)


@contextmanager
def place(where: str) -> Iterator[Any]:
    """The runtime to use: this process, two workers of one node, or a worker on each of three nodes."""
    if where == "local":
        yield "local"
        return
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if where == "workers":
        ray.init("local", num_cpus=2, include_dashboard=False, **quiet)
        try:
            yield "ray"
        finally:
            ray.shutdown()
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, **quiet)
        yield "ray"
    finally:
        ray.shutdown()
        cluster.shutdown()


async def measure(where: str, runtime: Any, reserve: bool, runs: int) -> None:
    leads = {limit: lead(limit, reserve, runtime) for limit in LIMITS}
    gate = asyncio.Semaphore(AT_ONCE)
    chance = random.Random(1)
    over: list[float] = []
    used: list[float] = []
    past_bound = 0

    async def run(number: int, limit: int, children: int) -> None:
        nonlocal past_bound
        async with gate:
            result = await leads[limit].send(f"fan {children} {number}")
        spent, calls = result.usage.output_tokens, result.usage.model_calls
        bound = calls * (LONGEST - EXPECTED) if reserve else children * LONGEST
        past_bound += spent > limit + bound
        over.append(max(0, spent - limit) / limit)
        if result.finish_reason == "budget-exceeded":
            used.append(spent / limit)

    began = time.perf_counter()
    await asyncio.gather(*[run(number, chance.choice(LIMITS), chance.randint(2, 12)) for number in range(runs)])
    took = time.perf_counter() - began
    share = sum(part > 0 for part in over) / runs
    cells = [f"{part:.1%}" for part in (share, statistics.mean(over), statistics.quantiles(over, n=100)[98], max(over))]
    print(
        f"{where:<10}{'yes' if reserve else 'no':<9}{runs:>6}{past_bound:>12}"
        + "".join(f"{cell:>10}" for cell in cells)
        + f"{statistics.mean(used):>10.1%}{took / runs * 1000:>10.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--where", default="local,workers,nodes")
    options = parser.parse_args()
    names = ("over", "mean", "p99", "most", "used", "ms each")
    print(f"{'where':<10}{'reserve':<9}{'runs':>6}{'past bound':>12}" + "".join(f"{name:>10}" for name in names))
    for where in options.where.split(","):
        with place(where) as runtime:
            for reserve in (False, True):
                asyncio.run(measure(where, runtime, reserve, options.runs))


if __name__ == "__main__":
    main()
