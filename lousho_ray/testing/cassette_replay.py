"""Which recorded entry answers a call, and what a call that none answers is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lousho_ray.errors import CassetteMismatchError
from lousho_ray.testing.cassette_file import Cassette
from lousho_ray.testing.cassette_match import comparable, first_mismatch
from lousho_ray.testing.cassette_values import redacted

SHOWN_CHARS = 300


class Replay:
    """The entries of a cassette as they are used up: in order (`match="sequence"`), or by an equal request (`"request"`)."""

    def __init__(
        self,
        cassette: Cassette,
        match: str,
        normalize: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
        redact: Callable[[str], str] | None,
        advice: str,
    ) -> None:
        self.recorded = cassette.provider
        self._path = cassette.path
        self._entries = cassette.entries
        self._match = match
        self._normalize = normalize
        self._redact = redact
        self._advice = advice
        self._calls = 0
        self._used: set[int] = set()

    def next(self, kind: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The entry that answers a call.

        Raises:
            CassetteMismatchError: `LOUSHO_CASSETTE_INVALID`: there is none.
        """
        self._calls += 1
        actual = self._comparable({"kind": kind, **redacted(request, self._redact)})
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
        return CassetteMismatchError(
            f"Call {self._calls} does not match the cassette {self._path}, which {said} {_last(actual)} {self._advice}",
            cassette=str(self._path),
            call_number=self._calls,
        )


def _last(request: Mapping[str, Any]) -> str:
    """What a call asked last."""
    if "texts" in request:
        return f"Its texts are {_shown(request['texts'])}."
    last = request.get("messages") or [{}]
    return f"Its last message is {_shown(last[-1].get('text', ''))}."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."
