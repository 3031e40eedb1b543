"""The run loop. There is one: `send()`, `stream()`, sessions, sub-agents and resumes all go through `run()`.

`run(state, deps)` drives `step()` until a step says how the run ends. A step is one model call plus the tool calls it asks for.
Events go to `deps.emitter` as they happen, since parallel tools and sub-agents report concurrently.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lousho_ray.cancellation import Aborted
from lousho_ray.events import (
    AgentDrift,
    ApprovalRequested,
    ErrorEvent,
    ErrorInfo,
    EventUsage,
    RunDone,
    RunStart,
    StepDone,
    StepStart,
    TextDone,
)
from lousho_ray.loop.batch import ToolBatch
from lousho_ray.loop.calls import cancel_calls, cut_off, show_images, unique
from lousho_ray.loop.ending import attach_usage, report_budget, report_decision, run_result
from lousho_ray.loop.model import Reply, Steered, call_model
from lousho_ray.loop.output import OutputContext, Valid
from lousho_ray.loop.requests import hook_context, prepare_request
from lousho_ray.loop.reserve import Refused, reserve
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.state import CONTINUE, Ask, Continue, Finish, Pause, RunDeps, RunState, StepOutcome
from lousho_ray.messages import Message, unanswered_calls, user
from lousho_ray.ports import GenerateOptions
from lousho_ray.providers.failures import to_provider_error
from lousho_ray.usage import StepUsage

EMPTY_REPLY = "[empty-reply]"
"""How the user message begins that asks again after a reply without text and calls."""


async def run(state: RunState, deps: RunDeps) -> ExecutionResult[Any]:
    """Runs to the end and returns how it ended.

    Raises:
        CompactedLLMProviderError: A model call failed for good.
        BudgetExceededError: A limit tripped and `limits.on_exceeded` is `"throw"`.
        Exception: What a hook, a store or a `PropagatingToolError` raised.
    """
    with deps.trace.run(state) as span:
        result = await _run(state, deps)
        span.ended(result)
    return result


async def _run(state: RunState, deps: RunDeps) -> ExecutionResult[Any]:
    emitter = deps.emitter
    disarm = deps.budget.arm(deps.abort)
    try:
        await deps.budget.open()
        emitter.emit(RunStart, agent_name=deps.agent_name)
        if deps.drift is not None:
            emitter.emit(AgentDrift, **deps.drift)
        if deps.resolved is not None:
            report_decision(deps.resolved, deps)
        recorder = deps.recorder
        deps.inbox.open(emitter, None if recorder is None else lambda: recorder.note(state, deps.inbox))
        outcome: StepOutcome = await _finish_open_calls(state, deps)
        while isinstance(outcome, Continue):
            outcome = await step(state, deps)
        outcome = await _force_answer(state, deps, outcome)
        deps.inbox.close()
        if deps.abort.reason is not None and deps.abort.reason.error is not None:
            raise deps.abort.reason.error
        result = run_result(state, deps, outcome)
        await deps.budget.close()
        if deps.commit is not None:
            await deps.commit(result)
        report_budget(result, deps)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        attach_usage(error, state)
        emitter.emit(ErrorEvent, error=ErrorInfo.of(error))
        emitter.emit(RunDone, finish_reason="error", text="")
        raise
    finally:
        disarm()
        deps.inbox.close()
        await deps.budget.abandon()
    emitter.emit(
        RunDone,
        finish_reason=result.finish_reason,
        text=result.text,
        usage=EventUsage.of(result.usage),
        object=outcome.output.plain if isinstance(outcome, Finish) and isinstance(outcome.output, Valid) else None,
        output_repaired=result.output_repaired or None,
    )
    return result


async def step(state: RunState, deps: RunDeps) -> StepOutcome:
    """One model call and the tool calls it asks for."""
    stop = await _may_step(state, deps)
    if stop is not None:
        return stop
    state.steps += 1
    _apply_input(state, deps)
    with _step_events(state, deps):
        try:
            request = await prepare_request(state, deps)
            breach = await _spent_by_hooks(state, deps)
            if breach is not None:
                return _step_done(state, deps, "budget-exceeded", breach)
            reply = await _call(state, deps, request)
            if not isinstance(reply, Reply):
                return reply
            await _take(state, deps, request, reply)
            if reply.tool_calls:
                return await _run_tools(state, deps, reply)
            return await _final_reply(state, deps, reply)
        except Aborted:  # while a hook or a validator ran
            return _step_done(state, deps, "aborted", _aborted(deps), _booked(state))
        except Refused as refused:
            return _step_done(state, deps, "budget-exceeded", _no_room(state, refused), _booked(state))


@contextmanager
def _step_events(state: RunState, deps: RunDeps) -> Iterator[None]:
    """A step starts; when something fails inside, it ends with `error` before the failure goes on."""
    deps.emitter.emit(StepStart, step=state.steps)
    try:
        yield
    except BaseException:
        _step_done(state, deps, "error", CONTINUE, _booked(state))
        raise


def _booked(state: RunState) -> StepUsage | None:
    """The usage of the running step, once its model call has been booked."""
    own = (entry for entry in reversed(state.step_usage) if entry.step == state.steps and entry.purpose is None)
    return next(own, None)


async def _call(state: RunState, deps: RunDeps, request: GenerateOptions) -> Reply | StepOutcome:
    """The model's reply, or how the step ends without one."""
    call_id = f"step-{state.steps}"
    try:
        await reserve(state, deps, deps.provider, request, call_id)
        with deps.trace.chat(request, deps.provider) as chat:
            return await call_model(request, deps, state, chat)
    except Steered:
        await deps.budget.release(call_id)
        return _step_done(state, deps, "steered", CONTINUE, _booked(state))
    except Aborted:
        return _step_done(state, deps, "aborted", _aborted(deps), _booked(state))
    except Refused:
        raise
    except Exception as error:
        final = to_provider_error(error, deps.provider.name, deps.model or deps.provider.default_model)
        if final is error:
            raise
        raise final from error


