"""Permissions of runs that are elsewhere: rules travel, modes reach a running turn, decisions are told where the caller is."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lousho_ray import AgentExecutionError, GenerateResult, MockProvider, ToolCall, ask, create_agent, deny, tool
from lousho_ray.ports import GenerateOptions
from tests.unit.loop_support import kinds

pytestmark = pytest.mark.usefixtures("ray_cluster")


@tool
def act() -> str:
    """Acts."""
    return "acted"


def twice(options: GenerateOptions) -> GenerateResult | str:
    results = [message for message in options.messages if message.role == "tool"]
    if len(results) >= 2 and options.messages[-1].role == "tool":
        return "Done"
    return GenerateResult("", (ToolCall(f"call_{len(results)}", "act", "{}"),), "tool_calls")


def delegate(options: GenerateOptions) -> GenerateResult | str:
    if options.messages[-1].role == "tool":
        return "Done"
    wanted = '{"agent": "worker", "prompt": "Act", "description": "act twice"}'
    return GenerateResult("", (ToolCall("t", "task", wanted),), "tool_calls")


def actor(**options: Any) -> Any:
    return create_agent(provider=MockProvider(policy=twice), tools=[act], runtime="ray", **options)


async def test_a_switch_reaches_a_turn_that_runs_in_its_actor() -> None:
    # PERM-37, PERM-43, SES-13, SES-75
    session = actor().session()
    run = session.stream("Go")
    async for event in run:
        if event.type == "tool.done":
            await session.set_permission_mode("plan")
    result = await run.result
    assert kinds(result.messages)[0] == "ok"
    assert session.permission_mode == "plan"
    again = await session.send("Again")
    assert kinds(again.messages)[-1] == "denied"


async def test_decisions_of_an_actor_and_of_a_worker_are_told_to_the_caller() -> None:
    # PERM-44, PERM-50, APR-50, APR-51, DEC-R5
    heard: list[Any] = []

    def audit(entry: Any, about: Any) -> None:
        heard.append((os.getpid(), entry.tool_name, entry.decision, about["principal"]))

    worker = actor(name="worker", description="Acts.", permissions=[ask("nothing")])
    lead = create_agent(
        provider=MockProvider(policy=delegate),
        subagents={"worker": worker},
        permissions=[deny("act")],
        on_permission_decision=audit,
        runtime="ray",
    )
    expected = [(os.getpid(), name, said, "ann") for name, said in (("task", "default"), ("act", "deny"), ("act", "deny"))]
    await lead.send("Go", principal="ann")
    assert heard == expected
    heard.clear()
    await lead.session().send("Go", principal="ann")
    assert heard == expected


async def test_an_audit_that_fails_ends_a_run_in_an_actor_with_its_error() -> None:
    def fail(entry: Any, about: Any) -> None:
        raise ValueError("disk full")

    agent = create_agent(
        provider=MockProvider(policy=lambda request: GenerateResult("", (ToolCall("c", "act", "{}"),), "tool_calls"), delay_ms=20),
        tools=[act],
        max_steps=1_000,
        on_permission_decision=fail,
        runtime="ray",
    )
    with pytest.raises(AgentExecutionError, match="disk full"):
        await agent.session().send("Go")
