"""The fake server speaks to the real clients, and its scenarios put the bytes and faults on the wire that they name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from anthropic import APIStatusError, AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from lousho_ray.testing.fake_server import (
    DONE,
    FIN,
    TC,
    D,
    FakeServer,
    RecordedRequest,
    Reply,
    U,
    arguments_delta,
    block_start,
    block_stop,
    completion,
    cut,
    drop,
    eof,
    error_body,
    error_event,
    function_call_item,
    gate,
    hold,
    input_json_delta,
    message_delta,
    message_item,
    message_start,
    message_stop,
    ollama_done,
    ollama_error,
    ollama_line,
    output_item_added,
    output_item_done,
    output_text_delta,
    pause,
    ping,
    reasoning_item,
    reasoning_summary_delta,
    repeat,
    response_completed,
    response_created,
    response_error,
    response_failed,
    response_incomplete,
    signature_delta,
    split,
    sse,
    status,
    text_delta,
    thinking_delta,
)

ODD_TEXT = "naïve 漢字 🧑🏽‍🚀"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT_PATH = "/compatible/v1/chat/completions"


class RawClient:
    """A connection without a client library: what is read is what was on the wire."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, server: FakeServer) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", server.port))

    async def ask(self, path: str = CHAT_PATH, body: dict[str, Any] | None = None) -> None:
        content = json.dumps(body or ASK)
        await self.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n{content}")

    async def send(self, text: str) -> None:
        self.writer.write(text.encode())
        await self.writer.drain()

    async def head(self) -> str:
        return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def openai_client(server: FakeServer) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="k", base_url=server.openai_url, max_retries=0)


def anthropic_client(server: FakeServer) -> AsyncAnthropic:
    return AsyncAnthropic(api_key="k", base_url=server.url, max_retries=0)


def http_client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(verify=False)


# ------------------------------------------------------------------------------------------------- replies, all routes


@pytest.mark.parametrize("pieces", [None, ["na", "ïve 漢", "字 🧑🏽‍🚀"]])
async def test_chat_reply_is_the_same_plain_and_streamed(fake_server: FakeServer, pieces: list[str] | None) -> None:
    calls = [("add", {"a": 1}), ("add", "{}", "mine")]
    reply = Reply(text=ODD_TEXT, chunks=pieces, usage=(7, 3), tool_calls=calls, reasoning="hm")
    fake_server.respond(reply)
    async with openai_client(fake_server) as client:
        plain = await client.chat.completions.create(**ASK)
        stream = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        without_usage = [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True)]
    message = plain.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert message.content == "".join(delta.content or "" for delta in deltas) == ODD_TEXT
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in streamed if call.function] == [
        ("add", '{"a": 1}'),
        ("add", "{}"),
    ]
    assert [call.id for call in message.tool_calls or ()] == ["call_1", "mine"]
    assert plain.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "tool_calls"
    assert plain.usage == chunks[-1].usage
    assert plain.usage is not None
    assert plain.usage.total_tokens == 10
    assert all(chunk.usage is None for chunk in without_usage)
    assert [getattr(delta, "reasoning_content", None) for delta in deltas][1] == "hm"
    assert [request.client_closed for request in fake_server.requests] == [False] * 3


async def test_responses_reply_is_the_same_plain_and_streamed(fake_server: FakeServer) -> None:
    fake_server.respond(Reply(text=ODD_TEXT, tool_calls=[("add", {"a": 1})], reasoning="hm", usage=(7, 3)))
    async with openai_client(fake_server) as client:
        plain = await client.responses.create(model="m", input="hi")
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
    final = events[-1]
    assert final.type == "response.completed"
    for response in plain, final.response:
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.output_text == ODD_TEXT
        assert response.usage is not None
        assert response.usage.total_tokens == 10
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ODD_TEXT
    assert "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta") == '{"a": 1}'
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("reason", "state", "detail"),
    [("length", "incomplete", "max_output_tokens"), ("content_filter", "incomplete", "content_filter"), ("failed", "failed", None)],
)
async def test_responses_reply_can_end_in_every_state(fake_server: FakeServer, reason: str, state: str, detail: str | None) -> None:
    fake_server.respond(Reply(text="x", finish_reason=reason))
    async with openai_client(fake_server) as client:
        plain = await client.responses.create(model="m", input="hi")
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
    assert plain.status == state
    assert (plain.incomplete_details.reason if plain.incomplete_details else None) == detail
    assert events[-1].type == f"response.{state}"


