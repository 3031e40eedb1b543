"""Session turns per second on Ray, with one session actor and with more: stored in SQLite, every turn's history checked.

    python benchmarks/sessions_ray.py [--actors 1,2] [--sessions 1000] [--at-once 32] [--durable no] [--turns 3] [--chars 0]
        [--share 0.2]

Each number of actors gets a local Ray of its own with that many CPUs. Everything runs on this machine: the callers (this process),
the session actors, the store actor and the model server share its cores. The CPU time is that of all of them but the model server.

With `--share` each of them gets that share of a core once it has warmed up (see `slowed.py`): so the two cores of a small machine
stand for more, slower ones.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import ray
from model_server import Plan, model_server
from slowed import slowed

from lousho_ray import OpenAIProvider, SqliteStore, create_agent
from lousho_ray.messages import user


class SessionsOnly:
    """A store whose sessions are not durable."""

    def __init__(self, store: SqliteStore) -> None:
        self.sessions = store.sessions


def cpu_s() -> dict[str, float]:
    """CPU seconds so far: of this process, and of each kind of Ray's."""
    me, spent = psutil.Process(), dict[str, float]()
    for process in (me, *me.children(recursive=True)):
        try:
            used, name = process.cpu_times(), "caller" if process is me else process.name()
        except psutil.NoSuchProcess:
            continue
        spent[name] = spent.get(name, 0.0) + used.user + used.system
    return spent


async def serve(agent: Any, prefix: str, sessions: int, at_once: int, turns: int, chars: int) -> list[float]:
    """Milliseconds of each turn."""
    numbers, took = iter(range(sessions)), list[float]()
    asked = [*([user("x" * chars)] if chars else []), user(Plan().text())]

    async def worker() -> None:
        for number in numbers:
            for turn in range(1, turns + 1):
                began = time.perf_counter()
                result = await agent.session(f"{prefix}{number}").send(asked)
                assert result.text == f"turn {turn * len(asked)}", result.text
                took.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return took


async def measure(
    url: str, actors: int, sessions: int, at_once: int, durable: bool, turns: int, chars: int, folder: str, share: float | None
) -> None:
    async with SqliteStore(Path(folder) / "sessions.db") as store:
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none", default_model="fake", api="chat")
        agent = create_agent(provider=provider, store=store if durable else SessionsOnly(store), runtime="ray")
        await serve(agent, "warm", at_once, at_once, 3, chars)
        with nullcontext() if share is None else slowed(share, "ray::SessionActor", "ray::StoreActor", "model_server.py"):
            if share is not None:
                await serve(agent, "slow", at_once, at_once, 3, chars)
            before, began = cpu_s(), time.perf_counter()
            took = await serve(agent, "s", sessions, at_once, turns, chars)
            seconds, count = time.perf_counter() - began, sessions * turns
        spent = {name: (used - before.get(name, 0.0)) / count * 1000 for name, used in cpu_s().items()}
        top = ", ".join(f"{name} {used:.2f}" for name, used in sorted(spent.items(), key=lambda item: -item[1])[:5])
        print(
            f"{actors} session actor(s): {count / seconds:6.0f} turns/s, p50 {statistics.median(took):.0f} ms, p99 "
            f"{statistics.quantiles(took, n=100)[98]:.0f} ms, CPU ms per turn {sum(spent.values()):.2f} ({top})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", default="1,2")
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--durable", choices=("yes", "no"), default="yes")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--chars", type=int, default=0, help="length of one more message that each turn brings")
    parser.add_argument("--share", type=float, help="of a core, for each process")
    given = parser.parse_args()
    with model_server() as url:
        for actors in map(int, given.actors.split(",")):
            ray.init("local", num_cpus=actors, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            with tempfile.TemporaryDirectory() as temporary:
                durable = given.durable == "yes"
                what = given.sessions, given.at_once, durable, given.turns, given.chars
                asyncio.run(measure(url, actors, *what, temporary, given.share))
            ray.shutdown()
