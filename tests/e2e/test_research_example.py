"""`examples/research.py` as people run it: its report, its usage, its options, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lousho_ray.testing.fake_server import FakeServer, Reply, gate

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(150)  # A cluster of one's own starts in 3 s on an idle machine, in 25 s on a very busy one.

SCRIPT = [sys.executable, "-W", "error", str(EXAMPLES / "research.py")]
GOES_WITHIN_S = 10.0
"""How long the whole script, with the Ray it started, may take to end on a busy machine."""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHON"))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(6):
        (library / f"part_{number}.py").write_text(f'"""Part {number}."""\n\nimport os\n\n\ndef part_{number}(x):\n    return x\n')
    return library


def test_both_runtimes_write_the_same_report(folder: Path, tmp_path: Path) -> None:
    told = []
    for runtime in ("local", "ray"):
        report = tmp_path / f"{runtime}.md"
        options = [str(folder), "--out", str(report), "--runtime", runtime, "--delay-ms", "5"]
        done = subprocess.run([*SCRIPT, *options], env=environment(), capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        total = re.search(r"^Total: .*", done.stdout, re.MULTILINE)
        assert total is not None
        told.append((report.read_text("utf-8"), total[0]))
    assert told[0] == told[1]
    assert told[0][0].startswith("# Report")
    assert all(f"## part_{number}.py" in told[0][0] for number in range(6))


def test_a_budget_ends_it_with_an_exit_code(folder: Path, tmp_path: Path) -> None:
    options = [str(folder), "--out", str(tmp_path / "r.md"), "--runtime", "local", "--delay-ms", "0", "--max-cost-usd", "0.0001"]
    done = subprocess.run([*SCRIPT, *options], env=environment(), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "budget-exceeded" in done.stderr
    assert not (tmp_path / "r.md").exists()


@contextlib.contextmanager
def research(folder: Path, server: FakeServer, *, terminal: bool) -> Iterator[tuple[subprocess.Popen[bytes], int | None]]:
    """The example on Ray with the fake server as its model; in a terminal of its own, or with pipes."""
    variables = {
        **environment(),
        "OPENAI_API_KEY": "sk-test",
        "OPENAI_BASE_URL": server.openai_url,
    }
    command = [*SCRIPT, str(folder), "--model", "openai/gpt-4o-mini", "--out", str(folder / "r.md"), "--max-concurrent", "50"]
    if terminal:
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(follower)
    else:
        leader = None
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process, leader
    finally:
        family = [process.pid, *(child.pid for child in _children(process.pid))]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if leader is not None:
            os.close(leader)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipes"])
def test_ctrl_c_ends_every_reader_and_every_process(folder: Path, terminal: bool) -> None:
    # RUN: an interrupted run settles; 21: a lead's end is the end of its sub-agents
    files = [f"part_{number}.py" for number in range(6)]
    with FakeServer.in_thread(timeout_s=50, strict=False) as server:
        server.on("chat", Reply(tool_calls=[("list_files", {})]))
        tasks = [("task", {"agent": "reader", "prompt": f"Study {name}.", "description": f"Study {name}"}) for name in files]
        server.on("chat", Reply(tool_calls=tasks))
        server.respond(lambda request: [gate("never"), Reply("late")])
        with research(folder, server, terminal=terminal) as (process, leader):
            server.reached_sync("never", len(files))
            family = _children(process.pid)
            assert family
            began = time.monotonic()
            if leader is not None:
                os.write(leader, b"\x03")
            else:
                process.send_signal(signal.SIGINT)
            server.wait_idle_sync()
            readers_ended = time.monotonic() - began
            output = _read_all(leader, process)
            code = process.wait(timeout=GOES_WITHIN_S)
            _, left = psutil.wait_procs(family, timeout=GOES_WITHIN_S)
        assert all(request.client_closed for request in server.requests[2:])
        assert len(server.requests) == 2 + len(files)
    assert code == 1, output
    assert "Interrupted: the lead and its readers have stopped." in output
    assert "Traceback" not in output
    assert [child.name() for child in left] == []
    assert readers_ended < 2.0


def _read_all(leader: int | None, process: subprocess.Popen[bytes]) -> str:
    """What the script printed until it ended."""
    if leader is None:
        assert process.stdout is not None
        return process.stdout.read().decode()
    parts: list[bytes] = []
    deadline = time.monotonic() + GOES_WITHIN_S
    while time.monotonic() < deadline:
        ready, _, _ = select.select([leader], [], [], 0.1)
        if not ready:
            if process.poll() is not None:
                break
            continue
        try:
            part = os.read(leader, 65_536)
        except OSError:  # The other end is closed.
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts).decode(errors="replace")
