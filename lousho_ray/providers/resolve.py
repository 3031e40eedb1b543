"""From `"provider/model"` to a provider: the built-in ones, registered ones, and what the environment says.

Credentials are read from the environment here, at creation, and nowhere else. Provider classes are imported when one is made.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import GenerateOptions, GenerateResult, LLMProvider
from lousho_ray.providers.wrapper import check_provider

ProviderFactory: TypeAlias = Callable[[dict[str, Any]], LLMProvider]
"""Makes a provider from its configuration; `default_model` is the model a spec names."""

ENVIRONMENT_MODELS: tuple[tuple[str, str], ...] = (
    ("OPENAI_API_KEY", "openai/gpt-4o-mini"),
    ("ANTHROPIC_API_KEY", "anthropic/claude-sonnet-4-5"),
    ("OPENROUTER_API_KEY", "openrouter/openai/gpt-4o-mini"),
    ("OLLAMA_BASE_URL", "ollama/llama3"),
)
"""The model used when none is named: that of the first variable set."""

MODEL_VARIABLE = "LOUSHO_MODEL"
CASSETTE_VARIABLE = "LOUSHO_EVAL_CASSETTES"
MISSING_KEY = "LOUSHO_PROVIDER_MISSING_API_KEY"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in provider class and the variables its options come from; those in `required` must be set."""

    module: str
    cls: str
    variables: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    def create(self, config: Mapping[str, Any]) -> LLMProvider:
        module = importlib.import_module(f"lousho_ray.providers.{self.module}")
        return check_provider(getattr(module, self.cls)(**config))


BUILT_IN: Mapping[str, BuiltIn] = {
    "openai": BuiltIn("openai", "OpenAIProvider", {"api_key": "OPENAI_API_KEY"}, ("api_key",)),
    "anthropic": BuiltIn("anthropic", "AnthropicProvider", {"api_key": "ANTHROPIC_API_KEY"}, ("api_key",)),
    "openrouter": BuiltIn("openrouter", "OpenRouterProvider", {"api_key": "OPENROUTER_API_KEY"}, ("api_key",)),
    "ollama": BuiltIn("ollama", "OllamaProvider", {"base_url": "OLLAMA_BASE_URL"}),
    "openai-compatible": BuiltIn(
        "compatible",
        "OpenAICompatibleProvider",
        {"base_url": "OPENAI_COMPATIBLE_BASE_URL", "api_key": "OPENAI_COMPATIBLE_API_KEY"},
        ("base_url",),
    ),
    "pi": BuiltIn("pi", "PiProvider"),
    "mock": BuiltIn("mock", "MockProvider"),
}


