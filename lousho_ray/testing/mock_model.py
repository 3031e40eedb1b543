"""`mock_model`: a model that follows a script, for tests. No network, no key, deterministic."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from lousho_ray.clock import SYSTEM_CLOCK, Clock
from lousho_ray.errors import ConfigurationError, TestFailedError, suggest
from lousho_ray.messages import Message, ToolCall
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    HostedToolCall,
    HostedToolCallChunk,
    HostedToolResultChunk,
    TextChunk,
    ToolCallChunk,
)
from lousho_ray.usage import ProviderUsage

_TURN_KEYS = ("text", "tool_calls", "hosted_tool_calls", "error", "usage", "finish_reason", "delay_ms")
_CALL_KEYS = ("name", "args", "id")
_HOSTED_KEYS = ("name", "args", "id", "result", "is_error", "sources")
_USAGE_KEYS = ("input_tokens", "output_tokens")
_WORDS = re.compile(r"^\s+|\S+\s*")

SHOWN_CHARS = 200
"""How much of a message an error quotes."""


@dataclass(frozen=True, slots=True)
class MockTurn:
    """One reply of a script. A dict with the same keys, or a text alone, will do as well.

    Attributes:
        tool_calls: `{"name": ..., "args"?: {...}, "id"?: ...}` each; ids count `call_1`, `call_2`, ... over the script.
        hosted_tool_calls: Calls the model's provider ran itself: `{"name", "args"?, "result"?, "is_error"?, "sources"?, "id"?}`.
        error: Raised in place of a reply.
        usage: `{"input_tokens", "output_tokens"}`; left out, the provider reports none.
        finish_reason: Default `tool_calls` when there are calls, else `stop`.
        delay_ms: Waited before the reply or the error.
    """

    text: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    hosted_tool_calls: tuple[Mapping[str, Any], ...] = ()
    error: BaseException | None = None
    usage: Mapping[str, int] | None = None
    finish_reason: str | None = None
    delay_ms: float = 0


Reply: TypeAlias = str | MockTurn | Mapping[str, Any] | Exception
TurnFunction: TypeAlias = Callable[[GenerateOptions], Reply | Awaitable[Reply]]
ScriptTurn: TypeAlias = Reply | TurnFunction


def mock_model(
    script: Sequence[ScriptTurn],
    on_exhausted: Literal["throw", "repeat-last"] = "throw",
    *,
    name: str = "mock",
    default_model: str = "mock-model",
    clock: Clock = SYSTEM_CLOCK,
) -> MockModel:
    """A provider whose calls take the turns of `script` one after the other, in the order in which they arrive.

    Args:
        script: Each turn is a text, a `MockTurn` or a dict of its fields, an exception to raise, or a function of the frozen
            request, sync or async, that returns one of these.
        on_exhausted: What a call gets when no turn is left: an error, or the last turn again and again.
        name: The provider's name.
        default_model: The model id it reports.
        clock: Measures `delay_ms`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`: a turn that cannot be used, named by its number and field.
    """
    if on_exhausted not in ("throw", "repeat-last"):
        raise ConfigurationError(f'on_exhausted must be "throw" or "repeat-last"; got {on_exhausted!r}.', field="on_exhausted")
    if isinstance(script, str | Mapping) or not isinstance(script, Iterable):
        raise ConfigurationError(f"script must be a list of turns; got {type(script).__name__}.", field="script")
    turns = [turn if callable(turn) else _turn_of(turn, f"script[{index}]") for index, turn in enumerate(script)]
    return MockModel(turns, on_exhausted, name, default_model, clock)


class MockModel:
    """Made by `mock_model`. One model shared by concurrent calls hands out its turns in arrival order.

    Attributes:
        calls: A frozen snapshot of every request, in order. What the agent changes later does not show.
    """

    def __init__(
        self,
        script: Sequence[MockTurn | TurnFunction],
        on_exhausted: str,
        name: str,
        default_model: str | None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self.default_model = default_model
        self.calls: list[GenerateOptions] = []
        self._script = list(script)
        self._on_exhausted = on_exhausted
        self._clock = clock
        self._taken = 0
        self._numbered = 0

    @property
    def last_call(self) -> GenerateOptions | None:
        """The newest request."""
        return self.calls[-1] if self.calls else None

    def supports_tools(self, model: str | None = None) -> bool:
        return True

    def supports_streaming(self, model: str | None = None) -> bool:
        return True

    def supports_hosted_tool(self, type: str) -> bool:
        return True

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        return await self._reply(options)

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        reply = await self._reply(options)
        for hosted in reply.hosted_tool_calls:
            yield HostedToolCallChunk(hosted)
            yield HostedToolResultChunk(hosted)
        for word in _WORDS.findall(reply.text):
            yield TextChunk(word)
        for call in reply.tool_calls:
            yield ToolCallChunk(call)
        yield FinishChunk(reply.finish_reason, reply.usage)

    def assert_exhausted(self) -> None:
        """Raises `TestFailedError` (`LOUSHO_TEST_FAILED`, an `AssertionError`) when turns are left."""
        left = len(self._script) - self._taken
        if left > 0:
            turns = "turn was" if left == 1 else "turns were"
            following = f"turn {self._taken + 1}, {_shown(self._script[self._taken])}"
            raise TestFailedError(f"{left} scripted {turns} not used; next would have been {following}.")

    def reset(self) -> None:
        """Rewinds the script and the numbering of calls, and forgets the requests."""
        self._taken = self._numbered = 0
        self.calls = []

    async def _reply(self, options: GenerateOptions) -> GenerateResult:
        request = snapshot(options)
        self.calls.append(request)
        turn = self._take(request)
        if not isinstance(turn, MockTurn):
            number = self._taken
            made = turn(request)
            turn = _turn_of(await made if inspect.isawaitable(made) else made, f"the value returned by turn {number}")
        if turn.delay_ms > 0:
            await self._clock.sleep(turn.delay_ms / 1000)
        if turn.error is not None:
            raise turn.error
        return self._result(turn)

    def _take(self, request: GenerateOptions) -> MockTurn | TurnFunction:
        if self._taken < len(self._script):
            self._taken += 1
            return self._script[self._taken - 1]
        if self._on_exhausted == "repeat-last" and self._script:
            return self._script[-1]
        last = f"{request.messages[-1].role}: {request.messages[-1].text[:SHOWN_CHARS]!r}" if request.messages else "none"
        raise TestFailedError(
            f"The mock model has no turn for call {len(self.calls)} (its script has {len(self._script)}). "
            f"The last message of the request is {last}. Add a turn to the script, or pass on_exhausted='repeat-last'."
        )

    def _result(self, turn: MockTurn) -> GenerateResult:
        hosted = tuple(
            HostedToolCall(
                id=call.get("id") or self._next_id("hosted"),
                name=call["name"],
                args=call.get("args", {}),
                result=call.get("result"),
                is_error=bool(call.get("is_error", False)),
                sources=tuple(call.get("sources", ())),
            )
            for call in turn.hosted_tool_calls
        )
        calls = tuple(
            ToolCall(call.get("id") or self._next_id("call"), call["name"], _json(call.get("args"))) for call in turn.tool_calls
        )
        usage = None
        if turn.usage is not None:
            usage = ProviderUsage(turn.usage.get("input_tokens", 0), turn.usage.get("output_tokens", 0))
        reason = turn.finish_reason or ("tool_calls" if calls else "stop")
        return GenerateResult(turn.text, calls, reason, usage, hosted_tool_calls=hosted)

    def _next_id(self, kind: str) -> str:
        self._numbered += 1
        return f"{kind}_{self._numbered}"


# ------------------------------------------------------------------------------------------------------------ reading turns


def _turn_of(value: Any, where: str) -> MockTurn:
    if isinstance(value, str):
        return MockTurn(text=value)
    if isinstance(value, BaseException):
        return MockTurn(error=value)
    if isinstance(value, Mapping):
        _check_keys(value, _TURN_KEYS, where)
        value = MockTurn(**value)
    if not isinstance(value, MockTurn):
        raise ConfigurationError(
            f"{where} must be a text, a dict, a MockTurn, an exception or a function; got {type(value).__name__}.", field="script"
        )
    if not isinstance(value.text, str):
        raise ConfigurationError(f"{where}.text must be a text; got {type(value.text).__name__}.", field="script")
    if value.error is not None and not isinstance(value.error, BaseException):
        raise ConfigurationError(f"{where}.error must be an exception; got {type(value.error).__name__}.", field="script")
    if isinstance(value.delay_ms, bool) or not isinstance(value.delay_ms, int | float) or not value.delay_ms >= 0:
        raise ConfigurationError(f"{where}.delay_ms must be a number of milliseconds; got {value.delay_ms!r}.", field="script")
    calls, hosted = tuple(value.tool_calls or ()), tuple(value.hosted_tool_calls or ())
    for call in calls:
        _check_call(call, _CALL_KEYS, f"{where}.tool_calls")
    for call in hosted:
        _check_call(call, _HOSTED_KEYS, f"{where}.hosted_tool_calls")
    if value.usage is not None:
        _check_keys(value.usage, _USAGE_KEYS, f"{where}.usage")
    return replace(value, tool_calls=calls, hosted_tool_calls=hosted)


def _check_call(call: Any, keys: Sequence[str], where: str) -> None:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise ConfigurationError(f"Each item of {where} must be a dict with a name; got {call!r}.", field="script")
    _check_keys(call, keys, where)
    try:
        _json(call.get("args"))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"The args of {call['name']!r} in {where} are not JSON: {error}.", field="script") from error


def _check_keys(value: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in value:
        if key not in allowed:
            raise ConfigurationError(
                f"{where} has no field {key!r}; it takes {', '.join(allowed)}.{suggest(str(key), allowed)}", field="script"
            )


def _json(args: Any) -> str:
    return json.dumps({} if args is None else args, ensure_ascii=False)


def _shown(turn: MockTurn | TurnFunction) -> str:
    if not isinstance(turn, MockTurn):
        return f"the function {getattr(turn, '__name__', repr(turn))}"
    if turn.error is not None:
        return f"the error {turn.error!r}"
    if turn.tool_calls:
        return f"calls of {', '.join(str(call['name']) for call in turn.tool_calls)}"
    return f"the text {turn.text[:SHOWN_CHARS]!r}"


# --------------------------------------------------------------------------------------------------------- frozen snapshots


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("A recorded request cannot be changed.")


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed. Equal to a plain one; it pickles."""

    __setitem__: Any = _refuse
    __delitem__: Any = _refuse
    __ior__: Any = _refuse
    clear: Any = _refuse
    pop: Any = _refuse
    popitem: Any = _refuse
    setdefault: Any = _refuse
    update: Any = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self),))


class FrozenList(list[Any]):
    """A list that cannot be changed. Equal to a plain one; it pickles."""

    __setitem__: Any = _refuse
    __delitem__: Any = _refuse
    __iadd__: Any = _refuse
    __imul__: Any = _refuse
    append: Any = _refuse
    clear: Any = _refuse
    extend: Any = _refuse
    insert: Any = _refuse
    pop: Any = _refuse
    remove: Any = _refuse
    reverse: Any = _refuse
    sort: Any = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenList, (list(self),))


def snapshot(options: GenerateOptions) -> GenerateOptions:
    """A deep-frozen copy of a request. Tool schemas are kept by reference; callbacks and signals are left out."""
    return replace(
        options,
        messages=FrozenList(_frozen_message(message) for message in options.messages),
        tools=tuple(options.tools),
        hosted_tools=tuple(_frozen(tool) for tool in options.hosted_tools),
        settings=_frozen(options.settings),
        notify=None,
        abort=None,
    )


def _frozen_message(message: Message) -> Message:
    return message if message.metadata is None else replace(message, metadata=_frozen(message.metadata))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict({key: _frozen(item) for key, item in value.items()})
    if isinstance(value, list):
        return FrozenList(_frozen(item) for item in value)
    if type(value) is tuple:
        return tuple(_frozen(item) for item in value)
    if isinstance(value, set):
        return frozenset(value)
    return value