async def test_messages_reply_is_the_same_plain_and_streamed(fake_server: FakeServer) -> None:
    reply = Reply(text=ODD_TEXT, tool_calls=[("add", {"a": "漢"})], reasoning="hm", redacted_reasoning="blob", usage=(7, 3))
    fake_server.respond(reply)
    async with anthropic_client(fake_server) as client:
        plain = await client.messages.create(max_tokens=100, **ASK)
        async with client.messages.stream(max_tokens=100, **ASK) as stream:
            streamed = await stream.get_final_message()
    for message in plain, streamed:
        thinking, redacted, text, call = message.content
        assert thinking.type == "thinking"
        assert thinking.signature
        assert redacted.type == "redacted_thinking"
        assert text.type == "text"
        assert text.text == ODD_TEXT
        assert call.type == "tool_use"
        assert call.input == {"a": "漢"}
        assert message.stop_reason == "tool_use"
        assert (message.usage.input_tokens, message.usage.output_tokens) == (7, 3)


async def test_ollama_reply_is_the_same_plain_and_streamed(fake_server: FakeServer) -> None:
    fake_server.respond(Reply(text=ODD_TEXT, tool_calls=[("add", {"a": 1})], reasoning="hm", usage=(7, 3)))
    async with http_client() as client:
        plain = (await client.post(f"{fake_server.url}/api/chat", json={**ASK, "stream": False})).json()
        response = await client.post(f"{fake_server.url}/api/chat", json=ASK)
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert response.headers["content-type"] == "application/x-ndjson"
    assert plain["message"]["content"] == "".join(line["message"]["content"] for line in lines) == ODD_TEXT
    assert plain["message"]["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]
    assert plain["message"]["thinking"] == lines[0]["message"]["thinking"] == "hm"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for last in plain, lines[-1]:
        assert (last["prompt_eval_count"], last["eval_count"], last["done_reason"]) == (7, 3, "stop")


@pytest.mark.parametrize(
    ("finish", "chat", "messages", "ollama"),
    [
        (None, "stop", "end_turn", "stop"),
        ("length", "length", "max_tokens", "length"),
        ("content_filter", "content_filter", "refusal", "content_filter"),
        ("pause_turn", "pause_turn", "pause_turn", "pause_turn"),
    ],
)
async def test_finish_reason_is_in_the_words_of_the_route(
    fake_server: FakeServer, finish: str | None, chat: str, messages: str, ollama: str
) -> None:
    fake_server.respond(Reply(text="x", finish_reason=finish, model="other"))
    async with openai_client(fake_server) as client:
        chosen = await client.chat.completions.create(**ASK)
    async with anthropic_client(fake_server) as client:
        message = await client.messages.create(max_tokens=9, **ASK)
    async with http_client() as client:
        answer = (await client.post(f"{fake_server.url}/api/chat", json={**ASK, "stream": False})).json()
    assert (chosen.choices[0].finish_reason, message.stop_reason, answer["done_reason"]) == (chat, messages, ollama)
    assert chosen.model == message.model == answer["model"] == "other"


async def test_mistral_calls_have_ids_that_mistral_takes_back(fake_server: FakeServer) -> None:
    fake_server.respond([Reply(tool_calls=[("add", {})]), Reply(text="ok")])
    async with AsyncOpenAI(api_key="k", base_url=fake_server.mistral_url, max_retries=0) as client:
        first = (await client.chat.completions.create(**ASK)).choices[0].message
        [call] = first.tool_calls or ()
        turn = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude_none=True)]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        history: Any = [*ASK["messages"], turn, result]
        second = await client.chat.completions.create(model="m", messages=history)
    assert len(call.id) == 9
    assert second.choices[0].message.content == "ok"


