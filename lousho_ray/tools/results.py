"""Tool results: their JSON for the transcript and for events, the cap on what a model reads, and the one shape of a failure."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, TypeAlias, cast
from uuid import UUID

from pydantic import BaseModel

from lousho_ray.errors import ToolArgumentsValidationError, error_name, mask_secrets, message_of
from lousho_ray.messages import ImagePart
from lousho_ray.tools.text import replace_surrogates

MAX_ERROR_CHARS = 2_000
"""How much of a tool's error message a model reads."""

MAX_BASE64_BYTES = 8_192
"""Bytes up to this size are given to the model as base64; of longer ones it is told the size."""

_MAX_DEPTH = 100
_MAX_INT_BITS = 13_000  # Python refuses to print integers of more than 4,300 digits
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
)


@dataclass(frozen=True, slots=True)
class EncodedResult:
    """A tool's result.

    Attributes:
        text: JSON for the transcript; what JSON cannot carry is `null` in it.
        safe: A JSON-safe value for events, where such things are described instead.
        images: Images in the result. A tool message carries text only, so the text names them, and whoever sends the message may
            add them as a user message after all results of the turn.
    """

    text: str
    safe: Any
    images: tuple[ImagePart, ...] = ()


def encode_result(value: Any) -> EncodedResult:
    """Encodes any value. Never raises, and gives the same text for equal values: no memory addresses, sets sorted."""
    if value is None or value is True or value is False:
        return EncodedResult(to_json(value), value)
    if type(value) is str:
        text = replace_surrogates(value)
        return EncodedResult(to_json(text), text)
    encoder = _Encoder(_describe)
    safe = encoder.encode(value)
    shown = _Encoder(lambda _: None).encode(value) if encoder.met_odd else safe
    return EncodedResult(to_json(shown), safe, tuple(encoder.images))


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def to_json(value: Any) -> str:
    """Compact JSON text of a JSON-safe value."""
    return _encode(value)


class _Encoder:
    """Turns values into what JSON can carry. `odd` says what becomes of a value with no JSON form."""

    def __init__(self, odd: Callable[[Any], Any]) -> None:
        self._odd_value = odd
        self._open: set[int] = set()
        self.met_odd = False
        self.images: list[ImagePart] = []

    def encode(self, value: Any) -> Any:
        scalar = _scalar(value)
        if scalar is not _NO_SCALAR:
            return scalar
        if isinstance(value, bytes | bytearray | memoryview):
            return self._bytes(bytes(value))
        if isinstance(value, ImagePart):
            return self._image(value)
        if id(value) in self._open or len(self._open) >= _MAX_DEPTH:
            return self._odd("(circular reference)" if id(value) in self._open else "(nested too deeply)")
        self._open.add(id(value))
        try:
            return self._compound(value)
        except Exception:  # a broken __iter__, __getattr__, to_dict ... of the tool's own classes
            return self._odd(value)
        finally:
            self._open.discard(id(value))

    def _compound(self, value: Any) -> Any:
        parts = _parts(value)
        if parts is not None:
            return self.encode(parts)
        if isinstance(value, Mapping):
            return {_key(key): self.encode(item) for key, item in value.items()}
        if isinstance(value, AbstractSet):
            return sorted((self.encode(item) for item in value), key=to_json)
        if isinstance(value, Collection):
            return [self.encode(item) for item in value]
        return self._odd(value)

    def _odd(self, value: Any) -> Any:
        self.met_odd = True
        return self._odd_value(value)

    def _bytes(self, data: bytes) -> Any:
        mime_type = sniff(data)
        if mime_type.startswith("image/"):
            return self._image(ImagePart(data, mime_type))
        if mime_type == "text/plain":
            return data.decode()
        shown: dict[str, Any] = {"bytes": len(data), "mimeType": mime_type}
        return {**shown, "base64": b64encode(data).decode("ascii")} if len(data) <= MAX_BASE64_BYTES else shown

    def _image(self, image: ImagePart) -> Any:
        self.images.append(image)
        size = {"bytes": len(image.image)} if isinstance(image.image, bytes) else {}
        return {"type": "image", "mimeType": image.mime_type or "image/*", **size}


_NO_SCALAR = object()


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return _scalar(value.value) if _scalar(value.value) is not _NO_SCALAR else value.name
    if isinstance(value, str):
        return replace_surrogates(str(value))
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_INT_BITS else f"(an integer of {value.bit_length()} bits)"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID | Fraction | complex):
        return str(value)
    if isinstance(value, PurePath):
        return replace_surrogates(str(value))
    return _NO_SCALAR


def _parts(value: Any) -> Any:
    """The plain form of a structured value, not yet encoded; `None` for one that is no such thing."""
    if isinstance(value, type):
        return None
    if isinstance(value, BaseModel):
        return _dumped(value)
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return cast("Any", value)._asdict()
    if isinstance(value, BaseException):
        return {"error": type(value).__name__, "message": message_of(value)}
    for method in ("to_dicts", "to_dict", "tolist", "item"):
        if callable(getattr(value, method, None)):
            return _called(value, method)
    attributes = getattr(type(value), "__attrs_attrs__", None)
    return None if attributes is None else {item.name: getattr(value, item.name) for item in attributes}


def _dumped(model: BaseModel) -> dict[str, Any]:
    try:
        return model.model_dump(mode="json", by_alias=True, warnings=False)
    except ValueError:  # a field with no JSON form: the others keep theirs
        return model.model_dump(by_alias=True, warnings=False)


