"""What stores read of the records they keep, and the small records they answer with.

Checkpoints, pauses and snapshots are opaque JSON; only the key fields named here are looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypedDict

from lousho_ray.clock import Clock, timestamp
from lousho_ray.errors import ConfigurationError, StorageError
from lousho_ray.ids import check_run_id
from lousho_ray.stores.json_form import SplitRecord

DEFAULT_HISTORY_LIMIT = 50


class SessionInfo(TypedDict):
    """One saved session. `updated_at` is ISO 8601 (UTC, milliseconds), `messages` their number."""

    id: str
    updated_at: str
    messages: int


class HistoryEntry(TypedDict):
    """One kept save of a checkpoint. `saved_at` is ISO 8601."""

    step: int
    saved_at: str
    status: str
    checkpoint: dict[str, Any]


class ApprovalClaim(TypedDict):
    """Who took a pause. `claimed_at` is ISO 8601; `token` and `decision` are the claimer's own."""

    token: str | None
    claimed_at: str
    decision: dict[str, Any] | None


class PruneCounts(TypedDict):
    """How many records were deleted."""

    sessions: int
    checkpoints: int
    approvals: int


ApprovalRecord = tuple[dict[str, Any], dict[str, Any]]
"""A pause and its snapshot."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The key fields of a checkpoint."""

    id: str
    step: int
    status: str
    revision: int | None
    approval_id: str | None

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> CheckpointFacts:
        """Reads them.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_INVALID`: it is no mapping; `LOUSHO_SESSION_ID_INVALID`: its `sessionId` is no id.
        """
        if not isinstance(checkpoint, Mapping):
            raise ConfigurationError(f"a checkpoint is a dict; got a {type(checkpoint).__name__}.", field="checkpoint")
        step, status, revision = checkpoint.get("stepIndex"), checkpoint.get("status"), checkpoint.get("revision")
        approval_id = checkpoint.get("approvalId")
        return cls(
            id=check_run_id(checkpoint.get("sessionId"), "checkpoint['sessionId']"),
            step=step if isinstance(step, int) else 0,
            status=status if isinstance(status, str) else "in-progress",
            revision=revision if isinstance(revision, int) else None,
            approval_id=approval_id if isinstance(approval_id, str) else None,
        )

    def check_newer_than(self, stored: int | None, path: str | None = None) -> bool:
        """Whether this is a new save (`False`: the same save sent again).

        Raises:
            StorageError: `LOUSHO_STORAGE_FAILED`: what is stored has a higher revision.
        """
        if stored is None or self.revision is None:
            return True
        if self.revision < stored:
            raise StorageError(
                f"Checkpoint '{self.id}' was not saved: revision {self.revision} is older than the stored revision {stored}.",
                path=path,
            )
        return self.revision > stored


def approval_id_of(pending: Mapping[str, Any]) -> str:
    """The checked `id` of a pause."""
    if not isinstance(pending, Mapping):
        raise ConfigurationError(f"a pending approval is a dict; got a {type(pending).__name__}.", field="pending")
    return check_run_id(pending.get("id"), "pending['id']")


def session_of(pending: Mapping[str, Any], snapshot: Mapping[str, Any]) -> str | None:
    """The run a pause belongs to, when the records say so."""
    found = snapshot.get("sessionId", pending.get("sessionId"))
    return found if isinstance(found, str) else None


_TURN_KEY = re.compile(r"\.(?:turn-\d+|paused)\Z")


def turn_prefix(session_id: str) -> str:
    """What the checkpoint ids of all turns of a session begin with."""
    return f"{session_id}.turn-"


def turn_key(session_id: str, transcript_length: int) -> str:
    """The checkpoint id of a session's turn: another process finds it without any bookkeeping."""
    return f"{session_id}.turn-{transcript_length}"


def turn_length(key: str) -> int:
    """The length of the transcript that the turn of a `turn_key()` began from."""
    return int(key.rpartition("-")[2])


def base_session(run_id: str) -> str:
    """`trip.turn-3` and `trip.paused` belong to the session `trip`; any other id is its own."""
    return _TURN_KEY.sub("", run_id)


def check_history_limit(limit: int) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ConfigurationError(
            f"history_limit must be a whole number from 0 (no history) up; got {limit!r}.", field="history_limit"
        )
    return limit


def check_limit(limit: int | None) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise ConfigurationError(f"limit must be a whole number from 0 up, or None for all; got {limit!r}.", field="limit")
    return limit


def check_prefix(prefix: str) -> str:
    return check_run_id(prefix, "prefix")


def cutoff_ms(older_than_ms: float, now_ms: int) -> int:
    """The time before which records are old.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: not a number from 0 up.
    """
    if isinstance(older_than_ms, bool) or not isinstance(older_than_ms, int | float) or not older_than_ms >= 0:
        raise ConfigurationError(
            f"older_than_ms must be a number of milliseconds from 0 up; got {older_than_ms!r}.", field="older_than_ms"
        )
    return now_ms - min(round(older_than_ms), now_ms) if older_than_ms != float("inf") else 0


def milliseconds(clock: Clock) -> Callable[[], int]:
    """The clock's wall time in whole epoch milliseconds."""
    return partial(_wall_ms, clock)


def _wall_ms(clock: Clock) -> int:
    return round(clock.wall() * 1000)


def iso(epoch_ms: int) -> str:
    return timestamp(epoch_ms / 1000)


def epoch_ms(iso_time: str, field: str) -> int:
    """The inverse of `iso`."""
    try:
        return round(datetime.fromisoformat(iso_time).timestamp() * 1000)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{field} must be an ISO 8601 time; got {iso_time!r}.", field=field) from error


def newest_page(found: list[SessionInfo], limit: int | None, before: SessionInfo | None) -> list[SessionInfo]:
    """One page of session records, newest first."""
    check_limit(limit)
    found.sort(key=lambda info: (info["updated_at"], info["id"]), reverse=True)
    if before is not None:
        last = (before["updated_at"], before["id"])
        found = [info for info in found if (info["updated_at"], info["id"]) < last]
    return found[:limit]


def history_entry(facts: CheckpointFacts, record: SplitRecord, saved_at_ms: int, path: str | None = None) -> HistoryEntry:
    checkpoint = record.join(f"checkpoint '{facts.id}'", path)
    return HistoryEntry(step=facts.step, saved_at=iso(saved_at_ms), status=facts.status, checkpoint=checkpoint)
