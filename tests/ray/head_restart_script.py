"""Run by `test_head_restart.py`: a cluster with its tables in Redis, whose head server is killed and started again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from lousho_ray import Agent, LoushoError, OpenAICompatibleProvider, SqliteStore, create_agent, create_rate_limiter
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply, gate
from tests.ray.processes import kill_process, lead_of, session_actors, task_results, where

AWAY_S = 5.0
"""How long there is no head server, as when a supervisor starts it again."""


async def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        with FakeServer.in_thread(timeout_s=100) as server:
            report = await Restart(cluster.head_node, server, folder).report()
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")


class Restart:
    """What is under way when the head server dies, what is asked while it is away, and what works once it is back."""

    def __init__(self, head: Any, server: FakeServer, folder: Path) -> None:
        self._head = head
        self._server = server
        self._store = SqliteStore(folder / "kept.db")
        self._limiter = create_rate_limiter({"max_concurrent": 8}, "over-a-restart")

    def _agent(self, **options: Any) -> Agent[Any]:
        model = OpenAICompatibleProvider(base_url=self._server.compatible_url, default_model="fake")
        return create_agent(provider=model, tools=[where], retry=False, rate_limit=self._limiter, **options)

    async def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {}
        self._server.respond(answer)
        kept, fleeting = self._agent(store=self._store).session("kept"), self._agent().session()
        lead = lead_of(self._server, 4, limits={"max_tokens": 100_000})
        for session in (kept, fleeting):
            assert (await session.send("one")).text == "heard one"
        assert not failed(await lead.send("Go."))
        under_way = [asyncio.create_task(session.send("wait")) for session in (kept, fleeting)]
        await self._server.reached("go", 2)
        self._server.respond(lambda request: [gate("child"), Reply("done", usage=(10, 1))])
        fan_out = asyncio.create_task(lead.send("Go."))
        await self._server.reached("child", 4)

        self._kill()
        self._server.release("go")
        self._server.release("child")
        report["turns_under_way"] = [result.text for result in await asyncio.gather(*under_way)]
        report["fan_out_under_way"] = failed(await fan_out)
        self._server.respond(answer)
        meanwhile = [asyncio.create_task(timed(call)) for call in (kept.send("two"), fleeting.send("two"), lead.send("Go."))]
        new = asyncio.create_task(timed(self._agent(store=self._store).session("new").send("hello")))
        await asyncio.sleep(AWAY_S)
        report["answered_without_head"] = [task.done() for task in (*meanwhile, new)]
        await asyncio.to_thread(self._head.start_gcs_server)
        report["meanwhile"] = await asyncio.gather(*meanwhile, new)

        report["after"] = [await timed(kept.send("three")), await timed(lead.send("Go."))]
        report["limiter"] = (await self._limiter.stats()).requests_in_window
        self._server.respond(lambda request: [gate("late"), Reply("too late")])
        lost = asyncio.create_task(timed(kept.send("four")))
        await self._server.reached("late")
        for actor in session_actors():
            await kill_process(actor)
        self._server.respond(answer)
        report["killed_after"] = await lost
        report["kept"] = [message.text for message in await kept.load()]
        await self._store.aclose()
        return report

    def _kill(self) -> None:
        process = self._head.all_processes["gcs_server"][0].process
        os.kill(process.pid, signal.SIGKILL)
        self._head.kill_gcs_server(check_alive=False)


def answer(request: RecordedRequest) -> Any:
    text = request.body["messages"][-1]["content"]
    reply = Reply(f"heard {text}", usage=(10, 1))
    return [gate("go"), reply] if text == "wait" else reply


def failed(result: Any) -> int:
    """How many of a lead's sub-agents failed."""
    return sum(message.is_error for message in task_results(result.messages).values())


async def timed(call: Awaitable[Any]) -> tuple[float, str]:
    """The seconds a call took, and its text or its error."""
    began = time.monotonic()
    try:
        result = await asyncio.wait_for(call, 90)
        said = result.text + (f" ({failed(result)} failed)" if failed(result) else "")
    except LoushoError as error:
        said = str(error)
    return round(time.monotonic() - began, 1), said


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
