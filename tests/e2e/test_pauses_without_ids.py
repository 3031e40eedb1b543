"""Calls that a model server sent without an id, which wait for a person and are decided by another process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import Agent, OllamaProvider, OpenAICompatibleProvider, SqliteStore, create_agent, tool
from lousho_ray.testing.fake_server import DONE, FIN, TC, FakeServer, RecordedRequest, Reply, ollama_done, ollama_line
from tests.unit.loop_support import check_transcript

CHILD = """
import asyncio, sys
from pathlib import Path
from tests.e2e.test_pauses_without_ids import paying

async def main(kind, url, folder, pause):
    agent = paying(kind, url, Path(folder))
    if pause:
        run = await agent.approvals.stream_resolve(pause, approved=True)
        print((await run.result).text)
    else:
        print((await agent.session("s").stream("Pay.").result).approval_id)
    await agent.definition.store.aclose()

asyncio.run(main(*sys.argv[1:]))
"""


def paying(kind: str, url: str, folder: Path) -> Agent[Any]:
    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pays, and leaves a line."""
        with (folder / "paid").open("a") as file:
            file.write(f"{amount}\n")
        return f"paid {amount}"

    model: Any = OllamaProvider if kind == "ollama" else OpenAICompatibleProvider
    provider = model(base_url=url, default_model="m")
    return create_agent(provider=provider, tools=[pay], store=SqliteStore(folder / "s.db"), runtime="local", retry=False)


def in_a_process(*arguments: str) -> str:
    command = [sys.executable, "-W", "error", "-c", CHILD, *arguments]
    end = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (end.returncode, end.stderr) == (0, "")
    return end.stdout.strip()


def call(amount: int, id: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"function": {"name": "pay", "arguments": {"amount": amount}}}
    return made if id is None else {**made, "id": id}


@pytest.mark.parametrize(("kind", "id"), [("ollama", None), ("ollama", ""), ("ollama", " "), ("chat", "")])
async def test_each_call_gets_an_id_of_its_own_that_another_process_finds_it_by(kind: str, id: Any, tmp_path: Path) -> None:
    # field case S14: two calls of a turn and one of the next, none with an id, each decided by a new process
    def answer(request: RecordedRequest) -> Any:
        results = [message["content"] for message in request.body["messages"] if message["role"] == "tool"]
        if len(results) == 3:
            return Reply(f"Done: {', '.join(results)}")
        amounts = (5, 6) if not results else (7,)
        if kind == "ollama":
            return [ollama_line({"tool_calls": [call(amount, id) for amount in amounts]}), ollama_done()]
        return [*(TC(at, "", "pay", json.dumps({"amount": amount})) for at, amount in enumerate(amounts)), FIN("tool_calls"), DONE]

    async with FakeServer() as server:
        server.respond(answer)
        url = server.url if kind == "ollama" else server.compatible_url
        said = await asyncio.to_thread(in_a_process, kind, url, str(tmp_path), "")
        ids = []
        for _ in range(3):
            agent = paying(kind, url, tmp_path)
            [waiting] = await agent.approvals.list(all=True)
            ids.append(waiting.tool_call_id)
            await agent.definition.store.aclose()
            said = await asyncio.to_thread(in_a_process, kind, url, str(tmp_path), waiting.id)
        assert said == 'Done: "paid 5", "paid 6", "paid 7"'
        assert server.violations == []
    assert all(ids)
    assert all(found.strip() == found for found in ids)
    assert len(set(ids)) == 3
    assert (tmp_path / "paid").read_text() == "5\n6\n7\n"
    async with SqliteStore(tmp_path / "s.db") as store:
        saved = await store.sessions.load("s") or []
    check_transcript(saved)
    assert [message.tool_call_id for message in saved if message.role == "tool"] == ids
