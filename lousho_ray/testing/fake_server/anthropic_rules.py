"""The rules of Anthropic Messages for settings, tools and content; those on the order of turns are in `anthropic_turns`.

Source: the API reference (https://docs.claude.com/en/api/messages), the guides on tool use, extended thinking and prompt caching,
and the messages of the API's own refusals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from lousho_ray.testing.fake_server.anthropic_turns import (
    check_alternation,
    check_pairs,
    check_thinking_blocks,
    check_thinking_first,
    check_trailing_space,
)
from lousho_ray.testing.fake_server.openai_rules import check_base64
from lousho_ray.testing.fake_server.rule import (
    BrokenRuleError,
    Check,
    Checked,
    a_list,
    a_text,
    an_object,
    anything,
    boolean,
    check_keys,
    integer,
    matching,
    need,
    number,
    one_of,
    unique,
    words,
)
from lousho_ray.testing.fake_server.schema_rules import check_object_schema, check_output_schema

MAX_CACHE_MARKS = 4
MIN_THINKING_TOKENS = 1024
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
CALL_ID = re.compile(r"[a-zA-Z0-9_-]+")

_KEYS: dict[str, Check] = {
    "model": lambda value, where: a_text(value, where, non_empty=True),
    "max_tokens": integer(1),
    "temperature": number(0, 1),
    "top_p": number(0, 1),
    "top_k": integer(0),
    "stream": boolean,
    "metadata": lambda value, where: an_object(value, where, keys={"user_id"}),
    **dict.fromkeys(
        words(
            "messages system stop_sequences thinking tool_choice tools cache_control container diagnostics inference_geo "
            "output_config service_tier speed user_profile_id workspace_id"
        ),
        anything,
    ),
}
_BLOCK_KEYS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "text": (frozenset({"type", "text", "cache_control", "citations"}), ("text",)),
    "image": (frozenset({"type", "source", "cache_control"}), ("source",)),
    "document": (frozenset({"type", "source", "cache_control", "title", "context", "citations"}), ("source",)),
    "tool_use": (frozenset({"type", "id", "name", "input", "cache_control", "caller"}), ("id", "name", "input")),
    "tool_result": (frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}), ("tool_use_id",)),
    "thinking": (frozenset({"type", "thinking", "signature"}), ("thinking", "signature")),
    "redacted_thinking": (frozenset({"type", "data"}), ("data",)),
}
_BLOCKS_OF = {
    "user": {"text", "image", "document", "tool_result", "search_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking", "server_tool_use", "web_search_tool_result"},
    "tool_result": {"text", "image", "document", "search_result"},
    "system": {"text"},
}
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def check_headers(checked: Checked) -> None:
    """A key (the official client sends it as a bearer token) and the version of the API."""
    headers = checked.request.headers
    if not headers.get("x-api-key") and not headers.get("authorization", "").startswith("Bearer "):
        raise BrokenRuleError("authorization", "x-api-key header is required", status=401, type="authentication_error")
    need(headers.get("anthropic-version"), "anthropic-version", "anthropic-version: header is required")


def check_top_level(checked: Checked) -> None:
    """Known keys, no nulls, values in range; `max_tokens` is required."""
    check_keys(checked, _KEYS, ("model", "max_tokens", "messages"))
    for position, stop in enumerate(a_list(checked.body.get("stop_sequences", []), "stop_sequences")):
        where = f"stop_sequences.{position}"
        need(a_text(stop, where).strip(), "stop-blank", f"{where}: each stop sequence must contain non-whitespace")


def check_thinking_settings(checked: Checked) -> None:
    """The thinking budget fits into `max_tokens`, and the settings that thinking excludes are absent."""
    body = checked.body
    if not thinking_enabled(body):
        return
    thinking = an_object(body["thinking"], "thinking", keys={"type", "budget_tokens", "display"})
    if thinking["type"] == "enabled":
        integer(MIN_THINKING_TOKENS)(thinking.get("budget_tokens"), "thinking.budget_tokens")
        fits = thinking["budget_tokens"] < body["max_tokens"]
        need(fits, "thinking-budget", "`max_tokens` must be greater than `thinking.budget_tokens`")
    need(body.get("temperature", 1) == 1, "thinking-sampling", "`temperature` may only be set to 1 when thinking is enabled")
    need(body.get("top_p", 1) >= 0.95, "thinking-sampling", "`top_p` must be at least 0.95 when thinking is enabled")
    need("top_k" not in body, "thinking-sampling", "`top_k` must be unset when thinking is enabled")
    choice = an_object(body.get("tool_choice", {}), "tool_choice").get("type", "auto")
    free = choice in ("auto", "none")
    need(free, "thinking-tool-choice", f"Thinking may not be enabled when tool_choice forces tool use: {choice!r}")


def thinking_enabled(body: dict[str, Any]) -> bool:
    thinking = an_object(body.get("thinking", {"type": "disabled"}), "thinking", required=("type",))
    return one_of(thinking["type"], "thinking.type", ("enabled", "adaptive", "disabled")) != "disabled"


def check_tools(checked: Checked) -> None:
    body = checked.body
    tools = a_list(body.get("tools", []), "tools")
    names = [_check_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]
    unique(names, "tool-unique", "tools: Tool names")
    if "tool_choice" not in body:
        return
    need(tools, "tool-choice", "tool_choice: may only be specified while providing tools")
    choice = an_object(body["tool_choice"], "tool_choice", keys={"type", "name", "disable_parallel_tool_use"}, required=("type",))
    kind = one_of(choice["type"], "tool_choice.type", ("auto", "any", "tool", "none"))
    need(("name" in choice) == (kind == "tool"), "tool-choice", f"tool_choice.{kind}.name: only for, and required for, type 'tool'")
    need(kind != "tool" or choice["name"] in names, "tool-choice", f"Tool '{choice.get('name')}' not found in provided tools")


def check_tools_defined(checked: Checked) -> None:
    """Calls and results need tools that are defined."""
    contents = [message["content"] for message in checked.body["messages"]]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    calls = any(block["type"] in ("tool_use", "tool_result") for block in blocks)
    text = "Requests which include `tool_use` or `tool_result` blocks must define tools"
    need(checked.body.get("tools") or not calls, "tools-defined", text)


def _check_tool(tool: Any, where: str) -> str:
    an_object(tool, where, required=("name",))
    if tool.get("type", "custom") == "custom":
        keys = {"type", "name", "description", "input_schema", "cache_control", "strict", "input_examples", "defer_loading"}
        an_object(tool, where, keys=keys, required=("input_schema",))
        check_object_schema(tool["input_schema"], f"{where}.input_schema")
    return matching(TOOL_NAME, tool["name"], f"{where}.name", "tool-name")


def check_output(checked: Checked) -> None:
    """The format of the reply, when one is asked for."""
    wanted = an_object(checked.body.get("output_config", {}), "output_config", keys={"effort", "format", "task_budget"})
    if "format" in wanted:
        where = "output_config.format"
        an_object(wanted["format"], where, keys={"type", "schema"}, required=("type", "schema"))
        one_of(wanted["format"]["type"], f"{where}.type", ("json_schema",))
        check_output_schema(wanted["format"]["schema"], f"{where}.schema")


def check_content(checked: Checked) -> None:
    """The shape of the system prompt and of every message."""
    if "system" in checked.body:
        _check_blocks(checked.body["system"], "system", "system")
    for index, message in enumerate(a_list(checked.body["messages"], "messages", non_empty=True)):
        where = f"messages.{index}"
        an_object(message, where, keys={"role", "content"}, required=("role", "content"))
        _check_blocks(message["content"], one_of(message["role"], f"{where}.role", ("user", "assistant")), f"{where}.content")


def _check_blocks(content: Any, place: str, where: str) -> None:
    """Text that is not blank, or blocks of the kinds that belong there."""
    if isinstance(content, str):
        _check_not_blank(content, where)
        return
    for position, block in enumerate(a_list(content, where, non_empty=True)):
        at = f"{where}.{position}"
        kind = an_object(block, at, required=("type",))["type"]
        need(kind in _BLOCKS_OF[place], "content-part", f"{at}: a block of type {kind!r} is not allowed in {place!r} content")
        if kind not in _BLOCK_KEYS:
            continue
        keys, required = _BLOCK_KEYS[kind]
        need("cache_control" in keys or "cache_control" not in block, "cache-thinking", f"{at}: a {kind} block may not be cached")
        an_object(block, at, keys=keys, required=required)
        _check_block(block, kind, at)


def _check_not_blank(text: str, where: str) -> None:
    need(text.strip(), "blank-text", f"{where}: text content blocks must contain non-whitespace text")


def _check_block(block: dict[str, Any], kind: str, where: str) -> None:
    match kind:
        case "text":
            _check_not_blank(a_text(block["text"], where), where)
        case "image":
            _check_image(block["source"], f"{where}.source")
        case "tool_use":
            matching(CALL_ID, block["id"], f"{where}.id", "call-id")
            matching(TOOL_NAME, block["name"], f"{where}.name", "tool-name")
            need(isinstance(block["input"], dict), "call-arguments", f"{where}.input: Input should be a valid dictionary")
        case "tool_result":
            matching(CALL_ID, block["tool_use_id"], f"{where}.tool_use_id", "call-id")
            boolean(block.get("is_error", False), f"{where}.is_error")
            need("content" in block, "blank-text", f"{where}.content: a result needs content")
            _check_blocks(block["content"], "tool_result", f"{where}.content")


def _check_image(source: Any, where: str) -> None:
    kind = one_of(an_object(source, where, required=("type",))["type"], f"{where}.type", ("base64", "url", "file"))
    if kind == "base64":
        an_object(source, where, keys={"type", "media_type", "data"}, required=("media_type", "data"))
        one_of(source["media_type"], f"{where}.media_type", _IMAGE_TYPES)
        check_base64(source["data"], f"{where}.data")
    elif kind == "url":
        url = a_text(an_object(source, where, keys={"type", "url"}, required=("url",))["url"], f"{where}.url")
        need(url.startswith("https://"), "image-url", f"{where}.url: only HTTPS URLs are supported")


def check_cache_marks(checked: Checked) -> None:
    """At most four marks in the request, each `ephemeral`."""
    marks = list(_cache_marks(checked.body))
    need(
        len(marks) <= MAX_CACHE_MARKS,
        "cache-marks",
        f"A maximum of {MAX_CACHE_MARKS} blocks with cache_control may be provided. Found {len(marks)}.",
    )
    for mark in marks:
        an_object(mark, "cache_control", keys={"type", "ttl"}, required=("type",))
        one_of(mark["type"], "cache_control.type", ("ephemeral",))
        one_of(mark.get("ttl", "5m"), "cache_control.ttl", ("5m", "1h"))


def _cache_marks(value: Any) -> Iterator[Any]:
    """The marks of the request's blocks and tools, wherever they are nested; data of users is not looked into."""
    if isinstance(value, list):
        for item in value:
            yield from _cache_marks(item)
    elif isinstance(value, dict):
        if "cache_control" in value:
            yield value["cache_control"]
        for key in ("system", "tools", "messages", "content"):
            yield from _cache_marks(value.get(key))


CHECKS: tuple[Callable[[Checked], None], ...] = (
    check_headers,
    check_top_level,
    check_thinking_settings,
    check_tools,
    check_output,
    check_content,
    check_tools_defined,
    check_cache_marks,
    check_alternation,
    check_pairs,
    check_trailing_space,
    check_thinking_blocks,
    check_thinking_first,
)
