"""A model that answers at once, without any I/O: what is left is what the loop itself costs."""

from __future__ import annotations

from collections.abc import AsyncIterator

from lousho_ray.messages import ToolCall
from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, GenerateResult, TextChunk, ToolCallChunk
from lousho_ray.usage import ProviderUsage

USAGE = ProviderUsage(20, 5)


class AnswersAtOnce:
    """Asks for one call of `add` in each step of a turn but the last."""

    name = "at-once"
    default_model = "bench"

    def __init__(self, steps: int) -> None:
        self._steps = steps

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        call = self._call(options)
        if call is None:
            return GenerateResult(text="done", usage=USAGE)
        return GenerateResult(tool_calls=(call,), finish_reason="tool_calls", usage=USAGE)

    async def stream(self, options: GenerateOptions, /) -> AsyncIterator[Chunk]:
        call = self._call(options)
        yield TextChunk("done") if call is None else ToolCallChunk(call)
        yield FinishChunk("stop" if call is None else "tool_calls", USAGE)

    def _call(self, options: GenerateOptions) -> ToolCall | None:
        # A system and a user message, then two per step.
        step = len(options.messages) // 2
        return ToolCall(f"call_{step}", "add", '{"a":1,"b":2}') if step < self._steps else None
