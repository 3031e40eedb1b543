"""Store actors: one detached actor per location owns the file; everybody else holds a reference to it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ray.cloudpickle import cloudpickle

from lousho_ray.actors.calling import ActorCaller
from lousho_ray.actors.cluster import NAMESPACE, home_of, named_actor, own_place
from lousho_ray.actors.garbage import collect_rarely, set_aside
from lousho_ray.actors.liveness import CONTROL, judge
from lousho_ray.actors.shipping import portable
from lousho_ray.actors.store_calls import Call, CallReceiver, CallSender, Exchange, Lacking
from lousho_ray.errors import AgentExecutionError, StorageError
from lousho_ray.stores.durable_turns import turns_of
from lousho_ray.stores.location import StoreLocation

CALL_TIMEOUT_S = 30.0
RETRY_DELAYS_S = (0.5, 2.0, 4.0, 8.0)
"""Waits between the attempts of a call: an actor whose node was lost is back after up to 18 s."""

MOST_CALLS = 500
"""Calls of one batch."""

PARTS: Mapping[str, frozenset[str]] = {
    "turns": frozenset({"open", "end"}),
    "sessions": frozenset({"load", "save", "delete", "list", "claim", "renew", "release", "holder"}),
    "checkpoints": frozenset({"load", "save", "delete", "delete_prefix", "history"}),
    "approvals": frozenset({"load", "save", "resolve", "restore", "claimed", "delete", "list_pending"}),
    "": frozenset({"aprune"}),
}
"""The methods that may be called through the actor, by part of the store."""

Answer = tuple[Any, BaseException | None]


def offered(store: Any) -> frozenset[str]:
    """The methods that a store has, as `part.method`: optional ones may be missing, and so may whole parts."""
    parts = {part: _part_of(store, part) for part in PARTS}
    return frozenset(
        f"{part}.{method}" for part, methods in PARTS.items() for method in methods if callable(getattr(parts[part], method, None))
    )


def _part_of(store: Any, part: str) -> Any:
    match part:
        case "":
            return store
        case "turns":
            return turns_of(store)
        case "sessions":
            return getattr(store, part, store)  # the object may be a session store itself
        case _:
            return getattr(store, part, None)


@dataclass(frozen=True, slots=True)
class StoreReference:
    """Where a store is: its actor's name, what the actor opens when it is started (again), and the methods that it has."""

    name: str
    source: StoreLocation | bytes
    methods: frozenset[str]
    detached: bool = True

    @classmethod
    def of_location(cls, location: StoreLocation, store: Any = None) -> StoreReference:
        """`store` is the one at that place, if there is an object of it."""
        digest = hashlib.sha256(location.url.encode()).hexdigest()[:16]
        return cls(f"lousho-store-{digest}", location, offered(location.open() if store is None else store))

    @classmethod
    def of_object(cls, store: Any, name: str) -> StoreReference:
        """A store of the user's own kind, pickled: its state then lives in the actor."""
        return cls(f"lousho-store-{name}", cloudpickle.dumps(store), offered(store), detached=False)

    def actor(self) -> Any:
        """The store's actor, started when it is not there: on this machine, unless its data can be reached from any. Blocks.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: the machine that has the file is not in the cluster.
        """
        options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 10_000}
        options["concurrency_groups"] = {CONTROL: 1}
        if isinstance(self.source, bytes):
            options |= own_place().bound  # What it holds was put there by this process and cannot be had again.
        elif self.source.on_one_machine:
            # On another machine the same path would be another file, and an empty one.
            machine, place = home_of(self.name)
            if place is None:
                raise StorageError(
                    f"The store {self.source.url} is a file on the machine {machine}, which is not in the Ray cluster now. "
                    "Start a node there; a store that must outlive its machine is an S3Store."
                )
            options |= place.bound
        if self.detached:
            options["lifetime"] = "detached"
        return named_actor(StoreActor, self.name, self.source, options=options, fresh=True)

    async def end_if_frozen(self, actor: Any) -> None:
        """For an actor that did not answer: a frozen one is started again, unless what it holds would be lost with it."""
        if isinstance(self.source, StoreLocation):
            with suppress(AgentExecutionError):  # The cluster itself is gone, which the next attempt finds out.
                await judge(actor)

    def connect(self) -> RemoteStore:
        return RemoteStore(self)


