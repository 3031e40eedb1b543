"""How often Python looks for garbage while runs are in progress."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from lousho_ray import create_agent
from lousho_ray.garbage import OBJECTS_PER_RUN, RunsInProgress
from lousho_ray.testing import mock_model


@pytest.fixture(autouse=True)
def _own_setting() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


async def test_with_many_runs_python_looks_for_garbage_more_rarely_until_they_have_ended() -> None:
    all_in, go, seen = asyncio.Semaphore(0), asyncio.Event(), list[int]()

    async def reply(asked: object) -> str:
        all_in.release()
        await go.wait()
        seen.append(gc.get_threshold()[0])
        return "Hi"

    agent = create_agent(provider=mock_model([reply] * 20), runtime="local")
    runs = [asyncio.ensure_future(agent.send("Hello")) for _ in range(20)]
    for _ in runs:
        await all_in.acquire()
    go.set()
    await asyncio.gather(*runs)
    await agent.close()
    assert max(seen) == 20 * OBJECTS_PER_RUN
    assert gc.get_threshold() == (700, 10, 10)


def test_a_rarer_setting_of_the_process_stays() -> None:
    gc.set_threshold(50_000, 5, 5)
    with RunsInProgress():
        assert gc.get_threshold() == (50_000, 5, 5)
    assert gc.get_threshold() == (50_000, 5, 5)


def test_a_process_that_never_looks_goes_on_so() -> None:
    gc.set_threshold(0)
    with RunsInProgress():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


def test_a_setting_that_is_changed_meanwhile_is_the_processs_own() -> None:
    runs = RunsInProgress()
    with runs, runs, runs:
        gc.set_threshold(900, 7, 7)
        with runs:
            assert gc.get_threshold() == (4 * OBJECTS_PER_RUN, 7, 7)
    assert gc.get_threshold() == (900, 7, 7)


def test_what_counts_besides_the_runs_ends_with_its_block_and_not_with_theirs() -> None:
    runs = RunsInProgress()
    with runs:
        with runs.besides(100):
            assert gc.get_threshold() == (101 * OBJECTS_PER_RUN, 10, 10)
        with runs:
            assert gc.get_threshold() == (2 * OBJECTS_PER_RUN, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)
