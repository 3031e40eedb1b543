"""The cassettes of a suite: where each case has its own, and what is done with them (`--record`, `--replay`, `--drift`, CI)."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lousho_ray.errors import CassetteError
from lousho_ray.evals.cases import check_slugs, slug
from lousho_ray.evals.context import Assertion, EvalContext
from lousho_ray.evals.drift import DriftOptions, drift_rows
from lousho_ray.evals.judges import JudgeProvider
from lousho_ray.evals.loading import PlannedCase
from lousho_ray.ports import LLMProvider
from lousho_ray.providers.base import HTTPProvider
from lousho_ray.providers.resolve import CASSETTE_VARIABLE
from lousho_ray.testing.cassettes import Player, Recorder, record_replay

FOLDER = "__cassettes__"
Mode = Literal["record", "replay", "drift", "auto"]


class SuiteCassettes:
    """What a suite does with cassettes. `auto` replays the cases that have one and runs the others live.

    Args:
        command: The command line of this run, from which the one that records a case is made.
    """

    def __init__(self, mode: Mode, drift: DriftOptions | None = None, command: Sequence[str] = ("lousho", "eval")) -> None:
        self.mode = mode
        self._drift = drift or DriftOptions()
        self._command = list(command)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> SuiteCassettes:
        """Providers whose key is missing can be made while answers are replayed."""
        self._before = os.environ.get(CASSETTE_VARIABLE)
        if self.mode in ("replay", "auto"):
            os.environ[CASSETTE_VARIABLE] = self.mode
        if self.mode == "drift":
            self._scratch = tempfile.TemporaryDirectory(prefix="lousho-drift-")
        return self

    def __exit__(self, *exc: object) -> None:
        if self.mode in ("replay", "auto"):
            os.environ.pop(CASSETTE_VARIABLE, None)
            if self._before is not None:
                os.environ[CASSETTE_VARIABLE] = self._before
        if self._scratch is not None:
            self._scratch.cleanup()

    def check(self, cases: Sequence[PlannedCase]) -> None:
        """Refuses names that would share a file.

        Raises:
            LoushoError: `LOUSHO_EVALS_INVALID`.
        """
        by_eval: dict[str, list[str]] = {}
        for planned in cases:
            by_eval.setdefault(planned.definition.name, []).append(planned.case.name)
        check_slugs("The evals", by_eval)
        for name, names in by_eval.items():
            check_slugs(f"The cases of eval {name!r}:", names)

    def of(self, planned: PlannedCase) -> CaseTape | None:
        """The cassettes of a case; `None` where it runs live."""
        path = self.path_of(planned)
        if self.mode == "auto" and not path.exists():
            return None
        mode: Literal["record", "replay"] = "record" if self.mode in ("record", "drift") else "replay"
        committed = path
        if self._scratch is not None:
            path = Path(self._scratch.name, planned.key, path.name)
        return CaseTape(
            planned, path, mode, self._hint(planned, committed), committed, self._drift if self.mode == "drift" else None
        )

    @staticmethod
    def path_of(planned: PlannedCase) -> Path:
        """`__cassettes__/<eval>/<case>.json` beside the eval file."""
        file = planned.definition.file or Path.cwd() / planned.file
        name = slug(planned.case.name) + (f".repeat-{planned.repeat + 1}" if planned.repeat else "")
        return file.parent / FOLDER / slug(planned.definition.name) / f"{name}.json"

    def _hint(self, planned: PlannedCase, path: Path) -> str:
        options = [part for part in self._command if part not in ("--record", "--replay", "--drift")]
        missing = "" if path.exists() else f"Eval {planned.definition.name!r}, case {planned.case.name!r} has no recording. "
        return f"{missing}Record it with: {shlex.join([*options, '--record'])}"


@dataclass(slots=True)
class CaseTape:
    """The cassettes of one case: the first provider that is called has `<case>.json`, the next `<case>.2.json`, and so on."""

    planned: PlannedCase
    path: Path
    mode: Literal["record", "replay"]
    hint: str
    committed: Path
    drift_options: DriftOptions | None = None
    drift: list[dict[str, Any]] = field(default_factory=list)
    _wrapped: list[Recorder | Player] = field(default_factory=list)

    @property
    def replays(self) -> bool:
        return self.mode == "replay"

    def wrap(self, provider: LLMProvider) -> LLMProvider:
        """The provider that records or replays; a judge's is neither recorded nor, in a replay, really asked.

        Raises:
            CassetteError: `LOUSHO_CASSETTE_INVALID`: there is no recording, or it cannot be read.
        """
        if isinstance(provider, JudgeProvider):
            if self.replays and _is_real(provider):
                raise CassetteError(
                    f"Eval {self.planned.definition.name!r} asks a real judge: judges are not recorded, and a replay calls no "
                    "model. Grade in a file that ends in .judge.eval.py, with `lousho eval --judge`.",
                    path=str(self.committed),
                )
            return provider
        if self.mode == "record" and not self._wrapped:
            self._forget_earlier()
        path = numbered(self.path, len(self._wrapped) + 1)
        self._wrapped.append(record_replay(provider, cassette=path, mode=self.mode, hint=self.hint))
        return self._wrapped[-1]

    def close(self) -> None:
        """Ends the recordings. Their files are complete after every call."""
        for wrapped in self._wrapped:
            wrapped.close()

    async def review(self, context: EvalContext) -> None:
        """Compares what the case did now with its committed recording. A case without one is missing, which is no drift."""
        if self.drift_options is None:
            return
        if not self.committed.exists():
            self.drift = [{"field": "cassette", "committed": "missing", "current": "recorded"}]
            return
        self.drift = drift_rows(self.committed, self.path, self.drift_options)
        changed = ", ".join(str(row["field"]) for row in self.drift)
        context.assertions.append(
            Assertion("drift", "soft", not self.drift, 0.0 if self.drift else 1.0, message=changed and f"changed: {changed}")
        )

    def _forget_earlier(self) -> None:
        """Recordings of providers that the case no longer calls would be replayed by nobody."""
        number = 2
        while (path := numbered(self.path, number)).exists():
            path.unlink()
            number += 1


def numbered(path: Path, number: int) -> Path:
    """The cassette of a case's nth provider."""
    return path if number == 1 else path.with_name(f"{path.stem}.{number}.json")


def _is_real(provider: LLMProvider) -> bool:
    layer: Any = provider
    while layer is not None:
        if isinstance(layer, HTTPProvider):
            return True
        layer = getattr(layer, "__dict__", {}).get("inner")
    return False
