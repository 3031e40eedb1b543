"""Hooks: what they see, what they may change, what their outcomes mean."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import AgentExecutionError, ConfigurationError
from lousho_ray.messages import user
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool, tool
from tests.unit.loop_support import agent_of, calls, check_transcript, collect, failing, kinds, names, plain, results


class Hook:
    """A hook made of functions."""

    def __init__(self, name: str = "hook", **methods: Any) -> None:
        self.name = name
        self.__dict__.update(methods)


@tool
def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


def adding(hooks: list[Any], args: dict[str, Any] | None = None, **options: Any) -> Any:
    return agent_of(calls(("add", args or {"a": 1})), "Done", tools=[add], hooks=hooks, **options)


# ---------------------------------------------------------------------------------------------------------------- definition


@pytest.mark.parametrize("hook", [object(), Hook("no methods"), Hook("", pre_generate=print)])
def test_what_is_no_hook_is_refused(hook: Any) -> None:
    # HOOK-01
    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", hooks=[hook])
    assert caught.value.field == "hooks"


async def test_hooks_run_in_list_order_each_awaited_before_the_next() -> None:
    # HOOK-01, HOOK-02
    order: list[str] = []

    def of(name: str) -> Hook:
        async def slow(*args: Any) -> None:
            order.append(f"{name} in")
            await asyncio.sleep(0)
            order.append(f"{name} out")

        def quick(*args: Any) -> None:
            order.append(name)

        return Hook(name, pre_generate=slow, post_generate=quick, pre_tool_call=quick, post_tool_call=slow)

    await adding([of("a"), of("b")]).send("Go")
    step = ["a in", "a out", "b in", "b out", "a", "b"]
    assert order == [*step, "a", "b", "a in", "a out", "b in", "b out", *step]


async def test_what_a_hook_sees() -> None:
    # HOOK-03, HOOK-04
    seen: list[Any] = []
    hook = Hook(pre_tool_call=lambda ctx: seen.append(ctx), pre_generate=lambda ctx: seen.append(ctx))
    agent = adding([hook], name="adder")
    result = await agent.session(id="s1").send("Go", metadata={"k": 1}, principal="me")
    generate, call = seen[0], seen[1]
    for ctx in (generate, call):
        assert (ctx.agent_name, ctx.session_id, ctx.principal, ctx.subagent) == ("adder", "s1", "me", None)
        assert ctx.metadata == {"k": 1}
    assert [message.role for message in generate.request.messages] == ["system", "user"]
    assert (call.tool_name, call.args, call.resumed_after_approval) == ("add", {"a": 1, "b": 1}, False)
    assert call.tool_call_id == call.tool_call.id == result.tool_calls[0].id


# ------------------------------------------------------------------------------------------------------------- pre_tool_call


async def test_a_deny_does_not_run_the_call_and_later_hooks_are_skipped() -> None:
    # HOOK-06, RUN-38
    later: list[str] = []
    hooks = [Hook("guard", pre_tool_call=lambda ctx: {"deny": "not today"}), Hook(pre_tool_call=lambda ctx: later.append("ran"))]
    run = adding(hooks).stream("Go")
    events = await collect(run)
    result = await run.result
    payload = results(result.messages)[0]
    assert (payload["kind"], payload["error"], payload["reason"]) == ("denied", "ToolDeniedError", "not today")
    assert "not today" in payload["message"]
    assert later == []
    assert "tool.error add" in names(events)
    assert result.tool_errors == 1
    check_transcript(result.messages)


async def test_a_supplied_result_replaces_the_call() -> None:
    # HOOK-07, RUN-38
    later: list[str] = []
    hooks = [
        Hook("cache", pre_tool_call=lambda ctx: {"result": {"cached": 1}}),
        Hook(pre_tool_call=lambda ctx: later.append("ran")),
    ]
    run = adding(hooks).stream("Go")
    events = await collect(run)
    result = await run.result
    assert results(result.messages) == [{"cached": 1}]
    assert later == []
    done = next(event for event in events if event.type == "tool.done")
    assert done.to_dict()["replacedByHook"] == "cache"
    assert next(message.metadata for message in result.messages if message.role == "tool") == {"replacedByHook": "cache"}


async def test_a_result_of_none_is_a_result() -> None:
    # HOOK-07
    ran: list[str] = []
    agent = agent_of(calls("a"), "Done", tools=[plain("a", log=ran)], hooks=[Hook(pre_tool_call=lambda ctx: {"result": None})])
    assert results((await agent.send("Go")).messages) == [None]
    assert ran == []


async def test_new_arguments_are_validated_and_chain() -> None:
    # HOOK-08, RUN-38
    seen: list[Any] = []

    def second(ctx: Any) -> Any:
        seen.append(dict(ctx.args))
        return {"input": {**ctx.args, "b": ctx.args["b"] + 1}}

    hooks = [Hook("one", pre_tool_call=lambda ctx: {"input": {"a": 10, "b": 5}}), Hook("two", pre_tool_call=second)]
    assert results((await adding(hooks).send("Go")).messages) == [16]
    assert seen == [{"a": 10, "b": 5}]


async def test_new_arguments_that_do_not_fit_are_an_error_that_names_the_hook() -> None:
    # HOOK-08
    result = await adding([Hook("spoiler", pre_tool_call=lambda ctx: {"input": {"a": "many"}})]).send("Go")
    payload = results(result.messages)[0]
    assert payload["kind"] == "validation"
    assert "spoiler" in payload["message"]
    assert result.ok


async def test_arguments_changed_in_place_are_kept_and_validated() -> None:
    # HOOK-09, HOOK-03
    def change(ctx: Any) -> None:
        ctx.args["a"] = 41

    assert results((await adding([Hook(pre_tool_call=change)]).send("Go")).messages) == [42]

    def spoil(ctx: Any) -> None:
        ctx.args["a"] = "x"

    payload = results((await adding([Hook("spoiler", pre_tool_call=spoil)]).send("Go")).messages)[0]
    assert payload["kind"] == "validation"
    assert "spoiler" in payload["message"]


@pytest.mark.parametrize("outcome", [{"refuse": "x"}, {"deny": "a", "result": 1}, "no", 1, {}])
async def test_another_outcome_rejects_the_run_and_names_the_hook(outcome: Any) -> None:
    # HOOK-05
    with pytest.raises(ConfigurationError) as caught:
        await adding([Hook("odd", pre_tool_call=lambda ctx: outcome)]).send("Go")
    assert "odd" in caught.value.detail
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"


async def test_hooks_see_validated_calls_only() -> None:
    # HOOK-18
    seen: list[str] = []
    hook = Hook(pre_tool_call=lambda ctx: seen.append("pre"), post_tool_call=lambda ctx, outcome: seen.append("post"))
    result = await agent_of(calls(("add", {"a": "x"}), "nope"), "Done", tools=[add], hooks=[hook]).send("Go")
    assert kinds(result.messages) == ["validation", "not-found"]
    assert seen == []


# ------------------------------------------------------------------------------------------------------------ post_tool_call


async def test_post_hooks_see_the_uncapped_result_and_may_replace_it_one_after_another() -> None:
    # HOOK-10, RUN-38
    seen: list[Any] = []

    def first(ctx: Any, outcome: Any) -> Any:
        seen.append(outcome.result)
        return {"result": "short"}

    def second(ctx: Any, outcome: Any) -> Any:
        seen.append(outcome.result)

    hooks = [Hook("first", post_tool_call=first), Hook("second", post_tool_call=second)]
    agent = agent_of(calls("a"), "Done", tools=[plain("a", "x" * 100)], hooks=hooks, max_tool_result_chars=10)
    result = await agent.send("Go")
    assert seen == ["x" * 100, "short"]
    assert results(result.messages) == ["short"]
    assert next(message.metadata for message in result.messages if message.role == "tool") == {"replacedByHook": "first"}


async def test_a_post_hook_sees_an_error_and_may_turn_it_into_a_result() -> None:
    # HOOK-10
    seen: list[Any] = []

    def mend(ctx: Any, outcome: Any) -> Any:
        seen.append(outcome.error)
        return {"result": "mended"}

    agent = agent_of(calls("bad"), "Done", tools=[failing("bad", ValueError("no"))], hooks=[Hook(post_tool_call=mend)])
    result = await agent.send("Go")
    assert seen[0]["kind"] == "execution"
    assert seen[0]["message"] == "no"
    assert kinds(result.messages) == ["ok"]
    assert result.tool_errors == 0


# --------------------------------------------------------------------------------------------------------- around generate()


async def test_pushes_to_the_request_last_for_one_call() -> None:
    # HOOK-11, HOOK-12
    model = mock_model([calls("add_it"), "Done"])
    tools = [define_tool(name="add_it", description="Adds.", execute=lambda args: 1)]
    pushed: list[int] = []

    def push(ctx: Any) -> None:
        if not pushed:
            pushed.append(1)
            ctx.request.messages.append(user("By the way"))

    result = await create_agent(provider=model, tools=tools, hooks=[Hook(pre_generate=push)]).send("Go")
    assert [message.text for message in model.calls[0].messages][1:] == ["Go", "By the way"]
    assert "By the way" not in [message.text for message in model.calls[1].messages]
    assert "By the way" not in [message.text for message in result.messages]


async def test_a_changed_request_is_sent_and_lasts_for_one_call() -> None:
    # HOOK-11, HOOK-12
    model = mock_model([calls("a"), "Done"])

    def hotter(ctx: Any) -> None:
        if len(ctx.messages) == 2:
            ctx.request = replace(ctx.request, settings={"temperature": 1.5})

    await create_agent(provider=model, tools=[plain("a")], hooks=[Hook(pre_generate=hotter)]).send("Go")
    assert [dict(call.settings) for call in model.calls] == [{"temperature": 1.5}, {}]


async def test_changes_of_the_transcript_stay() -> None:
    # HOOK-12, RUN-13
    model = mock_model([calls("a"), "Done"])

    def note(ctx: Any) -> None:
        if len(ctx.messages) == 2:
            ctx.messages.append(user("Remember"))

    result = await create_agent(provider=model, tools=[plain("a")], hooks=[Hook(pre_generate=note)]).send("Go")
    assert [message.text for message in model.calls[0].messages][1:] == ["Go", "Remember"]
    assert [message.text for message in model.calls[1].messages][1:3] == ["Go", "Remember"]
    assert [message.text for message in result.messages][1:3] == ["Go", "Remember"]


async def test_post_generate_sees_each_reply() -> None:
    # HOOK-11
    seen: list[Any] = []
    hook = Hook(post_generate=lambda ctx, result: seen.append((result.text, [call.name for call in result.tool_calls])))
    await agent_of(calls("a", text="So"), "Done", tools=[plain("a")], hooks=[hook]).send("Go")
    assert seen == [("So", ["a"]), ("Done", [])]


@pytest.mark.parametrize("method", ["pre_generate", "post_generate"])
async def test_an_abort_ends_the_wait_for_a_generate_hook(method: str) -> None:
    # RUN-53
    waiting, forever = asyncio.Event(), asyncio.Event()

    async def wait(*args: Any) -> None:
        waiting.set()
        await forever.wait()

    run = agent_of("Hello", hooks=[Hook(**{method: wait})]).stream("Hi")
    await waiting.wait()
    run.abort("enough")
    result = await run.result
    assert result.finish_reason == "aborted"
    assert names(await collect(run))[-2:] == ["step.done 1 aborted", "run.done aborted"]
    check_transcript(result.messages)


# -------------------------------------------------------------------------------------------------------------- raising hooks


@pytest.mark.parametrize("method", ["pre_tool_call", "post_tool_call", "pre_generate", "post_generate"])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)], ids=lambda error: type(error).__name__)
async def test_a_hook_that_raises_rejects_the_run(method: str, error: BaseException) -> None:
    # HOOK-14, ERR-16
    def fail(*args: Any) -> None:
        raise error

    wanted = ValueError if isinstance(error, ValueError) else AgentExecutionError
    with pytest.raises(wanted) as caught:
        await adding([Hook("broken", **{method: fail})]).send("Go")
    if wanted is AgentExecutionError:
        assert "broken" in str(caught.value)


async def test_a_raising_hook_waits_for_the_calls_that_run() -> None:
    # RUN-32
    from tests.unit.loop_support import Gate

    slow = Gate("slow")

    def fail(ctx: Any) -> None:
        if ctx.tool_name == "bad":
            raise ValueError("no")

    agent = agent_of(calls("slow", "bad"), tools=[slow.tool, plain("bad")], hooks=[Hook(pre_tool_call=fail)])
    sending = asyncio.ensure_future(agent.send("Go"))
    await slow.running.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sending.done()
    slow.go.set()
    with pytest.raises(ValueError, match="no"):
        await sending


# ----------------------------------------------------------------------------------------------------------------- sub-agents


def task(agent: str, prompt: str = "Do it") -> tuple[str, dict[str, str]]:
    return ("task", {"agent": agent, "prompt": prompt, "description": "a task"})


async def test_subagents_run_under_the_leads_hooks_and_say_who_they_are() -> None:
    # HOOK-17, SUB-41, SUB-45
    seen: list[Any] = []

    def see(ctx: Any) -> None:
        info = ctx.subagent
        seen.append((ctx.agent_name, ctx.tool_name, None if info is None else (info["name"], info["depth"])))

    child_seen: list[str] = []
    child_hook = Hook("child", pre_tool_call=lambda ctx: child_seen.append(ctx.tool_name))
    child = agent_of(calls("dig"), "Found", name="digger", description="Digs.", tools=[plain("dig")], hooks=[child_hook])
    lead = agent_of(calls(task("digger")), "Done", name="lead", subagents={"digger": child}, hooks=[Hook(pre_tool_call=see)])
    await lead.send("Go")
    assert seen == [("lead", "task", None), ("digger", "dig", ("digger", 1))]
    assert child_seen == ["dig"]


@pytest.mark.parametrize("method", ["pre_tool_call", "post_tool_call", "pre_generate", "post_generate"])
@pytest.mark.parametrize("whose", ["lead", "child"])
async def test_a_hook_that_raises_inside_a_subagent_rejects_the_whole_run(method: str, whose: str) -> None:
    # HOOK-14, SUB-45
    def fail(ctx: Any, *args: Any) -> None:
        if ctx.subagent is not None and ctx.subagent["depth"] == 2:
            raise ValueError("from the depths")

    hooks = [Hook("broken", **{method: fail})]
    low = agent_of(
        calls("dig"), "Found", name="low", description="Digs.", tools=[plain("dig")], hooks=hooks if whose == "child" else []
    )
    middle = agent_of(calls(task("low")), "Passed on", name="middle", description="Leads.", subagents={"low": low})
    top = agent_of(
        calls(task("middle")),
        "Done",
        subagents={"middle": middle},
        max_subagent_depth=2,
        hooks=hooks if whose == "lead" else [],
    )
    run = top.stream("Go")
    events = await collect(run)
    assert names(events)[-3:] == ["step.done 1 error", "error ValueError", "run.done error"]
    with pytest.raises(ValueError, match="from the depths"):
        await run.result
