"""Usage and cost figures: what one model call reported, and what a run has spent.

Costs are summed as `Decimal` and turned into `float` once, at the reader (`Usage.cost_usd`), so that 10,000 calls of $0.0001 are
exactly $1. A cost is `None` as soon as one call has neither a reported cost nor a known price: never a partial sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

ZERO = Decimal(0)


@dataclass(frozen=True, slots=True)
class ProviderUsage:
    """What a provider reported for one call: `prompt_tokens` with what was cached or cache-written, output with reasoning."""

    prompt_tokens: int
    completion_tokens: int
    cached_input_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: float | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Spend:
    """A sum of model calls: the unit a ledger adds up. `cost` is `None` when one of the calls has an unknown price."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost: Decimal | None = ZERO
    calls: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Spend) -> Spend:
        cost = None if self.cost is None or other.cost is None else self.cost + other.cost
        return Spend(
            self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens, cost, self.calls + other.calls
        )


@dataclass(slots=True)
class ModelUsage:
    """What one model served: `usage.by_model[id]`."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost: Decimal | None = ZERO
    calls: int = 0

    @property
    def cost_usd(self) -> float | None:
        return None if self.cost is None else float(self.cost)

    def since(self, earlier: ModelUsage) -> ModelUsage:
        """What came on top of `earlier`."""
        return ModelUsage(
            self.input_tokens - earlier.input_tokens,
            self.output_tokens - earlier.output_tokens,
            _minus(self.cost, earlier.cost),
            self.calls - earlier.calls,
        )


@dataclass(frozen=True, slots=True)
class StepUsage:
    """One model call of a run: `result.step_usage[i]`. `purpose` names a side call (a summary, a judge)."""

    step: int
    model: str
    usage: ProviderUsage
    estimated: bool = False
    cost_usd: float | None = None
    purpose: str | None = None


@dataclass(slots=True)
class Usage:
    """What a run spent, its sub-agents included (they are shown again in `delegated`)."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost: Decimal | None = ZERO
    estimated: bool = False
    model_calls: int = 0
    by_model: dict[str, ModelUsage] = field(default_factory=dict)
    cached_input_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    hosted_tool_calls: dict[str, int] | None = None
    delegated: Usage | None = None
    runs: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.input_tokens

    @property
    def completion_tokens(self) -> int:
        return self.output_tokens

    @property
    def cost_usd(self) -> float | None:
        """USD, or `None` while the price of a model used is unknown."""
        return None if self.cost is None else float(self.cost)

    @property
    def spend(self) -> Spend:
        return Spend(self.input_tokens, self.output_tokens, self.cost, self.model_calls)

    def add_call(self, model: str, used: ProviderUsage, cost: Decimal | None, *, estimated: bool = False) -> None:
        """Books one model call under the model that served it."""
        self.input_tokens += used.prompt_tokens
        self.output_tokens += used.completion_tokens
        self.cost = _plus(self.cost, cost)
        self.estimated = self.estimated or estimated
        self.model_calls += 1
        self.cached_input_tokens = _maybe(self.cached_input_tokens, used.cached_input_tokens)
        self.cache_write_tokens = _maybe(self.cache_write_tokens, used.cache_write_tokens)
        self.reasoning_tokens = _maybe(self.reasoning_tokens, used.reasoning_tokens)
        entry = self.by_model.setdefault(model, ModelUsage())
        entry.input_tokens += used.prompt_tokens
        entry.output_tokens += used.completion_tokens
        entry.cost = _plus(entry.cost, cost)
        entry.calls += 1

    def add_hosted(self, name: str, count: int = 1) -> None:
        """Counts calls of a tool that the model's provider ran itself."""
        self.hosted_tool_calls = self.hosted_tool_calls or {}
        self.hosted_tool_calls[name] = self.hosted_tool_calls.get(name, 0) + count

    def add(self, other: Usage) -> None:
        """Adds the figures of another usage, without its `delegated` view (which is a part of its totals already)."""
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cost = _plus(self.cost, other.cost)
        self.estimated = self.estimated or other.estimated
        self.model_calls += other.model_calls
        self.cached_input_tokens = _maybe(self.cached_input_tokens, other.cached_input_tokens)
        self.cache_write_tokens = _maybe(self.cache_write_tokens, other.cache_write_tokens)
        self.reasoning_tokens = _maybe(self.reasoning_tokens, other.reasoning_tokens)
        for name, count in (other.hosted_tool_calls or {}).items():
            self.add_hosted(name, count)
        for model, used in other.by_model.items():
            entry = self.by_model.setdefault(model, ModelUsage())
            entry.input_tokens += used.input_tokens
            entry.output_tokens += used.output_tokens
            entry.cost = _plus(entry.cost, used.cost)
            entry.calls += used.calls

    def add_delegated(self, child: Usage, *, runs: int = 1) -> None:
        """Adds a sub-agent's usage to the totals and to `delegated`; `runs=0` for more of a run that was counted before."""
        self.add(child)
        if self.delegated is None:
            self.delegated = Usage(runs=0)
        self.delegated.add(child)
        self.delegated.runs = (self.delegated.runs or 0) + runs

    def since(self, earlier: Usage) -> Usage:
        """What came on top of `earlier`, a state of this usage that was kept: what a run that went on has spent since."""
        by_model = {name: used.since(earlier.by_model.get(name, ModelUsage())) for name, used in self.by_model.items()}
        hosted_before = earlier.hosted_tool_calls or {}
        hosted = {name: count - hosted_before.get(name, 0) for name, count in (self.hosted_tool_calls or {}).items()}
        return Usage(
            input_tokens=self.input_tokens - earlier.input_tokens,
            output_tokens=self.output_tokens - earlier.output_tokens,
            cost=_minus(self.cost, earlier.cost),
            estimated=self.estimated,
            model_calls=self.model_calls - earlier.model_calls,
            by_model={name: used for name, used in by_model.items() if used.calls},
            cached_input_tokens=_less(self.cached_input_tokens, earlier.cached_input_tokens),
            cache_write_tokens=_less(self.cache_write_tokens, earlier.cache_write_tokens),
            reasoning_tokens=_less(self.reasoning_tokens, earlier.reasoning_tokens),
            hosted_tool_calls={name: count for name, count in hosted.items() if count} or None,
        )

    def __add__(self, other: Usage) -> Usage:
        total = Usage()
        total.add(self)
        total.add(other)
        for part in (self.delegated, other.delegated):
            if part is not None:
                total.delegated = (total.delegated or Usage()) + part
        if total.delegated is not None:
            total.delegated.runs = sum((part.runs or 0) for part in (self.delegated, other.delegated) if part is not None)
        return total

    def copy(self) -> Usage:
        return Usage.from_dict(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form (camelCase). `costUsd` is a decimal string there, so that nothing is rounded by a store."""
        data: dict[str, Any] = {
            "inputTokens": self.input_tokens,
            "outputTokens": self.output_tokens,
            "totalTokens": self.total_tokens,
            "estimated": self.estimated,
            "modelCalls": self.model_calls,
            "byModel": {
                model: _drop_none(
                    {"inputTokens": m.input_tokens, "outputTokens": m.output_tokens, "costUsd": _text(m.cost), "calls": m.calls}
                )
                for model, m in self.by_model.items()
            },
            "costUsd": _text(self.cost),
            "cachedInputTokens": self.cached_input_tokens,
            "cacheWriteTokens": self.cache_write_tokens,
            "reasoningTokens": self.reasoning_tokens,
            "hostedToolCalls": None if self.hosted_tool_calls is None else dict(self.hosted_tool_calls),
            "delegated": None if self.delegated is None else self.delegated.to_dict(),
            "runs": self.runs,
        }
        return _drop_none(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Usage:
        """Rebuilds a usage from `to_dict()`; one written without a cost goes on with its cost unknown."""
        hosted, delegated = data.get("hostedToolCalls"), data.get("delegated")
        return cls(
            input_tokens=data.get("inputTokens", 0),
            output_tokens=data.get("outputTokens", 0),
            cost=_decimal(data.get("costUsd")),
            estimated=data.get("estimated", False),
            model_calls=data.get("modelCalls", 0),
            by_model={
                model: ModelUsage(m.get("inputTokens", 0), m.get("outputTokens", 0), _decimal(m.get("costUsd")), m.get("calls", 0))
                for model, m in data.get("byModel", {}).items()
            },
            cached_input_tokens=data.get("cachedInputTokens"),
            cache_write_tokens=data.get("cacheWriteTokens"),
            reasoning_tokens=data.get("reasoningTokens"),
            hosted_tool_calls=None if hosted is None else dict(hosted),
            delegated=None if delegated is None else cls.from_dict(delegated),
            runs=data.get("runs"),
        )


def format_usage(usage: Usage) -> str:
    """`1,234 in / 567 out tokens · $0.0042 (2 model calls)`; a leading `~` when estimated, no cost while it is unknown."""
    mark = "~" if usage.estimated else ""
    text = f"{mark}{usage.input_tokens:,} in / {usage.output_tokens:,} out tokens"
    if usage.cost is not None:
        text += f" · ${usage.cost:.4f}" if usage.cost < 1 else f" · ${usage.cost:,.2f}"
    return f"{text} ({usage.model_calls:,} model call{'' if usage.model_calls == 1 else 's'})"


def _plus(a: Decimal | None, b: Decimal | None) -> Decimal | None:
    return None if a is None or b is None else a + b


def _minus(a: Decimal | None, b: Decimal | None) -> Decimal | None:
    return None if a is None or b is None else a - b


def _less(a: int | None, b: int | None) -> int | None:
    return a if a is None else a - (b or 0)


def _maybe(a: int | None, b: int | None) -> int | None:
    return a if b is None else (a or 0) + b


def _drop_none(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}


def _text(cost: Decimal | None) -> str | None:
    return None if cost is None else str(cost)


def _decimal(value: Any) -> Decimal | None:
    return None if value is None else Decimal(str(value))
