"""Group commit: durability, isolation of units, locks, closing."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from lousho_ray.errors import LoushoError, StorageError
from lousho_ray.messages import Message, user
from lousho_ray.stores import sqlite as sqlite_module
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.stores.sqlite_writer import Database


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(tmp_path / "agent.db") as opened:
        await opened.sessions.load("a")
        yield opened


@contextlib.contextmanager
def busy(store: SqliteStore) -> Iterator[None]:
    """Holds the store's thread in a unit, so that what is handed in meanwhile gathers."""
    entered, leave = threading.Event(), threading.Event()

    def wait(connection: sqlite3.Connection) -> None:
        entered.set()
        assert leave.wait(30)

    holder = threading.Thread(target=lambda: store._database.run_blocking(wait))
    holder.start()
    assert entered.wait(30)
    try:
        yield
    finally:
        leave.set()
        holder.join()


async def gathered(store: SqliteStore, *calls: object) -> list[object]:
    """Runs the calls as one group."""
    with busy(store):
        tasks = [asyncio.ensure_future(call) for call in calls]  # type: ignore[call-overload]
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


def count(path: str, table: str) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return found


async def test_saves_that_arrive_together_share_one_transaction(store: SqliteStore) -> None:  # STO-D1
    before = store.transactions
    await gathered(store, *(store.sessions.save(f"s{i}", [user("x")]) for i in range(40)))
    assert store.transactions == before + 1
    assert count(store.path, "sessions") == 40


async def test_a_save_is_on_the_disk_when_it_returns(store: SqliteStore) -> None:
    await store.sessions.save("a", [user("x")])
    assert count(store.path, "messages") == 1


async def test_a_load_sees_the_save_handed_in_before_it(store: SqliteStore) -> None:
    _, loaded = await gathered(store, store.sessions.save("a", [user("x")]), store.sessions.load("a"))
    assert loaded == [user("x")]


async def test_a_save_that_extends_writes_only_the_new_messages(store: SqliteStore) -> None:
    written: list[str] = []
    store._database.run_blocking(lambda connection: connection.set_trace_callback(written.append))
    messages = [user(f"message {i} " + "x" * 500) for i in range(50)]
    await store.sessions.save("a", messages)
    messages = [*(await store.sessions.load("a") or []), user("new")]
    written.clear()
    await store.sessions.save("a", messages)
    assert sum("INSERT INTO messages" in statement for statement in written) == 1
    assert not any("SELECT body" in statement or "DELETE" in statement for statement in written)
    assert sum(map(len, written)) < 1000


async def test_a_checkpoint_that_extends_writes_only_what_is_new(store: SqliteStore) -> None:
    written: list[str] = []
    store._database.run_blocking(lambda connection: connection.set_trace_callback(written.append))
    messages = [{"role": "user", "content": f"{i}" + "x" * 500} for i in range(50)]
    await store.checkpoints.save({"sessionId": "a", "messages": messages})
    written.clear()
    await store.checkpoints.save({"sessionId": "a", "messages": [*messages, {"role": "user", "content": "new"}]})
    assert sum("INSERT INTO checkpoint_lists" in statement for statement in written) == 1
    assert sum(map(len, written)) < 2000
    await store.checkpoints.delete("a")
    assert count(store.path, "checkpoint_lists") == 0


async def test_rewritten_lists_leave_nothing_behind(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "agent.db", history_limit=2) as store:
        for number in range(6):
            messages = [{"role": "user", "content": f"{number}" * 600}] * 3
            await store.checkpoints.save({"sessionId": "a", "messages": messages})
        assert count(store.path, "checkpoint_lists") == 2 * 3
        assert len(await store.checkpoints.history("a")) == 2
    async with SqliteStore(tmp_path / "none.db", history_limit=0) as store:
        for number in range(3):
            await store.checkpoints.save({"sessionId": "a", "messages": [{"role": "user", "content": f"{number}" * 1200}]})
        assert count(store.path, "checkpoint_lists") == 1
        assert await store.checkpoints.history("a") == []


async def test_one_failing_unit_leaves_its_neighbours_alone(store: SqliteStore) -> None:
    nan = Message("user", "x", metadata={"cost": float("nan")})
    ends = await gathered(
        store,
        store.sessions.save("a", [user("x")]),
        store.sessions.save("b", [user("kept?"), nan]),
        store.checkpoints.save({"sessionId": "c"}),
        store.sessions.save("d", [user("x")], fence=99),
        store.sessions.save("e", [user("x")]),
    )
    assert [type(end) for end in ends] == [type(None), StorageError, type(None), StorageError, type(None)]
    assert "metadata.cost" in str(ends[1])
    assert await store.sessions.load("b") is None
    assert [info["id"] for info in await store.sessions.list()] in (["a", "e"], ["e", "a"])


