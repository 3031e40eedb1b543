"""Durable sessions in one process: what a turn leaves in the store at each moment, and how a later call goes on with it."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import (
    CompactedError,
    CompactedLLMProviderError,
    ConfigurationError,
    LoushoError,
    PropagatingToolError,
    ResumeToolMissingError,
    SessionAwaitingApprovalError,
    SessionTurnFailedError,
    StorageError,
)
from lousho_ray.messages import Message
from lousho_ray.ports import ToolContext
from lousho_ray.stores.json_form import FixedJson, split
from lousho_ray.stores.memory import InMemoryCheckpointStore, MemoryStore, memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import Gate, PolicyProvider, agent_of, calls, check_transcript, kinds, names, results, shape


def failure(category: str = "server-error", status: int | None = 500) -> CompactedLLMProviderError:
    return CompactedLLMProviderError("It failed.", compacted=CompactedError(category, "It failed.", status=status))


@tool
def mark(name: str = "a") -> str:
    """Marks."""
    return f"marked {name}"


@tool(needs_approval=True)
def guarded(name: str = "a") -> str:
    """Needs a person."""
    return f"guarded {name}"


async def checkpoint(store: MemoryStore, turn: int = 0, id: str = "s") -> dict[str, Any] | None:
    return await store.checkpoints.load(f"{id}.turn-{turn}")


async def saved_input(store: MemoryStore, text: str) -> None:
    """Waits until the checkpoint has an input at its end."""
    record = await checkpoint(store)
    while record is None or record["messages"][-1].get("content") != text:
        await asyncio.sleep(0)
        record = await checkpoint(store)


# ---------------------------------------------------------------------------------------------------------- what is written


class Watching(InMemoryCheckpointStore):
    """Keeps every record that is saved, and can hold or fail saves."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []
        self.fail_at: int | None = None

    async def save(self, checkpoint: Any, /) -> None:
        if self.fail_at == len(self.records):
            raise StorageError("The disk is full.")
        self.records.append(json.loads(json.dumps(checkpoint)))
        await super().save(checkpoint)


class WatchedStore:
    def __init__(self) -> None:
        inner = memory_store()
        self.sessions, self.checkpoints, self.approvals = inner.sessions, Watching(), inner.approvals


async def test_a_turn_is_written_down_before_its_tools_and_after_each_result() -> None:
    # SES-44, DUR-05, DUR-07, DUR-11, DUR-12, DUR-14
    store = WatchedStore()
    agent = agent_of(calls(("mark", {"name": "a"}), ("mark", {"name": "b"})), "Done", tools=[mark], store=store)
    result = await agent.session("s").send("Hi", metadata={"k": 1}, principal={"id": "u"})
    records = store.checkpoints.records
    assert {record["sessionId"] for record in records} == {"s.turn-0"}
    assert [record["status"] for record in records][-1] == "finished"
    assert {record["status"] for record in records[:-1]} == {"in-progress"}
    shapes = [shape([Message.from_dict(message) for message in record["messages"]])[1:] for record in records]
    assert shapes[0] == ["user:Hi"]
    assert shapes[1] == ["user:Hi", "assistant:+mark,mark"]
    assert shapes[-1] == shape(result.messages)[1:]
    assert [len(one) for one in shapes] == sorted(len(one) for one in shapes)
    assert [record["revision"] for record in records] == list(range(1, len(records) + 1))
    last = records[-2]
    assert last["metadata"] == {"k": 1}
    assert last["principal"] == {"id": "u"}
    assert last["agentFingerprint"]["hash"]
    assert last["stepIndex"] == 1
    assert await store.checkpoints.load("s.turn-0") is None  # DUR-54


async def test_a_failed_save_fails_the_turn_which_goes_on_from_the_last_good_one() -> None:
    # DUR-17, SES-55
    store = WatchedStore()
    ran: list[str] = []

    @tool
    def note(name: str) -> str:
        """Notes."""
        ran.append(name)
        return name

    agent = agent_of(calls(("note", {"name": "a"})), "Done", tools=[note], store=store)
    session = agent.session("s")
    store.checkpoints.fail_at = 2  # the one with the result
    with pytest.raises(StorageError, match="disk is full"):
        await session.send("Hi")
    store.checkpoints.fail_at = None
    result = await session.resume()
    assert result is not None
    assert result.text == "Done"
    assert ran == ["a", "a"]  # DUR-33
    assert shape(await session.load()) == ["user:Hi", "assistant:+note", "tool:note", "assistant:Done"]


