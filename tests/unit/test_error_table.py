"""Every error code: what provokes it, its class, its fields, and that the message names the culprit."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pydantic
import pytest

import lousho_ray
from lousho_ray import error_codes, errors, evals
from lousho_ray.create import create_agent
from lousho_ray.errors import ERROR_CODES, LoushoError
from lousho_ray.evals.definition import collecting
from lousho_ray.events import event_from_dict
from lousho_ray.messages import FilePart, user
from lousho_ray.ports import GenerateOptions
from lousho_ray.providers import OpenAICompatibleProvider, OpenAIProvider
from lousho_ray.providers.base import import_client
from lousho_ray.providers.mock import MockProvider
from lousho_ray.providers.retry import with_retry
from lousho_ray.stores.files import FileSessionStore
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing import record_replay
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.approval_policies import always
from lousho_ray.tools.builtin import builtin_tool
from lousho_ray.tools.tool import define_tool, tool
from lousho_ray.tools.workspace import LocalWorkspace, sandbox
from lousho_ray.tools.workspace.paths import WorkspaceError
from tests.unit.loop_support import PolicyProvider, agent_of, calls, failing, plain

PACKAGE = Path(lousho_ray.__file__).parent

# ------------------------------------------------------------------------------------------------------- what provokes each code


class HttpError(Exception):
    """A client library's error, as `classify` reads it."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"the server said {status}")
        self.status_code = status
        self.headers = headers


async def call_fails(error: BaseException) -> None:
    await agent_of({"error": error}, retry=False).send("Hi")


async def resolver_fails() -> None:
    def instructions(who: Any) -> str:
        raise LookupError("no row")

    await agent_of("x", instructions=instructions).send("Hi")


def package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    import_client("anthropic", "anthropic[aiohttp]")


def machine_without_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._refusal.cache_clear()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    try:
        sandbox.SubprocessSandbox()
    finally:
        sandbox._refusal.cache_clear()


async def hosted_on_chat() -> None:
    options = GenerateOptions([user("Hi")], hosted_tools=({"type": "web_search"},))  # type: ignore[arg-type]
    await OpenAIProvider(api_key="k", api="chat").generate(options)


async def odd_file() -> None:
    options = GenerateOptions([user([FilePart(b"\x00\x01", "application/x-odd")])])
    await OpenAICompatibleProvider(base_url="http://127.0.0.1:9/v1", default_model="m").generate(options)


@tool
def add(a: int) -> int:
    """Adds one."""
    return a + 1


async def propagating_tool() -> None:
    error = errors.PropagatingToolError("The order is lost.", tool_name="order")
    await agent_of(calls("order"), tools=[failing("order", error)]).send("Hi")


def asking(name: str = "pay", **options: Any) -> Any:
    """A tool that needs a person."""
    return define_tool(name=name, description="Pays.", execute=lambda args: "paid", needs_approval=True, **options)


def asker(store: Any, *more: Any, tools: Any = None, **options: Any) -> Any:
    return agent_of(calls("pay"), "Done", *more, tools=[asking()] if tools is None else tools, store=store, **options)


async def twice_decided() -> None:
    agent = asker(memory_store())
    paused = await agent.session("s").send("Hi")
    await agent.approvals.resolve(paused.approval_id, approved=True)
    await agent.approvals.resolve(paused.approval_id, approved=True)


async def forked_onto_itself() -> None:
    session = agent_of("x").session("s")
    await session.send("Hi")
    await session.fork(1, id="s")


async def forked_at_a_step_never_kept() -> None:
    agent = agent_of("x", store=memory_store())
    await agent.send("Hi", session_id="r")
    await agent.fork("r", 9)


async def decided_by_oneself() -> None:
    tool = define_tool(name="pay", description="Pays.", execute=lambda args: "paid", needs_approval=always(by="other"))
    agent = agent_of(calls("pay"), tools=[tool])
    paused = await agent.send("Hi", principal="ann")
    await agent.approvals.resolve(str(paused.approval_id), approved=True, by="ann")


