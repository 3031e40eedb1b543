"""Policies for `needs_approval`, and the memory of what a person has approved: marks in the metadata of tool messages.

The memory is part of the transcript: it survives restarts, and is gone when the conversation is cleared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import Message
from lousho_ray.ports import ToolContext

MARK = "approval"
"""The key of the mark in a tool message's metadata: `{"approved": True, "argsKey", "by"?, "edited"?, "remember"?}`."""


@dataclass(slots=True)
class ApprovalContext(ToolContext):
    """The second argument of a `needs_approval` function. `messages` also has the results of earlier calls of the turn."""

    tool_name: str = ""
    args: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Once:
    """Made by `once()`."""

    per: Literal["args"] | None = None

    def __call__(self, args: Any, ctx: ApprovalContext) -> bool:
        wanted = arguments_key(ctx.args or {}) if self.per == "args" else None
        marks = _marks(ctx.messages, ctx.tool_name)
        return not any(wanted is None or mark.get("argsKey") == wanted for mark in marks)


@dataclass(frozen=True, slots=True)
class Always:
    """Made by `always(by="other")`."""

    by: Literal["other"]

    def __call__(self, args: Any) -> bool:
        return True


def always(by: Literal["other"] | None = None) -> bool | Always:
    """Every call of the tool needs a person; with `by="other"` another one than the principal that the run acts for.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for any other `by`.
    """
    if by not in (None, "other"):
        raise ConfigurationError(f'by must be "other" or left out; got {by!r}.', field="by")
    return True if by is None else Always(by)


def never() -> bool:
    """No call of the tool needs a person."""
    return False


def once(per: Literal["args"] | None = None) -> Once:
    """The first call of the tool in a conversation needs a person; with `per="args"` the first one with these arguments.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for any other `per`.
    """
    if per not in (None, "args"):
        raise ConfigurationError(f'per must be "args" or left out; got {per!r}.', field="per")
    return Once(per)


def remembered(messages: Sequence[Message], tool_name: str, args: Mapping[str, Any]) -> bool:
    """Whether a person who approved an earlier call said that this one needs no approval."""
    wanted = None
    for mark in _marks(messages, tool_name):
        if mark.get("remember") == "tool":
            return True
        if mark.get("remember") == "args":
            wanted = wanted or arguments_key(args)
            if mark.get("argsKey") == wanted:
                return True
    return False


def approval_mark(args: Mapping[str, Any], *, by: str | None, edited: bool, remember: str | None) -> dict[str, Any]:
    """The mark of a call that ran with `args` because a person approved it."""
    mark = {"approved": True, "argsKey": arguments_key(args), "by": by, "edited": edited or None, "remember": remember}
    return {key: value for key, value in mark.items() if value is not None}


def canonical(value: Any) -> str:
    """Arguments as JSON with sorted keys: equal arguments are equal texts."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def arguments_key(args: Mapping[str, Any]) -> str:
    """A short name of the arguments, which does not tell them."""
    return hashlib.sha256(canonical(dict(args)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _marks(messages: Sequence[Message], tool_name: str) -> list[Mapping[str, Any]]:
    found = []
    for message in messages:
        if message.role == "tool" and message.metadata and message.tool_name == tool_name:
            mark = message.metadata.get(MARK)
            if isinstance(mark, Mapping) and mark.get("approved") is True:
                found.append(mark)
    return found
