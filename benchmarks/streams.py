"""Streams and turns of session actors: what a hop to an actor adds, how much goes through one, and what it leaves behind.

    python benchmarks/streams.py                       # everything
    python benchmarks/streams.py hop first             # some of it: hop, first, rate, many, memory
    python benchmarks/streams.py memory --streams 10000

- hop: CPU of a turn of one model call in this process, in a session actor, and of a lead whose two sub-agents run on two workers,
  in all processes that have a part in it.
- first: from the call to the first event of a stream, in this process and in a session actor.
- rate: events per second that one reader gets from one session actor, and what one costs both.
- many: 100 streams of 1,000 events at once: events per second, and the longest gap between two events of a stream.
- memory: resident memory of the session actor before and after many streams.

The model is a mock in the process that runs the turn: nothing here is spent on HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psutil
import ray

from lousho_ray import Agent, MockProvider, create_agent
from lousho_ray.actors.cluster import NAMESPACE
from lousho_ray.messages import ToolCall
from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, GenerateResult, TextChunk
from lousho_ray.usage import ProviderUsage

USAGE = ProviderUsage(20, 5)


class Talks:
    """A model that says `words` words as fast as they are taken."""

    name = "talks"
    default_model = "bench"

    def __init__(self, words: int) -> None:
        self._words = words

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        return GenerateResult(text="word " * self._words, usage=USAGE)

    async def stream(self, options: GenerateOptions, /) -> AsyncIterator[Chunk]:
        for number in range(self._words):
            yield TextChunk("word ")
            if number % 50 == 49:
                await asyncio.sleep(0)  # as often as a model's answer would come in pieces
        yield FinishChunk("stop", USAGE)


def agent_of(words: int, runtime: Any = "ray") -> Agent[Any]:
    return create_agent(provider=Talks(words), runtime=runtime, description="Talks.")


def actors(prefix: str) -> list[Any]:
    entries = ray.util.list_named_actors(all_namespaces=True)
    names = [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix)]
    return [ray.get_actor(name, NAMESPACE) for name in names]


def spent(actor: Any) -> float:
    return time.process_time()


def resident_mb(actor: Any) -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


async def cpu_s(prefixes: tuple[str, ...]) -> list[float]:
    """CPU seconds spent so far: of this process, and of the actors whose names begin so."""
    handles = [actors(prefix) for prefix in prefixes]
    of_actors = [await asyncio.gather(*[handle.__ray_call__.remote(spent) for handle in group]) for group in handles]
    return [time.process_time(), *(sum(group) for group in of_actors)]


def row(what: str, value: float, digits: int = 2) -> None:
    print(f"{what:<72}{value:>12,.{digits}f}", flush=True)


# ---------------------------------------------------------------------------------------------------------- the benchmarks


async def hop(options: argparse.Namespace) -> None:
    turns = 200

    async def measure(what: str, turn: Callable[[], Awaitable[Any]], *prefixes: str) -> None:
        for _ in range(20):
            await turn()
        before = await cpu_s(prefixes)
        for _ in range(turns):
            await turn()
        after = await cpu_s(prefixes)
        parts = [(end - begin) / turns * 1000 for begin, end in zip(before, after, strict=True)]
        row(f"{what}: CPU ms", sum(parts))
        for name, part in zip(("of the caller", *(prefix.strip("-") for prefix in prefixes)), parts, strict=True):
            row(f"  {name}", part)

    local, remote = agent_of(1, "local").session(), agent_of(1).session()
    await measure("turn in this process", lambda: local.send("Hi."))
    await measure("turn in a session actor", lambda: remote.send("Hi."), "lousho-sessions-")
    for runtime, limits, prefixes in (
        ("local", {}, ()),
        ("ray", {}, ("lousho-worker-",)),
        ("ray", {"max_tokens": 1_000_000}, ("lousho-worker-", "lousho-budget-")),
    ):
        lead = lead_of(runtime, limits)
        where = ("on two workers" if prefixes else "in this process") + (", with a limit" if limits else "")
        before = await asked_of_the_budget() if limits else 0
        await measure(f"turn with two sub-agents {where}", lambda lead=lead: lead.send("Go."), *prefixes)  # type: ignore[misc]
        if limits:
            row("  calls of the budget actor", (await asked_of_the_budget() - before) / (turns + 20))


async def asked_of_the_budget() -> int:
    """How many calls the budget actor has had."""
    asked = [
        await actor.__ray_call__.remote(lambda it: sum(seq for seq, _, _ in it._last.values()))
        for actor in actors("lousho-budget-")
    ]
    return sum(asked)


def lead_of(runtime: Any, limits: Any) -> Agent[Any]:
    def policy(request: Any) -> GenerateResult | str:
        if request.messages[-1].role == "tool":
            return "done"
        tasks = [json.dumps({"agent": "child", "prompt": f"p{number}", "description": "d"}) for number in range(2)]
        calls = tuple(ToolCall(f"t{number}", "task", task) for number, task in enumerate(tasks))
        return GenerateResult(tool_calls=calls, finish_reason="tool_calls")

    child = agent_of(1, runtime)
    return create_agent(provider=MockProvider(policy=policy), subagents={"child": child}, runtime=runtime, limits=limits)


async def first(options: argparse.Namespace) -> None:
    found = {}
    for runtime in ("local", "ray"):
        session, waits = agent_of(5, runtime).session(), []
        for _ in range(120):
            began = time.perf_counter()
            seen = None
            async for _event in session.stream("Hi."):
                seen = seen or time.perf_counter()
            waits.append(((seen or began) - began) * 1000)
            await session.clear()
        found[runtime] = statistics.median(waits[20:])
    row("first event in this process: ms", found["local"])
    row("first event from a session actor: ms", found["ray"])


async def rate(options: argparse.Namespace) -> None:
    words = 50_000
    for runtime, where in (("local", "in this process"), ("ray", "from one session actor")):
        session = agent_of(words, runtime).session()
        prefixes = ("lousho-sessions-",) if runtime == "ray" else ()
        async for _event in session.stream("Hi."):  # the first turn starts the actor
            pass
        await session.clear()
        before, began = await cpu_s(prefixes), time.perf_counter()
        count = 0
        async for _event in session.stream("Hi."):
            count += 1
        row(f"one stream {where}: events/s", count / (time.perf_counter() - began), 0)
        for name, begin, end in zip(("this process", "the actor"), before, await cpu_s(prefixes), strict=False):
            row(f"  CPU us an event, {name}", (end - begin) / count * 1e6, 1)


async def many(options: argparse.Namespace) -> None:
    agent = agent_of(1_000)
    gaps: list[float] = []

    async def read() -> int:
        count, last = 0, time.perf_counter()
        async for _event in agent.session().stream("Hi."):
            now = time.perf_counter()
            gaps.append(now - last)
            count, last = count + 1, now
        return count

    await read()
    gaps.clear()
    began = time.perf_counter()
    counts = await asyncio.gather(*[read() for _ in range(100)])
    row("100 streams at once: events/s", sum(counts) / (time.perf_counter() - began), 0)
    row("  longest gap between two events of a stream: ms", max(gaps) * 1000, 0)


async def memory(options: argparse.Namespace) -> None:
    agent = agent_of(20)

    async def read(count: int) -> None:
        numbers = iter(range(count))

        async def worker() -> None:
            for _ in numbers:
                async for _event in agent.session().stream("Hi."):
                    pass

        await asyncio.gather(*[worker() for _ in range(32)])

    async def held() -> float:
        from lousho_ray.actors.session import KEPT_S

        gc.collect()
        await asyncio.sleep(KEPT_S + 2)
        return float(sum(await asyncio.gather(*[actor.__ray_call__.remote(resident_mb) for actor in actors("lousho-sessions-")])))

    await read(min(500, options.streams))
    before = await held()
    await read(options.streams)
    row(f"session actors before {options.streams:,} streams: MB", before, 1)
    row("  after them", await held(), 1)


TABLE = {function.__name__: function for function in (hop, first, rate, many, memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(TABLE)}")
    parser.add_argument("--streams", type=int, default=10_000)
    options = parser.parse_args()
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        for name in options.names or TABLE:
            asyncio.run(TABLE[name](options))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
