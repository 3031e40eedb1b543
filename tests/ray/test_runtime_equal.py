"""One script, run in one process and on a cluster: results, usage, budgets, errors and the events of each agent are equal."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from lousho_ray import (
    Agent,
    ExecutionResult,
    GenerateResult,
    MockProvider,
    SqliteStore,
    ToolCall,
    create_agent,
    create_rate_limiter,
    tool,
)
from lousho_ray.ports import GenerateOptions
from lousho_ray.usage import ProviderUsage
from tests.ray.processes import by_agent, fan_out

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = 6
pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(FILES):
        functions = "".join(f"def part_{number}_{index}(x):\n    return x + {index}\n\n\n" for index in range(number + 1))
        (tmp_path / f"part_{number}.py").write_text(f'"""Part {number} of it."""\n\nimport os\nimport sys\n\n\n{functions}')
    return tmp_path


@pytest.fixture
def research(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The research example, whose code travels: the workers of this session do not have its folder on their path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    modules = [importlib.import_module(name) for name in ("research", "research_model")]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield modules[0]
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


def research_lead(research: Any, folder: Path, runtime: str, **options: Any) -> Agent[Any]:
    library, model = research.Library(str(folder)), research.research_model()
    reader = create_agent(
        name="reader",
        description="Studies one file.",
        instructions=research.READER,
        tools=[library.read_file, library.search_text],
        provider=model,
        runtime=runtime,
    )
    return create_agent(
        name="lead",
        instructions=research.LEAD,
        tools=[library.list_files],
        subagents={"reader": reader},
        provider=model,
        runtime=runtime,
        **options,
    )


async def both(run: Any) -> tuple[ExecutionResult[Any], ExecutionResult[Any]]:
    """Streams the run that `run(runtime)` starts on both runtimes, compares what must be equal, and returns both results."""
    results, events = [], []
    for runtime in ("local", "ray"):
        handle = run(runtime)
        events.append([event async for event in handle])
        results.append(await handle.result)
    local, ray = results
    assert told(local) == told(ray)
    assert by_agent(events[0]) == by_agent(events[1])
    assert [event.seq for event in events[1]] == list(range(len(events[1])))
    return local, ray


def told(result: ExecutionResult[Any]) -> dict[str, Any]:
    """What a result says, without what differs from run to run."""
    names = (
        "text",
        "finish_reason",
        "steps",
        "messages",
        "tool_calls",
        "tool_errors",
        "budget",
        "object",
        "output_error",
        "abort_reason",
    )
    return {**{name: getattr(result, name) for name in names}, "usage": result.usage.to_dict()}


async def test_a_research_run_is_the_same_on_both_runtimes(research: Any, folder: Path, fresh_name: str) -> None:
    # BUD-35, CA-52, SUB-32, SUB-47
    limiter = {runtime: create_rate_limiter({"max_concurrent": 2}, f"{fresh_name}-{runtime}") for runtime in ("local", "ray")}
    limits = {"max_cost_usd": 1.0}
    local, ray = await both(
        lambda runtime: research_lead(research, folder, runtime, rate_limit=limiter[runtime], limits=limits).stream("Report.")
    )
    assert local.ok
    assert ray.usage.model_calls == 3 + FILES * 3
    assert ray.usage.delegated is not None
    assert ray.usage.delegated.runs == FILES
    assert ray.usage.by_model == local.usage.by_model
    assert (await limiter["ray"].stats()).requests_in_window == 3 + FILES * 3


async def test_a_budget_stops_both_runtimes_at_the_same_call(research: Any, folder: Path) -> None:
    # BUD-31, BUD-35: one child after the other, so that the moment is the same
    local, ray = await both(
        lambda runtime: research_lead(research, folder, runtime, limits={"max_tokens": 2500}, tool_concurrency=1).stream("Report.")
    )
    assert ray.finish_reason == "budget-exceeded"
    assert ray.budget is not None
    assert ray.budget == local.budget
    assert ray.budget.limit == "maxTokens"


class OddError(Exception):
    """An error that pickle cannot rebuild."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@tool
def fails(how: str) -> str:
    """Fails in a given way.

    Args:
        how: The way.
    """
    if how == "exit":
        raise SystemExit(3)
    if how == "odd":
        raise OddError("this", "that")
    raise ValueError("plain")


def failing_child(request: GenerateOptions) -> GenerateResult | str:
    results = [message.text for message in request.messages if message.role == "tool"]
    if results:
        return f"seen: {results[0]}"
    number = int(next(message.text for message in request.messages if message.role == "user").split()[1])
    if number == 3:
        raise OddError("model", "call")
    how = json.dumps({"how": ("exit", "odd", "plain")[number]})
    usage = ProviderUsage(100, 10, cost_usd=0.25)
    return GenerateResult(tool_calls=(ToolCall("c", "fails", how),), finish_reason="tool_calls", usage=usage)


async def test_failures_of_children_read_the_same_on_both_runtimes() -> None:
    # SUB-10, ERR-08
    def run(runtime: str) -> Any:
        child = create_agent(
            provider=MockProvider(policy=failing_child), tools=[fails], description="Fails.", retry=False, runtime=runtime
        )
        return create_agent(provider=MockProvider(policy=fan_out(4)), subagents={"child": child}, runtime=runtime).stream("Go.")

    _, ray = await both(run)
    results = [message for message in ray.messages if message.role == "tool"]
    assert [message.is_error for message in results] == [False, False, False, True]
    assert "SystemExit" in results[0].text
    assert "this and that" in results[1].text
    assert "model and call" in results[3].text


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def chatty(request: GenerateOptions) -> GenerateResult | str:
    last = request.messages[-1]
    if last.role == "tool":
        return f"It is {last.text}; {len(request.messages)} messages so far."
    words = last.text.split()
    if words[0] != "add":
        return f"You said {last.text!r}, number {sum(message.role == 'user' for message in request.messages)}."
    arguments = json.dumps({"a": int(words[1]), "b": int(words[2])})
    return GenerateResult(
        tool_calls=(ToolCall("c1", "add", arguments),), finish_reason="tool_calls", usage=ProviderUsage(7, 3, cost_usd=0.01)
    )


@pytest.mark.parametrize("kept", ["nowhere", "file"])
async def test_a_conversation_is_the_same_on_both_runtimes(kept: str, tmp_path: Path) -> None:
    # CA-52, SES-05, SES-09, SES-16, SES-17, BUD-35
    told_by: dict[str, Any] = {}
    for runtime in ("local", "ray"):
        agent = create_agent(provider=MockProvider(policy=chatty), tools=[add], runtime=runtime)
        store = SqliteStore(tmp_path / f"{runtime}.db") if kept == "file" else None
        session, seen = agent.session("talk", store=store), []
        session.on(seen.append)
        first = await session.send("hello")
        handle = session.stream("add 2 3")
        streamed = [event async for event in handle]
        second = await handle.result
        third = await session.send("bye", max_steps=1)
        loaded = await session.load()
        told_by[runtime] = (
            [told(result) for result in (first, second, third)],
            by_agent(streamed),
            by_agent(seen),
            loaded,
            session.messages,
        )
        await session.clear()
        assert await session.load() == []
        assert [event.type for event in seen][-1] == "context.cleared"
        if store is not None:
            await store.aclose()
    assert told_by["local"] == told_by["ray"]
    assert told_by["ray"][0][1]["text"] == "It is 5; 6 messages so far."
    assert [message.role for message in told_by["ray"][3]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
