"""How a run is told of in the end: its result, the limit that stopped it, the decision it went on from, what an error carries."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from lousho_ray.errors import BudgetExceededError
from lousho_ray.events import ApprovalResolved, BudgetExceeded
from lousho_ray.loop.output import Invalid, Valid
from lousho_ray.loop.result import BudgetBreach, ExecutionResult
from lousho_ray.loop.state import Finish, Pause, ResolvedApproval, RunDeps, RunState, StepOutcome


def run_result(state: RunState, deps: RunDeps, outcome: StepOutcome) -> ExecutionResult[Any]:
    finish = outcome if isinstance(outcome, Finish) else Finish("awaiting-approval", state.last_text)
    output = finish.output
    return ExecutionResult(
        text=finish.text,
        reasoning="\n\n".join(state.reasoning) or None,
        messages=list(state.messages),
        new_messages=state.messages[state.opened_at :],
        tool_calls=list(state.tool_calls),
        tool_errors=state.tool_errors,
        usage=state.usage,
        step_usage=state.step_usage,
        finish_reason=finish.reason,
        steps=state.steps,
        run_id=state.run_id,
        agent_name=deps.agent_name,
        approval_id=outcome.approval_id if isinstance(outcome, Pause) else None,
        budget=finish.budget,
        abort_reason=finish.abort_reason,
        object=output.value if isinstance(output, Valid) else None,
        output_error=output.to_dict() if isinstance(output, Invalid) else None,
        output_repaired=isinstance(output, Valid) and bool(state.repair_issues),
        output_repair_issues=[dict(issue) for issue in state.repair_issues] or None if isinstance(output, Valid) else None,
    )


def report_budget(result: ExecutionResult[Any], deps: RunDeps) -> None:
    breach: BudgetBreach | None = result.budget
    if breach is None:
        return
    deps.emitter.emit(BudgetExceeded, limit=breach.limit, value=breach.value, max=breach.max, scope=breach.scope)
    if deps.budget.throws(breach):
        text = f"The {breach.scope} reached its {breach.limit} limit: {breach.value:g} of {breach.max:g}."
        raise BudgetExceededError(text, budget=breach.to_dict())


def report_decision(resolved: ResolvedApproval, deps: RunDeps) -> None:
    decision = resolved.decision
    asked = None if resolved.asked_at is None else datetime.fromisoformat(resolved.asked_at).timestamp()
    deps.emitter.emit(
        ApprovalResolved,
        approval_id=resolved.approval_id,
        tool_call_id=resolved.tool_call_id,
        approved=decision.approved,
        by=decision.by,
        note=decision.note,
        waited_ms=0.0 if asked is None else max(0.0, (deps.clock.wall() - asked) * 1000),
        edited=True if decision.args is not None else None,
    )


def attach_usage(error: BaseException, state: RunState) -> None:
    """An error raised out of a run tells what the run had spent by then, whoever raised it."""
    error.__dict__["usage"] = state.usage
