"""The provider of an agent, from the options of `create_agent()`: resolved, with its retries and fallbacks around it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from lousho_ray.errors import ConfigurationError
from lousho_ray.options import Retry, parse_options
from lousho_ray.ports import LLMProvider


def provider_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The provider with its retries and fallbacks, and how to make one for a model string that a function returns."""
    from lousho_ray.providers.resolve import resolve_from_environment
    from lousho_ray.providers.wrapper import check_provider

    retry = given.get("retry")
    if retry is not None and retry is not False:
        retry = parse_options(Retry, retry, field="retry")
    fallbacks = _fallbacks(given.get("fallback_models", ()), retry)
    if "provider" in given:
        return {"provider": _with_fallbacks(_retried(check_provider(given["provider"]), retry), fallbacks)}
    model = given.get("model")
    if callable(model):
        return {"provider": None, "provider_for": functools.partial(_provider_for, retry=retry, fallbacks=fallbacks)}
    if model is None:
        provider = _always_retried(resolve_from_environment(caller="create_agent"), retry)
    else:
        provider = _resolved(model, retry)
    return {"provider": _with_fallbacks(provider, fallbacks)}


def _provider_for(spec: str, *, retry: Any, fallbacks: Sequence[LLMProvider]) -> LLMProvider:
    return _with_fallbacks(_resolved(spec, retry), fallbacks)


def _retried(provider: LLMProvider, retry: Any) -> LLMProvider:
    """Puts the one retry layer around a provider that was passed in: asked for, or by default around the built-in ones."""
    from lousho_ray.providers.base import HTTPProvider
    from lousho_ray.providers.retry import RetryProvider, with_retry

    if retry is False or (retry is None and not isinstance(provider, HTTPProvider)):
        return provider
    if isinstance(provider, RetryProvider):
        return with_retry(provider.inner, retry)  # in place of its own: two layers would multiply the attempts
    return with_retry(provider, retry if retry is not None else {"max_retries": getattr(provider, "max_retries", 2)})


def _resolved(spec: str, retry: Any) -> LLMProvider:
    """The provider of a model string, with two retries by default."""
    from lousho_ray.providers.resolve import resolve_provider

    return _always_retried(resolve_provider(spec, caller="create_agent"), retry)


def _always_retried(provider: LLMProvider, retry: Any) -> LLMProvider:
    from lousho_ray.providers.retry import with_retry

    return provider if retry is False else with_retry(provider, retry)


def _fallbacks(models: Any, retry: Any) -> tuple[LLMProvider, ...]:
    from lousho_ray.providers.wrapper import check_provider

    if isinstance(models, str) or not isinstance(models, Sequence):
        raise ConfigurationError(
            "fallback_models must be a list of 'provider/model' strings, for example ['anthropic/claude-haiku-4-5'].",
            field="fallback_models",
        )
    found = []
    for model in models:
        if isinstance(model, str):
            found.append(_resolved(model, retry))
        else:
            found.append(_retried(check_provider(model, "fallback_models"), retry))
    return tuple(found)


def _with_fallbacks(provider: LLMProvider, fallbacks: Sequence[LLMProvider]) -> LLMProvider:
    from lousho_ray.providers.fallback import with_fallback

    return with_fallback([provider, *fallbacks]) if fallbacks else provider
