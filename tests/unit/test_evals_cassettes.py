"""lousho eval with recordings: --record, --replay, --drift, and CI."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.cli import run_lousho
from lousho_ray.evals import cassettes
from tests.unit.evals_support import write_evals

BODY = """
import json
from pathlib import Path
here = Path(__file__).parent

@tool
def add(a: int, b: int = 0) -> int:
    "Adds."
    return a + b

def agent():
    if not (here / "script.json").exists():
        return create_agent(model="openai/gpt-4o-mini", tools=[add])
    return create_agent(provider=mock_model(json.loads((here / "script.json").read_text())), tools=[add])

async def test(t, case):
    await t.send(case["input"])
    t.completed()

define_eval(name="Sums up", agent=agent, test=test, cases=[{"label": "One & Two", "input": "1 + 2?"}])
"""
CALL = {"tool_calls": [{"name": "add", "args": {"a": 1, "b": 2}}], "usage": {"input_tokens": 5, "output_tokens": 1}}


class Project:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cassette = folder / "evals" / "__cassettes__" / "sums-up" / "one-two.json"
        write_evals(folder, BODY, "evals/some.eval.py")

    def script(self, *turns: Any) -> None:
        path = self.folder / "evals" / "script.json"
        path.unlink(missing_ok=True)
        if turns:
            path.write_text(json.dumps(turns))

    def run(self, *options: str) -> tuple[int, dict[str, Any]]:
        code = run_lousho(["eval", "--fresh", "--json", "report.json", *options])
        return code, json.loads((self.folder / "report.json").read_text() or "{}")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["lousho", "eval", "evals/some.eval.py", "--replay", "--tag", "x"])
    return Project(tmp_path)


def error_of(report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = report["results"][0]["error"]
    return found


def test_what_was_recorded_is_replayed_without_a_key_or_a_model(project: Project) -> None:
    # EVAL-31, EVAL-32, EVAL-34
    project.script(CALL, "Three.")
    code, live = project.run("--record")
    assert (code, len(json.loads(project.cassette.read_text())["entries"])) == (0, 2)
    project.script()  # the agent now names a real model, and there is no key
    code, report = project.run("--replay")
    assert (code, report["results"][0]["reply"], report["totals"]["tokens"]) == (0, "Three.", live["totals"]["tokens"])
    assert project.run()[0] == 1


def test_a_missing_recording_names_eval_case_path_and_the_command_that_makes_it(project: Project) -> None:
    # EVAL-34, LES-40
    project.script("Three.")
    code, report = project.run("--replay")
    error = error_of(report)
    assert (code, error["code"]) == (1, "LOUSHO_CASSETTE_INVALID")
    for said in ("'Sums up'", "'One & Two'", "one-two.json", "lousho eval evals/some.eval.py --tag x --record"):
        assert said in error["message"]


def test_a_changed_request_is_an_error_with_its_first_difference(project: Project) -> None:
    # EVAL-34, EVAL-35
    project.script("Three.")
    assert project.run("--record")[0] == 0
    write_evals(project.folder, BODY.replace("1 + 2?", "2 + 2?"), "evals/some.eval.py")
    code, report = project.run("--replay")
    assert (code, error_of(report)["name"]) == (1, "CassetteMismatchError")
    assert "recorded '1 + 2?', now '2 + 2?'" in error_of(report)["message"]


def test_in_ci_cases_with_a_recording_are_replayed_and_the_others_run(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    # EVAL-36
    project.script("Recorded.")
    assert project.run("--record")[0] == 0
    project.script("Live.")
    assert project.run()[1]["results"][0]["reply"] == "Live."
    monkeypatch.setenv("CI", "true")
    assert project.run()[1]["results"][0]["reply"] == "Recorded."
    project.cassette.unlink()
    assert project.run()[1]["results"][0]["reply"] == "Live."
    assert not project.cassette.exists()


def test_a_suite_that_has_ended_leaves_its_recordings_to_the_next_one(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    record = cassettes.record_replay

    def kept(*args: Any, **options: Any) -> Any:
        made.append(record(*args, **options))
        return made[-1]

    monkeypatch.setattr(cassettes, "record_replay", kept)  # something still holds every recorder, as a cycle would
    project.script("Three.")
    gc.disable()
    try:
        assert [project.run("--record")[0] for _ in range(3)] == [0, 0, 0]
    finally:
        gc.enable()
    assert len(made) == 3


def test_a_failing_case_is_recorded_all_the_same(project: Project) -> None:
    project.script({"text": "cut", "finish_reason": "length"})
    assert project.run("--record")[0] == 1
    assert project.cassette.exists()


@pytest.mark.parametrize(
    ("turns", "options", "fields"),
    [
        ((CALL, "Three."), (), []),
        ((CALL, "Another wording."), (), []),
        ((CALL, "Another wording."), ("--drift-text",), ["text"]),
        (("Three.",), (), ["tools", "steps", "args of call 1 (add)"]),
        (({"tool_calls": [{"name": "add", "args": {"b": 2, "a": 1}}]}, "Three."), (), []),
        (({"tool_calls": [{"name": "add", "args": {"a": 2, "b": 1}}]}, "Three."), (), ["args of call 1 (add)"]),
        ((CALL, {"text": "x", "finish_reason": "length"}), (), ["finishReason"]),
        (({**CALL, "usage": {"input_tokens": 9, "output_tokens": 1}}, "Three."), (), []),
        (({**CALL, "usage": {"input_tokens": 9, "output_tokens": 1}}, "Three."), ("--drift-usage",), ["tokens"]),
    ],
)
def test_drift_compares_what_an_agent_does_with_what_it_did(
    turns: tuple[Any, ...], options: tuple[str, ...], fields: list[str], project: Project
) -> None:
    # EVAL-37, LES-69
    project.script(CALL, "Three.")
    assert project.run("--record")[0] == 0
    before = project.cassette.read_bytes()
    project.script(*turns)
    _, report = project.run("--drift", *options)
    assert [row["field"] for row in report["drift"]] == fields
    assert project.cassette.read_bytes() == before


def test_structured_answers_are_compared_as_values(project: Project) -> None:
    # LES-69
    project.script('{"a": 1, "b": [2]}')
    assert project.run("--record")[0] == 0
    project.script('{"b": [2], "a": 1}')
    assert project.run("--drift")[1]["drift"] == []
    project.script('{"b": [3], "a": 1}')
    rows = project.run("--drift")[1]["drift"]
    assert rows == [
        {"eval": "Sums up", "case": "One & Two", "field": "object", "committed": {"a": 1, "b": [2]}, "current": {"a": 1, "b": [3]}}
    ]


def test_drift_is_a_soft_failure_and_fails_a_strict_run(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    # EVAL-38
    project.script(CALL, "Three.")
    assert project.run("--record")[0] == 0
    project.script("Three.")
    code, report = project.run("--drift")
    assert (code, report["results"][0]["status"]) == (0, "passed")
    assert report["results"][0]["assertions"][-1]["name"] == "drift"
    assert "Drift:\n  Sums up[One & Two] tools: committed ['add'], current []" in capsys.readouterr().out
    assert project.run("--drift", "--strict")[0] == 1


def test_without_a_recording_drift_says_missing(project: Project) -> None:
    # EVAL-39
    project.script("Three.")
    code, report = project.run("--drift", "--strict")
    assert (code, [row["committed"] for row in report["drift"]]) == (0, ["missing"])


def test_the_modes_exclude_each_other(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    # EVAL-28
    assert run_lousho(["eval", "--record", "--drift"]) == 2
    assert "LOUSHO_CONFIG_CONFLICTING_OPTIONS" in capsys.readouterr().err


TWO = """
async def test(t):
    await t.send("x")
    other = create_agent(provider=mock_model(["second"]))
    t.check("other", (await other.send("y")).text, equals("second"))

