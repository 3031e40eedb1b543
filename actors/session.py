"""Session actors: each hosts many sessions and runs their turns. A session id always maps to the same actor of its job."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray

from lousho_ray.actors.cluster import ActorLostError, this_actor
from lousho_ray.actors.event_parcel import packed
from lousho_ray.actors.garbage import collect_rarely, give_back_memory, set_aside
from lousho_ray.actors.session_clients import KEPT_S, NO_LIFE, Client, Endings, Turn
from lousho_ray.actors.shipping import Shipment, Warehouse, portable
from lousho_ray.actors.store import RemoteStore, StoreReference
from lousho_ray.cancellation import AbortReason
from lousho_ray.durable import Sources, StoreParts
from lousho_ray.errors import AgentExecutionError
from lousho_ray.handle import contained
from lousho_ray.loop.inbox import QueuedInput
from lousho_ray.messages import Message
from lousho_ray.session import Request
from lousho_ray.session_host import SessionHost
from lousho_ray.stores.memory import InMemoryApprovalStore
from lousho_ray.subagents import Spawner
from lousho_ray.turns import SessionLines

POLL_S = 10.0
"""How long a read of events stays open without news."""

ANSWERS_IN_S = POLL_S * 3
"""The bound of a call that the actor itself answers within `POLL_S`."""

MANY_TURNS = 200
"""After so many turns an actor that has become idle gives memory back, when it was for `IDLE_S`."""

MOST_TOLD = 1_000
"""Of how many sessions the last turn is kept although its client knows how it ended."""

IDLE_S = 3.0

SESSION_OPTIONS: dict[str, Any] = {
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 10_000,
    "concurrency_groups": {"control": 4},
}


QUESTIONS = frozenset({"load", "pending", "approval", "discard_pending", "clear", "compact", "fork_point", "begin", "set_mode"})
"""The methods of a session that its handle may call besides starting turns."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Names a session: its id in the store of its transcript, or in memory that belongs to one handle (`private`)."""

    session_id: str
    sessions: StoreReference | None = None
    private: str | None = None
    checkpoints: StoreReference | None = None
    approvals: StoreReference | None = None

    @property
    def text(self) -> str:
        return f"{self.sessions.name if self.sessions is not None else self.private}/{self.session_id}"

    @property
    def place(self) -> str:
        """Names where the session's parts are."""
        if self.sessions is None:
            return self.private or ""
        return "|".join("" if part is None else part.name for part in (self.sessions, self.checkpoints, self.approvals))


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of a turn (and span records), `packed`, from the cursor that was asked for; `cursor` is the next one, `end` whether
    that was all."""

    parcel: bytes
    cursor: int
    end: bool


class Start(NamedTuple):
    """A turn to be put in line. The agent may only be named (see `Shipment`).

    `base` is the last turn of the session whose result the client has: of the new one it gets what is not the same.
    """

    key: SessionKey
    shipment: Shipment
    request: Request
    base: str | None = None


class Accepted(NamedTuple):
    """The answer to starts, one by one: `True`: it is in line, `False`: its agent's parcel is needed, or what went wrong."""

    life: str
    answers: Sequence[bool | BaseException]


