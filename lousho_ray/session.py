"""Sessions: what a turn is, what a handle needs of the place where its session lives, and what a turn leaves behind.

A session is a conversation with one writer. Its turns run in a `SessionHost`, a plain class: in this process the handle talks to it
directly, on a cluster it sits in a session actor and the handle reaches it through a link with the same methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lousho_ray.durable import PendingTurn
from lousho_ray.events import ContextCleared, Event
from lousho_ray.handle import RunSource
from lousho_ray.loop.emitter import Stamp
from lousho_ray.loop.open import CallOptions
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.state import Decision
from lousho_ray.messages import Message, complete_prefix
from lousho_ray.option_checks import UNSET
from lousho_ray.options import Compaction
from lousho_ray.ports import Observer
from lousho_ray.session_compaction import SessionCompaction
from lousho_ray.spans import TraceContext

TurnPolicy = Literal["wait", "queue", "steer"]
TURN_POLICIES: tuple[TurnPolicy, ...] = ("wait", "queue", "steer")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One `send()` / `stream()` of a session, as plain data. `mode` is the session's permission mode, `None`: the agent's.

    `trace` says how a turn is traced whose exporter is in another process.
    """

    run_id: str
    input: tuple[Message, ...]
    policy: TurnPolicy = "wait"
    call: CallOptions = field(default_factory=CallOptions)
    observed: bool = False
    mode: Any = None
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """One `approvals.resolve()` on a session's paused turn, as plain data. `principal` is whom the turn acts for."""

    run_id: str
    approval_id: str
    decision: Decision
    observed: bool = False
    mode: Any = None
    principal: Any = None
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """One `session.resume()`: finishes what an interrupted turn left behind, if anything.

    `lost` is the run of that turn when its process is known to have died: its lease is ended first. `business_state` is for durable
    runs of plain sends.
    """

    run_id: str
    observed: bool = False
    lost: str | None = None
    business_state: Any = UNSET
    mode: Any = None
    trace: TraceContext | None = None


Request = TurnRequest | DecisionRequest | ResumeRequest


class SessionLink(Protocol):
    """How a handle reaches the host of its session. `mode` is the handle's permission mode; every request carries it."""

    mode: Any

    async def set_mode(self, mode: Any) -> None:
        """Switches the mode, also of turns that run or wait."""
        ...

    def start(self, request: Request, observers: Sequence[Observer]) -> RunSource:
        """Puts a turn, the continuation of a paused one, or a resume in line at once; `observers` get its events.

        The result of a resume is `None` when nothing is pending.
        """
        ...

    async def load(self) -> list[Message]:
        """The saved transcript."""
        ...

    async def pending(self) -> PendingTurn | None: ...

    async def approval(self, approval_id: str) -> Mapping[str, Any] | None:
        """The record of an open pause of this session."""
        ...

    async def discard_pending(self) -> None: ...

    async def clear(self) -> int:
        """Empties the transcript; the number of messages it had."""
        ...

    async def compact(self, options: Compaction) -> tuple[SessionCompaction, list[Message]]:
        """Compacts the transcript now; what was done, and the transcript as it is then."""
        ...

    async def fork_point(self) -> list[Message]:
        """The transcript to fork from. Raises `LOUSHO_SESSION_BUSY` while a turn runs or waits."""
        ...

    async def begin(self, messages: list[Message]) -> bool:
        """Begins this session with a transcript; `False` when there is one, or a turn of it, already."""
        ...

    def sibling(self, session_id: str, /) -> SessionLink:
        """The link to another session with the same agent and the same store."""
        ...


def transcript(result: ExecutionResult[Any]) -> list[Message]:
    """What a session keeps of a turn: the conversation without its system prompt, cut where a call has no result."""
    messages = result.messages
    return complete_prefix(messages[1:] if messages and messages[0].role == "system" else messages)


def cleared_event(session_id: str, messages: int) -> Event:
    """The event that `session.on()` listeners get after `clear()`."""
    return ContextCleared(**Stamp(session_id).next(), session_id=session_id, messages_cleared=messages)
