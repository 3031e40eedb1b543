"""Reading a streamed response: events as they arrive, a limit on every wait, the connection closed however it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from lousho_ray.providers.base import HTTPProvider

T = TypeVar("T")

DRAIN_S = 0.02
"""How long a finished stream may take to end its body. A connection that has not ended by then is closed, not reused."""

logger = logging.getLogger("lousho_ray.providers")


class _Decoder(Protocol[T]):
    def feed(self, data: bytes) -> list[T]: ...

    def close(self) -> list[T]: ...


class _Response(Protocol):
    def aiter_bytes(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


class EventReader(Generic[T]):
    """Reads the events of one streaming response under the limits of its provider; leaving it closes the connection.

    `read()` gives the events that arrived together, and `None` at the end of the body. The first event must come before
    `deadline` (loop time); after it neither silence nor keep-alives alone may last too long.
    """

    def __init__(self, provider: HTTPProvider, response: _Response, decoder: _Decoder[T], deadline: float | None) -> None:
        self._provider = provider
        self._response = response
        self._reads: Any = response.aiter_bytes()
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._waiting_for = "first event"
        self._limit_ms = provider.timeout_ms
        self._started = False
        self._ended = False

    async def read(self) -> list[T] | None:
        progress_ms, idle_ms = self._provider.progress_timeout_ms, self._provider.idle_timeout_ms
        progress_by = None if progress_ms is None else self._loop.time() + progress_ms / 1000
        while not self._ended:
            if self._started:
                self._limit(progress_by, progress_ms, idle_ms)
            data = await self._next()
            if data is None:
                self._ended = True
                return self._decoder.close() or None
            if events := self._decoder.feed(data):
                self._started = True
                return events
        return None

    def _limit(self, progress_by: float | None, progress_ms: float | None, idle_ms: float | None) -> None:
        idle_by = None if idle_ms is None else self._loop.time() + idle_ms / 1000
        if idle_by is None or (progress_by is not None and progress_by < idle_by):
            self._deadline, self._waiting_for, self._limit_ms = progress_by, "event after the last one", progress_ms
        else:
            self._deadline, self._waiting_for, self._limit_ms = idle_by, "data after the last event", idle_ms

    async def _next(self) -> bytes | None:
        limit = asyncio.timeout_at(self._deadline)
        try:
            async with limit:
                return await anext(self._reads, None)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._provider.timed_out(self._waiting_for, self._limit_ms) from None

    async def finish(self) -> None:
        """After the last event: reads the end of the body if it is there, so that the connection can be used again."""
        if self._ended:
            return
        try:
            async with asyncio.timeout(DRAIN_S):
                while await anext(self._reads, None) is not None:
                    pass
        except TimeoutError:
            return
        except Exception as error:  # the answer is complete; how its connection ends does not matter
            logger.debug("%s: a finished stream ended with %s", self._provider.name, type(error).__name__)

    async def __aenter__(self) -> EventReader[T]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self._reads.aclose()
        await self._response.aclose()
