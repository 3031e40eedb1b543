"""What is kept of a case that has run: one line of a results file."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Literal, NamedTuple
from uuid import UUID

from lousho_ray.evals.context import Assertion

Status = Literal["passed", "failed", "error", "outage"]
"""`failed`: a gate failed. `error`: the test raised. `outage`: it could not run to its end for a reason that says nothing about
the agent (a lost worker, a provider that was down, a budget); only such a case is run again when a suite is continued."""

_WRITTEN = (date, time, timedelta, Decimal, UUID, PurePath, bytes)
"""What has no fields to tell it by, and is written the same way everywhere."""


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """How one case ended. `key` names what was run: another case value or eval file gives another key."""

    key: str
    eval: str
    case: str
    repeat: int
    file: str
    status: Status
    assertions: tuple[Assertion, ...] = ()
    error: Mapping[str, Any] | None = None
    reply: str = ""
    finish_reason: str | None = None
    steps: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    duration_ms: float = 0.0
    tags: tuple[str, ...] = ()
    transcript: tuple[Mapping[str, Any], ...] = ()
    drift: tuple[Mapping[str, Any], ...] = ()
    started_at: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return CaseRecord, _VALUES(self)  # a third of the time that a dataclass with slots takes by itself

    @property
    def failed_gates(self) -> tuple[Assertion, ...]:
        return tuple(item for item in self.assertions if item.kind == "gate" and not item.passed)

    @property
    def failed_softs(self) -> tuple[Assertion, ...]:
        return tuple(item for item in self.assertions if item.kind == "soft" and not item.passed)

    @property
    def cost_usd(self) -> float | None:
        cost = self.usage.get("costUsd")
        return None if cost is None else float(cost)

    @property
    def tokens(self) -> int:
        return int(self.usage.get("totalTokens", 0))

    @property
    def title(self) -> str:
        """`eval[case]`, with the number of the repeat from the second on."""
        return f"{self.eval}[{self.case}]" + (f" #{self.repeat + 1}" if self.repeat else "")

    def to_dict(self) -> dict[str, Any]:
        """The line of the results file (camelCase keys)."""
        data: dict[str, Any] = {
            "type": "case",
            "key": self.key,
            "eval": self.eval,
            "case": self.case,
            "repeat": self.repeat,
            "file": self.file,
            "status": self.status,
            "assertions": [item.to_dict() for item in self.assertions],
            "finishReason": self.finish_reason,
            "steps": self.steps,
            "usage": dict(self.usage),
            "durationMs": round(self.duration_ms, 3),
            "startedAt": self.started_at,
            "tags": list(self.tags),
            "reply": self.reply,
        }
        optional = {"error": self.error, "transcript": list(self.transcript), "drift": list(self.drift)}
        return {**data, **{key: value for key, value in optional.items() if value}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaseRecord:
        """Rebuilds a record; fields that an older version did not write are empty."""
        return cls(
            key=data["key"],
            eval=data["eval"],
            case=data["case"],
            repeat=int(data.get("repeat", 0)),
            file=data.get("file", ""),
            status=data["status"],
            assertions=tuple(_assertion(item) for item in data.get("assertions", ())),
            error=data.get("error"),
            reply=data.get("reply", ""),
            finish_reason=data.get("finishReason"),
            steps=int(data.get("steps", 0)),
            usage=data.get("usage", {}),
            duration_ms=float(data.get("durationMs", 0.0)),
            tags=tuple(data.get("tags", ())),
            transcript=tuple(data.get("transcript", ())),
            drift=tuple(data.get("drift", ())),
            started_at=data.get("startedAt", ""),
        )


_VALUES = operator.attrgetter(*(field.name for field in fields(CaseRecord)))
_LINES = json.JSONEncoder(ensure_ascii=False, default=str, separators=(",", ":"))


def line_of(data: Mapping[str, Any]) -> bytes:
    """A line of a results file."""
    return _LINES.encode(data).encode("utf-8", "backslashreplace") + b"\n"


class Ended(NamedTuple):
    """A case that has ended: its record, and the line of the results file that was made of it where it ran."""

    record: CaseRecord
    line: bytes

    @classmethod
    def of(cls, record: CaseRecord) -> Ended:
        return cls(record, line_of(record.to_dict()))


def case_key(eval_name: str, case: str, value: Any, repeat: int, version: str) -> str:
    """The identity of a case: 24 hexadecimal digits over the eval's name, the case's name and value, the repeat, and the version
    (a hash) of the eval file."""
    text = _KEYS.encode([eval_name, case, value, repeat, version])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _stable(value: Any) -> Any:
    """A value that is no JSON, by its class and fields: an address in memory would be another one in the next run."""
    if isinstance(value, _WRITTEN):
        return [type(value).__qualname__, repr(value)]
    if callable(plain := getattr(value, "tolist", None)):
        return plain()  # numbers and arrays of NumPy, as rows of Ray Data hold them
    fields = getattr(value, "__dict__", None)
    if fields is None:
        slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str))
        fields = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [type(value).__qualname__, fields or (sorted(map(repr, value)) if isinstance(value, set | frozenset) else None)]


_KEYS = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=_stable)


def _assertion(data: Mapping[str, Any]) -> Assertion:
    return Assertion(
        data["name"],
        data["kind"],
        bool(data["passed"]),
        data.get("score"),
        data.get("threshold"),
        data.get("message", ""),
        bool(data.get("skipped", False)),
    )
