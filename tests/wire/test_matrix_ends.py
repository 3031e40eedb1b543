"""How replies begin, are cut up and end, and what they say they cost (field cases W11, W16 to W20, W22, W25, W26, C01, C02, O02)."""

# ruff: noqa: E501 - one row of a table a line

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lousho_ray.testing.fake_server import (
    DONE,
    FIN,
    TC,
    D,
    FakeServer,
    Reply,
    U,
    anthropic_message,
    block_delta,
    block_start,
    block_stop,
    chunk,
    completion,
    cut,
    drop,
    eof,
    hold,
    message_delta,
    message_item,
    message_start,
    message_stop,
    ollama_answer,
    ollama_done,
    ollama_line,
    output_text_delta,
    ping,
    response_completed,
    response_created,
    response_object,
    sse,
    status,
    text_delta,
)
from tests.wire.matrix_support import SSE, Mode, Place, Row, Toolbox, an_agent, cells, check, play, provider_for, script

HI = D({"content": "hi"})
OK = (FIN("stop"), DONE)
MIXED = "naïve 漢字 🧑🏽‍🚀 \u2028 e\u0301"
TEXT_BLOCK = block_start(0, {"type": "text", "text": ""})
MESSAGE_END = (message_delta("end_turn"), message_stop())


def said(text: str | None, finish: str | None = "stop", **fields: Any) -> dict[str, Any]:
    return completion({"content": text}, finish, **fields)


def crlf(*events: bytes) -> list[bytes]:
    return [event.replace(b"\n", b"\r\n") for event in events]


