"""Lists of messages that two processes both have: of a list that has grown on one side only the rest is sent to the other."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lousho_ray.messages import Message
from lousho_ray.stores.json_form import FixedJson

BUDGET_CHARS = 16_000_000
"""Characters that one process keeps of what it has exchanged with one other."""

ITEM_CHARS = 1_000
"""What an item counts besides its text."""

KEPT_S = 60.0
"""How long what was exchanged is kept: most conversations go on within a minute, or rest for long."""


class SharedList(NamedTuple):
    """A list as it was last exchanged, under a name for its state."""

    token: str
    items: tuple[Any, ...]
    at: float
    chars: int


class SharedLists:
    """What was last exchanged under each name; when it is too much, or a minute old, what was exchanged longest ago goes.

    For one event loop.
    """

    def __init__(self, budget_chars: int = BUDGET_CHARS) -> None:
        self._budget = budget_chars
        self._chars = 0
        self._lists: OrderedDict[str, SharedList] = OrderedDict()
        self._expiring: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._lists)

    def get(self, name: str) -> SharedList | None:
        return self._lists.get(name)

    def put(self, name: str, token: str, items: Iterable[Any]) -> None:
        old, kept = self._lists.get(name), tuple(items)
        grown = old is not None and 0 < len(old.items) <= len(kept) and kept[len(old.items) - 1] is old.items[-1]
        chars = old.chars + sum(map(_chars, kept[len(old.items) :])) if grown and old is not None else sum(map(_chars, kept))
        self.forget(name)
        self._lists[name] = SharedList(token, kept, time.monotonic(), chars)
        self._chars += chars
        while self._chars > self._budget:
            self.forget(next(iter(self._lists)))
        self._expire_later()

    def forget(self, name: str) -> None:
        if (gone := self._lists.pop(name, None)) is not None:
            self._chars -= gone.chars

    def _expire_later(self) -> None:
        if self._expiring is None and self._lists:
            due_s = next(iter(self._lists.values())).at + KEPT_S - time.monotonic()
            self._expiring = asyncio.get_running_loop().call_later(max(due_s, KEPT_S / 60), self._expire)

    def _expire(self) -> None:
        self._expiring = None
        while self._lists and next(iter(self._lists.values())).at + KEPT_S <= time.monotonic():
            self.forget(next(iter(self._lists)))
        self._expire_later()


def same_start(old: Sequence[Any], new: Sequence[Any]) -> int:
    """How many items at the start are the same on both sides."""
    for position, (one, other) in enumerate(zip(old, new, strict=False)):
        if one is not other and not _equal(one, other):
            return position
    return min(len(old), len(new))


def _equal(one: Any, other: Any) -> bool:
    """Metadata is not compared: `1` and `True` are equal in Python, and not in JSON."""
    if isinstance(one, Message) and isinstance(other, Message):
        return one.metadata is None and other.metadata is None and one == other
    fixed = type(one) is FixedJson and type(other) is FixedJson
    return fixed and "metadata" not in one and "metadata" not in other and one == other


def _chars(item: Any) -> int:
    text = item.content if isinstance(item, Message) else item.get("content") if isinstance(item, dict) else None
    return ITEM_CHARS + (len(text) if isinstance(text, str) else 0)
