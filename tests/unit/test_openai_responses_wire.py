"""The wire form of the Responses API, as pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from lousho_ray.messages import Message, ReasoningBlock, ToolCall, assistant, tool_result, user
from lousho_ray.ports import (
    FinishChunk,
    GenerateOptions,
    HostedToolCallChunk,
    HostedToolResultChunk,
    ReasoningChunk,
    ReasoningEndChunk,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers.failures import ErrorBodyError, MalformedReplyError, TruncatedStreamError, classify
from lousho_ray.providers.openai_responses import responses_request, responses_result
from lousho_ray.providers.openai_responses_stream import ResponsesStream
from lousho_ray.providers.sse import ServerSentEvent


def options(*messages: Message, **settings: Any) -> GenerateOptions:
    return GenerateOptions(messages=messages or (user("hi"),), settings=settings)


def no_warning(key: str, text: str) -> None:
    raise AssertionError(f"unexpected warning {key}: {text}")


def read(reader: Any, parts: Sequence[ServerSentEvent]) -> list[Any]:
    chunks = [chunk for event in parts for chunk in reader.feed(event)]
    return [*chunks, *reader.finish()]


def calls(chunks: list[Any]) -> list[tuple[str, str]]:
    return [(chunk.tool_call.name, chunk.tool_call.arguments) for chunk in chunks if isinstance(chunk, ToolCallChunk)]


def finish(chunks: list[Any]) -> FinishChunk:
    assert isinstance(chunks[-1], FinishChunk)
    return chunks[-1]


def text(chunks: list[Any]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))


def test_responses_items_carry_no_item_ids_and_no_reasoning() -> None:
    # PRV-37, PRV-38, field case R01
    call = ToolCall("call_1", "f", "{}")
    turn = assistant("so", [call], [ReasoningBlock("secret", signature="s", provider="anthropic")])
    body = json.loads(responses_request(GenerateOptions((user("u"), turn, tool_result(call, "1"))), "m", "error", no_warning))
    assert body["input"] == [
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "1"},
    ]


def event(type: str, **fields: Any) -> ServerSentEvent:
    return ServerSentEvent(json.dumps({"type": type, **fields}), type)


def responses(*parts: ServerSentEvent, call: GenerateOptions | None = None) -> list[Any]:
    return read(ResponsesStream(call or options()), parts)


def completed(output: Sequence[dict[str, Any]] = (), **fields: Any) -> ServerSentEvent:
    usage = {"input_tokens": 7, "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 1}}
    body = {"status": "completed", "model": "gpt-x", "output": list(output), "usage": usage, "error": None, **fields}
    return event("response.completed", response=body)


FUNCTION = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"x":1}', "status": "completed"}


def test_a_streamed_response_is_text_reasoning_calls_and_a_finish() -> None:
    # PRV-42
    chunks = responses(
        event("response.created", response={"status": "in_progress"}),
        event("response.reasoning_summary_part.added"),
        event("response.reasoning_summary_text.delta", delta="a"),
        event("response.reasoning_summary_part.added"),
        event("response.reasoning_summary_text.delta", delta="b"),
        event("response.output_item.done", item={"type": "reasoning", "id": "rs_1"}),
        event("response.output_text.delta", delta="x"),
        event("response.unheard_of", delta="?"),
        event("response.output_item.done", item=FUNCTION),
        completed([FUNCTION]),
    )
    assert chunks[:6] == [
        ReasoningChunk("a"),
        ReasoningChunk("\n\n"),
        ReasoningChunk("b"),
        ReasoningEndChunk(),
        TextChunk("x"),
        ToolCallChunk(ToolCall("call_1", "f", '{"x":1}')),
    ]
    last = finish(chunks)
    assert len(chunks) == 7
    assert (last.finish_reason, last.response_model) == ("tool_calls", "gpt-x")
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.reasoning_tokens) == (7, 3, 1)


def test_what_only_the_final_response_holds_is_not_lost() -> None:
    output = [{"type": "message", "content": [{"type": "output_text", "text": "whole"}]}, FUNCTION]
    chunks = responses(completed(output))
    assert text(chunks) == "whole"
    assert calls(chunks) == [("f", '{"x":1}')]


@pytest.mark.parametrize(
    ("reason", "expected"), [("max_output_tokens", "length"), ("content_filter", "content_filter"), ("new_one", "other")]
)
def test_an_incomplete_response_keeps_its_reason_and_usage(reason: str, expected: str) -> None:
    # PRV-41, field case R02
    body = {"status": "incomplete", "incomplete_details": {"reason": reason}, "usage": {"input_tokens": 1, "output_tokens": 2}}
    last = finish(responses(event("response.output_text.delta", delta="x"), event("response.incomplete", response=body)))
    assert last.finish_reason == expected
    assert last.usage is not None
    assert responses_result({**body, "output": []}, options()).finish_reason == expected


def test_a_call_that_was_cut_off_is_not_run() -> None:
    cut = {**FUNCTION, "arguments": '{"x":', "status": "incomplete"}
    body = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [cut]}
    chunks = responses(event("response.output_item.done", item=cut), event("response.incomplete", response=body))
    assert (calls(chunks), finish(chunks).finish_reason) == ([], "length")
    result = responses_result(body, options())
    assert (result.tool_calls, result.finish_reason) == ((), "length")


@pytest.mark.parametrize(
    "part",
    [
        event("response.failed", response={"status": "failed", "error": {"code": "server_error", "message": "sorry"}}),
        event("error", code="server_error", message="sorry"),
        ServerSentEvent('{"error": {"message": "sorry", "type": "server_error"}}'),
    ],
)
def test_a_failed_response_is_raised(part: ServerSentEvent) -> None:
    # PRV-43
    with pytest.raises(ErrorBodyError, match="sorry") as caught:
        responses(event("response.output_text.delta", delta="x"), part)
    assert classify(caught.value).retryable


def test_a_response_stream_without_its_last_event_is_truncated() -> None:
    # PRV-43
    with pytest.raises(TruncatedStreamError):
        responses(event("response.output_text.delta", delta="x"))
    with pytest.raises(MalformedReplyError):
        responses(ServerSentEvent("{"))


def test_a_refusal_is_text_with_content_filter() -> None:
    # PRV-40
    output = [{"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}]
    result = responses_result({"status": "completed", "output": output}, options())
    assert (result.text, result.finish_reason) == ("No.", "content_filter")
    chunks = responses(event("response.refusal.delta", delta="No."), completed(output))
    assert (text(chunks), finish(chunks).finish_reason) == ("No.", "content_filter")


def test_an_unstreamed_response_is_read_whole() -> None:
    # PRV-40
    output = [
        {"type": "reasoning", "summary": [{"text": "a"}, {"text": "b"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "q", "sources": [{"url": "u"}]}},
        {"type": "message", "content": [{"type": "output_text", "text": "x"}, {"type": "output_text", "text": "y"}]},
        FUNCTION,
        {**FUNCTION, "call_id": "call_2"},
    ]
    result = responses_result({"status": "completed", "output": output, "error": None}, options())
    assert (result.text, result.finish_reason) == ("xy", "tool_calls")
    assert result.reasoning == (ReasoningBlock("a\n\nb"),)
    assert [call.id for call in result.tool_calls] == ["call_1", "call_2"]
    (hosted,) = result.hosted_tool_calls
    assert (hosted.name, hosted.sources, hosted.is_error) == ("web_search", ({"url": "u"},), False)
    assert result.usage is None


def test_hosted_calls_are_streamed_and_do_not_count_as_calls() -> None:
    # PRV-28, RUN-D6
    item = {"type": "web_search_call", "id": "ws_1", "status": "in_progress"}
    done = {**item, "status": "completed"}
    chunks = responses(
        event("response.output_item.added", item=item),
        event("response.output_item.done", item=done),
        event("response.output_text.delta", delta="x"),
        completed([done]),
    )
    assert [type(chunk) for chunk in chunks[:2]] == [HostedToolCallChunk, HostedToolResultChunk]
    assert finish(chunks).finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("<html>", MalformedReplyError),
        ({"status": "completed"}, MalformedReplyError),
        ({"status": "failed", "error": {"code": "rate_limit_exceeded", "message": "slow"}, "output": []}, ErrorBodyError),
        ({"error": {"message": "no", "code": 500}}, ErrorBodyError),
        ({"status": "cancelled", "output": []}, ErrorBodyError),
    ],
)
def test_a_body_that_is_no_response_is_an_error(body: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        responses_result(body, options())
