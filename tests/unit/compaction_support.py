"""What the tests of compaction share: long conversations, summarizers, and the vendors' rules for a transcript."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from lousho_ray.cancellation import AbortSignal
from lousho_ray.context.strategy import CompactionInput
from lousho_ray.messages import Message, ReasoningBlock, ToolCall, assistant, system, tool_result, user
from lousho_ray.ports import GenerateOptions, GenerateResult, LLMProvider, ToolDefinition
from lousho_ray.providers import ollama_wire
from lousho_ray.providers.anthropic_wire import build_request
from lousho_ray.providers.openai_chat import ChatDialect, chat_request
from lousho_ray.providers.openai_responses import responses_request
from lousho_ray.testing.fake_server import anthropic_rules, chat_rules, ollama_rules, responses_rules
from lousho_ray.testing.fake_server.records import RecordedRequest
from lousho_ray.testing.fake_server.replies import Issued
from lousho_ray.testing.fake_server.rule import Checked
from lousho_ray.tokens import estimate_tokens

HEADERS = {"authorization": "Bearer x", "x-api-key": "x", "anthropic-version": "2023-06-01"}
SIGNATURE = "signature_1"


def turn(number: int, calls: int = 3, chars: int = 400, *, signed: bool = False) -> list[Message]:
    """An assistant turn with parallel calls and their results."""
    asked = [ToolCall(f"call_{number}_{index}", "read", json.dumps({"path": f"{number}/{index}"})) for index in range(calls)]
    reasoning = (ReasoningBlock("Think.", signature=SIGNATURE, provider="anthropic", model="claude-sonnet-4-5"),) if signed else ()
    results = [tool_result(call, json.dumps("r" * chars), is_error=index == 1) for index, call in enumerate(asked)]
    return [assistant(f"Step {number}.", asked, reasoning), *results]


def conversation(turns: int = 20, calls: int = 3, chars: int = 400, *, signed: bool = False) -> list[Message]:
    """A system prompt, one wish of the user, and turns of tool calls; the last message is a result."""
    made = [system("You read files."), user("Read everything.")]
    for number in range(turns):
        made += turn(number, calls, chars, signed=signed)
    return made


def reply(text: str) -> Callable[[LLMProvider, GenerateOptions], Any]:
    async def generate(provider: LLMProvider, request: GenerateOptions) -> GenerateResult:
        return GenerateResult(text)

    return generate


def work(messages: list[Message], **fields: Any) -> CompactionInput:
    """A strategy's input whose summaries read `S`, and with which every summary will do."""
    given: dict[str, Any] = {
        "messages": messages,
        "estimate_tokens": estimate_tokens,
        "context_window": 1_000_000,
        "protected_tokens": 0,
        "threshold_tokens": 1_000_000,
        "abort": AbortSignal(),
        "generate": reply("S"),
        "forced": True,
    }
    return CompactionInput(**{**given, **fields})


def check_wire(messages: Sequence[Message]) -> None:
    """Every vendor takes the transcript as it is: its strict rules hold, and nothing was mended on the way."""
    tools = (ToolDefinition("read", "Reads a file.", {"type": "object", "properties": {}}),)
    options = GenerateOptions(messages, tools=tools)
    mistral = chat_request(options, "mistral-large", ChatDialect(call_ids="mistral"), refuse)
    ollama = ollama_wire.chat_request(options, "llama3", refuse, stream=False)
    bodies = (
        ("chat", "/v1/chat/completions", chat_request(options, "gpt-4o-mini", ChatDialect(), refuse), chat_rules.CHECKS),
        ("chat", "/mistral/v1/chat/completions", mistral, chat_rules.CHECKS),
        ("responses", "/v1/responses", responses_request(options, "gpt-4o-mini", "send", refuse), responses_rules.CHECKS),
        ("messages", "/v1/messages", build_request(options, "claude-sonnet-4-5", refuse).encode(), anthropic_rules.CHECKS),
        ("ollama", "/api/chat", ollama, ollama_rules.CHECKS),
    )
    issued = Issued(signatures={SIGNATURE: None})
    for route, path, raw, checks in bodies:
        request = RecordedRequest(0, route, "POST", path, HEADERS, b"", json.loads(raw), 0, 0.0)
        for check in checks:
            check(Checked(request, issued))


def refuse(key: str, text: str) -> None:
    raise AssertionError(f"the transcript had to be mended: {key}: {text}")
