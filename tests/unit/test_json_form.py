"""The JSON that stores keep: what it says, and that nothing is encoded twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lousho_ray import create_agent, tool
from lousho_ray.errors import StorageError
from lousho_ray.messages import assistant, user
from lousho_ray.stores import json_form
from lousho_ray.stores.json_form import encode_message, fixed_message, split
from lousho_ray.stores.sqlite import SqliteStore
from lousho_ray.testing import MockTurn, mock_model


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"steps": [1, 2]},
        {"id": "a", "steps": [{"n": 1}, None, "ü\ud800"], "empty": [], 'odd "key"': [True], "long": ["x" * 600, "y" * 600]},
        {"messages": [fixed_message(user("Hi"))], "more": {"list": [1]}},
        {1: [2]},
    ],
)
def test_a_record_that_is_taken_apart_is_the_same_again(record: dict[Any, Any]) -> None:
    assert split(record, "it").join("it") == json.loads(json.dumps(record))


def test_what_is_no_json_is_named_by_its_place() -> None:
    with pytest.raises(StorageError, match=r"it: steps\[1\] cannot be stored: n is a set"):
        split({"steps": [1, {"n": {1}}]}, "it")


def test_a_message_has_one_text_for_transcripts_and_checkpoints() -> None:
    for message in (user("Hi"), assistant("Hello")):
        assert encode_message(message, "it") is encode_message(message, "it") is fixed_message(message).text("it")
    message = user("Hi")
    assert fixed_message(message).text("it") is encode_message(message, "it")


def test_metadata_that_was_changed_is_saved_as_it_is_now() -> None:
    metadata = {"seen": 1}
    message = user("Hi").with_(metadata=metadata)
    assert '"seen":1' in encode_message(message, "it")
    metadata["seen"] = 2
    assert '"seen":2' in encode_message(message, "it")


@tool
async def look(at: int) -> str:
    """Looks at something."""
    return f"seen-{at}"


async def test_a_turn_encodes_each_message_and_each_step_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    encoded = list[str]()
    encode = json_form._ENCODER.encode

    class Counting:
        def encode(self, value: Any) -> str:
            text = encode(value)
            encoded.append(text)
            return text

    monkeypatch.setattr(json_form, "_ENCODER", Counting())
    calls = [MockTurn(tool_calls=({"id": f"call_{n}", "name": "look", "args": {"at": n}},)) for n in range(5)]
    async with SqliteStore(tmp_path / "a.db") as store:
        agent = create_agent(provider=mock_model([*calls, "All seen."]), tools=[look], store=store, runtime="local")
        await agent.session("trip").send("Look around.")
        await agent.close()
    for text in ("Look around.", "All seen.", *(f"seen-{n}" for n in range(5))):
        assert sum(text in said and '"role":' in said for said in encoded) == 1, text
    steps = [said for said in encoded if '"promptTokens"' in said and '"step":' in said and '"sessionId"' not in said]
    assert len(steps) == len(set(steps)) == 5  # The last one ends the turn: its checkpoint goes.
