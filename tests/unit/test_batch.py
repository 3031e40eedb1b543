"""The tool calls of one model turn: order, concurrency, what tools may raise, what stops a batch."""

from __future__ import annotations

import asyncio
import datetime
import functools
import math
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lousho_ray.cancellation import CancelToken
from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, PropagatingToolError, ToolExecutionError
from lousho_ray.events import Event
from lousho_ray.messages import ToolCall
from lousho_ray.ports import GenerateOptions, GenerateResult, ToolContext
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool, tool
from tests.unit.loop_support import (
    Gate,
    PolicyProvider,
    agent_of,
    calls,
    check_events,
    check_transcript,
    collect,
    failing,
    kinds,
    names,
    plain,
    results,
    until,
)

# ---------------------------------------------------------------------------------------------------- order and concurrency


async def test_results_join_the_transcript_in_call_order_whatever_order_they_come_in() -> None:
    # RUN-29, TOOL-22
    gates = [Gate(name, name.upper()) for name in "abcd"]
    sending = asyncio.ensure_future(agent_of(calls(*"abcd"), "Done", tools=[gate.tool for gate in gates]).send("Go"))
    for index in (2, 0, 3, 1):
        await gates[index].running.wait()
        gates[index].go.set()
        await asyncio.sleep(0)
    result = await sending
    assert [message.tool_name for message in result.messages if message.role == "tool"] == list("abcd")
    assert results(result.messages) == list("ABCD")
    check_transcript(result.messages)


def grown(items: list[Any], before: int) -> bool:
    return len(items) > before


async def test_a_result_joins_as_soon_as_all_before_it_are_there() -> None:
    # RUN-29
    first, second, third = Gate("a"), Gate("b"), Gate("c")
    seen: list[list[str | None]] = []

    class Watch:
        name = "watch"

        def post_tool_call(self, ctx: Any, outcome: Any) -> None:
            seen.append([message.tool_name for message in ctx.messages if message.role == "tool"])

    agent = agent_of(calls("a", "b", "c"), "Done", tools=[first.tool, second.tool, third.tool], hooks=[Watch()])
    sending = asyncio.ensure_future(agent.send("Go"))
    for gate in (second, first, third):
        await gate.running.wait()
        before = len(seen)
        gate.go.set()
        await until(functools.partial(grown, seen, before))
    await sending
    assert seen == [[], [], ["a", "b"]]


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_tool_concurrency_caps_calls_in_flight(limit: int) -> None:
    # RUN-27, TOOL-20
    running = most = 0
    go = asyncio.Event()

    async def work(args: Any) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        await asyncio.sleep(0)
        running -= 1
        return "ok"

    work_tool = define_tool(name="work", description="Works.", execute=work)
    agent = agent_of(calls(*["work"] * 6), "Done", tools=[work_tool], tool_concurrency=limit)
    sending = asyncio.ensure_future(agent.send("Go"))
    await until(lambda: running == limit)
    go.set()
    result = await sending
    assert most == limit
    assert kinds(result.messages) == ["ok"] * 6


async def test_calls_are_unbounded_by_default() -> None:
    # TOOL-20
    gates = [Gate(f"g{number}") for number in range(40)]
    agent = agent_of(calls(*[gate.name for gate in gates]), "Done", tools=[gate.tool for gate in gates])
    sending = asyncio.ensure_future(agent.send("Go"))
    for gate in gates:
        await gate.running.wait()
    for gate in gates:
        gate.go.set()
    assert (await sending).ok


