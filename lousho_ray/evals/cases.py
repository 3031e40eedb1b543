"""Datasets: from what `cases=` was given to named cases."""

from __future__ import annotations

import asyncio
import csv
import importlib
import json
import re
import sys
from collections.abc import AsyncIterable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lousho_ray.errors import MissingDependencyError
from lousho_ray.evals.definition import EvalDefinition, invalid

SLUG_CHARS = 80
READERS = (".json", ".jsonl", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Case:
    """One case of an eval. An eval without a dataset has one, `default`, whose value is `None`."""

    name: str
    value: Any = None


DEFAULT = Case("default")


async def cases_of(definition: EvalDefinition) -> list[Case]:
    """The cases of an eval, in the order of its dataset.

    Raises:
        LoushoError: `LOUSHO_EVALS_INVALID`: a dataset that cannot be read, is empty, or has a name twice.
    """
    if definition.cases is None:
        return [DEFAULT]
    source = definition.cases
    if isinstance(source, str | Path):
        base = Path.cwd() if definition.file is None else definition.file.parent
        source = read_cases(base / source)
    if hasattr(source, "iter_rows"):
        items = await asyncio.to_thread(_rows, source, definition.file)
    elif isinstance(source, AsyncIterable):
        items = [item async for item in source]
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        items = list(source)
    else:
        raise invalid(
            f"The cases of eval {definition.name!r} must be a list, an iterable, a dataset or a path, not {type(source).__name__}."
        )
    if not items:
        raise invalid(f"Eval {definition.name!r} has no cases: its dataset is empty.")
    return _named(definition.name, items)


def _rows(dataset: Any, file: Path | None) -> list[Any]:
    """The rows of a Ray dataset. Blocks: what makes them may run for a while on a cluster.

    Functions of the eval file that the dataset maps with go there as they are: Ray's own workers do not load the file.
    """
    loaded: dict[str, Any] = dict(sys.modules)
    modules = [module for module in loaded.values() if file and getattr(module, "__file__", None) == str(file)]
    with ExitStack() as stack:
        if "ray.cloudpickle" in loaded:
            pickler = loaded["ray.cloudpickle"]
            for module in modules:
                pickler.register_pickle_by_value(module)
                stack.callback(pickler.unregister_pickle_by_value, module)
        return list(dataset.iter_rows())


def slug(name: str) -> str:
    """A name as part of a file name: lower case, runs of other characters than letters and digits as one dash, at most 80."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:SLUG_CHARS].strip("-") or "unnamed"


def check_slugs(what: str, names: Iterable[str]) -> None:
    """Refuses names that would be one file name.

    Raises:
        LoushoError: `LOUSHO_EVALS_INVALID`, naming both.
    """
    taken: dict[str, str] = {}
    for name in names:
        other = taken.setdefault(slug(name), name)
        if other != name:
            raise invalid(f"{what} {other!r} and {name!r} have one file name, {slug(name)!r}: rename or `label` one of them.")


def read_cases(path: Path) -> list[Any]:
    """The items of a JSON array, a JSON-lines, CSV or Parquet file; rows of the last two are dicts.

    Raises:
        LoushoError: `LOUSHO_EVALS_INVALID`, naming the file (and line).
        MissingDependencyError: Parquet without `pyarrow`.
    """
    try:
        match path.suffix.lower():
            case ".json":
                items = json.loads(path.read_text("utf-8"))
                if not isinstance(items, list):
                    raise invalid(f"{path} must hold a JSON array of cases.")
                return items
            case ".jsonl":
                with path.open(encoding="utf-8") as file:
                    return [_json_line(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
            case ".csv":
                with path.open(encoding="utf-8-sig", newline="") as file:
                    return _csv_rows(path, csv.DictReader(file, strict=True))
            case ".parquet":
                return parquet().read_table(path).to_pylist()  # type: ignore[no-any-return]
    except (OSError, ValueError, csv.Error) as error:
        raise invalid(f"The cases in {path} cannot be read: {error}.") from error
    raise invalid(f"Cases are read from {', '.join(READERS)} files; got {path}.")


def _csv_rows(path: Path, reader: csv.DictReader[str]) -> list[dict[str, str]]:
    """The rows by their columns. A row may be short (its last columns are `None`), but not longer than the header."""
    names = list(reader.fieldnames or ())
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise invalid(f"{path} has the column {twice[0]!r} twice: rename one of them in its first line.")
    rows: list[dict[str, str]] = []
    for row in reader:
        if None in row:
            raise invalid(
                f"Line {reader.line_num} of {path} has more values than the {len(names)} columns {', '.join(names)}: "
                "put a value that holds a comma in double quotes."
            )
        rows.append(row)
    return rows


def _json_line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise invalid(f"Line {number} of {path} is not JSON: {error}.") from error


def parquet() -> Any:
    """The Parquet module of `pyarrow`."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingDependencyError(
            "Reading and writing Parquet needs pyarrow.", package="pyarrow", install_command='pip install "lousho-ray[parquet]"'
        ) from error


def _named(eval_name: str, items: list[Any]) -> list[Case]:
    cases: list[Case] = []
    names: dict[str, int] = {}
    for number, item in enumerate(items, 1):
        name = _name_of(item) or f"case-{number}"
        if name in names:
            raise invalid(
                f"Eval {eval_name!r} has two cases with the name {name!r} (numbers {names[name]} and {number}); "
                "names key reports and cassettes: give each a `label` of its own."
            )
        names[name] = number
        cases.append(Case(name, item))
    return cases


def _name_of(item: Any) -> str | None:
    if isinstance(item, str):
        return item if item.strip() else None
    for key in ("label", "name", "input"):
        value = item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)
        if value is not None and not callable(value) and str(value).strip():
            return str(value)
    return None
