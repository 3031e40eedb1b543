"""The price table."""

from __future__ import annotations

import logging
import pickle
from decimal import Decimal
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.providers import prices
from lousho_ray.providers.prices import (
    ModelInfo,
    adopt_models,
    context_window_tokens,
    estimate_cost,
    get_model_info,
    list_models,
    register_model,
    registered_models,
)
from lousho_ray.usage import ProviderUsage, Usage


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "_registered", {})
    prices._warn_unknown_window.cache_clear()


@pytest.mark.parametrize(
    ("usage", "usd"),
    [
        (ProviderUsage(6834, 5), "0.006859"),
        (ProviderUsage(6834, 5, cache_write_tokens=6831), "0.00856675"),
        (ProviderUsage(6834, 5, cached_input_tokens=6831), "0.0007111"),
    ],
)
def test_golden_figures_of_claude_haiku(usage: ProviderUsage, usd: str) -> None:
    # COST-13, COST-15, PRV-77
    assert estimate_cost(usage, "claude-haiku-4-5") == Decimal(usd)


def test_many_small_costs_sum_up_without_drift() -> None:
    # COST-14, C14
    register_model(id="tiny", provider="x", input_cost_per_mtok=3.1, output_cost_per_mtok=3.1)
    total = Usage()
    for _ in range(1_000):
        used = ProviderUsage(1, 0)
        total.add_call("tiny", used, estimate_cost(used, "tiny"))
    assert total.cost == Decimal("0.0031")


def test_a_run_usage_can_be_priced_too() -> None:
    usage = Usage(input_tokens=6834, output_tokens=5, cached_input_tokens=6831)
    assert estimate_cost(usage, "claude-haiku-4-5") == Decimal("0.0007111")


def test_missing_cached_and_write_prices_are_the_input_price() -> None:
    # COST-13
    register_model(id="m", provider="p", input_cost_per_mtok=2, output_cost_per_mtok=4)
    used = ProviderUsage(1_000_000, 0, cached_input_tokens=400_000, cache_write_tokens=100_000)
    assert estimate_cost(used, "m") == 2


def test_more_cached_than_input_tokens_count_as_no_fresh_ones() -> None:
    # COST-13
    register_model(id="m", provider="p", input_cost_per_mtok=2, output_cost_per_mtok=4, cached_input_cost_per_mtok=1)
    assert estimate_cost(ProviderUsage(10, 0, cached_input_tokens=1_000_000), "m") == 1


def test_no_price_is_none_and_a_price_of_zero_is_a_price() -> None:
    # COST-11, COST-13
    register_model(id="half", provider="p", input_cost_per_mtok=1)
    register_model(id="llama3", provider="ollama", input_cost_per_mtok=0, output_cost_per_mtok=0)
    assert estimate_cost(ProviderUsage(10, 10), "half") is None
    assert estimate_cost(ProviderUsage(10, 10), "llama3") == 0


@pytest.mark.parametrize(
    "id",
    [
        *("claude-opus-4.1x", "claude-haiku-4-6", "gpt-4o-minii", "llama3", "", "openrouter/anthropic/claude-nine:beta"),
        *("ft:gpt-4o-mini-2024-07-18:org::x", "anthropic/gpt-4o-mini", "openai/", "/gpt-4o"),
    ],
)
def test_an_id_that_is_not_in_the_table_has_no_price(id: str) -> None:
    # C05: never the price of a similar model, never 0
    assert estimate_cost(ProviderUsage(1_000_000, 1_000_000), id) is None


