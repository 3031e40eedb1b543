"""Running tools: threads, cancellation, crashes, generators. Nothing a tool does may hurt the run or its event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from lousho_ray import GenerateResult, MockProvider, ToolCall, create_agent
from lousho_ray.errors import OperationTimeoutError, PropagatingToolError, ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools import Tool, define_tool, tool
from lousho_ray.tools.execute import MAX_ITEMS, SandboxRequiredError, ToolCrash, call_tool
from lousho_ray.tools.net import RefusedHostError
from lousho_ray.tools.results import error_result
from lousho_ray.tools.threads import ToolThreads

CTX = ToolContext("call_1")
PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("PLACE", default="nowhere")


def of(execute: Callable[..., Any], **options: Any) -> Tool[..., Any]:
    return define_tool(name="probe", description="Probes.", input={"type": "object"}, execute=execute, **options)


async def run(made: Tool[..., Any], value: Any = None, **options: Any) -> Any:
    return await call_tool(made, {} if value is None else value, CTX, **options)


# ------------------------------------------------------------------------------------------------------------- calling


async def test_sync_functions_run_in_a_thread_and_async_ones_in_the_calling_task() -> None:  # RUN-D7, T07
    assert await run(of(lambda args: threading.get_ident())) != threading.get_ident()

    caller = asyncio.current_task()

    async def in_task(args: Any) -> bool:
        return asyncio.current_task() is caller

    assert await run(of(in_task))


async def test_context_variables_reach_a_thread() -> None:  # T07
    PLACE.set("here")
    assert await run(of(lambda args: PLACE.get())) == "here"


async def test_loop_runs_on_while_sync_tools_block() -> None:  # T07, Q05
    both_in, release = threading.Barrier(3), threading.Event()

    def block(args: Any) -> str:
        both_in.wait(10)
        release.wait(10)
        return "done"

    calls = [asyncio.create_task(run(of(block))) for _ in range(2)]
    await asyncio.to_thread(both_in.wait, 10)
    release.set()
    assert await asyncio.gather(*calls) == ["done", "done"]


@pytest.mark.parametrize(
    "execute",
    [
        lambda args, ctx: ctx,
        lambda args, *, ctx: ctx,
        lambda args, *rest: rest[0],
        lambda args, ctx=None: ctx,
        functools.partial(lambda extra, args, ctx: ctx, 1),
    ],
)
async def test_context_reaches_a_function_that_wants_it(execute: Callable[..., Any]) -> None:  # RUN-34
    assert await run(of(execute)) is CTX


async def test_functions_without_context_or_arguments_work() -> None:
    assert await run(of(lambda args: args), {"a": 1}) == {"a": 1}
    assert await run(of(lambda args, limit=3: limit)) == 3
    assert await run(of(lambda: "nothing")) == "nothing"


async def test_decorated_function_gets_keywords_and_context() -> None:  # TOOL-05
    @tool
    async def where(a: int, /, context: ToolContext, b: int = 2) -> Any:
        """Where."""
        return a, b, context.tool_call_id

    assert await call_tool(where, where.parse('{"a": 1}').value, CTX) == (1, 2, "call_1")

    def first(ctx: ToolContext, a: int, /) -> Any:
        """First."""
        return ctx.tool_call_id, a

    made = tool(first)
    assert await call_tool(made, made.parse('{"a": 1}').value, CTX) == ("call_1", 1)


async def test_callable_objects_are_sync_or_async_by_their_call() -> None:
    class Sync:
        def __call__(self, args: Any) -> int:
            return threading.get_ident()

    class Async:
        async def __call__(self, args: Any) -> int:
            return threading.get_ident()

    assert await run(of(Sync())) != threading.get_ident()
    assert await run(of(Async())) == threading.get_ident()


# ------------------------------------------------------------------------------------------------------- what tools return


async def test_returned_awaitables_and_generators_are_settled() -> None:  # T08, Q11
    async def inner() -> str:
        return "awaited"

    async def outer(args: Any) -> Any:
        return inner()

    assert await run(of(lambda args: inner())) == "awaited"
    assert await run(of(outer)) == "awaited"
    assert await run(of(lambda args: (i for i in range(5, 8)))) == [5, 6, 7]
    assert await run(of(lambda args: map(str, [1, 2]))) == ["1", "2"]

    def numbers(args: Any) -> Iterator[int]:
        yield from range(3)

    assert await run(of(numbers)) == [0, 1, 2]


async def test_sync_generator_is_read_in_its_thread() -> None:
    def idents(args: Any) -> Iterator[int]:
        yield threading.get_ident()

    assert await run(of(idents)) != [threading.get_ident()]


async def test_endless_iterator_is_refused() -> None:  # T08
    closed = threading.Event()

    def endless(args: Any) -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    with pytest.raises(ToolExecutionError, match=f"{MAX_ITEMS:,}"):
        await run(of(endless))
    assert closed.is_set()


async def test_async_generator_streams_snapshots_and_the_last_is_the_result() -> None:  # TOOL-34, RUN-36
    async def snapshots(args: Any) -> AsyncIterator[str]:
        yield "a"
        yield "ab"

    seen: list[tuple[Any, int]] = []
    made = of(snapshots)
    assert made.streams
    assert await run(made, on_partial=lambda snapshot, index: seen.append((snapshot, index))) == "ab"
    assert seen == [("a", 0), ("ab", 1)]
    assert await run(of(snapshots)) == "ab"


async def test_async_generator_without_a_yield_gives_none() -> None:  # TOOL-28
    async def silent(args: Any) -> AsyncIterator[str]:
        for item in ():
            yield item

    assert await run(of(silent)) is None


async def test_async_iterable_returned_as_value_is_listed_and_does_not_stream() -> None:  # TOOL-37
    class Feed:
        def __init__(self) -> None:
            self.left = 3

        def __aiter__(self) -> Feed:
            return self

        async def __anext__(self) -> int:
            if not self.left:
                raise StopAsyncIteration
            self.left -= 1
            return self.left

    seen: list[Any] = []
    assert await run(of(lambda args: Feed()), on_partial=lambda *partial: seen.append(partial)) == [2, 1, 0]
    assert seen == []


async def test_cancelled_generator_is_closed() -> None:  # TOOL-36, RUN-37
    closed, started = asyncio.Event(), asyncio.Event()

    async def endless(args: Any) -> AsyncIterator[int]:
        try:
            yield 1
            started.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    task = asyncio.create_task(run(of(endless)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()


async def test_generator_is_closed_when_a_snapshot_cannot_be_handed_on() -> None:
    closed = asyncio.Event()

    async def two(args: Any) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.set()

    def refuse(snapshot: Any, index: int) -> None:
        raise RuntimeError("listener")

    with pytest.raises(RuntimeError, match="listener"):
        await run(of(two), on_partial=refuse)
    assert closed.is_set()


# ---------------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.parametrize("in_thread", [True, False], ids=["thread", "task"])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
async def test_what_would_kill_the_loop_becomes_an_ordinary_error(error: BaseException, in_thread: bool) -> None:  # T06, Q10
    def crash(args: Any) -> None:
        raise error

    async def crash_in_task(args: Any) -> None:
        raise error

    made = of(crash if in_thread else crash_in_task)
    with pytest.raises(ToolExecutionError) as caught:
        await asyncio.create_task(run(made))
    assert caught.value.tool_name == "probe"
    assert error_result(made, caught.value).payload["error"] == type(error).__name__
    assert await run(of(lambda args: "alive")) == "alive"


async def test_exit_in_a_generator_tool_is_caught_too() -> None:  # T06
    async def crash(args: Any) -> AsyncIterator[int]:
        yield 1
        raise SystemExit(3)

    def crash_sync(args: Any) -> Iterator[int]:
        yield 1
        raise SystemExit(3)

    for made in (of(crash), of(crash_sync)):
        with pytest.raises(ToolExecutionError, match="SystemExit"):
            await asyncio.create_task(run(made))


@pytest.mark.parametrize(
    "error", [ValueError("bad"), TimeoutError("slow"), PropagatingToolError("stop"), OperationTimeoutError("late")]
)
async def test_ordinary_errors_pass_as_they_are(error: Exception) -> None:  # TOOL-24, RUN-32
    async def fail(args: Any) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await run(of(fail))
    assert caught.value is error


async def test_timeouts_inside_a_tool_are_its_own_affair() -> None:  # chapter 20, Batches
    async def give_up(args: Any) -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "gave up"
        return "never"

    async def timed_out(args: Any) -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    assert await run(of(give_up)) == "gave up"
    with pytest.raises(TimeoutError):
        await run(of(timed_out))


# ----------------------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("answer", ["value", "error", "exit"])
async def test_tool_that_swallows_its_cancellation_does_not_stop_it(answer: str) -> None:  # T05
    started = asyncio.Event()

    async def stubborn(args: Any) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        except BaseException:
            if answer == "error":
                raise ValueError("late") from None
            if answer == "exit":
                raise SystemExit from None
        return "late"

    task = asyncio.create_task(run(of(stubborn)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_cancelled_thread_is_waited_for_once_and_left_behind_the_second_time() -> None:  # RUN-55, T05
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work(args: Any) -> None:
        started.set()
        release.wait(10)
        ended.set()

    patient = asyncio.create_task(run(of(work)))
    await asyncio.to_thread(started.wait, 10)
    patient.cancel()
    await asyncio.sleep(0)
    assert not patient.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await patient
    assert ended.is_set()

    for event in (started, release, ended):
        event.clear()
    impatient = asyncio.create_task(run(of(work)))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(2):
        impatient.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await impatient
    assert not ended.is_set()
    release.set()
    assert await asyncio.to_thread(ended.wait, 10)


async def abandon(threads: ToolThreads, name: str, release: threading.Event) -> None:
    started = threading.Event()

    def hang() -> None:
        started.set()
        release.wait(30)

    task = asyncio.create_task(threads.run(name, hang))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_hung_threads_are_counted_and_further_calls_refused_by_name() -> None:  # T07
    threads, release = ToolThreads(max_running=1, max_abandoned=2), threading.Event()
    await abandon(threads, "scrape", release)
    assert threads.abandoned == 1
    assert await threads.run("fine", lambda: "a hung thread takes no place") == "a hung thread takes no place"
    await abandon(threads, "crawl", release)
    with pytest.raises(ToolExecutionError, match="crawl, scrape") as caught:
        await threads.run("next", lambda: None)
    assert caught.value.tool_name == "next"
    release.set()
    while threads.abandoned:
        await asyncio.sleep(0.001)
    assert await threads.run("next", lambda: "again") == "again"


async def test_calls_over_the_limit_wait_their_turn_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    threads, release, running = ToolThreads(max_running=2), threading.Event(), []

    def work(number: int) -> int:
        running.append(number)
        release.wait(10)
        return number

    calls = [asyncio.create_task(threads.run("work", functools.partial(work, number))) for number in range(6)]
    while len(running) < 2:
        await asyncio.sleep(0.001)
    assert "waits for its turn" in caplog.text
    calls[5].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[5]
    assert len(running) == 2
    release.set()
    assert await asyncio.gather(*calls[:5]) == [0, 1, 2, 3, 4]
    assert sorted(running) == [0, 1, 2, 3, 4]


async def test_threads_are_used_again() -> None:
    threads = ToolThreads()
    idents = {await threads.run("ident", threading.get_ident) for _ in range(20)}
    assert len(idents) <= 2


async def test_thread_does_not_keep_results_alive() -> None:
    class Big:
        pass

    threads = ToolThreads()
    held = weakref.ref(await threads.run("big", Big))
    async with asyncio.timeout(10):
        while held() is not None:
            await asyncio.sleep(0.001)


def test_hung_tool_does_not_keep_the_interpreter_alive() -> None:  # T07
    program = """
