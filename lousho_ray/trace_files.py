"""Spans as files: `file_trace_exporter()` writes one file a trace, a line for each finished span. `traces` reads them."""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from lousho_ray.errors import ConfigurationError
from lousho_ray.spans import Span, TraceExporter, now_ms

TRACES_DIR: Final = ".lousho/traces"
VERSION: Final = 1
SUFFIX: Final = ".jsonl"

log = logging.getLogger("lousho_ray")


def file_trace_exporter(dir: str | os.PathLike[str] = TRACES_DIR) -> TraceExporter:
    """Writes spans to `<dir>/<YYYY-MM-DD>/<trace id>.jsonl`: the local day on which the trace began, one line a finished span.

    Read them with `list_traces()` and `read_trace()`. A line is written as its span ends, with one append. Spans that are open when
    the process exits are ended as errors; of a process that is killed they are missing. Files hold what spans hold: no content
    unless `capture_content` is on. Only their owner may read them.

    Args:
        dir: The folder, made when the first span ends. One that cannot be written is one warning; runs go on.

    Raises:
        ConfigurationError: `dir` is no path.
    """
    return _FileExporter(_Writer(check_dir(dir)))


def check_dir(value: object) -> Path:
    """`value` as a path.

    Raises:
        ConfigurationError: It is none.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigurationError(f"dir= must be the path of a folder, such as {TRACES_DIR!r}; got {value!r}.", field="dir")
    return Path(value)


def file_name(trace_id: str) -> str:
    """The name of a trace's file without its suffix: the id. What a caller made up as an id leads to no other folder."""
    return quote(trace_id, safe="")


@dataclass(slots=True)
class _Trace:
    path: Path
    open: dict[str, Span] = field(default_factory=dict)


class _FileExporter:
    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        # Also at the exit of the interpreter, before its modules go.
        weakref.finalize(self, writer.close)

    def on_span_start(self, span: Span) -> None:
        self._writer.start(span)

    def on_span_end(self, span: Span) -> None:
        self._writer.end(span)


class _Writer:
    """The files of the traces that have open spans. It knows nothing of the exporter, which may be collected before it."""

    def __init__(self, dir: Path) -> None:
        self._dir = dir
        self._traces: dict[str, _Trace] = {}
        self._lock = threading.Lock()
        self._warned = False

    def start(self, span: Span) -> None:
        with self._lock:
            trace = self._traces.get(span.trace_id)
            if trace is None:
                trace = self._traces[span.trace_id] = _Trace(self._path(span))
            trace.open[span.id] = span

    def end(self, span: Span) -> None:
        with self._lock:
            trace = self._traces.get(span.trace_id)
            if trace is None or trace.open.pop(span.id, None) is None:
                return
            if not trace.open:
                del self._traces[span.trace_id]
        self._write(trace.path, span)

    def close(self) -> None:
        """Ends what is open, children first."""
        with self._lock:
            left, self._traces = self._traces, {}
        for trace in left.values():
            for span in reversed(trace.open.values()):
                ended = replace(span, attributes=dict(span.attributes), end_time=max(now_ms(), span.start_time))
                ended.refuse("_OTHER", "The process ended before it did.")
                self._write(trace.path, ended)

    def _path(self, span: Span) -> Path:
        """The file of a trace that has no open span here: new, unless this is a late span of one that has ended."""
        name = file_name(span.trace_id) + SUFFIX
        if span.parent_id is not None:
            with suppress(OSError):  # what keeps the folder from being read is told when it is written
                if found := sorted(path for day in days(self._dir) if (path := day / name).exists()):
                    return found[0]
        return self._dir / datetime.fromtimestamp(span.start_time / 1000).astimezone().date().isoformat() / name

    def _write(self, path: Path, span: Span) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            append(path, line_of(span))
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("Traces cannot be written to %s: %s. The runs go on; this is not said again.", self._dir, error)


def days(dir: Path) -> list[Path]:
    """The folders of days below `dir`, the newest first; none when it does not exist."""
    try:
        return sorted((entry for entry in dir.iterdir() if _is_day(entry)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_day(entry: Path) -> bool:
    try:
        datetime.strptime(entry.name, "%Y-%m-%d")  # noqa: DTZ007
    except ValueError:
        return False
    return entry.is_dir()


def append(path: Path, line: bytes) -> None:
    """Adds a line with one write, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        written = os.write(descriptor, line)
        if written < len(line):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)  # else the next line would be joined to this rest
            raise OSError(f"only {written} of {len(line)} bytes could be written")
    finally:
        os.close(descriptor)


def line_of(span: Span) -> bytes:
    """The line of a finished span."""
    found: dict[str, Any] = {"v": VERSION, "traceId": span.trace_id, "id": span.id}
    if span.parent_id is not None:
        found["parentId"] = span.parent_id
    found |= {"name": span.name, "kind": span.kind, "startTime": span.start_time, "endTime": span.end_time}
    found["attributes"] = span.attributes
    if span.status is not None:
        message = {} if span.status.message is None else {"message": span.status.message}
        found["status"] = {"code": span.status.code, **message}
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # half a character pair is written as JSON's escape of it
