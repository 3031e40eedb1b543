"""Permission rules, modes and the audit: which calls run, which wait, which are refused, and who is told."""

from __future__ import annotations

import asyncio
import re
from datetime import datetime, timedelta
from typing import Any

import pytest

from lousho_ray.agent import Agent
from lousho_ray.clock import SYSTEM_CLOCK, timestamp
from lousho_ray.create import create_agent
from lousho_ray.errors import AgentExecutionError, ConfigurationError
from lousho_ray.hosted_tools import code_interpreter, web_search
from lousho_ray.permissions import MODES, PermissionRule, allow, ask, check_rules, deny
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import agent_of, calls, check_transcript, collect, kinds, names, results
from tests.unit.test_hooks import Hook
from tests.unit.test_subagents_local import task, worker


class Log:
    """Tools that note each run: one that reads, one that edits files, one that does neither, each asking as told."""

    def __init__(self, needs_approval: Any = False) -> None:
        self.runs: list[str] = []

        def made(name: str, **options: Any) -> Any:
            def run(n: int = 0) -> str:
                """Runs."""
                self.runs.append(name)
                return name

            return tool(name=name, needs_approval=needs_approval, **options)(run)

        self.tools = [made("read", annotations={"read_only_hint": True}), made("edit", edits_files=True), made("act")]


def run_all(log: Log, *after: Any, **options: Any) -> Agent[Any]:
    return agent_of(calls("read", "edit", "act"), *(after or ("Done",)), tools=log.tools, **options)


def entries(heard: list[Any]) -> list[tuple[str, str]]:
    return [(entry.tool_name, entry.decision) for entry in heard]


# --------------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("rules", "ran", "seen"),
    [
        ([deny("act")], ["read", "edit"], ["ok", "ok", "denied"]),
        ([allow("act"), deny("*")], ["act"], ["denied", "denied", "ok"]),
        ([deny("*"), allow("act")], [], ["denied", "denied", "denied"]),
        ([deny(["read", "edit"])], ["act"], ["denied", "denied", "ok"]),
        ([deny(re.compile("^(ed|ac)"))], ["read"], ["ok", "denied", "denied"]),
        ([{"tool": "edit", "action": "deny", "when": lambda args, about: about["tool_name"] == "edit"}], ["read", "act"], None),
        ([{"tool": "edit", "action": "deny", "when": lambda args, about: False}], ["read", "edit", "act"], None),
    ],
)
async def test_the_first_rule_that_matches_decides(rules: Any, ran: list[str], seen: list[str] | None) -> None:
    # PERM-05, PERM-06, PERM-07, APR-04, APR-05
    log = Log()
    result = await run_all(log, permissions=rules).send("Go")
    assert sorted(log.runs) == sorted(ran)
    if seen is not None:
        assert kinds(result.messages) == seen


async def test_the_model_reads_why_a_rule_denied() -> None:
    # PERM-09, APR-04
    result = await run_all(Log(), permissions=[deny("act", "Acting is for people.")]).send("Go")
    error = results(result.messages)[2]
    assert (error["kind"], error["reason"]) == ("denied", "Acting is for people.")


async def test_an_async_condition_is_awaited_and_one_that_raises_fails_its_call_alone() -> None:
    # PERM-07, APR-05
    async def when(args: Any, about: Any) -> bool:
        if about["tool_name"] == "act":
            raise ValueError("no idea")
        return bool(about["tool_name"] == "edit")

    log = Log()
    result = await run_all(log, permissions=[PermissionRule("*", "deny", when)]).send("Go")
    assert kinds(result.messages) == ["ok", "denied", "execution"]
    assert "no idea" in results(result.messages)[2]["message"]
    assert log.runs == ["read"]


async def test_allow_skips_the_tools_own_question_and_not_its_refusal() -> None:
    # PERM-08, APR-04
    asking, refusing = Log(True), Log(lambda args: "deny")
    assert kinds((await run_all(asking, permissions=[allow("*")]).send("Go")).messages) == ["ok"] * 3
    assert kinds((await run_all(refusing, permissions=[allow("*")]).send("Go")).messages) == ["denied"] * 3


async def test_ask_pauses_a_call_that_its_tool_would_let_run() -> None:
    # PERM-10
    log = Log()
    agent = run_all(log, permissions=[ask("act")])
    paused = await agent.send("Go")
    assert (paused.finish_reason, sorted(log.runs)) == ("awaiting-approval", ["edit", "read"])
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert log.runs[-1] == "act"
    check_transcript(result.messages)


