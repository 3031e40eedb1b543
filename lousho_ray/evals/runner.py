"""Runs the cases of a plan, so many at once, and hands each record on as its case ends.

Where a case runs is its executor's business. The runner decides what runs next, and when nothing more does: paused, halted (no
money or quota left) or stopped (Ctrl-C).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from lousho_ray.evals.case_run import AgentPool, CaseRun, describe, run_case
from lousho_ray.evals.cassettes import SuiteCassettes
from lousho_ray.evals.interceptor import CaseCalls, SuiteBudget
from lousho_ray.evals.loading import PlannedCase
from lousho_ray.evals.progress import SuiteProgress
from lousho_ray.evals.records import CaseRecord, Ended
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.ports import Limiter
from lousho_ray.spans import SpanRecord

ROUNDS_APART = 5
"""Rounds of the event loop between the starts of two cases: cases take about that many until their first request is out. Cases that
start at once would go on in step, all of them at work and then all of them waiting."""

KEPT_AS_RUNS = 100
"""As how many runs in progress a suite counts for Python's search for garbage. What cases leave behind is mostly kept: by default
Python looks through it so often that it is a sixth of a suite's CPU."""


class Executor(Protocol):
    """Runs single cases somewhere. `on_halt` is told why no more of them should be started."""

    on_halt: Callable[[str], object]

    async def run(self, planned: PlannedCase) -> Ended:
        """Runs a case to its end. Cancelling it stops the case and still gives its record. Raises only when the place is lost."""
        ...

    async def use_limiter(self, limiter: RateLimiter | None) -> None:
        """Puts another limiter in place, for the calls of cases that start from now on."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class CaseSettings:
    """What all cases of a suite share."""

    limiter: Limiter | None = None
    budget: SuiteBudget | None = None
    timeout_ms: float | None = None
    target: Any = None
    cassettes: SuiteCassettes | None = None
    share: Callable[[RateLimiter], Awaitable[None]] | None = None


class LocalExecutor:
    """Runs cases on this process's event loop."""

    def __init__(self, settings: CaseSettings, on_halt: Callable[[str], object] = lambda reason: None) -> None:
        self.on_halt = on_halt
        self._settings = settings
        self._agents = AgentPool()

    async def run(self, planned: PlannedCase, send_span: Callable[[SpanRecord], None] | None = None) -> Ended:
        """Runs a case; `send_span` takes its spans where their exporter is in another process."""
        settings = self._settings
        tape = None if settings.cassettes is None else settings.cassettes.of(planned)
        calls = CaseCalls(limiter=settings.limiter, budget=settings.budget, cassettes=tape, on_halt=self.on_halt)
        run = CaseRun(
            planned.definition,
            planned.case,
            planned.repeat,
            planned.key,
            planned.file,
            calls,
            timeout_ms=settings.timeout_ms,
            target=settings.target,
            agents=self._agents,
            share=settings.share,
            review=None if tape is None else tape.review,
            send_span=send_span,
        )
        return Ended.of(await run_case(run))

    async def use_limiter(self, limiter: RateLimiter | None) -> None:
        self._settings.limiter = limiter

    async def close(self) -> None:
        await self._agents.close()


class SuiteRunner:
    """Runs the pending cases of a suite.

    Args:
        pending: What is to run.
        executor: Where it runs.
        concurrency: How many cases run at once; `retune()` changes it.
        on_end: Called with each record, in the order in which cases end.
        progress: Kept up to date.
    """

    def __init__(
        self,
        pending: Iterable[PlannedCase],
        executor: Executor,
        concurrency: int,
        on_end: Callable[[Ended], object],
        progress: SuiteProgress,
    ) -> None:
        self.halted: str | None = None
        self.progress = progress
        self._pending = deque(pending)
        self._executor = executor
        self._wanted = concurrency
        self._on_end = on_end
        self._workers: set[asyncio.Task[None]] = set()
        self._alive = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._open = asyncio.Event()
        self._open.set()

    @property
    def concurrency(self) -> int:
        """How many cases run at once, as it was last set."""
        return self._wanted

    @property
    def left(self) -> int:
        """Cases that have not been started."""
        return len(self._pending)

    async def run(self) -> None:
        """Returns when all cases have ended, or when the suite was halted or stopped and those under way have.

        Raises:
            Exception: A record could not be handed on, such as when the disk is full.
        """
        self._fill()
        try:
            while self._workers:
                await asyncio.wait(set(self._workers), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait(set(self._workers))
            raise
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Cancels the running cases; their records say so, and they run again when the suite is continued."""
        self._stopping = True
        self.progress.state = "stopping"
        for worker in self._workers:
            worker.cancel()

    def halt(self, reason: str) -> None:
        """Starts no more cases: every further one would fail the same way. Those under way end by themselves."""
        if self.halted is None:
            self.halted = reason
            self._open.set()
            self.progress.state = "halted"

    def pause(self) -> None:
        """Starts no more cases until `resume()`."""
        if not self._stopping and self.halted is None:
            self._open.clear()
            self.progress.state = "paused"

    def resume(self) -> None:
        if self.progress.state == "paused":
            self.progress.state = "running"
        self._open.set()

    def retune(self, concurrency: int) -> None:
        """Changes how many cases run at once; with fewer, those under way are finished."""
        self._wanted = concurrency
        self._fill()

    def _fill(self) -> None:
        missing = 0 if self._stopping else min(self._wanted - self._alive, len(self._pending))
        if missing > 0:
            self._alive += missing
            self._begin(self._start(missing))

    async def _start(self, count: int) -> None:
        started = 0
        try:
            for started in range(1, count + 1):  # noqa: B007 - counts those that were started
                self._begin(self._work())
                for _ in range(ROUNDS_APART):
                    await asyncio.sleep(0)
        finally:
            self._alive -= count - started

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._workers.add(task)
        task.add_done_callback(self._left)

    def _left(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and (error := worker.exception()) is not None and self._failure is None:
            self._failure = error
            self.stop()

    async def _work(self) -> None:
        try:
            await self._take_cases()
        finally:
            self._alive -= 1  # at once: of workers that are too many, just so many leave

    async def _take_cases(self) -> None:
        while not self._stopping and self.halted is None and self._alive <= self._wanted:
            await self._open.wait()
            if not self._pending or self._stopping or self.halted is not None:
                return
            planned = self._pending.popleft()
            self.progress.running += 1
            try:
                ended = await self._executor.run(planned)
            except Exception as error:
                ended = Ended.of(lost(planned, error))
            finally:
                self.progress.running -= 1
            self.progress.take(ended.record)
            self._on_end(ended)


def lost(planned: PlannedCase, error: BaseException) -> CaseRecord:
    """The record of a case whose place to run was lost."""
    name, file = planned.definition.name, planned.file
    return lost_record(planned.key, name, planned.case.name, planned.repeat, file, error, planned.definition.tags)


def lost_record(
    key: str, name: str, case: str, repeat: int, file: str, error: BaseException, tags: tuple[str, ...] = ()
) -> CaseRecord:
    return CaseRecord(key, name, case, repeat, file, "outage", error=describe(error), tags=tags)
