"""Spans and metrics through the real OpenTelemetry SDK."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from lousho_ray import ConfigurationError, MissingDependencyError, MockProvider, create_agent, semconv, tool
from lousho_ray.otel import _Trace, otel_trace_exporter, otel_value
from lousho_ray.spans import Span, SpanStatus, TraceExporter, with_span


@tool
def add(a: int = 1, b: int = 2) -> int:
    """Adds."""
    return a + b


@tool
def broken() -> str:
    """Fails."""
    raise ValueError("no luck")


class Collected:
    """What the SDK was given."""

    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.memory.get_finished_spans()}

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        found = [metric for of in data.resource_metrics for scope in of.scope_metrics for metric in scope.metrics] if data else []
        return [point for metric in found if metric.name == name for point in metric.data.data_points]


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An SDK that the API gives out; it is not registered for good, which can be done once a process only."""
    collected = Collected()
    monkeypatch.setattr(trace, "get_tracer", collected.provider.get_tracer)
    monkeypatch.setattr(metrics, "get_meter", collected.meters.get_meter)
    yield collected
    collected.provider.shutdown()
    collected.meters.shutdown()


def agent_with(exporter: TraceExporter, *tools: Any, **options: Any) -> Any:
    return create_agent(provider=MockProvider(**options), tools=list(tools), exporter=exporter, runtime="local", name="clerk")


def span_of(name: str, span_id: str, parent: str | None = None, *, trace_id: str = "t", **attributes: Any) -> Span:
    return Span(span_id, name, "internal", trace_id, 1_000.0, parent, dict(attributes))


def end(exporter: TraceExporter, span: Span, after_ms: float = 500) -> None:
    span.end_time = span.start_time + after_ms
    exporter.on_span_end(span)


async def test_a_run_becomes_a_tree_of_otel_spans(sdk: Collected) -> None:
    # OBS-29
    reply = await agent_with(otel_trace_exporter(), add).send("What does add say?")
    assert reply.tool_calls
    found = {span.name: span for span in sdk.memory.get_finished_spans()}
    run, called = found["invoke_agent clerk"], found["execute_tool add"]
    chats = [span for span in sdk.memory.get_finished_spans() if span.name.startswith("chat")]
    assert run.parent is None
    assert [span.parent.span_id for span in (called, *chats)] == [run.context.span_id] * 3
    assert {span.context.trace_id for span in (called, *chats)} == {run.context.trace_id}
    assert (run.kind, called.kind, chats[0].kind) == (SpanKind.INTERNAL, SpanKind.INTERNAL, SpanKind.CLIENT)
    assert run.status.status_code is StatusCode.UNSET
    assert run.attributes["gen_ai.agent.name"] == "clerk"
    assert chats[0].attributes["gen_ai.response.finish_reasons"] == ("tool_call",)
    assert run.instrumentation_scope.name == "lousho_ray"


async def test_ids_of_ours_are_attributes(sdk: Collected) -> None:
    # OBS-D2
    seen: list[Span] = []
    exporter = otel_trace_exporter()

    class Both:
        def on_span_start(self, span: Span) -> None:
            seen.append(span)
            exporter.on_span_start(span)

        def on_span_end(self, span: Span) -> None:
            exporter.on_span_end(span)

    await agent_with(Both()).send("Hi.")
    assert {span.id for span in seen} == {span.attributes["lousho.span_id"] for span in sdk.memory.get_finished_spans()}
    assert {span.attributes["lousho.trace_id"] for span in sdk.memory.get_finished_spans()} == {seen[0].id}
    assert all("lousho.parent_span_id" not in span.attributes for span in sdk.memory.get_finished_spans())


async def test_a_run_nests_under_the_span_of_the_caller(sdk: Collected) -> None:
    # OBS-29
    tracer = sdk.provider.get_tracer("mine")
    with tracer.start_as_current_span("request"):
        await agent_with(otel_trace_exporter()).send("Hi.")
    found = sdk.spans()
    assert found["invoke_agent clerk"].parent.span_id == found["request"].context.span_id
    assert len({span.context.trace_id for span in found.values()}) == 1


def test_a_run_without_an_event_loop_nests_there_too(sdk: Collected) -> None:
    # OBS-29
    agent = agent_with(otel_trace_exporter())
    for number, send in enumerate((agent.send_sync, agent.session().send_sync)):
        with sdk.provider.get_tracer("mine").start_as_current_span(f"request {number}"):
            send("Hi.")
    named = {span.context.span_id: span.name for span in sdk.memory.get_finished_spans()}
    runs = [span for span in sdk.memory.get_finished_spans() if span.name == "invoke_agent clerk"]
    assert [named[run.parent.span_id] for run in runs] == ["request 0", "request 1"]


