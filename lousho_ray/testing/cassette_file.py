"""The file of a cassette: written as a whole after each call, checked as a whole when it is read."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lousho_ray.clock import SYSTEM_CLOCK, timestamp
from lousho_ray.errors import CassetteError, ConfigurationError
from lousho_ray.testing.cassette_values import chunk_of, reply_of

VERSION = 1
Entry = dict[str, Any]

_recording: weakref.WeakValueDictionary[Path, object] = weakref.WeakValueDictionary()
_registry = threading.Lock()


class Cassette:
    """The entries of one file. An entry that was reserved and has not come yet is empty, and is not written."""

    def __init__(self, path: Path, provider: str, default_model: str | None) -> None:
        self.path = path
        self.provider = provider
        self.default_model = default_model
        self.entries: list[Entry] = []
        self._before = _read(path)
        self._recorded_at = timestamp(SYSTEM_CLOCK.wall())
        self._writing = asyncio.Lock()

    def claim(self, owner: object) -> None:
        """Makes the file this recorder's own, until `release()`; one that is dropped unreleased loses it too.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_INVALID`: another recorder of this process writes it.
        """
        with _registry:
            if _recording.setdefault(self.path.resolve(), owner) is not owner:
                raise ConfigurationError(
                    f"Another provider is recording to {self.path}; give each its own file, or close that one first.",
                    field="cassette",
                )

    def release(self, owner: object) -> None:
        with _registry:
            if _recording.get(self.path.resolve()) is owner:
                del _recording[self.path.resolve()]

    def reserve(self) -> int:
        """The number of the next call: entries stand in the order in which calls began."""
        self.entries.append({})
        return len(self.entries) - 1

    async def keep(self, number: int, entry: Entry) -> None:
        self.entries[number] = entry
        await self.save()

    async def save(self) -> None:
        async with self._writing:
            await asyncio.to_thread(self.write)

    def write(self) -> None:
        """Replaces the file. Exchanges that are those of the file before are written as they were there, to the byte."""
        from lousho_ray import __version__

        entries = [entry for entry in self.entries if entry]
        data: Mapping[str, Any] = {
            "version": VERSION,
            "sdkVersion": __version__,
            "recordedAt": self._recorded_at,
            "provider": {"name": self.provider, "defaultModel": self.default_model},
            "entries": entries,
        }
        if self._before is not None and _untimed(self._before) == _untimed(data):
            data = self._before
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with new.open("w", encoding="utf-8") as file:
                file.write(json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self.path)
        finally:
            new.unlink(missing_ok=True)


def load_cassette(path: Path, advice: str, problem_of: Callable[[Any], str | None]) -> Cassette:
    """Reads a cassette for replay. `problem_of` says what is wrong with an entry (`model_problem`, `embedding_problem`).

    Raises:
        CassetteError: `LOUSHO_CASSETTE_INVALID`: the file is missing, no JSON, of another version, or an entry is malformed.
    """

    def refuse(said: str) -> CassetteError:
        return CassetteError(f"The cassette {path} {said} {advice}", path=str(path))

    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise refuse("does not exist.") from None
    except (OSError, ValueError) as error:
        raise refuse(f"is not readable JSON: {error}.") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise refuse(f"has the version {found!r}; this package reads version {VERSION}.")
    provider, entries = data.get("provider"), data.get("entries")
    if not isinstance(provider, dict) or not isinstance(provider.get("name"), str) or not isinstance(entries, list):
        raise refuse("has no provider or no list of entries.")
    for number, entry in enumerate(entries, 1):
        problem = problem_of(entry)
        if problem is not None:
            raise refuse(f"has a malformed entry {number}: {problem}.")
    cassette = Cassette(path, provider["name"], provider.get("defaultModel"))
    cassette.entries = entries
    return cassette


def model_problem(entry: Any) -> str | None:
    """What is wrong with an entry of a model."""
    if not isinstance(entry, dict) or entry.get("kind") not in ("generate", "stream"):
        return "its kind is neither 'generate' nor 'stream'"
    if not isinstance(entry.get("request"), dict) or not isinstance(entry["request"].get("messages"), list):
        return "it has no request with messages"
    if entry.get("error") is not None:
        return _error_problem(entry["error"])
    try:
        reply_of(entry["response"])
        for chunk in entry.get("chunks", ()):
            chunk_of(chunk)
    except (KeyError, TypeError, AttributeError) as problem:
        return f"its response cannot be read ({type(problem).__name__}: {problem})"
    return "a stream without chunks" if entry["kind"] == "stream" and not entry.get("chunks") else None


def embedding_problem(entry: Any) -> str | None:
    """What is wrong with an entry of an embedder."""
    if not isinstance(entry, dict) or entry.get("kind") != "embed":
        return "its kind is not 'embed'"
    texts = entry["request"].get("texts") if isinstance(entry.get("request"), dict) else None
    if not isinstance(texts, list):
        return "it has no request with texts"
    if entry.get("error") is not None:
        return _error_problem(entry["error"])
    vectors = entry["response"].get("vectors") if isinstance(entry.get("response"), dict) else None
    if not isinstance(vectors, list) or len(vectors) != len(texts):
        return f"it has no vector for each of its {len(texts)} texts"
    numbers = all(isinstance(vector, list) and all(isinstance(number, float) for number in vector) for vector in vectors)
    return None if numbers else "a vector is no list of numbers with a decimal point"


def _error_problem(error: Any) -> str | None:
    return None if isinstance(error, dict) and {"name", "message"} <= set(error) else "its error has no name and message"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _untimed(data: Mapping[str, Any]) -> Any:
    """A cassette without when it was recorded, by which version, and how fast its streams came."""
    kept = {key: value for key, value in data.items() if key not in ("recordedAt", "sdkVersion")}
    return _without_delays(json.loads(json.dumps(kept, default=str)))


def _without_delays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_delays(item) for key, item in value.items() if key != "delayMs"}
    return [_without_delays(item) for item in value] if isinstance(value, list) else value
