"""Running commands: `ShellProvider`, and the one that uses a shell of this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lousho_ray.cancellation import AbortSignal
from lousho_ray.tools.workspace.paths import WorkspaceError
from lousho_ray.tools.workspace.processes import Limits, ShellOutput, run_process

__all__ = [
    "PASSED_ENV",
    "SHELL",
    "NoopSandbox",
    "SandboxAdapter",
    "SandboxShell",
    "ShellOutput",
    "ShellProvider",
    "command_env",
    "describe_shell",
    "run_command",
    "write_host_file",
]

SHELL = "/bin/sh"

PASSED_ENV = ("PATH", "HOME", "USERPROFILE", "TEMP", "TMP", "TMPDIR", "LANG", "TERM")
"""The variables a command gets of its parent's; `LC_*` too. Keys and tokens of the agent's process are not among them."""


class ShellProvider(Protocol):
    """Runs command lines. `shell_description` names shell and platform, for the model."""

    @property
    def shell_description(self) -> str: ...

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: float | None = None,
        max_output_chars: int = 30_000,
        abort: AbortSignal | None = None,
    ) -> ShellOutput:
        """Runs `command` and returns for every way it ends. Raises `WorkspaceError` only when it could not start.

        `cwd` is a path of the workspace, `env` all the command gets, `max_output_chars` what is kept of each stream.
        """
        ...


def describe_shell() -> str:
    return f"{SHELL} on {platform.system()}"


def command_env(extra: Mapping[str, str] | None = None, inherit: Iterable[str] | bool = ()) -> dict[str, str]:
    """The environment of a command: the harmless variables, those `inherit` names (`True` = all), and `extra`."""
    if inherit is True:
        return {**os.environ, **(extra or {})}
    names = {*PASSED_ENV, *(inherit or ())}
    return {key: value for key, value in os.environ.items() if key in names or key.startswith("LC_")} | dict(extra or {})


async def run_command(
    command: str,
    cwd: Path,
    env: Mapping[str, str],
    *,
    timeout_ms: float | None = None,
    max_output_chars: int = 30_000,
    abort: AbortSignal | None = None,
) -> ShellOutput:
    """Runs a command line in a shell of this machine. When it ends, however it does, everything it started is killed.

    Raises:
        WorkspaceError: When the shell cannot be started.
    """
    return await run_process((SHELL, "-c", command), cwd, env, Limits(timeout_ms, max_output_chars, abort))


class SandboxAdapter(Protocol):
    """Where tools run programs. `name` is what people and models call it."""

    @property
    def name(self) -> str: ...

    async def run(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_ms: float | None = None,
        max_output_chars: int = 30_000,
        abort: AbortSignal | None = None,
    ) -> ShellOutput:
        """Runs a program with arguments and returns for every way it ends. Raises `WorkspaceError` only when it could not start."""
        ...

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Puts a file where programs of the sandbox find it."""
        ...


class ShellSandbox:
    """A sandbox that is a shell, too: a command line is a program with an argument."""

    async def exec(
        self: SandboxAdapter,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: float | None = None,
        max_output_chars: int = 30_000,
        abort: AbortSignal | None = None,
    ) -> ShellOutput:
        """Like `ShellProvider.exec`; `cwd` is what `run` takes."""
        return await self.run(
            *(SHELL, ("-c", command)),
            cwd=cwd,
            env=env,
            timeout_ms=timeout_ms,
            max_output_chars=max_output_chars,
            abort=abort,
        )


class NoopSandbox(ShellSandbox):
    """The sandbox of a run that has none: programs run on the host, without isolation."""

    name = "none"

    @property
    def shell_description(self) -> str:
        return describe_shell()

    async def run(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_ms: float | None = None,
        max_output_chars: int = 30_000,
        abort: AbortSignal | None = None,
    ) -> ShellOutput:
        """Like `SandboxAdapter.run`; `cwd` is a directory of the host."""
        limits = Limits(timeout_ms, max_output_chars, abort)
        return await run_process((command, *args), Path(cwd or "."), command_env() if env is None else env, limits, stdin=stdin)

    async def write_file(self, path: str, content: str | bytes) -> None:
        write_host_file(Path(path), content)


def write_host_file(path: Path, content: str | bytes) -> None:
    """Writes a file of this machine, with the directories above it. Raises `WorkspaceError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise WorkspaceError(f"{path.name} could not be written: {error.strerror}.") from None


class SandboxShell:
    """A sandbox as the shell of `create_shell_tool`.

    Args:
        adapter: The sandbox.
        cwd: The directory commands run in, unless the tool names another.
        env: Variables every command gets besides the tool's.
    """

    def __init__(self, adapter: SandboxAdapter, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> None:
        self._adapter, self._cwd, self._env = adapter, cwd, dict(env or {})

    @property
    def shell_description(self) -> str:
        return f"{SHELL} in the sandbox {self._adapter.name!r}"

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: float | None = None,
        max_output_chars: int = 30_000,
        abort: AbortSignal | None = None,
    ) -> ShellOutput:
        """Like `ShellProvider.exec`; `cwd` is a directory of the sandbox."""
        return await self._adapter.run(
            *(SHELL, ("-c", command)),
            cwd=cwd or self._cwd,
            env=(command_env() if env is None else dict(env)) | self._env,
            timeout_ms=timeout_ms,
            max_output_chars=max_output_chars,
            abort=abort,
        )
