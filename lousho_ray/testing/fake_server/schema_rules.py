"""Rules for the JSON schemas that requests carry, among them OpenAI's strict mode.

Source of the rules of strict mode: OpenAI, "Structured outputs", section "Supported schemas"
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

_NOT_ENFORCED = words("oneOf minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength maxItems uniqueItems")


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


def check_output_schema(schema: Any, where: str) -> None:
    """A schema for Anthropic's structured outputs: every object closed, no limit of numbers, texts and lists, no recursion.

    Source: Anthropic, "Structured outputs", section "JSON Schema limitations"
    (https://docs.claude.com/en/docs/build-with-claude/structured-outputs#json-schema-limitations).
    """
    _check_output_node(schema, where, an_object(schema, where).get("$defs", {}), ())


def _check_output_node(node: Any, where: str, definitions: dict[str, Any], within: tuple[str, ...]) -> None:
    schema = an_object(node, where)
    refused = sorted(_NOT_ENFORCED & schema.keys())
    need(not refused, "schema-output", f"{where}: property '{', '.join(refused)}' is not supported")
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    need(name not in within, "schema-output", f"{where}: recursive schemas are not supported")
    if name:
        need(name in definitions, "schema-output", f"{where}: '{name}' is not defined in '$defs'")
        _check_output_node(definitions[name], f"{where}.{name}", definitions, (*within, name))
    if schema.get("type") == "object":
        closed = schema.get("additionalProperties") is False
        need(closed, "schema-output", f"{where}: For 'object' type, 'additionalProperties' must be explicitly set to false")
    for key, child in an_object(schema.get("properties", {}), f"{where}.properties").items():
        _check_output_node(child, f"{where}.properties.{key}", definitions, within)
    if "items" in schema:
        _check_output_node(schema["items"], f"{where}.items", definitions, within)
    for position, child in enumerate([*schema.get("anyOf", []), *schema.get("allOf", [])]):
        _check_output_node(child, f"{where}.{position}", definitions, within)


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
