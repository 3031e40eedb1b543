"""Reading replies of Anthropic's Messages API that are not what they should be."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.providers.anthropic_reply import ReplyReader, read_usage
from lousho_ray.usage import ProviderUsage

_KINDS = [
    "text",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "server_tool_use",
    "web_search_tool_result",
    "text_delta",
    "thinking_delta",
    "signature_delta",
    "input_json_delta",
    "citations_delta",
]
_EVENTS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "ping",
    "invented",
]
_FIELDS = [
    "id",
    "name",
    "input",
    "text",
    "thinking",
    "signature",
    "data",
    "partial_json",
    "citation",
    "citations",
    "tool_use_id",
    "content",
    "is_error",
]
_scalars = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3)
_junk = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_FIELDS), inner), max_leaves=5
)
_block = st.builds(
    lambda kind, fields: {**fields, "type": kind}, st.sampled_from(_KINDS), st.dictionaries(st.sampled_from(_FIELDS), _junk)
)
_event = st.builds(
    lambda kind, index, block, rest: {**rest, "type": kind, "index": index, "content_block": block, "delta": block},
    st.sampled_from(_EVENTS),
    st.integers(0, 2) | _junk,
    _block | _junk,
    st.dictionaries(st.sampled_from(["message", "usage", "stop_reason"]), _junk),
)


@given(st.lists(_event, max_size=8))
def test_fields_of_a_wrong_type_count_as_absent(events: list[dict[str, Any]]) -> None:
    reader = ReplyReader("m")
    for event in [*events, {"type": "message_stop"}]:
        reader.feed(event)
    assert reader.done
    assert reader.finish_reason in {"stop", "length", "tool_calls", "content_filter", "other"}
    assert all(block.get("text", "x").strip() for block in reader.content if block.get("type") == "text")


@given(st.dictionaries(st.sampled_from(["model", "content", "usage", "stop_reason"]), _junk | st.lists(_block, max_size=3)))
def test_a_whole_reply_of_wrong_types_is_read(body: dict[str, Any]) -> None:
    reader = ReplyReader("m")
    reader.read(body)
    assert reader.done


def test_usage_of_wrong_types_is_not_reported() -> None:
    # PRV-08
    assert read_usage({"input_tokens": "9", "output_tokens": -1, "output_tokens_details": []}) is None
    assert read_usage({"input_tokens": 9, "cache_read_input_tokens": True}) == ProviderUsage(9, 0)
