"""How often Python looks for garbage while many runs are in progress in this process.

Python takes every few hundred new objects for a reason to look for cycles among them, and every so often among all that there is,
imported modules included. A run in progress has a few hundred objects, and one that has ended leaves no cycles: with many at once
Python would look all the time, find nothing, and keep every one of them waiting for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

OBJECTS_PER_RUN = 500
"""New objects that are put down to a run in progress."""


class RunsInProgress:
    """Use as a context manager around each run.

    While `n` are in progress, Python looks for garbage after `500 * n` new objects, unless the process has it look more rarely by
    itself, or never. The process's own setting is kept aside, taken up when it is changed meanwhile, and back with the last run.
    """

    def __init__(self) -> None:
        self._count = 0
        self._own = 0
        self._set: int | None = None
        self._lock = Lock()

    def __enter__(self) -> None:
        self._change(1)

    def __exit__(self, *error: object) -> None:
        self._change(-1)

    @contextmanager
    def besides(self, count: int) -> Iterator[None]:
        """Counts as so many besides, for what makes and keeps many objects between its runs."""
        self._change(count)
        try:
            yield
        finally:
            self._change(-count)

    def _change(self, by: int) -> None:
        with self._lock:
            self._count += by
            now, *older = gc.get_threshold()
            if now != self._set:  # the process's own, or somebody has changed it
                self._own = now
            if self._own:  # 0: never
                self._set = max(self._own, OBJECTS_PER_RUN * self._count)
                gc.set_threshold(self._set, *older)


runs_in_progress = RunsInProgress()
"""Those of this process."""
