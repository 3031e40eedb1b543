"""Limits over all turns of a session: what is counted, where it is kept, and when it stops a turn."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.agent import Agent
from lousho_ray.create import create_agent
from lousho_ray.durable import StoreParts
from lousho_ray.errors import BudgetExceededError, ConfigurationError, LoushoError
from lousho_ray.limits.session_spend import SessionSpend, without_spend
from lousho_ray.loop.input import as_messages
from lousho_ray.loop.state import Decision
from lousho_ray.messages import assistant, user
from lousho_ray.options import Limits
from lousho_ray.ports import FinishChunk, GenerateOptions, GenerateResult, TextChunk
from lousho_ray.providers.prices import register_model
from lousho_ray.session import DecisionRequest, TurnRequest
from lousho_ray.session_host import SessionHost
from lousho_ray.stores.files import file_store
from lousho_ray.stores.memory import MemorySessionStore, memory_store
from lousho_ray.stores.parts import Parts
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import tool
from lousho_ray.turns import TurnLine
from lousho_ray.usage import ProviderUsage, Spend
from tests.unit.loop_support import (
    Gate,
    PolicyProvider,
    ScriptedStream,
    agent_of,
    calls,
    collect,
    failing,
    names,
    plain,
    shape,
)

USED = {"input_tokens": 100, "output_tokens": 20}


def talking(**options: Any) -> Agent[Any]:
    """An agent whose turns take one call of 100 + 20 tokens."""
    model = mock_model([{"text": "Yes", "usage": USED}], on_exhausted="repeat-last")
    return create_agent(provider=model, **options)


def recorded(messages: Any) -> dict[str, Any]:
    """The record on the newest message."""
    record = dict((messages[-1].metadata or {})["sessionUsage"])
    assert record.pop("durationMs") >= 0
    return record


def sessions_only(sessions: Any) -> Any:
    """A store without checkpoints: turns are not durable."""
    return Parts(sessions)


STORES = {
    "memory": lambda folder: memory_store(),
    "not durable": lambda folder: sessions_only(MemorySessionStore()),
    "file": lambda folder: file_store(folder),
    "sqlite": lambda folder: SqliteStore(folder / "s.db"),
}


@pytest.mark.parametrize("store", STORES)
async def test_a_session_stops_at_its_limit_and_a_reopened_one_too(tmp_path: Path, store: str) -> None:
    # SES-61, SES-62, SES-63, SES-D9, BUD-25, BUD-26, BUD-27, BUD-11
    kept = STORES[store](tmp_path)
    session = talking(store=kept).session("s", limits={"max_tokens": 240})
    for turn in (1, 2):
        assert (await session.send("Hi")).ok
        assert recorded(session.messages) == {
            "inputTokens": 100 * turn,
            "outputTokens": 20 * turn,
            "totalTokens": 120 * turn,
            "costUnknown": True,
            "steps": turn,
        }
    stream = session.stream("More?")
    events = await collect(stream)
    stopped = await stream.result
    assert (stopped.finish_reason, stopped.steps, stopped.usage.model_calls) == ("budget-exceeded", 0, 0)
    assert stopped.budget is not None
    assert stopped.budget.to_dict() == {"limit": "maxTokens", "value": 240, "max": 240, "scope": "session"}
    assert names(events) == ["run.start", "budget.exceeded maxTokens", "run.done budget-exceeded"]
    assert events[1].scope == "session"
    if store in ("file", "sqlite"):
        kept = STORES[store](tmp_path)
    reopened = talking(store=kept).session("s", limits=Limits(max_tokens=240))
    assert (await reopened.send("Again?")).finish_reason == "budget-exceeded"
    assert shape(await reopened.load())[-3:] == ["assistant:Yes", "user:More?", "user:Again?"]
    assert recorded(reopened.messages)["totalTokens"] == 240
    raised = talking(store=kept).session("s", limits={"max_tokens": 1_000})
    assert (await raised.send("And now?")).ok
    assert recorded(raised.messages)["totalTokens"] == 360


async def test_a_session_keeps_its_account_once_it_has_one() -> None:
    # SES-62
    store = memory_store()
    await talking(store=store).session("s").send("Free")
    assert (await talking(store=store).session("s").load())[-1].metadata is None
    await talking(store=store).session("s", limits={"max_tokens": 1_000}).send("Counted")
    await talking(store=store).session("s").send("Counted, too")
    assert recorded(await talking(store=store).session("s").load())["totalTokens"] == 240


async def test_the_limit_stops_a_turn_between_its_steps() -> None:
    # SES-61, BUD-04, BUD-06
    model = mock_model([calls("look", usage=USED)], on_exhausted="repeat-last")
    agent = create_agent(provider=model, tools=[plain("look")], store=memory_store())
    session = agent.session(limits={"max_input_tokens": 500})
    first = await session.send("Go", max_steps=3)
    assert (first.finish_reason, first.steps) == ("max-steps", 3)
    second = await session.send("Go on")
    assert (second.finish_reason, second.steps) == ("budget-exceeded", 2)
    assert second.budget is not None
    assert second.budget.to_dict() == {"limit": "maxInputTokens", "value": 500, "max": 500, "scope": "session"}
    assert shape(session.messages)[-3:] == ["tool:look", "assistant:+look", "tool:look"]


async def test_steps_are_counted_over_all_turns() -> None:
    # BUD-25
    session = talking().session(limits={"max_steps": 2})
    results = [await session.send("Hi") for _ in range(3)]
    assert [result.finish_reason for result in results] == ["stop", "stop", "budget-exceeded"]
    assert results[-1].budget is not None
    assert results[-1].budget.to_dict() == {"limit": "maxSteps", "value": 2, "max": 2, "scope": "session"}


async def test_tool_errors_are_each_turns_own() -> None:
    # BUD-25
    session = agent_of(*[calls("bad"), "Sorry"] * 2, calls("bad", "bad"), "no", tools=[failing("bad", ValueError("no"))]).session(
        limits={"max_tool_errors": 2}
    )
    assert (await session.send("a")).ok
    assert (await session.send("b")).ok
    third = await session.send("c")
    assert third.budget is not None
    assert third.budget.to_dict() == {"limit": "maxToolErrors", "value": 2, "max": 2, "scope": "session"}


async def test_the_agents_own_limit_is_reported_before_the_sessions() -> None:
    # SES-61, BUD-10, RUN-67
    model = mock_model([calls("look", usage=USED)], on_exhausted="repeat-last")
    agent = create_agent(provider=model, tools=[plain("look")], limits={"max_tokens": 120})
    session = agent.session(limits={"max_tokens": 240})
    results = [await session.send("Hi") for _ in range(3)]
    assert [result.budget and result.budget.scope for result in results] == ["run", "run", "session"]


async def test_an_output_schema_gets_no_forced_answer_from_a_session_without_steps() -> None:
    # BUD-27: no model call any more
    session = agent_of(calls("look"), tools=[plain("look")], output=list[int]).session(limits={"max_steps": 1})
    result = await session.send("Hi")
    assert (result.finish_reason, result.usage.model_calls, result.object) == ("budget-exceeded", 1, None)


async def test_throwing_limits_save_the_turn_and_raise() -> None:
    # BUD-09, BUD-27
    store = memory_store()
    session = talking(store=store).session("s", limits={"max_tokens": 1, "on_exceeded": "throw"})
    await session.send("Hi")
    with pytest.raises(BudgetExceededError, match="session") as raised:
        await session.send("More")
    assert raised.value.budget == {"limit": "maxTokens", "value": 120, "max": 1, "scope": "session"}
    assert recorded(await session.load())["totalTokens"] == 120


async def test_aborted_turns_do_not_count() -> None:
    # SES-63, BUD-28
    gate = Gate("slow")
    session = agent_of({"text": "Yes", "usage": USED}, calls("slow", usage=USED), tools=[gate.tool]).session(
        limits={"max_tokens": 1_000}
    )
    await session.send("Hi")
    run = session.stream("Go")
    await gate.running.wait()
    run.abort()
    assert (await run.result).finish_reason == "aborted"
    assert recorded(await session.load())["totalTokens"] == 120


@pytest.mark.parametrize("durable", [True, False])
async def test_failed_turns_count(durable: bool) -> None:
    # LES-71, SES-18
    store = memory_store() if durable else sessions_only(MemorySessionStore())
    script: list[Any] = [{"text": "Yes", "usage": USED}, calls("look", usage=USED), RuntimeError("broken")]
    agent = agent_of(*script, {"text": "Then", "usage": USED}, tools=[plain("look")], store=store)
    session = agent.session("s", limits={"max_tokens": 10_000})
    await session.send("Hi")
    with pytest.raises(LoushoError, match="broken"):
        await session.send("Go")
    assert shape(await session.load()) == ["user:Hi", "assistant:Yes"]
    if durable:
        await session.resume()  # a pending turn is counted when it ends
        assert recorded(session.messages)["totalTokens"] == 360
    else:
        record = recorded(session.messages)
        assert (record["totalTokens"], record["steps"]) == (240, 3)


async def test_a_failed_first_turn_leaves_nothing() -> None:
    # SES-18: there is no message yet that could carry a record
    session = agent_of(RuntimeError("broken"), "Yes").session(limits={"max_tokens": 1_000})
    with pytest.raises(LoushoError, match="broken"):
        await session.send("Hi")
    assert await session.load() == []


# ------------------------------------------------------------------------------------------------------------------- the cost


async def test_cost_is_added_up_exactly_over_reopened_sessions() -> None:
    # SES-62, COST-14
    store = memory_store()

    def priced(options: GenerateOptions) -> GenerateResult:
        return GenerateResult("Yes", usage=ProviderUsage(1, 1, cost_usd=0.1))

    def reopened() -> Any:
        return create_agent(provider=PolicyProvider(priced), store=store).session("s", limits={"max_cost_usd": 0.3})

    for _ in range(3):
        assert (await reopened().send("Hi")).ok
    stopped = await reopened().send("Hi")
    assert stopped.budget is not None
    assert stopped.budget.to_dict() == {"limit": "maxCostUsd", "value": 0.3, "max": 0.3, "scope": "session"}


async def test_a_session_of_unknown_cost_is_not_held_to_it_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    # BUD-30, COST-11, COST-12
    model = mock_model([{"text": "Yes", "usage": USED}], on_exhausted="repeat-last", default_model="priced-later")
    session = create_agent(provider=model, store=memory_store()).session("s", limits={"max_cost_usd": 0.0001})
    with caplog.at_level(logging.WARNING, "lousho_ray"):
        for _ in range(3):
            assert (await session.send("Hi")).ok
    assert len([record for record in caplog.records if "max_cost_usd" in record.message]) == 1
    register_model(id="priced-later", provider="mock", context_window=1_000, input_cost_per_mtok=1.0, output_cost_per_mtok=1.0)
    assert (await session.send("Hi")).usage.cost_usd is not None
    assert recorded(session.messages)["costUnknown"] is True


# ---------------------------------------------------------------------------------------------------------- compact, clear, fork


async def test_compaction_keeps_the_account() -> None:
    # SES-64
    session = talking().session(limits={"max_tokens": 10_000})
    for text in ("a", "b", "c"):
        await session.send(text)

    class Newest:
        name = "newest"

        async def compact(self, work: Any) -> Any:
            return {"messages": [user("[summary] before")]}

    before = recorded(session.messages)
    report = await session.compact(strategy=Newest())
    assert report.messages_after == 1
    assert recorded(await session.load()) == before


async def test_clearing_clears_the_account() -> None:
    # SES-D8
    session = talking().session(limits={"max_tokens": 120})
    assert (await session.send("Hi")).ok
    assert (await session.send("Hi")).finish_reason == "budget-exceeded"
    await session.clear()
    assert (await session.send("Hi")).ok


@pytest.mark.parametrize(("from_step", "spent"), [(0, None), (1, 120), (2, 120), (3, 360)])
async def test_a_fork_begins_with_what_its_last_turn_had_spent(from_step: int, spent: int | None) -> None:
    # SES-64, SES-71
    answers = [{"text": "Yes", "usage": USED}, calls("look", usage=USED), {"text": "Done", "usage": USED}]
    agent = agent_of(*answers, {"text": "Forked", "usage": USED}, tools=[plain("look")], store=memory_store())
    session = agent.session("s", limits={"max_tokens": 480})
    await session.send("a")
    await session.send("b")
    fork = await session.fork(from_step)
    found = SessionSpend.of(fork.messages)
    assert (None if found is None else found.spend.total_tokens) == spent
    assert (await fork.send("c")).ok
    assert recorded(fork.messages)["totalTokens"] == (spent or 0) + 120
    if from_step == 3:
        assert (await fork.send("d")).budget is not None


async def test_a_patched_result_keeps_the_account_that_stands_on_it() -> None:
    # SES-64, SES-70
    agent = agent_of(calls("look", usage=USED), tools=[plain("look")], store=memory_store(), max_steps=1)
    session = agent.session("s", limits={"max_tokens": 1_000})
    await session.send("a")
    fork = await session.fork(1, patch={"tool_result": {"tool_call_id": "call_1", "result": "other"}})
    assert recorded(fork.messages)["totalTokens"] == 120


# ------------------------------------------------------------------------------------------------------------------- the time


class Hosted:
    """A session under a clock that a test moves."""

    def __init__(self, agent: Agent[Any], *, durable: bool = True, **limits: Any) -> None:
        self.clock = FakeClock()
        self.store = memory_store(clock=self.clock)
        parts = StoreParts(self.store.sessions, self.store.checkpoints if durable else None, self.store.approvals)
        definition = replace(agent.definition, session_limits=Limits(**limits))
        self.host = SessionHost(definition, "s", parts, TurnLine(), None, clock=self.clock)

    def start(self, text: str) -> Any:
        return self.host.start(TurnRequest("run_1", as_messages(text)))

    async def decide(self, approval_id: str) -> Any:
        return await self.host.start(DecisionRequest("run_2", approval_id, Decision(True))).result()

    async def duration_ms(self) -> float:
        spent = SessionSpend.of(await self.host.load())
        assert spent is not None
        return spent.duration_ms


@pytest.mark.parametrize("durable", [True, False])
async def test_the_run_time_of_turns_adds_up_without_the_time_between_and_in_pauses(durable: bool) -> None:
    # BUD-29, BUD-28, SES-62
    hosted: Hosted

    @tool
    def work() -> str:
        """Takes 300 ms."""
        hosted.clock.advance(300)
        return "worked"

    @tool(needs_approval=True)
    def pay() -> str:
        """Takes 200 ms."""
        hosted.clock.advance(200)
        return "paid"

    model = mock_model([calls("work"), "One", calls("work"), calls("pay"), "Two", calls("work")])
    hosted = Hosted(create_agent(provider=model, tools=[work, pay]), durable=durable, max_duration_ms=900)
    assert (await hosted.start("a").result()).ok
    assert await hosted.duration_ms() == pytest.approx(300)
    hosted.clock.advance(60_000)
    paused = await hosted.start("b").result()
    assert await hosted.duration_ms() == pytest.approx(300)
    hosted.clock.advance(60_000)
    assert (await hosted.decide(paused.approval_id)).ok
    assert await hosted.duration_ms() == pytest.approx(800)
    stopped = await hosted.start("c").result()
    assert stopped.budget.to_dict() == {"limit": "maxDurationMs", "value": pytest.approx(1_100), "max": 900, "scope": "session"}


@pytest.mark.parametrize(("own_ms", "scope", "most"), [(None, "session", 500), (150, "run", 150), (900, "session", 500)])
async def test_a_call_in_flight_is_cut_off_when_the_session_runs_out_of_time(own_ms: Any, scope: str, most: float) -> None:
    # BUD-07, BUD-29
    provider = ScriptedStream([asyncio.Event()])
    limits = {} if own_ms is None else {"max_duration_ms": own_ms}
    hosted = Hosted(create_agent(provider=provider, limits=limits), max_duration_ms=500)
    before = SessionSpend(Spend(), 1, 300.0).on([user("Hi"), assistant("Yes")])
    await hosted.store.sessions.save("s", before)
    turn = hosted.start("Go")
    await provider.reached(0, 0).wait()
    hosted.clock.advance(200)
    result = await turn.result()
    assert result.finish_reason == "budget-exceeded"
    assert (result.budget.limit, result.budget.max, result.budget.scope) == ("maxDurationMs", most, scope)


# -------------------------------------------------------------------------------------------------------------- sub-agents


async def test_subagents_are_held_to_the_session() -> None:
    # BUD-15, BUD-18, SES-61
    child_model = mock_model([calls("look", usage=USED)], on_exhausted="repeat-last")
    child = create_agent(provider=child_model, name="child", description="Looks.", tools=[plain("look")])
    task = ("task", {"agent": "child", "prompt": "Look", "description": "Look"})
    lead = create_agent(
        provider=mock_model([{"text": "Yes", "usage": USED}, calls(task, usage=USED)]), subagents={"child": child}, runtime="local"
    )
    session = lead.session(limits={"max_tokens": 480})
    await session.send("Hi")
    result = await session.send("Go")
    assert result.budget is not None
    assert result.budget.to_dict() == {"limit": "maxTokens", "value": 480, "max": 480, "scope": "session"}
    assert any("stopped at the maxTokens limit" in message.text for message in result.messages if message.role == "tool")
    assert recorded(session.messages)["totalTokens"] == 480


# --------------------------------------------------------------------------------------------------------- approved, then failed


async def test_an_approved_call_that_ran_stays_when_the_model_fails_after_it() -> None:
    # LES-21
    ran: list[str] = []

    @tool(needs_approval=True)
    async def pay() -> str:
        """Pays."""
        ran.append("pay")
        return "paid"

    agent = agent_of("Hello", calls("pay"), RuntimeError("broken"), "I paid", tools=[pay])
    session = agent.session()
    await session.send("Hi")
    paused = await session.send("Pay")
    with pytest.raises(LoushoError, match="broken"):
        await agent.approvals.resolve(paused.approval_id or "", approved=True)
    assert shape(await session.load()) == ["user:Hi", "assistant:Hello", "user:Pay", "assistant:+pay", "tool:pay"]
    assert (await session.send("And?")).text == "I paid"
    assert ran == ["pay"]


# ------------------------------------------------------------------------------------------------------------------ the option


@pytest.mark.parametrize(("limits", "field"), [({"max_tokns": 1}, "limits.max_tokns"), ({"max_tokens": 0}, "limits.max_tokens")])
def test_wrong_limits_are_named(limits: Any, field: str) -> None:
    # BUD-02, SES-01
    with pytest.raises(ConfigurationError) as caught:
        talking().session(limits=limits)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", field)


def test_a_record_is_read_whatever_else_it_holds() -> None:
    message = assistant("Yes").with_(metadata={"sessionUsage": {"inputTokens": 5, "later": 1}, "mine": 2})
    spent = SessionSpend.of([message, user("More")])
    assert spent == SessionSpend(Spend(5, 0), 0, 0.0)
    assert without_spend(message).metadata == {"mine": 2}
    assert SessionSpend.of([user("a")]) is None
    assert SessionSpend().on([]) == []


async def test_an_adopted_turn_counts_once() -> None:
    # SES-45, SES-62: a turn that had finished when its process died is adopted with its account
    store = memory_store()

    class Fails(MemorySessionStore):
        failing = False

        async def save(self, id: str, messages: Any, /, **fence: Any) -> None:
            if self.failing:
                raise LoushoError("down", code="LOUSHO_STORAGE_FAILED")
            await super().save(id, messages, **fence)

    sessions = Fails()
    parts = Parts(sessions, store.checkpoints, store.approvals)
    session = talking(store=parts).session("s", limits={"max_tokens": 1_000})
    sessions.failing = True
    with pytest.raises(LoushoError, match="down"):
        await session.send("Hi")
    sessions.failing = False
    await session.resume()
    assert recorded(await session.load())["totalTokens"] == 120


async def test_text_that_was_streamed_stands() -> None:
    # BUD-14
    provider = ScriptedStream([TextChunk("A"), TextChunk("B"), FinishChunk("stop", ProviderUsage(10, 10))])
    session = create_agent(provider=provider).session(limits={"max_tokens": 5})
    run = session.stream("Hi")
    assert "run.done stop" in names(await collect(run))
    assert (await run.result).text == "AB"
