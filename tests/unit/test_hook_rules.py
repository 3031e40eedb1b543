"""Hooks together with the rest of a run: approvals, compaction, side calls, sessions, the transcript, and the order of a call."""

from __future__ import annotations

from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.events import CompactionDone, CompactionStart, TextDone
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import agent_of, calls, check_transcript, collect, kinds, names, plain, results


class Hook:
    """A hook made of functions."""

    def __init__(self, name: str = "hook", **methods: Any) -> None:
        self.name = name
        self.__dict__.update(methods)


class Pay:
    """A tool that needs a person, with what it was called with."""

    def __init__(self) -> None:
        self.paid: list[Any] = []

    @property
    def tool(self) -> Any:
        schema = {"type": "object", "properties": {"to": {"type": "string"}, "sum": {"type": "integer"}}}
        return define_tool(name="pay", description="Pays.", input=schema, execute=self._execute, needs_approval=True)

    def _execute(self, args: Any) -> str:
        self.paid.append(args)
        return "paid"


PAY = ("pay", {"to": "Ann", "sum": 3})


async def decided(hook: Hook, approved: bool = True, tool: Any = None, **how: Any) -> Any:
    """A run that paused for `pay`, and what it became when somebody decided."""
    agent = agent_of(calls(PAY), "Done", tools=[tool or Pay().tool], hooks=[hook])
    paused = await agent.send("Go")
    assert paused.finish_reason == "awaiting-approval"
    return await agent.approvals.resolve(paused.approval_id, approved=approved, **how)


# --------------------------------------------------------------------------------------------------------------- what is a hook


@pytest.mark.parametrize("hooks", [5, "hook", Hook(pre_generate=print), {"a": Hook(pre_generate=print)}])
def test_hooks_are_a_list(hooks: Any) -> None:
    # HOOK-01
    with pytest.raises(ConfigurationError) as caught:
        agent_of("x", hooks=hooks)
    assert caught.value.field == "hooks"


@pytest.mark.parametrize("given", [{"input": 5}, {"input": [("to", "Ann")]}, {"input": None}])
async def test_new_arguments_that_are_no_dict_reject_the_run_and_name_the_hook(given: Any) -> None:
    # HOOK-05
    agent = agent_of(calls("a"), tools=[plain("a")], hooks=[Hook("odd", pre_tool_call=lambda ctx: given)])
    with pytest.raises(ConfigurationError, match="'odd'"):
        await agent.send("Go")


@pytest.mark.parametrize("answer", ["text", {"deny": "no"}, {"result": 1, "more": 2}, 5])
async def test_a_post_hook_that_returns_something_else_rejects_the_run_and_is_named(answer: Any) -> None:
    # HOOK-10
    agent = agent_of(calls("a"), tools=[plain("a")], hooks=[Hook("odd", post_tool_call=lambda ctx, outcome: answer)])
    with pytest.raises(ConfigurationError, match="'odd'") as caught:
        await agent.send("Go")
    assert caught.value.field == "hooks"


async def test_the_context_names_the_agent_and_its_metadata_is_one_bag_for_all_hooks_of_a_run() -> None:
    # HOOK-03
    seen: list[Any] = []

    def put(ctx: Any) -> None:
        ctx.metadata["count"] = ctx.metadata.get("count", 0) + 1

    def read(ctx: Any, outcome: Any) -> None:
        seen.append((ctx.agent_id, ctx.agent_name, dict(ctx.metadata)))

    given = {"from": "caller"}
    agent = agent_of(calls("a"), "Done", tools=[plain("a")], name="bot", hooks=[Hook(pre_generate=put), Hook(post_tool_call=read)])
    await agent.send("Go", metadata=given)
    assert seen == [("bot", "bot", {"from": "caller", "count": 1})]
    assert given == {"from": "caller"}


# ------------------------------------------------------------------------------------------------------------------- approvals


async def test_a_pause_is_told_to_the_post_hooks_and_cannot_be_replaced_by_them() -> None:
    # HOOK-16, HOOK-10
    told: list[Any] = []

    def post(ctx: Any, outcome: Any) -> Any:
        told.append((ctx.tool_name, ctx.resumed_after_approval, outcome.requires_approval, outcome.result))
        return {"result": "replaced"} if outcome.requires_approval else None

    pay = Pay()
    hook = Hook(post_tool_call=post)
    agent = agent_of(calls(PAY), "Done", tools=[pay.tool], hooks=[hook, hook])
    paused = await agent.send("Go")
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert told == [("pay", False, True, None)] * 2 + [("pay", True, False, "paid")] * 2
    assert results(result.messages) == ["paid"]
    assert len(pay.paid) == 1


