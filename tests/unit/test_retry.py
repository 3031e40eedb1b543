"""with_retry: which failures are tried again, when, and how often."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from lousho_ray.cancellation import AbortSignal, CancelToken
from lousho_ray.errors import (
    CassetteError,
    CompactedLLMProviderError,
    ConfigurationError,
    MissingDependencyError,
    OperationTimeoutError,
    RateLimitError,
    TestFailedError,
)
from lousho_ray.messages import ReasoningBlock, ToolCall, user
from lousho_ray.options import Backoff, Retry
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    HostedToolCall,
    HostedToolCallChunk,
    ProviderNotice,
    ReasoningChunk,
    ReasoningEndChunk,
    RetryNotice,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers.fallback import with_fallback
from lousho_ray.providers.mock import MockProvider
from lousho_ray.providers.retry import RetryProvider, backoff_ms, resilient_provider, with_retry
from lousho_ray.providers.wrapper import can_stream
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model

REQUEST = GenerateOptions(messages=[user("hi")])
DONE = FinishChunk("stop")


class HTTPError(Exception):
    """What a client library raises for an error status."""

    def __init__(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"status {status}")
        self.status_code = status
        self.body = body
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


Step = Chunk | Exception | float


class Scripted:
    """Streams one list of steps per call: chunks, errors, or seconds to wait. Counts calls and closed streams."""

    name = "scripted"
    default_model = "m"

    def __init__(self, *attempts: Sequence[Step], clock: FakeClock | None = None) -> None:
        self.attempts = list(attempts)
        self.clock = clock
        self.calls = 0
        self.closed = 0

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        chunks = [chunk async for chunk in self.stream(options)]
        return GenerateResult(text="".join(c.text for c in chunks if isinstance(c, TextChunk)))

    async def stream(self, options: GenerateOptions, /) -> AsyncIterator[Chunk]:
        steps = self.attempts[self.calls]
        self.calls += 1
        try:
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    assert self.clock is not None
                    await self.clock.sleep(step)
                else:
                    yield step
        finally:
            self.closed += 1


def failing(*errors: Exception, text: str = "ok") -> Any:
    return mock_model([*errors, text])


def quick(provider: Any, **options: Any) -> RetryProvider:
    return with_retry(provider, jitter=False, **{"backoff": {"initial_ms": 0}, **options})


async def run_with_clock(clock: FakeClock, call: Any, ms: float = 120_000) -> Any:
    task = asyncio.ensure_future(call)
    await clock.run_for(ms)
    return await asyncio.wait_for(task, 1)


async def read(provider: Any, options: GenerateOptions = REQUEST) -> list[Chunk]:
    return [chunk async for chunk in provider.stream(options)]


async def collect(provider: Any, seen: list[Any], options: GenerateOptions = REQUEST) -> None:
    """Adds each chunk as it comes, so that what came before an error is there too."""
    async for chunk in provider.stream(options):
        seen.append(chunk)  # noqa: PERF401


# ----------------------------------------------------------------------------------------------------------- what is retried


@pytest.mark.parametrize(
    "error",
    [
        HTTPError(429),
        HTTPError(408),
        HTTPError(500),
        HTTPError(502),
        HTTPError(504),
        HTTPError(529),
        HTTPError(200, {"error": {"type": "overloaded_error", "message": "busy"}}),
        OperationTimeoutError("too slow"),
        ConnectionResetError("reset"),
        TimeoutError(),
    ],
    ids=str,
)
async def test_passing_failures_are_tried_again(error: Exception) -> None:
    # PRV-62, ERR-23
    model = failing(error)
    assert (await quick(model).generate(REQUEST)).text == "ok"
    assert len(model.calls) == 2


@pytest.mark.parametrize(
    "error",
    [
        HTTPError(400),
        HTTPError(401),
        HTTPError(402),
        HTTPError(403),
        HTTPError(404),
        HTTPError(409),
        HTTPError(413),
        HTTPError(422),
        HTTPError(429, {"error": {"code": "insufficient_quota", "message": "no credit"}}),
        HTTPError(429, {"error": {"type": "usage_limit_reached", "resets_in_seconds": 3600}}),
        HTTPError(500, {"error": {"message": "prompt is too long: 210000 tokens"}}),
        TypeError("a bug"),
    ],
    ids=str,
)
async def test_failures_that_stay_are_sent_once_and_compacted(error: Exception) -> None:
    # PRV-62, PRV-74, PRV-D3, ERR-20, L04, L13
    model = failing(error)
    with pytest.raises(CompactedLLMProviderError) as caught:
        await quick(model).generate(REQUEST)
    assert len(model.calls) == 1
    assert caught.value.__cause__ is error
    assert caught.value.compacted.provider == "mock"
    assert caught.value.compacted.model == "mock-model"


@pytest.mark.parametrize(
    "error",
    [
        TestFailedError("script is over"),
        CassetteError("no match"),
        MissingDependencyError("openai is missing", package="openai", install_command="pip install openai"),
    ],
    ids=str,
)
async def test_our_own_errors_pass_unchanged_and_are_not_retried(error: Exception) -> None:
    # PRV-74, ERR-27, MOCK-11
    model = failing(error)
    with pytest.raises(type(error)) as caught:
        await quick(model, retry_on=lambda error, attempt: False).generate(REQUEST)
    assert caught.value is error
    assert len(model.calls) == 1


async def test_a_test_error_is_not_retried_even_when_asked_to() -> None:
    # MOCK-11
    model = mock_model([])
    with pytest.raises(TestFailedError):
        await quick(model, retry_on=lambda error, attempt: True).generate(REQUEST)
    assert len(model.calls) == 1


@pytest.mark.parametrize(("max_retries", "calls"), [(0, 1), (1, 2), (2, 3), (5, 6)])
async def test_max_retries_counts_the_tries_after_the_first(max_retries: int, calls: int) -> None:
    # PRV-12, PRV-62
    model = mock_model([HTTPError(429)], on_exhausted="repeat-last")
    with pytest.raises(RateLimitError) as caught:
        await quick(model, max_retries=max_retries).generate(REQUEST)
    assert len(model.calls) == calls
    assert caught.value.code == "LOUSHO_PROVIDER_RATE_LIMITED"


async def test_two_retries_are_the_default() -> None:
    model = mock_model([HTTPError(500)], on_exhausted="repeat-last")
    with pytest.raises(CompactedLLMProviderError):
        await with_retry(model, backoff={"initial_ms": 0}).generate(REQUEST)
    assert len(model.calls) == 3


async def test_retry_on_replaces_the_rule() -> None:
    # PRV-62b
    asked: list[tuple[str, int]] = []

    def retry_on(error: Exception, attempt: int) -> bool:
        asked.append((str(error), attempt))
        return attempt < 2

    model = mock_model([ValueError("odd")], on_exhausted="repeat-last")
    with pytest.raises(CompactedLLMProviderError):
        await quick(model, max_retries=9, retry_on=retry_on).generate(REQUEST)
    assert asked == [("odd", 1), ("odd", 2)]


async def test_retry_on_is_not_asked_about_cancellations() -> None:
    # PRV-62b, ERR-19
    asked: list[Exception] = []
    model = mock_model([{"text": "late", "delay_ms": 60_000}], clock=FakeClock())
    task = asyncio.create_task(quick(model, retry_on=lambda e, _: bool(asked.append(e)) or True).generate(REQUEST))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asked == []
    assert len(model.calls) == 1


# -------------------------------------------------------------------------------------------------------------------- delays


def test_delays_double_up_to_the_cap_and_jitter_stays_within_a_quarter() -> None:
    # PRV-D2
    backoff = Backoff(initial_ms=500, max_ms=30_000)
    assert [backoff_ms(backoff, attempt) for attempt in (1, 2, 3, 7, 10_000)] == [500, 1000, 2000, 30_000, 30_000]
    assert backoff_ms(backoff, 1, -1) == 375
    assert backoff_ms(backoff, 1, 1) == 625
    assert backoff_ms(backoff, 9, 1) == 30_000


async def test_the_notice_comes_before_the_delay_and_says_the_delay_really_used() -> None:
    # PRV-63
    clock, told, called = FakeClock(), [], []
    model = failing(HTTPError(500, {"error": {"message": "down"}}), HTTPError(429))
    provider = with_retry(model, jitter=False, clock=clock, on_retry=called.append)
    options = GenerateOptions(messages=[user("hi")], notify=told.append)
    started = clock.now()
    task = asyncio.create_task(provider.generate(options))
    await clock.run_for(0)
    assert told == [RetryNotice(1, 2, 500.0, "down", "unknown", "mock")]
    assert len(model.calls) == 1
    await clock.run_for(499)
    assert len(model.calls) == 1
    await clock.run_for(1)
    assert len(model.calls) == 2
    assert [notice.delay_ms for notice in told] == [500.0, 1000.0]
    assert told[1].category == "rate-limit"
    await clock.run_for(1000)
    assert (await task).text == "ok"
    assert clock.now() - started == pytest.approx(1.5)
    assert called == told


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("headers", "delay_ms"),
    [
        ({"retry-after-ms": "20", "retry-after": "5"}, 20),
        ({"Retry-After": "7"}, 7_000),
        ({"retry-after": "Thu, 01 Jan 2026 00:00:05 GMT"}, 5_000),
        ({"retry-after": "Wed, 31 Dec 2025 23:59:55 GMT"}, 500),
        ({"retry-after": "-5"}, 500),
        ({"retry-after": "abc"}, 500),
        ({"retry-after": "Fri, 31 Dec 99999 23:59:59 GMT"}, 500),
        ({"retry-after": "0"}, 0),
    ],
)
async def test_a_usable_hint_replaces_the_delay_and_others_are_ignored(
    status: int, headers: dict[str, str], delay_ms: float
) -> None:
    # PRV-64, ERR-24, L01, L02
    clock, told = FakeClock(), []
    provider = with_retry(failing(HTTPError(status, None, headers)), jitter=False, clock=clock, on_retry=told.append)
    await run_with_clock(clock, provider.generate(REQUEST))
    assert [notice.delay_ms for notice in told] == [delay_ms]


async def test_a_hint_of_zero_still_spreads_the_calls_a_little() -> None:
    # L02
    clock, told = FakeClock(), []
    provider = with_retry(failing(HTTPError(429, None, {"retry-after": "0"})), clock=clock, on_retry=told.append)
    await run_with_clock(clock, provider.generate(REQUEST))
    assert 0 < told[0].delay_ms <= 125


@pytest.mark.parametrize("headers", [{"retry-after": "31"}, {"retry-after": "9999999999"}, {"retry-after-ms": "30001"}])
async def test_a_hint_above_the_cap_fails_at_once_and_is_passed_on(headers: dict[str, str]) -> None:
    # PRV-64, ERR-24, L02, L14
    clock = FakeClock()
    model = failing(HTTPError(429, None, headers))
    with pytest.raises(RateLimitError) as caught:
        await with_retry(model, clock=clock, retry_on=lambda error, attempt: True).generate(REQUEST)
    asked_ms = caught.value.compacted.retry_after_ms
    assert asked_ms is not None
    assert asked_ms > 30_000
    assert caught.value.retry_after == asked_ms / 1000
    assert len(model.calls) == 1
    assert clock.waiting == 0


async def test_hints_on_other_statuses_are_ignored() -> None:
    # PRV-64
    clock, told = FakeClock(), []
    provider = with_retry(failing(HTTPError(500, None, {"retry-after": "99"})), jitter=False, clock=clock, on_retry=told.append)
    await run_with_clock(clock, provider.generate(REQUEST))
    assert told[0].delay_ms == 500


async def test_cancelling_during_the_delay_ends_the_call_at_once() -> None:
    # PRV-63
    clock = FakeClock()
    model = failing(HTTPError(500))
    task = asyncio.create_task(with_retry(model, clock=clock).generate(REQUEST))
    await clock.run_for(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.waiting == 0
    await clock.run_for(60_000)
    assert len(model.calls) == 1


@pytest.mark.parametrize("make", [CancelToken, AbortSignal])
async def test_the_cancel_option_ends_delay_attempt_and_stream(make: Callable[[], Any]) -> None:
    # PRV-62: `cancel`
    clock, cancel = FakeClock(), make()
    fire = cancel.cancel if isinstance(cancel, CancelToken) else cancel.abort
    slow = mock_model([{"text": "late", "delay_ms": 60_000}], clock=clock)
    waiting = asyncio.create_task(with_retry(failing(HTTPError(500)), clock=clock, cancel=cancel).generate(REQUEST))
    running = asyncio.create_task(with_retry(slow, clock=clock, cancel=cancel).generate(REQUEST))
    stream = Scripted([TextChunk("a"), 60.0, DONE], clock=clock)
    reading = asyncio.create_task(read(with_retry(stream, clock=clock, cancel=cancel)))
    await clock.run_for(0)
    fire("enough")
    await clock.run_for(0)
    for task in (waiting, running, reading):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 1)
    assert stream.closed == 1
    assert clock.waiting == 0
    untouched = failing()
    with pytest.raises(asyncio.CancelledError):
        await with_retry(untouched, cancel=cancel).generate(REQUEST)
    assert untouched.calls == []


# -------------------------------------------------------------------------------------------------------------- time limits


async def test_timeout_bounds_each_attempt_of_generate() -> None:
    # PRV-65
    clock, told = FakeClock(), []
    model = mock_model([{"text": "late", "delay_ms": 5_000}, "quick"], clock=clock)
    provider = with_retry(model, timeout_ms=1_000, jitter=False, clock=clock, on_retry=told.append)
    task = asyncio.create_task(provider.generate(REQUEST))
    await clock.run_for(999)
    assert told == []
    await clock.run_for(1)
    assert [notice.category for notice in told] == ["timeout"]
    await clock.run_for(500)
    assert (await task).text == "quick"


async def test_a_timeout_that_stays_is_an_operation_timeout() -> None:
    # PRV-65, PRV-74
    clock = FakeClock()
    model = mock_model([{"delay_ms": 5_000}], on_exhausted="repeat-last", clock=clock)
    with pytest.raises(OperationTimeoutError) as caught:
        await run_with_clock(clock, with_retry(model, timeout_ms=1_000, clock=clock).generate(REQUEST))
    assert caught.value.timeout_ms == 1_000
    assert len(model.calls) == 3
    assert clock.waiting == 0


async def test_timeout_of_a_stream_bounds_only_its_first_chunk() -> None:
    # PRV-65
    clock = FakeClock()
    model = Scripted([0.9, ReasoningChunk("hm"), 50.0, TextChunk("a"), 50.0, DONE], clock=clock)
    chunks = await run_with_clock(clock, read(with_retry(model, timeout_ms=1_000, clock=clock)), 200_000)
    assert chunks == [ReasoningChunk("hm"), TextChunk("a"), DONE]
    assert model.calls == 1


async def test_a_stream_without_a_first_chunk_in_time_is_closed_and_retried() -> None:
    # PRV-65, PRV-66
    clock, told = FakeClock(), []
    model = Scripted([5.0, TextChunk("late"), DONE], [TextChunk("ok"), DONE], clock=clock)
    provider = with_retry(model, timeout_ms=1_000, clock=clock, jitter=False, on_retry=told.append)
    assert await run_with_clock(clock, read(provider)) == [TextChunk("ok"), DONE]
    assert model.closed == 2
    assert [notice.category for notice in told] == ["timeout"]
    assert clock.waiting == 0


async def test_idle_timeout_bounds_the_gap_between_chunks_and_is_retried_only_before_output() -> None:
    # PRV-65, ERR-26
    clock = FakeClock()
    model = Scripted([ReasoningChunk("hm"), 9.0, DONE], [TextChunk("a"), 9.0, DONE], clock=clock)
    with pytest.raises(OperationTimeoutError) as caught:
        await run_with_clock(clock, read(with_retry(model, idle_timeout_ms=2_000, clock=clock)))
    assert caught.value.timeout_ms == 2_000
    assert model.calls == model.closed == 2


async def test_a_slow_consumer_is_no_idle_stream() -> None:
    # PRV-65: only the provider's silence counts.
    clock = FakeClock()
    model = Scripted([TextChunk("a"), TextChunk("b"), DONE], clock=clock)
    seen = []
    async for chunk in with_retry(model, idle_timeout_ms=1_000, clock=clock).stream(REQUEST):
        clock.advance(5_000)
        await asyncio.sleep(0)
        seen.append(chunk)
    assert seen == [TextChunk("a"), TextChunk("b"), DONE]


async def test_a_timeout_of_the_provider_itself_is_not_mistaken_for_ours() -> None:
    clock, told = FakeClock(), []
    model = failing(TimeoutError("socket"))
    provider = with_retry(model, timeout_ms=60_000, clock=clock, on_retry=told.append)
    await run_with_clock(clock, provider.generate(REQUEST))
    assert [(notice.category, notice.message) for notice in told] == [("timeout", "socket")]


# ------------------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "before",
    [
        [],
        [TextChunk("")],
        [ReasoningChunk("thinking"), ReasoningEndChunk()],
        [ReasoningEndChunk(ReasoningBlock(signature="s"))],
    ],
    ids=["nothing", "empty text", "reasoning", "signed reasoning"],
)
async def test_a_stream_that_fails_before_output_is_retried(before: list[Chunk]) -> None:
    # PRV-66, PRV-67, L11
    told: list[ProviderNotice] = []
    order: list[Any] = []
    model = Scripted([*before, HTTPError(500)], [TextChunk("ok"), DONE])
    provider = quick(model, on_retry=order.append)
    await collect(provider, order, GenerateOptions(messages=[user("hi")], notify=told.append))
    assert order == [*before, told[0], TextChunk("ok"), DONE]
    assert model.closed == model.calls == 2


@pytest.mark.parametrize(
    "output",
    [
        TextChunk("H"),
        ToolCallChunk(ToolCall("1", "f")),
        HostedToolCallChunk(HostedToolCall("1", "web")),
    ],
    ids=["text", "tool call", "hosted call"],
)
async def test_a_stream_that_fails_after_output_is_not_retried(output: Chunk) -> None:
    # PRV-66, L05
    error = HTTPError(500)
    model = Scripted([output, error], [TextChunk("again"), DONE])
    seen: list[Chunk] = []
    with pytest.raises(CompactedLLMProviderError) as caught:
        await collect(quick(model), seen)
    assert seen == [output]
    assert caught.value.__cause__ is error
    assert model.calls == model.closed == 1


async def test_a_stream_that_ends_without_a_finish_is_truncated() -> None:
    # PRV-66: retried while nothing is out
    model = Scripted([ReasoningChunk("hm")], [TextChunk("ok"), DONE])
    assert await read(quick(model)) == [ReasoningChunk("hm"), TextChunk("ok"), DONE]
    cut = Scripted([TextChunk("Hel")], [DONE])
    with pytest.raises(CompactedLLMProviderError, match="without a finish"):
        await read(quick(cut))
    assert cut.calls == 1


async def test_the_finish_comes_once_and_a_failure_behind_it_does_not_count() -> None:
    # PRV-05
    model = Scripted([TextChunk("ok"), DONE, HTTPError(500)])
    assert await read(quick(model)) == [TextChunk("ok"), DONE]
    assert model.closed == model.calls == 1


@pytest.mark.parametrize("wrap", [with_retry, lambda provider: with_fallback([provider])])
async def test_a_stream_is_read_on_after_its_finish_so_that_the_provider_can_end_it_in_order(wrap: Any) -> None:
    ended: list[str] = []

    class Tidy(Scripted):
        async def stream(self, options: GenerateOptions, /) -> AsyncIterator[Chunk]:
            yield TextChunk("ok")
            yield DONE
            ended.append("in order")

    chunks = await read(wrap(Tidy()))
    assert chunks[0] == TextChunk("ok")
    assert isinstance(chunks[-1], FinishChunk)
    assert ended == ["in order"]


async def test_opening_a_stream_may_be_a_coroutine_that_fails() -> None:
    # PRV-02, PRV-66
    class Coroutine(Scripted):
        async def stream(self, options: GenerateOptions, /) -> Any:  # type: ignore[override]
            self.calls += 1
            if self.calls == 1:
                raise HTTPError(503)
            return self.chunks()

        async def chunks(self) -> AsyncIterator[Chunk]:
            yield TextChunk("ok")
            yield DONE

    model = Coroutine()
    assert await read(quick(model)) == [TextChunk("ok"), DONE]
    assert model.calls == 2


async def test_a_provider_that_cannot_stream_is_asked_for_the_whole_reply() -> None:
    # PRV-02
    class Whole:
        name, default_model = "whole", "m"

        async def generate(self, options: GenerateOptions, /) -> GenerateResult:
            block = ReasoningBlock("hm", signature="s")
            return GenerateResult("hi", (ToolCall("1", "f"),), "tool_calls", reasoning=(block,))

    provider = quick(Whole())
    assert not provider.supports_streaming()
    chunks = await read(provider)
    assert [type(chunk) for chunk in chunks] == [ReasoningChunk, ReasoningEndChunk, TextChunk, ToolCallChunk, FinishChunk]


async def test_leaving_a_stream_early_closes_the_providers_stream() -> None:
    # PRV-09
    model = Scripted([TextChunk("a"), TextChunk("b"), DONE])
    stream = quick(model).stream(REQUEST)
    assert await anext(stream) == TextChunk("a")
    await stream.aclose()
    assert model.closed == 1


async def test_cancelling_a_waiting_stream_closes_it_and_is_never_wrapped() -> None:
    # PRV-09, ERR-19
    clock = FakeClock()
    model = Scripted([60.0, DONE], clock=clock)
    task = asyncio.create_task(read(with_retry(model, timeout_ms=120_000, clock=clock)))
    await clock.run_for(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert model.closed == model.calls == 1
    assert clock.waiting == 0


# --------------------------------------------------------------------------------------------------------- being a provider


async def test_members_pass_through_and_wrappers_nest() -> None:
    # PRV-70
    class Rich(Scripted):
        def supports_hosted_tool(self, type: str) -> bool:
            return type == "web_search"

        async def get_models(self) -> list[str]:
            return ["m"]

    provider = with_retry(with_retry(Rich([DONE])))
    assert (provider.name, provider.default_model) == ("scripted", "m")
    assert provider.supports_hosted_tool("web_search")
    assert not provider.supports_hosted_tool("other")
    assert await provider.get_models() == ["m"]
    assert not hasattr(provider, "aclose")
    assert can_stream(provider)
    assert with_retry(Rich(), max_retries=5).max_retries == 5


def test_a_retry_wrapper_pickles_with_its_callbacks() -> None:
    # Q01, BUD-34: it travels with an agent
    limit = 3
    provider = with_retry(MockProvider(["hi"]), max_retries=4, retry_on=lambda error, attempt: attempt < limit)
    copy = pickle.loads(cloudpickle.dumps(provider))
    assert copy.max_retries == 4
    assert copy.name == "mock"
    assert copy.retry.retry_on(ValueError(), 1)
    assert pickle.loads(pickle.dumps(with_retry(MockProvider()))).max_retries == 2


def test_the_final_error_survives_pickling() -> None:
    # Q01
    error = asyncio.run(_error_of(quick(failing(HTTPError(429, None, {"retry-after": "99"})))))
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, RateLimitError)
    assert copy.compacted == error.compacted


async def _error_of(provider: RetryProvider) -> Any:
    with pytest.raises(RateLimitError) as caught:
        await provider.generate(REQUEST)
    return caught.value


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_retries": -1}, "retry.max_retries"),
        ({"max_retries": True}, "retry.max_retries"),
        ({"max_retries": 1.5}, "retry.max_retries"),
        ({"timeout_ms": 0}, "retry.timeout_ms"),
        ({"idle_timeout_ms": float("nan")}, "retry.idle_timeout_ms"),
        ({"backoff": {"initial_ms": -1}}, "retry.backoff.initial_ms"),
        ({"backoff": {"max": 1}}, "retry.backoff.max"),
        ({"retry_on": "always"}, "retry.retry_on"),
        ({"cancel": "now"}, "retry.cancel"),
        ({"maxRetries": 1}, "retry.maxRetries"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    # PRV-62
    with pytest.raises(ConfigurationError) as caught:
        with_retry(MockProvider(), **options)
    assert caught.value.field == field


@pytest.mark.parametrize("provider", ["openai/gpt-4o-mini", None, object(), MockProvider])
def test_something_else_than_a_provider_is_refused(provider: Any) -> None:
    # CA-11
    with pytest.raises(ConfigurationError) as caught:
        with_retry(provider)
    assert caught.value.field == "provider"


def test_options_come_as_a_dict_a_model_or_keywords_and_keywords_win() -> None:
    assert with_retry(MockProvider(), {"max_retries": 7}).max_retries == 7
    assert with_retry(MockProvider(), Retry(max_retries=7), timeout_ms=5).retry.timeout_ms == 5
    merged = with_retry(MockProvider(), Retry(max_retries=7, timeout_ms=9), max_retries=1).retry
    assert (merged.max_retries, merged.timeout_ms) == (1, 9)
    resilient = resilient_provider(MockProvider(), max_retries=4, timeout_ms=9)
    assert (resilient.max_retries, resilient.retry.timeout_ms) == (4, 9)


async def test_a_listener_that_raises_is_logged_and_does_not_fail_the_call(caplog: pytest.LogCaptureFixture) -> None:
    def broken(notice: RetryNotice) -> None:
        raise RuntimeError("listener")

    with caplog.at_level(logging.WARNING, logger="lousho_ray.providers"):
        assert (await quick(failing(HTTPError(500)), on_retry=broken).generate(REQUEST)).text == "ok"
    assert len(caplog.records) == 1