define_eval(name="two", agent=says("first"), test=test)
"""


def test_a_case_with_several_providers_has_a_recording_of_each(project: Project) -> None:
    # EVAL-31
    write_evals(project.folder, TWO, "evals/some.eval.py")
    assert project.run("--record")[0] == 0
    folder = project.cassette.parents[1] / "two"
    assert sorted(path.name for path in folder.iterdir()) == ["default.2.json", "default.json"]
    write_evals(
        project.folder, TWO.replace('["second"]', '["never"]').replace('says("first")', 'says("never")'), "evals/some.eval.py"
    )
    assert project.run("--replay")[0] == 0
    write_evals(project.folder, "define_eval(name='two', agent=says('x'), input='x', score=exact_match('x'))", "evals/some.eval.py")
    assert project.run("--record")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["default.json"]


JUDGED = """
from lousho_ray.providers import OpenAIProvider
judge = {"provider": %s}

async def test(t):
    await t.send("x")
    t.check("score", await t.judge("Good?"), equals(0.5))

define_eval(name="judged", agent=says("first"), test=test, judge=judge)
"""


def test_judges_are_not_recorded_and_no_real_one_is_asked_in_a_replay(project: Project) -> None:
    # EVAL-39, EVAL-34
    write_evals(project.folder, JUDGED % "mock_model(['SCORE: 0.5'])", "evals/some.eval.py")
    assert project.run("--record")[0] == 0
    entries = json.loads((project.cassette.parents[1] / "judged" / "default.json").read_text())["entries"]
    assert [entry["response"]["text"] for entry in entries] == ["first"]
    assert project.run("--replay")[0] == 0
    write_evals(project.folder, JUDGED % "OpenAIProvider(api_key='sk-none')", "evals/some.eval.py")
    code, report = project.run("--replay")
    assert (code, error_of(report)["code"]) == (1, "LOUSHO_CASSETTE_INVALID")


def test_names_that_would_share_a_file_are_refused_where_there_are_files(project: Project) -> None:
    body = "define_eval(name='e', agent=says('x'), test=lambda t: None, cases=['A b', 'a-b'])"
    write_evals(project.folder, body, "evals/some.eval.py")
    assert project.run()[0] == 0
    assert run_lousho(["eval", "--record"]) == 2
