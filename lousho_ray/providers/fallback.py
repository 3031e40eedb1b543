"""Fallbacks: a provider that hands a failed model call to the next one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import (
    Chunk,
    FallbackNotice,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    LLMProvider,
    ResponseFormat,
    ServedBy,
)
from lousho_ray.providers.failures import classify, failed_usage, to_provider_error
from lousho_ray.providers.wrapper import (
    ProviderWrapper,
    check_provider,
    close_stream,
    drain,
    enforces,
    is_final,
    is_output,
    next_chunk,
    open_stream,
    tell,
)


def with_fallback(
    providers: Sequence[LLMProvider],
    *,
    fallback_on: Callable[[Exception], bool] | None = None,
    on_fallback: Callable[[FallbackNotice], object] | None = None,
) -> FallbackProvider:
    """A provider that asks `providers` in order until one answers. Every call starts with the first.

    Any failure but a cancellation moves on, also refused credentials and invalid requests; a stream only while nothing of the
    reply is out. When all fail, the last error is raised, with a note for each earlier one.

    Args:
        providers: At least one. The call's `model` goes to the first; each other one uses its own default.
        fallback_on: `fn(error) -> bool` in place of "any failure"; never asked about cancellations.
        on_fallback: Called with a `FallbackNotice` before the next provider is asked.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: no providers, or something else among them.
    """
    if not isinstance(providers, list | tuple):
        raise ConfigurationError(f"providers must be a list of providers; got {type(providers).__name__}.", field="providers")
    if not providers:
        raise ConfigurationError("providers is empty: with_fallback() needs at least one provider.", field="providers")
    checked = tuple(check_provider(provider, f"providers[{index}]") for index, provider in enumerate(providers))
    return FallbackProvider(checked, fallback_on, on_fallback)


class FallbackProvider(ProviderWrapper):
    """Made by `with_fallback`. Its `name`, `default_model` and optional members are the first provider's."""

    def __init__(
        self,
        providers: tuple[LLMProvider, ...],
        fallback_on: Callable[[Exception], bool] | None = None,
        on_fallback: Callable[[FallbackNotice], object] | None = None,
    ) -> None:
        super().__init__(providers[0])
        self.providers = providers
        self._fallback_on = fallback_on
        self._on_fallback = on_fallback

    def enforces_response_format(self, response_format: ResponseFormat, model: str | None = None) -> bool:
        """Only when each of the providers does: any of them may come to answer."""
        first = self.providers[0]
        return all(enforces(provider, response_format, model if provider is first else None) for provider in self.providers)

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        call = _Call(self, options)
        while True:
            try:
                result = await call.provider.generate(call.options)
            except Exception as error:
                call.move_on(error)
                continue
            return result if result.served_by is not None else replace(result, served_by=call.served_by)

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        call = _Call(self, options)
        while True:
            chunks, output = None, False
            try:
                while True:
                    try:
                        if chunks is None:
                            chunks = await open_stream(call.provider, call.options)
                        chunk = await next_chunk(chunks, call.provider.name)
                    except Exception as error:
                        call.move_on(error, may_switch=not output)
                        break
                    output = output or is_output(chunk)
                    if isinstance(chunk, FinishChunk):
                        yield chunk if chunk.served_by is not None else replace(chunk, served_by=call.served_by)
                        await drain(chunks)
                        return
                    yield chunk
            finally:
                await close_stream(chunks)

    async def aclose(self) -> None:
        for provider in self.providers:
            close: Any = getattr(provider, "aclose", None)
            if close is not None:
                await close()

    def __repr__(self) -> str:
        return f"FallbackProvider({list(self.providers)!r})"


class _Call:
    """Where one call is: concurrent calls never see each other's switches."""

    def __init__(self, owner: FallbackProvider, options: GenerateOptions) -> None:
        self._owner = owner
        self._index = 0
        self._failed: list[str] = []
        self.options = options

    @property
    def provider(self) -> LLMProvider:
        return self._owner.providers[self._index]

    @property
    def model(self) -> str | None:
        return self.options.model or self.provider.default_model

    @property
    def served_by(self) -> ServedBy:
        return ServedBy(self.provider.name, self.model)

    def move_on(self, error: Exception, *, may_switch: bool = True) -> None:
        """Switches to the next provider and says so; raises the final error when that cannot be."""
        owner = self._owner
        last = self._index + 1 == len(owner.providers)
        if last or not may_switch or is_final(error) or not (owner._fallback_on is None or owner._fallback_on(error)):
            raise self._final(error)
        message = classify(error).message
        self._failed.append(f"{self.provider.name} failed first: {message}")
        came_from, from_model = self.provider, self.model
        self._index += 1
        self.options = replace(self.options, model=None)
        spent = failed_usage(error, from_model)
        notice = FallbackNotice(came_from.name, self.provider.name, from_model, self.model, message, spent)
        tell((self.options.notify, owner._on_fallback), notice)

    def _final(self, error: Exception) -> BaseException:
        """The error of the provider asked last, with what the earlier ones said."""
        raised = error if is_final(error) else to_provider_error(error, self.provider.name, self.model)
        known = getattr(raised, "__notes__", ())
        for note in self._failed:
            if note not in known:
                raised.add_note(note)
        return raised
