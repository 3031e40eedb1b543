"""`--config`: a TOML file with defaults of a command's options."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lousho_ray.errors import ConfigurationError, suggest


def config_file(arguments: Sequence[str]) -> Path | None:
    """The value of `--config` in a command line; the last one wins."""
    found: str | None = None
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument == "--config" and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith("--config="):
            found = argument.partition("=")[2]
    return None if found is None else Path(found)


def read_defaults(path: Path, options: Collection[str]) -> dict[str, Any]:
    """The defaults in a file, by the names of the command's parameters; keys are written as the options are, or with underscores.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: no TOML, or a key that is none of `options`.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"The file {path} of --config cannot be read: {error}.", field="--config") from error
    defaults: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in options:
            allowed = ", ".join(sorted(option.replace("_", "-") for option in options))
            raise ConfigurationError(
                f"{path} has the key {key!r}, which is no option of lousho eval.{suggest(name, options)} Options: {allowed}.",
                field=f"--config.{key}",
            )
        defaults[name] = value
    return defaults
