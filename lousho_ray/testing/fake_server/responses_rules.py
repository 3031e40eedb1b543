"""The rules of OpenAI Responses: settings, tools and input items; how items belong together is in `responses_pairs`.

Source: the API reference (https://platform.openai.com/docs/api-reference/responses/create) and the messages of the API's own
refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lousho_ray.testing.fake_server.openai_rules import (
    check_authorization,
    check_call_id,
    check_image_url,
    check_json_word,
    check_sampling,
)
from lousho_ray.testing.fake_server.responses_pairs import check_calls, check_item_ids, check_reasoning
from lousho_ray.testing.fake_server.rule import (
    TOOL_NAME,
    Check,
    Checked,
    a_list,
    a_text,
    an_object,
    anything,
    boolean,
    broken,
    check_arguments,
    check_keys,
    integer,
    matching,
    need,
    number,
    one_of,
    unique,
    words,
)
from lousho_ray.testing.fake_server.schema_rules import check_object_schema, check_strict_schema

MAX_CALL_ID_CHARS = 64
MIN_OUTPUT_TOKENS = 16

_INCLUDABLE = words(
    "file_search_call.results web_search_call.results web_search_call.action.sources message.input_image.image_url "
    "computer_call_output.output.image_url code_interpreter_call.outputs reasoning.encrypted_content message.output_text.logprobs"
)


def _included(value: Any, where: str) -> Any:
    for index, wanted in enumerate(a_list(value, where)):
        one_of(wanted, f"{where}.{index}", _INCLUDABLE)
    return value


_KEYS: dict[str, Check] = {
    "include": _included,
    "model": lambda value, where: a_text(value, where, non_empty=True),
    "instructions": a_text,
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "max_output_tokens": integer(MIN_OUTPUT_TOKENS),
    "max_tool_calls": integer(1),
    "top_logprobs": integer(0),
    "store": boolean,
    "stream": boolean,
    "background": boolean,
    "parallel_tool_calls": boolean,
    "metadata": an_object,
    "previous_response_id": a_text,
    "reasoning": lambda value, where: an_object(value, where, keys={"effort", "summary", "generate_summary"}),
    "text": lambda value, where: an_object(value, where, keys={"format", "verbosity"}),
    "stream_options": lambda value, where: an_object(value, where, keys={"include_obfuscation"}),
    **dict.fromkeys(
        words(
            "input tools tool_choice context_management conversation moderation prompt prompt_cache_key "
            "prompt_cache_options prompt_cache_retention safety_identifier service_tier truncation user"
        ),
        anything,
    ),
}
_HOSTED_TOOLS = words(
    "web_search web_search_preview file_search code_interpreter image_generation mcp computer_use_preview computer "
    "local_shell shell apply_patch custom"
)
_HOSTED_KEYS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "web_search": (words("type filters search_context_size user_location external_web_access"), ()),
    "file_search": (words("type vector_store_ids filters max_num_results ranking_options"), ("vector_store_ids",)),
    "code_interpreter": (words("type container allowed_callers"), ("container",)),
}
"""The keys of hosted tools: all, and those that are required."""
_USER_PARTS: dict[str, str | None] = {"input_text": "text", "input_image": None, "input_file": None}
_ASSISTANT_PARTS: dict[str, str | None] = {"output_text": "text", "refusal": "refusal"}
_OTHER_ITEMS = words(
    "web_search_call file_search_call code_interpreter_call image_generation_call computer_call computer_call_output "
    "local_shell_call local_shell_call_output shell_call shell_call_output apply_patch_call apply_patch_call_output "
    "mcp_list_tools mcp_call mcp_approval_request mcp_approval_response custom_tool_call custom_tool_call_output "
    "compaction item_reference"
)
"""Item types that are let through as they are."""


def check_top_level(checked: Checked) -> None:
    """Known keys (no `stop`, `seed`, penalties, `messages`), no nulls, values in range."""
    check_keys(checked, _KEYS, ("model",))
    body = checked.body
    check_sampling(body["model"], body.get("reasoning", {}).get("effort"), body)
    for key in ("tool_choice", "parallel_tool_calls"):
        need(key not in body or "tools" in body, "tool-choice", f"'{key}' is only allowed when 'tools' are specified")


def check_tools(checked: Checked) -> None:
    """Flat function definitions with an explicit `strict`, and the choice among the tools."""
    if "tools" not in checked.body:
        return
    tools = a_list(checked.body["tools"], "tools", non_empty=True)
    names = [name for index, tool in enumerate(tools) if (name := _check_tool(tool, f"tools.{index}")) is not None]
    unique(names, "tool-unique", "Tool names")
    wanted = checked.body.get("tool_choice", "auto")
    if isinstance(wanted, str):
        one_of(wanted, "tool_choice", ("none", "auto", "required"))
        return
    kind = one_of(an_object(wanted, "tool_choice", required=("type",))["type"], "tool_choice.type", {"function", *_HOSTED_TOOLS})
    if kind == "function":
        name = an_object(wanted, "tool_choice", keys={"type", "name"}, required=("name",))["name"]
        need(name in names, "tool-choice", f"Tool choice '{name}' not found in 'tools' parameter")


def _check_tool(tool: Any, where: str) -> str | None:
    kind = one_of(an_object(tool, where, required=("type",))["type"], f"{where}.type", {"function", *_HOSTED_TOOLS})
    if kind != "function":
        if kind in _HOSTED_KEYS:
            keys, required = _HOSTED_KEYS[kind]
            an_object(tool, where, keys=keys, required=required)
        return None
    need("function" not in tool, "tool-flat", f"Unknown parameter: '{where}.function'; a function is defined flat, beside 'type'")
    an_object(tool, where, keys={"type", "name", "description", "parameters", "strict"}, required=("name", "parameters"))
    explicit = isinstance(tool.get("strict"), bool)
    need(explicit, "tool-strict", f"'{where}.strict' has to be given as true or false: left out it means strict mode")
    if tool["strict"]:
        check_strict_schema(tool["parameters"], f"{where}.parameters")
    else:
        check_object_schema(tool["parameters"], f"{where}.parameters")
    return matching(TOOL_NAME, tool["name"], f"{where}.name", "tool-name")


def check_text_format(checked: Checked) -> None:
    wanted = checked.body.get("text", {}).get("format")
    if wanted is None:
        return
    where = "text.format"
    kind = one_of(an_object(wanted, where, required=("type",))["type"], f"{where}.type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        keys = {"type", "name", "description", "schema", "strict"}
        an_object(wanted, where, keys=keys, required=("name", "schema"))
        matching(TOOL_NAME, wanted["name"], f"{where}.name", "format-name")
        an_object(wanted["schema"], f"{where}.schema")
        if wanted.get("strict"):
            check_strict_schema(wanted["schema"], f"{where}.schema")
    check_json_word(kind, [str(checked.body.get("input")), str(checked.body.get("instructions"))], "input")


def check_input(checked: Checked) -> None:
    """Text, or items each of a known shape."""
    value = checked.body.get("input")
    if isinstance(value, str):
        return
    needs_input = "previous_response_id" not in checked.body and "prompt" not in checked.body
    need(value is not None or not needs_input, "required-key", "Missing required parameter: 'input'")
    for index, item in enumerate(a_list(value, "input", non_empty=True)):
        _check_item(item, f"input.{index}")


def _check_item(item: Any, where: str) -> None:
    kind = an_object(item, where).get("type", "message")
    match kind:
        case "message":
            _check_message(item, where)
        case "function_call":
            keys = {"type", "id", "call_id", "name", "arguments", "status"}
            an_object(item, where, keys=keys, required=("call_id", "name", "arguments"))
            check_call_id(item["call_id"], f"{where}.call_id", MAX_CALL_ID_CHARS)
            matching(TOOL_NAME, item["name"], f"{where}.name", "tool-name")
            check_arguments(item["arguments"], f"{where}.arguments", "call-arguments")
        case "function_call_output":
            an_object(item, where, keys={"type", "id", "call_id", "output", "status"}, required=("call_id", "output"))
            check_call_id(item["call_id"], f"{where}.call_id", MAX_CALL_ID_CHARS)
            _check_parts(item["output"], f"{where}.output", _USER_PARTS)
        case "reasoning":
            keys = {"type", "id", "summary", "content", "encrypted_content", "status"}
            an_object(item, where, keys=keys, required=("id", "summary"))
            a_list(item["summary"], f"{where}.summary")
        case _ if kind not in _OTHER_ITEMS:
            broken("item-type", f"Invalid value for '{where}.type': {kind!r}")


def _check_message(item: dict[str, Any], where: str) -> None:
    an_object(item, where, keys={"type", "id", "status", "role", "content", "phase"}, required=("role", "content"))
    role = one_of(item["role"], f"{where}.role", ("user", "assistant", "system", "developer"))
    _check_parts(item["content"], f"{where}.content", _ASSISTANT_PARTS if role == "assistant" else _USER_PARTS)


def _check_parts(content: Any, where: str, allowed: dict[str, str | None]) -> None:
    if isinstance(content, str):
        return
    for position, part in enumerate(a_list(content, where, non_empty=True)):
        at = f"{where}.{position}"
        kind = an_object(part, at, required=("type",))["type"]
        need(kind in allowed, "content-part", f"Invalid value for '{at}.type': {kind!r}; supported here are {sorted(allowed)}")
        text_key = allowed[kind]
        if text_key is not None:
            a_text(part.get(text_key), f"{at}.{text_key}")
        elif kind == "input_image":
            an_object(part, at, keys={"type", "image_url", "file_id", "detail"})
            need(("image_url" in part) != ("file_id" in part), "image-url", f"'{at}' must have one of 'image_url' and 'file_id'")
            if "image_url" in part:
                check_image_url(part["image_url"], f"{at}.image_url")


CHECKS: tuple[Callable[[Checked], None], ...] = (
    check_authorization,
    check_top_level,
    check_tools,
    check_text_format,
    check_input,
    check_calls,
    check_reasoning,
    check_item_ids,
)
