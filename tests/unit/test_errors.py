"""The root error, its classes, the code table and its page."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import httpx2
import openai
import pytest

from lousho_ray import error_codes, errors
from lousho_ray.errors import (
    ERROR_CODES,
    CompactedError,
    CompactedLLMProviderError,
    ConfigurationError,
    LLMProviderError,
    LoushoError,
    OperationTimeoutError,
    PropagatingToolError,
    RateLimitError,
    ToolArgumentsValidationError,
    ToolExecutionError,
    error_name,
    mask_secrets,
    message_of,
    suggest,
)
from lousho_ray.event_values import ErrorInfo
from lousho_ray.usage import Usage

COMPACTED = CompactedError("timeout", "too slow", status=408, retry_after_ms=5.0, provider="openai", model="m")

EXAMPLES: dict[str, tuple[LoushoError, str, dict[str, Any]]] = {
    "LoushoError": (LoushoError("m"), "LOUSHO_GENERIC_ERROR", {}),
    "ConfigurationError": (errors.ConfigurationError("m", field="limits.x"), "LOUSHO_CONFIG_INVALID", {"field": "limits.x"}),
    "ValidationError": (errors.ValidationError("m", errors={"a": ("b",)}), "LOUSHO_VALIDATION_FAILED", {"errors": {"a": ["b"]}}),
    "MissingDependencyError": (
        errors.MissingDependencyError("m", package="p", install_command="pip install p"),
        "LOUSHO_PEER_MISSING",
        {"package": "p", "install_command": "pip install p"},
    ),
    "AgentExecutionError": (errors.AgentExecutionError("m", agent_id="a"), "LOUSHO_AGENT_EXECUTION_FAILED", {"agent_id": "a"}),
    "FlowExecutionError": (errors.FlowExecutionError("m", step="s"), "LOUSHO_FLOW_EXECUTION_FAILED", {"step": "s"}),
    "OperationTimeoutError": (
        OperationTimeoutError("m", operation="o", timeout_ms=5),
        "LOUSHO_OPERATION_TIMEOUT",
        {"operation": "o", "timeout_ms": 5},
    ),
    "ToolExecutionError": (ToolExecutionError("m", tool_name="t"), "LOUSHO_TOOL_EXECUTION_FAILED", {"tool_name": "t"}),
    "ToolArgumentsValidationError": (
        ToolArgumentsValidationError("m", tool_name="t", issues=[{"path": "a", "message": "b"}]),
        "LOUSHO_TOOL_ARGS_INVALID",
        {"tool_name": "t", "issues": [{"path": "a", "message": "b"}]},
    ),
    "PropagatingToolError": (PropagatingToolError("m", tool_name="t"), "LOUSHO_TOOL_EXECUTION_FAILED", {"tool_name": "t"}),
    "LLMProviderError": (
        LLMProviderError("m", provider="p", status=500),
        "LOUSHO_PROVIDER_REQUEST_FAILED",
        {"provider": "p", "status": 500},
    ),
    "CompactedLLMProviderError": (
        CompactedLLMProviderError("m", compacted=COMPACTED),
        "LOUSHO_PROVIDER_REQUEST_FAILED",
        {"provider": "openai", "status": 408, "compacted": COMPACTED},
    ),
    "RateLimitError": (
        RateLimitError("m", provider="p", status=429, retry_after=2.5),
        "LOUSHO_PROVIDER_RATE_LIMITED",
        {
            "provider": "p",
            "status": 429,
            "retry_after": 2.5,
            "compacted": CompactedError("rate-limit", "m", status=429, retry_after_ms=2500.0, provider="p"),
        },
    ),
    "SessionAwaitingApprovalError": (
        errors.SessionAwaitingApprovalError("m", session_id="s", approval_id="a", approval_kind="question"),
        "LOUSHO_SESSION_AWAITING_APPROVAL",
        {"session_id": "s", "approval_id": "a", "approval_kind": "question"},
    ),
    "SessionTurnFailedError": (
        errors.SessionTurnFailedError("m", last_error={"name": "E", "message": "x"}, attempts=3),
        "LOUSHO_SESSION_TURN_FAILED",
        {"last_error": {"name": "E", "message": "x"}, "attempts": 3},
    ),
    "BudgetExceededError": (
        errors.BudgetExceededError("m", budget={"limit": "maxTokens", "value": 7, "max": 5, "scope": "run"}),
        "LOUSHO_BUDGET_EXCEEDED",
        {"budget": {"limit": "maxTokens", "value": 7, "max": 5, "scope": "run"}},
    ),
    "GuardrailError": (
        errors.GuardrailError("m", guardrail={"name": "g", "kind": "input", "reason": "r"}),
        "LOUSHO_GUARDRAIL_TRIPPED",
        {"guardrail": {"name": "g", "kind": "input", "reason": "r"}},
    ),
    "StorageError": (errors.StorageError("m", path="/x"), "LOUSHO_STORAGE_FAILED", {"path": "/x"}),
    "AgentDriftError": (
        errors.AgentDriftError("m", changes={"toolsAdded": ["t"]}),
        "LOUSHO_AGENT_DRIFT",
        {"changes": {"toolsAdded": ["t"]}},
    ),
    "ResumeToolMissingError": (
        errors.ResumeToolMissingError("m", tool_name="t"),
        "LOUSHO_RESUME_TOOL_MISSING",
        {"tool_name": "t"},
    ),
    "TestFailedError": (errors.TestFailedError("m"), "LOUSHO_TEST_FAILED", {}),
    "CassetteError": (errors.CassetteError("m", path="/c"), "LOUSHO_CASSETTE_INVALID", {"path": "/c"}),
    "CassetteMismatchError": (
        errors.CassetteMismatchError("m", cassette="/c", call_number=2),
        "LOUSHO_CASSETTE_INVALID",
        {"path": "/c", "cassette": "/c", "call_number": 2},
    ),
}

CLASSES = sorted(
    name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, LoushoError) and name != "SDKError"
)


class OrderLost(PropagatingToolError):
    """What a tool's author writes: an `__init__` with a signature of its own."""

    def __init__(self, order: int) -> None:
        super().__init__(f"Order {order} is lost.")
        self.order = order


