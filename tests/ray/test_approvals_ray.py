"""Approvals of sessions in actors, decided from several handles."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import Agent, GenerateResult, LoushoError, MockProvider, SqliteStore, ToolCall, create_agent, tool
from lousho_ray.ports import GenerateOptions
from tests.unit.loop_support import check_transcript

pytestmark = pytest.mark.usefixtures("ray_cluster")

SESSIONS = 12


def answers(options: GenerateOptions) -> GenerateResult | str:
    """Pays once, then says what came of it."""
    results = [message.text for message in options.messages if message.role == "tool"]
    if results:
        return f"Done: {results[-1]}"
    return GenerateResult(tool_calls=(ToolCall("c1", "pay", f'{{"amount": {options.messages[-1].text}}}'),))


def paying(folder: Path) -> Agent[Any]:
    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pays, and leaves a line."""
        with (folder / f"paid-{amount}").open("a") as file:
            file.write("paid\n")
        return f"paid {amount}"

    return create_agent(provider=MockProvider(policy=answers), tools=[pay], store=SqliteStore(folder / "s.db"), runtime="ray")


async def decided(agent: Agent[Any], approval_id: str, approved: bool) -> tuple[str, str]:
    try:
        return "won", (await agent.approvals.resolve(approval_id, approved=approved)).text
    except LoushoError as error:
        return "lost", str(error.code)


async def test_of_two_handles_that_decide_at_once_one_wins_and_the_tool_runs_at_most_once(tmp_path: Path) -> None:
    # field case S07, APR-18: two agent objects, each with its own link to the session's actor, one approves and one rejects
    one, other = paying(tmp_path), paying(tmp_path)
    paused = [await one.session(f"s{number}").send(str(number)) for number in range(SESSIONS)]
    calls = []
    for number, result in enumerate(paused):
        both = [decided(one, str(result.approval_id), True), decided(other, str(result.approval_id), False)]
        calls += both if number % 2 else both[::-1]
    said = await asyncio.gather(*calls)
    for number in range(SESSIONS):
        pair = said[2 * number : 2 * number + 2]
        [won] = [text for how, text in pair if how == "won"]
        assert [code for how, code in pair if how == "lost"] == ["LOUSHO_APPROVAL_NOT_FOUND"]
        approved = won == f'Done: "paid {number}"'
        ledger = tmp_path / f"paid-{number}"
        assert (ledger.read_text() if ledger.exists() else "") == ("paid\n" if approved else "")
        saved = await other.session(f"s{number}").load()
        check_transcript(saved)
        assert [message.role for message in saved] == ["user", "assistant", "tool", "assistant"]
        assert saved[-1].text == won
        assert saved[-2].is_error is not approved
