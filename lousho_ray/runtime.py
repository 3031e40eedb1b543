"""Composition: what the actors of an agent are, in one process or on a cluster. The only place with actor names and options."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lousho_ray.agent import Runtime, RuntimeName
from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import Sources, StoreParts
from lousho_ray.errors import ConfigurationError
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import Ledger, LocalLedger
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.local_link import LocalLink
from lousho_ray.session import SessionLink
from lousho_ray.session_host import SessionHost
from lousho_ray.stores.parts import Parts, has_parts
from lousho_ray.subagents import LocalSpawner, Spawner
from lousho_ray.tools.execute import Place
from lousho_ray.turns import SessionLines
from lousho_ray.usage import Spend

if TYPE_CHECKING:
    from lousho_ray.evals.control import Board, RemoteSuite
    from lousho_ray.evals.hosting import HostSetup
    from lousho_ray.evals.runner import Executor

LIMITERS = "lousho-limiters"


class LocalRuntime:
    """Everything in this process; never imports `ray`."""

    name: RuntimeName = "local"

    def __init__(self) -> None:
        self._lines = SessionLines()

    def spawner(self) -> Spawner:
        """Children of one top-level run share a ledger of their own."""
        return LocalSpawner(LocalLedger())

    def session(self, definition: AgentDefinition, session_id: str, sources: Sources, approvals: Any) -> SessionLink:
        return self._link(definition, sources.parts(approvals), session_id)

    def _link(self, definition: AgentDefinition, parts: StoreParts, id: str) -> LocalLink:
        host = SessionHost(definition, id, parts, self._lines.of(parts.sessions, id), self.spawner)
        return LocalLink(host, partial(self._link, definition, parts))

    async def reach(self, store: Any, part: str = "sessions") -> Any:
        return store

    async def share(self, limiter: RateLimiter) -> None:
        """A limiter in one process is shared already."""


class RayRuntime:
    """Actors on a cluster, which is joined (or started) by the first of them. One state per event loop."""

    name: RuntimeName = "ray"

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()
        self._references: dict[int, tuple[Any, Any]] = {}

    def spawner(self) -> Spawner:
        spawner: Spawner = self._on_this_loop().spawner
        return spawner

    def session(self, definition: AgentDefinition, session_id: str, sources: Sources, approvals: Any) -> SessionLink:
        from lousho_ray.actors.session import SessionKey
        from lousho_ray.actors.session_link import HostedLink

        private = None if sources.sessions is not None else new_id("memory-")

        async def reference(source: Any, part: str) -> Any:
            known = self._known_reference(source)
            return known if known is not None or source is None else await asyncio.to_thread(self._reference, source, part)

        async def key() -> SessionKey:
            sessions = await reference(sources.sessions, "sessions")
            checkpoints = await reference(sources.checkpoints, "checkpoints")
            return SessionKey(session_id, sessions, private, checkpoints, await reference(sources.approvals, "approvals"))

        def host(key: SessionKey) -> Any:
            if definition.subagents:
                # Made here and not by the session actor that is the first to need them: they would end with it.
                _ledger()
                _worker_actors()
            return _session_actor(key)

        return HostedLink(definition, key, self._on_this_loop, host)

    async def reach(self, store: Any, part: str = "sessions") -> Any:
        """The store behind its actor."""
        from lousho_ray.actors.cluster import attached

        await attached()
        return (await asyncio.to_thread(self._reference, store, part)).connect()

    async def share(self, limiter: RateLimiter) -> None:
        """Moves a limiter to the cluster's limiter actor, where every job finds it by its name."""
        from lousho_ray.actors.cluster import attached

        if not limiter.shared:
            await attached()
            await asyncio.to_thread(promote, limiter)

    def _on_this_loop(self) -> Any:
        """What the running event loop has of its own."""
        loop = asyncio.get_running_loop()
        state = self._loops.get(loop)
        if state is None:
            from lousho_ray.actors.session_link import Services
            from lousho_ray.actors.shipping import Shipper
            from lousho_ray.actors.worker_pool import RaySpawner

            shipper = Shipper(promote)
            state = self._loops[loop] = Services(shipper, RaySpawner(shipper, _ledger, _worker_actors))
        return state

    def _known_reference(self, store: Any) -> Any:
        """The reference of a store that was asked for before; does not block."""
        known = self._references.get(id(store))
        return known[1] if known is not None and known[0] is store else None

    def _reference(self, store: Any, part: str) -> Any:
        """Where a store (or a part by itself) is reached on the cluster; the same for the same object."""
        from lousho_ray.actors.store import RemoteStore, StoreReference
        from lousho_ray.stores.location import StoreLocation

        if isinstance(store, RemoteStore):
            return store.reference
        if (known := self._known_reference(store)) is not None:
            return known
        location = getattr(store, "location", None)
        if isinstance(location, StoreLocation):
            reference = StoreReference.of_location(location, store)
            reference.actor()  # Started from here: the file is on this machine.
        else:
            try:
                reference = StoreReference.of_object(store if has_parts(store) else Parts(**{part: store}), new_id())
                # Started here and not by the session actor that is the first to need it: it must not end with that.
                reference.actor()
            except Exception as error:
                raise ConfigurationError(
                    f"The store {type(store).__name__} cannot be moved into an actor: {error}. Use SqliteStore(path), "
                    "or runtime='local'.",
                    field="store",
                ) from error
        self._references[id(store)] = (store, reference)
        return reference


