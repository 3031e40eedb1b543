"""What comes of a call while a turn runs: every moment, each policy, sent and streamed, as the table in `docs/sessions.md` says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import SessionAwaitingApprovalError
from lousho_ray.loop.budget import Budget
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    ReasoningChunk,
    ReasoningEndChunk,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.stores.memory import MemorySessionStore, memory_store
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import asks, check_events, check_transcript, kinds, plain, shape, until

DOCS = Path(__file__).parents[2] / "docs" / "sessions.md"
COLUMNS = (("wait", None), ("queue", None), ("steer", "stream"), ("steer", "send"))


def cells() -> Iterator[Any]:
    """(moment, policy, how the running turn was started, how the call is made, outcome) for each cell of the table."""
    lines = DOCS.read_text(encoding="utf-8").split("| the call comes |")[1].split("\n\n")[0].splitlines()[2:]
    for line in lines:
        moment, *outcomes = (cell.strip() for cell in line.strip("|").split("|"))
        for (policy, only), outcome in zip(COLUMNS, outcomes, strict=True):
            for started in ("send", "stream") if only is None else (only,):
                for call in ("send", "stream"):
                    yield pytest.param(moment, policy, started, call, outcome, id=f"{moment}-{policy}-{started}-{call}")


CELLS = list(cells())


class Moment:
    """Holds the turn up at one moment of it, once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[list[str]] = []
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def asked(self, told: list[str]) -> int:
        """Notes what the model is asked; the number of its calls so far."""
        self.requests.append(told)
        return len(self.requests)

    async def here(self, name: str) -> None:
        if name == self.name and not self.reached.is_set():
            self.reached.set()
            await self.go.wait()


class Model:
    """Thinks, speaks and calls two tools, then replies; answers "b" at once when it stands alone behind a reply."""

    name = "matrix"
    default_model: str | None = "matrix-1"

    def __init__(self, moment: Any) -> None:
        self.moment = moment
        self.paused = moment.name.startswith("while paused")

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        chunks = [chunk async for chunk in self.stream(options)]
        text = "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))
        made = tuple(chunk.tool_call for chunk in chunks if isinstance(chunk, ToolCallChunk))
        return GenerateResult(text, made, "tool_calls" if made else "stop")

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        told = shape(options.messages)[1:]
        count = await self.moment.asked(told)
        if (told[-1] == "user:b" and "assistant:Done" in told) or (self.paused and count > 1):
            yield TextChunk("B")
        elif any(line.startswith("tool:") for line in told):
            yield TextChunk("Do")
            await self.moment.here("in the final reply")
            yield TextChunk("ne")
        else:
            await self.moment.here("before the first chunk")
            yield ReasoningChunk("Hm")
            await self.moment.here("during reasoning")
            yield ReasoningEndChunk()
            yield TextChunk("Wait.")
            await self.moment.here("during text, calls follow")
            for call in asks("pay" if self.paused else "first", "second").tool_calls:
                yield ToolCallChunk(call)
            yield FinishChunk("tool_calls")
            return
        yield FinishChunk("stop")


class Sessions(MemorySessionStore):
    def __init__(self, moment: Moment) -> None:
        super().__init__()
        self.moment = moment

    async def save(self, id: str, messages: Any, /, **fence: Any) -> None:
        check_transcript(messages)
        await self.moment.here("just after the end")
        await super().save(id, messages, **fence)


def tools_of(moment: Any) -> list[Any]:
    async def first(args: Any) -> str:
        await moment.here("while tools run")
        return "done"

    async def pay(args: Any) -> str:
        raise AssertionError("nobody approved it")

    return [
        define_tool(name="first", description="First.", execute=first),
        define_tool(name="pay", description="Pays.", execute=pay, needs_approval=True),
        plain("second"),
    ]


