"""What the tests of the run loop share: gated models, gated tools, event snapshots, and the rules a transcript must keep."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from lousho_ray.agent import Agent
from lousho_ray.create import create_agent
from lousho_ray.events import Event
from lousho_ray.messages import Message, ToolCall
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    ReasoningChunk,
    ReasoningEndChunk,
    ServedBy,
    TextChunk,
    ToolCallChunk,
    ToolDefinition,
)
from lousho_ray.providers.anthropic_wire import build_request
from lousho_ray.providers.openai_chat import ChatDialect, chat_request
from lousho_ray.providers.openai_responses import responses_request
from lousho_ray.providers.transcript import paired
from lousho_ray.testing.fake_server import anthropic_rules, chat_rules, responses_rules
from lousho_ray.testing.fake_server.records import RecordedRequest
from lousho_ray.testing.fake_server.replies import Issued
from lousho_ray.testing.fake_server.rule import Checked
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import Tool, define_tool
from lousho_ray.usage import ProviderUsage

# ------------------------------------------------------------------------------------------------------------------ transcripts


def check_transcript(messages: Sequence[Message]) -> None:
    """Every provider accepts the transcript, without anything being mended on the way to it."""
    turns = [message for message in messages if message.role != "system"]
    assert paired(turns), f"calls and results do not pair up: {[(m.role, m.tool_calls, m.tool_call_id) for m in turns]}"
    for message in turns:
        if message.role == "tool":
            json.loads(message.text)
    if not turns or turns[-1].role == "assistant":
        turns.append(Message("user", "Go on."))
    names = sorted({call.name for message in turns for call in message.tool_calls})
    tools = tuple(ToolDefinition(name, name, {"type": "object", "properties": {}}) for name in names)
    options = GenerateOptions([message.with_() for message in turns], tools=tools)
    bodies = (
        ("chat", "/v1/chat/completions", chat_request(options, "gpt-4o-mini", ChatDialect(), _refuse), chat_rules.CHECKS),
        ("responses", "/v1/responses", responses_request(options, "gpt-4o-mini", "send", _refuse), responses_rules.CHECKS),
        ("messages", "/v1/messages", build_request(options, "claude-sonnet-4-5", _refuse).encode(), anthropic_rules.CHECKS),
    )
    for route, path, raw, checks in bodies:
        body = json.loads(raw)
        request = RecordedRequest(0, route, "POST", path, _HEADERS, b"", body, 0, 0.0)
        for check in checks:
            check(Checked(request, Issued()))


_HEADERS = {"authorization": "Bearer x", "x-api-key": "x", "anthropic-version": "2023-06-01"}


def _refuse(key: str, text: str) -> None:
    raise AssertionError(f"the transcript had to be mended: {key}: {text}")


def results(messages: Sequence[Message]) -> list[Any]:
    """The decoded tool results of a transcript, in order."""
    return [json.loads(message.text) for message in messages if message.role == "tool"]


def kinds(messages: Sequence[Message]) -> list[str]:
    """The kind of each tool result: `ok`, or the kind of the error."""
    return [json.loads(message.text)["kind"] if message.is_error else "ok" for message in messages if message.role == "tool"]


def shape(messages: Sequence[Message]) -> list[str]:
    """A transcript in short: `user:Hi`, `assistant:+a,b`, `tool:a`."""
    return [_short(message) for message in messages]


def _short(message: Message) -> str:
    if message.role == "tool":
        return f"tool:{message.tool_name}"
    calls = ",".join(call.name for call in message.tool_calls)
    return f"{message.role}:{message.text}{'+' + calls if calls else ''}"


# --------------------------------------------------------------------------------------------------------------------- events


def names(events: Sequence[Event]) -> list[str]:
    """An event stream in short: its types, with what tells two events of a type apart."""
    return [_name(event) for event in events]


def _name(event: Any) -> str:
    kind: str = event.type
    match kind:
        case "step.start":
            label = f"{kind} {event.step}"
        case "step.done":
            label = f"{kind} {event.step} {event.finish_reason}"
        case "text.delta" | "text.done" | "reasoning.delta" | "reasoning.done":
            label = f"{kind} {event.text}"
        case "tool.start" | "tool.done" | "tool.error":
            label = f"{kind} {event.tool_name}"
        case "tool.partial":
            label = f"{kind} {event.tool_name} {event.index} {event.output}"
        case "run.done":
            label = f"{kind} {event.finish_reason}"
        case "budget.exceeded":
            label = f"{kind} {event.limit}"
        case "input.steered":
            label = f"{kind} {event.mode}"
        case "input.applied":
            label = f"{kind} {event.step}"
        case "provider.retry":
            label = f"{kind} {event.attempt}"
        case "error":
            label = f"{kind} {event.error.name}"
        case _:
            label = kind
    return f"[{event.subagent.name}] {label}" if event.subagent is not None else label


def check_events(events: Sequence[Event]) -> None:
    """The ordering rules that hold for every stream."""
    assert [event.seq for event in events] == list(range(len(events)))  # EVT-14
    assert len({event.run_id for event in events}) == 1
    assert [event.timestamp for event in events] == sorted(event.timestamp for event in events)  # EVT-D10
    kinds_seen = [event.type for event in events]
    assert kinds_seen.count("run.done") == 1  # EVT-25
    assert kinds_seen[-1] == "run.done"
    assert kinds_seen.count("run.start") <= 1
    for event in events:
        assert json.loads(json.dumps(event.to_dict())) == event.to_dict()  # EVT-16
        assert None not in [value for key, value in event.to_dict().items() if key != "result"]
    streams: dict[str, list[Any]] = {}
    for event in events:
        streams.setdefault(_who(event), []).append(event)
    for part in streams.values():
        _check_steps(part)
        _check_calls(part)


def _who(event: Event) -> str:
    """Which run of the tree an event is of."""
    path, info = "", event.subagent
    while info is not None:
        path, info = f"/{info.tool_call_id}{path}", info.parent
    return path


def _check_steps(events: Sequence[Any]) -> None:
    open_step: int | None = None
    for event in events:
        if event.type == "step.start":
            assert open_step is None, f"step {event.step} starts inside step {open_step}"  # EVT-27
            open_step = event.step
        elif event.type == "step.done":
            assert open_step == event.step
            open_step = None
        elif event.type.startswith(("text.", "reasoning.", "tool.", "provider.")):
            assert open_step is not None, f"{event.type} outside a step"
        elif event.type == "input.applied":
            assert open_step is None  # EVT-34
    assert open_step is None, f"step {open_step} has no step.done"


def _check_calls(events: Sequence[Any]) -> None:
    started: list[str] = []
    ended: list[str] = []
    for event in events:
        if event.type == "tool.start":
            assert event.tool_call_id not in started
            started.append(event.tool_call_id)
        elif event.type in ("tool.done", "tool.error"):
            assert event.tool_call_id in started
            assert event.tool_call_id not in ended
            ended.append(event.tool_call_id)
        elif event.type == "tool.partial":
            assert event.tool_call_id in started
            assert event.tool_call_id not in ended
    assert sorted(started) == sorted(ended), "a tool.start has no tool.done or tool.error"


async def collect(run: Any) -> list[Any]:
    """All events of a run, checked."""
    events = [event async for event in run]
    check_events(events)
    return events


# --------------------------------------------------------------------------------------------------------------------- models


def agent_of(*turns: Any, **options: Any) -> Agent:
    """An agent on a scripted model."""
    return create_agent(provider=mock_model(turns), **options)


def calls(*wanted: Any, text: str = "", **more: Any) -> dict[str, Any]:
    """A turn that calls tools: names, or `(name, args)`."""
    pairs = [(item, {}) if isinstance(item, str) else item for item in wanted]
    return {"text": text, "tool_calls": [{"name": name, "args": args} for name, args in pairs], **more}


def asks(*wanted: Any, text: str = "", usage: ProviderUsage | None = None) -> GenerateResult:
    """A provider's reply that calls tools: names, or `(name, args)`; ids are `<name>_<position>`."""
    pairs = [(item, {}) if isinstance(item, str) else item for item in wanted]
    made = tuple(ToolCall(f"{name}_{index}", name, json.dumps(args)) for index, (name, args) in enumerate(pairs))
    return GenerateResult(text, made, "tool_calls", usage)