@pytest.mark.parametrize("steps", [(status(200), status(200)), (status(200, body="x"), "y", "z")])
async def test_impossible_scenario_is_a_violation(fake_server: FakeServer, steps: tuple[Any, ...]) -> None:
    fake_server.on("chat", *steps)
    async with http_client() as client:
        with contextlib.suppress(httpx2.TransportError):
            await client.post(fake_server.url + CHAT_PATH, json=ASK)
    await fake_server.wait_idle()
    assert [violation.rule for violation in fake_server.take_violations()] == ["scenario-failed"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/api/chat"])
async def test_reply_without_usage_reports_none(fake_server: FakeServer, path: str) -> None:
    fake_server.respond(Reply(text="x", usage=None))
    body = {"model": "m", "input": "hi"} if path.endswith("responses") else ASK
    async with http_client() as client:
        answer = await client.post(fake_server.url + path, json={**body, "stream": False}, headers={"authorization": "Bearer k"})
    assert answer.json().get("usage") is None
    assert "eval_count" not in answer.json()


async def test_usage_mapping_goes_out_as_it_is(fake_server: FakeServer) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "cost": 0.5}
    fake_server.respond(Reply(text="x", usage=usage))
    async with http_client() as client:
        assert (await client.post(fake_server.url + CHAT_PATH, json=ASK)).json()["usage"] == usage


# ---------------------------------------------------------------------------------------------- raw wire, real clients


async def test_chat_chunks_of_a_scenario_reach_the_client(fake_server: FakeServer) -> None:
    comment = ": OPENROUTER PROCESSING\n\n"
    fake_server.on("chat", comment, D({"content": "hi"}), TC(0, "a", "f", "{}"), FIN("tool_calls"), U(5, 2), DONE)
    async with openai_client(fake_server) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True)]
    assert chunks[0].choices[0].delta.content == "hi"
    [call] = chunks[1].choices[0].delta.tool_calls or ()
    assert (call.index, call.id) == (0, "a")
    assert call.function is not None
    assert call.function.name == "f"
    assert chunks[2].choices[0].finish_reason == "tool_calls"
    assert chunks[3].choices == []
    assert chunks[3].usage is not None
    assert chunks[3].usage.total_tokens == 7


def test_tool_call_chunk_leaves_out_what_is_none() -> None:
    call = json.loads(TC(None, None, None, {"x": 1})[6:])["choices"][0]["delta"]["tool_calls"][0]
    assert call == {"type": "function", "function": {"arguments": {"x": 1}}}


def test_lone_surrogates_go_out_as_escapes() -> None:
    first, second = D({"content": "\ud83d"}), D({"content": "\ude00"})
    assert b"\\ud83d" in first
    assert b"\\ude00" in second
    assert "漢".encode() in D({"content": "漢"})
    assert sse("[DONE]") == DONE


async def test_anthropic_events_of_a_scenario_reach_the_client(fake_server: FakeServer) -> None:
    fake_server.on(
        "messages",
        message_start({"input_tokens": 3, "output_tokens": 1}),
        block_start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        thinking_delta(0, "hm"),
        signature_delta(0, "sig"),
        block_stop(0),
        ping(),
        block_start(1, {"type": "text", "text": ""}),
        block_start(2, {"type": "tool_use", "id": "t", "name": "f", "input": {}}),
        text_delta(1, "hi"),
        input_json_delta(2, '{"a":'),
        input_json_delta(2, "1}"),
        block_stop(2),
        block_stop(1),
        message_delta("tool_use", {"output_tokens": 9}),
        message_stop(),
    )
    async with anthropic_client(fake_server) as client, client.messages.stream(max_tokens=9, **ASK) as stream:
        message = await stream.get_final_message()
    thinking, text, call = message.content
    assert thinking.type == "thinking"
    assert thinking.signature == "sig"
    assert text.type == "text"
    assert text.text == "hi"
    assert call.type == "tool_use"
    assert call.input == {"a": 1}
    assert message.usage.output_tokens == 9


