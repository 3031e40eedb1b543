"""A directory of this machine as a workspace."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import uuid
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
                if found == self.root:
                    return _entry(found.name, os.stat(found))
                with self._parent(found) as (above, name):
                    return _entry(name, os.stat(name, dir_fd=above, follow_symlinks=False))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read(self, path: str) -> bytes:
        found = self._locate(path)
        with _reworded(path):
            # A named pipe would never end: opened without blocking, then looked at.
            descriptor = self._open(found, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise WorkspaceError(f"{path} is no file.")
                with open(descriptor, "rb", closefd=False) as file:
                    return file.read()
            finally:
                os.close(descriptor)

    def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        found = self._locate(path)
        if found == self.root:
            raise WorkspaceError(f"{path} is a directory.")
        with _reworded(path), self._parent(found, make=True) as (above, name):
            with contextlib.suppress(FileNotFoundError):
                before = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
                if stat.S_ISDIR(before):
                    raise WorkspaceError(f"{path} is a directory.")
                mode = stat.S_IMODE(before) if mode is None else mode
            temporary = f".tmp-{uuid.uuid4().hex}"
            written = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=above)
            try:
                with open(written, "wb") as file:
                    file.write(data)
                    os.fchmod(written, 0o666 & ~_umask() if mode is None else mode)
                os.replace(temporary, name, src_dir_fd=above, dst_dir_fd=above)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=above)
                raise

    def list(self, path: str) -> list[Entry]:
        found = self._locate(path)
        with _reworded(path):
            descriptor = self._open(found, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(descriptor) as entries:
                    return [known for entry in entries if (known := _known(entry)) is not None]
            finally:
                os.close(descriptor)

    def remove(self, path: str) -> None:
        above, _, name = normalize_workspace_path(path).rpartition("/")
        found = self._locate(above or ".")
        with _reworded(path):
            descriptor = self._open(found, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.unlink(name, dir_fd=descriptor)
            finally:
                os.close(descriptor)

    def _open(self, found: Path, flags: int) -> int:
        if found == self.root:
            return os.open(found, flags)
        with self._parent(found) as (above, name):
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=above)

    @contextlib.contextmanager
    def _parent(self, found: Path, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The open directory that `found` is in, and its name there.

        Opened part by part from the root, without following links: a directory that is swapped for a link after `_locate` has
        judged it is an error and not a way out.
        """
        *parts, name = found.relative_to(self.root).parts
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor, name
        finally:
            os.close(descriptor)

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


def _known(entry: os.DirEntry[str]) -> Entry | None:
    """What a directory holds under a name; `None` when it has gone meanwhile."""
    try:
        return _entry(entry.name, entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return None


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
