"""`SqliteStore`: all three parts in one SQLite file."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import ConfigurationError, StorageError
from lousho_ray.stores.entries import (
    DEFAULT_HISTORY_LIMIT,
    PruneCounts,
    base_session,
    check_history_limit,
    cutoff_ms,
    milliseconds,
)
from lousho_ray.stores.location import StoreLocation
from lousho_ray.stores.parts import ClosingStore
from lousho_ray.stores.sqlite_approvals import SqliteApprovals
from lousho_ray.stores.sqlite_checkpoints import SqliteCheckpoints
from lousho_ray.stores.sqlite_lists import delete_dead_branches, detach
from lousho_ray.stores.sqlite_sessions import SqliteSessions
from lousho_ray.stores.sqlite_turns import SqliteTurns

if TYPE_CHECKING:
    import sqlite3

BUSY_TIMEOUT_MS = 5_000
"""How long an operation waits for another process that writes to the file."""


class SqliteStore(ClosingStore):
    """Sessions, checkpoints and approvals in one SQLite file, for one machine and any number of its processes.

    A save returns once it is on the disk. Saves that arrive while others are being written share one flush, and a save that extends
    a transcript writes only the new messages. The file is opened at the first use; a path that cannot work is refused at once. One
    object works from several event loops and threads, but not across a fork. Pickling it sends its location, not the connection.
    The file belongs on a local disk: SQLite's write-ahead log is unsafe on network file systems.

    Args:
        path: The file, created with its folder when missing, or `":memory:"`.
        history_limit: How many saves of each checkpoint to keep; 0 keeps none. Each keeps what it does not share with the others.
        clock: Where the time of leases and records comes from.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: an empty path, a bad `history_limit`.
        StorageError: `LOUSHO_STORAGE_FAILED`: a folder, no permission, not a SQLite database, or written by a newer version (the
            file is then left untouched); from any method also: locked for over 5 seconds, disk full, closed, used after a fork.
    """

    def __init__(
        self, path: str | os.PathLike[str], history_limit: int = DEFAULT_HISTORY_LIMIT, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        try:
            from lousho_ray.stores.sqlite_schema import MEMORY, check_file
            from lousho_ray.stores.sqlite_writer import Database
        except ImportError as error:
            raise StorageError("This Python was built without sqlite3; use file_store(dir) instead.") from error
        given = os.fspath(path)
        if not isinstance(given, str) or not given.strip() or "\0" in given:
            raise ConfigurationError(f"path must be the path of a file, or ':memory:'; got {given!r}.", field="path")
        self.path = given if given == MEMORY else os.path.abspath(given)
        self.history_limit = check_history_limit(history_limit)
        self._clock = clock
        if self.path != MEMORY:
            check_file(self.path)
        self._database = Database(self.path, BUSY_TIMEOUT_MS)
        self.sessions = SqliteSessions(self._database, clock)
        self.checkpoints = SqliteCheckpoints(self._database, self.sessions, self.history_limit, clock)
        self.approvals = SqliteApprovals(self._database, clock)
        self.turns = SqliteTurns(self._database, self.sessions, self.checkpoints)

    @property
    def location(self) -> StoreLocation:
        """Where the data is and with which options: enough to open the same store in another process."""
        return StoreLocation("sqlite", self.path, self.history_limit)

    @property
    def transactions(self) -> int:
        """How many write transactions this object has committed. Each is one flush to the disk."""
        return self._database.transactions

    def prune(self, older_than_ms: float) -> PruneCounts:
        cutoff = self._cutoff(older_than_ms)
        return self._database.run_blocking(lambda connection: self._prune(connection, cutoff), write=True)

    async def aprune(self, older_than_ms: float) -> PruneCounts:
        """`prune` without blocking the event loop."""
        cutoff = self._cutoff(older_than_ms)
        return await self._database.run(lambda connection: self._prune(connection, cutoff), write=True)

    def close(self) -> None:
        self._database.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop. Cancelling the wait does not stop the closing."""
        await asyncio.shield(asyncio.to_thread(self.close))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path == ":memory:":
            raise ConfigurationError(
                "a SqliteStore(':memory:') cannot be sent to another process; pass the path of a file.", field="store"
            )
        return SqliteStore, (self.path, self.history_limit)

    def __repr__(self) -> str:
        return f"SqliteStore({self.path!r})"

    def _cutoff(self, older_than_ms: float) -> int:
        return cutoff_ms(older_than_ms, milliseconds(self._clock)())

    def _prune(self, connection: sqlite3.Connection, cutoff: int) -> PruneCounts:
        """One transaction. What an unresolved approval needs is gathered first, in the same one."""
        now = milliseconds(self._clock)()
        waiting = connection.execute(
            "SELECT session_id FROM approvals WHERE resolved_at IS NULL AND session_id IS NOT NULL UNION "
            "SELECT id FROM checkpoints WHERE approval_id IN (SELECT id FROM approvals WHERE resolved_at IS NULL)"
        ).fetchall()
        needed = json.dumps(sorted({name for (run_id,) in waiting for name in (run_id, base_session(run_id))}))
        old = "updated_at < ? AND id NOT IN (SELECT value FROM json_each(?))"
        idle = f"{old} AND id NOT IN (SELECT id FROM leases)"
        connection.execute("DELETE FROM leases WHERE expires_at <= ?", (now,))
        of_old = f"id IN (SELECT id FROM checkpoints WHERE {old})"
        connection.execute(f"DELETE FROM checkpoint_history WHERE updated_at < ? OR {of_old}", (cutoff, cutoff, needed))
        checkpoints = connection.execute(f"DELETE FROM checkpoints WHERE {old}", (cutoff, needed)).rowcount
        delete_dead_branches(connection)
        for (key,) in connection.execute(f"SELECT key FROM sessions WHERE {idle}", (cutoff, needed)).fetchall():
            detach(connection, key)
        connection.execute(f"DELETE FROM messages WHERE session IN (SELECT key FROM sessions WHERE {idle})", (cutoff, needed))
        sessions = connection.execute(f"DELETE FROM sessions WHERE {idle}", (cutoff, needed)).rowcount
        approvals = connection.execute("DELETE FROM approvals WHERE resolved_at < ?", (cutoff,)).rowcount
        return PruneCounts(sessions=sessions, checkpoints=checkpoints, approvals=approvals)
