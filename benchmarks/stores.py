"""What a save costs: rate, transactions (each is one flush to the disk), bytes written.

    python benchmarks/stores.py [--sessions 200] [--turns 10] [--at-once 32] [--dir DIR]

`sessions`: N sessions of some turns, each a load and a save of two more messages. `checkpoints`: durable turns that save the whole
transcript at every step. `long`: one session that grows to 400 messages, saved after each.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from lousho_ray.messages import Message, assistant, user
from lousho_ray.stores.files import FileStore, file_store
from lousho_ray.stores.memory import MemoryStore, memory_store
from lousho_ray.stores.sqlite import SqliteStore

Store = MemoryStore | FileStore | SqliteStore
Work = Callable[[Store, int, int, int], Awaitable[int]]
TEXT = "The quick brown fox jumps over the lazy dog. " * 5


async def conversations(store: Store, sessions: int, turns: int, at_once: int) -> int:
    gate = asyncio.Semaphore(at_once)

    async def talk(name: str) -> None:
        async with gate:
            for turn in range(turns):
                messages = await store.sessions.load(name) or []
                assert len(messages) == 2 * turn
                await store.sessions.save(name, [*messages, user(f"{turn} {TEXT}"), assistant(f"{turn} {TEXT}")])

    await asyncio.gather(*(talk(f"session-{number}") for number in range(sessions)))
    return sessions * turns


async def checkpoints(store: Store, sessions: int, turns: int, at_once: int) -> int:
    gate = asyncio.Semaphore(at_once)

    async def run(name: str) -> None:
        async with gate:
            messages: list[dict[str, object]] = []
            for step in range(turns):
                messages += [user(f"{step} {TEXT}").to_dict(), assistant(f"{step} {TEXT}").to_dict()]
                record = {"sessionId": name, "stepIndex": step, "status": "in-progress", "revision": step, "messages": messages}
                await store.checkpoints.save(record)

    await asyncio.gather(*(run(f"session-{number}.turn-0") for number in range(sessions)))
    return sessions * turns


async def long(store: Store, sessions: int, turns: int, at_once: int) -> int:
    del sessions, turns, at_once
    messages: list[Message] = []
    for number in range(200):
        messages = [*(await store.sessions.load("long") or []), user(f"{number} {TEXT}"), assistant(f"{number} {TEXT}")]
        await store.sessions.save("long", messages)
    return 200


def written_bytes() -> int:
    """Bytes this process has handed to the system to write."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    return 0


def kept_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


async def measure(name: str, work: Work, make: Callable[[str], Store], options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        async with make(folder) as store:
            written, cpu, start = written_bytes(), time.process_time(), time.perf_counter()
            saves = await work(store, options.sessions, options.turns, options.at_once)
            wall, cpu, written = time.perf_counter() - start, time.process_time() - cpu, written_bytes() - written
            flushes = f"{store.transactions / saves:.3f}" if isinstance(store, SqliteStore) else "-"
        print(
            f"{work.__name__:14}{name:9}{saves / wall:9.0f}{cpu / saves * 1e3:10.3f}{flushes:>14}"
            f"{written / saves / 1e3:12.1f}{kept_bytes(folder) / 1e6:9.2f}"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--dir", help="where the temporary stores are made")
    options = parser.parse_args()
    makers: dict[str, Callable[[str], Store]] = {
        "memory": lambda folder: memory_store(),
        "sqlite": lambda folder: SqliteStore(Path(folder) / "agent.db"),
        "files": lambda folder: file_store(folder),
    }
    print(f"{'workload':14}{'store':9}{'saves/s':>9}{'CPU ms':>10}{'flushes/save':>14}{'kB written':>12}{'MB kept':>9}")
    for work in (conversations, checkpoints, long):
        for name, make in makers.items():
            await measure(name, work, make, options)


if __name__ == "__main__":
    asyncio.run(main())
