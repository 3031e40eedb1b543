"""`EventLog`: the events of one run between the run that appends and the one consumer that reads, in one process or over an actor.

The reader has a cursor: reading from it drops what lies before, and returns everything that has gathered, so a slow reader gets
batches. Once somebody reads, a writer that is too far ahead waits in `drain()`: memory stays bounded. While nobody reads, the log
keeps everything (a consumer may start after the run has ended).
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")

HIGH_WATER = 4_096
"""Unread events at which a run with an active reader waits."""

PATIENCE_S = 30.0
"""How long a run waits for a sign of its reader at most: what the reader is waiting for may be the run itself."""


class EventLog(Generic[T]):
    """An append-only log with one reading cursor. All methods belong to the event loop of the run."""

    def __init__(self, high_water: int = HIGH_WATER, patience_s: float = PATIENCE_S) -> None:
        self._items: deque[T] = deque()
        self._base = 0
        self._closed = False
        self._reading = False
        self._high_water = high_water
        self._patience_s = patience_s
        self._changed: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def next_index(self) -> int:
        return self._base + len(self._items)

    def append(self, item: T) -> None:
        self._items.append(item)
        self._wake_reader()

    def close(self) -> None:
        """No more items will come."""
        self._closed = True
        self._wake_reader()
        self._free_writer()

    async def read(self, cursor: int, *, wait_s: float | None = None, most: int = 1_000) -> tuple[list[T], int]:
        """The items from `cursor` on (at most `most`) and the next cursor.

        Waits for the first one, at most `wait_s` seconds. An empty list means that the wait ran out, or that the log is closed and
        read to its end (`at_end`).
        """
        self._reading = True
        self._drop_before(cursor)
        if not self._items and not self._closed:
            await self._wait_for_change(wait_s)
        items = list(islice(self._items, most))
        return items, self._base + len(items)

    def at_end(self, cursor: int) -> bool:
        return self._closed and cursor >= self.next_index

    async def drain(self) -> None:
        """Waits while an active reader is more than the high-water mark behind, but not for one that does not come back."""
        while self._reading and not self._closed and len(self._items) >= self._high_water:
            if self._room is None or self._room.done():
                self._room = asyncio.get_running_loop().create_future()
            done, _ = await asyncio.wait({self._room}, timeout=self._patience_s)
            if not done:
                self._reading = False

    def stop_reading(self) -> None:
        """The reader is gone: nobody has to wait for it any more."""
        self._reading = False
        self._free_writer()

    def _drop_before(self, cursor: int) -> None:
        while self._base < cursor and self._items:
            self._items.popleft()
            self._base += 1
        if len(self._items) < self._high_water:
            self._free_writer()

    async def _wait_for_change(self, wait_s: float | None) -> None:
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        if wait_s is None:
            await self._changed
        else:
            await asyncio.wait({self._changed}, timeout=wait_s)

    def _wake_reader(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _free_writer(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
