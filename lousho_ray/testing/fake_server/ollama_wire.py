"""The wire form of Ollama's own chat API: raw lines for scenarios, and rendered replies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lousho_ray.testing.fake_server.records import RecordedRequest
from lousho_ray.testing.fake_server.replies import Issued, Reply
from lousho_ray.testing.fake_server.scenarios import Step, json_bytes, send, status

_WHEN = "2026-01-01T00:00:00Z"


def ollama_line(message: Mapping[str, Any] | None = None, **fields: Any) -> bytes:
    """One line of a stream with that message; `fields` are added to it or replace it (`done=True`, `error=...`)."""
    return json_bytes(ollama_answer(message, **{"done": False, **fields})) + b"\n"


def ollama_done(prompt_eval_count: int | None = 10, eval_count: int | None = 5, *, done_reason: str = "stop") -> bytes:
    """The last line of a stream; a count that is `None` is left out."""
    return ollama_line({"content": ""}, done=True, done_reason=done_reason, **_counts(prompt_eval_count, eval_count))


def ollama_error(message: str) -> bytes:
    """A line that ends a stream with an error."""
    return json_bytes({"error": message}) + b"\n"


def ollama_answer(message: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The JSON body of an answer that is not streamed; pass it to `status(200, body=...)`."""
    content = {"role": "assistant", "content": "", **(message or {})}
    return {"model": "m", "created_at": _WHEN, "message": content, "done": True, **fields}


def render(reply: Reply, request: RecordedRequest, issued: Issued) -> list[Step]:
    """The steps that send a reply in the form the request asked for."""
    calls = [
        {"function": {"name": call.name, "arguments": call.input}} for call in issued.calls(reply, partial(issued.new_id, "call"))
    ]
    usage = dict(reply.usage) if isinstance(reply.usage, Mapping) else _counts(*(reply.usage or (None, None)))
    reason = "stop" if reply.finish == "tool_calls" else reply.finish
    model = {"model": reply.model or request.body.get("model", "fake")}
    end = {**model, "done": True, "done_reason": reason, **usage}
    thinking = {} if reply.reasoning is None else {"thinking": reply.reasoning}
    tool_calls = {"tool_calls": calls} if calls else {}
    if not request.streaming:
        return [status(200, body=ollama_answer({"content": reply.full_text, **thinking, **tool_calls}, **end))]
    lines = [ollama_line(thinking, **model)] if thinking else []
    lines += [ollama_line({"content": piece}, **model) for piece in reply.pieces]
    if calls:
        lines.append(ollama_line(tool_calls, **model))
    return [*(send(line) for line in lines), send(ollama_line(None, **end))]


def _counts(prompt_eval_count: int | None, eval_count: int | None) -> dict[str, int]:
    counts = {"prompt_eval_count": prompt_eval_count, "eval_count": eval_count}
    return {name: count for name, count in counts.items() if count is not None}
