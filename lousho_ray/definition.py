"""`AgentDefinition`: an agent as checked, immutable data. It is what `create_agent()` makes, what a run is opened from, and what
travels to other processes (cloudpickle): providers as configuration, limiters as references, tools and hooks by value.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lousho_ray.exporters import part_of_each_process
from lousho_ray.fingerprint import fingerprint
from lousho_ray.hosted_tools import HostedTool
from lousho_ray.loop.output import OutputContract
from lousho_ray.options import Compaction, Limits, ModelSettings
from lousho_ray.permissions import PermissionRule
from lousho_ray.ports import LLMProvider, Reasoning
from lousho_ray.spans import TraceContext, TraceExporter
from lousho_ray.tools.registry import AnyTool

DEFAULT_INSTRUCTIONS = "You are a helpful assistant."

CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that turns `capture_content` on where the option is not given: `true`, in any case."""


@dataclass(frozen=True)
class AgentDefinition:
    """Every option of an agent, checked. Function-valued options (`model`, `instructions`, `tools`) are resolved when a run opens.

    `provider` already has its retries and fallbacks around it, but no limiter: which limiters apply depends on who runs the agent.
    `provider_for` builds the provider of a model string that a function-valued `model` returned. `on_ray` says where tools with
    `ray_options` run: as Ray tasks, or here.
    """

    name: str
    provider: LLMProvider | None
    instructions: str | Callable[[Any], Any] = DEFAULT_INSTRUCTIONS
    project_block: str = ""
    description: str | None = None
    model: str | Callable[[Any], Any] | None = None
    provider_for: Callable[[str], LLMProvider] | None = None
    tools: Mapping[str, AnyTool] | Callable[[Any], Any] = field(default_factory=dict)
    hosted_tools: tuple[HostedTool, ...] = ()
    settings: ModelSettings = field(default_factory=ModelSettings)
    limits: Limits = field(default_factory=Limits)
    max_steps: int | None = None
    tool_concurrency: int | None = None
    tool_concurrency_set: bool = False
    abort_grace_ms: float | None = None
    max_tool_result_chars: float = 50_000
    spill_tool_results: bool = False
    reasoning: Reasoning | None = None
    prompt_caching: Any = "auto"
    rate_limit: Any = None
    subagents: Mapping[str, AgentDefinition] = field(default_factory=dict)
    max_subagent_depth: int = 1
    hooks: tuple[Any, ...] = ()
    compaction: Compaction | None = None
    approve: Callable[[Mapping[str, Any]], Any] | None = None
    output: OutputContract | None = None
    output_prompt: bool | Literal["auto"] = "auto"
    session_wait_ms: float = 30_000
    store_timeout_ms: float = 30_000
    auto_resume: bool = True
    session_limits: Limits | None = None
    permissions: tuple[PermissionRule, ...] = ()
    permission_mode: Any = "default"
    on_permission_decision: Callable[..., Any] | None = None
    on_permission_mode_change: Callable[[Mapping[str, Any]], Any] | None = None
    audited: bool = False
    on_ray: bool = False
    approval_store: Any = None
    approval_ttl_ms: float | None = None
    on_agent_drift: Literal["warn", "error", "ignore"] = "warn"
    store: Any = None
    on_event: Callable[[Any], None] | None = None
    on_run_end: Callable[[Any, BaseException | None], object] | None = None
    exporter: TraceExporter | None = None
    capture_content: bool | None = None
    redact_content: bool = True

    @functools.cached_property
    def fingerprint(self) -> Mapping[str, Any]:
        """What saved runs are compared with. Options that are functions of the run are no part of it."""
        model = self.model if self.model is not None else getattr(self.provider, "default_model", None)
        return fingerprint(
            model if isinstance(model, str) else None,
            self.instructions if isinstance(self.instructions, str) else None,
            self.tools if isinstance(self.tools, Mapping) else None,
            self.hosted_tools,
        )

    def find(self, path: str) -> AgentDefinition:
        """The sub-agent at `path` (`"researcher"` or `"researcher/reader"`); the empty path is the agent itself."""
        definition = self
        for name in filter(None, path.split("/")):
            definition = definition.subagents[name]
        return definition

    def placed(self, *, on_ray: bool) -> AgentDefinition:
        """This one as a sub-agent: it runs in the runtime of its lead, and so do its tools."""
        if self.on_ray == on_ray:
            return self
        subagents = {name: child.placed(on_ray=on_ray) for name, child in self.subagents.items()}
        return replace(self, on_ray=on_ray, subagents=subagents)

    def trace(self) -> TraceContext:
        """How a run of this agent that begins now is traced."""
        capture = self.capture_content
        if capture is None:
            capture = os.environ.get(CAPTURE_VARIABLE, "").lower() == "true"
        return TraceContext(self.exporter is not None, capture_content=capture, redact_content=self.redact_content)

    def portable(self) -> AgentDefinition:
        """The part that runs elsewhere: observers stay with the caller, stores are reached by reference."""
        children = {name: child.portable() for name, child in self.subagents.items()}
        return replace(
            self,
            on_event=None,
            on_run_end=None,
            on_permission_decision=None,
            on_permission_mode_change=None,
            exporter=part_of_each_process(self.exporter),
            store=None,
            subagents=children,
        )
