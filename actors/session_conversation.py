"""The conversation of one process with one session actor: turns are put in line there, and how they end is told here."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from lousho_ray.actors.cluster import ActorLostError, live
from lousho_ray.actors.conversation import Conversation
from lousho_ray.actors.liveness import ask_busy
from lousho_ray.actors.session import ANSWERS_IN_S, Accepted, Start
from lousho_ray.actors.session_clients import Ending, Endings, endings_in
from lousho_ray.actors.shared_lists import SharedList, SharedLists
from lousho_ray.errors import LoushoError
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.stores.json_form import own

START_TIMEOUT_S = 120.0

_ACTOR = "A session actor"


class RemoteTracebackError(Exception):
    """The traceback of an error that was raised in another process, as the cause of the error here."""


class UnreadableError(Exception):
    """One of several endings cannot be read here."""


class Told(NamedTuple):
    """How turns ended."""

    life: str
    cursor: int
    endings: Sequence[Ending]


class Entry:
    """A turn that is put in line in the actor. Both futures fail with `ActorLostError` when the actor is lost.

    Attributes:
        named: The turn, with its agent only named.
        whole: The turn with its agent's parcel, for an actor that has not got it yet.
        what: Names the actor in errors.
        base: The messages of the last result of this session, if they are known here.
        accepted: Done once the turn is in line there.
        ended: The turn's result, or its error.
    """

    def __init__(self, whole: Start, what: str, base: SharedList | None) -> None:
        self.key = whole.request.run_id
        self.whole = whole
        self.named = whole._replace(shipment=whole.shipment.named())
        self.what = what
        self.base = base
        loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[ExecutionResult[Any]] = loop.create_future()
        for future in (self.accepted, self.ended):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def accept(self) -> None:
        if not self.accepted.done():
            self.accepted.set_result(None)

    def fail(self, error: BaseException) -> None:
        for future in (self.accepted, self.ended):
            if not future.done():
                future.set_exception(error)

    def lose(self, error: BaseException) -> None:
        """The conversation has failed: an error of this turn's own, that names its session."""
        own = copy.copy(error) if isinstance(error, LoushoError) else error
        if isinstance(own, LoushoError):
            own.detail = own.detail.replace(_ACTOR, self.what, 1)
            own.args = (own.detail,)
        self.fail(own)

    def end(self, ending: Ending) -> None:
        if ending.error is None:
            result = ending.result
            if result is not None and ending.same and self.base is not None:
                result.messages = [*own(self.base.items[: ending.same]), *result.messages]
            if not self.ended.done():
                self.ended.set_result(result)  # type: ignore[arg-type]  # a resume that found nothing has none
            return
        if ending.trace and ending.error.__cause__ is None:
            ending.error.__cause__ = RemoteTracebackError(f"\n{ending.trace}")
        self.fail(ending.error)


class SessionConversation(Conversation[Entry, Told]):
    """What one event loop's handles of sessions have to say to one session actor."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, _ACTOR)
        self._turns: dict[str, Entry] = {}
        self._agents: set[str] = set()
        self._known = SharedLists()

    def start(self, turn: Start, what: str) -> Entry:
        """Puts a turn in line there, behind those that this was called for before."""
        base = self._known.get(turn.key.text)
        turn = turn._replace(base=None if base is None else base.token)
        entry = self._turns[turn.request.run_id] = Entry(turn, what, base)
        self._hand_over(entry)
        return entry

    async def _submit(self, batch: Sequence[Entry]) -> str:
        first = [entry.named if entry.whole.shipment.digest in self._agents else entry.whole for entry in batch]
        accepted = await self._ask_to_start(first)
        lacking = [entry for entry, answer in zip(batch, accepted.answers, strict=True) if answer is False]
        answers = dict(zip(batch, accepted.answers, strict=True))
        if lacking:
            accepted = await self._ask_to_start([entry.whole for entry in lacking])
            answers.update(zip(lacking, accepted.answers, strict=True))
        for entry, answer in answers.items():
            if isinstance(answer, BaseException):
                self._turns.pop(entry.key, None)
                entry.fail(answer)
            else:
                self._agents.add(entry.whole.shipment.digest)
                entry.accept()
        return accepted.life

    async def _ask_to_start(self, starts: Sequence[Start]) -> Accepted:
        bound_s = START_TIMEOUT_S if self._life is None else ANSWERS_IN_S  # the first call waits for its process
        accepted: Accepted = await ask_busy(
            self.handle, live(self.handle).submit.remote(self.id, starts), _ACTOR, timeout_s=bound_s
        )
        return accepted

    async def _poll(self, cursor: int) -> Told:
        try:
            return await self._ask_for_ends(cursor, apart=False)
        except UnreadableError:
            return await self._ask_for_ends(cursor, apart=True)

    async def _ask_for_ends(self, cursor: int, *, apart: bool) -> Told:
        answer: Endings = await ask_busy(
            self.handle, live(self.handle).poll.remote(self.id, cursor, apart), _ACTOR, timeout_s=ANSWERS_IN_S
        )
        try:
            endings = [ending for parcel in answer.parcels for ending in endings_in(parcel)]
        except Exception as error:
            raise UnreadableError from error
        return Told(answer.life, answer.cursor, endings)

    def _take(self, answer: Told) -> None:
        for ending in answer.endings:
            self._forget(ending.run_id)
            if (entry := self._turns.pop(ending.run_id, None)) is not None:
                entry.end(ending)
                if ending.result is not None:  # The next turn of this session brings what is new.
                    self._known.put(entry.whole.key.text, entry.key, own(ending.result.messages))

    def _waits(self, key: str) -> bool:
        return key in self._turns

    def _lose(self, keys: Sequence[str], error: Exception) -> None:
        if isinstance(error, ActorLostError):
            self._agents.clear()
        for key in keys:
            if (entry := self._turns.pop(key, None)) is not None:
                entry.lose(error)
