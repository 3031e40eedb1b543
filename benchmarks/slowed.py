"""Gives processes a share of a core each, so that the two cores of a small machine stand for more, slower ones.

Linux with cgroups v1 and root only: a group of its own for each process, with a quota of CPU time in every 10 ms. What is measured
so is how the parts of a system divide its work; the figures are those of a machine whose cores are that much slower.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROLLER = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
WEIGHT = 100_000
"""Against the 1,024 of any other process: the share is had, whoever else uses the machine."""

LOOK_EVERY_S = 0.1


@contextmanager
def slowed(share: float, *names: str) -> Iterator[None]:
    """While the block runs, this process gets `share` of a core, and so does each below it in whose title one of the names is, such
    as `ray::`, from soon after its start on. A process of its own, with no quota, looks for them.
    """
    if not os.access(CONTROLLER / "cgroup.procs", os.W_OK):
        raise SystemExit(f"A share of a core needs Linux with cgroups v1 and root: {CONTROLLER} cannot be written.")
    watcher = subprocess.Popen([sys.executable, __file__, str(os.getpid()), str(share), *names], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        watcher.communicate()  # closes its input, which ends it


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found + [other for child in found for other in below(child)]


def title(pid: int) -> str:
    """How a process calls itself; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def watch(root: int, share: float, names: list[str]) -> None:
    """Holds the process `root` and those below it that have one of the names, until the input ends."""
    groups: dict[int, Path] = {}
    try:
        while not select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
            for pid in (root, *below(root)):
                if pid not in groups and pid != os.getpid() and (pid == root or any(name in title(pid) for name in names)):
                    groups[pid] = hold(pid, share)
    finally:
        for group in groups.values():
            for pid in map(int, (group / "cgroup.procs").read_text().split()):
                with suppress(OSError):
                    (CONTROLLER / "cgroup.procs").write_text(str(pid))
            group.rmdir()


def hold(pid: int, share: float) -> Path:
    """Gives a process, with all its threads, its share; the group it is in then."""
    group = CONTROLLER / f"slowed-{os.getpid()}-{pid}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * share)))
    (group / "cpu.shares").write_text(str(WEIGHT))
    with suppress(OSError):  # it has just ended
        (group / "cgroup.procs").write_text(str(pid))
    return group


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
