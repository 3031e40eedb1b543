"""`on_run_end`: once for each run, with its result or with what it raised. Who hears of a run that a decision continues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from lousho_ray import CancelToken, ExecutionResult, PropagatingToolError, create_agent, define_tool, memory_store
from lousho_ray.errors import BudgetExceededError, CompactedLLMProviderError, ConfigurationError, LoushoError
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.usage import Usage
from tests.unit.loop_support import Gate, PolicyProvider, agent_of, calls, failing, plain, until

USED = {"input_tokens": 10, "output_tokens": 5}


class Ends:
    """An `on_run_end` that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, Any]] = []

    def __call__(self, result: ExecutionResult[Any] | None, error: BaseException | None) -> None:
        assert (result is None) != (error is None)
        self.told.append((result, error))

    @property
    def reasons(self) -> list[str]:
        return [type(error).__name__ if result is None else result.finish_reason for result, error in self.told]


class Raising:
    name = "raising"

    def pre_generate(self, ctx: Any) -> None:
        raise ValueError("no")


def breaks(ctx: Any) -> str:
    raise ValueError("no")


def needs_person() -> Any:
    return define_tool(name="pay", description="Pays.", needs_approval=True, execute=lambda args: "paid")


COSTLY = {**calls("a"), "usage": USED}

ENDS: list[Any] = [
    ("stop", lambda ends: agent_of("Hello", on_run_end=ends)),
    ("length", lambda ends: agent_of({"text": "Hel", "finish_reason": "length"}, on_run_end=ends)),
    ("max-steps", lambda ends: agent_of(calls("a"), tools=[plain("a")], max_steps=1, on_run_end=ends)),
    ("output-invalid", lambda ends: agent_of("x", "y", output=dict[str, int], on_run_end=ends)),
    (
        "budget-exceeded",
        lambda ends: agent_of({**calls("a"), "usage": USED}, tools=[plain("a")], limits={"max_tokens": 1}, on_run_end=ends),
    ),
    ("awaiting-approval", lambda ends: agent_of(calls("pay"), tools=[needs_person()], on_run_end=ends)),
]

RAISED: list[Any] = [
    (CompactedLLMProviderError, lambda ends: agent_of(RuntimeError("down"), on_run_end=ends)),
    (ValueError, lambda ends: agent_of("Never", hooks=[Raising()], on_run_end=ends)),
    (PropagatingToolError, lambda ends: agent_of(calls("a"), tools=[failing("a", PropagatingToolError("no"))], on_run_end=ends)),
    (ConfigurationError, lambda ends: agent_of("Never", instructions=breaks, on_run_end=ends)),
    (
        BudgetExceededError,
        lambda ends: agent_of(COSTLY, tools=[plain("a")], limits={"max_tokens": 1, "on_exceeded": "throw"}, on_run_end=ends),
    ),
]

WAYS: dict[str, Callable[[Any], Any]] = {
    "send": lambda agent: agent.send("Hi"),
    "stream": lambda agent: _streamed(agent.stream("Hi")),
    "session": lambda agent: agent.session().send("Hi"),
    "session stream": lambda agent: _streamed(agent.session().stream("Hi")),
}


async def _streamed(run: Any) -> Any:
    async for _ in run:
        pass
    return await run.result


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("reason", "make"), ENDS, ids=[row[0] for row in ENDS])
async def test_a_run_that_returns_is_told_with_its_result(reason: str, make: Any, way: Any) -> None:
    # RUN-50
    ends = Ends()
    result = await way(make(ends))
    assert (result.finish_reason, ends.told) == (reason, [(result, None)])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("kind", "make"), RAISED, ids=[row[0].__name__ for row in RAISED])
async def test_a_run_that_raises_is_told_with_the_error(kind: type[BaseException], make: Any, way: Any) -> None:
    # RUN-50
    ends = Ends()
    with pytest.raises(kind) as caught:
        await way(make(ends))
    assert ends.told == [(None, caught.value)]


async def test_the_error_says_what_had_been_spent() -> None:
    # LES-08, RUN-50
    ends = Ends()
    with pytest.raises(CompactedLLMProviderError):
        await agent_of({**calls("a"), "usage": USED}, RuntimeError("down"), tools=[plain("a")], on_run_end=ends).send("Hi")
    ((_, error),) = ends.told
    assert isinstance(error.usage, Usage)
    assert error.usage.input_tokens == 10


@pytest.mark.parametrize("how", ["token", "task", "abort", "leave"])
async def test_a_run_that_is_stopped_is_told_of_once(how: str) -> None:
    # RUN-50, RUN-D1
    ends, gate = Ends(), Gate("slow")
    agent = agent_of(calls("slow"), tools=[gate.tool], on_run_end=ends)
    if how == "token":
        token = CancelToken()
        sending = asyncio.ensure_future(agent.send("Hi", cancel=token))
        await gate.running.wait()
        token.cancel("enough")
        await sending
    elif how == "task":
        sending = asyncio.ensure_future(agent.send("Hi"))
        await gate.running.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    else:
        async with agent.stream("Hi") as run:
            await gate.running.wait()
            if how == "abort":
                run.abort("enough")
                await run.result
    assert ends.reasons == ["aborted"]


async def test_a_run_whose_result_nobody_awaits_is_told_of() -> None:
    # RUN-50
    ends = Ends()
    agent = agent_of("One", "Two", on_run_end=ends)
    run, turn = agent.stream("Hi"), agent.session().stream("Hi")
    await until(lambda: len(ends.told) == 2)
    assert {result.run_id for result, _ in ends.told} == {run.run_id, turn.run_id}


