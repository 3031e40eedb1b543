"""A session actor keeps nothing of a session whose turns are over: it serves thousands of them."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path

import pytest

from lousho_ray import MockProvider, SqliteStore, create_agent
from lousho_ray.actors import session as session_actor
from lousho_ray.actors.session import SessionActor, SessionKey, Start
from lousho_ray.actors.session_clients import endings_in
from lousho_ray.actors.shipping import Shipment
from lousho_ray.durable import Sources
from lousho_ray.ids import new_id
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions
from lousho_ray.runtime import LocalRuntime
from lousho_ray.session import TurnRequest
from lousho_ray.stores.memory import InMemoryApprovalStore
from lousho_ray.stores.remembered import Remembered

SESSIONS = 200


def parrot(request: GenerateOptions) -> str:
    return f"heard {request.messages[-1].text}"


def kept() -> Counter[str]:
    """Our own objects that are alive, by class, and tasks."""
    gc.collect()
    classes = (type(thing) for thing in gc.get_objects())
    return Counter(
        f"{cls.__module__}.{cls.__qualname__}"
        for cls in classes
        if str(cls.__module__).startswith("lousho_ray") or cls is asyncio.Task
    )


async def test_nothing_of_a_session_is_kept_once_its_turns_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # SES-78, DEC-R2
    monkeypatch.setattr(session_actor, "KEPT_S", 0.0)
    agent = create_agent(provider=MockProvider(policy=parrot), runtime="local")
    actor, shipment = SessionActor(LocalRuntime().spawner, alone=False), Shipment("digest", [])
    actor._warehouse._definitions["digest"] = agent._definition
    ends = 0
    async with SqliteStore(tmp_path / "s.db") as store:
        actor._stores["store"] = Sources(store, store, store).parts(InMemoryApprovalStore())

        async def turn(id: str, *, observed: bool) -> None:
            request = TurnRequest(new_id("run_"), (user("hi"),), observed=observed)
            accepted = await actor.submit("client", [Start(SessionKey(id, private="store"), shipment, request)])
            assert accepted.answers == [True]
            cursor, end = 0, not observed
            while not end:
                batch = await actor.read(request.run_id, cursor)
                cursor, end = batch.cursor, batch.end
            nonlocal ends
            answer = await actor.poll("client", ends)
            ends = answer.cursor
            [ending] = [ending for parcel in answer.parcels for ending in endings_in(parcel)]
            assert ending.run_id == request.run_id
            assert ending.result is not None
            assert ending.result.text == "heard hi"

        async def serve(first: int) -> None:
            for number in range(first, first + SESSIONS):
                await turn(f"s{number}", observed=number % 2 == 0)
            await asyncio.sleep(0.01)
            store.sessions._known = Remembered()  # what it remembers is bounded by size, and not what this is about

        await serve(0)
        before = kept()
        await serve(SESSIONS)
        grown = kept() - before
        assert {name: count for name, count in grown.items() if count > SESSIONS / 20} == {}
        assert actor._turns == {}
        assert len(actor._lines._lines) == 0


async def test_of_turns_whose_end_their_client_knows_few_are_kept_unless_somebody_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SES-78
    monkeypatch.setattr(session_actor, "MOST_TOLD", 5)
    agent = create_agent(provider=MockProvider(policy=parrot), runtime="local")
    actor, shipment = SessionActor(LocalRuntime().spawner, alone=False), Shipment("digest", [])
    actor._warehouse._definitions["digest"] = agent._definition
    async with SqliteStore(tmp_path / "s.db") as store:
        actor._stores["store"] = Sources(store, store, store).parts(InMemoryApprovalStore())
        cursor, read = 0, []
        for number in range(40):
            request = TurnRequest(new_id("run_"), (user("hi"),), observed=number % 4 == 0)
            await actor.submit("client", [Start(SessionKey(f"s{number}", private="store"), shipment, request)])
            cursor = (await actor.poll("client", cursor)).cursor
            if request.observed:
                read.append(request.run_id)
        assert len(actor._turns) <= len(read) + 5 + 1
        assert set(read) <= set(actor._turns)
        for run_id in read:
            assert (await actor.read(run_id, 0)).end


async def test_of_a_long_session_only_the_last_turn_that_was_told_is_kept(tmp_path: Path) -> None:
    # SES-78: each holds the whole conversation
    agent = create_agent(provider=MockProvider(policy=parrot), runtime="local")
    actor, shipment = SessionActor(LocalRuntime().spawner, alone=False), Shipment("digest", [])
    actor._warehouse._definitions["digest"] = agent._definition
    async with SqliteStore(tmp_path / "s.db") as store:
        actor._stores["store"] = Sources(store, store, store).parts(InMemoryApprovalStore())
        cursor = 0
        for number in range(30):
            request = TurnRequest(new_id("run_"), (user("hi"),), observed=number % 2 == 0)
            await actor.submit("client", [Start(SessionKey("s", private="store"), shipment, request)])
            position, end = 0, not request.observed
            while not end:
                batch = await actor.read(request.run_id, position)
                position, end = batch.cursor, batch.end
            cursor = (await actor.poll("client", cursor)).cursor
        assert len(actor._turns) == 2  # the last that was told, and the one whose end was sent just now
