"""What a session actor still holds once the sessions it has served are idle: its resident memory before and after.

    python benchmarks/session_memory.py [--sessions 10000] [--turns 1] [--at-once 64]

Starts a local Ray with one CPU, so that one session actor hosts all sessions. The model is a mock in the actor, the store a SQLite
file behind its own actor. The first reading comes after as many warm-up sessions as run at once, the last one when the actor has
let go of the turns that it keeps for handles which lost their connection.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from lousho_ray import MockProvider, SqliteStore, create_agent
from lousho_ray.actors.cluster import NAMESPACE, job_id
from lousho_ray.actors.session import KEPT_S
from lousho_ray.ports import GenerateOptions


def parrot(request: GenerateOptions) -> str:
    return f"heard {request.messages[-1].text}"


def held(actor: Any) -> tuple[float, int]:
    """Resident memory of this process in MB, and how many turns the actor holds."""
    import psutil

    gc.collect()
    return psutil.Process().memory_info().rss / 1e6, len(actor._turns)


async def serve(agent: Any, prefix: str, sessions: int, turns: int, at_once: int) -> float:
    """Turns per second."""
    numbers, began = iter(range(sessions)), time.perf_counter()

    async def worker() -> None:
        for number in numbers:
            session = agent.session(f"{prefix}{number}")
            for turn in range(turns):
                await session.send(f"question {turn} " + "x" * 1_000)

    await asyncio.gather(*(worker() for _ in range(at_once)))
    return sessions * turns / (time.perf_counter() - began)


async def main(sessions: int, turns: int, at_once: int, folder: str) -> None:
    async with SqliteStore(Path(folder) / "sessions.db") as store:
        agent = create_agent(provider=MockProvider(policy=parrot), store=store, runtime="ray")
        await serve(agent, "warm", at_once, 3, at_once)
        actor = ray.get_actor(f"lousho-sessions-{job_id()}-0", NAMESPACE)
        first, _ = await actor.__ray_call__.remote(held)
        rate = await serve(agent, "s", sessions, turns, at_once)
        busy, kept = await actor.__ray_call__.remote(held)
        await asyncio.sleep(KEPT_S + 5)
        last, left = await actor.__ray_call__.remote(held)
        print(
            f"{sessions} sessions of {turns} turns, {rate:.0f} turns/s: {first:.0f} MB at first, {busy:.0f} MB at the end "
            f"({kept} turns held), {last:.0f} MB idle ({left} held): {last - first:+.1f} MB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=64)
    given = parser.parse_args()
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(given.sessions, given.turns, given.at_once, temporary))
    ray.shutdown()
