"""The history of durable runs, and forks of them: a new run that starts from a moment of another one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.ids import check_run_id
from lousho_ray.loop.checkpoint import OPENING, stored_messages
from lousho_ray.loop.input import as_messages
from lousho_ray.messages import encode_bytes, tool_result
from lousho_ray.option_checks import unknown_key
from lousho_ray.tools.results import encode_result

PATCH_KEYS = ("messages", "business_state", "tool_result", "append_input")
OF_THE_SOURCE = frozenset(
    {"approvalId", "approvalKind", "approvalCallId", "decisions", "lastError", "attempts", "finishReason", "replaces", "revision"}
)
"""What belongs to the life of the forked run: its pause, its failure, its end."""


@dataclass(frozen=True, slots=True)
class RunFork:
    """A forked run: `await agent.resume(fork.session_id)` runs it."""

    session_id: str
    step: int
    checkpoint: Mapping[str, Any]


async def get_checkpoint_history(store: Any, id: str, limit: int | None = None) -> list[dict[str, Any]] | None:
    """The kept saves of a run, newest first: `{"step", "saved_at", "status", "checkpoint"}`.

    Args:
        store: A store, or its checkpoints part.
        id: The `session_id` of the run; `<session id>.turn-<n>` for a turn of a session.
        limit: At most so many.

    Returns:
        `[]` for an unknown id, `None` for a store that keeps no history.
    """
    history = getattr(getattr(store, "checkpoints", store), "history", None)
    return None if history is None else [dict(entry) for entry in await history(id, limit=limit)]


async def fork_run(
    checkpoints: Any, id: str, from_step: int, patch: Mapping[str, Any] | None, new_session_id: str | None
) -> RunFork:
    """Saves a run of a new id that goes on from a step of run `id`. See `Agent.fork`."""
    changes = _checked(patch)
    entries = await get_checkpoint_history(checkpoints, id)
    if entries is None:
        raise ConfigurationError("The store keeps no history of checkpoints, so there is nothing to fork from.", field="store")
    entries = [entry for entry in entries if not entry["checkpoint"].get(OPENING)]  # nothing but the input of a session's turn
    entry = next((entry for entry in entries if entry["step"] == from_step), None)
    if entry is None:
        kept = ", ".join(str(step) for step in sorted({entry["step"] for entry in entries})) or "none"
        text = f"No checkpoint of run '{id}' at step {from_step!r} is kept; steps kept: {kept}."
        raise LoushoError(text, code="LOUSHO_CHECKPOINT_NOT_FOUND")
    record = {key: value for key, value in entry["checkpoint"].items() if key not in OF_THE_SOURCE}
    record |= {"status": "in-progress", **_patched(record, changes)}
    record["sessionId"] = new_id = await _new_id(checkpoints, id, new_session_id)
    await checkpoints.save({**record, "revision": 1})
    return RunFork(new_id, entry["step"], record)


async def _new_id(checkpoints: Any, id: str, wanted: str | None) -> str:
    if wanted is not None:
        if await checkpoints.load(check_run_id(wanted, "new_session_id")) is not None:
            raise ConfigurationError(f"There is a run '{wanted}' already; choose another id.", field="new_session_id")
        return wanted
    for number in itertools.count(1):
        name = check_run_id(f"{id}.fork-{number}", "id")
        if await checkpoints.load(name) is None:
            return name
    raise AssertionError("unreachable")


def _checked(patch: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if patch is None:
        return {}
    if not isinstance(patch, Mapping):
        raise ConfigurationError(f"patch must be a dict, not {type(patch).__name__}.", field="patch")
    for key in patch:
        if key not in PATCH_KEYS:
            raise unknown_key(key, PATCH_KEYS, "patch")
    if "messages" in patch and not callable(patch["messages"]):
        raise ConfigurationError("patch.messages must be a function of the list of messages.", field="patch.messages")
    result = patch.get("tool_result")
    if result is not None and (not isinstance(result, Mapping) or set(result) != {"tool_call_id", "result"}):
        raise ConfigurationError("patch.tool_result must be a dict with tool_call_id and result.", field="patch.tool_result")
    return patch


def _patched(record: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the record that a patch changes: its messages, and results that are in ahead of earlier ones."""
    messages = stored_messages(record)
    settled = dict(record.get("settled", {}))
    if "messages" in patch:
        messages = list(patch["messages"](messages))
    if patch.get("tool_result") is not None:
        wanted, text = patch["tool_result"]["tool_call_id"], encode_result(patch["tool_result"]["result"]).text
        call = next((call for message in reversed(messages) for call in message.tool_calls if call.id == wanted), None)
        if call is None:
            raise ConfigurationError(f"The run has no call {wanted!r} up to that step.", field="patch.tool_result.tool_call_id")
        made = tool_result(call, text)
        if any(message.tool_call_id == wanted for message in messages):
            messages = [made if message.tool_call_id == wanted else message for message in messages]
        else:
            settled[wanted] = made.to_dict()
    if "append_input" in patch:
        messages += as_messages(patch["append_input"])
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        raise ConfigurationError(
            "The run had its final reply at that step: give the fork something to answer: patch={'append_input': ...}.",
            field="patch.append_input",
        )
    changed: dict[str, Any] = {"messages": [message.to_dict() for message in messages], "settled": settled}
    return changed | {"businessState": encode_bytes(patch["business_state"])} if "business_state" in patch else changed
