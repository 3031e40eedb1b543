"""Whether a request is the recorded one: both sides without what differs from run to run, then the first difference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_VOLATILE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?"), "<timestamp>"),
    (re.compile(r"\b\d{4}-\d{2}-\d{2}\b"), "<date>"),
    (re.compile(rf"\b(?:{_MONTHS}) \d{{1,2}}, \d{{4}}\b"), "<date>"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "<uuid>"),
    (re.compile(r"\b(?:call|toolu|chatcmpl)[_-][A-Za-z0-9_-]+"), "<id>"),
)
_MISSING = "(missing)"


class Mismatch(NamedTuple):
    """The first difference. `in_tool_result`: it lies in what a tool answered."""

    path: str
    recorded: Any
    actual: Any
    in_tool_result: bool = False


def stable(value: Any) -> Any:
    """A JSON value with placeholders for times, dates and ids."""
    if isinstance(value, str):
        for pattern, placeholder in _VOLATILE:
            value = pattern.sub(placeholder, value)
        return value
    if isinstance(value, Mapping):
        return {key: stable(item) for key, item in value.items()}
    return [stable(item) for item in value] if isinstance(value, list | tuple) else value


def comparable(request: Mapping[str, Any]) -> dict[str, Any]:
    """A stored request as it is compared: the order in which tools were registered does not count."""
    data = stable(request)
    if "tools" in data:
        data["tools"] = {tool["name"]: {key: value for key, value in tool.items() if key != "name"} for tool in data["tools"]}
    return dict(data)


def first_mismatch(recorded: Mapping[str, Any], actual: Mapping[str, Any]) -> Mismatch | None:
    """Where two comparable requests first differ; `None` when they are equal."""
    found = _differ(recorded, actual, "")
    if found is None:
        return None
    index = re.match(r"messages\[(\d+)\]", found.path)
    messages = actual.get("messages", ())
    tool = index is not None and int(index[1]) < len(messages) and messages[int(index[1])].get("role") == "tool"
    return found._replace(in_tool_result=tool)


def _differ(left: Any, right: Any, path: str) -> Mismatch | None:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            found = _differ(left.get(key, _MISSING), right.get(key, _MISSING), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    if isinstance(left, list) and isinstance(right, list):
        for index in range(max(len(left), len(right))):
            a, b = (side[index] if index < len(side) else _MISSING for side in (left, right))
            found = _differ(a, b, f"{path}[{index}]")
            if found is not None:
                return found
        return None
    return None if type(left) is type(right) and left == right else Mismatch(path, left, right)
