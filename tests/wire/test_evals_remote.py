"""Evals against a deployment: a small server that speaks the protocol of `POST /chat`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.cli import run_lousho
from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.evals import remote_target
from lousho_ray.evals.suite import Outcome, Suite, SuiteOptions
from lousho_ray.testing import collect, mock_model
from lousho_ray.tools.tool import tool
from tests.unit.evals_support import console, write_evals

USAGE = {"input_tokens": 5, "output_tokens": 1}
TOKEN = "tok-0123456789-secret"


@tool
def find(q: str) -> str:
    """Finds."""
    return "found"


@dataclass
class Deployment:
    """Runs an agent for each session and streams its events, as the server of the package is specified to."""

    url: str = ""
    status: int = 200
    cut: bool = False
    edit: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda event: event
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    sessions: dict[str, Any] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next(line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length")))
        body = json.loads(await reader.readexactly(length))
        self.heads.append(head)
        self.bodies.append(body)
        writer.write(f"HTTP/1.1 {self.status} X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n".encode())
        if self.status == 200:
            async for part in self.stream(body):
                writer.write(part)
        else:
            writer.write(b'{"error": "no"}')
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if body["sessionId"] not in self.sessions:
            script = [
                {"tool_calls": [{"name": "find", "args": {"q": "x"}}], "usage": USAGE},
                {"text": "one", "usage": USAGE},
                "two",
            ]
            self.sessions[body["sessionId"]] = create_agent(provider=mock_model(script), tools=[find]).session()
        events = await collect(self.sessions[body["sessionId"]].stream(body["input"]))
        yield b": keep-alive\n\n"
        for event in events[: len(events) // 2 if self.cut else None]:
            data = self.edit(event.to_dict())
            if data is not None:
                yield f"data: {json.dumps(data)}\n\n".encode()
        yield b"event: done\ndata: {}\n\n"


@asynccontextmanager
async def deployed(**options: Any) -> AsyncIterator[Deployment]:
    deployment = Deployment(**options)
    server = await asyncio.start_server(deployment.serve, "127.0.0.1", 0)
    deployment.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield deployment


async def run(folder: Path, body: str, deployment: Deployment, auth: str | None = None) -> Outcome:
    write_evals(folder, body)
    target = remote_target(url=deployment.url, auth=auth)
    return await Suite(SuiteOptions(root=folder, target=target), console()).run()


TURNS = """
def agent():
    raise AssertionError("a deployment is asked, not the agent")

async def test(t, case):
    await t.send("a")
    t.completed()
    t.called_tool("find", {"q": "x"}, times=1)
    t.check("reply", t.reply, equals("one"))
    t.max_steps(2)
    t.max_tokens(12)
    t.max_cost_usd(1)
    await t.send("b")
    t.check("second", t.reply, equals("two"))

define_eval(name="e", agent=agent, test=test, cases=["x", "y"])
"""


async def test_a_case_is_one_remote_session_and_gives_the_same_result(tmp_path: Path) -> None:
    # EVAL-40
    async with deployed() as deployment:
        outcome = await run(tmp_path, TURNS, deployment, TOKEN)
    assert outcome.exit_code == 0, [record.assertions for record in outcome.summary.records]
    assert [body["input"] for body in deployment.bodies] == ["a", "b", "a", "b"]
    assert len({body["sessionId"] for body in deployment.bodies}) == 2
    assert all(f"authorization: bearer {TOKEN}" in head.lower() for head in deployment.heads)
    assert TOKEN not in outcome.results.read_text()


async def test_a_check_whose_data_the_stream_does_not_carry_fails_and_says_so(tmp_path: Path) -> None:
    # EVAL-41
    def without(event: dict[str, Any]) -> dict[str, Any] | None:
        return {key: value for key, value in event.items() if key != "usage"}

    async with deployed(edit=without) as deployment:
        outcome = await run(tmp_path, TURNS, deployment)
    record = outcome.summary.records[0]
    assert {item.name: item.message for item in record.failed_gates} == {
        "max_tokens": "the event stream of the target carries no usage"
    }
    assert [item.skipped for item in record.assertions if item.name == "max_cost_usd"] == [True]


ONCE = """
async def test(t):
    await t.send("a")

define_eval(name="e", agent=says("never"), test=test)
define_eval(name="after", agent=says("never"), test=lambda t: None)
"""


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"status": 401}, "LOUSHO_REMOTE_UNAUTHORIZED"),
        ({"status": 500}, "LOUSHO_REMOTE_REQUEST_FAILED"),
        ({"cut": True}, "LOUSHO_REMOTE_REQUEST_FAILED"),
    ],
)
async def test_a_deployment_that_fails_fails_its_case_and_the_run_goes_on(
    options: dict[str, Any], code: str, tmp_path: Path
) -> None:
    # EVAL-43
    async with deployed(**options) as deployment:
        outcome = await run(tmp_path, ONCE, deployment, TOKEN)
    after, record = outcome.summary.records
    assert (after.status, record.status) == ("passed", "outage")
    assert record.error is not None
    assert record.error["code"] == code
    assert TOKEN not in outcome.results.read_text()


async def test_a_deployment_that_cannot_be_reached_is_an_outage(tmp_path: Path) -> None:
    # EVAL-43
    outcome = await run(tmp_path, ONCE, Deployment(url="http://127.0.0.1:1"))
    record = outcome.summary.records[1]
    assert record.error is not None
    assert record.error["code"] == "LOUSHO_REMOTE_REQUEST_FAILED"


async def test_a_run_that_failed_there_is_an_error_here(tmp_path: Path) -> None:
    async with deployed() as deployment:
        outcome = await run(tmp_path, TURNS.replace('send("b")', 'send("b"); await t.send("c")'), deployment)
    record = outcome.summary.records[0]
    assert record.status == "error"
    assert "has no turn for call 4" in str(record.error)


async def test_the_classic_form_and_options_of_a_call_need_an_agent_here(tmp_path: Path) -> None:
    # EVAL-42
    body = """
async def test(t):
    await t.send("a", max_steps=2)

define_eval(name="a", agent=says("x"), input="x", score=exact_match("x"))
define_eval(name="b", agent=says("x"), test=test)
"""
    async with deployed() as deployment:
        outcome = await run(tmp_path, body, deployment)
    codes = [record.error["code"] for record in outcome.summary.records if record.error]
    assert codes == ["LOUSHO_CONFIG_CONFLICTING_OPTIONS", "LOUSHO_CONFIG_INVALID"]


async def test_a_target_of_the_eval_is_asked_in_place_of_its_agent(tmp_path: Path) -> None:
    # EVAL-40
    async with deployed() as deployment:
        body = TURNS.replace("test=test,", f"test=test, target=remote_target(url={deployment.url!r}),")
        write_evals(tmp_path, body)
        outcome = await Suite(SuiteOptions(root=tmp_path), console()).run()
    assert (outcome.exit_code, len(deployment.bodies)) == (0, 4)


def test_a_target_needs_an_address_and_hides_its_token() -> None:
    with pytest.raises(ConfigurationError, match="http"):
        remote_target(url="localhost:3000")
    assert TOKEN not in repr(remote_target(url="http://x", auth=TOKEN))


def test_recordings_and_a_deployment_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # EVAL-28
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run_lousho(["eval", "--replay", "--url", "http://127.0.0.1:1"]) == 2
    assert "LOUSHO_CONFIG_CONFLICTING_OPTIONS" in capsys.readouterr().err
