"""`agent.approvals`: the calls that wait for a person, and how a decision continues their run, in this process or another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lousho_ray.durable import approval_not_found
from lousho_ray.errors import ConfigurationError
from lousho_ray.handle import AgentRun, settle
from lousho_ray.ids import new_id
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.state import Decision
from lousho_ray.loop_thread import SYNC_LOOP
from lousho_ray.messages import decode_bytes
from lousho_ray.session import DecisionRequest, SessionLink

if TYPE_CHECKING:
    from lousho_ray.ports import ApprovalStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PendingApproval:
    """A call that waits for a decision. Times are ISO 8601; `kind` is `tool` or `question`."""

    id: str
    tool_call_id: str
    tool_name: str
    args: Mapping[str, Any]
    created_at: str
    kind: str = "tool"
    agent_id: str | None = None
    expires_at: str | None = None
    question: Mapping[str, Any] | None = None
    principal: Any = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PendingApproval:
        return cls(
            id=record["id"],
            tool_call_id=record["toolCallId"],
            tool_name=record["toolName"],
            args=decode_bytes(record.get("args", {})),
            created_at=record.get("createdAt", ""),
            kind=record.get("kind", "tool"),
            agent_id=record.get("agentId"),
            expires_at=record.get("expiresAt"),
            question=record.get("question"),
            principal=decode_bytes(record.get("principal")),
        )


class Approvals(Generic[T]):
    """The pauses of one agent.

    Args:
        store: Gives the store where pauses made elsewhere are found.
        session: The link to a session, or to the run of a plain `send()` (`None`), that a pause belongs to.
    """

    def __init__(self, store: Callable[[], Awaitable[ApprovalStore]], session: Callable[[str | None], SessionLink]) -> None:
        self._store = store
        self._session = session
        self._made: dict[str, SessionLink] = {}

    def made(self, approval_id: str, link: SessionLink) -> None:
        """A run of this agent object paused."""
        self._made[approval_id] = link

    async def list(self) -> list[PendingApproval]:
        """The open pauses that this agent object made in this process, oldest first."""
        found = [(await self.get(approval_id)) for approval_id in tuple(self._made)]
        return sorted((pending for pending in found if pending is not None), key=lambda pending: pending.created_at)

    async def get(self, id: str) -> PendingApproval | None:
        """An open pause, or `None`."""
        link = self._made.get(id)
        pending = await link.approval(id) if link is not None else await self._found(id)
        return None if pending is None else PendingApproval.of(pending)

    async def resolve(
        self, id: str, *, approved: bool, note: str | None = None, by: str | None = None, args: Mapping[str, Any] | None = None
    ) -> ExecutionResult[T]:
        """Decides a pause and continues its run; returns its result, which may be another pause with a new id.

        Args:
            id: The pause's id.
            approved: Whether the call may run.
            note: Told to the tool (`ctx.approval.note`), or to the model with a rejection.
            by: Who decided.
            args: Edited arguments to run the call with.

        Raises:
            LoushoError: `LOUSHO_APPROVAL_NOT_FOUND`: unknown or already decided; of two deciders one gets this.
        """
        return await settle(await self._start(id, Decision(_checked(approved), note, by, args), observed=False))

    async def answer(self, id: str, answer: str, *, by: str | None = None) -> ExecutionResult[T]:
        """Answers a question that the agent asked."""
        return await self.resolve(id, approved=True, note=answer, by=by)

    async def stream_resolve(
        self, id: str, *, approved: bool, note: str | None = None, by: str | None = None, args: Mapping[str, Any] | None = None
    ) -> AgentRun[T]:
        """`resolve()` as a stream of the continuation's events."""
        return AgentRun(await self._start(id, Decision(_checked(approved), note, by, args), observed=True))

    async def stream_answer(self, id: str, answer: str, *, by: str | None = None) -> AgentRun[T]:
        """`answer()` as a stream of the continuation's events."""
        return await self.stream_resolve(id, approved=True, note=answer, by=by)

    def resolve_sync(self, id: str, **options: Any) -> ExecutionResult[T]:
        return SYNC_LOOP.run(self.resolve(id, **options))

    async def _found(self, id: str) -> Mapping[str, Any] | None:
        record = await (await self._store()).load(id)
        return None if record is None else record[0]

    async def _start(self, id: str, decision: Decision, *, observed: bool) -> Any:
        link = self._made.pop(id, None)
        if link is None:
            record = await (await self._store()).load(id)
            if record is None:
                raise approval_not_found(id)
            link = self._session(record[1].get("session"))
        return link.start(DecisionRequest(new_id("run_"), id, decision, observed), ())


def _checked(approved: object) -> bool:
    if not isinstance(approved, bool):
        raise ConfigurationError(f"approved must be True or False; got {approved!r}.", field="approved")
    return approved
