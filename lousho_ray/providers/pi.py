"""Pi: many vendors behind one id space, `pi/<provider>/<model>`.

Each call goes to the built-in provider that the model id names, with that provider's own credentials. Model ids are checked against
the table of known models before a request is made.
"""

from __future__ import annotations

import difflib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import Chunk, FinishChunk, GenerateOptions, GenerateResult, LLMProvider, ServedBy
from lousho_ray.providers.base import HTTPProvider
from lousho_ray.providers.prices import get_model_info, list_models
from lousho_ray.providers.resolve import LLMProviderRegistry, resolve_provider
from lousho_ray.providers.wrapper import open_stream

CATALOGUED = ("openai", "anthropic", "openrouter")
"""Providers whose models are all in the table; the others serve whatever was installed there."""

_HOME_ONLY = ("api_key", "base_url", "headers", "context_window")
"""Options that belong to the provider of the default model and to no other."""


class PiProvider(HTTPProvider):
    """Routes each call to the provider its model id names: `openrouter/openai/gpt-4o-mini`, with or without `pi/` before it.

    Keys come from the environment variable of the provider a call goes to. `api_key`, `base_url`, `headers` and `context_window`
    are those of the default model's provider; no other provider ever gets them. Hosted tools are not supported.

    Raises:
        ConfigurationError: `LOUSHO_PROVIDER_SPEC_INVALID`, `LOUSHO_PROVIDER_UNKNOWN` (provider or model) or
            `LOUSHO_PROVIDER_MISSING_API_KEY`, at creation for the default model, else at the call.
    """

    provider_name = "pi"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._providers: dict[str, LLMProvider] = {}
        self._home: str | None = None
        if self.default_model is not None:
            self.default_model = self.default_model.removeprefix("pi/")
            self._home, model = _split(self.default_model)
            self._check_model(self._home, model)

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        """One model turn of the provider the model id names; it raises what that provider raises."""
        name, model = self._route(options)
        provider = self._provider(name, model)
        result = await provider.generate(replace(options, model=model))
        return replace(result, served_by=_served(name, model, result.served_by))

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        """`generate()` in chunks. Closing the iterator closes the connection."""
        name, model = self._route(options)
        chunks: Any = await open_stream(self._provider(name, model), replace(options, model=model))
        async with aclosing(chunks):
            async for chunk in chunks:
                if isinstance(chunk, FinishChunk):
                    chunk = replace(chunk, served_by=_served(name, model, chunk.served_by))
                yield chunk

    async def get_models(self) -> list[str]:
        """The known models as `<provider>/<model>`."""
        return sorted(f"{info.provider}/{info.id}" for info in list_models() if LLMProviderRegistry.has(info.provider))

    async def aclose(self) -> None:
        """Closes the clients of every provider that was used."""
        for provider in self._providers.values():
            close = getattr(provider, "aclose", None)
            if close is not None:
                await close()

    def _route(self, options: GenerateOptions) -> tuple[str, str]:
        self.check_hosted(options)
        name, model = _split((options.model or self.default_model or "").removeprefix("pi/"))
        self._check_model(name, model)
        return name, model

    def _check_model(self, name: str, model: str) -> None:
        gateway = self.base_url is not None and name == self._home
        if name not in CATALOGUED or gateway or get_model_info(f"{name}/{model}") is not None:
            return
        known = [f"{info.provider}/{info.id}" for info in list_models() if info.provider == name]
        close = difflib.get_close_matches(f"{name}/{model}", known, n=1, cutoff=0.6)
        meant = f" Did you mean 'pi/{close[0]}'?" if close else ""
        raise ConfigurationError(
            f"Pi knows no model {model!r} of {name}.{meant} Add a new one with register_model(id={model!r}, provider={name!r}).",
            code="LOUSHO_PROVIDER_UNKNOWN",
            field="model",
        )

    def _provider(self, name: str, model: str) -> LLMProvider:
        provider = self._providers.get(name)
        if provider is None:
            provider = self._providers[name] = self._make(name, model)
        return provider

    def _make(self, name: str, model: str) -> LLMProvider:
        """The nested provider: its credentials from its own variables, the options that are not bound to one vendor from here."""
        configuration = {**self.configuration(), "default_model": model}
        if name == self._home and self.api_key is not None:
            return LLMProviderRegistry.create(name, configuration)
        resolved = resolve_provider(f"{name}/{model}", caller="PiProvider")
        if not isinstance(resolved, HTTPProvider):
            return resolved
        wanted = {key: value for key, value in configuration.items() if key not in _HOME_ONLY}
        if name == self._home:
            wanted |= {key: configuration[key] for key in _HOME_ONLY if configuration[key]}
        return type(resolved)(**{**resolved.configuration(), **wanted})


def _split(spec: str) -> tuple[str, str]:
    name, _, model = spec.partition("/")
    if not name.strip() or not model.strip():
        raise ConfigurationError(
            f"{spec!r} is not a model of Pi. Write 'pi/<provider>/<model>', such as 'pi/openrouter/openai/gpt-4o-mini'.",
            code="LOUSHO_PROVIDER_SPEC_INVALID",
            field="model",
        )
    if name == "pi" or not LLMProviderRegistry.has(name):
        names = [known for known in LLMProviderRegistry.names() if known != "pi"]
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
        meant = f" Did you mean 'pi/{close[0]}/{model}'?" if close else ""
        raise ConfigurationError(
            f"Pi knows no provider {name!r}. Supported: {', '.join(names)}.{meant}", code="LOUSHO_PROVIDER_UNKNOWN", field="model"
        )
    return name, model


def _served(name: str, model: str, served_by: ServedBy | None) -> ServedBy:
    """Who answered, in Pi's id space."""
    by_model = model if served_by is None or served_by.model is None else served_by.model
    return ServedBy("pi", f"{name}/{by_model}")
