"""Which calls pass a limiter, how often, and what is booked for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.limits.limiter import create_rate_limiter
from lousho_ray.loop.hooks import HookContext
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions, GenerateResult
from lousho_ray.providers.fallback import with_fallback
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.retry import with_retry
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tokens import estimate_request_tokens
from lousho_ray.tools.tool import tool
from lousho_ray.usage import ProviderUsage
from tests.unit.loop_support import PolicyProvider, agent_of, calls, plain
from tests.unit.test_limited import RateLimited, Recorder, Streaming, steps
from tests.unit.test_loop_limits import task


def admissions(limiter: Recorder) -> int:
    return steps(limiter.log).count("acquire")


async def slow(options: GenerateOptions) -> str:
    for _ in range(5):
        await asyncio.sleep(0)
    return "Done"


async def test_all_runs_of_an_agent_share_the_limiter_made_from_its_dict_and_two_agents_do_not() -> None:
    # RL-03, RL-04
    provider = PolicyProvider(slow)
    agents = [create_agent(provider=provider, rate_limit={"max_concurrent": 1}) for _ in range(2)]
    await asyncio.gather(*[agents[0].send("Go") for _ in range(6)])
    assert (provider.calls, provider.most) == (6, 1)
    await asyncio.gather(*[agent.send("Go") for agent in agents for _ in range(3)])
    assert provider.most == 2


async def test_a_call_is_estimated_once_before_any_limiter_is_asked_and_that_number_is_replaced() -> None:
    # RL-15, RL-26
    log: list[Any] = []
    limiters = [Recorder("a", log), Recorder("b", log)]
    request = GenerateOptions(messages=[user("once")])

    def estimator(text: str, model: str | None) -> int:
        log.append(("estimate", text))
        return 1_000

    await with_rate_limit(Streaming(), limiters, estimator=estimator).generate(request)
    estimates = [entry for entry in log if entry[0] == "estimate" and entry[1] == "once"]
    assert len(estimates) == 1
    booked = {entry[0]: entry[2] for entry in log if entry[1] == "acquire"}
    assert booked["a"] == booked["b"] >= 1_000
    assert log.index(estimates[0]) < log.index(("a", "acquire", booked["a"]))
    real = create_rate_limiter({"tokens_per_minute": 100_000})
    await with_rate_limit(Streaming(), real).generate(request)
    assert estimate_request_tokens(request) != 42
    assert (await real.stats()).tokens_in_window == 42, "what was booked is what was replaced"


async def test_tokens_are_input_and_output_together() -> None:
    # RL-D6
    limiter = create_rate_limiter({"tokens_per_minute": 100})
    model = PolicyProvider(lambda options: GenerateResult("x", usage=ProviderUsage(30, 12, cached_input_tokens=10)))
    await with_rate_limit(model, limiter).generate(GenerateOptions(messages=[user("hi")]))
    assert (await limiter.stats()).tokens_in_window == 42


async def test_the_limiter_of_an_agent_is_outside_of_its_retries_and_fallbacks() -> None:
    # RL-23, RL-24
    limiter = Recorder()
    first, second = mock_model([RateLimited(), RateLimited()]), mock_model([RateLimited(), "Done"])
    agent = create_agent(
        provider=with_fallback([with_retry(model, max_retries=1, backoff={"initial_ms": 0}) for model in (first, second)]),
        retry=False,
        rate_limit=limiter,
    )
    assert (await agent.send("Go")).text == "Done"
    assert len(first.calls) + len(second.calls) == 4
    assert steps(limiter.log)[0] == "acquire"
    assert admissions(limiter) == 1


class Judged:
    """A hook that makes a model call of its own before each."""

    name = "judged"

    async def pre_generate(self, ctx: HookContext) -> None:
        await ctx.generate(mock_model(["Fine"]), GenerateOptions([user("Fine?")]), "judge")


async def test_the_leads_limiter_covers_every_model_call_of_its_runs() -> None:
    # RL-27: its own, those of sub-agents at any depth, repairs, forced answers, and calls of hooks
    limiter = Recorder()
    low = agent_of("Low", name="low", description="Low.")
    middle = agent_of(calls(task("low")), "Middle", name="middle", description="Middle.", subagents={"low": low})
    lead = agent_of(
        calls(task("middle")),
        "no number",
        "7",
        subagents={"middle": middle},
        max_subagent_depth=2,
        output=int,
        rate_limit=limiter,
    )
    result = await lead.send("Go")
    assert result.object == 7
    assert result.output_repaired
    assert (result.usage.model_calls, admissions(limiter)) == (6, 6)
    forced = agent_of(calls("look"), "7", tools=[plain("look")], output=int, max_steps=1, hooks=[Judged()], rate_limit=limiter)
    result = await forced.send("Go")
    assert result.finish_reason == "max-steps"
    assert (result.usage.model_calls, admissions(limiter)) == (4, 6 + 4)


async def test_a_subagent_used_by_itself_is_not_limited_by_a_lead_it_has_worked_for() -> None:
    # RL-28
    limiter = Recorder()
    child = agent_of("For the lead", "By itself", name="worker", description="Works.")
    lead = agent_of(calls(task("worker")), "Done", subagents={"worker": child}, rate_limit=limiter)
    await lead.send("Go")
    assert admissions(limiter) == 3
    assert (await child.send("Go")).text == "By itself"
    assert admissions(limiter) == 3


async def test_a_resumed_run_uses_the_limiter_of_the_agent_that_resumes() -> None:
    # RL-29
    @tool(needs_approval=True)
    def pay() -> str:
        """Pays."""
        return "paid"

    store, first, second = memory_store(), Recorder(), Recorder()
    asking = agent_of(calls("pay"), tools=[pay], store=store, rate_limit=first)
    paused = await asking.send("Go", session_id="s")
    assert (paused.finish_reason, admissions(first)) == ("awaiting-approval", 1)
    deciding = agent_of("Done", tools=[pay], store=store, rate_limit=second)
    assert paused.approval_id is not None
    result = await deciding.approvals.resolve(paused.approval_id, approved=True)
    assert result.text == "Done"
    assert (admissions(first), admissions(second)) == (1, 1)


async def test_there_are_no_priorities_and_the_queue_has_no_limit() -> None:
    # RL-D4: max_waiting is reserved
    for option in ("max_waiting", "priority"):
        with pytest.raises(ConfigurationError) as raised:
            create_rate_limiter({"max_concurrent": 1, option: 1})
        assert raised.value.field == f"rate_limit.{option}"
    limiter = create_rate_limiter({"max_concurrent": 1})
    held = await limiter.acquire(1)
    waiting = [asyncio.create_task(limiter.acquire(1)) for _ in range(5_000)]
    await asyncio.sleep(0)
    assert (await limiter.stats()).waiting == 5_000
    held.release()
    for call in waiting:
        (await call).release()
