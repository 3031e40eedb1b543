"""Agents that travel: what is carried along, how often, and what cannot be."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import (
    Agent,
    ConfigurationError,
    GenerateResult,
    MockProvider,
    OpenAICompatibleProvider,
    ToolCall,
    create_agent,
    create_rate_limiter,
    tool,
    with_rate_limit,
)
from lousho_ray.testing.fake_server import FakeServer, Reply
from tests.ray.processes import eventually, fan_out, lead_of, task_results, tool_texts, workers
from tests.ray.test_runtime_attach import run_script

pytestmark = pytest.mark.usefixtures("ray_cluster")

_UNPACKED: dict[str, int] = {}


class Counted:
    """Something that counts, in each process, how often it was unpacked there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return unpack, (self.name,)


def unpack(name: str) -> Counted:
    _UNPACKED[name] = _UNPACKED.get(name, 0) + 1
    return Counted(name)


def calls_its_tool(request: Any) -> Any:
    if request.messages[-1].role == "tool":
        return "done"
    return GenerateResult(tool_calls=(ToolCall("c", request.tools[0].name, "{}"),), finish_reason="tool_calls")


def child_with(function: Any, **options: Any) -> Agent[Any]:
    """A lead whose one child calls `function` once."""
    policy = MockProvider(policy=calls_its_tool)
    child = create_agent(provider=policy, tools=[function], description="Calls its tool.", runtime="ray", **options)
    return create_agent(provider=MockProvider(policy=fan_out(1)), subagents={"child": child}, runtime="ray")


async def test_an_agent_is_unpacked_once_in_each_worker(fresh_name: str) -> None:
    counted = Counted(fresh_name)

    @tool
    def look() -> str:
        """Looks."""
        return counted.name

    child = create_agent(provider=MockProvider(policy=calls_its_tool), tools=[look], description="Looks.", runtime="ray")
    lead = create_agent(provider=MockProvider(policy=fan_out(20)), subagents={"child": child}, runtime="ray")
    for _ in range(3):
        result = await lead.send("Go.")
        assert not any(message.is_error for message in task_results(result.messages).values())
    counts = await asyncio.gather(*[worker.__ray_call__.remote(_times_unpacked, fresh_name) for worker in workers()])
    assert counts == [1] * len(workers())


def _times_unpacked(worker: Any, name: str) -> int:
    import tests.ray.test_shipping as module

    return module._UNPACKED.get(name, 0)


def lock_in_closure() -> Any:
    lock = threading.Lock()

    @tool
    def guarded() -> str:
        """Waits its turn."""
        with lock:
            return "done"

    return guarded


def connection_in_closure() -> Any:
    database = sqlite3.connect(":memory:")

    @tool
    def query() -> str:
        """Asks the database."""
        return str(database.execute("select 1").fetchone())

    return query


