"""The caller's side of a hosted session: the link that its handle uses."""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from lousho_ray.actors.cluster import (
    CALL_TIMEOUT_S,
    KNOWN_TO_LIVE_S,
    ActorLostError,
    attached,
    live,
    look_up_again,
    this_process,
)
from lousho_ray.actors.hosted_turn import HostedTurn
from lousho_ray.actors.liveness import ask_busy
from lousho_ray.actors.session import ANSWERS_IN_S, SessionKey, Start
from lousho_ray.actors.session_conversation import START_TIMEOUT_S, Entry, SessionConversation
from lousho_ray.actors.shipping import Shipper
from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import PendingTurn
from lousho_ray.exporters import part_of_caller
from lousho_ray.handle import RunSource
from lousho_ray.ids import new_id
from lousho_ray.messages import Message
from lousho_ray.options import Compaction
from lousho_ray.ports import Observer
from lousho_ray.session import Request
from lousho_ray.session_compaction import SessionCompaction
from lousho_ray.spans import TraceContext, TraceExporter

RESTART_PAUSES_S = (0.3, 0.6, 1.2, 2.4, 4.8, 9.6)
"""Waits for an actor that is being started again: 0.6 s for a process, up to 18 s when its node was lost."""


@dataclass(slots=True)
class Services:
    """What all links of one event loop share: how agents are sent, and what is said to each session actor."""

    shipper: Shipper
    spawner: Any
    conversations: dict[Any, SessionConversation] = field(default_factory=dict)


