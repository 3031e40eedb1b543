"""A session that lives at random: turns of every kind, decisions, deaths and take-overs, and what must hold whatever happens.

The conversation is in an outer store that survives; what a process does of it goes through a `Mortal`, which can be told to die at
any later moment. From then on nothing that the process tries has an effect.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from lousho_ray.create import create_agent
from lousho_ray.errors import CompactedError, CompactedLLMProviderError, LoushoError, SessionAwaitingApprovalError, StorageError
from lousho_ray.messages import Message, ToolCall
from lousho_ray.ports import (
    Chunk,
    FinishChunk,
    GenerateOptions,
    GenerateResult,
    ReasoningChunk,
    TextChunk,
    ToolCallChunk,
    ToolContext,
)
from lousho_ray.stores.durable_turns import turns_of
from lousho_ray.testing.clock import FakeClock
from lousho_ray.tools.tool import tool
from tests.unit.loop_support import check_events, check_transcript

SESSION = "talk"
LETTERS = "eeEogmqxzt"
"""What a step of a turn may be: calls with an effect, one or two at once or one that may not be repeated; calls that pause, alone
or between others; a question; a failure of the model that passes, or that does not; a call that fails."""


class Mortal:
    """What a process can reach. Every operation passes it before its effect and after it."""

    def __init__(self) -> None:
        self.dead = False
        self.left: int | None = None
        self.faults: list[int] = []
        self.faulty = False
        """Whether a store has failed, or done something whose answer was lost."""

    def die_in(self, moments: int) -> None:
        self.left = moments

    def fail_in(self, moments: int) -> None:
        self.faults.append(moments)

    def pass_by(self) -> None:
        if self.left is not None and not self.dead:
            self.left -= 1
            self.dead = self.left < 0
        if self.dead:
            raise StorageError("The process is dead.")

    def reach(self) -> None:
        """The way to a store, or back from it."""
        self.pass_by()
        self.faults = [left - 1 for left in self.faults]
        if any(left < 0 for left in self.faults):
            self.faults = [left for left in self.faults if left >= 0]
            self.faulty = True
            raise ConnectionError("The connection was lost.")

    def part(self, inner: Any) -> Any:
        return MortalPart(self, inner)

    def store(self, inner: Any) -> Any:
        """The store as this process sees it."""
        parts = {name: self.part(getattr(inner, name)) for name in ("sessions", "checkpoints", "approvals")}
        turns = turns_of(inner)
        if turns is not None:
            parts["turns"] = self.part(turns)
            parts["turns"].parts = (parts["sessions"], parts["checkpoints"])
        return SimpleNamespace(**parts)


class MortalPart:
    def __init__(self, mortal: Mortal, inner: Any) -> None:
        self._mortal, self._inner = mortal, inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            self._mortal.reach()
            answer = await method(*args, **options)
            self._mortal.reach()
            return answer

        return call


@dataclass(slots=True)
class Call:
    """One call of the session that is under way."""

    tag: int | None
    task: asyncio.Task[Any]
    run: Any = None
    joined: dict[int, Awaitable[bool]] = field(default_factory=dict)
    calm: bool = False
    """Whether nothing was unfinished when it was made."""
    stopped: bool = False


class World:
    """The session, everything that happened to it, and the rules."""

    def __init__(self, store: Any, clock: FakeClock, dice: random.Random) -> None:
        self.store, self.clock, self.dice = store, clock, dice
        self.tags = itertools.count()
        self.ids = itertools.count()
        self.expected: dict[int, str] = {}
        self.ran: Counter[str] = Counter()
        self.failures: Counter[tuple[int, int]] = Counter()
        self.broken: list[str] = []
        self.added: set[int] = set()
        """Inputs given to a run by name, which may be an earlier one than the last in line."""
        self.shared = False
        """Whether two processes work on the session at one time."""
        self.processes = [Process(self)]

    @property
    def process(self) -> Process:
        return self.processes[-1]

    # ------------------------------------------------------------------------------------------------------------ the model

    def plan(self, messages: list[Message]) -> tuple[int, str, int]:
        asked = max(index for index, message in enumerate(messages) if message.role == "user")
        tag, _, letters = messages[asked].text.partition(" ")
        return int(tag), letters, sum(message.role == "assistant" for message in messages[asked:])

    def reply(self, messages: list[Message]) -> tuple[str, list[ToolCall]]:
        tag, letters, step = self.plan(messages)
        if step >= len(letters):
            return f"done {tag}", []
        letter = letters[step]
        self.failures[tag, step] += 1
        if letter in "xz" and self.failures[tag, step] == 1:
            status = 500 if letter == "x" else 400
            category = "server-error" if letter == "x" else "invalid-request"
            raise CompactedLLMProviderError("It failed.", compacted=CompactedError(category, "It failed.", status=status))
        names = {"e": ["act"], "E": ["act", "act"], "o": ["once"], "g": ["guarded"], "m": ["act", "guarded", "act"], "t": ["bad"]}
        if letter == "q":
            return "", [ToolCall(f"c{next(self.ids)}", "ask_question", json.dumps({"question": f"What about {tag}?"}))]
        return "", [ToolCall(f"c{next(self.ids)}", name, "{}") for name in names.get(letter, ["act"])]

    # ------------------------------------------------------------------------------------------------------- what is stored

    async def record(self) -> dict[str, Any] | None:
        """The checkpoint of the unfinished turn."""
        messages = await self.store.sessions.load(SESSION) or []
        found: dict[str, Any] | None = await self.store.checkpoints.load(f"{SESSION}.turn-{len(messages)}")
        return found

    async def kept(self) -> tuple[list[Message], list[Message]]:
        """The transcript, and the whole conversation with that of an unfinished turn."""
        messages = await self.store.sessions.load(SESSION) or []
        record = await self.record()
        if record is None:
            return messages, messages
        stored = [Message.from_dict(message) for message in record["messages"]]
        if record.get("opening"):
            return messages, [*messages, *stored]
        return messages, [message for message in stored if message.role != "system"]

    async def check_rerun(self, call_id: str) -> None:
        """A call whose result is on record is not run again."""
        if self.shared:
            return
        record = await self.record()
        known = [message.get("toolCallId") for message in (record or {}).get("messages", ()) if message["role"] == "tool"]
        if record is not None and call_id in [*known, *record.get("settled", {})]:
            self.broken.append(f"call {call_id} was run although its result is recorded")

    async def check_asked(self, asked: list[Message]) -> None:
        """A reply that is on record is not asked for again."""
        if self.shared:
            return
        record = await self.record()
        if record is None or record.get("opening"):
            return
        stored = [message for message in record["messages"] if message["role"] != "system"]
        ahead, users = stored[len(asked) :], [message.text for message in asked if message.role == "user"]
        same = users == [message["content"] for message in stored[: len(asked)] if message["role"] == "user"]
        if ahead and ahead[0]["role"] == "assistant" and same:
            self.broken.append(f"a reply on record was asked for again: {ahead[0]} after {users}")

    # ------------------------------------------------------------------------------------------------------------- the rules

    async def check(self, *, released: bool = True) -> None:
        """Everything has come to rest: the rules must hold. `released` is whether every lease could be given back."""
        assert not self.broken, self.broken
        transcript, whole = await self.kept()
        check_valid(transcript)
        found = Counter(int(message.text.partition(" ")[0]) for message in whole if message.role == "user")
        doubled = [tag for tag, count in found.items() if count > 1]
        assert not doubled, f"inputs {doubled} are there twice: {[m.text for m in whole if m.role == 'user']}"
        for tag, state in self.expected.items():
            assert state != "must" or found[tag], f"input {tag} is lost: {sorted(found)}"
            assert state != "never" or not found[tag], f"input {tag} came back: {sorted(found)}"
            self.expected[tag] = "must" if found[tag] else "never"
        if not self.shared:
            order = [tag for tag in found if tag not in self.added]
            assert order == sorted(order), f"inputs are out of order: {order}"
        ask = getattr(self.store.sessions, "holder", None)
        holder = None if ask is None else await ask(SESSION)
        assert holder is None or not released, f"{holder} still has the lease"

    async def drop_pending(self) -> None:
        """A pending turn may be dropped by what comes: its inputs may be gone afterwards."""
        messages, whole = await self.kept()
        for message in whole[len(messages) :]:
            if message.role == "user":
                self.expected[int(message.text.partition(" ")[0])] = "may"

    def forget_inputs(self) -> None:
        for tag in self.expected:
            self.expected[tag] = "may"


class Process:
    """A process: an agent with handles on the session, and the calls that are under way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.mortal = Mortal()
        self.calls: list[Call] = []
        self.failed: list[BaseException] = []
        store = self.mortal.store(world.store)
        self.agent = create_agent(
            provider=Model(self),
            tools=self._tools(),
            ask_question=True,
            store=store,
            runtime="local",
            session_wait_ms=5_000,
            compaction={"context_window": 3_000, "threshold_percent": 0.5, "protected_tokens": 100},
        )
        self.handles = {policy: self.agent.session(SESSION, turn_policy=policy) for policy in ("wait", "queue", "steer")}

    def _tools(self) -> list[Any]:
        async def run(ctx: ToolContext, limit: int | None = None) -> str:
            self.mortal.pass_by()
            await self.world.check_rerun(ctx.tool_call_id)
            for _ in range(self.world.dice.randrange(6)):
                await asyncio.sleep(0)
            self.mortal.pass_by()
            self.world.ran[ctx.tool_call_id] += 1
            if limit is not None and self.world.ran[ctx.tool_call_id] > limit:
                self.world.broken.append(f"call {ctx.tool_call_id} was run {self.world.ran[ctx.tool_call_id]} times")
            return f"did {ctx.tool_call_id} " + "x" * self.world.dice.choice((0, 0, 600))

        @tool
        async def act(ctx: ToolContext) -> str:
            """Has an effect."""
            return await run(ctx)

        @tool(effect="once")
        async def once(ctx: ToolContext) -> str:
            """Has an effect that must not be repeated."""
            return await run(ctx, 1)

        @tool(needs_approval=True)
        async def guarded(ctx: ToolContext) -> str:
            """Needs a person."""
            return await run(ctx)

        @tool
        async def bad(ctx: ToolContext) -> str:
            """Fails."""
            await run(ctx)
            raise ValueError("no")

        return [act, once, guarded, bad]

    # --------------------------------------------------------------------------------------------------------------- calls

    def start(self, tag: int | None, body: Awaitable[Any], run: Any = None, *, calm: bool = False) -> None:
        self.calls.append(Call(tag, asyncio.ensure_future(body), run, calm=calm))

    async def calm(self) -> bool:
        return not self.calls and await self.world.record() is None

    async def outcome(self, call: Call) -> str:
        """What became of the input of a call: `must` be kept, `may` be, or `never` is."""
        try:
            result = await call.task
        except asyncio.CancelledError:
            return "may"
        except SessionAwaitingApprovalError:
            return "never"
        except Exception as error:
            if self.mortal.dead or self.mortal.faulty or self.world.shared:
                return "may"
            if getattr(error, "code", None) in REFUSED:
                return "never"
            if isinstance(error, CompactedLLMProviderError):
                # The turn of an earlier call may have failed again, which it is to be finished before this one.
                return "must" if error in self.failed or call.calm else "may"
            raise
        if result is None or call.stopped or self.mortal.faulty or self.world.shared:
            return "may"
        return "may" if result.finish_reason == "aborted" else "must"

    async def settle(self) -> None:
        """Waits until nothing is under way any more."""
        calls, self.calls = self.calls, []
        await asyncio.wait([call.task for call in calls]) if calls else None
        errors = [call.task.exception() for call in calls if call.calm and not call.task.cancelled()]
        self.failed = [error for error in errors if error is not None]
        stopped = any(call.stopped for call in calls)
        for call in calls:
            outcome = await self.outcome(call)
            joined = call.tag is not None and stopped  # it may have joined a turn that was stopped
            if call.tag is not None:
                self.world.expected[call.tag] = "may" if joined else outcome
            for tag in call.joined:
                self.world.expected[tag] = "may"
        await self.rest()

    async def rest(self) -> None:
        """Background saves come to their end."""
        for _ in range(3):
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and task not in self.world_tasks()]
            others = [task for task in others if task.get_name() != "driver" and task not in BEFORE]
            if others:
                await asyncio.wait(others, timeout=1.0)

    def world_tasks(self) -> set[Any]:
        return {call.task for process in self.world.processes for call in process.calls}


