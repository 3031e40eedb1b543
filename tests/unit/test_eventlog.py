"""The log between a run and its one reader."""

from __future__ import annotations

import asyncio

import pytest

from lousho_ray.eventlog import EventLog
from tests.unit.loop_support import until


async def test_a_reader_gets_everything_in_order_in_batches() -> None:
    log: EventLog[int] = EventLog()
    for number in range(5):
        log.append(number)
    assert await log.read(0, most=3) == ([0, 1, 2], 3)
    log.append(5)
    assert await log.read(3) == ([3, 4, 5], 6)
    assert log.next_index == 6
    assert not log.at_end(6)
    log.close()
    assert log.at_end(6)
    assert await log.read(6) == ([], 6)


async def test_a_reader_waits_for_the_first_event() -> None:
    log: EventLog[int] = EventLog()
    reading = asyncio.ensure_future(log.read(0))
    await asyncio.sleep(0)
    assert not reading.done()
    log.append(1)
    assert await reading == ([1], 1)


async def test_a_reader_of_a_log_that_closes_gets_an_empty_batch() -> None:
    log: EventLog[int] = EventLog()
    reading = asyncio.ensure_future(log.read(0))
    await asyncio.sleep(0)
    log.close()
    assert await reading == ([], 0)
    assert log.closed


async def test_a_wait_may_run_out() -> None:
    log: EventLog[int] = EventLog()
    assert await log.read(0, wait_s=0.001) == ([], 0)
    assert not log.at_end(0)
    log.append(1)
    assert await log.read(0, wait_s=0.001) == ([1], 1)


async def test_a_batch_can_be_read_again_until_the_next_is_asked_for() -> None:
    # A reader that lost its connection asks with its old cursor.
    log: EventLog[int] = EventLog()
    for number in range(4):
        log.append(number)
    assert await log.read(0, most=2) == ([0, 1], 2)
    assert await log.read(0, most=2) == ([0, 1], 2)
    assert await log.read(2, most=2) == ([2, 3], 4)


async def test_a_writer_waits_only_for_an_active_reader_that_is_far_behind() -> None:
    # EVT-06
    log: EventLog[int] = EventLog(high_water=3)
    for number in range(10):
        log.append(number)
    await log.drain()  # nobody reads: everything is kept
    batch, cursor = await log.read(0, most=1)
    assert batch == [0]
    writing = asyncio.ensure_future(log.drain())
    await asyncio.sleep(0)
    assert not writing.done()
    while not writing.done():
        batch, cursor = await log.read(cursor, most=1)
        await asyncio.sleep(0)
    assert log.next_index - cursor < 3


@pytest.mark.parametrize("how", ["stop_reading", "close"])
async def test_a_writer_goes_on_when_its_reader_is_gone(how: str) -> None:
    log: EventLog[int] = EventLog(high_water=1)
    log.append(0)
    await log.read(0)
    log.append(1)
    writing = asyncio.ensure_future(log.drain())
    await asyncio.sleep(0)
    assert not writing.done()
    getattr(log, how)()
    await until(writing.done, rounds=5)


async def test_a_cancelled_reader_does_not_lose_events() -> None:
    log: EventLog[int] = EventLog()
    reading = asyncio.ensure_future(log.read(0))
    await asyncio.sleep(0)
    reading.cancel()
    log.append(1)
    assert await log.read(0) == ([1], 1)


async def test_a_cancelled_writer_does_not_hold_up_others() -> None:
    log: EventLog[int] = EventLog(high_water=1)
    log.append(0)
    await log.read(0)
    log.append(1)
    first, second = asyncio.ensure_future(log.drain()), asyncio.ensure_future(log.drain())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    reading = asyncio.ensure_future(log.read(2))
    await second
    log.close()
    assert await reading == ([], 2)


async def test_a_writer_does_not_wait_for_a_reader_that_does_not_come_back() -> None:
    # EVT-06: the reader may be waiting for something that only the run can bring about
    log: EventLog[int] = EventLog(high_water=1, patience_s=0.001)
    log.append(0)
    _, cursor = await log.read(0)
    for number in range(1, 1_000):
        log.append(number)
        await log.drain()
    assert await log.read(cursor, most=10_000) == (list(range(1, 1_000)), 1_000)


async def test_memory_is_freed_as_the_reader_goes_on() -> None:
    log: EventLog[int] = EventLog()
    for number in range(1_000):
        log.append(number)
    cursor = 0
    for _ in range(10):
        _, cursor = await log.read(cursor, most=100)
    assert len(log._items) <= 100
