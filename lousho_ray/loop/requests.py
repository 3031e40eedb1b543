"""The request of a step, also as the hooks leave it, and what hooks may do meanwhile: report a compaction, call a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from lousho_ray.errors import ConfigurationError
from lousho_ray.events import CompactionDone, CompactionStart
from lousho_ray.hosted_tools import LOOK_UP, HostedTool
from lousho_ray.ids import new_id
from lousho_ray.loop.hooks import HookContext
from lousho_ray.loop.model import Reply, warn_unpriced
from lousho_ray.loop.reserve import reserve
from lousho_ray.loop.state import RunDeps, RunState
from lousho_ray.loop.tracing import ChatSpan
from lousho_ray.messages import Message, assistant
from lousho_ray.ports import (
    FailedUsage,
    FallbackNotice,
    FinishReason,
    GenerateOptions,
    GenerateResult,
    LLMProvider,
    ProviderNotice,
    RetryNotice,
)
from lousho_ray.providers.failures import failed_usage, to_provider_error
from lousho_ray.providers.interception import intercepted
from lousho_ray.providers.limited import with_rate_limit
from lousho_ray.providers.metering import Metered, meter, priced
from lousho_ray.usage import StepUsage


def _hosted(deps: RunDeps) -> tuple[HostedTool, ...]:
    """The hosted tools of a request. Their calls cannot be refused one by one, so in plan mode only those that look up are sent."""
    if not deps.hosted_tools or deps.mode.now() != "plan":
        return deps.hosted_tools
    return tuple(tool for tool in deps.hosted_tools if tool.type in LOOK_UP)


def build_request(state: RunState, deps: RunDeps, *, with_tools: bool = True) -> GenerateOptions:
    """The request of the next model call. A forced `tool_choice` holds until the run's first tool call, or it would never end."""
    tools, hosted = (deps.definitions, _hosted(deps)) if with_tools else ((), ())
    settings: Mapping[str, Any] = deps.settings
    if "tool_choice" in settings and (
        not (tools or hosted) or (state.tool_calls and settings["tool_choice"] not in ("auto", "none"))
    ):
        settings = {key: value for key, value in settings.items() if key != "tool_choice"}
    messages = [message for message in state.messages if not _says_nothing(message)]
    if deps.call_instructions is not None:
        first = messages[0]
        messages = [first.with_(content=f"{first.text}\n\n{deps.call_instructions}"), *messages[1:]]
    return GenerateOptions(
        messages=messages,
        model=deps.model,
        tools=tools,
        hosted_tools=hosted,
        response_format=None if deps.output is None else deps.output.response_format,
        reasoning=deps.reasoning,
        prompt_caching=deps.prompt_caching,
        settings=settings,
        abort=deps.abort,
    )


def _says_nothing(message: Message) -> bool:
    """Whether it is an assistant turn without text and calls, like one of hosted calls alone: nothing that a model could be sent,
    and what many APIs refuse."""
    if message.role != "assistant" or message.tool_calls:
        return False
    text = message.text
    return not text or text.isspace()  # looks no further than the first letter: every request asks this of the whole history


async def prepare_request(state: RunState, deps: RunDeps, *, with_tools: bool = True) -> GenerateOptions:
    """The request of the next model call, after the `pre_generate` hooks.

    Raises:
        Aborted: The run was stopped while a hook ran.
    """
    request = build_request(state, deps, with_tools=with_tools)
    if not deps.hooks.around_generate:
        return request
    sent = list(request.messages)
    context = hook_context(state, deps, replace(request, messages=list(sent)))

    def next_request() -> GenerateOptions:
        asked = context.request or request
        messages = list(asked.messages)
        if messages[: len(sent)] == sent:  # what hooks changed in the transcript, then what they pushed to this one request
            messages = [*build_request(state, deps, with_tools=with_tools).messages, *messages[len(sent) :]]
        return replace(asked, messages=messages)

    context.next_request = next_request
    size, own = len(state.messages), state.messages[state.opened_at :]
    await deps.abort.guard(deps.hooks.pre_generate(context))
    if len(state.messages) != size:
        state.opened_at = first_of(own, state.messages)
    return next_request()


