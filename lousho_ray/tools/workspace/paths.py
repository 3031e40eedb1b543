"""Paths inside a workspace: which ones there are, and the patterns that select among them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

from lousho_ray.errors import ToolExecutionError
from lousho_ray.tools.text import replace_surrogates

_DRIVE = re.compile(r"[A-Za-z]:")


class WorkspaceError(ToolExecutionError):
    """A file operation that is refused or failed. Messages show paths of the workspace, never of the machine."""

    without_effect = True


def normalize_workspace_path(path: str) -> str:
    """A path relative to the workspace's root, with `/` between its parts and without `.` and `..`; the root is `.`.

    A backslash counts as a separator on every platform.

    Raises:
        WorkspaceError: For an absolute path, a drive letter, a network path, a NUL character, and `..` above the root.
    """
    if "\0" in path:
        raise WorkspaceError("A path cannot hold a NUL character.")
    slashed = path.replace("\\", "/")
    if slashed.startswith("/"):
        raise _absolute(path)
    parts: list[str] = []
    for part in slashed.split("/"):
        if part == "..":
            if not parts:
                raise WorkspaceError(f"{path!r} leads out of the workspace.")
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    # A drive may also stand behind `./`: what is left of such a path would be absolute the next time it is read.
    if parts and _DRIVE.match(parts[0]):
        raise _absolute(path)
    return "/".join(parts) or "."


def _absolute(path: str) -> WorkspaceError:
    return WorkspaceError(f"{path!r} is an absolute path; give one relative to the workspace, such as 'src/main.py'.")


class PathPattern:
    """A glob over workspace paths: `*` and `?` stay in one directory, `**` crosses, `[abc]`, `[!abc]`, `{a,b}`.

    Raises:
        WorkspaceError: For a pattern that cannot be read or leads out of the workspace.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        cleaned = pattern.replace("\\", "/").removeprefix("./").rstrip("/")
        if not cleaned or cleaned.startswith("/") or ".." in cleaned.split("/"):
            raise WorkspaceError(f"{pattern!r} is no pattern of paths inside the workspace, such as 'src/**/*.py'.")
        self._regex = compile_regex(_translate(cleaned, pattern))

    def matches(self, path: str) -> bool:
        return self._regex.fullmatch(replace_surrogates(path)) is not None

    def __reduce__(self) -> Any:
        return PathPattern, (self.pattern,)


def covers(patterns: Iterable[PathPattern], path: str) -> bool:
    """Whether any of the patterns matches `path` or a directory it is in."""
    parts = path.split("/")
    ways = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(pattern.matches(way) for pattern in patterns for way in ways)


def compile_regex(pattern: str, *, ignore_case: bool = False) -> Any:
    """A pattern that takes linear time whatever it is: models write patterns that would keep `re` busy for ever.

    Raises:
        WorkspaceError: For a pattern that is not valid, or needs more than linear time (look-around).
    """
    import re2  # type: ignore[import-untyped]

    options = re2.Options()
    options.log_errors = False
    options.case_sensitive = not ignore_case
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        raise WorkspaceError(f"{pattern!r} is no regular expression (RE2 syntax, without look-around): {reason}.") from error


@functools.lru_cache(maxsize=256)
def _translate(cleaned: str, pattern: str) -> str:
    out: list[str] = []
    index, depth = 0, 0
    while index < len(cleaned):
        rest = cleaned[index:]
        piece, length = _piece(rest, at_start=index == 0 or cleaned[index - 1] == "/", depth=depth)
        depth += {"{": 1, "}": -1}.get(rest[0], 0) if piece in {"(?:", ")"} else 0
        out.append(piece)
        index += length
    if depth:
        raise WorkspaceError(f"{pattern!r} has a brace that is not closed.")
    return "".join(out)


def _piece(rest: str, *, at_start: bool, depth: int) -> tuple[str, int]:
    """The regular expression for what `rest` begins with, and how many characters that is."""
    if rest.startswith("**/") and at_start:
        return "(?:[^/]+/)*", 3
    if rest.startswith("**"):
        return r"[\s\S]*", 2
    simple = {"*": "[^/]*", "?": "[^/]", "{": "(?:"}.get(rest[0])
    if simple is not None:
        return simple, 1
    if rest[0] == "[" and (end := rest.find("]", 2 + rest.startswith("[!"))) > 0:
        negated = rest[1] in "!^"
        members = re.sub(r"([\\\[\]^])", r"\\\1", rest[1 + negated : end])
        return f"[{'^/' if negated else ''}{members}]", end + 1
    if depth and rest[0] in "},":
        return {"}": ")", ",": "|"}[rest[0]], 1
    return re.escape(rest[0]), 1
