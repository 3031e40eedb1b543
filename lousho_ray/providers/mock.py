"""`MockProvider`: canned replies without a key or a network, for examples, first steps and spec files of type `mock`.

Tests that script a model turn by turn use `lousho_ray.testing.mock_model`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from lousho_ray.errors import ConfigurationError, suggest
from lousho_ray.messages import ToolCall
from lousho_ray.ports import Chunk, GenerateOptions, GenerateResult, ServedBy, ToolDefinition
from lousho_ray.providers.wrapper import chunks_of

CANNED = (
    "This is a canned reply of the mock provider.",
    "The mock provider answers without calling a model.",
    "Set a real model to get real answers.",
)


Policy = Callable[[GenerateOptions], GenerateResult | str]


class MockProvider:
    """Answers with canned texts in turn, and calls a tool when the last user message names it.

    A named tool is called with `{}` as arguments, once for each user message; then a canned text follows. Deterministic.

    Args:
        responses: The texts to cycle through; default three sentences that say what this is.
        policy: Decides each reply from the request instead: `fn(options) -> GenerateResult | str`.
        default_model: Model id it reports.
        delay_ms: How long each reply takes.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: no responses, something else than texts, responses next to a policy, or an
            unknown option.
    """

    def __init__(
        self,
        responses: Sequence[str] | None = None,
        *,
        policy: Policy | None = None,
        default_model: str = "mock-1",
        delay_ms: float = 0,
        **unknown: Any,
    ) -> None:
        for key in unknown:
            known = ("responses", "policy", "default_model", "delay_ms")
            raise ConfigurationError(
                f"MockProvider has no option {key!r}; it takes {', '.join(known)}.{suggest(key, known)}", field=key
            )
        if policy is not None and responses is not None:
            raise ConfigurationError("MockProvider takes responses or a policy, not both.", field="policy")
        texts = CANNED if responses is None else responses
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(f"responses must be a list of at least one text; got {responses!r}.", field="responses")
        self.name = "mock"
        self.default_model: str | None = default_model
        self.responses = tuple(texts)
        self._policy = policy
        self._delay_s = delay_ms / 1000
        self._answered = 0

    def supports_tools(self, model: str | None = None) -> bool:
        return True

    def supports_streaming(self, model: str | None = None) -> bool:
        return True

    async def get_models(self) -> list[str]:
        return [self.default_model or "mock-1"]

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        return self._turn(options)

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        for chunk in chunks_of(await self.generate(options)):
            yield chunk

    def _turn(self, options: GenerateOptions) -> GenerateResult:
        served_by = ServedBy(self.name, options.model or self.default_model)
        if self._policy is not None:
            reply = self._policy(options)
            reply = GenerateResult(text=reply) if isinstance(reply, str) else reply
            return reply if reply.served_by is not None else replace(reply, served_by=served_by)
        tool = _named_tool(options)
        if tool is not None:
            calls = sum(len(message.tool_calls) for message in options.messages)
            call = ToolCall(f"call_{calls + 1}", tool.name)
            return GenerateResult(tool_calls=(call,), finish_reason="tool_calls", served_by=served_by)
        text = self.responses[self._answered % len(self.responses)]
        self._answered += 1
        return GenerateResult(text=text, served_by=served_by)


create_mock_provider = MockLLMProvider = MockProvider


def _named_tool(options: GenerateOptions) -> ToolDefinition | None:
    """The first tool that the last user message names and that was not called since."""
    called: set[str] = set()
    for message in reversed(options.messages):
        if message.role == "user":
            return next((tool for tool in options.tools if tool.name in message.text and tool.name not in called), None)
        called.update(call.name for call in message.tool_calls)
    return None
