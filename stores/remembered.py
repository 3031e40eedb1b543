"""What a store last saw of each record, so that a save can tell what is new without reading the old."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")

BUDGET_CHARS = 16_000_000
"""JSON characters remembered by one store part; the records used longest ago are forgotten first."""


class Remembered(Generic[V]):
    """Values by id, each with the version it was stored under. For one thread."""

    def __init__(self, budget_chars: int = BUDGET_CHARS) -> None:
        self._budget = budget_chars
        self._chars = 0
        self._entries: OrderedDict[str, tuple[int, V, int]] = OrderedDict()

    def get(self, id: str) -> tuple[int, V] | None:
        """The version and value last remembered. They say what is stored only while the stored version is that one."""
        entry = self._entries.get(id)
        if entry is None:
            return None
        self._entries.move_to_end(id)
        return entry[0], entry[1]

    def put(self, id: str, version: int, value: V, chars: int) -> None:
        self.forget(id)
        self._entries[id] = (version, value, chars)
        self._chars += chars
        while self._chars > self._budget:
            self.forget(next(iter(self._entries)))

    def forget(self, id: str) -> None:
        entry = self._entries.pop(id, None)
        if entry is not None:
            self._chars -= entry[2]
