"""Chat Completions: our messages to the wire and its replies back, as pure functions.

Wire form: https://platform.openai.com/docs/api-reference/chat/create. Servers that copy it differ in details; a `ChatDialect` says
which ones a server has, and the readers accept what servers really send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lousho_ray.messages import ContentPart, FilePart, ImagePart, Message, ReasoningBlock, TextPart, ToolCall
from lousho_ray.ports import GenerateOptions, GenerateResult, ToolDefinition
from lousho_ray.providers import json_fields as fields
from lousho_ray.providers.failures import MalformedReplyError, error_body
from lousho_ray.providers.openai_strict import strict_form
from lousho_ray.providers.transcript import (
    Warn,
    arguments_object,
    call_arguments,
    clean_text,
    data_url,
    encode_json,
    encode_json_sorted,
    file_note,
    image_url,
    mistral_id,
    repair_pairs,
    settled_calls,
    split_system,
    stand_ins,
    text_parts,
    unique_calls,
    unsupported_content,
    wire_id,
    wire_name,
)
from lousho_ray.usage import ProviderUsage

ID_CHARS = 40
"""The longest tool call id that OpenAI's Chat Completions accepts."""

_CACHE_MARK = {"type": "ephemeral"}
_PLAIN_SETTINGS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "stop", "seed")


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """What a server's Chat Completions is like.

    Attributes:
        provider: The provider's name, for messages.
        max_tokens_key: `max_completion_tokens` on OpenAI itself, `max_tokens` elsewhere.
        stream_usage: Whether streams are asked for a usage chunk.
        structured_outputs: How JSON is asked for.
        strict_schemas: Whether a schema that fits OpenAI's strict mode is sent as one to enforce.
        accepts_files: Whether file parts are sent: as bytes, and with `file_urls` as URLs too.
        unsupported_files: What becomes of a file part that is not sent: a note in its place, or an error.
        call_ids: The form of tool call ids: OpenAI's, or Mistral's.
        extra: Body fields of this server, sent with every call.
    """

    provider: str = "openai"
    max_tokens_key: str = "max_tokens"
    stream_usage: bool = True
    structured_outputs: Literal["json_schema", "json_object", "none"] = "json_schema"
    strict_schemas: bool = False
    accepts_files: bool = False
    file_urls: bool = False
    unsupported_files: Literal["error", "note"] = "error"
    call_ids: Literal["openai", "mistral"] = "openai"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cache_key(self) -> str:
        """Under which the encoded form of a message is kept: one per way it may be encoded."""
        return f"chat:{self.accepts_files:d}{self.file_urls:d}:{self.unsupported_files}:{self.call_ids}"

    def call_id(self, call_id: str) -> str:
        """A tool call id as the server accepts it."""
        return mistral_id(call_id) if self.call_ids == "mistral" else wire_id(call_id, ID_CHARS)


# ---------------------------------------------------------------------------------------------------------------- requests


def chat_request(
    options: GenerateOptions,
    model: str,
    dialect: ChatDialect,
    warn: Warn,
    *,
    stream: bool = False,
    extra: Mapping[str, Any] | None = None,
    dropped: Sequence[str] = (),
    cache_marks: bool = False,
) -> bytes:
    """The JSON body of a call.

    Messages and tools are encoded once and kept beside themselves (`wire_cache`); a call only joins them.

    Args:
        extra: More body fields, such as the reasoning effort.
        dropped: Settings the model does not take.
        cache_marks: Marks the cacheable prefix for a Claude model.
    """
    system, turns = split_system(options.messages)
    turns = repair_pairs(turns, warn)
    marked = _last_user(turns) if cache_marks else None
    pieces = [encode_json(_system(system, cache_marks)).encode()] if system else []
    key = dialect.cache_key
    for index, message in enumerate(turns):
        if message.role == "assistant" and not message.tool_calls and not message.text.strip():
            continue  # an empty turn is refused, and so would be every later request of its conversation
        encoded: bytes | None = message.wire_cache.get(key)
        if encoded is None or index == marked:
            wire = chat_message(message, dialect, warn, options.messages)
            encoded = encode_json(_with_mark(wire) if index == marked else wire).encode()
            if index != marked:
                message.wire_cache[key] = encoded
        pieces.append(encoded)
    head, tools = _head(options, model, dialect, stream, extra, dropped), options.tools
    if not tools and "claude" in model.lower() and (called := stand_ins(turns)):
        tools, head["tool_choice"] = called, "none"
    body = [encode_json(head)[:-1].encode(), b',"messages":[', b",".join(pieces), b"]"]
    if tools:
        body += [b',"tools":[', b",".join(_tools(tools, cache_marks)), b"]"]
    body.append(b"}")
    return b"".join(body)


