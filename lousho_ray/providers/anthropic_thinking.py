"""Which Claude models think, and how they are asked to.

Models up to 4.5 take a budget of tokens (`thinking.type=enabled`). From 4.6 on that form is deprecated in favour of `adaptive` with
an effort, and from 4.7 on it is refused. Sources: https://platform.claude.com/docs/en/build-with-claude/adaptive-thinking and the
list of models for which the official client warns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lousho_ray.ports import Reasoning

BUDGET_TOKENS: Mapping[str, int] = {"minimal": 1_024, "low": 2_048, "medium": 8_192, "high": 24_576}
MIN_BUDGET_TOKENS = 1_024

_FIRST_THINKING: tuple[int, int] = (3, 7)
_FIRST_ADAPTIVE: tuple[int, int] = (4, 6)
_FIRST_ONLY_ADAPTIVE: tuple[int, int] = (4, 7)
_UNNUMBERED = {"claude-mythos-preview": _FIRST_ONLY_ADAPTIVE}
_VERSION = re.compile(r"claude-(?:[a-z]+-)?(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How to ask for thinking. `budget_tokens` is what it may take of the reply's tokens; `ignores_budget` is set when a budget was
    stated and the model takes none."""

    config: Mapping[str, Any]
    budget_tokens: int
    effort: str | None = None
    ignores_budget: bool = False


def claude_version(model: str) -> tuple[int, int] | None:
    """`(major, minor)` of a Claude model id in either order of family and number; `None` when it has no number."""
    for name, version in _UNNUMBERED.items():
        if name in model.lower():
            return version
    match = _VERSION.search(model)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def thinking_for(model: str, reasoning: Reasoning | None) -> Thinking | None:
    """The thinking to ask `model` for; `None` when none is wanted or the model is not known to think."""
    if reasoning is None or reasoning.effort == "none":
        return None
    version = claude_version(model)
    if not reasoning.force and (version is None or version < _FIRST_THINKING):
        return None
    stated = reasoning.budget_tokens
    budget = max(MIN_BUDGET_TOKENS, stated or BUDGET_TOKENS[reasoning.effort])
    known: tuple[int, int] = version or (0, 0)
    if known >= _FIRST_ONLY_ADAPTIVE or (known >= _FIRST_ADAPTIVE and stated is None):
        effort = "low" if reasoning.effort == "minimal" else reasoning.effort
        return Thinking({"type": "adaptive"}, budget, effort, ignores_budget=stated is not None)
    return Thinking({"type": "enabled", "budget_tokens": budget}, budget)
