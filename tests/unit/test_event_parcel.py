"""Events that travel in columns."""

from __future__ import annotations

from dataclasses import dataclass

from lousho_ray.actors.event_parcel import packed, unpacked
from lousho_ray.events import Event, EventUsage, RunDone, RunStart, StepStart, SubagentInfo, TextDelta
from lousho_ray.loop.emitter import Emitter, Stamp


def events_of_a_stream() -> list[Event]:
    events: list[Event] = []
    emitter = Emitter(Stamp("run_1"), (events.append,))
    child = emitter.child(SubagentInfo(name="child", depth=1, tool_call_id="call_1"))
    emitter.emit(RunStart, agent_name="lead")
    emitter.emit(StepStart, step=1)
    for number in range(50):
        emitter.emit(TextDelta, text=f"word {number % 7}")
        if number % 10 == 0:
            child.emit(TextDelta, text="aside")
    emitter.emit(RunDone, finish_reason="stop", text="word", usage=EventUsage(input_tokens=1, output_tokens=2))
    return events


def test_every_event_arrives_as_it_was_and_in_its_place() -> None:
    # EVT-01
    events = events_of_a_stream()
    arrived = unpacked(packed(events))
    assert arrived == events
    assert [type(event) for event in arrived] == [type(event) for event in events]
    assert [event.to_dict() for event in arrived] == [event.to_dict() for event in events]


def test_a_batch_without_events_is_one() -> None:
    assert unpacked(packed([])) == []


@dataclass(frozen=True)
class Mark:
    """Something else that a log has between its events."""

    number: int


def test_what_is_no_event_travels_between_them() -> None:
    events = events_of_a_stream()
    mixed = [events[0], Mark(1), Mark(2), *events[1:5], Mark(3)]
    assert unpacked(packed(mixed)) == mixed


def test_a_value_that_can_only_be_sent_by_its_content_arrives() -> None:
    def double(number: int) -> int:
        return 2 * number

    done = RunDone(run_id="r", seq=0, timestamp="now", finish_reason="stop", text="", object=double)
    (arrived,) = unpacked(packed([done]))
    assert arrived.object(4) == 8


def test_a_stream_costs_few_bytes() -> None:
    events: list[Event] = []
    emitter = Emitter(Stamp("run_1"), (events.append,))
    for _ in range(1_000):
        emitter.emit(TextDelta, text="word ")
    assert len(packed(events)) < 12 * len(events)
