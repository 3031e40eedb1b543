"""Model providers: one file per API, wrappers that are providers too, and the price table. Names load when they are used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lousho_ray.providers.anthropic import AnthropicProvider
    from lousho_ray.providers.compatible import OpenAICompatibleProvider
    from lousho_ray.providers.fallback import with_fallback
    from lousho_ray.providers.limited import with_rate_limit
    from lousho_ray.providers.mock import MockLLMProvider, MockProvider, create_mock_provider
    from lousho_ray.providers.ollama import OllamaProvider
    from lousho_ray.providers.openai import OpenAIProvider
    from lousho_ray.providers.openrouter import OpenRouterProvider
    from lousho_ray.providers.pi import PiProvider
    from lousho_ray.providers.prices import estimate_cost, get_model_info, list_models, register_model
    from lousho_ray.providers.resolve import LLMProviderRegistry, resolve_from_environment, resolve_provider
    from lousho_ray.providers.retry import resilient_provider, with_retry

_HOMES = {
    "AnthropicProvider": "anthropic",
    "LLMProviderRegistry": "resolve",
    "MockLLMProvider": "mock",
    "MockProvider": "mock",
    "OllamaProvider": "ollama",
    "OpenAICompatibleProvider": "compatible",
    "OpenAIProvider": "openai",
    "OpenRouterProvider": "openrouter",
    "PiProvider": "pi",
    "create_mock_provider": "mock",
    "estimate_cost": "prices",
    "get_model_info": "prices",
    "list_models": "prices",
    "register_model": "prices",
    "resilient_provider": "retry",
    "resolve_from_environment": "resolve",
    "resolve_provider": "resolve",
    "with_fallback": "fallback",
    "with_rate_limit": "limited",
    "with_retry": "retry",
}

__all__ = [
    "AnthropicProvider",
    "LLMProviderRegistry",
    "MockLLMProvider",
    "MockProvider",
    "OllamaProvider",
    "OpenAICompatibleProvider",
    "OpenAIProvider",
    "OpenRouterProvider",
    "PiProvider",
    "create_mock_provider",
    "estimate_cost",
    "get_model_info",
    "list_models",
    "register_model",
    "resilient_provider",
    "resolve_from_environment",
    "resolve_provider",
    "with_fallback",
    "with_rate_limit",
    "with_retry",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
