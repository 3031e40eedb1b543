"""Eval files: which ones a run has, and what they define. A file is loaded by its path, as a fresh module."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lousho_ray.evals.case_run import describe
from lousho_ray.evals.cases import Case, cases_of
from lousho_ray.evals.definition import JUDGE_SUFFIXES, EvalDefinition, collecting, invalid
from lousho_ray.evals.records import case_key

PATTERNS = ("**/*.eval.py", "**/*_eval.py")
SKIPPED_FOLDERS = frozenset({".git", ".venv", "node_modules", "__pycache__"})
MODULE_PREFIX = "lousho_eval_file_"


@dataclass(frozen=True, slots=True)
class EvalFile:
    """A loaded file. `name` is its path relative to the project, `version` a hash of its text."""

    path: Path
    name: str
    version: str
    evals: tuple[EvalDefinition, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """One run of one case."""

    definition: EvalDefinition
    case: Case
    repeat: int
    key: str
    file: str


@dataclass(slots=True)
class Plan:
    """What a suite runs.

    `skipped` are evals that the tags left out, `load_errors` what could not be loaded, `versions` the hash of each file.
    """

    cases: list[PlannedCase] = field(default_factory=list)
    thresholds: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    load_errors: list[Mapping[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def find_files(patterns: Sequence[str], root: Path, *, judge: bool = False) -> list[Path]:
    """The eval files that the patterns name, sorted: globs (`**` crosses folders), files, or folders.

    Files that grade with a model are found with `judge`, and then only they.

    Raises:
        LoushoError: `LOUSHO_EVALS_INVALID`: none matches; the patterns are named.
    """
    wanted = list(patterns) or list(PATTERNS)
    found: set[Path] = set()
    for pattern in wanted:
        given = root / pattern
        if given.is_file():
            found.add(given)
        elif given.is_dir():
            found.update(path for path in _files(given) if _matches(path, given, PATTERNS))
        else:
            found.update(path for path in _files(root) if _matches(path, root, [pattern]))
    chosen = sorted(path for path in found if path.name.endswith(JUDGE_SUFFIXES) == judge)
    if not chosen:
        kind = "judge files" if judge else "eval files"
        left_out = len(found) - len(chosen)
        note = (
            f" ({left_out} {'other' if judge else 'judge'} files match, which {'--judge leaves out' if judge else 'need --judge'})"
        )
        raise invalid(f"No {kind} match {', '.join(wanted)} below {root}{note if left_out else ''}.")
    return chosen


def load_file(path: Path, root: Path) -> EvalFile:
    """Executes an eval file and takes what it defines.

    Raises:
        Exception: Whatever the file raised.
    """
    source = path.read_bytes()
    version = hashlib.sha256(source).hexdigest()[:16]
    shown = relative_name(path, root)
    name = MODULE_PREFIX + hashlib.sha256(shown.encode()).hexdigest()[:16]  # the same name in every process: classes travel
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look their module up
    with collecting(path) as found:
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return EvalFile(path, shown, version, tuple(found))


async def plan_suite(files: Sequence[Path], root: Path, tags: Sequence[str] = (), salt: str = "") -> Plan:
    """Loads files and datasets. What cannot be loaded is noted and the rest goes on. Another `salt` gives other keys."""
    plan = Plan()
    owners: dict[str, str] = {}
    for path in files:
        try:
            file = load_file(path, root)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the file is run here and may raise anything
            plan.load_errors.append({"file": relative_name(path, root), **describe(error)})
            continue
        plan.versions[file.name] = file.version
        for definition in file.evals:
            try:
                if definition.name in owners:
                    raise invalid(f"Eval {definition.name!r} is defined in {owners[definition.name]} already; rename one of them.")
                owners[definition.name] = file.name
                if tags and not set(tags) & set(definition.tags):
                    plan.skipped.append(definition.name)
                    continue
                await _plan_eval(plan, file, definition, salt)
            except (Exception, SystemExit) as error:
                plan.load_errors.append({"file": file.name, "eval": definition.name, **describe(error)})
    return plan


def relative_name(path: Path, root: Path) -> str:
    """A path as reports show it: relative to the project, also where it leads out of it."""
    return Path(os.path.relpath(path, root)).as_posix()


async def _plan_eval(plan: Plan, file: EvalFile, definition: EvalDefinition, salt: str) -> None:
    plan.thresholds[definition.name] = definition.threshold
    for case in await cases_of(definition):
        for repeat in range(definition.repeat):
            key = case_key(definition.name, case.name, case.value, repeat, file.version + salt)
            plan.cases.append(PlannedCase(definition, case, repeat, key, file.name))


def _files(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        yield from (Path(where, name) for name in sorted(names) if name.endswith(".py"))


def _matches(path: Path, root: Path, patterns: Sequence[str]) -> bool:
    """`**/` also matches no folder at all, as in shells and in `pathlib`."""
    name = path.relative_to(root).as_posix()
    return any(
        fnmatch.fnmatchcase(name, pattern) or (pattern.startswith("**/") and fnmatch.fnmatchcase(name, pattern[3:]))
        for pattern in patterns
    )
