"""JSON schemas in the dialect of Anthropic's structured outputs.

Source: Anthropic, "Structured outputs", section "JSON Schema limitations"
(https://docs.claude.com/en/docs/build-with-claude/structured-outputs#json-schema-limitations): every object is closed, nothing is
recursive, and limits of numbers, texts and lists do not exist. The official client turns such limits into descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def output_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema as the API takes it; `None` when it says something that the API cannot, such as an object with free keys."""
    from anthropic import transform_schema

    if any(_is_open(node) for node in _nodes(schema)) or _is_recursive(schema):
        return None
    try:
        return transform_schema(dict(schema))
    except (ValueError, AssertionError):  # a node that takes anything, or one of several types
        return None


def _is_open(node: Mapping[str, Any]) -> bool:
    more = node.get("additionalProperties", "properties" not in node)
    return node.get("type") == "object" and more is not False


def _is_recursive(schema: Mapping[str, Any]) -> bool:
    """Whether a definition leads back to itself, or a reference to anything but a definition."""
    definitions = schema.get("$defs", {})
    leads = {name: _references(node) for name, node in definitions.items()}
    if not set().union(_references(schema), *leads.values()) <= {f"#/$defs/{name}" for name in definitions}:
        return True
    free = {name for name, references in leads.items() if not references}
    while more := {name for name, found in leads.items() if name not in free and {r[8:] for r in found} <= free}:
        free |= more
    return len(free) < len(leads)


def _references(node: Mapping[str, Any]) -> set[str]:
    return {child["$ref"] for child in _nodes(node) if isinstance(child.get("$ref"), str)}


def _nodes(node: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and every schema in it."""
    if not isinstance(node, Mapping):
        return
    yield node
    for key in ("properties", "$defs"):
        for child in node.get(key, {}).values():
            yield from _nodes(child)
    for key in ("anyOf", "oneOf", "allOf"):
        for child in node.get(key, ()):
            yield from _nodes(child)
    yield from _nodes(node.get("items"))