BEFORE: set[Any] = set()

REFUSED = {
    "LOUSHO_SESSION_AWAITING_APPROVAL",
    "LOUSHO_SESSION_TURN_FAILED",
    "LOUSHO_SESSION_BUSY",
    "LOUSHO_SESSION_TURN_PENDING",
    "LOUSHO_APPROVAL_NOT_FOUND",
    "LOUSHO_APPROVAL_ORPHANED",
}


class Model:
    """Streams what the plan of the newest input says."""

    name = "random"
    default_model: str | None = "random-1"

    def __init__(self, process: Process) -> None:
        self._process = process

    async def generate(self, options: GenerateOptions, /) -> GenerateResult:
        await self._think(options)
        text, calls = self._process.world.reply(_conversation(options))
        self._process.mortal.pass_by()
        return GenerateResult(text, tuple(calls), "tool_calls" if calls else "stop")

    async def stream(self, options: GenerateOptions, /) -> AsyncIterator[Chunk]:
        world = self._process.world
        await self._think(options)
        if world.dice.random() < 0.5:
            yield ReasoningChunk("Hm. ")
            await self._think(options)
        text, calls = world.reply(_conversation(options))
        for piece in text.split():
            yield TextChunk(piece + " ")
            await asyncio.sleep(0)
        for call in calls:
            yield ToolCallChunk(call)
        self._process.mortal.pass_by()
        yield FinishChunk("tool_calls" if calls else "stop")

    async def _think(self, options: GenerateOptions) -> None:
        self._process.mortal.pass_by()
        await self._process.world.check_asked(_conversation(options))
        for _ in range(self._process.world.dice.randrange(6)):
            await asyncio.sleep(0)


