"""Hooks: user code around every model call and tool call.

Hooks run in list order, one at a time; a later one sees what an earlier one changed. A hook that raises rejects the run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lousho_ray.errors import AgentExecutionError, ConfigurationError, PropagatingToolError
from lousho_ray.messages import Message, ToolCall
from lousho_ray.ports import GenerateOptions, GenerateResult, LLMProvider
from lousho_ray.tools.registry import AnyTool

log = logging.getLogger("lousho_ray")

SideCall = Callable[[LLMProvider, GenerateOptions, str], Awaitable[GenerateResult]]

METHODS = ("pre_tool_call", "post_tool_call", "pre_generate", "post_generate")


@runtime_checkable
class AgentHook(Protocol):
    """Any object with a `name` and one or more of `pre_tool_call(ctx)`, `post_tool_call(ctx, outcome)`, `pre_generate(ctx)`,
    `post_generate(ctx, result)`; each sync or async."""

    @property
    def name(self) -> str: ...


@dataclass(slots=True)
class HookContext:
    """What every hook sees. `messages` is the run's live transcript: what a hook changes there stays.

    `request` is set for `pre_generate` / `post_generate`; assigning a changed copy to it changes that one call. `next_request()` is
    what a `pre_generate` would send if it were the last. `emit(CompactionStart, ...)` and `emit(CompactionDone, ...)` report a
    compaction; it is `None` when nobody listens. `provider` is the run's own.
    """

    agent_name: str
    messages: list[Message]
    session_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    principal: Any = None
    subagent: Mapping[str, Any] | None = None
    request: GenerateOptions | None = None
    provider: LLMProvider | None = field(default=None, repr=False)
    next_request: Callable[[], GenerateOptions] | None = field(default=None, repr=False)
    emit: Callable[..., None] | None = field(default=None, repr=False)
    side_call: SideCall | None = field(default=None, repr=False)

    @property
    def agent_id(self) -> str:
        """The agent as stored records name it: by its name."""
        return self.agent_name

    async def generate(self, provider: LLMProvider, request: GenerateOptions, purpose: str) -> GenerateResult:
        """Makes a side model call, which counts in the run's usage and limits under `purpose` and passes its rate limits.

        Raises:
            Aborted: The run was stopped.
            CompactedLLMProviderError: The call failed.
        """
        if self.side_call is None:
            raise AgentExecutionError("This hook context belongs to no run, so it cannot make a model call.")
        return await self.side_call(provider, request, purpose)


@dataclass(slots=True)
class ToolHookContext(HookContext):
    """What tool hooks see. `args` is live: a change in place is validated again before `tool` runs."""

    tool_call_id: str = ""
    tool_name: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    tool_call: ToolCall | None = None
    tool: AnyTool | None = field(default=None, repr=False)
    resumed_after_approval: bool = False


@dataclass(frozen=True, slots=True)
class PreToolOutcome:
    """What the pre-hooks decided: at most one of `deny` and `result` is set; `hook` is the one that decided or changed last."""

    args: dict[str, Any]
    changed: bool = False
    deny: str | None = None
    result: Any = None
    has_result: bool = False
    hook: str | None = None


@dataclass(frozen=True, slots=True)
class PostToolOutcome:
    """What `post_tool_call` gets: the value the tool returned, or the error result the model will read."""

    result: Any = None
    error: Mapping[str, Any] | None = None
    requires_approval: bool = False


class HookChain:
    """The hooks of one run, in order. A hook that remembers things per run has a `for_run()` that gives a fresh one."""

    def __init__(self, hooks: Sequence[Any] = ()) -> None:
        hooks = self.hooks = tuple(hook.for_run() if hasattr(hook, "for_run") else hook for hook in hooks)
        self._pre_tool = _having(hooks, "pre_tool_call")
        self._post_tool = _having(hooks, "post_tool_call")
        self._pre_generate = _having(hooks, "pre_generate")
        self._post_generate = _having(hooks, "post_generate")

    @property
    def around_tools(self) -> bool:
        return bool(self._pre_tool or self._post_tool)

    @property
    def around_generate(self) -> bool:
        return bool(self._pre_generate or self._post_generate)

    async def pre_tool_call(self, ctx: ToolHookContext) -> PreToolOutcome:
        """Runs the pre-hooks until one denies the call or supplies its result."""
        before, changed_by = _plain_copy(ctx.args), None
        for name, method in self._pre_tool:
            outcome = await _call(name, method, ctx)
            if outcome is None:
                pass
            elif not _is_pre_outcome(outcome):
                raise ConfigurationError(
                    f"Hook {name!r} returned {outcome!r} from pre_tool_call; it may return None, {{'deny': reason}}, "
                    "{'result': value} or {'input': args}, where args is a dict.",
                    field="hooks",
                )
            elif "deny" in outcome:
                return PreToolOutcome(ctx.args, deny=str(outcome["deny"]), hook=name)
            elif "result" in outcome:
                return PreToolOutcome(ctx.args, result=outcome["result"], has_result=True, hook=name)
            else:
                ctx.args = dict(outcome["input"])
            if ctx.args != before:
                before, changed_by = _plain_copy(ctx.args), name
        return PreToolOutcome(ctx.args, changed=changed_by is not None, hook=changed_by)

    async def post_tool_call(self, ctx: ToolHookContext, outcome: PostToolOutcome) -> tuple[PostToolOutcome, str | None]:
        """Runs the post-hooks; returns the outcome they left and the hook that replaced the result, if any."""
        replaced: str | None = None
        for name, method in self._post_tool:
            answer = await _call(name, method, ctx, outcome)
            if answer is None:
                continue
            if not isinstance(answer, Mapping) or set(answer) != {"result"}:
                raise ConfigurationError(
                    f"Hook {name!r} returned {answer!r} from post_tool_call; it may return None or {{'result': value}}.",
                    field="hooks",
                )
            if not outcome.requires_approval:
                outcome, replaced = PostToolOutcome(result=answer["result"]), name
        return outcome, replaced

    async def pre_generate(self, ctx: HookContext) -> None:
        for name, method in self._pre_generate:
            await _call(name, method, ctx)

    async def post_generate(self, ctx: HookContext, result: Any) -> None:
        for name, method in self._post_generate:
            await _call(name, method, ctx, result)


def check_hooks(hooks: object) -> tuple[Any, ...]:
    """Validates the `hooks` option.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, for an object without a name or without any hook method.
    """
    if not isinstance(hooks, Sequence) or isinstance(hooks, str):
        raise ConfigurationError(f"hooks must be a list of hooks, not {type(hooks).__name__}.", field="hooks")
    checked = tuple(hooks)
    for index, hook in enumerate(checked):
        if not getattr(hook, "name", None):
            raise ConfigurationError(f"hooks[{index}] ({type(hook).__name__}) has no 'name'; give the hook a name.", field="hooks")
        if not any(callable(getattr(hook, method, None)) for method in METHODS):
            raise ConfigurationError(f"Hook {hook.name!r} has none of the methods {', '.join(METHODS)}.", field="hooks")
    return checked


def _is_pre_outcome(outcome: Any) -> bool:
    if not isinstance(outcome, Mapping) or len(outcome) != 1:
        return False
    return "deny" in outcome or "result" in outcome or isinstance(outcome.get("input"), Mapping)


def _having(hooks: Sequence[Any], method: str) -> tuple[tuple[str, Callable[..., Any]], ...]:
    return tuple([(hook.name, getattr(hook, method)) for hook in hooks if callable(getattr(hook, method, None))])


class HaltedError(PropagatingToolError):
    """A hook raised inside a sub-agent: every run above ends with `error`, too."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error), tool_name="task")
        self.error = error


def raised_by_hook(error: BaseException) -> bool:
    """Whether a run failed because a hook raised `error`. The mark travels with the error, between processes too."""
    return getattr(error, _MARK, None) is not None


_MARK = "raised_by_hook"


async def _call(name: str, method: Callable[..., Any], *args: Any) -> Any:
    try:
        outcome = method(*args)
        return await outcome if inspect.isawaitable(outcome) else outcome
    except (SystemExit, KeyboardInterrupt) as error:
        failure = AgentExecutionError(f"Hook {name!r} raised {type(error).__name__}: {error}")
        setattr(failure, _MARK, name)
        raise failure from error
    except Exception as error:
        with suppress(AttributeError):
            setattr(error, _MARK, name)
        raise


def _plain_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_copy(item) for item in value]
    return value
