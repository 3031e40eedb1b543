"""`SubprocessSandbox`: programs of this machine in network and process namespaces of their own (Linux)."""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from lousho_ray.cancellation import AbortSignal
from lousho_ray.errors import ConfigurationError, LoushoError, suggest
from lousho_ray.tools.net import HostRules
from lousho_ray.tools.workspace import launcher
from lousho_ray.tools.workspace.broker import CredentialBroker
from lousho_ray.tools.workspace.paths import WorkspaceError
from lousho_ray.tools.workspace.processes import Limits, ShellOutput, run_process
from lousho_ray.tools.workspace.shell import ShellSandbox, command_env, describe_shell, write_host_file

SandboxNetwork: TypeAlias = Literal["none", "default"] | Mapping[str, Sequence[str]]
"""`none`, `default` (that of the machine), or `{"allow": [hosts]}`."""

_PROBE_TIMEOUT_S = 30
_MESSAGE_BYTES = 4_096


class SubprocessSandbox(ShellSandbox):
    """Runs each program in Linux namespaces of its own: without network by default, and with nothing left when it ends.

    A program without network has a loopback interface that only it sees, no route, and no sockets but those of that network:
    sockets with a path in the file system (such as Docker's) are refused too. It sees and can signal only its own processes, gains
    no rights from `sudo` and the like, and is root over nothing. The **files** of the machine are not walled off: it reads and
    writes what the user of this process may.

    Args:
        network: `"none"`; `"default"`, the machine's own; or `{"allow": ["api.example", "*.pypi.example"]}`, which are the only
            hosts it reaches, and only through `broker`. Without a broker that means no network at all. The program finds the broker
            in `HTTP_PROXY`, `HTTPS_PROXY` and `LOUSHO_BROKER`.
        broker: Adds credentials on the way, which the program never sees. A host must be allowed by both.
        cwd: The directory programs run in, unless a call names another.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for a `network` that is none, such as one with a URL in it.
        LoushoError: `LOUSHO_SANDBOX_EGRESS_UNSUPPORTED` when this machine does not let us make the namespaces.
    """

    name = "subprocess"

    def __init__(
        self,
        *,
        network: SandboxNetwork = "none",
        broker: CredentialBroker | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self._allow = _allowed(network)
        if broker is not None and self._allow is None:
            raise ConfigurationError(
                f"`broker` is only used with network={{'allow': [...]}}, and `network` is {network!r}.", field="broker"
            )
        self._broker = broker
        self._mode = "open" if network == "default" else "closed" if broker is None else "proxied"
        self._cwd = Path.cwd() if cwd is None else Path(cwd).absolute()
        refusal = _refusal(self._mode)
        if refusal is not None:
            raise LoushoError(
                f"Programs cannot be given namespaces of their own here: {refusal}. Allow user namespaces (`unshare --user --net "
                "true` must work), or use NoopSandbox() where no isolation is needed.",
                code="LOUSHO_SANDBOX_EGRESS_UNSUPPORTED",
            )

    @property
    def shell_description(self) -> str:
        return f"{describe_shell()}, {'with' if self._mode == 'open' else 'without'} network"

    async def run(
        self,
        command: str,
        args: Sequence[str] = (),
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_ms: float | None = None,
        max_output_chars: int = 30_000,
        abort: AbortSignal | None = None,
    ) -> ShellOutput:
        """Like `SandboxAdapter.run`. A relative `cwd` is taken from the sandbox's own."""
        async with _Control() as control:
            return await run_process(
                (sys.executable, "-I", "-S", launcher.__file__, str(control.theirs.fileno()), self._mode, command, *args),
                self._cwd / (cwd or "."),
                command_env() if env is None else env,
                Limits(timeout_ms, max_output_chars, abort),
                stdin=stdin,
                pass_fds=(control.theirs.fileno(),),
                started=lambda: self._started(control),
            )

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Writes a file of this machine; a relative path is taken from the sandbox's directory."""
        write_host_file(self._cwd / path, content)

    async def _started(self, control: _Control) -> None:
        """Serves the broker to the program, if there is one. Raises `WorkspaceError` when the program did not start."""
        listener = await control.outcome()
        if listener is not None:
            assert self._broker is not None
            assert self._allow is not None
            await control.stack.enter_async_context(self._broker.serving(listener, self._allow))


class _Control:
    """The socket over which the launcher reports. Leaving it stops what was served to the program."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> _Control:
        self.ours.setblocking(False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()
        self.ours.close()
        self.theirs.close()

    async def outcome(self) -> socket.socket | None:
        """Waits until the program runs. The socket it finds its proxy behind, if it was to have one."""
        self.theirs.close()
        listener: socket.socket | None = None
        async with _readable(self.ours) as readable:
            while True:
                await readable()
                try:
                    message, descriptors, _, _ = socket.recv_fds(self.ours, _MESSAGE_BYTES, 1)
                except BlockingIOError:
                    continue
                for descriptor in descriptors:
                    listener = socket.socket(fileno=descriptor)
                    self.stack.callback(listener.close)
                text = message.removeprefix(b"L")
                if text.startswith(b"E"):
                    raise WorkspaceError(f"The command could not be started: {text[1:].decode('utf-8', 'replace')}.")
                if not message:
                    return listener


@asynccontextmanager
async def _readable(source: socket.socket) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Gives a function that waits until there is something to read."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(source, event.set)

    async def wait() -> None:
        await event.wait()
        event.clear()

    try:
        yield wait
    finally:
        loop.remove_reader(source)


def _allowed(network: SandboxNetwork) -> tuple[str, ...] | None:
    """The hosts of `{"allow": [...]}`, normalised."""
    if isinstance(network, str):
        if network not in ("none", "default"):
            hint = suggest(network, ("none", "default"))
            raise ConfigurationError(
                f"`network` is {network!r}; it is 'none', 'default' or {{'allow': [hosts]}}.{hint}", field="network"
            )
        return None
    if not isinstance(network, Mapping) or set(network) != {"allow"}:
        raise ConfigurationError(f"`network` is {network!r}; it is 'none', 'default' or {{'allow': [hosts]}}.", field="network")
    try:
        return HostRules.of(allowed_hosts=network["allow"]).allowed
    except ConfigurationError as error:
        raise ConfigurationError(error.detail.replace("allowed_hosts", "network.allow"), field="network") from None


@functools.cache
def _refusal(mode: str) -> str | None:
    """Why this machine does not let us start programs in this mode; tried once."""
    if platform.system() != "Linux":
        return f"namespaces are a feature of Linux, and this is {platform.system()}"
    if mode != "open" and platform.machine() not in launcher.MACHINES:
        return f"there is no filter for machines of type {platform.machine()}, only for {', '.join(launcher.MACHINES)}"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", launcher.__file__, str(theirs.fileno()), mode, "true"]
        try:
            done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the launcher failed ({error})"
        theirs.close()
        text = b"".join(iter(lambda: ours.recv(_MESSAGE_BYTES), b"")).removeprefix(b"L").removeprefix(b"E").decode()
    if done.returncode == 0:
        return None
    return text or f"the launcher ended with code {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}"
