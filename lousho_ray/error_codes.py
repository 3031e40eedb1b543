"""Every error code and what to do about it. `python -m lousho_ray.error_codes` prints the reference page, `docs/errors.md`.

Codes are stable: never renamed, never reused. A hint is one or two full sentences that hold for every error of that code; what
concerns a single case is in the error's `detail`.
"""

from __future__ import annotations

DOCS_URL = "docs"
"""Where the documentation is. `error.docs` is `<DOCS_URL>/errors.md#<code in lower case>`."""

CODE_GROUPS: dict[str, dict[str, str]] = {
    "Options and models": {
        "LOUSHO_CONFIG_INVALID": "Change the option named in the message to one of the values it allows.",
        "LOUSHO_CONFIG_MISSING_PROVIDER": (
            'Pass model="openai/gpt-4o-mini" or a provider, or set LOUSHO_MODEL, OPENAI_API_KEY, ANTHROPIC_API_KEY, '
            "OPENROUTER_API_KEY or OLLAMA_BASE_URL."
        ),
        "LOUSHO_CONFIG_MISSING_AGENT": "Pass the agent to run, or use create_agent(), which needs no executor.",
        "LOUSHO_CONFIG_MISSING_INPUT": "Pass the input as a str or as a list of messages.",
        "LOUSHO_CONFIG_CONFLICTING_OPTIONS": "Keep only one of the two options; the message says which one to keep.",
        "LOUSHO_CONFIG_MISSING_CHECKPOINT_STORE": "Pass a store with a checkpoints part, or leave session_id out.",
        "LOUSHO_CONFIG_RESOLVER_FAILED": "Fix the function given for the named option; its own exception is the cause.",
        "LOUSHO_PROVIDER_SPEC_INVALID": 'Write both parts as "provider/model", for example "openai/gpt-4o-mini".',
        "LOUSHO_PROVIDER_UNKNOWN": "Use one of the provider prefixes listed in the message, or pass a provider object.",
        "LOUSHO_PROVIDER_MISSING_API_KEY": "Set the environment variable named in the message, or pass a provider with a key.",
        "LOUSHO_PROVIDER_REQUEST_FAILED": (
            "See the cause for the provider's own words; retry later, or add fallback_models so that another model takes over."
        ),
        "LOUSHO_PROVIDER_RATE_LIMITED": "Wait for retry_after seconds, send less at a time, or set rate_limit on the agent.",
        "LOUSHO_PEER_MISSING": "Install the optional package with the pip install command in the message.",
        "LOUSHO_HOSTED_TOOL_UNSUPPORTED": (
            "Use a provider and model that run this hosted tool, as named in the message, or leave the tool out."
        ),
        "LOUSHO_UNSUPPORTED_CONTENT": (
            'Use a model that accepts this kind of content, or pass unsupported_files="note" to send a text note in its place.'
        ),
    },
    "Spec files and tools": {
        "LOUSHO_SPEC_INVALID": "Fix each field listed in the message; all problems of the file are listed at once.",
        "LOUSHO_SPEC_UNKNOWN_FIELD": "Rename the field to the suggested name, or remove it.",
        "LOUSHO_SPEC_UNSUPPORTED_FORMAT": "Rename or convert the file to .yaml, .yml or .json.",
        "LOUSHO_SPEC_NOT_FOUND": "Check the path of the spec file; a relative path starts at the current directory.",
        "LOUSHO_TOOL_NOT_FOUND": "Name one of the tools in the message, or build the agent with create_agent() and your own.",
        "LOUSHO_TOOL_NEEDS_CREDENTIALS": "Build the agent with create_agent() and pass the tool with its credentials configured.",
        "LOUSHO_TOOL_EXECUTION_FAILED": "See tool_name and the cause, and fix the tool or the input it was given.",
        "LOUSHO_TOOL_ARGS_INVALID": "See issues for what did not match, and describe those parameters better in the tool's schema.",
    },
    "Approvals and sign-in": {
        "LOUSHO_APPROVAL_STORE_MISSING": "Pass approval_store, or use create_agent(), which brings one.",
        "LOUSHO_APPROVAL_NOT_FOUND": "Use an id from approvals.list(); each approval is decided once.",
        "LOUSHO_APPROVAL_ORPHANED": "The tool was not run; send the request again to start a new turn.",
        "LOUSHO_APPROVAL_FORBIDDEN": "Let a principal who may decide this approval resolve it.",
        "LOUSHO_APPROVAL_CONFLICT": "Load the approval again: somebody else decided it first, and the first decision holds.",
        "LOUSHO_SIGNIN_PENDING": "Finish the sign-in first, then resolve the approval.",
        "LOUSHO_MCP_AUTH_REQUIRED": "Authorise the MCP server named in the message, then connect again.",
        "LOUSHO_OAUTH_STORE_MISSING": "Pass a token store to keep the sign-in's tokens in.",
        "LOUSHO_OAUTH_TOKEN_EXCHANGE_FAILED": (
            "Sign in again; if it fails again, check the client id, its secret and the redirect address."
        ),
    },
    "Sessions and durable runs": {
        "LOUSHO_SESSION_AWAITING_APPROVAL": "Resolve approval_id first, or call discard_pending() to drop the paused turn.",
        "LOUSHO_SESSION_ID_INVALID": "Use letters, digits, '_' and '-', as in 'customer-42', or leave the id out to get one.",
        "LOUSHO_SESSION_FILE_CORRUPT": "Restore the file named by path from a backup, or delete it to start the session anew.",
        "LOUSHO_SESSION_BUSY": "Await or abort the running turn, then call again.",
        "LOUSHO_SESSION_FORBIDDEN": "Use the principal the session belongs to, or another session id.",
        "LOUSHO_SESSION_TURN_PENDING": "Call resume() to finish the interrupted turn, or discard_pending() to drop it.",
        "LOUSHO_SESSION_TURN_FAILED": "Call resume() once the cause is fixed, or discard_pending() to drop the turn.",
        "LOUSHO_SESSION_STREAM_UNSUPPORTED": "Get the session from agent.session(), which can stream.",
        "LOUSHO_SESSION_FORK_UNSUPPORTED": "Get the session from agent.session(), which can fork.",
        "LOUSHO_SESSION_STEP_NOT_FOUND": "Pass a step inside the range given in the message.",
        "LOUSHO_SESSION_EXISTS": "Choose another id for the fork, or leave it out to get a new one.",
        "LOUSHO_CHECKPOINT_NOT_FOUND": "Choose one of the steps listed in the message, or raise history_limit to keep more.",
        "LOUSHO_AGENT_DRIFT": "Resume with the agent that started the run, or relax on_agent_drift.",
        "LOUSHO_RESUME_TOOL_MISSING": "Give the agent the tool named by tool_name again, or drop the run.",
        "LOUSHO_RUN_ALREADY_ITERATED": "Collect the events in the first loop, or call stream() again for another run.",
    },
    "Sub-agents and remote agents": {
        "LOUSHO_SUBAGENT_TASK_NOT_FOUND": "Pass a taskId of this session and agent, or none to start a new task.",
        "LOUSHO_SUBAGENT_TASK_BUSY": "Wait for the task with agent_await, or stop it with agent_cancel, before continuing it.",
        "LOUSHO_REMOTE_UNAUTHORIZED": "Set the token that the remote agent expects.",
        "LOUSHO_REMOTE_REQUEST_FAILED": "Check the remote agent's url, its health endpoint and its logs.",
    },
    "Definitions": {
        "LOUSHO_SCHEDULE_INVALID": "Fix the schedule's field named in the message, following the rule given there.",
        "LOUSHO_TRIGGER_INVALID": "Define the trigger like the working example in the message.",
        "LOUSHO_MEMORY_INVALID": "Let the file in memory/ export a memory slot, as the message describes.",
        "LOUSHO_AGENT_DIR_INVALID": "Fix the file named in the message.",
        "LOUSHO_SKILL_INVALID": "Give each skill a unique name, a description and content.",
        "LOUSHO_FLOW_INVALID": "Fix the part of the flow named in the message.",
        "LOUSHO_FLOW_TOOL_DENIED": "See in the message who refused; pass approve, or make the flow durable so that it can pause.",
        "LOUSHO_AUTH_CONFIG_INVALID": "Change the route auth option named in the message to one that can verify a caller.",
    },
    "Stores, secrets and deployment": {
        "LOUSHO_STORAGE_FAILED": (
            "Check that the place exists, is writable, has room and was not written by a newer version; after close() open another."
        ),
        "LOUSHO_TOKEN_KEY_MISSING": "Set LOUSHO_TOKEN_KEY to the key that encrypts stored secrets.",
        "LOUSHO_TOKEN_DECRYPT_FAILED": "Set LOUSHO_TOKEN_KEY to the key the secret was stored with, or sign in again.",
        "LOUSHO_DEPLOY_FAILED": "Follow the message, then run the command again.",
        "LOUSHO_SANDBOX_EGRESS_UNSUPPORTED": "Use the alternative named in the message: the sandbox cannot enforce this rule.",
    },
    "Registry": {
        "LOUSHO_REGISTRY_UNREACHABLE": "Check the registry's url and your connection.",
        "LOUSHO_REGISTRY_ITEM_NOT_FOUND": "Use the closest name in the message, or list all items with --list.",
        "LOUSHO_REGISTRY_INVALID": "Tell the registry's owner about the malformed field named in the message.",
        "LOUSHO_REGISTRY_UNSAFE_PATH": "Do not install this item: it tried to write outside its folder. Nothing was written.",
        "LOUSHO_REGISTRY_FILE_EXISTS": "Pass --overwrite, or move the existing file away. Nothing was written.",
        "LOUSHO_REGISTRY_MANIFEST_MISMATCH": (
            "Review the findings (file:line): the item's code does more than its permission manifest says. Nothing was written."
        ),
    },
    "Tests and evals": {
        "LOUSHO_EVALS_INVALID": "Call the eval helpers in the order given in the message.",
        "LOUSHO_TEST_FAILED": "See the message for the cases that failed or the scripted turns that are left over.",
        "LOUSHO_CASSETTE_INVALID": "Record the cassette again.",
    },
    "Running": {
        "LOUSHO_GENERIC_ERROR": "Read the message; no more specific code exists for this failure.",
        "LOUSHO_AGENT_EXECUTION_FAILED": "See the cause; a durable run can go on with resume().",
        "LOUSHO_FLOW_EXECUTION_FAILED": "See step for the step that failed, and the cause for why.",
        "LOUSHO_VALIDATION_FAILED": "Correct the fields listed in errors.",
        "LOUSHO_OPERATION_TIMEOUT": "Raise timeout_ms, or make the operation faster.",
        "LOUSHO_OUTPUT_INVALID": "Look at result.output_error; this code is reserved and is not raised.",
        "LOUSHO_BUDGET_EXCEEDED": 'Raise the limit named in error.budget, or use on_exceeded="stop" to get a result instead.',
        "LOUSHO_GUARDRAIL_TRIPPED": 'See error.guardrail for what was blocked, or use on_tripped="stop" to get a result instead.',
    },
}

ERROR_CODES: dict[str, str] = {code: hint for group in CODE_GROUPS.values() for code, hint in group.items()}
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
        "exception caused it, `__cause__`. Codes are stable; message texts are not: branch on `error.code`.",
        "",
        "This page is made by `python -m lousho_ray.error_codes > docs/errors.md`.",
        "",
    ]
    for title, codes in CODE_GROUPS.items():
        lines += [f"## {title}", ""]
        for code, hint in codes.items():
            lines += [f"### {code}", "", hint, ""]
            if code == "LOUSHO_PROVIDER_REQUEST_FAILED":
                lines += ["By `error.compacted.category`:", ""]
                lines += [f"- `{category}`: {text}" for category, text in PROVIDER_HINTS.items()] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference_page(), end="")  # noqa: T201 - this is the command's output
