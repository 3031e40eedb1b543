"""What of a transcript may be changed: everything before its protected tail, in units that belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lousho_ray.context.pins import is_pinned
from lousho_ray.messages import Message


@dataclass(frozen=True, slots=True)
class Unit:
    """The messages `start` to `end` (exclusive): one message, or an assistant turn with all results of its calls."""

    start: int
    end: int


def tail_start(messages: Sequence[Message], protected_tokens: int, count: Callable[[Sequence[Message]], int]) -> int:
    """The index where the protected tail begins.

    The tail holds the newest messages that fit into `protected_tokens`, the last message, and everything after the last assistant
    message: results that the model has not read yet are never changed.
    """
    start, left = len(messages), protected_tokens
    while start > 0:
        left -= count(messages[start - 1 : start])
        if left < 0:
            break
        start -= 1
    assistants = (index for index in range(len(messages) - 1, -1, -1) if messages[index].role == "assistant")
    return max(0, min(start, next(assistants, -1) + 1, len(messages) - 1))


def units_of(messages: Sequence[Message]) -> list[Unit]:
    """The units of a transcript, in order. A cut between two units never parts a call from its result."""
    units: list[Unit] = []
    open_calls: set[str | None] = set()
    for index, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id in open_calls:
            units[-1] = Unit(units[-1].start, index + 1)
            continue
        open_calls = {call.id for call in message.tool_calls}
        units.append(Unit(index, index + 1))
    return units


def foldable_units(messages: Sequence[Message], tail: int) -> list[Unit]:
    """The units wholly before the tail that a summary may replace: no system message and nothing pinned."""
    return [
        unit
        for unit in units_of(messages)
        if unit.end <= tail and messages[unit.start].role != "system" and not any(map(is_pinned, messages[unit.start : unit.end]))
    ]
