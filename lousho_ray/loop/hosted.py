"""Calls that a model's provider ran itself, as events: they look like tool calls and are marked `executed_by="provider"`.

Hooks, gates and limits do not apply to them: they have happened when the loop hears of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lousho_ray.clock import Clock
from lousho_ray.events import ErrorInfo, ToolDone, ToolError, ToolStart
from lousho_ray.loop.emitter import Emitter
from lousho_ray.ports import HostedToolCall
from lousho_ray.tools.results import encode_result, to_json

MAX_RESULT_CHARS = 20_000
"""How much JSON of a hosted call's result events and transcripts carry."""


class HostedCalls:
    """Reports the hosted calls of one model call; each has one start and one end."""

    def __init__(self, emitter: Emitter, clock: Clock) -> None:
        self._emitter = emitter
        self._clock = clock
        self._open: dict[str, tuple[HostedToolCall, float]] = {}

    def start(self, call: HostedToolCall) -> None:
        if call.id in self._open:
            return
        self._open[call.id] = call, self._clock.now()
        args = encode_result(dict(call.args)).safe if isinstance(call.args, Mapping) else {}
        self._emitter.emit(ToolStart, tool_call_id=call.id, tool_name=call.name, args=args, executed_by="provider")

    def end(self, call: HostedToolCall) -> None:
        """A call returned; one that was never reported as started is now."""
        self.start(call)
        result = shown_result(call.result)
        if call.is_error:
            self._fail(call, result if isinstance(result, str) else to_json(result))
            return
        self._emitter.emit(ToolDone, result=result, **self._facts(call))

    def abandon(self) -> None:
        """The model call is over: what it left open has no outcome."""
        for call, _ in list(self._open.values()):
            self._fail(call, "The model call ended before this call of its provider did.")

    def _fail(self, call: HostedToolCall, message: str) -> None:
        self._emitter.emit(ToolError, error=ErrorInfo(name="HostedToolError", message=message), **self._facts(call))

    def _facts(self, call: HostedToolCall) -> dict[str, Any]:
        _, started = self._open.pop(call.id)
        elapsed_ms = round((self._clock.now() - started) * 1000, 3)
        return {"tool_call_id": call.id, "tool_name": call.name, "duration_ms": elapsed_ms, "executed_by": "provider"}


def recorded(call: HostedToolCall) -> dict[str, Any]:
    """A hosted call as the metadata of its assistant message keeps it."""
    return {
        "id": call.id,
        "name": call.name,
        "args": encode_result(call.args).safe,
        "result": shown_result(call.result),
        "isError": call.is_error,
        "sources": encode_result(list(call.sources)).safe,
    }


def shown_result(result: Any) -> Any:
    """The JSON-safe result, cut as JSON text when it is long."""
    safe = encode_result(result).safe
    text = to_json(safe)
    if len(text) <= MAX_RESULT_CHARS:
        return safe
    return f"{text[:MAX_RESULT_CHARS]}... [truncated {len(text) - MAX_RESULT_CHARS} characters]"
