"""`agent.approvals`: the calls that wait for a person, and how a decision continues their run, in this process or another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from lousho_ray.durable import approval_not_found, check_pending
from lousho_ray.errors import AgentDriftError, ConfigurationError, ResumeToolMissingError, ToolArgumentsValidationError
from lousho_ray.handle import AgentRun, RunSource, settle
from lousho_ray.ids import new_id
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.loop.state import Decision
from lousho_ray.loop_thread import SYNC_LOOP
from lousho_ray.messages import decode_bytes
from lousho_ray.option_checks import check_bool, check_choice
from lousho_ray.session import DecisionRequest
from lousho_ray.turn_start import failed_run

if TYPE_CHECKING:
    from lousho_ray.observing import PausedPlace
    from lousho_ray.ports import ApprovalStore

T = TypeVar("T")

Remember: TypeAlias = Literal["args", "tool"]

LEFT_OPEN = (AgentDriftError, ResumeToolMissingError, ToolArgumentsValidationError)
"""What refuses a decision before the pause is taken."""


@dataclass(frozen=True, slots=True)
class PendingApproval:
    """A call that waits for a decision. Times are ISO 8601; `kind` is `tool` or `question`.

    `subagent_path` has the names of the sub-agents that lead to the call, outermost first; empty for a call of the agent itself.
    """

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
    subagent_path: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PendingApproval:
        """From its stored form. Raises `StorageError` (`LOUSHO_STORAGE_FAILED`) for a damaged one."""
        check_pending(record)
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
            subagent_path=tuple(record.get("subagentPath", ())),
        )


class Approvals(Generic[T]):
    """The pauses of one agent.

    Args:
        store: Gives the store where pauses made elsewhere are found.
        link: The link to what a pause belongs to, by the snapshot saved with it: a session, or the run of a plain `send()`.
    """

    def __init__(self, store: Callable[[], Awaitable[ApprovalStore]], link: Callable[[Mapping[str, Any]], PausedPlace]) -> None:
        self._store = store
        self._link = link
        self._made: dict[str, PausedPlace] = {}
        self._watching: set[asyncio.Task[Any]] = set()

    def made(self, approval_id: str, link: PausedPlace) -> None:
        """A run of this agent object paused."""
        self._made[approval_id] = link

    async def list(self, *, all: bool = False) -> list[PendingApproval]:
        """The open pauses that this agent object made in this process, oldest first.

        Args:
            all: Every open pause in the agent's store, whichever process and agent made it.

        Raises:
            ConfigurationError: The approval store cannot list its pauses (it has no `list_pending()`).
        """
        found = {approval_id: await self.get(approval_id) for approval_id in tuple(self._made)}
        if check_bool(all, "all"):
            found |= {pending.id: pending for pending in map(PendingApproval.of, await self._stored())}
        return sorted((pending for pending in found.values() if pending is not None), key=lambda pending: pending.created_at)

    async def _stored(self) -> Sequence[Mapping[str, Any]]:
        store: Any = await self._store()
        if not hasattr(store, "list_pending"):
            text = "The approval store has no list_pending(): it gives one pause by its id only. The built-in stores have it."
            raise ConfigurationError(text, field="all")
        found: Sequence[Mapping[str, Any]] = await store.list_pending(limit=None)
        return found

    async def get(self, id: str) -> PendingApproval | None:
        """An open pause, or `None`."""
        link = self._made.get(id)
        pending = await link.approval(id) if link is not None else await self._found(id)
        return None if pending is None else PendingApproval.of(pending)

    async def resolve(
        self,
        id: str,
        *,
        approved: bool,
        note: str | None = None,
        by: str | None = None,
        args: Mapping[str, Any] | None = None,
        remember: Remember | None = None,
    ) -> ExecutionResult[T]:
        """Decides a pause and continues its run; returns its result, which may be another pause with a new id.

        Args:
            id: The pause's id.
            approved: Whether the call may run.
            note: Told to the tool (`ctx.approval.note`), or to the model with a rejection.
            by: Who decided.
            args: Edited arguments to run the call with.
            remember: Lets later calls of this conversation run unasked: those with the same arguments (`"args"`), or all of this
                tool (`"tool"`).

        Raises:
            LoushoError: `LOUSHO_APPROVAL_NOT_FOUND`: unknown or already decided; of two deciders one gets this.
                `LOUSHO_APPROVAL_ORPHANED`: its turn was dropped. `LOUSHO_APPROVAL_FORBIDDEN`: it needs somebody else's decision.
            ToolArgumentsValidationError: The tool does not take the edited arguments. Like the two below, it leaves the pause open.
            AgentDriftError: The agent changed, and `on_agent_drift` is `"error"`.
            ResumeToolMissingError: The agent no longer has the tool.
        """
        decision = _decision(approved, note, by, args, remember)
        link = await self._find(id)
        if link is None:
            raise approval_not_found(id)
        source = await self._continue(link, DecisionRequest(new_id("run_"), id, decision, observed=False))
        return await self._settled(id, link, source)

    async def answer(self, id: str, answer: str, *, by: str | None = None) -> ExecutionResult[T]:
        """Answers a question that the agent asked.

        Raises:
            ConfigurationError: An empty answer, or the pause is no question; it stays open.
        """
        await self._check_answer(id, answer)
        return await self.resolve(id, approved=True, note=answer, by=by)

    async def stream_resolve(
        self,
        id: str,
        *,
        approved: bool,
        note: str | None = None,
        by: str | None = None,
        args: Mapping[str, Any] | None = None,
        remember: Remember | None = None,
    ) -> AgentRun[T]:
        """`resolve()` as a stream of the continuation's events; one of an unknown id tells of the error and ends."""
        decision = _decision(approved, note, by, args, remember)
        link = await self._find(id)
        if link is None:
            return AgentRun(failed_run(approval_not_found(id)))
        source = await self._continue(link, DecisionRequest(new_id("run_"), id, decision, observed=True))
        watch = asyncio.ensure_future(self._settled(id, link, source))
        self._watching.add(watch)
        watch.add_done_callback(self._watching.discard)
        watch.add_done_callback(lambda done: done.cancelled() or done.exception())
        return AgentRun(source)

    async def stream_answer(self, id: str, answer: str, *, by: str | None = None) -> AgentRun[T]:
        """`answer()` as a stream of the continuation's events."""
        await self._check_answer(id, answer)
        return await self.stream_resolve(id, approved=True, note=answer, by=by)

    def resolve_sync(self, id: str, **options: Any) -> ExecutionResult[T]:
        return SYNC_LOOP.run(self.resolve(id, **options))

    async def _continue(self, place: PausedPlace, request: DecisionRequest) -> RunSource:
        pending = await place.approval(request.approval_id)
        principal = None if pending is None else decode_bytes(pending.get("principal"))
        return place.start(replace(request, principal=principal), ())

    async def _found(self, id: str) -> Mapping[str, Any] | None:
        record = await (await self._store()).load(id)
        return None if record is None else record[0]

    async def _check_answer(self, id: str, answer: object) -> None:
        if not isinstance(answer, str) or not answer.strip():
            raise ConfigurationError("answer must be a text that is not empty.", field="answer")
        pending = await self.get(id)
        if pending is not None and pending.kind != "question":
            raise ConfigurationError(
                f"Approval '{id}' is no question but a call of tool '{pending.tool_name}'; decide it with resolve().", field="id"
            )

    async def _settled(self, id: str, link: PausedPlace, source: RunSource) -> ExecutionResult[T]:
        """The result of a continuation. A decision that was refused before it took the pause leaves that in the list."""
        try:
            result = await settle(source)
        except BaseException as error:
            if not isinstance(error, LEFT_OPEN) and getattr(error, "code", None) != "LOUSHO_APPROVAL_FORBIDDEN":
                self._made.pop(id, None)
            raise
        self._made.pop(id, None)
        if result.approval_id is not None:
            self.made(result.approval_id, link)
        return result

    async def _find(self, id: str) -> PausedPlace | None:
        link = self._made.get(id)
        if link is None and (record := await (await self._store()).load(id)) is not None:
            link = self._link(record[1])
        return link


def _decision(
    approved: object, note: str | None, by: str | None, args: Mapping[str, Any] | None, remember: Remember | None
) -> Decision:
    """The checked decision."""
    decided = check_bool(approved, "approved")
    if args is not None and not isinstance(args, Mapping):
        raise ConfigurationError(f"args must be a dict of the call's arguments, not {type(args).__name__}.", field="args")
    if remember is not None:
        check_choice(remember, "remember", ("args", "tool"))
    for field, value in (("args", args), ("remember", remember)):
        if value is not None and not decided:
            raise ConfigurationError(f"{field} is for approved calls; a rejection takes a note.", field=field)
    return Decision(decided, note, by, None if args is None else dict(args), remember=remember)
