"""What a test can show with this kit: requests, transcripts, an end that leaves nothing, a clock that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from lousho_ray import CompactedLLMProviderError, LoushoError, create_agent, create_rate_limiter, with_rate_limit, with_retry
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions
from lousho_ray.testing import FakeClock, MemoryWorkspace, make_tool_context, mock_model
from lousho_ray.tools.builtin import create_date_tools
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.workspace import ShellOutput, create_shell_tool
from tests.unit.loop_support import Gate, calls, check_transcript, plain, until


async def test_requests_show_the_system_prompt_the_tools_of_each_step_and_the_settings() -> None:
    # TEST-05
    child = create_agent(name="reader", description="Reads.", provider=mock_model(["x"]))
    model = mock_model([calls("look"), "Done"])
    agent = create_agent(
        provider=model,
        instructions="Be brief.",
        tools=[plain("look")],
        subagents={"reader": child},
        model_settings={"temperature": 0.5},
        permission_mode="plan",
    )
    await agent.send("Go")
    first, second = model.calls
    assert first.messages[0].role == "system"
    assert all(word in first.messages[0].text for word in ("Be brief.", "reader", "plan"))
    assert {"look", "task"} <= {offered.name for offered in first.tools}
    assert [offered.name for offered in second.tools] == [offered.name for offered in first.tools]
    assert first.settings["temperature"] == 0.5
    assert model.last_call is second


ENDS: list[Any] = [
    pytest.param(["Done"], {}, id="stop"),
    pytest.param([calls("look", "look")], {"max_steps": 1}, id="max-steps"),
    pytest.param([calls("look", usage={"input_tokens": 9, "output_tokens": 9})], {"limits": {"max_tokens": 9}}, id="budget"),
    pytest.param([calls("look"), RuntimeError("down")], {"retry": False}, id="provider"),
    pytest.param([calls("nowhere"), "Done"], {}, id="unknown tool"),
]


@pytest.mark.parametrize(("turns", "options"), ENDS)
async def test_a_transcript_is_valid_and_nothing_is_left_however_a_run_ends(turns: Any, options: Any) -> None:
    # TEST-06, TEST-08
    heard: list[Any] = []
    agent: Any = create_agent(provider=mock_model(turns), tools=[plain("look")], on_event=heard.append, **options)
    session = agent.session()
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    with contextlib.suppress(LoushoError, CompactedLLMProviderError):
        await session.send("Go")
    assert asyncio.all_tasks() == tasks
    assert {thread for thread in threading.enumerate() if not thread.daemon} <= threads
    assert heard[-1].type == "run.done"
    told = len(heard)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(heard) == told
    check_transcript(await session.load())


async def test_an_aborted_run_leaves_a_valid_transcript_and_nothing_behind() -> None:
    # TEST-06, TEST-08
    gate = Gate("slow")
    agent = create_agent(provider=mock_model([calls("look", "slow", "look")]), tools=[plain("look"), gate.tool], tool_concurrency=3)
    session = agent.session()
    tasks = asyncio.all_tasks()
    handle = session.stream("Go")
    await gate.running.wait()
    handle.abort()
    assert (await handle.result).finish_reason == "aborted"
    await until(lambda: asyncio.all_tasks() == tasks)
    check_transcript(await session.load())


async def test_one_still_clock_stands_behind_all_that_waits() -> None:
    # TEST-04
    clock = FakeClock()
    limited = with_rate_limit(
        mock_model(["a", "b"], clock=clock), create_rate_limiter({"requests_per_minute": 1}, clock=clock), clock=clock
    )
    retried = with_retry(mock_model([ConnectionError("down"), "c"]), backoff={"initial_ms": 1_000}, jitter=False, clock=clock)
    ask = GenerateOptions(messages=(user("x"),))
    await limited.generate(ask)
    waiting = [asyncio.create_task(provider.generate(ask)) for provider in (limited, retried)]
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await clock.run_for(1_000)
    assert (await waiting[1]).text == "c"
    assert not waiting[0].done()
    await clock.run_for(60_000)
    assert (await waiting[0]).text == "b"
    date, _ = create_date_tools(clock)
    assert await call_tool(date, date.parse_plain({}).value, make_tool_context()) == "2026-01-01T00:01:01Z"


async def test_a_workspace_in_memory_shows_its_files_and_the_commands() -> None:
    # TEST-03
    workspace = MemoryWorkspace({"a.txt": "one"}, exec=lambda command: ShellOutput(0, f"ran {command}"))
    before = workspace.files
    workspace.write("b.txt", b"two")
    shell = create_shell_tool(workspace)
    await call_tool(shell, shell.parse_plain({"command": "make"}).value, make_tool_context())
    assert workspace.commands == ["make"]
    assert (before, workspace.files) == ({"a.txt": b"one"}, {"a.txt": b"one", "b.txt": b"two"})
