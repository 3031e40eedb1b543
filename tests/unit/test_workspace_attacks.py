"""Workspaces and shells that somebody works against: swapped links, odd files, programs that do not end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.results import encode_result
from lousho_ray.tools.workspace import (
    Entry,
    LocalWorkspace,
    MemoryWorkspace,
    NoopSandbox,
    WorkspaceError,
    create_fs_tools,
    create_shell_tool,
)
from lousho_ray.tools.workspace.processes import MARK, Limits, run_process


async def use(workspace: Any, name: str, **arguments: Any) -> str:
    made = next(tool for tool in create_fs_tools(workspace) if tool.name == name)
    return str(await call_tool(made, made.parse_plain(arguments).value, ToolContext("c")))


async def shell(workspace: LocalWorkspace, command: str, **options: Any) -> dict[str, Any]:
    made = create_shell_tool(workspace, needs_approval=False, **options)
    result: dict[str, Any] = await call_tool(made, made.parse_plain({"command": command}).value, ToolContext("c"))
    return result


# --------------------------------------------------------------------------------------------------------------------- links


class Swapping(LocalWorkspace):
    """A directory becomes a link out of the workspace right after its path was judged."""

    def __init__(self, root: Path, outside: Path) -> None:
        super().__init__(root)
        self.outside, self.armed = outside, False

    def _locate(self, path: str) -> Path:
        found = super()._locate(path)
        if self.armed:
            self.armed = False
            os.rename(self.root / "d", self.root / "was")
            os.symlink(self.outside, self.root / "d")
        return found


@pytest.mark.parametrize(
    "act",
    [
        lambda ws: ws.read("d/f"),
        lambda ws: ws.write("d/f", b"x"),
        lambda ws: ws.write("d/new", b"x"),
        lambda ws: ws.write("d/sub/deep/new", b"x"),
        lambda ws: ws.list("d"),
        lambda ws: ws.list("d/sub"),
        lambda ws: ws.remove("d/f"),
    ],
)
def test_directory_that_is_swapped_for_a_link_leads_nowhere(tmp_path: Path, act: Callable[[LocalWorkspace], Any]) -> None:  # WS-07
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder, text in ((root / "d", "mine"), (outside, "secret")):
        (folder / "sub").mkdir(parents=True)
        (folder / "f").write_text(text)
    workspace = Swapping(root, outside)
    workspace.armed = True
    with pytest.raises(WorkspaceError) as caught:
        act(workspace)
    assert str(tmp_path) not in caught.value.message
    assert (root / "d").is_symlink()
    assert sorted(path.name for path in outside.rglob("*")) == ["f", "sub"]
    assert (outside / "f").read_text() == "secret"


def test_swapped_directory_has_nothing_to_stat(tmp_path: Path) -> None:  # WS-07
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "d").mkdir(parents=True)
    outside.mkdir()
    (outside / "f").write_text("secret")
    workspace = Swapping(root, outside)
    (root / "d" / "f").write_text("x")
    workspace.armed = True
    assert workspace.stat("d/f") is None


def test_file_that_is_swapped_for_a_link_is_not_followed(tmp_path: Path) -> None:  # WS-07
    root, secret = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    (root / "d").write_text("mine")
    secret.write_text("secret")
    workspace = Swapping(root, secret)
    workspace.armed = True
    with pytest.raises(WorkspaceError):
        workspace.read("d")
    (root / "d").unlink()
    os.rename(root / "was", root / "d")
    workspace.armed = True
    workspace.write("d", b"new")  # replaces the link itself
    assert secret.read_text() == "secret"


# --------------------------------------------------------------------------------------------------------------------- files


async def test_files_with_odd_names_and_contents_are_shown_somehow(tmp_path: Path) -> None:
    names = [b"caf\xe9.txt", "caf\u00e9.txt".encode(), b"new\nline.txt", b"-rf", b" ", b"a\\b", b"\xff\xfe"]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"needle\x80\xff\r\n")
    workspace = LocalWorkspace(tmp_path)
    for shown in (await use(workspace, "list_dir"), await use(workspace, "glob", pattern="*")):
        assert "caf\u00e9.txt" in shown
        assert encode_result(shown).text
    assert (await use(workspace, "grep", pattern="needle")).count("needle") == len(names) - 1  # a backslash is a separator
    assert await use(workspace, "read_file", path="caf\u00e9.txt") == "     1\tneedle\ufffd\ufffd"


async def test_files_that_are_none_are_refused_or_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nul.bin").write_bytes(b"needle\0" * 10)
    (tmp_path / "utf16.txt").write_text("needle", "utf-16")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    workspace = LocalWorkspace(tmp_path)
    for name in ("pipe", "nul.bin", "utf16.txt", "sparse"):
        with pytest.raises(ToolExecutionError, match=name):
            await use(workspace, "read_file", path=name)
    with pytest.raises(WorkspaceError, match="no file"):
        workspace.read("pipe")
    assert await use(workspace, "grep", pattern="needle") == "[nothing matches needle]"
    with pytest.raises(ToolExecutionError):
        await use(workspace, "edit_file", path="sparse", old_string="a", new_string="b")


class Crumbling(MemoryWorkspace):
    """Some of its directories cannot be listed: they went meanwhile, or are not ours."""

    def list(self, path: str) -> list[Entry]:
        if path in self.gone:
            raise WorkspaceError(f"{path} does not exist.")
        return super().list(path)

    gone: frozenset[str] = frozenset()


async def test_directory_that_cannot_be_listed_does_not_end_a_search() -> None:
    workspace = Crumbling({"a/f": "needle", "b/f": "needle", "c/d/f": "needle"})
    workspace.gone = frozenset({"b", "c/d"})
    assert await use(workspace, "grep", pattern="needle") == "a/f:1: needle"
    assert await use(workspace, "glob", pattern="**/f") == "a/f"
    with pytest.raises(ToolExecutionError):
        await use(workspace, "grep", pattern="needle", path="b")


# --------------------------------------------------------------------------------------------------------------------- shell


def alive(marker: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and f"{marker}\0".encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if sys.argv[2] == "silent":
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
        print("begun", flush=True)
        while True:
            print("x" * 1000)
            time.sleep(0.001)
"""


