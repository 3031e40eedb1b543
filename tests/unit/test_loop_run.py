"""The run as a whole: what the model is asked, how a run ends, what it returns, and what cannot hurt it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import AgentExecutionError, CompactedLLMProviderError, ConfigurationError, RateLimitError
from lousho_ray.messages import ToolCall, assistant, tool_result, user
from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, GenerateResult, TextChunk, ToolCallChunk
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import (
    PolicyProvider,
    ScriptedStream,
    agent_of,
    asks,
    calls,
    check_events,
    check_transcript,
    collect,
    kinds,
    names,
    plain,
    say,
    shape,
)

# ------------------------------------------------------------------------------------------------------------ what is asked


async def test_a_run_without_history_asks_with_prompt_and_input() -> None:
    # RUN-11, RUN-12, RUN-14
    model = mock_model(["Done"])
    await create_agent(provider=model).send("Hi")
    request = model.calls[0]
    assert [(message.role, message.text) for message in request.messages] == [
        ("system", "You are a helpful assistant."),
        ("user", "Hi"),
    ]
    assert (request.model, request.tools, dict(request.settings)) == (None, (), {})


async def test_metadata_of_messages_stays_with_them() -> None:
    # RUN-16
    model = mock_model(["Done"])
    result = await create_agent(provider=model).send([user("Hi", note="mine")])
    assert result.messages[1].metadata == {"note": "mine"}


async def test_calls_of_the_input_that_have_no_result_run_first() -> None:
    # RUN-10
    log: list[str] = []
    model = mock_model(["Done"])
    history = [user("Hi"), assistant("", [ToolCall("c1", "a"), ToolCall("c2", "b")]), tool_result(ToolCall("c1", "a"), '"A"')]
    agent = create_agent(provider=model, tools=[plain("a", log=log), plain("b", "B", log=log)])
    result = await agent.send(history)
    assert log == ["b"]
    assert shape(result.messages)[1:] == ["user:Hi", "assistant:+a,b", "tool:a", "tool:b", "assistant:Done"]
    check_transcript(result.messages)


# ----------------------------------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [("stop", "stop"), ("length", "length"), ("content_filter", "content_filter"), ("error", "error"), ("weird", "other")],
)
async def test_a_final_reply_ends_with_the_models_own_reason(reason: str, wanted: str) -> None:
    # RUN-19, RUN-46
    result = await agent_of({"text": "Hm", "finish_reason": reason}).send("Hi")
    assert (result.finish_reason, result.text, result.steps) == (wanted, "Hm", 1)
    assert result.ok == (wanted == "stop")


async def test_what_a_result_holds() -> None:
    # RUN-49
    agent = agent_of(
        calls(("look", {"at": 1}), text="So"),
        "Done",
        name="bot",
        tools=[
            define_tool(
                name="look", description="Looks.", execute=lambda args: "seen", input={"type": "object", "properties": {"at": {}}}
            )
        ],
    )
    run = agent.stream("Hi")
    result = await run.result
    assert result.run_id == run.run_id
    assert (result.text, result.reasoning, result.finish_reason, result.steps, result.agent_name) == (
        "Done",
        None,
        "stop",
        2,
        "bot",
    )
    assert shape(result.messages)[1:] == shape(result.new_messages)
    assert [(call.id, call.name, call.args) for call in result.tool_calls] == [("call_1", "look", {"at": 1})]
    unset = ("approval_id", "object", "output_error", "budget", "guardrail", "abort_reason", "background_tasks")
    assert all(getattr(result, field) is None for field in unset)
    await collect(run)


async def test_running_out_of_steps() -> None:
    # RUN-18, RUN-20, RUN-22, RUN-48
    log: list[str] = []
    result = await agent_of(*[calls("a", text=f"t{n}") for n in range(3)], tools=[plain("a", log=log)], max_steps=3).send("Hi")
    assert (result.finish_reason, result.steps, len(log)) == ("max-steps", 3, 3)
    check_transcript(result.messages)


async def test_an_empty_reply_is_asked_for_again_once() -> None:
    model = mock_model(["", "", "never"])
    result = await create_agent(provider=model).send("Hi")
    assert len(model.calls) == 2
    assert result.finish_reason == "other"
    check_transcript(result.messages)
    assert (await agent_of("", "Done").send("Hi")).text == "Done"


# --------------------------------------------------------------------------------------------------------------------- failures


async def test_a_provider_failure_is_compacted_once() -> None:
    # ERR-20, ERR-21, RUN-24, RUN-47
    cause = RuntimeError("x" * 2_000)
    with pytest.raises(CompactedLLMProviderError) as caught:
        await create_agent(provider=mock_model([cause], name="p", default_model="m")).send("Hi")
    assert caught.value.__cause__ is cause
    compacted = caught.value.compacted
    assert (compacted.category, compacted.provider, compacted.model) == ("unknown", "p", "m")
    assert len(compacted.message) <= 500


async def test_a_rate_limit_is_told_apart() -> None:
    # ERR-22
    class TooMany(Exception):
        status_code = 429

    with pytest.raises(RateLimitError) as caught:
        await agent_of(TooMany("slow down")).send("Hi")
    assert caught.value.code == "LOUSHO_PROVIDER_RATE_LIMITED"


@pytest.mark.parametrize("answer", [None, 5, {"text": "x"}])
async def test_a_provider_that_returns_something_else_is_named(answer: Any) -> None:
    class Odd:
        name = "odd"
        default_model: str | None = "m"

        async def generate(self, options: GenerateOptions) -> Any:
            return answer

    with pytest.raises(ConfigurationError, match="GenerateResult") as caught:
        await create_agent(provider=Odd()).send("Hi")
    assert "odd" in caught.value.detail


async def test_a_stream_may_be_a_coroutine_that_returns_an_iterator() -> None:
    # EVT-54
    class Late(PolicyProvider):
        async def stream(self, options: GenerateOptions) -> AsyncIterator[Chunk]:
            async def chunks() -> AsyncIterator[Chunk]:
                yield TextChunk("Done")
                yield FinishChunk("stop")

            return chunks()

    run = create_agent(provider=Late(lambda options: "never")).stream("Hi")
    assert (await run.result).text == "Done"
    await collect(run)


async def test_a_provider_that_says_it_cannot_stream_is_asked_for_the_whole() -> None:
    # EVT-09
    class Not(ScriptedStream):
        def supports_streaming(self, model: str | None = None) -> bool:
            return False

        async def generate(self, options: GenerateOptions, /) -> GenerateResult:
            return GenerateResult("whole")

    run = create_agent(provider=Not(say("never"))).stream("Hi")
    assert "text.delta whole" in names(await collect(run))


async def test_a_streamed_reply_with_calls_and_any_reason_runs_them() -> None:
    # RUN-19, field W07
    stream = [ToolCallChunk(asks("a").tool_calls[0]), FinishChunk("stop")]
    result = await create_agent(provider=ScriptedStream(stream, say("Done")), tools=[plain("a")]).stream("Hi").result
    assert kinds(result.messages) == ["ok"]
    assert result.text == "Done"


def _exit(*args: Any) -> Any:
    raise SystemExit(3)


async def _exit_later(*args: Any) -> Any:
    await asyncio.sleep(0)
    raise SystemExit(3)


@pytest.mark.parametrize("how", [_exit, _exit_later])
@pytest.mark.parametrize("where", ["provider", "instructions", "tools", "approve", "needs_approval", "hook"])
async def test_sys_exit_in_a_callback_fails_its_run_and_no_other(where: str, how: Any) -> None:
    # A task that lets SystemExit out ends the event loop, and every run on it.
    class Hook:
        name = "hook"
        pre_tool_call = staticmethod(how)

    needs = {"approve": True, "needs_approval": how}.get(where, False)
    work = define_tool(name="work", description="Works.", execute=lambda args: "ok", needs_approval=needs)
    options: dict[str, Any] = {"provider": mock_model([calls("work"), "Done"]), "tools": [work], "approve": lambda call: True}
    options |= {
        "provider": {"provider": PolicyProvider(how)},
        "instructions": {"instructions": how},
        "tools": {"tools": how},
        "approve": {"approve": how},
        "needs_approval": {},
        "hook": {"hooks": [Hook()]},
    }[where]
    heard: list[Any] = []
    wanted = ConfigurationError if where in ("instructions", "tools") else AgentExecutionError
    with pytest.raises(wanted, match="SystemExit"):
        await create_agent(**options, on_event=heard.append).send("Hi")
    if where not in ("instructions", "tools"):
        check_events(heard)
        assert names(heard)[-1] == "run.done error"


async def test_sys_exit_in_a_listener_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    # EVT-D5
    result = await agent_of(calls("a"), "Done", tools=[plain("a")], on_event=_exit).send("Hi")
    assert result.ok
    assert sum("listener raised" in record.message for record in caplog.records) == 1


async def test_sys_exit_in_a_subagents_model_fails_its_task_only() -> None:
    child = create_agent(provider=PolicyProvider(_exit), name="w", description="W.")
    task = ("task", {"agent": "w", "prompt": "p", "description": "d"})
    result = await agent_of(calls(task), "Done", subagents={"w": child}).send("Hi")
    assert result.ok
    assert kinds(result.messages) == ["execution"]
