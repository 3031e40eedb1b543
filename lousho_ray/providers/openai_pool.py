"""The official OpenAI client and its connection pool, with what is the same at every call put together once.

Import this module only where a client is made: it imports the client's package, which takes a second.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import httpx2
import openai

if TYPE_CHECKING:
    from collections.abc import Mapping


class Client(openai.AsyncOpenAI):
    """The official client. Its headers depend on nothing that changes after it was made."""

    @functools.cached_property
    def default_headers(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {name: value for name, value in super().default_headers.items() if not isinstance(value, openai.Omit)}


class Pool(openai.DefaultAioHttpClient):
    """The client's own pool over `aiohttp`. A request of it has a URL that was parsed and headers that were merged before."""

    _merged: tuple[Any, httpx2.Headers] | None = None

    def build_request(self, method: str, url: Any, **parts: Any) -> httpx2.Request:
        headers, content, timeout = (parts.pop(name, None) for name in ("headers", "content", "timeout"))
        if any(part is not None for part in parts.values()):
            return super().build_request(method, url, headers=headers, content=content, timeout=timeout, **parts)
        limits = {"timeout": httpx2.Timeout(timeout).as_dict()}
        merged = self._with_own(headers)
        return httpx2.Request(method, _url(str(url)), headers=merged, cookies=self.cookies, content=content, extensions=limits)

    def _with_own(self, headers: Any) -> httpx2.Headers:
        """The headers of a call over those of the pool: as good as always those of the call before."""
        known = self._merged
        if known is not None and known[0] == headers:
            return known[1]
        merged = httpx2.Headers(self.headers)
        merged.update(headers)
        self._merged = (headers, merged)
        return merged


@functools.lru_cache(maxsize=256)
def _url(url: str) -> httpx2.URL:
    return httpx2.URL(url)
