"""Ollama's chat API, as pure conversions."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import FilePart, ImagePart, Message, TextPart, ToolCall, assistant, system, tool_result, user
from lousho_ray.ports import (
    FinishChunk,
    GenerateOptions,
    Reasoning,
    ReasoningChunk,
    ReasoningEndChunk,
    ResponseFormat,
    ServedBy,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers.ollama import OllamaProvider
from lousho_ray.providers.ollama_wire import LineDecoder, ReplyReader, chat_request, think_for
from lousho_ray.usage import ProviderUsage

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


class Warnings(dict[str, str]):
    def __call__(self, key: str, text: str) -> None:
        self.setdefault(key, text)


def body(*messages: Message, warn: Warnings | None = None, files: Any = "error", window: int | None = None, **rest: Any) -> Any:
    options = GenerateOptions(messages, **rest)
    sent = chat_request(
        options, "llama3", warn if warn is not None else Warnings(), stream=True, files=files, context_window=window
    )
    return json.loads(sent)


# ----------------------------------------------------------------------------------------------------------------- requests


def test_calls_carry_their_arguments_as_an_object_and_results_the_tool_s_name() -> None:
    # PRV-58, W04
    call = ToolCall("c1", "add", '{"a": 1}')
    sent = body(system("S"), user("Q"), assistant("", [call, ToolCall("c2", "add", "oops")]), tool_result(call, "3"))
    assert sent["messages"][:4] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"function": {"name": "add", "arguments": {"a": 1}}},
                {"function": {"name": "add", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "3", "tool_name": "add"},
    ]
    # PRV-D10: the missing result
    assert "not-run" in sent["messages"][4]["content"]


def test_settings_go_into_options_under_ollama_s_names() -> None:
    # PRV-57b
    warn = Warnings()
    settings = {"max_tokens": 5, "temperature": 0, "top_p": 1, "stop": ["x"], "seed": 1, "tool_choice": "required"}
    sent = body(user("Q"), settings={**settings, "presence_penalty": 0.1, "frequency_penalty": 0.2}, warn=warn)
    assert sent["options"] == {
        "num_predict": 5,
        "temperature": 0,
        "top_p": 1,
        "stop": ["x"],
        "seed": 1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
    }
    assert "tool_choice" not in sent
    assert list(warn) == ["tool_choice"]
    assert "options" not in body(user("Q"))


def test_a_stated_context_window_is_asked_for() -> None:
    # L08
    assert body(user("Q"), window=8_192)["options"] == {"num_ctx": 8_192}


def test_json_output_is_asked_for_by_schema_or_as_json() -> None:
    # PRV-57b
    assert body(user("Q"), response_format=ResponseFormat({"type": "object"}))["format"] == {"type": "object"}
    assert body(user("Q"), response_format=ResponseFormat())["format"] == "json"


def test_images_are_bare_base64_and_other_urls_become_a_note() -> None:
    # PRV-58
    warn, data = Warnings(), base64.b64encode(PNG).decode()
    parts = [TextPart("look"), ImagePart(PNG), ImagePart(f"data:image/png;base64,{data}"), ImagePart("https://x.test/i.png")]
    (message,) = body(user(parts), warn=warn)["messages"]
    assert message == {"role": "user", "content": "look\n[image https://x.test/i.png not sent]", "images": [data, data]}
    assert len(warn) == 1


def test_files_are_refused_or_noted() -> None:
    # PRV-22, LES-54
    with pytest.raises(ConfigurationError) as caught:
        body(user([FilePart(b"x", "application/pdf", "a.pdf")]))
    assert caught.value.code == "LOUSHO_UNSUPPORTED_CONTENT"
    sent = body(user([FilePart(b"x", "application/pdf", "a.pdf")]), files="note")
    assert sent["messages"][0]["content"] == "[file a.pdf (application/pdf) not sent]"


def test_image_bytes_of_an_unknown_type_are_refused_naming_the_message() -> None:
    # PRV-23
    with pytest.raises(ConfigurationError, match=r"messages\[1\]"):
        body(user("Q"), user([ImagePart(b"????")]))


def test_lone_surrogates_never_reach_the_wire() -> None:
    # W22
    assert body(user("x\ud83d"))["messages"][0]["content"] == "x\ufffd"


def test_tools_carry_a_typed_schema() -> None:
    # PRV-25
    (tool,) = body(user("Q"), tools=(ToolDefinition("t", "T.", {}),))["tools"]
    assert tool == {"type": "function", "function": {"name": "t", "description": "T.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("model", "reasoning", "think"),
    [
        ("qwen3:8b", Reasoning("low"), True),
        ("Magistral", Reasoning("high"), True),
        ("deepseek-r1", Reasoning("minimal"), True),
        ("gpt-oss:20b", Reasoning("minimal"), "low"),
        ("gpt-oss:20b", Reasoning("high"), "high"),
        ("llama3", Reasoning("high"), None),
        ("llama3", Reasoning("high", force=True), True),
        ("qwen3", Reasoning("none"), None),
        ("qwen3", None, None),
    ],
)
def test_thinking_is_asked_of_models_that_think(model: str, reasoning: Reasoning | None, think: Any) -> None:
    # PRV-79b, PRV-80c, PRV-D9
    assert think_for(model, reasoning) == think


@pytest.mark.parametrize(
    ("base_url", "api_url"),
    [
        (None, "http://localhost:11434/api"),
        ("http://h:11434", "http://h:11434/api"),
        ("http://h:11434/", "http://h:11434/api"),
        ("http://h:11434/api", "http://h:11434/api"),
        ("http://h:11434/api/", "http://h:11434/api"),
        ("https://h/ollama/v2/", "https://h/ollama/v2"),
    ],
)
def test_a_bare_host_gets_the_api_path(base_url: str | None, api_url: str) -> None:
    # PRV-57
    assert OllamaProvider(base_url=base_url).api_url == api_url


# ------------------------------------------------------------------------------------------------------------------ replies


def test_a_reply_is_read_line_by_line() -> None:
    # PRV-58b, PRV-27, S14
    history = (assistant("", [ToolCall("call_0", "add")]),)
    reader = ReplyReader("m", history)
    assert reader.feed({"message": {"thinking": "hm"}}) == [ReasoningChunk("hm")]
    assert reader.feed({"message": {"content": "so"}}) == [ReasoningEndChunk(), TextChunk("so")]
    calls = [
        {"function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "x1", "function": {"name": "add", "arguments": '{"a":2}'}},
    ]
    assert reader.feed({"message": {"tool_calls": calls}}) == []
    last = reader.feed({"model": "m2", "done": True, "done_reason": "stop", "prompt_eval_count": 7, "eval_count": 3})
    assert last == [
        ToolCallChunk(ToolCall("call_1", "add", '{"a":1}')),
        ToolCallChunk(ToolCall("x1", "add", '{"a":2}')),
        FinishChunk("tool_calls", ProviderUsage(7, 3), ServedBy("ollama", "m"), "m2"),
    ]


@pytest.mark.parametrize(("reason", "finish"), [("stop", "stop"), ("length", "length"), (None, "stop"), ("load", "other")])
def test_finish_reasons(reason: str | None, finish: str) -> None:
    (last,) = ReplyReader("m").feed({"done": True, "done_reason": reason})
    assert isinstance(last, FinishChunk)
    assert last.finish_reason == finish


@pytest.mark.parametrize("counts", [{"eval_count": 3}, {"prompt_eval_count": 3}, {"prompt_eval_count": 0, "eval_count": 0}])
def test_usage_with_a_count_missing_is_none(counts: dict[str, int]) -> None:
    # PRV-58b, PRV-08
    (last,) = ReplyReader("m").feed({"done": True, **counts})
    assert isinstance(last, FinishChunk)
    assert last.usage is None


@given(st.lists(st.text("aé漢🧑 ", min_size=1), max_size=5), st.integers(1, 7), st.booleans())
def test_lines_survive_any_cut(lines: list[str], size: int, ended: bool) -> None:
    # W20
    encoded = [json.dumps(line, ensure_ascii=False).encode() for line in lines]
    data = b"\n".join(encoded) + (b"\n" if ended else b"")
    decoder, seen = LineDecoder(), list[bytes]()
    for at in range(0, len(data), size):
        seen += decoder.feed(data[at : at + size])
    assert seen + decoder.close() == encoded


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["function", "name", "arguments", "id"]), inner),
    max_leaves=6,
)
_keys = ("message", "done", "done_reason", "prompt_eval_count", "eval_count", "model")
_message = st.dictionaries(st.sampled_from(["content", "thinking", "tool_calls"]), _junk)


@given(st.lists(st.dictionaries(st.sampled_from(_keys), _junk | _message), max_size=4))
def test_fields_of_a_wrong_type_count_as_absent(lines: list[dict[str, Any]]) -> None:
    reader = ReplyReader("m")
    for line in [*lines, {"done": True}]:
        chunks = reader.feed(line)
    assert isinstance(chunks[-1], FinishChunk)
