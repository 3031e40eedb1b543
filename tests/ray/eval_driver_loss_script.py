"""Run by `test_evals_node_loss.py`: a suite of evals loses its driver with the node that it runs on. Prints a report as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from lousho_ray.evals.results import read_results
from lousho_ray.runtime import suites_of_cluster
from lousho_ray.testing.fake_server import FakeServer, Reply, gate
from tests.ray.eval_node_loss_script import AT_ONCE, BEFORE, BODY, CASES, asked, run, statuses
from tests.ray.processes import gone

WITHIN_S = 60.0


async def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    home, _ = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    try:
        with FakeServer.in_thread(timeout_s=150) as server:
            report = await lose_the_driver(cluster, home, server, folder)
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")


async def lose_the_driver(cluster: Cluster, home: Any, server: FakeServer, folder: Path) -> dict[str, Any]:
    (folder / "many.eval.py").write_text(BODY.format(url=server.compatible_url, count=CASES))
    done = Reply("done", usage=(100, 20))
    server.respond(lambda request: done if len(server.requests) <= BEFORE else [gate("go"), done])
    with (folder / "driver.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.ray.eval_driver_loss_script", "drive", cluster.address, home.node_id, str(folder)]
        driver = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(WITHIN_S):
            await server.reached("go", AT_ONCE)
    except TimeoutError:
        raise AssertionError((folder / "driver.log").read_text()) from None
    nodes = {node for _, node, _ in map(asked, server.requests)}
    processes = {process for _, _, process in map(asked, server.requests)}
    await asyncio.to_thread(cluster.remove_node, home, False)
    driver.kill()
    await driver.wait()
    left = await asyncio.to_thread(gone, processes, WITHIN_S)
    finished = {record.case for record in read_results(folder / "r.jsonl").records.values()}
    server.release("go")
    before = len(server.requests)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    suites = len(await suites_of_cluster())
    second = await run(folder)
    return {
        "nodes": len(nodes),
        "left": left,
        "suites": suites,
        "finished": len(finished),
        "before": before,
        "again": sorted(f"c{asked(request)[0]:02d}" for request in server.requests[before:]),
        "missing": sorted({f"c{number:02d}" for number in range(CASES)} - finished),
        "equal": statuses(second) == statuses(await run(folder, results=folder / "undisturbed.jsonl")),
        "totals": second.summary.totals(),
    }


async def drive(address: str, node: str, folder: Path) -> None:
    """The driver, on a node of its own choice: Ray takes the head among the nodes of one machine."""
    from ray._private import services

    services.find_node_ids = lambda: {node}
    ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    assert ray.get_runtime_context().get_node_id() == node
    await run(folder)


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        asyncio.run(drive(sys.argv[2], sys.argv[3], Path(sys.argv[4])))
    else:
        asyncio.run(main(Path(sys.argv[1])))
