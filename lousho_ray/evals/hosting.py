"""The side of a suite that runs cases in another process: what it is told, and the cases it is handed. Plain classes, no Ray."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lousho_ray.errors import ConfigurationError
from lousho_ray.evals.cases import Case
from lousho_ray.evals.cassettes import Mode, SuiteCassettes
from lousho_ray.evals.definition import EvalDefinition
from lousho_ray.evals.drift import DriftOptions
from lousho_ray.evals.interceptor import SuiteBudget
from lousho_ray.evals.judges import ALLOW_VARIABLE
from lousho_ray.evals.loading import PlannedCase, load_file
from lousho_ray.evals.records import Ended
from lousho_ray.evals.runner import KEPT_AS_RUNS, CaseSettings, LocalExecutor
from lousho_ray.garbage import runs_in_progress
from lousho_ray.limits.budget import Ledger
from lousho_ray.limits.limiter import RateLimiter
from lousho_ray.spans import SpanRecord


@dataclass(frozen=True, slots=True)
class HostSetup:
    """What a host of cases is told once. `files` are `(name, version)`; `root` is the project's folder where the suite was started.

    `budget` is `(run id, USD)`; the ledger is the host's own client of the suite's.
    """

    root: str
    files: tuple[tuple[str, str], ...]
    limiter: RateLimiter | None = None
    budget: tuple[str, float] | None = None
    timeout_ms: float | None = None
    target: Any = None
    cassettes: Mode | None = None
    drift: DriftOptions | None = None
    argv: tuple[str, ...] = ()
    judge: bool = False


class ShippedCase(NamedTuple):
    """A case on its way: its eval by name, since both sides have loaded the same files; its value as a pickle of its own, so that
    one that cannot be read is no trouble of the others."""

    eval: str
    case: str
    value: bytes
    repeat: int
    key: str
    file: str

    @classmethod
    def of(cls, planned: PlannedCase, dumps: Callable[[Any], bytes] = pickle.dumps) -> ShippedCase:
        case = planned.case
        return cls(planned.definition.name, case.name, dumps(case.value), planned.repeat, planned.key, planned.file)


class CaseHost:
    """Runs the cases it is handed in this process.

    Raises:
        ConfigurationError: An eval file is not here, or is not the one that the suite was started with.
    """

    def __init__(
        self,
        setup: HostSetup,
        ledger: Callable[[], Ledger],
        on_halt: Callable[[str], object],
        share: Callable[[RateLimiter], Awaitable[None]] | None = None,
    ) -> None:
        root = _root(setup)
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
        os.environ["LOUSHO_RUNTIME"] = "local"  # agents of eval files: only what runs in this process passes the seam
        if setup.judge:
            os.environ[ALLOW_VARIABLE] = "1"
        self._cassettes = None
        if setup.cassettes is not None:
            self._cassettes = SuiteCassettes(setup.cassettes, setup.drift, setup.argv).__enter__()
        self._evals = _evals(setup, root)
        budget = None if setup.budget is None else SuiteBudget(ledger(), *setup.budget)
        self.settings = CaseSettings(
            limiter=setup.limiter,
            budget=budget,
            timeout_ms=setup.timeout_ms,
            target=setup.target,
            cassettes=self._cassettes,
            share=share,
        )
        self._executor = LocalExecutor(self.settings, on_halt)
        self._undo = ExitStack()
        self._undo.enter_context(runs_in_progress.besides(KEPT_AS_RUNS))

    async def run(self, shipped: ShippedCase, send_span: Callable[[SpanRecord], None] | None = None) -> Ended:
        """Runs a case to its record. Cancelling it stops the case and still gives its record."""
        definition = self._evals[shipped.eval]
        case = Case(shipped.case, pickle.loads(shipped.value))
        return await self._executor.run(PlannedCase(definition, case, shipped.repeat, shipped.key, shipped.file), send_span)

    async def close(self) -> None:
        self._undo.close()
        await self._executor.close()
        if self._cassettes is not None:
            self._cassettes.__exit__()


def _root(setup: HostSetup) -> Path:
    """The project's folder in this process: the same one where that is there, else the working directory."""
    given = Path(setup.root)
    return given if all((given / name).is_file() for name, _ in setup.files) else Path.cwd()


def _evals(setup: HostSetup, root: Path) -> dict[str, EvalDefinition]:
    found: dict[str, EvalDefinition] = {}
    for name, version in setup.files:
        if not (root / name).is_file():
            raise ConfigurationError(
                f"The eval file {name} is not below {root} on this node. Submit the project along with the job: "
                "ray job submit --working-dir . -- lousho eval ...",
                field="patterns",
            )
        file = load_file(root / name, root)
        if file.version != version:
            raise ConfigurationError(
                f"The eval file {name} changed while the suite ran: a worker found another text than the suite began with.",
                field="patterns",
            )
        found.update({definition.name: definition for definition in file.evals})
    return found


def case_files(planned: Sequence[PlannedCase], versions: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The files that cases come from, with their versions."""
    return tuple((name, versions[name]) for name in dict.fromkeys(case.file for case in planned))
