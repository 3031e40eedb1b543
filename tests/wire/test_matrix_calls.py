"""Tool calls in every shape that servers of the Chat Completions form send them in (field cases W01 to W14, W28)."""

# ruff: noqa: E501 - one row of a table a line

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.testing.fake_server import DONE, FIN, TC, D, FakeServer, U, completion
from tests.wire.matrix_support import Mode, Place, Row, cells, check

END = (FIN("tool_calls"), DONE)
X1, Y2 = '{"x":1}', '{"y":2}'
RUN_F, RUN_G, RUN_NOW = ("f", {"x": 1}), ("g", {"y": 2}), ("now", {})


def raw(id: str | None, name: str | None, args: Any = ..., **fields: Any) -> dict[str, Any]:
    """A call as it stands in a message or a delta, with only the given fields."""
    function = {} if name is None else {"name": name}
    if args is not ...:
        function["arguments"] = args
    return {**({} if id is None else {"id": id, "type": "function"}), "function": function, **fields}


def whole(*calls: dict[str, Any], finish: str | None = "tool_calls", **fields: Any) -> dict[str, Any]:
    return completion({"content": None, "tool_calls": list(calls)}, finish, **fields)


def delta(*calls: dict[str, Any]) -> bytes:
    return D({"tool_calls": list(calls)})


