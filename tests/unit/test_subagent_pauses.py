"""Calls of sub-agents that wait for a person: the whole run pauses, one record is decided, and nothing runs twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.agent import Agent
from lousho_ray.errors import AgentDriftError, LoushoError, ResumeToolMissingError, ToolArgumentsValidationError
from lousho_ray.stores.memory import memory_store
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.tools.tool import define_tool
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import Gate, agent_of, calls, check_transcript, kinds, names, results, shape
from tests.unit.test_approvals import Log
from tests.unit.test_hooks import Hook
from tests.unit.test_subagents_local import task, worker


def payer(log: Log, *after: Any, amount: int = 5, **options: Any) -> Any:
    """A sub-agent that notes something, then wants to pay."""
    return worker(calls("note", ("pay", {"amount": amount})), *(after or ("It is paid.",)), tools=log.tools, **options)


def lead(log: Log, *after: Any, child: Any = None, **options: Any) -> Agent[Any]:
    children = {"worker": child or payer(log)}
    return agent_of(calls(task("worker")), *(after or ("All done",)), subagents=children, **options)


WAYS = ["send", "durable send", "session", "durable session"]


def begin(where: str, agent: Agent[Any], session: Any) -> Any:
    match where:
        case "send":
            return agent.send("Go")
        case "durable send":
            return agent.send("Go", session_id="s")
        case _:
            return session.send("Go")


def store_for(where: str) -> dict[str, Any]:
    return {"store": memory_store()} if where.startswith("durable") else {}


# --------------------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize("where", WAYS)
async def test_a_childs_gated_call_pauses_the_run_and_goes_on_when_it_is_decided(where: str) -> None:
    # APR-44, APR-45, SUB-50, SUB-51
    log = Log()
    agent = lead(log, **store_for(where))
    session = agent.session("s")
    paused = await begin(where, agent, session)
    assert paused.finish_reason == "awaiting-approval"
    assert log.runs == ["note x"]
    [pending] = await agent.approvals.list()
    assert (pending.id, pending.tool_name, pending.args) == (paused.approval_id, "pay", {"amount": 5})
    assert pending.subagent_path == ("worker",)
    result = await agent.approvals.resolve(pending.id, approved=True)
    assert (result.finish_reason, result.text) == ("stop", "All done")
    assert log.runs == ["note x", "pay 5"]
    [answer] = results(result.messages)
    assert answer.startswith("It is paid.")
    assert answer.endswith("[sub-agent 'worker': 2 steps, finish reason 'stop', taskId 'task_1']")
    check_transcript(result.messages)
    assert await agent.approvals.list() == []
    if "session" in where:
        assert shape(await session.load())[-3:] == ["assistant:+task", "tool:task", "assistant:All done"]


@pytest.mark.parametrize("where", WAYS)
async def test_a_rejected_call_of_a_child_is_not_run_and_the_child_goes_on(where: str) -> None:
    # APR-20, APR-45
    log = Log()
    agent = lead(log, child=payer(log, "Then not."), **store_for(where))
    session = agent.session("s")
    paused = await begin(where, agent, session)
    result = await agent.approvals.resolve(paused.approval_id, approved=False, note="too much")
    assert log.runs == ["note x"]
    assert results(result.messages)[0].startswith("Then not.")
    assert kinds(result.messages) == ["ok"]


async def test_of_two_deciders_on_a_childs_call_one_wins() -> None:
    # APR-18
    log = Log()
    agent = lead(log)
    paused = await agent.send("Go")
    both = [agent.approvals.resolve(paused.approval_id, approved=True) for _ in range(2)]
    won = await asyncio.gather(*both, return_exceptions=True)
    [error] = [outcome for outcome in won if isinstance(outcome, BaseException)]
    assert isinstance(error, LoushoError)
    assert error.code == "LOUSHO_APPROVAL_NOT_FOUND"
    assert log.runs == ["note x", "pay 5"]


@pytest.mark.parametrize("depth", [2, 3])
async def test_a_pause_deep_in_the_tree_pauses_every_run_above_it(depth: int) -> None:
    # APR-45, SUB-50, SUB-51
    log = Log()
    child, path = payer(log), ["worker"]
    for level in range(depth - 1):
        name = f"middle{level}"
        child = worker(calls(task(path[0])), f"{name} says so", subagents={path[0]: child}, name=name)
        path.insert(0, name)
    agent = agent_of(calls(task(path[0])), "All done", subagents={path[0]: child}, max_subagent_depth=depth)
    paused = await agent.send("Go")
    assert (await agent.approvals.get(paused.approval_id)).subagent_path == tuple(path)  # type: ignore[union-attr]
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert log.runs == ["note x", "pay 5"]
    assert result.text == "All done"
    assert results(result.messages)[0].startswith(f"{path[0]} says so")


async def test_a_child_may_pause_again_under_a_new_id() -> None:
    # APR-17, SUB-51
    log = Log()
    child = payer(log, calls(("pay", {"amount": 7})), "Both are paid.")
    agent = lead(log, child=child, store=memory_store())
    first = await agent.send("Go", session_id="s")
    second = await agent.approvals.resolve(first.approval_id, approved=True)
    assert second.finish_reason == "awaiting-approval"
    assert second.approval_id != first.approval_id
    assert log.runs == ["note x", "pay 5"]
    result = await agent.approvals.resolve(second.approval_id, approved=True)
    assert log.runs == ["note x", "pay 5", "pay 7"]
    assert results(result.messages)[0].startswith("Both are paid.")


async def test_edited_arguments_run_in_the_child_and_wrong_ones_leave_the_pause_open() -> None:
    # LES-27, APR-24
    log = Log()
    agent = lead(log)
    paused = await agent.send("Go")
    with pytest.raises(ToolArgumentsValidationError):
        await agent.approvals.resolve(paused.approval_id, approved=True, args={"amount": "much"})
    await agent.approvals.resolve(paused.approval_id, approved=True, args={"amount": 3})
    assert log.runs == ["note x", "pay 3"]


async def test_a_question_of_a_child_is_answered_through_the_lead() -> None:
    # APR-39, APR-44, EVT-43
    child = worker(calls(("ask_question", {"question": "Which?", "options": ["a", "b"]})), "b it is", ask_question=True)
    agent = agent_of(calls(task("worker")), "All done", subagents={"worker": child})
    run = agent.stream("Go")
    events = [event async for event in run]
    [asked] = [event for event in events if event.type == "approval.requested"]
    assert (asked.kind, asked.question["text"], asked.subagent, tuple(asked.subagent_path)) == (
        "question",
        "Which?",
        None,
        ("worker",),
    )
    result = await agent.approvals.answer(asked.approval_id, "B")
    assert results(result.messages)[0].startswith("b it is")


# ------------------------------------------------------------------------------------------------------------------ siblings


async def test_calls_beside_a_paused_child_keep_their_results_and_run_once() -> None:
    # APR-45, SUB-52, LES-64
    log = Log()
    children = {"worker": payer(log), "quick": worker("Quick answer", name="quick")}
    turn = calls(("note", {"text": "before"}), task("worker"), task("quick"), ("note", {"text": "after"}))
    agent = agent_of(turn, "All done", subagents=children, tools=log.tools, store=memory_store())
    paused = await agent.session("s").send("Go")
    seen = sorted(log.runs)
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert sorted(log.runs) == sorted([*seen, "pay 5"])
    assert [str(item)[:12] for item in results(result.messages)] == ["noted", "It is paid.\n", "Quick answer", "noted"]
    check_transcript(result.messages)


async def test_of_two_children_that_need_a_person_the_earlier_is_asked_for_and_the_later_ended() -> None:
    # APR-15, SUB-52
    log, other = Log(), Log()
    children = {"worker": payer(log), "second": payer(other, amount=9, name="second")}
    agent = agent_of(calls(task("worker"), task("second")), "All done", subagents=children)
    paused = await agent.send("Go")
    assert (await agent.approvals.get(paused.approval_id)).subagent_path == ("worker",)  # type: ignore[union-attr]
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert (log.runs, other.runs) == (["note x", "pay 5"], ["note x"])
    assert kinds(result.messages) == ["ok", "not-run"]
    assert "pay" in results(result.messages)[1]["message"]
    check_transcript(result.messages)


@pytest.mark.parametrize("order", [["task", "pay"], ["pay", "task"]])
async def test_a_child_and_a_gated_call_of_the_lead_are_asked_for_one_after_the_other(order: list[str]) -> None:
    # APR-08, APR-21
    log, own = Log(), Log()
    wanted = {"task": task("worker"), "pay": ("pay", {"amount": 1})}
    agent = agent_of(
        calls(*(wanted[name] for name in order)),
        "All done",
        subagents={"worker": payer(log)},
        tools=own.tools,
        store=memory_store(),
    )
    result = await agent.send("Go", session_id="s")
    paths = []
    for _ in range(2):
        paths.append((await agent.approvals.get(result.approval_id)).subagent_path)  # type: ignore[union-attr]
        result = await agent.approvals.resolve(result.approval_id, approved=True)
    assert paths == ([("worker",), ()] if order[0] == "task" else [(), ("worker",)])
    assert (result.text, log.runs, own.runs) == ("All done", ["note x", "pay 5"], ["pay 1"])
    check_transcript(result.messages)


async def test_an_abort_while_a_sibling_still_runs_answers_every_call() -> None:
    log, gate = Log(), Gate("slow")
    agent = agent_of(
        calls(task("worker"), "slow"), "All done", subagents={"worker": payer(log)}, tools=[gate.tool], store=memory_store()
    )
    run = agent.session("s").stream("Go")
    types: list[str] = []
    async for event in run:
        types.append(event.type)
        if event.type == "step.done" and event.subagent is not None and event.finish_reason == "awaiting-approval":
            run.abort("enough")
    result = await run.result
    assert result.finish_reason == "aborted"
    assert types.count("tool.error") == 2
    check_transcript(result.messages)
    assert await agent.session("s").pending() is None


# --------------------------------------------------------------------------------------------------------- in another process


async def test_another_process_decides_on_a_childs_call(tmp_path: Path) -> None:
    # APR-54, APR-D9
    log = Log()
    store = SqliteStore(tmp_path / "store.db")
    paused = await lead(log, store=store).session("s").send("Go")
    await store.aclose()
    again = SqliteStore(tmp_path / "store.db")
    later = agent_of("All done", subagents={"worker": worker("It is paid.", tools=log.tools)}, store=again)
    result = await later.approvals.resolve(paused.approval_id, approved=True)
    assert log.runs == ["note x", "pay 5"]
    assert results(result.messages)[0].startswith("It is paid.")
    assert shape(await later.session("s").load())[-1] == "assistant:All done"
    await again.aclose()


async def test_a_run_lost_after_the_decision_goes_on_with_it_and_asks_nobody_again() -> None:
    # DUR-D2, DUR-33
    log = Log()
    store = memory_store()
    agent = lead(log, child=payer(log, RuntimeError("lost")), store=store)
    paused = await agent.session("s").send("Go")
    saved = await store.checkpoints.load(f"s.turn-{0}")
    assert saved is not None
    [child] = saved["children"].values()
    assert child["path"] == "worker"
    json.dumps(saved)
    # The decision is in the checkpoint, and the process is gone before the child went on.
    decided = {**saved, "status": "in-progress", "revision": saved["revision"] + 1}
    decided["decisions"] = {saved["approvalCallId"]: {"approved": True, "note": "fine", "by": "ann"}}
    await store.checkpoints.save(decided)
    later = agent_of("All done", subagents={"worker": worker("It is paid.", tools=log.tools)}, store=store)
    result = await later.session("s").resume()
    assert result is not None
    assert log.runs == ["note x", "pay 5"]
    assert result.text == "All done"
    with pytest.raises(LoushoError):
        await later.approvals.resolve(paused.approval_id, approved=True)


async def test_a_run_lost_before_its_pause_was_written_asks_again() -> None:
    log = Log()
    store = memory_store()
    paused = await lead(log, store=store).session("s").send("Go")
    saved = await store.checkpoints.load("s.turn-0")
    assert saved is not None
    kept = {key: value for key, value in saved.items() if not key.startswith("approval")}
    await store.checkpoints.save({**kept, "status": "in-progress", "revision": saved["revision"] + 1})
    later = agent_of("All done", subagents={"worker": worker("It is paid.", tools=log.tools)}, store=store)
    again = await later.session("s").resume()
    assert again is not None
    assert again.finish_reason == "awaiting-approval"
    assert again.approval_id != paused.approval_id
    assert log.runs == ["note x"]
    assert (await later.approvals.resolve(again.approval_id, approved=True)).text == "All done"


# --------------------------------------------------------------------------------------------------------------------- drift


@pytest.mark.parametrize("mode", ["warn", "error", "ignore"])
async def test_a_child_that_changed_since_the_pause_follows_the_leads_rule(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    # DUR-43, DUR-40, SUB-57
    log = Log()
    store = memory_store()
    paused = await lead(log, store=store).session("s").send("Go")
    changed = worker("It is paid.", tools=log.tools, instructions="Be brief.")
    later = agent_of("All done", subagents={"worker": changed}, store=store, on_agent_drift=mode)
    if mode == "error":
        with pytest.raises(AgentDriftError, match="worker"):
            await later.approvals.resolve(paused.approval_id, approved=True)
        assert log.runs == ["note x"]
        later = lead(log, child=worker("It is paid.", tools=log.tools), store=store, on_agent_drift="error")
        later = agent_of("All done", subagents={"worker": worker("It is paid.", tools=log.tools)}, store=store, on_agent_drift=mode)
    run = await later.approvals.stream_resolve(paused.approval_id, approved=True)
    drifts = [event async for event in run if event.type == "agent.drift"]
    assert [event.subagent.name for event in drifts if event.subagent is not None] == (["worker"] if mode == "warn" else [])
    assert ("worker" in caplog.text) == (mode == "warn")
    assert log.runs == ["note x", "pay 5"]


@pytest.mark.parametrize("gone", ["tool", "sub-agent"])
async def test_a_decision_on_a_call_that_no_longer_exists_is_refused_and_stays_open(gone: str) -> None:
    # DUR-41, SUB-57
    log = Log()
    store = memory_store()
    paused = await lead(log, store=store).session("s").send("Go")
    children = {"worker": worker("x")} if gone == "tool" else {"other": worker("x")}
    later = agent_of("All done", subagents=children, store=store, on_agent_drift="ignore")
    with pytest.raises(ResumeToolMissingError):
        await later.approvals.resolve(paused.approval_id, approved=True)
    assert (await later.approvals.get(paused.approval_id)) is not None
    assert log.runs == ["note x"]


# ------------------------------------------------------------------------------------------------------------- usage and events


async def test_usage_before_and_after_the_pause_counts_once() -> None:
    # APR-46, SUB-37, SUB-32
    log = Log()
    used = ProviderUsage(10, 1)
    child = worker(
        {**calls(("pay", {"amount": 5})), "usage": {"input_tokens": 100, "output_tokens": 10}},
        {"text": "It is paid.", "usage": {"input_tokens": 200, "output_tokens": 20}},
        tools=log.tools,
    )
    agent = agent_of(
        {**calls(task("worker")), "usage": {"input_tokens": used.prompt_tokens, "output_tokens": 1}},
        {"text": "All done", "usage": {"input_tokens": used.prompt_tokens, "output_tokens": 1}},
        subagents={"worker": child},
    )
    paused = await agent.send("Go")
    assert (paused.usage.input_tokens, paused.usage.output_tokens, paused.usage.model_calls) == (110, 11, 2)
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.model_calls) == (320, 32, 4)
    assert result.usage.delegated is not None
    assert (result.usage.delegated.input_tokens, result.usage.delegated.runs) == (300, 1)


async def test_a_child_that_goes_on_is_held_to_its_own_limits_with_what_it_spent_before() -> None:
    # APR-46, SUB-37
    log = Log()
    spent = {"usage": {"input_tokens": 100, "output_tokens": 10}}
    turns = ({**calls(("pay", {"amount": 5})), **spent}, {**calls("note"), **spent}, "x")
    child = worker(*turns, tools=log.tools, limits={"max_tokens": 150})
    agent = agent_of(calls(task("worker")), "All done", subagents={"worker": child}, limits={"max_tokens": 10_000})
    paused = await agent.send("Go")
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert "maxTokens limit" in results(result.messages)[0]["message"]
    assert log.runs == ["pay 5"]


async def test_a_child_that_goes_on_is_not_held_to_its_lead_but_counts_for_it() -> None:
    # BUD-23, SUB-37
    log = Log()
    spent = {"usage": {"input_tokens": 100, "output_tokens": 10}}
    turns = ({**calls(("pay", {"amount": 5})), **spent}, {**calls("note"), **spent}, {"text": "It is paid.", **spent})
    child = worker(*turns, tools=log.tools)
    own = {**calls(task("worker")), "usage": {"input_tokens": 10, "output_tokens": 1}}
    agent = agent_of(own, "never", subagents={"worker": child}, limits={"max_tokens": 250})
    paused = await agent.send("Go")
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert log.runs == ["pay 5", "note x"]
    assert results(result.messages)[0].startswith("It is paid.")
    assert (result.finish_reason, result.usage.delegated.input_tokens) == ("budget-exceeded", 300)  # type: ignore[union-attr]


async def test_the_pause_is_told_once_and_its_continuation_marked() -> None:
    # SUB-49, EVT-43, EVT-50, EVT-31
    log = Log()
    agent = lead(log)
    run = agent.stream("Go")
    events = [event async for event in run]
    assert names(events)[-3:] == ["approval.requested", "step.done 1 awaiting-approval", "run.done awaiting-approval"]
    assert [event.subagent for event in events if event.type == "approval.requested"] == [None]
    assert [event.type for event in events if event.subagent is not None][-1] == "step.done"
    [pending] = await agent.approvals.list()
    again = await agent.approvals.stream_resolve(pending.id, approved=True)
    told = [(event.type, event.subagent.name if event.subagent else None) async for event in again]
    assert told[:4] == [("run.start", None), ("approval.resolved", None), ("tool.resume", None), ("tool.resume", "worker")]
    assert ("tool.done", "worker") in told
    assert told[-1] == ("run.done", None)


async def test_approve_decides_a_childs_call_in_a_send_and_not_in_a_stream() -> None:
    # APR-30, SUB-53
    log = Log()
    agent = lead(log, approve=lambda call: True)
    assert (await agent.send("Go")).text == "All done"
    streaming = lead(log, approve=lambda call: True)
    run = streaming.stream("Go")
    _ = [event async for event in run]
    assert (await run.result).finish_reason == "awaiting-approval"


async def test_approve_may_defer_a_childs_call() -> None:
    # APR-D1
    log = Log()
    agent = lead(log, approve=lambda call: "defer")
    paused = await agent.send("Go")
    assert paused.finish_reason == "awaiting-approval"
    assert (await agent.approvals.get(paused.approval_id)).subagent_path == ("worker",)  # type: ignore[union-attr]


async def test_the_hooks_of_the_task_call_run_again_and_may_still_deny_it() -> None:
    # SUB-54, APR-22
    log = Log()
    seen: list[tuple[str, bool]] = []

    def watch(ctx: Any) -> Any:
        seen.append((ctx.tool_name, ctx.resumed_after_approval))
        return {"deny": "not any more"} if ctx.tool_name == "task" and ctx.resumed_after_approval else None

    agent = lead(log, hooks=[Hook(pre_tool_call=watch)], store=memory_store())
    paused = await agent.session("s").send("Go")
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert seen == [("task", False), ("note", False), ("pay", False), ("task", True)]
    assert kinds(result.messages) == ["denied"]
    assert log.runs == ["note x"]


async def test_input_given_while_a_child_is_paused_waits_for_the_decision() -> None:
    # DUR-26
    log = Log()
    agent = lead(log, store=memory_store())
    await agent.session("s").send("Go")
    with pytest.raises(LoushoError) as raised:
        await agent.session("s").send("Hello?")
    assert raised.value.code == "LOUSHO_SESSION_AWAITING_APPROVAL"


async def test_a_fork_of_a_run_with_a_paused_child_asks_again() -> None:
    # DUR-51
    log = Log()
    child = payer(log, "It is paid.", "It is paid.")
    agent = lead(log, "All done", "All done", child=child, store=memory_store())
    paused = await agent.send("Go", session_id="s")
    fork = await agent.fork("s", paused.steps)
    again = await agent.resume(fork.session_id)
    assert again is not None
    assert again.finish_reason == "awaiting-approval"
    assert again.approval_id != paused.approval_id
    for approval_id in (again.approval_id, paused.approval_id):
        assert (await agent.approvals.resolve(approval_id, approved=True)).text == "All done"
    assert log.runs == ["note x", "pay 5", "pay 5"]


async def test_remember_in_a_child_holds_for_the_rest_of_that_child() -> None:
    # LES-27
    log = Log()
    child = payer(log, calls(("pay", {"amount": 6})), "Both are paid.")
    agent = lead(log, child=child)
    paused = await agent.send("Go")
    result = await agent.approvals.resolve(paused.approval_id, approved=True, remember="tool")
    assert result.text == "All done"
    assert log.runs == ["note x", "pay 5", "pay 6"]


async def test_a_result_with_bytes_survives_in_the_record_of_a_paused_child(tmp_path: Path) -> None:
    log = Log()
    picture = define_tool(name="picture", description="A picture.", execute=lambda args: b"\x89PNG")
    store = SqliteStore(tmp_path / "store.db")
    child = worker(calls("picture"), calls(("pay", {"amount": 5})), "It is paid.", tools=[*log.tools, picture])
    agent = agent_of(calls(task("worker")), "All done", subagents={"worker": child}, store=store)
    paused = await agent.session("s").send("Go")
    assert (await agent.approvals.resolve(paused.approval_id, approved=True)).text == "All done"
    await store.aclose()
