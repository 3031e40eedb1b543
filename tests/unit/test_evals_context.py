"""`t`: what a case records about what an agent did."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.evals.checks import at_least, at_most, equals, includes, matches
from lousho_ray.evals.records import CaseRecord
from tests.unit.evals_support import run_body

BODY = """
@tool
def find(q: str, page: dict | None = None, tags: list | None = None) -> str:
    "Finds."
    return "found"

def call(**args):
    return {"tool_calls": [{"name": "find", "args": args}]}

async def test(t):
    %s

define_eval(name="e", agent=says(%s, tools=[find]), test=test)
"""


async def record_of(folder: Path, test: str, *script: str) -> CaseRecord:
    lines = "\n    ".join(test.strip().splitlines())
    outcome = await run_body(folder, BODY % (lines, ", ".join(script) or "'Hi'"))
    (record,) = outcome.summary.records
    return record


def said(record: CaseRecord) -> dict[str, str]:
    return {item.name: item.message for item in record.assertions if not item.passed}


async def test_several_sends_are_one_conversation_and_add_up(tmp_path: Path) -> None:
    # EVAL-06
    test = """
t.check("before", t.reply, equals(""))
await t.send("one")
await t.send("two")
t.check("reply", t.reply, equals("b"))
t.check("latest", t.result.text, equals("b"))
t.check("turns", [m.text for m in t.result.messages if m.role == "user"], equals(["one", "two"]))
t.check("calls", [c.args for c in t.tool_calls], lambda calls: calls[0]["q"] == "x")
t.max_steps(3)
t.max_tokens(15)
"""
    usage = "'usage': {'input_tokens': 4, 'output_tokens': 1}}"
    record = await record_of(tmp_path, test, f"{{**call(q='x'), {usage}", f"{{'text': 'a', {usage}", f"{{'text': 'b', {usage}")
    assert (record.status, said(record), record.steps, record.tokens) == ("passed", {}, 3, 15)
    record = await record_of(tmp_path, "await t.send('x')\nt.max_steps(1)\nt.max_tokens(1)", "call(q='x')", "'a'")
    assert set(said(record)) == {"max_steps", "max_tokens"}


async def test_assertions_never_raise_and_every_failed_gate_is_listed(tmp_path: Path) -> None:
    # EVAL-07, EVAL-13
    test = """
await t.send("x")
t.called_tool("none")
t.check("a", 1, equals(2))
t.soft("s", 1, at_least(2))
t.check("b", 1, equals(1))
"""
    record = await record_of(tmp_path, test)
    assert record.status == "failed"
    assert [item.name for item in record.failed_gates] == ["called_tool:none", "a"]
    assert [item.to_dict() for item in record.failed_softs] == [
        {"name": "s", "kind": "soft", "passed": False, "score": 1.0, "threshold": 2, "message": "1 is not at least 2"}
    ]


async def test_a_soft_failure_alone_fails_only_a_strict_run(tmp_path: Path) -> None:
    # EVAL-13, EVAL-24
    body = BODY % ("await t.send('x'); t.soft('s', 0.2, at_least(0.5))", "'Hi'")
    assert (await run_body(tmp_path, body)).exit_code == 0
    assert (await run_body(tmp_path, body, strict=True)).exit_code == 1


async def test_completed_names_the_real_finish_reason(tmp_path: Path) -> None:
    # EVAL-08
    record = await record_of(tmp_path, "await t.send('x', max_steps=1)\nt.completed()", "call(q='x')", "'a'")
    assert said(record) == {"completed": "the run ended with finish reason 'max-steps'"}
    record = await record_of(tmp_path, "t.completed()")
    assert "nothing was sent" in said(record)["completed"]


async def test_called_tool_matches_arguments_partially_and_counts_matching_calls(tmp_path: Path) -> None:
    # EVAL-09
    test = """
await t.send("x")
t.called_tool("find")
t.called_tool("find", {"page": {"n": 1}})
t.called_tool("find", {"q": "a"}, times=1)
t.called_tool("find", times=2)
t.called_tool("find", {"tags": [{"k": 1}, 2]})
"""
    calls = "call(q='a', page={'n': 1, 'm': 2})", "call(q='b', tags=[{'k': 1, 'z': 0}, 2])", "'done'"
    assert said(await record_of(tmp_path, test, *calls)) == {}
    failing = """
