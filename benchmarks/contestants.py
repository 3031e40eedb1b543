"""Who is measured: this package, and the yardstick, the loop that one writes by hand over the typed client of OpenAI."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import openai

from lousho_ray import OpenAIProvider, create_agent, tool
from lousho_ray.events import TextDelta
from lousho_ray.stores.sqlite import SqliteStore

INSTRUCTIONS = "You are a helpful assistant."
MAX_STEPS = 200


class Contestant(Protocol):
    """Each method is one whole turn and gives its final text."""

    name: str

    async def turn(self, prompt: str) -> str: ...

    async def tool_turn(self, prompt: str) -> str: ...

    async def stream(self, prompt: str, seen: Callable[[str], object]) -> None:
        """Calls `seen(text)` for each piece of text as it comes."""
        ...

    async def open_store(self, path: Path) -> None: ...

    async def session_turn(self, session: str, prompt: str) -> str: ...

    async def close_store(self) -> None: ...

    async def close(self) -> None: ...


@tool
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Ours:
    name = "lousho"

    def __init__(self, url: str) -> None:
        self._provider = OpenAIProvider(base_url=url, api_key="k", default_model="bench", api="chat")
        self._plain = self._agent()
        self._with_tools = self._agent(tools=[add])

    def _agent(self, **options: Any) -> Any:
        return create_agent(provider=self._provider, instructions=INSTRUCTIONS, runtime="local", max_steps=MAX_STEPS, **options)

    async def turn(self, prompt: str) -> str:
        return str((await self._plain.send(prompt)).text)

    async def tool_turn(self, prompt: str) -> str:
        return str((await self._with_tools.send(prompt)).text)

    async def stream(self, prompt: str, seen: Callable[[str], object]) -> None:
        async for event in self._plain.stream(prompt):
            if type(event) is TextDelta:
                seen(event.text)

    async def open_store(self, path: Path) -> None:
        self._store = SqliteStore(path)
        await self._store.sessions.load("none")  # opens the file, which by hand is done here, too
        self._keeping = self._agent(store=self._store)

    async def session_turn(self, session: str, prompt: str) -> str:
        return str((await self._keeping.session(session).send(prompt)).text)

    async def close_store(self) -> None:
        await self._store.aclose()

    async def close(self) -> None:
        await self._plain.close()


class ByHand:
    name = "by hand"

    def __init__(self, url: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=url, api_key="k", timeout=600)

    async def _loop(self, messages: list[Any], tools: list[Any] | None = None) -> str:
        while True:
            options: dict[str, Any] = {"tools": tools} if tools else {}
            reply = await self._client.chat.completions.create(model="bench", messages=messages, **options)
            message = reply.choices[0].message
            if not message.tool_calls:
                messages.append({"role": "assistant", "content": message.content})
                return message.content or ""
            functions: list[Any] = [call.function for call in message.tool_calls]
            calls = [
                {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": function.arguments}}
                for call, function in zip(message.tool_calls, functions, strict=True)
            ]
            messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
            sums = await asyncio.gather(*(self._add(**json.loads(function.arguments)) for function in functions))
            for call, value in zip(message.tool_calls, sums, strict=True):
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})

    async def _add(self, a: int, b: int) -> int:
        return a + b

    async def turn(self, prompt: str) -> str:
        return await self._loop(_messages(prompt))

    async def tool_turn(self, prompt: str) -> str:
        return await self._loop(_messages(prompt), [_ADD])

    async def stream(self, prompt: str, seen: Callable[[str], object]) -> None:
        chunks = await self._client.chat.completions.create(
            model="bench", messages=_messages(prompt), stream=True, stream_options={"include_usage": True}
        )
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                seen(chunk.choices[0].delta.content)

    async def open_store(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=normal")
        self._db.execute("create table messages(id integer primary key, session text, body text)")
        self._db.execute("create index by_session on messages(session, id)")

    async def session_turn(self, session: str, prompt: str) -> str:
        rows = self._db.execute("select body from messages where session = ? order by id", (session,))
        old = [json.loads(body) for (body,) in rows]
        messages = [*_messages(prompt)[:1], *old, *_messages(prompt)[1:]]
        new = len(messages) - 1
        text = await self._loop(messages)
        self._db.execute("begin")
        self._db.executemany(
            "insert into messages(session, body) values (?, ?)", [(session, json.dumps(message)) for message in messages[new:]]
        )
        self._db.execute("commit")
        return text

    async def close_store(self) -> None:
        self._db.close()

    async def close(self) -> None:
        await self._client.close()


def _messages(prompt: str) -> list[Any]:
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": prompt}]


_ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
