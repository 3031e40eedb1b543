"""Starts a program in namespaces of its own. Run as a script, with nothing but the standard library:

    python -I -S launcher.py CONTROL MODE PROGRAM [ARGUMENT ...]

MODE is `open` (processes only), `closed` (no network but a loopback of its own) or `proxied` (closed, with a socket that listens
on that loopback). CONTROL is a socket to whoever started this: it gets the listening socket, or a text that says why the program
was not started, and is closed when the program runs.

Three processes: this one waits outside; `init` is the first process of the new process namespace, which the kernel ends with all
others in it when it ends; the third becomes the program. The namespaces belong to a user namespace, also when this runs as root:
what runs inside has no right over the network, the processes and the mounts outside.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
import sys
from typing import NoReturn

NEW_USER, NEW_NET, NEW_PID, NEW_IPC, NEW_MOUNTS = 0x10000000, 0x40000000, 0x20000000, 0x08000000, 0x00020000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
IO_URING_SETUP = 425

MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""Per machine: its number in `linux/audit.h` and the number of its `socket` system call."""

ALLOWED_FAMILIES = (2, 10, 16)
"""`AF_INET`, `AF_INET6`, `AF_NETLINK`: they end at the new network. Sockets with a path, `AF_VSOCK` and others lead out of it."""

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_namespaces(closed: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    checked(_libc.unshare(NEW_USER | NEW_PID | NEW_IPC | NEW_MOUNTS | (NEW_NET if closed else 0)), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if closed:
        raise_loopback()


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        flags = struct.unpack_from("16sh", fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16s16x", b"lo")))[1]
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def offer_proxy(control: socket.socket) -> None:
    """Listens on the new loopback for whoever started this, and tells the program where."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        socket.send_fds(control, [b"L"], [listener.fileno()])
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        os.environ[name] = os.environ[name.lower()] = url
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "localhost,127.0.0.1,::1"
    os.environ["LOUSHO_BROKER"] = f"{url}/__broker"


def give_up_rights(closed: bool) -> None:
    """Nothing started from here on gains rights, root of the namespace included; closed, it opens only sockets of its network."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if closed:
        program = socket_filter(*MACHINES[platform.machine()])
        instructions = ctypes.create_string_buffer(program)
        header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
        checked(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header), 0, 0), "seccomp")


def socket_filter(machine: int, socket_call: int) -> bytes:
    """A program for seccomp, see `seccomp(2)`: system calls of other machines end the process, other sockets are an error."""

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def jump(value: int, yes: int, no: int, *, at_least: bool = False) -> bytes:
        return struct.pack("HBBI", 0x35 if at_least else 0x15, yes, no, value)

    def answer(action: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, action)

    allow, kill = answer(0x7FFF0000), answer(0x80000000)
    families = [jump(family, len(ALLOWED_FAMILIES) - at, 0) for at, family in enumerate(ALLOWED_FAMILIES)]
    return b"".join(
        [
            *(load(4), jump(machine, 1, 0), kill),
            *(load(0), jump(0x40000000, 0, 1, at_least=True), kill),  # the same calls under other numbers (x32)
            *(jump(IO_URING_SETUP, 0, 1), answer(0x00050000 | errno.ENOSYS)),  # opens sockets past this filter
            *(jump(socket_call, 0, len(families) + 2), load(16), *families),
            *(answer(0x00050000 | errno.EAFNOSUPPORT), allow),
        ]
    )


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def init(control: socket.socket, closed: bool, argv: list[str]) -> NoReturn:
    die_with_parent()
    # A list of processes that is that of the namespace, where the machine lets us have one.
    _libc.mount(b"proc", b"/proc", b"proc", 0, None)
    child = os.fork()
    if child == 0:
        start(control, closed, argv)
    control.close()
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(code_of(status))


def start(control: socket.socket, closed: bool, argv: list[str]) -> NoReturn:
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        give_up_rights(closed)
        os.execvp(argv[0], argv)
    except OSError as error:
        complain(control, f"{argv[0]}: {error.strerror}")


def complain(control: socket.socket, text: str) -> NoReturn:
    control.sendall(b"E" + text.encode("utf-8", "replace"))
    os._exit(127)


def code_of(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def main() -> NoReturn:
    control, mode, argv = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:]
    control.set_inheritable(False)
    die_with_parent()
    closed = mode != "open"
    try:
        enter_namespaces(closed)
        if mode == "proxied":
            offer_proxy(control)
        child = os.fork()
    except OSError as error:
        complain(control, str(error.strerror or error))
    if child == 0:
        init(control, closed, argv)
    control.close()
    os._exit(code_of(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