def _conversation(options: GenerateOptions) -> list[Message]:
    return [message for message in options.messages if message.role != "system"]


# ------------------------------------------------------------------------------------------------------------------ operations

Operation = Callable[[World], Awaitable[None]]


def _input(world: World) -> tuple[int, str]:
    tag = next(world.tags)
    letters = "".join(world.dice.choice(LETTERS) for _ in range(world.dice.choice((0, 1, 1, 2, 3))))
    world.expected[tag] = "may"
    return tag, f"{tag} {letters}".strip()


async def send(world: World) -> None:
    process, (tag, text) = world.process, _input(world)
    calm = await process.calm()
    process.start(tag, process.handles[world.dice.choice(("wait", "wait", "queue", "steer"))].send(text), calm=calm)
    await asyncio.sleep(0)  # calls are made in the order of their tags


async def stream(world: World) -> None:
    process, (tag, text) = world.process, _input(world)
    calm = await process.calm()
    run = process.handles[world.dice.choice(("wait", "wait", "queue", "steer"))].stream(text)
    leave = world.dice.choice((None, None, world.dice.randrange(8)))

    async def read() -> Any:
        events = []
        reading = aiter(run)
        async for event in reading:
            events.append(event)
            if leave is not None and len(events) > leave:
                call.stopped = True
                await reading.aclose()  # type: ignore[attr-defined]
                break
        else:
            if not process.mortal.dead:
                check_ended(events)
        return await run.result

    process.start(tag, read(), run, calm=calm)
    call = process.calls[-1]


