"""define_eval, the cases it takes, and the files it may stand in."""

from __future__ import annotations

import asyncio
import copy
import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.evals import define_eval
from lousho_ray.evals.cases import cases_of, check_slugs, slug
from lousho_ray.evals.loading import find_files, plan_suite
from lousho_ray.evals.records import case_key
from lousho_ray.testing import mock_model
from tests.unit.evals_support import defined, run_body, write_evals

AGENT = create_agent(provider=mock_model(["Hi"]))


async def nothing(t: Any) -> None: ...


class Row:
    """A number or an array of NumPy."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def tolist(self) -> int:
        return self._number


def test_an_eval_is_defined_in_eval_files_only() -> None:
    # EVAL-01, EVAL-04
    with pytest.raises(LoushoError) as caught:
        define_eval(name="a", agent=AGENT, test=nothing)
    assert caught.value.code == "LOUSHO_EVALS_INVALID"


def test_an_eval_needs_an_agent_or_a_target() -> None:
    # EVAL-04
    with pytest.raises(ConfigurationError) as caught:
        defined(name="a", test=nothing)
    assert caught.value.code == "LOUSHO_CONFIG_MISSING_AGENT"
    assert defined(name="a", test=nothing, target=object()).target is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": " "}, "non-empty"),
        ({"tags": "smoke"}, "list of"),
        ({"repeat": 0}, "repeat"),
        ({"threshold": 1.5}, "share"),
        ({"timeout_ms": 0}, "above 0"),
        ({"agent": 3}, "must be an agent"),
        ({"judge": {"model": "m"}}, "judge must be"),
        ({"test": 3}, "function"),
        ({"scores": 1}, "scores"),
        ({"max_steps": 2}, "classic form"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        defined(**{"name": "a", "agent": AGENT, "test": nothing, **options})


def test_an_eval_without_test_needs_a_score() -> None:
    # EVAL-02
    with pytest.raises(LoushoError, match="nothing to run"):
        defined(name="a", agent=AGENT)
    with pytest.raises(LoushoError, match="input="):
        defined(name="a", agent=AGENT, score=lambda result: 1)


async def names(cases: Any, folder: Path | None = None) -> list[str]:
    definition = defined(name="a", agent=AGENT, test=nothing, cases=cases)
    if folder is not None:
        object.__setattr__(definition, "file", folder / "a.eval.py")
    return [case.name for case in await cases_of(definition)]


async def test_cases_are_named_by_label_name_input_or_number() -> None:
    # EVAL-05
    class Item:
        name = "of an object"

    given = [{"label": "l", "name": "n", "input": "i"}, {"name": "n"}, {"input": "i"}, {"x": 1}, Item(), 7]
    assert await names(given) == ["l", "n", "i", "case-4", "of an object", "case-6"]


async def test_a_name_twice_or_no_case_at_all_is_refused() -> None:
    # EVAL-05, E04
    with pytest.raises(LoushoError, match="numbers 1 and 2") as caught:
        await names([{"name": "a"}, {"name": "a"}])
    assert caught.value.code == "LOUSHO_EVALS_INVALID"
    with pytest.raises(LoushoError, match="empty"):
        await names([])
    with pytest.raises(LoushoError, match="not dict"):
        await names({"a": 1})


async def test_cases_come_from_files_and_async_iterables(tmp_path: Path) -> None:
    rows = [{"label": "a", "n": "1"}, {"label": "ü", "n": "2"}]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "c.csv").write_text("label,n\na,1\nü,2\n", "utf-8")

    async def later() -> Any:
        for row in rows:
            yield row

    for source in ("c.json", "c.jsonl", "c.csv"):
        assert await names(source, tmp_path) == ["a", "ü"]
    assert await names(later()) == ["a", "ü"]


async def test_cases_come_from_a_ray_dataset_row_by_row() -> None:
    class Dataset:
        """As Ray's: rows are read by a blocking call, and `iter()` is refused."""

        def iter_rows(self) -> Any:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            yield from [{"label": "a"}, {"label": "b"}]

        def __iter__(self) -> Any:
            raise TypeError("not iterable")

    assert await names(Dataset()) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.jsonl", '{"a": 1}\n{', "Line 2"),
        ("c.json", "{}", "array"),
        ("c.txt", "", "are read from"),
        ("d.json", None, "cannot be read"),
    ],
)
async def test_a_dataset_that_cannot_be_read_is_named(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(LoushoError, match=said) as caught:
        await names(name, tmp_path)
    assert caught.value.code == "LOUSHO_EVALS_INVALID"


def test_slugs_are_short_and_never_shared() -> None:
    assert slug("What's  Up, Döc?") == "what-s-up-d-c"
    assert slug("!!") == "unnamed"
    assert len(slug("a" * 300)) == 80
    check_slugs("The cases", ["a", "b"])
    with pytest.raises(LoushoError, match="'A b' and 'a-b'"):
        check_slugs("The cases", ["A b", "a-b"])


def test_files_are_found_by_pattern_and_judge_files_only_on_request(tmp_path: Path) -> None:
    # EVAL-20
    for name in (
        "a.eval.py",
        "x/b_eval.py",
        "x/c.judge.eval.py",
        "d_judge_eval.py",
        ".venv/e.eval.py",
        "node_modules/f.eval.py",
        "g.py",
    ):
        write_evals(tmp_path, "", name)

    def found(*patterns: str, judge: bool = False) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in find_files(patterns, tmp_path, judge=judge)]

    assert found() == ["a.eval.py", "x/b_eval.py"]
    assert found(judge=True) == ["d_judge_eval.py", "x/c.judge.eval.py"]
    assert found("x") == ["x/b_eval.py"]
    assert found("g.py") == ["g.py"]
    assert found("x/*.py") == ["x/b_eval.py"]
    with pytest.raises(LoushoError, match=r"No eval files match nope/\*\.py"):
        found("nope/*.py")
    with pytest.raises(LoushoError, match="need --judge"):
        found("d_judge_eval.py")


