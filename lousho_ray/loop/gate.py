"""The gate: what decides whether a tool call runs, in the documented order, before anything of the tool runs.

Order per call: known tool, arguments, call cap, `pre_tool_call` hooks, the tool's `needs_approval`. A deny at any point is final.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lousho_ray.errors import ConfigurationError, ToolArgumentsValidationError, ToolExecutionError
from lousho_ray.loop.hooks import ToolHookContext
from lousho_ray.loop.requests import hook_services
from lousho_ray.loop.state import Ask, Decision, RunDeps, RunState
from lousho_ray.messages import Message, ToolCall, decode_bytes
from lousho_ray.ports import Approval, ToolContext
from lousho_ray.tools.approval_policies import Always, ApprovalContext, canonical, remembered
from lousho_ray.tools.registry import AnyTool, find_tool, not_found
from lousho_ray.tools.results import ErrorResult, error_result
from lousho_ray.tools.schema import ParsedArguments

NOT_RUN = frozenset({"validation", "not-found", "denied", "rejected", "sandbox", "not-run"})
"""The kinds of errors that say that a call was refused before its tool ran."""

INTERRUPTED = "interrupted"
"""The mark in a result's metadata that says: the tool was stopped while it ran."""


@dataclass(frozen=True, slots=True)
class Run:
    """The call may run."""

    tool: AnyTool
    arguments: ParsedArguments
    approval: Approval | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The call does not run; the model reads this error."""

    error: ErrorResult


@dataclass(frozen=True, slots=True)
class Answer:
    """The call does not run; a hook supplied its result."""

    value: Any
    hook: str


Verdict: TypeAlias = Run | Refuse | Answer | Ask


async def pass_gate(
    call: ToolCall, parsed: ParsedArguments | ToolArgumentsValidationError | None, ctx: ToolContext, state: RunState, deps: RunDeps
) -> Verdict:
    """Decides one call. `parsed` is what `parse_call` made of its arguments."""
    tool = find_tool(deps.tools, call.name)
    if tool is None:
        return Refuse(not_found(deps.tools, call.name))
    if isinstance(parsed, ToolArgumentsValidationError):
        return Refuse(error_result(call.name, parsed))
    assert parsed is not None
    goes_on = call.id in state.children  # A decision is on a call of its sub-agent then, not on this one.
    decision = None if goes_on else deps.decisions.get(call.id)
    if decision is not None and not decision.approved:
        return Refuse(_turned_down(call, tool, decision))
    seen = None if decision is None else decision.args if decision.args is not None else decode_bytes(decision.asked)
    if seen is not None:
        try:
            parsed = tool.parse_plain(dict(seen))
        except ToolArgumentsValidationError as error:
            return Refuse(error_result(call.name, error))
    if tool.effect == "once" and call.id in state.begun:
        return Refuse(_outcome_unknown(call))
    approved = parsed.plain if decision is None else json.loads(canonical(parsed.plain))
    if (cap := tool.max_calls_per_run) is not None and _calls_before(call, tool, state) >= cap:
        reason = f"Tool '{tool.name}' may be called {cap} time(s) in one run. Use the results you have."
        return Refuse(_denied(call, reason))
    if deps.hooks.around_tools:
        verdict = await _ask_hooks(call, tool, parsed, state, deps)
        if not isinstance(verdict, ParsedArguments):
            return verdict
        parsed = verdict
    if decision is not None:
        return _decided(call, tool, parsed, decision, approved)
    if goes_on:
        return Run(tool, parsed)
    return await _ask_tool(call, tool, parsed, ctx, state, deps)


def gate_may_wait(call: ToolCall, deps: RunDeps) -> bool:
    """Whether deciding a call runs code of the user, which an abort has to cut short."""
    tool = find_tool(deps.tools, call.name)
    return deps.hooks.around_tools or (tool is not None and bool(tool.needs_approval))


def parse_call(call: ToolCall, tools: Mapping[str, AnyTool]) -> ParsedArguments | ToolArgumentsValidationError | None:
    """The call's validated arguments, the validation error, or `None` for an unknown tool."""
    tool = find_tool(tools, call.name)
    if tool is None:
        return None
    try:
        return tool.parse(call.arguments)
    except ToolArgumentsValidationError as error:
        return error


