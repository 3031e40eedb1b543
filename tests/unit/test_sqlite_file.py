"""Opening a SQLite store: what goes wrong and what is said, versions, and processes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import socket
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError, StorageError
from lousho_ray.messages import user
from lousho_ray.stores import sqlite_schema
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.stores.sqlite_schema import APPLICATION_ID, MIGRATIONS, open_database


async def first_use(path: Any) -> None:
    async with SqliteStore(path) as store:
        await store.sessions.load("a")


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


async def test_missing_folders_are_created_with_the_file(tmp_path: Path) -> None:  # STO-26
    path = tmp_path / "a" / "b" / "agent.db"
    async with SqliteStore(path) as store:
        assert not path.parent.exists()
        await store.sessions.save("a", [user("x")])
    assert path.exists()
    assert sorted(os.listdir(path.parent)) == ["agent.db"]


async def test_a_relative_path_stays_where_the_store_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("agent.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await store.sessions.save("a", [])
    await store.aclose()
    assert (tmp_path / "agent.db").exists()


@pytest.mark.parametrize("path", ["", "  ", b"x.db", "a\0b"])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(ConfigurationError) as info:
        SqliteStore(path)
    assert info.value.field == "path"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("folder", "is a folder"), ("text.db", "not a SQLite database"), ("text.db/agent.db", "is a file, not a folder")],
)
async def test_a_place_that_cannot_work_is_refused_at_once(tmp_path: Path, name: str, reason: str) -> None:  # STO-30
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.db").write_text("dear diary, " * 100)
    with pytest.raises(StorageError, match=reason) as info:
        SqliteStore(tmp_path / name)
    assert str(tmp_path / name) in info.value.detail
    assert info.value.path == str(tmp_path / name)
    assert info.value.code == "LOUSHO_STORAGE_FAILED"


async def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:  # D05
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "agent.db")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path / "socket", Path("/dev/null"), Path("/dev/full")):
            with pytest.raises(StorageError, match="a device, a pipe or a socket") as info:
                SqliteStore(path)
            assert str(path) in info.value.detail
    for name in ("dangling", "circle"):
        with pytest.raises(StorageError) as info:
            await first_use(tmp_path / name)
        assert str(tmp_path / name) in info.value.detail
    (tmp_path / "new").symlink_to(tmp_path / "agent.db")
    await first_use(tmp_path / "new")  # a link to where a file can be made is as good as a path


def test_an_unprivileged_process_is_told_what_it_may_not_do() -> None:  # D05
    code = """
        import os, sys
        from lousho_ray.errors import StorageError
        from lousho_ray.stores.sqlite import SqliteStore
        SqliteStore(":memory:")  # loads what the other user may not read
        if os.getuid() == 0:
            os.setuid(65534)
        for path in sys.argv[1:]:
            try:
                SqliteStore(path)
            except StorageError as error:
                print(path in error.detail, "no permission" in error.detail)
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent.db").touch(0o444)
        (folder / "closed").mkdir()
        for place in (folder / "closed", folder):
            place.chmod(0o555)
        try:
            end = run_python(code, str(folder / "agent.db"), str(folder / "closed" / "new.db"), "/no/such/agent.db")
        finally:
            folder.chmod(0o755)
    assert (end.stdout, end.stderr) == ("True True\n" * 3, "")


@pytest.mark.parametrize(("target", "reason"), [("file", "read and write the file"), ("folder", "write in the folder")])
def test_missing_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, reason: str) -> None:  # STO-30
    path = tmp_path / "agent.db"
    sqlite3.connect(path).close()
    denied = path if target == "file" else tmp_path
    monkeypatch.setattr(os, "access", lambda place, mode: str(place) != str(denied))  # root may do everything
    with pytest.raises(StorageError, match=reason) as info:
        SqliteStore(path)
    assert str(path) in info.value.detail


async def test_a_damaged_file_names_path_and_cause(tmp_path: Path) -> None:  # STO-30
    path = tmp_path / "agent.db"
    path.write_bytes(b"SQLite format 3\x00" + b"\x00" * 44 + b"\xff" * 4000)
    with pytest.raises(StorageError) as info:
        await first_use(path)
    assert str(path) in info.value.detail


async def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "agent.db").touch()
    await first_use(tmp_path / "agent.db")


async def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE sessions (cookie TEXT)")
    connection.close()
    with pytest.raises(StorageError, match="another program"):
        await first_use(path)


# ------------------------------------------------------------------------------------------------------------------ versions