Step = Chunk | BaseException | asyncio.Event | Callable[[], Any]


class ScriptedStream:
    """A provider that plays each call's list of chunks; between them it waits for events, calls functions, raises errors.

    `at` has, per call, an event that is set when the call is about to play the step at that position.
    """

    name = "scripted"
    default_model: str | None = "scripted-1"

    def __init__(self, *scripts: Sequence[Step], deaf: bool = False) -> None:
        self.scripts = [list(script) for script in scripts]
        self.requests: list[GenerateOptions] = []
        self.closed = 0
        self._deaf = deaf
        self._reached: dict[tuple[int, int], asyncio.Event] = {}

    def reached(self, call: int, position: int) -> asyncio.Event:
        """Set when call number `call` (from 0) is about to play its step number `position`."""
        return self._reached.setdefault((call, position), asyncio.Event())

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        text: list[str] = []
        made: list[ToolCall] = []
        finish = FinishChunk("other")
        async for chunk in self.stream(options):
            match chunk:
                case TextChunk(text=piece):
                    text.append(piece)
                case ToolCallChunk(tool_call=call):
                    made.append(call)
                case FinishChunk():
                    finish = chunk
        return GenerateResult("".join(text), tuple(made), finish.finish_reason, finish.usage)

    async def stream(self, options: GenerateOptions, /) -> AsyncGenerator[Chunk, None]:
        number = len(self.requests)
        self.requests.append(options)
        try:
            for position, step in enumerate(self.scripts[number]):
                self.reached(number, position).set()
                if isinstance(step, asyncio.Event):
                    await self._wait(step)
                elif isinstance(step, BaseException):
                    raise step
                elif callable(step):
                    step()
                else:
                    yield step
        finally:
            self.closed += 1

    async def _wait(self, event: asyncio.Event) -> None:
        while True:
            try:
                await event.wait()
                return
            except asyncio.CancelledError:
                if not self._deaf:
                    raise


