"""The calls of a run: under ids of their own, as its result lists them, answers for those that will not run, their images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lousho_ray.errors import ToolArgumentsValidationError
from lousho_ray.loop.result import ToolCallRecord
from lousho_ray.loop.state import RunState
from lousho_ray.messages import ContentPart, TextPart, ToolCall, tool_result, unanswered_calls, user
from lousho_ray.tools.results import error_result
from lousho_ray.tools.schema import InvalidArguments, ParsedArguments, parse_object
from lousho_ray.tools.text import replace_surrogates


def cancel_calls(calls: Sequence[ToolCall], state: RunState, why: str) -> None:
    """Answers calls that will not run, so that the transcript stays valid."""
    for call in calls:
        keep_record(call, None, state)
        state.messages.append(tool_result(call, error_result(call.name, "not-run", why).text, is_error=True))


def show_images(state: RunState) -> None:
    """Puts the images that tools returned into one user message, once every call has its result: a tool message is text only."""
    if not state.images or unanswered_calls(state.messages):
        return
    asked = next(message for message in reversed(state.messages) if message.tool_calls)
    parts: list[ContentPart] = []
    for call in asked.tool_calls:
        if call.id in state.images:
            parts += [TextPart(f"Images of the result of {call.name} ({call.id}):"), *state.images[call.id]]
    state.images.clear()
    state.messages.append(user(parts))


def plain_args(call: ToolCall) -> dict[str, Any]:
    """`tool.start.args`: the parsed object, `{}` when the text is not a JSON object."""
    try:
        return parse_object(call.arguments)
    except InvalidArguments:
        return {}


def keep_record(call: ToolCall, parsed: ParsedArguments | ToolArgumentsValidationError | None, state: RunState) -> None:
    """Puts a call among those of the run, once: a resumed run comes to it again."""
    if all(record.id != call.id for record in state.tool_calls):
        state.tool_calls.append(ToolCallRecord(call.id, call.name, _record_args(call, parsed)))


def _record_args(call: ToolCall, parsed: ParsedArguments | ToolArgumentsValidationError | None) -> Any:
    if isinstance(parsed, ParsedArguments):
        return parsed.plain
    try:
        return parse_object(call.arguments)
    except InvalidArguments:
        return replace_surrogates(call.arguments)


def cut_off(calls: tuple[ToolCall, ...]) -> bool:
    """Whether the last call's arguments stop in the middle: a reply that ran into its token limit."""
    text = calls[-1].arguments.strip()
    try:
        json.loads(text or "{}")
    except RecursionError:  # nested too deeply for us, but not cut off
        return False
    except ValueError:
        return True
    return False


def unique(calls: tuple[ToolCall, ...], state: RunState) -> tuple[ToolCall, ...]:
    """The calls under ids that no earlier call of the transcript or the run has: results are paired by id."""
    if not calls:
        return calls
    taken = {call.id for message in state.messages if message.tool_calls for call in message.tool_calls}
    taken.update(record.id for record in state.tool_calls)  # of turns that are in a summary now
    renamed: list[ToolCall] = []
    for call in calls:
        name, number = call.id or "call", 1
        while not name or name in taken:
            number += 1
            name = f"{call.id or 'call'}_{number}"
        taken.add(name)
        renamed.append(call if name == call.id else ToolCall(name, call.name, call.arguments))
    return tuple(renamed)