async def test_a_newer_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:  # STO-29, D04
    path = tmp_path / "agent.db"
    async with SqliteStore(path) as store:
        await store.sessions.save("a", [user("x")])
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE sessions ADD COLUMN colour TEXT")
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(StorageError, match=f"version 999.*up to {len(MIGRATIONS)}"):
        SqliteStore(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert os.listdir(tmp_path) == ["agent.db"]


async def test_a_newer_version_that_is_only_in_the_log_is_seen(tmp_path: Path) -> None:  # STO-29, D04
    path = tmp_path / "agent.db"
    await first_use(path)
    code = """
        import os, signal, sqlite3, sys
        connection = sqlite3.connect(sys.argv[1], isolation_level=None)
        connection.execute("PRAGMA user_version = 999")
        os.kill(os.getpid(), signal.SIGKILL)  # before the log is folded into the file
    """
    assert run_python(code, str(path)).returncode == -9
    before, log = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    store = SqliteStore(path)
    with pytest.raises(StorageError, match="version 999"):
        await store.sessions.load("a")
    await store.aclose()
    assert (path.read_bytes(), Path(f"{path}-wal").read_bytes()) == (before, log)


async def test_an_older_file_is_migrated_step_by_step(tmp_path: Path) -> None:  # STO-29
    path = str(tmp_path / "agent.db")
    async with SqliteStore(path) as store:
        await store.sessions.save("a", [user("x")])
    newer = (*MIGRATIONS, ("ALTER TABLE sessions ADD COLUMN b TEXT",), ("UPDATE sessions SET b = 'new'",))
    connection = open_database(path, 1000, newer)
    assert connection.execute("SELECT id, b FROM sessions").fetchall() == [("a", "new")]
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 2,)
    connection.close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:  # STO-29
    path = str(tmp_path / "agent.db")
    open_database(path, 1000).close()
    with pytest.raises(sqlite3.OperationalError):
        open_database(path, 1000, (*MIGRATIONS, ("CREATE TABLE extra (a)", "CREATE TABLE extra (a)")))
    connection = open_database(path, 1000)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    assert connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'extra'").fetchone() is None
    connection.close()


def test_tables_and_settings_of_a_new_file(tmp_path: Path) -> None:  # STO-28, STO-31
    connection = open_database(str(tmp_path / "agent.db"), 5000)
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables >= {"sessions", "checkpoints", "checkpoint_history", "approvals"}
    pragmas = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "busy_timeout")}
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 5000}
    assert connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    connection.close()


# ----------------------------------------------------------------------------------------------------------------- processes


async def test_many_processes_open_and_write_one_new_file(tmp_path: Path) -> None:  # STO-31
    code = """
        import asyncio, sys
        from lousho_ray.messages import user
        from lousho_ray.stores.sqlite import SqliteStore
        async def main(path, name):
            async with SqliteStore(path) as store:
                for number in range(20):
                    await store.sessions.save(f"{name}-{number}", [user(name)])
        asyncio.run(main(*sys.argv[1:]))
    """
    path = str(tmp_path / "agent.db")
    ends = await asyncio.gather(*(asyncio.to_thread(run_python, code, path, f"p{i}") for i in range(4)))
    assert [(end.returncode, end.stderr) for end in ends] == [(0, "")] * 4
    async with SqliteStore(path) as store:
        assert len(await store.sessions.list(limit=None)) == 80


async def test_an_approval_is_taken_by_one_of_many_processes(tmp_path: Path) -> None:  # STO-32, S07
    code = """
        import asyncio, sys
        from lousho_ray.stores.sqlite import SqliteStore
        async def main(path):
            async with SqliteStore(path) as store:
                taken = [await store.approvals.resolve(f"p{number}") for number in range(30)]
                print(sum(record is not None for record in taken))
        asyncio.run(main(*sys.argv[1:]))
    """
    path = str(tmp_path / "agent.db")
    async with SqliteStore(path) as store:
        for number in range(30):
            await store.approvals.save({"id": f"p{number}"}, {})
    ends = await asyncio.gather(*(asyncio.to_thread(run_python, code, path) for _ in range(3)))
    assert sum(int(end.stdout) for end in ends) == 30


def test_a_store_nobody_closed_lets_the_process_exit(tmp_path: Path) -> None:  # D07
    code = """
        import asyncio, sys
        from lousho_ray.messages import user
        from lousho_ray.stores.sqlite import SqliteStore
        store = SqliteStore(sys.argv[1])
        async def main():
            await store.sessions.save("a", [user("x")])
            asyncio.ensure_future(store.sessions.save("b", [user("never awaited")]))
            await asyncio.sleep(0)
        asyncio.run(main())
    """
    path = tmp_path / "agent.db"
    end = run_python(code, str(path))
    assert (end.returncode, end.stderr) == (0, "")
    assert os.listdir(tmp_path) == ["agent.db"]  # closed in order: the log is folded into the file
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM sessions").fetchone() == (2,)
    connection.close()


def test_a_program_that_fails_or_exits_with_open_stores_ends_as_it_wanted_to(tmp_path: Path) -> None:  # D07
    code = """
        import asyncio, sys
        from lousho_ray.messages import user
        from lousho_ray.stores.sqlite import SqliteStore
        stores = [SqliteStore(f"{sys.argv[1]}-{number}") for number in range(2)]
        async def main():
            for store in stores:
                await store.sessions.save("a", [user("x")])
        asyncio.run(main())
        asyncio.run(main())  # after the loop that opened them was closed
        sys.exit(3)
    """
    end = run_python(code, str(tmp_path / "agent.db"))
    assert (end.returncode, end.stderr) == (3, "")
    assert sorted(os.listdir(tmp_path)) == ["agent.db-0", "agent.db-1"]


