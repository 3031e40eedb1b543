"""Stores in files: one JSON file a record, written whole to a temporary file and renamed into place.

Made for one process. Two that write one record at the same moment are not coordinated: the last write wins and a history entry can
be lost; use `SqliteStore` for several processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import StorageError
from lousho_ray.ids import check_run_id
from lousho_ray.messages import Message
from lousho_ray.stores.entries import (
    DEFAULT_HISTORY_LIMIT,
    CheckpointFacts,
    HistoryEntry,
    PruneCounts,
    SessionInfo,
    base_session,
    check_history_limit,
    check_limit,
    check_prefix,
    cutoff_ms,
    iso,
    milliseconds,
    newest_page,
)
from lousho_ray.stores.file_approvals import FileApprovalStore
from lousho_ray.stores.folder import Folder, FolderThread
from lousho_ray.stores.json_form import MALFORMED, dumps, encode_message, own, read_message, read_object
from lousho_ray.stores.parts import ClosingStore


class FileSessionStore:
    """Transcripts as `<dir>/<id>.json`: an array of messages. `dir` is created at the first save.

    Args:
        dir: The folder.
        fsync: Whether a save waits until the disk has it; `False` is for tests.
    """

    def __init__(self, dir: str | os.PathLike[str], *, fsync: bool = True, clock: Clock = SYSTEM_CLOCK) -> None:
        self._folder = Folder(dir, fsync=fsync)
        self._thread = FolderThread()
        self._now = milliseconds(clock)

    async def load(self, id: str, /) -> list[Message] | None:
        """Reads a transcript.

        Raises:
            StorageError: `LOUSHO_SESSION_FILE_CORRUPT`: the file is not an array of messages; `LOUSHO_STORAGE_FAILED`: it cannot
                be read.
        """
        check_run_id(id, "id")
        return await self._thread.run(lambda: self._read(id))

    async def save(self, id: str, messages: Sequence[Message], /) -> None:
        """Replaces a transcript.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: a metadata value is not JSON, or the file cannot be written.
        """
        check_run_id(id, "id")
        kept = own(messages)

        def write() -> None:
            bodies = [encode_message(message, f"session '{id}'") for message in kept]
            self._folder.write(id, f"[{','.join(bodies)}]", self._now())

        await self._thread.run(write)

    async def delete(self, id: str, /) -> None:
        check_run_id(id, "id")
        await self._thread.run(lambda: self._folder.delete(id))

    def _read(self, id: str) -> list[Message] | None:
        text = self._folder.read(id)
        if text is None:
            return None
        path = str(self._folder.path(id))
        try:
            data = json.loads(text)
            if isinstance(data, list):
                return [read_message(item) for item in data]
            reason = f"it holds a {type(data).__name__}"
        except MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"
        raise StorageError(
            f"The session file {path} is not an array of messages ({reason}).", code="LOUSHO_SESSION_FILE_CORRUPT", path=path
        )

    def discard_older(self, cutoff: int, needed: set[str]) -> int:
        """Deletes the transcripts saved before `cutoff` that nothing needs."""
        return self._thread.run_blocking(lambda: _discard(self._folder, cutoff, needed))

    async def list(self, *, limit: int | None = 50, before: SessionInfo | None = None) -> list[SessionInfo]:
        """The saved sessions, newest first; `before` is the last one of the page before."""

        def read() -> list[SessionInfo]:
            found = [SessionInfo(id=key, updated_at=iso(at), messages=0) for key, at in self._folder.ages()]
            page = newest_page(found, limit, before)
            for info in page:
                info["messages"] = len(self._read(info["id"]) or [])
            return page

        return await self._thread.run(read)


class FileCheckpointStore:
    """Checkpoints as `<dir>/checkpoints/<id>.json`, their saves, oldest first, as `<dir>/checkpoint-history/<id>.json`."""

    def __init__(
        self,
        dir: str | os.PathLike[str],
        history_limit: int = DEFAULT_HISTORY_LIMIT,
        *,
        fsync: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._folder = Folder(Path(dir) / "checkpoints", fsync=fsync)
        self._history = Folder(Path(dir) / "checkpoint-history", fsync=fsync)
        self._limit = check_history_limit(history_limit)
        self._thread = FolderThread()
        self._now = milliseconds(clock)

    async def save(self, checkpoint: Mapping[str, Any], /) -> None:
        """Replaces the checkpoint of its `sessionId` and adds it to the history.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: not JSON, a lower `revision` than the stored one, or the file cannot be written.
        """
        facts = CheckpointFacts.of(checkpoint)
        text = dumps(dict(checkpoint), f"checkpoint '{facts.id}'")

        def write() -> None:
            stored = None if facts.revision is None else self._read(facts.id)
            is_new = facts.check_newer_than(None if stored is None else CheckpointFacts.of(stored).revision)
            now = self._now()
            if self._limit:
                entries = self._entries(facts.id)
                if not is_new and entries:
                    del entries[-1]
                entry = {"step": facts.step, "savedAt": iso(now), "status": facts.status, "checkpoint": json.loads(text)}
                self._history.write(facts.id, dumps([*entries, entry][-self._limit :], f"checkpoint '{facts.id}'"), now)
            self._folder.write(facts.id, text, now)

        await self._thread.run(write)

    async def load(self, id: str, /) -> dict[str, Any] | None:
        """Reads a checkpoint.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: the file is damaged or cannot be read.
        """
        check_run_id(id, "id")
        return await self._thread.run(lambda: self._read(id))

    async def delete(self, id: str, /, *, keep_history: bool = False) -> None:
        check_run_id(id, "id")

        def remove() -> None:
            self._folder.delete(id)
            if not keep_history:
                self._history.delete(id)

        await self._thread.run(remove)

    async def delete_prefix(self, prefix: str, /) -> int:
        """Deletes all checkpoints, with their histories, whose id starts with `prefix`. Returns how many runs that were."""
        check_prefix(prefix)

        def remove() -> int:
            ages = [*self._folder.ages(), *self._history.ages()]
            found = {key for key, _ in ages if key.startswith(prefix)}
            for key in found:
                self._folder.delete(key)
                self._history.delete(key)
            return len(found)

        return await self._thread.run(remove)

    async def history(self, id: str, /, *, limit: int | None = None) -> list[HistoryEntry]:
        """The kept saves of a run, newest first."""
        check_run_id(id, "id")
        check_limit(limit)
        entries = await self._thread.run(lambda: self._entries(id))
        return [
            HistoryEntry(step=entry["step"], saved_at=entry["savedAt"], status=entry["status"], checkpoint=entry["checkpoint"])
            for entry in entries[::-1][:limit]
        ]

    def _read(self, id: str) -> dict[str, Any] | None:
        text = self._folder.read(id)
        return None if text is None else read_object(text, f"checkpoint '{id}'", str(self._folder.path(id)))

    def _entries(self, id: str) -> list[dict[str, Any]]:
        """The kept saves, oldest first. A damaged history counts as none; the next save writes a new one."""
        text = self._history.read(id)
        try:
            found = [] if text is None else json.loads(text)
        except (ValueError, RecursionError):
            return []
        keys = {"step", "savedAt", "status", "checkpoint"}
        valid = isinstance(found, list) and all(isinstance(entry, dict) and keys <= entry.keys() for entry in found)
        return found if valid else []

    def needed_sessions(self, unresolved: set[str]) -> set[str]:
        """The ids of runs, and of their sessions, that wait on one of the unresolved approvals."""

        def read() -> set[str]:
            stored = {key: self._read(key) for key, _ in self._folder.ages()}
            return {key for key, record in stored.items() if record and record.get("approvalId") in unresolved}

        waiting = self._thread.run_blocking(read) if unresolved else set()
        return waiting | {base_session(key) for key in waiting}

    def discard_older(self, cutoff: int, needed: set[str]) -> int:
        """Deletes checkpoints saved before `cutoff` that nothing needs, and history entries older than it."""

        def remove() -> int:
            for key, at in self._history.ages():
                if at < cutoff and key not in needed:
                    self._history.delete(key)
                    continue
                entries = self._entries(key)
                kept = [entry for entry in entries if entry["savedAt"] >= iso(cutoff)]
                if kept != entries:
                    self._history.write(key, dumps(kept, f"checkpoint '{key}'"), at)
            return _discard(self._folder, cutoff, needed)

        return self._thread.run_blocking(remove)


class FileStore(ClosingStore):
    """All three parts in one folder. Make one with `file_store(dir)`."""

    def __init__(
        self,
        dir: str | os.PathLike[str],
        history_limit: int = DEFAULT_HISTORY_LIMIT,
        *,
        fsync: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.sessions = FileSessionStore(Path(dir) / "sessions", fsync=fsync, clock=clock)
        self.checkpoints = FileCheckpointStore(dir, history_limit, fsync=fsync, clock=clock)
        self.approvals = FileApprovalStore(dir, fsync=fsync, clock=clock)
        self._clock = clock

    def prune(self, older_than_ms: float) -> PruneCounts:
        cutoff = cutoff_ms(older_than_ms, milliseconds(self._clock)())
        unresolved, needed = self.approvals.needed_sessions()
        needed |= self.checkpoints.needed_sessions(unresolved)
        return PruneCounts(
            sessions=self.sessions.discard_older(cutoff, needed),
            checkpoints=self.checkpoints.discard_older(cutoff, needed),
            approvals=self.approvals.discard_older(cutoff),
        )

    def close(self) -> None:
        """Does nothing: no file stays open between two calls."""


def file_store(
    dir: str | os.PathLike[str], history_limit: int = DEFAULT_HISTORY_LIMIT, *, fsync: bool = True, clock: Clock = SYSTEM_CLOCK
) -> FileStore:
    """A store with all three parts as JSON files below `dir`, for one process. Each folder appears at its first write.

    Args:
        dir: The folder.
        history_limit: How many saves of each checkpoint to keep; 0 keeps none. Each is a whole copy.
        fsync: Whether a save waits until the disk has it; `False` is for tests.
        clock: Where the times of records come from.
    """
    return FileStore(dir, history_limit, fsync=fsync, clock=clock)


def _discard(folder: Folder, cutoff: int, needed: set[str]) -> int:
    return sum(folder.delete(key) for key, at in folder.ages() if at < cutoff and key not in needed)
