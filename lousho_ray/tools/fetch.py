"""One HTTP exchange for a tool: every hop is checked by the rules of `net.py`, and time, redirects and bytes are bounded."""

from __future__ import annotations

import asyncio
import functools
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from lousho_ray.errors import ConfigurationError, ToolExecutionError
from lousho_ray.tools.net import DEFAULT_PORTS, Host, HostRules, IPAddress, RefusedHostError, Resolver, resolve, system_resolver

if TYPE_CHECKING:
    import ssl

    import httpx2

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CREDENTIALS = frozenset({"authorization", "cookie", "proxy-authorization"})
_OWN_HEADERS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "te", "trailer", "upgrade", "expect"}
)
"""Headers the exchange sets itself: `Host` would name another site than the one that was checked."""

_CHARSET = re.compile(rb"charset\s*=\s*[\"']?([a-zA-Z0-9_.:-]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds of one exchange. `timeout_ms` covers redirects and body; `max_bytes` counts the bytes sent and the bytes decoded."""

    timeout_ms: float = 30_000
    max_redirects: int = 10
    max_bytes: int = 2 * 1024 * 1024

    def __post_init__(self) -> None:
        for name, least in (("timeout_ms", 0), ("max_redirects", -1), ("max_bytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > least:
                raise ConfigurationError(f"`{name}` is {value!r}; it is a number above {least}.", field=name)


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """What came back. `body` is decoded, and cut at `max_bytes` when `truncated`."""

    url: str
    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes
    truncated: bool

    @property
    def media_type(self) -> str:
        """The media type in lower case, without parameters; empty when the server gave none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_text(self) -> bool:
        kind = self.media_type
        if not kind:
            return b"\x00" not in self.body
        exact = {"application/json", "application/xml", "application/javascript", "application/x-ndjson", "application/yaml"}
        return kind.startswith("text/") or kind in exact or kind.endswith(("+json", "+xml"))

    def text(self) -> str:
        """The body as text: by the charset of the header, a byte order mark or the page itself, else UTF-8."""
        if self.body.startswith(b"\xef\xbb\xbf"):
            return self.body[3:].decode("utf-8", "replace")
        declared = _CHARSET.search(self.headers.get("content-type", "").encode("utf-8", "replace"))
        found = declared or (_CHARSET.search(self.body[:1024]) if "html" in self.media_type else None)
        try:
            return self.body.decode(found[1].decode() if found else "utf-8", "replace")
        except LookupError:
            return self.body.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Hop:
    """One request of an exchange, checked: `addresses` are the only ones it may go to, `headers` all it sends."""

    request: Request
    url: httpx2.URL
    host: Host
    port: int
    addresses: list[IPAddress]
    headers: dict[str, str]


Exchange: TypeAlias = Callable[[Hop, int, float], Awaitable[Response]]
"""Makes one hop: `(hop, max_bytes, timeout_ms)`. Raises `ToolExecutionError`."""


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Makes exchanges under rules and limits. A connection serves one hop only: it was made to an address checked for that hop."""

    rules: HostRules = field(default_factory=HostRules)
    limits: FetchLimits = field(default_factory=FetchLimits)
    user_agent: str = "lousho"
    resolver: Resolver = system_resolver
    exchange: Exchange = field(default_factory=lambda: connect)

    async def fetch(self, request: Request) -> Response:
        """Sends `request`, following redirects.

        Raises:
            ToolExecutionError: When a hop is refused, the time is over, there are too many redirects, or the exchange fails.
        """
        import httpx2

        _check_headers(request.headers)
        deadline = asyncio.timeout(self.limits.timeout_ms / 1000)
        try:
            async with deadline:
                return await self._follow(request)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise ToolExecutionError(f"{_host_of(request.url)} took longer than {self.limits.timeout_ms:g} ms.") from error
        except httpx2.InvalidURL as error:
            raise ToolExecutionError(f"{request.url[:200]!r} is not, or leads to, a URL that can be fetched: {error}") from error

    async def _follow(self, request: Request) -> Response:
        import httpx2

        start, url = request.url, httpx2.URL(request.url)
        for number in range(int(self.limits.max_redirects) + 1):
            try:
                response = await self._hop(request, url)
            except RefusedHostError as error:
                if number == 0:
                    raise
                raise ToolExecutionError(f"{_host_of(start)} redirected to where it may not: {error.detail}") from error
            location = response.headers.get("location")
            if response.status not in REDIRECTS or location is None:
                return response
            target = url.join(location)
            request, url = _redirected(request, response.status, url, target), target
        raise ToolExecutionError(f"{_host_of(start)} redirected more than {int(self.limits.max_redirects)} times.")

    async def _hop(self, request: Request, url: httpx2.URL) -> Response:
        host = self.rules.check_url(url)
        port = url.port or DEFAULT_PORTS[url.scheme]
        addresses = await resolve(host, port, self.rules, self.resolver)
        hop = Hop(request, url, host, port, addresses, _headers(request, url, host, self.user_agent))
        return await self.exchange(hop, int(self.limits.max_bytes), self.limits.timeout_ms)


def _headers(request: Request, url: httpx2.URL, host: Host, user_agent: str) -> dict[str, str]:
    """All that is sent; the name stays in `Host`, whatever is connected to."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    own = {"Host": name if url.port is None else f"{name}:{url.port}", "User-Agent": user_agent, "Accept": "*/*"}
    own |= {"Accept-Encoding": "gzip", "Connection": "close"}
    given = {key.lower() for key in request.headers}
    return {key: value for key, value in own.items() if key.lower() not in given} | dict(request.headers)


async def connect(hop: Hop, max_bytes: int, timeout_ms: float) -> Response:
    """An exchange over a connection of this process. Its time is that of the whole request, so `timeout_ms` is not looked at."""
    import httpx2

    try:
        async with httpx2.AsyncHTTPTransport(verify=tls_context(), trust_env=False) as transport:
            reply = await _dial(transport, hop)
            try:
                shown = {name.lower(): value for name, value in reply.headers.items()}
                redirects = reply.status_code in REDIRECTS and "location" in shown
                body, truncated = (b"", False) if redirects else await _read(reply, max_bytes)
            finally:
                await reply.aclose()
    except httpx2.HTTPError as error:
        raise ToolExecutionError(f"The exchange with {hop.host.name} failed: {str(error) or type(error).__name__}") from error
    return Response(str(hop.url), reply.status_code, reply.reason_phrase, shown, body, truncated)


async def _dial(transport: httpx2.AsyncHTTPTransport, hop: Hop) -> httpx2.Response:
    """Connects to a checked address; the name stays in SNI and in the certificate check."""
    import httpx2

    for last, address in enumerate(hop.addresses, start=1 - len(hop.addresses)):
        pinned = httpx2.Request(
            hop.request.method,
            hop.url.copy_with(host=str(address)),
            headers=hop.headers,
            content=hop.request.body,
            extensions={"sni_hostname": hop.host.name} if hop.host.address is None else {},
        )
        try:
            return await transport.handle_async_request(pinned)
        except httpx2.ConnectError:
            if last == 0:
                raise
    raise AssertionError("resolve() gives at least one address")


def _redirected(request: Request, status: int, old: httpx2.URL, new: httpx2.URL) -> Request:
    """The next request: without credentials on another origin, as a GET without body where the status asks for it."""
    headers, method, body = dict(request.headers), request.method, request.body
    if (old.scheme, old.host, old.port) != (new.scheme, new.host, new.port):
        headers = {name: value for name, value in headers.items() if name.lower() not in _CREDENTIALS}
    if (status == 303 and method != "HEAD") or (status in {301, 302} and method == "POST"):
        method, body = "GET", None
        headers = {name: value for name, value in headers.items() if not name.lower().startswith("content-")}
    return Request(method, str(new), headers, body)


async def _read(reply: httpx2.Response, max_bytes: int) -> tuple[bytes, bool]:
    """The decoded body, cut at `max_bytes` of what arrives and of what it unpacks to."""
    unpack = _unpacker(reply.headers.get("content-encoding", "identity"))
    arrived, body = 0, bytearray()
    async for chunk in reply.aiter_raw():
        arrived += len(chunk)
        body += unpack(chunk[: max(0, max_bytes + 1 - (arrived - len(chunk)))], max_bytes + 1 - len(body))
        if len(body) > max_bytes or arrived > max_bytes:
            return bytes(body[:max_bytes]), True
    return bytes(body), False


def unpacked(body: bytes, encoding: str, max_bytes: int) -> tuple[bytes, bool]:
    """A whole body like `_read`: decoded, and cut at `max_bytes` before and after that."""
    decoded = _unpacker(encoding)(body[: max_bytes + 1], max_bytes + 1)
    return decoded[:max_bytes], len(body) > max_bytes or len(decoded) > max_bytes


def _unpacker(encoding: str) -> Callable[[bytes, int], bytes]:
    """A function `(chunk, room)` that decodes at most `room` bytes."""
    name = encoding.strip().lower()
    if name in {"identity", ""}:
        return lambda chunk, room: chunk
    if name not in {"gzip", "x-gzip", "deflate"}:
        raise ToolExecutionError(f"The answer is encoded as {encoding!r}, which was not asked for.")
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)

    def decode(chunk: bytes, room: int) -> bytes:
        try:
            return decoder.decompress(decoder.unconsumed_tail + chunk, max(1, room))
        except zlib.error as error:
            raise ToolExecutionError(f"The body of the answer is not what its Content-Encoding says: {error}") from error

    return decode


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if name.lower() in _OWN_HEADERS:
            raise ToolExecutionError(f"The header {name!r} cannot be set: it is made from the URL and the body.")
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search(r"[\r\n\0]", value) or not value.isascii():
            raise ToolExecutionError(f"The header {name[:100]!r} is not one that HTTP can carry.")


def _host_of(url: str) -> str:
    """What to call a server in an error, without credentials and query."""
    match = re.match(r"[a-z]+://(?:[^/?#]*@)?([^/?#]*)", url, re.IGNORECASE)
    return (match[1] if match else url)[:200] or "the server"


@functools.cache
def tls_context() -> ssl.SSLContext:
    import httpx2

    # Without the environment: a proxy or a certificate file named there would undo the checks.
    return httpx2.create_ssl_context(trust_env=False)
