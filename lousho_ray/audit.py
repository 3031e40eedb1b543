"""The audit of decisions on tool calls, taken down where the caller of a run is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lousho_ray.cancellation import AbortReason
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import AgentExecutionError, message_of
from lousho_ray.events import Event, PermissionDecision
from lousho_ray.ports import Observer


class Audit:
    """Hands each decision on a tool call to `on_permission_decision`, in order. When that fails, the run does.

    In the caller's process a call only runs once its decision has been taken down; of a run elsewhere the entries arrive with its
    events, and a failure stops it as soon as that is known.
    """

    def __init__(self, callback: Callable[..., Any], principal: Any = None) -> None:
        self._callback = callback
        self._about = {"principal": principal}
        self._abort: Callable[[AbortReason], object] | None = None
        self._failure: AbortReason | None = None
        self._last: asyncio.Task[None] | None = None

    def attach(self, abort: Callable[[AbortReason], object]) -> None:
        """How the run is stopped."""
        self._abort = abort
        if self._failure is not None:
            abort(self._failure)

    def __call__(self, event: Event) -> None:
        if not isinstance(event, PermissionDecision) or self._failure is not None:
            return
        try:
            answer = self._callback(event, self._about)
        except (Exception, SystemExit) as error:
            self._fail(error)
            return
        if inspect.isawaitable(answer):
            self._last = asyncio.ensure_future(self._after(self._last, answer))

    async def settled(self) -> None:
        """Returns once every entry so far has been taken down."""
        if self._last is not None:
            await asyncio.wait({self._last})

    async def _after(self, earlier: asyncio.Task[None] | None, answer: Any) -> None:
        if earlier is not None:
            await asyncio.wait({earlier})
        try:
            await answer
        except (Exception, SystemExit) as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        text = f"on_permission_decision raised {type(error).__name__}: {message_of(error)}"
        self._failure = AbortReason("AuditError", text, error=AgentExecutionError(text))
        if self._abort is not None:
            self._abort(self._failure)


def audits(definition: AgentDefinition, principal: Any) -> list[Observer]:
    """The audit of one run, if the agent has one. `attach()` it once the run has started."""
    callback = definition.on_permission_decision
    return [] if callback is None else [Audit(callback, principal)]


def attach(observers: Sequence[Observer], abort: Callable[[AbortReason], object]) -> None:
    """Tells the audit among the observers of a run how that is stopped."""
    for observer in observers:
        if isinstance(observer, Audit):
            observer.attach(abort)
