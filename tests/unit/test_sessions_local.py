"""Sessions in one process: transcripts, order of turns, turn policies, stores that fail."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from lousho_ray.cancellation import CancelToken
from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, LoushoError, StorageError
from lousho_ray.messages import ImagePart, Message, TextPart, ToolCall, assistant, user
from lousho_ray.ports import FinishChunk, GenerateOptions, GenerateResult, TextChunk
from lousho_ray.stores.memory import MemorySessionStore, memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import (
    Gate,
    PolicyProvider,
    ScriptedStream,
    agent_of,
    asks,
    calls,
    check_transcript,
    collect,
    kinds,
    names,
    plain,
    say,
    shape,
    until,
)


def echo(options: GenerateOptions) -> str:
    """Answers with the number of user messages it sees, and the last one."""
    texts = [message.text for message in options.messages if message.role == "user"]
    return f"{len(texts)} {texts[-1]}"


def echo_agent(**options: Any) -> Any:
    return create_agent(provider=PolicyProvider(echo), **options)


class SlowStore(MemorySessionStore):
    """Waits a moment in each call, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0
        self.saves: list[list[str]] = []

    async def load(self, id: str, /) -> list[Message] | None:
        self.loads += 1
        await asyncio.sleep(0)
        return await super().load(id)

    async def save(self, id: str, messages: Any, /, **fence: Any) -> None:
        check_transcript(messages)
        self.saves.append(shape(messages))
        await asyncio.sleep(0)
        await super().save(id, messages, **fence)


# ------------------------------------------------------------------------------------------------------------------ the object


def test_an_id_is_a_uuid_unless_given() -> None:
    # SES-02
    session = echo_agent().session()
    assert str(uuid.UUID(session.id)) == session.id
    assert echo_agent().session(id="My_id-1").id == "My_id-1"


@pytest.mark.parametrize("id", ["../x", "a/b", "a.b", "", "x" * 129, "ä", "a b", "a\n"])
def test_a_bad_id_is_refused(id: str) -> None:
    # SES-02
    with pytest.raises(ConfigurationError) as caught:
        echo_agent().session(id=id)
    assert caught.value.code == "LOUSHO_SESSION_ID_INVALID"


def test_unknown_keywords_and_policies_have_a_suggestion() -> None:
    # SES-01
    with pytest.raises(ConfigurationError, match="turn_policy") as caught:
        echo_agent().session(turn_polcy="wait")
    assert caught.value.field == "turn_polcy"
    with pytest.raises(ConfigurationError, match="queue") as caught:
        echo_agent().session(turn_policy="que")
    assert caught.value.field == "turn_policy"


async def test_a_turn_sees_what_came_before_and_the_system_prompt_is_not_stored() -> None:
    # SES-08, SES-16
    store = SlowStore()
    session = echo_agent(instructions="Be brief.").session(id="s", store=store)
    assert (await session.send("a")).text == "1 a"
    assert (await session.send("b")).text == "2 b"
    assert store.saves == [
        ["user:a", "assistant:1 a"],
        ["user:a", "assistant:1 a", "user:b", "assistant:2 b"],
    ]
    model = mock_model(["c"])
    other = create_agent(provider=model, instructions="Be verbose.").session(id="s", store=store)
    result = await other.send("c")
    assert model.calls[0].messages[0].text == "Be verbose."
    assert shape(result.new_messages) == ["user:c", "assistant:c"]


async def test_messages_is_a_snapshot() -> None:
    # SES-04
    session = echo_agent().session()
    await session.send("a")
    session.messages.clear()
    assert shape(session.messages) == ["user:a", "assistant:1 a"]
    with pytest.raises(AttributeError):
        session.messages[0].content = "changed"


async def test_load_reads_without_running_and_an_unknown_id_is_empty() -> None:
    # SES-06
    store = SlowStore()
    assert await echo_agent().session(id="new", store=store).load() == []
    await echo_agent().session(id="s", store=store).send("a")
    session = echo_agent().session(id="s", store=store)
    assert session.messages == []
    assert shape(await session.load()) == ["user:a", "assistant:1 a"]
    assert shape(session.messages) == ["user:a", "assistant:1 a"]


