"""`ray job submit` on a cluster that was started from the command line: two jobs, one limiter."""

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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
