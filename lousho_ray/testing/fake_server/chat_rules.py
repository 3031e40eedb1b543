"""The rules of Chat Completions.

Source: the API reference (https://platform.openai.com/docs/api-reference/chat/create) and the messages of the API's own refusals.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lousho_ray.testing.fake_server.openai_rules import (
    REASONING_MODEL,
    check_authorization,
    check_call_id,
    check_image_url,
    check_json_word,
    check_sampling,
    check_stop,
)
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
    choice,
    integer,
    matching,
    need,
    number,
    one_of,
    unique,
    words,
)
from lousho_ray.testing.fake_server.schema_rules import check_object_schema, check_strict_schema

MAX_CALL_ID_CHARS = 40

_KEYS: dict[str, Check] = {
    "model": lambda value, where: a_text(value, where, non_empty=True),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "logit_bias": an_object,
    "metadata": an_object,
    "stream_options": lambda value, where: an_object(value, where, keys={"include_usage", "include_obfuscation"}),
    "max_tokens": integer(1),
    "max_completion_tokens": integer(1),
    "n": integer(1),
    "seed": integer(),
    "top_logprobs": integer(0),
    "logprobs": boolean,
    "parallel_tool_calls": boolean,
    "store": boolean,
    "stream": boolean,
    "stop": check_stop,
    "reasoning_effort": choice("none", "minimal", "low", "medium", "high", "xhigh"),
    "verbosity": choice("low", "medium", "high"),
    **dict.fromkeys(
        words(
            "messages tools tool_choice response_format audio modalities moderation prediction prompt_cache_key "
            "prompt_cache_options prompt_cache_retention safety_identifier service_tier user web_search_options"
        ),
        anything,
    ),
}
_DIALECT_KEYS: dict[str, frozenset[str]] = {
    "openai": frozenset(),
    "openrouter": words(
        "usage reasoning include_reasoning provider models transforms route plugins top_k top_a min_p "
        "repetition_penalty structured_outputs session_id"
    ),
    "mistral": frozenset({"random_seed", "safe_prompt", "prompt_mode"}),
    "compatible": words(
        "top_k min_p repetition_penalty min_tokens chat_template_kwargs guided_json guided_regex cache_prompt reasoning"
    ),
}
_MESSAGE_KEYS: dict[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "developer": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "refusal", "audio", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
_FOREIGN_ASSISTANT_KEYS = frozenset({"reasoning", "reasoning_content", "reasoning_details"})
"""What other servers than OpenAI's take back in an assistant message."""

_PART_KEYS: dict[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "refusal": frozenset({"type", "refusal"}),
    "image_url": frozenset({"type", "image_url"}),
    "input_audio": frozenset({"type", "input_audio"}),
    "file": frozenset({"type", "file"}),
}
_PARTS_OF_ROLE = {"user": {"text", "image_url", "input_audio", "file"}, "assistant": {"text", "refusal"}}


def check_top_level(checked: Checked) -> None:
    """Known keys, no nulls, values in range."""
    foreign = dict.fromkeys(_DIALECT_KEYS[checked.request.dialect], anything)
    check_keys(checked, {**_KEYS, **foreign}, ("model", "messages"))


def check_combinations(checked: Checked) -> None:
    """Settings that need or exclude each other."""
    body = checked.body
    both = "max_tokens" in body and "max_completion_tokens" in body
    need(not both, "max-tokens-twice", "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported")
    need(
        "stream_options" not in body or body.get("stream"), "stream-options", "'stream_options' is only allowed with 'stream: true'"
    )
    for key in ("tool_choice", "parallel_tool_calls"):
        need(key not in body or "tools" in body, "tool-choice", f"'{key}' is only allowed when 'tools' are specified")
    if checked.request.dialect == "openai":
        thinks = REASONING_MODEL.match(body["model"]) is not None
        refused = thinks and "max_tokens" in body
        need(
            not refused, "max-tokens-reasoning", "Unsupported parameter: 'max_tokens'; use 'max_completion_tokens' with this model"
        )
        check_sampling(body["model"], body.get("reasoning_effort"), body)


