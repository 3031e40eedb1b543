"""The order of a run's events, as whole snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import BudgetExceededError, CompactedLLMProviderError, ConfigurationError, LoushoError, PropagatingToolError
from lousho_ray.events import Event, RunDone, StepDone
from lousho_ray.messages import ReasoningBlock
from lousho_ray.ports import (
    FinishChunk,
    GenerateResult,
    HostedToolCall,
    HostedToolCallChunk,
    HostedToolResultChunk,
    ReasoningChunk,
    ReasoningEndChunk,
    TextChunk,
)
from lousho_ray.providers.fallback import with_fallback
from lousho_ray.providers.retry import with_retry
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import (
    Gate,
    PolicyProvider,
    ScriptedStream,
    agent_of,
    calls,
    check_events,
    collect,
    failing,
    names,
    plain,
    say,
    think,
    want,
)


async def test_a_plain_turn() -> None:
    # EVT-01, EVT-25, EVT-27
    run = agent_of("Hello there").stream("Hi")
    events = await collect(run)
    assert names(events) == [
        "run.start",
        "step.start 1",
        "text.delta Hello ",
        "text.delta there",
        "text.done Hello there",
        "step.done 1 stop",
        "run.done stop",
    ]
    assert {event.run_id for event in events} == {run.run_id}
    assert events[0].agent_name == "agent"
    assert events[-1].text == "Hello there"
    assert (await run.result).text == "Hello there"


async def test_a_turn_with_a_tool() -> None:
    # EVT-28, RUN-19
    events = await collect(agent_of(calls("look", text="Looking"), "Seen", tools=[plain("look", {"seen": 1})]).stream("Hi"))
    assert names(events) == [
        "run.start",
        "step.start 1",
        "text.delta Looking",
        "text.done Looking",
        "tool.start look",
        "tool.done look",
        "step.done 1 tool_calls",
        "step.start 2",
        "text.delta Seen",
        "text.done Seen",
        "step.done 2 stop",
        "run.done stop",
    ]
    assert events[5].result == {"seen": 1}
    assert events[5].duration_ms >= 0


async def test_parallel_tools_start_in_call_order_and_end_in_the_order_in_which_they_finish() -> None:
    # EVT-31
    first, second, third = Gate("a"), Gate("b"), Gate("c")
    run = agent_of(calls("a", "b", "c"), "Done", tools=[first.tool, second.tool, third.tool]).stream("Go")
    for gate in (third, first, second):
        await gate.running.wait()
    finished: list[str] = []
    events: list[Any] = []
    async for event in run:
        events.append(event)
        if event.type == "tool.start" and event.tool_name == "c":
            third.go.set()
        if event.type == "tool.done":
            finished.append(event.tool_name)
            {"c": first, "a": second, "b": second}[event.tool_name].go.set()
    check_events(events)
    assert finished == ["c", "a", "b"]
    assert names(events)[1:9] == [
        "step.start 1",
        "tool.start a",
        "tool.start b",
        "tool.start c",
        "tool.done c",
        "tool.done a",
        "tool.done b",
        "step.done 1 tool_calls",
    ]


async def test_with_one_call_at_a_time_starts_and_ends_alternate() -> None:
    # EVT-31
    tools = [plain("a"), plain("b"), plain("c")]
    events = await collect(agent_of(calls("a", "b", "c"), "Done", tools=tools, tool_concurrency=1).stream("Go"))
    wanted = ["tool.start a", "tool.done a", "tool.start b", "tool.done b", "tool.start c", "tool.done c"]
    assert [name for name in names(events) if name.startswith("tool.")] == wanted


async def test_a_generator_tool_reports_its_snapshots() -> None:
    # RUN-36, TOOL-34, TOOL-35
    async def count(args: Any) -> AsyncIterator[int]:
        for number in range(3):
            yield number

    tool = define_tool(name="count", description="Counts.", execute=count)
    run = agent_of(calls("count"), "Done", tools=[tool]).stream("Go")
    events = await collect(run)
    assert names(events)[2:7] == [
        "tool.start count",
        "tool.partial count 0 0",
        "tool.partial count 1 1",
        "tool.partial count 2 2",
        "tool.done count",
    ]
    result = await run.result
    assert [message.text for message in result.messages if message.role == "tool"] == ["2"]


async def test_invalid_arguments_and_unknown_tools_have_a_start_and_an_error() -> None:
    # RUN-42, RUN-43
    async def need(args: Any) -> str:
        raise AssertionError("must not run")

    tool = define_tool(name="need", description="Needs x.", execute=need, input={"type": "object", "required": ["x"]})
    events = await collect(agent_of(calls(("need", {"y": 1}), "nope"), "Done", tools=[tool]).stream("Go"))
    assert names(events)[2:6] == ["tool.start need", "tool.error need", "tool.start nope", "tool.error nope"]
    assert events[2].args == {"y": 1}
    assert [event.error.name for event in events if event.type == "tool.error"] == [
        "ToolArgumentsValidationError",
        "ToolNotFoundError",
    ]


async def test_a_subagent_reports_inside_its_task_call_without_a_start_and_end_of_its_own() -> None:
    # EVT-15, EVT-42, SUB-47, SUB-48
    child = agent_of(calls("dig"), "Found", name="digger", description="Digs.", tools=[plain("dig")])
    task = ("task", {"agent": "digger", "prompt": "Dig!", "description": "dig a hole"})
    events = await collect(agent_of(calls(task), "Done", subagents={"digger": child}).stream("Go"))
    assert names(events) == [
        "run.start",
        "step.start 1",
        "tool.start task",
        "[digger] step.start 1",
        "[digger] tool.start dig",
        "[digger] tool.done dig",
        "[digger] step.done 1 tool_calls",
        "[digger] step.start 2",
        "[digger] text.delta Found",
        "[digger] text.done Found",
        "[digger] step.done 2 stop",
        "tool.done task",
        "step.done 1 tool_calls",
        "step.start 2",
        "text.delta Done",
        "text.done Done",
        "step.done 2 stop",
        "run.done stop",
    ]
    info = events[3].to_dict()["subagent"]
    assert info == {"name": "digger", "depth": 1, "toolCallId": events[2].tool_call_id, "description": "dig a hole"}


async def test_a_retried_call_closes_its_reasoning_before_the_retry_is_reported() -> None:
    # EVT-28, EVT-29
    clock = FakeClock()
    provider = ScriptedStream([ReasoningChunk("Hm"), ConnectionError("gone")], [*think("Aha"), *say("Yes")])
    run = create_agent(provider=with_retry(provider, max_retries=1, clock=clock)).stream("Hi")
    await provider.reached(0, 1).wait()
    while not clock.waiting:
        await asyncio.sleep(0)
    clock.advance(60_000)
    events = await collect(run)
    assert names(events) == [
        "run.start",
        "step.start 1",
        "reasoning.start",
        "reasoning.delta Hm",
        "reasoning.done Hm",
        "provider.retry 1",
        "reasoning.start",
        "reasoning.delta Aha",
        "reasoning.done Aha",
        "text.delta Yes",
        "text.done Yes",
        "step.done 1 stop",
        "run.done stop",
    ]
    result = await run.result
    assert result.reasoning == "Aha"
    assert result.usage.model_calls == 1  # COST-06


async def test_a_fallback_is_reported_before_the_next_providers_output() -> None:
    # EVT-28
    class Denied(Exception):
        status_code = 401

    provider = with_fallback([mock_model([Denied("no")], name="one"), mock_model(["Hello"], name="two")])
    events = await collect(create_agent(provider=provider).stream("Hi"))
    assert names(events) == [
        "run.start",
        "step.start 1",
        "provider.fallback",
        "text.delta Hello",
        "text.done Hello",
        "step.done 1 stop",
        "run.done stop",
    ]
    assert (events[2].from_provider, events[2].to_provider) == ("one", "two")


async def test_an_abort_during_the_models_reply() -> None:
    # EVT-27, RUN-53, RUN-57
    provider = ScriptedStream([TextChunk("Part"), asyncio.Event(), FinishChunk("stop")])
    run = create_agent(provider=provider).stream("Hi")
    await provider.reached(0, 1).wait()
    run.abort("enough")
    events = await collect(run)
    assert names(events) == ["run.start", "step.start 1", "text.delta Part", "step.done 1 aborted", "run.done aborted"]
    assert events[-2].usage is None  # EVT-19
    assert provider.closed == 1


async def test_an_abort_during_tools() -> None:
    # RUN-56, EVT-31
    gate = Gate("slow")
    run = agent_of(calls("quick", "slow"), tools=[plain("quick"), gate.tool]).stream("Hi")
    await gate.running.wait()
    run.abort("enough")
    events = await collect(run)
    assert names(events)[2:] == [
        "tool.start quick",
        "tool.start slow",
        "tool.done quick",
        "tool.error slow",
        "step.done 1 aborted",
        "run.done aborted",
    ]


async def test_a_provider_failure() -> None:
    # EVT-20, EVT-27, EVT-39
    run = agent_of(RuntimeError("broken")).stream("Hi")
    events = await collect(run)
    assert names(events) == ["run.start", "step.start 1", "step.done 1 error", "error CompactedLLMProviderError", "run.done error"]
    assert events[-1].to_dict().get("usage") is None
    assert events[-1].text == ""
    assert events[-2].error.code == "LOUSHO_PROVIDER_REQUEST_FAILED"  # EVT-D9
    with pytest.raises(CompactedLLMProviderError):
        await run.result


async def test_a_failed_stream_after_text_is_not_tried_again() -> None:
    # EVT-30
    provider = ScriptedStream([TextChunk("Half"), ConnectionError("gone")], say("never"))
    run = create_agent(provider=with_retry(provider, max_retries=2)).stream("Hi")
    events = await collect(run)
    assert names(events)[2:] == ["text.delta Half", "step.done 1 error", "error CompactedLLMProviderError", "run.done error"]
    assert len(provider.requests) == 1


async def test_a_stream_without_a_finish_fails_the_step() -> None:
    # EVT-54
    run = create_agent(provider=ScriptedStream([TextChunk("Half")])).stream("Hi")
    events = await collect(run)
    assert names(events)[-3:] == ["step.done 1 error", "error CompactedLLMProviderError", "run.done error"]


async def test_a_propagating_tool_error() -> None:
    # RUN-32, EVT-27, EVT-39
    run = agent_of(calls("bad"), tools=[failing("bad", PropagatingToolError("stop everything"))]).stream("Hi")
    events = await collect(run)
    assert names(events)[2:] == [
        "tool.start bad",
        "tool.error bad",
        "step.done 1 error",
        "error PropagatingToolError",
        "run.done error",
    ]
    assert events[-3].usage is not None  # the call did produce a reply
    with pytest.raises(PropagatingToolError, match="stop everything"):
        await run.result


@pytest.mark.parametrize("method", ["pre_generate", "post_generate", "pre_tool_call", "post_tool_call"])
async def test_a_raising_hook_fails_its_step(method: str) -> None:
    # HOOK-14, EVT-27, EVT-39
    class Broken:
        name = "broken"

    def fail(*args: Any) -> None:
        raise LookupError("no")

    setattr(Broken, method, staticmethod(fail))
    run = agent_of(calls("look"), "Done", tools=[plain("look")], hooks=[Broken()]).stream("Hi")
    events = await collect(run)
    assert names(events)[-3:] == ["step.done 1 error", "error LookupError", "run.done error"]
    with pytest.raises(LookupError):
        await run.result


async def test_a_budget_stop_is_reported_right_before_the_end() -> None:
    # EVT-38, BUD-08
    turn = calls("look", usage={"input_tokens": 10, "output_tokens": 5})
    events = await collect(agent_of(turn, tools=[plain("look")], limits={"max_tokens": 15}).stream("Hi"))
    assert names(events) == [
        "run.start",
        "step.start 1",
        "step.done 1 tool_calls",
        "budget.exceeded maxTokens",
        "run.done budget-exceeded",
    ]
    assert events[-2].to_dict().items() >= {"limit": "maxTokens", "value": 15, "max": 15, "scope": "run"}.items()


async def test_a_budget_stop_that_raises() -> None:
    # EVT-38, BUD-09
    turn = calls("look", usage={"input_tokens": 10, "output_tokens": 5})
    run = agent_of(turn, tools=[plain("look")], limits={"max_tokens": 15, "on_exceeded": "throw"}).stream("Hi")
    events = await collect(run)
    assert names(events)[-3:] == ["budget.exceeded maxTokens", "error BudgetExceededError", "run.done error"]
    with pytest.raises(BudgetExceededError) as caught:
        await run.result
    assert caught.value.budget == {"limit": "maxTokens", "value": 15, "max": 15, "scope": "run"}


async def test_reasoning_ends_before_text_and_tools() -> None:
    # EVT-29, PRV-82
    provider = ScriptedStream([ReasoningChunk("a"), ReasoningChunk("b"), *want("look")], [*think("c"), *say("Done")])
    run = create_agent(provider=provider, tools=[plain("look")]).stream("Hi")
    events = await collect(run)
    wanted = ["reasoning.start", "reasoning.delta a", "reasoning.delta b", "reasoning.done ab", "tool.start look", "tool.done look"]
    assert names(events)[2:8] == wanted
    result = await run.result
    assert result.reasoning == "ab\n\nc"
    assert all(not message.reasoning for message in result.messages)  # RUN-16


async def test_only_signed_reasoning_of_a_tool_turn_is_kept_in_the_transcript() -> None:
    # RUN-16
    block = ReasoningBlock("why", "signature", None, "scripted", "m")
    signed = [ReasoningChunk("why"), ReasoningEndChunk(block)]
    provider = ScriptedStream([*signed, *want("look")], [*signed, *say("Done")])
    result = await create_agent(provider=provider, tools=[plain("look")], on_event=lambda event: None).send("Hi")
    assert [message.reasoning for message in result.messages if message.role == "assistant"] == [(block,), ()]
    assert result.reasoning == "why\n\nwhy"


async def test_a_provider_that_cannot_stream_gives_one_delta() -> None:
    # EVT-09, RUN-23
    events = await collect(create_agent(provider=PolicyProvider(lambda options: "One two three")).stream("Hi"))
    assert names(events)[2:4] == ["text.delta One two three", "text.done One two three"]


async def test_listeners_get_what_a_stream_gets_and_streams_what_send_does() -> None:
    # EVT-11, EVT-12
    heard: list[Event] = []
    turns = (calls("look"), "All done")
    streamed = await collect(agent_of(*turns, tools=[plain("look")]).stream("Hi"))
    result = await agent_of(*turns, tools=[plain("look")], on_event=heard.append).send("Hi")
    check_events(heard)
    assert names(heard) == names(streamed)
    assert result.text == "All done"


async def test_send_and_stream_give_the_same_result() -> None:
    # EVT-10, RUN-23
    turns = (calls("look", text="So"), {"text": "All done", "usage": {"input_tokens": 7, "output_tokens": 3}})
    sent = await agent_of(*turns, tools=[plain("look")]).send("Hi")
    streamed = await agent_of(*turns, tools=[plain("look")]).stream("Hi").result
    for field in ("text", "messages", "new_messages", "tool_calls", "usage", "step_usage", "finish_reason", "steps", "tool_errors"):
        assert getattr(sent, field) == getattr(streamed, field), field


async def test_hooks_validation_approvals_and_checkpoints_see_no_difference_between_send_and_stream() -> None:
    # EVT-10
    told = [await _all_that_is_told(streamed) for streamed in (False, True)]
    assert told[0] == told[1]
    hooked, saved, results_of = told[0]
    assert [entry[0] for entry in hooked].count("pre_tool_call") == 3  # once more when the person has decided
    assert saved
    assert results_of[0][0] == "awaiting-approval"


async def _all_that_is_told(streamed: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """What hooks and the checkpoint store are told in a run with a wrong call, a pause and a decision, and how its parts ended."""
    hooked: list[Any] = []
    saved: list[Any] = []

    class Watch:
        name = "watch"

        def pre_generate(self, ctx: Any) -> None:
            hooked.append(("pre_generate", [(message.role, message.text) for message in ctx.messages]))

        def post_generate(self, ctx: Any, result: Any) -> None:
            hooked.append(("post_generate", result.text, [call.name for call in result.tool_calls]))

        def pre_tool_call(self, ctx: Any) -> None:
            hooked.append(("pre_tool_call", ctx.tool_name, dict(ctx.args)))

        def post_tool_call(self, ctx: Any, outcome: Any) -> None:
            hooked.append(("post_tool_call", ctx.tool_name, outcome.result))

    store = memory_store()
    keep = store.checkpoints.save

    async def save(checkpoint: Any) -> None:
        saved.append((checkpoint["status"], checkpoint["stepIndex"], len(checkpoint["messages"])))
        await keep(checkpoint)

    store.checkpoints.save = save  # type: ignore[method-assign]
    pay = define_tool(name="pay", description="Pays.", execute=_pay, needs_approval=True)
    turn = calls("look", ("look", {"wrong": 1}), "pay", text="So", usage={"input_tokens": 7, "output_tokens": 3})
    agent = agent_of(turn, "Done", tools=[plain("look"), pay], hooks=[Watch()], store=store, tool_concurrency=1)
    session = agent.session("s")
    first = await (session.stream("Go").result if streamed else session.send("Go"))
    if streamed:
        second = await (await agent.approvals.stream_resolve(str(first.approval_id), approved=True)).result
    else:
        second = await agent.approvals.resolve(str(first.approval_id), approved=True)
    ends = [(result.finish_reason, result.text, result.messages, result.usage, result.tool_errors) for result in (first, second)]
    return hooked, saved, ends


async def _pay(args: Any) -> str:
    return "paid"


async def test_a_listener_that_raises_is_logged_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    # EVT-D5
    def listener(event: Event) -> None:
        raise ValueError("bad listener")

    result = await agent_of("Hello", on_event=listener).send("Hi")
    assert result.text == "Hello"
    assert sum("listener raised" in record.message for record in caplog.records) == 1


def test_an_async_listener_is_refused() -> None:
    # EVT-D5
    async def listener(event: Event) -> None: ...

    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", on_event=listener)
    assert caught.value.field == "on_event"


async def test_without_listeners_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    # EVT-13
    from lousho_ray.loop.emitter import Emitter

    def fail(self: Any, event: Any) -> None:
        raise AssertionError(event)

    monkeypatch.setattr(Emitter, "_send", fail)
    assert (await agent_of(calls("look"), "Done", tools=[plain("look")]).send("Hi")).text == "Done"


async def test_a_consumer_that_starts_late_gets_every_event() -> None:
    # EVT-06
    run = agent_of("Hello there").stream("Hi")
    await run.result
    assert names(await collect(run))[-1] == "run.done stop"


async def test_thousands_of_events_are_kept_for_a_consumer_that_waits_for_the_result_in_its_loop() -> None:
    # EVT-06
    provider = ScriptedStream([*[TextChunk("x") for _ in range(9_000)], FinishChunk("stop")])
    run = create_agent(provider=provider).stream("Hi")
    seen: list[Event] = []
    async for event in run:
        if not seen:
            assert len((await run.result).text) == 9_000
        seen.append(event)
    assert len(seen) == 9_000 + 5
    check_events(seen)


async def test_the_writer_waits_for_a_reader_that_is_far_behind_and_loses_nothing() -> None:
    provider = ScriptedStream([*[TextChunk("x") for _ in range(9_000)], FinishChunk("stop")])
    run = create_agent(provider=provider).stream("Hi")
    events = await collect(run)
    assert len(events) == 9_000 + 5


async def test_events_can_be_iterated_once() -> None:
    # EVT-07
    run = agent_of("Hello").stream("Hi")
    refused: list[LoushoError] = []

    def again() -> None:
        with pytest.raises(LoushoError) as caught:
            aiter(run)
        refused.append(caught.value)

    async for event in run:
        if event.type == "run.start":
            again()  # while the first loop is under way
    again()
    assert [error.code for error in refused] == ["LOUSHO_RUN_ALREADY_ITERATED"] * 2
    assert "Collect them in the first loop, or call stream() again" in refused[0].detail


async def test_usage_figures_of_events_are_those_of_the_result() -> None:
    # EVT-19, COST-09
    turns = (
        calls("look", usage={"input_tokens": 10, "output_tokens": 5}),
        {"text": "Done", "usage": {"input_tokens": 20, "output_tokens": 6}},
    )
    run = agent_of(*turns, tools=[plain("look")]).stream("Hi")
    events = await collect(run)
    steps = [event.to_dict()["usage"] for event in events if isinstance(event, StepDone)]
    assert [(usage["promptTokens"], usage["completionTokens"], usage["totalTokens"]) for usage in steps] == [
        (10, 5, 15),
        (20, 6, 26),
    ]
    assert [(usage["inputTokens"], usage["outputTokens"]) for usage in steps] == [(10, 5), (20, 6)]
    done = events[-1].to_dict()["usage"]
    assert (done["inputTokens"], done["outputTokens"], done["totalTokens"], done["modelCalls"]) == (30, 11, 41, 2)
    assert "costUsd" not in done  # the model has no known price
    result = await run.result
    assert result.usage.total_tokens == 41


async def test_a_result_nobody_awaits_makes_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    # EVT-04
    run = agent_of(RuntimeError("broken")).stream("Hi")
    await collect(run)
    del run
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_the_result_may_be_awaited_many_times_and_by_many() -> None:
    # EVT-02, EVT-D3
    gate = Gate("slow")
    run = agent_of(calls("slow"), "Done", tools=[gate.tool]).stream("Hi")
    waiting = [asyncio.ensure_future(_await(run)) for _ in range(3)]
    await gate.running.wait()
    waiting[0].cancel()  # a cancelled wait does not touch the run
    gate.go.set()
    first, second = await waiting[1], await waiting[2]
    assert first is second is await run.result
    assert first.text == "Done"
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def _await(run: Any) -> Any:
    return await run.result


@pytest.mark.parametrize("option", [{"max_steps": 0}, {"model_settings": {"temperature": 3}}, {"nonsense": 1}])
async def test_invalid_options_raise_before_there_is_a_handle(option: dict[str, Any]) -> None:
    # EVT-03, ERR-18, CA-27
    agent = agent_of("never")
    with pytest.raises(ConfigurationError):
        agent.stream("Hi", **option)
    with pytest.raises(ConfigurationError):
        agent.session().stream("Hi", **option)


def test_stream_needs_a_running_loop() -> None:
    # EVT-D4
    with pytest.raises(ConfigurationError, match="stream_sync"):
        agent_of("Hi").stream("Hi")
    with pytest.raises(ConfigurationError, match="stream_sync"):
        agent_of("Hi").session().stream("Hi")


@pytest.mark.parametrize("option", ["model", "instructions", "tools"])
async def test_a_resolver_that_raises_ends_the_stream_with_error_and_done(option: str) -> None:
    # RUN-09, TOOL-07, CA-15
    def fail(who: Any) -> Any:
        raise LookupError("not found")

    heard: list[Event] = []
    run = agent_of("never", on_event=heard.append, **{option: fail}).stream("Hi")
    events = await collect(run)
    assert names(events) == ["error ConfigurationError", "run.done error"]
    assert names(heard) == names(events)
    with pytest.raises(ConfigurationError) as caught:
        await run.result
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_RESOLVER_FAILED", option)
    assert isinstance(caught.value.__cause__, LookupError)


async def test_breaking_off_aborts_the_run_and_the_result_says_so() -> None:
    # EVT-05, EVT-D1
    provider = ScriptedStream([TextChunk("a"), TextChunk("b"), asyncio.Event()])
    run = create_agent(provider=provider).stream("Hi")
    async for event in run:
        if event.type == "text.delta":
            break
    result = await run.result
    assert result.finish_reason == "aborted"
    assert provider.closed == 1


async def test_leaving_the_block_aborts_and_waits_for_the_end() -> None:
    # EVT-02
    gate = Gate("slow")
    async with agent_of(calls("slow"), tools=[gate.tool]).stream("Hi") as run:
        await gate.running.wait()
    assert gate.cancelled == 1
    assert (await run.result).finish_reason == "aborted"


async def test_leaving_after_the_end_keeps_the_result() -> None:
    # EVT-05, SES-20
    async with agent_of("Hello").stream("Hi") as run:
        async for event in run:
            if isinstance(event, RunDone):
                break
    assert (await run.result).finish_reason == "stop"


def _hosted(**fields: Any) -> HostedToolCall:
    return HostedToolCall(**{"id": "h1", "name": "web_search", "args": {"q": "x"}, "result": {"hits": 1}, **fields})


@pytest.mark.parametrize("streamed", [True, False])
async def test_calls_that_the_provider_ran_come_before_the_text(streamed: bool) -> None:
    # EVT-18, RUN-D6
    call = _hosted()
    chunks = [HostedToolCallChunk(call), HostedToolResultChunk(call), *say("Found")]
    whole = PolicyProvider(lambda options: GenerateResult("Found", hosted_tool_calls=(call,)))
    run = create_agent(provider=ScriptedStream(chunks) if streamed else whole).stream("Hi")
    events = await collect(run)
    assert names(events)[2:6] == ["tool.start web_search", "tool.done web_search", "text.delta Found", "text.done Found"]
    assert [event.to_dict()["executedBy"] for event in events[2:4]] == ["provider", "provider"]
    assert (events[2].args, events[3].result) == ({"q": "x"}, {"hits": 1})
    result = await run.result
    assert (result.steps, result.tool_calls, result.usage.hosted_tool_calls) == (1, [], {"web_search": 1})


async def test_a_long_or_failed_result_of_a_hosted_call() -> None:
    # EVT-18
    long, failed = _hosted(result="x" * 30_000), _hosted(id="h2", result="no access", is_error=True)
    provider = PolicyProvider(lambda options: GenerateResult("Found", hosted_tool_calls=(long, failed)))
    events = await collect(create_agent(provider=provider).stream("Hi"))
    done = next(event for event in events if event.type == "tool.done")
    assert done.result.endswith("... [truncated 10002 characters]")
    error = next(event for event in events if event.type == "tool.error")
    assert (error.error.name, error.error.message, error.executed_by) == ("HostedToolError", "no access", "provider")


async def test_a_hosted_call_that_an_abort_cuts_off_has_an_end() -> None:
    # EVT-18
    provider = ScriptedStream([HostedToolCallChunk(_hosted(args=None)), asyncio.Event()])
    run = create_agent(provider=provider).stream("Hi")
    await provider.reached(0, 1).wait()
    run.abort()
    assert names(await collect(run))[2:] == [
        "tool.start web_search",
        "tool.error web_search",
        "step.done 1 aborted",
        "run.done aborted",
    ]