def test_a_task_that_is_cancelled_while_it_closes_two_stores_closes_both(tmp_path: Path) -> None:  # D07
    code = """
        import asyncio, sys, threading
        from lousho_ray.messages import user
        from lousho_ray.stores.sqlite import SqliteStore
        entered, leave = threading.Event(), threading.Event()
        def hold(connection):
            entered.set()
            leave.wait()
        async def work(first, second, opened):
            async with first, second:
                for store in (first, second):
                    await store.sessions.save("a", [user("x")])
                threading.Thread(target=second._database.run_blocking, args=(hold,)).start()
                await asyncio.to_thread(entered.wait)
                opened.set()
        async def main():
            stores, opened = [SqliteStore(f"{sys.argv[1]}-{number}") for number in range(2)], asyncio.Event()
            task = asyncio.create_task(work(*stores, opened))
            await opened.wait()
            await asyncio.sleep(0)
            task.cancel()
            leave.set()
            try:
                await task
            except asyncio.CancelledError:
                print("cancelled")
            for store in stores:
                await store.aclose()
        asyncio.run(main())
        print(sum(thread.name.startswith("lousho-sqlite") for thread in threading.enumerate()))
    """
    end = run_python(code, str(tmp_path / "agent.db"))
    assert (end.stdout, end.stderr, end.returncode) == ("cancelled\n0\n", "", 0)
    assert sorted(os.listdir(tmp_path)) == ["agent.db-0", "agent.db-1"]


def test_a_forgotten_store_ends_its_thread(tmp_path: Path) -> None:  # D07
    code = """
        import asyncio, gc, sys, threading
        from lousho_ray.stores.sqlite import SqliteStore
        async def main():
            await SqliteStore(sys.argv[1]).sessions.load("a")
        asyncio.run(main())
        gc.collect()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(20)
        print(threading.active_count())
    """
    end = run_python(code, str(tmp_path / "agent.db"))
    assert (end.stdout, end.stderr) == ("1\n", "")


async def test_use_after_a_fork_is_an_error_and_harms_nothing(tmp_path: Path) -> None:  # D08
    code = """
        import asyncio, os, sys, warnings
        from lousho_ray.errors import StorageError
        from lousho_ray.messages import user
        from lousho_ray.stores.sqlite import SqliteStore
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # Python 3.12 and later warn of forking with threads
        store, unopened = SqliteStore(sys.argv[1]), SqliteStore(sys.argv[1])
        asyncio.run(store.sessions.save("a", [user("parent")]))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                asyncio.run(store.sessions.save("a", [user("child")]))
            except StorageError as error:
                status = 0 if "fork" in error.detail else 2
            store.close()
            asyncio.run(unopened.sessions.save("b", [user("child")]))  # was not open before the fork
            unopened.close()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        asyncio.run(store.sessions.save("a", [user("parent"), user("again")]))
        print([message.text for message in asyncio.run(store.sessions.load("a"))], asyncio.run(store.sessions.load("b"))[0].text)
        store.close()
    """
    end = run_python(code, str(tmp_path / "agent.db"))
    assert (end.stdout, end.stderr) == ("0\n['parent', 'again'] child\n", "")


def test_a_killed_process_loses_nothing_it_was_told_is_saved(tmp_path: Path) -> None:
    code = """
        import asyncio, os, signal, sys
        from lousho_ray.messages import user
        from lousho_ray.stores.sqlite import SqliteStore
        async def main():
            store = SqliteStore(sys.argv[1])
            for number in range(10):
                await store.sessions.save("a", [user(str(i)) for i in range(number)])
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    path = str(tmp_path / "agent.db")
    assert run_python(code, path).returncode == -9
    with SqliteStore(path) as store:
        assert len(asyncio.run(store.sessions.load("a")) or []) == 9


async def test_pickling_an_open_store_sends_its_location(tmp_path: Path) -> None:  # STO-42
    store = SqliteStore(tmp_path / "agent.db", history_limit=7)
    await store.sessions.save("a", [user("x")])
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.path, copy.history_limit, copy.location) == (store.path, 7, store.location)
    assert await copy.sessions.load("a") == [user("x")]
    await copy.aclose()
    await store.aclose()
    with pytest.raises(ConfigurationError, match=":memory:"):
        pickle.dumps(SqliteStore(":memory:"))


def test_importing_needs_no_sqlite3_and_its_lack_is_explained() -> None:  # STO-27
    code = """
        import sys
        import lousho_ray.stores.sqlite
        assert "sqlite3" not in sys.modules
        sys.modules["sqlite3"] = None
        try:
            lousho_ray.stores.sqlite.SqliteStore("x.db")
        except lousho_ray.errors.LoushoError as error:
            print(error.code, "file_store" in error.detail)
    """
    end = run_python(code)
    assert (end.stdout, end.stderr) == ("LOUSHO_STORAGE_FAILED True\n", "")


def test_the_place_is_looked_at_without_touching_it(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    sqlite_schema.check_file(str(path))
    SqliteStore(path).close()
    assert not path.exists()