async def test_bytes_in_messages_survive() -> None:
    # DUR-06
    from lousho_ray.messages import ImagePart

    store = memory_store()
    agent = agent_of(failure(), "Done", store=store)
    session = agent.session("s")
    with pytest.raises(CompactedLLMProviderError):
        await session.send([ImagePart(b"\x00\x01", "image/png")])
    assert json.dumps(await checkpoint(store))
    await session.resume()
    part: Any = (await session.load())[0].content[0]
    assert part.image == b"\x00\x01"


# ------------------------------------------------------------------------------------------------------------------ failures


async def test_a_turn_that_failed_in_a_passing_way_is_finished_ahead_of_the_next_one() -> None:
    # SES-48, SES-55, SES-D3, DUR-15, DUR-31
    store = memory_store()
    agent = agent_of(calls("mark"), failure(), "First done", "Second done", tools=[mark], store=store)
    session = agent.session("s")
    with pytest.raises(CompactedLLMProviderError):
        await session.send("First")
    pending = await session.pending()
    assert pending is not None
    assert pending.status == "in-progress"
    assert await session.load() == []
    events = [event async for event in session.stream("Second")]
    assert shape(await session.load()) == [
        "user:First",
        "assistant:+mark",
        "tool:mark",
        "assistant:First done",
        "user:Second",
        "assistant:Second done",
    ]
    assert names(events) == [  # EVT-47: nothing of the first turn
        "run.start",
        "step.start 1",
        "text.delta Second ",
        "text.delta done",
        "text.done Second done",
        "step.done 1 stop",
        "run.done stop",
    ]
    assert await session.pending() is None


@pytest.mark.parametrize(
    ("category", "status"),
    [("auth-failure", 401), ("context-length-exceeded", 400), ("invalid-request", 400), ("unknown", 404), ("unknown", 422)],
)
async def test_a_turn_that_failed_for_good_is_not_retried_unasked(category: str, status: int) -> None:
    # SES-D3
    store = memory_store()
    model = mock_model([failure(category, status), failure(category, status), "Done"])
    session = create_agent(provider=model, store=store).session("s")
    with pytest.raises(CompactedLLMProviderError):
        await session.send("Hi")
    for _ in range(2):
        with pytest.raises(SessionTurnFailedError) as raised:
            await session.send("Again")
        assert raised.value.code == "LOUSHO_SESSION_TURN_FAILED"
        assert raised.value.attempts == 1
        assert raised.value.last_error is not None
    assert len(model.calls) == 1
    with pytest.raises(CompactedLLMProviderError):
        await session.resume()
    pending = await session.pending()
    assert pending is not None
    assert pending.attempts == 2
    result = await session.resume()
    assert result is not None
    assert result.text == "Done"
    assert shape(await session.load()) == ["user:Hi", "assistant:Done"]


@pytest.mark.parametrize(
    ("category", "status"), [("rate-limited", 429), ("timeout", 408), ("server-error", 503), ("network", None)]
)
async def test_other_failures_are_retried_with_the_next_call(category: str, status: int | None) -> None:
    # SES-D3, SES-48
    session = agent_of(failure(category, status), "One", "Two", store=memory_store()).session("s")
    with pytest.raises(CompactedLLMProviderError):
        await session.send("Hi")
    assert (await session.send("Again")).text == "Two"
    assert shape(await session.load()) == ["user:Hi", "assistant:One", "user:Again", "assistant:Two"]


async def test_a_failed_turn_can_be_dropped() -> None:
    # SES-53, SES-D3
    store = memory_store()
    session = agent_of(failure("auth-failure", 401), "Two", store=store).session("s")
    await session.discard_pending()  # nothing to do
    with pytest.raises(CompactedLLMProviderError):
        await session.send("Hi")
    await session.discard_pending()
    assert await session.pending() is None
    assert await store.checkpoints.history("s.turn-0") == []
    assert await session.resume() is None
    await session.send("Again")
    assert shape(await session.load()) == ["user:Again", "assistant:Two"]


