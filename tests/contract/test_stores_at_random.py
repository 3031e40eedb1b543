"""Random histories of saves, seen through several objects, against a plain dict."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.messages import Message, assistant, user
from lousho_ray.stores.remembered import Remembered
from lousho_ray.stores.sqlite import SqliteStore

IDS = ("a", "b", "a.turn-1")


def edited(messages: list[Message], dice: random.Random) -> list[Message]:
    """A transcript as turns, aborts, compaction and bookkeeping leave it."""
    match dice.randrange(6):
        case 0 | 1:
            return [*messages, *(dice.choice((user, assistant))(f"{dice.random()}") for _ in range(dice.randrange(4)))]
        case 2:
            return messages[: dice.randrange(len(messages) + 1)]
        case 3 if messages:
            return [*messages[:-1], messages[-1].with_(metadata=dice.choice((None, {}, {"n": dice.choice((1, True, 1.0))})))]
        case 4 if messages:
            return [user("summary"), *messages[dice.randrange(len(messages)) :]]
        case _:
            return [Message.from_dict(message.to_dict()) for message in messages]


def shape(messages: list[Message] | None) -> str:
    """Told apart by JSON form: `1 == True` in Python."""
    return repr(None if messages is None else [message.to_dict() for message in messages])


@pytest.mark.parametrize("seed", range(12))
async def test_transcripts_are_what_was_saved_last(seed: int, tmp_path: Path) -> None:  # STO-05, STO-06
    dice = random.Random(seed)
    expected: dict[str, list[Message]] = {}
    async with SqliteStore(tmp_path / "a.db") as one, SqliteStore(tmp_path / "a.db") as two:
        two.sessions._known = Remembered(budget_chars=dice.choice((0, 300, 10_000)))
        for _ in range(120):
            store, name = dice.choice((one, two)), dice.choice(IDS)
            if dice.random() < 0.05:
                await store.sessions.delete(name)
                expected.pop(name, None)
            else:
                base = await store.sessions.load(name) if dice.random() < 0.5 else expected.get(name)
                expected[name] = edited(base or [], dice)
                await store.sessions.save(name, expected[name])
            for reader in (one, two):
                assert shape(await reader.sessions.load(name)) == shape(expected.get(name))


@pytest.mark.parametrize("seed", range(12))
async def test_checkpoints_and_their_history_are_what_was_saved(seed: int, tmp_path: Path) -> None:  # STO-07, STO-39, DUR-46
    dice = random.Random(seed)
    limit = dice.choice((0, 1, 3, 50))
    expected: dict[str, dict[str, Any]] = {}
    history: dict[str, list[dict[str, Any]]] = {name: [] for name in IDS}
    async with SqliteStore(tmp_path / "a.db", limit) as one, SqliteStore(tmp_path / "a.db", limit) as two:
        for step in range(120):
            store, name = dice.choice((one, two)), dice.choice(IDS)
            if dice.random() < 0.08:
                keep = dice.random() < 0.5
                await store.checkpoints.delete(name, keep_history=keep)
                expected.pop(name, None)
                history[name] = history[name] if keep else []
            else:
                old = expected.get(name, {"messages": [], "calls": []})
                record: dict[str, Any] = {"sessionId": name, "stepIndex": step}
                for key in ("messages", "calls"):
                    kept = old[key][: dice.choice((None, None, None, -1, 1))]
                    record[key] = [
                        *kept,
                        *({"n": dice.random(), "text": "x" * dice.choice((5, 600))} for _ in range(dice.randrange(3))),
                    ]
                await store.checkpoints.save(record)
                expected[name] = record
                history[name] = [record, *history[name]][:limit]
            for reader in (one, two):
                assert await reader.checkpoints.load(name) == expected.get(name)
                assert [entry["checkpoint"] for entry in await reader.checkpoints.history(name)] == history[name]
        for name in IDS:
            await one.checkpoints.delete(name)
        left = one._database.run_blocking(
            lambda connection: connection.execute("SELECT count(*) FROM checkpoint_lists").fetchone()[0]
        )
        assert left == 0
