"""Actors without Ray, for the contract tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class InProcessHandle:
    """An actor handle: every call runs on the loop of its caller.

    Attributes:
        actor: The actor behind it. Another one is a new life; `None` is an actor that cannot be reached.
        lose: Asked before and after each call whether the network loses the call or its answer.
    """

    def __init__(self, actor: Any, lose: Callable[[], bool] = lambda: False) -> None:
        self.actor = actor
        self.lose = lose

    def __getattr__(self, method: str) -> Any:
        return InProcessMethod(self, method)


class InProcessMethod:
    def __init__(self, handle: InProcessHandle, method: str) -> None:
        self.handle, self.method = handle, method

    async def remote(self, *args: Any) -> Any:
        actor = self.handle.actor
        if actor is None or self.handle.lose():
            raise ConnectionError("the call was lost")
        answer = await getattr(actor, self.method)(*args)
        if self.handle.actor is not actor or self.handle.lose():
            raise ConnectionError("the answer was lost")
        return answer
