"""The Responses API: our messages to the wire and its replies back, as pure functions.

Wire form: https://platform.openai.com/docs/api-reference/responses. Nothing is stored at the server and no item ids are sent: an
item id makes the API demand the reasoning item that belonged to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lousho_ray.messages import ContentPart, FilePart, ImagePart, Message, ReasoningBlock, TextPart, ToolCall
from lousho_ray.ports import GenerateOptions, GenerateResult, HostedToolCall, ToolDefinition
from lousho_ray.providers import json_fields as fields
from lousho_ray.providers.failures import MalformedReplyError, error_body
from lousho_ray.providers.openai_chat import model_of, object_schema
from lousho_ray.providers.openai_hosted import hosted_wire, included
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
    repair_pairs,
    settled_calls,
    split_system,
    text_parts,
    unique_calls,
    unsupported_content,
    wire_id,
    wire_name,
)
from lousho_ray.usage import ProviderUsage

ID_CHARS = 64
"""The longest `call_id` the API accepts."""

UNKNOWN_SETTINGS = ("stop", "seed", "frequency_penalty", "presence_penalty")
"""Model settings that the API does not have."""

# ---------------------------------------------------------------------------------------------------------------- requests


def responses_request(
    options: GenerateOptions,
    model: str,
    files: Literal["send", "note", "error"],
    warn: Warn,
    *,
    stream: bool = False,
    extra: Mapping[str, Any] | None = None,
    dropped: Sequence[str] = (),
    strict_schemas: bool = False,
) -> bytes:
    """The JSON body of a call. Messages and tools are encoded once and kept beside themselves (`wire_cache`).

    With `strict_schemas`, an output schema that fits the strict mode is sent as one to enforce.
    """
    system, turns = split_system(options.messages)
    turns = repair_pairs(turns, warn)
    key = f"responses:{files}"
    pieces: list[bytes] = []
    for message in turns:
        encoded: bytes | None = message.wire_cache.get(key)
        if encoded is None:
            items = input_items(message, files, warn, options.messages)
            encoded = message.wire_cache[key] = ",".join(encode_json(item) for item in items).encode()
        if encoded:
            pieces.append(encoded)
    text: dict[str, Any] = {}
    if options.response_format is not None:
        text = {"text": {"format": _text_format(options.response_format.schema, strict_schemas)}}
    body = [encode_json(_head(options, model, system, stream, {**text, **(extra or {})}, dropped, warn))[:-1].encode()]
    body += [b',"input":[', b",".join(pieces), b"]"]
    tools = [_encoded_tool(tool) for tool in options.tools]
    if options.hosted_tools:
        hosted = [hosted_wire(tool, warn) for tool in options.hosted_tools]
        tools += [encode_json_sorted(tool).encode() for tool in hosted]
        if wanted := included(hosted):
            body += [b',"include":', encode_json(wanted).encode()]
    if tools:
        body += [b',"tools":[', b",".join(tools), b"]"]
    body.append(b"}")
    return b"".join(body)


def _head(
    options: GenerateOptions,
    model: str,
    system: str,
    stream: bool,
    extra: Mapping[str, Any],
    dropped: Sequence[str],
    warn: Warn,
) -> dict[str, Any]:
    settings = options.settings
    head: dict[str, Any] = {"model": model, "store": False}
    if system:
        head["instructions"] = system
    if "max_tokens" in settings:
        head["max_output_tokens"] = settings["max_tokens"]
    head.update({key: settings[key] for key in ("temperature", "top_p") if key in settings and key not in dropped})
    for key in UNKNOWN_SETTINGS:
        if key in settings:
            warn(f"setting:{key}", f"the Responses API has no {key}; it is not sent.")
    if "tool_choice" in settings and (options.tools or options.hosted_tools):
        head["tool_choice"] = _tool_choice(settings["tool_choice"])
    if stream:
        head["stream"] = True
    return {**head, **extra}


def _tool_choice(choice: Any) -> Any:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    return {"type": "function", "name": function["name"]} if isinstance(function, Mapping) else choice


def _text_format(schema: Mapping[str, Any] | None, strict_schemas: bool) -> dict[str, Any]:
    if schema is None:
        return {"type": "json_object"}
    strict = strict_form(schema) if strict_schemas else None
    return {"type": "json_schema", "name": "output", "schema": strict or dict(schema), "strict": strict is not None}


def input_items(
    message: Message, files: Literal["send", "note", "error"], warn: Warn, transcript: Sequence[Message] = ()
) -> list[dict[str, Any]]:
    """The input items of a user, assistant or tool message."""
    if message.role == "tool":
        call_id = wire_id(message.tool_call_id or "", ID_CHARS)
        return [{"type": "function_call_output", "call_id": call_id, "output": text_parts(message)}]
    if message.role == "assistant":
        text = text_parts(message)
        items: list[dict[str, Any]] = [{"role": "assistant", "content": text}] if text else []
        return [*items, *(_call(call) for call in message.tool_calls)]
    if isinstance(message.content, str):
        return [{"role": "user", "content": [{"type": "input_text", "text": clean_text(message.content)}]}]
    position = next((index for index, other in enumerate(transcript) if other is message), None)
    return [{"role": "user", "content": [_part(part, files, warn, position) for part in message.content]}]


def _call(call: ToolCall) -> dict[str, Any]:
    name, arguments = wire_name(call.name), arguments_object(call.arguments)
    return {"type": "function_call", "call_id": wire_id(call.id, ID_CHARS), "name": name, "arguments": arguments}


def _part(part: ContentPart, files: str, warn: Warn, position: int | None) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "input_text", "text": clean_text(part.text)}
    if isinstance(part, ImagePart):
        return {"type": "input_image", "image_url": image_url(part, position), "detail": "auto"}
    return _file(part, files, warn)


def _file(part: FilePart, files: str, warn: Warn) -> dict[str, Any]:
    if files == "send":
        if isinstance(part.data, str) and not part.data.startswith("data:"):
            return {"type": "input_file", "file_url": part.data}
        data = part.data if isinstance(part.data, str) else data_url(part.data, part.mime_type)
        return {"type": "input_file", "filename": clean_text(part.filename or "file"), "file_data": data}
    if files == "error":
        raise unsupported_content("openai", f"a file part ({part.filename or 'unnamed'}, {part.mime_type})")
    warn("files", f"files are not sent to this server; the model reads {file_note(part)!r} instead.")
    return {"type": "input_text", "text": file_note(part)}


def _encoded_tool(tool: ToolDefinition) -> bytes:
    encoded: bytes | None = tool.wire_cache.get("responses")
    if encoded is None:
        encoded = tool.wire_cache["responses"] = encode_json_sorted(function_tool(tool)).encode()
    return encoded


def function_tool(tool: ToolDefinition) -> dict[str, Any]:
    """The wire form of a tool definition. The API's own default is strict mode, which refuses optional properties."""
    description, parameters = clean_text(tool.description), object_schema(tool.parameters)
    return {"type": "function", "name": tool.name, "description": description, "parameters": parameters, "strict": False}


