"""How the process of an actor looks for garbage and gives memory back. Only for processes that are ours alone."""

from __future__ import annotations

import ctypes
import gc

COLLECT_AFTER = 20_000
"""New objects after which Python looks for garbage, instead of 700: what turns leave behind is hardly ever in cycles."""


def collect_rarely() -> None:
    """Lets Python look for garbage more rarely."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


def set_aside() -> None:
    """Takes all that is there now, imported modules above all, out of what is looked through for garbage from here on."""
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Returns freed memory to the system. The C library keeps it otherwise: as much as the busiest minute needed."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, other C libraries do not
    if trim is not None:
        trim(0)
