"""Nulls of a reply that stand for what was left out."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from lousho_ray.loop.nulls import without_nulls
from tests.unit.loop_support import agent_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "must": {"type": "string"},
        "may": {"type": "integer"},
        "maybe": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "string"}]},
        "value": {"enum": ["a", None]},
        "fixed": {"const": 1},
        "any": {},
        "list": {"type": "array", "items": {"$ref": "#/$defs/node"}},
        "path": {"$ref": "#/properties/maybe"},
    },
    "required": ["must"],
    "$defs": {"node": {"type": "object", "properties": {"may": {"type": "string"}, "next": {"$ref": "#/$defs/node"}}}},
}


@pytest.mark.parametrize(
    ("data", "left"),
    [
        ({"must": None, "may": None, "maybe": None}, {"must": None, "maybe": None}),
        ({"value": None, "fixed": None, "any": None, "unknown": None}, {"value": None, "any": None, "unknown": None}),
        ({"either": None, "path": None, "list": None}, {"path": None}),
        ({"either": {"may": None, "next": {"may": None, "next": None}}}, {"either": {"next": {}}}),
        ({"list": [{"may": None}, None, {"may": "x"}]}, {"list": [{}, None, {"may": "x"}]}),
        ({"any": {"x": None}}, {"any": {"x": None}}),
        (None, None),
        ([None], [None]),
    ],
)
def test_only_nulls_of_optional_properties_that_allow_none_go(data: Any, left: Any) -> None:
    # RUN-76
    assert without_nulls(data, SCHEMA) == left


def test_a_reference_that_leads_nowhere_or_in_a_circle_ends() -> None:
    circle = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": "#/$defs/none"}}}
    assert without_nulls({"a": {"x": None}, "b": {"x": None}}, circle) == {"a": {"x": None}, "b": {"x": None}}


class Part(BaseModel):
    kind: str = "plain"


class Whole(BaseModel):
    name: str
    size: int = 1
    note: str | None = "none"
    parts: list[Part] = []


async def test_defaults_apply_to_what_came_as_null_and_a_null_that_is_allowed_stays() -> None:
    # RUN-76
    reply = '{"name": "x", "size": null, "note": null, "parts": [{"kind": null}]}'
    result = await agent_of(reply, output=Whole).send("Which?")
    assert (result.object, result.text, result.steps) == (Whole(name="x", note=None, parts=[Part()]), reply, 1)
    assert result.output_repaired is False


async def test_a_null_of_a_required_property_is_still_repaired() -> None:
    # RUN-76, RUN-77
    result = await agent_of('{"name": null, "size": null}', '{"name": "x"}', output=Whole).send("Which?")
    assert (result.object, result.output_repaired) == (Whole(name="x"), True)
    assert [issue["path"] for issue in result.output_repair_issues or ()] == ["name"]


async def test_what_is_valid_as_it_came_is_not_touched() -> None:
    # a JSON schema whose condition allows the null
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "null"}}
    result = await agent_of('{"b": null}', output=schema).send("Which?")
    assert result.object == {"b": None}
