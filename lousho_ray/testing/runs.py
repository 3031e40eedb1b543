"""Small things that tests of agents and tools need again and again."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

from lousho_ray.events import Event
from lousho_ray.ports import ToolContext


def make_tool_context(**overrides: Any) -> ToolContext:
    """A context for calling a tool's `execute` directly. The overrides are fields of `ToolContext`."""
    return ToolContext(**{"tool_call_id": "call_1", **overrides})


async def collect(handle: AsyncIterable[Event]) -> list[Event]:
    """All events of a run, once it has ended."""
    return [event async for event in handle]
