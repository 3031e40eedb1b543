"""The wire form of Anthropic Messages: raw events for scenarios, and rendered replies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lousho_ray.testing.fake_server.chat_wire import sse
from lousho_ray.testing.fake_server.records import RecordedRequest
from lousho_ray.testing.fake_server.replies import Issued, Reply
from lousho_ray.testing.fake_server.scenarios import Step, send, status

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
"""Reasons in OpenAI's words -> Anthropic's."""


def anthropic_event(type: str, **fields: Any) -> bytes:
    """Any event of a Messages stream."""
    return sse({"type": type, **fields}, event=type)


def message_start(usage: Mapping[str, Any] | None = None, *, model: str = "m", id: str = "msg_1") -> bytes:
    """`message_start`; the usage defaults to 10 input tokens and 1 output token."""
    return anthropic_event("message_start", message=anthropic_message([], None, usage, model=model, id=id))


def block_start(index: int, block: Mapping[str, Any]) -> bytes:
    """`content_block_start` with a block such as `{"type": "text", "text": ""}`."""
    return anthropic_event("content_block_start", index=index, content_block=dict(block))


def block_delta(index: int, delta: Mapping[str, Any]) -> bytes:
    """`content_block_delta` with any delta; see `text_delta`, `input_json_delta`, `thinking_delta`, `signature_delta`."""
    return anthropic_event("content_block_delta", index=index, delta=dict(delta))


def text_delta(index: int, text: str) -> bytes:
    return block_delta(index, {"type": "text_delta", "text": text})


def input_json_delta(index: int, partial_json: str) -> bytes:
    return block_delta(index, {"type": "input_json_delta", "partial_json": partial_json})


def thinking_delta(index: int, thinking: str) -> bytes:
    return block_delta(index, {"type": "thinking_delta", "thinking": thinking})


def signature_delta(index: int, signature: str) -> bytes:
    return block_delta(index, {"type": "signature_delta", "signature": signature})


def block_stop(index: int) -> bytes:
    return anthropic_event("content_block_stop", index=index)


def message_delta(stop_reason: str | None, usage: Mapping[str, Any] | None = None) -> bytes:
    """`message_delta`; the usage defaults to 5 output tokens."""
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    return anthropic_event("message_delta", delta=delta, usage=dict(usage or {"output_tokens": 5}))


def message_stop() -> bytes:
    return anthropic_event("message_stop")


def ping() -> bytes:
    return anthropic_event("ping")


def error_event(type: str, message: str) -> bytes:
    """An error in the middle of a stream, such as `overloaded_error`."""
    return anthropic_event("error", error={"type": type, "message": message})


def anthropic_message(
    content: list[dict[str, Any]],
    stop_reason: str | None = "end_turn",
    usage: Mapping[str, Any] | None = None,
    *,
    model: str = "m",
    id: str = "msg_1",
) -> dict[str, Any]:
    """The JSON body of an answer that is not streamed; pass it to `status(200, body=...)`."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": dict(usage or {"input_tokens": 10, "output_tokens": 1}),
    }


def render(reply: Reply, request: RecordedRequest, issued: Issued) -> list[Step]:
    """The steps that send a reply in the form the request asked for."""
    stop_reason = STOP_REASONS.get(reply.finish, reply.finish)
    blocks, deltas = _blocks(reply, issued)
    usage = _usage(reply)
    names = {"model": reply.model or request.body.get("model", "fake"), "id": issued.new_id("msg")}
    if not request.streaming:
        body = anthropic_message(blocks, stop_reason, usage, **names)
        return [status(200, body=body if reply.usage is not None else {**body, "usage": None})]
    events = [message_start({**usage, "output_tokens": 1}, **names), ping()]
    for index, (block, parts) in enumerate(zip(blocks, deltas, strict=True)):
        events.append(block_start(index, _empty(block)))
        events += [block_delta(index, part) for part in parts]
        events.append(block_stop(index))
    events += [message_delta(stop_reason, usage), message_stop()]
    return [send(event) for event in events]


def _blocks(reply: Reply, issued: Issued) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The content blocks of a reply and, for each, the deltas that stream it."""
    blocks: list[dict[str, Any]] = []
    deltas: list[list[dict[str, Any]]] = []
    if reply.reasoning is not None:
        signature = issued.sign(reply.reasoning)
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": signature})
        thinking = {"type": "thinking_delta", "thinking": reply.reasoning}
        deltas.append([thinking, {"type": "signature_delta", "signature": signature}])
    if reply.redacted_reasoning is not None:
        issued.redacted.add(reply.redacted_reasoning)
        blocks.append({"type": "redacted_thinking", "data": reply.redacted_reasoning})
        deltas.append([])
    if reply.full_text:
        blocks.append({"type": "text", "text": reply.full_text})
        deltas.append([{"type": "text_delta", "text": piece} for piece in reply.pieces])
    for call in issued.calls(reply, partial(issued.new_id, "toolu")):
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.input})
        half = len(call.arguments) // 2
        pieces = [call.arguments[:half], call.arguments[half:]]
        deltas.append([{"type": "input_json_delta", "partial_json": piece} for piece in pieces])
    return blocks, deltas


def _empty(block: dict[str, Any]) -> dict[str, Any]:
    """A block as it stands in `content_block_start`."""
    match block["type"]:
        case "text":
            return {"type": "text", "text": ""}
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "tool_use":
            return {**block, "input": {}}
        case _:
            return block


def _usage(reply: Reply) -> dict[str, Any]:
    if isinstance(reply.usage, Mapping):
        return dict(reply.usage)
    input_tokens, output_tokens = reply.usage or (0, 0)
    return {"input_tokens": input_tokens, "output_tokens": output_tokens}
