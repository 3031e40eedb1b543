"""Sub-agents on worker actors: one limiter and one budget for all, killed and hung workers, tools that exit, aborts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from typing import Any

import pytest

from lousho_ray import (
    AgentExecutionError,
    CancelToken,
    CompactedLLMProviderError,
    MockProvider,
    OpenAICompatibleProvider,
    RateLimitError,
    create_agent,
    create_rate_limiter,
    tool,
)
from lousho_ray.actors import liveness, worker_pool
from lousho_ray.actors.worker import POLL_S
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply, gate, status
from tests.ray.processes import (
    alive,
    eventually,
    fan_out,
    kill_process,
    lead_of,
    no_child_runs,
    pid_of,
    prompt_of,
    session_actors,
    task_results,
    tool_texts,
    workers,
)

STOPS_WITHIN_S = 2.0
"""How long the end of a run may take to reach every child."""

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
async def server() -> Any:
    async with FakeServer(timeout_s=30) as server:
        server.respond(Reply("done", usage=(100, 20)))
        yield server
    assert server.violations == []


async def test_a_hundred_children_on_all_workers_share_one_limiter(server: FakeServer, fresh_name: str) -> None:
    # SUB-14, SUB-38, RL-32
    running = 0

    async def reply(request: RecordedRequest) -> Reply:
        nonlocal running
        running += 1
        await asyncio.sleep(0.002)
        running -= 1
        if not tool_texts(request):
            return Reply(tool_calls=[("where", {})], usage=(10, 1))
        return Reply(tool_texts(request)[0], usage=(10, 1))

    server.respond(reply)
    limiter = create_rate_limiter({"max_concurrent": 4}, fresh_name)
    result = await lead_of(server, 100, rate_limit=limiter).send("Go.")
    assert result.ok
    assert len(server.requests) == 200
    assert server.max_concurrent == 4, "the limit is used, and never passed"
    pids = Counter(answer(message.text) for message in task_results(result.messages).values())
    assert {int(pid) for pid in pids} == {await pid_of(worker) for worker in workers()}
    assert sorted(pids.values()) == [50, 50], "children are spread evenly"
    assert (await limiter.stats()).requests_in_window == 202


async def test_a_budget_is_overshot_by_at_most_one_call_a_running_child(server: FakeServer) -> None:
    # SUB-33, SUB-34, SUB-35, BUD-31
    server.respond(lambda request: Reply(tool_calls=[("where", {})], usage=(100, 0)))
    children, calls = 8, 20
    lead = lead_of(server, children, limits={"max_tokens": calls * 100, "max_steps": 3}, child={"max_steps": 50})
    result = await lead.send("Go.")
    assert result.finish_reason == "budget-exceeded"
    assert result.budget is not None
    assert result.budget.limit == "maxTokens"
    assert len(server.requests) <= calls + children
    assert calls * 100 <= result.budget.value <= (calls + children) * 100
    texts = [message.text for message in task_results(result.messages).values()]
    assert all("stopped at the maxTokens limit" in text for text in texts)
    assert result.usage.delegated is not None
    assert result.usage.delegated.input_tokens == len(server.requests) * 100


async def where_then_gate(request: RecordedRequest) -> Any:
    """Children say where they run and then wait."""
    if not tool_texts(request):
        return Reply(tool_calls=[("where", {})])
    return [gate("go"), Reply(tool_texts(request)[0])]


async def test_a_killed_worker_loses_its_children_and_nothing_else(server: FakeServer) -> None:
    # SUB-46, R: a lost worker is a failed task, never a silent second run
    server.respond(where_then_gate)
    children = 6
    lead = lead_of(server, children)
    running = asyncio.create_task(lead.send("Go."))
    await server.reached("go", children)
    killed = await kill_process(workers()[0])
    place = {prompt_of(request): int(tool_texts(request)[0]) for request in server.requests if tool_texts(request)}

    async def lost_children_are_noticed() -> bool:
        return (await workers()[0].running.remote()) == 0 if await alive(workers()[0]) else False

    await eventually(lost_children_are_noticed, 30)
    server.release("go")
    result = await asyncio.wait_for(running, 30)
    assert result.ok, "the lead goes on"
    lost = {f"t{number}" for number in range(children) if place[f"task {number}"] == killed}
    assert len(lost) == children // 2
    results = task_results(result.messages)
    assert {call_id for call_id, message in results.items() if message.is_error} == lost
    assert all("was lost" in results[call_id].text for call_id in lost)
    assert len(server.requests) == 2 * children, "no child was run a second time"

    async def used_again() -> bool:
        results = task_results((await lead.send("Go.")).messages).values()
        assert not any(message.is_error for message in results)
        return len({answer(message.text) for message in results}) == 2

    await eventually(used_again)


async def test_workers_that_are_killed_at_rest_cost_a_delay_and_nothing_else(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SUB-46: a sub-agent is sent to a worker that is known to be there
    monkeypatch.setattr(worker_pool, "KNOWN_TO_LIVE_S", 0.0)
    lead = lead_of(server, 4)
    await lead.send("Go.")
    for worker in workers():
        await kill_process(worker)
    result = await lead.send("Go.")
    assert not any(message.is_error for message in task_results(result.messages).values())
    assert len(server.requests) == 8


def answer(text: str) -> str:
    """What a child answered, without the footer of its `task` call."""
    return str(json.loads(text)).split("\n\n[sub-agent")[0]


async def test_what_a_killed_workers_child_had_set_aside_is_free_for_the_others(server: FakeServer) -> None:
    # BUD-21, BUD-33
    server.respond(where_then_gate)
    limits = {"max_output_tokens": 5000, "reserve": True}
    running = asyncio.create_task(lead_of(server, 2, limits=limits, child={"model_settings": {"max_tokens": 3000}}).send("Go."))
    await server.reached("go", 1)
    first = next(request for request in server.requests if tool_texts(request))
    os.kill(int(tool_texts(first)[0]), signal.SIGKILL)
    await server.reached("go", 2)
    server.release("go")
    result = await asyncio.wait_for(running, 30)
    failed = [message.is_error for message in task_results(result.messages).values()]
    assert sorted(failed) == [False, True]
    assert result.ok

    async def all_alive() -> bool:
        return all([await alive(worker) for worker in workers()])

    await eventually(all_alive, 30)


async def test_a_tool_that_exits_fails_its_call_and_nothing_else(server: FakeServer) -> None:
    # Q10: SystemExit let out of a task ends the event loop of its process
    server.respond(gated_exit)
    lead = lead_of(server, 4, tools=[leave])
    pids = [await pid_of(worker) for worker in workers()]
    result = await asyncio.wait_for(lead.send("Go."), 30)
    assert result.ok
    texts = [answer(message.text) for message in task_results(result.messages).values()]
    assert all("SystemExit" in text for text in texts), texts
    assert [await pid_of(worker) for worker in workers()] == pids


@tool
async def leave(how: str) -> str:
    """Leaves.

    Args:
        how: The way.
    """
    if how == "exit":
        raise SystemExit(3)
    raise KeyboardInterrupt


def gated_exit(request: RecordedRequest) -> Reply:
    texts = tool_texts(request)
    return Reply(" ".join(texts)) if texts else Reply(tool_calls=[("leave", {"how": "exit"}), ("leave", {"how": "interrupt"})])


class Leaver:
    """A hook that leaves the process."""

    name = "leaver"

    async def pre_generate(self, context: Any) -> None:
        raise SystemExit(4)


async def test_a_hook_that_exits_fails_its_run_and_no_other_of_its_actor(server: FakeServer) -> None:
    # Q10
    model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
    server.on("chat", gate("go"), Reply("late"))
    neighbours = [create_agent(provider=model, runtime="ray").session() for _ in range(4)]
    first = asyncio.create_task(neighbours[0].send("Wait."))
    await server.reached("go")
    await asyncio.gather(*[neighbour.send("Hi.") for neighbour in neighbours[1:]])
    pids = [await pid_of(actor) for actor in session_actors()]
    for _ in range(2):
        with pytest.raises(AgentExecutionError, match="SystemExit"):
            await create_agent(provider=model, hooks=[Leaver()], runtime="ray").session().send("Go.")
    child = create_agent(provider=model, hooks=[Leaver()], description="Leaves.", runtime="ray")
    lead = create_agent(provider=MockProvider(policy=fan_out(2)), subagents={"child": child}, runtime="ray")
    with pytest.raises(AgentExecutionError, match="SystemExit"):
        await lead.send("Go.")
    server.release("go")
    assert (await first).text == "late"
    assert [await pid_of(actor) for actor in session_actors()] == pids


@pytest.mark.parametrize(("code", "kind"), [(429, RateLimitError), (401, CompactedLLMProviderError)])
async def test_a_provider_error_is_the_same_object_across_processes(server: FakeServer, code: int, kind: type[Exception]) -> None:
    # ERR-08, ERR-D4, Q01
    def refuse(request: RecordedRequest) -> Any:
        return [status(code, {"retry-after": "7"}, {"error": {"message": "no", "type": "t", "code": "c"}})]

    server.respond(refuse)
    raised = []
    for runtime in ("local", "ray"):
        model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
        with pytest.raises(kind) as caught:
            await create_agent(provider=model, retry=False, runtime=runtime).session().send("Go.")
        raised.append(caught.value)
    local, remote = raised
    assert type(remote) is type(local)
    assert (remote.code, remote.args, str(remote)) == (local.code, local.args, str(local))
    assert remote.status == code
    assert remote.compacted == local.compacted
    assert getattr(remote, "retry_after", None) == getattr(local, "retry_after", None)
    assert remote.__cause__ is not None
    assert remote.__cause__ is not remote

    result = await lead_of(server, 2).send("Go.")
    texts = [message.text for message in task_results(result.messages).values()]
    assert all(local.code in text or local.detail[:20] in text for text in texts), texts


@pytest.mark.parametrize("how", ["task cancelled", "token", "stream left", "handle aborted"])
async def test_ending_a_run_ends_every_child(server: FakeServer, how: str) -> None:
    # SUB-29, RUN: abort reaches the children and their model calls
    children = 6
    server.respond(lambda request: [gate("never"), Reply("late")])
    lead = lead_of(server, children)
    token = CancelToken()
    began = 0.0
    if how in ("task cancelled", "token"):
        running = asyncio.create_task(lead.send("Go.", cancel=token))
        await server.reached("never", children)
        began = time.monotonic()
        if how == "token":
            token.cancel()
            assert (await running).finish_reason == "aborted"
        else:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    else:
        async with lead.stream("Go.") as run:
            async for event in run:
                if event.type == "tool.start" and event.tool_call_id == f"t{children - 1}":
                    await server.reached("never", children)
                    began = time.monotonic()
                    if how == "stream left":
                        break
                    run.abort("Enough.")
        assert (await run.result).finish_reason == "aborted"
    ended = time.monotonic() - began
    await server.wait_idle()
    assert await no_child_runs()
    assert all(request.client_closed for request in server.requests)
    assert len(server.requests) == children
    assert ended < STOPS_WITHIN_S


async def test_children_that_are_not_started_yet_never_call_the_model(server: FakeServer) -> None:
    # SUB-29: an abort that overtakes the hand-over
    lead = lead_of(server, 40)
    for delay in (0.0, 0.002, 0.004, 0.006, 0.01):
        running = asyncio.create_task(lead.send("Go."))
        await asyncio.sleep(delay)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        calls = len(server.requests)
        assert await no_child_runs()
        await server.wait_idle()
        assert len(server.requests) == calls


async def test_a_hung_worker_does_not_hang_the_lead(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # R: every remote wait has a bound
    monkeypatch.setattr(worker_pool, "POLL_TIMEOUT_S", POLL_S + 2)
    monkeypatch.setattr(liveness, "CONTROL_ANSWERS_IN_S", 3.0)
    server.respond(where_then_gate)
    children = 4
    lead = lead_of(server, children)
    running = asyncio.create_task(lead.send("Go."))
    await server.reached("go", children)
    hung = await pid_of(workers()[0])
    place = {prompt_of(request): int(tool_texts(request)[0]) for request in server.requests if tool_texts(request)}
    os.kill(hung, signal.SIGSTOP)
    server.release("go")
    result = await asyncio.wait_for(running, 50)
    assert result.ok
    results = task_results(result.messages)
    lost = {f"t{number}" for number in range(children) if place[f"task {number}"] == hung}
    assert {call_id for call_id, message in results.items() if message.is_error} == lost
    assert all("did not answer within" in results[call_id].text for call_id in lost)
    again = await asyncio.wait_for(lead.send("Go."), 30)
    assert not any(message.is_error for message in task_results(again.messages).values()), "others do the work meanwhile"

    async def started_again() -> bool:
        return await alive(workers()[0])

    await eventually(started_again, 30)
    assert await pid_of(workers()[0]) != hung
    await eventually(no_child_runs)


async def test_a_client_that_is_silent_for_long_starts_anew(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker forgets it, and with it the place up to which its reports were read.
    server.respond(where_then_gate)
    server.release("go")
    lead = lead_of(server, 4)
    assert (await lead.send("Go.")).ok
    for worker in workers():
        await worker.__ray_call__.remote(_forget_clients)
    result = await asyncio.wait_for(lead.send("Go."), 20)
    assert not any(message.is_error for message in task_results(result.messages).values())


def _forget_clients(worker: Any) -> None:
    for client in list(worker._clients.values()):
        client._seen = float("-inf")
        client._check()
