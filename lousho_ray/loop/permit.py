"""Whether a call with valid arguments may run: permission rules, the tool's own `needs_approval`, the mode, and who is asked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from lousho_ray.clock import timestamp
from lousho_ray.errors import ConfigurationError, ToolExecutionError
from lousho_ray.events import PermissionDecision
from lousho_ray.loop.state import Ask, Decision, RunDeps, RunState
from lousho_ray.loop.verdicts import Refuse, Run, Verdict, denied
from lousho_ray.messages import ToolCall
from lousho_ray.permissions import DONT_ASK_REASON, PLAN_REASON, Match, PermissionMode
from lousho_ray.ports import Approval, ToolContext
from lousho_ray.tools.approval_policies import Always, ApprovalContext, remembered
from lousho_ray.tools.registry import AnyTool
from lousho_ray.tools.results import ErrorResult, error_result
from lousho_ray.tools.schema import ParsedArguments

DELEGATES = "delegates"
"""The mark in a tool's metadata that says: it acts through a run of its own, whose calls are decided one by one."""


def permits_wait(tool: AnyTool | None, deps: RunDeps) -> bool:
    """Whether deciding a call may run code of the user."""
    return bool(deps.permissions) or (tool is not None and bool(tool.needs_approval))


async def permit(
    call: ToolCall, tool: AnyTool, parsed: ParsedArguments, ctx: ToolContext, state: RunState, deps: RunDeps
) -> Verdict:
    """Decides a call that nobody has decided on yet, in the documented order. The decision is reported before anything runs."""
    mode = deps.mode.now()
    if not tool.needs_approval and not deps.permissions and mode == "default" and not deps.audited:
        return Run(tool, parsed)
    about = {"tool_name": tool.name, "tool_call_id": call.id, "session_id": deps.session_id}
    try:
        match = await deps.permissions.match(tool.name, parsed.plain, about)
        if match is not None and match.rule.action == "deny":
            reason = match.rule.reason or f"Calls of tool '{tool.name}' are not permitted."
            return await refuse_call(call, parsed, reason, deps, mode, match=match)
        wants = await _needs_approval(tool, parsed, ctx, state)
    except Exception as error:
        return Refuse(error_result(call.name, error))
    if isinstance(wants, str):
        return await refuse_call(call, parsed, wants, deps, mode)
    if _breaks_plan(tool, mode):
        return await refuse_call(call, parsed, PLAN_REASON, deps, mode, match=match, by_mode=True)
    asks = wants if match is None else match.rule.action == "ask"
    if not asks or remembered(state.messages, tool.name, parsed.plain):
        await report(call, parsed, "default" if match is None else match.rule.action, deps, mode, match=match)
        return Run(tool, parsed)
    if mode == "acceptEdits" and tool.edits_files:
        await report(call, parsed, "allow", deps, mode, match=match, by_mode=True)
        return Run(tool, parsed)
    if mode == "dontAsk":
        return await refuse_call(call, parsed, DONT_ASK_REASON, deps, mode, match=match, by_mode=True)
    await report(call, parsed, "ask", deps, mode, match=match)
    return await _ask(_question(call, tool, parsed, match), tool, parsed, deps)


async def approved_call(call: ToolCall, tool: AnyTool, parsed: ParsedArguments, decision: Decision, deps: RunDeps) -> Verdict:
    """A call that a person approved runs, unless the mode of now is `plan` and it would change something."""
    mode = deps.mode.now()
    if _breaks_plan(tool, mode):
        return await refuse_call(call, parsed, PLAN_REASON, deps, mode, by_mode=True)
    await report(call, parsed, "approved", deps, mode, by=decision.by, edited=True if decision.args is not None else None)
    return Run(tool, parsed, Approval(note=decision.note, by=decision.by))