def test_every_class_has_an_example_here() -> None:
    assert sorted(EXAMPLES) == CLASSES


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_its_default_code_and_fields(name: str) -> None:
    # ERR-01, ERR-10, ERR-11, ERR-12, ERR-13, ERR-14, ERR-15
    error, code, fields = EXAMPLES[name]
    assert (error.code, error.detail, error.hint) == (code, "m", error.hint)
    assert {key: getattr(error, key) for key in fields} == fields
    assert error.docs == f"docs/errors.md#{code.lower()}"  # ERR-D1


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("through", [pickle, cloudpickle])
def test_each_class_survives_pickling_with_everything_on_it(name: str, through: Any) -> None:
    # ERR-08, LES-08
    error, code, fields = copy.copy(EXAMPLES[name][0]), EXAMPLES[name][1], EXAMPLES[name][2]
    error.__cause__ = KeyError("k")
    error.add_note("first provider failed too")
    error.usage = Usage(input_tokens=3, model_calls=1)
    back = pickle.loads(through.dumps(error))
    assert type(back) is type(error)
    assert (str(back), back.code, back.args) == (str(error), code, error.args)
    assert {key: getattr(back, key) for key in fields} == fields
    assert (type(back.__cause__), back.__cause__.args) == (KeyError, ("k",))
    assert (back.__notes__, back.usage) == (["first provider failed too"], error.usage)
    assert back.__suppress_context__ is True


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_survives_copying(name: str) -> None:
    # ERR-08
    error, _, fields = EXAMPLES[name]
    for twin in (copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert twin is not error
        assert str(twin) == str(error)
        assert {key: getattr(twin, key) for key in fields} == fields


def test_a_subclass_with_its_own_init_survives_pickling_without_its_author_doing_anything() -> None:
    # ERR-08, ERR-15
    back = pickle.loads(pickle.dumps(OrderLost(7)))
    assert (type(back), back.order, back.message, back.tool_name) == (OrderLost, 7, "Order 7 is lost.", None)


def test_a_cause_that_does_not_survive_pickling_is_replaced_by_its_name_and_text() -> None:
    # ERR-D4
    response = httpx2.Response(400, request=httpx2.Request("POST", "http://x"))
    error = LLMProviderError("failed")
    error.__cause__ = openai.BadRequestError("bad input", response=response, body=None)
    cause = pickle.loads(pickle.dumps(error)).__cause__
    assert type(cause) is LoushoError
    assert cause.detail == "BadRequestError: bad input"
    assert error.__cause__.response is response


def test_whether_the_context_is_shown_survives_pickling() -> None:
    hidden, shown = LoushoError("m"), LoushoError("m")
    hidden.__suppress_context__ = True
    assert pickle.loads(pickle.dumps(hidden)).__suppress_context__ is True
    assert pickle.loads(pickle.dumps(shown)).__suppress_context__ is False


def test_an_attribute_that_does_not_survive_pickling_becomes_text_but_a_copy_keeps_it() -> None:
    error = OrderLost(7)
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    assert "lock" in pickle.loads(pickle.dumps(error)).lock
    assert copy.copy(error).lock is error.lock  # type: ignore[attr-defined]


def test_str_adds_the_help_line_and_detail_never_has_it() -> None:
    # ERR-02
    error = ConfigurationError("max_steps must be positive.", field="max_steps")
    assert str(error) == (
        "max_steps must be positive.\n[LOUSHO_CONFIG_INVALID] Change the option named in the message to one of the values it "
        "allows. (docs/errors.md#lousho_config_invalid)"
    )
    assert error.detail == "max_steps must be positive."


READ_BY_MODELS = (ToolExecutionError, LLMProviderError, OperationTimeoutError, RateLimitError)


@pytest.mark.parametrize("name", [name for name in CLASSES if isinstance(EXAMPLES[name][0], READ_BY_MODELS)])
def test_what_a_model_reads_is_the_bare_text(name: str) -> None:
    # ERR-03
    error = EXAMPLES[name][0]
    assert (error.message, error.args[0]) == ("m", "m")
    assert str(error) != "m"


def test_class_relations_callers_rely_on() -> None:
    # ERR-11, ERR-12, ERR-13, ERR-31
    assert issubclass(OperationTimeoutError, TimeoutError)
    assert issubclass(errors.TestFailedError, AssertionError)
    assert issubclass(ToolArgumentsValidationError, ToolExecutionError)
    assert issubclass(RateLimitError, CompactedLLMProviderError)
    assert issubclass(CompactedLLMProviderError, LLMProviderError)
    assert errors.SDKError is LoushoError


def test_a_rate_limit_error_takes_its_wait_from_what_was_compacted() -> None:
    # ERR-13
    compacted = CompactedError("rate-limit", "slow down", status=429, retry_after_ms=1500, provider="openai")
    error = RateLimitError("slow down", compacted=compacted)
    assert (error.retry_after, error.status, error.provider) == (1.5, 429, "openai")
    assert RateLimitError("slow down").retry_after is None


@pytest.mark.parametrize(
    ("category", "word"),
    [("rate-limit", "rate_limit"), ("timeout", "Retry"), ("context-length-exceeded", "compaction"), ("auth-failure", "key")],
)
def test_the_hint_of_a_failed_model_call_fits_its_category(category: str, word: str) -> None:
    # ERR-22
    error = CompactedLLMProviderError("m", compacted=CompactedError(category, "m"))
    assert word in error.hint
    assert error.hint in str(error)


def test_the_hint_of_an_unknown_category_names_fallback_models() -> None:
    # ERR-22
    assert "fallback_models" in CompactedLLMProviderError("m", compacted=CompactedError("unknown", "m")).hint


def test_an_unregistered_code_raises_in_tests_and_gets_the_generic_hint_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    # ERR-09
    monkeypatch.setattr(errors, "STRICT", False)
    assert LoushoError("m", code="LOUSHO_NO_SUCH_CODE").hint == ERROR_CODES["LOUSHO_GENERIC_ERROR"]
    monkeypatch.setattr(errors, "STRICT", True)
    with pytest.raises(LookupError, match="LOUSHO_NO_SUCH_CODE"):
        LoushoError("m", code="LOUSHO_NO_SUCH_CODE")


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefghijklmnop1234",
        "sk-ant-api03-AAAAbbbbCCCC_dddd-eeee",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_abcdefghijklmnopqrstuvwxyz0123",
        "Bearer abc.def-ghi_jkl",
        "authorization: basic dXNlcjpwYXNzd29yZA==",
    ],
)
def test_no_message_holds_a_secret(secret: str) -> None:
    # ERR-07
    value = secret.rpartition(" ")[2]
    error = LLMProviderError(f"Incorrect key {secret} provided")
    foreign = ValueError(f"Incorrect key {secret} provided")
    cause_of_pickled = pickle.loads(pickle.dumps(_caused_by(type("Odd", (Exception,), {})(f"with {secret}")))).__cause__
    for text in (error.detail, str(error), message_of(foreign), ErrorInfo.of(foreign).message, str(cause_of_pickled)):
        assert value not in text
        assert "***" in text


