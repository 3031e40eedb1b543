"""Where the parts of a session are taken from, what is found in them by others, and stores that are slow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, StorageError
from lousho_ray.messages import user
from lousho_ray.stores.files import file_store
from lousho_ray.stores.memory import InMemoryApprovalStore, InMemoryCheckpointStore, MemorySessionStore, memory_store
from lousho_ray.stores.parts import Parts
from lousho_ray.stores.saving import save_in_time
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import agent_of, calls, plain, shape


@tool(needs_approval=True)
def pay(amount: int = 5) -> str:
    """Pays."""
    return f"paid {amount}"


def paying(*after: Any, **options: Any) -> Any:
    return agent_of(calls("pay"), *after, tools=[pay], **options)


async def where(store: Any, id: str, pause: str | None) -> list[str]:
    """Which parts of a store know of a session that has paused."""
    found = []
    if store.sessions is not None and await store.sessions.load(id) is not None:
        found.append("sessions")
    if store.checkpoints is not None and await store.checkpoints.load(f"{id}.turn-2") is not None:
        found.append("checkpoints")
    if pause is not None and store.approvals is not None and await store.approvals.load(pause) is not None:
        found.append("approvals")
    return found


async def test_each_part_is_taken_from_the_nearest_that_has_it() -> None:
    # STO-11, SES-10, SES-01, APR-53, CA-22
    agents, sessions, bare = memory_store(), memory_store(), MemorySessionStore()
    checkpoints, own_approvals = InMemoryCheckpointStore(), InMemoryApprovalStore()

    async def paused(options: dict[str, Any], **agent_options: Any) -> str:
        agent = agent_of("Hi", calls("pay"), tools=[pay], store=agents, **agent_options)
        session = agent.session("s", **options)
        await session.send("Hi")
        result = await session.send("Pay")
        await session.discard_pending()
        return str(result.approval_id)

    pause = await paused({})
    assert await where(agents, "s", pause) == ["sessions", "approvals"]
    pause = await paused({"store": sessions})
    assert await where(sessions, "s", pause) == ["sessions", "approvals"]
    agent = agent_of("Hi", calls("pay"), tools=[pay], store=agents, approval_store=own_approvals)
    session = agent.session("t", store=bare, checkpoint_store=checkpoints)
    await session.send("Hi")
    result = await session.send("Pay")
    assert await bare.load("t") is not None
    assert await checkpoints.load("t.turn-2") is not None
    assert await own_approvals.load(str(result.approval_id)) is not None
    assert await where(agents, "t", result.approval_id) == []
    session = agent_of("Hi", calls("pay"), tools=[pay], store=agents).session("u", checkpoint_store=sessions)
    await session.send("Hi")
    result = await session.send("Pay")
    assert await where(agents, "u", result.approval_id) == ["sessions", "approvals"]
    assert await where(sessions, "u", None) == ["checkpoints"]


@pytest.mark.parametrize(("option", "value"), [("store", "s.db"), ("store", object()), ("checkpoint_store", "c.db"), ("store", 5)])
def test_something_else_is_refused(option: str, value: Any) -> None:
    # SES-01
    with pytest.raises(ConfigurationError) as caught:
        agent_of("Hi").session(**{option: value})
    assert caught.value.field == option


# --------------------------------------------------------------------------------------------------------------------- pauses


async def test_a_plain_run_pauses_into_the_agents_store_and_is_decided_elsewhere(tmp_path: Path) -> None:
    # APR-53, APR-54, APR-D9
    with SqliteStore(tmp_path / "s.db") as store:
        paused = await paying(store=store).send("Pay", metadata={"who": "ann"})
    with SqliteStore(tmp_path / "s.db") as store:
        other = agent_of("Done", tools=[pay], store=store)
        assert await other.approvals.list() == []
        result = await other.approvals.resolve(paused.approval_id or "", approved=True)
        assert (result.text, result.usage.model_calls) == ("Done", 2)
        assert shape(result.messages)[1:] == ["user:Pay", "assistant:+pay", "tool:pay", "assistant:Done"]


async def test_an_approval_store_of_its_own_wins_over_the_store() -> None:
    # APR-53
    store, own = memory_store(), InMemoryApprovalStore()
    agent = paying("Done", store=store, approval_store=own)
    paused = await agent.session("s").send("Pay")
    assert await own.load(paused.approval_id or "") is not None
    assert await store.approvals.load(paused.approval_id or "") is None
    result = await agent_of("Done", tools=[pay], store=store, approval_store=own).approvals.resolve(
        paused.approval_id or "", approved=True
    )
    assert result.text == "Done"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_all_open_pauses_of_the_store_can_be_listed(tmp_path: Path, kind: str) -> None:
    # APR-D6, APR-16
    store: Any = memory_store() if kind == "memory" else SqliteStore(tmp_path / "s.db")
    first, second = paying("Done", store=store), paying(calls("pay"), store=store)
    made = [await first.session("a").send("Pay"), await second.session("b").send("Pay"), await second.send("Pay", session_id="c")]
    ids = [result.approval_id for result in made[:2]]
    assert [pending.id for pending in await first.approvals.list()] == ids[:1]
    listed = await first.approvals.list(all=True)
    assert {pending.id for pending in listed} == {result.approval_id for result in made} - {None}
    assert [pending.created_at for pending in listed] == sorted(pending.created_at for pending in listed)
    assert (listed[0].tool_name, dict(listed[0].args)) == ("pay", {"amount": 5})
    await first.approvals.resolve(ids[0] or "", approved=True)
    assert ids[0] not in [pending.id for pending in await first.approvals.list(all=True)]
    if kind == "sqlite":
        store.close()


class NoList:
    """An approval store with the methods that are required."""

    def __init__(self) -> None:
        inner = InMemoryApprovalStore()
        self.save, self.load, self.resolve = inner.save, inner.load, inner.resolve


async def test_a_store_that_cannot_list_says_so() -> None:
    # APR-D6, APR-52
    agent = paying("Done", approval_store=NoList())
    paused = await agent.session().send("Pay")
    with pytest.raises(ConfigurationError, match="list_pending") as caught:
        await agent.approvals.list(all=True)
    assert caught.value.field == "all"
    assert [pending.id for pending in await agent.approvals.list()] == [paused.approval_id]
    assert (await agent.approvals.resolve(paused.approval_id or "", approved=True)).text == "Done"


async def test_pauses_of_an_agent_without_a_store_are_its_own() -> None:
    # APR-53
    one, other = paying("Done"), paying("Done")
    paused = await one.send("Pay")
    assert await other.approvals.get(paused.approval_id or "") is None
    assert [pending.id for pending in await one.approvals.list(all=True)] == [paused.approval_id]


# ---------------------------------------------------------------------------------------------------------------- slow stores


class Slow(InMemoryCheckpointStore):
    """Answers the saves of a list by hanging or failing first."""

    def __init__(self, *trouble: str) -> None:
        super().__init__()
        self.trouble = list(trouble)
        self.tries: list[int] = []

    async def save(self, checkpoint: Any, /) -> None:
        self.tries.append(checkpoint["revision"])
        if len(self.tries) > 1 and self.trouble:
            if self.trouble.pop(0) == "hang":
                await asyncio.Event().wait()
            raise ConnectionError("gone for a moment")
        await super().save(checkpoint)


def durable(checkpoints: Any, *turns: Any) -> Any:
    store = Parts(MemorySessionStore(), checkpoints)
    return create_agent(provider=mock_model(turns), tools=[plain("look")], store=store, store_timeout_ms=20)


async def test_a_save_that_hangs_or_fails_for_a_moment_is_tried_again() -> None:
    # DUR-D6
    checkpoints = Slow("hang", "lose")
    result = await durable(checkpoints, calls("look"), "Done").session("s").send("Hi")
    assert result.text == "Done"
    assert checkpoints.tries[:5] == [1, 2, 2, 2, 3]  # the same save, until it is in the store


async def test_a_save_that_hangs_is_tried_three_times_and_fails_the_turn() -> None:
    # DUR-D6, DUR-17
    checkpoints = Slow(*["hang"] * 3)
    session = durable(checkpoints, calls("look"), "Done").session("s")
    with pytest.raises(StorageError, match=r"store_timeout_ms \(20\)"):
        await session.send("Hi")
    assert checkpoints.tries == [1, 2, 2, 2]
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.text == "Done"


async def test_a_transcript_and_a_pause_have_the_same_deadline() -> None:
    # DUR-D6
    class Hangs(MemorySessionStore):
        async def save(self, id: str, messages: Any, /, **fence: Any) -> None:
            await asyncio.Event().wait()

    class HangsToo(InMemoryApprovalStore):
        async def save(self, pending: Any, snapshot: Any, /) -> None:
            await asyncio.Event().wait()

    with pytest.raises(StorageError, match="Session 's'"):
        await agent_of("Hi", store_timeout_ms=5).session("s", store=Hangs()).send("Hi")
    with pytest.raises(StorageError, match="Approval"):
        await paying(approval_store=HangsToo(), store_timeout_ms=5).send("Pay")


async def test_a_refusal_of_the_store_is_not_tried_again() -> None:
    tries: list[str] = []

    async def refuse() -> None:
        tries.append("save")
        raise StorageError("The store is closed.")

    with pytest.raises(StorageError, match="closed"):
        await save_in_time(refuse, 1_000, "It")
    assert tries == ["save"]

    async def fail() -> None:
        tries.append("save")
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        await save_in_time(fail, 1_000, "It")
    assert len(tries) == 4


# ------------------------------------------------------------------------------------------------------- stores of one's own


class NoHistory:
    """A checkpoint store with the methods that are required."""

    def __init__(self) -> None:
        inner = InMemoryCheckpointStore()
        self.save, self.load, self.delete = inner.save, inner.load, inner.delete


async def test_a_checkpoint_store_without_history_works_for_all_but_history_and_forks() -> None:
    # STO-40, DUR-47, DUR-52
    agent = durable(NoHistory(), calls("look"), RuntimeError("broken"), "Done", calls("look"), "Again")
    session = agent.session("s")
    with pytest.raises(Exception, match="broken"):
        await session.send("Hi")
    resumed = await session.resume()
    assert resumed is not None
    assert resumed.text == "Done"
    await session.clear()
    assert (await agent.send("Go", session_id="r")).text == "Again"
    with pytest.raises(ConfigurationError, match="history") as caught:
        await agent.fork("r", 1)
    assert caught.value.field == "store"


async def test_files_that_two_processes_write_at_once_are_whole_and_the_last_write_counts(tmp_path: Path) -> None:
    # STO-24, STO-17
    stores = [file_store(tmp_path) for _ in range(2)]
    transcripts = [[user(f"{number}" * size)] for number, size in ((1, 10), (2, 50_000))]
    for _ in range(5):
        writes = zip(stores * 2, transcripts * 2, strict=True)
        await asyncio.gather(*(store.sessions.save("s", messages) for store, messages in writes))
        assert await stores[0].sessions.load("s") in transcripts
    await stores[1].sessions.save("s", transcripts[0])
    assert await stores[0].sessions.load("s") == transcripts[0]
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["s.json"]