class HostedLink:
    """Reaches a session in its actor. Nothing happens before the first call."""

    def __init__(
        self,
        definition: AgentDefinition,
        key: Callable[[], Awaitable[SessionKey]],
        services: Callable[[], Services],
        host: Callable[[SessionKey], Any],
    ) -> None:
        self._definition = definition
        self._make_key = key
        self._services = services
        self._host = host
        self._key: SessionKey | None = None
        self._actor: Any = None
        self._process = ""
        self._last_start: concurrent.futures.Future[None] | None = None
        self.mode: Any = None
        self.seen = 0
        """How many messages the transcript is known to have had."""

    def start(self, request: Request, observers: Sequence[Observer]) -> RunSource:
        turn = HostedTurn(self, request if request.mode is not None else replace(request, mode=self.mode), observers)
        # Actors do not keep the order of calls: a start is sent when the one before it has been answered.
        self._last_start = turn.begin(after=self._last_start)
        return turn

    def trace(self) -> tuple[TraceContext | None, TraceExporter | None]:
        """How a turn that begins now is traced, and the exporter here that its spans are sent to."""
        if self._definition.exporter is None:
            return None, None
        exporter = part_of_caller(self._definition.exporter)
        return replace(self._definition.trace(), sent=exporter is not None), exporter

    async def load(self) -> list[Message]:
        messages: list[Message] = await self._call("load")
        self.seen = len(messages)
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
        self.seen = 0
        return count

    async def compact(self, options: Compaction) -> tuple[SessionCompaction, list[Message]]:
        # The options travel inside the definition: a strategy of one's own is shipped as a hook is.
        made: tuple[SessionCompaction, list[Message]]
        made = await self._call("compact", definition=replace(self._definition, compaction=options))
        self.seen = len(made[1])
        return made

    async def set_mode(self, mode: Any) -> None:
        self.mode = mode
        if self._actor is not None:  # else no turn of this handle has begun
            await self._call("set_mode", mode)

    async def fork_point(self) -> list[Message]:
        messages: list[Message] = await self._call("fork_point")
        return messages

    async def begin(self, messages: list[Message]) -> bool:
        begun: bool = await self._call("begin", messages)
        return begun

    def sibling(self, session_id: str) -> HostedLink:
        async def key() -> SessionKey:
            own, _ = await self.reach()
            return replace(own, session_id=session_id, private=None if own.private is None else new_id("memory-"))

        return HostedLink(self._definition, key, self._services, self._host)

    async def _call(self, method: str, *args: Any, definition: AgentDefinition | None = None) -> Any:
        """Asks the session something. The answer may take as long as it needs, as long as the actor says that it is there."""
        key, actor = await self.reach()
        shipment, call_id = await self._services().shipper.ship(definition or self._definition), new_id()
        answered = False
        while not answered:
            answered, answer = await self.ask(
                actor, live(actor).call.remote(key, shipment, call_id, method, *args), timeout_s=ANSWERS_IN_S
            )
        return answer

    async def reach(self) -> tuple[SessionKey, Any]:
        """The session's actor, once it is known to be there: one that died at rest is being started again.

        Raises:
            ActorLostError: `LOUSHO_AGENT_EXECUTION_FAILED`: it did not come back.
        """
        for pause_s in (*RESTART_PAUSES_S, None):
            try:
                return await self._connect()
            except ActorLostError:
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def _connect(self) -> tuple[SessionKey, Any]:
        await attached()
        if self._key is None:
            self._key = await self._make_key()
        if self._actor is None or self._process != this_process():
            self._process = this_process()
            self._actor = await asyncio.to_thread(self._host, self._key)
            if self._key.private is not None:
                weakref.finalize(self, _forget, self._actor, self._key.private).atexit = False
        actor = self._actor
        silent_s = time.monotonic() - self._conversation(actor).answered_at
        if silent_s > KNOWN_TO_LIVE_S:
            bound_s = START_TIMEOUT_S if silent_s == float("inf") else ANSWERS_IN_S  # the first call waits for its process
            await self.ask(actor, live(actor).turns.remote(), timeout_s=bound_s)
        return self._key, actor

    async def start_on(self, actor: Any, request: Request) -> Entry:
        """Puts a turn in line there; returns when it is to be sent with what else is."""
        assert self._key is not None
        shipment = await self._services().shipper.ship(self._definition)
        return self._conversation(actor).start(Start(self._key, shipment, request), self.what)

    async def ask(self, actor: Any, call: Awaitable[Any], *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Awaits a call of the session's actor. When that is lost or frozen, the next call looks for the actor anew."""
        try:
            answer = await ask_busy(actor, call, self.what, timeout_s=timeout_s)
        except ActorLostError:
            self.lost(actor)
            raise
        self._conversation(actor).answered_at = time.monotonic()
        return answer

    def lost(self, actor: Any) -> None:
        """The next call looks for the actor anew."""
        look_up_again(actor)
        self._actor = None
        self._conversation(actor).answered_at = float("-inf")

    def _conversation(self, actor: Any) -> SessionConversation:
        conversations = self._services().conversations
        if actor not in conversations:
            conversations[actor] = SessionConversation(actor)
        return conversations[actor]

    @property
    def durable(self) -> bool:
        """Whether the session's turns are checkpointed."""
        return self._key is not None and self._key.checkpoints is not None

    @property
    def resumes(self) -> bool:
        """Whether a turn whose actor was lost is gone on with unasked."""
        return self.durable and self._definition.auto_resume

    @property
    def what(self) -> str:
        return f"The actor of session '{self._key.session_id}'" if self._key is not None else "A session actor"


def host_index(key: SessionKey, hosts: int) -> int:
    """Rendezvous hashing: the actor of a session among `hosts`; few sessions move when the number changes."""
    return max(range(hosts), key=lambda index: hashlib.blake2b(f"{index}/{key.text}".encode(), digest_size=8).digest())


def _forget(actor: Any, private: str) -> None:
    """Nobody can reach this session any more. Sent without waiting; an actor that is gone has forgotten it already."""
    # A call would start Ray again after its shutdown, and another cluster does not know the actor.
    with suppress(Exception):
        if ray.is_initialized():
            actor.forget.remote(private).future().add_done_callback(lambda done: done.exception())
