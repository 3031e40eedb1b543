"""Cancellation: signals and tokens alone, and a run that is cancelled at every point where it waits."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from lousho_ray.agent import Agent
from lousho_ray.cancellation import Aborted, AbortReason, AbortSignal, CancelToken
from lousho_ray.create import create_agent
from lousho_ray.limits.limiter import create_rate_limiter
from lousho_ray.messages import Message
from lousho_ray.ports import GenerateOptions, GenerateResult, ReasoningChunk, ReasoningEndChunk, TextChunk
from lousho_ray.stores.memory import MemorySessionStore, memory_store
from lousho_ray.tools.tool import define_tool
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import (
    Gate,
    PolicyProvider,
    ScriptedStream,
    agent_of,
    asks,
    calls,
    check_transcript,
    collect,
    names,
    plain,
    say,
    until,
)

# ------------------------------------------------------------------------------------------------------------------ the signal


def test_a_signal_fires_once_with_its_first_reason() -> None:
    signal, heard = AbortSignal(), list[Any]()
    signal.on_abort(heard.append)
    assert signal.abort("first")
    assert not signal.abort("second")
    assert heard == [AbortReason("AbortError", "first")]
    signal.on_abort(heard.append)  # fired already: told at once
    assert len(heard) == 2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, ("AbortError", "The run was aborted.")),
        ("text", ("AbortError", "text")),
        (ValueError("no"), ("ValueError", "no")),
        (TimeoutError("late"), ("TimeoutError", "late")),
        (AbortReason("X", "y"), ("X", "y")),
    ],
)
def test_reasons(given: Any, wanted: tuple[str, str]) -> None:
    # RUN-54, RUN-D2
    reason = AbortReason.of(given)
    assert (reason.name, reason.message) == wanted
    assert reason.to_dict() == {"name": wanted[0], "message": wanted[1]}


def test_a_listener_can_be_taken_back() -> None:
    signal, heard = AbortSignal(), list[Any]()
    forget = signal.on_abort(heard.append)
    forget()
    forget()
    signal.abort()
    assert heard == []


def test_a_follower_fires_with_the_same_reason() -> None:
    leader, follower, gone = AbortSignal(), AbortSignal(), AbortSignal()
    follower.follow(leader)
    gone.follow(leader)()
    leader.abort("x")
    assert follower.reason == leader.reason
    assert not gone.aborted
    late = AbortSignal()
    late.follow(leader)
    assert late.aborted
    with pytest.raises(Aborted, match="x"):
        late.raise_if_aborted()


def test_many_threads_fire_it_once() -> None:
    signal, won = AbortSignal(), list[bool]()
    start = threading.Barrier(8, timeout=10)

    def fire() -> None:
        start.wait()
        if signal.abort("x"):
            won.append(True)

    threads = [threading.Thread(target=fire) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [True]


async def test_a_signal_can_be_waited_for_from_another_thread() -> None:
    signal = AbortSignal()
    waiting = asyncio.ensure_future(signal.wait())
    await asyncio.sleep(0)
    await asyncio.to_thread(signal.abort, "from a thread")
    assert (await waiting).message == "from a thread"


async def test_guard_gives_the_result_or_the_error() -> None:
    async def fine() -> int:
        return 5

    async def bad() -> int:
        raise ValueError("no")

    signal = AbortSignal()
    assert await signal.guard(fine()) == 5
    with pytest.raises(ValueError, match="no"):
        await signal.guard(bad())
    signal.abort("x")
    with pytest.raises(Aborted):
        await signal.guard(fine())


async def test_guard_cancels_what_it_runs() -> None:
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    signal = AbortSignal()
    guarded = asyncio.ensure_future(signal.guard(forever()))
    await asyncio.sleep(0)
    signal.abort("x")
    with pytest.raises(Aborted):
        await guarded
    assert ended.is_set()


async def test_guard_that_is_cancelled_itself_settles_its_task_first() -> None:
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    guarded = asyncio.ensure_future(AbortSignal().guard(forever()))
    for _ in range(3):
        await asyncio.sleep(0)
    guarded.cancel()
    with pytest.raises(asyncio.CancelledError):
        await guarded
    assert ended.is_set()


async def test_guard_leaves_a_deaf_task_behind() -> None:
    go = asyncio.Event()
    task: list[asyncio.Task[Any]] = []

    async def deaf() -> None:
        current = asyncio.current_task()
        assert current is not None
        task.append(current)
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("nobody hears this")

    signal = AbortSignal()
    guarded = asyncio.ensure_future(signal.guard(deaf(), abandon_after_s=0))
    await until(lambda: task)
    signal.abort("x")
    with pytest.raises(Aborted):
        await guarded
    assert not task[0].done()
    go.set()
    await asyncio.wait(task)


# ------------------------------------------------------------------------------------------------------------------- the token


async def test_a_token_gives_an_aborted_result() -> None:
    # RUN-54, RUN-D1
    gate, token = Gate("slow"), CancelToken()
    sending = asyncio.ensure_future(agent_of(calls("slow"), tools=[gate.tool]).send("Go", cancel=token))
    await gate.running.wait()
    token.cancel(ValueError("changed my mind"))
    result = await sending
    assert (result.finish_reason, result.abort_reason) == ("aborted", {"name": "ValueError", "message": "changed my mind"})
    assert token.cancelled


async def test_a_token_that_was_cancelled_before_makes_no_model_call() -> None:
    # RUN-56
    token, provider = CancelToken(), PolicyProvider(lambda options: "never")
    token.cancel()
    for target in (create_agent(provider=provider), create_agent(provider=provider).session()):
        result = await target.send("Go", cancel=token)
        assert (result.finish_reason, result.steps) == ("aborted", 0)
    assert provider.calls == 0


async def test_a_token_with_a_time_limit_says_timeout() -> None:
    # RUN-54, RUN-D1
    provider = ScriptedStream([asyncio.Event()])
    for target in (create_agent(provider=provider), create_agent(provider=ScriptedStream([asyncio.Event()])).session()):
        result = await target.send("Go", cancel=CancelToken.after_ms(5))
        assert result.finish_reason == "aborted"
        assert result.abort_reason is not None
        assert result.abort_reason["name"] == "TimeoutError"


async def test_the_timer_of_a_token_ends_with_the_run() -> None:
    loop = asyncio.get_running_loop()
    token = CancelToken.after_ms(3_600_000)
    before = _timers(loop)
    await agent_of("Done").send("Go", cancel=token)
    await agent_of("Done").session().send("Go", cancel=token)
    assert _timers(loop) == before


def _timers(loop: Any) -> int:
    return sum(not handle.cancelled() for handle in loop._scheduled)


@pytest.mark.parametrize("end", ["leave", "deadline", "abort"])
async def test_what_ends_one_run_does_not_end_others_under_the_same_token(end: str) -> None:
    # CA-08
    token, gate = CancelToken(), Gate("slow")
    other = asyncio.ensure_future(agent_of(calls("slow"), "Done", tools=[gate.tool]).send("Go", cancel=token))
    await gate.running.wait()
    provider = ScriptedStream([asyncio.Event()])
    limits = {"max_duration_ms": 1} if end == "deadline" else {}
    async with create_agent(provider=provider, limits=limits).stream("Go", cancel=token) as run:
        if end == "abort":
            run.abort("only this one")
        elif end == "deadline":
            assert (await run.result).finish_reason == "budget-exceeded"
    assert not token.cancelled
    gate.go.set()
    assert (await other).finish_reason == "stop"


@pytest.mark.parametrize("session", [False, True])
async def test_a_long_lived_token_keeps_nothing_of_the_runs_that_are_over(session: bool) -> None:
    token = CancelToken()
    agent = create_agent(provider=PolicyProvider(lambda options: "Done"))
    target: Any = agent.session() if session else agent
    for _ in range(3):
        await target.send("Go", cancel=token)
        run = target.stream("Go", cancel=token)
        await collect(run)
        await run.result
    await until(lambda: not token.signal._callbacks)


@pytest.mark.parametrize("value", ["now", 5, AbortSignal()])
async def test_cancel_takes_a_token(value: Any) -> None:
    with pytest.raises(Exception, match="CancelToken"):
        await agent_of("x").send("Go", cancel=value)


# ------------------------------------------------------------------------------------------------------------ abort of a handle


async def test_a_run_that_is_aborted_before_it_starts_calls_nobody() -> None:
    # RUN-56
    provider = PolicyProvider(lambda options: "never")
    run = create_agent(provider=provider).stream("Go")
    run.abort("at once")
    events = await collect(run)
    assert names(events) == ["run.start", "run.done aborted"]
    assert provider.calls == 0


async def test_an_abort_after_the_end_changes_nothing() -> None:
    run = agent_of("Done").stream("Go")
    await run.result
    run.abort()
    assert (await run.result).finish_reason == "stop"


async def test_a_deaf_provider_is_abandoned_and_its_late_words_are_dropped() -> None:
    # RUN-55
    go = asyncio.Event()
    provider = ScriptedStream([TextChunk("a"), go, TextChunk("late"), *say("end")], deaf=True)
    heard: list[Any] = []
    run = create_agent(provider=provider, on_event=heard.append).stream("Go")
    await provider.reached(0, 1).wait()
    run.abort("x")
    result = await run.result
    assert result.finish_reason == "aborted"
    count = len(heard)
    go.set()
    await until(lambda: provider.closed)
    await asyncio.sleep(0)
    assert len(heard) == count
    assert names(heard)[-1] == "run.done aborted"


async def test_an_abort_is_no_failure() -> None:
    # RUN-57
    from lousho_ray.providers.fallback import with_fallback
    from lousho_ray.providers.retry import with_retry

    first = ScriptedStream([asyncio.Event()], [asyncio.Event()])
    second = ScriptedStream(say("never"))
    provider = with_fallback([with_retry(first, max_retries=3), second])
    run = create_agent(provider=provider).stream("Go")
    await first.reached(0, 0).wait()
    run.abort("x")
    events = await collect(run)
    assert names(events) == ["run.start", "step.start 1", "step.done 1 aborted", "run.done aborted"]
    assert len(first.requests) == 1
    assert second.requests == []


# -------------------------------------------------------------------------------------- cancelled at every point where it waits


class CheckedStore(MemorySessionStore):
    """Refuses a transcript that a provider would not take; waits a moment in each call, as a real store does."""

    def __init__(self) -> None:
        super().__init__()
        self.saves = 0

    async def load(self, id: str, /) -> list[Message] | None:
        await asyncio.sleep(0)
        return await super().load(id)

    async def save(self, id: str, messages: Any, /, **fence: Any) -> None:
        check_transcript(messages)
        self.saves += 1
        await asyncio.sleep(0)
        await super().save(id, messages, **fence)
        await asyncio.sleep(0)


def busy_agent(on_event: Callable[[Any], None] | None, **options: Any) -> Agent[Any]:
    """Two steps with tools of every kind, a sub-agent and hooks; each of them waits for the event loop now and then."""

    async def pause(*args: Any) -> None:
        await asyncio.sleep(0)

    class Hook:
        name = "hook"
        pre_generate = post_generate = pre_tool_call = post_tool_call = staticmethod(pause)

    async def slow(args: Any) -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        return "ok"

    async def stream(args: Any) -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    task = ("task", {"agent": "child", "prompt": "p", "description": "d"})
    used = ProviderUsage(1, 1)

    async def lead(options: GenerateOptions) -> GenerateResult:
        await asyncio.sleep(0)
        done = sum(message.role == "tool" for message in options.messages[_last_user(options.messages) :])
        if done == 0:
            return asks("slow", "stream", "nope", text="First", usage=used)
        if done == 3:
            return asks(task, "slow", usage=used)
        return GenerateResult("Done", usage=used)

    async def child(options: GenerateOptions) -> GenerateResult:
        await asyncio.sleep(0)
        return GenerateResult("Found", usage=used) if options.messages[-1].role == "tool" else asks("slow", usage=used)

    slow_tool = define_tool(name="slow", description="Slow.", execute=slow)
    streaming = define_tool(name="stream", description="Streams.", execute=stream)
    worker = create_agent(provider=PolicyProvider(child), name="child", description="Works.", tools=[slow_tool])
    return create_agent(
        provider=PolicyProvider(lead),
        tools=[slow_tool, streaming],
        subagents={"child": worker},
        hooks=[Hook()],
        tool_concurrency=2,
        on_event=on_event,
        **options,
    )


def _last_user(messages: Any) -> int:
    return max(index for index, message in enumerate(messages) if message.role == "user")


async def cancelled_after(turns: int, coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Cancels a send after so many turns of the event loop: whether it had ended by then, and how it ended. It leaves no task."""
    before = asyncio.all_tasks()
    sending = asyncio.ensure_future(coroutine)
    for _ in range(turns):
        await asyncio.sleep(0)
    ended_by_itself = sending.done()
    sending.cancel()
    outcome = (await asyncio.gather(sending, return_exceptions=True))[0]
    assert asyncio.all_tasks() <= before | {sending}, f"tasks left after {turns} turns"
    return ended_by_itself, outcome


