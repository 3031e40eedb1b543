"""The lease of a turn: the right to write a session, held while the turn runs, over all processes that share the store.

A store without leases (files, a user's own) has none to give: there the line of one process is all the order there is. A lease has
a fencing number: a save under an old one is refused by the store, so a holder that was thought dead cannot overwrite newer state.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lousho_ray.cancellation import AbortSignal
from lousho_ray.clock import SYSTEM_CLOCK, Clock, TimerHandle
from lousho_ray.errors import LoushoError
from lousho_ray.loop.checkpoint import Recorder
from lousho_ray.messages import Message
from lousho_ray.ports import CheckpointStore, SessionStore
from lousho_ray.stores.durable_turns import DurableTurns
from lousho_ray.stores.entries import turn_key
from lousho_ray.stores.saving import SAVE_TIMEOUT_MS, save_in_time

log = logging.getLogger("lousho_ray")

LEASE_MS = 30_000.0
"""How long a holder that cannot be asked after keeps others out; a living one renews its lease three times as often."""

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 0.5

_IN_USE: set[str] = set()
"""The holders of this process. A lease of another one of its holders is left over: the answer to its claim or release was lost."""


Opening = Callable[[], Mapping[str, Any] | None]
"""Makes what is to be saved with the claim as the turn's checkpoint, if anything."""


