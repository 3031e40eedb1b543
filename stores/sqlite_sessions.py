"""The sessions part of a SQLite store: one row a message, so a save writes only what is new."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lousho_ray.clock import Clock
from lousho_ray.errors import StorageError
from lousho_ray.ids import check_run_id
from lousho_ray.messages import Message
from lousho_ray.stores import lease as leases
from lousho_ray.stores.entries import SessionInfo, check_limit, epoch_ms, iso, milliseconds
from lousho_ray.stores.json_form import common_prefix, decode_message, encode_message, own
from lousho_ray.stores.lease import Lease
from lousho_ray.stores.remembered import Remembered
from lousho_ray.stores.sqlite_lists import detach

if TYPE_CHECKING:
    import sqlite3

    from lousho_ray.stores.sqlite_writer import Database

_log = logging.getLogger(__name__)

LARGE_CHARS = 50_000_000
"""A transcript longer than this is warned of once."""

MESSAGE_CHARS = 1_000
"""What a remembered message counts besides its text: thousands of short ones take room by their objects."""


@dataclass(frozen=True, slots=True)
class _Transcript:
    """What is stored of a session.

    Attributes:
        key: The session's row.
        messages: The messages as a load returns them.
        bodies: The JSON of each. Metadata is compared by what it is in JSON, because `1` and `True` are equal in Python; all other
            fields are compared by `==`.
    """

    key: int
    messages: tuple[Message, ...] = ()
    bodies: tuple[str, ...] = ()

    def common_prefix(self, messages: Sequence[Message], what: str) -> int:
        """How many messages at the start are stored already."""
        for position, (old, new) in enumerate(zip(self.messages, messages, strict=False)):
            if old.metadata is None:
                if old is new or (new.metadata is None and old == new):
                    continue
            elif new.metadata is not None and self.bodies[position] == encode_message(new, what):
                continue
            return position
        return min(len(self.messages), len(messages))

    def replaced(self, start: int, messages: Sequence[Message], bodies: Sequence[str], what: str) -> _Transcript:
        """With `messages`, whose JSON is `bodies`, in the place of all from `start` on."""
        kept = list(self.messages[:start])
        for message, body in zip(messages, bodies, strict=True):
            # Metadata as a load returns it, whatever types it was given in.
            kept.append(message if message.metadata is None else decode_message(body, what))
        return _Transcript(self.key, tuple(kept), (*self.bodies[:start], *bodies))


class SqliteSessions:
    """Transcripts. `None` = never saved, `[]` = saved empty."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._now = milliseconds(clock)
        self._known: Remembered[_Transcript] = Remembered()
        self._warned: set[str] = set()

    async def load(self, id: str, /) -> list[Message] | None:
        check_run_id(id, "id")
        messages = await self._database.run(lambda connection: self.load_in(connection, id))
        return None if messages is None else list(own(messages))

    async def save(self, id: str, messages: Sequence[Message], /, *, fence: int | None = None) -> None:
        """Replaces the transcript; returns once it is on the disk.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: `fence` is outdated, or missing while another holder's lease is live; a metadata
                value is not JSON; the database cannot be written.
        """
        check_run_id(id, "id")
        kept = own(messages)
        await self._database.run(lambda connection: self.save_in(connection, id, kept, fence), write=True)

    async def delete(self, id: str, /, *, fence: int | None = None) -> None:
        """Deletes the transcript. A turn that runs on it under another lease can no longer save it."""
        check_run_id(id, "id")

        def unit(connection: sqlite3.Connection) -> None:
            _delete_session(connection, id)
            if leases.after_delete(_lease(connection, id), fence) is None:
                connection.execute("DELETE FROM leases WHERE id = ?", (id,))

        await self._database.run(unit, write=True)

    async def list(self, *, limit: int | None = 50, before: SessionInfo | None = None) -> list[SessionInfo]:
        """The saved sessions, newest first; `before` is the last one of the page before."""
        last = (2**62, "") if before is None else (epoch_ms(before["updated_at"], "before"), before["id"])
        count = -1 if check_limit(limit) is None else limit
        query = (
            "SELECT id, updated_at, count FROM sessions WHERE (updated_at, id) < (?, ?) ORDER BY updated_at DESC, id DESC LIMIT ?"
        )
        rows = await self._database.run(lambda connection: connection.execute(query, (*last, count)).fetchall())
        return [SessionInfo(id=key, updated_at=iso(at), messages=messages) for key, at, messages in rows]

    async def claim(self, id: str, holder: str, ttl_ms: float) -> int | None:
        """Takes the lease on `id` for `ttl_ms`, or prolongs it for the holder who has it.

        Returns:
            The fencing number to save with, or `None` while another holder's lease is live.
        """
        check_run_id(id, "id")
        leases.check_ttl(ttl_ms)
        return await self._database.run(lambda connection: self.claim_in(connection, id, holder, ttl_ms), write=True)

    async def renew(self, id: str, holder: str, fence: int, ttl_ms: float) -> bool:
        """Prolongs a lease to `ttl_ms` from now; `False` when it was lost."""
        check_run_id(id, "id")
        leases.check_ttl(ttl_ms)

        def unit(connection: sqlite3.Connection) -> bool:
            kept = leases.renewed(_lease(connection, id), holder, fence, ttl_ms, self._now())
            return kept is not None and _put_lease(connection, id, kept) > 0

        return await self._database.run(unit, write=True)

    async def holder(self, id: str) -> str | None:
        """Who has the lease on `id`, as the name it was claimed under; `None` when it is free."""
        check_run_id(id, "id")

        def unit(connection: sqlite3.Connection) -> str | None:
            lease = _lease(connection, id)
            return None if lease is None or self._now() >= lease.expires_at_ms else lease.holder

        return await self._database.run(unit, write=False)

    async def release(self, id: str, holder: str, fence: int | None = None) -> None:
        """Gives a lease back; one that was lost already is left alone. Without a number: whichever one `holder` has, for a holder
        that is known to have died."""
        check_run_id(id, "id")
        await self._database.run(lambda connection: connection.execute(_RELEASE, (id, holder, fence)).rowcount, write=True)

    # ---------------------------------------------------------------------------------------------- in the owner thread

    def claim_in(self, connection: sqlite3.Connection, id: str, holder: str, ttl_ms: float) -> int | None:
        taken = leases.claimed(_lease(connection, id), holder, ttl_ms, self._now(), lambda: _next_fence(connection))
        return None if taken is None else _put_lease(connection, id, taken)

    def load_in(self, connection: sqlite3.Connection, id: str) -> tuple[Message, ...] | None:
        row = connection.execute("SELECT key, version, count FROM sessions WHERE id = ?", (id,)).fetchone()
        if row is None:
            return None
        key, version, count = row
        known = self._known.get(id)
        if known is not None and known[0] == version:
            return known[1].messages
        bodies, what, path = _bodies(connection, key), f"session '{id}'", self._database.path
        if len(bodies) != count:
            raise StorageError(f"{what} in {path} is damaged: {len(bodies)} of its {count} messages are there.", path=path)
        messages = [decode_message(body, what, path) for body in bodies]
        transcript = _Transcript(key).replaced(0, messages, bodies, what)
        self._remember(id, version, transcript)
        return transcript.messages

    def bodies_in(self, connection: sqlite3.Connection, id: str) -> tuple[int, tuple[str, ...]] | None:
        """The row of a session and the JSON of its messages; `None` when it was never saved."""
        row = connection.execute("SELECT key, version FROM sessions WHERE id = ?", (id,)).fetchone()
        if row is None:
            return None
        key, version = row
        known = self._known.get(id)
        return key, known[1].bodies if known is not None and known[0] == version else tuple(_bodies(connection, key))

    def end_in(self, connection: sqlite3.Connection, id: str, messages: tuple[Message, ...], holder: str, fence: int) -> None:
        """Saves under a lease and gives it back. Called again once that was done, it changes nothing."""
        try:
            self.save_in(connection, id, messages, fence)
        except StorageError:
            if leases.holds(_lease(connection, id), holder, fence) or self.load_in(connection, id) != messages:
                raise
        connection.execute(_RELEASE, (id, holder, fence))

    def save_in(self, connection: sqlite3.Connection, id: str, messages: tuple[Message, ...], fence: int | None) -> None:
        version, what = secrets.randbits(62), f"session '{id}'"
        known = self._known.get(id)
        if known is not None and self._replace_version(connection, id, known[0], version, len(messages), fence):
            stored = known[1]
            count = len(stored.messages)
        else:
            stored, count = self._take_stock(connection, id, version, messages, fence)
        start = stored.common_prefix(messages, what)
        bodies = [encode_message(message, what) for message in messages[start:]]
        if start < count:
            detach(connection, stored.key, start)
            connection.execute("DELETE FROM messages WHERE session = ? AND position >= ?", (stored.key, start))
        rows = [(stored.key, position, body) for position, body in enumerate(bodies, start)]
        connection.executemany("INSERT INTO messages (session, position, body) VALUES (?, ?, ?)", rows)
        self._remember(id, version, stored.replaced(start, messages[start:], bodies, what))

    def _replace_version(
        self, connection: sqlite3.Connection, id: str, known: int, version: int, count: int, fence: int | None
    ) -> bool:
        """The usual case in one statement: the stored version is the known one, and the lease is as it should be."""
        lease = "NOT EXISTS (SELECT 1 FROM leases WHERE id = ?)" if fence is None else _LEASE_IS_CURRENT
        query = f"UPDATE sessions SET version = ?, count = ?, updated_at = ? WHERE id = ? AND version = ? AND {lease}"
        values = (version, count, self._now(), id, known, id) + (() if fence is None else (fence,))
        return connection.execute(query, values).rowcount == 1

    def _take_stock(
        self, connection: sqlite3.Connection, id: str, version: int, messages: tuple[Message, ...], fence: int | None
    ) -> tuple[_Transcript, int]:
        """Checks the lease, compares with the rows that are there, and gives the session its new version.

        Returns:
            What of `messages` is stored already, and how many rows the session has.
        """
        now, what = self._now(), f"session '{id}'"
        if leases.after_save(_lease(connection, id), fence, now, id, self._database.path) is None:
            connection.execute("DELETE FROM leases WHERE id = ?", (id,))
        row = connection.execute("SELECT key FROM sessions WHERE id = ?", (id,)).fetchone()
        if row is None:
            query = "INSERT INTO sessions (id, version, count, updated_at) VALUES (?, ?, ?, ?)"
            key = connection.execute(query, (id, version, len(messages), now)).lastrowid
            return _Transcript(key or 0), 0
        query = "UPDATE sessions SET version = ?, count = ?, updated_at = ? WHERE key = ?"
        connection.execute(query, (version, len(messages), now, row[0]))
        found = _bodies(connection, row[0])
        bodies = [encode_message(message, what) for message in messages[: len(found)]]
        same = common_prefix(found, bodies)
        return _Transcript(row[0]).replaced(0, messages[:same], bodies[:same], what), len(found)

    def _remember(self, id: str, version: int, transcript: _Transcript) -> None:
        chars = sum(map(len, transcript.bodies))
        self._known.put(id, version, transcript, chars + MESSAGE_CHARS * len(transcript.messages))
        if chars > LARGE_CHARS and id not in self._warned:
            self._warned.add(id)
            _log.warning("Session '%s' holds %d MB of messages; compaction keeps transcripts short.", id, chars // 1_000_000)


_RELEASE = "DELETE FROM leases WHERE id = ?1 AND holder = ?2 AND (?3 IS NULL OR fence = ?3)"
_LEASE_IS_CURRENT = "EXISTS (SELECT 1 FROM leases WHERE id = ? AND fence = ?)"


def _bodies(connection: sqlite3.Connection, key: int) -> list[str]:
    query = "SELECT body FROM messages WHERE session = ? ORDER BY position"
    return [row[0] for row in connection.execute(query, (key,))]


def _delete_session(connection: sqlite3.Connection, id: str) -> None:
    row = connection.execute("SELECT key FROM sessions WHERE id = ?", (id,)).fetchone()
    if row is not None:
        detach(connection, row[0])
        connection.execute("DELETE FROM messages WHERE session = ?", row)
        connection.execute("DELETE FROM sessions WHERE key = ?", row)


def _lease(connection: sqlite3.Connection, id: str) -> Lease | None:
    row = connection.execute("SELECT holder, fence, expires_at FROM leases WHERE id = ?", (id,)).fetchone()
    return None if row is None else Lease(*row)


def _put_lease(connection: sqlite3.Connection, id: str, lease: Lease) -> int:
    query = "INSERT OR REPLACE INTO leases (id, holder, fence, expires_at) VALUES (?, ?, ?, ?)"
    connection.execute(query, (id, lease.holder, lease.fence, lease.expires_at_ms))
    return lease.fence


def _next_fence(connection: sqlite3.Connection) -> int:
    connection.execute("UPDATE fences SET last = last + 1")
    fence: int = connection.execute("SELECT last FROM fences").fetchone()[0]
    return fence
