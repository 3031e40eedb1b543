"""Partial deep matching of tool arguments, and where two values first differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lousho_ray.evals.checks import shown

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first differing path. `depth` is how many leaves agreed before it."""

    path: str
    expected: Any
    actual: Any
    depth: int

    def __str__(self) -> str:
        actual = "is missing" if self.actual is _ABSENT else f"is {shown(self.actual)}"
        return f"{self.path or 'args'} {actual}, expected {shown(self.expected)}"


def matches_partially(expected: Any, actual: Any) -> bool:
    """Whether `actual` has every listed key of `expected` with an equal value; lists are compared item by item."""
    return _first(expected, actual, "", [0]) is None


def first_difference(expected: Any, actual: Any) -> Difference:
    """Where a value that does not match first differs."""
    agreed = [0]
    return _first(expected, actual, "", agreed) or Difference("", expected, actual, agreed[0])


def _first(expected: Any, actual: Any, path: str, agreed: list[int]) -> Difference | None:
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key, value in expected.items():
            where = f"{path}.{key}" if path else str(key)
            found = _first(value, actual.get(key, _ABSENT), where, agreed)
            if found is not None:
                return found
        return None
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple) and len(expected) == len(actual):
        for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
            found = _first(left, right, f"{path}[{index}]", agreed)
            if found is not None:
                return found
        return None
    if _equal(expected, actual):
        agreed[0] += 1
        return None
    return Difference(path, expected, actual, agreed[0])


def _equal(expected: Any, actual: Any) -> bool:
    """Equal as JSON: `True` is not 1."""
    return isinstance(expected, bool) == isinstance(actual, bool) and bool(expected == actual)