def _called(value: Any, method: str) -> Any:
    """Tables as a list of rows, arrays as lists, array scalars as numbers, other objects as their own dict."""
    if method == "to_dict" and hasattr(value, "columns"):
        return value.to_dict(orient="records")
    return getattr(value, method)()


def _key(key: Any) -> str:
    if isinstance(key, str):
        return replace_surrogates(str(_scalar(key)))
    if key is None or isinstance(key, bool | float):
        return json.dumps(key)
    scalar = _scalar(key)
    return _ADDRESS.sub("", str(key)) if scalar is _NO_SCALAR else str(scalar)


def _describe(value: Any) -> str:
    """A text for a value with no JSON form, without a memory address, which would differ at every run."""
    try:
        text = str(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return replace_surrogates(_ADDRESS.sub("", text))


def sniff(data: bytes) -> str:
    """The media type of some bytes: by its first bytes, `text/plain` when it is text, else `application/octet-stream`."""
    for magic, mime_type in _MAGIC:
        if data.startswith(magic):
            return mime_type
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "application/octet-stream" if b"\x00" in data else "text/plain"


# ----------------------------------------------------------------------------------------------------------------------- capping


def cap_result(text: str, max_chars: float, keep: Callable[[str], str] | None = None) -> str:
    """`text`, the JSON of a result, with at most `max_chars` characters of it left (a marker of under 300 comes on top).

    A string is cut as a string, any other value as its JSON text sent as a string, so the outcome is JSON too: 60 % of the
    allowance from its beginning, 40 % from its end. `math.inf` = no cap. `keep` puts the whole text aside before it is cut and
    returns the handle by which `read_result` reads it.
    """
    if len(text) <= max_chars:
        return text
    whole: str = json.loads(text) if text.startswith('"') else text
    if len(whole) <= max_chars:
        return text
    allowance = int(max_chars)
    head = allowance * 6 // 10
    tail = allowance - head
    reason = f"the result is longer than max_tool_result_chars={allowance}"
    advice = "" if keep is None else f"; read_result(handle={keep(whole)!r}, offset={head}) reads the rest"
    marker = f"\n\n[... {len(whole) - allowance} characters left out: {reason}{advice} ...]\n\n"
    return to_json(whole[:head] + marker + whole[len(whole) - tail :])


# ------------------------------------------------------------------------------------------------------------------------ errors

ToolErrorKind: TypeAlias = Literal["execution", "validation", "not-found", "rejected", "not-run", "mcp", "sandbox", "denied"]

ERROR_NAMES: Mapping[ToolErrorKind, str] = {
    "execution": "ToolExecutionError",
    "validation": "ToolArgumentsValidationError",
    "not-found": "ToolNotFoundError",
    "rejected": "ToolRejectedError",
    "not-run": "ToolNotRunError",
    "mcp": "McpToolError",
    "sandbox": "SandboxRequiredError",
    "denied": "ToolDeniedError",
}

MAY_HAVE_HAPPENED = "The call may have taken effect before it failed: check before you repeat it."


class ErrorResult(NamedTuple):
    """A failed call: `text` is its JSON for the transcript, `payload` the same as a dict."""

    text: str
    payload: dict[str, Any]


def error_result(tool: Any, error: BaseException | ToolErrorKind, message: str | None = None, **extras: Any) -> ErrorResult:
    """The one shape in which a failed call reaches the model: `{error, toolName, message, kind, ...extras}`.

    Args:
        tool: The tool, or its name. A failure while a tool ran that is neither read-only nor idempotent says that the call may
            have taken effect, unless the error says otherwise (`without_effect`).
        error: What was raised (its `tool_error_kind` attribute picks the kind), or a kind.
        message: Replaces the exception's own text. Cut at 2,000 characters.
        extras: `note`, `reason`, `issues` and the like; `None` is left out.
    """
    name = tool if isinstance(tool, str) else cast("str", tool.name)
    kind = error if isinstance(error, str) else kind_of(error)
    shown = ERROR_NAMES[kind] if isinstance(error, str) or kind not in {"execution", "mcp"} else _name_of(error)
    if isinstance(error, ToolArgumentsValidationError):
        extras.setdefault("issues", error.issues)
    if kind == "execution" and not isinstance(tool, str) and _may_have_happened(tool, error):
        extras.setdefault("hint", MAY_HAVE_HAPPENED)
    text = message if message is not None else shown if isinstance(error, str) else message_of(error)
    payload = {"error": shown, "toolName": name, "message": _cut(text), "kind": kind}
    payload.update({key: encode_result(extra).safe for key, extra in extras.items() if extra is not None})
    return ErrorResult(to_json(payload), payload)


def _may_have_happened(tool: Any, error: object) -> bool:
    """An error may say with an attribute `without_effect` that the tool stopped before it did anything."""
    return not (tool.read_only or tool.effect == "idempotent" or getattr(error, "without_effect", False))


def kind_of(error: BaseException) -> ToolErrorKind:
    """The kind an exception chose, else `validation` for invalid arguments, else `execution`."""
    chosen = getattr(error, "tool_error_kind", None)
    if chosen in ERROR_NAMES:
        return cast("ToolErrorKind", chosen)
    return "validation" if isinstance(error, ToolArgumentsValidationError) else "execution"


def _name_of(error: BaseException) -> str:
    return getattr(error, "raised", None) or error_name(error)


def _cut(text: str) -> str:
    text = replace_surrogates(mask_secrets(text))
    mark = "... (truncated)"
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - len(mark)] + mark
