"""A conversation as text for the model that summarizes it: one JSON object per message, which says who it comes from.

JSON, because what a tool returned must not be able to pass for a message of the user by imitating a frame around it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lousho_ray.messages import ImagePart, Message, TextPart

TOOL_RESULT_CHARS = 2_000
"""The most characters of one tool result that a summarizer reads."""

SUMMARY_LINE = "[Conversation summary]"
"""The first line of a summary message."""

SUMMARY_MARK = "conversationSummary"
"""The metadata key of a summary message."""


def is_summary(message: Message) -> bool:
    """Whether a compaction wrote this message."""
    return message.metadata is not None and message.metadata.get(SUMMARY_MARK) is True


def render(messages: Sequence[Message], text_chars: int | None = None) -> str:
    """The messages, one line each. `text_chars` cuts every text in the middle."""
    return "\n".join(json.dumps(_line(message, text_chars), ensure_ascii=False) for message in messages)


def _line(message: Message, text_chars: int | None) -> dict[str, Any]:
    text = _text(message)
    if message.role == "tool":
        status = {"failed": True} if message.is_error else {}
        limit = TOOL_RESULT_CHARS if text_chars is None else min(text_chars, TOOL_RESULT_CHARS)
        return {"from": "tool", "tool": message.tool_name, "untrusted": True, **status, "result": cut(text, limit)}
    limit = len(text) if text_chars is None else text_chars
    if is_summary(message):
        return {"from": "earlier summary", "text": cut(text.removeprefix(SUMMARY_LINE).lstrip(), limit)}
    line: dict[str, Any] = {"from": message.role, "text": cut(text, limit)}
    if message.tool_calls:
        line["calls"] = [
            {"tool": call.name, "arguments": cut(call.arguments, text_chars or TOOL_RESULT_CHARS)} for call in message.tool_calls
        ]
    return line


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return " ".join(
        part.text if isinstance(part, TextPart) else "[image]" if isinstance(part, ImagePart) else f"[file {part.filename or ''}]"
        for part in message.content
    )


def cut(text: str, limit: int) -> str:
    """`text` with its middle left out when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 3, limit // 3
    return f"{text[:head]} [... {len(text) - limit} chars left out ...] {text[len(text) - tail :]}"
