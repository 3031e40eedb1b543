"""Anthropic's Messages API: from a reply, whole or streamed, to ours.

A whole reply is read as the stream it would have been, so that there is one set of rules. Content blocks are gathered by their
index, since blocks may interleave; the usage figures of a stream are cumulative, so the last one of each field counts. Calls are
given out once the stop reason is known: those of a refused or cut reply must not run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lousho_ray.messages import Message, ReasoningBlock, ToolCall
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateResult,
    HostedToolCall,
    HostedToolCallChunk,
    HostedToolResultChunk,
    ReasoningChunk,
    ReasoningEndChunk,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers import json_fields
from lousho_ray.providers.anthropic_wire import PROVIDER
from lousho_ray.providers.transcript import TextJoiner, call_arguments, clean_text, settled_calls, unique_calls
from lousho_ray.usage import ProviderUsage

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_HOSTED_CALLS = ("server_tool_use", "mcp_tool_use")


def read_usage(fields: Mapping[str, Any]) -> ProviderUsage | None:
    """The API's usage figures in ours; `None` when it reported none. Its `input_tokens` leaves cache traffic out, ours does not."""
    read, written = (json_fields.count(fields.get(f"cache_{kind}_input_tokens")) for kind in ("read", "creation"))
    prompt = (json_fields.count(fields.get("input_tokens")) or 0) + (read or 0) + (written or 0)
    completion = json_fields.count(fields.get("output_tokens")) or 0
    if not prompt and not completion:
        return None
    thinking = json_fields.count(json_fields.mapping(fields.get("output_tokens_details")).get("thinking_tokens"))
    return ProviderUsage(prompt, completion, read, written, thinking)


def add_usage(first: ProviderUsage | None, second: ProviderUsage | None) -> ProviderUsage | None:
    """The usage of one call that took two requests."""
    if first is None or second is None:
        return first or second

    def plus(a: int | None, b: int | None) -> int | None:
        return None if a is None and b is None else (a or 0) + (b or 0)

    return ProviderUsage(
        first.prompt_tokens + second.prompt_tokens,
        first.completion_tokens + second.completion_tokens,
        plus(first.cached_input_tokens, second.cached_input_tokens),
        plus(first.cache_write_tokens, second.cache_write_tokens),
        plus(first.reasoning_tokens, second.reasoning_tokens),
    )


@dataclass(slots=True)
class _Block:
    """A content block on its way: what the start event gave, and the fragments that followed."""

    raw: dict[str, Any]
    joiner: TextJoiner = field(default_factory=TextJoiner)
    text: list[str] = field(default_factory=list)
    signature: list[str] = field(default_factory=list)
    input_json: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.raw.get("type", ""))

    def whole(self) -> dict[str, Any]:
        """The block as a whole reply would show it."""
        raw = dict(self.raw)
        if self.kind == "text":
            raw["text"] = "".join(self.text)
        elif self.kind == "thinking":
            raw["thinking"] = "".join(self.text)
            raw["signature"] = "".join(self.signature)
        elif self.input_json:
            raw["input"] = _loads_or_text("".join(self.input_json))
        return raw


