"""Locations, leases, remembered records, memory stores."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError, StorageError
from lousho_ray.messages import user
from lousho_ray.stores import sqlite_sessions
from lousho_ray.stores.entries import base_session
from lousho_ray.stores.json_form import dumps, loads
from lousho_ray.stores.lease import Lease, after_delete, after_save, claimed, renewed
from lousho_ray.stores.location import StoreLocation, parse_location
from lousho_ray.stores.memory import InMemoryApprovalStore, MemorySessionStore, MemoryStore, memory_store
from lousho_ray.stores.parts import check_store
from lousho_ray.stores.remembered import Remembered
from lousho_ray.stores.sqlite import SqliteStore

# ----------------------------------------------------------------------------------------------------------------- locations


def test_urls_name_files_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # STO-43
    monkeypatch.chdir(tmp_path)
    assert parse_location("sqlite:///data/agents.db") == StoreLocation("sqlite", str(tmp_path / "data" / "agents.db"))
    assert parse_location("sqlite:////var/lib/my%20agents.db", history_limit=3) == StoreLocation(
        "sqlite", "/var/lib/my agents.db", 3
    )
    assert parse_location("memory://") == StoreLocation("memory", "")
    assert parse_location("memory://evals") == StoreLocation("memory", "evals")


@pytest.mark.parametrize("path", ["/a/b.db", "/a b/%41?x#y.db", "/ü.db"])
def test_a_location_is_its_url(path: str) -> None:
    location = StoreLocation("sqlite", path)
    assert parse_location(location.url) == location
    assert pickle.loads(pickle.dumps(location)) == location


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgres://x", "sqlite:///relative"),
        ("sqllite:///x.db", "Did you mean 'sqlite'"),
        ("agents.db", "sqlite:///relative"),
        ("s3://", "bucket"),
        ("sqlite://agents.db", "three slashes"),
        ("sqlite:///", "names no file"),
        ("sqlite:///:memory:", "'memory://'"),
        (None, "sqlite:///relative"),
    ],
)
def test_other_urls_are_refused_with_what_is_allowed(url: Any, says: str) -> None:  # STO-43
    with pytest.raises(ConfigurationError, match=says) as info:
        parse_location(url)
    assert (info.value.code, info.value.field) == ("LOUSHO_CONFIG_INVALID", "url")


async def test_a_location_opens_its_store(tmp_path: Path) -> None:
    async with parse_location(f"sqlite:///{tmp_path}/a.db", history_limit=4).open() as store:
        assert isinstance(store, SqliteStore)
        assert (store.path, store.history_limit) == (f"{tmp_path}/a.db", 4)
        assert store.location.open().location == store.location
    assert isinstance(parse_location("memory://").open(), MemoryStore)


async def test_stores_in_memory_are_shared_by_their_name() -> None:  # STO-43
    one = parse_location("memory://shared").open()
    await one.sessions.save("s", [user("kept")])
    assert await parse_location("memory://shared").open().sessions.load("s") == [user("kept")]
    assert await parse_location("memory://other").open().sessions.load("s") is None
    assert parse_location("memory://").open() is not parse_location("memory://").open()
    await one.aclose()
    assert await parse_location("memory://shared").open().sessions.load("s") is None


# -------------------------------------------------------------------------------------------------------------------- leases


def test_a_claim_needs_a_free_or_ended_lease() -> None:
    lease = Lease("one", 4, 1000)
    assert claimed(None, "one", 500, 0, lambda: 7) == Lease("one", 7, 500)
    assert claimed(lease, "one", 500, 999, lambda: 7) == Lease("one", 4, 1499)
    assert claimed(lease, "two", 500, 999, lambda: 7) is None
    assert claimed(lease, "two", 500, 1000, lambda: 7) == Lease("two", 7, 1500)
    assert claimed(lease, "one", 500, 1000, lambda: 7) == Lease("one", 7, 1500)


def test_only_the_holder_renews() -> None:
    lease = Lease("one", 4, 1000)
    assert renewed(lease, "one", 4, 500, 2000) == Lease("one", 4, 2500)
    assert renewed(lease, "one", 3, 500, 0) is None
    assert renewed(lease, "two", 4, 500, 0) is None
    assert renewed(None, "one", 4, 500, 0) is None


def test_a_save_names_the_current_fence() -> None:
    lease = Lease("one", 4, 1000)
    assert after_save(lease, 4, 0, "a") == lease
    assert after_save(lease, None, 1000, "a") is None
    assert after_save(None, None, 0, "a") is None
    for current, fence, now in ((lease, 3, 0), (lease, None, 999), (None, 4, 0)):
        with pytest.raises(StorageError, match="'a' was not saved"):
            after_save(current, fence, now, "a")


def test_a_delete_ends_the_lease_of_others() -> None:
    lease = Lease("one", 4, 1000)
    assert after_delete(lease, 4) == lease
    assert after_delete(lease, None) is None
    assert after_delete(lease, 3) is None


# ----------------------------------------------------------------------------------------------------------------------- json


@pytest.mark.parametrize("value", ["\ud83d", "a\0", "\u2028", 10**30, 1e300, {"$bytes": "x"}, {"$escape": {"$bytes": 1}}, [[]], ""])
def test_plain_data_is_exact(value: Any) -> None:  # STO-08, STO-D8
    text = dumps(value, "it")
    text.encode()
    assert loads(text, "it") == value


def test_json_is_written_as_utf8_text() -> None:  # STO-D8
    assert dumps({"a": "你好"}, "it") == '{"a":"你好"}'


def test_a_record_that_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(StorageError, match="contains itself"):
        dumps(loop, "it")


# -------------------------------------------------------------------------------------------------------------------- others


@pytest.mark.parametrize("limit", [-1, 1.5, True, "5", None])
def test_history_limit_is_checked(limit: Any, tmp_path: Path) -> None:  # DUR-46
    makers: tuple[Callable[[Any], object], ...] = (
        memory_store,
        lambda limit: SqliteStore(tmp_path / "a.db", limit),
        lambda limit: parse_location("memory://", history_limit=limit),
    )
    for make in makers:
        with pytest.raises(ConfigurationError, match="history_limit") as info:
            make(limit)
        assert info.value.field == "history_limit"


@pytest.mark.parametrize("limit", [0, 1])
async def test_history_limit_holds_for_every_store(limit: int, tmp_path: Path) -> None:  # DUR-46
    from lousho_ray.stores.files import file_store

    for store in (memory_store(limit), SqliteStore(tmp_path / "a.db", limit), file_store(tmp_path / "files", limit, fsync=False)):
        async with store:
            for step in range(3):
                await store.checkpoints.save({"sessionId": "a", "stepIndex": step})
            assert [entry["step"] for entry in await store.checkpoints.history("a")] == [2][:limit]


def test_ids_of_turns_belong_to_their_session() -> None:
    found = [base_session(run) for run in ("trip.turn-12", "trip.paused", "trip.fork-1", "trip", "a.turn-1.turn-2", "a.turn-x")]
    assert found == ["trip", "trip", "trip.fork-1", "trip", "a.turn-1", "a.turn-x"]


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    known: Remembered[str] = Remembered(budget_chars=10)
    known.put("a", 1, "A", 4)
    known.put("b", 2, "B", 4)
    assert known.get("a") == (1, "A")
    known.put("c", 3, "C", 4)
    assert [known.get(name) for name in "abc"] == [(1, "A"), None, (3, "C")]
    known.put("huge", 4, "H", 11)
    assert known.get("huge") is None


async def test_a_forgotten_transcript_is_compared_with_what_is_stored(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "a.db") as store:
        store.sessions._known = Remembered(budget_chars=0)
        messages = [user(str(i), n=i) for i in range(5)]
        for kept in (messages, messages[:3], [*messages[:2], user("else")], messages):
            await store.sessions.save("a", kept)
            assert await store.sessions.load("a") == kept


async def test_a_huge_transcript_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # STO-D7
    monkeypatch.setattr(sqlite_sessions, "LARGE_CHARS", 1000)
    async with SqliteStore(tmp_path / "a.db") as store:
        with caplog.at_level(logging.WARNING):
            for number in range(3):
                await store.sessions.save("a", [user("x" * 1000)] * (number + 1))
            await store.sessions.save("b", [user("x")])
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["a"]


async def test_memory_keeps_few_taken_approvals(monkeypatch: pytest.MonkeyPatch) -> None:  # STO-14
    store = InMemoryApprovalStore()
    monkeypatch.setattr(store, "CLAIMED_LIMIT", 2, raising=False)
    for name in ("a", "b", "c"):
        await store.save({"id": name}, {})
        await store.resolve(name)
    assert [await store.restore(name) for name in ("a", "b", "c")] == [False, True, True]


async def test_separate_memory_stores_share_nothing_and_a_shared_one_shares_by_id() -> None:  # STO-13
    one, two = MemorySessionStore(), MemorySessionStore()
    await one.save("a", [user("x")])
    assert await two.load("a") is None
    assert await one.load("a") == [user("x")]


async def test_memory_stores_pickle_with_their_contents() -> None:
    store = memory_store()
    await store.sessions.save("a", [user("x")])
    await store.checkpoints.save({"sessionId": "a"})
    copy = pickle.loads(pickle.dumps(store))
    await store.sessions.save("a", [])
    assert await copy.sessions.load("a") == [user("x")]
    assert await copy.checkpoints.load("a") == {"sessionId": "a"}


async def test_a_closed_memory_store_says_so() -> None:
    store = memory_store()
    store.close()
    with pytest.raises(StorageError, match="closed"):
        _ = store.sessions


async def test_what_is_no_message_is_refused() -> None:
    for store in (memory_store(), SqliteStore(":memory:")):
        async with store:
            with pytest.raises(ConfigurationError, match=r"messages\[1\] is a dict"):
                await store.sessions.save("a", [user("x"), {"role": "user"}])  # type: ignore[list-item]


def test_a_store_has_a_part_and_parts_have_their_methods() -> None:  # STO-01
    store = memory_store()
    check_store(store)
    check_store(SimpleNamespace(sessions=store.sessions))
    with pytest.raises(ConfigurationError, match="none of 'sessions', 'checkpoints' and 'approvals'") as info:
        check_store(store.sessions)
    assert info.value.field == "store"
    half = SimpleNamespace(save=store.approvals.save, load=store.approvals.load)
    with pytest.raises(ConfigurationError, match=r"has no method 'resolve\(\)'") as info:
        check_store(SimpleNamespace(sessions=None, approvals=half))
    assert info.value.field == "store.approvals"
