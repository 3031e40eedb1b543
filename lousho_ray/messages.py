"""Messages: what a conversation is made of.

A `Message` is frozen, so that a provider may keep the wire form it made of one beside it (`wire_cache`) and encode only what a
step added. Nobody but a provider file knows a wire form; `to_dict` / `from_dict` are the form that stores and checkpoints keep
(camelCase keys, bytes as `{"$bytes": "<base64>"}`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A run of text inside a message."""

    text: str
    type: Literal["text"] = "text"


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image: an http(s) or `data:` URL, or the bytes themselves. Without `mime_type`, bytes are sniffed by the provider."""

    image: str | bytes
    mime_type: str | None = None
    type: Literal["image"] = "image"


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file: a URL or its bytes, with its media type."""

    data: str | bytes
    mime_type: str
    filename: str | None = None
    type: Literal["file"] = "file"


ContentPart: TypeAlias = TextPart | ImagePart | FilePart
Content: TypeAlias = str | tuple[ContentPart, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the model asked for. `arguments` is the JSON text as the model wrote it, which need not be valid JSON."""

    id: str
    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class ReasoningBlock:
    """Reasoning of the model. Only signed or redacted blocks are ever sent back, and only to the `provider` that made them."""

    text: str = ""
    signature: str | None = None
    redacted_data: str | None = None
    provider: str | None = None
    model: str | None = None

    @property
    def replayable(self) -> bool:
        return self.signature is not None or self.redacted_data is not None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a transcript.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: Text, or a tuple of parts. Only user messages carry images and files.
        tool_calls: The calls of an assistant message, in the model's order.
        tool_call_id: For a tool message, the call it answers.
        tool_name: For a tool message, the tool's name.
        is_error: For a tool message, whether the call failed.
        reasoning: Signed or redacted reasoning of an assistant tool-call turn.
        metadata: Never sent to a provider; kept by stores.
    """

    role: Role
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tool_name: str | None = None
    is_error: bool = False
    reasoning: tuple[ReasoningBlock, ...] = ()
    metadata: Mapping[str, Any] | None = None
    wire_cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The text parts joined."""
        content = self.content
        if isinstance(content, str):
            return content
        return "".join(part.text for part in content if isinstance(part, TextPart))

    def with_(self, **changes: Any) -> Message:
        """A copy with some fields changed (and an empty wire cache)."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form; a round trip through `json` and `from_dict` gives an equal message."""
        data: dict[str, Any] = {"role": self.role, "content": _content_to_json(self.content)}
        if self.tool_calls:
            data["toolCalls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in self.tool_calls]
        if self.tool_call_id is not None:
            data["toolCallId"] = self.tool_call_id
        if self.tool_name is not None:
            data["toolName"] = self.tool_name
        if self.is_error:
            data["isError"] = True
        if self.reasoning:
            data["reasoning"] = [_reasoning_to_json(block) for block in self.reasoning]
        if self.metadata is not None:
            data["metadata"] = encode_bytes(dict(self.metadata))
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:
        """Rebuilds a message from `to_dict()`'s form. Fields that an older version did not write are taken as unset."""
        metadata = data.get("metadata")
        return cls(
            role=data["role"],
            content=_content_from_json(data.get("content", "")),
            tool_calls=tuple(ToolCall(c["id"], c["name"], c.get("arguments", "{}")) for c in data.get("toolCalls", ())),
            tool_call_id=data.get("toolCallId"),
            tool_name=data.get("toolName"),
            is_error=bool(data.get("isError", False)),
            reasoning=tuple(_reasoning_from_json(block) for block in data.get("reasoning", ())),
            metadata=None if metadata is None else cast("dict[str, Any]", decode_bytes(metadata)),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The wire cache stays in its process: it is rebuilt where it is needed and would only make the pickle larger.
        fields = (self.role, self.content, self.tool_calls, self.tool_call_id, self.tool_name, self.is_error, self.reasoning)
        return (Message, (*fields, None if self.metadata is None else dict(self.metadata)))


def system(text: str) -> Message:
    return Message("system", text)


def user(content: str | Sequence[ContentPart], **metadata: Any) -> Message:
    return Message("user", content if isinstance(content, str) else tuple(content), metadata=metadata or None)


def assistant(text: str = "", tool_calls: Iterable[ToolCall] = (), reasoning: Iterable[ReasoningBlock] = ()) -> Message:
    return Message("assistant", text, tool_calls=tuple(tool_calls), reasoning=tuple(reasoning))


def tool_result(call: ToolCall, content: str, *, is_error: bool = False, metadata: Mapping[str, Any] | None = None) -> Message:
    """The tool message that answers `call`; `content` is the result's JSON text."""
    return Message("tool", content, tool_call_id=call.id, tool_name=call.name, is_error=is_error, metadata=metadata)


def text_of(message: Message) -> str:
    """The text parts of a message, joined."""
    return message.text


def unanswered_calls(messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """The calls of the last assistant message that have no result yet, in call order."""
    answered: set[str] = set()
    for message in reversed(messages):
        if message.role == "tool" and message.tool_call_id is not None:
            answered.add(message.tool_call_id)
        elif message.role == "assistant":
            return tuple(call for call in message.tool_calls if call.id not in answered)
        elif message.role == "user":
            return ()
    return ()


def complete_prefix(messages: Sequence[Message]) -> list[Message]:
    """The longest prefix in which every assistant tool call has its result: what every provider accepts."""
    end, open_calls = 0, set[str]()
    for index, message in enumerate(messages):
        if message.role == "assistant":
            open_calls = {call.id for call in message.tool_calls}
        elif message.role == "tool" and message.tool_call_id is not None:
            open_calls.discard(message.tool_call_id)
        if not open_calls:
            end = index + 1
    return list(messages[:end])


def encode_bytes(value: Any) -> Any:
    """Replaces bytes by `{"$bytes": base64}`; a user's own `{"$bytes": ...}` becomes `{"$escape": {"$bytes": ...}}`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(bytes(value)).decode("ascii")}
    if isinstance(value, Mapping):
        encoded = {str(key): encode_bytes(item) for key, item in value.items()}
        return {"$escape": encoded} if len(encoded) == 1 and next(iter(encoded)) in {"$bytes", "$escape"} else encoded
    if isinstance(value, list | tuple):
        return [encode_bytes(item) for item in value]
    return value


def decode_bytes(value: Any) -> Any:
    """The inverse of `encode_bytes`."""
    if isinstance(value, Mapping):
        if len(value) == 1:
            key, item = next(iter(value.items()))
            if key == "$bytes" and isinstance(item, str):
                return base64.b64decode(item)
            if key == "$escape" and isinstance(item, Mapping):
                return {inner: decode_bytes(content) for inner, content in item.items()}
        return {key: decode_bytes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_bytes(item) for item in value]
    return value


def _content_to_json(content: Content) -> Any:
    return content if isinstance(content, str) else [_part_to_json(part) for part in content]


def _part_to_json(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        data: dict[str, Any] = {"type": "image", "image": encode_bytes(part.image)}
        return data if part.mime_type is None else {**data, "mimeType": part.mime_type}
    data = {"type": "file", "data": encode_bytes(part.data), "mimeType": part.mime_type}
    return data if part.filename is None else {**data, "filename": part.filename}


def _content_from_json(content: Any) -> Content:
    return content if isinstance(content, str) else tuple(part_from_json(part) for part in content or ())


def part_from_json(part: Mapping[str, Any]) -> ContentPart:
    """A content part from its JSON form (`mimeType` or `mime_type`). Raises `ValueError` naming an unknown type."""
    kind, mime_type = part.get("type"), part.get("mimeType", part.get("mime_type"))
    if kind == "text":
        return TextPart(part["text"])
    if kind == "image":
        return ImagePart(decode_bytes(part["image"]), mime_type)
    if kind == "file":
        return FilePart(decode_bytes(part["data"]), mime_type or "application/octet-stream", part.get("filename"))
    raise ValueError(f"unknown content part type {kind!r}; a part is 'text', 'image' or 'file'")


def _reasoning_to_json(block: ReasoningBlock) -> dict[str, Any]:
    pairs = {
        "text": block.text,
        "signature": block.signature,
        "redactedData": block.redacted_data,
        "provider": block.provider,
        "model": block.model,
    }
    return {key: value for key, value in pairs.items() if value is not None}


def _reasoning_from_json(data: Mapping[str, Any]) -> ReasoningBlock:
    return ReasoningBlock(
        data.get("text", ""), data.get("signature"), data.get("redactedData"), data.get("provider"), data.get("model")
    )
