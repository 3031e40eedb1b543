"""The summary of a suite, made from its records alone: two runs with the same records give the same summary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lousho_ray.evals.records import CaseRecord
from lousho_ray.evals.stats import Mean, Rate, mean_of, pass_rate, percentile

MOST_DIGITS = 18
_DIGITS = re.compile(f"([0-9]{{1,{MOST_DIGITS}}})")


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """One eval: how its cases ended. Errors and outages count as cases that did not pass."""

    name: str
    file: str
    records: tuple[CaseRecord, ...]
    threshold: float
    rate: Rate
    errors: int
    outages: int
    scores: Mapping[str, Mean]
    flaky: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether enough of its cases passed."""
        return self.rate.value >= self.threshold - 1e-12


@dataclass(frozen=True, slots=True)
class Summary:
    """A suite. `not_run` counts cases that were selected and have no record; `drift` are the rows of a drift check."""

    evals: tuple[EvalSummary, ...]
    skipped: tuple[str, ...] = ()
    not_run: int = 0
    strict: bool = False
    halted: str | None = None
    load_errors: tuple[Mapping[str, Any], ...] = ()

    @property
    def records(self) -> tuple[CaseRecord, ...]:
        return tuple(record for one in self.evals for record in one.records)

    @property
    def drift(self) -> tuple[Mapping[str, Any], ...]:
        return tuple({"eval": r.eval, "case": r.case, **row} for r in self.records for row in r.drift)

    @property
    def soft_failures(self) -> int:
        return sum(len(record.failed_softs) for record in self.records)

    @property
    def passed(self) -> bool:
        """Whether every eval passed, everything ran and, when strict, no soft assertion failed."""
        whole = not self.not_run and self.halted is None and not self.load_errors
        return whole and all(one.passed for one in self.evals) and not (self.strict and self.soft_failures)

    @property
    def exit_code(self) -> int:
        return 0 if self.passed and not any(one.errors or one.outages for one in self.evals) else 1

    def totals(self) -> dict[str, Any]:
        """The figures over all cases: counts, tokens, cost (USD, `None` when it is not known for a case) and latency (ms)."""
        records = self.records
        costs = [record.cost_usd for record in records]
        durations = [record.duration_ms for record in records]
        counts = {status: sum(r.status == status for r in records) for status in ("passed", "failed", "error", "outage")}
        return {
            "cases": len(records) + self.not_run,
            **counts,
            "notRun": self.not_run,
            "softFailures": self.soft_failures,
            "tokens": sum(record.tokens for record in records),
            "costUsd": None if any(cost is None for cost in costs) else round(sum(cost or 0.0 for cost in costs), 10),
            "durationMs": {
                "p50": percentile(durations, 0.5),
                "p95": percentile(durations, 0.95),
                "max": max(durations, default=0.0),
            },
        }

    def to_dict(self) -> dict[str, Any]:
        """The JSON report: the summary and every record."""
        return {
            "version": 1,
            "passed": self.passed,
            "exitCode": self.exit_code,
            "strict": self.strict,
            "halted": self.halted,
            "totals": self.totals(),
            "evals": [_eval_dict(one) for one in self.evals],
            "skipped": list(self.skipped),
            "loadErrors": [dict(error) for error in self.load_errors],
            "drift": [dict(row) for row in self.drift],
            "results": [record.to_dict() for record in self.records],
        }


def summarize(
    records: Iterable[CaseRecord],
    thresholds: Mapping[str, float],
    *,
    not_run: int = 0,
    skipped: Sequence[str] = (),
    strict: bool = False,
    halted: str | None = None,
    load_errors: Sequence[Mapping[str, Any]] = (),
) -> Summary:
    """Groups records by eval, sorted by eval and case, whatever order they ended in."""
    by_eval: dict[str, list[CaseRecord]] = {}
    for record in sorted(records, key=lambda record: (record.eval, *_natural(record.case), record.repeat)):
        by_eval.setdefault(record.eval, []).append(record)
    evals = tuple(_summarize_eval(name, group, thresholds.get(name, 1.0)) for name, group in by_eval.items())
    return Summary(evals, tuple(skipped), not_run, strict, halted, tuple(load_errors))


def _natural(name: str) -> tuple[list[str | int], str]:
    """Sorts `case 2` before `case 10`."""
    if len(name) <= MOST_DIGITS and name.isascii() and name.isdigit():
        return ["", int(name), ""], name  # what follows, at a fifth of its time
    parts = _DIGITS.split(name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def _summarize_eval(name: str, records: Sequence[CaseRecord], threshold: float) -> EvalSummary:
    passed = sum(record.status == "passed" for record in records)
    by_case: dict[str, set[str]] = {}
    scores: dict[str, list[float | None]] = {}
    for record in records:
        by_case.setdefault(record.case, set()).add(record.status)
        for item in record.assertions:
            if item.kind == "soft" or item.name == "score":
                scores.setdefault(item.name, []).append(item.score)
    return EvalSummary(
        name=name,
        file=records[0].file,
        records=tuple(records),
        threshold=threshold,
        rate=pass_rate(passed, len(records)),
        errors=sum(record.status == "error" for record in records),
        outages=sum(record.status == "outage" for record in records),
        scores={key: mean_of(values) for key, values in scores.items()},
        flaky=tuple(case for case, seen in by_case.items() if "passed" in seen and seen & {"failed", "error"}),
    )


def _eval_dict(one: EvalSummary) -> dict[str, Any]:
    return {
        "name": one.name,
        "file": one.file,
        "passed": one.passed,
        "threshold": one.threshold,
        "cases": one.rate.total,
        "passedCases": one.rate.passed,
        "errors": one.errors,
        "outages": one.outages,
        "passRate": one.rate.value,
        "passRateLow": one.rate.low,
        "passRateHigh": one.rate.high,
        "scores": {name: {"mean": m.value, "count": m.count, "missing": m.missing} for name, m in one.scores.items()},
        "flaky": list(one.flaky),
    }
