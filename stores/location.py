"""Where a store is, as plain data that can be sent to another process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote, urlencode
from weakref import WeakValueDictionary

from lousho_ray.errors import ConfigurationError, suggest
from lousho_ray.stores.entries import DEFAULT_HISTORY_LIMIT, check_history_limit

if TYPE_CHECKING:
    from lousho_ray.stores.memory import MemoryStore
    from lousho_ray.stores.s3 import S3Store
    from lousho_ray.stores.sqlite import SqliteStore

_FORMS = "'sqlite:///relative/file.db', 'sqlite:////absolute/file.db', 's3://bucket/prefix' and 'memory://' (or 'memory://name')"

REQUEST_TIMEOUT_MS = 10_000.0
"""How long a request of an S3 store may take."""


@dataclass(frozen=True, slots=True)
class S3Options:
    """How a bucket is reached.

    Attributes:
        endpoint: The server's URL, `None` for Amazon S3 of the region.
        region: The bucket's region.
        single_writer: Whether this one process alone writes there, so that the bucket need not know conditional writes.
        timeout_ms: How long one request may take.
        credentials: JSON object of given credentials, empty when the environment has them. Never in a repr or a URL.
    """

    endpoint: str | None = None
    region: str | None = None
    single_writer: bool = False
    timeout_ms: float = REQUEST_TIMEOUT_MS
    credentials: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A store that can be opened anywhere. It pickles, and equal locations are the same data.

    Attributes:
        scheme: `sqlite`, `s3` or `memory`.
        path: The absolute path of a SQLite file; `bucket/prefix`; the name, possibly empty, of a store in memory.
        history_limit: How many saves of each checkpoint to keep.
        s3: How a bucket is reached.
    """

    scheme: str
    path: str
    history_limit: int = DEFAULT_HISTORY_LIMIT
    s3: S3Options = S3Options()

    @property
    def url(self) -> str:
        """The URL that `parse_location` reads. It has no credentials in it."""
        if self.scheme == "s3":
            options = {"endpoint": self.s3.endpoint, "region": self.s3.region, "single_writer": self.s3.single_writer and "true"}
            query = urlencode({name: value for name, value in options.items() if value})
            return f"s3://{quote(self.path)}{'?' if query else ''}{query}"
        return f"{self.scheme}://{'/' if self.scheme == 'sqlite' else ''}{quote(self.path)}"

    @property
    def on_one_machine(self) -> bool:
        """Whether the data is on the disk of the machine that the location is of."""
        return self.scheme == "sqlite"

    def open(self) -> SqliteStore | S3Store | MemoryStore:
        """The store. In memory those of one name are one store, as long as somebody holds it; one without a name is new."""
        if self.scheme == "sqlite":
            from lousho_ray.stores.sqlite import SqliteStore

            return SqliteStore(self.path, self.history_limit)
        if self.scheme == "s3":
            from lousho_ray.stores.s3 import S3Store

            return S3Store.at(self)
        from lousho_ray.stores.memory import MemoryStore

        if not self.path:
            return MemoryStore(self.history_limit)
        with _NAMED:
            store = _named.get(self.path)
            if store is None or store.closed:
                store = _named[self.path] = MemoryStore(self.history_limit, location=self)
        return store


_NAMED = Lock()
_named: WeakValueDictionary[str, MemoryStore] = WeakValueDictionary()


def parse_location(url: str, *, history_limit: int = DEFAULT_HISTORY_LIMIT) -> StoreLocation:
    """Reads a store URL.

    - `sqlite:///relative/file.db`, `sqlite:////absolute/file.db` (as in SQLAlchemy): a relative path is taken from the working
      directory of this process, here and now.
    - `s3://bucket/prefix`, with `?endpoint=http://127.0.0.1:9000`, `region=eu-west-1` and `single_writer=true` as options. What is
      not given comes from `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, `AWS_REGION` and `AWS_DEFAULT_REGION`.
    - `memory://`: a new store in memory; `memory://name`: the one of that name, of this process or (on Ray) of the cluster.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, `field="url"`: another scheme, no path, an unknown option, or keys in the URL.
    """
    check_history_limit(history_limit)
    scheme, separator, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    read = _SCHEMES.get(scheme.lower())
    if not separator or read is None:
        raise ConfigurationError(f"{url!r} is no store URL; a store is one of {_FORMS}.{suggest(scheme, _SCHEMES)}", field="url")
    return read(url, rest, history_limit)


