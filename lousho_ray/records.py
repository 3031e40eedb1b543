"""Frozen records with a JSON form: what events and the values inside them are made of.

A record is a frozen, slotted, keyword-only dataclass. Its JSON form has camelCase keys and leaves optional fields without a value
out. How a class is encoded, decoded and pickled is worked out once per class, because a run makes thousands of them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeVar

from lousho_ray.errors import ValidationError

R = TypeVar("R", bound="Record")


class FieldPlan(NamedTuple):
    """How one field travels. `nested` is set when its value is a record itself."""

    name: str
    key: str
    optional: bool
    nested: type[Record] | None
    store: Callable[[Any, Any], None]


class Record:
    """Base of events and of the records inside them."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form. Shares nested lists and dicts with the record: do not change them."""
        data: dict[str, Any] = {}
        self._write(data)
        return data

    def _write(self, data: dict[str, Any]) -> None:
        for name, key, optional, nested, _ in plan_of(type(self)):
            value = getattr(self, name)
            if value is None:
                if not optional:
                    data[key] = None
            else:
                data[key] = value if nested is None else value.to_dict()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), *[getattr(self, plan.name) for plan in plan_of(type(self))])

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """Rebuilds a record from its JSON form; unknown keys are ignored.

        Raises:
            ValidationError: `LOUSHO_VALIDATION_FAILED`: a required key is missing, or a nested record is not an object.
        """
        values: dict[str, Any] = {}
        for name, key, optional, nested, _ in plan_of(cls):
            if key not in data:
                if not optional and name not in _defaulted(cls):
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
    for plan, value in zip(plan_of(cls), values, strict=True):
        plan.store(record, value)
    return record


@cache
def plan_of(cls: type[Any]) -> tuple[FieldPlan, ...]:
    """The travel plan of a record class, one entry per field in declaration order."""
    hints = typing.get_type_hints(cls)
    return tuple(_plan(cls, field, hints[field.name]) for field in dataclasses.fields(cls))


def _plan(cls: type[Any], field: dataclasses.Field[Any], hint: Any) -> FieldPlan:
    kinds = typing.get_args(hint) or (hint,)
    nested = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Record)), None)
    optional = field.default is None and NoneType in kinds
    return FieldPlan(
        field.name, field.metadata.get("key", camel_case(field.name)), optional, nested, getattr(cls, field.name).__set__
    )


@cache
def _defaulted(cls: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING)


def camel_case(name: str) -> str:
    """`tool_call_id` -> `toolCallId`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def named(key: str) -> Any:
    """A field whose JSON key is not the camelCase form of its name."""
    return dataclasses.field(metadata={"key": key})
