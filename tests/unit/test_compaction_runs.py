"""Compaction inside runs: when it acts, what it leaves in the run, its events, and that it never fails a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import cloudpickle
import pytest

from lousho_ray import (
    Compaction,
    CompactionInfo,
    CompactionInput,
    CompactionOutput,
    create_agent,
    create_compaction_hook,
    create_rate_limiter,
    summarize_strategy,
)
from lousho_ray.agent import Agent, named_limiters
from lousho_ray.cancellation import CancelToken
from lousho_ray.errors import ConfigurationError
from lousho_ray.events import CompactionStart, TextDone
from lousho_ray.messages import ToolCall, system, user
from lousho_ray.options import RateLimits
from lousho_ray.ports import GenerateOptions, GenerateResult
from lousho_ray.providers.failures import TruncatedStreamError, note_usage
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.retry import with_retry
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tokens import estimate_request_tokens
from lousho_ray.tools.tool import Tool, define_tool
from lousho_ray.usage import ProviderUsage
from tests.unit.compaction_support import check_wire
from tests.unit.loop_support import PolicyProvider, calls, collect, plain

READ: Tool[..., Any] = plain("read", "r" * 4_000)
"""About 830 tokens a result."""

SMALL: dict[str, Any] = {"context_window": 4_000, "protected_tokens": 1_000}
READS_AND_DONE = [*[calls("read")] * 8, "done"]


def reader(compaction: Any, script: Any = READS_AND_DONE, **options: Any) -> Agent:
    return create_agent(
        **{"provider": mock_model(script), "tools": [READ], "max_steps": 30, "runtime": "local", **options}, compaction=compaction
    )


def compactions(events: list[Any]) -> list[dict[str, Any]]:
    drop = ("runId", "seq", "timestamp", "v")
    return [
        {key: value for key, value in event.to_dict().items() if key not in drop}
        for event in events
        if event.type.startswith("compaction.")
    ]


# ----------------------------------------------------------------------------------------------------------- when, and what is left


async def test_a_run_is_pruned_before_the_call_that_would_be_too_large() -> None:
    # CMP-01, CMP-05, CMP-08, CMP-11, CMP-12, CMP-39
    infos: list[CompactionInfo] = []
    agent = reader({**SMALL, "on_compaction": infos.append})
    run = agent.stream("Go.")
    events = await collect(run)
    result = await run.result
    start, done = compactions(events)
    assert start == {
        "type": "compaction.start",
        "strategy": "prune",
        "tokensBefore": start["tokensBefore"],
        "contextWindow": 4_000,
        "thresholdTokens": 3_600,
    }
    assert start["tokensBefore"] > 3_600
    assert done == {
        "type": "compaction.done",
        "strategy": "prune",
        "tokensBefore": start["tokensBefore"],
        "tokensAfter": done["tokensAfter"],
        "prunedToolCallIds": ["call_1", "call_2", "call_3", "call_4"],
    }
    kinds = [event.type for event in events]
    assert kinds[kinds.index("compaction.start") - 1] == "step.start"
    provider: Any = agent.definition.provider
    sizes = [estimate_request_tokens(request) for request in provider.calls]
    assert max(sizes) <= 3_600
    assert done["tokensAfter"] in sizes
    assert result.finish_reason == "stop"
    assert sum(message.text.startswith("[pruned: read result, ") for message in result.messages) == 4
    assert [message.role for message in result.new_messages] == ["user", *["assistant", "tool"] * 8, "assistant"]
    check_wire([message.with_(content="x") if message.role == "tool" else message for message in result.messages[:-1]])
    assert infos == [CompactionInfo("prune", done["tokensBefore"], done["tokensAfter"], ("call_1", "call_2", "call_3", "call_4"))]


async def test_nothing_happens_at_the_threshold_and_something_above_it() -> None:
    # CMP-08, CMP-D2
    plain_run = reader(None, [calls("read"), calls("read"), "done"])
    await plain_run.send("Go.")
    provider: Any = plain_run.definition.provider
    window = estimate_request_tokens(provider.calls[-1])  # its tool definitions included
    for context_window, expected in ((window, 0), (window - 1, 2)):
        options = {"context_window": context_window, "threshold_percent": 1.0, "protected_tokens": 0}
        events = await collect(reader(options, [calls("read"), calls("read"), "done"]).stream("Go."))
        assert len(compactions(events)) == expected


async def test_the_run_keeps_its_one_list_of_messages() -> None:
    # CMP-11, CMP-D7
    class Watch:
        name = "watch"
        lists: list[Any]

        def pre_generate(self, ctx: Any) -> None:
            self.lists.append(ctx.messages)

    watch = Watch()
    watch.lists = []
    await reader({**SMALL, "summarizer": mock_model(["S"] * 9)}, hooks=[watch]).send("Go.")
    assert len({id(seen) for seen in watch.lists}) == 1


async def test_a_summary_is_a_side_call_of_the_run() -> None:
    # CMP-26, RUN-72, HOOK-13
    summarizer = mock_model(
        [{"text": "Read four.", "usage": {"input_tokens": 1_000, "output_tokens": 20}}] * 9, name="summ", default_model="summ-1"
    )
    agent = reader({**SMALL, "strategy": summarize_strategy(model=summarizer)})
    run = agent.stream("Go.")
    events = await collect(run)
    result = await run.result
    done = compactions(events)[1]
    assert done["summary"] is True
    assert "Read four." not in json.dumps([event.to_dict() for event in events])  # EVT-24
    side = [entry for entry in result.step_usage if entry.purpose is not None]
    assert [(entry.step, entry.purpose, entry.model) for entry in side] == [(6, "compaction", "summ-1")]
    assert result.usage.by_model["summ-1"].input_tokens == 1_000
    assert result.usage.model_calls == 9 + 1
    step_done = [event for event in events if event.type == "step.done"]
    assert step_done[5].usage.input_tokens != 1_000
    assert result.steps == 9
    assert [message.text for message in result.messages if message.role == "user"] == ["[Conversation summary]\nRead four."]
    assert result.new_messages[0].role == "assistant"  # what the run added and is still there, the summary is of all before
    assert result.new_messages == result.messages[2:]


async def test_ids_of_calls_that_are_in_a_summary_are_not_given_again() -> None:
    same = {"text": "", "tool_calls": [{"name": "read", "args": {}, "id": "same"}]}
    result = await reader({**SMALL, "strategy": summarize_strategy(model=mock_model(["S"] * 9))}, [*[same] * 8, "done"]).send("Go.")
    ids = [call.id for call in result.tool_calls]
    assert len(ids) == len(set(ids)) == 8


async def test_a_limit_that_a_summary_call_reaches_stops_before_the_model_call() -> None:
    # CMP-D9, RUN-72
    summarizer = mock_model([{"text": "S", "usage": {"input_tokens": 90_000, "output_tokens": 1}}])
    agent = reader({**SMALL, "strategy": summarize_strategy(model=summarizer)}, limits={"max_tokens": 80_000})
    run = agent.stream("Go.")
    events = await collect(run)
    result = await run.result
    assert result.finish_reason == "budget-exceeded"
    assert result.budget is not None
    assert (result.budget.limit, result.budget.value > 90_000) == ("maxTokens", True)
    provider: Any = agent.definition.provider
    assert len(provider.calls) == 5
    assert [event.finish_reason for event in events if event.type == "step.done"][-1] == "budget-exceeded"
    assert any(message.text == "[Conversation summary]\nS" for message in result.messages)


async def test_a_summary_call_passes_the_run_s_limiter() -> None:
    # CMP-26
    class Counting:
        tokens: list[int]

        async def acquire(self, tokens: int) -> Any:
            self.tokens.append(tokens)
            return Permit()

    class Permit:
        def settle(self, tokens: int) -> None: ...
        def release(self) -> None: ...

    limiter = Counting()
    limiter.tokens = []
    agent = reader({**SMALL, "strategy": summarize_strategy(model=mock_model(["S"] * 9))}, rate_limit=limiter)
    result = await agent.send("Go.")
    assert len(limiter.tokens) == result.usage.model_calls == 10


async def test_an_abort_ends_the_summary_call_and_the_run() -> None:
    # CMP-10, CMP-26
    asked = asyncio.Event()

    async def never(request: GenerateOptions) -> GenerateResult:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    summarizer = PolicyProvider(never)
    run = reader({**SMALL, "strategy": summarize_strategy(model=summarizer)}).stream("Go.")
    gathering = asyncio.ensure_future(collect(run))
    await asked.wait()
    run.abort("enough")
    events = await gathering
    result = await run.result
    assert result.finish_reason == "aborted"
    assert summarizer.running == 0
    start, done = compactions(events)
    assert (done["tokensAfter"], done["error"]["message"]) == (start["tokensBefore"], "The run was stopped.")
    assert [event.type for event in events][-3:] == ["compaction.done", "step.done", "run.done"]
    assert not any(message.text.startswith("[pruned") for message in result.messages)


async def test_the_window_a_provider_states_counts() -> None:
    # LES-01
    model = mock_model(READS_AND_DONE, default_model="gpt-4o")
    model.context_window = 4_000  # type: ignore[attr-defined]
    result = await reader(True, provider=model).send("Go.")
    assert any(message.text.startswith("[pruned") for message in result.messages)


async def test_a_small_window_is_not_protected_as_a_whole_by_default() -> None:
    result = await reader({"context_window": 4_000}).send("Go.")
    assert any(message.text.startswith("[pruned") for message in result.messages)
    result = await reader({"context_window": 4_000, "protected_tokens": 40_000}).send("Go.")
    assert not any(message.text.startswith("[pruned") for message in result.messages)


# -------------------------------------------------------------------------------------------------------------- without gain


async def test_a_compaction_in_vain_is_not_repeated_until_there_is_more_to_work_on(caplog: pytest.LogCaptureFixture) -> None:
    # LES-18, CMP-39, field case K02: tools and prompt alone are above the limit
    script = [*[calls("tiny")] * 6, *[calls("read")] * 2, calls("tiny"), "done"]
    agent = reader(
        {"context_window": 1_000, "protected_tokens": 0},
        script,
        instructions="word " * 1_200,
        tools=[plain("tiny", 1), READ],
    )
    events = await collect(agent.stream("Go."))
    found = compactions(events)
    assert [part["type"] for part in found[:2]] == ["compaction.start", "compaction.done"]
    assert found[1]["noop"] is True
    assert found[1]["tokensAfter"] == found[1]["tokensBefore"]
    assert found[1]["prunedToolCallIds"] == []
    worked = [part for part in found if part.get("prunedToolCallIds")]
    assert [part["prunedToolCallIds"] for part in worked] == [["call_7"], ["call_8"]]
    assert len(found) <= 8
    [warning] = [record.message for record in caplog.records if "more than the context window" in record.message]
    assert "1,000" in warning


async def test_one_message_that_is_too_large_alone_is_tried_once() -> None:
    # LES-18, field case K02
    summarizer = mock_model(["S"] * 20)
    agent = reader({**SMALL, "summarizer": summarizer}, [*[calls("tiny")] * 5, "done"], tools=[plain("tiny", 1)])
    events = await collect(agent.stream("x" * 50_000))
    assert len(compactions(events)) <= 4
    assert len(summarizer.calls) <= 1


async def test_a_summary_longer_than_what_it_replaces_is_asked_for_only_once_per_quarter() -> None:
    # CMP-25, LES-59, field case K02: the summarizer returns 5,000 tokens
    summarizer = mock_model(["word " * 5_000] * 99)
    said = [calls("say", text="a" * 900)] * 24
    agent = reader({**SMALL, "summarizer": summarizer}, [*said, "done"], tools=[plain("say", 1)])
    infos: list[Any] = []
    result = await agent.send("Go.")
    assert result.finish_reason == "stop"
    assert 1 <= len(summarizer.calls) <= 5
    assert infos == []


# ------------------------------------------------------------------------------------------------------------------ failures


class Failing:
    name = "failing"

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.runs = 0

    def compact(self, input: CompactionInput) -> CompactionOutput:
        self.runs += 1
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("bad strategy"), SystemExit(3), ConfigurationError("bad strategy")])
async def test_a_strategy_that_raises_changes_nothing_and_the_run_goes_on(error: BaseException) -> None:
    # CMP-10, CMP-12
    infos: list[CompactionInfo] = []

    async def listen(info: CompactionInfo) -> None:
        infos.append(info)
        raise ValueError("a listener that raises")

    agent = reader({**SMALL, "strategy": Failing(error), "on_compaction": listen})
    run = agent.stream("Go.")
    events = await collect(run)
    assert (await run.result).finish_reason == "stop"
    done = compactions(events)[1]
    assert done["error"]["message"] == infos[0].error
    assert done["tokensAfter"] == done["tokensBefore"]
    assert done["noop"] is True
    assert ("bad strategy" in str(infos[0].error)) == (not isinstance(error, SystemExit))


async def test_the_same_list_back_means_that_nothing_was_done() -> None:
    # CMP-37
    class Same:
        name = "same"

        async def compact(self, input: CompactionInput) -> CompactionOutput:
            input.messages.clear()  # not the run's own list
            return CompactionOutput(messages=input.messages)

    infos: list[Any] = []
    result = await reader({**SMALL, "strategy": Same(), "on_compaction": infos.append}).send("Go.")
    assert result.finish_reason == "stop"
    assert len(result.messages) == 2 + 16 + 1
    assert infos == []


async def test_a_summarizer_that_fails_falls_back_and_is_named_in_the_event() -> None:
    # CMP-10, CMP-24, LES-19, field case K04
    agent = reader({**SMALL, "strategy": summarize_strategy(model=mock_model([RuntimeError("down")] * 9))})
    run = agent.stream("Go.")
    events = await collect(run)
    assert (await run.result).finish_reason == "stop"
    start, done = compactions(events)[:2]
    assert (start["strategy"], done["strategy"], done["applied"]) == ("summarize", "summarize", "prune")
    assert "down" in done["error"]["message"]
    assert done["prunedToolCallIds"]
    assert "summary" not in done


# --------------------------------------------------------------------------------------------------------------------- hooks


async def test_the_compaction_hook_sees_what_other_hooks_added() -> None:
    # CMP-05
    class Note:
        name = "note"

        def pre_generate(self, ctx: Any) -> None:
            ctx.request.messages.append(user("n" * 20_000))

    agent = reader(SMALL, ["done"], hooks=[Note()])
    events = await collect(agent.stream("Go."))
    assert compactions(events)[0]["tokensBefore"] > 4_000
    provider: Any = agent.definition.provider
    assert estimate_request_tokens(provider.calls[0]) == compactions(events)[0]["tokensBefore"]


async def test_the_hook_by_itself_does_what_the_option_does_and_keeps_runs_apart() -> None:
    # CMP-06
    hook = create_compaction_hook(**SMALL)
    assert hook.name == "compaction"
    agents = [reader(None, hooks=[hook]) for _ in range(3)]
    results = await asyncio.gather(*(agent.send("Go.") for agent in agents))
    for result in results:
        assert sum(message.text.startswith("[pruned") for message in result.messages) == 4


async def test_a_hook_may_only_emit_compactions_and_only_when_somebody_listens() -> None:
    # HOOK-13
    seen: list[Any] = []

    class Emitting:
        name = "emitting"

        def pre_generate(self, ctx: Any) -> None:
            seen.append(ctx.emit)
            if ctx.emit is not None:
                ctx.emit(CompactionStart, strategy="mine", tokens_before=1, context_window=2, threshold_tokens=1)
                with pytest.raises(ConfigurationError, match="TextDone"):
                    ctx.emit(TextDone, text="forged")

    agent = reader(None, ["done", "done"], hooks=[Emitting()])
    await agent.send("Go.")
    assert seen == [None]
    assert [part["strategy"] for part in compactions(await collect(agent.stream("Go.")))] == ["mine"]


async def test_any_hook_can_make_a_side_call() -> None:
    # HOOK-13, RUN-72
    judge = mock_model([{"text": "fine", "usage": {"input_tokens": 7, "output_tokens": 1}}] * 9, default_model="judge-1")

    class Judge:
        name = "judge"

        async def post_generate(self, ctx: Any, reply: Any) -> None:
            answer = await ctx.generate(judge, GenerateOptions([user("Fine?")]), "judge")
            assert answer.text == "fine"

        async def pre_tool_call(self, ctx: Any) -> None:
            await ctx.generate(judge, GenerateOptions([user("May it?")]), "gate")

    result = await reader(None, [calls("read"), "done"], hooks=[Judge()]).send("Go.")
    purposes = [(entry.step, entry.purpose) for entry in result.step_usage]
    assert purposes == [(1, None), (1, "judge"), (1, "gate"), (2, None), (2, "judge")]
    assert result.usage.by_model["judge-1"].calls == 3


async def test_a_side_call_that_was_tried_again_costs_what_its_attempts_told() -> None:
    # COST-06
    def fail(_: GenerateOptions) -> Any:
        error = TruncatedStreamError("cut")
        note_usage(error, ProviderUsage(50, 2))
        raise error

    inner = mock_model([fail, {"text": "fine", "usage": {"input_tokens": 7, "output_tokens": 1}}], default_model="judge-1")
    judge = with_retry(inner, backoff={"initial_ms": 0})

    class Judge:
        name = "judge"

        async def post_generate(self, ctx: Any, reply: Any) -> None:
            await ctx.generate(judge, GenerateOptions([user("Fine?")]), "judge")

    result = await reader(None, ["done"], hooks=[Judge()]).send("Go.")
    judged = [(entry.usage.prompt_tokens, entry.estimated) for entry in result.step_usage if entry.purpose == "judge"]
    assert judged == [(50, True), (7, False)]
    assert (result.usage.by_model["judge-1"].input_tokens, result.usage.by_model["judge-1"].calls) == (57, 2)


async def test_the_forced_answer_of_a_run_out_of_steps_is_compacted_too() -> None:
    # CMP-08
    agent = reader({**SMALL, "threshold_percent": 0.5}, [*[calls("read")] * 3, '{"n": 1}'], max_steps=3, output={"type": "object"})
    result = await agent.send("Go.")
    assert result.object == {"n": 1}
    provider: Any = agent.definition.provider
    assert estimate_request_tokens(provider.calls[-1]) <= 2_000 < sum(map(estimate_request_tokens, provider.calls[-2:]))


# ------------------------------------------------------------------------------------------------------------------ elsewhere


def test_an_agent_with_compaction_travels() -> None:
    # CMP-D7
    agent = reader({**SMALL, "summarizer": mock_model(["S"])})
    definition = cloudpickle.loads(cloudpickle.dumps(agent.definition.portable()))
    assert definition.compaction.strategy.name == "two-phase"
    assert definition.compaction.context_window == 4_000


def test_named_limiters_of_a_summarizer_are_found() -> None:
    limiter = create_rate_limiter(RateLimits(requests_per_minute=5), name="summaries")
    agent = reader({"summarizer": with_rate_limit(mock_model(["S"]), limiter)})
    assert named_limiters(agent.definition) == [limiter]


def test_compaction_is_checked_when_the_agent_is_made() -> None:
    # CMP-02
    with pytest.raises(ConfigurationError) as caught:
        reader({"treshold_percent": 1})
    assert caught.value.field == "compaction.treshold_percent"
    assert "threshold_percent" in str(caught.value)
    assert reader(Compaction(context_window=9)).definition.compaction is not None
    assert reader(False).definition.compaction is None


async def test_a_sub_agent_has_its_own_compaction() -> None:
    # CMP-26, SUB-40
    summarizer = mock_model([{"text": "S", "usage": {"input_tokens": 5_000, "output_tokens": 1}}] * 9, default_model="summ-1")
    child = reader({**SMALL, "strategy": summarize_strategy(model=summarizer)}, description="Reads.")
    task: Mapping[str, Any] = calls(("task", {"agent": "reader", "prompt": "Read.", "description": "reads it all"}))
    lead = reader({"context_window": 100_000}, [task, "done"], tools=[], subagents={"reader": child})
    run = lead.stream("Go.")
    events = await collect(run)
    result = await run.result
    found = [event for event in events if event.type == "compaction.done"]
    assert [event.subagent.name for event in found] == ["reader"]
    assert result.usage.by_model["summ-1"].input_tokens == 5_000
    assert result.usage.delegated is not None


async def test_a_cancelled_send_leaves_no_compaction_behind() -> None:
    token = CancelToken()

    def stop(request: GenerateOptions) -> str:
        token.cancel("enough")
        return "late"

    agent = reader({**SMALL, "strategy": summarize_strategy(model=PolicyProvider(stop))})
    result = await agent.send("Go.", cancel=token)
    assert result.finish_reason == "aborted"
    assert not any("summary" in message.text for message in result.messages)
    assert ToolCall("call_5", "read", "{}") in result.messages[-2].tool_calls
    assert result.messages[0] == system("You are a helpful assistant.")


async def test_a_repeated_read_is_answered_from_its_earlier_result_until_something_was_written() -> None:
    # LES-60
    log: list[str] = []

    def made(name: str, effect: Any, **more: Any) -> Any:
        async def execute(args: Any) -> str:
            log.append(name)
            return f"{name} {len(log)}"

        return define_tool(name=name, description=f"Tool {name}.", execute=execute, effect=effect, **more)

    tools = [made("look", "read"), made("write", None), made("again", "idempotent")]
    script = [calls("look"), calls("look", "again"), calls("write"), calls("look"), calls("look"), "done"]
    agent = reader({**SMALL, "memoize_tools": True}, [*script, *script], tools=tools)
    first = await agent.send("Go.")
    assert log == ["look", "again", "write", "look"]
    texts = [message.text for message in first.messages if message.tool_name == "look"]
    assert texts[0] == '"look 1"'
    assert json.loads(texts[1]) == {"note": "Answered from the earlier identical call of this run.", "result": "look 1"}
    assert texts[2] == '"look 4"'
    await agent.send("Go.")
    assert len(log) == 8  # another run remembers nothing of this one


async def test_calls_with_other_arguments_or_approvals_or_errors_are_made_anew() -> None:
    # LES-60
    log: list[Any] = []

    async def look(args: Any) -> str:
        log.append(args)
        raise ValueError("gone")

    async def asking(args: Any) -> str:
        log.append("asked")
        return "ok"

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [
        define_tool(name="look", description="Looks.", execute=look, effect="read", input=schema),
        define_tool(name="ask", description="Asks.", execute=asking, effect="read", needs_approval=True),
    ]
    script = [calls(("look", {"n": 1})), calls(("look", {"n": 2})), calls(("look", {"n": 1})), calls("ask"), calls("ask"), "done"]
    result = await reader({"memoize_tools": True}, script, tools=tools, approve=lambda call: True).send("Go.")
    assert result.finish_reason == "stop"
    assert len(log) == 5


async def test_a_marker_shows_what_the_preview_option_says() -> None:
    # LES-60
    result = await reader({**SMALL, "preview_chars": 10}).send("Go.")
    assert result.messages[3].text == '[pruned: read result, 4002 chars]\narguments: {}\nbegins: "rrrrrrrrr'


async def test_a_summarizer_without_a_price_is_named_where_costs_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    # RUN-72
    free = mock_model(READS_AND_DONE, default_model="gpt-4o")
    agent = reader(
        {**SMALL, "strategy": summarize_strategy(model=mock_model(["S"] * 9, default_model="unpriced-1"))},
        provider=free,
        limits={"max_cost_usd": 100},
    )
    result = await agent.send("Go.")
    assert result.usage.cost_usd is None
    assert sum("'unpriced-1'" in record.message and "max_cost_usd" in record.message for record in caplog.records) == 1


async def test_after_a_rejected_summary_new_results_are_pruned_as_they_leave_the_tail() -> None:
    # CMP-25, LES-18
    summarizer = mock_model(["word " * 20_000] * 99)
    script = [*[calls("say", text="a" * 3_000)] * 18, *[calls("brief")] * 4, "done"]
    options = {"context_window": 12_000, "protected_tokens": 300, "summarizer": summarizer}
    agent = reader(options, script, tools=[plain("brief", "b" * 1_000), plain("say", 1)])
    events = await collect(agent.stream("Go."))
    found = [part for part in compactions(events) if part["type"] == "compaction.done"]
    assert "rejected" in found[0]["error"]["message"]
    assert found[0]["noop"] is True
    worked = [part["prunedToolCallIds"] for part in found if part["prunedToolCallIds"]]
    assert worked == [["call_19"], ["call_20"], ["call_21"]]
    assert len(summarizer.calls) == 1
