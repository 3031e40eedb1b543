"""Running one case, from a fresh conversation to its record. Never raises for what the case did."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from lousho_ray.agent import Agent, named_limiters
from lousho_ray.clock import SYSTEM_CLOCK, timestamp
from lousho_ray.errors import ConfigurationError, LoushoError, error_name, message_of
from lousho_ray.evals.cases import Case
from lousho_ray.evals.checks import number_of, shown
from lousho_ray.evals.context import AgentConversation, Assertion, Conversation, EvalContext, agent_of
from lousho_ray.evals.definition import EvalDefinition, takes_case
from lousho_ray.evals.interceptor import CaseCalls, CaseSeam
from lousho_ray.evals.outages import UNREACHED
from lousho_ray.evals.records import CaseRecord, Status
from lousho_ray.evals.tracing import with_spans_sent
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.options import ModelSettings, parse_options
from lousho_ray.providers.interception import set_provider_interceptor
from lousho_ray.spans import SpanRecord
from lousho_ray.tools.registry import collect_tools

KEPT_TRACEBACK_CHARS = 4_000
STOPPED = "the run was stopped before the case had ended"
GRACE_S = 10.0
"""How long a cancelled case may take to end."""


@dataclass(slots=True)
class CaseRun:
    """One case to run.

    Attributes:
        file: Relative to the project.
        calls: What stands between the case and its models.
        send_span: Takes the spans of agents whose exporter is in another process.
    """

    definition: EvalDefinition
    case: Case
    repeat: int
    key: str
    file: str
    calls: CaseCalls
    timeout_ms: float | None = None
    target: Any = None
    agents: AgentPool | None = None
    review: Callable[[EvalContext], Awaitable[None]] | None = None
    share: Callable[[RateLimiter], Awaitable[None]] | None = None
    send_span: Callable[[SpanRecord], None] | None = None


class AgentPool:
    """Closes what the cases opened: a client that one case alone used after that case, a shared one at the end."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._shared: set[int] = set()

    def enter(self, agent: Agent[Any]) -> None:
        provider = agent.definition.provider
        if id(provider) in self._seen:
            self._shared.add(id(provider))
        self._seen[id(provider)] = provider

    async def leave(self, agent: Agent[Any]) -> None:
        provider = agent.definition.provider
        if id(provider) not in self._shared:
            self._seen.pop(id(provider), None)
            await agent.close()

    async def close(self) -> None:
        for provider in self._seen.values():
            close = getattr(provider, "aclose", None)
            if close is not None:
                await close()


async def run_case(run: CaseRun) -> CaseRecord:
    """Runs a case in a context of its own. Cancelling it stops the case, waits for it, and gives a record that says so."""
    try:
        return await _run_case(run)
    finally:
        if run.calls.cassettes is not None:
            run.calls.cassettes.close()


async def _run_case(run: CaseRun) -> CaseRecord:
    started, started_at = time.monotonic(), timestamp(SYSTEM_CLOCK.wall())
    body = _Body(run)
    task = asyncio.get_running_loop().create_task(body.run())
    timeout_ms = run.timeout_ms if run.definition.timeout_ms is None else run.definition.timeout_ms
    cancelled = False
    try:
        _, late = await asyncio.wait({task}, timeout=None if timeout_ms is None else timeout_ms / 1000)
    except asyncio.CancelledError:
        late, cancelled = {task}, True
    if late:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
    error = task.result() if task.done() and not task.cancelled() else None
    if cancelled:
        error = Interrupted(STOPPED)
    elif late:
        still = "" if task.done() else f" It still ran {GRACE_S:g} s after it was cancelled and was left behind."
        error = LoushoError(f"The case took longer than {timeout_ms:g} ms.{still}", code="LOUSHO_OPERATION_TIMEOUT")
    elif error is None and task.cancelled():
        error = LoushoError("The case cancelled itself: something inside it raised CancelledError that nobody asked for.")
    return _record(run, body.context, error, (time.monotonic() - started) * 1000, started_at)


class Interrupted(Exception):  # noqa: N818 - it says how a case ended
    """The suite was stopped while the case ran."""