# fmt: off
NO_INDEX = [  # W01
    Row("W01-id-no-index", [delta(raw("a", "f", X1)), *END], whole(raw("a", "f", X1)), runs=[RUN_F]),
    Row("W01-anonymous-rest", [TC(None, "a", "f", '{"x"'), TC(None, None, None, ":"), TC(None, None, None, "1}"), *END], runs=[RUN_F]),
    Row("W01-anonymous-rest-of-the-second",
        [TC(None, "a", "f", X1), TC(None, "b", "g", '{"y"'), TC(None, None, None, ":2}"), *END], runs=[RUN_F, RUN_G]),
    Row("W01-interleaved-by-id", [TC(None, "a", "f", '{"x":'), TC(None, "b", "g", '{"y":'), TC(None, "a", None, "1}"),
        TC(None, "b", None, "2}"), *END], runs=[RUN_F, RUN_G]),
    Row("W01-names-only", [TC(None, None, "f", X1), TC(None, None, "g", Y2), *END], whole(raw(None, "f", X1), raw(None, "g", Y2)),
        runs=[RUN_F, RUN_G]),
    Row("W01-one-name-twice", [TC(None, None, "f", X1), TC(None, None, "f", '{"x":2}'), *END],
        whole(raw(None, "f", X1), raw(None, "f", '{"x":2}')), runs=[RUN_F, ("f", {"x": 2})]),
    Row("W01-two-in-one-delta", [delta(raw("a", "f", X1), raw("b", "g", Y2)), *END], whole(raw("a", "f", X1), raw("b", "g", Y2)),
        runs=[RUN_F, RUN_G]),
    Row("W01-by-position", [delta(raw("a", "f", '{"x"'), raw("b", "g", '{"y"')), delta(raw(None, None, ":1}"), raw(None, None, ":2}")),
        *END], runs=[RUN_F, RUN_G]),
    Row("W01-index-null", [delta(raw("a", "f", '{"x"', index=None)), delta(raw(None, None, ":1}", index=None)), *END], runs=[RUN_F]),
    Row("W01-index-as-text", [delta(raw("a", "f", '{"x"', index="0")), delta(raw(None, None, ":1}", index="0")), *END], runs=[RUN_F]),
    Row("W01-name-null-in-the-rest", [TC(0, "a", "f", '{"x"'), delta({"index": 0, "id": None, "type": None, "function": {
        "name": None, "arguments": ":1}"}}), *END], runs=[RUN_F]),
    Row("W01-function_call", [D({"function_call": {"name": "f", "arguments": '{"x"'}}), D({"function_call": {"arguments": ":1}"}}),
        FIN("function_call"), DONE], completion({"content": None, "function_call": {"name": "f", "arguments": X1}}, "function_call"),
        runs=[RUN_F]),
]
BLANK = [  # W02
    *[Row(f"W02-{name}", [TC(0, "a", "now", args), *END], whole(raw("a", "now", args)), runs=[RUN_NOW])
      for name, args in {"empty": "", "blank": " ", "newline": "\n", "tab": "\t\r\n", "null": None}.items()],
    Row("W02-no-arguments-key", [delta({"index": 0, **raw("a", "now")}), *END], whole(raw("a", "now")), runs=[RUN_NOW]),
    Row("W02-beside-another", [TC(0, "a", "now", ""), TC(1, "b", "f", X1), *END], whole(raw("a", "now", ""), raw("b", "f", X1)),
        runs=[RUN_NOW, RUN_F]),
]
OBJECTS = [  # W04
    Row("W04-object", [TC(0, "a", "f", {"x": 1}), *END], whole(raw("a", "f", {"x": 1})), runs=[RUN_F]),
    Row("W04-no-id-no-type", [delta(raw(None, "f", {"x": 1})), *END], whole(raw(None, "f", {"x": 1})), runs=[RUN_F]),
    Row("W04-empty-object", [TC(0, "a", "now", {}), *END], whole(raw("a", "now", {})), runs=[RUN_NOW]),
    Row("W04-nested", [TC(0, "a", "f", {"x": {"y": ["ä", None]}}), *END], whole(raw("a", "f", {"x": {"y": ["ä", None]}})),
        runs=[("f", {"x": {"y": ["ä", None]}})]),
    Row("W04-one-of-each", [TC(0, "a", "f", {"x": 1}), TC(1, "b", "g", Y2), *END], whole(raw("a", "f", {"x": 1}), raw("b", "g", Y2)),
        runs=[RUN_F, RUN_G]),
]
NOT_OBJECTS = [  # W05, W28
    *[Row(f"W05-{name}", [TC(0, "a", "f", args), *END], whole(raw("a", "f", args)), kinds=["validation"])
      for name, args in {"text": '"abc"', "list": "[]", "number": "123", "true": "true", "list-of-objects": '[{"x":1}]',
                         "prose": "call f with x=1", "NaN": '{"x":NaN}', "infinity": '{"x":-Infinity}', "huge": '{"x":1e999}',
                         "deep": '{"x":' + "[" * 5000 + "]" * 5000 + "}", "deep-and-open": "[" * 5000}.items()],
    Row("W05-list-as-value", [TC(0, "a", "f", [1]), *END], whole(raw("a", "f", [1])), kinds=["validation"]),
    Row("W05-one-good-one-bad", [TC(0, "a", "f", "[]"), TC(1, "b", "g", Y2), *END], whole(raw("a", "f", "[]"), raw("b", "g", Y2)),
        runs=[RUN_G], kinds=["validation"]),
    Row("W28-duplicate-keys", [TC(0, "a", "f", '{"x":0,"x":1}'), *END], whole(raw("a", "f", '{"x":0,"x":1}')), runs=[RUN_F]),
    Row("W28-lone-surrogate", [TC(0, "a", "f", '{"x":"\\ud83d"}'), *END], whole(raw("a", "f", '{"x":"\\ud83d"}')),
        runs=[("f", {"x": "\ufffd"})]),
]
REASONS = [  # W07, W08, W10
    *[Row(f"W07-{reason}", [TC(0, "a", "f", X1), FIN(reason), DONE], whole(raw("a", "f", X1), finish=reason), runs=[RUN_F])
      for reason in ("stop", "end_turn", "function_call", "tool_use", "length")],
    Row("W07-no-reason", [TC(0, "a", "f", X1), DONE], whole(raw("a", "f", X1), finish=None), runs=[RUN_F]),
    Row("W07-reason-beside-the-call", [TC(0, "a", "f", X1, finish_reason="stop"), DONE], runs=[RUN_F]),
    Row("W07-call-after-the-reason", [D({"content": ""}, finish_reason="stop"), TC(0, "a", "f", X1), FIN("stop"), DONE], runs=[RUN_F]),
    Row("W07-reason-and-no-call", [D({"content": "hi"}), *END], completion({"content": "hi"}, "tool_calls"), text="hi", finish="other"),
    Row("W08-content_filter", [TC(0, "a", "delete_all", "{}"), FIN("content_filter"), DONE],
        whole(raw("a", "delete_all", "{}"), finish="content_filter"), finish="content_filter"),
    Row("W08-text-and-call", [D({"content": "Well"}), TC(0, "a", "delete_all", "{}"), FIN("content_filter"), DONE],
        completion({"content": "Well", "tool_calls": [raw("a", "delete_all", "{}")]}, "content_filter"), text="Well",
        finish="content_filter"),
    Row("W08-refusal", [TC(0, "a", "delete_all", "{}"), D({"refusal": "no"}), *END],
        completion({"content": None, "refusal": "no", "tool_calls": [raw("a", "delete_all", "{}")]}, "tool_calls"), text="no",
        finish="content_filter"),
    *[Row(f"W10-cut-{name}", [TC(0, "a", "f", cut), FIN("tool_calls"), U(10, 64), DONE],
          whole(raw("a", "f", cut), usage={"prompt_tokens": 10, "completion_tokens": 64}), finish="length", used=(10, 64),
          settings={"max_tokens": 64})
      for name, cut in {"list": '{"a": [1, 2', "text": '{"a": "b', "key": '{"a', "brace": "{", "escape": '{"a": "\\'}.items()],
    Row("W10-cut-and-length", [TC(0, "a", "f", '{"a": [1'), FIN("length"), DONE], whole(raw("a", "f", '{"a": [1'), finish="length"),
        finish="length"),
    Row("W10-cut-second", [TC(0, "a", "f", X1), TC(1, "b", "g", '{"y":'), FIN("length"), DONE],
        whole(raw("a", "f", X1), raw("b", "g", '{"y":'), finish="length"), finish="length"),
    Row("W10-malformed", [TC(0, "a", "f", '{"a": [1, 2'), FIN("tool_calls"), U(10, 20), DONE],
        whole(raw("a", "f", '{"a": [1, 2'), usage={"prompt_tokens": 10, "completion_tokens": 20}), kinds=["validation"],
        used=None, settings={"max_tokens": 64}),
    Row("W10-whole-at-the-limit", [TC(0, "a", "f", X1), FIN("tool_calls"), U(10, 64), DONE],
        whole(raw("a", "f", X1), usage={"prompt_tokens": 10, "completion_tokens": 64}), runs=[RUN_F], settings={"max_tokens": 64}),
]
ONE_INDEX = [  # W13
    Row("W13-two-ids", [TC(0, "a", "f", X1), TC(0, "b", "g", Y2), *END], runs=[RUN_F, RUN_G]),
    Row("W13-ids-on-first-fragments", [TC(0, "a", "f", '{"x"'), TC(0, None, None, ":1}"), TC(0, "b", "g", '{"y"'),
        TC(0, None, None, ":2}"), *END], runs=[RUN_F, RUN_G]),
    Row("W13-new-name-no-id", [TC(0, None, "f", '{"x"'), TC(0, None, None, ":1}"), TC(0, None, "g", Y2), *END], runs=[RUN_F, RUN_G]),
    Row("W13-same-name-no-id", [TC(0, None, "f", X1), TC(0, None, "f", '{"x":2}'), *END], runs=[RUN_F, ("f", {"x": 2})]),
    Row("W13-same-name-two-ids", [TC(0, "a", "f", X1), TC(0, "b", "f", '{"x":2}'), *END], runs=[RUN_F, ("f", {"x": 2})]),
    Row("W13-both-in-one-delta", [delta(raw("a", "f", X1, index=0), raw("b", "g", Y2, index=0)), *END], runs=[RUN_F, RUN_G]),
    Row("W13-three", [TC(0, "a", "f", X1), TC(0, "b", "g", Y2), TC(0, "c", "now", ""), *END], runs=[RUN_F, RUN_G, RUN_NOW]),
    Row("W13-id-and-name-in-every-fragment", [TC(0, "a", "f", '{"x"'), TC(0, "a", "f", ":1}"), *END], runs=[RUN_F]),
    Row("W13-name-grows", [TC(0, "a", "f", ""), TC(0, "a", None, X1), *END], runs=[RUN_F]),
    Row("W13-one-based", [TC(1, "a", "f", X1), TC(2, "b", "g", Y2), *END], runs=[RUN_F, RUN_G]),
    Row("W13-out-of-order", [TC(1, "b", "g", '{"y"'), TC(0, "a", "f", '{"x"'), TC(1, None, None, ":2}"), TC(0, None, None, ":1}"),
        *END], runs=[RUN_F, RUN_G]),
]
IDS = [  # W14
    Row("W14-same-id", [TC(0, "call_f", "f", X1), TC(1, "call_f", "f", '{"x":2}'), *END],
        whole(raw("call_f", "f", X1), raw("call_f", "f", '{"x":2}')), runs=[RUN_F, ("f", {"x": 2})]),
    Row("W14-same-id-one-index", [TC(0, "call_f", "f", X1), TC(0, "call_f", "f", '{"x":2}'), *END], runs=[RUN_F, ("f", {"x": 2})]),
    Row("W14-same-id-two-tools", [TC(0, "c", "f", X1), TC(1, "c", "g", Y2), *END], whole(raw("c", "f", X1), raw("c", "g", Y2)),
        runs=[RUN_F, RUN_G]),
    Row("W14-empty-ids", [TC(0, "", "f", X1), TC(1, "", "f", '{"x":2}'), *END], whole(raw("", "f", X1), raw("", "f", '{"x":2}')),
        runs=[RUN_F, ("f", {"x": 2})]),
    Row("W14-null-ids", [delta({"index": 0, **raw(None, "f", X1)}, {"index": 1, **raw(None, "f", X1)}), *END],
        whole(raw(None, "f", X1), raw(None, "f", X1)), runs=[RUN_F, RUN_F]),
    Row("W14-number-ids", [delta({**raw("a", "f", X1), "index": 0, "id": 7}), *END], whole({**raw("a", "f", X1), "id": 7}), runs=[RUN_F]),
    Row("W14-sent-again", [TC(0, "a", "f", X1), TC(1, "b", "g", Y2), TC(1, "b", "g", Y2), *END],
        whole(raw("a", "f", X1), raw("b", "g", Y2), raw("b", "g", Y2)), runs=[RUN_F, RUN_G]),
    Row("W14-sent-again-as-new-index", [TC(0, "a", "f", X1), TC(1, "b", "g", Y2), TC(2, "b", "g", Y2), *END], runs=[RUN_F, RUN_G]),
    *[Row(f"W14-odd-id-{index}", [TC(0, odd, "f", X1), *END], whole(raw(odd, "f", X1)), runs=[RUN_F])
      for index, odd in enumerate(("functions.f:0", "x" * 70, "call_|fc_1", "ä", "a b\n", "\ud83d"))],
    Row("W14-unknown-tool", [TC(0, "a", "no.such tool!", X1), *END], whole(raw("a", "no.such tool!", X1)), kinds=["not-found"]),
    Row("W28-unknown-tool-NaN", [TC(0, "a", "nope", '{"x":NaN}'), *END], whole(raw("a", "nope", '{"x":NaN}')), kinds=["not-found"]),
    Row("W28-unknown-tool-surrogate", [TC(0, "a", "nope\ud83d", '{"x":"\ud83d'), *END], whole(raw("a", "nope\ud83d", '{"x":"\ud83d')), kinds=["not-found"]),
    Row("W14-no-name", [TC(0, "a", "", X1), *END], whole(raw("a", "", X1)), kinds=["not-found"]),
    Row("W14-long-unknown-name", [TC(0, "a", "n" * 99, X1), *END], whole(raw("a", "n" * 99, X1)), kinds=["not-found"]),
]
# fmt: on


@pytest.mark.parametrize(("row", "mode", "place"), cells([*NO_INDEX, *BLANK, *OBJECTS, *NOT_OBJECTS, *REASONS, *ONE_INDEX, *IDS]))
async def test_a_call_in_this_shape(fake_server: FakeServer, row: Row, mode: Mode, place: Place, tmp_path: Path) -> None:
    await check(fake_server, row, mode, place, tmp_path)
    if row in BLANK:
        body = fake_server.requests[1].body
        sent = [call["function"]["arguments"] for message in body["messages"] for call in message.get("tool_calls", ())]
        assert sent[0] == "{}"
    if row in IDS and row.runs:
        # Each result stands under the id of its own call.
        messages = fake_server.requests[1].body["messages"]
        calls = {call["id"]: call["function"] for message in messages for call in message.get("tool_calls", ())}
        results = {message["tool_call_id"]: json.loads(message["content"]) for message in messages if message["role"] == "tool"}
        asked = {key: (call["name"], json.loads(call["arguments"])) for key, call in calls.items()}
        assert asked == {key: (result["ran"], result["args"]) for key, result in results.items()}
