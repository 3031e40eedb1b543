"""What a pause holds, what may decide it, and how the rest of its turn goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import LoushoError, SessionAwaitingApprovalError
from lousho_ray.messages import Message
from lousho_ray.stores.files import file_store
from lousho_ray.stores.memory import InMemoryApprovalStore, MemorySessionStore, memory_store
from lousho_ray.stores.parts import Parts
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.tools.question import ask_question_tool
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import agent_of, calls, check_transcript, kinds, names, results, shape

USED = {"input_tokens": 100, "output_tokens": 20}


class Tools:
    """`pay` asks, `look` runs, `wipe` is refused; each notes that it ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

        @tool(needs_approval=True)
        def pay(amount: int) -> str:
            """Pays."""
            self.ran.append(f"pay {amount}")
            return f"paid {amount}"

        @tool
        def look() -> str:
            """Looks."""
            self.ran.append("look")
            return "seen"

        @tool(needs_approval=lambda args: {"deny": "Nobody wipes."})
        def wipe() -> str:
            """Wipes."""
            self.ran.append("wipe")
            return "wiped"

        self.tools = [pay, look, wipe]


STORES: dict[str, Any] = {
    "memory": lambda folder: memory_store(),
    "file": lambda folder: file_store(folder / "files"),
    "sqlite": lambda folder: SqliteStore(folder / "s.db"),
}


# ------------------------------------------------------------------------------------------------------------- needs_approval


def gated(answer: Any) -> Any:
    def decide(args: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def later(args: Any, ctx: Any) -> Any:
        return decide(args)

    return decide, later


@pytest.mark.parametrize("form", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        *((value, "asks") for value in (True, "ask")),
        *((value, "ok") for value in (False, "approve")),
        *((value, "denied") for value in ("deny", {"deny": "Too much."})),
        *((value, "execution") for value in (None, 1, "yes", {"deny": "x", "more": 1}, {}, ValueError("broken"))),
    ],
)
async def test_what_needs_approval_may_answer(answer: Any, outcome: str, form: int) -> None:
    # APR-02
    ran: list[str] = []

    @tool(needs_approval=gated(answer)[form])
    def act() -> str:
        """Acts."""
        ran.append("act")
        return "done"

    result = await agent_of(calls("act"), "Done", tools=[act]).send("Hi")
    assert ran == (["act"] if outcome == "ok" else [])
    if outcome == "asks":
        assert result.finish_reason == "awaiting-approval"
        return
    assert kinds(result.messages) == [outcome]
    if answer == {"deny": "Too much."}:
        assert "Too much." in results(result.messages)[0]["message"]
    check_transcript(result.messages)


# ------------------------------------------------------------------------------------------------------------ mixed batches


BATCH = [("look", {}), ("pay", {"amount": 5}), ("wipe", {}), ("look", {}), ("pay", {"amount": 6})]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("where", ["send", "durable send", "session"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product([True, False], [True, False])))
async def test_a_batch_of_calls_that_run_ask_and_are_refused(
    where: str, store: str, first: bool, second: bool, tmp_path: Path
) -> None:
    # APR-08, APR-17, APR-20, APR-21, APR-12
    tools, kept = Tools(), STORES[store](tmp_path)
    agent = agent_of(calls(*BATCH), "Done", tools=tools.tools, store=kept)
    session = agent.session("s")
    begin = {
        "send": lambda: agent.send("Go"),
        "durable send": lambda: agent.send("Go", session_id="r"),
        "session": lambda: session.send("Go"),
    }
    paused = await begin[where]()
    assert tools.ran == ["look"]
    assert paused.approval_id is not None
    assert [waiting.args["amount"] for waiting in await agent.approvals.list()] == [5]
    again = await agent.approvals.resolve(paused.approval_id, approved=first)
    assert again.finish_reason == "awaiting-approval"
    assert again.approval_id != paused.approval_id
    done = await agent.approvals.resolve(again.approval_id or "", approved=second)
    assert done.text == "Done"
    decided = ["ok" if approved else "rejected" for approved in (first, second)]
    assert kinds(done.messages) == ["ok", decided[0], "denied", "ok", decided[1]]
    paid = [f"pay {amount}" for amount, approved in ((5, first), (6, second)) if approved]
    assert sorted(tools.ran) == sorted(["look", "look", *paid])
    assert done.usage.model_calls == 2
    check_transcript(done.messages)
    if store == "sqlite":
        kept.close()


async def test_a_streamed_continuation_of_a_batch_tells_of_each_call_once() -> None:
    # APR-29, EVT-50, APR-21
    tools = Tools()
    agent = agent_of(calls(*BATCH[:4]), "Done", tools=tools.tools, store=memory_store())
    paused = await agent.session("s").send("Go")
    stream = await agent.approvals.stream_resolve(paused.approval_id or "", approved=True)
    events = [event async for event in stream]
    told = [name for name in names(events) if name.startswith("tool.")]
    assert told[0] == "tool.resume"
    assert [name for name in told if "pay" in name] == ["tool.done pay"]
    assert told.count("tool.start look") == told.count("tool.done look") == 1
    assert told.count("tool.error wipe") == 1


