"""Worker actors: they run the sub-agents (and eval cases) that other processes hand them.

A client process hands over children in batches and reads what they report from one log per client, by long-poll with a cursor:
their events in order, and how each ended. A client that stops reading while its children run is taken for dead: they are stopped.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray

from lousho_ray.actors.cluster import this_actor
from lousho_ray.actors.event_parcel import packed, unpacked
from lousho_ray.actors.shipping import Shipment, Warehouse, portable
from lousho_ray.cancellation import AbortReason, AbortSignal
from lousho_ray.eventlog import EventLog
from lousho_ray.events import Event
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import Ledger
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.spans import SpanRecord, SpanSender, TraceExporter
from lousho_ray.subagents import ChildOutcome, ChildRun, LocalSpawner, run_child

POLL_S = 10.0
"""How long a poll stays open without news; each renews the client's lease."""

LEASE_S = 30.0
"""A client that has not polled for this long is dead: its children are stopped."""

NO_LIFE = ""
"""The life of a client that the worker does not know."""

WORKER_OPTIONS: dict[str, Any] = {
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 10_000,
    "concurrency_groups": {"control": 4},
}


class Report(NamedTuple):
    """What a child has to say: an event, how a span began or ended, or (last) how it ended."""

    run_id: str
    item: Event | SpanRecord | ChildOutcome


@dataclass(frozen=True, slots=True)
class Reports:
    """The answer to a poll: the children that report, and what, `packed`.

    `life` is another one once the worker has lost or forgotten the client, and its children with it.
    """

    life: str
    run_ids: Sequence[str]
    parcel: bytes
    cursor: int

    @classmethod
    def of(cls, life: str, reports: Sequence[Report], cursor: int) -> Reports:
        return cls(life, [report.run_id for report in reports], packed([report.item for report in reports]), cursor)

    def __iter__(self) -> Iterator[Report]:
        return map(Report, self.run_ids, unpacked(self.parcel))


class WorkerActor:
    """Runs child runs on its event loop.

    Args:
        ledger: Makes the process's client of the job's budget actor.
    """

    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        self._ledger = ledger()
        self._warehouse = Warehouse()
        self._clients: dict[str, _Client] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def submit(self, client_id: str, children: Sequence[tuple[Shipment, ChildRun]]) -> str:
        """Starts children; returns the life they are in. A child that is already known is not started again."""
        self._loop = asyncio.get_running_loop()
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = _Client(self._loop, functools.partial(self._forget, client_id))
        client.renew()
        for shipment, child in children:
            if child.run_id not in client.running:
                client.running[child.run_id] = signal = AbortSignal()
                client.tasks.add(task := asyncio.create_task(self._run(client, shipment, child, signal), name=child.run_id))
                task.add_done_callback(client.tasks.discard)
        return client.life

    async def poll(self, client_id: str, cursor: int) -> Reports:
        """What the client's children reported from `cursor` on; waits up to `POLL_S` for news."""
        client = self._clients.get(client_id)
        if client is None:
            return Reports.of(NO_LIFE, (), 0)
        client.renew()
        reports, cursor = await client.log.read(cursor, wait_s=POLL_S)
        client.renew()
        return Reports.of(client.life, reports, cursor)

    @ray.method(concurrency_group="control")
    async def stop(self, client_id: str, run_ids: Sequence[str], reason: AbortReason) -> None:
        """Aborts children. Runs on a loop of its own, so it gets through while the work loop is busy."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop, client_id, run_ids, reason)

    @ray.method(concurrency_group="control")
    async def running(self) -> int:
        """How many children run."""
        return sum(len(client.running) for client in self._clients.values())

    def _stop(self, client_id: str, run_ids: Sequence[str], reason: AbortReason) -> None:
        client = self._clients.get(client_id)
        for run_id in run_ids if client is not None else ():
            if client is not None and (signal := client.running.get(run_id)) is not None:
                signal.abort(reason)

    async def _run(self, client: _Client, shipment: Shipment, child: ChildRun, signal: AbortSignal) -> None:
        def report(event: Event | SpanRecord) -> None:
            client.log.append(Report(child.run_id, event))

        outcome: ChildOutcome
        try:
            definition = await self._warehouse.unpack(shipment)
            sinks = (report,) if child.observed else ()
            spans: TraceExporter | None = None
            if child.trace.on:
                child = replace(child, trace=replace(child.trace, where=this_actor()))
                spans = SpanSender(report)
            emitter = Emitter(Stamp(child.run_id), sinks, drain=client.log.drain, subagent=child.info, spans=spans)
            outcome = await run_child(definition, child, emitter, signal, self._ledger, LocalSpawner(self._ledger))
        except BaseException as error:
            outcome = ChildOutcome.failed(error)
        client.running.pop(child.run_id, None)
        client.log.append(Report(child.run_id, _portable(outcome)))

    def _forget(self, client_id: str) -> None:
        self._clients.pop(client_id, None)


class _Client:
    """What a worker knows of one client process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, forget: Callable[[], None]) -> None:
        self.life = new_id()
        self.log: EventLog[Report] = EventLog()
        self.running: dict[str, AbortSignal] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._loop = loop
        self._forget = forget
        self._seen = time.monotonic()
        self._timer = loop.call_later(LEASE_S, self._check)

    def renew(self) -> None:
        self._seen = time.monotonic()

    def _check(self) -> None:
        """Ends the client once it has been silent for the length of its lease."""
        left = self._seen + LEASE_S - time.monotonic()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
            return
        self.log.stop_reading()
        self._forget()
        for signal in list(self.running.values()):
            signal.abort("The process that started this sub-agent is gone.")


def _portable(outcome: ChildOutcome) -> ChildOutcome:
    """The outcome with an error that can be sent: one that cannot would lose the reports of all children."""
    return outcome if outcome.error is None else replace(outcome, error=portable(outcome.error))