@pytest.mark.parametrize(("option", "most"), [({}, 6), ({"tool_concurrency": "unbounded"}, 6), ({"tool_concurrency": 4}, 4)])
async def test_so_many_calls_run_at_a_time(option: dict[str, Any], most: int) -> None:
    # RUN-04
    gates = [Gate(f"g{number}") for number in range(6)]
    agent = agent_of(calls(*(gate.name for gate in gates)), "Done", tools=[gate.tool for gate in gates], **option)
    sending = asyncio.ensure_future(agent.send("Go"))
    await asyncio.gather(*(gate.running.wait() for gate in gates[:most]))
    for _ in range(50):
        await asyncio.sleep(0)
    assert [gate.runs for gate in gates] == [1] * most + [0] * (6 - most)
    for gate in gates:
        gate.go.set()
    assert (await sending).text == "Done"


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3", "many"])
def test_a_bad_tool_concurrency_is_refused(value: Any) -> None:
    # RUN-04
    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", tool_concurrency=value)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", "tool_concurrency")


async def test_a_generator_holds_its_slot_until_it_ends() -> None:
    # RUN-27
    order: list[str] = []
    go = asyncio.Event()

    async def stream(args: Any) -> AsyncIterator[str]:
        yield "first"
        await go.wait()
        order.append("generator ends")
        yield "last"

    streaming = define_tool(name="stream", description="Streams.", execute=stream)
    agent = agent_of(calls("stream", "next"), "Done", tools=[streaming, plain("next", log=order)], tool_concurrency=1)
    run = agent.stream("Go")
    events = []
    async for event in run:
        events.append(event)
        if event.type == "tool.partial":
            go.set()
    assert order == ["generator ends", "next"]
    assert names(events)[2:7] == [
        "tool.start stream",
        "tool.partial stream 0 first",
        "tool.partial stream 1 last",
        "tool.done stream",
        "tool.start next",
    ]


async def test_the_gate_of_a_call_is_passed_before_the_next_one_begins() -> None:
    # RUN-27, TOOL-21
    order: list[str] = []

    class Slow:
        name = "slow"

        async def pre_tool_call(self, ctx: Any) -> None:
            order.append(f"in {ctx.tool_name}")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            order.append(f"out {ctx.tool_name}")

    await agent_of(calls("a", "b"), "Done", tools=[plain("a"), plain("b")], hooks=[Slow()]).send("Go")
    assert order == ["in a", "out a", "in b", "out b"]


async def test_sync_tools_run_beside_each_other_and_do_not_block_the_loop() -> None:
    # RUN-D7
    meet = threading.Barrier(3, timeout=10)

    @tool
    def wait_here() -> int:
        """Waits for the others."""
        return meet.wait()

    sending = asyncio.ensure_future(agent_of(calls("wait_here", "wait_here"), "Done", tools=[wait_here]).send("Go"))
    await until(lambda: meet.n_waiting == 2, rounds=1_000_000)
    meet.wait()
    assert kinds((await sending).messages) == ["ok", "ok"]


async def test_the_context_of_a_tool() -> None:
    # RUN-34, TOOL-11, TOOL-12, TOOL-13
    seen: list[ToolContext] = []

    async def look(args: Any, ctx: ToolContext) -> str:
        seen.append(ctx)
        return "ok"

    look_tool = define_tool(name="look", description="Looks.", execute=look)
    agent = agent_of(calls("look"), "Done", tools=[look_tool])
    result = await agent.send("Hi", principal={"id": "u1"}, metadata={"a": 1})
    ctx = seen[0]
    assert ctx.tool_call_id == result.tool_calls[0].id == "call_1"
    assert [message.role for message in ctx.messages] == ["user"]
    assert (ctx.principal, ctx.metadata, ctx.session_id, ctx.approval) == ({"id": "u1"}, {"a": 1}, None, None)
    assert not ctx.abort_signal.aborted
    await agent_of(calls("look"), "Done", tools=[look_tool]).session(id="s1").send("Hi")
    assert seen[1].session_id == "s1"


# ----------------------------------------------------------------------------------------------------------- what tools raise


class TeapotError(Exception):
    tool_error_kind = "sandbox"


RAISED = [
    ValueError("no"),
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    TimeoutError("late"),
    StopIteration(),
    GeneratorExit(),
]


