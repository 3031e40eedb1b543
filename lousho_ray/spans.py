"""Spans: what a run, a model call and a tool call did and how long it took, for those who operate agents.

A `TraceExporter` gets them; `with_span()` makes one of the caller's own. Parents are passed by id, never taken from the context of
a task or thread: runs that go on side by side must not mix their trees.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, overload, runtime_checkable
from uuid import uuid4
from weakref import WeakSet

from lousho_ray import semconv
from lousho_ray.cancellation import Aborted, Detour
from lousho_ray.errors import ConfigurationError, error_name, message_of

T = TypeVar("T")

SpanKind = Literal["internal", "client"]

log = logging.getLogger("lousho_ray")


@dataclass(frozen=True, slots=True)
class SpanStatus:
    """How what a span stands for ended. A span that has none ended without a verdict (an aborted run)."""

    code: Literal["ok", "error"]
    message: str | None = None


@dataclass(slots=True)
class Span:
    """One span. Exporters read it; the library alone changes it.

    Attributes:
        id: 32 hex digits.
        name: `invoke_agent <agent>`, `chat <model>` or `execute_tool <tool>`, or what `with_span()` was given.
        kind: `client` for a model call, else `internal`.
        trace_id: The id of the root span of its tree.
        parent_id: `None` for the root.
        start_time: Milliseconds since the epoch, of the clock of the process it was made in; `end_time` likewise.
        attributes: By name, those of `lousho_ray.semconv`. One without a value is absent. All are there when the span ends.
    """

    id: str
    name: str
    kind: SpanKind
    trace_id: str
    start_time: float
    parent_id: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    end_time: float | None = None
    status: SpanStatus | None = None

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Adds attributes; those without a value are left out."""
        self.attributes.update((name, value) for name, value in attributes.items() if value is not None)

    def fail(self, error: BaseException) -> None:
        """Takes down how it failed; the first failure counts."""
        if semconv.ERROR_TYPE not in self.attributes:
            self.refuse(error_type(error), message_of(error))

    def refuse(self, kind: str, message: str) -> None:
        """Takes down a failure that is no exception."""
        self.set({semconv.ERROR_TYPE: kind, semconv.Deprecated.ERROR: message})
        self.status = SpanStatus("error", message)


@runtime_checkable
class TraceExporter(Protocol):
    """What gets spans. Both are called in the process of the caller, in its event loop, and must not take long.

    `on_span_end` gets the same object as `on_span_start`, once, with all attributes; children end before their parent. What they
    raise is logged once and changes nothing. Do not keep a span to change it.

    With the attribute `worker_local = True` an exporter must be picklable: each process in which runs begin has one of its own.
    """

    def on_span_start(self, span: Span) -> None: ...

    def on_span_end(self, span: Span) -> None: ...


def check_exporter(value: Any, field: str = "exporter") -> TraceExporter:
    """`value` when it is an exporter.

    Raises:
        ConfigurationError: It lacks a method.
    """
    missing = [name for name in ("on_span_start", "on_span_end") if not callable(getattr(value, name, None))]
    if missing or isinstance(value, type):
        lacks = " and ".join(f"{name}(span)" for name in missing) or "both, being a class: pass an instance"
        raise ConfigurationError(
            f"{field}= must be an object with the methods on_span_start(span) and on_span_end(span); "
            f"{type(value).__name__} lacks {lacks}.",
            field=field,
        )
    checked: TraceExporter = value
    return checked


def is_worker_local(exporter: TraceExporter) -> bool:
    """Whether an exporter is made anew in each process in which runs begin, instead of getting those of all at the caller's."""
    return bool(getattr(exporter, "worker_local", False))


def error_type(error: BaseException) -> str:
    """`error.type` of an exception: its class name as events show it."""
    if isinstance(error, Aborted):
        return "AbortError"
    return error_name(error) if isinstance(error, Exception) or type(error).__name__ == "CancelledError" else "_OTHER"


def new_span_id() -> str:
    """32 hex digits, random."""
    return uuid4().hex


def now_ms() -> float:
    """Milliseconds since the epoch."""
    return time.time() * 1000


@contextmanager
def open_span(
    exporter: TraceExporter,
    name: str,
    attributes: Mapping[str, Any],
    *,
    parent_id: str | None = None,
    trace_id: str | None = None,
    kind: SpanKind = "internal",
) -> Iterator[Span]:
    """A span around the block. What leaves the block as an exception is its failure, unless one was taken down already."""
    span_id = new_span_id()
    span = Span(span_id, name, kind, trace_id or parent_id or span_id, now_ms(), parent_id)
    span.set(attributes)
    told(exporter.on_span_start, span)
    try:
        yield span
        if span.status is None and semconv.ERROR_TYPE not in span.attributes:
            span.status = SpanStatus("ok")
    except Detour:
        raise
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        span.end_time = max(now_ms(), span.start_time)
        told(exporter.on_span_end, span)


@overload
def with_span(
    exporter: TraceExporter | None,
    name: str,
    attributes: Mapping[str, Any],
    fn: Callable[[Span | None], Awaitable[T]],
    parent_id: str | None = None,
    kind: SpanKind = "internal",
    *,
    trace_id: str | None = None,
) -> Awaitable[T]: ...


@overload
def with_span(
    exporter: TraceExporter | None,
    name: str,
    attributes: Mapping[str, Any],
    fn: Callable[[Span | None], T],
    parent_id: str | None = None,
    kind: SpanKind = "internal",
    *,
    trace_id: str | None = None,
) -> T: ...


