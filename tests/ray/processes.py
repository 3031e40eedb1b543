"""What the tests of this folder share: the actors of this job, their processes, and a lead whose sub-agents call a fake server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import psutil
import ray

from lousho_ray import Agent, GenerateResult, MockProvider, OpenAICompatibleProvider, ToolCall, create_agent, tool
from lousho_ray.actors.cluster import NAMESPACE, cpu_places, job_id
from lousho_ray.events import Event
from lousho_ray.messages import Message
from lousho_ray.ports import GenerateOptions
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest

SOON_S = 10.0
"""How long what happens at once may take on a machine that is busy."""


def workers() -> list[Any]:
    """The worker actors of this job."""
    return [ray.get_actor(f"lousho-worker-{job_id()}-{place.name}", NAMESPACE) for place in cpu_places()]


def session_actors() -> list[Any]:
    """The session actors of this job that have been started."""
    found = []
    for index in range(len(cpu_places())):
        try:
            found.append(ray.get_actor(f"lousho-sessions-{job_id()}-{index}", NAMESPACE))
        except ValueError:
            continue
    return found


async def pid_of(actor: Any) -> int:
    return int(await actor.__ray_call__.remote(lambda _: __import__("os").getpid()))


async def alive(actor: Any) -> bool:
    """Whether an actor answers soon."""
    try:
        await asyncio.wait_for(pid_of(actor), 5)
    except Exception:
        return False
    return True


async def kill_process(actor: Any) -> int:
    """Kills the process of an actor, as the kernel does when memory runs out. Returns its id."""
    pid = await pid_of(actor)
    os.kill(pid, signal.SIGKILL)
    return pid


async def eventually(check: Callable[[], Awaitable[bool]], timeout_s: float = SOON_S) -> float:
    """Waits for what another process does in its own time; returns the seconds it took."""
    began = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not await check():
            await asyncio.sleep(0.02)
    return time.monotonic() - began


async def no_child_runs() -> bool:
    return sum(await asyncio.gather(*[worker.running.remote() for worker in workers()])) == 0


def gone(pids: Iterable[int], timeout_s: float = SOON_S) -> list[int]:
    """Those of the processes that are still there after the time given for their end."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process.pid for process in psutil.wait_procs(processes, timeout=timeout_s)[1]]


# ------------------------------------------------------------------------------------------------------------- a fan-out


@tool
def where() -> int:
    """Says in which process it runs."""
    return os.getpid()


def fan_out(children: int) -> Callable[[GenerateOptions], GenerateResult | str]:
    """The policy of a lead that gives `children` tasks to `child` in one turn and then says `done`."""

    def decide(request: GenerateOptions) -> GenerateResult | str:
        if any(message.role == "tool" for message in request.messages):
            return "done"
        return GenerateResult(tool_calls=tuple(task(number) for number in range(children)), finish_reason="tool_calls")

    return decide


def task(number: int) -> ToolCall:
    arguments = {"agent": "child", "prompt": f"task {number}", "description": f"Task {number}"}
    return ToolCall(f"t{number}", "task", json.dumps(arguments))


def lead_of(
    server: FakeServer, children: int, *, tools: Iterable[Any] = (where,), child: Mapping[str, Any] | None = None, **lead: Any
) -> Agent[Any]:
    """A lead with `children` sub-agents, whose model is the fake server."""
    options: dict[str, Any] = {"tools": list(tools), "retry": False, **(child or {})}
    options.setdefault("provider", OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake"))
    agent = create_agent(description="Does a task.", runtime="ray", **options)
    return create_agent(provider=MockProvider(policy=fan_out(children)), subagents={"child": agent}, runtime="ray", **lead)


def prompt_of(request: RecordedRequest) -> str:
    return str(next(message["content"] for message in request.body["messages"] if message["role"] == "user"))


def tool_texts(request: RecordedRequest) -> list[str]:
    """What the tools of a request's run have returned so far."""
    return [str(message["content"]) for message in request.body["messages"] if message["role"] == "tool"]


def task_results(messages: Iterable[Message]) -> dict[str, Message]:
    """The lead's results of its `task` calls, by call id."""
    return {message.tool_call_id or "": message for message in messages if message.role == "tool"}


# ---------------------------------------------------------------------------------------------------------------- events


def by_agent(events: Iterable[Event]) -> dict[str, list[dict[str, Any]]]:
    """The events of each agent of a run in their order, without what differs from run to run.

    Calls of one turn run side by side and end in any order: their events are put in the order of their ids.
    """
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        who = "lead" if event.subagent is None else event.subagent.tool_call_id
        found[who].append({key: value for key, value in event.to_dict().items() if key not in _VARYING})
    return {who: _calls_in_order(own) for who, own in found.items()}


def _calls_in_order(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered: list[dict[str, Any]] = []
    for of_calls, group in itertools.groupby(events, lambda event: event["type"].startswith("tool.")):
        ordered += sorted(group, key=lambda event: event["toolCallId"] if of_calls else "")
    return ordered


_VARYING = frozenset({"runId", "seq", "timestamp", "durationMs", "elapsedMs"})
