"""A proxy on the loopback interface that adds credentials to requests, so that who sends them never holds them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from lousho_ray.errors import ConfigurationError
from lousho_ray.tools.net import HostRules, Resolver, host_matches, system_resolver
from lousho_ray.tools.workspace.broker_exchange import Exchange

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FRAMING = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade", "expect", "keep-alive"}
)

MAX_CONNECTIONS = 256
"""Connections that are served at once per listener. More are closed: a program must not use up this process's descriptors."""


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """The headers of each host pattern. Has no `repr`: a value must not end up in a log."""

    by_pattern: Mapping[str, tuple[tuple[str, str], ...]]

    def of(self, host: str) -> dict[str, str] | None:
        """What is added to requests to `host`, a whole name before `*.`; `None` when no rule speaks of it."""
        matching = [pattern for pattern in self.by_pattern if host_matches((pattern,), host)]
        if not matching:
            return None
        added: dict[str, str] = {}
        for pattern in sorted(matching, key=lambda pattern: (not pattern.startswith("*."), len(pattern))):
            added |= {name.lower(): value for name, value in self.by_pattern[pattern]}
        return added


class CredentialBroker:
    """A proxy that adds headers per host. Make one with `create_credential_broker()`.

    Give it to `SubprocessSandbox(network={"allow": [...]}, broker=broker)`, which needs nothing else. For other programs enter it
    (`async with broker:`): it then listens on `url`, a port of the loopback interface that every program of this machine can use,
    and `env()` tells a program where. It is no firewall: a program on the host may still connect to where it likes.

    A request comes in one of three forms:

    - `/__broker/<host>/<path>`, sent on to `https://<host>/<path>` with the headers of that host;
    - `GET http://<host>/<path>` as to any HTTP proxy. Headers are added to it only where the host is a private one listed in
      `allow_private`: a credential never crosses a public network in clear;
    - `CONNECT <host>:<port>`, a tunnel. What passes through is not seen, so nothing is added.
    """

    def __init__(self, credentials: Credentials, rules: HostRules, resolver: Resolver, timeout_ms: float) -> None:
        self._credentials, self._rules = credentials, rules
        self._resolver, self._timeout_s = resolver, timeout_ms / 1000
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._port = 0

    async def __aenter__(self) -> CredentialBroker:
        self._server, self._tasks = await self._listen(socket.create_server(("127.0.0.1", 0)), self._rules)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        server, self._server = self._server, None
        if server is not None:
            await _stop(server, self._tasks)

    @property
    def url(self) -> str:
        """Where it listens. Raises `ConfigurationError` before it was entered."""
        if self._server is None:
            raise ConfigurationError(
                "The credential broker does not listen: enter it first (`async with broker:`).", field="broker"
            )
        return f"http://127.0.0.1:{self._port}"

    def env(self) -> dict[str, str]:
        """The variables that send a program's requests here. None of them is a secret."""
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), self.url)
        return {**proxies, "NO_PROXY": "localhost,127.0.0.1,::1", "LOUSHO_BROKER": f"{self.url}/__broker"}

    @contextlib.asynccontextmanager
    async def serving(self, listener: socket.socket, allow: Iterable[str]) -> AsyncIterator[None]:
        """Serves those who connect to `listener`, which may belong to another network, with `allow` as a second list of hosts."""
        narrowed = replace(self._rules, allowed=tuple(allow))
        server, tasks = await self._listen(listener, self._rules, narrowed)
        try:
            yield
        finally:
            await _stop(server, tasks)

    async def _listen(self, listener: socket.socket, *rules: HostRules) -> tuple[asyncio.Server, set[asyncio.Task[Any]]]:
        tasks: set[asyncio.Task[Any]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            if len(tasks) >= MAX_CONNECTIONS:
                writer.close()
                return
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            # Only `_stop` cancels it; left to asyncio's streams, the cancellation would be logged as an error of theirs.
            with contextlib.suppress(asyncio.CancelledError):
                await Exchange(reader, writer, rules, self._credentials.of, self._resolver, self._timeout_s).serve()

        listener.setblocking(False)
        return await asyncio.start_server(serve, sock=listener), tasks

    def __reduce__(self) -> NoReturn:
        raise TypeError("A credential broker stays in the process that made it: its secrets and its port do not travel.")


async def _stop(server: asyncio.Server, tasks: set[asyncio.Task[Any]]) -> None:
    server.close()
    for task in (running := list(tasks)):
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await server.wait_closed()


def create_credential_broker(
    *,
    rules: Mapping[str, Mapping[str, str]] | None = None,
    allow: Iterable[str] = (),
    allow_private: Iterable[str] = (),
    resolver: Resolver = system_resolver,
    timeout_ms: float = 30_000,
) -> CredentialBroker:
    """A proxy that adds headers per host, for programs that must not hold the credentials themselves.

    Every other host gets a 403 before any connection, and so do hosts that lead to private addresses. A host is looked up once per
    request and the connection goes to an address that was judged. An `Authorization` that comes with a request to a host of `rules`
    is replaced, hop-by-hop headers are dropped. Redirects are answers like any other: following them is a new request.

    Args:
        rules: Host or `*.host` to the headers that are added: `{"api.github.com": {"Authorization": "Bearer ..."}}`.
        allow: More hosts that may be reached, without headers.
        allow_private: Hosts, also in one of the lists above, that may lead to private addresses.
        resolver: Looks names up; the system's by default.
        timeout_ms: How long a connection may take, and how long a server may be silent.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for what is no host, and for a header that HTTP cannot carry or that belongs to
            the connection. The message never has a header's value.
    """
    if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, int | float) or not timeout_ms > 0:
        raise ConfigurationError(f"`timeout_ms` is {timeout_ms!r}; it is a number above 0.", field="timeout_ms")
    if rules is not None and not isinstance(rules, Mapping):
        raise ConfigurationError("`rules` maps hosts to headers: {'api.example': {'Authorization': '...'}}.", field="rules")
    by_pattern: dict[str, tuple[tuple[str, str], ...]] = {}
    for host, headers in (rules or {}).items():
        (pattern,) = _hosts("rules", [host])
        by_pattern[pattern] = tuple(_header(host, name, value) for name, value in _items(host, headers))
    allowed = (*by_pattern, *_hosts("allow", allow))
    checked = HostRules.of(allow_private=allow_private, allowed_hosts=allowed)
    return CredentialBroker(Credentials(by_pattern), checked, resolver, timeout_ms)


def _hosts(option: str, hosts: Iterable[str]) -> tuple[str, ...]:
    try:
        return HostRules.of(allowed_hosts=hosts).allowed or ()
    except ConfigurationError as error:
        raise ConfigurationError(error.detail.replace("allowed_hosts", option), field=option) from None


def _items(host: str, headers: object) -> Iterable[tuple[object, object]]:
    if not isinstance(headers, Mapping):
        raise ConfigurationError(f"`rules` of {host!r} is no mapping of header names to values.", field="rules")
    return headers.items()


def _header(host: str, name: object, value: object) -> tuple[str, str]:
    if (
        not isinstance(name, str)
        or not _HEADER_NAME.fullmatch(name)
        or name.lower() in _FRAMING
        or name.lower().startswith("proxy-")
    ):
        raise ConfigurationError(f"`rules` of {host!r} has the header {name!r}, which cannot be added to a request.", field="rules")
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or value != value.strip():
        raise ConfigurationError(
            f"`rules` of {host!r}: the value of {name!r} is no text that HTTP can carry (a line end, or a blank at an end?).",
            field="rules",
        )
    return name, value
