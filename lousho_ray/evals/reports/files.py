"""Reports that are files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from lousho_ray.errors import StorageError
from lousho_ray.evals.cases import parquet
from lousho_ray.evals.reports.html import html_report
from lousho_ray.evals.reports.junit import junit_report
from lousho_ray.evals.reports.markdown import markdown_report
from lousho_ray.evals.summary import Summary


def json_report(summary: Summary) -> str:
    """The summary and every structured result."""
    return json.dumps(summary.to_dict(), ensure_ascii=False, indent=2, default=str) + "\n"


REPORTS: Mapping[str, Callable[[Summary], str]] = {
    "json": json_report,
    "junit": junit_report,
    "markdown": markdown_report,
    "html": html_report,
}
"""The text of each kind of report, by the name of its option."""


def check_writable(path: Path) -> None:
    """Makes the folders of a report and opens it once, before anything is spent.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise StorageError(f"The report {path} cannot be written: {error}.", path=str(path)) from error


def write_report(kind: str, summary: Summary, path: Path) -> None:
    """Writes a report of the kind `json`, `junit`, `markdown`, `html` or `parquet`, replacing what is there.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the disk is full, or the file is out of reach.
    """
    try:
        if kind == "parquet":
            write_parquet(summary, path)
        else:
            path.write_text(REPORTS[kind](summary), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"The report {path} could not be written: {error}.", path=str(path)) from error


def write_parquet(summary: Summary, path: Path) -> None:
    """One row a case: what is a number or a text as a column, the rest as JSON.

    Raises:
        MissingDependencyError: `pyarrow` is not installed.
    """
    rows = []
    for record in summary.records:
        data = record.to_dict()
        data["costUsd"], data["totalTokens"] = record.cost_usd, record.tokens
        for key in ("assertions", "usage", "error", "transcript", "drift", "tags"):
            data[key] = json.dumps(data.get(key), ensure_ascii=False, default=str)
        rows.append(data)
    arrow = parquet()
    arrow.write_table(importlib.import_module("pyarrow").Table.from_pylist(rows), path)
