"""Calls of bytes over a vendor's official client, with what is the same at every call put together once.

The client makes the head of a call (URL, headers, credentials, timeouts) when a URL is first called. From then on a call is its
body, sent over the `aiohttp` session that the client's own pool uses. That takes a quarter of the CPU of the way through the client
and its HTTP layer, which is still taken where it does more: through a proxy, after a redirect, with credentials that it renews, and
while calls are logged. The clients of OpenAI and Anthropic come from one generator and have the same inside.

Import this module only where a client is made: what it imports takes a second.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import aiohttp
import httpx2

_UNPACKED = ("gzip", "deflate", "identity")
"""Forms of a body that the session reads whatever else is installed. The client's own layer may offer more."""


@dataclass(frozen=True, slots=True)
class Head:
    """A call without its body, and the session that carries it."""

    request: httpx2.Request
    session: aiohttp.ClientSession
    url: str
    headers: tuple[tuple[str, str], ...]
    timeout: aiohttp.ClientTimeout

    @classmethod
    def of(cls, request: httpx2.Request, session: aiohttp.ClientSession) -> Head:
        headers = httpx2.Headers(request.headers)
        for of_one_call in ("Content-Length", "Cookie"):
            headers.pop(of_one_call, None)
        if offered := headers.get("Accept-Encoding"):
            headers["Accept-Encoding"] = ", ".join(name for name in offered.split(", ") if name in _UNPACKED) or "identity"
        limits = request.extensions["timeout"]
        timeout = aiohttp.ClientTimeout(connect=limits["pool"], sock_connect=limits["connect"], sock_read=limits["read"])
        return cls(request, session, str(request.url), tuple(headers.multi_items()), timeout)


class Reply:
    """An answer whose body is read as it comes."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.headers: Mapping[str, str] = response.headers

    async def aread(self) -> bytes:
        return await self._response.read()

    async def aiter_bytes(self) -> AsyncGenerator[bytes, None]:
        async for data in self._response.content.iter_any():
            yield data

    async def aclose(self) -> None:
        """Gives the connection back when the body was read to its end, and closes it otherwise."""
        self._response.release()
        await self._response.wait_for_close()


class DirectCalls:
    """The `post` of a vendor's client with a body of bytes.

    Args:
        vendor: The package of the client: `openai` or `anthropic`.
        client: The client, made with `pool` as its `http_client`.
        pool: From `pool()`.
        options: What each call's `options` are.
    """

    def __init__(self, vendor: ModuleType, client: Any, pool: httpx2.AsyncClient, options: Mapping[str, Any]) -> None:
        self._vendor: Any = vendor
        self.client = client
        self._pool = pool
        self._options: Any = dict(options)
        self._heads: dict[str, Head | None] = {}
        who = {"httpx2": logging.INFO, vendor.__name__: logging.DEBUG}  # tells of each call, from which level on
        self._loggers = tuple((logging.getLogger(name), level) for name, level in who.items())

    async def exchange(self, url: str, content: bytes) -> bytes:
        """Sends a body to a URL, a whole one or a path below the client's own, and gives the body of the answer.

        Raises:
            Exception: The client's own errors, as its `post`.
        """
        response = await self._send(url, content)
        if response is None:
            answer = await self.client.post(url, content=content, cast_to=httpx2.Response, options=self._options)
            body: bytes = answer.content
            return body
        try:
            return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            self._fail(error, url)

    async def open(self, url: str, content: bytes) -> Reply | httpx2.Response:
        """As `exchange()`, but gives the answer as soon as it begins. Whoever gets it closes it."""
        response = await self._send(url, content)
        if response is not None:
            return Reply(response)
        streamed = {"stream": True, "stream_cls": self._vendor.AsyncStream[Any]}
        answer: httpx2.Response = await self.client.post(
            url, content=content, cast_to=httpx2.Response, options=self._options, **streamed
        )
        return answer

    async def aclose(self) -> None:
        """Closes the client and its connections."""
        await self.client.close()

    async def _send(self, url: str, content: bytes) -> aiohttp.ClientResponse | None:
        """A good answer that has begun; `None` when the client has to send this itself."""
        head = self._head(url)
        if head is None or any(logger.isEnabledFor(level) for logger, level in self._loggers):
            return None
        try:
            response = await head.session.request(
                "POST", head.url, data=content, headers=self._headers(head), timeout=head.timeout, allow_redirects=False
            )
            if "Set-Cookie" in response.headers:
                self._pool.cookies.extract_cookies(_answer(response, head))
            if response.status < 300:
                return response
            body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            self._fail(error, url)
        if response.status >= 400:
            raise self.client._make_status_error_from_response(_answer(response, head, body))
        self._heads[url] = None  # the client knows which redirects to follow
        return None

    def _head(self, url: str) -> Head | None:
        if url not in self._heads:
            self._heads[url] = None if self.client.custom_auth is not None else self._new_head(url)
        return self._heads[url]

    def _new_head(self, url: str) -> Head | None:
        options = importlib.import_module(f"{self._vendor.__name__}._models").FinalRequestOptions
        request = self.client._build_request(options.construct(method="post", url=url, content=b"", **self._options))
        session = session_for(self._pool, request.url)
        return None if session is None else Head.of(request, session)

    def _headers(self, head: Head) -> tuple[tuple[str, str], ...]:
        if not self._pool.cookies:
            return head.headers
        request = httpx2.Request("POST", head.request.url, cookies=self._pool.cookies)
        return (*head.headers, *(("Cookie", value) for value in request.headers.get_list("cookie")))

    def _fail(self, error: Exception, url: str) -> NoReturn:
        head = self._heads[url]
        assert head is not None
        if isinstance(error, TimeoutError):
            raise self._vendor.APITimeoutError(request=head.request) from error
        raise self._vendor.APIConnectionError(request=head.request) from error


def pool(vendor: Any, timeout: httpx2.Timeout) -> httpx2.AsyncClient:
    """A vendor's own connection pool over `aiohttp`."""
    trusted = _trusted(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    made: httpx2.AsyncClient = vendor.DefaultAioHttpClient(verify=trusted, timeout=timeout)
    return made


def session_for(pool: httpx2.AsyncClient, url: httpx2.URL) -> aiohttp.ClientSession | None:
    """The session of a pool that carries calls to a URL; `None` when they go through a proxy."""
    transport: Any = pool._transport_for_url(url)
    if transport.proxy is not None:
        return None
    if transport.client is None:
        transport.client = transport.get_client()
    session: aiohttp.ClientSession = transport.client
    return session


def _answer(response: aiohttp.ClientResponse, head: Head, body: bytes = b"") -> httpx2.Response:
    """The same answer as the client knows it; its body was unpacked."""
    headers = [(name, value) for name, value in response.raw_headers if name.lower() != b"content-encoding"]
    return httpx2.Response(response.status, headers=headers, content=body, request=head.request)


@functools.lru_cache(maxsize=8)
def _trusted(file: str | None, folder: str | None) -> ssl.SSLContext:
    """What each pool would make for itself from these two variables: reading the certificates takes 25 ms."""
    return httpx2.create_ssl_context()
