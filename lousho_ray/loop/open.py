"""Opening a run: from an agent's definition and what the run inherits, to the `RunState` and `RunDeps` that the loop drives."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lousho_ray.cancellation import Aborted, AbortReason, AbortSignal
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.context.compaction import CompactionHook
from lousho_ray.context.memoize import MemoizeHook
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import ConfigurationError, message_of
from lousho_ray.hosted_tools import HostedTool, unsupported_hosted_tool
from lousho_ray.limits.budget import Ledger
from lousho_ray.loop.budget import NOTHING, Budget, LeadBudget, SessionBudget
from lousho_ray.loop.emitter import Emitter
from lousho_ray.loop.hooks import HookChain
from lousho_ray.loop.inbox import Inbox
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.state import Decision, Pauses, ResolvedApproval, RunDeps, RunState, StateRecorder
from lousho_ray.loop.tracing import RunTrace
from lousho_ray.messages import Message, system
from lousho_ray.option_checks import UNSET
from lousho_ray.options import ModelSettings, merge_settings
from lousho_ray.permissions import PLAN_BLOCK, ModeCell, Permissions
from lousho_ray.ports import GenerateOptions, GenerateResult, Limiter, LLMProvider, Reasoning
from lousho_ray.providers.interception import intercepted, replays
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.wrapper import can_stream, enforces
from lousho_ray.spans import TraceContext
from lousho_ray.tools.execute import Place
from lousho_ray.tools.registry import AnyTool, ToolRegistry, check_hosted_names, collect_all_tools
from lousho_ray.tools.spill import READ_RESULT, KeptResults, read_result_tool
from lousho_ray.usage import Spend


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of one `send()` / `stream()`; a value that was not given leaves the agent's."""

    model_settings: ModelSettings | None = None
    max_steps: int | None = None
    instructions: str | None = None
    reasoning: Reasoning | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    principal: Any = None
    business_state: Any = UNSET
    permission_mode: Any = None

    def shaping_option(self) -> str | None:
        """The first option given that shapes the run itself."""
        shaping = ("model_settings", "max_steps", "instructions", "reasoning", "permission_mode")
        return next((name for name in shaping if getattr(self, name)), None)


@dataclass(slots=True)
class RunContext:
    """What a run gets from whoever opens it: the caller, a session, or the lead of a sub-agent.

    `resume` is the state of an unfinished run that goes on, with the `decisions` on its paused calls by call id. `approve`
    callbacks decide only where `approve_in_code` is set: a streamed run pauses.
    """

    run_id: str
    input: Sequence[Message]
    emitter: Emitter
    abort: AbortSignal
    history: Sequence[Message] = ()
    inbox: Inbox = field(default_factory=Inbox)
    call: CallOptions = field(default_factory=CallOptions)
    session_id: str | None = None
    limiters: tuple[Limiter, ...] = ()
    leads: tuple[LeadBudget, ...] = ()
    session_budget: SessionBudget | None = None
    ledger: Ledger | None = None
    parent: str | None = None
    hooks: tuple[Any, ...] = ()
    approve: Callable[[Mapping[str, Any]], Any] | None = None
    tool_concurrency: int | None = None
    subagent: Mapping[str, Any] | None = None
    commit: Callable[[ExecutionResult[Any]], Awaitable[None]] | None = None
    resume: RunState | None = None
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    resolved: ResolvedApproval | None = None
    recorder: StateRecorder | None = None
    pauses: Pauses | None = None
    approve_in_code: bool = True
    permissions: Permissions | None = None
    mode: ModeCell | None = None
    audited: bool = False
    started: float | None = None
    spent_before: Spend = NOTHING
    trace: TraceContext = field(default_factory=TraceContext)
    clock: Clock = SYSTEM_CLOCK


@dataclass(frozen=True, slots=True)
class ResolverContext:
    """What a function-valued `model`, `instructions` or `tools` gets."""

    input: Sequence[Message]
    session_id: str | None
    metadata: Mapping[str, Any]
    principal: Any