class SessionActor:
    """Hosts sessions.

    Args:
        spawner: Makes the process's spawner of sub-agents.
        alone: Whether it has its process for itself.
    """

    def __init__(self, spawner: Callable[[], Spawner], *, alone: bool = True) -> None:
        self._spawner = spawner
        self._warming_up = alone
        if alone:
            collect_rarely()
        self._warehouse = Warehouse()
        self._lines = SessionLines()
        self._stores: dict[str, StoreParts] = {}
        self._remotes: dict[str, RemoteStore] = {}
        self._turns: dict[str, Turn] = {}
        self._clients: dict[str, Client] = {}
        self._told: OrderedDict[str, str] = OrderedDict()
        self._forgotten = 0
        self._questions: dict[str, asyncio.Task[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._one_spawner: Spawner | None = None

    async def submit(self, client_id: str, starts: Sequence[Start]) -> Accepted:
        """Puts turns in line, in this order. Doing it again for the same run changes nothing."""
        self._loop = asyncio.get_running_loop()
        client = self._clients.get(client_id)
        if client is None:
            client = self._clients[client_id] = Client(lambda: self._clients.pop(client_id, None), self._were_told)
        client.seen()
        answers: list[bool | BaseException] = []
        for start in starts:
            try:
                answers.append(await self._start(client, start))
            except Exception as error:
                answers.append(portable(error))
        return Accepted(client.life, answers)

    async def poll(self, client_id: str, cursor: int, apart: bool = False) -> Endings:
        """How turns of this client ended, from `cursor` on; waits up to `POLL_S` for the first."""
        client = self._clients.get(client_id)
        return Endings(NO_LIFE, (), 0) if client is None else await client.endings(cursor, POLL_S, apart=apart)

    async def read(self, run_id: str, cursor: int) -> EventBatch:
        """The events of a turn from `cursor` on; waits up to `POLL_S` for the first."""
        turn = self._turn(run_id)
        turn.client.seen()
        events, cursor = await turn.run.log.read(cursor, wait_s=POLL_S)
        turn.client.seen()
        end = turn.run.log.at_end(cursor)
        turn.read = turn.read and not end
        return EventBatch(packed(events), cursor, end)

    async def call(self, key: SessionKey, shipment: Shipment, call_id: str, method: str, *args: Any) -> tuple[bool, Any]:
        """One of the questions a handle asks of its session (see `QUESTIONS`): whether it is answered, and the answer.

        Waits up to `POLL_S`. Asked again with the same `call_id`, it waits for the same answer.
        """
        if method not in QUESTIONS:
            raise AgentExecutionError(f"A session has no method {method!r}.")
        task = self._questions.get(call_id)
        if task is None:
            host = await self._host(key, shipment)
            task = self._questions[call_id] = asyncio.create_task(contained(getattr(host, method)(*args)))
        done, _ = await asyncio.wait({task}, timeout=POLL_S)
        if not done:
            task.add_done_callback(lambda _: self._forget_answer(call_id))
            return False, None
        self._questions.pop(call_id, None)
        return True, task.result()

    async def applied(self, run_id: str, input_id: str) -> bool | None:
        """Whether an input that was enqueued or steered joined its run; `None` when that is not known within `POLL_S`."""
        item = self._turn(run_id).inputs.get(input_id)
        if item is None:
            return False
        await asyncio.wait({item.applied}, timeout=POLL_S)
        return item.applied.result() if item.applied.done() else None

    async def add_input(self, run_id: str, input_id: str, messages: tuple[Message, ...], steer: bool) -> None:
        """Puts an input into a running turn. Calling it again with the same id changes nothing."""
        turn = self._turn(run_id)
        if input_id in turn.inputs:
            return
        item = turn.inputs[input_id] = QueuedInput(messages, id=input_id)
        (turn.run.inbox.steer if steer else turn.run.inbox.enqueue)(item)

    @ray.method(concurrency_group="control")
    async def abort(self, run_id: str, reason: AbortReason, leave: bool) -> None:
        """Aborts a turn; `leave` says that its reader is gone. Gets through while the work loop is busy."""
        turn = self._turns.get(run_id)
        if turn is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(turn.run.leave if leave else turn.run.abort, *(() if leave else (reason,)))

    @ray.method(concurrency_group="control")
    async def forget(self, private: str) -> None:
        """A handle with a session in memory is gone."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stores.pop, private, None)

    @ray.method(concurrency_group="control")
    async def turns(self) -> int:
        """How many turns run or wait."""
        return sum(not turn.run.task.done() for turn in self._turns.values())

    async def _start(self, client: Client, start: Start) -> bool:
        run_id = start.request.run_id
        if run_id in self._turns:
            return True
        if self._warehouse.lacks(start.shipment):
            return False
        host = await self._host(start.key, start.shipment)
        if run_id not in self._turns:
            run = host.start(_placed(start.request))
            request = start.request
            self._turns[run_id] = Turn(run, start.key.text, client, read=request.observed or request.trace is not None)
            base = None if start.base is None else self._turns.get(start.base)
            client.add(run, None if base is None else base.run, observed=start.request.observed)
            run.task.add_done_callback(lambda _: self._ended(run_id))
        return True

    def _were_told(self, run_ids: Sequence[str]) -> None:
        """The client knows how these ended. Where nobody reads their events any more, only the last one of a session is kept: the
        result of the next one is told as what is new to it."""
        for run_id in run_ids:
            if (turn := self._turns.get(run_id)) is None:
                continue
            before = self._told.pop(turn.session, None)
            self._told[turn.session] = run_id
            if before is not None:
                self._forget_told(before)
        while len(self._told) > MOST_TOLD:
            self._forget_told(self._told.popitem(last=False)[1])

    def _forget_told(self, run_id: str) -> None:
        if (turn := self._turns.get(run_id)) is not None and not turn.read:
            self._forget_turn(run_id)

    def _ended(self, run_id: str) -> None:
        asyncio.get_running_loop().call_later(KEPT_S, self._forget_turn, run_id)
        if self._warming_up:
            self._warming_up = False
            set_aside()  # The first turn has imported what all need.

    async def _host(self, key: SessionKey, shipment: Shipment) -> SessionHost:
        definition = await self._warehouse.unpack(shipment)
        parts = self._parts(key)
        if self._one_spawner is None:
            self._one_spawner = self._spawner()
        spawner = self._one_spawner
        line = self._lines.of(parts.sessions, key.session_id)
        return SessionHost(definition, key.session_id, parts, line, lambda: spawner)

    def _parts(self, key: SessionKey) -> StoreParts:
        """The parts of the user's stores; what they lack is kept in this process."""
        if key.place not in self._stores:
            references = (key.sessions, key.checkpoints, key.approvals)
            sources = Sources(*(None if reference is None else self._client_of(reference) for reference in references))
            self._stores[key.place] = sources.parts(InMemoryApprovalStore())
        return self._stores[key.place]

    def _client_of(self, reference: StoreReference) -> RemoteStore:
        """One client a store: sessions of the same store share a line, whatever their other parts."""
        if reference.name not in self._remotes:
            self._remotes[reference.name] = reference.connect()
        return self._remotes[reference.name]

    def _forget_answer(self, call_id: str) -> None:
        """Nobody may come for it any more."""
        asyncio.get_running_loop().call_later(KEPT_S, self._questions.pop, call_id, None)

    def _forget_turn(self, run_id: str) -> None:
        """Nobody may read the turn any more."""
        if self._turns.pop(run_id, None) is not None:
            self._forgotten += 1
        if not self._turns and self._forgotten >= MANY_TURNS:
            self._forgotten = 0
            asyncio.get_running_loop().call_later(IDLE_S, self._rest)

    def _rest(self) -> None:
        """What was kept for the next turn of a session has gone by now, too."""
        if not self._turns:
            give_back_memory()

    def _turn(self, run_id: str) -> Turn:
        turn = self._turns.get(run_id)
        if turn is None:
            raise ActorLostError(
                f"The session actor does not know run {run_id}: it was started again meanwhile, or the run ended long ago."
            )
        return turn


def _placed(request: Request) -> Request:
    """The request with what names this actor on the spans of its turn."""
    trace = request.trace
    return request if trace is None else replace(request, trace=replace(trace, where=this_actor()))
