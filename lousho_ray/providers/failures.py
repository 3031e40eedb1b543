"""What a failed model call means: the one table that retries, fallbacks and the final error go by.

`classify` reads the raw exception of a client library by its status, body, class name and text, without importing any client.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lousho_ray.cancellation import Aborted
from lousho_ray.errors import (
    CassetteError,
    CompactedError,
    CompactedLLMProviderError,
    LLMProviderError,
    LoushoError,
    OperationTimeoutError,
    RateLimitError,
    mask_secrets,
)
from lousho_ray.ports import FailedUsage
from lousho_ray.providers.retry_after import retry_after_ms
from lousho_ray.providers.server_words import error_object, server_words, unreachable_text
from lousho_ray.usage import ProviderUsage

Category: TypeAlias = Literal["rate-limit", "timeout", "context-length-exceeded", "auth-failure", "unknown"]

MESSAGE_CHARS = 500
"""The longest `compacted.message`."""


# ----------------------------------------------------------------------------------------------- raw errors of our own making


class ProviderReplyError(LLMProviderError):
    """A server answered, but not with a model's turn. `body` is the server's own error, when it sent one."""

    def __init__(self, message: object, *, provider: str | None = None, status: int | None = None, body: Any = None) -> None:
        super().__init__(message, provider=provider, status=status)
        self.body = body


class TruncatedStreamError(ProviderReplyError):
    """A stream ended before it said how the answer ended: a part of the answer is missing."""


class MalformedReplyError(ProviderReplyError):
    """A reply that is empty, not JSON, or JSON without the fields of an answer."""


class ErrorBodyError(ProviderReplyError):
    """An error object where an answer belongs: under status 200, or inside a stream."""


def error_body(body: Any, *, provider: str | None = None) -> ErrorBodyError:
    """The error for a body or stream event that holds an error object."""
    return ErrorBodyError(server_words(body) or "The server reported an error without a text.", provider=provider, body=body)


def note_usage(exc: BaseException, usage: ProviderUsage | None) -> None:
    """Keeps with an error, or a cancellation, what its call had cost by then as far as the server told."""
    if usage is not None:
        exc.__dict__["partial_usage"] = usage


def partial_usage(exc: BaseException) -> ProviderUsage | None:
    """What `note_usage` kept with an error or with what caused it."""
    return next((usage for error in _chain(exc) if (usage := error.__dict__.get("partial_usage")) is not None), None)


def failed_usage(exc: BaseException, model: str | None) -> FailedUsage | None:
    """What a failed attempt at `model` had used, for the notice that tells of it."""
    usage = partial_usage(exc)
    return None if usage is None else FailedUsage(model, usage)


# ------------------------------------------------------------------------------------------------------------- the decision


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed model call, judged.

    Attributes:
        category: `None` for what is no failure of the provider (a cancellation, a cassette mismatch): never retried or wrapped.
        retryable: Whether trying again can help.
        message: The server's own words first, at most 500 characters, secrets masked.
        status: HTTP status of 400 or above, also one that a body states.
        retry_after_ms: How long the server asked to wait (429 and 503 only).
        code: The provider's own error code or type.
    """

    category: Category | None
    retryable: bool
    message: str
    status: int | None = None
    retry_after_ms: float | None = None
    code: str | None = None


CONTEXT_PATTERNS = (
    "context_length_exceeded",
    "maximum context length",
    "prompt is too long",
    "exceed context limit",
    "context window",
    "available context size",
    "too many input tokens",
    "context size has been exceeded",
    "exceed_context_size_error",
    "n_ctx",
)

_RATE_LIMIT = {"rate_limit_error", "rate_limit_exceeded", "resource_exhausted", "too_many_requests"}
_QUOTA = {
    "insufficient_quota",
    "insufficient_user_quota",
    "usage_limit_reached",
    "billing_hard_limit_reached",
    "billing_not_active",
    "billing_error",
    "credit_balance_too_low",
}
_AUTH = {"authentication_error", "permission_error", "invalid_api_key", "invalid_authentication", "unauthenticated"}
_OVERLOADED = {"overloaded_error", "api_error", "server_error", "internal_server_error", "internal_error", "service_unavailable"}
_REFUSED_REQUEST = {"invalid_request_error", "not_found_error", "invalid_prompt", "model_not_found", "unsupported_parameter"}
_TIMEOUT_CLASSES = {"APITimeoutError", "TimeoutException", "ServerTimeoutError"}
_NETWORK_CLASSES = {"APIConnectionError", "TransportError", "ClientError", "IncompleteRead"}
_DISCONNECTED_CLASSES = {"ServerDisconnectedError", "ClientOSError", "ConnectionResetError", "BrokenPipeError"}


