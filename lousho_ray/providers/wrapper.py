"""What all wrapping providers share: members they do not change pass through, and any provider can be streamed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from lousho_ray.cancellation import Aborted
from lousho_ray.errors import CassetteError, ConfigurationError, TestFailedError
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    HostedToolCallChunk,
    HostedToolResultChunk,
    LLMProvider,
    ProviderNotice,
    ReasoningChunk,
    ReasoningEndChunk,
    ResponseFormat,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.providers.failures import TruncatedStreamError

_log = logging.getLogger("lousho_ray.providers")


class ProviderWrapper:
    """A provider around another one. Members it does not define are those of the wrapped provider, optional ones included."""

    def __init__(self, inner: LLMProvider) -> None:
        self.inner = check_provider(inner)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def default_model(self) -> str | None:
        return self.inner.default_model

    def supports_streaming(self, model: str | None = None) -> bool:
        return can_stream(self.inner, model)

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        return await self.inner.generate(options)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what is not defined here. While an object is being unpickled it has no `inner` yet.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def check_provider(provider: Any, field: str = "provider") -> LLMProvider:
    """The provider itself, when it has the protocol's members.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`; a string gets the hint to resolve it.
    """
    missing = [member for member in ("name", "default_model", "generate") if not hasattr(provider, member)]
    if isinstance(provider, str):
        raise ConfigurationError(
            f"{field} must be a provider object, not the text {provider!r}. "
            "Pass model= for a 'provider/model' string, or resolve_provider() to make a provider of it.",
            field=field,
        )
    if missing or isinstance(provider, type):
        lacks = f"; it lacks {', '.join(missing)}" if missing else "; pass an instance, not the class"
        raise ConfigurationError(
            f"{field} must be an LLMProvider with name, default_model and generate(), not {type(provider).__name__}{lacks}.",
            field=field,
        )
    return provider  # type: ignore[no-any-return]


def can_stream(provider: LLMProvider, model: str | None = None) -> bool:
    """Whether `provider` can stream `model`. A provider that has `stream` but says nothing can."""
    if not hasattr(provider, "stream"):
        return False
    says: Callable[[str | None], bool] | None = getattr(provider, "supports_streaming", None)
    return True if says is None else bool(says(model))


def enforces(provider: LLMProvider, response_format: ResponseFormat, model: str | None = None) -> bool:
    """Whether `provider` holds every reply to the schema. One that says nothing does not."""
    says: Callable[[ResponseFormat, str | None], bool] | None = getattr(provider, "enforces_response_format", None)
    return says is not None and says(response_format, model)


async def open_stream(provider: LLMProvider, options: GenerateOptions) -> AsyncIterator[Chunk]:
    """The chunks of one call. A provider that cannot stream is asked for the whole reply, which then comes in chunks."""
    if not can_stream(provider, options.model):
        return _whole(provider, options)
    opened: Any = provider.stream(options)  # type: ignore[attr-defined]
    if inspect.isawaitable(opened):
        opened = await opened
    return opened  # type: ignore[no-any-return]


async def next_chunk(chunks: AsyncIterator[Chunk], provider: str) -> Chunk:
    """The next chunk of a stream that has not finished yet.

    Raises:
        TruncatedStreamError: The stream ended.
    """
    async for chunk in chunks:
        return chunk
    raise TruncatedStreamError(f"The stream of provider {provider!r} ended without a finish.", provider=provider)


async def drain(chunks: AsyncIterator[Chunk]) -> None:
    """Reads a stream on after its finish, so that its connection can be used again. The reply is whole: errors do not count."""
    with suppress(Exception):
        async for _ in chunks:
            pass


async def close_stream(chunks: AsyncIterator[Chunk] | None) -> None:
    """Ends a stream early, which closes its HTTP request."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


async def _whole(provider: LLMProvider, options: GenerateOptions) -> AsyncGenerator[Chunk, None]:
    for chunk in chunks_of(await provider.generate(options)):
        yield chunk


def chunks_of(result: GenerateResult) -> Iterator[Chunk]:
    """A whole reply in the order in which a stream would have brought it."""
    for block in result.reasoning:
        if block.text:
            yield ReasoningChunk(block.text)
        yield ReasoningEndChunk(block)
    for call in result.hosted_tool_calls:
        yield HostedToolCallChunk(call)
        yield HostedToolResultChunk(call)
    if result.text:
        yield TextChunk(result.text)
    for tool_call in result.tool_calls:
        yield ToolCallChunk(tool_call)
    yield FinishChunk(result.finish_reason, result.usage, result.served_by, result.response_model)


def is_output(chunk: Chunk) -> bool:
    """Whether a consumer has seen something of the reply: text, a call or the finish. Reasoning and empty text are none."""
    if isinstance(chunk, TextChunk):
        return bool(chunk.text)
    return isinstance(chunk, ToolCallChunk | HostedToolCallChunk | HostedToolResultChunk | FinishChunk)


def is_final(error: Exception) -> bool:
    """Whether an error must reach the caller as it is: an abort, or a test's script or recording that does not fit."""
    return isinstance(error, Aborted | CassetteError | TestFailedError)


def tell(listeners: Iterable[Callable[[Any], object] | None], notice: ProviderNotice) -> None:
    """Hands a notice to everybody who listens. A listener that raises is logged: it must not fail the call."""
    for listener in listeners:
        if listener is None:
            continue
        try:
            listener(notice)
        except Exception:
            _log.warning("A listener of %s raised.", type(notice).__name__, exc_info=True)
