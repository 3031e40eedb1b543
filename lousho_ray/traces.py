"""Reads the traces that `file_trace_exporter()` wrote: `list_traces()`, `read_trace()`. A trace prints as a tree."""

from __future__ import annotations

import heapq
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lousho_ray import semconv
from lousho_ray.errors import ConfigurationError
from lousho_ray.option_checks import check_positive_int, check_text
from lousho_ray.spans import Span, SpanStatus
from lousho_ray.trace_files import SUFFIX, TRACES_DIR, VERSION, check_dir, days, file_name

CLOCKS_DIFFER_MS = 10_000
"""How far the times of files may be behind those of the spans in them: a shared folder has the clock of its server."""

SHOWN_MATCHES = 10
"""How many traces an error names."""

MOST_MESSAGE_CHARS = 160
"""How much of an error's message stands in a tree."""

log = logging.getLogger("lousho_ray")


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace in one line, also when it is printed.

    Attributes:
        trace_id: The id of its root span.
        agent: The agent that ran; for a root that is no run, the name of the span.
        started_at: Milliseconds since the epoch.
        duration_ms: From the start to the end of the root. Without a root to the last end that is known.
        model_calls: How many `chat` spans it has; `input_tokens` and `output_tokens` are theirs.
        tool_calls: How many tools were run.
        cost_usd: That of the root; `None` when it is unknown.
        status: How the root ended (`aborted`: without a verdict), or `incomplete` while the file has none.
    """

    trace_id: str
    agent: str
    started_at: float
    duration_ms: float
    model_calls: int
    tool_calls: int
    input_tokens: int
    output_tokens: int
    cost_usd: float | None
    status: Literal["ok", "error", "aborted", "incomplete"]

    def __str__(self) -> str:
        cost = "" if self.cost_usd is None else f"  ${self.cost_usd:,.4f}"
        return (
            f"{self.trace_id}  {_moment(self.started_at)}  {_plain(self.agent)}  {_duration(self.duration_ms)}  "
            f"{_counted(self.model_calls, 'model call')}  {_counted(self.tool_calls, 'tool call')}  "
            f"{self.input_tokens:,} in / {self.output_tokens:,} out{cost}  {self.status}"
        )


@dataclass(frozen=True, repr=False)
class Trace:
    """A trace. `print(trace)` shows the tree of its spans with durations, tokens, cost and errors.

    Attributes:
        trace_id: The id of its root span.
        spans: Those that have finished, in the order of their starts.
    """

    trace_id: str
    spans: tuple[Span, ...]

    @property
    def root(self) -> Span | None:
        """The span above all others; `None` when it has not finished, or its process was killed."""
        return next((span for span in self.spans if span.id == self.trace_id or span.parent_id is None), None)

    def children(self, span: Span | None) -> Sequence[Span]:
        """The spans below one, in the order of their starts; with `None` those at the top, whose parents are not in the trace."""
        return self._below.get(None if span is None else span.id, ())

    @cached_property
    def summary(self) -> TraceSummary:
        """What `list_traces()` says of it."""
        return _summary(self)

    @cached_property
    def _below(self) -> dict[str | None, list[Span]]:
        known = {span.id for span in self.spans}
        found: dict[str | None, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.parent_id if span.parent_id in known else None, []).append(span)
        return found

    def __repr__(self) -> str:
        summary = self.summary
        return (
            f"<Trace {self.trace_id}: {summary.agent}, {len(self.spans)} spans, {_duration(summary.duration_ms)}, {summary.status}>"
        )

    def __str__(self) -> str:
        return "\n".join(_tree(self))


def list_traces(dir: str | os.PathLike[str] = TRACES_DIR, limit: int = 20) -> list[TraceSummary]:
    """The traces of a folder that began last, the newest first. A folder that does not exist has none.

    Traces that a newer version wrote are left out, with one warning.

    Raises:
        ConfigurationError: `dir` is no path or `limit` no whole number above 0.
    """
    check_positive_int(limit, "limit")
    newest: list[tuple[float, str, TraceSummary]] = []
    newer: list[str] = []
    files = [(_written_at(paths), name, paths) for name, paths in _files(check_dir(dir)).items()]
    for written_at, name, paths in sorted(files, reverse=True):
        if len(newest) == limit and written_at + CLOCKS_DIFFER_MS < newest[0][0]:
            break  # a trace began before its file was written: none that is left can be among the newest
        try:
            trace = _read(paths)
        except _NewerFormatError:
            newer.append(name)
            continue
        if trace is not None:
            summary = trace.summary
            heapq.heappush(newest, (summary.started_at, name, summary))
            if len(newest) > limit:
                heapq.heappop(newest)
    if newer:
        log.warning("%s traces of %s have a format that this version does not read: upgrade lousho_ray.", len(newer), dir)
    return [summary for _, _, summary in sorted(newest, reverse=True)]


def read_trace(id_or_prefix: str, dir: str | os.PathLike[str] = TRACES_DIR) -> Trace:
    """A trace by its id, or by a beginning of it that no other has.

    Raises:
        ConfigurationError: None or several have it (the message lists them), or a newer version wrote it.
    """
    folder = check_dir(dir)
    wanted = file_name(check_text(id_or_prefix, "id_or_prefix"))
    files = _files(folder)
    found = [wanted] if wanted in files else sorted(name for name in files if name.startswith(wanted))
    if len(found) != 1:
        shown = ", ".join(found[:SHOWN_MATCHES]) + (f" and {len(found) - SHOWN_MATCHES} more" if len(found) > SHOWN_MATCHES else "")
        what = f"{len(found)} traces in {folder} begin with" if found else f"There is no trace in {folder} that begins with"
        advice = f": {shown}. Give more of the id." if found else "; list_traces() shows those there are."
        raise ConfigurationError(f"{what} {id_or_prefix!r}{advice}", field="id_or_prefix")
    try:
        trace = _read(files[found[0]])
    except _NewerFormatError as error:
        raise ConfigurationError(
            f"The trace {found[0]} has format {error.version}; this version reads up to {VERSION}. Upgrade lousho_ray to read it.",
            field="id_or_prefix",
        ) from None
    if trace is None:
        raise ConfigurationError(f"The trace {found[0]} in {folder} has no complete line.", field="id_or_prefix")
    return trace


# ------------------------------------------------------------------------------------------------------------------- files


class _NewerFormatError(Exception):
    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def _files(dir: Path) -> dict[str, list[Path]]:
    """The files of each trace by name: several processes that wrote one may have begun it on different days."""
    found: dict[str, list[Path]] = {}
    for day in days(dir):
        for path in day.iterdir():
            if path.suffix == SUFFIX:
                found.setdefault(path.name.removesuffix(SUFFIX), []).append(path)
    return found


def _written_at(paths: Iterable[Path]) -> float:
    """When the last line was written. A file that was removed since it was found has none."""
    times = [0.0]
    for path in paths:
        with suppress(FileNotFoundError):
            times.append(path.stat().st_mtime * 1000)
    return max(times)


def _read(paths: Iterable[Path]) -> Trace | None:
    """The trace of files; `None` when they have no complete line."""
    found = [entry for path in paths for entry in _entries(path)]
    if not found:
        return None
    # The sort keeps the order of the lines: what began at the same time stands as it ended.
    return Trace(found[0][0], tuple(sorted((span for _, span in found), key=lambda span: span.start_time)))


def _entries(path: Path) -> Iterator[tuple[str, Span]]:
    """The spans of a file with the id of their trace. What a process that was killed left half-written is skipped."""
    with suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            try:
                data = json.loads(line)
                version = data["v"]
                if version > VERSION:
                    raise _NewerFormatError(version)
                yield data["traceId"], _span(data)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue


def _span(data: dict[str, Any]) -> Span:
    status = data.get("status")
    return Span(
        id=data["id"],
        name=data["name"],
        kind=data["kind"],
        trace_id=data["traceId"],
        start_time=data["startTime"],
        parent_id=data.get("parentId"),
        attributes=dict(data["attributes"]),
        end_time=data["endTime"],
        status=None if status is None else SpanStatus(status["code"], status.get("message")),
    )


# ----------------------------------------------------------------------------------------------------------------- figures


def _summary(trace: Trace) -> TraceSummary:
    root, first = trace.root, trace.spans[0]
    top = first if root is None else root
    end = max(_end(span) for span in trace.spans) if root is None else _end(root)
    model_calls, read, written = _tokens(trace.spans)
    return TraceSummary(
        trace_id=trace.trace_id,
        agent=str(top.attributes.get(semconv.AGENT_NAME, top.name)),
        started_at=top.start_time,
        duration_ms=end - top.start_time,
        model_calls=model_calls,
        tool_calls=sum(_is(span, semconv.EXECUTE_TOOL) for span in trace.spans),
        input_tokens=read,
        output_tokens=written,
        cost_usd=None if root is None else root.attributes.get(semconv.COST_USD),
        status="incomplete" if root is None else "aborted" if root.status is None else root.status.code,
    )


def _tokens(spans: Iterable[Span]) -> tuple[int, int, int]:
    """How many model calls are among them, and their tokens in and out."""
    calls = [span.attributes for span in spans if _is(span, semconv.CHAT)]
    read, written = (sum(call.get(name, 0) for call in calls) for name in (semconv.INPUT_TOKENS, semconv.OUTPUT_TOKENS))
    return len(calls), read, written


def _is(span: Span, operation: str) -> bool:
    return span.attributes.get(semconv.OPERATION_NAME) == operation


def _end(span: Span) -> float:
    return span.start_time if span.end_time is None else span.end_time


# -------------------------------------------------------------------------------------------------------------------- tree


def _tree(trace: Trace) -> Iterator[str]:
    """A line that names the trace, then one a span, in columns: the tree, how long it took, and what else is known."""
    summary = trace.summary
    yield f"trace {trace.trace_id}  {_moment(summary.started_at)}  {summary.status}"
    lines = list(_branches(trace, trace.children(None), "", top=True))
    width = max((len(branch) for branch, _ in lines), default=0)
    times = [_duration(_end(span) - span.start_time) for _, span in lines]
    longest = max(map(len, times), default=0)
    for (branch, span), time in zip(lines, times, strict=True):
        yield "  ".join([branch.ljust(width), time.rjust(longest), *_facts(trace, span)])


def _branches(trace: Trace, spans: Sequence[Span], indent: str, *, top: bool = False) -> Iterator[tuple[str, Span]]:
    for span in spans:
        last = span is spans[-1]
        yield f"{indent}{'' if top else '└─ ' if last else '├─ '}{_plain(span.name)}", span
        yield from _branches(trace, trace.children(span), indent + ("" if top else "   " if last else "│  "))


def _facts(trace: Trace, span: Span) -> Iterator[str]:
    found = span.attributes
    calls, read, written = _tokens(_with_all_below(trace, span))
    if calls:
        yield f"{'~' if found.get(semconv.USAGE_ESTIMATED) else ''}{read:,} in / {written:,} out"
    if (cost := found.get(semconv.COST_USD)) is not None:
        yield f"${cost:,.4f}"
    if semconv.RETRY_COUNT in found:
        yield f"retries: {found[semconv.RETRY_COUNT]}"
    if semconv.RATE_LIMIT_WAIT_MS in found:
        yield f"waited {_duration(found[semconv.RATE_LIMIT_WAIT_MS])}"
    if semconv.FINISH_REASON in found:
        yield _plain(str(found[semconv.FINISH_REASON]))
    if span.status is not None and span.status.code == "error":
        message = _plain(span.status.message or "")
        shown = message if len(message) <= MOST_MESSAGE_CHARS else message[:MOST_MESSAGE_CHARS] + "…"
        yield f"{found.get(semconv.ERROR_TYPE, 'error')}: {shown}"


def _with_all_below(trace: Trace, span: Span) -> Iterator[Span]:
    yield span
    for child in trace.children(span):
        yield from _with_all_below(trace, child)


def _plain(text: str) -> str:
    """Text on one line without what would steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _moment(time_ms: float) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S}"


def _duration(time_ms: float) -> str:
    if time_ms < 1000:
        return f"{time_ms:.0f} ms"
    if time_ms < 60_000:
        return f"{time_ms / 1000:.2f} s"
    return f"{time_ms // 60_000:,.0f} min {time_ms % 60_000 / 1000:.0f} s"