def classify(exc: BaseException, *, now: float | None = None) -> Failure:
    """Judges a failed model call. `now` is the wall clock in epoch seconds, for `Retry-After` dates."""
    if isinstance(exc, asyncio.CancelledError | Aborted | KeyboardInterrupt | SystemExit | GeneratorExit):
        return Failure(None, False, str(exc) or type(exc).__name__)
    if isinstance(exc, CassetteError):
        return Failure(None, False, exc.detail)
    if isinstance(exc, CompactedLLMProviderError):
        return _judge_compacted(exc)
    if isinstance(exc, OperationTimeoutError):
        return Failure("timeout", True, exc.detail[:MESSAGE_CHARS])
    if isinstance(exc, LoushoError) and not isinstance(exc, LLMProviderError):
        category: Category = "auth-failure" if exc.code == "LOUSHO_PROVIDER_MISSING_API_KEY" else "unknown"
        return Failure(category, False, exc.detail[:MESSAGE_CHARS])
    return _judge_raw(exc, now)


def is_quota_exhausted(exc: BaseException) -> bool:
    """Whether an account has no credit or quota left, so that every further call would fail the same way."""
    for error in _chain(exc):
        found = error_object(getattr(error, "body", None))
        marks = {str(found[key]).lower() for key in ("code", "type", "status") if found.get(key) not in (None, "")}
        if marks & _QUOTA or _status(error, found) == 402:
            return True
    return False


def _judge_compacted(exc: CompactedLLMProviderError) -> Failure:
    compacted = exc.compacted
    status = compacted.status
    retryable = compacted.category in {"rate-limit", "timeout"} or (compacted.category == "unknown" and (status or 0) >= 500)
    category: Any = compacted.category
    return Failure(category, retryable, compacted.message, status, compacted.retry_after_ms)


def _judge_raw(exc: BaseException, now: float | None) -> Failure:
    body = getattr(exc, "body", None)
    error = error_object(body)
    marks = {str(error[key]).lower() for key in ("code", "type", "status") if error.get(key) not in (None, "")}
    status = _status(exc, error)
    words = server_words(body)
    text = words or unreachable_text(exc) or _own_text(exc)
    category, retryable = _row(exc, status, marks, f"{words} {_own_text(exc)} {' '.join(marks)}".lower(), bool(error))
    wait = _wait_ms(exc, status, error, now) if category == "rate-limit" or status == 503 else None
    code = next((str(error[key]) for key in ("code", "type") if error.get(key) not in (None, "")), None)
    return Failure(category, retryable, mask_secrets(text)[:MESSAGE_CHARS], status, wait, code)


def _row(exc: BaseException, status: int | None, marks: set[str], text: str, has_error: bool) -> tuple[Category, bool]:
    """The first matching row of the table."""
    names = _class_names(exc)
    if status == 429 or marks & _RATE_LIMIT:
        return "rate-limit", not marks & _QUOTA
    if status in (401, 403) or marks & _AUTH:
        return "auth-failure", False
    if status == 413 or any(pattern in text for pattern in CONTEXT_PATTERNS):
        return "context-length-exceeded", False
    if status in (408, 504) or (status is None and _is_timeout(exc, names)):
        return "timeout", True
    if status is not None:
        return "unknown", status >= 500
    if marks & (_QUOTA | _REFUSED_REQUEST):
        return "unknown", False
    if marks & _OVERLOADED or has_error or isinstance(exc, ProviderReplyError | json.JSONDecodeError) or _is_network(exc, names):
        return "unknown", True
    return "unknown", False


def _status(exc: BaseException, error: Mapping[str, Any]) -> int | None:
    """The HTTP status of the answer, or the one its body states; a status below 400 is none."""
    if "ClientResponseError" in _class_names(exc):
        return None  # aiohttp's word for an answer that is not HTTP
    response = getattr(exc, "response", None)
    stated = [getattr(exc, "status_code", None), getattr(exc, "status", None), getattr(response, "status_code", None)]
    stated += [error.get("code"), error.get("status"), error.get("status_code")]
    for value in stated:
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
            return int(value)
    return None


