"""Context windows and prices of models: the snapshot shipped in `genai-prices`, and the entries of users, which win.

Prices are estimates, not a bill: no discounts, batch rates or fees for hosted tools. Nothing is looked up on the network. An id
that is not in the table has no price; it is never taken for a similar one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Protocol

from lousho_ray.errors import ConfigurationError

if TYPE_CHECKING:
    from genai_prices.types import MatchLogic, ModelPrice
    from genai_prices.types import ModelInfo as TableModel
    from genai_prices.types import Provider as TableProvider

DEFAULT_CONTEXT_WINDOW_TOKENS = 128_000
"""Assumed for a model that is not in the table."""

PER_MTOK = Decimal(1_000_000)

BARE_VENDORS = ("openai", "anthropic", "google", "x-ai", "deepseek")
"""Vendors whose models are found by the id alone; those of all others only as `provider/id`."""

_CHAT_PRICES = ("input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok")
"""In the order of the price fields of `PriceTier`."""

_EXTRA_CHARGES = ("requests_kcount", "output_reasoning_mtok", "output_citation_mtok", "input_mchars")
"""Charges of every call that our formula does not know: a model that has one is listed without a price."""

_CLAUDE_MAX_OUTPUT_TOKENS = {
    32_000: ("opus-4-0", "opus-4-1"),
    64_000: ("sonnet-4-0", "sonnet-4-5", "haiku-4-5", "opus-4-5"),
    128_000: (
        *("opus-4-6", "opus-4-7", "opus-4-8", "sonnet-4-6"),
        *("opus-5", "opus-5-5", "sonnet-5", "sonnet-5-5", "fable-5-1", "fable-5-2"),
    ),
}
"""Most tokens of one reply by the model pages of the Claude documentation (November 2026); the snapshot does not have them."""

MAX_OUTPUT_TOKENS = {f"claude-{name}": limit for limit, names in _CLAUDE_MAX_OUTPUT_TOKENS.items() for name in names}

_DATE = re.compile(r"(?:-\d{4}-\d{2}-\d{2}|-\d{8}|@\d{8})$")
_log = logging.getLogger("lousho_ray.prices")


class TokenCounts(Protocol):
    """What a cost is estimated from: a `ProviderUsage` or a run's `Usage`. Prompt tokens include cached and written ones."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def cached_input_tokens(self) -> int | None: ...

    @property
    def cache_write_tokens(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class PriceTier:
    """Prices of a call with more than `above_input_tokens` input tokens; they hold for all tokens of that call."""

    above_input_tokens: int
    input_cost_per_mtok: Decimal | None = None
    output_cost_per_mtok: Decimal | None = None
    cached_input_cost_per_mtok: Decimal | None = None
    cache_write_cost_per_mtok: Decimal | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known about a model. Prices are USD per million tokens; `None` = unknown, 0 = free.

    Attributes:
        id: The model id, without the provider.
        tiers: Dearer prices for long inputs, lowest threshold first.
        source: For a built-in entry, the page its prices come from.
        snapshot: For a built-in entry, the package version that the table is from; `None` for a user's own.
    """

    id: str
    provider: str
    context_window: int | None = None
    input_cost_per_mtok: Decimal | None = None
    output_cost_per_mtok: Decimal | None = None
    cached_input_cost_per_mtok: Decimal | None = None
    cache_write_cost_per_mtok: Decimal | None = None
    max_output_tokens: int | None = None
    tiers: tuple[PriceTier, ...] = ()
    source: str | None = None
    snapshot: str | None = None


# ------------------------------------------------------------------------------------------------------------- public calls

_registered: dict[tuple[str, str], ModelInfo] = {}


def register_model(
    *,
    id: str,
    provider: str,
    context_window: int | None = None,
    input_cost_per_mtok: float | Decimal | None = None,
    output_cost_per_mtok: float | Decimal | None = None,
    cached_input_cost_per_mtok: float | Decimal | None = None,
    cache_write_cost_per_mtok: float | Decimal | None = None,
    max_output_tokens: int | None = None,
) -> ModelInfo:
    """Adds a model to the table of this process, or replaces one; calls made later use it.

    Args:
        id: The model id as calls name it, without the provider.
        provider: The provider's name, such as `openai` or `ollama`.
        context_window: Tokens.
        input_cost_per_mtok: USD per million tokens, like the other prices; 0 declares the model free.
        max_output_tokens: Tokens.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` with the argument's name in `field`.
    """
    info = ModelInfo(
        id=_text("id", id),
        provider=_text("provider", provider),
        context_window=_window("context_window", context_window),
        input_cost_per_mtok=_price("input_cost_per_mtok", input_cost_per_mtok),
        output_cost_per_mtok=_price("output_cost_per_mtok", output_cost_per_mtok),
        cached_input_cost_per_mtok=_price("cached_input_cost_per_mtok", cached_input_cost_per_mtok),
        cache_write_cost_per_mtok=_price("cache_write_cost_per_mtok", cache_write_cost_per_mtok),
        max_output_tokens=_window("max_output_tokens", max_output_tokens),
    )
    adopt_models([info])
    return info


def registered_models() -> list[ModelInfo]:
    """The users' entries of this process: what travels with an agent, so that its prices hold wherever it runs."""
    return list(_registered.values())


def adopt_models(models: Iterable[ModelInfo]) -> None:
    """Adds entries of another process."""
    for info in models:
        _registered.pop((info.provider, info.id), None)
        _registered[info.provider, info.id] = info


def get_model_info(id: str) -> ModelInfo | None:
    """What is known about a model, by `id` or `provider/id`; `None` when it is not in the table.

    Tried in order: the id as it is, without its `provider/` prefix, without a date suffix (`-2024-07-18`, `-20251001`,
    `@20251001`), each also with the dots of a Claude version as dashes; a user's entry first at each. At last `vendor/id` as
    OpenRouter names it.
    """
    for candidate in _candidates(id.removeprefix("pi/")):
        info = _registered_as(candidate) or _built_in(candidate)
        if info is not None:
            # A date or an alias may have led to a built-in entry that a user has replaced.
            return _registered.get((info.provider, info.id), info)
    return None


def list_models() -> list[ModelInfo]:
    """All entries: the users' own, then the built-in ones."""
    built_in = [info for provider in _sources() for info in _unique(_vendor_models(provider).values())]
    own = registered_models()
    taken = {(info.provider, info.id) for info in own}
    return own + [info for info in built_in if (info.provider, info.id) not in taken]


def estimate_cost(usage: TokenCounts, model: str) -> Decimal | None:
    """What a call cost by the table, in USD; `None` when the model or its prices are unknown.

    `(input - cached - written) * input price + cached * cached price + written * write price + output * output price`; a
    missing cached or write price is the input price.
    """
    info = get_model_info(model)
    if info is None:
        return None
    prices: ModelInfo | PriceTier = info
    for tier in info.tiers:
        if usage.prompt_tokens > tier.above_input_tokens:
            prices = tier
    per_input, per_output = prices.input_cost_per_mtok, prices.output_cost_per_mtok
    if per_input is None or per_output is None:
        return None
    cached, written = usage.cached_input_tokens or 0, usage.cache_write_tokens or 0
    per_cached = per_input if prices.cached_input_cost_per_mtok is None else prices.cached_input_cost_per_mtok
    per_written = per_input if prices.cache_write_cost_per_mtok is None else prices.cache_write_cost_per_mtok
    fresh = max(0, usage.prompt_tokens - cached - written)
    total = fresh * per_input + cached * per_cached + written * per_written + usage.completion_tokens * per_output
    return total / PER_MTOK


def context_window_tokens(model: str | None, stated: int | None = None) -> int:
    """The context window to reckon with: what a provider states, else the table's, else 128,000 with one warning per model."""
    if stated is not None:
        return stated
    info = get_model_info(model) if model else None
    if info is not None and info.context_window is not None:
        return info.context_window
    _warn_unknown_window(model or "unknown")
    return DEFAULT_CONTEXT_WINDOW_TOKENS


@functools.lru_cache(maxsize=1024)
def _warn_unknown_window(model: str) -> None:
    _log.warning(
        "The context window of model %r is not known; %s tokens are assumed. State it with register_model() or context_window=.",
        model,
        f"{DEFAULT_CONTEXT_WINDOW_TOKENS:,}",
    )


# ------------------------------------------------------------------------------------------------------------------ look-up


@functools.lru_cache(maxsize=1024)
def _candidates(id: str) -> tuple[str, ...]:
    """The names an entry may have, in the order they are tried, without repeats."""
    provider, slash, bare = id.partition("/")
    undated = _DATE.sub("", id)
    names = [id, _dashed(id), undated, _dashed(undated)]
    if slash and bare and provider != "openrouter":
        names += [f"openrouter/{id}", f"openrouter/{undated}"]
    return tuple(dict.fromkeys(names))


def _dashed(id: str) -> str:
    return id.replace(".", "-") if "claude" in id else id


def _registered_as(name: str) -> ModelInfo | None:
    """The latest user's entry of this exact id, or of this `provider/id`."""
    if not _registered:
        return None
    provider, _, rest = name.partition("/")
    return next((i for i in reversed(list(_registered.values())) if i.id == name), None) or _registered.get((provider, rest))


def _built_in(name: str) -> ModelInfo | None:
    """The built-in entry of exactly this `provider/id`, or of this bare id of one of `BARE_VENDORS`."""
    provider, slash, rest = name.partition("/")
    vendors, model = ((provider,), rest) if slash else (BARE_VENDORS, name)
    for vendor in vendors:
        entry = _vendor_models(vendor).get(model)
        if entry is not None:
            return entry.now() if isinstance(entry, _Changing) else entry
    return None


@dataclass(frozen=True, slots=True)
class _Changing:
    """An entry whose price depends on the date or the time of day."""

    provider: str
    source: str | None
    model: TableModel

    def now(self) -> ModelInfo:
        return _entry(self.provider, self.source, self.model, self.model.get_prices(datetime.now(UTC)))


def _unique(entries: Iterable[ModelInfo | _Changing]) -> list[ModelInfo]:
    """The entries without the repeats that their aliases make."""
    once = {id(entry): entry for entry in entries}
    return [entry.now() if isinstance(entry, _Changing) else entry for entry in once.values()]


def read_table() -> None:
    """Reads the built-in table, which takes some tenths of a second of CPU, unless it was read before."""
    _sources()


def table_was_read() -> bool:
    """Whether the built-in table is there, or is being read by another thread."""
    return "genai_prices.data" in sys.modules


@functools.cache
def _sources() -> dict[str, TableProvider]:
    from genai_prices.data import providers

    return {provider.id: provider for provider in providers}


@functools.cache
def _vendor_models(vendor: str) -> dict[str, ModelInfo | _Changing]:
    """The built-in entries of one provider by id; ids that an entry states as its aliases are keys too."""
    provider = _sources().get(vendor)
    if provider is None:
        return {}
    source = provider.pricing_urls[0] if provider.pricing_urls else None
    entries: dict[str, ModelInfo | _Changing] = {}
    for model in provider.models:
        if isinstance(model.prices, list):
            entries[model.id] = _Changing(vendor, source, model)
        else:
            entries[model.id] = _entry(vendor, source, model, model.prices)
    for model in provider.models:
        for alias in _aliases(model.match):
            entries.setdefault(alias, entries[model.id])
    return entries


def _aliases(match: MatchLogic) -> Iterator[str]:
    """The ids a table entry states in full. Open patterns are left out: a mistyped id must not get a price."""
    alternatives: Any = getattr(match, "or_", None)
    for clause in [match] if alternatives is None else alternatives:
        literal = getattr(clause, "equals", None) or getattr(clause, "starts_with", None)
        if literal is not None:
            yield literal


def _entry(provider: str, source: str | None, model: TableModel, price: ModelPrice) -> ModelInfo:
    costs: dict[str, Any] = {key: value for key, value in price.__dict__.items() if value is not None}
    if any(key in costs for key in _EXTRA_CHARGES):
        costs = {}
    starts = sorted({tier.start for key in _CHAT_PRICES if key in costs for tier in getattr(costs[key], "tiers", ())})
    base, *tiers = [_tier(costs, start) for start in (0, *starts)]
    return ModelInfo(
        id=model.id,
        provider=provider,
        context_window=model.context_window,
        input_cost_per_mtok=base.input_cost_per_mtok,
        output_cost_per_mtok=base.output_cost_per_mtok,
        cached_input_cost_per_mtok=base.cached_input_cost_per_mtok,
        cache_write_cost_per_mtok=base.cache_write_cost_per_mtok,
        max_output_tokens=MAX_OUTPUT_TOKENS.get(model.id) if provider == "anthropic" else None,
        tiers=tuple(tiers),
        source=source,
        snapshot=_snapshot(),
    )


def _tier(costs: dict[str, Any], start: int) -> PriceTier:
    """The prices of calls above `start` input tokens; 0 = those below the first threshold."""

    def at(cost: Any) -> Decimal | None:
        if not hasattr(cost, "tiers"):
            return cost  # type: ignore[no-any-return]
        reached = [tier.price for tier in cost.tiers if 0 < start >= tier.start]
        return reached[-1] if reached else cost.base  # type: ignore[no-any-return]

    return PriceTier(start, *(at(costs.get(key)) for key in _CHAT_PRICES))


@functools.cache
def _snapshot() -> str:
    return f"genai-prices {importlib.metadata.version('genai-prices')}"


# ------------------------------------------------------------------------------------------------------------------- checks


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{field} must be a non-empty text; got {value!r}.", field=field)
    return value


def _window(field: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{field} must be a whole number of tokens of at least 1; got {value!r}.", field=field)
    return value


def _price(field: str, value: object) -> Decimal | None:
    if value is None:
        return None
    valid = isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not valid:
        raise ConfigurationError(
            f"{field} must be a finite number of USD per million tokens, 0 or more; got {value!r}.", field=field
        )
    try:
        return Decimal(str(value))
    except InvalidOperation:
        raise ConfigurationError(f"{field} must be a number; got {value!r}.", field=field) from None
