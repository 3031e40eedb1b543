"""Sub-agents: the `task` tool, and how a child run is described, run and answered.

A child is a run like any other. What it shares with its lead (limiters, ledger, abort, hooks) is in the `ChildRun` that describes
it; where it runs is the spawner's business: in this process, or on a worker of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, create_model

from lousho_ray.cancellation import AbortSignal
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import ToolExecutionError
from lousho_ray.events import SubagentInfo
from lousho_ray.fingerprint import drift
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import Ledger
from lousho_ray.loop.budget import LeadBudget
from lousho_ray.loop.checkpoint import freeze, thaw
from lousho_ray.loop.emitter import Emitter
from lousho_ray.loop.hooks import HaltedError, raised_by_hook
from lousho_ray.loop.open import CallOptions, RunContext, open_run
from lousho_ray.loop.permit import DELEGATES
from lousho_ray.loop.result import BudgetBreach, ExecutionResult
from lousho_ray.loop.run import run
from lousho_ray.loop.state import Ask, CallPaused, Decision, RunDeps, RunState
from lousho_ray.messages import Message, user
from lousho_ray.permissions import ModeCell, Permissions, mode_of_child
from lousho_ray.ports import Limiter, ToolContext
from lousho_ray.spans import TraceContext
from lousho_ray.tools.registry import AnyTool
from lousho_ray.tools.results import encode_result
from lousho_ray.tools.tool import define_tool
from lousho_ray.usage import Usage


@dataclass(frozen=True, slots=True)
class ChildRun:
    """A sub-agent run, as plain data that travels. `path` names the child inside the definition it is shipped with."""

    run_id: str
    path: str
    prompt: str
    info: SubagentInfo
    parent: str | None
    leads: tuple[LeadBudget, ...]
    depth_left: int
    observed: bool
    limiters: tuple[Limiter, ...] = ()
    tool_concurrency: int | None = None
    principal: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    mode: Any = "default"
    may_pause: bool = False
    approve_in_code: bool = True
    paused: Mapping[str, Any] | None = None
    decision: Decision | None = None
    trace: TraceContext = field(default_factory=TraceContext)


@dataclass(frozen=True, slots=True)
class PausedChild:
    """A child that waits for a person: what to ask, and the record to go on from."""

    ask: Ask
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChildOutcome:
    """How a child run ended. `error` is set when it raised (or its worker was lost); `usage` is what it had spent all the same.

    Of a child that went on from a pause, `usage` is what it spent since. `paused` is set when it waits for a person now.
    """

    text: str = ""
    finish_reason: str = "error"
    steps: int = 0
    usage: Usage = field(default_factory=Usage)
    budget: BudgetBreach | None = None
    error: BaseException | None = None
    object_text: str | None = None
    output_error: Mapping[str, Any] | None = None
    paused: PausedChild | None = None

    @classmethod
    def of(cls, result: ExecutionResult[Any], earlier: Usage, paused: PausedChild | None) -> ChildOutcome:
        """The outcome of a run that ended or paused; a validated `output` object travels as its JSON."""
        return cls(
            result.text,
            result.finish_reason,
            result.steps,
            result.usage.since(earlier),
            result.budget,
            object_text=None if result.object is None else encode_result(result.object).text,
            output_error=result.output_error,
            paused=paused,
        )

    @classmethod
    def failed(cls, error: BaseException) -> ChildOutcome:
        usage = getattr(error, "usage", None)
        return cls(error=error, usage=usage if isinstance(usage, Usage) else Usage())


class Spawner(Protocol):
    """Runs child runs somewhere."""

    async def ledger(self) -> Ledger:
        """The ledger that lead and children share."""
        ...

    async def run(self, definition: AgentDefinition, child: ChildRun, emitter: Emitter, abort: AbortSignal) -> ChildOutcome:
        """Runs `child` (a sub-agent of `definition`) to its end, its events going to `emitter` in their order.

        When `abort` fires the child is stopped and waited for. A worker that is lost gives an outcome with an error, never a silent
        second run. Does not raise for what the child raised.
        """
        ...


async def run_child(
    definition: AgentDefinition,
    child: ChildRun,
    emitter: Emitter,
    abort: AbortSignal,
    ledger: Ledger,
    spawner: Spawner,
) -> ChildOutcome:
    """Runs a child in this process: what the local spawner and a worker both do."""
    owners = _owners(definition, child.path.rpartition("/")[0])
    hooks = tuple(hook for owner in owners for hook in owner.hooks)
    rules = tuple(rule for owner in owners for rule in owner.permissions)
    signal = AbortSignal()
    unfollow = signal.follow(abort)
    context = RunContext(
        run_id=child.run_id,
        input=(user(child.prompt),),
        emitter=emitter,
        abort=signal,
        call=CallOptions(principal=child.principal, metadata=child.metadata),
        limiters=child.limiters,
        leads=child.leads,
        ledger=None if child.parent is None else ledger,
        parent=child.parent,
        hooks=hooks,
        approve=definition.approve,
        tool_concurrency=child.tool_concurrency,
        subagent=child.info.to_dict(),
        approve_in_code=child.approve_in_code,
        permissions=Permissions(rules, definition.find(child.path).permissions),
        mode=ModeCell(child.mode),
        audited=definition.audited,
        trace=child.trace,
    )
    pauses = ChildPauses()
    context.pauses = pauses if child.may_pause else None
    if child.paused is not None:
        context.resume = thaw(child.paused, child.run_id)[0]
        context.decisions = {} if child.decision is None else {child.paused["pausedToolCall"]: child.decision}
    earlier = Usage() if context.resume is None else context.resume.usage.copy()
    context.spent_before = earlier.spend
    try:
        state, deps = await open_with_subagents(definition, child.path, context, child.depth_left, spawner)
        if child.paused is not None:
            deps.drift = drifted(definition, child)
    except (Exception, SystemExit) as error:
        unfollow()
        return ChildOutcome.failed(error)
    try:
        result = await run(state, deps)
        return ChildOutcome.of(result, earlier, pauses.paused(definition.find(child.path), child))
    except (Exception, SystemExit) as error:
        return ChildOutcome(error=error, steps=state.steps, usage=state.usage.since(earlier))
    finally:
        unfollow()


class ChildPauses:
    """Keeps the pause of a child, for its lead to write down."""

    def __init__(self) -> None:
        self._asked: tuple[Ask, Mapping[str, Any]] | None = None

    async def open(self, state: RunState, ask: Ask, waiting: tuple[Message, ...]) -> Mapping[str, Any]:
        self._asked = ask, freeze(state)
        return {"id": "", "kind": ask.kind}

    def paused(self, agent: AgentDefinition, child: ChildRun) -> PausedChild | None:
        if self._asked is None:
            return None
        ask, record = self._asked
        about = {"path": child.path, "pausedToolCall": ask.call.id, "agentFingerprint": dict(agent.fingerprint)}
        return PausedChild(ask, {**record, **about})


def drifted(definition: AgentDefinition, child: ChildRun) -> Mapping[str, Any] | None:
    """How a child that goes on from a pause differs from the agent that paused; the lead says whether that counts."""
    assert child.paused is not None
    if definition.on_agent_drift == "ignore":
        return None
    changed = drift(child.paused.get("agentFingerprint"), definition.find(child.path).fingerprint)
    return None if changed is None else changed.fields


async def open_with_subagents(
    root: AgentDefinition, path: str, context: RunContext, depth_left: int, spawner: Spawner | None
) -> tuple[RunState, RunDeps]:
    """Opens the run of the agent at `path` of `root`; with sub-agents and depth left, it gets the `task` tool and their list."""
    agent = root.find(path)
    if not agent.subagents or depth_left < 1 or spawner is None:
        return await open_run(agent, context)
    delegation = Delegation(root, path, context, depth_left, spawner)
    state, deps = await open_run(
        agent,
        context,
        extra_tools={"task": delegation.tool()},
        system_blocks=(delegation.block(),),
        services=delegation,
    )
    delegation.bind(state, deps)
    return state, deps


class Delegation:
    """The sub-agents of one run: offers the `task` tool and runs what it asks for."""

    def __init__(self, root: AgentDefinition, path: str, context: RunContext, depth_left: int, spawner: Spawner) -> None:
        self._root = root
        self._path = path
        self._agent = root.find(path)
        self._context = context
        self._depth_left = depth_left
        self._spawner = spawner
        self._count = 0
        self._state: RunState | None = None
        self._deps: RunDeps | None = None

    def bind(self, state: RunState, deps: RunDeps) -> None:
        self._state, self._deps = state, deps

    def block(self) -> str:
        """The paragraph of the system prompt that lists the sub-agents."""
        lines = "\n".join(f"- {name}: {child.description}" for name, child in self._agent.subagents.items())
        return (
            "## Available sub-agents\n\n"
            "Hand self-contained work to these with the `task` tool. A sub-agent sees only the prompt you give it, "
            f"nothing of this conversation. Several tasks in one turn run in parallel.\n\n{lines}"
        )

    def tool(self) -> AnyTool:
        one_of_them: Any = Literal[tuple(self._agent.subagents)]
        schema = create_model(
            "Task",
            __config__=ConfigDict(extra="forbid"),
            agent=(one_of_them, Field(description="The sub-agent to run.")),
            prompt=(str, Field(description="The whole task: the sub-agent sees nothing else.", min_length=1)),
            description=(str, Field(description="A label of 3 to 5 words.")),
        )
        return define_tool(
            name="task",
            description="Runs a sub-agent on a self-contained task and returns its answer.",
            metadata={DELEGATES: True},
            input=schema,
            execute=self.execute,
        )

    async def execute(self, args: BaseModel, ctx: ToolContext) -> str:
        """Runs one child and returns its answer with a footer; every end but `stop` and `length` is a tool error."""
        assert self._state is not None
        assert self._deps is not None
        asked: Any = args
        paused = self._state.children.get(ctx.tool_call_id)
        self._count += 1
        task_id = f"task_{self._count}" if paused is None else str(paused["taskId"])
        if self._deps.budget.limits_spend:
            ledger = await self._spawner.ledger()
            await self._deps.budget.join(ledger, self._state.usage.spend)
        child = self._child(asked.agent, asked.prompt, asked.description, ctx)
        if paused is not None:
            child = self._continued(child, paused, ctx)
        emitter = self._deps.emitter.child(child.info)
        outcome = await _with_abort(self._deps.abort, lambda abort: self._spawner.run(self._root, child, emitter, abort))
        self._state.usage.add_delegated(outcome.usage, runs=1 if paused is None else 0)
        if outcome.paused is not None:
            self._state.children[ctx.tool_call_id] = {**outcome.paused.record, "taskId": task_id}
            raise CallPaused(outcome.paused.ask, child.info.name)
        return _answer(child.info.name, task_id, outcome)

    def _continued(self, child: ChildRun, paused: Mapping[str, Any], ctx: ToolContext) -> ChildRun:
        """A child that goes on from its pause. It is held to its own limits only: those above it begin anew with the lead."""
        assert self._deps is not None
        decision = self._deps.decisions.get(ctx.tool_call_id)
        return replace(child, leads=(), paused=paused, decision=decision)

    def _child(self, name: str, prompt: str, description: str, ctx: ToolContext) -> ChildRun:
        assert self._deps is not None
        deps, context = self._deps, self._context
        parent = deps.emitter.subagent
        limiters = tuple(limiter for limiter in (self._agent.rate_limit, *context.limiters) if limiter is not None)
        return ChildRun(
            run_id=new_id("run_"),
            path=f"{self._path}/{name}" if self._path else name,
            prompt=prompt,
            info=SubagentInfo(
                name=name,
                depth=1 + (parent.depth if parent else 0),
                tool_call_id=ctx.tool_call_id,
                description=description,
                parent=parent,
            ),
            parent=None if deps.budget.ledger is None else context.run_id,
            leads=deps.budget.for_children(self._agent.name),
            depth_left=self._depth_left - 1,
            observed=deps.emitter.on,
            limiters=limiters,
            tool_concurrency=deps.tool_concurrency,
            principal=deps.principal,
            metadata=deps.metadata,
            mode=mode_of_child(deps.mode.now(), self._agent.subagents[name].permission_mode),
            may_pause=deps.pauses is not None,
            approve_in_code=context.approve_in_code,
            trace=deps.trace.below(ctx.tool_call_id),
        )


class LocalSpawner:
    """Runs children in this process, next to their lead."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def ledger(self) -> Ledger:
        return self._ledger

    async def run(self, definition: AgentDefinition, child: ChildRun, emitter: Emitter, abort: AbortSignal) -> ChildOutcome:
        return await run_child(definition, child, emitter, abort, self._ledger, self)


