"""with_rate_limit: admission, bookings and slots of calls."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.limits.limiter import create_rate_limiter
from lousho_ray.messages import user
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    Permit,
    TextChunk,
    ToolDefinition,
    WaitNotice,
)
from lousho_ray.providers.limited import RateLimitedProvider, with_rate_limit
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tokens import estimate_request_tokens
from lousho_ray.usage import ProviderUsage

REQUEST = GenerateOptions(messages=[user("hi")])
USED = ProviderUsage(30, 12, cached_input_tokens=10)


class RateLimited(Exception):
    status_code = 429
    body = None


class Recorder:
    """A limiter that writes down what happens to it."""

    def __init__(self, name: str = "l", log: list[Any] | None = None) -> None:
        self.name = name
        self.log: list[Any] = [] if log is None else log
        self.gate: asyncio.Event | None = None

    async def acquire(self, tokens: int) -> Permit:
        self.log.append((self.name, "acquire", tokens))
        if self.gate is not None:
            await self.gate.wait()
        return RecordedPermit(self)


class RecordedPermit:
    def __init__(self, limiter: Recorder) -> None:
        self._limiter = limiter

    def settle(self, tokens: int) -> None:
        self._limiter.log.append((self._limiter.name, "settle", tokens))

    def release(self) -> None:
        self._limiter.log.append((self._limiter.name, "release"))

    def undo(self) -> None:
        self._limiter.log.append((self._limiter.name, "undo"))


class Streaming:
    """A provider with an open stream that the test feeds."""

    name, default_model = "streaming", "m"

    def __init__(self, *chunks: Chunk | Exception) -> None:
        self.chunks = chunks
        self.opened = self.closed = 0

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        return GenerateResult("whole", usage=USED)

    async def stream(self, options: GenerateOptions, /) -> AsyncIterator[Chunk]:
        self.opened += 1
        try:
            for chunk in self.chunks:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.closed += 1


def steps(log: list[Any]) -> list[str]:
    return [entry[1] for entry in log]


async def test_a_call_is_booked_at_its_estimate_and_settled_at_its_usage() -> None:
    # RL-01, RL-11, RL-12
    limiter = Recorder()
    tool = ToolDefinition("search", "Searches.", {"type": "object"})
    options = GenerateOptions(messages=[user("hi " * 100)], tools=(tool,), settings={"max_tokens": 500})
    await with_rate_limit(Streaming(), limiter).generate(options)
    estimate = estimate_request_tokens(options) + 500
    assert estimate > 530
    assert limiter.log == [("l", "acquire", estimate), ("l", "settle", 42), ("l", "release")]


async def test_the_estimator_can_be_replaced() -> None:
    # RL-D2
    limiter = Recorder()
    await with_rate_limit(Streaming(), limiter, estimator=lambda text, model: 1_000).generate(REQUEST)
    assert limiter.log[0][2] >= 1_000


async def test_without_reported_usage_the_estimate_stays() -> None:
    # RL-13
    limiter = Recorder()
    await with_rate_limit(mock_model(["hi"]), limiter).generate(REQUEST)
    assert steps(limiter.log) == ["acquire", "release"]


async def test_a_failed_call_keeps_its_booking_and_frees_its_slot() -> None:
    # RL-13, RL-16
    limiter = Recorder()
    with pytest.raises(RateLimited):
        await with_rate_limit(mock_model([RateLimited()]), limiter).generate(REQUEST)
    assert steps(limiter.log) == ["acquire", "release"]


async def test_a_stream_is_settled_at_its_finish_and_released_at_its_end() -> None:
    # RL-12, RL-16
    limiter = Recorder()
    provider = with_rate_limit(Streaming(TextChunk("a"), FinishChunk("stop", USED)), limiter)
    seen = [steps(limiter.log) async for _ in provider.stream(REQUEST)]
    assert seen == [["acquire"], ["acquire", "settle"]]
    assert steps(limiter.log) == ["acquire", "settle", "release"]


async def test_a_stream_that_is_never_read_takes_no_slot() -> None:
    # RL-17
    limiter = Recorder()
    stream = with_rate_limit(Streaming(FinishChunk("stop")), limiter).stream(REQUEST)
    await stream.aclose()
    assert limiter.log == []


async def test_a_stream_that_is_closed_early_gives_its_slot_back_after_the_request_is_closed() -> None:
    # RL-16, RL-22
    limiter = Recorder()
    model = Streaming(TextChunk("a"), TextChunk("b"))
    stream = with_rate_limit(model, limiter).stream(REQUEST)
    await anext(stream)
    await stream.aclose()
    assert model.closed == 1
    assert steps(limiter.log) == ["acquire", "release"]


async def test_a_stream_that_is_dropped_gives_its_slot_back() -> None:
    # RL-16
    limiter = Recorder()
    model = Streaming(TextChunk("a"), TextChunk("b"))
    stream = with_rate_limit(model, limiter).stream(REQUEST)
    await anext(stream)
    del stream
    gc.collect()
    for _ in range(10):
        await asyncio.sleep(0)
    assert model.closed == 1
    assert steps(limiter.log) == ["acquire", "release"]


async def test_a_stream_that_fails_gives_its_slot_back() -> None:
    # RL-16
    limiter = Recorder()
    with pytest.raises(RateLimited):
        async for _ in with_rate_limit(Streaming(TextChunk("a"), RateLimited()), limiter).stream(REQUEST):
            pass
    assert steps(limiter.log) == ["acquire", "release"]


async def test_a_cancelled_call_in_flight_frees_its_slot_and_keeps_its_booking() -> None:
    # RL-22
    clock, limiter = FakeClock(), Recorder()
    slow = mock_model([{"delay_ms": 60_000}], clock=clock)
    task = asyncio.create_task(with_rate_limit(slow, limiter).generate(REQUEST))
    await clock.run_for(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps(limiter.log) == ["acquire", "release"]


async def test_several_limiters_are_entered_in_order_and_released_together() -> None:
    # RL-26
    log: list[Any] = []
    inner, outer = Recorder("inner", log), Recorder("outer", log)
    await with_rate_limit(Streaming(), [inner, outer, inner]).generate(REQUEST)
    assert [(entry[0], entry[1]) for entry in log] == [
        *(("inner", "acquire"), ("outer", "acquire")),
        *(("inner", "settle"), ("outer", "settle")),
        *(("inner", "release"), ("outer", "release")),
    ]


async def test_a_call_cancelled_at_the_second_limiter_books_nothing_at_the_first() -> None:
    # RL-20, RL-21
    log: list[Any] = []
    first, second = Recorder("first", log), Recorder("second", log)
    second.gate = asyncio.Event()
    model = mock_model(["hi"])
    task = asyncio.create_task(with_rate_limit(model, [first, second]).generate(REQUEST))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [(entry[0], entry[1]) for entry in log] == [("first", "acquire"), ("second", "acquire"), ("first", "undo")]
    assert model.calls == []


async def test_two_limiters_entered_in_opposite_orders_do_not_deadlock() -> None:
    # RL-D7
    clock = FakeClock()
    one, two = (create_rate_limiter({"max_concurrent": 1}, clock=clock) for _ in range(2))
    model = mock_model([{"text": "ok", "delay_ms": 10}], "repeat-last", clock=clock)
    forth, back = with_rate_limit(model, [one, two], clock=clock), with_rate_limit(model, [two, one], clock=clock)
    # Each of these holds one of the two when it meets the other.
    busy = [await one.acquire(1), await two.acquire(1)]
    calls = [asyncio.create_task(provider.generate(REQUEST)) for provider in (forth, back) * 5]
    await clock.run_for(0)
    for permit in busy:
        permit.release()
    await clock.run_for(1_000)
    assert all(call.done() for call in calls)
    assert len(model.calls) == 10
    for limiter in (one, two):
        stats = await limiter.stats()
        assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_same_limiter_reached_twice_is_entered_once(streamed: bool) -> None:
    # RL-18, RL-26
    limiter = Recorder()
    model = Streaming(TextChunk("a"), FinishChunk("stop", USED))
    provider = with_rate_limit(with_retry(with_rate_limit(model, limiter)), limiter)
    if streamed:
        assert len([chunk async for chunk in provider.stream(REQUEST)]) == 2
    else:
        await provider.generate(REQUEST)
    assert steps(limiter.log) == ["acquire", "settle", "release"]


async def test_a_task_that_outlives_the_call_it_was_started_in_is_limited_again() -> None:
    # RL-18: the exception holds only inside the call
    limiter = Recorder()
    later: list[asyncio.Task[GenerateResult]] = []
    ended = asyncio.Event()

    async def after() -> GenerateResult:
        await ended.wait()
        return await provider.generate(REQUEST)

    def turn(request: GenerateOptions) -> str:
        later.append(asyncio.create_task(after()))
        return "first"

    provider = with_rate_limit(mock_model([turn, "second"]), limiter)
    await provider.generate(REQUEST)
    ended.set()
    assert (await later[0]).text == "second"
    assert steps(limiter.log) == ["acquire", "release"] * 2


async def test_reading_a_stream_does_not_let_the_reader_into_the_limiter() -> None:
    # RL-18: only code of the provider runs inside its call
    limiter = Recorder()
    provider = with_rate_limit(Streaming(TextChunk("a"), FinishChunk("stop")), limiter)
    async for _ in provider.stream(REQUEST):
        await provider.generate(REQUEST)
    assert steps(limiter.log).count("acquire") == 3


async def test_calls_share_the_slots_of_one_limiter_and_wait_their_turn() -> None:
    # RL-01, RL-03, RL-16
    clock = FakeClock()
    limiter = create_rate_limiter({"max_concurrent": 2}, clock=clock)
    running = peak = 0

    async def turn(request: GenerateOptions) -> str:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await clock.sleep(1)
        running -= 1
        return "ok"

    providers = [with_rate_limit(mock_model([turn] * 3), limiter, clock=clock) for _ in range(2)]
    calls = asyncio.gather(*(provider.generate(REQUEST) for provider in providers for _ in range(3)))
    await clock.run_for(10_000)
    await calls
    assert peak == 2
    assert (await limiter.stats()).running == 0


async def test_waiting_is_told_once_with_its_length_and_not_waiting_is_not() -> None:
    # RL-25
    clock = FakeClock()
    told: list[Any] = []
    provider = with_rate_limit(mock_model(["a", "b"]), {"requests_per_minute": 1}, clock=clock)
    options = GenerateOptions(messages=[user("hi")], notify=told.append)
    await provider.generate(options)
    assert told == []
    task = asyncio.create_task(provider.generate(options))
    await clock.run_for(59_000)
    assert not task.done()
    await clock.run_for(1_001)
    await task
    assert len(told) == 1
    assert isinstance(told[0], WaitNotice)
    assert told[0].waited_ms == pytest.approx(60_000)


@pytest.mark.parametrize(("outside", "admissions"), [(True, 1), (False, 3)])
async def test_a_call_and_its_retries_are_one_admission_outside_and_one_each_inside(outside: bool, admissions: int) -> None:
    # RL-23
    limiter = Recorder()
    model = mock_model([RateLimited(), RateLimited(), "ok"])
    quick: dict[str, Any] = {"backoff": {"initial_ms": 0}}
    provider: Any
    if outside:
        provider = with_rate_limit(with_retry(model, **quick), limiter)
    else:
        provider = with_retry(with_rate_limit(model, limiter), **quick)
    assert (await provider.generate(REQUEST)).text == "ok"
    assert steps(limiter.log).count("acquire") == admissions
    assert steps(limiter.log).count("release") == admissions


async def test_waiting_is_not_timed_when_the_limiter_is_outside() -> None:
    # RL-19
    clock = FakeClock()
    model = mock_model(["a", "b"])
    retried = with_retry(model, timeout_ms=1_000, clock=clock)
    provider = with_rate_limit(retried, {"requests_per_minute": 1}, clock=clock)
    await provider.generate(REQUEST)
    task = asyncio.create_task(provider.generate(REQUEST))
    await clock.run_for(60_001)
    assert (await task).text == "b"
    assert len(model.calls) == 2


async def test_half_of_many_waiting_calls_cancelled_leaves_no_trace() -> None:
    # RL-21
    clock = FakeClock()
    limiter = create_rate_limiter({"max_concurrent": 3, "tokens_per_minute": 10_000}, clock=clock)
    model = mock_model([{"text": "ok", "delay_ms": 10, "usage": {"input_tokens": 1, "output_tokens": 1}}] * 100, clock=clock)
    provider = with_rate_limit(model, limiter, clock=clock)
    tasks = [asyncio.create_task(provider.generate(REQUEST)) for _ in range(100)]
    await clock.run_for(25)
    made_before = len(model.calls)
    for task in tasks[50:]:
        task.cancel()
    await clock.run_for(10_000)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) == 50
    assert made_before < 50
    assert len(model.calls) == 50
    stats = await limiter.stats()
    assert (stats.running, stats.waiting, stats.tokens_in_window, stats.requests_in_window) == (0, 0, 100, 50)


async def test_a_rejection_in_spite_of_the_limiter_is_warned_about_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    # RL-D5
    clock = FakeClock()
    model = mock_model([RateLimited()], "repeat-last")
    provider = with_rate_limit(model, {"requests_per_minute": 1_000}, clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(RateLimited):
                await provider.generate(REQUEST)
        assert len(caplog.records) == 1
        clock.advance(61_000)
        with pytest.raises(RateLimited):
            await provider.generate(REQUEST)
    assert len(caplog.records) == 2


async def test_a_limiter_that_is_switched_off_lets_calls_pass() -> None:
    # RL-30
    limiter = create_rate_limiter({"requests_per_minute": 1}, clock=FakeClock())
    limiter.enabled = False
    provider = with_rate_limit(mock_model(["ok"], "repeat-last"), limiter)
    for _ in range(5):
        await provider.generate(REQUEST)


def test_members_pass_through() -> None:
    # RL-25
    provider = with_rate_limit(mock_model([], name="n", default_model="d"), {})
    assert (provider.name, provider.default_model) == ("n", "d")
    assert provider.supports_hosted_tool("web_search")
    assert provider.supports_streaming()


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_concurrent": 0}, "limits.max_concurrent"),
        ({"max_concurrent": 1.5}, "limits.max_concurrent"),
        ({"requests_per_minute": -1}, "limits.requests_per_minute"),
        ({"tokens_per_minute": float("inf")}, "limits.tokens_per_minute"),
        ({"requestsPerMinute": 1}, "limits.requestsPerMinute"),
        (None, "limits"),
        (5, "limits"),
    ],
)
def test_wrong_limits_are_refused_by_name(limits: Any, field: str) -> None:
    # RL-02
    with pytest.raises(ConfigurationError) as caught:
        with_rate_limit(mock_model([]), limits)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", field)


def test_a_limiter_of_this_process_is_never_copied_silently() -> None:
    # RL-33
    provider = with_rate_limit(mock_model([]), {"max_concurrent": 1})
    assert isinstance(provider, RateLimitedProvider)
    with pytest.raises(ConfigurationError, match="double the limit"):
        pickle.dumps(provider)
