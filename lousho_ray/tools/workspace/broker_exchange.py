"""One request to the credential broker: where it wants to go, whether it may, and the way there and back."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from lousho_ray.tools.fetch import tls_context
from lousho_ray.tools.net import DEFAULT_PORTS, Host, HostRules, IPAddress, RefusedHostError, Resolver, is_public, resolve

if TYPE_CHECKING:
    import h11

PREFIX = "/__broker/"

_ABSOLUTE = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"[A-Za-z0-9._\-]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?")
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade", b"expect"}
)
"""Headers of one connection (RFC 9110, 7.6.1), and `Expect`, which is answered here."""

_ECHO = frozenset({b"TRACE", b"TRACK"})
"""Methods whose answer is the request, with the credentials that were added to it."""

_MAX_HEAD_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """The request is answered by the broker itself."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes. `prefixed` when it came in the path form, so that redirects have to lead back into it."""

    scheme: str
    authority: str
    path: str
    prefixed: bool = False

    @classmethod
    def of(cls, method: bytes, target: str, headers: list[tuple[bytes, bytes]]) -> Target:
        """Raises `Refused` for what is no request to a proxy."""
        if method == b"CONNECT":
            return cls("tunnel", target, "")
        if method in _ECHO:
            raise Refused(405, "Requests whose answer repeats them are not sent on.")
        if target.startswith(PREFIX):
            # A page in a browser may send requests here, under a name of its own that leads to this machine.
            named = [value.decode("latin-1") for name, value in headers if name == b"host"]
            if any(name == b"origin" for name, _ in headers) or not all(_LOOPBACK.fullmatch(value) for value in named):
                raise Refused(403, "This is a proxy for programs, not for pages.")
            authority, slash, path = target.removeprefix(PREFIX).partition("/")
            authority, mark, query = authority.partition("?")
            return cls("https", authority, f"/{path}" if slash else f"/{mark}{query}", prefixed=True)
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise Refused(404, f"This is a proxy: send {PREFIX}<host>/<path>, an absolute URL or CONNECT.")
        rest = absolute[3]
        return cls(absolute[1].lower(), absolute[2], rest if rest.startswith("/") else f"/{rest}")

    def checked(self, rules: tuple[HostRules, ...]) -> tuple[Host, int]:
        """Host and port. Raises `Refused` for what cannot be read, `RefusedHostError` for a host that may not be reached."""
        import httpx2

        if not _AUTHORITY.fullmatch(self.authority):
            raise Refused(400, f"{self.authority[:200]!r} is no host that can be checked.")
        scheme = "https" if self.scheme == "tunnel" else self.scheme
        try:
            url = httpx2.URL(f"{scheme}://{self.authority}/")
        except httpx2.InvalidURL:
            raise Refused(400, f"{self.authority[:200]!r} is no host that can be checked.") from None
        hosts = [each.check_url(url) for each in rules]
        return hosts[0], url.port or DEFAULT_PORTS[scheme]

    def location(self, value: str) -> str:
        """A redirect as the client must see it: one that stays with this host leads through the broker again."""
        if not self.prefixed:
            return value
        joined = urljoin(f"https://{self.authority}{self.path}", value)
        parts = urlsplit(joined)
        if parts.scheme != "https" or parts.netloc.lower() != self.authority.lower():
            return value
        return f"{PREFIX}{self.authority}{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"


@dataclass(slots=True)
class Peer:
    """One side of an exchange."""

    connection: h11.Connection
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    timeout_s: float

    async def next(self) -> Any:
        """The next h11 event. Raises `TimeoutError` after too long a silence."""
        import h11

        while True:
            if self.connection.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            event = self.connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            async with asyncio.timeout(self.timeout_s):
                self.connection.receive_data(await self.reader.read(_READ_BYTES))

    async def send(self, event: Any) -> None:
        data = self.connection.send(event)
        if data:
            self.writer.write(data)
            async with asyncio.timeout(self.timeout_s):
                await self.writer.drain()


