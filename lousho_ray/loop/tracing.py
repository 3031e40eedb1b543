"""The spans of a run: `invoke_agent` around it, `chat` around each model call, `execute_tool` around each tool that runs.

What is on them stands in `lousho_ray.semconv`. Without an exporter nothing is built: each method then returns one silent object.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lousho_ray import semconv
from lousho_ray.cancellation import Aborted, AbortSignal, Detour
from lousho_ray.loop.hooks import HaltedError
from lousho_ray.messages import ContentPart, ImagePart, Message, TextPart, ToolCall
from lousho_ray.ports import (
    FallbackNotice,
    GenerateOptions,
    LLMProvider,
    ProviderNotice,
    RetryNotice,
)
from lousho_ray.providers.failures import to_provider_error
from lousho_ray.spans import Span, TraceContext, TraceExporter, now_ms, open_span
from lousho_ray.tools.registry import AnyTool
from lousho_ray.tools.results import encode_result
from lousho_ray.usage import StepUsage

if TYPE_CHECKING:
    from lousho_ray.loop.model import Reply
    from lousho_ray.loop.result import ExecutionResult
    from lousho_ray.loop.state import RunState

Old = semconv.Deprecated

MOST_ERROR_CHARS = 200
"""The longest text of a failed attempt on a `chat` span."""


class RunTrace:
    """The spans of one run.

    Args:
        exporter: Gets them; `None` for a run that is not traced.
        context: What the run takes over of the trace above it.
        agent_name: The agent that runs.
        provider_name: Its provider, before anybody has served a call.
        session_id: The session's id.
    """

    def __init__(
        self,
        exporter: TraceExporter | None = None,
        context: TraceContext | None = None,
        *,
        agent_name: str = "",
        provider_name: str = "",
        session_id: str | None = None,
    ) -> None:
        self._exporter = exporter
        self._context = context or TraceContext()
        self._agent_name = agent_name
        self._provider_name = provider_name
        self._session_id = session_id
        self._root: Span | None = None
        self._tools: dict[str, str] = {}

    @property
    def context(self) -> TraceContext:
        return self._context

    def run(self, state: RunState) -> AbstractContextManager[RunSpan]:
        """The span around the whole run."""
        return _NO_RUN if self._exporter is None else self._run(self._exporter, state)

    def chat(self, request: GenerateOptions, provider: LLMProvider, purpose: str | None = None) -> AbstractContextManager[ChatSpan]:
        """The span around one model call with its retries and fallbacks, and with the wait for a limiter."""
        if self._exporter is None:
            return _NO_CHAT
        return self._chat(self._exporter, request, provider, purpose)

    def tool(
        self, tool: AnyTool, call: ToolCall, arguments: Mapping[str, Any], abort: AbortSignal
    ) -> AbstractContextManager[ToolSpan]:
        """The span around a tool that runs."""
        return _NO_TOOL if self._exporter is None else self._tool(self._exporter, tool, call, arguments, abort)

    def below(self, tool_call_id: str) -> TraceContext:
        """What a run takes over that a tool call starts."""
        parent = self._tools.get(tool_call_id)
        if self._root is None or parent is None:
            return self._context
        return replace(self._context, parent_id=parent, trace_id=self._root.trace_id)

    @contextmanager
    def _run(self, exporter: TraceExporter, state: RunState) -> Iterator[RunSpan]:
        attributes = {
            **self._context.where,
            semconv.OPERATION_NAME: semconv.INVOKE_AGENT,
            semconv.AGENT_NAME: self._agent_name,
            semconv.PROVIDER_NAME: self._provider_name,
            semconv.CONVERSATION_ID: self._session_id,
            semconv.RESUMED_FROM: state.trace_id,
            **self._said(state.messages, state.messages[state.opened_at :], old=Old.INPUT),
        }
        earlier, context = state.usage.copy(), self._context
        name = f"{semconv.INVOKE_AGENT} {self._agent_name}"
        with open_span(exporter, name, attributes, parent_id=context.parent_id, trace_id=context.trace_id) as span:
            self._root = span
            state.trace_id = span.trace_id
            try:
                yield RunSpan(span)
            finally:
                spent = state.usage.since(earlier)
                span.set(
                    {
                        semconv.STEPS: state.steps,
                        semconv.COST_USD: spent.cost_usd if spent.model_calls else None,
                        semconv.USAGE_ESTIMATED: spent.estimated or None,
                        **_latency(span),
                    }
                )

    @contextmanager
    def _chat(
        self, exporter: TraceExporter, request: GenerateOptions, provider: LLMProvider, purpose: str | None
    ) -> Iterator[ChatSpan]:
        model = request.model or provider.default_model
        settings = {name: request.get(setting) for setting, name in semconv.REQUEST_SETTINGS.items()}
        attributes = {
            **self._context.where,
            semconv.OPERATION_NAME: semconv.CHAT,
            semconv.PROVIDER_NAME: provider.name,
            semconv.REQUEST_MODEL: model,
            semconv.OUTPUT_TYPE: None if request.response_format is None else "json",
            semconv.PURPOSE: purpose,
            semconv.CONVERSATION_ID: self._session_id,
            Old.MODEL: model,
            **{name: value for name, value in settings.items() if value is not None},
            **self._said(request.messages, request.messages, old=Old.PROMPT),
        }
        name = f"{semconv.CHAT} {model}" if model else semconv.CHAT
        with self._below_root(exporter, name, attributes, client=True) as span:
            chat = ChatSpan(span, self._context)
            try:
                yield chat
            except Exception as error:
                if isinstance(error, Detour):
                    chat.steered()
                elif not isinstance(error, Aborted):
                    span.fail(to_provider_error(error, provider.name, model))
                raise
            finally:
                chat.end()

    @contextmanager
    def _tool(
        self, exporter: TraceExporter, tool: AnyTool, call: ToolCall, arguments: Mapping[str, Any], abort: AbortSignal
    ) -> Iterator[ToolSpan]:
        context = self._context
        shown = encode_result(dict(arguments)).text if context.capture_content or not context.redact_content else None
        attributes = {
            **self._context.where,
            semconv.OPERATION_NAME: semconv.EXECUTE_TOOL,
            semconv.TOOL_NAME: tool.name,
            semconv.TOOL_CALL_ID: call.id,
            semconv.TOOL_DESCRIPTION: tool.definition.description,
            semconv.TOOL_TYPE: "function",
            semconv.AGENT_NAME: self._agent_name,
            semconv.CONVERSATION_ID: self._session_id,
            semconv.TOOL_CALL_ARGUMENTS: shown if context.capture_content else None,
            Old.TOOL_NAME: tool.name,
            Old.ARGS: None if context.redact_content else shown,
        }
        with self._below_root(exporter, f"{semconv.EXECUTE_TOOL} {tool.name}", attributes) as span:
            self._tools[call.id] = span.id
            try:
                yield ToolSpan(span, context)
            except HaltedError as error:
                span.fail(error.error)
                raise
            except asyncio.CancelledError:
                if abort.reason is not None:
                    span.refuse("AbortError", abort.reason.message)
                raise
            finally:
                del self._tools[call.id]
                span.set(_latency(span))

    def _below_root(
        self, exporter: TraceExporter, name: str, attributes: Mapping[str, Any], *, client: bool = False
    ) -> AbstractContextManager[Span]:
        root = self._root
        assert root is not None, "a run's span is around all others"
        kind: Any = "client" if client else "internal"
        return open_span(exporter, name, attributes, parent_id=root.id, trace_id=root.trace_id, kind=kind)

    def _said(self, transcript: Sequence[Message], shown: Sequence[Message], *, old: str) -> dict[str, Any]:
        """The content that the options let onto a span: the system prompt, and the messages `shown` of a transcript."""
        context = self._context
        if not context.capture_content and context.redact_content:
            return {}
        messages = messages_json(shown)
        found: dict[str, Any] = {} if context.redact_content else {old: messages}
        if context.capture_content:
            found[semconv.INPUT_MESSAGES] = messages
            rules = [{"type": "text", "content": message.text} for message in transcript if message.role == "system"]
            found[semconv.SYSTEM_INSTRUCTIONS] = _json(rules) if rules else None
        return found


class RunSpan:
    """The span of a run, or nothing."""

    __slots__ = ("_span",)

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    def ended(self, result: ExecutionResult[Any]) -> None:
        """The run returned. An aborted one has neither failed nor done what it was to do."""
        if self._span is None:
            return
        self._span.set({semconv.FINISH_REASON: result.finish_reason, Old.FINISH_REASON: result.finish_reason})
        if result.finish_reason == "aborted":
            self._span.set({semconv.ERROR_TYPE: "AbortError"})


class ChatSpan:
    """The span of a model call, or nothing."""

    __slots__ = ("_booked", "_context", "_errors", "_span", "_waited_ms")

    def __init__(self, span: Span | None = None, context: TraceContext | None = None) -> None:
        self._span = span
        self._context = context or TraceContext()
        self._booked: list[StepUsage] = []
        self._errors: list[str] = []
        self._waited_ms = 0.0

    def notice(self, notice: ProviderNotice) -> None:
        """A failed attempt that is tried again, here or with another provider, or a wait for a limiter."""
        if self._span is None:
            return
        if isinstance(notice, RetryNotice):
            self._errors.append(f"{notice.category or 'unknown'}: {notice.message}"[:MOST_ERROR_CHARS])
        elif isinstance(notice, FallbackNotice):
            self._errors.append(f"fallback: {notice.message}"[:MOST_ERROR_CHARS])
        else:
            self._waited_ms += notice.waited_ms

    def reply(self, reply: Reply) -> None:
        """The model's reply."""
        if self._span is None:
            return
        served, context = reply.served_by, self._context
        self._span.set(
            {
                semconv.PROVIDER_NAME: (served.provider if served is not None else "") or None,
                semconv.RESPONSE_MODEL: reply.response_model,
                semconv.RESPONSE_FINISH_REASONS: ["tool_call" if reply.finish_reason == "tool_calls" else reply.finish_reason],
                semconv.HOSTED_TOOL_CALLS: [call.name for call in reply.hosted] or None,
                semconv.OUTPUT_MESSAGES: messages_json([reply.message()]) if context.capture_content else None,
                Old.FINISH_REASON: reply.finish_reason,
                Old.RESULT: None if context.redact_content else reply.text,
            }
        )

    def booked(self, entry: StepUsage) -> None:
        """What the call, or a failed attempt at it, used."""
        if self._span is not None:
            self._booked.append(entry)

    def steered(self) -> None:
        """New input cut the call short."""
        assert self._span is not None
        self._span.set({semconv.FINISH_REASON: "steered"})

    def end(self) -> None:
        """The call is over."""
        assert self._span is not None
        self._span.set(
            {
                semconv.RETRY_COUNT: len(self._errors) or None,
                semconv.RETRY_ERRORS: self._errors or None,
                semconv.RATE_LIMIT_WAIT_MS: self._waited_ms or None,
                **_figures(self._booked),
                **_latency(self._span),
            }
        )


