"""The checkpoints part of a SQLite store.

A checkpoint holds the whole transcript and is saved at every step, so its long lists are kept element by element, in branches
(`sqlite_lists`). A save that extends a list adds rows to its branch; one that changes what was there starts a new branch, because
the history still needs the old. Neither writes what the session's transcript has.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lousho_ray.clock import Clock
from lousho_ray.errors import StorageError
from lousho_ray.ids import check_run_id
from lousho_ray.stores.entries import CheckpointFacts, HistoryEntry, base_session, check_limit, check_prefix, iso, milliseconds
from lousho_ray.stores.json_form import SplitRecord, common_prefix, damaged, read_object, split
from lousho_ray.stores.remembered import Remembered
from lousho_ray.stores.sqlite_lists import base_in, begin_branch, delete_branches, extend_branch, read_branch

if TYPE_CHECKING:
    import sqlite3

    from lousho_ray.stores.sqlite_sessions import SqliteSessions
    from lousho_ray.stores.sqlite_writer import Database

Refs = dict[str, tuple[int, int]]
"""Where the lists of a record are: name -> (branch, number of elements)."""

_INSERT = """INSERT INTO checkpoints (version, body, lists, step, status, revision, approval_id, updated_at, id)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_UPDATE = """UPDATE checkpoints
    SET version = ?, body = ?, lists = ?, step = ?, status = ?, revision = ?, approval_id = ?, updated_at = ? WHERE id = ?"""
_HISTORY_COLUMNS = "id, body, lists, step, status, updated_at"


@dataclass(frozen=True, slots=True)
class _Lists:
    """The lists of a stored checkpoint: where they are and what is in them."""

    refs: Refs
    elements: Mapping[str, tuple[str, ...]]


class SqliteCheckpoints:
    """Checkpoints by run id, with the newest `history_limit` saves of each."""

    def __init__(self, database: Database, sessions: SqliteSessions, history_limit: int, clock: Clock) -> None:
        self._database = database
        self._sessions = sessions
        self._limit = history_limit
        self._now = milliseconds(clock)
        self._known: Remembered[_Lists] = Remembered()

    async def save(self, checkpoint: Mapping[str, Any], /) -> None:
        """Replaces the checkpoint of its `sessionId` and adds it to the history; returns once it is on the disk.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: not JSON, a lower `revision` than the stored one, or the database cannot be
                written.
        """
        facts = CheckpointFacts.of(checkpoint)
        record = split(checkpoint, _named(facts.id))
        await self._database.run(lambda connection: self._save(connection, facts, record), write=True)

    async def load(self, id: str, /) -> dict[str, Any] | None:
        check_run_id(id, "id")
        record = await self._database.run(lambda connection: self.load_in(connection, id))
        return None if record is None else record.join(_named(id), self._database.path)

    async def delete(self, id: str, /, *, keep_history: bool = False) -> None:
        check_run_id(id, "id")
        await self._database.run(lambda connection: self.delete_in(connection, id, keep_history=keep_history), write=True)

    async def delete_prefix(self, prefix: str, /) -> int:
        """Deletes all checkpoints, with their histories, whose id starts with `prefix`. Returns how many runs that were."""
        check_prefix(prefix)
        return await self._database.run(lambda connection: self.delete_prefix_in(connection, prefix), write=True)

    async def history(self, id: str, /, *, limit: int | None = None) -> list[HistoryEntry]:
        """The kept saves of a run, newest first."""
        check_run_id(id, "id")
        count = -1 if check_limit(limit) is None else limit

        def unit(connection: sqlite3.Connection) -> list[tuple[SplitRecord, int, str, int]]:
            query = "SELECT body, lists, step, status, updated_at FROM checkpoint_history WHERE id = ? ORDER BY entry DESC LIMIT ?"
            rows = connection.execute(query, (id, count)).fetchall()
            return [(_read(connection, id, body, lists), step, status, at) for body, lists, step, status, at in rows]

        what, path = _named(id), self._database.path
        return [
            HistoryEntry(step=step, saved_at=iso(at), status=status, checkpoint=record.join(what, path))
            for record, step, status, at in await self._database.run(unit)
        ]

    # ---------------------------------------------------------------------------------------------- in the owner thread

    def save_in(self, connection: sqlite3.Connection, checkpoint: Mapping[str, Any]) -> None:
        facts = CheckpointFacts.of(checkpoint)
        self._save(connection, facts, split(checkpoint, f"checkpoint '{facts.id}'"))

    def load_in(self, connection: sqlite3.Connection, id: str) -> SplitRecord | None:
        row = connection.execute("SELECT body, lists FROM checkpoints WHERE id = ?", (id,)).fetchone()
        return None if row is None else _read(connection, id, row[0], row[1])

    def delete_in(self, connection: sqlite3.Connection, id: str, *, keep_history: bool = False) -> None:
        before = _branches(connection, id)
        connection.execute("DELETE FROM checkpoints WHERE id = ?", (id,))
        if not keep_history:
            connection.execute("DELETE FROM checkpoint_history WHERE id = ?", (id,))
        delete_branches(connection, before - _branches(connection, id) if keep_history else before)
        self._known.forget(id)

    def delete_prefix_in(self, connection: sqlite3.Connection, prefix: str) -> int:
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        where = "WHERE id >= ? AND id < ?"
        query = f"SELECT id FROM checkpoints {where} UNION SELECT id FROM checkpoint_history {where}"
        found = connection.execute(query, (prefix, after) * 2).fetchall()
        for (run_id,) in found:
            delete_branches(connection, _branches(connection, run_id))
        connection.execute(f"DELETE FROM checkpoint_history {where}", (prefix, after))
        connection.execute(f"DELETE FROM checkpoints {where}", (prefix, after))
        return len(found)

    def _save(self, connection: sqlite3.Connection, facts: CheckpointFacts, record: SplitRecord) -> None:
        row = connection.execute("SELECT version, revision, lists FROM checkpoints WHERE id = ?", (facts.id,)).fetchone()
        is_new = facts.check_newer_than(row[1] if row else None, self._database.path)
        old = _Lists({}, {}) if row is None else self._stored_lists(connection, facts.id, row[0], row[2])
        refs = {name: self._put_list(connection, facts.id, old, name, elements) for name, elements in record.lists.items()}
        version, now, lists = secrets.randbits(62), self._now(), json.dumps(refs)
        values = (version, record.head, lists, facts.step, facts.status, facts.revision, facts.approval_id, now, facts.id)
        connection.execute(_INSERT if row is None else _UPDATE, values)
        dropped = {branch for branch, _ in old.refs.values()}
        if self._limit:
            dropped |= self._add_history(connection, (facts.id, record.head, lists, facts.step, facts.status, now), is_new)
        dropped -= {branch for branch, _ in refs.values()}
        if dropped:
            delete_branches(connection, dropped - _branches(connection, facts.id))
        self._known.put(facts.id, version, _Lists(refs, record.lists), sum(map(_chars, record.lists.values())))

    def _stored_lists(self, connection: sqlite3.Connection, id: str, version: int, lists: str) -> _Lists:
        known = self._known.get(id)
        if known is not None and known[0] == version:
            return known[1]
        refs = _refs(lists, id)
        return _Lists(refs, {name: _elements(connection, id, *ref) for name, ref in refs.items()})

    def _put_list(
        self, connection: sqlite3.Connection, id: str, old: _Lists, name: str, elements: tuple[str, ...]
    ) -> tuple[int, int]:
        stored = old.elements.get(name, ())
        start = common_prefix(stored, elements)
        if name in old.refs and start == len(stored):
            branch = old.refs[name][0]
            extend_branch(connection, branch, elements[start:], start)
        else:
            transcript = self._sessions.bodies_in(connection, base_session(id))
            branch = begin_branch(connection, elements, None if transcript is None else base_in(*transcript, elements))
        return branch, len(elements)

    def _add_history(self, connection: sqlite3.Connection, entry: tuple[object, ...], is_new: bool) -> set[int]:
        """Appends a save and trims; returns the branches that entries which went may have left behind."""
        run_id, gone = entry[0], list[str]()
        if not is_new:
            newest = connection.execute("SELECT MAX(entry) FROM checkpoint_history WHERE id = ?", (run_id,)).fetchone()[0]
            gone += _take_history(connection, "entry = ?", newest)
        connection.execute(f"INSERT INTO checkpoint_history ({_HISTORY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", entry)
        oldest_kept = connection.execute(
            "SELECT entry FROM checkpoint_history WHERE id = ? ORDER BY entry DESC LIMIT 1 OFFSET ?", (run_id, self._limit)
        ).fetchone()
        if oldest_kept is not None:
            gone += _take_history(connection, "id = ? AND entry <= ?", run_id, oldest_kept[0])
        return {branch for lists in gone for branch, _ in _refs(lists, str(run_id)).values()}


