"""`StreamView`: one gapless stream of a turn's events, whichever actors the turn has run in."""

from __future__ import annotations

from typing import Any

import pytest

from lousho_ray.actors.stream_view import StreamView
from lousho_ray.errors import AgentExecutionError
from lousho_ray.events import RunStart, StepDone, StepStart, TextDelta
from lousho_ray.loop.emitter import Emitter, Stamp
from lousho_ray.loop.result import ExecutionResult
from tests.unit.loop_support import check_events, names


def written(*texts: str, step: int = 1, done: bool = False, run_id: str = "run_1") -> list[Any]:
    """What a run writes into its log."""
    events: list[Any] = []
    emitter = Emitter(Stamp(run_id), (events.append,))
    emitter.emit(RunStart, agent_name="agent")
    emitter.emit(StepStart, step=step)
    for text in texts:
        emitter.emit(TextDelta, text=text)
    if done:
        emitter.emit(StepDone, step=step, finish_reason="stop")
    return events


def test_batches_become_one_stream() -> None:
    # EVT-D8
    events, view = written("a", "b", done=True), StreamView("run_1")
    shown = [*view.take(events[:2], 2), *view.take([], 2), *view.take(events[2:], 5)]
    assert shown == events
    assert view.cursor == 5


@pytest.mark.parametrize("batch", [slice(3, 5), slice(1, 3), slice(0, 2)], ids=["lost", "twice", "from the beginning"])
def test_a_gap_or_a_repetition_is_an_error(batch: slice) -> None:
    # EVT-D8
    events, view = written("a", "b", done=True), StreamView("run_1")
    view.take(events[:2], 2)
    with pytest.raises(AgentExecutionError) as raised:
        view.take(events[batch], 5)
    assert raised.value.code == "LOUSHO_AGENT_EXECUTION_FAILED"


def test_a_gap_inside_a_batch_is_an_error() -> None:
    # EVT-D8
    events = written("a", "b", done=True)
    with pytest.raises(AgentExecutionError):
        StreamView("run_1").take([*events[:2], *events[3:]], 4)


def test_a_lost_home_ends_its_step_and_the_next_one_goes_on() -> None:
    # EVT-D8, EVT-25, EVT-27
    view = StreamView("run_1")
    shown = view.take(written("a"), 3)
    view.cut()
    shown += view.take(written("b", step=2, done=True, run_id="run_1-1"), 4)
    shown += view.ended(None, ExecutionResult(text="b", finish_reason="stop"))
    assert names(shown) == [
        "run.start",
        "step.start 1",
        "text.delta a",
        "step.done 1 error",
        "step.start 2",
        "text.delta b",
        "step.done 2 stop",
        "run.done stop",
    ]
    check_events(shown)


def test_a_lost_turn_ends_with_the_error_once() -> None:
    # EVT-D8, EVT-25
    view = StreamView("run_1")
    shown = view.take(written("a"), 3)
    view.cut()
    shown += view.take((), 0)
    shown += view.failed(AgentExecutionError("The actor died."))
    assert names(shown)[-3:] == ["step.done 1 error", "error AgentExecutionError", "run.done error"]
    check_events(shown)
    assert view.failed(AgentExecutionError("Again.")) == []
