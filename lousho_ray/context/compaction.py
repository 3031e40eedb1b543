"""Compaction before a model call: when it acts, and how its outcome gets into the run.

It never fails a run: what goes wrong is reported and the run goes on with the conversation as it was, or pruned.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lousho_ray.cancellation import ABANDON_AFTER_S, Aborted, AbortSignal
from lousho_ray.context.strategies import strategy_of
from lousho_ray.context.strategy import CompactionInput, CompactionOutput, CompactionStrategy, as_output
from lousho_ray.context.tail import tail_start
from lousho_ray.context.validity import defect
from lousho_ray.errors import message_of
from lousho_ray.events import CompactionDone, CompactionStart, Failure
from lousho_ray.messages import Message
from lousho_ray.option_checks import parse_switch
from lousho_ray.options import Compaction
from lousho_ray.ports import GenerateOptions, GenerateResult, LLMProvider
from lousho_ray.providers.prices import context_window_tokens
from lousho_ray.tokens import estimate_request_tokens, estimate_tokens

log = logging.getLogger("lousho_ray.compaction")

PURPOSE = "compaction"
"""What summary calls are booked as: `StepUsage.purpose`."""


@dataclass(frozen=True, slots=True)
class CompactionInfo:
    """What `on_compaction` gets: names and figures as in `compaction.done`, and the summary's text."""

    strategy: str
    tokens_before: int
    tokens_after: int
    pruned_tool_call_ids: tuple[str, ...] = ()
    summary: str | None = None
    error: str | None = None
    applied: str | None = None