async def dropped_turn() -> None:
    agent = asker(memory_store())
    session = agent.session("s")
    paused = await session.send("Hi")
    await session.discard_pending()
    await agent.approvals.resolve(paused.approval_id, approved=True)


async def input_while_waiting() -> None:
    session = asker(memory_store()).session("s")
    await session.send("Hi")
    await session.send("And?")


async def corrupt_file(folder: Path) -> None:
    (folder / "s.json").write_text('{"no": "array"}')
    await FileSessionStore(folder, fsync=False).load("s")


async def cleared_in_a_turn() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def reply(options: GenerateOptions) -> str:
        started.set()
        await go.wait()
        return "Done"

    session = create_agent(provider=PolicyProvider(reply)).session("s")
    turn = asyncio.ensure_future(session.send("Hi"))
    await started.wait()
    try:
        await session.clear()
    finally:
        go.set()
        await turn


async def compacted_too_early() -> None:
    session = create_agent(provider=mock_model([HttpError(500)]), retry=False, store=memory_store()).session("s")
    with pytest.raises(errors.CompactedLLMProviderError):
        await session.send("Hi")
    await session.compact()


async def failed_turn() -> None:
    session = create_agent(provider=mock_model([HttpError(401)]), retry=False, store=memory_store()).session("s")
    with pytest.raises(errors.CompactedLLMProviderError):
        await session.send("Hi")
    await session.send("Again")


async def resumed_by(**changed: Any) -> None:
    """A pause that is decided on by an agent that differs from the one that paused."""
    store = memory_store()
    paused = await asker(store).session("s").send("Hi")
    await asker(store, **changed).approvals.resolve(paused.approval_id, approved=True)


async def iterated_twice() -> None:
    run = agent_of("Done").stream("Hi")
    _ = [event async for event in run]
    _ = [event async for event in run]


async def closed_store() -> None:
    store = memory_store()
    store.close()
    await store.sessions.load("s")


async def script_left_over() -> None:
    mock_model(["one", "two"]).assert_exhausted()


def eval_of_nobody() -> None:
    with collecting(Path("some.eval.py")):
        evals.define_eval(name="lonely", test=print)


async def asked_remotely(status: int) -> None:
    transport = httpx2.MockTransport(lambda request: httpx2.Response(status))
    async with httpx2.AsyncClient(transport=transport) as client:
        await evals.remote_target(url="http://deployment", client=client).open().send("Hi")


async def incomplete() -> None:
    result = await agent_of(calls("a"), tools=[plain("a")], max_steps=1).send("Hi")
    result.raise_if_incomplete()


async def slow_call() -> None:
    async def never(options: GenerateOptions) -> str:
        await asyncio.Event().wait()
        return ""

    await with_retry(PolicyProvider(never), max_retries=0, timeout_ms=5).generate(GenerateOptions([user("Hi")]))


async def spent() -> None:
    usage = {"input_tokens": 8, "output_tokens": 1}
    agent = agent_of(
        calls("a", usage=usage), "never", tools=[plain("a")], limits={"max_tokens": 5, "on_exceeded": "throw"}, name="spender"
    )
    await agent.send("Hi")


def two_options() -> None:
    create_agent(provider=MockProvider(), instructions="a", prompt="a")


@dataclass(frozen=True)
class Row:
    """What provokes a code. `names` must stand in the message; `fields` are attributes with their values."""

    code: str
    raised_as: type[LoushoError]
    provoke: Callable[..., Any]
    names: str
    fields: dict[str, Any] = field(default_factory=dict)
    cause: type[BaseException] | None = None


Cfg = errors.ConfigurationError
INTEGER = "Input should be a valid integer, unable to parse string as an integer"