def create_runtime(name: RuntimeName) -> Runtime:
    """The runtime of that name. Starts nothing."""
    return LocalRuntime() if name == "local" else RayRuntime()


def cluster_size() -> int:
    """CPUs of the cluster, which is joined or started. Blocks."""
    from lousho_ray.actors.cluster import attach_sync, cluster_cpus

    attach_sync()
    return cluster_cpus()


async def eval_executor(setup: HostSetup, spent: Spend, *, most: int) -> Executor:
    """Eval workers for a suite, one per CPU of the cluster and at most `most`; with the suite's limiter and account on the cluster.

    Args:
        setup: What the workers are told.
        spent: What earlier runs of the suite have spent.
    """
    from lousho_ray.actors.cluster import attached, cpu_places
    from lousho_ray.actors.eval_pool import RayExecutor
    from lousho_ray.actors.eval_worker import eval_worker
    from lousho_ray.evals.interceptor import SuiteBudget

    await attached()
    if setup.limiter is not None:
        await asyncio.to_thread(promote, setup.limiter)
    if setup.budget is not None:
        await SuiteBudget(await asyncio.to_thread(_ledger), *setup.budget).open(spent)
    places = await asyncio.to_thread(cpu_places)
    handles = [await asyncio.to_thread(eval_worker, setup, _ledger, place.preferred) for place in places[: max(1, most)]]
    executor = RayExecutor(handles, create_runtime("ray").share)
    await executor.open()
    return executor


def tool_place() -> Place:
    """What runs a call of a tool with `ray_options` as a Ray task. Starts nothing."""
    from lousho_ray.actors.tool_task import run_as_task

    return run_as_task


async def eval_board(suite_id: str) -> Board:
    """The board of a suite on the cluster."""
    from lousho_ray.actors.eval_board import ActorBoard

    return await asyncio.to_thread(ActorBoard, suite_id)


async def suites_of_cluster() -> Sequence[RemoteSuite]:
    """The eval suites that run on the cluster, which is joined."""
    from lousho_ray.actors.cluster import attached
    from lousho_ray.actors.eval_board import suites_of_cluster

    await attached()
    return await suites_of_cluster()


def promote(limiter: RateLimiter) -> None:
    """Moves a limiter of this process, with its queue and windows, into the limiter actor of the cluster. Blocks.

    One that was moved before finds the actor there: this may be another cluster than it was then.
    """
    from lousho_ray.actors.cluster import NAMESPACE
    from lousho_ray.actors.limiter import LimiterReference

    name = limiter.name or limiter.key
    _limiter_actor()
    limiter.promote(lambda limits: LimiterReference(LIMITERS, NAMESPACE, name, limits).connect())


def _limiter_actor() -> Any:
    """One for all jobs of the cluster: it outlives the job that started it."""
    from lousho_ray.actors.cluster import named_actor, own_place
    from lousho_ray.actors.limiter import ACTOR_OPTIONS, RateLimiterActor

    return named_actor(RateLimiterActor, LIMITERS, options={**ACTOR_OPTIONS, **own_place().preferred, "lifetime": "detached"})


def _ledger() -> Ledger:
    """This process's client of the job's budget actor. Blocks while the actor starts."""
    from lousho_ray.actors.budget import ACTOR_OPTIONS, BudgetActor
    from lousho_ray.actors.budget_client import remote_ledger
    from lousho_ray.actors.cluster import NAMESPACE, job_id, named_actor, own_place

    name = f"lousho-budget-{job_id()}"
    named_actor(BudgetActor, name, options={**ACTOR_OPTIONS, **own_place().preferred})
    return remote_ledger(name, NAMESPACE)


def _worker_actors() -> list[Any]:
    """The workers of this job, one per CPU that the cluster has now: they come and go with their nodes. Blocks."""
    from lousho_ray.actors.cluster import cpu_places, job_id, let_go, named_actor
    from lousho_ray.actors.worker import WORKER_OPTIONS, WorkerActor

    prefix = f"lousho-worker-{job_id()}-"
    places = {f"{prefix}{place.name}": place for place in cpu_places()}
    let_go(prefix, places)
    return [named_actor(WorkerActor, name, _ledger, options={**WORKER_OPTIONS, **place.bound}) for name, place in places.items()]


def _session_actor(key: Any) -> Any:
    """The actor that hosts a session: always the same one of this job, whatever nodes come and go. Blocks."""
    from lousho_ray.actors.cluster import cpu_places, held_actor, job_id, named_actor, this_process
    from lousho_ray.actors.session import SESSION_OPTIONS, SessionActor
    from lousho_ray.actors.session_link import host_index

    prefix = f"lousho-sessions-{job_id()}"
    index = host_index(key, _session_actors(prefix, this_process()))
    held = held_actor(f"{prefix}-{index}")
    if held is not None:
        return held
    places = cpu_places()
    options = {**SESSION_OPTIONS, **places[index % len(places)].preferred}
    return named_actor(SessionActor, f"{prefix}-{index}", _actor_spawner, options=options)


@functools.lru_cache(maxsize=100)
def _session_actors(prefix: str, process: str) -> int:
    """How many session actors the job has, for good: one per CPU of the cluster when the first of its processes asked. Blocks."""
    from lousho_ray.actors.cluster import agreed, cpu_places

    return int(agreed(prefix, str(len(cpu_places())), process))


def _actor_spawner() -> Spawner:
    """The spawner of a session actor's process, on its work loop."""
    return create_runtime("ray").spawner()
