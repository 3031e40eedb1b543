"""Store actors: one detached actor per location owns the file; everybody else holds a reference to it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.cloudpickle import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lousho_ray.actors.calling import ActorCaller
from lousho_ray.actors.cluster import NAMESPACE, named_actor
from lousho_ray.errors import AgentExecutionError, StorageError
from lousho_ray.stores.location import StoreLocation

CALL_TIMEOUT_S = 30.0
MOST_CALLS = 500
"""Calls of one batch."""

PARTS: Mapping[str, frozenset[str]] = {
    "sessions": frozenset({"load", "save", "delete", "list", "claim", "renew", "release", "holder"}),
    "checkpoints": frozenset({"load", "save", "delete", "delete_prefix", "history"}),
    "approvals": frozenset({"load", "save", "resolve", "restore", "claimed", "delete", "list_pending"}),
    "": frozenset({"aprune"}),
}
"""The methods that may be called through the actor, by part of the store."""

Call = tuple[str, str, tuple[Any, ...], dict[str, Any]]
Answer = tuple[Any, BaseException | None]


@dataclass(frozen=True, slots=True)
class StoreReference:
    """Where a store is: its actor's name, and what the actor opens when it is started (again)."""

    name: str
    source: StoreLocation | bytes
    detached: bool = True

    @classmethod
    def of_location(cls, location: StoreLocation) -> StoreReference:
        digest = hashlib.sha256(location.url.encode()).hexdigest()[:16]
        return cls(f"lousho-store-{digest}", location)

    @classmethod
    def of_object(cls, store: Any, name: str) -> StoreReference:
        """A store of the user's own kind, pickled: its state then lives in the actor."""
        return cls(f"lousho-store-{name}", cloudpickle.dumps(store), detached=False)

    def actor(self) -> Any:
        """The store's actor, started when it is not there: on this node, unless its data can be reached from any."""
        options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 10_000}
        if isinstance(self.source, bytes) or self.source.on_one_machine:
            # The file is on this node's disk: the actor must come back here and nowhere else.
            node = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        if self.detached:
            options["lifetime"] = "detached"
        return named_actor(StoreActor, self.name, self.source, options=options, fresh=True)

    def connect(self) -> RemoteStore:
        return RemoteStore(self)


class StoreActor:
    """Owns one store. Runs no user code unless the store itself is the user's."""

    def __init__(self, source: StoreLocation | bytes) -> None:
        self._store: Any = cloudpickle.loads(source) if isinstance(source, bytes) else source.open()

    async def calls(self, batch: Sequence[Call]) -> list[Answer]:
        """Does the calls of a batch side by side; the store commits the saves among them together."""
        return list(await asyncio.gather(*(self._call(*call) for call in batch)))

    async def ping(self) -> str:
        return type(self._store).__name__

    async def _call(self, part: str, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        try:
            if method not in PARTS.get(part, ()):
                raise StorageError(f"A store has no method {part}.{method}.")
            target = getattr(self._store, part) if part and hasattr(self._store, part) else self._store
            return await getattr(target, method)(*args, **options), None
        except Exception as error:
            return None, error


class RemoteStore:
    """A store behind its actor: implements the store ports. Pickles as its reference."""

    def __init__(self, reference: StoreReference) -> None:
        self.reference = reference
        self._call = ActorCaller(reference.actor, f"store {reference.name}")
        self._batches: dict[asyncio.AbstractEventLoop, _Batcher] = {}
        self.sessions = RemotePart(self, "sessions")
        self.checkpoints = RemotePart(self, "checkpoints")
        self.approvals = RemotePart(self, "approvals")

    async def call(self, part: str, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """One call of the store.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: the store refused it, or its actor cannot be reached.
        """
        loop = asyncio.get_running_loop()
        batcher = self._batches.get(loop)
        if batcher is None:
            for closed in [known for known in self._batches if known.is_closed()]:
                del self._batches[closed]
            batcher = self._batches[loop] = _Batcher(self._call)
        return await batcher.add((part, method, args, options))

    async def aprune(self, older_than_ms: float) -> Any:
        return await self.call("", "aprune", (older_than_ms,), {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteStore, (self.reference,))

    def __repr__(self) -> str:
        return f"<RemoteStore {self.reference.name} in namespace {NAMESPACE!r}>"


class RemotePart:
    """One part of a remote store: each of the part's methods is a call of the actor."""

    def __init__(self, store: RemoteStore, part: str) -> None:
        self._store = store
        self._part = part

    def __getattr__(self, method: str) -> Any:
        if method not in PARTS[self.__dict__["_part"]]:
            raise AttributeError(method)

        async def call(*args: Any, **options: Any) -> Any:
            return await self._store.call(self._part, method, args, options)

        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemotePart, (self._store, self._part))


class _Batcher:
    """Gathers the calls of one event loop: while a batch is on its way, the next one fills."""

    def __init__(self, call: ActorCaller) -> None:
        self._call = call
        self._waiting: list[tuple[Call, asyncio.Future[Any]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def add(self, call: Call) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await future

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_CALLS], self._waiting[MOST_CALLS:]
            try:
                answers = await self._call("calls", [call for call, _ in batch], timeout_s=CALL_TIMEOUT_S)
            except AgentExecutionError as lost:
                answers = [(None, StorageError(lost.detail))] * len(batch)
            for (_, future), (value, error) in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(value)
        self._sending = None
