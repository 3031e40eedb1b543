"""What a call may not do to the turn of another: one that is given up, that comes after a failed turn, whose lease was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lousho_ray.cancellation import AbortSignal
from lousho_ray.create import create_agent
from lousho_ray.errors import CompactedError, CompactedLLMProviderError, LoushoError, SessionAwaitingApprovalError, StorageError
from lousho_ray.loop.checkpoint import Recorder, RunFacts
from lousho_ray.loop.state import RunState
from lousho_ray.messages import Message, user
from lousho_ray.stores.files import file_store
from lousho_ray.stores.memory import InMemoryCheckpointStore, MemorySessionStore, memory_store
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.clock import FakeClock
from lousho_ray.tools.tool import tool
from lousho_ray.turn_lease import LEASE_MS, TurnLease
from tests.unit.loop_support import Gate, PolicyProvider, agent_of, asks, calls, shape, until


def failure() -> CompactedLLMProviderError:
    return CompactedLLMProviderError("It failed.", compacted=CompactedError("server-error", "It failed.", status=500))


@tool(needs_approval=True)
def pay() -> str:
    """Pays."""
    return "paid"


# ------------------------------------------------------------------------------------------------- calls that are given up


@pytest.mark.parametrize("kind", ["memory", "sqlite", "files"])
@pytest.mark.parametrize("how", ["send", "stream", "resume"])
async def test_a_call_that_is_given_up_in_line_leaves_the_running_turn_alone(kind: str, how: str, tmp_path: Any) -> None:
    # SES-19, SES-30, SES-54: its own turn is dropped, and it never had one
    stores: dict[str, Any] = {"memory": memory_store, "sqlite": lambda: SqliteStore(tmp_path / "a.db")}
    store = stores.get(kind, lambda: file_store(tmp_path, fsync=False))()
    gate = Gate("slow")
    session = agent_of(calls("slow"), "Done", "never", tools=[gate.tool], store=store).session("s")
    first = asyncio.ensure_future(session.send("Hi"))
    await gate.running.wait()
    before = await store.checkpoints.load("s.turn-0")
    if how == "stream":
        run = session.stream("Given up")
        run.abort("Never mind.")
        assert [event.type async for event in run] == ["run.done"]
        result = await run.result
        assert (result.finish_reason, (result.abort_reason or {})["message"]) == ("aborted", "Never mind.")
    else:
        waiting = asyncio.ensure_future(session.send("Given up") if how == "send" else session.resume())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await store.checkpoints.load("s.turn-0") == before  # what a crash of the first turn would be mended with
    gate.go.set()
    assert (await first).text == "Done"
    assert shape(await session.load()) == ["user:Hi", "assistant:+slow", "tool:slow", "assistant:Done"]
    if kind == "sqlite":
        await store.aclose()


async def test_a_wait_for_another_processs_turn_that_is_given_up_leaves_that_turn_alone() -> None:
    # SES-54, DEC-R3
    store = memory_store()
    await store.checkpoints.save({"sessionId": "s.turn-0", "messages": [user("Hi").to_dict()], "status": "in-progress"})
    fence = await store.sessions.claim("s", "another/run", 30_000)
    assert fence is not None
    run = agent_of("never", store=store).session("s").stream("Given up")
    for _ in range(20):
        await asyncio.sleep(0)
    run.abort()
    assert (await run.result).finish_reason == "aborted"
    assert await store.checkpoints.load("s.turn-0") is not None
    assert await store.sessions.renew("s", "another/run", fence, 30_000)


async def test_giving_up_a_call_does_not_drop_the_failed_turn_that_it_finishes_first() -> None:
    # SES-48, SES-55
    store, gate = memory_store(), Gate("slow")
    session = agent_of(calls("slow"), failure(), "Done", "Next", tools=[gate.tool], store=store).session("s")
    first = asyncio.ensure_future(session.send("Hi"))
    await gate.running.wait()
    gate.go.set()
    with pytest.raises(CompactedLLMProviderError):
        await first
    model = PolicyProvider(lambda options: asyncio.Event().wait())
    second = create_agent(provider=model, tools=[gate.tool], store=store).session("s").stream("More")
    await until(lambda: model.running)
    second.abort()
    assert (await second.result).finish_reason == "aborted"
    pending = await session.pending()
    assert pending is not None
    assert pending.status == "in-progress"
    await session.resume()
    assert shape(await session.load()) == ["user:Hi", "assistant:+slow", "tool:slow", "assistant:Done"]


# ------------------------------------------------------------------------------------------------------- after a failed turn


async def test_a_pending_turn_that_pauses_on_the_way_stops_the_call_that_came_after_it() -> None:
    # SES-48, SES-49: both turns would have the same checkpoint
    store = memory_store()
    agent = agent_of(failure(), calls("pay"), "Done", "Next", tools=[pay], store=store)
    session = agent.session("s")
    with pytest.raises(CompactedLLMProviderError):
        await session.send("Hi")
    with pytest.raises(SessionAwaitingApprovalError) as raised:
        await session.send("More")
    pending = await session.pending()
    assert pending is not None
    assert (pending.status, pending.approval_id) == ("awaiting-approval", raised.value.approval_id)
    await agent.approvals.resolve(raised.value.approval_id, approved=True)
    assert shape(await session.load()) == ["user:Hi", "assistant:+pay", "tool:pay", "assistant:Done"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_turn_that_comes_after_the_one_it_finished_has_the_lease_too(kind: str, tmp_path: Any) -> None:
    # SES-48, LES-62, DEC-R3: else two processes would write one session
    async with memory_store() if kind == "memory" else SqliteStore(tmp_path / "a.db") as store:
        gate = Gate("slow")
        session = agent_of(failure(), "Done", calls("slow"), "Next", tools=[gate.tool], store=store).session("s")
        with pytest.raises(CompactedLLMProviderError):
            await session.send("Hi")
        second = asyncio.ensure_future(session.send("More"))
        await gate.running.wait()
        assert await store.sessions.holder("s") is not None
        assert await store.sessions.claim("s", "another/run", 30_000) is None
        gate.go.set()
        await second
        assert await store.sessions.holder("s") is None
        assert [one.text for one in await session.load() if one.role == "user"] == ["Hi", "More"]
        assert await store.checkpoints.load("s.turn-0") is None


async def test_input_that_joined_a_turn_before_its_first_call_is_kept_when_that_fails() -> None:
    # SES-33, SES-D6, DUR-18
    store = memory_store()
    session = agent_of(failure(), "Done", store=store).session("s", turn_policy="queue")
    errors = await asyncio.gather(session.send("Hi"), session.send("More"), return_exceptions=True)
    assert [type(error) for error in errors] == [CompactedLLMProviderError] * 2
    await session.resume()
    assert shape(await session.load()) == ["user:Hi", "user:More", "assistant:Done"]


async def test_a_finished_turn_that_was_not_saved_yet_is_not_discarded() -> None:
    # SES-45, SES-53
    store = memory_store()
    messages = [Message("system", "Be brief."), user("Hi"), Message("assistant", "Done")]
    record = {"sessionId": "s.turn-0", "messages": [one.to_dict() for one in messages], "status": "finished"}
    await store.checkpoints.save(record)
    session = agent_of("Next", store=store).session("s")
    assert await session.pending() is None
    await session.discard_pending()
    await session.send("More")
    assert shape(await session.load()) == ["user:Hi", "assistant:Done", "user:More", "assistant:Next"]


async def test_the_turn_that_another_process_runs_is_not_discarded() -> None:
    # SES-53, DEC-R3
    store = memory_store()
    await store.checkpoints.save({"sessionId": "s.turn-0", "messages": [], "status": "in-progress"})
    await store.sessions.claim("s", "another/run", 30_000)
    session = agent_of("never", store=store, session_wait_ms=1).session("s")
    with pytest.raises(LoushoError) as raised:
        await session.discard_pending()
    assert raised.value.code == "LOUSHO_SESSION_BUSY"
    assert await store.checkpoints.load("s.turn-0") is not None


# ------------------------------------------------------------------------------------------------------ when the lease is lost


@pytest.mark.parametrize("where", ["session", "run"])
async def test_a_turn_that_was_taken_over_drops_nothing_of_its_successor(where: str) -> None:
    # LES-62, DEC-R3: a process that slept longer than its lease finds that another one has gone on with its turn
    clock = FakeClock()
    store = memory_store(clock=clock)
    gate, record = Gate("slow"), "s.turn-0" if where == "session" else "s"
    agent = agent_of(calls("slow"), "never", tools=[gate.tool], store=store)
    run = agent.session("s").stream("Hi") if where == "session" else agent.stream("Hi", session_id="s")
    await gate.running.wait()
    clock.advance(LEASE_MS + 1)
    assert await store.sessions.claim("s", "another/run", LEASE_MS) is not None
    saved = await store.checkpoints.load(record)
    assert saved is not None
    await store.checkpoints.save({**saved, "revision": saved["revision"] + 1_000, "status": "awaiting-approval", "approvalId": "a"})
    run.abort()
    await run.result
    kept = await store.checkpoints.load(record)
    assert kept is not None
    assert kept["approvalId"] == "a"


async def test_saves_of_one_that_was_taken_for_dead_do_not_land_behind_those_of_its_successor() -> None:
    # DUR-16, DUR-D6
    store, facts = InMemoryCheckpointStore(), RunFacts("agent", "s", None, {}, {})
    old = Recorder(store, "s.turn-0", facts)
    await old.save(RunState("old", [user("Hi")], opened_at=0))
    new = Recorder(store, "s.turn-0", facts, saved=await store.load("s.turn-0"))
    await new.save(RunState("new", [user("Hi"), user("result")], opened_at=0))
    with pytest.raises(StorageError, match="older"):
        await old.save(RunState("old", [user("Hi")], opened_at=0))
    saved = await store.load("s.turn-0")
    assert saved is not None
    assert saved["runId"] == "new"


@pytest.mark.parametrize("where", ["session", "run"])
async def test_a_call_that_may_not_be_repeated_is_not_started_by_one_that_was_taken_over(where: str) -> None:
    # DEC-R7, LES-62: who took the run over has read its record before the call was in it, and makes the call
    clock, log = FakeClock(), list[str]()
    store = memory_store(clock=clock)

    @tool(effect="once")
    def once() -> str:
        """May not be repeated."""
        log.append("once")
        return "done"

    async def reply(options: Any) -> Any:
        clock.advance(LEASE_MS + 1)
        assert await store.sessions.claim("s", "another/run", LEASE_MS) is not None
        return asks("once")

    agent = create_agent(provider=PolicyProvider(reply), tools=[once], store=store)
    with pytest.raises(StorageError, match="taken over"):
        await (agent.session("s").send("Hi") if where == "session" else agent.send("Hi", session_id="s"))
    assert log == []


async def test_input_is_once_in_a_record_that_is_made_while_it_joins() -> None:
    # DUR-18, DUR-32: the save of queued input waits for an earlier one, and the run takes the input meanwhile
    class Slow(InMemoryCheckpointStore):
        def __init__(self) -> None:
            super().__init__()
            self.go, self.reached = asyncio.Event(), asyncio.Event()

        async def save(self, checkpoint: Any, /) -> None:
            self.reached.set()
            await self.go.wait()
            await super().save(checkpoint)

    store = Slow()
    recorder = Recorder(store, "s.turn-0", RunFacts("agent", "s", None, {}, {}))
    state = RunState("run", [user("Hi")], opened_at=0)
    waiting: list[Message] = []
    first = asyncio.ensure_future(recorder.save(state))
    await store.reached.wait()
    waiting.append(user("More"))
    second = asyncio.ensure_future(recorder.save(state, lambda: tuple(waiting)))
    await asyncio.sleep(0)
    state.messages.append(waiting.pop())
    store.go.set()
    await asyncio.gather(first, second)
    saved = await store.load("s.turn-0")
    assert saved is not None
    assert [message["content"] for message in saved["messages"]] == ["Hi", "More"]


async def test_a_lease_that_this_process_no_longer_uses_is_not_waited_for() -> None:
    # DEC-R3: the store did the claim, but its answer was lost
    class LosesAnswers(MemorySessionStore):
        lose = True

        async def claim(self, id: str, holder: str, ttl_ms: float) -> int | None:
            fence = await super().claim(id, holder, ttl_ms)
            if self.lose:
                self.lose = False
                raise StorageError("The answer was lost.")
            return fence

    sessions = LosesAnswers()
    with pytest.raises(StorageError, match="lost"):
        async with TurnLease(sessions, "s", "one", AbortSignal()):
            pass
    async with TurnLease(sessions, "s", "two", AbortSignal(), wait_ms=0) as lease:
        assert await lease.held()
        with pytest.raises(LoushoError, match="in use"):
            async with TurnLease(sessions, "s", "three", AbortSignal(), wait_ms=0):
                pass
