"""Token estimates: how large a text, a message or a request is, without a tokenizer and without asking the provider.

An estimate is kept beside the message it was made for (`wire_cache`), so a step of a run pays only for what it added.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from lousho_ray.messages import Message, TextPart, ToolCall
from lousho_ray.ports import GenerateOptions, ToolDefinition

TokenEstimator: TypeAlias = Callable[[str, str | None], int]
"""`fn(text, model) -> tokens`: a tokenizer of your own."""

LATIN_CHARS_PER_TOKEN = 4.9
"""Letters and white space. With the weight of symbols, prose, code and JSON come out at about 4 characters a token, as the OpenAI
and Anthropic documentation say; fitted to the `cl100k_base` and `o200k_base` encodings."""

SYMBOL_TOKENS = 0.6
"""A digit or punctuation mark: they are what makes JSON and code dearer than prose of the same length."""

OTHER_CHARS_PER_TOKEN = 2.5
"""Scripts that are neither Latin nor CJK: Cyrillic, Arabic, Devanagari and others."""

MESSAGE_OVERHEAD_TOKENS = 4
"""Role and separators of one message."""

TOOL_OVERHEAD_TOKENS = 8
"""The frame around one tool definition or one tool call."""

ATTACHMENT_TOKENS = 1_000
"""One image or file, whatever its size."""

_CACHE_KEY = "tokens"
_CUSTOM_CACHE_KEY = "tokens_by_estimator"
_SYMBOLS = bytes(code for code in range(33, 127) if not chr(code).isalpha())
# CJK, Hangul, full-width forms and emoji: one token a character.
_WIDE = re.compile("[\u1100-\u11ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef\U0001f000-\U0003ffff]+")
_OTHER = re.compile("[\u0250-\u10ff\u1200-\u1dff\u2c00-\u2e7f\ua000-\ua95f\ua980-\uabff\ufb00-\ufeff\U00010000-\U0001efff]+")

_log = logging.getLogger("lousho_ray.tokens")
_custom: TokenEstimator | None = None
_warned_of: TokenEstimator | None = None


def set_token_estimator(estimator: TokenEstimator | None) -> TokenEstimator | None:
    """Replaces how text is counted, in this process; `None` brings the built-in rule back. Returns what was set before.

    Args:
        estimator: `fn(text, model) -> int`. One that raises is logged once, and the built-in rule is used in its place.
    """
    global _custom
    previous, _custom = _custom, estimator
    return previous


def estimate_tokens(
    input: str | Message | Iterable[Message], model: str | None = None, estimator: TokenEstimator | None = None
) -> int:
    """About how many tokens a text, a message or a list of messages is.

    Latin text counts about 4 characters a token, CJK one, other scripts two to three. A message adds its frame, its tool calls
    with their JSON, and 1,000 tokens for each image or file.

    Args:
        input: Text, a `Message` or messages.
        model: Passed on to an estimator of your own; the built-in rule is the same for all models.
        estimator: Counts text for this call in place of the one set by `set_token_estimator`.
    """
    count = estimator or _custom
    if isinstance(input, str):
        return _text_tokens(input, model, count)
    if isinstance(input, Message):
        return _message_tokens(input, model, count)
    if count is None:
        total = 0
        for message in input:
            known = message.wire_cache.get(_CACHE_KEY)
            total += known if known is not None else _message_tokens(message, model, None)
        return total
    return sum(_message_tokens(message, model, count) for message in input)


def estimate_tool_tokens(tools: Sequence[ToolDefinition], model: str | None = None, estimator: TokenEstimator | None = None) -> int:
    """About how many tokens the definitions of `tools` take in a request."""
    return sum(_tool_tokens(tool, model, estimator or _custom) for tool in tools)


def estimate_request_tokens(options: GenerateOptions, estimator: TokenEstimator | None = None) -> int:
    """About how many input tokens a model call has: its messages and its tool definitions."""
    tools = estimate_tool_tokens(options.tools, options.model, estimator)
    return tools + estimate_tokens(options.messages, options.model, estimator)


def _text_tokens(text: str, model: str | None, estimator: TokenEstimator | None) -> int:
    global _warned_of
    if estimator is not None:
        try:
            return max(0, int(estimator(text, model)))
        except Exception:
            if _warned_of is not estimator:
                _warned_of = estimator
                _log.warning("The token estimator raised; the built-in estimate is used in its place.", exc_info=True)
    return _builtin(text)


def _builtin(text: str) -> int:
    length = len(text)
    if not text.isascii():
        wide = sum(map(len, _WIDE.findall(text)))
        other = sum(map(len, _OTHER.findall(text)))
        length -= wide + other
    else:
        wide = other = 0
    latin = text.encode("ascii", "ignore")
    symbols = len(latin) - len(latin.translate(None, _SYMBOLS))
    letters = length - symbols
    return math.ceil(wide + other / OTHER_CHARS_PER_TOKEN + symbols * SYMBOL_TOKENS + letters / LATIN_CHARS_PER_TOKEN)


def _message_tokens(message: Message, model: str | None, estimator: TokenEstimator | None) -> int:
    cache = message.wire_cache
    if estimator is None:
        cached = cache.get(_CACHE_KEY)
        if cached is None:
            cached = cache[_CACHE_KEY] = _count(message, model, None)
        return int(cached)
    made_by, for_model, cached = cache.get(_CUSTOM_CACHE_KEY, (None, None, 0))
    if made_by is not estimator or for_model != model:
        cached = _count(message, model, estimator)
        cache[_CUSTOM_CACHE_KEY] = (estimator, model, cached)
    return int(cached)


def _count(message: Message, model: str | None, estimator: TokenEstimator | None) -> int:
    content = message.content
    if isinstance(content, str):
        tokens = _text_tokens(content, model, estimator)
    else:
        tokens = sum(_text_tokens(p.text, model, estimator) if isinstance(p, TextPart) else ATTACHMENT_TOKENS for p in content)
    tokens += MESSAGE_OVERHEAD_TOKENS + sum(_call_tokens(call, model, estimator) for call in message.tool_calls)
    return tokens + sum(_text_tokens(block.text, model, estimator) for block in message.reasoning)


def _call_tokens(call: ToolCall, model: str | None, estimator: TokenEstimator | None) -> int:
    return TOOL_OVERHEAD_TOKENS + _text_tokens(call.name, model, estimator) + _text_tokens(call.arguments, model, estimator)


def _tool_tokens(tool: ToolDefinition, model: str | None, estimator: TokenEstimator | None) -> int:
    cached = tool.wire_cache.get(_CACHE_KEY) if estimator is None else None
    if cached is not None:
        return int(cached)
    text = f"{tool.name} {tool.description} {json.dumps(tool.parameters, ensure_ascii=False, default=str)}"
    tokens = TOOL_OVERHEAD_TOKENS + _text_tokens(text, model, estimator)
    if estimator is None:
        tool.wire_cache[_CACHE_KEY] = tokens
    return tokens
