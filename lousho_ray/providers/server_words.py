"""What went wrong, in the words of whoever knows: the server's own error text, or the address that could not be reached."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

RAW_BODY_CHARS = 300
"""How much of a body that is not JSON is shown."""

_NESTED = ("metadata", "raw", "upstream_error", "cause", "innererror", "inner_error", "error", "errors", "detail", "details")
_TEXTS = ("message", "msg", "error_description", "detail", "error", "title", "reason")
_TAGS = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.IGNORECASE | re.DOTALL)
_JSON_DEPTH = 8
_CLOSED = "closed before the answer was complete"


def error_object(body: Any) -> Mapping[str, Any]:
    """The error object of a body (`{"error": {...}}`, the bare object, JSON text, a list of one); empty when there is none."""
    body = _from_json(body)
    if isinstance(body, list) and body:
        body = body[0]
    if not isinstance(body, Mapping):
        return {}
    inner = _from_json(body.get("error"))
    if isinstance(inner, Mapping):
        return inner
    return body


def server_words(body: Any) -> str:
    """The server's own text: of an error nested in the body first, then the body's, else the start of a non-JSON body."""
    words = _words(_from_json(body), 0)
    if words:
        return words
    if isinstance(body, str | bytes):
        text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
        return " ".join(_TAGS.sub(" ", text).split())[:RAW_BODY_CHARS]
    return ""


def _words(value: Any, depth: int) -> str:
    if depth > _JSON_DEPTH:
        return ""
    if isinstance(value, list):
        return next((words for item in value if (words := _words(_from_json(item), depth + 1))), "")
    if not isinstance(value, Mapping):
        return ""
    for key in _NESTED:
        inner = _from_json(value.get(key))
        if isinstance(inner, Mapping | list) and (words := _words(inner, depth + 1)):
            return words
    for key in _TEXTS:
        text = value.get(key)
        if isinstance(text, str) and text.strip():
            return _words(_from_json(text), depth + 1) or text.strip()
    return ""


def _from_json(value: Any) -> Any:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def unreachable_text(exc: BaseException) -> str | None:
    """`Cannot reach host:port: reason` for an error of the connection, or that it was closed; `None` for other errors."""
    chain = list(_causes(exc))
    reason = next((text for error in reversed(chain) if (text := _reason(error))), None)
    if reason is None:
        return None
    host, port = _address(chain)
    where = "the server" if host is None else host if port is None else f"{host}:{port}"
    if reason == _CLOSED:
        return f"The connection to {where} was {reason}."
    text = f"Cannot reach {where}: {reason}."
    return f"{text} Is the server running there?" if host is not None and _is_private(host) else text


def _causes(exc: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _reason(error: BaseException) -> str | None:
    names = {cls.__name__ for cls in type(error).__mro__}
    text = str(error)
    if isinstance(error, socket.gaierror) or "ClientConnectorDNSError" in names:
        return "unknown host"
    if isinstance(error, ssl.SSLError) or names & {"ClientConnectorCertificateError", "ClientSSLError"} or "CERTIFICATE" in text:
        return f"TLS failed ({' '.join(text.split())[:120]})"
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in text:
        return "connection refused"
    if names & {"ServerDisconnectedError", "RemoteProtocolError", "ConnectionResetError", "BrokenPipeError", "ClientPayloadError"}:
        return _CLOSED
    if names & {"ConnectError", "ConnectTimeout", "ReadError", "ClientConnectionError", "APIConnectionError"}:
        return " ".join(text.split())[:120].rstrip(".") or "no connection"
    return None


def _address(chain: list[BaseException]) -> tuple[str | None, int | None]:
    for error in chain:
        try:
            url = getattr(error, "request").url  # noqa: B009 - the property of an unsent request raises
            return url.host, url.port or (443 if url.scheme == "https" else 80)
        except (AttributeError, RuntimeError):
            continue
    for error in chain:
        host, port = getattr(error, "host", None), getattr(error, "port", None)
        if isinstance(host, str):
            return host, port if isinstance(port, int) else None
    return None, None


def _is_private(host: str) -> bool:
    if host == "localhost" or host.endswith((".local", ".internal")):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_private or address.is_loopback