async def test_a_post_hook_that_raises_at_a_pause_rejects_the_run_and_nothing_is_left_to_decide() -> None:
    # HOOK-14, HOOK-16
    def post(ctx: Any, outcome: Any) -> None:
        raise ValueError("no pause")

    agent = agent_of(calls(PAY), tools=[Pay().tool], hooks=[Hook(post_tool_call=post)])
    with pytest.raises(ValueError, match="no pause"):
        await agent.send("Go")
    assert await agent.approvals.list() == []


async def test_an_approved_call_passes_the_pre_hooks_again() -> None:
    # HOOK-16
    seen: list[bool] = []
    result = await decided(Hook(pre_tool_call=lambda ctx: seen.append(ctx.resumed_after_approval)))
    assert seen == [False, True]
    assert kinds(result.messages) == ["ok"]


async def test_a_hook_can_still_deny_an_approved_call() -> None:
    # HOOK-16
    pay = Pay()
    hook = Hook(pre_tool_call=lambda ctx: {"deny": "closed meanwhile"} if ctx.resumed_after_approval else None)
    result = await decided(hook, tool=pay.tool)
    assert kinds(result.messages) == ["denied"]
    assert pay.paid == []


async def test_a_hook_can_still_supply_the_result_of_an_approved_call() -> None:
    # HOOK-16
    pay = Pay()
    hook = Hook("cache", pre_tool_call=lambda ctx: {"result": "known"} if ctx.resumed_after_approval else None)
    result = await decided(hook, tool=pay.tool)
    assert results(result.messages) == ["known"]
    assert pay.paid == []


async def test_an_approved_call_does_not_run_with_other_arguments_than_those_approved() -> None:
    # HOOK-16
    def dearer(ctx: Any) -> Any:
        return {"input": {**ctx.args, "sum": 300}} if ctx.resumed_after_approval else None

    pay = Pay()
    result = await decided(Hook(pre_tool_call=dearer), tool=pay.tool)
    assert kinds(result.messages) == ["validation"]
    assert pay.paid == []


async def test_the_same_arguments_in_another_order_are_those_approved() -> None:
    # HOOK-16
    pay = Pay()
    hook = Hook(pre_tool_call=lambda ctx: {"input": dict(reversed(ctx.args.items()))} if ctx.resumed_after_approval else None)
    result = await decided(hook, tool=pay.tool)
    assert kinds(result.messages) == ["ok"]
    assert pay.paid == [{"to": "Ann", "sum": 3}]


async def test_arguments_that_a_hook_changed_before_the_pause_are_the_ones_a_person_is_asked_about() -> None:
    # HOOK-08, HOOK-16
    pay = Pay()
    hook = Hook(pre_tool_call=lambda ctx: {"input": {**ctx.args, "sum": 2}})
    agent = agent_of(calls(PAY), "Done", tools=[pay.tool], hooks=[hook])
    paused = await agent.send("Go")
    pending = await agent.approvals.get(paused.approval_id)
    assert pending is not None
    assert dict(pending.args) == {"to": "Ann", "sum": 2}


async def test_a_rejected_call_passes_no_hook() -> None:
    # HOOK-16: a hook must not turn a person's no into a result.
    seen: list[str] = []

    def pre(ctx: Any) -> Any:
        if ctx.resumed_after_approval:
            seen.append("pre")
            return {"result": "done all the same"}
        return None

    result = await decided(Hook(pre_tool_call=pre), approved=False, note="too dear")
    assert seen == []
    assert kinds(result.messages) == ["rejected"]


# -------------------------------------------------------------------------------------------------------- compaction, side calls


class Watcher:
    """A compaction strategy that notes what it gets and changes nothing."""

    name = "watcher"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def compact(self, work: Any) -> Any:
        self.seen.append(work.messages[-1].text)
        return {"messages": work.messages}


async def test_compaction_sees_what_the_hooks_added_wherever_they_stand() -> None:
    # HOOK-15, CA-23
    watcher = Watcher()
    compaction = {"strategy": watcher, "context_window": 10, "threshold_percent": 0.1, "protected_tokens": 0}
    hook = Hook(pre_generate=lambda ctx: ctx.messages.append(user("added by the hook")))
    await agent_of("Done", hooks=[hook], compaction=compaction).send("Hello there, this is long enough")
    assert watcher.seen == ["added by the hook"]


