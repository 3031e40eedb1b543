"""Failures that were met in the field with sessions, interrupts and approvals, rebuilt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import AgentDriftError, ResumeToolMissingError, StorageError
from lousho_ray.messages import ToolCall, assistant, tool_result, user
from lousho_ray.ports import FinishChunk, TextChunk
from lousho_ray.stores.memory import memory_store
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import Gate, ScriptedStream, agent_of, calls, check_transcript, kinds, plain, say, shape
from tests.unit.test_subagents_local import task, worker


async def test_an_interrupt_between_parallel_calls_leaves_a_transcript_that_every_provider_takes() -> None:
    # S01: what had finished keeps its real result, what had not says so
    store, slow = memory_store(), Gate("slow")
    agent = agent_of(calls("quick", "slow", "quick"), "Done", tools=[plain("quick"), slow.tool], store=store)
    run = agent.stream("Go", session_id="r")
    await slow.running.wait()
    while not ((await store.checkpoints.load("r")) or {}).get("settled"):
        await asyncio.sleep(0)
    run.abort()
    interrupted = await run.result
    check_transcript(interrupted.messages)
    assert kinds(interrupted.messages) == ["ok", "not-run", "ok"]
    result = await agent.send("Now this", session_id="r")
    assert result.text == "Done"
    check_transcript(result.messages)
    assert shape(result.messages)[-2:] == ["user:Now this", "assistant:Done"]


@pytest.mark.parametrize("lost", ["call", "result"])
async def test_a_damaged_transcript_does_not_break_the_next_turn(lost: str) -> None:
    # S01: somebody deleted one message of a pair
    call = ToolCall("c1", "look", "{}")
    asked, answered = assistant("", [call]), tool_result(call, '"seen"')
    told = [user("Go"), answered if lost == "call" else asked, assistant("Done")]
    store = memory_store()
    await store.sessions.save("s", told)
    session = agent_of("Yes", tools=[plain("look")], store=store).session("s")
    assert (await session.send("More")).text == "Yes"


async def test_decisions_on_two_children_with_the_same_tool_and_call_id_stay_apart() -> None:
    # S04: a decision is bound to its own pause, and another agent object may take it
    ran: list[int] = []

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pays."""
        ran.append(amount)
        return f"paid {amount}"

    def lead(*turns: Any, first: Any = (), second: Any = ()) -> Any:
        children = {"one": worker(*first, "One done", tools=[pay]), "two": worker(*second, "Two done", tools=[pay])}
        return agent_of(*turns, subagents=children, store=store)

    store = memory_store()
    agent = lead(
        calls(task("one"), task("two")), "never", first=[calls(("pay", {"amount": 1}))], second=[calls(("pay", {"amount": 2}))]
    )
    paused = await agent.session("s").send("Go")
    waiting = await agent.approvals.get(paused.approval_id)
    assert (waiting.subagent_path, dict(waiting.args)) == (("one",), {"amount": 1})
    result = await lead("All done", second=[calls(("pay", {"amount": 2}))]).approvals.resolve(paused.approval_id, approved=True)
    assert ran == [1]
    while result.approval_id is not None:  # the second child's call is a pause of its own
        again = await agent.approvals.get(result.approval_id)
        assert (again.subagent_path, dict(again.args)) == (("two",), {"amount": 2})
        result = await lead("All done").approvals.resolve(result.approval_id, approved=False)
    assert ran == [1]
    assert result.text == "All done"
    check_transcript(result.messages)