def check_tools(checked: Checked) -> None:
    """Definitions of functions, and the choice among them."""
    if "tools" not in checked.body:
        return
    tools = a_list(checked.body["tools"], "tools", non_empty=True)
    names = [_check_tool(tool, f"tools.{index}", checked) for index, tool in enumerate(tools)]
    unique(names, "tool-unique", "Tool names")
    wanted = checked.body.get("tool_choice", "auto")
    if isinstance(wanted, str):
        one_of(wanted, "tool_choice", ("none", "auto", "required"))
        return
    an_object(wanted, "tool_choice", keys={"type", "function"}, required=("type", "function"))
    one_of(wanted["type"], "tool_choice.type", ("function",))
    name = an_object(wanted["function"], "tool_choice.function", keys={"name"}, required=("name",))["name"]
    need(name in names, "tool-choice", f"Tool choice '{name}' not found in 'tools' parameter")


def check_tools_defined(checked: Checked) -> None:
    """Routers and gateways pass Anthropic's rule on: calls and results need tools that are defined."""
    if "claude" not in checked.body["model"].lower():
        return
    calls = any(message.get("tool_calls") or message["role"] == "tool" for message in checked.body["messages"])
    text = "Requests which include `tool_use` or `tool_result` blocks must define tools"
    need(checked.body.get("tools") or not calls, "tools-defined", text)


def _check_tool(tool: Any, where: str, checked: Checked) -> str:
    extra = {"cache_control"} if checked.request.dialect == "openrouter" else set()
    an_object(tool, where, keys={"type", "function", *extra}, required=("type", "function"))
    one_of(tool["type"], f"{where}.type", ("function",))
    keys = {"name", "description", "parameters", "strict"}
    function = an_object(tool["function"], f"{where}.function", keys=keys, required=("name",))
    if "description" in function:
        a_text(function["description"], f"{where}.function.description")
    if "strict" in function:
        boolean(function["strict"], f"{where}.function.strict")
    if "parameters" in function:
        check = check_strict_schema if function.get("strict") else check_object_schema
        check(function["parameters"], f"{where}.function.parameters")
    return matching(TOOL_NAME, function["name"], f"{where}.function.name", "tool-name")


