"""Looking at a running suite, and steering it, from elsewhere: another terminal (a file), another node (an actor).

A suite exchanges its status for the commands that have come, twice a second. Whoever steers appends a command and waits until the
suite says that it was carried out.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lousho_ray.errors import ConfigurationError
from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter

EXCHANGE_S = 0.5
SILENT_AFTER_S = 10.0
"""A suite that has not written its status for this long does not answer."""

CARRIED_OUT_WITHIN_S = 10.0

Command = Mapping[str, Any]
Status = Mapping[str, Any]


class Board(Protocol):
    """Where a suite and those who steer it meet."""

    async def exchange(self, status: Status) -> Sequence[Command]:
        """The suite's side: shows its status, takes the commands that came since the last call."""
        ...

    async def close(self) -> None:
        """The suite has ended."""
        ...


class RemoteSuite(Protocol):
    """A running suite as others see it."""

    async def status(self) -> Status: ...

    async def send(self, command: Command) -> None: ...


class FileBoard:
    """A status file that is replaced, and a commands file that is appended to, in the project's `.lousho` folder.

    In a thread: replacing a file waits for the disk, by tens of milliseconds when that is busy, and all cases would wait with it.
    """

    def __init__(self, folder: Path, suite_id: str) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._status = folder / f"{suite_id}.json"
        self._commands = folder / f"{suite_id}.commands"
        self._read = 0
        folder.mkdir(parents=True, exist_ok=True)

    async def exchange(self, status: Status) -> Sequence[Command]:
        return await asyncio.to_thread(self._exchange, status)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _exchange(self, status: Status) -> Sequence[Command]:
        with self._lock:
            if self._closed:  # the suite has ended while this waited for a thread
                return []
            new = self._status.with_suffix(".tmp")
            new.write_text(json.dumps({**status, "writtenAt": time.time(), "pid": os.getpid(), "host": socket.gethostname()}))
            os.replace(new, self._status)
            lines = self._commands.read_text().split("\n")[:-1] if self._commands.exists() else []
            found, self._read = lines[self._read :], len(lines)
        return [json.loads(line) for line in found]

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._status.unlink(missing_ok=True)
            self._commands.unlink(missing_ok=True)


class FileSuite:
    """A suite of this machine, or of a shared folder."""

    def __init__(self, status: Path) -> None:
        self._status = status

    async def status(self) -> Status:
        try:
            data: dict[str, Any] = json.loads(self._status.read_text())
        except FileNotFoundError:
            return {"id": self._status.stem, "state": "ended"}
        age = time.time() - data.get("writtenAt", 0)
        died = data.get("host") == socket.gethostname() and not _runs(data.get("pid"))
        if died or age > SILENT_AFTER_S:
            data["state"] = "died" if died else "silent"
        return data

    async def send(self, command: Command) -> None:
        with self._status.with_suffix(".commands").open("a") as file:
            file.write(json.dumps(command) + "\n")


def _runs(pid: Any) -> bool:
    return Path("/proc", str(pid)).exists()


def suites_in(folder: Path) -> list[FileSuite]:
    """The suites that have a status file there, those that died included."""
    return [FileSuite(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []


class Steering:
    """The suite's side: carries commands out. `applied` counts those that were."""

    def __init__(
        self,
        boards: Sequence[Board],
        describe: Callable[[], Status],
        pause: Callable[[], object],
        resume: Callable[[], object],
        stop: Callable[[], object],
        retune: Callable[[int], object],
        use_limiter: Callable[[RateLimiter | None], Awaitable[None]],
        limits: Mapping[str, float],
    ) -> None:
        self._boards = boards
        self._describe = describe
        self._verbs = {"pause": pause, "resume": resume, "cancel": stop}
        self._retune = retune
        self._use_limiter = use_limiter
        self._limits = dict(limits)
        self.applied = 0
        self.problem = ""

    async def run(self) -> None:
        """Exchanges status and commands until it is cancelled. A board that is lost does not take the others along."""
        while True:
            for board in self._boards:
                with suppress(Exception):
                    await self.exchange(board)
            await asyncio.sleep(EXCHANGE_S)

    async def exchange(self, board: Board) -> None:
        """One exchange; commands that came are carried out at once and shown as such."""
        commands = await board.exchange(self._shown())
        for command in commands:
            try:
                await self._carry_out(command)
                self.problem = ""
            except Exception as error:
                self.problem = f"{command.get('verb')}: {error}"
            self.applied += 1
        if commands:
            await board.exchange(self._shown())

    async def close(self) -> None:
        for board in self._boards:
            await board.close()

    def _shown(self) -> Status:
        return {**self._describe(), "applied": self.applied, "problem": self.problem, "limits": self._limits}

    async def _carry_out(self, command: Command) -> None:
        verb = command.get("verb")
        if verb in self._verbs:
            self._verbs[verb]()
            return
        if command.get("concurrency") is not None:
            self._retune(int(command["concurrency"]))
        limits = {**self._limits, **(command.get("limits") or {})}
        if limits != self._limits:
            name = f"lousho-eval-{os.urandom(6).hex()}"
            await self._use_limiter(create_rate_limiter(limits, name))
            self._limits = limits


async def choose(suites: Sequence[RemoteSuite], wanted: str | None) -> tuple[RemoteSuite, Status]:
    """The suite that is meant: by the beginning of its id, or the only one that runs.

    Raises:
        ConfigurationError: None runs, none has that id, or several could be meant; they are listed.
    """
    known = [(suite, await suite.status()) for suite in suites]
    alive = [pair for pair in known if pair[1].get("state") not in ("ended", "died")]
    found = [pair for pair in alive if wanted is None or str(pair[1].get("id", "")).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{status.get('id')} ({status.get('results')})" for _, status in alive) or "none"
    said = "No suite runs here" if not alive else "Say which suite" if wanted is None else f"No single suite has the id {wanted!r}"
    raise ConfigurationError(f"{said}. Running: {listed}.", field="suite")


async def steer(suite: RemoteSuite, before: Status, command: Command) -> Status:
    """Sends a command and waits until it was carried out.

    Raises:
        ConfigurationError: The suite did not answer, or could not do it.
    """
    await suite.send(command)
    deadline = time.monotonic() + CARRIED_OUT_WITHIN_S
    while time.monotonic() < deadline:
        status = await suite.status()
        if status.get("state") in ("ended", "died") or status.get("applied", 0) > before.get("applied", 0):
            if status.get("problem"):
                raise ConfigurationError(f"The suite could not do it: {status['problem']}.", field=str(command.get("verb")))
            return status
        await asyncio.sleep(0.05)
    raise ConfigurationError(f"Suite {before.get('id')} did not answer within {CARRIED_OUT_WITHIN_S:g} s.", field="suite")
