"""Running commands: `ShellProvider`, and the one that uses a shell of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lousho_ray.cancellation import AbortSignal
from lousho_ray.tools.workspace.paths import WorkspaceError

SHELL = "/bin/sh"

PASSED_ENV = ("PATH", "HOME", "USERPROFILE", "TEMP", "TMP", "TMPDIR", "LANG", "TERM")
"""The variables a command gets of its parent's; `LC_*` too. Keys and tokens of the agent's process are not among them."""

_READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class ShellOutput:
    """How a command ended. `exit_code` is `None` when it was killed for its time or an abort, 128 + n when a signal n ended it."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    aborted: bool = False


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
    """Runs a command line in a process group of its own. When it ends, however it does, the whole group is killed.

    Raises:
        WorkspaceError: When the shell cannot be started.
    """
    streams = [await _Stream.open(max_output_chars), await _Stream.open(max_output_chars)]
    try:
        process = await _start(command, cwd, env, streams[0].fd, streams[1].fd)
    except BaseException:
        for stream in streams:
            stream.transport.close()
        raise
    finally:
        for stream in streams:
            os.close(stream.fd)
    readers = [asyncio.create_task(stream.read()) for stream in streams]
    timed_out = aborted = False
    try:
        timed_out, aborted = await _ended(process, timeout_ms, abort)
    finally:
        _kill_group(process.pid)
        await process.wait()
        await asyncio.gather(*readers)
    code = None if timed_out or aborted else process.returncode
    code = 128 - code if code is not None and code < 0 else code
    return ShellOutput(code, streams[0].text(), streams[1].text(), timed_out, aborted)


async def _start(command: str, cwd: Path, env: Mapping[str, str], stdout: int, stderr: int) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *(SHELL, "-c", command),
            cwd=cwd,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise WorkspaceError(f"The command could not be started: {getattr(error, 'strerror', None) or error}.") from None


async def _ended(process: asyncio.subprocess.Process, timeout_ms: float | None, abort: AbortSignal | None) -> tuple[bool, bool]:
    """Waits for the end: whether the time was over, and whether an abort came first."""
    waits: list[asyncio.Task[object]] = [asyncio.create_task(process.wait())]
    if abort is not None:
        waits.append(asyncio.create_task(abort.wait()))
    try:
        limit = None if timeout_ms is None else timeout_ms / 1000
        done, _ = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return not done, bool(done) and waits[0] not in done


def _kill_group(pid: int) -> None:
    # The shell may be gone while what it left in the background lives on in its group, and holds the pipes open.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _Stream:
    """One output of a command. Keeps its beginning (60 %) and its end (40 %), however long it is.

    A pipe of our own: `asyncio`'s process waits for its pipes to close, which a process left in the background prevents.
    """

    def __init__(self, max_chars: int, fd: int, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self.fd, self.transport = fd, transport
        self._reader = reader
        self._head_size = max_chars * 6 // 10
        self._tail_size = max_chars - self._head_size
        self._head, self._tail = bytearray(), bytearray()
        self._dropped = 0

    @classmethod
    async def open(cls, max_chars: int) -> _Stream:
        """`fd` of the result is the end to write to."""
        ours, theirs = os.pipe()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0))
        return cls(max_chars, theirs, reader, transport)

    async def read(self) -> None:
        try:
            while chunk := await self._reader.read(_READ_BYTES):
                room = self._head_size - len(self._head)
                self._head += chunk[:room]
                self._tail += chunk[room:]
                extra = len(self._tail) - self._tail_size
                if extra > 0:
                    self._dropped += extra
                    del self._tail[:extra]
        finally:
            self.transport.close()

    def text(self) -> str:
        if not self._dropped:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = self._head.decode("utf-8", "ignore"), self._tail.decode("utf-8", "ignore")
        return f"{head}\n[... {self._dropped} bytes left out ...]\n{tail}"


class NoopSandbox:
    """The sandbox of a run that has none: commands run on the host, without isolation."""

    @property
    def shell_description(self) -> str:
        return describe_shell()

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
        """Like `ShellProvider.exec`; `cwd` is a directory of the host."""
        return await run_command(
            command,
            Path(cwd or "."),
            command_env() if env is None else env,
            timeout_ms=timeout_ms,
            max_output_chars=max_output_chars,
            abort=abort,
        )
