"""Embedders for tests: one without a model, and one that records another and replays it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from math import sqrt
from pathlib import Path
from typing import Any, Literal

from lousho_ray.embedders import Embedder, InputType, Vectors, check_embedder, embed
from lousho_ray.errors import ConfigurationError
from lousho_ray.option_checks import check_positive_int
from lousho_ray.testing.cassette_file import Cassette, embedding_problem, load_cassette
from lousho_ray.testing.cassette_replay import Replay
from lousho_ray.testing.cassette_values import error_json, error_of, redacted
from lousho_ray.testing.cassettes import Mode, decided

_VOWELS = frozenset("aeiouy")


def hash_embedder(*, dimensions: int = 256) -> HashEmbedder:
    """An embedder that needs no model and no network: texts that share words, whatever their endings, have similar vectors.

    Args:
        dimensions: The length of the vectors. The shorter, the more unlike words share a place.
    """
    return HashEmbedder(check_positive_int(dimensions, "dimensions"))


class HashEmbedder:
    """Counts the stems of a text's words, each at the place that its hash gives, and scales the vector to length 1.

    The same text has the same vector in every process. A text without a word has the zero vector.
    """

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.id = f"hash-{dimensions}"

    async def __call__(self, texts: Sequence[str], /) -> Vectors:
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        counts = [0] * self.dimensions
        for word in _words(text):
            digest = blake2b(stem(word).encode("utf-8", "surrogatepass"), digest_size=8).digest()
            counts[int.from_bytes(digest, "big") % self.dimensions] += 1
        length = sqrt(sum(count * count for count in counts)) or 1.0
        return [count / length for count in counts]


def _words(text: str) -> list[str]:
    return ["".join(part) for wordlike, part in groupby(text.casefold(), str.isalnum) if wordlike]


def stem(word: str) -> str:
    """An English word without its commonest endings: `cats` is `cat`, `moved` and `moving` are `mov`, `stories` is `story`."""
    if word.endswith("ies") and len(word) > 4:
        word = f"{word[:-3]}y"
    elif word.endswith(("sses", "xes", "ches", "shes")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 3:
        word = word[:-1]
    for ending in ("ing", "ed"):
        rest = word.removesuffix(ending)
        if rest != word and len(rest) > 2 and not _VOWELS.isdisjoint(rest):
            doubled = rest[-1] == rest[-2] and rest[-1] not in "lsz"
            return rest[:-1] if doubled else rest
    return word[:-1] if word.endswith("e") and len(word) > 3 else word


def record_replay_embedder(
    embedder: Embedder | Callable[[], Embedder] | None,
    *,
    cassette: str | Path,
    mode: Mode = "auto",
    match: Literal["sequence", "request"] = "sequence",
    normalize: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    redact: Callable[[str], str] | None = None,
    hint: str | None = None,
) -> EmbeddingRecorder | EmbeddingPlayer:
    """An embedder that records the calls of another one, or replays what was recorded: `record_replay()` for embeddings.

    Args:
        embedder: Who is recorded, or a function without parameters that makes it; in replay neither is called, and `None` will do.
        cassette: The JSON file. It is another one than that of a model.
        mode: `"auto"` replays when the file is there and records otherwise, or always with `LOUSHO_RECORD=1`. Decided here.
        match: `"sequence"`: call n gets entry n and must equal it. `"request"`: the first unused entry with equal texts.
        normalize: Changes a request, as it is stored (`{"texts": [...]}`), before it is compared.
        redact: Goes over every text that is written, and over the incoming texts when they are compared.
        hint: What an error tells to do instead of "record it again with mode='record'".

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: recording without an embedder, or while another one records to the file.
        CassetteError: `LOUSHO_CASSETTE_INVALID`: a file that cannot be replayed.
    """
    path = Path(cassette)
    chosen, advice = decided(mode, match, path, hint)
    if chosen == "record":
        return EmbeddingRecorder(_made(embedder), path, redact)
    return EmbeddingPlayer(Replay(load_cassette(path, advice, embedding_problem), match, normalize, redact, advice))


def _made(embedder: Any) -> Embedder:
    if embedder is None:
        raise ConfigurationError(
            "Recording needs an embedder; record_replay_embedder(None, ...) can only replay.", field="embedder"
        )
    return check_embedder(embedder() if callable(embedder) and not hasattr(embedder, "id") else embedder)


class EmbeddingRecorder:
    """Records. The file is written after every call, and is this recorder's own until `close()`."""

    replays = False

    def __init__(self, inner: Embedder, path: Path, redact: Callable[[str], str] | None) -> None:
        self.inner = inner
        self.id = inner.id
        self._redact = redact
        self._cassette = Cassette(path, inner.id, None)
        self._cassette.claim(self)

    async def __call__(self, texts: Sequence[str], /, *, input_type: InputType | None = None) -> Vectors:
        self._cassette.claim(self)
        number = self._cassette.reserve()
        request = _request(texts, input_type)
        try:
            vectors = await embed(self.inner, texts, input_type)
        except Exception as error:
            await self._keep(number, request, {"error": error_json(error)})
            raise
        await self._keep(number, request, {"response": {"vectors": vectors}})
        return vectors

    def close(self) -> None:
        """Lets another recorder have the file."""
        self._cassette.release(self)

    async def _keep(self, number: int, request: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        entry = {"kind": "embed", "request": request, **outcome}
        await self._cassette.keep(number, redacted(entry, self._redact))


class EmbeddingPlayer:
    """Replays. Never calls a model."""

    replays = True

    def __init__(self, replay: Replay) -> None:
        self.id = replay.recorded
        self._replay = replay

    async def __call__(self, texts: Sequence[str], /, *, input_type: InputType | None = None) -> Vectors:
        entry = self._replay.next("embed", _request(texts, input_type))
        if "error" in entry:
            raise error_of(entry["error"])
        return [list(vector) for vector in entry["response"]["vectors"]]

    def close(self) -> None:
        """Does nothing: a file may be replayed by many."""


def _request(texts: Sequence[str], input_type: InputType | None) -> dict[str, Any]:
    return {"texts": list(texts), **({} if input_type is None else {"inputType": input_type})}
