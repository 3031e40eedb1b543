"""How two runs differ: step by step, and in what an evaluation looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import Message
from lousho_ray.session_history import SessionStep, StepCall, steps_of

Trajectory: TypeAlias = Mapping[str, Any] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Difference:
    """What two runs have of one thing."""

    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class TrajectoryComparison:
    """What `compare_trajectories()` found.

    Attributes:
        a: The steps of the first run, `b` those of the second.
        diverged_at: The number of the first step that differs, from 1; `None` when the runs are equal.
        drift: What differs, by name: `tool_order` (the names of the tools called), `arguments` (of calls that are the same call in
            both runs: `{"step", "tool", "a", "b"}` each), `step_count`, `finish_reason` (where both are known).
    """

    a: tuple[SessionStep, ...]
    b: tuple[SessionStep, ...]
    diverged_at: int | None
    drift: Mapping[str, Difference | tuple[Mapping[str, Any], ...]]


def compare_trajectories(a: Trajectory, b: Trajectory) -> TrajectoryComparison:
    """Compares two runs. The ids of calls do not count.

    Args:
        a: A checkpoint (an entry's `checkpoint` of `get_checkpoint_history()`, or what a store's `load()` gave), or the messages
            of a run or session.
        b: The other.

    Raises:
        ConfigurationError: One of them is neither.
    """
    steps = steps_of(_messages(a, "a")), steps_of(_messages(b, "b"))
    pairs = list(zip_longest(*steps))
    different = (number for number, (one, other) in enumerate(pairs, 1) if _content(one) != _content(other))
    tools = [[call.name for step in run for call in step.tool_calls] for run in steps]
    reasons = [run.get("finishReason") if isinstance(run, Mapping) else None for run in (a, b)]
    found: dict[str, Difference | tuple[Mapping[str, Any], ...]] = {}
    if tools[0] != tools[1]:
        found["tool_order"] = Difference(*tools)
    if arguments := tuple(_arguments(pairs)):
        found["arguments"] = arguments
    if len(steps[0]) != len(steps[1]):
        found["step_count"] = Difference(len(steps[0]), len(steps[1]))
    if None not in reasons and reasons[0] != reasons[1]:
        found["finish_reason"] = Difference(*reasons)
    return TrajectoryComparison(tuple(steps[0]), tuple(steps[1]), next(different, None), found)


def _messages(run: Any, name: str) -> list[Message]:
    if isinstance(run, Mapping) and isinstance(run.get("messages"), Sequence):
        return [message if isinstance(message, Message) else Message.from_dict(message) for message in run["messages"]]
    if isinstance(run, Sequence) and all(isinstance(message, Message) for message in run):
        return list(run)
    raise ConfigurationError(f"{name} must be a checkpoint or a list of messages, not {type(run).__name__}.", field=name)


def _content(step: SessionStep | None) -> Any:
    """A step without the ids of its calls."""
    return None if step is None else (step.text, [(call.name, call.args, call.result) for call in step.tool_calls])


def _arguments(pairs: Iterable[tuple[SessionStep | None, SessionStep | None]]) -> Iterable[Mapping[str, Any]]:
    """The calls that stand at the same place of the same step in both runs, with other arguments."""
    for one, other in pairs:
        calls: Iterable[tuple[StepCall, StepCall]] = zip(
            () if one is None else one.tool_calls, () if other is None else other.tool_calls, strict=False
        )
        for left, right in calls:
            if one is not None and left.name == right.name and left.args != right.args:
                yield {"step": one.step, "tool": left.name, "a": left.args, "b": right.args}
