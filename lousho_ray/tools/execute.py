"""Running a tool so that nothing it does can hurt the run: whatever it raises is an ordinary exception here, or a cancellation."""

from __future__ import annotations

import asyncio
import inspect
import io
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

from lousho_ray.errors import ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.threads import TOOL_THREADS
from lousho_ray.tools.tool import Tool

OnPartial = Callable[[Any, int], Awaitable[None] | None]
"""Gets each snapshot of an async generator tool, and its index from 0."""

Place = Callable[[Tool[..., Any], Any, ToolContext], Awaitable[Any]]
"""Runs a tool that has `ray_options` elsewhere."""

MAX_ITEMS = 10_000
"""How many values a tool's iterator may yield."""


class ToolCrash(ToolExecutionError):  # noqa: N818 - what happened, not what is wrong
    """A tool raised something that must not be let out: `SystemExit`, a cancellation of its own. `raised` is its class name."""

    def __init__(self, message: object = "", *, code: str | None = None, tool_name: str | None = None, raised: str = "") -> None:
        super().__init__(message, code=code, tool_name=tool_name)
        self.raised = raised


class SandboxRequiredError(ToolExecutionError):
    """A tool that only runs in a sandbox has no `sandbox_execute`."""

    tool_error_kind = "sandbox"


async def call_tool(
    tool: Tool[..., Any],
    value: Any,
    ctx: ToolContext,
    on_partial: OnPartial | None = None,
    *,
    sandbox: Any = None,
    place: Place | None = None,
) -> Any:
    """Runs a tool with validated arguments and returns its result.

    Sync functions run in a thread with a copy of the context variables, async ones in the calling task. An async generator is read
    to its end, each yield handed to `on_partial`; its last one is the result. Other iterators become lists, awaitables are awaited.

    `place` runs those that have `ray_options`.

    Cancelling the calling task cancels an async tool, also one that swallows the cancellation; a tool in a thread is waited for
    (cancel twice to leave it behind).

    Raises:
        ToolExecutionError: For `SystemExit`, `KeyboardInterrupt` and the like raised by the tool, and for a `CancelledError` that
            nobody asked for. Other exceptions of the tool are raised as they are.
    """
    task = asyncio.current_task()
    cancels_before = 0 if task is None else task.cancelling()
    try:
        if place is not None and tool.ray_options is not None:
            result = await place(tool, value, ctx)
        else:
            result = await _settled(tool.name, await _started(tool, value, ctx, sandbox), on_partial)
    except BaseException as error:
        if task is not None and task.cancelling() > cancels_before:
            raise asyncio.CancelledError from None
        if isinstance(error, Exception):
            raise
        raise _crash(tool.name, error) from error
    if task is not None and task.cancelling() > cancels_before:
        raise asyncio.CancelledError
    return result


async def _started(tool: Tool[..., Any], value: Any, ctx: ToolContext, sandbox: Any) -> Any:
    """Calls the function: its result, or the coroutine or generator it returned."""
    function: Callable[..., Any] = tool.function
    positional, keywords = tool.call_arguments(value, ctx)
    in_thread = tool.runs_in_thread
    if tool.requires_sandbox or (sandbox is not None and tool.sandbox_execute is not None):
        function, in_thread = _sandboxed(tool)
        positional, keywords = [value, _host() if sandbox is None else sandbox, ctx][: _arity(function, 3)], {}
    if not in_thread:
        return function(*positional, **keywords)

    def call() -> Any:
        result = function(*positional, **keywords)
        return _drained(tool.name, result) if _is_drainable(result) else result

    return await TOOL_THREADS.run(tool.name, call)


def _sandboxed(tool: Tool[..., Any]) -> tuple[Callable[..., Any], bool]:
    if tool.sandbox_execute is None:
        raise SandboxRequiredError(
            f"Tool {tool.name!r} only runs in a sandbox and has no `sandbox_execute`, so it was not run.", tool_name=tool.name
        )
    return tool.sandbox_execute, not inspect.iscoroutinefunction(tool.sandbox_execute)


def _host() -> Any:
    from lousho_ray.tools.workspace.shell import NoopSandbox

    return NoopSandbox()


def _arity(function: Callable[..., Any], most: int) -> int:
    """How many positional arguments a function takes, at most `most`."""
    parameters = inspect.signature(function).parameters.values()
    if any(item.kind is inspect.Parameter.VAR_POSITIONAL for item in parameters):
        return most
    return min(most, sum(item.kind in {item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD} for item in parameters))


async def _settled(name: str, result: Any, on_partial: OnPartial | None) -> Any:
    """What a tool returned, with everything that is still to be awaited or read."""
    while inspect.isawaitable(result):
        result = await result
    if isinstance(result, AsyncGenerator):
        return await _last_snapshot(result, on_partial)
    if isinstance(result, AsyncIterator):
        return await _listed(name, result)
    return _drained(name, result) if _is_drainable(result) else result


async def _last_snapshot(generator: AsyncGenerator[Any, None], on_partial: OnPartial | None) -> Any:
    last, index = None, 0
    async with aclosing(generator):
        async for last in generator:
            if on_partial is not None:
                told = on_partial(last, index)
                if told is not None:
                    await told  # the consumer of the run's events is behind
            index += 1
    return last


async def _listed(name: str, items: AsyncIterator[Any]) -> list[Any]:
    listed: list[Any] = []
    async for item in items:
        listed.append(item)
        if len(listed) > MAX_ITEMS:
            raise _endless(name)
    return listed


def _is_drainable(result: Any) -> bool:
    return isinstance(result, Iterator) and not isinstance(result, io.IOBase)


def _drained(name: str, items: Iterator[Any]) -> list[Any]:
    listed: list[Any] = []
    for item in items:
        listed.append(item)
        if len(listed) > MAX_ITEMS:
            if inspect.isgenerator(items):
                items.close()
            raise _endless(name)
    return listed


def _endless(name: str) -> ToolExecutionError:
    return ToolExecutionError(f"Tool {name!r} returned an iterator of more than {MAX_ITEMS:,} values.", tool_name=name)


def _crash(name: str, error: BaseException) -> ToolCrash:
    raised = type(error).__name__
    text = f": {error}" if str(error) else ""
    return ToolCrash(f"Tool {name!r} raised {raised}{text}", tool_name=name, raised=raised)
