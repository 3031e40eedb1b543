"""`SessionRecords`: what a session has in its stores, and the calls that look at it or clear it without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lousho_ray.cancellation import AbortSignal
from lousho_ray.clock import Clock
from lousho_ray.definition import AgentDefinition
from lousho_ray.durable import PendingTurn, StoreParts, awaiting
from lousho_ray.errors import LoushoError
from lousho_ray.handle import LocalRun
from lousho_ray.ids import new_id
from lousho_ray.messages import Message
from lousho_ray.ports import ApprovalStore
from lousho_ray.stores.entries import turn_key, turn_prefix
from lousho_ray.tools.spill import result_prefix
from lousho_ray.turn_lease import Opening, TurnLease
from lousho_ray.turns import TurnLine


class SessionRecords:
    """The records of one session."""

    def __init__(
        self, definition: AgentDefinition, session_id: str, parts: StoreParts, line: TurnLine[LocalRun], clock: Clock
    ) -> None:
        self._definition = definition
        self._id = session_id
        self._parts = parts
        self._line = line
        self._clock = clock

    async def load(self) -> list[Message]:
        return await self._parts.sessions.load(self._id) or []

    async def pending(self) -> PendingTurn | None:
        saved = await self._saved_turn()
        return None if saved is None or saved[1].get("status") == "finished" else PendingTurn.of(saved[1])

    async def approvals(self) -> ApprovalStore:
        """Where its pauses are."""
        return self._parts.approvals

    async def approval(self, approval_id: str) -> Mapping[str, Any] | None:
        record = await self._parts.approvals.load(approval_id)
        return None if record is None else record[0]

    async def discard_pending(self) -> None:
        """Drops the unfinished turn. A turn that runs is aborted instead; one that has ended and was not saved yet stays."""
        if not self._line.idle:
            raise LoushoError(
                f"Session '{self._id}' has a turn that runs or waits; abort it, which drops it.", code="LOUSHO_SESSION_BUSY"
            )
        if self._parts.checkpoints is None:
            return
        async with self._lease(new_id(), AbortSignal()):  # it may be another process's turn that runs
            saved = await self._saved_turn()
            if saved is not None and saved[1].get("status") != "finished":
                await self._parts.checkpoints.delete(saved[0])

    async def clear(self) -> int:
        if not self._line.idle:
            raise LoushoError(f"Session '{self._id}' cannot be cleared while a turn runs or waits.", code="LOUSHO_SESSION_BUSY")
        async with self._lease(new_id(), AbortSignal()) as lease:
            pending = await self.pending()
            if pending is not None and pending.status == "awaiting-approval":
                raise awaiting(self._id, pending)
            count = len(await self.load())
            if (saved := await self._saved_turn()) is not None and self._parts.checkpoints is not None:
                await self._parts.checkpoints.delete(saved[0])
            await self._forget(turn_prefix(self._id))
            await self._forget(result_prefix(self._id))
            await lease.save([])
        return count

    async def fork_point(self) -> list[Message]:
        """The transcript, unless a turn is about to change it."""
        if not self._line.idle:
            raise LoushoError(f"Session '{self._id}' cannot be forked while a turn runs or waits.", code="LOUSHO_SESSION_BUSY")
        return await self.load()

    async def begin(self, messages: list[Message]) -> bool:
        """Begins the session with a transcript; `False` when it exists already."""
        async with self._lease(new_id(), AbortSignal()) as lease:
            taken = await self._parts.sessions.load(self._id) is not None
            if self._parts.checkpoints is not None:
                for length in (0, len(messages)):
                    taken = taken or await self._parts.checkpoints.load(turn_key(self._id, length)) is not None
            if not taken:
                await lease.save(messages)
            return not taken

    async def _forget_old_turns(self) -> None:
        """Drops all records of turns: in a transcript that was shortened, their lengths come round again."""
        await self._forget(turn_prefix(self._id))

    async def _forget(self, prefix: str) -> None:
        delete_prefix = getattr(self._parts.checkpoints, "delete_prefix", None)
        if delete_prefix is not None:
            await delete_prefix(prefix)

    async def _saved_turn(self) -> tuple[str, dict[str, Any]] | None:
        if self._parts.checkpoints is None:
            return None
        key = turn_key(self._id, len(await self.load()))
        saved = await self._parts.checkpoints.load(key)
        return None if saved is None else (key, saved)

    def _lease(self, run_id: str, abort: AbortSignal, opening: Opening = lambda: None) -> TurnLease:
        definition, parts = self._definition, self._parts
        return TurnLease(
            parts.sessions,
            self._id,
            run_id,
            abort,
            wait_ms=definition.session_wait_ms,
            save_ms=definition.store_timeout_ms,
            clock=self._clock,
            turns=parts.turns,
            opening=opening,
        )
