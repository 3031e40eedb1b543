"""Which failures say nothing about the agent: a case that met one is run again when the suite is continued."""

from __future__ import annotations

from lousho_ray.errors import CompactedLLMProviderError, LoushoError, message_of
from lousho_ray.providers.failures import classify, is_quota_exhausted

UNREACHED = frozenset({"LOUSHO_PROVIDER_MISSING_API_KEY", "LOUSHO_REMOTE_REQUEST_FAILED", "LOUSHO_REMOTE_UNAUTHORIZED"})
"""Codes of errors by which a test ends that never reached a model."""


def outage_of(error: BaseException) -> str | None:
    """Why a model call failed: rate, time, network, server, credentials, quota. `None` for every other failure.

    A refused request or a conversation that is too long is the agent's own doing: it would fail again.
    """
    if isinstance(error, LoushoError) and error.code in UNREACHED:
        return error.detail
    judged = error.__cause__ if isinstance(error, CompactedLLMProviderError) and error.__cause__ is not None else error
    failure = classify(judged)
    down = failure.retryable or failure.category in ("rate-limit", "timeout", "auth-failure") or is_quota_exhausted(error)
    return message_of(error) if down else None