def _head(
    options: GenerateOptions,
    model: str,
    dialect: ChatDialect,
    stream: bool,
    extra: Mapping[str, Any] | None,
    dropped: Sequence[str],
) -> dict[str, Any]:
    settings = options.settings
    head: dict[str, Any] = {"model": model}
    if "max_tokens" in settings:
        head[dialect.max_tokens_key] = settings["max_tokens"]
    head.update({key: settings[key] for key in _PLAIN_SETTINGS if key in settings and key not in dropped})
    if options.tools and "tool_choice" in settings:
        head["tool_choice"] = settings["tool_choice"]
    if options.response_format is not None:
        schema = options.response_format.schema
        if schema is not None and dialect.structured_outputs == "json_schema":
            strict = strict_form(schema) if dialect.strict_schemas else None
            named = {"name": "output", "schema": strict or dict(schema), "strict": strict is not None}
            head["response_format"] = {"type": "json_schema", "json_schema": named}
        elif dialect.structured_outputs != "none":
            head["response_format"] = {"type": "json_object"}
    if stream:
        head["stream"] = True
        if dialect.stream_usage:
            head["stream_options"] = {"include_usage": True}
    return {**head, **dialect.extra, **(extra or {})}


def chat_message(message: Message, dialect: ChatDialect, warn: Warn, transcript: Sequence[Message] = ()) -> dict[str, Any]:
    """The wire form of a user, assistant or tool message. `transcript` is where an error finds the message's index."""
    if message.role == "assistant":
        text = text_parts(message)
        if not message.tool_calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": text or None, "tool_calls": [_call(call, dialect) for call in message.tool_calls]}
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": dialect.call_id(message.tool_call_id or ""), "content": text_parts(message)}
    if isinstance(message.content, str) or all(isinstance(part, TextPart) for part in message.content):
        return {"role": "user", "content": text_parts(message)}
    position = next((index for index, other in enumerate(transcript) if other is message), None)
    parts = [_part(part, dialect, warn, position) for part in message.content]
    return {"role": "user", "content": [part for part in parts if part is not None]}


def _part(part: ContentPart, dialect: ChatDialect, warn: Warn, position: int | None) -> dict[str, Any] | None:
    if isinstance(part, TextPart):
        return {"type": "text", "text": clean_text(part.text)} if part.text else None
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": image_url(part, position)}}
    return _file(part, dialect, warn)


def _file(part: FilePart, dialect: ChatDialect, warn: Warn) -> dict[str, Any]:
    is_url = isinstance(part.data, str) and not part.data.startswith("data:")
    if dialect.accepts_files and (dialect.file_urls or not is_url):
        data = part.data if isinstance(part.data, str) else data_url(part.data, part.mime_type)
        return {"type": "file", "file": {"filename": clean_text(part.filename or "file"), "file_data": data}}
    if dialect.unsupported_files == "error":
        raise unsupported_content(
            dialect.provider, f"a file {'URL' if is_url else 'part'} ({part.filename or 'unnamed'}, {part.mime_type})"
        )
    warn("files", f"this file is not sent to the server; the model reads {file_note(part)!r} instead.")
    return {"type": "text", "text": file_note(part)}


def _call(call: ToolCall, dialect: ChatDialect) -> dict[str, Any]:
    function = {"name": wire_name(call.name), "arguments": arguments_object(call.arguments)}
    return {"id": dialect.call_id(call.id), "type": "function", "function": function}


def _tools(tools: Sequence[ToolDefinition], cache_marks: bool) -> list[bytes]:
    encoded = [_encoded_tool(tool) for tool in tools]
    if cache_marks:
        encoded[-1] = encode_json_sorted({**chat_tool(tools[-1]), "cache_control": _CACHE_MARK}).encode()
    return encoded


def _encoded_tool(tool: ToolDefinition) -> bytes:
    encoded: bytes | None = tool.wire_cache.get("chat")
    if encoded is None:
        encoded = tool.wire_cache["chat"] = encode_json_sorted(chat_tool(tool)).encode()
    return encoded


def chat_tool(tool: ToolDefinition) -> dict[str, Any]:
    """The wire form of a tool definition."""
    function = {"name": tool.name, "description": clean_text(tool.description), "parameters": object_schema(tool.parameters)}
    return {"type": "function", "function": function}


def object_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema; one without a `type` is an object's."""
    return {**schema} if "type" in schema else {"type": "object", **schema}


def _system(text: str, cache_mark: bool) -> dict[str, Any]:
    if cache_mark:
        return {"role": "system", "content": [{"type": "text", "text": text, "cache_control": _CACHE_MARK}]}
    return {"role": "system", "content": text}


def _last_user(turns: Sequence[Message]) -> int | None:
    return next((index for index in range(len(turns) - 1, -1, -1) if turns[index].role == "user"), None)