async def test_anthropic_error_event_in_a_200_stream(fake_server: FakeServer) -> None:
    """A01: the client raises a status error with status 200."""
    fake_server.on("messages", message_start(), error_event("overloaded_error", "Overloaded"))
    async with anthropic_client(fake_server) as client, client.messages.stream(max_tokens=9, **ASK) as stream:
        with pytest.raises(APIStatusError) as caught:
            await stream.get_final_message()
    assert caught.value.status_code == 200


async def test_responses_events_of_a_scenario_reach_the_client(fake_server: FakeServer) -> None:
    call = function_call_item("c1", "f", '{"a":1}')
    fake_server.on(
        "responses",
        response_created(),
        reasoning_summary_delta("hm"),
        output_item_done(reasoning_item("hm")),
        output_text_delta("hi"),
        output_item_added(call, 1),
        arguments_delta('{"a":1}'),
        output_item_done(call, 1),
        response_completed([message_item("hi"), call]),
    )
    fake_server.on("responses", response_created(), response_failed("server_error"))
    fake_server.on("responses", response_created(), response_incomplete("max_output_tokens"))
    fake_server.on("responses", response_error("rate_limit_exceeded", "slow down"))
    async with openai_client(fake_server) as client:
        runs = [[event async for event in await client.responses.create(model="m", input="x", stream=True)] for _ in range(4)]
    full, failed, incomplete, error = runs
    assert full[0].type == "response.created"
    assert full[-1].type == "response.completed"
    assert full[-1].response.output_text == "hi"
    assert failed[-1].type == "response.failed"
    assert failed[-1].response.error is not None
    assert failed[-1].response.error.code == "server_error"
    assert incomplete[-1].type == "response.incomplete"
    assert error[-1].type == "error"
    assert error[-1].code == "rate_limit_exceeded"


async def test_ollama_lines_of_a_scenario(fake_server: FakeServer) -> None:
    fake_server.on("ollama", ollama_line({"content": "hi"}), ollama_done(2048, None), ollama_error("out of memory"))
    async with http_client() as client:
        lines = [json.loads(line) for line in (await client.post(f"{fake_server.url}/api/chat", json=ASK)).text.splitlines()]
    assert lines[0]["message"]["content"] == "hi"
    assert lines[1]["prompt_eval_count"] == 2048
    assert "eval_count" not in lines[1]
    assert lines[2] == {"error": "out of memory"}


# --------------------------------------------------------------------------------------------------- bytes and faults


@pytest.mark.parametrize("piece_bytes", [1, 3])
async def test_split_sends_pieces_of_that_many_bytes(fake_server: FakeServer, piece_bytes: int) -> None:
    """W19, W20: every multi-byte character is cut."""
    body = D({"content": ODD_TEXT}) + FIN("stop") + DONE
    fake_server.on("chat", split(piece_bytes), body)
    fake_server.on("chat", split(piece_bytes), body)
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    assert "transfer-encoding: chunked" in await raw.head()
    pieces = []
    while size := int((await raw.reader.readline()), 16):
        pieces.append(await raw.reader.readexactly(size))
        await raw.reader.readline()
    await raw.close()
    assert b"".join(pieces) == body
    assert {len(piece) for piece in pieces[:-1]} == {piece_bytes}
    async with openai_client(fake_server) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True)]
    assert chunks[0].choices[0].delta.content == ODD_TEXT


