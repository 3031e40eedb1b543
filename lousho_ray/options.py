"""The option objects of the public calls: one model each. See `option_checks` for what they have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field

from lousho_ray.errors import ConfigurationError
from lousho_ray.option_checks import (
    AGENT_KEYWORDS,
    RUN_KEYWORDS,
    SESSION_KEYWORDS,
    Options,
    check_bool,
    check_callable,
    check_choice,
    check_positive_int,
    check_positive_number,
    check_text,
    parse_options,
    parse_switch,
    snake_case,
    unknown_key,
    unknown_keyword,
)
from lousho_ray.ports import Reasoning

__all__ = [
    "AGENT_KEYWORDS",
    "RUN_KEYWORDS",
    "SESSION_KEYWORDS",
    "Backoff",
    "Compaction",
    "Limits",
    "ModelSettings",
    "Options",
    "ProjectInstructionsOptions",
    "RateLimits",
    "ReasoningOptions",
    "Retry",
    "check_bool",
    "check_callable",
    "check_choice",
    "check_positive_int",
    "check_positive_number",
    "check_text",
    "merge_settings",
    "parse_options",
    "parse_reasoning",
    "parse_switch",
    "snake_case",
    "unknown_key",
    "unknown_keyword",
]

Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole: TypeAlias = Annotated[int, Field(strict=True)]
Text: TypeAlias = Annotated[str, Field(strict=True)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]

# ------------------------------------------------------------------------------------------------------------ model settings


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    name: Annotated[str, Field(strict=True, min_length=1)]


class NamedToolChoice(BaseModel):
    """`{"type": "function", "function": {"name": ...}}`: the model must call this tool."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    type: Literal["function"]
    function: NamedFunction


class ModelSettings(Options):
    """How the model generates. A setting nobody set is left out of the request, so that the provider's default holds."""

    option = "model_settings"

    max_tokens: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")
    temperature: Number | None = Field(default=None, ge=0, le=2, description="a number from 0 to 2")
    top_p: Number | None = Field(default=None, ge=0, le=1, description="a number from 0 to 1")
    frequency_penalty: Number | None = Field(default=None, ge=-2, le=2, description="a number from -2 to 2")
    presence_penalty: Number | None = Field(default=None, ge=-2, le=2, description="a number from -2 to 2")
    stop: tuple[Text, ...] | None = Field(default=None, description="a list of strings")
    seed: Whole | None = Field(default=None, description="a whole number")
    tool_choice: Literal["auto", "required", "none"] | NamedToolChoice | None = Field(
        default=None, description='"auto", "required", "none" or {"type": "function", "function": {"name": ...}}'
    )

    def given(self) -> dict[str, Any]:
        """The settings somebody set, as plain JSON. An empty `stop` counts as not set."""
        data = self.model_dump(mode="json", exclude_none=True)
        if not data.get("stop", True):
            del data["stop"]
        return data


def merge_settings(agent: ModelSettings, call: ModelSettings) -> ModelSettings:
    """The settings of one run: those of the call win key by key; a call cannot unset one of the agent's."""
    return agent.model_copy(update={key: getattr(call, key) for key in call.model_fields_set})


# ----------------------------------------------------------------------------------------------------------- limits and retry


class Limits(Options):
    """What a run may spend. Each limit trips when its value is reached.

    With `reserve` an estimate of each model call is set aside before the call is made, so that calls in flight at the same time
    cannot pass a limit on tokens or cost together.
    """

    option = "limits"

    max_tokens: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")
    max_input_tokens: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")
    max_output_tokens: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")
    max_cost_usd: Number | None = Field(default=None, gt=0, description="a finite number above 0")
    max_duration_ms: Number | None = Field(default=None, gt=0, description="a finite number above 0")
    max_tool_errors: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")
    max_steps: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")
    on_exceeded: Literal["stop", "throw"] = Field(default="stop", description='"stop" or "throw"')
    reserve: Flag = Field(default=False, description="True or False")


class RateLimits(Options):
    """What a limiter admits: starts and tokens in any 60 seconds, and calls in flight."""

    option = "rate_limit"

    requests_per_minute: Number | None = Field(default=None, gt=0, description="a finite number above 0")
    tokens_per_minute: Number | None = Field(default=None, gt=0, description="a finite number above 0")
    max_concurrent: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")


class Backoff(Options):
    """How long to wait between tries: doubles from `initial_ms` up to `max_ms`. A longer wait asked for by a provider fails."""

    option = "retry.backoff"

    initial_ms: Number = Field(default=500.0, ge=0, description="a finite number of milliseconds, 0 or more")
    max_ms: Number = Field(default=30_000.0, ge=0, description="a finite number of milliseconds, 0 or more")


