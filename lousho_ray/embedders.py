"""The port for embedders: texts in, vectors out. What one must be, and a call of one, checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from lousho_ray.errors import ConfigurationError, LLMProviderError

Vectors: TypeAlias = list[list[float]]
InputType: TypeAlias = Literal["query", "document"]
"""What texts are embedded for: to search with, or to be found."""


@runtime_checkable
class Embedder(Protocol):
    """Makes vectors of texts: any async callable with an `id`.

    A call takes a batch of texts and returns one vector for each, in their order, all of one length. One that has a parameter
    `input_type` is told what the texts are for. `id` names the model: vectors of different ids are not compared.
    """

    @property
    def id(self) -> str: ...

    def __call__(self, texts: Sequence[str], /) -> Awaitable[Sequence[Sequence[float]]]: ...


def check_embedder(embedder: Any, field: str = "embedder") -> Embedder:
    """The embedder itself, when it has the protocol's members.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`.
    """
    if isinstance(embedder, type) or not callable(embedder) or not isinstance(getattr(embedder, "id", None), str):
        shown = f"the class {embedder.__name__}" if isinstance(embedder, type) else type(embedder).__name__
        raise ConfigurationError(
            f"{field} must be an embedder, an async callable that has a text as its `id`, not {shown}.", field=field
        )
    return embedder  # type: ignore[no-any-return]


async def embed(embedder: Embedder, texts: Sequence[str], input_type: InputType | None = None) -> Vectors:
    """Calls an embedder; `input_type` reaches those that take it.

    Raises:
        LLMProviderError: `LOUSHO_PROVIDER_REQUEST_FAILED`: the reply is no list of vectors of one length, one for each text.
    """
    taken = {"input_type": input_type} if input_type is not None and _takes_input_type(embedder) else {}
    reply = await embedder(list(texts), **taken)
    try:
        vectors = [[float(number) for number in vector] for vector in reply]
    except (TypeError, ValueError) as error:
        raise _refused(embedder, f"something that is no list of vectors ({error})") from error
    if len(vectors) != len(texts):
        raise _refused(embedder, f"{len(vectors)} vectors for {len(texts)} texts")
    if len({len(vector) for vector in vectors}) > 1:
        raise _refused(embedder, "vectors of different lengths")
    if not all(math.isfinite(number) for vector in vectors for number in vector):
        raise _refused(embedder, "a vector with a number that is not finite")
    return vectors


def _refused(embedder: Embedder, said: str) -> LLMProviderError:
    return LLMProviderError(f"The embedder {embedder.id!r} returned {said}.", provider=embedder.id)


def _takes_input_type(embedder: Embedder) -> bool:
    return "input_type" in inspect.signature(embedder).parameters
