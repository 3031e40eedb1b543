"""What only one vendor's API does: Anthropic's blocks and stop reasons, Responses items, images of tools, forced calls (A04 to A08, R01, R02, T10, W22, W28, O05)."""

# ruff: noqa: E501 - one row of a table a line

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import SqliteStore, create_agent, define_tool
from lousho_ray.testing.fake_server import (
    DONE,
    FIN,
    TC,
    D,
    FakeServer,
    Reply,
    U,
    anthropic_message,
    arguments_delta,
    block_delta,
    block_start,
    block_stop,
    completion,
    function_call_item,
    input_json_delta,
    message_delta,
    message_item,
    message_start,
    message_stop,
    output_item_added,
    output_item_done,
    output_text_delta,
    ping,
    reasoning_item,
    reasoning_summary_delta,
    response_completed,
    response_created,
    response_incomplete,
    response_object,
    response_usage,
    status,
    text_delta,
)
from tests.wire.matrix_support import Mode, Place, Route, Row, Toolbox, an_agent, cells, check, play, provider_for, wire_route

TEXT_BLOCK = block_start(0, {"type": "text", "text": ""})
RUN_F, RUN_G = ("f", {"x": 1}), ("g", {"y": 2})
SUMMARY = response_usage(10, 5)


def tool_use(id: str, name: str, input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def started(index: int, id: str, name: str) -> bytes:
    return block_start(index, tool_use(id, name, {}))


def said(*blocks: dict[str, Any], stop: str | None = "end_turn") -> dict[str, Any]:
    return anthropic_message(list(blocks), stop)


def ended(stop: str | None) -> tuple[bytes, bytes]:
    return message_delta(stop), message_stop()


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CALL = tool_use("t1", "f", {"x": 1})
F_BLOCK = (started(0, "t1", "f"), input_json_delta(0, '{"x":1}'), block_stop(0))


def messages(id: str, events: list[bytes] | None, body: Any = None, **expected: Any) -> Row:
    return Row(id, events, body, route="messages", **expected)


def responses(id: str, events: list[bytes] | None, body: Any = None, **expected: Any) -> Row:
    return Row(id, events, body, route="responses", **expected)


# fmt: off
ANTHROPIC = [
    messages("A05-blank-text-and-call", [message_start(), TEXT_BLOCK, block_stop(0), started(1, "t", "f"), input_json_delta(1, '{"x":1}'), block_stop(1), *ended("tool_use")],
             said(words(""), CALL, stop="tool_use"), runs=[RUN_F]),
    messages("A05-newline-text-and-call", [message_start(), TEXT_BLOCK, text_delta(0, "\n"), block_stop(0), started(1, "t", "f"), input_json_delta(1, '{"x":1}'), block_stop(1), *ended("tool_use")],
             said(words("\n"), CALL, stop="tool_use"), runs=[RUN_F]),
    messages("A05-trailing-blanks", [message_start(), TEXT_BLOCK, text_delta(0, "Answer: \n"), block_stop(0), *ended("end_turn")], said(words("Answer: \n")), text="Answer: \n"),
    messages("A07-refusal-empty", [message_start(), *ended("refusal")], said(stop="refusal"), finish="content_filter"),
    messages("A07-refusal-text", [message_start(), TEXT_BLOCK, text_delta(0, "no"), block_stop(0), *ended("refusal")], said(words("no"), stop="refusal"), text="no", finish="content_filter"),
    messages("A07-refusal-and-call", [message_start(), *F_BLOCK, *ended("refusal")], said(CALL, stop="refusal"), finish="content_filter"),
    messages("A07-max_tokens", [message_start(), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0), *ended("max_tokens")], said(words("hi"), stop="max_tokens"), text="hi", finish="length"),
    messages("A07-max_tokens-cut-call", [message_start(), started(0, "t", "f"), input_json_delta(0, '{"x":'), block_stop(0), *ended("max_tokens")], finish="length"),
    messages("A07-max_tokens-whole-call", [message_start(), *F_BLOCK, *ended("max_tokens")], said(CALL, stop="max_tokens"), runs=[RUN_F]),
    messages("A07-context-window", [message_start(), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0), *ended("model_context_window_exceeded")],
             said(words("hi"), stop="model_context_window_exceeded"), text="hi", finish="length"),
    messages("A07-invented", [message_start(), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0), *ended("zzz")], said(words("hi"), stop="zzz"), text="hi", finish="other"),
    messages("A07-invented-and-call", [message_start(), *F_BLOCK, *ended("zzz")], said(CALL, stop="zzz"), runs=[RUN_F]),
    messages("A07-null-and-call", [message_start(), *F_BLOCK, *ended(None)], said(CALL, stop=None), runs=[RUN_F]),
    messages("A07-end_turn-and-call", [message_start(), *F_BLOCK, *ended("end_turn")], said(CALL), runs=[RUN_F]),
    messages("A07-stop_sequence", [message_start(), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0), *ended("stop_sequence")], said(words("hi"), stop="stop_sequence"), text="hi"),
    messages("A07-pause-and-call", [message_start(), *F_BLOCK, *ended("pause_turn")], said(CALL, stop="pause_turn"), runs=[RUN_F]),
    messages("A07-pause", [message_start(), TEXT_BLOCK, text_delta(0, "Searching"), block_stop(0), *ended("pause_turn")], said(words("Searching"), stop="pause_turn"),
             text="Searchingdone", requests=2),
    messages("A08-interleaved", [message_start(), TEXT_BLOCK, text_delta(0, "Both"), block_stop(0), started(1, "a", "f"), started(2, "b", "g"), ping(), input_json_delta(1, '{"x"'), input_json_delta(2, '{"y"'),
        input_json_delta(1, ":1}"), ping(), input_json_delta(2, ":2}"), block_start(3, {"type": "brand_new"}), block_delta(3, {"type": "brand_new_delta"}), block_stop(3),
        block_stop(2), block_stop(1), *ended("tool_use")], runs=[RUN_F, RUN_G]),
    messages("A08-input-at-the-start", [message_start(), block_start(0, CALL), block_stop(0), *ended("tool_use")], runs=[RUN_F]),
    messages("A08-empty-deltas", [message_start(), started(0, "a", "now"), input_json_delta(0, ""), input_json_delta(0, ""), block_stop(0), *ended("tool_use")],
             said(tool_use("a", "now", {}), stop="tool_use"), runs=[("now", {})]),
    messages("A08-no-deltas", [message_start(), started(0, "a", "now"), block_stop(0), *ended("tool_use")], runs=[("now", {})]),
    messages("A08-input-null", None, said(tool_use("a", "now", None), stop="tool_use"), runs=[("now", {})]),
    messages("A08-not-an-object", [message_start(), started(0, "a", "f"), input_json_delta(0, "[1]"), block_stop(0), *ended("tool_use")], said(tool_use("a", "f", [1]), stop="tool_use"),
             kinds=["validation"]),
    messages("A08-same-id", [message_start(), started(0, "a", "f"), input_json_delta(0, '{"x":1}'), block_stop(0), started(1, "a", "g"), input_json_delta(1, '{"y":2}'), block_stop(1), *ended("tool_use")],
             said(tool_use("a", "f", {"x": 1}), tool_use("a", "g", {"y": 2}), stop="tool_use"), runs=[RUN_F, RUN_G]),
    messages("A08-odd-id", [message_start(), started(0, "functions.f:0", "f"), input_json_delta(0, '{"x":1}'), block_stop(0), *ended("tool_use")],
             said(tool_use("functions.f:0", "f", {"x": 1}), stop="tool_use"), runs=[RUN_F]),
    messages("A08-unknown-thinking", [message_start(), block_start(0, {"type": "thinking", "thinking": "", "signature": ""}), block_delta(0, {"type": "thinking_delta", "thinking": "hm"}),
        block_stop(0), TEXT_BLOCK.replace(b'"index": 0', b'"index": 1'), text_delta(1, "hi"), block_stop(1), *ended("end_turn")], text="hi"),
]
F_ITEM = function_call_item("c1", "f", '{"x":1}')
RESPONSES = [
    responses("R02-incomplete", [response_created(), output_text_delta("hi"), response_incomplete("max_output_tokens", [message_item("hi")], usage=SUMMARY)],
              response_object([message_item("hi")], status="incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=SUMMARY), text="hi", finish="length", used=(10, 5)),
    responses("R02-filtered", [response_created(), output_text_delta("hi"), response_incomplete("content_filter", [message_item("hi")], usage=SUMMARY)],
              response_object([message_item("hi")], status="incomplete", incomplete_details={"reason": "content_filter"}, usage=SUMMARY), text="hi", finish="content_filter", used=(10, 5)),
    responses("R02-odd-reason", [response_created(), output_text_delta("hi"), response_incomplete("moon", [message_item("hi")])],
              response_object([message_item("hi")], status="incomplete", incomplete_details={"reason": "moon"}), text="hi", finish="other"),
    responses("R02-cut-call", [response_created(), output_item_added(F_ITEM), arguments_delta('{"x"'), response_incomplete("max_output_tokens", [{**F_ITEM, "arguments": '{"x"', "status": "incomplete"}])],
              response_object([{**F_ITEM, "arguments": '{"x"', "status": "incomplete"}], status="incomplete", incomplete_details={"reason": "max_output_tokens"}), finish="length"),
    responses("R02-one-whole-one-cut", [response_created(), output_item_done(F_ITEM), response_incomplete("max_output_tokens", [F_ITEM, {**function_call_item("c2", "g", '{"y"', "fc_2"), "status": "incomplete"}])],
              response_object([F_ITEM, {**function_call_item("c2", "g", '{"y"', "fc_2"), "status": "incomplete"}], status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
              finish="length"),
    responses("R02-filtered-call", [response_created(), output_item_added(F_ITEM), response_incomplete("content_filter", [F_ITEM])],
              response_object([F_ITEM], status="incomplete", incomplete_details={"reason": "content_filter"}), finish="content_filter"),
    responses("R02-call-and-then-filtered", [response_created(), output_item_done(F_ITEM), response_incomplete("content_filter", [F_ITEM])], finish="content_filter"),
    responses("R02-call-after-all", [response_created(), response_completed([F_ITEM])], response_object([F_ITEM]), runs=[RUN_F]),
    responses("R02-call-twice", [response_created(), output_item_done(F_ITEM), output_item_done(F_ITEM), response_completed([F_ITEM])], response_object([F_ITEM, F_ITEM]), runs=[RUN_F]),
    responses("R02-same-call-id", [response_created(), output_item_done(F_ITEM), output_item_done(function_call_item("c1", "g", '{"y":2}', "fc_2"), 1), response_completed()],
              response_object([F_ITEM, function_call_item("c1", "g", '{"y":2}', "fc_2")]), runs=[RUN_F, RUN_G]),
    responses("R02-blank-arguments", [response_created(), output_item_done(function_call_item("c1", "now", "")), response_completed()], response_object([function_call_item("c1", "now", "")]), runs=[("now", {})]),
    responses("R02-malformed", [response_created(), output_item_done(function_call_item("c1", "f", "[1")), response_completed()], response_object([function_call_item("c1", "f", "[1")]), kinds=["validation"]),
    responses("R01-reasoning-and-call", [response_created(), output_item_added(reasoning_item("hm")), reasoning_summary_delta("hm"), output_item_done(reasoning_item("hm")), output_item_done(F_ITEM, 1),
        response_completed([reasoning_item("hm"), F_ITEM])], response_object([reasoning_item("hm"), F_ITEM]), runs=[RUN_F]),
    responses("R01-reasoning-alone", [response_created(), output_item_done(reasoning_item("hm")), output_text_delta("hi"), response_completed([reasoning_item("hm"), message_item("hi")])],
              response_object([reasoning_item("hm"), message_item("hi")]), text="hi"),
    responses("R02-refusal", [response_created(), response_completed([{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [{"type": "refusal", "refusal": "no"}]}])],
              response_object([{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [{"type": "refusal", "refusal": "no"}]}]), text="no", finish="content_filter"),
]
# fmt: on


@pytest.mark.parametrize(("row", "mode", "place"), cells([*ANTHROPIC, *RESPONSES]))
async def test_a_reply_of_this_vendor(fake_server: FakeServer, row: Row, mode: Mode, place: Place, tmp_path: Path) -> None:
    await check(fake_server, row, mode, place, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------- what tools return

ODD_RESULTS: dict[str, Any] = {  # A05, W22, W28
    "empty": "",
    "none": None,
    "newline": "\n",
    "empty-list": [],
    "nan": {"x": float("nan"), "y": [float("inf")]},
    "surrogate": "x\ud83d",
    "surrogate-pair": "x\ud83d\ude00",
    "surrogate-key": {"\ude00": 1},
    "file-name": os.fsdecode(b"\xff"),
    "null-character": "a\0b",
    "bytes": b"\x89PNG\r\n\x1a\n\xff",
    "object": object(),
    "huge-number": 10**40,
    "tuple-keys": {(1, 2): 3},
    "long": "x" * 200_000,
}


@pytest.mark.parametrize("value", list(ODD_RESULTS.values()), ids=list(ODD_RESULTS))
@pytest.mark.parametrize("route", ["chat", "mistral", "responses", "messages", "ollama"])
async def test_what_tools_return_is_always_fit_to_send(fake_server: FakeServer, route: Route, value: Any, tmp_path: Path) -> None:
    # W22, W28, A05: also after the transcript was read from a store
    async def odd() -> Any:
        return value

    odd_tool = define_tool(name="odd", description="Odd.", execute=lambda args: odd())
    wire = wire_route(route)
    fake_server.respond([Reply(tool_calls=[("odd", {}), ("odd", {})]), Reply("done"), Reply("again")], route=wire)
    for text in ("first", "second"):
        async with (
            SqliteStore(tmp_path / "s.db") as store,
            an_agent(provider_for(route, fake_server), [odd_tool], store=store) as agent,
        ):
            result = await agent.session("s").send(text)
            assert result.ok
    assert len(fake_server.requests) == 3
    for request in fake_server.requests:
        assert "NaN" not in request.raw.decode()
        assert "Infinity" not in request.raw.decode()


@pytest.mark.parametrize("route", ["messages", "chat", "responses", "mistral", "ollama"])
async def test_three_parallel_calls_of_which_one_fails_while_input_comes(fake_server: FakeServer, route: Route) -> None:
    # A04: the results of a turn stand together, each once, and the input that came meanwhile stands behind them
    box = Toolbox()

    async def fail() -> Any:
        raise RuntimeError("out of order")

    async def queue() -> str:
        run.enqueue("also this")
        return "queued"

    tools = [*box.tools, define_tool(name="bad", description="Fails.", execute=lambda args: fail())]
    tools.append(define_tool(name="queue", description="Queues.", execute=lambda args: queue()))
    calls = [("f", {"x": 1}), ("bad", {}), ("queue", {})]
    fake_server.respond([Reply("Three.", tool_calls=calls), Reply("done"), Reply("done")])
    async with an_agent(provider_for(route, fake_server), tools) as agent:
        run = agent.stream("first")
        result = await run.result
    assert result.ok
    assert (len(fake_server.requests), result.tool_errors) == (2, 1)
    sent = fake_server.requests[1].raw.decode()
    assert sent.index("out of order") < sent.index("also this")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["required", "named"])
@pytest.mark.parametrize("route", ["chat", "responses", "messages"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_forced_call_is_forced_once(fake_server: FakeServer, route: Route, choice: Any, streamed: bool) -> None:
    # T10: the model calls as long as it is forced to
    forced = {"required", "any", "tool", "function"}

    def answer(request: Any) -> Reply:
        wanted = request.body.get("tool_choice")
        kind = wanted.get("type") if isinstance(wanted, dict) else wanted
        return Reply(tool_calls=[("f", {})]) if kind in forced else Reply("done")

    fake_server.respond(answer)
    box = Toolbox()
    async with an_agent(provider_for(route, fake_server), box.tools, model_settings={"tool_choice": choice}) as agent:
        played = await play(agent, "first", streamed=streamed)
    assert played.result is not None, played.error
    assert (played.result.text, len(box.runs), len(fake_server.requests)) == ("done", 1, 2)
    assert "tool_choice" in fake_server.requests[0].body


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_output_that_was_cut_is_no_invalid_output(fake_server: FakeServer, streamed: bool) -> None:
    # O05: asking again under the same limit would cut it again
    text = '{"items":[1,2'
    fake_server.on(
        "chat",
        *(
            [D({"content": text}), FIN("length"), U(10, 64), DONE]
            if streamed
            else [status(200, body=completion({"content": text}, "length"))]
        ),
    )
    schema = {"type": "object", "properties": {"items": {"type": "array"}}, "required": ["items"]}
    agent = create_agent(
        provider=provider_for("chat", fake_server), output=schema, runtime="local", model_settings={"max_tokens": 64}
    )
    async with agent:
        played = await play(agent, "first", streamed=streamed)
    assert played.result is not None, played.error
    assert (played.result.finish_reason, played.result.text, len(fake_server.requests)) == ("length", text, 1)
    assert played.result.object is None


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("refusal", [{"content": None, "refusal": "no"}, {"content": "", "refusal": "no"}])
async def test_a_refusal_is_no_invalid_output(fake_server: FakeServer, refusal: dict[str, Any], streamed: bool) -> None:
    # O02
    fake_server.on("chat", *([D({"refusal": "no"}), FIN("stop"), DONE] if streamed else [status(200, body=completion(refusal))]))
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    async with create_agent(provider=provider_for("chat", fake_server), output=schema, runtime="local") as agent:
        played = await play(agent, "first", streamed=streamed)
    assert played.result is not None, played.error
    assert (played.result.finish_reason, played.result.text, len(fake_server.requests)) == ("content_filter", "no", 1)


async def test_signed_reasoning_goes_back_with_its_call_and_nowhere_else(fake_server: FakeServer, tmp_path: Path) -> None:
    # A04, R01, D4: the strict server knows its own signatures
    box = Toolbox()
    fake_server.respond(
        [Reply(reasoning="hm", tool_calls=[("f", {"x": 1})]), Reply("done", reasoning="so"), Reply("again", reasoning="then")]
    )
    for text in ("first", "second"):
        store = SqliteStore(tmp_path / "s.db")
        provider = provider_for("messages", fake_server, default_model="claude-sonnet-4-5")
        async with store, an_agent(provider, box.tools, store=store, reasoning="low") as agent:
            assert (await agent.session("s").send(text)).ok
    kinds = [
        [block["type"] for block in message["content"]]
        for message in fake_server.requests[2].body["messages"]
        if message["role"] == "assistant" and isinstance(message["content"], list)
    ]
    assert kinds[0] == ["thinking", "tool_use"]
    assert "so" not in json.dumps([kind for kind in kinds[1:] if "thinking" in kind])


# ------------------------------------------------------------------------------------------------ a reply that ends inside a call

X1_ITEM, CUT_ITEM = (
    function_call_item("a", "f", '{"x":1}'),
    {**function_call_item("b", "g", '{"y":', "fc_2"), "status": "incomplete"},
)
OVER = {"reason": "max_output_tokens"}
CUT_INPUT = [
    started(0, "a", "f"),
    input_json_delta(0, '{"x":1}'),
    block_stop(0),
    started(1, "b", "g"),
    input_json_delta(1, '{"y":'),
]


def cut_inside(route: Route) -> tuple[list[Any], Any]:
    """A whole call of `f` and the beginning of one of `g`, streamed and (where the API can say so) whole."""
    match route:
        case "responses":
            events = [response_created(), output_item_done(X1_ITEM), response_incomplete("max_output_tokens", [X1_ITEM, CUT_ITEM])]
            return events, response_object([X1_ITEM, CUT_ITEM], status="incomplete", incomplete_details=OVER)
        case "messages":
            return [message_start(), *CUT_INPUT, block_stop(1), *ended("max_tokens")], None
        case _:
            events = [TC(0, "a", "f", '{"x":1}'), TC(1, "b", "g", '{"y":'), FIN("length"), DONE]
            calls = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in (("a", "f", '{"x":1}'), ("b", "g", '{"y":'))
            ]
            return events, completion({"content": None, "tool_calls": calls}, "length")


CUT_ROUTES: list[Route] = ["chat", "compatible", "openrouter", "responses", "messages"]
CUT = [Row(f"length-{route}", *cut_inside(route), finish="length", route=route) for route in CUT_ROUTES]


@pytest.mark.parametrize(("row", "mode", "place"), cells(CUT))
async def test_nothing_of_a_reply_that_ends_inside_a_call_is_run(
    fake_server: FakeServer, row: Row, mode: Mode, place: Place, tmp_path: Path
) -> None:
    # RUN-19, W10, R02: one rule for every API
    await check(fake_server, row, mode, place, tmp_path)
