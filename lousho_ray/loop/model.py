"""One model call of a step: the streamed or whole reply, and its usage.

Streaming changes only how the reply is obtained. The call runs in a task of its own, which an abort of the run or a steer ends.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import cast

from lousho_ray.cancellation import Aborted, AbortSignal, Detour
from lousho_ray.errors import ConfigurationError
from lousho_ray.events import (
    Failure,
    ProviderFallback,
    ProviderRetry,
    ReasoningDelta,
    ReasoningDone,
    ReasoningStart,
    TextDelta,
)
from lousho_ray.loop.hosted import HostedCalls, recorded
from lousho_ray.loop.state import RunDeps, RunState
from lousho_ray.loop.tracing import ChatSpan
from lousho_ray.messages import Message, ReasoningBlock, ToolCall
from lousho_ray.ports import (
    MODEL_FINISH_REASONS,
    Chunk,
    FailedUsage,
    FallbackNotice,
    FinishChunk,
    FinishReason,
    GenerateOptions,
    GenerateResult,
    HostedToolCall,
    HostedToolCallChunk,
    HostedToolResultChunk,
    ProviderNotice,
    ReasoningChunk,
    ReasoningEndChunk,
    RetryNotice,
    ServedBy,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers.failures import TruncatedStreamError, partial_usage
from lousho_ray.providers.prices import estimate_cost
from lousho_ray.providers.wrapper import close_stream, open_stream
from lousho_ray.tokens import estimate_tokens
from lousho_ray.usage import ProviderUsage, Spend, StepUsage

log = logging.getLogger("lousho_ray")


class Steered(Detour):
    """The model call was cut short so that new input can join first."""


@dataclass(slots=True)
class Reply:
    """One model turn as the loop sees it. `entry` and `spend` are what it used, once it is booked."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    usage: ProviderUsage | None = None
    blocks: tuple[ReasoningBlock, ...] = ()
    reasoning: str = ""
    hosted: tuple[HostedToolCall, ...] = ()
    served_by: ServedBy | None = None
    response_model: str | None = None
    entry: StepUsage = field(init=False)
    spend: Spend = field(init=False)

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it that a transcript could keep: no call, and no text but blanks."""
        return not self.tool_calls and not self.hosted and not self.text.strip()

    def message(self) -> Message:
        """The assistant message of the transcript: only signed or redacted reasoning, and only on a turn with calls, is kept.

        What the provider ran itself stands in the metadata, which no model is sent.
        """
        kept = tuple(block for block in self.blocks if block.replayable) if self.tool_calls else ()
        metadata = {"hostedToolCalls": [recorded(call) for call in self.hosted]} if self.hosted else None
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=kept, metadata=metadata)


async def call_model(request: GenerateOptions, deps: RunDeps, state: RunState, chat: ChatSpan) -> Reply:
    """Makes one model call and books it. What breaks off, the call or an attempt at it, is booked with what its server had told.

    Raises:
        Aborted: The run was stopped.
        Steered: `steer()` cut the call short before it had put anything out.
        Exception: Whatever the provider raised, raw; the loop turns it into a provider error.
    """
    stop = AbortSignal()
    call = _ModelCall(deps, stop, chat)
    request = replace(request, notify=call.notice)
    unfollow = stop.follow(deps.abort)
    deps.inbox.watch(stop)
    try:
        reply = await stop.guard(call.stream(request) if deps.stream else call.generate(request))
        await _book_attempts(state, call, deps)
        reply.entry, reply.spend = _book_reply(state, request, reply, deps)
        chat.booked(reply.entry)
        chat.reply(reply)
        return reply
    except Exception as error:
        await _book_attempts(state, call, deps)
        await _book_broken(state, call, deps)
        if not isinstance(error, Aborted) or deps.abort.aborted:
            raise
        raise Steered from None
    finally:
        call.end()
        deps.inbox.unwatch()
        unfollow()


def _book_reply(state: RunState, request: GenerateOptions, reply: Reply, deps: RunDeps) -> tuple[StepUsage, Spend]:
    """Adds a finished call to the run's usage; a call without reported usage is estimated and marked so."""
    used, estimated = reply.usage, reply.usage is None
    if used is None:
        used = ProviderUsage(estimate_tokens(request.messages) + _tool_tokens(request.tools), _reply_tokens(reply))
    return _book(state, reply, used, deps, estimated=estimated)


