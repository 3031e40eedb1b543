"""Run by `test_node_loss.py`: a cluster of three nodes that loses two of them, and what was on them. Prints a report as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lousho_ray import (
    Agent,
    MockProvider,
    OpenAICompatibleProvider,
    SqliteStore,
    create_agent,
    create_rate_limiter,
    tool,
)
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply, gate
from tests.ray.processes import fan_out, gone, task_results, tool_texts

SESSIONS = 12


@tool
def place() -> str:
    """Says on which node and in which process it runs."""
    return f"{ray.get_runtime_context().get_node_id()} {os.getpid()}"


async def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        with FakeServer.in_thread(timeout_s=100) as server:
            report = await Losses(cluster, nodes, server, folder).report()
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")


class Losses:
    """The two losses, one after the other: of a node with sessions, and of one with a store and the limiters."""

    def __init__(self, cluster: Cluster, nodes: list[Any], server: FakeServer, folder: Path) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self._server = server
        self._folder = folder

    async def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {}
        await self._lose_a_store_and_the_limiters(report)
        await self._lose_sessions(report)
        await self._gain_a_node(report)
        return report

    def _agent(self, **options: Any) -> Agent[Any]:
        model = OpenAICompatibleProvider(base_url=self._server.compatible_url, default_model="fake")
        return create_agent(provider=model, tools=[place], retry=False, **options)

    async def _remove(self, node: Any) -> None:
        self._nodes.remove(node)
        await asyncio.to_thread(self._cluster.remove_node, node, False)

    async def _lose_a_store_and_the_limiters(self, report: dict[str, Any]) -> None:
        self._server.respond(lambda request: Reply(f"heard {request.body['messages'][-1]['content']}"))
        path = self._folder / "lost.db"
        node = self._nodes[-1]
        affinity = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        await on_node.options(scheduling_strategy=affinity).remote(self._server.compatible_url, str(path))
        homes = {actor["name"]: actor["node_id"] for actor in actors()}
        report["were_there"] = sorted(name[:13] for name, home in homes.items() if home == node.node_id)
        limiter = create_rate_limiter({"max_concurrent": 1}, "nodes")
        session = self._agent(store=SqliteStore(path), rate_limit=limiter).session("talk")
        report["before"] = [message.text for message in await session.load()]
        await session.send("two")
        await self._remove(node)
        began = time.monotonic()
        report["after"] = (await session.send("three")).text
        report["store_back_s"] = round(time.monotonic() - began, 1)
        report["kept"] = [message.text for message in await session.load()]

    async def _lose_sessions(self, report: dict[str, Any]) -> None:
        self._server.respond(say_where)
        self._agents = self._agent(store=SqliteStore(self._folder / "kept.db"))
        self._sessions = [self._agents.session(f"s{number}") for number in range(SESSIONS)]
        turns = [asyncio.create_task(session.send("Go.")) for session in self._sessions]
        await self._server.reached("go", SESSIONS)
        places = self._places()
        lost = next(node for node in self._nodes if any(home == node.node_id for home, _ in places.values()))
        report["on_lost"] = sum(home == lost.node_id for home, _ in places.values())
        await self._remove(lost)
        # The processes of a node outlive it for a moment, and a turn that ends in that moment is not lost.
        report["left"] = gone(int(pid) for home, pid in places.values() if home == lost.node_id)
        began = time.monotonic()
        self._server.release("go")
        results = await asyncio.gather(*turns)
        report["sessions_back_s"] = round(time.monotonic() - began, 1)
        report["ok"] = [result.ok for result in results]
        report["requests"] = len([request for request in self._server.requests if tool_texts(request)])

    async def _gain_a_node(self, report: dict[str, Any]) -> None:
        before = await self._where_sessions_are()
        node = self._cluster.add_node(num_cpus=1)
        self._nodes.append(node)
        await asyncio.to_thread(self._cluster.wait_for_nodes)
        # Handles made now find the actor where it was.
        self._sessions = [self._agents.session(f"s{number}") for number in range(SESSIONS)]
        report["same_actors"] = await self._where_sessions_are() == before
        child = self._agent(description="Says where it is.")
        lead = create_agent(provider=MockProvider(policy=fan_out(6)), subagents={"child": child})
        result = await lead.send("Go.")
        texts = [message.text for message in task_results(result.messages).values()]
        report["children_on_new_node"] = sum(node.node_id in text for text in texts)

    async def _where_sessions_are(self) -> list[str]:
        return [json.loads((await session.send("Where?")).text) for session in self._sessions]

    def _places(self) -> dict[int, list[str]]:
        second = [request for request in self._server.requests if tool_texts(request)]
        return {number: json.loads(tool_texts(request)[-1]).split() for number, request in enumerate(second)}


def say_where(request: RecordedRequest) -> Any:
    last = request.body["messages"][-1]
    if last["role"] != "tool":
        return Reply(tool_calls=[("place", {})])
    return [gate("go"), Reply(last["content"])]


def actors() -> list[dict[str, Any]]:
    """The named actors with the nodes they are on."""
    found = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        handle = ray.get_actor(entry["name"], entry["namespace"])
        home = ray.get(handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=60)
        found.append({"name": entry["name"], "node_id": home})
    return found


@ray.remote(num_cpus=0)
def on_node(url: str, path: str) -> None:
    """A part of a pipeline that was the first to use a store and a limiter."""
    model = OpenAICompatibleProvider(base_url=url, default_model="fake")
    limiter = create_rate_limiter({"max_concurrent": 1}, "nodes")
    agent = create_agent(provider=model, tools=[place], retry=False, store=SqliteStore(path), rate_limit=limiter)
    agent.session("talk").send_sync("one")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
