"""`kill -9` around a compaction: after the summary was paid for and before, while and after it is written down.

    python -m tests.e2e.test_kill_compaction PLACE POINT WHAT

is the process that is killed. It says `reached` at the point and stands still there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import Agent, MockProvider, create_agent, pin_message, summarize_strategy
from lousho_ray.messages import Message, ToolCall, assistant, tool_result, user
from lousho_ray.ports import GenerateOptions
from lousho_ray.tokens import estimate_tokens
from tests.e2e.durable_child import StoppingStore, open_store, stopper
from tests.e2e.killing import kill_when_reached
from tests.unit.loop_support import check_transcript

LEASE_S = 60.0
TOLD = "The account number is 4711."


def history() -> list[Message]:
    """A conversation of 60 messages that is far too long, one of them pinned."""
    made = [pin_message(user(TOLD)), assistant("Noted.")]
    for number in range(14):
        calls = [ToolCall(f"c{number}-{position}", "read", "{}") for position in range(2)]
        made += [user(f"Question {number}. " + "q" * 400), assistant("", calls)]
        made += [*(tool_result(call, '"' + "r" * 600 + '"') for call in calls), assistant(f"Answer {number}.")]
    return made


def agent_on(store: Any, stop: Callable[[str], None] = lambda point: None) -> Agent[Any]:
    def summary(request: GenerateOptions) -> str:
        stop("in summary")
        return "All questions so far were answered."

    model = MockProvider(policy=lambda request: f"heard {request.messages[-1].text[:20]}")
    compaction = {
        "context_window": 4_000,
        "protected_tokens": 500,
        "strategy": summarize_strategy(model=MockProvider(policy=summary)),
    }
    return create_agent(provider=model, store=store, compaction=compaction, runtime="local", retry=False)


async def main(place: str, point: str, what: str) -> None:
    stop = stopper(point)
    session = agent_on(StoppingStore(place, 0.0, stop, point), stop).session("talk")
    await (session.compact() if what == "compact" else session.send("next"))
    os.write(1, b"ended\n")
    os._exit(0)


async def kill_at(place: str, point: str, what: str) -> None:
    await kill_when_reached("tests.e2e.test_kill_compaction", place, point, what, point=point)


@pytest.mark.parametrize(
    ("kind", "what", "point", "kept"),
    [
        *(("sqlite", "send", point, "old") for point in ["in summary", "before end"]),
        ("sqlite", "send", "after end", "new"),
        *(("parts", "send", point, "old") for point in ["in summary", "before finished", "after finished"]),
        *(("parts", "send", point, "new") for point in ["after transcript", "before delete", "after delete"]),
        *(("parts", "compact", point, "old") for point in ["in summary", "before transcript"]),
        ("parts", "compact", "after transcript", "new"),
    ],
)
async def test_a_killed_compaction_leaves_the_old_conversation_or_the_new_one(
    kind: str, what: str, point: str, kept: str, tmp_path: Path
) -> None:
    # field case K04
    place, before = f"{kind}:{tmp_path / 's.db'}", history()
    async with open_store(place, 0.0) as store:
        await store.sessions.save("talk", before)
    await kill_at(place, point, what)
    async with open_store(place, LEASE_S) as store:
        found = await store.sessions.load("talk") or []
        if kept == "old":
            assert found == before
        else:
            assert estimate_tokens(found) < estimate_tokens(before) / 2
            assert sum("All questions so far" in message.text for message in found) == 1
        session = agent_on(store).session("talk")
        if what == "send":
            await session.resume()
            done = await session.load()
            assert [message.text for message in done if message.role == "user"].count("next") == 1
            assert done[-1].text == "heard next"
        after = await session.send("more")
        assert after.text == "heard more"
        saved = await session.load()
        check_transcript(saved)
        assert [message.text for message in saved].count(TOLD) == 1
        assert sum("All questions so far" in message.text for message in saved) == 1
        assert await session.pending() is None


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