def ray_store(url: str, *, history_limit: int = DEFAULT_HISTORY_LIMIT) -> SqliteStore | S3Store | MemoryStore:
    """The store at a URL, for `create_agent(store=...)`. Nothing is opened before the first use.

    With `runtime="ray"` it is reached through the store actor of its location, which all agents and jobs of the cluster share; with
    `runtime="local"` this process opens it itself. `memory://` lives as long as the process or the actor; all that say `memory://name`
    share one store.

    Args:
        url: `sqlite:///relative/file.db`, `sqlite:////absolute/file.db`, `s3://bucket/prefix` or `memory://`; see `parse_location`.
        history_limit: How many saves of each checkpoint to keep; 0 keeps none.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, `field="url"`: not a store URL.
        MissingDependencyError: `LOUSHO_PEER_MISSING`: the package for S3 is not installed.
    """
    return parse_location(url, history_limit=history_limit).open()


def s3_location(
    bucket: str,
    prefix: str = "",
    *,
    endpoint: str | None = None,
    region: str | None = None,
    single_writer: bool = False,
    timeout_ms: float = REQUEST_TIMEOUT_MS,
    credentials: str = "",
    history_limit: int = DEFAULT_HISTORY_LIMIT,
) -> StoreLocation:
    """The location of an S3 store; endpoint and region that are not given are those of the environment.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` with the name of the bad argument as `field`.
    """
    check_history_limit(history_limit)
    if not isinstance(bucket, str) or not _BUCKET.fullmatch(bucket):
        raise ConfigurationError(
            f"bucket must be a bucket's name (3 to 63 of a-z, 0-9, '.' and '-'); got {bucket!r}.", field="bucket"
        )
    names = prefix.strip("/").split("/") if isinstance(prefix, str) else [""]
    if not isinstance(prefix, str) or (prefix.strip("/") and not all(_NAME.fullmatch(name) and name.strip(".") for name in names)):
        raise ConfigurationError(
            f"prefix must be names of A-Z, a-z, 0-9, '_', '-', '.' and '=' with '/' between them; got {prefix!r}.", field="prefix"
        )
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise ConfigurationError(
            "endpoint must be the URL of an S3 server without user, password or query, for example 'http://127.0.0.1:9000'.",
            field="endpoint",
        )
    if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, int | float) or not 0 < timeout_ms < float("inf"):
        raise ConfigurationError(f"timeout_ms must be a positive number of milliseconds; got {timeout_ms!r}.", field="timeout_ms")
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None
    path = f"{bucket}/{prefix.strip('/')}".rstrip("/")
    options = S3Options(endpoint and endpoint.rstrip("/"), region, bool(single_writer), float(timeout_ms), credentials)
    return StoreLocation("s3", path, history_limit, options)


def _sqlite(url: str, rest: str, history_limit: int) -> StoreLocation:
    host, slash, path = rest.partition("/")
    if host == ":memory:" or path == ":memory:":
        raise ConfigurationError(f"{url!r}: a store in memory is 'memory://'.", field="url")
    if host or not slash or not path.strip("/"):
        raise ConfigurationError(
            f"{url!r} names no file; write three slashes before a relative path ('sqlite:///agents.db') and four before an "
            "absolute one ('sqlite:////var/lib/agents.db').",
            field="url",
        )
    return StoreLocation("sqlite", os.path.abspath(unquote(path)), history_limit)


def _memory(url: str, rest: str, history_limit: int) -> StoreLocation:
    return StoreLocation("memory", unquote(rest), history_limit)


def _s3(url: str, rest: str, history_limit: int) -> StoreLocation:
    path, _, query = rest.partition("?")
    bucket, _, prefix = path.partition("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if "@" in unquote(rest) or any(re.search("key|secret|token|password", name, re.IGNORECASE) for name in options):
        # The URL itself is not repeated: what is in it is secret.
        raise ConfigurationError(
            "An S3 store URL holds no credentials: they would end up in logs. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "pass S3Store(bucket, prefix, credentials={...}).",
            field="url",
        )
    if unknown := [name for name in options if name not in _S3_OPTIONS]:
        allowed = ", ".join(_S3_OPTIONS)
        raise ConfigurationError(
            f"{url!r}: unknown option {unknown[0]!r}; allowed are {allowed}.{suggest(unknown[0], _S3_OPTIONS)}", field="url"
        )
    single_writer = options.get("single_writer", "false")
    if single_writer not in ("true", "false"):
        raise ConfigurationError(f"{url!r}: single_writer must be 'true' or 'false'.", field="url")
    try:
        return s3_location(
            unquote(bucket),
            unquote(prefix),
            endpoint=options.get("endpoint"),
            region=options.get("region"),
            single_writer=single_writer == "true",
            history_limit=history_limit,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{url!r} is no S3 store: {error.detail}", field="url") from error


_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_NAME = re.compile(r"[A-Za-z0-9_.=-]+")
_ENDPOINT = re.compile(r"https?://[^/?#@\s]+(?:/[^?#@\s]*)?")
_S3_OPTIONS: Mapping[str, None] = {"endpoint": None, "region": None, "single_writer": None}
_SCHEMES: dict[str, Callable[[str, str, int], StoreLocation]] = {"sqlite": _sqlite, "s3": _s3, "memory": _memory}