# fmt: off
ENDS = [  # W16: how a stream ends
    Row("W16-done-without-reason", [HI, DONE], text="hi", finish="other"),
    Row("W16-done-without-reason-eof", [HI, DONE, eof], text="hi", finish="other"),
    Row("W16-reason-without-done", [HI, FIN("stop")], text="hi"),
    Row("W16-reason-without-done-cut", [HI, FIN("stop"), cut], text="hi"),
    Row("W16-reason-and-drop", [HI, FIN("stop"), drop], text="hi"),
    Row("W16-done-and-hold", [HI, *OK, hold], text="hi"),
    Row("W16-reason-in-the-last-delta", [D({"content": "hi"}, finish_reason="stop"), DONE], text="hi"),
    Row("W16-content-after-the-reason", [D({"content": "h"}, finish_reason="stop"), D({"content": "i"}), DONE], text="hi"),
    Row("W16-usage-and-hold", [HI, FIN("stop"), U(5, 2), hold], text="hi", used=(5, 2)),
    Row("W16-content-eof", [HI], error="unknown"),
    Row("W16-content-cut", [HI, cut], error="unknown"),
    Row("W16-half-call-eof", [TC(0, "a", "f", '{"x"'), eof], requests=3, error="unknown"),
    Row("W16-whole-call-eof", [TC(0, "a", "f", '{"x":1}'), eof], requests=3, error="unknown"),
    Row("W16-nothing", [eof], requests=3, error="unknown"),
    Row("W16-only-the-role", [D({"role": "assistant", "content": ""}), eof], requests=3, error="unknown"),
    Row("W16-only-comments", [b": ping\n\n" * 3, eof], requests=3, error="unknown"),
    Row("W16-messages-no-stop", [message_start(), TEXT_BLOCK, text_delta(0, "hi"), eof], route="messages", error="unknown"),
    Row("W16-messages-delta-no-stop", [message_start(), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0), message_delta("end_turn"), eof],
        route="messages", error="unknown"),
    Row("W16-messages-half-call", [message_start(), block_start(0, {"type": "tool_use", "id": "t", "name": "f", "input": {}}),
        block_delta(0, {"type": "input_json_delta", "partial_json": '{"x"'}), cut], route="messages", requests=3, error="unknown"),
    Row("W16-messages-hold-after-stop", [message_start(), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0), *MESSAGE_END, hold],
        route="messages", text="hi", used=(10, 5)),
    Row("W16-messages-no-block-stop", [message_start(), TEXT_BLOCK, text_delta(0, "hi"), *MESSAGE_END], route="messages", text="hi"),
    Row("W16-responses-no-end", [response_created(), output_text_delta("hi"), eof], route="responses", error="unknown"),
    Row("W16-responses-hold-after-end", [response_created(), output_text_delta("hi"),
        response_completed([message_item("hi")]), hold], route="responses", text="hi"),
    Row("W16-responses-no-deltas", [response_created(), response_completed([message_item("hi")])],
        response_object([message_item("hi")]), route="responses", text="hi"),
    Row("W16-ollama-no-done", [ollama_line({"content": "hi"}), eof], route="ollama", error="unknown"),
    Row("W16-ollama-hold-after-done", [ollama_line({"content": "hi"}), ollama_done(), hold], route="ollama", text="hi"),
    Row("W16-ollama-last-line-without-newline", [ollama_line({"content": "hi"}), ollama_done().rstrip(b"\n")], route="ollama", text="hi"),
]
REASONS = [  # W17
    Row("W17-blank-reasons", [D({"content": "h"}, finish_reason=""), D({"content": "i"}, finish_reason=""), *OK], text="hi"),
    Row("W17-blank-then-odd", [D({"content": "h"}, finish_reason=""), D({"content": "i"}, finish_reason="network_error"), DONE],
        said("hi", "network_error"), text="hi", finish="other"),
    *[Row(f"W17-{reason}", [HI, FIN(reason), DONE], said("hi", reason), text="hi", finish="other")
      for reason in ("end_turn", "sensitive", "insufficient_system_resource", "STOP")],
    Row("W17-null", [HI, DONE], said("hi", None), text="hi", finish="other"),
    Row("W17-error", [HI, FIN("error"), DONE], error="unknown"),
    Row("W17-error-whole", None, said("hi", "error"), requests=3, error="unknown"),
    Row("W17-length", [HI, FIN("length"), DONE], said("hi", "length"), text="hi", finish="length"),
    Row("W17-content_filter", [HI, FIN("content_filter"), DONE], said("hi", "content_filter"), text="hi", finish="content_filter"),
    Row("W17-ollama-odd", [ollama_line({"content": "hi"}), ollama_done(done_reason="load")], route="ollama", text="hi", finish="other"),
    Row("O02-refusal", [D({"refusal": "no"}), *OK], completion({"content": None, "refusal": "no"}), text="no", finish="content_filter"),
    Row("O02-refusal-in-pieces", [D({"role": "assistant", "content": None, "refusal": "I "}), D({"refusal": "will not"}), *OK],
        text="I will not", finish="content_filter"),
]
GRAMMAR = [  # W19
    Row("W19-comments", [b": OPENROUTER PROCESSING\n\n" * 3, HI, b": x\n\n", *OK], text="hi", route="openrouter"),
    Row("W19-no-blank-after-data", [HI.replace(b"data: ", b"data:"), FIN("stop").replace(b"data: ", b"data:"), b"data:[DONE]\n\n"], text="hi"),
    Row("W19-crlf", crlf(HI, *OK), text="hi"),
    Row("W19-cr", [event.replace(b"\n", b"\r") for event in (HI, *OK)], text="hi"),
    Row("W19-crlf-over-two-writes", [part for event in crlf(HI, *OK) for part in (event[:-3], event[-3:-1], event[-1:])], text="hi"),
    Row("W19-mixed-line-ends", [HI, *crlf(D({"content": "!"})), *OK], text="hi!"),
    Row("W19-data-over-two-lines", [HI.replace(b'"created"', b'\ndata: "created"'), *OK], text="hi"),
    Row("W19-done-with-blanks", [HI, FIN("stop"), b"data:   [DONE] \n\n"], text="hi"),
    Row("W19-bom", [b"\xef\xbb\xbf", HI, *OK], text="hi"),
    Row("W19-event-names-and-ids", [b"id: 1\nevent: message\nretry: 5\n", HI, b"id\nfoo: bar\n", *OK], text="hi"),
    Row("W19-empty-data", [b"data:\n\ndata: \n\n", HI, *OK], text="hi"),
    Row("W19-last-blank-line-missing", [HI, FIN("stop").removesuffix(b"\n")], text="hi"),
    Row("W19-after-done", [HI, *OK, D({"content": "late"})], text="hi"),
    Row("W19-no-content-type", [status(200, {"content-type": "text/plain"}), HI, *OK], text="hi"),
    Row("W19-whole-json-for-a-stream", [status(200, body=said("hi"))], text="hi"),
    Row("W19-message-for-delta", [chunk([{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]), DONE],
        text="hi"),
    Row("W19-messages-pings", [ping(), message_start(), ping(), TEXT_BLOCK, ping(), text_delta(0, "hi"), block_stop(0), ping(), *MESSAGE_END],
        route="messages", text="hi"),
    Row("W19-messages-unknown-events", [message_start(), sse({"type": "message_thing", "x": 1}, event="message_thing"), TEXT_BLOCK,
        block_delta(0, {"type": "odd_delta"}), text_delta(0, "hi"), block_stop(0), block_start(1, {"type": "odd"}), block_stop(1),
        *MESSAGE_END], route="messages", text="hi"),
    Row("W19-messages-crlf", crlf(message_start(), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0), *MESSAGE_END), route="messages", text="hi"),
    Row("W19-ollama-crlf", crlf(ollama_line({"content": "hi"}), b"\n", ollama_done()), route="ollama", text="hi"),
]
CHOICES = [  # W11
    Row("W11-azure-first-chunk", [chunk([], prompt_filter_results=[{"prompt_index": 0}]), HI, *OK], text="hi"),
    Row("W11-usage-chunk", [HI, FIN("stop"), U(5, 2), DONE], text="hi", used=(5, 2)),
    Row("W11-both", [chunk([], prompt_filter_results=[]), HI, FIN("stop"), U(5, 2), DONE], text="hi", used=(5, 2)),
    Row("W11-choices-null", [chunk([]).replace(b'"choices": []', b'"choices": null'), HI, *OK], text="hi"),
    Row("W11-no-choices-key", [sse({"id": "c1", "object": "chat.completion.chunk"}), HI, *OK], text="hi"),
    Row("W11-delta-null", [chunk([{"index": 0, "delta": None, "finish_reason": None}]), HI, *OK], text="hi"),
    Row("W11-usage-after-done-is-lost", [HI, *OK, U(5, 2)], text="hi", used="estimated"),
]
TEXTS = [  # W20, W22
    Row("W20-mixed", [D({"content": MIXED}), *OK], said(MIXED), text=MIXED),
    Row("W20-by-letter", [*[D({"content": letter}) for letter in MIXED], *OK], text=MIXED),
    Row("W20-messages", [message_start(), TEXT_BLOCK, text_delta(0, MIXED), block_stop(0), *MESSAGE_END],
        anthropic_message([{"type": "text", "text": MIXED}]), route="messages", text=MIXED),
    Row("W20-responses", [output_text_delta(MIXED), response_completed([message_item(MIXED)])],
        response_object([message_item(MIXED)]), route="responses", text=MIXED),
    Row("W20-ollama", [ollama_line({"content": MIXED}), ollama_done()], ollama_answer({"content": MIXED}), route="ollama", text=MIXED),
    Row("W22-halves-in-two-deltas", [D({"content": "a\ud83d"}), D({"content": "\ude00b"}), *OK], text="a😀b"),
    Row("W22-halves-in-one", [D({"content": "a\ud83d\ude00b"}), *OK], said("a\ud83d\ude00b"), text="a😀b"),
    Row("W22-high-half-alone", [D({"content": "a\ud83d"}), D({"content": "b"}), *OK], said("a\ud83db"), text="a\ufffdb"),
    Row("W22-high-half-last", [D({"content": "a\ud83d"}), *OK], said("a\ud83d"), text="a\ufffd"),
    Row("W22-low-half-alone", [D({"content": "\ude00a"}), *OK], said("\ude00a"), text="\ufffda"),
    Row("W22-messages-halves", [message_start(), TEXT_BLOCK, text_delta(0, "a\ud83d"), text_delta(0, "\ude00b"), block_stop(0), *MESSAGE_END],
        anthropic_message([{"type": "text", "text": "a\ud83d\ude00b"}]), route="messages", text="a😀b"),
    Row("W22-ollama-halves", [ollama_line({"content": "a\ud83d"}), ollama_line({"content": "\ude00b"}), ollama_done()], ollama_answer({"content": "a\ud83d\ude00b"}),
        route="ollama", text="a😀b"),
    Row("W22-responses-halves", [output_text_delta("a\ud83d"), output_text_delta("\ude00b"),
        response_completed([message_item("a\ud83d\ude00b")])], response_object([message_item("a\ud83d\ude00b")]),
        route="responses", text="a😀b"),
    Row("W22-null-character", [D({"content": "a\0b"}), *OK], said("a\0b"), text="a\0b"),
]
TOLD = {  # W25, C01, C02: what a server says its reply cost, and what is booked
    "W25-null": (None, "estimated"),
    "W25-empty": ({}, "estimated"),
    "W25-null-prompt": ({"prompt_tokens": None, "completion_tokens": 3}, "estimated"),
    "W25-null-completion": ({"prompt_tokens": 3, "completion_tokens": None}, "estimated"),
    "W25-zeros": ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, "estimated"),
    "W25-texts": ({"prompt_tokens": "5", "completion_tokens": "2"}, None),
    "W25-negative": ({"prompt_tokens": -1, "completion_tokens": -1}, "estimated"),
    "W25-null-details": ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None,
                          "completion_tokens_details": None}, (5, 2)),
    "W25-null-in-details": ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": None}}, (5, 2)),
    "W25-list": ([5, 2], "estimated"),
    "W25-floats": ({"prompt_tokens": 5.0, "completion_tokens": 2.0}, None),
    "C02-reasoning-inside": ({"prompt_tokens": 10, "completion_tokens": 100, "total_tokens": 110,
                              "completion_tokens_details": {"reasoning_tokens": 80}}, (10, 100)),
    "C02-reasoning-on-top": ({"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 110,
                              "completion_tokens_details": {"reasoning_tokens": 80}}, (10, 100)),
}
USAGE = [
    *[Row(name, [HI, FIN("stop"), chunk([], usage=told), DONE], said("hi", usage=told), text="hi", used=used)  # type: ignore[arg-type]
      for name, (told, used) in TOLD.items()],
    Row("W25-absent", [HI, *OK], said("hi"), text="hi", used="estimated"),
    Row("C01-on-every-chunk", [D({"content": "h"}, usage={"prompt_tokens": 5, "completion_tokens": 1}),
        D({"content": "i"}, usage={"prompt_tokens": 5, "completion_tokens": 2}),
        FIN("stop", usage={"prompt_tokens": 5, "completion_tokens": 3}), U(5, 3), DONE], text="hi", used=(5, 3)),
    Row("C01-null-until-the-last", [D({"content": "hi"}, usage=None), FIN("stop", usage=None), U(5, 3), DONE], text="hi", used=(5, 3)),
    Row("C01-zero-at-the-end", [D({"content": "hi"}, usage={"prompt_tokens": 5, "completion_tokens": 3}), FIN("stop"), U(0, 0), DONE],
        text="hi", used=(5, 3)),
    Row("C01-messages", [message_start({"input_tokens": 7, "output_tokens": 1}), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0),
        message_delta(None, {"output_tokens": 2}), message_delta("end_turn", {"output_tokens": 3}), message_stop()],
        anthropic_message([{"type": "text", "text": "hi"}], usage={"input_tokens": 7, "output_tokens": 3}), route="messages", text="hi",
        used=(7, 3)),
    Row("C01-messages-cache", [message_start({"input_tokens": 7, "output_tokens": 1, "cache_read_input_tokens": 100,
        "cache_creation_input_tokens": None}), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0),
        message_delta("end_turn", {"output_tokens": 3}), message_stop()], route="messages", text="hi", used=(107, 3)),
    Row("W25-messages-null", [message_start({"input_tokens": None, "output_tokens": None}), TEXT_BLOCK, text_delta(0, "hi"), block_stop(0),
        message_delta("end_turn", {"output_tokens": None}), message_stop()],
        {**anthropic_message([{"type": "text", "text": "hi"}]), "usage": None}, route="messages", text="hi", used="estimated"),
    Row("W25-responses-null", [output_text_delta("hi"), response_completed([message_item("hi")], usage=None)],
        {**response_object([message_item("hi")]), "usage": None}, route="responses", text="hi", used="estimated"),
]
# fmt: on


