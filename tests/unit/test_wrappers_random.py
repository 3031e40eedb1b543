"""Retries and fallbacks over random streams: what a consumer sees, and what was asked of the providers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lousho_ray.errors import CompactedLLMProviderError
from lousho_ray.limits.limiter import create_rate_limiter
from lousho_ray.messages import user
from lousho_ray.ports import (
    Chunk,
    FallbackNotice,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    ReasoningChunk,
    RetryNotice,
    TextChunk,
)
from lousho_ray.providers.fallback import with_fallback
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.retry import with_retry

Attempt = list[str]


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status_code = status


class Random:
    """Streams one attempt a call: `t` text, `e` empty text, `r` reasoning, `x` a passing failure, `z` one that stays, then the
    finish; without a letter that ends it, `/` cuts the stream off."""

    default_model = "m"

    def __init__(self, name: str, attempts: list[Attempt]) -> None:
        self.name = name
        self.attempts = attempts
        self.calls = self.open = 0

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        raise NotImplementedError

    async def stream(self, options: GenerateOptions, /) -> AsyncIterator[Chunk]:
        number = self.calls
        self.calls += 1
        self.open += 1
        try:
            for letter in self.attempts[number % len(self.attempts)]:
                if letter == "x":
                    raise StatusError(503)
                if letter == "z":
                    raise StatusError(400)
                if letter == "/":
                    return
                text = "" if letter == "e" else f"{self.name}{number} "
                yield ReasoningChunk(text) if letter == "r" else TextChunk(text)
            yield FinishChunk("stop")
        finally:
            self.open -= 1


attempts = st.lists(st.lists(st.sampled_from("terxz/"), max_size=4), min_size=1, max_size=4)


def expected(attempts: list[Attempt], max_retries: int) -> tuple[int, str, bool]:
    """How many calls one provider gets, the kind of end (`ok`, `failed`), and whether text was out at the end."""
    for number in range(max_retries + 1):
        letters = attempts[number % len(attempts)]
        end = next((index for index, letter in enumerate(letters) if letter in "xz/"), None)
        if end is None:
            return number + 1, "ok", True
        output = "t" in letters[:end]
        if output or letters[end] == "z":
            return number + 1, "failed", output
    return max_retries + 1, "failed", False


@settings(max_examples=150, deadline=None)
@given(first=attempts, second=attempts, max_retries=st.integers(0, 3))
def test_attempts_are_counted_exactly_and_no_output_is_seen_twice(
    first: list[Attempt], second: list[Attempt], max_retries: int
) -> None:
    # PRV-12, PRV-66, PRV-68, L05
    providers = [Random("a", first), Random("b", second)]
    told: list[Any] = []
    seen: list[Chunk] = []

    async def call() -> str:
        limiter = create_rate_limiter({"max_concurrent": 1})
        chain = with_fallback([with_retry(one, max_retries=max_retries, backoff={"initial_ms": 0}) for one in providers])
        options = GenerateOptions(messages=[user("hi")], notify=told.append)
        end = "ok"
        try:
            async for chunk in with_rate_limit(chain, limiter).stream(options):
                seen.append(chunk)  # noqa: PERF401 - kept when an error follows
        except CompactedLLMProviderError:
            end = "failed"
        assert (await limiter.stats()).running == 0
        return end

    end = asyncio.run(call())
    calls, outcome, output = expected(first, max_retries)
    wanted = [calls, 0]
    if outcome == "failed" and not output:
        wanted[1], outcome, output = expected(second, max_retries)
    assert [provider.calls for provider in providers] == wanted
    assert end == outcome
    assert [provider.open for provider in providers] == [0, 0]
    assert sum(isinstance(notice, RetryNotice) for notice in told) == sum(wanted) - sum(count > 0 for count in wanted)
    assert sum(isinstance(notice, FallbackNotice) for notice in told) == (wanted[1] > 0)
    texts = {chunk.text for chunk in seen if isinstance(chunk, TextChunk) and chunk.text}
    assert len(texts) <= 1
    assert [isinstance(chunk, FinishChunk) for chunk in seen].count(True) == (end == "ok")
    assert end == "failed" or isinstance(seen[-1], FinishChunk)