async def test_a_tool_error_that_ends_the_run_leaves_it_resumable() -> None:
    # DUR-15
    tries: list[str] = []

    @tool
    def flaky(ctx: ToolContext) -> str:
        """Fails the first time."""
        tries.append(ctx.tool_call_id)
        if len(tries) == 1:
            raise PropagatingToolError("Stop everything.")
        return "fine"

    session = agent_of(calls("mark", "flaky"), "Done", tools=[mark, flaky], store=memory_store()).session("s")
    with pytest.raises(PropagatingToolError):
        await session.send("Hi")
    result = await session.resume()
    assert result is not None
    assert tries[0] == tries[-1]
    check_transcript(await session.load())
    assert result.usage.total_tokens == sum(entry.usage.total_tokens for entry in result.step_usage)  # DUR-21
    assert result.steps == 2


async def test_max_steps_of_a_resumed_turn_are_what_is_left() -> None:
    # DUR-21
    session = agent_of(calls("mark"), failure(), calls("mark"), "never", tools=[mark], store=memory_store(), max_steps=2).session(
        "s"
    )
    with pytest.raises(CompactedLLMProviderError):
        await session.send("Hi")
    result = await session.resume()
    assert result is not None
    assert (result.finish_reason, result.steps) == ("max-steps", 2)


async def test_nothing_is_pending_in_a_session_that_is_not_durable() -> None:
    # DUR-02, SES-22
    session = agent_of(failure(), "Done").session("s")
    with pytest.raises(CompactedLLMProviderError):
        await session.send("Hi")
    assert await session.pending() is None
    assert await session.resume() is None


async def test_an_aborted_turn_is_dropped_with_its_checkpoint() -> None:
    # SES-54
    store = memory_store()
    gate = Gate("slow")
    session = agent_of(calls("slow"), "Done", tools=[gate.tool], store=store).session("s")
    run = session.stream("Hi")
    await gate.running.wait()
    assert await checkpoint(store) is not None
    run.abort()
    gate.go.set()
    assert (await run.result).finish_reason == "aborted"
    assert await checkpoint(store) is None
    assert await session.load() == []


# -------------------------------------------------------------------------------------------------------------- queued input


@pytest.mark.parametrize("how", ["enqueue", "steer"])
async def test_input_that_waits_is_in_the_checkpoint_at_once_and_joins_on_resume(how: str) -> None:
    # SES-38, SES-43, DUR-18, DUR-22
    store = memory_store()
    gate = Gate("slow")
    session = agent_of(calls("slow"), failure(), "Done", tools=[gate.tool, mark], store=store).session("s")
    run = session.stream("Hi")
    await gate.running.wait()
    added = getattr(run, how)("More")

    await saved_input(store, "More")
    gate.go.set()
    with pytest.raises(CompactedLLMProviderError):
        await run.result
    assert await added.applied is True  # it had joined before the call that failed
    await session.resume()
    assert shape(await session.load()) == ["user:Hi", "assistant:+slow", "tool:slow", "user:More", "assistant:Done"]


async def test_input_behind_open_calls_joins_after_their_results() -> None:
    # DUR-22, DUR-32, SES-33
    store = memory_store()
    gate = Gate("slow")
    tries = 0

    @tool
    def flaky() -> str:
        """Fails the first time."""
        nonlocal tries
        tries += 1
        if tries == 1:
            raise PropagatingToolError("Stop everything.")
        return "fine"

    session = agent_of(calls("slow", "flaky"), "Done", tools=[gate.tool, flaky], store=store).session("s", turn_policy="queue")
    first = asyncio.ensure_future(session.send("Hi"))
    await gate.running.wait()
    second = asyncio.ensure_future(session.send("More"))
    await saved_input(store, "More")
    gate.go.set()
    errors = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(error) for error in errors] == [PropagatingToolError, PropagatingToolError]
    await session.resume()
    saved = await session.load()
    assert shape(saved) == ["user:Hi", "assistant:+slow,flaky", "tool:slow", "tool:flaky", "user:More", "assistant:Done"]
    check_transcript(saved)


