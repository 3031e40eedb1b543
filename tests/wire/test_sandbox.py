"""`SubprocessSandbox` with real programs: what they reach, what they see, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.cancellation import AbortSignal
from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.ports import ToolContext
from lousho_ray.tools import define_tool
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.workspace import (
    NoopSandbox,
    SandboxShell,
    SubprocessSandbox,
    WorkspaceError,
    create_credential_broker,
    create_shell_tool,
)
from lousho_ray.tools.workspace import sandbox as sandbox_module
from tests.wire.web_support import Site, answer


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site({"/": answer(b"reached")})
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()
    await server.wait_closed()


def python(code: str) -> tuple[str, tuple[str, ...]]:
    return sys.executable, ("-c", code)


def fetching(url: str) -> tuple[str, tuple[str, ...]]:
    return python(f"import urllib.request as r\nprint(r.urlopen({url!r}, timeout=5).read().decode())")


async def gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.005)


def running(marker: str) -> list[int]:
    """The processes of this machine with `marker` in their arguments."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and marker.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------------- network


async def test_without_network_a_program_reaches_nothing(site: Site) -> None:  # WS-19
    url = f"http://127.0.0.1:{site.port}/"
    assert (await NoopSandbox().run(*fetching(url))).stdout == "reached\n"
    for sandbox in (SubprocessSandbox(), SubprocessSandbox(network={"allow": ["127.0.0.1"]})):
        output = await sandbox.run(*fetching(url))
        assert "Connection refused" in output.stderr
        assert output.exit_code == 1
        for host in ("8.8.8.8", "2606:4700:4700::1111"):
            code = f"import socket; socket.create_connection(({host!r}, 53), 5)"
            assert "Network is unreachable" in (await sandbox.run(*python(code))).stderr
    assert site.connections == 1


async def test_with_the_default_network_a_program_reaches_what_the_machine_does(site: Site) -> None:  # WS-19
    output = await SubprocessSandbox(network="default").run(*fetching(f"http://127.0.0.1:{site.port}/"))
    assert output.stdout == "reached\n"


async def test_loopback_of_its_own_works(site: Site) -> None:
    code = "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname()); print('ok')"
    assert (await SubprocessSandbox().run(*python(code))).stdout == "ok\n"


async def test_sockets_that_lead_around_the_network_are_refused(tmp_path: Path) -> None:  # WS-19
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "daemon.sock"))
        listener.listen()
        code = f"import socket as s; s.socket(s.AF_UNIX).connect({str(tmp_path / 'daemon.sock')!r}); print('in')"
        assert (await NoopSandbox().run(*python(code))).stdout == "in\n"
        assert "Address family not supported" in (await SubprocessSandbox().run(*python(code))).stderr
    for family in ("AF_VSOCK", "AF_ALG"):
        code = f"import socket as s; s.socket(s.{family}, s.SOCK_SEQPACKET)"
        assert "Address family not supported" in (await SubprocessSandbox().run(*python(code))).stderr
    code = (
        "import ctypes as c; l = c.CDLL(None, use_errno=True); l.syscall(425, 8, c.create_string_buffer(120)); print(c.get_errno())"
    )
    assert (await SubprocessSandbox().run(*python(code))).stdout == "38\n"  # ENOSYS: io_uring opens sockets, too


async def test_program_cannot_go_back_to_the_network_of_the_machine() -> None:  # WS-19
    namespaces = "import os; print([os.readlink(f'/proc/self/ns/{n}') for n in ('net', 'user', 'pid', 'ipc')])"
    inside = json.loads((await SubprocessSandbox().run(*python(namespaces))).stdout.replace("'", '"'))
    outside = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user", "pid_for_children", "ipc")]
    assert not set(inside) & set(outside)
    output = await SubprocessSandbox().exec(
        "ip link add dummy0 type dummy; sudo -n true; nsenter --net=/proc/1/ns/net true; echo end"
    )
    assert output.stdout == "end\n"
    assert output.stderr
    status = (await SubprocessSandbox().exec("cat /proc/self/status")).stdout
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


async def test_program_sees_and_signals_only_its_own_processes() -> None:
    output = await SubprocessSandbox(network="default").exec(f"kill -9 {os.getpid()}; kill -9 1; ls /proc | grep -c '^[0-9]'")
    assert int(output.stdout) < 8
    assert output.exit_code == 0


