"""Pruning: old tool results become short markers. No model call, and no call loses its result."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lousho_ray.context.pins import is_pinned
from lousho_ray.context.strategy import CompactionInput, CompactionOutput
from lousho_ray.context.tail import tail_start
from lousho_ray.messages import Message, ToolCall

ARGUMENT_CHARS = 200
"""The most characters of a call's arguments in a marker with a preview."""

_MARKED = re.compile(r"\[pruned: [^\n]* result, \d+ chars\]")


@dataclass(frozen=True, slots=True)
class PruneStrategy:
    """Replaces the content of older tool results by `[pruned: <tool> result, <n> chars]`.

    Attributes:
        protected_tokens: In place of the input's.
        preview_chars: Above 0, the marker also shows the call's arguments and this many characters of the result.
    """

    protected_tokens: int | None = None
    preview_chars: int = 0
    name: str = "prune"

    def compact(self, input: CompactionInput) -> CompactionOutput:
        return self.prune(input, input.messages)

    def foldable_tokens(self, input: CompactionInput) -> int:
        """Tokens of the results that would be pruned."""
        return input.estimate_tokens([input.messages[index] for index in self._markers(input, input.messages)])

    def prune(self, input: CompactionInput, messages: list[Message]) -> CompactionOutput:
        """Prunes `messages`; gives back the same list when there is nothing to prune."""
        markers = self._markers(input, messages)
        before = input.estimate_tokens(messages)
        if not markers:
            return CompactionOutput(messages=messages, tokens_before=before, tokens_after=before)
        pruned = [message.with_(content=markers[index]) if index in markers else message for index, message in enumerate(messages)]
        ids = tuple(str(messages[index].tool_call_id) for index in markers)
        after = input.estimate_tokens(pruned)
        return CompactionOutput(messages=pruned, tokens_before=before, tokens_after=after, pruned_tool_call_ids=ids)

    def _markers(self, input: CompactionInput, messages: list[Message]) -> dict[int, str]:
        """The results to prune, by index, with what takes their place."""
        protected = input.protected_tokens if self.protected_tokens is None else self.protected_tokens
        tail = tail_start(messages, protected, input.estimate_tokens)
        calls: dict[str, ToolCall] = {}
        markers: dict[int, str] = {}
        for index, message in enumerate(messages[:tail]):
            calls.update((call.id, call) for call in message.tool_calls)
            if message.role != "tool" or is_pinned(message):
                continue
            text = message.text
            if len(text) > len(_line(message, text)) and not self._is_marker(text):
                marker = self._marker(message, text, calls.get(message.tool_call_id or ""))
                if len(text) > len(marker):
                    markers[index] = marker
        return markers

    def _marker(self, message: Message, text: str, call: ToolCall | None) -> str:
        line = _line(message, text)
        if not self.preview_chars:
            return line
        arguments = "" if call is None else f"\narguments: {call.arguments[:ARGUMENT_CHARS]}"
        return f"{line}{arguments}\nbegins: {text[: self.preview_chars]}"

    def _is_marker(self, text: str) -> bool:
        """A long text that only begins like a marker is none: a tool must not be able to keep its results from being pruned."""
        match = _MARKED.match(text)
        return match is not None and len(text) <= match.end() + ARGUMENT_CHARS + self.preview_chars + 32


def _line(message: Message, text: str) -> str:
    return f"[pruned: {message.tool_name or 'tool'} result, {len(text)} chars]"