async def _take(state: RunState, deps: RunDeps, request: GenerateOptions, reply: Reply) -> None:
    """Takes a reply into the run: its message, its text."""
    if deps.hooks.around_generate:
        await deps.abort.guard(deps.hooks.post_generate(hook_context(state, deps, request), reply))
    if reply.reasoning:
        state.reasoning.append(reply.reasoning)
    reply.tool_calls = unique(reply.tool_calls, state)
    if not reply.empty:  # servers refuse a conversation with an empty turn; one of hosted calls alone is kept and never sent
        state.messages.append(reply.message())
    if reply.text:
        deps.emitter.emit(TextDone, text=reply.text)


async def _final_reply(state: RunState, deps: RunDeps, reply: Reply) -> StepOutcome:
    """A reply without tool calls ends the run, unless input came while it was written and a step is left."""
    await deps.budget.note(f"step-{state.steps}", reply.spend)
    outcome: StepOutcome
    if deps.inbox.waiting and await _may_step(state, deps) is None:
        outcome = CONTINUE
    elif reply.empty and deps.output is None and reply.finish_reason in ("stop", "other"):
        outcome = _ask_again(state, deps)
    else:
        outcome = await _checked(state, deps, reply)
    return _step_done(state, deps, reply.finish_reason, outcome, reply.entry)


def _ask_again(state: RunState, deps: RunDeps) -> StepOutcome:
    """An empty reply is asked for again, once in a run: it is no answer, and asking on and on would never end."""
    asked = any(message.role == "user" and message.text.startswith(EMPTY_REPLY) for message in state.messages[state.opened_at :])
    if asked or state.steps >= deps.max_steps:
        return Finish("other")
    state.messages.append(user(f"{EMPTY_REPLY} Your reply was empty. Answer now, or call a tool."))
    return CONTINUE


