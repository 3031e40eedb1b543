"""What a turn writes into a SQLite store, by the number of turns before it.

    python benchmarks/store_growth.py

Counted are the bytes of the write-ahead log, so whole pages: what each turn adds to a log that was emptied before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tempfile

from lousho_ray import create_agent, tool
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing import MockTurn, mock_model

TURNS = 200
SHOWN = (1, 10, 50, 100, 200)
TEXT = "What was said in this turn, which is about as long as a short answer. " * 7


@tool
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def taken_from_log(path: str) -> int:
    """Empties the log; how many bytes it had."""
    size = os.path.getsize(f"{path}-wal")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return size


async def written(script: list[MockTurn]) -> list[int]:
    """Bytes of each turn of a session whose turns take these replies."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "growth.db")
        store, found = SqliteStore(path), list[int]()
        agent = create_agent(provider=mock_model(script * (TURNS + 1)), tools=[add], store=store, runtime="local")
        await agent.session("first").send(TEXT)
        taken_from_log(path)
        for _ in range(TURNS):
            await agent.session("trip").send(TEXT)
            found.append(taken_from_log(path))
        await agent.close()
        await store.aclose()
        return found


async def main() -> None:
    calls = [MockTurn(tool_calls=({"id": f"call_{n}", "name": "add", "args": {"a": n, "b": 1}},)) for n in range(3)]
    for name, script in (("text", [MockTurn(TEXT)]), ("3 tool calls", [*calls, MockTurn(TEXT)])):
        found = await written(script)
        print(f"{name}: " + ", ".join(f"turn {turn}: {found[turn - 1] / 1000:.0f} kB" for turn in SHOWN))
        print(f"  all {TURNS}: {sum(found) / 1e6:.1f} MB")


if __name__ == "__main__":
    asyncio.run(main())
