"""Every error code, when it is raised and what to do about it: the source of the reference page `docs/errors.md`.

Codes are stable: never renamed, never reused. A hint is one or two full sentences that hold for every error of that code; what
concerns a single case is in the error's `detail`.
"""

from __future__ import annotations

from typing import NamedTuple

DOCS_URL = "docs"
"""Where the documentation is. `error.docs` is `<DOCS_URL>/errors.md#<code in lower case>`."""


class ErrorCode(NamedTuple):
    """One code: the classes that carry it (none for a reserved code), when it is raised, and what to do."""

    raised_as: str
    raised_when: str
    hint: str


CODE_GROUPS: dict[str, dict[str, ErrorCode]] = {
    "Options and models": {
        "LOUSHO_CONFIG_INVALID": ErrorCode(
            "ConfigurationError",
            "An option or argument cannot be used: wrong type, out of range, unknown key, duplicate name.",
            "Change the option named in the message to one of the values it allows.",
        ),
        "LOUSHO_CONFIG_MISSING_PROVIDER": ErrorCode(
            "ConfigurationError",
            "There is neither a model nor a provider, and the environment names none.",
            (
                'Pass model="openai/gpt-4o-mini" or a provider, or set LOUSHO_MODEL, OPENAI_API_KEY, '
                "ANTHROPIC_API_KEY, OPENROUTER_API_KEY or OLLAMA_BASE_URL."
            ),
        ),
        "LOUSHO_CONFIG_MISSING_AGENT": ErrorCode(
            "ConfigurationError",
            "An executor was called without an agent.",
            "Pass the agent to run, or use create_agent(), which needs no executor.",
        ),
        "LOUSHO_CONFIG_MISSING_INPUT": ErrorCode(
            "ConfigurationError", "An executor was called without input.", "Pass the input as a str or as a list of messages."
        ),
        "LOUSHO_CONFIG_CONFLICTING_OPTIONS": ErrorCode(
            "ConfigurationError",
            "Two options that mean the same were both given.",
            "Keep only one of the two options; the message says which one to keep.",
        ),
        "LOUSHO_CONFIG_MISSING_CHECKPOINT_STORE": ErrorCode(
            "ConfigurationError",
            "A session_id or a resume needs a checkpoint store and there is none.",
            "Pass a store with a checkpoints part, or leave session_id out.",
        ),
        "LOUSHO_CONFIG_RESOLVER_FAILED": ErrorCode(
            "ConfigurationError",
            "A function given as an option raised, or returned a value of a wrong type.",
            "Fix the function given for the named option; its own exception is the cause.",
        ),
        "LOUSHO_PROVIDER_SPEC_INVALID": ErrorCode(
            "ConfigurationError",
            "A model string does not have the form provider/model.",
            'Write both parts as "provider/model", for example "openai/gpt-4o-mini".',
        ),
        "LOUSHO_PROVIDER_UNKNOWN": ErrorCode(
            "ConfigurationError",
            "The part of a model string before the slash is no known provider.",
            "Use one of the provider prefixes listed in the message, or pass a provider object.",
        ),
        "LOUSHO_PROVIDER_MISSING_API_KEY": ErrorCode(
            "ConfigurationError",
            "The environment variable with the provider's key is not set.",
            "Set the environment variable named in the message, or pass a provider with a key.",
        ),
        "LOUSHO_PROVIDER_REQUEST_FAILED": ErrorCode(
            "LLMProviderError, CompactedLLMProviderError",
            "A model call failed for good.",
            ("See the cause for the provider's own words; retry later, or add fallback_models so that another model takes over."),
        ),
        "LOUSHO_PROVIDER_RATE_LIMITED": ErrorCode(
            "RateLimitError",
            "The provider still answered 429 after the retries.",
            "Wait for retry_after seconds, send less at a time, or set rate_limit on the agent.",
        ),
        "LOUSHO_PEER_MISSING": ErrorCode(
            "MissingDependencyError",
            "A feature needs an optional package that is not installed.",
            "Install the optional package with the pip install command in the message.",
        ),
        "LOUSHO_HOSTED_TOOL_UNSUPPORTED": ErrorCode(
            "ConfigurationError",
            "The provider cannot run a tool that it should host.",
            "Use a provider and model that run this hosted tool, as named in the message, or leave the tool out.",
        ),
        "LOUSHO_UNSUPPORTED_CONTENT": ErrorCode(
            "ConfigurationError",
            "A message has a part that the provider cannot carry; no request was made.",
            ('Use a model that accepts this kind of content, or pass unsupported_files="note" to send a text note in its place.'),
        ),
    },
    "Spec files and tools": {
        "LOUSHO_SPEC_INVALID": ErrorCode(
            "ConfigurationError",
            "A spec file has invalid fields.",
            "Fix each field listed in the message; all problems of the file are listed at once.",
        ),
        "LOUSHO_SPEC_UNKNOWN_FIELD": ErrorCode(
            "ConfigurationError",
            "A spec file is valid but for a field that looks like a typing error.",
            "Rename the field to the suggested name, or remove it.",
        ),
        "LOUSHO_SPEC_UNSUPPORTED_FORMAT": ErrorCode(
            "ConfigurationError",
            "A spec file has an extension that is not read.",
            "Rename or convert the file to .yaml, .yml or .json.",
        ),
        "LOUSHO_SPEC_NOT_FOUND": ErrorCode(
            "ConfigurationError",
            "There is no spec file at the path.",
            "Check the path of the spec file; a relative path starts at the current directory.",
        ),
        "LOUSHO_TOOL_NOT_FOUND": ErrorCode(
            "ConfigurationError",
            "A spec file names a tool that does not exist.",
            "Name one of the tools in the message, or build the agent with create_agent() and your own.",
        ),
        "LOUSHO_TOOL_NEEDS_CREDENTIALS": ErrorCode(
            "ConfigurationError",
            "A spec file names a tool that only works with credentials.",
            "Build the agent with create_agent() and pass the tool with its credentials configured.",
        ),
        "LOUSHO_TOOL_EXECUTION_FAILED": ErrorCode(
            "ToolExecutionError, PropagatingToolError",
            "A tool failed; mostly the model gets this as the call's result.",
            "See tool_name and the cause, and fix the tool or the input it was given.",
        ),
        "LOUSHO_TOOL_ARGS_INVALID": ErrorCode(
            "ToolArgumentsValidationError",
            "The arguments of a call do not match the tool's schema.",
            "See issues for what did not match, and describe those parameters better in the tool's schema.",
        ),
    },
    "Approvals and sign-in": {
        "LOUSHO_APPROVAL_STORE_MISSING": ErrorCode(
            "ConfigurationError",
            "A call of a bare executor run would pause, and there is nowhere to keep the pause.",
            "Pass approval_store, or use create_agent(), which brings one.",
        ),
        "LOUSHO_APPROVAL_NOT_FOUND": ErrorCode(
            "LoushoError",
            "The approval id is unknown, or was decided before.",
            "Use an id from approvals.list(); each approval is decided once.",
        ),
        "LOUSHO_APPROVAL_ORPHANED": ErrorCode(
            "LoushoError",
            "The turn that waited for this approval is gone.",
            "The tool was not run; send the request again to start a new turn.",
        ),
        "LOUSHO_APPROVAL_FORBIDDEN": ErrorCode(
            "LoushoError", "The caller may not decide this approval.", "Let a principal who may decide this approval resolve it."
        ),
        "LOUSHO_APPROVAL_CONFLICT": ErrorCode(
            "LoushoError",
            "Two callers decided one approval at the same time; the other was first.",
            "Load the approval again: somebody else decided it first, and the first decision holds.",
        ),
        "LOUSHO_SIGNIN_PENDING": ErrorCode(
            "LoushoError",
            "A sign-in pause was resolved before the sign-in took place.",
            "Finish the sign-in first, then resolve the approval.",
        ),
        "LOUSHO_MCP_AUTH_REQUIRED": ErrorCode(
            "LoushoError",
            "An MCP server wants a sign-in first.",
            "Authorise the MCP server named in the message, then connect again.",
        ),
        "LOUSHO_OAUTH_STORE_MISSING": ErrorCode(
            "ConfigurationError",
            "A sign-in needs a token store and there is none.",
            "Pass a token store to keep the sign-in's tokens in.",
        ),
        "LOUSHO_OAUTH_TOKEN_EXCHANGE_FAILED": ErrorCode(
            "LoushoError",
            "The authorization server refused to give a token.",
            "Sign in again; if it fails again, check the client id, its secret and the redirect address.",
        ),
    },
    "Sessions and durable runs": {
        "LOUSHO_SESSION_AWAITING_APPROVAL": ErrorCode(
            "SessionAwaitingApprovalError",
            "New input, or a resume, came while the session waits for a decision.",
            "Resolve approval_id first, or call discard_pending() to drop the paused turn.",
        ),
        "LOUSHO_SESSION_ID_INVALID": ErrorCode(
            "ConfigurationError",
            "An id has characters or a length that ids may not have.",
            "Use letters, digits, '_' and '-', as in 'customer-42', or leave the id out to get one.",
        ),
        "LOUSHO_SESSION_FILE_CORRUPT": ErrorCode(
            "StorageError",
            "A session file does not hold a JSON array of messages.",
            "Restore the file named by path from a backup, or delete it to start the session anew.",
        ),
        "LOUSHO_SESSION_BUSY": ErrorCode(
            "LoushoError",
            "The session has a turn running, in this process or in another one.",
            "Await or abort the running turn, then call again.",
        ),
        "LOUSHO_SESSION_FORBIDDEN": ErrorCode(
            "LoushoError",
            "The session belongs to another principal.",
            "Use the principal the session belongs to, or another session id.",
        ),
        "LOUSHO_SESSION_TURN_PENDING": ErrorCode(
            "LoushoError",
            "The session has an interrupted turn that must be settled first.",
            "Call resume() to finish the interrupted turn, or discard_pending() to drop it.",
        ),
        "LOUSHO_SESSION_TURN_FAILED": ErrorCode(
            "SessionTurnFailedError",
            "The session's last turn failed for good.",
            "Call resume() once the cause is fixed, or discard_pending() to drop the turn.",
        ),
        "LOUSHO_SESSION_STREAM_UNSUPPORTED": ErrorCode(
            "LoushoError",
            "A session built by hand has nothing that can stream.",
            "Get the session from agent.session(), which can stream.",
        ),
        "LOUSHO_SESSION_FORK_UNSUPPORTED": ErrorCode(
            "LoushoError",
            "A session built by hand has nothing that can make another session.",
            "Get the session from agent.session(), which can fork.",
        ),
        "LOUSHO_SESSION_STEP_NOT_FOUND": ErrorCode(
            "ConfigurationError",
            "A fork starts at a step that the session does not have.",
            "Pass a step inside the range given in the message.",
        ),
        "LOUSHO_SESSION_EXISTS": ErrorCode(
            "ConfigurationError",
            "A fork was given the id of a session that exists.",
            "Choose another id for the fork, or leave it out to get a new one.",
        ),
        "LOUSHO_CHECKPOINT_NOT_FOUND": ErrorCode(
            "LoushoError",
            "A fork starts at a step whose checkpoint is not kept.",
            "Choose one of the steps listed in the message, or raise history_limit to keep more.",
        ),
        "LOUSHO_AGENT_DRIFT": ErrorCode(
            "AgentDriftError",
            'The agent changed since the run was saved, and on_agent_drift is "error".',
            "Resume with the agent that started the run, or relax on_agent_drift.",
        ),
        "LOUSHO_RESUME_TOOL_MISSING": ErrorCode(
            "ResumeToolMissingError",
            "A resumed run waits on a tool that the agent no longer has.",
            "Give the agent the tool named by tool_name again, or drop the run.",
        ),
        "LOUSHO_RUN_ALREADY_ITERATED": ErrorCode(
            "LoushoError",
            "The events of one run were iterated a second time.",
            "Collect the events in the first loop, or call stream() again for another run.",
        ),
    },
    "Sub-agents and remote agents": {
        "LOUSHO_SUBAGENT_TASK_NOT_FOUND": ErrorCode(
            "LoushoError",
            "The model named a taskId that this session and agent do not have; it gets this as the call's result.",
            "Pass a taskId of this session and agent, or none to start a new task.",
        ),
        "LOUSHO_SUBAGENT_TASK_BUSY": ErrorCode(
            "LoushoError",
            "The model continued a task that still runs; it gets this as the call's result.",
            "Wait for the task with agent_await, or stop it with agent_cancel, before continuing it.",
        ),
        "LOUSHO_REMOTE_UNAUTHORIZED": ErrorCode(
            "LoushoError", "A remote agent answered 401.", "Set the token that the remote agent expects."
        ),
        "LOUSHO_REMOTE_REQUEST_FAILED": ErrorCode(
            "LoushoError",
            "A remote agent cannot be reached, answered with an error, or broke off its stream.",
            "Check the remote agent's url, its health endpoint and its logs.",
        ),
    },
    "Definitions": {
        "LOUSHO_SCHEDULE_INVALID": ErrorCode(
            "ConfigurationError",
            "A cron expression or a schedule is wrong.",
            "Fix the schedule's field named in the message, following the rule given there.",
        ),
        "LOUSHO_TRIGGER_INVALID": ErrorCode(
            "ConfigurationError",
            "The options of a trigger are wrong.",
            "Define the trigger like the working example in the message.",
        ),
        "LOUSHO_MEMORY_INVALID": ErrorCode(
            "ConfigurationError",
            "A file in memory/ gives no memory slot.",
            "Let the file in memory/ export a memory slot, as the message describes.",
        ),
        "LOUSHO_AGENT_DIR_INVALID": ErrorCode(
            "ConfigurationError", "An agent directory cannot be loaded.", "Fix the file named in the message."
        ),
        "LOUSHO_SKILL_INVALID": ErrorCode(
            "ConfigurationError",
            "A skill is malformed, or two have the same name.",
            "Give each skill a unique name, a description and content.",
        ),
        "LOUSHO_FLOW_INVALID": ErrorCode(
            "ConfigurationError", "The definition of a flow is wrong.", "Fix the part of the flow named in the message."
        ),
        "LOUSHO_FLOW_TOOL_DENIED": ErrorCode(
            "FlowExecutionError",
            "The tool of a flow step was refused, rejected, or could not be approved.",
            "See in the message who refused; pass approve, or make the flow durable so that it can pause.",
        ),
        "LOUSHO_AUTH_CONFIG_INVALID": ErrorCode(
            "ConfigurationError",
            "A route's auth helper was given options it cannot verify anybody with.",
            "Change the route auth option named in the message to one that can verify a caller.",
        ),
    },
    "Stores, secrets and deployment": {
        "LOUSHO_STORAGE_FAILED": ErrorCode(
            "StorageError",
            "A store cannot be opened, read or written, or is closed, locked or of a newer version.",
            (
                "Check that the place exists, is writable, has room and was not written by a newer version; after "
                "close() open another."
            ),
        ),
        "LOUSHO_TOKEN_KEY_MISSING": ErrorCode(
            "LoushoError",
            "A secret was to be stored or read without a key to encrypt it; reserved.",
            "Set LOUSHO_TOKEN_KEY to the key that encrypts stored secrets.",
        ),
        "LOUSHO_TOKEN_DECRYPT_FAILED": ErrorCode(
            "LoushoError",
            "A stored secret cannot be decrypted; reserved.",
            "Set LOUSHO_TOKEN_KEY to the key the secret was stored with, or sign in again.",
        ),
        "LOUSHO_DEPLOY_FAILED": ErrorCode(
            "LoushoError",
            "lousho build or lousho dev could not bundle or start the agent.",
            "Follow the message, then run the command again.",
        ),
        "LOUSHO_SANDBOX_EGRESS_UNSUPPORTED": ErrorCode(
            "LoushoError",
            "A sandbox cannot enforce the network rule it was asked for.",
            "Use the alternative named in the message: the sandbox cannot enforce this rule.",
        ),
    },
    "Registry": {
        "LOUSHO_REGISTRY_UNREACHABLE": ErrorCode(
            "LoushoError", "The registry cannot be read.", "Check the registry's url and your connection."
        ),
        "LOUSHO_REGISTRY_ITEM_NOT_FOUND": ErrorCode(
            "LoushoError",
            "The registry has no item of this name.",
            "Use the closest name in the message, or list all items with --list.",
        ),
        "LOUSHO_REGISTRY_INVALID": ErrorCode(
            "LoushoError",
            "A document of the registry is malformed.",
            "Tell the registry's owner about the malformed field named in the message.",
        ),
        "LOUSHO_REGISTRY_UNSAFE_PATH": ErrorCode(
            "LoushoError",
            "An item would write outside its folder.",
            "Do not install this item: it tried to write outside its folder. Nothing was written.",
        ),
        "LOUSHO_REGISTRY_FILE_EXISTS": ErrorCode(
            "LoushoError",
            "A file that an item would write exists already.",
            "Pass --overwrite, or move the existing file away. Nothing was written.",
        ),
        "LOUSHO_REGISTRY_MANIFEST_MISMATCH": ErrorCode(
            "LoushoError",
            "The code of an item needs more than its permission manifest allows.",
            ("Review the findings (file:line): the item's code does more than its permission manifest says. Nothing was written."),
        ),
    },
    "Tests and evals": {
        "LOUSHO_EVALS_INVALID": ErrorCode(
            "LoushoError",
            "Evals were not found, or an eval helper was used in the wrong way.",
            "Do what the message says; docs/evals.md has a first eval to start from.",
        ),
        "LOUSHO_TEST_FAILED": ErrorCode(
            "TestFailedError",
            "An eval failed, or scripted model turns were left over.",
            "See the message for the cases that failed or the scripted turns that are left over.",
        ),
        "LOUSHO_CASSETTE_INVALID": ErrorCode(
            "CassetteError, CassetteMismatchError",
            "A recording is missing, broken, or does not match what was asked.",
            "Record the cassette again.",
        ),
    },
    "Running": {
        "LOUSHO_GENERIC_ERROR": ErrorCode(
            "LoushoError",
            "Something failed that has no code of its own.",
            "Read the message; no more specific code exists for this failure.",
        ),
        "LOUSHO_AGENT_EXECUTION_FAILED": ErrorCode(
            "AgentExecutionError",
            "Running an agent failed, or the process that ran it died.",
            "See the cause; a durable run can go on with resume().",
        ),
        "LOUSHO_FLOW_EXECUTION_FAILED": ErrorCode(
            "FlowExecutionError", "A step of a flow failed.", "See step for the step that failed, and the cause for why."
        ),
        "LOUSHO_VALIDATION_FAILED": ErrorCode(
            "ValidationError", "Input does not have the form it must have.", "Correct the fields listed in errors."
        ),
        "LOUSHO_OPERATION_TIMEOUT": ErrorCode(
            "OperationTimeoutError",
            "An operation took longer than it was allowed.",
            "Raise timeout_ms, or make the operation faster.",
        ),
        "LOUSHO_OUTPUT_INVALID": ErrorCode(
            "",
            "Reserved: an invalid final answer is a result, not an exception.",
            "Look at result.output_error; this code is reserved and is not raised.",
        ),
        "LOUSHO_BUDGET_EXCEEDED": ErrorCode(
            "BudgetExceededError",
            'A limit was reached and on_exceeded is "throw".',
            'Raise the limit named in error.budget, or use on_exceeded="stop" to get a result instead.',
        ),
        "LOUSHO_GUARDRAIL_TRIPPED": ErrorCode(
            "GuardrailError",
            'A guardrail blocked and on_tripped is "throw".',
            'See error.guardrail for what was blocked, or use on_tripped="stop" to get a result instead.',
        ),
    },
}

