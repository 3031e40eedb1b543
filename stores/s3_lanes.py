"""Where the requests of an S3 store run: on one event loop of their own, those of one record in the order they were made."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from threading import Lock
from typing import Any, TypeVar

from lousho_ray.errors import StorageError
from lousho_ray.loop_thread import LoopThread

T = TypeVar("T")

S3_LOOP = LoopThread()
"""Shared by all S3 stores of the process, so that a store works from any number of event loops and threads."""


class Lanes:
    """Runs calls: those of one lane one after another, in the order they were made. A call whose caller is gone is finished.

    Args:
        url: The store, for errors.
        check: Awaited before each call.
    """

    def __init__(self, url: str, check: Callable[[], Awaitable[None]]) -> None:
        self._url = url
        self._check = check
        self._guard = Lock()
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._closed = False
        self._pid = 0
        self._locks: dict[tuple[str, ...], tuple[asyncio.Lock, list[None]]] = {}

    async def run(self, lane: tuple[str, ...], call: Callable[[], Awaitable[T]]) -> T:
        return await asyncio.shield(asyncio.wrap_future(self._submit(lane, call)))

    def run_blocking(self, lane: tuple[str, ...], call: Callable[[], Awaitable[T]]) -> T:
        return self._submit(lane, call).result()

    @asynccontextmanager
    async def inside(self, lane: tuple[str, ...]) -> AsyncIterator[None]:
        """Holds a lane; for calls that already run on the loop."""
        lock, users = self._locks.setdefault(lane, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                del self._locks[lane]

    def close(self) -> None:
        """Waits for what was begun; later calls are refused."""
        with self._guard:
            self._closed = True
            running = list(self._running)
        concurrent.futures.wait(running)

    def _submit(self, lane: tuple[str, ...], call: Callable[[], Awaitable[T]]) -> concurrent.futures.Future[T]:
        with self._guard:
            if self._closed:
                raise StorageError(f"The store {self._url} is closed; create a new one.", path=self._url)
            if self._pid not in (0, os.getpid()):
                raise StorageError(
                    f"The store {self._url} was used before a fork; create a new one in this process.", path=self._url
                )
            self._pid = os.getpid()
            future = asyncio.run_coroutine_threadsafe(self._in_lane(lane, call), S3_LOOP.loop())
            self._running.add(future)
        future.add_done_callback(self._ended)
        return future

    async def _in_lane(self, lane: tuple[str, ...], call: Callable[[], Awaitable[T]]) -> T:
        async with self.inside(lane):
            await self._check()
            return await call()

    def _ended(self, future: concurrent.futures.Future[Any]) -> None:
        with self._guard:
            self._running.discard(future)
