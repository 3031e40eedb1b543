"""The conversation of a process with a session actor: batches out, one poll for the ends, and what becomes of a lost actor."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from lousho_ray import ExecutionResult
from lousho_ray.actors import conversation, session_conversation
from lousho_ray.actors.cluster import ActorLostError
from lousho_ray.actors.conversation import MOST_GATHER_S, gathering_s
from lousho_ray.actors.session import Accepted, SessionKey, Start
from lousho_ray.actors.session_clients import Ending, Endings, Parcel, endings_in, parcels_of
from lousho_ray.actors.session_conversation import Entry, RemoteTracebackError, SessionConversation
from lousho_ray.actors.shipping import Shipment
from lousho_ray.errors import AgentExecutionError
from lousho_ray.messages import assistant, user
from lousho_ray.session import TurnRequest


class Remote:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method


class FakeActor:
    """An actor in this process, whose turns end when the test says so."""

    def __init__(self) -> None:
        self.submit, self.poll = Remote(self._submit), Remote(self._poll)
        self.life = "life-1"
        self.batches: list[list[Start]] = []
        self.polls = 0
        self.agents: set[str] = set()
        self.log: list[Ending] = []
        self.changed = asyncio.Event()
        self.lost: BaseException | None = None
        self.go = asyncio.Event()
        self.go.set()

    def end(self, run_id: str, text: str = "done") -> None:
        self.log.append(Ending(run_id, ExecutionResult(text=text, run_id=run_id, messages=[user("q"), assistant(text)])))
        self.stir()

    def stir(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _submit(self, client_id: str, starts: list[Start]) -> Accepted:
        await self.go.wait()
        if self.lost is not None:
            raise self.lost
        if any(start.request.run_id == "unsendable" for start in starts):
            raise TypeError("cannot pickle it")
        self.batches.append(list(starts))
        self.agents |= {start.shipment.digest for start in starts if start.shipment.parcel}
        return Accepted(self.life, [start.shipment.digest in self.agents for start in starts])

    async def _poll(self, client_id: str, cursor: int, apart: bool) -> Endings:
        self.polls += 1
        while len(self.log) <= cursor and self.lost is None:
            await self.changed.wait()
        if self.lost is not None:
            raise self.lost
        return Endings(self.life, parcels_of(self.log[cursor:], apart=apart), len(self.log))


@pytest.fixture
async def actor(monkeypatch: pytest.MonkeyPatch) -> FakeActor:
    monkeypatch.setattr(session_conversation, "live", lambda handle: handle)
    monkeypatch.setattr(conversation, "look_up_again", lambda handle: None)
    return FakeActor()


def start(talk: SessionConversation, run_id: str, session: str = "s") -> Entry:
    turn = Start(SessionKey(session, private="memory"), Shipment("agent", ["parcel"]), TurnRequest(run_id, (user("q"),)))
    return talk.start(turn, f"The actor of session '{session}'")


def run_ids(batches: list[list[Start]]) -> list[list[str]]:
    return [[start.request.run_id for start in batch] for batch in batches]


def test_one_that_is_alone_never_waits_for_others() -> None:
    assert gathering_s(0) == 0.0
    assert 0 < gathering_s(4) < gathering_s(8) <= gathering_s(10_000) == MOST_GATHER_S


async def test_turns_that_start_while_a_batch_is_under_way_go_with_the_next(actor: FakeActor) -> None:
    # DEC-R9
    talk = SessionConversation(actor)
    actor.go.clear()
    first = [start(talk, f"a{number}") for number in range(3)]
    await asyncio.sleep(0.01)
    second = [start(talk, f"b{number}") for number in range(3)]
    actor.go.set()
    await asyncio.gather(*(entry.accepted for entry in (*first, *second)))
    assert run_ids(actor.batches) == [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    for entry in (*first, *second):
        actor.end(entry.key)
    results = await asyncio.gather(*(entry.ended for entry in (*first, *second)))
    assert [result.run_id for result in results] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert actor.polls <= 2, "one poll brings the ends of all"


async def test_very_many_turns_are_several_batches(actor: FakeActor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MOST_ENTRIES", 2)
    talk = SessionConversation(actor)
    entries = [start(talk, f"a{number}") for number in range(5)]
    await asyncio.gather(*(entry.accepted for entry in entries))
    assert run_ids(actor.batches) == [["a0", "a1"], ["a2", "a3"], ["a4"]]
    for entry in entries:
        actor.end(entry.key)
    await asyncio.gather(*(entry.ended for entry in entries))


async def test_an_agent_is_sent_once_and_again_to_an_actor_that_lacks_it(actor: FakeActor) -> None:
    talk = SessionConversation(actor)
    for number in range(2):
        entry = start(talk, f"a{number}")
        await entry.accepted
        actor.end(entry.key)
        await entry.ended
    actor.agents.clear()
    entry = start(talk, "a2")
    await entry.accepted
    assert [batch[0].shipment.parcel for batch in actor.batches] == [["parcel"], [], [], ["parcel"]]
    actor.end("a2")
    await entry.ended


async def test_a_turn_that_cannot_be_sent_is_no_trouble_of_the_others(actor: FakeActor) -> None:
    talk = SessionConversation(actor)
    bad, good = start(talk, "unsendable"), start(talk, "good")
    with pytest.raises(TypeError, match="cannot pickle"):
        await bad.accepted
    await good.accepted
    actor.end("good")
    assert (await good.ended).text == "done"
    with pytest.raises(TypeError):
        await bad.ended


@pytest.mark.parametrize("how", ["poll", "life", "submit"])
async def test_turns_of_a_lost_actor_fail_and_name_their_session(actor: FakeActor, how: str) -> None:
    # SES-77
    talk = SessionConversation(actor)
    lost = [start(talk, "a", "first"), start(talk, "b", "second")]
    if how == "submit":
        actor.lost = ActorLostError("A session actor was lost: it died.")
    else:
        await asyncio.gather(*(entry.accepted for entry in lost))
    if how == "poll":
        actor.lost = ActorLostError("A session actor was lost: it died.")
        actor.stir()
    elif how == "life":
        actor.life, actor.log = "life-2", []
        after = start(talk, "c")
        await after.accepted
    for entry, session in zip(lost, ("first", "second"), strict=True):
        with pytest.raises(ActorLostError, match=f"The actor of session '{session}' was lost"):
            await entry.ended
    assert talk.answered_at == float("-inf") or how == "life"
    actor.lost, actor.life = None, "life-2"
    if how != "life":
        actor.log = []
        after = start(talk, "c")
        await after.accepted
    actor.end("c")
    actor.stir()
    assert (await after.ended).text == "done"


async def test_the_next_result_of_a_session_builds_on_the_last(actor: FakeActor) -> None:
    talk = SessionConversation(actor)
    entry = start(talk, "a")
    await entry.accepted
    actor.end("a", "one")
    first = await entry.ended
    first.messages.clear()  # it is the caller's own
    entry = start(talk, "b")
    await entry.accepted
    assert actor.batches[-1][0].base == "a"
    actor.log.append(Ending("b", ExecutionResult(messages=[user("r"), assistant("two")]), same=2))
    actor.stir()
    assert [message.text for message in (await entry.ended).messages] == ["q", "one", "r", "two"]


async def test_an_error_keeps_the_traceback_of_where_it_was_raised(actor: FakeActor) -> None:
    talk = SessionConversation(actor)
    entry = start(talk, "a")
    await entry.accepted
    actor.log.append(Ending("a", error=ValueError("no"), trace="Traceback: in the actor"))
    actor.stir()
    with pytest.raises(ValueError, match="no") as raised:
        await entry.ended
    assert isinstance(raised.value.__cause__, RemoteTracebackError)
    assert "in the actor" in str(raised.value.__cause__)


class Unreadable:
    def __reduce__(self) -> Any:
        return _fails, ()


def _fails() -> None:
    raise RuntimeError("cannot be read")


async def test_a_result_that_cannot_travel_is_an_error_of_its_own_turn(actor: FakeActor) -> None:
    talk = SessionConversation(actor)
    entries = [start(talk, name) for name in ("good", "unreadable", "unpicklable")]
    await asyncio.gather(*(entry.accepted for entry in entries))
    actor.log += [Ending("good", ExecutionResult(text="done"))]
    actor.log += [Ending("unreadable", ExecutionResult(object=Unreadable()))]
    actor.log += [Ending("unpicklable", ExecutionResult(object=asyncio.get_running_loop()))]
    actor.stir()
    assert (await entries[0].ended).text == "done"
    with pytest.raises(AgentExecutionError, match="cannot be read in this process: RuntimeError"):
        await entries[1].ended
    with pytest.raises(AgentExecutionError, match="cannot be sent to another process"):
        await entries[2].ended


def test_several_endings_are_one_parcel_unless_one_cannot_be_packed() -> None:
    good = [Ending("a", ExecutionResult(text="a")), Ending("b")]
    assert [parcel.run_ids for parcel in parcels_of(good, apart=False)] == [["a", "b"]]
    assert [parcel.run_ids for parcel in parcels_of(good, apart=True)] == [["a"], ["b"]]
    bad = Ending("c", ExecutionResult(object=lambda: (_ for _ in ())))
    assert parcels_of([], apart=False) == []
    assert endings_in(parcels_of([bad], apart=True)[0])[0].run_id == "c"
    with pytest.raises(pickle.UnpicklingError):
        endings_in(Parcel(["a", "b"], b"no pickle"))
