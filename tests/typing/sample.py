"""What a type checker must find out about results, tools and options. Checked by `test_types.py`, never run."""

from __future__ import annotations

from typing import Any, assert_type

from pydantic import BaseModel

from lousho_ray import Agent, AgentRun, CreateAgentOptions, ExecutionResult, Session, Tool, create_agent, define_tool, tool


class Answer(BaseModel):
    city: str


async def results() -> None:
    agent = create_agent(output=Answer, instructions="Answer.")
    assert_type(agent, Agent[Answer])

    result = await agent.send("Where?")
    assert_type(result, ExecutionResult[Answer])
    assert_type(result.object, Answer | None)
    assert_type(result.raise_if_incomplete(), ExecutionResult[Answer])
    assert_type(agent.send_sync("Where?"), ExecutionResult[Answer])

    run = agent.stream("Where?")
    assert_type(run, AgentRun[Answer])
    assert_type(await run.result, ExecutionResult[Answer])

    session = agent.session("s")
    assert_type(session, Session[Answer])
    assert_type(await session.send("Where?"), ExecutionResult[Answer])
    assert_type(session.send_sync("Where?"), ExecutionResult[Answer])
    assert_type(await session.stream("Where?").result, ExecutionResult[Answer])
    assert_type(await session.resume(), ExecutionResult[Answer] | None)
    assert_type(await agent.resume("s"), ExecutionResult[Answer] | None)

    assert_type(await agent.approvals.resolve("a", approved=True), ExecutionResult[Answer])
    assert_type(await agent.approvals.answer("a", "Yes."), ExecutionResult[Answer])
    assert_type(agent.approvals.resolve_sync("a", approved=True), ExecutionResult[Answer])
    assert_type(await agent.approvals.stream_resolve("a", approved=True), AgentRun[Answer])

    async with agent as entered:
        assert_type(entered, Agent[Answer])


async def untyped_results() -> None:
    assert_type(create_agent(), Agent[Any])
    assert_type(create_agent(output={"type": "object"}), Agent[Any])
    assert_type((await create_agent().send("Hi")).object, Any | None)


async def plain_types() -> None:
    assert_type((await create_agent(output=int).send("How many?")).object, int | None)
    assert_type((await create_agent(output=list[str]).send("Which?")).object, list[str] | None)


@tool
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


@tool(needs_approval=True)
async def pay(to: str) -> bool:
    """Pays."""
    return bool(to)


async def tools() -> None:
    assert_type(add(1, b=2), int)
    assert_type(await pay("Ann"), bool)
    assert_type(define_tool(name="x", description="X.", execute=add), Tool[..., Any])
    add("one")  # type: ignore[arg-type]
    add(1, c=2)  # type: ignore[call-arg]
    await pay(5)  # type: ignore[arg-type]


def options() -> None:
    shared: CreateAgentOptions = {"max_steps": 3, "instructions": "Be brief."}
    overrides: CreateAgentOptions = {"max_steps": 5, "tools": [add, pay]}
    merged: CreateAgentOptions = {**shared, **overrides}
    assert_type(create_agent(**merged), Agent[Any])
    assert_type(create_agent(output=Answer, **merged), Agent[Answer])
    wrong: CreateAgentOptions = {"max_step": 3}  # type: ignore[typeddict-unknown-key]
    create_agent(max_steps="3")  # type: ignore[call-overload]
    create_agent(maxSteps=3)  # type: ignore[call-overload]
    del wrong
