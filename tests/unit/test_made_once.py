"""What is made once is one and the same for threads that ask at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lousho_ray import MockProvider, create_agent
from lousho_ray.agent import Agent, runtime_named
from lousho_ray.made_once import MadeOnce, made_once


def asked_twice(ask: Callable[[Callable[[], object]], object]) -> list[object]:
    """What two threads get, the second of which asks while the first one's is being made."""
    got: list[object] = []
    second = threading.Thread(target=lambda: got.append(ask(object)))

    def make() -> object:
        second.start()
        second.join(0.05)  # it would be over by now if it did not wait
        return object()

    got.append(ask(make))
    second.join()
    return got


def test_a_function_is_called_once_for_each_of_its_arguments() -> None:
    made: Callable[[str], object]
    makes: list[Callable[[], object]] = []
    made = made_once(lambda name: makes.pop()())

    def ask(make: Callable[[], object]) -> object:
        makes.append(make)
        return made("a")

    first, second = asked_twice(ask)
    assert first is second
    makes.append(object)
    assert made("b") is not first


def test_an_error_is_not_kept() -> None:
    answers: list[object] = [ValueError("not yet"), "there"]

    @made_once
    def made() -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="not yet"):
        made()
    assert (made(), made()) == ("there", "there")


def test_a_property_is_made_once() -> None:
    class Holder:
        def __init__(self) -> None:
            self.make: Callable[[], object] = object

        @MadeOnce
        def held(self) -> object:
            make, self.make = self.make, object
            return make()

    holder = Holder()

    def ask(make: Callable[[], object]) -> object:
        if make is not object:
            holder.make = make
        return holder.held

    first, second = asked_twice(ask)
    assert first is second is holder.held


def test_what_keeps_pauses_and_sessions_is_made_so() -> None:
    # A second runtime would be a second writer, a second place for pauses would hide one.
    agent = create_agent(provider=MockProvider(), runtime="local")
    assert agent.runtime() is runtime_named("local")
    assert agent.approvals is agent.approvals
    assert isinstance(vars(Agent)["approvals"], MadeOnce)
    assert isinstance(vars(Agent)["_own_approvals"], MadeOnce)