@pytest.mark.parametrize(
    "network",
    [
        *("off", "", None, 3, {}, {"allowed": ["a.example"]}, {"allow": ["a.example"], "x": 1}, {"allow": "a.example"}),
        *({"allow": ["https://a.example/"]}, {"allow": ["a.example:443"]}, {"allow": ["a b"]}, {"allow": ["*"]}),
    ],
)
def test_bad_network_is_refused_at_construction(network: Any) -> None:  # WS-19
    with pytest.raises(ConfigurationError) as caught:
        SubprocessSandbox(network=network)
    assert caught.value.field == "network"


def test_broker_without_an_allow_list_is_refused() -> None:  # WS-19
    for network in ("none", "default"):
        with pytest.raises(ConfigurationError, match="broker"):
            SubprocessSandbox(network=network, broker=create_credential_broker())  # type: ignore[arg-type]


@pytest.mark.parametrize(("command", "says"), [("echo 0 > /proc/sys/user/max_user_namespaces", "unshare"), ("true", None)])
def test_machine_that_forbids_namespaces_is_an_error_at_construction(command: str, says: str | None) -> None:  # WS-24
    code = (
        "from lousho_ray.errors import LoushoError\n"
        "from lousho_ray.tools.workspace import SubprocessSandbox\n"
        "try:\n    SubprocessSandbox()\nexcept LoushoError as error:\n    print(error.code, error.detail)"
    )
    nested = ["unshare", "--user", "--map-root-user", "sh", "-c", f'{command}; exec "$@"', "sh", sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    done = subprocess.run(nested, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True)
    if says is None:
        assert done.stdout == ""
    else:
        assert done.stdout.startswith("LOUSHO_SANDBOX_EGRESS_UNSUPPORTED")
        assert says in done.stdout


def test_machine_without_a_filter_is_an_error_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:  # WS-24
    sandbox_module._refusal.cache_clear()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(LoushoError, match="riscv64") as caught:
        SubprocessSandbox()
    assert caught.value.code == "LOUSHO_SANDBOX_EGRESS_UNSUPPORTED"
    SubprocessSandbox(network="default")
    sandbox_module._refusal.cache_clear()


# ------------------------------------------------------------------------------------------------------------------ programs


async def test_result_is_that_of_the_program(tmp_path: Path) -> None:  # WS-26
    sandbox = SubprocessSandbox(cwd=tmp_path)
    output = await sandbox.exec("pwd; echo err >&2; cat; exit 3")
    assert (output.exit_code, output.stdout, output.stderr) == (3, f"{tmp_path}\n", "err\n")
    assert (await sandbox.run("cat", stdin=b"in" * 100_000, max_output_chars=200_000)).stdout == "in" * 100_000
    assert (await sandbox.exec("kill -9 $$")).exit_code == 128 + signal.SIGKILL
    assert (await sandbox.exec("yes | head -n 1")).stdout == "y\n"
    assert (await sandbox.run("printf", ("%s|", "a b", "", "ü"))).stdout == "a b||ü|"
    assert (await sandbox.exec("echo $A", env={"A": "1", "PATH": os.environ["PATH"]})).stdout == "1\n"


async def test_program_that_cannot_start_is_an_error(tmp_path: Path) -> None:  # WS-26
    for sandbox in (SubprocessSandbox(cwd=tmp_path), SubprocessSandbox(network="default", cwd=tmp_path)):
        with pytest.raises(WorkspaceError, match=r"no-such-program: No such file"):
            await sandbox.run("no-such-program")
        with pytest.raises(WorkspaceError, match="could not be started"):
            await sandbox.run("true", cwd="nowhere")


async def test_files_are_those_of_the_machine(tmp_path: Path) -> None:  # GR-50
    for sandbox in (SubprocessSandbox(cwd=tmp_path), NoopSandbox()):
        path = str(tmp_path / "deep" / "file")
        await sandbox.write_file("deep/file" if isinstance(sandbox, SubprocessSandbox) else path, "text")
        await sandbox.write_file(path, b"bytes")
        assert (await sandbox.run("cat", (path,))).stdout == "bytes"
        with pytest.raises(WorkspaceError, match="could not be written"):
            await sandbox.write_file(str(tmp_path / "deep"), "x")


async def end_by(how: str, sandbox: SubprocessSandbox, command: str, ready: Callable[[], Any]) -> None:
    """Runs a command that goes on for ever and ends it once it is ready."""
    abort = AbortSignal()
    task = asyncio.create_task(sandbox.exec(command, abort=abort))
    await until(ready)
    if how == "abort":
        abort.abort()
        assert (await task).aborted
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("how", ["abort", "cancel"])
@pytest.mark.parametrize("network", ["none", "default"])
async def test_nothing_is_left_of_a_program_that_was_stopped(network: Any, how: str) -> None:  # WS-14
    marker = f"left-{os.getpid()}-{network}-{how}"
    child = f"exec -a {marker} sleep 600"
    command = (
        f"trap '' TERM INT HUP; bash -c '{child}' & (setsid bash -c '{child}' &) ; nohup bash -c '{child}' >/dev/null 2>&1 & wait"
    )
    await end_by(how, SubprocessSandbox(network=network), command, lambda: len(running(f"{marker}\x00600")) == 3)
    await until(lambda: not running(f"{marker}\x00600"))


async def test_program_that_does_not_end_is_killed_after_its_time() -> None:  # WS-14
    output = await SubprocessSandbox().exec("trap '' TERM; echo begun; while :; do sleep 1; done", timeout_ms=300)
    assert output.timed_out
    assert output.exit_code is None


async def test_program_in_the_background_ends_with_the_command() -> None:  # WS-14
    marker = f"background-{os.getpid()}"
    output = await SubprocessSandbox().exec(f"setsid bash -c 'exec -a {marker} sleep 600' & echo done")
    assert output.stdout == "done\n"
    await until(lambda: not running(f"{marker}\x00600"))


async def test_death_of_the_agent_ends_its_programs() -> None:
    marker = f"orphan-{os.getpid()}"
    code = (
        "import asyncio\nfrom lousho_ray.tools.workspace import SubprocessSandbox\n"
        f"asyncio.run(SubprocessSandbox().exec(\"bash -c 'exec -a {marker} sleep 600'\"))"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}) as agent:
        try:
            await until(lambda: running(f"{marker}\x00600"))
        finally:
            agent.kill()
    await until(lambda: not running(f"{marker}\x00600"))


