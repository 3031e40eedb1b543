"""What the documents show is true: code runs, commands exist, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^(?:<!-- (?P<comment>.*) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
COMMAND = re.compile(r"make (?P<target>[a-z]+)")

NOT_RUN = """import asyncio
asyncio.run = lambda coroutine: coroutine.close()
"""
"""Put before a block that is not run: its definitions are executed, its calls are not made."""


MAKE_VARIABLES = frozenset({"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "JOBS", "PIP", "PYTHON", "VENV"})


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    language: str
    text: str
    comment: str

    @property
    def id(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text("utf-8")
    return [
        Block(document, text.count("\n", 0, found.start("text")) + 1, found["language"], found["text"], found["comment"] or "")
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
SCRIPTS = [block for block in BLOCKS if block.language == "python"]
RUN = [block for block in SCRIPTS if not block.comment.startswith("not run:")]


def execute(code: str, folder: Path, **environment: str) -> str:
    """Runs a block in a process and folder of its own; what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.id)
def test_code_of_the_documents_runs(block: Block, tmp_path: Path) -> None:
    execute(block.text, tmp_path, LOUSHO_RUNTIME="local")


@pytest.mark.parametrize("block", [block for block in SCRIPTS if block not in RUN], ids=lambda block: block.id)
def test_code_that_needs_a_key_is_accepted_as_far_as_it_goes_without(block: Block, tmp_path: Path) -> None:
    keys = {"OPENAI_API_KEY": "sk-none", "ANTHROPIC_API_KEY": "sk-ant-none"}
    execute(NOT_RUN + block.text, tmp_path, LOUSHO_RUNTIME="local", **keys)


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_the_first_example_of_the_readme_runs_on_ray(tmp_path: Path) -> None:
    first = next(block for block in RUN if block.document.name == "README.md")
    printed = execute(first.text, tmp_path, LOUSHO_RUNTIME="ray").splitlines()
    assert printed[0] == "run.start"
    assert "tool.done" in printed
    assert printed[-1] == "Yes, until the evening. stop 6"


def test_every_block_is_found_and_says_what_language_it_is_in() -> None:
    fences = sum(len(re.findall("```", document.read_text("utf-8"))) for document in DOCUMENTS)
    assert fences == 2 * len(BLOCKS)
    assert {block.id: block.language for block in BLOCKS if block.language not in ("python", "sh", "json", "text")} == {}


def test_json_of_the_documents_is_valid() -> None:
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.text)


def test_the_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = {
        (document.name, found["target"])
        for document in DOCUMENTS
        for code in (*re.findall(r"`([^`\n]+)`", document.read_text("utf-8")), *(block.text for block in blocks_of(document)))
        for found in COMMAND.finditer(code)
    }
    assert named
    assert {(name, target) for name, target in named if target not in targets} == set()


def test_check_is_lint_types_floors_and_exactly_the_tests_of_make_test() -> None:
    def commands(target: str) -> list[str]:
        # Without what a `make test ARGS=...` around this test hands down.
        own = {name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES}
        command = ["make", "--dry-run", "--no-print-directory", target]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=30, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith(".venv/bin/") and " install " not in line]

    tests = [line for line in commands("test") if "pytest" in line]
    assert [line.removeprefix(".venv/bin/") for line in tests] == ['python -m pytest -m "not slow" -n 2 tests']
    check = commands("check")
    assert [line for line in check if "pytest" in line] == tests
    tools = [line.removeprefix(".venv/bin/").split()[0] for line in check if "pytest" not in line]
    assert tools == ["ruff", "ruff", "mypy", "pyright", "lint-imports"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make check" in (ROOT / ".ci" / "run").read_text("utf-8")


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    broken = []
    for found in LINK.finditer(document.read_text("utf-8")):
        path, _, anchor = found["target"].partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(found["target"])
    assert broken == []
