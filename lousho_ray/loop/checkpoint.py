"""Checkpoints: a run as a record, and the recorder that keeps it in a store while the run goes on.

Saves of one run are chained and each takes the newest state, so an older snapshot can never land after a newer one; saves that are
asked for while one is being written become one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from lousho_ray.errors import StorageError, error_name, message_of
from lousho_ray.loop.inbox import Inbox
from lousho_ray.loop.result import ExecutionResult, ToolCallRecord
from lousho_ray.loop.state import Decision, RunState, Status
from lousho_ray.loop.step_json import StepForms, step_from_json
from lousho_ray.messages import ImagePart, Message, decode_bytes, encode_bytes, user
from lousho_ray.ports import CheckpointStore
from lousho_ray.stores.json_form import MALFORMED, damaged, fixed_message, read_message
from lousho_ray.stores.saving import SAVE_TIMEOUT_MS, save_in_time
from lousho_ray.tools.spill import KeptResults
from lousho_ray.usage import Usage

OPENING = "opening"
"""The key that marks the record of a turn which has not begun: its messages are the input alone."""


@dataclass(slots=True)
class RunFacts:
    """What a checkpoint says about a run besides its state: who started it, as whom it goes on, and what its caller keeps there."""

    agent_id: str
    session_id: str | None = None
    principal: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] | None = None
    business_state: Any = None

    def optional(self) -> dict[str, Any]:
        """The JSON form of those that are given."""
        pairs = {"principal": self.principal, "agentFingerprint": self.fingerprint, "businessState": self.business_state}
        return {key: encode_bytes(value) for key, value in pairs.items() if value is not None}

    def record(self) -> dict[str, Any]:
        """What a record says of them, but for those that only some have."""
        return {"agentId": self.agent_id, "metadata": encode_bytes(dict(self.metadata))}


def opening_record(facts: RunFacts, run_id: str, input: Sequence[Message]) -> dict[str, Any]:
    """The record of a session's turn that is about to begin: its input alone. What it goes on from is in the store already.

    It is saved with the turn's lease, under the key of the turn, which nobody knows before.
    """
    messages = [fixed_message(message) for message in input]
    began = {"runId": run_id, "status": "in-progress", "stepIndex": 0, "revision": 1, OPENING: True, "messages": messages}
    return {**began, **facts.record(), "session": facts.session_id, **facts.optional()}


def freeze(state: RunState, forms: StepForms | None = None) -> dict[str, Any]:
    """The state of a run as JSON; `forms` keeps what the next call for the same run can take over."""
    data: dict[str, Any] = {
        "runId": state.run_id,
        "stepIndex": state.steps,
        "messages": [fixed_message(message) for message in state.messages],
        "openedAt": state.opened_at,
        "toolCalls": [{"id": call.id, "name": call.name, "args": encode_bytes(call.args)} for call in state.tool_calls],
        "toolErrors": state.tool_errors,
        "usage": state.usage.to_dict(),
        "stepUsage": (forms or StepForms()).of(state.step_usage),
    }
    if state.reasoning:
        data["reasoning"] = list(state.reasoning)
    if state.repair_issues:
        data["repairIssues"] = [dict(issue) for issue in state.repair_issues]
    if state.settled:
        data["settled"] = {call_id: fixed_message(message) for call_id, message in state.settled.items()}
    if state.begun:
        data["begun"] = sorted(state.begun)
    if state.children:
        data["children"] = {call_id: dict(child) for call_id, child in state.children.items()}
    if state.images:
        data["images"] = {call_id: user(images).to_dict() for call_id, images in state.images.items()}
    if state.last_text:
        data["lastText"] = state.last_text
    if state.model is not None:
        data["runConfig"] = {"model": state.model}
    if state.ran_ms:
        data["ranMs"] = state.ran_ms
    if state.trace_id is not None:
        data["traceId"] = state.trace_id
    return data


def thaw(data: Mapping[str, Any], run_id: str) -> tuple[RunState, list[Message]]:
    """The state a record holds, and the input that waited behind unanswered calls: it joins after their results.

    Fields that an older version did not write are taken as unset.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the record is damaged.
    """
    try:
        return _thawed(check_record(data), run_id)
    except MALFORMED as error:
        raise _damaged(data, error) from error


def check_record(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record, with what its next save hangs on.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the record is damaged.
    """
    if (status := data.get("status", "in-progress")) not in get_args(Status):
        raise _damaged(data, ValueError(f"unknown status {status!r}"))
    for keys, kind in _KINDS.items():
        for key in keys:
            if key in data and not isinstance(data[key], kind):
                raise _damaged(data, TypeError(f"{key} is a {type(data[key]).__name__}"))
    for child in data.get("children", {}).values():
        if not isinstance(child, Mapping) or not all(isinstance(child.get(key), str) for key in ("path", "pausedToolCall")):
            raise _damaged(data, TypeError("one of its children is none"))
    return data