async def test_split_cuts_replies_of_every_route(fake_server: FakeServer) -> None:
    for route in "chat", "responses", "messages", "ollama":
        fake_server.on(route, split(1), Reply(text=ODD_TEXT))
    async with openai_client(fake_server) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True)]
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
    async with anthropic_client(fake_server) as claude, claude.messages.stream(max_tokens=9, **ASK) as stream:
        message = await stream.get_final_text()
    async with http_client() as http:
        lines = (await http.post(f"{fake_server.url}/api/chat", json=ASK)).text.splitlines()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ODD_TEXT
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ODD_TEXT
    assert message == ODD_TEXT
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == ODD_TEXT


async def test_split_ends_with_none_and_holds_for_whole_answers(fake_server: FakeServer) -> None:
    fake_server.on("chat", split(1), "ab", split(None), "cd")
    fake_server.on("chat", split(2), status(200, body=completion({"content": ODD_TEXT})))
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    await raw.head()
    assert await raw.reader.readuntil(b"0\r\n\r\n") == b"1\r\na\r\n1\r\nb\r\n2\r\ncd\r\n0\r\n\r\n"
    await raw.close()
    async with openai_client(fake_server) as client:
        answer = await client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content == ODD_TEXT


async def test_drop_before_the_answer_resets_the_connection(fake_server: FakeServer) -> None:
    fake_server.on("chat", drop)
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    with pytest.raises(ConnectionResetError):
        await raw.reader.read()
    await raw.close()
    [request] = fake_server.requests
    await fake_server.wait_ended(request)
    assert (request.status, request.client_closed) == (None, False)


async def test_drop_after_output_lets_the_output_through_first(fake_server: FakeServer) -> None:
    """L05."""
    fake_server.on("chat", D({"content": "Hello "}), gate("read"), drop)
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    await raw.head()
    assert b"Hello " in await raw.reader.readuntil(b"\n\n")
    fake_server.release("read")
    with pytest.raises(ConnectionResetError):
        await raw.reader.readuntil(b"0\r\n\r\n")
    await raw.close()


@pytest.mark.parametrize(("end", "last"), [(cut, b"\r\n"), (eof, b"0\r\n\r\n")])
async def test_cut_leaves_the_body_incomplete_and_eof_ends_it(fake_server: FakeServer, end: Any, last: bytes) -> None:
    """W16: both close the connection."""
    fake_server.on("chat", D({"content": "x"}), end)
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    await raw.head()
    body = await raw.reader.read()
    await raw.close()
    assert body.endswith(b"\n\n" + last) if end is cut else body.endswith(last)
    assert body.endswith(b"0\r\n\r\n") is (end is eof)
    [request] = fake_server.requests
    assert request.client_closed is False


async def test_cut_is_an_error_of_the_transport_for_a_client(fake_server: FakeServer) -> None:
    fake_server.on("chat", status(200, {"content-length": "100"}), "half", cut)
    async with http_client() as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.post(fake_server.url + CHAT_PATH, json=ASK)


async def test_connection_close_sends_the_body_unframed(fake_server: FakeServer) -> None:
    fake_server.on("chat", status(200, {"connection": "close"}), "plain ", "bytes")
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    head = await raw.head()
    assert "chunked" not in head
    assert await raw.reader.read() == b"plain bytes"
    await raw.close()


async def test_hold_ends_when_the_client_closes(fake_server: FakeServer) -> None:
    """W16 (5), PRV-09: who closes early is on record."""
    fake_server.on("chat", D({"content": "x"}), DONE, hold)
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    await raw.reader.readuntil(DONE)
    [request] = fake_server.requests
    assert fake_server.concurrent == 1
    assert request.ended is None
    await raw.close()
    await fake_server.wait_closed(request)
    assert request.client_closed
    assert request.ended is not None
    assert request.ended >= request.arrived
    assert fake_server.concurrent == 0


async def test_client_that_leaves_at_a_gate_is_on_record(fake_server: FakeServer) -> None:
    fake_server.on("chat", gate("never"))
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    await fake_server.reached("never")
    await raw.close()
    await fake_server.wait_closed(fake_server.requests[0])
    assert fake_server.requests[0].status is None


