"""The gate: what decides whether a tool call runs, in the documented order, before anything of the tool runs.

Order per call: known tool, arguments, call cap, `pre_tool_call` hooks, permission rules, the tool's `needs_approval`, the mode. A
deny at any point is final.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from lousho_ray.errors import ToolArgumentsValidationError
from lousho_ray.loop.hooks import ToolHookContext
from lousho_ray.loop.permit import approved_call, permit, permits_wait, refuse_call, turned_down
from lousho_ray.loop.requests import hook_services
from lousho_ray.loop.state import Decision, RunDeps, RunState
from lousho_ray.loop.verdicts import Answer, Refuse, Run, Verdict, denied
from lousho_ray.messages import Message, ToolCall, decode_bytes
from lousho_ray.ports import ToolContext
from lousho_ray.tools.approval_policies import canonical
from lousho_ray.tools.registry import AnyTool, find_tool, not_found
from lousho_ray.tools.results import ErrorResult, error_result
from lousho_ray.tools.schema import ParsedArguments

NOT_RUN = frozenset({"validation", "not-found", "denied", "rejected", "sandbox", "not-run"})
"""The kinds of errors that say that a call was refused before its tool ran."""

INTERRUPTED = "interrupted"
"""The mark in a result's metadata that says: the tool was stopped while it ran."""


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
        return await turned_down(call, tool, parsed, decision, deps)
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
        return Refuse(denied(call.name, reason))
    if deps.hooks.around_tools:
        verdict = await _ask_hooks(call, tool, parsed, state, deps)
        if not isinstance(verdict, ParsedArguments):
            return verdict
        parsed = verdict
    if decision is not None:
        return await _decided(call, tool, parsed, decision, approved, deps)
    if goes_on:
        return Run(tool, parsed)
    return await permit(call, tool, parsed, ctx, state, deps)


def gate_may_wait(call: ToolCall, deps: RunDeps) -> bool:
    """Whether deciding a call runs code of the user, which an abort has to cut short."""
    tool = find_tool(deps.tools, call.name)
    return deps.hooks.around_tools or permits_wait(tool, deps)


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
        return await refuse_call(call, parsed, outcome.deny, deps, hook=outcome.hook)
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


async def _decided(
    call: ToolCall, tool: AnyTool, parsed: ParsedArguments, decision: Decision, original: Mapping[str, Any], deps: RunDeps
) -> Verdict:
    """A call that a person approved: it runs with exactly what was approved."""
    if canonical(parsed.plain) != canonical(original):
        changed = ToolArgumentsValidationError(
            "The arguments were changed after the call was approved; it was not run.",
            tool_name=tool.name,
            issues=[{"path": "", "message": "not the approved arguments"}],
        )
        return Refuse(error_result(call.name, changed))
    return await approved_call(call, tool, parsed, decision, deps)


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
