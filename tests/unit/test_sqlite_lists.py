"""What a SQLite store writes for the long lists of checkpoints, and what becomes of a list that stands in a transcript."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lousho_ray import create_agent, tool
from lousho_ray.messages import Message, assistant, user
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.stores.sqlite_schema import MIGRATIONS, open_database
from lousho_ray.testing import MockTurn, mock_model

PAGE = 4_096 + 24
TEXT = "about as long as a short answer is. " * 20
CALL = MockTurn(tool_calls=({"id": "call_1", "name": "add", "args": {"a": 1, "b": 1}},))


@tool
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def rows(path: str, table: str) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        count: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return count


def bytes_written(path: str) -> int:
    """What the log has grown to since it was last asked for."""
    size = os.path.getsize(f"{path}-wal")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    return size


@pytest.mark.parametrize("replies", [[TEXT], [CALL, TEXT]], ids=["text", "tools"])
async def test_what_a_turn_writes_does_not_grow_with_the_history(tmp_path: Path, replies: list[Any]) -> None:
    path, turns = str(tmp_path / "a.db"), 40
    async with SqliteStore(path) as store:
        agent = create_agent(provider=mock_model(replies * turns), tools=[add], store=store, runtime="local")
        written = list[int]()
        for _ in range(turns):
            await agent.session("trip").send(TEXT)
            written.append(bytes_written(path))
        await agent.close()
    early, late = median(written[2:12]), median(written[-10:])
    assert late <= early + 3 * PAGE, "the tree may be one page higher; the history would be 12 pages more"


def transcript(turns: int) -> list[Message]:
    return [message for turn in range(turns) for message in (user(f"{turn}: {TEXT}"), assistant(f"{turn}! {TEXT}"))]


def record(messages: list[Message], revision: int = 1) -> dict[str, Any]:
    said = [Message("system", "Be brief."), *messages, user("And now?")]
    return {"sessionId": f"trip.turn-{len(messages)}", "revision": revision, "messages": [message.to_dict() for message in said]}


async def clear(store: SqliteStore) -> None:
    await store.sessions.save("trip", [])


async def change_the_middle(store: SqliteStore) -> None:
    await store.sessions.save("trip", [*transcript(2), user("Another."), *transcript(9)])


async def delete(store: SqliteStore) -> None:
    await store.sessions.delete("trip")
    await store.sessions.save("other", transcript(1))  # may get the row of the one that is gone


async def prune(store: SqliteStore) -> None:
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        connection.execute("UPDATE sessions SET updated_at = 0")
        connection.commit()
    assert (await store.aprune(60_000))["sessions"] == 1


async def grow(store: SqliteStore) -> None:
    await store.sessions.save("trip", transcript(9))


@pytest.mark.parametrize("change", [clear, change_the_middle, delete, prune, grow])
@pytest.mark.parametrize("anew", [False, True], ids=["same store", "new store"])
async def test_a_checkpoint_keeps_its_messages_whatever_becomes_of_the_transcript(
    tmp_path: Path, change: Callable[[SqliteStore], Any], anew: bool
) -> None:
    path = str(tmp_path / "a.db")
    first, second = record(transcript(4)), record(transcript(4), revision=2)
    second["messages"].append(assistant("Now this.").to_dict())
    async with SqliteStore(path) as seen, SqliteStore(path) as other:
        await seen.sessions.save("trip", transcript(4))
        store = other if anew else seen
        await store.checkpoints.save(first)
        assert rows(path, "checkpoint_lists") == 2, "the system prompt and the input"
        await store.checkpoints.save(second)
        assert rows(path, "checkpoint_lists") == 3
        await change(store)
        for asked in (seen, other):
            assert await asked.checkpoints.load("trip.turn-8") == second
            history = await asked.checkpoints.history("trip.turn-8")
            assert [entry["checkpoint"] for entry in history] == [second, first]
            await asked.checkpoints.save(second)
        await store.checkpoints.delete("trip.turn-8")
        assert rows(path, "checkpoint_lists") == rows(path, "checkpoint_bases") == 0


async def test_a_turn_ends_without_copying_the_transcript_it_replaces(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    async with SqliteStore(path) as store:
        await store.sessions.save("trip", transcript(4))
        opened = await store.turns.open("trip", "me", 60_000)
        assert opened.fence is not None
        await store.checkpoints.save(record(transcript(4)))
        statements = list[str]()
        await store._database.run(lambda connection: connection.set_trace_callback(statements.append))
        shorter = [user("In short: nothing.")]
        await store.turns.end("trip", shorter, holder="me", fence=opened.fence, checkpoint="trip.turn-8", shortened=True)
        await store._database.run(lambda connection: connection.set_trace_callback(None))
        assert await store.sessions.load("trip") == shorter
    branches = next(index for index, statement in enumerate(statements) if statement.startswith("DELETE FROM checkpoint_bases"))
    copies = [index for index, statement in enumerate(statements) if statement.startswith("INSERT INTO checkpoint_lists")]
    assert all(branches < index for index in copies), "the checkpoint is gone before its transcript changes"


async def test_a_record_of_the_first_schema_is_read_and_goes_on(tmp_path: Path) -> None:
    path, old = str(tmp_path / "a.db"), record(transcript(2))
    with contextlib.closing(open_database(path, 1000, MIGRATIONS[:1])) as connection:
        elements = [json.dumps(message) for message in old["messages"]]
        for position, body in enumerate(elements):
            connection.execute("INSERT INTO checkpoint_lists VALUES (1, ?, ?)", (position, body))
        head = json.dumps({key: value for key, value in old.items() if key != "messages"})
        values = (old["sessionId"], 7, head, json.dumps({"messages": [1, len(elements)]}), 0, "in-progress", 1, None, 0)
        connection.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    newer = {**old, "revision": 2, "messages": [*old["messages"], assistant("So.").to_dict()]}
    async with SqliteStore(path) as store:
        assert await store.checkpoints.load(old["sessionId"]) == old
        await store.checkpoints.save(newer)
        assert await store.checkpoints.load(old["sessionId"]) == newer