async def test_cancelled_openai_call_closes_its_request(fake_server: FakeServer) -> None:
    fake_server.on("chat", hold)
    async with openai_client(fake_server) as client:
        call = asyncio.create_task(client.chat.completions.create(**ASK))
        await fake_server.wait_for_requests(1, "chat")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await fake_server.wait_closed(fake_server.requests[0])


async def test_repeat_goes_on_until_the_client_closes(fake_server: FakeServer) -> None:
    """W23."""
    fake_server.on("chat", repeat(": ping\n\n", pause(0)))
    fake_server.on("chat", repeat("a", times=3))
    raw = await RawClient.connect(fake_server)
    await raw.ask()
    for _ in range(20):
        await raw.reader.readuntil(b": ping\n\n")
    await raw.close()
    await fake_server.wait_closed(fake_server.requests[0])
    async with http_client() as client:
        assert (await client.post(fake_server.url + CHAT_PATH, json=ASK)).text == "aaa"


async def test_status_carries_any_code_headers_twice_and_any_body(fake_server: FakeServer) -> None:
    """L01, A02, A10."""
    overloaded = error_body("messages", "Overloaded", type="overloaded_error")
    fake_server.on("chat", status(429, [("retry-after", "5"), ("Retry-After", "7")], {"error": {"code": "insufficient_quota"}}))
    fake_server.on("messages", status(529, body=overloaded))
    fake_server.on("chat", status(413, {"content-type": "text/html"}, "<html>too large</html>"))
    async with http_client() as client:
        limited = await client.post(fake_server.url + CHAT_PATH, json=ASK)
        html = await client.post(fake_server.url + CHAT_PATH, json=ASK)
    assert limited.headers.get_list("retry-after") == ["5", "7"]
    assert limited.json()["error"]["code"] == "insufficient_quota"
    assert (html.status_code, html.headers["content-type"], html.text) == (413, "text/html", "<html>too large</html>")
    async with anthropic_client(fake_server) as client:
        with pytest.raises(APIStatusError) as caught:
            await client.messages.create(max_tokens=9, **ASK)
    assert caught.value.status_code == 529
    assert caught.value.body == overloaded
    assert [request.status for request in fake_server.requests] == [429, 413, 529]


# ------------------------------------------------------------------------------------------------- gates and records


async def test_gates_order_requests_and_peaks_are_counted(fake_server: FakeServer) -> None:
    fake_server.respond(Reply(text="x", delay_gate="go"))
    fake_server.on("ollama", gate("other"), Reply(text="y"))
    async with http_client() as client:
        calls = [asyncio.create_task(client.post(fake_server.url + CHAT_PATH, json=ASK)) for _ in range(3)]
        calls.append(asyncio.create_task(client.post(f"{fake_server.url}/api/chat", json=ASK)))
        await fake_server.reached("go", 3)
        await fake_server.reached("other")
        assert fake_server.concurrent == 4
        fake_server.release("other")
        await calls[3]
        assert not any(call.done() for call in calls[:3])
        fake_server.release("go")
        await asyncio.gather(*calls)
        await client.post(fake_server.url + CHAT_PATH, json=ASK)
    await fake_server.wait_idle()
    assert fake_server.max_concurrent == 4
    assert fake_server.max_concurrent_by_route == {"chat": 3, "ollama": 1}
    assert len(fake_server.requests_of("chat")) == 4
    assert len(fake_server.bodies) == 5


async def test_request_is_recorded_whole(fake_server: FakeServer) -> None:
    fake_server.respond("x")
    async with openai_client(fake_server) as client:
        await client.chat.completions.create(**ASK, extra_headers={"X-Title": "t"}, extra_query={"a": "b"})
    [request] = fake_server.requests
    assert (request.index, request.route, request.method, request.path) == (0, "chat", "POST", "/v1/chat/completions?a=b")
    assert request.headers["x-title"] == "t"
    assert request.headers["authorization"] == "Bearer k"
    assert request.body == json.loads(request.raw) == ASK
    assert (request.status, request.violation, request.streaming) == (200, None, False)


