"""The pytest plugin: each case of an eval file is a test item, and fixtures for tests of agents.

Soft failures are warnings; every case also appends its line to the file that `LOUSHO_EVAL_RESULTS` names. Judge files are left to
`lousho eval --judge`.
"""

from __future__ import annotations

import asyncio
import fnmatch
import importlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RESULTS_VARIABLE = "LOUSHO_EVAL_RESULTS"
PATTERNS = ("*.eval.py", "*_eval.py")
JUDGE_SUFFIXES = (".judge.eval.py", "_judge_eval.py")
MARKER_NAME = re.compile(r"\W")


class EvalWarning(UserWarning):
    """A soft assertion of an eval failed."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lousho_eval(tag): a case of an eval; each tag of the eval is a marker, too")
    config.addinivalue_line("markers", "ray_local: runs on one local Ray, which all tests of the session share")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("ray_local") is not None:
            item.fixturenames.insert(0, "lousho_local_ray")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    name = file_path.name
    if name.endswith(JUDGE_SUFFIXES) or not any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS):
        return None
    collector: pytest.Collector = EvalFileCollector.from_parent(parent, path=file_path)
    return collector


class EvalFileCollector(pytest.File):
    """An eval file."""

    def collect(self) -> Iterator[pytest.Item]:
        from lousho_ray.evals.loading import plan_suite

        plan = asyncio.run(plan_suite([self.path], self.config.rootpath))
        for error in plan.load_errors:
            raise self.CollectError(f"{error['name']}: {error['message']}\n{error.get('traceback', '')}")
        for planned in plan.cases:
            repeat = f"#{planned.repeat + 1}" if planned.repeat else ""
            name = f"{planned.definition.name}[{planned.case.name}{repeat}]"
            yield EvalItem.from_parent(self, name=name, planned=planned)


class EvalItem(pytest.Item):
    """One case."""

    def __init__(self, *, planned: Any, **options: Any) -> None:
        super().__init__(**options)
        self.planned = planned
        self.add_marker(pytest.mark.lousho_eval(*planned.definition.tags))
        for tag in planned.definition.tags:
            marker = MARKER_NAME.sub("_", tag)
            self.config.addinivalue_line("markers", f"{marker}: a tag of an eval")
            self.add_marker(getattr(pytest.mark, marker))

    def runtest(self) -> None:
        record = asyncio.run(self._run())
        self._append(record)
        for item in record.failed_softs:
            warnings.warn(EvalWarning(f"{record.title} {item.name}: {item.message}"), stacklevel=2)
        if record.status != "passed":
            raise EvalFailed(record)

    async def _run(self) -> Any:
        from lousho_ray.evals.cassettes import SuiteCassettes
        from lousho_ray.evals.runner import CaseSettings, LocalExecutor

        with SuiteCassettes("auto") as tapes:
            executor = LocalExecutor(CaseSettings(cassettes=tapes if os.environ.get("CI") else None))
            try:
                return (await executor.run(self.planned)).record
            finally:
                await executor.close()

    def _append(self, record: Any) -> None:
        from lousho_ray.evals.results import ResultsWriter

        named = os.environ.get(RESULTS_VARIABLE, "").strip()
        if named:
            writer = ResultsWriter(Path(named))
            writer.open()
            writer.write_record(record)
            writer.close()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, EvalFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class EvalFailed(Exception):  # noqa: N818 - what pytest shows is its text
    """A case did not pass: every failed gate, or what it raised."""

    def __init__(self, record: Any) -> None:
        lines = [f"{item.name}: {item.message}" for item in record.failed_gates]
        if record.error is not None:
            lines.append(f"{record.error['name']}: {record.error['message']}")
            lines.append(record.error.get("traceback", ""))
        super().__init__("\n".join(line for line in [f"{record.title} {record.status}", *lines] if line))


@pytest.fixture
def lousho_mock_model() -> Callable[..., Any]:
    """`lousho_ray.testing.mock_model`."""
    from lousho_ray.testing import mock_model

    return mock_model


@pytest.fixture(scope="session")
def lousho_local_ray() -> Iterator[None]:
    """A local Ray of two CPUs, unless this process is in a cluster already or `RAY_ADDRESS` names one."""
    with importlib.import_module("lousho_ray.actors.cluster").local_cluster(2):
        yield


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray_local)])
def lousho_runtime(request: pytest.FixtureRequest) -> str:
    """A value of `create_agent(runtime=)`: the test runs once in this process and once on Ray."""
    return str(request.param)


@pytest.fixture
def lousho_clock() -> Any:
    """A `FakeClock`."""
    from lousho_ray.testing import FakeClock

    return FakeClock()


@pytest.fixture
def lousho_store() -> Iterator[Any]:
    """A store in memory of the test's own."""
    from lousho_ray.stores.memory import memory_store

    store = memory_store()
    yield store
    store.close()
