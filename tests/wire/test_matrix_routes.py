"""One transcript on every route: fallbacks within a tool turn, sessions that change their provider, ids of any make (L07, H05)."""

from __future__ import annotations

import itertools
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from lousho_ray import SqliteStore, with_fallback, with_retry
from lousho_ray.messages import Message, ReasoningBlock, ToolCall, assistant, system, tool_result, user
from lousho_ray.ports import GenerateOptions
from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply, status
from tests.wire.matrix_support import Route, Toolbox, an_agent, play, provider_for, wire_route

FOUR: tuple[Route, ...] = ("responses", "messages", "chat", "ollama")
ALL: tuple[Route, ...] = (*FOUR, "mistral", "openrouter", "compatible")
ODD_IDS = ["functions.f:0", "x" * 70, "call_|fc_1", "toolu_01", "ä ö", "a b\n", "\ud83d", "call_1", "y" * 41, "9charsxxx"]


def calls_of(request: RecordedRequest) -> tuple[list[str], list[str]]:
    """The ids of the calls of a request and the ids of its results, in order."""
    body = request.body
    if request.route == "responses":
        items = body["input"]
        asked = [item["call_id"] for item in items if item.get("type") == "function_call"]
        return asked, [item["call_id"] for item in items if item.get("type") == "function_call_output"]
    if request.route == "messages":
        blocks = [block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]]
        asked = [block["id"] for block in blocks if block["type"] == "tool_use"]
        return asked, [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    asked = [call.get("id", "") for message in body["messages"] for call in message.get("tool_calls", ())]
    return asked, [message.get("tool_call_id", "") for message in body["messages"] if message["role"] == "tool"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("order", list(itertools.permutations(FOUR)), ids="-".join)
async def test_a_tool_turn_that_wanders_over_all_routes_and_back(
    fake_server: FakeServer, order: tuple[Route, ...], streamed: bool
) -> None:
    # L07, H05: in step n the first n providers are down, so that each one goes on with what the others began
    steps = [*range(len(order)), *reversed(range(len(order)))]
    answered: list[str] = []

    def answer(request: RecordedRequest) -> Any:
        step = len(answered)
        if step < len(steps) and order.index(request.route) < steps[step]:  # type: ignore[arg-type]
            return [status(400, body={"error": {"message": "down"}})]
        answered.append(request.route)
        if step == len(steps):
            return Reply("done")
        # The same id in every step, odd ones, and two calls in one turn.
        calls = [("f", {"x": step}, "call_1"), ("g", {"y": step}, ODD_IDS[step])]
        return Reply("Working.", tool_calls=calls, reasoning="hm" if request.route != "messages" else None)

    fake_server.respond(answer)
    box = Toolbox()
    async with AsyncExitStack() as stack:
        providers = [provider_for(route, fake_server) for route in order]
        for provider in providers:
            stack.push_async_callback(provider.aclose)
        chain = with_fallback([with_retry(provider, max_retries=0) for provider in providers])
        agent = await stack.enter_async_context(an_agent(chain, box.tools, retry=None, max_steps=20))  # type: ignore[arg-type]
        played = await play(agent, "first", streamed=streamed)
    assert played.result is not None, played.error
    assert (played.result.text, played.result.finish_reason) == ("done", "stop")
    assert answered == [*(order[step] for step in steps), order[0]]
    assert [args for name, args in box.runs if name == "f"] == [{"x": step} for step in range(len(steps))]
    assert [args for name, args in box.runs if name == "g"] == [{"y": step} for step in range(len(steps))]
    for request in fake_server.requests:
        asked, results = calls_of(request)
        assert asked == results
        assert request.route == "ollama" or len(set(asked)) == len(asked)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("first", FOUR)
async def test_a_session_goes_on_with_every_other_provider(
    fake_server: FakeServer, first: Route, streamed: bool, tmp_path: Path
) -> None:
    # L07: a new agent each turn, the transcript read from the store
    box = Toolbox()
    routes = [first, *(route for route in ALL if route != first), first]
    for turn, route in enumerate(routes):
        calls = [("f", {"x": turn}, "call_f"), ("f", {"x": -1 - turn}, "call_f" if route != "responses" else "call_g")]
        fake_server.respond([Reply("Two.", tool_calls=calls, reasoning="hm"), Reply(f"done {turn}")], route=wire_route(route))
        async with (
            SqliteStore(tmp_path / "s.db") as store,
            an_agent(provider_for(route, fake_server), box.tools, store=store) as agent,
        ):
            played = await play(agent.session("s"), f"turn {turn}", streamed=streamed)
        assert played.result is not None, played.error
        assert played.result.text == f"done {turn}"
        asked, results = calls_of(fake_server.requests[-1])
        assert asked == results
        assert len(asked) == 2 * (turn + 1)
    assert len(box.runs) == 2 * len(routes)


@pytest.mark.parametrize("route", ALL)
@pytest.mark.parametrize("ids", [[one] for one in ODD_IDS] + [[""], ["", ""], ["a", "a"], ["call_f", "call_f", "call_f"], ODD_IDS])
@pytest.mark.parametrize("tools", [True, False], ids=["tools", "no-tools"])
async def test_a_history_with_call_ids_of_any_make(fake_server: FakeServer, route: Route, ids: list[str], tools: bool) -> None:
    # L07, H05: also for an agent that lacks the tools of the history
    calls = [ToolCall(call_id, "f", json.dumps({"n": number})) for number, call_id in enumerate(ids)]
    results = [tool_result(call, json.dumps({"result": number})) for number, call in enumerate(calls)]
    signed = (ReasoningBlock("hm", "foreign-signature", None, "elsewhere", "m"),)
    history = [
        user("Hi"),
        Message("assistant", "Wait.", tool_calls=tuple(calls), reasoning=signed),
        *results,
        assistant("So."),
        user("first"),
    ]
    fake_server.respond("done")
    async with an_agent(provider_for(route, fake_server), Toolbox().tools if tools else ()) as agent:
        result = await agent.send(history)
    assert (result.text, len(fake_server.requests)) == ("done", 1)
    asked, answers = calls_of(fake_server.requests[0])
    assert asked == answers
    assert len(asked) == len(ids)
    assert route == "ollama" or len(set(asked)) == len(ids)
    assert "foreign-signature" not in fake_server.requests[0].raw.decode()


@pytest.mark.parametrize("route", ALL)
@pytest.mark.parametrize(
    "history",
    [
        [user("Hi"), assistant("", [ToolCall("a", "f", "{}")])],
        [
            user("Hi"),
            assistant("", [ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")]),
            tool_result(ToolCall("b", "f", "{}"), "2"),
        ],
        [user("Hi"), tool_result(ToolCall("z", "f", "{}"), "1"), assistant("Yes.")],
        [user("Hi"), assistant("", [ToolCall("a", "f", "{}")]), user("Well?"), tool_result(ToolCall("a", "f", "{}"), "1")],
        [assistant("I begin.")],
        [user("Hi"), assistant("")],
        [user("Hi"), assistant(" \n")],
        [user(""), assistant("Yes.")],
        [user("Hi"), user("there"), assistant("A"), assistant("B")],
        [user("Hi"), assistant("", [ToolCall("a", "f", "[not json")]), tool_result(ToolCall("a", "f", ""), "")],
        [
            user("Hi"),
            assistant("", [ToolCall("a", "no such tool!", '"text"')]),
            tool_result(ToolCall("a", "no such tool!", ""), "\n"),
        ],
        [user("Hi \ud83d"), assistant("\ude00"), user("\ud83d\ude00")],
    ],
    ids=[
        *("unanswered", "half-answered", "orphan", "answered-late", "assistant-first", "empty-turn", "blank-turn", "empty-user"),
        *("in-a-row", "malformed-arguments", "odd-tool", "surrogates"),
    ],
)
async def test_an_odd_history_is_mended_on_its_way(fake_server: FakeServer, route: Route, history: list[Message]) -> None:
    # S01 as it meets the wire: what was stored by an older version, another program, or a crash
    fake_server.respond("done")
    options: dict[str, Any] = {"messages": [*history, user("first")]}
    provider = provider_for(route, fake_server)
    result = await provider.generate(GenerateOptions(**options))  # type: ignore[attr-defined]
    await provider.aclose()
    assert result.text == "done"


def told(request: RecordedRequest) -> tuple[str, list[Any]]:
    """The system prompt of a request, and its other messages."""
    body = request.body
    if request.route == "responses":
        return body["instructions"], body["input"]
    if request.route == "messages":
        return "".join(block["text"] for block in body["system"]), body["messages"]
    first, *rest = body["messages"]
    assert first["role"] == "system"
    return first["content"], rest


@pytest.mark.parametrize("route", ALL)
async def test_a_routing_note_moves_to_the_end_of_the_system_prompt(fake_server: FakeServer, route: Route) -> None:
    # HO-16: the note stands behind the result of its call; no request has a system message after the first other one
    call = ToolCall("call_1", "transfer_to_sales", '{"reason":"price"}')
    notes = [f'[routing note - not from the user] handoff {way}: reason="price"' for way in ("desk -> sales", "sales -> desk")]
    marks = {"handoff": {"from": "desk", "to": "sales"}}
    history = [
        system("You sell."),
        user("How much?"),
        assistant("", (call,)),
        tool_result(call, "transferred", metadata=marks),
        Message("system", notes[0], metadata=marks),
        assistant("Ten."),
        Message("system", notes[1], metadata=marks),
        user("Thanks."),
    ]
    provider = provider_for(route, fake_server)
    fake_server.respond(Reply("ok"))
    await provider.generate(GenerateOptions(history))  # type: ignore[attr-defined]
    await provider.aclose()
    prompt, rest = told(fake_server.requests[-1])
    assert prompt == "\n\n".join(["You sell.", *notes])
    assert [item for item in rest if item.get("role") in ("system", "developer")] == []
    assert "routing note" not in json.dumps(rest)
    assert history[4].text == notes[0]  # the transcript keeps it in its place
