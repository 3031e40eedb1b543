"""Approvals in files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import StorageError
from lousho_ray.ids import check_run_id
from lousho_ray.stores.entries import (
    ApprovalClaim,
    ApprovalRecord,
    approval_id_of,
    base_session,
    check_limit,
    iso,
    milliseconds,
    session_of,
)
from lousho_ray.stores.folder import Folder, FolderThread
from lousho_ray.stores.json_form import dumps, read_object


class FileApprovalStore:
    """Pauses as `<dir>/approvals/<id>.json`. A taken one has a `<id>.json.claim` beside it, created by exactly one caller."""

    def __init__(self, dir: str | os.PathLike[str], *, fsync: bool = True, clock: Clock = SYSTEM_CLOCK) -> None:
        self._folder = Folder(Path(dir) / "approvals", fsync=fsync)
        self._thread = FolderThread()
        self._now = milliseconds(clock)

    async def save(self, pending: Mapping[str, Any], snapshot: Mapping[str, Any], /) -> None:
        """Stores a pause as open. Saving a taken one again puts it back."""
        key, now = approval_id_of(pending), self._now()
        text = dumps({"pending": dict(pending), "snapshot": dict(snapshot)}, f"approval '{key}'")

        def write() -> None:
            self._folder.write(key, text, now)
            self._folder.unclaim(key)

        await self._thread.run(write)

    async def load(self, id: str, /) -> ApprovalRecord | None:
        """Reads an open pause without taking it."""
        check_run_id(id, "id")
        return await self._thread.run(lambda: None if self._folder.claim_of(id) is not None else self._read(id))

    async def resolve(
        self, id: str, /, *, token: str | None = None, decision: Mapping[str, Any] | None = None
    ) -> ApprovalRecord | None:
        """Takes an open pause: of several callers, in any number of processes, exactly one gets it, the others `None`.

        `token` makes the call repeatable: the same token gets the same record again. `decision` is kept with the claim.
        """
        check_run_id(id, "id")
        kept = None if decision is None else dict(decision)
        claim = dumps({"token": token, "at": iso(self._now()), "decision": kept}, f"the decision on approval '{id}'")

        def take() -> ApprovalRecord | None:
            record = self._read(id)
            if record is None or self._folder.claim(id, claim, self._now()):
                return record
            same = token is not None and self._claim(id).get("token") == token
            return record if same else None

        return await self._thread.run(take)

    async def restore(self, id: str, /) -> bool:
        """Undoes a `resolve`: the pause is open again. `False` when there is nothing to put back."""
        check_run_id(id, "id")
        return await self._thread.run(lambda: self._read(id) is not None and self._folder.unclaim(id))

    async def claimed(self, id: str, /) -> ApprovalClaim | None:
        """Who took a pause and with which decision; `None` for an open or unknown one."""
        check_run_id(id, "id")
        found = await self._thread.run(lambda: self._claim(id))
        if not found:
            return None
        return ApprovalClaim(token=found.get("token"), claimed_at=found["at"], decision=found.get("decision"))

    async def delete(self, id: str, /) -> None:
        check_run_id(id, "id")

        def remove() -> None:
            self._folder.delete(id)
            self._folder.unclaim(id)

        await self._thread.run(remove)

    async def list_pending(self, *, limit: int | None = 50, before: str | None = None) -> list[dict[str, Any]]:
        """The open pauses, newest first; `before` is the id of the last one of the page before."""
        check_limit(limit)

        def read() -> list[dict[str, Any]]:
            keys = [key for key, _ in sorted(self._folder.ages(), key=lambda age: (age[1], age[0]), reverse=True)]
            rest = keys[keys.index(before) + 1 :] if before in keys else keys
            records = (self._read(key) for key in rest if self._folder.claim_of(key) is None)
            return [record[0] for record in records if record is not None][:limit]

        return await self._thread.run(read)

    def _read(self, id: str) -> ApprovalRecord | None:
        text = self._folder.read(id)
        if text is None:
            return None
        path = self._folder.path(id)
        record = read_object(text, f"approval '{id}'", str(path))
        if not isinstance(record.get("pending"), dict) or not isinstance(record.get("snapshot"), dict):
            raise StorageError(f"The approval file {path} has no 'pending' and 'snapshot'.", path=str(path))
        return record["pending"], record["snapshot"]

    def _claim(self, id: str) -> dict[str, Any]:
        """The claim, or an empty one while its writer has not finished."""
        text = self._folder.claim_of(id)
        try:
            found = json.loads(text) if text else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def needed_sessions(self) -> tuple[set[str], set[str]]:
        """The ids of the open pauses, and of the runs and sessions that these name."""

        def read() -> dict[str, ApprovalRecord | None]:
            return {key: self._read(key) for key, _ in self._folder.ages() if self._folder.claim_of(key) is None}

        records = self._thread.run_blocking(read)
        runs = {run for record in records.values() if record and (run := session_of(*record))}
        return set(records), runs | {base_session(run) for run in runs}

    def discard_older(self, cutoff: int) -> int:
        """Deletes the pauses taken before `cutoff`, and claims whose record is gone."""

        def remove() -> int:
            old = [key for key, at in self._folder.claims() if at < cutoff]
            count = 0
            for key in old:
                count += self._folder.delete(key)
                self._folder.unclaim(key)
            return count

        return self._thread.run_blocking(remove)