async def test_a_file_that_does_not_load_does_not_stop_the_others(tmp_path: Path) -> None:
    # EVAL-24
    write_evals(tmp_path, "raise RuntimeError('broken')", "a.eval.py")
    write_evals(tmp_path, "import sys; sys.exit(3)", "b.eval.py")
    outcome = await run_body(tmp_path, "define_eval(name='ok', agent=says('Hi'), input='x', score=exact_match('Hi'))")
    assert [error["file"] for error in outcome.summary.load_errors] == ["a.eval.py", "b.eval.py"]
    assert [record.status for record in outcome.summary.records] == ["passed"]
    assert outcome.exit_code == 1


async def test_two_evals_of_one_name_are_refused(tmp_path: Path) -> None:
    body = "define_eval(name='a', agent=says('Hi'), input='x', score=exact_match('Hi'))\n"
    outcome = await run_body(tmp_path, body * 2)
    assert "defined in some.eval.py already" in outcome.summary.load_errors[0]["message"]
    assert outcome.exit_code == 1


async def test_each_file_is_a_fresh_module(tmp_path: Path) -> None:
    write_evals(
        tmp_path, "count = globals().get('count', 0) + 1\ndefine_eval(name=f'n{count}', agent=says(''), test=lambda t: None)"
    )
    for _ in range(2):
        plan = await plan_suite(find_files((), tmp_path), tmp_path)
        assert [case.definition.name for case in plan.cases] == ["n1"]


def test_the_key_of_a_case_follows_its_content_and_is_the_same_in_every_process() -> None:
    class Item:
        def __init__(self, n: int) -> None:
            self.n = n

    key = case_key("e", "c", {"b": 1, "a": Item(2)}, 0, "v")
    assert key == case_key("e", "c", {"a": Item(2), "b": 1}, 0, "v")
    others = [("f", "c", {"b": 1, "a": Item(2)}, 0, "v"), ("e", "c", {"b": 1, "a": Item(3)}, 0, "v")]
    others += [("e", "c", {"b": 1, "a": Item(2)}, 1, "v"), ("e", "c", {"b": 1, "a": Item(2)}, 0, "w")]
    assert key not in {case_key(*other) for other in others}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (date(2026, 1, 1), date(2026, 1, 2)),
        (Decimal("1.0"), Decimal("1.5")),
        (Path("a"), Path("b")),
        (b"a", b"b"),
        (Row(1), Row(2)),
    ],
)
def test_values_that_are_no_json_are_told_apart(one: Any, other: Any) -> None:
    assert case_key("e", "c", {"x": one}, 0, "v") == case_key("e", "c", {"x": copy.deepcopy(one)}, 0, "v")
    assert case_key("e", "c", {"x": one}, 0, "v") != case_key("e", "c", {"x": other}, 0, "v")
