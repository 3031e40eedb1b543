"""What a run is made of: `RunState`, plain data that a checkpoint can hold, and `RunDeps`, the live things it works with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from lousho_ray.cancellation import AbortSignal, Detour
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.hosted_tools import HostedTool
from lousho_ray.loop.budget import Budget
from lousho_ray.loop.emitter import Emitter
from lousho_ray.loop.hooks import HookChain
from lousho_ray.loop.inbox import Inbox
from lousho_ray.loop.output import Invalid, OutputContract, Valid
from lousho_ray.loop.result import BudgetBreach, ExecutionResult, ToolCallRecord
from lousho_ray.loop.tracing import RunTrace
from lousho_ray.messages import ImagePart, Message, ToolCall
from lousho_ray.permissions import ModeCell, Permissions
from lousho_ray.ports import FinishReason, Limiter, LLMProvider, Reasoning, ToolDefinition
from lousho_ray.tools.execute import Place
from lousho_ray.tools.registry import AnyTool
from lousho_ray.tools.spill import KeptResults
from lousho_ray.usage import StepUsage, Usage

Status = Literal["in-progress", "awaiting-approval", "finished"]


@dataclass(slots=True)
class RunState:
    """The run as data. `messages` is the one list of the run: hooks and compaction change it in place.

    `opened_at` is the index of the first message that this run added (its input). `repair_issues` are those of a final reply that
    was sent back for its one repair. `settled` holds results that are in before an earlier call's, by call id; `begun` the ids of
    calls with a once-only effect that were started. `model` is what a function-valued `model` said when the run began. `ran_ms` is
    how long the run had run before it paused. `children` are sub-agents that paused, as JSON (a `freeze()` and how to go on), by
    the id of the call that runs them. `images` are those of tool results, by call id, until every call of the turn has its result.
    `trace_id` is that of the run's spans, and before it begins that of the run it goes on from.
    """

    run_id: str
    messages: list[Message]
    opened_at: int
    steps: int = 0
    usage: Usage = field(default_factory=Usage)
    step_usage: list[StepUsage] = field(default_factory=list)
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    tool_errors: int = 0
    reasoning: list[str] = field(default_factory=list)
    last_text: str = ""
    repair_issues: tuple[Mapping[str, str], ...] = ()
    settled: dict[str, Message] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    children: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    images: dict[str, tuple[ImagePart, ...]] = field(default_factory=dict)
    model: str | None = None
    ran_ms: float = 0.0
    trace_id: str | None = None


@dataclass(slots=True)
class RunDeps:
    """The live side of a run.

    `limiters` are around `provider` already; side calls to other providers pass them, too. `settings` are the model settings that
    somebody set. `keep_result` puts a result that is too long aside and returns its handle. `call_instructions` extend the system
    prompt of each request and are stored nowhere. `audited` says that somebody hears of every decision on a call. `drift` is how
    the agent changed since the run was saved. `services` is what delegating tools (`task`) need, `place` runs those with
    `ray_options`. `commit` saves the finished turn of a session: `run.done` is only reported once it has returned.
    """

    agent_name: str
    provider: LLMProvider
    tools: Mapping[str, AnyTool]
    budget: Budget
    emitter: Emitter
    abort: AbortSignal
    inbox: Inbox = field(default_factory=Inbox)
    model: str | None = None
    hosted_tools: tuple[HostedTool, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    reasoning: Reasoning | None = None
    output: OutputContract | None = None
    prompt_caching: Any = "auto"
    max_steps: int = 10
    tool_concurrency: int | None = None
    abort_grace_ms: float | None = None
    max_tool_result_chars: float = 50_000
    keep_result: Callable[[str], str] | None = None
    stream: bool = False
    session_id: str | None = None
    principal: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    subagent: Mapping[str, Any] | None = None
    call_instructions: str | None = None
    hooks: HookChain = field(default_factory=HookChain)
    limiters: tuple[Limiter, ...] = ()
    approve: Callable[[Mapping[str, Any]], Any] | None = None
    permissions: Permissions = field(default_factory=Permissions)
    mode: ModeCell = field(default_factory=ModeCell)
    audited: bool = False
    pauses: Pauses | None = None
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    recorder: StateRecorder | None = None
    resolved: ResolvedApproval | None = None
    drift: Mapping[str, Any] | None = None
    services: Any = None
    place: Place | None = None
    commit: Callable[[ExecutionResult[Any]], Awaitable[None]] | None = None
    trace: RunTrace = field(default_factory=RunTrace)
    clock: Clock = SYSTEM_CLOCK
    definitions: tuple[ToolDefinition, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.definitions = tuple(tool.definition for tool in self.tools.values())


class StateRecorder(Protocol):
    """Keeps the checkpoint of a run. Saves are chained: the newest state is what is in the store in the end.

    `results` are the long tool results that its saves name, when it keeps them.
    """

    results: KeptResults | None

    async def save(
        self, state: RunState, waiting: Callable[[], tuple[Message, ...]] = tuple, *, status: Status = "in-progress", **extra: Any
    ) -> None:
        """Returns once the state, as it is now or newer, is stored. `waiting` gives the input that has not joined yet."""
        ...

    async def begin(self, state: RunState, waiting: Callable[[], tuple[Message, ...]]) -> None:
        """Saves that a call starts which may not be repeated; raises when the run was taken over."""
        ...

    def note(self, state: RunState, inbox: Inbox) -> None:
        """Saves soon, without waiting: input was queued."""
        ...


class Pauses(Protocol):
    """Where a call that needs a person is kept until somebody decides."""

    async def open(self, state: RunState, ask: Ask, waiting: tuple[Message, ...]) -> Mapping[str, Any]:
        """Saves the pause with all that is needed to go on, and returns the pending record."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What a person decided on a paused call. `args` are edited arguments; `remember` lets later calls run unasked.

    `asked` has the arguments that the person saw, as the pause's record holds them: what is approved is what runs.
    """

    approved: bool
    note: str | None = None
    by: str | None = None
    args: Mapping[str, Any] | None = None
    expired: bool = False
    remember: Literal["args", "tool"] | None = None
    asked: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ResolvedApproval:
    """The decision that a continuation begins with, for its `approval.resolved` event. `asked_at` is ISO 8601."""

    approval_id: str
    tool_call_id: str
    tool_name: str
    decision: Decision
    asked_at: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A call that needs a person; `decided_by="other"`: not the one the run acts for. `args` are validated, after the hooks.

    When the call that needs a person is a sub-agent's, `call` is the call of this run that runs the sub-agent, `inner` the one to
    decide on, and `path` the names of the sub-agents from here to it.
    """

    call: ToolCall
    args: Mapping[str, Any]
    kind: Literal["tool", "question"] = "tool"
    question: Mapping[str, Any] | None = None
    decided_by: Literal["other"] | None = None
    ttl_ms: float | None = None
    inner: ToolCall | None = None
    path: tuple[str, ...] = ()

    @property
    def decides(self) -> ToolCall:
        """The call to decide on."""
        return self.inner or self.call

    def seen_from(self, call: ToolCall, name: str) -> Ask:
        """The same question, as the run sees it whose `call` runs the sub-agent `name`."""
        return replace(self, call=call, inner=self.decides, path=(name, *self.path))


class CallPaused(Detour):
    """Raised by the tool that runs a sub-agent: a call of the sub-agent `name` needs a person."""

    def __init__(self, ask: Ask, name: str) -> None:
        super().__init__(name)
        self.ask = ask
        self.name = name


@dataclass(frozen=True, slots=True)
class Continue:
    """Take another step."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over."""

    reason: FinishReason
    text: str = ""
    budget: BudgetBreach | None = None
    abort_reason: dict[str, str] | None = None
    output: Valid | Invalid | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """The run waits for a person; everything needed to go on is in a store. `pending` is the record of the pause."""

    pending: Mapping[str, Any]

    @property
    def approval_id(self) -> str:
        return str(self.pending["id"])


StepOutcome: TypeAlias = Continue | Finish | Pause
CONTINUE = Continue()