@pytest.mark.parametrize(
    ("asked", "provider", "found"),
    [
        ("gpt-4o-mini", "openai", "gpt-4o-mini"),
        ("openai/gpt-4o-mini", "openai", "gpt-4o-mini"),
        ("gpt-4o-mini-2024-07-18", "openai", "gpt-4o-mini"),
        ("claude-haiku-4-5-20251001", "anthropic", "claude-haiku-4-5"),
        ("claude-haiku-4-5@20251001", "anthropic", "claude-haiku-4-5"),
        ("anthropic/claude-haiku-4-5-20251001", "anthropic", "claude-haiku-4-5"),
        ("anthropic/claude-haiku-4.5", "anthropic", "claude-haiku-4-5"),
        ("openrouter/anthropic/claude-haiku-4.5", "openrouter", "anthropic/claude-haiku-4.5"),
        ("meta-llama/llama-3.3-70b-instruct", "openrouter", "meta-llama/llama-3.3-70b-instruct"),
        ("pi/openai/gpt-4o-mini", "openai", "gpt-4o-mini"),
        ("pi/openrouter/openai/gpt-4o-mini", "openrouter", "openai/gpt-4o-mini"),
    ],
)
def test_look_up_by_id_prefix_date_and_dotted_version(asked: str, provider: str, found: str) -> None:
    # COST-19, BUD-D5, PRV-60b
    info = get_model_info(asked)
    assert info is not None
    assert (info.provider, info.id) == (provider, found)


def test_a_prefix_of_another_provider_is_not_dropped() -> None:
    # COST-19
    register_model(id="special", provider="acme", context_window=1)
    assert get_model_info("acme/special") is not None
    assert get_model_info("special") is not None
    assert get_model_info("other/special") is None


@pytest.mark.parametrize("asked", ["gpt-4o-mini", "openai/gpt-4o-mini", "gpt-4o-mini-2024-07-18"])
def test_a_users_entry_beats_a_built_in_one_at_each_stage(asked: str) -> None:
    # COST-18, COST-19
    register_model(id="gpt-4o-mini", provider="openai", context_window=5, input_cost_per_mtok=9, output_cost_per_mtok=9)
    info = get_model_info(asked)
    assert info is not None
    assert info.input_cost_per_mtok == 9
    assert info.snapshot is None


def test_the_latest_registration_wins() -> None:
    # COST-18
    register_model(id="m", provider="p", context_window=10)
    register_model(id="m", provider="p", context_window=20)
    register_model(id="m", provider="q", context_window=30)
    info = get_model_info("m")
    assert info is not None
    assert info.context_window == 30
    assert get_model_info("p/m") == ModelInfo("m", "p", 20)
    assert len(registered_models()) == 2


def test_long_inputs_are_priced_by_their_tier() -> None:
    # C13: the whole call pays the price of its tier.
    base = estimate_cost(ProviderUsage(200_000, 1_000_000), "claude-sonnet-4-5")
    above = estimate_cost(ProviderUsage(200_001, 1_000_000), "claude-sonnet-4-5")
    info = get_model_info("claude-sonnet-4-5")
    assert info is not None
    assert base == Decimal("0.6") + info.output_cost_per_mtok  # type: ignore[operator]
    tier = info.tiers[0]
    assert tier.above_input_tokens == 200_000
    assert above == (200_001 * tier.input_cost_per_mtok) / 1_000_000 + tier.output_cost_per_mtok  # type: ignore[operator]
    assert above > base  # type: ignore[operator]


@pytest.mark.parametrize(
    ("model", "last_cheap"), [("claude-sonnet-4-5", 200_000), ("gpt-5.4", 272_000), ("x-ai/grok-4.3", 199_999)]
)
def test_the_whole_prompt_decides_on_the_price_of_every_token(model: str, last_cheap: int) -> None:
    # C04: cached tokens count towards the boundary, which the table draws (xAI's tier begins at 200,000, others' behind it)
    info = get_model_info(model)
    assert info is not None
    for tokens, tier in ((last_cheap, info), (last_cheap + 1, info.tiers[0])):
        rates = (tier.input_cost_per_mtok, tier.cached_input_cost_per_mtok, tier.output_cost_per_mtok)
        read, cached, written = (rate or Decimal(0) for rate in rates)
        cost = estimate_cost(ProviderUsage(tokens, 1_000, cached_input_tokens=150_000), model)
        assert cost == ((tokens - 150_000) * read + 150_000 * cached + 1_000 * written) / 1_000_000
        assert cost > 0


