"""Option models, single checks, and the errors for keys and keywords that do not exist."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.errors import ConfigurationError
from lousho_ray.options import (
    AGENT_KEYWORDS,
    RUN_KEYWORDS,
    SESSION_KEYWORDS,
    Backoff,
    Compaction,
    Limits,
    ModelSettings,
    Options,
    ProjectInstructionsOptions,
    RateLimits,
    ReasoningOptions,
    Retry,
    check_bool,
    check_callable,
    check_choice,
    check_positive_int,
    check_positive_number,
    check_text,
    merge_settings,
    parse_options,
    parse_reasoning,
    parse_switch,
    unknown_keyword,
)
from lousho_ray.ports import Reasoning

NOT_WHOLE: list[Any] = [True, 1.0, 1.5, "1", math.nan, math.inf, [1]]
NOT_FINITE: list[Any] = [True, "1", math.nan, math.inf, -math.inf, [1]]


def refused(call: Callable[[], object]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return caught.value


def each(keys: dict[str, tuple[list[Any], list[Any]]]) -> list[Any]:
    return [pytest.param(key, good, bad, id=key) for key, (good, bad) in keys.items()]


COUNT = ([1, 50_000], [*NOT_WHOLE, 0, -1])
NATURAL = ([0, 5], [*NOT_WHOLE, -1])
POSITIVE = ([0.001, 1, 5_000], [*NOT_FINITE, 0, -1, -0.5])
FLAG: tuple[list[Any], list[Any]] = ([True, False], [0, 1, "yes", []])
FUNCTION: tuple[list[Any], list[Any]] = ([print], ["print", 3])

KEYS: dict[type[Options], dict[str, tuple[list[Any], list[Any]]]] = {
    # CA-26, CA-27
    ModelSettings: {
        "max_tokens": COUNT,
        "temperature": ([0, 2, 0.7], [*NOT_FINITE, -0.1, 2.1]),
        "top_p": ([0, 1, 0.5], [*NOT_FINITE, -0.1, 1.1]),
        "frequency_penalty": ([-2, 2, 0], [*NOT_FINITE, -2.1, 2.1]),
        "presence_penalty": ([-2, 2, 0], [*NOT_FINITE, -2.1, 2.1]),
        "stop": ([["END"], ("a", "b"), []], ["END", [1], [b"END"], [None], 3]),
        "seed": ([0, -5, 7], NOT_WHOLE),
        "tool_choice": (
            ["auto", "required", "none", {"type": "function", "function": {"name": "search"}}],
            [
                "any",
                3,
                {"type": "tool", "function": {"name": "search"}},
                {"type": "function"},
                {"type": "function", "function": {"name": ""}},
                {"type": "function", "function": {"name": "search", "strict": True}},
            ],
        ),
    },
    # BUD-02
    Limits: {
        "max_tokens": COUNT,
        "max_input_tokens": COUNT,
        "max_output_tokens": COUNT,
        "max_cost_usd": POSITIVE,
        "max_duration_ms": POSITIVE,
        "max_tool_errors": COUNT,
        "max_steps": COUNT,
        "on_exceeded": (["stop", "throw"], ["raise", True, 1]),
    },
    # RL-02
    RateLimits: {"requests_per_minute": POSITIVE, "tokens_per_minute": POSITIVE, "max_concurrent": COUNT},
    # PRV-62
    Retry: {
        "max_retries": NATURAL,
        "backoff": ([{}, {"initial_ms": 1}, Backoff(max_ms=5)], [3, "fast", [1]]),
        "retry_on": FUNCTION,
        "on_retry": FUNCTION,
        "timeout_ms": POSITIVE,
        "idle_timeout_ms": POSITIVE,
    },
    # CMP-01, CMP-02
    Compaction: {
        "threshold_percent": ([0.001, 0.9, 1], [*NOT_FINITE, 0, 1.01, -1]),
        "context_window": COUNT,
        "protected_tokens": NATURAL,
        "reserve_output_tokens": NATURAL,
        "on_compaction": FUNCTION,
        "preview_chars": NATURAL,
        "memoize_tools": FLAG,
    },
    # CA-40
    ProjectInstructionsOptions: {"files": ([["A.md"]], ["A.md", [], [""], ["docs/A.md"], ["..\\A.md"]])},
    # PRV-78
    ReasoningOptions: {
        "effort": (["none", "minimal", "low", "medium", "high"], ["max", 3, ""]),
        "budget_tokens": COUNT,
        "summary": (["auto"], ["detailed", True]),
        "force": FLAG,
    },
}

CASES = [
    pytest.param(model, key, good, bad, id=f"{model.option}.{key}")
    for model, keys in KEYS.items()
    for key, (good, bad) in keys.items()
]


@pytest.mark.parametrize(("model", "key", "good", "bad"), CASES)
def test_each_key_takes_what_is_allowed_and_names_itself_when_it_is_not(
    model: type[Options], key: str, good: list[Any], bad: list[Any]
) -> None:
    # CA-03, CA-06
    for value in good:
        assert key in parse_options(model, {key: value}).model_fields_set, value
    for value in bad:
        error = refused(lambda value=value: parse_options(model, {key: value}))
        assert (error.code, error.field) == ("LOUSHO_CONFIG_INVALID", f"{model.option}.{key}"), value
        assert f"{model.option}.{key}" in error.detail


@pytest.mark.parametrize("model", KEYS)
def test_an_unknown_key_is_refused_with_the_allowed_ones(model: type[Options]) -> None:
    # CA-04, ERR-06
    key = next(iter(KEYS[model]))
    error = refused(lambda: parse_options(model, {f"{key}x": None}))
    assert error.field == f"{model.option}.{key}x"
    assert f"Did you mean '{key}'?" in error.detail
    assert all(allowed in error.detail for allowed in model.model_fields)


@pytest.mark.parametrize("model", KEYS)
def test_a_model_built_by_hand_refuses_like_a_dict(model: type[Options]) -> None:
    # CA-05, CA-27
    key, (_, bad) = next(iter(KEYS[model].items()))
    by_hand, by_dict = refused(lambda: model(**{key: bad[0]})), refused(lambda: parse_options(model, {key: bad[0]}))
    assert (by_hand.field, by_hand.detail) == (by_dict.field, by_dict.detail)


@pytest.mark.parametrize("model", KEYS)
def test_none_means_not_given(model: type[Options]) -> None:
    # CA-05, RL-02
    assert parse_options(model, None) == parse_options(model, {}) == model()
    assert parse_options(model, dict.fromkeys(model.model_fields)) == model()
    assert model(**dict.fromkeys(model.model_fields)).model_fields_set == set()


def test_the_documented_defaults_hold() -> None:
    assert Retry() == Retry(max_retries=2, backoff={"max_ms": 30_000})  # PRV-62, CA-18
    assert (Compaction().threshold_percent, Compaction().protected_tokens) == (0.9, 40_000)
    assert ProjectInstructionsOptions().files == ("AGENTS.md", "CLAUDE.md")  # CA-39
    assert Limits().on_exceeded == "stop"


def test_a_camel_case_key_names_its_twin() -> None:
    # CA-04, CA-D9
    error = refused(lambda: parse_options(Limits, {"maxTokens": 5}))
    assert error.field == "limits.maxTokens"
    assert "Write it as 'max_tokens'." in error.detail


def test_the_field_prefix_can_be_the_callers() -> None:
    # RL-02
    assert refused(lambda: parse_options(RateLimits, {"max_concurrent": 0})).field == "rate_limit.max_concurrent"
    assert refused(lambda: parse_options(RateLimits, {"max_concurrent": 0}, field="limits")).field == "limits.max_concurrent"


@pytest.mark.parametrize(
    ("backoff", "field"),
    [({"max_ms": -1}, "max_ms"), ({"max_ms": math.nan}, "max_ms"), ({"initial_ms": "1"}, "initial_ms"), ({"maxMs": 1}, "maxMs")],
)
def test_a_nested_key_has_its_whole_path(backoff: dict[str, Any], field: str) -> None:
    # CA-03, CA-04
    for call in (lambda: parse_options(Retry, {"backoff": backoff}), lambda: Retry(backoff=backoff), lambda: Backoff(**backoff)):
        assert refused(call).field == f"retry.backoff.{field}"


@pytest.mark.parametrize("value", [3, "max_tokens", ["max_tokens"], True, RateLimits()])
def test_an_option_that_is_no_dict_says_what_it_takes(value: Any) -> None:
    error = refused(lambda: parse_options(Limits, value, field="limits"))
    assert error.field == "limits"
    assert error.detail.startswith("limits must be a dict or Limits; got ")


def test_a_key_that_is_no_string_is_refused() -> None:
    assert refused(lambda: parse_options(Limits, {3: 4})).field == "limits.3"


def test_changing_the_dict_afterwards_changes_nothing() -> None:
    # CA-05
    stop = ["END"]
    given_dict: dict[str, Any] = {"stop": stop, "temperature": 1}
    settings = parse_options(ModelSettings, given_dict)
    stop.append("MORE")
    given_dict["temperature"] = 2
    assert settings.given() == {"stop": ["END"], "temperature": 1}
    with pytest.raises(Exception, match="frozen"):
        settings.temperature = 2  # type: ignore[misc]


def test_an_instance_and_any_mapping_are_taken() -> None:
    limits = Limits(max_tokens=5)
    assert parse_options(Limits, limits) == limits
    assert parse_options(Limits, MappingProxyType({"max_tokens": 5})) == limits


@pytest.mark.parametrize("model", KEYS)
def test_models_pickle(model: type[Options]) -> None:
    assert pickle.loads(pickle.dumps(model())) == model()


def test_a_wrong_value_is_shown_short_and_without_secrets() -> None:
    # ERR-07
    secret = "sk-abcdefghijklmnop123456"
    assert secret not in refused(lambda: parse_options(Limits, {"max_tokens": secret})).detail
    assert secret not in refused(lambda: parse_options(Limits, secret)).detail
    cut = refused(lambda: parse_options(Limits, {"max_tokens": "x" * 45 + " " + secret})).detail
    assert "sk-" not in cut
    assert len(refused(lambda: parse_options(Limits, {"max_tokens": "x" * 5000})).detail) < 200


def test_settings_nobody_set_are_absent() -> None:
    # CA-29, CA-D8
    assert ModelSettings().given() == {}
    assert ModelSettings(temperature=0, stop=[], seed=0).given() == {"temperature": 0, "seed": 0}
    choice = {"type": "function", "function": {"name": "search"}}
    assert parse_options(ModelSettings, {"tool_choice": choice}).given() == {"tool_choice": choice}


def test_settings_of_a_call_win_key_by_key_and_unset_nothing() -> None:
    # CA-28
    agent, call = ModelSettings(temperature=1, max_tokens=5), ModelSettings(temperature=0, top_p=0.5, max_tokens=None)
    assert merge_settings(agent, call).given() == {"temperature": 0, "max_tokens": 5, "top_p": 0.5}
    assert agent.given() == {"temperature": 1, "max_tokens": 5}


@given(
    agent=st.dictionaries(st.sampled_from(["seed", "max_tokens"]), st.integers(1, 9)),
    call=st.dictionaries(st.just("seed"), st.integers(1, 9)),
)
def test_merging_settings_is_merging_dicts(agent: dict[str, int], call: dict[str, int]) -> None:
    # CA-28
    assert merge_settings(ModelSettings(**agent), ModelSettings(**call)).given() == {**agent, **call}  # type: ignore[arg-type]


def test_compaction_options_that_exclude_each_other() -> None:
    # CMP-03, CMP-D1
    error = refused(lambda: Compaction(strategy=object(), summarizer="openai/gpt-4o-mini"))
    assert (error.code, error.field) == ("LOUSHO_CONFIG_CONFLICTING_OPTIONS", "compaction.summarizer")
    assert "two_phase_strategy(model=...)" in error.detail
    error = refused(lambda: parse_options(Compaction, {"context_window": 10, "reserve_output_tokens": 10}))
    assert error.field == "compaction.reserve_output_tokens"
    assert Compaction(context_window=10, reserve_output_tokens=9).reserve_output_tokens == 9


def test_switches() -> None:
    # CMP-01, CA-18
    assert parse_switch(Compaction, None) is None
    assert parse_switch(Compaction, False) is None
    assert parse_switch(Compaction, True) == Compaction()
    assert parse_switch(Compaction, {"protected_tokens": 5}) == Compaction(protected_tokens=5)
    assert refused(lambda: parse_switch(Compaction, "yes")).field == "compaction"


def test_reasoning_is_an_effort_or_a_dict() -> None:
    # PRV-78, CA-20
    assert parse_reasoning(None) is None
    assert parse_reasoning("low") == Reasoning(effort="low")
    assert parse_reasoning({}) == Reasoning(effort="medium")
    assert parse_reasoning({"effort": "high", "budget_tokens": 5, "summary": "auto", "force": True}) == Reasoning(
        "high", 5, "auto", True
    )
    assert parse_reasoning(ReasoningOptions(budget_tokens=5)) == Reasoning("medium", 5)
    error = refused(lambda: parse_reasoning("hihg"))
    assert error.field == "reasoning"
    assert '"minimal"' in error.detail
    assert "Did you mean 'high'?" in error.detail
    assert refused(lambda: parse_reasoning({"effort": "max"})).field == "reasoning.effort"
    assert refused(lambda: parse_reasoning(3)).field == "reasoning"


def test_a_keyword_of_another_call_names_that_call() -> None:
    # CA-33, CA-D6
    error = refused(lambda: fail(unknown_keyword("session_id", AGENT_KEYWORDS, "create_agent()")))
    assert (error.field, error.code) == ("session_id", "LOUSHO_CONFIG_INVALID")
    assert "It belongs to agent.send() and agent.stream()." in error.detail
    error = unknown_keyword("limits", RUN_KEYWORDS, "session.send()")
    assert "It belongs to create_agent() or agent.session()." in error.detail
    for name in ("tools", "output", "model"):
        assert "It belongs to create_agent()." in unknown_keyword(name, RUN_KEYWORDS | {"session_id"}, "agent.send()").detail
    assert "It belongs to create_agent()." in unknown_keyword("maxHandoffs", RUN_KEYWORDS, "session.send()").detail


def test_a_misspelt_keyword_names_the_closest_and_the_allowed_ones() -> None:
    # CA-04, SES-01
    assert "Write it as 'max_steps'." in unknown_keyword("maxSteps", AGENT_KEYWORDS, "create_agent()").detail
    error = unknown_keyword("turn_polcy", SESSION_KEYWORDS, "agent.session()")
    assert "Did you mean 'turn_policy'?" in error.detail
    assert all(name in error.detail for name in SESSION_KEYWORDS)


@pytest.mark.parametrize(
    ("check", "good", "bad", "words"),
    [
        (check_positive_int, [1, 7], [0, True, 1.0, "1", None, math.inf], "a whole number of at least 1"),
        (lambda v, f: check_positive_int(v, f, 0), [0], [-1, False], "a whole number of at least 0"),
        (check_positive_number, [0.1, 3], [0, -1, True, math.nan, math.inf, "1"], "a finite number above 0"),
        (lambda v, f: check_positive_number(v, f, infinity=True), [math.inf, 3], [math.nan, -math.inf], "math.inf"),
        (check_text, ["a"], ["", 3, None, b"a"], "a string that is not empty"),
        (check_bool, [True, False], [0, 1, None, "True"], "True or False"),
        (lambda v, f: check_choice(v, f, ("warn", "error")), ["warn"], ["wran", 3, None, True], '"warn", "error"'),
        (check_callable, [print], [3, "print", None], "a function"),
    ],
)
def test_single_checks(check: Callable[[object, str], object], good: list[Any], bad: list[Any], words: str) -> None:
    # CA-03, CA-06
    for value in good:
        assert check(value, "max_steps") is value
    for value in bad:
        error = refused(lambda value=value: check(value, "max_steps"))
        assert error.field == "max_steps"
        assert error.detail.startswith("max_steps must be ")
        assert words in error.detail


def fail(error: Exception) -> None:
    raise error