async def _book_attempts(state: RunState, call: _ModelCall, deps: RunDeps) -> None:
    """Books the attempts at a call that failed before it was tried again, here or with another provider."""
    spent, call.spent = call.spent, []
    for number, failed in enumerate(spent, 1):
        reply = Reply(served_by=ServedBy("", failed.model))
        entry, spend = _book(state, reply, failed.usage, deps, estimated=True)
        call.chat.booked(entry)
        await deps.budget.note(f"step-{state.steps}-attempt-{number}", spend)


async def _book_broken(state: RunState, call: _ModelCall, deps: RunDeps) -> None:
    """Books a call that broke off: its input as told, its output as told or as it came, whichever is more."""
    told = call.told
    if told is None:
        return
    came = Reply("".join(call.text), tuple(call.calls), served_by=ServedBy("", call.asked))
    used = replace(told, completion_tokens=max(told.completion_tokens, _reply_tokens(came)))
    entry, spend = _book(state, came, used, deps, estimated=True)
    call.chat.booked(entry)
    await deps.budget.note(f"step-{state.steps}", spend)


def _book(state: RunState, reply: Reply, used: ProviderUsage, deps: RunDeps, *, estimated: bool) -> tuple[StepUsage, Spend]:
    model = (reply.served_by.model if reply.served_by else None) or deps.model or deps.provider.default_model or "unknown"
    cost = Decimal(str(used.cost_usd)) if used.cost_usd is not None else estimate_cost(used, model)
    if cost is None and state.usage.cost is not None and deps.budget.limits_cost:
        warn_unpriced(model)
    state.usage.add_call(model, used, cost, estimated=estimated)
    for hosted in reply.hosted:
        state.usage.add_hosted(hosted.name)
    entry = StepUsage(state.steps, model, used, estimated, None if cost is None else float(cost))
    state.step_usage.append(entry)
    return entry, Spend(used.prompt_tokens, used.completion_tokens, cost, 1)


def warn_unpriced(model: str) -> None:
    """Says that from here on the run's cost is unknown, so that its limit on it does nothing."""
    log.warning(
        "The price of model %r is not known, so max_cost_usd is not checked in this run; register_model(id=%r, ...) sets it.",
        model,
        model,
    )


