"""Sessions: a conversation with one writer. `SessionHost` runs the turns of many sessions; `Session` is the user's handle.

A host is a plain class. In one process the handle talks to it directly; on a cluster it sits in a session actor and the handle
reaches it through a link with the same methods.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import LoushoError
from lousho_ray.events import ContextCleared, Event, RunDone
from lousho_ray.handle import LocalRun, RunSource
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.inbox import QueuedInput
from lousho_ray.loop.open import CallOptions, RunContext
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.run import run
from lousho_ray.messages import Message, complete_prefix
from lousho_ray.ports import Observer, SessionStore
from lousho_ray.subagents import Spawner, open_with_subagents
from lousho_ray.turns import Place, TurnLine

log = logging.getLogger("lousho_ray")

TurnPolicy = Literal["wait", "queue", "steer"]
TURN_POLICIES: tuple[TurnPolicy, ...] = ("wait", "queue", "steer")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One `send()` / `stream()` of a session, as plain data."""

    run_id: str
    input: tuple[Message, ...]
    policy: TurnPolicy = "wait"
    call: CallOptions = field(default_factory=CallOptions)
    observed: bool = False


class SessionLink(Protocol):
    """How a handle reaches the host of its session."""

    def start(self, request: TurnRequest, observers: Sequence[Observer]) -> RunSource:
        """Puts a turn in line at once; `observers` get its events."""
        ...

    async def load(self) -> list[Message]:
        """The saved transcript."""
        ...

    async def clear(self) -> int:
        """Empties the transcript; the number of messages it had."""
        ...


class SessionLines:
    """The lines of all sessions of one process, by store and id: two handles on one session share a line."""

    def __init__(self) -> None:
        self._lines: WeakValueDictionary[tuple[int, str], TurnLine[LocalRun]] = WeakValueDictionary()

    def of(self, store: SessionStore, session_id: str) -> TurnLine[LocalRun]:
        key = (id(store), session_id)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = TurnLine()
        return line


class SessionHost:
    """Runs the turns of one session: one at a time, in the order of the calls.

    A finished turn is saved in one write before its `run.done` is reported. An aborted or failed turn saves nothing.
    """

    def __init__(
        self,
        definition: AgentDefinition,
        session_id: str,
        store: SessionStore,
        line: TurnLine[LocalRun],
        spawner: Callable[[], Spawner] | None,
    ) -> None:
        self._definition = definition
        self._id = session_id
        self._store = store
        self._line = line
        self._spawner = spawner

    def start(self, request: TurnRequest, observers: Sequence[Observer] = ()) -> LocalRun:
        """Puts a turn in line and returns its run. Must be called on the event loop that runs the session's turns."""
        turn = LocalRun(request.run_id)
        target = self._line.last() if request.policy != "wait" else None
        if target is None:
            place = self._line.enter(turn)
            turn.start(self._own_turn(turn, place, request, observers))
            return turn
        item = QueuedInput(request.input)
        (target.inbox.steer if request.policy == "steer" else target.inbox.enqueue)(item)
        place = self._line.join(turn, lambda: item.applied.done() and item.applied.result())
        turn.start(self._joined_turn(turn, place, target, item, request, observers))
        return turn

    async def load(self) -> list[Message]:
        return await self._store.load(self._id) or []

    async def clear(self) -> int:
        if not self._line.idle:
            raise LoushoError(f"Session '{self._id}' cannot be cleared while a turn runs or waits.", code="LOUSHO_SESSION_BUSY")
        count = len(await self.load())
        await self._store.save(self._id, [])
        return count

    async def _own_turn(
        self, turn: LocalRun, place: Place[LocalRun], request: TurnRequest, observers: Sequence[Observer]
    ) -> ExecutionResult[Any]:
        try:
            await _unless_aborted(place.wait(), turn)
            return await self._run(turn, request, observers)
        finally:
            turn.inbox.close()
            place.leave()

    async def _joined_turn(
        self,
        turn: LocalRun,
        place: Place[LocalRun],
        target: LocalRun,
        item: QueuedInput,
        request: TurnRequest,
        observers: Sequence[Observer],
    ) -> ExecutionResult[Any]:
        """Waits for the turn that was joined; its own turn after all when that one ended without taking the input."""
        if not await asyncio.shield(item.applied):
            if target.task.done() and not target.task.cancelled() and target.task.exception() is not None:
                place.leave()
                return target.task.result()
            return await self._own_turn(turn, place, request, observers)
        place.leave()
        emitter = self._emitter(turn, request, observers)
        try:
            result = await target.result()
        except Exception as error:
            emitter.fail(error)
            raise
        emitter.emit(RunDone, finish_reason=result.finish_reason, text=result.text)
        return result

    async def _run(self, turn: LocalRun, request: TurnRequest, observers: Sequence[Observer]) -> ExecutionResult[Any]:
        emitter = self._emitter(turn, request, observers)
        try:
            history = await self.load()
            context = RunContext(
                run_id=turn.run_id,
                input=request.input,
                history=history,
                emitter=emitter,
                abort=turn.signal,
                inbox=turn.inbox,
                call=request.call,
                session_id=self._id,
                commit=self._save,
            )
            spawner = self._spawner() if self._spawner is not None else None
            depth = self._definition.max_subagent_depth
            state, deps = await open_with_subagents(self._definition, "", context, depth, spawner)
        except Exception as error:
            emitter.fail(error)
            raise
        return await run(state, deps)

    async def _save(self, result: ExecutionResult[Any]) -> None:
        """Saves a finished turn; an aborted one is dropped, with a warning when its tools had run."""
        if result.finish_reason == "aborted":
            if result.tool_calls:
                names = ", ".join(sorted({call.name for call in result.tool_calls}))
                log.warning("Session %r dropped an aborted turn whose tools had run: %s", self._id, names)
            return
        await self._store.save(self._id, transcript(result))

    def _emitter(self, turn: LocalRun, request: TurnRequest, observers: Sequence[Observer]) -> Emitter:
        sinks = (*observers, turn.log.append) if request.observed else tuple(observers)
        return Emitter(Stamp(turn.run_id), sinks, drain=turn.log.drain if request.observed else None)


class LocalLink:
    """A session in this process."""

    def __init__(self, host: SessionHost) -> None:
        self._host = host

    def start(self, request: TurnRequest, observers: Sequence[Observer]) -> RunSource:
        return self._host.start(request, observers)

    async def load(self) -> list[Message]:
        return await self._host.load()

    async def clear(self) -> int:
        return await self._host.clear()


def transcript(result: ExecutionResult[Any]) -> list[Message]:
    """What a session keeps of a turn: the conversation without its system prompt, cut where a call has no result."""
    messages = result.messages
    return complete_prefix(messages[1:] if messages and messages[0].role == "system" else messages)


def cleared_event(session_id: str, messages: int) -> Event:
    """The event that `session.on()` listeners get after `clear()`."""
    return ContextCleared(**Stamp(session_id).next(), session_id=session_id, messages_cleared=messages)


async def _unless_aborted(wait: Awaitable[None], turn: LocalRun) -> None:
    """Waits for a place in line; an abort ends the wait, and the run then ends before it calls a model."""
    waiting = asyncio.ensure_future(wait)
    aborted = asyncio.ensure_future(turn.signal.wait())
    try:
        await asyncio.wait({waiting, aborted}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        aborted.cancel()
