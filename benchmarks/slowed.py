"""Gives processes a share of a core each, so that the two cores of a small machine stand for more, slower ones.

Linux with cgroups v1 and root only: a group of its own for each process, with a quota of CPU time in every 10 ms. What is measured
so is how the parts of a system divide its work; the figures are those of a machine whose cores are that much slower.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

CONTROLLER = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
LOOK_EVERY_S = 0.05


class Slowed:
    """While the block runs, processes for which `chosen(name)` holds get `share` of a core each, from soon after their start on.

    `name` is the title of a process that is below this one, such as `ray::IDLE`. `hold()` takes others.
    """

    def __init__(self, share: float, chosen: Callable[[str], bool] = lambda name: False) -> None:
        if not os.access(CONTROLLER / "cgroup.procs", os.W_OK):
            raise SystemExit(f"A share of a core needs Linux with cgroups v1 and root: {CONTROLLER} cannot be written.")
        self._share = share
        self._chosen = chosen
        self._groups: dict[int, Path] = {}
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def hold(self, pid: int) -> None:
        """Gives a process, with all its threads, its share."""
        if pid in self._groups:
            return
        group = self._groups[pid] = CONTROLLER / f"slowed-{os.getpid()}-{pid}"
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD_US * self._share)))
        with suppress(OSError):  # it has just ended
            (group / "cgroup.procs").write_text(str(pid))

    def __enter__(self) -> Slowed:
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._watcher.join()
        for group in self._groups.values():
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (CONTROLLER / "cgroup.procs").write_text(pid)
            group.rmdir()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            for pid in below(os.getpid()):
                if pid not in self._groups and self._chosen(title(pid)):
                    self.hold(pid)


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
