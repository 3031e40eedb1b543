"""A sub-agent on a worker that waits for a person: the run pauses, wherever it runs, and goes on after the decision."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from lousho_ray import Agent, GenerateResult, MockProvider, SqliteStore, ToolCall, create_agent, tool
from lousho_ray.ports import GenerateOptions
from tests.ray.processes import eventually, kill_process, pid_of, session_actors, task_results, workers
from tests.unit.loop_support import check_transcript

pytestmark = pytest.mark.usefixtures("ray_cluster")


def lead_answers(options: GenerateOptions) -> GenerateResult | str:
    if options.messages[-1].role == "tool":
        return "All done"
    wanted = '{"agent": "payer", "prompt": "Pay 5", "description": "pay five"}'
    return GenerateResult("", (ToolCall("call_1", "task", wanted),), "tool_calls")


def payer_answers(options: GenerateOptions) -> GenerateResult | str:
    if options.messages[-1].role == "tool":
        return f"It says: {options.messages[-1].text}"
    return GenerateResult("", (ToolCall("call_1", "pay", '{"amount": 5}'),), "tool_calls")  # the lead's call has this id, too


def paying(ledger: Path, **options: Any) -> Agent[Any]:
    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pays."""
        with ledger.open("a") as file:
            file.write(f"{amount}\n")
        return f"paid {amount}"

    payer = create_agent(name="payer", description="Pays.", provider=MockProvider(policy=payer_answers), tools=[pay], runtime="ray")
    return create_agent(provider=MockProvider(policy=lead_answers), subagents={"payer": payer}, runtime="ray", **options)


async def restart(actors: list[Any]) -> None:
    """Kills actors; returns once they run again."""
    for actor in actors:
        old = await kill_process(actor)

        async def runs_again(actor: Any = actor, old: int = old) -> bool:
            with suppress(RayError):
                return await pid_of(actor) != old
            return False

        await eventually(runs_again)


@pytest.mark.parametrize("where", ["send", "durable session"])
async def test_a_child_on_a_worker_pauses_its_lead_and_goes_on_after_the_decision(where: str, tmp_path: Path) -> None:
    # APR-44, APR-45, APR-D8
    ledger = tmp_path / "paid"
    options = {"store": SqliteStore(tmp_path / "store.db")} if where == "durable session" else {}
    agent = paying(ledger, **options)
    session = agent.session()
    paused = await (agent.send("Go") if where == "send" else session.send("Go"))
    assert paused.finish_reason == "awaiting-approval"
    assert not ledger.exists()
    [pending] = await agent.approvals.list()
    assert (pending.tool_name, pending.subagent_path) == ("pay", ("payer",))
    await restart(workers())  # what is needed to go on is in the lead's record, not in a worker
    result = await agent.approvals.resolve(pending.id, approved=True)
    assert (result.text, ledger.read_text()) == ("All done", "5\n")
    [answer] = task_results(result.messages).values()
    assert "paid 5" in answer.text
    assert "taskId 'task_1'" in answer.text
    check_transcript(result.messages)


async def test_a_pause_of_a_child_outlives_the_session_actor(tmp_path: Path) -> None:
    # APR-44, APR-54, DEC-R6
    ledger = tmp_path / "paid"
    agent = paying(ledger, store=SqliteStore(tmp_path / "store.db"))
    session = agent.session()
    paused = await session.send("Go")
    await restart(session_actors())
    later = paying(ledger, store=SqliteStore(tmp_path / "store.db"))
    result = await later.approvals.resolve(str(paused.approval_id), approved=True)
    assert (result.text, ledger.read_text()) == ("All done", "5\n")
