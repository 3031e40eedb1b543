"""Ports: what the loop needs from the world, as Protocols.

Providers, stores, limiters and ledgers implement these; the loop knows nothing else of them, so a run is the same in one
process and over Ray. Every value that crosses a port is plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from lousho_ray.cancellation import AbortSignal
from lousho_ray.events import Event
from lousho_ray.messages import Message, ReasoningBlock, ToolCall
from lousho_ray.usage import ProviderUsage

FinishReason: TypeAlias = Literal[
    "stop",
    "length",
    "tool_calls",
    "content_filter",
    "error",
    "other",
    "awaiting-approval",
    "aborted",
    "max-steps",
    "output-invalid",
    "budget-exceeded",
    "guardrail",
]
"""How a run ended. The first six are the model's own; an unknown provider reason is `other`."""

MODEL_FINISH_REASONS: frozenset[str] = frozenset({"stop", "length", "tool_calls", "content_filter", "error", "other"})

# ---------------------------------------------------------------------------------------------------------------- providers


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool as a model sees it. `parameters` is a JSON schema; `wire_cache` holds a provider's encoded form of it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    wire_cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return (ToolDefinition, (self.name, self.description, dict(self.parameters)))


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Asks for JSON; `schema` is a hint that a provider may ignore."""

    schema: Mapping[str, Any] | None = None
    type: Literal["json"] = "json"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How much a model thinks first: `none`, `minimal`, `low`, `medium` or `high`."""

    effort: str = "medium"
    budget_tokens: int | None = None
    summary: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class FailedUsage:
    """What a failed attempt had used, as far as its server told. `model` is the one that was asked."""

    model: str | None
    usage: ProviderUsage


@dataclass(frozen=True, slots=True)
class RetryNotice:
    """A model call failed and is tried again. `attempt` 1 = the first try failed; `delay_ms` is the delay really used."""

    attempt: int
    max_retries: int
    delay_ms: float
    message: str
    category: str | None
    provider: str
    spent: FailedUsage | None = None


@dataclass(frozen=True, slots=True)
class FallbackNotice:
    """The next provider takes over."""

    from_provider: str
    to_provider: str
    from_model: str | None
    to_model: str | None
    message: str
    spent: FailedUsage | None = None


@dataclass(frozen=True, slots=True)
class WaitNotice:
    """A model call was admitted by a limiter after waiting."""

    waited_ms: float


ProviderNotice: TypeAlias = RetryNotice | FallbackNotice | WaitNotice


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One model call. Read-only.

    `settings` holds only the model settings somebody set (`max_tokens`, `temperature`, `top_p`, `frequency_penalty`,
    `presence_penalty`, `stop`, `seed`, `tool_choice`): a key nobody set is absent, never `None`. `notify` is told of retries and
    fallbacks before they happen; `abort` is for providers that cannot be cancelled through asyncio.
    """

    messages: Sequence[Message]
    model: str | None = None
    tools: tuple[ToolDefinition, ...] = ()
    hosted_tools: tuple[Any, ...] = ()
    response_format: ResponseFormat | None = None
    reasoning: Reasoning | None = None
    prompt_caching: Literal["auto", False] = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    notify: Callable[[ProviderNotice], None] | None = field(default=None, compare=False, repr=False)
    abort: AbortSignal | None = field(default=None, compare=False, repr=False)

    def get(self, key: str, default: Any = None) -> Any:
        """The model setting `key`, or `default` when nobody set it."""
        return self.settings.get(key, default)


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Who answered a call: usage and cost are booked under `model`."""

    provider: str
    model: str | None


@dataclass(frozen=True, slots=True)
class HostedToolCall:
    """A call that the provider ran itself."""

    id: str
    name: str
    args: Any = None
    result: Any = None
    is_error: bool = False
    sources: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One model turn. `usage` is `None` when the backend reported none. `raw_response` never reaches events, stores or logs."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    usage: ProviderUsage | None = None
    reasoning: tuple[ReasoningBlock, ...] = ()
    hosted_tool_calls: tuple[HostedToolCall, ...] = ()
    response_model: str | None = None
    served_by: ServedBy | None = None
    raw_response: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class TextChunk:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningChunk:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningEndChunk:
    """A block of reasoning ended; `block` is set when it is signed or redacted and must be sent back."""

    block: ReasoningBlock | None = None


@dataclass(frozen=True, slots=True)
class ToolCallChunk:
    """A complete call; fragments never leave a provider."""

    tool_call: ToolCall


@dataclass(frozen=True, slots=True)
class HostedToolCallChunk:
    call: HostedToolCall


