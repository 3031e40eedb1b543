"""Calls that wait for a person: how they are decided, by whom, how often, and what a decision does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.agent import Agent
from lousho_ray.create import create_agent
from lousho_ray.durable import StoreParts
from lousho_ray.errors import (
    AgentDriftError,
    ConfigurationError,
    LoushoError,
    ResumeToolMissingError,
    StorageError,
    ToolArgumentsValidationError,
)
from lousho_ray.loop.input import as_messages
from lousho_ray.loop.state import Decision
from lousho_ray.messages import ImagePart, Message
from lousho_ray.ports import ToolContext
from lousho_ray.session import DecisionRequest, ResumeRequest, TurnRequest
from lousho_ray.session_host import SessionHost
from lousho_ray.stores.memory import memory_store
from lousho_ray.stores.parts import Parts
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.approval_policies import always, never, once
from lousho_ray.tools.tool import define_tool, tool
from lousho_ray.turns import TurnLine
from tests.unit.loop_support import agent_of, calls, check_transcript, kinds, names, results, shape


class Log:
    """Tools that note each run."""

    def __init__(self, needs_approval: Any = True) -> None:
        self.runs: list[str] = []
        self.contexts: list[ToolContext] = []

        @tool(needs_approval=needs_approval)
        def pay(amount: int, ctx: ToolContext) -> str:
            """Pays."""
            self.runs.append(f"pay {amount}")
            self.contexts.append(ctx)
            return f"paid {amount}"

        @tool
        def note(text: str = "x") -> str:
            """Notes."""
            self.runs.append(f"note {text}")
            return "noted"

        self.tools = [pay, note]


async def not_found(awaitable: Any) -> None:
    with pytest.raises(LoushoError) as raised:
        await awaitable
    assert raised.value.code == "LOUSHO_APPROVAL_NOT_FOUND"


def paying(*after: Any, log: Log, **options: Any) -> Agent[Any]:
    return agent_of(calls("note", ("pay", {"amount": 5}), "note"), *after, tools=log.tools, **options)


# --------------------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize("where", ["send", "session", "durable session"])
async def test_an_approved_call_runs_and_the_run_goes_on(where: str) -> None:
    # APR-08, APR-10, APR-16, APR-17, APR-19, APR-21, SES-23, SES-51
    log = Log()
    agent = paying("Done", log=log, **({"store": memory_store()} if where == "durable session" else {}))
    session = agent.session("s")
    paused = await (agent.send("Hi") if where == "send" else session.send("Hi"))
    assert paused.finish_reason == "awaiting-approval"
    assert log.runs == ["note x"]
    listed = await agent.approvals.list()
    assert [(one.id, one.tool_name, one.args, one.kind) for one in listed] == [(paused.approval_id, "pay", {"amount": 5}, "tool")]
    assert await agent.approvals.get(str(paused.approval_id)) == listed[0]
    result = await agent.approvals.resolve(str(paused.approval_id), approved=True, note="Fine", by="ann")
    assert log.runs == ["note x", "pay 5", "note x"]
    assert (result.text, result.finish_reason, result.steps) == ("Done", "stop", 2)
    assert log.contexts[0].approval is not None
    assert (log.contexts[0].approval.note, log.contexts[0].approval.by) == ("Fine", "ann")
    assert log.contexts[0].session_id == (None if where == "send" else "s")
    check_transcript(result.messages)
    assert await agent.approvals.list() == []
    assert await agent.approvals.get(str(paused.approval_id)) is None
    if where != "send":
        assert shape(await session.load()) == shape(result.messages)[1:]


async def test_a_rejected_call_does_not_run_and_the_model_reads_the_note() -> None:
    # APR-20
    log = Log()
    agent = paying("Done", log=log)
    paused = await agent.send("Hi")
    result = await agent.approvals.resolve(str(paused.approval_id), approved=False, note="Too much.")
    assert log.runs == ["note x", "note x"]
    assert kinds(result.messages) == ["ok", "rejected", "ok"]
    rejected = results(result.messages)[1]
    assert rejected["error"] == "ToolRejectedError"
    assert rejected["note"] == "Too much."
    assert result.finish_reason == "stop"


async def test_a_run_may_pause_again_and_again() -> None:
    # APR-08, APR-17
    log = Log()
    agent = agent_of(calls(("pay", {"amount": 1}), ("pay", {"amount": 2})), calls(("pay", {"amount": 3})), "Done", tools=log.tools)
    result = await agent.send("Hi")
    seen = []
    while result.finish_reason == "awaiting-approval":
        seen.append(result.approval_id)
        assert [one.id for one in await agent.approvals.list()] == [result.approval_id]
        result = await agent.approvals.resolve(str(result.approval_id), approved=True)
    assert len(set(seen)) == 3
    assert log.runs == ["pay 1", "pay 2", "pay 3"]
    check_transcript(result.messages)


async def test_an_unknown_or_decided_approval_is_not_found() -> None:
    # APR-18
    log = Log()
    agent = paying("Done", log=log)
    await not_found(agent.approvals.resolve("appr_none", approved=True))
    paused = await agent.send("Hi")
    await agent.approvals.resolve(str(paused.approval_id), approved=True)
    await not_found(agent.approvals.resolve(str(paused.approval_id), approved=True))
    await not_found(agent.approvals.answer("appr_none", "x"))


@pytest.mark.parametrize("store", ["memory", "sqlite", "none"])
@pytest.mark.parametrize("handles", ["one", "two"])
async def test_of_several_deciders_exactly_one_wins(tmp_path: Path, store: str, handles: str) -> None:
    # APR-18
    log = Log()
    stores: list[Any] = [None, None]
    if store == "memory":
        stores = [memory_store()] * 2
    elif store == "sqlite":
        stores = [SqliteStore(tmp_path / "s.db"), SqliteStore(tmp_path / "s.db")]
    model = mock_model([calls(("pay", {"amount": 5})), "Done"])
    first, second = (create_agent(provider=model, tools=log.tools, **({} if one is None else {"store": one})) for one in stores)
    if store == "none" or handles == "one":
        second = first
    paused = await first.session("s").send("Hi")
    deciders = [first, second] * 5
    outcomes = await asyncio.gather(
        *(agent.approvals.resolve(str(paused.approval_id), approved=index % 3 != 0) for index, agent in enumerate(deciders)),
        return_exceptions=True,
    )
    won = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert len(won) == 1
    assert {getattr(outcome, "code", None) for outcome in outcomes if isinstance(outcome, BaseException)} == {
        "LOUSHO_APPROVAL_NOT_FOUND"
    }
    assert len(log.runs) <= 1
    assert len(model.calls) == 2
    for one in stores:
        if one is not None:
            one.close()


async def test_a_decision_from_another_agent_object_continues_the_session() -> None:
    # LES-61, SES-52, APR-54
    store, log = memory_store(), Log()
    paused = await paying(log=log, store=store).session("s").send("Hi")
    other = agent_of("Done", tools=log.tools, store=store)
    assert await other.approvals.list() == []
    found = await other.approvals.get(str(paused.approval_id))
    assert found is not None
    assert found.tool_name == "pay"
    result = await other.approvals.resolve(str(paused.approval_id), approved=True)
    assert result.text == "Done"
    assert shape(await other.session("s").load()) == shape(result.messages)[1:]


async def test_turns_after_a_pause_that_is_not_durable_keep_their_place() -> None:
    # SES-23, SES-D4
    log = Log()
    agent = agent_of(calls(("pay", {"amount": 5})), "Between", "Done", tools=log.tools)
    session = agent.session("s")
    paused = await session.send("Hi")
    assert shape(await session.load()) == ["user:Hi"]
    await session.send("Again")
    await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert shape(await session.load()) == [
        "user:Hi",
        "user:Again",
        "assistant:Between",
        "assistant:+pay",
        "tool:pay",
        "assistant:Done",
    ]


@pytest.mark.parametrize("approved", [None, 1, "yes"])
async def test_approved_must_be_a_bool(approved: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        await agent_of().approvals.resolve("appr_x", approved=approved)
    assert raised.value.field == "approved"


# ---------------------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize("approved", [True, False])
async def test_a_continuation_begins_with_the_decision(approved: bool) -> None:
    # LES-24, EVT-50, APR-29
    log = Log()
    agent = paying("Done", log=log)
    run = agent.stream("Hi")
    events = [event async for event in run]
    assert names(events)[-3:] == ["approval.requested", "step.done 1 awaiting-approval", "run.done awaiting-approval"]
    requested: Any = events[-3]
    assert requested.tool_name == "pay"
    assert "kind" not in requested.to_dict()
    stream = await agent.approvals.stream_resolve(requested.approval_id, approved=approved, by="ann", note="Ok")
    events = [event async for event in stream]
    outcome = "tool.done pay" if approved else "tool.error pay"
    assert names(events)[:4] == ["run.start", "approval.resolved", "tool.resume", outcome]
    resolved: Any = events[1]
    assert resolved.to_dict().items() >= {"approved": approved, "by": "ann", "note": "Ok", "toolCallId": "call_2"}.items()
    assert resolved.waited_ms >= 0
    assert names(events)[-1] == "run.done stop"
    assert (await stream.result).text == "Done"
    assert await agent.approvals.list() == []


async def test_a_pause_of_a_streamed_continuation_is_listed() -> None:
    log = Log()
    agent = agent_of(calls(("pay", {"amount": 1}), ("pay", {"amount": 2})), "Done", tools=log.tools)
    paused = await agent.send("Hi")
    stream = await agent.approvals.stream_resolve(str(paused.approval_id), approved=True)
    again = await stream.result
    await asyncio.sleep(0)
    assert [one.id for one in await agent.approvals.list()] == [again.approval_id]


# ------------------------------------------------------------------------------------------------------------ edited arguments


async def test_edited_arguments_run_and_the_model_reads_the_edit() -> None:
    # LES-27
    log = Log()
    agent = paying("Done", log=log)
    paused = await agent.send("Hi")
    stream = await agent.approvals.stream_resolve(str(paused.approval_id), approved=True, args={"amount": 3}, by="ann")
    events: list[Any] = [event async for event in stream]
    result = await stream.result
    assert "pay 3" in log.runs
    assert "pay 5" not in log.runs
    assert next(event for event in events if event.type == "approval.resolved").edited is True
    message = next(message for message in result.messages if message.tool_name == "pay")
    assert json.loads(message.text) == {"editedArguments": {"amount": 3}, "result": "paid 3"}
    assert message.metadata is not None
    assert message.metadata["approval"].items() >= {"approved": True, "edited": True, "by": "ann"}.items()


@pytest.mark.parametrize("durable", [True, False])
async def test_edited_arguments_that_do_not_fit_leave_the_pause_open(durable: bool) -> None:
    # LES-27
    log = Log()
    agent = paying("Done", log=log, **({"store": memory_store()} if durable else {}))
    paused = await agent.session("s").send("Hi")
    for wrong in ({"amount": "much"}, {}, {"amont": 3}):
        with pytest.raises(ToolArgumentsValidationError):
            await agent.approvals.resolve(str(paused.approval_id), approved=True, args=wrong)
    assert log.runs == ["note x"]
    assert [one.id for one in await agent.approvals.list()] == [paused.approval_id]
    await agent.approvals.resolve(str(paused.approval_id), approved=True, args={"amount": 4})
    assert "pay 4" in log.runs


async def test_a_rejection_takes_no_arguments() -> None:
    for options in ({"args": {"amount": 1}}, {"remember": "tool"}):
        with pytest.raises(ConfigurationError) as raised:
            await agent_of().approvals.resolve("appr_x", approved=False, **options)
        assert raised.value.field == next(iter(options))
    with pytest.raises(ConfigurationError, match="'tool'"):
        await agent_of().approvals.resolve("appr_x", approved=True, remember="tol")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------------- memory

ONE, TWO = ("pay", {"amount": 1}), ("pay", {"amount": 2})
FOUR_CALLS = (calls(ONE), "A", calls(ONE, ONE), "B", calls(TWO), "C")
"""Three turns with four calls, three of them with the same arguments."""


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(("remember", "pauses"), [("tool", 1), ("args", 2), (None, 4)])
async def test_a_decision_may_count_for_later_calls(store: bool, remember: Any, pauses: int) -> None:
    # LES-25
    log = Log()
    turns = [
        calls(("pay", {"amount": 1})),
        "A",
        calls(("pay", {"amount": 1}), ("pay", {"amount": 1})),
        "B",
        calls(("pay", {"amount": 2})),
        "C",
    ]
    agent = agent_of(*turns, tools=log.tools, **({"store": memory_store()} if store else {}))
    session = agent.session("s")
    asked = 0
    for text in ("One", "Two", "Three"):
        result = await session.send(text)
        while result.finish_reason == "awaiting-approval":
            asked += 1
            result = await agent.approvals.resolve(str(result.approval_id), approved=True, remember=remember)
    assert asked == pauses
    assert log.runs == ["pay 1", "pay 1", "pay 1", "pay 2"]


async def test_a_cleared_conversation_remembers_nothing() -> None:
    # LES-25
    log = Log()
    agent = agent_of(calls(("pay", {"amount": 1})), "A", calls(("pay", {"amount": 1})), "B", tools=log.tools)
    session = agent.session("s")
    paused = await session.send("One")
    await agent.approvals.resolve(str(paused.approval_id), approved=True, remember="tool")
    await session.clear()
    assert (await session.send("Two")).finish_reason == "awaiting-approval"


@pytest.mark.parametrize(
    ("policy", "asked"),
    [(lambda args: always(), 4), (lambda args: never(), 0), (once(), 1), (once(per="args"), 2)],
    ids=["always", "never", "once", "once per args"],
)
async def test_policies(policy: Any, asked: int) -> None:
    # APR-03
    log = Log(policy)
    turns = [
        calls(("pay", {"amount": 1})),
        "A",
        calls(("pay", {"amount": 1}), ("pay", {"amount": 1})),
        "B",
        calls(("pay", {"amount": 2})),
        "C",
    ]
    agent = agent_of(*turns, tools=log.tools, store=memory_store())
    session = agent.session("s")
    count = 0
    for text in ("One", "Two", "Three"):
        result = await session.send(text)
        while result.finish_reason == "awaiting-approval":
            count += 1
            result = await agent.approvals.resolve(str(result.approval_id), approved=True)
    assert count == asked
    assert len(log.runs) == 4


@pytest.mark.parametrize("principal", ["ann", {"id": "ann"}, {"name": "ann"}])
async def test_some_calls_are_decided_by_somebody_else(principal: Any) -> None:
    # LES-66
    log = Log(always(by="other"))
    agent = paying("Done", log=log)
    paused = await agent.session("s").send("Hi", principal=principal)
    for by in ("ann", None):
        with pytest.raises(LoushoError) as raised:
            await agent.approvals.resolve(str(paused.approval_id), approved=True, by=by)
        assert raised.value.code == "LOUSHO_APPROVAL_FORBIDDEN"
    assert log.runs == ["note x"]
    assert [one.id for one in await agent.approvals.list()] == [paused.approval_id]
    await agent.approvals.resolve(str(paused.approval_id), approved=True, by="bob")
    assert "pay 5" in log.runs
    with pytest.raises(ConfigurationError) as refused:
        always(by="me")  # type: ignore[arg-type]
    assert refused.value.field == "by"


def test_once_takes_args_only() -> None:
    with pytest.raises(ConfigurationError) as raised:
        once(per="tool")  # type: ignore[arg-type]
    assert raised.value.field == "per"


async def test_a_needs_approval_function_sees_the_call() -> None:
    # APR-01
    seen: list[Any] = []

    def ask(args: Any, ctx: Any) -> bool:
        seen.append((ctx.tool_name, ctx.tool_call_id, ctx.session_id, ctx.principal, ctx.args, shape(ctx.messages)))
        return False

    log = Log(ask)
    agent = agent_of(calls(("pay", {"amount": 1})), "Done", tools=log.tools)
    await agent.session("s").send("Hi", principal="u")
    assert seen == [("pay", "call_1", "s", "u", {"amount": 1}, ["user:Hi", "assistant:+pay"])]


# -------------------------------------------------------------------------------------------------------------------- expiry


class Hosted:
    """A durable session under a clock that a test moves."""

    def __init__(self, agent: Agent[Any]) -> None:
        self.clock = FakeClock()
        self.store = memory_store(clock=self.clock)
        parts = StoreParts(self.store.sessions, self.store.checkpoints, self.store.approvals)
        self.host = SessionHost(agent.definition, "s", parts, TurnLine(), None, clock=self.clock)

    async def send(self, text: str) -> Any:
        return await self.host.start(TurnRequest("run_1", as_messages(text))).result()

    async def decide(self, approval_id: str, **decision: Any) -> Any:
        return await self.host.start(DecisionRequest("run_2", approval_id, Decision(**decision))).result()

    async def resume(self) -> Any:
        return await self.host.start(ResumeRequest("run_3")).result()


@pytest.mark.parametrize(("waited_ms", "runs"), [(59_999, True), (60_000, False), (90_000, False)])
async def test_an_approval_that_comes_too_late_is_a_denial(waited_ms: float, runs: bool) -> None:
    # APR-34, APR-35, APR-D3
    log = Log()
    hosted = Hosted(paying("Done", log=log, approval_ttl_ms=60_000))
    paused = await hosted.send("Hi")
    record = await hosted.host.approval(paused.approval_id)
    assert record is not None
    assert (record["createdAt"], record["expiresAt"]) == ("2026-01-01T00:00:00.000Z", "2026-01-01T00:01:00.000Z")
    hosted.clock.advance(waited_ms)
    with pytest.raises(LoushoError):
        await hosted.send("Again")  # APR-37
    result = await hosted.decide(paused.approval_id, approved=True)
    assert ("pay 5" in log.runs) is runs
    assert result.finish_reason == "stop"
    assert kinds(result.messages)[1] == ("ok" if runs else "denied")
    if not runs:
        assert "expired" in results(result.messages)[1]["message"]
    check_transcript(result.messages)


async def test_a_late_rejection_stays_a_rejection() -> None:
    # APR-36
    log = Log()
    hosted = Hosted(paying("Done", log=log, approval_ttl_ms=10))
    paused = await hosted.send("Hi")
    hosted.clock.advance(1_000)
    result = await hosted.decide(paused.approval_id, approved=False, note="No.")
    assert kinds(result.messages)[1] == "rejected"


async def test_without_a_ttl_a_pause_never_expires() -> None:
    # APR-34
    log = Log()
    hosted = Hosted(paying("Done", log=log))
    paused = await hosted.send("Hi")
    hosted.clock.advance(1e12)
    await hosted.decide(paused.approval_id, approved=True)
    assert "pay 5" in log.runs


async def test_a_decision_that_was_claimed_and_not_begun_is_used_after_a_minute() -> None:
    # APR-D5
    log = Log()
    hosted = Hosted(paying("Done", log=log))
    paused = await hosted.send("Hi")
    taken = await hosted.store.approvals.resolve(paused.approval_id, decision={"approved": True, "by": "ann"})
    assert taken is not None
    hosted.clock.advance(59_000)
    with pytest.raises(LoushoError) as raised:
        await hosted.resume()
    assert raised.value.code == "LOUSHO_SESSION_AWAITING_APPROVAL"
    await not_found(hosted.decide(paused.approval_id, approved=False))
    hosted.clock.advance(2_000)
    result = await hosted.resume()
    assert result.text == "Done"
    assert log.contexts[0].approval is not None
    assert log.contexts[0].approval.by == "ann"


async def test_a_claim_whose_checkpoint_cannot_be_written_is_undone() -> None:
    # DUR-17, APR-D4
    log = Log()
    hosted = Hosted(paying("Done", log=log))
    paused = await hosted.send("Hi")
    save = hosted.store.checkpoints.save

    async def fail(checkpoint: Any, /) -> None:
        raise StorageError("The disk is full.")

    hosted.store.checkpoints.save = fail  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        await hosted.decide(paused.approval_id, approved=True)
    hosted.store.checkpoints.save = save  # type: ignore[method-assign]
    assert log.runs == ["note x"]
    await hosted.decide(paused.approval_id, approved=True)
    assert log.runs == ["note x", "pay 5", "note x"]


# --------------------------------------------------------------------------------------------------------------------- hooks


class Hook:
    name = "watch"

    def __init__(self, answer: Any = None, change: dict[str, Any] | None = None) -> None:
        self.seen: list[tuple[str, str, bool]] = []
        self._answer = answer
        self._change = change

    def pre_tool_call(self, ctx: Any) -> Any:
        self.seen.append(("pre", ctx.tool_name, ctx.resumed_after_approval))
        if ctx.resumed_after_approval:
            if self._change is not None:
                ctx.args.update(self._change)
            return self._answer
        return None

    def post_tool_call(self, ctx: Any, outcome: Any) -> None:
        self.seen.append(("post", ctx.tool_name, ctx.resumed_after_approval))


async def test_hooks_of_an_approved_call_run_again_and_know_it() -> None:
    # APR-07, APR-22
    log, hook = Log(), Hook()
    agent = paying("Done", log=log, hooks=[hook])
    paused = await agent.send("Hi")
    await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert [one for one in hook.seen if one[1] == "pay"] == [
        ("pre", "pay", False),
        ("post", "pay", False),  # it is told that a person is asked
        ("pre", "pay", True),
        ("post", "pay", True),
    ]
    assert {one[2] for one in hook.seen if one[1] == "note"} == {False}


@pytest.mark.parametrize(
    ("hook", "kind"),
    [(Hook({"deny": "No."}), "denied"), (Hook({"result": "mine"}), "ok"), (Hook(change={"amount": 9}), "validation")],
    ids=["deny", "result", "changed"],
)
async def test_a_hook_can_stop_an_approved_call_but_not_change_it(hook: Hook, kind: str) -> None:
    # APR-22
    log = Log()
    agent = paying("Done", log=log, hooks=[hook])
    paused = await agent.send("Hi")
    result = await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert [run for run in log.runs if run.startswith("pay")] == []
    assert kinds(result.messages)[1] == kind


@pytest.mark.parametrize("where", ["send", "durable session"])
async def test_what_a_hook_made_of_the_arguments_is_what_was_approved_and_runs(where: str) -> None:
    # APR-07, APR-19, APR-22
    class Cap:
        name = "cap"

        def pre_tool_call(self, ctx: Any) -> None:
            if ctx.tool_name == "pay":
                ctx.args["amount"] = min(ctx.args["amount"], 3)

    log = Log()
    agent = paying("Done", log=log, hooks=[Cap()], **({"store": memory_store()} if where == "durable session" else {}))
    paused = await (agent.send("Hi") if where == "send" else agent.session("s").send("Hi"))
    assert (await agent.approvals.get(str(paused.approval_id))).args == {"amount": 3}  # type: ignore[union-attr]
    result = await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert "pay 3" in log.runs
    assert kinds(result.messages) == ["ok", "ok", "ok"]


@pytest.mark.parametrize("where", ["send", "durable session"])
@pytest.mark.parametrize("order", ["before", "after", "itself"])
async def test_images_of_a_turn_that_paused_come_behind_all_its_results(where: str, order: str) -> None:
    # T11
    log = Log()
    gated = order == "itself"
    picture = define_tool(name="picture", description="A picture.", execute=lambda args: b"\x89PNG\r\n\x1a\n", needs_approval=gated)
    turn = {
        "before": ("picture", ("pay", {"amount": 5})),
        "after": (("pay", {"amount": 5}), "picture"),
        "itself": ("picture", "note"),
    }
    options = {"store": memory_store()} if where == "durable session" else {}
    agent = agent_of(calls(*turn[order]), "Done", tools=[*log.tools, picture], **options)
    paused = await (agent.send("Hi") if where == "send" else agent.session("s").send("Hi"))
    result = await agent.approvals.resolve(str(paused.approval_id), approved=True)
    check_transcript(result.messages)
    assert [message.role for message in result.messages][-5:] == ["assistant", "tool", "tool", "user", "assistant"]
    assert any(isinstance(part, ImagePart) for part in result.messages[-2].content)


# ------------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("durable", [True, False])
async def test_an_agent_without_the_tool_leaves_the_pause_for_one_that_has_it(durable: bool) -> None:
    # APR-24, DUR-41
    log = Log()
    store = memory_store()
    options: dict[str, Any] = {"store": store if durable else Parts(store.sessions, None, store.approvals)}
    agent = paying("never", log=log, **options)
    paused = await agent.session("s").send("Hi")
    model = mock_model(["Done"])
    without = create_agent(provider=model, tools=log.tools[1:], on_agent_drift="ignore", **options)
    with pytest.raises(ResumeToolMissingError) as raised:
        await without.approvals.resolve(str(paused.approval_id), approved=True)
    assert raised.value.tool_name == "pay"
    assert model.calls == []
    assert [one.id for one in await agent.approvals.list()] == [paused.approval_id]
    await create_agent(provider=model, tools=log.tools, **options).approvals.resolve(str(paused.approval_id), approved=True)
    assert "pay 5" in log.runs


async def test_a_drifted_agent_leaves_the_pause_for_the_right_one() -> None:
    # DUR-40, APR-24
    log, store = Log(), memory_store()
    agent = paying("never", log=log, store=store)
    paused = await agent.session("s").send("Hi")
    drifted = agent_of("Done", tools=log.tools, store=store, instructions="Other.", on_agent_drift="error")
    with pytest.raises(AgentDriftError):
        await drifted.approvals.resolve(str(paused.approval_id), approved=True)
    right = agent_of("Done", tools=log.tools, store=store, on_agent_drift="error")
    assert (await right.approvals.resolve(str(paused.approval_id), approved=True)).text == "Done"


async def test_a_pause_that_cannot_be_written_fails_the_run_without_an_event() -> None:
    # APR-14
    log, events = Log(), list[Any]()
    store = memory_store()

    async def fail(pending: Any, snapshot: Any, /) -> None:
        raise StorageError("The disk is full.")

    store.approvals.save = fail  # type: ignore[method-assign]
    agent = agent_of(calls(("pay", {"amount": 5})), "Done", tools=log.tools, store=store, on_event=events.append)
    with pytest.raises(StorageError):
        await agent.session("s").send("Hi")
    assert log.runs == []
    assert "approval.requested" not in [event.type for event in events]
    pending = await agent.session("s").pending()
    assert pending is not None
    assert pending.status == "in-progress"


# --------------------------------------------------------------------------------------------------------------- in code


@pytest.mark.parametrize(
    ("answer", "runs", "note"), [(True, True, None), (False, False, None), ("Fine.", True, "Fine.")], ids=["yes", "no", "note"]
)
async def test_a_function_decides(answer: Any, runs: bool, note: str | None) -> None:
    # APR-30, APR-31, APR-D1
    log, asked = Log(), list[Any]()

    async def approve(call: Any) -> Any:
        asked.append(call)
        return answer

    result = await paying("Done", log=log, approve=approve).send("Hi")
    assert result.finish_reason == "stop"
    assert ("pay 5" in log.runs) is runs
    assert [(call["tool_name"], call["args"], call["kind"]) for call in asked] == [("pay", {"amount": 5}, "tool")]
    if runs:
        assert log.contexts[0].approval is not None
        assert log.contexts[0].approval.note == note
    else:
        assert kinds(result.messages)[1] == "rejected"


async def test_a_function_may_leave_the_decision_to_a_person() -> None:
    # APR-D1
    log = Log()
    agent = paying("Done", log=log, approve=lambda call: "defer")
    paused = await agent.send("Hi")
    assert paused.finish_reason == "awaiting-approval"
    again = await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert again.text == "Done"


@pytest.mark.parametrize("answer", [None, 1, {"approved": True}])
async def test_a_function_that_answers_something_else_fails_the_run(answer: Any) -> None:
    # APR-D1
    log = Log()
    with pytest.raises(ConfigurationError) as raised:
        await paying("Done", log=log, approve=lambda call: answer).send("Hi")
    assert raised.value.field == "approve"
    assert "pay 5" not in log.runs


async def test_streams_pause_whatever_a_function_would_say() -> None:
    # APR-30
    log = Log()
    agent = paying("Done", log=log, approve=lambda call: True)
    result = await agent.stream("Hi").result
    assert result.finish_reason == "awaiting-approval"
    stream = await agent.approvals.stream_resolve(str(result.approval_id), approved=True)
    assert (await stream.result).text == "Done"


# ------------------------------------------------------------------------------------------------------------------ questions


def asking(*after: Any, **asked: Any) -> Agent[Any]:
    question = {"question": "Which?", **asked}
    return agent_of(calls(("ask_question", question)), *after, ask_question=True, store=memory_store())


def answer_of(messages: list[Message]) -> Any:
    return json.loads(next(message.text for message in messages if message.role == "tool"))


async def test_a_question_pauses_and_the_answer_reaches_the_model() -> None:
    # APR-38, APR-39, APR-40, SES-46
    agent = asking("Done", options=["Red", "Blue"])
    session = agent.session("s")
    events: list[Any] = [event async for event in session.stream("Hi")]
    requested = next(event for event in events if event.type == "approval.requested")
    assert requested.kind == "question"
    assert requested.question == {"text": "Which?", "options": ["Red", "Blue"], "allowFreeText": True}
    pending = await session.pending()
    assert pending is not None
    assert pending.approval_kind == "question"
    listed = await agent.approvals.list()
    assert (listed[0].kind, listed[0].question) == ("question", requested.question)
    result = await agent.approvals.answer(requested.approval_id, " blue ")
    assert answer_of(result.messages) == {"answer": " blue ", "option": 1}
    assert result.text == "Done"


@pytest.mark.parametrize(
    ("asked", "answer", "expected"),
    [
        ({}, "Green", {"answer": "Green"}),
        ({"options": ["Red"]}, "Green", {"answer": "Green"}),
        ({"options": ["Straße", "strasse"]}, "STRASSE", {"answer": "STRASSE", "option": 0}),  # APR-D7
        ({"options": ["Red"], "allow_free_text": False}, "red", {"answer": "red", "option": 0}),
    ],
)
async def test_answers(asked: dict[str, Any], answer: str, expected: dict[str, Any]) -> None:
    # APR-40
    agent = asking("Done", **asked)
    paused = await agent.session("s").send("Hi")
    result = await agent.approvals.answer(str(paused.approval_id), answer)
    assert answer_of(result.messages) == expected


async def test_an_answer_that_is_no_option_is_an_error_for_the_model() -> None:
    # APR-41
    agent = asking("Done", options=["Red"], allow_free_text=False)
    paused = await agent.session("s").send("Hi")
    result = await agent.approvals.answer(str(paused.approval_id), "Green")
    assert kinds(result.messages) == ["execution"]
    assert "none of the options" in answer_of(result.messages)["message"]
    assert result.finish_reason == "stop"


async def test_a_declined_question_and_one_without_an_answer() -> None:
    # APR-42, APR-43
    agent = asking("Done")
    paused = await agent.session("s").send("Hi")
    result = await agent.approvals.resolve(str(paused.approval_id), approved=False)
    assert kinds(result.messages) == ["rejected"]
    assert "declined to answer" in answer_of(result.messages)["message"]
    agent = asking("Done")
    paused = await agent.session("s").send("Hi")
    result = await agent.approvals.resolve(str(paused.approval_id), approved=True)
    assert kinds(result.messages) == ["execution"]
    assert "no answer" in answer_of(result.messages)["message"]


async def test_a_late_answer_is_no_answer() -> None:
    # APR-36
    hosted = Hosted(agent_of(calls(("ask_question", {"question": "Which?"})), "Done", ask_question=True, approval_ttl_ms=10))
    paused = await hosted.send("Hi")
    hosted.clock.advance(10)
    result = await hosted.decide(paused.approval_id, approved=True, note="Blue")
    assert "not answered in time" in answer_of(result.messages)["message"]


async def test_only_questions_are_answered() -> None:
    # APR-D2
    log = Log()
    agent = paying("Done", log=log)
    paused = await agent.send("Hi")
    with pytest.raises(ConfigurationError, match="no question"):
        await agent.approvals.answer(str(paused.approval_id), "Blue")
    agent_asking = asking("Done")
    question = await agent_asking.session("s").send("Hi")
    for empty in ("", "  ", None):
        with pytest.raises(ConfigurationError) as raised:
            await agent_asking.approvals.answer(str(question.approval_id), empty)  # type: ignore[arg-type]
        assert raised.value.field == "answer"
    await agent.approvals.resolve(str(paused.approval_id), approved=True)
    await agent_asking.approvals.answer(str(question.approval_id), "Blue")


async def test_a_function_answers_questions_with_a_text() -> None:
    # APR-32
    agent = agent_of(calls(("ask_question", {"question": "Which?"})), "Done", ask_question=True, approve=lambda call: "Blue")
    assert answer_of((await agent.send("Hi")).messages) == {"answer": "Blue"}


def test_two_tools_of_that_name_are_refused() -> None:
    # APR-38
    own = define_tool(name="ask_question", description="Asks.", input={"type": "object"}, execute=lambda args: "x")
    with pytest.raises(ConfigurationError):
        agent_of(tools=[own], ask_question=True)
    assert "ask_question" not in agent_of().definition.tools


@pytest.mark.parametrize(
    "command",
    [
        *(
            "git status && curl x | sh",
            "git status; rm -rf .",
            "git status $(id)",
            "git status\nid",
            "git statusx",
            "X=1 git status",
        ),
        *("git -c core.pager=x status", "git status ", " git status", "GIT STATUS", "git\u00a0status", "git  status"),
    ],
)
async def test_what_a_person_allowed_for_good_is_that_command_and_no_other(command: str) -> None:
    # field case S08
    ran: list[str] = []

    @tool(needs_approval=True)
    def shell(command: str) -> str:
        """Runs a command."""
        ran.append(command)
        return "ran"

    asks = [calls(("shell", {"command": wanted})) for wanted in ("git status", "git status", command)]
    agent = agent_of(*asks, tools=[shell], store=memory_store())
    paused = await agent.session("s").send("Go")
    again = await agent.approvals.resolve(str(paused.approval_id), approved=True, remember="args")
    assert ran == ["git status", "git status"]  # the second one unasked
    assert again.finish_reason == "awaiting-approval"
    waiting = await agent.approvals.get(str(again.approval_id))
    assert waiting is not None
    assert waiting.args == {"command": command}
