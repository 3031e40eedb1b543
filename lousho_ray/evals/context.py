"""`t`: what a test function drives an agent with and asserts by. Assertions are recorded; a case fails once, at its end."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

from lousho_ray.agent import Agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.evals.checks import Check, Checked, number_of, shown
from lousho_ray.evals.definition import EvalDefinition, invalid
from lousho_ray.evals.differences import first_difference, matches_partially
from lousho_ray.evals.judges import Verdict, grade
from lousho_ray.evals.scorers import in_order
from lousho_ray.loop.result import ExecutionResult, ToolCallRecord
from lousho_ray.session import transcript
from lousho_ray.session_handle import Session
from lousho_ray.stores.memory import MemorySessionStore
from lousho_ray.usage import Usage


@dataclass(frozen=True, slots=True)
class Assertion:
    """One recorded assertion."""

    name: str
    kind: Literal["gate", "soft"]
    passed: bool
    score: float | None
    threshold: float | None = None
    message: str = ""
    skipped: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Assertion, _VALUES(self)  # a third of the time that a dataclass with slots takes by itself

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form: optional fields only when they say something."""
        data: dict[str, Any] = {"name": self.name, "kind": self.kind, "passed": self.passed, "score": self.score}
        optional = {"threshold": self.threshold, "message": self.message or None, "skipped": self.skipped or None}
        return {**data, **{key: value for key, value in optional.items() if value is not None}}


_VALUES = operator.attrgetter(*(field.name for field in fields(Assertion)))


class Conversation(Protocol):
    """Whom `t.send()` talks to: an agent in this process, or a deployment. `missing` names what its results do not carry."""

    missing: frozenset[str]

    async def send(self, input: Any, **options: Any) -> ExecutionResult[Any]: ...


class AgentConversation:
    """One conversation with an agent, in this process and with a memory of its own: cases share nothing."""

    missing: frozenset[str] = frozenset()

    def __init__(self, agent: Agent[Any]) -> None:
        # Without its store: what an earlier case or run saved must not show. In this process: the interception seam is here.
        definition = agent.definition
        if definition.store is not None or definition.approval_store is not None:
            definition = replace(definition, store=None, approval_store=None)
        self.agent: Agent[Any] = Agent(definition, "local", agent.options)
        self._session: Session[Any] | None = None
        self._first: ExecutionResult[Any] | None = None

    async def send(self, input: Any, **options: Any) -> ExecutionResult[Any]:
        """A turn of the conversation. The first one of an agent without tools is a plain run, at a third of a turn's cost: such a
        run cannot pause, and most datasets are one question each."""
        definition = self.agent.definition
        plain = not definition.tools and not definition.subagents and definition.compaction is None
        if self._session is None and self._first is None and plain:
            self._first = await self.agent.send(input, **options)
            return self._first
        return await (await self._open_session()).send(input, **options)

    async def _open_session(self) -> Session[Any]:
        if self._session is None:
            store = MemorySessionStore()
            self._session = self.agent.session(store=store)
            if self._first is not None and self._first.finish_reason != "aborted":
                await store.save(self._session.id, transcript(self._first))
        return self._session


async def agent_of(source: Any, case: Any) -> Agent[Any]:
    """The agent itself, or the one that a factory (sync or async, with or without the case as its argument) makes.

    Raises:
        ConfigurationError: The factory made something else.
    """
    if isinstance(source, Agent):
        return source
    made = source(case) if _wants_case(source) else source()
    agent = await made if inspect.isawaitable(made) else made
    if not isinstance(agent, Agent):
        raise ConfigurationError(f"The agent function of an eval returned {type(agent).__name__}, not an agent.", field="agent")
    return agent


