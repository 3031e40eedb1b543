"""`enqueue()` and `steer()` at every moment of a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lousho_ray.cancellation import AbortSignal
from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.loop.inbox import Inbox, QueuedInput
from lousho_ray.messages import TextPart, user
from lousho_ray.ports import FinishChunk, GenerateOptions, ReasoningChunk, TextChunk
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import (
    Gate,
    PolicyProvider,
    ScriptedStream,
    agent_of,
    calls,
    check_transcript,
    collect,
    kinds,
    names,
    plain,
    say,
    shape,
    think,
    want,
)

# ------------------------------------------------------------------------------------------------------------------- enqueue


async def test_input_queued_while_tools_run_joins_after_their_results() -> None:
    # SES-35, EVT-34
    gate = Gate("slow")
    run = agent_of(calls("slow"), "Done", tools=[gate.tool]).stream("Hi")
    await gate.running.wait()
    first, second = run.enqueue("One"), run.enqueue([TextPart("Two")])
    gate.go.set()
    events = await collect(run)
    result = await run.result
    assert await first.applied is True
    assert await second.applied is True
    assert shape(result.messages)[1:] == ["user:Hi", "assistant:+slow", "tool:slow", "user:One", "user:Two", "assistant:Done"]
    assert names(events)[2:10] == [
        "tool.start slow",
        "input.queued",
        "input.queued",
        "tool.done slow",
        "step.done 1 tool_calls",
        "input.applied 2",
        "input.applied 2",
        "step.start 2",
    ]
    queued = [event for event in events if event.type == "input.queued"]
    assert [(event.id, event.text) for event in queued] == [(first.id, "One"), (second.id, "Two")]
    check_transcript(result.messages)


async def test_input_queued_before_the_first_model_call_joins_it() -> None:
    # SES-D6, EVT-34
    provider = ScriptedStream(say("Done"))
    run = create_agent(provider=provider).stream("Hi")
    queued = run.enqueue("Wait")  # the run's task has not begun yet
    events = await collect(run)
    assert await queued.applied is True
    assert shape(provider.requests[0].messages)[1:] == ["user:Hi", "user:Wait"]
    assert names(events)[:4] == ["run.start", "input.queued", "input.applied 1", "step.start 1"]


@pytest.mark.parametrize("moment", ["before the first chunk", "in reasoning", "in text", "after the text"])
async def test_input_queued_during_the_final_reply_gets_one_more_step(moment: str) -> None:
    # RUN-21, SES-36
    go = asyncio.Event()
    scripts: dict[str, list[Any]] = {
        "before the first chunk": [go, *say("One")],
        "in reasoning": [ReasoningChunk("hm"), go, *say("One")],
        "in text": [TextChunk("O"), go, TextChunk("ne"), FinishChunk("stop")],
        "after the text": [TextChunk("One"), go, FinishChunk("stop")],
    }
    script = scripts[moment]
    provider = ScriptedStream(script, say("Two"))
    run = create_agent(provider=provider).stream("Hi")
    await provider.reached(0, script.index(go)).wait()
    queued = run.enqueue("More")
    go.set()
    result = await run.result
    assert (result.text, result.steps, result.finish_reason) == ("Two", 2, "stop")
    assert await queued.applied is True
    assert shape(result.messages)[1:] == ["user:Hi", "assistant:One", "user:More", "assistant:Two"]
    check_transcript(result.messages)


async def test_without_a_step_left_input_is_not_applied() -> None:
    # RUN-21, SES-37
    go = asyncio.Event()
    provider = ScriptedStream([go, *say("One")])
    run = create_agent(provider=provider, max_steps=1).stream("Hi")
    await provider.reached(0, 0).wait()
    queued = run.enqueue("More")
    go.set()
    result = await run.result
    assert (result.text, result.finish_reason) == ("One", "stop")
    assert await queued.applied is False


@pytest.mark.parametrize("method", ["enqueue", "steer"])
async def test_input_after_the_end_is_not_applied(method: str) -> None:
    # SES-37, EVT-D2
    run = agent_of("Done").stream("Hi")
    await run.result
    late = getattr(run, method)("More")
    assert await late.applied is False
    assert names(await collect(run))[-1] == "run.done stop"


@pytest.mark.parametrize("end", ["abort", "error", "budget"])
@pytest.mark.parametrize("method", ["enqueue", "steer"])
async def test_input_that_waits_when_the_run_stops_is_not_applied(method: str, end: str) -> None:
    # SES-37
    go, step = asyncio.Event(), RuntimeError("broken") if end == "error" else TextChunk("more")
    limits = {"max_tokens": 1} if end == "budget" else {}
    script: list[Any] = [TextChunk("Part"), go, step, *want("look")]
    provider = ScriptedStream(script)
    run = create_agent(provider=provider, tools=[plain("look")], limits=limits).stream("Hi")
    await provider.reached(0, 1).wait()
    waiting = getattr(run, method)("More")
    if end == "abort":
        run.abort()
    go.set()
    if end == "error":
        with pytest.raises(Exception, match="broken"):
            await run.result
    else:
        assert (await run.result).finish_reason == ("aborted" if end == "abort" else "budget-exceeded")
    assert await waiting.applied is False
    await collect(run)


@pytest.mark.parametrize("bad", [None, 5, [1, 2]])
async def test_input_of_a_wrong_kind_is_refused(bad: Any) -> None:
    # RUN-02
    run = agent_of("Done").stream("Hi")
    for method in (run.enqueue, run.steer):
        with pytest.raises(ConfigurationError):
            method(bad)
    await run.result


# --------------------------------------------------------------------------------------------------------------------- steer


@pytest.mark.parametrize("moment", ["before the first chunk", "in reasoning"])
async def test_a_steer_before_any_output_makes_the_call_again(moment: str) -> None:
    # SES-39, SES-42, EVT-35, RUN-22
    never = asyncio.Event()
    script: list[Any] = [never] if moment == "before the first chunk" else [ReasoningChunk("hm"), never]
    provider = ScriptedStream(script, say("Yes"))
    run = create_agent(provider=provider).stream("Hi")
    await provider.reached(0, len(script) - 1).wait()
    steered = run.steer("Rather this")
    events = await collect(run)
    result = await run.result
    assert await steered.joined is True
    assert (result.text, result.steps, result.finish_reason) == ("Yes", 2, "stop")
    assert shape(provider.requests[1].messages)[1:] == ["user:Hi", "user:Rather this"]
    assert provider.closed == 2
    after = [name for name in names(events) if not name.startswith("reasoning.")]  # open reasoning is closed
    at = after.index("input.steered immediate")
    assert after[at : at + 4] == ["input.steered immediate", "step.done 1 steered", "input.applied 2", "step.start 2"]
    assert result.usage.model_calls == 1  # the call that was cut short reported nothing
    check_transcript(result.messages)


async def test_a_steered_call_without_streaming() -> None:
    # SES-39
    never, running = asyncio.Event(), asyncio.Event()

    async def policy(options: GenerateOptions) -> str:
        if len(options.messages) == 2:
            running.set()
            await never.wait()
        return "Yes"

    provider = PolicyProvider(policy)
    run = create_agent(provider=provider).stream("Hi")
    await running.wait()
    run.steer("Rather this")
    result = await run.result
    assert shape(result.messages)[1:] == ["user:Hi", "user:Rather this", "assistant:Yes"]
    assert (provider.calls, provider.running) == (2, 0)


async def test_a_steer_just_when_the_reply_comes_discards_it() -> None:
    # SES-39, EVT-35: what was reported as immediate is immediate
    reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.Event()

    async def policy(options: GenerateOptions) -> str:
        if len(options.messages) == 2:
            running.set()
            return await reply
        return "Yes"

    run = create_agent(provider=PolicyProvider(policy)).stream("Hi")
    await running.wait()
    reply.set_result("Too late")
    run.steer("Rather this")
    events = await collect(run)
    assert "text.delta Too late" not in names(events)
    assert (await run.result).text == "Yes"


@pytest.mark.parametrize("output", [[TextChunk("Part")], want("look")[:1]])
async def test_a_steer_after_output_waits(output: list[Any]) -> None:
    # SES-40
    go = asyncio.Event()
    rest = [TextChunk("ial"), FinishChunk("stop")] if isinstance(output[0], TextChunk) else [FinishChunk("tool_calls")]
    provider = ScriptedStream([*output, go, *rest], say("Two"))
    run = create_agent(provider=provider, tools=[plain("look")]).stream("Hi")
    await provider.reached(0, 1).wait()
    steered = run.steer("Rather this")
    go.set()
    events = await collect(run)
    result = await run.result
    assert "input.steered queued" in names(events)
    assert await steered.joined is True
    assert (result.text, result.steps) == ("Two", 2)
    check_transcript(result.messages)


async def test_a_steer_after_output_leaves_the_calls_of_that_reply_alone() -> None:
    # SES-40: it waits like enqueue()
    go, log = asyncio.Event(), list[str]()
    provider = ScriptedStream([TextChunk("Wait"), go, *want("look", "look")], say("Two"))
    run = create_agent(provider=provider, tools=[plain("look", log=log)]).stream("Hi")
    await provider.reached(0, 1).wait()
    run.steer("Rather this")
    go.set()
    result = await run.result
    assert log == ["look", "look"]
    assert shape(result.messages)[-4:] == ["tool:look", "tool:look", "user:Rather this", "assistant:Two"]


async def test_a_steer_while_tools_run_skips_those_that_have_not_started() -> None:
    # SES-41, RUN-45
    slow, log = Gate("slow"), list[str]()
    tools = [slow.tool, plain("later", log=log)]
    run = agent_of(calls("slow", "later", "later"), "Done", tools=tools, tool_concurrency=1).stream("Hi")
    await slow.running.wait()
    steered = run.steer("Stop that")
    slow.go.set()
    events = await collect(run)
    result = await run.result
    assert log == []
    assert kinds(result.messages) == ["ok", "not-run", "not-run"]
    assert await steered.applied is True
    assert shape(result.messages)[-2:] == ["user:Stop that", "assistant:Done"]
    assert slow.cancelled == 0
    assert "tool.start later" not in names(events)
    assert result.tool_errors == 0
    check_transcript(result.messages)


async def test_calls_that_a_steer_skipped_do_not_count_as_made() -> None:
    # RUN-45, RUN-49
    slow, log = Gate("slow"), list[str]()

    async def once(args: Any) -> str:
        log.append("once")
        return "done"

    capped = define_tool(name="once", description="Once.", execute=once, max_calls_per_run=1)
    agent = agent_of(calls("slow", "once"), calls("once"), "Done", tools=[slow.tool, capped], tool_concurrency=1)
    run = agent.stream("Hi")
    await slow.running.wait()
    run.steer("First this")
    slow.go.set()
    result = await run.result
    assert log == ["once"]
    assert kinds(result.messages) == ["ok", "not-run", "ok"]
    assert [call.name for call in result.tool_calls] == ["slow", "once", "once"]
    await collect(run)


async def test_a_steer_in_the_last_step_ends_max_steps() -> None:
    # SES-42
    provider = ScriptedStream([asyncio.Event()])
    run = create_agent(provider=provider, max_steps=1).stream("Hi")
    await provider.reached(0, 0).wait()
    steered = run.steer("More")
    result = await run.result
    assert (result.finish_reason, result.steps) == ("max-steps", 1)
    assert await steered.joined is False
    check_transcript(result.messages)


async def test_steers_and_queued_inputs_are_applied_in_the_order_given() -> None:
    # SES-35
    gate = Gate("slow")
    run = agent_of(calls("slow"), "Done", tools=[gate.tool]).stream("Hi")
    await gate.running.wait()
    run.enqueue("a")
    run.steer("b")
    run.enqueue("c")
    gate.go.set()
    result = await run.result
    assert shape(result.messages)[-4:] == ["user:a", "user:b", "user:c", "assistant:Done"]


async def test_many_steers_each_make_the_call_again() -> None:
    # SES-39
    scripts: list[list[Any]] = [[asyncio.Event()] for _ in range(4)]
    provider = ScriptedStream(*scripts, say("Done"))
    run = create_agent(provider=provider).stream("Hi")
    for number in range(4):
        await provider.reached(number, 0).wait()
        run.steer(f"s{number}")
    events = await collect(run)
    result = await run.result
    assert result.steps == 5
    assert shape(result.messages)[1:] == ["user:Hi", "user:s0", "user:s1", "user:s2", "user:s3", "assistant:Done"]
    assert names(events).count("input.steered immediate") == 4
    assert provider.closed == 5


async def test_a_deaf_call_that_was_steered_away_says_nothing_more_and_the_next_can_be_steered() -> None:
    # RUN-55, SES-42
    go = asyncio.Event()
    provider = ScriptedStream([go, *say("late")], [asyncio.Event()], say("Done"), deaf=False)
    deaf = ScriptedStream([go, *say("late")], deaf=True)

    class Both:
        name = "both"
        default_model: str | None = "m"
        count = 0

        async def generate(self, options: GenerateOptions) -> Any:
            raise AssertionError

        def stream(self, options: GenerateOptions) -> Any:
            self.count += 1
            if self.count == 1:
                provider.requests.append(options)
                return deaf.stream(options)
            return provider.stream(options)

    run = create_agent(provider=Both()).stream("Hi")
    await deaf.reached(0, 0).wait()
    run.steer("one")
    await provider.reached(1, 0).wait()
    go.set()
    while not deaf.closed:
        await asyncio.sleep(0)
    run.steer("two")
    events = await collect(run)
    result = await run.result
    assert result.text == "Done"
    assert names(events).count("input.steered immediate") == 2
    assert "text.delta late" not in names(events)


async def test_a_steer_before_the_run_has_begun_is_reported_as_one() -> None:
    # SES-D6, EVT-34
    run = agent_of("Done").stream("Hi")
    steered = run.steer("Rather this")
    events = await collect(run)
    assert await steered.applied is True
    assert names(events)[:4] == ["run.start", "input.steered queued", "input.applied 1", "step.start 1"]


async def test_reasoning_of_a_steered_call_is_dropped() -> None:
    # SES-42
    provider = ScriptedStream([*think("old")[:1], asyncio.Event()], [*think("new"), *say("Done")])
    run = create_agent(provider=provider).stream("Hi")
    await provider.reached(0, 1).wait()
    run.steer("x")
    assert (await run.result).reasoning == "new"
    await collect(run)


async def test_queued_input_and_a_subagent_that_runs() -> None:
    # SES-35: the input is the lead's
    gate = Gate("slow")
    child = agent_of(calls("slow"), "Found", name="w", description="W.", tools=[gate.tool])
    task = ("task", {"agent": "w", "prompt": "p", "description": "d"})
    run = agent_of(calls(task), "Done", subagents={"w": child}).stream("Hi")
    await gate.running.wait()
    queued = run.enqueue("More")
    gate.go.set()
    result = await run.result
    assert await queued.applied is True
    assert shape(result.messages)[-2:] == ["user:More", "assistant:Done"]


# --------------------------------------------------------------------------------------------------------------- the class alone


async def test_an_inbox_hands_out_what_waits_once() -> None:
    inbox = Inbox()
    first, second = QueuedInput((user("a"),)), QueuedInput((user("b"),))
    inbox.enqueue(first)
    inbox.steer(second)
    assert inbox.waiting
    assert inbox.steered
    assert inbox.take() == [first, second]
    assert not inbox.waiting
    assert not inbox.steered
    assert inbox.take() == []


async def test_a_closed_inbox_takes_nothing() -> None:
    inbox = Inbox()
    waiting = QueuedInput((user("a"),))
    inbox.enqueue(waiting)
    inbox.close()
    late, later = QueuedInput((user("b"),)), QueuedInput((user("c"),))
    inbox.enqueue(late)
    inbox.steer(later)
    assert [item.applied.result() for item in (waiting, late, later)] == [False, False, False]
    assert inbox.closed
    assert not inbox.waiting


async def test_only_a_watched_call_is_cut_short() -> None:
    inbox, call = Inbox(), AbortSignal()
    inbox.watch(call)
    inbox.unwatch()
    inbox.steer(QueuedInput((user("a"),)))
    assert not call.aborted
    inbox.watch(call)
    inbox.enqueue(QueuedInput((user("b"),)))
    assert not call.aborted
    inbox.steer(QueuedInput((user("c"),)))
    assert call.aborted


async def test_the_text_of_a_queued_input_is_that_of_its_messages() -> None:
    assert QueuedInput((user("a"), user([TextPart("b"), TextPart("c")]))).text == "a\nbc"
