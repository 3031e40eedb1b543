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
from lousho_ray.errors import CassetteMismatchError, ConfigurationError
from lousho_ray.option_checks import check_choice
from lousho_ray.ports import Chunk, GenerateOptions, GenerateResult, LLMProvider
from lousho_ray.providers.wrapper import check_provider, close_stream, open_stream
from lousho_ray.testing.cassette_file import Cassette, load_cassette
from lousho_ray.testing.cassette_match import comparable, first_mismatch
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
SHOWN_CHARS = 300

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
    check_choice(mode, "mode", ("auto", "record", "replay"))
    check_choice(match, "match", ("sequence", "request"))
    if mode == "auto":
        mode = "record" if os.environ.get(RECORD_VARIABLE) == "1" or not path.exists() else "replay"
    if mode == "record":
        return Recorder(_made(provider), path, redact)
    advice = hint or f"Record it again with mode='record' or {RECORD_VARIABLE}=1."
    inner = provider if provider is not None and hasattr(provider, "generate") else None
    return Player(inner, load_cassette(path, advice), match, normalize, redact, replay_timing, advice)  # type: ignore[arg-type]


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

    def __init__(
        self,
        inner: LLMProvider | None,
        cassette: Cassette,
        match: str,
        normalize: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
        redact: Callable[[str], str] | None,
        timing: bool,
        advice: str,
    ) -> None:
        self.recorded_by = inner
        self.name = cassette.provider
        self.default_model = cassette.default_model
        self._path = cassette.path
        self._entries = cassette.entries
        self._match = match
        self._normalize = normalize
        self._redact = redact
        self._timing = timing
        self._advice = advice
        self._calls = 0
        self._used: set[int] = set()

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
        self._calls += 1
        actual = self._comparable({"kind": kind, **redacted(request_json(options), self._redact)})
        number = self._calls - 1 if self._match == "sequence" else self._equal(actual)
        if number is None or number >= len(self._entries):
            raise self._mismatch(
                f"has no {'unused equal' if number is None else 'more'} entry for it ({len(self._entries)} in all)", actual
            )
        entry = self._entries[number]
        found = first_mismatch(self._comparable({"kind": entry["kind"], **entry["request"]}), actual)
        if found is not None:
            tool = " A tool answered differently: tools run live in a replay." if found.in_tool_result else ""
            said = f"differs at {found.path}: recorded {_shown(found.recorded)}, now {_shown(found.actual)}.{tool}"
            raise self._mismatch(said, actual)
        self._used.add(number)
        return entry

    def _equal(self, actual: Mapping[str, Any]) -> int | None:
        for number, entry in enumerate(self._entries):
            same = number not in self._used and self._comparable({"kind": entry["kind"], **entry["request"]}) == actual
            if same:
                return number
        return None

    def _comparable(self, request: dict[str, Any]) -> dict[str, Any]:
        return comparable(request if self._normalize is None else self._normalize(request))

    def _mismatch(self, said: str, actual: Mapping[str, Any]) -> CassetteMismatchError:
        last = actual.get("messages") or [{}]
        asked = f"Its last message is {_shown(last[-1].get('text', ''))}."
        return CassetteMismatchError(
            f"Call {self._calls} does not match the cassette {self._path}, which {said} {asked} {self._advice}",
            cassette=str(self._path),
            call_number=self._calls,
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