_KINDS: Mapping[tuple[str, ...], Any] = {
    ("revision", "attempts", "stepIndex", "openedAt", "toolErrors"): int,
    ("ranMs",): int | float,
    ("metadata", "agentFingerprint", "decisions", "settled", "children", "lastError", "runConfig"): Mapping,
    ("approvalId", "approvalCallId", "session"): str | None,
}
"""What fields of a record are, those that others than `thaw` read."""


def stored_messages(data: Mapping[str, Any]) -> list[Message]:
    """The messages of a record.

    Raises:
        StorageError: `LOUSHO_STORAGE_FAILED`: the record is damaged.
    """
    try:
        return [read_message(message) for message in data["messages"]]
    except MALFORMED as error:
        raise _damaged(data, error) from error


def _damaged(data: Mapping[str, Any], error: Exception) -> StorageError:
    name = data.get("sessionId", data.get("runId"))
    return damaged(f"The record of run {name!r}", f"{type(error).__name__}: {error}")


def _thawed(data: Mapping[str, Any], run_id: str) -> tuple[RunState, list[Message]]:
    messages = stored_messages(data)
    waiting = _behind_open_calls(messages)
    state = RunState(
        run_id=run_id,
        messages=messages[: len(messages) - len(waiting)],
        opened_at=min(data.get("openedAt", len(messages)), len(messages)),
        steps=data.get("stepIndex", 0),
        usage=Usage.from_dict(data.get("usage", {})),
        step_usage=[step_from_json(entry) for entry in data.get("stepUsage", ())],
        tool_calls=[ToolCallRecord(call["id"], call["name"], decode_bytes(call.get("args"))) for call in data.get("toolCalls", ())],
        tool_errors=data.get("toolErrors", 0),
        reasoning=list(data.get("reasoning", ())),
        last_text=data.get("lastText", ""),
        repair_issues=tuple(data.get("repairIssues", ())),
        settled={call_id: read_message(message) for call_id, message in data.get("settled", {}).items()},
        begun=set(data.get("begun", ())),
        children=dict(data.get("children", {})),
        images={call_id: _images(message) for call_id, message in data.get("images", {}).items()},
        model=(data.get("runConfig") or {}).get("model"),
        ran_ms=data.get("ranMs", 0.0),
        trace_id=data.get("traceId"),
    )
    return state, waiting


_OF_THE_START = frozenset({"businessState", OPENING})


TAKEN_UP = 1_000
"""How far the revisions of a run that is taken up are ahead: one that was thought dead and goes on cannot overwrite them."""