def _loads_or_text(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


@dataclass(slots=True)
class ReplyReader:
    """Reads one reply. `feed()` takes the events of a stream in order, `read()` a whole reply.

    Attributes:
        model: The model that was asked, for the tag of its reasoning.
        served: The model that answered, by its own account.
        calls: The calls that may run; complete once `done`.
        done: Whether `message_stop` was seen; a stream that ends without it was cut off.
    """

    model: str
    messages: Sequence[Message] = ()
    served: str | None = None
    stop_reason: str | None = None
    done: bool = False
    finish_reason: str = "other"
    calls: tuple[ToolCall, ...] = ()
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _usage: dict[str, Any] = field(default_factory=dict)

    @property
    def usage(self) -> ProviderUsage | None:
        return read_usage(self._usage)

    @property
    def paused(self) -> bool:
        """Whether the server stopped in the middle of its own tools and wants the turn sent back."""
        return self.stop_reason == "pause_turn" and not self.calls and bool(self.content)

    @property
    def content(self) -> list[dict[str, Any]]:
        """The reply's blocks to send back as they are, without the blank ones that the API refuses."""
        blocks = [block.whole() for _, block in sorted(self._blocks.items())]
        return [block for block in blocks if block.get("type") != "text" or block["text"].strip()]

    def feed(self, event: Mapping[str, Any]) -> list[Chunk]:
        """The chunks that one event completes. Unknown events and blocks are ignored."""
        index = json_fields.count(event.get("index")) or 0
        match event.get("type"):
            case "content_block_delta":
                return self._delta(index, json_fields.mapping(event.get("delta")))
            case "content_block_start":
                return self._start(index, json_fields.mapping(event.get("content_block")))
            case "content_block_stop":
                return self._stop(index)
            case "message_start":
                message = json_fields.mapping(event.get("message"))
                self.served = json_fields.text(message.get("model")) or self.served
                self._note(message)
            case "message_delta":
                self._note({**json_fields.mapping(event.get("delta")), "usage": event.get("usage")})
            case "message_stop":
                return self._end()
            case _:
                pass
        return []

    def read(self, body: Mapping[str, Any]) -> list[Chunk]:
        """The chunks of a whole reply, as its stream would have given them."""
        chunks = self.feed({"type": "message_start", "message": body})
        for index, block in enumerate(json_fields.objects(body.get("content"))):
            chunks += self.feed({"type": "content_block_start", "index": index, "content_block": block})
            chunks += self.feed({"type": "content_block_stop", "index": index})
        return chunks + self.feed({"type": "message_stop"})

    def _end(self) -> list[Chunk]:
        self.done = True
        chunks = [chunk for index in sorted(self._open) for chunk in self._stop(index)]
        asked = [_tool_call(block) for _, block in sorted(self._blocks.items()) if block.kind == "tool_use"]
        reason = _FINISH.get(self.stop_reason or "", "other")
        self.finish_reason, self.calls = settled_calls(reason, unique_calls(asked, self.messages))
        return chunks + [ToolCallChunk(call) for call in self.calls]

    def _note(self, fields: Mapping[str, Any]) -> None:
        self.stop_reason = json_fields.text(fields.get("stop_reason")) or self.stop_reason
        usage = json_fields.mapping(fields.get("usage"))
        self._usage.update({key: value for key, value in usage.items() if value is not None})

    def _start(self, index: int, raw: Mapping[str, Any]) -> list[Chunk]:
        block = self._blocks[index] = _Block(dict(raw))
        self._open.add(index)
        if block.kind == "thinking":
            block.signature.append(json_fields.text(raw.get("signature")))
        return self._text(block, json_fields.text(raw.get(block.kind)))

    def _delta(self, index: int, delta: Mapping[str, Any]) -> list[Chunk]:
        block = self._blocks.get(index)
        if block is None:
            return []
        match delta.get("type"):
            case "text_delta":
                return self._text(block, json_fields.text(delta.get("text")))
            case "thinking_delta":
                return self._text(block, json_fields.text(delta.get("thinking")))
            case "signature_delta":
                block.signature.append(json_fields.text(delta.get("signature")))
            case "input_json_delta":
                block.input_json.append(json_fields.text(delta.get("partial_json")))
            case "citations_delta":
                block.raw["citations"] = [*json_fields.objects(block.raw.get("citations")), delta.get("citation")]
            case _:
                pass
        return []

    def _text(self, block: _Block, text: str, *, last: bool = False) -> list[Chunk]:
        text = block.joiner.push(text) + (block.joiner.close() if last else "")
        if not text:
            return []
        block.text.append(text)
        return [TextChunk(text) if block.kind == "text" else ReasoningChunk(text)] if block.kind in ("text", "thinking") else []

    def _stop(self, index: int) -> list[Chunk]:
        block = self._blocks.get(index)
        if block is None or index not in self._open:
            return []
        self._open.discard(index)
        match block.kind:
            case "text":
                return self._text(block, "", last=True)
            case "thinking":
                return [*self._text(block, "", last=True), ReasoningEndChunk(self._thinking(block))]
            case "redacted_thinking":
                redacted = ReasoningBlock("", None, json_fields.text(block.raw.get("data")), PROVIDER, self.model)
                return [ReasoningEndChunk(redacted)]
            case kind if kind in _HOSTED_CALLS:
                return [HostedToolCallChunk(_hosted_call(block.whole()))]
            case kind if kind.endswith("_tool_result"):
                return [HostedToolResultChunk(_hosted_result(block.raw, self._blocks.values()))]
            case _:
                return []

    def _thinking(self, block: _Block) -> ReasoningBlock | None:
        signature = "".join(block.signature)
        return ReasoningBlock("".join(block.text), signature, None, PROVIDER, self.model) if signature else None


def _tool_call(block: _Block) -> ToolCall:
    # The input comes in fragments; a server that gives it at the start sends none.
    arguments = call_arguments("".join(block.input_json) or block.raw.get("input"))
    return ToolCall(json_fields.text(block.raw.get("id")), clean_text(json_fields.text(block.raw.get("name"))), arguments)


def _hosted_call(raw: Mapping[str, Any]) -> HostedToolCall:
    return HostedToolCall(json_fields.text(raw.get("id")), json_fields.text(raw.get("name")), raw.get("input"))


def _hosted_result(raw: Mapping[str, Any], blocks: Any) -> HostedToolCall:
    """The result of a call the server ran, with the call's own name and arguments."""
    call_id, content = json_fields.text(raw.get("tool_use_id")), raw.get("content")
    calls = (block.whole() for block in blocks if block.kind in _HOSTED_CALLS and block.raw.get("id") == call_id)
    started: dict[str, Any] = next(calls, {})
    failed = bool(raw.get("is_error")) or (isinstance(content, Mapping) and "error_code" in content)
    found = [item for item in json_fields.objects(content) if "url" in item]
    sources = tuple({"url": item["url"], "title": item.get("title")} for item in found)
    name = json_fields.text(started.get("name")) or str(raw["type"]).removesuffix("_tool_result")
    return HostedToolCall(call_id, name, started.get("input"), content, failed, sources)


def fold_result(chunks: Sequence[Chunk], finish: FinishChunk, raw_response: Any = None) -> GenerateResult:
    """A whole reply from the chunks of its stream."""
    hosted: dict[str, HostedToolCall] = {}
    for chunk in chunks:
        if isinstance(chunk, HostedToolCallChunk | HostedToolResultChunk):
            hosted[chunk.call.id] = chunk.call
    return GenerateResult(
        text="".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)),
        tool_calls=tuple(chunk.tool_call for chunk in chunks if isinstance(chunk, ToolCallChunk)),
        finish_reason=finish.finish_reason,
        usage=finish.usage,
        reasoning=_reasoning(chunks),
        hosted_tool_calls=tuple(hosted.values()),
        response_model=finish.response_model,
        served_by=finish.served_by,
        raw_response=raw_response,
    )


def _reasoning(chunks: Sequence[Chunk]) -> tuple[ReasoningBlock, ...]:
    blocks: list[ReasoningBlock] = []
    texts: list[str] = []
    for chunk in chunks:
        if isinstance(chunk, ReasoningChunk):
            texts.append(chunk.text)
        elif isinstance(chunk, ReasoningEndChunk):
            text, texts = "".join(texts), []
            if chunk.block is not None:
                blocks.append(chunk.block)
            elif text:
                blocks.append(ReasoningBlock(text, provider=PROVIDER))
    return tuple(blocks)
