"""A suite of evals as `lousho eval` runs it: so many samples of one model call each, results on disk, a summary in the end."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Awaitable, Callable
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


def suite(
    url: str, question: str, samples: int, concurrency: int, runtime: Literal["local", "ray"] = "local"
) -> Callable[[], Awaitable[int]]:
    """Runs the suite and gives the number of its samples."""

    async def run() -> int:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "samples.eval.py").write_text(FILE.format(url=url, question=question, samples=samples))
            options = SuiteOptions(root=folder, concurrency=concurrency, results=folder / "results.jsonl", runtime=runtime)
            outcome = await Suite(options, Console(file=io.StringIO())).run()
        assert outcome.summary.totals()["passed"] == samples
        return samples

    return run
