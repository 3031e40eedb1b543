"""Where a store is, as plain data that can be sent to another process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from lousho_ray.errors import ConfigurationError, suggest
from lousho_ray.stores.entries import DEFAULT_HISTORY_LIMIT, check_history_limit

if TYPE_CHECKING:
    from lousho_ray.stores.memory import MemoryStore
    from lousho_ray.stores.sqlite import SqliteStore

_FORMS = "'sqlite:///relative/file.db', 'sqlite:////absolute/file.db' and 'memory://' (or 'memory://name')"


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A store that can be opened anywhere. It pickles, and equal locations are the same data.

    Attributes:
        scheme: `sqlite` or `memory`.
        path: The absolute path of a SQLite file; the name, possibly empty, of a store in memory.
        history_limit: How many saves of each checkpoint to keep.
    """

    scheme: str
    path: str
    history_limit: int = DEFAULT_HISTORY_LIMIT

    @property
    def url(self) -> str:
        """The URL that `parse_location` reads."""
        return f"{self.scheme}://{'/' if self.scheme == 'sqlite' else ''}{quote(self.path)}"

    def open(self) -> SqliteStore | MemoryStore:
        """The store. One in memory is new and empty at each call."""
        if self.scheme == "sqlite":
            from lousho_ray.stores.sqlite import SqliteStore

            return SqliteStore(self.path, self.history_limit)
        from lousho_ray.stores.memory import memory_store

        return memory_store(self.history_limit)


def parse_location(url: str, *, history_limit: int = DEFAULT_HISTORY_LIMIT) -> StoreLocation:
    """Reads a store URL: `sqlite:///relative/file.db`, `sqlite:////absolute/file.db` (as in SQLAlchemy), `memory://name`.

    A relative path is taken from the working directory of this process, here and now.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, `field="url"`: another scheme, or no path.
    """
    check_history_limit(history_limit)
    scheme, separator, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    read = _SCHEMES.get(scheme.lower())
    if not separator or read is None:
        raise ConfigurationError(f"{url!r} is no store URL; a store is one of {_FORMS}.{suggest(scheme, _SCHEMES)}", field="url")
    return StoreLocation(scheme.lower(), read(url, rest), history_limit)


def _sqlite_path(url: str, rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host == ":memory:" or path == ":memory:":
        raise ConfigurationError(f"{url!r}: a store in memory is 'memory://'.", field="url")
    if host or not slash or not path.strip("/"):
        raise ConfigurationError(
            f"{url!r} names no file; write three slashes before a relative path ('sqlite:///agents.db') and four before an "
            "absolute one ('sqlite:////var/lib/agents.db').",
            field="url",
        )
    return os.path.abspath(unquote(path))


def _memory_name(url: str, rest: str) -> str:
    return unquote(rest)


def _not_available(url: str, rest: str) -> str:
    raise ConfigurationError(f"{url!r}: S3 stores are not available in this version; a store is one of {_FORMS}.", field="url")


_SCHEMES: dict[str, Callable[[str, str], str]] = {"sqlite": _sqlite_path, "memory": _memory_name, "s3": _not_available}
