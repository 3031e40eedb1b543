"""Whether a compacted transcript can still be sent: providers refuse a call without its result, and the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lousho_ray.messages import Message


def defect(before: Sequence[Message], after: Any) -> str | None:
    """What is wrong with `after` that was not wrong with `before`, or `None`."""
    if not isinstance(after, list | tuple) or not all(isinstance(message, Message) for message in after):
        return "messages must be a list of Message"
    if before and not after:
        return "every message was dropped"
    if before and before[0].role == "system" and after[0].role != "system":
        return "the system prompt was lost"
    if before and before[-1].role != "assistant" and after[-1].role in ("assistant", "system"):
        return f"the transcript ends with a message of role {after[-1].role!r}, where the model is to reply"
    known = set(_broken_pairs(before))
    return next((found for found in _broken_pairs(after) if found not in known), None)


def _broken_pairs(messages: Sequence[Message]) -> list[str]:
    found: list[str] = []
    open_calls: list[str] = []
    for message in messages:
        if message.role == "tool":
            if message.tool_call_id in open_calls:
                open_calls.remove(message.tool_call_id)
            else:
                found.append(f"the result of call {message.tool_call_id!r} has no call before it")
            continue
        found += [_unanswered(call_id) for call_id in open_calls]
        open_calls = [call.id for call in message.tool_calls]
    return found + [_unanswered(call_id) for call_id in open_calls]


def _unanswered(call_id: str) -> str:
    return f"call {call_id!r} has no result"