def check_valid(messages: list[Message]) -> None:
    """Every vendor takes the transcript; what a compaction has taken out is no JSON any more."""
    check_transcript([one.with_(content='"pruned"') if one.text.startswith("[pruned:") else one for one in messages])


def check_ended(events: list[Any]) -> None:
    """A stream ends with `run.done`, or with the error that its result raises."""
    kinds = [event.type for event in events]
    if "error" in kinds and "run.done" not in kinds:
        assert kinds[-1] == "error", kinds
        return
    paused = {event.tool_call_id for event in events if event.type == "approval.requested"}
    told = [event for event in events if event.type != "tool.start" or event.tool_call_id not in paused]
    for seq, event in enumerate(told):
        told[seq] = replace(event, seq=seq)
    check_events(told)


async def go_on(world: World) -> None:
    for _ in range(world.dice.randrange(60)):
        await asyncio.sleep(0)


async def add(world: World) -> None:
    live = [call for call in world.process.calls if call.run is not None and not call.task.done()]
    if live:
        call = world.dice.choice(live)
        tag, text = _input(world)
        world.added.add(tag)
        added = (call.run.enqueue if world.dice.random() < 0.5 else call.run.steer)(text)
        call.joined[tag] = added.applied


async def stop(world: World) -> None:
    live = [call for call in world.process.calls if not call.task.done()]
    if live:
        call = world.dice.choice(live)
        call.stopped = True
        await world.drop_pending()
        if call.run is not None:
            call.run.abort("stopped")
        else:
            call.task.cancel()


async def settle(world: World) -> None:
    """All calls end. The next process finds what one left that died, failed, or was taken over."""
    if any(call.stopped for process in world.processes for call in process.calls):
        await world.drop_pending()
    for process in world.processes:
        await process.settle()
    if world.shared:
        world.added.update(world.expected)  # two processes have no order of calls
    world.shared = False
    over = any(process.mortal.dead or process.mortal.faulty for process in world.processes)
    world.processes = world.processes[-1:]
    await world.check(released=not over)
    if over:
        world.processes = [Process(world)]
        world.clock.advance(31_000)


async def take_over(world: World) -> None:
    """The process sleeps for longer than its lease, and wakes up while another one is at work."""
    if len(world.processes) == 1 and world.process.calls and hasattr(world.store.sessions, "claim"):
        world.shared = True
        world.clock.advance(31_000)
        world.processes.append(Process(world))


async def fail(world: World) -> None:
    world.process.mortal.fail_in(world.dice.randrange(40))


