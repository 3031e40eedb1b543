"""`agent.send(input, session_id=...)` and `agent.resume(id)`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import (
    CompactedError,
    CompactedLLMProviderError,
    ConfigurationError,
    LoushoError,
    PropagatingToolError,
    SessionAwaitingApprovalError,
)
from lousho_ray.messages import Message, system, user
from lousho_ray.ports import ToolContext
from lousho_ray.run_forks import get_checkpoint_history
from lousho_ray.stores.memory import MemorySessionStore, memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import Gate, agent_of, calls, check_transcript, names, shape


def failure() -> CompactedLLMProviderError:
    return CompactedLLMProviderError("It failed.", compacted=CompactedError("server-error", "It failed.", status=500))


@tool
def mark(name: str = "a") -> str:
    """Marks."""
    return f"marked {name}"


@tool(needs_approval=True)
def guarded(ctx: ToolContext) -> str:
    """Needs a person."""
    return f"guarded in {ctx.session_id}"


class SessionsOnly:
    sessions = MemorySessionStore()


@pytest.mark.parametrize("store", [None, SessionsOnly()])
async def test_an_id_needs_a_store_with_checkpoints(store: Any) -> None:
    # DUR-01, DUR-27
    agent = agent_of("Hi", **({} if store is None else {"store": store}))
    with pytest.raises(ConfigurationError) as raised:
        await agent.send("Hi", session_id="r")
    assert raised.value.code == "LOUSHO_CONFIG_MISSING_CHECKPOINT_STORE"
    with pytest.raises(ConfigurationError):
        agent.stream("Hi", session_id="r")
    with pytest.raises(ConfigurationError):
        await agent.resume("r")


@pytest.mark.parametrize("id", ["", ".x", "a/b", "a" * 161, 3])
async def test_an_id_that_cannot_be_one_is_refused(id: Any) -> None:
    # DUR-D1
    with pytest.raises(ConfigurationError) as raised:
        await agent_of("Hi", store=memory_store()).send("Hi", session_id=id)
    assert raised.value.code == "LOUSHO_SESSION_ID_INVALID"


async def test_a_finished_run_is_a_conversation_that_goes_on() -> None:
    # DUR-14, DUR-24, DUR-54
    store = memory_store()
    agent = agent_of(calls("mark"), "One", "Two", tools=[mark], store=store, instructions="First words.")
    first = await agent.send("Hi", session_id="r")
    saved = await store.checkpoints.load("r")
    assert saved is not None
    assert saved["status"] == "finished"
    assert saved["finishReason"] == "stop"
    changed = agent_of("Two", tools=[mark], store=store, instructions="Other words.")
    second = await changed.send("Again", session_id="r")
    assert shape(second.messages) == [*shape(first.messages), "user:Again", "assistant:Two"]
    assert second.messages[0].text == first.messages[0].text  # DUR-25: it keeps its system prompt
    assert (second.steps, len(second.tool_calls)) == (1, 0)
    assert shape(second.new_messages) == ["user:Again", "assistant:Two"]
    assert await store.sessions.load("r") is None


async def test_input_that_repeats_the_history_adds_what_is_new() -> None:
    # DUR-25
    store = memory_store()
    agent = agent_of("One", "Two", store=store)
    first = await agent.send("Hi", session_id="r")
    result = await agent.send([*first.messages, user("Again")], session_id="r")
    assert shape(result.messages)[1:] == ["user:Hi", "assistant:One", "user:Again", "assistant:Two"]
    third = agent_of("Three", store=store)
    result = await third.send([system("Ignored."), user("More")], session_id="r")
    assert shape(result.messages)[-2:] == ["user:More", "assistant:Three"]
    assert [message.role for message in result.messages].count("system") == 1


async def test_an_unfinished_run_goes_on_without_asking_again() -> None:
    # DUR-20, DUR-21, DUR-23, DUR-31
    store = memory_store()
    model = mock_model([calls("mark"), failure(), "Done"])
    agent = create_agent(provider=model, tools=[mark], store=store)
    with pytest.raises(CompactedLLMProviderError):
        await agent.send("Hi", session_id="r")
    result = await agent.send("Hi", session_id="r")  # a retry
    assert shape(result.messages)[1:] == ["user:Hi", "assistant:+mark", "tool:mark", "assistant:Done"]
    assert len(model.calls) == 3
    assert (result.steps, len(result.tool_calls)) == (2, 1)
    assert await agent.resume("r") is None


async def test_new_input_joins_behind_the_open_calls_of_an_unfinished_run() -> None:
    # DUR-22, DUR-30, DUR-32
    store = memory_store()
    ids: list[str] = []

    @tool
    def flaky(ctx: ToolContext) -> str:
        """Fails once."""
        ids.append(ctx.tool_call_id)
        if len(ids) == 1:
            raise PropagatingToolError("Stop everything.")
        return "fine"

    agent = agent_of(calls("mark", "flaky", "mark"), failure(), "Done", tools=[mark, flaky], store=store)
    with pytest.raises(PropagatingToolError):
        await agent.send("Hi", session_id="r")
    with pytest.raises(CompactedLLMProviderError):
        await agent.send("And this", session_id="r")
    result = await agent.resume("r")
    assert result is not None
    expected = ["user:Hi", "assistant:+mark,flaky,mark", "tool:mark", "tool:flaky", "tool:mark", "user:And this", "assistant:Done"]
    assert shape(result.messages)[1:] == expected
    assert ids[0] == ids[1]
    assert len(ids) == 2
    check_transcript(result.messages)


async def test_input_given_to_an_unfinished_run_is_not_lost_when_it_fails_again() -> None:
    # DUR-18
    store = memory_store()
    agent = agent_of(failure(), failure(), "Done", store=store)
    for text in ("Hi", "More"):
        with pytest.raises(CompactedLLMProviderError):
            await agent.send(text, session_id="r")
    result = await agent.send([], session_id="r")  # DUR-23: an empty list just resumes
    assert shape(result.messages)[1:] == ["user:Hi", "user:More", "assistant:Done"]


async def test_an_aborted_run_can_be_taken_up_with_other_input() -> None:
    # DUR-13, DUR-36, DUR-D5
    store = memory_store()
    gate = Gate("slow")
    agent = agent_of(calls("slow"), "Done", tools=[gate.tool], store=store)
    run = agent.stream("Hi", session_id="r")
    await gate.running.wait()
    run.abort()
    aborted = await run.result
    assert aborted.finish_reason == "aborted"
    saved = await store.checkpoints.load("r")
    assert saved is not None
    assert saved["status"] == "in-progress"
    result = await agent.send("Do this instead", session_id="r")
    assert shape(result.messages)[1:] == ["user:Hi", "assistant:+slow", "tool:slow", "user:Do this instead", "assistant:Done"]
    check_transcript(result.messages)


async def test_a_paused_run_takes_no_input_and_goes_on_with_the_decision() -> None:
    # DUR-26, DUR-27, APR-25, APR-54
    store = memory_store()
    model = mock_model([calls("mark", "guarded", "mark"), "Done"])
    agent = create_agent(provider=model, tools=[mark, guarded], store=store)
    paused = await agent.send("Hi", session_id="r")
    assert [one.id for one in await agent.approvals.list()] == [paused.approval_id]
    other = create_agent(provider=model, tools=[mark, guarded], store=store)
    for refused in (
        lambda: other.send("More", session_id="r"),
        lambda: other.resume("r"),
        lambda: agent.stream("x", session_id="r").result,
    ):
        with pytest.raises(SessionAwaitingApprovalError) as raised:
            await refused()
        assert (raised.value.session_id, raised.value.approval_id) == ("r", paused.approval_id)
    assert len(model.calls) == 1
    result = await other.approvals.resolve(str(paused.approval_id), approved=True)
    assert result.text == "Done"
    assert "guarded in r" in str([message.text for message in result.messages])
    saved = await store.checkpoints.load("r")
    assert saved is not None
    assert saved["status"] == "finished"
    check_transcript([Message.from_dict(message) for message in saved["messages"]])
    with pytest.raises(LoushoError):
        await agent.approvals.resolve(str(paused.approval_id), approved=True)


async def test_deleting_the_checkpoint_starts_over_and_orphans_a_pause() -> None:
    # DUR-28, APR-26
    store = memory_store()
    agent = agent_of(calls("guarded"), "Fresh", tools=[guarded], store=store)
    paused = await agent.send("Hi", session_id="r")
    await store.checkpoints.delete("r")
    with pytest.raises(LoushoError) as raised:
        await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert raised.value.code == "LOUSHO_APPROVAL_ORPHANED"
    result = await agent.send("New", session_id="r")
    assert shape(result.messages)[1:] == ["user:New", "assistant:Fresh"]


async def test_another_principal_cannot_go_on_with_an_unfinished_run() -> None:
    # DUR-09
    store, seen = memory_store(), list[Any]()

    @tool
    def who(ctx: ToolContext) -> str:
        """Who."""
        seen.append((ctx.principal, ctx.metadata))
        return "ok"

    agent = agent_of(failure(), calls("who"), "Done", tools=[who], store=store)
    with pytest.raises(CompactedLLMProviderError):
        await agent.send("Hi", session_id="r", principal={"id": "ann"}, metadata={"k": 1})
    with pytest.raises(ConfigurationError) as raised:
        await agent.send("Hi", session_id="r", principal={"id": "bob"})
    assert raised.value.field == "principal"
    await agent.resume("r")
    assert seen == [({"id": "ann"}, {"k": 1})]


async def test_two_runs_of_one_id_at_once_are_refused() -> None:
    # DUR-29, DUR-D1
    store = memory_store()
    gate = Gate("slow")
    agent = agent_of(calls("slow"), "Done", tools=[gate.tool], store=store)
    first = asyncio.ensure_future(agent.send("Hi", session_id="r"))
    second = asyncio.ensure_future(agent.send("Hi", session_id="r"))
    with pytest.raises(LoushoError) as raised:
        await second
    assert raised.value.code == "LOUSHO_SESSION_BUSY"
    await gate.running.wait()
    with pytest.raises(LoushoError):
        await agent_of("x", store=store).resume("r")
    gate.go.set()
    assert (await first).text == "Done"
    assert await agent.resume("r") is None


async def test_resume_finishes_a_run_before_a_turn_of_the_session() -> None:
    # SES-56
    store = memory_store()
    agent = agent_of(failure(), failure(), "Run", "Turn", store=store)
    with pytest.raises(CompactedLLMProviderError):
        await agent.send("Run me", session_id="x")
    with pytest.raises(CompactedLLMProviderError):
        await agent.session("x").send("Turn me")
    texts = [result.text for result in [await agent.resume("x"), await agent.resume("x")] if result is not None]
    assert texts == ["Run", "Turn"]
    assert await agent.resume("x") is None
    assert await agent.resume("x.fork-1") is None  # DUR-D1


async def test_a_paused_turn_of_the_session_locks_the_id() -> None:
    # SES-57
    store = memory_store()
    agent = agent_of("One", calls("guarded"), tools=[guarded], store=store)
    session = agent.session("x")
    await session.send("Hi")
    paused = await session.send("Again")
    for refused in (lambda: agent.send("New", session_id="x"), lambda: agent.stream("New", session_id="x").result):
        with pytest.raises(SessionAwaitingApprovalError) as raised:
            await refused()
        assert raised.value.approval_id == paused.approval_id


async def test_events_of_a_durable_run() -> None:
    # EVT-11
    heard: list[Any] = []
    agent = agent_of(calls("mark"), "Done", tools=[mark], store=memory_store(), on_event=heard.append)
    events = [event async for event in agent.stream("Hi", session_id="r")]
    assert names(events)[0] == "run.start"
    assert names(events)[-1] == "run.done stop"
    assert names(heard) == names(events)


async def test_other_options_of_the_call_count_for_a_resume_too() -> None:
    # DUR-21
    store = memory_store()
    agent = agent_of(calls("mark"), failure(), "never", tools=[mark], store=store)
    with pytest.raises(CompactedLLMProviderError):
        await agent.send("Hi", session_id="r")
    result = await agent.send([], session_id="r", max_steps=1)
    assert (result.finish_reason, result.steps) == ("max-steps", 1)


# --------------------------------------------------------------------------------------------------------- history and forks


async def two_steps(store: Any, *turns: Any, **options: Any) -> Any:
    agent = agent_of(calls("mark", "mark"), "Done", *turns, tools=[mark, guarded], store=store, **options)
    await agent.send("Hi", session_id="r")
    return agent


async def test_the_history_of_a_run_is_newest_first() -> None:
    # DUR-46, DUR-47
    store = memory_store()
    await two_steps(store)
    entries = await get_checkpoint_history(store, "r")
    assert entries is not None
    assert (entries[0]["step"], entries[0]["status"]) == (2, "finished")
    assert [entry["step"] for entry in entries] == sorted((entry["step"] for entry in entries), reverse=True)
    assert set(entries[0]) == {"step", "saved_at", "status", "checkpoint"}
    assert await get_checkpoint_history(store.checkpoints, "r", limit=1) == entries[:1]
    assert await get_checkpoint_history(store, "none") == []
    assert await get_checkpoint_history(SessionsOnly(), "r") is None


async def test_a_fork_runs_on_from_a_step_and_leaves_the_source_alone() -> None:
    # DUR-49, DUR-50, DUR-51, DUR-52
    store = memory_store()
    agent = await two_steps(store, "Other end")
    before = await store.checkpoints.load("r")
    fork = await agent.fork("r", 1, patch={"tool_result": {"tool_call_id": "call_2", "result": 7}, "append_input": "Be quick."})
    assert (fork.session_id, fork.step) == ("r.fork-1", 1)
    result = await agent.resume(fork.session_id)
    called = ["assistant:+mark,mark", "tool:mark", "tool:mark"]
    assert shape(result.messages)[1:] == ["user:Hi", *called, "user:Be quick.", "assistant:Other end"]
    assert [message.text for message in result.messages if message.role == "tool"] == ['"marked a"', "7"]
    assert result.steps == 2
    assert await store.checkpoints.load("r") == before
    assert (await agent.fork("r", 1)).session_id == "r.fork-2"
    assert (await agent.fork("r", 1, new_session_id="mine")).session_id == "mine"
    with pytest.raises(ConfigurationError) as raised:
        await agent.fork("r", 1, new_session_id="mine")
    assert raised.value.field == "new_session_id"


async def test_a_fork_of_a_pause_asks_again() -> None:
    # DUR-51
    store = memory_store()
    agent = agent_of(calls("guarded"), "Done", tools=[guarded], store=store)
    paused = await agent.send("Hi", session_id="r")
    fork = await agent.fork("r", 1)
    assert "approvalId" not in fork.checkpoint
    again = await agent.resume(fork.session_id)
    assert again.finish_reason == "awaiting-approval"
    assert again.approval_id != paused.approval_id
    forked = await agent.fork("r", 1, patch={"tool_result": {"tool_call_id": "call_1", "result": "given"}})
    assert '"given"' in [message.text for message in (await agent.resume(forked.session_id)).messages]


async def test_forks_that_cannot_be_made() -> None:
    # DUR-52
    store = memory_store()
    agent = await two_steps(store)
    with pytest.raises(LoushoError) as raised:
        await agent.fork("r", 9)
    assert raised.value.code == "LOUSHO_CHECKPOINT_NOT_FOUND"
    assert "0, 1, 2" in str(raised.value)
    for patch, field in (
        ({"tool_reslt": 1}, "patch.tool_reslt"),
        ({"messages": []}, "patch.messages"),
        ({"tool_result": {"tool_call_id": "call_1"}}, "patch.tool_result"),
        ({"tool_result": {"tool_call_id": "x", "result": 1}}, "patch.tool_result.tool_call_id"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            await agent.fork("r", 1, patch=patch)
        assert refused.value.field == field
    with pytest.raises(ConfigurationError) as refused:
        await agent.fork("r", 2)
    assert refused.value.field == "patch.append_input"


# ------------------------------------------------------------------------------------------------------------------ deciders


async def test_of_two_deciders_of_a_durable_run_one_wins() -> None:
    # APR-18
    agent = agent_of(calls("guarded"), "Done", tools=[guarded], store=memory_store())
    paused = await agent.send("Hi", session_id="r")
    both = (agent.approvals.resolve(paused.approval_id or "", approved=approved) for approved in (True, False))
    won, lost = await asyncio.gather(*both, return_exceptions=True)
    assert not isinstance(won, BaseException)
    assert won.text == "Done"
    assert isinstance(lost, LoushoError)
    assert lost.code == "LOUSHO_APPROVAL_NOT_FOUND"


# ------------------------------------------------------------------------------------------------------------- business state


async def kept(store: Any, id: str = "r") -> Any:
    return (await store.checkpoints.load(id)).get("businessState")


async def test_business_state_is_kept_as_given_until_it_is_replaced_or_cleared() -> None:
    # DUR-08, DUR-05
    store = memory_store()
    agent = agent_of(calls("guarded"), "One", "Two", "Three", tools=[guarded], store=store)
    given = {"order": 7, "scan": b"\x00", "lines": [None, 1.5]}
    paused = await agent.send("Hi", session_id="r", business_state=given)
    assert await kept(store) == {"order": 7, "scan": {"$bytes": "AA=="}, "lines": [None, 1.5]}
    await agent.approvals.resolve(paused.approval_id or "", approved=True)
    assert (await kept(store))["order"] == 7  # a decision goes on with it
    await agent.send("More", session_id="r")
    assert (await kept(store))["order"] == 7
    await agent.send("More", session_id="r", business_state="other")
    assert await kept(store) == "other"


@pytest.mark.parametrize(("option", "expected"), [({}, {"order": 7}), ({"business_state": None}, None), ({"business_state": 8}, 8)])
@pytest.mark.parametrize("how", ["resume", "send", "stream"])
async def test_business_state_of_an_unfinished_run(option: dict[str, Any], expected: Any, how: str) -> None:
    # DUR-08
    store = memory_store()
    agent = agent_of(calls("mark"), failure(), "Done", tools=[mark], store=store)
    with pytest.raises(CompactedLLMProviderError):
        await agent.send("Hi", session_id="r", business_state={"order": 7})
    if how == "resume":
        await agent.resume("r", **option)
    elif how == "send":
        await agent.send("Hi", session_id="r", **option)
    else:
        await agent.stream("Hi", session_id="r", **option).result
    assert await kept(store) == expected


async def test_business_state_of_a_fork() -> None:
    # DUR-50, DUR-08
    store = memory_store()
    agent = agent_of(calls("mark"), "Done", tools=[mark], store=store)
    await agent.send("Hi", session_id="r", business_state={"order": 7})
    assert await kept(store, (await agent.fork("r", 1)).session_id) == {"order": 7}
    assert await kept(store, (await agent.fork("r", 1, patch={"business_state": [8]})).session_id) == [8]
    assert await kept(store, (await agent.fork("r", 1, patch={"business_state": None})).session_id) is None


async def test_business_state_needs_a_run_that_is_kept() -> None:
    with pytest.raises(ConfigurationError) as raised:
        await agent_of("Hi").send("Hi", business_state=1)
    assert raised.value.field == "business_state"
