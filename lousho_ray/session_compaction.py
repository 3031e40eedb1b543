"""What compaction means for a session: by hand through `session.compact()`, and for what a compacted turn leaves in the stores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lousho_ray.context.compaction import check_compaction, done_fields, tell
from lousho_ray.context.manual import compact_by_hand
from lousho_ray.context.rendering import is_summary
from lousho_ray.definition import AgentDefinition
from lousho_ray.errors import LoushoError
from lousho_ray.events import CompactionDone, CompactionStart, Event
from lousho_ray.limits.session_spend import SessionSpend
from lousho_ray.loop.emitter import Stamp
from lousho_ray.loop.requests import first_of
from lousho_ray.messages import Message, complete_prefix
from lousho_ray.options import Compaction
from lousho_ray.turn_lease import TurnLease
from lousho_ray.usage import Usage


@dataclass(frozen=True, slots=True)
class SessionCompaction:
    """What `session.compact()` did.

    Attributes:
        messages_before: Messages of the transcript; `messages_after` like it.
        tokens_before: Estimate of the transcript; `tokens_after` like it.
        strategy: The strategy that was asked for; `applied` when another did the work.
        error: What failed on the way; the transcript is valid all the same.
        usage: What summary calls used.
        events: `compaction.start` and `compaction.done`; none for an empty transcript.
    """

    messages_before: int
    messages_after: int
    tokens_before: int
    tokens_after: int
    strategy: str
    pruned_tool_call_ids: tuple[str, ...] = ()
    summary: str | None = None
    error: str | None = None
    applied: str | None = None
    usage: Usage = field(default_factory=Usage)
    events: tuple[Event, ...] = field(default=(), repr=False)


def chosen_options(agent: Compaction | None, call: dict[str, Any]) -> Compaction:
    """The options of one `session.compact(...)`: what the call gives, on top of the session's or agent's own.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, with the field `compaction.<key>`.
    """
    given = {key: value for key, value in call.items() if value is not None}
    own = {} if agent is None else {key: getattr(agent, key) for key in agent.model_fields_set if getattr(agent, key) is not None}
    if agent is not None and "summarizer" not in given:
        own["strategy"] = agent.strategy
    if "summarizer" in given:
        own.pop("strategy", None)
    own.pop("summarizer", None)
    checked = check_compaction({**own, **given})
    assert checked is not None
    return checked


async def compact_session(
    lease: TurnLease, definition: AgentDefinition, session_id: str
) -> tuple[SessionCompaction, list[Message]]:
    """Compacts the transcript with the definition's `compaction`, whatever its size, and saves it in one write if it changed."""
    options = definition.compaction if definition.compaction is not None else chosen_options(None, {})
    messages = await lease.load()
    if not messages:
        return SessionCompaction(0, 0, 0, 0, options.strategy.name), messages
    provider: Any = definition.provider
    model = definition.model if isinstance(definition.model, str) else getattr(provider, "default_model", None)
    made = await compact_by_hand(
        messages,
        options,
        model=model,
        stated_window=getattr(provider, "context_window", None),
        limiters=() if definition.rate_limit is None else (definition.rate_limit,),
    )
    kept = messages if made.messages is None else _with_spend(messages, made.messages)
    info, stamp = made.info, Stamp(session_id)
    start = CompactionStart(
        **stamp.next(),
        strategy=info.strategy,
        tokens_before=info.tokens_before,
        context_window=made.bounds.context_window,
        threshold_tokens=made.bounds.threshold_tokens,
        trigger="manual",
    )
    done = CompactionDone(**stamp.next(), **done_fields(info, changed=made.messages is not None), trigger="manual")
    report = SessionCompaction(
        messages_before=len(messages),
        messages_after=len(kept),
        tokens_before=info.tokens_before,
        tokens_after=info.tokens_after,
        strategy=info.strategy,
        pruned_tool_call_ids=info.pruned_tool_call_ids,
        summary=info.summary,
        error=info.error,
        applied=info.applied,
        usage=made.usage,
        events=(start, done),
    )
    if made.messages is not None:
        await lease.save(kept)
    if made.messages is not None or info.error is not None:
        await tell(options.on_compaction, info)
    return report, kept


def _with_spend(messages: list[Message], compacted: list[Message]) -> list[Message]:
    """The compacted transcript with the account of the session, whatever became of the message that carried it."""
    spent = SessionSpend.of(messages)
    return compacted if spent is None or SessionSpend.of(compacted) == spent else spent.on(compacted)


def turn_pending(session_id: str) -> LoushoError:
    return LoushoError(
        f"Session '{session_id}' has an interrupted turn, whose record belongs to the transcript as it is. Finish it with "
        "session.resume() or drop it with session.discard_pending(), then compact.",
        code="LOUSHO_SESSION_TURN_PENDING",
    )


@dataclass(frozen=True, slots=True)
class Continuation:
    """A paused turn that goes on without a checkpoint, as it was then: the transcript `before` it, and its `own` messages."""

    before: list[Message]
    own: list[Message]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Continuation:
        before = complete_prefix(messages[1:])
        return cls(before, list(messages[1 + len(before) :]))

    def transcript(self, present: list[Message], messages: list[Message]) -> list[Message]:
        """What to save in the end: `messages` is the turn's whole conversation, perhaps compacted meanwhile.

        When other turns ran while it waited, what it adds goes to the end of the `present` transcript.
        """
        if present == self.before:
            return messages
        start = first_of(self.own, messages)
        if start == len(messages):  # the paused turn itself is in a summary by now
            start = next((index for index, message in enumerate(messages) if is_summary(message)), 0)
        return [*present, *messages[start:]]


def transcript_digest(messages: Sequence[Message]) -> str:
    """Tells two transcripts of the same length apart."""
    text = json.dumps([message.to_dict() for message in messages], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
