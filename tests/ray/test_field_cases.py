"""What goes wrong on Ray in the field: named actors, blocked event loops, generators as results, drivers that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import GenerateResult, MockProvider, OpenAICompatibleProvider, SqliteStore, ToolCall, create_agent, tool
from lousho_ray.actors import cluster
from lousho_ray.actors.cluster import NAMESPACE, named_actor
from lousho_ray.testing.fake_server import FakeServer, Reply, gate
from tests.ray.processes import session_actors

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Named:
    """An actor that says in which process it runs."""

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
def pid_of_named(name: str) -> int:
    """Another process of the job, that asks for the same name."""
    actor = named_actor(Named, name, options={"lifetime": "detached"}, fresh=True)
    return int(ray.get(actor.pid.remote(), timeout=60))


async def test_of_many_that_ask_for_a_name_at_once_one_makes_the_actor(fresh_name: str) -> None:
    # Q02
    pids = await asyncio.gather(*[pid_of_named.remote(fresh_name) for _ in range(4)])
    assert len(set(pids)) == 1
    killed = ray.get_actor(fresh_name, NAMESPACE)
    ray.kill(killed)
    with suppress(ray.exceptions.RayActorError):  # until then the name may still lead to it
        while True:
            await killed.pid.remote()
    again = await pid_of_named.remote(fresh_name)
    assert again != pids[0], "one that is gone is made again"
    ray.kill(ray.get_actor(fresh_name, NAMESPACE))


@tool
def sleeps(seconds: float) -> str:
    """Blocks its thread.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "slept"


@tool
def counts() -> Any:
    """Gives an iterator."""
    return (number for number in range(5, 8))


def calls(name: str, arguments: str = "{}") -> MockProvider:
    def policy(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return request.messages[-1].text
        return GenerateResult(tool_calls=(ToolCall("c", name, arguments),), finish_reason="tool_calls")

    return MockProvider(policy=policy)


async def test_a_sync_tool_does_not_block_the_other_sessions_of_its_actor() -> None:
    # Q05
    blocked = create_agent(provider=calls("sleeps", '{"seconds": 8}'), tools=[sleeps], runtime="ray").session()
    quick = [create_agent(provider=MockProvider(["hello"]), runtime="ray").session() for _ in range(4)]
    await asyncio.gather(*[session.send("Hi.") for session in quick])
    turn = asyncio.create_task(blocked.send("Go."))
    await asyncio.gather(*[session.send("Hi.") for session in quick])
    await asyncio.gather(*[actor.turns.remote() for actor in session_actors()])
    assert not turn.done(), "all others were answered while it slept"
    assert (await turn).text == '"slept"'


async def test_an_iterator_that_a_tool_returns_arrives_whole() -> None:
    # Q11
    assert (await create_agent(provider=calls("counts"), tools=[counts], runtime="ray").session().send("Go.")).text == "[5,6,7]"


@pytest.mark.parametrize("address", ["", "127.0.0.1:1"])
def test_joining_a_cluster_uploads_nothing_of_the_project(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    # Q08: secrets and large folders go along only where the user says so, with Ray's own `runtime_env`
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *args, **options: joined.append(options))
    monkeypatch.setattr(cluster, "_knock", lambda address: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    cluster.attach()
    assert joined[0].keys() <= {"address", "include_dashboard", "log_to_driver", "logging_level"}


# ------------------------------------------------------------------------------------------------------------------- drivers

DRIVER = """
import asyncio, sys
from lousho_ray import OpenAICompatibleProvider, SqliteStore, create_agent, tool

@tool
def note(path: str) -> str:
    "Notes that it ran."
    with open(path, "a") as file:
        file.write("once\\n")
    return "noted"

async def main(url, path):
    model = OpenAICompatibleProvider(base_url=url, default_model="fake")
    agent = create_agent(provider=model, tools=[note], retry=False, store=SqliteStore(path))
    await agent.session("talk").send("Go.")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(timeout_s=60) as server:
        yield server
    assert server.violations == []


async def test_a_new_driver_goes_on_with_the_turn_of_one_that_was_killed(server: FakeServer, tmp_path: Path) -> None:
    # DUR-33, DEC-R3, DEC-R6
    script, path, lines = tmp_path / "driver.py", tmp_path / "s.db", tmp_path / "lines"
    script.write_text(DRIVER)
    server.on("chat", Reply(tool_calls=[("note", {"path": str(lines)})]))
    server.on("chat", gate("never"), Reply("too late"))
    token = ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
    variables = {
        **os.environ,
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_AUTH_MODE": "token" if token else "disabled",
    }
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), server.compatible_url, str(path)),
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await server.reached("never")
    finally:
        driver.send_signal(signal.SIGKILL)
        await driver.wait()
    server.respond(Reply("done"))
    async with SqliteStore(path) as store:
        model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")

        @tool
        def note(path: str) -> str:
            """Notes that it ran."""
            raise AssertionError("its result was recorded")

        session = create_agent(provider=model, tools=[note], retry=False, store=store, runtime="ray").session("talk")
        result = await asyncio.wait_for(session.resume(), 60)
        assert result is not None
        assert result.text == "done"
        assert [message.role for message in await session.load()] == ["user", "assistant", "tool", "assistant"]
    assert lines.read_text() == "once\n"
    assert len(server.requests) == 3, "only the reply that was lost is asked for again"