async def test_a_turn_that_pauses_gives_waiting_input_back_to_its_sender() -> None:
    # SES-32, SES-37, SES-38
    store = memory_store()
    gate = Gate("slow")
    agent = agent_of(calls("slow", "guarded"), "Done", tools=[gate.tool, guarded], store=store)
    session = agent.session("s", turn_policy="queue")
    first = asyncio.ensure_future(session.send("Hi"))
    await gate.running.wait()
    second = asyncio.ensure_future(session.send("More"))
    await saved_input(store, "More")
    gate.go.set()
    paused = await first
    assert paused.finish_reason == "awaiting-approval"
    with pytest.raises(SessionAwaitingApprovalError):
        await second
    result = await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert "user:More" not in shape(result.messages)
    assert "user:More" not in shape(await session.load())


async def test_input_that_came_too_late_does_not_bring_a_paused_turn_back() -> None:
    # SES-38, DUR-16: the save of queued input may not land behind the pause
    store = WatchedStore()
    reached, go = asyncio.Event(), asyncio.Event()
    save = store.approvals.save

    async def slow_save(pending: Any, snapshot: Any, /) -> None:
        reached.set()
        await go.wait()
        await save(pending, snapshot)

    store.approvals.save = slow_save  # type: ignore[method-assign]
    session = agent_of(calls("guarded"), "Done", tools=[guarded], store=store).session("s")
    run = session.stream("Hi")
    await reached.wait()
    late = run.enqueue("Late")
    go.set()
    assert (await run.result).finish_reason == "awaiting-approval"
    assert await late.applied is False
    assert store.checkpoints.records[-1]["status"] == "awaiting-approval"
    pending = await session.pending()
    assert pending is not None
    assert pending.status == "awaiting-approval"


# ------------------------------------------------------------------------------------------------------- pauses of sessions


async def test_a_paused_turn_locks_its_session() -> None:
    # SES-46, SES-49, SES-50, DUR-26
    store = memory_store()
    model = mock_model([calls("guarded"), "Done"])
    agent = create_agent(provider=model, tools=[guarded], store=store)
    session = agent.session("s")
    paused = await session.send("Hi")
    assert paused.finish_reason == "awaiting-approval"
    assert await session.load() == []
    record = await checkpoint(store)
    assert record is not None
    assert (record["status"], record["approvalId"], record["approvalKind"]) == ("awaiting-approval", paused.approval_id, "tool")
    for handle in (session, agent.session("s")):
        pending = await handle.pending()
        assert pending is not None
        assert (pending.status, pending.approval_id, pending.approval_kind) == ("awaiting-approval", paused.approval_id, "tool")
        for refused in (handle.resume, lambda handle=handle: handle.send("Again"), handle.clear):  # SES-D1
            with pytest.raises(SessionAwaitingApprovalError) as raised:
                await refused()
            assert raised.value.session_id == "s"
            assert raised.value.approval_id == paused.approval_id
            assert raised.value.approval_kind == "tool"
        with pytest.raises(SessionAwaitingApprovalError):
            await handle.stream("Again").result
    assert len(model.calls) == 1


async def test_dropping_a_paused_turn_orphans_its_approval() -> None:
    # SES-53, APR-26
    store = memory_store()
    ran: list[str] = []

    @tool(needs_approval=True)
    def danger() -> str:
        """Danger."""
        ran.append("danger")
        return "done"

    agent = agent_of(calls("danger"), "Fine", tools=[danger], store=store)
    session = agent.session("s")
    paused = await session.send("Hi")
    await session.discard_pending()
    with pytest.raises(LoushoError) as raised:
        await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert raised.value.code == "LOUSHO_APPROVAL_ORPHANED"
    assert ran == []
    assert (await session.send("Again")).text == "Fine"
    assert shape(await session.load()) == ["user:Again", "assistant:Fine"]


async def test_clearing_deletes_an_interrupted_turn_and_every_trace_of_turns() -> None:
    # SES-58, SES-59
    store = memory_store()
    session = agent_of("One", failure(), "Three", store=store).session("s")
    events: list[Any] = []
    session.on(events.append)
    await session.send("Hi")
    with pytest.raises(CompactedLLMProviderError):
        await session.send("Again")
    await session.clear()
    assert await session.load() == []
    assert await session.pending() is None
    assert await store.checkpoints.history("s.turn-0") == []
    assert await store.checkpoints.history("s.turn-2") == []
    assert [event.messages_cleared for event in events if event.type == "context.cleared"] == [2]
    await session.send("New")
    assert shape(await session.load()) == ["user:New", "assistant:Three"]


