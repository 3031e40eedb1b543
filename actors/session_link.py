"""The caller's side of a hosted session: a link that the session handle uses, and the handle's view of one turn."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray

from lousho_ray.actors.cluster import CALL_TIMEOUT_S, ActorLostError, ask, attached, look_up_again
from lousho_ray.actors.session import POLL_S, SessionKey
from lousho_ray.actors.shipping import Shipment, Shipper
from lousho_ray.cancellation import AbortReason
from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import PendingTurn
from lousho_ray.errors import AgentExecutionError
from lousho_ray.eventlog import EventLog
from lousho_ray.events import Event, RunDone
from lousho_ray.handle import RunSource
from lousho_ray.ids import new_id
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.messages import Message
from lousho_ray.ports import Observer
from lousho_ray.session import Request

START_TIMEOUT_S = 120.0


class HostedLink:
    """Reaches a session in its actor. Nothing happens before the first call."""

    def __init__(
        self,
        definition: AgentDefinition,
        key: Callable[[], Awaitable[SessionKey]],
        services: Callable[[], tuple[Shipper, Any]],
        host: Callable[[SessionKey], Any],
    ) -> None:
        self._definition = definition
        self._make_key = key
        self._services = services
        self._host = host
        self._key: SessionKey | None = None
        self._actor: Any = None
        self._last_start: concurrent.futures.Future[None] | None = None

    def start(self, request: Request, observers: Sequence[Observer]) -> RunSource:
        turn = HostedTurn(self, request, observers)
        # Actors do not keep the order of calls: a start is sent when the one before it has been answered.
        self._last_start = turn.begin(after=self._last_start)
        return turn

    async def load(self) -> list[Message]:
        messages: list[Message] = await self._call("load")
        return messages

    async def pending(self) -> PendingTurn | None:
        pending: PendingTurn | None = await self._call("pending")
        return pending

    async def approval(self, approval_id: str) -> Mapping[str, Any] | None:
        record: Mapping[str, Any] | None = await self._call("approval", approval_id)
        return record

    async def discard_pending(self) -> None:
        await self._call("discard_pending")

    async def clear(self) -> int:
        count: int = await self._call("clear")
        return count

    async def _call(self, method: str, *args: Any) -> Any:
        key, actor = await self.connect()
        return await self.ask(actor, actor.call.remote(key, await self._ship(), method, *args))

    async def connect(self) -> tuple[SessionKey, Any]:
        if self._key is None:
            await attached()
            self._key = await self._make_key()
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._host, self._key)
            if self._key.private is not None:
                weakref.finalize(self, _forget, self._actor, self._key.private).atexit = False
        return self._key, self._actor

    async def send(self, request: Request) -> Any:
        """Puts a turn in line; returns the actor it runs in."""
        key, actor = await self.connect()
        shipment = await self._ship()
        await self.ask(actor, actor.start.remote(key, shipment, request), timeout_s=START_TIMEOUT_S)
        return actor

    async def ask(self, actor: Any, call: Awaitable[Any], *, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """Awaits a call of the session's actor. When that is lost, the next call looks for the actor anew."""
        try:
            return await ask(call, self.what, timeout_s=timeout_s)
        except ActorLostError:
            look_up_again(actor)
            self._actor = None
            raise

    async def _ship(self) -> Shipment:
        return await self._services()[0].ship(self._definition)

    @property
    def what(self) -> str:
        return f"The actor of session '{self._key.session_id}'" if self._key is not None else "A session actor"


