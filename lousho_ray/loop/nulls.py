"""Nulls in a reply that stand for a property left out.

OpenAI's strict mode requires every property, so an optional one is sent as one that may be null (`providers/openai_strict.py`), and
comes back as null where it would otherwise be missing. Other models write such nulls by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def without_nulls(data: Any, schema: Mapping[str, Any]) -> Any:
    """`data` without the nulls of optional properties whose schema allows none."""
    return _cleaned(data, _parts(schema, schema), schema)


def _cleaned(data: Any, nodes: Sequence[Mapping[str, Any]], root: Mapping[str, Any]) -> Any:
    if isinstance(data, list):
        items = [part for node in nodes for part in _parts(node.get("items"), root)]
        return [_cleaned(item, items, root) for item in data]
    if not isinstance(data, dict):
        return data
    kept: dict[str, Any] = {}
    for key, value in data.items():
        owners = [node for node in nodes if key in node.get("properties", ())]
        children = [part for node in owners for part in _parts(node["properties"][key], root)]
        required = any(key in node.get("required", ()) for node in nodes)
        if value is not None or required or not children or any(map(_takes_null, children)):
            kept[key] = _cleaned(value, children, root)
    return kept


def _parts(node: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema and all that it refers to or is put together from, except what is deeper in the value."""
    found: list[Mapping[str, Any]] = []
    todo = [node]
    while todo:
        part = todo.pop()
        if not isinstance(part, Mapping) or any(part is known for known in found):
            continue
        found.append(part)
        if "$ref" in part:
            todo.append(_referred(str(part["$ref"]), root))
        for key in ("anyOf", "oneOf", "allOf"):
            todo.extend(part.get(key, ()))
    return found


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _takes_null(node: Mapping[str, Any]) -> bool:
    if "type" in node:
        return "null" in node["type"] if isinstance(node["type"], list) else node["type"] == "null"
    if "enum" in node or "const" in node:
        return None in node.get("enum", [node.get("const")])
    return not node.keys() & {"$ref", "anyOf", "oneOf", "allOf"}  # a schema that says nothing takes anything
