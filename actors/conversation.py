"""`Conversation`: what one process (one event loop of it) and one actor have to say to each other, in as few calls as can be.

A call between processes costs both sides about half a millisecond of CPU, whatever it says. So what is to be handed over while a
batch is under way goes with the next one, and how everything ends is read by one long-poll with a cursor.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from lousho_ray.actors.cluster import ActorLostError, look_up_again
from lousho_ray.errors import OperationTimeoutError
from lousho_ray.ids import new_id

GATHER_S = 0.000_5
MOST_GATHER_S = 0.012
"""How long a call waits for others to go with it: so much for each entry that is under way already, and at most so long. One that
is alone never waits."""


MOST_ENTRIES = 500
"""Entries of one batch: its actor has other conversations, too."""


class Entry(Protocol):
    """Something to be handed over; its end is reported under its key."""

    @property
    def key(self) -> str: ...


class Answer(Protocol):
    """The answer to a poll: what the actor reports from a cursor on, the next cursor, and the life of the actor that says so."""

    @property
    def life(self) -> str: ...

    @property
    def cursor(self) -> int: ...


E = TypeVar("E", bound=Entry)
A = TypeVar("A", bound=Answer)


def gathering_s(others: int) -> float:
    """How long to wait for company, with so many under way besides."""
    return min(MOST_GATHER_S, GATHER_S * others)


class Conversation(ABC, Generic[E, A]):
    """Batches out, one poll open while anything that was handed over has not ended. For one event loop.

    An actor that was started again has another life: what was handed over to it before is lost.
    """

    def __init__(self, handle: Any, what: str) -> None:
        self.handle = handle
        self.id = new_id()
        self.answered_at = float("-inf")
        self._what = what
        self._unsent: list[E] = []
        self._under_way: dict[str, str] = {}
        self._sending: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._cursor = 0
        self._life: str | None = None

    @abstractmethod
    async def _submit(self, batch: Sequence[E]) -> str:
        """Hands over a batch, in a bounded time; the life of the actor. What was refused has been told so."""

    @abstractmethod
    async def _poll(self, cursor: int) -> A:
        """Asks for reports, in a bounded time."""

    @abstractmethod
    def _take(self, answer: A) -> None:
        """Takes in reports; what has ended is `_forget`-ten."""

    @abstractmethod
    def _lose(self, keys: Sequence[str], error: Exception) -> None:
        """These entries have failed: the actor is lost, or they cannot be sent to it."""

    def _hand_over(self, entry: E) -> None:
        self._unsent.append(entry)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())

    def _forget(self, key: str) -> None:
        self._under_way.pop(key, None)

    async def _send(self) -> None:
        """Hands over what has gathered, one batch at a time."""
        try:
            await asyncio.sleep(0)
            while self._unsent:
                if pause_s := gathering_s(len(self._under_way)):
                    await asyncio.sleep(pause_s)
                batch, self._unsent = self._unsent[:MOST_ENTRIES], self._unsent[MOST_ENTRIES:]
                await self._deliver(batch)
        finally:
            self._sending = None

    async def _deliver(self, batch: Sequence[E]) -> None:
        try:
            life = await self._submit(batch)
        except (ActorLostError, OperationTimeoutError) as error:
            self._lost([entry.key for entry in batch], error)
        except Exception as error:
            if len(batch) == 1:
                self._lose([batch[0].key], error)
                return
            for entry in batch:  # One that cannot be sent is no trouble of the others.
                await self._deliver([entry])
        else:
            self._lives(life)
            self._under_way.update((entry.key, life) for entry in batch if self._waits(entry.key))
            if self._polling is None and self._under_way:
                self._polling = asyncio.create_task(self._read())

    @abstractmethod
    def _waits(self, key: str) -> bool:
        """Whether anybody still waits for the end of an entry."""

    async def _read(self) -> None:
        try:
            while self._under_way:
                if pause_s := gathering_s(len(self._under_way) - 1):
                    await asyncio.sleep(pause_s)
                life = self._life
                try:
                    answer = await self._poll(self._cursor)
                    self._lives(answer.life)
                    self._cursor = answer.cursor
                    self._take(answer)
                except Exception as error:
                    # What began in a later life, while this call was open, is not lost with it.
                    self._lost([key for key, begun in self._under_way.items() if begun == life], error)
        finally:
            self._polling = None

    def _lives(self, life: str) -> None:
        """An actor in a new life has lost what it was doing, and its reports begin anew."""
        if self._life is not None and life != self._life:
            lost = [key for key, begun in self._under_way.items() if begun != life]
            self._lost(lost, ActorLostError(f"{self._what} was lost: its process was started again."))
            self._cursor = 0
        self._life = life
        self.answered_at = time.monotonic()

    def _lost(self, keys: Sequence[str], error: Exception) -> None:
        self.answered_at = float("-inf")
        look_up_again(self.handle)
        for key in keys:
            self._forget(key)
        self._lose(keys, error)
