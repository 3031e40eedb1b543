"""The beginning and the end of a durable turn in a SQLite store, each as one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lousho_ray.ids import check_run_id
from lousho_ray.messages import Message
from lousho_ray.stores import lease as leases
from lousho_ray.stores.durable_turns import OpenedTurn
from lousho_ray.stores.entries import turn_key, turn_prefix
from lousho_ray.stores.json_form import SplitRecord, own

if TYPE_CHECKING:
    import sqlite3

    from lousho_ray.stores.sqlite_checkpoints import SqliteCheckpoints
    from lousho_ray.stores.sqlite_sessions import SqliteSessions
    from lousho_ray.stores.sqlite_writer import Database


class SqliteTurns:
    """Durable turns: see `DurableTurns`."""

    def __init__(self, database: Database, sessions: SqliteSessions, checkpoints: SqliteCheckpoints) -> None:
        self._database = database
        self._sessions = sessions
        self._checkpoints = checkpoints

    @property
    def parts(self) -> tuple[SqliteSessions, SqliteCheckpoints]:
        return self._sessions, self._checkpoints

    async def open(self, id: str, holder: str, ttl_ms: float, /, opening: Mapping[str, Any] | None = None) -> OpenedTurn:
        check_run_id(id, "id")
        leases.check_ttl(ttl_ms)

        def unit(connection: sqlite3.Connection) -> tuple[int | None, tuple[Message, ...] | None, SplitRecord | None]:
            fence = self._sessions.claim_in(connection, id, holder, ttl_ms)
            if fence is None:
                return None, None, None
            messages = self._sessions.load_in(connection, id)
            key = turn_key(id, len(messages or ()))
            record = self._checkpoints.load_in(connection, key)
            if record is None and opening is not None:
                self._checkpoints.save_in(connection, {**opening, "sessionId": key})
            return fence, messages, record

        fence, messages, record = await self._database.run(unit, write=True)
        key = turn_key(id, len(messages or ()))
        return OpenedTurn(
            fence,
            None if messages is None else list(own(messages)),
            None if record is None else record.join(f"checkpoint '{key}'", self._database.path),
        )

    async def end(
        self, id: str, messages: Sequence[Message], /, *, holder: str, fence: int, checkpoint: str, shortened: bool = False
    ) -> None:
        check_run_id(id, "id")
        check_run_id(checkpoint, "checkpoint")
        kept = own(messages)

        def unit(connection: sqlite3.Connection) -> None:
            self._checkpoints.delete_in(connection, checkpoint)
            if shortened:
                self._checkpoints.delete_prefix_in(connection, turn_prefix(id))
            self._sessions.end_in(connection, id, kept, holder, fence)

        await self._database.run(unit, write=True)
