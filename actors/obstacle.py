"""What stands in the way of pickling an agent: the option, the tool or hook in it, and the variable that holds it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lousho_ray.definition import AgentDefinition

MOST_LEVELS = 12
"""How deep to look for the culprit."""

Fails = Callable[[Any], Exception | None]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The way down to what cannot be pickled.

    Attributes:
        field: The option, such as `tools`.
        place: Where in the definition, such as `tools['search']`.
        variables: From there on the names of what holds it, outermost first.
        value: The thing itself.
        error: What pickling it raised.
    """

    field: str
    place: str
    variables: tuple[str, ...]
    value: Any
    error: Exception

    def __str__(self) -> str:
        if not self.variables:
            return f"{self.place}: {self.error}"
        name, *through = reversed(self.variables)
        way = f", through {' of '.join(repr(item) for item in through)}" if through else ""
        return f"{self.place} uses {name!r}{way}, a {type(self.value).__name__}: {self.error}"


def find_obstacle(definition: AgentDefinition, fails: Fails) -> Obstacle | None:
    """At each level the first part that cannot be pickled. `fails` tries a part alone."""
    value: Any = definition
    field, place, variables = "", "", []
    for _ in range(MOST_LEVELS):
        part = next((part for part in _parts(value) if fails(part.value) is not None), None)
        if part is None:
            break
        field = field or part.name
        if part.is_variable:
            variables.append(part.name)
        elif not variables:
            place += part.path
        value = part.value
    error = fails(value)
    if not field or error is None:
        return None
    return Obstacle(field, place.removeprefix("."), tuple(variables), value, error)


@dataclass(frozen=True, slots=True)
class _Part:
    """Something inside of something else. `path`: how it is written behind it; empty for the inside of our own objects."""

    name: str
    value: Any
    path: str = ""
    is_variable: bool = False


def _parts(value: Any) -> Iterator[_Part]:
    match value:
        case AgentDefinition():
            yield from (_Part(item.name, getattr(value, item.name), f".{item.name}") for item in dataclasses.fields(value))
        case dict():
            yield from (_Part(str(key), item, f"[{key!r}]") for key, item in value.items())
        case list() | tuple():
            yield from (_Part(str(index), item, f"[{index}]") for index, item in enumerate(value))
        case types.FunctionType():
            yield from (_Part(name, item, is_variable=True) for name, item in _captured(value))
        case types.MethodType():
            yield from (*_parts(value.__self__), *_parts(value.__func__))
        case functools.partial():
            yield from (_Part("", item) for item in (value.func, *value.args, *value.keywords.values()))
        case _:
            ours = type(value).__module__.startswith("lousho_ray.")
            yield from (_Part(name, item, is_variable=not ours) for name, item in _attributes(value))


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables a function takes along: of its closure, of its module, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # A variable that is not set yet.
    yield from ((name, function.__globals__[name]) for name in _names(function.__code__) if name in function.__globals__)
    for item in inspect.signature(function, follow_wrapped=False).parameters.values():
        if item.default is not item.empty:
            yield item.name, item.default


def _names(code: types.CodeType) -> Iterator[str]:
    """The names a function's code, and that of the functions inside it, looks up in the module."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
