"""Fingerprints of agents: the same in every process, sensitive to what a model sees and to nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, Field

from lousho_ray.create import create_agent
from lousho_ray.errors import AgentDriftError
from lousho_ray.fingerprint import drift, fingerprint, without_titles
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool


def schema_tool(schema: Any, name: str = "t") -> dict[str, Any]:
    return {name: define_tool(name=name, description="Does.", input=schema, execute=lambda args: args)}


def test_a_fingerprint_is_pinned() -> None:
    # DUR-D3: no hash of the process, the platform or the version of a library goes into it
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    found = fingerprint("m-1", "Be brief.", schema_tool(schema))
    assert found == {
        "model": "m-1",
        "instructions": "213c22ed7234eb11",
        "tools": {"t": "e75874d6d2afa350"},
        "hash": "9b35fe1ee8a6675f",
    }
    again = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "type": "object"}
    assert fingerprint("m-1", "Be brief.", schema_tool(again)) == found


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    # DUR-D3
    code = "from lousho_ray.fingerprint import fingerprint; print(fingerprint('m', 'x', {})['hash'])"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {fingerprint("m", "x", {})["hash"]}


class Titled(BaseModel):
    """Has a field that is called title."""

    title: str = Field(default="x", title="Made up")
    kind: int = 1


def test_titles_of_schemas_do_not_count_but_fields_named_title_do() -> None:
    # DUR-D3
    stripped = without_titles(Titled.model_json_schema())
    assert set(stripped["properties"]) == {"title", "kind"}
    assert "title" not in stripped
    assert "title" not in stripped["properties"]["title"]
    data = {"enum": [{"title": "kept"}], "default": {"title": "kept"}}
    assert without_titles(data) == data
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    titled = {"type": "object", "title": "T", "properties": {"a": {"type": "string", "title": "A"}}}
    assert fingerprint("m", "x", schema_tool(plain)) == fingerprint("m", "x", schema_tool(titled))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (("m2", "x", "tool"), {"model": {"from": "m", "to": "m2"}}),
        (("m", "y", "tool"), {"instructions": True}),
        (("m", "x", "none"), {"tools_removed": ("t",)}),
        (("m", "x", "changed"), {"tools_changed": ("t",)}),
        (("m", "x", "more"), {"tools_added": ("u",)}),
    ],
)
def test_each_part_is_compared_by_itself(other: tuple[str, str, str], expected: dict[str, Any]) -> None:
    # DUR-37
    plain: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
    changed: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    sets: dict[str, dict[str, Any]] = {
        "tool": schema_tool(plain),
        "none": {},
        "changed": schema_tool(changed),
        "more": {**schema_tool(plain), **schema_tool(plain, "u")},
    }
    before = fingerprint("m", "x", sets["tool"])
    found = drift(before, fingerprint(other[0], other[1], sets[other[2]]))
    assert found is not None
    default = {"tools_added": (), "tools_removed": (), "tools_changed": (), "instructions": False, "model": None}
    assert found.fields == {**default, **expected}
    assert str(found)
    assert drift(before, before) is None


def test_what_depends_on_the_run_is_not_compared() -> None:
    # DUR-38, DUR-42
    fixed, by_run = fingerprint("m", "x", {}), fingerprint(None, None, None)
    assert drift(fixed, by_run) is None
    assert drift(by_run, fixed) is None
    assert drift(None, fixed) is None
    agent = create_agent(provider=mock_model([]), instructions=lambda run: "now", tools=lambda run: [])
    assert set(agent.definition.fingerprint) == {"model", "hash"}


def test_tools_of_sub_agents_are_no_part_of_it() -> None:
    # DUR-38
    child = create_agent(provider=mock_model([]), description="Helps.")
    with_child = create_agent(provider=mock_model([]), subagents={"child": child})
    assert with_child.definition.fingerprint == create_agent(provider=mock_model([])).definition.fingerprint


def test_the_error_tells_what_changed() -> None:
    error = AgentDriftError("Changed.", changes={"instructions": True})
    assert error.changes == {"instructions": True}
