"""The wire form of OpenAI Responses: raw events and items for scenarios, and rendered replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lousho_ray.testing.fake_server.chat_wire import sse
from lousho_ray.testing.fake_server.records import RecordedRequest
from lousho_ray.testing.fake_server.replies import Issued, Reply
from lousho_ray.testing.fake_server.scenarios import Step, send, status

_DONE_STATES: dict[str, dict[str, Any]] = {
    "length": {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
    "content_filter": {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
    "failed": {"status": "failed", "error": {"code": "server_error", "message": "The server had an error."}},
    "cancelled": {"status": "cancelled"},
}


def response_event(type: str, **fields: Any) -> bytes:
    """Any event of a Responses stream; `sequence_number` defaults to 0."""
    return sse({"type": type, "sequence_number": 0, **fields}, event=type)


def response_object(output: Sequence[Mapping[str, Any]] = (), **fields: Any) -> dict[str, Any]:
    """A response, `completed` unless told otherwise; the body of an answer that is not streamed."""
    base = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": "m",
        "output": list(output),
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": response_usage(10, 5),
    }
    return {**base, **fields}


def response_usage(
    input_tokens: int, output_tokens: int, *, cached: int = 0, cache_write: int = 0, reasoning: int = 0
) -> dict[str, Any]:
    """The usage object; counts are tokens, cached ones inside the input, reasoning ones inside the output."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": cache_write},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": input_tokens + output_tokens,
    }


def response_created(**fields: Any) -> bytes:
    """`response.created`, with an empty response in progress."""
    return response_event("response.created", response=response_object(**{"status": "in_progress", "usage": None, **fields}))


def response_completed(output: Sequence[Mapping[str, Any]] = (), **fields: Any) -> bytes:
    return response_event("response.completed", response=response_object(output, **fields))


def response_incomplete(reason: str, output: Sequence[Mapping[str, Any]] = (), **fields: Any) -> bytes:
    """`response.incomplete`, for `max_output_tokens` or `content_filter`."""
    details = {"status": "incomplete", "incomplete_details": {"reason": reason}}
    return response_event("response.incomplete", response=response_object(output, **details, **fields))


def response_failed(code: str, message: str = "failed") -> bytes:
    error = {"code": code, "message": message}
    return response_event("response.failed", response=response_object(status="failed", error=error, usage=None))


def response_error(code: str | None, message: str) -> bytes:
    """The `error` event."""
    return response_event("error", code=code, message=message, param=None)


def output_text_delta(text: str, *, item_id: str = "msg_1", output_index: int = 0) -> bytes:
    fields = {"item_id": item_id, "output_index": output_index, "content_index": 0, "delta": text, "logprobs": []}
    return response_event("response.output_text.delta", **fields)


def output_item_added(item: Mapping[str, Any], output_index: int = 0) -> bytes:
    return response_event("response.output_item.added", output_index=output_index, item=dict(item))


def output_item_done(item: Mapping[str, Any], output_index: int = 0) -> bytes:
    return response_event("response.output_item.done", output_index=output_index, item=dict(item))


def arguments_delta(delta: str, *, item_id: str = "fc_1", output_index: int = 0) -> bytes:
    """`response.function_call_arguments.delta`."""
    fields = {"item_id": item_id, "output_index": output_index, "delta": delta}
    return response_event("response.function_call_arguments.delta", **fields)


def reasoning_summary_delta(delta: str, *, item_id: str = "rs_1", output_index: int = 0, summary_index: int = 0) -> bytes:
    fields = {"item_id": item_id, "output_index": output_index, "summary_index": summary_index, "delta": delta}
    return response_event("response.reasoning_summary_text.delta", **fields)


def message_item(text: str, id: str = "msg_1") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": id, "status": "completed", "role": "assistant", "content": [part]}


def function_call_item(call_id: str, name: str, arguments: str, id: str = "fc_1") -> dict[str, Any]:
    base = {"type": "function_call", "id": id, "status": "completed"}
    return {**base, "call_id": call_id, "name": name, "arguments": arguments}


