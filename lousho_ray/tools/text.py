"""Small rules about text that goes to a model."""

from __future__ import annotations


def replace_surrogates(text: str) -> str:
    """Joins surrogate pairs and replaces lone surrogates by U+FFFD: text with one cannot be sent, stored or hashed as UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clip(text: str, max_chars: int) -> str:
    """At most `max_chars` characters of `text`, with `...` for what is missing."""
    return text if len(text) <= max_chars else text[: max(0, max_chars - 3)] + "..."
