"""The built-in strategies, as a user makes them."""

from __future__ import annotations

from typing import Any

from lousho_ray.context.prune import PruneStrategy
from lousho_ray.context.strategy import CompactionStrategy, check_strategy
from lousho_ray.context.summarize import DEFAULT_SUMMARY_PROMPT, SummarizeStrategy
from lousho_ray.context.two_phase import TwoPhaseStrategy
from lousho_ray.option_checks import check_positive_int, check_text
from lousho_ray.options import Compaction
from lousho_ray.ports import LLMProvider


def prune_tool_results_strategy(*, protected_tokens: int | None = None, preview_chars: int = 0) -> PruneStrategy:
    """Replaces older tool results by short markers, without a model call.

    Args:
        protected_tokens: Newest tokens that stay as they are; default the option's.
        preview_chars: Above 0, a marker also shows the call's arguments and this many characters of the result.
    """
    return PruneStrategy(_protected(protected_tokens), check_positive_int(preview_chars, "preview_chars", minimum=0))


def summarize_strategy(
    *,
    model: str | LLMProvider,
    protected_tokens: int | None = None,
    prompt: str = DEFAULT_SUMMARY_PROMPT,
    max_summary_tokens: int | None = None,
) -> SummarizeStrategy:
    """Replaces the turns before the protected tail by one summary message. When the summary fails, old tool results are pruned.

    Args:
        model: A `"provider/model"` string or a provider: writes the summary.
        protected_tokens: Newest tokens that stay as they are; default the option's.
        prompt: The system prompt of the summary call. The default asks for goal, instructions, progress, state and details, and to
            keep what tools returned apart from what the user wants.
        max_summary_tokens: The summary call's `max_tokens`.

    Raises:
        ConfigurationError: An argument cannot be used, or `model` cannot be resolved.
    """
    return SummarizeStrategy(
        summarizer_of(model, "model"),
        _protected(protected_tokens),
        check_text(prompt, "prompt"),
        None if max_summary_tokens is None else check_positive_int(max_summary_tokens, "max_summary_tokens"),
    )


def two_phase_strategy(
    *,
    model: str | LLMProvider,
    protected_tokens: int | None = None,
    prompt: str = DEFAULT_SUMMARY_PROMPT,
    max_summary_tokens: int | None = None,
    preview_chars: int = 0,
) -> TwoPhaseStrategy:
    """Prunes first, and summarizes only when that is not enough. Takes what the two single strategies take."""
    return TwoPhaseStrategy(
        SummarizeStrategy(
            summarizer_of(model, "model"),
            _protected(protected_tokens),
            check_text(prompt, "prompt"),
            None if max_summary_tokens is None else check_positive_int(max_summary_tokens, "max_summary_tokens"),
            check_positive_int(preview_chars, "preview_chars", minimum=0),
        )
    )


def strategy_of(options: Compaction) -> CompactionStrategy:
    """The strategy that the options choose: their own, two phases with a `summarizer`, else pruning."""
    if options.strategy is not None:
        return check_strategy(options.strategy)
    if options.summarizer is not None:
        summarizer = summarizer_of(options.summarizer, "compaction.summarizer")
        return TwoPhaseStrategy(SummarizeStrategy(summarizer, preview_chars=options.preview_chars))
    return PruneStrategy(preview_chars=options.preview_chars)


def summarizers_of(options: Compaction) -> tuple[LLMProvider, ...]:
    """The providers that the built-in strategies write summaries with."""
    strategy = options.strategy.summarizing if isinstance(options.strategy, TwoPhaseStrategy) else options.strategy
    return (strategy.provider,) if isinstance(strategy, SummarizeStrategy) else ()


def summarizer_of(model: Any, field: str) -> LLMProvider:
    """The provider that writes summaries, with the retries that `create_agent` gives to its own."""
    from lousho_ray.providers.resolve import resolve_provider
    from lousho_ray.providers.retry import RetryProvider, with_retry
    from lousho_ray.providers.wrapper import check_provider

    provider = resolve_provider(model, caller=field) if isinstance(model, str) else check_provider(model, field)
    retries = getattr(provider, "max_retries", None)
    if isinstance(provider, RetryProvider) or not isinstance(retries, int):
        return provider
    return with_retry(provider, max_retries=retries)


def _protected(protected_tokens: int | None) -> int | None:
    return None if protected_tokens is None else check_positive_int(protected_tokens, "protected_tokens", minimum=0)