async def test_a_hook_reports_compactions_and_nothing_else_and_only_where_somebody_listens() -> None:
    # HOOK-13
    emitters: list[Any] = []

    def report(ctx: Any) -> None:
        emitters.append(ctx.emit)
        if ctx.emit is not None:
            ctx.emit(CompactionStart, strategy="own", tokens_before=9, context_window=10, threshold_tokens=5)

    agent = agent_of("One", "Two", hooks=[Hook(pre_generate=report)])
    await agent.send("Hi")
    assert emitters == [None]
    run = agent.stream("Hi")
    events = await collect(run)
    assert [event.strategy for event in events if event.type == "compaction.start"] == ["own"]

    def other(ctx: Any) -> None:
        if ctx.emit is not None:
            ctx.emit(TextDone, text="made up")

    run = agent_of("One", hooks=[Hook(pre_generate=other)]).stream("Hi")
    events = await collect(run)
    assert "text.done made up" not in names(events)
    with pytest.raises(ConfigurationError, match=CompactionDone.__name__):
        await run.result


async def test_a_side_call_of_a_hook_counts_under_its_purpose() -> None:
    # HOOK-13
    judge = mock_model([{"text": "fine", "usage": {"input_tokens": 50, "output_tokens": 7}}], default_model="judge-1")

    async def ask(ctx: Any) -> None:
        request = GenerateOptions([user("Is it fine?")])
        assert (await ctx.generate(judge, request, "judge")).text == "fine"

    result = await agent_of("Done", hooks=[Hook(pre_generate=ask)]).send("Hi")
    entry = next(entry for entry in result.step_usage if entry.purpose == "judge")
    assert (entry.model, entry.usage.prompt_tokens, entry.usage.completion_tokens) == ("judge-1", 50, 7)
    assert result.usage.input_tokens >= 50
    assert result.usage.model_calls == 2


async def test_a_side_call_counts_in_the_budget() -> None:
    # HOOK-13
    judge = mock_model([{"text": "fine", "usage": {"input_tokens": 500, "output_tokens": 7}}])
    main = mock_model(["never"])

    async def ask(ctx: Any) -> None:
        await ctx.generate(judge, GenerateOptions([user("Fine?")]), "judge")

    agent = create_agent(provider=main, hooks=[Hook(pre_generate=ask)], limits={"max_tokens": 400})
    assert (await agent.send("Hi")).finish_reason == "budget-exceeded"
    assert main.calls == []


# -------------------------------------------------------------------------------------------------------------- the transcript


async def test_what_hooks_change_in_the_transcript_is_kept_by_the_session_and_what_they_push_to_a_request_is_not() -> None:
    # HOOK-12
    model = mock_model(["One", "Two"])

    def change(ctx: Any) -> None:
        if len(model.calls) == 0:
            ctx.messages.append(user("kept"))
            ctx.request.messages.append(user("for one call"))

    session = create_agent(provider=model, hooks=[Hook(pre_generate=change)], store=memory_store()).session("s")
    await session.send("Hi")
    await session.send("Again")
    assert [message.text for message in model.calls[0].messages][1:] == ["Hi", "kept", "for one call"]
    assert [message.text for message in await session.load()] == ["Hi", "kept", "One", "Again", "Two"]
    check_transcript(await session.load())


async def test_what_a_tool_hook_changes_in_the_transcript_is_seen_by_the_next_call() -> None:
    # HOOK-03, HOOK-12
    model = mock_model([calls("a"), "Done"])

    def mark(ctx: Any, outcome: Any) -> None:
        ctx.messages[1] = user("Go, as the hook has it")

    await create_agent(provider=model, tools=[plain("a")], hooks=[Hook(post_tool_call=mark)]).send("Go")
    assert model.calls[1].messages[1].text == "Go, as the hook has it"


# -------------------------------------------------------------------------------------------------------------- order and errors


async def test_the_steps_of_a_call_come_in_their_order() -> None:
    # RUN-28, TOOL-15
    order: list[str] = []

    def note(name: str, value: Any = None) -> Any:
        def noted(*args: Any) -> Any:
            order.append(name)
            return value

        return noted

    tool = define_tool(
        name="t",
        description="T.",
        input={"type": "object", "properties": {"n": {"type": "integer"}}},
        execute=note("execute", "ok"),
        needs_approval=note("needs_approval", True),
    )
    hook = Hook(pre_tool_call=note("pre"), post_tool_call=note("post"))
    agent = agent_of(
        calls(("t", {"n": "x"}), ("t", {"n": 1})),
        "Done",
        tools=[tool],
        hooks=[hook],
        approve=note("approve", True),
        on_event=lambda event: order.append(event.type) if event.type.startswith("tool.") else None,
    )
    result = await agent.send("Go")
    assert kinds(result.messages) == ["validation", "ok"]
    refused, passed = ["tool.start", "tool.error"], ["pre", "needs_approval", "approve", "execute", "post"]
    assert order == [*refused, "tool.start", *passed, "tool.done"]


