"""Undo for the file tools: what each turn of a session changed, and how to go back to before a turn.

Only writes of the file tools are known, not those of shell commands, and the conversation is not rewound.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.workspace.paths import WorkspaceError
from lousho_ray.tools.workspace.provider import FsProvider

DEFAULT_SESSION = "default"
_TURN_SUFFIX = re.compile(r"\.turn-\d+$")


@dataclass(frozen=True, slots=True)
class Backup:
    """A file as it was before the first write of a turn, and the hash of what the agent wrote last in that turn.

    `content` is base64; `None` with `existed` = too large to keep.
    """

    existed: bool
    content: str | None = None
    mode: int | None = None
    written: str | None = None


@dataclass(frozen=True, slots=True)
class ChangedTurn:
    """One turn and the paths it changed, sorted."""

    turn: int
    paths: list[str]


@dataclass(frozen=True, slots=True)
class Rewind:
    """What a rewind did, or would do. `skipped` maps a path to `changed-since` or `too-large`."""

    dry_run: bool
    restored: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class WorkspaceCheckpointStore(Protocol):
    """Keeps one JSON object per session."""

    def load(self, session_id: str, /) -> Mapping[str, Any] | None: ...

    def save(self, session_id: str, data: Mapping[str, Any], /) -> None: ...


class MemoryWorkspaceCheckpointStore:
    def __init__(self) -> None:
        self._sessions: dict[str, str] = {}

    def load(self, session_id: str, /) -> Mapping[str, Any] | None:
        kept = self._sessions.get(session_id)
        return None if kept is None else json.loads(kept)

    def save(self, session_id: str, data: Mapping[str, Any], /) -> None:
        self._sessions[session_id] = json.dumps(data)


class FileWorkspaceCheckpointStore:
    """One JSON file per session in `directory`, replaced as a whole so that a crash leaves the old one."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def load(self, session_id: str, /) -> Mapping[str, Any] | None:
        try:
            loaded: Mapping[str, Any] = json.loads(self._file(session_id).read_text("utf-8"))
        except FileNotFoundError:
            return None
        return loaded

    def save(self, session_id: str, data: Mapping[str, Any], /) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.directory, prefix=".tmp-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(temporary, self._file(session_id))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def _file(self, session_id: str) -> Path:
        return self.directory / f"{quote(session_id, safe='')}.json"


