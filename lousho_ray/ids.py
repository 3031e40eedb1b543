"""Ids: how new ones are made and which given ones are allowed."""

from __future__ import annotations

import re
import secrets
import uuid

from lousho_ray.errors import ConfigurationError

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,159}")


def new_id(prefix: str = "") -> str:
    """A random id of 32 hexadecimal digits (128 bits) behind `prefix`: safe in URLs and file names, valid as a session id."""
    return prefix + secrets.token_hex(16)


def new_session_id() -> str:
    """A random UUID, the id of a session nobody named."""
    return str(uuid.uuid4())


def check_session_id(id: object, field: str = "session_id") -> str:
    """Returns `id` when it is 1 to 128 of `A-Z a-z 0-9 _ -`.

    Raises:
        ConfigurationError: `LOUSHO_SESSION_ID_INVALID`, with `field`.
    """
    if isinstance(id, str) and _SESSION_ID.fullmatch(id):
        return id
    raise _invalid(id, field, "1 to 128 characters of A-Z, a-z, 0-9, '_' and '-', for example 'customer-42'")


def is_session_id(id: object) -> bool:
    return isinstance(id, str) and _SESSION_ID.fullmatch(id) is not None


def check_run_id(id: object, field: str = "session_id") -> str:
    """Returns `id` when it can name a run: like a session id, but up to 160 characters and with dots after the first.

    Raises:
        ConfigurationError: `LOUSHO_SESSION_ID_INVALID`, with `field`.
    """
    if isinstance(id, str) and _RUN_ID.fullmatch(id):
        return id
    allowed = "1 to 160 characters of A-Z, a-z, 0-9, '_', '-' and '.', and may not start with a dot, for example 'trip.fork-1'"
    raise _invalid(id, field, allowed)


def _invalid(id: object, field: str, allowed: str) -> ConfigurationError:
    shown = repr(id if len(id) <= 60 else id[:60] + "...") if isinstance(id, str) else f"a {type(id).__name__}"
    return ConfigurationError(f"{field} must be {allowed}; got {shown}.", code="LOUSHO_SESSION_ID_INVALID", field=field)
