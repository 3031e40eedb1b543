"""Figures of repeated cases: pass rates with their uncertainty, means that do not hide what could not be scored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""The two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of passes with its 95 % interval."""

    passed: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.passed / self.total if self.total else 0.0


def pass_rate(passed: int, total: int, z: float = Z_95) -> Rate:
    """The rate with its Wilson score interval (Wilson 1927), which stays inside 0 to 1 and holds for few cases."""
    if total == 0:
        return Rate(0, 0, 0.0, 1.0)
    share, z2 = passed / total, z * z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return Rate(passed, total, max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of the scores there are. `missing` counts what gave no score: it is in no mean, and shown."""

    value: float | None
    count: int
    missing: int


def mean_of(scores: Iterable[float | None]) -> Mean:
    """The mean of the finite scores."""
    given = list(scores)
    known = [score for score in given if score is not None and math.isfinite(score)]
    return Mean(math.fsum(known) / len(known) if known else None, len(known), len(given) - len(known))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, the nearest one; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else 0.0