await t.send("x")
t.called_tool("find", {"q": "a"}, times=2)
t.called_tool("find", {"tags": [2, {"k": 1}]})
t.called_tool("find", {"tags": [{"k": 1}]})
t.called_tool("find", {"page": {"n": True}})
"""
    record = await record_of(tmp_path, failing, *calls)
    assert len(record.failed_gates) == 4


async def test_a_failed_call_check_tells_what_was_called_instead(tmp_path: Path) -> None:
    # EVAL-10
    test = "await t.send('x')\nt.called_tool('gone')\nt.called_tool('find', {'q': 'b', 'page': {'n': 2}})"
    record = await record_of(tmp_path, test, "call(q='a')", "call(q='b', page={'n': 1})", "'x'")
    assert said(record) == {
        "called_tool:gone": "gone was not called; called: find, find",
        "called_tool:find": "find was called, but never with these arguments; closest call: page.n is 1, expected 2",
    }


async def test_tools_that_were_not_called_and_their_order(tmp_path: Path) -> None:
    # EVAL-11
    test = """
await t.send("x")
t.not_called_tool("gone")
t.not_called_tool("find")
t.tool_order(["find", "find"])
t.tool_order(["find", "gone"])
"""
    record = await record_of(tmp_path, test, "call(q='a')", "call(q='b')", "'x'")
    assert said(record) == {
        "not_called_tool:find": "find was called 2 times",
        "tool_order": "wanted the order find, gone; no gone after the first 1 of them; called: find, find",
    }


async def test_a_cost_nobody_reports_is_skipped_and_passes(tmp_path: Path) -> None:
    # EVAL-12
    record = await record_of(tmp_path, "await t.send('x')\nt.max_cost_usd(1)")
    (item,) = record.assertions
    assert item.to_dict()["skipped"] is True
    assert item.passed


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (includes("ab"), "xabx", (True, 1.0)),
        (includes("ab"), ["ab"], (True, 1.0)),
        (includes("ab"), None, (False, 0.0)),
        (includes("ab"), "x", (False, 0.0)),
        (matches(r"\d+"), "a12", (True, 1.0)),
        (matches("x"), 12, (False, 0.0)),
        (equals([1]), [1], (True, 1.0)),
        (equals(1), 2, (False, 0.0)),
        (at_least(0.5), 0.5, (True, 0.5)),
        (at_least(0.5), True, (True, 1.0)),
        (at_most(3), 4, (False, 4.0)),
        (at_least(1), "2", (False, None)),
        (at_least(1), math.nan, (False, None)),
        (at_most(1), None, (False, None)),
        (at_least(1), math.inf, (False, None)),
    ],
)
def test_checks_score_what_they_can_and_never_raise(check: Any, value: Any, expected: tuple[bool, float | None]) -> None:
    # EVAL-14, E01
    checked = check(value)
    assert (checked.passed, checked.score) == expected
    assert checked.passed or checked.message


async def test_a_check_of_the_users_own_may_raise_or_return_anything(tmp_path: Path) -> None:
    test = """
t.check("raises", 1, lambda value: 1 / 0)
t.check("odd", 1, lambda value: "yes")
t.check("true", 1, lambda value: True)
t.soft("nan", 1, lambda value: float("nan"))
"""
    record = await record_of(tmp_path, test)
    assert set(said(record)) == {"raises", "odd", "nan"}


async def test_what_a_test_raises_is_an_error_and_keeps_the_assertions(tmp_path: Path) -> None:
    # EVAL-16
    for raised in ("raise KeyError('x')", "import sys; sys.exit(1)", "raise KeyboardInterrupt", "raise asyncio.CancelledError"):
        record = await record_of(tmp_path, f"t.check('a', 1, equals(2))\n{raised}")
        assert record.status == "error"
        assert [item.name for item in record.assertions] == ["a"]
        assert record.error is not None


async def test_a_factory_is_called_at_the_first_send_of_each_case(tmp_path: Path) -> None:
    # EVAL-03
    body = """
made = []