@pytest.mark.parametrize(("row", "mode", "place"), cells([*ENDS, *REASONS, *GRAMMAR, *CHOICES, *TEXTS, *USAGE]))
async def test_a_reply_that_ends_like_this(fake_server: FakeServer, row: Row, mode: Mode, place: Place, tmp_path: Path) -> None:
    if row.requests == 3:
        for _ in range(2):  # the retries fail, too
            script(fake_server, row, mode)
    played = await check(fake_server, row, mode, place, tmp_path)
    if row.error is not None and played.events and row.requests is None:
        assert "".join(event.text for event in played.of("text.delta")) == "hi"  # what was shown is not shown again


EMPTY = {  # W26
    "text": (D({"role": "assistant", "content": ""}), FIN("stop"), DONE, said("")),
    "null": (D({"role": "assistant", "content": None}), FIN("stop"), DONE, said(None)),
    "parts": (D({"content": []}), FIN("stop"), DONE, completion({"content": []})),
    "blank": (D({"content": " \n"}), FIN("stop"), DONE, said(" \n")),
    "no-reason": (D({}), DONE, said(None, None)),
    "calls-that-are-none": (
        D({"tool_calls": []}),
        FIN("tool_calls"),
        DONE,
        completion({"content": None, "tool_calls": []}, "tool_calls"),
    ),
}
EMPTY_ROWS = [Row(f"W26-{name}", list(events), body) for name, (*events, body) in EMPTY.items()] + [
    Row("W26-messages", [message_start(), *MESSAGE_END], anthropic_message([]), route="messages"),
    Row(
        "W26-messages-blank-block",
        [message_start(), TEXT_BLOCK, block_stop(0), *MESSAGE_END],
        anthropic_message([{"type": "text", "text": ""}]),
        route="messages",
    ),
    Row("W26-responses", [response_completed()], response_object([]), route="responses"),
    Row("W26-ollama", [ollama_done()], ollama_answer({"content": ""}), route="ollama"),
]


