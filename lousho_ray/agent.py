"""`Agent`: what `create_agent()` returns. Immutable and reusable, also from several tasks, threads and workers at once."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

from lousho_ray.approvals import Approvals
from lousho_ray.audit import attach, audits
from lousho_ray.call_options import call_options
from lousho_ray.context.compaction import check_compaction
from lousho_ray.context.strategies import summarizers_of
from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import Sources, StoredPauses, StoreParts
from lousho_ray.durable_runs import RunLink
from lousho_ray.errors import ConfigurationError
from lousho_ray.events import Event
from lousho_ray.handle import AgentRun, Input, LocalRun, settle
from lousho_ray.ids import check_run_id, check_session_id, is_session_id, new_id, new_session_id
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.loop.checkpoint import RunFacts
from lousho_ray.loop.input import as_messages
from lousho_ray.loop.open import CallOptions, RunContext
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.run import run
from lousho_ray.loop_thread import SYNC_LOOP
from lousho_ray.made_once import MadeOnce, made_once
from lousho_ray.messages import Message
from lousho_ray.observing import ObservedPlace, PausedPlace, SessionListeners, observers_of, tell_end
from lousho_ray.option_checks import SESSION_KEYWORDS, UNSET, check_choice, unknown_keyword
from lousho_ray.options import Limits, parse_options
from lousho_ray.permissions import check_mode
from lousho_ray.ports import ApprovalStore, Observer
from lousho_ray.run_forks import RunFork, fork_run
from lousho_ray.session import TURN_POLICIES, ResumeRequest, SessionLink, TurnRequest
from lousho_ray.session_handle import Session
from lousho_ray.stores.memory import InMemoryApprovalStore, MemorySessionStore
from lousho_ray.stores.parts import check_part, part_of
from lousho_ray.subagents import Spawner, open_with_subagents
from lousho_ray.sync_calls import need_loop, sync_events
from lousho_ray.turn_start import run_emitter
from lousho_ray.turns import SessionLines, TurnLine

T = TypeVar("T")

RuntimeName = Literal["local", "ray"]


class Runtime(Protocol):
    """Where actors are: in this process (plain objects) or on a cluster."""

    name: RuntimeName

    def spawner(self) -> Spawner:
        """Runs sub-agents. Starts nothing before the first of them."""
        ...

    def session(self, definition: AgentDefinition, session_id: str, sources: Sources, approvals: ApprovalStore) -> SessionLink:
        """The link to a session; starts nothing before its first call.

        `sources` are its stores, `approvals` is where pauses go when there is none for them.
        """
        ...

    async def reach(self, store: Any, part: str = "sessions") -> Any:
        """A store as this process reaches it: itself, or what stands for it on the cluster. It may be a `part` by itself."""
        ...

    async def share(self, limiter: RateLimiter) -> None:
        """Makes a named limiter the one of everybody who uses its name."""
        ...


class Agent(Generic[T]):
    """An agent. Make one with `create_agent()`."""

    def __init__(self, definition: AgentDefinition, runtime: RuntimeName, options: Mapping[str, Any]) -> None:
        self._definition = definition
        self._options = options
        self._runtime_name: RuntimeName = runtime

    @property
    def name(self) -> str:
        return self._definition.name

    @property
    def description(self) -> str | None:
        return self._definition.description

    @MadeOnce
    def approvals(self) -> Approvals[T]:
        """The calls of this agent that wait for a person."""
        return Approvals(self._approval_store, self._place_of)

    @MadeOnce
    def _own_approvals(self) -> ApprovalStore:
        """Made when it is needed, like `approvals`: most agents never pause, and evals make an agent for each case."""
        return InMemoryApprovalStore()

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that `create_agent()` was given, read-only. What looks like a key is masked."""
        return self._options

    @property
    def definition(self) -> AgentDefinition:
        """The checked options."""
        return self._definition

    async def send(self, input: Input, **options: Any) -> ExecutionResult[T]:
        """Runs the agent on `input` and returns how the run ended.

        Args:
            input: Text, content parts (one user message) or messages.
            **options: `model_settings`, `max_steps`, `instructions` (appended to the agent's for this run), `reasoning`,
                `metadata`, `principal`, `permission_mode` (for this run alone), and `cancel`, a `CancelToken`. `session_id` makes
                the run durable: what it has done so far is in the agent's store, and sending again with the id goes on with it.
                `business_state`, any JSON value, is kept there as it is; left out, what was stored stays, and `None` clears it.

        Raises:
            ConfigurationError: An option or the input cannot be used.
            CompactedLLMProviderError: A model call failed after its retries and fallbacks.

        Cancelling the awaiting task aborts the run; it settles before the cancellation goes on.
        """
        return await settle(self._start(input, options, "send", observed=False))

    def send_sync(self, input: Input, **options: Any) -> ExecutionResult[T]:
        """`send()` from plain code, also where an event loop runs already (a notebook)."""
        return SYNC_LOOP.run(self.send(input, **options))

    def stream(self, input: Input, **options: Any) -> AgentRun[T]:
        """Starts a run and returns its handle: iterate it for events, await `handle.result` for the outcome.

        Takes what `send()` takes. Wrong options raise here, before there is a handle.
        """
        need_loop("stream()", "send_sync() or stream_sync()")
        return AgentRun(self._start(input, options, "stream", observed=True))

    def stream_sync(self, input: Input, **options: Any) -> Iterator[Event]:
        """The events of a run as a plain iterator; closing it early aborts the run."""
        return sync_events(lambda: self.stream(input, **options))

    def session(self, id: str | None = None, **options: Any) -> Session[T]:
        """A conversation: `session.send()` and `session.stream()` see what came before.

        Args:
            id: 1 to 128 of `A-Z a-z 0-9 _ -`; a new UUID by default.
            **options: `store` (a store, or a `SessionStore`) and `checkpoint_store` (a store, or a `CheckpointStore`), which win
                part by part over the agent's; without any the session is in memory. `turn_policy`: what a call does while a turn
                runs: `"wait"` (default), `"queue"` or `"steer"`. `limits` on what all turns together may spend, beside the agent's
                on each turn. `compaction` in place of the agent's (`False` turns it off); and `permission_mode`, in place of the
                agent's until `set_permission_mode()`.
        """
        known = {"store", "checkpoint_store", "turn_policy", "limits", "compaction", "permission_mode"}
        for name in options:
            if name not in known:
                raise unknown_keyword(name, known | ({"id"} & SESSION_KEYWORDS), "agent.session()")
        policy: Any = check_choice(options.get("turn_policy") or "wait", "turn_policy", TURN_POLICIES)
        stores = {"store": "sessions", "checkpoint_store": "checkpoints"}
        for name, part in stores.items():
            if options.get(name) is not None:
                check_part(options[name], part, name)
        sources = Sources.chosen(self._definition, options.get("store"), options.get("checkpoint_store"))
        session_id = new_session_id() if id is None else check_session_id(id, "id")
        definition = self._definition
        if options.get("compaction") is not None:
            definition = replace(definition, compaction=check_compaction(options["compaction"]))
        if options.get("limits") is not None:
            definition = replace(definition, session_limits=parse_options(Limits, options["limits"]))
        link = self.runtime().session(definition, session_id, sources, self._own_approvals)
        link.mode = check_mode(options["permission_mode"]) if options.get("permission_mode") is not None else None
        listeners = functools.partial(_session_listeners().of, sources.sessions)
        return Session(definition, session_id, policy, link, self.approvals, listeners)

    async def resume(self, id: str, *, business_state: Any = UNSET) -> ExecutionResult[T] | None:
        """Finishes the unfinished run of `send(..., session_id=id)`, else the interrupted turn of session `id`.

        `None` when there is neither. `business_state` takes the place of what such a run has stored; `None` clears it.

        Raises:
            SessionAwaitingApprovalError: It waits for a decision.
            ConfigurationError: `LOUSHO_CONFIG_MISSING_CHECKPOINT_STORE`.
        """
        link = self._durable_run(id)
        observers = self._observers()
        turn = link.start(ResumeRequest(new_id("run_"), business_state=business_state), observers)
        attach(observers, turn.abort)
        turn.task.add_done_callback(lambda task: self._over(turn.run_id, task, link))
        result: ExecutionResult[T] | None = await settle(turn)
        return await self.session(id).resume() if result is None and is_session_id(id) else result

    async def fork(
        self, id: str, from_step: int, patch: Mapping[str, Any] | None = None, new_session_id: str | None = None
    ) -> RunFork:
        """A new durable run that goes on from a step of run `id`; `resume(fork.session_id)` runs it. The source stays as it is.

        Args:
            id: The `session_id` of the run to fork.
            from_step: The step; the newest save of it that is kept counts.
            patch: `messages`, a function of the list of messages; `business_state`; `tool_result`, `{"tool_call_id", "result"}`;
                `append_input`, a user message behind everything else. Applied in this order.
            new_session_id: Default `<id>.fork-<n>` with the first free n.

        Raises:
            LoushoError: `LOUSHO_CHECKPOINT_NOT_FOUND`, with the steps that are kept.
            ConfigurationError: The id is taken, the patch cannot be applied, or the store keeps no history.
        """
        self._durable_run(id)
        return await fork_run(
            (await self.runtime().reach(self._definition.store)).checkpoints, id, from_step, patch, new_session_id
        )

    async def ready(self) -> None:
        """Connects what the agent needs before its first run. Optional."""

    async def close(self) -> None:
        """Closes the model clients of this event loop; a later call opens them again."""
        close = getattr(self._definition.provider, "aclose", None)
        if close is not None:
            await close()

    def close_sync(self) -> None:
        """`close()` for the clients of the `*_sync` calls."""
        SYNC_LOOP.run(self.close())

    async def __aenter__(self) -> Agent[T]:
        await self.ready()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def runtime(self) -> Runtime:
        """The runtime of this agent's actors; asking for it starts nothing."""
        return runtime_named(self._runtime_name)

    @functools.cached_property
    def _named_limiters(self) -> list[RateLimiter]:
        return named_limiters(self._definition)

    def _start(self, input: Input, options: Mapping[str, Any], where: str, *, observed: bool) -> LocalRun:
        call, cancel = call_options(options, f"agent.{where}()", also=frozenset({"session_id", "business_state"}))
        messages = as_messages(input)
        run_id = options.get("session_id")
        if run_id is None and "business_state" in options:
            raise ConfigurationError(
                "business_state is kept in the checkpoint of a durable run: pass session_id, too.", field="business_state"
            )
        link = None if run_id is None else self._durable_run(run_id)
        if link is not None:
            request = TurnRequest(new_id("run_"), messages, call=call, observed=observed)
            observers = self._observers(call.principal)
            turn = link.start(request, observers)
            attach(observers, turn.abort)
        else:
            turn = self._plain_run(messages, call, observed=observed)
        turn.task.add_done_callback(lambda task: self._over(turn.run_id, task, link))
        if cancel is not None:
            let_go = cancel.watch(turn.abort)
            turn.task.add_done_callback(lambda _: let_go())
        return turn

    def _plain_run(self, messages: Sequence[Message], call: CallOptions, *, observed: bool) -> LocalRun:
        turn = LocalRun(new_id("run_"))
        observers = self._observers(call.principal)
        attach(observers, turn.abort)
        turn.start(self._run(turn, messages, call, observers, observed=observed))
        return turn

    def _durable_run(self, id: str) -> RunLink:
        """The runs under an id.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_MISSING_CHECKPOINT_STORE`, `LOUSHO_SESSION_ID_INVALID`.
        """
        check_run_id(id, "session_id")
        store = self._definition.store
        if getattr(store, "checkpoints", None) is None:
            raise ConfigurationError(
                "A run with a session_id needs a store with checkpoints: create_agent(store=memory_store()) or a SqliteStore.",
                code="LOUSHO_CONFIG_MISSING_CHECKPOINT_STORE",
                field="session_id",
            )

        async def parts() -> StoreParts:
            reached = Sources(*[await self.runtime().reach(store)] * 2)
            return replace(reached.parts(self._own_approvals), approvals=await self._approval_store())

        return RunLink(self._definition, id, parts, _run_lines().of(store, id), self.runtime().spawner)

    async def _run(
        self,
        turn: LocalRun,
        messages: Sequence[Message],
        call: CallOptions,
        observers: Sequence[Observer],
        *,
        observed: bool,
    ) -> ExecutionResult[T]:
        trace, exporter = self._definition.trace(), self._definition.exporter
        emitter = run_emitter(turn, observers, observed=observed, spans=exporter)
        facts = RunFacts(self.name, None, call.principal, call.metadata)
        context = RunContext(turn.run_id, messages, emitter, turn.signal, inbox=turn.inbox, call=call, trace=trace)
        context.pauses = StoredPauses(self._approval_store, facts, self._definition)
        context.approve_in_code, context.started = not observed, turn.called_at
        try:
            spawner = self.runtime().spawner() if self._definition.subagents else None
            for limiter in self._named_limiters:
                await self.runtime().share(limiter)
            depth = self._definition.max_subagent_depth
            state, deps = await open_with_subagents(self._definition, "", context, depth, spawner)
        except Exception as error:
            emitter.fail(error)
            raise
        return await run(state, deps)

    async def _approval_store(self) -> ApprovalStore:
        """Where the pauses of this agent are, of other processes, too: its approval store, else the store's part, else memory."""
        source = Sources.chosen(self._definition).approvals
        if source is None:
            return self._own_approvals
        reached: ApprovalStore = part_of(await self.runtime().reach(source, "approvals"), "approvals")
        return reached

    def _place_of(self, snapshot: Mapping[str, Any]) -> PausedPlace:
        """Where a decision is carried out: in the session or the durable run that the pause belongs to, or here for a plain run."""
        if snapshot.get("session") is not None:
            return self._observed(self.session(snapshot["session"]).link)
        if snapshot.get("sessionId") is not None:
            return self._observed(self._durable_run(snapshot["sessionId"]))
        return self._observed(self._here())

    def _here(self) -> RunLink:
        """Continues paused runs of plain sends, in this process."""

        async def parts() -> StoreParts:
            return StoreParts(MemorySessionStore(), None, await self._approval_store())

        return RunLink(self._definition, "run", parts, TurnLine(), self.runtime().spawner, anonymous=True)

    def _observers(self, principal: Any = None) -> list[Observer]:
        return [*observers_of(self._definition.on_event), *audits(self._definition, principal)]

    def _observed(self, place: PausedPlace) -> ObservedPlace:
        return ObservedPlace(place, self._observers, self._definition.on_run_end)

    def _over(self, run_id: str, task: asyncio.Task[Any], link: RunLink | None) -> None:
        """A plain or durable run is over."""
        result = None if task.cancelled() or task.exception() is not None else task.result()
        if result is not None and result.approval_id is not None:
            self.approvals.made(str(result.approval_id), self._observed(self._here() if link is None else link))
        tell_end(self._definition.on_run_end, run_id, task)

    def __repr__(self) -> str:
        provider = self._definition.provider
        model = self._definition.model if isinstance(self._definition.model, str) else getattr(provider, "default_model", None)
        return f"<Agent {self.name!r} provider={getattr(provider, 'name', None)!r} model={model!r}>"


@made_once
def _session_listeners() -> SessionListeners:
    """What listens to the sessions of this process."""
    return SessionListeners()


@made_once
def _run_lines() -> SessionLines:
    """The lines of the durable runs of this process."""
    return SessionLines()


@made_once
def runtime_named(name: RuntimeName) -> Runtime:
    """The process's runtime of that kind; asking for it starts nothing."""
    # Imported by name: the composition of everything lies above this module.
    runtime: Runtime = importlib.import_module("lousho_ray.runtime").create_runtime(name)
    return runtime


def named_limiters(definition: AgentDefinition) -> list[RateLimiter]:
    """The limiters with a name that a run of the agent passes: of the agent itself and inside the wrappers of its providers."""
    found = [definition.rate_limit]
    summarizers = () if definition.compaction is None else summarizers_of(definition.compaction)
    for provider in (definition.provider, *summarizers):
        layer: Any = provider
        while layer is not None:
            found += getattr(layer, "limiters", ())
            layer = getattr(layer, "inner", None)
    return [limiter for limiter in found if isinstance(limiter, RateLimiter) and limiter.name is not None]