@pytest.mark.parametrize("observed", [False, True])
async def test_send_cancelled_after_any_number_of_loop_turns(observed: bool) -> None:
    # RUN-D1, SES-17, SES-18, SES-19, EVT-27
    finished_at: int | None = None
    cancelled_runs = 0
    for turns in range(0, 400, 1 if observed else 3):
        heard: list[Any] = []
        store = CheckedStore()
        agent = busy_agent(heard.append if observed else None)
        session = agent.session(id="s", store=store)
        ended_by_itself, outcome = await cancelled_after(turns, session.send("First"))
        saved = await store.load("s")
        if ended_by_itself:
            assert outcome.ok
            finished_at = turns
        else:
            assert isinstance(outcome, asyncio.CancelledError)
            cancelled_runs += 1
        assert bool(saved) == bool(store.saves)
        if saved:
            check_transcript(saved)
        if observed and heard:
            assert names(heard).count("run.done stop") + names(heard).count("run.done aborted") == 1
            assert heard[-1].type == "run.done"
        if turns % 9 == 0 or ended_by_itself:
            later = await session.send("Second")
            assert later.ok
            assert later.text == "Done"
            transcript = await store.load("s")
            assert transcript is not None
            check_transcript(transcript)
            assert [message.text for message in transcript if message.role == "user"] == (["First"] if saved else []) + ["Second"]
        if finished_at is not None:
            break
    assert finished_at is not None, "the run never ended by itself"
    assert cancelled_runs > 20
    gc.collect()


