"""Stores in memory: as durable as the process that holds them."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import StorageError
from lousho_ray.ids import check_run_id
from lousho_ray.messages import Message
from lousho_ray.stores import lease as leases
from lousho_ray.stores.entries import (
    DEFAULT_HISTORY_LIMIT,
    ApprovalClaim,
    ApprovalRecord,
    CheckpointFacts,
    HistoryEntry,
    PruneCounts,
    SessionInfo,
    approval_id_of,
    base_session,
    check_history_limit,
    check_limit,
    check_prefix,
    cutoff_ms,
    history_entry,
    iso,
    milliseconds,
    newest_page,
    session_of,
)
from lousho_ray.stores.json_form import SplitRecord, dumps, loads, own, split
from lousho_ray.stores.lease import Lease
from lousho_ray.stores.location import StoreLocation
from lousho_ray.stores.parts import ClosingStore, StoreLock


class MemorySessionStore:
    """Transcripts by id, in this process. The default of a session without a store."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._now = milliseconds(clock)
        self._lock = StoreLock()
        self._saved: dict[str, tuple[tuple[Message, ...], int]] = {}
        self._leases: dict[str, Lease] = {}
        self._fence = 0

    async def load(self, id: str, /) -> list[Message] | None:
        saved = self._saved.get(check_run_id(id, "id"))
        return None if saved is None else list(own(saved[0]))

    async def save(self, id: str, messages: Sequence[Message], /, *, fence: int | None = None) -> None:
        """Replaces the transcript.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: `fence` is outdated, or missing while another holder's lease is live.
        """
        check_run_id(id, "id")
        kept = own(messages)
        with self._lock:
            now = self._now()
            self._keep_lease(id, leases.after_save(self._leases.get(id), fence, now, id))
            self._saved[id] = (kept, now)

    async def delete(self, id: str, /, *, fence: int | None = None) -> None:
        """Forgets the transcript. A turn that runs on it under another lease can no longer save it."""
        with self._lock:
            self._saved.pop(check_run_id(id, "id"), None)
            self._keep_lease(id, leases.after_delete(self._leases.get(id), fence))

    async def list(self, *, limit: int | None = 50, before: SessionInfo | None = None) -> list[SessionInfo]:
        """The saved sessions, newest first; `before` is the last one of the page before."""
        with self._lock:
            found = [SessionInfo(id=key, updated_at=iso(at), messages=len(kept)) for key, (kept, at) in self._saved.items()]
        return newest_page(found, limit, before)

    async def claim(self, id: str, holder: str, ttl_ms: float) -> int | None:
        """Takes the lease on `id` for `ttl_ms`, or prolongs it for the holder who has it.

        Returns:
            The fencing number to save with, or `None` while another holder's lease is live.
        """
        leases.check_ttl(ttl_ms)
        with self._lock:
            taken = leases.claimed(self._leases.get(check_run_id(id, "id")), holder, ttl_ms, self._now(), self._next_fence)
            if taken is None:
                return None
            self._leases[id] = taken
            return taken.fence

    async def renew(self, id: str, holder: str, fence: int, ttl_ms: float) -> bool:
        """Prolongs a lease to `ttl_ms` from now; `False` when it was lost."""
        leases.check_ttl(ttl_ms)
        with self._lock:
            kept = leases.renewed(self._leases.get(id), holder, fence, ttl_ms, self._now())
            if kept is not None:
                self._leases[id] = kept
            return kept is not None

    async def holder(self, id: str) -> str | None:
        """Who has the lease on `id`, as the name it was claimed under; `None` when it is free."""
        with self._lock:
            lease = self._leases.get(check_run_id(id, "id"))
            return None if lease is None or self._now() >= lease.expires_at_ms else lease.holder

    async def release(self, id: str, holder: str, fence: int | None = None) -> None:
        """Gives a lease back; one that was lost already is left alone. Without a number: whichever one `holder` has, for a holder
        that is known to have died."""
        with self._lock:
            if leases.holds(self._leases.get(id), holder, fence):
                del self._leases[id]

    def _next_fence(self) -> int:
        self._fence += 1
        return self._fence

    def _keep_lease(self, id: str, lease: Lease | None) -> None:
        if lease is None:
            self._leases.pop(id, None)

    def discard_older(self, cutoff: int, needed: set[str]) -> int:
        """Deletes the transcripts saved before `cutoff` that nothing needs and no turn runs on."""
        with self._lock:
            now = self._now()
            self._leases = {key: lease for key, lease in self._leases.items() if now < lease.expires_at_ms}
            old = [key for key, (_, at) in self._saved.items() if at < cutoff and key not in needed and key not in self._leases]
            for key in old:
                del self._saved[key]
            return len(old)


@dataclass(slots=True)
class _Run:
    """A checkpoint and its history, oldest first."""

    current: tuple[CheckpointFacts, SplitRecord, int] | None = None
    history: deque[tuple[CheckpointFacts, SplitRecord, int]] = field(default_factory=deque)