async def test_a_rules_time_to_decide_wins_over_the_agents() -> None:
    # PERM-10, APR-34
    rule = {"tool": "act", "action": "ask", "ttl_ms": 60_000}
    agent = run_all(Log(), permissions=[rule], approval_ttl_ms=10)
    paused = await agent.send("Go")
    pending = await agent.approvals.get(paused.approval_id)
    assert pending is not None
    assert pending.expires_at is not None
    given = datetime.fromisoformat(pending.expires_at) - datetime.fromisoformat(pending.created_at)
    assert given == timedelta(milliseconds=60_000)


async def test_rules_and_needs_approval_see_the_arguments_after_hooks() -> None:
    # PERM-01, PERM-03, APR-07
    def pre(ctx: Any) -> None:
        ctx.args["n"] = 7

    log = Log()
    rule = PermissionRule("act", "deny", lambda args, about: args["n"] == 7)
    result = await run_all(log, permissions=[rule], hooks=[Hook(pre_tool_call=pre)]).send("Go")
    assert kinds(result.messages) == ["ok", "ok", "denied"]


async def test_an_allow_rule_on_a_question_leaves_it_without_an_answer() -> None:
    # PERM-11, APR-43
    agent = agent_of(calls(("ask_question", {"question": "Which?"})), "Done", ask_question=True, permissions=[allow("*")])
    result = await agent.send("Go")
    assert kinds(result.messages) == ["execution"]


async def test_an_ask_rule_on_a_question_pauses_once() -> None:
    agent = agent_of(calls(("ask_question", {"question": "Which?"})), "Done", ask_question=True, permissions=[ask("*")])
    paused = await agent.send("Go")
    assert (await agent.approvals.get(paused.approval_id)).kind == "question"  # type: ignore[union-attr]
    result = await agent.approvals.answer(paused.approval_id, "that one")
    assert result.text == "Done"


async def test_the_leads_rules_come_before_the_childs() -> None:
    # PERM-13, APR-51, SUB-64, PERM-50
    heard: list[Any] = []
    log = Log()
    child = worker(calls("read", "edit", "act"), "ok", tools=log.tools, permissions=[allow("edit"), deny("read"), allow("act")])
    lead = agent_of(
        calls(task("worker")),
        "Done",
        subagents={"worker": child},
        permissions=[deny("edit")],
        on_permission_decision=lambda entry, about: heard.append(entry),
    )
    await lead.send("Go")
    assert log.runs == ["act"]
    told = {entry.tool_name: (entry.decision, entry.rule) for entry in heard}
    assert told["task"] == ("default", None)
    assert told["edit"] == ("deny", {"index": 0, "source": "lead"})
    assert told["read"] == ("deny", {"index": 2, "source": "own"})


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        ("deny", "permissions"),
        ([1], "permissions[0]"),
        ([{"tool": "a"}], "permissions[0].action"),
        ([{"tool": "a", "action": "denie"}], "permissions[0].action"),
        ([{"tool": [], "action": "deny"}], "permissions[0].tool"),
        ([{"tool": 3, "action": "deny"}], "permissions[0].tool"),
        ([{"tool": "a", "action": "deny", "whem": 1}], "permissions[0].whem"),
        ([{"tool": "a", "action": "deny", "when": 1}], "permissions[0].when"),
        ([{"tool": "a", "action": "deny", "reason": 1}], "permissions[0].reason"),
        ([{"tool": "a", "action": "ask", "ttl_ms": 0}], "permissions[0].ttl_ms"),
        ([{"tool": "a", "action": "ask", "ttl_ms": True}], "permissions[0].ttl_ms"),
    ],
)
def test_malformed_rules_are_refused_by_name(rules: Any, field: str) -> None:
    # PERM-14
    with pytest.raises(ConfigurationError) as raised:
        create_agent(provider=mock_model(["x"]), permissions=rules)
    assert (raised.value.code, raised.value.field) == ("LOUSHO_CONFIG_INVALID", field)


def test_helpers_make_the_rules_they_say() -> None:
    # PERM-06
    assert [rule.action for rule in check_rules([allow("a"), deny(["a", "b"], "no"), ask(re.compile("x"))])] == [
        "allow",
        "deny",
        "ask",
    ]
    assert deny(["a", "b"], "no").tool == ("a", "b")


# --------------------------------------------------------------------------------------------------------------------- modes