async def test_every_call_reads_the_store_again() -> None:
    # SES-05
    store = SlowStore()
    first, second = (echo_agent().session(id="s", store=store) for _ in range(2))
    await first.send("a")
    assert (await second.send("b")).text == "2 b"
    assert (await first.send("c")).text == "3 c"


async def test_without_a_store_sessions_share_nothing() -> None:
    # SES-09
    agent = echo_agent()
    first, second = agent.session(id="s"), agent.session(id="s")
    await first.send("a")
    assert (await second.send("b")).text == "1 b"


async def test_the_agents_store_is_the_default_and_a_sessions_own_wins() -> None:
    # SES-10, CA-22
    whole, own = memory_store(), MemorySessionStore()
    agent = echo_agent(store=whole)
    await agent.session(id="s").send("a")
    await agent.session(id="s", store=own).send("b")
    assert whole.sessions is not None
    assert shape(await whole.sessions.load("s") or []) == ["user:a", "assistant:1 a"]
    assert shape(await own.load("s") or []) == ["user:b", "assistant:1 b"]


async def test_parts_and_messages_as_input_are_kept() -> None:
    # SES-07, CA-38
    store = MemorySessionStore()
    session = echo_agent().session(id="s", store=store)
    png = b"\x89PNG\r\n\x1a\n"
    await session.send([TextPart("look"), ImagePart(png, "image/png")])
    await session.send([user("one"), assistant("two"), user("three")])
    saved = await store.load("s")
    assert saved is not None
    assert saved[0].content == (TextPart("look"), ImagePart(png, "image/png"))
    assert shape(saved[2:]) == ["user:one", "assistant:two", "user:three", "assistant:3 three"]


# ------------------------------------------------------------------------------------------------------------------ the turns


async def test_turns_run_in_the_order_of_their_calls_and_never_interleave() -> None:
    # SES-15
    async def slow(options: GenerateOptions) -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return echo(options)

    provider = PolicyProvider(slow)
    session = create_agent(provider=provider).session(store=SlowStore())
    sent = [asyncio.ensure_future(session.send(f"m{number}")) for number in range(5)]
    await asyncio.sleep(0)
    streamed = session.stream("m5")
    rest = asyncio.ensure_future(session.send("m6"))
    outcomes = [*(await asyncio.gather(*sent)), await streamed.result, await rest]
    assert [result.text for result in outcomes] == [f"{number + 1} m{number}" for number in range(7)]
    assert provider.most == 1
    assert len(session.messages) == 14