async def test_a_transaction_lost_as_a_whole_is_redone_unit_by_unit(store: SqliteStore) -> None:
    def lose(connection: sqlite3.Connection) -> None:
        connection.execute("ROLLBACK")  # what SQLite does by itself when the disk is full
        raise sqlite3.OperationalError("lost")

    ends = await gathered(
        store, store.sessions.save("a", [user("x")]), store._database.run(lose, write=True), store.sessions.save("b", [user("y")])
    )
    assert isinstance(ends[1], StorageError)
    assert (ends[0], ends[2]) == (None, None)
    assert await store.sessions.load("a") == [user("x")]
    await store.sessions.save("a", [user("x"), user("more")])
    assert await store.sessions.load("a") == [user("x"), user("more")]


async def test_a_full_disk_fails_the_large_save_alone(store: SqliteStore) -> None:  # D05
    pages = store._database.run_blocking(lambda connection: connection.execute("PRAGMA page_count").fetchone()[0])
    store._database.run_blocking(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages + 4}").fetchone())
    small, large = store.sessions.save("small", [user("x")]), store.sessions.save("large", [user("x" * 100_000)])
    ends = await gathered(store, small, large)
    assert ends[0] is None
    assert isinstance(ends[1], StorageError)
    assert "full" in ends[1].detail
    assert store.path in ends[1].detail
    assert isinstance(ends[1].__cause__, sqlite3.Error)
    assert await store.sessions.load("small") == [user("x")]
    assert await store.sessions.load("large") is None


async def test_a_cancelled_save_is_whole_and_its_neighbours_are_saved(store: SqliteStore) -> None:
    with busy(store):
        cancelled = asyncio.ensure_future(store.sessions.save("a", [user("1"), user("2")]))
        other = asyncio.ensure_future(store.sessions.save("b", [user("x")]))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    await other
    assert await store.sessions.load("a") in (None, [user("1"), user("2")])
    await store.sessions.save("a", [user("1"), user("2"), user("3")])
    assert len(await store.sessions.load("a") or []) == 3


async def test_a_lock_that_passes_is_waited_for(store: SqliteStore) -> None:  # STO-31, D01, D02
    other = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    saving = asyncio.ensure_future(store.sessions.save("a", [user("x")]))
    threading.Timer(0.3, lambda: other.execute("COMMIT")).start()
    await saving
    other.close()
    assert count(store.path, "sessions") == 1


async def test_a_lock_that_stays_fails_that_operation_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # STO-31, D02
    monkeypatch.setattr(sqlite_module, "BUSY_TIMEOUT_MS", 100)
    async with SqliteStore(tmp_path / "agent.db") as store:
        await store.sessions.save("a", [user("1")])
        other = sqlite3.connect(store.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match=r"locked.*100 ms") as info:
            await store.sessions.save("a", [user("1"), user("2")])
        assert store.path in info.value.detail
        assert await store.sessions.load("a") == [user("1")]  # reading goes on
        other.execute("ROLLBACK")
        other.close()
        await store.sessions.save("a", [user("1"), user("2")])
        assert len(await store.sessions.load("a") or []) == 2