def reasoning_item(summary: str, id: str = "rs_1", encrypted_content: str | None = None) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "reasoning", "id": id, "summary": [{"type": "summary_text", "text": summary}]}
    return item if encrypted_content is None else {**item, "encrypted_content": encrypted_content}


def render(reply: Reply, request: RecordedRequest, issued: Issued) -> list[Step]:
    """The steps that send a reply in the form the request asked for."""
    items = _items(reply, request, issued)
    done = {
        "id": issued.new_id("resp"),
        "model": reply.model or request.body.get("model", "fake"),
        "usage": _usage(reply),
        **_DONE_STATES.get(reply.finish, {}),
    }
    issued.responses[done["id"]] = tuple(item["call_id"] for item in items if item["type"] == "function_call")
    if not request.streaming:
        return [status(200, body=response_object(items, **done))]
    started = response_object(id=done["id"], model=done["model"], status="in_progress", usage=None)
    events: list[dict[str, Any]] = [{"type": f"response.{kind}", "response": started} for kind in ("created", "in_progress")]
    for index, item in enumerate(items):
        events += _item_events(item, index, reply)
    state = done.get("status", "completed")
    events.append({"type": f"response.{state}", "response": response_object(items, **done)})
    return [send(sse({**event, "sequence_number": number}, event=event["type"])) for number, event in enumerate(events)]


def _items(reply: Reply, request: RecordedRequest, issued: Issued) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    reasoning_id = None
    if reply.reasoning is not None:
        encrypted = None
        if "reasoning.encrypted_content" in (request.body.get("include") or ()):
            encrypted = issued.new_id("encrypted")
            issued.encrypted.add(encrypted)
        reasoning_id = issued.new_id("rs")
        items.append(reasoning_item(reply.reasoning, reasoning_id, encrypted))
    calls = issued.calls(reply, partial(issued.new_id, "call"))
    if reply.full_text or not calls:
        items.append(message_item(reply.full_text, issued.new_id("msg")))
    items += [function_call_item(call.id, call.name, call.arguments, issued.new_id("fc")) for call in calls]
    first = 0 if reasoning_id is None else 1
    for position, item in enumerate(items):
        issued.items[item["id"]] = reasoning_id if position == first else None
    return items


def _item_events(item: dict[str, Any], index: int, reply: Reply) -> list[dict[str, Any]]:
    """The events that stream one output item."""
    place = {"item_id": item["id"], "output_index": index}
    match item["type"]:
        case "message":
            at = {**place, "content_index": 0}
            empty = {**item["content"][0], "text": ""}
            opened = {**item, "status": "in_progress", "content": []}
            middle: list[dict[str, Any]] = [{"type": "response.content_part.added", **at, "part": empty}]
            middle += [{"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []} for piece in reply.pieces]
            middle += [
                {"type": "response.output_text.done", **at, "text": reply.full_text, "logprobs": []},
                {"type": "response.content_part.done", **at, "part": item["content"][0]},
            ]
        case "function_call":
            opened = {**item, "status": "in_progress", "arguments": ""}
            text, half = item["arguments"], len(item["arguments"]) // 2
            kind = "response.function_call_arguments"
            middle = [{"type": f"{kind}.delta", **place, "delta": piece} for piece in (text[:half], text[half:]) if piece]
            middle.append({"type": f"{kind}.done", **place, "name": item["name"], "arguments": text})
        case _:
            at = {**place, "summary_index": 0}
            opened, part = {**item, "summary": []}, item["summary"][0]
            middle = [
                {"type": "response.reasoning_summary_part.added", **at, "part": {**part, "text": ""}},
                {"type": "response.reasoning_summary_text.delta", **at, "delta": part["text"]},
                {"type": "response.reasoning_summary_text.done", **at, "text": part["text"]},
                {"type": "response.reasoning_summary_part.done", **at, "part": part},
            ]
    added = {"type": "response.output_item.added", "output_index": index, "item": opened}
    return [added, *middle, {"type": "response.output_item.done", "output_index": index, "item": item}]


def _usage(reply: Reply) -> dict[str, Any] | None:
    if reply.usage is None:
        return None
    return dict(reply.usage) if isinstance(reply.usage, Mapping) else response_usage(*reply.usage)
