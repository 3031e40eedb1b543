"""The report in a terminal: a row a case, totals, then what failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lousho_ray.evals.records import CaseRecord
from lousho_ray.evals.summary import EvalSummary, Summary

if TYPE_CHECKING:
    from rich.console import Console

MOST_ROWS = 200
"""Cases shown one by one; of a larger suite only those that did not pass cleanly."""

_STYLES = {"passed": "green", "failed": "red", "error": "bold red", "outage": "yellow"}


def print_summary(summary: Summary, console: Console) -> None:
    """Prints the summary: rows, totals, gate failures, soft failures, drift."""
    from rich.table import Table
    from rich.text import Text

    records = summary.records
    shown = [r for r in records if len(records) <= MOST_ROWS or r.status != "passed" or r.failed_softs]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("case", "left"), ("status", "left"), ("scores", "left"), ("cost", "right"), ("time", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for record in shown[:MOST_ROWS]:
        status = Text(record.status, _STYLES[record.status])
        table.add_row(Text(record.title), status, Text(scores_of(record)), money(record.cost_usd), seconds(record.duration_ms))
    if shown:
        console.print(table)
    hidden = len(records) - len(shown[:MOST_ROWS])
    if hidden:
        _say(console, f"... and {hidden:,} more, which are in the reports")
    _say(console, "")
    for one in summary.evals:
        _say(console, eval_line(one))
    _say(console, totals_line(summary))
    for title, lines in sections(summary):
        _say(console, f"\n{title}")
        for line in lines:
            _say(console, f"  {line}")


def scores_of(record: CaseRecord) -> str:
    """The scores that are more than yes or no."""
    scored = (item for item in record.assertions if item.kind == "soft" or item.threshold is not None)
    return ", ".join(f"{item.name} {'-' if item.score is None else f'{item.score:g}'}" for item in scored)


def eval_line(one: EvalSummary) -> str:
    """One eval: how many passed, with the interval of the rate when that says something."""
    rate = one.rate
    parts = [f"{rate.passed}/{rate.total} passed ({rate.value:.0%}, 95 % interval {rate.low:.0%} to {rate.high:.0%})"]
    if one.errors:
        parts.append(f"{one.errors} errors")
    if one.outages:
        parts.append(f"{one.outages} not finished")
    if one.threshold < 1:
        parts.append(f"{'meets' if one.passed else 'below'} its threshold of {one.threshold:.0%}")
    if one.flaky:
        parts.append(f"flaky: {', '.join(one.flaky[:5])}{' ...' if len(one.flaky) > 5 else ''}")
    for name, mean in one.scores.items():
        value = "-" if mean.value is None else f"{mean.value:.3g}"
        parts.append(f"mean {name} {value}{f' ({mean.missing} without a score)' if mean.missing else ''}")
    return f"{one.name}: {'; '.join(parts)}"


def totals_line(summary: Summary) -> str:
    """The last line: how the suite ended."""
    totals = summary.totals()
    parts = [f"{totals['cases']:,} cases", f"{totals['passed']:,} passed"]
    named = (("failed", "failed"), ("error", "errors"), ("outage", "not finished"), ("notRun", "not run"))
    parts += [f"{totals[key]:,} {name}" for key, name in named if totals[key]]
    if totals["softFailures"]:
        parts.append(f"{totals['softFailures']:,} soft failures")
    if summary.skipped:
        parts.append(f"{len(summary.skipped)} evals skipped by tag")
    parts += [f"{totals['tokens']:,} tokens", money(totals["costUsd"]) if totals["costUsd"] is not None else "cost unknown"]
    return f"{'PASSED' if summary.exit_code == 0 else 'FAILED'}: {', '.join(parts)}"


def sections(summary: Summary) -> list[tuple[str, list[str]]]:
    """Titles and lines of what went wrong."""
    records = summary.records
    loads = [
        f"{e['file']}{': eval ' + e['eval'] if e.get('eval') else ''}: {e['name']}: {e['message']}" for e in summary.load_errors
    ]
    gates = [f"{r.title} {a.name}: {a.message}" for r in records for a in r.failed_gates]
    errors = [f"{r.title} {r.error['name']}: {r.error['message']}" for r in records if r.error and r.status == "error"]
    outages = [f"{r.title} {r.error['name']}: {r.error['message']}" for r in records if r.error and r.status == "outage"]
    softs = [f"{r.title} {a.name}: {a.message}" for r in records for a in r.failed_softs]
    drift = [f"{d['eval']}[{d['case']}] {d['field']}: committed {d['committed']}, current {d['current']}" for d in summary.drift]
    titled = [
        ("Could not be loaded:", loads),
        ("Gate failures:", gates),
        ("Errors:", errors),
        ("Not finished (run again by the same command):", outages),
        ("Soft failures:", softs),
        ("Drift:", drift),
    ]
    return [(title, _cut(lines)) for title, lines in titled if lines]


def money(cost_usd: float | None) -> str:
    return "-" if cost_usd is None else f"${cost_usd:.4f}"


def seconds(duration_ms: float) -> str:
    return f"{duration_ms / 1000:.2f} s"


def _cut(lines: list[str]) -> list[str]:
    most = MOST_ROWS
    return lines if len(lines) <= most else [*lines[:most], f"... and {len(lines) - most:,} more"]


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