async def test_a_failure_is_the_status_with_its_message(sdk: Collected) -> None:
    # OBS-29, OBS-31b
    await agent_with(otel_trace_exporter(), broken).send("What does broken say?")
    failed = sdk.spans()["execute_tool broken"]
    assert failed.status.status_code is StatusCode.ERROR
    assert "no luck" in failed.status.description
    durations = [point.attributes for point in sdk.points("gen_ai.client.operation.duration")]
    assert {"gen_ai.operation.name": "execute_tool", "error.type": failed.attributes["error.type"]} in durations


def test_times_are_those_of_the_span(sdk: Collected) -> None:
    # OBS-29: milliseconds here, nanoseconds there
    exporter = otel_trace_exporter()
    span = span_of("job", "a")
    exporter.on_span_start(span)
    end(exporter, span, 250.5)
    made = sdk.spans()["job"]
    assert (made.start_time, made.end_time) == (1_000_000_000, 1_250_500_000)


def test_a_late_child_finds_the_parent_that_has_ended_while_the_root_is_open(sdk: Collected) -> None:
    # OBS-29: a background sub-agent, or what a worker sent late
    exporter = otel_trace_exporter()
    root, call, late = span_of("root", "r"), span_of("call", "c", "r"), span_of("late", "l", "c")
    exporter.on_span_start(root)
    exporter.on_span_start(call)
    end(exporter, call)
    exporter.on_span_start(late)
    end(exporter, late)
    end(exporter, root)
    found = sdk.spans()
    assert found["late"].parent.span_id == found["call"].context.span_id


def test_a_span_whose_parent_is_in_another_process_names_it(sdk: Collected) -> None:
    # OBS-40: each process has its exporter; the ids join what they sent
    exporter = otel_trace_exporter()
    span = span_of("invoke_agent reader", "x", "elsewhere")
    exporter.on_span_start(span)
    end(exporter, span)
    made = sdk.spans()["invoke_agent reader"]
    assert made.parent is None
    assert made.attributes["lousho.parent_span_id"] == "elsewhere"
    assert made.attributes["lousho.trace_id"] == "t"


async def test_nothing_of_an_ended_trace_is_kept(sdk: Collected) -> None:
    exporter = otel_trace_exporter()
    await agent_with(exporter, add).send("What does add say?")
    gc.collect()
    assert [held for held in gc.get_objects() if isinstance(held, _Trace)] == []


def test_the_end_of_an_unknown_span_is_ignored(sdk: Collected) -> None:
    end(otel_trace_exporter(), span_of("never begun", "a"))
    assert sdk.spans() == {}


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        ("text", "text"),
        (True, True),
        (1.5, 1.5),
        (7, 7),
        (["a", "b"], ["a", "b"]),
        ((1, 2), [1, 2]),
        ([], []),
        ([1, "a"], '[1,"a"]'),
        ([True, 1], "[true,1]"),
        ([["a"]], '[["a"]]'),
        ({"ä": 1}, '{"ä":1}'),
        (None, "null"),
        (2**70, str(2**70)),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (b"x", json.dumps("b'x'")),
    ],
)
def test_values_that_are_no_primitives_are_json(value: Any, sent: Any) -> None:
    # OBS-30
    assert otel_value(value) == sent
    assert type(otel_value(value)) is type(sent)


async def test_tokens_are_a_histogram_of_each_model_call(sdk: Collected) -> None:
    # OBS-31
    exporter = otel_trace_exporter()
    await agent_with(exporter).send("Hi.")
    chat = next(span for span in sdk.memory.get_finished_spans() if span.name.startswith("chat"))
    points = {point.attributes["gen_ai.token.type"]: point for point in sdk.points("gen_ai.client.token.usage")}
    assert {kind: point.sum for kind, point in points.items()} == {
        "input": chat.attributes["gen_ai.usage.input_tokens"],
        "output": chat.attributes["gen_ai.usage.output_tokens"],
    }
    about = {name: chat.attributes[name] for name in ("gen_ai.provider.name", "gen_ai.request.model") if name in chat.attributes}
    assert points["input"].attributes.items() >= {"gen_ai.operation.name": "chat", **about}.items()
    assert list(points["input"].explicit_bounds) == [
        1,
        4,
        16,
        64,
        256,
        1024,
        4096,
        16384,
        65536,
        262144,
        1048576,
        4194304,
        16777216,
        67108864,
    ]
    assert points["input"].exemplars[0].span_id == chat.context.span_id


