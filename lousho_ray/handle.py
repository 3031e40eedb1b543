"""`AgentRun`: the handle of a streamed run. The run starts with the handle, iterated or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from lousho_ray.cancellation import AbortSignal
from lousho_ray.clock import SYSTEM_CLOCK
from lousho_ray.errors import AgentExecutionError, LoushoError
from lousho_ray.eventlog import EventLog
from lousho_ray.events import Event
from lousho_ray.garbage import runs_in_progress
from lousho_ray.loop.inbox import Inbox, QueuedInput
from lousho_ray.loop.input import as_messages
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.messages import ContentPart, Message
from lousho_ray.permissions import ModeCell
from lousho_ray.spans import TraceContext

T = TypeVar("T")

BATCH = 64
"""How many events a handle takes at a time: each batch tells the run that its consumer is still there, and frees memory."""

Input = str | Sequence[ContentPart] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class EnqueueResult:
    """What `enqueue()` returns. `await applied`: whether the input joined the run's transcript."""

    id: str
    applied: Awaitable[bool]


@dataclass(frozen=True, slots=True)
class SteerResult:
    """What `steer()` returns. `await applied` (or `joined`): whether the input joined the run's transcript."""

    id: str
    applied: Awaitable[bool]
    joined: Awaitable[bool]


class RunSource(Protocol):
    """Where a handle's run is: in this process, or in a session actor."""

    run_id: str

    async def read(self, cursor: int) -> tuple[list[Event], int, bool]:
        """Events from `cursor` on, the next cursor, and whether that was the end."""
        ...

    async def result(self) -> ExecutionResult[Any]: ...

    def stop_reading(self) -> None:
        """The consumer waits for the result: the run must not wait for it."""
        ...

    def enqueue(self, messages: tuple[Message, ...]) -> tuple[str, Awaitable[bool]]: ...

    def steer(self, messages: tuple[Message, ...]) -> tuple[str, Awaitable[bool]]: ...

    def abort(self, reason: object | None) -> None: ...

    def leave(self) -> None:
        """The consumer left the loop: a run that is not over is aborted."""
        ...


