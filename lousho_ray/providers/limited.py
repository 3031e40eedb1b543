"""Rate limits: a provider whose calls queue at one or more limiters before they are made."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import ConfigurationError
from lousho_ray.options import RateLimits
from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, GenerateResult, Limiter, LLMProvider, Permit, WaitNotice
from lousho_ray.providers.failures import classify
from lousho_ray.providers.wrapper import ProviderWrapper, close_stream, open_stream, tell
from lousho_ray.tokens import TokenEstimator, estimate_request_tokens
from lousho_ray.usage import ProviderUsage

LimitsOrLimiter: TypeAlias = RateLimits | Mapping[str, Any] | Limiter

_calls: ContextVar[tuple[_Admission, ...]] = ContextVar("lousho_limited_calls", default=())
"""The admitted calls that the running code is inside of: a call made inside a call enters a limiter once."""


def with_rate_limit(
    provider: LLMProvider,
    limits: LimitsOrLimiter | Sequence[LimitsOrLimiter],
    *,
    estimator: TokenEstimator | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> RateLimitedProvider:
    """A provider whose `generate()` and `stream()` wait for admission, first in first out.

    A call is booked at the estimate of its messages and tool definitions plus its `max_tokens`, and re-booked at the usage the
    provider reports. A stream is admitted when it is first read, and holds its slot until it ends, fails, or is closed or dropped.

    Args:
        provider: Any provider. Outside `with_retry` a call and its retries are one admission, inside each try is one.
        limits: `requests_per_minute`, `tokens_per_minute`, `max_concurrent`; or a limiter that others use too; or several, all
            of which must admit a call.
        estimator: Counts text in place of the built-in estimate.
        clock: Measures the wait, and is the time of a limiter made here.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with the field `limits.<key>`.
    """
    wanted = list(limits) if isinstance(limits, list | tuple) else [limits]
    limiters: list[Limiter] = []
    for item in wanted:
        limiter = _limiter_of(item, clock)
        if not any(limiter is known for known in limiters):
            limiters.append(limiter)
    return RateLimitedProvider(provider, tuple(limiters), estimator=estimator, clock=clock)


def _limiter_of(limits: Any, clock: Clock) -> Limiter:
    if hasattr(limits, "acquire"):
        return limits  # type: ignore[no-any-return]
    if limits is None or not isinstance(limits, Mapping | RateLimits):
        raise ConfigurationError(
            f"limits must be a dict of limits or a rate limiter; got {type(limits).__name__}. "
            "Use for example {'requests_per_minute': 60} or create_rate_limiter().",
            field="limits",
        )
    from lousho_ray.limits.limiter import create_rate_limiter

    return create_rate_limiter(limits, clock=clock, field="limits")


class RateLimitedProvider(ProviderWrapper):
    """Made by `with_rate_limit`. A call enters all of `limiters`, in the order of their keys."""

    def __init__(
        self,
        inner: LLMProvider,
        limiters: tuple[Limiter, ...],
        *,
        estimator: TokenEstimator | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(inner)
        self.limiters = limiters
        self._estimator = estimator
        self._clock = clock

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        admission = _Admission(self.limiters)
        try:
            await self._enter(admission, options)
            with admission.entered():
                result = await self.inner.generate(options)
            admission.settle(result.usage)
            return result
        except Exception as error:
            self._note_rejection(admission, error)
            raise
        finally:
            admission.release()

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        # Nothing here runs before the first read, and `entered` never spans a `yield`: the context is the reader's.
        admission = _Admission(self.limiters)
        chunks: AsyncIterator[Chunk] | None = None
        try:
            await self._enter(admission, options)
            with admission.entered():
                chunks = await open_stream(self.inner, options)
            while True:
                with admission.entered():
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                if isinstance(chunk, FinishChunk):
                    admission.settle(chunk.usage)
                yield chunk
        except Exception as error:
            self._note_rejection(admission, error)
            raise
        finally:
            try:
                await close_stream(chunks)
            finally:
                admission.release()

    async def _enter(self, admission: _Admission, options: GenerateOptions) -> None:
        if not admission.limiters:
            return
        tokens = estimate_request_tokens(options, self._estimator) + int(options.get("max_tokens", 0))
        started = self._clock.now()
        await admission.enter(tokens)
        waited_ms = (self._clock.now() - started) * 1000
        if waited_ms >= 1:
            tell((options.notify,), WaitNotice(waited_ms))

    def _note_rejection(self, admission: _Admission, error: Exception) -> None:
        """A 429 in spite of the limiter: its limits are above the provider's, and it may say so."""
        listeners = [note for limiter in admission.limiters if (note := getattr(limiter, "note_rejection", None)) is not None]
        if listeners and classify(error).category == "rate-limit":
            for note in listeners:
                note(self._clock.now(), self.name)


class _Admission:
    """One call's permits. The limiters that the running code has entered already are left out."""

    limiters: tuple[Limiter, ...]
    made: bool

    def __init__(self, limiters: tuple[Limiter, ...]) -> None:
        # A task that outlives the call it was started in is inside of it no more.
        self._outer = tuple(call for call in _calls.get() if call.made)
        passed = [one for call in self._outer for one in call.limiters]
        wanted = [one for one in limiters if not any(one is known for known in passed)]
        # One order for all calls of all processes: two calls that want the same limiters never wait for each other.
        self.limiters = tuple(sorted(wanted, key=lambda one: str(getattr(one, "key", ""))))
        self.made = True
        self._held: list[tuple[Limiter, Permit]] = []

    async def enter(self, tokens: int) -> None:
        try:
            for limiter in self.limiters:
                self._held.append((limiter, await limiter.acquire(tokens)))
        except BaseException:
            self._give_back()
            raise

    @contextmanager
    def entered(self) -> Iterator[None]:
        token = _calls.set((*self._outer, self))
        try:
            yield
        finally:
            _calls.reset(token)

    def settle(self, usage: ProviderUsage | None) -> None:
        if usage is not None:
            for _, permit in self._held:
                permit.settle(usage.total_tokens)

    def release(self) -> None:
        self.made = False
        held, self._held = self._held, []
        for _, permit in held:
            permit.release()

    def _give_back(self) -> None:
        """The call is not made (yet): nothing stays booked for it."""
        held, self._held = self._held, []
        for _, permit in held:
            undo = getattr(permit, "undo", permit.release)
            undo()
