"""The client side of the worker actors: hands children to the least busy worker and passes on what they report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lousho_ray.actors.cluster import ActorLostError, ask, attached
from lousho_ray.actors.shipping import Shipment, Shipper
from lousho_ray.actors.worker import POLL_S, Report
from lousho_ray.cancellation import AbortReason, AbortSignal
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import LoushoError
from lousho_ray.ids import new_id
from lousho_ray.loop.emitter import Emitter
from lousho_ray.ports import Ledger
from lousho_ray.subagents import ChildOutcome, ChildRun

SUBMIT_TIMEOUT_S = 120.0
"""A worker process takes 0.35 s to start on an idle machine, much longer on a full one."""


class RaySpawner:
    """Runs children on the worker actors of the job. One per event loop."""

    def __init__(self, shipper: Shipper, ledger: Callable[[], Ledger], workers: Callable[[], list[Any]]) -> None:
        self._shipper = shipper
        self._make_ledger = ledger
        self._make_workers = workers
        self._lock = asyncio.Lock()
        self._ledger: Ledger | None = None
        self._workers: list[WorkerClient] = []

    async def ledger(self) -> Ledger:
        async with self._lock:
            await attached()
            if self._ledger is None:
                self._ledger = await asyncio.to_thread(self._make_ledger)
            return self._ledger

    async def run(self, definition: AgentDefinition, child: ChildRun, emitter: Emitter, abort: AbortSignal) -> ChildOutcome:
        try:
            shipment = await self._shipper.ship(definition)
            worker = await self._least_busy()
        except LoushoError as error:
            return ChildOutcome.failed(error)
        return await worker.run(shipment, child, emitter, abort)

    async def _least_busy(self) -> WorkerClient:
        async with self._lock:
            await attached()
            if not self._workers:
                self._workers = [WorkerClient(handle) for handle in await asyncio.to_thread(self._make_workers)]
        return min(self._workers, key=lambda worker: worker.load)


class WorkerClient:
    """One process's conversation with one worker: batches out, reports in, one poll open while children run."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._id = new_id()
        self._children: dict[str, _Child] = {}
        self._unsent: list[tuple[Shipment, ChildRun]] = []
        self._sending: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._cursor = 0
        self._life: str | None = None

    @property
    def load(self) -> int:
        return len(self._children)

    async def run(self, shipment: Shipment, child: ChildRun, emitter: Emitter, abort: AbortSignal) -> ChildOutcome:
        """Runs a child on this worker. A lost worker is an outcome with an `ActorLostError`."""
        running = self._children[child.run_id] = _Child(emitter)
        loop = asyncio.get_running_loop()

        def stop(reason: AbortReason) -> None:
            loop.call_soon_threadsafe(self._stop, child.run_id, reason)

        forget = abort.on_abort(stop)
        self._unsent.append((shipment, child))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        try:
            return await asyncio.shield(running.outcome)
        finally:
            forget()
            self._children.pop(child.run_id, None)

    def _stop(self, run_id: str, reason: AbortReason) -> None:
        if run_id in self._children:
            self._background(ask(self._handle.stop.remote(self._id, [run_id], reason), _WHAT))

    async def _send(self) -> None:
        """Hands over what has gathered, one batch at a time."""
        while self._unsent:
            batch, self._unsent = self._unsent, []
            try:
                life = await ask(self._handle.submit.remote(self._id, batch), _WHAT, timeout_s=SUBMIT_TIMEOUT_S)
            except Exception as error:
                self._lose([child.run_id for _, child in batch], error)
                continue
            self._live(life)
            for _, child in batch:
                if (running := self._children.get(child.run_id)) is not None:
                    running.life = life
            if self._polling is None:
                self._polling = asyncio.create_task(self._poll())
        self._sending = None

    async def _poll(self) -> None:
        """Keeps one poll open while children run."""
        while self._children:
            try:
                answer = await ask(self._handle.poll.remote(self._id, self._cursor), _WHAT, timeout_s=POLL_S * 3)
            except Exception as error:
                self._lose([run_id for run_id, child in self._children.items() if child.life is not None], error)
                self._cursor = 0
                break
            self._live(answer.life)
            self._cursor = answer.cursor
            self._take(answer.reports)
        self._polling = None
        if any(child.life is not None for child in self._children.values()):
            self._polling = asyncio.create_task(self._poll())

    def _live(self, life: str) -> None:
        """A worker with a new life has lost the children of its old one."""
        if self._life is not None and life != self._life:
            lost = [run_id for run_id, child in self._children.items() if child.life is not None and child.life != life]
            self._lose(lost, ActorLostError("The worker's process died and was started again."))
            self._cursor = 0
        self._life = life

    def _take(self, reports: Sequence[Report]) -> None:
        for report in reports:
            child = self._children.get(report.run_id)
            if child is None:
                continue
            if report.event is not None:
                child.emitter.forward((report.event,))
            if report.outcome is not None:
                child.settle(report.outcome)

    def _lose(self, run_ids: Sequence[str], error: Exception) -> None:
        """A lost child is never run again by itself: what it did before is unknown."""
        for run_id in run_ids:
            if (child := self._children.get(run_id)) is not None:
                child.settle(ChildOutcome.failed(error))

    def _background(self, call: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(call)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


class _Child:
    """A child that runs on a worker. `life` is the worker's life it was started in."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.life: str | None = None
        self.outcome: asyncio.Future[ChildOutcome] = asyncio.get_running_loop().create_future()

    def settle(self, outcome: ChildOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


_WHAT = "The worker of this sub-agent"
