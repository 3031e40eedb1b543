"""Research over a folder: a lead agent reads the list of files, gives each to a sub-agent, and writes a report.

    python research.py                              # a dozen modules of the standard library, offline
    python research.py ~/notes --glob '*.md'        # any folder
    python research.py --model openai/gpt-4o-mini   # a real model; the key comes from the environment
    ray job submit --working-dir examples -- python research.py --out /tmp/report.md

Sub-agents run on the workers of the Ray cluster (a local one unless RAY_ADDRESS is set) and share one rate limiter and one budget.
Every node must see the folder under the same path.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from research_model import research_model
from rich.console import Console

from lousho_ray import ExecutionResult, Limits, create_agent, create_rate_limiter, format_usage, tool
from lousho_ray.progress import RunProgress

STANDARD_LIBRARY = (
    *("argparse", "bisect", "calendar", "configparser", "csv", "dataclasses"),
    *("difflib", "fnmatch", "fractions", "heapq", "statistics", "textwrap"),
)

LEAD = """You lead a small research team. List the files, then give every file to one `reader` with the task tool, all in one turn:
name the file in the prompt and ask what it is for, what it defines and which parts matter most. When the answers are in, write a
report in Markdown: a summary, one section a file, and what the files have in common. Only state what the readers reported."""

READER = """You study one file. Find what it defines with search_text, read its beginning and its most important part with
read_file, then answer with facts: purpose, size, main classes and functions with their lines, and what it imports."""


@dataclass(frozen=True)
class Library:
    """The files under research. `names` limits them; an empty one means all that match `glob`."""

    root: str
    glob: str = "*"
    names: tuple[str, ...] = ()

    def paths(self) -> list[Path]:
        root = Path(self.root)
        found = [root / name for name in self.names] or sorted(path for path in root.rglob("*") if path.is_file())
        return [path for path in found if fnmatch.fnmatch(path.name, self.glob) and not path.name.startswith(".")]

    def lines(self, path: str) -> list[str]:
        target = (Path(self.root) / path).resolve()
        if target not in {known.resolve() for known in self.paths()}:
            raise ValueError(f"{path!r} is not one of the files; list_files shows them")
        return target.read_text("utf-8", errors="replace").splitlines()

    @tool(effect="read")
    def list_files(self) -> list[dict[str, int | str]]:
        """Lists the files under research with their sizes."""
        root = Path(self.root)
        return [
            {"path": str(path.relative_to(root)), "lines": len(self.lines(str(path.relative_to(root))))} for path in self.paths()
        ]

    @tool(effect="read")
    def read_file(self, path: str, start_line: int = 1, lines: int = 80) -> str:
        """Reads a part of a file.

        Args:
            path: A path that list_files showed.
            start_line: The first line, counted from 1.
            lines: How many lines.
        """
        start = max(1, start_line)
        part = self.lines(path)[start - 1 : start - 1 + max(1, min(lines, 400))]
        return "\n".join(f"{start + offset}: {line}" for offset, line in enumerate(part))

    @tool(effect="read")
    def search_text(self, path: str, pattern: str) -> list[str]:
        """Searches a file for a regular expression; at most 200 lines that match, as `line: text`.

        Args:
            path: A path that list_files showed.
            pattern: A Python regular expression.
        """
        found = re.compile(pattern)
        return [f"{number}: {line}" for number, line in enumerate(self.lines(path), 1) if found.search(line)][:200]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="folder of text files (default: a dozen standard-library modules)")
    parser.add_argument("--glob", default="*", help="which files of the folder (default: all)")
    parser.add_argument("--model", default="mock", help="'mock' (offline, default) or 'provider/model'")
    parser.add_argument("--out", default="report.md", help="where the report goes (default: %(default)s)")
    parser.add_argument("--max-concurrent", type=int, default=4, help="model calls in flight at once, over all processes")
    parser.add_argument("--max-cost-usd", type=float, default=1.0, help="budget of the whole run")
    parser.add_argument("--delay-ms", type=float, default=150, help="how long the offline model takes for a reply")
    parser.add_argument("--runtime", choices=("ray", "local"), default=None, help="where sub-agents run (default: ray)")
    return parser.parse_args()


async def main() -> int:
    options = arguments()
    library = choose_files(options)
    if not library.paths():
        print(f"No files match {options.glob!r} in {library.root}.", file=sys.stderr)
        return 2
    model = {"provider": research_model(options.delay_ms)} if options.model == "mock" else {"model": options.model}
    limits = Limits(max_cost_usd=options.max_cost_usd)
    limiter = create_rate_limiter({"max_concurrent": options.max_concurrent}, name="research")
    reader = create_agent(
        name="reader",
        description="Studies one file and reports its facts.",
        instructions=READER,
        tools=[library.read_file, library.search_text],
        runtime=options.runtime,
        **model,
    )
    with RunProgress(limits=limits, limiter=limiter) as progress:
        lead = create_agent(
            name="lead",
            instructions=LEAD,
            tools=[library.list_files],
            subagents={"reader": reader},
            rate_limit=limiter,
            limits=limits,
            on_event=progress,
            runtime=options.runtime,
            **model,
        )
        result = await lead.send(f"Report on the {len(library.paths())} files of {Path(library.root).name}.")
    await lead.close()
    return finish(progress, result, Path(options.out))


def finish(progress: RunProgress, result: ExecutionResult, out: Path) -> int:
    """Prints what each agent spent and writes the report."""
    Console().print(progress.usage_table())
    print(f"Total: {format_usage(result.usage)}")
    if not result.ok:
        print(f"The run ended early: {result.finish_reason} {result.budget or ''}", file=sys.stderr)
        return 1
    out.write_text(result.text + "\n", encoding="utf-8")
    print(f"Report: {out.resolve()} ({len(result.text.splitlines())} lines)")
    return 0


def choose_files(options: argparse.Namespace) -> Library:
    if options.folder:
        return Library(str(Path(options.folder).expanduser().resolve()), options.glob)
    return Library(os.path.dirname(os.__file__), options.glob, tuple(f"{name}.py" for name in STANDARD_LIBRARY))


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        sys.exit("Interrupted: the lead and its readers have stopped.")
