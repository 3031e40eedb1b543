"""What durability costs a session: turns with tool calls on a SQLite store, with and without checkpoints.

    python benchmarks/sessions_durable.py [--turns 50] [--sessions 20] [--folder DIR]

Each turn has two steps: a reply with two tool calls, and the answer. The model is a mock, so the numbers are the runtime's own. A
durable turn writes its checkpoint when it opens, after the reply, after the results and at its end; group commit shares the flushes
of sessions that run side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lousho_ray import GenerateResult, MockProvider, SqliteStore, ToolCall, create_agent, tool
from lousho_ray.ports import GenerateOptions


class SessionsOnly:
    """A store whose sessions are not durable."""

    def __init__(self, store: SqliteStore) -> None:
        self.sessions = store.sessions


@tool
def look(place: str) -> str:
    """Looks at a place."""
    return f"seen {place}"


def decide(request: GenerateOptions) -> GenerateResult | str:
    if request.messages[-1].role == "tool":
        return "done"
    number = len(request.messages)
    calls = tuple(ToolCall(f"c{number}-{place}", "look", f'{{"place": "{place}"}}') for place in ("here", "there"))
    return GenerateResult(tool_calls=calls, finish_reason="tool_calls")


async def one_session(agent: Any, turns: int) -> list[float]:
    """Seconds of each turn."""
    session, took = agent.session(), []
    for number in range(turns):
        began = time.perf_counter()
        await session.send(f"question {number}")
        took.append(time.perf_counter() - began)
    return took


async def measure(name: str, store: Any, transactions: Any, sessions: int, turns: int) -> None:
    agent = create_agent(provider=MockProvider(policy=decide), tools=[look], store=store, runtime="local")
    before, began, cpu = transactions(), time.perf_counter(), time.process_time()
    took = [seconds for part in await asyncio.gather(*(one_session(agent, turns) for _ in range(sessions))) for seconds in part]
    seconds, cpu, count = time.perf_counter() - began, time.process_time() - cpu, sessions * turns
    flushes = transactions() - before
    print(
        f"{name:<30} {count / seconds:8.0f} turns/s  p50 {statistics.median(took) * 1000:6.1f} ms  "
        f"{cpu / count * 1000:6.2f} ms CPU/turn  {flushes / count:5.2f} flushes/turn"
    )


async def main(sessions: int, turns: int, folder: Path) -> None:
    for count in (1, sessions):
        for name, durable in (("transcript only", False), ("durable", True)):
            store = SqliteStore(folder / f"{count}-{durable}.db")
            used = store if durable else SessionsOnly(store)
            await measure(f"{count} session(s), {name}", used, lambda s=store: s.transactions, count, turns)
            await store.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        asyncio.run(main(given.sessions, given.turns, Path(temporary)))
