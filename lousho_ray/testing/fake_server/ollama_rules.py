"""The rules of Ollama's own chat API.

Source: the API reference (https://github.com/ollama/ollama/blob/main/docs/api.md#generate-a-chat-completion). Ollama itself ignores
keys that it does not know; a setting that has no effect is refused here all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lousho_ray.testing.fake_server.openai_rules import check_base64
from lousho_ray.testing.fake_server.rule import (
    Check,
    Checked,
    a_list,
    a_text,
    an_object,
    anything,
    boolean,
    check_keys,
    need,
    one_of,
    words,
)
from lousho_ray.testing.fake_server.schema_rules import check_object_schema

_KEYS: dict[str, Check] = {
    "model": lambda value, where: a_text(value, where, non_empty=True),
    "stream": boolean,
    **dict.fromkeys(words("messages tools format options keep_alive think logprobs top_logprobs"), anything),
}
_OPTIONS = words(
    "num_keep seed num_predict top_k top_p min_p typical_p repeat_last_n temperature repeat_penalty presence_penalty "
    "frequency_penalty penalize_newline stop numa num_ctx num_batch num_gpu main_gpu use_mmap num_thread"
)
_MESSAGE_KEYS = frozenset({"role", "content", "images", "tool_calls", "tool_name", "tool_call_id", "thinking"})


def check_top_level(checked: Checked) -> None:
    check_keys(checked, _KEYS, ("model", "messages"))
    body = checked.body
    for name, value in an_object(body.get("options", {}), "options").items():
        need(name in _OPTIONS, "unknown-option", f"invalid option provided: {name!r}")
        need(value is not None, "null-setting", f"option {name!r} must not be null; leave it out instead")
    think = body.get("think", False)
    need(isinstance(think, bool) or think in ("low", "medium", "high"), "setting-value", f"invalid think value: {think!r}")
    wanted = body.get("format", "json")
    need(
        wanted == "json" or isinstance(wanted, dict),
        "setting-value",
        f"invalid format: {wanted!r}; expected 'json' or a JSON schema",
    )


def check_tools(checked: Checked) -> None:
    for index, tool in enumerate(a_list(checked.body.get("tools", []), "tools")):
        where = f"tools.{index}"
        an_object(tool, where, keys={"type", "function"}, required=("type", "function"))
        one_of(tool["type"], f"{where}.type", ("function",))
        function = an_object(tool["function"], f"{where}.function", keys={"name", "description", "parameters"}, required=("name",))
        a_text(function["name"], f"{where}.function.name", non_empty=True)
        check_object_schema(function.get("parameters"), f"{where}.function.parameters")


def check_messages(checked: Checked) -> None:
    for index, message in enumerate(a_list(checked.body["messages"], "messages", non_empty=True)):
        where = f"messages.{index}"
        an_object(message, where, keys=_MESSAGE_KEYS, required=("role",))
        role = one_of(message["role"], f"{where}.role", ("system", "user", "assistant", "tool"))
        a_text(message.get("content", ""), f"{where}.content")
        for position, image in enumerate(a_list(message.get("images", []), f"{where}.images")):
            check_base64(image, f"{where}.images.{position}")
        need("tool_calls" not in message or role == "assistant", "tool-calls-role", f"{where}: only the assistant has tool_calls")
        for position, call in enumerate(a_list(message.get("tool_calls", []), f"{where}.tool_calls")):
            _check_call(call, f"{where}.tool_calls.{position}")


def _check_call(call: Any, where: str) -> None:
    an_object(call, where, keys={"id", "type", "function"}, required=("function",))
    function = an_object(call["function"], f"{where}.function", keys={"index", "name", "arguments"}, required=("name", "arguments"))
    is_object = isinstance(function["arguments"], dict)
    need(is_object, "call-arguments", f"{where}.function.arguments: cannot unmarshal into an object; send arguments as an object")


CHECKS: tuple[Callable[[Checked], None], ...] = (check_top_level, check_tools, check_messages)