class HookedRun(Protocol):
    """What the hook needs of a run: see `HookContext`."""

    @property
    def messages(self) -> list[Message]: ...
    @property
    def provider(self) -> LLMProvider | None: ...
    @property
    def next_request(self) -> Callable[[], GenerateOptions] | None: ...
    @property
    def emit(self) -> Callable[..., None] | None: ...

    async def generate(self, provider: LLMProvider, request: GenerateOptions, purpose: str) -> GenerateResult: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """The figures of one compaction, in tokens."""

    context_window: int
    threshold_tokens: int
    protected_tokens: int

    @classmethod
    def of(cls, options: Compaction, model: str | None, stated: int | None) -> Bounds:
        """The window is the option's, else the one the provider states, else what is known of the model."""
        window = options.context_window or context_window_tokens(model, stated)
        # The small addend keeps 0.29 * 100 from becoming 28.
        threshold = math.floor(options.threshold_percent * max(0, window - options.reserve_output_tokens) + 1e-6)
        protected = options.protected_tokens
        if "protected_tokens" not in options.model_fields_set:
            protected = min(protected, window // 2)  # in a small window the default would protect everything
        return cls(window, threshold, protected)


def check_compaction(value: Any) -> Compaction | None:
    """The `compaction` option, with its strategy made; `None` when it is off.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` with the field `compaction.<key>`, `LOUSHO_CONFIG_CONFLICTING_OPTIONS`, or what
            `resolve_provider()` raises for the summarizer.
    """
    options = parse_switch(Compaction, value, field="compaction")
    return None if options is None else options.model_copy(update={"strategy": strategy_of(options), "summarizer": None})


def create_compaction_hook(options: Any = True, **more: Any) -> CompactionHook:
    """The hook that `create_agent(compaction=...)` installs, to be put at the end of a `hooks` list.

    Args:
        options: A dict or `Compaction`; or give its keys as keywords.

    Raises:
        ConfigurationError: As `create_agent(compaction=...)` does.
    """
    checked = check_compaction(more if more and options is True else options)
    return CompactionHook(checked if checked is not None else Compaction(strategy=strategy_of(Compaction())))


class CompactionHook:
    """Compacts the conversation of one run before a model call that would be too large."""

    name = "compaction"

    def __init__(self, options: Compaction) -> None:
        self._options = options
        self._strategy: CompactionStrategy = options.strategy or strategy_of(options)
        self._memory: dict[str, Any] = {}
        self._in_vain_at: int | None = None
        self._warned = False

    def for_run(self) -> CompactionHook:
        """A hook with a memory of its own: what was tried in vain is remembered per run."""
        return CompactionHook(self._options)

    async def pre_generate(self, ctx: HookedRun) -> None:
        if ctx.next_request is None or ctx.provider is None:
            return
        request = ctx.next_request()
        model = request.model or ctx.provider.default_model
        bounds = Bounds.of(self._options, model, getattr(ctx.provider, "context_window", None))
        size = estimate_request_tokens(request)
        if size <= bounds.threshold_tokens:
            return
        provider_call = ctx.generate
        overhead = size - estimate_tokens(ctx.messages, model)
        work = CompactionInput(
            messages=list(ctx.messages),
            estimate_tokens=lambda messages: estimate_tokens(messages, model),
            context_window=bounds.context_window,
            protected_tokens=bounds.protected_tokens,
            threshold_tokens=max(0, bounds.threshold_tokens - overhead),
            abort=request.abort or AbortSignal(),
            generate=lambda provider, side_request: provider_call(provider, side_request, PURPOSE),
            memory=self._memory,
        )
        foldable = foldable_tokens(self._strategy, work)
        if self._in_vain_at is None or foldable > self._in_vain_at:
            changed = await self._compact(ctx, work, bounds, size)
            # Asked again: after a rejected summary a strategy counts only what it still may work on.
            self._in_vain_at = None if changed else foldable_tokens(self._strategy, work)

    async def _compact(self, ctx: HookedRun, work: CompactionInput, bounds: Bounds, size: int) -> bool:
        strategy, emit = self._strategy.name, ctx.emit or _nobody_listens
        emit(
            CompactionStart,
            strategy=strategy,
            tokens_before=size,
            context_window=bounds.context_window,
            threshold_tokens=bounds.threshold_tokens,
        )
        info = CompactionInfo(strategy, size, size, error="The run was stopped.")
        changed = False
        try:
            output = await run_strategy(self._strategy, work)
            work.abort.raise_if_aborted()
            changed = output.messages is not work.messages
            saved = work.estimate_tokens(work.messages) - work.estimate_tokens(output.messages) if changed else 0
            info = info_of(strategy, size, size - saved, output)
            if changed:
                ctx.messages[:] = output.messages
        finally:
            emit(CompactionDone, **done_fields(info, changed=changed))
        if changed or info.error is not None:
            await tell(self._options.on_compaction, info)
        self._warn(info, work, bounds)
        return changed

    def _warn(self, info: CompactionInfo, work: CompactionInput, bounds: Bounds) -> None:
        if info.tokens_after <= bounds.context_window or self._warned:
            return
        self._warned = True
        messages = work.estimate_tokens(work.messages)
        tail = work.messages[tail_start(work.messages, work.protected_tokens, work.estimate_tokens) :]
        log.warning(
            "After compaction the request still has about %s tokens, more than the context window of %s. Before it there were %s "
            "of tool definitions and call instructions and %s of messages, %s of them in the protected tail. Lower "
            "protected_tokens, offer fewer tools, or send smaller messages.",
            *(f"{n:,}" for n in (info.tokens_after, bounds.context_window, info.tokens_before - messages, messages)),
            f"{work.estimate_tokens(tail):,}",
        )


async def run_strategy(strategy: CompactionStrategy, work: CompactionInput) -> CompactionOutput:
    """What the strategy makes of `work`; the input's own list, with an error, when it raises or would break the transcript."""
    unchanged = CompactionOutput(messages=work.messages)
    try:
        made: Any = strategy.compact(replace(work))
        if inspect.isawaitable(made):
            # Half the time that the run itself waits for a deaf task: the end of a compaction is reported before the run's.
            made = await work.abort.guard(_awaited(made), abandon_after_s=ABANDON_AFTER_S / 2)
        output = as_output(strategy.name, made)
    except Aborted:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if work.abort.aborted or (task is not None and task.cancelling()):
            raise
        return replace(unchanged, error="The compaction was cancelled.")
    except (Exception, SystemExit) as error:
        return replace(unchanged, error=message_of(error))
    if output.messages is work.messages:
        return output
    broken = defect(work.messages, output.messages)
    if broken is not None:
        return replace(unchanged, error=f"The result of compaction strategy {strategy.name!r} was discarded: {broken}.")
    return replace(output, messages=list(output.messages))


def foldable_tokens(strategy: CompactionStrategy, work: CompactionInput) -> int:
    """How much the strategy could work on: what it says itself, else everything before the protected tail."""
    own = getattr(strategy, "foldable_tokens", None)
    if own is not None:
        try:
            return int(own(work))
        except Exception:
            log.exception("foldable_tokens() of compaction strategy %r raised; the whole foldable part counts.", strategy.name)
    tail = tail_start(work.messages, work.protected_tokens, work.estimate_tokens)
    return work.estimate_tokens(work.messages[:tail])


def info_of(strategy: str, before: int, after: int, output: CompactionOutput) -> CompactionInfo:
    error = message_of(output.error) if isinstance(output.error, BaseException) else output.error
    return CompactionInfo(
        strategy, before, after, tuple(output.pruned_tool_call_ids), output.summary, error, _other(output.applied, strategy)
    )


def done_fields(info: CompactionInfo, *, changed: bool) -> dict[str, Any]:
    """The fields of `compaction.done`: all of the info but the summary's text."""
    return {
        "strategy": info.strategy,
        "tokens_before": info.tokens_before,
        "tokens_after": info.tokens_after,
        "pruned_tool_call_ids": info.pruned_tool_call_ids,
        "summary": True if info.summary is not None else None,
        "error": None if info.error is None else Failure(message=info.error),
        "applied": info.applied,
        "noop": None if changed else True,
    }


async def tell(listener: Callable[[CompactionInfo], Any] | None, info: CompactionInfo) -> None:
    """Calls `on_compaction`. What it raises is logged: it cannot fail a run."""
    if listener is None:
        return
    try:
        told = listener(info)
        if inspect.isawaitable(told):
            await told
    except Exception:
        log.exception("on_compaction raised; the run goes on.")


async def _awaited(value: Any) -> Any:
    return await value


def _other(applied: str | None, strategy: str) -> str | None:
    return applied if applied != strategy else None


def _nobody_listens(*_: Any, **__: Any) -> None:
    """In place of `ctx.emit` where a run has no listener."""
