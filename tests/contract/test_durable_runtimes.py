"""What durable sessions and runs promise, whatever runtime they run in. Here in one process; `tests/ray` runs the same on Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import Agent, LoushoError, OpenAICompatibleProvider, SqliteStore, ToolContext, create_agent, tool
from lousho_ray.errors import (
    AgentDriftError,
    CompactedLLMProviderError,
    ConfigurationError,
    ResumeToolMissingError,
    SessionAwaitingApprovalError,
    SessionTurnFailedError,
    ToolArgumentsValidationError,
)
from lousho_ray.testing.fake_server import FakeServer, Reply, status
from tests.unit.loop_support import check_transcript, kinds, results, shape

Make = Callable[..., Agent[Any]]


@pytest.fixture
def runtime() -> str:
    return "local"


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(timeout_s=20) as server:
        yield server
    assert server.violations == []


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "runs.db")
    yield store
    await store.aclose()


@pytest.fixture
def lines(tmp_path: Path) -> Callable[[], list[str]]:
    """What the tools have done, whatever process they ran in."""
    file = tmp_path / "lines"
    return lambda: file.read_text().splitlines() if file.exists() else []


@pytest.fixture
async def make(runtime: str, server: FakeServer, store: SqliteStore, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes agents with one model, one store, and the tools `mark` and `guarded`."""
    file = str(tmp_path / "lines")
    providers = []

    @tool
    def mark(name: str, ctx: ToolContext) -> str:
        """Marks."""
        with open(file, "a") as lines:
            lines.write(f"{name} {ctx.tool_call_id}\n")
        return f"marked {name}"

    @tool(needs_approval=True)
    def guarded(name: str, ctx: ToolContext) -> str:
        """Marks once a person has agreed."""
        with open(file, "a") as lines:
            lines.write(f"{name} {ctx.tool_call_id}\n")
        return f"guarded {name}"

    def agent(**options: Any) -> Agent[Any]:
        provider = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
        providers.append(provider)
        given = {"tools": [mark, guarded], "store": store, "retry": False, "runtime": runtime, **options}
        return create_agent(provider=provider, **given)

    yield agent
    await asyncio.gather(*(provider.aclose() for provider in providers))


def asks(*names: str, tool: str = "mark") -> Reply:
    return Reply(tool_calls=[(tool, {"name": name}, f"c-{name}") for name in names])


MIXED = Reply(
    tool_calls=[("mark", {"name": "a"}, "c-a"), ("guarded", {"name": "g"}, "c-g"), ("mark", {"name": "b"}, "c-b")],
)


async def test_a_failed_turn_is_finished_ahead_of_the_next(make: Make, server: FakeServer, lines: Any) -> None:
    # SES-47, SES-48, SES-55, DUR-31
    server.respond([asks("a"), [status(503, body="{}")], Reply("one"), Reply("two")])
    session = make().session("s")
    with pytest.raises(CompactedLLMProviderError):
        await session.send("First")
    pending = await make().session("s").pending()
    assert pending is not None
    assert pending.status == "in-progress"
    assert (await make().session("s").send("Second")).text == "two"
    expected = ["user:First", "assistant:+mark", "tool:mark", "assistant:one", "user:Second", "assistant:two"]
    assert shape(await session.load()) == expected
    assert lines() == ["a c-a"]
    assert len(server.requests) == 4


async def test_a_turn_that_failed_for_good_says_so(make: Make, server: FakeServer) -> None:
    # SES-D3
    server.respond([[status(401, body="{}")], Reply("one")])
    session = make().session("s")
    with pytest.raises(CompactedLLMProviderError):
        await session.send("First")
    with pytest.raises(SessionTurnFailedError) as raised:
        await session.send("Second")
    assert raised.value.attempts == 1
    assert raised.value.last_error is not None
    assert len(server.requests) == 1
    result = await session.resume()
    assert result is not None
    assert result.text == "one"
    assert await session.resume() is None


async def test_a_pause_is_decided_by_another_agent_object(make: Make, server: FakeServer, lines: Any) -> None:
    # LES-61, SES-49, SES-51, SES-52, APR-17, APR-19, APR-21
    server.respond([MIXED, Reply("done")])
    first = make()
    paused = await first.session("s").send("Hi")
    assert paused.finish_reason == "awaiting-approval"
    assert [one.id for one in await first.approvals.list()] == [paused.approval_id]
    other = make()
    with pytest.raises(SessionAwaitingApprovalError) as raised:
        await other.session("s").send("More")
    assert raised.value.approval_id == paused.approval_id
    result = await other.approvals.resolve(str(paused.approval_id), approved=True, by="ann", note="Fine.")
    assert result.text == "done"
    assert lines() == ["a c-a", "g c-g", "b c-b"]
    saved = await first.session("s").load()
    check_transcript(saved)
    assert kinds(saved) == ["ok", "ok", "ok"]
    assert await other.session("s").pending() is None
    assert await first.approvals.list() == []


async def test_a_rejection_and_edited_arguments(make: Make, server: FakeServer, lines: Any) -> None:
    # APR-20, LES-27
    server.respond([asks("g", tool="guarded"), asks("h", tool="guarded"), Reply("done")])
    agent = make()
    paused = await agent.session("s").send("Hi")
    again = await agent.approvals.resolve(str(paused.approval_id), approved=False, note="No.")
    assert again.finish_reason == "awaiting-approval"
    with pytest.raises(ToolArgumentsValidationError):
        await agent.approvals.resolve(str(again.approval_id), approved=True, args={"nam": "x"})
    assert lines() == []
    result = await agent.approvals.resolve(str(again.approval_id), approved=True, args={"name": "edited"})
    assert lines() == ["edited c-h"]
    assert kinds(result.messages) == ["rejected", "ok"]
    assert results(result.messages)[1] == {"editedArguments": {"name": "edited"}, "result": "guarded edited"}


