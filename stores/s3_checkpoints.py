"""The checkpoints part of an S3 store: one object a run, and one for each kept save (`checkpoint-history/<id>/<number>.json`).

Saves of a run are numbered by the store, from 1 up, so a save knows which kept one to delete without listing any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lousho_ray.clock import Clock
from lousho_ray.errors import StorageError
from lousho_ray.ids import check_run_id
from lousho_ray.stores.entries import CheckpointFacts, HistoryEntry, base_session, check_limit, check_prefix, iso, milliseconds
from lousho_ray.stores.folder import file_name, id_of
from lousho_ray.stores.json_form import dumps
from lousho_ray.stores.s3_bucket import MOST_TRIES, Bucket, Conflict, Document, Stored, pause, side_by_side
from lousho_ray.stores.s3_lanes import Lanes

KNOWN_RUNS = 10_000
"""Of how many runs the version last saved here is remembered: a save of one of them reads nothing."""


class S3Checkpoints:
    """Checkpoints by run id, with the newest `history_limit` saves of each."""

    def __init__(self, bucket: Bucket, lanes: Lanes, history_limit: int, clock: Clock) -> None:
        self._bucket = bucket
        self._lanes = lanes
        self._limit = history_limit
        self._now = milliseconds(clock)
        self._known: OrderedDict[str, Stored] = OrderedDict()

    async def save(self, checkpoint: Mapping[str, Any], /) -> None:
        """Replaces the checkpoint of its `sessionId` and adds it to the history.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: not JSON, a lower `revision` than the stored one, or the bucket cannot be
                written.
        """
        facts = CheckpointFacts.of(checkpoint)
        text = dumps(dict(checkpoint), f"checkpoint '{facts.id}'")
        await self._lanes.run(("checkpoints", facts.id), lambda: self._save(facts, text))

    async def load(self, id: str, /) -> dict[str, Any] | None:
        check_run_id(id, "id")
        return await self._lanes.run(("checkpoints", id), lambda: self._load(id))

    async def delete(self, id: str, /, *, keep_history: bool = False) -> None:
        check_run_id(id, "id")
        await self._lanes.run(("checkpoints", id), lambda: self._delete(id, keep_history))

    async def delete_prefix(self, prefix: str, /) -> int:
        """Deletes all checkpoints, with their histories, whose id starts with `prefix`. Returns how many runs that were."""
        check_prefix(prefix)
        return await self._lanes.run(("checkpoints", "", prefix), lambda: self._delete_prefix(prefix))

    async def history(self, id: str, /, *, limit: int | None = None) -> list[HistoryEntry]:
        """The kept saves of a run, newest first."""
        check_run_id(id, "id")
        check_limit(limit)
        return await self._lanes.run(("checkpoints", id), lambda: self._history(id, limit))

    # --------------------------------------------------------------------------------------------------- on the store's loop

    async def _save(self, facts: CheckpointFacts, text: str) -> None:
        """Replaces the checkpoint first: whether it is allowed to is decided there. A save sent again writes its entry again."""
        key, fields = _key(facts.id), {"checkpoint": text}
        found = self._known.get(facts.id)
        # A run of which nothing is known is taken for a new one: if it is not, creating it fails.
        trusted = self._bucket.conditional if found is None else self._is_newer(facts, found)
        for attempt in range(MOST_TRIES):
            await pause(attempt)
            if attempt or not trusted:
                found = await self._bucket.read(key, whole=False)
            head = self._next_head(facts, found)
            document = Document.of(head, fields)
            with suppress(Conflict):
                etag = await self._bucket.put(key, document, None if found is None else found.etag)
                self._remember(facts.id, Stored(etag, head, ""))
                await self._keep(facts.id, head["number"], document)
                return
        raise StorageError(
            f"Checkpoint '{facts.id}' was not saved: others changed it {MOST_TRIES} times meanwhile.", path=self._bucket.url
        )

    async def _keep(self, id: str, number: int, document: Document) -> None:
        """Adds a save to the history, and takes the one out that is now too many."""
        if not self._limit:
            return
        try:
            await self._bucket.put(_entry_key(id, number), document, None)
        except Conflict:  # The entry of a save that is sent again.
            await self._bucket.change(_entry_key(id, number), lambda found: (document, None))
        if number > self._limit:
            await self._bucket.delete([_entry_key(id, number - self._limit)])

    def _is_newer(self, facts: CheckpointFacts, known: Stored) -> bool:
        """Whether a save is newer than what is remembered; what is remembered may be outdated itself."""
        stored = known.head.get("revision")
        return stored is None or facts.revision is None or facts.revision > stored

    def _next_head(self, facts: CheckpointFacts, found: Stored | None) -> dict[str, Any]:
        stored = None if found is None or found.gone else found.head.get("revision")
        is_new = facts.check_newer_than(stored, self._bucket.url)
        number = 0 if found is None else int(found.head.get("number", 0))
        return {
            "number": number + is_new,
            "savedAt": self._now(),
            "revision": facts.revision,
            "step": facts.step,
            "status": facts.status,
            "approvalId": facts.approval_id,
        }

    async def _load(self, id: str) -> dict[str, Any] | None:
        found = await self._bucket.read(_key(id))
        return None if found is None or found.gone else self._checkpoint(found, id)

    async def _history(self, id: str, limit: int | None) -> list[HistoryEntry]:
        most = self._limit if limit is None else min(limit, self._limit)
        names = (await self._bucket.keys(_folder(id)))[::-1][:most]
        found = await self._bucket.read_all(f"{_folder(id)}/{name}" for name in names)
        return [
            HistoryEntry(
                step=entry.head["step"],
                saved_at=iso(entry.saved_at),
                status=entry.head["status"],
                checkpoint=self._checkpoint(entry, id),
            )
            for entry in found
            if entry is not None
        ]

    def _checkpoint(self, stored: Stored, id: str) -> dict[str, Any]:
        what, url = f"checkpoint '{id}'", self._bucket.url
        found = self._bucket.fields(stored, what).get("checkpoint")
        if not isinstance(found, dict):
            raise StorageError(f"{what} in {url} is damaged: it is no JSON object.", path=url)
        return found

    async def _delete(self, id: str, keep_history: bool) -> None:
        self._known.pop(id, None)
        if not keep_history:
            await self._bucket.delete([_key(id)])
            await self._bucket.delete([f"{_folder(id)}/{name}" for name in await self._bucket.keys(_folder(id))])
            return

        def decide(found: Stored | None) -> tuple[Document | None, None]:
            if found is None or found.gone:
                return None, None
            # The number stays, so that the next save comes after those that are kept.
            return Document({"gone": True, "number": found.head.get("number", 0), "savedAt": self._now()}), None

        await self._bucket.change(_key(id), decide)

    async def _delete_prefix(self, prefix: str) -> int:
        start = file_name(prefix).removesuffix(".json")
        current = await self._bucket.keys("checkpoints", prefix=start)
        kept = await self._bucket.keys("checkpoint-history", prefix=start)
        ids = {id_of(name) for name in current} | {id_of(name.partition("/")[0]) for name in kept}

        async def delete(id: str) -> None:
            async with self._lanes.inside(("checkpoints", id)):
                await self._delete(id, False)

        await side_by_side(delete, sorted(ids))
        return len(ids)

    def _remember(self, id: str, stored: Stored) -> None:
        self._known[id] = stored
        self._known.move_to_end(id)
        if len(self._known) > KNOWN_RUNS:
            self._known.popitem(last=False)

    # --------------------------------------------------------------------------------------------------------------- pruning

    async def needed_sessions(self, unresolved: set[str]) -> set[str]:
        """The ids of runs, and of their sessions, that wait on one of the unresolved approvals. Runs on the store's loop."""
        if not unresolved:
            return set()
        heads = await self._heads()
        waiting = {key for key, head in heads.items() if head.head.get("approvalId") in unresolved}
        return waiting | {base_session(key) for key in waiting}

    async def discard_older(self, cutoff: int, needed: set[str]) -> int:
        """Deletes checkpoints saved before `cutoff` that nothing needs, and history entries older than it."""
        heads = await self._heads()
        old = {key for key, head in heads.items() if head.saved_at < cutoff and key not in needed}
        histories: dict[str, list[str]] = {}
        for name in await self._bucket.keys("checkpoint-history"):
            folder, _, entry = name.partition("/")
            histories.setdefault(id_of(folder), []).append(entry)
        deleted = await side_by_side(lambda key: self._discard(key, heads[key], histories.get(key, [])), sorted(old))
        await side_by_side(lambda key: self._trim(key, histories[key], cutoff), sorted(histories.keys() - old))
        return sum(deleted)

    async def _discard(self, id: str, head: Stored, entries: list[str]) -> int:
        async with self._lanes.inside(("checkpoints", id)):
            if not await self._bucket.remove(_key(id), head.etag):
                return 0
            self._known.pop(id, None)
            await self._bucket.delete([f"{_folder(id)}/{entry}" for entry in entries])
            return int(not head.gone)

    async def _trim(self, id: str, entries: list[str], cutoff: int) -> None:
        """Deletes the entries of a history that are old; they are in the order they were saved."""
        for entry in entries:
            head = await self._bucket.read(f"{_folder(id)}/{entry}", whole=False)
            if head is not None and head.saved_at >= cutoff:
                return
            await self._bucket.delete([f"{_folder(id)}/{entry}"])

    async def _heads(self) -> dict[str, Stored]:
        names = await self._bucket.keys("checkpoints")
        found = await self._bucket.read_all((f"checkpoints/{name}" for name in names), whole=False)
        return {id_of(name): head for name, head in zip(names, found, strict=True) if head is not None}


def _key(id: str) -> str:
    return f"checkpoints/{file_name(id)}"


def _folder(id: str) -> str:
    return f"checkpoint-history/{file_name(id).removesuffix('.json')}"


def _entry_key(id: str, number: int) -> str:
    return f"{_folder(id)}/{number:010d}.json"