@pytest.mark.parametrize("opened", [True, False], ids=["open", "not-yet-open"])
async def test_a_program_that_keeps_the_whole_file_to_itself_is_waited_for_and_named(  # D02
    opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "BUSY_TIMEOUT_MS", 100)
    async with SqliteStore(tmp_path / "agent.db") as first:
        await first.sessions.save("a", [user("1")])
    async with SqliteStore(tmp_path / "agent.db") as store:
        if opened:
            await store.sessions.load("a")
        with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            if not opened:
                other.execute("PRAGMA locking_mode = EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
            other.execute("UPDATE fences SET last = last")
            for _ in range(2):
                with pytest.raises(StorageError, match=r"locked.*100 ms"):
                    await store.sessions.save("a", [user("1"), user("2")])
            other.execute("ROLLBACK")
        await store.sessions.save("a", [user("1"), user("2")])
        assert len(await store.sessions.load("a") or []) == 2


async def test_reads_before_a_foreign_write_do_not_stop_the_next_write(store: SqliteStore) -> None:  # D01
    await store.sessions.save("a", [user("1")])
    await store.sessions.load("a")
    async with SqliteStore(store.path) as other:
        await other.sessions.save("a", [user("other")])
    await store.sessions.save("a", [user("1"), user("2")])
    assert await store.sessions.load("a") == [user("1"), user("2")]


async def test_a_missing_message_row_is_an_error_not_a_shorter_transcript(store: SqliteStore) -> None:
    await store.sessions.save("a", [user("1"), user("2")])
    with contextlib.closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute("DELETE FROM messages WHERE position = 1")
        connection.execute("UPDATE sessions SET version = version + 1")
    with pytest.raises(StorageError, match="1 of its 2 messages"):
        await store.sessions.load("a")


@pytest.mark.parametrize("body", ["{", '"text"', '{"role": "user", "content": [{"type": "spell"}]}', "cos\nsystem\n(S'true'\ntR."])
async def test_a_damaged_row_is_an_error_and_runs_nothing(store: SqliteStore, body: str) -> None:  # S11
    await store.sessions.save("a", [user("1")])
    await store.checkpoints.save({"sessionId": "a"})
    with contextlib.closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute("UPDATE messages SET body = ?", (body,))
        connection.execute("UPDATE checkpoints SET body = '{'")
        connection.execute("UPDATE sessions SET version = version + 1")
    with pytest.raises(StorageError, match="damaged") as info:
        await store.sessions.load("a")
    assert "'a'" in info.value.detail
    with pytest.raises(StorageError, match="damaged"):
        await store.checkpoints.load("a")


async def test_nul_bytes_come_back_and_never_reach_the_sql_text(store: SqliteStore) -> None:  # S10
    await store.sessions.save("a", [user("a\0b")])
    async with SqliteStore(store.path) as other:
        assert await other.sessions.load("a") == [user("a\0b")]
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        assert "\0" not in connection.execute("SELECT body FROM messages").fetchone()[0]


async def test_one_object_serves_many_event_loops_and_threads(store: SqliteStore) -> None:  # D08
    def thread(name: str) -> None:
        async def turns() -> None:
            for number in range(10):
                messages = await store.sessions.load(name) or []
                assert len(messages) == number
                await store.sessions.save(name, [*messages, user(str(number))])

        asyncio.run(turns())

    await asyncio.gather(*(asyncio.to_thread(thread, f"t{i}") for i in range(4)))
    assert [len(await store.sessions.load(f"t{i}") or []) for i in range(4)] == [10] * 4


async def test_the_result_of_a_closed_loop_is_dropped(store: SqliteStore) -> None:
    with busy(store):

        def thread() -> None:
            async def leave() -> None:
                asyncio.ensure_future(store.sessions.save("a", [user("x")]))  # noqa: RUF006
                await asyncio.sleep(0)

            asyncio.run(leave())

        await asyncio.to_thread(thread)
    await store.sessions.save("b", [user("y")])
    assert await store.sessions.load("b") == [user("y")]


# ------------------------------------------------------------------------------------------------------------------- closing


async def test_use_after_close_is_an_error_and_close_twice_is_none(tmp_path: Path) -> None:  # STO-33
    store = SqliteStore(tmp_path / "agent.db")
    await store.sessions.save("a", [user("x")])
    store.close()
    store.close()
    await store.aclose()
    for call in (store.sessions.load("a"), store.checkpoints.save({"sessionId": "a"}), store.approvals.resolve("p")):
        with pytest.raises(StorageError, match="closed; create a new SqliteStore"):
            await call
    with pytest.raises(StorageError, match="closed"):
        store.prune(1)


async def test_with_closes_the_store(tmp_path: Path) -> None:  # STO-33
    with SqliteStore(tmp_path / "agent.db") as store:
        await store.sessions.save("a", [])
    with pytest.raises(LoushoError, match="closed"):
        await store.sessions.load("a")


async def test_closing_writes_what_was_handed_in(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "agent.db")
    await store.sessions.load("a")
    saves = [asyncio.ensure_future(store.sessions.save(f"s{i}", [user("x")])) for i in range(20)]
    await asyncio.sleep(0)
    await store.aclose()
    await asyncio.gather(*saves)
    assert count(store.path, "sessions") == 20


async def test_cancelling_close_does_not_stop_it(tmp_path: Path) -> None:  # D07
    store = SqliteStore(tmp_path / "agent.db")
    await store.sessions.load("a")
    with busy(store):
        closing = asyncio.ensure_future(store.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    await store.aclose()
    assert not any(thread.name.startswith("lousho-sqlite") and store.path in thread.name for thread in threading.enumerate())
    assert not Path(store.path + "-wal").exists()


async def test_a_database_that_failed_to_open_is_tried_again(tmp_path: Path) -> None:  # D02
    path = tmp_path / "agent.db"
    store = SqliteStore(path)
    path.mkdir()
    with pytest.raises(StorageError, match="is a folder"):
        await store.sessions.load("a")
    path.rmdir()
    assert await store.sessions.load("a") is None
    await store.aclose()


def test_a_store_that_was_never_used_closes_without_a_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    database = Database(str(tmp_path / "agent.db"), 1000)
    database.close()
    assert threading.active_count() == before