class Recorder:
    """Keeps the checkpoint of one run.

    `saved` is the record that an earlier process left of it; `timeout_ms` bounds each attempt of a save; `results` are the long
    ones that records name. Once the run has paused or finished, nothing more is saved in progress: input that was queued too late
    must not bring the run back to life.
    """

    def __init__(
        self,
        store: CheckpointStore,
        key: str,
        facts: RunFacts,
        *,
        saved: Mapping[str, Any] | None = None,
        timeout_ms: float = SAVE_TIMEOUT_MS,
        keeps_results: bool = False,
    ) -> None:
        self.key = key
        self.results = KeptResults(facts.session_id, store) if keeps_results else None
        self.facts = facts
        self.decisions: dict[str, Decision] = {}
        self._last: dict[str, Any] | None = None if saved is None else dict(saved)
        self._noting: set[asyncio.Task[None]] = set()
        self._attempts: int = (saved or {}).get("attempts", 0)
        self._store = store
        self._timeout_ms = timeout_ms
        self.held: Callable[[], Awaitable[bool]] | None = None
        """Whether nobody has taken the run over."""
        self.own = True
        """`False` for the turn of an earlier call, which a later one finishes first: aborting that one does not drop it."""
        self._revision: int = 0 if saved is None else saved.get("revision", 0) + TAKEN_UP
        self._forms = StepForms()
        self._over = False
        self._lock = asyncio.Lock()
        self._asked = 0
        self._saved = 0

    @property
    def begun(self) -> bool:
        """Whether there is a record."""
        return self._last is not None

    async def save(
        self, state: RunState, waiting: Callable[[], tuple[Message, ...]] = tuple, *, status: Status = "in-progress", **extra: Any
    ) -> None:
        """Saves the run as it stands now; returns once a save that began after this call is in the store.

        `waiting` gives the input that has not joined yet, at the moment the record is made: it stands at the end of its messages.
        """
        self._asked += 1
        wanted = self._asked
        async with self._lock:
            if status == "in-progress" and (self._over or self._saved >= wanted):
                return
            self._over = status != "in-progress"
            covers = self._asked
            await self._write({**self._record(state, waiting()), "status": status, **extra})
            self._saved = covers

    async def begin(self, state: RunState, waiting: Callable[[], tuple[Message, ...]]) -> None:
        """Saves that a call starts which may not be repeated. When this returns, whoever takes the run over will read it.

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: the run was taken over already.
        """
        await self.save(state, waiting)
        if self.held is not None and not await self.held():
            raise StorageError(f"Run '{self.key}' was taken over by another process; a call with effect='once' was not started.")

    async def decide(self, call_id: str, decision: Decision, state: RunState, waiting: tuple[Message, ...]) -> None:
        """Replaces a pause by the run in progress with its decision: a crash from here on does not ask again."""
        self.decisions[call_id] = decision
        await self.save(state, lambda: waiting)

    async def finished(self, result: ExecutionResult[Any], replaces: str | None = None) -> None:
        """Marks the run as finished, with the whole conversation: nothing of it is asked for again.

        `replaces` is the digest of the transcript it takes the place of, for one that was shortened on the way.
        """
        async with self._lock:
            self._over = True
            about = {} if replaces is None else {"replaces": replaces}
            ended = {"status": "finished", "finishReason": result.finish_reason, **about}
            await self._write({**self._ended(result), **ended})

    async def stopped(self, result: ExecutionResult[Any]) -> None:
        """Keeps an aborted run as it is, to be taken up again."""
        async with self._lock:
            self._over = True
            await self._write({**self._ended(result), "status": "in-progress"})

    def _ended(self, result: ExecutionResult[Any]) -> dict[str, Any]:
        """The record of a run that has ended."""
        last = {key: value for key, value in (self._last or {"sessionId": self.key}).items() if key not in _OF_THE_START}
        return {
            **last,
            **self.facts.optional(),
            "messages": [fixed_message(message) for message in result.messages],
            "toolCalls": [{"id": call.id, "name": call.name, "args": encode_bytes(call.args)} for call in result.tool_calls],
            "stepIndex": result.steps,
            "stepUsage": self._forms.of(result.step_usage),
            "usage": result.usage.to_dict(),
            "toolErrors": result.tool_errors,
            "settled": {},
            "children": {},
            "images": {},
        }

    async def failed(self, error: BaseException) -> None:
        """Notes a failure that trying again cannot mend, beside the last good state."""
        async with self._lock:
            if self._last is not None:
                about = {"name": error_name(error), "message": message_of(error), "code": getattr(error, "code", None)}
                await self._write({**self._last, "lastError": about, "attempts": self._attempts + 1})

    def note(self, state: RunState, inbox: Inbox) -> None:
        """Saves soon: input was queued. What goes wrong shows at the next save."""
        task = asyncio.ensure_future(self.save(state, lambda: inbox.pending))
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def noted(self) -> None:
        """Returns when the saves that `note` began have ended."""
        if self._noting:
            await asyncio.wait(self._noting)

    async def close(self) -> None:
        """Ends the recording: when this returns no save is under way, and none will be."""
        self._over = True
        await self.noted()
        async with self._lock:
            return

    async def delete(self) -> None:
        await self.close()
        await self._store.delete(self.key)

    async def _write(self, record: dict[str, Any]) -> None:
        if self.results is not None:
            await save_in_time(self.results.save, self._timeout_ms, f"A result of '{self.key}'")
        self._revision += 1
        numbered = {**record, "revision": self._revision}
        await save_in_time(lambda: self._store.save(numbered), self._timeout_ms, f"Checkpoint '{self.key}'")
        self._last = record

    def _record(self, state: RunState, waiting: tuple[Message, ...]) -> dict[str, Any]:
        data = freeze(state, self._forms)
        data["messages"] += [fixed_message(message) for message in waiting]
        if self.decisions:
            data["decisions"] = {call_id: asdict(decision) for call_id, decision in self.decisions.items()}
        facts = self.facts
        data |= {"sessionId": self.key, **facts.record()}
        if facts.session_id is not None and facts.session_id != self.key:
            data["session"] = facts.session_id
        return data | facts.optional()


def _behind_open_calls(messages: list[Message]) -> list[Message]:
    """User messages at the end that stand behind calls without results."""
    end = len(messages)
    while end and messages[end - 1].role == "user":
        end -= 1
    answered: set[str] = set()
    for message in reversed(messages[:end]):
        if message.role == "tool" and message.tool_call_id is not None:
            answered.add(message.tool_call_id)
        else:
            open_calls = [call for call in message.tool_calls if call.id not in answered]
            return messages[end:] if open_calls else []
    return []


def _images(message: Mapping[str, Any]) -> tuple[ImagePart, ...]:
    return tuple(part for part in read_message(message).content if isinstance(part, ImagePart))
