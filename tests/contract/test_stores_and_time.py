"""Clocks that jump, storms of refusals, and very large messages: what stores keep all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import StorageError
from lousho_ray.messages import user
from lousho_ray.stores.files import file_store
from lousho_ray.stores.memory import memory_store
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.store_rules import checkpoint
from tests.contract.s3_server import S3Server, store_of

HOUR_MS, TTL_MS = 3_600_000.0, 30_000.0


@pytest.fixture(params=["memory", "sqlite", "s3"])
async def leased(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Any, FakeClock]]:
    clock = FakeClock()
    async with AsyncExitStack() as stack:
        match request.param:
            case "memory":
                store: Any = memory_store(clock=clock)
            case "sqlite":
                store = await stack.enter_async_context(SqliteStore(tmp_path / "a.db", clock=clock))
            case _:
                server = stack.enter_context(S3Server())
                store = await stack.enter_async_context(store_of(server, clock=clock))
        yield store, clock


async def test_a_clock_that_steps_back_takes_no_lease_away_and_a_released_one_is_free(leased: tuple[Any, FakeClock]) -> None:
    # LES-62: whoever holds it goes on, by its number
    store, clock = leased
    fence = await store.sessions.claim("s", "one", TTL_MS)
    clock._wall_offset -= HOUR_MS / 1000
    assert await store.sessions.claim("s", "two", TTL_MS) is None
    assert await store.sessions.renew("s", "one", fence, TTL_MS)
    await store.sessions.save("s", [user("kept")], fence=fence)
    await store.sessions.release("s", "one", fence)
    later = await store.sessions.claim("s", "two", TTL_MS)
    assert later > fence
    with pytest.raises(StorageError):
        await store.sessions.save("s", [user("late")], fence=fence)


async def test_a_clock_that_jumps_a_day_ahead_lets_one_other_in_and_keeps_the_old_one_out(leased: tuple[Any, FakeClock]) -> None:
    # LES-62
    store, clock = leased
    fence = await store.sessions.claim("s", "one", TTL_MS)
    clock.advance(24 * HOUR_MS)
    later = await store.sessions.claim("s", "two", TTL_MS)
    assert later > fence
    assert not await store.sessions.renew("s", "one", fence, TTL_MS)
    with pytest.raises(StorageError):
        await store.sessions.save("s", [user("late")], fence=fence)
    await store.sessions.save("s", [user("kept")], fence=later)
    assert [message.text for message in await store.sessions.load("s")] == ["kept"]


@pytest.mark.parametrize("action", ["slow-down", "conflict", "drop-after"])
async def test_a_storm_of_refusals_passes_and_what_was_told_is_true(action: Any) -> None:
    # D06, DUR-D6: S3 asks to slow down, has conflicts of one moment, or does what it was asked and does not say so
    with S3Server() as server:
        async with store_of(server) as store:
            await store.sessions.save("s", [user("0")])
            told = 0
            with server.fault("PUT", "", action, times=25):
                for number in range(1, 9):
                    with suppress(StorageError):
                        await store.sessions.save("s", [user(str(number))])
                        told = number
                    with suppress(StorageError):
                        await store.checkpoints.save(checkpoint("r", number, revision=number))
            found = [message.text for message in await store.sessions.load("s") or []]
            assert len(found) == 1
            assert int(found[0]) >= told  # one that was not told of may have landed; none before it has come back
            await store.sessions.save("s", [user("after")])
            await store.checkpoints.save(checkpoint("r", 9, revision=9))
            assert [message.text for message in await store.sessions.load("s") or []] == ["after"]
            assert (await store.checkpoints.load("r") or {})["revision"] == 9


@pytest.mark.parametrize("kind", ["memory", "files", "sqlite", "s3"])
async def test_a_message_of_many_megabytes_comes_back_whole(kind: str, tmp_path: Path) -> None:
    # STO-D7: no limit of size
    text = "\N{SNOWMAN}x" * 4_000_000
    async with AsyncExitStack() as stack:
        stores: dict[str, Any] = {"memory": memory_store, "files": lambda: file_store(tmp_path / "f", fsync=False)}
        stores["sqlite"] = lambda: SqliteStore(tmp_path / "a.db")
        stores["s3"] = lambda: store_of(stack.enter_context(S3Server()))
        store = await stack.enter_async_context(stores[kind]())
        await store.sessions.save("s", [user(text)])
        assert (await store.sessions.load("s"))[0].text == text
        await store.checkpoints.save({**checkpoint("r"), "messages": [user(text).to_dict()]})
        assert (await store.checkpoints.load("r"))["messages"][0]["content"] == text