async def _checked(state: RunState, deps: RunDeps, reply: Reply) -> StepOutcome:
    """How a final reply ends the run: with an `output` schema it must match, and gets one repair step when it does not."""
    if deps.output is None or reply.finish_reason in ("content_filter", "length", "error"):
        return Finish(reply.finish_reason, reply.text)
    checked = await deps.abort.guard(deps.output.check(reply.text, _output_context(state)))
    if isinstance(checked, Valid):
        return Finish(reply.finish_reason, reply.text, output=checked)
    stop = await _may_step(state, deps)
    if state.repair_issues or (stop is not None and _out_of_steps(stop)):
        return Finish("output-invalid", reply.text, output=checked)
    if stop is not None:  # a spend limit, or an abort
        return stop if stop.reason == "aborted" else replace(stop, text=reply.text, output=checked)
    state.repair_issues = checked.issues
    state.messages.append(user(deps.output.repair_message(checked)))
    return CONTINUE


async def _force_answer(state: RunState, deps: RunDeps, outcome: StepOutcome) -> StepOutcome:
    """A run with an `output` schema that ran out of steps is asked once for its answer, without tools."""
    if deps.output is None or not isinstance(outcome, Finish) or not _out_of_steps(outcome) or deps.abort.aborted:
        return outcome
    if await deps.budget.before_call(state.usage.spend, steps=0, tool_errors=state.tool_errors) is not None:
        return outcome  # What ran since the last check, sub-agents for example, reached another limit.
    state.steps += 1
    state.messages.append(
        user("[final-answer] No steps are left. Give your final answer now, in the output format, without tools.")
    )
    with _step_events(state, deps):
        try:
            request = await prepare_request(state, deps, with_tools=False)
            called = await _call(state, deps, request)
            if not isinstance(called, Reply):
                return outcome if isinstance(called, Continue) else called
            await _take(state, deps, request, called)
            cancel_calls(called.tool_calls, state, "The call was not run: no steps are left.")
            await deps.budget.note(f"step-{state.steps}", called.spend)
            checked = await deps.abort.guard(deps.output.check(called.text, _output_context(state)))
        except Aborted:  # while a hook or a validator ran
            return _step_done(state, deps, "aborted", _aborted(deps), _booked(state))
        except Refused:
            return _step_done(state, deps, "budget-exceeded", outcome)
        return _step_done(state, deps, called.finish_reason, replace(outcome, text=called.text, output=checked), called.entry)


def _out_of_steps(stop: Finish) -> bool:
    """Whether the run itself ran out of steps; in a session without any left nothing more is asked for."""
    budget = stop.budget
    return stop.reason == "max-steps" or (budget is not None and budget.limit == "maxSteps" and budget.scope == "run")


async def _run_tools(state: RunState, deps: RunDeps, reply: Reply) -> StepOutcome:
    entry = reply.entry
    deps.inbox.tools_begin()
    breach = await deps.budget.after_tools_asked(f"step-{state.steps}", reply.spend, state.usage.spend)
    if breach is not None:
        cancel_calls(reply.tool_calls, state, f"The call was cancelled before it ran: the {breach.limit} limit is reached.")
        return _step_done(state, deps, reply.finish_reason, Finish("budget-exceeded", reply.text, budget=breach), entry)
    if reply.finish_reason == "content_filter" or (reply.finish_reason == "length" and cut_off(reply.tool_calls)):
        cancel_calls(reply.tool_calls, state, f"The call was not run: the reply ended with {reply.finish_reason!r}.")
        return _step_done(state, deps, reply.finish_reason, Finish(reply.finish_reason, reply.text), entry)
    state.last_text = reply.text
    if deps.recorder is not None:
        await deps.recorder.save(state, lambda: deps.inbox.pending)
    ask = await ToolBatch(reply.tool_calls, state, deps).run()
    if ask is not None:
        return await _pause(state, deps, ask, entry)
    if deps.abort.aborted:
        return _step_done(state, deps, "aborted", _aborted(deps), entry)
    return _step_done(state, deps, "tool_calls", CONTINUE, entry)


async def _finish_open_calls(state: RunState, deps: RunDeps) -> StepOutcome:
    """A transcript that ends in unanswered calls (a resumed turn) has those run first; the model is not asked again for them.

    A call that a person decided on runs by itself, and the ones behind it once its result is in.
    """
    calls = unanswered_calls(state.messages)
    first = 1 if calls and calls[0].id in deps.decisions else 0
    for batch in (calls[:first], calls[first:]):
        ask = await ToolBatch(batch, state, deps).run() if batch else None
        if ask is not None:
            return await _pause(state, deps, ask)
    show_images(state)
    return CONTINUE


