"""An S3 store behind its store actor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from lousho_ray import MockProvider, create_agent
from lousho_ray.actors.cluster import NAMESPACE
from lousho_ray.actors.store import StoreReference
from tests.contract.s3_server import S3Server, store_of
from tests.ray.processes import kill_process

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def parrot(request: Any) -> str:
    return f"heard {request.messages[-1].text}"


async def test_a_session_on_ray_is_in_the_bucket_and_outlives_the_store_actor(server: S3Server) -> None:
    # STO-41, STO-42, STO-43, STO-45
    async with store_of(server) as store:
        agent = create_agent(provider=MockProvider(policy=parrot), store=store, runtime="ray")
        session = agent.session("talk")
        await session.send("one")
        name = StoreReference.of_location(store.location).name
        await kill_process(ray.get_actor(name, NAMESPACE))
        assert (await session.send("two")).text == "heard two"
        saved = await store.sessions.load("talk") or []
        assert [message.text for message in saved] == ["one", "heard one", "two", "heard two"]
    ray.kill(ray.get_actor(name, NAMESPACE))