class Service:
    """An object whose method is a tool."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()

    @tool
    def serve(self) -> str:
        """Serves."""
        with self.mutex:
            return "done"


def lock_in_defaults() -> Any:
    gate = threading.Lock()

    async def inner() -> str:
        with gate:
            return "done"

    @tool
    async def nested() -> str:
        """Calls a function that holds a lock."""
        return await inner()

    return nested


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lock_in_closure, ("guarded", "'lock'", "lock")),
        (connection_in_closure, ("query", "'database'", "Connection")),
        (lambda: Service().serve, ("serve", "'mutex'", "lock")),
        (lock_in_defaults, ("nested", "'gate'", "lock")),
    ],
)
async def test_a_tool_that_cannot_travel_is_named_with_the_variable(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    # DEC-R5, Q04
    function = make()
    session = create_agent(provider=MockProvider(), tools=[function], runtime="ray").session()
    with pytest.raises(ConfigurationError) as raised:
        await session.send("Go.")
    assert raised.value.code == "LOUSHO_CONFIG_INVALID"
    assert raised.value.field == "tools"
    assert all(word in raised.value.detail for word in ("tools", *words)), raised.value.detail
    assert "runtime='local'" in raised.value.detail

    result = await child_with(function).send("Go.")
    (message,) = task_results(result.messages).values()
    assert message.is_error
    assert all(word in message.text for word in words), message.text


async def test_other_options_that_cannot_travel_are_named() -> None:
    # DEC-R5
    lock = threading.Lock()

    class Waits:
        name = "waits"

        def __init__(self) -> None:
            self.turnstile = threading.Lock()

        async def pre_generate(self, context: Any) -> None:
            with self.turnstile:
                return

    def instructions(context: Any) -> str:
        with lock:
            return "Be brief."

    def policy(request: Any) -> str:
        with lock:
            return "done"

    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"provider": MockProvider(), "hooks": [Waits()]}, "hooks", "'turnstile'"),
        ({"provider": MockProvider(), "instructions": instructions}, "instructions", "'lock'"),
        ({"provider": MockProvider(policy=policy)}, "provider", "'lock'"),
    ]
    for options, field, variable in cases:
        with pytest.raises(ConfigurationError) as raised:
            await create_agent(runtime="ray", **options).session().send("Go.")
        assert raised.value.field == field
        assert variable in raised.value.detail, raised.value.detail


async def test_a_listener_stays_with_the_caller() -> None:
    # DEC-R5
    lock, seen = threading.Lock(), []

    def listen(event: Any) -> None:
        with lock:
            seen.append(event.type)

    agent = create_agent(provider=MockProvider(), on_event=listen, runtime="ray")
    await agent.session().send("Go.")
    assert seen[0] == "run.start"
    assert seen[-1] == "run.done"


async def once_full(server: FakeServer, calls: int, full: asyncio.Event) -> None:
    """Holds the first calls until as many are in flight as the limiter allows; later ones pass."""
    if server.max_concurrent >= calls:
        full.set()
    await asyncio.wait_for(full.wait(), 20)


@pytest.mark.parametrize("where", ["lead", "provider", "both"])
async def test_a_limiter_without_a_name_is_shared_with_the_workers_and_not_copied(where: str) -> None:
    # RL-33
    full = asyncio.Event()

    async def reply(request: Any) -> Reply:
        await once_full(server, 2, full)
        return Reply(tool_texts(request)[0]) if tool_texts(request) else Reply(tool_calls=[("where", {})])

    async with FakeServer(timeout_s=30) as server:
        server.respond(reply)
        limiter = create_rate_limiter({"max_concurrent": 2})
        child: dict[str, Any] = {}
        if where != "lead":
            model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
            child["provider"] = with_rate_limit(model, limiter)
        lead = lead_of(server, 12, child=child, **({} if where == "provider" else {"rate_limit": limiter}))
        result = await asyncio.wait_for(lead.send("Go."), 30)
        assert not any(message.is_error for message in task_results(result.messages).values())
        assert len(server.requests) == 24
        assert server.max_concurrent == 2
        assert limiter.shared

        async def idle() -> bool:
            return (await limiter.stats()).running == 0

        await eventually(idle)  # a slot is given back, or its loan ends, soon after the last call
        assert server.violations == []


async def test_a_limiter_of_plain_limits_is_shared_too() -> None:
    # RL-33
    full = asyncio.Event()

    async def reply(request: Any) -> Reply:
        await once_full(server, 2, full)
        return Reply("done")

    async with FakeServer(timeout_s=30) as server:
        server.respond(reply)
        await lead_of(server, 12, rate_limit={"max_concurrent": 2}).send("Go.")
        assert server.max_concurrent == 2


KIT = """
from lousho_ray import tool

@tool
def where_from() -> str:
    "Says which file it is from."
    return __file__

class Notes:
    name = "notes"
    async def pre_generate(self, context):
        context.metadata["kit"] = __file__
"""

WITH_WORKING_DIR = """
import asyncio, logging, os, sys
from pathlib import Path
import ray
from lousho_ray import GenerateResult, MockProvider, ToolCall, create_agent
from tests.ray.processes import fan_out, task_results

folder = Path(__file__).parent / "project"
sys.path.insert(0, str(folder))
import kit

def policy(request):
    if request.messages[-1].role == "tool":
        return request.messages[-1].text
    return GenerateResult(tool_calls=(ToolCall("c", "where_from", "{}"),), finish_reason="tool_calls")

async def main():
    agent = create_agent(provider=MockProvider(policy=policy), tools=[kit.where_from], hooks=[kit.Notes()], description="Says.")
    print((await agent.session().send("Hi.")).text)
    lead = create_agent(provider=MockProvider(policy=fan_out(2)), subagents={"child": agent})
    for message in task_results((await lead.send("Go.")).messages).values():
        assert not message.is_error, message.text
        print(message.text)

env = {"working_dir": str(folder)}
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL, runtime_env=env)
(folder / "kit.py").unlink()  # only what was uploaded is left, as on another machine
asyncio.run(main())
ray.shutdown()
"""


@pytest.mark.timeout(120)
def test_modules_of_the_jobs_working_dir_are_found_in_every_actor(tmp_path: Path) -> None:
    # DEC-R5: tools and hooks of a module travel by name, and the module with the job
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "kit.py").write_text(KIT)
    done = run_script(tmp_path, WITH_WORKING_DIR, PYTHONPATH=str(Path(__file__).parents[2]), RAY_AUTH_MODE="disabled")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("working_dir_files" in line and "kit.py" in line for line in lines), lines
