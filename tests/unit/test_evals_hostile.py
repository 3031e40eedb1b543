"""Evals under input that is damaged, of another kind, or hostile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lousho_ray.cli import run_lousho
from lousho_ray.errors import LoushoError, StorageError
from lousho_ray.evals.cases import read_cases
from lousho_ray.evals.reports import write_report
from lousho_ray.evals.results import ResultsWriter, read_results
from tests.unit.evals_support import console, printed, run_body, run_suite, write_evals

FOUR = """
async def test(t, case):
    await t.send("x")

define_eval(name="e", agent=says("x"), test=test, cases=list("abcd"))
"""


async def test_a_file_that_holds_no_results_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# Notes\nwithout an end of line")
    with pytest.raises(StorageError, match=r"notes\.md.* holds no eval results.*--results"):
        await run_body(tmp_path, FOUR, results=notes)
    assert notes.read_text() == "# Notes\nwithout an end of line"


@pytest.mark.parametrize("number", [1, 3])
async def test_damaged_lines_are_named_and_their_cases_run_again(tmp_path: Path, number: int) -> None:
    path = tmp_path / "r.jsonl"
    await run_body(tmp_path, FOUR, results=path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1][:40] + b"\xff\x00\n"
    path.write_bytes(b"".join(lines))
    screen = console()
    outcome = await run_suite(tmp_path, screen, results=path)
    assert outcome.exit_code == 0
    assert f"r.jsonl is damaged: what was in line {number} cannot be read" in printed(screen)
    assert len(read_results(path).records) == 4


async def test_results_of_a_newer_version_are_refused_where_named_and_left_alone_where_not(tmp_path: Path) -> None:
    outcome = await run_body(tmp_path, FOUR)
    path = outcome.results
    newer = path.read_text().replace('"version":1', '"version":99').replace('{"type":"end"', '{"type":"later"')
    path.write_text(newer)
    with pytest.raises(StorageError, match=r"newer version of lousho-ray \(format 99"):
        await run_suite(tmp_path, results=path)
    assert (await run_suite(tmp_path)).results != path
    assert path.read_text() == newer


def test_a_diff_of_what_is_no_results_file_is_no_clean_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("hello\n")
    assert run_lousho(["eval", "diff", "a.txt", "a.txt"]) == 2
    assert "a.txt holds no eval results" in capsys.readouterr().err
    assert run_lousho(["eval", "--drift-usage"]) == 2
    assert "--drift-usage says what --drift compares" in capsys.readouterr().err


def test_csv_cases_whose_values_fit_no_column_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text('label,input\n"a ""b""\nc",x\nd\n')
    assert read_cases(path) == [{"label": 'a "b"\nc', "input": "x"}, {"label": "d", "input": None}]
    path.write_text("label,input\na,b\nc,d,e\n")
    with pytest.raises(LoushoError, match=r"Line 3 of .*c\.csv has more values than the 2 columns label, input"):
        read_cases(path)
    path.write_text("label,label\na,b\n")
    with pytest.raises(LoushoError, match=r"c\.csv has the column 'label' twice"):
        read_cases(path)
    path.write_text('label,input\n"a"b,c\n')
    with pytest.raises(LoushoError, match=r"c\.csv cannot be read"):
        read_cases(path)


async def test_a_file_that_raises_what_is_no_exception_stops_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "bad.eval.py").write_text("class Odd(BaseException): pass\nraise Odd('why')\n")
    (tmp_path / "dataset.eval.py").write_text(
        "import sys\nfrom lousho_ray.evals import *\n"
        "define_eval(name='d', agent=lambda: None, test=lambda t, c: None, cases=(sys.exit(3) for _ in [1]))\n"
    )
    outcome = await run_body(tmp_path, FOUR)
    assert [record.status for record in outcome.summary.records] == ["passed"] * 4
    assert [(error["file"], error["message"]) for error in outcome.summary.load_errors] == [
        ("bad.eval.py", "why"),
        ("dataset.eval.py", "3"),
    ]


async def test_an_exception_that_cannot_be_written_is_an_error_of_its_case(tmp_path: Path) -> None:
    body = """
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no")

    async def test(t):
        raise Mute

    define_eval(name="e", agent=says("x"), test=test)
    """
    [record] = (await run_body(tmp_path, body)).summary.records
    assert record.status == "error"
    assert record.error is not None
    assert record.error["message"] == "Mute"


def test_text_that_the_terminal_cannot_show_ends_no_run(tmp_path: Path) -> None:
    body = """
    async def test(t):
        raise ValueError("half \\ud800 \\x00 a caf\\xe9")

    define_eval(name="e", agent=says("x"), test=test)
    """
    write_evals(tmp_path, body)
    done = subprocess.run(
        [sys.executable, "-c", "from lousho_ray.cli.app import main; main()", "eval", "--json=r.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LOUSHO_RUNTIME": "local", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert b"half \\ud800" in done.stdout
    assert b"Traceback" not in done.stdout + done.stderr
    assert json.loads((tmp_path / "r.json").read_text())


async def test_an_empty_file_takes_results(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.touch()
    async with ResultsWriter(path) as writer:
        writer.write({"type": "suite", "version": 1})
    assert read_results(path).suite


async def test_a_full_disk_stops_the_run_and_says_that_what_ended_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, line: bytes) -> int:
            raise OSError(28, "No space left on device")

    writer = ResultsWriter(tmp_path / "r.jsonl")
    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(StorageError, match=r"r\.jsonl could not be written: .*No space left.*the same command runs the rest"):
        writer.write({"type": "end"})
    outcome = await run_body(tmp_path, FOUR)
    with pytest.raises(StorageError, match=r"The report /dev/full could not be written: .*No space left"):
        write_report("json", outcome.summary, Path("/dev/full"))


async def test_a_project_that_is_read_only_runs_without_being_steered(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / ".lousho").write_text("a file where the folder would be")
    screen = console()
    write_evals(project, FOUR)
    outcome = await run_suite(project, screen, results=tmp_path / "r.jsonl")
    assert outcome.exit_code == 0
    assert "`lousho eval status` and the like do not reach this run" in printed(screen)


def test_a_case_that_ignores_its_cancellation_does_not_hold_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lousho_ray.evals.case_run.GRACE_S", 0.05)
    monkeypatch.setattr("lousho_ray.cli.eval_command.LEFT_BEHIND_S", 0.05)
    monkeypatch.chdir(tmp_path)
    body = """
    async def test(t):
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass

    define_eval(name="stuck", agent=says("x"), test=test)
    """
    write_evals(tmp_path, body)
    assert run_lousho(["eval", "--timeout", "50", "--runtime", "local"]) == 1
    said = capsys.readouterr().out
    assert "was left behind" in said
    assert "FAILED: 1 cases" in said


@pytest.mark.parametrize("text", [b"[]", b"\xff", b"{", b'{"version": 1, "provider": {"name": "mock"}, "entries": [3]}'])
async def test_drift_from_a_damaged_recording_names_the_file_and_the_way_to_mend_it(tmp_path: Path, text: bytes) -> None:
    await run_body(tmp_path, FOUR, cassettes="record")
    (tmp_path / "__cassettes__" / "e" / "a.json").write_bytes(text)
    outcome = await run_suite(tmp_path, cassettes="drift")
    assert outcome.summary.records[0].error is not None
    assert outcome.summary.records[0].error["code"] == "LOUSHO_CASSETTE_INVALID"
    assert "a.json" in outcome.summary.records[0].error["message"]
    assert "lousho eval --record" in outcome.summary.records[0].error["message"]
    assert [record.status for record in outcome.summary.records] == ["error", "passed", "passed", "passed"]
