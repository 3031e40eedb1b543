"""`TurnAccount`: books one turn of a session in what the session has spent, however the turn ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lousho_ray.clock import Clock
from lousho_ray.errors import LoushoError
from lousho_ray.limits.session_spend import SessionSpend
from lousho_ray.loop.budget import SessionBudget
from lousho_ray.loop.gate import tool_ran
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.state import RunState
from lousho_ray.messages import Message, complete_prefix
from lousho_ray.options import Limits
from lousho_ray.resuming import Unfinished
from lousho_ray.session_compaction import Continuation
from lousho_ray.turn_lease import TurnLease

log = logging.getLogger("lousho_ray")


class TurnAccount:
    """A session keeps its account from the first turn on that has session limits.

    Args:
        limits: The session's.
        history: The transcript when the turn began, which says what earlier turns have spent.
        lease: Of the turn.
        left: The turn as it was left, when this one goes on with it.
        continuation: Set for one without checkpoints.
    """

    def __init__(
        self,
        limits: Limits | None,
        history: Sequence[Message],
        lease: TurnLease,
        clock: Clock,
        *,
        left: Unfinished | None = None,
        continuation: Continuation | None = None,
    ) -> None:
        self._limits = limits
        self._before = SessionSpend.of(history) or (None if limits is None else SessionSpend())
        self._lease = lease
        self._clock = clock
        self._started = clock.now()
        self._ran_ms = 0.0 if left is None else left.state.ran_ms
        self._continuation = continuation
        self._decided = None if left is None else next(iter(left.decisions), None)
        self._over = False

    @property
    def budget(self) -> SessionBudget | None:
        """What the turn is held to besides its own limits."""
        if self._limits is None or self._before is None:
            return None
        return SessionBudget(self._limits, replace(self._before, duration_ms=self._before.duration_ms + self._ran_ms))

    def book(self, result: ExecutionResult[Any]) -> ExecutionResult[Any]:
        """Puts what the session has spent by now on the newest message of a turn that has ended. Aborted turns do not count, and
        paused ones when they end."""
        self._over = True
        if self._before is not None and result.finish_reason not in ("aborted", "awaiting-approval"):
            result.messages = self._after(result.usage, result.steps, self._before).on(result.messages)
            if result.new_messages:
                result.new_messages = [*result.new_messages[:-1], result.messages[-1]]
        return result

    async def failed(self, state: RunState) -> None:
        """A turn without checkpoints failed. What it spent counts all the same, and a call that a person approved and that has
        run stays in the transcript with its result."""
        if self._over:
            return
        try:
            history = await self._lease.load()
            kept = self._with_decided(history, state)
            if self._before is not None and state.usage.model_calls:
                kept = self._after(state.usage, state.steps, self._before).on(kept)
            if kept != history:
                await self._lease.save(kept)
        except LoushoError as error:  # The failure of the turn is the one to tell of.
            log.warning("What a failed turn of a session leaves could not be saved: %s", error)

    def _after(self, usage: Any, steps: int, before: SessionSpend) -> SessionSpend:
        ran_ms = self._ran_ms + (self._clock.now() - self._started) * 1000
        return before.plus(usage.spend, steps=steps, duration_ms=ran_ms)

    def _with_decided(self, history: list[Message], state: RunState) -> list[Message]:
        results = (message for message in state.messages if message.role == "tool" and message.tool_call_id == self._decided)
        if self._continuation is None or not any(map(tool_ran, results)):
            return history
        return self._continuation.transcript(history, complete_prefix(state.messages[1:]))