def test_built_in_entries_are_sane() -> None:
    # COST-21, COST-22, BUD-D6
    built_in = list_models()
    own = [info for info in built_in if info.provider in ("openai", "anthropic")]
    assert len(own) > 80
    for info in own:
        assert info.snapshot is not None
        assert info.snapshot.startswith("genai-prices ")
        assert info.source is not None
        assert info.source.startswith("https://")
        assert info.context_window is None or info.context_window > 1_000
    for info in built_in:
        if info.input_cost_per_mtok is not None:
            assert info.input_cost_per_mtok >= 0


@pytest.mark.parametrize("id", ["gpt-4o-mini", "gpt-4.1", "gpt-5", "claude-haiku-4-5", "claude-sonnet-4-5", "claude-opus-5-5"])
def test_common_models_have_a_window_and_ordered_prices(id: str) -> None:
    # COST-22, BUD-D6
    info = get_model_info(id)
    assert info is not None
    assert info.context_window is not None
    assert info.input_cost_per_mtok is not None
    assert info.output_cost_per_mtok is not None
    assert info.cached_input_cost_per_mtok is not None
    assert 0 < info.cached_input_cost_per_mtok <= info.input_cost_per_mtok <= info.output_cost_per_mtok
    if info.provider == "openai":
        assert info.cache_write_cost_per_mtok is None
    else:
        assert info.cache_write_cost_per_mtok == info.input_cost_per_mtok * Decimal("1.25")
        assert info.max_output_tokens is not None


def test_every_environment_default_has_a_price_or_runs_locally() -> None:
    from lousho_ray.providers.resolve import ENVIRONMENT_MODELS

    for _, spec in ENVIRONMENT_MODELS:
        assert spec.startswith("ollama/") or estimate_cost(ProviderUsage(1, 1), spec) is not None


def test_a_model_with_charges_outside_the_formula_has_no_price() -> None:
    # COST-11: no partial sums. Sonar charges a fee for each request.
    fee = [i for i in list_models() if i.provider == "perplexity" and i.id == "sonar"]
    assert fee
    assert fee[0].input_cost_per_mtok is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("provider", None),
        ("context_window", 0),
        ("context_window", True),
        ("context_window", 1.5),
        ("max_output_tokens", -1),
        ("input_cost_per_mtok", -0.1),
        ("output_cost_per_mtok", float("nan")),
        ("cached_input_cost_per_mtok", float("inf")),
        ("cache_write_cost_per_mtok", "1"),
        ("cache_write_cost_per_mtok", True),
    ],
)
def test_wrong_figures_are_refused_by_name(field: str, value: Any) -> None:
    # COST-18
    given: dict[str, Any] = {"id": "m", "provider": "p", field: value}
    with pytest.raises(ConfigurationError) as caught:
        register_model(**given)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", field)
    assert registered_models() == []


def test_registered_models_travel_to_another_process() -> None:
    # BUD-34
    register_model(id="m", provider="p", input_cost_per_mtok=Decimal("0.1"), output_cost_per_mtok=1)
    carried = pickle.loads(pickle.dumps(registered_models()))
    prices._registered.clear()
    adopt_models(carried)
    assert estimate_cost(ProviderUsage(10_000_000, 0), "p/m") == 1


def test_an_unknown_window_is_assumed_with_one_warning_per_model(caplog: pytest.LogCaptureFixture) -> None:
    # COST-20, LES-01
    with caplog.at_level(logging.WARNING, logger="lousho_ray.prices"):
        assert context_window_tokens("who-knows") == 128_000
        assert context_window_tokens("who-knows") == 128_000
        assert context_window_tokens("who-knows-2", stated=8_192) == 8_192
        assert context_window_tokens("claude-haiku-4-5") == 200_000
        assert context_window_tokens("claude-haiku-4-5", stated=8_192) == 8_192
    assert len(caplog.records) == 1
    assert "who-knows" in caplog.text