def say(text: str, usage: ProviderUsage | None = None) -> list[Step]:
    return [TextChunk(text), FinishChunk("stop", usage)]


def want(*wanted: str) -> list[Step]:
    return [*(ToolCallChunk(call) for call in asks(*wanted).tool_calls), FinishChunk("tool_calls")]


def think(text: str) -> list[Step]:
    return [ReasoningChunk(text), ReasoningEndChunk()]


class PolicyProvider:
    """Answers each request by a function, sync or async; counts calls and how many are in flight."""

    def __init__(self, policy: Callable[[GenerateOptions], Any], *, name: str = "policy", default_model: str = "policy-1") -> None:
        self.name = name
        self.default_model: str | None = default_model
        self.calls = 0
        self.running = 0
        self.most = 0
        self._policy = policy

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            reply = self._policy(options)
            if isinstance(reply, Awaitable):
                reply = await reply
            return GenerateResult(reply, served_by=ServedBy(self.name, self.default_model)) if isinstance(reply, str) else reply
        finally:
            self.running -= 1


# ---------------------------------------------------------------------------------------------------------------------- tools


class Gate:
    """A tool that says when it runs and goes on when it is let."""

    def __init__(self, name: str, result: Any = "done", error: BaseException | None = None) -> None:
        self.name = name
        self.running = asyncio.Event()
        self.go = asyncio.Event()
        self.runs = 0
        self.cancelled = 0
        self._result = result
        self._error = error

    async def _execute(self, args: Any) -> Any:
        self.runs += 1
        self.running.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def tool(self) -> Tool[..., Any]:
        return define_tool(name=self.name, description=f"Gate {self.name}.", execute=self._execute)


def plain(name: str, result: Any = "done", log: list[str] | None = None) -> Tool[..., Any]:
    """An async tool that returns at once."""

    async def execute(args: Any) -> Any:
        if log is not None:
            log.append(name)
        return result

    return define_tool(name=name, description=f"Tool {name}.", execute=execute)


def failing(name: str, error: BaseException) -> Tool[..., Any]:
    async def execute(args: Any) -> Any:
        raise error

    return define_tool(name=name, description=f"Tool {name}.", execute=execute)


async def until(condition: Callable[[], object], rounds: int = 10_000) -> None:
    """Runs the event loop until something holds; fails when it does not come to it."""
    for _ in range(rounds):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came to hold")