def test_masking_leaves_ordinary_words_alone() -> None:
    text = "The task-runner asked disk-usage of sk-1; Bearer of news; basic rules."
    assert mask_secrets(text) == text


def test_error_info_has_the_class_name_the_bare_text_and_our_code() -> None:
    # ERR-30, ERR-D3, EVT-D9
    assert ErrorInfo.of(OperationTimeoutError("slow")).to_dict() == {
        "name": "TimeoutError",
        "message": "slow",
        "code": "LOUSHO_OPERATION_TIMEOUT",
    }
    assert ErrorInfo.of(OrderLost(7)).to_dict() == {
        "name": "OrderLost",
        "message": "Order 7 is lost.",
        "code": "LOUSHO_TOOL_EXECUTION_FAILED",
    }
    assert ErrorInfo.of(ZeroDivisionError()).to_dict() == {"name": "ZeroDivisionError", "message": "ZeroDivisionError"}
    assert error_name(TimeoutError("x")) == "TimeoutError"


def test_suggest_names_the_closest_allowed_name_or_nothing() -> None:
    # ERR-06
    assert suggest("max_tokns", ["max_tokens", "max_steps"]) == " Did you mean 'max_tokens'?"
    assert suggest("OPENAI", ["openai", "ollama"]) == " Did you mean 'openai'?"
    assert suggest("zzz", ["max_tokens"]) == ""


def test_hints_are_full_sentences() -> None:
    # ERR-29
    for code, hint in {**ERROR_CODES, **error_codes.PROVIDER_HINTS}.items():
        assert re.fullmatch(r"[A-Z].*\.", hint), code
        assert len(hint.split()) >= 4, code


def test_every_code_that_carries_a_class_names_a_class_that_exists() -> None:
    for group in error_codes.CODE_GROUPS.values():
        for code, entry in group.items():
            assert all(name in CLASSES for name in filter(None, entry.raised_as.split(", "))), code


def test_the_reference_page_is_the_one_the_table_gives() -> None:
    # ERR-04
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    assert page == error_codes.reference_page(), "write error_codes.reference_page() to docs/errors.md"


def test_every_code_has_a_section_its_link_leads_to() -> None:
    # ERR-D1
    anchors = {f"#{heading.lower()}" for heading in re.findall(r"^### (\w+)$", error_codes.reference_page(), re.MULTILINE)}
    assert {error_codes.docs_link(code).removeprefix("docs/errors.md") for code in ERROR_CODES} == anchors


def _caused_by(cause: BaseException) -> LoushoError:
    error = LoushoError("m")
    error.__cause__ = cause
    return error