class EvalContext:
    """The test context of one case.

    Attributes:
        case: The case's value; `None` without a dataset.
        results: The result of each `send()`.
    """

    def __init__(self, definition: EvalDefinition, case: Any, open_conversation: Callable[[], Awaitable[Conversation]]) -> None:
        self.case = case
        self.results: list[ExecutionResult[Any]] = []
        self.assertions: list[Assertion] = []
        self.calls_seen: list[ToolCallRecord] = []
        self._definition = definition
        self._open = open_conversation
        self._conversation: Conversation | None = None
        self._last_input: Any = None

    # ------------------------------------------------------------------------------------------------------------ driving

    async def send(self, input: Any, **options: Any) -> ExecutionResult[Any]:
        """Sends the next message of this case's conversation. Takes what `session.send()` takes."""
        if self._conversation is None:
            self._conversation = await self._open()
        self._last_input = input
        result = await self._conversation.send(input, **options)
        self.results.append(result)
        return result

    @property
    def agent(self) -> Agent[Any]:
        """The agent of this case, once it has been sent something: for approvals, for example."""
        if not isinstance(self._conversation, AgentConversation):
            raise invalid("t.agent is there after the first t.send(), when the eval runs an agent in this process.")
        return self._conversation.agent

    @property
    def result(self) -> ExecutionResult[Any]:
        """The latest result.

        Raises:
            LoushoError: `LOUSHO_EVALS_INVALID`: nothing was sent yet.
        """
        if not self.results:
            raise invalid("There is no result yet: await t.send(...) first.")
        return self.results[-1]

    @property
    def reply(self) -> str:
        """The latest reply's text; empty before the first."""
        return self.results[-1].text if self.results else ""

    @property
    def tool_calls(self) -> list[ToolCallRecord]:
        """Every call of the agent so far, in order, with parsed arguments."""
        return [call for result in self.results for call in result.tool_calls]

    @property
    def all_tool_calls(self) -> list[ToolCallRecord]:
        """Every call that any model of this case asked for, those of sub-agents included, in the order of the replies."""
        return list(self.calls_seen) or self.tool_calls

    @property
    def steps(self) -> int:
        """Model calls of the loop, over all sends."""
        return sum(result.steps for result in self.results)

    @property
    def usage(self) -> Usage:
        """Tokens and cost over all sends."""
        total = Usage()
        for result in self.results:
            total.add(result.usage)
        return total

    # --------------------------------------------------------------------------------------------------------- assertions

    def completed(self) -> bool:
        """The latest run ended by itself (`stop`)."""
        if not self.results:
            return self._gate("completed", False, "nothing was sent: await t.send(...) first")
        reason = self.result.finish_reason
        return self._gate("completed", reason == "stop", f"the run ended with finish reason {reason!r}")

    def called_tool(self, name: str, args: Mapping[str, Any] | None = None, times: int | None = None) -> bool:
        """The tool was called, with arguments that hold `args`, and exactly `times` times if given.

        In `args`, listed keys must be equal and others are free, in nested dicts too; lists match item by item.
        """
        calls = [call for call in self.tool_calls if call.name == name]
        found = [call for call in calls if args is None or matches_partially(args, call.args)]
        passed = len(found) == times if times is not None else bool(found)
        return self._gate(f"called_tool:{name}", passed, "" if passed else self._call_message(name, args, times, calls, len(found)))

    def not_called_tool(self, name: str) -> bool:
        """The tool was not called."""
        count = sum(call.name == name for call in self.tool_calls)
        return self._gate(f"not_called_tool:{name}", not count, f"{name} was called {_times(count)}")

    def tool_order(self, names: Sequence[str]) -> bool:
        """The tools were called in this order; other calls may lie between."""
        called = [call.name for call in self.tool_calls]
        found = in_order(names, called)
        missing = f"no {names[found]} after the first {found} of them; called: {_listed(called)}" if found < len(names) else ""
        return self._gate("tool_order", found == len(names), f"wanted the order {', '.join(names)}; {missing}")

    def max_steps(self, n: int) -> bool:
        """At most `n` model calls of the loop, over all sends."""
        return self._at_most("max_steps", "steps", self.steps, n)

    def max_tokens(self, n: int) -> bool:
        """At most `n` tokens, over all sends."""
        return self._at_most("max_tokens", "usage", self.usage.total_tokens, n)

    def max_cost_usd(self, n: float) -> bool:
        """At most `n` USD, over all sends. Passed and marked `skipped` when no cost is reported."""
        cost = self.usage.cost_usd if self.results and "usage" not in self._missing else None
        if cost is None:
            self.assertions.append(Assertion("max_cost_usd", "gate", True, None, n, "no cost is reported", skipped=True))
            return True
        return self._record("max_cost_usd", "gate", Checked(cost <= n, cost, n, "" if cost <= n else f"{cost:g} USD of {n:g}"))

    def check(self, name: str, value: Any, check: Check) -> bool:
        """Asserts by a check such as `includes("yes")`; a failure fails the case."""
        return self._record(name, "gate", _checked(value, check))

    def soft(self, name: str, value: Any, check: Check) -> bool:
        """Like `check()`, but a failure is only reported (unless the run is `--strict`)."""
        return self._record(name, "soft", _checked(value, check))

    async def judge(self, rubric: str, context: Any = None) -> float:
        """Has the eval's judge grade the latest reply by a rubric. The score is 0 to 1; assert on it with `t.check` or `t.soft`.

        Args:
            rubric: What a good reply is.
            context: What else the judge should see: the expected answer, a source.

        Raises:
            LoushoError: `LOUSHO_EVALS_INVALID`: the eval has no judge, or nothing was sent yet.
        """
        judge = self._definition.judge
        if judge is None:
            raise invalid(
                f"Eval {self._definition.name!r} has no judge: define_eval(judge={{'provider': ..., 'model': ...}}) sets one."
            )
        if not self.results:
            raise invalid("t.judge() grades the latest reply: await t.send(...) first.")
        verdict: Verdict = await grade(judge, rubric, self._last_input, self.reply, context)
        if verdict.problem:
            self.assertions.append(Assertion("judge", "soft", False, verdict.score, message=verdict.problem))
        return verdict.score

    # ------------------------------------------------------------------------------------------------------------ recording

    @property
    def _missing(self) -> frozenset[str]:
        return frozenset() if self._conversation is None else self._conversation.missing

    def _at_most(self, name: str, needs: str, value: int, n: int) -> bool:
        if needs in self._missing:
            return self._record(name, "gate", Checked(False, None, n, f"the event stream of the target carries no {needs}"))
        return self._record(name, "gate", Checked(value <= n, value, n, "" if value <= n else f"{value:,} is more than {n:,}"))

    def _gate(self, name: str, passed: bool, message: str) -> bool:
        return self._record(name, "gate", Checked(passed, 1.0 if passed else 0.0, message="" if passed else message))

    def _record(self, name: str, kind: Literal["gate", "soft"], checked: Checked) -> bool:
        self.assertions.append(Assertion(name, kind, checked.passed, checked.score, checked.threshold, checked.message))
        return checked.passed

    def _call_message(
        self, name: str, args: Mapping[str, Any] | None, times: int | None, calls: Sequence[ToolCallRecord], found: int
    ) -> str:
        if not calls:
            return f"{name} was not called; called: {_listed([call.name for call in self.tool_calls])}"
        if times is not None and (args is None or found):
            return f"{name} was called {_times(found)}{' with these arguments' if args else ''}, not {_times(times)}"
        closest = min((first_difference(args, call.args) for call in calls), key=lambda difference: -difference.depth)
        return f"{name} was called, but never with these arguments; closest call: {closest}"


def _checked(value: Any, check: Check) -> Checked:
    """What a check says; a function of the user's may also return a bool or a number, or raise."""
    try:
        made: Any = check(value)
    except Exception as error:
        return Checked(False, None, message=f"the check raised {type(error).__name__}: {error}")
    if isinstance(made, Checked):
        return made
    number = number_of(made)
    if number is None:
        return Checked(False, None, message=f"the check returned {shown(made)}, not a result or a number")
    return Checked(number >= 1, number, message="" if number >= 1 else f"{shown(value)} scored {number:g}")


def _wants_case(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:
        return False
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no tools"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