async def test_durations_are_of_model_calls_and_tools_alone(sdk: Collected) -> None:
    # OBS-31b
    await agent_with(otel_trace_exporter(), add).send("What does add say?")
    points = sdk.points("gen_ai.client.operation.duration")
    assert {point.attributes["gen_ai.operation.name"]: point.count for point in points} == {"chat": 2, "execute_tool": 1}
    expected = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
    assert list(points[0].explicit_bounds) == pytest.approx(expected)


def test_a_duration_is_in_seconds(sdk: Collected) -> None:
    # OBS-31b
    exporter = otel_trace_exporter()
    span = span_of("execute_tool x", "a", **{semconv.OPERATION_NAME: "execute_tool"})
    exporter.on_span_start(span)
    end(exporter, span, 1_500)
    assert [point.sum for point in sdk.points("gen_ai.client.operation.duration")] == [1.5]


async def test_only_the_histograms_of_the_conventions_are_made(sdk: Collected) -> None:
    # OBS-D7
    await agent_with(otel_trace_exporter(), add).send("What does add say?")
    data = sdk.reader.get_metrics_data()
    names = {metric.name for of in data.resource_metrics for scope in of.scope_metrics for metric in scope.metrics}
    assert names == {"gen_ai.client.token.usage", "gen_ai.client.operation.duration"}


async def test_metrics_can_be_left_out_and_the_meter_chosen(sdk: Collected) -> None:
    # OBS-28
    await agent_with(otel_trace_exporter(metrics=False)).send("Hi.")
    assert sdk.points("gen_ai.client.token.usage") == []
    reader = InMemoryMetricReader()
    own = MeterProvider([reader])
    await agent_with(otel_trace_exporter("mine", meter=own.get_meter("mine"))).send("Hi.")
    assert reader.get_metrics_data() is not None
    assert sdk.points("gen_ai.client.token.usage") == []
    assert {span.instrumentation_scope.name for span in sdk.memory.get_finished_spans()} == {"lousho_ray", "mine"}
    own.shutdown()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tracer_name": ""}, "tracer_name"),
        ({"metrics": 1}, "metrics"),
        ({"meter": object()}, "meter"),
        ({"metrics": False, "meter": object()}, "meter"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        otel_trace_exporter(**options)
    assert caught.value.field == field


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # OBS-28
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(MissingDependencyError, match=r"lousho-ray\[otel\]") as caught:
        otel_trace_exporter()
    assert (caught.value.code, caught.value.package) == ("LOUSHO_PEER_MISSING", "opentelemetry-api")


def test_nothing_else_imports_opentelemetry_and_without_a_provider_it_does_nothing() -> None:
    # OBS-28
    code = """
import sys
from lousho_ray import MockProvider, create_agent
import lousho_ray.otel
agent = create_agent(provider=MockProvider(), runtime="local")
agent.send_sync("Hi.")
assert "opentelemetry" not in sys.modules
exporter = lousho_ray.otel.otel_trace_exporter()
agent = create_agent(provider=MockProvider(), exporter=exporter, runtime="local")
print(agent.send_sync("Hi.").finish_reason)
assert not any(name.startswith("opentelemetry.sdk") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_tracer_that_fails_loses_its_span_alone(sdk: Collected, caplog: pytest.LogCaptureFixture) -> None:
    # OBS-05
    class Odd:
        def __str__(self) -> str:
            raise ValueError("unprintable")

    exporter = otel_trace_exporter()
    assert with_span(exporter, "odd", {"x": Odd()}, lambda span: 1) == 1
    assert with_span(exporter, "fine", {}, lambda span: 2) == 2
    assert list(sdk.spans()) == ["fine"]
    assert "OtelExporter raised" in caplog.text


def test_status_ok_is_left_to_the_operator(sdk: Collected) -> None:
    # OBS-29: the conventions keep `Ok` for people
    exporter = otel_trace_exporter()
    span = span_of("job", "a")
    span.status = SpanStatus("ok")
    exporter.on_span_start(span)
    end(exporter, span)
    assert sdk.spans()["job"].status.status_code is StatusCode.UNSET
