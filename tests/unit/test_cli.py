"""The `lousho` command: parsing, exit codes, where errors go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lousho_ray.cli import run_lousho
from tests.unit.evals_support import write_evals

PASSING = "define_eval(name='e', agent=says('x'), input='x', score=exact_match('x'), tags=['quick'])"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_help_and_version_need_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    # CLI-02
    assert run_lousho(["--help"]) == 0
    assert run_lousho(["eval", "-h", "--timeout", "x"]) == 0
    assert "--max-cost-usd" in capsys.readouterr().out
    assert run_lousho(["version"]) == 0
    assert run_lousho(["help"]) == 0
    assert "eval" in capsys.readouterr().out


def test_no_command_or_an_unknown_one_is_an_error_with_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    # CLI-02
    assert run_lousho([]) == 1
    assert "Commands" in capsys.readouterr().err
    assert run_lousho(["evla"]) == 1
    assert "Did you mean 'eval'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--nope"], ["--conc", "3"], ["--timeout"], ["--concurrency", "0"], ["--max-cost-usd", "-1"]])
def test_wrong_arguments_of_eval_are_exit_2(argv: list[str], project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # CLI-03, CLI-05, EVAL-24
    write_evals(project, PASSING)
    assert run_lousho(["eval", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Error: ")
    assert "[LOUSHO_CONFIG_INVALID]" in said


def test_exit_codes_tell_passing_failing_and_could_not_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # EVAL-24
    assert run_lousho(["eval", "nowhere/*.py"]) == 2
    assert "nowhere/*.py" in capsys.readouterr().err
    write_evals(project, PASSING)
    assert run_lousho(["eval"]) == 0
    assert "PASSED: 1 cases, 1 passed" in capsys.readouterr().out
    write_evals(project, "define_eval(name='e', agent=says('x'), input='x', score=exact_match('y'))")
    assert run_lousho(["eval", "--fresh"]) == 1
    assert "Gate failures:\n  e[default] score: 0 is below 1" in capsys.readouterr().out


def test_tags_choose_and_all_skipped_is_no_failure(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # EVAL-22
    write_evals(project, PASSING)
    assert run_lousho(["eval", "--tag", "slow,other", "--tag=third"]) == 0
    said = capsys.readouterr().out
    assert "1 evals skipped by tag" in said
    assert "No case was selected" in said
    assert run_lousho(["eval", "--tag", "slow,quick"]) == 0
    assert "1 passed" in capsys.readouterr().out


def test_the_json_report_has_the_summary_and_every_result(project: Path) -> None:
    # EVAL-26
    write_evals(project, PASSING)
    assert run_lousho(["eval", "--json", "out/deep/report.json"]) == 0
    report = json.loads((project / "out/deep/report.json").read_text())
    assert (report["passed"], report["totals"]["cases"], report["results"][0]["case"]) == (True, 1, "default")
    (project / "ran").mkdir()
    assert run_lousho(["eval", "--json", "/proc/none/report.json"]) == 2


def test_the_variable_names_the_results_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # EVAL-25
    write_evals(project, PASSING)
    monkeypatch.setenv("LOUSHO_EVAL_RESULTS", str(project / "named.jsonl"))
    assert run_lousho(["eval"]) == 0
    assert (project / "named.jsonl").read_text().count('"type":"case"') == 1


def test_eval_files_import_the_modules_of_the_project(project: Path) -> None:
    (project / "of_the_project.py").write_text("ANSWER = 'x'")
    write_evals(project, "from of_the_project import ANSWER\n" + PASSING, "evals/some.eval.py")
    assert run_lousho(["eval"]) == 0
    sys.modules.pop("of_the_project")


def test_the_command_starts_quickly_and_loads_no_client() -> None:
    # CLI-07
    code = (
        "import sys, time; start = time.process_time(); from lousho_ray.cli import run_lousho; run_lousho(['--help']);"
        "print(time.process_time() - start, 'ray' in sys.modules, 'openai' in sys.modules, file=sys.stderr)"
    )
    used = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
        seconds, *loaded = done.stderr.split()
        used.append(float(seconds))
        assert loaded == ["False", "False"]
    assert min(used) < 0.3


def test_a_toml_file_holds_defaults_and_the_command_line_wins(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # EVAL-21
    write_evals(project, PASSING)
    (project / "evals.toml").write_text('tag = ["slow"]\nmax-cost-usd = 3\njson = "from-config.json"\n')
    assert run_lousho(["eval", "--config", "evals.toml"]) == 0
    assert "No case was selected" in capsys.readouterr().out
    assert json.loads((project / "from-config.json").read_text())["skipped"] == ["e"]
    assert run_lousho(["eval", "--config=evals.toml", "--tag", "quick"]) == 0
    assert "1 passed" in capsys.readouterr().out
    (project / "evals.toml").write_text("concurency = 3")
    assert run_lousho(["eval", "--config", "evals.toml"]) == 2
    assert "Did you mean 'concurrency'" in capsys.readouterr().err
    assert run_lousho(["eval", "--config", "none.toml"]) == 2


def test_judge_files_run_only_on_request(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # EVAL-18, EVAL-20
    write_evals(project, PASSING)
    judged = "score=llm_judge('Good?', provider=mock_model(['SCORE: 0.9'])), threshold=0.5)"
    write_evals(project, "define_eval(name='judged', agent=says('x'), input='x', " + judged, "some.judge.eval.py")
    assert run_lousho(["eval"]) == 0
    assert "judged" not in capsys.readouterr().out
    assert run_lousho(["eval", "--judge"]) == 0
    said = capsys.readouterr().out
    assert "judged[default]  passed  score 0.9" in said
    assert "e[default]" not in said


def test_a_word_that_is_nearly_a_verb_is_asked_about(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lousho(["eval", "statu"]) == 2
    assert "There is no file, folder or command 'statu'. Did you mean 'status'?" in capsys.readouterr().err


def test_the_output_names_the_reports(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_evals(project, PASSING)
    run_lousho(["eval", "--json", "out/r.json", "--markdown", "out/r.md"])
    assert "\nReports: out/r.json, out/r.md\n" in capsys.readouterr().out
