"""Eval suites on workers of the cluster: one limiter, one budget, killed workers and drivers, and what a second run does."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import semconv
from lousho_ray.actors import eval_pool, liveness
from lousho_ray.actors.eval_worker import EvalWorkerActor
from lousho_ray.actors.event_parcel import unpacked
from lousho_ray.evals.hosting import HostSetup, ShippedCase, case_files
from lousho_ray.evals.loading import MODULE_PREFIX, plan_suite
from lousho_ray.evals.results import read_results
from lousho_ray.evals.suite import Outcome, Suite, SuiteOptions
from lousho_ray.limits.budget import LocalLedger
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply
from tests.unit.evals_support import console
from tests.unit.span_support import Recorder

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(180)]

BODY = """
import os
from lousho_ray import OpenAICompatibleProvider, create_agent
from lousho_ray.evals import *

agent = create_agent(provider=OpenAICompatibleProvider(base_url={url!r}, default_model="gpt-4o-mini"), retry=False)

async def test(t, case):
    await t.send("case %d in process %d" % (case["n"], os.getpid()))
    t.check("reply", t.reply, equals("done"))
    t.check("right", case["n"] % 4, at_least(1))

define_eval(name="many", agent=agent, test=test, cases=[{{"label": "c%03d" % n, "n": n}} for n in range({count})])
"""


@pytest.fixture
async def server() -> Any:
    async with FakeServer(timeout_s=60) as server:
        server.respond(Reply("done", usage=(100, 20)))
        yield server
    assert server.violations == []


def write(folder: Path, server: FakeServer, count: int) -> Path:
    (folder / "many.eval.py").write_text(BODY.format(url=server.compatible_url, count=count))
    return folder


def asked(request: RecordedRequest) -> tuple[int, int]:
    """Which case asked, and from which process."""
    words = request.body["messages"][-1]["content"].split()
    return int(words[1]), int(words[-1])


async def run(folder: Path, **options: Any) -> Outcome:
    defaults: dict[str, Any] = {"runtime": "ray", "results": folder / "r.jsonl", "concurrency": 16}
    return await Suite(SuiteOptions(root=folder, **{**defaults, **options}), console()).run()


def figures(outcome: Outcome) -> Any:
    """A report without what differs from run to run: times, and which process asked."""
    report = outcome.summary.to_dict()
    for result in report["results"]:
        for key in ("durationMs", "startedAt", "transcript", "usage"):
            result.pop(key, None)
    report["totals"].pop("durationMs")
    report["totals"].pop("tokens")
    report["totals"].pop("costUsd")
    return report


async def test_cases_run_on_all_workers_under_one_limiter_and_the_driver_writes_the_results(
    tmp_path: Path, server: FakeServer
) -> None:
    async def reply(request: RecordedRequest) -> Reply:
        await asyncio.sleep(0.01)
        return Reply("done", usage=(100, 20))

    server.respond(reply)
    outcome = await run(write(tmp_path, server, 60), concurrency=32, limits={"max_concurrent": 5})
    totals = outcome.summary.totals()
    assert (totals["passed"], totals["failed"], totals["cases"]) == (45, 15, 60)
    assert server.max_concurrent <= 5
    found = Counter(asked(request) for request in server.requests)
    assert sorted(case for case, _ in found) == list(range(60))
    processes = {process for _, process in found}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert len(read_results(outcome.results).records) == 60
    local = await run(tmp_path, runtime="local", results=tmp_path / "local.jsonl")
    assert figures(local) == figures(outcome)


async def test_a_budget_holds_over_all_workers_and_halts_the_suite(tmp_path: Path, server: FakeServer) -> None:
    server.respond(Reply("done", usage=(1_000_000, 0)))  # 0.15 USD a call
    outcome = await run(write(tmp_path, server, 40), concurrency=4, max_cost_usd=1.0)
    assert "may cost" in str(outcome.summary.halted)
    assert 7 <= len(server.requests) <= 7 + 4
    assert outcome.summary.totals()["costUsd"] == pytest.approx(0.15 * len(server.requests))
    assert outcome.exit_code == 1


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_killed_worker_loses_its_cases_only_and_the_same_command_runs_them(
    tmp_path: Path, server: FakeServer, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_pool, "POLL_TIMEOUT_S", eval_pool.POLL_S + 1)
    monkeypatch.setattr(liveness, "CONTROL_ANSWERS_IN_S", 5.0)
    killed: list[int] = []

    async def reply(request: RecordedRequest) -> Reply:
        if len(server.requests) == 20 and not killed:
            killed.append(asked(request)[1])
            os.kill(killed[0], how)
        await asyncio.sleep(0.01)
        return Reply("done", usage=(100, 20))

    server.respond(reply)
    first = await run(write(tmp_path, server, 60), concurrency=8)
    totals = first.summary.totals()
    assert killed
    assert 1 <= totals["outage"] <= 8
    assert totals["passed"] + totals["failed"] == 60 - totals["outage"]
    finished = {record.case for record in first.summary.records if record.status != "outage"}
    before = len(server.requests)
    second = await run(tmp_path, concurrency=8)
    again = {f"c{asked(request)[0]:03d}" for request in server.requests[before:]}
    assert not again & finished
    assert len(again) == totals["outage"]
    undisturbed = await run(tmp_path, concurrency=8, results=tmp_path / "other.jsonl")
    assert figures(second) == figures(undisturbed)


async def test_a_killed_driver_leaves_nothing_running_and_is_continued_by_the_same_command(
    tmp_path: Path, server: FakeServer
) -> None:
    async def reply(request: RecordedRequest) -> Reply:
        await asyncio.sleep(0.05)
        return Reply("done", usage=(100, 20))

    server.respond(reply)
    folder, results = write(tmp_path, server, 60), tmp_path / "driver.jsonl"
    command = [sys.executable, "-m", "lousho_ray.cli", "eval", "--runtime=ray", "--concurrency=4", f"--results={results}"]
    root = str(Path(__file__).parents[2])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    driver = start()
    async with asyncio.timeout(100):
        while len(read_results(results).records) < 12:
            await asyncio.sleep(0.02)
    driver.kill()
    driver.wait()
    finished = {record.case for record in read_results(results).records.values() if record.status != "outage"}
    quiet = len(server.requests)
    async with asyncio.timeout(60):
        while True:  # what was under way ends; then nobody asks any more
            await asyncio.sleep(1.0)
            if len(server.requests) == quiet:
                break
            quiet = len(server.requests)
    assert quiet < 60
    driver = start()
    async with asyncio.timeout(100):
        while driver.poll() is None:
            await asyncio.sleep(0.05)
    assert driver.returncode == 1  # a quarter of the cases fails by its gate
    again = [f"c{asked(request)[0]:03d}" for request in server.requests[quiet:]]
    assert not set(again) & finished
    assert sorted([*again, *finished]) == [f"c{n:03d}" for n in range(60)]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert Counter(line["type"] for line in lines) == {"suite": 2, "case": 60, "end": 1}


async def test_a_file_that_is_another_one_on_the_workers_is_refused(tmp_path: Path, server: FakeServer) -> None:
    from lousho_ray.errors import ConfigurationError
    from lousho_ray.evals.hosting import HostSetup
    from lousho_ray.runtime import eval_executor
    from lousho_ray.usage import Spend

    write(tmp_path, server, 1)
    setup = HostSetup(str(tmp_path), (("many.eval.py", "another version"),))
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match=r"many\.eval\.py changed"):
        await eval_executor(setup, Spend(), most=1)
    assert time.monotonic() - began < 60


async def test_a_suite_is_seen_and_steered_from_another_process_of_the_cluster(tmp_path: Path, server: FakeServer) -> None:
    from lousho_ray.evals.control import choose, steer
    from lousho_ray.runtime import suites_of_cluster

    go = asyncio.Event()

    async def reply(request: RecordedRequest) -> Reply:
        await go.wait()
        return Reply("done", usage=(100, 20))

    server.respond(reply)
    task = asyncio.create_task(run(write(tmp_path, server, 30), concurrency=4, limits={"max_concurrent": 20}))
    async with asyncio.timeout(60):
        while len(server.requests) < 4:
            await asyncio.sleep(0.02)
    suite, status = await choose(list(await suites_of_cluster()), None)
    async with asyncio.timeout(60):
        while (status["total"], status["running"]) != (30, 4):
            status = await suite.status()
    status = await steer(suite, status, {"verb": "retune", "concurrency": 9, "limits": {"max_concurrent": 30}})
    assert (status["concurrency"], status["limits"]) == (9, {"max_concurrent": 30})
    async with asyncio.timeout(60):
        while len(server.requests) < 9:
            await asyncio.sleep(0.02)
    status = await steer(suite, status, {"verb": "cancel"})
    async with asyncio.timeout(60):
        outcome = await task
    go.set()  # not before: a case that was answered in time would have ended
    assert outcome.exit_code == 130
    assert outcome.summary.totals()["outage"] == 9
    assert await suites_of_cluster() == []


SPANS = """
from tests.unit.span_support import Recorder