@dataclass(slots=True)
class Exchange:
    """One connection of a client: one request, one answer. What it fails at is an answer, or a connection that ends early."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    rules: tuple[HostRules, ...]
    credentials: Callable[[str], Mapping[str, str] | None]
    resolver: Resolver
    timeout_s: float

    async def serve(self) -> None:
        import h11

        client = Peer(
            h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES), self.reader, self.writer, self.timeout_s
        )
        try:
            with contextlib.suppress(OSError, TimeoutError, h11.ProtocolError):
                await self._answer_or_refuse(client)
        finally:
            self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _answer_or_refuse(self, client: Peer) -> None:
        import h11

        try:
            await self._answer(client)
        except RefusedHostError as error:
            await _refuse(client, 403, error.detail)
        except Refused as error:
            await _refuse(client, error.status, error.text)
        except h11.RemoteProtocolError:
            await _refuse(client, 400, "This is no HTTP request.")

    async def _answer(self, client: Peer) -> None:
        import h11

        request = await client.next()
        if not isinstance(request, h11.Request):
            return
        target = Target.of(request.method, request.target.decode("ascii"), list(request.headers))
        host, port = target.checked(self.rules)
        try:
            async with asyncio.timeout(self.timeout_s):
                addresses = await resolve(host, port, self.rules[0], self.resolver)
                added = self._added(target, host, addresses)
                reader, writer = await _connect(addresses, port, host if target.scheme == "https" else None)
        except (OSError, TimeoutError) as error:
            raise Refused(502, f"{host.name} could not be connected to ({_reason(error)}).") from None
        try:
            if target.scheme == "tunnel":
                await self._tunnel(client, reader, writer)
            else:
                server = Peer(h11.Connection(h11.CLIENT), reader, writer, self.timeout_s)
                await _forward(client, server, _forwarded(request, target, added), target, host)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _added(self, target: Target, host: Host, addresses: list[IPAddress]) -> Mapping[str, str] | None:
        added = None if target.scheme == "tunnel" else self.credentials(host.name)
        if added and target.scheme == "http" and any(is_public(address) for address in addresses):
            way = f"{PREFIX}{host.name}/<path>"
            raise Refused(403, f"Credentials for {host.name} are only sent over TLS: send the request to {way} of this proxy.")
        return added

    async def _tunnel(self, client: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import h11

        await client.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        early, _ = client.connection.trailing_data
        writer.write(early)
        await _both(_copy(client.reader, writer), _copy(reader, client.writer), ends_with_second=False)


def _forwarded(request: h11.Request, target: Target, added: Mapping[str, str] | None) -> h11.Request:
    """The request as the server gets it."""
    import h11

    dropped = _dropped(list(request.headers)) | {b"host"}
    if added is not None:
        dropped |= {b"authorization", *(name.encode() for name in added)}
    kept = [(name, value) for name, value in request.headers if name not in dropped]
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        kept.append((b"transfer-encoding", b"chunked"))
    mine = [(b"host", target.authority.encode()), (b"connection", b"close")]
    secret = [(name.encode(), value.encode()) for name, value in (added or {}).items()]
    return h11.Request(method=request.method, target=target.path, headers=[*mine, *kept, *secret])


def _dropped(headers: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The names of headers that belong to one connection, those listed in `Connection` included."""
    named = {item.strip().lower() for name, value in headers if name == b"connection" for item in value.split(b",")}
    return _HOP_BY_HOP | (named - {b"content-length", b"host"})


async def _forward(client: Peer, server: Peer, request: h11.Request, target: Target, host: Host) -> None:
    """Sends the request on while it comes in, and the answer back."""
    import h11

    begun = False

    async def upload() -> None:
        await server.send(request)
        while True:
            event = await client.next()
            await server.send(event)
            if isinstance(event, h11.EndOfMessage):
                return

    async def download() -> None:
        nonlocal begun
        while True:
            event = await server.next()
            if isinstance(event, h11.InformationalResponse):
                continue
            if isinstance(event, h11.ConnectionClosed):
                return
            begun = True
            await client.send(_answered(event, target) if isinstance(event, h11.Response) else event)
            if isinstance(event, h11.EndOfMessage):
                return

    try:
        await _both(upload(), download())
    except (OSError, TimeoutError, h11.ProtocolError) as error:
        if begun or client.connection.their_state is h11.ERROR:
            client.writer.transport.abort()  # A client must not take what has arrived for the whole answer.
            raise
        status = 504 if isinstance(error, TimeoutError) else 502
        raise Refused(status, f"{host.name} gave no answer ({_reason(error)}).") from None


def _answered(response: h11.Response, target: Target) -> h11.Response:
    """The head of an answer as the client gets it."""
    import h11

    dropped = _dropped(list(response.headers))
    kept = [
        (name, target.location(value.decode("latin-1")).encode("latin-1") if name == b"location" else value)
        for name, value in response.headers
        if name not in dropped
    ]
    return h11.Response(status_code=response.status_code, reason=response.reason, headers=[*kept, (b"connection", b"close")])


async def _connect(
    addresses: list[IPAddress], port: int, tls_host: Host | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the first address that answers; the certificate is checked for the host's name."""
    tls: dict[str, Any] = {} if tls_host is None else {"ssl": tls_context(), "server_hostname": tls_host.name}
    for last, address in enumerate(addresses, start=1 - len(addresses)):
        try:
            return await asyncio.open_connection(str(address), port, **tls)
        except OSError:
            if last == 0:
                raise
    raise AssertionError("resolve() gives at least one address")


async def _both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None], *, ends_with_second: bool = True) -> None:
    """Runs both at once, until both have ended, or the second has; what one raises ends the other."""
    tasks = [asyncio.create_task(first), asyncio.create_task(second)]
    try:
        pending = set(tasks)
        while pending and not (ends_with_second and tasks[1].done()):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _refuse(client: Peer, status: int, text: str) -> None:
    import h11

    if client.connection.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
        return
    body = f"{text}\n".encode()
    headers = [("content-type", "text/plain; charset=utf-8"), ("content-length", str(len(body))), ("connection", "close")]
    await client.send(h11.Response(status_code=status, headers=headers, reason=b""))
    await client.send(h11.Data(data=body))
    await client.send(h11.EndOfMessage())


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
