"""Compaction in a session actor: strategies and summarizers travel, `session.compact()` is carried out where the session lives."""

from __future__ import annotations

from typing import Any

import pytest

from lousho_ray import CompactionInput, CompactionOutput, SqliteStore, create_agent, define_tool, summarize_strategy
from lousho_ray.testing.mock_model import mock_model

pytestmark = pytest.mark.usefixtures("ray_cluster")


async def read(args: Any) -> str:
    return "r" * 4_000


def calls_read() -> dict[str, Any]:
    return {"text": "", "tool_calls": [{"name": "read", "args": {}}]}


class KeepLast:
    """A strategy of one's own, of the driver's code."""

    name = "keep-last"

    def compact(self, input: CompactionInput) -> CompactionOutput:
        return CompactionOutput(messages=input.messages[-1:])


async def test_a_hosted_session_is_compacted_in_its_turns_and_by_hand(fresh_name: str, tmp_path: Any) -> None:
    # CMP-05, CMP-26, CMP-31, CMP-40, CMP-D7
    summary = {"text": "Told.", "usage": {"input_tokens": 500, "output_tokens": 5}}
    summarizer = mock_model([summary] * 9, default_model="summ-1")
    tool = define_tool(name="read", description="Reads.", execute=read)
    async with SqliteStore(tmp_path / "s.db") as store:
        agent = create_agent(
            provider=mock_model([*[calls_read()] * 7, "done", calls_read(), "done"]),
            tools=[tool],
            store=store,
            runtime="ray",
            compaction={"context_window": 4_000, "protected_tokens": 1_000, "strategy": summarize_strategy(model=summarizer)},
        )
        session = agent.session(fresh_name)
        run = session.stream("Go.")
        kinds = [event.type async for event in run]
        result = await run.result
        assert kinds.count("compaction.start") == kinds.count("compaction.done") == 1
        assert result.usage.by_model["summ-1"].input_tokens == 500
        assert session.messages[0].text == "[Conversation summary]\nTold."
        assert await session.load() == session.messages

        events: list[Any] = []
        session.on(events.append)
        report = await session.compact(KeepLast())
        assert (report.strategy, report.messages_after, report.error) == ("keep-last", 1, None)
        assert [event.type for event in events] == ["compaction.start", "compaction.done"]
        assert [message.text for message in session.messages] == ["done"]
        assert await session.load() == session.messages
