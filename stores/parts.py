"""What the stores of this package share: pruning, closing, and locks that can be sent along."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Any, TypeVar

from lousho_ray.errors import ConfigurationError
from lousho_ray.stores.entries import PruneCounts

S = TypeVar("S", bound="ClosingStore")


class StoreLock:
    """A re-entrant lock that a pickle leaves behind: the copy in another process gets one of its own."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreLock, ()


class ClosingStore:
    """A store with `prune` and `close`, their async twins, and both kinds of `with`."""

    def prune(self, older_than_ms: float) -> PruneCounts:
        """Deletes what is old: sessions and checkpoints not saved for `older_than_ms`, history entries older than that, and
        approvals resolved that long ago.

        Unresolved approvals stay whatever their age, and so do the checkpoints and transcripts they need to be decided; a
        session whose turn is running stays too.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_INVALID`: not a number from 0 up.
            StorageError: `LOUSHO_STORAGE_FAILED`.
        """
        raise NotImplementedError

    async def aprune(self, older_than_ms: float) -> PruneCounts:
        """`prune` without blocking the event loop."""
        return await asyncio.to_thread(self.prune, older_than_ms)

    def close(self) -> None:
        """Finishes what was begun and closes the store. A second close does nothing; any later use raises `StorageError`."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """`close` without blocking the event loop. Cancelling the wait does not stop the closing."""
        await asyncio.shield(asyncio.to_thread(self.close))

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self: S) -> S:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


_REQUIRED: dict[str, tuple[str, ...]] = {
    "sessions": ("load", "save", "delete"),
    "checkpoints": ("save", "load", "delete"),
    "approvals": ("save", "load", "resolve"),
}


@dataclass(frozen=True, slots=True)
class Parts:
    """A store made of single parts."""

    sessions: Any = None
    checkpoints: Any = None
    approvals: Any = None


def has_parts(source: object) -> bool:
    """Whether an object is a store, and not a part of one."""
    return any(getattr(source, name, None) is not None for name in _REQUIRED)


def part_of(source: Any, name: str) -> Any:
    """A part of a store, or the object itself when it is such a part; `None` when it is neither."""
    if has_parts(source):
        return getattr(source, name, None)
    return source if all(callable(getattr(source, method, None)) for method in _REQUIRED[name]) else None


def check_part(source: object, name: str, field: str) -> None:
    """Checks that an object is a store with that part, or such a part.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`.
    """
    if has_parts(source):
        check_store(source, field)
    if part_of(source, name) is None:
        methods = ", ".join(f"{method}()" for method in _REQUIRED[name])
        text = f"{field} is a {type(source).__name__}; pass a store with '{name}' (memory_store()), or an object with {methods}."
        raise ConfigurationError(text, field=field)


def check_store(store: object, field: str = "store") -> None:
    """Checks that `store` has at least one part and that each of its parts has the required methods.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, naming the part and the method.
    """
    parts = {name: getattr(store, name, None) for name in _REQUIRED}
    if all(part is None for part in parts.values()):
        raise ConfigurationError(
            f"{field} is a {type(store).__name__} with none of 'sessions', 'checkpoints' and 'approvals'; pass a store such as "
            "memory_store() or SqliteStore(path), or an object with at least one of these attributes.",
            field=field,
        )
    for name, part in parts.items():
        missing = [method for method in _REQUIRED[name] if part is not None and not callable(getattr(part, method, None))]
        if missing:
            raise ConfigurationError(
                f"{field}.{name} ({type(part).__name__}) has no method '{missing[0]}()'.", field=f"{field}.{name}"
            )
