"""A suite from its options to its summary: what `lousho eval` does, as a function."""

from __future__ import annotations

import asyncio
import importlib
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lousho_ray.clock import SYSTEM_CLOCK, timestamp
from lousho_ray.errors import StorageError
from lousho_ray.evals.cassettes import Mode, SuiteCassettes
from lousho_ray.evals.control import Board, FileBoard, Steering
from lousho_ray.evals.drift import DriftOptions
from lousho_ray.evals.hosting import HostSetup, case_files
from lousho_ray.evals.interceptor import SuiteBudget
from lousho_ray.evals.loading import Plan, PlannedCase, find_files, plan_suite
from lousho_ray.evals.progress import ProgressDisplay, SuiteProgress
from lousho_ray.evals.records import Ended
from lousho_ray.evals.results import VERSION, Results, ResultsWriter, read_results
from lousho_ray.evals.runner import KEPT_AS_RUNS, CaseSettings, Executor, LocalExecutor, SuiteRunner
from lousho_ray.evals.summary import Summary, summarize
from lousho_ray.garbage import runs_in_progress
from lousho_ray.ids import new_id
from lousho_ray.limits.budget import LocalLedger
from lousho_ray.limits.limiter import create_rate_limiter

if TYPE_CHECKING:
    from rich.console import Console

RESULTS_FOLDER = Path(".lousho", "evals")
NAMED_LINES = 10
"""How many damaged lines of a results file are named."""


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """The options of a suite, checked. `results` is the file to append to; by default one below `.lousho/evals`.

    `fresh` runs finished cases again. `limits` are those of the suite's one limiter; `timeout_ms` bounds a case that has no limit
    of its own.
    """

    root: Path
    patterns: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    judge: bool = False
    strict: bool = False
    results: Path | None = None
    fresh: bool = False
    concurrency: int = 1
    limits: dict[str, float] = field(default_factory=dict)
    max_cost_usd: float | None = None
    timeout_ms: float | None = None
    cassettes: Mode | None = None
    drift: DriftOptions = field(default_factory=DriftOptions)
    argv: tuple[str, ...] = ("lousho", "eval")
    target: Any = None
    runtime: Literal["local", "ray"] = "local"

    @property
    def command(self) -> dict[str, Any]:
        """What makes two calls the same command: what is run, not how fast or where reports go."""
        return {
            "patterns": list(self.patterns),
            "tags": list(self.tags),
            "judge": self.judge,
            "cassettes": self.cassettes,
            "url": getattr(self.target, "url", None),
        }

    @property
    def salt(self) -> str:
        """What makes results of the same case other results."""
        return f"{self.cassettes or ''}{getattr(self.target, 'url', None) or ''}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a suite ended. `interrupted`: it was stopped from outside; the rest runs when the same command is given again."""

    summary: Summary
    results: Path
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        return 130 if self.interrupted else self.summary.exit_code