class Retry(Options):
    """How often and when a failed model call is tried again.

    Attributes:
        max_retries: Tries after the first.
        retry_on: `fn(error, attempt) -> bool` in place of the built-in rule; never asked about cancellations.
        on_retry: `fn(notice)`, called before the delay.
        timeout_ms: Bounds one attempt; of a stream only the wait for its first chunk.
        idle_timeout_ms: Bounds the gap between two chunks of a stream.
        cancel: A `CancelToken` or `AbortSignal` that ends the call, also during a delay.
    """

    option = "retry"

    max_retries: Whole = Field(default=2, ge=0, description="a whole number of at least 0")
    backoff: Backoff = Field(default_factory=lambda: Backoff(), description='a dict with "initial_ms" and "max_ms"')
    retry_on: Callable[..., Any] | None = Field(default=None, description="a function of (error, attempt)")
    on_retry: Callable[..., Any] | None = Field(default=None, description="a function of one argument")
    timeout_ms: Number | None = Field(default=None, gt=0, description="a finite number of milliseconds above 0")
    idle_timeout_ms: Number | None = Field(default=None, gt=0, description="a finite number of milliseconds above 0")
    cancel: Any = Field(default=None, description="a CancelToken or an AbortSignal")


# ------------------------------------------------------------------------------------------------------------ agent features


class Compaction(Options):
    """When and how a conversation is shortened.

    Attributes:
        strategy: The strategy; default pruning of old tool results.
        threshold_percent: Share of the context window, above 0 and up to 1, above which a compaction starts.
        context_window: Tokens; default is what is known about the model.
        protected_tokens: Newest tokens that are never changed.
        reserve_output_tokens: Tokens of the window kept free for the reply.
        on_compaction: `fn(info)`, sync or async, after each compaction that changed something or failed.
        summarizer: A `"provider/model"` string or a provider: selects the two-phase strategy.
        preview_chars: Characters of a pruned result that its marker still shows, with the call's arguments; for the default
            strategy and that of `summarizer`.
        memoize_tools: Whether a repeated call of a tool with `effect="read"` is answered from its earlier result in the run.
    """

    option = "compaction"

    strategy: Any = Field(default=None, description="a compaction strategy")
    threshold_percent: Number = Field(default=0.9, gt=0, le=1, description="a number above 0 and up to 1")
    context_window: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")
    protected_tokens: Whole = Field(default=40_000, ge=0, description="a whole number of at least 0")
    reserve_output_tokens: Whole = Field(default=0, ge=0, description="a whole number from 0 to below context_window")
    on_compaction: Callable[..., Any] | None = Field(default=None, description="a function of one argument")
    summarizer: Any = Field(default=None, description='a "provider/model" string or a provider')
    preview_chars: Whole = Field(default=0, ge=0, description="a whole number of at least 0")
    memoize_tools: Flag = Field(default=False, description="True or False")

    def model_post_init(self, context: Any, /) -> None:
        if self.strategy is not None and self.summarizer is not None:
            raise ConfigurationError(
                "compaction.summarizer and compaction.strategy both choose the strategy: keep strategy and pass it "
                "two_phase_strategy(model=...), or keep summarizer alone.",
                code="LOUSHO_CONFIG_CONFLICTING_OPTIONS",
                field="compaction.summarizer",
            )
        if self.context_window is not None and self.reserve_output_tokens >= self.context_window:
            raise ConfigurationError(
                f"compaction.reserve_output_tokens must be below context_window ({self.context_window}); "
                f"got {self.reserve_output_tokens}.",
                field="compaction.reserve_output_tokens",
            )


class ProjectInstructionsOptions(Options):
    """Where the project's own instructions are read from: the first of `files` found from `cwd` upwards."""

    option = "project_instructions"

    cwd: Any = Field(default=None, description="a path to a directory")
    files: tuple[Text, ...] = Field(default=("AGENTS.md", "CLAUDE.md"), min_length=1, description="a list of file names")

    def model_post_init(self, context: Any, /) -> None:
        for name in self.files:
            if not name or "/" in name or "\\" in name:
                raise ConfigurationError(
                    f"project_instructions.files must hold plain file names without a path; got {name!r}.",
                    field="project_instructions.files",
                )


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high"]


class ReasoningOptions(Options):
    """How much a model thinks first. `force` sends the option to models that are not known to take it."""

    option = "reasoning"

    effort: Effort = Field(default="medium", description='"none", "minimal", "low", "medium" or "high"')
    budget_tokens: Whole | None = Field(default=None, ge=1, description="a whole number of at least 1")
    summary: Literal["auto"] | None = Field(default=None, description='"auto"')
    force: Flag = Field(default=False, description="True or False")


def parse_reasoning(value: object, *, field: str = "reasoning") -> Reasoning | None:
    """An effort, a dict or `ReasoningOptions` as a provider gets it; `None` stays `None`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with `field`.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return Reasoning(effort=check_choice(value, field, get_args(Effort)))
    options = parse_options(ReasoningOptions, value, field=field)
    return Reasoning(options.effort, options.budget_tokens, options.summary, options.force)
