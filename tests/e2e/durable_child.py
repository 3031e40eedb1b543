"""A process that runs one turn of a durable session and stops at a named point, to be killed there.

    python -m tests.e2e.durable_child URL PLACE LINES INPUT POINT LATER_S

It says `reached` on its standard output and stands still until its standard input closes. The test goes on with the same
agent (`agent_on`), whose model answers by `SCRIPTS`. `LATER_S` is how much later than now it is for the store: the lease of a
process that died before has run out.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lousho_ray import Agent, Message, OpenAICompatibleProvider, SqliteStore, ToolContext, create_agent, tool
from lousho_ray.clock import SystemClock
from lousho_ray.testing.fake_server import RecordedRequest, Reply
from tests.contract.s3_server import store_of

SESSION = "s1"

SCRIPTS: Mapping[str, Sequence[Reply]] = {
    "two": [Reply(tool_calls=[("mark", {"name": "a"}, "c1"), ("mark", {"name": "b"}, "c2")]), Reply("two done")],
    "twice": [
        Reply(tool_calls=[("mark", {"name": "a"}, "c1")]),
        Reply(tool_calls=[("mark", {"name": "b"}, "c2")]),
        Reply("twice done"),
    ],
    "behind": [
        Reply(tool_calls=[("slow", {}, "c1"), ("mark", {"name": "b"}, "c2"), ("mark", {"name": "c"}, "c3")]),
        Reply("behind done"),
    ],
    "once": [Reply(tool_calls=[("pay", {}, "c1")]), Reply("once done")],
    "guarded": [
        Reply(tool_calls=[("mark", {"name": "a"}, "c1"), ("guarded", {"name": "g"}, "c2"), ("mark", {"name": "b"}, "c3")]),
        Reply("guarded done"),
    ],
    "plain": [Reply("plain done")],
    "next": [Reply("next done")],
}
"""What the model answers to a user message, by how many of its own turns follow that message."""


def answer(request: RecordedRequest) -> Reply:
    """A pure function of the conversation: the same request gets the same reply, from whatever process."""
    messages = request.body["messages"]
    asked = max(index for index, message in enumerate(messages) if message["role"] == "user")
    turns = sum(message["role"] == "assistant" for message in messages[asked:])
    return SCRIPTS[messages[asked]["content"]][turns]


def agent_on(
    url: str,
    store: Any,
    lines: Path,
    stop: Callable[[str], None] = lambda point: None,
    *,
    slow: Callable[[], bool] = lambda: False,
    runtime: Any = "local",
    **options: Any,
) -> Agent[Any]:
    """The agent of these tests. Its tools append a line `name call-id` to `lines` each time they run.

    `slow` tells whether the tool of that name takes for ever.
    """

    def note(name: str, ctx: ToolContext) -> None:
        with lines.open("a") as file:
            file.write(f"{name} {ctx.tool_call_id}\n")

    @tool
    def mark(name: str, ctx: ToolContext) -> str:
        """Marks."""
        note(name, ctx)
        stop(f"in {name}")
        return f"marked {name}"

    @tool(needs_approval=True)
    def guarded(name: str, ctx: ToolContext) -> str:
        """Marks after a person has agreed."""
        note(name, ctx)
        stop(f"in {name}")
        return f"guarded {name}"

    @tool(effect="once")
    def pay(ctx: ToolContext) -> str:
        """Pays."""
        note("pay", ctx)
        stop("in pay")
        return "paid"

    @tool(name="slow")
    async def slowly(ctx: ToolContext) -> str:
        """Takes its time."""
        note("slow", ctx)
        if slow():
            await asyncio.Event().wait()
        return "slow done"

    provider = OpenAICompatibleProvider(base_url=url, default_model="fake")
    tools = [mark, guarded, pay, slowly]
    return create_agent(provider=provider, store=store, tools=tools, runtime=runtime, retry=False, **options)


class Later(SystemClock):
    """A clock that is `seconds` fast."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return super().wall() + self._seconds