async def open_run(
    definition: AgentDefinition,
    context: RunContext,
    *,
    extra_tools: Mapping[str, AnyTool] | None = None,
    system_blocks: Sequence[str] = (),
    services: Any = None,
) -> tuple[RunState, RunDeps]:
    """Builds the state and the live side of a run.

    `extra_tools` and `system_blocks` come from features (sub-agents); `services` is handed to tools as `ctx.run`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_RESOLVER_FAILED` when a function-valued option raised, with `field` naming it.
    """
    state = context.resume
    started_with = context.input if state is None else input_of(state)
    who = ResolverContext(started_with, context.session_id, context.call.metadata, context.call.principal)
    instructions = await _resolve("instructions", definition.instructions, who, context.abort, "")
    if not isinstance(instructions, str):
        raise _wrong("instructions", instructions, "a str")
    extra = dict(extra_tools or {})
    kept = _kept_results(context) if definition.spill_tool_results else None
    if kept is not None:
        extra[READ_RESULT] = read_result_tool(definition.max_tool_result_chars, kept)
    tools, hosted = await _tools(definition, who, extra, context.abort)
    chosen = await _model(definition, who, None if state is None else state.model, context.abort)
    provider, model = _provider(definition, chosen, context.abort)
    provider = intercepted(provider)
    if not replays(provider):
        _check_hosted(provider, hosted)
    limiters = [] if replays(provider) else _limiters(definition, context)
    if limiters:
        provider = with_rate_limit(provider, limiters)
    output_block = _output_block(definition, provider, model)
    mode = context.mode or ModeCell(context.call.permission_mode or definition.permission_mode)
    plan_block = PLAN_BLOCK if state is None and mode.now() == "plan" else ""
    parts = (instructions, definition.project_block, *system_blocks, plan_block, output_block)
    prompt = "\n\n".join(part for part in parts if part)
    if state is None:
        state = RunState(
            context.run_id, [_prompt_message(prompt), *context.history, *context.input], opened_at=1 + len(context.history)
        )
    if callable(definition.model):
        state.model = chosen
    call = context.call
    deps = RunDeps(
        agent_name=definition.name,
        provider=provider,
        tools=tools,
        hosted_tools=hosted,
        budget=Budget(
            context.run_id,
            definition.limits,
            ledger=context.ledger,
            leads=context.leads,
            session=context.session_budget,
            parent=context.parent,
            clock=context.clock,
            started=context.started,
            spent_before=context.spent_before,
        ),
        emitter=context.emitter,
        abort=context.abort,
        inbox=context.inbox,
        model=model,
        settings=_settings(definition.settings, call.model_settings).given(),
        reasoning=call.reasoning if call.reasoning is not None else definition.reasoning,
        output=definition.output,
        prompt_caching=definition.prompt_caching,
        max_steps=allowed_steps(definition, call.max_steps),
        tool_concurrency=_concurrency(definition, context),
        abort_grace_ms=definition.abort_grace_ms,
        max_tool_result_chars=definition.max_tool_result_chars,
        keep_result=None if kept is None else kept.keep,
        stream=context.emitter.on and can_stream(provider, model),
        session_id=context.session_id,
        principal=call.principal,
        metadata=call.metadata,
        subagent=context.subagent,
        call_instructions=call.instructions,
        hooks=HookChain((*context.hooks, *definition.hooks, *_compaction(definition))),
        limiters=tuple(limiters),
        approve=(context.approve or definition.approve) if context.approve_in_code else None,
        permissions=context.permissions or Permissions(own=definition.permissions),
        mode=mode,
        audited=context.audited or definition.audited,
        pauses=context.pauses,
        decisions=context.decisions,
        recorder=context.recorder,
        resolved=context.resolved,
        services=services,
        place=_place(definition, tools),
        commit=context.commit,
        trace=RunTrace(
            context.emitter.spans,
            context.trace,
            agent_name=definition.name,
            provider_name=provider.name,
            session_id=context.session_id,
        ),
        clock=context.clock,
    )
    return state, deps


@functools.lru_cache(maxsize=64)
def _prompt_message(prompt: str) -> Message:
    """Runs with the same prompt share its message, and so the forms in which it was encoded for a provider."""
    return system(prompt)


def _kept_results(context: RunContext) -> KeptResults:
    """Where long results are kept: in the store of a run that is recorded, else in memory."""
    recorded = None if context.recorder is None else context.recorder.results
    return KeptResults(context.session_id) if recorded is None else recorded


def _place(definition: AgentDefinition, tools: Mapping[str, AnyTool]) -> Place | None:
    """What runs tools with `ray_options` as Ray tasks. Imported by name: it lies above this module, and most runs need no Ray."""
    if not definition.on_ray or all(tool.ray_options is None for tool in tools.values()):
        return None
    place: Place = importlib.import_module("lousho_ray.runtime").tool_place()
    return place


def input_of(state: RunState) -> tuple[Message, ...]:
    """The input that a run began with: its first messages, up to the first that is not the caller's."""
    return tuple(itertools.takewhile(lambda message: message.role == "user", state.messages[state.opened_at :]))


def _compaction(definition: AgentDefinition) -> tuple[Any, ...]:
    """The compaction hook comes last, so that it sees what the others added."""
    options = definition.compaction
    if options is None:
        return ()
    return (*((MemoizeHook(),) if options.memoize_tools else ()), CompactionHook(options))


