"""Budgets that processes share: the actor that keeps the accounts of all runs of a job, and a process's ledger over it."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lousho_ray.actors.calling import ACTOR_LOOP, ActorCaller, find_actor
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import AgentExecutionError, message_of
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import LedgerCore, Refusal
from lousho_ray.limits.checks import Cap
from lousho_ray.limits.link import post
from lousho_ray.usage import Spend

CALL_TIMEOUT_S = 15.0

NOTHING = Spend()

MOST_ASKS = 500
"""Asks of one call: it stays below the 100 KB above which Ray stores arguments instead of sending them along."""

FORGET_PROCESS_AFTER_S = 3600.0

ACTOR_OPTIONS: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": 10_000}
"""How to start `BudgetActor`. A restarted one knows no run: those under way fail, later ones work."""


class Ask(NamedTuple):
    """One thing a process wants of its ledger: `open`, `reserve`, `release`, `report`, `totals` or `close`."""

    method: str
    run_id: str
    call_id: str = ""
    spend: Spend = NOTHING
    parent: str | None = None
    caps: Sequence[Cap] = ()


class Answer(NamedTuple):
    """Totals by run, or why there are none; to `reserve` why the call must not be made."""

    totals: Mapping[str, Spend]
    error: str | None = None
    refusal: Refusal | None = None


class BudgetActor:
    """The accounts of all runs of a job. Runs no user code."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._core = LedgerCore()
        self._last: dict[str, tuple[int, list[Answer], float]] = {}
        self._swept_at = clock.now()

    async def apply(self, process_id: str, seq: int, asks: Sequence[Ask]) -> list[Answer]:
        """Does what a process asks for, in order. Sent again with the same `seq` it is answered again and not done again."""
        now = self._clock.now()
        last = self._last.get(process_id)
        if last is not None and last[0] == seq:
            return last[1]
        answers = [self._answer(ask, now) for ask in asks]
        self._last[process_id] = (seq, answers, now)
        self._sweep(now)
        return answers

    def _answer(self, ask: Ask, now: float) -> Answer:
        try:
            match ask.method:
                case "open":
                    self._core.open(ask.run_id, ask.parent, now)
                case "reserve":
                    return Answer({}, refusal=self._core.reserve(ask.run_id, ask.call_id, ask.spend, ask.caps, now))
                case "release":
                    self._core.release(ask.run_id, ask.call_id)
                case "report":
                    return Answer(self._core.report(ask.run_id, ask.call_id, ask.spend, now))
                case "totals":
                    return Answer(self._core.totals(ask.run_id, now))
                case _:
                    self._core.close(ask.run_id)
        except AgentExecutionError as error:
            return Answer({}, error.detail)
        return Answer({})

    def _sweep(self, now: float) -> None:
        if now - self._swept_at >= FORGET_PROCESS_AFTER_S:
            self._swept_at = now
            self._last = {key: last for key, last in self._last.items() if now - last[2] < FORGET_PROCESS_AFTER_S}


class RemoteLedger:
    """A `Ledger` over a `BudgetActor`, for any number of event loops and threads. Made by `remote_ledger`.

    What a process's runs ask for while a call is under way goes with the next one. A call whose answer was lost is repeated and
    counts once. Pickles as the actor's name.

    Args:
        connect: Returns the actor's handle.
        address: Name and namespace of the actor, by which other processes find it.
    """

    def __init__(self, connect: Callable[[], Any], address: tuple[str, str | None] | None = None) -> None:
        self._id = new_id()
        self._address = address
        self._call = ActorCaller(connect, "budget")
        self._loop = ACTOR_LOOP.loop()
        self._lock = threading.Lock()
        self._asks: list[tuple[Ask, asyncio.AbstractEventLoop, asyncio.Future[Answer]]] = []
        self._seq = 0
        self._sending: asyncio.Task[None] | None = None
        self._awake = False

    async def open(self, run_id: str, parent: str | None = None) -> None:
        await self._ask(Ask("open", run_id, parent=parent))

    async def report(self, run_id: str, call_id: str, spend: Spend) -> Mapping[str, Spend]:
        return (await self._ask(Ask("report", run_id, call_id, spend))).totals

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
        with self._lock:
            self._asks.append((ask, loop, future))
            if not self._awake:
                self._awake = True
                self._loop.call_soon_threadsafe(self._start)
        return await future

    def _start(self) -> None:
        self._sending = self._loop.create_task(self._send())

    async def _send(self) -> None:
        """Sends what has gathered, one call at a time, until there is nothing left."""
        while True:
            with self._lock:
                batch, self._asks = self._asks[:MOST_ASKS], self._asks[MOST_ASKS:]
                if not batch:
                    self._awake = False
                    return
            self._seq += 1
            try:
                asks = [ask for ask, _, _ in batch]
                answers: list[Answer] = await self._call("apply", self._id, self._seq, asks, timeout_s=CALL_TIMEOUT_S)
            except Exception as error:
                answers = [Answer({}, message_of(error))] * len(batch)
            by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Answer], Answer]]] = {}
            for (_, loop, future), answer in zip(batch, answers, strict=True):
                by_loop.setdefault(loop, []).append((future, answer))
            for loop, answered in by_loop.items():
                post(loop, functools.partial(_resolve, answered))


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
