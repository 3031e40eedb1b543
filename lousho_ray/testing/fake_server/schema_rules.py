"""Rules for the JSON schemas that requests carry, among them OpenAI's strict mode.

Source: OpenAI, "Structured outputs", section "Supported schemas"
(https://platform.openai.com/docs/guides/structured-outputs#supported-schemas).
"""

from __future__ import annotations

from typing import Any

from lousho_ray.testing.fake_server.rule import a_list, an_object, broken, need, words

MAX_STRICT_DEPTH = 10

_REFUSED = words(
    "allOf not dependentRequired dependentSchemas if then else oneOf patternProperties unevaluatedProperties "
    "propertyNames minProperties maxProperties unevaluatedItems contains minContains maxContains uniqueItems minLength "
    "maxLength default"
)


def check_object_schema(schema: Any, where: str) -> None:
    """A schema whose root is an object."""
    kind = an_object(schema, where).get("type")
    need(kind == "object", "schema-object", f"Invalid schema for '{where}': schema must be of type 'object', got 'type: {kind}'")


def check_strict_schema(schema: Any, where: str) -> None:
    """A schema for `strict: true`: every object closed and with all of its properties required, no refused keyword."""
    check_object_schema(schema, where)
    need("anyOf" not in schema, "schema-strict", f"Invalid schema for '{where}': 'anyOf' is not permitted at the root")
    _check_node(schema, where, 1)
    for name, definition in {**schema.get("$defs", {}), **schema.get("definitions", {})}.items():
        _check_node(definition, f"{where}.$defs.{name}", 1)


def _check_node(node: Any, where: str, depth: int) -> None:
    schema = an_object(node, where)
    refused = sorted(_REFUSED & schema.keys())
    if refused:
        broken("schema-strict", f"Invalid schema for '{where}': '{refused[0]}' is not permitted in strict mode")
    need(depth <= MAX_STRICT_DEPTH, "schema-strict", f"Invalid schema for '{where}': more than {MAX_STRICT_DEPTH} levels deep")
    kinds = schema.get("type")
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in schema:
        _check_closed(schema, where)
    for name, child in an_object(schema.get("properties", {}), f"{where}.properties").items():
        _check_node(child, f"{where}.properties.{name}", depth + 1)
    if "items" in schema:
        _check_node(schema["items"], f"{where}.items", depth + 1)
    for position, child in enumerate(a_list(schema.get("anyOf", []), f"{where}.anyOf")):
        _check_node(child, f"{where}.anyOf.{position}", depth)


def _check_closed(schema: dict[str, Any], where: str) -> None:
    closed = schema.get("additionalProperties") is False
    need(
        closed, "schema-strict", f"Invalid schema for '{where}': 'additionalProperties' is required to be supplied and to be false"
    )
    missing = sorted(schema.get("properties", {}).keys() ^ set(schema.get("required", ())))
    need(
        not missing,
        "schema-strict",
        f"Invalid schema for '{where}': 'required' is required to be an array including every key in properties; wrong: {missing}",
    )
