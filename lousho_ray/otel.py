"""Spans and metrics through OpenTelemetry: `otel_trace_exporter()`.

Only this module imports `opentelemetry`, and only when an exporter is made. Without a tracer provider or meter provider registered
with OpenTelemetry its API does nothing, and so does the exporter.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from lousho_ray import semconv
from lousho_ray.errors import ConfigurationError, MissingDependencyError
from lousho_ray.option_checks import check_bool, check_text
from lousho_ray.spans import Span, TraceExporter

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Span as OtelSpan

TOKEN_BUCKETS: Final = [4**power for power in range(14)]
DURATION_BUCKETS_S: Final = [0.01 * 2**power for power in range(14)]
"""The bucket bounds that the conventions (v1.40) advise for the two histograms."""

MEASURED: Final = frozenset({semconv.CHAT, semconv.EXECUTE_TOOL})
"""The operations whose duration is a metric."""

MOST_INTEGER: Final = 2**63 - 1
"""The largest integer of OTLP."""


def otel_trace_exporter(tracer_name: str = "lousho_ray", metrics: bool = True, meter: Meter | None = None) -> TraceExporter:
    """Sends spans to OpenTelemetry, and counts tokens and durations there.

    Each span becomes one of OpenTelemetry with the same name, kind, times and attributes, and `lousho.span_id` and
    `lousho.trace_id` with the ids it has here. A run nests under the span that is current where the run is started.

    Args:
        tracer_name: The name of the tracer, and of the meter.
        metrics: Whether to record the histograms `gen_ai.client.token.usage` and `gen_ai.client.operation.duration`.
        meter: Makes the histograms; by default one of the registered meter provider.

    Raises:
        MissingDependencyError: `LOUSHO_PEER_MISSING`: `pip install "lousho-ray[otel]"`.
        ConfigurationError: An argument cannot be used.
    """
    check_text(tracer_name, "tracer_name")
    check_bool(metrics, "metrics")
    if meter is not None and not (metrics and callable(getattr(meter, "create_histogram", None))):
        raise ConfigurationError(
            "meter= must be an OpenTelemetry meter: opentelemetry.metrics.get_meter('my-service')."
            if metrics
            else "meter= does nothing with metrics=False: leave one of them out.",
            field="meter",
        )
    _check_installed()
    return _OtelExporter(tracer_name, _Metrics(tracer_name, meter) if metrics else None)


def _check_installed() -> None:
    try:
        importlib.import_module("opentelemetry.metrics")
    except ImportError as error:
        importlib.invalidate_caches()  # a failure is not remembered: once it is installed, the next call works
        command = 'pip install "lousho-ray[otel]"'
        raise MissingDependencyError(
            f"otel_trace_exporter() needs opentelemetry-api: {command}", package="opentelemetry-api", install_command=command
        ) from error


@dataclass(slots=True)
class _Trace:
    """The OpenTelemetry contexts of a trace's spans by our ids, also of ended ones: a late child still finds its parent."""

    contexts: dict[str, Context] = field(default_factory=dict)
    open: int = 0


