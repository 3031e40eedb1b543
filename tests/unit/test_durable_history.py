"""`session.history()` and `session.fork()`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.messages import Message, ToolCall, assistant, tool_result, user
from lousho_ray.session_history import fork_ids, steps_of
from lousho_ray.stores.memory import memory_store
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import Gate, agent_of, calls, check_transcript, results, shape


@tool
def look(place: str = "here") -> str:
    """Looks."""
    return f"seen {place}"


@tool(needs_approval=True)
def guarded() -> str:
    """Needs a person."""
    return "ok"


TURNS = (calls(("look", {"place": "a"}), ("look", {"place": "b"}), text="Looking."), "First", "Second")


async def two_turns(**options: Any) -> Any:
    session = agent_of(*TURNS, "Third", "Fourth", tools=[look, guarded], store=memory_store(), **options).session("s")
    await session.send("One")
    await session.send("Two")
    return session


async def test_history_lists_the_steps() -> None:
    # SES-65, SES-66
    session = await two_turns()
    steps = await session.history()
    assert [(step.step, step.turn, step.message_index, step.text) for step in steps] == [
        (1, 0, 1, "Looking."),
        (2, 0, 4, "First"),
        (3, 1, 6, "Second"),
    ]
    assert [(call.id, call.name, call.args, json.loads(call.result or "")) for call in steps[0].tool_calls] == [
        ("call_1", "look", {"place": "a"}, "seen a"),
        ("call_2", "look", {"place": "b"}, "seen b"),
    ]
    assert steps[2].tool_calls == ()
    assert await agent_of().session("other").history() == []


def test_arguments_that_are_no_json_stay_text_and_joined_input_is_a_turn() -> None:
    # SES-66
    call = ToolCall("c", "look", "{broken")
    messages = [user("One"), assistant("", [call]), tool_result(call, '"x"'), user("More"), assistant("Done")]
    steps = steps_of(messages)
    assert steps[0].tool_calls[0].args == "{broken"
    assert [step.turn for step in steps] == [0, 1]
    assert [step.turn for step in steps_of([assistant("Hello")])] == [0]


async def test_an_unfinished_turn_is_not_listed() -> None:
    # SES-67
    session = agent_of(calls("guarded"), tools=[guarded], store=memory_store()).session("s")
    await session.send("Hi")
    assert await session.history() == []


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        (0, []),
        (1, ["user:One", "assistant:Looking.+look,look", "tool:look", "tool:look"]),
        (2, ["user:One", "assistant:Looking.+look,look", "tool:look", "tool:look", "assistant:First"]),
    ],
)
async def test_a_fork_keeps_what_was_up_to_a_step(step: int, kept: list[str]) -> None:
    # SES-68, SES-71
    session = await two_turns()
    before = await session.load()
    fork = await session.fork(step)
    assert fork.id == "s-fork-1"
    assert shape(fork.messages) == kept
    assert shape(await fork.load()) == kept
    await fork.send("Go on")
    assert shape(await fork.load()) == [*kept, "user:Go on", "assistant:Third"]
    check_transcript(await fork.load())
    assert await session.load() == before


@pytest.mark.parametrize("step", [-1, 4, True, "1", None, 1.0])
async def test_a_step_that_is_not_there_is_refused(step: Any) -> None:
    # SES-68
    session = await two_turns()
    with pytest.raises(ConfigurationError) as raised:
        await session.fork(step)
    assert (raised.value.code, raised.value.field) == ("LOUSHO_SESSION_STEP_NOT_FOUND", "from_step")
    assert "0 to 3" in str(raised.value)


async def test_forks_get_the_first_free_id() -> None:
    # SES-69
    session = await two_turns()
    assert [(await session.fork(1)).id for _ in range(2)] == ["s-fork-1", "s-fork-2"]
    assert (await session.fork(1, id="mine")).id == "mine"
    for taken in ("mine", "s", "s-fork-1"):
        with pytest.raises(ConfigurationError) as raised:
            await session.fork(1, id=taken)
        assert (raised.value.code, raised.value.field) == ("LOUSHO_SESSION_EXISTS", "id")
    with pytest.raises(ConfigurationError) as raised:
        await session.fork(1, id="not/allowed")
    assert raised.value.code == "LOUSHO_SESSION_ID_INVALID"


async def test_many_forks_at_once_get_different_ids() -> None:
    # SES-69
    session = await two_turns()
    forks = await asyncio.gather(*(session.fork(2) for _ in range(10)))
    assert len({fork.id for fork in forks}) == 10


async def test_the_id_of_a_pending_turn_is_taken() -> None:
    # SES-69
    store = memory_store()
    agent = agent_of("First", calls("guarded"), tools=[guarded], store=store)
    session = agent.session("s")
    await session.send("One")
    await agent.session("busy").send("Hi")  # pauses: there is a turn of it, and no transcript
    with pytest.raises(ConfigurationError) as raised:
        await session.fork(1, id="busy")
    assert raised.value.code == "LOUSHO_SESSION_EXISTS"


def test_long_ids_are_cut_and_told_apart() -> None:
    # SES-69
    first, second = next(fork_ids("a" * 128)), next(fork_ids("a" * 127 + "b"))
    assert len(first) <= 128
    assert first != second
    assert first.endswith("-fork-1")
    assert next(fork_ids("a" * 121)) == "a" * 121 + "-fork-1"


async def test_a_fork_can_replace_a_result() -> None:
    # SES-70
    session = await two_turns()
    fork = await session.fork(1, patch={"tool_result": {"tool_call_id": "call_2", "result": {"found": 3}}})
    assert results(fork.messages) == ["seen a", {"found": 3}]
    check_transcript(fork.messages)
    assert results(await session.load()) == ["seen a", "seen b"]


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        ({"tool_result": {"tool_call_id": "call_9", "result": 1}}, "patch.tool_result.tool_call_id"),
        ({"tool_result": {"tool_call_id": "call_1"}}, "patch.tool_result.result"),
        ({"tool_results": {}}, "patch.tool_results"),
        ({"tool_result": 1}, "patch.tool_result"),
    ],
)
async def test_a_patch_that_cannot_be_applied_is_refused(patch: dict[str, Any], field: str) -> None:
    # SES-70
    session = await two_turns()
    with pytest.raises(ConfigurationError) as raised:
        await session.fork(2, patch=patch)
    assert raised.value.field == field
    assert (await session.fork(2)).id == "s-fork-1"


async def test_a_session_in_memory_can_be_forked() -> None:
    session = agent_of("First", "Second").session("s")
    await session.send("One")
    fork = await session.fork(1)
    await fork.send("Two")
    assert shape(await session.load()) == ["user:One", "assistant:First"]
    assert shape(await fork.load()) == ["user:One", "assistant:First", "user:Two", "assistant:Second"]
    assert (await fork.fork(2)).id == "s-fork-1-fork-1"


async def test_pauses_stay_with_the_source() -> None:
    # SES-71
    store = memory_store()
    session = agent_of("First", calls("guarded"), "Free", tools=[guarded], store=store).session("s")
    await session.send("One")
    await session.send("Two")
    fork = await session.fork(1)
    assert await fork.pending() is None
    assert (await fork.send("Three")).text == "Free"
    assert await session.pending() is not None


async def test_a_running_turn_is_not_forked() -> None:
    # SES-72
    gate = Gate("slow")
    session = agent_of(calls("slow"), "Done", tools=[gate.tool], store=memory_store()).session("s")
    turn = asyncio.ensure_future(session.send("Hi"))
    await gate.running.wait()
    with pytest.raises(LoushoError) as raised:
        await session.fork(0)
    assert raised.value.code == "LOUSHO_SESSION_BUSY"
    gate.go.set()
    await turn
    assert shape((await session.fork(1)).messages) == ["user:Hi", "assistant:+slow", "tool:slow"]


async def test_what_history_gives_are_copies() -> None:
    # SES-65
    session = await two_turns()
    (await session.history()).clear()
    assert len(await session.history()) == 3
    assert isinstance((await session.load())[0], Message)