def hook_context(call: ToolCall, args: dict[str, Any], state: RunState, deps: RunDeps) -> ToolHookContext:
    return ToolHookContext(
        agent_name=deps.agent_name,
        messages=state.messages,
        session_id=deps.session_id,
        metadata=deps.metadata,
        principal=deps.principal,
        subagent=deps.subagent,
        tool_call_id=call.id,
        tool_name=call.name,
        args=args,
        tool_call=call,
        tool=find_tool(deps.tools, call.name),
        resumed_after_approval=call.id in deps.decisions,
        **hook_services(state, deps),
    )


async def _ask_hooks(
    call: ToolCall, tool: AnyTool, parsed: ParsedArguments, state: RunState, deps: RunDeps
) -> Verdict | ParsedArguments:
    outcome = await deps.hooks.pre_tool_call(hook_context(call, parsed.plain, state, deps))
    if outcome.deny is not None:
        return Refuse(_denied(call, outcome.deny))
    if outcome.has_result:
        return Answer(outcome.result, outcome.hook or "")
    if not outcome.changed:
        return parsed
    try:
        return tool.parse_plain(outcome.args)
    except ToolArgumentsValidationError as error:
        named = ToolArgumentsValidationError(
            f"Hook '{outcome.hook}' changed the arguments to something the tool does not take: {error.detail}",
            tool_name=tool.name,
            issues=error.issues,
        )
        return Refuse(error_result(call.name, named))


async def _ask_tool(
    call: ToolCall, tool: AnyTool, parsed: ParsedArguments, ctx: ToolContext, state: RunState, deps: RunDeps
) -> Verdict:
    """The tool's own `needs_approval`, and the `approve` callback that decides in code."""
    if tool.needs_approval is False or tool.needs_approval is None:
        return Run(tool, parsed)
    try:
        asked = await _needs_approval(tool, parsed, ctx, state)
    except Exception as error:
        return Refuse(error_result(call.name, error))
    if isinstance(asked, str):
        return Refuse(_denied(call, asked))
    if not asked or remembered(state.messages, tool.name, parsed.plain):
        return Run(tool, parsed)
    ask = _question(call, tool, parsed)
    if deps.approve is not None:
        return await _decide_in_code(ask, tool, parsed, deps)
    if deps.pauses is None:
        return Refuse(_denied(call, "it needs a person's approval, and nobody can be asked here"))
    return ask


def _question(call: ToolCall, tool: AnyTool, parsed: ParsedArguments) -> Ask:
    if not _asks(tool):
        decided_by = tool.needs_approval.by if isinstance(tool.needs_approval, Always) else None
        return Ask(call, parsed.plain, decided_by=decided_by)
    asked = {"text": parsed.plain.get("question"), "options": parsed.plain.get("options")}
    asked["allowFreeText"] = parsed.plain.get("allow_free_text", True)
    return Ask(call, parsed.plain, "question", {key: value for key, value in asked.items() if value is not None})


async def _decide_in_code(ask: Ask, tool: AnyTool, parsed: ParsedArguments, deps: RunDeps) -> Verdict:
    """`approve(call)`: `True` runs the call, a text runs it with that note (or answers the question), `"defer"` pauses."""
    pending = {"tool_call_id": ask.call.id, "tool_name": ask.call.name, "args": ask.args, "kind": ask.kind}
    assert deps.approve is not None
    decision = deps.approve({**pending, "question": ask.question, "agent_name": deps.agent_name})
    if inspect.isawaitable(decision):
        decision = await decision
    if decision == "defer" and deps.pauses is not None:
        return ask
    if isinstance(decision, str) and decision != "defer":
        return Run(tool, parsed, Approval(note=decision))
    if not isinstance(decision, bool):
        raise ConfigurationError(f"approve answered {decision!r}; it may answer True, False, a text or 'defer'.", field="approve")
    return Run(tool, parsed, Approval()) if decision else Refuse(_rejected(ask.call, tool, Decision(False)))


