"""How two runs differ."""

from __future__ import annotations

from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import Message, ToolCall, assistant, tool_result, user
from lousho_ray.run_forks import get_checkpoint_history
from lousho_ray.stores.memory import memory_store
from lousho_ray.trajectories import Difference, compare_trajectories
from tests.unit.loop_support import agent_of, calls, plain


def talk(*steps: Any) -> list[Message]:
    """A transcript: texts, and `(tool, arguments, result)` calls with ids that differ from run to run."""
    messages = [user("Go")]
    for number, step in enumerate(steps):
        if isinstance(step, str):
            messages.append(assistant(step))
        else:
            call = ToolCall(f"{id(messages)}-{number}", step[0], step[1])
            messages += [assistant("", [call]), tool_result(call, step[2])]
    return messages


def test_equal_runs_do_not_drift() -> None:
    # DUR-53
    found = compare_trajectories(talk(("look", "{}", "1"), "Done"), talk(("look", "{ }", "1"), "Done"))
    assert found.diverged_at is None
    assert found.drift == {}
    assert [step.text for step in found.a] == ["", "Done"]
    assert [call.name for call in found.b[0].tool_calls] == ["look"]


@pytest.mark.parametrize(
    ("other", "diverged_at", "drift"),
    [
        ([("look", '{"at": 2}', "1"), "Done"], 1, {"arguments": ({"step": 1, "tool": "look", "a": {"at": 1}, "b": {"at": 2}},)}),
        ([("look", '{"at": 1}', "2"), "Done"], 1, {}),
        ([("look", '{"at": 1}', "1"), "Else"], 2, {}),
        ([("find", '{"at": 1}', "1"), "Done"], 1, {"tool_order": Difference(["look"], ["find"])}),
        ([("look", '{"at": 1}', "1")], 2, {"step_count": Difference(2, 1)}),
    ],
)
def test_what_differs_is_named(other: list[Any], diverged_at: int, drift: dict[str, Any]) -> None:
    # DUR-53
    found = compare_trajectories(talk(("look", '{"at": 1}', "1"), "Done"), talk(*other))
    assert (found.diverged_at, found.drift) == (diverged_at, drift)


async def test_a_fork_is_compared_with_its_source() -> None:
    # DUR-53
    store = memory_store()
    agent = agent_of(calls("look"), "Done", "Cut", tools=[plain("look")], store=store)
    await agent.send("Go", session_id="r")
    fork = await agent.fork("r", 1, patch={"tool_result": {"tool_call_id": "call_1", "result": "other"}})
    await agent.resume(fork.session_id)
    saved = [await store.checkpoints.load(key) for key in ("r", fork.session_id)]
    found = compare_trajectories(saved[0] or {}, {**(saved[1] or {}), "finishReason": "length"})
    assert found.diverged_at == 1
    assert found.drift == {"finish_reason": Difference("stop", "length")}
    entries = await get_checkpoint_history(store, "r") or []
    assert compare_trajectories(entries[0]["checkpoint"], saved[0] or {}).diverged_at is None


@pytest.mark.parametrize("wrong", [None, "text", {"steps": []}, [1]])
def test_something_else_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        compare_trajectories([], wrong)
    assert caught.value.field == "b"