@dataclass(slots=True)
class _ModelCall:
    """Gathers one reply and reports it as it comes, until it is stopped: what a deaf provider says later is dropped."""

    deps: RunDeps
    stop: AbortSignal
    chat: ChatSpan
    text: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    thinking: list[str] | None = None
    thoughts: list[str] = field(default_factory=list)
    blocks: list[ReasoningBlock] = field(default_factory=list)
    hosted: dict[str, HostedToolCall] = field(default_factory=dict)
    hosted_events: HostedCalls = field(init=False)
    finish: FinishChunk | None = None
    told: ProviderUsage | None = None
    spent: list[FailedUsage] = field(default_factory=list)
    asked: str | None = None

    def __post_init__(self) -> None:
        self.hosted_events = HostedCalls(self.deps.emitter, self.deps.clock)

    async def generate(self, request: GenerateOptions) -> Reply:
        try:
            result = await self.deps.provider.generate(request)
        except BaseException as error:
            self.told = partial_usage(error)
            raise
        self.stop.raise_if_aborted()
        self.deps.inbox.unwatch()
        if not isinstance(result, GenerateResult):
            raise ConfigurationError(
                f"Provider {self.deps.provider.name!r} returned {type(result).__name__} from generate(); "
                "it must return a GenerateResult.",
                field="provider",
            )
        for block in result.reasoning:
            self._think(block.text)
            self._stop_thinking(block)
        for hosted in result.hosted_tool_calls:
            self.hosted_events.end(hosted)
        if result.text:
            self.deps.emitter.emit(TextDelta, text=result.text)
        return Reply(
            result.text,
            result.tool_calls,
            _reason(result.finish_reason, result.tool_calls, result.hosted_tool_calls),
            result.usage,
            result.reasoning,
            "\n\n".join(block.text for block in result.reasoning if block.text),
            result.hosted_tool_calls,
            result.served_by,
            result.response_model,
        )

    async def stream(self, request: GenerateOptions) -> Reply:
        emitter = self.deps.emitter
        chunks = await open_stream(self.deps.provider, request)
        try:
            async for chunk in chunks:
                self.stop.raise_if_aborted()
                self._take(chunk)
                if emitter.on:
                    await emitter.drain()
        except BaseException as error:
            self.told = partial_usage(error)
            raise
        finally:
            await close_stream(chunks)
        if self.finish is None:
            raise TruncatedStreamError(f"The stream of provider {self.deps.provider.name!r} ended without a finish.")
        self._stop_thinking(None)
        calls = tuple(self.calls)
        return Reply(
            "".join(self.text),
            calls,
            _reason(self.finish.finish_reason, calls, self.hosted.values()),
            self.finish.usage,
            tuple(self.blocks),
            "\n\n".join(thought for thought in self.thoughts if thought),
            tuple(self.hosted.values()),
            self.finish.served_by,
            self.finish.response_model,
        )

    def _take(self, chunk: Chunk) -> None:
        match chunk:
            case TextChunk(text=text):
                if text:
                    self._output()
                    self.text.append(text)
                    self.deps.emitter.emit(TextDelta, text=text)
            case ReasoningChunk(text=text):
                self._think(text)
            case ReasoningEndChunk(block=block):
                self._stop_thinking(block)
            case ToolCallChunk(tool_call=call):
                self._output()
                self.calls.append(call)
            case HostedToolCallChunk(call=hosted):
                self._output()
                self.hosted[hosted.id] = hosted
                self.hosted_events.start(hosted)
            case HostedToolResultChunk(call=hosted):
                self._output()
                self.hosted[hosted.id] = hosted
                self.hosted_events.end(hosted)
            case FinishChunk():
                self.finish = chunk

    def end(self) -> None:
        """The call is over, one way or the other: what was under way in it is, too."""
        self._stop_thinking(None)
        self.hosted_events.abandon()

    def _output(self) -> None:
        """Something of the reply is out: from now on a steer waits, and reasoning is over."""
        self.deps.inbox.unwatch()
        self._stop_thinking(None)

    def _think(self, text: str) -> None:
        if self.thinking is None:
            self.thinking = []
            self.deps.emitter.emit(ReasoningStart)
        self.thinking.append(text)
        if text:
            self.deps.emitter.emit(ReasoningDelta, text=text)

    def _stop_thinking(self, block: ReasoningBlock | None) -> None:
        if block is not None:
            self.blocks.append(block)
        if self.thinking is None:
            return
        thought, self.thinking = "".join(self.thinking), None
        self.thoughts.append(thought)
        self.deps.emitter.emit(ReasoningDone, text=thought)

    def notice(self, notice: ProviderNotice) -> None:
        """A retry or fallback: what the failed attempt thought is closed and is no part of the reply."""
        emitter = self.deps.emitter
        self.chat.notice(notice)
        if isinstance(notice, RetryNotice | FallbackNotice) and notice.spent is not None:
            self.spent.append(notice.spent)
        if isinstance(notice, FallbackNotice):
            self.asked = notice.to_model
        if self.stop.aborted:
            return
        if isinstance(notice, RetryNotice | FallbackNotice):
            self._stop_thinking(None)
            self.thoughts.clear()
            self.blocks.clear()
        if isinstance(notice, RetryNotice):
            emitter.emit(
                ProviderRetry,
                attempt=notice.attempt,
                max_retries=notice.max_retries,
                delay_ms=notice.delay_ms,
                error=Failure(message=notice.message, category=notice.category),
                provider=notice.provider,
            )
        elif isinstance(notice, FallbackNotice):
            emitter.emit(
                ProviderFallback,
                from_provider=notice.from_provider,
                to_provider=notice.to_provider,
                from_model=notice.from_model,
                to_model=notice.to_model,
                error=Failure(message=notice.message),
            )


def _reason(reason: str, calls: tuple[ToolCall, ...], hosted: Collection[HostedToolCall]) -> FinishReason:
    if calls and reason not in ("content_filter", "length"):
        return "tool_calls"
    if hosted and not calls and reason == "tool_calls":  # the provider ran them all itself
        return "stop"
    return cast("FinishReason", reason) if reason in MODEL_FINISH_REASONS else "other"


def _tool_tokens(tools: tuple[ToolDefinition, ...]) -> int:
    return sum(estimate_tokens(f"{tool.name} {tool.description} {tool.parameters}") for tool in tools)


def _reply_tokens(reply: Reply) -> int:
    return estimate_tokens([reply.message()])