async def test_the_end_is_told_before_the_result_is_there() -> None:
    # RUN-50
    ends = Ends()
    agent = agent_of("One", "Two", "Three", "Four", on_run_end=ends)
    session = agent.session()
    for number, run in enumerate(
        (agent.send, session.send, lambda text: agent.stream(text).result, lambda text: session.stream(text).result)
    ):
        await run("Hi")
        assert len(ends.told) == number + 1


async def test_a_listener_that_raises_is_logged_and_fails_nothing(caplog: pytest.LogCaptureFixture) -> None:
    # RUN-50, EVT-D5
    def listener(result: Any, error: Any) -> None:
        raise SystemExit(3)

    with caplog.at_level(logging.ERROR):
        assert (await agent_of("Hello", on_run_end=listener).send("Hi")).text == "Hello"
    assert "on_run_end raised" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
async def test_calls_that_join_a_turn_are_no_runs_of_their_own(fails: bool) -> None:
    # RUN-50, EVT-48
    ends, gate = Ends(), Gate("slow")
    answer: Any = RuntimeError("down") if fails else "Done"
    session = agent_of(calls("slow"), answer, tools=[gate.tool], on_run_end=ends).session(turn_policy="queue")
    first = asyncio.ensure_future(session.send("Hi"))
    await gate.running.wait()
    more = [asyncio.ensure_future(session.send("And this")), asyncio.ensure_future(session.stream("And that").result)]
    await asyncio.sleep(0)
    gate.go.set()
    outcomes = await asyncio.gather(first, *more, return_exceptions=True)
    assert ends.reasons == ["CompactedLLMProviderError" if fails else "stop"]
    assert [type(outcome) for outcome in outcomes] == [type(outcomes[0])] * 3


async def test_a_pause_and_its_continuation_are_two_runs_and_both_are_heard() -> None:
    # RUN-50, EVT-11
    ends, heard = Ends(), []
    agent = agent_of(calls("pay"), "Done", tools=[needs_person()], on_run_end=ends, on_event=heard.append)
    paused = await agent.send("Hi")
    del heard[:]
    result = await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert ends.told == [(paused, None), (result, None)]
    assert [event.type for event in heard][:2] == ["run.start", "approval.resolved"]
    assert heard[-1].type == "run.done"


@pytest.mark.parametrize("streamed", [False, True])
async def test_who_listens_to_a_session_hears_a_turn_that_a_decision_continues(streamed: bool) -> None:
    # RUN-50, EVT-11, EVT-49
    ends, heard, turns = Ends(), [], []
    agent = agent_of(calls("pay"), "Done", tools=[needs_person()], on_run_end=ends, on_event=heard.append, store=memory_store())
    session = agent.session("s")
    session.on(turns.append)
    paused = await session.send("Hi")
    del heard[:], turns[:]
    if streamed:
        await _streamed(await agent.approvals.stream_resolve(str(paused.approval_id), approved=True))
    else:
        await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert ends.reasons == ["awaiting-approval", "stop"]
    assert heard == turns
    assert [heard[0].type, heard[-1].type] == ["run.start", "run.done"]


async def test_durable_runs_and_resumes_are_told_of_and_nothing_to_resume_is_not() -> None:
    # RUN-50
    ends = Ends()
    agent = agent_of("One", RuntimeError("down"), "Three", store=memory_store(), on_run_end=ends)
    await agent.send("Hi", session_id="r")
    assert await agent.resume("r") is None
    assert await agent.session("s").resume() is None
    with pytest.raises(CompactedLLMProviderError):
        await agent.send("Again", session_id="r")
    await agent.resume("r")
    assert ends.reasons == ["stop", "CompactedLLMProviderError", "stop"]


async def test_a_turn_that_cannot_be_saved_is_told_with_that_error() -> None:
    # RUN-50
    class Broken(type(memory_store().sessions)):  # type: ignore[misc]
        async def save(self, *args: Any, **options: Any) -> None:
            raise OSError("full")

    ends = Ends()
    session = agent_of("Hello", on_run_end=ends).session(store=Broken())
    with pytest.raises((OSError, LoushoError)) as caught:
        await session.send("Hi")
    assert ends.told == [(None, caught.value)]


async def test_sub_agents_are_part_of_their_leads_run() -> None:
    # RUN-50, SUB-43
    ends, own = Ends(), Ends()
    child = create_agent(provider=mock_model(["Read"]), description="Reads.", on_run_end=own)
    task = ("task", {"agent": "reader", "prompt": "Read it.", "description": "Reads a page"})
    await agent_of(calls(task), "Done", subagents={"reader": child}, on_run_end=ends).send("Hi")
    assert (ends.reasons, own.told) == (["stop"], [])


async def test_a_loop_that_is_shut_down_ends_its_runs_too() -> None:
    # RUN-50
    ends, waiting = Ends(), asyncio.Event()

    async def forever(options: Any) -> str:
        waiting.set()
        await asyncio.Event().wait()
        return "Never"

    turn = create_agent(provider=PolicyProvider(forever), on_run_end=ends)._start("Hi", {}, "send", observed=False)
    await waiting.wait()
    turn.task.cancel()
    await asyncio.wait({turn.task})
    assert ends.reasons == ["CancelledError"]


@pytest.mark.parametrize("listener", [42, "print"])
def test_what_is_no_function_is_refused(listener: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", on_run_end=listener)
    assert caught.value.field == "on_run_end"


def test_an_async_function_is_refused() -> None:
    async def listener(result: Any, error: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="plain function") as caught:
        agent_of("x", on_run_end=listener)
    assert caught.value.field == "on_run_end"