class LLMProviderRegistry:
    """The provider types known by name in this process: the built-in ones and those registered."""

    _factories: ClassVar[dict[str, ProviderFactory]] = {}

    @classmethod
    def register(cls, name: str, factory: ProviderFactory) -> None:
        """Adds or replaces a type, built-in ones too. `name` then works as a prefix of model strings and as a spec's `type`.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_INVALID`: a name that is empty or has a slash, or a factory that cannot be called.
        """
        if not isinstance(name, str) or not name.strip() or "/" in name:
            raise ConfigurationError(f"A provider name is a non-empty text without '/'; got {name!r}.", field="name")
        if not callable(factory):
            raise ConfigurationError(f"The factory of provider {name!r} must be a function of its configuration.", field="factory")
        cls._factories[name] = factory

    @classmethod
    def unregister(cls, name: str) -> None:
        """Takes a registered type back; a built-in one of that name is there again."""
        cls._factories.pop(name, None)

    @classmethod
    def has(cls, name: str) -> bool:
        return name in cls._factories or name in BUILT_IN

    @classmethod
    def names(cls) -> list[str]:
        """All names, built-in ones first."""
        return [*BUILT_IN, *(name for name in cls._factories if name not in BUILT_IN)]

    @classmethod
    def create(cls, name: str, config: Mapping[str, Any] | None = None) -> LLMProvider:
        """A provider of the type `name`.

        Args:
            name: A built-in or registered type.
            config: The options of its class, such as `api_key`, `base_url`, `default_model`. The environment is not read.

        Raises:
            ConfigurationError: `LOUSHO_PROVIDER_UNKNOWN`, or what the class says about its options.
        """
        factory = cls._factories.get(name)
        if factory is not None:
            return check_provider(factory(dict(config or {})))
        if name not in BUILT_IN:
            raise _unknown("LLMProviderRegistry.create", name)
        return BUILT_IN[name].create(config or {})

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Whether `name` was registered by `register`."""
        return name in cls._factories


def resolve_provider(spec: str, *, caller: str = "resolve_provider", source: str | None = None) -> LLMProvider:
    """The provider that a `"provider/model"` string names, with its credentials from the environment.

    Args:
        spec: Split at the first `/`; the rest is the model id as it is, slashes included.
        caller: What error messages start with.
        source: Where the string came from, such as `LOUSHO_MODEL`, when that was not the caller.

    Raises:
        ConfigurationError: Checked in this order: `LOUSHO_PROVIDER_SPEC_INVALID`, `LOUSHO_PROVIDER_UNKNOWN`,
            `LOUSHO_PROVIDER_MISSING_API_KEY`. While `LOUSHO_EVAL_CASSETTES` is `replay` or `auto`, a missing key is only raised
            when the provider is called.
    """
    prefix, model = _split(spec, caller, source)
    nested = model.removeprefix("pi/") if prefix == "pi" and not LLMProviderRegistry.is_registered("pi") else None
    try:
        if nested is None:
            return _make(prefix, model, _credentials(prefix, model, spec, caller, source))
        inner, inner_model = _split(nested, caller, source)
        credentials = _credentials(inner, inner_model, spec, caller, source, under="pi/")
        return _make("pi", nested, credentials)
    except ConfigurationError as error:
        if error.code == MISSING_KEY and _environment(CASSETTE_VARIABLE) in ("replay", "auto"):
            return KeylessProvider(prefix, nested or model, error)
        raise


def resolve_from_environment(*, caller: str = "create_agent") -> LLMProvider:
    """The provider for an agent that names none: `LOUSHO_MODEL`, else the first of `ENVIRONMENT_MODELS` whose variable is set.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_MISSING_PROVIDER` when nothing is set; a `LOUSHO_MODEL` that cannot be used fails like
            any other model string and names the variable.
    """
    named = _environment(MODEL_VARIABLE)
    if named is not None:
        return resolve_provider(named, caller=caller, source=MODEL_VARIABLE)
    for variable, spec in ENVIRONMENT_MODELS:
        if _environment(variable) is not None:
            return resolve_provider(spec, caller=caller, source=variable)
    variables = ", ".join(variable for variable, _ in ENVIRONMENT_MODELS)
    raise ConfigurationError(
        f"{caller}: no model and no provider is given, and the environment names none. "
        'Do one of these: (1) pass model="openai/gpt-4o-mini" or another "provider/model"; (2) pass a provider object; '
        f'(3) set {MODEL_VARIABLE} to a "provider/model"; (4) set one of {variables}.',
        code="LOUSHO_CONFIG_MISSING_PROVIDER",
        field="model",
    )


class KeylessProvider:
    """Stands in for a provider whose key is missing while recorded answers are replayed: fails only when really called."""

    def __init__(self, name: str, default_model: str, error: ConfigurationError) -> None:
        self.name = name
        self.default_model: str | None = default_model
        self.error = error

    def supports_tools(self, model: str | None = None) -> bool:
        return True

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        raise self.error


def _split(spec: object, caller: str, source: str | None) -> tuple[str, str]:
    prefix, slash, model = spec.partition("/") if isinstance(spec, str) else ("", "", "")
    if not slash or not prefix.strip() or not model.strip():
        raise ConfigurationError(
            f"{caller}: {_said(spec, source)} is not a 'provider/model' string. "
            "Write both parts, for example 'openai/gpt-4o-mini' or 'openrouter/openai/gpt-4o-mini'.",
            code="LOUSHO_PROVIDER_SPEC_INVALID",
            field="model",
        )
    return prefix, model


def _unknown(caller: str, prefix: str, model: str | None = None, source: str | None = None, under: str = "") -> ConfigurationError:
    names = LLMProviderRegistry.names()
    close = difflib.get_close_matches(prefix.lower(), names, n=1, cutoff=0.6)
    meant = ""
    if close:
        meant = f" Did you mean '{close[0] if model is None else f'{under}{close[0]}/{model}'}'?"
    where = "" if source is None else f" of {source}"
    return ConfigurationError(
        f"{caller}: unknown provider {prefix!r}{where}. Supported: {', '.join(names)}.{meant}",
        code="LOUSHO_PROVIDER_UNKNOWN",
        field="model",
    )


def _credentials(prefix: str, model: str, spec: str, caller: str, source: str | None, under: str = "") -> dict[str, str]:
    """The options of a provider that come from the environment; of a registered one none."""
    if not LLMProviderRegistry.has(prefix):
        raise _unknown(caller, prefix, model, source, under)
    config: dict[str, str] = {}
    if LLMProviderRegistry.is_registered(prefix):
        return config
    for option, variable in BUILT_IN[prefix].variables.items():
        value = _environment(variable)
        if value is not None:
            config[option] = value
        elif option in BUILT_IN[prefix].required:
            raise ConfigurationError(
                f"{caller}: {variable} is not set. {_said(spec, source)} needs it: set it in the environment, "
                f"or pass a provider object made with {option}=.",
                code=MISSING_KEY,
                field="model",
            )
    return config


def _make(prefix: str, model: str, credentials: Mapping[str, str]) -> LLMProvider:
    return LLMProviderRegistry.create(prefix, {**credentials, "default_model": model})


def _said(spec: object, source: str | None) -> str:
    return repr(spec) if source is None else f"{spec!r} (from {source})"


def _environment(variable: str) -> str | None:
    """A variable's value; blank counts as unset."""
    return os.environ.get(variable, "").strip() or None
