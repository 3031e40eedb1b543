"""A cluster of several nodes, in a process of its own: children are spread, and a node takes only its own children with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import asyncio, json, logging, os, sys, time
import ray
from ray.cluster_utils import Cluster
from lousho_ray import MockProvider, OpenAICompatibleProvider, create_agent, create_rate_limiter, tool
from lousho_ray.testing.fake_server import FakeServer, Reply, gate
from tests.ray.processes import fan_out, gone as processes_left, prompt_of, task_results, tool_texts

CHILDREN = 9

@tool
def node() -> str:
    """Says on which node and in which process it runs."""
    return f"{ray.get_runtime_context().get_node_id()} {os.getpid()}"

async def main():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    others = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    report = {}
    try:
        with FakeServer.in_thread(timeout_s=60) as server:
            report = await run(cluster, others, server)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("REPORT", json.dumps(report))

async def run(cluster, others, server):
    def reply(request):
        if not tool_texts(request):
            return Reply(tool_calls=[("node", {})])
        return [gate("go"), Reply(tool_texts(request)[0])]

    server.respond(reply)
    model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
    child = create_agent(provider=model, tools=[node], description="Says where it is.", retry=False)
    limiter = create_rate_limiter({"max_concurrent": CHILDREN}, "nodes")
    lead = create_agent(provider=MockProvider(policy=fan_out(CHILDREN)), subagents={"child": child}, rate_limit=limiter)
    running = asyncio.create_task(lead.send("Go."))
    await server.reached("go", CHILDREN)
    second = [request for request in server.requests if tool_texts(request)]
    answers = {prompt_of(request).split()[1]: tool_texts(request)[0].strip('"').split() for request in second}
    places = {number: place for number, (place, _) in answers.items()}
    gone = next(other for other in others if other.node_id in places.values())
    began = time.monotonic()
    await asyncio.to_thread(cluster.remove_node, gone, False)
    expected = {number for number, place in places.items() if place == gone.node_id}
    # The processes of a node outlive it for a moment, and a child that ends in that moment is not lost.
    left = processes_left(int(pid) for place, pid in answers.values() if place == gone.node_id)
    server.release("go")
    result = await asyncio.wait_for(running, 60)
    took = time.monotonic() - began
    results = task_results(result.messages)
    lost = {call_id[1:] for call_id, message in results.items() if message.is_error}
    requests = len(server.requests)
    again = await asyncio.wait_for(lead.send("Go."), 60)
    return {
        "left": left,
        "nodes": len(set(places.values())),
        "lost": sorted(lost),
        "expected": sorted(expected),
        "texts": [message.text for message in results.values() if message.is_error],
        "requests": requests,
        "finish": result.finish_reason,
        "took": took,
        "again": [message.text for message in task_results(again.messages).values() if message.is_error],
    }

asyncio.run(main())
'''


@pytest.mark.timeout(170)
def test_children_are_spread_over_nodes_and_a_lost_node_takes_only_its_own(tmp_path: Path) -> None:
    # SUB-46, DEC-R1: a lost node is a failed task for each of its children
    script = tmp_path / "nodes.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    variables |= {
        "PYTHONPATH": str(root),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # A node that is gone is noticed after 15 s by default.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("REPORT ")).removeprefix("REPORT "))
    assert report["left"] == []
    assert report["nodes"] == 3, "one worker a node"
    assert report["finish"] == "stop"
    assert report["lost"] == report["expected"]
    assert 0 < len(report["lost"]) < 9
    assert report["requests"] == 2 * 9, "no child ran twice"
    assert report["again"] == [], "the pool works with the nodes that are left"