def _chars(elements: tuple[str, ...]) -> int:
    return sum(map(len, elements))


def _named(id: str) -> str:
    return f"checkpoint '{id}'"


def _refs(lists: str, id: str) -> Refs:
    found = read_object(lists, _named(id))
    try:
        return {name: (int(branch), int(count)) for name, (branch, count) in found.items()}
    except (TypeError, ValueError) as error:
        raise damaged(_named(id), f"its lists are nowhere ({error})") from error


def _elements(connection: sqlite3.Connection, id: str, branch: int, count: int) -> tuple[str, ...]:
    found = read_branch(connection, branch, count)
    if len(found) != count:
        raise damaged(_named(id), f"{len(found)} of the {count} elements of a list are there")
    return found


def _read(connection: sqlite3.Connection, id: str, body: str, lists: str) -> SplitRecord:
    return SplitRecord(body, {name: _elements(connection, id, *ref) for name, ref in _refs(lists, id).items()})


def _take_history(connection: sqlite3.Connection, where: str, *values: object) -> list[str]:
    """Deletes history entries and returns their `lists`."""
    gone = [row[0] for row in connection.execute(f"SELECT lists FROM checkpoint_history WHERE {where}", values)]
    connection.execute(f"DELETE FROM checkpoint_history WHERE {where}", values)
    return gone


def _branches(connection: sqlite3.Connection, id: str) -> set[int]:
    """The branches that the checkpoint of a run and its history use. A damaged one names none, so that it can be thrown away."""
    query = "SELECT lists FROM checkpoints WHERE id = ? UNION ALL SELECT lists FROM checkpoint_history WHERE id = ?"
    found: set[int] = set()
    for (lists,) in connection.execute(query, (id, id)):
        with suppress(StorageError):
            found.update(branch for branch, _ in _refs(lists, id).values())
    return found
