"""What cases of a suite share: one limiter, one budget, a quota; and judges, whose calls count like all others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import LoushoError
from lousho_ray.evals import llm_critique, llm_judge
from lousho_ray.evals.judges import read_verdict
from lousho_ray.evals.results import read_results
from lousho_ray.loop.result import ExecutionResult
from lousho_ray.messages import Message
from lousho_ray.providers.interception import set_provider_interceptor
from lousho_ray.testing import mock_model
from tests.unit.evals_support import console, printed, run_body, run_suite, write_evals
from tests.unit.loop_support import agent_of

PRICED = """
from dataclasses import replace
from lousho_ray.providers.wrapper import ProviderWrapper
from lousho_ray.usage import ProviderUsage

class Priced(ProviderWrapper):
    async def generate(self, options):
        result = await self.inner.generate(options)
        return replace(result, usage=ProviderUsage(10, 1, cost_usd=0.25))

def priced(*script):
    return Priced(mock_model(list(script), on_exhausted="repeat-last"))
"""

COUNTED = """
here = most = calls = 0

async def busy(request):
    global here, most, calls
    here += 1
    calls += 1
    most = max(most, here)
    for _ in range(100):  # longer than it takes to start all of them
        await asyncio.sleep(0)
    here -= 1
    return str(most)

async def test(t, case):
    await t.send("x")
    t.check("at once", int(t.reply), at_most(%d))

define_eval(name="e", agent=lambda: create_agent(provider=mock_model([busy])), test=test, cases=range(8))
"""


async def test_one_limiter_holds_over_all_cases(tmp_path: Path) -> None:
    # EVAL-30, EVAL-33
    outcome = await run_body(tmp_path, COUNTED % 2, concurrency=8, limits={"max_concurrent": 2})
    assert outcome.exit_code == 0, [record.assertions for record in outcome.summary.records]
    assert (await run_body(tmp_path, COUNTED % 2, concurrency=8)).exit_code == 1


async def test_a_limiter_of_the_eval_file_bounds_the_suite_judges_included(tmp_path: Path) -> None:
    # EVAL-30
    body = """
from lousho_ray import create_rate_limiter, with_rate_limit
limiter = create_rate_limiter({"max_concurrent": 1})
here = most = 0

async def busy(request):
    global here, most
    here += 1
    most = max(most, here)
    for _ in range(100):  # longer than it takes to start all of them
        await asyncio.sleep(0)
    here -= 1
    return "SCORE: 1"

judge = {"provider": with_rate_limit(mock_model([busy], on_exhausted="repeat-last"), limiter)}

def agent():
    return create_agent(provider=with_rate_limit(mock_model([busy]), limiter))

async def test(t, case):
    await t.send("x")
    t.check("judged", await t.judge("Good?"), equals(1))
    t.check("at once", most, equals(1))

define_eval(name="e", agent=agent, test=test, cases=range(6), judge=judge)
"""
    assert (await run_body(tmp_path, body, concurrency=6)).exit_code == 0


async def test_a_suite_halts_at_its_budget_and_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    body = (
        PRICED
        + """
async def test(t, case):
    await t.send("x")

define_eval(name="e", agent=lambda: create_agent(provider=priced("Hi")), test=test, cases=range(6))
"""
    )
    write_evals(tmp_path, body)
    file = tmp_path / "r.jsonl"
    first = await run_suite(tmp_path, results=file, max_cost_usd=0.5)
    assert "has spent $0.5000 of the $0.5" in str(first.summary.halted)
    statuses = [record.status for record in first.summary.records]
    assert (statuses.count("passed"), statuses.count("outage"), first.summary.not_run) == (2, 1, 3)
    assert first.exit_code == 1
    again = await run_suite(tmp_path, results=file, max_cost_usd=0.5)
    assert again.summary.evals[0].rate.passed == 2  # what earlier runs spent counts
    last = await run_suite(tmp_path, results=file, max_cost_usd=9)
    assert (last.exit_code, last.summary.totals()["costUsd"]) == (0, 1.5)
    assert read_results(file).spent.cost == 1.5


async def test_the_cost_of_judges_and_of_failed_runs_is_part_of_a_case(tmp_path: Path) -> None:
    # E04
    body = (
        PRICED
        + """
