"""Several processes that decide one pause at the same moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import Agent, GenerateResult, MockProvider, SqliteStore, ToolCall, create_agent, file_store, tool
from lousho_ray.ports import GenerateOptions

DECIDERS = 4

CHILD = """
import asyncio, json, sys
from pathlib import Path
from lousho_ray import LoushoError
from tests.e2e.test_deciders import paying, store_at

async def main(kind, folder, pause, approved):
    with store_at(kind, Path(folder)) as store:
        agent = paying(store, Path(folder))
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            result = await agent.approvals.resolve(pause, approved=approved == "yes")
            said = {"won": result.text}
        except LoushoError as error:
            said = {"code": error.code}
        print(json.dumps(said), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def store_at(kind: str, folder: Path) -> Any:
    return SqliteStore(folder / "s.db") if kind == "sqlite" else file_store(folder / "files")


def policy(request: GenerateOptions) -> GenerateResult | str:
    """Pays once, then says what came of it."""
    results = [message.text for message in request.messages if message.role == "tool"]
    return f"Done: {results[-1]}" if results else GenerateResult(tool_calls=(ToolCall("c1", "pay", '{"amount": 5}'),))


def paying(store: Any, folder: Path) -> Agent[Any]:
    @tool(needs_approval=True)
    def pay(amount: int) -> str:
        """Pays, and leaves a line."""
        with (folder / "paid.txt").open("a") as file:
            file.write(f"{amount}\n")
        return f"paid {amount}"

    return create_agent(provider=MockProvider(policy=policy), tools=[pay], store=store, runtime="local")


@pytest.mark.parametrize("kind", ["sqlite", "file"])
@pytest.mark.parametrize("where", ["session", "plain"])
async def test_of_several_processes_one_decides(kind: str, where: str, tmp_path: Path) -> None:
    # APR-18, S07: conflicting answers at once; the first counts and the tool runs at most once
    with store_at(kind, tmp_path) as store:
        agent = paying(store, tmp_path)
        paused = await (agent.session("s").send("Pay") if where == "session" else agent.send("Pay"))
    assert paused.approval_id is not None
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, kind, str(tmp_path), paused.approval_id, "yes" if number % 2 else "no"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(DECIDERS)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    said = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    assert [child.returncode for child in children] == [0] * DECIDERS
    won = [answer["won"] for answer in said if "won" in answer]
    assert len(won) == 1
    assert [answer["code"] for answer in said if "code" in answer] == ["LOUSHO_APPROVAL_NOT_FOUND"] * (DECIDERS - 1)
    paid = tmp_path / "paid.txt"
    assert (paid.read_text() if paid.exists() else "") == ("5\n" if "paid 5" in won[0] else "")
    if where == "session":
        with store_at(kind, tmp_path) as store:
            saved = await paying(store, tmp_path).session("s").load()
        assert [message.role for message in saved] == ["user", "assistant", "tool", "assistant"]
        assert saved[-1].text == won[0]
