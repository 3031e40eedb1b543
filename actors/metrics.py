"""Counters and histograms of the cluster, for its Prometheus endpoint: `ray_metrics_exporter()`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, Final

from ray.util.metrics import Counter, Histogram

from lousho_ray import semconv
from lousho_ray.spans import Span, TraceExporter

SECONDS: Final = [0.01 * 2**power for power in range(16)]
"""The bucket bounds of the histograms: from 10 ms, doubling, to 5.5 minutes."""

RUN, CALL, TOOL = ("agent", "outcome"), ("agent", "provider", "model", "outcome"), ("agent", "tool", "outcome")
MODEL = ("agent", "provider", "model")


def ray_metrics_exporter() -> TraceExporter:
    """Publishes model calls, tokens, cost, retries, waits for rate limits, tool calls and runs as metrics of the Ray cluster.

    Each process counts what it does itself, so spans need not travel for it (`worker_local`). Prometheus finds the metrics at the
    nodes' endpoints, their names with `ray_` in front and those of counters with `_total` at the end. Outside a cluster nobody
    reads them. All the exporters of a process share their metrics.
    """
    return _RayMetrics()


class _RayMetrics:
    worker_local = True

    def __init__(self) -> None:
        self._agents: dict[str, str] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _RayMetrics, ()

    def on_span_start(self, span: Span) -> None:
        with self._lock:
            above = self._agents.get(span.parent_id or "", "")
            self._agents[span.id] = span.attributes.get(semconv.AGENT_NAME, above)

    def on_span_end(self, span: Span) -> None:
        with self._lock:
            agent = self._agents.pop(span.id, "")
        _metrics().take(span, agent)


class _Metrics:
    """The metrics of this process."""

    def __init__(self) -> None:
        self.runs = Counter("lousho_runs", "Runs of agents, sub-agents included.", RUN)
        self.run_seconds = Histogram("lousho_run_seconds", "How long runs took.", SECONDS, RUN)
        self.calls = Counter("lousho_model_calls", "Model calls, each with its retries.", CALL)
        self.call_seconds = Histogram(
            "lousho_model_call_seconds", "How long model calls took, retries and waits included.", SECONDS, CALL
        )
        self.tokens = Counter("lousho_tokens", "Tokens of model calls; the tag type is input or output.", (*MODEL, "type"))
        self.cost_usd = Counter("lousho_cost_usd", "What model calls cost, in US dollars, as far as it is known.", MODEL)
        self.retries = Counter("lousho_model_call_retries", "Failed attempts of model calls that were tried again.", MODEL)
        self.wait_seconds = Histogram(
            "lousho_rate_limit_wait_seconds", "How long model calls waited for a rate limiter.", SECONDS, MODEL
        )
        self.tool_calls = Counter("lousho_tool_calls", "Tool calls that were run.", TOOL)
        self.tool_seconds = Histogram("lousho_tool_call_seconds", "How long tool calls took.", SECONDS, TOOL)

    def take(self, span: Span, agent: str) -> None:
        found = span.attributes
        operation = found.get(semconv.OPERATION_NAME)
        seconds = ((span.end_time or span.start_time) - span.start_time) / 1000
        error = found.get(semconv.ERROR_TYPE)
        if operation == semconv.INVOKE_AGENT:
            tags = {"agent": agent, "outcome": str(found.get(semconv.FINISH_REASON) or error or "ok")}
            self.runs.inc(1, tags)
            self.run_seconds.observe(seconds, tags)
        elif operation == semconv.EXECUTE_TOOL:
            tags = {"agent": agent, "tool": str(found.get(semconv.TOOL_NAME, "")), "outcome": str(error or "ok")}
            self.tool_calls.inc(1, tags)
            self.tool_seconds.observe(seconds, tags)
        elif operation == semconv.CHAT:
            model = found.get(semconv.REQUEST_MODEL) or found.get(semconv.RESPONSE_MODEL, "")
            about = {"agent": agent, "provider": str(found.get(semconv.PROVIDER_NAME, "")), "model": str(model)}
            self._call(found, about, {**about, "outcome": str(error or "ok")}, seconds)

    def _call(self, found: Mapping[str, Any], about: dict[str, str], ended: dict[str, str], seconds: float) -> None:
        self.calls.inc(1, ended)
        self.call_seconds.observe(seconds, ended)
        _add(self.tokens, found.get(semconv.INPUT_TOKENS), {**about, "type": "input"})
        _add(self.tokens, found.get(semconv.OUTPUT_TOKENS), {**about, "type": "output"})
        _add(self.cost_usd, found.get(semconv.COST_USD), about)
        _add(self.retries, found.get(semconv.RETRY_COUNT), about)
        if (waited_ms := found.get(semconv.RATE_LIMIT_WAIT_MS)) is not None:
            self.wait_seconds.observe(waited_ms / 1000, about)


@functools.cache
def _metrics() -> _Metrics:
    return _Metrics()


def _add(counter: Counter, value: float | None, tags: dict[str, str]) -> None:
    if value:  # a counter refuses to be raised by nothing
        counter.inc(float(value), tags)
