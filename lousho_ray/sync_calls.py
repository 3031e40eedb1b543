"""The plain-code twins of the async calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from lousho_ray.errors import ConfigurationError
from lousho_ray.events import Event
from lousho_ray.handle import AgentRun
from lousho_ray.loop_thread import SYNC_LOOP


def need_loop(what: str, instead: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(f"{what} needs a running event loop; from plain code use {instead}.") from None


def sync_events(start: Callable[[], AgentRun[Any]]) -> Iterator[Event]:
    """The events of a run whose loop is the process's own loop thread. The run starts at once; wrong options raise here."""

    async def begin() -> tuple[AgentRun[Any], Any]:
        run = start()
        return run, aiter(run)

    async def following(events: Any) -> Event | None:
        return await anext(events, None)

    def read(run: AgentRun[Any], events: Any) -> Iterator[Event]:
        try:
            while (event := SYNC_LOOP.run(following(events))) is not None:
                yield event
        finally:
            SYNC_LOOP.run(events.aclose())
            SYNC_LOOP.run(_wait(run))

    return read(*SYNC_LOOP.run(begin()))


async def _wait(run: AgentRun[Any]) -> None:
    async with run:
        pass
