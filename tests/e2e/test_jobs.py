"""`ray job submit` on a cluster that was started from the command line: two jobs, one limiter; suites that are killed and go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent
FILES = [f"part_{number}.py" for number in range(8)]
STARTS_WITHIN_S = 90.0

pytestmark = pytest.mark.timeout(280)


@dataclass(frozen=True)
class Cluster:
    """The address of its job server, and the environment of commands that talk to it."""

    url: str
    variables: dict[str, str]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head node on ports of its own, without authentication."""
    dashboard, agent, client = free_ports(3)
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # Sockets below it must have short paths.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}
    variables = {
        **inherited,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    options = [
        *("--head", "--block", "--port=0", "--num-cpus=2", f"--temp-dir={folder}", "--include-dashboard=true"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
        f"--ray-client-server-port={client}",
    ]
    with (folder / "start.log").open("wb") as log:
        head = subprocess.Popen([BIN / "ray", "start", *options], env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{dashboard}/api/version", head, folder / "start.log")
        yield Cluster(f"http://127.0.0.1:{dashboard}", variables)
    finally:
        # Told to end, a head takes its time to drain; the processes are this test's own.
        family = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.kill()
        head.wait()
        psutil.wait_procs(family, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(url: str, head: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        assert head.poll() is None, log.read_text("utf-8")
        try:
            with urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"The cluster did not start: {log.read_text('utf-8')}")


class Model:
    """A lead that gives each file to a reader; readers that answer after one look. The leads of two jobs begin together."""

    def __init__(self) -> None:
        self._leads = 0
        self._both = asyncio.Event()

    async def __call__(self, request: RecordedRequest) -> Reply:
        messages = request.body["messages"]
        done = [message["content"] for message in messages if message["role"] == "tool"]
        if all(tool["function"]["name"] != "task" for tool in request.body["tools"]):
            await asyncio.sleep(0.02)
            path = next(message["content"] for message in messages if message["role"] == "user").split()[1]
            return Reply(f"Facts of {path}") if done else Reply(tool_calls=[("read_file", {"path": path})])
        if not done:
            self._leads += 1
            if self._leads == 2:
                self._both.set()
            await self._both.wait()
            return Reply(tool_calls=[("list_files", {})])
        if len(done) == 1:
            tasks = [{"agent": "reader", "prompt": f"Study {name} now.", "description": f"Study {name}"} for name in FILES]
            return Reply(tool_calls=[("task", task) for task in tasks])
        return Reply("# Report\n\n" + "\n".join(json.loads(text).split("\n")[0] for text in done[1:]))


def test_two_jobs_run_and_share_the_named_limiter(cluster: Cluster, tmp_path: Path) -> None:
    # RL-32, DEC-R1, DEC-R4
    library = tmp_path / "library"
    library.mkdir()
    for name in FILES:
        (library / name).write_text(f'"""{name}"""\n')
    reports = [tmp_path / f"report-{number}.md" for number in range(2)]
    with FakeServer.in_thread(strict=False) as server:
        server.respond(Model())
        runtime = {"env_vars": {"OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": server.openai_url}}
        script = ["python", "-W", "error", "research.py", str(library), "--model", "openai/gpt-4o-mini", "--max-concurrent", "3"]
        jobs = [
            subprocess.Popen(
                [
                    *(BIN / "ray", "job", "submit", "--address", cluster.url, "--working-dir", str(EXAMPLES)),
                    *("--runtime-env-json", json.dumps(runtime), "--", *script, "--out", str(report)),
                ],
                env=cluster.variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for report in reports
        ]
        outputs = [job.communicate(timeout=200)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], "\n".join(outputs)
        assert all(report.read_text("utf-8").startswith("# Report\n\nFacts of part_0.py") for report in reports)
        assert len(server.requests) == 2 * (3 + 2 * len(FILES))
        assert server.max_concurrent == 3, "both jobs wait in one line"


EVALS = """
from lousho_ray import OpenAICompatibleProvider, create_agent
from lousho_ray.evals import define_eval, equals
from of_the_project import QUESTION

agent = create_agent(provider=OpenAICompatibleProvider(base_url={url!r}, default_model="gpt-4o-mini"))

async def test(t, case):
    await t.send(f"{{QUESTION}} {{case['n']}}")
    t.check("reply", t.reply, equals("done"))

define_eval(name="batch", agent=agent, test=test, cases=[{{"label": f"c{{n}}", "n": n}} for n in range(40)])
"""


def test_a_suite_runs_as_a_job_and_the_same_job_again_pays_nothing_twice(cluster: Cluster, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    results = tmp_path / "results.jsonl"
    with FakeServer.in_thread(strict=False) as server:
        server.respond(Reply("done", usage=(10, 1)))
        (project / "batch.eval.py").write_text(EVALS.format(url=server.compatible_url))
        (project / "of_the_project.py").write_text("QUESTION = 'What is'\n")
        command = [
            *(BIN / "ray", "job", "submit", "--address", cluster.url, "--working-dir", str(project), "--"),
            *("python", "-W", "error", "-m", "lousho_ray.cli", "eval", "--concurrency", "16", "--max-concurrent", "4"),
            f"--results={results}",
        ]
        for _ in range(2):
            done = subprocess.run(
                command,
                env=cluster.variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=130,
                check=False,
            )
            assert done.returncode == 0, done.stdout
            assert "PASSED: 40 cases, 40 passed" in done.stdout
        assert "40 of 40 cases have their results" in done.stdout
        assert len(server.requests) == 40
        assert server.max_concurrent <= 4


MANY, AT_ONCE, KILLED_AFTER = 10_000, 128, 4_000
"""So many cases, so many of them at once; the driver is killed when that many have their results."""

MANY_EVALS = """
from lousho_ray import OpenAICompatibleProvider, create_agent
from lousho_ray.evals import at_least, define_eval, equals

agent = create_agent(provider=OpenAICompatibleProvider(base_url={url!r}, default_model="gpt-4o-mini"), retry=False)

async def test(t, case):
    await t.send(f"case {{case['n']}}")
    t.check("reply", t.reply, equals("done"))
    t.check("right", case["n"] % 50, at_least(1))
    t.soft("size", case["n"], at_least(100))

define_eval(name="many", agent=agent, test=test, cases="many.jsonl")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_of_ten_thousand_cases_that_is_killed_goes_on_and_reports_as_if_undisturbed(cluster: Cluster, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    with FakeServer.in_thread(strict=False) as server:
        server.respond(Reply("done", usage=(10, 1)))
        (project / "many.eval.py").write_text(MANY_EVALS.format(url=server.compatible_url))
        (project / "many.jsonl").write_text("".join(f'{{"label": "c{n}", "n": {n}}}\n' for n in range(MANY)))
        job = Job(cluster, project, tmp_path / "results.jsonl", tmp_path / "report.json")
        killed = job.start()
        while job.lines < KILLED_AFTER:
            assert killed.poll() is None, job.output
            time.sleep(0.02)
        job.driver.kill()
        assert killed.wait(60) != 0
        job.until_quiet(server)
        finished, calls = job.cases, len(server.requests)
        assert KILLED_AFTER <= len(finished) < MANY
        assert job.start().wait(400) == 1, job.output  # one case in fifty fails
        asked = Counter(asked_for(request) for request in server.requests)
        assert len(asked) == MANY
        assert {asked[case] for case in finished} == {1}, "what had its results was paid once"
        assert max(asked.values()) == 2
        assert len(server.requests) - MANY == calls - len(finished) <= AT_ONCE, "only what was under way was paid again"
        other = Job(cluster, project, tmp_path / "other.jsonl", tmp_path / "other.json")
        assert other.start().wait(400) == 1, other.output
        assert job.figures == other.figures


def asked_for(request: RecordedRequest) -> str:
    return "c" + str(request.body["messages"][-1]["content"].split()[1])


class Job:
    """A suite as a job: its results file, its report, and the process that drives it."""

    def __init__(self, cluster: Cluster, project: Path, results: Path, report: Path) -> None:
        self._cluster, self._results, self._report, self._log = cluster, results, report, results.with_suffix(".log")
        self._command = [
            *(BIN / "ray", "job", "submit", "--address", cluster.url, "--working-dir", str(project), "--"),
            *("python", "-m", "lousho_ray.cli", "eval", f"--concurrency={AT_ONCE}", f"--results={results}", f"--json={report}"),
        ]

    def start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, env=self._cluster.variables, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        return self._log.read_text("utf-8")

    @property
    def driver(self) -> psutil.Process:
        """The process that `ray job submit` started in the cluster."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words[1:3] == ["-m", "lousho_ray.cli"] and f"--results={self._results}" in words:
                return process
        raise AssertionError(f"There is no driver: {self.output}")

    @property
    def lines(self) -> int:
        return self._results.read_bytes().count(b"\n") if self._results.exists() else 0

    @property
    def cases(self) -> set[str]:
        """The cases that have their results."""
        whole = self._results.read_text("utf-8").rpartition("\n")[0].splitlines()
        return {line["case"] for line in map(json.loads, whole) if line["type"] == "case"}

    def until_quiet(self, server: FakeServer) -> None:
        """Workers end with their driver: waits until nobody asks any more."""
        deadline, seen = time.monotonic() + 60, -1
        while seen != len(server.requests):
            assert time.monotonic() < deadline
            seen = len(server.requests)
            time.sleep(2)

    @property
    def figures(self) -> Any:
        """The report without what differs from run to run."""
        report = json.loads(self._report.read_text("utf-8"))
        report["totals"].pop("durationMs")
        for result in report["results"]:
            for key in ("durationMs", "startedAt"):
                result.pop(key)
        return report
