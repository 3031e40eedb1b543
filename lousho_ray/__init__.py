"""lousho_ray: an actor-model runtime on Ray for LLM agents.

`create_agent(...)` gives an agent that runs the same in a notebook, a script, a Ray job and on a cluster. Names are loaded when
they are first used: importing the package imports neither `ray` nor a provider client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lousho_ray.logs import mask_records

if TYPE_CHECKING:
    from lousho_ray.actors.metrics import ray_metrics_exporter
    from lousho_ray.agent import Agent
    from lousho_ray.agent_options import CreateAgentOptions
    from lousho_ray.cancellation import AbortSignal, CancelToken
    from lousho_ray.context.compaction import CompactionInfo, create_compaction_hook
    from lousho_ray.context.manual import compact_messages
    from lousho_ray.context.pins import is_pinned, pin_message
    from lousho_ray.context.strategies import prune_tool_results_strategy, summarize_strategy, two_phase_strategy
    from lousho_ray.context.strategy import CompactionInput, CompactionOutput
    from lousho_ray.create import create_agent
    from lousho_ray.errors import (
        AgentExecutionError,
        BudgetExceededError,
        CompactedLLMProviderError,
        ConfigurationError,
        GuardrailError,
        LLMProviderError,
        LoushoError,
        MissingDependencyError,
        OperationTimeoutError,
        PropagatingToolError,
        RateLimitError,
        SDKError,
        SessionAwaitingApprovalError,
        StorageError,
        ToolArgumentsValidationError,
        ToolExecutionError,
        ValidationError,
    )
    from lousho_ray.events import Event, event_from_dict, is_agent_event
    from lousho_ray.exporters import combine_exporters, worker_local
    from lousho_ray.handle import AgentRun
    from lousho_ray.hosted_tools import HostedTool, code_interpreter, file_search, hosted_tool, web_search
    from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter
    from lousho_ray.loop.result import ExecutionResult
    from lousho_ray.messages import FilePart, ImagePart, Message, TextPart, ToolCall, text_of
    from lousho_ray.options import Compaction, Limits, ModelSettings, RateLimits, Retry
    from lousho_ray.otel import otel_trace_exporter
    from lousho_ray.permissions import PermissionMode, PermissionRule, allow, ask, deny
    from lousho_ray.ports import GenerateOptions, GenerateResult, LLMProvider, ToolContext
    from lousho_ray.project_instructions import ProjectInstructions, load_project_instructions
    from lousho_ray.providers import (
        AnthropicProvider,
        LLMProviderRegistry,
        MockProvider,
        OllamaProvider,
        OpenAICompatibleProvider,
        OpenAIProvider,
        OpenRouterProvider,
        PiProvider,
        estimate_cost,
        get_model_info,
        list_models,
        register_model,
        resolve_provider,
        with_fallback,
        with_rate_limit,
        with_retry,
    )
    from lousho_ray.run_forks import RunFork, get_checkpoint_history
    from lousho_ray.session_handle import Session
    from lousho_ray.session_history import SessionStep
    from lousho_ray.spans import Span, TraceExporter, with_span
    from lousho_ray.stores.files import FileSessionStore, file_store
    from lousho_ray.stores.location import ray_store
    from lousho_ray.stores.memory import MemorySessionStore, memory_store
    from lousho_ray.stores.s3 import S3Store
    from lousho_ray.stores.sqlite import SqliteStore
    from lousho_ray.tokens import estimate_tokens, set_token_estimator
    from lousho_ray.tools import Tool, ToolRegistry, define_tool, tool
    from lousho_ray.tools.approval_policies import always, never, once
    from lousho_ray.tools.question import ask_question_tool
    from lousho_ray.trace_files import file_trace_exporter
    from lousho_ray.traces import Trace, TraceSummary, list_traces, read_trace
    from lousho_ray.trajectories import TrajectoryComparison, compare_trajectories
    from lousho_ray.usage import Usage, format_usage

_HOMES: dict[str, tuple[str, ...]] = {
    "actors.metrics": ("ray_metrics_exporter",),
    "agent": ("Agent",),
    "agent_options": ("CreateAgentOptions",),
    "cancellation": ("AbortSignal", "CancelToken"),
    "context.compaction": ("CompactionInfo", "create_compaction_hook"),
    "context.manual": ("compact_messages",),
    "context.pins": ("is_pinned", "pin_message"),
    "context.strategies": ("prune_tool_results_strategy", "summarize_strategy", "two_phase_strategy"),
    "context.strategy": ("CompactionInput", "CompactionOutput"),
    "create": ("create_agent",),
    "errors": (
        *("AgentExecutionError", "BudgetExceededError", "CompactedLLMProviderError", "ConfigurationError", "GuardrailError"),
        *("LLMProviderError", "LoushoError", "MissingDependencyError", "OperationTimeoutError", "PropagatingToolError"),
        *("RateLimitError", "SDKError", "SessionAwaitingApprovalError", "StorageError", "ToolArgumentsValidationError"),
        *("ToolExecutionError", "ValidationError"),
    ),
    "events": ("Event", "event_from_dict", "is_agent_event"),
    "exporters": ("combine_exporters", "worker_local"),
    "handle": ("AgentRun",),
    "hosted_tools": ("HostedTool", "code_interpreter", "file_search", "hosted_tool", "web_search"),
    "limits.limiter": ("RateLimiter", "create_rate_limiter"),
    "loop.result": ("ExecutionResult",),
    "messages": ("FilePart", "ImagePart", "Message", "TextPart", "ToolCall", "text_of"),
    "options": ("Compaction", "Limits", "ModelSettings", "RateLimits", "Retry"),
    "otel": ("otel_trace_exporter",),
    "permissions": ("PermissionMode", "PermissionRule", "allow", "ask", "deny"),
    "ports": ("GenerateOptions", "GenerateResult", "LLMProvider", "ToolContext"),
    "project_instructions": ("ProjectInstructions", "load_project_instructions"),
    "providers": (
        *(
            "AnthropicProvider",
            "LLMProviderRegistry",
            "MockProvider",
            "OllamaProvider",
            "OpenAICompatibleProvider",
            "OpenAIProvider",
        ),
        *("OpenRouterProvider", "PiProvider", "estimate_cost", "get_model_info", "list_models", "register_model"),
        *("resolve_provider", "with_fallback", "with_rate_limit", "with_retry"),
    ),
    "run_forks": ("RunFork", "get_checkpoint_history"),
    "session_handle": ("Session",),
    "session_history": ("SessionStep",),
    "spans": ("Span", "TraceExporter", "with_span"),
    "stores.files": ("FileSessionStore", "file_store"),
    "stores.location": ("ray_store",),
    "stores.memory": ("MemorySessionStore", "memory_store"),
    "stores.s3": ("S3Store",),
    "stores.sqlite": ("SqliteStore",),
    "tokens": ("estimate_tokens", "set_token_estimator"),
    "tools": ("Tool", "ToolRegistry", "define_tool", "tool"),
    "tools.approval_policies": ("always", "never", "once"),
    "tools.question": ("ask_question_tool",),
    "trace_files": ("file_trace_exporter",),
    "traces": ("Trace", "TraceSummary", "list_traces", "read_trace"),
    "trajectories": ("TrajectoryComparison", "compare_trajectories"),
    "usage": ("Usage", "format_usage"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AbortSignal",
    "Agent",
    "AgentExecutionError",
    "AgentRun",
    "AnthropicProvider",
    "BudgetExceededError",
    "CancelToken",
    "CompactedLLMProviderError",
    "Compaction",
    "CompactionInfo",
    "CompactionInput",
    "CompactionOutput",
    "ConfigurationError",
    "CreateAgentOptions",
    "Event",
    "ExecutionResult",
    "FilePart",
    "FileSessionStore",
    "GenerateOptions",
    "GenerateResult",
    "GuardrailError",
    "HostedTool",
    "ImagePart",
    "LLMProvider",
    "LLMProviderError",
    "LLMProviderRegistry",
    "Limits",
    "LoushoError",
    "MemorySessionStore",
    "Message",
    "MissingDependencyError",
    "MockProvider",
    "ModelSettings",
    "OllamaProvider",
    "OpenAICompatibleProvider",
    "OpenAIProvider",
    "OpenRouterProvider",
    "OperationTimeoutError",
    "PermissionMode",
    "PermissionRule",
    "PiProvider",
    "ProjectInstructions",
    "PropagatingToolError",
    "RateLimitError",
    "RateLimiter",
    "RateLimits",
    "Retry",
    "RunFork",
    "S3Store",
    "SDKError",
    "Session",
    "SessionAwaitingApprovalError",
    "SessionStep",
    "Span",
    "SqliteStore",
    "StorageError",
    "TextPart",
    "Tool",
    "ToolArgumentsValidationError",
    "ToolCall",
    "ToolContext",
    "ToolExecutionError",
    "ToolRegistry",
    "Trace",
    "TraceExporter",
    "TraceSummary",
    "TrajectoryComparison",
    "Usage",
    "ValidationError",
    "allow",
    "always",
    "ask",
    "ask_question_tool",
    "code_interpreter",
    "combine_exporters",
    "compact_messages",
    "compare_trajectories",
    "create_agent",
    "create_compaction_hook",
    "create_rate_limiter",
    "define_tool",
    "deny",
    "estimate_cost",
    "estimate_tokens",
    "event_from_dict",
    "file_search",
    "file_store",
    "file_trace_exporter",
    "format_usage",
    "get_checkpoint_history",
    "get_model_info",
    "hosted_tool",
    "is_agent_event",
    "is_pinned",
    "list_models",
    "list_traces",
    "load_project_instructions",
    "memory_store",
    "never",
    "once",
    "otel_trace_exporter",
    "pin_message",
    "prune_tool_results_strategy",
    "ray_metrics_exporter",
    "ray_store",
    "read_trace",
    "register_model",
    "resolve_provider",
    "set_token_estimator",
    "summarize_strategy",
    "text_of",
    "tool",
    "two_phase_strategy",
    "web_search",
    "with_fallback",
    "with_rate_limit",
    "with_retry",
    "with_span",
    "worker_local",
]

__version__ = "0.1.0"

mask_records()


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'lousho_ray' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lousho_ray.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
