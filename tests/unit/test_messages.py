"""Messages and transcripts as values: their JSON form, what a complete transcript is."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lousho_ray.messages import (
    FilePart,
    ImagePart,
    Message,
    ReasoningBlock,
    TextPart,
    ToolCall,
    assistant,
    complete_prefix,
    decode_bytes,
    encode_bytes,
    part_from_json,
    system,
    text_of,
    tool_result,
    unanswered_calls,
    user,
)
from lousho_ray.providers.transcript import paired

CALL = ToolCall("c1", "look", '{"a": 1}')

MESSAGES = [
    system("Be brief."),
    user("Hi"),
    user([TextPart("look"), ImagePart(b"\x89PNG", "image/png"), ImagePart("https://x.test/i.png")]),
    user([FilePart(b"%PDF", "application/pdf", "a.pdf"), FilePart("https://x.test/f", "text/plain")], key={"nested": [1, b"x"]}),
    assistant(
        "So", [CALL], [ReasoningBlock("why", "sig", None, "anthropic", "m"), ReasoningBlock(redacted_data="x", provider="p")]
    ),
    tool_result(CALL, '{"ok":true}', metadata={"replacedByHook": "h"}),
    tool_result(CALL, '{"error":"x"}', is_error=True),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_survives_json_pickling_and_copies(message: Message) -> None:
    # SES-07
    data = json.loads(json.dumps(message.to_dict()))
    assert Message.from_dict(data) == message
    message.wire_cache["x"] = object()
    copy = pickle.loads(pickle.dumps(message))
    assert copy == message
    assert copy.wire_cache == {}
    assert message.with_(role=message.role) == message
    assert message.with_().wire_cache == {}


def test_the_json_form_is_the_documented_one() -> None:
    assert MESSAGES[4].to_dict() == {
        "role": "assistant",
        "content": "So",
        "toolCalls": [{"id": "c1", "name": "look", "arguments": '{"a": 1}'}],
        "reasoning": [
            {"text": "why", "signature": "sig", "provider": "anthropic", "model": "m"},
            {"text": "", "redactedData": "x", "provider": "p"},
        ],
    }
    assert MESSAGES[6].to_dict() == {
        "role": "tool",
        "content": '{"error":"x"}',
        "toolCallId": "c1",
        "toolName": "look",
        "isError": True,
    }
    assert MESSAGES[2].to_dict()["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image", "image": {"$bytes": "iVBORw=="}, "mimeType": "image/png"},
        {"type": "image", "image": "https://x.test/i.png"},
    ]


def test_an_older_form_is_read_with_fields_unset() -> None:
    message = Message.from_dict({"role": "assistant", "toolCalls": [{"id": "c", "name": "n"}]})
    assert message == assistant("", [ToolCall("c", "n")])


def test_only_signed_or_redacted_reasoning_is_sent_back() -> None:
    # RUN-16
    assert ReasoningBlock("x", signature="s").replayable
    assert ReasoningBlock(redacted_data="s").replayable
    assert not ReasoningBlock("x").replayable


def test_text_is_that_of_the_text_parts() -> None:
    assert MESSAGES[2].text == "look"
    assert text_of(user("Hi")) == "Hi"


def test_parts_are_read_from_either_spelling() -> None:
    assert part_from_json({"type": "image", "image": "u", "mime_type": "image/png"}) == ImagePart("u", "image/png")
    assert part_from_json({"type": "file", "data": "u"}) == FilePart("u", "application/octet-stream")
    with pytest.raises(ValueError, match="odd"):
        part_from_json({"type": "odd"})


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "$bytes", "$escape"]), inner, max_size=2),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(_plain)
def test_bytes_round_trip_and_a_users_own_marks_too(value: Any) -> None:
    assert decode_bytes(json.loads(json.dumps(encode_bytes(value)))) == value


# ------------------------------------------------------------------------------------------------------------------ transcripts


def calling(*ids: str) -> Message:
    return assistant("", [ToolCall(call_id, "look") for call_id in ids])


def answer(call_id: str) -> Message:
    return tool_result(ToolCall(call_id, "look"), "1")


@pytest.mark.parametrize(
    ("messages", "kept"),
    [
        ([], 0),
        ([user("a")], 1),
        ([user("a"), calling("1")], 1),
        ([user("a"), calling("1", "2"), answer("1")], 1),
        ([user("a"), calling("1", "2"), answer("1"), answer("2")], 4),
        ([user("a"), calling("1"), answer("1"), calling("2")], 3),
        ([user("a"), calling("1"), answer("1"), assistant("b"), user("c"), calling("2")], 5),
    ],
)
def test_the_longest_complete_prefix(messages: list[Message], kept: int) -> None:
    # SES-17
    assert complete_prefix(messages) == messages[:kept]


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([], []),
        ([user("a")], []),
        ([user("a"), calling("1", "2")], ["1", "2"]),
        ([user("a"), calling("1", "2"), answer("2")], ["1"]),
        ([user("a"), calling("1"), answer("1")], []),
        ([user("a"), calling("1"), user("b")], []),
        ([user("a"), calling("1"), answer("1"), assistant("b")], []),
    ],
)
def test_unanswered_calls(messages: list[Message], wanted: list[str]) -> None:
    assert [call.id for call in unanswered_calls(messages)] == wanted


def _turn(number: int, calls: int, answered: int) -> list[Message]:
    ids = [f"{number}_{index}" for index in range(calls)]
    return [user(f"u{number}"), calling(*ids), *(answer(call_id) for call_id in ids[:answered])]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 3), st.integers(0, 3))
def test_a_transcript_cut_anywhere_at_its_end_becomes_valid(turns: list[int], last: int, answered: int) -> None:
    # SES-17
    messages = [message for number, calls in enumerate(turns) for message in _turn(number, calls, calls)]
    messages += _turn(99, last, min(answered, last))
    prefix = complete_prefix(messages)
    assert paired(prefix)
    assert messages[: len(prefix)] == prefix
    assert unanswered_calls(prefix) == ()
    assert len(messages) - len(prefix) <= 1 + last
