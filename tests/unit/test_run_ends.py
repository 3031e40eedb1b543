"""How runs end, pause and go on: exactly one end each, what is saved and reported before it, and what a continuation uses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import AgentExecutionError, LoushoError, PropagatingToolError, StorageError
from lousho_ray.limits.budget import LocalLedger
from lousho_ray.messages import Message
from lousho_ray.providers.prices import register_model
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import (
    Gate,
    agent_of,
    calls,
    check_events,
    check_transcript,
    collect,
    failing,
    kinds,
    names,
    plain,
    shape,
)


def asking(log: list[str]) -> Any:
    async def execute(args: Any) -> str:
        log.append("ask")
        return "asked"

    return define_tool(name="ask", description="Asks.", execute=execute, needs_approval=True)


# ------------------------------------------------------------------------------------------------------------ exactly one end

SPENT: dict[str, Any] = {"usage": {"input_tokens": 9, "output_tokens": 9}}
ENDS: list[Any] = [
    pytest.param(["Done"], {}, "stop", None, id="stop"),
    pytest.param([{"text": "Do", "finish_reason": "length"}], {}, "length", None, id="length"),
    pytest.param([{"text": "", "finish_reason": "content_filter"}], {}, "content_filter", None, id="content_filter"),
    pytest.param([calls("look")], {"max_steps": 1}, "max-steps", None, id="max-steps"),
    pytest.param([calls("look", **SPENT)], {"limits": {"max_tokens": 9}}, "budget-exceeded", None, id="budget"),
    pytest.param([calls("look")], {"limits": {"max_steps": 1}}, "budget-exceeded", None, id="steps as a limit"),
    pytest.param(["x", "y"], {"output": int}, "output-invalid", None, id="output-invalid"),
    pytest.param([calls("look")], {"max_steps": 1, "output": int}, "error", "script", id="failed forced answer"),
    pytest.param([calls("ask")], {}, "awaiting-approval", None, id="pause"),
    pytest.param([RuntimeError("broken")], {}, "error", "broken", id="provider"),
    pytest.param([calls("stop")], {}, "error", "enough", id="propagating tool"),
    pytest.param([calls("look", **SPENT)], {"limits": {"max_tokens": 9, "on_exceeded": "throw"}}, "error", "limit", id="throw"),
    pytest.param(["Done"], {"instructions": lambda run: 1 / 0}, "error", "instructions", id="resolver"),
]


@pytest.mark.parametrize("how", ["send", "stream", "session"])
@pytest.mark.parametrize(("turns", "options", "reason", "error"), ENDS)
async def test_every_run_ends_exactly_once_with_its_result_or_its_error(
    turns: Any, options: Any, reason: str, error: str | None, how: str
) -> None:
    # RUN-46, RUN-47, EVT-20, EVT-25, EVT-39
    heard: list[Any] = []
    tools = [plain("look"), asking([]), failing("stop", PropagatingToolError("enough"))]
    agent: Any = create_agent(provider=mock_model(turns), tools=tools, on_event=heard.append, retry={"max_retries": 0}, **options)
    target = agent.session() if how == "session" else agent
    calling = target.send("Go") if how != "stream" else target.stream("Go").result
    if error is None:
        assert (await calling).finish_reason == reason
    else:
        with pytest.raises((LoushoError, PropagatingToolError), match=error):
            await calling
    ends = [event for event in heard if event.type == "run.done"]
    assert [event.finish_reason for event in ends] == [reason]
    assert heard[-1] is ends[0]
    assert [event.type for event in heard].count("error") == (0 if error is None else 1)
    if reason != "awaiting-approval":
        check_events(heard)


@pytest.mark.parametrize("how", ["abort", "cancel", "leave", "deadline"])
async def test_a_run_that_is_given_up_ends_exactly_once_too(how: str) -> None:
    # RUN-54, RUN-61, RUN-D1, EVT-25
    heard: list[Any] = []
    gate = Gate("slow")
    limits = {"max_duration_ms": 30} if how == "deadline" else {}
    agent = agent_of(calls("slow"), "Done", tools=[gate.tool], on_event=heard.append, limits=limits)
    if how == "cancel":
        sending = asyncio.ensure_future(agent.send("Go"))
        await gate.running.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    else:
        async with agent.stream("Go") as run:
            await gate.running.wait()
            if how == "abort":
                run.abort("enough")
            if how == "deadline":
                await run.result
        await run.result
    wanted = "budget-exceeded" if how == "deadline" else "aborted"
    assert [event.finish_reason for event in heard if event.type == "run.done"] == [wanted]
    assert heard[-1].type == "run.done"
    check_events(heard)


# -------------------------------------------------------------------------------------------------------------------- pauses


async def test_the_first_call_that_needs_a_person_stops_the_batch() -> None:
    # RUN-30, EVT-33, RUN-49
    log: list[str] = []
    slow = Gate("slow")
    tools = [slow.tool, plain("quick", log=log), asking(log), plain("later", log=log)]
    agent = agent_of(calls("slow", "quick", "ask", "ask", "later"), "Done", tools=tools)
    run = agent.stream("Go")
    await slow.running.wait()
    slow.go.set()
    events = [event async for event in run]
    result = await run.result
    assert log == ["quick"]
    assert (result.finish_reason, result.steps, result.approval_id is not None) == ("awaiting-approval", 1, True)
    # The calls before it are finished and recorded, those behind it have not begun.
    assert kinds(result.messages) == ["ok", "ok"]
    told = names(events)
    assert told[-3:] == ["approval.requested", "step.done 1 awaiting-approval", "run.done awaiting-approval"]
    assert told.index("tool.done slow") < told.index("approval.requested")
    assert told.index("tool.done quick") < told.index("approval.requested")
    assert told.count("tool.start ask") == 1
    assert "tool.start later" not in told
    assert [call.name for call in result.tool_calls] == ["slow", "quick", "ask"]
    paused: Any = events[-3]
    assert (paused.tool_name, paused.approval_id) == ("ask", result.approval_id)
    again = await agent.approvals.resolve(str(result.approval_id), approved=True)
    assert (again.finish_reason, log) == ("awaiting-approval", ["quick", "ask"])  # the second `ask` is asked about by itself
    final = await agent.approvals.resolve(str(again.approval_id), approved=True)
    assert (final.text, log) == ("Done", ["quick", "ask", "ask", "later"])
    check_transcript(final.messages)


async def test_a_callback_decides_for_send_and_a_stream_pauses_all_the_same() -> None:
    # EVT-08
    log: list[str] = []
    asked: list[Any] = []

    def approve(call: Any) -> bool:
        asked.append(call)
        return True

    agent = agent_of(calls("ask"), "Done", calls("ask"), tools=[asking(log)], approve=approve)
    assert (await agent.send("Go")).text == "Done"
    assert (len(asked), log) == (1, ["ask"])
    run = agent.stream("Go")
    events = [event async for event in run]
    assert names(events)[-1] == "run.done awaiting-approval"
    assert (len(asked), log) == (1, ["ask"])


@pytest.mark.parametrize("resumed_by", ["resolve", "resume"])
async def test_a_continuation_uses_the_agents_own_steps_and_instructions(resumed_by: str) -> None:
    # RUN-07, RUN-08
    log: list[str] = []
    after: list[Any] = [calls("look"), calls("look"), "Done"]
    turns = [
        calls("ask") if resumed_by == "resolve" else calls("look"),
        *([] if resumed_by == "resolve" else [RuntimeError("x")]),
        *after,
    ]
    model = mock_model(turns)
    agent = create_agent(
        provider=model,
        tools=[asking(log), plain("look")],
        max_steps=9,
        instructions="Own.",
        store=memory_store(),
        retry={"max_retries": 0},
    )
    session = agent.session("s")
    if resumed_by == "resolve":
        paused = await session.send("Go", max_steps=2, instructions="For this call.")
        result: Any = await agent.approvals.resolve(str(paused.approval_id), approved=True)
        first = 1
    else:
        with pytest.raises(LoushoError):
            await session.send("Go", max_steps=2, instructions="For this call.")
        result = await session.resume()
        first = 2
    assert all("For this call." in request.messages[0].text for request in model.calls[:first])
    assert all(request.messages[0].text.startswith("Own.") for request in model.calls)
    assert all("For this call." not in request.messages[0].text for request in model.calls[first:])
    assert result is not None
    assert (result.finish_reason, result.text) == ("stop", "Done")  # two steps would not have been enough
    assert "For this call." not in result.messages[0].text


@pytest.mark.parametrize("decided", [False, True], ids=["unknown", "decided"])
@pytest.mark.parametrize("method", ["stream_resolve", "stream_answer"])
async def test_a_stream_of_no_open_approval_ends_with_the_error(decided: bool, method: str) -> None:
    # EVT-51
    agent = agent_of(calls("ask"), "Done", tools=[asking([])])
    approval_id = "appr_none"
    if decided:
        approval_id = str((await agent.send("Go")).approval_id)
        await agent.approvals.resolve(approval_id, approved=True)
    if method == "stream_answer":
        run = await agent.approvals.stream_answer(approval_id, "Yes.")
    else:
        run = await agent.approvals.stream_resolve(approval_id, approved=True)
    events: list[Any] = await collect(run)
    assert names(events) == ["error LoushoError", "run.done error"]
    assert events[0].error.code == "LOUSHO_APPROVAL_NOT_FOUND"
    with pytest.raises(LoushoError) as raised:
        await run.result
    assert raised.value.code == "LOUSHO_APPROVAL_NOT_FOUND"


async def test_drift_is_reported_before_anything_of_the_run() -> None:
    # EVT-41
    log: list[str] = []
    store = memory_store()
    paused = await agent_of(calls("ask"), tools=[asking(log)], store=store).session("s").send("Go")
    changed = agent_of("Done", tools=[asking(log), plain("more")], instructions="Other.", store=store, on_agent_drift="warn")
    run = await changed.approvals.stream_resolve(str(paused.approval_id), approved=True)
    events: list[Any] = [event async for event in run]
    assert names(events)[:2] == ["run.start", "agent.drift"]
    assert names(events).count("agent.drift") == 1
    assert (events[1].tools_added, events[1].instructions) == (("more",), True)
    assert (await run.result).text == "Done"


# --------------------------------------------------------------------------------------------------------------- checkpoints


async def test_the_assistant_turn_is_saved_before_its_first_call_starts() -> None:
    # RUN-26
    store = memory_store()
    seen: list[list[str]] = []

    async def execute(args: Any, ctx: Any) -> str:
        saved = await store.checkpoints.load("r")
        assert saved is not None
        seen.append(shape([Message.from_dict(message) for message in saved["messages"]])[-1:])
        return "done"

    tool = define_tool(name="look", description="Looks.", execute=execute)
    agent = agent_of(calls("look", text="So"), "Done", tools=[tool], store=store)
    assert (await agent.send("Go", session_id="r")).text == "Done"
    assert seen == [["assistant:So+look"]]


async def test_no_call_starts_when_the_assistant_turn_cannot_be_saved() -> None:
    # RUN-26
    store, log = memory_store(), list[str]()
    save = store.checkpoints.save

    async def fail(record: Any, /) -> None:
        if any(message["role"] == "assistant" for message in record["messages"]):
            raise StorageError("The disk is full.")
        await save(record)

    store.checkpoints.save = fail  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        await agent_of(calls("look"), "Done", tools=[plain("look", log=log)], store=store).send("Go", session_id="r")
    assert log == []


# -------------------------------------------------------------------------------------------------------------------- ledger


async def test_a_run_whose_ledger_is_lost_fails_rather_than_go_on_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    # RUN-D9: what a lost accountant actor says (tests/ray) stops the run
    gone = False

    def losing(method: Any) -> Any:
        async def lost(*args: Any) -> Any:
            if gone:
                raise AgentExecutionError("The accountant of this run was lost.")
            return await method(*args)

        return lost

    def found(request: Any) -> str:
        nonlocal gone
        gone = True
        return "Found"

    child = agent_of(found, name="w", description="Works.")
    model = mock_model([calls(("task", {"agent": "w", "prompt": "Do it", "description": "d"})), "Done"])
    lead = create_agent(provider=model, subagents={"w": child}, limits={"max_tokens": 10_000})
    for name in ("report", "totals"):
        monkeypatch.setattr(LocalLedger, name, losing(getattr(LocalLedger, name)))
    with pytest.raises(AgentExecutionError) as raised:
        await lead.send("Go")
    assert raised.value.code == "LOUSHO_AGENT_EXECUTION_FAILED"
    assert len(model.calls) == 1


async def test_a_sub_agent_does_not_start_without_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    # RUN-D9
    async def lost(*args: Any) -> Any:
        raise AgentExecutionError("The accountant of this run was lost.")

    worker = mock_model(["Found"])
    child = create_agent(provider=worker, name="w", description="Works.")
    task = calls(("task", {"agent": "w", "prompt": "Do it", "description": "d"}))
    monkeypatch.setattr(LocalLedger, "report", lost)
    result = await agent_of(task, "Done", subagents={"w": child}, limits={"max_tokens": 10_000}).send("Go")
    assert worker.calls == []
    assert kinds(result.messages) == ["execution"]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("max_tokens", 10, "maxTokens"),
        ("max_input_tokens", 5, "maxInputTokens"),
        ("max_output_tokens", 5, "maxOutputTokens"),
        ("max_cost_usd", 0.5, "maxCostUsd"),
        ("max_duration_ms", 30, "maxDurationMs"),
        ("max_steps", 1, "maxSteps"),
        ("max_tool_errors", 1, "maxToolErrors"),
    ],
)
async def test_the_event_names_the_limit_as_the_documentation_does(key: str, value: Any, told: str) -> None:
    # EVT-22, EVT-38
    register_model(id="priced-end", provider="x", context_window=1000, input_cost_per_mtok=100_000.0, output_cost_per_mtok=0.0)
    slow = Gate("slow")
    turn = calls("slow" if key == "max_duration_ms" else "missing", usage={"input_tokens": 5, "output_tokens": 5})
    agent = create_agent(provider=mock_model([turn, "Done"], default_model="priced-end"), tools=[slow.tool], limits={key: value})
    events: list[Any] = await collect(run := agent.stream("Go"))
    assert names(events)[-2:] == [f"budget.exceeded {told}", "run.done budget-exceeded"]
    event = events[-2]
    assert (event.max, event.scope) == (value, "run")
    assert event.value >= event.max
    budget = (await run.result).budget
    assert budget is not None
    assert budget.to_dict() == {"limit": told, "value": event.value, "max": value, "scope": "run"}
