"""Requests to Anthropic's Messages API, as pure conversions."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lousho_ray.errors import ConfigurationError
from lousho_ray.hosted_tools import code_interpreter, hosted_tool
from lousho_ray.messages import (
    FilePart,
    ImagePart,
    Message,
    ReasoningBlock,
    TextPart,
    ToolCall,
    assistant,
    system,
    tool_result,
    user,
)
from lousho_ray.ports import GenerateOptions, Reasoning, ResponseFormat, ToolDefinition
from lousho_ray.providers.anthropic_parts import FileRule
from lousho_ray.providers.anthropic_thinking import claude_version, thinking_for
from lousho_ray.providers.anthropic_wire import WireOptions, build_request, encode_tool
from lousho_ray.testing.fake_server.anthropic_rules import CHECKS, check_headers
from lousho_ray.testing.fake_server.records import RecordedRequest
from lousho_ray.testing.fake_server.replies import Issued
from lousho_ray.testing.fake_server.rule import Checked

SONNET = "claude-sonnet-4-5"
WEATHER = ToolDefinition("weather", "Says the weather.", {"properties": {"city": {"type": "string"}}})
PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


class Warnings(dict[str, str]):
    def __call__(self, key: str, text: str) -> None:
        self.setdefault(key, text)


def body(
    *messages: Message, model: str = SONNET, warn: Warnings | None = None, wire: WireOptions | None = None, **options: Any
) -> dict[str, Any]:
    options.setdefault("prompt_caching", False)
    request = build_request(GenerateOptions(messages, **options), model, warn if warn is not None else Warnings(), wire)
    decoded: dict[str, Any] = json.loads(request.encode())
    return decoded


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def call(call_id: str, name: str = "weather", arguments: str = "{}") -> ToolCall:
    return ToolCall(call_id, name, arguments)


def signed(value: str = "hm", provider: str = "anthropic") -> ReasoningBlock:
    return ReasoningBlock(value, "sig", None, provider, SONNET)


# ------------------------------------------------------------------------------------------------------------------ messages


def test_system_text_becomes_system_blocks_and_never_a_message() -> None:
    # PRV-20, PRV-47
    sent = body(system("Be brief."), user("Hi"), system("Be kind."))
    assert sent["system"] == [text("Be brief.\n\nBe kind.")]
    assert sent["messages"] == [{"role": "user", "content": [text("Hi")]}]


def test_results_of_parallel_calls_and_a_steer_message_are_one_user_message_with_the_results_first() -> None:
    # PRV-47, A04
    calls = [call("a"), call("b"), call("c")]
    sent = body(
        user("Go"),
        assistant("", calls),
        tool_result(calls[1], "B"),
        user([TextPart("steer"), ImagePart("https://x.test/i.png")]),
        tool_result(calls[2], "C", is_error=True),
        tool_result(calls[0], "A"),
    )
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "a", "content": "A"},
        {"type": "tool_result", "tool_use_id": "b", "content": "B"},
        {"type": "tool_result", "tool_use_id": "c", "content": "C", "is_error": True},
        text("steer"),
        {"type": "image", "source": {"type": "url", "url": "https://x.test/i.png"}},
    ]


def test_a_transcript_that_starts_with_the_assistant_gets_a_user_message_first() -> None:
    # PRV-47
    sent = body(assistant("Hello"), user("Hi"))
    assert sent["messages"][0] == {"role": "user", "content": [text("(conversation continues)")]}


def test_blank_texts_are_not_sent_and_empty_results_get_a_placeholder() -> None:
    # PRV-48, A05
    lookup = call("a")
    sent = body(user("Hi"), assistant(" \n", [lookup]), tool_result(lookup, "\n"), user(""), assistant(""))
    assert sent["messages"][1]["content"] == [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]
    assert sent["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "a", "content": "(no output)"}]
    assert len(sent["messages"]) == 3


def test_only_the_last_assistant_text_loses_its_trailing_blanks() -> None:
    # PRV-48
    sent = body(user("Q"), assistant("first "), user("Q"), assistant("Answer: \n"))
    assert sent["messages"][1]["content"] == [text("first ")]
    assert sent["messages"][3]["content"] == [text("Answer:")]


@pytest.mark.parametrize("arguments", ["", "[1]", "null", "{oops", '"x"', '{"x": NaN}'])
def test_arguments_that_are_no_json_object_are_sent_as_an_empty_one(arguments: str) -> None:
    # PRV-48
    lookup = call("a", arguments=arguments)
    sent = body(user("Q"), assistant("", [lookup]), tool_result(lookup, "r"))
    assert sent["messages"][1]["content"][0]["input"] == {}


@pytest.mark.parametrize("call_id", ["functions.get_x:0", "call_|fc_1", "", "é", "x" * 200])
def test_ids_of_other_providers_are_rewritten_alike_in_call_and_result(call_id: str) -> None:
    # PRV-49, L07
    lookup = call(call_id)
    first, second = (body(user("Q"), assistant("", [lookup]), tool_result(lookup, "r")) for _ in range(2))
    sent = first["messages"][1]["content"][0]["id"]
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", sent)
    assert first["messages"][2]["content"][0]["tool_use_id"] == sent
    assert first == second


def test_an_id_used_in_two_turns_is_sent_once_as_it_is_and_once_renamed() -> None:
    lookup = call("call_0")
    turn = (assistant("", [lookup]), tool_result(lookup, "r"))
    sent = body(user("Q"), *turn, user("again"), *turn)
    ids = [block["id"] for message in sent["messages"] for block in message["content"] if block["type"] == "tool_use"]
    results = [block["tool_use_id"] for message in sent["messages"] for block in message["content"] if "tool_use_id" in block]
    assert ids == results == ["call_0", "call_0_2"]


def test_unpaired_parts_are_repaired_in_the_request_only_with_one_warning_each() -> None:
    # PRV-D10
    warn = Warnings()
    messages = (user("Q"), tool_result(call("orphan"), "x"), assistant("", [call("lost")]), user("next"))
    sent = body(*messages, warn=warn)
    assert sent["messages"][2]["content"][0]["tool_use_id"] == "lost"
    assert sent["messages"][2]["content"][0]["is_error"] is True
    assert "not-run" in sent["messages"][2]["content"][0]["content"]
    assert "orphan" not in json.dumps(sent)
    assert any("'lost'" in value for value in warn.values())
    assert any("'orphan'" in value for value in warn.values())
    assert len(warn) == 2
    assert messages[2].tool_calls == (call("lost"),)


def test_lone_surrogates_never_reach_the_wire() -> None:
    # W22
    lookup = call("a", arguments='{"x": "\\ud83d"}')
    sent = body(user("x\ud83d"), assistant("\ud83d\ude00", [lookup]), tool_result(lookup, "r\udcff"))
    assert sent["messages"][0]["content"] == [text("x\ufffd")]
    assert sent["messages"][1]["content"][0] == text("\U0001f600")
    assert sent["messages"][1]["content"][1]["input"] == {"x": "\ufffd"}
    assert sent["messages"][2]["content"][0]["content"] == "r\ufffd"


def test_a_name_the_model_made_up_is_sent_in_the_api_s_alphabet() -> None:
    lookup = call("a", name="functions.get x")
    sent = body(user("Q"), assistant("", [lookup]), tool_result(lookup, "r"))
    assert sent["messages"][1]["content"][0]["name"] == "functions_get_x"


def test_each_message_and_tool_is_encoded_once() -> None:
    message, options = user("Hi"), {"tools": (WEATHER,)}
    body(message, **options)
    message.wire_cache["anthropic"] = ('{"type":"text","text":"kept"}',)
    assert body(message, **options)["messages"][0]["content"] == [text("kept")]


# --------------------------------------------------------------------------------------------------------- images and files


def test_images_go_out_as_base64_or_as_https_urls() -> None:
    # PRV-21, PRV-23, PRV-50
    data = base64.b64encode(PNG).decode()
    sent = body(user([ImagePart(PNG), ImagePart(f"data:image/gif;base64,{data}"), ImagePart("https://x.test/i.png")]))
    assert [block["source"] for block in sent["messages"][0]["content"]] == [
        {"type": "base64", "media_type": "image/png", "data": data},
        {"type": "base64", "media_type": "image/gif", "data": data},
        {"type": "url", "url": "https://x.test/i.png"},
    ]


def test_unknown_image_bytes_are_refused_naming_the_message() -> None:
    # PRV-23
    with pytest.raises(ConfigurationError) as caught:
        body(system("s"), user("Hi"), user([ImagePart(b"????")]))
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"
    assert "messages[2]" in caught.value.detail


PDF = FilePart(b"%PDF", "application/pdf", "a.pdf")


def test_pdf_and_text_files_are_sent_natively() -> None:
    # PRV-22
    sent = body(user([PDF, FilePart(b"hi", "text/plain"), FilePart("https://x.test/b.pdf", "application/pdf")]))
    assert [(block["type"], block["source"]) for block in sent["messages"][0]["content"]] == [
        ("document", {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}),
        ("document", {"type": "text", "media_type": "text/plain", "data": "hi"}),
        ("document", {"type": "url", "url": "https://x.test/b.pdf"}),
    ]
    assert sent["messages"][0]["content"][0]["title"] == "a.pdf"


@pytest.mark.parametrize("part", [FilePart(b"PK", "application/zip", "a.zip"), ImagePart("http://x.test/i.png")])
def test_what_the_api_cannot_carry_is_refused_or_noted(part: FilePart | ImagePart) -> None:
    # PRV-22, LES-54
    with pytest.raises(ConfigurationError) as caught:
        body(user([part]))
    assert caught.value.code == "LOUSHO_UNSUPPORTED_CONTENT"
    warn = Warnings()
    noted = body(user([part, part]), warn=warn, wire=WireOptions(FileRule(note=True)))
    assert [block["text"].endswith("not sent]") for block in noted["messages"][0]["content"]] == [True, True]
    assert len(warn) == 1


def test_two_providers_that_treat_files_differently_share_a_message() -> None:
    message = user([PDF])
    assert body(message)["messages"][0]["content"][0]["type"] == "document"
    noted = body(message, wire=WireOptions(FileRule(native=False, note=True)))
    assert noted["messages"][0]["content"] == [text("[file a.pdf (application/pdf) not sent]")]
    with pytest.raises(ConfigurationError):
        body(message, wire=WireOptions(FileRule(native=False)))


# ------------------------------------------------------------------------------------------------------- settings and tools


def test_max_tokens_is_always_sent() -> None:
    # PRV-44
    assert body(user("Q"))["max_tokens"] == 4_096
    assert body(user("Q"), wire=WireOptions(max_output_tokens=8_000))["max_tokens"] == 8_000
    assert body(user("Q"), wire=WireOptions(max_output_tokens=8_000), settings={"max_tokens": 7})["max_tokens"] == 7


def test_settings_are_sent_under_the_api_s_names_and_unknown_ones_dropped_with_a_warning() -> None:
    # PRV-45
    warn = Warnings()
    given_settings = {"temperature": 0, "top_p": 0.5, "stop": ["END"], "seed": 1, "presence_penalty": 0.1, "frequency_penalty": 0.2}
    sent = body(user("Q"), settings=given_settings, warn=warn)
    assert (sent["temperature"], sent["top_p"], sent["stop_sequences"]) == (0, 0.5, ["END"])
    assert not {"seed", "presence_penalty", "frequency_penalty", "stop"} & set(sent)
    assert set(warn) == {"seed", "presence_penalty", "frequency_penalty"}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", {"type": "auto"}),
        ("none", {"type": "none"}),
        ("required", {"type": "any"}),
        ({"type": "function", "function": {"name": "weather"}}, {"type": "tool", "name": "weather"}),
    ],
)
def test_tool_choice(choice: Any, sent: dict[str, Any]) -> None:
    # PRV-50
    assert body(user("Q"), tools=(WEATHER,), settings={"tool_choice": choice})["tool_choice"] == sent
    assert "tool_choice" not in body(user("Q"), settings={"tool_choice": choice})


def test_tools_carry_a_typed_schema_and_equal_tools_the_same_bytes() -> None:
    # PRV-25, PRV-50
    schema = {"type": "object", "properties": {"a": {}, "b": {}}}
    turned = {"properties": {"b": {}, "a": {}}, "type": "object"}
    one, two = (ToolDefinition("t", "T.", parameters) for parameters in (schema, turned))
    assert one == two
    assert encode_tool(one) == encode_tool(two)
    assert body(user("Q"), tools=(WEATHER,))["tools"] == [
        {
            "name": "weather",
            "description": "Says the weather.",
            "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        }
    ]


def test_hosted_tools_are_sent_as_they_are_given_and_others_refused() -> None:
    # PRV-D11
    raw = {"type": "web_search_20250305", "name": "web_search"}
    assert body(user("Q"), hosted_tools=(hosted_tool("search", raw),))["tools"] == [raw]
    with pytest.raises(ConfigurationError, match="code_interpreter") as caught:
        body(user("Q"), hosted_tools=(code_interpreter(),))
    assert caught.value.code == "LOUSHO_HOSTED_TOOL_UNSUPPORTED"


def test_calls_of_a_transcript_are_defined_when_a_request_offers_no_tools() -> None:
    # CA-30, RUN-D4: the API refuses them else
    called = assistant("", (call("c1"), call("c2", "functions.add")))
    sent = body(user("Q"), called, tool_result(call("c1"), "1"), tool_result(call("c2", "functions.add"), "2"), user("Now"))
    assert [tool["name"] for tool in sent["tools"]] == ["functions_add", "weather"]
    assert sent["tool_choice"] == {"type": "none"}
    assert "tools" not in body(user("Q"))


def test_a_response_format_is_sent_only_with_structured_outputs() -> None:
    # PRV-D6
    wanted = ResponseFormat(
        {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "additionalProperties": False}
    )
    assert "output_config" not in body(user("Q"), response_format=wanted)
    sent = body(user("Q"), response_format=wanted, wire=WireOptions(structured_outputs=True))["output_config"]["format"]
    assert sent["type"] == "json_schema"
    assert sent["schema"]["properties"] == {"n": {"type": "integer", "description": "{minimum: 1}"}}  # the API refuses limits
    assert wanted.schema["properties"] == {"n": {"type": "integer", "minimum": 1}}  # type: ignore[index]


CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {**CLOSED, "properties": {"a": {"type": "object", "additionalProperties": True}}},
        {**CLOSED, "properties": {"a": {}}},
        {**CLOSED, "properties": {"a": {"type": ["string", "null"]}}},
        {**CLOSED, "properties": {"a": {"$ref": "#"}}},
        {
            **CLOSED,
            "properties": {"a": {"$ref": "#/$defs/n"}},
            "$defs": {"n": {**CLOSED, "properties": {"n": {"$ref": "#/$defs/n"}}}},
        },
    ],
)
def test_a_schema_that_anthropic_cannot_enforce_is_left_to_the_prompt(schema: Any) -> None:
    # PRV-D6
    warned = Warnings()
    sent = body(user("Q"), warn=warned, response_format=ResponseFormat(schema), wire=WireOptions(structured_outputs=True))
    assert "output_config" not in sent
    assert list(warned) == ["output_schema"]


# ------------------------------------------------------------------------------------------------------------------ caching


def marked(value: Any) -> list[Any]:
    """All parts of a body that carry a cache mark."""
    if isinstance(value, dict):
        found = [value] if "cache_control" in value else []
        return found + [part for item in value.values() for part in marked(item)]
    return [part for item in value for part in marked(item)] if isinstance(value, list) else []


def test_cache_marks_stand_on_system_tools_last_user_turn_and_trailing_results() -> None:
    # PRV-75
    lookup = call("a")
    messages = [system("S"), user("one"), assistant("x"), user("two"), assistant("", [lookup]), tool_result(lookup, "r")]
    options: dict[str, Any] = {"tools": (ToolDefinition("t", "", {}), WEATHER), "prompt_caching": "auto"}
    sent = body(*messages, **options)
    marks = marked(sent)
    assert len(marks) == 4
    assert [mark.get("text") or mark.get("name") or mark["content"] for mark in marks] == ["S", "weather", "two", "r"]
    assert all(mark["cache_control"] == {"type": "ephemeral"} for mark in marks)
    # PRV-76: the marks are in this request only, not in what is kept for the next one
    assert marked(body(*messages, tools=options["tools"])) == []
    assert marked(body(*messages, **options, model="other-model")) == []


def test_results_with_a_steer_message_get_one_mark_at_their_end() -> None:
    lookup = call("a")
    sent = body(user("one"), assistant("", [lookup]), tool_result(lookup, "r"), user("steer"), prompt_caching="auto")
    assert [mark["text"] for mark in marked(sent)] == ["steer"]


# ----------------------------------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("model", "version"),
    [
        ("claude-3-7-sonnet-20250219", (3, 7)),
        ("claude-sonnet-4-20250514", (4, 0)),
        ("Claude-Opus-4-6", (4, 6)),
        ("claude-haiku-4.5", (4, 5)),
        ("claude-fable-5", (5, 0)),
        ("claude-mythos-preview", (4, 7)),
        ("claude-2.1", (2, 1)),
        ("gpt-5", None),
    ],
)
def test_claude_versions_are_read_from_either_order(model: str, version: tuple[int, int] | None) -> None:
    assert claude_version(model) == version


@pytest.mark.parametrize(("effort", "budget"), [("minimal", 1_024), ("low", 2_048), ("medium", 8_192), ("high", 24_576)])
def test_thinking_budgets_come_on_top_of_max_tokens(effort: str, budget: int) -> None:
    # PRV-80b, PRV-44
    sent = body(user("Q"), reasoning=Reasoning(effort), settings={"max_tokens": 100})
    assert sent["thinking"] == {"type": "enabled", "budget_tokens": budget}
    assert sent["max_tokens"] == 100 + budget


def test_max_tokens_with_thinking_stays_within_what_the_model_can_put_out() -> None:
    wire = WireOptions(max_output_tokens=30_000)
    assert body(user("Q"), reasoning=Reasoning("high"), wire=wire)["max_tokens"] == 30_000


def test_a_stated_budget_is_raised_to_the_api_s_minimum() -> None:
    # PRV-80b
    sent = body(user("Q"), reasoning=Reasoning("high", budget_tokens=10))
    assert sent["thinking"] == {"type": "enabled", "budget_tokens": 1_024}


def test_models_that_do_not_think_are_not_asked_to_unless_forced() -> None:
    # PRV-78, PRV-79
    assert thinking_for("claude-3-5-haiku-latest", Reasoning("high")) is None
    assert thinking_for("my-model", Reasoning("high")) is None
    assert thinking_for(SONNET, Reasoning("none")) is None
    assert thinking_for(SONNET, None) is None
    assert thinking_for("my-model", Reasoning("high", force=True)) is not None


def test_models_that_deprecate_budgets_get_adaptive_thinking_with_an_effort() -> None:
    # PRV-D5
    sent = body(user("Q"), model="claude-opus-4-6", reasoning=Reasoning("minimal"))
    assert sent["thinking"] == {"type": "adaptive"}
    assert sent["output_config"] == {"effort": "low"}
    stated = body(user("Q"), model="claude-opus-4-6", reasoning=Reasoning("low", budget_tokens=5_000))
    assert stated["thinking"] == {"type": "enabled", "budget_tokens": 5_000}


def test_a_budget_for_a_model_that_takes_none_becomes_an_effort_with_a_warning() -> None:
    warn = Warnings()
    sent = body(user("Q"), model="claude-opus-4-7", reasoning=Reasoning("high", budget_tokens=5_000), warn=warn)
    assert sent["thinking"] == {"type": "adaptive"}
    assert sent["output_config"] == {"effort": "high"}
    assert set(warn) == {"thinking-budget"}


def test_thinking_drops_sampling_settings_and_lowers_a_forced_tool_choice() -> None:
    # PRV-80b
    warn = Warnings()
    given_settings = {"temperature": 1, "top_p": 0.5, "tool_choice": "required"}
    sent = body(user("Q"), tools=(WEATHER,), reasoning=Reasoning("low"), settings=given_settings, warn=warn)
    assert "temperature" not in sent
    assert "top_p" not in sent
    assert sent["tool_choice"] == {"type": "auto"}
    assert set(warn) == {"thinking-temperature", "thinking-top_p", "thinking-tool_choice"}


def test_own_thinking_is_replayed_first_and_foreign_or_unsigned_thinking_never() -> None:
    # PRV-48, PRV-81, PRV-D4
    lookup = call("a")
    blocks = [signed("mine"), ReasoningBlock("", None, "blob", "anthropic"), signed("theirs", "openai"), ReasoningBlock("plain")]
    sent = body(user("Q"), assistant("t", [lookup], blocks), tool_result(lookup, "r"), reasoning=Reasoning("low"))
    assert sent["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "mine", "signature": "sig"},
        {"type": "redacted_thinking", "data": "blob"},
        text("t"),
        {"type": "tool_use", "id": "a", "name": "weather", "input": {}},
    ]
    assert "thinking" in sent


def test_thinking_is_left_out_when_the_last_tool_turn_has_no_blocks_to_replay() -> None:
    # PRV-D4
    lookup, warn = call("a"), Warnings()
    messages = (user("Q"), assistant("", [lookup], [signed("theirs", "openai")]), tool_result(lookup, "r"))
    sent = body(*messages, reasoning=Reasoning("low"), settings={"temperature": 0.5}, warn=warn)
    assert "thinking" not in sent
    assert sent["temperature"] == 0.5
    assert set(warn) == {"thinking-history"}
    assert "thinking" in body(*messages, assistant("done"), user("next"), reasoning=Reasoning("low"))


# ------------------------------------------------------------------------------------------------------------ any transcript

_texts = st.sampled_from(["", " ", "\n", "hello", "tail ", "\ud83d", "naïve 漢字"])
_ids = st.sampled_from(["a", "b", "", "functions.get_x:0", "call_|fc", "x" * 70, "é"])
_calls = st.builds(
    ToolCall, _ids, st.sampled_from(["weather", "", "no such.tool"]), st.sampled_from(["", "{}", '{"a":1}', "[1]", "{"])
)
_blocks = st.builds(signed, provider=st.sampled_from(["anthropic", "openai"]))
_messages = st.one_of(
    st.builds(user, _texts),
    st.builds(lambda t: user([TextPart(t), ImagePart(PNG)]), _texts),
    st.builds(lambda t, c, r: assistant(t, c, r if c else ()), _texts, st.lists(_calls, max_size=3), st.lists(_blocks, max_size=1)),
    st.builds(lambda i, t, e: Message("tool", t, tool_call_id=i, tool_name="weather", is_error=e), _ids, _texts, st.booleans()),
    st.builds(system, _texts),
)


def check_strictly(sent: dict[str, Any]) -> None:
    """Raises what the strict fake server would refuse the body for."""
    request = RecordedRequest(0, "messages", "POST", "/v1/messages", {}, b"", sent, 0, 0.0)
    issued = Issued(signatures={"sig": None})
    for check in CHECKS:
        if check is not check_headers:
            check(Checked(request, issued))


@settings(max_examples=300, deadline=None)
@given(st.lists(_messages, max_size=10), st.booleans())
def test_any_transcript_becomes_a_body_that_keeps_the_api_s_rules(messages: list[Message], think: bool) -> None:
    # PRV-47, PRV-48, PRV-49, PRV-D10
    sent = body(*messages, prompt_caching="auto", reasoning=Reasoning("low") if think else None, tools=(WEATHER,))
    check_strictly(sent)
    ids = [block["id"] for message in sent["messages"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(ids) == len(set(ids))
