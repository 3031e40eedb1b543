"""Mixed load on a local cluster for a while, with processes killed on the way; then a look at what is left.

    python benchmarks/soak.py [--minutes 30] [--sessions 20] [--kill-every 20] [--report soak.json]

Durable sessions take turns, leads hand work to sub-agents under one limiter, streams are left in the middle, calls are cancelled,
and every now and then the process of an actor is killed (a worker, a session actor, the limiter, the store, the budget). The
program ends with 1 when a turn is lost or doubled, the limiter is passed, a call hangs, something is left running, or memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

sys.path.insert(0, str(Path(__file__).parent))

from contestants import add
from model_server import Plan, model_server

from lousho_ray import LoushoError, OpenAICompatibleProvider, SqliteStore, create_agent, create_rate_limiter
from lousho_ray.actors.cluster import NAMESPACE

MOST_AT_ONCE = 12
"""The limiter's `max_concurrent`. The model server counts the calls it has in hand."""

BOUND_S = 120.0
"""No call may take longer: every wait of the package has a bound below it."""

GROWTH = 1.25
"""How much more memory a process may hold in the last third than in the second."""

SLACK_BYTES = 40_000_000


class Soak:
    """The load, and what came of it."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.errors: dict[str, str] = {}
        self.samples: list[dict[str, Any]] = []
        self._url = url
        self._over = asyncio.Event()
        self._limiter = create_rate_limiter({"max_concurrent": MOST_AT_ONCE}, f"soak-{os.getpid()}")
        self._provider = OpenAICompatibleProvider(base_url=url, default_model="bench")
        self._store = SqliteStore(folder / "soak.db")
        shared: dict[str, Any] = {"provider": self._provider, "retry": False, "runtime": "ray"}
        self._talker = create_agent(tools=[add], store=self._store, rate_limit=self._limiter, **shared)
        child = create_agent(name="child", description="Adds.", tools=[add], **shared)
        self._lead = create_agent(subagents={"child": child}, rate_limit=self._limiter, limits={"max_tokens": 1_000_000}, **shared)

    async def run(self, seconds: float, sessions: int, kill_every_s: float) -> None:
        """The whole run."""
        loads = [self._forever("turn", self._talk(f"soak-{number}")) for number in range(sessions)]
        loads += [self._forever("fan-out", self._fan_out) for _ in range(2)]
        loads += [self._forever("broken stream", self._break_off) for _ in range(3)]
        loads += [self._forever("cancelled", self._cancel) for _ in range(3)]
        tasks = [asyncio.create_task(load) for load in loads]
        killing = asyncio.create_task(self._kill(kill_every_s))
        began, next_sample = time.monotonic(), 0.0
        while (elapsed := time.monotonic() - began) < seconds:
            if elapsed >= next_sample:
                self._sample(elapsed)
                next_sample += max(5.0, seconds / 20)
            await asyncio.sleep(1)
        killing.cancel()
        self._over.set()
        await asyncio.wait(tasks, timeout=BOUND_S)
        self.problems += [f"A load did not end: {task}" for task in tasks if not task.done()]
        self.problems += [f"A load failed: {task.exception()!r}" for task in tasks if task.done() and task.exception() is not None]
        await self._settle(sessions)
        self._sample(time.monotonic() - began)
        self._compare_memory()

    async def _forever(self, what: str, once: Callable[[], Awaitable[None]]) -> None:
        while not self._over.is_set():
            try:
                async with asyncio.timeout(BOUND_S):
                    await once()
                self.counts[what] += 1
            except TimeoutError:
                self.problems.append(f"{what}: nothing came of it in {BOUND_S:g} s")
            except LoushoError as error:
                self.counts[f"{what}: {error.code}"] += 1
                self.errors.setdefault(f"{what}: {error.code}", error.detail)

    def _talk(self, session_id: str) -> Callable[[], Awaitable[None]]:
        """Turns of one session. The model server answers with the number of user messages, so that a lost or doubled one shows."""
        session = self._talker.session(session_id)
        sent = 0

        async def once() -> None:
            nonlocal sent
            sent += 1
            try:
                result = await session.send(Plan(self.random.randint(1, 3), wait_ms=self.random.randint(0, 30)).text())
            except LoushoError:
                sent = await self._reconcile(session, sent)
                raise
            if result.text != f"turn {sent}":
                self.problems.append(f"{session_id}: turn {sent} was answered with {result.text!r}")
                sent = int(result.text.removeprefix("turn "))  # go on from there, so that the next loss shows, too

        return once

    async def _reconcile(self, session: Any, sent: int) -> int:
        """After a call failed its turn may have been saved or not; both are right, and anything else is not."""
        while True:
            try:
                await session.resume()
                kept = sum(message.role == "user" for message in await session.load())
                break
            except LoushoError:
                await asyncio.sleep(0.2)
        if kept not in (sent - 1, sent):
            self.problems.append(f"{session.id}: {kept} turns are kept of {sent}")
        return kept

    async def _fan_out(self) -> None:
        children = self.random.randint(2, 8)
        result = await self._lead.send(Plan(2, children=children, wait_ms=self.random.randint(0, 30)).text())
        answered = sum(message.role == "tool" for message in result.messages)
        if result.finish_reason == "stop" and answered != children:
            self.problems.append(f"{answered} results for {children} sub-agents")

    async def _break_off(self) -> None:
        leave_at = self.random.randint(1, 40)
        run = self._talker.session().stream(Plan(2, tokens=200, wait_ms=5).text())
        async with run:
            async for event in run:
                if event.seq >= leave_at:
                    break

    async def _cancel(self) -> None:
        agent = self.random.choice([self._lead, self._talker])
        task = asyncio.create_task(agent.send(Plan(3, wait_ms=20, children=4 if agent is self._lead else 0).text()))
        await asyncio.wait({task}, timeout=self.random.random() * 0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _kill(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            targets = [process for process in psutil.Process().children(recursive=True) if _actor_class(process) is not None]
            if targets:
                victim = self.random.choice(targets)
                self.counts[f"killed {_actor_class(victim)}"] += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)

    def _sample(self, elapsed: float) -> None:
        """A line of the report."""
        gc.collect()
        memory: dict[str, list[int]] = {}
        for process in psutil.Process().children(recursive=True):
            if (name := _actor_class(process)) is not None:
                with contextlib.suppress(psutil.Error):
                    memory.setdefault(name, []).append(process.memory_info().rss)
        references = sum(isinstance(thing, ray.ObjectRef) for thing in gc.get_objects())
        sample = {
            "seconds": round(elapsed),
            "driver_bytes": psutil.Process().memory_info().rss,
            "actors": {name: max(values) for name, values in sorted(memory.items())},
            "processes": {name: len(values) for name, values in sorted(memory.items())},
            "tasks": len(asyncio.all_tasks()),
            "references": references,
            "most_at_once": _server(self._url)["most"],
        }
        self.samples.append(sample)
        sizes = " ".join(f"{name} {size / 1e6:.0f}" for name, size in sample["actors"].items())
        print(
            f"{sample['seconds']:5} s  driver {sample['driver_bytes'] / 1e6:.0f} MB  {sizes} MB  tasks {sample['tasks']}  "
            f"references {references}  in flight <= {sample['most_at_once']}  {dict(self.counts)}",
            flush=True,
        )

    async def _settle(self, sessions: int) -> None:
        """Nothing runs any more, and every session is whole."""
        for number in range(sessions):
            session = self._talker.session(f"soak-{number}")
            while True:
                try:
                    await session.resume()
                    messages = await session.load()
                    break
                except LoushoError:
                    await asyncio.sleep(0.2)
            answers = [m.text for m in messages if m.role == "assistant" and m.text.startswith("turn ")]
            if answers != [f"turn {index + 1}" for index in range(len(answers))]:
                self.problems.append(f"{session.id}: answers {answers[:3]} ... {answers[-3:]}")
        deadline = time.monotonic() + BOUND_S
        left = await self._left()
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            left = await self._left()
        self.problems += left
        if (most := _server(self._url)["most"]) > MOST_AT_ONCE:
            self.problems.append(f"The limiter let {most} calls in at once; it allows {MOST_AT_ONCE}.")

    async def _left(self) -> list[str]:
        left = []
        with contextlib.suppress(LoushoError):
            stats = await self._limiter.stats()
            if stats.running + stats.waiting:
                left.append(f"The limiter counts {stats.running} running and {stats.waiting} waiting calls.")
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] != NAMESPACE:
                continue
            actor = ray.get_actor(entry["name"], NAMESPACE)
            for prefix, method in (("lousho-worker-", "running"), ("lousho-sessions-", "turns")):
                if entry["name"].startswith(prefix) and (count := await getattr(actor, method).remote()):
                    left.append(f"{entry['name']} has {count} {method}.")
        return left

    def _compare_memory(self) -> None:
        third = len(self.samples) // 3
        if third < 2:
            return
        early, late = self.samples[third], self.samples[-1]
        # A process that was killed a moment ago holds little: the most of the second third is compared with that of the last.
        before, after = _most(self.samples[third : 2 * third]), _most(self.samples[2 * third :])
        for name, size in before.items():
            if after.get(name, size) > size * GROWTH + SLACK_BYTES:
                self.problems.append(f"{name} grew from {size / 1e6:.0f} to {after[name] / 1e6:.0f} MB.")
        if late["references"] > early["references"] + 100:
            self.problems.append(f"Object references grew from {early['references']} to {late['references']}.")


def _most(samples: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The most memory that the driver and a process of each class of actors held."""
    found = {"driver": max(sample["driver_bytes"] for sample in samples)}
    for sample in samples:
        for name, size in sample["actors"].items():
            found[name] = max(size, found.get(name, 0))
    return found


def _actor_class(process: psutil.Process) -> str | None:
    """The class of an actor of ours that a process runs."""
    with contextlib.suppress(psutil.Error):
        title = " ".join(process.cmdline())
        for name in ("SessionActor", "WorkerActor", "RateLimiterActor", "BudgetActor", "StoreActor"):
            if title.startswith(f"ray::{name}"):
                return name
    return None


def _server(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/stats", timeout=30) as answer:
        stats: dict[str, int] = json.loads(answer.read())
    return stats


async def main(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder, model_server() as url:
        ray.init("local", include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            soak = Soak(url, Path(folder), given.seed)
            await soak.run(given.minutes * 60, given.sessions, given.kill_every)
        finally:
            await asyncio.to_thread(ray.shutdown)
    report = {"counts": dict(soak.counts), "errors": soak.errors, "problems": soak.problems, "samples": soak.samples}
    if given.report is not None:
        given.report.write_text(json.dumps(report, indent=2))
    print("\n".join(f"{key}, for example: {text}" for key, text in soak.errors.items()))
    print("\n".join(soak.problems) or "Nothing was lost, doubled or left behind.")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    sys.exit(asyncio.run(main(parser.parse_args())))
