"""What travels of lists that two processes have both: session results to their callers, transcripts and checkpoints to a store."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import ExecutionResult, Message, SqliteStore
from lousho_ray.actors import shared_lists
from lousho_ray.actors.session_clients import Ending
from lousho_ray.actors.shared_lists import ITEM_CHARS, SharedLists, same_start
from lousho_ray.actors.store_calls import Call, CallReceiver, CallSender, Cut, Lacking
from lousho_ray.handle import LocalRun
from lousho_ray.messages import assistant, user
from lousho_ray.stores.durable_turns import OpenedTurn
from lousho_ray.stores.json_form import FixedJson

TALK = [user("one"), assistant("two"), user("three")]


def copied(messages: Any) -> Any:
    return pickle.loads(pickle.dumps(messages))


def test_equal_messages_are_the_same_but_for_those_with_metadata() -> None:
    assert same_start(TALK, [*copied(TALK[:2]), user("other")]) == 2
    noted = user("one", n=1)
    assert same_start([noted], [noted]) == 1
    assert same_start([noted], [user("one", n=True)]) == 0, "equal in Python, not in JSON"
    assert same_start([], TALK) == same_start(TALK, []) == 0
    assert same_start([{"role": "user"}], [{"role": "user"}]) == 0, "dicts may be changed in place"
    assert same_start([FixedJson(role="user")], [FixedJson(role="user")]) == 1
    assert same_start([FixedJson(metadata={"n": 1})], [FixedJson(metadata={"n": True})]) == 0


async def test_what_was_exchanged_longest_ago_goes_first() -> None:
    lists = SharedLists(budget_chars=3 * ITEM_CHARS + 30)
    for name in "abc":
        lists.put(name, "t", [user("x" * 10)])
    assert [lists.get(name) is not None for name in "abc"] == [True, True, True]
    lists.put("a", "t2", [*lists.get("a").items, user("x" * 10)])  # type: ignore[union-attr]
    assert [lists.get(name) is not None for name in "abc"] == [True, False, True]
    lists.put("d", "t", [user("x" * 4 * ITEM_CHARS)])
    assert len(lists) == 0, "one that alone is too much is not kept"


async def test_what_is_too_old_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    # SES-78
    monkeypatch.setattr(shared_lists, "KEPT_S", 0.0)
    lists = SharedLists()
    lists.put("a", "t", TALK)
    while len(lists):
        await asyncio.sleep(0)
    lists.put("b", "t", TALK)
    assert lists.get("b") is not None


# ------------------------------------------------------------------------------------------------------------------- stores


class Wire:
    """A store behind both sides, with pickles between. `sent` is what travelled."""

    def __init__(self, store: Any) -> None:
        self.sender, self.receiver = CallSender(), CallReceiver()
        self.sent: list[Any] = []
        self._store = store

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        part, method = name.split(".")
        value: Any = Lacking()
        whole = False
        while isinstance(value, Lacking):
            call, exchange = self.sender.begin(Call(part, method, args, options), whole=whole)
            value, whole = copied(await self._there(copied(call))), True
        return self.sender.end(exchange, value)

    async def _there(self, sent: Call) -> Any:
        self.sent.append(sent)
        call = self.receiver.begin(sent)
        if call is None:
            return Lacking()
        value = await getattr(getattr(self._store, call.part), call.method)(*call.args, **call.options)
        answer = self.receiver.end(call, value)
        self.sent.append(answer)
        return answer


@pytest.fixture
async def wire(tmp_path: Path) -> Any:
    async with SqliteStore(tmp_path / "s.db") as store:
        yield Wire(store)


async def test_a_turn_brings_its_store_what_is_new(wire: Wire) -> None:
    # STO-05, STO-44
    for number in range(1, 4):
        opened = await wire.call("turns.open", "s", f"me/{number}", 60_000)
        answer = wire.sent[-1]
        assert isinstance(answer, OpenedTurn)
        if number > 1:
            assert isinstance(answer.messages, Cut)
            assert answer.messages.rest == []
        history = opened.messages or []
        assert [message.text for message in history] == [text for n in range(1, number) for text in (f"q{n}", f"a{n}")]
        told = [*history, user(f"q{number}"), assistant(f"a{number}")]
        await wire.call("turns.end", "s", told, holder=f"me/{number}", fence=opened.fence, checkpoint="s.turn-0")
        sent = wire.sent[-2].args[1]
        assert len(sent.rest if number > 1 else sent) == 2
    assert [message.text for message in await wire.call("sessions.load", "s")] == ["q1", "a1", "q2", "a2", "q3", "a3"]


async def test_what_others_have_saved_meanwhile_is_seen(wire: Wire) -> None:
    # SES-05
    await wire.call("sessions.save", "s", TALK)
    await wire._store.sessions.save("s", [user("other"), *TALK])
    assert await wire.call("sessions.load", "s") == [user("other"), *TALK]
    await wire._store.sessions.save("s", TALK[:1])
    assert await wire.call("sessions.load", "s") == TALK[:1]
    await wire._store.sessions.delete("s")
    assert await wire.call("sessions.load", "s") is None


async def test_a_store_that_was_started_again_is_sent_the_whole(wire: Wire) -> None:
    # STO-45
    await wire.call("sessions.save", "s", TALK)
    wire.receiver = CallReceiver()
    await wire.call("sessions.save", "s", [*TALK, assistant("four")])
    assert [type(sent) for sent in wire.sent if isinstance(sent, Call)][1:] == [Call, Call]
    wire.receiver = CallReceiver()
    assert await wire.call("sessions.load", "s") == [*TALK, assistant("four")]


async def test_two_callers_do_not_mix_up_what_they_have(wire: Wire) -> None:
    other = Wire(wire._store)
    other.receiver = wire.receiver
    await wire.call("sessions.save", "s", TALK)
    await other.call("sessions.save", "s", [user("other"), *TALK])
    await wire.call("sessions.save", "s", [*TALK, assistant("four")])
    assert await other.call("sessions.load", "s") == [*TALK, assistant("four")]


async def test_a_message_with_metadata_is_a_copy_of_its_own(wire: Wire) -> None:
    # STO-05
    noted: Message = user("one", list=[1])
    await wire.call("sessions.save", "s", [noted])
    noted.metadata["list"].append(2)  # type: ignore[index]
    first = await wire.call("sessions.load", "s")
    first[0].metadata["list"].append(3)
    assert (await wire.call("sessions.load", "s"))[0].metadata == {"list": [1]}


async def test_a_checkpoint_brings_what_is_new_in_its_run_and_the_turns_before(wire: Wire) -> None:
    messages = [FixedJson(message.to_dict()) for message in TALK]
    await wire.call("checkpoints.save", {"sessionId": "s.turn-0", "revision": 1, "messages": messages})
    longer = [*messages, FixedJson(assistant("four").to_dict())]
    await wire.call("checkpoints.save", {"sessionId": "s.turn-0", "revision": 2, "messages": longer})
    await wire.call("checkpoints.save", {"sessionId": "s.turn-4", "revision": 1, "messages": longer})
    cut = [sent.args[0]["messages"] for sent in wire.sent if isinstance(sent, Call)][1:]
    assert [(one.same, len(one.rest)) for one in cut] == [(3, 1), (4, 0)]
    for key in ("s.turn-0", "s.turn-4"):
        assert (await wire._store.checkpoints.load(key))["messages"] == longer


async def test_a_call_that_failed_is_no_base_for_the_next(wire: Wire) -> None:
    from lousho_ray import StorageError

    await wire.call("sessions.save", "s", TALK)
    with pytest.raises(StorageError):
        await wire.call("sessions.save", "s", [*TALK, user("no", bad=object)])
    await wire.call("sessions.save", "s", [*TALK, assistant("four")])
    assert await wire.call("sessions.load", "s") == [*TALK, assistant("four")]


# ------------------------------------------------------------------------------------------------------------------ results


async def ended(messages: list[Message] | None) -> LocalRun:
    async def run() -> Any:
        if messages is None:
            raise ValueError("no")
        return ExecutionResult(messages=messages, new_messages=messages[-2:])

    made = LocalRun("run_1")
    made.start(run())
    await asyncio.wait({made.task})
    return made


async def test_a_result_leaves_out_what_its_caller_has() -> None:
    base = await ended(TALK)
    run = await ended([*copied(TALK), assistant("four")])
    ending = Ending.of(run, base)
    assert ending.result is not None
    assert (ending.same, ending.result.messages) == (3, [assistant("four")])
    assert ending.result.new_messages == [user("three"), assistant("four")]
    assert run.task.result().messages == [*TALK, assistant("four")]
    for none in (None, await ended(None), await ended([assistant("else")])):
        whole = Ending.of(run, none)
        assert whole.result is not None
        assert (whole.same, len(whole.result.messages)) == (0, 4)