def first_of(own: Sequence[Message], messages: Sequence[Message]) -> int:
    """The index of the first message of `messages` that is one of `own`, the same object; their number when none is."""
    known = {id(message) for message in own}
    return next((index for index, message in enumerate(messages) if id(message) in known), len(messages))


def hook_context(state: RunState, deps: RunDeps, request: GenerateOptions) -> HookContext:
    """What the hooks around a model call see."""
    return HookContext(
        deps.agent_name,
        state.messages,
        deps.session_id,
        deps.metadata,
        deps.principal,
        deps.subagent,
        request,
        **hook_services(state, deps),
    )


def hook_services(state: RunState, deps: RunDeps) -> dict[str, Any]:
    """The fields of a hook's context through which it can do something in the run."""
    return {
        "provider": deps.provider,
        "emit": partial(_emit, deps.emitter.emit) if deps.emitter.on else None,
        "side_call": partial(side_call, state, deps),
    }


def _emit(emit: Callable[..., None], kind: type[Any], /, **fields: Any) -> None:
    if kind not in (CompactionStart, CompactionDone):
        raise ConfigurationError(
            f"A hook can only emit CompactionStart and CompactionDone, not {getattr(kind, '__name__', kind)!r}.", field="hooks"
        )
    emit(kind, **fields)


async def side_call(
    state: RunState, deps: RunDeps, provider: LLMProvider, request: GenerateOptions, purpose: str
) -> GenerateResult:
    """A model call beside the conversation: under the run's rate limits, booked in its usage and limits, ended by its abort.

    Raises:
        Aborted: The run was stopped.
        Refused: A limit leaves no room for the call.
        CompactedLLMProviderError: The call failed.
    """
    call_id = f"{purpose}-{new_id()}"
    await reserve(state, deps, provider, request, call_id)
    asked = provider if provider is deps.provider else intercepted(provider)
    limited = with_rate_limit(asked, deps.limiters) if deps.limiters else asked
    with deps.trace.chat(request, provider, purpose) as chat:
        return await _metered(state, deps, limited, request, purpose, call_id, chat)


async def _metered(
    state: RunState, deps: RunDeps, provider: LLMProvider, request: GenerateOptions, purpose: str, call_id: str, chat: ChatSpan
) -> GenerateResult:
    """Makes a side call and books what it and its failed attempts used."""
    failed: list[FailedUsage] = []

    def note(notice: ProviderNotice) -> None:
        chat.notice(notice)
        if isinstance(notice, RetryNotice | FallbackNotice) and notice.spent is not None:
            failed.append(notice.spent)

    try:
        result = await deps.abort.guard(provider.generate(replace(request, abort=deps.abort, notify=note)))
    except Exception as error:
        await deps.budget.release(call_id)
        model = request.model or provider.default_model
        if (spent := failed_usage(error, model)) is not None:
            failed.append(spent)
        final = to_provider_error(error, provider.name, model)
        if final is error:
            raise
        raise final from error
    finally:
        for number, attempt in enumerate(failed, 1):
            figures = priced(attempt.model or "unknown", attempt.usage, estimated=True)
            chat.booked(await _book_side(state, deps, figures, purpose, f"{call_id}-attempt-{number}"))
    figures = meter(provider, request, assistant(result.text, result.tool_calls), result.usage, result.served_by)
    chat.booked(await _book_side(state, deps, figures, purpose, call_id))
    chat.reply(_as_reply(result))
    return result


def _as_reply(result: GenerateResult) -> Reply:
    reply = Reply(result.text, result.tool_calls, hosted=result.hosted_tool_calls, served_by=result.served_by)
    reply.finish_reason, reply.response_model = cast("FinishReason", result.finish_reason), result.response_model
    return reply


async def _book_side(state: RunState, deps: RunDeps, figures: Metered, purpose: str, call_id: str) -> StepUsage:
    if figures.cost is None and state.usage.cost is not None and deps.budget.limits_cost:
        warn_unpriced(figures.model)
    figures.add_to(state.usage)
    cost_usd = None if figures.cost is None else float(figures.cost)
    entry = StepUsage(state.steps, figures.model, figures.usage, figures.estimated, cost_usd, purpose)
    state.step_usage.append(entry)
    await deps.budget.note(call_id, figures.spend)
    return entry
