"""What the server remembers of its requests, and waiting for it from any thread or event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lousho_ray.testing.fake_server.routes import Dialect, dialect_of


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule of a vendor that a request broke. `rule` is its short name, `request` the number of the request."""

    route: str
    rule: str
    message: str
    request: int


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """One request as it came in, and how it ended.

    Attributes:
        index: Its number, from 0, in the order of arrival.
        route: `chat`, `responses`, `messages`, `ollama`, or the path.
        headers: Names in lower case.
        raw: The body as it was sent.
        body: The parsed JSON; `None` when it is none.
        connection: The number of its TCP connection: equal numbers mean that keep-alive was used.
        arrived: Monotonic seconds when it had been read.
        ended: Monotonic seconds when the answer was complete or the connection gone; `None` while in flight.
        status: The HTTP status it was answered with; `None` before.
        client_closed: The client closed before the answer was complete.
        violation: The rule it broke.
    """

    index: int
    route: str
    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    body: Any
    connection: int
    arrived: float
    ended: float | None = None
    status: int | None = None
    client_closed: bool = False
    violation: Violation | None = None

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.path)

    @property
    def streaming(self) -> bool:
        """Whether the client asked for a stream: Ollama streams unless told not to."""
        default = self.route == "ollama"
        return isinstance(self.body, dict) and bool(self.body.get("stream", default))


class Board:
    """Wakes who waits for a condition, in whatever thread or event loop it waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watchers: list[tuple[Callable[[], bool], Future[None]]] = []

    def changed(self) -> None:
        """To be called after every change of what is watched."""
        with self._lock:
            self._watchers = [watcher for watcher in self._watchers if not _settle(*watcher)]

    def watch(self, condition: Callable[[], bool]) -> Future[None]:
        """A future that is done once `condition()` is true."""
        future: Future[None] = Future()
        with self._lock:
            if not _settle(condition, future):
                self._watchers.append((condition, future))
        return future

    async def until(self, condition: Callable[[], bool], what: Callable[[], str], timeout_s: float) -> None:
        """Waits for `condition()`. Raises `TimeoutError` with `what()` when it takes longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(self.watch(condition))
        except TimeoutError:
            raise TimeoutError(f"after {timeout_s:g} s: {what()}") from None

    def until_sync(self, condition: Callable[[], bool], what: Callable[[], str], timeout_s: float) -> None:
        """`until` for code without an event loop."""
        try:
            self.watch(condition).result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"after {timeout_s:g} s: {what()}") from None


def _settle(condition: Callable[[], bool], future: Future[None]) -> bool:
    if future.cancelled():
        return True
    if not condition():
        return False
    if future.set_running_or_notify_cancel():
        future.set_result(None)
    return True
