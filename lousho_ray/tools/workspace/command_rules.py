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
line), or a function of the split argument list."""

_OPERATORS = {"sh": re.compile(r"[;&|`<>\n\r]|\$\("), "cmd": re.compile(r"[;&|`<>\n\r%^]|\$\(")}
_SEPARATORS = re.compile(r"[;&|\n\r]+")


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
        line = command.strip()
        if not line or "\0" in line:
            raise WorkspaceError("The command is empty." if not line else "A command cannot hold a NUL character.")
        if any(self._denies(pattern, line) for pattern in self.deny):
            raise WorkspaceError(f"The command is not allowed here: {line[:200]}")
        if self.allow is not None and not any(self._allows(pattern, line) for pattern in self.allow):
            joined = " It joins commands or redirects, which no allowed pattern covers." if self._operators.search(line) else ""
            raise WorkspaceError(f"The command is not among the allowed ones: {line[:200]}.{joined}")

    @property
    def _operators(self) -> re.Pattern[str]:
        return _OPERATORS[self.shell]

    def _allows(self, pattern: CommandPattern, line: str) -> bool:
        if isinstance(pattern, Exact):
            return line == pattern.command.strip()
        if isinstance(pattern, re.Pattern):
            return pattern.search(line) is not None
        # A simple pattern speaks of a simple command: what stands behind an operator would run unseen.
        return not self._operators.search(line) and _matches(pattern, line)

    def _denies(self, pattern: CommandPattern, line: str) -> bool:
        if isinstance(pattern, re.Pattern):
            return pattern.search(line) is not None
        parts = [line, *(part.strip() for part in _SEPARATORS.split(line))]
        if isinstance(pattern, Exact):
            return pattern.command.strip() in parts
        return any(_matches(pattern, part) for part in parts if part)


def _matches(pattern: str | Callable[[Sequence[str]], bool], line: str) -> bool:
    if isinstance(pattern, str):
        wanted = pattern.strip()
        return line == wanted or (line.startswith(wanted) and line[len(wanted)].isspace())
    try:
        arguments = shlex.split(line)
    except ValueError:  # a quote that is not closed
        arguments = line.split()
    return bool(pattern(arguments))


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