def open_store(place: str, later_s: float) -> Any:
    """The store at `sqlite:PATH` or `s3:ENDPOINT`; `parts:PATH` is SQLite without turns that begin and end in one step."""
    kind, _, where = place.partition(":")
    clock = Later(later_s)
    return store_of(SimpleNamespace(endpoint=where), clock=clock) if kind == "s3" else SqliteStore(where, clock=clock)


STAGES: Mapping[str, Callable[..., str]] = {
    "turns.open": lambda *_: "open",
    "turns.end": lambda *_: "end",
    "sessions.save": lambda *_: "transcript",
    "checkpoints.save": lambda record: phase(record),
    "checkpoints.delete": lambda *_: "delete",
    "approvals.save": lambda *_: "approval",
    "approvals.resolve": lambda *_: "claim",
}
"""What a call of a store stands for, from its arguments. A point is `before` or `after` one of them."""

ALONE: Mapping[str, str] = {"after finished": "transcript", "after transcript": "finished"}
"""The call that is made side by side with the one a point is after: it is held back for ever, so that the one is alone."""


class StoppingStore:
    """A store that stops before and after each call of `STAGES`."""

    def __init__(self, place: str, later_s: float, stop: Callable[[str], None], point: str) -> None:
        self._stop = stop
        self._alone = ALONE.get(point)
        store = open_store(place, later_s)
        self.sessions = _Stopping(store.sessions, "sessions", self._around)
        self.checkpoints = _Stopping(store.checkpoints, "checkpoints", self._around)
        self.approvals = _Stopping(store.approvals, "approvals", self._around)
        if place.startswith("sqlite:"):
            self.turns = _Stopping(store.turns, "turns", self._around)
            self.turns.parts = (self.sessions, self.checkpoints)

    async def _around(self, name: str, call: Callable[[], Any]) -> Any:
        self._stop(f"before {name}")
        if name == self._alone:
            await asyncio.Event().wait()
        value = await call()
        self._stop(f"after {name}")
        return value


class _Stopping:
    def __init__(self, part: Any, name: str, around: Callable[[str, Callable[[], Any]], Any]) -> None:
        self._part = part
        self._name = name
        self._around = around

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._part, method)
        stage = STAGES.get(f"{self._name}.{method}")
        if stage is None:
            return call

        async def stopping(*args: Any, **options: Any) -> Any:
            return await self._around(stage(*args), lambda: call(*args, **options))

        return stopping


def phase(record: Mapping[str, Any]) -> str:
    """What a checkpoint stands for: `opened`, `asked`, `result` (`result 2` for the second of a turn), `ahead` (a result that is in
    before an earlier call's), `decided`, `paused` or `finished`."""
    if record["status"] != "in-progress":
        return {"awaiting-approval": "paused"}.get(record["status"], record["status"])
    if record.get("settled"):
        return "ahead"
    last = Message.from_dict(record["messages"][-1])
    if last.role == "tool":
        results = sum(message["role"] == "tool" for message in record["messages"])
        return f"{'decided' if record.get('decisions') else 'result'} {results}"
    return "asked" if last.tool_calls else "opened"


def stopper(point: str) -> Callable[[str], None]:
    def stop(reached: str) -> None:
        if reached == point:
            os.write(1, b"reached\n")
            sys.stdin.read()  # until it is killed; when the test itself has died, its end of the pipe closes
            os._exit(1)

    return stop


async def main(url: str, place: str, lines: str, input: str, point: str, later_s: str) -> None:
    stop = stopper(point)
    slow = os.environ.get("SLOW") == "for ever"
    agent = agent_on(url, StoppingStore(place, float(later_s), stop, point), Path(lines), stop, slow=lambda: slow)
    if input.startswith("approve "):
        await agent.approvals.resolve(input.removeprefix("approve "), approved=True)
    elif input.startswith("reject "):
        await agent.approvals.resolve(input.removeprefix("reject "), approved=False, note="No.")
    else:
        await agent.session(SESSION).send(input)
    os.write(1, b"ended\n")
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
