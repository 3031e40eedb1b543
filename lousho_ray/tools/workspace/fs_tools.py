"""File tools over a workspace: `read_file`, `write_file`, `edit_file`, `list_dir`, `glob`, `grep`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from weakref import WeakValueDictionary

from pydantic import Field

from lousho_ray.errors import ConfigurationError, suggest
from lousho_ray.ports import ToolContext
from lousho_ray.tools.attributes import NeedsApproval, ToolAnnotations
from lousho_ray.tools.text import clip
from lousho_ray.tools.tool import Tool, tool
from lousho_ray.tools.workspace.checkpoints import WorkspaceCheckpoints
from lousho_ray.tools.workspace.paths import PathPattern, WorkspaceError, compile_regex, covers
from lousho_ray.tools.workspace.provider import Entry, FsProvider

MAX_READ_BYTES = 10 * 1024 * 1024
MAX_GREP_BYTES = 2 * 1024 * 1024
_MAX_LINE_CHARS = 500
_NOTE_CHARS = 200

Path = Annotated[str, Field(description="A path relative to the workspace, such as 'src/main.py'.")]
Directory = Annotated[str, Field(description="The directory to look in; the whole workspace by default.")]

_READ = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_WRITE = ToolAnnotations(read_only_hint=False, open_world_hint=False)
_READERS = ("read_file", "list_dir", "glob", "grep")
_WRITERS = ("write_file", "edit_file")


@dataclass(frozen=True, slots=True)
class FsLimits:
    """How much the tools return and look at."""

    max_read_lines: int = 2_000
    max_output_chars: int = 50_000
    max_results: int = 200
    max_files_scanned: int = 20_000

    def __post_init__(self) -> None:
        for name in ("max_read_lines", "max_output_chars", "max_results", "max_files_scanned"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"`{name}` is {value!r}; it is a whole number from 1.", field=name)


class _PathLocks:
    """One lock per path, so that edits of one file do not overwrite each other. Not shared with other processes."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # Weak, so that a lock goes when nobody holds or awaits it: a long session touches many paths.
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def of(self, path: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(path, threading.Lock())

    def __reduce__(self) -> Any:
        return _PathLocks, ()


@dataclass(frozen=True, slots=True)
class FsTools:
    """What the file tools run."""

    fs: FsProvider
    limits: FsLimits
    ignore: frozenset[str]
    protect: tuple[PathPattern, ...]
    checkpoints: WorkspaceCheckpoints | None = None
    locks: _PathLocks = field(default_factory=_PathLocks)

    def read_file(
        self,
        path: Path,
        offset: Annotated[int, Field(ge=1, description="The first line to read, from 1.")] = 1,
        limit: Annotated[int | None, Field(ge=1, description="How many lines to read.")] = None,
    ) -> str:
        """Reads a text file. Every line begins with its number and a tab, which are not part of the file."""
        lines = _lines(_decode(path, self._content(path)))
        if offset > max(1, len(lines)):
            raise WorkspaceError(f"{path} has only {len(lines)} lines.")
        room = self.limits.max_output_chars - _NOTE_CHARS
        shown: list[str] = []
        count = min(limit or self.limits.max_read_lines, self.limits.max_read_lines)
        for number, line in enumerate(lines[offset - 1 : offset - 1 + count], offset):
            text = f"{number:>6}\t{line}"
            if len(text) > room and shown:
                break
            shown.append(clip(text, max(room, 1)))
            room -= len(shown[-1]) + 1
        last = offset + len(shown) - 1
        if last < len(lines):
            shown.append(f"[lines {offset} to {last} of {len(lines)}; go on with offset={last + 1}]")
        return "\n".join(shown) or "[the file is empty]"

    def write_file(
        self, path: Path, content: Annotated[str, Field(description="The whole content of the file.")], ctx: ToolContext
    ) -> str:
        """Writes a file, with the directories above it. What the file held before is replaced."""
        target = self._writable(path)
        data = content.encode()
        with self.locks.of(target):
            existed = self.fs.stat(target) is not None
            self._write(ctx, target, data)
        return f"{'Replaced' if existed else 'Created'} {path} ({len(data)} bytes)."

    def edit_file(
        self,
        path: Path,
        old_string: Annotated[str, Field(min_length=1, description="The exact text to replace, without line numbers.")],
        new_string: Annotated[str, Field(description="What to put in its place.")],
        ctx: ToolContext,
        replace_all: Annotated[bool, Field(description="Replace every occurrence instead of the only one.")] = False,
    ) -> str:
        """Replaces a text in a file. The text must occur exactly once, unless all occurrences are to be replaced."""
        target = self._writable(path)
        with self.locks.of(target):
            content = self._content(target).decode("utf-8", "surrogateescape")
            count = content.count(old_string)
            if old_string == new_string:
                raise WorkspaceError("old_string and new_string are the same.")
            if count == 0:
                raise WorkspaceError(f"old_string does not occur in {path}.{_line_end_hint(content, old_string)}")
            if count > 1 and not replace_all:
                raise WorkspaceError(f"old_string occurs {count} times in {path}: add lines around it, or set replace_all.")
            self._write(ctx, target, content.replace(old_string, new_string).encode("utf-8", "surrogateescape"))
        return f"Replaced {count} {'occurrence' if count == 1 else 'occurrences'} in {path}."

    def list_dir(self, path: Directory = ".") -> str:
        """Lists a directory. Names of directories end with a slash."""
        names = sorted(entry.name + ("/" if entry.kind == "dir" else "") for entry in self.fs.list(path))
        return self._joined(names, len(names) > self.limits.max_results) or "[the directory is empty]"

    def glob(
        self,
        pattern: Annotated[str, Field(description="Such as 'src/**/*.py' or '*.{md,txt}', relative to `path`.")],
        ctx: ToolContext,
        path: Directory = ".",
    ) -> str:
        """Finds files by a pattern: `*` stays in one directory, `**` crosses directories, `?`, `[abc]`, `{a,b}`."""
        wanted, base = PathPattern(pattern), self.fs.resolve(path)
        start = "" if base == "." else f"{base}/"
        walk = _Walk(self.fs, self.ignore, self.limits.max_files_scanned, ctx)
        found = sorted(file for file, _ in walk.files(base) if wanted.matches(file.removeprefix(start)))
        return self._joined(found, len(found) > self.limits.max_results, walk.note()) or f"[no file matches {pattern}]{walk.note()}"

    def grep(
        self,
        pattern: Annotated[str, Field(description="A regular expression (RE2 syntax, without look-around).")],
        ctx: ToolContext,
        path: Annotated[str, Field(description="A file or the directory to look in; the whole workspace by default.")] = ".",
        glob: Annotated[str | None, Field(description="Only files that match this pattern, such as '**/*.py'.")] = None,
        ignore_case: bool = False,
    ) -> str:
        """Searches files for lines that match a regular expression. Answers `path:line: text`."""
        regex, base = compile_regex(pattern, ignore_case=ignore_case), self.fs.resolve(path)
        wanted = None if glob is None else PathPattern(glob)
        walk = _Walk(self.fs, self.ignore, self.limits.max_files_scanned, ctx)
        start = "" if base == "." else f"{base}/"
        hits: list[str] = []
        for file, size_bytes in walk.files(base):
            if size_bytes <= MAX_GREP_BYTES and (wanted is None or wanted.matches(file.removeprefix(start))):
                hits.extend(self._hits(file, regex))
                if len(hits) > self.limits.max_results:
                    break
        return self._joined(hits, len(hits) > self.limits.max_results, walk.note()) or f"[nothing matches {pattern}]{walk.note()}"

    def _hits(self, file: str, regex: Any) -> Iterator[str]:
        try:
            data = self.fs.read(file)
        except WorkspaceError:  # gone, or not readable: not a reason to fail the search
            return
        if b"\0" not in data:
            for number, line in enumerate(_lines(data.decode("utf-8", "replace")), 1):
                if regex.search(line):
                    yield f"{file}:{number}: {clip(line, _MAX_LINE_CHARS)}"

    def _joined(self, lines: list[str], more: bool, note: str = "") -> str:
        """The first lines that fit, and how many there would be."""
        shown, room = [], self.limits.max_output_chars - _NOTE_CHARS
        for line in lines[: self.limits.max_results]:
            room -= len(line) + 1
            if room < 0:
                break
            shown.append(line)
        if more or len(shown) < len(lines):
            shown.append(f"[only the first {len(shown)} are shown; narrow the search]")
        return "\n".join(shown) + (note if shown else "")

    def _content(self, path: str) -> bytes:
        entry = self.fs.stat(path)
        if entry is None:
            raise WorkspaceError(f"{path} does not exist.")
        if entry.kind != "file":
            raise WorkspaceError(f"{path} is {'a directory' if entry.kind == 'dir' else 'no file'}.")
        if entry.size_bytes > MAX_READ_BYTES:
            raise WorkspaceError(f"{path} has {entry.size_bytes} bytes; files over {MAX_READ_BYTES} bytes are not read.")
        return self.fs.read(path)

    def _write(self, ctx: ToolContext, target: str, data: bytes) -> None:
        if self.checkpoints is None:
            self.fs.write(target, data)
        else:
            self.checkpoints.write(ctx, target, data)

    def _writable(self, path: str) -> str:
        target = self.fs.resolve(path)
        if covers(self.protect, target):
            raise WorkspaceError(f"{path} is protected and cannot be written.")
        return target


@dataclass(slots=True)
class _Walk:
    """Goes through the files below a directory in order, without following links."""

    fs: FsProvider
    ignore: frozenset[str]
    max_files: int
    ctx: ToolContext
    scanned: int = 0
    cut: bool = False

    def files(self, base: str) -> Iterator[tuple[str, int]]:
        """Paths and sizes in bytes. Ends early when the run is aborted."""
        entry = self.fs.stat(base)
        if entry is None:
            raise WorkspaceError(f"{base} does not exist.")
        if entry.kind == "file":
            yield base, entry.size_bytes
            return
        pending = [base]
        while pending:
            self.ctx.abort_signal.raise_if_aborted()
            directory = pending.pop()
            start = "" if directory == "." else f"{directory}/"
            entries = sorted(self._list(directory, base), key=lambda e: e.name, reverse=True)
            pending.extend(start + e.name for e in entries if e.kind == "dir")
            for found in reversed(entries):
                if found.kind == "file":
                    self.scanned += 1
                    if self.scanned > self.max_files:
                        self.cut = True
                        return
                    yield start + found.name, found.size_bytes

    def _list(self, directory: str, base: str) -> list[Entry]:
        try:
            return [entry for entry in self.fs.list(directory) if entry.name not in self.ignore]
        except WorkspaceError:  # gone meanwhile, or not readable: not a reason to fail the search, unless it was asked for
            if directory == base:
                raise
            return []

    def note(self) -> str:
        return f"\n[stopped after {self.max_files} files; look in a smaller directory]" if self.cut else ""


def _decode(path: str, data: bytes) -> str:
    if b"\0" in data:
        raise WorkspaceError(f"{path} is a binary file ({len(data)} bytes).")
    return data.decode("utf-8-sig", "replace")


def _lines(text: str) -> list[str]:
    """The lines as editors count them: only a line feed ends one."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if not lines[-1] else lines)]


def _line_end_hint(content: str, old_string: str) -> str:
    if "\r\n" in content and old_string.replace("\r\n", "\n").replace("\n", "\r\n") in content:
        return " The file has CRLF line ends: write them as \\r\\n in old_string."
    if "\r\n" in old_string and old_string.replace("\r\n", "\n") in content:
        return " The file has LF line ends: write \\n in old_string."
    return ""


def create_fs_tools(
    fs: FsProvider,
    *,
    read_only: bool = False,
    max_read_lines: int = 2_000,
    max_output_chars: int = 50_000,
    max_results: int = 200,
    max_files_scanned: int = 20_000,
    ignore: Iterable[str] = (".git", "node_modules"),
    protect: Iterable[str] = (),
    needs_approval: Mapping[str, NeedsApproval] | None = None,
    checkpoints: WorkspaceCheckpoints | None = None,
) -> list[Tool[..., Any]]:
    """The file tools over a workspace.

    Args:
        fs: The workspace: `LocalWorkspace(root)`, `MemoryWorkspace(files)` or another `FsProvider`.
        read_only: Leaves out `write_file` and `edit_file`.
        max_read_lines: The most lines one `read_file` returns.
        max_output_chars: The most characters one call returns.
        max_results: The most entries of `list_dir`, `glob` and `grep`.
        max_files_scanned: The most files `glob` and `grep` look at.
        ignore: Names of files and directories that `glob` and `grep` pass over.
        protect: Patterns of paths that are never written, such as `["config", "**/.env"]`; a directory covers what is in it.
        needs_approval: Per tool name, `True` or a function of the arguments. None asks by default.
        checkpoints: Remembers files before they are changed, so that turns can be undone.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for a limit below 1, a bad pattern or an unknown tool name.
    """
    limits = FsLimits(max_read_lines, max_output_chars, max_results, max_files_scanned)
    tools = FsTools(fs, limits, frozenset(ignore), _patterns(protect), checkpoints)
    names = _READERS if read_only else ("read_file", *_WRITERS, *_READERS[1:])
    asks = dict(needs_approval or {})
    for name in asks:
        if name not in (*_READERS, *_WRITERS):
            raise ConfigurationError(
                f"`needs_approval` names {name!r}, which is no file tool.{suggest(name, names)}", field="needs_approval"
            )
    return [
        tool(
            annotations=_READ if name in _READERS else _WRITE,
            edits_files=name in _WRITERS,
            needs_approval=asks.get(name, False),
        )(getattr(tools, name))
        for name in names
    ]


def _patterns(globs: Iterable[str]) -> tuple[PathPattern, ...]:
    try:
        return tuple(PathPattern(pattern) for pattern in globs)
    except WorkspaceError as error:
        raise ConfigurationError(f"`protect`: {error.message}", field="protect") from error
