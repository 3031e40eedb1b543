"""The approvals part of an S3 store: one object a pause, which also holds who took it.

Taking, putting back and deleting are conditional writes of that one object, so each of them happens once and in one order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lousho_ray.clock import Clock
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
from lousho_ray.stores.folder import file_name, id_of
from lousho_ray.stores.json_form import dumps, loads
from lousho_ray.stores.s3_bucket import Bucket, Document, Stored, side_by_side
from lousho_ray.stores.s3_lanes import Lanes


class S3Approvals:
    """Pauses by approval id. A taken one stays in the bucket until it is pruned, but is no longer loadable."""

    def __init__(self, bucket: Bucket, lanes: Lanes, clock: Clock) -> None:
        self._bucket = bucket
        self._lanes = lanes
        self._now = milliseconds(clock)

    async def save(self, pending: Mapping[str, Any], snapshot: Mapping[str, Any], /) -> None:
        """Stores a pause as open. Saving a taken one again puts it back."""
        key = approval_id_of(pending)
        what = f"approval '{key}'"
        fields = {"pending": dumps(dict(pending), what), "snapshot": dumps(dict(snapshot), what)}
        run = session_of(pending, snapshot)

        def decide(found: Stored | None) -> tuple[Document, None]:
            now = self._now()
            created_at = now if found is None or found.gone else found.head["createdAt"]
            return Document.of({"createdAt": created_at, "savedAt": now, "run": run, "claim": None}, fields), None

        await self._lanes.run(("approvals", key), lambda: self._bucket.change(_key(key), decide))

    async def load(self, id: str, /) -> ApprovalRecord | None:
        """Reads an open pause without taking it."""
        check_run_id(id, "id")
        found = await self._lanes.run(("approvals", id), lambda: self._bucket.read(_key(id)))
        return None if found is None or not _is_open(found) else self._record(found, id)

    async def resolve(
        self, id: str, /, *, token: str | None = None, decision: Mapping[str, Any] | None = None
    ) -> ApprovalRecord | None:
        """Takes an open pause: of several callers, in any number of processes, exactly one gets it, the others `None`.

        `token` makes the call repeatable: the same token gets the same record again. `decision` is kept with the claim.
        """
        check_run_id(id, "id")
        what = f"the decision on approval '{id}'"
        kept = None if decision is None else loads(dumps(dict(decision), what), what)

        def decide(found: Stored | None) -> tuple[Document | None, ApprovalRecord | None]:
            if found is None or found.gone:
                return None, None
            if (claim := found.head["claim"]) is not None:
                return None, self._record(found, id) if token is not None and claim["token"] == token else None
            claim = {"token": token, "at": self._now(), "decision": kept}
            return found.with_head(claim=claim), self._record(found, id)

        return await self._lanes.run(("approvals", id), lambda: self._bucket.change(_key(id), decide, whole=True))

    async def restore(self, id: str, /) -> bool:
        """Undoes a `resolve`: the pause is open again. `False` when there is nothing to put back."""
        check_run_id(id, "id")

        def decide(found: Stored | None) -> tuple[Document | None, bool]:
            if found is None or found.gone or _is_open(found):
                return None, False
            return found.with_head(claim=None), True

        return await self._lanes.run(("approvals", id), lambda: self._bucket.change(_key(id), decide, whole=True))

    async def claimed(self, id: str, /) -> ApprovalClaim | None:
        """Who took a pause and with which decision; `None` for an open or unknown one."""
        check_run_id(id, "id")
        found = await self._lanes.run(("approvals", id), lambda: self._bucket.read(_key(id), whole=False))
        claim = None if found is None or found.gone else found.head["claim"]
        if claim is None:
            return None
        return ApprovalClaim(token=claim["token"], claimed_at=iso(claim["at"]), decision=claim["decision"])

    async def delete(self, id: str, /) -> None:
        check_run_id(id, "id")
        await self._lanes.run(("approvals", id), lambda: self._bucket.delete([_key(id)]))

    async def list_pending(self, *, limit: int | None = 50, before: str | None = None) -> list[dict[str, Any]]:
        """The open pauses, newest first; `before` is the id of the last one of the page before. Reads the head of every pause."""
        check_limit(limit)
        return await self._lanes.run(("list",), lambda: self._list_pending(limit, before))

    # --------------------------------------------------------------------------------------------------- on the store's loop

    async def _list_pending(self, limit: int | None, before: str | None) -> list[dict[str, Any]]:
        heads = {key: head for key, head in (await self._heads()).items() if not head.gone}
        ids = sorted(heads, key=lambda key: (heads[key].head["createdAt"], key), reverse=True)
        rest = ids[ids.index(before) + 1 :] if before in ids else ids
        wanted = [key for key in rest if _is_open(heads[key])][:limit]
        found = await self._bucket.read_all(map(_key, wanted))
        still_open = ((key, stored) for key, stored in zip(wanted, found, strict=True) if stored is not None and _is_open(stored))
        return [self._record(stored, key)[0] for key, stored in still_open]

    def _record(self, stored: Stored, id: str) -> ApprovalRecord:
        what, url = f"approval '{id}'", self._bucket.url
        fields = self._bucket.fields(stored, what)
        pending, snapshot = fields.get("pending"), fields.get("snapshot")
        if not isinstance(pending, dict) or not isinstance(snapshot, dict):
            raise StorageError(f"{what} in {url} is damaged: it has no 'pending' and 'snapshot'.", path=url)
        return pending, snapshot

    async def _heads(self) -> dict[str, Stored]:
        names = await self._bucket.keys("approvals")
        found = await self._bucket.read_all((f"approvals/{name}" for name in names), whole=False)
        return {id_of(name): head for name, head in zip(names, found, strict=True) if head is not None}

    # --------------------------------------------------------------------------------------------------------------- pruning

    async def needed_sessions(self) -> tuple[set[str], set[str]]:
        """The ids of the open pauses, and of the runs and sessions that these name. Runs on the store's loop."""
        waiting = {key: head for key, head in (await self._heads()).items() if _is_open(head)}
        runs = {run for head in waiting.values() if isinstance(run := head.head["run"], str)}
        return set(waiting), runs | {base_session(run) for run in runs}

    async def discard_older(self, cutoff: int) -> int:
        """Deletes the pauses taken before `cutoff`."""
        heads = await self._heads()
        claims = {key: head.head["claim"] for key, head in heads.items() if not head.gone}
        taken = [key for key, claim in claims.items() if claim is not None and claim["at"] < cutoff]

        async def discard(id: str) -> bool:
            async with self._lanes.inside(("approvals", id)):
                return await self._bucket.remove(_key(id), heads[id].etag)

        return sum(await side_by_side(discard, taken))


def _key(id: str) -> str:
    return f"approvals/{file_name(id)}"


def _is_open(stored: Stored) -> bool:
    return not stored.gone and stored.head["claim"] is None
