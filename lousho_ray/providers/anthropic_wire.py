"""Anthropic's Messages API: from our messages to a request body.

Rules of the API are those of https://docs.claude.com/en/api/messages: roles alternate and start with the user, the results of a
turn stand together before any text, no text block is blank, thinking blocks come back unchanged. Each message's blocks are kept
as encoded JSON beside it (`Message.wire_cache`), so a request costs what the last step added and one join.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lousho_ray.hosted_tools import HostedTool, unsupported_hosted_tool
from lousho_ray.messages import Message, ReasoningBlock
from lousho_ray.ports import GenerateOptions, ToolDefinition
from lousho_ray.providers.anthropic_parts import FileRule, encode_block, text_block, user_blocks
from lousho_ray.providers.anthropic_schema import output_schema
from lousho_ray.providers.anthropic_thinking import Thinking, thinking_for
from lousho_ray.providers.transcript import (
    Warn,
    arguments_object,
    clean_text,
    encode_json,
    encode_json_sorted,
    repair_pairs,
    split_system,
    stand_ins,
    wire_id,
    wire_name,
)

PROVIDER = "anthropic"
DEFAULT_MAX_TOKENS = 4_096
CONTINUED = "(conversation continues)"
NO_OUTPUT = "(no output)"

_CACHE_MARK = ',"cache_control":{"type":"ephemeral"}}'


@dataclass(slots=True)
class Turn:
    """One message of the request: its role and its encoded content blocks. `prompt` is set when a user wrote part of it."""

    role: Literal["user", "assistant"]
    blocks: list[str]
    prompt: bool = False
    thinks: bool = False

    def encode(self) -> str:
        return f'{{"role":"{self.role}","content":[{",".join(self.blocks)}]}}'


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request, ready to be encoded. `head` holds everything but the two lists."""

    head: Mapping[str, Any]
    turns: tuple[Turn, ...]
    tools: tuple[str, ...] = ()

    def encode(self, *, stream: bool = False) -> bytes:
        """The request body as UTF-8 JSON."""
        head = {**self.head, "stream": True} if stream else self.head
        parts = [encode_block(head)[:-1]]
        if self.tools:
            parts.append(f',"tools":[{",".join(self.tools)}]')
        parts.append(f',"messages":[{",".join([turn.encode() for turn in self.turns])}]}}')
        return "".join(parts).encode()

    def continued(self, content: Iterable[Mapping[str, Any]]) -> MessagesRequest:
        """The request that goes on after a `pause_turn` reply with this `content`, which is not empty."""
        blocks = [encode_block(block) for block in content]
        blocks[-1] = _trim_end(blocks[-1])
        last = self.turns[-1]
        if last.role == "assistant":
            return replace(self, turns=(*self.turns[:-1], replace(last, blocks=[*last.blocks, *blocks])))
        return replace(self, turns=(*self.turns, Turn("assistant", blocks)))


@dataclass(frozen=True, slots=True)
class WireOptions:
    """What of a provider's own settings shapes a request."""

    files: FileRule = field(default_factory=FileRule)
    structured_outputs: bool = False
    max_output_tokens: int | None = None


def build_request(options: GenerateOptions, model: str, warn: Warn, wire: WireOptions | None = None) -> MessagesRequest:
    """The request for one model call.

    Raises:
        ConfigurationError: `LOUSHO_UNSUPPORTED_CONTENT` for a part the API cannot carry, `LOUSHO_CONFIG_INVALID` for image bytes
            of an unknown type.
    """
    wire = wire or WireOptions()
    system, messages = split_system(options.messages)
    encoder = _TranscriptEncoder(options.messages, wire.files, warn)
    turns = encoder.encode(repair_pairs(messages, warn))
    marks = options.prompt_caching == "auto" and "claude" in model.lower()
    thinking = thinking_for(model, options.reasoning)
    if thinking is not None and not _may_think(turns):
        warn(
            "thinking-history",
            "The turn to continue carries no thinking blocks of Anthropic; the request was sent without thinking.",
        )
        thinking = None
    if thinking is not None and thinking.ignores_budget:
        warn("thinking-budget", f"{model} takes no budget_tokens: it was asked for effort {thinking.effort!r} instead.")
    head: dict[str, Any] = {"model": model, "max_tokens": _max_tokens(options, thinking, wire)}
    if system.strip():
        block: dict[str, Any] = {"type": "text", "text": system}
        head["system"] = [{**block, "cache_control": {"type": "ephemeral"}} if marks else block]
    head.update(_settings(options, thinking, wire, warn))
    tools = [encode_tool(tool) for tool in options.tools]
    tools += [_encode_hosted(tool) for tool in options.hosted_tools]
    if marks:
        _mark_last(tools)
        _mark_turns(turns)
    if not tools and (called := stand_ins(messages)):
        tools = [encode_tool(tool) for tool in called]
        head["tool_choice"] = {"type": "none"}
    return MessagesRequest(head, tuple(turns), tuple(tools))


