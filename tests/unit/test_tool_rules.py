"""Tools in a run that stops and goes on: what runs again, what is recorded when. And the tools that spec files name."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, PropagatingToolError, StorageError, ToolExecutionError
from lousho_ray.messages import Message
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.clock import FakeClock
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.builtin import SPEC_NAMES, builtin_tool, create_date_tools
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import Gate, agent_of, calls, check_transcript, kinds, plain, results, shape


def asking(name: str, log: list[str]) -> Any:
    return define_tool(name=name, description="Asks.", execute=lambda args: log.append(name) or "ok", needs_approval=True)


# ----------------------------------------------------------------------------------------------------------- batches that pause


async def test_the_first_call_that_asks_ends_the_batch_and_those_behind_it_run_after_the_decision() -> None:
    # TOOL-23
    log: list[str] = []
    slow = Gate("slow", "slow result")
    tools = [slow.tool, plain("quick", "quick result", log), asking("ask", log), plain("later", "later result", log)]
    agent = agent_of(calls("slow", "quick", "ask", "later"), "Done", tools=tools)
    sending = asyncio.ensure_future(agent.send("Go"))
    await slow.running.wait()
    slow.go.set()
    paused = await sending
    assert paused.finish_reason == "awaiting-approval"
    assert results(paused.messages) == ["slow result", "quick result"]
    assert log == ["quick"]
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert results(result.messages) == ["slow result", "quick result", "ok", "later result"]
    assert log == ["quick", "ask", "later"]
    assert slow.runs == 1
    check_transcript(result.messages)


async def test_a_second_call_that_asks_pauses_again_and_every_call_gets_one_result() -> None:
    # TOOL-23
    log: list[str] = []
    agent = agent_of(calls("one", "two", "end"), "Done", tools=[asking("one", log), asking("two", log), plain("end", log=log)])
    first = await agent.send("Go")
    second = await agent.approvals.resolve(first.approval_id, approved=False)
    assert second.finish_reason == "awaiting-approval"
    assert second.approval_id != first.approval_id
    result = await agent.approvals.resolve(second.approval_id, approved=True)
    assert kinds(result.messages) == ["rejected", "ok", "ok"]
    assert log == ["two", "end"]
    check_transcript(result.messages)


# ------------------------------------------------------------------------------------------------------ runs that are taken up


@pytest.mark.parametrize("order", [("done", "breaks"), ("breaks", "done")])
async def test_a_recorded_result_is_not_made_again_and_a_call_without_one_runs_again_under_its_id(order: tuple[str, str]) -> None:
    # TOOL-19
    ran: list[tuple[str, str]] = []
    finished, store = asyncio.Event(), Store()
    model = mock_model([calls(*order), "Done"])

    async def done(args: Any, ctx: Any) -> str:
        ran.append(("done", ctx.tool_call_id))
        finished.set()
        return "recorded"

    async def breaks(args: Any, ctx: Any) -> str:
        ran.append(("breaks", ctx.tool_call_id))
        await finished.wait()
        await settle()
        if len(ran) == 2:
            store.checkpoints.broken = True  # the machine goes down: nothing is written from here on
            raise PropagatingToolError("The machine goes down.")
        return "at last"

    tools = [define_tool(name=name, description="T.", execute=run) for name, run in (("done", done), ("breaks", breaks))]
    session = create_agent(provider=model, tools=tools, store=store).session("s")
    with pytest.raises((PropagatingToolError, StorageError)):
        await session.send("Go")
    store.checkpoints.broken = False
    result = await session.resume()
    assert result is not None
    assert sorted(name for name, _ in ran) == ["breaks", "breaks", "done"]
    assert len({call_id for name, call_id in ran if name == "breaks"}) == 1
    assert dict(zip(order, results(result.messages), strict=True)) == {"done": "recorded", "breaks": "at last"}
    check_transcript(result.messages)


class Records:
    """Checkpoints that remember every save."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.saved: list[dict[str, Any]] = []
        self.broken = False

    async def save(self, record: dict[str, Any]) -> None:
        if self.broken:
            raise StorageError("The disk is gone.")
        self.saved.append(record)
        await self._inner.save(record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Store:
    def __init__(self) -> None:
        inner = memory_store()
        self.sessions, self.approvals = inner.sessions, inner.approvals
        self.checkpoints = Records(inner.checkpoints)


async def test_the_turn_is_saved_before_its_calls_start_and_with_every_result_and_never_goes_back() -> None:
    # TOOL-26
    store = Store()
    first, second = Gate("first"), Gate("second")
    turn = agent_of(calls("first", "second"), "Done", tools=[first.tool, second.tool], store=store).session("s").send("Go")
    sending = asyncio.ensure_future(turn)
    await asyncio.gather(first.running.wait(), second.running.wait())
    assert shapes(store)[-1] == ["user:Go", "assistant:+first,second"]
    second.go.set()  # out of order: not in the transcript yet, but not lost either
    await settle()
    assert shapes(store)[-1] == ["user:Go", "assistant:+first,second"]
    first.go.set()
    assert (await sending).ok
    sizes = [len(one) for one in shapes(store)]
    assert sizes == sorted(sizes)
    assert ["user:Go", "assistant:+first,second", "tool:first", "tool:second"] in shapes(store)


def shapes(store: Store) -> list[list[str]]:
    return [shape([Message.from_dict(item) for item in record["messages"]])[1:] for record in store.checkpoints.saved]


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------------- tools of spec files


@pytest.mark.parametrize(("spec_name", "name"), list(SPEC_NAMES.items()))
def test_a_tool_has_its_spec_name_and_another_one_for_the_model(spec_name: str, name: str) -> None:
    # TOOL-38
    assert builtin_tool(spec_name).name == name


def test_the_spec_names_are_the_documented_ones() -> None:
    # TOOL-38
    assert SPEC_NAMES == {
        "http": "http_request",
        "web-fetch": "web_fetch",
        "current-date": "current_date",
        "day-name": "day_name",
    }


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("http_request", "LOUSHO_TOOL_NOT_FOUND"),
        ("curl", "LOUSHO_TOOL_NOT_FOUND"),
        ("github", "LOUSHO_TOOL_NEEDS_CREDENTIALS"),
        ("jira", "LOUSHO_TOOL_NEEDS_CREDENTIALS"),
    ],
)
def test_another_name_in_a_spec_is_refused(name: str, code: str) -> None:
    # TOOL-38
    with pytest.raises(ConfigurationError) as caught:
        builtin_tool(name)
    assert caught.value.code == code
    assert name in caught.value.detail
    if code == "LOUSHO_TOOL_NOT_FOUND":
        assert all(known in caught.value.detail for known in SPEC_NAMES)