def sync_raiser(error: BaseException) -> Callable[..., Any]:
    def execute(args: Any) -> Any:
        raise error

    return execute


def async_raiser(error: BaseException) -> Callable[..., Any]:
    async def execute(args: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    return execute


def generator_raiser(error: BaseException) -> Callable[..., Any]:
    async def execute(args: Any) -> AsyncIterator[Any]:
        yield "part"
        raise error

    return execute


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("raiser", [sync_raiser, async_raiser, generator_raiser])
async def test_whatever_a_tool_raises_becomes_its_result_and_the_others_go_on(
    raiser: Callable[[BaseException], Callable[..., Any]], error: BaseException
) -> None:
    # RUN-31, RUN-40, TOOL-24, TOOL-30, ERR-16
    bad = define_tool(name="bad", description="Raises.", execute=raiser(error))
    agent = agent_of(calls("good", "bad", "good"), "Done", tools=[plain("good"), bad], on_event=lambda event: None)
    result = await agent.send("Go")
    assert result.ok
    assert kinds(result.messages) == ["ok", "execution", "ok"]
    assert result.tool_errors == 1
    payload = results(result.messages)[1]
    assert payload["toolName"] == "bad"
    wanted = {type(error).__name__, "RuntimeError"}  # Python itself turns StopIteration in coroutines into RuntimeError
    assert payload["error"] in wanted
    assert "Traceback" not in payload["message"]
    check_transcript(result.messages)


async def test_a_tool_that_cancels_its_own_task_fails_alone() -> None:
    # TOOL-D: a tool's cancellation is not the run's
    async def cancel(args: Any) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return "never"

    bad = define_tool(name="bad", description="Cancels itself.", execute=cancel)
    result = await agent_of(calls("bad", "good"), "Done", tools=[bad, plain("good")]).send("Go")
    assert result.ok
    assert kinds(result.messages) == ["execution", "ok"]
    assert result.tool_errors == 1


async def test_an_exception_chooses_its_kind() -> None:
    # RUN-43, TOOL-31
    result = await agent_of(calls("bad"), "Done", tools=[failing("bad", TeapotError("short and stout"))]).send("Go")
    assert kinds(result.messages) == ["sandbox"]


async def test_a_long_error_message_is_cut() -> None:
    # RUN-40
    result = await agent_of(calls("bad"), "Done", tools=[failing("bad", ValueError("x" * 5_000))]).send("Go")
    message = results(result.messages)[0]["message"]
    assert len(message) == 2_000
    assert message.endswith("... (truncated)")


async def test_invalid_arguments_do_not_run_the_tool() -> None:
    # RUN-42, TOOL-16
    ran: list[Any] = []

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        ran.append((a, b))
        return a + b

    async def bad_json(options: GenerateOptions) -> Any:
        return GenerateResult(tool_calls=(ToolCall("x1", "add", "{not json"),), finish_reason="tool_calls")

    replies = [bad_json, lambda options: "Done"]
    provider = PolicyProvider(lambda options: replies.pop(0)(options))
    run = create_agent(provider=provider, tools=[add]).stream("Go")
    events = await collect(run)
    result = await run.result
    assert ran == []
    assert [event.args for event in events if event.type == "tool.start"] == [{}]
    payload = results(result.messages)[0]
    assert (payload["kind"], payload["error"]) == ("validation", "ToolArgumentsValidationError")
    assert payload["issues"]
    assert result.tool_calls[0].args == "{not json"
    check_transcript(result.messages)

    result = await agent_of(calls(("add", {"a": "x"})), "Done", tools=[add]).send("Go")
    payload = results(result.messages)[0]
    assert {issue["path"] for issue in payload["issues"]} == {"a", "b"}
    assert "add" in payload["message"]
    assert "2" in payload["message"]
    assert ran == []


async def test_an_unknown_tool_is_told_what_there_is() -> None:
    # RUN-43, TOOL-17
    result = await agent_of(calls("lok"), "Done", tools=[plain("look")]).send("Go")
    payload = results(result.messages)[0]
    assert (payload["kind"], payload["error"]) == ("not-found", "ToolNotFoundError")
    assert "look" in payload["message"]
    assert result.ok


async def test_two_calls_with_one_id_are_told_apart() -> None:
    # field W14
    turn = {"tool_calls": [{"name": "a", "id": "same"}, {"name": "b", "id": "same"}]}
    result = await agent_of(turn, turn, "Done", tools=[plain("a", "A"), plain("b", "B")]).send("Go")
    assert results(result.messages) == ["A", "B", "A", "B"]
    assert len({call.id for call in result.tool_calls}) == 4
    check_transcript(result.messages)


async def test_results_are_encoded_and_capped() -> None:
    # RUN-35, RUN-D8, TOOL-28, TOOL-29, TOOL-42
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    tools = [plain("none", None), plain("when", {"at": when, "odd": object(), "nan": math.nan}), plain("long", "x" * 300)]
    run = agent_of(calls("none", "when", "long"), "Done", tools=tools, max_tool_result_chars=100).stream("Go")
    events = await collect(run)
    result = await run.result
    none, at, long = results(result.messages)
    assert none is None
    assert at == {"at": "2026-01-02T03:04:05+00:00", "odd": None, "nan": None}
    assert long.startswith("x" * 60 + "\n")
    assert "max_tool_result_chars=100" in long
    done = {event.tool_name: event.result for event in events if event.type == "tool.done"}
    assert done["long"] == "x" * 300  # events see the whole
    assert done["when"]["at"] == at["at"]


async def test_max_calls_per_run_denies_more() -> None:
    once = define_tool(name="once", description="Once.", execute=lambda args: "ok", max_calls_per_run=1)
    result = await agent_of(calls("once", "once"), calls("once"), "Done", tools=[once]).send("Go")
    assert kinds(result.messages) == ["ok", "denied", "denied"]


# ------------------------------------------------------------------------------------------------------------- fatal errors


async def test_a_propagating_error_lets_running_calls_end_and_starts_no_more() -> None:
    # RUN-32, TOOL-24, ERR-15
    class MineError(PropagatingToolError): ...

    slow, log = Gate("slow"), list[str]()
    tools = [slow.tool, failing("bad", MineError("stop")), plain("later", log=log)]
    sending = asyncio.ensure_future(agent_of(calls("slow", "bad", "later"), tools=tools, tool_concurrency=2).send("Go"))
    await slow.running.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sending.done()  # it waits for the running call
    slow.go.set()
    with pytest.raises(MineError, match="stop"):
        await sending
    assert log == []
    assert slow.cancelled == 0


async def test_of_several_propagating_errors_the_first_in_call_order_is_raised() -> None:
    # RUN-33
    first, second = Gate("a", error=PropagatingToolError("first")), Gate("b", error=PropagatingToolError("second"))
    sending = asyncio.ensure_future(agent_of(calls("a", "b"), tools=[first.tool, second.tool]).send("Go"))
    await first.running.wait()
    await second.running.wait()
    second.go.set()
    await until(lambda: second.runs)
    first.go.set()
    with pytest.raises(PropagatingToolError) as caught:
        await sending
    assert caught.value.detail == "first"
    assert any("second" in note for note in caught.value.__notes__)


async def test_a_propagating_error_of_a_sync_tool() -> None:
    # RUN-32
    bad = define_tool(name="bad", description="Bad.", execute=sync_raiser(PropagatingToolError("stop")))
    with pytest.raises(PropagatingToolError):
        await agent_of(calls("bad"), tools=[bad]).send("Go")


# ------------------------------------------------------------------------------------------------------------------- aborts


async def test_an_abort_keeps_finished_results_and_answers_the_rest() -> None:
    # RUN-45, RUN-49, RUN-56, TOOL-25
    slow, log = Gate("slow"), list[str]()
    agent = agent_of(
        calls("quick", "slow", "later"), tools=[plain("quick"), slow.tool, plain("later", log=log)], tool_concurrency=1
    )
    run = agent.stream("Go")
    await slow.running.wait()
    run.abort("enough")
    result = await run.result
    assert (result.finish_reason, result.abort_reason) == ("aborted", {"name": "AbortError", "message": "enough"})
    assert kinds(result.messages) == ["ok", "not-run", "not-run"]
    assert "may have taken effect" in results(result.messages)[1]["message"]
    assert "before it ran" in results(result.messages)[2]["message"]
    assert log == []
    assert slow.cancelled == 1
    assert result.tool_errors == 0  # RUN-D5
    assert [call.name for call in result.tool_calls] == ["quick", "slow", "later"]  # also the one that never started
    check_transcript(result.messages)


async def test_an_abort_closes_a_generator_tool() -> None:
    # RUN-37, TOOL-36
    closed: list[str] = []
    forever = asyncio.Event()

    async def stream(args: Any) -> AsyncIterator[str]:
        try:
            yield "part"
            await forever.wait()
        finally:
            closed.append("closed")

    run = agent_of(calls("stream"), tools=[define_tool(name="stream", description="Streams.", execute=stream)]).stream("Go")
    events = []
    async for event in run:
        events.append(event)
        if event.type == "tool.partial":
            run.abort()
    assert closed == ["closed"]
    assert names(events)[-3:] == ["tool.error stream", "step.done 1 aborted", "run.done aborted"]


async def test_a_tool_that_swallows_the_abort_is_waited_for_and_its_result_dropped() -> None:
    # RUN-55
    stubborn = asyncio.Event()
    running = asyncio.Event()
    go = asyncio.Event()

    async def execute(args: Any) -> str:
        running.set()
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                stubborn.set()
        return "I did it anyway"

    run = agent_of(calls("stubborn"), tools=[define_tool(name="stubborn", description="Stubborn.", execute=execute)]).stream("Go")
    await running.wait()
    run.abort("now")
    await stubborn.wait()
    go.set()
    result = await run.result
    assert result.finish_reason == "aborted"
    assert kinds(result.messages) == ["not-run"]
    assert result.steps == 1


async def test_a_tool_in_a_thread_sees_the_abort_in_its_context_and_is_waited_for() -> None:
    # RUN-55, RUN-D7
    running, ended = threading.Event(), threading.Event()

    @tool
    def work(ctx: ToolContext) -> str:
        """Works until it is told to stop."""
        running.set()
        stop = threading.Event()
        ctx.abort_signal.on_abort(lambda reason: stop.set())
        assert stop.wait(10)
        ended.set()
        return "stopped"

    run = agent_of(calls("work"), tools=[work]).stream("Go")
    await asyncio.to_thread(running.wait, 10)
    run.abort("enough")
    result = await run.result
    assert ended.is_set()
    assert result.finish_reason == "aborted"
    assert kinds(result.messages) == ["not-run"]


async def test_a_call_whose_gate_is_passed_after_the_abort_does_not_run() -> None:
    # RUN-53
    log: list[str] = []
    handle: list[Any] = []

    class Late:
        name = "late"

        async def pre_tool_call(self, ctx: Any) -> None:
            handle[0].abort("enough")
            await asyncio.sleep(0)

    run = agent_of(calls("a"), tools=[plain("a", log=log)], hooks=[Late()]).stream("Go")
    handle.append(run)
    events = await collect(run)
    assert log == []
    assert names(events)[2:] == ["tool.start a", "tool.error a", "step.done 1 aborted", "run.done aborted"]
    result = await run.result
    assert kinds(result.messages) == ["not-run"]
    check_transcript(result.messages)


@pytest.mark.parametrize("where", ["hook", "approve", "needs_approval", "post_hook"])
async def test_an_abort_ends_the_wait_for_a_callback(where: str) -> None:
    # RUN-53
    forever, waiting = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(*args: Any) -> Any:
        waiting.set()
        await forever.wait()

    class Hook:
        name = "hook"

    options: dict[str, Any] = {}
    needs: Any = False
    if where == "approve":
        needs, options["approve"] = True, wait_for_ever
    elif where == "needs_approval":
        needs, options["approve"] = wait_for_ever, wait_for_ever
    else:
        setattr(Hook, "pre_tool_call" if where == "hook" else "post_tool_call", staticmethod(wait_for_ever))
        options["hooks"] = [Hook()]
    work = define_tool(name="work", description="Works.", execute=lambda args: "ok", needs_approval=needs)
    events: list[Event] = []
    token = CancelToken()
    agent = agent_of(calls("work"), tools=[work], on_event=events.append, **options)
    sending = asyncio.ensure_future(agent.send("Go", cancel=token))
    await waiting.wait()
    token.cancel("enough")
    result = await sending
    assert result.finish_reason == "aborted"
    assert kinds(result.messages) == ["not-run"]
    check_events(events)
    assert names(events)[-3:] == ["tool.error work", "step.done 1 aborted", "run.done aborted"]
    check_transcript(result.messages)


async def test_a_batch_that_starts_aborted_runs_nothing() -> None:
    # RUN-53, RUN-56
    log: list[str] = []
    handle: list[Any] = []

    class Late:
        name = "late"

        def post_generate(self, ctx: Any, result: Any) -> None:
            handle[0].abort("enough")

    run = agent_of(calls("a", "b"), tools=[plain("a", log=log), plain("b", log=log)], hooks=[Late()]).stream("Go")
    handle.append(run)
    result = await run.result
    assert log == []
    assert kinds(result.messages) == ["not-run", "not-run"]
    assert "tool.start a" not in names(await collect(run))


async def test_abort_grace_leaves_a_stubborn_tool_behind(caplog: pytest.LogCaptureFixture) -> None:
    running, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def execute(args: Any) -> str:
        running.set()
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        return "late"

    stubborn = define_tool(name="stubborn", description="Stubborn.", execute=execute)
    run = agent_of(calls("stubborn"), tools=[stubborn], abort_grace_ms=1).stream("Go")
    await running.wait()
    run.abort("now")
    result = await run.result
    assert kinds(result.messages) == ["not-run"]
    assert "outcome is unknown" in results(result.messages)[0]["message"]
    assert any("left behind" in record.message for record in caplog.records)
    events = await collect(run)
    go.set()
    await ended.wait()
    await asyncio.sleep(0)
    assert names(events)[-3:] == ["tool.error stubborn", "step.done 1 aborted", "run.done aborted"]
    assert kinds(result.messages) == ["not-run"]


async def test_truncated_and_filtered_calls_do_not_run() -> None:
    # RUN-19, field W08
    log: list[str] = []
    for reason in ("content_filter",):
        turn = calls("a", finish_reason=reason)
        result = await agent_of(turn, tools=[plain("a", log=log)]).send("Go")
        assert result.finish_reason == reason
        assert kinds(result.messages) == ["not-run"]
        check_transcript(result.messages)
    assert log == []
    # Any other reason next to calls: the calls decide.
    for reason in ("stop", "other", "error", "weird"):
        result = await agent_of(calls("a", finish_reason=reason), "Done", tools=[plain("a")]).send("Go")
        assert result.ok
        assert kinds(result.messages) == ["ok"]


async def test_a_model_is_called_with_the_results_of_its_calls() -> None:
    model = mock_model([calls("a", "b"), "Done"])
    await create_agent(provider=model, tools=[plain("a", {"x": 1}), failing("b", ToolExecutionError("bad luck"))]).send("Go")
    last = model.calls[-1].messages
    assert [message.role for message in last] == ["system", "user", "assistant", "tool", "tool"]
    assert last[-1].is_error
    assert "bad luck" in last[-1].text
