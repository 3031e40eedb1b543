"""Replies: what the fake model says, in no vendor's form; and what the server remembers of what it said."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """One model turn; the server renders it in the wire form of the route that was asked, streamed or not as the request wants.

    Attributes:
        text: The text of the answer.
        tool_calls: `(name, args)` or `(name, args, id)`; `args` a dict or the JSON text itself. Ids are numbered when not given.
        usage: `(prompt_tokens, completion_tokens)`, a mapping sent as the route's own usage object, or `None` for no usage at all.
        finish_reason: In OpenAI's words (`stop`, `length`, `tool_calls`, `content_filter`), translated for the other routes; any
            other text is sent as it is. Default: `tool_calls` with calls, else `stop`.
        reasoning: Reasoning text; Anthropic's gets a signature of this server, Responses' an encrypted form when asked for.
        redacted_reasoning: Data of a `redacted_thinking` block (Anthropic only).
        chunks: The pieces in which the text is streamed; default: its words.
        delay_gate: A gate that is passed before anything is sent.
        model: The model that the answer names; default: the one asked for.
    """

    text: str = ""
    tool_calls: Sequence[tuple[Any, ...]] = ()
    usage: tuple[int, int] | Mapping[str, Any] | None = (10, 5)
    finish_reason: str | None = None
    reasoning: str | None = None
    redacted_reasoning: str | None = None
    chunks: Sequence[str] | None = None
    delay_gate: str | None = None
    model: str | None = None

    @property
    def pieces(self) -> list[str]:
        """The text as it is streamed."""
        return list(self.chunks) if self.chunks is not None else re.findall(r"\s*\S+\s*|\s+", self.text)

    @property
    def full_text(self) -> str:
        return "".join(self.chunks) if self.chunks is not None else self.text

    @property
    def finish(self) -> str:
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a reply with its id; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def input(self) -> Any:
        """The arguments as a value; text that is no JSON stays text."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


@dataclass(slots=True)
class Issued:
    """What the server gave out and may be shown again.

    Attributes:
        signatures: Thinking signature -> its text; `None` when a test registered it without one.
        redacted: Data of redacted thinking blocks.
        encrypted: `encrypted_content` of reasoning items.
        items: Responses item id -> id of the reasoning item it belongs to.
        responses: Response id -> the call ids it asked for.
    """

    signatures: dict[str, str | None] = field(default_factory=dict)
    redacted: set[str] = field(default_factory=set)
    encrypted: set[str] = field(default_factory=set)
    items: dict[str, str | None] = field(default_factory=dict)
    responses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_id(self, prefix: str) -> str:
        return f"{prefix}_{next(self._numbers)}"

    def sign(self, thinking: str) -> str:
        signature = self.new_id("signature")
        self.signatures[signature] = thinking
        return signature

    def new_mistral_id(self) -> str:
        """An id as Mistral makes and demands them: nine letters or digits."""
        return f"{next(self._numbers):09d}"

    def calls(self, reply: Reply, new_id: Callable[[], str]) -> list[Call]:
        """The calls of a reply; those without an id get one from `new_id`."""
        calls = []
        for name, args, *given in reply.tool_calls:
            text = args if isinstance(args, str) else json.dumps(args, ensure_ascii=False)
            calls.append(Call(given[0] if given else new_id(), name, text))
        return calls
