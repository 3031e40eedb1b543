"""Summaries and reports: what they count, what they show, and what a hostile reply cannot do in them."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet
import pytest

from lousho_ray.cli import run_lousho
from lousho_ray.evals.context import Assertion
from lousho_ray.evals.records import CaseRecord, Status
from lousho_ray.evals.reports import REPORTS, check_writable, diff_runs, print_summary, write_report
from lousho_ray.evals.stats import mean_of, pass_rate, percentile
from lousho_ray.evals.summary import Summary, summarize
from tests.unit.evals_support import console, printed, run_body, write_evals

HOSTILE = "</script><script>alert(1)</script> <img src=x onerror=alert(2)> [bold red]`|*x*"


def record(case: str, status: Status = "passed", repeat: int = 0, name: str = "e", **options: Any) -> CaseRecord:
    gate = Assertion("gate", "gate", status != "failed", 1.0, message="no" if status == "failed" else "")
    error = {"name": "KeyError", "message": "broke", "traceback": "deep"} if status in ("error", "outage") else None
    options = {"assertions": (gate,), "error": error, "usage": {"costUsd": "0.5", "totalTokens": 10, "modelCalls": 1}, **options}
    return CaseRecord(f"{name}{case}{repeat}", name, case, repeat, "some.eval.py", status, duration_ms=20.0, **options)


def soft(score: float | None, passed: bool = True) -> tuple[Assertion, ...]:
    return (Assertion("quality", "soft", passed, score, message="" if passed else "poor"),)


def some() -> Summary:
    records = [
        record("a"),
        record("b", "failed"),
        record("c", "error"),
        record("d", "outage"),
        record(HOSTILE, assertions=soft(0.2, passed=False), reply=HOSTILE, transcript=({"role": "user", "content": HOSTILE},)),
    ]
    return summarize(records, {"e": 1.0})


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (0, 0, 0.0, 1.0)],
)
def test_rates_have_their_wilson_interval(passed: int, total: int, low: float, high: float) -> None:
    rate = pass_rate(passed, total)
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=5e-5)


def test_means_show_what_has_no_score() -> None:
    # E01
    mean = mean_of([1.0, None, float("nan"), 0.5])
    assert (mean.value, mean.count, mean.missing) == (0.75, 2, 2)
    assert mean_of([None]).value is None
    assert (percentile([3, 1, 2], 0.5), percentile([], 0.5), percentile([1, 2], 1.0)) == (2, 0.0, 2)


def test_errors_and_outages_stay_in_the_denominator() -> None:
    # E01
    summary = some()
    (one,) = summary.evals
    assert (one.rate.passed, one.rate.total, one.errors, one.outages) == (2, 5, 1, 1)
    totals = summary.totals()
    assert {key: totals[key] for key in ("cases", "passed", "failed", "error", "outage")} == {
        "cases": 5,
        "passed": 2,
        "failed": 1,
        "error": 1,
        "outage": 1,
    }
    assert (totals["costUsd"], totals["tokens"]) == (2.5, 50)
    assert summarize([record("a", usage={"modelCalls": 1})], {}).totals()["costUsd"] is None


def test_a_summary_does_not_depend_on_the_order_in_which_cases_ended() -> None:
    records = list(some().records)
    wanted = summarize(records, {}).to_dict()
    for seed in range(5):
        random.Random(seed).shuffle(records)
        assert summarize(records, {}).to_dict() == wanted


def test_repeats_show_flaky_cases_and_an_eval_passes_by_its_share() -> None:
    # EVAL-29
    records = [record("a", repeat=n, status="passed" if n else "failed") for n in range(4)] + [
        record("b", repeat=n) for n in range(4)
    ]
    summary = summarize(records, {"e": 0.8})
    assert (summary.evals[0].flaky, summary.evals[0].passed, summary.exit_code) == (("a",), True, 0)
    assert summarize(records, {"e": 0.9}).exit_code == 1
    assert summarize([record("a"), record("b", "error")], {"e": 0.1}).exit_code == 1  # an error is never within the share


def test_soft_scores_are_averaged_by_eval_and_name() -> None:
    # EVAL-29
    records = [
        record("a", assertions=soft(0.5)),
        record("b", assertions=soft(1.0)),
        record("c", assertions=soft(None, passed=False)),
    ]
    mean = summarize(records, {}).evals[0].scores["quality"]
    assert (mean.value, mean.missing) == (0.75, 1)


def test_the_terminal_shows_rows_totals_and_failures_apart() -> None:
    # EVAL-23
    screen = console()
    print_summary(some(), screen)
    said = printed(screen)
    assert "FAILED: 5 cases, 2 passed, 1 failed, 1 errors, 1 not finished, 1 soft failures, 50 tokens, $2.5000" in said
    assert "Gate failures:\n  e[b] gate: no" in said
    assert "Errors:\n  e[c] KeyError: broke" in said
    assert f"Soft failures:\n  e[{HOSTILE}] quality: poor" in said


def test_junit_tells_failures_errors_and_notes_apart() -> None:
    # EVAL-27
    def kinds(summary: Summary) -> dict[str, list[str]]:
        suites = ElementTree.fromstring(REPORTS["junit"](summary).split("\n", 1)[1])
        return {case.get("name", ""): [child.tag for child in case] for case in suites.iter("testcase")}

    summary = some()
    assert kinds(summary) == {"a": [], "b": ["failure"], "c": ["error"], "d": ["error"], HOSTILE: ["system-out"]}
    strict = summarize(summary.records, {}, strict=True)
    assert kinds(strict)[HOSTILE] == ["failure"]
    suite = ElementTree.fromstring(REPORTS["junit"](summary).split("\n", 1)[1])[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "2")


def test_junit_leaves_out_what_xml_cannot_hold() -> None:
    odd = record("a\x00\x1b\ud800\uffffb", "error", error={"name": "E", "message": "x\x08y"})
    root = ElementTree.fromstring(REPORTS["junit"](summarize([odd], {})).split("\n", 1)[1])
    case = next(root.iter("testcase"))
    assert (case.get("name"), case[0].get("message")) == ("ab", "xy")


def test_the_page_holds_everything_itself_and_model_text_is_data() -> None:
    page = REPORTS["html"](some())
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    assert "<" not in block[1]
    data = json.loads(block[1])
    assert [case["reply"] for case in data["cases"] if case["reply"]] == [HOSTILE]
    assert [case["transcript"] for case in data["cases"] if case["transcript"]] == [[{"role": "user", "content": HOSTILE}]]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    for reading in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert reading not in scripts[0]
    assert re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org)", page.replace(block[1], "")) == []


def test_markdown_escapes_what_cases_are_called() -> None:
    text = REPORTS["markdown"](some())
    assert "| e | 2/5 |" in text
    assert "\\<img src=x onerror=alert(2)\\>" in text
    assert re.search(r"(?<!\\)<", text) is None


def test_parquet_has_a_row_a_case(tmp_path: Path) -> None:
    write_report("parquet", some(), tmp_path / "r.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "r.parquet").to_pylist()
    assert [row["status"] for row in rows if row["case"] != HOSTILE] == ["passed", "failed", "error", "outage"]
    assert {row["costUsd"] for row in rows} == {0.5}


async def test_cases_are_read_from_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"label": "a", "n": 1}, {"label": "b", "n": 2}]), tmp_path / "c.parquet")
    body = """