class Cell:
    """An agent whose turns are held up at a moment."""

    def __init__(self, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment = Moment(moment)
        self.model = Model(self.moment)
        durable = memory_store()
        parts = {"sessions": Sessions(self.moment), "checkpoints": None, "approvals": durable.approvals}
        if moment == "while paused, durable":
            parts["checkpoints"] = durable.checkpoints
        store: Any = type("Store", (), parts)()

        tools = tools_of(self.moment)
        self.agent = create_agent(provider=self.model, tools=tools, store=store, tool_concurrency=1, runtime="local")
        checks = Budget.before_call

        async def before_call(budget: Budget, *args: Any, steps: int, **more: Any) -> Any:
            if steps == 1:
                await self.moment.here("between steps")
            return await checks(budget, *args, steps=steps, **more)

        monkeypatch.setattr(Budget, "before_call", before_call)

    def start(self, how: str, text: str, policy: str) -> asyncio.Task[Any]:
        session = self.agent.session("s", turn_policy=policy)
        if how == "send":
            return asyncio.ensure_future(session.send(text))
        run = session.stream(text)

        async def read() -> Any:
            events = [event async for event in run]
            if not self.model.paused:  # a call that waits for a person has begun and not ended
                check_events(events)
            return await run.result

        return asyncio.ensure_future(read())


@pytest.mark.parametrize(("moment", "policy", "started", "call", "outcome"), CELLS)
async def test_a_cell(moment: str, policy: str, started: str, call: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # SES-25, SES-26, SES-27, SES-28, SES-31, SES-32, SES-36, SES-39, SES-40, SES-41, SES-49
    cell = Cell(moment, monkeypatch)
    running = cell.start(started, "a", "wait")
    if cell.model.paused:
        assert (await running).finish_reason == "awaiting-approval"
    else:
        await cell.moment.reached.wait()
    late = cell.start(call, "b", policy)
    await asyncio.sleep(0)  # a task that calls send() has to begin
    await asyncio.sleep(0)
    cell.moment.go.set()
    first, second = await asyncio.gather(running, late, return_exceptions=True)
    saved = await cell.agent.session("s").load()
    check_transcript(saved)
    assert seen(cell.moment.requests, first, second, shape(saved)) == outcome
    assert (second is first) is (outcome not in ("own turn", "refused"))  # SES-29


def seen(requests: list[list[str]], first: Any, second: Any, saved: list[str]) -> str:
    """What came of the call, by what the model was asked and what was saved."""
    if isinstance(second, SessionAwaitingApprovalError):
        assert len(requests) == 1
        return "refused"
    calls, results = "assistant:Wait.+first,second", ["tool:first", "tool:second"]
    if second.run_id != first.run_id:
        turn = ["user:a"] if first.finish_reason == "awaiting-approval" else ["user:a", calls, *results, "assistant:Done"]
        assert saved == [*turn, "user:b", "assistant:B"]
        assert requests[-1] == saved[:-1]
        return "own turn"
    assert "user:b" in saved
    again = any(after == [*before, "user:b"] for before, after in itertools.pairwise(requests))
    if again:
        assert second.steps == len(requests)
        return "call again"
    if saved[-3:] == ["assistant:Done", "user:b", "assistant:B"]:
        return "one more step"
    assert saved == ["user:a", calls, *results, "user:b", "assistant:Done"]
    return "skip, next step" if "not-run" in kinds(second.messages) else "next step"


def test_the_table_is_complete() -> None:
    assert len(CELLS) == 9 * 6 * 2


@pytest.mark.parametrize("policy", ["queue", "steer"])
@pytest.mark.parametrize("option", [{"max_steps": 2}, {"instructions": "Be brief."}, {"model_settings": {"seed": 1}}])
async def test_options_that_shape_a_run_are_refused_for_a_call_that_joins(
    option: dict[str, Any], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SES-D12
    cell = Cell("while tools run", monkeypatch)
    running = cell.start("send", "a", "wait")
    await cell.moment.reached.wait()
    joining = cell.agent.session("s", turn_policy=policy)
    with pytest.raises(Exception, match="cannot apply to a call that joins") as raised:
        await joining.send("b", **option)
    assert raised.value.field == next(iter(option))  # type: ignore[attr-defined]
    cell.moment.go.set()
    assert (await running).text == "Done"
    assert (await joining.send("b", **option)).text == "B"  # nothing to join any more


async def test_the_last_turn_in_line_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    # SES-D5, SES-D6
    cell = Cell("while tools run", monkeypatch)
    running = cell.start("send", "a", "wait")
    await cell.moment.reached.wait()
    waiting = cell.start("stream", "x", "wait")
    await until(lambda: not waiting.done())
    joined = cell.start("send", "b", "queue")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cell.moment.go.set()
    results = await asyncio.gather(running, waiting, joined)
    assert results[2] is results[1]
    assert results[2] is not results[0]
    assert cell.moment.requests[-1][-2:] == ["user:x", "user:b"]
