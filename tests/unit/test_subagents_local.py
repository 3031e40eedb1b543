"""Sub-agents in one process: setup, what a child sees, how it ends, what it inherits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, PropagatingToolError
from lousho_ray.limits.limiter import create_rate_limiter
from lousho_ray.messages import ToolCall
from lousho_ray.ports import GenerateOptions, GenerateResult, TextChunk, ToolContext
from lousho_ray.providers.prices import register_model
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import (
    Gate,
    PolicyProvider,
    ScriptedStream,
    agent_of,
    asks,
    calls,
    check_transcript,
    collect,
    failing,
    kinds,
    names,
    plain,
    results,
    until,
)


def task(agent: str, prompt: str = "Do it", description: str = "a task") -> tuple[str, dict[str, str]]:
    return ("task", {"agent": agent, "prompt": prompt, "description": description})


def worker(*turns: Any, name: str = "worker", **options: Any) -> Any:
    return agent_of(*turns, name=name, description=f"Does {name} work.", **options)


# --------------------------------------------------------------------------------------------------------------------- setup


def test_a_subagent_needs_a_description() -> None:
    # SUB-01, CA-21
    with pytest.raises(ConfigurationError, match="description") as caught:
        agent_of("x", subagents={"worker": agent_of("y")})
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", "subagents")


@pytest.mark.parametrize("subagents", [[1], {"worker": "agent"}, {"bad name": None}, {1: None}, "worker"])
def test_what_is_no_mapping_of_agents_is_refused(subagents: Any) -> None:
    # SUB-01
    if subagents == {"bad name": None}:
        subagents = {"bad name": worker("x")}
    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", subagents=subagents)
    assert caught.value.field == "subagents"


@pytest.mark.parametrize("name", ["task"])
def test_the_names_of_the_tools_are_reserved(name: str) -> None:
    # SUB-02, TOOL-10, CA-21
    with pytest.raises(ConfigurationError, match=name):
        agent_of("x", subagents={"worker": worker("x")}, tools=[plain(name)])


@pytest.mark.parametrize("value", [-1, True, 1.5, "1"])
def test_a_bad_depth_is_refused(value: Any) -> None:
    # SUB-06
    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", max_subagent_depth=value)
    assert caught.value.field == "max_subagent_depth"


async def test_the_prompt_lists_the_subagents_and_the_agent_itself_is_not_changed() -> None:
    # SUB-04
    model = mock_model(["Done", "Done"])
    lead = create_agent(
        provider=model, instructions="Lead well.", subagents={"a": worker("x", name="a"), "b": worker("y", name="b")}
    )
    await lead.send("Go")
    await lead.send("Go")
    for call in model.calls:
        prompt = call.messages[0].text
        assert prompt.startswith("Lead well.\n\n")
        assert "- a: Does a work.\n- b: Does b work." in prompt
        assert prompt.count("Available sub-agents") == 1
        assert [tool.name for tool in call.tools] == ["task"]
    schema = model.calls[0].tools[0].parameters
    assert schema["properties"]["agent"]["enum"] == ["a", "b"]
    assert set(schema["required"]) == {"agent", "prompt", "description"}
    assert lead.definition.instructions == "Lead well."


async def test_at_depth_zero_there_is_no_task_tool() -> None:
    # SUB-06
    model = mock_model(["Done"])
    await create_agent(provider=model, subagents={"a": worker("x")}, max_subagent_depth=0).send("Go")
    assert model.calls[0].tools == ()
    assert "sub-agents" not in model.calls[0].messages[0].text


@pytest.mark.parametrize(("depth", "offered"), [(1, [True, False, False]), (2, [True, True, False]), (3, [True, True, True])])
async def test_the_top_levels_depth_rules_the_whole_tree(depth: int, offered: list[bool]) -> None:
    # SUB-06
    def model_of(child: str) -> PolicyProvider:
        def policy(options: GenerateOptions) -> Any:
            seen.append(any(tool.name == "task" for tool in options.tools))
            return asks(task(child)) if seen[-1] and options.messages[-1].role == "user" else "Done"

        return PolicyProvider(policy)

    seen: list[bool] = []
    d = worker("d", name="d")
    c = create_agent(provider=model_of("d"), name="c", description="C.", subagents={"d": d}, max_subagent_depth=9)
    b = create_agent(provider=model_of("c"), name="b", description="B.", subagents={"c": c}, max_subagent_depth=0)
    await create_agent(provider=model_of("b"), subagents={"b": b}, max_subagent_depth=depth).send("Go")
    first_calls = seen[: len([flag for flag in offered if flag]) + 1][:3]
    assert first_calls == offered[: len(first_calls)]


# ------------------------------------------------------------------------------------------------------------------ the task


async def test_a_child_sees_only_its_own_instructions_and_the_prompt() -> None:
    # SUB-08
    model = mock_model(["Found it"])
    child = create_agent(provider=model, name="digger", description="Digs.", instructions="Dig deep.")
    lead = agent_of(calls(task("digger", "Dig at X")), "Done", instructions="Secret lead text", subagents={"digger": child})
    result = await lead.session().send("Lead input", instructions="Per call", metadata={"m": 1})
    assert [(message.role, message.text) for message in model.calls[0].messages] == [("system", "Dig deep."), ("user", "Dig at X")]
    assert results(result.messages) == ["Found it\n\n[sub-agent 'digger': 1 step, finish reason 'stop', taskId 'task_1']"]


async def test_the_footer_counts_steps_and_tasks() -> None:
    # SUB-09, SUB-15
    child = worker(calls("look"), "Found", "Again", tools=[plain("look")])
    lead = agent_of(calls(task("worker")), calls(task("worker")), "Done", subagents={"worker": child})
    first, second = results((await lead.send("Go")).messages)
    assert first.endswith("[sub-agent 'worker': 2 steps, finish reason 'stop', taskId 'task_1']")
    assert second.endswith("[sub-agent 'worker': 1 step, finish reason 'stop', taskId 'task_2']")


async def test_length_counts_as_success() -> None:
    # SUB-10
    child = worker({"text": "Half", "finish_reason": "length"})
    result = await agent_of(calls(task("worker")), "Done", subagents={"worker": child}).send("Go")
    assert kinds(result.messages) == ["ok"]
    assert "finish reason 'length'" in results(result.messages)[0]


async def test_every_other_end_is_an_error_the_lead_reads() -> None:
    # SUB-10, SUB-11
    ends: dict[str, Any] = {
        "out": worker(calls("look"), name="out", tools=[plain("look")], max_steps=1),
        "broken": worker(RuntimeError("model down"), name="broken"),
        "poor": worker(
            calls("look", usage={"input_tokens": 5, "output_tokens": 5}),
            name="poor",
            tools=[plain("look")],
            limits={"max_tokens": 1},
        ),
        "filtered": worker({"text": "", "finish_reason": "content_filter"}, name="filtered"),
        "propagating": worker(calls("bad"), name="propagating", tools=[failing("bad", PropagatingToolError("stop"))]),
    }
    result = await agent_of(calls(*[task(name) for name in ends]), "Done", subagents=ends).send("Go")
    assert result.ok
    assert kinds(result.messages) == ["execution"] * len(ends)
    texts = dict(zip(ends, (item["message"] for item in results(result.messages)), strict=True))
    assert "'out'" in texts["out"]
    assert "1 step" in texts["out"]
    assert "model down" in texts["broken"]
    assert texts["poor"] == "Sub-agent 'poor' stopped at the maxTokens limit"
    assert "content_filter" in texts["filtered"]
    assert "stop" in texts["propagating"]
    assert result.tool_errors == len(ends)
    check_transcript(result.messages)


async def test_an_unlisted_agent_is_a_validation_error_that_lists_the_names() -> None:
    # SUB-12
    lead = agent_of(calls(task("nobody")), "Done", subagents={"a": worker("x", name="a"), "b": worker("y", name="b")})
    result = await lead.send("Go")
    payload = results(result.messages)[0]
    assert payload["kind"] == "validation"
    assert "'a' or 'b'" in payload["message"]
    assert result.ok


async def test_tasks_of_one_turn_run_in_parallel_and_answer_in_call_order() -> None:
    # SUB-14
    gates = {name: Gate("wait", name) for name in "abc"}
    children = {name: worker(calls("wait"), f"I am {name}", name=name, tools=[gates[name].tool]) for name in "abc"}
    sending = asyncio.ensure_future(agent_of(calls(*[task(name) for name in "abc"]), "Done", subagents=children).send("Go"))
    for name in "cab":
        await gates[name].running.wait()
    for name in "cab":
        gates[name].go.set()
    texts = results((await sending).messages)
    assert [text.split("\n")[0] for text in texts] == ["I am a", "I am b", "I am c"]


async def test_tasks_are_capped_by_tool_concurrency() -> None:
    # SUB-14
    go = asyncio.Event()

    async def wait(options: GenerateOptions) -> str:
        await go.wait()
        return "ok"

    provider = PolicyProvider(wait)
    child = create_agent(provider=provider, name="worker", description="Works.")
    lead = agent_of(calls(*[task("worker")] * 6), "Done", subagents={"worker": child}, tool_concurrency=2)
    sending = asyncio.ensure_future(lead.send("Go"))
    await until(lambda: provider.running == 2)
    go.set()
    assert (await sending).ok
    assert provider.most == 2


async def test_parallel_children_keep_their_own_order_in_the_merged_stream() -> None:
    # SUB-47, SUB-48, EVT-42
    children = {name: worker(calls("look"), "Found", name=name, tools=[plain("look")]) for name in "abcd"}
    turn = {"tool_calls": [{"name": "task", "args": task(name)[1], "id": f"t_{name}"} for name in "abcd"]}
    run = agent_of(turn, "Done", subagents=children).stream("Go")
    events = await collect(run)  # collect checks the rules of each part
    assert {event.subagent.name for event in events if event.subagent is not None} == set("abcd")
    first_end = names(events).index("tool.done task")
    assert all(
        event.subagent is None for event in events[max(i for i, n in enumerate(names(events)) if n == "tool.done task") + 1 :]
    )
    assert first_end > 0


# ---------------------------------------------------------------------------------------------------------------- inheritance


async def test_what_a_child_inherits() -> None:
    # SUB-41, SUB-42, SUB-43, CA-25
    seen: list[ToolContext] = []

    async def look(args: Any, ctx: ToolContext) -> str:
        seen.append(ctx)
        return "ok"

    look_tool = define_tool(name="look", description="Looks.", execute=look)
    model = mock_model([calls("look"), "Found"])
    child = create_agent(provider=model, name="w", description="W.", tools=[look_tool], model_settings={"seed": 1})
    lead = agent_of(calls(task("w")), "Done", subagents={"w": child}, model_settings={"temperature": 1, "seed": 2})
    await lead.session(id="s1").send("Go", principal="me", model_settings={"top_p": 0.5})
    assert seen[0].principal == "me"
    assert seen[0].session_id is None
    assert [message.role for message in seen[0].messages] == ["user"]
    assert dict(model.calls[0].settings) == {"seed": 1}


@pytest.mark.parametrize(("own", "wanted"), [(None, 2), (4, 4), ("unbounded", 6)])
async def test_tool_concurrency_is_inherited_unless_the_child_has_its_own(own: Any, wanted: int) -> None:
    # SUB-42
    running = most = 0
    go = asyncio.Event()

    async def work(args: Any) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return "ok"

    options = {} if own is None else {"tool_concurrency": own}
    child = worker(calls(*["work"] * 6), "Found", tools=[define_tool(name="work", description="Works.", execute=work)], **options)
    lead = agent_of(calls(task("worker")), "Done", subagents={"worker": child}, tool_concurrency=2)
    sending = asyncio.ensure_future(lead.send("Go"))
    await until(lambda: running == wanted)
    for _ in range(20):
        await asyncio.sleep(0)
    assert running == wanted
    go.set()
    await sending
    assert most == wanted


async def test_the_leads_approver_decides_the_childs_calls() -> None:
    # SUB-53
    asked: list[Any] = []

    def approve(call: Any) -> bool:
        asked.append((call["tool_name"], call["agent_name"]))
        return False

    gated = define_tool(name="gated", description="Gated.", execute=lambda args: "ran", needs_approval=True)
    child = worker(calls("gated"), "Refused", tools=[gated], approve=lambda call: True)
    result = await agent_of(calls(task("worker")), "Done", subagents={"worker": child}, approve=approve).send("Go")
    assert asked == [("gated", "worker")]
    assert result.ok


# ------------------------------------------------------------------------------------------------------------------- cancelling


async def test_an_abort_reaches_every_child_and_waits_for_it() -> None:
    # RUN-53, SUB-29, SUB-41
    gates = [Gate("wait") for _ in range(3)]
    children = {f"w{i}": worker(calls("wait"), name=f"w{i}", tools=[gate.tool]) for i, gate in enumerate(gates)}
    run = agent_of(calls(*[task(name) for name in children]), subagents=children).stream("Go")
    for gate in gates:
        await gate.running.wait()
    run.abort("enough")
    events = await collect(run)
    result = await run.result
    assert result.finish_reason == "aborted"
    assert [gate.cancelled for gate in gates] == [1, 1, 1]
    assert kinds(result.messages) == ["not-run"] * 3
    assert names(events)[-1] == "run.done aborted"
    check_transcript(result.messages)


async def test_a_deaf_model_of_a_child_is_abandoned_and_says_nothing_after_the_end() -> None:
    # RUN-55, SUB-29
    go = asyncio.Event()
    provider = ScriptedStream([TextChunk("a"), go, TextChunk("late")], deaf=True)
    child = create_agent(provider=provider, name="worker", description="Works.")
    run = agent_of(calls(task("worker")), subagents={"worker": child}).stream("Go")
    await provider.reached(0, 1).wait()
    run.abort("enough")
    events = await collect(run)
    assert names(events)[-1] == "run.done aborted"
    go.set()
    await until(lambda: provider.closed)
    assert not any("late" in name for name in names(events))


async def test_a_childs_spend_counts_when_it_is_aborted() -> None:
    # SUB-32
    gate = Gate("wait")
    child = worker(calls("wait", usage={"input_tokens": 7, "output_tokens": 3}), tools=[gate.tool])
    lead = agent_of(calls(task("worker"), usage={"input_tokens": 1, "output_tokens": 1}), subagents={"worker": child})
    run = lead.stream("Go")
    await gate.running.wait()
    run.abort()
    result = await run.result
    assert result.usage.total_tokens == 12
    assert result.usage.delegated is not None
    assert result.usage.delegated.total_tokens == 10


# ----------------------------------------------------------------------------------------------------------- usage and limiters


async def test_usage_of_children_is_in_the_totals_and_shown_again() -> None:
    # SUB-32, COST-07, RUN-71
    register_model(id="m-lead", provider="x", context_window=10, input_cost_per_mtok=1_000_000.0, output_cost_per_mtok=0.0)
    register_model(id="m-child", provider="x", context_window=10, input_cost_per_mtok=2_000_000.0, output_cost_per_mtok=0.0)
    child = create_agent(
        provider=mock_model([{"text": "Found", "usage": {"input_tokens": 3, "output_tokens": 1}}] * 2, default_model="m-child"),
        name="w",
        description="W.",
    )
    turns = [
        calls(task("w"), task("w"), usage={"input_tokens": 5, "output_tokens": 2}),
        {"text": "Done", "usage": {"input_tokens": 4}},
    ]
    result = await create_agent(provider=mock_model(turns, default_model="m-lead"), subagents={"w": child}).send("Go")
    usage = result.usage
    assert (usage.input_tokens, usage.output_tokens, usage.model_calls, usage.cost_usd) == (15, 4, 4, 21.0)
    assert {model: (used.input_tokens, used.calls, used.cost_usd) for model, used in usage.by_model.items()} == {
        "m-lead": (9, 2, 9.0),
        "m-child": (6, 2, 12.0),
    }
    assert usage.delegated is not None
    assert (usage.delegated.input_tokens, usage.delegated.model_calls, usage.delegated.runs) == (6, 2, 2)
    assert usage.delegated.cost_usd == 12.0
    assert len(result.step_usage) == 2


async def test_a_child_of_unknown_price_makes_the_cost_unknown() -> None:
    # COST-11, RUN-71
    register_model(id="m-known", provider="x", context_window=10, input_cost_per_mtok=1.0, output_cost_per_mtok=1.0)
    child = create_agent(provider=mock_model(["Found"], default_model="m-unknown"), name="w", description="W.")
    lead = create_agent(provider=mock_model([calls(task("w")), "Done"], default_model="m-known"), subagents={"w": child})
    result = await lead.send("Go")
    assert result.usage.cost_usd is None
    assert result.usage.by_model["m-known"].cost_usd is not None


async def test_a_tree_stops_at_the_leads_budget_plus_one_call() -> None:
    # C08, BUD-17, BUD-22: three levels, $0.30 a call, $1 for the lead; what a child spent before it failed counts
    register_model(id="m-dear", provider="x", context_window=10, input_cost_per_mtok=300_000.0, output_cost_per_mtok=0.0)
    used = {"input_tokens": 1, "output_tokens": 0}

    def dear(*turns: Any, name: str, **options: Any) -> Any:
        provider = mock_model(list(turns), default_model="m-dear")
        return create_agent(provider=provider, name=name, description="Works.", max_subagent_depth=2, **options)

    def fail(_: GenerateOptions) -> Any:
        raise ValueError("out of order")

    low = dear(calls("gone", usage=used), fail, name="low")
    middle = dear(calls(task("low"), usage=used), {"text": "m", "usage": used}, name="middle", subagents={"low": low})
    top = dear(calls(task("middle"), usage=used), name="top", subagents={"middle": middle}, limits={"max_cost_usd": 1})
    result = await top.send("Go")
    assert (result.finish_reason, result.usage.model_calls, result.usage.cost_usd) == ("budget-exceeded", 4, 1.2)


async def test_nested_usage_adds_up_once() -> None:
    # COST-07, SUB-32
    used = {"input_tokens": 1, "output_tokens": 0}
    low = worker({"text": "low", "usage": used}, name="low")
    middle = worker(calls(task("low"), usage=used), {"text": "m", "usage": used}, name="middle", subagents={"low": low})
    top = agent_of(
        calls(task("middle"), usage=used), {"text": "t", "usage": used}, subagents={"middle": middle}, max_subagent_depth=2
    )
    result = await top.send("Go")
    assert result.usage.input_tokens == result.usage.model_calls == 5
    assert result.usage.delegated is not None
    assert result.usage.delegated.input_tokens == 3
    assert result.usage.delegated.runs == 1


async def test_a_hundred_children_share_the_leads_limiter() -> None:
    # SUB-38, SUB-39, RUN-82
    in_flight: set[int] = set()
    most = 0

    async def work(options: GenerateOptions) -> GenerateResult:
        nonlocal most
        in_flight.add(id(options))
        most = max(most, len(in_flight))
        for _ in range(20):
            await asyncio.sleep(0)
        in_flight.discard(id(options))
        done = options.messages[-1].role == "tool"
        return GenerateResult("Found", usage=ProviderUsage(1, 1)) if done else asks("look", usage=ProviderUsage(1, 1))

    child = create_agent(provider=PolicyProvider(work), name="worker", description="Works.", tools=[plain("look")])
    limiter = create_rate_limiter({"max_concurrent": 4})
    lead = agent_of(calls(*[task("worker")] * 100), "Done", subagents={"worker": child}, rate_limit=limiter)
    result = await lead.send("Go")
    assert result.ok
    assert kinds(result.messages) == ["ok"] * 100
    assert most == 4
    assert result.usage.delegated is not None
    assert (result.usage.delegated.runs, result.usage.delegated.model_calls) == (100, 200)
    stats = await limiter.stats()
    assert (stats.running, stats.waiting) == (0, 0)


async def test_one_slot_does_not_deadlock_any_nesting() -> None:
    # SUB-39
    limiter = create_rate_limiter({"max_concurrent": 1})
    low = worker("low", "low", "low", "low", name="low", rate_limit=limiter)
    middle = worker(
        calls(task("low"), task("low")), "m", calls(task("low"), task("low")), "m", name="middle", subagents={"low": low}
    )
    top = agent_of(
        calls(task("middle")), calls(task("middle")), "t", subagents={"middle": middle}, max_subagent_depth=2, rate_limit=limiter
    )
    assert (await top.send("Go")).ok


async def test_a_child_with_its_own_limiter_passes_both() -> None:
    # SUB-D: own first, the lead's last
    order: list[str] = []

    class Watching:
        name = None

        def __init__(self, label: str) -> None:
            self.label = label

        async def acquire(self, tokens: int) -> Any:
            order.append(f"+{self.label}")

            class Permit:
                def settle(self, tokens: int) -> None: ...

                def release(permit) -> None:  # noqa: N805
                    order.append(f"-{self.label}")

            return Permit()

    child = worker("Found", rate_limit=Watching("own"))
    await agent_of(calls(task("worker")), "Done", subagents={"worker": child}, rate_limit=Watching("lead")).send("Go")
    assert order[:2] == ["+lead", "-lead"]
    assert order[2:4] == ["+own", "+lead"]
    assert sorted(order[4:6]) == ["-lead", "-own"]
    assert order[6:] == ["+lead", "-lead"]


async def test_a_waiting_child_whose_run_is_aborted_never_starts() -> None:
    # SUB-38, RUN-82
    go = asyncio.Event()

    async def work(options: GenerateOptions) -> str:
        await go.wait()
        return "ok"

    provider = PolicyProvider(work)
    child = create_agent(provider=provider, name="worker", description="Works.")
    lead = agent_of(
        calls(*[task("worker")] * 5), subagents={"worker": child}, rate_limit=create_rate_limiter({"max_concurrent": 1})
    )
    run = lead.stream("Go")
    await until(lambda: provider.calls == 1)
    run.abort()
    assert (await run.result).finish_reason == "aborted"
    assert provider.calls == 1


async def test_two_runs_of_one_lead_do_not_share_a_budget() -> None:
    # CA-08
    child = worker(*[{"text": "x", "usage": {"input_tokens": 10}}] * 2)

    def policy(options: GenerateOptions) -> Any:
        if options.messages[-1].role == "tool":
            return GenerateResult("Done", usage=ProviderUsage(1, 0))
        return GenerateResult(
            tool_calls=(ToolCall("t", "task", '{"agent":"worker","prompt":"p","description":"d"}'),),
            finish_reason="tool_calls",
            usage=ProviderUsage(1, 0),
        )

    lead = create_agent(provider=PolicyProvider(policy), subagents={"worker": child}, limits={"max_tokens": 20})
    first, second = await asyncio.gather(lead.send("Go"), lead.send("Go"))
    assert first.ok
    assert second.ok
    assert first.usage.total_tokens == second.usage.total_tokens == 12