async def test_connection_is_kept_alive_and_chunked_bodies_are_read(fake_server: FakeServer) -> None:
    fake_server.respond(Reply(text="x"))
    raw = await RawClient.connect(fake_server)
    content = json.dumps(ASK)
    await raw.ask()
    await raw.reader.readuntil(b"}}")
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    await raw.send(f"{head}{5:x}\r\n{content[:5]}\r\n{len(content) - 5:x}\r\n{content[5:]}\r\n0\r\n\r\n")
    await raw.reader.readuntil(b"}}")
    await raw.close()
    first, second = fake_server.requests
    assert first.body == second.body == ASK
    assert first.connection == second.connection


async def test_two_connections_have_two_numbers(fake_server: FakeServer) -> None:
    fake_server.respond("x")
    for _ in range(2):
        async with http_client() as client:
            await client.post(fake_server.url + CHAT_PATH, json=ASK)
    assert len({request.connection for request in fake_server.requests}) == 2


async def test_window_counts_the_densest_arrivals(fake_server: FakeServer) -> None:
    fake_server.respond("x")
    async with http_client() as client:
        for _ in range(5):
            await client.post(fake_server.url + CHAT_PATH, json=ASK)
    for request, arrived in zip(fake_server.requests, [0.0, 0.9, 1.0, 1.5, 5.0], strict=True):
        request.arrived = arrived
    assert fake_server.max_in_window(1.0) == 3
    assert fake_server.max_in_window(0.05) == 1
    assert fake_server.max_in_window(10, "chat") == 5
    assert fake_server.max_in_window(10, "messages") == 0


async def test_waiting_in_vain_says_what_was_seen() -> None:
    async with FakeServer(timeout_s=0.01) as server:
        server.respond("x")
        with pytest.raises(TimeoutError, match="0 of 2 requests arrived"):
            await server.wait_for_requests(2)
        with pytest.raises(TimeoutError, match="0 of 1 requests reached gate 'g'"):
            await server.reached("g")
        async with http_client() as client:
            await client.post(server.url + CHAT_PATH, json=ASK)
        with pytest.raises(AssertionError, match="answered in full"):
            await server.wait_closed(server.requests[0])


# -------------------------------------------------------------------------------------------------------- responders


async def test_answers_come_from_scenarios_then_route_then_all(fake_server: FakeServer) -> None:
    async def echo(request: RecordedRequest) -> Reply:
        return Reply(text=request.body["messages"][0]["content"])

    fake_server.respond(["one", Reply(text="two"), [status(503, body={}), eof]])
    fake_server.respond(echo, route="ollama")
    fake_server.on("chat", status(500, body={}))
    assert fake_server.unserved == {"chat": 1}
    async with http_client() as client:

        async def ask(path: str) -> httpx2.Response:
            return await client.post(fake_server.url + path, json={**ASK, "stream": False})

        assert (await ask(CHAT_PATH)).status_code == 500
        assert fake_server.unserved == {}
        assert (await ask("/api/chat")).json()["message"]["content"] == "hi"
        assert [(await ask(CHAT_PATH)).json()["choices"][0]["message"]["content"] for _ in range(2)] == ["one", "two"]
        assert (await ask(CHAT_PATH)).status_code == 503
        assert (await ask(CHAT_PATH)).status_code == 400
    [violation] = fake_server.take_violations()
    assert violation.rule == "nothing-scripted"


def _raises(request: RecordedRequest) -> Reply:
    raise KeyError("oops")


def _no_step(request: RecordedRequest) -> Any:
    return [42]