def _decided(call: ToolCall, tool: AnyTool, parsed: ParsedArguments, decision: Decision, original: Mapping[str, Any]) -> Verdict:
    """A call that a person decided on: it runs with exactly what was approved."""
    if canonical(parsed.plain) != canonical(original):
        changed = ToolArgumentsValidationError(
            "The arguments were changed after the call was approved; it was not run.",
            tool_name=tool.name,
            issues=[{"path": "", "message": "not the approved arguments"}],
        )
        return Refuse(error_result(call.name, changed))
    return Run(tool, parsed, Approval(note=decision.note, by=decision.by))


def _turned_down(call: ToolCall, tool: AnyTool, decision: Decision) -> ErrorResult:
    if decision.expired:
        late = "the question was not answered in time" if _asks(tool) else "the approval came after it had expired"
        return _denied(call, late)
    return _rejected(call, tool, decision)


def _rejected(call: ToolCall, tool: AnyTool, decision: Decision) -> ErrorResult:
    note = f" {decision.note}" if decision.note else ""
    text = "The user declined to answer." if _asks(tool) else "A person rejected this call."
    return error_result(call.name, "rejected", f"{text}{note}", note=decision.note)


def _asks(tool: AnyTool) -> bool:
    """Whether the tool is a question to a person."""
    return bool(tool.metadata.get("question"))


def _calls_before(call: ToolCall, tool: AnyTool, state: RunState) -> int:
    """How many calls of the tool, made before this one in the run, ran or are running: refused ones do not count."""
    refused = {
        message.tool_call_id
        for message in (*state.messages, *state.settled.values())
        if message.tool_name == tool.name and not tool_ran(message)
    }
    before = itertools.takewhile(lambda record: record.id != call.id, state.tool_calls)
    return sum(record.name == tool.name and record.id not in refused for record in before)


def tool_ran(message: Message) -> bool:
    """Whether the tool of the call that `message` answers ran, to its end or in part, or a hook acted in its place."""
    interrupted = message.metadata is not None and INTERRUPTED in message.metadata
    return interrupted or not message.is_error or _kind_of(message) not in NOT_RUN


def _kind_of(message: Message) -> str | None:
    """The kind of an error result; `None` where compaction put a marker in its place."""
    try:
        payload = json.loads(message.text)
    except ValueError:
        return None
    return payload.get("kind") if isinstance(payload, dict) else None


def _outcome_unknown(call: ToolCall) -> ErrorResult:
    text = "The process ended while this call ran. Whether it took effect is unknown, so it was not run again: check first."
    return error_result(call.name, "execution", text, outcome="unknown")


def _denied(call: ToolCall, reason: str) -> ErrorResult:
    return error_result(call.name, "denied", f"The call was denied: {reason}", reason=reason)


async def _needs_approval(tool: AnyTool, parsed: ParsedArguments, ctx: ToolContext, state: RunState) -> bool | str:
    """True to ask, False to run, or the reason of a deny."""
    rule = tool.needs_approval
    if callable(rule):
        takes_context = len(inspect.signature(rule).parameters) > 1
        rule = rule(parsed.value, _approval_context(tool, parsed, ctx, state)) if takes_context else rule(parsed.value)
        if inspect.isawaitable(rule):
            rule = await rule
    if rule is True or rule == "ask":
        return True
    if rule is False or rule == "approve":
        return False
    if rule == "deny":
        return f"Tool '{tool.name}' refused this call."
    if isinstance(rule, Mapping) and set(rule) == {"deny"}:
        return str(rule["deny"])
    raise ToolExecutionError(
        f"needs_approval of tool '{tool.name}' answered {rule!r}; it may answer True, False, 'ask', 'approve', 'deny' "
        "or {'deny': reason}",
        tool_name=tool.name,
    )


def _approval_context(tool: AnyTool, parsed: ParsedArguments, ctx: ToolContext, state: RunState) -> ApprovalContext:
    return ApprovalContext(
        tool_call_id=ctx.tool_call_id,
        messages=tuple(message for message in state.messages if message.role != "system"),
        session_id=ctx.session_id,
        principal=ctx.principal,
        metadata=ctx.metadata,
        abort_signal=ctx.abort_signal,
        tool_name=tool.name,
        args=parsed.plain,
    )