async def test_a_durable_send_cancelled_after_any_number_of_loop_turns_gives_its_slot_back_and_the_next_turn_works() -> None:
    # RUN-D1, DUR-34, RL-11: with checkpoints and a limiter of two calls at a time
    finished_at: int | None = None
    for turns in range(0, 900, 2):
        store = memory_store()
        _slowed(store.checkpoints)
        limiter = create_rate_limiter({"max_concurrent": 2})
        agent = busy_agent(None, store=store, rate_limit=limiter)
        session = agent.session("s")
        ended_by_itself, outcome = await cancelled_after(turns, session.send("First"))
        assert ended_by_itself or isinstance(outcome, asyncio.CancelledError)
        stats = await limiter.stats()
        assert (stats.running, stats.waiting) == (0, 0), f"a slot is held after {turns} turns"
        assert await session.pending() is None
        check_transcript(await session.load())
        if turns % 14 == 0 or ended_by_itself:
            later = await session.send("Second")
            assert (later.ok, later.text) == (True, "Done")
            check_transcript(await session.load())
        if ended_by_itself:
            finished_at = turns
            break
    assert finished_at is not None, "the run never ended by itself"
    assert finished_at > 60


def _slowed(checkpoints: Any) -> None:
    """Saves and loads of a store wait for the event loop, before and after."""
    for name in ("save", "load", "delete"):

        def wrap(plain_method: Any) -> Any:
            async def slow(*args: Any, **options: Any) -> Any:
                await asyncio.sleep(0)
                value = await plain_method(*args, **options)
                await asyncio.sleep(0)
                return value

            return slow

        setattr(checkpoints, name, wrap(getattr(checkpoints, name)))