async def decide(world: World) -> None:
    await settle(world)
    undisturbed(world)
    process = world.process
    pending = await process.handles["wait"].pending()
    if pending is None or pending.approval_id is None:
        return
    approvals = process.agent.approvals
    for _ in range(world.dice.choice((1, 1, 2))):
        if pending.approval_kind == "question" and world.dice.random() < 0.7:
            body = approvals.answer(pending.approval_id, "That.")
        else:
            body = approvals.resolve(pending.approval_id, approved=world.dice.random() < 0.6, note="Because.")
        process.start(None, body)


async def resume(world: World) -> None:
    world.process.start(None, world.process.handles["wait"].resume())
    await asyncio.sleep(0)


async def resume_agrees(world: World) -> None:
    """`pending()` says what a `resume()` will do."""
    await settle(world)
    undisturbed(world)
    process = world.process
    pending, before = await process.handles["wait"].pending(), dict(world.ran)
    if pending is None:
        assert await process.handles["wait"].resume() is None
        assert before == world.ran
    elif pending.approval_id is not None and await world.store.approvals.load(pending.approval_id) is None:
        with suppress(CompactedLLMProviderError):  # somebody has decided it and died: the decision is good
            await process.handles["wait"].resume()
    elif pending.status == "awaiting-approval":
        with suppress(SessionAwaitingApprovalError):
            await process.handles["wait"].resume()
            raise AssertionError("a paused turn was resumed")
        assert before == world.ran
    else:
        try:
            assert await process.handles["wait"].resume() is not None
        except CompactedLLMProviderError:
            assert await process.handles["wait"].pending() is not None
    await process.rest()
    await world.check()


async def discard(world: World) -> None:
    if any(not call.task.done() for call in world.process.calls):
        return
    await settle(world)
    undisturbed(world)
    await world.drop_pending()
    await world.process.handles["wait"].discard_pending()
    assert await world.process.handles["wait"].pending() is None
    assert await world.record() is None
    await world.check()


async def compact(world: World) -> None:
    await settle(world)
    undisturbed(world)
    with suppress(LoushoError):
        await world.process.handles["wait"].compact(protected_tokens=10)
    await settle(world)


async def fork(world: World) -> None:
    await settle(world)
    undisturbed(world)
    session = world.process.handles["wait"]
    steps = len(await session.history())
    made = await session.fork(world.dice.randrange(steps + 1))
    check_valid(await made.load())
    assert await made.pending() is None
    await made.send(f"{next(world.tags)} e")
    check_valid(await made.load())
    await world.check()


async def clear(world: World) -> None:
    await settle(world)
    undisturbed(world)
    world.forget_inputs()
    try:
        await world.process.handles["wait"].clear()
    except SessionAwaitingApprovalError:
        return
    assert await world.process.handles["wait"].load() == []
    await world.check()


async def die(world: World) -> None:
    world.process.mortal.die_in(world.dice.randrange(25))
    for _ in range(world.dice.randrange(200)):
        await asyncio.sleep(0)
    world.process.mortal.die_in(0)
    await settle_dead(world)


async def settle_dead(world: World) -> None:
    with suppress(LoushoError):
        world.process.mortal.pass_by()
    await settle(world)


OPERATIONS: Mapping[Operation, int] = {
    send: 8,
    stream: 8,
    go_on: 8,
    add: 4,
    stop: 2,
    settle: 4,
    decide: 5,
    resume: 2,
    resume_agrees: 2,
    discard: 1,
    compact: 1,
    fork: 1,
    clear: 1,
    die: 2,
    fail: 2,
    take_over: 2,
}


def undisturbed(world: World) -> None:
    """What comes is no turn, whose failures are told apart by what they leave."""
    world.process.mortal.faults.clear()


async def live(store: Any, clock: FakeClock, seed: int, steps: int = 60) -> World:
    """A session's life; raises where a rule is broken, with what led to it."""
    dice = random.Random(seed)
    BEFORE.clear()
    BEFORE.update(asyncio.all_tasks())
    world = World(store, clock, dice)
    told: list[str] = []
    try:
        for operation in dice.choices(list(OPERATIONS), list(OPERATIONS.values()), k=steps):
            told.append(operation.__name__)
            await operation(world)
        await settle(world)
        undisturbed(world)
        for operation in itertools.cycle((decide, resume)):
            if await world.process.handles["wait"].pending() is None:
                break
            await operation(world)
            await settle(world)
    except BaseException as error:
        error.add_note(f"seed {seed} after {told}")
        raise
    finally:
        for process in world.processes:
            for call in process.calls:
                call.task.cancel()
    assert not world.broken, world.broken
    return world
