"""Exporters on the cluster: one in each process that makes spans, and the metrics that Prometheus reads."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lousho_ray import (
    MockProvider,
    TraceExporter,
    combine_exporters,
    create_agent,
    file_trace_exporter,
    list_traces,
    read_trace,
    semconv,
    worker_local,
)
from lousho_ray.otel import otel_trace_exporter
from tests.ray.processes import fan_out
from tests.ray.test_node_loss import run_cluster
from tests.unit.span_support import Recorder


def to_files(folder: str) -> TraceExporter:
    """Makes the exporter of a process, and says which process it was."""
    Path(folder).mkdir(exist_ok=True)
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
    tree = read_trace(found.trace_id, tmp_path / "traces")
    assert [span.name for span in tree.children(None)] == ["invoke_agent lead"]
    tasks = [span for span in tree.children(tree.root) if span.name == "execute_tool task"]
    assert [[child.name for child in tree.children(task)] for task in tasks] == [["invoke_agent reader"]] * 2
    assert all(span.attributes[semconv.ACTOR_ID] for span in tree.spans)


@pytest.mark.usefixtures("ray_cluster")
async def test_beside_the_exporter_of_each_process_one_of_the_caller_hears_all_the_same(tmp_path: Path) -> None:
    # OBS-40, OBS-42; OBS-07: the sub-agent's own exporter is not asked
    heard, unasked = Recorder(), tmp_path / "unasked"
    own = worker_local(functools.partial(to_files, str(unasked)))
    reader = create_agent(provider=MockProvider(policy=lambda request: "read"), name="reader", description="Reads.", exporter=own)
    exporter = combine_exporters(heard, worker_local(functools.partial(to_files, str(tmp_path))))
    lead = create_agent(provider=MockProvider(policy=fan_out(1)), subagents={"child": reader}, exporter=exporter, name="lead")
    await lead.session().send("Go.")
    tree = [
        "invoke_agent lead",
        "  chat mock-1",
        "  execute_tool task",
        "    invoke_agent reader",
        "      chat mock-1",
        "  chat mock-1",
    ]
    assert heard.tree() == tree
    (found,) = list_traces(tmp_path / "traces")
    assert {span.id for span in read_trace(found.trace_id, tmp_path / "traces").spans} == {span.id for span in heard.ended}
    assert f"{os.getpid()}.made" not in {path.name for path in tmp_path.glob("*.made")}
    assert not unasked.exists()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("streamed", [False, True])
async def test_turns_in_an_actor_nest_under_the_span_of_the_caller(streamed: bool) -> None:
    # OBS-29
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trace, "get_tracer", provider.get_tracer)
        exporter = otel_trace_exporter(metrics=False)
    session = create_agent(provider=MockProvider(), exporter=exporter, name="clerk").session()
    for number in range(2):
        with provider.get_tracer("mine").start_as_current_span(f"request {number}"):
            if streamed:
                async for _ in session.stream("Hi."):
                    pass
            else:
                await session.send("Hi.")
    spans = memory.get_finished_spans()
    named = {span.context.span_id: span.name for span in spans if span.context is not None}
    above = [(span.name, named[span.parent.span_id]) for span in spans if span.parent is not None]
    run = "invoke_agent clerk"
    assert above == [("chat mock-1", run), (run, "request 0"), ("chat mock-1", run), (run, "request 1")]
    provider.shutdown()


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
