"""The sessions part of an S3 store.

A transcript is one object, a lease another (`leases/<id>.json`). Two rules make a fencing number hold although they are apart:

- A save replaces the very version that was there before its lease was looked at.
- Who takes over from a holder that did not give its lease back first writes the transcript anew, unchanged. A save of the old
  holder that is still on its way then finds another version than the one it is for, and fails.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lousho_ray.clock import Clock
from lousho_ray.errors import StorageError
from lousho_ray.ids import check_run_id
from lousho_ray.messages import Message
from lousho_ray.stores import lease as leases
from lousho_ray.stores.entries import SessionInfo, iso, milliseconds, newest_page
from lousho_ray.stores.folder import file_name, id_of
from lousho_ray.stores.json_form import MALFORMED, encode_message, own, read_message
from lousho_ray.stores.lease import Lease
from lousho_ray.stores.s3_bucket import MOST_TRIES, Bucket, Conflict, Document, Stored, pause, side_by_side
from lousho_ray.stores.s3_lanes import Lanes
from lousho_ray.stores.sqlite_sessions import LARGE_CHARS

T = TypeVar("T")

_log = logging.getLogger(__name__)

PRUNE_HOLDER = "lousho-prune-"
PRUNE_LEASE_MS = 30_000.0


@dataclass(frozen=True, slots=True)
class _LeaseRecord:
    """The lease of a session as it is stored.

    Attributes:
        lease: Who holds it.
        last: The highest number that was given out.
        unsettled: Whether a save of somebody who holds it no more may still be on its way.
        at: When it was written, in epoch milliseconds.
    """

    lease: Lease | None = None
    last: int = 0
    unsettled: bool = False
    at: int = 0

    @classmethod
    def of(cls, stored: Stored | None) -> _LeaseRecord:
        if stored is None:
            return cls()
        head = stored.head
        lease = None if head["holder"] is None else Lease(head["holder"], head["last"], head["expiresAt"])
        return cls(lease, head["last"], head["unsettled"], stored.saved_at)

    def document(self) -> Document:
        holder, expires_at = (None, 0) if self.lease is None else (self.lease.holder, self.lease.expires_at_ms)
        return Document(
            {"holder": holder, "last": self.last, "expiresAt": expires_at, "unsettled": self.unsettled, "savedAt": self.at}
        )


@dataclass(slots=True)
class _Held:
    """A lease that was claimed here.

    Attributes:
        fence: Its number.
        seen: Whether the transcript was read or written here since.
        base: The version that was; `None`: there was none.
        unsure: Whether a save failed that may still land.
    """

    fence: int
    seen: bool = False
    base: str | None = None
    unsure: bool = False


class S3Sessions:
    """Transcripts. `None` = never saved, `[]` = saved empty."""

    def __init__(self, bucket: Bucket, lanes: Lanes, clock: Clock) -> None:
        self._bucket = bucket
        self._lanes = lanes
        self._now = milliseconds(clock)
        self._held: dict[str, _Held] = {}
        self._warned: set[str] = set()

    async def load(self, id: str, /) -> list[Message] | None:
        check_run_id(id, "id")
        messages = await self._lanes.run(("sessions", id), lambda: self._load(id))
        return None if messages is None else list(own(messages))

    async def save(self, id: str, messages: Sequence[Message], /, *, fence: int | None = None) -> None:
        """Replaces the transcript; returns once the bucket has it.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: `fence` is outdated, or missing while another holder's lease is live; somebody
                without the lease has changed the transcript; a metadata value is not JSON; the bucket cannot be written.
        """
        check_run_id(id, "id")
        bodies = [encode_message(message, f"session '{id}'") for message in own(messages)]
        self._warn_of_size(id, bodies)
        text = f"[{','.join(bodies)}]"
        await self._lanes.run(("sessions", id), lambda: self._save(id, len(bodies), text, fence))

    async def delete(self, id: str, /, *, fence: int | None = None) -> None:
        """Deletes the transcript. A turn that runs on it under another lease can no longer save it."""
        check_run_id(id, "id")
        await self._lanes.run(("sessions", id), lambda: self._delete(id, fence))

    async def list(self, *, limit: int | None = 50, before: SessionInfo | None = None) -> list[SessionInfo]:
        """The saved sessions, newest first; `before` is the last one of the page before. Reads the head of every session."""
        newest_page([], limit, before)
        found = await self._lanes.run(("list",), self._heads)
        infos = [
            SessionInfo(id=key, updated_at=iso(head.saved_at), messages=int(head.head.get("count", 0)))
            for key, head in found.items()
            if not head.gone
        ]
        return newest_page(infos, limit, before)

    async def claim(self, id: str, holder: str, ttl_ms: float) -> int | None:
        """Takes the lease on `id` for `ttl_ms`, or prolongs it for the holder who has it.

        Returns:
            The fencing number to save with, or `None` while another holder's lease is live.
        """
        check_run_id(id, "id")
        leases.check_ttl(ttl_ms)
        return await self._lanes.run(("sessions", id), lambda: self._claim(id, holder, ttl_ms))

    async def renew(self, id: str, holder: str, fence: int, ttl_ms: float) -> bool:
        """Prolongs a lease to `ttl_ms` from now; `False` when it was lost."""
        check_run_id(id, "id")
        leases.check_ttl(ttl_ms)

        def decide(found: Stored | None) -> tuple[Document | None, bool]:
            record, now = _LeaseRecord.of(found), self._now()
            kept = leases.renewed(record.lease, holder, fence, ttl_ms, now)
            return (None, False) if kept is None else (_LeaseRecord(kept, record.last, record.unsettled, now).document(), True)

        # Not in the lane of the transcript: a renewal must not wait for a long save.
        return await self._lanes.run(("renewals", id), lambda: self._change_lease(id, decide))

    async def holder(self, id: str) -> str | None:
        """Who has the lease on `id`, as the name it was claimed under; `None` when it is free."""
        check_run_id(id, "id")
        found = await self._lanes.run(("sessions", id), lambda: self._bucket.read(_lease_key(id), whole=False))
        lease = _LeaseRecord.of(found).lease
        return None if lease is None or self._now() >= lease.expires_at_ms else lease.holder

    async def release(self, id: str, holder: str, fence: int | None = None) -> None:
        """Gives a lease back; one that was lost already is left alone. Without a number: whichever one `holder` has, for a holder
        that is known to have died."""
        check_run_id(id, "id")
        await self._lanes.run(("sessions", id), lambda: self._release(id, holder, fence))

    # --------------------------------------------------------------------------------------------------- on the store's loop

    async def _load(self, id: str) -> tuple[Message, ...] | None:
        found = await self._bucket.read(_key(id))
        if (held := self._held.get(id)) is not None:
            held.seen, held.base = True, None if found is None else found.etag
        if found is None or found.gone:
            return None
        what, url = f"session '{id}'", self._bucket.url
        try:
            return tuple(read_message(message) for message in self._bucket.fields(found, what)["messages"])
        except MALFORMED as error:
            raise StorageError(f"{what} in {url} is damaged: it is no list of messages ({error!r}).", path=url) from error

    async def _save(self, id: str, count: int, messages: str, fence: int | None) -> None:
        held = self._held.get(id)
        if held is None or held.fence != fence:
            held = _Held(fence or 0)  # claimed by another object, or no lease at all: nothing is known of the transcript
        known = held.seen
        for attempt in range(MOST_TRIES):
            await pause(attempt)
            if not held.seen:
                held.base = await self._bucket.etag(_key(id))
            try:
                await self._pass_lease(id, fence)
                head = {"savedAt": self._now(), "count": count, "fence": fence}
                document = Document.of(head, {"messages": messages})
                held.base, held.seen = await self._bucket.put(_key(id), document, held.base), True
                return
            except Conflict:
                await self._explain_conflict(id, held, fence, known)
            except StorageError as error:
                held.unsure = held.unsure or error.__cause__ is not None
                raise
        raise StorageError(f"Session '{id}' was not saved: others changed it {MOST_TRIES} times meanwhile.", path=self._bucket.url)

    async def _explain_conflict(self, id: str, held: _Held, fence: int | None, known: bool) -> None:
        """Prepares another attempt, unless somebody who had no right to has changed what the save is based on."""
        if not known:
            held.seen = False
            return
        found = await self._bucket.read(_key(id), whole=False)
        base = None if found is None else found.etag
        if base != held.base and (found is None or found.head.get("fence") != fence):
            await self._pass_lease(id, fence)
            raise StorageError(
                f"Session '{id}' was not saved: somebody without the lease has changed it since it was loaded. "
                "Load it again and claim it before the next save.",
                path=self._bucket.url,
            )
        held.base = base

    async def _pass_lease(self, id: str, fence: int | None) -> None:
        """Checks that a save under `fence` is allowed, and ends a lease that has run out before a save without one."""

        def decide(found: Stored | None) -> tuple[Document | None, None]:
            record, now = _LeaseRecord.of(found), self._now()
            pruned = record.lease is not None and record.lease.holder.startswith(PRUNE_HOLDER)
            if fence is None and pruned and record.lease is not None and now < record.lease.expires_at_ms:
                raise Conflict(id)
            kept = leases.after_save(record.lease, fence, now, id, self._bucket.url)
            ended = record.lease is not None and kept is None
            return (_LeaseRecord(None, record.last, True, now).document() if ended else None), None

        await self._change_lease(id, decide)

    async def _claim(self, id: str, holder: str, ttl_ms: float) -> int | None:
        def decide(found: Stored | None) -> tuple[Document | None, _LeaseRecord | None]:
            record, now = _LeaseRecord.of(found), self._now()
            # Above the last number and above those of a record that was deleted since.
            taken = leases.claimed(record.lease, holder, ttl_ms, now, lambda: max(record.last + 1, now))
            if taken is None:
                return None, None
            taken_over = record.lease is not None and taken.fence != record.lease.fence
            claimed = _LeaseRecord(taken, taken.fence, record.unsettled or taken_over, now)
            return claimed.document(), claimed

        claimed = await self._change_lease(id, decide)
        if claimed is None:
            return None
        if claimed.unsettled:
            await self._seal(id, claimed.last)
            await self._settle(id, holder, claimed.last)
        if id not in self._held or self._held[id].fence != claimed.last:
            self._held[id] = _Held(claimed.last)
        return claimed.last

    async def _seal(self, id: str, fence: int) -> None:
        """Gives the transcript a new version, so that no save that is for an older one can land any more."""

        def decide(found: Stored | None) -> tuple[Document, None]:
            if found is None:
                return Document({"gone": True, "savedAt": self._now(), "fence": fence}), None
            return found.with_head(fence=fence), None

        await self._bucket.change(_key(id), decide, whole=True)

    async def _settle(self, id: str, holder: str, fence: int) -> None:
        def decide(found: Stored | None) -> tuple[Document | None, None]:
            record = _LeaseRecord.of(found)
            held = leases.holds(record.lease, holder, fence)
            return (_LeaseRecord(record.lease, record.last, False, self._now()).document() if held else None), None

        await self._change_lease(id, decide)

    async def _release(self, id: str, holder: str, fence: int | None) -> None:
        held = self._held.get(id)

        def decide(found: Stored | None) -> tuple[Document | None, bool]:
            record = _LeaseRecord.of(found)
            if not leases.holds(record.lease, holder, fence):
                return None, held is not None and held.fence == fence
            # Only the object that made the saves under this lease knows that all of them have ended.
            ours = held is not None and held.fence == record.last
            unsettled = record.unsettled or held is None or not ours or held.unsure
            return _LeaseRecord(None, record.last, unsettled, self._now()).document(), ours

        if await self._change_lease(id, decide):
            self._held.pop(id, None)

    async def _delete(self, id: str, fence: int | None) -> None:
        def decide(found: Stored | None) -> tuple[Document | None, bool]:
            record, now = _LeaseRecord.of(found), self._now()
            if record.lease is not None and leases.after_delete(record.lease, fence) is None:
                return _LeaseRecord(None, record.last, True, now).document(), True
            return None, record.unsettled

        if await self._change_lease(id, decide):
            # A save may be on its way: an object that says «nothing» keeps it from bringing the transcript back.
            await self._bucket.change(_key(id), lambda found: (Document({"gone": True, "savedAt": self._now()}), None))
        else:
            await self._bucket.delete([_key(id)])
        held = self._held.get(id)
        if held is not None and held.fence == fence:
            held.seen = False

    async def _change_lease(self, id: str, decide: Callable[[Stored | None], tuple[Document | None, T]]) -> T:
        async with self._lanes.inside(("leases", id)):
            return await self._bucket.change(_lease_key(id), decide)

    async def _heads(self) -> dict[str, Stored]:
        names = await self._bucket.keys("sessions")
        found = await self._bucket.read_all((f"sessions/{name}" for name in names), whole=False)
        return {id_of(name): head for name, head in zip(names, found, strict=True) if head is not None}

    # --------------------------------------------------------------------------------------------------------------- pruning

    async def discard_older(self, cutoff: int, needed: set[str]) -> int:
        """Deletes the transcripts saved before `cutoff` that nothing needs and no turn runs on. Runs on the store's loop."""
        ids = {id_of(name) for folder in ("sessions", "leases") for name in await self._bucket.keys(folder)}
        return sum(await side_by_side(lambda key: self._discard(key, cutoff), sorted(ids - needed)))

    async def _discard(self, id: str, cutoff: int) -> int:
        async with self._lanes.inside(("sessions", id)):
            if not await self._is_old(id, cutoff):
                return 0
            holder = PRUNE_HOLDER + secrets.token_hex(8)
            fence = await self._claim(id, holder, PRUNE_LEASE_MS)
            if fence is None:
                return 0
            head = await self._bucket.read(_key(id), whole=False)
            if head is not None and head.saved_at >= cutoff:
                await self._release(id, holder, fence)
                return 0
            await self._bucket.delete([_key(id)])
            await self._bucket.delete([_lease_key(id)])
            self._held.pop(id, None)
            return int(head is not None and not head.gone)

    async def _is_old(self, id: str, cutoff: int) -> bool:
        head = await self._bucket.read(_key(id), whole=False)
        if head is not None and head.saved_at >= cutoff:
            return False
        record = _LeaseRecord.of(await self._bucket.read(_lease_key(id), whole=False))
        if record.lease is not None and self._now() < record.lease.expires_at_ms:
            return False
        return head is not None or record.at < cutoff

    def _warn_of_size(self, id: str, bodies: Sequence[str]) -> None:
        chars = sum(map(len, bodies))
        if chars > LARGE_CHARS and id not in self._warned:
            self._warned.add(id)
            _log.warning("Session '%s' holds %d MB of messages; compaction keeps transcripts short.", id, chars // 1_000_000)


def _key(id: str) -> str:
    return f"sessions/{file_name(id)}"


def _lease_key(id: str) -> str:
    return f"leases/{file_name(id)}"