import asyncio, threading
from lousho_ray.ports import ToolContext
from lousho_ray.tools import define_tool
from lousho_ray.tools.execute import call_tool
started = threading.Event()
def hang(args):
    started.set()
    threading.Event().wait()
async def main():
    made = define_tool(name="hang", description="Hangs.", input={"type": "object"}, execute=hang)
    task = asyncio.create_task(call_tool(made, {}, ToolContext("1")))
    await asyncio.to_thread(started.wait)
    task.cancel(); await asyncio.sleep(0)
asyncio.run(main())
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.stdout == "ended\n", done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    "error", [ToolCrash("x", tool_name="t", raised="SystemExit"), RefusedHostError("x"), SandboxRequiredError("x")]
)
def test_errors_travel_whole(error: ToolExecutionError) -> None:  # Q01
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.__dict__ == error.__dict__


# ------------------------------------------------------------------------------------------------------------- sandboxes


async def test_tool_that_needs_a_sandbox_is_never_run_without_one() -> None:  # TOOL-18
    ran: list[Any] = []
    made = of(ran.append, requires_sandbox=True)
    with pytest.raises(SandboxRequiredError) as caught:
        await run(made)
    assert ran == []
    assert error_result(made, caught.value).payload["kind"] == "sandbox"
    assert error_result(made, caught.value).payload["error"] == "SandboxRequiredError"


