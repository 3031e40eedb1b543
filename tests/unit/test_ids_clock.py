"""Ids, the system clock, timestamps and the fake clock."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.clock import SYSTEM_CLOCK, Clock, timestamp
from lousho_ray.errors import ConfigurationError
from lousho_ray.ids import check_run_id, check_session_id, new_id, new_session_id
from lousho_ray.testing.clock import FakeClock


def test_new_ids_are_distinct_url_safe_and_valid_session_ids() -> None:
    ids = {new_id("run_") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"run_[0-9a-f]{32}", new) and check_session_id(new) == new for new in ids)


def test_a_session_nobody_named_gets_a_uuid() -> None:
    # SES-02
    new = new_session_id()
    assert str(uuid.UUID(new)) == new == check_session_id(new)


@pytest.mark.parametrize("id", ["a", "A-b_9", "-", "x" * 128])
def test_allowed_session_ids(id: str) -> None:
    # SES-02
    assert check_session_id(id) == id


@pytest.mark.parametrize("id", ["", "../x", "a/b", "a.b", "x" * 129, "é", "a b", "a\n", None, 7, b"a"])
def test_other_session_ids_are_refused_with_what_is_allowed(id: object) -> None:
    # SES-02, CA-36
    with pytest.raises(ConfigurationError, match="1 to 128 characters") as caught:
        check_session_id(id, "id")
    assert (caught.value.code, caught.value.field) == ("LOUSHO_SESSION_ID_INVALID", "id")
    assert len(caught.value.detail) < 220


@pytest.mark.parametrize("id", ["trip.fork-1", "a", "-.-", "x" * 160])
def test_run_ids_may_have_dots_inside(id: str) -> None:
    # DUR-D1
    assert check_run_id(id) == id


@pytest.mark.parametrize("id", ["", ".", "..", ".x", "a/b", "x" * 161, "a\n", None, 7])
def test_other_run_ids_are_refused(id: object) -> None:
    # DUR-D1
    with pytest.raises(ConfigurationError, match="1 to 160 characters") as caught:
        check_run_id(id)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_SESSION_ID_INVALID", "session_id")


def test_timestamps_are_iso_8601_in_utc_with_milliseconds() -> None:
    # EVT-14
    assert timestamp(1_767_225_600) == "2026-01-01T00:00:00.000Z"
    assert timestamp(1_767_225_600.123) == "2026-01-01T00:00:00.123Z"
    assert timestamp(1_767_225_600.9996) == "2026-01-01T00:00:01.000Z"
    assert timestamp(0) == "1970-01-01T00:00:00.000Z"


@given(st.lists(st.integers(0, 4_000_000_000_000), min_size=1, max_size=5))
def test_timestamps_read_back_to_the_same_millisecond_whatever_was_asked_before(moments_ms: list[int]) -> None:
    for moment_ms in moments_ms:
        read = datetime.strptime(timestamp(moment_ms / 1000), "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
        assert round(read.timestamp() * 1000) == moment_ms


@given(st.floats(1_700_000_000, 1_800_000_000), st.floats(0, 10))
def test_timestamps_never_go_back_with_time(moment: float, later: float) -> None:
    # EVT-D10
    assert timestamp(moment) <= timestamp(moment + later)


async def test_the_system_clock_is_the_machines() -> None:
    before = time.monotonic()
    assert before <= SYSTEM_CLOCK.now() <= time.monotonic()
    assert abs(SYSTEM_CLOCK.wall() - time.time()) < 5
    fired = asyncio.Event()
    SYSTEM_CLOCK.call_later(0, fired.set)
    cancelled = SYSTEM_CLOCK.call_later(0, pytest.fail)
    cancelled.cancel()
    await fired.wait()
    await SYSTEM_CLOCK.sleep(0)


async def test_the_fake_clock_stands_still_until_it_is_moved() -> None:
    clock: Clock = FakeClock()
    start = clock.now()
    await clock.sleep(0)
    assert clock.now() == start
    assert timestamp(clock.wall()) == "2026-01-01T00:00:00.000Z"


def test_timers_fire_in_order_at_their_own_moment() -> None:
    clock, seen = FakeClock(), list[tuple[str, float]]()
    clock.call_later(2, lambda: seen.append(("b", clock.now())))
    clock.call_later(1, lambda: seen.append(("a", clock.now())))
    clock.call_later(2, lambda: seen.append(("c", clock.now())))
    late = clock.call_later(3, lambda: seen.append(("never", clock.now())))
    clock.call_later(9, lambda: seen.append(("not yet", clock.now())))
    late.cancel()
    clock.advance(4000)
    assert seen == [("a", 1), ("b", 2), ("c", 2)]
    assert (clock.now(), clock.waiting) == (4, 1)
    assert timestamp(clock.wall()) == "2026-01-01T00:00:04.000Z"


def test_a_timer_set_by_a_timer_fires_in_the_same_advance() -> None:
    clock, seen = FakeClock(), list[float]()
    clock.call_later(1, lambda: clock.call_later(1, lambda: seen.append(clock.now())))
    clock.advance(5000)
    assert seen == [2]


async def test_run_for_walks_a_task_through_a_chain_of_sleeps() -> None:
    clock, seen = FakeClock(), list[float]()

    async def tick() -> None:
        while True:
            await clock.sleep(1)
            seen.append(clock.now())

    task = asyncio.create_task(tick())
    await clock.run_for(3500)
    assert (seen, clock.now()) == ([1, 2, 3], 3.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.waiting == 0
    clock.advance(10_000)
    assert seen == [1, 2, 3]
