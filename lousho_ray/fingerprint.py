"""Fingerprints of agents: what a saved run was started with, and how the agent that takes it up again differs.

A fingerprint covers what a model sees: the model's id, the tools with their input schemas, hosted tools, the instructions. Code is
no part of it: neither the bodies of tools, nor hooks, nor options that are functions of the run. It is the same in every process
and on every platform, since it is made of canonical JSON and SHA-256 only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lousho_ray.hosted_tools import HostedTool
from lousho_ray.tools.registry import AnyTool

NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
"""Keys of a JSON schema whose value maps names to schemas: a property may well be called `title`."""

VALUES = frozenset({"default", "const", "enum", "examples"})
"""Keys of a JSON schema whose value is data."""


def fingerprint(
    model: str | None,
    instructions: str | None,
    tools: Mapping[str, AnyTool] | None,
    hosted: Sequence[HostedTool] = (),
) -> dict[str, Any]:
    """The fingerprint of an agent, as JSON. What is `None` depends on the run and is not compared.

    Each part stands by itself, so that a difference can be named; `hash` is the first 16 digits of the SHA-256 over all of them.
    """
    parts: dict[str, Any] = {}
    if model is not None:
        parts["model"] = model
    if instructions is not None:
        parts["instructions"] = _digest(instructions)
    if tools is not None:
        own = {name: _digest(_canonical(without_titles(tool.definition.parameters))) for name, tool in tools.items()}
        parts["tools"] = own | {tool.name: _digest(_canonical(tool.to_dict())) for tool in hosted}
    return {**parts, "hash": _digest(_canonical(parts))}


@dataclass(frozen=True, slots=True)
class Drift:
    """How an agent differs from the one a run was saved with."""

    tools_added: tuple[str, ...] = ()
    tools_removed: tuple[str, ...] = ()
    tools_changed: tuple[str, ...] = ()
    instructions: bool = False
    model: Mapping[str, Any] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the `agent.drift` event."""
        fields = {"tools_added": self.tools_added, "tools_removed": self.tools_removed, "tools_changed": self.tools_changed}
        return {**fields, "instructions": self.instructions, "model": self.model}

    def __str__(self) -> str:
        """What changed, in words."""
        named = [("added", self.tools_added), ("removed", self.tools_removed), ("changed", self.tools_changed)]
        said = [f"tools {how}: {', '.join(names)}" for how, names in named if names]
        if self.instructions:
            said.append("instructions changed")
        if self.model is not None:
            said.append(f"model {self.model['from']} is now {self.model['to']}")
        return "; ".join(said)


def drift(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Drift | None:
    """What changed since `saved`; `None` when nothing did. A part that either side lacks is not compared."""
    if not saved or saved.get("hash") == now["hash"]:
        return None
    before, after = saved.get("tools"), now.get("tools")
    if before is None or after is None:
        before = after = {}
    found = Drift(
        tools_added=tuple(sorted(after.keys() - before.keys())),
        tools_removed=tuple(sorted(before.keys() - after.keys())),
        tools_changed=tuple(sorted(name for name in after.keys() & before.keys() if after[name] != before[name])),
        instructions=_differs(saved, now, "instructions"),
        model={"from": saved["model"], "to": now["model"]} if _differs(saved, now, "model") else None,
    )
    return None if found == Drift() else found


def without_titles(schema: Any) -> Any:
    """A JSON schema without the titles of its schemas, which pydantic makes up from names."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in VALUES:
            kept[key] = value
        elif key in NAMED_SCHEMAS and isinstance(value, Mapping):
            kept[key] = {name: without_titles(part) for name, part in value.items()}
        elif key != "title":
            kept[key] = without_titles(value)
    return kept


def _differs(saved: Mapping[str, Any], now: Mapping[str, Any], part: str) -> bool:
    return part in saved and part in now and saved[part] != now[part]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
