"""Rules that both OpenAI APIs share: the key, images, and settings that exclude each other."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from lousho_ray.testing.fake_server.rule import BrokenRuleError, Checked, a_list, a_text, need

REASONING_MODEL = re.compile(r"(o\d|gpt-5)(?!.*-chat)")
"""Models that think first; they take no sampling settings."""

_DATA_URL = re.compile(r"data:image/(jpeg|png|gif|webp);base64,(.+)", re.DOTALL)


def check_authorization(checked: Checked) -> None:
    """`Authorization: Bearer <key>`; a local compatible server needs none."""
    if checked.request.dialect == "compatible" and checked.request.route == "chat":
        return
    if not re.fullmatch(r"Bearer \S+", checked.request.headers.get("authorization", "")):
        raise BrokenRuleError("authorization", "You didn't provide an API key.", status=401, type="authentication_error")


def check_image_url(value: Any, where: str) -> None:
    """An http(s) URL, or a `data:` URL with base64 of an image type that the API takes."""
    url = a_text(value, where, non_empty=True)
    if url.startswith(("http://", "https://")):
        return
    match = _DATA_URL.fullmatch(url)
    need(match, "image-url", f"Invalid '{where}': expected an http(s) URL or a base64 data URL of jpeg, png, gif or webp")
    assert match is not None
    check_base64(match[2], where)


def check_base64(value: Any, where: str) -> None:
    """Base64 without white space, of at least one byte."""
    try:
        data = base64.b64decode(a_text(value, where, non_empty=True), validate=True)
    except binascii.Error as error:
        raise BrokenRuleError("base64", f"Invalid '{where}': invalid base64 data ({error})") from error
    need(data, "base64", f"Invalid '{where}': no data")


def check_call_id(value: Any, where: str, max_chars: int) -> str:
    """The id of a tool call, at most that long."""
    call_id = a_text(value, where)
    need(call_id, "call-id", f"Invalid '{where}': empty string")
    need(
        len(call_id) <= max_chars,
        "call-id",
        f"Invalid '{where}': too long, {len(call_id)} characters of at most {max_chars}",
    )
    return call_id


def check_stop(value: Any, where: str) -> None:
    """One stop text, or up to four."""
    if not isinstance(value, str):
        stops = a_list(value, where, non_empty=True)
        need(len(stops) <= 4, "setting-value", f"Invalid '{where}': at most 4 stop sequences")
        for position, stop in enumerate(stops):
            a_text(stop, f"{where}.{position}", non_empty=True)


def check_json_word(format_type: str | None, texts: list[str], where: str) -> None:
    """JSON mode needs the word "json" somewhere in the prompt."""
    if format_type == "json_object":
        found = any("json" in text.lower() for text in texts)
        need(found, "json-word", f"'{where}' must contain the word 'json' in some form, to use the format 'json_object'")


def check_sampling(model: str, effort: Any, body: dict[str, Any]) -> None:
    """Reasoning models refuse sampling settings while they think."""
    if effort not in (None, "none") and REASONING_MODEL.match(model):
        for key in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
            need(key not in body, "reasoning-sampling", f"Unsupported parameter: '{key}' is not supported with this model")
