"""The file tools, over files in memory and on disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import ToolContext
from lousho_ray.tools import Tool, collect_tools
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.results import cap_result, encode_result
from lousho_ray.tools.workspace import LocalWorkspace, MemoryWorkspace, WorkspaceError, create_fs_tools


class Files:
    """A workspace and its tools."""

    def __init__(self, files: dict[str, str | bytes] | None = None, **options: Any) -> None:
        self.fs = MemoryWorkspace(files)
        self.tools = collect_tools(create_fs_tools(self.fs, **options))

    async def __call__(self, name: str, **arguments: Any) -> str:
        made: Tool[..., Any] = self.tools[name]
        result: str = await call_tool(made, made.parse(json.dumps(arguments)).value, ToolContext("c"))
        return result

    async def refusal(self, name: str, **arguments: Any) -> str:
        with pytest.raises(WorkspaceError) as caught:
            await self(name, **arguments)
        return caught.value.message


def test_tools_and_their_marks() -> None:  # WS-01, WS-09, PERM-29, PERM-32
    tools = Files().tools
    assert list(tools) == ["read_file", "write_file", "edit_file", "list_dir", "glob", "grep"]
    assert {name for name, made in tools.items() if made.read_only} == {"read_file", "list_dir", "glob", "grep"}
    assert {name for name, made in tools.items() if made.edits_files} == {"write_file", "edit_file"}
    assert not any(made.needs_approval for made in tools.values())
    assert list(Files(read_only=True).tools) == ["read_file", "list_dir", "glob", "grep"]


def test_schemas_show_only_what_the_model_fills_in() -> None:
    tools = Files().tools
    assert list(tools["read_file"].parameters["properties"]) == ["path", "offset", "limit"]
    assert list(tools["edit_file"].parameters["properties"]) == ["path", "old_string", "new_string", "replace_all"]
    assert list(tools["grep"].parameters["properties"]) == ["pattern", "path", "glob", "ignore_case"]


def test_approval_is_asked_per_tool() -> None:  # WS-02
    def big(args: Any) -> bool:
        return len(args["content"]) > 10

    tools = Files(needs_approval={"write_file": big, "edit_file": True}).tools
    assert tools["write_file"].needs_approval is big
    assert tools["edit_file"].needs_approval is True
    assert tools["read_file"].needs_approval is False
    with pytest.raises(ConfigurationError, match="Did you mean 'write_file'"):
        Files(needs_approval={"write_fil": True})


@pytest.mark.parametrize("option", ["max_read_lines", "max_output_chars", "max_results", "max_files_scanned"])
def test_limits_are_checked(option: str) -> None:
    for value in (0, True, 1.5):
        with pytest.raises(ConfigurationError) as caught:
            Files(**{option: value})
        assert caught.value.field == option
    with pytest.raises(ConfigurationError, match="protect"):
        Files(protect=["/etc"])


def test_tools_travel(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    made = pickle.loads(pickle.dumps(create_fs_tools(LocalWorkspace(tmp_path))))[0]
    assert made.function(path="a.txt") == "     1\tx"


# ---------------------------------------------------------------------------------------------------------------- reading


async def test_lines_are_numbered() -> None:  # WS-03
    files = Files({"a.txt": "one\ntwo\r\nthree", "empty": "", "odd": "a\x0cb\u2028c\n"})
    assert await files("read_file", path="a.txt") == "     1\tone\n     2\ttwo\n     3\tthree"
    assert await files("read_file", path="a.txt", offset=2, limit=1) == "     2\ttwo\n[lines 2 to 2 of 3; go on with offset=3]"
    assert await files("read_file", path="empty") == "[the file is empty]"
    assert await files("read_file", path="odd") == "     1\ta\x0cb\u2028c"
    assert "only 3 lines" in await files.refusal("read_file", path="a.txt", offset=4)


async def test_cut_output_says_how_to_go_on() -> None:  # WS-03, WS-02
    files = Files({"a": "\n".join(f"line {n}" for n in range(1, 101))}, max_read_lines=10)
    assert (await files("read_file", path="a")).endswith("\n[lines 1 to 10 of 100; go on with offset=11]")
    assert "[lines 1 to 10 of 100" in await files("read_file", path="a", limit=50)
    wide = Files({"a": "\n".join("x" * 100 for _ in range(100)), "b": "y" * 10_000 + "\nlast"}, max_output_chars=1_000)
    text = await wide("read_file", path="a")
    assert len(text) <= 1_000
    assert text.endswith("go on with offset=8]")
    long = await wide("read_file", path="b")
    assert len(long) <= 1_000
    assert "[lines 1 to 1 of 2; go on with offset=2]" in long


async def test_largest_output_passes_the_result_cap_uncut() -> None:  # chapter 20: built-ins keep inside their limit
    files = Files({"a": "\n".join('"quoted"\t' * 20 for _ in range(2_000)), **{f"d/{'n' * 200}{n}": "" for n in range(300)}})
    for text in (await files("read_file", path="a"), await files("list_dir", path="d"), await files("grep", pattern="q", path="a")):
        encoded = encode_result(text).text
        assert cap_result(encoded, 50_000) == encoded


async def test_what_is_no_text_file_is_refused() -> None:  # WS-03
    files = Files({"bin": b"a\0b", "big": b"x" * (10 * 1024 * 1024 + 1), "d/f": "", "latin": b"caf\xe9"})
    assert "binary" in await files.refusal("read_file", path="bin")
    assert "are not read" in await files.refusal("read_file", path="big")
    assert "a directory" in await files.refusal("read_file", path="d")
    assert "does not exist" in await files.refusal("read_file", path="nope")
    assert await files("read_file", path="latin") == "     1\tcaf\ufffd"


async def test_directories_are_listed_in_order() -> None:  # WS-03
    files = Files({"b.txt": "", "a/x": "", "c": "", ".git/x": ""})
    assert await files("list_dir") == ".git/\na/\nb.txt\nc"
    assert await files("list_dir", path="a") == "x"
    many = Files({f"f{n:03}": "" for n in range(30)}, max_results=5)
    assert await many("list_dir") == "f000\nf001\nf002\nf003\nf004\n[only the first 5 are shown; narrow the search]"


# ---------------------------------------------------------------------------------------------------------------- writing


async def test_written_files_and_their_directories_appear() -> None:  # WS-04
    files = Files()
    assert await files("write_file", path="a/b.txt", content="ä") == "Created a/b.txt (2 bytes)."
    assert await files("write_file", path="a/b.txt", content="x") == "Replaced a/b.txt (1 bytes)."
    assert files.fs.files == {"a/b.txt": b"x"}


async def test_edit_replaces_exact_text() -> None:  # WS-04
    files = Files({"a": b"one two one \xff"})
    assert await files("edit_file", path="a", old_string="two", new_string="2") == "Replaced 1 occurrence in a."
    assert await files("edit_file", path="a", old_string="one", new_string="1", replace_all=True) == "Replaced 2 occurrences in a."
    assert files.fs.files["a"] == b"1 2 1 \xff"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"old_string": "three"}, "does not occur"),
        ({"old_string": "one"}, "occurs 2 times"),
        ({"old_string": "b\nc"}, "CRLF"),
        ({"old_string": "two", "new_string": "two"}, "the same"),
        ({"old_string": "two", "path": "nope"}, "does not exist"),
    ],
)
async def test_edit_that_cannot_be_made_writes_nothing(arguments: dict[str, Any], says: str) -> None:  # WS-04
    before = b"one two one\na\r\nb\r\nc\r\n"
    files = Files({"a": before})
    assert says in await files.refusal("edit_file", **{"path": "a", "new_string": "X", **arguments})
    assert files.fs.files == {"a": before}


async def test_lf_file_and_crlf_text_get_the_other_hint() -> None:
    files = Files({"a": "b\nc\n"})
    assert "LF line ends" in await files.refusal("edit_file", path="a", old_string="b\r\nc", new_string="X")


async def test_parallel_edits_of_one_file_all_arrive() -> None:  # WS-18
    files = Files({"a": "".join(f"<{n}>" for n in range(30))})
    await asyncio.gather(*(files("edit_file", path="a", old_string=f"<{n}>", new_string=f"({n})") for n in range(30)))
    assert files.fs.files["a"].decode() == "".join(f"({n})" for n in range(30))


async def test_edit_does_not_read_while_another_one_is_between_read_and_write() -> None:  # WS-18
    together = threading.Barrier(2)

    class Slow(MemoryWorkspace):
        def read(self, path: str) -> bytes:
            content = super().read(path)
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(0.2)  # passes at once when both have read, which the lock prevents
            return content

    fs = Slow({"a": "one two"})
    edit = collect_tools(create_fs_tools(fs))["edit_file"]
    edits = [edit.parse_plain({"path": "a", "old_string": word, "new_string": word.upper()}).value for word in ("one", "two")]
    await asyncio.gather(*(call_tool(edit, value, ToolContext("c")) for value in edits))
    assert fs.files["a"] == b"ONE TWO"


async def test_protected_paths_are_not_written(tmp_path: Path) -> None:  # LES-33
    files = Files({"config/a.yaml": "x", "b": "x"}, protect=["config", "**/.env"])
    for path in ("config/a.yaml", "config/new/b", "x/../config/a.yaml", "sub/.env", "config"):
        assert "protected" in await files.refusal("write_file", path=path, content="y")
    assert "protected" in await files.refusal("edit_file", path="config/a.yaml", old_string="x", new_string="y")
    assert "Replaced" in await files("write_file", path="b", content="y")
    assert "x" in await files("read_file", path="config/a.yaml")

    (tmp_path / "config").mkdir()
    (tmp_path / "alias").symlink_to("config")
    linked = collect_tools(create_fs_tools(LocalWorkspace(tmp_path), protect=["config"]))
    with pytest.raises(WorkspaceError, match="protected"):
        linked["write_file"].function(path="alias/a", content="y", ctx=ToolContext("c"))


# -------------------------------------------------------------------------------------------------------------- searching

TREE: dict[str, str | bytes] = {
    "main.py": "import os\nprint('Hello')\n",
    "src/a.py": "hello = 1\n",
    "src/deep/b.py": "HELLO\n",
    "src/c.txt": "hello\n",
    "node_modules/x.py": "hello\n",
    "src/bin.py": b"hello\0",
}


async def test_glob_finds_sorted_paths() -> None:  # WS-05, WS-02
    files = Files(TREE)
    assert await files("glob", pattern="**/*.py") == "main.py\nsrc/a.py\nsrc/bin.py\nsrc/deep/b.py"
    assert await files("glob", pattern="*.py") == "main.py"
    assert await files("glob", pattern="*.{py,txt}", path="src") == "src/a.py\nsrc/bin.py\nsrc/c.txt"
    assert await files("glob", pattern="*.rs") == "[no file matches *.rs]"
    assert "no pattern" in await files.refusal("glob", pattern="/etc/*")
    assert "does not exist" in await files.refusal("glob", pattern="*", path="nope")


async def test_grep_finds_lines() -> None:  # WS-05
    files = Files(TREE)
    assert await files("grep", pattern="hello") == "src/a.py:1: hello = 1\nsrc/c.txt:1: hello"
    assert (
        await files("grep", pattern="^hello", path="src", glob="**/*.py", ignore_case=True)
        == "src/a.py:1: hello = 1\nsrc/deep/b.py:1: HELLO"
    )
    assert await files("grep", pattern=r"\(.*\)", path="main.py") == "main.py:2: print('Hello')"
    assert await files("grep", pattern="nothing") == "[nothing matches nothing]"
    assert "no regular expression" in await files.refusal("grep", pattern="(")


async def test_searches_are_bounded() -> None:  # WS-02, WS-05
    files = Files({f"f{n}": "hit\n" * 10 for n in range(10)}, max_results=12, max_files_scanned=5)
    found = await files("grep", pattern="hit")
    assert found.count("hit") == 12
    assert found.endswith("[only the first 12 are shown; narrow the search]")
    assert "[stopped after 5 files" in await files("grep", pattern="nothing")
    assert "[stopped after 5 files" in await files("glob", pattern="*")
    assert await Files({"big": b"hit\n" * 600_000})("grep", pattern="hit") == "[nothing matches hit]"
    assert len(await Files({"wide": "hit" * 1_000})("grep", pattern="hit")) < 600


async def test_searches_do_not_follow_links(tmp_path: Path) -> None:  # WS-05
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f.txt").write_text("hit\n")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "up").symlink_to("..")
    (tmp_path / "f.lnk").symlink_to("real/f.txt")
    tools = collect_tools(create_fs_tools(LocalWorkspace(tmp_path)))
    for name, arguments, expected in (
        ("glob", '{"pattern": "**"}', "real/f.txt"),
        ("grep", '{"pattern": "hit"}', "real/f.txt:1: hit"),
    ):
        made = tools[name]
        assert await call_tool(made, made.parse(arguments).value, ToolContext("c")) == expected


async def test_aborted_search_ends() -> None:
    files = Files(TREE)
    ctx = ToolContext("c")
    ctx.abort_signal.abort("stop")
    with pytest.raises(Exception, match="stop"):
        await call_tool(files.tools["glob"], {"pattern": "**", "path": "."}, ctx)
