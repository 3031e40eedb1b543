"""The tables of a SQLite store, opening its file, and what each way to fail says."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from lousho_ray.errors import StorageError

MEMORY = ":memory:"
APPLICATION_ID = 0x4C4F5553
"""Marks a file as ours (`LOUS`), beside the schema version in `user_version`."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # `version` is a new random number at each save: equal numbers mean equal content, also after a delete and a new start.
        """CREATE TABLE sessions (
            key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, version INTEGER NOT NULL, count INTEGER NOT NULL,
            updated_at INTEGER NOT NULL)""",
        """CREATE TABLE messages (
            session INTEGER NOT NULL, position INTEGER NOT NULL, body TEXT NOT NULL,
            PRIMARY KEY (session, position)) WITHOUT ROWID""",
        "CREATE INDEX sessions_by_age ON sessions (updated_at, id)",
        """CREATE TABLE leases (
            id TEXT PRIMARY KEY, holder TEXT NOT NULL, fence INTEGER NOT NULL, expires_at INTEGER NOT NULL) WITHOUT ROWID""",
        "CREATE TABLE fences (last INTEGER NOT NULL)",
        "INSERT INTO fences VALUES (0)",
        # `lists` maps the name of each list that is kept element by element to [branch, count] in `checkpoint_lists`.
        """CREATE TABLE checkpoints (
            id TEXT PRIMARY KEY, version INTEGER NOT NULL, body TEXT NOT NULL, lists TEXT NOT NULL, step INTEGER NOT NULL,
            status TEXT NOT NULL, revision INTEGER, approval_id TEXT, updated_at INTEGER NOT NULL)""",
        """CREATE TABLE checkpoint_history (
            entry INTEGER PRIMARY KEY, id TEXT NOT NULL, body TEXT NOT NULL, lists TEXT NOT NULL, step INTEGER NOT NULL,
            status TEXT NOT NULL, updated_at INTEGER NOT NULL)""",
        "CREATE INDEX checkpoint_history_by_id ON checkpoint_history (id, entry)",
        """CREATE TABLE checkpoint_lists (
            branch INTEGER NOT NULL, position INTEGER NOT NULL, body TEXT NOT NULL,
            PRIMARY KEY (branch, position)) WITHOUT ROWID""",
        """CREATE TABLE approvals (
            id TEXT PRIMARY KEY, pending TEXT NOT NULL, snapshot TEXT NOT NULL, session_id TEXT, created_at INTEGER NOT NULL,
            updated_at INTEGER NOT NULL, resolved_at INTEGER, token TEXT, decision TEXT)""",
    ),
    (
        # The elements of a branch from `shift` on are the first `length` messages of a session.
        """CREATE TABLE checkpoint_bases (
            branch INTEGER PRIMARY KEY, session INTEGER NOT NULL, shift INTEGER NOT NULL, length INTEGER NOT NULL)""",
        "CREATE INDEX checkpoint_bases_by_session ON checkpoint_bases (session)",
    ),
)
"""One tuple of statements per schema version; never edited once released, only added to."""

_OUR_TABLES = {name for statements in MIGRATIONS for name in re.findall(r"CREATE TABLE (\w+)", " ".join(statements))}


