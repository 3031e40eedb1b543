"""Setting the estimate of a model call aside before the call is made: `limits={"reserve": True}`."""

from __future__ import annotations

from decimal import Decimal

from lousho_ray.loop.result import BudgetBreach
from lousho_ray.loop.state import RunDeps, RunState
from lousho_ray.ports import GenerateOptions, LLMProvider
from lousho_ray.providers.prices import estimate_cost
from lousho_ray.tokens import estimate_request_tokens
from lousho_ray.usage import ProviderUsage, Spend

FIRST_OUTPUT_TOKENS = 1_000
"""What a reply is taken for when no `max_tokens` bounds it and the run has had none yet."""


class Refused(Exception):  # noqa: N818 - control flow: the call is not made and the run ends `budget-exceeded`
    """A limit leaves no room for a call."""

    def __init__(self, breach: BudgetBreach) -> None:
        super().__init__(f"The {breach.limit} limit of {breach.max:g} leaves no room for this call.")
        self.breach = breach


async def reserve(state: RunState, deps: RunDeps, provider: LLMProvider, request: GenerateOptions, call_id: str) -> None:
    """Sets a call's estimate aside under the limits that ask for it; the report of `call_id` settles it.

    Raises:
        Refused: It does not fit.
        Aborted: The run was stopped while the call waited for others to end.
    """
    if not deps.budget.reserves:
        return
    estimate = estimate_call(state, provider, request)
    breach = await deps.abort.guard(deps.budget.reserve(call_id, estimate, state.usage.spend))
    if breach is not None:
        raise Refused(breach)


def estimate_call(state: RunState, provider: LLMProvider, request: GenerateOptions) -> Spend:
    """What a call may come to: its request, and a reply of `max_tokens`, else as long as the run's longest so far.

    A model without a price costs what the run's dearest call so far has cost.
    """
    replies = [entry.usage.completion_tokens for entry in state.step_usage if entry.purpose is None]
    output = request.get("max_tokens") or max(replies, default=FIRST_OUTPUT_TOKENS)
    usage = ProviderUsage(estimate_request_tokens(request), int(output))
    cost = estimate_cost(usage, request.model or provider.default_model or "unknown")
    if cost is None:
        known = [entry.cost_usd for entry in state.step_usage if entry.cost_usd is not None]
        cost = Decimal(str(max(known))) if known else None
    return Spend(usage.prompt_tokens, usage.completion_tokens, cost, 1)
