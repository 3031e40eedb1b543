"""Worker actors of eval suites: each runs the cases it is handed, many at once, on its event loop.

They belong to the driver of their suite and end with it: after its death no case goes on spending. Cases come in batches; records
(with the lines that were made of them) and spans go back through one log that the driver reads by long-poll with a cursor, and the
call that asks for them brings the next cases.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray

from lousho_ray.actors.cluster import this_actor
from lousho_ray.actors.event_parcel import packed
from lousho_ray.actors.liveness import CONTROL
from lousho_ray.errors import LoushoError
from lousho_ray.evals.hosting import CaseHost, HostSetup, ShippedCase
from lousho_ray.evals.records import Ended
from lousho_ray.evals.runner import lost_record
from lousho_ray.eventlog import EventLog
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import Ledger
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.spans import SpanRecord

POLL_S = 10.0
"""How long a poll stays open without news."""

EVAL_WORKER_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 10_000,
}


class Report(NamedTuple):
    """What a worker says: of the case `key` how a span began or ended, or (last) how it ended itself; of no case why no more of
    them should be started."""

    key: str
    item: Ended | SpanRecord | str


class Reports(NamedTuple):
    """The answer to an exchange: reports, `packed`. Of another life, the worker has not got what it was handed."""

    life: str
    parcel: bytes
    cursor: int


class EvalWorkerActor:
    """Hosts cases of one suite.

    Args:
        setup: What the suite told.
        ledger: Makes this process's client of the suite's ledger.
    """

    def __init__(self, setup: HostSetup, ledger: Callable[[], Ledger]) -> None:
        self._setup = setup
        self._ledger = ledger
        self._life = new_id()
        self._log: EventLog[Report] = EventLog()
        self._host: CaseHost | None = None
        self._running: dict[str, asyncio.Task[None]] = {}

    async def ready(self) -> str:
        """Loads the eval files; returns the life of this process, another one after a restart.

        Raises:
            ConfigurationError: A file is not here or is another one.
        """
        if self._host is None:
            self._host = CaseHost(self._setup, self._ledger, self._halt, self._share)
        return self._life

    async def submit(self, life: str, cases: bytes) -> str:
        """Starts cases, when this is the life they are meant for; returns the life that it is."""
        if life == self._life and self._host is not None:
            for shipped in pickle.loads(cases):
                if shipped.key not in self._running:
                    self._running[shipped.key] = asyncio.create_task(self._run(self._host, shipped), name=shipped.key)
        return self._life

    async def exchange(self, life: str, cases: bytes | None, cursor: int) -> Reports:
        """`submit`, and what was reported from `cursor` on; waits up to `POLL_S` for news."""
        if cases is not None:
            await self.submit(life, cases)
        if life != self._life:
            return Reports(self._life, packed(()), 0)
        reports, cursor = await self._log.read(cursor, wait_s=POLL_S)
        return Reports(life, packed(reports), cursor)

    async def stop(self, keys: Sequence[str]) -> None:
        """Cancels cases; their records say so."""
        for key in keys:
            if (task := self._running.get(key)) is not None:
                task.cancel()

    async def use_limiter(self, limiter: RateLimiter | None) -> None:
        """Calls of cases that start from now on pass this limiter."""
        assert self._host is not None
        self._host.settings.limiter = limiter

    async def close(self) -> None:
        """Closes model clients."""
        if self._host is not None:
            await self._host.close()

    async def _run(self, host: CaseHost, shipped: ShippedCase) -> None:
        def send_span(record: SpanRecord) -> None:
            record.span.set(this_actor())
            self._log.append(Report(shipped.key, record))

        try:
            ended = await host.run(shipped, send_span)
        except BaseException as error:
            failure = error if isinstance(error, Exception) else LoushoError(f"{type(error).__name__} ended the case: {error}")
            ended = Ended.of(lost_record(shipped.key, shipped.eval, shipped.case, shipped.repeat, shipped.file, failure))
        self._running.pop(shipped.key, None)
        self._log.append(Report(shipped.key, ended))

    def _halt(self, reason: str) -> None:
        self._log.append(Report("", reason))

    async def _share(self, limiter: RateLimiter) -> None:
        """Named limiters of eval files are one in all workers."""
        from lousho_ray.agent import runtime_named

        await runtime_named("ray").share(limiter)


def eval_worker(setup: HostSetup, ledger: Callable[[], Ledger], place: dict[str, Any]) -> Any:
    """Starts an eval worker. Blocks only for the request."""
    remote: Any = ray.remote(concurrency_groups={CONTROL: 1})(EvalWorkerActor)  # type: ignore[call-overload]
    return remote.options(**{**EVAL_WORKER_OPTIONS, **place}).remote(setup, ledger)
