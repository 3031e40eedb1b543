"""What this package costs, as a ratio to a loop written by hand over the typed OpenAI client, in the same run.

    python benchmarks/run.py [names] [--rounds 5]

`names`: turn, tools, history, parallel, evals, stream, first, sessions, loop, children, ray, evals_ray, stores, limiter, streams,
failures; by default all.
Both sides run in this process by turns, against a model server in a process of its own; of several rounds the cheapest counts, so
that a busy machine disturbs little. CPU is that of this process with all its threads. Each benchmark takes less than 30 s on an
idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from answers_at_once import AnswersAtOnce
from contestants import ByHand, Contestant, Ours, add
from eval_suite import suite
from model_server import Plan, model_server

from lousho_ray import OpenAIProvider, create_agent


class Cost(NamedTuple):
    """What `units` cost: CPU and wall time in seconds."""

    cpu_s: float
    wall_s: float
    units: int

    @property
    def cpu_ms(self) -> float:
        return self.cpu_s / self.units * 1000

    @property
    def wall_ms(self) -> float:
        return self.wall_s / self.units * 1000


Work = Callable[[Contestant], Awaitable[int]]
"""Does its work once and gives the number of units it did."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    ours: float
    by_hand: float | None
    digits: int = 2

    def __str__(self) -> str:
        if self.by_hand is None:
            return f"{self.what:<48}{self.ours:>12.{self.digits}f}{'':>12}{'':>9}"
        return f"{self.what:<48}{self.ours:>12.{self.digits}f}{self.by_hand:>12.{self.digits}f}{self.ours / self.by_hand:>8.2f}x"


async def cost(work: Callable[[], Awaitable[int]]) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    units = await work()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, units)


async def compare(url: str, rounds: int, work: Work) -> tuple[Cost, Cost]:
    """The cheapest round of each side; the sides take turns. The first round of each is not counted."""
    sides: list[Contestant] = [Ours(url), ByHand(url)]
    costs: list[list[Cost]] = [[], []]
    try:
        for _ in range(rounds + 1):
            for side, found in zip(sides, costs, strict=True):
                found.append(await cost(lambda side=side: work(side)))  # type: ignore[misc]
    finally:
        for side in sides:
            await side.close()
    ours, by_hand = (min(found[1:]) for found in costs)
    return ours, by_hand


# ---------------------------------------------------------------------------------------------------------- the benchmarks


async def turn(url: str, rounds: int) -> list[Row]:
    async def work(side: Contestant) -> int:
        for _ in range(60):
            assert await side.turn(Plan().text()) == "turn 1"
        return 60

    ours, by_hand = await compare(url, rounds, work)
    return [Row("turn of one call: CPU ms", ours.cpu_ms, by_hand.cpu_ms)]


async def tools(url: str, rounds: int) -> list[Row]:
    async def work(side: Contestant) -> int:
        for _ in range(12):
            assert await side.tool_turn(Plan(steps=4).text()) == "turn 1"
        return 12 * 4

    ours, by_hand = await compare(url, rounds, work)
    return [Row("step of a turn of 4 calls, 3 tool calls: CPU ms", ours.cpu_ms, by_hand.cpu_ms)]


async def history(url: str, rounds: int) -> list[Row]:
    async def work(side: Contestant) -> int:
        assert await side.tool_turn(Plan(steps=50).text()) == "turn 1"
        return 50

    ours, by_hand = await compare(url, rounds, work)
    return [Row("step of a turn of 50 calls: CPU ms", ours.cpu_ms, by_hand.cpu_ms)]


async def parallel(url: str, rounds: int) -> list[Row]:
    plan = Plan(steps=4, wait_ms=50).text()

    async def work(side: Contestant) -> int:
        texts = await asyncio.gather(*[side.tool_turn(plan) for _ in range(200)])
        assert texts == ["turn 1"] * 200
        return 200 * 4

    ours, by_hand = await compare(url, min(rounds, 2), work)
    return [
        Row("200 turns of 4 calls at once, 50 ms each: CPU ms/step", ours.cpu_ms, by_hand.cpu_ms),
        Row("  the same: wall s (ideal 0.2)", ours.wall_s, by_hand.wall_s),
    ]