class ToolSpan:
    """The span of a tool that runs, or nothing."""

    __slots__ = ("_context", "_span")

    def __init__(self, span: Span | None = None, context: TraceContext | None = None) -> None:
        self._span = span
        self._context = context or TraceContext()

    def returned(self, value: Any) -> None:
        """What the tool returned."""
        context = self._context
        if self._span is None or (context.redact_content and not context.capture_content):
            return
        text = encode_result(value).text
        self._span.set(
            {
                semconv.TOOL_CALL_RESULT: text if context.capture_content else None,
                Old.RESULT: None if context.redact_content else text,
            }
        )


_NO_RUN = nullcontext(RunSpan())
_NO_CHAT = nullcontext(ChatSpan())
_NO_TOOL = nullcontext(ToolSpan())


def _figures(booked: Sequence[StepUsage]) -> dict[str, Any]:
    """Tokens and cost of a model call. Its cost is unknown when that of one of its attempts is."""
    if not booked:
        return {}
    used = [entry.usage for entry in booked]
    prompt = sum(usage.prompt_tokens for usage in used)
    completion = sum(usage.completion_tokens for usage in used)
    costs = [entry.cost_usd for entry in booked]
    known = [cost for cost in costs if cost is not None]
    return {
        semconv.INPUT_TOKENS: prompt,
        semconv.OUTPUT_TOKENS: completion,
        semconv.CACHE_READ_TOKENS: _sum(usage.cached_input_tokens for usage in used),
        semconv.CACHE_CREATION_TOKENS: _sum(usage.cache_write_tokens for usage in used),
        semconv.REASONING_TOKENS: _sum(usage.reasoning_tokens for usage in used),
        semconv.USAGE_ESTIMATED: any(entry.estimated for entry in booked) or None,
        semconv.COST_USD: sum(known) if len(known) == len(costs) else None,
        Old.PROMPT_TOKENS: prompt,
        Old.COMPLETION_TOKENS: completion,
        Old.TOTAL_TOKENS: prompt + completion,
    }


def _sum(figures: Iterable[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


def _latency(span: Span) -> dict[str, Any]:
    return {Old.LATENCY_MS: round(now_ms() - span.start_time, 3)}


def messages_json(messages: Iterable[Message]) -> str:
    """Messages in the form of the conventions; system messages are left out, bytes are named and reasoning is not shown."""
    return _json([{"role": message.role, "parts": _parts(message)} for message in messages if message.role != "system"])


def _parts(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.text}]
    content = message.content
    parts = [{"type": "text", "content": content}] if isinstance(content, str) else [_part(part) for part in content]
    calls = [
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": _parsed(call.arguments)} for call in message.tool_calls
    ]
    return [*(part for part in parts if part.get("content") != ""), *calls]


def _part(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "content": part.text}
    data = part.image if isinstance(part, ImagePart) else part.data
    if isinstance(data, str) and not data.startswith("data:"):
        return {"type": "uri", "mime_type": part.mime_type, "uri": data}
    return {"type": "blob", "mime_type": part.mime_type, "size": len(data)}


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
