"""The event loop behind the `*_sync` calls: one daemon thread per process, so that clients and stores stay on one loop.

It also serves notebooks, whose own loop is running already.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from lousho_ray.errors import ConfigurationError

T = TypeVar("T")

INTERRUPT_GRACE_S = 5.0
"""How long an interrupted call may take to settle before the interrupt goes on."""


class LoopThread:
    """A running event loop in a thread of its own, started on first use and again after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                self._thread = threading.Thread(target=self._loop.run_forever, name="lousho-loop", daemon=True)
                self._thread.start()
            return self._loop

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` and waits. Ctrl-C cancels it and waits for it to settle before `KeyboardInterrupt` goes on.

        Raises:
            ConfigurationError: Called on this very thread, from async code such as a tool of a `send_sync()` run: it would wait for
                itself for ever.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ConfigurationError(
                "A *_sync call was made from async code that runs on the loop of another one; await the async twin there."
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop())
        try:
            return future.result()
        except (KeyboardInterrupt, SystemExit):
            future.cancel()
            concurrent.futures.wait([future], timeout=INTERRUPT_GRACE_S)
            raise


SYNC_LOOP = LoopThread()
