"""What a session has spent in all its turns. It stands in the transcript: in the metadata of the newest message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from lousho_ray.messages import Message
from lousho_ray.usage import Spend

SESSION_USAGE = "sessionUsage"
"""The key in a message's metadata."""


@dataclass(frozen=True, slots=True)
class SessionSpend:
    """Tokens, cost, steps and run time of the turns of a session that have ended."""

    spend: Spend = field(default_factory=Spend)
    steps: int = 0
    duration_ms: float = 0.0

    @classmethod
    def of(cls, messages: Sequence[Message]) -> SessionSpend | None:
        """What a transcript says: its newest record, since a fork may end in the middle of a turn. `None` when it keeps none."""
        record = next(filter(None, map(spend_record, reversed(messages))), None)
        if record is None:
            return None
        cost = None if record.get("costUnknown") else Decimal(str(record.get("costUsd", 0)))
        return cls(
            Spend(record.get("inputTokens", 0), record.get("outputTokens", 0), cost),
            record.get("steps", 0),
            record.get("durationMs", 0.0),
        )

    def plus(self, spend: Spend, *, steps: int, duration_ms: float) -> SessionSpend:
        """With one more turn."""
        return SessionSpend(self.spend + spend, self.steps + steps, self.duration_ms + duration_ms)

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form."""
        spend = self.spend
        cost = {"costUnknown": True} if spend.cost is None else {"costUsd": float(spend.cost)}
        return {
            "inputTokens": spend.input_tokens,
            "outputTokens": spend.output_tokens,
            "totalTokens": spend.total_tokens,
            **cost,
            "steps": self.steps,
            "durationMs": self.duration_ms,
        }

    def on(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with this record on the newest of them."""
        if not messages:
            return []
        newest = messages[-1]
        return [*messages[:-1], newest.with_(metadata={**(newest.metadata or {}), SESSION_USAGE: self.to_dict()})]


def spend_record(message: Message) -> Mapping[str, Any] | None:
    """The record that a message carries."""
    record = (message.metadata or {}).get(SESSION_USAGE)
    return record if isinstance(record, Mapping) else None


def without_spend(message: Message) -> Message:
    """The message as it was before a record was put on it."""
    if spend_record(message) is None:
        return message
    kept = {key: value for key, value in (message.metadata or {}).items() if key != SESSION_USAGE}
    return message.with_(metadata=kept or None)
