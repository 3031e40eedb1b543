"""The gate: what decides whether a tool call runs, in the documented order, before anything of the tool runs.

Order per call: known tool, arguments, call cap, `pre_tool_call` hooks, the tool's `needs_approval`. A deny at any point is final.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from lousho_ray.errors import ToolArgumentsValidationError
from lousho_ray.loop.hooks import ToolHookContext
from lousho_ray.loop.state import RunDeps, RunState
from lousho_ray.messages import ToolCall
from lousho_ray.ports import Approval, ToolContext
from lousho_ray.tools.registry import AnyTool, find_tool, not_found
from lousho_ray.tools.results import ErrorResult, error_result
from lousho_ray.tools.schema import ParsedArguments


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


Verdict: TypeAlias = Run | Refuse | Answer


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
    if (cap := tool.max_calls_per_run) is not None and sum(record.name == tool.name for record in state.tool_calls) > cap:
        reason = f"Tool '{tool.name}' may be called {cap} time(s) in one run. Use the results you have."
        return Refuse(_denied(call, reason))
    if deps.hooks.around_tools:
        verdict = await _ask_hooks(call, tool, parsed, state, deps)
        if not isinstance(verdict, ParsedArguments):
            return verdict
        parsed = verdict
    return await _ask_tool(call, tool, parsed, ctx, deps)


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


async def _ask_tool(call: ToolCall, tool: AnyTool, parsed: ParsedArguments, ctx: ToolContext, deps: RunDeps) -> Verdict:
    """The tool's own `needs_approval`, and the `approve` callback that decides in code."""
    if tool.needs_approval is False or tool.needs_approval is None:
        return Run(tool, parsed)
    try:
        asked = await _needs_approval(tool, parsed, ctx)
    except Exception as error:
        return Refuse(error_result(call.name, error))
    if isinstance(asked, str):
        return Refuse(_denied(call, asked))
    if not asked:
        return Run(tool, parsed)
    pending = {"tool_call_id": call.id, "tool_name": call.name, "args": parsed.plain, "kind": "tool", "agent_name": deps.agent_name}
    assert deps.approve is not None, "create_agent refuses tools that need approval without approve="
    decision = deps.approve(pending)
    if inspect.isawaitable(decision):
        decision = await decision
    if isinstance(decision, str):
        return Run(tool, parsed, Approval(note=decision))
    return (
        Run(tool, parsed, Approval()) if decision is True else Refuse(error_result(call.name, "rejected", "The call was rejected."))
    )


def _denied(call: ToolCall, reason: str) -> ErrorResult:
    return error_result(call.name, "denied", f"The call was denied: {reason}", reason=reason)


async def _needs_approval(tool: AnyTool, parsed: ParsedArguments, ctx: ToolContext) -> bool | str:
    """True to ask, False to run, or the reason of a deny."""
    rule = tool.needs_approval
    if callable(rule):
        takes_context = len(inspect.signature(rule).parameters) > 1
        rule = rule(parsed.value, ctx) if takes_context else rule(parsed.value)
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
    raise TypeError(
        f"needs_approval of tool '{tool.name}' answered {rule!r}; it may answer True, False, 'ask', 'approve', 'deny' "
        "or {'deny': reason}"
    )
