"""`lousho eval`: its options, and what happens around a suite."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lousho_ray.cli.eval_control import control
from lousho_ray.errors import ConfigurationError, suggest
from lousho_ray.option_checks import check_choice

if TYPE_CHECKING:
    from rich.console import Console

    from lousho_ray.agent import RuntimeName
    from lousho_ray.evals.cassettes import Mode
    from lousho_ray.evals.suite import Outcome, SuiteOptions


TOKEN_VARIABLE = "LOUSHO_EVAL_TOKEN"
LEFT_BEHIND_S = 2.0
"""How long the end of a run waits for tasks that cases left behind."""

VERBS = frozenset({"status", "pause", "resume", "cancel", "retune"})
"""What can be asked of a running suite, in place of a pattern."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("eval", no_args_is_help=False)(eval_command)


def eval_command(
    patterns: Annotated[
        list[str] | None, typer.Argument(help="Files, folders or globs; default **/*.eval.py and **/*_eval.py.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Run evals with this tag; may repeat, or hold several with commas.")] = None,
    judge: Annotated[bool, typer.Option("--judge", help="Run the files that grade with a model, and only them.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Soft failures fail the run.")] = False,
    concurrency: Annotated[int | None, typer.Option(help="Cases that run at once.", min=1)] = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Model calls of the whole suite in a minute.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Tokens of the whole suite in a minute.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Model calls of the whole suite at once.")] = None,
    max_cost_usd: Annotated[float | None, typer.Option(help="Halt the suite once it has cost this much.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Milliseconds a case may take.")] = None,
    runtime: Annotated[str | None, typer.Option(help="local or ray; default ray where RAY_ADDRESS is set, else local.")] = None,
    results: Annotated[Path | None, typer.Option(help="Append results to this JSON-lines file and continue what is in it.")] = None,
    url: Annotated[str | None, typer.Option(help="Run against the deployment at this address.")] = None,
    token: Annotated[str | None, typer.Option(help="Its token; default LOUSHO_EVAL_TOKEN.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run cases again that have results already.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Record every case's model calls beside its eval file.")] = False,
    replay: Annotated[bool, typer.Option("--replay", help="Answer from the recordings; call no model.")] = False,
    drift: Annotated[bool, typer.Option("--drift", help="Run live and compare with the recordings.")] = False,
    drift_usage: Annotated[bool, typer.Option("--drift-usage", help="With --drift: compare tokens, too.")] = False,
    drift_text: Annotated[bool, typer.Option("--drift-text", help="With --drift: compare the reply's text, too.")] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file with defaults of these options.")] = None,
    status_json: Annotated[bool, typer.Option("--status-json", help="Print the status of a running suite as JSON.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write a JSON report.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit report.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown report.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report as one self-contained page.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write every result as a row of a Parquet file.")] = None,
) -> int:
    """Runs evals. The same command again runs only what is missing or could not be finished.

    `lousho eval diff A B` compares two results files. `lousho eval status|pause|resume|cancel|retune [suite]` looks at a running
    suite or steers it.
    """
    if patterns and patterns[0] == "diff":
        return _diff(patterns[1:])
    if patterns and patterns[0] in VERBS:
        limits = _limits(requests_per_minute, tokens_per_minute, max_concurrent)
        return control(patterns[0], patterns[1:], concurrency, limits, as_json=status_json)
    for name, given in (("--drift-usage", drift_usage), ("--drift-text", drift_text)):
        if given and not drift:
            raise ConfigurationError(f"{name} says what --drift compares: give --drift, too, or leave it out.", field=name)
    from lousho_ray.evals.drift import DriftOptions
    from lousho_ray.evals.results import RESULTS_VARIABLE
    from lousho_ray.evals.suite import SuiteOptions

    named = os.environ.get(RESULTS_VARIABLE, "").strip()
    where = _runtime(runtime)
    options = SuiteOptions(
        root=Path.cwd(),
        patterns=tuple(patterns or ()),
        tags=tuple(part.strip() for item in tag or () for part in item.split(",") if part.strip()),
        judge=judge,
        strict=strict,
        results=results or (Path(named) if named else None),
        fresh=fresh,
        concurrency=concurrency or (_cluster_cpus() if where == "ray" else 1),
        runtime=where,
        limits=_limits(requests_per_minute, tokens_per_minute, max_concurrent),
        max_cost_usd=_positive(max_cost_usd, "--max-cost-usd"),
        timeout_ms=_positive(timeout, "--timeout"),
        cassettes=_cassettes(url, record=record, replay=replay, drift=drift),
        target=_target(url, token),
        drift=DriftOptions(drift_usage, drift_text),
        argv=("lousho", *sys.argv[1:]),
    )
    _check_word(patterns or ())
    return run_eval(options, {"json": json, "junit": junit, "markdown": markdown, "html": html, "parquet": parquet})


def _check_word(patterns: Sequence[str]) -> None:
    """Refuses a word that is nearly one of the verbs, before files are looked for by that name."""
    word = patterns[0] if patterns else ""
    if word.isalpha() and not Path(word).exists() and (meant := suggest(word, [*VERBS, "diff"])):
        raise ConfigurationError(f"There is no file, folder or command {word!r}.{meant}", field="patterns")