class InMemoryCheckpointStore:
    """Checkpoints by run id, in this process, with the newest `history_limit` saves of each."""

    def __init__(self, history_limit: int = DEFAULT_HISTORY_LIMIT, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._limit = check_history_limit(history_limit)
        self._now = milliseconds(clock)
        self._lock = StoreLock()
        self._runs: dict[str, _Run] = {}

    async def save(self, checkpoint: Mapping[str, Any], /) -> None:
        """Replaces the checkpoint of its `sessionId` and adds it to the history.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: not JSON, or a lower `revision` than the stored one.
        """
        facts = CheckpointFacts.of(checkpoint)
        record = split(checkpoint, f"checkpoint '{facts.id}'")
        with self._lock:
            run = self._runs.setdefault(facts.id, _Run())
            current = run.current
            is_new = facts.check_newer_than(current[0].revision if current else None)
            entry = (facts, _share(record, current[1]) if current else record, self._now())
            run.current = entry
            if not is_new and run.history:
                run.history.pop()
            run.history.append(entry)
            while len(run.history) > self._limit:
                run.history.popleft()

    async def load(self, id: str, /) -> dict[str, Any] | None:
        run = self._runs.get(check_run_id(id, "id"))
        return None if run is None or run.current is None else run.current[1].join(f"checkpoint '{id}'")

    async def delete(self, id: str, /, *, keep_history: bool = False) -> None:
        with self._lock:
            run = self._runs.get(check_run_id(id, "id"))
            if run is not None and keep_history and run.history:
                run.current = None
            else:
                self._runs.pop(id, None)

    async def delete_prefix(self, prefix: str, /) -> int:
        """Deletes all checkpoints, with their histories, whose id starts with `prefix`. Returns how many runs that were."""
        check_prefix(prefix)
        with self._lock:
            found = [key for key in self._runs if key.startswith(prefix)]
            for key in found:
                del self._runs[key]
            return len(found)

    async def history(self, id: str, /, *, limit: int | None = None) -> list[HistoryEntry]:
        """The kept saves of a run, newest first."""
        check_limit(limit)
        with self._lock:
            run = self._runs.get(check_run_id(id, "id"))
            kept = [] if run is None else [*reversed(run.history)][:limit]
        return [history_entry(facts, record, at) for facts, record, at in kept]

    def needed_sessions(self, unresolved: set[str]) -> set[str]:
        """The ids of runs, and of their sessions, that wait on one of the unresolved approvals."""
        with self._lock:
            waiting = {key for key, run in self._runs.items() if run.current and run.current[0].approval_id in unresolved}
        return waiting | {base_session(key) for key in waiting}

    def discard_older(self, cutoff: int, needed: set[str]) -> int:
        """Deletes checkpoints saved before `cutoff` that nothing needs, and history entries older than it."""
        with self._lock:
            deleted = 0
            for key, run in list(self._runs.items()):
                old = run.current is not None and run.current[2] < cutoff and key not in needed
                deleted += old
                while run.history and (old or run.history[0][2] < cutoff):
                    run.history.popleft()
                if old or (run.current is None and not run.history):
                    del self._runs[key]
            return deleted


@dataclass(slots=True)
class _Pause:
    pending: str
    snapshot: SplitRecord
    session_id: str | None
    created_at: int
    claim: ApprovalClaim | None = None
    claimed_at: int | None = None


class InMemoryApprovalStore:
    """Pauses by approval id, in this process. The default of an agent without a store.

    The newest `CLAIMED_LIMIT` taken records are kept for `restore` and `claimed`.
    """

    CLAIMED_LIMIT = 100

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._now = milliseconds(clock)
        self._lock = StoreLock()
        self._open: dict[str, _Pause] = {}
        self._taken: dict[str, _Pause] = {}

    async def save(self, pending: Mapping[str, Any], snapshot: Mapping[str, Any], /) -> None:
        """Stores a pause as open. Saving a taken one again puts it back."""
        key = approval_id_of(pending)
        what = f"approval '{key}'"
        pause = _Pause(dumps(dict(pending), what), split(snapshot, what), session_of(pending, snapshot), self._now())
        with self._lock:
            self._taken.pop(key, None)
            self._open[key] = pause

    async def load(self, id: str, /) -> ApprovalRecord | None:
        """Reads an open pause without taking it."""
        pause = self._open.get(check_run_id(id, "id"))
        return None if pause is None else _record(pause, id)

    async def resolve(
        self, id: str, /, *, token: str | None = None, decision: Mapping[str, Any] | None = None
    ) -> ApprovalRecord | None:
        """Takes an open pause: of several callers exactly one gets it, the others `None`.

        `token` makes the call repeatable: the same token gets the same record again. `decision` is kept with the claim.
        """
        kept = None if decision is None else loads(dumps(dict(decision), f"the decision on approval '{id}'"), "decision")
        with self._lock:
            pause = self._open.pop(check_run_id(id, "id"), None)
            if pause is None:
                taken = self._taken.get(id)
                same = taken is not None and taken.claim is not None and token is not None and taken.claim["token"] == token
                return _record(taken, id) if taken is not None and same else None
            pause.claimed_at = self._now()
            pause.claim = ApprovalClaim(token=token, claimed_at=iso(pause.claimed_at), decision=kept)
            self._taken[id] = pause
            while len(self._taken) > self.CLAIMED_LIMIT:
                del self._taken[next(iter(self._taken))]
        return _record(pause, id)

    async def restore(self, id: str, /) -> bool:
        """Undoes a `resolve`: the pause is open again. `False` when there is nothing to put back."""
        with self._lock:
            pause = self._taken.pop(check_run_id(id, "id"), None)
            if pause is None:
                return False
            pause.claim = pause.claimed_at = None
            self._open[id] = pause
            return True

    async def claimed(self, id: str, /) -> ApprovalClaim | None:
        """Who took a pause and with which decision; `None` for an open or unknown one."""
        pause = self._taken.get(check_run_id(id, "id"))
        return None if pause is None or pause.claim is None else pause.claim.copy()

    async def delete(self, id: str, /) -> None:
        with self._lock:
            self._open.pop(check_run_id(id, "id"), None)
            self._taken.pop(id, None)

    async def list_pending(self, *, limit: int | None = 50, before: str | None = None) -> list[dict[str, Any]]:
        """The open pauses, newest first; `before` is the id of the last one of the page before."""
        check_limit(limit)
        with self._lock:
            found = sorted(self._open.items(), key=lambda item: (item[1].created_at, item[0]), reverse=True)
        ids = [key for key, _ in found]
        start = ids.index(before) + 1 if before in ids else 0
        return [loads(pause.pending, f"approval '{key}'") for key, pause in found[start:][:limit]]

    def needed_sessions(self) -> tuple[set[str], set[str]]:
        """The ids of the open pauses, and of the runs and sessions that these name."""
        with self._lock:
            runs = {pause.session_id for pause in self._open.values() if pause.session_id}
            return set(self._open), runs | {base_session(key) for key in runs}

    def discard_older(self, cutoff: int) -> int:
        """Deletes the pauses taken before `cutoff`."""
        with self._lock:
            old = [key for key, pause in self._taken.items() if pause.claimed_at is not None and pause.claimed_at < cutoff]
            for key in old:
                del self._taken[key]
            return len(old)


class MemoryStore(ClosingStore):
    """All three parts in memory. Make one with `memory_store()`."""

    def __init__(
        self, history_limit: int = DEFAULT_HISTORY_LIMIT, *, clock: Clock = SYSTEM_CLOCK, location: StoreLocation | None = None
    ) -> None:
        self.history_limit = check_history_limit(history_limit)
        self.location = location
        self.id = secrets.token_hex(8)
        self._clock = clock
        self._parts = (
            MemorySessionStore(clock=clock),
            InMemoryCheckpointStore(history_limit, clock=clock),
            InMemoryApprovalStore(clock=clock),
        )
        self.closed = False

    @property
    def sessions(self) -> MemorySessionStore:
        return self._open_parts()[0]

    @property
    def checkpoints(self) -> InMemoryCheckpointStore:
        return self._open_parts()[1]

    @property
    def approvals(self) -> InMemoryApprovalStore:
        return self._open_parts()[2]

    def prune(self, older_than_ms: float) -> PruneCounts:
        sessions, checkpoints, approvals = self._open_parts()
        cutoff = cutoff_ms(older_than_ms, milliseconds(self._clock)())
        unresolved, needed = approvals.needed_sessions()
        needed |= checkpoints.needed_sessions(unresolved)
        return PruneCounts(
            sessions=sessions.discard_older(cutoff, needed),
            checkpoints=checkpoints.discard_older(cutoff, needed),
            approvals=approvals.discard_older(cutoff),
        )

    def close(self) -> None:
        self.closed = True

    def _open_parts(self) -> tuple[MemorySessionStore, InMemoryCheckpointStore, InMemoryApprovalStore]:
        if self.closed:
            raise StorageError("This memory store is closed; create a new one with memory_store().")
        return self._parts


def memory_store(history_limit: int = DEFAULT_HISTORY_LIMIT, *, clock: Clock = SYSTEM_CLOCK) -> MemoryStore:
    """A store with all three parts whose contents live as long as the process.

    Args:
        history_limit: How many saves of each checkpoint to keep; 0 keeps none.
        clock: Where the time of leases and records comes from.
    """
    return MemoryStore(history_limit, clock=clock)


def _share(record: SplitRecord, last: SplitRecord) -> SplitRecord:
    """The record with the strings of the last save where they are equal: a history of extended lists stores each element once."""
    lists = {
        name: tuple(old if old == new else new for old, new in zip(last.lists[name], elements, strict=False))
        + elements[len(last.lists[name]) :]
        if name in last.lists
        else elements
        for name, elements in record.lists.items()
    }
    return SplitRecord(record.head, lists)


def _record(pause: _Pause, id: str) -> ApprovalRecord:
    return loads(pause.pending, f"approval '{id}'"), pause.snapshot.join(f"approval '{id}'")
