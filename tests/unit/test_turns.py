"""The line of a session alone: who runs, who waits, who joined whom."""

from __future__ import annotations

import asyncio

from lousho_ray.turns import Place, TurnLine


async def ready(place: Place[str]) -> bool:
    """Whether it is a place's time."""
    waiting = asyncio.ensure_future(place.wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    done = waiting.done()
    waiting.cancel()
    return done


def never() -> bool:
    return False


def taken() -> bool:
    return True


async def test_turns_run_one_at_a_time_in_the_order_of_their_calls() -> None:
    # SES-15
    line: TurnLine[str] = TurnLine()
    assert line.idle
    places = [line.enter(name) for name in "abc"]
    for index, place in enumerate(places):
        assert [await ready(other) for other in places[index:]] == [True] + [False] * (2 - index)
        assert line.running == place.turn
        place.leave()
    assert line.idle
    assert line.running is None


async def test_a_turn_that_gives_up_waiting_is_passed_over() -> None:
    line: TurnLine[str] = TurnLine()
    first, second, third = (line.enter(name) for name in "abc")
    second.leave()
    first.leave()
    assert await ready(third)


async def test_leaving_twice_changes_nothing() -> None:
    line: TurnLine[str] = TurnLine()
    first, second, third = (line.enter(name) for name in "abc")
    first.leave()
    first.leave()
    assert await ready(second)
    assert not await ready(third)


async def test_a_joining_call_joins_the_last_turn_in_line() -> None:
    # SES-D5
    line: TurnLine[str] = TurnLine()
    assert line.last() is None
    line.enter("a")
    assert line.last() == "a"
    line.enter("b")
    assert line.last() == "b"
    line.join("c", never)
    assert line.last() == "b"


async def test_a_joined_call_whose_input_was_taken_has_an_empty_place() -> None:
    # SES-29
    line: TurnLine[str] = TurnLine()
    first = line.enter("a")
    line.join("joined", taken)
    last = line.enter("b")
    first.leave()
    assert await ready(last)


async def test_a_joined_call_whose_input_was_not_taken_is_next_in_line() -> None:
    # SES-32, SES-D5
    line: TurnLine[str] = TurnLine()
    first = line.enter("a")
    joined = line.join("joined", never)
    last = line.enter("b")
    first.leave()
    assert await ready(joined)
    assert not await ready(last)
    joined.leave()
    assert await ready(last)


async def test_a_cancelled_wait_does_not_lose_the_place() -> None:
    line: TurnLine[str] = TurnLine()
    first, second = line.enter("a"), line.enter("b")
    waiting = asyncio.ensure_future(second.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    first.leave()
    assert await ready(second)


async def test_a_turn_that_joined_in_vain_can_be_joined_itself() -> None:
    # SES-27, SES-32
    line: TurnLine[str] = TurnLine()
    first = line.enter("a")
    joined = line.join("joined", never)
    first.leave()
    joined.stand_alone()
    assert line.last() == "joined"
