"""Cassettes: model calls recorded to a file and replayed from it, without a key, a package or a network.

A cassette belongs to one provider of one process; parallel sub-agents that share one need `match="request"`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from lousho_ray.cancellation import Aborted
from lousho_ray.errors import ConfigurationError
from lousho_ray.option_checks import check_choice
from lousho_ray.ports import Chunk, GenerateOptions, GenerateResult, LLMProvider
from lousho_ray.providers.wrapper import check_provider, close_stream, open_stream
from lousho_ray.testing.cassette_file import Cassette, load_cassette, model_problem
from lousho_ray.testing.cassette_replay import Replay
from lousho_ray.testing.cassette_values import (
    chunk_json,
    chunk_of,
    error_json,
    error_of,
    redacted,
    reply_json,
    reply_of,
    reply_of_chunks,
    request_json,
)

RECORD_VARIABLE = "LOUSHO_RECORD"

Mode = Literal["auto", "record", "replay"]


def record_replay(
    provider: LLMProvider | Callable[[], LLMProvider] | None,
    *,
    cassette: str | Path,
    mode: Mode = "auto",
    match: Literal["sequence", "request"] = "sequence",
    normalize: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    redact: Callable[[str], str] | None = None,
    replay_timing: bool = False,
    hint: str | None = None,
) -> Recorder | Player:
    """A provider that records the calls of another one, or replays what was recorded.

    Args:
        provider: Who is recorded, or a function that makes it; in replay neither is called, and `None` will do.
        cassette: The JSON file.
        mode: `"auto"` replays when the file is there and records otherwise, or always with `LOUSHO_RECORD=1`. Decided here.
        match: `"sequence"`: call n gets entry n and must equal it. `"request"`: the first unused entry with an equal request.
        normalize: Changes a request, as it is stored, before it is compared: for values of your own that differ from run to run.
        redact: Goes over every text that is written, and over the incoming request when it is compared.
        replay_timing: Replays a stream with the delays it had.
        hint: What an error tells to do instead of "record it again with mode='record'".

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: recording without a provider, or while another one records to the file.
        CassetteError: `LOUSHO_CASSETTE_INVALID`: a file that cannot be replayed.
    """
    path = Path(cassette)
    chosen, advice = decided(mode, match, path, hint)
    if chosen == "record":
        return Recorder(_made(provider), path, redact)
    inner: Any = provider if provider is not None and hasattr(provider, "generate") else None
    recorded = load_cassette(path, advice, model_problem)
    return Player(inner, recorded, Replay(recorded, match, normalize, redact, advice), timing=replay_timing)


def decided(mode: Mode, match: str, path: Path, hint: str | None) -> tuple[Literal["record", "replay"], str]:
    """What is done with a file, and what errors advise; the choices of a recorder are checked here."""
    check_choice(match, "match", ("sequence", "request"))
    check_choice(mode, "mode", ("auto", "record", "replay"))
    if mode == "auto":
        mode = "record" if os.environ.get(RECORD_VARIABLE) == "1" or not path.exists() else "replay"
    return mode, hint or f"Record it again with mode='record' or {RECORD_VARIABLE}=1."


def _made(provider: Any) -> LLMProvider:
    if provider is None:
        raise ConfigurationError("Recording needs a provider; record_replay(None, ...) can only replay.", field="provider")
    return check_provider(provider() if callable(provider) and not hasattr(provider, "generate") else provider)


async def _close(provider: LLMProvider | None) -> None:
    close = getattr(provider, "aclose", None)
    if close is not None:
        await close()


class Recorder:
    """Records. The file is written after every call; it holds the calls in the order in which they were made.

    It is this recorder's own until `close()` or `aclose()`; a later call takes it again.
    """

    replays = False

    def __init__(self, inner: LLMProvider, path: Path, redact: Callable[[str], str] | None) -> None:
        self.inner = inner
        self._redact = redact
        self._cassette = Cassette(path, inner.name, inner.default_model)
        self._cassette.claim(self)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def default_model(self) -> str | None:
        return self.inner.default_model

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        number = self._reserve()
        try:
            result = await self.inner.generate(options)
        except Exception as error:
            await self._keep(number, "generate", options, {"error": error_json(error)})
            raise
        await self._keep(number, "generate", options, {"response": reply_json(result)})
        return result

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        """The real stream is read to its end before it is handed on."""
        number = self._reserve()
        chunks: list[Chunk] = []
        timed: list[dict[str, Any]] = []
        source = None
        try:
            before = time.monotonic()
            source = await open_stream(self.inner, options)
            async for chunk in source:
                now = time.monotonic()
                timed.append({**chunk_json(chunk), "delayMs": round((now - before) * 1000)})
                chunks.append(chunk)
                before = now
        except Exception as error:
            await self._keep(number, "stream", options, {"chunks": timed, "error": error_json(error)})
            for chunk in chunks:
                yield chunk
            raise
        finally:
            await close_stream(source)
        await self._keep(number, "stream", options, {"response": reply_json(reply_of_chunks(chunks)), "chunks": timed})
        for chunk in chunks:
            yield chunk

    async def save(self) -> None:
        """Writes the file now."""
        await self._cassette.save()

    def close(self) -> None:
        """Lets another provider record to the file."""
        self._cassette.release(self)

    async def aclose(self) -> None:
        """`close()`, also of the provider that is recorded."""
        self.close()
        await _close(self.inner)

    def _reserve(self) -> int:
        self._cassette.claim(self)
        return self._cassette.reserve()

    async def _keep(self, number: int, kind: str, options: GenerateOptions, outcome: Mapping[str, Any]) -> None:
        entry = {"kind": kind, "request": request_json(options), **outcome}
        await self._cassette.keep(number, redacted(entry, self._redact))

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class Player:
    """Replays. Never calls a model."""

    replays = True

    def __init__(self, inner: LLMProvider | None, cassette: Cassette, replay: Replay, *, timing: bool) -> None:
        self.recorded_by = inner
        self.name = cassette.provider
        self.default_model = cassette.default_model
        self._replay = replay
        self._timing = timing

    def supports_tools(self, model: str | None = None) -> bool:
        return True

    def supports_streaming(self, model: str | None = None) -> bool:
        return True

    def supports_hosted_tool(self, type: str) -> bool:
        return True

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        entry = self._next("generate", options)
        if "error" in entry:
            raise error_of(entry["error"])
        return reply_of(entry["response"])

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        entry = self._next("stream", options)
        for chunk in entry.get("chunks", ()):
            if self._timing:
                await asyncio.sleep(chunk.get("delayMs", 0) / 1000)
            yield chunk_of(chunk)
        if "error" in entry:
            raise error_of(entry["error"])

    async def save(self) -> None:
        """Does nothing: there is nothing to write."""

    def close(self) -> None:
        """Does nothing: a file may be replayed by many."""

    async def aclose(self) -> None:
        """Closes the provider that was given."""
        await _close(self.recorded_by)

    def _next(self, kind: str, options: GenerateOptions) -> Mapping[str, Any]:
        """The entry that answers a call. A call that is aborted already uses none."""
        if options.abort is not None and options.abort.reason is not None:
            raise Aborted(options.abort.reason)
        return self._replay.next(kind, request_json(options))
