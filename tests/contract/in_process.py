"""Actors without Ray, for the contract tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class InProcessHandle:
    """An actor handle: every call runs on the loop of its caller.

    Args:
        actor: The actor behind it; `None` is one that cannot be reached.
        lose: Asked before and after each call whether the network loses the call or its answer.
    """

    def __init__(self, actor: Any, lose: Callable[[], bool] = lambda: False) -> None:
        self.actor = actor
        self.lose = lose
        self.calls: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}

    def replace(self, actor: Any) -> Any:
        """Kills the actor, with the calls it is busy with, and puts another in its place. Returns the old one."""
        old, self.actor = self.actor, actor
        for call, loop in list(self.calls.items()):
            loop.call_soon_threadsafe(call.cancel)
        return old

    def __getattr__(self, method: str) -> Any:
        return InProcessMethod(self, method)


class InProcessMethod:
    def __init__(self, handle: InProcessHandle, method: str) -> None:
        self.handle, self.method = handle, method

    async def remote(self, *args: Any) -> Any:
        actor = self.handle.actor
        if actor is None or self.handle.lose():
            raise ConnectionError("the call was lost")
        loop = asyncio.get_running_loop()
        call = loop.create_task(getattr(actor, self.method)(*args))
        self.handle.calls[call] = loop
        try:
            await asyncio.wait([call])
        finally:
            call.cancel()
            del self.handle.calls[call]
        if call.cancelled() or self.handle.actor is not actor or self.handle.lose():
            raise ConnectionError("the answer was lost")
        return call.result()