# ----------------------------------------------------------------------------------------------------------------- replies


def responses_usage(raw: Any) -> ProviderUsage | None:
    """A reply's usage; `None` when the server reported none, only a part, or nothing but zeros."""
    if not isinstance(raw, Mapping):
        return None
    given, made = fields.count(raw.get("input_tokens")), fields.count(raw.get("output_tokens"))
    if given is None or made is None or given + made == 0:
        return None
    of_input, of_output = fields.mapping(raw.get("input_tokens_details")), fields.mapping(raw.get("output_tokens_details"))
    return ProviderUsage(
        given,
        made,
        cached_input_tokens=fields.count(of_input.get("cached_tokens")),
        cache_write_tokens=fields.count(of_input.get("cache_write_tokens")),
        reasoning_tokens=fields.count(of_output.get("reasoning_tokens")),
    )


def responses_finish(response: Mapping[str, Any]) -> str:
    """Our finish reason for a response's status (its calls not considered)."""
    if response.get("status") == "incomplete":
        reason = fields.mapping(response.get("incomplete_details")).get("reason")
        return {"max_output_tokens": "length", "content_filter": "content_filter"}.get(str(reason), "other")
    return "stop" if response.get("status") == "completed" else "other"


def raise_failed(response: Mapping[str, Any], provider: str | None) -> None:
    """Raises for a response that failed, was cancelled, or is an error body."""
    if response.get("status") in ("failed", "cancelled") or response.get("error"):
        fallback = {"message": f"The response is {response.get('status') or 'an error'}.", "code": "server_error"}
        raise error_body({"error": response.get("error") or fallback}, provider=provider)


