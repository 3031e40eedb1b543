"""Pins: messages that compaction leaves as they are, wherever they stand."""

from __future__ import annotations

from lousho_ray.messages import Message


def pin_message(message: Message) -> Message:
    """A copy of `message` that compaction neither prunes nor summarizes. A pinned tool result keeps its whole turn.

    The mark is `metadata["pinned"]`: it survives stores and is never sent to a model.
    """
    return message.with_(metadata={**(message.metadata or {}), "pinned": True})


def is_pinned(message: Message) -> bool:
    """Whether `pin_message()` marked this message."""
    return message.metadata is not None and message.metadata.get("pinned") is True
