"""Compaction by hand: once, whatever the size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lousho_ray.cancellation import AbortSignal
from lousho_ray.context.compaction import Bounds, CompactionInfo, check_compaction, info_of, run_strategy
from lousho_ray.context.strategies import strategy_of
from lousho_ray.context.strategy import CompactionInput, check_strategy
from lousho_ray.messages import Message, assistant
from lousho_ray.options import Compaction
from lousho_ray.ports import GenerateOptions, GenerateResult, Limiter, LLMProvider
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.metering import meter
from lousho_ray.providers.prices import DEFAULT_CONTEXT_WINDOW_TOKENS
from lousho_ray.tokens import estimate_tokens
from lousho_ray.usage import Usage


@dataclass(frozen=True, slots=True)
class CompactedMessages:
    """What `compact_messages()` made: a new list, with the figures of the compaction and what its model calls used."""

    messages: list[Message]
    tokens_before: int
    tokens_after: int
    pruned_tool_call_ids: tuple[str, ...] = ()
    summary: str | None = None
    error: str | None = None
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class ManualCompaction:
    """A compaction by hand, before anything is done with it. `messages` is `None` when nothing was changed."""

    messages: list[Message] | None
    info: CompactionInfo
    bounds: Bounds
    usage: Usage


async def compact_messages(
    messages: Sequence[Message],
    *,
    strategy: Any = None,
    protected_tokens: int = 40_000,
    model: str | None = None,
    context_window: int | None = None,
) -> CompactedMessages:
    """Runs a strategy once, whatever the size, and returns a new list; `messages` is not changed.

    Args:
        strategy: Default `prune_tool_results_strategy()`.
        protected_tokens: Newest tokens that stay as they are.
        model: The model id the estimates are for, and whose window counts when `context_window` is not given.
        context_window: Tokens.

    A strategy that fails leaves the conversation as it was and is reported as `error`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with the field `compaction.<key>`.
    """
    given = {"protected_tokens": protected_tokens, "context_window": context_window, "strategy": strategy}
    options = check_compaction({key: value for key, value in given.items() if value is not None})
    assert options is not None
    made = await compact_by_hand(messages, options, model=model)
    info = made.info
    kept = list(messages) if made.messages is None else made.messages
    return CompactedMessages(
        kept, info.tokens_before, info.tokens_after, info.pruned_tool_call_ids, info.summary, info.error, made.usage
    )


async def compact_by_hand(
    messages: Sequence[Message],
    options: Compaction,
    *,
    model: str | None = None,
    stated_window: int | None = None,
    limiters: Sequence[Limiter] = (),
) -> ManualCompaction:
    """Runs the strategy of `options` on `messages` once. Its model calls pass `limiters`."""
    strategy = check_strategy(options.strategy) if options.strategy is not None else strategy_of(options)
    if stated_window is None and model is None:
        stated_window = DEFAULT_CONTEXT_WINDOW_TOKENS  # no model is named that a warning could be about
    bounds = Bounds.of(options, model, stated_window)
    usage = Usage()

    async def call(provider: LLMProvider, request: GenerateOptions) -> GenerateResult:
        limited = with_rate_limit(provider, list(limiters)) if limiters else provider
        result = await limited.generate(request)
        meter(provider, request, assistant(result.text, result.tool_calls), result.usage, result.served_by).add_to(usage)
        return result

    work = CompactionInput(
        messages=list(messages),
        estimate_tokens=lambda part: estimate_tokens(part, model),
        context_window=bounds.context_window,
        protected_tokens=bounds.protected_tokens,
        threshold_tokens=bounds.threshold_tokens,
        abort=AbortSignal(),
        generate=call,
        forced=True,
    )
    output = await run_strategy(strategy, work)
    changed = output.messages is not work.messages
    before = work.estimate_tokens(work.messages)
    info = info_of(strategy.name, before, work.estimate_tokens(output.messages), output)
    return ManualCompaction(output.messages if changed else None, info, bounds, usage)