@pytest.mark.parametrize("kind", ["holds-pipe", "silent"])
async def test_daemon_neither_holds_the_call_nor_outlives_it(tmp_path: Path, kind: str) -> None:  # WS-14
    marker = f"daemon-{os.getpid()}-{kind}"
    (tmp_path / "daemon.py").write_text(DAEMON)
    result = await shell(LocalWorkspace(tmp_path), f"{sys.executable} daemon.py {marker} {kind}; echo done")
    assert result["exitCode"] == 0
    assert "done\n" in result["stdout"]
    assert alive(marker) == []


async def test_stopped_command_takes_its_daemons_with_it(tmp_path: Path) -> None:  # WS-14
    marker = f"stopped-{os.getpid()}"
    (tmp_path / "daemon.py").write_text(DAEMON)
    command = f"trap '' TERM INT HUP; {sys.executable} daemon.py {marker} silent; while :; do sleep 1; done"
    task = asyncio.create_task(shell(LocalWorkspace(tmp_path), command))
    await until(lambda: alive(marker))
    task.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(marker) == []


async def test_commands_of_an_agent_that_is_a_command_end_with_it(tmp_path: Path) -> None:  # WS-14
    marker, root = f"nested-{os.getpid()}", Path(__file__).parents[2]
    (tmp_path / "daemon.py").write_text(DAEMON)
    code = (
        "import asyncio, sys\nfrom lousho_ray.tools.workspace import NoopSandbox\n"
        f"asyncio.run(NoopSandbox().exec(sys.executable + ' daemon.py {marker} silent; sleep 600'))"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(root)}
    task = asyncio.create_task(NoopSandbox().run(sys.executable, ("-c", code), cwd=str(tmp_path), env=env))
    await until(lambda: alive(marker) or task.done())
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(marker) == []


