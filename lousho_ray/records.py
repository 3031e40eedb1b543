"""Frozen records with a JSON form: what events and the values inside them are made of.

A record is a frozen, slotted, keyword-only dataclass. Its JSON form has camelCase keys and leaves optional fields without a value
out. How a class is encoded, decoded and pickled is worked out once per class, because a run makes thousands of them.
"""

from __future__ import annotations

import dataclasses
import operator
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import UnionType
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from lousho_ray.errors import ValidationError

R = TypeVar("R", bound="Record")
T = TypeVar("T")


def camel_case(name: str) -> str:
    """`tool_call_id` -> `toolCallId`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def named(key: str) -> Any:
    """A field whose JSON key is not the camelCase form of its name."""
    return dataclasses.field(metadata={"key": key})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field, named))
def record(cls: type[T]) -> type[T]:
    """Makes a record class: a frozen, slotted, keyword-only dataclass.

    Comparison, hash and repr come from `Record`: generating them for every class would be a third of the package's import time.
    """
    return dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)(cls)


class Plan(NamedTuple):
    """How a record class travels; one entry per field, in declaration order.

    Attributes:
        values: All field values of a record at once.
        writes: JSON key, whether the field is left out without a value, and what makes plain JSON of a value that is not.
        reads: Field name, JSON key, whether it must be there, and the record class of a nested value.
        stores: Sets the field of a new record past the frozen `__setattr__`.
    """

    names: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]
    writes: tuple[tuple[str, bool, Callable[[Any], Any] | None], ...]
    reads: tuple[tuple[str, str, bool, type[Record] | None], ...]
    stores: tuple[Callable[[Any, Any], None], ...]


class Record:
    """Base of events and of the records inside them."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form. Shares nested lists and dicts with the record: do not change them."""
        data: dict[str, Any] = {}
        self._write(data)
        return data

    def _write(self, data: dict[str, Any]) -> None:
        plan = plan_of(type(self))
        for (key, optional, encode), value in zip(plan.writes, plan.values(self), strict=True):
            if value is None:
                if not optional:
                    data[key] = None
            else:
                data[key] = value if encode is None else encode(value)

    def _values(self) -> tuple[Any, ...]:
        return plan_of(type(self)).values(self)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Record) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(plan_of(type(self)).names, self._values(), strict=True))
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), *self._values())

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """Rebuilds a record from its JSON form; unknown keys are ignored.

        Raises:
            ValidationError: `LOUSHO_VALIDATION_FAILED`: a required key is missing, or a nested record is not an object.
        """
        values: dict[str, Any] = {}
        for name, key, required, nested in plan_of(cls).reads:
            if key not in data:
                if required:
                    raise ValidationError(f"{cls.__name__}: the key '{key}' is missing.", errors={key: ["is missing"]})
                continue
            value = data[key]
            if nested is not None and value is not None:
                if not isinstance(value, Mapping):
                    raise ValidationError(f"{cls.__name__}: '{key}' must be an object.", errors={key: ["must be an object"]})
                value = nested.from_dict(value)
            values[name] = value
        return cls(**values)


def _restore(cls: type[R], *values: Any) -> R:
    """Unpickles a record: fills its slots past the frozen `__setattr__`."""
    record = object.__new__(cls)
    for store, value in zip(plan_of(cls).stores, values, strict=True):
        store(record, value)
    return record


def columns_of(cls: type[Record], records: Sequence[Record]) -> list[tuple[Any, ...]]:
    """The values of records of one class, field by field, in the order of their declaration."""
    return list(zip(*map(plan_of(cls).values, records), strict=True))


def records_of(cls: type[R], columns: Sequence[Iterable[Any]], count: int) -> list[R]:
    """The `count` records that had these columns. Everything that is done once for each of them is done in C."""
    records: list[R] = list(map(object.__new__, repeat(cls, count)))
    for store, column in zip(plan_of(cls).stores, columns, strict=True):
        deque(map(store, records, column), maxlen=0)
    return records


def plan_of(cls: type[Record]) -> Plan:
    """The plan of a record class, made at its first use. A record has at least two fields."""
    plan = _PLANS.get(cls)
    if plan is None:
        plan = _PLANS[cls] = _make_plan(cls)
    return plan


_PLANS: dict[type[Record], Plan] = {}


def _make_plan(cls: type[Record]) -> Plan:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # every concrete record is a dataclass
    names = tuple(field.name for field in fields)
    writes, reads = [], []
    for field in fields:
        key = field.metadata.get("key", camel_case(field.name))
        kinds = _alternatives(hints[field.name])
        nested = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Record)), None)
        encode = _to_dict if nested else next(filter(None, map(_CONTAINERS.get, map(typing.get_origin, kinds))), None)
        writes.append((key, field.default is None, encode))
        reads.append((field.name, key, field.default is dataclasses.MISSING, nested))
    stores = tuple(getattr(cls, name).__set__ for name in names)
    return Plan(names, operator.attrgetter(*names), tuple(writes), tuple(reads), stores)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in {UnionType, typing.Union} else (hint,)


def _to_dict(record: Record) -> dict[str, Any]:
    return record.to_dict()


_CONTAINERS: dict[Any, Callable[[Any], Any]] = {Mapping: dict, Sequence: list}