def encode_tool(tool: ToolDefinition) -> str:
    """A tool's encoded definition, made once; equal tools have equal bytes, which prompt caches depend on."""
    cached: str | None = tool.wire_cache.get(PROVIDER)
    if cached is None:
        schema = tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}
        cached = clean_text(encode_json_sorted({"name": tool.name, "description": tool.description, "input_schema": schema}))
        tool.wire_cache[PROVIDER] = cached
    return cached


def _encode_hosted(tool: Any) -> str:
    raw = tool.raw if isinstance(tool, HostedTool) else tool
    if not isinstance(raw, Mapping):
        raise unsupported_hosted_tool(PROVIDER, tool)
    return encode_block(raw)


# -------------------------------------------------------------------------------------------------------------------- settings


def _max_tokens(options: GenerateOptions, thinking: Thinking | None, wire: WireOptions) -> int:
    """The reply's tokens plus what thinking may take, within what the model can put out."""
    limit = int(options.get("max_tokens") or wire.max_output_tokens or DEFAULT_MAX_TOKENS)
    if thinking is None:
        return limit
    with_thinking = limit + thinking.budget_tokens
    if wire.max_output_tokens is None:
        return with_thinking
    return max(limit, min(with_thinking, wire.max_output_tokens))


def _settings(options: GenerateOptions, thinking: Thinking | None, wire: WireOptions, warn: Warn) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for key in ("temperature", "top_p"):
        if (value := options.get(key)) is not None:
            if thinking is None:
                body[key] = value
            else:
                warn(f"thinking-{key}", f"{key} is not sent to Anthropic while the model thinks.")
    if stop := options.get("stop"):
        body["stop_sequences"] = list(stop)
    for key in ("seed", "frequency_penalty", "presence_penalty"):
        if options.get(key) is not None:
            warn(key, f"Anthropic has no setting {key!r}; it was not sent.")
    if choice := _tool_choice(options, thinking, warn):
        body["tool_choice"] = choice
    output: dict[str, Any] = {}
    if thinking is not None:
        body["thinking"] = thinking.config
        if thinking.effort is not None:
            output["effort"] = thinking.effort
    if wire.structured_outputs and options.response_format is not None and options.response_format.schema is not None:
        schema = output_schema(options.response_format.schema)
        if schema is not None:
            output["format"] = {"type": "json_schema", "schema": schema}
        else:
            warn("output_schema", "Anthropic cannot enforce this output schema (free keys or recursion); it is left to the prompt.")
    if output:
        body["output_config"] = output
    return body


def _tool_choice(options: GenerateOptions, thinking: Thinking | None, warn: Warn) -> dict[str, Any] | None:
    choice = options.get("tool_choice")
    if choice is None or not (options.tools or options.hosted_tools):
        return None
    if choice in ("auto", "none"):
        return {"type": choice}
    if thinking is not None:
        warn("thinking-tool_choice", "Anthropic cannot be forced to call a tool while it thinks; tool_choice was sent as 'auto'.")
        return {"type": "auto"}
    return {"type": "any"} if choice == "required" else {"type": "tool", "name": choice["function"]["name"]}


def _may_think(turns: Sequence[Turn]) -> bool:
    """Whether the API accepts `thinking`: an assistant turn that is continued, by results or as a beginning, must begin with it."""
    if turns[-1].role == "assistant":
        return turns[-1].thinks
    return turns[-2].thinks if turns[-1].blocks[0].startswith('{"type":"tool_result"') else True


def _mark_last(blocks: list[str]) -> None:
    if blocks:
        blocks[-1] = blocks[-1][:-1] + _CACHE_MARK


def _mark_turns(turns: list[Turn]) -> None:
    """Marks the end of the last user turn, and of a trailing turn of tool results."""
    last = turns[-1]
    prompt = next((turn for turn in reversed(turns) if turn.prompt), None)
    if prompt is not None:
        _mark_last(prompt.blocks)
    if last.role == "user" and last is not prompt:
        _mark_last(last.blocks)


# -------------------------------------------------------------------------------------------------------------------- messages


