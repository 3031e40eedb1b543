"""The wire form of Chat Completions: raw chunks for scenarios, and rendered replies.

`D`, `TC`, `FIN`, `U` and `DONE` are short since a scenario is a row of them: delta, tool call, finish, usage, end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lousho_ray.testing.fake_server.records import RecordedRequest
from lousho_ray.testing.fake_server.replies import Issued, Reply
from lousho_ray.testing.fake_server.scenarios import Step, json_bytes, send, status

DONE = b"data: [DONE]\n\n"
"""The line that ends a Chat Completions stream."""


def sse(data: Mapping[str, Any] | str, event: str | None = None) -> bytes:
    """One server-sent event: a value as JSON, or text as it is; lone surrogates of a value go out as `\\udXXX` escapes."""
    text = data.encode() if isinstance(data, str) else json_bytes(data)
    name = b"" if event is None else b"event: %b\n" % event.encode()
    return b"%bdata: %b\n\n" % (name, text)


def chunk(choices: Sequence[Mapping[str, Any]], **fields: Any) -> bytes:
    """A whole `chat.completion.chunk` event; `fields` are added to it (`usage=...`, `model=...`, `error=...`)."""
    base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": list(choices)}
    return sse({**base, **fields})


def D(delta: Mapping[str, Any], *, finish_reason: str | None = None, **fields: Any) -> bytes:  # noqa: N802
    """A chunk with that delta."""
    return chunk([{"index": 0, "delta": dict(delta), "finish_reason": finish_reason}], **fields)


def TC(index: int | None, id: str | None, name: str | None, args: Any, **fields: Any) -> bytes:  # noqa: N802
    """A chunk with a tool-call fragment; `None` leaves index, id or name out. `args` goes out as it is, an object too."""
    function = {"arguments": args} if name is None else {"name": name, "arguments": args}
    call: dict[str, Any] = {"type": "function", "function": function}
    if id is not None:
        call = {"id": id, **call}
    if index is not None:
        call = {"index": index, **call}
    return D({"tool_calls": [call]}, **fields)


def FIN(reason: str, **fields: Any) -> bytes:  # noqa: N802
    """The chunk with the finish reason."""
    return D({}, finish_reason=reason, **fields)


def U(prompt_tokens: int | None, completion_tokens: int | None, **fields: Any) -> bytes:  # noqa: N802
    """The usage chunk, with empty `choices`; `fields` are added to the usage object."""
    return chunk([], usage={**_counts(prompt_tokens, completion_tokens), **fields})


def completion(message: Mapping[str, Any], finish_reason: str | None = "stop", **fields: Any) -> dict[str, Any]:
    """The JSON body of an answer that is not streamed; pass it to `status(200, body=...)`."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **fields}


def render(reply: Reply, request: RecordedRequest, issued: Issued) -> list[Step]:
    """The steps that send a reply in the form the request asked for."""
    new_id = issued.new_mistral_id if request.dialect == "mistral" else partial(issued.new_id, "call")
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in issued.calls(reply, new_id)
    ]
    head = {"id": issued.new_id("chatcmpl"), "model": reply.model or request.body.get("model", "fake")}
    reasoning_key = "reasoning" if request.dialect == "openrouter" else "reasoning_content"
    reasoning = {} if reply.reasoning is None else {reasoning_key: reply.reasoning}
    usage = _usage(reply)
    if not request.streaming:
        message: dict[str, Any] = {"content": reply.full_text or (None if calls else ""), "refusal": None, **reasoning}
        if calls:
            message["tool_calls"] = calls
        fields = head if usage is None else {**head, "usage": usage}
        return [status(200, body=completion(message, reply.finish, **fields))]
    events = [D({"role": "assistant", "content": ""}, **head)]
    if reasoning:
        events.append(D(reasoning, **head))
    events += [D({"content": piece}, **head) for piece in reply.pieces]
    events += [D({"tool_calls": [{"index": index, **call}]}, **head) for index, call in enumerate(calls)]
    events.append(FIN(reply.finish, **head))
    if usage is not None and (request.body.get("stream_options") or {}).get("include_usage"):
        events.append(chunk([], usage=usage, **head))
    return [*(send(event) for event in events), send(DONE)]


def _usage(reply: Reply) -> dict[str, Any] | None:
    if reply.usage is None:
        return None
    return dict(reply.usage) if isinstance(reply.usage, Mapping) else _counts(*reply.usage)


def _counts(prompt_tokens: int | None, completion_tokens: int | None) -> dict[str, Any]:
    total = None if prompt_tokens is None or completion_tokens is None else prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
