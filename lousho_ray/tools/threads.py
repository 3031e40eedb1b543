"""Threads for sync tools: daemonic, reused, limited and counted.

The executor of asyncio will not do: the interpreter joins its threads at exit, so one hung tool would hang the process, and tools
that never return would use its threads up without a sign.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lousho_ray.errors import ToolExecutionError

MAX_RUNNING = 64
"""How many sync tool calls run at once in a process; more wait for their turn."""

MAX_ABANDONED = 64
"""How many threads may be left behind by cancelled calls that never returned before further calls are refused."""

_logger = logging.getLogger("lousho_ray.tools")


@dataclass(eq=False, slots=True)
class _Job:
    name: str
    run: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    started: bool = False
    abandoned: bool = False
    value: Any = None
    error: BaseException | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


class ToolThreads:
    """Runs functions in daemon threads on behalf of coroutines."""

    def __init__(self, max_running: int = MAX_RUNNING, max_abandoned: int = MAX_ABANDONED) -> None:
        self._max_running, self._max_abandoned = max_running, max_abandoned
        self._numbers = itertools.count(1)
        self._warned = False
        self.forget()

    def forget(self) -> None:
        """Starts from nothing: a forked process has none of its parent's threads."""
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._idle = self._running = 0
        self._abandoned: set[_Job] = set()

    @property
    def abandoned(self) -> int:
        """How many cancelled calls still hold a thread."""
        return len(self._abandoned)

    async def run(self, name: str, function: Callable[[], Any]) -> Any:
        """Runs `function` in a thread, with a copy of the caller's context variables.

        A cancelled call that has started is waited for, since a thread cannot be stopped; a second cancellation leaves it behind.
        What `function` raises is raised here, whatever its class.

        Raises:
            ToolExecutionError: `LOUSHO_TOOL_EXECUTION_FAILED` when too many earlier calls were cancelled and never returned.
        """
        self._refuse_when_exhausted(name)
        loop = asyncio.get_running_loop()
        job = _Job(name, function, loop, loop.create_future())
        self._submit(job)
        try:
            await asyncio.shield(job.done)
        except asyncio.CancelledError:
            if self._withdraw(job):
                await asyncio.shield(job.done)
            raise
        if job.error is not None:
            raise job.error
        return job.value

    def _refuse_when_exhausted(self, name: str) -> None:
        if self.abandoned >= self._max_abandoned:
            names = ", ".join(sorted({job.name for job in self._abandoned}))
            raise ToolExecutionError(
                f"No thread is left for tool {name!r}: {self.abandoned} cancelled calls never returned (tools: {names}). "
                "Give those tools a time limit, or make them async.",
                tool_name=name,
            )

    def _submit(self, job: _Job) -> None:
        with self._changed:
            self._waiting.append(job)
            if self._idle >= len(self._waiting):
                self._changed.notify()
            elif self._running < self._max_running:
                self._running += 1
                threading.Thread(target=self._work, name=f"lousho-tool-{next(self._numbers)}", daemon=True).start()
            elif not self._warned:
                self._warned = True
                _logger.warning("All %d threads for sync tools are busy; a call of %r waits for its turn.", self._running, job.name)

    def _withdraw(self, job: _Job) -> bool:
        """Takes back a call that has not started. Returns whether it had; its thread then no longer counts as running."""
        with self._changed:
            if not job.started:
                self._waiting.remove(job)
                return False
            if not job.done.done() and not job.abandoned:
                job.abandoned = True
                self._abandoned.add(job)
                self._running -= 1
                if self._waiting and self._idle < len(self._waiting):
                    self._running += 1
                    threading.Thread(target=self._work, name=f"lousho-tool-{next(self._numbers)}", daemon=True).start()
            return not job.done.done()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                job = self._waiting.popleft()
                job.started = True
            self._perform(job)
            with self._changed:
                self._abandoned.discard(job)
                if job.abandoned:
                    return
            del job  # a waiting thread must not keep the result alive

    def _perform(self, job: _Job) -> None:
        try:
            job.value = job.context.run(job.run)
        except BaseException as error:
            job.error = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            job.loop.call_soon_threadsafe(_finish, job.done)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


TOOL_THREADS = ToolThreads()
"""The threads of this process."""

os.register_at_fork(after_in_child=TOOL_THREADS.forget)
