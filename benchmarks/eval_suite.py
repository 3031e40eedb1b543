"""A suite of evals as `lousho eval` runs it: so many samples of one model call each, results on disk, a summary in the end."""

from __future__ import annotations

import io
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Literal

from rich.console import Console

from lousho_ray.evals.suite import Suite, SuiteOptions

FILE = """
from lousho_ray import OpenAIProvider, create_agent
from lousho_ray.evals import define_eval, equals

provider = OpenAIProvider(base_url={url!r}, api_key="k", default_model="bench", api="chat")
agent = create_agent(provider=provider, instructions="Answer.")

async def test(t, case):
    await t.send(case["input"])
    t.check("exact", t.reply, equals("turn 1"))

define_eval(name="samples", agent=agent, test=test, cases=[{{"label": str(n), "input": {question!r}}} for n in range({samples})])
"""


class EvalSuite:
    """A suite to be run again and again.

    Attributes:
        ends: When each sample of the last run ended, in seconds since the epoch.
    """

    def __init__(self, text: str, samples: int, concurrency: int, runtime: Literal["local", "ray"]) -> None:
        self.ends: list[float] = []
        self._text = text
        self._samples = samples
        self._options = {"concurrency": concurrency, "runtime": runtime}

    async def __call__(self) -> int:
        """Runs the suite and gives the number of its samples."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "samples.eval.py").write_text(self._text)
            options = SuiteOptions(root=folder, results=folder / "results.jsonl", **self._options)  # type: ignore[arg-type]
            outcome = await Suite(options, Console(file=io.StringIO())).run()
        summary = outcome.summary
        assert summary.totals()["passed"] == self._samples
        self.ends = [datetime.fromisoformat(each.started_at).timestamp() + each.duration_ms / 1000 for each in summary.records]
        return self._samples


def suite(url: str, question: str, samples: int, concurrency: int, runtime: Literal["local", "ray"] = "local") -> EvalSuite:
    """A suite of so many samples of one question, so many at once."""
    return EvalSuite(FILE.format(url=url, question=question, samples=samples), samples, concurrency, runtime)
