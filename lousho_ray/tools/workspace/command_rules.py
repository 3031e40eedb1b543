"""Which commands a shell tool runs: `allow` and `deny` patterns over a command line.

A guard against mistakes, not a sandbox: a command that is allowed may start anything itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lousho_ray.errors import ConfigurationError
from lousho_ray.tools.workspace.paths import WorkspaceError


@dataclass(frozen=True, slots=True)
class Exact:
    """A pattern that matches one whole command line."""

    command: str


def exact(command: str) -> Exact:
    """Matches `command` as a whole. A plain string also admits every flag behind it, flags that write files included."""
    return Exact(command)


CommandPattern: TypeAlias = str | Exact | re.Pattern[str] | Callable[[Sequence[str]], bool]
"""A string (the command, or the string and more behind a blank), `exact(...)`, a compiled regular expression (searched in the whole
line), or a function of the split argument list (asked only about commands whose words the shell leaves as they are)."""

_OPERATORS = {"sh": re.compile(r"[;&|`<>\n\r]|\$\("), "cmd": re.compile(r"[;&|`<>\n\r%^]|\$\(")}
_SEPARATORS = re.compile(r"[;&|\n\r()`{}]+")
_QUOTED = re.compile(r"""'[^']*'|\\.|"(?:[^"\\$`]|\\.)*\"""")
_EXPANDED = re.compile(r"[$*?\[~{#!\"]")
"""What a shell turns into other words unless it is quoted. A quotation mark that is left has an expansion behind it."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_REDIRECTION = re.compile(r"\d*[<>]+&?\s*\S+")
_KEYWORDS = frozenset({"!", "if", "then", "elif", "else", "while", "until", "do", "time"})
_RUNNERS = frozenset({"builtin", "command", "env", "eval", "exec", "nice", "nohup", "sudo", "xargs"})
"""Words that another command follows."""


@dataclass(frozen=True, slots=True)
class CommandRules:
    """The patterns of one shell tool. Without `allow` every command passes that `deny` does not match.

    `shell` is the kind of shell that runs the command: `sh` or `cmd`. It decides which characters join or change commands.
    """

    allow: tuple[CommandPattern, ...] | None = None
    deny: tuple[CommandPattern, ...] = ()
    shell: str = "sh"

    @classmethod
    def of(cls, allow: Iterable[Any] | None = None, deny: Iterable[Any] = (), shell: str = "sh") -> CommandRules:
        """Raises `ConfigurationError` (`LOUSHO_CONFIG_INVALID`) for what is no pattern."""
        if shell not in _OPERATORS:
            raise ConfigurationError(f"`shell` is {shell!r}; it is 'sh' or 'cmd'.", field="shell")
        return cls(None if allow is None else _patterns("allow", allow), _patterns("deny", deny), shell)

    def check(self, command: str) -> None:
        """Raises `WorkspaceError` for a command that may not run."""
        line = command.strip(" \t\n")
        if not line or "\0" in line:
            raise WorkspaceError("The command is empty." if not line else "A command cannot hold a NUL character.")
        if any(self._denies(pattern, line) for pattern in self.deny):
            raise WorkspaceError(f"The command is not allowed here: {line[:200]}")
        if self.allow is not None and not any(self._allows(pattern, line) for pattern in self.allow):
            joined = " It joins commands or redirects, which no allowed pattern covers." if self._operators.search(line) else ""
            raise WorkspaceError(f"The command is not among the allowed ones: {line[:200]}.{joined or self._advice(line)}")

    def _advice(self, line: str) -> str:
        by_function = any(callable(pattern) for pattern in self.allow or ())
        return " Write its arguments out: what the shell would expand cannot be judged." if by_function and not _plain(line) else ""

    @property
    def _operators(self) -> re.Pattern[str]:
        return _OPERATORS[self.shell]

    def _allows(self, pattern: CommandPattern, line: str) -> bool:
        if isinstance(pattern, Exact):
            return line == pattern.command.strip()
        if isinstance(pattern, re.Pattern):
            return pattern.search(line) is not None
        # A simple pattern speaks of a simple command: what stands behind an operator would run unseen.
        if self._operators.search(line) or not _parses(line):
            return False
        return _matches(pattern, line) if isinstance(pattern, str) else _plain(line) and bool(pattern(shlex.split(line)))

    def _denies(self, pattern: CommandPattern, line: str) -> bool:
        if isinstance(pattern, re.Pattern):
            return pattern.search(line) is not None
        parts = [line, *(part.strip() for part in _SEPARATORS.split(line))]
        if isinstance(pattern, Exact):
            return pattern.command.strip() in parts
        commands = [_command(part) for part in parts if part]
        if isinstance(pattern, str):
            return any(_matches(pattern, text) for text in (*parts, *map(" ".join, commands)))
        return any(pattern(arguments) for arguments in commands if arguments)


def _matches(pattern: str, line: str) -> bool:
    wanted = pattern.strip()
    return line == wanted or (line.startswith(wanted) and line[len(wanted)] in " \t")


def _command(part: str) -> list[str]:
    """The words of the command in a part of a line: unquoted, without what stands before it, by its name and not by its path."""
    words = _words(_REDIRECTION.sub(" ", part))
    while words and (words[0] in _KEYWORDS | _RUNNERS or _ASSIGNMENT.match(words[0])):
        del words[0]
    return [words[0].rpartition("/")[2] or words[0], *words[1:]] if words else []


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _parses(line: str) -> bool:
    """Whether every quotation is closed."""
    try:
        shlex.split(line)
    except ValueError:
        return False
    return True


def _plain(line: str) -> bool:
    """Whether the shell runs the words of a line as they stand."""
    return not _EXPANDED.search(_QUOTED.sub("", line))


def _patterns(option: str, patterns: Iterable[Any]) -> tuple[CommandPattern, ...]:
    if isinstance(patterns, str):
        raise ConfigurationError(f"`{option}` is {patterns!r}; it is a list of patterns such as [{patterns!r}].", field=option)
    made = tuple(patterns)
    for pattern in made:
        blank = (isinstance(pattern, str) and not pattern.strip()) or (isinstance(pattern, Exact) and not pattern.command.strip())
        if blank or not (isinstance(pattern, str | Exact | re.Pattern) or callable(pattern)):
            raise ConfigurationError(
                f"`{option}` has {pattern!r}; a pattern is a command, exact('...'), a compiled regular expression or a function "
                "of the argument list.",
                field=option,
            )
    return made
