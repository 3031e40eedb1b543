"""Ollama's own chat API: our messages to the wire and its replies back.

Wire form: https://github.com/ollama/ollama/blob/main/docs/api.md. Arguments of calls are objects in both directions, images bare
base64, a stream is one JSON object a line. A message's encoded form is kept beside it (`Message.wire_cache`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lousho_ray.messages import ImagePart, Message, ReasoningBlock, TextPart, ToolCall
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    Reasoning,
    ReasoningChunk,
    ReasoningEndChunk,
    ServedBy,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers import json_fields
from lousho_ray.providers.transcript import (
    CallNamer,
    TextJoiner,
    Warn,
    arguments_object,
    call_arguments,
    clean_text,
    encode_json,
    encode_json_sorted,
    file_note,
    image_type,
    repair_pairs,
    settled_calls,
    split_system,
    text_parts,
    unsupported_content,
)
from lousho_ray.usage import ProviderUsage

PROVIDER = "ollama"
THINKING_FAMILIES = ("deepseek-r1", "qwen3", "gpt-oss", "magistral")
_SETTINGS = {
    "max_tokens": "num_predict",
    "temperature": "temperature",
    "top_p": "top_p",
    "stop": "stop",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_FINISH = {"": "stop", "stop": "stop", "length": "length"}


# -------------------------------------------------------------------------------------------------------------------- requests


def chat_request(
    options: GenerateOptions,
    model: str,
    warn: Warn,
    *,
    stream: bool,
    files: Literal["note", "error"] = "error",
    context_window: int | None = None,
) -> bytes:
    """The JSON body of a call.

    Args:
        files: What becomes of a file part: a note in its place, or an error.
        context_window: Asked for as `num_ctx`: Ollama's own default is small, and it cuts what does not fit without a word.

    Raises:
        ConfigurationError: `LOUSHO_UNSUPPORTED_CONTENT` for a file, `LOUSHO_CONFIG_INVALID` for image bytes of an unknown type.
    """
    system, turns = split_system(options.messages)
    pieces = [_encode({"role": "system", "content": system})] if system.strip() else []
    pieces += [_encoded(message, options.messages, files, warn) for message in repair_pairs(turns, warn)]
    head: dict[str, Any] = {"model": model, "stream": stream}
    settings = {name: options.settings[key] for key, name in _SETTINGS.items() if key in options.settings}
    if context_window is not None:
        settings["num_ctx"] = context_window
    if settings:
        head["options"] = settings
    if options.response_format is not None:
        head["format"] = options.response_format.schema or "json"
    think = think_for(model, options.reasoning)
    if think is not None:
        head["think"] = think
    if "tool_choice" in options.settings:
        warn("tool_choice", "Ollama has no tool_choice; it was not sent.")
    body = [_encode(head)[:-1], ',"messages":[', ",".join(pieces), "]"]
    if options.tools:
        body += [',"tools":[', ",".join([_encoded_tool(tool) for tool in options.tools]), "]"]
    return "".join([*body, "}"]).encode()


def think_for(model: str, reasoning: Reasoning | None) -> bool | str | None:
    """`think` for a model: a level for `gpt-oss`, else `True`; `None` when it is not to be sent."""
    if reasoning is None or reasoning.effort == "none":
        return None
    name = model.lower()
    if not reasoning.force and not any(family in name for family in THINKING_FAMILIES):
        return None
    if "gpt-oss" not in name:
        return True
    return "low" if reasoning.effort == "minimal" else reasoning.effort


def _encode(value: Mapping[str, Any]) -> str:
    return clean_text(encode_json(value))


def _encoded_tool(tool: ToolDefinition) -> str:
    cached: str | None = tool.wire_cache.get(PROVIDER)
    if cached is None:
        schema = tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}
        function = {"name": tool.name, "description": tool.description, "parameters": schema}
        cached = tool.wire_cache[PROVIDER] = clean_text(encode_json_sorted({"type": "function", "function": function}))
    return cached


def _encoded(message: Message, transcript: Sequence[Message], files: str, warn: Warn) -> str:
    key = PROVIDER if isinstance(message.content, str) else f"{PROVIDER}/{files}"
    cached: str | None = message.wire_cache.get(key)
    if cached is None:
        cached = message.wire_cache[key] = _encode(chat_message(message, transcript, files, warn))
    return cached


def chat_message(message: Message, transcript: Sequence[Message], files: str, warn: Warn) -> dict[str, Any]:
    """One message in Ollama's form. `transcript` is only looked at to name the message of an image that cannot be read."""
    if message.role == "tool":
        return {"role": "tool", "content": text_parts(message), "tool_name": message.tool_name or ""}
    if message.role == "assistant":
        wire: dict[str, Any] = {"role": "assistant", "content": text_parts(message)}
        if message.tool_calls:
            wire["tool_calls"] = [{"function": {"name": c.name, "arguments": _object(c.arguments)}} for c in message.tool_calls]
        return wire
    return _user(message, transcript, files, warn)


def _object(arguments: str) -> Any:
    return json.loads(arguments_object(arguments))