ROWS = [
    Row("LOUSHO_CONFIG_INVALID", Cfg, lambda: create_agent(max_steps=0), "max_steps", {"field": "max_steps"}),
    Row("LOUSHO_CONFIG_MISSING_PROVIDER", Cfg, create_agent, "LOUSHO_MODEL"),
    Row("LOUSHO_CONFIG_MISSING_INPUT", Cfg, lambda: agent_of("x").send(None), "input"),  # type: ignore[arg-type]
    Row("LOUSHO_CONFIG_CONFLICTING_OPTIONS", Cfg, two_options, "prompt", {"field": "prompt"}),
    Row(
        "LOUSHO_CONFIG_MISSING_CHECKPOINT_STORE",
        Cfg,
        lambda: agent_of("x").stream("Hi", session_id="s"),
        "session_id",
        {"field": "session_id"},
    ),
    Row("LOUSHO_CONFIG_RESOLVER_FAILED", Cfg, resolver_fails, "instructions=", {"field": "instructions"}, LookupError),
    Row("LOUSHO_PROVIDER_SPEC_INVALID", Cfg, lambda: create_agent(model="gpt-4o"), "gpt-4o", {"field": "model"}),
    Row("LOUSHO_PROVIDER_UNKNOWN", Cfg, lambda: create_agent(model="opnai/x"), "Did you mean 'openai/x'?", {"field": "model"}),
    Row("LOUSHO_PROVIDER_MISSING_API_KEY", Cfg, lambda: create_agent(model="openai/gpt-5"), "OPENAI_API_KEY"),
    Row(
        "LOUSHO_PROVIDER_REQUEST_FAILED",
        errors.CompactedLLMProviderError,
        lambda: call_fails(HttpError(400)),
        "the server said 400",
        {"provider": "mock", "status": 400},
        HttpError,
    ),
    Row(
        "LOUSHO_PROVIDER_RATE_LIMITED",
        errors.RateLimitError,
        lambda: call_fails(HttpError(429, **{"retry-after": "7"})),
        "429",
        {"provider": "mock", "status": 429},
        HttpError,
    ),
    Row(
        "LOUSHO_PEER_MISSING",
        errors.MissingDependencyError,
        package_is_missing,
        "anthropic",
        {"package": "anthropic", "install_command": "pip install 'anthropic[aiohttp]'"},
    ),
    Row(
        "LOUSHO_HOSTED_TOOL_UNSUPPORTED",
        Cfg,
        hosted_on_chat,
        "the hosted tool 'web_search'",
        {"field": "tools"},
    ),
    Row("LOUSHO_UNSUPPORTED_CONTENT", Cfg, odd_file, "application/x-odd"),
    Row("LOUSHO_TOOL_NOT_FOUND", Cfg, lambda: builtin_tool("web-fech"), "web-fetch"),
    Row("LOUSHO_TOOL_NEEDS_CREDENTIALS", Cfg, lambda: builtin_tool("jira"), "jira"),
    Row("LOUSHO_TOOL_EXECUTION_FAILED", errors.PropagatingToolError, propagating_tool, "order", {"tool_name": "order"}),
    Row(
        "LOUSHO_TOOL_ARGS_INVALID",
        errors.ToolArgumentsValidationError,
        lambda: add.parse('{"a": "x"}'),
        "'add'",
        {"tool_name": "add", "issues": [{"path": "a", "message": INTEGER}]},
    ),
    Row("LOUSHO_APPROVAL_NOT_FOUND", LoushoError, twice_decided, "appr_"),
    Row("LOUSHO_APPROVAL_FORBIDDEN", LoushoError, decided_by_oneself, "'pay'"),
    Row("LOUSHO_APPROVAL_ORPHANED", LoushoError, dropped_turn, "appr_"),
    Row(
        "LOUSHO_SESSION_AWAITING_APPROVAL",
        errors.SessionAwaitingApprovalError,
        input_while_waiting,
        "'s'",
        {"session_id": "s", "approval_kind": "tool"},
    ),
    Row("LOUSHO_SESSION_ID_INVALID", Cfg, lambda: agent_of("x").session("a b"), "a b", {"field": "id"}),
    Row("LOUSHO_SESSION_STEP_NOT_FOUND", Cfg, lambda: agent_of("x").session("s").fork(7), "7", {"field": "from_step"}),
    Row("LOUSHO_SESSION_EXISTS", Cfg, forked_onto_itself, "'s'", {"field": "id"}),
    Row("LOUSHO_CHECKPOINT_NOT_FOUND", LoushoError, forked_at_a_step_never_kept, "'r'"),
    Row("LOUSHO_SESSION_FILE_CORRUPT", errors.StorageError, corrupt_file, "s.json"),
    Row("LOUSHO_SESSION_BUSY", LoushoError, cleared_in_a_turn, "'s'"),
    Row("LOUSHO_SESSION_TURN_PENDING", LoushoError, compacted_too_early, "'s'"),
    Row("LOUSHO_SESSION_TURN_FAILED", errors.SessionTurnFailedError, failed_turn, "'s'", {"attempts": 1}),
    Row(
        "LOUSHO_AGENT_DRIFT",
        errors.AgentDriftError,
        lambda: resumed_by(instructions="New.", on_agent_drift="error"),
        "'agent'",
    ),
    Row(
        "LOUSHO_RESUME_TOOL_MISSING",
        errors.ResumeToolMissingError,
        lambda: resumed_by(tools=[plain("other")]),
        "'pay'",
        {"tool_name": "pay"},
    ),
    Row("LOUSHO_RUN_ALREADY_ITERATED", LoushoError, iterated_twice, "run"),
    Row("LOUSHO_STORAGE_FAILED", errors.StorageError, closed_store, "memory_store()"),
    Row("LOUSHO_EVALS_INVALID", LoushoError, lambda: evals.define_eval(name="a", test=print), "lousho eval"),
    Row("LOUSHO_CONFIG_MISSING_AGENT", Cfg, eval_of_nobody, "'lonely'", {"field": "agent"}),
    Row(
        "LOUSHO_CASSETTE_INVALID",
        errors.CassetteError,
        lambda: record_replay(None, cassette="gone.json", mode="replay"),
        "gone.json",
    ),
    Row("LOUSHO_REMOTE_UNAUTHORIZED", LoushoError, lambda: asked_remotely(401), "answered 401"),
    Row("LOUSHO_REMOTE_REQUEST_FAILED", LoushoError, lambda: asked_remotely(502), "answered 502"),
    Row("LOUSHO_TEST_FAILED", errors.TestFailedError, script_left_over, "2 scripted turns"),
    Row("LOUSHO_GENERIC_ERROR", LoushoError, lambda: _raise(LoushoError("Odd thing happened.")), "Odd"),
    Row("LOUSHO_AGENT_EXECUTION_FAILED", errors.AgentExecutionError, incomplete, "'max-steps'", {"agent_id": "agent"}),
    Row(
        "LOUSHO_VALIDATION_FAILED",
        errors.ValidationError,
        lambda: event_from_dict({"type": "text.delta", "runId": "r", "seq": 0, "timestamp": "t", "v": 1}),
        "text",
        {"errors": None},
    ),
    Row("LOUSHO_SANDBOX_EGRESS_UNSUPPORTED", LoushoError, machine_without_a_filter, "riscv64"),
    Row("LOUSHO_OPERATION_TIMEOUT", errors.OperationTimeoutError, slow_call, "5", {"timeout_ms": 5}),
    Row(
        "LOUSHO_BUDGET_EXCEEDED",
        errors.BudgetExceededError,
        spent,
        "maxTokens",
        {"budget": {"limit": "maxTokens", "value": 9, "max": 5, "scope": "run"}},
    ),
]

