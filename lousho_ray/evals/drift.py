"""Drift: how what a model does now differs from what was recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lousho_ray.testing.cassette_file import load_cassette, model_problem
from lousho_ray.testing.cassette_match import stable


@dataclass(frozen=True, slots=True)
class DriftOptions:
    """What is compared besides tools, arguments, steps, finish reason and structured answer."""

    usage: bool = False
    text: bool = False


ADVICE = "Record it with: lousho eval --record"


def drift_rows(committed: Path, current: Path, options: DriftOptions) -> list[dict[str, Any]]:
    """One row a field that changed, over all cassettes of a case: `{field, committed, current}`.

    Raises:
        CassetteError: `LOUSHO_CASSETTE_INVALID`: a recording was damaged.
    """
    before, now = _behaviour(committed, options), _behaviour(current, options)
    return [
        {"field": field, "committed": before.get(field), "current": now.get(field)}
        for field in dict.fromkeys([*before, *now])
        if before.get(field) != now.get(field)
    ]


def _behaviour(first: Path, options: DriftOptions) -> Mapping[str, Any]:
    """What the recorded calls show of what the agent did, one entry a field that can drift."""
    entries = [entry for path in _all(first) for entry in load_cassette(path, ADVICE, model_problem).entries]
    replies: list[dict[str, Any]] = [
        entry.get("response") or {"finishReason": f"error: {entry['error']['name']}"} for entry in entries
    ]
    calls = [call for reply in replies for call in reply.get("toolCalls", ())]
    text = replies[-1].get("text", "") if replies else ""
    found: dict[str, Any] = {
        "tools": [call["name"] for call in calls],
        "steps": len(replies),
        "finishReason": replies[-1]["finishReason"] if replies else None,
    }
    for number, call in enumerate(calls, 1):
        found[f"args of call {number} ({call['name']})"] = _json(call["arguments"])
    answer = _json(text)
    if isinstance(answer, dict | list):
        found["object"] = stable(answer)
    if options.text:
        found["text"] = " ".join(str(stable(text)).split())
    if options.usage:
        used = [reply.get("usage", {}) for reply in replies]
        found["tokens"] = sum(usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0) for usage in used)
    return found


def _all(first: Path) -> list[Path]:
    """The cassettes of a case, in the order of its providers."""
    found = [first] if first.exists() else []
    while (path := first.with_name(f"{first.stem}.{len(found) + 1}.json")).exists():
        found.append(path)
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