async def test(t, case):
    t.check("n", case["n"], at_least(1))

define_eval(name="e", agent=says("x"), test=test, cases="c.parquet")
"""
    outcome = await run_body(tmp_path, body)
    assert [record.case for record in outcome.summary.records] == ["a", "b"]


def test_all_reports_are_written_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # EVAL-21, EVAL-26
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_evals(tmp_path, "define_eval(name='e', agent=says('x'), input='x', score=exact_match('y'))")
    kinds = {"json": "r.json", "junit": "r.xml", "markdown": "r.md", "html": "r.html", "parquet": "r.parquet"}
    assert run_lousho(["eval", *(f"--{kind}=out/{name}" for kind, name in kinds.items())]) == 1
    assert all((tmp_path / "out" / name).stat().st_size > 100 for name in kinds.values())


def test_a_report_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    # EVAL-26
    check_writable(tmp_path / "new" / "r.json")
    with pytest.raises(Exception, match="cannot be written"):
        check_writable(Path("/proc/none/r.json"))


def test_two_runs_are_compared_case_by_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [record("a"), record("b", "failed"), record("c"), record("gone")]
    after = [record("a", "failed"), record("b"), record("c"), record("new")]
    diff = diff_runs(before, after).to_dict()
    assert {key: diff[key] for key in ("broken", "fixed", "added", "removed")} == {
        "broken": ["e[a]"],
        "fixed": ["e[b]"],
        "added": ["e[new]"],
        "removed": ["e[gone]"],
    }
    for name, records in (("before", before), ("after", after)):
        lines = [json.dumps(one.to_dict()) for one in records]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    assert run_lousho(["eval", "diff", "before.jsonl", "after.jsonl"]) == 1
    assert "broken: e[a] (failed)" in capsys.readouterr().out
    assert run_lousho(["eval", "diff", "after.jsonl", "after.jsonl"]) == 0
    assert run_lousho(["eval", "diff", "after.jsonl"]) == 2
    assert run_lousho(["eval", "diff", "after.jsonl", "none.jsonl"]) == 2


def test_cases_are_in_the_order_in_which_people_count() -> None:
    names = ["case 10", "case 2", "a", "case 1b", "case", "2", "case 2 of 3"]
    records = [record(name) for name in names]
    assert [one.case for one in summarize(records, {}).records] == ["2", "a", "case", "case 1b", "case 2", "case 2 of 3", "case 10"]