ERROR_CODES: dict[str, str] = {code: entry.hint for group in CODE_GROUPS.values() for code, entry in group.items()}
"""Every code and its hint."""

PROVIDER_HINTS: dict[str, str] = {
    "rate-limit": ERROR_CODES["LOUSHO_PROVIDER_RATE_LIMITED"],
    "timeout": "Retry later, raise timeout_ms, or add fallback_models so that another model takes over.",
    "context-length-exceeded": "Shorten the conversation, or turn on compaction with create_agent(compaction=True).",
    "auth-failure": "Fix the API key: check that it is set, valid and allowed to use this model.",
    "unknown": ERROR_CODES["LOUSHO_PROVIDER_REQUEST_FAILED"],
}
"""The hint of a failed model call, by `CompactedError.category`."""


def docs_link(code: str) -> str:
    """Where the reference page tells about `code`."""
    return f"{DOCS_URL}/errors.md#{code.lower()}"


def reference_page() -> str:
    """The text of `docs/errors.md`."""
    lines = [
        "# Errors",
        "",
        "Every error raised on purpose derives from `LoushoError` and has `code`, `hint`, `docs`, `detail` and, where another",
        "exception caused it, `__cause__`. Codes are stable, message texts are not: branch on `error.code`.",
    ]
    for title, codes in CODE_GROUPS.items():
        lines += ["", f"## {title}"]
        for code, entry in codes.items():
            classes = " / ".join(f"`{name}`" for name in entry.raised_as.split(", ") if name)
            lines += [
                "",
                f"### {code}",
                "",
                f"{entry.raised_when}{' ' + classes + '.' if classes else ''}",
                "",
                f"**What to do:** {entry.hint}",
            ]
            if code == "LOUSHO_PROVIDER_REQUEST_FAILED":
                lines += ["", "By `error.compacted.category`:", ""]
                lines += [f"- `{category}`: {text}" for category, text in PROVIDER_HINTS.items()]
    return "\n".join(lines) + "\n"