class StoreActor:
    """Owns one store. Runs no user code unless the store itself is the user's.

    Args:
        source: What to open.
        alone: Whether the actor has its process for itself.
    """

    def __init__(self, source: StoreLocation | bytes, *, alone: bool = True) -> None:
        self._store: Any = cloudpickle.loads(source) if isinstance(source, bytes) else source.open()
        self._receiver = CallReceiver()
        if alone:
            collect_rarely()
            set_aside()

    async def calls(self, batch: Sequence[bytes]) -> list[bytes]:
        """Does the calls of a batch side by side; the store commits the saves among them together.

        Each call and each answer is a pickle of its own: one that cannot be read or sent is no trouble of the others.
        """
        return list(await asyncio.gather(*map(self._answer, batch)))

    async def ping(self) -> str:
        return type(self._store).__name__

    async def _answer(self, call: bytes) -> bytes:
        answer: Answer
        try:
            answer = await self._call(cloudpickle.loads(call)), None
        except Exception as error:
            answer = None, portable(error)
        try:
            packed: bytes = cloudpickle.dumps(answer)
        except Exception as error:
            told = StorageError(f"What the store returned cannot be sent to another process: {type(error).__name__}: {error}")
            packed = cloudpickle.dumps((None, told))
        return packed

    async def _call(self, sent: Call) -> Any:
        if sent.method not in PARTS.get(sent.part, ()):
            raise StorageError(f"A store has no method {sent.name}.")
        call = self._receiver.begin(sent)
        if call is None:
            return Lacking()
        value = await getattr(_part_of(self._store, call.part), call.method)(*call.args, **call.options)
        return self._receiver.end(call, value)


class RemoteStore:
    """A store behind its actor: implements the store ports. Pickles as its reference."""

    def __init__(self, reference: StoreReference) -> None:
        self.reference = reference
        self._call = ActorCaller(reference.actor, f"store {reference.name}", RETRY_DELAYS_S, reference.end_if_frozen)
        self._batches: dict[asyncio.AbstractEventLoop, _Batcher] = {}
        self.sessions = self._part("sessions")
        self.checkpoints = self._part("checkpoints")
        self.approvals = self._part("approvals")
        self.turns = self._part("turns")

    def _part(self, name: str) -> RemotePart | None:
        """`None` when the store has no such part."""
        return RemotePart(self, name) if any(method.startswith(f"{name}.") for method in self.reference.methods) else None

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
        return await batcher.add(Call(part, method, args, options))

    async def aprune(self, older_than_ms: float) -> Any:
        return await self.call("", "aprune", (older_than_ms,), {})

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteStore, (self.reference,))

    def __repr__(self) -> str:
        return f"<RemoteStore {self.reference.name} in namespace {NAMESPACE!r}>"


class RemotePart:
    """One part of a remote store: each method that the store itself has there is a call of the actor."""

    def __init__(self, store: RemoteStore, part: str) -> None:
        self._store = store
        self._part = part

    @property
    def parts(self) -> tuple[Any, Any]:
        """The parts that `turns` works on."""
        return self._store.sessions, self._store.checkpoints

    def __getattr__(self, method: str) -> Any:
        if f"{self.__dict__['_part']}.{method}" not in self.__dict__["_store"].reference.methods:
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
        self._sender = CallSender()
        self._waiting: list[_Entry] = []
        self._sending: asyncio.Task[None] | None = None

    async def add(self, call: Call) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(call, future)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await future

    def _put(self, call: Call, future: asyncio.Future[Any], *, whole: bool = False) -> None:
        sent, exchange = self._sender.begin(call, whole=whole)
        try:
            packed = cloudpickle.dumps(sent)
        except Exception as error:
            what = call.name.strip(".")
            raise StorageError(f"{what} was given what cannot be sent to its store: {type(error).__name__}: {error}") from error
        self._waiting.append(_Entry(packed, exchange, future))

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_CALLS], self._waiting[MOST_CALLS:]
            answers: list[Answer]
            try:
                packed = await self._call("calls", [entry.packed for entry in batch], timeout_s=CALL_TIMEOUT_S)
                answers = [_unpacked(answer) for answer in packed]
            except AgentExecutionError as lost:
                answers = [(None, StorageError(lost.detail))] * len(batch)
            for entry, answer in zip(batch, answers, strict=True):
                self._settle(entry, *answer)
        self._sending = None

    def _settle(self, entry: _Entry, value: Any, error: BaseException | None) -> None:
        if isinstance(value, Lacking):
            self._put(entry.exchange.call, entry.future, whole=True)
            return
        if error is None:
            value = self._sender.end(entry.exchange, value)
        if entry.future.done():
            return
        if error is not None:
            entry.future.set_exception(error)
        else:
            entry.future.set_result(value)


class _Entry(NamedTuple):
    """A call that is to be sent, and who waits for its answer."""

    packed: bytes
    exchange: Exchange
    future: asyncio.Future[Any]


def _unpacked(answer: bytes) -> Answer:
    try:
        unpacked: Answer = cloudpickle.loads(answer)
    except Exception as error:
        return None, StorageError(f"The answer of the store cannot be read here: {type(error).__name__}: {error}")
    return unpacked
