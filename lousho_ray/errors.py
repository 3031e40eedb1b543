"""The errors of the package: one root, a stable `code` each, and a hint that says what to do.

All of them survive `pickle` and `copy` with every attribute, their notes and their cause, so they are the same object to the caller
whether a run was local or on another machine.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lousho_ray.error_codes import ERROR_CODES as ERROR_CODES
from lousho_ray.error_codes import PROVIDER_HINTS, docs_link
from lousho_ray.wording import mask_secrets as mask_secrets
from lousho_ray.wording import suggest as suggest

if TYPE_CHECKING:
    from lousho_ray.usage import Usage

STRICT = False
"""Tests set this: a code that is not in `ERROR_CODES` then fails where it is used instead of getting the generic hint."""


class LoushoError(Exception):
    """The root of all errors of the package.

    Attributes:
        code: `LOUSHO_<AREA>_<NAME>`, stable.
        detail: The message alone, without the help line; also `message` and `args[0]`. `str(error)` adds the help line.
        usage: Set on an error that came out of a run: what its finished model calls had spent, as in `result.usage`.
    """

    default_code: ClassVar[str] = "LOUSHO_GENERIC_ERROR"
    usage: Usage | None = None

    def __init__(self, message: object = "", *, code: str | None = None) -> None:
        self.detail = mask_secrets(str(message))
        self.code = code or self.default_code
        if STRICT and self.code not in ERROR_CODES:
            raise LookupError(f"{self.code!r} is not in ERROR_CODES: add it with its hint to lousho_ray/error_codes.py.")
        super().__init__(self.detail)

    @property
    def message(self) -> str:
        """The bare text, as a model reads it; the same as `detail`."""
        return self.detail

    @property
    def hint(self) -> str:
        """What to do, the same for every error of this code."""
        return ERROR_CODES.get(self.code, ERROR_CODES["LOUSHO_GENERIC_ERROR"])

    @property
    def docs(self) -> str:
        """Where the code is described."""
        return docs_link(self.code)

    def __str__(self) -> str:
        return f"{self.detail}\n[{self.code}] {self.hint} ({self.docs})"

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: _portable(value) for name, value in self.__dict__.items()}
        return _rebuild, (type(self), self.args, state, _portable_cause(self.__cause__), self.__suppress_context__)

    def __copy__(self) -> LoushoError:
        return _rebuild(type(self), self.args, self.__dict__, self.__cause__, self.__suppress_context__)


def _rebuild(
    cls: type[LoushoError], args: tuple[Any, ...], state: dict[str, Any], cause: BaseException | None, suppress: bool
) -> LoushoError:
    """Restores an error without calling its `__init__`, whose signature a subclass may have changed."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    error.__cause__ = cause
    error.__suppress_context__ = suppress
    return error


def _portable_cause(cause: BaseException | None) -> BaseException | None:
    """The cause itself when it survives pickling (many client libraries' errors do not), else its class name and text."""
    if cause is None or _survives(cause):
        return cause
    return LoushoError(f"{type(cause).__name__}: {message_of(cause)}")


def _portable(value: object) -> object:
    """An attribute as it is when it survives pickling, else its text: an error must reach the caller whatever hangs on it."""
    return value if value is None or isinstance(value, (str, int, float)) or _survives(value) else mask_secrets(repr(value))


