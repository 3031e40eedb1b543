"""Joining a cluster: the driver's own, none at the address, one of a pipeline; from several threads and event loops; quietly."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import Agent, MockProvider, create_agent
from lousho_ray.actors.cluster import job_id
from tests.ray.processes import fan_out, task_results, where


def run_script(
    folder: Path, code: str, *options: str, timeout_s: float = 55, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs code as a plain script, every warning being an error."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**inherited, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def lead_with_child(children: int = 4) -> Agent[Any]:
    child = create_agent(provider=MockProvider(policy=asks_where), tools=[where], description="Says where it is.", runtime="ray")
    return create_agent(provider=MockProvider(policy=fan_out(children)), subagents={"child": child}, runtime="ray")


def asks_where(request: Any) -> Any:
    from lousho_ray import GenerateResult, ToolCall

    if request.messages[-1].role == "tool":
        return request.messages[-1].text
    return GenerateResult(tool_calls=(ToolCall("c", "where", "{}"),), finish_reason="tool_calls")


@pytest.mark.parametrize("what", ["lead.send_sync('Go.')", "lead.session().send_sync('Go.')"])
def test_an_address_without_a_cluster_is_a_clear_error_soon(tmp_path: Path, what: str) -> None:
    # DEC-R1, ERR-D4
    code = f"""
    import time
    from lousho_ray import ConfigurationError, MockProvider, create_agent, create_rate_limiter
    lead = create_agent(provider=MockProvider(), rate_limit=create_rate_limiter({{"max_concurrent": 1}}, "name"))
    began = time.monotonic()
    try:
        {what}
    except ConfigurationError as error:
        print(error.code, error.field, round(time.monotonic() - began, 1), error.detail)
    """
    done = run_script(tmp_path, code, RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    code_, field, seconds, detail = done.stdout.split(" ", 3)
    assert (code_, field) == ("LOUSHO_CONFIG_INVALID", "runtime")
    assert "RAY_ADDRESS=127.0.0.1:1" in detail
    assert "ray start --head" in detail
    assert float(seconds) < 15
    assert done.stderr == ""


@pytest.mark.usefixtures("ray_cluster")
async def test_in_a_driver_that_has_joined_a_cluster_nothing_is_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # DEC-R1
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("ray.init was called")

    monkeypatch.setattr(ray, "init", never)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    before = (job_id(), ray.get_runtime_context().namespace)
    result = await lead_with_child().send("Go.")
    assert not any(message.is_error for message in task_results(result.messages).values())
    assert (job_id(), ray.get_runtime_context().namespace) == before


@ray.remote(num_cpus=0)
def in_a_task(lead: Agent[Any]) -> tuple[str, list[str]]:
    result = lead.send_sync("Go.")
    session = lead.session("in-a-task")
    session.send_sync("Go.")
    return job_id(), [message.text for message in result.messages if message.role == "tool"]


@ray.remote(num_cpus=0)
class InAnActor:
    async def run(self, lead: Agent[Any]) -> list[str]:
        return [message.text for message in (await lead.send("Go.")).messages if message.role == "tool"]


@pytest.mark.usefixtures("ray_cluster")
async def test_an_agent_works_inside_tasks_and_actors_of_a_pipeline() -> None:
    # DEC-R1
    lead = lead_with_child()
    await lead.send("Go.")
    job, texts = await in_a_task.remote(lead)
    assert job == job_id()
    assert len(texts) == 4
    assert all(text.split('"')[1].split("\\n")[0].isdigit() for text in texts), texts
    actor = InAnActor.remote()
    assert len(await actor.run.remote(lead)) == 4
    ray.kill(actor)


@pytest.mark.usefixtures("ray_cluster")
async def test_an_agent_is_used_from_several_threads_and_event_loops_at_once() -> None:
    # DEC-R1, RL-D3
    lead = lead_with_child()
    session = create_agent(provider=MockProvider(policy=parrot), runtime="ray").session()
    results: list[Any] = []

    def in_thread() -> None:
        results.append(lead.send_sync("Go."))
        results.append(asyncio.run(lead.send("Go.")))
        session.send_sync("sync")

    threads = [threading.Thread(target=in_thread) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(3):
        results.append(await lead.send("Go."))
        await session.send(f"async {number}")
    while any(thread.is_alive() for thread in threads):
        await asyncio.sleep(0.05)
    assert len(results) == 7
    for result in results:
        assert not any(message.is_error for message in task_results(result.messages).values())
    said = [message.text for message in await session.load() if message.role == "user"]
    assert sorted(said) == ["async 0", "async 1", "async 2", "sync", "sync"]


def parrot(request: Any) -> str:
    return f"heard {request.messages[-1].text}"


PLAIN_SCRIPT = '''
"""What a user writes in one file: tools, hooks, policies and an output type of `__main__`; sub-agents and a session."""
import asyncio, json, os, sys
from dataclasses import dataclass
from pydantic import BaseModel
from lousho_ray import GenerateResult, MockProvider, ToolCall, create_agent, create_rate_limiter, tool

SEEN = []

class Verdict(BaseModel):
    score: int

@dataclass(frozen=True)
class Shop:
    name: str

    @tool
    def price(self, item: str) -> str:
        """Looks a price up.

        Args:
            item: What.
        """
        return f"{self.name} {item} {os.getpid()}"

class Marks:
    name = "marks"

    async def post_tool_call(self, context, outcome):
        SEEN.append(outcome)

def child_policy(request):
    results = [message.text for message in request.messages if message.role == "tool"]
    if results:
        return json.loads(results[0])
    return GenerateResult(tool_calls=(ToolCall("c", "price", json.dumps({"item": "tea"})),), finish_reason="tool_calls")

def lead_policy(request):
    results = [message for message in request.messages if message.role == "tool"]
    if results:
        return "; ".join(json.loads(message.text).split("\\n")[0] for message in results)
    tasks = [json.dumps({"agent": "child", "prompt": f"task {n}", "description": "A task"}) for n in range(4)]
    calls = tuple(ToolCall(f"t{n}", "task", arguments) for n, arguments in enumerate(tasks))
    return GenerateResult(tool_calls=calls, finish_reason="tool_calls")

async def main():
    tools = [Shop("corner").price]
    child = create_agent(provider=MockProvider(policy=child_policy), tools=tools, hooks=[Marks()], description="Asks.")
    lead = create_agent(
        provider=MockProvider(policy=lead_policy),
        subagents={"child": child},
        rate_limit=create_rate_limiter({"max_concurrent": 2}, name="plain-script"),
    )
    print((await lead.send("Go.")).text)
    judge = create_agent(provider=MockProvider(policy=lambda request: '{"score": 7}'), output=Verdict)
    verdict = (await judge.session().send("Judge.")).object
    print(type(verdict) is Verdict, verdict)
    async with lead.session().stream("Go.") as run:
        async for event in run:
            break
    print((await run.result).finish_reason)

if __name__ == "__main__":
    asyncio.run(main())
'''


@pytest.mark.timeout(150)
def test_a_plain_script_needs_no_care_and_makes_no_noise(tmp_path: Path) -> None:
    # DEC-R1, DEC-R5, SES-11
    done = run_script(tmp_path, PLAIN_SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    prices, verdict, left = done.stdout.splitlines()
    assert [price.split()[:2] for price in prices.split("; ")] == [["corner", "tea"]] * 4
    assert len({price.split()[2] for price in prices.split("; ")}) == min(4, os.cpu_count() or 1)
    assert verdict == "True score=7"
    assert left == "aborted"