LATER = {
    "chapter 10 (the executor)": ("APPROVAL_STORE_MISSING",),
    "chapters 12 and 14 (sessions of principals)": (
        *("SESSION_STREAM_UNSUPPORTED", "SESSION_FORK_UNSUPPORTED", "SESSION_FORBIDDEN"),
        "APPROVAL_CONFLICT",
    ),
    "chapter 21 (background tasks and remote agents)": (*("SUBAGENT_TASK_NOT_FOUND", "SUBAGENT_TASK_BUSY"),),
    "chapter 23 (flows)": ("FLOW_INVALID", "FLOW_TOOL_DENIED", "FLOW_EXECUTION_FAILED"),
    "chapter 25 (guardrails)": ("GUARDRAIL_TRIPPED",),
    "chapter 27 (memory and skills)": ("MEMORY_INVALID", "SKILL_INVALID"),
    "chapter 29 (schedules and triggers)": ("SCHEDULE_INVALID", "TRIGGER_INVALID"),
    "chapter 44 (spec files and agent directories)": (
        *("SPEC_INVALID", "SPEC_UNKNOWN_FIELD", "SPEC_UNSUPPORTED_FORMAT", "SPEC_NOT_FOUND", "AGENT_DIR_INVALID"),
    ),
    "chapter 45 (MCP and its sign-in)": (
        *("MCP_AUTH_REQUIRED", "OAUTH_STORE_MISSING", "OAUTH_TOKEN_EXCHANGE_FAILED", "SIGNIN_PENDING"),
        *("TOKEN_KEY_MISSING", "TOKEN_DECRYPT_FAILED"),
    ),
    "chapters 47 and 48 (command line and server)": ("DEPLOY_FAILED", "AUTH_CONFIG_INVALID"),
    "not built: the registry": (
        *("REGISTRY_UNREACHABLE", "REGISTRY_ITEM_NOT_FOUND", "REGISTRY_INVALID", "REGISTRY_UNSAFE_PATH"),
        *("REGISTRY_FILE_EXISTS", "REGISTRY_MANIFEST_MISMATCH"),
    ),
    "never raised: an invalid answer is a result": ("OUTPUT_INVALID",),
}
"""The codes that nothing raises yet, by the chapter whose feature they come with."""

