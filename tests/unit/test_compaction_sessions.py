"""Compaction of sessions: what turns leave in the stores, `session.compact()`, and what must not be overwritten or lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import (
    CompactionInfo,
    CompactionOutput,
    create_agent,
    memory_store,
    prune_tool_results_strategy,
    summarize_strategy,
)
from lousho_ray.agent import Agent
from lousho_ray.errors import ConfigurationError, LoushoError, SessionAwaitingApprovalError
from lousho_ray.messages import Message, assistant, user
from lousho_ray.ports import GenerateOptions, GenerateResult
from lousho_ray.stores.memory import InMemoryCheckpointStore, MemorySessionStore
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import Tool, define_tool
from tests.unit.compaction_support import check_wire, conversation
from tests.unit.loop_support import Gate, PolicyProvider, asks, calls, plain

READ: Tool[..., Any] = plain("read", "r" * 4_000)
SMALL: dict[str, Any] = {"context_window": 4_000, "protected_tokens": 1_000}
TURN = [calls("read"), "done"]


class CountingStore(MemorySessionStore):
    """A store of transcripts alone, that counts its saves."""

    def __init__(self) -> None:
        super().__init__()
        self.saves: list[int] = []

    @property
    def sessions(self) -> MemorySessionStore:
        return self

    async def save(self, id: str, messages: Sequence[Message], /, **fence: Any) -> None:
        self.saves.append(len(messages))
        await super().save(id, messages, **fence)


def reader(compaction: Any = SMALL, turns: int = 12, **options: Any) -> Agent:
    given = {"provider": mock_model(TURN * turns), "tools": [READ], "runtime": "local", **options}
    return create_agent(**given, compaction=compaction)


def summaries(text: str = "S", count: int = 20) -> Any:
    return summarize_strategy(model=mock_model([text] * count))


def pruned(messages: Sequence[Message]) -> int:
    return sum(message.text.startswith("[pruned: ") for message in messages)


# --------------------------------------------------------------------------------------------------------------------- in turns


@pytest.mark.parametrize("strategy", [prune_tool_results_strategy(), summaries()], ids=["prune", "summarize"])
async def test_a_compacted_turn_is_saved_once_and_does_not_come_back(strategy: Any) -> None:
    # CMP-05, CMP-11
    store = CountingStore()
    session = reader({**SMALL, "strategy": strategy}, store=store).session("s")
    for number in range(9):
        await session.send(f"Turn {number}.")
        assert await store.load("s") == session.messages
    assert len(store.saves) == 9
    saved = session.messages
    assert pruned(saved) or saved[0].text == "[Conversation summary]\nS"
    check_wire([message.with_(content="{}") if message.role == "tool" else message for message in saved])
    assert (await reader(store=store).session("s").load()) == saved


async def test_a_compacted_session_is_the_same_when_it_is_reopened(tmp_path: Path) -> None:
    # CMP-11, CMP-28
    async with SqliteStore(tmp_path / "s.db") as store:
        session = reader({**SMALL, "strategy": summaries()}, store=store).session("s")
        for number in range(8):
            await session.send(f"Turn {number}.")
        saved = session.messages
    async with SqliteStore(tmp_path / "s.db") as store:
        agent = reader({**SMALL, "strategy": summaries("T")}, store=store)
        session = agent.session("s")
        assert await session.load() == saved
        await session.send("Again.")
        model: Any = agent.definition.provider
        assert list(model.calls[0].messages[1:-1]) == saved


class Doomed(Exception):
    """Stands for the death of the process."""


class DyingCheckpoints(InMemoryCheckpointStore):
    """Dies in place of deleting the record of a finished turn."""

    dying = False

    async def delete(self, id: str, /, *, keep_history: bool = False) -> None:
        if self.dying:
            raise Doomed
        await super().delete(id, keep_history=keep_history)


class Store:
    def __init__(self) -> None:
        self.sessions = MemorySessionStore()
        self.checkpoints = DyingCheckpoints()
        self.approvals = None


async def test_the_record_of_a_shortened_turn_is_not_taken_for_that_of_a_later_one() -> None:
    # a crash between the save and the end of its record, in a turn that left fewer messages than it found
    store = Store()
    agent = reader({**SMALL, "strategy": summaries(), "protected_tokens": 0}, store=store, turns=40)
    session = agent.session("s")
    while True:
        before = len(session.messages)
        store.checkpoints.dying = before >= 16
        try:
            await session.send("More.")
        except Doomed:
            break
    store.checkpoints.dying = False
    transcript = await store.sessions.load("s") or []
    assert len(transcript) < before
    left = await store.checkpoints.load(f"s.turn-{before}")
    assert left is not None
    assert left["status"] == "finished"
    # later turns bring the transcript to the length that the record is found by
    later = [*transcript, *[user("later"), assistant("yes")] * before][:before]
    await store.sessions.save("s", later)
    result = await reader(None, store=store).session("s").send("Again.")
    assert (await store.sessions.load("s") or [])[:before] == later
    assert len(result.new_messages) == 4
    assert await store.checkpoints.load(f"s.turn-{before}") is None


async def test_an_interrupted_turn_goes_on_from_what_was_compacted() -> None:
    # CMP-05, CMP-11, CMP-D8
    store = Store()
    gate, failing = Gate("gate"), RuntimeError("the network is gone")
    script = [*[calls("read")] * 6, failing, calls("read"), "done"]
    agent = create_agent(
        provider=mock_model(script),
        tools=[READ, gate.tool],
        runtime="local",
        store=store,
        max_steps=20,
        retry=False,
        compaction={**SMALL, "strategy": summaries()},
    )
    session = agent.session("s")
    with pytest.raises(LoushoError):
        await session.send("Go.")
    saved = await store.checkpoints.load("s.turn-0")
    assert saved is not None
    assert saved["messages"][1]["content"] == "[Conversation summary]\nS"
    result = await session.resume()
    assert result is not None
    assert result.finish_reason == "stop"
    assert [message.text for message in session.messages if message.role == "user"] == ["[Conversation summary]\nS"]
    assert [entry.purpose for entry in result.step_usage].count("compaction") >= 1


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "another turn meanwhile"])
async def test_a_paused_turn_without_checkpoints_that_is_compacted_loses_nothing(others: int) -> None:
    # CMP-D5, CMP-11
    store = CountingStore()
    ask = define_tool(name="ask", description="Asks.", execute=_ok, needs_approval=True)
    pause = asks("ask", "read")
    script = [asks("read"), "done", pause, *["other"] * others, asks("read"), asks("read"), asks("read"), asks("read"), "end"]
    agent = create_agent(
        provider=mock_model([_turn(item) for item in script]),
        tools=[READ, ask],
        runtime="local",
        store=store,
        max_steps=20,
        compaction={**SMALL, "strategy": summaries()},
    )
    session = agent.session("s")
    await session.send("First.")
    paused = await session.send("Ask.")
    assert paused.approval_id is not None
    for _ in range(others):
        await session.send("Meanwhile.")
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert result.finish_reason == "stop"
    saved = await store.load("s") or []
    assert saved[-1].text == "end"
    assert any(message.text == "[Conversation summary]\nS" for message in saved)
    assert any(message.text == "Meanwhile." for message in saved) == bool(others)
    assert (saved[0].text == "[Conversation summary]\nS") == (not others)
    check_wire([message.with_(content="{}") if message.role == "tool" else message for message in saved])
    ids = [call.id for message in saved for call in message.tool_calls]
    assert len(ids) == len(set(ids))


async def _ok(args: Any) -> str:
    return "ok"


def _turn(item: Any) -> Any:
    if not isinstance(item, GenerateResult):
        return item
    return {"text": "", "tool_calls": [{"name": call.name, "args": {}} for call in item.tool_calls]}


# ----------------------------------------------------------------------------------------------------------------------- by hand


async def read_three(session: Any) -> None:
    for number in range(3):
        await session.send(f"Turn {number}.")


async def test_a_session_is_compacted_by_hand_whatever_its_size() -> None:
    # CMP-31, CMP-40, CMP-12, CMP-D4
    store, infos, events = CountingStore(), list[CompactionInfo](), list[Any]()
    session = reader({"on_compaction": infos.append, "strategy": summaries("Told."), "protected_tokens": 0}, store=store).session(
        "s"
    )
    await read_three(session)
    before = session.messages
    session.on(events.append)
    report = await session.compact()
    assert (report.messages_before, report.messages_after, report.strategy) == (12, 2, "summarize")
    assert report.tokens_after < report.tokens_before
    assert report.summary == "Told."
    assert report.error is None
    assert report.usage.model_calls == 1
    assert session.messages == [user("[Conversation summary]\nTold.", conversationSummary=True), before[-1]]
    assert store.saves == [4, 8, 12, 2]
    start, done = (event.to_dict() for event in events)
    assert (start["type"], start["trigger"], start["strategy"]) == ("compaction.start", "manual", "summarize")
    assert (done["type"], done["trigger"], done["summary"]) == ("compaction.done", "manual", True)
    assert done["tokensAfter"] == report.tokens_after
    assert "Told." not in str(done)
    assert [info.summary for info in infos] == ["Told."]
    again = await session.compact()
    assert (again.messages_before, again.messages_after) == (2, 2)
    assert again.tokens_after == again.tokens_before
    assert events[-1].noop is True
    assert len(store.saves) == 4
    await session.send("On.")
    assert len(session.messages) == 6


async def test_an_empty_transcript_is_left_alone() -> None:
    # CMP-32
    store, events = CountingStore(), list[Any]()
    session = reader(store=store).session("s")
    session.on(events.append)
    report = await session.compact()
    assert (report.messages_before, report.messages_after, report.tokens_before, report.strategy) == (0, 0, 0, "prune")
    assert (events, store.saves) == ([], [])


async def test_the_strategy_is_that_of_the_call_else_of_the_session_else_of_the_agent_else_pruning() -> None:
    # CMP-32, SES-01
    agents = {"agent": reader({"strategy": Named("agent")}), "none": reader(None)}
    session = agents["agent"].session("a", compaction={"strategy": Named("session")})
    for made, call, expected in (
        (session, {"strategy": Named("call")}, "call"),
        (session, {}, "session"),
        (agents["agent"].session("b"), {}, "agent"),
        (agents["agent"].session("c", compaction=False), {}, "prune"),
        (agents["none"].session("d"), {}, "prune"),
        (agents["agent"].session("e"), {"summarizer": mock_model(["S"])}, "two-phase"),
    ):
        await made.send("Hi.")
        report = await made.compact(protected_tokens=0, **call)
        assert report.strategy == expected
    with pytest.raises(ConfigurationError) as caught:
        await session.compact(protectd_tokens=3)
    assert caught.value.field == "compaction.protectd_tokens"


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def compact(self, input: Any) -> CompactionOutput:
        return CompactionOutput(messages=input.messages)


async def test_a_failed_strategy_leaves_the_session_as_it_was() -> None:
    # CMP-10
    class Bad(Named):
        def compact(self, input: Any) -> CompactionOutput:
            raise RuntimeError("bad strategy")

    store = CountingStore()
    session = reader(None, store=store).session("s")
    await session.send("Hi.")
    report = await session.compact(Bad("bad"))
    assert report.error == "bad strategy"
    assert store.saves == [4]


async def test_a_busy_session_is_not_compacted() -> None:
    # CMP-33
    gate = Gate("gate")
    agent = create_agent(provider=mock_model([calls("gate"), "done"]), tools=[gate.tool], runtime="local")
    session = agent.session("s")
    turn = asyncio.ensure_future(session.send("Go."))
    await gate.running.wait()
    with pytest.raises(LoushoError) as caught:
        await session.compact()
    assert caught.value.code == "LOUSHO_SESSION_BUSY"
    gate.go.set()
    assert (await turn).finish_reason == "stop"


async def test_a_session_with_an_unfinished_turn_is_not_compacted() -> None:
    # CMP-33
    ask = define_tool(name="ask", description="Asks.", execute=_ok, needs_approval=True)
    for script, expected in (
        ([RuntimeError("gone")], "LOUSHO_SESSION_TURN_PENDING"),
        ([calls("ask")], "LOUSHO_SESSION_AWAITING_APPROVAL"),
    ):
        store = memory_store()
        await store.sessions.save("s", conversation(2)[1:])
        agent = create_agent(provider=mock_model(script), tools=[ask, READ], runtime="local", store=store, retry=False)
        session = agent.session("s")
        await asyncio.gather(session.send("Go."), return_exceptions=True)
        with pytest.raises(LoushoError) as caught:
            await session.compact(protected_tokens=0)
        assert caught.value.code == expected
        assert isinstance(caught.value, SessionAwaitingApprovalError) == (expected == "LOUSHO_SESSION_AWAITING_APPROVAL")
        assert await store.sessions.load("s") == conversation(2)[1:]
        assert await session.pending() is not None


@pytest.mark.parametrize("policy", ["wait", "queue", "steer"])
async def test_a_turn_that_is_asked_for_meanwhile_waits_for_the_compaction(policy: Any) -> None:
    # CMP-33
    asked, go = asyncio.Event(), asyncio.Event()

    async def slow(request: GenerateOptions) -> str:
        asked.set()
        await go.wait()
        return "S"

    agent = reader({"strategy": summarize_strategy(model=PolicyProvider(slow)), "protected_tokens": 0})
    session = agent.session("s", turn_policy=policy)
    await read_three(session)
    compacting = asyncio.ensure_future(session.compact())
    await asked.wait()
    turn = asyncio.ensure_future(session.send("Next."))
    with pytest.raises(LoushoError, match="while a turn runs"):
        await session.compact()
    go.set()
    assert (await compacting).messages_after == 2
    assert (await turn).finish_reason == "stop"
    assert [message.text for message in session.messages if message.role == "user"] == ["[Conversation summary]\nS", "Next."]


async def test_a_compaction_by_hand_that_is_cancelled_changes_nothing() -> None:
    asked = asyncio.Event()

    async def never(request: GenerateOptions) -> str:
        asked.set()
        await asyncio.Event().wait()
        return "S"

    store = CountingStore()
    session = reader({"strategy": summarize_strategy(model=PolicyProvider(never)), "protected_tokens": 0}, store=store).session("s")
    await read_three(session)
    compacting = asyncio.ensure_future(session.compact())
    await asked.wait()
    compacting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await compacting
    assert store.saves == [4, 8, 12]
    assert (await session.send("On.")).finish_reason == "stop"


async def test_old_records_of_turns_go_when_a_compaction_makes_their_lengths_come_round() -> None:
    store = Store()
    session = reader({"strategy": summaries(), "protected_tokens": 0}, store=store).session("s")
    await read_three(session)
    stale: Mapping[str, Any] = {"sessionId": "s.turn-2", "status": "finished", "messages": [], "revision": 1}
    await store.checkpoints.save(stale)
    assert (await session.compact()).messages_after == 2
    assert await store.checkpoints.load("s.turn-2") is None
    await session.send("On.")
    assert session.messages[0].text == "[Conversation summary]\nS"


def test_it_can_be_done_from_plain_code() -> None:
    session = reader({"strategy": summaries(), "protected_tokens": 0}).session("s")
    session.send_sync("Go.")
    assert session.compact_sync().messages_after == 2