async def test_of_two_deciders_one_wins(make: Make, server: FakeServer, lines: Any) -> None:
    # APR-18
    server.respond([asks("g", tool="guarded"), Reply("done")])
    agents = [make(), make()]
    paused = await agents[0].session("s").send("Hi")
    decisions = [agent.approvals.resolve(str(paused.approval_id), approved=True) for agent in agents * 3]
    outcomes = await asyncio.gather(*decisions, return_exceptions=True)
    lost = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(lost) == len(outcomes) - 1
    assert {getattr(error, "code", None) for error in lost} == {"LOUSHO_APPROVAL_NOT_FOUND"}
    assert lines() == ["g c-g"]
    assert len(server.requests) == 2


async def test_an_agent_that_may_not_go_on_leaves_the_pause(make: Make, server: FakeServer, lines: Any) -> None:
    # DUR-40, DUR-41, APR-24
    server.respond([asks("g", tool="guarded"), Reply("done")])
    paused = await make().session("s").send("Hi")
    with pytest.raises(AgentDriftError) as drifted:
        await make(instructions="Other.", on_agent_drift="error").approvals.resolve(str(paused.approval_id), approved=True)
    assert drifted.value.changes["instructions"] is True
    with pytest.raises(ResumeToolMissingError) as missing:
        await make(tools=[]).approvals.resolve(str(paused.approval_id), approved=True)
    assert missing.value.tool_name == "guarded"
    assert len(server.requests) == 1
    assert (await make().approvals.resolve(str(paused.approval_id), approved=True)).text == "done"
    assert lines() == ["g c-g"]


async def test_a_question_is_answered(make: Make, server: FakeServer) -> None:
    # APR-39, APR-40, SES-46
    question = {"question": "Which?", "options": ["Red", "Blue"]}
    server.respond([Reply(tool_calls=[("ask_question", question, "q1")]), Reply("done")])
    agent = make(tools=[], ask_question=True)
    session = agent.session("s")
    paused = await session.send("Hi")
    pending = await session.pending()
    assert pending is not None
    assert pending.approval_kind == "question"
    result = await make(tools=[], ask_question=True).approvals.answer(str(paused.approval_id), "blue")
    assert results(result.messages) == [{"answer": "blue", "option": 1}]


async def test_dropping_and_clearing(make: Make, server: FakeServer, lines: Any) -> None:
    # SES-53, SES-58, SES-59, APR-26
    server.respond([asks("g", tool="guarded"), Reply("one"), Reply("two")])
    agent = make()
    session = agent.session("s")
    paused = await session.send("Hi")
    await session.discard_pending()
    with pytest.raises(LoushoError) as raised:
        await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert raised.value.code == "LOUSHO_APPROVAL_ORPHANED"
    assert lines() == []
    await session.send("Again")
    await session.clear()
    assert await session.load() == []
    await session.send("New")
    assert shape(await session.load()) == ["user:New", "assistant:two"]


async def test_history_and_fork(make: Make, server: FakeServer) -> None:
    # SES-65, SES-68, SES-69, SES-71
    server.respond([asks("a"), Reply("one"), Reply("two"), Reply("forked")])
    session = make().session("s")
    await session.send("First")
    await session.send("Second")
    steps = await session.history()
    assert [(step.step, step.turn, step.text) for step in steps] == [(1, 0, ""), (2, 0, "one"), (3, 1, "two")]
    fork = await session.fork(2)
    assert fork.id == "s-fork-1"
    await fork.send("Other")
    assert shape(await fork.load())[-3:] == ["assistant:one", "user:Other", "assistant:forked"]
    assert shape(await session.load())[-1] == "assistant:two"
    with pytest.raises(ConfigurationError) as raised:
        await session.fork(2, id="s-fork-1")
    assert raised.value.code == "LOUSHO_SESSION_EXISTS"


async def test_a_session_without_a_store_is_forked_in_memory(make: Make, server: FakeServer) -> None:
    server.respond([Reply("one"), Reply("two")])
    session = make(store=None).session("s")
    await session.send("First")
    fork = await session.fork(1)
    await fork.send("Second")
    assert shape(await fork.load()) == ["user:First", "assistant:one", "user:Second", "assistant:two"]
    assert shape(await session.load()) == ["user:First", "assistant:one"]


async def test_durable_runs(make: Make, server: FakeServer, lines: Any) -> None:
    # DUR-20, DUR-24, DUR-26, DUR-27
    server.respond([MIXED, [status(503, body="{}")], Reply("one"), Reply("two")])
    agent = make()
    paused = await agent.send("Hi", session_id="r")
    with pytest.raises(SessionAwaitingApprovalError):
        await make().send("More", session_id="r")
    with pytest.raises(CompactedLLMProviderError):
        await make().approvals.resolve(str(paused.approval_id), approved=True)
    result = await make().resume("r")
    assert result is not None
    assert result.text == "one"
    assert lines() == ["a c-a", "g c-g", "b c-b"]
    assert (await agent.send("Again", session_id="r")).text == "two"
    assert await agent.resume("r") is None
