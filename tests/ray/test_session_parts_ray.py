"""Sessions on Ray whose parts are in different stores, and pauses that others find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lousho_ray import GenerateResult, MockProvider, SqliteStore, ToolCall, create_agent, memory_store, tool
from lousho_ray.actors.session import SESSION_OPTIONS
from lousho_ray.actors.worker import WORKER_OPTIONS
from lousho_ray.ports import GenerateOptions

pytestmark = pytest.mark.usefixtures("ray_cluster")


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pays."""
    return f"paid {amount}"


def policy(request: GenerateOptions) -> GenerateResult | str:
    """Pays once, then says so."""
    if any(message.role == "tool" for message in request.messages):
        return "Done"
    return GenerateResult(tool_calls=(ToolCall("c1", "pay", '{"amount": 5}'),))


def paying(**options: Any) -> Any:
    return create_agent(provider=MockProvider(policy=policy), tools=[pay], runtime="ray", **options)


async def test_each_part_is_where_it_was_chosen(tmp_path: Path) -> None:
    # STO-11, SES-10, APR-53
    stores = {name: SqliteStore(tmp_path / f"{name}.db") for name in ("agent", "transcripts", "checkpoints")}
    agent = paying(store=stores["agent"])
    session = agent.session("s", store=stores["transcripts"], checkpoint_store=stores["checkpoints"])
    paused = await session.send("Pay")
    assert await stores["checkpoints"].checkpoints.load("s.turn-0") is not None
    assert await stores["transcripts"].approvals.load(paused.approval_id) is not None
    assert await stores["agent"].approvals.load(paused.approval_id) is None
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert result.text == "Done"
    assert len(await stores["transcripts"].sessions.load("s") or []) == 4
    assert await stores["agent"].sessions.load("s") is None
    assert await stores["checkpoints"].checkpoints.load("s.turn-0") is None
    for store in stores.values():
        await store.aclose()


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_every_pause_of_a_store_is_listed_and_decided_by_another_agent(tmp_path: Path, kind: str) -> None:
    # APR-D6, APR-D8, APR-53, APR-18
    store: Any = SqliteStore(tmp_path / "s.db") if kind == "sqlite" else memory_store()
    first, second = paying(store=store), paying(store=store)
    in_session = await first.session("s").send("Pay")
    plain = await first.send("Pay")
    assert {pending.id for pending in await second.approvals.list(all=True)} == {in_session.approval_id, plain.approval_id}
    assert await second.approvals.list() == []
    assert (await second.approvals.resolve(plain.approval_id, approved=True)).text == "Done"
    assert (await second.approvals.resolve(in_session.approval_id, approved=True)).text == "Done"
    assert await first.approvals.list(all=True) == []
    assert len(await first.session("s").load()) == 4
    if kind == "sqlite":
        await store.aclose()


def test_the_actors_that_run_turns_and_tools_are_never_retried_by_ray() -> None:
    # DUR-D7, SES-76
    assert SESSION_OPTIONS["max_task_retries"] == WORKER_OPTIONS["max_task_retries"] == 0
