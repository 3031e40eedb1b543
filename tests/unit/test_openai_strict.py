"""Which schemas OpenAI's strict mode takes: our rule and the fake server's, which is written from the same page, agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lousho_ray.providers.openai_strict import MAX_ENUM_VALUES, fits_strict_mode, strict_form
from lousho_ray.testing.fake_server.rule import BrokenRuleError
from lousho_ray.testing.fake_server.schema_rules import check_strict_schema


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "string"} if depth == 0 else closed(a=nested(depth - 1))


TEXT, NODE = {"type": "string"}, {"$ref": "#/$defs/N"}

FITS: dict[str, Any] = {
    "plain": closed(a=TEXT, b={"type": "integer", "minimum": 1}),
    "empty": closed(),
    "nullable": closed(a={"type": ["string", "null"]}),
    "union": closed(a={"anyOf": [TEXT, closed(b=TEXT)]}),
    "list": closed(a={"type": "array", "items": closed(b=TEXT), "maxItems": 3}),
    "recursive": {
        **closed(a={"$ref": "#/$defs/N"}),
        "$defs": {"N": closed(next={"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]})},
    },
    "values": closed(a={"enum": [1, "b", None]}, b={"const": "x"}, c={"type": "string", "format": "date"}),
}

DOES_NOT: dict[str, Any] = {
    "optional": {**closed(a=TEXT, b=TEXT), "required": ["a"]},
    "open": {**closed(a=TEXT), "additionalProperties": {"type": "string"}},
    "not-closed": {"type": "object", "properties": {"a": TEXT}, "required": ["a"]},
    "free": closed(a={"type": "object", "properties": {}}),
    "default": closed(a={"type": "string", "default": "x"}),
    "long": closed(a={"type": "string", "minLength": 1}),
    "all-of": closed(a={"allOf": [TEXT]}),
    "one-of": closed(a={"oneOf": [TEXT]}),
    "deep": nested(11),
    "top-union": {**closed(a=TEXT), "anyOf": [closed(a=TEXT)]},
    "definition": {**closed(a={"$ref": "#/$defs/N"}), "$defs": {"N": {"type": "object", "properties": {"a": TEXT}}}},
}

UNSAID: dict[str, Any] = {
    "anything": closed(a={}),
    "format": closed(a={"type": "string", "format": "uri"}),
    "tuple": closed(a={"type": "array", "prefixItems": [TEXT]}),
    "many-values": closed(a={"enum": list(range(MAX_ENUM_VALUES + 1))}),
    "no-items": closed(a={"type": "array"}),
    "reference-with-more": {**closed(a={"$ref": "#/$defs/N", "description": "x"}), "$defs": {"N": TEXT}},
}


@pytest.mark.parametrize("schema", FITS.values(), ids=FITS)
def test_what_fits_is_taken(schema: Any) -> None:
    # LES-55
    assert fits_strict_mode(schema)
    check_strict_schema(schema, "schema")


@pytest.mark.parametrize("schema", DOES_NOT.values(), ids=DOES_NOT)
def test_what_is_refused_does_not_fit(schema: Any) -> None:
    # LES-55
    assert not fits_strict_mode(schema)
    with pytest.raises(BrokenRuleError):
        check_strict_schema(schema, "schema")


@pytest.mark.parametrize("schema", UNSAID.values(), ids=UNSAID)
def test_what_the_page_does_not_promise_does_not_fit(schema: Any) -> None:
    # LES-55
    assert not fits_strict_mode(schema)


NULL = {"type": "null"}
OPTIONAL: dict[str, tuple[Any, Any]] = {
    "text": (TEXT, {"type": ["string", "null"]}),
    "default": ({"type": "integer", "default": 3, "description": "d"}, {"type": ["integer", "null"], "description": "d"}),
    "null-already": ({"type": ["string", "null"], "default": None}, {"type": ["string", "null"]}),
    "union-with-null": ({"anyOf": [TEXT, NULL], "default": None}, {"anyOf": [TEXT, NULL]}),
    "union": ({"anyOf": [TEXT, {"type": "integer"}]}, {"anyOf": [TEXT, {"type": "integer"}, NULL]}),
    "values": ({"type": "string", "enum": ["a"]}, {"anyOf": [{"type": "string", "enum": ["a"]}, NULL]}),
    "null-among-values": ({"enum": ["a", None]}, {"enum": ["a", None]}),
    "list": ({"type": "array", "items": TEXT, "default": []}, {"anyOf": [{"type": "array", "items": TEXT}, NULL]}),
    "reference": ({"$ref": "#/$defs/N"}, {"anyOf": [{"$ref": "#/$defs/N"}, NULL]}),
    "inner": (
        {**closed(b=TEXT), "required": []},
        {"anyOf": [closed(b={"type": ["string", "null"]}), NULL]},
    ),
}


@pytest.mark.parametrize(("given", "sent"), OPTIONAL.values(), ids=OPTIONAL)
def test_an_optional_property_is_sent_as_one_that_may_be_null(given: Any, sent: Any) -> None:
    # LES-55
    schema = {**closed(a=TEXT, b=given), "required": ["a"], "$defs": {"N": {**closed(c=TEXT), "required": []}}}
    before = copy.deepcopy(schema)
    form = strict_form(schema)
    assert form == {**closed(a=TEXT, b=sent), "$defs": {"N": closed(c={"type": ["string", "null"]})}}
    check_strict_schema(form, "schema")
    assert schema == before


@pytest.mark.parametrize("schema", FITS.values(), ids=FITS)
def test_what_fits_is_sent_as_it_is(schema: Any) -> None:
    assert strict_form(schema) == schema


@pytest.mark.parametrize("schema", {**DOES_NOT, **UNSAID}.values(), ids={**DOES_NOT, **UNSAID})
def test_only_missing_properties_can_be_mended(schema: Any) -> None:
    assert (strict_form(schema) is not None) is (schema is DOES_NOT["optional"])