def responses_result(body: Any, options: GenerateOptions, provider: str | None = None) -> GenerateResult:
    """The model turn of an unstreamed response.

    Raises:
        ErrorBodyError: The response failed, or the body holds an error.
        MalformedReplyError: The body is no response.
    """
    if not isinstance(body, Mapping):
        raise MalformedReplyError("The server's reply is not a JSON object.", provider=provider, body=body)
    raise_failed(body, provider)
    if not isinstance(body.get("output"), list):
        raise MalformedReplyError("The server's reply has no output.", provider=provider, body=body)
    output = fields.objects(body["output"])
    text, refused = message_text(output)
    usage = responses_usage(body.get("usage"))
    asked = [item for item in output if item.get("type") == "function_call"]
    reason, calls = settle(refused, body, asked, options)
    thoughts = [clean_text(thought) for item in output if item.get("type") == "reasoning" if (thought := item_reasoning(item))]
    return GenerateResult(
        text=clean_text(text),
        tool_calls=calls,
        finish_reason=reason,
        usage=usage,
        reasoning=tuple(ReasoningBlock(thought) for thought in thoughts),
        hosted_tool_calls=tuple(call for item in output if (call := hosted_call(item)) is not None),
        response_model=model_of(body),
        raw_response=body,
    )


def settle(
    refused: bool, response: Mapping[str, Any], asked: Sequence[Mapping[str, Any]], options: GenerateOptions
) -> tuple[str, tuple[ToolCall, ...]]:
    """The finish reason of a response and the calls of it that may run. `asked` are its `function_call` items."""
    usage = responses_usage(response.get("usage"))
    return settled_calls(
        "content_filter" if refused else responses_finish(response),
        unique_calls([call_of(item) for item in asked], options.messages),
        None if usage is None else usage.completion_tokens,
        options.get("max_tokens"),
        cut=any(item.get("status") == "incomplete" for item in asked),
    )


def message_text(output: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """The text of all message items, and whether it is a refusal."""
    texts: list[str] = []
    refused = False
    for part in _content_parts(output):
        if part.get("type") == "refusal":
            refused = True
            texts.append(fields.text(part.get("refusal")))
        elif part.get("type") == "output_text":
            texts.append(fields.text(part.get("text")))
    return "".join(texts), refused


def _content_parts(output: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for item in output:
        if item.get("type") == "message":
            yield from fields.objects(item.get("content"))


def item_reasoning(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: its summaries separated by a blank line, else its open text."""
    for key in ("summary", "content"):
        texts = [fields.text(part.get("text")) for part in fields.objects(item.get(key))]
        if text := "\n\n".join(text for text in texts if text):
            return text
    return ""


def call_of(item: Mapping[str, Any]) -> ToolCall:
    """The call of a `function_call` item, under its `call_id`."""
    return ToolCall(fields.text(item.get("call_id")), fields.text(item.get("name")), call_arguments(item.get("arguments")))


def hosted_call(item: Mapping[str, Any]) -> HostedToolCall | None:
    """A call that the provider ran itself (`web_search_call`, `code_interpreter_call`, ...); `None` for other items."""
    kind = fields.text(item.get("type"))
    if not kind.endswith("_call") or kind == "function_call":
        return None
    given = next((item[key] for key in ("action", "queries", "code", "arguments", "input") if item.get(key) is not None), None)
    result = next((item[key] for key in ("results", "outputs", "output", "result") if item.get(key) is not None), None)
    action = item.get("action")
    sources = action.get("sources") if isinstance(action, Mapping) else None
    return HostedToolCall(
        id=fields.text(item.get("id")),
        name=fields.text(item.get("name")) or kind.removesuffix("_call"),
        args=given,
        result=result if result is not None else item.get("error"),
        is_error=item.get("status") == "failed" or bool(item.get("error")),
        sources=tuple(sources) if isinstance(sources, list) else (),
    )
