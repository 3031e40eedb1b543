"""The JSON that stores keep: strict, exact, and never anything but plain data.

Numbers that JSON does not know (NaN, infinity) and objects that are not JSON are refused before the old record is touched, by key
path. Reading never builds anything but dicts, lists, strings, numbers, booleans and None, so a record cannot run code.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from lousho_ray.errors import ConfigurationError, StorageError
from lousho_ray.messages import ContentPart, FilePart, ImagePart, Message, Role, TextPart

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ASCII_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))

SPLIT_CHARS = 1_000
"""A list of a record is kept element by element once its JSON is longer than this."""


class FixedJson(dict[str, Any]):
    """A JSON object that nobody changes any more: its text is made once, however many records it is a part of."""

    __slots__ = ("_text",)
    _text: str

    def text(self, what: str) -> str:
        try:
            known = self._text
        except AttributeError:
            known = self._text = dumps(dict(self), what)
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


def dumps(value: Any, what: str) -> str:
    """The JSON text of `value`; `what` names it in errors, for example `checkpoint 'trip'`.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED` naming the key path of what is not JSON.
    """
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(f"{what} cannot be stored: {_fault(value) or error}") from error
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair is no UTF-8, but JSON has an escape for it: what a tool returned must come back as it was.
        return _ASCII_ENCODER.encode(value)
    return text


def loads(text: str, what: str, path: str | None = None) -> Any:
    """Reads what `dumps` wrote.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the text is damaged.
    """
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise damaged(what, f"it is not JSON ({error})", path) from error


def read_object(text: str, what: str, path: str | None = None) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the text is damaged.
    """
    found = loads(text, what, path)
    if not isinstance(found, dict):
        raise damaged(what, "it is no JSON object", path)
    return found


def damaged(what: str, why: str, path: str | None = None) -> StorageError:
    """The error of a record that no version of this package wrote."""
    return StorageError(f"{what}{f' in {path}' if path else ''} is damaged: {why}.", path=path)


def _fault(value: Any, path: str = "", depth: int = 0) -> str | None:
    """The first thing inside `value` that is not JSON, with the path of keys that leads to it."""
    place = path or "the value"
    if depth > 200:
        return f"{place[:80]} is nested too deeply or contains itself."
    if isinstance(value, float) and not math.isfinite(value):
        return f"{place} is {value}, which JSON has no number for; use None or a string."
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str | int | float | None):
                return f"{place} has a key of type {type(key).__name__}; keys are strings."
            if fault := _fault(item, f"{path}.{key}" if path else str(key), depth + 1):
                return fault
        return None if isinstance(value, dict) else f"{place} is a {type(value).__name__}; use a dict."
    if isinstance(value, list | tuple):
        return next((fault for i, item in enumerate(value) if (fault := _fault(item, f"{path}[{i}]", depth + 1))), None)
    hint = "write bytes as {'$bytes': base64}, as encode_bytes() does" if isinstance(value, bytes | bytearray) else "use plain data"
    return f"{place} is a {type(value).__name__}, which is not JSON; {hint}."


# ------------------------------------------------------------------------------------------------------------------ messages


def own(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with metadata of their own. A `Message` is frozen, so only its metadata has to be copied."""
    for index, message in enumerate(messages):
        if not isinstance(message, Message):
            raise ConfigurationError(
                f"messages[{index}] is a {type(message).__name__}; save Message objects (Message.from_dict() makes one of a dict).",
                field="messages",
            )
    return tuple(m if m.metadata is None else m.with_(metadata=copy.deepcopy(dict(m.metadata))) for m in messages)


def encode_message(message: Message, what: str) -> str:
    """The JSON of a message, made once per message; of one with metadata each time, because that may have changed."""
    if message.metadata is not None:
        return dumps(message.to_dict(), what)
    cache = message.wire_cache
    fixed: FixedJson | None = cache.get(_FIXED)
    if fixed is not None:
        return fixed.text(what)
    text: str | None = cache.get(_TEXT)
    if text is None:
        text = cache[_TEXT] = dumps(message.to_dict(), what)
    return text


def fixed_message(message: Message) -> FixedJson:
    """A message's JSON form as a part of records, made once per message."""
    cache = message.wire_cache
    made: FixedJson | None = cache.get(_FIXED)
    if made is None:
        made = FixedJson(message.to_dict())
        if (text := cache.pop(_TEXT, None)) is not None:
            made._text = text
        cache[_FIXED] = made
    return made


_TEXT, _FIXED = "json", "checkpoint"
"""Where the two are kept beside a message."""


def decode_message(text: str, what: str, path: str | None = None) -> Message:
    data = loads(text, what, path)
    try:
        return read_message(data)
    except MALFORMED as error:
        raise damaged(what, f"a message has no valid form ({error!r})", path) from error


MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading a record raises that has another form than the one that is written."""


def read_message(data: Any) -> Message:
    """A message from its stored form, and nothing that no version ever wrote: `Message.from_dict` looks less closely.

    Raises:
        One of `MALFORMED`.
    """
    message = Message.from_dict(data)
    if message.role not in _ROLES:
        raise ValueError(f"a message has the unknown role {message.role!r}")
    if data.get("content", "") is None or not (isinstance(message.content, str) or all(map(_is_part, message.content))):
        raise TypeError("the content of a message is neither a text nor a list of parts")
    for call in message.tool_calls:
        _check_texts(call.id, call.name, call.arguments)
    for block in message.reasoning:
        _check_texts(block.text, block.signature, block.redacted_data, block.provider, block.model)
    _check_texts(message.tool_call_id, message.tool_name)
    if not isinstance(data.get("isError", False), bool):
        raise TypeError("isError of a message is no boolean")
    if message.metadata is not None and not isinstance(message.metadata, dict):
        raise TypeError("the metadata of a message is no object")
    return message


_ROLES = get_args(Role)


def _is_part(part: ContentPart) -> bool:
    match part:
        case TextPart():
            return isinstance(part.text, str)
        case ImagePart():
            return isinstance(part.image, str | bytes) and isinstance(part.mime_type, str | None)
        case FilePart():
            named = all(isinstance(text, str | None) for text in (part.mime_type, part.filename))
            return named and isinstance(part.data, str | bytes)


def _check_texts(*values: object) -> None:
    for value in values:
        if not isinstance(value, str | None):
            raise TypeError(f"a text of a message is a {type(value).__name__}")


# ------------------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """A JSON object with its long lists taken apart, so that a save which extends a list costs only what is new.

    Attributes:
        head: JSON of the object without the split lists.
        lists: JSON of each element of the split lists.
    """

    head: str
    lists: Mapping[str, tuple[str, ...]]

    def join(self, what: str, path: str | None = None) -> dict[str, Any]:
        """The object again. Every call builds a new one."""
        record = read_object(self.head, what, path)
        for name, elements in self.lists.items():
            record[name] = [loads(element, what, path) for element in elements]
        return record


def split(record: Mapping[str, Any], what: str) -> SplitRecord:
    """Takes `record` apart. Which lists are split depends on their length alone, never on what they mean."""
    head: dict[str, Any] = {}
    short: dict[str, str] = {}
    lists: dict[str, tuple[str, ...]] = {}
    for key, value in record.items():
        if isinstance(value, list | tuple) and value and isinstance(key, str):
            elements = tuple([_element(item, what, key, index) for index, item in enumerate(value)])
            if sum(map(len, elements)) > SPLIT_CHARS:
                lists[key] = elements
            else:
                short[key] = f"[{','.join(elements)}]"
        else:
            head[key] = value
    return SplitRecord(_extended(dumps(head, what), short, what), lists)


def _extended(text: str, texts: Mapping[str, str], what: str) -> str:
    """A JSON object with more keys, whose values are JSON already: nothing is encoded twice."""
    if not texts:
        return text
    more = ",".join([f"{dumps(key, what)}:{value}" for key, value in texts.items()])
    return f"{text[:-1]}{'' if text == '{}' else ','}{more}}}"


def _element(item: Any, what: str, key: str, index: int) -> str:
    where = f"{what}: {key}[{index}]"
    return item.text(where) if type(item) is FixedJson else dumps(item, where)


def common_prefix(old: Sequence[str], new: Sequence[str]) -> int:
    """How many elements at the start are the same."""
    limit = min(len(old), len(new))
    return next((i for i in range(limit) if old[i] != new[i]), limit)