# ----------------------------------------------------------------------------------------------------------- agents that change


async def interrupted(store: MemoryStore, **options: Any) -> None:
    """Leaves an interrupted turn with an open call of `mark`: its save after the result fails."""

    @tool
    def broken() -> str:
        """Breaks."""
        raise PropagatingToolError("Stop everything.")

    original = options.pop("tools", [mark])
    agent = agent_of(calls("broken"), tools=[broken, *original], store=store, **options)
    with pytest.raises(PropagatingToolError):
        await agent.session("s").send("Hi")


@tool
def broken() -> str:
    """Works now."""
    return "works"


@tool(name="mark")
def mark_two(name: str, count: int = 1) -> str:
    """Marks, with more arguments."""
    return name * count


async def test_a_changed_agent_goes_on_with_a_warning_and_an_event(caplog: pytest.LogCaptureFixture) -> None:
    # DUR-37, DUR-39, LES drift event
    store = memory_store()
    await interrupted(store, instructions="Old.")
    events: list[Any] = []
    agent = agent_of("Done", tools=[broken, mark_two, guarded], store=store, instructions="New.", on_event=events.append)
    session = agent.session("s")
    await session.resume()
    assert [event.type for event in events][:2] == ["run.start", "agent.drift"]
    found = events[1]
    assert found.tools_added == ("guarded",)
    assert found.tools_removed == ()
    assert found.tools_changed == ("mark",)
    assert found.instructions is True
    assert found.model is None
    assert "tools added: guarded; tools changed: mark; instructions changed" in caplog.text


async def test_a_model_that_changed_is_drift() -> None:
    store = memory_store()
    await interrupted(store)
    events: list[Any] = []
    provider = mock_model(["Done"], default_model="other-model")
    agent = create_agent(provider=provider, tools=[broken, mark], store=store, on_event=events.append)
    await agent.session("s").resume()
    assert events[1].model == {"from": "mock-model", "to": "other-model"}
    assert events[1].instructions is False


async def test_a_drifted_agent_is_refused_under_error_and_the_right_one_can_still_take_the_turn() -> None:
    # DUR-39, DUR-40
    store = memory_store()
    await interrupted(store)
    before = await checkpoint(store)
    model = mock_model(["never"])
    wrong = create_agent(provider=model, tools=[broken], store=store, on_agent_drift="error")
    for refused in (wrong.session("s").resume, lambda: wrong.session("s").send("Again")):
        with pytest.raises(LoushoError) as raised:
            await refused()
        assert raised.value.code == "LOUSHO_AGENT_DRIFT"
        assert "mark" in str(raised.value)
    assert await checkpoint(store) == before
    assert model.calls == []
    result = await agent_of("Done", tools=[broken, mark], store=store, on_agent_drift="error").session("s").resume()
    assert result is not None
    assert result.text == "Done"


async def test_drift_can_be_ignored(caplog: pytest.LogCaptureFixture) -> None:
    store = memory_store()
    await interrupted(store)
    events: list[Any] = []
    agent = agent_of("Done", tools=[broken], store=store, on_agent_drift="ignore", on_event=events.append)
    await agent.session("s").resume()
    assert "agent.drift" not in [event.type for event in events]
    assert caplog.text == ""


async def test_a_record_without_a_fingerprint_resumes_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    # DUR-42
    store = memory_store()
    await interrupted(store)
    record = await checkpoint(store)
    assert record is not None
    del record["agentFingerprint"]
    await store.checkpoints.save({**record, "revision": record["revision"] + 1})
    result = await agent_of("Done", tools=[broken], store=store, on_agent_drift="error").session("s").resume()
    assert result is not None
    assert caplog.text == ""


async def test_changed_code_alone_is_no_drift() -> None:
    # DUR-38
    store = memory_store()
    await interrupted(store)

    @tool(name="mark")
    def other(name: str = "a") -> str:
        """Marks in another way."""
        return "other"

    result = await agent_of("Done", tools=[broken, other], store=store, on_agent_drift="error").session("s").resume()
    assert result is not None