def _with_mark(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    if not parts or not parts[-1].get("text", "image"):
        return message
    return {**message, "content": [*parts[:-1], {**parts[-1], "cache_control": _CACHE_MARK}]}


# ----------------------------------------------------------------------------------------------------------------- replies

_FINISH = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


def finish_reason(raw: Any) -> str:
    """Our finish reason for the server's; a missing or unknown one is `other`."""
    return _FINISH.get(raw, "other") if isinstance(raw, str) else "other"


def chat_usage(raw: Any) -> ProviderUsage | None:
    """A reply's usage; `None` when the server reported none, only a part, or nothing but zeros.

    `prompt_tokens` includes cached tokens and `completion_tokens` reasoning. A server whose total counts reasoning on top of the
    completion means it extra.
    """
    if not isinstance(raw, dict):
        return None
    prompt, completion = fields.count(raw.get("prompt_tokens")), fields.count(raw.get("completion_tokens"))
    if prompt is None or completion is None or prompt + completion == 0:
        return None
    of_prompt, of_completion = (
        fields.mapping(raw.get("prompt_tokens_details")),
        fields.mapping(raw.get("completion_tokens_details")),
    )
    reasoning = fields.count(of_completion.get("reasoning_tokens"))
    if reasoning and fields.count(raw.get("total_tokens")) == prompt + completion + reasoning:
        completion += reasoning
    return ProviderUsage(
        prompt,
        completion,
        cached_input_tokens=fields.count(of_prompt.get("cached_tokens")),
        cache_write_tokens=fields.count(of_prompt.get("cache_write_tokens")),
        reasoning_tokens=reasoning,
        cost_usd=fields.number(raw.get("cost")),
    )


def chat_result(body: Any, options: GenerateOptions, provider: str | None = None) -> GenerateResult:
    """The model turn of an unstreamed reply.

    Raises:
        ErrorBodyError: The body holds an error, under whatever status.
        MalformedReplyError: The body is no reply: not an object, or without choices.
    """
    if not isinstance(body, Mapping):
        raise MalformedReplyError("The server's reply is not a JSON object.", provider=provider, body=body)
    if body.get("error"):
        raise error_body(body, provider=provider)
    choice = next(iter(fields.objects(body.get("choices"))), None)
    if choice is None or not isinstance(choice.get("message"), Mapping):
        raise MalformedReplyError("The server's reply has no choices.", provider=provider, body=body)
    raise_choice_error(choice, provider)
    message: Mapping[str, Any] = choice["message"]
    usage = chat_usage(body.get("usage"))
    refusal = fields.text(message.get("refusal"))
    reason = "content_filter" if refusal else finish_reason(choice.get("finish_reason"))
    calls = unique_calls(_calls_of(message), options.messages)
    used = None if usage is None else usage.completion_tokens
    reason, calls = settled_calls(reason, calls, used, options.get("max_tokens"))
    thought = clean_text(reasoning_text(message))
    return GenerateResult(
        text=clean_text(content_text(message.get("content")) or refusal),
        tool_calls=calls,
        finish_reason=reason,
        usage=usage,
        reasoning=(ReasoningBlock(thought),) if thought else (),
        response_model=model_of(body),
        raw_response=body,
    )


def raise_choice_error(choice: Mapping[str, Any], provider: str | None) -> None:
    """Raises for a choice that is an error: a backend behind a router failed."""
    if choice.get("error"):
        raise error_body(choice, provider=provider)
    if choice.get("finish_reason") == "error":
        raise error_body({"error": {"message": "The model's backend reported an error."}}, provider=provider)


def _calls_of(message: Mapping[str, Any]) -> list[ToolCall]:
    entries = fields.objects(message.get("tool_calls"))
    if not entries and isinstance(message.get("function_call"), Mapping):
        entries = [{"function": message["function_call"]}]
    calls = []
    for entry in entries:
        function = fields.mapping(entry.get("function"))
        name, arguments = fields.text(function.get("name")), call_arguments(function.get("arguments"))
        calls.append(ToolCall(fields.text(entry.get("id")), name, arguments))
    return calls


def content_text(content: Any) -> str:
    """The text of a `content` field: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    return "".join(fields.text(part.get("text")) for part in fields.objects(content))


def reasoning_text(message: Mapping[str, Any]) -> str:
    """The reasoning of a message or delta: servers name the field differently, and some send the same text twice."""
    for key in ("reasoning_content", "reasoning"):
        text = message.get(key)
        if isinstance(text, str) and text:
            return text
    details = message.get("reasoning_details")
    if not details:
        return ""
    details = fields.objects(details)
    return "".join(fields.text(detail.get("text")) or fields.text(detail.get("summary")) for detail in details)


def model_of(body: Mapping[str, Any]) -> str | None:
    return fields.text(body.get("model")) or None
