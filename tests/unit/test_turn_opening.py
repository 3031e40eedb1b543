"""How a turn begins in a store that takes its lease and its first checkpoint in one step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import ConfigurationError, LoushoError, SqliteStore, StorageError
from lousho_ray.errors import AgentDriftError, CompactedError, CompactedLLMProviderError
from lousho_ray.messages import assistant, user
from tests.unit.loop_support import agent_of, shape


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(tmp_path / "s.db") as opened:
        yield opened


def failure() -> CompactedLLMProviderError:
    return CompactedLLMProviderError("It failed.", compacted=CompactedError("server-error", "It failed.", status=500))


async def interrupted(agent: Any, **options: Any) -> None:
    with pytest.raises(CompactedLLMProviderError):
        await agent.session("s").send("two", **options)


async def test_a_turn_without_tools_waits_for_its_store_twice(store: SqliteStore) -> None:
    # DUR-11: nothing is written between the two but what a reply with calls adds
    session = agent_of("One", "Two", store=store).session("s")
    await session.send("one")
    before = store.transactions
    await session.send("two")
    assert store.transactions - before == 2


async def test_the_input_of_a_turn_is_in_the_store_before_the_model_is_called(store: SqliteStore) -> None:
    # DUR-05, DUR-09, DUR-15, SES-44, SES-55
    agent = agent_of("One", failure(), store=store)
    await agent.session("s").send("one")
    await interrupted(agent, metadata={"k": 1}, principal={"id": "u"})
    record = await store.checkpoints.load("s.turn-2")
    assert record is not None
    assert [message["content"] for message in record["messages"]] == ["two"], "what it goes on from is stored already"
    assert (record["status"], record["stepIndex"], record["revision"]) == ("in-progress", 0, 1)
    assert (record["metadata"], record["principal"]) == ({"k": 1}, {"id": "u"})
    assert record["agentFingerprint"]["hash"]


@pytest.mark.parametrize("how", ["resume", "send"])
async def test_a_turn_of_which_only_the_input_is_stored_is_run_again(store: SqliteStore, how: str) -> None:
    # SES-08, SES-47, SES-48, DUR-09, DUR-20
    agent = agent_of("One", failure(), store=store, instructions="Old.")
    await agent.session("s").send("one")
    await interrupted(agent, principal={"id": "u"})
    seen: list[Any] = []

    def instructions(who: Any) -> str:
        seen.append((who.principal, [message.text for message in who.input]))
        return "New."

    later = agent_of("Two", "Three", store=store, instructions=instructions)
    session = later.session("s")
    result = await (session.resume() if how == "resume" else session.send("three"))
    assert result is not None
    assert result.messages[0].text == "New."
    assert seen[0] == ({"id": "u"}, ["two"])
    expected = ["user:one", "assistant:One", "user:two", "assistant:Two"]
    assert shape(await session.load()) == [*expected, *(["user:three", "assistant:Three"] if how == "send" else [])]
    assert await session.pending() is None
    assert await store.checkpoints.history("s.turn-2") == []


async def test_a_turn_that_cannot_begin_leaves_nothing_behind(store: SqliteStore) -> None:
    # SES-18
    def broken(_: Any) -> str:
        raise RuntimeError("no")

    session = agent_of("One", store=store, instructions=broken).session("s")
    with pytest.raises(ConfigurationError):
        await session.send("one")
    assert await session.pending() is None
    assert await session.load() == []


async def test_what_cannot_be_stored_fails_the_turn_and_leaves_the_session_usable(store: SqliteStore) -> None:
    session = agent_of("One", store=store).session("s")
    with pytest.raises(StorageError, match="metadata"):
        await session.send("one", metadata={"thing": object()})
    assert (await session.send("one")).text == "One"


async def test_a_changed_agent_is_refused_and_the_turn_stays(store: SqliteStore) -> None:
    # DUR-D3
    await interrupted(agent_of(failure(), store=store))
    changed = agent_of("Two", store=store, instructions="Otherwise.", on_agent_drift="error").session("s")
    with pytest.raises(AgentDriftError):
        await changed.resume()
    assert await changed.pending() is not None


async def test_a_beginning_that_is_sent_again_finds_its_own_record(store: SqliteStore) -> None:
    # STO-44: the answer to the first call was lost
    opening = {"runId": "run_1", "status": "in-progress", "revision": 1, "messages": [user("hi").to_dict()]}
    first = await store.turns.open("s", "me/run_1", 60_000, opening=opening)
    again = await store.turns.open("s", "me/run_1", 60_000, opening=opening)
    assert first.checkpoint is None
    assert again.fence == first.fence
    assert again.checkpoint == {**opening, "sessionId": "s.turn-0"}


async def test_what_an_earlier_turn_left_is_not_overwritten(store: SqliteStore) -> None:
    left = {"sessionId": "s.turn-2", "runId": "run_0", "status": "in-progress", "messages": []}
    await store.sessions.save("s", [user("a"), assistant("b")])
    await store.checkpoints.save(left)
    opened = await store.turns.open("s", "me/run_1", 60_000, opening={"runId": "run_1", "status": "in-progress", "messages": []})
    assert opened.checkpoint == left
    assert await store.checkpoints.load("s.turn-2") == left


async def test_a_turn_that_has_not_begun_cannot_be_forked(store: SqliteStore) -> None:
    agent = agent_of(failure(), store=store)
    await interrupted(agent)
    with pytest.raises(LoushoError, match="none"):
        await agent.fork("s.turn-0", from_step=0)
