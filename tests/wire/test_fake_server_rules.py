"""Every rule of the strict fake server: a request that breaks it is refused by name, its lawful twin is answered.

A row is a rule, what breaks it and what satisfies it: changes to a small valid request, written as paths (`messages.0.role`).
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from lousho_ray.testing.fake_server import FakeServer, Reply

DROP = object()
"""As a value: leave the key out."""

PIXEL = "iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRICT_SCHEMA = {**SCHEMA, "required": ["a"], "additionalProperties": False}
USER = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Api:
    """A route with a valid request: one finished tool call and a user who goes on."""

    route: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=lambda: {"authorization": "Bearer k"})


def chat_call(id: str = "c1", arguments: str = "{}", name: str = "add") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_tool(name: str = "add", parameters: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Adds.", "parameters": parameters, **more}}


def chat_result(id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "3"}


def chat_turn(*call_ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [chat_call(call_id) for call_id in call_ids]}


def tool_use(id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "add", "input": {}, **more}


def tool_result(id: str = "c1", content: Any = "3", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def text(value: str = "hi", **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def call_item(call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": "{}", **more}


def output_item(id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": "3"}


def reasoning_item(**more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **more}


def flat_tool(name: str = "add", parameters: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "Adds.", "parameters": parameters, "strict": False, **more}


def claude_tool(name: str = "add", **more: Any) -> dict[str, Any]:
    return {"name": name, "description": "Adds.", "input_schema": SCHEMA, **more}


def claude_output(schema: dict[str, Any]) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def limited(**more: Any) -> dict[str, Any]:
    """A closed object whose one number is described further."""
    return {**STRICT_SCHEMA, "properties": {"a": {"type": "integer", **more}}}


CHAT = Api(
    "chat",
    "/v1/chat/completions",
    {
        "model": "gpt-4o",
        "messages": [{"role": "system", "content": "Be kind."}, USER, chat_turn("c1"), chat_result(), USER],
        "tools": [chat_tool()],
    },
)
MISTRAL = Api(
    "chat",
    "/mistral/v1/chat/completions",
    {"model": "m", "messages": [USER, chat_turn("abcdefgh1"), chat_result("abcdefgh1")], "tools": [chat_tool()]},
)
COMPATIBLE = Api("chat", "/compatible/v1/chat/completions", {"model": "m", "messages": [USER]}, {})
OPENROUTER = Api("chat", "/api/v1/chat/completions", {"model": "m", "messages": [USER]})
RESPONSES = Api(
    "responses",
    "/v1/responses",
    {"model": "gpt-4o", "store": False, "input": [USER, call_item(), output_item(), USER], "tools": [flat_tool()]},
)
CLAUDE = Api(
    "messages",
    "/v1/messages",
    {
        "model": "claude",
        "max_tokens": 4000,
        "system": [text("Be kind.")],
        "messages": [
            USER,
            {"role": "assistant", "content": [text(), tool_use()]},
            {"role": "user", "content": [tool_result(), text()]},
        ],
        "tools": [claude_tool()],
    },
    {"x-api-key": "k", "anthropic-version": "2023-06-01"},
)
OLLAMA = Api(
    "ollama",
    "/api/chat",
    {
        "model": "llama",
        "stream": False,
        "options": {"num_ctx": 4096},
        "messages": [
            {**USER, "images": [PIXEL]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
            {"role": "tool", "content": "3", "tool_name": "add"},
        ],
        "tools": [chat_tool()],
    },
    {},
)
THINKING = {"type": "enabled", "budget_tokens": 1024}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "known"}
REDACTED = {"type": "redacted_thinking", "data": "known-data"}


def claude_turn(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def claude_user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def strict_tool(schema: Any) -> dict[str, Any]:
    return {"tools.0": chat_tool(parameters=schema, strict=True)}


def strict_part(property: Any) -> dict[str, Any]:
    return strict_tool({"type": "object", "properties": {"a": property}, "required": ["a"], "additionalProperties": False})


Change = dict[str, Any]
ROWS: list[tuple[Api, str, Change, Change]] = [
    # ------------------------------------------------------------------------------------------- chat: top level
    (CHAT, "authorization", {"header:authorization": DROP}, {"header:authorization": "Bearer sk-1"}),
    (CHAT, "required-key", {"model": DROP}, {"model": "x"}),
    (CHAT, "unknown-key", {"top_k": 1}, {"top_p": 1}),
    (CHAT, "tools-defined", {"model": "claude", "tools": DROP}, {"tools": DROP}),
    (OPENROUTER, "unknown-key", {"invented": 1}, {"usage": {"include": True}, "reasoning": {"effort": "low"}}),
    (CHAT, "null-setting", {"seed": None}, {"seed": 7}),
    (CHAT, "setting-value", {"temperature": 2.5}, {"temperature": 2}),
    (CHAT, "setting-value", {"max_tokens": 0}, {"max_tokens": 1}),
    (CHAT, "setting-value", {"max_tokens": True}, {"max_completion_tokens": 10}),
    (CHAT, "setting-value", {"stop": ["1", "2", "3", "4", "5"]}, {"stop": ["1", "2", "3", "4"]}),
    (CHAT, "setting-value", {"stream": "yes"}, {"stream": True}),
    (CHAT, "setting-value", {"reasoning_effort": "extreme"}, {"reasoning_effort": "low"}),
    (CHAT, "shape", {"model": ""}, {"model": "m"}),
    (CHAT, "max-tokens-twice", {"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
    (CHAT, "max-tokens-reasoning", {"model": "o3", "max_tokens": 5}, {"model": "o3", "max_completion_tokens": 5}),
    (
        CHAT,
        "reasoning-sampling",
        {"model": "gpt-5-mini", "reasoning_effort": "low", "temperature": 1},
        {"model": "gpt-5-mini", "reasoning_effort": "none", "temperature": 1},
    ),
    (
        CHAT,
        "stream-options",
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": True}},
    ),
    (CHAT, "tool-choice", {"tools": DROP, "tool_choice": "auto"}, {"tool_choice": "auto"}),
    (CHAT, "tool-choice", {"tools": DROP, "parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    (
        CHAT,
        "tool-choice",
        {"tool_choice": {"type": "function", "function": {"name": "gone"}}},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
    (CHAT, "shape", {"tool_choice": "always"}, {"tool_choice": "required"}),
    # -------------------------------------------------------------------------------------------- chat: tools
    (CHAT, "shape", {"tools": []}, {"tools": [chat_tool()]}),
    (
        CHAT,
        "shape",
        {"tools.0": {"type": "function", "name": "add"}},
        {"tools.0": {"type": "function", "function": {"name": "add"}}},
    ),
    (CHAT, "unknown-key", {"tools.0.function.schema": {}}, {"tools.0.function.description": "x"}),
    (CHAT, "tool-name", {"tools.0": chat_tool("my tool")}, {"tools.0": chat_tool("my-tool_1")}),
    (CHAT, "tool-name", {"tools.0": chat_tool("a" * 65)}, {"tools.0": chat_tool("a" * 64)}),
    (CHAT, "tool-unique", {"tools": [chat_tool(), chat_tool()]}, {"tools": [chat_tool(), chat_tool("sub")]}),
    (
        CHAT,
        "schema-object",
        {"tools.0": chat_tool(parameters={"type": "string"})},
        {"tools.0": chat_tool(parameters={"type": "object"})},
    ),
    (CHAT, "schema-strict", strict_tool(SCHEMA), strict_tool(STRICT_SCHEMA)),
    (CHAT, "schema-strict", strict_tool({**STRICT_SCHEMA, "required": []}), strict_tool(STRICT_SCHEMA)),
    (CHAT, "schema-strict", strict_tool({**STRICT_SCHEMA, "anyOf": []}), strict_part({"anyOf": [{"type": "null"}]})),
    (CHAT, "schema-strict", strict_part({"type": "string", "default": "x"}), strict_part({"type": "string", "pattern": "x"})),
    (
        CHAT,
        "schema-strict",
        strict_part({"type": "array", "items": SCHEMA}),
        strict_part({"type": "array", "items": STRICT_SCHEMA}),
    ),
    (CHAT, "schema-strict", strict_part({"anyOf": [SCHEMA]}), strict_part({"anyOf": [STRICT_SCHEMA]})),
    (
        CHAT,
        "schema-strict",
        strict_tool({**STRICT_SCHEMA, "$defs": {"n": SCHEMA}}),
        strict_tool({**STRICT_SCHEMA, "$defs": {"n": STRICT_SCHEMA}}),
    ),
    # ------------------------------------------------------------------------------------------ chat: JSON format
    (
        CHAT,
        "json-word",
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object"}, "messages.0.content": "JSON"},
    ),
    (
        CHAT,
        "format-name",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA, "strict": False}}},
    ),
    (
        CHAT,
        "schema-strict",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": STRICT_SCHEMA, "strict": True}}},
    ),
    (CHAT, "shape", {"response_format": {"type": "yaml"}}, {"response_format": {"type": "text"}}),
    # -------------------------------------------------------------------------------------------- chat: messages
    (CHAT, "shape", {"messages": []}, {"messages": [USER]}),
    (CHAT, "shape", {"messages.1.role": "human"}, {"messages.1.role": "developer"}),
    (CHAT, "unknown-key", {"messages.1.metadata": {}}, {"messages.1.name": "ann"}),
    (CHAT, "unknown-key", {"messages.2.reasoning_content": "hm"}, {"messages.2.refusal": "no"}),
    (CHAT, "message-content", {"messages.3.content": None}, {"messages.3.content": [text()]}),
    (CHAT, "message-content", {"messages.1.content": None}, {"messages.1.content": ""}),
    (
        CHAT,
        "assistant-empty",
        {"messages": [USER, {"role": "assistant", "content": ""}, USER]},
        {"messages": [USER, {"role": "assistant", "content": "a"}]},
    ),
    (CHAT, "assistant-empty", {"messages": [USER, {"role": "assistant", "content": None}, USER]}, {}),
    (CHAT, "shape", {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": []}]}, {}),
    (
        CHAT,
        "content-part",
        {"messages.3.content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]},
        {"messages.1.content": [text(), {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "low"}}]},
    ),
    (
        CHAT,
        "image-url",
        {"messages.1.content": [{"type": "image_url", "image_url": {"url": PIXEL}}]},
        {"messages.1.content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}]},
    ),
    (CHAT, "base64", {"messages.1.content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}]}, {}),
    (CHAT, "shape", {"messages.1.content": [{"type": "image_url", "image_url": "https://x/y.png"}]}, {}),
    (CHAT, "tool-name", {"messages.2.tool_calls.0": chat_call(name="a.b")}, {"messages.2.tool_calls.0": chat_call(name="a-b")}),
    (
        CHAT,
        "call-arguments",
        {"messages.2.tool_calls.0": chat_call(arguments="")},
        {"messages.2.tool_calls.0": chat_call(arguments='{"a": 1}')},
    ),
    (CHAT, "call-arguments", {"messages.2.tool_calls.0": chat_call(arguments="[1]")}, {}),
    (CHAT, "call-arguments", {"messages.2.tool_calls.0": chat_call(arguments='{"a": NaN}')}, {}),
    (CHAT, "call-arguments", {"messages.2.tool_calls.0.function.arguments": {"a": 1}}, {}),
    (CHAT, "call-id", {"messages.2": chat_turn(""), "messages.3": chat_result("")}, {}),
    (
        CHAT,
        "call-id",
        {"messages.2": chat_turn("c" * 41), "messages.3": chat_result("c" * 41)},
        {"messages.2": chat_turn("c" * 40), "messages.3": chat_result("c" * 40)},
    ),
    (MISTRAL, "call-id", {"messages.1": chat_turn("call_1"), "messages.2": chat_result("call_1")}, {}),
    # ----------------------------------------------------------------------------------------------- chat: pairs
    (
        CHAT,
        "call-unanswered",
        {"messages": [USER, chat_turn("c1"), USER]},
        {"messages": [USER, chat_turn("c1"), chat_result(), USER]},
    ),
    (
        CHAT,
        "call-unanswered",
        {"messages": [USER, chat_turn("c1", "c2"), chat_result("c1"), USER, chat_result("c2")]},
        {"messages": [USER, chat_turn("c1", "c2"), chat_result("c2"), chat_result("c1"), USER]},
    ),
    (CHAT, "call-unanswered", {"messages": [USER, chat_turn("c1")]}, {"messages": [USER, chat_turn("c1"), chat_result()]}),
    (CHAT, "call-answered-twice", {"messages": [USER, chat_turn("c1"), chat_result(), chat_result()]}, {}),
    (CHAT, "orphan-result", {"messages": [USER, chat_result()]}, {}),
    (CHAT, "orphan-result", {"messages": [USER, chat_turn("c1"), chat_result(), USER, chat_result()]}, {}),
    (CHAT, "call-id-unique", {"messages": [USER, chat_turn("c1", "c1"), chat_result()]}, {}),
    # ------------------------------------------------------------------------------------- responses: top level
    (RESPONSES, "authorization", {"header:authorization": "k"}, {}),
    (RESPONSES, "required-key", {"input": DROP}, {"input": "hi"}),
    (RESPONSES, "unknown-key", {"stop": ["x"]}, {"temperature": 1}),
    (RESPONSES, "unknown-key", {"seed": 1}, {"top_p": 1}),
    (RESPONSES, "unknown-key", {"presence_penalty": 1}, {"truncation": "auto"}),
    (RESPONSES, "unknown-key", {"max_tokens": 100}, {"max_output_tokens": 100}),
    (RESPONSES, "null-setting", {"instructions": None}, {"instructions": "Be kind."}),
    (RESPONSES, "setting-value", {"max_output_tokens": 15}, {"max_output_tokens": 16}),
    (
        RESPONSES,
        "reasoning-sampling",
        {"model": "o3", "reasoning": {"effort": "low"}, "top_p": 1},
        {"model": "o3", "reasoning": {"effort": "low", "summary": "auto"}},
    ),
    (RESPONSES, "tool-choice", {"tools": DROP, "tool_choice": "auto"}, {"tool_choice": "required"}),
    (
        RESPONSES,
        "tool-choice",
        {"tool_choice": {"type": "function", "name": "gone"}},
        {"tool_choice": {"type": "function", "name": "add"}},
    ),
    (
        RESPONSES,
        "json-word",
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_object"}}, "instructions": "Answer in JSON."},
    ),
    (
        RESPONSES,
        "format-name",
        {"text": {"format": {"type": "json_schema", "name": "a b", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "name": "output", "schema": SCHEMA, "strict": False}}},
    ),
    # ----------------------------------------------------------------------------------------- responses: tools
    (RESPONSES, "tool-flat", {"tools.0": chat_tool()}, {"tools.0": flat_tool()}),
    (RESPONSES, "tool-strict", {"tools.0.strict": DROP}, {"tools.0.strict": False}),
    (RESPONSES, "tool-name", {"tools.0.name": "a b"}, {"tools.0.name": "a_b"}),
    (RESPONSES, "tool-unique", {"tools": [flat_tool(), flat_tool()]}, {"tools": [flat_tool(), {"type": "web_search"}]}),
    (RESPONSES, "unknown-key", {"tools": [{"type": "web_search", "max_uses": 1}]}, {"tools": [{"type": "web_search"}]}),
    (RESPONSES, "shape", {"tools": [{"type": "code_interpreter"}]}, {"tools": [{"type": "code_interpreter", "container": "c"}]}),
    (RESPONSES, "shape", {"include": ["web_search_call.pages"]}, {"include": ["web_search_call.action.sources"]}),
    (RESPONSES, "schema-object", {"tools.0.parameters": {}}, {"tools.0.parameters": {"type": "object"}}),
    (RESPONSES, "schema-strict", {"tools.0.strict": True}, {"tools.0": flat_tool(parameters=STRICT_SCHEMA, strict=True)}),
    # ----------------------------------------------------------------------------------------- responses: items
    (RESPONSES, "item-type", {"input.0": {"type": "invented"}}, {"input.0": {"type": "message", "role": "user", "content": "x"}}),
    (RESPONSES, "shape", {"input.0.role": "tool"}, {"input.0.role": "developer"}),
    (RESPONSES, "unknown-key", {"input.0.name": "ann"}, {}),
    (RESPONSES, "content-part", {"input.0.content": [text()]}, {"input.0.content": [{"type": "input_text", "text": "x"}]}),
    (
        RESPONSES,
        "content-part",
        {"input.3": {"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}},
        {"input.3": {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}},
    ),
    (
        RESPONSES,
        "image-url",
        {"input.0.content": [{"type": "input_image", "image_url": "file:///x.png", "detail": "auto"}]},
        {"input.0.content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"}]},
    ),
    (
        RESPONSES,
        "unknown-key",
        {"input.0.content": [{"type": "input_image", "image_url": "https://x/y.png", "mime": "image/png"}]},
        {},
    ),
    (RESPONSES, "call-arguments", {"input.1.arguments": "null"}, {"input.1.arguments": "{}"}),
    (
        RESPONSES,
        "call-id",
        {"input.1": call_item("c" * 65), "input.2": output_item("c" * 65)},
        {"input.1": call_item("c" * 64), "input.2": output_item("c" * 64)},
    ),
    (RESPONSES, "call-unanswered", {"input": [USER, call_item(), USER]}, {"input": [USER, call_item(), output_item()]}),
    (RESPONSES, "orphan-result", {"input": [USER, output_item()]}, {}),
    (RESPONSES, "orphan-result", {"input": [USER, output_item(), call_item()]}, {}),
    (RESPONSES, "call-answered-twice", {"input": [USER, call_item(), output_item(), output_item()]}, {}),
    (RESPONSES, "call-id-unique", {"input": [USER, call_item(), call_item(), output_item()]}, {}),
    (
        RESPONSES,
        "reasoning-alone",
        {"input": [USER, reasoning_item(encrypted_content="known")]},
        {"input": [USER, reasoning_item(encrypted_content="known"), call_item(), output_item()]},
    ),
    (
        RESPONSES,
        "reasoning-alone",
        {"input": [USER, reasoning_item(encrypted_content="known"), USER]},
        {"input": [USER, reasoning_item(encrypted_content="known"), {"role": "assistant", "content": "x"}, USER]},
    ),
    (
        RESPONSES,
        "reasoning-encrypted",
        {"input": [USER, reasoning_item(encrypted_content="forged"), call_item(), output_item()]},
        {},
    ),
    (RESPONSES, "item-not-found", {"input": [USER, reasoning_item(), call_item(), output_item()]}, {}),
    (
        RESPONSES,
        "item-not-found",
        {"input": [USER, call_item(id="fc_1"), output_item()]},
        {"input": [USER, reasoning_item(encrypted_content="known"), call_item(id="fc_1"), output_item()]},
    ),
    (RESPONSES, "item-not-found", {"store": True, "input": [USER, call_item(id="fc_1"), output_item()]}, {"store": True}),
    (RESPONSES, "item-not-found", {"input": [USER, {"type": "item_reference", "id": "rs_1"}]}, {}),
    (RESPONSES, "item-id", {"input": [USER, call_item(id="call_1"), output_item()]}, {}),
    (RESPONSES, "previous-response", {"previous_response_id": "resp_1"}, {}),
    (RESPONSES, "previous-response", {"store": True, "previous_response_id": "resp_gone"}, {}),
    # --------------------------------------------------------------------------------------- messages: top level
    (CLAUDE, "authorization", {"header:x-api-key": DROP}, {"header:x-api-key": DROP, "header:authorization": "Bearer k"}),
    (CLAUDE, "anthropic-version", {"header:anthropic-version": DROP}, {}),
    (CLAUDE, "required-key", {"max_tokens": DROP}, {}),
    (CLAUDE, "unknown-key", {"seed": 1}, {"top_k": 1}),
    (CLAUDE, "unknown-key", {"stop": ["x"]}, {"stop_sequences": ["x"]}),
    (CLAUDE, "null-setting", {"system": None}, {"system": DROP}),
    (CLAUDE, "setting-value", {"temperature": 1.5}, {"temperature": 1}),
    (CLAUDE, "stop-blank", {"stop_sequences": ["\n"]}, {"stop_sequences": ["\nHuman:"]}),
    (CLAUDE, "tool-choice", {"tools": DROP, "tool_choice": {"type": "auto"}}, {"tool_choice": {"type": "auto"}}),
    (CLAUDE, "tool-choice", {"tool_choice": {"type": "tool", "name": "gone"}}, {"tool_choice": {"type": "tool", "name": "add"}}),
    (CLAUDE, "tool-choice", {"tool_choice": {"type": "any", "name": "add"}}, {"tool_choice": {"type": "any"}}),
    (CLAUDE, "tools-defined", {"tools": DROP}, {"tools": DROP, "messages": [USER]}),
    (CLAUDE, "schema-output", claude_output(SCHEMA), claude_output(STRICT_SCHEMA)),
    (CLAUDE, "schema-output", claude_output(limited(minimum=1)), claude_output(limited(enum=[1, 2]))),
    (CLAUDE, "schema-output", claude_output(limited(**{"$ref": "#/$defs/none"})), {}),
    (
        CLAUDE,
        "schema-output",
        claude_output(
            {**STRICT_SCHEMA, "$defs": {"n": limited(**{"$ref": "#/$defs/n"})}, "properties": {"a": {"$ref": "#/$defs/n"}}}
        ),
        claude_output({**STRICT_SCHEMA, "$defs": {"n": STRICT_SCHEMA}, "properties": {"a": {"$ref": "#/$defs/n"}}}),
    ),
    (CLAUDE, "shape", {"output_config": {"format": {"type": "json_object"}}}, {"output_config": {"effort": "low"}}),
    (CLAUDE, "shape", {"tool_choice": {"type": "required"}}, {"tool_choice": {"type": "none"}}),
    # ------------------------------------------------------------------------------------------- messages: tools
    (CLAUDE, "shape", {"tools.0": chat_tool()}, {"tools.0": claude_tool()}),
    (CLAUDE, "shape", {"tools.0.input_schema": DROP}, {}),
    (CLAUDE, "tool-name", {"tools.0.name": "a.b"}, {"tools.0.name": "a-b"}),
    (CLAUDE, "tool-name", {"tools.0.name": "a" * 129}, {"tools.0.name": "a" * 128}),
    (
        CLAUDE,
        "tool-unique",
        {"tools": [claude_tool(), claude_tool()]},
        {"tools": [claude_tool(), {"type": "bash_20250124", "name": "bash"}]},
    ),
    (CLAUDE, "schema-object", {"tools.0.input_schema": {"type": "array"}}, {}),
    # ----------------------------------------------------------------------------------------- messages: content
    (CLAUDE, "blank-text", {"system": " "}, {"system": "Be kind."}),
    (CLAUDE, "blank-text", {"messages.0.content": "\n"}, {"messages.0.content": "x"}),
    (CLAUDE, "blank-text", {"messages.1.content.0": text("")}, {"messages.1.content.0": text("x ")}),
    (
        CLAUDE,
        "blank-text",
        {"messages.2.content.0": tool_result(content="")},
        {"messages.2.content.0": tool_result(content="(empty)")},
    ),
    (
        CLAUDE,
        "blank-text",
        {"messages.2.content.0": tool_result(content=[text(" ")])},
        {"messages.2.content.0": tool_result(content=[text()])},
    ),
    (CLAUDE, "shape", {"messages.0.content": []}, {}),
    (CLAUDE, "shape", {"messages.0.role": "system"}, {}),
    (CLAUDE, "unknown-key", {"messages.0.name": "ann"}, {}),
    (CLAUDE, "unknown-key", {"messages.2.content.0.name": "add"}, {"messages.2.content.0.is_error": True}),
    (CLAUDE, "content-part", {"messages.0.content": [tool_use()]}, {}),
    (CLAUDE, "content-part", {"messages.1.content.0": tool_result()}, {}),
    (
        CLAUDE,
        "base64",
        {"messages.0.content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "data:x"}}]},
        {"messages.0.content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}]},
    ),
    (
        CLAUDE,
        "shape",
        {"messages.0.content": [{"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": PIXEL}}]},
        {"messages.0.content": [{"type": "image", "source": {"type": "base64", "media_type": "image/webp", "data": PIXEL}}]},
    ),
    (
        CLAUDE,
        "image-url",
        {"messages.0.content": [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]},
        {"messages.0.content": [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]},
    ),
    (CLAUDE, "call-id", {"messages.1.content.1": tool_use("a.b"), "messages.2.content.0": tool_result("a.b")}, {}),
    (CLAUDE, "call-arguments", {"messages.1.content.1.input": "{}"}, {"messages.1.content.1.input": {"a": 1}}),
    (CLAUDE, "tool-name", {"messages.1.content.1.name": "a b"}, {}),
    # --------------------------------------------------------------------------------------- messages: the turns
    (CLAUDE, "alternation", {"messages": [claude_turn(text()), USER]}, {"messages": [USER, claude_turn(text()), USER]}),
    (CLAUDE, "alternation", {"messages": [USER, USER]}, {"messages": [claude_user(text(), text())]}),
    (
        CLAUDE,
        "alternation",
        {
            "messages": [
                USER,
                claude_turn(tool_use("a"), tool_use("b")),
                claude_user(tool_result("a")),
                claude_user(tool_result("b")),
            ]
        },
        {"messages": [USER, claude_turn(tool_use("a"), tool_use("b")), claude_user(tool_result("b"), tool_result("a"))]},
    ),
    (CLAUDE, "call-unanswered", {"messages.2.content": [text()]}, {}),
    (CLAUDE, "call-unanswered", {"messages": [USER, claude_turn(tool_use())]}, {}),
    (CLAUDE, "call-answered-twice", {"messages.2.content": [tool_result(), tool_result()]}, {}),
    (CLAUDE, "orphan-result", {"messages.2.content": [tool_result(), tool_result("c2")]}, {}),
    (CLAUDE, "orphan-result", {"messages": [claude_user(tool_result())]}, {}),
    (CLAUDE, "results-first", {"messages.2.content": [text(), tool_result()]}, {"messages.2.content": [tool_result(), text()]}),
    (CLAUDE, "call-id-unique", {"messages.1.content": [tool_use(), tool_use()]}, {}),
    (
        CLAUDE,
        "trailing-space",
        {"messages": [USER, claude_turn(text("Answer: "))]},
        {"messages": [USER, claude_turn(text("Answer:"))]},
    ),
    (
        CLAUDE,
        "trailing-space",
        {"messages": [USER, {"role": "assistant", "content": "x\n"}]},
        {"messages": [USER, {"role": "assistant", "content": "x\n"}, USER]},
    ),
    # ------------------------------------------------------------------------------------------ messages: thinking
    (CLAUDE, "thinking-signature", {"messages.1.content.0": {**THOUGHT, "signature": "forged"}}, {"messages.1.content.0": THOUGHT}),
    (CLAUDE, "thinking-signature", {"messages.1.content.0": {**REDACTED, "data": "forged"}}, {"messages.1.content.0": REDACTED}),
    (CLAUDE, "thinking-modified", {"messages.1.content.0": {**THOUGHT, "thinking": "edited"}}, {"messages.1.content.0": THOUGHT}),
    (
        CLAUDE,
        "thinking-first",
        {"messages.1.content": [text(), THOUGHT, tool_use()]},
        {"messages.1.content": [THOUGHT, text(), tool_use()]},
    ),
    (CLAUDE, "thinking-first", {"thinking": THINKING}, {"thinking": THINKING, "messages.1.content.0": THOUGHT}),
    (
        CLAUDE,
        "thinking-first",
        {"thinking": {"type": "adaptive"}, "messages": [USER, claude_turn(text("x"))]},
        {"thinking": {"type": "adaptive"}, "messages": [USER, claude_turn(text("x")), USER]},
    ),
    (CLAUDE, "setting-value", {"thinking": {"type": "enabled", "budget_tokens": 1023}}, {"thinking": {"type": "disabled"}}),
    (
        CLAUDE,
        "thinking-budget",
        {"thinking": THINKING, "max_tokens": 1024},
        {"thinking": THINKING, "max_tokens": 1025, "messages": [USER]},
    ),
    (
        CLAUDE,
        "thinking-sampling",
        {"thinking": THINKING, "temperature": 0.5, "messages": [USER]},
        {"thinking": THINKING, "temperature": 1, "messages": [USER]},
    ),
    (CLAUDE, "thinking-sampling", {"thinking": THINKING, "top_p": 0.5, "messages": [USER]}, {"top_p": 0.5}),
    (CLAUDE, "thinking-sampling", {"thinking": THINKING, "top_k": 5, "messages": [USER]}, {"top_k": 5}),
    (
        CLAUDE,
        "thinking-tool-choice",
        {"thinking": THINKING, "tool_choice": {"type": "any"}, "messages": [USER]},
        {"thinking": THINKING, "tool_choice": {"type": "auto"}, "messages": [USER]},
    ),
    # -------------------------------------------------------------------------------------- messages: cache marks
    (
        CLAUDE,
        "cache-marks",
        {"messages.0.content": [text(cache_control={"type": "ephemeral"}) for _ in range(5)]},
        {"messages.0.content": [text(cache_control={"type": "ephemeral"}) for _ in range(4)]},
    ),
    (
        CLAUDE,
        "cache-marks",
        {
            "system": [text(cache_control={"type": "ephemeral"})],
            "tools.0.cache_control": {"type": "ephemeral"},
            "messages.0.content": [text(cache_control={"type": "ephemeral"})],
            "messages.2.content.0": tool_result(
                content=[text(cache_control={"type": "ephemeral"})], cache_control={"type": "ephemeral"}
            ),
        },
        {"messages.2.content.0": tool_result(cache_control={"type": "ephemeral", "ttl": "1h"})},
    ),
    (CLAUDE, "cache-thinking", {"messages.1.content.0": {**THOUGHT, "cache_control": {"type": "ephemeral"}}}, {}),
    (CLAUDE, "blank-text", {"messages.0.content": [text("", cache_control={"type": "ephemeral"})]}, {}),
    (CLAUDE, "shape", {"tools.0.cache_control": {"type": "forever"}}, {"tools.0.cache_control": {"type": "ephemeral"}}),
    # ------------------------------------------------------------------------------------------------- ollama
    (OLLAMA, "required-key", {"messages": DROP}, {}),
    (OLLAMA, "unknown-key", {"tool_choice": "auto"}, {"keep_alive": "5m"}),
    (OLLAMA, "unknown-key", {"temperature": 1}, {"options": {"temperature": 1, "num_predict": 5}}),
    (OLLAMA, "unknown-option", {"options": {"max_tokens": 1}}, {"options": {"num_predict": 1}}),
    (OLLAMA, "null-setting", {"options": {"seed": None}}, {"options": {"seed": 1}}),
    (OLLAMA, "setting-value", {"think": "extreme"}, {"think": "low"}),
    (OLLAMA, "setting-value", {"format": "yaml"}, {"format": SCHEMA}),
    (OLLAMA, "shape", {"messages.0.role": "developer"}, {"messages.0.role": "system"}),
    (OLLAMA, "shape", {"messages.0.content": [text()]}, {"messages.0.content": "x"}),
    (OLLAMA, "unknown-key", {"messages.2.name": "add"}, {}),
    (OLLAMA, "base64", {"messages.0.images": [f"data:image/png;base64,{PIXEL}"]}, {"messages.0.images": [PIXEL]}),
    (
        OLLAMA,
        "call-arguments",
        {"messages.1.tool_calls.0.function.arguments": "{}"},
        {"messages.1.tool_calls.0.function.arguments": {"a": 1}},
    ),
    (OLLAMA, "tool-calls-role", {"messages.0.tool_calls": [{"function": {"name": "add", "arguments": {}}}]}, {}),
    (OLLAMA, "schema-object", {"tools.0.function.parameters": {}}, {}),
]


def changed(api: Api, change: Change) -> tuple[dict[str, Any], dict[str, str]]:
    """The valid request with some of its values set or left out."""
    body, headers = copy.deepcopy(api.body), dict(api.headers)
    for path, value in change.items():
        target: Any = body
        *way, last = path.removeprefix("header:").split(".")
        if path.startswith("header:"):
            target = headers
        for key in way:
            target = target[int(key) if isinstance(target, list) else key]
        if value is DROP:
            del target[last]
        elif isinstance(target, list):
            target[int(last)] = copy.deepcopy(value)
        else:
            target[last] = copy.deepcopy(value)
    return body, headers


async def post(
    server: FakeServer, api: Api, body: bytes | dict[str, Any], headers: dict[str, str] | None = None
) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx2.AsyncClient(verify=False) as client:
        return await client.post(server.url + api.path, content=content, headers=api.headers if headers is None else headers)


def prepare(server: FakeServer) -> None:
    server.respond(Reply(text="ok"))
    server.know_signature("known", "hm")
    server.know_redacted("known-data")
    server.know_encrypted("known")


@pytest.mark.parametrize(
    ("api", "rule", "bad"),
    [pytest.param(api, rule, bad, id=f"{api.route}-{rule}-{n}") for n, (api, rule, bad, _) in enumerate(ROWS)],
)
async def test_request_that_breaks_a_rule_is_refused_by_name(fake_server: FakeServer, api: Api, rule: str, bad: Change) -> None:
    prepare(fake_server)
    response = await post(fake_server, api, *changed(api, bad))
    [violation] = fake_server.take_violations()
    assert violation.rule == rule, violation.message
    assert violation.route == api.route
    assert response.status_code == (401 if rule == "authorization" else 400)
    error = response.json()["error"]
    message = error if api.route == "ollama" else error["message"]
    assert message == violation.message
    assert f"[{rule}]" in message
    if api.route == "messages":
        assert response.json()["type"] == "error"


@pytest.mark.parametrize(
    ("api", "good"), [pytest.param(api, good, id=f"{api.route}-{rule}-{n}") for n, (api, rule, _, good) in enumerate(ROWS)]
)
async def test_lawful_twin_is_answered(fake_server: FakeServer, api: Api, good: Change) -> None:
    prepare(fake_server)
    response = await post(fake_server, api, *changed(api, good))
    assert fake_server.violations == []
    assert response.status_code == 200
    assert "ok" in response.text


@pytest.mark.parametrize("api", [CHAT, MISTRAL, COMPATIBLE, OPENROUTER, RESPONSES, CLAUDE, OLLAMA], ids=lambda api: api.path)
@pytest.mark.parametrize(
    ("rule", "insert"),
    [
        ("body-json", b'"x": NaN, '),
        ("body-json", b'"x": Infinity, '),
        ("body-json", b'"x": 1, "x": 2, '),
        ("body-json", b'"x": , '),
        ("body-utf8", b'"x": "\xff", '),
        ("body-surrogate", b'"x": "a\\ud83d", '),
    ],
)
async def test_body_must_be_real_json(fake_server: FakeServer, api: Api, rule: str, insert: bytes) -> None:
    prepare(fake_server)
    body = json.dumps(api.body).encode()
    response = await post(fake_server, api, b"{" + insert + body[1:])
    assert response.status_code == 400
    assert [violation.rule for violation in fake_server.take_violations()] == [rule]
    response = await post(fake_server, api, body.replace(b'"role": "user"', b'"role": "user"', 1))
    assert response.status_code == 200


async def test_escaped_surrogate_pairs_are_lawful(fake_server: FakeServer) -> None:
    prepare(fake_server)
    body = json.dumps({**COMPATIBLE.body, "messages": [{"role": "user", "content": "\U0001f600"}]}).encode()
    assert b"\\ud83d" in body
    assert (await post(fake_server, COMPATIBLE, body)).status_code == 200


async def test_compatible_server_needs_no_key_and_openai_does(fake_server: FakeServer) -> None:
    prepare(fake_server)
    assert (await post(fake_server, COMPATIBLE, COMPATIBLE.body, {})).status_code == 200
    assert (await post(fake_server, OPENROUTER, OPENROUTER.body, {})).status_code == 401
    assert [violation.rule for violation in fake_server.take_violations()] == ["authorization"]


async def test_stored_items_need_their_reasoning_item(fake_server: FakeServer) -> None:
    """R01: a call is sent back by id only together with the reasoning that led to it."""
    fake_server.respond([Reply(tool_calls=[("add", {})], reasoning="hm"), Reply(text="ok")])
    first = (await post(fake_server, RESPONSES, {"model": "o3", "input": "hi", "tools": [flat_tool()]})).json()["output"]
    assert [item["type"] for item in first] == ["reasoning", "function_call"]
    answer = output_item(first[1]["call_id"])
    alone = await post(fake_server, RESPONSES, {"model": "o3", "input": [USER, first[1], answer]})
    assert alone.status_code == 400
    assert [violation.rule for violation in fake_server.take_violations()] == ["reasoning-missing"]
    together = await post(fake_server, RESPONSES, {"model": "o3", "input": [USER, *first, answer]})
    assert together.status_code == 200


async def test_previous_response_keeps_its_calls_open(fake_server: FakeServer) -> None:
    fake_server.respond([Reply(tool_calls=[("add", {})]), Reply(text="ok")])
    first = (await post(fake_server, RESPONSES, {"model": "m", "input": "hi"})).json()
    next_turn = {"model": "m", "previous_response_id": first["id"]}
    assert (await post(fake_server, RESPONSES, {**next_turn, "input": [USER]})).status_code == 400
    assert [violation.rule for violation in fake_server.take_violations()] == ["call-unanswered"]
    answered = await post(fake_server, RESPONSES, {**next_turn, "input": [output_item(first["output"][0]["call_id"])]})
    assert answered.status_code == 200


async def test_thinking_that_the_server_issued_comes_back_verbatim(fake_server: FakeServer) -> None:
    fake_server.respond([Reply(reasoning="deep", redacted_reasoning="blob", tool_calls=[("add", {})]), Reply(text="ok")])
    asked = {"model": "c", "max_tokens": 4000, "thinking": THINKING, "messages": [USER], "tools": [claude_tool()]}
    content = (await post(fake_server, CLAUDE, asked)).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "redacted_thinking", "tool_use"]
    history = [USER, claude_turn(*content), claude_user(tool_result(content[2]["id"]))]
    assert (await post(fake_server, CLAUDE, {**asked, "messages": history})).status_code == 200


async def test_strictness_can_be_turned_off_and_relaxed() -> None:
    async with FakeServer(strict=False) as server:
        server.respond("ok")
        assert (await post(server, CHAT, {"model": "m", "anything": 1})).status_code == 200
        assert server.violations == []
    async with FakeServer(ignored_rules={"orphan-result"}, extra_keys={"chat": {"top_k"}}) as server:
        server.respond("ok")
        body = {"model": "m", "messages": [USER, chat_result()], "top_k": 1}
        assert (await post(server, CHAT, body)).status_code == 200
        assert (await post(server, CHAT, {**body, "top_j": 1})).status_code == 400
        assert [violation.rule for violation in server.violations] == ["unknown-key"]