def _survives(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


SDKError = LoushoError
"""The name that readers of the upstream documents know."""


def message_of(error: BaseException) -> str:
    """The bare text of any exception, without a help line and without secrets; its class name when it has no text."""
    try:
        text = error.detail if isinstance(error, LoushoError) else mask_secrets(str(error))
    except Exception:  # a class of the caller's whose `__str__` raises
        text = ""
    return text or type(error).__name__


def error_name(error: BaseException) -> str:
    """The name of an error in events and in what a model reads: the class name, but `TimeoutError` for our timeout."""
    return "TimeoutError" if type(error) is OperationTimeoutError else type(error).__name__


# ------------------------------------------------------------------------------------------------- options and environment


class ConfigurationError(LoushoError):
    """An option or argument cannot be used. `field` names it, such as `limits.max_tokens`."""

    default_code = "LOUSHO_CONFIG_INVALID"

    def __init__(self, message: object, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message, code=code)
        self.field = field


class ValidationError(LoushoError):
    """Input failed validation. `errors` maps each field to its problems."""

    default_code = "LOUSHO_VALIDATION_FAILED"

    def __init__(self, message: object, *, code: str | None = None, errors: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(message, code=code)
        self.errors = {field: list(texts) for field, texts in (errors or {}).items()}


class MissingDependencyError(LoushoError):
    """An optional package is not installed. `install_command` installs it."""

    default_code = "LOUSHO_PEER_MISSING"

    def __init__(self, message: object, *, package: str, install_command: str) -> None:
        super().__init__(message)
        self.package = package
        self.install_command = install_command


# ------------------------------------------------------------------------------------------------------------- execution


class AgentExecutionError(LoushoError):
    """Running an agent failed, or the process that ran it died."""

    default_code = "LOUSHO_AGENT_EXECUTION_FAILED"

    def __init__(self, message: object, *, agent_id: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.agent_id = agent_id


class FlowExecutionError(LoushoError):
    """A step of a flow failed or was refused. `step` is its id."""

    default_code = "LOUSHO_FLOW_EXECUTION_FAILED"

    def __init__(self, message: object, *, step: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.step = step


class OperationTimeoutError(LoushoError, TimeoutError):
    """An operation took longer than the `timeout_ms` it was allowed."""

    default_code = "LOUSHO_OPERATION_TIMEOUT"

    def __init__(self, message: object, *, operation: str | None = None, timeout_ms: float | None = None) -> None:
        super().__init__(message)
        self.operation = operation
        self.timeout_ms = timeout_ms


# ----------------------------------------------------------------------------------------------------------------- tools


class ToolExecutionError(LoushoError):
    """A tool failed. Raised inside a tool it becomes an error result that the model reads."""

    default_code = "LOUSHO_TOOL_EXECUTION_FAILED"

    def __init__(self, message: object = "", *, code: str | None = None, tool_name: str | None = None) -> None:
        super().__init__(message, code=code)
        self.tool_name = tool_name


class ToolArgumentsValidationError(ToolExecutionError):
    """The arguments of a call do not match the tool's schema. `issues` is a list of `{"path": ..., "message": ...}`."""

    default_code = "LOUSHO_TOOL_ARGS_INVALID"

    def __init__(self, message: object, *, tool_name: str | None = None, issues: Iterable[Mapping[str, str]] = ()) -> None:
        super().__init__(message, tool_name=tool_name)
        self.issues = [dict(issue) for issue in issues]


class PropagatingToolError(ToolExecutionError):
    """Raised by a tool to end the run instead of becoming a result. Subclass it to say so for your own errors."""


# ------------------------------------------------------------------------------------------------------------- providers


@dataclass(frozen=True, slots=True)
class CompactedError:
    """A failed model call in plain values.

    Attributes:
        category: `rate-limit`, `timeout`, `context-length-exceeded`, `auth-failure` or `unknown`.
        message: At most 500 characters, without secrets.
        status: HTTP status, when there was an answer.
        retry_after_ms: How long the provider asked to wait.
    """

    category: str
    message: str
    status: int | None = None
    retry_after_ms: float | None = None
    provider: str | None = None
    model: str | None = None


class LLMProviderError(LoushoError):
    """A model call failed. `status` is the HTTP status, when there was an answer."""

    default_code = "LOUSHO_PROVIDER_REQUEST_FAILED"

    def __init__(self, message: object, *, code: str | None = None, provider: str | None = None, status: int | None = None) -> None:
        super().__init__(message, code=code)
        self.provider = provider
        self.status = status


class CompactedLLMProviderError(LLMProviderError):
    """A model call failed for good. `compacted` says how; the client library's exception is `__cause__`."""

    def __init__(
        self,
        message: object,
        *,
        code: str | None = None,
        provider: str | None = None,
        status: int | None = None,
        compacted: CompactedError,
    ) -> None:
        super().__init__(message, code=code, provider=provider or compacted.provider, status=status or compacted.status)
        self.compacted = compacted

    @property
    def hint(self) -> str:
        if self.code != "LOUSHO_PROVIDER_REQUEST_FAILED":
            return super().hint
        return PROVIDER_HINTS.get(self.compacted.category, super().hint)


class RateLimitError(CompactedLLMProviderError):
    """The provider refused a model call for its rate. `retry_after` is how long it asked to wait, in seconds."""

    default_code = "LOUSHO_PROVIDER_RATE_LIMITED"

    def __init__(
        self,
        message: object,
        *,
        provider: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
        compacted: CompactedError | None = None,
    ) -> None:
        if compacted is None:
            wait_ms = None if retry_after is None else retry_after * 1000
            text = mask_secrets(str(message))[:500]
            compacted = CompactedError("rate-limit", text, status=status, retry_after_ms=wait_ms, provider=provider)
        super().__init__(message, provider=provider, status=status, compacted=compacted)
        asked_ms = compacted.retry_after_ms
        self.retry_after = retry_after if retry_after is not None or asked_ms is None else asked_ms / 1000


# --------------------------------------------------------------------------------------- pauses, limits, stores, sessions


class SessionAwaitingApprovalError(LoushoError):
    """New input or a resume while a decision is pending. `approval_kind` is `tool`, `question` or `sign-in`."""

    default_code = "LOUSHO_SESSION_AWAITING_APPROVAL"

    def __init__(self, message: object, *, session_id: str, approval_id: str, approval_kind: str) -> None:
        super().__init__(message)
        self.session_id = session_id
        self.approval_id = approval_id
        self.approval_kind = approval_kind


class SessionTurnFailedError(LoushoError):
    """The session's last turn failed for good after `attempts` tries. `last_error` is `{"name": ..., "message": ...}`."""

    default_code = "LOUSHO_SESSION_TURN_FAILED"

    def __init__(self, message: object, *, last_error: Mapping[str, Any] | None = None, attempts: int = 0) -> None:
        super().__init__(message)
        self.last_error = None if last_error is None else dict(last_error)
        self.attempts = attempts


class BudgetExceededError(LoushoError):
    """A limit tripped under `on_exceeded="throw"`. `budget` is `{"limit", "value", "max", "scope"}`."""

    default_code = "LOUSHO_BUDGET_EXCEEDED"

    def __init__(self, message: object, *, budget: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.budget = dict(budget)


class GuardrailError(LoushoError):
    """A guardrail blocked under `on_tripped="throw"`. `guardrail` is `{"name", "kind", "reason", "toolName"?, "info"?}`."""

    default_code = "LOUSHO_GUARDRAIL_TRIPPED"

    def __init__(self, message: object, *, guardrail: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.guardrail = dict(guardrail)


class StorageError(LoushoError):
    """A store cannot open, read or write. `path` is the file or address."""

    default_code = "LOUSHO_STORAGE_FAILED"

    def __init__(self, message: object, *, code: str | None = None, path: str | None = None) -> None:
        super().__init__(message, code=code)
        self.path = path


class AgentDriftError(LoushoError):
    """A resume by an agent that changed since the run was saved. `changes` says what: the fields of the `agent.drift` event."""

    default_code = "LOUSHO_AGENT_DRIFT"

    def __init__(self, message: object, *, changes: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.changes = dict(changes)


class ResumeToolMissingError(LoushoError):
    """A resumed run has a pending call of a tool the agent no longer has."""

    default_code = "LOUSHO_RESUME_TOOL_MISSING"

    def __init__(self, message: object, *, tool_name: str) -> None:
        super().__init__(message)
        self.tool_name = tool_name


# ----------------------------------------------------------------------------------------------------------------- tests


class TestFailedError(LoushoError, AssertionError):
    """An eval failed, or scripted model turns were left over. Also an `AssertionError`, so test runners report a failure."""

    __test__ = False  # pytest collects classes by this name
    default_code = "LOUSHO_TEST_FAILED"


class CassetteError(LoushoError):
    """A recording is missing, broken or does not match. `path` is its file."""

    default_code = "LOUSHO_CASSETTE_INVALID"

    def __init__(self, message: object, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class CassetteMismatchError(CassetteError):
    """A call differs from the recorded one. `cassette` is the file, `call_number` counts from 1."""

    def __init__(self, message: object, *, cassette: str, call_number: int) -> None:
        super().__init__(message, path=cassette)
        self.cassette = cassette
        self.call_number = call_number
