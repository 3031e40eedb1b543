"""The two ends of a durable turn, each in one step, for stores that can change several records at once.

A store offers it as its attribute `turns`. Without it a turn's beginning and end are calls of the three parts, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lousho_ray.messages import Message


class OpenedTurn(NamedTuple):
    """What a turn begins with.

    Attributes:
        fence: The number to save with, or `None` while another holder's lease is live; there is nothing else then.
        messages: The transcript, `None` when it was never saved.
        checkpoint: What an earlier turn from this transcript left behind.
    """

    fence: int | None
    messages: list[Message] | None = None
    checkpoint: dict[str, Any] | None = None


class DurableTurns(Protocol):
    """Both methods do all or nothing."""

    async def open(self, id: str, holder: str, ttl_ms: float, /, opening: Mapping[str, Any] | None = None) -> OpenedTurn:
        """Claims the lease on session `id` and reads its transcript with the checkpoint of the turn that begins there.

        Where there is no checkpoint, `opening` is saved as that, under the key of the turn (which it does not say itself). Sent
        again, the call finds what it has saved.
        """
        ...

    async def end(
        self, id: str, messages: Sequence[Message], /, *, holder: str, fence: int, checkpoint: str, shortened: bool = False
    ) -> None:
        """Saves the transcript, deletes the turn's checkpoint and gives the lease back. Sent again it changes nothing.

        `shortened` deletes the checkpoints of all turns of the session: their lengths come round again.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: `fence` is outdated, or the store failed.
        """
        ...


def turns_of(store: Any) -> DurableTurns | None:
    """What `store` offers, as long as it is about the very parts that the store has: they may have been wrapped."""
    turns: Any = getattr(store, "turns", None)
    parts = (getattr(store, "sessions", None), getattr(store, "checkpoints", None))
    return turns if turns is not None and getattr(turns, "parts", None) == parts else None