def _wait_ms(exc: BaseException, status: int | None, error: Mapping[str, Any], now: float | None) -> float | None:
    if status in (429, 503):
        wait = retry_after_ms(getattr(getattr(exc, "response", None), "headers", None), now)
        if wait is not None:
            return wait
    resets = error.get("resets_in_seconds")
    return float(resets) * 1000 if isinstance(resets, int | float) and resets >= 0 else None


def _chain(exc: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _class_names(exc: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(exc).__mro__}


def _is_timeout(exc: BaseException, names: set[str]) -> bool:
    if isinstance(exc, TimeoutError):
        return True
    if not names & _TIMEOUT_CLASSES:
        return False
    # A transport may report a closed connection as a timeout of its own; the cause tells the two apart.
    return not any(_class_names(cause) & _DISCONNECTED_CLASSES for cause in _chain(exc))


def _is_network(exc: BaseException, names: set[str]) -> bool:
    if isinstance(exc, ConnectionError | socket.gaierror | ssl.SSLError | asyncio.IncompleteReadError):
        return True
    return bool(names & (_NETWORK_CLASSES | _TIMEOUT_CLASSES | _DISCONNECTED_CLASSES))


def _own_text(exc: BaseException) -> str:
    text = exc.detail if isinstance(exc, LoushoError) else str(exc)
    return text or type(exc).__name__


# ----------------------------------------------------------------------------------------------------------- the final error

KEY_VARIABLES = {
    "openai": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "openrouter": "OPENROUTER_API_KEY",
    "openai-compatible": "OPENAI_COMPATIBLE_API_KEY",
}


def to_provider_error(
    exc: BaseException, provider: str | None = None, model: str | None = None, *, now: float | None = None
) -> BaseException:
    """The error to raise for a model call that failed for good.

    A `CompactedLLMProviderError` (`RateLimitError` for a 429) whose `__cause__` is `exc`. What is no failure of a provider is
    returned as it is: cancellations, cassette mismatches, our own errors (a timeout, a missing package, a bad option).
    """
    if isinstance(exc, LoushoError) and (isinstance(exc, CompactedLLMProviderError) or not isinstance(exc, LLMProviderError)):
        return exc
    failure = classify(exc, now=now)
    if failure.category is None:
        return exc
    compacted = CompactedError(failure.category, failure.message, failure.status, failure.retry_after_ms, provider, model)
    detail = f"{failure.message} {_where(failure, provider, model)}".rstrip()
    error: CompactedLLMProviderError
    if failure.category == "rate-limit":
        error = RateLimitError(detail, provider=provider, status=failure.status, compacted=compacted)
    else:
        error = CompactedLLMProviderError(detail, provider=provider, status=failure.status, compacted=compacted)
    error.__cause__ = exc
    return error


def _where(failure: Failure, provider: str | None, model: str | None) -> str:
    facts = ["/".join(part for part in (provider, model) if part)]
    if failure.status is not None:
        facts.append(f"HTTP {failure.status}")
    if failure.category == "auth-failure" and provider in KEY_VARIABLES:
        facts.append(f"check {KEY_VARIABLES[provider]}")
    if failure.retry_after_ms is not None:
        facts.append(f"try again in {failure.retry_after_ms / 1000:g} s")
    text = ", ".join(fact for fact in facts if fact)
    return f"({text})" if text else ""


# ------------------------------------------------------------------------------------------------------------------- secrets


def scrub(exc: BaseException, secrets: Iterable[str]) -> None:
    """Replaces the given secrets by `***` in the texts and bodies of an exception and of what caused it, in place."""
    wanted = sorted({secret for secret in secrets if len(secret) >= 4}, key=len, reverse=True)
    if not wanted:
        return
    for error in _linked(exc):
        error.args = tuple(_without(value, wanted) for value in error.args)
        for name in ("message", "detail", "body", "_message"):
            value = error.__dict__.get(name)
            if value is not None:
                error.__dict__[name] = _without(value, wanted)


def _linked(exc: BaseException) -> list[BaseException]:
    """The exception and everything that hangs on it, also the contexts that a traceback does not show."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [exc]
    while waiting:
        error = waiting.pop()
        if error is not None and all(error is not known for known in found):
            found.append(error)
            waiting += (error.__cause__, error.__context__)
    return found


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
        return value
    if isinstance(value, Mapping):
        return {key: _without(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without(item, secrets) for item in value) if type(value) in (list, tuple) else value
    return value
