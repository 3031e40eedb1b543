"""Keeps keys out of log records. The package adds no handler and sets no level: where records go is the application's choice."""

from __future__ import annotations

import logging
import os
import traceback
from typing import Final

from lousho_ray.wording import mask_secrets

LOGGERS: Final = (
    "lousho_ray",
    "lousho_ray.compaction",
    "lousho_ray.http",
    "lousho_ray.limits.limiter",
    "lousho_ray.prices",
    "lousho_ray.providers",
    "lousho_ray.stores.s3_sessions",
    "lousho_ray.stores.sqlite_sessions",
    "lousho_ray.tokens",
    "lousho_ray.tools",
)
"""Every logger of the package: a logger's filters do not see the records of those below it."""

KEY_VARIABLES: Final = ("_API_KEY", "_AUTH_TOKEN")
"""How the names of environment variables end that hold a provider's key, also those of providers of one's own."""

SHORTEST_KEY_CHARS: Final = 8
"""A shorter value, such as the `none` of a local server, is a word that other texts have too."""


def mask_records() -> None:
    """Puts the filter on the package's loggers; one that has it keeps it."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_masked)


def _masked(record: logging.LogRecord) -> bool:
    """A filter that lets every record pass, without what looks like a key and without the keys of the environment."""
    keys = _keys()
    try:
        said = record.getMessage()
    except Exception:
        return True  # the handler reports a message that does not fit its arguments
    if (text := _without(keys, said)) != said:
        record.msg, record.args = text, ()
    if record.exc_info and record.exc_info[1] is not None:
        told = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
        if (text := _without(keys, told)) != told:
            record.exc_info, record.exc_text = None, text  # what a handler prints below the message
    return True


def _keys() -> list[str]:
    found = (value.strip() for name, value in os.environ.items() if name.upper().endswith(KEY_VARIABLES))
    return sorted((key for key in found if len(key) >= SHORTEST_KEY_CHARS), key=len, reverse=True)  # one may be a part of another


def _without(keys: list[str], text: str) -> str:
    for key in keys:
        text = text.replace(key, "***")
    return mask_secrets(text)
