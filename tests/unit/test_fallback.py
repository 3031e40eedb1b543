"""with_fallback: which provider answers, and how a switch is told."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import cloudpickle
import pytest

from lousho_ray.cancellation import Aborted, AbortReason
from lousho_ray.errors import CassetteError, CompactedLLMProviderError, ConfigurationError, TestFailedError
from lousho_ray.messages import ReasoningBlock, user
from lousho_ray.ports import (
    Chunk,
    FallbackNotice,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    RetryNotice,
    ServedBy,
    TextChunk,
)
from lousho_ray.providers.fallback import with_fallback
from lousho_ray.providers.mock import MockProvider
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import MockModel, mock_model

REQUEST = GenerateOptions(messages=[user("hi")])


class HTTPError(Exception):
    def __init__(self, status: int, message: str = "down") -> None:
        super().__init__(message)
        self.status_code = status
        self.body = {"error": {"message": message}}


def model(name: str, *turns: Any, forever: bool = False) -> MockModel:
    return mock_model(turns, "repeat-last" if forever else "throw", name=name, default_model=f"{name}-1")


class Chunks:
    """Streams the given steps once."""

    def __init__(self, name: str, *steps: Chunk | Exception) -> None:
        self.name, self.default_model = name, f"{name}-1"
        self.steps = steps
        self.closed = 0

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        raise NotImplementedError

    async def stream(self, options: GenerateOptions, /) -> AsyncIterator[Chunk]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed += 1


async def read(provider: Any, options: GenerateOptions = REQUEST) -> list[Chunk]:
    return [chunk async for chunk in provider.stream(options)]


async def test_the_first_provider_that_answers_serves_the_call() -> None:
    # PRV-68, PRV-69b
    told: list[Any] = []
    called: list[FallbackNotice] = []
    first, second, third = model("a", HTTPError(500)), model("b", "from b"), model("c", "from c")
    provider = with_fallback([first, second, third], on_fallback=called.append)
    result = await provider.generate(GenerateOptions(messages=[user("hi")], notify=told.append))
    assert result.text == "from b"
    assert result.served_by == ServedBy("b", "b-1")
    assert told == called == [FallbackNotice("a", "b", "a-1", "b-1", "down")]
    assert third.calls == []


@pytest.mark.parametrize("error", [HTTPError(401), HTTPError(400), HTTPError(404), TypeError("bug"), ConfigurationError("x")])
async def test_any_failure_moves_on(error: Exception) -> None:
    # PRV-68
    assert (await with_fallback([model("a", error), model("b", "ok")]).generate(REQUEST)).text == "ok"


@pytest.mark.parametrize("error", [CassetteError("no match"), TestFailedError("over"), Aborted(AbortReason("AbortError", "stop"))])
async def test_what_is_no_failure_of_a_provider_does_not_move_on(error: Exception) -> None:
    # PRV-68, ERR-27, MOCK-11
    second = model("b", "ok")
    with pytest.raises(type(error)) as caught:
        await with_fallback([model("a", error), second], fallback_on=lambda error: True).generate(REQUEST)
    assert caught.value is error
    assert second.calls == []


async def test_a_cancelled_call_does_not_move_on() -> None:
    # PRV-68, ERR-19
    clock = FakeClock()
    slow = mock_model([{"delay_ms": 60_000}], clock=clock)
    second = model("b", "ok")
    task = asyncio.create_task(with_fallback([slow, second]).generate(REQUEST))
    await clock.run_for(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert second.calls == []


async def test_when_all_fail_the_last_error_is_raised_with_notes_on_the_earlier_ones() -> None:
    # PRV-68, ERR-25
    last = HTTPError(503, "c is down")
    provider = with_fallback([model("a", HTTPError(401, "bad key")), model("b", HTTPError(500, "b is down")), model("c", last)])
    with pytest.raises(CompactedLLMProviderError) as caught:
        await provider.generate(REQUEST)
    assert caught.value.__cause__ is last
    assert caught.value.compacted.provider == "c"
    assert caught.value.compacted.model == "c-1"
    assert caught.value.__notes__ == ["a failed first: bad key", "b failed first: b is down"]


async def test_fallback_on_decides_in_place_of_any_failure() -> None:
    # PRV-68
    second = model("b", "ok")
    provider = with_fallback([model("a", HTTPError(400), HTTPError(500)), second], fallback_on=lambda e: "500" in repr(e.__dict__))
    with pytest.raises(CompactedLLMProviderError):
        await provider.generate(REQUEST)
    assert second.calls == []
    assert (await provider.generate(REQUEST)).text == "ok"


async def test_each_call_starts_at_the_first_and_keeps_its_own_state() -> None:
    # PRV-68
    first = mock_model([HTTPError(500), "first", HTTPError(500), "first"], name="a")
    provider = with_fallback([first, model("b", "second", forever=True)])
    results = await asyncio.gather(*(provider.generate(REQUEST) for _ in range(4)))
    assert [result.text for result in results] == ["second", "first", "second", "first"]


async def test_the_calls_model_goes_to_the_first_provider_only() -> None:
    # PRV-69, PRV-69b
    told: list[Any] = []
    first, second = model("a", HTTPError(500)), model("b", "ok")
    options = GenerateOptions(messages=[user("hi")], model="special", notify=told.append)
    result = await with_fallback([first, second]).generate(options)
    assert [call.model for call in first.calls] == ["special"]
    assert [call.model for call in second.calls] == [None]
    assert result.served_by == ServedBy("b", "b-1")
    assert (told[0].from_model, told[0].to_model) == ("special", "b-1")


async def test_retries_are_used_up_before_the_switch_and_attempts_are_counted_exactly() -> None:
    # CA-19: three tries on each of two models
    told: list[Any] = []
    first, second = model("a", HTTPError(500), forever=True), model("b", HTTPError(429), forever=True)
    wrapped = [with_retry(one, max_retries=2, backoff={"initial_ms": 0}) for one in (first, second)]
    with pytest.raises(CompactedLLMProviderError):
        await with_fallback(wrapped).generate(GenerateOptions(messages=[user("hi")], notify=told.append))
    assert (len(first.calls), len(second.calls)) == (3, 3)
    assert [type(notice) for notice in told] == [RetryNotice, RetryNotice, FallbackNotice, RetryNotice, RetryNotice]
    assert [notice.provider for notice in told if isinstance(notice, RetryNotice)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("before", [[], [TextChunk("")]], ids=["nothing", "empty text"])
async def test_a_stream_moves_on_before_output(before: list[Chunk]) -> None:
    # PRV-68, PRV-69b
    told: list[Any] = []
    first, second = Chunks("a", *before, HTTPError(500)), Chunks("b", TextChunk("ok"), FinishChunk("stop"))
    chunks = await read(with_fallback([first, second]), GenerateOptions(messages=[user("hi")], notify=told.append))
    assert chunks == [*before, TextChunk("ok"), FinishChunk("stop", served_by=ServedBy("b", "b-1"))]
    assert [notice.to_provider for notice in told] == ["b"]
    assert (first.closed, second.closed) == (1, 1)


async def test_a_stream_does_not_move_on_after_output() -> None:
    # PRV-68, L05
    second = Chunks("b", TextChunk("twice"), FinishChunk("stop"))
    with pytest.raises(CompactedLLMProviderError) as caught:
        await read(with_fallback([Chunks("a", TextChunk("Hel"), HTTPError(500)), second]))
    assert caught.value.compacted.provider == "a"
    assert second.closed == 0


async def test_a_stream_that_is_cut_before_output_moves_on() -> None:
    assert (await read(with_fallback([Chunks("a"), Chunks("b", TextChunk("ok"), FinishChunk("stop"))])))[0] == TextChunk("ok")


async def test_a_stream_may_fall_back_to_a_provider_that_cannot_stream() -> None:
    # PRV-02
    class Whole:
        name, default_model = "whole", "w"

        async def generate(self, options: GenerateOptions, /) -> GenerateResult:
            return GenerateResult("whole reply", reasoning=(ReasoningBlock("hm"),))

    chunks = await read(with_fallback([Chunks("a", HTTPError(500)), Whole()]))
    assert chunks[-2:] == [TextChunk("whole reply"), FinishChunk("stop", served_by=ServedBy("whole", "w"))]


async def test_who_served_inside_is_kept() -> None:
    # PRV-69b
    inner = with_fallback([model("a", HTTPError(500)), model("b", "ok")])
    assert (await with_fallback([inner, model("c", "no")]).generate(REQUEST)).served_by == ServedBy("b", "b-1")


async def test_name_model_and_members_are_the_first_providers() -> None:
    # PRV-69, PRV-70
    closed: list[str] = []

    class Closing(MockProvider):
        async def aclose(self) -> None:
            closed.append("closed")

    provider = with_fallback([model("a"), model("b"), Closing(), Closing()])
    assert (provider.name, provider.default_model) == ("a", "a-1")
    assert provider.supports_hosted_tool("web_search")
    await provider.aclose()
    assert closed == ["closed", "closed"]


@pytest.mark.parametrize("providers", [[], "openai/gpt-4o-mini", None, ["openai/gpt-4o-mini"], [MockProvider(), None]])
def test_wrong_providers_are_refused(providers: Any) -> None:
    # PRV-68
    with pytest.raises(ConfigurationError) as caught:
        with_fallback(providers)
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"
    assert str(caught.value.field).startswith("providers")


def test_a_fallback_wrapper_pickles_with_its_callbacks() -> None:
    provider = with_fallback([MockProvider(["a"]), with_retry(MockProvider(["b"]))], fallback_on=lambda error: False)
    copy = pickle.loads(cloudpickle.dumps(provider))
    assert len(copy.providers) == 2
    assert copy.name == "mock"
