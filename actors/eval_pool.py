"""The driver's side of the eval workers: hands cases to the least busy one in batches and takes their records.

A worker that dies loses its cases: each is an error here, never a silent second run. It is started again by Ray, loads the files
anew, and gets further cases. One that is frozen is ended like one that died; one that is busy is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import ray

from lousho_ray.actors.cluster import ActorLostError, ask, live
from lousho_ray.actors.eval_worker import POLL_S, EvalReport
from lousho_ray.actors.liveness import ask_busy
from lousho_ray.errors import AgentExecutionError, ConfigurationError
from lousho_ray.evals.hosting import ShippedCase
from lousho_ray.evals.loading import PlannedCase
from lousho_ray.evals.records import CaseRecord
from lousho_ray.limits.limiter import RateLimiter

START_TIMEOUT_S = 120.0
POLL_TIMEOUT_S = POLL_S * 3
REVIVE_AGAIN_S = 1.0
CLOSE_TIMEOUT_S = 10.0
_WHAT = "The worker of this eval case"


class RayExecutor:
    """Runs cases on eval workers. Made with their handles, and with what moves a limiter to the cluster.

    `open()` waits until one of them is ready.
    """

    def __init__(self, handles: Sequence[Any], share: Callable[[RateLimiter], Awaitable[None]]) -> None:
        self._share = share
        self.on_halt: Callable[[str], object] = lambda reason: None
        self._changed = asyncio.Event()
        self._workers = [EvalWorkerClient(handle, self._halted, self._changed) for handle in handles]

    async def open(self) -> None:
        """Waits for the first worker; the others join when they are ready.

        Raises:
            ConfigurationError: The eval files cannot be loaded there.
        """
        for worker in self._workers:
            worker.start()
        await self._a_worker()

    async def run(self, planned: PlannedCase) -> CaseRecord:
        worker = await self._a_worker()
        return await worker.run(ShippedCase.of(planned))

    async def use_limiter(self, limiter: RateLimiter | None) -> None:
        """Puts another limiter in place, for the calls of cases that start from now on."""
        if limiter is not None:
            await self._share(limiter)
        await asyncio.gather(*(worker.use_limiter(limiter) for worker in self._workers if worker.ready))

    async def close(self) -> None:
        """Ends the workers."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _a_worker(self) -> EvalWorkerClient:
        """The least busy worker that is ready. Nothing is awaited between the choice and the start."""
        while True:
            ready = [worker for worker in self._workers if worker.ready]
            if ready:
                return min(ready, key=lambda worker: worker.load)
            refused = next((worker.refused for worker in self._workers if worker.refused is not None), None)
            if refused is not None:
                raise refused
            self._changed.clear()
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._changed.wait()
            except TimeoutError:
                raise AgentExecutionError(f"No eval worker was ready within {START_TIMEOUT_S:g} s.") from None

    def _halted(self, reason: str) -> None:
        self.on_halt(reason)


class EvalWorkerClient:
    """The conversation with one worker: batches out, records in, one poll open."""

    def __init__(self, handle: Any, on_halt: Callable[[str], object], changed: asyncio.Event) -> None:
        self.ready = False
        self.refused: ConfigurationError | None = None
        self._handle = handle
        self._on_halt = on_halt
        self._changed = changed
        self._cases: dict[str, asyncio.Future[CaseRecord]] = {}
        self._unsent: list[ShippedCase] = []
        self._sending: asyncio.Task[None] | None = None
        self._life_task: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return len(self._cases)

    def start(self) -> None:
        self._life_task = asyncio.create_task(self._live())

    async def run(self, shipped: ShippedCase) -> CaseRecord:
        """Runs a case on this worker.

        Raises:
            ActorLostError: The worker was lost; what the case had done by then is unknown.
        """
        outcome = self._cases[shipped.key] = asyncio.get_running_loop().create_future()
        self._unsent.append(shipped)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if outcome.done():
                raise
            with suppress(ActorLostError):
                live(self._handle).stop.remote([shipped.key])
            record: CaseRecord = await outcome
            return record
        finally:
            self._cases.pop(shipped.key, None)

    async def use_limiter(self, limiter: RateLimiter | None) -> None:
        await ask(live(self._handle).use_limiter.remote(limiter), _WHAT)

    async def close(self) -> None:
        if self._life_task is not None:
            self._life_task.cancel()
            await asyncio.wait({self._life_task})
        if self.ready:
            try:
                await ask(live(self._handle).close.remote(), _WHAT, timeout_s=CLOSE_TIMEOUT_S)
            except Exception as error:
                self._lose(error)
        ray.kill(self._handle)

    async def _send(self) -> None:
        """Hands over what has gathered: one batch is under way at a time, and while it is the next one gathers."""
        await asyncio.sleep(0)
        while self._unsent:
            batch, self._unsent = self._unsent, []
            try:
                await ask(live(self._handle).submit.remote(batch), _WHAT, timeout_s=START_TIMEOUT_S)
            except Exception as error:
                self._end([shipped.key for shipped in batch], error)
        self._sending = None

    async def _live(self) -> None:
        """Waits until the worker is ready, then reads its log, from one life to the next."""
        while True:
            try:
                life = await ask_busy(self._handle, live(self._handle).ready.remote(), _WHAT, timeout_s=START_TIMEOUT_S)
            except ConfigurationError as error:
                self.refused = error
                self._changed.set()
                return
            except Exception:
                await asyncio.sleep(REVIVE_AGAIN_S)
                continue
            self.ready = True
            self._changed.set()
            try:
                await self._read(life)
            except Exception as error:
                self._lose(error)

    async def _read(self, life: str) -> None:
        cursor = 0
        while True:
            poll = live(self._handle).poll
            now, reports, cursor = await ask_busy(self._handle, poll.remote(cursor), _WHAT, timeout_s=POLL_TIMEOUT_S)
            if now != life:
                raise ActorLostError(f"{_WHAT} was lost: its process was started again.")
            for report in reports:
                self._take(report)

    def _take(self, report: EvalReport) -> None:
        if report.halt is not None:
            self._on_halt(report.halt)
        if report.record is not None:
            outcome = self._cases.get(report.record.key)
            if outcome is not None and not outcome.done():
                outcome.set_result(report.record)

    def _lose(self, error: Exception) -> None:
        self.ready = False
        self._end(list(self._cases), error)

    def _end(self, keys: Sequence[str], error: Exception) -> None:
        for key in keys:
            outcome = self._cases.get(key)
            if outcome is not None and not outcome.done():
                outcome.set_exception(error)
