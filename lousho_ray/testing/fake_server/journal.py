"""The journal of a server: its requests in order of arrival, its gates, and waiting for either."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from lousho_ray.testing.fake_server.records import Board, RecordedRequest, Violation
from lousho_ray.testing.fake_server.routes import check_route


class Journal:
    """Records requests and lets tests wait for them, from any thread.

    The awaiting methods raise `TimeoutError` saying what was seen after `timeout_s` seconds; `*_sync` twins are for code without an
    event loop.
    """

    def __init__(self, timeout_s: float) -> None:
        self.violations: list[Violation] = []
        """Broken rules, in order; also `nothing-scripted` and `responder-failed`."""
        self._timeout_s = timeout_s
        self._board = Board()
        self._requests: list[RecordedRequest] = []
        self._in_flight: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._peak = 0
        self._gate_arrivals: Counter[str] = Counter()
        self._gates_open: set[str] = set()

    # --------------------------------------------------------------------------------------------------- records

    @property
    def requests(self) -> list[RecordedRequest]:
        """All requests in order of arrival."""
        return list(self._requests)

    @property
    def bodies(self) -> list[Any]:
        """The parsed bodies of all requests."""
        return [request.body for request in self.requests]

    @property
    def concurrent(self) -> int:
        """Requests in flight now."""
        return sum(tuple(self._in_flight.values()))

    @property
    def max_concurrent(self) -> int:
        """The most requests that were in flight at once."""
        return self._peak

    @property
    def max_concurrent_by_route(self) -> dict[str, int]:
        return dict(self._peaks)

    def requests_of(self, route: str) -> list[RecordedRequest]:
        check_route(route)
        return [request for request in self.requests if request.route == route]

    def max_in_window(self, seconds: float, route: str | None = None) -> int:
        """The most requests that arrived within any window of that length: what a rate limit bounds."""
        times = sorted(request.arrived for request in self._of(route))
        most = first = 0
        for last, arrived in enumerate(times):
            while arrived - times[first] >= seconds:
                first += 1
            most = max(most, last - first + 1)
        return most

    def take_violations(self) -> list[Violation]:
        """The violations so far, forgotten afterwards: for tests that break a rule on purpose."""
        taken, self.violations[:] = list(self.violations), []
        return taken

    # --------------------------------------------------------------------------------------------------- waiting

    def release(self, *gates: str) -> None:
        """Opens gates for good, for those who wait there and those who will come."""
        self._gates_open.update(gates)
        self._board.changed()

    async def reached(self, gate: str, count: int = 1) -> None:
        """Waits until `count` requests have come to a gate (those that have passed it count too)."""
        await self._board.until(*self._at_gate(gate, count), self._timeout_s)

    def reached_sync(self, gate: str, count: int = 1) -> None:
        self._board.until_sync(*self._at_gate(gate, count), self._timeout_s)

    async def wait_for_requests(self, count: int, route: str | None = None) -> None:
        """Waits until `count` requests have arrived, in all or of a route."""
        await self._board.until(*self._arrived(count, route), self._timeout_s)

    def wait_for_requests_sync(self, count: int, route: str | None = None) -> None:
        self._board.until_sync(*self._arrived(count, route), self._timeout_s)

    async def wait_ended(self, request: RecordedRequest) -> None:
        """Waits until a request is over, in whatever way."""
        await self._board.until(*_over(request), self._timeout_s)

    def wait_ended_sync(self, request: RecordedRequest) -> None:
        self._board.until_sync(*_over(request), self._timeout_s)

    async def wait_closed(self, request: RecordedRequest) -> None:
        """Waits until the client closed a request early. Raises `AssertionError` when it was answered in full."""
        await self.wait_ended(request)
        _assert_closed(request)

    def wait_closed_sync(self, request: RecordedRequest) -> None:
        self.wait_ended_sync(request)
        _assert_closed(request)

    async def wait_idle(self) -> None:
        """Waits until no request is in flight."""
        await self._board.until(*self._idle(), self._timeout_s)

    def wait_idle_sync(self) -> None:
        self._board.until_sync(*self._idle(), self._timeout_s)

    # ---------------------------------------------------------------------------------------------- for the server

    def _begin(self, request: RecordedRequest) -> None:
        self._requests.append(request)
        self._in_flight[request.route] += 1
        self._peaks[request.route] = max(self._peaks[request.route], self._in_flight[request.route])
        self._peak = max(self._peak, self.concurrent)
        self._board.changed()

    def _end(self, request: RecordedRequest) -> None:
        """Marks a request as over; a second call changes nothing."""
        if request.ended is None:
            request.ended = time.monotonic()
            self._in_flight[request.route] -= 1
            self._board.changed()

    async def _pass_gate(self, name: str) -> None:
        self._gate_arrivals[name] += 1
        self._board.changed()
        await asyncio.wrap_future(self._board.watch(lambda: name in self._gates_open))

    def _of(self, route: str | None) -> list[RecordedRequest]:
        return self.requests if route is None else self.requests_of(route)

    def _at_gate(self, gate: str, count: int) -> tuple[Callable[[], bool], Callable[[], str]]:
        def seen() -> int:
            return self._gate_arrivals[gate]

        return lambda: seen() >= count, lambda: f"{seen()} of {count} requests reached gate {gate!r}"

    def _arrived(self, count: int, route: str | None) -> tuple[Callable[[], bool], Callable[[], str]]:
        def seen() -> int:
            return len(self._of(route))

        return lambda: seen() >= count, lambda: f"{seen()} of {count} requests arrived"

    def _idle(self) -> tuple[Callable[[], bool], Callable[[], str]]:
        return lambda: not self.concurrent, lambda: f"{self.concurrent} requests are still in flight"


def _over(request: RecordedRequest) -> tuple[Callable[[], bool], Callable[[], str]]:
    return lambda: request.ended is not None, lambda: f"request {request.index} ({request.route}) is still in flight"


def _assert_closed(request: RecordedRequest) -> None:
    if not request.client_closed:
        raise AssertionError(f"request {request.index} ({request.route}) was answered in full; the client did not close it")