exporter = Recorder()
"""


def write_traced(folder: Path, server: FakeServer, count: int) -> Path:
    body = SPANS + BODY.format(url=server.compatible_url, count=count).replace("retry=False", "retry=False, exporter=exporter")
    (folder / "many.eval.py").write_text(body)
    return folder


def recorder() -> Recorder:
    """The exporter of the eval file as this process has loaded it."""
    found: Recorder = sys.modules[MODULE_PREFIX + hashlib.sha256(b"many.eval.py").hexdigest()[:16]].exporter
    return found


async def test_spans_of_cases_on_workers_reach_the_exporter_in_the_suites_process(tmp_path: Path, server: FakeServer) -> None:
    outcome = await run(write_traced(tmp_path, server, 20))
    assert outcome.summary.totals()["passed"] == 15
    spans = recorder()
    assert spans.open == {}
    runs, chats = spans.named("invoke_agent"), spans.named("chat")
    assert (len(runs), len(chats)) == (20, 20)
    assert {span.parent_id for span in chats} == {span.id for span in runs}
    assert {span.status.code for span in spans.ended if span.status is not None} == {"ok"}
    assert len({span.attributes[semconv.ACTOR_ID] for span in runs}) == 2, "they say on which worker they were made"


@pytest.mark.timeout(150)
async def test_spans_that_are_open_on_a_worker_that_dies_end_as_errors(tmp_path: Path, server: FakeServer) -> None:
    killed: list[int] = []

    async def reply(request: RecordedRequest) -> Reply:
        while not killed and len([span for span in recorder().open.values() if span.name.startswith("chat")]) < 4:
            await asyncio.sleep(0.01)
        if not killed:
            killed.append(asked(request)[1])
            os.kill(killed[0], signal.SIGKILL)
        return Reply("done", usage=(100, 20))

    server.respond(reply)
    outcome = await run(write_traced(tmp_path, server, 12), concurrency=4)
    spans = recorder()
    lost = [span for span in spans.ended if span.attributes.get(semconv.ERROR_TYPE) == "RayActorError"]
    outages = outcome.summary.totals()["outage"]
    assert outages >= 1
    assert spans.open == {}
    assert len(lost) == 2 * outages, "the run and the call of each case that was lost"
    assert len(spans.named("invoke_agent")) == 12


async def test_a_worker_takes_cases_meant_for_its_life_and_one_that_cannot_be_read_is_no_trouble_of_the_others(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    plan = await plan_suite([write(tmp_path, server, 3) / "many.eval.py"], tmp_path)
    worker = EvalWorkerActor(HostSetup(str(tmp_path), case_files(plan.cases, plan.versions)), LocalLedger)
    life = await worker.ready()
    cases = [ShippedCase.of(case) for case in plan.cases]
    cases[1] = cases[1]._replace(value=b"no pickle")
    assert (await worker.exchange("an earlier life", pickle.dumps(cases), 0)).life == life
    ended: dict[str, Any] = {}
    sent, cursor = pickle.dumps(cases), 0
    while len(ended) < 3:
        reports = await worker.exchange(life, sent, cursor)
        sent, cursor = None, reports.cursor
        ended.update({report.key: report.item for report in unpacked(reports.parcel)})
    await worker.close()
    records = [ended[case.key].record for case in cases]
    assert [record.status for record in records] == ["failed", "outage", "passed"]
    assert "UnpicklingError" in records[1].error["name"]
    assert [json.loads(ended[case.key].line)["case"] for case in cases] == ["c000", "c001", "c002"]
    assert len(server.requests) == 2, "those that were meant for an earlier life were not started"