def run_eval(options: SuiteOptions, reports: dict[str, Path | None]) -> int:
    """Runs a suite with its progress and reports on the terminal; the exit code.

    Ctrl-C cancels what runs, waits for it, writes the reports and gives 130.
    """
    from rich.console import Console

    from lousho_ray.evals.cases import parquet
    from lousho_ray.evals.judges import ALLOW_VARIABLE
    from lousho_ray.evals.reports import check_writable, print_summary, write_report

    wanted = {kind: path for kind, path in reports.items() if path is not None}
    for path in wanted.values():
        check_writable(path)
    if "parquet" in wanted:
        parquet()
    if str(options.root) not in sys.path:
        sys.path.insert(0, str(options.root))  # as `python -m` has it: eval files import the project's own modules
    if options.judge:
        os.environ[ALLOW_VARIABLE] = "1"
    console = Console(soft_wrap=True)
    try:
        outcome = _in_a_loop(_run(options, console))
    finally:
        if options.judge:
            os.environ.pop(ALLOW_VARIABLE, None)
    for kind, path in wanted.items():
        write_report(kind, outcome.summary, path)
    print_summary(outcome.summary, console)
    _say_what_is_left(outcome, wanted.values(), console)
    return outcome.exit_code


def _in_a_loop(suite: Coroutine[Any, Any, Outcome]) -> Outcome:
    """As `asyncio.run()`, which would wait for ever for a task that does not end when it is cancelled, or for its thread."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(suite)
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=LEFT_BEHIND_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.set_exception_handler(lambda _loop, _context: None)  # of tasks that are dropped with the loop; the report names them
        loop.close()


async def _run(options: SuiteOptions, console: Console) -> Outcome:
    from lousho_ray.evals.suite import Suite

    suite = Suite(options, console)
    loop = asyncio.get_running_loop()
    with suppress(ValueError, RuntimeError, NotImplementedError):  # outside the main thread there are no signals
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, suite.stop)
    try:
        return await suite.run()
    finally:
        with suppress(ValueError, RuntimeError, NotImplementedError):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _say_what_is_left(outcome: Outcome, reports: Iterable[Path], console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    summary = outcome.summary
    if summary.halted is not None:
        say(f"\nThe suite was halted: {summary.halted}")
    if not summary.records and not summary.not_run and not summary.load_errors:
        say("No case was selected: the tags left all evals out.")
    say(f"\nResults: {outcome.results}")
    if written := ", ".join(map(str, reports)):
        say(f"Reports: {written}")
    if outcome.interrupted or summary.halted is not None or any(one.outages for one in summary.evals):
        say("What has ended is kept. The same command goes on with the rest:")
        say(f"  {shlex.join(['lousho', *sys.argv[1:]])}")


def _runtime(given: str | None) -> RuntimeName:
    """Where cases run: as asked for, as `LOUSHO_RUNTIME` says, or on the cluster this process belongs to."""
    named = given or os.environ.get("LOUSHO_RUNTIME", "").strip() or ("ray" if os.environ.get("RAY_ADDRESS") else "local")
    return cast("RuntimeName", check_choice(named, "--runtime" if given else "LOUSHO_RUNTIME", ("local", "ray")))


def _cluster_cpus() -> int:
    """CPUs of the cluster, which is joined or started."""
    from lousho_ray.runtime import cluster_size

    return cluster_size()


def _target(url: str | None, token: str | None) -> Any:
    """The deployment to run against."""
    from lousho_ray.evals.remote import remote_target

    return None if url is None else remote_target(url=url, auth=token or os.environ.get(TOKEN_VARIABLE) or None)


def _cassettes(url: str | None, **asked: bool) -> Mode | None:
    """What is done with recordings. In CI, cases that have one are replayed unless something else is asked for."""
    given = [mode for mode, wanted in asked.items() if wanted]
    if len(given) > 1:
        raise ConfigurationError(
            f"--{' and --'.join(given)} exclude each other; keep one.", code="LOUSHO_CONFIG_CONFLICTING_OPTIONS", field=given[1]
        )
    if given and url is not None:
        raise ConfigurationError(
            f"--{given[0]} and --url exclude each other: model calls of a deployment cannot be recorded or replayed here.",
            code="LOUSHO_CONFIG_CONFLICTING_OPTIONS",
            field=given[0],
        )
    if url is not None:
        return None
    return cast("Mode", given[0]) if given else "auto" if os.environ.get("CI") else None


def _diff(files: Sequence[str]) -> int:
    """Compares two results files; 1 when a case that passed does not any more."""
    from rich.console import Console

    from lousho_ray.evals.reports import diff_runs, print_diff
    from lousho_ray.evals.results import read_results

    if len(files) != 2:
        raise ConfigurationError(f"lousho eval diff takes two results files; got {len(files)}.", field="diff")
    for file in files:
        if not Path(file).is_file():
            raise ConfigurationError(f"The results file {file} does not exist.", field="diff")
    runs = [read_results(Path(file)).records.values() for file in files]
    for file, records in zip(files, runs, strict=True):
        if not records:
            raise ConfigurationError(
                f"{file} holds no eval results: name a file that --results wrote, or one below .lousho/evals.", field="diff"
            )
    found = diff_runs(*runs)
    print_diff(found, Console(soft_wrap=True))
    return 1 if found.broken else 0


def _limits(requests: float | None, tokens: float | None, concurrent: int | None) -> dict[str, float]:
    given: dict[str, Any] = {
        "requests_per_minute": _positive(requests, "--requests-per-minute"),
        "tokens_per_minute": _positive(tokens, "--tokens-per-minute"),
        "max_concurrent": _positive(concurrent, "--max-concurrent"),
    }
    return {key: value for key, value in given.items() if value is not None}


def _positive(value: float | None, name: str) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a number above 0; got {value:g}.", field=name)
    return value
