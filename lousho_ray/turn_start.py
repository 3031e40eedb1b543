"""How a turn starts: waiting for its place, joining another one, and failing before there is a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from lousho_ray.cancellation import Aborted
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.exporters import combine_exporters
from lousho_ray.handle import LocalRun
from lousho_ray.ids import new_id
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.inbox import QueuedInput
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.ports import Observer
from lousho_ray.session import Request, TurnRequest
from lousho_ray.spans import SpanBook, SpanSender, TraceExporter

T = TypeVar("T")


async def unless_aborted(wait: Awaitable[None], turn: LocalRun) -> None:
    """Waits for a place in line; an abort ends the wait, and the run then ends before it calls a model."""
    waiting = asyncio.ensure_future(wait)
    aborted = asyncio.ensure_future(turn.signal.wait())
    try:
        await asyncio.wait({waiting, aborted}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        aborted.cancel()


async def taken_by(item: QueuedInput, target: LocalRun) -> bool:
    """Whether the turn that was joined took the input; when it did not, it is over."""
    if await asyncio.shield(item.applied):
        return True
    await asyncio.wait({target.task})
    return False


def joined_runs(error: BaseException) -> tuple[str, ...]:
    """The ids of the calls that had joined the turn which an error ended."""
    runs: tuple[str, ...] = error.__dict__.get("joined_runs", ())
    return runs


async def joined_result(turn: LocalRun, target: LocalRun) -> ExecutionResult[Any]:
    """What a call that joined a turn gets: that turn's outcome. An error then says who had joined."""
    try:
        return await turn.signal.guard(target.result())
    except Exception as error:
        if not turn.signal.aborted:
            error.__dict__["joined_runs"] = (*joined_runs(error), turn.run_id)
        raise


async def refuse_joining(option: str, session_id: str) -> ExecutionResult[Any]:
    raise ConfigurationError(
        f"{option} cannot apply to a call that joins a running turn of session '{session_id}'; leave it out, or wait for the turn.",
        field=option,
    )


def run_emitter(turn: LocalRun, observers: Sequence[Observer], *, observed: bool, spans: TraceExporter | None = None) -> Emitter:
    """The emitter of a run; its spans are kept in a book of their own."""
    sinks = (*observers, turn.log.append) if observed else tuple(observers)
    book = None if spans is None else SpanBook(spans)
    return Emitter(Stamp(turn.run_id), sinks, drain=turn.log.drain if observed else None, spans=book)


def begin_turn(turn: LocalRun, request: Request, definition: AgentDefinition, observers: Sequence[Observer]) -> Emitter:
    """Takes over what a request says of its turn: how it is traced, and its permission mode, which is that of the call for good,
    else the session's of the moment, else the agent's. Returns the turn's emitter."""
    if isinstance(request, TurnRequest) and request.call.permission_mode is not None:
        turn.mode.fix(request.call.permission_mode)
    else:
        turn.mode.set(request.mode or definition.permission_mode)
    turn.trace = request.trace or definition.trace()
    spans: TraceExporter | None = definition.exporter
    if turn.trace.sent:
        sender = SpanSender(turn.log.append)
        spans = sender if spans is None else combine_exporters(spans, sender)
    return run_emitter(turn, observers, observed=request.observed, spans=spans)


async def reported(awaitable: Awaitable[T], emitter: Emitter) -> T:
    """Awaits what comes before a run begins: a failure there has only `error` and `run.done`."""
    try:
        return await awaitable
    except Aborted:
        raise
    except Exception as error:
        emitter.fail(error)
        raise


def failed_run(error: LoushoError) -> LocalRun:
    """A run that could not begin: its stream has `error` and `run.done`, its result is the error."""
    turn = LocalRun(new_id("run_"))

    async def fail() -> ExecutionResult[Any]:
        run_emitter(turn, (), observed=True).fail(error)
        raise error

    turn.start(fail())
    return turn
