"""`Agent`: what `create_agent()` returns. Immutable and reusable, also from several tasks, threads and workers at once."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

from lousho_ray.approvals import Approvals
from lousho_ray.cancellation import CancelToken
from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import PendingTurn, StoredPauses, StoreParts, sessions_of
from lousho_ray.errors import ConfigurationError
from lousho_ray.events import Event
from lousho_ray.handle import AgentRun, Input, LocalRun, settle
from lousho_ray.ids import check_session_id, new_id, new_session_id
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.loop.checkpoint import RunFacts
from lousho_ray.loop.emitter import Emitter, Stamp, guarded
from lousho_ray.loop.input import as_messages
from lousho_ray.loop.open import CallOptions, RunContext
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.run import run
from lousho_ray.loop_thread import SYNC_LOOP
from lousho_ray.messages import Message
from lousho_ray.option_checks import RUN_KEYWORDS, SESSION_KEYWORDS, check_choice, check_positive_int, check_text, unknown_keyword
from lousho_ray.options import ModelSettings, parse_options, parse_reasoning
from lousho_ray.ports import ApprovalStore, Observer
from lousho_ray.session import TURN_POLICIES, ResumeRequest, SessionLink, TurnPolicy, TurnRequest, cleared_event, transcript
from lousho_ray.session_host import LocalLink, SessionHost
from lousho_ray.stores.memory import InMemoryApprovalStore, MemorySessionStore
from lousho_ray.subagents import Spawner, open_with_subagents
from lousho_ray.turns import TurnLine

T = TypeVar("T")

RuntimeName = Literal["local", "ray"]


class Runtime(Protocol):
    """Where actors are: in this process (plain objects) or on a cluster."""

    name: RuntimeName

    def spawner(self) -> Spawner:
        """Runs sub-agents. Starts nothing before the first of them."""
        ...

    def session(self, definition: AgentDefinition, session_id: str, store: Any, approvals: ApprovalStore) -> SessionLink:
        """The link to a session; starts nothing before its first call.

        `store` is a store, a session store, or `None`; `approvals` is where pauses go when it has no part for them.
        """
        ...

    async def reach(self, store: Any) -> Any:
        """A store as this process reaches it: itself, or what stands for it on the cluster."""
        ...

    async def share(self, limiter: RateLimiter) -> None:
        """Makes a named limiter the one of everybody who uses its name."""
        ...


class Agent(Generic[T]):
    """An agent. Make one with `create_agent()`."""

    def __init__(self, definition: AgentDefinition, runtime: RuntimeName) -> None:
        self._definition = definition
        self._runtime_name: RuntimeName = runtime
        self._own_approvals: ApprovalStore = definition.approval_store or InMemoryApprovalStore()
        self._approvals: Approvals[T] = Approvals(self._approval_store, self._link_of)

    @property
    def name(self) -> str:
        return self._definition.name

    @property
    def description(self) -> str | None:
        return self._definition.description

    @property
    def approvals(self) -> Approvals[T]:
        """The calls of this agent that wait for a person."""
        return self._approvals

    @property
    def definition(self) -> AgentDefinition:
        """The checked options."""
        return self._definition

    async def send(self, input: Input, **options: Any) -> ExecutionResult[T]:
        """Runs the agent on `input` and returns how the run ended.

        Args:
            input: Text, content parts (one user message) or messages.
            **options: `model_settings`, `max_steps`, `instructions` (appended to the agent's for this run), `reasoning`,
                `metadata`, `principal`, and `cancel`, a `CancelToken`.

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
        _need_loop("stream()", "send_sync() or stream_sync()")
        return AgentRun(self._start(input, options, "stream", observed=True))

    def stream_sync(self, input: Input, **options: Any) -> Iterator[Event]:
        """The events of a run as a plain iterator; closing it early aborts the run."""
        return _sync_events(lambda: self.stream(input, **options))

    def session(self, id: str | None = None, **options: Any) -> Session[T]:
        """A conversation: `session.send()` and `session.stream()` see what came before.

        Args:
            id: 1 to 128 of `A-Z a-z 0-9 _ -`; a new UUID by default.
            **options: `store` (a `SessionStore`, or an object with `sessions`; default the agent's, else a new one in memory) and
                `turn_policy`: what a call does while a turn runs: `"wait"` (default), `"queue"` or `"steer"`.
        """
        known = {"store", "turn_policy"}
        for name in options:
            if name not in known:
                raise unknown_keyword(name, known | ({"id"} & SESSION_KEYWORDS), "agent.session()")
        policy: Any = check_choice(options.get("turn_policy") or "wait", "turn_policy", TURN_POLICIES)
        store = next((item for item in (options.get("store"), self._definition.store) if sessions_of(item) is not None), None)
        session_id = new_session_id() if id is None else check_session_id(id, "id")
        link = self.runtime().session(self._definition, session_id, store, self._own_approvals)
        return Session(self._definition, session_id, policy, link, self._approvals)

    async def resume(self, id: str) -> ExecutionResult[T] | None:
        """Finishes the interrupted turn of session `id`; `None` when nothing is pending."""
        return await self.session(id).resume()

    async def ready(self) -> None:
        """Connects what the agent needs before its first run. Optional."""

    async def close(self) -> None:
        """Closes the model clients of this event loop; a later call opens them again."""
        close = getattr(self._definition.provider, "aclose", None)
        if close is not None:
            await close()

    async def __aenter__(self) -> Agent[T]:
        await self.ready()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def runtime(self) -> Runtime:
        """The runtime of this agent's actors; asking for it starts nothing."""
        return _runtime(self._runtime_name)

    def _start(self, input: Input, options: Mapping[str, Any], where: str, *, observed: bool) -> LocalRun:
        call, cancel = call_options(options, f"agent.{where}()")
        messages = as_messages(input)
        turn = LocalRun(new_id("run_"), abort=cancel.signal if cancel is not None else None)
        sinks: list[Observer] = [] if self._definition.on_event is None else [guarded(self._definition.on_event)]
        if observed:
            sinks.append(turn.log.append)
        turn.start(self._run(turn, messages, call, sinks, observed=observed))
        turn.task.add_done_callback(self._note_pause)
        if cancel is not None:
            disarm = cancel.arm()
            turn.task.add_done_callback(lambda _: disarm())
        return turn

    async def _run(
        self,
        turn: LocalRun,
        messages: Sequence[Message],
        call: CallOptions,
        sinks: Sequence[Observer],
        *,
        observed: bool,
    ) -> ExecutionResult[T]:
        emitter = Emitter(Stamp(turn.run_id), sinks, drain=turn.log.drain if observed else None)
        facts = RunFacts(self.name, None, call.principal, call.metadata)
        context = RunContext(turn.run_id, messages, emitter, turn.signal, inbox=turn.inbox, call=call)
        context.pauses = StoredPauses(self._own_approvals, facts, ttl_ms=self._definition.approval_ttl_ms)
        context.approve_in_code = not observed
        try:
            spawner = self.runtime().spawner() if self._definition.subagents else None
            for limiter in named_limiters(self._definition):
                await self.runtime().share(limiter)
            depth = self._definition.max_subagent_depth
            state, deps = await open_with_subagents(self._definition, "", context, depth, spawner)
        except Exception as error:
            emitter.fail(error)
            raise
        return await run(state, deps)

    async def _approval_store(self) -> ApprovalStore:
        """Where pauses of other processes are found: the agent's own approval store, else the store's part."""
        store = self._definition.store
        part = None if store is None or self._definition.approval_store is not None else getattr(store, "approvals", None)
        if part is None:
            return self._own_approvals
        reached: ApprovalStore = (await self.runtime().reach(store)).approvals
        return reached

    def _link_of(self, session_id: str | None) -> SessionLink:
        """Where a decision is carried out: in the session the pause belongs to, or here for a plain run."""
        if session_id is not None:
            return self.session(session_id).link
        parts = StoreParts(MemorySessionStore(), None, self._own_approvals)
        return LocalLink(SessionHost(self._definition, "run", parts, TurnLine(), self.runtime().spawner, anonymous=True))

    def _note_pause(self, task: asyncio.Task[ExecutionResult[Any]]) -> None:
        if not task.cancelled() and task.exception() is None and task.result().approval_id is not None:
            self._approvals.made(str(task.result().approval_id), self._link_of(None))

    def __repr__(self) -> str:
        provider = self._definition.provider
        model = self._definition.model if isinstance(self._definition.model, str) else getattr(provider, "default_model", None)
        return f"<Agent {self.name!r} provider={getattr(provider, 'name', None)!r} model={model!r}>"


class Session(Generic[T]):
    """A conversation's handle. One turn runs at a time, in the order of the calls."""

    def __init__(
        self, definition: AgentDefinition, id: str, policy: TurnPolicy, link: SessionLink, approvals: Approvals[Any]
    ) -> None:
        self._definition = definition
        self._approvals = approvals
        self._policy: TurnPolicy = policy
        self._link = link
        self._messages: tuple[Message, ...] = ()
        self._listeners: list[Observer] = []
        self.id = id

    @property
    def messages(self) -> list[Message]:
        """The transcript as this handle last saw it (messages are immutable): after each of its own calls and `load()`."""
        return list(self._messages)

    async def send(self, input: Input, **options: Any) -> ExecutionResult[T]:
        """Runs a turn and returns its result. Takes what `agent.send()` takes.

        While a turn runs, `turn_policy` decides: wait for it, or join it (and return its result).
        """
        return await settle(self._start(input, options, "send", observed=False))

    def send_sync(self, input: Input, **options: Any) -> ExecutionResult[T]:
        return SYNC_LOOP.run(self.send(input, **options))

    def stream(self, input: Input, **options: Any) -> AgentRun[T]:
        """Starts a turn and returns its handle; `run.done` comes once the turn is saved."""
        _need_loop("session.stream()", "session.send_sync() or session.stream_sync()")
        return AgentRun(self._start(input, options, "stream", observed=True))

    def stream_sync(self, input: Input, **options: Any) -> Iterator[Event]:
        return _sync_events(lambda: self.stream(input, **options))

    @property
    def link(self) -> SessionLink:
        """The way to the session's host."""
        return self._link

    def saw(self, result: ExecutionResult[Any]) -> None:
        """Takes over what a turn of this handle left: its transcript, or its pause."""
        if result.approval_id is not None:
            self._approvals.made(result.approval_id, self._link)
        if result.finish_reason not in ("aborted", "awaiting-approval"):
            self._messages = tuple(transcript(result))

    async def load(self) -> list[Message]:
        """Reads the saved transcript; an unknown id has an empty one."""
        self._messages = tuple(await self._link.load())
        return self.messages

    def load_sync(self) -> list[Message]:
        return SYNC_LOOP.run(self.load())

    async def pending(self) -> PendingTurn | None:
        """The turn that has not ended (interrupted, failed, or waiting for a decision); `None` when there is none."""
        return await self._link.pending()

    async def resume(self) -> ExecutionResult[T] | None:
        """Finishes the interrupted turn: recorded results and replies are reused. `None` when nothing is pending."""
        result: ExecutionResult[T] | None = await settle(self._link.start(ResumeRequest(new_id("run_")), self._observers()))
        if result is not None:
            self.saw(result)
        return result

    async def discard_pending(self) -> None:
        """Drops the unfinished turn without running anything."""
        await self._link.discard_pending()

    def resume_sync(self) -> ExecutionResult[T] | None:
        return SYNC_LOOP.run(self.resume())

    async def clear(self) -> None:
        """Empties the transcript. Raises `LOUSHO_SESSION_BUSY` while a turn runs or waits."""
        count = await self._link.clear()
        self._messages = ()
        event = cleared_event(self.id, count)
        for listener in tuple(self._listeners):
            guarded(listener)(event)

    def clear_sync(self) -> None:
        SYNC_LOOP.run(self.clear())

    def on(self, listener: Observer) -> Callable[[], None]:
        """Calls `listener(event)` for each event of this handle's turns and `context.cleared`; the returned function ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def _start(self, input: Input, options: Mapping[str, Any], where: str, *, observed: bool) -> _Turn:
        call, cancel = call_options(options, f"session.{where}()")
        request = TurnRequest(new_id("run_"), as_messages(input), self._policy, call, observed)
        source = self._link.start(request, self._observers())
        return _Turn(source, self, cancel)

    def _observers(self) -> list[Observer]:
        return [guarded(listener) for listener in (self._definition.on_event, *self._listeners) if listener is not None]

    def __repr__(self) -> str:
        return f"<Session {self.id!r} of {self._definition.name!r}, {len(self._messages)} messages>"


class _Turn:
    """A session's turn as its handle sees it: the handle learns what the turn left, whether anybody awaits its result or not."""

    def __init__(self, source: Any, session: Session[Any], cancel: CancelToken | None) -> None:
        self.run_id: str = source.run_id
        self.read = source.read
        self.enqueue = source.enqueue
        self.steer = source.steer
        self.abort = source.abort
        self.leave = source.leave
        self._ended = asyncio.ensure_future(self._end(source, session))
        self._ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        if cancel is not None:
            disarm = cancel.arm()
            self._ended.add_done_callback(lambda _: disarm())
            cancel.signal.on_abort(source.abort)

    async def result(self) -> ExecutionResult[Any]:
        return await asyncio.shield(self._ended)

    async def _end(self, source: Any, session: Session[Any]) -> ExecutionResult[Any]:
        result: ExecutionResult[Any] = await source.result()
        session.saw(result)
        return result


def call_options(options: Mapping[str, Any], where: str) -> tuple[CallOptions, CancelToken | None]:
    """Checks the options of one `send()` / `stream()`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with `field`; a keyword that belongs elsewhere says where.
    """
    known = RUN_KEYWORDS - {"permission_mode"}
    for name in options:
        if name not in known:
            raise unknown_keyword(name, known, where)
    given = {name: value for name, value in options.items() if value is not None}
    metadata = given.get("metadata", {})
    if not isinstance(metadata, Mapping):
        raise ConfigurationError(f"metadata must be a dict, not {type(metadata).__name__}.", field="metadata")
    cancel = given.get("cancel")
    if cancel is not None and not isinstance(cancel, CancelToken):
        raise ConfigurationError(f"cancel must be a CancelToken, not {type(cancel).__name__}.", field="cancel")
    settings = given.get("model_settings")
    call = CallOptions(
        model_settings=None if settings is None else parse_options(ModelSettings, settings),
        max_steps=check_positive_int(given["max_steps"], "max_steps") if "max_steps" in given else None,
        instructions=check_text(given["instructions"], "instructions") if "instructions" in given else None,
        reasoning=parse_reasoning(given.get("reasoning")),
        metadata=dict(metadata),
        principal=given.get("principal"),
    )
    return call, cancel


@functools.cache
def _runtime(name: RuntimeName) -> Runtime:
    """The process's runtime of that kind. Imported by name: the composition of everything lies above this module."""
    runtime: Runtime = importlib.import_module("lousho_ray.runtime").create_runtime(name)
    return runtime


def named_limiters(definition: AgentDefinition) -> list[RateLimiter]:
    """The limiters with a name that a run of the agent passes: of the agent itself and inside its provider's wrappers."""
    found = [definition.rate_limit]
    provider: Any = definition.provider
    while provider is not None:
        found += getattr(provider, "limiters", ())
        provider = getattr(provider, "inner", None)
    return [limiter for limiter in found if isinstance(limiter, RateLimiter) and limiter.name is not None]


def _need_loop(what: str, instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(f"{what} needs a running event loop; from plain code use {instead}.") from None


def _sync_events(start: Callable[[], AgentRun[Any]]) -> Iterator[Event]:
    """The events of a run whose loop is the process's own loop thread."""

    async def begin() -> tuple[AgentRun[Any], Any]:
        run = start()
        return run, aiter(run)

    async def following(events: Any) -> Event | None:
        return await anext(events, None)

    run, events = SYNC_LOOP.run(begin())
    try:
        while (event := SYNC_LOOP.run(following(events))) is not None:
            yield event
    finally:
        SYNC_LOOP.run(events.aclose())
        SYNC_LOOP.run(_wait(run))


async def _wait(run: AgentRun[Any]) -> None:
    async with run:
        pass
