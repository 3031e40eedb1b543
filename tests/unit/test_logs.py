"""Log records: without keys, and nothing but records."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.logs import LOGGERS

ROOT = Path(__file__).parents[2]
KEY = "opaque+value/of+a+gateway"
SHAPED = "sk-abcdefghijklmnop1234"


def modules() -> list[Path]:
    paths = {path.resolve() for folder in ("lousho_ray", "actors", "stores") for path in (ROOT / folder).rglob("*.py")}
    return sorted(paths)


def calls(name: str) -> list[tuple[Path, ast.Call]]:
    """The calls of a function or method of that name, and the files they stand in."""
    texts = [(path, path.read_text("utf-8")) for path in modules()]
    found = [(path, node) for path, text in texts if f"{name}(" in text for node in ast.walk(ast.parse(text))]
    return [
        (path, node) for path, node in found if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    ]


def logger_name(path: Path, call: ast.Call) -> str:
    match call.args:
        case [ast.Constant(value=str(name))]:
            return name
        case [ast.Name(id="__name__")]:
            module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            return module if module.startswith("lousho_ray") else f"lousho_ray.{module}"
    return ""


def test_the_filter_is_on_every_logger_of_the_package() -> None:
    # OBS-38
    used = {logger_name(path, call) for path, call in calls("getLogger")} - {""}
    assert used == set(LOGGERS)
    assert all(name == "lousho_ray" or name.startswith("lousho_ray.") for name in used)
    assert [name for name in LOGGERS if len(logging.getLogger(name).filters) != 1] == []


def test_the_package_adds_no_handler_and_sets_no_level() -> None:
    # OBS-37
    for name in ("addHandler", "basicConfig", "setLevel", "captureWarnings"):
        assert [path.name for path, _ in calls(name)] == []
    code = """
import logging
from lousho_ray import MockProvider, create_agent
create_agent(provider=MockProvider(), runtime="local").send_sync("Hi.")
names = [name for name in logging.root.manager.loggerDict if name.startswith("lousho_ray")]
assert names
for logger in map(logging.getLogger, names):
    assert not logger.handlers and logger.level == logging.NOTSET and logger.propagate, logger
assert not logging.root.handlers
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_the_command_line_prints() -> None:
    # OBS-37; what a console of the caller's shows, such as a progress display, was asked for
    printing = {path.relative_to(ROOT).as_posix() for path, call in calls("print") if isinstance(call.func, ast.Name)}
    assert [name for name in printing if not name.startswith("lousho_ray/cli/")] == []


@pytest.mark.parametrize("name", LOGGERS)
def test_keys_are_masked_in_every_record(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # OBS-38
    monkeypatch.setenv("MY_GATEWAY_API_KEY", KEY)
    with caplog.at_level(logging.DEBUG, name):
        logging.getLogger(name).debug("%s and %r of %d", KEY, {"key": SHAPED}, 3)
    assert caplog.messages == ["*** and {'key': '***'} of 3"]


def test_keys_are_masked_in_tracebacks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # OBS-38
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", KEY)
    try:
        try:
            raise ValueError(f"no access with {SHAPED}")
        except ValueError as cause:
            raise RuntimeError(f"refused: {KEY}") from cause
    except RuntimeError:
        logging.getLogger("lousho_ray").exception("It failed.")
    assert KEY not in caplog.text
    assert SHAPED not in caplog.text
    assert "RuntimeError: refused: ***" in caplog.text
    assert "ValueError: no access with ***" in caplog.text
    assert "Traceback" in caplog.text
    assert caplog.records[0].exc_info is None, "a handler of another kind would print the exception itself"


def test_a_record_without_keys_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OPENAI_COMPATIBLE_API_KEY", "none")  # too short to be told from a word
    error = ValueError("no luck")
    logging.getLogger("lousho_ray").warning("There is %s of %s.", "none", error, exc_info=error)
    (record,) = caplog.records
    assert record.args == ("none", error)
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_a_message_that_does_not_fit_its_arguments_is_left_to_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    odd: Any = logging.LogRecord("lousho_ray", logging.WARNING, __file__, 1, "%d", ("x",), None)
    assert logging.getLogger("lousho_ray").filter(odd)


def test_of_two_keys_the_longer_one_is_masked_whole(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # OBS-38
    monkeypatch.setenv("A_API_KEY", "12345678")
    monkeypatch.setenv("B_API_KEY", "12345678-and-more")
    logging.getLogger("lousho_ray").warning("key 12345678-and-more")
    assert caplog.messages == ["key ***"]
