"""A process's ledger over the budget actor of its job.

What the runs of a process ask for while a call is under way goes with the next one. What nobody waits for (`open`, `note`) goes
with what somebody does wait for, or after a moment. The process remembers what it was told of its runs, and keeps a `watch` open
while it has some: when the actor is started again, it tells the new one.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lousho_ray.actors.budget import WATCH_S, Answer, Ask, Known, Replied
from lousho_ray.actors.calling import ACTOR_LOOP, ActorCaller, end_if_frozen, find_actor
from lousho_ray.errors import AgentExecutionError, message_of
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import Refusal
from lousho_ray.limits.checks import Cap
from lousho_ray.limits.link import post
from lousho_ray.usage import Spend

CALL_TIMEOUT_S = 15.0

MOST_ASKS = 500
"""Asks of one call: it stays below the 100 KB above which Ray stores arguments instead of sending them along."""

GATHER_S = 0.01
"""For how long what nobody waits for may gather: the figures of a run are as late as that for the others."""

MOST_LIVES = 8
"""How many lives of the actor one call may meet. One that dies at each call is given up."""

WATCH_AGAIN_S = 5.0
"""When to try again after the actor could not be reached."""

MOST_FAILURES = 5
"""After so many it is given up until the next answer: the cluster is gone, or this process has left it."""


class _Entry(NamedTuple):
    """An ask, and who waits for its answer, if anybody does."""

    ask: Ask
    waits: tuple[asyncio.AbstractEventLoop, asyncio.Future[Answer]] | None = None


@dataclass(slots=True)
class _Run:
    """What is known of a run that this process has not closed."""

    line: Mapping[str, Spend] = field(default_factory=dict)
    in_flight: dict[str, Spend] = field(default_factory=dict)
    failed: str | None = None


class RemoteLedger:
    """A `Ledger` over a `BudgetActor`, for any number of event loops and threads. Made by `remote_ledger`.

    A call whose answer was lost is repeated and counts once. Pickles as the actor's name.

    Args:
        connect: Returns the actor's handle.
        address: Name and namespace of the actor, by which other processes find it.
    """

    def __init__(self, connect: Callable[[], Any], address: tuple[str, str | None] | None = None) -> None:
        self._id = new_id()
        self._address = address
        self._call = ActorCaller(connect, "budget", if_silent=end_if_frozen)
        self._loop = ACTOR_LOOP.loop()
        # Guarded by the lock: what any thread may touch.
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._awake = False
        self._later = False
        # Touched on the background loop only.
        self._seq = 0
        self._life = ""
        self._runs: dict[str, _Run] = {}
        self._sending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._restoring = asyncio.Lock()

    async def open(self, run_id: str, parent: str | None = None) -> None:
        """Goes with the run's next ask, which fails when this does."""
        self._add(_Entry(Ask("open", run_id, parent=parent)))

    async def report(self, run_id: str, call_id: str, spend: Spend) -> Mapping[str, Spend]:
        return (await self._ask(Ask("report", run_id, call_id, spend))).totals

    async def note(self, run_id: str, call_id: str, spend: Spend) -> None:
        self._add(_Entry(Ask("report", run_id, call_id, spend)))

    async def reserve(self, run_id: str, call_id: str, estimate: Spend, caps: Sequence[Cap]) -> Refusal | None:
        return (await self._ask(Ask("reserve", run_id, call_id, estimate, caps=caps))).refusal

    async def release(self, run_id: str, call_id: str) -> None:
        await self._ask(Ask("release", run_id, call_id))

    async def totals(self, run_id: str) -> Mapping[str, Spend]:
        return (await self._ask(Ask("totals", run_id))).totals

    async def close(self, run_id: str) -> None:
        await self._ask(Ask("close", run_id))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._address is None:
            raise TypeError("This ledger was made from a handle and has no address: use remote_ledger(actor, namespace).")
        return (remote_ledger, self._address)

    async def _ask(self, ask: Ask) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._add(_Entry(ask, (loop, future)))
        return await future

    def _add(self, entry: _Entry) -> None:
        with self._lock:
            self._entries.append(entry)
            if self._awake:
                return
            if entry.waits is not None:
                self._awake = True
                self._loop.call_soon_threadsafe(self._start)
            elif not self._later:
                self._later = True
                self._loop.call_soon_threadsafe(self._loop.call_later, GATHER_S, self._late)

    # --------------------------------------------------------------------------------------------- on the background loop

    def _late(self) -> None:
        """Sends what nobody waits for, if nothing took it along."""
        with self._lock:
            self._later = False
            if self._awake or not self._entries:
                return
            self._awake = True
        self._start()

    def _start(self) -> None:
        self._sending = self._loop.create_task(self._send())

    async def _send(self) -> None:
        """Sends what has gathered, one call at a time, until there is nothing left."""
        while True:
            with self._lock:
                batch, self._entries = self._entries[:MOST_ASKS], self._entries[MOST_ASKS:]
                if not batch:
                    self._awake = False
                    return
            self._seq += 1
            try:
                answers = await self._apply([entry.ask for entry in batch])
            except Exception as error:
                answers = [Answer({}, message_of(error))] * len(batch)
            self._settle(batch, answers)

    async def _apply(self, asks: Sequence[Ask]) -> list[Answer]:
        for _ in range(MOST_LIVES):
            reply: Replied = await self._call("apply", self._id, self._life, self._seq, asks, timeout_s=CALL_TIMEOUT_S)
            if reply.answers is not None:
                self._life = reply.life
                return reply.answers
            await self._restore(reply.life)
        raise AgentExecutionError(f"The budget actor is lost again each time it is found: {MOST_LIVES} lives in one call.")

    async def _restore(self, life: str) -> None:
        """Tells a new life of the actor what was told by the old ones."""
        async with self._restoring:
            while self._life != life:
                runs = [Known(run.line, dict(run.in_flight)) for run in self._runs.values() if run.line]
                lives = {life}
                for start in range(0, len(runs), MOST_ASKS):
                    life = await self._call("restore", runs[start : start + MOST_ASKS], timeout_s=CALL_TIMEOUT_S)
                    lives.add(life)
                if len(lives) == 1:  # else it was lost again meanwhile
                    self._life = life

    async def _watch(self) -> None:
        """Learns of a new life of the actor while there is something to tell it."""
        failures = 0
        while self._runs and failures < MOST_FAILURES:
            try:
                life: str = await self._call("watch", self._life, timeout_s=WATCH_S + CALL_TIMEOUT_S)
                await self._restore(life)
                failures = 0
            except AgentExecutionError:
                failures += 1
                await asyncio.sleep(WATCH_AGAIN_S)
        self._watching = None

    def _settle(self, batch: Sequence[_Entry], answers: Sequence[Answer]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Answer], Answer]]] = {}
        for entry, answer in zip(batch, answers, strict=True):
            told = self._take_in(entry, answer)
            if entry.waits is not None:
                loop, future = entry.waits
                by_loop.setdefault(loop, []).append((future, told))
        for loop, answered in by_loop.items():
            post(loop, functools.partial(_resolve, answered))
        if self._runs and self._watching is None:
            self._watching = self._loop.create_task(self._watch())

    def _take_in(self, entry: _Entry, answer: Answer) -> Answer:
        """Remembers what an answer says of its run. What nobody waited for fails the run's next ask."""
        ask = entry.ask
        run = self._runs.get(ask.run_id)
        if run is None:
            if ask.method != "open" and not answer.totals:
                return answer
            run = self._runs[ask.run_id] = _Run()
        if answer.totals:
            run.line = answer.totals
        match ask.method:
            case "reserve" if answer.error is None and answer.refusal is None:
                run.in_flight[ask.call_id] = ask.spend
            case "report" | "release":
                run.in_flight.pop(ask.call_id, None)
            case "close":
                del self._runs[ask.run_id]
        if entry.waits is None:
            run.failed = run.failed or answer.error
        elif run.failed is not None:
            answer, run.failed = Answer({}, run.failed), None
        return answer


_LEDGERS: weakref.WeakValueDictionary[tuple[str, str | None], RemoteLedger] = weakref.WeakValueDictionary()
_LEDGERS_LOCK = threading.Lock()


def remote_ledger(actor: str, namespace: str | None = None) -> RemoteLedger:
    """This process's ledger over a named `BudgetActor`; the same object while it is in use. Does not wait."""
    with _LEDGERS_LOCK:
        ledger = _LEDGERS.get((actor, namespace))
        if ledger is None:
            ledger = RemoteLedger(functools.partial(find_actor, actor, namespace), (actor, namespace))
            _LEDGERS[actor, namespace] = ledger
        return ledger


def _resolve(answered: Sequence[tuple[asyncio.Future[Answer], Answer]]) -> None:
    for future, answer in answered:
        if future.done():
            continue
        if answer.error is None:
            future.set_result(answer)
        else:
            future.set_exception(AgentExecutionError(answer.error))
