"""How the events of a stream travel: in columns, since many of one kind come together and share most of their values.

Pickled one by one, an event costs its sender and its reader about 2 µs each: more than all else that is done with it on the way.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from lousho_ray.records import Record, columns_of, records_of


class _Same(NamedTuple):
    """A column with one value."""

    value: Any


class _Group(NamedTuple):
    """Items of one class that stand together: a column for each of its fields."""

    kind: type[Record]
    size: int
    columns: list[_Same | tuple[Any, ...]]

    def records(self) -> list[Record]:
        whole = [[column.value] * self.size if isinstance(column, _Same) else column for column in self.columns]
        return records_of(self.kind, whole, self.size)


def packed(items: Sequence[Any]) -> bytes:
    """Events (and what else a log has), as one pickle."""
    parts = [_part(kind, list(group)) for kind, group in groupby(items, type)]
    try:
        return pickle.dumps(parts, protocol=5)
    except Exception:  # a value of a class that can only be sent by its content
        from ray.cloudpickle import cloudpickle

        data: bytes = cloudpickle.dumps(parts)
        return data


def unpacked(data: bytes) -> list[Any]:
    """What `packed` was given."""
    items: list[Any] = []
    for part in pickle.loads(data):
        items += part.records() if isinstance(part, _Group) else part
    return items


def _part(kind: type[Any], items: list[Any]) -> _Group | list[Any]:
    if not issubclass(kind, Record):
        return items
    return _Group(kind, len(items), [_shortened(column) for column in columns_of(kind, items)])


def _shortened(column: tuple[Any, ...]) -> _Same | tuple[Any, ...]:
    first = column[0]
    return _Same(first) if all(value is first for value in column) else column