@pytest.mark.parametrize("responder", [_raises, _no_step])
async def test_failing_responder_is_a_violation(fake_server: FakeServer, responder: Callable[[RecordedRequest], Any]) -> None:
    fake_server.respond(responder)
    async with http_client() as client:
        answer = await client.post(fake_server.url + CHAT_PATH, json=ASK)
    assert answer.status_code == 400
    assert [violation.rule for violation in fake_server.take_violations()] == ["responder-failed"]


async def test_other_paths_are_routes_of_their_own(fake_server: FakeServer) -> None:
    fake_server.on("/v1/models", status(200, body={"object": "list", "data": [{"id": "m", "object": "model"}]}))
    fake_server.on("/v1/models", Reply(text="has no form there"))
    async with openai_client(fake_server) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
    async with http_client() as client:
        with pytest.raises(httpx2.TransportError):
            await client.get(f"{fake_server.openai_url}/models")
    assert [violation.rule for violation in fake_server.take_violations()] == ["scenario-failed"]


async def test_wrong_scripts_are_refused_at_once(fake_server: FakeServer) -> None:
    wrong: Any = 42
    with pytest.raises(TypeError, match="scenario step"):
        fake_server.on("chat", wrong)
    with pytest.raises(ValueError, match="unknown route 'anthropic'; a route is chat"):
        fake_server.on("anthropic", drop)
    with pytest.raises(ValueError, match="unknown route"):
        fake_server.respond("x", route="chats")


async def test_what_is_not_http_gets_400(fake_server: FakeServer) -> None:
    raw = await RawClient.connect(fake_server)
    await raw.send("nonsense\r\n\r\n")
    assert (await raw.head()).startswith("HTTP/1.1 400")
    await raw.close()
    assert fake_server.requests == []


# --------------------------------------------------------------------------------------------------- life and threads


async def test_leaving_ends_all_connections_and_tasks() -> None:
    async with FakeServer() as server:
        server.on("chat", D({"content": "x"}), hold)
        held, idle = await RawClient.connect(server), await RawClient.connect(server)
        await held.ask()
        await held.head()
        await server.wait_for_requests(1)
    for raw in held, idle:
        with pytest.raises(ConnectionResetError):
            await raw.reader.readuntil(b"never")
        await raw.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert server.requests[0].client_closed is False
    with pytest.raises(ConnectionRefusedError):
        await RawClient.connect(server)


def test_in_thread_serves_sync_clients_and_sync_waits() -> None:
    with FakeServer.in_thread() as server:
        server.respond(Reply(text="hello"))
        with OpenAI(api_key="k", base_url=server.openai_url, max_retries=0) as client:
            answer = client.chat.completions.create(**ASK)
            stream = client.chat.completions.create(**ASK, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"
        server.wait_for_requests_sync(2)
        server.wait_idle_sync()
    assert answer.choices[0].message.content == "hello"
    assert server.violations == []


async def test_in_thread_gates_can_be_awaited_from_another_loop() -> None:
    with FakeServer.in_thread(timeout_s=5) as server:
        server.on("chat", gate("g"), Reply(text="x"))
        server.on("chat", hold)
        async with http_client() as client:
            call = asyncio.create_task(client.post(server.url + CHAT_PATH, json=ASK))
            await server.reached("g")
            server.reached_sync("g")
            assert not call.done()
            server.release("g")
            assert (await call).status_code == 200
        raw = await RawClient.connect(server)
        await raw.ask()
        await server.wait_for_requests(2)
        await raw.close()
        await server.wait_closed(server.requests[1])
        server.wait_closed_sync(server.requests[1])


async def test_in_thread_is_reachable_from_another_process() -> None:
    script = "import sys, urllib.request as u; print(u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode())).read().decode())"
    with FakeServer.in_thread() as server:
        server.respond(Reply(text="from afar"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, server.url + CHAT_PATH, json.dumps(ASK), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    assert json.loads(output)["choices"][0]["message"]["content"] == "from afar"


def test_in_thread_passes_on_errors_of_the_block() -> None:
    with pytest.raises(KeyError), FakeServer.in_thread() as server:
        raise KeyError(server.port)
