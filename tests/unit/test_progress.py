"""Live progress: events folded into rows, lines for logs, the table."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from lousho_ray.create import create_agent
from lousho_ray.limits.limiter import create_rate_limiter
from lousho_ray.options import Limits
from lousho_ray.ports import GenerateResult
from lousho_ray.progress import RunProgress, RunProgressModel
from lousho_ray.providers.prices import register_model
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import PolicyProvider, agent_of, calls, failing, plain

USED = {"input_tokens": 1_000, "output_tokens": 500}


def task(agent: str, description: str) -> tuple[str, dict[str, str]]:
    return ("task", {"agent": agent, "prompt": "p", "description": description})


def team(**options: Any) -> Any:
    child = agent_of(
        calls("look", usage=USED), {"text": "Found", "usage": USED}, name="digger", description="Digs.", tools=[plain("look")]
    )
    bad = agent_of(RuntimeError("model down"), name="bad", description="Fails.")
    turn = {
        "tool_calls": [
            {"name": "task", "args": task("digger", "dig here")[1], "id": "t1"},
            {"name": "task", "args": task("bad", "break")[1], "id": "t2"},
        ],
        "usage": USED,
    }
    done = {"text": "Done", "usage": USED}
    return agent_of(turn, done, name="lead", subagents={"digger": child, "bad": bad}, **options)


async def test_each_agent_has_a_row_with_what_it_spent() -> None:
    model = RunProgressModel()
    result = await team(on_event=model.feed).send("Go")
    rows = {row.name: row for row in model.rows}
    assert list(rows) == ["lead", "digger", "bad"]
    assert [row.status for row in model.rows] == ["done", "done", "failed"]
    assert rows["digger"].label == "dig here"
    assert (rows["digger"].step, rows["digger"].spend.calls, rows["digger"].spend.total_tokens) == (2, 2, 3_000)
    assert "model down" in rows["bad"].doing
    assert model.total.total_tokens == result.usage.total_tokens
    assert model.total.calls == result.usage.model_calls


async def test_what_a_row_is_doing() -> None:
    model = RunProgressModel()
    seen: list[tuple[str, str]] = []

    def feed(event: Any) -> None:
        model.feed(event)
        seen.append((event.type, model.lead.doing))

    await agent_of(calls(("look", {"at": "x" * 100})), "Done", tools=[plain("look")], on_event=feed).send("Go")
    doing = dict(seen)
    assert doing["step.start"] == "thinking"
    assert doing["text.delta"] == "writing"
    assert doing["tool.start"].startswith("look(xxx")
    assert len(doing["tool.start"]) < 60
    assert doing["tool.error"] == ""  # it takes no arguments


async def test_nested_subagents_count_for_the_row_they_work_for() -> None:
    low = agent_of({"text": "l", "usage": USED}, name="low", description="L.")
    middle = agent_of(
        calls(task("low", "lower"), usage=USED), {"text": "m", "usage": USED}, name="mid", description="M.", subagents={"low": low}
    )
    model = RunProgressModel()
    top = agent_of(
        {"tool_calls": [{"name": "task", "args": task("mid", "m")[1], "id": "top"}], "usage": USED},
        {"text": "t", "usage": USED},
        subagents={"mid": middle},
        max_subagent_depth=2,
        on_event=model.feed,
    )
    result = await top.send("Go")
    assert [row.name for row in model.rows] == ["agent", "mid"]
    assert model.rows[1].spend.calls == 3
    assert model.total.total_tokens == result.usage.total_tokens


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200, force_terminal=False), out


async def test_outside_a_terminal_a_line_says_what_is_of_note() -> None:
    shown, out = console()
    progress = RunProgress(console=shown)
    with progress:
        await team(on_event=progress).send("Go")
    lines = out.getvalue().splitlines()
    text = out.getvalue()
    assert "digger (dig here) started" in text
    assert "digger (dig here) done (2 calls, 3,000 tokens)" in text
    assert "bad (break) failed" in text
    assert "model down" in text
    assert lines[-1].endswith("lead ended: stop")
    assert all(line.startswith("[") for line in lines)


async def test_retries_and_budgets_are_told() -> None:
    shown, out = console()
    progress = RunProgress(console=shown)
    provider = with_retry(
        mock_model([ConnectionError("gone"), calls("look", usage=USED)]), max_retries=1, backoff={"initial_ms": 0}
    )
    agent = create_agent(provider=provider, tools=[plain("look")], limits={"max_tokens": 1}, on_event=progress)
    with progress:
        await agent.send("Go")
    text = out.getvalue()
    assert "try 1 failed" in text
    assert "gone" in text
    assert "stopped at the maxTokens limit (1500 of 1)" in text
    assert "ended: budget-exceeded" in text


async def test_a_failed_run_is_told() -> None:
    shown, out = console()
    progress = RunProgress(console=shown)
    with progress, pytest.raises(Exception, match="broken"):
        await agent_of(RuntimeError("broken"), on_event=progress).send("Go")
    assert "agent failed: broken" in out.getvalue()


async def test_the_table_and_the_budget_left() -> None:
    register_model(id="m-progress", provider="x", context_window=10, input_cost_per_mtok=1_000.0, output_cost_per_mtok=0.0)
    shown, out = console()
    progress = RunProgress(console=shown, limits=Limits(max_cost_usd=5.0, max_tokens=10_000), live=False)
    provider = PolicyProvider(lambda options: GenerateResult("Done", usage=ProviderUsage(1_000, 500)), default_model="m-progress")
    await create_agent(provider=provider, name="lead", on_event=progress).send("Go")
    shown.print(progress.render())
    shown.print(progress.usage_table())
    text = out.getvalue()
    assert "lead" in text
    assert "1,500" in text
    assert "1 model calls" in text
    assert "$1.0000" in text
    assert "$4.0000 left" in text
    assert "8,500 tokens left" in text
    assert "Usage by agent" in text


async def test_usage_of_agents_of_one_name_is_summed() -> None:
    progress = RunProgress(console=console()[0], live=False)
    child = agent_of({"text": "a", "usage": USED}, {"text": "b", "usage": USED}, name="w", description="W.")
    turn = {"tool_calls": [{"name": "task", "args": task("w", "d")[1], "id": f"t{n}"} for n in range(2)], "usage": USED}
    await agent_of(turn, {"text": "x", "usage": USED}, subagents={"w": child}, on_event=progress).send("Go")
    usage = progress.usage_by_agent()
    assert {name: (runs, spend.calls) for name, (runs, spend) in usage.items()} == {"agent": (1, 2), "w": (2, 2)}


async def test_live_in_a_terminal_and_the_limiters_queue() -> None:
    out = io.StringIO()
    shown = Console(file=out, width=120, force_terminal=True)
    limiter = create_rate_limiter({"max_concurrent": 1})
    progress = RunProgress(console=shown, limiter=limiter, live=True)
    with progress:
        await team(on_event=progress, rate_limit=limiter).send("Go")
    assert "digger" in out.getvalue()


async def test_a_tool_that_fails_is_no_failed_agent() -> None:
    model = RunProgressModel()
    await agent_of(calls("bad"), "Done", tools=[failing("bad", ValueError("no"))], on_event=model.feed).send("Go")
    assert [row.status for row in model.rows] == ["done"]
