"""The side of a suite that runs cases in another process, here in this one."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.evals.hosting import CaseHost, HostSetup, ShippedCase, case_files
from lousho_ray.evals.loading import find_files, plan_suite
from lousho_ray.limits.budget import LocalLedger
from tests.unit.evals_support import write_evals

BODY = """
import dataclasses

@dataclasses.dataclass
class Item:
    name: str

async def test(t, case):
    await t.send(case.name)
    t.check("name", t.reply, equals("Hi"))

define_eval(name="e", agent=lambda: create_agent(provider=mock_model(["Hi"])), test=test, cases=[Item("a"), Item("b")])
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))


async def shipped(folder: Path, **setup: Any) -> tuple[HostSetup, list[ShippedCase]]:
    write_evals(folder, BODY)
    plan = await plan_suite(find_files((), folder), folder)
    made = HostSetup(str(folder), case_files(plan.cases, plan.versions), **setup)
    back: tuple[HostSetup, list[ShippedCase]] = pickle.loads(pickle.dumps((made, [ShippedCase.of(case) for case in plan.cases])))
    return back


async def test_cases_travel_by_value_and_their_evals_by_name(tmp_path: Path) -> None:
    setup, cases = await shipped(tmp_path)
    before = gc.get_threshold()
    host = CaseHost(setup, LocalLedger, lambda reason: None)
    assert gc.get_threshold()[0] >= 20_000, "Python looks for garbage less often than by default"
    records = [(await host.run(case)).record for case in cases]
    await host.close()
    assert gc.get_threshold() == before
    assert [(record.case, record.key) for record in records] == [(case.case, case.key) for case in cases]
    assert {record.reply for record in records} == {"Hi"}


async def test_recordings_are_made_where_the_case_runs(tmp_path: Path) -> None:
    setup, cases = await shipped(tmp_path, cassettes="record")
    host = CaseHost(setup, LocalLedger, lambda reason: None)
    await host.run(cases[0])
    await host.close()
    assert (tmp_path / "__cassettes__" / "e" / "a.json").exists()
    setup, cases = await shipped(tmp_path, cassettes="replay")
    host = CaseHost(setup, LocalLedger, lambda reason: None)
    replayed, missing = [(await host.run(case)).record for case in cases]
    await host.close()
    assert (replayed.reply, (missing.error or {}).get("code")) == ("Hi", "LOUSHO_CASSETTE_INVALID")


async def test_a_file_that_is_not_here_or_another_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, _ = await shipped(tmp_path)
    (tmp_path / "some.eval.py").write_text("# changed")
    with pytest.raises(ConfigurationError, match="changed while the suite ran"):
        CaseHost(setup, LocalLedger, lambda reason: None)
    (tmp_path / "some.eval.py").unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="--working-dir"):
        CaseHost(setup, LocalLedger, lambda reason: None)
