"""Words of error messages: the closest allowed name, and text without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SECRET = re.compile(
    r"\b(?:sk|rk|pk)-[A-Za-z0-9_\-]{12,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_\-]{30,}|\bgh[opsur]_[A-Za-z0-9]{20,}|\bxox[abprs]-[A-Za-z0-9\-]{10,}"
    r"|(?<=Bearer )[A-Za-z0-9._~+/\-]{8,}=*|(?<=Basic )[A-Za-z0-9+/]{8,}=*",
    re.IGNORECASE,
)


def mask_secrets(text: str) -> str:
    """Replaces what looks like an API key or the value of an authorization header by `***`."""
    return _SECRET.sub("***", text)


def suggest(name: str, allowed: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the allowed name closest to `name`, or an empty string when none is close."""
    import difflib  # only on the way to an error

    known = {candidate.lower(): candidate for candidate in allowed}
    match = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f" Did you mean '{known[match[0]]}'?" if match else ""
