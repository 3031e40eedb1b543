"""From "provider/model" and the environment to a provider."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.messages import user
from lousho_ray.ports import GenerateOptions
from lousho_ray.providers.anthropic import AnthropicProvider
from lousho_ray.providers.compatible import OpenAICompatibleProvider
from lousho_ray.providers.mock import MockProvider
from lousho_ray.providers.ollama import OllamaProvider
from lousho_ray.providers.openai import OpenAIProvider
from lousho_ray.providers.openrouter import OpenRouterProvider
from lousho_ray.providers.resolve import (
    BUILT_IN,
    KeylessProvider,
    LLMProviderRegistry,
    resolve_from_environment,
    resolve_provider,
)

KEY = "sk-test-0123456789abcdefghij"
VARIABLES = (
    *("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY", "OLLAMA_BASE_URL", "OPENAI_BASE_URL"),
    *("OPENAI_COMPATIBLE_BASE_URL", "OPENAI_COMPATIBLE_API_KEY", "LOUSHO_MODEL", "LOUSHO_EVAL_CASSETTES"),
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(LLMProviderRegistry, "_factories", {})
    yield
    assert set(VARIABLES) >= {variable for built_in in BUILT_IN.values() for variable in built_in.variables.values()}


def refused(call: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return caught.value


# --------------------------------------------------------------------------------------------------------- model strings


@pytest.mark.parametrize(
    ("spec", "variable", "cls", "model"),
    [
        ("openai/gpt-4o-mini", "OPENAI_API_KEY", OpenAIProvider, "gpt-4o-mini"),
        ("anthropic/claude-haiku-4-5", "ANTHROPIC_API_KEY", AnthropicProvider, "claude-haiku-4-5"),
        ("openrouter/openai/gpt-4o-mini", "OPENROUTER_API_KEY", OpenRouterProvider, "openai/gpt-4o-mini"),
    ],
)
def test_a_spec_is_split_at_its_first_slash_and_gets_its_key(
    spec: str, variable: str, cls: type, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PRV-16, CA-09, CA-48
    monkeypatch.setenv(variable, f"  {KEY}\n")
    provider: Any = resolve_provider(spec)
    assert type(provider) is cls
    assert provider.default_model == model
    assert provider.api_key == KEY


def test_ollama_and_compatible_servers_take_their_address_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # PRV-16, PRV-59b
    local: Any = resolve_provider("ollama/llama3")
    assert isinstance(local, OllamaProvider)
    assert "localhost:11434" in str(local.base_url)
    monkeypatch.setenv("OLLAMA_BASE_URL", "http://gpu-box:11434")
    assert "gpu-box" in str(resolve_provider("ollama/llama3").base_url)  # type: ignore[attr-defined]
    error = refused(lambda: resolve_provider("openai-compatible/qwen3"))
    assert error.code == "LOUSHO_PROVIDER_MISSING_API_KEY"
    assert "OPENAI_COMPATIBLE_BASE_URL is not set" in error.detail
    monkeypatch.setenv("OPENAI_COMPATIBLE_BASE_URL", "http://localhost:8000/v1")
    served: Any = resolve_provider("openai-compatible/org/qwen3")
    assert isinstance(served, OpenAICompatibleProvider)
    assert (served.default_model, served.base_url, served.api_key) == ("org/qwen3", "http://localhost:8000/v1", None)


def test_mock_needs_nothing_and_takes_any_model() -> None:
    # PRV-16, PRV-D7
    provider = resolve_provider("mock/any/thing")
    assert isinstance(provider, MockProvider)
    assert provider.default_model == "any/thing"


@pytest.mark.parametrize("spec", ["gpt-4o-mini", "", "/", "openai/", "/gpt", " /x", "openai/ ", None, 5])
def test_a_string_that_is_not_provider_slash_model(spec: Any) -> None:
    # PRV-17, CA-09
    error = refused(lambda: resolve_provider(spec, caller="create_agent"))
    assert error.code == "LOUSHO_PROVIDER_SPEC_INVALID"
    assert error.detail.startswith("create_agent: ")
    assert "openai/gpt-4o-mini" in error.detail


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("opnai/gpt-4o", "'openai/gpt-4o'"),
        ("Anthropic/claude-haiku-4-5", "'anthropic/claude-haiku-4-5'"),
        ("openroute/openai/gpt-4o", "'openrouter/openai/gpt-4o'"),
    ],
)
def test_an_unknown_prefix_lists_all_and_suggests_a_whole_spec(spec: str, meant: str) -> None:
    # PRV-17, CA-09
    error = refused(lambda: resolve_provider(spec))
    assert error.code == "LOUSHO_PROVIDER_UNKNOWN"
    assert error.detail.startswith("resolve_provider: ")
    assert f"Did you mean {meant}?" in error.detail
    assert all(name in error.detail for name in BUILT_IN)


def test_a_prefix_like_no_other_gets_no_suggestion() -> None:
    assert "Did you mean" not in refused(lambda: resolve_provider("zzz/m")).detail


@pytest.mark.parametrize("value", [None, "", "  \n"])
def test_a_missing_key_names_its_variable(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # PRV-17, CA-09, CA-48
    if value is not None:
        monkeypatch.setenv("OPENAI_API_KEY", value)
    error = refused(lambda: resolve_provider("openai/gpt-4o-mini", caller="create_agent"))
    assert error.code == "LOUSHO_PROVIDER_MISSING_API_KEY"
    assert error.detail.startswith("create_agent: OPENAI_API_KEY is not set")


def test_the_environment_is_read_at_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-47
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    provider: Any = resolve_provider("openai/gpt-4o-mini")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert provider.api_key == KEY


def test_no_key_shows_in_a_repr_or_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-49
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert KEY not in repr(resolve_provider("openai/gpt-4o-mini"))
    assert KEY not in str(refused(lambda: resolve_provider("opnai/gpt-4o-mini")))


# ---------------------------------------------------------------------------------------------------------------------- pi


def test_pi_takes_the_key_of_the_provider_it_routes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    # PRV-16, PRV-60, CA-47: read at creation, so that it travels with the provider
    monkeypatch.setenv("OPENROUTER_API_KEY", KEY)
    provider: Any = resolve_provider("pi/openrouter/openai/gpt-4o-mini")
    assert (provider.name, provider.default_model) == ("pi", "openrouter/openai/gpt-4o-mini")
    assert provider.api_key == KEY
    assert KEY not in repr(provider)
    error = refused(lambda: resolve_provider("pi/openai/gpt-4o-mini"))
    assert error.code == "LOUSHO_PROVIDER_MISSING_API_KEY"
    assert "OPENAI_API_KEY is not set" in error.detail


@pytest.mark.parametrize(
    ("spec", "code", "said"),
    [
        ("pi/gpt-4o", "LOUSHO_PROVIDER_SPEC_INVALID", "'provider/model'"),
        ("pi/opnai/gpt-4o", "LOUSHO_PROVIDER_UNKNOWN", "Did you mean 'pi/openai/gpt-4o'?"),
    ],
)
def test_a_bad_pi_spec(spec: str, code: str, said: str) -> None:
    # PRV-60b
    error = refused(lambda: resolve_provider(spec, caller="create_agent"))
    assert error.code == code
    assert error.detail.startswith("create_agent: ")
    assert said in error.detail


def test_pi_may_route_to_the_mock() -> None:
    # PRV-D8
    assert resolve_provider("pi/mock/x").default_model == "mock/x"


# ------------------------------------------------------------------------------------------------------ recorded answers


@pytest.mark.parametrize("mode", ["replay", "auto"])
async def test_a_missing_key_fails_only_at_the_call_while_cassettes_are_replayed(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PRV-18
    expected = refused(lambda: resolve_provider("openai/gpt-4o-mini"))
    monkeypatch.setenv("LOUSHO_EVAL_CASSETTES", mode)
    provider = resolve_provider("openai/gpt-4o-mini")
    assert isinstance(provider, KeylessProvider)
    assert (provider.name, provider.default_model) == ("openai", "gpt-4o-mini")
    assert resolve_provider("pi/openai/gpt-4o-mini").default_model == "openai/gpt-4o-mini"
    with pytest.raises(ConfigurationError) as caught:
        await provider.generate(GenerateOptions(messages=[user("hi")]))
    assert (caught.value.code, caught.value.detail) == (expected.code, expected.detail)
    assert pickle.loads(pickle.dumps(provider)).default_model == "gpt-4o-mini"


def test_a_missing_key_fails_at_once_while_cassettes_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    # PRV-18
    monkeypatch.setenv("LOUSHO_EVAL_CASSETTES", "record")
    assert refused(lambda: resolve_provider("openai/gpt-4o-mini")).code == "LOUSHO_PROVIDER_MISSING_API_KEY"


# --------------------------------------------------------------------------------------------------------- the environment


@pytest.mark.parametrize(
    ("variables", "name", "model"),
    [
        ({"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY}, "openai", "gpt-4o-mini"),
        ({"ANTHROPIC_API_KEY": KEY, "OPENROUTER_API_KEY": KEY}, "anthropic", "claude-sonnet-4-5"),
        ({"OPENROUTER_API_KEY": KEY, "OLLAMA_BASE_URL": "http://h:1"}, "openrouter", "openai/gpt-4o-mini"),
        ({"OLLAMA_BASE_URL": "http://h:1"}, "ollama", "llama3"),
        ({"OPENAI_API_KEY": "  ", "OLLAMA_BASE_URL": "http://h:1"}, "ollama", "llama3"),
        ({"LOUSHO_MODEL": " mock/x ", "OPENAI_API_KEY": KEY}, "mock", "x"),
    ],
)
def test_the_first_variable_set_decides(variables: dict[str, str], name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-44, CA-48
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    provider = resolve_from_environment()
    assert (provider.name, provider.default_model) == (name, model)


def test_nothing_set_lists_every_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-45, CA-48
    monkeypatch.setenv("OPENAI_COMPATIBLE_BASE_URL", "http://h:1/v1")
    error = refused(resolve_from_environment)
    assert error.code == "LOUSHO_CONFIG_MISSING_PROVIDER"
    for way in ("(1)", "(2)", "(3)", "(4)", "LOUSHO_MODEL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENROUTER_API_KEY"):
        assert way in error.detail
    assert "OLLAMA_BASE_URL" in error.detail


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("gpt-4o", "LOUSHO_PROVIDER_SPEC_INVALID"),
        ("opnai/gpt-4o", "LOUSHO_PROVIDER_UNKNOWN"),
        ("anthropic/claude-haiku-4-5", "LOUSHO_PROVIDER_MISSING_API_KEY"),
    ],
)
def test_a_bad_model_variable_is_named_and_does_not_fall_through(value: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # CA-46
    monkeypatch.setenv("LOUSHO_MODEL", value)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    error = refused(resolve_from_environment)
    assert error.code == code
    assert error.detail.startswith("create_agent: ")
    assert "LOUSHO_MODEL" in error.detail


# ------------------------------------------------------------------------------------------------------------ the registry


def test_built_in_types_are_there_without_registering() -> None:
    # PRV-10
    for name in ("openai", "anthropic", "openrouter", "ollama", "openai-compatible", "pi", "mock"):
        assert LLMProviderRegistry.has(name)
    assert not LLMProviderRegistry.has("acme")
    provider: Any = LLMProviderRegistry.create("openai", {"api_key": KEY, "default_model": "gpt-5"})
    assert (provider.default_model, provider.api_key) == ("gpt-5", KEY)


def test_registered_types_work_by_name_and_as_prefix_and_the_last_one_wins() -> None:
    # PRV-10, PRV-D7
    LLMProviderRegistry.register("acme", lambda config: MockProvider(["one"], **config))
    LLMProviderRegistry.register("acme", lambda config: MockProvider(["two"], **config))
    provider: Any = resolve_provider("acme/models/a")
    assert provider.default_model == "models/a"
    assert provider.responses == ("two",)
    assert "acme" in refused(lambda: resolve_provider("acne/x")).detail
    LLMProviderRegistry.unregister("acme")
    assert not LLMProviderRegistry.has("acme")


def test_a_built_in_type_can_be_replaced_and_comes_back() -> None:
    # PRV-10
    LLMProviderRegistry.register("openai", lambda config: MockProvider(**config))
    assert resolve_provider("openai/gpt-4o").name == "mock"
    LLMProviderRegistry.unregister("openai")
    assert refused(lambda: resolve_provider("openai/gpt-4o")).code == "LOUSHO_PROVIDER_MISSING_API_KEY"


def test_creating_an_unknown_type() -> None:
    # PRV-10
    assert refused(lambda: LLMProviderRegistry.create("acme", {})).code == "LOUSHO_PROVIDER_UNKNOWN"


@pytest.mark.parametrize(("name", "factory"), [("", MockProvider), ("a/b", MockProvider), (None, MockProvider), ("a", "factory")])
def test_registering_nonsense_is_refused(name: Any, factory: Any) -> None:
    assert refused(lambda: LLMProviderRegistry.register(name, factory)).code == "LOUSHO_CONFIG_INVALID"


def test_a_factory_must_make_a_provider() -> None:
    # CA-11
    LLMProviderRegistry.register("acme", lambda config: "not a provider")  # type: ignore[arg-type, return-value]
    assert refused(lambda: resolve_provider("acme/x")).field == "provider"


def test_an_unknown_option_of_a_class_is_refused_by_name() -> None:
    # PRV-11
    for name in ("openai", "mock"):
        error = refused(lambda name=name: LLMProviderRegistry.create(name, {"api_keys": "x"}))
        assert (error.code, error.field) == ("LOUSHO_CONFIG_INVALID", "api_keys")


# ------------------------------------------------------------------------------------------------------------- lazy imports


def test_importing_the_package_or_resolving_loads_no_client() -> None:
    # PRV-10, PRV-13
    code = (
        "import sys, lousho_ray.providers as p;"
        "assert not [m for m in sys.modules if m.startswith('lousho_ray.providers.')], sys.modules.keys();"
        "p.resolve_provider('openai/gpt-4o-mini'); p.resolve_provider('anthropic/claude-haiku-4-5');"
        "bad = {'openai', 'anthropic', 'httpx2', 'ray', 'mcp', 'genai_prices'} & set(sys.modules);"
        "assert not bad, bad;"
        "assert set(p.__all__) <= set(dir(p))"
    )
    environment = {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY, "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


def test_every_lazy_name_exists() -> None:
    from lousho_ray import providers

    for name in providers.__all__:
        assert getattr(providers, name) is not None
    with pytest.raises(AttributeError):
        _ = providers.NoSuchName  # type: ignore[attr-defined]
