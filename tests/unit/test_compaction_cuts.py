"""Wherever a compaction cuts, every vendor accepts what is left: checked at all cut points against the vendors' strict rules."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lousho_ray.context.compaction import run_strategy
from lousho_ray.context.pins import is_pinned, pin_message
from lousho_ray.context.prune import PruneStrategy
from lousho_ray.context.strategy import CompactionInput, CompactionOutput
from lousho_ray.context.summarize import SummarizeStrategy
from lousho_ray.context.tail import foldable_units, tail_start, units_of
from lousho_ray.context.two_phase import TwoPhaseStrategy
from lousho_ray.context.validity import defect
from lousho_ray.messages import Message, assistant, user
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tokens import estimate_tokens
from tests.unit.compaction_support import check_wire, conversation, turn, work

SUMMARIZE = SummarizeStrategy(mock_model([]))
STRATEGIES = {"prune": PruneStrategy(), "summarize": SUMMARIZE, "two-phase": TwoPhaseStrategy(SUMMARIZE)}


async def compacted(strategy: Any, given: CompactionInput) -> CompactionOutput:
    made = strategy.compact(given)
    return await made if inspect.isawaitable(made) else made


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signed"])
async def test_the_transcript_is_valid_at_every_cut_point(name: str, signed: bool) -> None:
    # CMP-18, CMP-22, field case K01: one wish of the user, 20 turns with three parallel calls each
    messages = conversation(20, signed=signed)
    sizes = [estimate_tokens(messages[index:]) for index in range(len(messages))]
    shapes = set()
    for protected in sizes:
        output = await compacted(STRATEGIES[name], work(list(messages), protected_tokens=protected))
        check_wire(output.messages)
        assert defect(messages, output.messages) is None
        tail = tail_start(messages, protected, estimate_tokens)
        kept = messages[tail:]
        assert output.messages[len(output.messages) - len(kept) :] == kept  # CMP-14
        shapes.add(len(output.messages) if name != "prune" else len(output.pruned_tool_call_ids))
    assert len(shapes) >= 20  # the cuts did differ


@pytest.mark.parametrize("name", STRATEGIES)
async def test_what_is_compacted_twice_does_not_change_again(name: str) -> None:
    # CMP-11, CMP-17
    messages = conversation(12)
    first = await compacted(STRATEGIES[name], work(messages, protected_tokens=500))
    assert first.messages is not messages
    again = work(first.messages, protected_tokens=500)
    second = await compacted(STRATEGIES[name], again)
    assert second.messages is again.messages
    assert (second.pruned_tool_call_ids, second.summary, second.error) == ((), None, None)


def test_the_tail_begins_no_later_than_the_last_assistant_message() -> None:
    # CMP-14, CMP-15
    messages = conversation(3)
    for protected in (0, 1, 10):
        assert tail_start(messages, protected, estimate_tokens) == len(messages) - 3  # unread results, whatever their size
    assert tail_start(messages, 10**9, estimate_tokens) == 0
    assert tail_start([], 5, estimate_tokens) == 0
    ends_with_assistant = [*messages, assistant("Done.")]
    assert tail_start(ends_with_assistant, 0, estimate_tokens) == len(ends_with_assistant) - 1
    assert tail_start([user("x" * 100_000)], 5, estimate_tokens) == 0
    newest = estimate_tokens(messages[-6:])
    assert tail_start(messages, newest, estimate_tokens) == len(messages) - 6
    assert tail_start(messages, newest - 1, estimate_tokens) == len(messages) - 5


def test_a_unit_is_a_message_or_a_turn_with_its_results() -> None:
    # CMP-22
    messages = [user("Go."), *turn(1, 2), assistant("So."), user("And?"), *turn(2, 1)]
    assert [(unit.start, unit.end) for unit in units_of(messages)] == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 8)]
    cut_inside_the_last_turn = len(messages) - 1
    assert [unit.end for unit in foldable_units(messages, cut_inside_the_last_turn)] == [1, 4, 5, 6]


# --------------------------------------------------------------------------------------------------------- any conversation


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Users, plain replies and turns with calls in any valid order; some messages are pinned."""
    made = conversation(0)[: draw(st.integers(1, 2))]
    made.append(user("Begin."))
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["user", "reply", "calls", "calls"]))
        if kind == "user":
            made.append(user("u" * draw(st.integers(1, 300))))
        elif kind == "reply":
            made.append(assistant("a" * draw(st.integers(1, 300))))
            made.append(user("Go on."))
        else:
            made += turn(number, draw(st.integers(1, 3)), draw(st.sampled_from([0, 30, 400, 3_000])), signed=draw(st.booleans()))
    pins = draw(st.sets(st.integers(0, len(made) - 1), max_size=3))
    return [pin_message(message) if index in pins else message for index, message in enumerate(made)]


@settings(max_examples=60, deadline=None)
@given(conversations(), st.sampled_from(sorted(STRATEGIES)), st.integers(0, 3_000), st.integers(0, 2**16))
async def test_any_conversation_stays_valid_and_keeps_what_must_stay(
    messages: list[Message], name: str, protected: int, threshold: int
) -> None:
    # CMP-14, CMP-17, CMP-23, CMP-29, CMP-37
    given_messages = list(messages)
    output = await compacted(
        STRATEGIES[name], work(given_messages, protected_tokens=protected, threshold_tokens=threshold, forced=False)
    )
    assert given_messages == messages
    check_wire(output.messages)
    assert defect(messages, output.messages) is None
    assert [m for m in output.messages if is_pinned(m)] == [m for m in messages if is_pinned(m)]
    assert [m for m in output.messages if m.role == "system"] == [m for m in messages if m.role == "system"]
    known = {id(message) for message in messages}
    new = [m for m in output.messages if id(m) not in known]
    assert sum(m.role == "user" for m in new) <= 1
    assert all(m.role in ("user", "tool") for m in new)


class Random:
    """A strategy that drops messages as it likes."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def compact(self, input: CompactionInput) -> CompactionOutput:
        return CompactionOutput(messages=[message for message in input.messages if self.random.random() < 0.8])


@settings(max_examples=100, deadline=None)
@given(conversations(), st.integers(0, 2**32))
async def test_a_strategy_of_ones_own_cannot_make_a_transcript_that_is_refused(messages: list[Message], seed: int) -> None:
    # CMP-38, CMP-D3
    given_input = work(list(messages))
    output = await run_strategy(Random(seed), given_input)
    if output.messages is not given_input.messages:
        check_wire(output.messages)
    else:
        assert output.error is None or "was discarded" in str(output.error)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda m: m[1:], "the system prompt was lost"),
        (lambda m: [], "every message was dropped"),
        (lambda m: [*m[:3], *m[4:]], "call 'call_0_0' has no result"),
        (lambda m: [*m[:2], *m[3:]], "the result of call 'call_0_0' has no call before it"),
        (lambda m: [*m, assistant("Me!")], "ends with a message of role 'assistant'"),
        (lambda m: [*m[:-1], "text"], "must be a list of Message"),
        (lambda m: None, "must be a list of Message"),
    ],
)
async def test_a_broken_result_is_discarded_and_says_why(broken: Any, why: str) -> None:
    # CMP-D3
    class Broken:
        name = "broken"

        def compact(self, input: CompactionInput) -> CompactionOutput:
            return CompactionOutput(messages=broken(input.messages))

    given_input = work(conversation(2))
    output = await run_strategy(Broken(), given_input)
    assert output.messages is given_input.messages
    assert why in str(output.error)
    assert "'broken' was discarded" in str(output.error)
