"""A process whose cluster is gone, and one that leaves its cluster for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray.test_node_loss import run_cluster
from tests.ray.test_runtime_attach import run_script


@pytest.mark.timeout(120)
def test_a_cluster_that_is_gone_is_a_clear_error() -> None:
    # DEC-R1, R: every remote wait has a bound
    report = run_cluster("tests.ray.gone_script", timeout_s=100)
    assert [code for code, _ in report["errors"]] == ["LOUSHO_AGENT_EXECUTION_FAILED"] * 3
    lost, *later = (detail for _, detail in report["errors"])
    assert "was lost" in lost or "is gone" in lost
    for detail in later:
        assert "The Ray cluster is gone" in detail
        assert report["address"] in detail
    assert report["took_s"] < 55, "before Ray ends the process"


REJOIN = """
import asyncio, logging
import ray
from lousho_ray import MockProvider, create_agent, create_rate_limiter
from tests.ray.processes import fan_out, task_results

def init():
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL)

async def main():
    limiter = create_rate_limiter({"max_concurrent": 2}, "rejoined")
    agent = create_agent(provider=MockProvider(policy=lambda request: "hello"), rate_limit=limiter, description="Greets.")
    lead = create_agent(provider=MockProvider(policy=fan_out(2)), subagents={"child": agent})
    session = agent.session()
    for _ in range(2):
        init()
        print((await session.send("Hi.")).text)
        results = task_results((await lead.send("Go.")).messages).values()
        print(len(results), any(message.is_error for message in results))
        ray.shutdown()
    assert not ray.is_initialized(), "nothing starts a cluster unasked"

asyncio.run(main())
"""


@pytest.mark.timeout(150)
def test_agents_and_limiters_work_on_in_the_next_cluster_of_their_process(tmp_path: Path) -> None:
    # DEC-R1: what a notebook does that restarts Ray
    done = run_script(tmp_path, REJOIN, PYTHONPATH=str(Path(__file__).parents[2]), RAY_AUTH_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["hello", "2 False"] * 2
