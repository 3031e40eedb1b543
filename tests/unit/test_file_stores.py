"""Files: names, atomic writes, damage, claims."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lousho_ray.errors import StorageError
from lousho_ray.messages import ImagePart, Message, ToolCall, user
from lousho_ray.stores import folder as folder_module
from lousho_ray.stores.files import FileSessionStore, file_store
from lousho_ray.testing.clock import FakeClock
from tests.unit.test_sqlite_file import run_python


async def test_a_session_is_an_array_of_messages_with_camel_case_keys(tmp_path: Path) -> None:  # STO-08, STO-15
    store = FileSessionStore(tmp_path / "sessions")
    await store.load("a")
    assert not (tmp_path / "sessions").exists()
    await store.save("a", [user([ImagePart(b"\x00", "image/png")]), Message("assistant", "", tool_calls=(ToolCall("c", "t"),))])
    data = json.loads((tmp_path / "sessions" / "a.json").read_text())
    assert data[0]["content"] == [{"type": "image", "image": {"$bytes": "AA=="}, "mimeType": "image/png"}]
    assert data[1]["toolCalls"] == [{"id": "c", "name": "t", "arguments": "{}"}]


async def test_each_folder_appears_at_its_first_write(tmp_path: Path) -> None:  # STO-16
    store = file_store(tmp_path / "data", fsync=False)
    await store.sessions.save("a", [])
    assert os.listdir(tmp_path / "data") == ["sessions"]
    await store.checkpoints.save({"sessionId": "a.turn-0", "stepIndex": 2})
    await store.checkpoints.save({"sessionId": "a.turn-0", "stepIndex": 3})
    await store.approvals.save({"id": "p"}, {})
    assert sorted(os.listdir(tmp_path / "data")) == ["approvals", "checkpoint-history", "checkpoints", "sessions"]
    history = json.loads((tmp_path / "data" / "checkpoint-history" / "a.turn-0.json").read_text())
    assert [entry["step"] for entry in history] == [2, 3]
    assert (tmp_path / "data" / "checkpoints" / "a.turn-0.json").exists()
    assert (tmp_path / "data" / "approvals" / "p.json").exists()


async def test_a_write_that_breaks_off_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # STO-17
    store = FileSessionStore(tmp_path)
    await store.save("a", [user("old")])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left") as info:
        await store.save("a", [user("new")])
    assert info.value.path == str(tmp_path / "a.json")
    monkeypatch.undo()
    assert await store.load("a") == [user("old")]
    assert os.listdir(tmp_path) == ["a.json"]


async def test_left_over_temporary_files_are_ignored(tmp_path: Path) -> None:  # STO-17
    store = FileSessionStore(tmp_path)
    await store.save("a", [user("x")])
    (tmp_path / ".0123.tmp").write_text("[{")
    (tmp_path / ".0123.json").write_text("[{")
    assert [info["id"] for info in await store.list()] == ["a"]


async def test_saves_reach_the_disk_file_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # STO-D5
    kinds: list[bool] = []
    real = os.fsync

    def spy(descriptor: int) -> None:
        kinds.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    await FileSessionStore(tmp_path).save("a", [])
    assert kinds == [False, True]
    await FileSessionStore(tmp_path, fsync=False).save("a", [])
    assert kinds == [False, True]


async def test_capitals_are_marked_in_file_names(tmp_path: Path) -> None:  # STO-18
    store = FileSessionStore(tmp_path)
    await store.save("Alice-B", [user("x")])
    await store.save("alice-b", [user("y")])
    assert sorted(os.listdir(tmp_path)) == ["^alice-^b.json", "alice-b.json"]
    assert {info["id"] for info in await store.list()} == {"Alice-B", "alice-b"}


async def test_a_plain_mixed_case_name_is_read_and_moved_at_the_next_save(tmp_path: Path) -> None:  # STO-19
    (tmp_path / "Alice.json").write_text('[{"role": "user", "content": "old"}]')
    store = FileSessionStore(tmp_path)
    assert await store.load("Alice") == [user("old")]
    assert await store.load("alice") is None
    assert await store.load("ALICE") is None
    await store.save("Alice", [user("new")])
    assert os.listdir(tmp_path) == ["^alice.json"]
    assert await store.load("Alice") == [user("new")]
    (tmp_path / "Bob.json").write_text("[]")
    await store.delete("Bob")
    assert await store.load("Bob") is None


@pytest.mark.parametrize("text", ["{}", "[1]", "[{}]", "[", "", '[{"role": "user", "content": [{"type": "spell"}]}]'])
async def test_a_damaged_session_file_is_named_and_kept(tmp_path: Path, text: str) -> None:  # STO-21
    (tmp_path / "a.json").write_text(text)
    store = FileSessionStore(tmp_path)
    with pytest.raises(StorageError) as info:
        await store.load("a")
    assert info.value.code == "LOUSHO_SESSION_FILE_CORRUPT"
    assert info.value.path == str(tmp_path / "a.json")
    assert str(tmp_path / "a.json") in info.value.detail
    assert (tmp_path / "a.json").read_text() == text


async def test_a_session_file_that_is_no_text_is_damaged(tmp_path: Path) -> None:  # STO-21
    (tmp_path / "a.json").write_bytes(b"[\xff\xfe]")
    with pytest.raises(StorageError) as info:
        await FileSessionStore(tmp_path).load("a")
    assert info.value.code == "LOUSHO_SESSION_FILE_CORRUPT"


@pytest.mark.parametrize("text", ["[", "{}", '[{"step": 1}]', "null"])
async def test_a_damaged_history_is_none_and_is_rebuilt(tmp_path: Path, text: str) -> None:  # STO-22
    store = file_store(tmp_path, fsync=False)
    await store.checkpoints.save({"sessionId": "a", "stepIndex": 1})
    (tmp_path / "checkpoint-history" / "a.json").write_text(text)
    assert await store.checkpoints.history("a") == []
    await store.checkpoints.save({"sessionId": "a", "stepIndex": 2})
    assert [entry["step"] for entry in await store.checkpoints.history("a")] == [2]


@pytest.mark.parametrize("text", ["{", "[]", ""])
async def test_a_damaged_checkpoint_names_its_file(tmp_path: Path, text: str) -> None:  # STO-22
    store = file_store(tmp_path, fsync=False)
    await store.checkpoints.save({"sessionId": "a"})
    path = tmp_path / "checkpoints" / "a.json"
    path.write_text(text)
    with pytest.raises(StorageError) as info:
        await store.checkpoints.load("a")
    assert (info.value.code, info.value.path) == ("LOUSHO_STORAGE_FAILED", str(path))
    assert str(path) in info.value.detail


async def test_a_claim_is_a_file_of_its_own_that_one_process_creates(tmp_path: Path) -> None:  # STO-23, STO-D6
    code = (
        "import asyncio, sys\nfrom lousho_ray.stores.files import file_store\n"
        "async def main():\n"
        "    store = file_store(sys.argv[1], fsync=False)\n"
        "    print(sum([await store.approvals.resolve(f'p{i}') is not None for i in range(30)]))\n"
        "asyncio.run(main())"
    )
    store = file_store(tmp_path, fsync=False)
    for number in range(30):
        await store.approvals.save({"id": f"p{number}"}, {})

    def run() -> int:
        return int(subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, timeout=30).stdout)

    assert sum(await asyncio.gather(*(asyncio.to_thread(run) for _ in range(3)))) == 30
    claim = json.loads((tmp_path / "approvals" / "p0.json.claim").read_text())
    assert set(claim) == {"token", "at", "decision"}
    assert (tmp_path / "approvals" / "p0.json").exists()


async def test_pruning_removes_stale_claims(tmp_path: Path) -> None:  # STO-D6
    clock = FakeClock()
    store = file_store(tmp_path, fsync=False, clock=clock)
    await store.approvals.save({"id": "p"}, {})
    await store.approvals.resolve("p")
    (tmp_path / "approvals" / "p.json").unlink()
    clock.advance(1000)
    assert (await store.aprune(10))["approvals"] == 0
    assert os.listdir(tmp_path / "approvals") == []


async def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    store = FileSessionStore(tmp_path / "x")
    assert await store.load("a") is None
    with pytest.raises(StorageError, match="Cannot write"):
        await store.save("a", [])


async def test_a_name_too_long_for_the_file_system_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="too long"):
        await FileSessionStore(tmp_path).save("A" * 128, [])


async def test_file_stores_pickle(tmp_path: Path) -> None:
    store = file_store(tmp_path, fsync=False)
    await store.sessions.save("a", [user("x")])
    assert await pickle.loads(pickle.dumps(store)).sessions.load("a") == [user("x")]


def test_file_names_and_ids_match() -> None:
    for name in ("alice", "Alice", "ALICE.turn-1", "_x-Y"):
        assert folder_module.id_of(folder_module.file_name(name)) == name


def test_a_child_of_a_fork_works_whatever_another_thread_was_doing(tmp_path: Path) -> None:  # D08
    code = """
        import asyncio, os, signal, sys, threading, time, warnings
        from lousho_ray.messages import user
        from lousho_ray.stores.files import file_store
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # Python 3.12 and later warn of forking with threads
        store, over = file_store(sys.argv[1], fsync=False), threading.Event()

        def save() -> None:
            async def forever() -> None:
                while not over.is_set():
                    await asyncio.gather(*(store.sessions.save("a", [user("parent")]) for _ in range(20)))
            asyncio.run(forever())

        threads = [threading.Thread(target=save) for _ in range(2)]
        for thread in threads:
            thread.start()
        ends = []
        for number in range(60):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # a child that waits for a lock is ended
                asyncio.run(store.sessions.save(f"c{number}", [user("child")]))
                os._exit(0)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        over.set()
        for thread in threads:
            thread.join()
        print(set(ends), len(asyncio.run(store.sessions.list(limit=None))))
    """
    end = run_python(code, str(tmp_path / "data"))
    assert (end.stdout, end.stderr) == ("{0} 61\n", "")
