"""The client side of the worker actors: hands children to the least busy worker and passes on what they report.

A worker that was lost loses its children: each is an outcome with an error, and is told to stop in case it still runs. No more
children go to that worker, as long as there is another one, until it answers again. One that is frozen is started again; one that
is there, but busy, is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from lousho_ray.actors.cluster import (
    KNOWN_TO_LIVE_S,
    LOOK_UP_AGAIN_S,
    ActorLostError,
    ActorSilentError,
    ask,
    attached,
    live,
    look_up_again,
)
from lousho_ray.actors.liveness import BUSY_S, Verdict, ask_busy, judge
from lousho_ray.actors.shipping import Shipment, Shipper
from lousho_ray.actors.worker import POLL_S, Report
from lousho_ray.cancellation import Aborted, AbortReason, AbortSignal
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import LoushoError, message_of
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import Ledger
from lousho_ray.loop.emitter import Emitter
from lousho_ray.spans import SpanBook, SpanRecord
from lousho_ray.subagents import ChildOutcome, ChildRun

SUBMIT_TIMEOUT_S = 120.0
"""A worker process takes 0.35 s to start on an idle machine, much longer on a full one."""

RESTART_PAUSES_S = (0.3, 0.6, 1.2, 2.4, 4.8)
"""Waits for a worker that is being started again: 0.6 s on an idle machine. When its node was lost there are other workers."""

POLL_TIMEOUT_S = POLL_S * 3
"""When a worker counts as hung."""


class RaySpawner:
    """Runs children on the worker actors of the job. One per event loop."""

    def __init__(self, shipper: Shipper, ledger: Callable[[], Ledger], workers: Callable[[], list[Any]]) -> None:
        self._shipper = shipper
        self._make_ledger = ledger
        self._make_workers = workers
        self._lock = asyncio.Lock()
        self._ledger: Ledger | None = None
        self._workers: dict[Any, WorkerClient] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._looked_up = float("-inf")

    async def ledger(self) -> Ledger:
        await self._look_up()
        assert self._ledger is not None
        return self._ledger

    async def run(self, definition: AgentDefinition, child: ChildRun, emitter: Emitter, abort: AbortSignal) -> ChildOutcome:
        try:
            shipment = await abort.guard(self._prepare(definition))
        except Aborted:
            return ChildOutcome(finish_reason="aborted")
        except LoushoError as error:
            return ChildOutcome.failed(error)
        # Nothing is awaited between the choice and the start: children that start at the same time are spread evenly.
        worker = min(self._workers.values(), key=lambda worker: (not worker.answers, worker.load))
        outcome = await worker.run(shipment, child, emitter, abort)
        if outcome.error is not None:
            self._closing.add(task := asyncio.create_task(self._close_account(child.run_id)))
            task.add_done_callback(self._closing.discard)
        return outcome

    async def _close_account(self, run_id: str) -> None:
        """What a lost child had set aside is free again, and a call that it still makes is its last. One that failed by itself has
        closed its account."""
        assert self._ledger is not None
        with suppress(LoushoError):
            await self._ledger.close(run_id)

    async def _prepare(self, definition: AgentDefinition) -> Shipment:
        await self._look_up()
        return await self._shipper.ship(definition)

    async def _look_up(self) -> None:
        """Makes sure that the job's actors are there, now and then, and as long as one does not answer."""
        async with self._lock:
            if time.monotonic() - self._looked_up < LOOK_UP_AGAIN_S and all(worker.answers for worker in self._workers.values()):
                return
            await attached()
            self._ledger = await asyncio.to_thread(self._make_ledger)
            handles = await asyncio.to_thread(self._make_workers)
            self._workers = {handle: self._workers.get(handle) or WorkerClient(handle) for handle in handles}
            self._looked_up = time.monotonic()
        for worker in self._workers.values():
            worker.probe()


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
        self.answers = True
        self._probing = False
        self._answered_at = float("-inf")

    @property
    def load(self) -> int:
        return len(self._children)

    def probe(self) -> None:
        """Asks a worker that has failed whether it is back. Does not wait for the answer, which a hung one gives much later."""
        if self.answers or self._probing:
            return
        self._probing = True

        def answered(error: BaseException | None) -> None:
            self.answers, self._probing = error is None, False

        _watch(live(self._handle).running.remote(), answered)

    async def run(self, shipment: Shipment, child: ChildRun, emitter: Emitter, abort: AbortSignal) -> ChildOutcome:
        """Runs a child on this worker. A lost worker is an outcome with an `ActorLostError`."""
        running = self._children[child.run_id] = _Child(emitter, child.trace.parent_id)
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
        child = self._children.get(run_id)
        if child is None:
            return
        child.stopped = reason
        if child.life is not None:
            self._tell_to_stop([run_id], reason)
            return
        waiting = [entry for entry in self._unsent if entry[1].run_id != run_id]
        if len(waiting) < len(self._unsent):
            self._unsent = waiting
            self._end(run_id, ChildOutcome(finish_reason="aborted"))
        # Else it is on its way to the worker, and told to stop when it has arrived: a stop can overtake it.

    async def _send(self) -> None:
        """Hands over what has gathered, one batch at a time."""
        while self._unsent:
            batch, self._unsent = self._unsent, []
            try:
                await self._reach()
                life = await ask(live(self._handle).submit.remote(self._id, batch), _WHAT, timeout_s=SUBMIT_TIMEOUT_S)
            except Exception as error:
                if isinstance(error, ActorSilentError):
                    await self._is_busy()
                self._lose([child.run_id for _, child in batch], error)
                continue
            self._live(life)
            for _, child in batch:
                if (running := self._children.get(child.run_id)) is not None:
                    running.life = life
                    if running.stopped is not None:
                        self._tell_to_stop([child.run_id], running.stopped)
            if self._polling is None:
                self._polling = asyncio.create_task(self._poll())
        self._sending = None

    async def _reach(self) -> None:
        """Asks a worker that was idle whether it is there, and waits while it is started again, also because it was frozen."""
        for pause_s in (*RESTART_PAUSES_S, None):
            if time.monotonic() - self._answered_at < KNOWN_TO_LIVE_S:
                return
            try:
                bound_s = SUBMIT_TIMEOUT_S if self._life is None else POLL_TIMEOUT_S  # the first call waits for its process
                await ask_busy(self._handle, live(self._handle).running.remote(), _WHAT, timeout_s=bound_s)
                self._answered_at = time.monotonic()
            except ActorLostError:
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)

    async def _poll(self) -> None:
        """Keeps one poll open while children run."""
        answered_at = time.monotonic()
        while any(child.life is not None for child in self._children.values()):
            life = self._life
            try:
                answer = await ask(live(self._handle).poll.remote(self._id, self._cursor), _WHAT, timeout_s=POLL_TIMEOUT_S)
            except Exception as error:
                patient = isinstance(error, ActorSilentError) and time.monotonic() - answered_at < BUSY_S
                busy = patient and await self._is_busy()
                # Children of a later life, which began while this call was open, are not lost with it. Of a busy worker's children
                # those that were told to stop are not waited for.
                lost = {run_id: child for run_id, child in self._children.items() if child.life == life}
                self._lose([run_id for run_id, child in lost.items() if not busy or child.stopped is not None], error)
                continue
            answered_at = time.monotonic()
            self._live(answer.life)
            self._cursor = answer.cursor
            self._take(answer)
        self._polling = None

    async def _is_busy(self) -> bool:
        """Whether a worker that has not answered is there all the same; one that is frozen is started again."""
        try:
            return await judge(self._handle) is Verdict.BUSY
        except LoushoError:  # The cluster itself is gone.
            return False

    def _live(self, life: str) -> None:
        """A worker in a new life has lost the children of the old one, and its reports begin anew."""
        if self._life is not None and life != self._life:
            lost = [run_id for run_id, child in self._children.items() if child.life is not None and child.life != life]
            self._lose(lost, ActorLostError(f"{_WHAT} was lost: its process was started again."))
            self._cursor = 0
        self._life = life
        self._answered_at = time.monotonic()

    def _take(self, reports: Iterable[Report]) -> None:
        for run_id, item in reports:
            child = self._children.get(run_id)
            if child is None:
                continue
            if isinstance(item, ChildOutcome):
                self._end(run_id, item)
            elif isinstance(item, SpanRecord):
                child.take_span(item)
            else:
                child.emitter.forward((item,))

    def _lose(self, run_ids: Sequence[str], error: Exception) -> None:
        """A lost child is never run again by itself: what it did before is unknown."""
        for run_id in run_ids:
            if (child := self._children.get(run_id)) is not None and child.spans is not None:
                child.spans.lose("RayActorError", message_of(error))
            self._end(run_id, ChildOutcome.failed(error))
        self._tell_to_stop(run_ids, AbortReason.of("The process that started this sub-agent has given it up."))
        self.answers, self._answered_at = False, float("-inf")
        look_up_again(self._handle)

    def _end(self, run_id: str, outcome: ChildOutcome) -> None:
        if (child := self._children.pop(run_id, None)) is not None and not child.outcome.done():
            child.outcome.set_result(outcome)

    def _tell_to_stop(self, run_ids: Sequence[str], reason: AbortReason) -> None:
        """Sent without waiting for the answer; a worker that is gone has stopped them already."""
        with suppress(ActorLostError):
            _watch(live(self._handle).stop.remote(self._id, list(run_ids), reason))


class _Child:
    """A child that runs on a worker. `life` is the life it was started in; `stopped` says why it is to stop."""

    def __init__(self, emitter: Emitter, parent_span_id: str | None) -> None:
        self.emitter = emitter
        self.spans = None if emitter.spans is None else SpanBook(emitter.spans, parent_span_id)
        self.life: str | None = None
        self.stopped: AbortReason | None = None
        self.outcome: asyncio.Future[ChildOutcome] = asyncio.get_running_loop().create_future()

    def take_span(self, record: SpanRecord) -> None:
        if self.spans is not None:
            self.spans.take(record)


_WHAT = "The worker of this sub-agent"


def _watch(call: Any, then: Callable[[BaseException | None], None] = lambda _: None) -> None:
    """Calls `then` with how an actor call ended, in a thread of Ray's."""
    call.future().add_done_callback(lambda done: then(done.exception()))
