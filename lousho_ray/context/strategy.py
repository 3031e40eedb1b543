"""What a compaction strategy gets and gives back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from lousho_ray.cancellation import AbortSignal
from lousho_ray.errors import AgentExecutionError, ConfigurationError
from lousho_ray.messages import Message
from lousho_ray.ports import GenerateOptions, GenerateResult, LLMProvider

SideCall = Callable[[LLMProvider, GenerateOptions], Awaitable[GenerateResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionInput:
    """What a strategy works on.

    Attributes:
        messages: The transcript. A strategy builds a new list; giving this one back means that nothing was done.
        estimate_tokens: `fn(messages) -> int`.
        context_window: Tokens of the model's window.
        protected_tokens: Newest tokens that are not to be changed.
        threshold_tokens: What `messages` should come down to. Tool definitions and the like are taken off already.
        abort: Fires when the run is stopped.
        generate: Makes a model call that is booked on the run and passes its rate limits.
        forced: Somebody asked for the compaction: it acts whatever the size.
        memory: Kept from one compaction of a run to the next.
    """

    messages: list[Message]
    estimate_tokens: Callable[[Sequence[Message]], int]
    context_window: int
    protected_tokens: int
    threshold_tokens: int
    abort: AbortSignal
    generate: SideCall
    forced: bool = False
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOutput:
    """What a strategy made.

    Attributes:
        messages: The new transcript, or the input's own list.
        tokens_before: Estimate of the input; with `tokens_after` for the strategy's own use, they are counted again.
        pruned_tool_call_ids: The results replaced this time, in transcript order.
        summary: The text of a summary that was written.
        error: What failed on the way.
        applied: The strategy that did the work, when it was a fallback.
    """

    messages: list[Message]
    tokens_before: int = 0
    tokens_after: int = 0
    pruned_tool_call_ids: tuple[str, ...] = ()
    summary: str | None = None
    error: str | BaseException | None = None
    applied: str | None = None


@runtime_checkable
class CompactionStrategy(Protocol):
    """Any object with a `name` and `compact(input)`, sync or async.

    With the optional method `foldable_tokens(input)` it says how much it could work on: after a compaction that changed nothing, no
    other is tried until that has grown. Without it, everything before the protected tail counts.
    """

    @property
    def name(self) -> str: ...

    def compact(self, input: CompactionInput, /) -> CompactionOutput | Awaitable[CompactionOutput]: ...


def check_strategy(strategy: Any, field: str = "compaction.strategy") -> CompactionStrategy:
    """The strategy itself, when it is one.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`.
    """
    name = getattr(strategy, "name", None)
    if isinstance(strategy, type) or not isinstance(name, str) or not name or not callable(getattr(strategy, "compact", None)):
        raise ConfigurationError(
            f"{field} must be an object with a name and compact(input), such as prune_tool_results_strategy(); "
            f"got {strategy if isinstance(strategy, str) else type(strategy).__name__!r}.",
            field=field,
        )
    return strategy  # type: ignore[no-any-return]


def as_output(name: str, made: Any) -> CompactionOutput:
    """What a strategy returned, a mapping with the same keys included."""
    if isinstance(made, CompactionOutput):
        return made
    known = {item.name for item in fields(CompactionOutput)}
    if isinstance(made, Mapping) and "messages" in made and known.issuperset(made):
        return CompactionOutput(**made)
    raise AgentExecutionError(f"Compaction strategy {name!r} returned {type(made).__name__}; it must return a CompactionOutput.")
