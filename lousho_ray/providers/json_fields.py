"""Reading JSON that others wrote: a field of the wrong type is an absent field. What `json` reads as an object is a `dict`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def mapping(value: Any) -> Mapping[str, Any]:
    """An object, or an empty one."""
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of an array."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """A string, or an empty one."""
    return value if isinstance(value, str) else ""


def number(value: Any) -> float | None:
    """A finite number from 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return value


def count(value: Any) -> int | None:
    """A whole number from 0."""
    found = number(value)
    return None if found is None else int(found)