# --------------------------------------------------------------------------------------------------------------------- tools


async def test_shell_tool_runs_in_a_sandbox(tmp_path: Path) -> None:  # WS-21, LES-16
    (tmp_path / "sub").mkdir()
    shell = SandboxShell(SubprocessSandbox(cwd=tmp_path), cwd="sub", env={"A": "1"})
    made = create_shell_tool(shell, env={"B": "2"})
    assert "sandbox 'subprocess'" in made.description
    result = await call_tool(made, made.parse_plain({"command": "pwd; echo $A$B; ls /sys/class/net"}).value, ToolContext("c"))
    assert result == {"exitCode": 0, "stdout": result["stdout"], "stderr": ""}
    assert result["stdout"].startswith(f"{tmp_path}/sub\n12\n")


async def test_sandbox_travels_with_its_rule(site: Site) -> None:  # DEC-R5
    sandbox: SubprocessSandbox = pickle.loads(pickle.dumps(SubprocessSandbox()))
    assert "Connection refused" in (await sandbox.run(*fetching(f"http://127.0.0.1:{site.port}/"))).stderr
    brokered = SubprocessSandbox(network={"allow": ["a.example"]}, broker=create_credential_broker())
    with pytest.raises(TypeError, match="stays in the process"):
        pickle.dumps(brokered)


async def test_sandboxed_tool_runs_in_the_sandbox_of_the_call(site: Site) -> None:  # TOOL-18, GR-50
    async def fetch(args: Any, sandbox: Any) -> Any:
        return (await sandbox.run(*fetching(f"http://127.0.0.1:{site.port}/"))).stdout

    made = define_tool(name="f", description="Fetches.", execute=lambda: None, requires_sandbox=True, sandbox_execute=fetch)
    assert await call_tool(made, {}, ToolContext("c")) == "reached\n"
    assert await call_tool(made, {}, ToolContext("c"), sandbox=SubprocessSandbox()) == ""