class WorkspaceCheckpoints:
    """Remembers files before the agent changes them. Give it to `create_fs_tools(checkpoints=...)`.

    Args:
        fs: The workspace.
        max_turns: How many turns with changes are kept per session; the oldest go first.
        max_file_bytes: The content of larger files is not kept, so they cannot be restored.
        store: Where backups are kept: in memory, or `FileWorkspaceCheckpointStore(directory)`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for a limit below 1.
    """

    def __init__(
        self, fs: FsProvider, *, max_turns: int = 20, max_file_bytes: int = 1_000_000, store: WorkspaceCheckpointStore | None = None
    ) -> None:
        for name, value in (("max_turns", max_turns), ("max_file_bytes", max_file_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"`{name}` is {value!r}; it is a whole number from 1.", field=name)
        self.fs = fs
        self.max_turns, self.max_file_bytes = max_turns, max_file_bytes
        self._store = MemoryWorkspaceCheckpointStore() if store is None else store
        self._lock = threading.RLock()

    def write(self, ctx: ToolContext, path: str, data: bytes) -> None:
        """Writes a file and remembers what was there before. `path` is resolved."""
        session, turn = _session_of(ctx.session_id), _turn_of(ctx)
        with self._lock:
            log = _Log.load(self._store, session)
            paths = log.turns.setdefault(turn, {})
            before = paths.get(path) or self._backup(path)
            paths[path] = before
            self._keep(log, session)
            self.fs.write(path, data)
            paths[path] = Backup(before.existed, before.content, before.mode, _hash(data))
            self._store.save(session, log.to_dict())

    def list(self, session_id: str | None = None) -> list[ChangedTurn]:
        """The turns with changes that are kept, oldest first."""
        log = _Log.load(self._store, _session_of(session_id))
        return [ChangedTurn(turn, sorted(paths)) for turn, paths in sorted(log.turns.items())]

    def rewind(self, to_turn: int, session_id: str | None = None, *, dry_run: bool = False, force: bool = False) -> Rewind:
        """Puts every file that turn `to_turn` or a later one changed back to how it was before; files the agent made are deleted.

        A file that somebody changed since is skipped unless `force`. The rewound turns are forgotten, skipped files included.

        Raises:
            WorkspaceError: When `to_turn` is older than what is kept.
        """
        session = _session_of(session_id)
        with self._lock:
            log = _Log.load(self._store, session)
            if to_turn < log.first_kept:
                raise WorkspaceError(f"Turn {to_turn} is no longer kept; the oldest turn to go back to is {log.first_kept}.")
            plan = Rewind(dry_run)
            undo: list[tuple[str, Backup]] = []
            for path, (backup, written) in sorted(_changes(log, to_turn).items()):
                reason = self._obstacle(path, backup, written, force)
                if reason is not None:
                    plan.skipped[path] = reason
                    continue
                undo.append((path, backup))
                (plan.restored if backup.existed else plan.deleted).append(path)
            if not dry_run:
                for path, backup in undo:
                    self._undo(path, backup)
                log.turns = {turn: paths for turn, paths in log.turns.items() if turn < to_turn}
                self._store.save(session, log.to_dict())
        return plan

    def _backup(self, path: str) -> Backup:
        entry = self.fs.stat(path)
        if entry is None:
            return Backup(existed=False)
        if entry.size_bytes > self.max_file_bytes:
            return Backup(existed=True, mode=entry.mode)
        return Backup(True, base64.b64encode(self.fs.read(path)).decode("ascii"), entry.mode)

    def _keep(self, log: _Log, session: str) -> None:
        """Saves the backup before the write, so that a crash between the two loses nothing."""
        for turn in sorted(log.turns)[: -self.max_turns]:
            del log.turns[turn]
            log.first_kept = turn + 1
        self._store.save(session, log.to_dict())

    def _obstacle(self, path: str, backup: Backup, written: str | None, force: bool) -> str | None:
        """Why a file is not put back."""
        if backup.existed and backup.content is None:
            return "too-large"
        entry = self.fs.stat(path)
        present = None if entry is None else _hash(self.fs.read(path))
        if force or present == written or (present is None and not backup.existed):
            return None
        return "changed-since"

    def _undo(self, path: str, backup: Backup) -> None:
        if backup.content is not None:
            self.fs.write(path, base64.b64decode(backup.content), backup.mode)
        elif self.fs.stat(path) is not None:
            self.fs.remove(path)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())


@dataclass(slots=True)
class _Log:
    """The backups of one session: turn to path to backup. Turns below `first_kept` were dropped."""

    turns: dict[int, dict[str, Backup]] = field(default_factory=dict)
    first_kept: int = 0

    @classmethod
    def load(cls, store: WorkspaceCheckpointStore, session: str) -> _Log:
        data = store.load(session) or {}
        turns = {int(turn): {path: Backup(**kept) for path, kept in paths.items()} for turn, paths in data.get("turns", {}).items()}
        return cls(turns, int(data.get("firstKept", 0)))

    def to_dict(self) -> dict[str, Any]:
        turns = {str(turn): {path: asdict(kept) for path, kept in paths.items()} for turn, paths in self.turns.items()}
        return {"firstKept": self.first_kept, "turns": turns}


def _changes(log: _Log, to_turn: int) -> dict[str, tuple[Backup, str | None]]:
    """Per path: the file before the first of the turns, and the hash of what the agent wrote last."""
    changes: dict[str, tuple[Backup, str | None]] = {}
    for turn in sorted(turn for turn in log.turns if turn >= to_turn):
        for path, backup in log.turns[turn].items():
            first = changes[path][0] if path in changes else backup
            changes[path] = (first, backup.written)
    return changes


def _session_of(session_id: str | None) -> str:
    return DEFAULT_SESSION if session_id is None else _TURN_SUFFIX.sub("", session_id)


def _turn_of(ctx: ToolContext) -> int:
    """The index, from 0, of the user message that is being answered; 0 outside a session."""
    if ctx.session_id is None:
        return 0
    return max(0, sum(message.role == "user" for message in ctx.messages) - 1)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