async def fresh(case):
    made.append(case)
    return create_agent(provider=mock_model([case]))

async def test(t, case):
    if case != "never":
        before = len(made)
        await t.send("x")
        t.check("made now", len(made) - before, equals(1))
        t.check("reply", t.reply, equals(case))
    t.soft("made", len(made), at_most(2))

define_eval(name="e", agent=fresh, test=test, cases=["a", "b", "never"])
"""
    outcome = await run_body(tmp_path, body)
    assert [(record.status, record.failed_softs) for record in outcome.summary.records] == [("passed", ())] * 3


async def test_a_shared_scripted_agent_runs_out_of_turns_which_is_an_error(tmp_path: Path) -> None:
    # EVAL-03
    body = """
async def test(t, case):
    await t.send("x")

define_eval(name="e", agent=says("only one")(), test=test, cases=["a", "b"])
"""
    outcome = await run_body(tmp_path, body)
    assert [record.status for record in outcome.summary.records] == ["passed", "error"]
    assert outcome.exit_code == 1


async def test_cases_of_one_agent_share_no_conversation_and_no_store(tmp_path: Path) -> None:
    # E04
    body = """
from lousho_ray import memory_store
model = mock_model([lambda request: str(len(request.messages))], on_exhausted="repeat-last")
agent = create_agent(provider=model, store=memory_store())

async def test(t, case):
    await t.send("x")
    t.check("fresh", t.reply, equals("2"))

define_eval(name="e", agent=agent, test=test, cases=["a", "b", "c"])
"""
    assert (await run_body(tmp_path, body, concurrency=3)).exit_code == 0


async def test_calls_of_sub_agents_are_apart(tmp_path: Path) -> None:
    # EVAL-09
    body = """
@tool
def find(q: str) -> str:
    "Finds."
    return "found"

def lead():
    child = create_agent(
        provider=mock_model([{"tool_calls": [{"name": "find", "args": {"q": "x"}}]}, "ok"]), tools=[find], description="Helps."
    )
    task = {"name": "task", "args": {"agent": "child", "prompt": "p", "description": "d"}}
    return create_agent(provider=mock_model([{"tool_calls": [task]}, "done"]), subagents={"child": child})

async def test(t):
    await t.send("x")
    t.check("own", [c.name for c in t.tool_calls], equals(["task"]))
    t.check("all", [c.name for c in t.all_tool_calls], equals(["task", "find"]))

define_eval(name="e", agent=lead, test=test)
"""
    outcome = await run_body(tmp_path, body)
    assert outcome.exit_code == 0, outcome.summary.to_dict()


async def test_the_classic_form_is_one_gate_named_score(tmp_path: Path) -> None:
    # EVAL-02, EVAL-15
    body = """
@tool
def find(q: str) -> str:
    "Finds."
    return "found"

call = {"tool_calls": [{"name": "find", "args": {"q": "x"}}]}
agent = says("never")()

def scored(name, *script, **options):
    define_eval(name=name, agent=agent, input="x", provider=mock_model(list(script)), tool_registry=[find], **options)

scored("a", call, "Hi ", score=exact_match("Hi"))
scored("b", "Hi", score=tool_call_order(["find"]), threshold=0.5)
scored("c", call, "Hi", max_steps=1, score=budget(max_steps=1))
scored("d", "Hi", score=lambda result: None)
"""
    summary = (await run_body(tmp_path, body)).summary
    found = {record.eval: (record.status, [(a.name, a.kind, a.score) for a in record.assertions]) for record in summary.records}
    assert found == {
        "a": ("passed", [("score", "gate", 1.0)]),
        "b": ("failed", [("score", "gate", 0.0)]),
        "c": ("passed", [("score", "gate", 1.0)]),
        "d": ("failed", [("score", "gate", None)]),
    }


async def test_asking_too_early_is_an_error_with_the_fix(tmp_path: Path) -> None:
    # EVAL-17
    record = await record_of(tmp_path, "t.result")
    assert record.error is not None
    assert record.error["code"] == "LOUSHO_EVALS_INVALID"
    record = await record_of(tmp_path, "await t.send('x')\nawait t.judge('Good?')")
    assert record.error is not None
    assert "define_eval(judge=" in record.error["message"]