async def test_a_send_that_is_cancelled_twice_still_settles() -> None:
    # RUN-D1: the bookkeeping is shielded
    gate = Gate("slow")
    stubborn = asyncio.Event()

    async def slow_to_stop(args: Any) -> str:
        gate.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await stubborn.wait()
        return "never"

    tool = define_tool(name="slow", description="Slow.", execute=slow_to_stop)
    sending = asyncio.ensure_future(agent_of(calls("slow"), tools=[tool]).send("Go"))
    await gate.running.wait()
    for _ in range(3):
        sending.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not sending.done()
    stubborn.set()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_a_timeout_around_send_works() -> None:
    # RUN-D1, ERR-19
    provider = ScriptedStream([asyncio.Event()])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await create_agent(provider=provider).send("Go")
    assert provider.closed == 1


async def test_a_task_group_cancels_its_runs() -> None:
    # RUN-D1
    gate = Gate("slow")
    agent = agent_of(calls("slow"), tools=[gate.tool])

    async def fail() -> None:
        await gate.running.wait()
        raise ValueError("no")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.send("Go"))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        await both()
    assert caught.group_contains(ValueError)
    assert gate.cancelled == 1


async def test_many_runs_cancelled_at_once_leave_nothing() -> None:
    # CA-08
    gates = [Gate("slow") for _ in range(50)]
    sending = [asyncio.ensure_future(agent_of(calls("slow"), tools=[gate.tool]).send("Go")) for gate in gates]
    for gate in gates:
        await gate.running.wait()
    for task in sending:
        task.cancel()
    outcomes = await asyncio.gather(*sending, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert [gate.cancelled for gate in gates] == [1] * 50


@pytest.mark.parametrize("stop", range(40))
async def test_a_stream_left_after_any_number_of_events(stop: int) -> None:
    # EVT-05, SES-19, SES-20
    store = CheckedStore()
    session = busy_agent(None).session(id="s", store=store)
    seen = 0
    async with session.stream("First") as run:
        async for event in run:
            seen += 1
            if seen > stop or event.type == "run.done":
                break
    result = await run.result
    saved = await store.load("s")
    assert result.finish_reason in ("stop", "aborted")
    assert bool(saved) == (result.finish_reason == "stop")
    check_transcript(result.messages)
    later = await session.send("Second")
    assert later.ok


async def test_an_event_loop_that_closes_takes_the_runs_along() -> None:
    # A script that ends while a stream runs: asyncio cancels all tasks, and none may hang or complain.
    def script() -> list[str]:
        seen: list[str] = []

        async def main() -> None:
            run = agent_of(calls("slow"), tools=[Gate("slow").tool]).stream("Go")
            async for event in run:
                seen.append(event.type)
                if event.type == "tool.start":
                    return

        asyncio.run(main())
        return seen

    assert (await asyncio.to_thread(script))[-1] == "tool.start"


async def test_reasoning_of_an_aborted_call_is_closed_in_the_stream_of_events() -> None:
    # EVT-29: a reader that pairs start and done must not be left with an open one
    provider = ScriptedStream([ReasoningChunk("hm"), asyncio.Event(), ReasoningEndChunk()])
    run = create_agent(provider=provider, tools=[plain("a")]).stream("Go")
    await provider.reached(0, 1).wait()
    run.abort()
    kinds = names(await collect(run))
    assert kinds.count("reasoning.start") == sum(kind.startswith("reasoning.done") for kind in kinds)


async def test_a_durable_turn_cancelled_after_any_number_of_loop_turns_is_dropped_whole() -> None:
    # RUN-D1, SES-19, SES-54
    for turns in range(0, 400, 2):
        store = memory_store()
        session = busy_agent(None).session(id="s", store=store)
        ended_by_itself, _ = await cancelled_after(turns, session.send("First"))
        assert await session.pending() is None
        saved = await session.load()
        check_transcript(saved)
        assert not saved or saved[-1].text == "Done"  # the whole turn, when the cancellation came after its end
        if turns % 9 == 0 or ended_by_itself:
            assert (await session.send("Second")).text == "Done"
            check_transcript(session.messages)
        if ended_by_itself:
            return
    raise AssertionError("the run never ended by itself")


@pytest.mark.parametrize("option", ["instructions", "tools", "model"])
@pytest.mark.parametrize("session", [False, True])
async def test_an_abort_ends_the_wait_for_a_function_valued_option(option: str, session: bool) -> None:
    # RUN-53, RUN-56, RUN-D1
    waiting, forever = asyncio.Event(), asyncio.Event()

    async def resolve(who: Any) -> Any:
        waiting.set()
        await forever.wait()

    options: dict[str, Any] = {option: resolve}
    if option != "model":
        options["provider"] = PolicyProvider(lambda request: "never")
    agent = create_agent(**options)
    target: Any = agent.session() if session else agent
    run = target.stream("Hi")
    await waiting.wait()
    run.abort("enough")
    result = await run.result
    assert (result.finish_reason, result.steps) == ("aborted", 0)
    assert names(await collect(run)) == ["run.start", "run.done aborted"]
    waiting.clear()
    sending = asyncio.ensure_future(target.send("Hi"))
    await waiting.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_an_abort_ends_the_wait_for_a_validator() -> None:
    # RUN-53
    waiting, forever = asyncio.Event(), asyncio.Event()

    async def validate(value: Any, ctx: Any) -> None:
        waiting.set()
        await forever.wait()

    run = agent_of("5", output=int, output_validate=validate).stream("Hi")
    await waiting.wait()
    run.abort("enough")
    assert (await run.result).finish_reason == "aborted"
    assert names(await collect(run))[-2:] == ["step.done 1 aborted", "run.done aborted"]
