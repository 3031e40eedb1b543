"""The steps of a session, and where a fork of it begins. Pure functions of a transcript."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lousho_ray.errors import ConfigurationError
from lousho_ray.limits.session_spend import SESSION_USAGE, spend_record
from lousho_ray.messages import Message, tool_result
from lousho_ray.option_checks import unknown_key
from lousho_ray.tools.results import encode_result

MAX_ID_CHARS = 128


@dataclass(frozen=True, slots=True)
class StepCall:
    """A tool call of a step. `args` is the parsed JSON, or the raw text; `result` the text the model saw."""

    id: str
    name: str
    args: Any
    result: str | None


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One assistant message and the tool messages that answer it.

    Attributes:
        step: Its number in the session, from 1.
        turn: Which user message it answers, from 0.
        message_index: Where its assistant message stands in the transcript.
    """

    step: int
    turn: int
    message_index: int
    text: str
    tool_calls: tuple[StepCall, ...] = ()


def steps_of(messages: Sequence[Message]) -> list[SessionStep]:
    """The steps of a transcript, oldest first."""
    found: list[SessionStep] = []
    users = 0
    for index, message in enumerate(messages):
        users += message.role == "user"
        if message.role != "assistant":
            continue
        answers = {answer.tool_call_id: answer.text for answer in _answers(messages, index)}
        calls = tuple(StepCall(call.id, call.name, _args(call.arguments), answers.get(call.id)) for call in message.tool_calls)
        found.append(SessionStep(len(found) + 1, max(0, users - 1), index, message.text, calls))
    return found


def kept_until(messages: Sequence[Message], from_step: object) -> list[Message]:
    """The transcript up to and with a step's last tool message; step 0 keeps nothing.

    Raises:
        ConfigurationError: `LOUSHO_SESSION_STEP_NOT_FOUND`, with the steps there are.
    """
    steps = steps_of(messages)
    if not isinstance(from_step, int) or isinstance(from_step, bool) or not 0 <= from_step <= len(steps):
        raise ConfigurationError(
            f"The session has no step {from_step!r}; from_step is a whole number from 0 to {len(steps)}.",
            code="LOUSHO_SESSION_STEP_NOT_FOUND",
            field="from_step",
        )
    if from_step == 0:
        return []
    index = steps[from_step - 1].message_index
    return list(messages[: index + 1 + len(_answers(messages, index))])


def with_patch(messages: Sequence[Message], patch: Mapping[str, Any] | None) -> list[Message]:
    """The messages with the result of one tool call replaced: `{"tool_result": {"tool_call_id": ..., "result": ...}}`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: another key, or a call that the kept part does not have.
    """
    if patch is None:
        return list(messages)
    change = _checked(patch, "patch", ("tool_result",)).get("tool_result")
    asked = _checked(change, "patch.tool_result", ("tool_call_id", "result"))
    for key in ("tool_call_id", "result"):
        if key not in asked:
            raise ConfigurationError(f"patch.tool_result needs the key '{key}'.", field=f"patch.tool_result.{key}")
    wanted = asked["tool_call_id"]
    at = next((index for index, message in enumerate(messages) if message.role == "tool" and message.tool_call_id == wanted), None)
    if at is None:
        raise ConfigurationError(
            f"The kept part of the session has no result of a call {wanted!r}; history() lists the calls.",
            field="patch.tool_result.tool_call_id",
        )
    call = next(call for message in reversed(messages[:at]) for call in message.tool_calls if call.id == wanted)
    spent = spend_record(messages[at])
    metadata = None if spent is None else {SESSION_USAGE: spent}
    return [*messages[:at], tool_result(call, encode_result(asked["result"]).text, metadata=metadata), *messages[at + 1 :]]


def fork_ids(session_id: str) -> Iterator[str]:
    """`<id>-fork-1`, `<id>-fork-2`, ...; an id that would become too long is cut and told apart by a hash."""
    for number in itertools.count(1):
        ending = f"-fork-{number}"
        if len(session_id) + len(ending) > MAX_ID_CHARS:
            ending = f"-{hashlib.sha256(session_id.encode()).hexdigest()[:8]}{ending}"
        yield session_id[: MAX_ID_CHARS - len(ending)] + ending


def session_exists(session_id: str) -> ConfigurationError:
    return ConfigurationError(
        f"There is a session '{session_id}' already; a fork needs an id of its own.", code="LOUSHO_SESSION_EXISTS", field="id"
    )


def _answers(messages: Sequence[Message], index: int) -> list[Message]:
    """The tool messages right behind an assistant message."""
    return list(itertools.takewhile(lambda message: message.role == "tool", messages[index + 1 :]))


def _args(arguments: str) -> Any:
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _checked(value: object, where: str, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where} must be a dict with {' and '.join(keys)}, not {type(value).__name__}.", field=where)
    for key in value:
        if key not in keys:
            raise unknown_key(key, keys, where)
    return value
