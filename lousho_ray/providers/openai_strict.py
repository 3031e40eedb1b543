"""Which output schemas OpenAI enforces: those of its strict mode.

Source: OpenAI, "Structured outputs", section "Supported schemas"
(https://platform.openai.com/docs/guides/structured-outputs#supported-schemas): every object is closed and requires all of its
properties, the top is an object and no union, and only some keywords exist. A schema with an optional property, a default or free
keys says more than strict mode can; it is sent as a hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 10
MAX_PROPERTIES = 5_000
MAX_ENUM_VALUES = 1_000

_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const", "$ref", "$defs"),
        *("definitions", "title", "description", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "multipleOf", "minItems", "maxItems"),
    }
)
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})


def fits_strict_mode(schema: Mapping[str, Any]) -> bool:
    """Whether the API takes the schema with `strict: true` as it is."""
    definitions = [*_children(schema, "$defs"), *_children(schema, "definitions")]
    if schema.get("type") != "object" or "anyOf" in schema:
        return False
    count = _Count()
    return all(count.fits(node, 1) for node in (schema, *definitions)) and count.within_limits


class _Count:
    """Walks a schema and adds up what has a limit."""

    def __init__(self) -> None:
        self._properties = 0
        self._values = 0

    @property
    def within_limits(self) -> bool:
        return self._properties <= MAX_PROPERTIES and self._values <= MAX_ENUM_VALUES

    def fits(self, node: Any, depth: int) -> bool:
        if not isinstance(node, Mapping) or not node.keys() <= _KEYWORDS or depth > MAX_DEPTH:
            return False
        if "$ref" in node and node.keys() & {"type", "properties", "items", "anyOf", "enum", "const", "description"}:
            return False
        if not {"$ref", "type", "anyOf", "enum", "const"} & node.keys() or node.get("format", "date") not in _FORMATS:
            return False
        properties = node.get("properties", {})
        self._properties += len(properties)
        self._values += len(node.get("enum", ()))
        if "properties" in node or _is_of(node, "object"):
            closed = node.get("additionalProperties") is False and set(node.get("required", ())) == set(properties)
            if not closed:
                return False
        if _is_of(node, "array") and "items" not in node:
            return False
        items = [node["items"]] if "items" in node else []
        inner = all(self.fits(child, depth + 1) for child in (*properties.values(), *items))
        return inner and all(self.fits(child, depth) for child in node.get("anyOf", ()))


def _is_of(node: Mapping[str, Any], kind: str) -> bool:
    types = node.get("type")
    return kind == types or (isinstance(types, list) and kind in types)


def _children(schema: Mapping[str, Any], key: str) -> list[Any]:
    return list(schema.get(key, {}).values())
