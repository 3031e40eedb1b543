"""Anthropic's Messages API: the content blocks of a user message."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from lousho_ray.messages import FilePart, ImagePart, Message, TextPart
from lousho_ray.providers.transcript import Warn, clean_text, encode_json, file_note, image_type, unsupported_content


@dataclass(frozen=True, slots=True)
class FileRule:
    """What happens to files and images: PDF and text files are sent when `native`; what cannot be sent is replaced by a note when
    `note`, else refused with an error."""

    native: bool = True
    note: bool = False


def encode_block(block: Mapping[str, Any]) -> str:
    """JSON that UTF-8 can carry."""
    return clean_text(encode_json(block))


def text_block(text: str) -> str:
    return encode_block({"type": "text", "text": text})


def user_blocks(message: Message, rule: FileRule, position: int | None, warn: Warn) -> Iterable[str]:
    """The encoded blocks of a user message, in order. `position` names the message in errors."""
    if isinstance(message.content, str):
        if message.content.strip():
            yield text_block(message.content)
        return
    for part in message.content:
        if isinstance(part, TextPart):
            if part.text.strip():
                yield text_block(part.text)
        elif isinstance(part, ImagePart):
            yield _image_block(part, rule, position, warn)
        else:
            yield _file_block(part, rule, warn)


def _image_block(part: ImagePart, rule: FileRule, position: int | None, warn: Warn) -> str:
    source: dict[str, Any]
    if not isinstance(part.image, str):
        data = base64.b64encode(part.image).decode("ascii")
        source = {"type": "base64", "media_type": image_type(part, position), "data": data}
    elif part.image.startswith("data:"):
        media_type, data = read_data_url(part.image)
        source = {"type": "base64", "media_type": part.mime_type or media_type, "data": data}
    elif part.image.startswith("https:"):
        source = {"type": "url", "url": part.image}
    else:
        url = clean_text(part.image)
        return _instead(f"[image {url} not sent]", f"an image at {url} (only https URLs, data: URLs and bytes)", rule, warn)
    return encode_block({"type": "image", "source": source})


def read_data_url(url: str) -> tuple[str, str]:
    """The media type and the base64 data of a `data:` URL."""
    head, _, data = url.removeprefix("data:").partition(",")
    media_type = head.split(";")[0] or "text/plain"
    if ";base64" in head:
        return media_type, data
    return media_type, base64.b64encode(unquote_to_bytes(data)).decode("ascii")


def _file_block(part: FilePart, rule: FileRule, warn: Warn) -> str:
    source: dict[str, Any] | None = None
    if rule.native and part.mime_type == "application/pdf":
        if isinstance(part.data, str) and not part.data.startswith("data:"):
            source = {"type": "url", "url": part.data}
        else:
            data = read_data_url(part.data)[1] if isinstance(part.data, str) else base64.b64encode(part.data).decode("ascii")
            source = {"type": "base64", "media_type": part.mime_type, "data": data}
    elif rule.native and part.mime_type.startswith("text/") and not isinstance(part.data, str):
        source = {"type": "text", "media_type": "text/plain", "data": part.data.decode("utf-8", "replace")}
    if source is None:
        return _instead(file_note(part), f"a file of type {part.mime_type}", rule, warn)
    title = {"title": part.filename} if part.filename else {}
    return encode_block({"type": "document", "source": source, **title})


def _instead(note: str, what: str, rule: FileRule, warn: Warn) -> str:
    if not rule.note:
        raise unsupported_content("Anthropic", what)
    warn("unsupported-part", f"Anthropic was not sent {what}; a note stands in its place.")
    return text_block(note)
