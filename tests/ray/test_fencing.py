"""Who was thought dead cannot write: a session actor that was frozen through a failover, and two clusters on one bucket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import LoushoError, OpenAICompatibleProvider, SqliteStore, create_agent
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply, gate
from tests.contract.s3_server import BUCKET, CREDENTIALS, S3Server, store_of
from tests.ray.processes import pid_of, session_actors

ROOT = Path(__file__).parents[2]

SHORT_LEASE_MS = 1_500.0


def shorten_leases(actor: Any, lease_ms: float) -> float:
    """Runs in a session actor: how long the leases of its turns last from now on; returns how long they did."""
    from lousho_ray import turn_lease

    before, turn_lease.LEASE_MS = turn_lease.LEASE_MS, lease_ms
    return before


@pytest.mark.usefixtures("ray_cluster")
async def test_a_session_actor_that_was_frozen_through_a_failover_cannot_write(tmp_path: Path) -> None:
    # DEC-R3, LES-62
    async with FakeServer(timeout_s=30) as server, SqliteStore(tmp_path / "s.db") as store:
        model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
        hosted = create_agent(provider=model, retry=False, store=store, runtime="ray").session("talk")
        here = create_agent(provider=model, retry=False, store=store, runtime="local").session("talk")
        server.respond(Reply("heard zero"))
        await hosted.send("zero")
        actors = session_actors()
        (usual_ms, *_) = await asyncio.gather(*[actor.__ray_call__.remote(shorten_leases, SHORT_LEASE_MS) for actor in actors])
        pids = [await pid_of(actor) for actor in actors]
        server.respond(FirstWaits())
        lost = asyncio.create_task(hosted.send("one"))
        await server.reached("frozen")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert (await asyncio.wait_for(here.send("two"), 30)).text == "heard two"
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        server.release("frozen")
        outcome = (await asyncio.gather(lost, return_exceptions=True))[0]
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, LoushoError), outcome
        else:
            assert outcome.finish_reason == "aborted", outcome
        await asyncio.gather(*[actor.__ray_call__.remote(shorten_leases, usual_ms) for actor in actors])
        texts = ["zero", "heard zero", "one", "heard one", "two", "heard two"]
        assert [message.text for message in await store.sessions.load("talk") or []] == texts
        assert (await hosted.send("three")).text == "heard three"
        assert [message.text for message in await here.load()] == [*texts, "three", "heard three"]


class FirstWaits:
    """The first reply to `one` waits for its gate; who goes on with that turn asks again, and is answered."""

    def __init__(self) -> None:
        self._asked = 0

    def __call__(self, request: RecordedRequest) -> Any:
        text = request.body["messages"][-1]["content"]
        self._asked += text == "one"
        if text == "one" and self._asked == 1:
            return [gate("frozen"), Reply("too late")]
        return Reply(f"heard {text}")


DRIVER = """
import asyncio, json, sys
from lousho_ray import GenerateResult, MockProvider, S3Store, ToolCall, create_agent, tool

name, endpoint, bucket, credentials, turns = sys.argv[1:]

@tool
async def look() -> str:
    "Looks."
    await asyncio.sleep(0.05)
    return name

def policy(request):
    if request.messages[-1].role == "tool":
        return f"done {name}"
    return GenerateResult(tool_calls=(ToolCall("c", "look", "{}"),), finish_reason="tool_calls")

async def main():
    store = S3Store(bucket, "app", endpoint=endpoint, region="us-east-1", credentials=json.loads(credentials))
    session = create_agent(provider=MockProvider(policy=policy), tools=[look], store=store).session("talk")
    await session.load()
    print("READY", flush=True)
    sys.stdin.readline()
    for number in range(int(turns)):
        assert (await session.send(f"{name} {number}")).ok

asyncio.run(main())
"""


@pytest.mark.timeout(170)
async def test_two_clusters_on_one_bucket_take_turns_and_never_mix_them(tmp_path: Path) -> None:
    # DEC-R3, LES-62
    turns = 4
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON", "LOUSHO_"))}
    variables |= {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    with S3Server() as server:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        drivers = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, str(script), name, server.endpoint, BUCKET, json.dumps(CREDENTIALS), str(turns)),
                env=variables,
                **pipes,
            )
            for name in ("left", "right")
        ]
        try:
            for driver in drivers:
                await ready(driver)
            ends = await asyncio.gather(*[asyncio.wait_for(driver.communicate(b"go\n"), 100) for driver in drivers])
            assert [driver.returncode for driver in drivers] == [0, 0], ends
        finally:
            for driver in drivers:
                if driver.returncode is None:
                    driver.kill()
                    await driver.wait()
        async with store_of(server) as store:
            texts = [message.text for message in await store.sessions.load("talk") or []]
    said = [texts[start : start + 4] for start in range(0, len(texts), 4)]
    assert sorted(turn[0] for turn in said) == [f"{name} {number}" for name in ("left", "right") for number in range(turns)]
    for begin, _, result, end in said:
        name = begin.split()[0]
        assert (result.strip('"'), end) == (name, f"done {name}"), "a turn is one piece"
    for name in ("left", "right"):
        own = [turn[0] for turn in said if turn[0].startswith(name)]
        assert own == sorted(own), "and comes in its driver's order"


async def ready(driver: asyncio.subprocess.Process) -> None:
    assert driver.stdout is not None
    async for line in driver.stdout:
        if line.startswith(b"READY"):
            return
    assert driver.stderr is not None
    raise AssertionError((await driver.stderr.read()).decode())
