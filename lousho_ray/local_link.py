"""The link to a session that lives in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lousho_ray.handle import LocalRun
from lousho_ray.ports import Observer
from lousho_ray.session import Request
from lousho_ray.session_host import SessionHost


class LocalLink:
    """A session in this process."""

    def __init__(self, host: SessionHost, sibling: Callable[[str], LocalLink]) -> None:
        self._host = host
        self.mode: Any = None
        self.sibling = sibling
        self.fork_point = host.fork_point
        self.begin = host.begin
        self.load = host.load
        self.pending = host.pending
        self.approval = host.approval
        self.discard_pending = host.discard_pending
        self.clear = host.clear
        self.compact = host.compact

    def start(self, request: Request, observers: Sequence[Observer] = ()) -> LocalRun:
        return self._host.start(request if request.mode is not None else replace(request, mode=self.mode), observers)

    async def set_mode(self, mode: Any) -> None:
        self.mode = mode
        await self._host.set_mode(mode)
