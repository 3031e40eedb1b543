"""Running one process with everything it starts, and ending all of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lousho_ray.cancellation import AbortSignal
from lousho_ray.tools.workspace.paths import WorkspaceError

MARK = "LOUSHO_COMMAND_ID"
"""A variable by which what a command left behind is found, also in a session of its own."""

_READ_BYTES = 65_536
_DRAIN_S = 0.2
"""How long output is read after the end of a command whose pipe somebody still holds: the end of what is in it already."""

_MAX_SWEEPS = 20


@dataclass(frozen=True, slots=True)
class ShellOutput:
    """How a command ended. `exit_code` is `None` when it was killed for its time or an abort, 128 + n when a signal n ended it."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one process: its time, what is kept of each stream, and what ends it early."""

    timeout_ms: float | None = None
    max_output_chars: int = 30_000
    abort: AbortSignal | None = None


async def run_process(
    argv: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    limits: Limits,
    *,
    stdin: bytes | None = None,
    pass_fds: Sequence[int] = (),
    started: Callable[[], Awaitable[object]] | None = None,
) -> ShellOutput:
    """Runs a program in a process group of its own. When it ends, however it does, everything it started is killed.

    Args:
        argv: The program and its arguments.
        cwd: Where it runs.
        env: All of its environment.
        limits: Its time, output and abort signal.
        stdin: What it reads; nothing by default.
        pass_fds: Descriptors it inherits.
        started: Awaited once the process runs. What it raises ends the process and is raised.

    Raises:
        WorkspaceError: When it cannot be started.
    """
    mark = uuid.uuid4().hex
    streams = [await _Stream.open(limits.max_output_chars), await _Stream.open(limits.max_output_chars)]
    try:
        process = await _start(argv, cwd, {**env, MARK: _chained(mark)}, streams, stdin, pass_fds)
    except BaseException:
        for stream in streams:
            stream.transport.close()
        _kill_marked(mark)
        raise
    finally:
        for stream in streams:
            os.close(stream.fd)
    readers = [asyncio.create_task(stream.read()) for stream in streams]
    timed_out = aborted = False
    try:
        if started is not None:
            await started()
        timed_out, aborted = await _ended(process, limits)
    finally:
        await _settled(asyncio.create_task(_end(process, mark, readers)))
    code = None if timed_out or aborted else process.returncode
    code = 128 - code if code is not None and code < 0 else code
    return ShellOutput(code, streams[0].text(), streams[1].text(), timed_out, aborted)


async def _end(process: asyncio.subprocess.Process, mark: str, readers: Sequence[asyncio.Task[None]]) -> None:
    """Kills what is left and reads what it has written."""
    _kill_group(process.pid)
    await process.wait()
    await asyncio.to_thread(_kill_marked, mark)
    _, held = await asyncio.wait(readers, timeout=_DRAIN_S)
    for reader in held:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


async def _settled(task: asyncio.Task[None]) -> None:
    """Waits for a short task to its end, and only then lets a cancellation through."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


async def _start(
    argv: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    streams: Sequence[_Stream],
    stdin: bytes | None,
    pass_fds: Sequence[int],
) -> asyncio.subprocess.Process:
    with contextlib.ExitStack() as stack:
        source: int = asyncio.subprocess.DEVNULL
        if stdin is not None:
            # A file and not a pipe: a program that does not read its input blocks nobody.
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(stdin)
            file.seek(0)
            source = file.fileno()
        try:
            return await asyncio.create_subprocess_exec(
                *argv,
                cwd=cwd,
                env=dict(env),
                stdin=source,
                stdout=streams[0].fd,
                stderr=streams[1].fd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise WorkspaceError(f"The command could not be started: {getattr(error, 'strerror', None) or error}.") from None


async def _ended(process: asyncio.subprocess.Process, limits: Limits) -> tuple[bool, bool]:
    """Waits for the end: whether the time was over, and whether an abort came first."""
    waits: list[asyncio.Task[object]] = [asyncio.create_task(process.wait())]
    if limits.abort is not None:
        waits.append(asyncio.create_task(limits.abort.wait()))
    try:
        limit = None if limits.timeout_ms is None else limits.timeout_ms / 1000
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


def _chained(mark: str) -> str:
    """A command may run an agent that runs commands: they carry the marks of all above them."""
    outer = os.environ.get(MARK)
    return mark if outer is None else f"{outer}:{mark}"


def _kill_marked(mark: str) -> None:
    """Kills what left the process group (`setsid`, daemons). Again and again, since it may just be starting something."""
    for _ in range(_MAX_SWEEPS):
        found = [pid for pid in _pids() if mark.encode() in _mark_of(pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _pids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _mark_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{MARK}=".encode()):
                return entry
    return b""


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