@pytest.mark.parametrize("mode", ["warn", "error", "ignore"])
async def test_a_missing_tool_of_an_open_call_is_named_before_anything_runs(mode: str) -> None:
    # DUR-41
    store = memory_store()
    await interrupted(store)
    model = mock_model(["Done", "Done"])
    agent = create_agent(provider=model, store=store, on_agent_drift=mode)
    with pytest.raises(LoushoError) as raised:
        await agent.session("s").resume()
    assert raised.value.code == ("LOUSHO_AGENT_DRIFT" if mode == "error" else "LOUSHO_RESUME_TOOL_MISSING")
    if isinstance(raised.value, ResumeToolMissingError):
        assert raised.value.tool_name == "broken"
    assert model.calls == []
    assert await agent.session("s").pending() is not None


def test_a_bad_drift_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        create_agent(provider=mock_model([]), on_agent_drift="eror")
    assert raised.value.field == "on_agent_drift"
    assert "'error'" in str(raised.value)


# ------------------------------------------------------------------------------------------------------------ what tools see


async def test_a_call_that_runs_again_sees_what_the_first_run_saw() -> None:
    # DUR-33
    seen: list[tuple[str, list[str], str | None, Any]] = []

    @tool
    def look(ctx: ToolContext) -> str:
        """Looks."""
        seen.append((ctx.tool_call_id, shape(ctx.messages), ctx.session_id, ctx.principal))
        if len(seen) == 1:
            raise PropagatingToolError("Stop everything.")
        return "fine"

    session = agent_of("One", calls("mark", "look"), "Done", tools=[mark, look], store=memory_store()).session("s")
    await session.send("First")
    with pytest.raises(PropagatingToolError):
        await session.send("Hi", principal="u")
    await session.resume()
    assert seen[0] == seen[1]
    assert seen[0][1:] == (["user:First", "assistant:One", "user:Hi"], "s", "u")  # SES-14


async def test_a_once_only_call_is_not_repeated_after_a_failure() -> None:
    # DEC-R7
    ran: list[str] = []

    @tool(effect="once")
    def pay(ctx: ToolContext) -> str:
        """Pays."""
        ran.append(ctx.tool_call_id)
        raise PropagatingToolError("The line is cut.")

    session = agent_of(calls("pay"), "Done", tools=[pay], store=memory_store()).session("s")
    with pytest.raises(PropagatingToolError):
        await session.send("Hi")
    await session.resume()
    saved = await session.load()
    assert len(ran) == 1
    assert kinds(saved) == ["execution"]
    assert results(saved)[0]["outcome"] == "unknown"


async def test_two_handles_that_resume_at_once_finish_the_turn_once() -> None:
    # SES-15, DUR-31
    requests = 0

    def policy(options: Any) -> Any:
        nonlocal requests
        requests += 1
        if requests == 1:
            raise failure()
        return "Done"

    store = memory_store()
    agent = create_agent(provider=PolicyProvider(policy), store=store)
    with pytest.raises(CompactedLLMProviderError):
        await agent.session("s").send("Hi")
    first, second = await asyncio.gather(agent.session("s").resume(), agent.session("s").resume())
    assert [first is None, second is None].count(True) == 1
    assert requests == 2
    assert shape(await agent.session("s").load()) == ["user:Hi", "assistant:Done"]


def test_a_message_that_is_saved_again_is_not_encoded_again() -> None:
    fixed = FixedJson({"role": "user", "content": "x" * 2_000})
    first, second = split({"messages": [fixed]}, "a"), split({"messages": [fixed, {"role": "user"}]}, "b")
    assert first.lists["messages"][0] is second.lists["messages"][0]
    assert second.join("b") == {"messages": [{"role": "user", "content": "x" * 2_000}, {"role": "user"}]}
    assert type(pickle.loads(pickle.dumps(fixed))) is dict


async def test_a_running_turn_is_not_dropped() -> None:
    gate = Gate("slow")
    session = agent_of(calls("slow"), "Done", tools=[gate.tool], store=memory_store()).session("s")
    turn = asyncio.ensure_future(session.send("Hi"))
    await gate.running.wait()
    with pytest.raises(LoushoError) as raised:
        await session.discard_pending()
    assert raised.value.code == "LOUSHO_SESSION_BUSY"
    gate.go.set()
    await turn
