"""What a caller may pass as `input`: text, content parts (one user message), or messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import FilePart, ImagePart, Message, TextPart, part_from_json, user

_PARTS = (TextPart, ImagePart, FilePart)


def as_messages(input: Any) -> tuple[Message, ...]:
    """The messages that `input` stands for.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_MISSING_INPUT` for `None`, `LOUSHO_CONFIG_INVALID` (`field="input"`) for anything else
            that is not text, parts or messages.
    """
    if input is None:
        raise ConfigurationError("The run has no input: pass a str, content parts or messages.", code="LOUSHO_CONFIG_MISSING_INPUT")
    if isinstance(input, str):
        return (user(input),)
    if isinstance(input, Message):
        return (input,)
    if isinstance(input, _PARTS):
        return (user((input,)),)
    if isinstance(input, Sequence) and not isinstance(input, bytes | bytearray):
        items = tuple(input)
        if all(isinstance(item, Message) for item in items):
            return items
        if all(isinstance(item, dict) for item in items):
            return _from_dicts(items)
        if all(isinstance(item, _PARTS) for item in items):
            return (user(items),)
    raise ConfigurationError(
        f"input must be a str, a list of content parts or a list of Message, not {_describe(input)}.", field="input"
    )


def _from_dicts(items: tuple[Any, ...]) -> tuple[Message, ...]:
    """Parts (`{"type": "text", ...}`) or messages (`{"role": "user", ...}`) in their JSON form."""
    try:
        if all("role" in item for item in items):
            return tuple(Message.from_dict(item) for item in items)
        return (user(tuple(part_from_json(item) for item in items)),)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigurationError(f"input has a part or message that cannot be read: {error}.", field="input") from error


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of {', '.join(kinds)}"
    return type(value).__name__