class TurnLease:
    """Use as an async context manager around a turn.

    Args:
        sessions: The session store.
        session_id: The session.
        run_id: The turn's run, by which others know its lease.
        abort: Fires to end the wait; it is fired when the lease is lost.
        wait_ms: How long to wait for another process's turn.
        save_ms: How long one attempt to save the transcript may take.
        turns: Both ends of a turn in one step each, where the store has that.
        opening: Makes what is to be saved with the claim as the turn's checkpoint, where `turns` can.

    Raises:
        LoushoError: `LOUSHO_SESSION_BUSY`: another process held the session for all of `wait_ms`.
    """

    def __init__(
        self,
        sessions: SessionStore,
        session_id: str,
        run_id: str,
        abort: AbortSignal,
        *,
        wait_ms: float = LEASE_MS,
        save_ms: float = SAVE_TIMEOUT_MS,
        clock: Clock = SYSTEM_CLOCK,
        turns: DurableTurns | None = None,
        opening: Opening = lambda: None,
    ) -> None:
        self._sessions: Any = sessions
        self._id = session_id
        self._abort = abort
        self._wait_ms = wait_ms
        self._save_ms = save_ms
        self._clock = clock
        self._turns = turns
        self._holder = f"{_this_process(os.getpid())}/{run_id}"
        self._fence: int | None = None
        self._timer: TimerHandle | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._transcript: list[Message] | None = None
        self._opened = False
        self._left_behind: dict[str, Any] | None = None
        self._opening = opening
        self.begun: Mapping[str, Any] | None = None
        """The checkpoint that was saved with the claim."""

    @property
    def leased(self) -> bool:
        """Whether the store gives leases."""
        return hasattr(self._sessions, "claim")

    @property
    def given_up(self) -> bool:
        """Whether the wait for it was aborted: the session is somebody else's then."""
        return self.leased and self._fence is None

    async def __aenter__(self) -> TurnLease:
        if self.leased:
            _IN_USE.add(self._holder)
            try:
                await self._claim()
            except BaseException:
                await self.__aexit__()
                raise
            if self._fence is not None:
                self._renew_later()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._renewal is not None:
            self._renewal.cancel()
        self._timer = self._renewal = None
        _IN_USE.discard(self._holder)
        if self._fence is not None:
            fence, self._fence = self._fence, None
            with suppress(Exception):  # A lease that cannot be given back runs out by itself.
                await self._sessions.release(self._id, self._holder, fence)

    async def load(self) -> list[Message]:
        """The transcript; the first time the one that was read together with the claim."""
        transcript, self._transcript = self._transcript, None
        return transcript if transcript is not None else await self._sessions.load(self._id) or []

    async def unfinished(self, checkpoints: CheckpointStore, length: int) -> dict[str, Any] | None:
        """What an earlier turn from a transcript of this length left behind; the first time as it was read with the claim."""
        if self._opened:
            self._opened = False
            return self._left_behind
        return await checkpoints.load(turn_key(self._id, length))

    async def end(self, messages: Sequence[Message], recorder: Recorder, *, shortened: bool) -> bool:
        """Ends a recorded turn in one step: its transcript is saved, its checkpoint deleted, the lease given back.

        `False`: the store cannot do that, nothing was done.
        """
        if self._turns is None or self._fence is None:
            return False
        await recorder.close()
        fence, self._fence = self._fence, None  # nobody renews it from here on
        end = self._turns.end
        try:
            ending = partial(
                end, self._id, messages, holder=self._holder, fence=fence, checkpoint=recorder.key, shortened=shortened
            )
            await save_in_time(ending, self._save_ms, f"Session '{self._id}'")
        except BaseException:
            self._fence = fence
            raise
        return True

    async def held(self) -> bool:
        """Whether nobody has taken the session over: what is stored of it is then this turn's own."""
        return self._fence is None or bool(await self._sessions.renew(self._id, self._holder, self._fence, LEASE_MS))

    async def save(self, messages: Sequence[Message]) -> None:
        """Saves the transcript. The lease is given back after it: a store need not keep the order of calls made at once.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: somebody else has taken the session over meanwhile, or the store failed.
        """
        fence = {} if self._fence is None else {"fence": self._fence}
        await save_in_time(lambda: self._sessions.save(self._id, messages, **fence), self._save_ms, f"Session '{self._id}'")

    async def _claim(self) -> None:
        deadline, pause = self._clock.now() + self._wait_ms / 1000, FIRST_RETRY_S
        while not self._abort.aborted:
            fence, saved = await self._take()
            self._fence = fence
            if isinstance(saved, BaseException):
                raise saved
            if fence is not None:
                self._transcript = saved or []
                return
            if await self._freed_from_the_dead():
                continue
            if self._clock.now() >= deadline:
                raise LoushoError(
                    f"Session '{self._id}' is in use by another process; waited {self._wait_ms:g} ms for its turn to end.",
                    code="LOUSHO_SESSION_BUSY",
                )
            await self._clock.sleep(pause)
            pause = min(pause * 2, LAST_RETRY_S)

    async def _take(self) -> tuple[int | None, list[Message] | BaseException | None]:
        """Claims the lease and reads the transcript, in one go: a store that gathers its work does both in one transaction."""
        if self._turns is not None:
            opening = self._opening()
            opened = await self._turns.open(self._id, self._holder, LEASE_MS, opening=opening)
            self._opened, self._left_behind = opened.fence is not None, opened.checkpoint
            if self._opened and opening is not None:
                found = opened.checkpoint
                if found is None or found.get("runId") == opening["runId"]:  # A call that was sent again finds what it has saved.
                    self._left_behind = None
                    self.begun = {**opening, "sessionId": turn_key(self._id, len(opened.messages or ()))}
            return opened.fence, opened.messages
        claim = self._sessions.claim(self._id, self._holder, LEASE_MS)
        answers: tuple[Any, Any] = await asyncio.gather(claim, self._sessions.load(self._id), return_exceptions=True)
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers

    async def _freed_from_the_dead(self) -> bool:
        """Ends the lease of a process of this machine that is no more, or of a turn of this one; others are waited for."""
        ask = getattr(self._sessions, "holder", None)
        holder: str | None = None if ask is None else await ask(self._id)
        if holder is None or not (_is_dead(holder) or _is_left_over(holder)):
            return False
        await self._sessions.release(self._id, holder)
        return True

    def _renew_later(self) -> None:
        self._timer = self._clock.call_later(LEASE_MS / 3000, self._renew_soon)

    def _renew_soon(self) -> None:
        self._renewal = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        """Renews the lease; one that is lost ends the turn, whose save would be refused."""
        fence = self._fence
        if fence is None:
            return
        with suppress(Exception):  # A store that fails once may answer in time for the next renewal.
            if not await self._sessions.renew(self._id, self._holder, fence, LEASE_MS):
                log.warning("Session %r was taken over by another process; this turn is stopped.", self._id)
                self._abort.abort("The session was taken over by another process.")
                return
        if self._timer is not None:
            self._renew_later()


async def end_lease(sessions: SessionStore, session_id: str, run_id: str) -> None:
    """Ends the lease of a run whose process is known to have died, wherever it ran."""
    store: Any = sessions
    holder: str | None = await store.holder(session_id) if hasattr(store, "holder") else None
    if holder is not None and holder.endswith(f"/{run_id}"):
        await store.release(session_id, holder)


@functools.cache
def _machine() -> str:
    """This boot of this machine and its process namespace: only there does a process id mean the same process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


@functools.cache
def _this_process(pid: int) -> str:
    return f"{pid}.{_started_at(pid)}@{_machine()}"


def _started_at(pid: int) -> str:
    """When a process started, in clock ticks since boot: its id may be in use again. Empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _is_left_over(holder: str) -> bool:
    """Whether a lease's holder was a turn of this process that has ended."""
    return holder.startswith(f"{_this_process(os.getpid())}/") and holder not in _IN_USE


def _is_dead(holder: str) -> bool:
    """Whether a lease's holder was a process of this machine that has ended."""
    process, _, _ = holder.partition("/")
    name, _, machine = process.partition("@")
    pid, _, started_at = name.partition(".")
    return bool(machine) and machine == _machine() and pid.isdigit() and _started_at(int(pid)) != started_at
