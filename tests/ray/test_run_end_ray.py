"""`on_run_end` over actors: it stays with the caller and is told once of each run, wherever that ran."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from lousho_ray import MockProvider, OpenAICompatibleProvider, create_agent
from lousho_ray.testing.fake_server import FakeServer, Reply, gate, status
from tests.ray.processes import fan_out

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Ends:
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.told: list[tuple[Any, Any]] = []

    def __call__(self, result: Any, error: Any) -> None:
        with self.lock:
            self.told.append((result, error))

    @property
    def reasons(self) -> list[str]:
        return [type(error).__name__ if result is None else result.finish_reason for result, error in self.told]


async def test_a_lead_with_children_on_workers_is_one_run() -> None:
    # RUN-50, DEC-R5
    ends, own = Ends(), Ends()
    child = create_agent(provider=MockProvider(["read"]), description="Reads.", runtime="ray", on_run_end=own)
    lead = create_agent(provider=MockProvider(policy=fan_out(3)), subagents={"child": child}, runtime="ray", on_run_end=ends)
    result = await lead.send("Go.")
    assert (ends.told, own.told) == ([(result, None)], [])
    turn = await lead.session().send("Go.")
    assert (ends.told[1:], own.told) == ([(turn, None)], [])


@pytest.mark.parametrize("fails", [False, True])
async def test_a_call_that_joins_a_turn_in_a_session_actor_is_no_run_of_its_own(fails: bool) -> None:
    # RUN-50, EVT-48
    ends = Ends()
    async with FakeServer(timeout_s=30) as server:
        model = OpenAICompatibleProvider(base_url=server.compatible_url, default_model="fake")
        agent = create_agent(provider=model, retry=False, runtime="ray", on_run_end=ends)
        session = agent.session(turn_policy="queue")
        failed = status(400, body={"error": {"message": "no"}})
        server.on("chat", gate("go"), Reply("One"))
        server.on("chat", failed if fails else Reply("Two"))
        turn = session.stream("one")
        joined = None
        async for event in turn:
            if event.type == "step.start" and joined is None:
                joined = asyncio.ensure_future(session.send("two"))
            if event.type == "input.queued":
                server.release("go")
        assert joined is not None
        outcomes = await asyncio.gather(turn.result, joined, return_exceptions=True)
    assert ends.reasons == (["CompactedLLMProviderError"] if fails else ["stop"])
    assert [type(outcome) for outcome in outcomes] == [type(outcomes[0])] * 2