class Suite:
    """One run of a suite. `runner` is there while it runs, for whoever wants to pause, retune or stop it."""

    def __init__(self, options: SuiteOptions, console: Console) -> None:
        self.options = options
        self.runner: SuiteRunner | None = None
        self.on_start: Callable[[SuiteRunner], object] = lambda runner: None
        self._console = console
        self._stopped = False
        self._cassettes: SuiteCassettes | None = None
        self.limiter = create_rate_limiter(options.limits, suite_limiter_name()) if options.limits else None

    def stop(self) -> None:
        """Cancels what runs, keeps what has ended."""
        self._stopped = True
        if self.runner is not None:
            self.runner.stop()

    async def run(self) -> Outcome:
        """Runs what is missing of the suite and summarises all of it.

        Raises:
            LoushoError: `LOUSHO_EVALS_INVALID`: no file matches.
            StorageError: The results file cannot be written, or another run writes it.
        """
        options = self.options
        async with AsyncExitStack() as stack:
            stack.enter_context(runs_in_progress.besides(KEPT_AS_RUNS))
            if options.cassettes is not None:
                self._cassettes = stack.enter_context(SuiteCassettes(options.cassettes, options.drift, options.argv))
            files = find_files(options.patterns, options.root, judge=options.judge)
            plan = await plan_suite(files, options.root, options.tags, salt=options.salt)
            if self._cassettes is not None:
                self._cassettes.check(plan.cases)
            path = options.results or unfinished_results(options) or new_results(options.root)
            writer = await stack.enter_async_context(ResultsWriter(path))
            results = Results() if options.fresh else read_results(path)
            if results.damaged:
                lines = ", ".join(map(str, results.damaged[:NAMED_LINES])) + (", ..." if len(results.damaged) > NAMED_LINES else "")
                self._say(f"{path} is damaged: what was in line {lines} cannot be read; cases without a result run again.")
            fresh = options.fresh or (results.ended and options.cassettes in ("record", "drift"))
            if fresh:
                results = Results()
            await self._run(plan, results, writer, fresh=fresh)
            summary = self._summary(plan, results)
        return Outcome(summary, path, self._stopped)

    def _summary(self, plan: Plan, results: Results) -> Summary:
        keys = {case.key for case in plan.cases}
        records = [record for key, record in results.records.items() if key in keys]
        runner = self.runner
        return summarize(
            records,
            plan.thresholds,
            not_run=len(keys) - len(records),
            skipped=plan.skipped,
            strict=self.options.strict,
            halted=None if runner is None else runner.halted,
            load_errors=plan.load_errors,
        )

    async def _run(self, plan: Plan, results: Results, writer: ResultsWriter, *, fresh: bool) -> None:
        done = results.finished(case.key for case in plan.cases)
        pending = [case for case in plan.cases if case.key not in done]
        progress = SuiteProgress(len(plan.cases), earlier=len(done))
        if done:
            self._say(f"{len(done):,} of {len(plan.cases):,} cases have their results in {writer.path}; --fresh runs them again.")
        if not pending:
            return
        started = timestamp(SYSTEM_CLOCK.wall())
        writer.write(
            {
                "type": "suite",
                "version": VERSION,
                "startedAt": started,
                "fresh": fresh,
                "command": self.options.command,
            }
        )
        executor = await self._executor(plan, pending, results)
        display = ProgressDisplay(progress, self._console)

        def keep(ended: Ended) -> None:
            writer.write_line(ended.line)
            results.take(ended.record)
            display.ended(ended.record)

        runner = self.runner = SuiteRunner(pending, executor, self.options.concurrency, keep, progress)
        executor.on_halt = runner.halt
        self.on_start(runner)
        if self._stopped:
            return
        steering = await self._steering(runner, executor, writer.path)
        task = asyncio.create_task(steering.run())
        try:
            async with display:
                await runner.run()
        finally:
            task.cancel()
            await asyncio.wait({task})
            await steering.close()
            await executor.close()
        if not runner.left and runner.halted is None and not self._stopped:
            writer.write({"type": "end", "endedAt": timestamp(SYSTEM_CLOCK.wall())})

    async def _steering(self, runner: SuiteRunner, executor: Executor, results: Path) -> Steering:
        suite_id = secrets.token_hex(4)
        boards: list[Board] = []
        try:
            boards.append(FileBoard(running_folder(self.options.root), suite_id))
        except OSError as error:  # a project that is read only runs all the same
            self._say(f"`lousho eval status` and the like do not reach this run: {error}.")
        if self.options.runtime == "ray":
            boards.append(await _runtime().eval_board(suite_id))

        def describe() -> dict[str, Any]:
            about = {"id": suite_id, "results": str(results), "concurrency": runner.concurrency}
            return {**about, "halted": runner.halted, **runner.progress.to_dict()}

        retune, use_limiter = runner.retune, executor.use_limiter
        return Steering(boards, describe, runner.pause, runner.resume, self.stop, retune, use_limiter, self.options.limits)

    async def _executor(self, plan: Plan, pending: Sequence[PlannedCase], results: Results) -> Executor:
        options = self.options
        if options.runtime == "ray":
            setup = HostSetup(
                root=str(options.root),
                files=case_files(pending, plan.versions),
                limiter=self.limiter,
                budget=None if options.max_cost_usd is None else (new_id("suite-"), options.max_cost_usd),
                timeout_ms=options.timeout_ms,
                target=options.target,
                cassettes=options.cassettes,
                drift=options.drift,
                argv=options.argv,
                judge=options.judge,
            )
            made: Executor = await _runtime().eval_executor(setup, results.spent, most=min(options.concurrency, len(pending)))
            return made
        budget = None
        if options.max_cost_usd is not None:
            budget = SuiteBudget(LocalLedger(), "suite", options.max_cost_usd)
            await budget.open(results.spent)
        return LocalExecutor(CaseSettings(self.limiter, budget, options.timeout_ms, options.target, self._cassettes))

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _runtime() -> Any:
    """Imported by name: the composition of what runs on a cluster lies above this module."""
    return importlib.import_module("lousho_ray.runtime")


def running_folder(root: Path) -> Path:
    """Where running suites of a project show their status."""
    return root / RESULTS_FOLDER / "running"


def suite_limiter_name() -> str:
    """A name of its own for the limiter of a suite: on a cluster all workers reach it by that."""
    return f"lousho-eval-{secrets.token_hex(6)}"


def unfinished_results(options: SuiteOptions) -> Path | None:
    """The newest results file of the same command, when that run did not end."""
    folder = options.root / RESULTS_FOLDER
    if options.fresh or not folder.is_dir():
        return None
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        try:
            results = read_results(path)
        except StorageError:  # of a newer version: not this one's to go on with
            continue
        if results.suite.get("command") == options.command:
            return None if results.ended else path
    return None


def new_results(root: Path) -> Path:
    """A results file of its own; names sort by time."""
    return root / RESULTS_FOLDER / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.jsonl"
