"""The tool calls of one model turn: started in call order, run side by side, recorded in call order.

A call's gate is passed before the next call's gate begins. Results join the transcript as the finished prefix grows, whatever order
the calls finish in, so the transcript is valid at every moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from lousho_ray.cancellation import Aborted, AbortReason
from lousho_ray.errors import PropagatingToolError, ToolExecutionError
from lousho_ray.events import ErrorInfo, TodoUpdated, ToolDone, ToolError, ToolPartial, ToolResume, ToolStart
from lousho_ray.loop.calls import keep_record, plain_args, show_images
from lousho_ray.loop.gate import INTERRUPTED, gate_may_wait, hook_context, parse_call, pass_gate
from lousho_ray.loop.hooks import HaltedError, PostToolOutcome
from lousho_ray.loop.state import Ask, CallPaused, RunDeps, RunState
from lousho_ray.loop.verdicts import Answer, Refuse, Run
from lousho_ray.messages import Message, ToolCall, tool_result
from lousho_ray.ports import ToolContext
from lousho_ray.tools.approval_policies import MARK, approval_mark
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.registry import find_tool
from lousho_ray.tools.results import ErrorResult, cap_result, encode_result, error_result
from lousho_ray.tools.schema import ParsedArguments
from lousho_ray.tools.spill import READ_RESULT

log = logging.getLogger("lousho_ray")


class ToolBatch:
    """Runs the calls of one assistant message and leaves exactly one result for each in `state.messages`."""

    def __init__(self, calls: Sequence[ToolCall], state: RunState, deps: RunDeps) -> None:
        self._calls = tuple(calls)
        self._state = state
        self._deps = deps
        asked_at = next(index for index in range(len(state.messages) - 1, -1, -1) if state.messages[index].role == "assistant")
        self._seen = tuple([message for message in state.messages[:asked_at] if message.role != "system"])
        self._results: list[Message | None] = [None] * len(self._calls)
        self._recorded = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(deps.tool_concurrency) if deps.tool_concurrency is not None else None
        self._fatal: dict[int, BaseException] = {}
        self._started: dict[int, float] = {}
        self._approved: dict[str, Run] = {}
        self._asks: dict[int, Ask] = {}
        self._ask: Ask | None = None
        self._cancelled = False

    async def run(self) -> Ask | None:
        """Runs the batch; returns the call that needs a person, if one does: it and the calls after it have no results then.

        Raises:
            BaseException: What a `PropagatingToolError` or a raising hook brought, the first in call order, once every running
                call has settled; the others are attached as notes.
        """
        loop = asyncio.get_running_loop()

        def cancel_from_any_thread() -> None:
            loop.call_soon_threadsafe(self._cancel_running)

        forget = self._deps.abort.on_abort(lambda _: cancel_from_any_thread())
        try:
            for index, call in enumerate(self._calls):
                if not await self._start(index, call):
                    break
            await self._wait()
        finally:
            forget()
            self._choose_pause()
            await self._settle_rest()
        if self._ask is None:
            show_images(self._state)
        if self._fatal:
            first, *others = (self._fatal[index] for index in sorted(self._fatal))
            for other in others:
                first.add_note(f"Another call of the same turn failed too: {type(other).__name__}: {other}")
            raise first
        return self._ask

    def _choose_pause(self) -> None:
        """The first call in call order that needs a person pauses the run. A sub-agent that paused behind it is ended."""
        if not self._asks or self._deps.abort.aborted or self._fatal:
            return
        first = min(self._asks)
        self._ask = self._asks[first]
        for index, ask in self._asks.items():
            if index != first and ask.inner is not None:
                text = (
                    f"The sub-agent's call of tool '{ask.decides.name}' needs a person's approval, but another call of this turn "
                    "is being decided on. It was not run; start the sub-agent again to ask for it."
                )
                self._refuse(index, ask.call, error_result(ask.call.name, "not-run", text), self._started[index])

    async def _wait(self) -> None:
        """Waits for the running calls. After an abort those that ignore it are waited for at most `abort_grace_ms`."""
        grace_ms = self._deps.abort_grace_ms
        running = {task for task in self._tasks if not task.done()}
        if grace_ms is None or not running:
            if running:
                await asyncio.wait(running)
            return
        waiting = asyncio.ensure_future(asyncio.wait(running))
        aborted = asyncio.ensure_future(self._deps.abort.wait())
        try:
            await asyncio.wait({waiting, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                await asyncio.wait(running, timeout=grace_ms / 1000)
        finally:
            waiting.cancel()
            aborted.cancel()

    @property
    def _stopped(self) -> bool:
        return self._deps.abort.aborted or self._deps.inbox.steered or bool(self._fatal) or bool(self._asks)

    async def _start(self, index: int, call: ToolCall) -> bool:
        """Takes one call through its gate and starts it. False when no further call may start."""
        if (earlier := self._state.settled.get(call.id)) is not None:
            self._record(index, earlier)
            return True
        if self._slots is not None:
            await self._wait_for_slot()
        if self._stopped:
            return False
        started = self._deps.clock.now()
        parsed = parse_call(call, self._deps.tools)
        keep_record(call, parsed, self._state)
        args = parsed.plain if isinstance(parsed, ParsedArguments) else plain_args(call)
        start = ToolResume if call.id in self._deps.decisions else ToolStart
        self._deps.emitter.emit(start, tool_call_id=call.id, tool_name=call.name, args=args)
        ctx = self._context(call)
        try:
            gate = pass_gate(call, parsed, ctx, self._state, self._deps)
            verdict = await (self._deps.abort.guard(gate) if gate_may_wait(call, self._deps) else gate)
            self._deps.abort.raise_if_aborted()
            if isinstance(verdict, Run) and verdict.tool.effect == "once":
                await self._begin(call)
        except Aborted as aborted:
            text = f"The call was cancelled before it ran: {aborted.reason.message}"
            self._refuse(index, call, error_result(call.name, "not-run", text), started)
            return False
        except Exception as error:
            self._fatal[index] = error
            self._refuse(index, call, error_result(call.name, error), started)
            return False
        match verdict:
            case Run():
                ctx.approval = verdict.approval
                if verdict.approval is not None:
                    self._approved[call.id] = verdict
                task = asyncio.create_task(self._execute(index, call, verdict, ctx, started), name=f"tool {call.name}")
                self._tasks.add(task)
                self._started[index] = started
                return True
            case Refuse(error=refusal):
                self._refuse(index, call, refusal, started)
            case Answer(value=value, hook=hook):
                self._finish(index, call, value, started, replaced_by=hook)
            case Ask():
                await self._pause(index, verdict)
        self._free_slot()
        await self._checkpoint(index)
        return not self._asks

    async def _pause(self, index: int, ask: Ask) -> None:
        """A call waits for a person. The post-hooks hear of it, too; what they return cannot replace it."""
        self._asks[index] = ask
        if not self._deps.hooks.around_tools:
            return
        ctx = hook_context(ask.call, dict(ask.args), self._state, self._deps)
        try:
            await self._deps.abort.guard(self._deps.hooks.post_tool_call(ctx, PostToolOutcome(requires_approval=True)))
        except Aborted:
            pass  # The batch settles the call like any other that an abort met before it ran.
        except Exception as error:
            self._fatal[index] = error

    async def _begin(self, call: ToolCall) -> None:
        """Writes down that a call with a once-only effect starts, before it does."""
        self._state.begun.add(call.id)
        if self._deps.recorder is not None:
            await self._deps.recorder.begin(self._state, lambda: self._deps.inbox.pending)

    async def _checkpoint(self, index: int) -> None:
        """Saves the results that are in. A save that fails fails the run, once the running calls have settled."""
        if self._deps.recorder is None or self._deps.abort.aborted:
            return
        try:
            await self._deps.recorder.save(self._state, lambda: self._deps.inbox.pending)
        except Exception as error:
            self._fatal.setdefault(index, error)

    async def _wait_for_slot(self) -> None:
        """Waits for a free slot; an abort frees one, since it ends the running calls."""
        assert self._slots is not None
        await self._slots.acquire()

    def _free_slot(self) -> None:
        if self._slots is not None:
            self._slots.release()

    def _context(self, call: ToolCall) -> ToolContext:
        deps = self._deps
        return ToolContext(
            tool_call_id=call.id,
            messages=self._seen,
            session_id=deps.session_id,
            principal=deps.principal,
            metadata=deps.metadata,
            abort_signal=deps.abort,
            run=deps.services,
        )

    async def _execute(self, index: int, call: ToolCall, run: Run, ctx: ToolContext, started: float) -> None:
        """The task of one call. Nothing but a fatal error leaves it, and that through `self._fatal`."""
        try:
            await self._call(index, call, run, ctx, started)
        except asyncio.CancelledError:
            if not self._cancelled:
                self._refuse(index, call, error_result(run.tool, ToolExecutionError("The tool cancelled its own task.")), started)
                return
            reason = self._deps.abort.reason or AbortReason.of("The run was stopped.")
            why = reason.message.rstrip(".")
            text = f"The call was stopped while it ran: {why}. What it had done by then may have taken effect."
            self._refuse(index, call, error_result(call.name, "not-run", text), started)
        finally:
            self._free_slot()
        await self._checkpoint(index)

    async def _call(self, index: int, call: ToolCall, run: Run, ctx: ToolContext, started: float) -> None:
        """Runs the tool and its post-hooks."""

        async def partial(output: Any, number: int) -> None:
            if not self._deps.abort.aborted:
                self._deps.emitter.emit(
                    ToolPartial, tool_call_id=call.id, tool_name=call.name, output=encode_result(output).safe, index=number
                )
                await self._deps.emitter.drain()

        try:
            on_partial = partial if self._deps.emitter.on else None
            with self._deps.trace.tool(run.tool, call, run.arguments.plain, self._deps.abort) as span:
                value = await call_tool(run.tool, run.arguments.value, ctx, on_partial, place=self._deps.place)
                span.returned(value)
        except CallPaused as paused:
            await self._pause(index, paused.ask.seen_from(call, paused.name))
        except PropagatingToolError as error:
            self._fatal[index] = error.error if isinstance(error, HaltedError) else error
            self._refuse(index, call, error_result(call.name, error), started)
        except Exception as error:
            await self._after(index, call, run, PostToolOutcome(error=error_result(run.tool, error).payload), started, error)
        else:
            await self._after(index, call, run, PostToolOutcome(result=value), started, None)

    async def _after(
        self, index: int, call: ToolCall, run: Run, outcome: PostToolOutcome, started: float, error: Exception | None
    ) -> None:
        """Post-hooks, then the result."""
        replaced: str | None = None
        if self._deps.hooks.around_tools:
            ctx = hook_context(call, run.arguments.plain, self._state, self._deps)
            try:
                outcome, replaced = await self._deps.hooks.post_tool_call(ctx, outcome)
            except Exception as raised:
                self._fatal[index] = raised
                self._refuse(index, call, error_result(call.name, raised), started)
                return
        if error is not None and replaced is None:
            self._refuse(index, call, error_result(run.tool, error), started)
        else:
            self._finish(index, call, outcome.result, started, replaced_by=replaced)

    def _finish(self, index: int, call: ToolCall, value: Any, started: float, *, replaced_by: str | None = None) -> None:
        if self._results[index] is not None:
            return  # It was left behind when the run was aborted: its late outcome is dropped.
        encoded = encode_result(value)
        self._deps.emitter.emit(
            ToolDone,
            tool_call_id=call.id,
            tool_name=call.name,
            result=encoded.safe,
            duration_ms=self._elapsed_ms(started),
            replaced_by_hook=replaced_by,
        )
        tool = find_tool(self._deps.tools, call.name)
        if tool is not None and replaced_by is None and tool.metadata.get("event") == TodoUpdated.type:
            shown = encoded.safe
            self._deps.emitter.emit(TodoUpdated, todos=shown["todos"], counts=shown["counts"], tool_call_id=call.id)
        if encoded.images:
            self._state.images[call.id] = encoded.images
        edited = self._edited(call)
        text = encoded.text if edited is None else encode_result({"editedArguments": edited, "result": encoded.safe}).text
        keep = self._deps.keep_result
        if keep is None or call.name != READ_RESULT:  # a part of a kept result is as long as it may be already
            text = cap_result(text, self._deps.max_tool_result_chars, keep)
        self._record(index, tool_result(call, text, metadata=self._marks(call, replaced_by)))

    def _marks(self, call: ToolCall, replaced_by: str | None) -> dict[str, Any] | None:
        """What the tool message remembers: the hook that supplied its result, and the approval it ran under."""
        marks: dict[str, Any] = {"replacedByHook": replaced_by} if replaced_by else {}
        run, decision = self._approved.get(call.id), self._deps.decisions.get(call.id)
        if run is not None:
            by, remember = (None, None) if decision is None else (decision.by, decision.remember)
            edited = self._edited(call) is not None
            marks[MARK] = approval_mark(run.arguments.plain, by=by, edited=edited, remember=remember)
        return marks or None

    def _edited(self, call: ToolCall) -> dict[str, Any] | None:
        """The arguments that a person changed before the call ran: the model must not take its own for those that counted."""
        run, decision = self._approved.get(call.id), self._deps.decisions.get(call.id)
        return run.arguments.plain if run is not None and decision is not None and decision.args is not None else None

    def _refuse(self, index: int, call: ToolCall, error: ErrorResult, started: float) -> None:
        payload = error.payload
        if self._results[index] is not None:
            return
        if payload["kind"] != "not-run":
            self._state.tool_errors += 1
        self._deps.emitter.emit(
            ToolError,
            tool_call_id=call.id,
            tool_name=call.name,
            error=ErrorInfo(name=payload["error"], message=payload["message"]),
            duration_ms=self._elapsed_ms(started),
        )
        text, edited = error.text, self._edited(call)
        if edited is not None:
            text = encode_result({**payload, "editedArguments": edited}).text
        marks = self._marks(call, None)
        if payload["kind"] == "not-run" and index in self._started:
            marks = {**(marks or {}), INTERRUPTED: True}
        self._record(index, tool_result(call, text, is_error=True, metadata=marks))

    def _record(self, index: int, message: Message) -> None:
        """Puts results into the transcript in call order. One of a call that ends the run stays out: a resume makes it again."""
        self._results[index] = message
        if index in self._fatal:
            return
        self._state.children.pop(self._calls[index].id, None)
        if index > self._recorded:
            self._state.settled[self._calls[index].id] = message
        while self._recorded < len(self._results) and (ready := self._results[self._recorded]) is not None:
            if self._recorded in self._fatal:
                return
            self._state.messages.append(ready)
            self._state.settled.pop(self._calls[self._recorded].id, None)
            self._recorded += 1

    def _cancel_running(self) -> None:
        self._cancelled = True
        for task in self._tasks:
            task.cancel()

    async def _settle_rest(self) -> None:
        """Every call gets its one result, also when the batch itself is torn down."""
        self._cancel_running()
        running = {task for task in self._tasks if not task.done()}
        if running and self._deps.abort_grace_ms is None:
            await asyncio.wait(running)
        if self._ask is not None:
            return  # A pause: the call that asks, and those behind it, run after the decision.
        for index, call in enumerate(self._calls):
            if self._results[index] is not None:
                continue
            if index in self._asks:
                error = error_result(call.name, "not-run", "The call was cancelled while it waited for a person's approval.")
                self._refuse(index, call, error, self._started.get(index, self._deps.clock.now()))
            elif index in self._started:
                text = f"The call did not stop within {self._deps.abort_grace_ms:g} ms and was left behind; its outcome is unknown."
                self._refuse(index, call, error_result(call.name, "not-run", text), self._started[index])
                log.warning("Tool %r ignored the abort of its run and was left behind.", call.name)
            else:
                error = error_result(call.name, "not-run", "The call was cancelled before it ran.")
                self._record(index, tool_result(call, error.text, is_error=True))
                if not self._fatal:
                    keep_record(call, None, self._state)

    def _elapsed_ms(self, started: float) -> float:
        return round((self._deps.clock.now() - started) * 1000, 3)