def check_response_format(checked: Checked) -> None:
    if "response_format" not in checked.body:
        return
    wanted = an_object(checked.body["response_format"], "response_format", keys={"type", "json_schema"}, required=("type",))
    kind = one_of(wanted["type"], "response_format.type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        where = "response_format.json_schema"
        keys = {"name", "description", "schema", "strict"}
        wrapped = an_object(wanted.get("json_schema"), where, keys=keys, required=("name", "schema"))
        matching(TOOL_NAME, wrapped["name"], f"{where}.name", "format-name")
        an_object(wrapped["schema"], f"{where}.schema")
        if wrapped.get("strict"):
            check_strict_schema(wrapped["schema"], f"{where}.schema")
    if checked.request.dialect == "openai":
        messages = a_list(checked.body["messages"], "messages")
        check_json_word(kind, [str(message.get("content")) for message in messages if isinstance(message, dict)], "messages")


def check_messages(checked: Checked) -> None:
    """The shape of every message by its role."""
    for index, message in enumerate(a_list(checked.body["messages"], "messages", non_empty=True)):
        where = f"messages.{index}"
        role = one_of(an_object(message, where, required=("role",))["role"], f"{where}.role", _MESSAGE_KEYS)
        foreign = role == "assistant" and checked.request.dialect != "openai"
        an_object(message, where, keys=_MESSAGE_KEYS[role] | (_FOREIGN_ASSISTANT_KEYS if foreign else frozenset()))
        if role == "assistant":
            _check_assistant(message, where, checked)
        else:
            need(message.get("content") is not None, "message-content", f"Invalid value for '{where}.content': null")
            _check_content(message["content"], role, f"{where}.content", checked)


def _check_assistant(message: dict[str, Any], where: str, checked: Checked) -> None:
    content = message.get("content")
    if content is not None:
        _check_content(content, "assistant", f"{where}.content", checked)
    if "tool_calls" not in message:
        need(content or message.get("refusal"), "assistant-empty", f"'{where}' must have either 'content' or 'tool_calls'")
        return
    for position, call in enumerate(a_list(message["tool_calls"], f"{where}.tool_calls", non_empty=True)):
        at = f"{where}.tool_calls.{position}"
        an_object(call, at, keys={"id", "type", "function"}, required=("id", "type", "function"))
        one_of(call["type"], f"{at}.type", ("function",))
        _check_call_id(call["id"], f"{at}.id", checked)
        function = an_object(call["function"], f"{at}.function", keys={"name", "arguments"}, required=("name", "arguments"))
        matching(TOOL_NAME, function["name"], f"{at}.function.name", "tool-name")
        check_arguments(function["arguments"], f"{at}.function.arguments", "call-arguments")


def _check_call_id(value: Any, where: str, checked: Checked) -> None:
    call_id = check_call_id(value, where, MAX_CALL_ID_CHARS)
    if checked.request.dialect == "mistral":
        matching(re.compile("[a-zA-Z0-9]{9}"), call_id, where, "call-id")


def _check_content(content: Any, role: str, where: str, checked: Checked) -> None:
    """Text, or parts of the kinds the role may have: only a user sends images, audio and files."""
    if isinstance(content, str):
        return
    allowed = _PARTS_OF_ROLE.get(role, {"text"})
    extra = {"cache_control"} if checked.request.dialect == "openrouter" else set()
    for position, part in enumerate(a_list(content, where, non_empty=True)):
        at = f"{where}.{position}"
        kind = an_object(part, at, required=("type",))["type"]
        need(kind in allowed, "content-part", f"Invalid value for '{at}.type': {kind!r}; a {role} message has {sorted(allowed)}")
        an_object(part, at, keys=_PART_KEYS[kind] | extra, required=(kind,))
        if kind in ("text", "refusal"):
            a_text(part[kind], f"{at}.{kind}")
        elif kind == "image_url":
            image = an_object(part["image_url"], f"{at}.image_url", keys={"url", "detail"}, required=("url",))
            check_image_url(image["url"], f"{at}.image_url.url")


def check_pairs(checked: Checked) -> None:
    """Every call is answered exactly once, by the tool messages directly after it, and no tool message answers anything else."""
    open_ids: list[str] = []
    turn: list[str] = []
    for index, message in enumerate(checked.body["messages"]):
        where = f"messages.{index}"
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if call_id in open_ids:
                open_ids.remove(call_id)
            elif call_id in turn:
                broken("call-answered-twice", f"Invalid '{where}': tool_call_id {call_id!r} has been answered already")
            else:
                broken("orphan-result", f"'{where}' with role 'tool' must be a response to a preceding message with 'tool_calls'")
            continue
        _check_answered(open_ids, where)
        turn = [call["id"] for call in message.get("tool_calls", ())] if message["role"] == "assistant" else []
        unique(turn, "call-id-unique", "Ids of 'tool_calls'")
        open_ids = list(turn)
    _check_answered(open_ids, "messages")


def _check_answered(open_ids: list[str], where: str) -> None:
    need(
        not open_ids,
        "call-unanswered",
        f"An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'; "
        f"no response before '{where}' for: {', '.join(open_ids)}",
    )


CHECKS: tuple[Callable[[Checked], None], ...] = (
    check_authorization,
    check_top_level,
    check_combinations,
    check_tools,
    check_response_format,
    check_messages,
    check_tools_defined,
    check_pairs,
)
