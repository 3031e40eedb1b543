"""`Session`: a conversation's handle. Get it from `agent.session()`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from lousho_ray.approvals import Approvals
from lousho_ray.audit import attach, audits
from lousho_ray.call_options import call_options
from lousho_ray.cancellation import CancelToken
from lousho_ray.clock import SYSTEM_CLOCK, timestamp
from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import PendingTurn
from lousho_ray.events import Event
from lousho_ray.handle import AgentRun, Input, settle
from lousho_ray.ids import check_session_id, new_id
from lousho_ray.loop.emitter import guarded
from lousho_ray.loop.input import as_messages
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop_thread import SYNC_LOOP
from lousho_ray.messages import Message
from lousho_ray.observing import Listeners, ObservedPlace, WatchedRun, observers_of
from lousho_ray.permissions import ModeCell, PermissionMode, check_mode
from lousho_ray.ports import Observer
from lousho_ray.session import Request, ResumeRequest, SessionLink, TurnPolicy, TurnRequest, cleared_event, transcript
from lousho_ray.session_compaction import SessionCompaction, chosen_options
from lousho_ray.session_history import SessionStep, fork_ids, kept_until, session_exists, steps_of, with_patch
from lousho_ray.sync_calls import need_loop, sync_events

T = TypeVar("T")

log = logging.getLogger("lousho_ray")


class Session(Generic[T]):
    """A conversation's handle. One turn runs at a time, in the order of the calls."""

    def __init__(
        self,
        definition: AgentDefinition,
        id: str,
        policy: TurnPolicy,
        link: SessionLink,
        approvals: Approvals[Any],
        listeners: Callable[[str], Listeners],
    ) -> None:
        self._definition = definition
        self._approvals = approvals
        self._policy: TurnPolicy = policy
        self._link = link
        self._messages: tuple[Message, ...] = ()
        self._listeners_of = listeners
        self._listeners = listeners(id)
        self._forks: set[str] = set()
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
        need_loop("session.stream()", "session.send_sync() or session.stream_sync()")
        return AgentRun(self._start(input, options, "stream", observed=True))

    def stream_sync(self, input: Input, **options: Any) -> Iterator[Event]:
        return sync_events(lambda: self.stream(input, **options))

    @property
    def link(self) -> SessionLink:
        """The way to the session's host."""
        return self._link

    def saw(self, result: ExecutionResult[Any]) -> None:
        """Takes over what a turn of this handle left: its transcript, or its pause."""
        if result.approval_id is not None:
            self._approvals.made(result.approval_id, ObservedPlace(self._link, self._observers, self._definition.on_run_end))
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
        return await settle(self._watched(ResumeRequest(new_id("run_"))))

    @property
    def permission_mode(self) -> PermissionMode:
        """The mode in force for calls of this handle's turns. It is not stored: a reopened session begins with the agent's."""
        return ModeCell(self._link.mode or self._definition.permission_mode).now()

    async def set_permission_mode(self, mode: PermissionMode) -> Mapping[str, str]:
        """Switches the permission mode: from the next tool call on, also of a turn that runs.

        Returns:
            `{"session_id", "from", "to", "at"}`, which `on_permission_mode_change` gets too, unless the mode was in force already.

        Raises:
            ConfigurationError: No such mode.
        """
        before = self.permission_mode
        await self._link.set_mode(check_mode(mode, "mode"))
        after = self.permission_mode
        change = {"session_id": self.id, "from": before, "to": after, "at": timestamp(SYSTEM_CLOCK.wall())}
        listener = self._definition.on_permission_mode_change
        if listener is not None and before != after:
            try:
                answer = listener(change)
                if inspect.isawaitable(answer):
                    await answer
            except Exception:
                log.exception("on_permission_mode_change raised; session %r is in mode %r all the same.", self.id, after)
        return change

    def set_permission_mode_sync(self, mode: PermissionMode) -> Mapping[str, str]:
        return SYNC_LOOP.run(self.set_permission_mode(mode))

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

    async def compact(self, strategy: Any = None, protected_tokens: int | None = None, **options: Any) -> SessionCompaction:
        """Compacts the transcript now, whatever its size, and saves it if it changed. Listeners get the pair of events.

        Args:
            strategy: Default that of the session's `compaction`, else the agent's, else pruning of old tool results.
            protected_tokens: Newest tokens that stay as they are.
            **options: The other keys of `compaction`: `summarizer`, `context_window`, `threshold_percent`, ...

        Raises:
            LoushoError: Nothing was changed: `LOUSHO_SESSION_BUSY` while a turn runs or waits, `LOUSHO_SESSION_TURN_PENDING` while
                an interrupted one is unfinished.
            SessionAwaitingApprovalError: A turn waits for a decision.
            ConfigurationError: An option cannot be used.
        """
        chosen = chosen_options(
            self._definition.compaction, {"strategy": strategy, "protected_tokens": protected_tokens, **options}
        )
        report, messages = await self._link.compact(chosen)
        self._messages = tuple(messages)
        for event in report.events:
            for listener in tuple(self._listeners):
                guarded(listener)(event)
        return report

    def compact_sync(self, strategy: Any = None, protected_tokens: int | None = None, **options: Any) -> SessionCompaction:
        return SYNC_LOOP.run(self.compact(strategy, protected_tokens, **options))

    async def history(self) -> list[SessionStep]:
        """The steps of the session, oldest first. An unfinished durable turn is not among them."""
        return steps_of(await self.load())

    def history_sync(self) -> list[SessionStep]:
        return SYNC_LOOP.run(self.history())

    async def fork(self, from_step: int, id: str | None = None, patch: Mapping[str, Any] | None = None) -> Session[T]:
        """A new session with the transcript up to a step; this one stays as it is.

        Args:
            from_step: The last step to keep, as `history()` numbers them; 0 keeps nothing.
            id: The new session's id; default `<id>-fork-<n>` with the first free n.
            patch: `{"tool_result": {"tool_call_id": ..., "result": ...}}` replaces a result in the kept part.

        Raises:
            ConfigurationError: `LOUSHO_SESSION_STEP_NOT_FOUND`, `LOUSHO_SESSION_EXISTS`, `LOUSHO_SESSION_ID_INVALID`, a patch that
                cannot be applied.
            LoushoError: `LOUSHO_SESSION_BUSY` while a turn runs or waits.
        """
        if id is not None and check_session_id(id, "id") == self.id:
            raise session_exists(id)
        messages = with_patch(kept_until(await self._link.fork_point(), from_step), patch)
        for fork_id in fork_ids(self.id) if id is None else (id,):
            if fork_id not in self._forks and (fork := await self._begun(fork_id, messages)) is not None:
                self._forks.add(fork_id)
                return fork
            if id is not None:
                raise session_exists(id)
        raise AssertionError("the ids of forks do not run out")

    def fork_sync(self, from_step: int, id: str | None = None, patch: Mapping[str, Any] | None = None) -> Session[T]:
        return SYNC_LOOP.run(self.fork(from_step, id, patch))

    async def _begun(self, id: str, messages: list[Message]) -> Session[T] | None:
        link = self._link.sibling(id)
        if not await link.begin(messages):
            return None
        link.mode = self._link.mode
        fork: Session[T] = Session(self._definition, id, self._policy, link, self._approvals, self._listeners_of)
        fork._messages = tuple(messages)
        return fork

    def on(self, listener: Observer) -> Callable[[], None]:
        """Calls `listener(event)` for each event of the session's turns in this process, whichever handle of it asks for them, for
        those of manual compactions, and for `context.cleared`.

        The returned function ends it.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def _start(self, input: Input, options: Mapping[str, Any], where: str, *, observed: bool) -> WatchedRun:
        call, cancel = call_options(options, f"session.{where}()")
        request = TurnRequest(new_id("run_"), as_messages(input), self._policy, call, observed)
        return self._watched(request, call.principal, cancel)

    def _watched(self, request: Request, principal: Any = None, cancel: CancelToken | None = None) -> WatchedRun:
        observers = self._observers(principal)
        source = self._link.start(request, observers)
        attach(observers, source.abort)
        return WatchedRun(source, self._definition.on_run_end, self.saw, cancel)

    def _observers(self, principal: Any = None) -> list[Observer]:
        return [*observers_of(self._definition.on_event, *self._listeners), *audits(self._definition, principal)]

    def __repr__(self) -> str:
        return f"<Session {self.id!r} of {self._definition.name!r}, {len(self._messages)} messages>"
