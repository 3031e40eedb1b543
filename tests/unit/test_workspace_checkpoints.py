"""Undoing what the file tools did, turn by turn."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import assistant, user
from lousho_ray.ports import ToolContext
from lousho_ray.tools import collect_tools
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.workspace import (
    FileWorkspaceCheckpointStore,
    LocalWorkspace,
    MemoryWorkspace,
    WorkspaceCheckpoints,
    WorkspaceError,
    create_fs_tools,
)


class Editor:
    """An agent that writes files in the turns of a session."""

    def __init__(self, fs: Any, **options: Any) -> None:
        self.fs = fs
        self.checkpoints = WorkspaceCheckpoints(fs, **options)
        self.tools = collect_tools(create_fs_tools(fs, checkpoints=self.checkpoints))

    async def write(self, path: str, content: str, turn: int = 0, session: str | None = "s") -> None:
        messages = [message for n in range(turn + 1) for message in (user(f"{n}"), assistant("ok"))][:-1]
        ctx = ToolContext("c", messages=messages, session_id=session)
        made = self.tools["write_file"]
        await call_tool(made, made.parse_plain({"path": path, "content": content}).value, ctx)


def turns(checkpoints: WorkspaceCheckpoints, session: str | None = "s") -> list[tuple[int, list[str]]]:
    return [(changed.turn, changed.paths) for changed in checkpoints.list(session)]


async def test_rewind_restores_deletes_and_forgets() -> None:  # WS-15, WS-16, WS-23
    fs = MemoryWorkspace({"kept": "k", "a": "old"})
    editor = Editor(fs)
    await editor.write("a", "first", turn=0)
    await editor.write("a", "second", turn=1)
    await editor.write("dir/new", "n", turn=1)
    await editor.write("a", "third", turn=2)
    assert turns(editor.checkpoints) == [(0, ["a"]), (1, ["a", "dir/new"]), (2, ["a"])]

    planned = editor.checkpoints.rewind(1, "s", dry_run=True)
    assert (planned.dry_run, planned.restored, planned.deleted, planned.skipped) == (True, ["a"], ["dir/new"], {})
    assert fs.files["a"] == b"third"

    done = editor.checkpoints.rewind(1, "s")
    assert (done.dry_run, done.restored, done.deleted) == (False, ["a"], ["dir/new"])
    assert fs.files == {"kept": b"k", "a": b"first"}
    assert turns(editor.checkpoints) == [(0, ["a"])]
    again = editor.checkpoints.rewind(1, "s")
    assert (again.restored, again.deleted, again.skipped) == ([], [], {})
    editor.checkpoints.rewind(0, "s")
    assert fs.files == {"kept": b"k", "a": b"old"}


async def test_edits_are_remembered_too() -> None:  # WS-15
    fs = MemoryWorkspace({"a": "one two"})
    editor = Editor(fs)
    made = editor.tools["edit_file"]
    arguments = made.parse_plain({"path": "./a", "old_string": "one", "new_string": "1"}).value
    await call_tool(made, arguments, ToolContext("c", session_id="s.turn-4", messages=[user("x")]))
    assert turns(editor.checkpoints) == [(0, ["a"])]
    editor.checkpoints.rewind(0, "s")
    assert fs.files["a"] == b"one two"


async def test_only_the_first_write_of_a_turn_keeps_content() -> None:  # WS-17
    fs = MemoryWorkspace({"a": "old"})
    editor = Editor(fs)
    for content in ("1", "2", "3"):
        await editor.write("a", content)
    editor.checkpoints.rewind(0, "s")
    assert fs.files["a"] == b"old"


async def test_file_changed_by_others_is_skipped_unless_forced() -> None:  # WS-17, WS-23
    fs = MemoryWorkspace({"a": "old", "b": "old"})
    editor = Editor(fs)
    for path in ("a", "b", "c"):
        await editor.write(path, "agent")
    fs.write("a", b"person")
    fs.remove("c")
    assert editor.checkpoints.rewind(0, "s", dry_run=True).skipped == {"a": "changed-since"}
    forced = editor.checkpoints.rewind(0, "s", dry_run=True, force=True)
    assert (forced.restored, forced.skipped) == (["a", "b"], {})
    done = editor.checkpoints.rewind(0, "s")
    assert done.skipped == {"a": "changed-since"}
    assert fs.files == {"a": b"person", "b": b"old"}
    assert editor.checkpoints.rewind(0, "s", force=True).restored == []


async def test_large_file_is_never_restored_nor_deleted() -> None:  # WS-17
    fs = MemoryWorkspace({"a": "x" * 11})
    editor = Editor(fs, max_file_bytes=10)
    await editor.write("a", "small")
    assert editor.checkpoints.rewind(0, "s", force=True).skipped == {"a": "too-large"}
    assert fs.files["a"] == b"small"


async def test_sessions_are_apart_and_runs_without_one_share_a_default() -> None:  # WS-15
    fs = MemoryWorkspace()
    editor = Editor(fs)
    await editor.write("a", "1", session="s")
    await editor.write("b", "1", turn=3, session=None)
    assert turns(editor.checkpoints, "s") == [(0, ["a"])]
    assert turns(editor.checkpoints, None) == turns(editor.checkpoints, "default") == [(0, ["b"])]
    editor.checkpoints.rewind(0)
    assert fs.files == {"a": b"1"}


async def test_old_turns_are_dropped_and_cannot_be_gone_back_to() -> None:  # WS-15, WS-23
    fs = MemoryWorkspace()
    editor = Editor(fs, max_turns=2)
    for turn in range(4):
        await editor.write("a", f"{turn}", turn=turn)
    assert [turn for turn, _ in turns(editor.checkpoints)] == [2, 3]
    with pytest.raises(WorkspaceError, match="oldest turn to go back to is 2"):
        editor.checkpoints.rewind(1, "s")
    editor.checkpoints.rewind(2, "s")
    assert fs.files["a"] == b"1"


async def test_disk_keeps_modes_directories_and_backups(tmp_path: Path) -> None:  # WS-15, WS-18, WS-23
    root, kept = tmp_path / "root", tmp_path / "backups"
    root.mkdir()
    (root / "run.sh").write_text("old")
    (root / "run.sh").chmod(0o750)
    fs, store = LocalWorkspace(root), FileWorkspaceCheckpointStore(kept)
    editor = Editor(fs, store=store)
    await editor.write("run.sh", "new", session="a/b")
    await editor.write("made/x", "new", session="a/b")
    (root / "run.sh").chmod(0o600)
    assert os.listdir(kept) == ["a%2Fb.json"]
    assert json.loads((kept / "a%2Fb.json").read_text())["turns"]["0"].keys() == {"run.sh", "made/x"}

    reopened = pickle.loads(pickle.dumps(WorkspaceCheckpoints(fs, store=store)))
    reopened.rewind(0, "a/b")
    assert (root / "run.sh").read_text() == "old"
    assert (root / "run.sh").stat().st_mode & 0o777 == 0o750
    assert os.listdir(root / "made") == []


async def test_failed_write_leaves_a_harmless_backup() -> None:
    fs = MemoryWorkspace({"dir/f": "x"})
    editor = Editor(fs)
    with pytest.raises(WorkspaceError):
        await editor.write("dir/f/below", "x")
    editor.checkpoints.rewind(0, "s")
    assert fs.files == {"dir/f": b"x"}


@pytest.mark.parametrize("option", ["max_turns", "max_file_bytes"])
def test_limits_are_checked(option: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        WorkspaceCheckpoints(MemoryWorkspace(), **{option: 0})  # type: ignore[arg-type]
    assert caught.value.field == option
