"""The driver's side of the eval workers: hands cases to the least busy one in batches and takes their records.

A worker that dies loses its cases: each is an error here, never a silent second run. It is started again by Ray, loads the files
anew, and gets further cases. One that is frozen is ended like one that died; one that is busy is waited for.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import ray

from lousho_ray.actors.cluster import ActorLostError, ask, live
from lousho_ray.actors.eval_worker import POLL_S, Report, Reports
from lousho_ray.actors.event_parcel import unpacked
from lousho_ray.actors.liveness import ask_busy
from lousho_ray.errors import AgentExecutionError, ConfigurationError, message_of
from lousho_ray.evals.case_run import STOPPED, Interrupted
from lousho_ray.evals.hosting import ShippedCase
from lousho_ray.evals.loading import PlannedCase
from lousho_ray.evals.records import Ended
from lousho_ray.evals.tracing import exporter_here
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.spans import SpanBook, SpanRecord, TraceExporter

START_TIMEOUT_S = 120.0
POLL_TIMEOUT_S = POLL_S * 3
REVIVE_AGAIN_S = 1.0
CLOSE_TIMEOUT_S = 10.0

GATHERING_SHARE = 0.05
MOST_GATHERING_S = 0.05
"""How long records and cases wait for others to go with them: so much of the time that a case takes, and at most so long. A call
costs the driver as much as five cases, and all workers have one driver."""

AVERAGED_CASES = 20
"""Of how many cases, about, that time is the mean."""

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

    async def run(self, planned: PlannedCase) -> Ended:
        shipped, exporter = ShippedCase.of(planned, _pickled), exporter_here(planned.definition)
        while True:
            worker = await self._a_worker()
            ended = await worker.run(shipped, exporter)
            if ended is not None:
                return ended

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
    """The conversation with one worker: a call that stays open until there are records, and brings the next cases.

    What comes while it is open is handed over by a call of its own: at the start, and when more are to run at once.
    """

    def __init__(self, handle: Any, on_halt: Callable[[str], object], changed: asyncio.Event) -> None:
        self.ready = False
        self.refused: ConfigurationError | None = None
        self._handle = handle
        self._on_halt = on_halt
        self._changed = changed
        self._life = ""
        self._case_s = 0.0
        self._cases: dict[str, _Case] = {}
        self._unsent: dict[str, ShippedCase] = {}
        self._stopped: list[str] = []
        self._open = False
        self._sending: asyncio.Task[None] | None = None
        self._life_task: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return len(self._cases)

    def start(self) -> None:
        self._life_task = asyncio.create_task(self._live())

    async def run(self, shipped: ShippedCase, exporter: TraceExporter | None) -> Ended | None:
        """Runs a case on this worker; `None` when the worker was lost before the case was sent to it.

        Raises:
            ActorLostError: The worker was lost; what the case had done by then is unknown.
            Interrupted: It was cancelled before the case was sent.
        """
        case = self._cases[shipped.key] = _Case(exporter)
        self._unsent[shipped.key] = shipped
        if self._open and self._sending is None:
            self._sending = asyncio.create_task(self._send())
        try:
            return await case.outcome
        except asyncio.CancelledError:
            if case.outcome.cancelled():
                case.outcome = asyncio.get_running_loop().create_future()
                self._stop(shipped.key)
            return await case.outcome
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

    def _stop(self, key: str) -> None:
        if self._unsent.pop(key, None) is not None:
            self._end([key], Interrupted(STOPPED))
            return
        self._stopped.append(key)
        if len(self._stopped) == 1:
            asyncio.get_running_loop().call_soon(self._tell_to_stop)

    def _tell_to_stop(self) -> None:
        """Sent without waiting for the answer; those of a worker that is gone have stopped already."""
        keys, self._stopped = self._stopped, []
        with suppress(ActorLostError):
            live(self._handle).stop.remote(keys)

    def _batch(self) -> tuple[list[str], bytes | None]:
        """The cases to hand over now: their keys, and they themselves as they travel."""
        cases, self._unsent = self._unsent, {}
        return list(cases), pickle.dumps(list(cases.values())) if cases else None

    def _gathering_s(self) -> float:
        return min(MOST_GATHERING_S, GATHERING_SHARE * self._case_s)

    async def _send(self) -> None:
        """Hands over what has come while the other call is open."""
        try:
            await asyncio.sleep(self._gathering_s())
            while self._open and self._unsent:
                keys, cases = self._batch()
                try:
                    life = await ask(live(self._handle).submit.remote(self._life, cases), _WHAT, timeout_s=START_TIMEOUT_S)
                    self._check(life)
                except Exception as error:
                    self._end(keys, error)
        finally:
            self._sending = None

    async def _live(self) -> None:
        """Waits until the worker is ready, then talks to it, from one life to the next."""
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
            self.ready, self._life = True, life
            self._changed.set()
            try:
                await self._talk()
            except Exception as error:
                self._lose(error)

    async def _talk(self) -> None:
        cursor = 0
        while True:
            _, cases = self._batch()
            self._open = True
            try:
                exchange = live(self._handle).exchange
                reports: Reports = await ask_busy(
                    self._handle, exchange.remote(self._life, cases, cursor), _WHAT, timeout_s=POLL_TIMEOUT_S
                )
            finally:
                self._open = False
            self._check(reports.life)
            cursor = reports.cursor
            for report in unpacked(reports.parcel):
                self._take(report)
            await asyncio.sleep(self._gathering_s())

    def _check(self, life: str) -> None:
        if life != self._life:
            raise ActorLostError(f"{_WHAT} was lost: its process was started again.")

    def _take(self, report: Report) -> None:
        case, item = self._cases.get(report.key), report.item
        if isinstance(item, str):
            self._on_halt(item)
        elif case is None or case.outcome.done():
            return
        elif isinstance(item, SpanRecord):
            case.take_span(item)
        else:
            self._case_s += (item.record.duration_ms / 1000 - self._case_s) / AVERAGED_CASES
            case.outcome.set_result(item)

    def _lose(self, error: Exception) -> None:
        """What was sent is lost with the worker; what was not goes to another one."""
        self.ready = False
        unsent, self._unsent = self._unsent, {}
        for key in unsent:
            self._cases[key].outcome.set_result(None)
        self._end(list(self._cases), error)

    def _end(self, keys: Sequence[str], error: Exception) -> None:
        for key in keys:
            if (case := self._cases.get(key)) is not None:
                case.lose(error)


class _Case:
    """A case on a worker, and the book of its spans."""

    def __init__(self, exporter: TraceExporter | None) -> None:
        self.outcome: asyncio.Future[Ended | None] = asyncio.get_running_loop().create_future()
        self._spans = None if exporter is None else SpanBook(exporter)

    def take_span(self, record: SpanRecord) -> None:
        if self._spans is not None:
            self._spans.take(record)

    def lose(self, error: Exception) -> None:
        if not self.outcome.done():
            if self._spans is not None:
                self._spans.lose("RayActorError", message_of(error))
            self.outcome.set_exception(error)


def _pickled(value: Any) -> bytes:
    """A case's value; one of a class that can only be sent by its content, too."""
    try:
        return pickle.dumps(value)
    except Exception:
        from ray.cloudpickle import cloudpickle

        data: bytes = cloudpickle.dumps(value)
        return data
