"""Stores behind their actor keep the rules too. The actor runs in this process; what goes to it and back is pickled as ever."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lousho_ray.actors.calling import ActorCaller
from lousho_ray.actors.store import RemoteStore, StoreActor, StoreReference, offered
from lousho_ray.durable import Sources, StoreParts
from lousho_ray.errors import StorageError
from lousho_ray.messages import Message, user
from lousho_ray.stores.durable_turns import turns_of
from lousho_ray.stores.files import file_store
from lousho_ray.stores.location import StoreLocation
from lousho_ray.stores.memory import InMemoryApprovalStore, MemorySessionStore, memory_store
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.store_contract import StoreCheck, store_checks
from tests.contract.test_stores import BACKENDS


def behind_actor(store: Any) -> RemoteStore:
    actor = StoreActor(StoreLocation("memory", ""), alone=False)
    actor._store = store
    remote = RemoteStore(StoreReference("test", b"", offered(store)))
    remote._call = ActorCaller(lambda: SimpleNamespace(calls=SimpleNamespace(remote=actor.calls)), "store")
    return remote


# STO-10, STO-41, STO-44
@pytest.mark.parametrize(
    ("backend", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check}")
        for name in ("memory", "sqlite")
        for check in store_checks(without=BACKENDS[name][1] | {"prune"})
    ],
)
async def test_store_behind_its_actor_keeps_the_rule(backend: str, check: StoreCheck, tmp_path: Path) -> None:
    clock = FakeClock()
    async with BACKENDS[backend][0](tmp_path, clock) as store:
        await check(behind_actor(store), clock)


def parts_of(store: Any) -> StoreParts:
    return Sources(store, store, store).parts(InMemoryApprovalStore())


class _OnlySessions:
    """A user's store without any optional method."""

    def __init__(self) -> None:
        self.inner = MemorySessionStore()

    async def load(self, id: str) -> list[Message] | None:
        return await self.inner.load(id)

    async def save(self, id: str, messages: list[Message]) -> None:
        await self.inner.save(id, messages)

    async def delete(self, id: str) -> None:
        await self.inner.delete(id)


class _TwoParts:
    approvals = None

    def __init__(self) -> None:
        self.sessions = _OnlySessions()
        self.checkpoints = memory_store().checkpoints


async def test_a_remote_store_has_what_the_store_has(tmp_path: Path) -> None:  # STO-01, STO-11, STO-42
    part = behind_actor(_OnlySessions())
    assert part.sessions is not None
    assert hasattr(part.sessions, "load")
    assert not hasattr(part.sessions, "claim")
    assert (part.checkpoints, part.approvals, part.turns) == (None, None, None)
    two = behind_actor(_TwoParts())
    parts = parts_of(two)
    assert isinstance(parts.approvals, InMemoryApprovalStore)
    assert parts.turns is None
    assert hasattr(two.checkpoints, "delete_prefix")
    files = behind_actor(file_store(tmp_path))
    assert [hasattr(files.sessions, name) for name in ("list", "claim", "renew")] == [True, False, False]
    async with SqliteStore(tmp_path / "a.db") as store:
        whole = behind_actor(store)
        assert parts_of(whole).turns is whole.turns is not None


async def test_turns_of_a_store_whose_part_was_wrapped_are_left_alone(tmp_path: Path) -> None:  # STO-D9
    async with SqliteStore(tmp_path / "a.db") as store:
        assert turns_of(store) is store.turns
        store.sessions = _OnlySessions()  # type: ignore[assignment]
        assert turns_of(store) is None
        assert not any(method.startswith("turns.") for method in offered(store))


class _Odd(_OnlySessions):
    """A store whose errors and records cannot be sent."""

    async def load(self, id: str) -> Any:
        if id == "error":
            error = RuntimeError("out of order")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error
        return threading.Lock() if id == "value" else await super().load(id)


async def test_what_cannot_be_sent_fails_its_own_call_only() -> None:
    remote = behind_actor(_Odd())
    assert remote.sessions is not None
    await remote.sessions.save("good", [user("x")])
    calls = [remote.sessions.load(name) for name in ("good", "error", "value", "good")]
    calls.append(remote.sessions.save("bad", threading.Lock()))
    first, error, value, last, argument = await asyncio.gather(*calls, return_exceptions=True)
    assert first == last == [user("x")]
    assert "RuntimeError: out of order" in str(error)
    assert isinstance(value, StorageError)
    assert isinstance(argument, StorageError)
    assert "sessions.save" in str(argument)