async def _with_abort(lead: AbortSignal, start: Callable[[AbortSignal], Any]) -> ChildOutcome:
    """Runs a child under a signal that the lead's abort fires, and also a cancellation of the tool's own task.

    The child is always waited for: none of its events or model calls may come after its `task` call has ended.
    """
    signal = AbortSignal()
    unfollow = signal.follow(lead)
    task = asyncio.ensure_future(start(signal))
    try:
        while True:
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.done():
                    raise
                signal.abort(lead.reason or "The task call was cancelled.")
    finally:
        unfollow()


def _answer(name: str, task_id: str, outcome: ChildOutcome) -> str:
    steps = f"{outcome.steps} step{'' if outcome.steps == 1 else 's'}"
    if outcome.error is not None and raised_by_hook(outcome.error):
        raise HaltedError(outcome.error)
    if outcome.error is not None:
        raise ToolExecutionError(f"Sub-agent '{name}' failed: {_say(outcome.error)}", tool_name="task")
    if outcome.object_text is not None or outcome.finish_reason in ("stop", "length"):
        text = outcome.text if outcome.object_text is None else outcome.object_text
        return f"{text}\n\n[sub-agent '{name}': {steps}, finish reason '{outcome.finish_reason}', taskId '{task_id}']"
    match outcome.finish_reason:
        case "output-invalid" if outcome.output_error is not None:
            issues = "; ".join(f"{issue['path'] or 'reply'}: {issue['message']}" for issue in outcome.output_error["issues"])
            raise ToolExecutionError(f"Sub-agent '{name}' gave no valid output: {issues}", tool_name="task")
        case "budget-exceeded" if outcome.budget is not None:
            raise ToolExecutionError(f"Sub-agent '{name}' stopped at the {outcome.budget.limit} limit", tool_name="task")
        case "max-steps":
            raise ToolExecutionError(f"Sub-agent '{name}' ran out of steps after {steps} without a final answer.", tool_name="task")
        case reason:
            raise ToolExecutionError(f"Sub-agent '{name}' ended with finish reason '{reason}' after {steps}.", tool_name="task")


def _say(error: BaseException) -> str:
    detail = getattr(error, "detail", None)
    return f"{type(error).__name__}: {detail if isinstance(detail, str) else error}"


def _owners(root: AgentDefinition, lead_path: str) -> list[AgentDefinition]:
    """The agents from the top of the tree down to the lead of a child: a child runs under the hooks of all of them."""
    names = [name for name in lead_path.split("/") if name]
    return [root.find("/".join(names[:count])) for count in range(len(names) + 1)]
