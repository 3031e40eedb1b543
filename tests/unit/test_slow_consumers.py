"""Back pressure: a run waits for a consumer that falls behind, so that what is kept of it stays bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.eventlog import HIGH_WATER
from lousho_ray.handle import BATCH
from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, GenerateResult, TextChunk
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import agent_of, calls

MANY = 3 * HIGH_WATER


class Talkative:
    """Streams a great many chunks and counts how many it has given out."""

    name = "talkative"
    default_model: str | None = "talkative-1"
    given = 0

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        raise NotImplementedError

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        for _ in range(MANY):
            self.given += 1
            yield TextChunk("x")
        yield FinishChunk("stop")


async def idle(rounds: int = 50) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)


@pytest.mark.parametrize("where", ["agent", "session"])
async def test_a_run_waits_for_a_slow_consumer_and_keeps_little(where: str) -> None:
    # EVT-06 as it is built
    provider = Talkative()
    agent: Any = create_agent(provider=provider)
    run = (agent if where == "agent" else agent.session()).stream("Go")
    read, furthest = 0, 0
    async for event in run:
        if event.type == "text.delta":
            read += 1
        if read % 500 == 0:
            await idle()
            furthest = max(furthest, provider.given - read)
    assert read == MANY
    assert furthest <= HIGH_WATER + BATCH + 1
    assert len((await run.result).text) == MANY


async def test_a_tool_that_streams_waits_for_a_slow_consumer() -> None:
    # EVT-06 as it is built, RUN-36
    given = 0

    async def stream(args: Any) -> AsyncGenerator[int, None]:
        nonlocal given
        for number in range(MANY):
            given += 1
            yield number

    run = agent_of(calls("count"), "Done", tools=[define_tool(name="count", description="Counts.", execute=stream)]).stream("Go")
    read, furthest = 0, 0
    async for event in run:
        if event.type == "tool.partial":
            read += 1
            if read % 500 == 0:
                await idle()
                furthest = max(furthest, given - read)
    assert read == MANY
    assert furthest <= HIGH_WATER + BATCH + 1


async def test_listeners_do_not_hold_up_each_other_or_the_run() -> None:
    # EVT-11: several listeners and a consumer that never reads
    provider, first, second = Talkative(), [0], [0]

    def count(heard: list[int]) -> Any:
        def listen(event: Any) -> None:
            heard[0] += 1

        return listen

    session = create_agent(provider=provider, on_event=count(first)).session()
    session.on(count(second))
    run = session.stream("Go")
    assert len((await run.result).text) == MANY
    events = [event async for event in run]
    assert first == second == [len(events)]


async def test_a_consumer_that_awaits_the_result_inside_its_loop_gets_it() -> None:
    # EVT-06 as it is built: it must not wait for itself
    run = create_agent(provider=Talkative()).stream("Go")
    async for event in run:
        if event.type == "text.delta":
            result = await run.result
            break
    assert result.finish_reason == "stop"
