"""The plain-code twins: `send_sync`, `stream_sync` and their like, from scripts, threads and notebooks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.loop_thread import LoopThread
from lousho_ray.ports import GenerateOptions, TextChunk
from lousho_ray.tools.tool import define_tool, tool
from tests.unit.loop_support import PolicyProvider, ScriptedStream, agent_of, calls, check_events, names, plain, results, shape


def echo_agent() -> Any:
    return create_agent(provider=PolicyProvider(lambda options: f"re: {options.messages[-1].text}"))


def test_send_sync() -> None:
    result = agent_of(calls("look"), "Done", tools=[plain("look")]).send_sync("Hi", max_steps=5)
    assert (result.text, result.ok) == ("Done", True)


def test_errors_come_out_as_they_are() -> None:
    with pytest.raises(LoushoError, match="broken"):
        agent_of(RuntimeError("broken")).send_sync("Hi")
    with pytest.raises(ConfigurationError):
        agent_of("x").send_sync("Hi", nonsense=1)
    with pytest.raises(ConfigurationError):
        agent_of("x").send_sync(None)  # type: ignore[arg-type]


def test_many_threads_share_an_agent() -> None:
    # CA-08
    meet = threading.Barrier(4, timeout=10)

    async def policy(options: GenerateOptions) -> str:
        await asyncio.to_thread(meet.wait)  # all four are in flight at once
        return f"re: {options.messages[-1].text}"

    agent = create_agent(provider=PolicyProvider(policy))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda number: agent.send_sync(f"m{number}").text, range(4)))
    assert texts == [f"re: m{number}" for number in range(4)]


async def test_inside_a_running_loop_as_in_a_notebook() -> None:
    # EVT-D4
    agent = echo_agent()
    assert agent.send_sync("Hi").text == "re: Hi"
    assert [event.type for event in agent.stream_sync("Hi")][-1] == "run.done"
    assert (await agent.send("Hi")).text == "re: Hi"


def test_a_sync_tool_may_call_another_agent() -> None:
    inner = echo_agent()

    @tool
    def ask(text: str) -> str:
        """Asks."""
        answer: str = inner.send_sync(text).text
        return answer

    result = agent_of(calls(("ask", {"text": "you"})), "Done", tools=[ask]).send_sync("Hi")
    assert results(result.messages) == ["re: you"]


def test_an_async_tool_that_makes_a_sync_call_is_told_instead_of_hanging() -> None:
    inner = echo_agent()

    async def ask(args: Any) -> str:
        answer: str = inner.send_sync("you").text
        return answer

    ask_tool = define_tool(name="ask", description="Asks.", execute=ask)
    result = agent_of(calls("ask"), "Done", tools=[ask_tool]).send_sync("Hi")
    payload = results(result.messages)[0]
    assert payload["error"] == "ConfigurationError"
    assert "await" in payload["message"]


def test_stream_sync_gives_every_event() -> None:
    # EVT-D4
    events = list(agent_of(calls("look"), "Done", tools=[plain("look")]).stream_sync("Hi"))
    check_events(events)
    assert names(events)[0] == "run.start"
    assert names(events)[-1] == "run.done stop"


def test_wrong_options_of_stream_sync_raise_from_the_call() -> None:
    # EVT-03, ERR-18
    with pytest.raises(ConfigurationError):
        agent_of("x").stream_sync("Hi", max_steps=0)
    with pytest.raises(ConfigurationError):
        agent_of("x").session().stream_sync("Hi", nonsense=1)


def test_the_run_of_stream_sync_starts_at_once() -> None:
    # EVT-01
    started = threading.Event()

    def policy(options: GenerateOptions) -> str:
        started.set()
        return "Done"

    events = create_agent(provider=PolicyProvider(policy)).stream_sync("Hi")
    assert started.wait(10)
    assert names(list(events))[-1] == "run.done stop"


def test_closing_stream_sync_early_aborts_the_run_and_waits_for_it() -> None:
    # EVT-D4, EVT-05
    holder: list[asyncio.Event] = []

    class Held(ScriptedStream):
        async def stream(self, options: GenerateOptions, /) -> Any:
            holder.append(asyncio.Event())
            try:
                yield TextChunk("a")
                await holder[0].wait()
            finally:
                self.closed += 1

    held = Held()
    events = create_agent(provider=held).stream_sync("Hi")
    for event in events:
        if event.type == "text.delta":
            break
    events.close()  # type: ignore[attr-defined]
    assert held.closed == 1
    assert next(events, None) is None


def test_a_session_in_plain_code() -> None:
    # SES-03
    session = echo_agent().session()
    assert session.send_sync("a").text == "re: a"
    assert names(list(session.stream_sync("b")))[-1] == "run.done stop"
    assert shape(session.load_sync()) == ["user:a", "assistant:re: a", "user:b", "assistant:re: b"]
    session.clear_sync()
    assert session.load_sync() == []


def test_an_interrupted_call_is_cancelled_and_settles_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ctrl-C while a call runs
    settled = threading.Event()
    running = threading.Event()

    async def work() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            settled.set()

    def interrupt(self: Any, timeout: float | None = None) -> Any:
        assert running.wait(10)
        raise KeyboardInterrupt

    thread = LoopThread()
    monkeypatch.setattr(concurrent.futures.Future, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    assert settled.is_set()
    loop = thread.loop()
    loop.call_soon_threadsafe(loop.stop)
    assert thread._thread is not None
    thread._thread.join(10)
    loop.close()


def test_one_loop_serves_all_calls() -> None:
    loops: set[Any] = set()

    def policy(options: GenerateOptions) -> str:
        loops.add(asyncio.get_running_loop())
        return "Done"

    agent = create_agent(provider=PolicyProvider(policy))
    for _ in range(3):
        agent.send_sync("Hi")
    create_agent(provider=PolicyProvider(policy)).send_sync("Hi")
    assert len(loops) == 1
