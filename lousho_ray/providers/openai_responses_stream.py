"""Streamed Responses: events in, complete chunks out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    HostedToolCallChunk,
    HostedToolResultChunk,
    ReasoningChunk,
    ReasoningEndChunk,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers import json_fields as fields
from lousho_ray.providers.failures import MalformedReplyError, TruncatedStreamError, error_body
from lousho_ray.providers.openai_chat import model_of
from lousho_ray.providers.openai_responses import (
    hosted_call,
    message_text,
    raise_failed,
    responses_usage,
    settle,
)
from lousho_ray.providers.sse import ServerSentEvent
from lousho_ray.providers.transcript import TextJoiner, clean_text
from lousho_ray.usage import ProviderUsage

_TEXT = {"response.output_text.delta": False, "response.refusal.delta": True}
_REASONING = {"response.reasoning_summary_text.delta", "response.reasoning_text.delta"}
_END = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}


class ResponsesStream:
    """The accumulator of one streamed response. `complete` and `done` are one here: the terminal event says it all."""

    def __init__(self, options: GenerateOptions, provider: str | None = None) -> None:
        self._provider = provider
        self._options = options
        self._text = TextJoiner()
        self._thought = TextJoiner()
        self._thinking = False
        self._wrote = False
        self._refused = False
        self._asked: list[Mapping[str, Any]] = []
        self._open: dict[str, Mapping[str, Any]] = {}
        self._response: Mapping[str, Any] | None = None

    @property
    def complete(self) -> bool:
        return self._response is not None

    @property
    def done(self) -> bool:
        return self._response is not None

    @property
    def usage(self) -> ProviderUsage | None:
        """What the terminal event told."""
        return None if self._response is None else responses_usage(self._response.get("usage"))

    def feed(self, event: ServerSentEvent) -> list[Chunk]:
        """The chunks an event completes.

        Raises:
            ErrorBodyError: The event is an error of the server, or the response failed.
            MalformedReplyError: The event is not JSON.
        """
        data = event.data.strip()
        if not data or data == "[DONE]" or self._response is not None:
            return []
        try:
            body = json.loads(data)
        except ValueError as error:
            raise MalformedReplyError(f"A stream event is not JSON: {data[:200]}", provider=self._provider) from error
        return list(self._event(body)) if isinstance(body, Mapping) else []

    def _event(self, body: Mapping[str, Any]) -> Iterator[Chunk]:
        kind = body.get("type")
        if kind in _TEXT:
            self._refused = self._refused or _TEXT[kind]
            if text := self._text.push(fields.text(body.get("delta"))):
                self._wrote = True
                yield from self._end_thinking()
                yield TextChunk(text)
        elif kind in _REASONING:
            if thought := self._thought.push(fields.text(body.get("delta"))):
                self._thinking = True
                yield ReasoningChunk(thought)
        elif kind == "response.reasoning_summary_part.added":
            if self._thinking:
                yield ReasoningChunk("\n\n")
        elif kind == "response.output_item.added":
            yield from self._item_started(body.get("item"))
        elif kind == "response.output_item.done":
            yield from self._item_done(body.get("item"))
        elif kind in _END:
            self._response = fields.mapping(body.get("response"))
            if kind in ("response.failed", "response.cancelled"):
                raise_failed({**self._response, "status": "failed"}, self._provider)
        elif kind == "error" or (kind is None and body.get("error")):
            raise error_body(body, provider=self._provider)

    def _item_started(self, item: Any) -> Iterator[Chunk]:
        if not isinstance(item, Mapping):
            return
        if item.get("type") == "function_call":
            self._open[fields.text(item.get("call_id"))] = item
        elif (call := hosted_call(item)) is not None:
            yield from self._end_thinking()
            yield HostedToolCallChunk(call)

    def _item_done(self, item: Any) -> Iterator[Chunk]:
        if not isinstance(item, Mapping):
            return
        if item.get("type") == "reasoning":
            yield from self._end_thinking()
        elif item.get("type") == "function_call":
            self._open.pop(fields.text(item.get("call_id")), None)
            self._asked.append(item)
        elif (call := hosted_call(item)) is not None:
            yield HostedToolResultChunk(call)

    def _all_asked(self, output: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The calls in the order they were written: of the events, of the terminal one, and those that were only begun."""
        known = {item.get("call_id") for item in self._asked}
        asked = self._asked + [item for item in output if item.get("type") == "function_call" and item.get("call_id") not in known]
        known = {item.get("call_id") for item in asked}
        return asked + [{**item, "status": "incomplete"} for call_id, item in self._open.items() if call_id not in known]

    def _end_thinking(self) -> Iterator[Chunk]:
        if self._thinking:
            self._thinking = False
            if rest := self._thought.close():
                yield ReasoningChunk(rest)
            yield ReasoningEndChunk()

    def finish(self) -> Iterator[Chunk]:
        """The chunks that the terminal event completes: what no event of its own announced, then the finish.

        Raises:
            TruncatedStreamError: There was no terminal event.
        """
        response = self._response
        if response is None:
            raise TruncatedStreamError("The stream ended before the answer was complete.", provider=self._provider)
        yield from self._end_thinking()
        if rest := self._text.close():
            yield TextChunk(rest)
        output = fields.objects(response.get("output"))
        text, refused = message_text(output)
        if text and not self._wrote:
            yield TextChunk(clean_text(text))
        reason, calls = settle(refused or self._refused, response, self._all_asked(output), self._options)
        for call in calls:
            yield ToolCallChunk(call)
        yield FinishChunk(reason, responses_usage(response.get("usage")), response_model=model_of(response))
