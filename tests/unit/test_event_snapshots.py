"""Whole streams of events, every field of every event, against the texts in `event_snapshots/`.

A line is an event: its type and its fields as JSON. The envelope is checked for all of them and not written down; what differs from
run to run (times, random ids) is written `~`. A text that is no longer right is printed whole by the test that fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.agent import Agent
from lousho_ray.context.strategies import summarize_strategy
from lousho_ray.create import create_agent
from lousho_ray.errors import LoushoError, PropagatingToolError
from lousho_ray.events import Event
from lousho_ray.permissions import allow, ask, deny
from lousho_ray.ports import FinishChunk, HostedToolCall, HostedToolCallChunk, HostedToolResultChunk, ReasoningChunk, TextChunk
from lousho_ray.providers.fallback import with_fallback
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import Tool, define_tool
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import Gate, ScriptedStream, agent_of, calls, collect, failing, plain, say, think

FOLDER = Path(__file__).parent / "event_snapshots"
VARY = {"durationMs", "delayMs", "waitedMs", "approvalId", "at", "expiresAt"}
USED = ProviderUsage(10, 5)


def written(events: Sequence[Event]) -> str:
    """The events in the form of the snapshots, with their envelopes checked."""
    lines: list[str] = []
    for seq, event in enumerate(events):
        fields = event.to_dict()
        kind = fields.pop("type")
        envelope = (fields.pop("runId"), fields.pop("seq"), fields.pop("v"))
        assert envelope == (events[0].run_id, seq, 1)  # EVT-14
        assert len(fields.pop("timestamp")) == len("2026-01-01T00:00:00.000Z")
        parts = [f"{key}={'~' if key in VARY else _json(value)}" for key, value in fields.items()]
        lines.append(" ".join((kind, *parts)))
    return "\n".join(lines) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def model(*turns: Any, **options: Any) -> Agent:
    """An agent on a scripted model whose replies say what they used."""
    return agent_of(*(turn if isinstance(turn, Exception) else _used(turn) for turn in turns), **options)


def _used(turn: Any) -> dict[str, Any]:
    return {**(turn if isinstance(turn, dict) else {"text": turn}), "usage": {"input_tokens": 10, "output_tokens": 5}}


def taking(name: str, result: Any, **options: Any) -> Tool[..., Any]:
    """A tool that takes any arguments."""

    async def execute(args: Any) -> Any:
        return result

    return define_tool(name=name, description=f"Tool {name}.", execute=execute, input={"type": "object"}, **options)


def same(name: str, events: Sequence[Event], shorter: Mapping[str, str] | None = None) -> None:
    """Compares with a snapshot, in which some texts stand under shorter ones."""
    found = written(events)
    for text, label in (shorter or {}).items():
        found = found.replace(text, label)
    assert found == (FOLDER / f"{name}.txt").read_text(encoding="utf-8"), f"\n{found}"


async def heard(run: Any) -> list[Any]:
    """The events of a run that pauses or goes on after a pause: its calls need not start or end in it."""
    return [event async for event in run]


async def test_a_plain_turn() -> None:
    # EVT-01, EVT-14, EVT-19, EVT-25, EVT-27
    same("plain_turn", await collect(model("Hello there").stream("Hi")))


async def test_tools() -> None:
    # EVT-18, EVT-28, RUN-42, RUN-43
    need = define_tool(name="need", description="Needs x.", execute=_never, input={"type": "object", "required": ["x"]})
    tools = [taking("look", {"seen": [1, None]}), failing("break", ValueError("broken")), need]
    first = calls(("look", {"at": "it"}), text="Looking")
    agent = model(first, calls("break", ("need", {"y": 1}), "nope"), "Seen", tools=tools, tool_concurrency=1)
    same("tools", await collect(agent.stream("Hi")))


async def _never(args: Any) -> str:
    raise AssertionError("must not run")


async def test_parallel_tools() -> None:
    # EVT-31
    first, second, third = Gate("a", 1), Gate("b", 2), Gate("c", 3)
    run = model(calls("a", "b", "c"), "Done", tools=[first.tool, second.tool, third.tool]).stream("Go")
    await asyncio.gather(*(gate.running.wait() for gate in (first, second, third)))
    events: list[Any] = []
    third.go.set()
    async for event in run:
        events.append(event)
        if event.type == "tool.done":
            {"c": first, "a": second, "b": second}[event.tool_name].go.set()
    same("parallel_tools", events)


async def test_a_generator_tool() -> None:
    # RUN-36, TOOL-34, TOOL-35
    async def count(args: Any) -> AsyncIterator[Any]:
        for number in range(3):
            yield {"read": number}

    tool = define_tool(name="count", description="Counts.", execute=count)
    same("generator_tool", await collect(model(calls("count"), "Done", tools=[tool]).stream("Go")))


def _task(agent: str) -> tuple[str, dict[str, str]]:
    return ("task", {"agent": agent, "prompt": "Dig!", "description": f"{agent} digs"})


async def test_sub_agents() -> None:
    # EVT-15, EVT-42, SUB-47, SUB-48
    inner = model(calls("dig"), "Found", name="inner", description="Digs.", tools=[plain("dig")])
    outer = model(calls(_task("inner")), "Told", name="outer", description="Asks.", subagents={"inner": inner})
    lead = model(calls(_task("outer")), "Done", subagents={"outer": outer}, max_subagent_depth=2)
    same("sub_agents", await collect(lead.stream("Go")))


async def test_a_retry() -> None:
    # EVT-28, EVT-29
    clock = FakeClock()
    provider = ScriptedStream([ReasoningChunk("Hm"), ConnectionError("gone")], [*think("Aha"), *say("Yes", USED)])
    run = create_agent(provider=with_retry(provider, max_retries=1, clock=clock)).stream("Hi")
    await provider.reached(0, 1).wait()
    while not clock.waiting:
        await asyncio.sleep(0)
    clock.advance(60_000)
    same("retry", await collect(run))


async def test_a_fallback() -> None:
    # EVT-28
    class Denied(Exception):
        status_code = 401

    one = mock_model([Denied("no")], name="one", default_model="one-1")
    provider = with_fallback([one, mock_model([_used("Hello")], name="two", default_model="two-1")])
    same("fallback", await collect(create_agent(provider=provider).stream("Hi")))


READ: Tool[..., Any] = plain("read", "r" * 4_000)


async def test_a_compaction() -> None:
    # EVT-24, EVT-28
    summarizer = mock_model([_used("In short.")] * 9, default_model="summ-1")
    options = {"context_window": 4_000, "protected_tokens": 1_000, "strategy": summarize_strategy(model=summarizer)}
    agent = model(*[calls("read")] * 5, "Done", tools=[READ], compaction=options)
    same("compaction", await collect(agent.stream("Go")), {"r" * 4_000: "rrr"})


@pytest.mark.parametrize("approved", [True, False])
async def test_a_pause_for_an_approval_and_what_comes_after_it(approved: bool) -> None:
    # EVT-31, EVT-33, EVT-50
    pay = taking("pay", "paid", needs_approval=True)
    agent = model(calls("look", ("pay", {"amount": 5}), "look"), "Done", tools=[plain("look"), pay], tool_concurrency=1)
    events = await heard(agent.stream("Go"))
    same("approval_pause", events)
    stream = await agent.approvals.stream_resolve(events[-3].approval_id, approved=approved, by="ann", note="Ok")
    same("after_approval" if approved else "after_rejection", await heard(stream))


async def test_a_pause_in_a_sub_agent_and_what_comes_after_it() -> None:
    # EVT-43, EVT-50
    pay = taking("pay", "paid", needs_approval=True)
    child = model(calls(("pay", {"amount": 5})), "It is paid.", name="payer", description="Pays.", tools=[pay])
    agent = model(calls(_task("payer")), "Done", subagents={"payer": child})
    events = await heard(agent.stream("Go"))
    same("sub_agent_pause", events)
    stream = await agent.approvals.stream_resolve(events[-3].approval_id, approved=True)
    same("after_sub_agent_pause", await heard(stream))


async def test_decisions_of_permission_rules() -> None:
    # EVT-21, EVT-32
    tools = [plain("read"), plain("edit"), taking("act", 1)]
    rules = [allow("read"), deny("edit", "not today"), ask("act")]
    agent = model(calls("read", "edit", ("act", {"n": 1})), "Done", tools=tools, permissions=rules, tool_concurrency=1)
    same("permissions", await heard(agent.stream("Go")))


async def test_an_abort_during_the_reply() -> None:
    # EVT-19, EVT-27, RUN-53
    provider = ScriptedStream([TextChunk("Part"), asyncio.Event(), FinishChunk("stop")])
    run = create_agent(provider=provider).stream("Hi")
    await provider.reached(0, 1).wait()
    run.abort("enough")
    same("abort_in_reply", await collect(run))


async def test_an_abort_during_tools() -> None:
    # RUN-56, EVT-31
    gate = Gate("slow")
    run = model(calls("quick", "slow"), tools=[plain("quick"), gate.tool]).stream("Hi")
    await gate.running.wait()
    run.abort("enough")
    same("abort_in_tools", await collect(run))


async def test_an_error_of_the_provider() -> None:
    # EVT-20, EVT-39, EVT-D9
    same("provider_error", await collect(model(RuntimeError("broken")).stream("Hi")))


async def test_an_error_that_a_tool_means_for_the_caller() -> None:
    # EVT-39, RUN-32
    agent = model(calls("bad"), tools=[failing("bad", PropagatingToolError("stop everything"))])
    same("tool_error", await collect(agent.stream("Hi")))


@pytest.mark.parametrize("on_exceeded", ["stop", "throw"])
async def test_a_budget_stop(on_exceeded: str) -> None:
    # EVT-22, EVT-38
    limits = {"max_tokens": 15, "on_exceeded": on_exceeded}
    run = model(calls("look"), tools=[plain("look")], limits=limits).stream("Hi")
    same(f"budget_{on_exceeded}", await collect(run))


async def test_queued_and_steered_input() -> None:
    # EVT-34, EVT-35
    provider = ScriptedStream([ReasoningChunk("Hm"), asyncio.Event()], say("Fine", USED), say("Also", USED))
    run = create_agent(provider=provider).stream("Hi")
    await provider.reached(0, 1).wait()
    ids = {run.enqueue("And this").id: "queued-id", run.steer("Rather this").id: "steered-id"}
    same("input", await collect(run), ids)


async def test_a_call_that_the_provider_ran() -> None:
    # EVT-18, HOST-04
    call = HostedToolCall(id="h1", name="web_search", args={"q": "x"}, result={"hits": 1})
    provider = ScriptedStream([HostedToolCallChunk(call), HostedToolResultChunk(call), *say("Found", USED)])
    same("hosted_call", await collect(create_agent(provider=provider).stream("Hi")))


async def test_structured_output() -> None:
    # EVT-20, RUN-77
    same("structured_output", await collect(model("Five", '{"n": 5}', output=dict[str, int]).stream("Hi")))


async def test_a_run_that_never_began() -> None:
    # EVT-51
    agent = model("never")
    stream = await agent.approvals.stream_resolve("unknown", approved=True)
    same("unknown_approval", await heard(stream))
    with pytest.raises(LoushoError):
        await stream.result
