"""Tools with `ray_options`: a Ray task a call, under the same approvals, events, errors and aborts as any tool."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import Agent, GenerateResult, MockProvider, ToolCall, ToolContext, create_agent, tool
from tests.ray.processes import eventually, fan_out, task_results

pytestmark = pytest.mark.usefixtures("ray_cluster")


@tool(ray_options={"num_cpus": 0.5})
def placed(word: str, ctx: ToolContext) -> dict[str, Any]:
    """Says where it runs and with what.

    Args:
        word: Anything.
    """
    got = ray.get_runtime_context().get_assigned_resources()
    return {"word": word, "pid": os.getpid(), "cpus": got["CPU"], "call": ctx.tool_call_id, "asked": ctx.messages[-1].text}


@tool(ray_options={"num_cpus": 0})
async def placed_async(word: str) -> str:
    """Says it again.

    Args:
        word: Anything.
    """
    await asyncio.sleep(0)
    return f"{word} {os.getpid()}"


class Refused(Exception):
    """An error that cannot be sent as it is."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


@tool(ray_options={"num_cpus": 0})
def fails(how: str) -> str:
    """Fails.

    Args:
        how: The way.
    """
    match how:
        case "value":
            raise ValueError("no good")
        case "odd":
            raise Refused("this", "that")
        case "exit":
            raise SystemExit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def calls(name: str, **arguments: Any) -> MockProvider:
    """A model that calls a tool once and answers with its result."""

    def policy(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return request.messages[-1].text
        return GenerateResult(tool_calls=(ToolCall("c1", name, json.dumps(arguments)),), finish_reason="tool_calls")

    return MockProvider(policy=policy)


def agent_with(function: Any, **arguments: Any) -> Agent[Any]:
    return create_agent(provider=calls(function.name, **arguments), tools=[function], description="Calls.", runtime="ray")


@pytest.mark.parametrize("where", ["run", "session", "sub-agent"])
async def test_a_call_is_a_task_with_the_resources_that_were_asked_for(where: str) -> None:
    # DEC-R8
    agent = agent_with(placed, word="tea")
    if where == "sub-agent":
        lead = create_agent(provider=MockProvider(policy=fan_out(1)), subagents={"child": agent}, runtime="ray")
        (message,) = task_results((await lead.send("Go.")).messages).values()
        answer = json.loads(json.loads(message.text).split("\n\n[sub-agent")[0])
    else:
        runner: Any = agent if where == "run" else agent.session()
        answer = json.loads((await runner.send("task 0")).text)
    assert answer["pid"] != os.getpid()
    assert {key: answer[key] for key in ("word", "cpus", "call")} == {"word": "tea", "cpus": 0.5, "call": "c1"}
    assert "task 0" in answer["asked"]


async def test_it_looks_like_any_other_tool() -> None:
    # DEC-R8: the same events, the same transcript
    def plain(word: str) -> str:
        """Says it again.

        Args:
            word: Anything.
        """
        return f"{word} again"

    shapes = []
    for options in ({}, {"ray_options": {"num_cpus": 0}}):
        agent = agent_with(tool(**options)(plain), word="tea")
        run = agent.stream("Go.")
        events = [event async for event in run]
        shapes.append(([event.type for event in events], [message.text for message in (await run.result).messages]))
    assert shapes[0] == shapes[1]


async def test_an_approval_comes_first() -> None:
    # DEC-R8
    asked: list[str] = []

    @tool(ray_options={"num_cpus": 0}, needs_approval=True)
    def careful(path: str) -> str:
        """Writes.

        Args:
            path: Where.
        """
        Path(path).write_text("written")
        return "written"

    def approve(request: Any) -> bool:
        asked.append(request["tool_name"] if "tool_name" in request else request["toolName"])
        return False

    path = f"/tmp/lousho-tool-task-{os.getpid()}"
    agent = create_agent(provider=calls("careful", path=path), tools=[careful], approve=approve, runtime="ray")
    await agent.send("Go.")
    assert asked == ["careful"]
    assert not Path(path).exists()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("value", ("ValueError", "no good")),
        ("odd", ("Refused", "this and that")),
        ("exit", ("SystemExit",)),
        ("killed", ("was lost", "not run again")),
    ],
)
async def test_what_goes_wrong_in_a_task_is_the_calls_error(how: str, words: tuple[str, ...]) -> None:
    # DEC-R8, Q01, Q10
    result = await agent_with(fails, how=how).send("Go.")
    assert result.tool_errors == 1
    (message,) = (message for message in result.messages if message.role == "tool")
    assert message.is_error
    assert all(word in message.text for word in words), message.text
    assert (await agent_with(fails, how="not at all").send("Go.")).tool_errors == 0


async def test_a_task_that_is_lost_is_not_run_again(tmp_path: Path) -> None:
    # RUN-D7: a retry by Ray would do its work twice
    lines = tmp_path / "lines"

    @tool(ray_options={"num_cpus": 0})
    def once() -> str:
        """Notes that it runs, and dies."""
        with lines.open("a") as file:
            file.write("ran\n")
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"

    result = await agent_with(once).send("Go.")
    assert result.tool_errors == 1
    assert lines.read_text() == "ran\n"


@pytest.mark.parametrize("kind", ["async", "sync", "deaf"])
async def test_an_abort_ends_the_task(tmp_path: Path, kind: str) -> None:
    # DEC-R8, Q07
    marks = tmp_path
    agent = agent_with(waiting_tool(kind, marks))
    run = agent.stream("Go.")
    reader = asyncio.create_task(read_all(run))

    async def started() -> bool:
        return (marks / "pid").exists() and bool((marks / "pid").read_text())

    await eventually(started, 30)
    pid = int((marks / "pid").read_text())
    run.abort("Enough.")
    result = await asyncio.wait_for(run.result, 30)
    await reader
    assert result.finish_reason == "aborted"

    async def stopped() -> bool:
        before = (marks / "beat").read_text()
        await asyncio.sleep(0.3)
        return not alive(pid) or (marks / "beat").read_text() == before

    await eventually(stopped, 30)


async def read_all(run: Any) -> None:
    async for _ in run:
        pass


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def waiting_tool(kind: str, marks: Path) -> Any:
    def begin() -> None:
        (marks / "beat").write_text("0")
        (marks / "pid").write_text(str(os.getpid()))

    def beat() -> None:
        (marks / "beat").write_text(str(time.monotonic()))

    if kind == "async":

        @tool(ray_options={"num_cpus": 0})
        async def waits_async() -> str:
            """Waits."""
            begin()
            while True:
                beat()
                await asyncio.sleep(0.02)

        return waits_async

    @tool(ray_options={"num_cpus": 0})
    def waits() -> str:
        """Waits, also when it is told to stop."""
        begin()
        end = time.monotonic() + 40
        while time.monotonic() < end:
            try:
                beat()
                time.sleep(0.02)
            except BaseException:
                if kind == "sync":
                    raise
        return "never"

    return waits


async def test_what_cannot_be_sent_is_named() -> None:
    # DEC-R5
    import threading

    lock = threading.Lock()

    @tool(ray_options={"num_cpus": 0})
    def guarded() -> str:
        """Waits its turn."""
        with lock:
            return "done"

    result = await agent_with(guarded).send("Go.")
    (message,) = (message for message in result.messages if message.role == "tool")
    assert message.is_error
    assert "lock" in message.text
    assert "cannot be sent to a Ray task" in message.text
