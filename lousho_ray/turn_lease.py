"""The lease of a turn: the right to write a session, held while the turn runs, over all processes that share the store.

A store without leases (files, a user's own) has none to give: there the line of one process is all the order there is. A lease has
a fencing number: a save under an old one is refused by the store, so a holder that was thought dead cannot overwrite newer state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lousho_ray.cancellation import AbortSignal
from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import LoushoError
from lousho_ray.ids import new_id
from lousho_ray.messages import Message
from lousho_ray.ports import SessionStore

log = logging.getLogger("lousho_ray")

LEASE_MS = 30_000.0
"""How long a holder that has died keeps others out; a living one renews its lease three times as often."""

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 0.5


class TurnLease:
    """Use as an async context manager around a turn.

    Args:
        sessions: The session store.
        session_id: The session.
        abort: Fires to end the wait; it is fired when the lease is lost.
        wait_ms: How long to wait for another process's turn.

    Raises:
        LoushoError: `LOUSHO_SESSION_BUSY`: another process held the session for all of `wait_ms`.
    """

    def __init__(
        self, sessions: SessionStore, session_id: str, abort: AbortSignal, *, wait_ms: float = LEASE_MS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._sessions: Any = sessions
        self._id = session_id
        self._abort = abort
        self._wait_ms = wait_ms
        self._clock = clock
        self._holder = new_id()
        self._fence: int | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._transcript: list[Message] | None = None

    @property
    def leased(self) -> bool:
        """Whether the store gives leases."""
        return hasattr(self._sessions, "claim")

    async def __aenter__(self) -> TurnLease:
        if self.leased:
            try:
                await self._claim()
            except BaseException:
                await self.__aexit__()
                raise
            if self._fence is not None:
                self._renewal = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        if self._fence is not None:
            fence, self._fence = self._fence, None
            with suppress(LoushoError):  # A lease that cannot be given back runs out by itself.
                await self._sessions.release(self._id, self._holder, fence)

    async def load(self) -> list[Message]:
        """The transcript; the first time the one that was read together with the claim."""
        transcript, self._transcript = self._transcript, None
        return transcript if transcript is not None else await self._sessions.load(self._id) or []

    async def save(self, messages: Sequence[Message]) -> None:
        """Saves the transcript. The lease is given back after it: a store need not keep the order of calls made at once.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: somebody else has taken the session over meanwhile, or the store failed.
        """
        if self._fence is None:
            await self._sessions.save(self._id, messages)
            return
        await self._sessions.save(self._id, messages, fence=self._fence)

    async def _claim(self) -> None:
        deadline, pause = self._clock.now() + self._wait_ms / 1000, FIRST_RETRY_S
        while not self._abort.aborted:
            # Both in one go: a store that gathers its work does them in one transaction.
            claim = self._sessions.claim(self._id, self._holder, LEASE_MS)
            answers: tuple[Any, Any] = await asyncio.gather(claim, self._sessions.load(self._id), return_exceptions=True)
            fence, saved = answers
            if isinstance(fence, BaseException):
                raise fence
            self._fence = fence
            if isinstance(saved, BaseException):
                raise saved
            if fence is not None:
                self._transcript = saved or []
                return
            if self._clock.now() >= deadline:
                raise LoushoError(
                    f"Session '{self._id}' is in use by another process; waited {self._wait_ms:g} ms for its turn to end.",
                    code="LOUSHO_SESSION_BUSY",
                )
            await self._clock.sleep(pause)
            pause = min(pause * 2, LAST_RETRY_S)

    async def _renew(self) -> None:
        """Renews the lease; one that is lost ends the turn, whose save would be refused."""
        while True:
            await self._clock.sleep(LEASE_MS / 3000)
            fence = self._fence
            if fence is None:
                return
            with suppress(LoushoError):  # A store that fails once may answer in time for the next renewal.
                if not await self._sessions.renew(self._id, self._holder, fence, LEASE_MS):
                    log.warning("Session %r was taken over by another process; this turn is stopped.", self._id)
                    self._abort.abort("The session was taken over by another process.")
                    return
