"""A directory of this machine as a workspace."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from lousho_ray.cancellation import AbortSignal
from lousho_ray.errors import ConfigurationError
from lousho_ray.tools.workspace.paths import WorkspaceError, normalize_workspace_path
from lousho_ray.tools.workspace.provider import Entry, EntryKind
from lousho_ray.tools.workspace.shell import ShellOutput, command_env, describe_shell, run_command


class LocalWorkspace:
    """The files below `root`, and commands run there.

    Links that lead out of it are refused, for reading and for what would be created below them.

    It belongs to the machine it was made on: on another node of a cluster there is another directory, or none.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` when `root` is no directory, or when used on another machine.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.realpath(root))
        if not self.root.is_dir():
            raise ConfigurationError(f"The workspace root {os.fspath(root)!r} is no directory.", field="root")
        self._machine = _machine()

    def resolve(self, path: str) -> str:
        found = self._locate(path)
        return "." if found == self.root else found.relative_to(self.root).as_posix()

    def stat(self, path: str) -> Entry | None:
        found = self._locate(path)
        with _reworded(path):
            try:
                return _entry(found.name, os.stat(found, follow_symlinks=False))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read(self, path: str) -> bytes:
        found = self._locate(path)
        with _reworded(path):
            # A named pipe would never end: opened without blocking, then looked at.
            descriptor = os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise WorkspaceError(f"{path} is no file.")
                return file.read()

    def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        found = self._locate(path)
        with _reworded(path):
            if found.is_dir():
                raise WorkspaceError(f"{path} is a directory.")
            found.parent.mkdir(parents=True, exist_ok=True)
            if mode is None and found.exists():
                mode = stat.S_IMODE(found.stat().st_mode)
            descriptor, temporary = tempfile.mkstemp(dir=found.parent, prefix=".tmp-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                os.chmod(temporary, 0o666 & ~_umask() if mode is None else mode)
                os.replace(temporary, found)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise

    def list(self, path: str) -> list[Entry]:
        found = self._locate(path)
        with _reworded(path), os.scandir(found) as entries:
            return [_entry(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]

    def remove(self, path: str) -> None:
        above, _, name = normalize_workspace_path(path).rpartition("/")
        with _reworded(path):
            os.unlink(self._locate(above or ".") / name)

    @property
    def shell_description(self) -> str:
        return describe_shell()

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
        """Runs a command in a directory of the workspace. It is not confined: a command may reach the whole machine."""
        return await run_command(
            command,
            self._locate(cwd or "."),
            command_env() if env is None else env,
            timeout_ms=timeout_ms,
            max_output_chars=max_output_chars,
            abort=abort,
        )

    def _locate(self, path: str) -> Path:
        """The real path of `path`, judged by the real path of its deepest part that exists."""
        if self._machine != _machine():
            raise ConfigurationError(
                f"The workspace {str(self.root)!r} belongs to machine {self._machine.partition('/')[0]!r} and cannot be used on "
                f"{socket.gethostname()!r}: run the agent there, or use a workspace that every node has.",
                field="workspace",
            )
        wanted = self.root / normalize_workspace_path(path)
        with _reworded(path):
            existing, missing = wanted, list[str]()
            while not os.path.lexists(existing):
                missing.insert(0, existing.name)
                existing = existing.parent
            real = Path(os.path.realpath(existing))
            if not real.exists():
                raise WorkspaceError(f"{path} has a link in it that leads nowhere.")
        if real != self.root and self.root not in real.parents:
            raise WorkspaceError(f"{path} leads out of the workspace.")
        return real.joinpath(*missing)


@contextlib.contextmanager
def _reworded(path: str) -> Iterator[None]:
    """Errors of the system name files of the machine: a model reads the workspace's path instead."""
    try:
        yield
    except FileNotFoundError:
        raise WorkspaceError(f"{path} does not exist.") from None
    except OSError as error:
        raise WorkspaceError(f"{path}: {error.strerror or type(error).__name__}.") from None


def _entry(name: str, found: os.stat_result) -> Entry:
    kinds: dict[int, EntryKind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
    return Entry(name, kinds.get(stat.S_IFMT(found.st_mode), "other"), found.st_size, stat.S_IMODE(found.st_mode))


@functools.cache
def _machine() -> str:
    """This machine, or this container of it, until it is started again."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


@functools.cache
def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines() if os.path.exists("/proc/self/status") else ():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
