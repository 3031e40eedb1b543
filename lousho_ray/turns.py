"""The line of a session: which turn runs, which wait, and which joined another. Pure ordering, no I/O.

Turns run one at a time in the order of their calls. A call that joined the last turn in line keeps its place: when that turn ends
without taking its input, it becomes a turn of its own, before every later call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Place(Generic[T]):
    """One call's place in line."""

    __slots__ = ("_line", "_ready", "joined", "turn")

    def __init__(self, line: TurnLine[T], turn: T) -> None:
        self._line = line
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.turn = turn
        self.joined: Callable[[], bool] = _never
        """Whether the call's input was taken by another turn meanwhile, so that its place is empty."""

    @property
    def ready(self) -> bool:
        """Whether it is this turn's time."""
        return self._ready.done()

    async def wait(self) -> None:
        """Returns when it is this turn's time."""
        await asyncio.shield(self._ready)

    def stand_alone(self) -> None:
        """The call joined in vain and is a turn of its own now, which others may join."""
        self.joined = _never

    def leave(self) -> None:
        """The turn is over, or was given up while it waited."""
        self._line._leave(self)

    def _call(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)


class TurnLine(Generic[T]):
    """The places of one session, the running one first."""

    def __init__(self) -> None:
        self._places: list[Place[T]] = []
        self._running: Place[T] | None = None

    @property
    def idle(self) -> bool:
        return not self._places

    @property
    def running(self) -> T | None:
        """The turn that runs now."""
        return None if self._running is None else self._running.turn

    @property
    def turns(self) -> list[T]:
        """Every turn in line."""
        return [place.turn for place in self._places]

    def last(self) -> T | None:
        """The last turn in line that is not itself joined to another: what a joining call joins."""
        for place in reversed(self._places):
            if place.joined is _never:
                return place.turn
        return None

    def enter(self, turn: T) -> Place[T]:
        place = Place(self, turn)
        self._places.append(place)
        self._advance()
        return place

    def reserve(self, turn: T) -> Place[T]:
        """A place for work that is no turn: later calls wait for it and none can join it."""
        place = self.enter(turn)
        place.joined = _not_taken
        return place

    def join(self, turn: T, joined: Callable[[], bool]) -> Place[T]:
        """A place for a call that joins another turn; `joined()` tells whether its input was taken."""
        place = Place(self, turn)
        place.joined = joined
        self._places.append(place)
        return place

    def _leave(self, place: Place[T]) -> None:
        if place in self._places:
            self._places.remove(place)
        if self._running is place:
            self._running = None
        self._advance()

    def _advance(self) -> None:
        if self._running is not None:
            return
        self._places = [place for place in self._places if not place.joined()]
        if self._places:
            self._running = self._places[0]
            self._running._call()


class SessionLines:
    """The lines of all sessions of one process, by store and id: two handles on one session share a line."""

    def __init__(self) -> None:
        self._lines: WeakValueDictionary[tuple[int, str], TurnLine[Any]] = WeakValueDictionary()

    def of(self, store: object, session_id: str) -> TurnLine[Any]:
        key = (id(store), session_id)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = TurnLine()
        return line


def _never() -> bool:
    return False


def _not_taken() -> bool:
    return False