def _user(message: Message, transcript: Sequence[Message], files: str, warn: Warn) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "user", "content": message.content}
    texts: list[str] = []
    images: list[str] = []
    for part in message.content:
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, ImagePart):
            data = _image(part, message, transcript)
            if data is None:
                warn("image-url", "Ollama takes no image URLs; a note was sent in its place. Pass the image's bytes.")
                texts.append(f"[image {part.image!s} not sent]")
            else:
                images.append(data)
        elif files == "note":
            warn("unsupported-part", f"Ollama was not sent a file of type {part.mime_type}; a note stands in its place.")
            texts.append(file_note(part))
        else:
            raise unsupported_content("Ollama", f"a file of type {part.mime_type}")
    wire: dict[str, Any] = {"role": "user", "content": "\n".join(text for text in texts if text)}
    return {**wire, "images": images} if images else wire


def _image(part: ImagePart, message: Message, transcript: Sequence[Message]) -> str | None:
    """The image as bare base64; `None` for one that is only a URL."""
    if not isinstance(part.image, str):
        image_type(part, next((index for index, other in enumerate(transcript) if other is message), None))
        return base64.b64encode(part.image).decode("ascii")
    head, comma, data = part.image.partition(",")
    return data if comma and head.startswith("data:") and head.endswith(";base64") else None


# --------------------------------------------------------------------------------------------------------------------- replies


def chat_usage(fields: Mapping[str, Any]) -> ProviderUsage | None:
    """The counts of a reply; `None` when one of them is missing or both are 0."""
    prompt, completion = json_fields.count(fields.get("prompt_eval_count")), json_fields.count(fields.get("eval_count"))
    if prompt is None or completion is None or prompt + completion == 0:
        return None
    return ProviderUsage(prompt, completion)


@dataclass(slots=True)
class ReplyReader:
    """Reads one reply: the lines of a stream in order, or the one object of a whole reply.

    Attributes:
        model: The model that was asked.
        done: Whether a line said `done`; a stream that ends without it was cut off.
        finish: The last chunk, once `done`.
    """

    model: str
    messages: Sequence[Message] = ()
    done: bool = False
    finish: FinishChunk | None = None
    _calls: list[ToolCall] = field(default_factory=list)
    _text: TextJoiner = field(default_factory=TextJoiner)
    _thought: TextJoiner = field(default_factory=TextJoiner)
    _thinking: bool = False

    def feed(self, line: Mapping[str, Any]) -> list[Chunk]:
        """The chunks of one line. The calls come with the last one, under ids of ours where the server gave none."""
        message = json_fields.mapping(line.get("message"))
        done = line.get("done") is True
        chunks: list[Chunk] = []
        thought = self._thought.push(json_fields.text(message.get("thinking")))
        text = self._text.push(json_fields.text(message.get("content"))) + (self._text.close() if done else "")
        calls = [_call(raw) for raw in json_fields.objects(message.get("tool_calls"))]
        if thought:
            self._thinking = True
            chunks.append(ReasoningChunk(thought))
        if self._thinking and (text or calls or done):
            self._thinking = False
            if rest := self._thought.close():
                chunks.append(ReasoningChunk(rest))
            chunks.append(ReasoningEndChunk())
        if text:
            chunks.append(TextChunk(text))
        self._calls += calls
        return chunks + self._end(line) if done else chunks

    def _end(self, line: Mapping[str, Any]) -> list[Chunk]:
        namer = CallNamer(self.messages)
        named = tuple(call for raw in self._calls if (call := namer.name(raw)) is not None)
        reason = _FINISH.get(json_fields.text(line.get("done_reason")), "other")
        reason, calls = settled_calls(reason, named)
        self.done = True
        self.finish = FinishChunk(
            reason, chat_usage(line), ServedBy(PROVIDER, self.model), json_fields.text(line.get("model")) or None
        )
        return [*(ToolCallChunk(call) for call in calls), self.finish]


def _call(raw: Mapping[str, Any]) -> ToolCall:
    function = json_fields.mapping(raw.get("function"))
    name = clean_text(json_fields.text(function.get("name")))
    return ToolCall(json_fields.text(raw.get("id")), name, call_arguments(function.get("arguments")))


def fold_result(chunks: Sequence[Chunk], raw_response: Any = None) -> GenerateResult:
    """A whole reply from its chunks, the last of which is the finish."""
    finish = chunks[-1]
    assert isinstance(finish, FinishChunk)
    reasoning = "".join(chunk.text for chunk in chunks if isinstance(chunk, ReasoningChunk))
    return GenerateResult(
        text="".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)),
        tool_calls=tuple(chunk.tool_call for chunk in chunks if isinstance(chunk, ToolCallChunk)),
        finish_reason=finish.finish_reason,
        usage=finish.usage,
        reasoning=(ReasoningBlock(reasoning, provider=PROVIDER),) if reasoning else (),
        response_model=finish.response_model,
        served_by=finish.served_by,
        raw_response=raw_response,
    )


class LineDecoder:
    """Splits the bytes of a response into lines; nothing is decoded before its line is complete."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        head, *lines = data.split(b"\n")
        self._rest.append(head)
        if not lines:
            return []
        complete = [b"".join(self._rest), *lines[:-1]]
        self._rest = [lines[-1]]
        return [line for line in complete if line.strip()]

    def close(self) -> list[bytes]:
        rest, self._rest = b"".join(self._rest), []
        return [rest] if rest.strip() else []
