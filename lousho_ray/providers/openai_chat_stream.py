"""Streamed Chat Completions: fragments in, complete chunks out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lousho_ray.messages import ToolCall
from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, ReasoningChunk, ReasoningEndChunk, TextChunk, ToolCallChunk
from lousho_ray.providers import json_fields as fields
from lousho_ray.providers.failures import MalformedReplyError, TruncatedStreamError, error_body
from lousho_ray.providers.openai_chat import chat_usage, content_text, finish_reason, model_of, raise_choice_error, reasoning_text
from lousho_ray.providers.sse import ServerSentEvent
from lousho_ray.providers.transcript import TextJoiner, call_arguments, encode_json, settled_calls, unique_calls
from lousho_ray.usage import ProviderUsage


@dataclass(slots=True)
class _OpenCall:
    index: int
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def closed(self) -> bool:
        """Whether the arguments so far are a complete JSON object."""
        text = "".join(self.arguments)
        if not text.rstrip().endswith("}"):
            return False
        try:
            return isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            return False


class CallFragments:
    """Joins the fragments of tool calls.

    By `index` when servers do as documented. Some leave it out, give every call index 0, repeat id and name in each fragment, or
    send whole calls: a new id, or a new name once the arguments are a complete object, starts a new call even at a known index.
    """

    def __init__(self) -> None:
        self._calls: list[_OpenCall] = []
        self._by_index: dict[int, _OpenCall] = {}

    def add(self, fragments: Sequence[Any]) -> None:
        """Takes the `tool_calls` list of one delta."""
        for position, fragment in enumerate(fragments):
            if isinstance(fragment, Mapping):
                self._add(fragment, position, alone=len(fragments) == 1)

    def _add(self, fragment: Mapping[str, Any], position: int, *, alone: bool) -> None:
        function = fields.mapping(fragment.get("function"))
        call_id, name = fields.text(fragment.get("id")), fields.text(function.get("name"))
        arguments = function.get("arguments")
        index = fragment.get("index")
        call = self._find(index if isinstance(index, int) else None, call_id, name, position, alone)
        if call is None or _starts_another(call, call_id, name, arguments):
            call = _OpenCall(index if isinstance(index, int) else len(self._calls), call_id, name)
            self._calls.append(call)
            self._by_index[call.index] = call
        else:
            call.id, call.name = call.id or call_id, call.name or name
        if isinstance(arguments, str):
            call.arguments.append(arguments)
        elif arguments is not None:
            call.arguments.append(encode_json(arguments))

    def _find(self, index: int | None, call_id: str, name: str, position: int, alone: bool) -> _OpenCall | None:
        if index is not None and (index in self._by_index or call_id or name):
            return self._by_index.get(index)
        if call_id:
            return next((call for call in reversed(self._calls) if call.id == call_id), None)
        if name:
            return self._calls[-1] if self._calls and self._calls[-1].name == name else None
        if not alone:
            return self._by_index.get(position)
        return self._calls[-1] if self._calls else None

    def calls(self) -> list[ToolCall]:
        """The calls in index order."""
        ordered = sorted(self._calls, key=lambda call: call.index)
        return [ToolCall(call.id, call.name, call_arguments("".join(call.arguments))) for call in ordered]


def _starts_another(call: _OpenCall, call_id: str, name: str, arguments: Any) -> bool:
    if call_id and call.id and call_id != call.id:
        return True
    if not name:
        return False
    if call.closed:
        return name != call.name or bool(arguments)
    return bool(call.name) and name != call.name


class ChatStream:
    """The accumulator of one streamed reply.

    Attributes:
        complete: Whether the server has said how the answer ended: what breaks afterwards does not matter.
        done: Whether nothing more is to come, so that reading can stop.
    """

    def __init__(self, options: GenerateOptions, provider: str | None = None) -> None:
        self._options = options
        self._provider = provider
        self._text = TextJoiner()
        self._thought = TextJoiner()
        self._thinking = False
        self._fragments = CallFragments()
        self._reason: str | None = None
        self._usage: ProviderUsage | None = None
        self._model: str | None = None
        self._refused = False
        self._terminated = False

    @property
    def complete(self) -> bool:
        return self._reason is not None or self._terminated

    @property
    def done(self) -> bool:
        return self._terminated

    @property
    def usage(self) -> ProviderUsage | None:
        """What the server has told so far; most tell it at the end only."""
        return self._usage

    def feed(self, event: ServerSentEvent) -> list[Chunk]:
        """The chunks an event completes.

        Raises:
            ErrorBodyError: The event is an error of the server.
            MalformedReplyError: The event is not JSON.
        """
        data = event.data.strip()
        if data == "[DONE]":
            self._terminated = True
            return []
        if not data or self._terminated:
            return []
        try:
            body = json.loads(data)
        except ValueError as error:
            raise MalformedReplyError(f"A stream event is not JSON: {data[:200]}", provider=self._provider) from error
        if not isinstance(body, dict):
            return []
        if body.get("error") or event.event == "error":
            raise error_body(body, provider=self._provider)
        return list(self._chunk(body))

    def _chunk(self, body: Mapping[str, Any]) -> Iterator[Chunk]:
        self._model = self._model or model_of(body)
        # Servers that report usage on every chunk report the sum so far: the last one counts.
        usage = chat_usage(body.get("usage"))
        self._usage = usage or self._usage
        choice = next(iter(fields.objects(body.get("choices"))), None)
        if choice is None:
            # The usage chunk comes last; a server that never sends its terminator must not be waited for.
            self._terminated = self._reason is not None and usage is not None
            return
        raise_choice_error(choice, self._provider)
        # `message`: a server that streams one whole message
        yield from self._delta(fields.mapping(choice.get("delta")) or fields.mapping(choice.get("message")))
        if reason := choice.get("finish_reason"):
            self._reason = finish_reason(reason)

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Chunk]:
        if thought := self._thought.push(reasoning_text(delta)):
            self._thinking = True
            yield ReasoningChunk(thought)
        text = content_text(delta.get("content"))
        if not text and (text := fields.text(delta.get("refusal"))):
            self._refused = True
        if text and (text := self._text.push(text)):
            yield from self._end_thinking()
            yield TextChunk(text)
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            self._fragments.add(calls)
        elif isinstance(delta.get("function_call"), Mapping):
            self._fragments.add([{"index": 0, "function": delta["function_call"]}])

    def _end_thinking(self) -> Iterator[Chunk]:
        if self._thinking:
            self._thinking = False
            if rest := self._thought.close():
                yield ReasoningChunk(rest)
            yield ReasoningEndChunk()

    def finish(self) -> Iterator[Chunk]:
        """The chunks that the end of the stream completes: the calls, then the finish.

        Raises:
            TruncatedStreamError: The server never said how the answer ended.
        """
        if not self.complete:
            raise TruncatedStreamError("The stream ended before the answer was complete.", provider=self._provider)
        yield from self._end_thinking()
        if rest := self._text.close():
            yield TextChunk(rest)
        reason = "content_filter" if self._refused else self._reason or "other"
        calls = unique_calls(self._fragments.calls(), self._options.messages)
        used = self._usage.completion_tokens if self._usage is not None else None
        reason, calls = settled_calls(reason, calls, used, self._options.get("max_tokens"))
        for call in calls:
            yield ToolCallChunk(call)
        yield FinishChunk(reason, self._usage, response_model=self._model)