class HostedTurn:
    """A turn that runs in a session actor, as its handle sees it. Events come by long-poll with a cursor."""

    def __init__(self, link: HostedLink, request: Request, observers: Sequence[Observer]) -> None:
        self.run_id = request.run_id
        self._link = link
        self._request = replace(request, observed=request.observed or bool(observers))
        self._observers = tuple(observers)
        # With observers there are two readers, but an actor's log has one: it is read here and kept for the handle.
        self._log: EventLog[Event] | None = EventLog() if observers and request.observed else None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._result: asyncio.Task[ExecutionResult[Any]] | None = None
        self._seen_done = False
        self._started: asyncio.Task[Any]

    def begin(self, after: concurrent.futures.Future[None] | None) -> concurrent.futures.Future[None]:
        """Starts the turn once `after` is done; the future it returns is done when it has. It may be awaited on any event loop."""
        begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._started = self._task(self._start(after))
        self._started.add_done_callback(lambda _: begun.set_result(None))
        self._result = self._task(self._fetch_result())
        if self._observers:
            self._task(self._pump())
        return begun

    async def read(self, cursor: int) -> tuple[list[Event], int, bool]:
        if self._log is not None:
            events, cursor = await self._log.read(cursor)
            return events, cursor, self._log.at_end(cursor)
        return await self._read(cursor)

    async def result(self) -> ExecutionResult[Any]:
        assert self._result is not None
        return await asyncio.shield(self._result)

    def enqueue(self, messages: tuple[Message, ...]) -> tuple[str, Awaitable[bool]]:
        return self._add_input(messages, steer=False)

    def steer(self, messages: tuple[Message, ...]) -> tuple[str, Awaitable[bool]]:
        return self._add_input(messages, steer=True)

    def abort(self, reason: object | None) -> None:
        portable = AbortReason.of(reason)
        self._task(self._control(lambda actor: actor.abort.remote(self.run_id, portable, False)))

    def leave(self) -> None:
        if self._result is not None and not self._result.done():
            reason = AbortReason.of("The consumer left the stream.")
            self._task(self._control(lambda actor: actor.abort.remote(self.run_id, reason, True)))

    async def _start(self, after: concurrent.futures.Future[None] | None) -> Any:
        if after is not None:
            await asyncio.wait({asyncio.wrap_future(after)})
        return await self._link.send(self._request)

    async def _fetch_result(self) -> ExecutionResult[Any]:
        actor = await asyncio.shield(self._started)
        while True:
            try:
                over, result = await self._link.ask(actor, actor.result.remote(self.run_id), timeout_s=POLL_S * 3)
            except ActorLostError as error:
                raise ActorLostError(f"{error.detail} The turn's outcome is unknown: load the session, then send again.") from error
            if over:
                ended: ExecutionResult[Any] = result
                return ended

    async def _read(self, cursor: int) -> tuple[list[Event], int, bool]:
        try:
            actor = await asyncio.shield(self._started)
            batch = await ask(actor.read.remote(self.run_id, cursor), self._link.what, timeout_s=POLL_S * 3)
        except Exception as error:
            return ([] if self._seen_done else self._failure(error, cursor)), cursor, True
        events = list(batch.events)
        self._seen_done = self._seen_done or any(isinstance(event, RunDone) for event in events)
        if batch.end and not self._seen_done:
            assert self._result is not None
            failure = await _error_of(self._result)
            events += self._failure(failure or AgentExecutionError("The run ended without its last event."), batch.cursor)
        return events, batch.cursor, batch.end

    def _failure(self, error: BaseException, seq: int) -> list[Event]:
        """The two events that end a stream whose actor was lost, or whose turn could not start."""
        failed: list[Event] = []
        stamp = Stamp(self.run_id)
        stamp.seq = seq
        Emitter(stamp, (failed.append,)).fail(error)
        self._seen_done = True
        return failed

    async def _pump(self) -> None:
        """Hands the events to the observers here, where the caller is, and keeps them for the handle's own reader."""
        cursor, end = 0, False
        while not end:
            events, cursor, end = await self._read(cursor)
            for event in events:
                for observer in self._observers:
                    observer(event)
                if self._log is not None:
                    self._log.append(event)
                    await self._log.drain()
        if self._log is not None:
            self._log.close()

    def _add_input(self, messages: tuple[Message, ...], *, steer: bool) -> tuple[str, Awaitable[bool]]:
        input_id = new_id("in_")
        return input_id, asyncio.shield(self._task(self._input_applied(input_id, messages, steer)))

    async def _input_applied(self, input_id: str, messages: tuple[Message, ...], steer: bool) -> bool:
        actor = await asyncio.shield(self._started)
        await ask(actor.add_input.remote(self.run_id, input_id, messages, steer), self._link.what)
        applied: bool = await ask(actor.applied.remote(self.run_id, input_id), self._link.what, timeout_s=None)
        return applied

    async def _control(self, call: Callable[[Any], Awaitable[Any]]) -> None:
        actor = await asyncio.shield(self._started)
        await ask(call(actor), self._link.what)

    def _task(self, coroutine: Any) -> asyncio.Task[Any]:
        """A task of this turn; what it raises belongs to whoever awaits it, and makes no noise when nobody does."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


def host_index(key: SessionKey, hosts: int) -> int:
    """Rendezvous hashing: the actor of a session among `hosts`; few sessions move when the number changes."""
    return max(range(hosts), key=lambda index: hashlib.blake2b(f"{index}/{key.text}".encode(), digest_size=8).digest())


def _forget(actor: Any, private: str) -> None:
    """Nobody can reach this session any more. Sent without waiting; an actor that is gone has forgotten it already."""
    # A call would start Ray again after its shutdown, and another cluster does not know the actor.
    with suppress(Exception):
        if ray.is_initialized():
            actor.forget.remote(private).future().add_done_callback(lambda done: done.exception())


async def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    await asyncio.wait({task})
    return None if task.cancelled() else task.exception()
