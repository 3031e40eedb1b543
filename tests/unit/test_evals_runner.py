"""A suite: several cases at once, results as they end, what a second run takes from the first."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import StorageError
from lousho_ray.evals.progress import ProgressDisplay, SuiteProgress
from lousho_ray.evals.records import CaseRecord
from lousho_ray.evals.results import ResultsWriter, read_results
from lousho_ray.evals.suite import Suite, SuiteOptions
from tests.unit.evals_support import console, printed, run_body, run_suite, write_evals

FLAGGED = """
from pathlib import Path
flags = Path(__file__).parent

async def test(t, case):
    with (flags / "ran.txt").open("a") as file:
        file.write(case + "\\n")
    await t.send(case)
    t.check("reply", t.reply, equals("ok"))
    if case == "wrong":
        t.check("right", False, equals(True))
    if case == "raises":
        raise KeyError("x")

class Down(Exception):
    status = 503

def agent(case):
    return create_agent(provider=mock_model([Down("down") if case == "down" and (flags / "down").exists() else "ok"]))
"""


def ran(folder: Path) -> list[str]:
    path = folder / "ran.txt"
    found = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def statuses(outcome: Any) -> dict[str, str]:
    return {record.case: record.status for record in outcome.summary.records}


async def test_each_case_appends_a_line_as_it_ends_and_the_summary_is_built_from_them(tmp_path: Path) -> None:
    # EVAL-25
    body = FLAGGED + "define_eval(name='e', agent=agent, test=test, cases=['a', 'wrong', 'raises'])"
    outcome = await run_body(tmp_path, body, results=tmp_path / "out" / "r.jsonl")
    lines = lines_of(outcome.results)
    assert [line["type"] for line in lines] == ["suite", "case", "case", "case", "end"]
    assert [CaseRecord.from_dict(line) for line in lines[1:4]] == sorted(
        outcome.summary.records, key=lambda record: ["a", "wrong", "raises"].index(record.case)
    )
    assert list(read_results(outcome.results).records.values()) == [CaseRecord.from_dict(line) for line in lines[1:4]]
    assert statuses(outcome) == {"a": "passed", "wrong": "failed", "raises": "error"}
    assert (outcome.summary.evals[0].rate.total, outcome.exit_code) == (3, 1)  # E01: errors stay in the denominator


async def test_the_same_command_runs_only_what_is_missing_or_was_no_fault_of_the_agent(tmp_path: Path) -> None:
    # E02, E04
    body = FLAGGED + "define_eval(name='e', agent=agent, test=test, cases=['a', 'wrong', 'raises', 'down'])"
    (tmp_path / "down").touch()
    write_evals(tmp_path, body)
    file = tmp_path / "r.jsonl"
    first = await run_suite(tmp_path, results=file)
    assert statuses(first)["down"] == "outage"
    assert (ran(tmp_path), first.exit_code) == (["a", "wrong", "raises", "down"], 1)
    (tmp_path / "down").unlink()
    second = await run_suite(tmp_path, results=file)
    assert (ran(tmp_path), statuses(second)["down"]) == (["down"], "passed")
    screen = console()
    third = await run_suite(tmp_path, screen, results=file)
    assert (ran(tmp_path), statuses(third)) == ([], statuses(second))
    assert "4 of 4 cases have their results" in printed(screen)
    assert len((await run_suite(tmp_path, results=file, fresh=True)).summary.records) == 4
    assert len(ran(tmp_path)) == 4
    assert len(read_results(file).records) == 4


async def test_a_changed_case_or_file_is_run_again(tmp_path: Path) -> None:
    body = FLAGGED + "define_eval(name='e', agent=agent, test=test, cases=['a', 'b'])"
    file = tmp_path / "r.jsonl"
    await run_body(tmp_path, body, results=file)
    ran(tmp_path)
    outcome = await run_body(tmp_path, body + "\n# changed", results=file)
    assert (ran(tmp_path), len(outcome.summary.records)) == (["a", "b"], 2)


async def test_without_a_file_an_unfinished_run_is_continued_and_a_finished_one_is_not(tmp_path: Path) -> None:
    body = FLAGGED + "define_eval(name='e', agent=agent, test=test, cases=['a', 'b', 'c'])"
    write_evals(tmp_path, body)
    suite = Suite(SuiteOptions(root=tmp_path), console())

    suite.on_start = lambda runner: setattr(runner, "_on_end", _then(runner._on_end, suite.stop))
    first = await suite.run()
    assert (first.exit_code, first.interrupted, first.summary.not_run) == (130, True, 2)
    assert ran(tmp_path) == ["a"]
    second = await run_suite(tmp_path)
    assert (second.results, ran(tmp_path), second.exit_code) == (first.results, ["b", "c"], 0)
    third = await run_suite(tmp_path)
    assert third.results != first.results
    assert ran(tmp_path) == ["a", "b", "c"]


def _then(first: Any, second: Any) -> Any:
    def both(*args: Any) -> None:
        first(*args)
        second()

    return both


async def test_so_many_cases_run_at_once(tmp_path: Path) -> None:
    body = """
