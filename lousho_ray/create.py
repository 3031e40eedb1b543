"""`create_agent()`: checks every option and makes an `Agent`. Calls no network, opens nothing, starts nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, Unpack, cast, overload

from lousho_ray.agent import Agent, RuntimeName
from lousho_ray.agent_options import CreateAgentOptions
from lousho_ray.context.compaction import check_compaction
from lousho_ray.create_provider import provider_options
from lousho_ray.definition import DEFAULT_INSTRUCTIONS, AgentDefinition
from lousho_ray.errors import ConfigurationError, mask_secrets
from lousho_ray.hosted_tools import HostedTool
from lousho_ray.limits.limiter import RateLimiter, create_rate_limiter
from lousho_ray.loop.hooks import check_hooks
from lousho_ray.loop.output import OutputContract
from lousho_ray.option_checks import (
    check_bool,
    check_callable,
    check_choice,
    check_positive_int,
    check_positive_number,
    check_runtime,
    check_text,
    unknown_keyword,
    warn_deprecated,
)
from lousho_ray.options import (
    Limits,
    ModelSettings,
    ProjectInstructionsOptions,
    parse_options,
    parse_reasoning,
    parse_switch,
)
from lousho_ray.permissions import check_mode, check_rules
from lousho_ray.project_instructions import load_project_instructions
from lousho_ray.spans import check_exporter
from lousho_ray.stores.parts import check_store
from lousho_ray.tools.question import ask_question_tool
from lousho_ray.tools.registry import AnyTool, collect_all_tools
from lousho_ray.tools.spill import READ_RESULT

T = TypeVar("T")

OPTIONS = frozenset({*CreateAgentOptions.__optional_keys__, "output"})

DRIFT_MODES = ("warn", "error", "ignore")

RESERVED_TOOL_NAMES = {"task": "sub-agents"}


@overload
def create_agent(*, output: type[T], **options: Unpack[CreateAgentOptions]) -> Agent[T]: ...


@overload
def create_agent(*, output: Mapping[str, Any] | None = None, **options: Unpack[CreateAgentOptions]) -> Agent[Any]: ...


def create_agent(*, output: Any = None, **options: Any) -> Agent[Any]:
    """Makes an agent. Every option is optional; without `model` and `provider` the environment decides.

    Args:
        model: `"provider/model"`, or a function of the run. With `provider`, a bare model id.
        provider: An `LLMProvider`.
        instructions: The system prompt, or a function of the run. `prompt` is its deprecated alias.
        tools: A list of tools, a mapping name -> tool, nested lists, or a function of the run. Hosted tools (`web_search()`, ...)
            stand among them.
        name: The agent's name (`"agent"`). `description` is needed when it is used as a sub-agent.
        max_steps: Model calls of one run, at least 1 (10).
        model_settings: `max_tokens`, `temperature`, `top_p`, `frequency_penalty`, `presence_penalty`, `stop`, `seed`,
            `tool_choice`.
        limits: What a run may spend: `max_tokens`, `max_input_tokens`, `max_output_tokens`, `max_cost_usd`, `max_duration_ms`,
            `max_tool_errors`, `max_steps`, `on_exceeded` (`"stop"` or `"throw"`), `reserve` (set a call's estimate aside before
            it is made, so that calls in flight cannot pass a limit together).
        tool_concurrency: Tool calls of one turn that run at once: a whole number, or `"unbounded"` (default).
        subagents: Name -> agent with a description, offered through the `task` tool.
        max_subagent_depth: How deep sub-agents may nest (1; 0 = never offered).
        store: Where sessions are kept; see `memory_store()` and `SqliteStore`.
        session_wait_ms: How long a turn waits for another process that is in the same session (30,000).
        auto_resume: Whether a durable turn whose session actor has died is resumed unasked (`True`); else its call raises.
        store_timeout_ms: How long one attempt of a save may take (30,000); there are three.
        approve: `fn(call) -> bool | str`: decides calls of tools with `needs_approval` in code; without it (and in streams) the run
            pauses until `agent.approvals.resolve()`.
        approval_store: Where pauses are kept; default the store's part, else memory.
        approval_ttl_ms: How long a pause can be approved; by default it never expires.
        ask_question: Adds the tool `ask_question`: the run pauses until `agent.approvals.answer()`.
        on_agent_drift: What a saved run that is taken up by a changed agent does: `"warn"` (default), `"error"` or `"ignore"`.
        project_instructions: `True`, or `cwd` and `files`: adds the nearest `AGENTS.md` (or `CLAUDE.md`), read now.
        retry: `max_retries` (2), `backoff`, `timeout_ms`, `idle_timeout_ms`, ...; `False` sends each call once.
        fallback_models: `provider/model` strings (or providers) tried in order when the model still fails.
        rate_limit: `requests_per_minute`, `tokens_per_minute`, `max_concurrent`, or a `create_rate_limiter()`.
        reasoning: `"none"`, `"minimal"`, `"low"`, `"medium"`, `"high"`, or a dict with `effort`, `budget_tokens`, ...
        prompt_caching: `"auto"` (default) or `False`.
        output: A pydantic model, a type or a JSON schema that the final reply must match: `result.object` is the validated value.
        output_validate: `fn(object, ctx)`, run after the schema: the issues it returns go into the one repair step.
        output_prompt: Whether the schema stands in the system prompt too; `"auto"` (default): unless the provider enforces it.
        hooks: Objects with `pre_tool_call`, `post_tool_call`, `pre_generate`, `post_generate`.
        compaction: `True` prunes old tool results above 90 % of the context window; or a dict with `strategy`, `threshold_percent`,
            `context_window`, `protected_tokens`, `reserve_output_tokens`, `on_compaction`, `summarizer`, `preview_chars`,
            `memoize_tools` (off).
        permissions: Rules such as `[allow("read_file"), deny("shell", "No shell."), ask("pay")]`: the first that matches a call
            decides, before the tool's own `needs_approval`.
        permission_mode: `"default"`, `"plan"` (nothing is changed), `"acceptEdits"` (file edits run unasked), `"dontAsk"` (what
            would need a person is refused), or a function that returns one, read at every call.
        on_permission_decision: `fn(entry, {"principal"})`, sync or async, called here once per decision on a call; when it raises,
            the run ends with that error. `entry` is the `permission.decision` event.
        on_permission_mode_change: `fn({"session_id", "from", "to", "at"})` for every switch of a session's mode.
        abort_grace_ms: How long an aborted run waits for a tool that ignores the abort; by default as long as it takes.
        max_tool_result_chars: The most characters of one tool result the model gets (50,000; `math.inf` = no cap).
        spill_tool_results: Keeps a longer result whole and adds the tool `read_result`, which reads the rest (`False`). A durable
            run keeps it in its store, any other in the memory of the process where it runs.
        on_event: Called with every event of the agent's runs.
        on_run_end: `fn(result, error)`, called once at the end of every run, with the result or with the error that it raised
            (`error.usage` says what had been spent). Runs of sub-agents are part of their lead's.
        exporter: A `TraceExporter`: gets the spans of every run, also of its sub-agents and of what runs on other machines.
        capture_content: Whether spans hold messages, arguments and results (`False`, unless the environment turns it on:
            `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true`).
        redact_content: `False` puts them under their deprecated names, too, and arguments into `permission.decision` (`True`).
        runtime: `"ray"` (default) or `"local"`, else `LOUSHO_RUNTIME`. Ray is only started by the first actor.

    Raises:
        ConfigurationError: The first option that cannot be used, with `field` naming it.
    """
    for name in options:
        if name not in OPTIONS:
            raise unknown_keyword(name, OPTIONS, "create_agent()")
    given = {name: value for name, value in options.items() if value is not None}
    spills = check_bool(given.get("spill_tool_results", False), "spill_tool_results")
    tools, hosted = _tools(given.get("tools", ()), check_bool(given.get("ask_question", False), "ask_question"), spills)
    concurrency = given.get("tool_concurrency", "unbounded")
    runtime = cast("RuntimeName", check_runtime(given.get("runtime")))
    definition = AgentDefinition(
        name=check_text(given.get("name", "agent"), "name"),
        description=check_text(given["description"], "description") if "description" in given else None,
        instructions=_instructions(given),
        project_block=_project_block(given.get("project_instructions")),
        model=_bare_model(given),
        tools=tools,
        hosted_tools=hosted,
        settings=parse_options(ModelSettings, given.get("model_settings")),
        limits=parse_options(Limits, given.get("limits")),
        max_steps=check_positive_int(given["max_steps"], "max_steps") if "max_steps" in given else None,
        tool_concurrency=None if concurrency == "unbounded" else check_positive_int(concurrency, "tool_concurrency"),
        tool_concurrency_set="tool_concurrency" in given,
        abort_grace_ms=check_positive_number(given["abort_grace_ms"], "abort_grace_ms") if "abort_grace_ms" in given else None,
        output=_output(output, given.get("output_validate")),
        output_prompt=_output_prompt(given.get("output_prompt", "auto")),
        max_tool_result_chars=_result_chars(given.get("max_tool_result_chars", 50_000)),
        spill_tool_results=spills,
        reasoning=parse_reasoning(given.get("reasoning")),
        prompt_caching=_prompt_caching(given.get("prompt_caching", "auto")),
        rate_limit=_rate_limit(given.get("rate_limit")),
        subagents={name: child.placed(on_ray=runtime == "ray") for name, child in _subagents(given.get("subagents", {})).items()},
        max_subagent_depth=check_positive_int(given.get("max_subagent_depth", 1), "max_subagent_depth", minimum=0),
        hooks=check_hooks(given.get("hooks", ())),
        compaction=check_compaction(given.get("compaction")),
        approve=_function(given, "approve"),
        permissions=check_rules(given.get("permissions", ())),
        permission_mode=check_mode(given.get("permission_mode", "default")),
        on_permission_decision=_function(given, "on_permission_decision"),
        on_permission_mode_change=_function(given, "on_permission_mode_change"),
        audited="on_permission_decision" in given,
        session_wait_ms=check_positive_number(given.get("session_wait_ms", 30_000), "session_wait_ms"),
        auto_resume=check_bool(given.get("auto_resume", True), "auto_resume"),
        store_timeout_ms=check_positive_number(given.get("store_timeout_ms", 30_000), "store_timeout_ms"),
        approval_store=_approval_store(given.get("approval_store")),
        approval_ttl_ms=check_positive_number(given["approval_ttl_ms"], "approval_ttl_ms") if "approval_ttl_ms" in given else None,
        on_agent_drift=cast("Any", check_choice(given.get("on_agent_drift", "warn"), "on_agent_drift", DRIFT_MODES)),
        store=_store(given.get("store")),
        on_event=_listener(given.get("on_event"), "on_event"),
        on_run_end=_listener(given.get("on_run_end"), "on_run_end"),
        on_ray=runtime == "ray",
        exporter=check_exporter(given["exporter"]) if "exporter" in given else None,
        capture_content=check_bool(given["capture_content"], "capture_content") if "capture_content" in given else None,
        redact_content=check_bool(given.get("redact_content", True), "redact_content"),
        **provider_options(given),
    )
    shown = {**given, "output": output} if output is not None else given
    return Agent(definition, runtime, MappingProxyType({key: _shown(shown[key]) for key in shown}))


def _function(given: Mapping[str, Any], name: str) -> Any:
    return check_callable(given[name], name) if name in given else None


def _shown(value: Any) -> Any:
    """An option as `agent.options` shows it: later changes of a dict or list do not show, and no key does."""
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, Mapping):
        return MappingProxyType({key: _shown(item) for key, item in value.items()})
    return tuple(_shown(item) for item in value) if isinstance(value, list | tuple) else value


def _instructions(given: Mapping[str, Any]) -> Any:
    if "prompt" in given:
        if "instructions" in given:
            raise ConfigurationError(
                "create_agent() got both instructions and prompt; keep instructions.",
                code="LOUSHO_CONFIG_CONFLICTING_OPTIONS",
                field="prompt",
            )
        warn_deprecated("create_agent(prompt=) is deprecated; use instructions=.", stacklevel=4)
    instructions = given.get("instructions", given.get("prompt", DEFAULT_INSTRUCTIONS))
    if not isinstance(instructions, str) and not callable(instructions):
        raise ConfigurationError(
            f"instructions must be a str or a function of the run, not {type(instructions).__name__}.", field="instructions"
        )
    return instructions


def _project_block(option: Any) -> str:
    options = parse_switch(ProjectInstructionsOptions, option)
    found = None if options is None else load_project_instructions(options.cwd, options.files)
    return "" if found is None else found.block


def _bare_model(given: Mapping[str, Any]) -> Any:
    """`model` next to `provider` is a bare id (or a function that returns one); alone it chooses the provider."""
    model = given.get("model")
    if model is not None and not isinstance(model, str) and not callable(model):
        raise ConfigurationError(
            f"model must be a 'provider/model' str or a function of the run, not {type(model).__name__}.", field="model"
        )
    return model if "provider" in given or callable(model) else None


def _tools(
    tools: Any, ask_question: bool, spills: bool
) -> tuple[Mapping[str, AnyTool] | Callable[[Any], Any], tuple[HostedTool, ...]]:
    if (
        callable(tools)
        and not isinstance(tools, Sequence | Mapping)
        and not hasattr(tools, "list")
        and not hasattr(tools, "definition")
    ):
        if ask_question:
            raise ConfigurationError("With a tools function, return ask_question_tool() from it.", field="ask_question")
        resolver: Callable[[Any], Any] = tools
        return resolver, ()
    collected, hosted = collect_all_tools([tools, ask_question_tool()] if ask_question else tools)
    reserved = {**RESERVED_TOOL_NAMES, **({READ_RESULT: "spill_tool_results"} if spills else {})}
    for name in (*collected, *(tool.name for tool in hosted)):
        if name in reserved:
            raise ConfigurationError(f"The tool name '{name}' is reserved for {reserved[name]}; rename your tool.", field="tools")
    return collected, hosted


def _subagents(subagents: Any) -> dict[str, AgentDefinition]:
    import re

    if not isinstance(subagents, Mapping):
        raise ConfigurationError(f"subagents must be a mapping name -> agent, not {type(subagents).__name__}.", field="subagents")
    found: dict[str, AgentDefinition] = {}
    for name, agent in subagents.items():
        if not isinstance(name, str) or not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
            raise ConfigurationError(f"Sub-agent name {name!r} must be 1 to 64 of A-Z a-z 0-9 _ -.", field="subagents")
        if not isinstance(agent, Agent):
            raise ConfigurationError(
                f"subagents[{name!r}] must be an agent made by create_agent(), not {type(agent).__name__}.", field="subagents"
            )
        if not agent.description:
            raise ConfigurationError(
                f"Sub-agent '{name}' has no description, by which the lead chooses it: "
                "create_agent(description='Finds sources', ...).",
                field="subagents",
            )
        found[name] = agent.definition
    return found


def _rate_limit(rate_limit: Any) -> RateLimiter | None:
    if rate_limit is None or isinstance(rate_limit, RateLimiter):
        return rate_limit
    if not isinstance(rate_limit, Mapping) and hasattr(rate_limit, "acquire"):
        limiter: RateLimiter = rate_limit
        return limiter
    return create_rate_limiter(rate_limit)


def _approval_store(store: Any) -> Any:
    for method in ("save", "load", "resolve") if store is not None else ():
        if not callable(getattr(store, method, None)):
            raise ConfigurationError(f"approval_store ({type(store).__name__}) has no method {method}().", field="approval_store")
    return store


def _store(store: Any) -> Any:
    if store is not None:
        check_store(store)
    return store


def _listener(listener: Any, field: str) -> Any:
    if listener is None:
        return None
    if inspect.iscoroutinefunction(listener):
        raise ConfigurationError(f"{field} must be a plain function: it is called synchronously.", field=field)
    return check_callable(listener, field)


def _result_chars(value: Any) -> float:
    return math.inf if value == math.inf else check_positive_int(value, "max_tool_result_chars")


def _output(output: Any, validate: Any) -> OutputContract | None:
    if output is None:
        if validate is not None:
            raise ConfigurationError(
                "output_validate checks the object of an output schema; pass output too.", field="output_validate"
            )
        return None
    return OutputContract(output, check_callable(validate, "output_validate") if validate is not None else None)


def _output_prompt(value: Any) -> Any:
    if value not in (True, False, "auto"):
        raise ConfigurationError(f'output_prompt must be True, False or "auto"; got {value!r}.', field="output_prompt")
    return value


def _prompt_caching(value: Any) -> Any:
    if value is not False and value != "auto":
        raise ConfigurationError(f'prompt_caching must be "auto" or False; got {value!r}.', field="prompt_caching")
    return value