async def evals(url: str, rounds: int) -> list[Row]:
    question, samples, at_once = Plan(wait_ms=50).text(), 1_000, 64

    async def work(side: Contestant) -> int:
        numbers = iter(range(samples))

        async def worker() -> None:
            for _ in numbers:
                assert await side.turn(question) == "turn 1"

        await asyncio.gather(*[worker() for _ in range(at_once)])
        return samples

    sides: dict[str, Callable[[], Awaitable[int]]] = {"ours": suite(url, question, samples, at_once)}
    by_hand = ByHand(url)
    sides["by hand"] = lambda: work(by_hand)
    found: dict[str, list[Cost]] = {name: [] for name in sides}
    for _ in range(min(rounds, 3) + 1):
        for name, run in sides.items():
            found[name].append(await cost(run))
    await by_hand.close()
    ours, theirs = (min(found[name][1:]) for name in sides)
    return [
        Row("1,000 samples of an eval, 64 at once: CPU ms each", ours.cpu_ms, theirs.cpu_ms),
        Row("  the same: wall s (ideal 0.8)", ours.wall_s, theirs.wall_s),
    ]


async def stream(url: str, rounds: int) -> list[Row]:
    plan = Plan(tokens=2000).text()

    async def work(side: Contestant) -> int:
        texts: list[str] = []
        await side.stream(plan, texts.append)
        assert len(texts) == 2000
        return 2000

    ours, by_hand = await compare(url, rounds, work)
    return [
        Row("streamed event: CPU us", ours.cpu_ms * 1000, by_hand.cpu_ms * 1000, 1),
        Row("  the same: events/s", 1000 / ours.wall_ms, 1000 / by_hand.wall_ms, 0),
    ]


async def first(url: str, rounds: int) -> list[Row]:
    plan = Plan(tokens=5, stamp=1).text()
    waits: dict[str, list[float]] = {}

    async def work(side: Contestant) -> int:
        found = waits.setdefault(side.name, [])

        def seen(text: str) -> None:
            if text.isdigit():
                found.append((time.monotonic_ns() - int(text)) / 1000)

        for _ in range(60):
            await side.stream(plan, seen)
        return 60

    await compare(url, rounds, work)
    ours, by_hand = (statistics.median(found[60:]) for found in waits.values())
    return [Row("first event, from the server to the consumer: us", ours, by_hand, 0)]


async def sessions(url: str, rounds: int) -> list[Row]:
    """Each turn checks that the stored history was sent."""
    waits: dict[str, list[float]] = {}

    async def work(side: Contestant) -> int:
        names, found = iter(range(100)), waits.setdefault(side.name, [])

        async def worker() -> None:
            for name in names:
                for number in range(1, 4):
                    began = time.perf_counter()
                    assert await side.session_turn(f"session-{name}", Plan().text()) == f"turn {number}"
                    found.append((time.perf_counter() - began) * 1000)

        with tempfile.TemporaryDirectory() as folder:
            await side.open_store(Path(folder) / "store.db")
            await asyncio.gather(*[worker() for _ in range(32)])
            await side.close_store()
        return 300

    ours, by_hand = await compare(url, min(rounds, 3), work)
    ours_p99, by_hand_p99 = (statistics.quantiles(found[300:], n=100)[98] for found in waits.values())
    return [
        Row("session turn, SQLite, 32 at once: CPU ms", ours.cpu_ms, by_hand.cpu_ms),
        Row("  the same: turns/s", 1000 / ours.wall_ms, 1000 / by_hand.wall_ms, 0),
        Row("  the same: 99th percentile ms", ours_p99, by_hand_p99, 1),
    ]


class Forgets:
    """An exporter that does nothing with its spans."""

    def on_span_start(self, span: Any) -> None: ...

    def on_span_end(self, span: Any) -> None: ...


