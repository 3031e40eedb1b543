"""The table of failures, on the raw exceptions of the real clients."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import ssl
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from lousho_ray.errors import (
    CassetteError,
    CompactedLLMProviderError,
    ConfigurationError,
    LLMProviderError,
    MissingDependencyError,
    OperationTimeoutError,
    RateLimitError,
)
from lousho_ray.providers.failures import (
    ErrorBodyError,
    MalformedReplyError,
    TruncatedStreamError,
    classify,
    error_body,
    scrub,
    to_provider_error,
)
from lousho_ray.providers.retry_after import retry_after_ms

REQUEST = httpx2.Request("POST", "http://api.test/v1/chat/completions")


def status_error(status: int, body: Any = None, headers: dict[str, str] | None = None) -> openai.APIStatusError:
    """The error the OpenAI client raises for a status: its `body` is the inner error object."""
    response = httpx2.Response(status, headers=headers, json=body, request=REQUEST)
    client = openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=httpx2.MockTransport(lambda _: response)))
    with client:
        return client._make_status_error_from_response(response)


def anthropic_error(status: int, kind: str) -> anthropic.APIStatusError:
    body = {"type": "error", "error": {"type": kind, "message": "no"}}
    return anthropic.APIStatusError("no", response=httpx2.Response(status, json=body, request=REQUEST), body=body)


@pytest.mark.parametrize(
    ("error", "category", "retryable"),
    [
        # the table of section J, row by row
        (asyncio.CancelledError(), None, False),
        (CassetteError("mismatch"), None, False),
        (status_error(429, {"error": {"message": "slow"}}), "rate-limit", True),
        (anthropic_error(200, "rate_limit_error"), "rate-limit", True),
        (status_error(429, {"error": {"message": "x", "code": "insufficient_quota"}}), "rate-limit", False),  # PRV-D3
        (status_error(429, {"error": {"message": "maximum context length of tokens per minute"}}), "rate-limit", True),  # PRV-73
        (status_error(401), "auth-failure", False),
        (status_error(403, {"error": {"code": "insufficient_user_quota"}}), "auth-failure", False),
        (anthropic_error(200, "authentication_error"), "auth-failure", False),
        (ConfigurationError("no key", code="LOUSHO_PROVIDER_MISSING_API_KEY"), "auth-failure", False),
        (status_error(413), "context-length-exceeded", False),
        (status_error(400, {"error": {"message": "no", "code": "context_length_exceeded"}}), "context-length-exceeded", False),
        (status_error(400, {"error": {"message": "Prompt is too long"}}), "context-length-exceeded", False),
        (
            status_error(500, {"error": {"message": "it exceeds the available context size"}}),
            "context-length-exceeded",
            False,
        ),
        (status_error(408), "timeout", True),
        (status_error(504), "timeout", True),
        (openai.APITimeoutError(REQUEST), "timeout", True),
        (httpx2.ReadTimeout("slow", request=REQUEST), "timeout", True),
        (TimeoutError(), "timeout", True),
        (OperationTimeoutError("slow"), "timeout", True),
        (status_error(500), "unknown", True),
        (status_error(529), "unknown", True),
        (anthropic_error(200, "overloaded_error"), "unknown", True),  # PRV-55
        (error_body({"error": {"message": "bad gateway", "code": 502}}), "unknown", True),
        (openai.APIConnectionError(request=REQUEST), "unknown", True),
        (httpx2.RemoteProtocolError("peer closed", request=REQUEST), "unknown", True),
        (ConnectionResetError(), "unknown", True),
        (socket.gaierror(-2, "Name or service not known"), "unknown", True),
        (ssl.SSLError("handshake"), "unknown", True),
        (TruncatedStreamError("cut"), "unknown", True),
        (MalformedReplyError("empty"), "unknown", True),
        (json.JSONDecodeError("x", "x", 0), "unknown", True),
        (status_error(400, {"error": {"message": "credit balance is too low"}}), "unknown", False),  # field case L04
        (status_error(402), "unknown", False),
        (status_error(404), "unknown", False),
        (status_error(409), "unknown", False),
        (status_error(422), "unknown", False),
        (status_error(425), "unknown", False),
        (error_body({"error": {"message": "bad", "type": "invalid_request_error"}}), "unknown", False),
        (TypeError("a bug"), "unknown", False),
        (FileNotFoundError("a bug"), "unknown", False),
        (MissingDependencyError("x", package="openai", install_command="pip install openai"), "unknown", False),
        (LLMProviderError("down", status=503), "unknown", True),
        (RateLimitError("slow", retry_after=2), "rate-limit", True),
    ],
)
def test_a_failure_has_its_row(error: BaseException, category: str | None, retryable: bool) -> None:
    # ERR-21, ERR-23, field case L13
    failure = classify(error)
    assert (failure.category, failure.retryable) == (category, retryable)


def test_a_status_below_400_is_no_status() -> None:
    # PRV-72
    assert classify(anthropic_error(200, "overloaded_error")).status is None


def test_a_disconnect_that_a_transport_calls_a_timeout_is_a_dropped_connection() -> None:
    class ServerDisconnectedError(Exception):
        pass

    error = openai.APITimeoutError(REQUEST)
    error.__cause__ = ServerDisconnectedError()
    assert classify(error).category == "unknown"
    assert classify(error).retryable


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (429, {"retry-after": "3"}, 3000.0),
        (503, {"retry-after": "0"}, 0.0),
        (429, {"retry-after-ms": "20", "retry-after": "5"}, 20.0),
        (429, {"retry-after": "-5"}, None),
        (429, {"retry-after": "abc"}, None),
        (500, {"retry-after": "3"}, None),
        (408, {"retry-after": "3"}, None),
        (429, {}, None),
    ],
)
def test_a_wait_is_read_from_429_and_503_only(status: int, headers: dict[str, str], expected: float | None) -> None:
    # PRV-64, ERR-24, field case L02
    assert classify(status_error(status, headers=headers)).retry_after_ms == expected


NOW = 1_792_567_675.0  # Wed, 21 Oct 2026 07:27:55 GMT


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Wed, 21 Oct 2026 07:28:00 GMT", 5000.0),
        ("Wednesday, 21-Oct-26 07:28:00 GMT", 5000.0),
        ("Wed Oct 21 07:28:00 2026", 5000.0),
        ("Wed, 21 Oct 2026 07:28:00 -0000", 5000.0),
        ("Wed, 21 Oct 2026 09:28:00 +0200", 5000.0),
        ("Wed, 21 Oct 2026 07:27:50 GMT", None),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
        ("1e9", None),
        ("inf", None),
        ("9999999999", 9_999_999_999_000.0),
        ("1.5", 1500.0),
        (" 2 ", 2000.0),
        ("", None),
    ],
)
def test_every_form_of_retry_after_is_read_and_none_raises(value: str, expected: float | None) -> None:
    # Field cases L01, L02
    assert retry_after_ms({"Retry-After": value}, NOW) == expected


def test_of_two_headers_the_longer_wait_counts() -> None:
    headers = httpx2.Headers([("retry-after", "2"), ("retry-after", "7"), ("retry-after", "x")])
    assert retry_after_ms(headers, NOW) == 7000.0


def test_a_quota_that_resets_later_says_when_and_is_not_retried() -> None:
    # Field cases L04, L14
    failure = classify(status_error(429, {"error": {"type": "usage_limit_reached", "resets_in_seconds": 3600}}))
    assert (failure.retryable, failure.retry_after_ms) == (False, 3_600_000.0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "plain"}}, "plain"),
        ({"error": {"message": "outer", "metadata": {"raw": '{"error": {"message": "inner"}}'}}}, "inner"),
        ({"error": {"message": "outer", "metadata": {"raw": {"detail": "inner"}}}}, "inner"),
        ({"error": {"message": '{"error": {"message": "in a string"}}'}}, "in a string"),
        ({"error": "text"}, "text"),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, "field required"),
        ({"object": "error", "message": "vllm"}, "vllm"),
        ([{"error": {"message": "google", "code": 400}}], "google"),
        ("<html><head><style>p{}</style></head><body><h1>502</h1> Bad Gateway</body></html>", "502 Bad Gateway"),
    ],
)
def test_the_message_starts_with_the_servers_own_words(body: Any, words: str) -> None:
    # LES-06
    error = ErrorBodyError("phrase", body=body)
    assert classify(error).message == words
    final = to_provider_error(error, "openai", "gpt")
    assert isinstance(final, CompactedLLMProviderError)
    assert final.detail.startswith(words)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (ConnectionRefusedError(111, "refused"), "connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "unknown host"),
        (ssl.SSLError("bad certificate"), "TLS failed"),
    ],
)
def test_an_unreachable_server_is_named_with_port_and_reason(cause: Exception, reason: str) -> None:
    # LES-07
    error = openai.APIConnectionError(request=httpx2.Request("POST", "http://192.168.1.5:8000/v1"))
    error.__cause__ = cause
    message = classify(error).message
    assert message.startswith(f"Cannot reach 192.168.1.5:8000: {reason}")
    assert message.endswith("Is the server running there?")
    public = openai.APIConnectionError(request=httpx2.Request("POST", "https://api.openai.com/v1"))
    public.__cause__ = cause
    assert "running" not in classify(public).message
    assert "api.openai.com:443" in classify(public).message


def test_a_closed_connection_is_told_apart_from_an_unreachable_server() -> None:
    error = httpx2.RemoteProtocolError("peer closed", request=REQUEST)
    assert classify(error).message == "The connection to api.test:80 was closed before the answer was complete."
    assert classify(ConnectionResetError()).message == "The connection to the server was closed before the answer was complete."


def test_an_overflow_is_known_by_the_outer_words_too() -> None:
    # LES-05
    body = {"error": {"message": "This model's maximum context length is 8192", "metadata": {"raw": '{"error": "bad"}'}}}
    assert classify(status_error(400, body)).category == "context-length-exceeded"


def test_the_final_error_is_compacted_once_and_keeps_the_raw_one() -> None:
    # PRV-74, ERR-20, ERR-22
    raw = status_error(500, {"error": {"message": "x" * 900}})
    final = to_provider_error(raw, "openai", "gpt-5")
    assert isinstance(final, CompactedLLMProviderError)
    assert final.__cause__ is raw
    assert len(final.compacted.message) == 500
    assert (final.compacted.provider, final.compacted.model, final.compacted.status) == ("openai", "gpt-5", 500)
    assert final.code == "LOUSHO_PROVIDER_REQUEST_FAILED"
    assert to_provider_error(final, "other", "m") is final


def test_a_rate_limit_has_its_own_class_and_wait() -> None:
    # ERR-13, ERR-22
    final = to_provider_error(status_error(429, {"error": {"message": "slow"}}, {"retry-after": "7"}), "openai", "gpt")
    assert isinstance(final, RateLimitError)
    assert (final.code, final.retry_after, final.compacted.retry_after_ms) == ("LOUSHO_PROVIDER_RATE_LIMITED", 7.0, 7000.0)
    assert "try again in 7 s" in final.detail


def test_an_auth_failure_names_the_variable_of_the_key() -> None:
    # Field case L13
    final = to_provider_error(status_error(401, {"error": {"message": "bad key"}}), "openai", "gpt")
    assert "OPENAI_API_KEY" in str(final)


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        CassetteError("x"),
        ConfigurationError("x"),
        OperationTimeoutError("x"),
        MissingDependencyError("x", package="p", install_command="pip install p"),
    ],
)
def test_what_is_no_providers_failure_passes_unchanged(error: BaseException) -> None:
    # ERR-19, ERR-27, PRV-74
    assert to_provider_error(error, "openai", "gpt") is error


def test_the_final_error_crosses_processes() -> None:
    # ERR-08, ERR-D4
    final = to_provider_error(status_error(429, {"error": {"message": "slow"}}), "openai", "gpt")
    there = pickle.loads(pickle.dumps(final))
    assert type(there) is RateLimitError
    assert there.compacted == final.compacted  # type: ignore[union-attr]
    assert isinstance(pickle.loads(pickle.dumps(TruncatedStreamError("cut", provider="p"))), TruncatedStreamError)


def test_given_secrets_are_masked_through_the_whole_chain() -> None:
    # ERR-07, field case X01
    raw = status_error(401, {"error": {"message": "key hunter2hunter2 is wrong", "extra": ["hunter2hunter2"]}})
    raw.__cause__ = ValueError("http://user:hunter2hunter2@host/")
    scrub(raw, ["hunter2hunter2", ""])
    final = to_provider_error(raw, "openai", "gpt")
    for text in (str(raw), repr(raw), str(raw.body), str(raw.__cause__), str(final), repr(classify(raw))):
        assert "hunter2" not in text
