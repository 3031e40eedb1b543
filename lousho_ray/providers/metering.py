"""What one finished model call used and cost: reported by the provider, else estimated."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from lousho_ray.messages import Message
from lousho_ray.ports import GenerateOptions, LLMProvider, ServedBy
from lousho_ray.providers.prices import estimate_cost
from lousho_ray.tokens import estimate_request_tokens, estimate_tokens
from lousho_ray.usage import ProviderUsage, Spend, Usage


@dataclass(frozen=True, slots=True)
class Metered:
    """The figures of one call. `cost` is in USD, `None` while the price is unknown; `estimated` says that no usage was reported."""

    model: str
    usage: ProviderUsage
    cost: Decimal | None
    estimated: bool

    @property
    def spend(self) -> Spend:
        return Spend(self.usage.prompt_tokens, self.usage.completion_tokens, self.cost, 1)

    def add_to(self, usage: Usage) -> None:
        usage.add_call(self.model, self.usage, self.cost, estimated=self.estimated)


def meter(
    provider: LLMProvider, request: GenerateOptions, reply: Message, usage: ProviderUsage | None, served_by: ServedBy | None = None
) -> Metered:
    """The figures of a call. `reply` is what is counted when the provider reported no `usage`."""
    used = usage if usage is not None else ProviderUsage(estimate_request_tokens(request), estimate_tokens([reply]))
    model = (served_by.model if served_by else None) or request.model or provider.default_model or "unknown"
    return priced(model, used, estimated=usage is None)


def priced(model: str, used: ProviderUsage, *, estimated: bool) -> Metered:
    """The figures of a call that used so much: the provider's own cost, else that of the price table."""
    cost = Decimal(str(used.cost_usd)) if used.cost_usd is not None else estimate_cost(used, model)
    return Metered(model, used, cost, estimated)