async def test_a_deny_is_final() -> None:
    # RUN-28
    asked: list[str] = []

    def ask(*args: Any) -> bool:
        asked.append("asked")
        return True

    tool = define_tool(name="t", description="T.", execute=ask, needs_approval=ask)
    allowing, denying = Hook("allows", pre_tool_call=lambda *args: None), Hook("denies", pre_tool_call=lambda *args: {"deny": "no"})
    result = await agent_of(calls("t"), "Done", tools=[tool], hooks=[denying, allowing], approve=ask).send("Go")
    assert kinds(result.messages) == ["denied"]
    assert asked == []


async def test_an_error_of_a_hook_tells_what_the_run_had_spent() -> None:
    # LES-08
    def fail(ctx: Any, outcome: Any) -> None:
        raise ValueError("broken")

    usage = {"input_tokens": 10, "output_tokens": 2}
    agent = agent_of(calls("a", usage=usage), tools=[plain("a")], hooks=[Hook(post_tool_call=fail)])
    with pytest.raises(ValueError, match="broken") as caught:
        await agent.send("Go")
    spent: Any = caught.value
    assert (spent.usage.input_tokens, spent.usage.output_tokens, spent.usage.model_calls) == (10, 2, 1)


async def test_an_error_of_a_childs_hook_tells_what_the_whole_run_had_spent() -> None:
    # LES-08, SUB-45
    def fail(ctx: Any) -> None:
        if ctx.subagent is not None:
            raise ValueError("broken")

    usage = {"input_tokens": 10, "output_tokens": 2}
    child = agent_of(calls("dig", usage=usage), name="w", description="Works.", tools=[plain("dig")])
    task = ("task", {"agent": "w", "prompt": "Dig", "description": "d"})
    lead = agent_of(calls(task, usage=usage), subagents={"w": child}, hooks=[Hook(pre_tool_call=fail)])
    with pytest.raises(ValueError, match="broken") as caught:
        await lead.send("Go")
    spent: Any = caught.value
    assert (spent.usage.input_tokens, spent.usage.model_calls) == (20, 2)


# ------------------------------------------------------------------------------------------------------------ max_calls_per_run


def once(log: list[Any], cap: int = 1, **more: Any) -> Any:
    def execute(args: Any) -> str:
        log.append(args)
        return "ok"

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    return define_tool(name="once", description="Once.", input=schema, execute=execute, max_calls_per_run=cap, **more)


async def test_a_capped_tool_is_denied_past_its_cap_and_told_to_use_what_it_has() -> None:
    # LES-13
    log: list[Any] = []
    turn = calls(("once", {"n": 1}), ("once", {"n": 2}), ("once", {"n": 3}))
    result = await agent_of(turn, "Done", tools=[once(log, 2)]).send("Go")
    assert kinds(result.messages) == ["ok", "ok", "denied"]
    assert sorted(args["n"] for args in log) == [1, 2]
    assert "Use the results you have" in results(result.messages)[2]["reason"]


async def test_calls_that_did_not_run_do_not_use_up_the_cap() -> None:
    # LES-13
    log: list[Any] = []
    hook = Hook(pre_tool_call=lambda ctx: {"deny": "no"} if ctx.args.get("n") == 1 else None)
    turns = [calls(("once", {"n": "x"})), calls(("once", {"n": 1})), calls(("once", {"n": 2})), calls(("once", {"n": 3})), "Done"]
    result = await agent_of(*turns, tools=[once(log)], hooks=[hook]).send("Go")
    assert kinds(result.messages) == ["validation", "denied", "ok", "denied"]
    assert log == [{"n": 2}]


async def test_the_cap_holds_over_a_pause() -> None:
    # LES-13
    log: list[Any] = []
    turn = calls(("once", {"n": 1}), ("once", {"n": 2}), ("pay", {}))
    agent = agent_of(turn, calls(("once", {"n": 3})), "Done", tools=[once(log), Pay().tool])
    paused = await agent.send("Go")
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert kinds(result.messages) == ["ok", "denied", "ok", "denied"]
    assert log == [{"n": 1}]


async def test_the_cap_counts_each_run_on_its_own() -> None:
    # LES-13
    log: list[Any] = []
    session = agent_of(calls("once"), "Done", calls("once"), "Done", tools=[once(log)]).session()
    await session.send("Go")
    await session.send("Go")
    assert len(log) == 2
