"""What a cassette keeps of a model call, as JSON: an allow-list of the request, the reply, its chunks, or its error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lousho_ray.errors import CompactedError, CompactedLLMProviderError, LLMProviderError, RateLimitError, message_of
from lousho_ray.fingerprint import without_titles
from lousho_ray.messages import FilePart, ImagePart, Message, ReasoningBlock, ToolCall
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    HostedToolCall,
    HostedToolCallChunk,
    HostedToolResultChunk,
    ReasoningChunk,
    ReasoningEndChunk,
    ServedBy,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers.failures import classify
from lousho_ray.usage import ProviderUsage

Json = dict[str, Any]
REDACTED = "[REDACTED]"

_SECRETS = re.compile(
    r"\bsk-[A-Za-z0-9_-]{8,}|\bBearer\s+[A-Za-z0-9._~+/=-]{8,}|\bAIza[A-Za-z0-9_-]{20,}"
    r"|\bgh[ops]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}|\bAKIA[A-Z0-9]{12,}"
)


def redacted(value: Any, redact: Callable[[str], str] | None = None) -> Any:
    """A JSON value in whose texts what looks like a key is `[REDACTED]`; `redact` goes over them first."""
    if isinstance(value, str):
        return _SECRETS.sub(REDACTED, value if redact is None else redact(value))
    if isinstance(value, Mapping):
        return {key: redacted(item, redact) for key, item in value.items()}
    return [redacted(item, redact) for item in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------------------------------------------------- requests


def request_json(options: GenerateOptions) -> Json:
    """The part of a request that a recording is matched by. Headers, option bags and signals are no part of it."""
    data: Json = {"model": options.model, "messages": [_message_json(message) for message in options.messages]}
    if options.tools:
        data["tools"] = [
            {"name": tool.name, "description": tool.description, "schema": canonical_schema(tool.parameters)}
            for tool in options.tools
        ]
    for key, name in (("temperature", "temperature"), ("max_tokens", "maxTokens")):
        if options.get(key) is not None:
            data[name] = options.get(key)
    return data


def canonical_schema(schema: Any) -> Any:
    """A JSON schema without titles and `$schema`, its references put in place: how a library lays it out does not show."""
    root = without_titles(schema)
    definitions = {f"#/{key}/{name}": part for key in ("$defs", "definitions") for name, part in root.get(key, {}).items()}
    return _inlined({key: value for key, value in root.items() if key not in ("$defs", "definitions", "$schema")}, definitions, ())


def _inlined(value: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_inlined(item, definitions, inside) for item in value]
    if not isinstance(value, Mapping):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str) and reference in definitions and reference not in inside:
        rest = {key: item for key, item in value.items() if key != "$ref"}
        return _inlined({**definitions[reference], **rest}, definitions, (*inside, reference))
    return {key: _inlined(value[key], definitions, inside) for key in sorted(value)}


def _message_json(message: Message) -> Json:
    data: Json = {"role": message.role, "text": message.text}
    if message.tool_name is not None:
        data["toolName"] = message.tool_name
    if message.is_error:
        data["isError"] = True
    attached = [_attachment(part) for part in message.content if isinstance(part, ImagePart | FilePart)]
    if attached:
        data["attachments"] = attached
    if message.tool_calls:
        data["toolCalls"] = [{"name": call.name, "args": _parsed(call.arguments)} for call in message.tool_calls]
    return data


def _attachment(part: ImagePart | FilePart) -> str:
    source = part.image if isinstance(part, ImagePart) else part.data
    size = f"{len(source)} bytes" if isinstance(source, bytes) else source[:200]
    return f"{part.type} {part.mime_type or ''} {size}".replace("  ", " ")


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


# ----------------------------------------------------------------------------------------------------------------- replies


def reply_json(result: GenerateResult) -> Json:
    data: Json = {"text": result.text, "finishReason": result.finish_reason}
    if result.tool_calls:
        data["toolCalls"] = [_call_json(call) for call in result.tool_calls]
    if result.hosted_tool_calls:
        data["hostedToolCalls"] = [_hosted_json(call) for call in result.hosted_tool_calls]
    if result.reasoning:
        data["reasoning"] = [_block_json(block) for block in result.reasoning]
    return {**data, **_served_json(result.usage, result.served_by, result.response_model)}


def reply_of(data: Mapping[str, Any]) -> GenerateResult:
    return GenerateResult(
        text=data.get("text", ""),
        tool_calls=tuple(_call_of(call) for call in data.get("toolCalls", ())),
        finish_reason=data["finishReason"],
        usage=_usage_of(data.get("usage")),
        reasoning=tuple(ReasoningBlock(**block) for block in data.get("reasoning", ())),
        hosted_tool_calls=tuple(_hosted_of(call) for call in data.get("hostedToolCalls", ())),
        response_model=data.get("responseModel"),
        served_by=None if data.get("servedBy") is None else ServedBy(**data["servedBy"]),
    )


def reply_of_chunks(chunks: Sequence[Chunk]) -> GenerateResult:
    """The reply that the chunks of a stream add up to."""
    finish = next((chunk for chunk in reversed(chunks) if isinstance(chunk, FinishChunk)), FinishChunk("error"))
    return GenerateResult(
        text="".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk)),
        tool_calls=tuple(chunk.tool_call for chunk in chunks if isinstance(chunk, ToolCallChunk)),
        finish_reason=finish.finish_reason,
        usage=finish.usage,
        hosted_tool_calls=tuple(chunk.call for chunk in chunks if isinstance(chunk, HostedToolResultChunk)),
        response_model=finish.response_model,
        served_by=finish.served_by,
    )


def chunk_json(chunk: Chunk) -> Json:
    match chunk:
        case TextChunk(text=text):
            return {"type": "text", "text": text}
        case ReasoningChunk(text=text):
            return {"type": "reasoning", "text": text}
        case ReasoningEndChunk(block=block):
            return {"type": "reasoningEnd", **({} if block is None else {"block": _block_json(block)})}
        case ToolCallChunk(tool_call=call):
            return {"type": "toolCall", "call": _call_json(call)}
        case HostedToolCallChunk(call=hosted):
            return {"type": "hostedToolCall", "call": _hosted_json(hosted)}
        case HostedToolResultChunk(call=hosted):
            return {"type": "hostedToolResult", "call": _hosted_json(hosted)}
        case FinishChunk():
            served = _served_json(chunk.usage, chunk.served_by, chunk.response_model)
            return {"type": "finish", "finishReason": chunk.finish_reason, **served}


def chunk_of(data: Mapping[str, Any]) -> Chunk:
    """Rebuilds a chunk. Raises `KeyError` for an unknown type."""
    return _CHUNKS[data["type"]](data)


_CHUNKS: Mapping[str, Callable[[Mapping[str, Any]], Chunk]] = {
    "text": lambda data: TextChunk(data["text"]),
    "reasoning": lambda data: ReasoningChunk(data["text"]),
    "reasoningEnd": lambda data: ReasoningEndChunk(ReasoningBlock(**data["block"]) if "block" in data else None),
    "toolCall": lambda data: ToolCallChunk(_call_of(data["call"])),
    "hostedToolCall": lambda data: HostedToolCallChunk(_hosted_of(data["call"])),
    "hostedToolResult": lambda data: HostedToolResultChunk(_hosted_of(data["call"])),
    "finish": lambda data: FinishChunk(
        data["finishReason"],
        _usage_of(data.get("usage")),
        None if data.get("servedBy") is None else ServedBy(**data["servedBy"]),
        data.get("responseModel"),
    ),
}


def _call_json(call: ToolCall) -> Json:
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _call_of(data: Mapping[str, Any]) -> ToolCall:
    return ToolCall(data["id"], data["name"], data["arguments"])


def _hosted_json(call: HostedToolCall) -> Json:
    values = {"id": call.id, "name": call.name, "args": call.args, "result": call.result, "is_error": call.is_error}
    return {**values, "sources": list(call.sources)}


def _hosted_of(data: Mapping[str, Any]) -> HostedToolCall:
    return HostedToolCall(**{**data, "sources": tuple(data.get("sources", ()))})


def _block_json(block: ReasoningBlock) -> Json:
    names = ("text", "signature", "redacted_data", "provider", "model")
    return {name: value for name in names if (value := getattr(block, name)) is not None}


def _served_json(usage: ProviderUsage | None, served: ServedBy | None, model: str | None) -> Json:
    data: Json = {}
    if usage is not None:
        data["usage"] = {name: value for name in usage.__slots__ if (value := getattr(usage, name)) is not None}
    if served is not None:
        data["servedBy"] = {"provider": served.provider, "model": served.model}
    if model is not None:
        data["responseModel"] = model
    return data


def _usage_of(data: Mapping[str, Any] | None) -> ProviderUsage | None:
    return None if data is None else ProviderUsage(**data)


# ------------------------------------------------------------------------------------------------------------------ errors


class ReplayedError(LLMProviderError):
    """An error that a provider raised when it was recorded; its class has the recorded name."""


def error_json(error: Exception) -> Json:
    """An error by its name and message, and by what decides whether it is retried."""
    failure = classify(error)
    data: Json = {"name": type(error).__name__, "message": message_of(error), "category": failure.category}
    optional = {"status": failure.status, "retryAfterMs": failure.retry_after_ms, "providerCode": failure.code}
    return {**data, "retryable": failure.retryable, **{key: value for key, value in optional.items() if value is not None}}


def error_of(data: Mapping[str, Any]) -> Exception:
    """An error with the recorded name and message, which retries and fallbacks judge as they judged the recorded one."""
    name, message, status = data["name"], data["message"], data.get("status")
    if name in ("CompactedLLMProviderError", "RateLimitError"):
        compacted = CompactedError(data.get("category") or "unknown", message[:500], status, data.get("retryAfterMs"))
        kind = RateLimitError if name == "RateLimitError" else CompactedLLMProviderError
        return kind(message, status=status, compacted=compacted)
    bases: tuple[type[Exception], ...] = (ReplayedError,)
    if data.get("category") == "timeout":
        bases = (ReplayedError, TimeoutError)
    elif data.get("retryable") and status is None:
        bases = (ReplayedError, ConnectionError)
    error: Any = type(name, bases, {})(message, status=status)
    if data.get("providerCode") is not None:
        error.body = {"error": {"code": data["providerCode"], "message": message}}
    if data.get("retryAfterMs") is not None:
        error.response = SimpleNamespace(status_code=status, headers={"retry-after-ms": f"{data['retryAfterMs']:g}"})
    return error  # type: ignore[no-any-return]