# ------------------------------------------------------------------------------------------------------------ what a pause is


async def test_the_record_of_a_pause_says_all_there_is_to_decide_on() -> None:
    # APR-11, APR-39, APR-34
    store = memory_store()
    question = ("ask_question", {"question": "Which?", "options": ["a", "b"]})
    agent = agent_of(
        calls(("pay", {"amount": 5})),
        calls(question),
        tools=[*Tools().tools, ask_question_tool()],
        store=store,
        name="clerk",
        approval_ttl_ms=60_000,
    )
    paused = await agent.session("s").send("Go", principal={"id": "ann"})
    record = (await store.approvals.load(paused.approval_id or "") or ({}, {}))[0]
    assert set(record) == {"id", "toolCallId", "toolName", "args", "agentId", "createdAt", "expiresAt", "kind", "principal"}
    assert {key: record[key] for key in ("id", "toolCallId", "toolName", "args", "agentId", "kind", "principal")} == {
        "id": paused.approval_id,
        "toolCallId": "call_1",
        "toolName": "pay",
        "args": {"amount": 5},
        "agentId": "clerk",
        "kind": "tool",
        "principal": {"id": "ann"},
    }
    asked = await agent.approvals.resolve(paused.approval_id or "", approved=True)
    record = (await store.approvals.load(asked.approval_id or "") or ({}, {}))[0]
    assert (record["kind"], record["question"]) == (
        "question",
        {"text": "Which?", "options": ["a", "b"], "allowFreeText": True},
    )
    waiting = await agent.approvals.get(asked.approval_id or "")
    assert waiting is not None
    assert (waiting.kind, waiting.agent_id, waiting.principal) == ("question", "clerk", {"id": "ann"})
    assert waiting.expires_at is not None
    assert waiting.expires_at > waiting.created_at


@pytest.mark.parametrize("durable", [True, False])
async def test_a_continuation_goes_on_with_the_steps_usage_limits_and_store_of_the_run(durable: bool) -> None:
    # APR-27, DUR-21
    store, own = memory_store(), InMemoryApprovalStore()
    turns = [calls(("pay", {"amount": number}), usage=USED) for number in range(5)]
    options: dict[str, Any] = {"store": store if durable else Parts(MemorySessionStore()), "approval_store": own}
    agent = agent_of(*turns, tools=Tools().tools, max_steps=3, **options)
    result: Any = await agent.session("s").send("Go")
    for steps in (1, 2, 3):
        assert (result.steps, result.usage.total_tokens, result.usage.model_calls) == (steps, steps * 120, steps)
        assert await own.load(result.approval_id) is not None
        result = await agent.approvals.resolve(result.approval_id, approved=True)
    assert (result.finish_reason, result.steps) == ("max-steps", 3)
    limited = agent_of(*turns, tools=Tools().tools, limits={"max_tokens": 240}, **options)
    result = await limited.session("t").send("Go")
    result = await limited.approvals.resolve(result.approval_id, approved=True)
    assert (result.finish_reason, result.budget.limit, result.budget.value) == ("budget-exceeded", "maxTokens", 240)
    assert kinds(result.messages) == ["ok", "not-run"]


@pytest.mark.parametrize("durable", [True, False])
async def test_a_snapshot_that_does_not_say_what_comes_next_runs_the_decided_call_only(durable: bool) -> None:
    # APR-28, STO-09
    tools, store = Tools(), memory_store()
    parts: Any = store if durable else Parts(store.sessions, None, store.approvals)
    agent = agent_of(calls(*BATCH), "Done", tools=tools.tools, store=parts)
    paused = await agent.session("s").send("Go")
    pending, snapshot = await store.approvals.load(paused.approval_id or "") or ({}, {})
    del snapshot["remainingToolCalls"]
    await store.approvals.save(pending, snapshot)
    result = await agent.approvals.resolve(paused.approval_id or "", approved=True)
    assert kinds(result.messages) == ["ok", "ok", "not-run", "not-run", "not-run"]
    assert tools.ran == ["look", "pay 5"]
    assert result.text == "Done"
    check_transcript(result.messages)


# ---------------------------------------------------------------------------------------------------------- where it goes on


async def test_a_pause_of_a_session_in_memory_is_decided_by_its_own_agent_only() -> None:
    # SES-24, APR-18
    tools = Tools()
    agent = agent_of("Hi", calls(("pay", {"amount": 5})), "Done", tools=tools.tools)
    session = agent.session("s")
    await session.send("Hello")
    paused = await session.send("Go")
    with pytest.raises(LoushoError) as raised:
        await agent_of("Done", tools=tools.tools).approvals.resolve(paused.approval_id or "", approved=True)
    assert raised.value.code == "LOUSHO_APPROVAL_NOT_FOUND"
    await agent.approvals.resolve(paused.approval_id or "", approved=True)
    assert shape(await session.load())[-3:] == ["assistant:+pay", "tool:pay", "assistant:Done"]
    assert tools.ran == ["pay 5"]


