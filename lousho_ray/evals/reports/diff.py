"""Two runs side by side: which cases changed, and what that did to rates, cost and latency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lousho_ray.evals.records import CaseRecord
from lousho_ray.evals.reports.table import money, seconds
from lousho_ray.evals.summary import Summary, summarize

if TYPE_CHECKING:
    from rich.console import Console

CaseId = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class RunDiff:
    """What changed from run `before` to run `after`; cases are matched by eval, case and repeat."""

    before: Summary
    after: Summary
    broken: tuple[CaseRecord, ...]
    fixed: tuple[CaseRecord, ...]
    added: tuple[CaseRecord, ...]
    removed: tuple[CaseRecord, ...]

    def lines(self) -> list[str]:
        """The report, one line each."""
        found = [f"{'':24}{'before':>12}{'after':>12}"]
        for name, left, right in self._figures():
            found.append(f"{name:24}{left:>12}{right:>12}")
        for title, records in (("broken", self.broken), ("fixed", self.fixed), ("added", self.added), ("removed", self.removed)):
            found += [f"{title}: {record.title} ({record.status})" for record in records]
        return found

    def to_dict(self) -> dict[str, Any]:
        named = {"broken": self.broken, "fixed": self.fixed, "added": self.added, "removed": self.removed}
        return {
            "before": self.before.totals(),
            "after": self.after.totals(),
            **{name: [record.title for record in records] for name, records in named.items()},
        }

    def _figures(self) -> Iterable[tuple[str, str, str]]:
        left, right = self.before.totals(), self.after.totals()
        for key in ("cases", "passed", "failed", "error", "outage", "softFailures", "tokens"):
            yield key, f"{left[key]:,}", f"{right[key]:,}"
        yield "cost", money(left["costUsd"]), money(right["costUsd"])
        for key in ("p50", "p95"):
            yield f"time {key}", seconds(left["durationMs"][key]), seconds(right["durationMs"][key])
        rates = {one.name: one.rate for one in self.before.evals}
        for one in self.after.evals:
            before = rates.get(one.name)
            yield f"rate {one.name}"[:24], "-" if before is None else f"{before.value:.1%}", f"{one.rate.value:.1%}"
            if before is not None and (one.rate.low > before.high or one.rate.high < before.low):
                yield "  beyond chance", f"<{before.high:.1%}", f">{one.rate.low:.1%}"


def diff_runs(before: Iterable[CaseRecord], after: Iterable[CaseRecord]) -> RunDiff:
    """Compares the records of two runs."""
    left, right = _by_id(before), _by_id(after)
    both = [case for case in right if case in left]
    return RunDiff(
        summarize(left.values(), {}),
        summarize(right.values(), {}),
        broken=tuple(right[case] for case in both if left[case].status == "passed" and right[case].status != "passed"),
        fixed=tuple(right[case] for case in both if left[case].status != "passed" and right[case].status == "passed"),
        added=tuple(record for case, record in right.items() if case not in left),
        removed=tuple(record for case, record in left.items() if case not in right),
    )


def print_diff(diff: RunDiff, console: Console) -> None:
    for line in diff.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _by_id(records: Iterable[CaseRecord]) -> dict[CaseId, CaseRecord]:
    ordered = sorted(records, key=lambda record: (record.eval, record.case, record.repeat))
    return {(record.eval, record.case, record.repeat): record for record in ordered}
