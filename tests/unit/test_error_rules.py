"""Rules about errors that hold for all of the package's source."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lousho_ray
from lousho_ray.errors import ERROR_CODES

PACKAGE = Path(lousho_ray.__file__).parent

EXEMPT: dict[tuple[str, str], str] = {
    ("errors.py", "LookupError"): "a mistake in the package itself, seen only in its tests",
    ("actors/__init__.py", "ImportError"): "refuses a second import name",
    ("stores/__init__.py", "ImportError"): "refuses a second import name",
    ("providers/transcript.py", "ValueError"): "a hook of the JSON parser, caught where it is called",
    ("providers/transcript.py", "TypeError"): "a hook of the JSON writer, which turns it into its own error",
    ("messages.py", "ValueError"): "a record that cannot be read: stores and inputs name the record",
    ("stores/json_form.py", "ValueError"): "a record that cannot be read: its one reader names the record in an error of ours",
    ("stores/json_form.py", "TypeError"): "a record that cannot be read: its one reader names the record in an error of ours",
    ("trace_files.py", "OSError"): "a disk that is full: caught where the line is written, and warned of once",
    ("loop/output.py", "ValueError"): "a hook of the JSON parser, and what reading a reply tells its one caller",
    ("actors/budget_client.py", "TypeError"): "what the pickle protocol asks of an object that cannot be pickled",
    ("actors/calling.py", "ConnectionError"): "tells the retries of the same call that the actor is out of reach",
    ("tools/schema.py", "ValueError"): "a hook of the JSON parser, caught where it is called",
    ("tools/exchange_program.py", "OSError"): "a program of its own inside a sandbox, without this package",
    ("tools/workspace/launcher.py", "OSError"): "a program of its own that starts a sandbox, without this package",
    ("tools/workspace/broker.py", "TypeError"): "what the pickle protocol asks of an object that cannot be pickled",
}
"""Places that may raise a built-in exception, with the reason."""

EXEMPT_FOLDER = "testing/"
"""What tests use: there a wrong call is a mistake in the test."""

PERMITTED = frozenset(
    {"StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyError", "IndexError", "AttributeError", "NotImplementedError"}
    | {"AssertionError"}
)
"""What Python's own protocols ask for, and `AssertionError` at places that cannot be reached."""


@cache
def _trees() -> tuple[tuple[str, ast.Module], ...]:
    folders = (PACKAGE, PACKAGE / "actors", PACKAGE / "stores")
    files = sorted({path for folder in folders for path in folder.rglob("*.py")})
    return tuple((path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())) for path in files)


def _codes(tree: ast.Module) -> Iterator[str]:
    """Every whole string that looks like a code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("LOUSHO_"):
            yield node.value


def _raised_built_ins(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        raised = node.exc if isinstance(node, ast.Raise) else None
        raised = raised.func if isinstance(raised, ast.Call) else raised
        kind = getattr(builtins, raised.id, None) if isinstance(raised, ast.Name) else None
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__name__ not in PERMITTED:
            yield kind.__name__


ENVIRONMENT = dict.fromkeys(
    f"LOUSHO_{name}"
    for name in (
        *("MODEL", "RUNTIME", "DEBUG", "STORE", "API_TOKEN", "TOKEN_KEY", "RECORD", "REGISTRY"),
        *("EVAL_CASSETTES", "EVAL_RESULTS", "EVAL_TOKEN", "ALLOW_LLM_JUDGE", "BROKER", "COMMAND_ID"),
    )
)
"""Names of environment variables, which look like codes."""


def test_every_code_used_in_the_source_is_in_the_table() -> None:
    # ERR-04, ERR-05
    used = {(code, name) for name, tree in _trees() for code in _codes(tree)}
    assert {(code, name) for code, name in used if code not in ERROR_CODES | ENVIRONMENT} == set()


def test_the_codes_kept_free_are_not_used() -> None:
    # ERR-28
    used = {code for _, tree in _trees() for code in _codes(tree)}
    assert used.isdisjoint({"LOUSHO_CHANNEL_INVALID", "LOUSHO_CHANNEL_REQUEST_FAILED"})


def test_package_code_raises_no_bare_built_in_exception() -> None:
    # ERR-04
    found = {(name, kind) for name, tree in _trees() if not name.startswith(EXEMPT_FOLDER) for kind in _raised_built_ins(tree)}
    assert found == set(EXEMPT)