async def test_two_handles_on_one_id_and_store_share_the_line() -> None:
    # SES-D10, SES-15
    store, gate = MemorySessionStore(), Gate("slow")
    first = agent_of(calls("slow"), "One", tools=[gate.tool]).session(id="s", store=store)
    second = echo_agent().session(id="s", store=store)
    running = asyncio.ensure_future(first.send("a"))
    await gate.running.wait()
    waiting = asyncio.ensure_future(second.send("b"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    gate.go.set()
    assert (await waiting).text == "2 b"
    await running


async def test_different_ids_run_beside_each_other() -> None:
    store, gate = MemorySessionStore(), Gate("slow")
    first = agent_of(calls("slow"), "One", tools=[gate.tool]).session(id="s1", store=store)
    running = asyncio.ensure_future(first.send("a"))
    await gate.running.wait()
    assert (await echo_agent().session(id="s2", store=store).send("b")).text == "1 b"
    gate.go.set()
    await running


async def test_a_turn_that_raises_leaves_the_transcript_as_it_was() -> None:
    # SES-18
    store = SlowStore()
    session = agent_of("One", calls("look"), RuntimeError("broken"), "Three", tools=[plain("look")]).session(id="s", store=store)
    await session.send("a")
    with pytest.raises(LoushoError, match="broken"):
        await session.send("b")
    assert shape(await session.load()) == ["user:a", "assistant:One"]
    await session.send("c")
    assert shape(session.messages) == ["user:a", "assistant:One", "user:c", "assistant:Three"]


async def test_an_aborted_turn_saves_nothing_and_warns_when_its_tools_had_run(caplog: pytest.LogCaptureFixture) -> None:
    # SES-19, SES-D2
    store, gate = SlowStore(), Gate("slow")
    asked = calls("quick", "missing", ("strict", {"n": "no number"}), "slow", "later")
    strict = define_tool(
        name="strict",
        description="Strict.",
        execute=lambda args: None,
        input={"type": "object", "properties": {"n": {"type": "integer"}}},
    )
    tools = [plain("quick"), strict, gate.tool, plain("later")]
    session = agent_of(asked, "Two", tools=tools, tool_concurrency=1).session(id="s", store=store)
    run = session.stream("a")
    await gate.running.wait()
    run.abort("enough")
    assert (await run.result).finish_reason == "aborted"
    assert store.saves == []
    assert await session.load() == []
    warnings = [record.getMessage() for record in caplog.records if "dropped an aborted turn" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].endswith("had run: quick, slow")  # not those that were refused, and not the one behind
    assert (await session.send("b")).text == "Two"


async def test_an_aborted_turn_whose_calls_never_ran_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    # SES-D2
    asking, forever = asyncio.Event(), asyncio.Event()

    async def wait(args: Any, ctx: Any) -> bool:
        asking.set()
        await forever.wait()
        return False

    careful = define_tool(name="careful", description="Careful.", execute=lambda args: "done", needs_approval=wait)
    run = agent_of(calls("careful", "later"), tools=[careful, plain("later")]).session(store=SlowStore()).stream("a")
    await asking.wait()
    run.abort("enough")
    assert (await run.result).finish_reason == "aborted"
    assert [record.getMessage() for record in caplog.records if "dropped an aborted turn" in record.getMessage()] == []


@pytest.mark.parametrize(
    ("turn", "options", "reason"),
    [
        (calls("look"), {"max_steps": 1}, "max-steps"),
        (calls("look", usage={"input_tokens": 5}), {"limits": {"max_tokens": 1}}, "budget-exceeded"),
        ({"text": "Half", "finish_reason": "length"}, {}, "length"),
        (calls("look", finish_reason="content_filter"), {}, "content_filter"),
    ],
)
async def test_other_ends_are_finished_turns_and_saved(turn: Any, options: dict[str, Any], reason: str) -> None:
    # SES-17, SES-21
    store = SlowStore()  # checks every transcript it saves
    session = agent_of(turn, "Two", tools=[plain("look")], **options).session(id="s", store=store)
    assert (await session.send("a")).finish_reason == reason
    assert len(store.saves) == 1
    assert store.saves[0][0] == "user:a"
    if "limits" not in options:
        assert (await session.send("b")).ok


async def test_usage_of_each_turn_is_its_own() -> None:
    # RUN-72
    used = {"input_tokens": 5, "output_tokens": 1}
    session = agent_of({"text": "a", "usage": used}, {"text": "b", "usage": used}).session()
    assert (await session.send("a")).usage.total_tokens == 6
    result = await session.send("b")
    assert result.usage.total_tokens == 6
    assert result.steps == 1


async def test_the_agents_limits_count_each_turn_on_its_own() -> None:
    # SES-61
    used = {"input_tokens": 5}
    session = agent_of(*[{"text": "a", "usage": used}] * 3, limits={"max_tokens": 6}).session()
    for _ in range(3):
        assert (await session.send("a")).ok


# ----------------------------------------------------------------------------------------------------------------- streams


async def test_the_transcript_is_complete_when_the_loop_ends() -> None:
    # EVT-45, EVT-46
    store = SlowStore()
    session = echo_agent().session(id="s", store=store)
    run = session.stream("a")
    events = []
    async for event in run:
        if event.type == "run.done":
            assert len(store.saves) == 1  # saved before it is reported
        events.append(event)
    assert shape(session.messages) == ["user:a", "assistant:1 a"]
    assert {event.run_id for event in events} == {run.run_id}
    assert (await session.send("b")).text == "2 b"


async def test_leaving_after_run_done_is_no_abort() -> None:
    # SES-20
    store = SlowStore()
    session = echo_agent().session(id="s", store=store)
    async for event in session.stream("a"):
        if event.type == "run.done":
            break
    assert len(store.saves) == 1


async def test_a_reader_that_awaits_the_result_in_its_loop_is_no_deadlock() -> None:
    # EVT-06
    provider = ScriptedStream([*[TextChunk("x") for _ in range(9_000)], FinishChunk("stop")])
    run = create_agent(provider=provider).session().stream("Hi")
    count = 0
    async for _ in run:
        if not count:
            await asyncio.wait_for(_result(run), 10)
        count += 1
    assert count == 9_005


async def _result(run: Any) -> Any:
    return await run.result


async def test_listeners_hear_every_turn_until_they_are_removed() -> None:
    # EVT-49
    heard: list[Any] = []
    session = echo_agent().session()
    off = session.on(heard.append)
    await session.send("a")
    await collect(session.stream("b"))
    await session.clear()
    off()
    off()
    await session.send("c")
    assert names(heard).count("run.done stop") == 2
    assert heard[-1].type == "context.cleared"
    assert (heard[-1].session_id, heard[-1].messages_cleared) == (session.id, 4)


async def test_a_listener_hears_the_turns_of_every_handle_of_its_session() -> None:
    # EVT-49
    store, heard = MemorySessionStore(), list[Any]()
    agent = echo_agent()
    first = agent.session("s", store=store)
    off = first.on(heard.append)
    await echo_agent().session("s", store=store).send("a")  # another agent object, too
    await agent.session("s", store=store).clear()
    await agent.session("t", store=store).send("b")
    await agent.session("s", store=MemorySessionStore()).send("c")
    await agent.session("s").send("d")
    assert [name for name in names(heard) if name in ("run.start", "run.done stop", "context.cleared")] == [
        "run.start",
        "run.done stop",
        "context.cleared",
    ]
    off()
    await agent.session("s", store=store).send("e")
    assert heard[-1].type == "context.cleared"


@pytest.mark.parametrize("durable", [True, False])
async def test_listeners_hear_the_continuation_of_a_paused_turn(durable: bool) -> None:
    # EVT-49
    async def execute(args: Any) -> str:
        return "paid"

    pay = define_tool(name="pay", description="Pays.", execute=execute, needs_approval=True)
    agent = agent_of(calls("pay"), "Done", tools=[pay], **({"store": memory_store()} if durable else {}))
    session, heard = agent.session("s"), list[Any]()
    session.on(heard.append)
    paused = await session.send("Pay")
    await agent.approvals.resolve(paused.approval_id or "", approved=True)
    assert [name for name in names(heard) if name.startswith("run.done")] == ["run.done awaiting-approval", "run.done stop"]
    assert "tool.done pay" in names(heard)


async def test_a_listener_that_raises_does_not_fail_the_turn() -> None:
    # EVT-D5
    def bad(event: Any) -> None:
        raise ValueError("no")

    session = echo_agent().session()
    session.on(bad)
    assert (await session.send("a")).ok
    await session.clear()


# ------------------------------------------------------------------------------------------------------------ stores that fail


class FailingStore(MemorySessionStore):
    def __init__(self, *fail: str) -> None:
        super().__init__()
        self.fail = set(fail)

    async def load(self, id: str, /) -> list[Message] | None:
        if "load" in self.fail:
            raise StorageError("cannot read")
        return await super().load(id)

    async def save(self, id: str, messages: Any, /, **fence: Any) -> None:
        if "save" in self.fail:
            raise StorageError("cannot write")
        await super().save(id, messages, **fence)


async def test_a_store_that_cannot_load_fails_the_turn_before_it_begins() -> None:
    # EVT-26, ERR-16
    store = FailingStore("load")
    provider = PolicyProvider(echo)
    session = create_agent(provider=provider).session(id="s", store=store)
    with pytest.raises(StorageError, match="cannot read"):
        await session.send("a")
    run = session.stream("b")
    assert names(await collect(run)) == ["error StorageError", "run.done error"]
    with pytest.raises(StorageError):
        await run.result
    assert provider.calls == 0
    store.fail.clear()
    assert (await session.send("c")).text == "1 c"


async def test_a_store_that_cannot_save_fails_the_turn_after_it_ran() -> None:
    # EVT-D7, SES-18
    store = FailingStore("save")
    session = echo_agent().session(id="s", store=store)
    run = session.stream("a")
    events = await collect(run)
    assert names(events)[-3:] == ["step.done 1 stop", "error StorageError", "run.done error"]
    with pytest.raises(StorageError, match="cannot write"):
        await run.result
    with pytest.raises(StorageError):
        await session.send("b")
    store.fail.clear()
    assert (await session.send("c")).text == "1 c"


# --------------------------------------------------------------------------------------------------------------- turn policies


async def test_a_first_call_is_a_normal_turn_under_every_policy() -> None:
    # SES-34
    for policy in ("wait", "queue", "steer"):
        session = echo_agent().session(turn_policy=policy)
        assert (await session.send("a")).text == "1 a"
        assert (await session.send("b")).text == "2 b"


async def test_a_queued_call_joins_the_running_turn() -> None:
    # SES-27, SES-29, SES-31
    gate = Gate("slow")
    session = agent_of(calls("slow"), "Both", tools=[gate.tool]).session(turn_policy="queue", store=SlowStore())
    heard: list[Any] = []
    first = session.stream("a")
    await gate.running.wait()
    second = asyncio.ensure_future(session.send("b"))
    await asyncio.sleep(0)
    third = session.stream("c")
    session.on(heard.append)
    await asyncio.sleep(0)
    gate.go.set()
    events = await collect(first)
    assert (await second) is (await first.result)
    assert (await third.result) is (await first.result)
    assert shape(session.messages) == ["user:a", "assistant:+slow", "tool:slow", "user:b", "user:c", "assistant:Both"]
    assert names(events).count("input.queued") == 2
    assert names(events).count("input.applied 2") == 2


async def test_a_joining_stream_has_one_event_the_turns_end() -> None:
    # EVT-48, EVT-D6
    gate = Gate("slow")
    used = {"input_tokens": 5, "output_tokens": 2}
    session = agent_of(calls("slow", usage=used), {"text": "Both", "usage": used}, tools=[gate.tool]).session(turn_policy="queue")
    first = asyncio.ensure_future(session.send("a"))
    await gate.running.wait()
    joined = session.stream("b")
    gate.go.set()
    events = await collect(joined)
    assert names(events) == ["run.done stop"]
    assert (events[0].run_id, events[0].seq, events[0].text) == (joined.run_id, 0, "Both")
    assert events[0].to_dict()["usage"]["totalTokens"] == 14
    await first


async def test_a_steering_call_cuts_the_running_model_call_short() -> None:
    # SES-28, SES-39
    provider = ScriptedStream([asyncio.Event()], say("Both"))
    session = create_agent(provider=provider).session(turn_policy="steer")
    first = asyncio.ensure_future(session.send("a"))
    await provider.reached(0, 0).wait()
    second = asyncio.ensure_future(session.send("b"))
    assert (await second) is (await first)
    assert shape(session.messages) == ["user:a", "user:b", "assistant:Both"]


async def test_a_joining_call_joins_a_turn_that_still_waits() -> None:
    # SES-D5, SES-D6
    store, gate = SlowStore(), Gate("slow")
    waiting = agent_of(calls("slow"), "One", "Two", tools=[gate.tool])
    session, queueing = (waiting.session(id="s", store=store, turn_policy=policy) for policy in ("wait", "queue"))
    first = asyncio.ensure_future(session.send("a"))
    await gate.running.wait()
    second = asyncio.ensure_future(session.send("b"))
    await asyncio.sleep(0)
    third = asyncio.ensure_future(queueing.send("c"))
    await asyncio.sleep(0)
    gate.go.set()
    assert (await first).text == "One"
    assert (await third) is (await second)
    saved = await session.load()
    assert shape(saved) == ["user:a", "assistant:+slow", "tool:slow", "assistant:One", "user:b", "user:c", "assistant:Two"]


@pytest.mark.parametrize("policy", ["queue", "steer"])
@pytest.mark.parametrize("end", ["abort", "max-steps", "budget"])
async def test_a_call_that_joined_in_vain_becomes_its_own_turn_next_in_line(end: str, policy: str) -> None:
    # SES-32, SES-D5
    store, gate = SlowStore(), Gate("slow")
    options: dict[str, Any] = {"max-steps": {"max_steps": 1}, "budget": {"limits": {"max_tool_errors": 1}}}.get(end, {})
    gate = Gate("slow", error=ValueError("no") if end == "budget" else None)
    agent = agent_of(calls("slow"), "Joined", "Last", tools=[gate.tool], **options)
    first = agent.session(id="s", store=store).stream("a")
    await gate.running.wait()
    joined = asyncio.ensure_future(agent.session(id="s", store=store, turn_policy=policy).send("b"))
    await asyncio.sleep(0)
    last = asyncio.ensure_future(agent.session(id="s", store=store).send("c"))
    await asyncio.sleep(0)
    if end == "abort":
        first.abort()
    gate.go.set()
    assert not (await first.result).ok
    assert (await joined).text == "Joined"
    assert (await last).text == "Last"
    users = [message.text for message in await store.load("s") or [] if message.role == "user"]
    assert users == (["b", "c"] if end == "abort" else ["a", "b", "c"])


async def test_several_calls_that_joined_in_vain_keep_their_order() -> None:
    # SES-D5
    gate = Gate("slow")
    agent = agent_of(calls("slow"), "B", "C", tools=[gate.tool])
    session = agent.session(turn_policy="queue")
    first = session.stream("a")
    await gate.running.wait()
    joined = [asyncio.ensure_future(session.send(text)) for text in "bc"]
    await asyncio.sleep(0)
    first.abort()
    texts = [(await task).text for task in joined]
    assert texts == ["B", "C"]


async def test_a_call_can_join_a_turn_that_joined_in_vain() -> None:
    # SES-27, SES-32
    slow, slower = Gate("slow"), Gate("slower")
    agent = agent_of(calls("slow"), calls("slower"), "Both", tools=[slow.tool, slower.tool])
    session = agent.session(turn_policy="queue")
    first = session.stream("a")
    await slow.running.wait()
    second = asyncio.ensure_future(session.send("b"))
    await asyncio.sleep(0)
    first.abort()
    await slower.running.wait()
    third = asyncio.ensure_future(session.send("c"))
    await asyncio.sleep(0)
    slower.go.set()
    assert (await third) is (await second)


async def test_a_joined_call_of_a_failing_turn_raises_the_same_error() -> None:
    # SES-33
    provider = ScriptedStream([go := asyncio.Event(), RuntimeError("broken")], say("never"))
    session = create_agent(provider=provider).session(turn_policy="queue")
    first = asyncio.ensure_future(session.send("a"))
    await provider.reached(0, 0).wait()
    second = asyncio.ensure_future(session.send("b"))
    third = session.stream("c")
    await asyncio.sleep(0)
    go.set()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert outcomes[0] is outcomes[1]
    assert names(await collect(third)) == ["error CompactedLLMProviderError", "run.done error"]
    with pytest.raises(LoushoError, match="broken"):
        await third.result
    assert len(provider.requests) == 1


@pytest.mark.parametrize("how", ["cancel", "token", "abort"])
async def test_cancelling_a_joined_call_does_not_touch_the_turn(how: str) -> None:
    # SES-30
    gate = Gate("slow")
    session = agent_of(calls("slow"), "Both", tools=[gate.tool]).session(turn_policy="queue")
    first = asyncio.ensure_future(session.send("a"))
    await gate.running.wait()
    if how == "abort":
        joined = session.stream("b")
        joined.abort("enough")
        assert (await joined.result).finish_reason == "aborted"
    else:
        token = CancelToken()
        second = asyncio.ensure_future(session.send("b", cancel=token))
        await asyncio.sleep(0)
        if how == "cancel":
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
        else:
            token.cancel("enough")
            assert (await second).finish_reason == "aborted"
    assert not first.done()
    gate.go.set()
    assert (await first).text == "Both"
    # What the turn had taken already stays taken.
    assert shape(session.messages) == ["user:a", "assistant:+slow", "tool:slow", "user:b", "assistant:Both"]
    assert gate.cancelled == 0


@pytest.mark.parametrize("how", ["cancel", "abort", "leave"])
async def test_a_turn_that_is_given_up_while_it_waits_in_line_never_runs(how: str) -> None:
    # RUN-56, SES-19
    gate = Gate("slow")
    store = SlowStore()
    session = agent_of(calls("slow"), "One", "Three", tools=[gate.tool]).session(store=store)
    first = asyncio.ensure_future(session.send("a"))
    await gate.running.wait()
    if how == "cancel":
        second = asyncio.ensure_future(session.send("b"))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
    else:
        async with session.stream("b") as run:
            if how == "abort":
                run.abort()
        result = await run.result
        assert (result.finish_reason, result.steps) == ("aborted", 0)
        assert names(await collect(run))[-1] == "run.done aborted"
    third = asyncio.ensure_future(session.send("c"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not third.done()  # it is not its turn yet
    gate.go.set()
    assert (await first).text == "One"
    assert (await third).text == "Three"
    assert [message.text for message in session.messages if message.role == "user"] == ["a", "c"]


async def test_options_of_a_call_that_joins_are_refused() -> None:
    # SES-D12
    gate = Gate("slow")
    session = agent_of(calls("slow"), "Both", tools=[gate.tool]).session(turn_policy="queue")
    first = asyncio.ensure_future(session.send("a"))
    await gate.running.wait()
    with pytest.raises(ConfigurationError) as caught:
        await session.send("b", max_steps=3)
    assert caught.value.field == "max_steps"
    with pytest.raises(ConfigurationError):
        await session.stream("b", instructions="More").result
    gate.go.set()
    assert (await first).ok
    assert [message.text for message in session.messages if message.role == "user"] == ["a"]


async def test_many_handles_with_mixed_policies_lose_and_mix_nothing() -> None:
    # SES-15, SES-31, SES-D5
    store = SlowStore()

    async def slow(options: GenerateOptions) -> GenerateResult:
        for _ in range(3):
            await asyncio.sleep(0)
        if options.messages[-1].role == "tool":
            return GenerateResult("ok", usage=ProviderUsage(1, 1))
        return asks("look", usage=ProviderUsage(1, 1))

    agent = create_agent(provider=PolicyProvider(slow), tools=[plain("look")])
    handles = [agent.session(id="s", store=store, turn_policy=policy) for policy in ("wait", "queue", "steer")]
    sent: list[asyncio.Task[Any]] = []
    for number in range(30):
        sent.append(asyncio.ensure_future(handles[number % 3].send(f"m{number:02}")))
        for _ in range(number % 5):
            await asyncio.sleep(0)
    outcomes = await asyncio.gather(*sent)
    assert all(outcome.ok for outcome in outcomes)
    saved = await store.load("s")
    assert saved is not None
    check_transcript(saved)
    assert [message.text for message in saved if message.role == "user"] == [f"m{number:02}" for number in range(30)]


# ----------------------------------------------------------------------------------------------------------------------- clear


async def test_clear_empties_the_transcript() -> None:
    # SES-58
    store = SlowStore()
    session = echo_agent().session(id="s", store=store)
    await session.send("a")
    await session.clear()
    assert session.messages == []
    assert await store.load("s") == []
    assert (await session.send("b")).text == "1 b"


async def test_clear_is_refused_while_a_turn_runs_or_waits() -> None:
    # SES-60
    gate = Gate("slow")
    session = agent_of(calls("slow"), "One", tools=[gate.tool]).session()
    running = asyncio.ensure_future(session.send("a"))
    await gate.running.wait()
    with pytest.raises(LoushoError) as caught:
        await session.clear()
    assert caught.value.code == "LOUSHO_SESSION_BUSY"
    gate.go.set()
    await running
    await session.clear()


async def test_a_turn_that_comes_while_the_transcript_is_cleared_waits_for_it() -> None:
    # SES-15
    session = echo_agent().session(id="s", store=SlowStore())
    await session.send("a")
    clearing = asyncio.ensure_future(session.clear())
    await asyncio.sleep(0)
    sending = asyncio.ensure_future(session.send("b"))
    await clearing
    assert (await sending).text == "1 b"
    assert shape(await session.load()) == ["user:b", "assistant:1 b"]


async def test_a_damaged_transcript_from_elsewhere_still_runs() -> None:
    # SES-17: what a session saves is valid, whatever it was given
    store = MemorySessionStore()
    await store.save("s", [user("a"), assistant("", [ToolCall("c1", "look")])])
    result = await agent_of("Done", tools=[plain("look")]).session(id="s", store=store).send("b")
    assert result.ok
    saved = await store.load("s")
    assert saved is not None
    assert kinds(saved) in ([], ["ok"], ["not-run"])


async def test_sessions_leave_nothing_behind() -> None:
    import gc

    from lousho_ray.agent import runtime_named

    runtime: Any = runtime_named("local")
    others = set(runtime._lines._lines)
    store = MemorySessionStore()
    for number in range(20):
        await echo_agent().session(id=f"s{number}", store=store).send("a")
    await until(lambda: gc.collect() >= 0 and not set(runtime._lines._lines) - others, rounds=10)