async def test_plan_mode_reads_and_changes_nothing() -> None:
    # PERM-25, PERM-26, PERM-29, PERM-33, APR-06
    log = Log()
    model = mock_model([calls("read", "edit", "act"), "Done"])
    agent = create_agent(provider=model, tools=log.tools, permission_mode="plan", permissions=[allow("*")])
    result = await agent.send("Go")
    assert log.runs == ["read"]
    assert kinds(result.messages) == ["ok", "denied", "denied"]
    assert "plan mode" in results(result.messages)[1]["reason"]
    assert "## Plan mode" in model.calls[0].messages[0].text


async def test_plan_mode_lets_questions_and_tasks_through_and_the_child_plans_too() -> None:
    # PERM-30, PERM-42, SUB-44, SUB-13
    log = Log()
    child = worker(calls("act", "read"), "looked", tools=log.tools, permission_mode="acceptEdits")
    lead = agent_of(
        calls(task("worker")),
        calls(("ask_question", {"question": "Which?"})),
        "Done",
        subagents={"worker": child},
        ask_question=True,
        permission_mode="plan",
    )
    paused = await lead.send("Go")
    assert log.runs == ["read"]
    assert paused.finish_reason == "awaiting-approval"
    assert (await lead.approvals.answer(paused.approval_id, "that")).text == "Done"


async def test_a_child_made_for_planning_plans_whatever_its_lead_does() -> None:
    # SUB-44, PERM-42
    log = Log()
    child = worker(calls("act"), "looked", tools=log.tools, permission_mode="plan")
    await agent_of(calls(task("worker")), "Done", subagents={"worker": child}, permission_mode="acceptEdits").send("Go")
    assert log.runs == []


async def test_accept_edits_runs_file_edits_unasked_and_nothing_else() -> None:
    # PERM-27, PERM-32, APR-06
    log = Log(True)
    agent = run_all(log, permission_mode="acceptEdits", permissions=[allow("read")])
    paused = await agent.send("Go")
    assert (sorted(log.runs), paused.finish_reason) == (["edit", "read"], "awaiting-approval")
    refusing = Log(lambda args: {"deny": "never"})
    assert kinds((await run_all(refusing, permission_mode="acceptEdits").send("Go")).messages) == ["denied"] * 3


async def test_dont_ask_refuses_what_would_ask_and_never_calls_approve() -> None:
    # PERM-28, APR-33, APR-06
    asked: list[Any] = []
    log = Log(True)
    agent = run_all(log, permission_mode="dontAsk", permissions=[allow("read")], approve=lambda call: asked.append(call) or True)
    result = await agent.send("Go")
    assert (log.runs, asked) == (["read"], [])
    assert kinds(result.messages) == ["ok", "denied", "denied"]
    assert "dontAsk" in results(result.messages)[1]["reason"]


async def test_plan_mode_sends_only_the_hosted_tools_that_look_up() -> None:
    # PERM-34, HOST-06
    model = mock_model(["one", "two"])
    agent = create_agent(provider=model, tools=[web_search(), code_interpreter()])
    await agent.send("Go", permission_mode="plan")
    await agent.send("Go")
    assert [[tool.type for tool in call.hosted_tools] for call in model.calls] == [
        ["web_search"],
        ["web_search", "code_interpreter"],
    ]


async def test_an_unknown_tool_is_unknown_in_every_mode() -> None:
    # PERM-31
    for mode in MODES:
        result = await agent_of(calls("nope"), "Done", permission_mode=mode).send("Go")
        assert kinds(result.messages) == ["not-found"]


async def test_the_mode_of_one_call_is_for_that_run_alone() -> None:
    # PERM-36, CA-33
    log = Log()
    agent = run_all(log, "Done", calls("act"), "Done")
    await agent.send("Go", permission_mode="plan")
    assert log.runs == ["read"]
    await agent.send("Go")
    assert log.runs == ["read", "act"]


async def test_a_switch_holds_from_the_next_call_of_a_running_turn() -> None:
    # SES-13, PERM-36, PERM-37, PERM-39
    log = Log()
    agent = agent_of(calls("act"), calls("act"), "Done", calls("act"), "Done", tools=log.tools)
    session = agent.session("s", permission_mode="acceptEdits")
    assert session.permission_mode == "acceptEdits"
    run = session.stream("Go")
    async for event in run:
        if event.type == "tool.done":
            await session.set_permission_mode("plan")
    assert kinds((await run.result).messages) == ["ok", "denied"]
    await session.send("Again")
    assert (log.runs, session.permission_mode) == (["act"], "plan")
    assert agent.session("s").permission_mode == "default"


