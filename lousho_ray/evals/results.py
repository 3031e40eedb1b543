"""The results file: JSON lines, one for each case as it ends, and what a later run takes from them.

A line is written with one `write` as soon as its case has ended, so a process that is killed loses only cases that ran. The disk is
flushed (`fsync`) once a second and at the end: a machine that loses power loses at most the last second. A line that was cut off is
dropped when the file is opened again. One process writes a file at a time.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from lousho_ray.errors import StorageError
from lousho_ray.evals.records import CaseRecord, line_of
from lousho_ray.usage import Spend

RESULTS_VARIABLE = "LOUSHO_EVAL_RESULTS"
FLUSH_S = 1.0
VERSION = 1
_LINE_START = b'{"type":'


@dataclass(slots=True)
class Results:
    """What a results file holds, and the cases that have ended since it was read.

    `spent` is what those in the file cost, `damaged` the numbers of lines that could not be read.
    """

    suite: Mapping[str, Any] = field(default_factory=dict)
    records: dict[str, CaseRecord] = field(default_factory=dict)
    ended: bool = False
    spent: Spend = field(default_factory=Spend)
    damaged: list[int] = field(default_factory=list)

    def finished(self, keys: Iterable[str]) -> dict[str, CaseRecord]:
        """The cases among `keys` that need not be run again."""
        wanted = set(keys)
        return {key: record for key, record in self.records.items() if key in wanted and record.status != "outage"}

    def read(self, record: CaseRecord) -> None:
        """Takes a line of the file, and what it cost."""
        if record.usage:
            self.spent += _spend(record.usage)
        self.take(record)

    def take(self, record: CaseRecord) -> None:
        """Takes how a case ended: the newest record counts, but what finished is never undone by an outage."""
        known = self.records.get(record.key)
        if known is None or known.status == "outage" or record.status != "outage":
            self.records[record.key] = record


def _spend(usage: Mapping[str, Any]) -> Spend:
    cost = usage.get("costUsd")
    known = None if cost is None else Decimal(str(cost))
    return Spend(usage.get("inputTokens", 0), usage.get("outputTokens", 0), known, usage.get("modelCalls", 0))


def read_results(path: Path) -> Results:
    """Reads a results file; one that does not exist is empty. Lines that are damaged are left out, and counted.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: a newer version wrote it.
    """
    results = Results()
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return results
    with file:
        for number, line in enumerate(file, 1):
            try:
                data = json.loads(line)
                kind = data["type"]
                if kind == "suite":
                    _check_version(path, data)
                    if data.get("fresh"):
                        results = Results()
                    results.suite, results.ended = data, False
                elif kind == "end":
                    results.ended = True
                elif kind == "case":
                    results.read(CaseRecord.from_dict(data))
            except (ValueError, KeyError, TypeError, AttributeError):
                results.damaged.append(number)
    return results


def _check_version(path: Path, suite: Mapping[str, Any]) -> None:
    if int(suite.get("version", VERSION)) > VERSION:
        raise StorageError(
            f"The results file {path} was written by a newer version of lousho-ray (format {suite['version']}, this one reads "
            f"up to {VERSION}): update lousho-ray, or name another file with --results.",
            path=str(path),
        )


class ResultsWriter:
    """Appends to a results file. Use it as an async context manager.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the file cannot be written, or another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._dirty = False

    def open(self) -> None:
        """Opens the file for appending, alone, and drops a line that was cut off."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise StorageError(f"The results file {self.path} cannot be written: {error}.", path=str(self.path)) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise StorageError(
                f"The results file {self.path} is being written by another run; wait for it, or name another file with --results.",
                path=str(self.path),
            ) from error
        if not _is_ours(file):
            file.close()
            raise StorageError(
                f"The file {self.path} is there and holds no eval results; it is left as it is. Name another file with --results "
                f"or {RESULTS_VARIABLE}.",
                path=str(self.path),
            )
        _drop_cut_off_line(file)
        self._file = file

    def write(self, data: Mapping[str, Any]) -> None:
        """Appends one line."""
        self.write_line(line_of(data))

    def write_line(self, line: bytes) -> None:
        """Appends a line that has been made already.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: the disk is full, or the file is out of reach.
        """
        assert self._file is not None
        try:
            written = self._file.write(line)
            while written is not None and written < len(line):
                line = line[written:]
                written = self._file.write(line)
        except OSError as error:
            raise StorageError(
                f"The results file {self.path} could not be written: {error}. What is in it is kept: when that is mended, the same "
                "command runs the rest.",
                path=str(self.path),
            ) from error
        self._dirty = True

    def write_record(self, record: CaseRecord) -> None:
        self.write(record.to_dict())

    async def __aenter__(self) -> ResultsWriter:
        if self._file is None:
            self.open()
        self._flusher = asyncio.create_task(self._flush_now_and_then())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.wait({self._flusher})
        self.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            if self._dirty:
                os.fsync(file.fileno())
            file.close()

    async def _flush_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._dirty and self._file is not None:
                self._dirty = False
                await asyncio.to_thread(os.fsync, self._file.fileno())


def _is_ours(file: IO[bytes]) -> bool:
    """Whether a file is empty or has a line of results; not only the first line, which may be damaged."""
    file.seek(0)
    lines = io.BufferedReader(cast("io.RawIOBase", file))
    empty = not lines.peek(1)
    ours = empty or any(line.startswith(_LINE_START) or _LINE_START.startswith(line) for line in lines)
    lines.detach()
    return ours


def _drop_cut_off_line(file: IO[bytes]) -> None:
    """A process that was killed in a write leaves a line without its end."""
    end = file.seek(0, os.SEEK_END)
    position = end
    while position > 0:
        start = max(0, position - 65_536)
        file.seek(start)
        chunk = file.read(position - start)
        newline = chunk.rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position < end:
        file.truncate(position)
    file.seek(0, os.SEEK_END)
