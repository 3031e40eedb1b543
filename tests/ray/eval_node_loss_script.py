"""Run by `test_evals_node_loss.py`: a suite of evals on three nodes, one of which is lost. Prints a report as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from lousho_ray.evals.suite import Outcome, Suite, SuiteOptions
from lousho_ray.runtime import suites_of_cluster
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply, gate
from tests.ray.processes import gone
from tests.unit.evals_support import console

CASES, AT_ONCE, BEFORE = 60, 12, 20
"""So many cases, so many of them at once, and after so many requests models answer no more until the node is lost."""

BODY = """
import os
import ray
from lousho_ray import OpenAICompatibleProvider, create_agent
from lousho_ray.evals import *

agent = create_agent(provider=OpenAICompatibleProvider(base_url={url!r}, default_model="gpt-4o-mini"), retry=False)

async def test(t, case):
    await t.send("%d %s %d" % (case["n"], ray.get_runtime_context().get_node_id(), os.getpid()))
    t.check("right", case["n"] % 4, at_least(1))

define_eval(name="many", agent=agent, test=test, cases=[{{"label": "c%02d" % n, "n": n}} for n in range({count})])
"""


async def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    others = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        with FakeServer.in_thread(timeout_s=100) as server:
            report = await lose_a_node(cluster, others, server, folder)
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")


async def lose_a_node(cluster: Cluster, others: list[Any], server: FakeServer, folder: Path) -> dict[str, Any]:
    (folder / "many.eval.py").write_text(BODY.format(url=server.compatible_url, count=CASES))
    done = Reply("done", usage=(100, 20))
    server.respond(lambda request: done if len(server.requests) <= BEFORE else [gate("go"), done])
    suite = asyncio.create_task(run(folder))
    await server.reached("go", AT_ONCE)
    held = [asked(request) for request in server.requests[-AT_ONCE:]]
    lost = next(node for node in others if any(home == node.node_id for _, home, _ in held))
    expected = sorted(case for case, home, _ in held if home == lost.node_id)
    nodes = {home for _, home, _ in map(asked, server.requests)}
    await asyncio.to_thread(cluster.remove_node, lost, False)
    # The processes of a node outlive it for a moment, and a case that ends in that moment is not lost.
    left = gone({pid for _, home, pid in map(asked, server.requests) if home == lost.node_id})
    states = [(await board.status())["state"] for board in await suites_of_cluster()]
    server.release("go")
    first = await suite
    before = len(server.requests)
    second = await run(folder)
    return {
        "nodes": len(nodes),
        "left": left,
        "states": states,
        "expected": expected,
        "outages": sorted(int(record.case[1:]) for record in first.summary.records if record.status == "outage"),
        "errors": [str(record.error) for record in first.summary.records if record.status == "outage"],
        "first": [first.summary.not_run, before],
        "again": sorted(asked(request)[0] for request in server.requests[before:]),
        "homes_again": lost.node_id in {asked(request)[1] for request in server.requests[before:]},
        "equal": statuses(second) == statuses(await run(folder, results=folder / "undisturbed.jsonl")),
        "totals": second.summary.totals(),
    }


async def run(folder: Path, **options: Any) -> Outcome:
    given = {"results": folder / "r.jsonl", "concurrency": AT_ONCE, "max_cost_usd": 100.0, "limits": {"max_concurrent": AT_ONCE}}
    return await Suite(SuiteOptions(root=folder, runtime="ray", **{**given, **options}), console()).run()


def asked(request: RecordedRequest) -> tuple[int, str, int]:
    """Which case asked, from which node and process."""
    case, node, process = request.body["messages"][-1]["content"].split()
    return int(case), node, int(process)


def statuses(outcome: Outcome) -> list[Any]:
    return [(record.title, record.status, record.assertions) for record in outcome.summary.records]


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