@dataclass(slots=True)
class _TranscriptEncoder:
    """Turns a repaired transcript into turns that alternate."""

    original: Sequence[Message]
    files: FileRule
    warn: Warn
    _turns: list[Turn] = field(default_factory=list)
    _ids: dict[str, str] = field(default_factory=dict)  # our ids of the last assistant turn -> wire ids
    _taken: set[str] = field(default_factory=set)

    def encode(self, messages: Sequence[Message]) -> list[Turn]:
        for message in messages:
            if message.role == "assistant":
                self._assistant(message)
            elif message.role == "tool":
                self._append("user", [self._result(message)])
            else:
                self._append("user", self._user(message), prompt=True)
        turns = self._turns
        if not turns or turns[0].role == "assistant":
            turns.insert(0, Turn("user", [text_block(CONTINUED)]))
        if turns[-1].role == "assistant":
            turns[-1].blocks[-1] = _trim_end(turns[-1].blocks[-1])
        return turns

    def _append(
        self, role: Literal["user", "assistant"], blocks: Sequence[str], *, prompt: bool = False, thinks: bool = False
    ) -> None:
        if not blocks:
            return
        if self._turns and self._turns[-1].role == role:
            last = self._turns[-1]
            if not thinks:
                last.blocks.extend(blocks)
                last.prompt = last.prompt or prompt
                return
            # Thinking must open its turn, so two assistant turns are kept apart.
            self._turns.append(Turn("user", [text_block(CONTINUED)]))
        self._turns.append(Turn(role, list(blocks), prompt, thinks))

    def _assistant(self, message: Message) -> None:
        ids = self._assign(message)
        cached: tuple[tuple[str, ...], tuple[str, ...]] | None = message.wire_cache.get(PROVIDER)
        if cached is None or cached[0] != ids:
            cached = (ids, tuple(_assistant_blocks(message, ids)))
            message.wire_cache[PROVIDER] = cached
        blocks = cached[1]
        self._append("assistant", blocks, thinks=bool(blocks) and _is_thinking(blocks[0]))

    def _assign(self, message: Message) -> tuple[str, ...]:
        """Wire ids of a message's calls: legal, and used once in the request."""
        self._ids = {}
        for call in message.tool_calls:
            wire = base = wire_id(call.id)
            number = 1
            while wire in self._taken:
                number += 1
                wire = f"{base[:56]}_{number}"
            self._taken.add(wire)
            self._ids[call.id] = wire
        return tuple(self._ids.values())

    def _result(self, message: Message) -> str:
        wire = self._ids[message.tool_call_id or ""]
        cached: tuple[str, str] | None = message.wire_cache.get(PROVIDER)
        if cached is None or cached[0] != wire:
            cached = (wire, _result_block(message, wire))
            message.wire_cache[PROVIDER] = cached
        return cached[1]

    def _user(self, message: Message) -> tuple[str, ...]:
        plain = isinstance(message.content, str)
        key = PROVIDER if plain else f"{PROVIDER}/{self.files.native}/{self.files.note}"
        cached: tuple[str, ...] | None = message.wire_cache.get(key)
        if cached is None:
            position = None if plain else next((i for i, other in enumerate(self.original) if other is message), None)
            cached = tuple(user_blocks(message, self.files, position, self.warn))
            message.wire_cache[key] = cached
        return cached


def _trim_end(block: str) -> str:
    if not block.startswith('{"type":"text"'):
        return block
    return text_block(json.loads(block)["text"].rstrip())


def _is_thinking(block: str) -> bool:
    return block.startswith(('{"type":"thinking"', '{"type":"redacted_thinking"'))


def _assistant_blocks(message: Message, ids: Sequence[str]) -> list[str]:
    blocks = [_thinking_block(block) for block in message.reasoning if block.replayable and block.provider == PROVIDER]
    if not message.tool_calls:
        blocks.clear()
    if message.text.strip():
        blocks.append(text_block(message.text))
    for call, wire in zip(message.tool_calls, ids, strict=True):
        # Encoded again: an escaped lone surrogate is legal in our argument text, and refused by the API inside an object.
        arguments = clean_text(encode_json(json.loads(arguments_object(call.arguments))))
        blocks.append(f'{{"type":"tool_use","id":"{wire}","name":"{wire_name(call.name)}","input":{arguments}}}')
    return blocks


def _thinking_block(block: ReasoningBlock) -> str:
    if block.redacted_data is not None:
        return encode_block({"type": "redacted_thinking", "data": block.redacted_data})
    return encode_block({"type": "thinking", "thinking": block.text, "signature": block.signature})


def _result_block(message: Message, wire: str) -> str:
    text = message.text
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": wire, "content": text if text.strip() else NO_OUTPUT}
    return encode_block({**block, "is_error": True} if message.is_error else block)