class _Body:
    """The part of a case that runs in its own task."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self._opening = _Opening(run)
        self.context = EvalContext(run.definition, run.case.value, self._opening.open)
        self.context.calls_seen = run.calls.tool_calls

    async def run(self) -> BaseException | None:
        """What the test raised. The seam is installed here: it ends with this task's context."""
        set_provider_interceptor(CaseSeam(self._run.calls))
        try:
            if self._run.definition.classic is not None:
                await self._score()
            else:
                await self._test()
            if self._run.review is not None:
                await self._run.review(self.context)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a task would end the whole event loop
            return error
        finally:
            if self._opening.agent is not None and self._run.agents is not None:
                await self._run.agents.leave(self._opening.agent)
        return None

    async def _test(self) -> None:
        test = self._run.definition.test
        assert test is not None
        made = test(self.context, self._run.case.value) if takes_case(test) else test(self.context)
        if inspect.isawaitable(made):
            await made

    async def _score(self) -> None:
        classic = self._run.definition.classic
        assert classic is not None
        options = {} if classic.max_steps is None else {"max_steps": classic.max_steps}
        if classic.settings:
            options["model_settings"] = parse_options(ModelSettings, classic.settings)  # type: ignore[assignment]
        result = await self.context.send(classic.input, **options)
        made = classic.score(result)
        score = number_of(value := (await made if inspect.isawaitable(made) else made))
        passed = score is not None and score >= classic.threshold
        said = f"the scorer returned {shown(value)}, not a number" if score is None else f"{score:g} is below {classic.threshold:g}"
        self.context.assertions.append(Assertion("score", "gate", passed, score, classic.threshold, "" if passed else said))


class _Opening:
    """Opens the conversation of a case. `agent` is one that the eval's function made for this case alone."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self.agent: Agent[Any] | None = None

    async def open(self) -> Conversation:
        run = self._run
        target = run.target or run.definition.target
        if target is not None:
            if run.definition.classic is not None:
                raise ConfigurationError(
                    f"Eval {run.definition.name!r} has the classic form, which cannot run against a deployment; use test=.",
                    code="LOUSHO_CONFIG_CONFLICTING_OPTIONS",
                    field="target",
                )
            conversation: Conversation = target.open()
            return conversation
        agent = await agent_of(run.definition.agent, run.case.value)
        if not isinstance(run.definition.agent, Agent):
            self.agent = agent
        elif run.send_span is not None:
            agent = with_spans_sent(agent, run.send_span)
        if run.agents is not None:
            run.agents.enter(agent)
        if run.share is not None:
            for limiter in named_limiters(agent.definition):
                await run.share(limiter)
        return AgentConversation(_with_classic(agent, run.definition))


def _with_classic(agent: Agent[Any], definition: EvalDefinition) -> Agent[Any]:
    """The agent with what the classic form puts in place of its own."""
    classic = definition.classic
    changes: dict[str, Any] = {}
    if classic is not None and classic.provider is not None:
        changes |= {"provider": classic.provider, "model": None, "provider_for": None}
    if classic is not None and classic.tools is not None:
        changes["tools"] = collect_tools(classic.tools)
    return Agent(replace(agent.definition, **changes), "local", agent.options) if changes else agent


def _record(run: CaseRun, context: EvalContext, error: BaseException | None, duration_ms: float, started_at: str) -> CaseRecord:
    status = _status(run.calls, context, error)
    last = context.results[-1] if context.results else None
    clean = status == "passed" and all(item.passed for item in context.assertions)
    outage = run.calls.outage if status == "outage" and not isinstance(error, Interrupted) else None
    return CaseRecord(
        key=run.key,
        eval=run.definition.name,
        case=run.case.name,
        repeat=run.repeat,
        file=run.file,
        status=status,
        assertions=tuple(context.assertions),
        error=describe(error) if error is not None else None if outage is None else {"name": "Outage", "message": outage},
        reply=context.reply,
        finish_reason=None if last is None else last.finish_reason,
        steps=context.steps,
        usage=(run.calls.usage if run.calls.usage.model_calls else context.usage).to_dict(),
        duration_ms=round(duration_ms, 3),
        tags=run.definition.tags,
        transcript=() if clean or last is None else tuple(message.to_dict() for message in last.messages),
        drift=tuple(getattr(run.calls.cassettes, "drift", ())),
        started_at=started_at,
    )


def _status(calls: CaseCalls, context: EvalContext, error: BaseException | None) -> Status:
    if isinstance(error, Interrupted):
        return "outage"
    if error is None and all(item.passed for item in context.assertions if item.kind == "gate"):
        return "passed"
    if calls.outage is not None or getattr(error, "code", None) in UNREACHED:
        return "outage"
    return "failed" if error is None else "error"


def describe(error: BaseException) -> dict[str, Any]:
    """An error as a record keeps it; the traceback without the frames of this package's runner."""
    data: dict[str, Any] = {"name": error_name(error), "message": message_of(error)}
    if isinstance(error, LoushoError):
        data["code"] = error.code
        data["hint"] = error.hint
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, LoushoError) and error.__traceback__ is not None:
        data["traceback"] = text[-KEPT_TRACEBACK_CHARS:]
    return data
