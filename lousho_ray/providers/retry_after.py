"""How long a provider asks to wait: `retry-after-ms` and `Retry-After` in every form seen, never an exception."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_tz
from typing import Any

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*")


def retry_after_ms(headers: Any, now: float | None = None) -> float | None:
    """The wait the headers ask for, in milliseconds; `None` when there is no hint or it says nothing usable.

    `retry-after-ms` wins over `Retry-After`, which holds seconds or an HTTP date (RFC 9110 section 10.2.3; all three date
    forms). Negative, past and unreadable hints are none. Of several headers the longest wait counts.

    Args:
        headers: A mapping of header names, of any HTTP library.
        now: Wall clock in seconds since the epoch; the machine's own when left out.
    """
    exact = [wait for value in _values(headers, "retry-after-ms") if (wait := _number(value)) is not None]
    if exact:
        return max(exact)
    at = time.time() if now is None else now
    waits = [wait for value in _values(headers, "retry-after") if (wait := _seconds(value, at)) is not None]
    return max(waits) * 1000 if waits else None


def _values(headers: Any, name: str) -> list[str]:
    if headers is None:
        return []
    for method in ("get_list", "getall"):  # httpx and aiohttp
        getter = getattr(headers, method, None)
        if getter is not None:
            return [str(value) for value in (getter(name) if method == "get_list" else getter(name, []))]
    if not isinstance(headers, Mapping):
        return []
    return [str(value) for key, value in headers.items() if str(key).lower() == name]


def _number(value: str) -> float | None:
    match = _NUMBER.fullmatch(value)
    return None if match is None else float(match[1])


def _seconds(value: str, now: float) -> float | None:
    seconds = _number(value)
    if seconds is not None:
        return seconds
    try:
        parsed = parsedate_tz(value)
        if parsed is None:
            return None
        wait = calendar.timegm((*parsed[:6], 0, 1, 0)) - (parsed[9] or 0) - now
    except (ValueError, OverflowError, IndexError, TypeError):
        return None
    return wait if wait > 0 else None
