"""The names on spans: those of the OpenTelemetry conventions for generative AI (v1.40), and our own under `lousho.`.

They are written out here because the OpenTelemetry package marks its constants for them as moved.
"""

from __future__ import annotations

from typing import Final

# --------------------------------------------------------------------------------------------------------------- operations

INVOKE_AGENT: Final = "invoke_agent"
INVOKE_WORKFLOW: Final = "invoke_workflow"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"

# -------------------------------------------------------------------------------------------------------- attributes: gen_ai

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
AGENT_ID: Final = "gen_ai.agent.id"
AGENT_NAME: Final = "gen_ai.agent.name"
WORKFLOW_NAME: Final = "gen_ai.workflow.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
OUTPUT_TYPE: Final = "gen_ai.output.type"

REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_SETTINGS: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stop": "gen_ai.request.stop_sequences",
    "seed": "gen_ai.request.seed",
}
"""The attribute of each model setting that has one."""

RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"

INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_CREATION_TOKENS: Final = "gen_ai.usage.cache_creation.input_tokens"

TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_DESCRIPTION: Final = "gen_ai.tool.description"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"

INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
TOOL_CALL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT: Final = "gen_ai.tool.call.result"

ERROR_TYPE: Final = "error.type"

# -------------------------------------------------------------------------------------------------------- attributes: lousho

COST_USD: Final = "lousho.cost_usd"
USAGE_ESTIMATED: Final = "lousho.usage.estimated"
REASONING_TOKENS: Final = "lousho.usage.reasoning_tokens"
FINISH_REASON: Final = "lousho.finish_reason"
STEPS: Final = "lousho.steps"
PURPOSE: Final = "lousho.purpose"
HOSTED_TOOL_CALLS: Final = "lousho.hosted_tool_calls"
RETRY_COUNT: Final = "lousho.retry.count"
RETRY_ERRORS: Final = "lousho.retry.errors"
RATE_LIMIT_WAIT_MS: Final = "lousho.rate_limit.wait_ms"
RESUMED_FROM: Final = "lousho.resumed_from"
SPAN_ID: Final = "lousho.span_id"
TRACE_ID: Final = "lousho.trace_id"
PARENT_SPAN_ID: Final = "lousho.parent_span_id"
PARENT_TOOL_CALL_ID: Final = "lousho.tool.parent_call_id"
NODE_ID: Final = "ray.node_id"
ACTOR_ID: Final = "ray.actor_id"

# ---------------------------------------------------------------------------------------------------- deprecated attributes


class Deprecated:
    """The names that spans had before the conventions. They are still set; the last four only under `redact_content=False`."""

    MODEL: Final = "model"
    PROMPT_TOKENS: Final = "promptTokens"
    COMPLETION_TOKENS: Final = "completionTokens"
    TOTAL_TOKENS: Final = "totalTokens"
    FINISH_REASON: Final = "finishReason"
    TOOL_NAME: Final = "toolName"
    LATENCY_MS: Final = "latencyMs"
    ERROR: Final = "error"
    INPUT: Final = "input"
    PROMPT: Final = "prompt"
    ARGS: Final = "args"
    RESULT: Final = "result"


# ------------------------------------------------------------------------------------------------------------------- metrics

TOKEN_TYPE: Final = "gen_ai.token.type"
TOKEN_USAGE: Final = "gen_ai.client.token.usage"
OPERATION_DURATION: Final = "gen_ai.client.operation.duration"