async def test_cancellations_while_it_cleans_up_change_nothing(tmp_path: Path) -> None:  # WS-14
    marker = f"again-{os.getpid()}"
    (tmp_path / "daemon.py").write_text(DAEMON)
    task = asyncio.create_task(NoopSandbox().run(sys.executable, (str(tmp_path / "daemon.py"), marker, "holds-pipe")))
    await until(lambda: alive(marker) or task.done())
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert alive(marker) == []


async def test_program_that_starts_others_as_fast_as_it_can_is_ended(tmp_path: Path) -> None:  # WS-14
    marker = f"forks-{os.getpid()}"
    code = "import os\nfor _ in range(40):\n    if os.fork() == 0:\n        os.setsid()\n"
    code += f"        os.execvp('sleep', ['{marker}', '600'])"
    output = await NoopSandbox().run(sys.executable, ("-c", code))
    assert output.exit_code == 0
    await until(lambda: not alive(marker))


async def test_output_without_end_is_bounded_and_does_not_block(tmp_path: Path) -> None:  # WS-22
    result = await shell(LocalWorkspace(tmp_path), "cat /dev/zero & cat /dev/urandom >&2", default_timeout_ms=500)
    assert result["timedOut"] is True
    assert "left out" in result["stdout"]
    assert min(len(result["stdout"]), len(result["stderr"])) > 3_000
    assert len(encode_result(result).text) <= 50_000


async def test_binary_output_and_nul_are_text_for_the_model(tmp_path: Path) -> None:
    result = await shell(LocalWorkspace(tmp_path), r"printf 'a\000b\377\355\240\200c'; printf '\360\237\230' >&2")
    assert result["stdout"].startswith("a\0b\ufffd")
    assert encode_result(result).safe["stderr"] == "\ufffd"


async def test_command_that_closes_its_output_or_stops_itself_is_waited_for_and_ended(tmp_path: Path) -> None:
    workspace = LocalWorkspace(tmp_path)
    assert (await shell(workspace, "exec >&- 2>&-; exit 7"))["exitCode"] == 7
    assert (await shell(workspace, "kill -STOP $$", default_timeout_ms=200))["timedOut"] is True
    assert (await shell(workspace, "kill -TERM $$"))["exitCode"] == 128 + signal.SIGTERM


async def test_command_line_that_is_too_long_or_cannot_be_passed_is_an_error(tmp_path: Path) -> None:  # WS-26
    workspace = LocalWorkspace(tmp_path)
    with pytest.raises(WorkspaceError, match="could not be started"):
        await shell(workspace, "true " + "x" * 300_000)
    for env in ({"A=B": "c"}, {"A": "b\0"}):
        with pytest.raises(WorkspaceError, match="could not be started"):
            await shell(workspace, "true", env=env)


async def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    workspace = LocalWorkspace(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    await shell(workspace, "true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await shell(workspace, "true")
        with pytest.raises(WorkspaceError):
            await shell(workspace, "true", cwd="nowhere")
        workspace.read("d/f")
        workspace.write("d/g/h", b"x")
        workspace.list("d")
        workspace.stat("d/f")
        workspace.remove("d/g/h")
        for act in (workspace.read, workspace.list, workspace.remove):
            with pytest.raises(WorkspaceError):
                act("d/f/none")
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)  # the loop closes pipes a little later


async def test_input_is_a_file_that_nobody_has_to_read() -> None:
    env = {"PATH": os.environ["PATH"]}
    output = await run_process(("sh", "-c", "exit 5"), Path("/"), env, Limits(), stdin=b"x" * 1_000_000)
    assert output.exit_code == 5
    output = await run_process(("sh", "-c", f"wc -c; echo ${MARK}"), Path("/"), env, Limits(), stdin=b"x" * 1_000_000)
    assert output.stdout.split()[0] == "1000000"
    assert len(output.stdout.split()[1]) == 32