here, most = 0, 0
enough = asyncio.Event()

async def test(t, case):
    global here, most
    here += 1
    most = max(most, here)
    if here == 3:
        enough.set()
    await enough.wait()
    here -= 1
    t.check("at once", most, at_most(3))

define_eval(name="e", agent=says("x"), test=test, cases=range(9))
"""
    assert (await run_body(tmp_path, body, concurrency=3)).exit_code == 0


async def test_a_case_over_its_time_is_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    # LES-39, E04
    body = """
ended = []

async def test(t, case):
    if case == 1:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(case)
    if case == 2:
        t.check("awaited", ended, equals([1]))

define_eval(name="e", agent=says("x"), test=test, cases=[0, 1, 2], timeout_ms=50)
define_eval(name="f", agent=says("x"), test=lambda t: asyncio.Event().wait())
"""
    outcome = await run_body(tmp_path, body, timeout_ms=60)
    assert [record.status for record in outcome.summary.records] == ["passed", "error", "passed", "error"]
    said = outcome.summary.records[1].error, outcome.summary.records[3].error
    assert [error["code"] for error in said if error] == ["LOUSHO_OPERATION_TIMEOUT"] * 2
    assert ["50 ms" in str(said[0]), "60 ms" in str(said[1])] == [True, True]


async def test_cases_do_not_start_in_step(tmp_path: Path) -> None:
    body = """
seen = []

async def model(request):
    seen.append("sent")
    while len(seen) < 6:
        await asyncio.sleep(0)
    return "x"

def agent(case):
    seen.append("started")
    return create_agent(provider=mock_model([model]))

async def test(t, case):
    await t.send("x")
    t.check("order", seen[:6], equals(["started", "sent"] * 3))

define_eval(name="e", agent=agent, test=test, cases=range(3))
"""
    outcome = await run_body(tmp_path, body, concurrency=3)
    assert outcome.exit_code == 0, [record.assertions for record in outcome.summary.records]


async def test_a_suite_that_is_stopped_at_its_start_starts_no_more(tmp_path: Path) -> None:
    write_evals(tmp_path, "define_eval(name='e', agent=says('x'), test=lambda t, case: asyncio.Event().wait(), cases=range(9))")
    suite = Suite(SuiteOptions(root=tmp_path, concurrency=9), console())
    suite.on_start = lambda runner: asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(suite.stop))
    outcome = await suite.run()
    assert outcome.exit_code == 130
    assert len(outcome.summary.records) + outcome.summary.not_run == 9
    assert outcome.summary.not_run > 0


async def test_a_stopped_suite_waits_for_its_cases_and_keeps_what_has_ended(tmp_path: Path) -> None:
    body = """
under_way = []

async def test(t, case):
    await t.send("x")
    under_way.append(case)
    while case > 1 or len(under_way) < 4:
        await asyncio.sleep(0)