async def test_switches_of_the_mode_are_told(caplog: pytest.LogCaptureFixture) -> None:
    # PERM-38, SES-13
    told: list[Any] = []

    def listener(change: Any) -> None:
        told.append((change["session_id"], change["from"], change["to"]))
        if change["to"] == "dontAsk":
            raise ValueError("broken")

    session = agent_of("x", on_permission_mode_change=listener).session("s")
    change = await session.set_permission_mode("plan")
    assert set(change) == {"session_id", "from", "to", "at"}
    await session.set_permission_mode("plan")
    await session.set_permission_mode("dontAsk")
    assert told == [("s", "default", "plan"), ("s", "plan", "dontAsk")]
    assert session.permission_mode == "dontAsk"
    assert "broken" in caplog.text


@pytest.mark.parametrize(
    "use",
    [
        lambda: agent_of("x", permission_mode="acceptedits"),
        lambda: agent_of("x").stream("Go", permission_mode="plam"),
        lambda: agent_of("x").session(permission_mode="plam"),
        lambda: agent_of("x").session().set_permission_mode_sync("plam"),  # type: ignore[arg-type]
    ],
    ids=["create_agent", "stream", "session", "set"],
)
async def test_a_mode_that_does_not_exist_is_refused(use: Any) -> None:
    # PERM-25, SES-13
    with pytest.raises(ConfigurationError, match="acceptEdits") as raised:
        use()
    assert raised.value.code == "LOUSHO_CONFIG_INVALID"


async def test_a_function_gives_the_mode_of_each_call() -> None:
    # PERM-25
    modes = iter(["default", "default", "plan", "default"])
    log = Log()
    result = await run_all(log, permission_mode=lambda: next(modes)).send("Go")
    assert kinds(result.messages) == ["ok", "denied", "ok"]


async def test_the_mode_is_read_once_a_call_also_when_it_is_told() -> None:
    # PERM-25, PERM-37
    asked: list[str] = []

    def mode() -> Any:
        asked.append("plan")
        return "plan"

    run = run_all(Log(), permission_mode=mode).stream("Go")
    told = [event async for event in run if event.type == "permission.decision"]
    assert len(told) == 3
    assert len(asked) == 1 + 3  # at the start of the run, and at each call


async def test_a_mode_function_that_raises_fails_the_run_and_no_tool_runs() -> None:
    modes = iter(["default"])
    log = Log()
    with pytest.raises(ConfigurationError) as raised:
        await run_all(log, permission_mode=lambda: next(modes)).send("Go")
    assert (raised.value.code, log.runs) == ("LOUSHO_CONFIG_RESOLVER_FAILED", [])


@pytest.mark.parametrize(("mode", "ran", "seen"), [("plan", [], ["denied"]), ("dontAsk", ["act"], ["ok"])])
async def test_an_approved_call_meets_the_sessions_mode_of_now(mode: Any, ran: list[str], seen: list[str]) -> None:
    # PERM-40, PERM-41, APR-23
    log = Log(True)
    session = (agent := agent_of(calls("act"), "Done", tools=log.tools, store=memory_store())).session("s")
    paused = await session.send("Go")
    await session.set_permission_mode(mode)
    result = await agent.approvals.resolve(paused.approval_id, approved=True)
    assert (log.runs, kinds(result.messages)) == (ran, seen)


# --------------------------------------------------------------------------------------------------------------------- audit


async def test_each_decision_is_told_once_and_before_the_call_runs() -> None:
    # PERM-44, PERM-45, PERM-46, PERM-48, APR-50, LES-65
    heard: list[Any] = []
    log = Log()

    def audit(entry: Any, about: Any) -> None:
        heard.append(entry)
        assert entry.tool_name not in log.runs
        assert about == {"principal": "ann"}

    agent = run_all(log, permissions=[allow("read"), deny("edit", "no"), ask("act")], on_permission_decision=audit)
    await agent.send("Go", principal="ann")
    assert entries(heard) == [("read", "allow"), ("edit", "deny"), ("act", "ask")]
    assert [entry.rule for entry in heard] == [
        {"index": 0, "source": "own"},
        {"index": 1, "source": "own", "reason": "no"},
        {"index": 2, "source": "own"},
    ]
    assert all(entry.at.endswith("Z") for entry in heard)
    assert "principal" not in heard[0].to_dict()