def open_database(path: str, busy_timeout_ms: int, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> sqlite3.Connection:
    """Opens the file, creates or migrates its tables and sets it up for durable commits.

    Raises:
        StorageError, sqlite3.Error, OSError: `failure` puts the last two into words.
    """
    deadline = time.monotonic() + busy_timeout_ms / 1000
    if path != MEMORY:
        check_file(path, len(migrations))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _check_version_in_log(path, busy_timeout_ms, len(migrations))
    connection = sqlite3.connect(path, timeout=busy_timeout_ms / 1000, isolation_level=None, cached_statements=256)
    try:
        while True:
            try:
                # Switching to WAL does not wait for the busy timeout when two processes open a new file at once.
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
                connection.execute("PRAGMA synchronous = FULL")
                _migrate(connection, path, migrations)
                return connection
            except sqlite3.OperationalError as error:
                if not is_busy(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
    except BaseException:
        connection.close()
        raise


def check_file(path: str, newest: int = len(MIGRATIONS)) -> None:
    """Looks at the place without opening a database: nothing is created or changed.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: a folder, not reachable, not writable, not SQLite, or of a newer version.
    """
    if os.path.isdir(path):
        raise StorageError(f"Cannot open the SQLite store {path}: it is a folder; pass the path of a file in it.", path=path)
    existing = next(folder for folder in Path(path).absolute().parents if folder.exists())
    if not existing.is_dir():
        raise StorageError(f"Cannot open the SQLite store {path}: {existing} is a file, not a folder.", path=path)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(f"Cannot open the SQLite store {path}: no permission to write in the folder {existing}.", path=path)
    if not os.path.exists(path):
        if os.path.islink(path) and not os.path.isdir(target := os.path.dirname(os.path.realpath(path))):
            raise StorageError(f"Cannot open the SQLite store {path}: it is a link into {target}, which is no folder.", path=path)
        return
    if not os.path.isfile(path):  # opening a pipe would wait for ever
        raise StorageError(f"Cannot open the SQLite store {path}: it is a device, a pipe or a socket, not a file.", path=path)
    if not os.access(path, os.R_OK | os.W_OK):
        raise StorageError(f"Cannot open the SQLite store {path}: no permission to read and write the file.", path=path)
    with open(path, "rb") as file:
        header = file.read(100)
    if header and header[:16] != b"SQLite format 3\x00":
        raise StorageError(f"Cannot open the SQLite store {path}: the file is not a SQLite database.", path=path)
    _check_version(path, int.from_bytes(header[60:64], "big", signed=True), newest)


def _check_version(path: str, found: int, newest: int) -> None:
    if found > newest:
        raise StorageError(
            f"Cannot open the SQLite store {path}: a newer version of this package wrote it (schema version {found}; this one "
            f"knows versions up to {newest}). The file was left as it is; update the package.",
            path=path,
        )


def _check_version_in_log(path: str, busy_timeout_ms: int, newest: int) -> None:
    """The header may be older than what the write-ahead log holds; reading it never folds the log into the file."""
    if not os.path.exists(f"{path}-wal") or not os.path.exists(path):
        return
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=busy_timeout_ms / 1000)) as probe:
        _check_version(path, probe.execute("PRAGMA user_version").fetchone()[0], newest)


def _migrate(connection: sqlite3.Connection, path: str, migrations: Sequence[Sequence[str]]) -> None:
    if _version(connection, path, migrations) == len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read again under the lock: another process may have migrated meanwhile.
        for statements in migrations[_version(connection, path, migrations) :]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection, path: str, migrations: Sequence[Sequence[str]]) -> int:
    """The file's schema version, once it is clear that the file is empty or ours."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    _check_version(path, version, len(migrations))
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version != 0 or tables.intersection(_OUR_TABLES):
            raise StorageError(
                f"Cannot open the SQLite store {path}: it is the database of another program; pass the path of a new file.",
                path=path,
            )
    return version


Identity = tuple[tuple[int, int] | None, tuple[int, int] | None]


def identity(path: str) -> Identity:
    """Which file is at `path` now, and which log (`-wal`) is beside it; `None` where there is none."""
    return (None, None) if path == MEMORY else (_file(path), _file(f"{path}-wal"))


def _file(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def gone(path: str) -> StorageError:
    """The file, or its log, was taken away while it was open: what is written to it from then on nobody would ever read."""
    return StorageError(
        f"The SQLite store {path} (or its -wal file) was removed or replaced while it was open. Nothing was changed; the next call "
        "opens what is there then, or begins a new file.",
        path=path,
    )


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection held the lock: worth another try."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}


def failure(error: Exception, path: str, busy_timeout_ms: int) -> Exception:
    """What a caller gets for an error: our own errors as they are, those of SQLite and the system put into words."""
    if not isinstance(error, sqlite3.Error | OSError):
        return error
    told = StorageError(f"The SQLite store {path} failed: {_reason(error, path, busy_timeout_ms)}", path=path)
    told.__cause__ = error
    return told


def _reason(error: sqlite3.Error | OSError, path: str, busy_timeout_ms: int) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}."
    if is_busy(error):
        return f"the database is locked: another connection held it for over {busy_timeout_ms} ms. Nothing was changed; try again."
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return "the disk (or the database) is full; nothing was changed. Free some room, or prune the store, and try again."
        case sqlite3.SQLITE_NOTADB:
            return "the file is not a SQLite database."
        case sqlite3.SQLITE_CORRUPT:
            return f"the database is damaged ({error}); restore it from a backup."
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return f"it cannot be written ({error}); check the permissions of the file and its folder."
        case sqlite3.SQLITE_CANTOPEN:
            return f"it cannot be opened ({error}); check the path and the permissions of the file and its folder."
        case sqlite3.SQLITE_IOERR:
            return f"the disk failed ({error})."
        case _:
            return f"{error}."
