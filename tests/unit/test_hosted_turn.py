"""What a hosted turn makes of the transcript after its actor has died."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lousho_ray.actors.session_link import HostedTurn
from lousho_ray.messages import Message, assistant, user
from lousho_ray.session import TurnRequest

EARLIER = [user("again"), assistant("first")]


@pytest.mark.parametrize(
    ("seen", "saved", "text"),
    [
        (2, EARLIER, None),  # the same was asked before: that is not this turn's answer
        (2, [*EARLIER, user("again"), assistant("second")], "second"),
        (0, [user("again"), assistant("first")], "first"),
        (8, [user("summary"), user("again"), assistant("second")], "second"),  # the turn has shortened the transcript
    ],
)
async def test_a_lost_turn_is_found_behind_what_was_there_before_it(  # DEC-R6, SES-77
    seen: int, saved: list[Message], text: str | None
) -> None:
    async def load() -> list[Message]:
        return saved

    link: Any = SimpleNamespace(seen=seen, load=load, trace=lambda: (None, None))
    turn = HostedTurn(link, TurnRequest("run_1", (user("again"),)), ())
    found = await turn._what_was_saved()
    assert (None if found is None else found.text) == text
