"""Exporters on the cluster: one in each process that makes spans, and the metrics that Prometheus reads."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import (
    MockProvider,
    TraceExporter,
    create_agent,
    file_trace_exporter,
    list_traces,
    read_trace,
    semconv,
    worker_local,
)
from tests.ray.processes import fan_out
from tests.ray.test_node_loss import run_cluster


def to_files(folder: str) -> TraceExporter:
    """Makes the exporter of a process, and says which process it was."""
    Path(folder, f"{os.getpid()}.made").touch()
    return file_trace_exporter(Path(folder, "traces"))


@pytest.mark.usefixtures("ray_cluster")
async def test_a_session_actor_has_an_exporter_of_its_own(tmp_path: Path) -> None:
    # OBS-40
    exporter = worker_local(functools.partial(to_files, str(tmp_path)))
    reader = create_agent(provider=MockProvider(policy=lambda request: "read"), name="reader", description="Reads.")
    lead = create_agent(provider=MockProvider(policy=fan_out(2)), subagents={"child": reader}, exporter=exporter, name="lead")
    await lead.session().send("Go.")
    assert f"{os.getpid()}.made" not in {path.name for path in tmp_path.glob("*.made")}
    (found,) = list_traces(tmp_path / "traces")
    assert (found.agent, found.model_calls, found.tool_calls, found.status) == ("lead", 4, 2, "ok")
    trace = read_trace(found.trace_id, tmp_path / "traces")
    assert [span.name for span in trace.children(None)] == ["invoke_agent lead"]
    tasks = [span for span in trace.children(trace.root) if span.name == "execute_tool task"]
    assert [[child.name for child in trace.children(task)] for task in tasks] == [["invoke_agent reader"]] * 2
    assert all(span.attributes[semconv.ACTOR_ID] for span in trace.spans)


@pytest.mark.timeout(180)
def test_prometheus_finds_what_runs_did_on_the_cluster() -> None:
    # OBS-41
    report = run_cluster("tests.ray.metrics_script", timeout_s=170)

    def values(name: str) -> dict[tuple[Any, ...], float]:
        found = [(about, value) for metric, about, value in report["samples"] if metric == f"ray_lousho_{name}"]
        return {tuple(about[tag] for tag in sorted(about)): value for about, value in found}

    runs = {("broken", report["failed"]): 1, ("clerk", "stop"): 1, ("lead", "stop"): 1, ("reader", "stop"): 2}
    assert values("runs_total") == runs
    assert values("run_seconds_count") == runs
    model = ("mock-1", "ok", "mock")
    calls = {("clerk", *model): 2, ("lead", *model): 2, ("reader", *model): 2, ("broken", "mock-1", report["failed"], "mock"): 1}
    assert values("model_calls_total") == calls
    assert values("model_call_seconds_count") == calls
    tools = {("clerk", "ok", "look"): 1, ("lead", "ok", "task"): 2}
    assert values("tool_calls_total") == tools
    assert values("tool_call_seconds_count") == tools
    tokens = values("tokens_total")
    assert [tokens["clerk", "mock-1", "mock", kind] for kind in ("input", "output")] == report["tokens"]