class _Result(Generic[T]):
    """`run.result`: may be awaited many times; a cancelled wait does not touch the run."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[], Coroutine[Any, Any, ExecutionResult[T]]]) -> None:
        self._get = get

    def __await__(self) -> Generator[Any, None, ExecutionResult[T]]:
        return self._get().__await__()


class AgentRun(Generic[T]):
    """A run in progress: iterate it for its events, await `result` for its outcome.

    Leaving the loop early aborts the run; `async with agent.stream(...) as run` does so at a certain moment (leaving a bare
    `async for` is noticed when the interpreter closes the iterator).
    """

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._iterated = False

    @property
    def run_id(self) -> str:
        return self._source.run_id

    @property
    def result(self) -> _Result[T]:
        """Awaitable: the `ExecutionResult` that `send()` would have returned, or the error it would have raised."""
        return _Result(self._outcome)

    def enqueue(self, input: Input) -> EnqueueResult:
        """Adds input at the run's next safe point: after the running step's tool results."""
        input_id, applied = self._source.enqueue(as_messages(input))
        return EnqueueResult(input_id, applied)

    def steer(self, input: Input) -> SteerResult:
        """Adds input at once when the model call in flight has put nothing out yet (it is made again), else like `enqueue`."""
        input_id, applied = self._source.steer(as_messages(input))
        return SteerResult(input_id, applied, applied)

    def abort(self, reason: object | None = None) -> None:
        """Stops the run; `result` then has `finish_reason="aborted"`. Aborting a run that is over does nothing."""
        self._source.abort(reason)

    def __aiter__(self) -> AsyncIterator[Event]:
        if self._iterated:
            raise LoushoError(
                f"The events of run {self.run_id} were already iterated. Collect them in the first loop, or call stream() again.",
                code="LOUSHO_RUN_ALREADY_ITERATED",
            )
        self._iterated = True
        return self._events()

    async def _events(self) -> AsyncGenerator[Event, None]:
        # A fresh generator, not self: only then does leaving the loop close it, and its `finally` reach the run.
        cursor, end = 0, False
        try:
            while not end:
                events, cursor, end = await self._source.read(cursor)
                for event in events:
                    yield event
        finally:
            self._source.leave()

    async def __aenter__(self) -> AgentRun[T]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._source.leave()
        await self._settled()

    async def _outcome(self) -> ExecutionResult[T]:
        self._source.stop_reading()  # a reader that awaits the result inside its loop must not hold the run up
        return await self._source.result()

    async def _settled(self) -> None:
        try:
            await self._source.result()
        except Exception:
            return  # The error belongs to whoever awaits `result`; leaving the block only waits for the end.

    def __repr__(self) -> str:
        return f"<AgentRun {self.run_id}>"


class LocalRun:
    """A run in this process: its task, its event log, its inbox."""

    task: asyncio.Task[ExecutionResult[Any]]

    def __init__(self, run_id: str, *, abort: AbortSignal | None = None) -> None:
        self.run_id = run_id
        self.called_at = SYSTEM_CLOCK.now()
        self.log: EventLog[Any] = EventLog()  # events, and records of spans whose exporter is in another process
        self.inbox = Inbox()
        self.mode = ModeCell()
        self.trace = TraceContext()
        self.signal = abort if abort is not None else AbortSignal()

    def start(self, run: Coroutine[Any, Any, ExecutionResult[Any]]) -> None:
        """Starts the run's task on the running event loop."""
        self.task = asyncio.create_task(contained(run), name=f"run {self.run_id}")
        self.task.add_done_callback(self._done)
        self.task.add_done_callback(lambda _: run.close())  # A task that is cancelled before it starts leaves it unawaited.

    async def read(self, cursor: int) -> tuple[list[Event], int, bool]:
        events, cursor = await self.log.read(cursor, most=BATCH)
        return events, cursor, self.log.at_end(cursor)

    async def result(self) -> ExecutionResult[Any]:
        return await asyncio.shield(self.task)

    def stop_reading(self) -> None:
        self.log.stop_reading()

    def enqueue(self, messages: tuple[Message, ...]) -> tuple[str, Awaitable[bool]]:
        item = QueuedInput(messages)
        self.inbox.enqueue(item)
        return item.id, asyncio.shield(item.applied)

    def steer(self, messages: tuple[Message, ...]) -> tuple[str, Awaitable[bool]]:
        item = QueuedInput(messages)
        self.inbox.steer(item)
        return item.id, asyncio.shield(item.applied)

    def abort(self, reason: object | None) -> None:
        self.signal.abort(reason)

    def leave(self) -> None:
        self.log.stop_reading()
        if not self.task.done():
            self.signal.abort("The consumer left the stream.")

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.log.close()
        if not task.cancelled():
            task.exception()  # Retrieved here, so that a result nobody awaits makes no noise.


async def contained(run: Coroutine[Any, Any, T]) -> T:
    """A hook that calls `sys.exit()` fails its run; let out of the task it would end the event loop and every run on it."""
    try:
        with runs_in_progress:
            return await run
    except SystemExit as error:
        raise AgentExecutionError(f"The run was ended by SystemExit({error.code!r}), raised in a hook or a listener.") from error


async def settle(source: RunSource) -> ExecutionResult[Any]:
    """Awaits a run for `send()`. When the caller is cancelled the run is aborted, and settles before the cancellation goes on."""
    try:
        return await source.result()
    except asyncio.CancelledError:
        source.abort("The task awaiting the run was cancelled.")
        waiting = asyncio.ensure_future(source.result())
        while not waiting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({waiting})
        if not waiting.cancelled():
            waiting.exception()
        raise
