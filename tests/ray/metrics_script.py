"""Run by `test_exporters_ray.py`: agents on a cluster whose metrics are read as Prometheus does. Prints a report as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import urllib.request
from typing import Any

import ray

from lousho_ray import LoushoError, MockProvider, create_agent, ray_metrics_exporter, tool
from tests.ray.processes import fan_out


@tool
def look() -> str:
    """Looks."""
    return "something"


async def main() -> None:
    often = {"metrics_report_interval_ms": 200}
    quiet: Any = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.CRITICAL}
    ray.init("local", num_cpus=1, _system_config=often, **quiet)
    exporter = ray_metrics_exporter()
    clerk = create_agent(provider=MockProvider(), tools=[look], exporter=exporter, name="clerk")
    reply = await clerk.session().send("What does look say?")
    reader = create_agent(provider=MockProvider(policy=lambda request: "read"), name="reader", description="Reads.")
    await create_agent(provider=MockProvider(policy=fan_out(2)), subagents={"child": reader}, exporter=exporter, name="lead").send(
        "Go."
    )
    broken = create_agent(provider=MockProvider(policy=refuse), exporter=exporter, name="broken")
    try:
        await broken.send("Hi.")
    except LoushoError as error:
        failed = type(error).__name__
    samples = scrape(complete)
    tokens = [reply.usage.input_tokens, reply.usage.output_tokens]
    sys.stdout.write(f"REPORT {json.dumps({'samples': samples, 'tokens': tokens, 'failed': failed})}\n")
    ray.shutdown()


def refuse(request: Any) -> str:
    raise ValueError("no luck")


def complete(samples: list[Any]) -> bool:
    """Whether the processes of all runs have reported: they do so at intervals of their own."""
    runs = {about["agent"]: value for name, about, value in samples if name == "ray_lousho_runs_total"}
    return runs == {"clerk": 1, "lead": 1, "reader": 2, "broken": 1}


def scrape(enough: Any) -> list[Any]:
    """The samples of this package at the node's endpoint: names, tags and values, those of several processes added up."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    end = time.monotonic() + 90
    while time.monotonic() < end:
        with urllib.request.urlopen(url, timeout=10) as answer:
            samples = parse(answer.read().decode())
        if enough(samples):
            return samples
        time.sleep(0.2)
    raise AssertionError(f"not complete: {samples}")


def parse(text: str) -> list[Any]:
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("ray_lousho_") or "_bucket{" in line:
            continue
        name, _, rest = line.partition("{")
        tags, _, value = rest.rpartition("} ")
        pairs = (pair.partition("=") for pair in tags.split('",'))
        about = {key: text.strip('"') for key, _, text in pairs if key in ("agent", "outcome", "provider", "model", "tool", "type")}
        key = json.dumps([name, about], sort_keys=True)
        found[key] = found.get(key, 0) + float(value)
    return [[*json.loads(key), value] for key, value in found.items()]


if __name__ == "__main__":
    asyncio.run(main())
