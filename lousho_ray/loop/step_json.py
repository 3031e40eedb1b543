"""The usage of a run's model calls in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lousho_ray.stores.json_form import FixedJson
from lousho_ray.usage import ProviderUsage, StepUsage


class StepForms:
    """The JSON forms of what each step of a run used, each made once: a run records all of them again at every step."""

    def __init__(self) -> None:
        self._made: list[tuple[StepUsage, FixedJson]] = []

    def of(self, entries: Sequence[StepUsage]) -> list[FixedJson]:
        made = self._made
        for index, entry in enumerate(entries):
            if index == len(made) or made[index][0] is not entry:
                made[index:] = [(entry, FixedJson(step_to_json(entry)))]
        return [form for _, form in made[: len(entries)]]


def step_to_json(entry: StepUsage) -> dict[str, Any]:
    """The usage of a model call as a record keeps it."""
    used = entry.usage
    data = {
        "step": entry.step,
        "model": entry.model,
        "promptTokens": used.prompt_tokens,
        "completionTokens": used.completion_tokens,
        "cachedInputTokens": used.cached_input_tokens,
        "cacheWriteTokens": used.cache_write_tokens,
        "reasoningTokens": used.reasoning_tokens,
        "reportedCostUsd": used.cost_usd,
        "estimated": entry.estimated,
        "costUsd": entry.cost_usd,
        "purpose": entry.purpose,
    }
    return {key: value for key, value in data.items() if value is not None}


def step_from_json(data: Mapping[str, Any]) -> StepUsage:
    """The inverse of `step_to_json`."""
    used = ProviderUsage(
        data.get("promptTokens", 0),
        data.get("completionTokens", 0),
        data.get("cachedInputTokens"),
        data.get("cacheWriteTokens"),
        data.get("reasoningTokens"),
        data.get("reportedCostUsd"),
    )
    return StepUsage(
        data.get("step", 0),
        data.get("model", "unknown"),
        used,
        data.get("estimated", False),
        data.get("costUsd"),
        data.get("purpose"),
    )