async def test_a_decision_that_cannot_reach_the_session_is_refused_before_the_tool_runs() -> None:
    # LES-61, SES-24, APR-26
    tools, shared = Tools(), InMemoryApprovalStore()
    agent = agent_of(calls(("pay", {"amount": 5})), "Done", tools=tools.tools, approval_store=shared)
    session = agent.session("s")
    paused = await session.send("Go")
    with pytest.raises(LoushoError) as raised:
        await agent_of("Done", tools=tools.tools, approval_store=shared).approvals.resolve(paused.approval_id or "", approved=True)
    assert raised.value.code == "LOUSHO_APPROVAL_ORPHANED"
    assert tools.ran == []
    assert (await agent.approvals.resolve(paused.approval_id or "", approved=True)).text == "Done"
    assert len(await session.load()) == 4


# ------------------------------------------------------------------------------------------------- deciders, one after another


@pytest.mark.parametrize("store", ["file", "sqlite"])
@pytest.mark.parametrize("how", ["edited", "remembered", "answered", "rejected"])
async def test_a_decision_after_a_restart(store: str, how: str, tmp_path: Path) -> None:
    # APR-54, SES-52, LES-25, LES-27, APR-40, APR-20: nothing but the store is there
    def reopened(*turns: Any) -> Any:
        tools.ran.clear()
        return agent_of(*turns, tools=[*tools.tools, ask_question_tool()], store=STORES[store](tmp_path))

    tools = Tools()
    question = ("ask_question", {"question": "Which?", "options": ["a", "b"]})
    agent = reopened(calls(question if how == "answered" else ("pay", {"amount": 5}), "look"))
    paused = await agent.session("s").send("Go")
    pause = str(paused.approval_id)
    if store == "sqlite":
        agent.definition.store.close()
    agent = reopened(calls(("pay", {"amount": 5})) if how == "remembered" else "Done", "Done")
    if how == "edited":
        result = await agent.approvals.resolve(pause, approved=True, args={"amount": 4}, by="bob")
        assert tools.ran == ["pay 4", "look"]
        assert results(result.messages)[0] == {"editedArguments": {"amount": 4}, "result": "paid 4"}
    elif how == "remembered":
        result = await agent.approvals.resolve(pause, approved=True, remember="args")
        assert tools.ran == ["pay 5", "look", "pay 5"]
    elif how == "answered":
        result = await agent.approvals.answer(pause, "B")
        assert results(result.messages)[0] == {"answer": "B", "option": 1}
    else:
        result = await agent.approvals.resolve(pause, approved=False, note="Not today.")
        assert tools.ran == ["look"]
        assert "Not today." in results(result.messages)[0]["message"]
    assert result.text == "Done"
    assert shape(await agent.session("s").load()) == shape(result.messages)[1:]
    if store == "sqlite":
        agent.definition.store.close()


async def test_turns_of_other_sessions_go_on_while_one_is_paused() -> None:
    # SES-49, SES-57
    agent = agent_of(calls(("pay", {"amount": 5})), "Other", "Done", tools=Tools().tools, store=memory_store())
    paused = await agent.session("s").send("Go")
    assert (await agent.session("t").send("Hi")).text == "Other"
    with pytest.raises(SessionAwaitingApprovalError) as raised:
        await agent.send("Hi", session_id="s")
    assert raised.value.approval_id == paused.approval_id
    assert (await agent.approvals.resolve(paused.approval_id or "", approved=True)).text == "Done"


async def test_a_decision_and_a_new_turn_at_once_leave_one_valid_transcript() -> None:
    # SES-15, SES-49, APR-18
    agent = agent_of(calls(("pay", {"amount": 5})), "Done", "After", tools=Tools().tools, store=memory_store())
    session = agent.session("s")
    paused = await session.send("Go")
    decided, sent = await asyncio.gather(
        agent.approvals.resolve(paused.approval_id or "", approved=True), session.send("More"), return_exceptions=True
    )
    assert not isinstance(decided, BaseException)
    saved = await session.load()
    check_transcript(saved)
    if isinstance(sent, BaseException):
        assert isinstance(sent, SessionAwaitingApprovalError)
        assert shape(saved)[-1] == "assistant:Done"
    else:
        assert shape(saved)[-3:] == ["assistant:Done", "user:More", "assistant:After"]


async def test_a_snapshot_is_plain_data() -> None:
    # APR-12, APR-D9: what runs is the agent's own tool of that name
    store = memory_store()
    paused = await agent_of(calls(("pay", {"amount": 5})), tools=Tools().tools, store=store).send("Go")
    pending, snapshot = await store.approvals.load(paused.approval_id or "") or ({}, {})
    assert json.loads(json.dumps([pending, snapshot])) == [pending, snapshot]
    assert [Message.from_dict(message).role for message in snapshot["messages"]] == ["system", "user", "assistant"]