async def ask(tool: Any, arguments: str = "{}") -> Any:
    positional, keywords = tool.call_arguments(tool.parse(arguments).value, None)
    return await tool(*positional, **keywords)


async def test_the_date_is_that_of_the_clock_in_utc() -> None:
    # TOOL-39
    clock = FakeClock()
    today, weekday = create_date_tools(clock)
    now = datetime.fromtimestamp(clock.wall(), UTC)
    assert await ask(today) == now.isoformat(timespec="seconds").replace("+00:00", "Z")
    assert await ask(weekday) == now.strftime("%A")
    assert today.read_only
    assert weekday.read_only


@pytest.mark.parametrize(
    ("date", "name"), [("2026-03-01", "Sunday"), ("2024-02-29", "Thursday"), ("2026-03-02T23:00:00Z", "Monday")]
)
async def test_a_date_has_an_english_weekday(date: str, name: str) -> None:
    # TOOL-39
    assert await ask(create_date_tools()[1], f'{{"date": "{date}"}}') == name


@pytest.mark.parametrize("date", ["yesterday", "2026-02-30", ""])
async def test_a_bad_date_is_a_tool_error(date: str) -> None:
    # TOOL-39
    with pytest.raises(ToolExecutionError, match="ISO 8601"):
        await ask(create_date_tools()[1], f'{{"date": "{date}"}}')
