"""The console script: parsing that all commands share, and how errors reach the terminal.

Every command is also a function that returns its exit code and never calls `sys.exit`.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from lousho_ray.cli import eval_command
from lousho_ray.cli.config import config_file, read_defaults
from lousho_ray.errors import ERROR_CODES, LoushoError, mask_secrets, suggest

DEBUG_VARIABLE = "LOUSHO_DEBUG"
COULD_NOT_RUN = {"eval": 2}
"""Exit codes of commands that did not come to run; 1 for every other one."""

app = typer.Typer(
    name="lousho",
    help="Agents, evals and sessions on Ray.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
eval_command.register(app)


@app.command("version")
def version() -> None:
    """Prints the version."""
    from lousho_ray import __version__

    typer.echo(__version__)


@app.command("help")
def overview() -> None:
    """Prints the commands."""
    typer.echo(typer.main.get_command(app).get_help(_context()))


def main() -> None:
    """The entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text of a model that the terminal has no bytes for must not end a command
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run_lousho(sys.argv[1:]))


def run_lousho(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    arguments = list(argv)
    command = typer.main.get_command(app)
    names = sorted(getattr(command, "commands", {}))
    first = arguments[0] if arguments else ""
    if not first or (not first.startswith("-") and first not in names):
        return _unknown(first, names, command.get_help(_context()))
    failed = COULD_NOT_RUN.get(first, 1)
    try:
        defaults = _defaults(command, first, arguments)
        code = command.main(arguments, prog_name="lousho", standalone_mode=False, default_map=defaults)
    except typer.TyperException as error:
        return _usage_error(error, failed)
    except typer.Abort:
        return 130
    except LoushoError as error:
        return _fail(error, failed)
    return code if isinstance(code, int) else 0


def _defaults(command: Any, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The defaults that the file of `--config` gives to a command that has that option."""
    path = config_file(arguments)
    known = {option.name for option in getattr(command.commands.get(name), "params", ())}
    if path is None or "config" not in known:
        return {}
    return {name: read_defaults(path, known - {"config", "patterns"})}


def _context() -> typer.Context:
    return typer.Context(typer.main.get_command(app), info_name="lousho")


def _unknown(name: str, names: Sequence[str], help_text: str) -> int:
    if name:
        print(f"Error: There is no command {name!r}.{suggest(name, names)}", file=sys.stderr)  # noqa: T201
    print(help_text, file=sys.stderr)  # noqa: T201
    return 1


def _usage_error(error: typer.TyperException, code: int) -> int:
    context = getattr(error, "ctx", None)
    usage = "" if context is None else " ".join(context.get_usage().split())
    print(f"Error: {mask_secrets(error.format_message())}", file=sys.stderr)  # noqa: T201
    print(f"[LOUSHO_CONFIG_INVALID] {usage or ERROR_CODES['LOUSHO_CONFIG_INVALID']}", file=sys.stderr)  # noqa: T201
    return code


def _fail(error: LoushoError, code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
    print(f"Error: {error.detail}", file=sys.stderr)  # noqa: T201
    print(f"[{error.code}] {error.hint}", file=sys.stderr)  # noqa: T201
    return code