def with_span(
    exporter: TraceExporter | None,
    name: str,
    attributes: Mapping[str, Any],
    fn: Callable[[Span | None], Any],
    parent_id: str | None = None,
    kind: SpanKind = "internal",
    *,
    trace_id: str | None = None,
) -> Any:
    """Runs `fn(span)` inside a span and returns what it returns; with a coroutine function the result is to be awaited.

    Args:
        exporter: Gets the span; with `None` no span is built and `fn(None)` runs all the same.
        name: The span's name.
        attributes: Those known at the start; `span.set({...})` adds more.
        fn: What the span is around.
        parent_id: The `id` of the span above.
        kind: `client` for a call of another service.
        trace_id: The `trace_id` of the span above; by default the span above is the root.
    """
    if exporter is None:
        return fn(None)
    check_exporter(exporter)
    if inspect.iscoroutinefunction(fn):
        return _with_span(exporter, name, attributes, fn, parent_id, kind, trace_id)
    with open_span(exporter, name, attributes, parent_id=parent_id, trace_id=trace_id, kind=kind) as span:
        return fn(span)


async def _with_span(
    exporter: TraceExporter,
    name: str,
    attributes: Mapping[str, Any],
    fn: Callable[[Span], Awaitable[T]],
    parent_id: str | None,
    kind: SpanKind,
    trace_id: str | None,
) -> T:
    with open_span(exporter, name, attributes, parent_id=parent_id, trace_id=trace_id, kind=kind) as span:
        return await fn(span)


_COMPLAINED: WeakSet[Any] = WeakSet()


def told(method: Callable[[Span], None], span: Span) -> None:
    """Calls a method of an exporter. What it raises is logged once for each exporter."""
    try:
        method(span)
    except (Exception, SystemExit):
        exporter = getattr(method, "__self__", method)
        with suppress(TypeError):  # one that cannot be hashed or referred to is complained of every time
            if exporter in _COMPLAINED:
                return
            _COMPLAINED.add(exporter)
        log.exception("The exporter %s raised; the run goes on. Further failures of it are not logged.", type(exporter).__name__)


# ------------------------------------------------------------------------------------------------- spans of other processes


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span as it started or ended in another process; travels among the events of its run."""

    span: Span
    ended: bool


class SpanSender:
    """An exporter that sends its spans on as records, to the process whose exporter they are for."""

    def __init__(self, send: Callable[[SpanRecord], None]) -> None:
        self._send = send

    def on_span_start(self, span: Span) -> None:
        self._send(SpanRecord(replace(span, attributes=dict(span.attributes)), ended=False))

    def on_span_end(self, span: Span) -> None:
        self._send(SpanRecord(replace(span, attributes=dict(span.attributes)), ended=True))


class SpanBook:
    """Keeps the promises of `TraceExporter` for the spans of one run and what it starts, wherever they were made: each ends exactly
    once, children before their parent, and what was open in a process that is lost ends as an error.

    `outer` is the span above those of the book. What comes under a span that has ended is dropped.
    """

    def __init__(self, exporter: TraceExporter, outer: str | None = None) -> None:
        self._exporter = exporter
        self._outer = outer
        self._open: dict[str, Span] = {}

    def on_span_start(self, span: Span) -> None:
        if span.parent_id == self._outer or span.parent_id in self._open:
            self._open[span.id] = span
            told(self._exporter.on_span_start, span)

    def on_span_end(self, span: Span) -> None:
        if span.id in self._open:
            self._end_below(span.id, "AbortError", "It had not ended when what had started it did.")
            del self._open[span.id]
            told(self._exporter.on_span_end, span)

    def take(self, record: SpanRecord) -> None:
        """Takes in a span of another process."""
        if not record.ended:
            self.on_span_start(record.span)
            return
        span = self._open.get(record.span.id)
        if span is not None:  # the object that the exporter knows
            span.attributes.update(record.span.attributes)
            span.end_time, span.status = record.span.end_time, record.span.status
            self.on_span_end(span)

    def lose(self, kind: str, message: str) -> None:
        """Ends all that is open: the process it was in is gone, or nobody will hear of it any more."""
        for span in reversed(self._open.copy().values()):
            self._cut(span, kind, message)

    def _end_below(self, span_id: str, kind: str, message: str) -> None:
        found, above = [], {span_id}
        for span in self._open.values():  # in the order of their starts: parents before children
            if span.parent_id in above:
                above.add(span.id)
                found.append(span)
        for span in reversed(found):
            self._cut(span, kind, message)

    def _cut(self, span: Span, kind: str, message: str) -> None:
        del self._open[span.id]
        span.refuse(kind, message)
        span.end_time = max(now_ms(), span.start_time)
        told(self._exporter.on_span_end, span)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What a run takes over of the trace it is part of; plain data that travels with it.

    Attributes:
        on: Whether anybody gets the spans.
        sent: Whether they are sent to the process that the request came from.
        capture_content: Whether messages, arguments and results are recorded under their `gen_ai.*` names.
        redact_content: Whether they are left out under their deprecated names.
        parent_id: The span above the run's.
        trace_id: The id of the trace, with `parent_id`.
        where: Attributes of every span that name the process it is made in, when that is an actor.
    """

    on: bool = False
    sent: bool = False
    capture_content: bool = False
    redact_content: bool = True
    parent_id: str | None = None
    trace_id: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)
