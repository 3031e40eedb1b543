"""Hosted tools on the wire of OpenAI's Responses API.

Wire form: https://platform.openai.com/docs/api-reference/responses/create, `tools` and `include`. What a call of a tool gave is
only part of the reply when the request asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lousho_ray.hosted_tools import HostedTool
from lousho_ray.providers.transcript import Warn

_INCLUDED = {
    "web_search": "web_search_call.action.sources",
    "code_interpreter": "code_interpreter_call.outputs",
    "file_search": "file_search_call.results",
}


def hosted_wire(tool: Any, warn: Warn) -> dict[str, Any]:
    """The wire form of a hosted tool: a description, or a mapping that is one already."""
    if not isinstance(tool, HostedTool):
        return dict(tool)
    if tool.raw is not None:
        return dict(tool.raw)
    options = dict(tool.options)
    wire: dict[str, Any] = {"type": tool.type}
    match tool.type:
        case "web_search":
            if "allowed_domains" in options:
                wire["filters"] = {"allowed_domains": options.pop("allowed_domains")}
            if "user_location" in options:
                wire["user_location"] = {"type": "approximate", **options.pop("user_location")}
            _move(options, wire, search_context_size="search_context_size")
        case "code_interpreter":
            files = {"file_ids": options.pop("file_ids")} if "file_ids" in options else {}
            wire["container"] = options.pop("container", {"type": "auto", **files})
        case "file_search":
            _move(options, wire, vector_store_ids="vector_store_ids", max_results="max_num_results", filters="filters")
    if options:
        dropped = ", ".join(sorted(options))
        warn(f"hosted:{tool.name}:{dropped}", f"OpenAI's {tool.name} takes no {dropped}; the tool is sent without.")
    return wire


def included(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the request must ask for, so that the reply tells the results and sources of its tools' calls."""
    return [_INCLUDED[kind] for kind in _INCLUDED if any(tool.get("type") == kind for tool in tools)]


def _move(options: dict[str, Any], wire: dict[str, Any], **names: str) -> None:
    for ours, theirs in names.items():
        if ours in options:
            wire[theirs] = options.pop(ours)
