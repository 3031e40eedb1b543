"""Retries: a provider that tries a failed model call again, with growing delays."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from lousho_ray.cancellation import AbortReason, AbortSignal, CancelToken
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import ConfigurationError, OperationTimeoutError
from lousho_ray.options import Backoff, Retry, parse_options
from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, GenerateResult, LLMProvider, RetryNotice
from lousho_ray.providers.failures import classify, failed_usage, to_provider_error
from lousho_ray.providers.wrapper import (
    ProviderWrapper,
    close_stream,
    drain,
    is_final,
    is_output,
    next_chunk,
    open_stream,
    tell,
)

T = TypeVar("T")

JITTER = 0.25
"""A delay is moved by up to this share of itself, so that calls that failed together do not come back together."""


def with_retry(
    provider: LLMProvider,
    options: Retry | Mapping[str, Any] | None = None,
    *,
    jitter: bool = True,
    clock: Clock = SYSTEM_CLOCK,
    **retry: Any,
) -> RetryProvider:
    """A provider that tries failed calls again.

    Retried are rate limits, timeouts, network errors, malformed or truncated replies and 5xx; not refused credentials, invalid
    requests, context overflow and cancellations. A stream is retried only while nothing of the reply is out: reasoning and empty
    text do not count. What fails for good is raised as `CompactedLLMProviderError`.

    Args:
        provider: Any provider, wrapped or not.
        options: A `Retry` or a dict with its keys.
        jitter: `False` makes delays exact.
        clock: Its time.
        **retry: The keys of `Retry` one by one: `max_retries` (2), `backoff` (`{"initial_ms": 500, "max_ms": 30_000}`),
            `retry_on`, `on_retry`, `timeout_ms`, `idle_timeout_ms`, `cancel`. They win over `options`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with the field `retry.<key>`.
    """
    given = dict(options) if isinstance(options, Retry) else options
    if retry:
        given = {**(given or {}), **retry}
    return RetryProvider(provider, parse_options(Retry, given, field="retry"), jitter=jitter, clock=clock)


def resilient_provider(provider: LLMProvider, max_retries: int = 2, timeout_ms: float | None = None) -> RetryProvider:
    """`with_retry` with the two options that a provider's own configuration has."""
    return with_retry(provider, max_retries=max_retries, timeout_ms=timeout_ms)


def backoff_ms(backoff: Backoff, attempt: int, jitter: float = 0.0) -> float:
    """The delay after the failed `attempt` (from 1): doubled each time, capped, moved by `jitter` (-1 to 1) times 25 %."""
    delay = min(backoff.initial_ms * 2.0 ** min(attempt - 1, 60), backoff.max_ms)
    return min(delay * (1 + JITTER * jitter), backoff.max_ms)


