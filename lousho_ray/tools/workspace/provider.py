"""What a workspace is: `FsProvider` for files, and the one kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from lousho_ray.cancellation import AbortSignal
from lousho_ray.tools.workspace.paths import WorkspaceError, normalize_workspace_path
from lousho_ray.tools.workspace.shell import ShellOutput

EntryKind: TypeAlias = Literal["file", "dir", "link", "other"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a directory. `mode` is its permission bits, where the workspace has such."""

    name: str
    kind: EntryKind
    size_bytes: int = 0
    mode: int | None = None


class FsProvider(Protocol):
    """The files of a workspace. Called from threads, possibly several at once.

    Paths are as the model wrote them: a provider confines them itself (`normalize_workspace_path`) and raises `WorkspaceError`
    for what is refused or fails.
    """

    def resolve(self, path: str) -> str:
        """The normalised path, links followed, of something that exists or may be created."""
        ...

    def stat(self, path: str) -> Entry | None:
        """What is at `path`, links followed; `None` = nothing."""
        ...

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Replaces or creates a file, with the directories above it. Without `mode` an existing file keeps its own."""
        ...

    def list(self, path: str) -> list[Entry]:
        """The entries of a directory, links not followed, in any order."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file; a link itself, not what it leads to."""
        ...


class MemoryWorkspace:
    """Files in memory: for tests, and for agents that need no disk.

    Args:
        files: Paths to text or bytes.
        exec: Answers commands: `fn(command)`, sync or async, gives a `ShellOutput`. Without it no command can be started.

    Attributes:
        commands: Every command so far, in order.
    """

    def __init__(
        self,
        files: Mapping[str, str | bytes] | None = None,
        exec: Callable[[str], ShellOutput | Awaitable[ShellOutput]] | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._exec = exec
        self.commands: list[str] = []
        self._files: dict[str, bytes] = {}
        for path, content in (files or {}).items():
            self.write(path, content.encode() if isinstance(content, str) else content)

    @property
    def files(self) -> dict[str, bytes]:
        """A copy of all files."""
        with self._lock:
            return dict(self._files)

    def resolve(self, path: str) -> str:
        return normalize_workspace_path(path)

    def stat(self, path: str) -> Entry | None:
        path = self.resolve(path)
        name = path.rsplit("/", 1)[-1]
        with self._lock:
            if path in self._files:
                return Entry(name, "file", len(self._files[path]))
            return Entry(name, "dir") if path == "." or self._holds(path) else None

    def read(self, path: str) -> bytes:
        with self._lock:
            return self._files[self._existing(path)]

    def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        path = self.resolve(path)
        with self._lock:
            above = path
            while "/" in above:
                above = above.rsplit("/", 1)[0]
                if above in self._files:
                    raise WorkspaceError(f"{above} is a file, not a directory.")
            if path == "." or self._holds(path):
                raise WorkspaceError(f"{path} is a directory.")
            self._files[path] = bytes(data)

    def list(self, path: str) -> list[Entry]:
        path = self.resolve(path)
        start = "" if path == "." else f"{path}/"
        with self._lock:
            if path in self._files:
                raise WorkspaceError(f"{path} is a file, not a directory.")
            below = {file[len(start) :]: data for file, data in self._files.items() if file.startswith(start)}
            if not below and path != ".":
                raise WorkspaceError(f"{path} does not exist.")
            entries = {rest: Entry(rest, "file", len(data)) for rest, data in below.items() if "/" not in rest}
            entries |= {(name := rest.split("/", 1)[0]): Entry(name, "dir") for rest in below if "/" in rest}
            return [*entries.values()]

    def remove(self, path: str) -> None:
        with self._lock:
            del self._files[self._existing(path)]

    @property
    def shell_description(self) -> str:
        return "a simulated shell"

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_ms: float | None = None,
        max_output_chars: int = 30_000,
        abort: AbortSignal | None = None,
    ) -> ShellOutput:
        """What the `exec` function answers, whatever the other arguments."""
        self.commands.append(command)
        if self._exec is None:
            raise WorkspaceError("This workspace has no shell.")
        output = self._exec(command)
        return output if isinstance(output, ShellOutput) else await output

    def _existing(self, path: str) -> str:
        path = self.resolve(path)
        if path not in self._files:
            raise WorkspaceError(f"{path} is a directory." if path == "." or self._holds(path) else f"{path} does not exist.")
        return path

    def _holds(self, path: str) -> bool:
        return any(file.startswith(f"{path}/") for file in self._files)

    def __getstate__(self) -> dict[str, Any]:
        return {"_files": self.files, "_exec": self._exec, "commands": list(self.commands)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lock = threading.RLock()
        self._files, self._exec, self.commands = state["_files"], state["_exec"], state["commands"]