async def _pause(state: RunState, deps: RunDeps, ask: Ask, entry: StepUsage | None = None) -> StepOutcome:
    """Ends the run at a call that needs a person: the record first, then the checkpoint that names it, then the event."""
    assert deps.pauses is not None
    state.ran_ms += deps.budget.elapsed_ms
    kept = deps.inbox.restored
    pending = await deps.pauses.open(state, ask, kept)
    if deps.recorder is not None:
        about = {"approvalId": pending["id"], "approvalKind": pending["kind"], "approvalCallId": ask.call.id}
        await deps.recorder.save(state, lambda: kept, status="awaiting-approval", **about)
    if deps.subagent is None:  # the pause of a sub-agent is told of once, by the run at the top
        deps.emitter.emit(
            ApprovalRequested,
            approval_id=pending["id"],
            tool_call_id=ask.decides.id,
            tool_name=ask.decides.name,
            args=ask.args,
            kind=None if ask.kind == "tool" else ask.kind,
            question=ask.question,
            expires_at=pending.get("expiresAt"),
            subagent_path=ask.path or None,
        )
    outcome = Pause(pending)
    return outcome if entry is None else _step_done(state, deps, "awaiting-approval", outcome, entry)


async def _may_step(state: RunState, deps: RunDeps) -> Finish | None:
    """How the run ends instead of taking another step, or `None`."""
    if deps.abort.aborted:
        return _aborted(deps)
    if state.steps >= deps.max_steps:
        return Finish("max-steps", state.last_text)
    breach = await deps.budget.before_call(state.usage.spend, steps=state.steps, tool_errors=state.tool_errors)
    return None if breach is None else Finish("budget-exceeded", state.last_text, budget=breach)


async def _spent_by_hooks(state: RunState, deps: RunDeps) -> Finish | None:
    """How the run ends instead of the step's model call, when side calls of its hooks reached a limit."""
    if not any(entry.step == state.steps and entry.purpose is not None for entry in state.step_usage[-1:]):
        return None
    breach = await deps.budget.before_call(state.usage.spend, steps=state.steps - 1, tool_errors=state.tool_errors)
    return None if breach is None else Finish("budget-exceeded", state.last_text, budget=breach)


def _no_room(state: RunState, refused: Refused) -> Finish:
    return Finish("budget-exceeded", state.last_text, budget=refused.breach)


def _apply_input(state: RunState, deps: RunDeps) -> None:
    items = deps.inbox.take()
    for item in items:
        state.messages.extend(item.messages)
    if items:
        deps.inbox.applied(items, state.steps)


def _output_context(state: RunState) -> OutputContext:
    names = {call.id: call for call in state.tool_calls}
    results = [
        {"name": message.tool_name, "args": names[message.tool_call_id].args, "result": _result_in(message)}
        for message in state.messages
        if message.role == "tool" and message.tool_call_id in names
    ]
    return OutputContext(tuple(state.messages), results)


def _result_in(message: Message) -> Any:
    """The result a tool message holds; the text itself where compaction put a marker in its place."""
    try:
        return json.loads(message.text)
    except ValueError:
        return message.text


def _step_done(state: RunState, deps: RunDeps, reason: str, outcome: StepOutcome, entry: StepUsage | None = None) -> StepOutcome:
    """Reports the end of a step and passes its outcome on."""
    usage = EventUsage.of(entry) if entry is not None and deps.emitter.on else None
    deps.emitter.emit(StepDone, step=state.steps, finish_reason=reason, usage=usage)
    return outcome


def _aborted(deps: RunDeps) -> Finish:
    reason = deps.abort.reason
    assert reason is not None
    if reason.deadline:
        return Finish("budget-exceeded", budget=deps.budget.deadline_breach())
    return Finish("aborted", abort_reason=reason.to_dict())