class RetryProvider(ProviderWrapper):
    """Made by `with_retry`. `retry` holds its options."""

    def __init__(self, inner: LLMProvider, retry: Retry, *, jitter: bool = True, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(inner)
        self.retry = retry
        self._jitter = jitter
        self._clock = clock
        self._cancel = _signal_of(retry.cancel)

    @property
    def max_retries(self) -> int:
        return self.retry.max_retries

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        for attempt in itertools.count(1):
            try:
                self._raise_if_cancelled()
                return await self._bounded(self.inner.generate(options), self.retry.timeout_ms, "reply")
            except Exception as error:
                delay_ms = self._next_delay_ms(error, attempt, options)
            await self._sleep(delay_ms)
        raise AssertionError("unreachable")

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        for attempt in itertools.count(1):
            chunks, output = self._attempt(options), False
            try:
                while True:
                    try:
                        chunk = await anext(chunks, None)
                    except Exception as error:
                        delay_ms = self._next_delay_ms(error, attempt, options, may_retry=not output)
                        break
                    if chunk is None:
                        return
                    output = output or is_output(chunk)
                    yield chunk
            finally:
                await chunks.aclose()
            await self._sleep(delay_ms)

    async def _attempt(self, options: GenerateOptions) -> AsyncGenerator[Chunk, None]:
        """One try of a stream. Opening it and its first chunk count together, as some servers fail only there."""
        self._raise_if_cancelled()
        chunks: AsyncIterator[Chunk] | None = None

        async def first() -> Chunk:
            nonlocal chunks
            chunks = await open_stream(self.inner, options)
            return await next_chunk(chunks, self.name)

        try:
            chunk = await self._bounded(first(), self.retry.timeout_ms, "first chunk")
            assert chunks is not None
            while not isinstance(chunk, FinishChunk):
                yield chunk
                chunk = await self._bounded(next_chunk(chunks, self.name), self.retry.idle_timeout_ms, "next chunk")
            yield chunk
            with suppress(OperationTimeoutError):
                await self._bounded(drain(chunks), self.retry.idle_timeout_ms, "end of the stream")
        finally:
            await close_stream(chunks)

    def _next_delay_ms(self, error: Exception, attempt: int, options: GenerateOptions, *, may_retry: bool = True) -> float:
        """How long to wait before the next try; raises the final error when there is none."""
        if is_final(error):
            raise error
        if not may_retry:
            raise self._final(error, options)
        retry = self.retry
        failure = classify(error, now=self._clock.wall())
        wanted = failure.retryable if retry.retry_on is None else bool(retry.retry_on(error, attempt))
        asked_ms = failure.retry_after_ms
        too_long = asked_ms is not None and asked_ms > retry.backoff.max_ms
        if not wanted or too_long or attempt > retry.max_retries:
            raise self._final(error, options)
        moved = random.uniform(-1, 1) if self._jitter else 0.0
        if asked_ms is None:
            delay_ms = backoff_ms(retry.backoff, attempt, moved)
        else:
            # "At once" still spreads the calls of a crowd a little.
            delay_ms = asked_ms or abs(moved) * JITTER * min(retry.backoff.initial_ms, retry.backoff.max_ms)
        spent = failed_usage(error, options.model or self.default_model)
        notice = RetryNotice(attempt, retry.max_retries, delay_ms, failure.message, failure.category, self.name, spent)
        tell((options.notify, retry.on_retry), notice)
        return delay_ms

    def _final(self, error: Exception, options: GenerateOptions) -> BaseException:
        model = options.model or self.default_model
        return to_provider_error(error, self.name, model, now=self._clock.wall())

    async def _bounded(self, awaitable: Awaitable[T], limit_ms: float | None, what: str) -> T:
        if limit_ms is None and self._cancel is None:
            return await awaitable
        async with cut_short(self._clock, limit_ms, self._cancel, f"{what} of {self.name}"):
            return await awaitable

    async def _sleep(self, delay_ms: float) -> None:
        self._raise_if_cancelled()
        await self._bounded(self._clock.sleep(delay_ms / 1000), None, "delay")

    def _raise_if_cancelled(self) -> None:
        if self._cancel is not None and self._cancel.reason is not None:
            raise asyncio.CancelledError(self._cancel.reason.message)


@asynccontextmanager
async def cut_short(clock: Clock, limit_ms: float | None, cancel: AbortSignal | None, operation: str) -> AsyncIterator[None]:
    """Cancels the block after `limit_ms`, or when `cancel` fires.

    Raises:
        OperationTimeoutError: The time was up.
        asyncio.CancelledError: `cancel` fired.
    """
    loop = asyncio.get_running_loop()
    scope = asyncio.timeout(None)
    inside = True

    def end() -> None:
        if inside:
            scope.reschedule(loop.time())

    def on_cancel(_: AbortReason) -> None:
        loop.call_soon_threadsafe(end)

    try:
        async with scope:
            timer = None if limit_ms is None else clock.call_later(limit_ms / 1000, end)
            forget = None if cancel is None else cancel.on_abort(on_cancel)
            try:
                yield
            finally:
                inside = False
                if timer is not None:
                    timer.cancel()
                if forget is not None:
                    forget()
    except TimeoutError:
        if not scope.expired():
            raise
        if cancel is not None and cancel.reason is not None:
            raise asyncio.CancelledError(cancel.reason.message) from None
        raise OperationTimeoutError(
            f"The {operation} took longer than {limit_ms:g} ms.", operation=operation, timeout_ms=limit_ms
        ) from None


def _signal_of(cancel: Any) -> AbortSignal | None:
    if cancel is None or isinstance(cancel, AbortSignal):
        return cancel
    if isinstance(cancel, CancelToken):
        return cancel.signal
    raise ConfigurationError(
        f"retry.cancel must be a CancelToken or an AbortSignal; got {type(cancel).__name__}.", field="retry.cancel"
    )