@pytest.mark.parametrize("change", ["arguments", "schema"])
async def test_what_was_approved_is_what_runs(change: str) -> None:
    # S07: the stored record is changed between the question and the answer, or the tool takes other arguments by now
    ran: list[Any] = []
    store = memory_store()

    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pays."""
        ran.append(amount)
        return "paid"

    def other(amount: str, to: str) -> str:
        """Pays somebody."""
        ran.append((amount, to))
        return "paid"

    agent = agent_of(calls(("pay", {"amount": 5})), "Done", tools=[pay], store=store)
    paused = await agent.session("s").send("Go")
    if change == "arguments":
        pending, snapshot = await store.approvals.load(paused.approval_id or "") or ({}, {})
        await store.approvals.save({**pending, "args": {"amount": 500}}, snapshot)
        with pytest.raises(StorageError, match="was changed"):
            await agent.approvals.resolve(paused.approval_id or "", approved=True)
        assert ran == []
        await agent.approvals.resolve(paused.approval_id or "", approved=True, args={"amount": 5})
        assert ran == [5]
    else:
        changed = tool(name="pay", needs_approval=True)(other)
        strict = agent_of("Done", tools=[changed], store=store, on_agent_drift="error")
        with pytest.raises(AgentDriftError):
            await strict.approvals.resolve(paused.approval_id or "", approved=True)
        result = await agent_of("Done", tools=[changed], store=store).approvals.resolve(paused.approval_id or "", approved=True)
        assert ran == []
        assert kinds(result.messages) == ["validation"]


async def test_steers_at_every_moment_are_kept_in_order_and_never_inside_a_pair() -> None:
    # S13 (a), (c)
    gates = [Gate(name) for name in ("a", "b", "c")]
    run = agent_of(calls("a", "b", "c"), "Done", tools=[gate.tool for gate in gates]).stream("Go")
    for gate in gates:
        await gate.running.wait()
    gates[0].go.set()
    steers = [run.steer(f"s{number}") for number in range(3)]
    for gate in gates:
        gate.go.set()
    result = await run.result
    assert [await steer.joined for steer in steers] == [True] * 3
    assert kinds(result.messages) == ["ok", "ok", "ok"]
    assert shape(result.messages)[2:] == [
        "assistant:+a,b,c",
        *("tool:a", "tool:b", "tool:c"),
        *("user:s0", "user:s1", "user:s2"),
        "assistant:Done",
    ]
    check_transcript(result.messages)


async def test_a_steer_into_the_final_text_or_after_it_does_not_vanish() -> None:
    # S13 (b), (d)
    go = asyncio.Event()
    provider = ScriptedStream([TextChunk("Do"), go, TextChunk("ne"), FinishChunk("stop")], say("Both"), say("Later"))
    agent = create_agent(provider=provider)
    session = agent.session("s", turn_policy="steer")
    first = session.stream("a")
    await provider.reached(0, 1).wait()
    joined = asyncio.ensure_future(session.send("b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    go.set()
    assert (await joined).text == "Both"
    late = first.steer("c")
    assert await late.joined is False  # the caller is told, and sends it again
    await session.send("c")
    assert shape(await session.load()) == [
        *("user:a", "assistant:Done", "user:b", "assistant:Both"),
        *("user:c", "assistant:Later"),
    ]


async def test_an_interrupt_before_the_run_has_begun_and_one_when_it_is_over() -> None:
    # S16
    agent = agent_of("never")
    run = agent.stream("Go")
    run.abort("too early")
    result = await run.result
    assert (result.finish_reason, result.abort_reason) == ("aborted", {"name": "AbortError", "message": "too early"})
    assert agent.definition.provider.calls == []  # type: ignore[union-attr]
    run.abort("again")
    assert (await run.result) is result
    over = agent_of("Done").stream("Go")
    assert (await over.result).ok
    over.abort()
    assert (await over.result).ok


async def test_an_interrupt_says_which_inputs_were_not_taken() -> None:
    # S16
    slow = Gate("slow")
    run = agent_of(calls("slow"), "never", tools=[slow.tool]).stream("Go")
    await slow.running.wait()
    queued = [run.enqueue(text) for text in "abc"]
    run.abort()
    assert (await run.result).finish_reason == "aborted"
    assert [await item.applied for item in queued] == [False] * 3
    assert len({item.id for item in queued}) == 3


async def test_nothing_of_an_interrupted_turn_reaches_the_stream_of_the_next() -> None:
    # S17
    never = asyncio.Event()
    provider = ScriptedStream([TextChunk("old "), TextChunk("news"), never, *say("old")], say("hello back"))
    session = create_agent(provider=provider).session()
    first = session.stream("Go")
    await provider.reached(0, 2).wait()
    first.abort()
    second = session.stream("hello")
    events = [event async for event in second]
    assert {event.run_id for event in events} == {second.run_id}
    assert [event.text for event in events if event.type == "text.delta"] == ["hello back"]
    assert second.run_id not in {event.run_id for event in [event async for event in first]}
    assert shape(provider.requests[1].messages)[1:] == ["user:hello"]


async def test_a_session_is_readable_under_another_agent_and_a_missing_tool_is_named() -> None:
    # S19
    store = memory_store()

    @tool(needs_approval=True)
    def pay() -> str:
        """Pays."""
        return "paid"

    agent = agent_of(calls("look"), "Done", calls("pay"), tools=[pay, plain("look")], store=store)
    await agent.session("s").send("Look")
    paused = await agent.session("s").send("Pay")
    changed = agent_of("Old history, new answer", store=store, name="other", output=list[int])
    with pytest.raises(ResumeToolMissingError, match="pay"):
        await changed.approvals.resolve(paused.approval_id or "", approved=True)
    session = changed.session("s")
    assert [step.tool_calls[0].name for step in await session.history() if step.tool_calls] == ["look"]
    await session.discard_pending()
    answered = agent_of("Old history, new answer", store=store)
    assert (await answered.session("s").send("And?")).text == "Old history, new answer"


@pytest.mark.parametrize("results", [["x" * 3_000] * 5, ["42"]])
async def test_a_steer_is_a_message_of_its_own_behind_results_that_are_cut(results: list[str]) -> None:
    # S20
    gate = Gate("slow", results[0])
    others = [plain(f"quick{number}", text) for number, text in enumerate(results[1:])]
    names = [f"quick{number}" for number in range(len(others))]
    model_turns = (calls("slow", *names), "Done")
    run = agent_of(*model_turns, tools=[gate.tool, *others], max_tool_result_chars=2_000).stream("Go")
    await gate.running.wait()
    wish = "Stop here. " + "y" * 5_000
    run.steer(wish)
    gate.go.set()
    result = await run.result
    told = result.messages[-(len(results) + 2) :]
    assert [message.role for message in told] == [*["tool"] * len(results), "user", "assistant"]
    assert told[-2].text == wish
    assert all(wish[:10] not in message.text for message in told[:-2])
    if len(results) == 1:
        assert json.loads(told[0].text) == "42"
    else:
        assert all(len(message.text) < 2_500 for message in told[:-2])
