"""The wire form of Chat Completions, as pure functions: what servers really send, and what is sent to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import ImagePart, Message, ReasoningBlock, TextPart, ToolCall, assistant, tool_result, user
from lousho_ray.ports import (
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    ReasoningChunk,
    ReasoningEndChunk,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers.failures import ErrorBodyError, MalformedReplyError, TruncatedStreamError, classify
from lousho_ray.providers.openai_chat import ChatDialect, chat_request, chat_result, chat_tool, chat_usage
from lousho_ray.providers.openai_chat_stream import ChatStream
from lousho_ray.providers.openai_responses import responses_request
from lousho_ray.providers.sse import ServerSentEvent
from lousho_ray.testing.fake_server import FIN, TC, D, U, completion

DONE = "[DONE]"


def options(*messages: Message, **settings: Any) -> GenerateOptions:
    return GenerateOptions(messages=messages or (user("hi"),), settings=settings)


def no_warning(key: str, text: str) -> None:
    raise AssertionError(f"unexpected warning {key}: {text}")


def events(*parts: bytes | str) -> list[ServerSentEvent]:
    return [ServerSentEvent(part if isinstance(part, str) else part.decode().strip().removeprefix("data: ")) for part in parts]


def read(reader: Any, parts: Sequence[ServerSentEvent]) -> list[Any]:
    chunks = [chunk for event in parts for chunk in reader.feed(event)]
    return [*chunks, *reader.finish()]


def chat(*parts: bytes | str, call: GenerateOptions | None = None) -> list[Any]:
    return read(ChatStream(call or options()), events(*parts))


def calls(chunks: list[Any]) -> list[tuple[str, str]]:
    return [(chunk.tool_call.name, chunk.tool_call.arguments) for chunk in chunks if isinstance(chunk, ToolCallChunk)]


def ids(chunks: list[Any]) -> list[str]:
    return [chunk.tool_call.id for chunk in chunks if isinstance(chunk, ToolCallChunk)]


def finish(chunks: list[Any]) -> FinishChunk:
    assert isinstance(chunks[-1], FinishChunk)
    return chunks[-1]


def text(chunks: list[Any]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))


# ------------------------------------------------------------------------------------------- tool calls as servers stream them


@pytest.mark.parametrize(
    ("fragments", "expected"),
    [
        pytest.param([TC(0, "a", "f", '{"x"'), TC(0, None, None, ":1}")], [("f", '{"x":1}')], id="as documented"),
        pytest.param([TC(0, "a", "f", '{"x"'), TC(0, "a", "f", ":1}")], [("f", '{"x":1}')], id="id and name repeated"),
        pytest.param([TC(None, "a", "f", '{"x":1}')], [("f", '{"x":1}')], id="W01 no index"),
        pytest.param([TC(None, "a", "f", '{"x"'), TC(None, None, None, ":1}")], [("f", '{"x":1}')], id="W01 anonymous rest"),
        pytest.param(
            [TC(None, "a", "f", '{"x"'), TC(None, "b", "g", '{"y"'), TC(None, "a", None, ":1}"), TC(None, "b", None, ":2}")],
            [("f", '{"x":1}'), ("g", '{"y":2}')],
            id="W01 by id",
        ),
        pytest.param([TC(0, "a", "now", "")], [("now", "{}")], id="W02 empty"),
        pytest.param([TC(0, "a", "now", " \n")], [("now", "{}")], id="W02 blank"),
        pytest.param([TC(0, "a", "f", {"x": 1})], [("f", '{"x":1}')], id="W04 an object"),
        pytest.param(
            [TC(0, "a", "f", '{"x":1}'), TC(0, "b", "g", '{"y":2}')], [("f", '{"x":1}'), ("g", '{"y":2}')], id="W13 all index 0"
        ),
        pytest.param(
            [TC(0, "a", "f", ""), TC(0, None, None, '{"x":1}'), TC(0, "b", "g", ""), TC(0, None, None, '{"y":2}')],
            [("f", '{"x":1}'), ("g", '{"y":2}')],
            id="W13 ids on the first fragments",
        ),
        pytest.param(
            [TC(0, None, "f", '{"x":1}'), TC(0, None, "g", '{"y":2}')], [("f", '{"x":1}'), ("g", '{"y":2}')], id="W13 no ids"
        ),
        pytest.param(
            [TC(0, "call_f", "f", '{"n":1}'), TC(1, "call_f", "f", '{"n":2}')], [("f", '{"n":1}'), ("f", '{"n":2}')], id="W14 a"
        ),
        pytest.param(
            [TC(0, "call_f", "f", '{"n":1}'), TC(0, "call_f", "f", '{"n":2}')],
            [("f", '{"n":1}'), ("f", '{"n":2}')],
            id="W14 a at index 0",
        ),
        pytest.param([TC(0, "", "f", "{}"), TC(1, "", "f", "{}")], [("f", "{}"), ("f", "{}")], id="W14 b"),
        pytest.param(
            [TC(0, "a", "f", '{"n":1}'), TC(1, "b", "g", '{"n":2}'), TC(1, "b", "g", '{"n":2}')],
            [("f", '{"n":1}'), ("g", '{"n":2}')],
            id="W14 c sent again",
        ),
        pytest.param(
            [TC(1, "b", "g", '{"y":'), TC(0, "a", "f", '{"x":1}'), TC(1, None, None, "2}")],
            [("f", '{"x":1}'), ("g", '{"y":2}')],
            id="index order",
        ),
        pytest.param([TC(0, "a", "f", '"abc"')], [("f", '"abc"')], id="PRV-26 not an object: verbatim"),
        pytest.param([TC(0, "a", "f", "{broken")], [("f", "{broken")], id="PRV-26 broken: verbatim"),
        pytest.param([D({"function_call": {"name": "f", "arguments": "{}"}})], [("f", "{}")], id="the old field"),
    ],
)
def test_streamed_calls_are_whole(fragments: list[bytes], expected: list[tuple[str, str]]) -> None:
    # PRV-32
    chunks = chat(*fragments, FIN("tool_calls"), DONE)
    assert calls(chunks) == expected
    assert len(set(ids(chunks))) == len(expected)
    assert all(ids(chunks))
    assert finish(chunks).finish_reason == "tool_calls"


def test_one_delta_may_hold_several_calls_without_index() -> None:
    parts = [{"function": {"name": "f", "arguments": '{"x":'}}, {"function": {"name": "g", "arguments": '{"y":'}}]
    rest = [{"function": {"arguments": "1}"}}, {"function": {"arguments": "2}"}}]
    assert calls(chat(D({"tool_calls": parts}), D({"tool_calls": rest}), FIN("stop"), DONE)) == [("f", '{"x":1}'), ("g", '{"y":2}')]


def test_a_new_call_does_not_take_an_id_of_the_transcript() -> None:
    # PRV-27, field case W14
    old = ToolCall("call_f", "f", "{}")
    call = options(user("x"), assistant("", [old, ToolCall("call_0", "f")]), tool_result(old, "1"))
    chunks = chat(TC(0, "call_f", "f", "{}"), TC(1, None, "g", "{}"), FIN("tool_calls"), DONE, call=call)
    assert not {"call_f", "call_0"} & set(ids(chunks))
    assert len(set(ids(chunks))) == 2


# ------------------------------------------------------------------------------------------------------------ how answers end


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([D({"content": "x"}), FIN("stop"), DONE], "stop"),
        ([D({"content": "x"}), DONE], "other"),  # W16 (2)
        ([D({"content": "x"}), FIN("stop")], "stop"),  # W16 (3)
        ([D({"content": "x"}, finish_reason=""), FIN("network_error"), DONE], "other"),  # W17
        ([D({"content": "x"}), FIN("end_turn"), DONE], "other"),
        ([D({"content": "x"}), FIN("length"), DONE], "length"),
        ([TC(0, "a", "f", "{}"), FIN("stop"), DONE], "tool_calls"),  # W07
        ([TC(0, "a", "f", "{}"), FIN("function_call"), DONE], "tool_calls"),
        ([D({"content": "x"}), FIN("tool_calls"), DONE], "other"),
        ([D({"refusal": "I will not."}), FIN("stop"), DONE], "content_filter"),
    ],
)
def test_the_finish_reason_is_ours(parts: list[bytes | str], reason: str) -> None:
    # PRV-28, PRV-34
    assert finish(chat(*parts)).finish_reason == reason


def test_a_filtered_reply_runs_nothing() -> None:
    # Field case W08
    chunks = chat(TC(0, "a", "delete_all", "{}"), FIN("content_filter"), DONE)
    assert calls(chunks) == []
    assert finish(chunks).finish_reason == "content_filter"


@pytest.mark.parametrize(("used", "reason", "count"), [(64, "length", 0), (20, "tool_calls", 1)])
def test_arguments_cut_by_the_token_limit_are_length_and_others_malformed(used: int, reason: str, count: int) -> None:
    # Field case W10
    parts = (TC(0, "a", "f", '{"a": [1, 2'), FIN("tool_calls"), U(10, used), DONE)
    chunks = chat(*parts, call=options(max_tokens=64))
    assert (finish(chunks).finish_reason, len(calls(chunks))) == (reason, count)


@pytest.mark.parametrize("parts", [[D({"content": "x"})], [TC(0, "a", "f", '{"x":')], []])
def test_a_stream_that_just_ends_is_truncated(parts: list[bytes]) -> None:
    # PRV-36, field case W16 (1), (4)
    with pytest.raises(TruncatedStreamError) as caught:
        chat(*parts)
    assert classify(caught.value).retryable


def test_an_error_in_a_stream_is_raised_with_the_servers_words() -> None:
    # PRV-36, field cases L10, L11
    with pytest.raises(ErrorBodyError, match="overloaded") as caught:
        chat(D({"content": "x"}), json.dumps({"error": {"message": "overloaded", "code": 503}}))
    assert classify(caught.value).status == 503
    with pytest.raises(ErrorBodyError):
        chat(D({}, finish_reason="error"))
    with pytest.raises(ErrorBodyError, match="named"):
        ChatStream(options()).feed(ServerSentEvent('{"message": "named"}', "error"))


def test_broken_event_json_is_malformed_and_odd_events_are_skipped() -> None:
    # PRV-55b, field case W11
    with pytest.raises(MalformedReplyError):
        chat('{"choices": [')
    head = json.dumps({"choices": [], "prompt_filter_results": [{}]})
    chunks = chat(head, "null", "", D({"content": "x"}), FIN("stop"), U(5, 2), DONE, D({"content": "late"}))
    assert text(chunks) == "x"
    assert finish(chunks).usage is not None
    assert sum(isinstance(chunk, FinishChunk) for chunk in chunks) == 1


def test_reading_stops_at_the_end_mark_or_at_the_last_usage() -> None:
    # Field case W16 (5)
    for last in (DONE, U(5, 2)):
        reader = ChatStream(options())
        for event in events(D({"content": "x"}), FIN("stop")):
            reader.feed(event)
        assert (reader.complete, reader.done) == (True, False)
        reader.feed(events(last)[0])
        assert reader.done


# --------------------------------------------------------------------------------------------------------- text and reasoning


def test_surrogates_cut_between_two_deltas_join() -> None:
    # Field case W22
    assert text(chat(D({"content": "a\ud83d"}), D({"content": "\ude00b"}), D({"content": "c\ud83d"}), FIN("stop"))) == "a😀bc\ufffd"


def test_reasoning_is_reported_once_and_before_the_text_of_its_chunk() -> None:
    # PRV-33
    both = {"reasoning": "think", "reasoning_details": [{"type": "reasoning.text", "text": "think"}], "content": "so"}
    detail = {"reasoning_details": [{"type": "reasoning.summary", "summary": "first "}]}
    chunks = chat(D(detail), D(both), D({"content": "!"}), FIN("stop"), DONE)
    assert chunks[:-1] == [
        ReasoningChunk("first "),
        ReasoningChunk("think"),
        ReasoningEndChunk(),
        TextChunk("so"),
        TextChunk("!"),
    ]
    assert chat(D({"reasoning_content": "t"}), FIN("stop"))[:2] == [ReasoningChunk("t"), ReasoningEndChunk()]


# -------------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (None, None),
        ({}, None),
        ({"prompt_tokens": 0, "completion_tokens": 0}, None),  # PRV-08
        ({"prompt_tokens": None, "completion_tokens": 3}, None),  # W25
        ({"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": None}, (5, 3, None, None, None)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 100,
                "total_tokens": 109,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 80},
            },
            (9, 100, 4, 80, None),
        ),  # C02: inside the completion
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 20,
                "total_tokens": 109,
                "completion_tokens_details": {"reasoning_tokens": 80},
                "cost": 0.5,
            },
            (9, 100, None, 80, 0.5),
        ),  # C02: on top of it
    ],
)
def test_usage_is_what_the_server_reported(raw: Any, expected: tuple[Any, ...] | None) -> None:
    # PRV-35
    usage = chat_usage(raw)
    if expected is None:
        assert usage is None
    else:
        assert usage is not None
        fields = (usage.prompt_tokens, usage.completion_tokens, usage.cached_input_tokens, usage.reasoning_tokens, usage.cost_usd)
        assert fields == expected


def test_usage_on_every_chunk_is_a_running_total() -> None:
    # Field case C01
    parts = [D({"content": "x"}, usage={"prompt_tokens": 5, "completion_tokens": n}) for n in (1, 2, 3)]
    usage = finish(chat(*parts, FIN("stop"), U(5, 3), DONE)).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 3)


# ---------------------------------------------------------------------------------------------------------- unstreamed replies


def test_an_unstreamed_reply_is_read_whole() -> None:
    message = {
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "reasoning_content": "why",
        "tool_calls": [
            {"id": "x", "function": {"name": "f", "arguments": {"n": 1}}},
            {"id": "x", "function": {"name": "f", "arguments": ""}},
        ],
    }
    result = chat_result(completion(message, "stop", usage={"prompt_tokens": 1, "completion_tokens": 2}), options())
    assert (result.text, result.finish_reason, result.response_model) == ("ab", "tool_calls", "m")
    assert result.reasoning == (ReasoningBlock("why"),)
    assert [(call.name, call.arguments) for call in result.tool_calls] == [("f", '{"n":1}'), ("f", "{}")]
    assert len({call.id for call in result.tool_calls}) == 2


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("<html>", MalformedReplyError),
        (None, MalformedReplyError),
        ({"choices": None}, MalformedReplyError),
        ({"choices": []}, MalformedReplyError),
        ({"choices": [{"message": None}]}, MalformedReplyError),
        ({"error": {"message": "x", "code": 500}, "choices": None}, ErrorBodyError),
        ({"choices": [{"message": {"content": ""}, "finish_reason": "error"}]}, ErrorBodyError),
        ({"choices": [{"message": {"content": ""}, "error": {"message": "x"}}]}, ErrorBodyError),
    ],
)
def test_a_body_that_is_no_reply_is_an_error(body: Any, error: type[Exception]) -> None:
    # PRV-36
    with pytest.raises(error):
        chat_result(body, options())


def test_an_empty_answer_is_a_reply() -> None:
    assert chat_result(completion({"content": None}), options()) == GenerateResult(finish_reason="stop", response_model="m")


# --------------------------------------------------------------------------------------------------------------- requests


def chat_body(*messages: Message, tools: tuple[ToolDefinition, ...] = (), dialect: ChatDialect | None = None) -> dict[str, Any]:
    call = GenerateOptions(messages=messages, tools=tools)
    body: dict[str, Any] = json.loads(chat_request(call, "m", dialect or ChatDialect(), no_warning))
    return body


def test_each_message_and_tool_is_encoded_once() -> None:
    messages = (user("hi"), assistant("there"), user("again"))
    tool = ToolDefinition("f", "F.", {"properties": {}})
    first = chat_body(*messages, tools=(tool,))
    for message in messages:
        (key,) = message.wire_cache
        message.wire_cache[key] = json.dumps({"role": "user", "content": "kept"}).encode()
    tool.wire_cache["chat"] = b'{"kept": true}'
    again = chat_body(*messages, tools=(tool,))
    assert first["messages"][0] == {"role": "user", "content": "hi"}
    assert [message["content"] for message in again["messages"]] == ["kept"] * 3
    assert again["tools"] == [{"kept": True}]


def test_an_assistant_turn_has_null_content_next_to_calls_and_an_empty_one_is_left_out() -> None:
    # PRV-29; the API refuses a turn with neither text nor calls
    call = ToolCall("a", "f", '{"x": 1}')
    sent = chat_body(user("u"), assistant("", [call]), tool_result(call, "1"), assistant(""), user([TextPart("a"), TextPart("b")]))
    assert sent["messages"][1]["content"] is None
    assert sent["messages"][1]["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]
    assert sent["messages"][3] == {"role": "user", "content": "ab"}


def test_results_are_sent_in_call_order() -> None:
    # PRV-29
    one, two = ToolCall("1", "f"), ToolCall("2", "f")
    sent = chat_body(user("u"), assistant("", [one, two]), tool_result(two, "b"), tool_result(one, "a"))
    assert [message["content"] for message in sent["messages"][2:]] == ["a", "b"]


def test_doubled_ids_of_a_transcript_are_told_apart_in_order() -> None:
    # PRV-27
    same = ToolCall("call_f", "f", '{"n":1}'), ToolCall("call_f", "f", '{"n":2}')
    sent = chat_body(user("u"), assistant("", same), tool_result(same[0], "first"), tool_result(same[1], "second"))["messages"]
    names = [call["id"] for call in sent[1]["tool_calls"]]
    assert len(set(names)) == 2
    assert [(m["tool_call_id"], m["content"]) for m in sent[2:]] == list(zip(names, ["first", "second"], strict=True))


def test_image_bytes_of_an_unknown_kind_name_the_message() -> None:
    # PRV-23
    with pytest.raises(ConfigurationError, match=r"messages\[1\]") as caught:
        chat_body(user("hi"), user([ImagePart(b"????")]))
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"
    sent = chat_body(user([ImagePart(b"????", "image/heic"), TextPart("")]))
    assert [part["type"] for part in sent["messages"][0]["content"]] == ["image_url"]


def test_equal_tools_have_identical_json() -> None:
    # PRV-25
    one = ToolDefinition("f", "F.", {"type": "object", "properties": {"a": {}, "b": {}}})
    two = ToolDefinition("f", "F.", MappingProxyType({"properties": {"b": {}, "a": {}}, "type": "object"}))
    sent = [chat_request(GenerateOptions((user("x"),), tools=(tool,)), "m", ChatDialect(), no_warning) for tool in (one, two)]
    assert sent[0] == sent[1]
    assert chat_tool(ToolDefinition("f", "", {}))["function"]["parameters"] == {"type": "object"}


def test_a_setting_nobody_set_and_a_tool_choice_without_tools_are_not_sent() -> None:
    # CA-29, CA-30
    call = GenerateOptions((user("x"),), settings={"tool_choice": "required"})
    assert set(json.loads(chat_request(call, "m", ChatDialect(), no_warning))) == {"model", "messages"}
    assert set(json.loads(responses_request(call, "m", "error", no_warning))) == {"model", "store", "input"}


def test_only_json_goes_into_replayed_arguments() -> None:
    # Field cases W02, W28
    texts = ["", " ", "{bad", "[]", '"s"', '{"a":NaN}', '{"a":1}']
    made = [ToolCall(str(n), "f", text) for n, text in enumerate(texts)]
    sent = chat_body(user("u"), assistant("", made), *[tool_result(call, "r") for call in made])
    assert [call["function"]["arguments"] for call in sent["messages"][1]["tool_calls"]] == ["{}"] * 6 + ['{"a":1}']
