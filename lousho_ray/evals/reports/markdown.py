"""A report in Markdown, for pull requests and job summaries."""

from __future__ import annotations

import re

from lousho_ray.evals.reports.table import eval_line, money, seconds, sections, totals_line
from lousho_ray.evals.summary import Summary

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def markdown_report(summary: Summary) -> str:
    """Totals, a table of evals, then what went wrong. Text of models and cases is escaped."""
    lines = ["# Evals", "", escaped(totals_line(summary)), ""]
    if summary.halted is not None:
        lines += [f"**Halted:** {escaped(summary.halted)}", ""]
    lines += ["| eval | passed | rate | 95 % interval | errors | cost | p50 time |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for one in summary.evals:
        costs = [record.cost_usd for record in one.records]
        known = None if any(cost is None for cost in costs) else sum(cost or 0.0 for cost in costs)
        middle = sorted(record.duration_ms for record in one.records)[len(one.records) // 2]
        rate = f"{one.rate.value:.0%} | {one.rate.low:.0%} to {one.rate.high:.0%}"
        broken = one.errors + one.outages
        lines.append(
            f"| {escaped(one.name)} | {one.rate.passed}/{one.rate.total} | {rate} | {broken} | {money(known)} | {seconds(middle)} |"
        )
    lines += ["", *(f"- {escaped(eval_line(one))}" for one in summary.evals if one.scores or one.flaky)]
    for title, found in sections(summary):
        lines += ["", f"## {title.rstrip(':')}", "", *(f"- {escaped(line)}" for line in found)]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
