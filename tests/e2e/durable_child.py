"""A process that runs one turn of a durable session and stops at a named point, to be killed there.

    python -m tests.e2e.durable_child URL FILE LINES INPUT POINT LATER_S

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
from typing import Any

from lousho_ray import Agent, Message, OpenAICompatibleProvider, SqliteStore, ToolContext, create_agent, tool
from lousho_ray.clock import SystemClock
from lousho_ray.testing.fake_server import RecordedRequest, Reply

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


def agent_on(url: str, store: Any, lines: Path, stop: Callable[[str], None] = lambda point: None, **options: Any) -> Agent[Any]:
    """The agent of these tests. Its tools append a line `name call-id` to `lines` each time they run."""

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

    @tool
    async def slow(ctx: ToolContext) -> str:
        """Takes its time."""
        note("slow", ctx)
        if os.environ.get("SLOW") == "for ever":
            await asyncio.Event().wait()
        return "slow done"

    provider = OpenAICompatibleProvider(base_url=url, default_model="fake")
    tools = [mark, guarded, pay, slow]
    return create_agent(provider=provider, store=store, tools=tools, runtime="local", retry=False, **options)


class Later(SystemClock):
    """A clock that is `seconds` fast."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return super().wall() + self._seconds


class StoppingStore:
    """A SQLite store that stops before and after each kind of save: `before asked`, `after asked`, `after approval`, ...

    `alone` holds back for ever the save that is written side by side with the one that was stopped at.
    """

    def __init__(self, path: str, later_s: float, stop: Callable[[str], None], point: str) -> None:
        self._stop = stop
        self._alone = {"after finished": "transcript", "after transcript": "finished"}.get(point)
        store = SqliteStore(path, clock=Later(later_s))
        self.sessions = _Stopping(store.sessions, self._around, {"save": lambda key, messages: "transcript"})
        self.checkpoints = _Stopping(store.checkpoints, self._around, {"save": phase, "delete": lambda key: "delete"})
        self.approvals = _Stopping(
            store.approvals, self._around, {"save": lambda pending, snapshot: "approval", "resolve": lambda key: "claim"}
        )

    async def _around(self, name: str, call: Callable[[], Any]) -> Any:
        self._stop(f"before {name}")
        if name == self._alone:
            await asyncio.Event().wait()
        value = await call()
        self._stop(f"after {name}")
        return value


class _Stopping:
    def __init__(self, part: Any, around: Callable[[str, Callable[[], Any]], Any], names: Mapping[str, Callable[..., str]]) -> None:
        self._part = part
        self._around = around
        self._names = names

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._part, method)
        if method not in self._names:
            return call

        async def stopping(*args: Any, **options: Any) -> Any:
            return await self._around(self._names[method](*args), lambda: call(*args, **options))

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


async def main(url: str, path: str, lines: str, input: str, point: str, later_s: str) -> None:
    stop = stopper(point)
    agent = agent_on(url, StoppingStore(path, float(later_s), stop, point), Path(lines), stop)
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