async def test(t, case):
    await t.send("x")
    await t.judge("Good?")
    if case == 1:
        raise KeyError

judge = {"provider": priced("SCORE: 1")}
define_eval(name="e", agent=lambda: create_agent(provider=priced("Hi")), test=test, cases=range(2), judge=judge)
"""
    )
    outcome = await run_body(tmp_path, body)
    assert [(record.cost_usd, record.usage["modelCalls"]) for record in outcome.summary.records] == [(0.5, 2)] * 2


async def test_an_exhausted_quota_halts_the_suite_instead_of_burning_calls(tmp_path: Path) -> None:
    body = """
class NoCredit(Exception):
    status = 429
    body = {"error": {"code": "insufficient_quota", "message": "You have no credit left."}}

calls = 0

def answer(request):
    global calls
    calls += 1
    return NoCredit("429") if calls > 2 else "Hi"

async def test(t, case):
    await t.send("x")

def agent():
    return create_agent(provider=mock_model([answer]), retry={"max_retries": 3})

define_eval(name="e", agent=agent, test=test, cases=range(20))
"""
    screen = console()
    write_evals(tmp_path, body)
    outcome = await run_suite(tmp_path, screen)
    statuses = [record.status for record in outcome.summary.records]
    assert (statuses, outcome.summary.not_run) == (["passed", "passed", "outage"], 17)
    assert "no credit left" in str(outcome.summary.halted)
    assert not read_results(outcome.results).ended
    assert "halted" in printed(screen)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("Down(503)", "outage"),
        ("Down(401)", "outage"),
        ("TimeoutError()", "outage"),
        ("ConnectionError()", "outage"),
        ("Down(400)", "error"),
        ("ValueError('bug')", "error"),
    ],
)
async def test_only_failures_that_say_nothing_about_the_agent_run_again(error: str, status: str, tmp_path: Path) -> None:
    body = f"""
class Down(Exception):
    def __init__(self, status):
        self.status = status

async def test(t):
    await t.send("x")

define_eval(name="e", agent=says({error}), test=test)
"""
    outcome = await run_body(tmp_path, body)
    assert outcome.summary.records[0].status == status


async def test_a_judge_that_cannot_be_asked_is_no_verdict(tmp_path: Path) -> None:
    # E02
    body = """
async def test(t):
    await t.send("x")
    t.check("score", await t.judge("Good?"), at_least(0.5))

define_eval(name="e", agent=says("Hi"), test=test, judge={"provider": mock_model([ConnectionError("gone")])})
"""
    (record,) = (await run_body(tmp_path, body)).summary.records
    assert (record.status, record.assertions) == ("outage", ())


@pytest.mark.parametrize(
    ("reply", "score", "problem"),
    [
        ("SCORE: 0.8\nFEEDBACK: Fine.", 0.8, False),
        ("**Score:** 1\nFeedback: ok", 1.0, False),
        ("0.25", 0.25, False),
        ("**0.5**", 0.5, False),
        ("SCORE: 4/5", 0.8, False),
        ('```json\n{"score": 0.4, "reason": "so"}\n```', 0.4, False),
        ("SCORE: 90", 1.0, True),
        ("[[90]]", 1.0, True),
        ("SCORE: -1", 0.0, True),
        ("There are 5 reasons, score 9", 0.0, True),
        ("I cannot evaluate", 0.0, True),
        ('{"rationale": "x"}', 0.0, True),
        ('{"score": "high"}', 0.0, True),
        ('{"score": true}', 0.0, True),
        ("Not excellent", 0.0, True),
        ("SCORE: nan", 0.0, True),
        ("Error 404: not found", 0.0, True),
        ("", 0.0, True),
    ],
)
def test_a_verdict_is_read_only_where_a_score_is_stated(reply: str, score: float, problem: bool) -> None:
    # EVAL-19, E02
    verdict = read_verdict(reply)
    assert (verdict.score, bool(verdict.problem)) == (score, problem)


def test_feedback_is_its_line_or_the_rest() -> None:
    # EVAL-19
    assert read_verdict("SCORE: 1\nFEEDBACK: Good\nindeed.").feedback == "Good\nindeed."
    assert read_verdict("SCORE: 1\nIt is fine.").feedback == "It is fine."


async def test_a_judge_sees_the_input_the_reply_and_the_context(tmp_path: Path) -> None:
    # EVAL-17, LES-43
    body = """
