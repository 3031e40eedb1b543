"""The approvals part of a SQLite store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lousho_ray.clock import Clock
from lousho_ray.ids import check_run_id
from lousho_ray.stores.entries import (
    ApprovalClaim,
    ApprovalRecord,
    approval_id_of,
    check_limit,
    iso,
    milliseconds,
    session_of,
)
from lousho_ray.stores.json_form import dumps, read_object

if TYPE_CHECKING:
    import sqlite3

    from lousho_ray.stores.sqlite_writer import Database


class SqliteApprovals:
    """Pauses by approval id. A taken one stays in the file until it is pruned, but is no longer loadable."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._now = milliseconds(clock)

    async def save(self, pending: Mapping[str, Any], snapshot: Mapping[str, Any], /) -> None:
        """Stores a pause as open. Saving a taken one again puts it back."""
        key, now = approval_id_of(pending), self._now()
        what = f"approval '{key}'"
        values = (key, dumps(dict(pending), what), dumps(dict(snapshot), what), session_of(pending, snapshot), now, now)
        query = (
            "INSERT INTO approvals (id, pending, snapshot, session_id, created_at, updated_at) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET pending = excluded.pending, snapshot = excluded.snapshot, "
            "session_id = excluded.session_id, updated_at = excluded.updated_at, resolved_at = NULL, token = NULL, decision = NULL"
        )
        await self._database.run(lambda connection: connection.execute(query, values).rowcount, write=True)

    async def load(self, id: str, /) -> ApprovalRecord | None:
        """Reads an open pause without taking it."""
        check_run_id(id, "id")
        query = "SELECT pending, snapshot FROM approvals WHERE id = ? AND resolved_at IS NULL"
        return self._record(id, await self._database.run(lambda connection: connection.execute(query, (id,)).fetchone()))

    async def resolve(
        self, id: str, /, *, token: str | None = None, decision: Mapping[str, Any] | None = None
    ) -> ApprovalRecord | None:
        """Takes an open pause: of several callers, in any number of processes, exactly one gets it, the others `None`.

        `token` makes the call repeatable: the same token gets the same record again. `decision` is kept with the claim.
        """
        check_run_id(id, "id")
        kept = None if decision is None else dumps(dict(decision), f"the decision on approval '{id}'")

        def unit(connection: sqlite3.Connection) -> Any:
            query = "UPDATE approvals SET resolved_at = ?, token = ?, decision = ? WHERE id = ? AND resolved_at IS NULL"
            won = connection.execute(query, (self._now(), token, kept, id)).rowcount == 1
            same_token = "" if won else " AND token = ?"
            query = f"SELECT pending, snapshot FROM approvals WHERE id = ?{same_token}"
            return connection.execute(query, (id,) if won else (id, token)).fetchone()

        return self._record(id, await self._database.run(unit, write=True))

    async def restore(self, id: str, /) -> bool:
        """Undoes a `resolve`: the pause is open again. `False` when there is nothing to put back."""
        check_run_id(id, "id")
        query = "UPDATE approvals SET resolved_at = NULL, token = NULL, decision = NULL WHERE id = ? AND resolved_at IS NOT NULL"
        return await self._database.run(lambda connection: connection.execute(query, (id,)).rowcount == 1, write=True)

    async def claimed(self, id: str, /) -> ApprovalClaim | None:
        """Who took a pause and with which decision; `None` for an open or unknown one."""
        check_run_id(id, "id")
        query = "SELECT token, resolved_at, decision FROM approvals WHERE id = ? AND resolved_at IS NOT NULL"
        row = await self._database.run(lambda connection: connection.execute(query, (id,)).fetchone())
        if row is None:
            return None
        token, at, decision = row
        kept = None if decision is None else read_object(decision, f"the decision on approval '{id}'", self._database.path)
        return ApprovalClaim(token=token, claimed_at=iso(at), decision=kept)

    async def delete(self, id: str, /) -> None:
        check_run_id(id, "id")
        query = "DELETE FROM approvals WHERE id = ?"
        await self._database.run(lambda connection: connection.execute(query, (id,)).rowcount, write=True)

    async def list_pending(self, *, limit: int | None = 50, before: str | None = None) -> list[dict[str, Any]]:
        """The open pauses, newest first; `before` is the id of the last one of the page before."""
        count = -1 if check_limit(limit) is None else limit
        query = (
            "SELECT id, pending FROM approvals WHERE resolved_at IS NULL AND (? IS NULL OR "
            "(created_at, id) < (SELECT created_at, id FROM approvals WHERE id = ?)) ORDER BY created_at DESC, id DESC LIMIT ?"
        )
        rows = await self._database.run(lambda connection: connection.execute(query, (before, before, count)).fetchall())
        return [read_object(pending, f"approval '{key}'", self._database.path) for key, pending in rows]

    def _record(self, id: str, row: tuple[str, str] | None) -> ApprovalRecord | None:
        if row is None:
            return None
        what, path = f"approval '{id}'", self._database.path
        return read_object(row[0], what, path), read_object(row[1], what, path)
