"""Cases from Ray Data: rows of a dataset that the cluster makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lousho_ray.evals.suite import Outcome, Suite, SuiteOptions
from tests.unit.evals_support import console

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.timeout(170),
    pytest.mark.filterwarnings("ignore:.use_[a-z0-9_]+. is deprecated:DeprecationWarning"),  # of Ray Data, about itself
]

BODY = """
import ray.data
from pathlib import Path
from lousho_ray import create_agent
from lousho_ray.evals import *
from lousho_ray.testing import mock_model

def numbered(row):
    return {**row, "label": f"case {row['n']:02d}"}

rows = ray.data.read_parquet(str(Path(__file__).parent / "rows.parquet")).limit(20).map(numbered)

async def test(t, case):
    await t.send(case["question"])
    t.check("reply", t.reply, equals(case["answer"]))
    t.check("list", sum(case["numbers"]), equals(2 * case["n"]))
    t.check("number", int(case["n"]), at_least(1))

define_eval(name="rows", agent=lambda case: create_agent(provider=mock_model([case["answer"]])), test=test, cases=rows)
"""


async def run(folder: Path, **options: Any) -> Outcome:
    return await Suite(SuiteOptions(root=folder, results=folder / "r.jsonl", concurrency=8, **options), console()).run()


@pytest.mark.parametrize("runtime", ["local", "ray"])
async def test_rows_of_a_dataset_are_cases_and_a_second_run_knows_them(tmp_path: Path, runtime: Any) -> None:
    # EVAL-05
    rows = [{"n": n, "question": f"What is {n}?", "answer": f"It is {n}.", "numbers": [n, n]} for n in range(24)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.eval.py").write_text(BODY)
    first = await run(tmp_path, runtime=runtime)
    assert first.summary.load_errors == ()
    records = sorted(first.summary.records, key=lambda record: record.case)
    assert [record.case for record in records] == [f"case {n:02d}" for n in range(20)]
    assert [record.status for record in records] == ["failed", *["passed"] * 19], [record.error for record in records]
    lines = (tmp_path / "r.jsonl").read_text().count('"type":"case"')
    second = await run(tmp_path, runtime=runtime)
    assert second.summary.totals()["passed"] == 19
    assert (tmp_path / "r.jsonl").read_text().count('"type":"case"') == lines, "a value is the same value when it is read again"