TABLE = {code: entry for group in error_codes.CODE_GROUPS.values() for code, entry in group.items()}
PROVOKED = {row.code for row in ROWS}
COMES_LATER = {f"LOUSHO_{name}" for names in LATER.values() for name in names}


async def done(provoke: Callable[..., Any], *args: Any) -> None:
    outcome = provoke(*args)
    if inspect.isawaitable(outcome):
        await outcome


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.code)
async def test_a_code_is_raised_with_its_class_and_fields_and_names_the_culprit(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ERR-29, ERR-06, ERR-10, ERR-11, ERR-12, ERR-13, ERR-14
    given = {"folder": tmp_path, "monkeypatch": monkeypatch}
    wanted = [given[name] for name in inspect.signature(row.provoke).parameters if name in given]
    with pytest.raises(LoushoError) as caught:
        await done(row.provoke, *wanted)
    error = caught.value
    assert (type(error), error.code) == (row.raised_as, row.code)
    assert row.names in error.detail
    assert error.hint not in error.detail  # ERR-02
    assert error.hint in str(error)
    assert re.fullmatch(r"[A-Z].*\.", error.hint)
    assert row.raised_as.__name__ in TABLE[row.code].raised_as.split(", ")
    for name, value in row.fields.items():
        assert getattr(error, name) == value if value is not None else getattr(error, name), name
    if row.cause is not None:
        assert isinstance(error.__cause__, row.cause)


def test_every_code_is_provoked_here_or_listed_with_the_chapter_it_comes_with() -> None:
    # ERR-29, ERR-04
    assert set(ERROR_CODES) == PROVOKED | COMES_LATER
    assert not PROVOKED & COMES_LATER


def test_a_code_that_is_listed_as_coming_later_is_used_nowhere() -> None:
    # ERR-29: once a feature raises its code, the code needs a row above.
    defaults = {"errors.py", "error_codes.py"}
    used = {
        (node.value, path.name)
        for folder in (PACKAGE, PACKAGE / "actors", PACKAGE / "stores")
        for path in folder.rglob("*.py")
        if path.name not in defaults
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in COMES_LATER
    }
    assert used == set()


# ------------------------------------------------------------------------------------------------------- what raises, what does not


async def test_ends_that_a_caller_reckons_with_are_results() -> None:
    # ERR-17
    usage = {"input_tokens": 8, "output_tokens": 1}
    spent_run = await agent_of(calls("a", usage=usage), "never", tools=[plain("a")], limits={"max_tokens": 5}).send("Hi")
    assert spent_run.finish_reason == "budget-exceeded"
    paused = await agent_of(calls("pay"), tools=[asking()]).send("Hi")
    assert paused.finish_reason == "awaiting-approval"

    class Answer(pydantic.BaseModel):
        n: int

    odd = await agent_of("no json", "still none", output=Answer).send("Hi")
    assert (odd.finish_reason, odd.object) == ("output-invalid", None)
    waiting = asyncio.Event()

    async def wait(args: Any) -> None:
        waiting.set()
        await asyncio.Event().wait()

    run = agent_of(calls("w"), tools=[define_tool(name="w", description="Waits.", execute=wait)]).stream("Hi")
    await waiting.wait()
    run.abort("enough")
    assert (await run.result).finish_reason == "aborted"


async def test_a_failing_store_raises_out_of_the_run() -> None:
    # ERR-16
    store = memory_store()
    store.close()
    with pytest.raises(errors.StorageError):
        await agent_of("Done", store=store).session("s").send("Hi")


async def test_a_batch_raises_one_error_with_notes_and_no_group() -> None:
    # ERR-D5, RUN-33
    first, second = errors.PropagatingToolError("one"), errors.PropagatingToolError("two")
    agent = agent_of(calls("a", "b"), tools=[failing("a", first), failing("b", second)])
    with pytest.raises(errors.PropagatingToolError) as caught:
        await agent.send("Hi")
    assert not isinstance(caught.value, BaseExceptionGroup)
    assert caught.value.detail == "one"
    assert any("two" in note for note in caught.value.__notes__)


def test_errors_without_an_upstream_code_have_one() -> None:
    # ERR-D2
    assert errors.PropagatingToolError("m").code == "LOUSHO_TOOL_EXECUTION_FAILED"
    assert WorkspaceError("m").code == "LOUSHO_TOOL_EXECUTION_FAILED"


def test_a_workspace_refusal_has_its_code(tmp_path: Path) -> None:
    # ERR-D2
    with pytest.raises(WorkspaceError) as caught:
        LocalWorkspace(root=tmp_path).resolve("../x")
    assert caught.value.code == "LOUSHO_TOOL_EXECUTION_FAILED"


def test_argument_issues_are_path_and_problem_without_the_value_or_a_url() -> None:
    # ERR-D6
    class Account(pydantic.BaseModel):
        number: int
        owner: str = pydantic.Field(min_length=30)

    made = define_tool(name="pay", description="Pays.", input=Account, execute=lambda args: 1)
    with pytest.raises(errors.ToolArgumentsValidationError) as caught:
        made.parse('{"number": "hunter2-secret", "owner": "hunter2"}')
    error = caught.value
    assert [issue["path"] for issue in error.issues] == ["number", "owner"]
    for text in (error.detail, *(issue["message"] for issue in error.issues)):
        assert "hunter2" not in text
        assert "http" not in text
    assert "number: " in error.detail


@pytest.mark.parametrize(
    "pair", [(errors.ConfigurationError("max_steps must be 1."), errors.ConfigurationError("limits must be a dict."))]
)
def test_a_hint_is_the_same_for_every_error_of_a_code(pair: tuple[LoushoError, LoushoError]) -> None:
    # ERR-D7
    assert pair[0].hint == pair[1].hint == ERROR_CODES["LOUSHO_CONFIG_INVALID"]
