"""Transcripts on their way to and from a wire form: what every provider needs, as pure functions.

One leading system prompt, every call answered exactly once and in order, call ids an API accepts, text that UTF-8 can carry.
Only the request is changed, never the transcript.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import FilePart, ImagePart, Message, ToolCall
from lousho_ray.ports import ToolDefinition

Warn: TypeAlias = Callable[[str, str], None]
"""`warn(key, text)`: tells the user once per key."""

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
encode_json_sorted = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode

_LEGAL_ID = re.compile(r"[A-Za-z0-9_-]+")
_NAME_CHARS = 64
_MISTRAL_CHARS = 9
_MAGIC = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG\r\n\x1a\n", "image/png"), (b"GIF87a", "image/gif"), (b"GIF89a", "image/gif"))


def split_system(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    """The text of all system messages, joined by blank lines, and the other messages in their order."""
    if messages and messages[0].role == "system" and all(message.role != "system" for message in messages[1:]):
        return clean_text(messages[0].text), messages[1:]
    texts = [text for message in messages if message.role == "system" and (text := message.text)]
    return clean_text("\n\n".join(texts)), [message for message in messages if message.role != "system"]


def clean_text(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD, so that UTF-8 can carry it."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class TextJoiner:
    """Streamed text whose surrogate pairs may be cut between two fragments."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """`text`, cleaned; a high surrogate at its end is held back until its other half comes."""
        if not self._held and text.isascii():
            return text
        text = self._held + text
        self._held = ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._held, text = text[-1], text[:-1]
        return clean_text(text)

    def close(self) -> str:
        """What was held back and stays alone."""
        held, self._held = self._held, ""
        return clean_text(held)


def text_parts(message: Message) -> str:
    """The text of a message, safe to send."""
    return clean_text(message.text)


def image_type(part: ImagePart, position: int | None = None) -> str:
    """The media type of an image given as bytes.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` when the bytes are none of jpeg, png, gif and webp and no type is given.
    """
    if part.mime_type is not None:
        return part.mime_type
    if isinstance(part.image, str):
        raise TypeError("a URL has no bytes to tell its media type from")
    data = bytes(part.image[:16])
    for magic, mime_type in _MAGIC:
        if data.startswith(magic):
            return mime_type
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    where = "" if position is None else f" in messages[{position}]"
    raise ConfigurationError(
        f"The bytes of an image{where} are no JPEG, PNG, GIF or WebP; say what they are with ImagePart(data, mime_type=...).",
        code="LOUSHO_CONFIG_INVALID",
        field="messages" if position is None else f"messages[{position}]",
    )


def data_url(data: bytes, mime_type: str) -> str:
    return f"data:{mime_type};base64,{base64.b64encode(data).decode('ascii')}"


def image_url(part: ImagePart, position: int | None = None) -> str:
    """The URL of an image: its own, or a `data:` URL of its bytes."""
    if isinstance(part.image, str):
        return part.image
    return data_url(bytes(part.image), image_type(part, position))


def file_note(part: FilePart) -> str:
    """The text that stands for a file which is not sent."""
    return f"[file {clean_text(part.filename or 'unnamed')} ({part.mime_type}) not sent]"


def unsupported_content(provider: str, what: str) -> ConfigurationError:
    """The error for a part that a provider cannot carry (`LOUSHO_UNSUPPORTED_CONTENT`)."""
    return ConfigurationError(
        f'{provider} cannot carry {what}; send it as text, use a provider that can, or pass unsupported_files="note" to the'
        " provider to send a note in its place.",
        code="LOUSHO_UNSUPPORTED_CONTENT",
        field="messages",
    )


# ------------------------------------------------------------------------------------------------------------------ tool calls


def call_arguments(value: Any) -> str:
    """The argument text of a call as a server sent it: blank and missing mean `{}`, an object is written as JSON."""
    if isinstance(value, str):
        return clean_text(value) if value.strip() else "{}"
    return "{}" if value is None else clean_text(encode_json(value))


def arguments_object(arguments: str) -> str:
    """Argument text to send back: itself when it is a JSON object, else `{}`. Servers refuse every later request of a
    conversation that holds anything else."""
    try:
        value = _decode_json(arguments)
    except (ValueError, RecursionError):
        return "{}"
    return clean_text(arguments) if isinstance(value, dict) else "{}"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode_json = json.JSONDecoder(parse_constant=_refuse_constant).decode


def wire_id(call_id: str, max_chars: int = 64) -> str:
    """`call_id` in the alphabet `[A-Za-z0-9_-]` and at most `max_chars` long: itself when it is, else a hash of it, which is
    the same for a call and its result, today and tomorrow."""
    if 0 < len(call_id) <= max_chars and _LEGAL_ID.fullmatch(call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"call_{digest[:24]}"


def mistral_id(call_id: str) -> str:
    """`call_id` as Mistral wants it, nine letters and digits: itself when it is that, else a hash of it."""
    if len(call_id) == _MISTRAL_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_MISTRAL_CHARS]


def wire_name(name: str) -> str:
    """A tool name an API accepts (`[A-Za-z0-9_-]`, at most 64 long): models make up others, and they stay in the transcript."""
    if 0 < len(name) <= _NAME_CHARS and _LEGAL_ID.fullmatch(name):
        return name
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_NAME_CHARS] or "unknown"


class CallNamer:
    """Gives the calls of one reply ids that are unique in it and in the transcript.

    A missing, blank or taken id becomes `call_<n>`; a call that was sent twice (same id, name and arguments) is one call.
    """

    __slots__ = ("_count", "_messages", "_seen", "_taken")

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._messages = messages
        self._taken: set[str] | None = None  # a transcript is only walked when there are calls
        self._seen: set[tuple[str, str, str]] = set()
        self._count = 0

    def name(self, call: ToolCall) -> ToolCall | None:
        """The call under its own or a new id; `None` for one that was sent before."""
        if self._taken is None:
            self._taken = {known.id for message in self._messages for known in message.tool_calls}
        given = bool(call.id.strip())
        same = (call.id, call.name, call.arguments)
        if given and same in self._seen:
            return None
        self._seen.add(same)
        if not given or call.id in self._taken:
            call = ToolCall(_free_id(self._taken, self._count), call.name, call.arguments)
        self._count += 1
        self._taken.add(call.id)
        return call


def unique_calls(calls: Iterable[ToolCall], messages: Sequence[Message] = ()) -> tuple[ToolCall, ...]:
    """The calls of one whole reply, as `CallNamer` names them."""
    namer = CallNamer(messages)
    return tuple(named for call in calls if (named := namer.name(call)) is not None)


def settled_calls(
    reason: str,
    calls: tuple[ToolCall, ...],
    completion_tokens: int | None = None,
    max_tokens: int | None = None,
    *,
    cut: bool = False,
) -> tuple[str, tuple[ToolCall, ...]]:
    """The finish reason of a reply and the calls of it that may run.

    Calls decide (`stop` next to calls is common), with two exceptions. A filtered reply runs nothing. And a reply that the token
    limit ended inside a call is `length`, whatever reason it gives, and runs nothing either, not even its whole calls: what the
    model asked for is not all there. That is told by the last call's arguments, or by the server (`cut`).
    """
    if cut and reason != "content_filter":
        return "length", ()
    if not calls or reason == "content_filter":
        return ("other" if reason == "tool_calls" and not calls else reason), ()
    at_limit = reason == "length" or (max_tokens is not None and completion_tokens is not None and completion_tokens >= max_tokens)
    if at_limit and not _is_json(calls[-1].arguments):
        return "length", ()
    return "tool_calls", calls


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except RecursionError:  # nested too deeply for us, but not cut off
        return True
    except ValueError:
        return False
    return True


def _free_id(taken: set[str], start: int) -> str:
    number = start
    while f"call_{number}" in taken:
        number += 1
    return f"call_{number}"


def stand_ins(messages: Sequence[Message]) -> tuple[ToolDefinition, ...]:
    """Definitions of the tools that a transcript calls, for a request without tools: Claude refuses calls of undefined tools."""
    called = {wire_name(call.name) for message in messages for call in message.tool_calls}
    return tuple(ToolDefinition(name, "Cannot be called now.", {"type": "object", "properties": {}}) for name in sorted(called))


def paired(messages: Sequence[Message]) -> bool:
    """Whether every call is answered exactly once, in call order, before anything else."""
    waiting: list[str] = []
    for message in messages:
        if message.role == "tool":
            if not waiting or message.tool_call_id != waiting.pop():
                return False
        elif waiting:
            return False
        elif message.tool_calls:
            waiting = [call.id for call in reversed(message.tool_calls)]
            if "" in waiting or len(set(waiting)) != len(waiting):
                return False
    return not waiting


def repair_pairs(messages: Sequence[Message], warn: Warn) -> Sequence[Message]:
    """The messages with every call answered once: results put in call order, missing ones sent as `not-run` errors, orphans
    dropped, doubled ids renamed. The messages themselves when nothing is wrong."""
    if paired(messages):
        return messages
    results: dict[str, deque[tuple[int, Message]]] = {}
    for index, message in enumerate(messages):
        if message.role == "tool":
            results.setdefault(message.tool_call_id or "", deque()).append((index, message))
    repaired: list[Message] = []
    for index, message in enumerate(messages):
        if message.role == "tool":
            continue
        calls = unique_calls_in_place(message.tool_calls)
        repaired.append(message if calls == message.tool_calls else message.with_(tool_calls=calls))
        for old, call in zip(message.tool_calls, calls, strict=True):
            repaired.append(_result_for(old, call, index, results, warn))
    for call_id, orphans in results.items():
        if orphans:
            warn(f"orphan:{call_id}", f"The result of tool call {call_id!r} has no call in the transcript; it was not sent.")
    return repaired


def unique_calls_in_place(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    """The same calls with missing and doubled ids renamed."""
    taken = {call.id for call in calls}
    seen: set[str] = set()
    renamed: list[ToolCall] = []
    for position, call in enumerate(calls):
        if not call.id or call.id in seen:
            call = ToolCall(_free_id(taken, position), call.name, call.arguments)
            taken.add(call.id)
        seen.add(call.id)
        renamed.append(call)
    return tuple(renamed)


def _result_for(
    old: ToolCall, call: ToolCall, index: int, results: Mapping[str, deque[tuple[int, Message]]], warn: Warn
) -> Message:
    waiting = results.get(old.id, deque())
    later = next((entry for entry in waiting if entry[0] > index), None)
    if later is not None:
        waiting.remove(later)
        found = later[1]
        return found if found.tool_call_id == call.id else found.with_(tool_call_id=call.id)
    warn(f"unanswered:{old.id}", f"Tool call {old.id!r} ({call.name}) has no result in the transcript; it was sent as not run.")
    error = {"error": "ToolNotRunError", "toolName": call.name, "message": "The call was not run.", "kind": "not-run"}
    return Message("tool", encode_json(error), tool_call_id=call.id, tool_name=call.name, is_error=True)