def allowed_steps(definition: AgentDefinition, per_call: int | None) -> int:
    """`max_steps` of a run: the call's, else the agent's, else 10. `limits.max_steps` alone replaces that default (BUD-12)."""
    option = per_call if per_call is not None else definition.max_steps
    if option is not None:
        return option
    return 10 if definition.limits.max_steps is None else definition.limits.max_steps + 1


async def _tools(
    definition: AgentDefinition, who: ResolverContext, extra: Mapping[str, AnyTool], abort: AbortSignal
) -> tuple[dict[str, AnyTool], tuple[HostedTool, ...]]:
    hosted = definition.hosted_tools
    if callable(definition.tools):
        found = await _resolve("tools", definition.tools, who, abort, ())
        if not isinstance(found, Sequence | Mapping | ToolRegistry) or isinstance(found, str):
            raise _wrong("tools", found, "a list or mapping of tools")
        tools, hosted = collect_all_tools(found)
    else:
        tools = dict(definition.tools)
    for name, tool in extra.items():
        if name in tools:
            raise ConfigurationError(f"Tool name '{name}' belongs to a feature of the agent; rename your tool.", field="tools")
        tools[name] = tool
    check_hosted_names(hosted, tools)
    return tools, hosted


def _check_hosted(provider: LLMProvider, hosted: Sequence[HostedTool]) -> None:
    """Hosted tools must be ones that the provider runs; wrappers ask the first of theirs."""
    supports: Callable[[str], bool] | None = getattr(provider, "supports_hosted_tool", None)
    for tool in hosted:
        if supports is None or not supports(tool.type):
            raise unsupported_hosted_tool(provider.name, tool)


async def _model(definition: AgentDefinition, who: ResolverContext, saved: str | None, abort: AbortSignal) -> str | None:
    """The agent's model, or what its function says; a run that goes on keeps the one it began with."""
    if saved is not None and callable(definition.model):
        return saved
    model = await _resolve("model", definition.model, who, abort, None)
    if model is not None and not isinstance(model, str):
        raise _wrong("model", model, "a str")
    return model


class _Unreached:
    """The provider of a run that was aborted before its model was known: it ends before it calls one."""

    name = "none"
    default_model: str | None = None

    def supports_hosted_tool(self, type: str) -> bool:
        return True

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        raise Aborted(AbortReason.of(None))


def _provider(definition: AgentDefinition, model: str | None, abort: AbortSignal) -> tuple[LLMProvider, str | None]:
    """The provider of a run and the bare id of its model; `None` for the provider's own."""
    if definition.provider is not None:
        return definition.provider, model
    assert definition.provider_for is not None
    if not model and abort.aborted:
        return _Unreached(), None
    if not model:
        raise _wrong("model", model, "a 'provider/model' str")
    return definition.provider_for(model), None


async def _resolve(name: str, option: Any, who: ResolverContext, abort: AbortSignal, instead: Any) -> Any:
    """The option's value. An abort ends the wait for it: the run then opens with `instead`, and ends before it uses it."""
    if not callable(option):
        return option
    if abort.aborted:
        return instead
    try:
        value = option(who)
        return await abort.guard(_awaited(value)) if inspect.isawaitable(value) else value
    except Aborted:
        return instead
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"The function given as {name}= raised {type(error).__name__}: {message_of(error)}",
            code="LOUSHO_CONFIG_RESOLVER_FAILED",
            field=name,
        ) from error


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _wrong(name: str, value: Any, wanted: str) -> ConfigurationError:
    return ConfigurationError(
        f"The function given as {name}= returned {type(value).__name__}; it must return {wanted}.",
        code="LOUSHO_CONFIG_RESOLVER_FAILED",
        field=name,
    )


def _output_block(definition: AgentDefinition, provider: LLMProvider, model: str | None) -> str:
    """The `## Output format` block; by default without the schema when the provider itself enforces it."""
    if definition.output is None:
        return ""
    with_schema = definition.output_prompt
    if with_schema == "auto":
        with_schema = not enforces(provider, definition.output.response_format, model)
    return definition.output.block(with_schema=with_schema)


def _settings(agent: ModelSettings, call: ModelSettings | None) -> ModelSettings:
    return agent if call is None else merge_settings(agent, call)


def _limiters(definition: AgentDefinition, context: RunContext) -> list[Limiter]:
    """Innermost agent first, lead last; the same limiter reached twice is entered once."""
    found: list[Limiter] = []
    for limiter in (definition.rate_limit, *context.limiters):
        if limiter is not None and all(limiter is not other for other in found):
            found.append(limiter)
    return found


def _concurrency(definition: AgentDefinition, context: RunContext) -> int | None:
    return definition.tool_concurrency if definition.tool_concurrency_set else context.tool_concurrency
