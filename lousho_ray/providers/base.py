"""What all built-in HTTP providers share: configuration, one client per event loop, limits on every wait, masked keys.

A provider is configuration. Its clients belong to the event loop that uses them and are made there, so a provider may be used from
several loops, one after another or at once, and travels to another process as its configuration alone.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Mapping
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar
from urllib.parse import parse_qsl, unquote, unquote_plus, urlsplit, urlunsplit

from lousho_ray.errors import ConfigurationError, LLMProviderError, MissingDependencyError, OperationTimeoutError, suggest
from lousho_ray.hosted_tools import type_of, unsupported_hosted_tool
from lousho_ray.ports import GenerateOptions, ResponseFormat
from lousho_ray.providers.event_reader import EventReader
from lousho_ray.providers.failures import scrub
from lousho_ray.providers.prices import read_table, table_was_read
from lousho_ray.providers.transcript import split_system

__all__ = ["EventReader", "HTTPProvider", "import_client", "public_url", "split_system", "split_url", "split_userinfo"]

T = TypeVar("T")

TIMEOUT_MS = 600_000
CONNECT_TIMEOUT_MS = 10_000
IDLE_TIMEOUT_MS = 120_000
PROGRESS_TIMEOUT_MS = 600_000

logger = logging.getLogger("lousho_ray.providers")
http_logger = logging.getLogger("lousho_ray.http")
CLIENT_LOGS = ("httpx2", "openai._base_client", "anthropic._base_client")
"""Loggers of the client libraries that tell the URL of every request."""


class HTTPProvider:
    """Base of the built-in providers.

    Args:
        api_key: Sent to `base_url` and nowhere else; never printed.
        base_url: Where the API is. The class knows the vendor's own.
        default_model: Model of a call that names none.
        max_retries: How often `with_retry` and `create_agent` try a failed call again when they are not told otherwise. One call
            of this object is always one HTTP request.
        timeout_ms: Longest wait for a whole unstreamed reply, or for the first event of a stream.
        connect_timeout_ms: Longest wait for a connection.
        idle_timeout_ms: Longest silence inside a stream: no byte at all.
        progress_timeout_ms: Longest wait for the next event of a stream while the server only sends keep-alives.
        headers: Extra request headers; they win over the client's own.
        context_window: The model's context window in tokens; wins over the model registry.
        unsupported_files: `"error"` raises for a part the API cannot carry, `"note"` sends a line of text in its place.

    All timeouts are in milliseconds and `None` turns one off. Over one: `OperationTimeoutError`, and the connection is closed.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` with the option's name in `field`.
    """

    provider_name: ClassVar[str] = "http"
    built_in_model: ClassVar[str | None] = None
    key_variable: ClassVar[str | None] = None
    client_package: ClassVar[tuple[str, str] | None] = None
    """The module of the vendor's client and what pip installs it as."""
    accepts_file_parts: bool = False

    def __init__(
        self,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        default_model: str | None = None,
        max_retries: int = 2,
        timeout_ms: float | None = TIMEOUT_MS,
        connect_timeout_ms: float | None = CONNECT_TIMEOUT_MS,
        idle_timeout_ms: float | None = IDLE_TIMEOUT_MS,
        progress_timeout_ms: float | None = PROGRESS_TIMEOUT_MS,
        headers: Mapping[str, str] | None = None,
        context_window: int | None = None,
        unsupported_files: Literal["error", "note"] = "error",
        **unknown: Any,
    ) -> None:
        for key in unknown:
            self._refuse(key, f"{type(self).__name__} has no option {key!r}.{suggest(key, _option_names(type(self)))}")
        self.name = self.provider_name
        self.api_key = api_key
        self.base_url = base_url
        self.default_model = default_model or self.built_in_model
        self.max_retries = max_retries
        self.timeout_ms = timeout_ms
        self.connect_timeout_ms = connect_timeout_ms
        self.idle_timeout_ms = idle_timeout_ms
        self.progress_timeout_ms = progress_timeout_ms
        self.headers = dict(headers or {})
        self.context_window = context_window
        self.unsupported_files: Literal["error", "note"] = unsupported_files
        self._check()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None, None]]]
        self._clients = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def _check(self) -> None:
        if isinstance(self.max_retries, bool) or not isinstance(self.max_retries, int) or self.max_retries < 0:
            self._refuse("max_retries", f"max_retries must be a whole number from 0, not {self.max_retries!r}.")
        for key in ("timeout_ms", "connect_timeout_ms", "idle_timeout_ms", "progress_timeout_ms"):
            value = getattr(self, key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                self._refuse(key, f"{key} must be a number of milliseconds above 0, or None for no limit, not {value!r}.")
        window = self.context_window
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            self._refuse("context_window", f"context_window must be a whole number of tokens from 1, not {window!r}.")
        if self.base_url is not None and not _is_http_url(self.base_url):
            self._refuse("base_url", f"base_url must be an http(s) URL, not {public_url(str(self.base_url))!r}.")
        if self.unsupported_files not in ("error", "note"):
            self._refuse("unsupported_files", f'unsupported_files is "error" or "note", not {self.unsupported_files!r}.')

    @staticmethod
    def _refuse(field: str, message: str) -> None:
        raise ConfigurationError(message, code="LOUSHO_CONFIG_INVALID", field=field)

    def configuration(self) -> dict[str, Any]:
        """The constructor arguments that make an equal provider: what travels to another process, in memory only."""
        return {
            "api_key": self.api_key,
            "base_url": self.base_url,
            "default_model": self.default_model,
            "max_retries": self.max_retries,
            "timeout_ms": self.timeout_ms,
            "connect_timeout_ms": self.connect_timeout_ms,
            "idle_timeout_ms": self.idle_timeout_ms,
            "progress_timeout_ms": self.progress_timeout_ms,
            "headers": self.headers,
            "context_window": self.context_window,
            "unsupported_files": self.unsupported_files,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        own = {"accepts_file_parts": self.accepts_file_parts} if "accepts_file_parts" in self.__dict__ else None
        return _rebuild, (type(self), self.configuration()), own

    def __repr__(self) -> str:
        where = "" if self.base_url is None else f", base_url={public_url(self.base_url)!r}"
        key = "None" if self.api_key is None else "'***'"
        return f"{type(self).__name__}(default_model={self.default_model!r}{where}, api_key={key})"

    # --------------------------------------------------------------------------------------------------- optional members

    def supports_tools(self, model: str | None = None) -> bool:
        return True

    def supports_streaming(self, model: str | None = None) -> bool:
        return True

    def supports_hosted_tool(self, type: str) -> bool:
        return False

    def enforces_response_format(self, response_format: ResponseFormat, model: str | None = None) -> bool:
        """Whether every reply is held to this schema by the server, so that it need not stand in the prompt."""
        return False

    def check_hosted(self, options: GenerateOptions) -> None:
        """Raises `ConfigurationError` (`LOUSHO_HOSTED_TOOL_UNSUPPORTED`) for a hosted tool that this provider does not run."""
        for tool in options.hosted_tools:
            if not self.supports_hosted_tool(type_of(tool)):
                raise unsupported_hosted_tool(self.name, tool)

    # --------------------------------------------------------------------------------------------------------- the client

    def new_client(self) -> Any:
        """Makes a client for the running loop, with the client's own retries off. Called once per loop."""
        raise NotImplementedError

    async def client(self) -> Any:
        """The running loop's client. It is closed by `aclose()`, or when the loop shuts its async generators down."""
        loop = asyncio.get_running_loop()
        held = self._clients.get(loop)
        if held is not None:
            return held[0]
        self.require_key()
        if self.client_package is not None and self.client_package[0] not in sys.modules:
            # The import takes a second of CPU: other tasks of this loop go on meanwhile.
            await asyncio.to_thread(import_client, *self.client_package)
        if (made_meanwhile := self._clients.get(loop)) is not None:
            return made_meanwhile[0]
        with self._lock:
            for other in [other for other in self._clients if other.is_closed()]:
                del self._clients[other]
            for name in CLIENT_LOGS:
                logging.getLogger(name).addFilter(_without_url_secrets)
            client = self.new_client()
            closer = self._close_at_end(client, loop)
            self._clients[loop] = (client, closer)
        await anext(closer)
        if not table_was_read():
            # The reply's cost needs the prices: they are read while the server thinks.
            loop.run_in_executor(None, read_table)
        return client

    async def _close_at_end(self, client: Any, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None, None]:
        """Started on a loop, this closes `client` when the loop shuts down its async generators (as `asyncio.run` does)."""
        try:
            yield
        finally:
            self._clients.pop(loop, None)
            await (client.aclose() if hasattr(client, "aclose") else client.close())

    async def aclose(self) -> None:
        """Closes the clients of all loops. The provider can be used again: the next call makes a new client."""
        with self._lock:
            held, self._clients = list(self._clients.items()), weakref.WeakKeyDictionary()
        here = asyncio.get_running_loop()
        for loop, (_, closer) in held:
            if loop is here:
                await closer.aclose()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_finish(closer), loop))

    def require_key(self) -> None:
        """Raises `LOUSHO_PROVIDER_MISSING_API_KEY` when the API needs a key and there is none."""
        if self.key_variable is not None and not self.api_key:
            raise ConfigurationError(
                f"{type(self).__name__} has no API key: set {self.key_variable} or pass api_key.",
                code="LOUSHO_PROVIDER_MISSING_API_KEY",
                field="api_key",
            )

    # -------------------------------------------------------------------------------------------------------------- limits

    async def within(self, call: Coroutine[Any, Any, T], operation: str, *, deadline: float | None = None) -> T:
        """Awaits one request under `timeout_ms` (or until `deadline`, loop time), which closes its connection when it is over."""
        loop = asyncio.get_running_loop()
        if deadline is None and self.timeout_ms is not None:
            deadline = loop.time() + self.timeout_ms / 1000
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.timed_out(operation, self.timeout_ms) from None

    def timed_out(self, operation: str, timeout_ms: float | None) -> OperationTimeoutError:
        where = "" if self.base_url is None else f" from {public_url(self.base_url)}"
        return OperationTimeoutError(
            f"{self.name}: no {operation}{where} within {timeout_ms:g} ms.", operation=operation, timeout_ms=timeout_ms
        )

    # ------------------------------------------------------------------------------------------------- what may be printed

    def warn(self, key: str, text: str) -> None:
        """Logs a warning once per provider and key."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s: %s", self.name, text)

    def secrets(self) -> set[str]:
        """The texts that must not show in an error: the key, sensitive header values, credentials inside the URL."""
        found = {self.api_key or ""}
        found |= {value for name, value in self.headers.items() if _is_sensitive(name)}
        if self.base_url is not None:
            parts = urlsplit(self.base_url)
            # Without a password the user is the key.
            found |= {parts.password or parts.username or "", *(pair.partition("=")[2] for pair in parts.query.split("&"))}
            found.add(split_userinfo(self.base_url)[1] or "")
        found |= {value.split(" ", 1)[-1] for value in found}
        found |= {form(value) for value in found for form in (unquote, unquote_plus)}
        return {secret for secret in found if secret}

    def scrubbed(self, exc: BaseException) -> BaseException:
        """The exception with this provider's secrets masked in place; its own errors also name the provider."""
        scrub(exc, self.secrets())
        if isinstance(exc, LLMProviderError) and exc.provider is None:
            exc.provider = self.name
        return exc

    def log_body(self, what: str, body: bytes | str) -> None:
        """Logs a body at DEBUG of `lousho_ray.http`, keys masked."""
        if http_logger.isEnabledFor(logging.DEBUG):
            text = body if isinstance(body, str) else body.decode("utf-8", "replace")
            for secret in sorted(self.secrets(), key=len, reverse=True):  # one may be a part of another
                text = text.replace(secret, "***")
            http_logger.debug("%s %s: %s", self.name, what, text)


async def _finish(closer: AsyncGenerator[None, None]) -> None:
    await closer.aclose()


def import_client(module: str, requirement: str) -> ModuleType:
    """Imports a vendor's client package. A failure is not remembered: after installing it, the next call works.

    Raises:
        MissingDependencyError: `LOUSHO_PEER_MISSING` with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        importlib.invalidate_caches()
        command = f"pip install '{requirement}'"
        raise MissingDependencyError(
            f"The package {error.name or module!r} is not installed: {command}", package=module, install_command=command
        ) from error


def public_url(url: str) -> str:
    """A URL without its user info and query: fit to be printed."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return "(unreadable URL)"
    host = f"[{host}]" if ":" in host else host
    return urlunsplit((parts.scheme, f"{host}{port}", parts.path, "", ""))


def split_userinfo(url: str) -> tuple[str, str | None]:
    """A URL without its user info, and the `Authorization` value that says the same (`None` without user info)."""
    parts = urlsplit(url)
    userinfo, _, host = parts.netloc.rpartition("@")
    if not userinfo:
        return url, None
    value = base64.b64encode(unquote(userinfo).encode()).decode("ascii")
    return urlunsplit((parts.scheme, host, parts.path, parts.query, parts.fragment)), f"Basic {value}"


def split_url(url: str) -> tuple[str, dict[str, str], str | None]:
    """A base URL without query and user info, the parameters of its query, and the `Authorization` that its user info means."""
    plain, credentials = split_userinfo(url)
    plain, _, query = plain.partition("?")
    return plain, dict(parse_qsl(query, keep_blank_values=True)), credentials


def _without_url_secrets(record: logging.LogRecord) -> bool:
    """A filter that takes the query and the user info, where gateways want their keys, out of logged URLs.

    Tracebacks, whose errors name the URL, are left out: the error itself reaches the caller, masked.
    """
    record.exc_info = None
    if isinstance(record.args, tuple):
        record.args = tuple(public_url(str(arg)) if type(arg).__name__ == "URL" else arg for arg in record.args)
    return True


def _is_http_url(url: Any) -> bool:
    if not isinstance(url, str):
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _is_sensitive(header: str) -> bool:
    return any(word in header.lower() for word in ("key", "token", "auth", "secret", "cookie"))


def _option_names(cls: type) -> list[str]:
    names = [
        parameter.name
        for base in cls.__mro__
        if base is not object and "__init__" in base.__dict__
        for parameter in inspect.signature(base.__dict__["__init__"]).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    return sorted(set(names))


def _rebuild(cls: type[HTTPProvider], configuration: Mapping[str, Any]) -> HTTPProvider:
    return cls(**configuration)
