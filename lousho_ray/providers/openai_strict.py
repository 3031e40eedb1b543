"""Which output schemas OpenAI enforces, and in which form: those of its strict mode.

Source: OpenAI, "Structured outputs", section "Supported schemas"
(https://platform.openai.com/docs/guides/structured-outputs#supported-schemas): every object is closed and requires all of its
properties, the top is an object and no union, and only some keywords exist. Optional properties are sent as required ones that may
be null, as the page advises; `loop/nulls.py` takes such nulls for what they stand for. A schema with free keys or limits of texts
says more than strict mode can; it is sent as a hint.
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
_PLAIN = ("string", "integer", "number", "boolean")
_NULL = {"type": "null"}
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})


def strict_form(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema as the API takes it with `strict: true`; `None` when strict mode cannot say it."""
    form = _all_required(schema)
    return form if fits_strict_mode(form) else None


def fits_strict_mode(schema: Mapping[str, Any]) -> bool:
    """Whether the API takes the schema with `strict: true` as it is."""
    definitions = [*_children(schema, "$defs"), *_children(schema, "definitions")]
    if schema.get("type") != "object" or "anyOf" in schema:
        return False
    count = _Count()
    return all(count.fits(node, 1) for node in (schema, *definitions)) and count.within_limits


def _all_required(node: Any) -> Any:
    """The schema with each optional property of a closed object as a required one that may be null."""
    if not isinstance(node, Mapping):
        return node
    form = dict(node)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(form.get(key), Mapping):
            form[key] = {name: _all_required(child) for name, child in form[key].items()}
    if "items" in form:
        form["items"] = _all_required(form["items"])
    if isinstance(form.get("anyOf"), list):
        form["anyOf"] = [_all_required(child) for child in form["anyOf"]]
    if "properties" in form and form.get("additionalProperties") is False:
        required = form.get("required", ())
        form["properties"] = {name: child if name in required else _nullable(child) for name, child in form["properties"].items()}
        form["required"] = list(form["properties"])
    return form


def _nullable(node: Any) -> Any:
    """The schema of a property that may be left out, which null says here; so its default needs no saying."""
    if not isinstance(node, Mapping):
        return node
    form = {key: value for key, value in node.items() if key != "default"}
    kind, options = form.get("type"), form.get("anyOf")
    if isinstance(options, list) and kind is None:
        return form if _NULL in options else {**form, "anyOf": [*options, _NULL]}
    if _is_of(form, "null") or None in form.get("enum", ()):
        return form
    if kind in _PLAIN and not form.keys() & {"enum", "const"}:
        return {**form, "type": [kind, "null"]}
    return {"anyOf": [form, _NULL]}


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