async def test_an_audit_that_takes_its_time_is_done_before_the_call_runs() -> None:
    log, done = Log(), []

    async def audit(entry: Any, about: Any) -> None:
        await asyncio.sleep(0)
        assert entry.tool_name not in log.runs
        done.append(entry.tool_name)

    await run_all(log, on_permission_decision=audit).send("Go")
    assert (done, sorted(log.runs)) == (["read", "edit", "act"], ["act", "edit", "read"])


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("where", ["send", "session", "stream", "child"])
async def test_a_run_whose_audit_fails_is_rejected_and_the_call_does_not_run(slow: bool, where: str) -> None:
    log = Log()

    def fail(entry: Any, about: Any) -> Any:
        async def later() -> None:
            raise ValueError("disk full")

        if entry.tool_name == "task":
            return None
        if slow:
            return later()
        raise ValueError("disk full")

    agent = run_all(log, on_permission_decision=fail)
    if where == "child":
        child = worker(calls("act"), "x", tools=log.tools)
        agent = agent_of(calls(task("worker")), "Done", subagents={"worker": child}, on_permission_decision=fail)
    streamed = where in ("session", "stream")
    started: Any = agent.session() if where == "session" else agent
    waited: Any = started.stream("Go").result if streamed else started.send("Go")
    with pytest.raises(AgentExecutionError, match="disk full"):
        await waited
    assert log.runs == []


async def test_hook_denials_and_modes_are_told_with_what_denied() -> None:
    # PERM-48, PERM-49, APR-50
    heard: list[Any] = []

    def pre(ctx: Any) -> Any:
        return {"deny": "hook says no"} if ctx.tool_name == "read" else {"result": 1} if ctx.tool_name == "act" else None

    agent = run_all(
        Log(),
        hooks=[Hook("guard", pre_tool_call=pre)],
        permission_mode="plan",
        on_permission_decision=lambda entry, about: heard.append(entry),
    )
    await agent.send("Go")
    assert [(e.tool_name, e.decision, e.hook, e.mode) for e in heard] == [
        ("read", "deny", "guard", None),
        ("edit", "deny", None, "plan"),
    ]


async def test_calls_with_wrong_arguments_and_unknown_tools_are_not_told() -> None:
    # PERM-04, APR-50
    heard: list[Any] = []
    agent = agent_of(
        calls(("act", {"n": "x"}), "nope"),
        "Done",
        tools=Log().tools,
        on_permission_decision=lambda entry, about: heard.append(entry),
    )
    await agent.send("Go")
    assert heard == []


async def test_events_have_the_decision_between_start_and_end() -> None:
    # PERM-45, EVT-21, EVT-32
    events = await collect(run_all(Log(), permissions=[deny("act")]).stream("Go"))
    kinds_seen = [name for name in names(events) if name.startswith(("tool", "permission"))]
    assert kinds_seen[:3] == ["tool.start read", "permission.decision", "tool.start edit"]
    after = [name for name in kinds_seen[kinds_seen.index("tool.start act") + 1 :] if not name.startswith("tool.done")]
    assert after == ["permission.decision", "tool.error act"]
    quiet = await collect(run_all(Log()).stream("Go"))
    assert not [event for event in quiet if event.type == "permission.decision"]


async def test_a_decision_of_a_person_is_told_too() -> None:
    # LES-24, LES-27, APR-36, PERM-50
    heard: list[Any] = []
    agent = agent_of(
        calls("act"),
        calls("act"),
        "Done",
        tools=Log(True).tools,
        on_permission_decision=lambda entry, about: heard.append((entry, about)),
    )
    paused = await agent.send("Go", principal="ann")
    again = await agent.approvals.resolve(paused.approval_id, approved=True, by="bob", args={"n": 2})
    await agent.approvals.resolve(again.approval_id, approved=False, by="eve", note="enough")
    assert [(e.decision, e.by, e.edited, e.reason) for e, _ in heard] == [
        ("ask", None, None, None),
        ("approved", "bob", True, None),
        ("ask", None, None, None),
        ("rejected", "eve", None, "enough"),
    ]
    assert {about["principal"] for _, about in heard} == {"ann"}


async def test_a_decision_that_came_too_late_is_told_as_a_denial() -> None:
    # APR-36, PERM-24, PERM-50
    heard: list[Any] = []
    agent = agent_of(
        calls("act"), "Done", tools=Log(True).tools, approval_ttl_ms=1, on_permission_decision=lambda e, about: heard.append(e)
    )
    paused = await agent.send("Go")
    pending = await agent.approvals.get(paused.approval_id)
    while pending is not None and pending.expires_at is not None and pending.expires_at > timestamp(SYSTEM_CLOCK.wall()):
        await asyncio.sleep(0)
    await agent.approvals.resolve(paused.approval_id, approved=True)
    assert [(entry.decision, entry.reason) for entry in heard] == [("ask", None), ("deny", "expired")]