model = mock_model(["SCORE: 0.7", "hm"], default_model="judge-model")

async def test(t):
    await t.send("the question")
    t.check("score", await t.judge("the rubric", context={"expected": "the truth"}), equals(0.7))
    said = model.last_call.messages[-1].text
    t.check("parts", [part in said for part in ("the question", "the reply", "the rubric", "the truth")], equals([True] * 4))
    t.check("no verdict", await t.judge("again"), equals(0))

define_eval(name="e", agent=says("the reply"), test=test, judge={"provider": model})
"""
    (record,) = (await run_body(tmp_path, body)).summary.records
    assert (record.status, record.error) == ("passed", None)
    assert [item.message for item in record.failed_softs] == ["the judge gave no score: 'hm'"]


async def test_model_grading_outside_judge_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # EVAL-18
    for make in (llm_judge, llm_critique):
        with pytest.raises(LoushoError, match="--judge") as caught:
            make("Good?", provider=mock_model(["SCORE: 1"]))
        assert caught.value.code == "LOUSHO_EVALS_INVALID"
    monkeypatch.setenv("LOUSHO_ALLOW_LLM_JUDGE", "1")
    result: ExecutionResult[Any] = ExecutionResult(text="the reply", new_messages=[Message("user", "the question")])
    model = mock_model(["SCORE: 0.5\nFEEDBACK: Meh.", "SCORE: 0.25"])
    assert await llm_critique("Good?", provider=model)(result) == {"score": 0.5, "feedback": "Meh."}
    assert await llm_judge("Good?", provider=model)(result) == 0.25
    assert "the question" in model.calls[0].messages[-1].text


async def test_an_interceptor_stands_between_runs_and_providers_until_it_is_removed() -> None:
    # EVAL-33, TEST-01
    other = mock_model(["other", "other again"])
    agent = agent_of("own", "own again")
    remove = set_provider_interceptor(lambda provider: other)
    try:
        assert (await agent.send("x")).text == "other"
        assert (await agent.stream("x").result).text == "other again"
    finally:
        remove()
    assert (await agent.send("x")).text == "own"

    async def beside() -> str:
        set_provider_interceptor(lambda provider: other)
        return "done"

    await asyncio.create_task(beside())
    assert (await agent.send("x")).text == "own again"
    with pytest.raises(LoushoError):
        set_provider_interceptor(3)  # type: ignore[arg-type]


async def test_a_lost_account_halts_the_suite_since_its_budget_holds_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lousho_ray.errors import AgentExecutionError
    from lousho_ray.evals.interceptor import SuiteBudget

    async def lost(self: Any, spend: Any) -> None:
        raise AgentExecutionError("The budget actor knows no such run.")

    monkeypatch.setattr(SuiteBudget, "book", lost)
    body = """
async def test(t, case):
    await t.send("x")

define_eval(name="e", agent=says("Hi"), test=test, cases=range(5))
"""
    outcome = await run_body(tmp_path, body, max_cost_usd=1)
    assert "account is lost" in str(outcome.summary.halted)
    assert ([record.status for record in outcome.summary.records], outcome.summary.not_run) == (["outage"], 4)
