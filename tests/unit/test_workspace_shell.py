"""The shell tool: rules of commands, environment, time limits and the process group."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.cancellation import AbortSignal
from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import ToolContext
from lousho_ray.tools import Tool, define_tool
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.results import encode_result
from lousho_ray.tools.workspace import (
    LocalWorkspace,
    MemoryWorkspace,
    NoopSandbox,
    ShellOutput,
    WorkspaceError,
    create_shell_tool,
    exact,
)
from lousho_ray.tools.workspace.command_rules import CommandRules


async def run(made: Tool[..., Any], command: str, ctx: ToolContext | None = None, **arguments: Any) -> dict[str, Any]:
    result: dict[str, Any] = await call_tool(
        made, made.parse_plain({"command": command, **arguments}).value, ctx or ToolContext("c")
    )
    return result


@pytest.fixture
def workspace(tmp_path: Path) -> LocalWorkspace:
    return LocalWorkspace(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- rules


def passes(rules: CommandRules, command: str) -> bool:
    try:
        rules.check(command)
    except WorkspaceError:
        return False
    return True


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("git status", True),
        ("  git status -s", True),
        ("git status\t-s", True),
        ("git statusx", False),
        ("git", False),
        ("git status; rm x", False),
        ("git status && rm x", False),
        ("git status | sh", False),
        ("git status `rm x`", False),
        ("git status $(rm x)", False),
        ("git status > x", False),
        ("git status < x", False),
        ("git status\nrm x", False),
        ("git status\rrm x", False),
        ("PAGER=rm git status", False),
        ("git -c core.pager=rm status", False),
        ("git status 'x", False),
        ("git status\u00a0x", False),  # a blank to people, a part of the word to the shell
        ("git status\x0bx", False),
        ("git status\x85rm x", False),
        ("\u3000git status", False),
        ("git status\\\nrm x", False),
        ("git status <(rm x)", False),
        ("git status ${x:-`rm x`}", False),
        ("(git status)", False),
        ("! git status", False),
    ],
)
def test_string_in_allow_admits_simple_commands_only(command: str, expected: bool) -> None:  # WS-12, S08
    assert passes(CommandRules.of(allow=["git status"]), command) is expected


def test_regex_in_allow_is_searched_over_the_whole_line() -> None:  # WS-12
    rules = CommandRules.of(allow=[re.compile(r"^make \w+( && make \w+)*$")])
    assert passes(rules, "make a && make b")
    assert not passes(rules, "make a && rm b")


def test_exact_admits_the_whole_command_and_nothing_more() -> None:  # LES-30
    rules = CommandRules.of(allow=[exact("ls | wc -l")])
    assert passes(rules, " ls | wc -l ")
    assert not passes(rules, "ls | wc -l x")
    assert not passes(rules, "ls")


def test_function_judges_the_argument_list_of_a_simple_command() -> None:  # LES-30
    def reads(arguments: Any) -> bool:
        return arguments[0] == "cat" and not any(a.startswith("/") for a in arguments)

    rules = CommandRules.of(allow=[reads])
    assert passes(rules, "cat 'a b'")
    assert not passes(rules, "cat '/etc/passwd'")
    assert not passes(rules, "cat a; cat /etc/passwd")


@pytest.mark.parametrize(
    "command",
    [
        *("cat $HOME/x", "cat ${x}", 'cat "$x"', "cat ~/x", "cat *", "cat [e]tc", "cat ?", "cat {a,/b}", "cat a #b", "cat $'/x'"),
        *("cat 'a", 'cat "a', "cat \"it's $x\" 'a'", "cat \"$x'\" 'a'", "X=1 cat a"),
    ],
)
def test_a_function_is_not_asked_about_words_that_the_shell_would_change(command: str) -> None:
    # field case S08: what cannot be parsed is not allowed, and what is judged is what runs
    assert not passes(CommandRules.of(allow=[lambda arguments: arguments[0] == "cat"]), command)


@pytest.mark.parametrize("command", ["cat a b", "cat 'a b' \"c'd\"", "cat '$x *'", "cat a\\ b", 'cat "a\\"b"', 'c"at" a'])
def test_a_function_is_asked_about_words_that_run_as_they_stand(command: str) -> None:
    assert passes(CommandRules.of(allow=[lambda arguments: arguments[0] == "cat"]), command)


@pytest.mark.parametrize(
    "command",
    [
        *("X=1 rm x", "$(rm x)", "ls $(rm x)", "ls `rm x`", "(rm x)", "{ rm x; }", "! rm x", "cat <(rm x)", "rm>x", ">y rm x"),
        *("if true; then rm x; fi", "while rm x; do :; done", "/bin/rm x", "\\rm x", "'rm' x", 'r"m" x', "2>&1 rm x"),
        *("sudo rm x", "env A=1 rm x", "ls | xargs rm", "time rm x", "exec rm x", "command rm x", "nohup rm x &"),
    ],
)
def test_deny_finds_a_command_however_it_is_dressed(command: str) -> None:
    # field case S08
    assert not passes(CommandRules.of(deny=["rm"]), command)
    assert not passes(CommandRules.of(deny=[lambda arguments: arguments[0] == "rm"]), command)


def test_deny_of_several_words_does_not_mind_how_many_blanks_there_are() -> None:
    # field case S08
    for command in ("git  push", "git\tpush origin", "A=1 /usr/bin/git 'push'"):
        assert not passes(CommandRules.of(deny=["git push"]), command)
    assert passes(CommandRules.of(deny=["git push"]), "git pushx")


@pytest.mark.parametrize("command", ["rm x", "rm", "ls; rm x", "ls && rm x", "ls | rm", "ls\nrm x", "ls &rm x"])
def test_deny_looks_at_every_part(command: str) -> None:  # WS-12
    assert not passes(CommandRules.of(deny=["rm"]), command)
    assert not passes(CommandRules.of(deny=[lambda arguments: arguments[0] == "rm"]), command)


def test_deny_wins_over_allow_and_leaves_the_rest() -> None:  # WS-11
    rules = CommandRules.of(allow=["git"], deny=["git push", exact("git gc"), re.compile("--force")])
    assert passes(rules, "git pushx")
    assert passes(rules, "git gc --auto")
    for command in ("git push", "git push origin", "git gc", "git clean --force"):
        assert not passes(rules, command)
    assert passes(CommandRules.of(deny=["rm"]), "rmdir x")


@pytest.mark.parametrize(("shell", "expected"), [("sh", True), ("cmd", False)])
def test_operators_are_those_of_the_shell(shell: str, expected: bool) -> None:  # LES-31
    assert passes(CommandRules.of(allow=["echo"], shell=shell), "echo %PATH%") is expected
    assert passes(CommandRules.of(allow=["echo"], shell=shell), "echo ^a") is expected
    assert not passes(CommandRules.of(allow=["echo"], shell=shell), "echo a & b")


@pytest.mark.parametrize("command", ["", "  ", "a\0b"])
def test_empty_and_unusable_commands_are_refused(command: str) -> None:
    assert not passes(CommandRules.of(), command)


@pytest.mark.parametrize("bad", ["git", [3], [""], [exact(" ")]])
def test_bad_patterns_and_limits_are_refused_when_the_tool_is_made(bad: Any, workspace: LocalWorkspace) -> None:
    for option in ("allow", "deny"):
        with pytest.raises(ConfigurationError) as caught:
            create_shell_tool(workspace, **{option: bad})
        assert caught.value.field == option
    for option in ("default_timeout_ms", "max_timeout_ms", "max_output_chars"):
        with pytest.raises(ConfigurationError, match=option):
            create_shell_tool(workspace, **{option: 0})  # type: ignore[arg-type]


async def test_refused_command_is_never_offered_to_a_person(workspace: LocalWorkspace) -> None:  # WS-11
    asked: list[Any] = []

    def approval(args: Any) -> bool:
        asked.append(args["command"])
        return True

    made = create_shell_tool(workspace, deny=["rm"], needs_approval=approval)
    gate: Callable[..., Any] = made.needs_approval  # type: ignore[assignment]
    with pytest.raises(WorkspaceError):
        await gate({"command": "rm x"}, None)
    assert asked == []
    assert await gate({"command": "ls"}, None) is True
    with pytest.raises(WorkspaceError):
        await run(made, "rm x")


async def test_approval_is_asked_by_default(workspace: LocalWorkspace) -> None:  # WS-22
    for given, expected in ((True, True), (False, False), (lambda args, ctx: "deny", "deny")):
        gate: Callable[..., Any] = create_shell_tool(workspace, needs_approval=given).needs_approval  # type: ignore[assignment]
        assert await gate({"command": "ls"}, None) == expected
    default: Callable[..., Any] = create_shell_tool(workspace).needs_approval  # type: ignore[assignment]
    assert await default({"command": "ls"}, None) is True


# -------------------------------------------------------------------------------------------------------------- running


async def test_command_runs_in_the_workspace(workspace: LocalWorkspace, tmp_path: Path) -> None:  # WS-10
    (tmp_path / "sub").mkdir()
    made = create_shell_tool(workspace)
    assert await run(made, "echo out; echo err >&2; exit 3") == {"exitCode": 3, "stdout": "out\n", "stderr": "err\n"}
    assert (await run(made, "pwd"))["stdout"].strip() == str(tmp_path)
    assert (await run(create_shell_tool(workspace, cwd="sub"), "pwd"))["stdout"].strip() == str(tmp_path / "sub")
    assert (await run(made, "cat"))["exitCode"] == 0
    assert (await run(made, "kill -9 $$"))["exitCode"] == 128 + signal.SIGKILL


def test_description_names_shell_and_platform(workspace: LocalWorkspace) -> None:  # LES-16
    made = create_shell_tool(workspace, name="bash")
    assert made.name == "bash"
    assert "/bin/sh on Linux" in made.description
    assert "simulated" in create_shell_tool(MemoryWorkspace()).description
    assert not made.read_only
    assert not made.edits_files


async def test_command_gets_only_harmless_variables(workspace: LocalWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:  # WS-13
    monkeypatch.setenv("SECRET_API_KEY", "s")
    monkeypatch.setenv("LC_TIME", "C")
    names = {line.partition("=")[0] for line in (await run(create_shell_tool(workspace), "env"))["stdout"].splitlines()}
    assert "PATH" in names
    assert "LC_TIME" in names
    assert "SECRET_API_KEY" not in names
    for options in ({"inherit_env": ["SECRET_API_KEY"]}, {"inherit_env": True}, {"env": {"SECRET_API_KEY": "s"}}):
        made = create_shell_tool(workspace, **options)  # type: ignore[arg-type]
        assert (await run(made, "echo $SECRET_API_KEY"))["stdout"] == "s\n"


async def test_time_limit_kills_everything_the_command_started(workspace: LocalWorkspace, tmp_path: Path) -> None:  # WS-14, WS-22
    made = create_shell_tool(workspace, max_timeout_ms=200)
    result = await run(made, "echo begun; (sleep 60 & echo $! > child; wait); echo never", timeout_ms=60_000)
    assert result["timedOut"] is True
    assert result["exitCode"] is None
    assert result["stdout"] == "begun\n"
    assert "200 ms" in result["note"]
    await gone(int((tmp_path / "child").read_text()))


async def test_command_without_a_limit_of_its_own_gets_the_default_one(workspace: LocalWorkspace) -> None:  # WS-22
    result = await run(create_shell_tool(workspace, default_timeout_ms=100), "sleep 60")
    assert result["timedOut"] is True
    assert "100 ms" in result["note"]


async def test_command_runs_in_the_folder_given(workspace: LocalWorkspace, tmp_path: Path) -> None:  # WS-22
    (tmp_path / "sub").mkdir()
    result = await run(create_shell_tool(workspace, cwd="sub", name="sh"), "pwd")
    assert result["stdout"].strip().endswith("/sub")
    assert create_shell_tool(workspace, name="sh").name == "sh"


async def gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while not dead(pid):
            await asyncio.sleep(0.005)


def dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_background_process_neither_holds_the_call_nor_outlives_it(workspace: LocalWorkspace, tmp_path: Path) -> None:
    result = await run(create_shell_tool(workspace), "sleep 60 & echo $! > child; echo done")
    assert result == {"exitCode": 0, "stdout": "done\n", "stderr": ""}
    await gone(int((tmp_path / "child").read_text()))


async def test_abort_kills_the_command(workspace: LocalWorkspace, tmp_path: Path) -> None:  # WS-10, WS-14
    ctx = ToolContext("c", abort_signal=AbortSignal())
    task = asyncio.create_task(run(create_shell_tool(workspace), "echo $$ > pid; sleep 60", ctx))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.005)
    ctx.abort_signal.abort("stop")
    result = await task
    assert result["aborted"] is True
    assert result["exitCode"] is None
    await gone(int((tmp_path / "pid").read_text()))


async def test_cancellation_kills_the_command(workspace: LocalWorkspace, tmp_path: Path) -> None:
    task = asyncio.create_task(run(create_shell_tool(workspace), "echo $$ > pid; sleep 60"))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(int((tmp_path / "pid").read_text()))


async def test_output_keeps_head_and_tail(workspace: LocalWorkspace) -> None:  # WS-22
    made = create_shell_tool(workspace, max_output_chars=100)
    text = (await run(made, "i=0; while [ $i -lt 1000 ]; do echo line$i; i=$((i+1)); done"))["stdout"]
    assert text.startswith("line0\n")
    assert text.endswith("line999\n")
    assert "bytes left out" in text
    assert len(text) < 150


async def test_both_streams_together_keep_to_the_result_cap(workspace: LocalWorkspace) -> None:
    made = create_shell_tool(workspace)
    result = await run(made, "yes '\"quoted\"' | head -c 40000; yes '\"quoted\"' | head -c 40000 >&2")
    assert 40_000 < len(encode_result(result).text) <= 50_000
    assert result["exitCode"] == 0


async def test_output_that_is_no_utf8_is_replaced(workspace: LocalWorkspace) -> None:  # W22
    assert (await run(create_shell_tool(workspace), r"printf 'a\377b'"))["stdout"] == "a\ufffdb"


async def test_command_that_cannot_start_is_an_error(workspace: LocalWorkspace) -> None:  # WS-26
    for cwd in ("nowhere", "../up"):
        with pytest.raises(WorkspaceError):
            await run(create_shell_tool(workspace, cwd=cwd), "ls")
    with pytest.raises(WorkspaceError, match="no shell"):
        await run(create_shell_tool(MemoryWorkspace()), "ls")


async def test_memory_workspace_answers_commands_by_its_function() -> None:  # WS-21
    async def later(command: str) -> ShellOutput:
        return ShellOutput(0, f"ran {command}")

    for execute in (lambda command: ShellOutput(0, f"ran {command}"), later):
        assert (await run(create_shell_tool(MemoryWorkspace(exec=execute)), "ls"))["stdout"] == "ran ls"


def test_tool_travels(workspace: LocalWorkspace) -> None:
    made = pickle.loads(pickle.dumps(create_shell_tool(workspace, allow=["ls", exact("pwd"), re.compile("x")])))
    assert made.name == "shell"


async def test_sandboxed_tool_runs_on_the_host_without_a_sandbox() -> None:  # TOOL-18
    async def count(args: Any, sandbox: Any) -> Any:
        return (await sandbox.exec("echo $((1+1))")).stdout

    made = define_tool(name="count", description="Counts.", execute=lambda: None, requires_sandbox=True, sandbox_execute=count)
    assert await call_tool(made, {}, ToolContext("c")) == "2\n"
    assert (await NoopSandbox().exec("pwd")).stdout.strip() == os.getcwd()
