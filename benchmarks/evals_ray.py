"""Samples of an eval per second: in one process, and on workers of a local cluster. Each sample is one model call of 50 ms.

    python benchmarks/evals_ray.py [--workers 0,1,2] [--samples 10000] [--at-once 256] [--rounds 1] [--share 0.2]

0 workers: in this process. Everything runs on this machine: the driver (this process), the workers and the model server share its
cores, and the start of the workers is part of the time. Each kind of process is shown with its CPU time a sample. The rate without
the start is that of the second half of the samples.

With `--share` the driver, the model server and each worker get that share of a core (see `slowed.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import ray
from eval_suite import suite
from model_server import Plan, model_server
from slowed import below, slowed, title

LOOK_EVERY_S = 0.5
OTHER = "rest of Ray"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuTimes:
    """CPU seconds of this process and of all below it while the block runs, also of those that end in it: `spent`, by kind."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._first: dict[int, float] = {}
        self._last: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._own_s = 0.0

    def __enter__(self) -> CpuTimes:
        self._look()
        self._first = {pid: used for pid, (_, used) in self._last.items()}
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watcher.join()
        self._look()
        for pid, (kind, used) in self._last.items():
            self.spent[kind] = self.spent.get(kind, 0.0) + used - self._first.get(pid, 0.0)
        self.spent["driver"] -= self._own_s

    def _watch(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self._look()
        self._own_s = time.thread_time()

    def _look(self) -> None:
        for pid in (os.getpid(), *below(os.getpid())):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            known, kind = self._last.get(pid, (OTHER, 0.0))[0], kind_of(pid)
            self._last[pid] = (known if kind == OTHER else kind, (int(fields[11]) + int(fields[12])) / TICKS_PER_S)


def kind_of(pid: int) -> str:
    """What a process is for."""
    name = title(pid)
    if pid == os.getpid():
        return "driver"
    kinds = {"slowed.py": "watcher", "model_server.py": "model server", "ray::EvalWorker": "workers", "ray::EvalBoard": "board"}
    return next((kind for text, kind in kinds.items() if text in name), OTHER)


def settled_rate(ends: list[float]) -> float:
    """Samples per second from the moment on at which half of them had ended."""
    ends.sort()
    first = len(ends) // 2
    return (len(ends) - first) / (ends[-1] - ends[first])


async def measure(url: str, workers: int, samples: int, at_once: int) -> None:
    work = suite(url, Plan(wait_ms=50).text(), samples, at_once, "ray" if workers else "local")
    began = time.perf_counter()
    with CpuTimes() as cpu:
        await work()
    wall_s = time.perf_counter() - began
    shown = ", ".join(f"{kind} {used / samples * 1000:.2f}" for kind, used in sorted(cpu.spent.items(), key=lambda i: -i[1]))
    where = f"{workers} worker(s)" if workers else "one process"
    rates = f"{samples / wall_s:6.0f} samples/s, {settled_rate(work.ends):6.0f} without the start"
    print(f"{where:<12} {rates}, wall {wall_s:5.1f} s, CPU ms each: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--share", type=float)
    given = parser.parse_args()
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    with model_server() as url:
        for workers in map(int, given.workers.split(",")):
            if workers:
                ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            with ExitStack() as stack:
                if given.share is not None:
                    stack.enter_context(slowed(given.share, "ray::EvalWorker", "model_server.py"))
                for _ in range(given.rounds):
                    asyncio.run(measure(url, workers, given.samples, given.at_once))
            if workers:
                ray.shutdown()


if __name__ == "__main__":
    main()
