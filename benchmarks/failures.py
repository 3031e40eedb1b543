"""How long it takes until work goes on after a `kill -9` of an actor, or the loss of a node, and what the caller saw meanwhile.

    python benchmarks/failures.py                      # processes
    python benchmarks/failures.py --nodes              # nodes, on a cluster of three that runs on this machine
    python benchmarks/failures.py --only store,worker

A row is one kill. "At rest" means that nothing was going on: the time is that of the next call. "Mid-call" means that calls were
under way: the time is that until they had all ended, less what they take undisturbed. With `--nodes` the head looks at its nodes
three times, a second apart, before it gives one up; by default Ray takes 15 s and more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from lousho_ray import (
    Agent,
    GenerateResult,
    LoushoError,
    MockProvider,
    SqliteStore,
    ToolCall,
    create_agent,
    create_rate_limiter,
    tool,
)
from lousho_ray.actors.cluster import NAMESPACE
from lousho_ray.messages import user

T = TypeVar("T")

MID_CALL_S = 1.5
"""How long the calls that are interrupted take."""

LONGEST_S = 120.0


@dataclass(frozen=True)
class Row:
    """One kill: what died, when, what the caller saw, and the seconds until work went on."""

    what: str
    when: str
    saw: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.what:<28}{self.when:<12}{self.seconds:>8.1f}  {self.saw}"


# ------------------------------------------------------------------------------------------------------------------ actors


def actors(prefix: str) -> list[Any]:
    """The living actors of this cluster whose name begins so."""
    entries = ray.util.list_named_actors(all_namespaces=True)
    names = sorted(entry["name"] for entry in entries if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix))
    return [ray.get_actor(name, NAMESPACE) for name in names]


async def kill(handles: Iterable[Any]) -> None:
    """Ends the processes of actors as the kernel does when memory runs out."""
    pids = await asyncio.gather(*[handle.__ray_call__.remote(lambda _: os.getpid()) for handle in handles])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def timed(call: Awaitable[T]) -> tuple[float, T | LoushoError]:
    """How long a call took, and its result or its error."""
    began = time.perf_counter()
    try:
        result: T | LoushoError = await asyncio.wait_for(call, LONGEST_S)
    except LoushoError as error:
        result = error
    return time.perf_counter() - began, result


async def until_it_works(call: Callable[[], Awaitable[Any]]) -> float:
    """Seconds until a call succeeds that is made again after each error."""

    async def works() -> bool:
        return not isinstance((await timed(call()))[1], LoushoError)

    return await eventually(works)


async def eventually(check: Callable[[], Awaitable[bool]]) -> float:
    """Seconds until something is so."""
    began = time.perf_counter()
    while not await check():  # noqa: ASYNC110 - it is so in another process
        await asyncio.sleep(0.02)
    return time.perf_counter() - began


def seen(results: Iterable[Any]) -> str:
    """What the caller got, in words."""
    errors = [result.code for result in results if isinstance(result, LoushoError)]
    return f"{len(errors)} x {errors[0]}" if errors else "a delay"


# ------------------------------------------------------------------------------------------------------------------ agents


def echo(request: Any) -> str:
    return f"heard {request.messages[-1].text}"


def sleeper(seconds: float) -> MockProvider:
    return MockProvider(policy=echo, delay_ms=seconds * 1000)


def lead_of(seconds: float, children: int = 4) -> Agent[Any]:
    def policy(request: Any) -> GenerateResult | str:
        if request.messages[-1].role == "tool":
            return "done"
        calls = [ToolCall(f"t{n}", "task", f'{{"agent": "child", "prompt": "p{n}", "description": "d"}}') for n in range(children)]
        return GenerateResult(tool_calls=tuple(calls), finish_reason="tool_calls")

    child = create_agent(provider=sleeper(seconds), description="Answers.")
    return create_agent(provider=MockProvider(policy=policy), subagents={"child": child}, limits={"max_tokens": 1_000_000})


def failed_children(result: Any) -> str:
    if isinstance(result, LoushoError):
        return result.code
    failed = sum(message.is_error for message in result.messages if message.role == "tool")
    return f"{failed} failed task calls" if failed else "a delay"


# --------------------------------------------------------------------------------------------------------------- processes


async def session(folder: Path) -> AsyncIterator[Row]:
    prefix = "lousho-sessions-"
    for what, store in (("session, durable", SqliteStore(folder / "sessions.db")), ("session, in memory", None)):
        quick, slow = (create_agent(provider=sleeper(s), store=store) for s in (0.0, MID_CALL_S))
        await quick.session("s").send("Hi.")
        await asyncio.sleep(2.5)  # An actor that answered a moment ago is taken to be there.
        await kill(actors(prefix))
        took, result = await timed(quick.session("s").send("Hi."))
        yield Row(what, "at rest", seen([result]), took)
        turns = [asyncio.create_task(slow.session(f"s{number}").send("Hi.")) for number in range(4)]
        await asyncio.sleep(MID_CALL_S / 2)
        await kill(actors(prefix))
        took, _ = await timed(asyncio.wait(turns))
        outcomes = await asyncio.gather(*turns, return_exceptions=True)
        yield Row(what, "mid-call", seen(outcomes), took - (MID_CALL_S if store is not None else 0))


async def worker(folder: Path) -> AsyncIterator[Row]:
    quick, slow = lead_of(0.0), lead_of(MID_CALL_S)
    await quick.send("Go.")
    await asyncio.sleep(2.5)  # One that answered a moment ago is taken to be there.
    await kill(actors("lousho-worker-"))
    took, result = await timed(quick.send("Go."))
    yield Row("worker", "at rest", failed_children(result), took)
    running = asyncio.create_task(slow.send("Go."))
    await asyncio.sleep(MID_CALL_S / 2)
    await kill(actors("lousho-worker-")[:1])
    took, result = await timed(running)
    yield Row("worker, one of them", "mid-call", failed_children(result), took - MID_CALL_S / 2)
    yield Row("worker, one of them", "then", "works again", await until_it_works(lambda: none_failed(quick)))


async def none_failed(lead: Agent[Any]) -> None:
    if failed_children(await lead.send("Go.")) != "a delay":
        raise LoushoError("not yet", code="LOUSHO_AGENT_EXECUTION_FAILED")


async def store(folder: Path) -> AsyncIterator[Row]:
    kept = SqliteStore(folder / "store.db")
    agent = create_agent(provider=sleeper(0.0), store=kept)
    await agent.session("s").send("Hi.")
    await kill(actors("lousho-store-"))
    took, result = await timed(agent.session("s").send("Hi."))
    yield Row("store", "at rest", seen([result]), took)
    remote = await agent.runtime().reach(kept)
    saves = [asyncio.create_task(remote.sessions.save(f"k{number}", [user("x")])) for number in range(1_000)]
    await asyncio.sleep(0.01)
    await kill(actors("lousho-store-"))
    took, _ = await timed(asyncio.wait(saves))
    yield Row("store, 1,000 saves", "mid-call", seen(await asyncio.gather(*saves, return_exceptions=True)), took)


async def limiter(folder: Path) -> AsyncIterator[Row]:
    shared = create_rate_limiter({"max_concurrent": 4}, name="failures")
    agent = create_agent(provider=sleeper(0.0), rate_limit=shared, description="Answers.")
    await agent.session("s").send("Hi.")
    await kill(actors("lousho-limiters"))
    took, result = await timed(agent.session("s").send("Hi."))
    yield Row("limiter", "at rest", seen([result]), took)
    slow = create_agent(provider=sleeper(MID_CALL_S), rate_limit=shared)
    turns = [asyncio.create_task(slow.send("Hi.")) for _ in range(8)]
    await asyncio.sleep(MID_CALL_S / 2)
    await kill(actors("lousho-limiters"))
    took, _ = await timed(asyncio.wait(turns))
    yield Row(
        "limiter, 4 run and 4 wait", "mid-call", seen(await asyncio.gather(*turns, return_exceptions=True)), took - MID_CALL_S * 1.5
    )


async def budget(folder: Path) -> AsyncIterator[Row]:
    quick, slow = lead_of(0.0), lead_of(MID_CALL_S)
    await quick.send("Go.")
    await kill(actors("lousho-budget-"))
    took, result = await timed(quick.send("Go."))
    yield Row("budget", "at rest", failed_children(result), took)
    running = asyncio.create_task(slow.send("Go."))
    await asyncio.sleep(MID_CALL_S / 2)
    await kill(actors("lousho-budget-"))
    took, result = await timed(running)
    yield Row("budget", "mid-call", failed_children(result), took - MID_CALL_S / 2)


@tool(ray_options={"num_cpus": 0})
def long_task(mark: str) -> int:
    """Takes its time, once it has written down in which process it runs.

    Args:
        mark: The file to write it to.
    """
    Path(mark).write_text(str(os.getpid()))
    time.sleep(30)
    return 0


async def tool_task(folder: Path) -> AsyncIterator[Row]:
    mark = folder / "task"

    def policy(request: Any) -> GenerateResult | str:
        if request.messages[-1].role == "tool":
            return "failed" if request.messages[-1].is_error else "done"
        call = ToolCall("c", "long_task", json.dumps({"mark": str(mark)}))
        return GenerateResult(tool_calls=(call,), finish_reason="tool_calls")

    def pid() -> int:
        return int((mark.read_text() if mark.exists() else "") or 0)

    async def started() -> bool:
        return pid() > 0

    running = asyncio.create_task(create_agent(provider=MockProvider(policy=policy), tools=[long_task]).send("Go."))
    await eventually(started)
    os.kill(pid(), signal.SIGKILL)
    took, result = await timed(running)
    assert not isinstance(result, LoushoError)
    yield Row("tool with ray_options", "mid-call", f"a {result.text} tool call", took)


# ------------------------------------------------------------------------------------------------------------------- nodes


async def nodes(folder: Path) -> AsyncIterator[Row]:
    """Losses of a node with everything that is not bound to the driver's."""
    from ray.cluster_utils import Cluster

    checks = {"health_check_period_ms": 1_000, "health_check_timeout_ms": 1_000, "health_check_failure_threshold": 3}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": checks}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    others = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        agent = create_agent(provider=sleeper(MID_CALL_S), store=SqliteStore(folder / "nodes.db"))
        turns = [asyncio.create_task(agent.session(f"s{number}").send("Hi.")) for number in range(12)]
        fan_out = asyncio.create_task(lead_of(MID_CALL_S, 9).send("Go."))
        await asyncio.sleep(8)  # all processes are there
        await asyncio.wait([*turns, fan_out])
        turns = [asyncio.create_task(agent.session(f"s{number}").send("Hi.")) for number in range(12)]
        fan_out = asyncio.create_task(lead_of(MID_CALL_S, 9).send("Go."))
        await asyncio.sleep(MID_CALL_S / 2)
        # In the background: it waits until the processes of the node have ended.
        removal = asyncio.create_task(asyncio.to_thread(cluster.remove_node, others[0], False))
        took, result = await timed(fan_out)
        yield Row("node with workers", "mid-call", failed_children(result), took - MID_CALL_S / 2)
        left, _ = await timed(asyncio.wait(turns))
        outcomes = await asyncio.gather(*turns, return_exceptions=True)
        yield Row("node with durable sessions", "mid-call", seen(outcomes), took + left - MID_CALL_S / 2)
        await removal
    finally:
        ray.shutdown()
        cluster.shutdown()


Scenario = Callable[[Path], AsyncIterator[Row]]
SCENARIOS: dict[str, Scenario] = {function.__name__: function for function in (session, worker, store, limiter, budget, tool_task)}


async def run(scenarios: Iterable[Scenario]) -> None:
    print(f"{'killed':<28}{'when':<12}{'s':>8}  what the caller saw")
    with tempfile.TemporaryDirectory() as folder:
        for scenario in scenarios:
            async for row in scenario(Path(folder)):
                print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", action="store_true", help="lose nodes instead of processes")
    parser.add_argument("--only", default=",".join(SCENARIOS), help=f"of {', '.join(SCENARIOS)}")
    options = parser.parse_args()
    if options.nodes:
        asyncio.run(run([nodes]))
        return
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        asyncio.run(run([SCENARIOS[name] for name in options.only.split(",")]))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