async def turned_down(call: ToolCall, tool: AnyTool, parsed: ParsedArguments, decision: Decision, deps: RunDeps) -> Verdict:
    """A call that a person rejected, or approved too late."""
    if decision.expired:
        await report(call, parsed, "deny", deps, reason="expired", by=decision.by)
        late = "the question was not answered in time" if asks_person(tool) else "the approval came after it had expired"
        return Refuse(denied(call.name, late))
    await report(call, parsed, "rejected", deps, reason=decision.note, by=decision.by)
    return Refuse(rejected(call, tool, decision.note))


async def refuse_call(
    call: ToolCall,
    parsed: ParsedArguments,
    reason: str,
    deps: RunDeps,
    mode: PermissionMode | None = None,
    *,
    match: Match | None = None,
    by_mode: bool = False,
    hook: str | None = None,
) -> Refuse:
    """Refuses a call and reports it."""
    await report(call, parsed, "deny", deps, mode, match=match, by_mode=by_mode, hook=hook, reason=reason)
    return Refuse(denied(call.name, reason))


async def report(
    call: ToolCall,
    parsed: ParsedArguments,
    decision: str,
    deps: RunDeps,
    mode: PermissionMode | None = None,
    *,
    match: Match | None = None,
    by_mode: bool = False,
    hook: str | None = None,
    reason: str | None = None,
    by: str | None = None,
    edited: bool | None = None,
) -> None:
    """The audit entry of a call. `mode` is the one that was read for it, if one was, and `by_mode` says that it decided.

    An audit that fails stops the run before the call runs.
    """
    if not deps.emitter.on or not (deps.audited or deps.permissions or (mode or deps.mode.now()) != "default"):
        return
    deps.emitter.emit(
        PermissionDecision,
        tool_call_id=call.id,
        tool_name=call.name,
        decision=decision,
        at=timestamp(deps.clock.wall()),
        rule=None if match is None else match.to_dict(),
        args=None if deps.trace.context.redact_content else parsed.plain,
        mode=mode if by_mode else None,
        reason=reason,
        hook=hook,
        by=by,
        edited=edited,
    )
    if deps.audited:
        await deps.emitter.drain()


def _breaks_plan(tool: AnyTool, mode: PermissionMode) -> bool:
    return mode == "plan" and not tool.read_only and not tool.metadata.get(DELEGATES)


async def _ask(ask: Ask, tool: AnyTool, parsed: ParsedArguments, deps: RunDeps) -> Verdict:
    """Asks the `approve` function, else pauses the run for a person."""
    if deps.approve is not None:
        return await _decide_in_code(ask, tool, parsed, deps)
    if deps.pauses is None:
        return Refuse(denied(ask.call.name, "it needs a person's approval, and nobody can be asked here"))
    return ask


def _question(call: ToolCall, tool: AnyTool, parsed: ParsedArguments, match: Match | None) -> Ask:
    ttl_ms = None if match is None else match.rule.ttl_ms
    if not asks_person(tool):
        decided_by = tool.needs_approval.by if isinstance(tool.needs_approval, Always) else None
        return Ask(call, parsed.plain, decided_by=decided_by, ttl_ms=ttl_ms)
    asked = {"text": parsed.plain.get("question"), "options": parsed.plain.get("options")}
    asked["allowFreeText"] = parsed.plain.get("allow_free_text", True)
    question = {key: value for key, value in asked.items() if value is not None}
    return Ask(call, parsed.plain, "question", question, ttl_ms=ttl_ms)


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
    return Run(tool, parsed, Approval()) if decision else Refuse(rejected(ask.call, tool, None))


def asks_person(tool: AnyTool) -> bool:
    """Whether the tool is a question to a person."""
    return bool(tool.metadata.get("question"))


def rejected(call: ToolCall, tool: AnyTool, note: str | None) -> ErrorResult:
    said = f" {note}" if note else ""
    text = "The user declined to answer." if asks_person(tool) else "A person rejected this call."
    return error_result(call.name, "rejected", f"{text}{said}", note=note)


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
