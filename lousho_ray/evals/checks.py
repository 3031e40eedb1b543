"""Checks: functions of a value that give a score. None of them raises: a value it cannot handle fails, with a message."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found. `score` is `None` when the value could not be scored."""

    passed: bool
    score: float | None
    threshold: float | None = None
    message: str = ""


Check = Callable[[Any], Checked]


def includes(text: str) -> Check:
    """Scores 1 when a text contains `text`, or a list or mapping has it as an item or key; else 0."""

    def check(value: Any) -> Checked:
        try:
            found = text in value
        except TypeError:
            return _unfit(value, "a text or a collection")
        return _yes_no(found, f"{shown(value)} does not include {shown(text)}")

    return check


def matches(regex: str | re.Pattern[str]) -> Check:
    """Scores 1 when `regex` is found anywhere in a text, else 0. The pattern is that of the standard library's `re`."""
    pattern = re.compile(regex)

    def check(value: Any) -> Checked:
        if not isinstance(value, str):
            return _unfit(value, "a text")
        return _yes_no(pattern.search(value) is not None, f"{shown(value)} does not match {pattern.pattern!r}")

    return check


def equals(expected: Any) -> Check:
    """Scores 1 when a value equals `expected`, else 0."""
    return lambda value: _yes_no(bool(value == expected), f"expected {shown(expected)}, got {shown(value)}")


def at_least(n: float) -> Check:
    """The number itself is the score, `n` its threshold."""
    return lambda value: _bounded(value, n, lambda number: number >= n, "at least")


def at_most(n: float) -> Check:
    """The number itself is the score, `n` its threshold."""
    return lambda value: _bounded(value, n, lambda number: number <= n, "at most")


def number_of(value: Any) -> float | None:
    """A score as a number: `True` and `False` are 1 and 0; what is no number, or not a finite one, is `None`."""
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        return None
    return float(value)


def shown(value: Any) -> str:
    """A value as a message quotes it."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def _yes_no(passed: bool, message: str) -> Checked:
    return Checked(passed, 1.0 if passed else 0.0, message="" if passed else message)


def _bounded(value: Any, n: float, holds: Callable[[float], bool], words: str) -> Checked:
    number = number_of(value)
    if number is None:
        return Checked(False, None, n, f"{shown(value)} is not a number that can be compared with {n:g}")
    passed = holds(number)
    return Checked(passed, number, n, "" if passed else f"{number:g} is not {words} {n:g}")


def _unfit(value: Any, wanted: str) -> Checked:
    return Checked(False, 0.0, message=f"{shown(value)} is not {wanted}")
