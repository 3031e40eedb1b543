"""Exporters made of others, and the one of each process."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import threading
from types import FunctionType
from typing import Any

import cloudpickle
import pytest

from lousho_ray import ConfigurationError, MockProvider, create_agent
from lousho_ray.exporters import combine_exporters, part_of_caller, part_of_each_process, worker_local
from lousho_ray.spans import Span, TraceExporter, is_worker_local, with_span


class Recorder:
    """Keeps the names of what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_span_start(self, span: Span) -> None:
        self.told.append(f"start {span.name}")

    def on_span_end(self, span: Span) -> None:
        self.told.append(f"end {span.name}")


class Broken:
    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self.error = error

    def on_span_start(self, span: Span) -> None:
        raise self.error("no luck")

    def on_span_end(self, span: Span) -> None:
        raise self.error("no luck")


MADE: list[Recorder] = []


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    MADE.clear()


def make_recorder() -> TraceExporter:
    MADE.append(Recorder())
    return MADE[-1]


def trace(exporter: TraceExporter, name: str = "job") -> None:
    with_span(exporter, name, {}, lambda span: None)


# ----------------------------------------------------------------------------------------------------------------- several


async def test_each_of_several_exporters_gets_every_span() -> None:
    # OBS-42
    a, b = Recorder(), Recorder()
    await create_agent(provider=MockProvider(), exporter=combine_exporters(a, b), runtime="local", name="clerk").send("Hi.")
    assert a.told == b.told
    assert (a.told[0], a.told[-1]) == ("start invoke_agent clerk", "end invoke_agent clerk")


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_one_that_raises_does_not_keep_spans_from_the_others(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    # OBS-42, OBS-05
    a, b = Recorder(), Recorder()
    exporter = combine_exporters(a, Broken(error), b, Broken(error))
    with caplog.at_level(logging.ERROR, "lousho_ray"):
        for _ in range(2):
            trace(exporter)
    assert a.told == b.told == ["start job", "end job"] * 2
    assert len(caplog.records) == 2, "once for each of the two"


def test_combinations_can_be_combined() -> None:
    a, b, c = Recorder(), Recorder(), Recorder()
    trace(combine_exporters(combine_exporters(a, b), c))
    assert a.told == b.told == c.told == ["start job", "end job"]


@pytest.mark.parametrize(
    ("exporters", "field"),
    [((), "exporters"), ((Recorder(), object()), "exporters[1]"), ((None,), "exporters[0]"), ((Recorder,), "exporters[0]")],
)
def test_what_is_combined_is_checked(exporters: Any, field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        combine_exporters(*exporters)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", field)


def test_of_a_combination_only_what_works_per_process_travels() -> None:
    # OBS-40, OBS-42
    here, local = Recorder(), worker_local(lambda: make_recorder())
    mixed = combine_exporters(here, combine_exporters(local, here))
    assert is_worker_local(combine_exporters(local, local))
    assert not is_worker_local(mixed)
    travels, stays = part_of_each_process(mixed), part_of_caller(mixed)
    assert travels is not None
    assert stays is not None
    copy = cloudpickle.loads(cloudpickle.dumps(travels))
    assert is_worker_local(copy)
    trace(copy)
    (made,) = MADE
    assert (made.told, here.told) == (["start job", "end job"], [])
    trace(stays)
    assert (len(made.told), here.told) == (2, ["start job", "start job", "end job", "end job"])


@pytest.mark.parametrize(
    ("exporter", "travels", "stays"), [(None, False, False), (Recorder(), False, True), (worker_local(list), True, False)]
)
def test_a_single_exporter_travels_or_stays(exporter: Any, travels: bool, stays: bool) -> None:
    # OBS-40
    assert (part_of_each_process(exporter) is not None, part_of_caller(exporter) is not None) == (travels, stays)


# ------------------------------------------------------------------------------------------------------- one in each process


def test_the_factory_is_called_once_in_a_process_at_its_first_span(monkeypatch: pytest.MonkeyPatch) -> None:
    # OBS-40
    exporter = worker_local(lambda: make_recorder())
    assert is_worker_local(exporter)
    assert MADE == []
    copies = [cloudpickle.loads(cloudpickle.dumps(exporter)) for _ in range(3)]
    for copy in (exporter, *copies):
        trace(copy)
    (made,) = MADE
    assert made.told == ["start job", "end job"] * 4


def test_spans_of_several_threads_share_the_exporter_of_the_process() -> None:
    # OBS-40
    def make_slowly() -> TraceExporter:
        threading.Event().wait(0.02)  # so that all others come while the first is at it
        return make_recorder()

    exporter = worker_local(make_slowly)
    ready = threading.Barrier(8)

    def run() -> None:
        ready.wait()
        trace(exporter)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(made.told) for made in MADE] == [16]


def test_a_factory_of_a_module_stands_for_one_exporter_and_others_for_one_a_call() -> None:
    trace(worker_local(make_recorder))
    trace(worker_local(make_recorder))
    known = len(MADE)
    assert known <= 1, "another test of this process may have made it"
    factory = lambda: make_recorder()  # noqa: E731
    trace(worker_local(factory))
    trace(worker_local(factory))
    assert len(MADE) == known + 2
    scripts = FunctionType(make_recorder.__code__, globals(), "make")
    scripts.__module__, scripts.__qualname__ = "__main__", "make"  # many scripts have one of that name
    trace(worker_local(scripts))
    trace(worker_local(scripts))
    assert len(MADE) == known + 4


@pytest.mark.parametrize("factory", [lambda: object(), lambda: 1 // 0])
def test_a_factory_that_fails_is_said_once_and_spans_then_go_nowhere(factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    # OBS-05
    exporter = worker_local(factory)
    with caplog.at_level(logging.ERROR, "lousho_ray"):
        for copy in (exporter, cloudpickle.loads(cloudpickle.dumps(exporter))):
            trace(copy)
    assert len(caplog.records) == 1


def test_another_process_makes_its_own() -> None:
    # OBS-40
    exporter = worker_local(make_recorder)
    trace(exporter)
    code = """
import pickle, sys
exporter = pickle.loads(bytes.fromhex(sys.argv[1]))
from lousho_ray.spans import with_span
from tests.unit import test_exporters
with_span(exporter, "there", {}, lambda span: None)
assert [made.told for made in test_exporters.MADE] == [["start there", "end there"]]
"""
    command = [sys.executable, "-c", code, pickle.dumps(exporter).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("factory", [None, Recorder()])
def test_the_factory_is_checked(factory: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        worker_local(factory)
    assert caught.value.field == "factory"
