"""`CreateAgentOptions`: the keywords of `create_agent()`, typed, so that options several agents share are a plain dict.

`create_agent(**{**shared, **overrides})`: later keys win, and the checks run on the merged result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from lousho_ray.events import Event, PermissionDecision
from lousho_ray.options import (
    Compaction,
    Limits,
    ModelSettings,
    ProjectInstructionsOptions,
    RateLimits,
    ReasoningOptions,
    Retry,
)
from lousho_ray.permissions import PermissionMode, PermissionRule
from lousho_ray.ports import AgentStore, ApprovalStore, Limiter, LLMProvider, SessionStore
from lousho_ray.spans import TraceExporter

if TYPE_CHECKING:
    from lousho_ray.agent import Agent
    from lousho_ray.loop.open import ResolverContext
    from lousho_ray.loop.output import OutputContext
    from lousho_ray.loop.result import ExecutionResult

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high"]


class CreateAgentOptions(TypedDict, total=False):
    """Every keyword of `create_agent()` but `output`, which types the result. See `create_agent` for what each means."""

    model: str | Callable[[ResolverContext], Any]
    provider: LLMProvider
    instructions: str | Callable[[ResolverContext], Any]
    prompt: str | Callable[[ResolverContext], Any]
    tools: Any
    name: str
    description: str
    max_steps: int
    model_settings: ModelSettings | Mapping[str, Any]
    limits: Limits | Mapping[str, Any]
    tool_concurrency: int | Literal["unbounded"]
    subagents: Mapping[str, Agent[Any]]
    max_subagent_depth: int
    store: AgentStore | SessionStore
    session_wait_ms: float
    auto_resume: bool
    store_timeout_ms: float
    approval_store: ApprovalStore
    approval_ttl_ms: float
    ask_question: bool
    on_agent_drift: Literal["warn", "error", "ignore"]
    approve: Callable[[Mapping[str, Any]], Any]
    permissions: Sequence[PermissionRule | Mapping[str, Any]]
    permission_mode: PermissionMode | Callable[[], PermissionMode]
    on_permission_decision: Callable[[PermissionDecision, Mapping[str, Any]], Any]
    on_permission_mode_change: Callable[[Mapping[str, Any]], Any]
    project_instructions: ProjectInstructionsOptions | Mapping[str, Any] | bool
    retry: Retry | Mapping[str, Any] | Literal[False]
    fallback_models: Sequence[str | LLMProvider]
    rate_limit: RateLimits | Mapping[str, Any] | Limiter
    reasoning: Effort | ReasoningOptions | Mapping[str, Any]
    prompt_caching: Literal["auto", False]
    hooks: Sequence[Any]
    compaction: bool | Compaction | Mapping[str, Any]
    output_validate: Callable[[Any, OutputContext], Any]
    output_prompt: bool | Literal["auto"]
    abort_grace_ms: float
    max_tool_result_chars: float
    spill_tool_results: bool
    on_event: Callable[[Event], None]
    on_run_end: Callable[[ExecutionResult[Any] | None, BaseException | None], object]
    exporter: TraceExporter
    capture_content: bool
    redact_content: bool
    runtime: Literal["local", "ray"]
