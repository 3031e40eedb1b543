"""What `ray_metrics_exporter()` counts, with doubles for Ray's counters and histograms. `tests/ray` reads the real ones."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from lousho_ray import MockProvider, create_agent, ray_metrics_exporter, semconv, tool
from lousho_ray.actors import metrics
from lousho_ray.spans import Span, TraceExporter, is_worker_local

COUNTED: list[tuple[str, float, dict[str, str]]] = []


class Metric:
    """Takes down values, and refuses what Ray refuses."""

    def __init__(self, name: str, description: str, *rest: Any) -> None:
        assert description
        self.name, self.tags = name, set(rest[-1])

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self.observe(value, tags)

    def observe(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self.tags
        assert all(type(tag) is str for tag in tags.values())
        COUNTED.append((self.name, value, tags))


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    COUNTED.clear()
    monkeypatch.setattr(metrics, "Counter", Metric)
    monkeypatch.setattr(metrics, "Histogram", Metric)
    metrics._metrics.cache_clear()
    yield
    metrics._metrics.cache_clear()


def counted(name: str) -> list[tuple[float, str]]:
    return [(value, " ".join(tags.values())) for metric, value, tags in COUNTED if metric == f"lousho_{name}"]


def end(exporter: TraceExporter, operation: str, parent: str | None = None, after_ms: float = 1_500, **about: Any) -> None:
    span = Span("x", operation, "internal", "t", 1_000.0, parent, {semconv.OPERATION_NAME: operation})
    exporter.on_span_start(span)
    span.set(about)
    span.end_time = span.start_time + after_ms
    exporter.on_span_end(span)


@tool
def look() -> str:
    """Looks."""
    return "something"


@tool
def broken() -> str:
    """Fails."""
    raise ValueError("no luck")


async def test_a_run_is_counted_with_its_calls_tokens_and_tools() -> None:
    # OBS-41
    exporter = ray_metrics_exporter()
    agent = create_agent(provider=MockProvider(), tools=[look], exporter=exporter, runtime="local", name="clerk")
    result = await agent.send("What does look say?")
    assert counted("runs") == [(1, "clerk stop")]
    assert counted("model_calls") == [(1, "clerk mock mock-1 ok")] * 2
    assert counted("tool_calls") == [(1, "clerk look ok")]
    tokens = counted("tokens")
    assert sum(value for value, tags in tokens if tags.endswith("input")) == result.usage.input_tokens
    assert sum(value for value, tags in tokens if tags.endswith("output")) == result.usage.output_tokens
    assert [len(counted(f"{of}_seconds")) for of in ("run", "model_call", "tool_call", "rate_limit_wait")] == [1, 2, 1, 0]
    assert counted("model_call_retries") == []


async def test_outcomes_of_failures_are_their_error_types() -> None:
    # OBS-41
    agent = create_agent(provider=MockProvider(), tools=[broken], exporter=ray_metrics_exporter(), runtime="local", name="clerk")
    await agent.send("What does broken say?")
    assert counted("tool_calls") == [(1, "clerk broken ValueError")]


async def test_waits_for_a_rate_limit_are_a_histogram_in_seconds() -> None:
    # OBS-41
    end(
        ray_metrics_exporter(),
        "chat",
        **{semconv.RATE_LIMIT_WAIT_MS: 2_500, semconv.PROVIDER_NAME: "p", semconv.RESPONSE_MODEL: "m"},
    )
    assert counted("rate_limit_wait_seconds") == [(2.5, " p m")]
    assert counted("model_call_seconds") == [(1.5, " p m ok")]


def test_cost_and_retries_are_counted_when_there_are_some() -> None:
    # OBS-41
    exporter = ray_metrics_exporter()
    end(exporter, "chat", **{semconv.COST_USD: 0.25, semconv.RETRY_COUNT: 2, semconv.REQUEST_MODEL: "m", semconv.ERROR_TYPE: "Odd"})
    end(exporter, "chat", **{semconv.COST_USD: 0})
    assert counted("cost_usd") == [(0.25, "  m")]
    assert counted("model_call_retries") == [(2, "  m")]
    assert counted("model_calls") == [(1, "  m Odd"), (1, "   ok")]


def test_an_aborted_run_is_counted_as_aborted() -> None:
    end(ray_metrics_exporter(), "invoke_agent", **{semconv.FINISH_REASON: "aborted", semconv.ERROR_TYPE: "AbortError"})
    assert counted("runs") == [(1, " aborted")]


def test_spans_of_ones_own_are_not_counted() -> None:
    end(ray_metrics_exporter(), "load table")
    assert COUNTED == []


def test_each_process_counts_for_itself() -> None:
    # OBS-40
    exporter = pickle.loads(pickle.dumps(ray_metrics_exporter()))
    assert is_worker_local(exporter)
    end(exporter, "execute_tool", **{semconv.TOOL_NAME: "look"})
    assert counted("tool_calls") == [(1, " look ok")]