class _OtelExporter:
    def __init__(self, tracer_name: str, metrics: _Metrics | None) -> None:
        from opentelemetry import trace

        from lousho_ray import __version__

        self._tracer = trace.get_tracer(tracer_name, __version__)
        self._metrics = metrics
        self._spans: dict[str, OtelSpan] = {}
        self._traces: dict[str, _Trace] = {}
        self._lock = threading.Lock()

    def on_span_start(self, span: Span) -> None:
        from opentelemetry import context as current
        from opentelemetry.trace import NonRecordingSpan, SpanKind, set_span_in_context

        with self._lock:
            known = self._traces.get(span.trace_id)
            parent = None if known is None or span.parent_id is None else known.contexts.get(span.parent_id)
        around = current.get_current() if parent is None else parent
        started = self._tracer.start_span(
            span.name,
            context=around,
            kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
            attributes={**_attributes(span), **_ids(span, lost=parent is None)},
            start_time=_ns(span.start_time),
        )
        # The ids alone: the attributes of a span that has ended can go.
        place = set_span_in_context(NonRecordingSpan(started.get_span_context()), around)
        with self._lock:
            trace = self._traces.setdefault(span.trace_id, _Trace())
            trace.contexts[span.id] = place
            trace.open += 1
            self._spans[span.id] = started

    def on_span_end(self, span: Span) -> None:
        from opentelemetry.trace import Status, StatusCode

        with self._lock:
            started = self._spans.pop(span.id, None)
            trace = self._traces.get(span.trace_id)
            if started is None or trace is None:
                return
            trace.open -= 1
            if not trace.open:  # children end before the root
                del self._traces[span.trace_id]
        try:
            started.set_attributes(_attributes(span))
            if span.status is not None and span.status.code == "error":
                started.set_status(Status(StatusCode.ERROR, span.status.message))
        finally:
            started.end(_ns(_end_of(span)))
        if self._metrics is not None:
            self._metrics.record(span, trace.contexts[span.id])


class _Metrics:
    """The two histograms of the conventions."""

    def __init__(self, name: str, meter: Meter | None) -> None:
        if meter is None:
            from opentelemetry import metrics

            from lousho_ray import __version__

            meter = metrics.get_meter(name, __version__)
        self._tokens = meter.create_histogram(
            semconv.TOKEN_USAGE,
            unit="{token}",
            description="Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )
        self._duration = meter.create_histogram(
            semconv.OPERATION_DURATION,
            unit="s",
            description="GenAI operation duration.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS_S,
        )

    def record(self, span: Span, context: Context) -> None:
        """Takes down an ended span. `context` lets an SDK keep the span as an example of the value."""
        found = span.attributes
        operation = found.get(semconv.OPERATION_NAME)
        if operation not in MEASURED:
            return
        asked = (semconv.OPERATION_NAME, semconv.PROVIDER_NAME, semconv.REQUEST_MODEL, semconv.RESPONSE_MODEL)
        about = {name: found[name] for name in asked if name in found}
        if operation == semconv.CHAT:
            for kind, name in (("input", semconv.INPUT_TOKENS), ("output", semconv.OUTPUT_TOKENS)):
                if name in found:
                    self._tokens.record(found[name], {**about, semconv.TOKEN_TYPE: kind}, context)
        if semconv.ERROR_TYPE in found:
            about[semconv.ERROR_TYPE] = found[semconv.ERROR_TYPE]
        self._duration.record((_end_of(span) - span.start_time) / 1000, about, context)


def _ids(span: Span, *, lost: bool) -> dict[str, str]:
    """Our own ids; that of the parent when its span is in another process, or unknown."""
    ids = {semconv.SPAN_ID: span.id, semconv.TRACE_ID: span.trace_id}
    return ids if span.parent_id is None or not lost else {**ids, semconv.PARENT_SPAN_ID: span.parent_id}


def _end_of(span: Span) -> float:
    return span.start_time if span.end_time is None else span.end_time


def _ns(time_ms: float) -> int:
    return int(time_ms * 1_000_000)


def _attributes(span: Span) -> Mapping[str, Any]:
    return {name: otel_value(value) for name, value in span.attributes.items()}


def otel_value(value: Any) -> Any:
    """An attribute's value as OpenTelemetry takes it: a primitive or a list of one kind of primitives, else JSON."""
    if _is_primitive(value):
        return value
    if isinstance(value, list | tuple) and len({type(item) for item in value}) <= 1 and all(map(_is_primitive, value)):
        return list(value)
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    except (TypeError, ValueError):  # keys that are no text, or a value that holds itself
        return str(value)


def _is_primitive(value: Any) -> bool:
    return isinstance(value, str | bool | float) or (isinstance(value, int) and abs(value) <= MOST_INTEGER)
