"""A model server that costs little: Chat Completions over a bare asyncio protocol, in a process of its own.

What it answers is in the last user message that starts with `plan`, as words `key=value` (see `Plan`). It keeps no conversation:
the assistant messages after the plan say which step a request is. The answer of the last step is `turn N`, N being the number of
user messages, so that a client can check that its history was sent.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

EVENTS_PER_WRITE = 10


class Plan(NamedTuple):
    """One turn.

    Attributes:
        steps: Model calls; all but the last ask for one tool call.
        tokens: Events of text that a streamed answer is sent in.
        stamp: 1: the first event's text is the monotonic time in nanoseconds at which it was written.
        wait_ms: Time to the first byte of an answer.
        children: The first step asks for that many sub-agents named `child`, each of a plan with two steps.
    """

    steps: int = 1
    tokens: int = 1
    stamp: int = 0
    wait_ms: int = 0
    children: int = 0

    def text(self) -> str:
        return " ".join(["plan", *(f"{key}={value}" for key, value in self._asdict().items())])

    @classmethod
    def of(cls, text: str) -> Plan:
        return cls(**{key: int(value) for key, value in (word.split("=") for word in text.split()[1:])})


@contextmanager
def model_server() -> Iterator[str]:
    """Starts the server; its base URL."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
    finally:
        process.kill()
        process.wait()


class Load:
    """How many requests are in hand, and how many were at most: `GET /v1/stats` tells."""

    now = 0
    most = 0

    @classmethod
    def add(cls, count: int) -> None:
        cls.now += count
        cls.most = max(cls.most, cls.now)


class Connection(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._data = b""
        self._in_hand = 0

    def connection_lost(self, error: Exception | None) -> None:
        Load.add(-self._in_hand)
        self._in_hand = 0

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self._data) < end + 4 + length:
                return
            body = self._data[end + 4 : end + 4 + length]
            self._data = self._data[end + 4 + length :]
            if head.startswith(b"get /v1/stats"):
                self._write_json(json.dumps({"now": Load.now, "most": Load.most}).encode())
                continue
            self._in_hand += 1
            Load.add(1)
            self._answer(json.loads(body))

    def _answer(self, request: dict[str, Any]) -> None:
        messages = request["messages"]
        asked = max(index for index, message in enumerate(messages) if str(message["content"]).startswith("plan"))
        plan = Plan.of(messages[asked]["content"])
        step = sum(message["role"] == "assistant" for message in messages[asked:])
        calls = _calls(plan, step)
        text = None if calls else f"turn {sum(message['role'] == 'user' for message in messages)}"
        write = self._stream if request.get("stream") else self._whole

        def send(plan: Plan, calls: list[dict[str, Any]], text: str | None) -> None:
            if not self._transport.is_closing():
                self._in_hand -= 1
                Load.add(-1)
                write(plan, calls, text)

        if plan.wait_ms:
            asyncio.get_running_loop().call_later(plan.wait_ms / 1000, send, plan, calls, text)
        else:
            send(plan, calls, text)

    def _whole(self, plan: Plan, calls: list[dict[str, Any]], text: str | None) -> None:
        message = {"role": "assistant", "content": text, "refusal": None, **({"tool_calls": calls} if calls else {})}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls" if calls else "stop"}
        self._write_json(json.dumps({**_HEAD, "object": "chat.completion", "choices": [choice], "usage": _USAGE}).encode())

    def _write_json(self, body: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    def _stream(self, plan: Plan, calls: list[dict[str, Any]], text: str | None) -> None:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": text}]
        if calls:
            deltas.append({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        elif plan.stamp:
            deltas[0]["content"] = str(time.monotonic_ns())
        events = [_event(delta) for delta in deltas]
        events += [_WORDS[index % len(_WORDS)] for index in range(plan.tokens - 1)]
        events += [_event({}, "tool_calls" if calls else "stop"), _USAGE_EVENT, b"data: [DONE]\n\n"]
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for index in range(0, len(events), EVENTS_PER_WRITE):
            part = b"".join(events[index : index + EVENTS_PER_WRITE])
            self._transport.write(b"%x\r\n%s\r\n" % (len(part), part))
        self._transport.write(b"0\r\n\r\n")


def _calls(plan: Plan, step: int) -> list[dict[str, Any]]:
    if plan.children and step == 0:
        task = {"agent": "child", "prompt": Plan(2, wait_ms=plan.wait_ms).text(), "description": "one of many"}
        return [_call(f"call_{index}", "task", task) for index in range(plan.children)]
    last = step >= plan.steps - 1 or plan.children
    return [] if last else [_call(f"call_{step}", "add", {"a": step, "b": 2})]


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}).encode()


_HEAD = {"id": "chatcmpl-1", "created": 1, "model": "bench", "system_fingerprint": "fp_1"}
_USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
}
_WORDS = [_event({"content": f" word{number}"}) for number in range(10)]
_USAGE_EVENT = b"data: %s\n\n" % json.dumps({**_HEAD, "object": "chat.completion.chunk", "choices": [], "usage": _USAGE}).encode()


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
