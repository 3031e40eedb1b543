"""What a process that dies leaves behind, and what another one makes of it.

A death is played by copying the records of a store at a moment of the run, as a disk would keep them, and by going on from the copy
with another agent object.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.errors import BudgetExceededError, LoushoError
from lousho_ray.messages import ImagePart, TextPart, user
from lousho_ray.ports import ToolContext
from lousho_ray.run_forks import get_checkpoint_history
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.clock import FakeClock
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import Gate, agent_of, calls, check_transcript, kinds, names, plain, results, shape
from tests.unit.test_subagents_local import task, worker


async def survivor(store: Any, key: str = "r") -> Any:
    """A store with what a disk would hold of run `key` right now."""
    copy = memory_store()
    saved = await store.checkpoints.load(key)
    assert saved is not None
    await copy.checkpoints.save(json.loads(json.dumps(saved)))
    return copy


async def stopped(run: Any) -> None:
    run.abort("The test is over.")
    await run.result


# ---------------------------------------------------------------------------------------------------------------- what is lost


async def test_a_subagent_that_was_running_is_run_again_by_the_resumed_lead() -> None:
    # DUR-04, DUR-33
    store, gate, again = memory_store(), Gate("dig"), Gate("dig")
    again.go.set()
    lead = agent_of(
        calls(task("worker")), "never", subagents={"worker": worker(calls("dig"), "never", tools=[gate.tool])}, store=store
    )
    run = lead.stream("Go", session_id="r")
    await gate.running.wait()
    copy = await survivor(store)
    second = agent_of("All done", subagents={"worker": worker(calls("dig"), "Found", tools=[again.tool])}, store=copy)
    result = await second.resume("r")
    assert result is not None
    assert (result.text, again.runs) == ("All done", 1)
    assert shape(result.messages)[1:] == ["user:Go", "assistant:+task", "tool:task", "assistant:All done"]
    assert "Found" in result.messages[3].text
    await stopped(run)


async def test_partial_output_is_lost_and_begins_anew() -> None:
    # DUR-35
    def watching(gate: asyncio.Event, reached: asyncio.Event) -> Any:
        @tool
        async def watch() -> AsyncIterator[str]:
            """Watches."""
            yield "first"
            reached.set()
            await gate.wait()
            yield "last"

        return watch

    store, reached, go = memory_store(), asyncio.Event(), asyncio.Event()
    run = agent_of(calls("watch"), "never", tools=[watching(asyncio.Event(), reached)], store=store).stream("Go", session_id="r")
    await reached.wait()
    copy = await survivor(store)
    assert "first" not in json.dumps(await copy.checkpoints.load("r"))
    go.set()
    again = agent_of("Done", tools=[watching(go, asyncio.Event())], store=copy).stream([], session_id="r")
    told = [name for name in names([event async for event in again]) if name.startswith("tool.")]
    assert told == ["tool.start watch", "tool.partial watch 0 first", "tool.partial watch 1 last", "tool.done watch"]
    await stopped(run)


async def test_a_result_behind_a_slower_call_is_kept() -> None:
    # DUR-34 as LES-64 has it, DUR-30
    store, slow, log = memory_store(), Gate("slow"), list[str]()
    run = agent_of(calls("slow", "quick"), "never", tools=[slow.tool, plain("quick", log=log)], store=store).stream(
        "Go", session_id="r"
    )
    await slow.running.wait()
    while not ((await store.checkpoints.load("r")) or {}).get("settled"):
        await asyncio.sleep(0)
    copy = await survivor(store)
    again = Gate("slow")
    again.go.set()
    result = await agent_of("Done", tools=[again.tool, plain("quick", log=log)], store=copy).resume("r")
    assert result is not None
    assert (again.runs, log) == (1, ["quick"])
    assert shape(result.messages)[1:] == ["user:Go", "assistant:+slow,quick", "tool:slow", "tool:quick", "assistant:Done"]
    await stopped(run)


@pytest.mark.parametrize(("effect", "outcome"), [(None, "again"), ("idempotent", "again"), ("once", "unknown")])
async def test_a_call_that_had_its_effect_and_no_record_of_it(effect: Any, outcome: str) -> None:
    # S02, S01, DUR-33, DEC-R7: the same key on both tries, and no second try of a call that may not be repeated
    lines: list[str] = []
    hang = asyncio.Event()

    def paying(wait: bool) -> Any:
        @tool(effect=effect)
        async def pay(ctx: ToolContext) -> str:
            """Pays."""
            lines.append(ctx.tool_call_id)
            if wait:
                hang.set()
                await asyncio.Event().wait()
            return "paid"

        return pay

    store = memory_store()
    run = agent_of(calls("pay"), "never", tools=[paying(True)], store=store).stream("Go", session_id="r")
    await hang.wait()
    copy = await survivor(store)
    result = await agent_of("Done", tools=[paying(False)], store=copy).resume("r")
    assert result is not None
    assert result.text == "Done"
    check_transcript(result.messages)
    if outcome == "again":
        assert lines == ["call_1", "call_1"]
    else:
        assert lines == ["call_1"]
        assert results(result.messages)[0]["outcome"] == "unknown"
    after = await agent_of("never", tools=[paying(False)], store=copy).resume("r")
    assert after is None  # (iii) what is recorded does not run again
    await stopped(run)


# --------------------------------------------------------------------------------------------------------- what is never kept


async def test_instructions_of_a_call_are_in_no_record() -> None:
    # DUR-10, RUN-07
    store = memory_store()

    @tool(needs_approval=True)
    def pay() -> str:
        """Pays."""
        return "paid"

    agent = agent_of(calls("pay"), "Done", tools=[pay], store=store)
    paused = await agent.send("Go", session_id="r", instructions="Speak like a pirate.")
    assert "pirate" in agent.definition.provider.calls[0].messages[0].text  # type: ignore[union-attr]
    kept = [await store.checkpoints.load("r"), await store.approvals.load(paused.approval_id or "")]
    await agent.approvals.resolve(paused.approval_id or "", approved=True)
    kept += [await store.checkpoints.load("r"), await get_checkpoint_history(store, "r")]
    session = agent_of("Yes", store=store).session("s")
    await session.send("Hi", instructions="Speak like a pirate.")
    kept += [[message.to_dict() for message in await session.load()], await get_checkpoint_history(store, "s.turn-0")]
    assert None not in kept
    assert "pirate" not in json.dumps(kept, default=str)


async def test_nothing_expires_by_itself() -> None:
    # DUR-55, STO-37
    clock = FakeClock()
    store = memory_store(clock=clock)

    @tool(needs_approval=True)
    def pay() -> str:
        """Pays."""
        return "paid"

    agent = agent_of(calls("pay"), "Done", "Hi", tools=[pay], store=store)
    paused = await agent.send("Go", session_id="r")
    done = await agent_of("Done", store=store).send("Go", session_id="done")
    await agent_of("Yes", store=store).session("s").send("Hi")
    clock.advance(20 * 365 * 24 * 3600 * 1000.0)
    assert await store.checkpoints.load("r") is not None
    assert await store.checkpoints.load("done") is not None
    assert len(await store.sessions.load("s") or []) == 2
    assert done.text == "Done"
    counts = store.prune(1_000)
    assert (counts["sessions"], counts["checkpoints"], counts["approvals"]) == (1, 1, 0)
    assert await store.checkpoints.load("r") is not None  # somebody may still decide it
    assert (await agent.approvals.resolve(paused.approval_id or "", approved=True)).text == "Done"


# ------------------------------------------------------------------------------------------------------------- sending again


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Hi", "Hi", True),
        ("Hi", [user("Hi", trace=1)], True),
        ([TextPart("Hi"), ImagePart(b"\x89PNG")], [TextPart("Hi"), ImagePart(b"\x89PNG")], True),
        ([user("a"), user("b")], [user("a"), user("b")], True),
        ("Hi", "Hi ", False),
        ([user("a"), user("b")], [user("b")], False),
        ([TextPart("Hi"), ImagePart(b"\x89PNG")], [TextPart("Hi"), ImagePart(b"\x89PNX")], False),
    ],
)
async def test_input_that_an_unfinished_run_was_started_with_is_a_retry(first: Any, second: Any, same: bool) -> None:
    # DUR-D4, DUR-23
    agent = agent_of(RuntimeError("broken"), "Done", store=memory_store())
    with pytest.raises(LoushoError, match="broken"):
        await agent.send(first, session_id="r")
    result = await agent.send(second, session_id="r")
    started = 2 if isinstance(first, list) and isinstance(first[0], type(user("x"))) else 1
    users = [message for message in result.messages if message.role == "user"]
    assert len(users) == started + (0 if same else 1)


@pytest.mark.parametrize("where", ["send", "session"])
async def test_a_limit_that_raises_leaves_a_finished_run(where: str) -> None:
    # DUR-D9, BUD-09
    store = memory_store()
    limits = {"max_tool_errors": 1, "on_exceeded": "throw"}

    bad = Gate("bad", error=ValueError("no"))
    bad.go.set()
    agent = agent_of(calls("bad"), "Next", tools=[bad.tool], store=store, limits=limits)
    if where == "send":
        with pytest.raises(BudgetExceededError):
            await agent.send("Go", session_id="r")
        saved = await store.checkpoints.load("r")
        assert saved is not None
        assert (saved["status"], saved["finishReason"]) == ("finished", "budget-exceeded")
        assert await agent.resume("r") is None
        result = await agent.send("More", session_id="r")
    else:
        session = agent.session("s")
        with pytest.raises(BudgetExceededError):
            await session.send("Go")
        assert await session.pending() is None
        result = await session.send("More")
    assert shape(result.messages)[1:] == ["user:Go", "assistant:+bad", "tool:bad", "user:More", "assistant:Next"]
    assert kinds(result.messages) == ["execution"]


async def test_a_decision_that_was_taken_is_good_until_its_call_has_run() -> None:
    # S05, DUR-D2, APR-D5
    ran: list[str] = []
    hang = asyncio.Event()

    def paying(wait: bool) -> Any:
        @tool(needs_approval=True)
        async def pay(ctx: ToolContext) -> str:
            """Pays."""
            ran.append(f"{ctx.tool_call_id} {ctx.approval.by if ctx.approval else None}")
            if wait:
                hang.set()
                await asyncio.Event().wait()
            return "paid"

        return pay

    store = memory_store()
    agent = agent_of(calls("pay"), "never", tools=[paying(True)], store=store)
    paused = await agent.send("Go", session_id="r")
    stream = await agent.approvals.stream_resolve(paused.approval_id or "", approved=True, by="ann")
    await hang.wait()
    copy = await survivor(store)
    other = agent_of(RuntimeError("503"), "Done", tools=[paying(False)], store=copy)
    with pytest.raises(LoushoError, match="503"):
        await other.resume("r")
    result = await other.resume("r")
    assert result is not None
    assert result.text == "Done"
    assert ran == ["call_1 ann", "call_1 ann"]  # not asked again, and run once by whoever went on
    await stopped(stream)
