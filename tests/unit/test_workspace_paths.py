"""Paths and patterns of a workspace, and what its providers keep inside it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.errors import ConfigurationError
from lousho_ray.tools.workspace import LocalWorkspace, MemoryWorkspace, WorkspaceError, local, normalize_workspace_path
from lousho_ray.tools.workspace.paths import PathPattern, compile_regex, covers
from lousho_ray.tools.workspace.provider import FsProvider


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "secret.txt").write_text("secret")
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    directory.mkdir()
    return directory


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        (".", "."),
        ("", "."),
        ("a//b/./c/", "a/b/c"),
        ("a/../b", "b"),
        ("a\\b", "a/b"),
        ("./a", "a"),
        ("a/..", "."),
        ("a b", "a b"),
        ("...", "..."),
    ],
)
def test_paths_have_one_spelling(path: str, normal: str) -> None:  # WS-06
    assert normalize_workspace_path(path) == normal


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "a/../..",
        "../a",
        "a\\..\\..\\b",
        "/etc/passwd",
        "\\etc",
        "//host/share",
        "\\\\host\\share",
        "C:\\x",
        "c:x",
        "C:/x",
        ".\\c:",
        "a/../c:x",
        "a\0b",
    ],
)
def test_paths_that_lead_out_are_refused(path: str) -> None:  # WS-06
    with pytest.raises(WorkspaceError) as caught:
        normalize_workspace_path(path)
    assert caught.value.code == "LOUSHO_TOOL_EXECUTION_FAILED"


@given(st.text(alphabet="./\\ab:\0", max_size=20))
def test_no_path_leads_out(path: str) -> None:
    try:
        normal = normalize_workspace_path(path)
    except WorkspaceError:
        return
    assert os.path.normpath(os.path.join("/root", normal)).startswith("/root")
    assert normalize_workspace_path(normal) == normal


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("*.py", ["a.py", ".py"], ["a/b.py", "a.pyc", "a.PY"]),
        ("**/*.py", ["a.py", "a/b.py", "a/b/c.py"], ["a.txt"]),
        ("src/**", ["src/a", "src/a/b"], ["src", "a/src/b"]),
        ("src/**/x", ["src/x", "src/a/b/x"], ["srcx"]),
        ("a?c", ["abc"], ["a/c", "ac"]),
        ("[abc].t", ["a.t"], ["d.t"]),
        ("[!abc].t", ["d.t"], ["a.t", "/.t"]),
        ("[a-c].t", ["b.t"], ["-.t"]),
        ("*.{md,txt}", ["a.md", "a.txt"], ["a.rst"]),
        ("{a,b/{c,d}}.x", ["a.x", "b/c.x", "b/d.x"], ["b.x"]),
        ("a,b}", ["a,b}"], ["a"]),
        ("a.b+c(d)$", ["a.b+c(d)$"], ["axb+c(d)$"]),
        ("./a", ["a"], []),
        ("ä*", ["äö"], []),
    ],
)
def test_patterns(pattern: str, matching: list[str], other: list[str]) -> None:  # WS-05
    made = pickle.loads(pickle.dumps(PathPattern(pattern)))
    assert [path for path in matching + other if made.matches(path)] == matching


@pytest.mark.parametrize("pattern", ["", "/a", "../a", "a/../b", "{a,b", "a{b{c}"])
def test_bad_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(WorkspaceError):
        PathPattern(pattern)


def test_directory_covers_what_is_in_it() -> None:  # LES-33
    patterns = [PathPattern("config/"), PathPattern("**/.env")]
    assert [p for p in ("config", "config/a/b", ".env", "x/.env", "x/config", "configs", "x/.envrc") if covers(patterns, p)] == [
        "config",
        "config/a/b",
        ".env",
        "x/.env",
    ]


def test_patterns_of_models_take_linear_time() -> None:  # chapter 20: grep needs a bound
    assert compile_regex("(a+)+$").search("a" * 100_000 + "b") is None
    assert PathPattern("*a" * 50).matches("a" * 5_000 + "b") is False
    for bad in ("(", "(?=a)", r"(a)\1", "a{1000}{1000}"):
        with pytest.raises(WorkspaceError):
            compile_regex(bad)


# ------------------------------------------------------------------------------------------------------------- providers


def in_memory(root: Path) -> FsProvider:
    return MemoryWorkspace()


@pytest.fixture(params=[LocalWorkspace, in_memory], ids=["local", "memory"])
def fs(request: pytest.FixtureRequest, root: Path) -> FsProvider:
    make: Callable[[Path], FsProvider] = request.param
    return make(root)


def test_files_are_written_read_listed_and_removed(fs: FsProvider) -> None:  # WS-21
    fs.write("a/b/c.txt", b"one")
    fs.write("a/d.txt", b"two")
    fs.write("a/d.txt", b"three")
    assert fs.read("a\\b\\c.txt") == b"one"
    assert sorted((e.name, e.kind, e.size_bytes) for e in fs.list("a") if e.kind == "file") == [("d.txt", "file", 5)]
    assert [e.name for e in fs.list("a") if e.kind == "dir"] == ["b"]
    assert [e.name for e in fs.list(".")] == ["a"]
    found = fs.stat("a/d.txt")
    assert found is not None
    assert (found.kind, found.size_bytes) == ("file", 5)
    assert fs.stat("a/b").kind == "dir"  # type: ignore[union-attr]
    assert fs.stat("a/x") is None
    assert fs.stat("a/d.txt/x") is None
    fs.remove("a/d.txt")
    assert fs.stat("a/d.txt") is None
    assert fs.resolve("a/./x/../b") == "a/b"


@pytest.mark.parametrize(
    ("operation", "path"),
    [
        ("read", "x"),
        ("read", "a"),
        ("list", "x"),
        ("list", "a/f"),
        ("remove", "x"),
        ("remove", "a"),
        ("write", "a"),
        ("write", "a/f/x"),
        ("write", "."),
    ]
    + [
        (operation, path)
        for operation in ("read", "list", "remove", "write", "stat", "resolve")
        for path in ("../x", "/etc/passwd", "a\0")
    ],
)
def test_failures_are_workspace_errors_without_host_paths(fs: FsProvider, root: Path, operation: str, path: str) -> None:  # WS-08
    fs.write("a/f", b"")
    arguments: tuple[Any, ...] = (path, b"x") if operation == "write" else (path,)
    with pytest.raises(WorkspaceError) as caught:
        getattr(fs, operation)(*arguments)
    assert str(root) not in str(caught.value)


@pytest.mark.parametrize("kind", [LocalWorkspace, MemoryWorkspace])
def test_workspaces_travel(kind: Any, root: Path) -> None:
    fs = LocalWorkspace(root) if kind is LocalWorkspace else MemoryWorkspace({"a": "b"})
    fs.write("x", b"y")
    assert pickle.loads(pickle.dumps(fs)).read("x") == b"y"


@pytest.mark.parametrize("missing", ["nothing", "file"])
def test_root_must_be_a_directory(tmp_path: Path, missing: str) -> None:  # WS-08
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError) as caught:
        LocalWorkspace(tmp_path / missing)
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"


def test_local_workspace_is_refused_on_another_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # chapter 20, Ray
    fs = LocalWorkspace(root)
    monkeypatch.setattr(local, "_machine", lambda: "other/boot")
    with pytest.raises(ConfigurationError, match="belongs to machine"):
        fs.list(".")


def test_links_out_of_the_root_are_refused(root: Path, outside: Path) -> None:  # WS-07
    (root / "dir").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret.txt")
    (root / "up").symlink_to("..")
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "dangling_out").symlink_to(outside / "new.txt")
    (root / "loop").symlink_to("loop")
    fs = LocalWorkspace(root)
    for path in ("dir/secret.txt", "file", "up/outside/secret.txt", "dangling", "dangling_out", "loop", "loop/x"):
        with pytest.raises(WorkspaceError):
            fs.read(path)
        with pytest.raises(WorkspaceError):
            fs.write(path, b"x")
        with pytest.raises(WorkspaceError):
            fs.stat(path)
    for path in ("dir/new.txt", "dir/new/x.txt"):
        with pytest.raises(WorkspaceError):
            fs.write(path, b"x")
    assert sorted(os.listdir(outside)) == ["secret.txt"]
    assert (outside / "secret.txt").read_text() == "secret"


def test_links_inside_the_root_are_followed_and_removed_themselves(root: Path) -> None:  # WS-07
    (root / "real").mkdir()
    (root / "real" / "f").write_text("x")
    (root / "link").symlink_to("real")
    fs = LocalWorkspace(root)
    assert fs.resolve("link/f") == "real/f"
    fs.write("link/f", b"y")
    assert (root / "real" / "f").read_bytes() == b"y"
    assert {e.name: e.kind for e in fs.list(".")} == {"real": "dir", "link": "link"}
    fs.remove("link")
    assert (root / "real" / "f").exists()


def test_link_as_root_is_its_target(tmp_path: Path, root: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    fs = LocalWorkspace(tmp_path / "alias")
    fs.write("x", b"y")
    assert (root / "x").read_bytes() == b"y"


def test_mode_of_a_file_is_kept(root: Path) -> None:
    (root / "run.sh").write_text("old")
    (root / "run.sh").chmod(0o750)
    LocalWorkspace(root).write("run.sh", b"new")
    assert (root / "run.sh").stat().st_mode & 0o777 == 0o750
    assert os.listdir(root) == ["run.sh"]


def test_named_pipe_is_no_file(root: Path) -> None:
    os.mkfifo(root / "pipe")
    fs = LocalWorkspace(root)
    with pytest.raises(WorkspaceError, match="no file"):
        fs.read("pipe")
    assert fs.stat("pipe").kind == "other"  # type: ignore[union-attr]


def test_name_that_is_no_utf8_is_listed(root: Path) -> None:  # W22
    with open(os.fsencode(root) + b"/bad\xff", "wb"):
        pass
    assert len(LocalWorkspace(root).list(".")) == 1