@dataclass(frozen=True, slots=True)
class HostedToolResultChunk:
    call: HostedToolCall


@dataclass(frozen=True, slots=True)
class FinishChunk:
    """Last and exactly once. A stream that ends without it was cut off."""

    finish_reason: str
    usage: ProviderUsage | None = None
    served_by: ServedBy | None = None
    response_model: str | None = None


Chunk: TypeAlias = (
    TextChunk | ReasoningChunk | ReasoningEndChunk | ToolCallChunk | HostedToolCallChunk | HostedToolResultChunk | FinishChunk
)


@runtime_checkable
class LLMProvider(Protocol):
    """A model. A call is exactly one model turn: a provider never runs tools and never loops.

    Optional members, "no" when missing: `stream(options)` (an async generator function, or a coroutine that returns an async
    iterator of chunks), `supports_tools(model)`, `supports_streaming(model)`, `supports_hosted_tool(type)`, `get_models()`,
    `aclose()`. Cancelling the awaiting task must close the HTTP request.
    """

    @property
    def name(self) -> str: ...

    @property
    def default_model(self) -> str | None: ...

    async def generate(self, options: GenerateOptions, /) -> GenerateResult: ...


# ----------------------------------------------------------------------------------------------------------------- limiters


class Permit(Protocol):
    """An admitted call. `settle` replaces its estimate by what it used; `release` frees its slot. Both may be called once, in any
    order, and never block."""

    def settle(self, tokens: int) -> None: ...

    def release(self) -> None: ...


class Limiter(Protocol):
    """Queues model calls, first in first out."""

    async def acquire(self, tokens: int) -> Permit:
        """Waits until the call may start. `tokens` is the call's estimate. Cancelling the wait books nothing."""
        ...


# ------------------------------------------------------------------------------------------------------------------- stores


class SessionStore(Protocol):
    """Transcripts. `None` = never saved, `[]` = saved empty. All methods copy."""

    async def load(self, id: str, /) -> list[Message] | None: ...

    async def save(self, id: str, messages: Sequence[Message], /) -> None: ...

    async def delete(self, id: str, /) -> None: ...


class CheckpointStore(Protocol):
    """Unfinished runs. A checkpoint is a JSON object with the documented camelCase keys; unknown keys round-trip. A store may
    also offer `history(id, *, limit=None)` and `delete_prefix(prefix)`."""

    async def save(self, checkpoint: Mapping[str, Any], /) -> None: ...

    async def load(self, id: str, /) -> dict[str, Any] | None: ...

    async def delete(self, id: str, /, *, keep_history: bool = False) -> None: ...


class ApprovalStore(Protocol):
    """Pauses. `resolve` takes a record once: of two callers exactly one gets it."""

    async def save(self, pending: Mapping[str, Any], snapshot: Mapping[str, Any], /) -> None: ...

    async def load(self, id: str, /) -> tuple[dict[str, Any], dict[str, Any]] | None: ...

    async def resolve(self, id: str, /) -> tuple[dict[str, Any], dict[str, Any]] | None: ...


class AgentStore(Protocol):
    """The three parts; each may be `None`."""

    @property
    def sessions(self) -> SessionStore | None: ...

    @property
    def checkpoints(self) -> CheckpointStore | None: ...

    @property
    def approvals(self) -> ApprovalStore | None: ...


# ---------------------------------------------------------------------------------------------------------- tools, observers

Observer: TypeAlias = Callable[[Event], None]
"""Gets every event of a run, synchronously, in stream order."""


@dataclass(frozen=True, slots=True)
class Approval:
    """The human decision behind a call: `ctx.approval`."""

    note: str | None = None
    by: str | None = None


@dataclass(slots=True)
class ToolContext:
    """What a tool's function gets as `ctx`.

    Attributes:
        tool_call_id: The model's id of the call, unchanged when the call is re-run after a crash: the idempotency key.
        messages: What the model saw before this call, without the system prompt and without the calling turn. Read-only.
        session_id: The session's id; `None` outside a session.
        principal: The verified caller, frozen.
        metadata: The caller's `metadata`.
        approval: Set only when a person approved this call.
        abort_signal: Fires when the run is aborted; sync tools should look at `abort_signal.aborted`.
        run: The running loop's own services; not for tools of users.
    """

    tool_call_id: str
    messages: Sequence[Message] = ()
    session_id: str | None = None
    principal: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    approval: Approval | None = None
    abort_signal: AbortSignal = field(default_factory=AbortSignal)
    run: Any = field(default=None, repr=False)