async def test_sandboxed_function_gets_arguments_sandbox_and_context() -> None:  # TOOL-14, TOOL-18
    async def three(args: Any, sandbox: Any, ctx: Any) -> Any:
        return args, sandbox, ctx

    def two(args: Any, sandbox: Any) -> Any:
        return args, sandbox

    assert await run(of(lambda args: 1, sandbox_execute=three), {"a": 1}, sandbox="box") == ({"a": 1}, "box", CTX)
    assert await run(of(lambda args: 1, sandbox_execute=two), {"a": 1}, sandbox="box") == ({"a": 1}, "box")
    assert await run(of(lambda args: 1, sandbox_execute=two)) == 1


async def test_tools_with_ray_options_run_in_the_process_without_a_cluster() -> None:  # DEC-R8
    @tool(ray_options={"num_gpus": 8})
    def where() -> int:
        """Says where it runs."""
        return os.getpid()

    def policy(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return request.messages[-1].text
        return GenerateResult(tool_calls=(ToolCall("c", "where", "{}"),), finish_reason="tool_calls")

    # A lead's runtime is that of its sub-agents, too.
    child = create_agent(provider=MockProvider(policy=policy), tools=[where], description="Says it.", runtime="ray")
    lead = create_agent(provider=MockProvider(policy=asks_child), subagents={"child": child}, runtime="local")
    assert str(os.getpid()) in (await lead.send("Go.")).text
    alone = create_agent(provider=MockProvider(policy=policy), tools=[where], runtime="local")
    assert (await alone.send("Go.")).text == str(os.getpid())


def asks_child(request: Any) -> Any:
    if request.messages[-1].role == "tool":
        return request.messages[-1].text
    arguments = '{"agent": "child", "prompt": "Where?", "description": "Asks"}'
    return GenerateResult(tool_calls=(ToolCall("t", "task", arguments),), finish_reason="tool_calls")