define_eval(name="e", agent=says("x"), test=test, cases=range(5))
"""
    write_evals(tmp_path, body)
    suite = Suite(SuiteOptions(root=tmp_path, concurrency=4), console())
    ended: list[Any] = []

    def watch(runner: Any) -> None:
        keep = runner._on_end

        def kept(record: Any) -> None:
            keep(record)
            ended.append(record)
            if len(ended) == 2:
                asyncio.get_running_loop().call_soon(suite.stop)

        runner._on_end = kept

    suite.on_start = watch
    outcome = await suite.run()
    assert [record.status for record in outcome.summary.records].count("passed") == 2
    assert {record.status for record in outcome.summary.records} == {"passed", "outage"}
    assert outcome.exit_code == 130
    spent = read_results(outcome.results).spent
    assert spent.calls >= 4  # what a stopped case had spent is in the books


async def test_one_process_writes_a_results_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    async with ResultsWriter(path):
        with pytest.raises(StorageError, match="another run"):
            ResultsWriter(path).open()
    with pytest.raises(StorageError, match="cannot be written"):
        ResultsWriter(Path("/proc/none/r.jsonl")).open()


async def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    whole = '{"type":"suite","version":1}\n'
    path.write_text(whole + '{"type":"case","key":"k' + "x" * 200_000)
    async with ResultsWriter(path) as writer:
        writer.write({"type": "end", "text": "ü\ud800"})
    assert path.read_text().splitlines()[0] == whole.strip()
    assert read_results(path).ended
    path.write_text('{"type":"no newline at all')
    async with ResultsWriter(path) as writer:
        writer.write({"type": "end"})
    assert lines_of(path) == [{"type": "end"}]


async def test_what_finished_is_never_undone_by_a_later_outage(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record = CaseRecord("k", "e", "c", 0, "f", "passed", usage={"modelCalls": 1, "costUsd": "0.5"})
    async with ResultsWriter(path) as writer:
        writer.write_record(record)
        writer.write_record(CaseRecord("k", "e", "c", 0, "f", "outage", usage={"modelCalls": 1, "costUsd": "0.25"}))
    results = read_results(path)
    assert results.records["k"] == record
    assert (results.spent.calls, results.spent.cost) == (2, 0.75)


async def test_progress_counts_and_tells_rate_cost_and_time_left() -> None:
    progress = SuiteProgress(10, earlier=2, started=0.0)
    usage = {"modelCalls": 1, "costUsd": "0.25", "totalTokens": 7}
    for status in ("passed", "failed", "error", "outage"):
        progress.take(CaseRecord("k", "e", "c", 0, "f", status, usage=usage))  # type: ignore[arg-type]
    progress.running = 1
    line = progress.line(now=2.0)
    assert line == (
        "6/10 done, 1 passed, 1 failed, 1 errors, 1 not finished, 1 running, 2 of an earlier run, $1.0000, 2.0/s, 0:02 left"
    )
    progress.take(CaseRecord("k", "e", "c", 0, "f", "passed", usage={"modelCalls": 1}))
    assert "cost unknown" in progress.line(now=2.0)


@pytest.mark.parametrize("live", [True, False])
async def test_progress_is_drawn_in_a_terminal_and_printed_elsewhere(live: bool) -> None:
    screen, progress = console(), SuiteProgress(1)
    async with ProgressDisplay(progress, screen, live=live) as display:
        record = CaseRecord("k", "e", "[bold]c", 0, "f", "error", error={"name": "E", "message": "broke\nbadly"})
        progress.take(record)
        display.ended(record)
    assert "error: e[[bold]c]: broke" in printed(screen)
    assert "1/1 done" in printed(screen)


async def test_records_hold_paths_relative_to_the_project(tmp_path: Path) -> None:
    # LES-44
    write_evals(tmp_path, "define_eval(name='e', agent=says('x'), test=lambda t: 1 / 0)", "deep/er/some.eval.py")
    outcome = await run_suite(tmp_path)
    assert outcome.summary.records[0].file == os.path.join("deep", "er", "some.eval.py")


async def test_while_cases_run_python_looks_for_garbage_less_often(tmp_path: Path) -> None:
    before = gc.get_threshold()
    body = """
    import gc
    async def test(t):
        t.check("threshold", gc.get_threshold()[0], at_least(20_000))
    define_eval(name="e", agent=says("x"), test=test)
    """
    assert (await run_body(tmp_path, body)).exit_code == 0
    assert gc.get_threshold() == before


async def test_a_case_that_has_ended_leaves_no_garbage_behind(tmp_path: Path) -> None:
    body = """
    agent = create_agent(provider=mock_model(["Hi"] * 500))

    async def test(t, case):
        await t.send("Hello")
        t.check("reply", t.reply, equals("Hi"))

    define_eval(name="e", agent=agent, test=test, cases=[{"label": str(number)} for number in range(%d)])
    """
    await run_body(tmp_path / "warm", body % 5, concurrency=4)
    found: list[int] = []
    for count in (50, 250):
        gc.collect()
        gc.disable()
        try:
            outcome = await run_body(tmp_path / str(count), body % count, concurrency=4)
            found.append(gc.collect())
        finally:
            gc.enable()
        assert outcome.summary.totals()["passed"] == count
    assert found[1] - found[0] < 200, f"200 cases more left {found[1] - found[0]} objects more in reference cycles"