def asked_again(row: Row, twice: bool) -> Row:
    """The row as it ends when the model is asked again: it answers then, or stays silent."""
    text, finish = ("", "other") if twice else ("done", "stop")
    return Row(row.id + ("-twice" if twice else ""), row.events, row.body, text=text, finish=finish, requests=2, route=row.route)


@pytest.mark.parametrize(
    ("row", "mode", "place"), cells([asked_again(row, twice) for row in EMPTY_ROWS for twice in (False, True)])
)
async def test_an_empty_reply_is_asked_for_again_once(
    fake_server: FakeServer, row: Row, mode: Mode, place: Place, tmp_path: Path
) -> None:
    # W26
    if row.finish == "other":
        script(fake_server, row, mode)
    played = await check(fake_server, row, mode, place, tmp_path)
    assert played.result is not None
    assert played.result.ok == (row.finish == "stop")
    nudges = [
        message for message in played.result.new_messages if message.role == "user" and message.text.startswith("[empty-reply]")
    ]
    assert len(nudges) == 1
    assert played.result.steps == played.result.usage.model_calls == 2  # both were paid for


async def test_an_empty_reply_in_the_last_step_is_not_asked_for_again(fake_server: FakeServer) -> None:
    # W26
    fake_server.respond("")
    async with an_agent(provider_for("chat", fake_server), Toolbox().tools, max_steps=1) as agent:
        played = await play(agent, "first", streamed=False)
    assert played.result is not None
    assert (played.result.finish_reason, len(fake_server.requests)) == ("other", 1)


async def test_empty_replies_between_tool_turns_do_not_go_on_for_ever(fake_server: FakeServer) -> None:
    # W26: one question a run, however the replies take turns
    fake_server.respond(lambda request: "" if len(fake_server.requests) % 2 else Reply(tool_calls=[("f", {})]))
    async with an_agent(provider_for("chat", fake_server), Toolbox().tools, max_steps=9) as agent:
        played = await play(agent, "first", streamed=True)
    assert played.result is not None
    assert (played.result.finish_reason, len(fake_server.requests)) == ("other", 3)


@pytest.mark.parametrize("head", [status(200, SSE), status(200, {"content-type": "application/json"})])
@pytest.mark.parametrize("body", ["", "null", "[]", "{}", "not json", "<html>no</html>"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_body_that_is_no_reply_is_tried_again_and_then_an_error(
    fake_server: FakeServer, head: Any, body: str, streamed: bool
) -> None:
    # W16, W18
    for _ in range(3):
        fake_server.on("chat", head, body, eof)
    async with an_agent(provider_for("chat", fake_server), ()) as agent:
        played = await play(agent, "first", streamed=streamed)
    assert played.error is not None
    assert played.result is None
    assert len(fake_server.requests) == 3
