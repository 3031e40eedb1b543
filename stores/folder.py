"""A folder of records: names, whole-file writes, claims; and the thread that works on it."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lousho_ray.errors import StorageError

T = TypeVar("T")

_UPPER = re.compile("[A-Z]")
_MARKED = re.compile(r"\^([a-z])")
_SUFFIX = ".json"
_CLAIM = ".json.claim"


def file_name(id: str) -> str:
    """`Alice` -> `^alice.json`: ids that differ only in case are different files on any file system."""
    return _UPPER.sub(lambda match: f"^{match[0].lower()}", id) + _SUFFIX


def id_of(name: str) -> str:
    """The inverse of `file_name`; a plain mixed-case name, as older versions wrote it, is its own id."""
    return _MARKED.sub(lambda match: match[1].upper(), name.removesuffix(_SUFFIX))


class Folder:
    """Text records by id. Ids are checked by the caller; whatever they are, no path leaves the folder."""

    def __init__(self, dir: str | os.PathLike[str], *, fsync: bool) -> None:
        self.dir = Path(os.path.abspath(dir))
        self._fsync = fsync

    def path(self, id: str) -> Path:
        """Where the record is, or will be."""
        current = self.dir / file_name(id)
        if _UPPER.search(id) and not current.exists() and self._old_path(id) is not None:
            return self.dir / f"{id}{_SUFFIX}"
        return current

    def read(self, id: str) -> str | None:
        path = self.path(id)
        try:
            return path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnicodeDecodeError:
            return ""  # no text at all is damaged for every reader, as these bytes are
        except OSError as error:
            raise _failed("read", path, error) from error

    def write(self, id: str, text: str, at_ms: int) -> None:
        """Replaces the record. A crash leaves the old one or the new one, never a part; `at_ms` becomes the file's time."""
        path = self.dir / file_name(id)
        temporary = self.dir / f".{secrets.token_hex(8)}.tmp"
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            try:
                self._put(temporary, text, at_ms)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            if (old := self._old_path(id)) is not None:
                old.unlink(missing_ok=True)
            self._sync_dir()
        except OSError as error:
            raise _failed("write", path, error) from error

    def delete(self, id: str) -> bool:
        """Deletes the record; whether there was one."""
        old = self._old_path(id)
        found = _unlink(self.dir / file_name(id))
        return (old is not None and _unlink(old)) or found

    def ages(self) -> list[tuple[str, int]]:
        """The id of each record and when it was saved, in epoch milliseconds."""
        return [(id_of(name), at) for name, at in self._scan(_SUFFIX)]

    # ------------------------------------------------------------------------------------------------------------- claims

    def claim(self, id: str, text: str, at_ms: int) -> bool:
        """Creates the claim of a record; `False` when it has one. Creating is exclusive over all processes."""
        path = self._claim_path(id)
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
                self._flush(file.fileno(), file.flush)
            os.utime(path, ns=(at_ms * 1_000_000, at_ms * 1_000_000))
            self._sync_dir()
        except FileExistsError:
            return False
        except OSError as error:
            raise _failed("write", path, error) from error
        return True

    def claim_of(self, id: str) -> str | None:
        """The text of a record's claim, empty while its writer is at it, `None` without a claim."""
        try:
            return self._claim_path(id).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _failed("read", self._claim_path(id), error) from error

    def unclaim(self, id: str) -> bool:
        """Removes the claim; whether there was one."""
        return _unlink(self._claim_path(id))

    def claims(self) -> list[tuple[str, int]]:
        """The id of each claimed record and when it was claimed, in epoch milliseconds."""
        return [(id_of(name.removesuffix(".claim")), at) for name, at in self._scan(_CLAIM)]

    # ------------------------------------------------------------------------------------------------------------ details

    def _claim_path(self, id: str) -> Path:
        return self.dir / f"{file_name(id)}.claim"

    def _old_path(self, id: str) -> Path | None:
        """The file under the plain name with capitals that older versions used. The listing is asked, because a file system that
        ignores case would find the file of another id."""
        if not _UPPER.search(id):
            return None
        name = f"{id}{_SUFFIX}"
        return next((self.dir / name for found, _ in self._scan(_SUFFIX) if found == name), None)

    def _scan(self, suffix: str) -> Iterator[tuple[str, int]]:
        try:
            with os.scandir(self.dir) as entries:
                for entry in entries:
                    if entry.name.endswith(suffix) and not entry.name.startswith("."):
                        yield entry.name, entry.stat().st_mtime_ns // 1_000_000
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _failed("read", self.dir, error) from error

    def _put(self, path: Path, text: str, at_ms: int) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
            self._flush(file.fileno(), file.flush)
        os.utime(path, ns=(at_ms * 1_000_000, at_ms * 1_000_000))

    def _flush(self, descriptor: int, flush: Callable[[], None]) -> None:
        flush()
        if self._fsync:
            os.fsync(descriptor)

    def _sync_dir(self) -> None:
        """Makes the rename itself durable."""
        if not self._fsync:
            return
        descriptor = os.open(self.dir, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _failed("delete", path, error) from error
    return True


def _failed(what: str, path: Path, error: OSError) -> StorageError:
    return StorageError(f"Cannot {what} {path}: {error.strerror or error}.", path=str(path))


class FolderThread:
    """One worker thread: calls run off the event loop, one after another in the order they were made.

    A fork may come at any moment, so there is no lock of our own that its child could find held by a thread it does not have.
    """

    def __init__(self) -> None:
        self._executors: dict[int, ThreadPoolExecutor] = {}

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(call))

    def run_blocking(self, call: Callable[[], T]) -> T:
        return self._submit(call).result()

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        pid = os.getpid()
        executor = self._executors.get(pid)
        if executor is None:  # of two threads that make one, both get the same; one that is not used has no thread yet
            executor = self._executors.setdefault(pid, ThreadPoolExecutor(1, "lousho-files"))
        return executor.submit(call)

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderThread, ()