async def loop(url: str, rounds: int) -> list[Row]:
    """Without HTTP: the provider answers at once."""
    rows: list[Row] = []
    ways: dict[str, dict[str, Any]] = {"send()": {}, "stream()": {}, "send() with spans": {"exporter": Forgets()}}
    for steps, (how, options) in itertools.product((1, 4, 50), ways.items()):
        agent = create_agent(provider=AnswersAtOnce(steps), tools=[add], runtime="local", max_steps=steps, **options)

        async def work(agent: Any = agent, steps: int = steps, streamed: bool = how == "stream()") -> int:
            turns = 200 // steps
            for _ in range(turns):
                if streamed:
                    async for _event in agent.stream("go"):
                        pass
                else:
                    assert (await agent.send("go")).text == "done"
            return turns * steps

        await work()
        best = min([await cost(work) for _ in range(rounds * 2)])
        rows.append(Row(f"the loop alone, {how}, turns of {steps} steps: CPU ms/step", best.cpu_ms, None, 3))
    return rows


async def children(url: str, rounds: int) -> list[Row]:
    return [await _children(url, rounds, "local", "in this process")]


async def ray(url: str, rounds: int) -> list[Row]:
    with _cluster():
        agent = create_agent(provider=_provider(url), runtime="ray", instructions="Answer.")

        async def session_turns() -> int:
            session = agent.session()
            for number in range(1, 21):
                assert (await session.send(Plan().text())).text == f"turn {number}"
            return 20

        await session_turns()
        best = min([await cost(session_turns) for _ in range(rounds)], key=lambda found: found.wall_s)
        return [
            await _children(url, rounds, "ray", "on workers"),
            Row("session turn in an actor: wall ms", best.wall_ms, None),
            Row("  the same: CPU ms of the caller", best.cpu_ms, None),
        ]


async def _children(url: str, rounds: int, runtime: Any, where: str) -> Row:
    child = create_agent(name="child", provider=_provider(url), tools=[add], description="Adds.", runtime=runtime)
    lead = create_agent(name="lead", provider=_provider(url), subagents={"child": child}, runtime=runtime)

    async def work() -> int:
        result = await lead.send(Plan(children=16).text())
        assert (result.text, result.tool_errors) == ("turn 1", 0)
        return 16

    await work()
    best = min([await cost(work) for _ in range(rounds)], key=lambda found: found.wall_s)
    return Row(f"sub-agent of two steps {where}, 16 at once: wall ms", best.wall_ms, None)


def _provider(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=url, api_key="k", default_model="bench", api="chat")


@contextmanager
def _cluster() -> Iterator[None]:
    import logging

    import ray as ray_package

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray_package.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray_package.shutdown()


Benchmark = Callable[[str, int], Awaitable[list[Row]]]

TABLE: dict[str, Benchmark] = {
    function.__name__: function
    for function in (turn, tools, history, parallel, evals, stream, first, sessions, loop, children, ray)
}
SCRIPTS = {
    "evals_ray": ["evals_ray.py", "--samples", "10000", "--workers", "1,2"],
    "stores": ["stores.py", "--sessions", "50", "--turns", "5"],
    "limiter": ["limiter.py", "--seconds", "1", "--callers", "1,100"],
    "streams": ["streams.py", "hop", "first", "rate", "many"],
    "failures": ["failures.py", "--only", "session,worker,store"],
}
"""Benchmarks with tables of their own, in a small size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join([*TABLE, *SCRIPTS])}")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    names = options.names or [*TABLE, *SCRIPTS]
    if unknown := [name for name in names if name not in TABLE and name not in SCRIPTS]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join([*TABLE, *SCRIPTS])}")
    tabled = [name for name in names if name in TABLE]
    if tabled:
        print(f"{'':<48}{'lousho':>12}{'by hand':>12}{'ratio':>9}")
        with model_server() as url:
            for name in tabled:
                for row in asyncio.run(_awaited(TABLE[name](url, options.rounds))):
                    print(row, flush=True)
    for name in names:
        if name in SCRIPTS:
            print(f"\n{name}", flush=True)
            script, *arguments = SCRIPTS[name]
            subprocess.run([sys.executable, str(Path(__file__).with_name(script)), *arguments], check=True)


async def _awaited(rows: Awaitable[list[Row]]) -> list[Row]:
    return await rows


if __name__ == "__main__":
    main()
