"""Stores behind their actors: one for each file, started again when it is killed, reached from every process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray

from lousho_ray import MockProvider, SqliteStore, StorageError, create_agent
from lousho_ray.actors.cluster import NAMESPACE
from lousho_ray.actors.store import RemoteStore, StoreReference
from lousho_ray.messages import user
from tests.ray.processes import kill_process, pid_of

pytestmark = pytest.mark.usefixtures("ray_cluster")


def parrot(request: Any) -> str:
    return f"heard {request.messages[-1].text}"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(tmp_path / "s.db") as store:
        yield store


@pytest.fixture
def remote(store: SqliteStore) -> RemoteStore:
    return StoreReference.of_location(store.location).connect()


def actor_of(remote: RemoteStore) -> Any:
    return ray.get_actor(remote.reference.name, NAMESPACE)


async def test_a_killed_store_actor_is_started_again_and_the_next_call_works(store: SqliteStore, remote: RemoteStore) -> None:
    # STO-41, STO-45
    session = create_agent(provider=MockProvider(policy=parrot), store=store, runtime="ray").session("talk")
    await session.send("one")
    killed = await kill_process(actor_of(remote))
    began = time.monotonic()
    assert (await session.send("two")).text == "heard two"
    assert time.monotonic() - began < 15
    assert [message.text for message in await session.load()] == ["one", "heard one", "two", "heard two"]
    assert await pid_of(actor_of(remote)) != killed


async def test_saves_under_way_when_the_actor_is_killed_are_all_kept(store: SqliteStore, remote: RemoteStore) -> None:
    # STO-44: a save is repeated, and repeating it changes nothing
    saves = [asyncio.create_task(remote.sessions.save(f"s{number}", [user(f"m{number}")])) for number in range(200)]
    await saves[0]
    await kill_process(actor_of(remote))
    await asyncio.gather(*saves)
    loaded = await asyncio.gather(*[store.sessions.load(f"s{number}") for number in range(200)])
    assert [messages[0].text for messages in loaded if messages] == [f"m{number}" for number in range(200)]


async def test_an_actor_that_was_removed_is_made_again(store: SqliteStore, remote: RemoteStore) -> None:
    # STO-45
    await remote.sessions.save("s", [user("kept")])
    ray.kill(actor_of(remote))
    loaded = await remote.sessions.load("s")
    assert loaded is not None
    assert loaded[0].text == "kept"


async def test_a_refused_save_is_the_same_error_and_leaves_its_batch_alone(remote: RemoteStore) -> None:
    # STO-D8, ERR-08
    fence = await remote.sessions.claim("held", "somebody", 10_000)
    assert fence is not None
    outcomes = await asyncio.gather(
        remote.sessions.save("held", [user("no")]),
        remote.sessions.save("free", [user("yes")]),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], StorageError)
    assert outcomes[0].code == "LOUSHO_STORAGE_FAILED"
    assert outcomes[1] is None
    with pytest.raises(AttributeError):
        _ = remote.sessions.drop_all


async def test_many_saves_share_their_commits(remote: RemoteStore) -> None:
    # Group commit reaches over processes: one save at a time would take a disk flush each.
    await remote.sessions.save("warm", [user("up")])
    began = time.monotonic()
    await asyncio.gather(*[remote.sessions.save(f"s{number}", [user("hello")]) for number in range(1_000)])
    assert time.monotonic() - began < 10
