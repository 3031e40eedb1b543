"""Run by `test_cluster_gone.py`: a driver whose cluster is killed, head and all. Prints a report as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from lousho_ray import LoushoError, MockProvider, create_agent
from lousho_ray.actors import cluster as joining


async def main() -> None:
    joining.HEAD_IS_BACK_IN_S = 2.0
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.CRITICAL)
    agent = create_agent(provider=MockProvider(policy=lambda request: "hello", delay_ms=2_000))
    session = agent.session()
    await session.send("one")
    turn = asyncio.create_task(session.send("two"))
    await asyncio.sleep(0.5)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    began = time.monotonic()
    errors = [await error_of(turn), await error_of(session.send("three")), await error_of(agent.session().send("four"))]
    report = {"address": cluster.address, "errors": errors, "took_s": time.monotonic() - began}
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")


async def error_of(call: Any) -> list[str]:
    try:
        await call
    except LoushoError as error:
        return [error.code, error.detail]
    return ["none", ""]


if __name__ == "__main__":
    asyncio.run(main())
