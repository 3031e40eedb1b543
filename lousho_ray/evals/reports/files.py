"""Reports that are files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from lousho_ray.errors import StorageError
from lousho_ray.evals.summary import Summary


def json_report(summary: Summary) -> str:
    """The summary and every structured result."""
    return json.dumps(summary.to_dict(), ensure_ascii=False, indent=2, default=str) + "\n"


REPORTS: Mapping[str, Callable[[Summary], str]] = {"json": json_report}
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
    """Writes a report of the kind `json`, `junit`, `markdown` or `html`, replacing what is there."""
    path.write_text(REPORTS[kind](summary), encoding="utf-8", errors="backslashreplace")
