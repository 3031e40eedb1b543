"""Field cases of the run loop against the strict fake server: odd output (O), tool schemas and names (T), interrupts (S)."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from lousho_ray import define_tool, memory_store, tool
from lousho_ray.errors import ConfigurationError
from lousho_ray.testing.fake_server import DONE, FIN, D, FakeServer, Reply, U, completion, gate, status
from tests.wire.matrix_support import Route, Toolbox, an_agent, play, provider_for

WANTED = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OPEN = {"type": "object", "properties": {"md": {"type": "string"}}, "required": ["md"]}


# ---------------------------------------------------------------------------------------------------------- O: structured output

READ: list[Any] = [
    ('```json\n{"n":1}\n```', WANTED, {"n": 1}),
    ('Sure! {"n":1} Hope [this] helps', WANTED, {"n": 1}),
    ('```json\n{"n":1}', WANTED, {"n": 1}),
    ('\ufeff{"n":1}', WANTED, {"n": 1}),
    ('{"md":"```py\\nx```"}', OPEN, {"md": "```py\nx```"}),
    ('```json\n{"md":"```py\\nx```"}\n```', OPEN, {"md": "```py\nx```"}),
]


def answers(server: FakeServer, text: str, streamed: bool) -> None:
    """The next reply of the server, in one piece or in single characters."""
    if streamed:
        server.on("chat", *[D({"content": char}) for char in text], FIN("stop"), U(10, 5), DONE)
    else:
        server.on("chat", status(200, body=completion({"content": text, "tool_calls": None})))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("text", "schema", "value"), READ)
async def test_the_one_value_in_a_reply_is_found(
    fake_server: FakeServer, text: str, schema: Any, value: Any, streamed: bool
) -> None:
    # O01
    answers(fake_server, text, streamed)
    async with an_agent(provider_for("chat", fake_server), [], output=schema) as agent:
        played = await play(agent, "Which?", streamed=streamed)
    assert played.result is not None, played.error
    assert (played.result.object, played.result.text, len(fake_server.requests)) == (value, text, 1)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "text", ['{"n":1}{"n":2}', '{"n":1,}', "I think 4", "I cannot help with that."], ids=["two", "comma", "prose", "refused"]
)
async def test_what_holds_no_one_value_is_asked_for_again_once(fake_server: FakeServer, text: str, streamed: bool) -> None:
    # O01, O02 (a refusal in plain words looks like prose), O04
    answers(fake_server, text, streamed)
    fake_server.respond(Reply(text))
    async with an_agent(provider_for("chat", fake_server), [], output=WANTED) as agent:
        played = await play(agent, "Which?", streamed=streamed)
    assert played.result is not None, played.error
    assert (played.result.finish_reason, played.result.object, played.result.text) == ("output-invalid", None, text)
    assert played.result.output_error is not None
    assert len(fake_server.requests) == 2
    assert "[output-invalid]" in json.dumps(fake_server.bodies[1])


# --------------------------------------------------------------------------------------------------------- T: schemas and names


class Model(BaseModel):
    a: int = 1


class Other(BaseModel):
    b: str


class Node(BaseModel):
    label: str
    children: list[Node] = []


@tool
async def wide(
    x: Any,
    d: dict[str, int],
    o: int | None = 3,
    m: Model = Model(),  # noqa: B008 - the case is about this
    node: Node | None = None,
    either: Model | Other | None = None,
    digit: Literal[1, 2] = 1,
    nothing: Literal["", None] = None,
) -> str:
    """Takes everything."""
    return type(m).__name__


@pytest.mark.parametrize("route", ["chat", "responses", "messages", "ollama", "openrouter"])
async def test_parameters_of_every_shape_are_declared_so_that_each_vendor_takes_them(fake_server: FakeServer, route: Route) -> None:
    # T01, T02: no parameter list breaks the request, and the tool is called with what it declares
    raw = {
        "type": "object",
        "properties": {"any": {}, "free": {"additionalProperties": {}}, "one": {"const": "a"}},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    }
    odd = define_tool(name="odd", description="Odd.", input=raw, execute=lambda args: "odd")
    fake_server.respond([Reply(tool_calls=[("wide", {"x": 1, "d": {"k": 2}}), ("odd", {"one": "a"})]), Reply("done")])
    async with an_agent(provider_for(route, fake_server), [wide, odd]) as agent:
        played = await play(agent, "Go", streamed=True)
    assert played.result is not None, played.error
    assert [json.loads(message.text) for message in played.result.messages if message.role == "tool"] == ["Model", "odd"]


def bare(x) -> str:  # type: ignore[no-untyped-def]
    """No annotation."""
    return str(x)


def starred(*args: int) -> str:
    """Any number."""
    return str(args)


@pytest.mark.parametrize("function", [bare, starred])
def test_parameters_that_no_schema_describes_are_refused_at_once(function: Any) -> None:
    # T01
    with pytest.raises(ConfigurationError) as caught:
        tool(function)
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"


@pytest.mark.parametrize("name", ["nope", "Search", " search", "functions.search", ""])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_invented_name_is_an_error_that_lists_the_tools(fake_server: FakeServer, name: str, streamed: bool) -> None:
    # T04
    box = Toolbox(["search"])
    fake_server.respond([Reply(tool_calls=[(name, {})]), Reply("done")])
    async with an_agent(provider_for("chat", fake_server), box.tools) as agent:
        played = await play(agent, "Go", streamed=streamed)
    assert played.result is not None, played.error
    (answer,) = [json.loads(message.text) for message in played.result.messages if message.role == "tool"]
    if name.strip() == "search":
        assert (box.runs, answer["ran"]) == ([("search", {})], "search")
    else:
        assert (box.runs, answer["kind"]) == ([], "not-found")
        assert "search" in answer["message"]
    assert played.result.text == "done"


# ------------------------------------------------------------------------------------------------------------- S: interrupts


class Paced:
    """Three tools of which one waits."""

    def __init__(self, result: Any = "ok") -> None:
        self.waiting, self.go = asyncio.Event(), asyncio.Event()
        schema = {"type": "object", "properties": {}}

        async def slow(args: Any) -> Any:
            self.waiting.set()
            await self.go.wait()
            return result

        async def quick(args: Any) -> Any:
            return result

        self.tools = [define_tool(name="slow", description="Slow.", input=schema, execute=slow)]
        self.tools += [define_tool(name=name, description="Quick.", input=schema, execute=quick) for name in ("one", "two")]


@pytest.mark.parametrize("route", ["chat", "responses", "messages"])
async def test_steers_while_tools_run_join_behind_all_results_in_their_order(fake_server: FakeServer, route: Route) -> None:
    # S13 (a, c), S20: the strict server takes the request, and a steer is a user message of its own
    paced = Paced("r" * 3_000)
    fake_server.respond([Reply(tool_calls=[("one", {}), ("slow", {}), ("two", {})]), Reply("done")])
    async with an_agent(provider_for(route, fake_server), paced.tools, max_tool_result_chars=2_000) as agent:
        run = agent.stream("Go")
        await paced.waiting.wait()
        steers = [run.steer(f"steer {number} " + "s" * 2_500) for number in range(3)]
        paced.go.set()
        result = await run.result
        assert [await steer.applied for steer in steers] == [True, True, True]
    roles = [message.role for message in result.new_messages]
    assert roles == ["user", "assistant", "tool", "tool", "tool", "user", "user", "user", "assistant"]
    texts = [message.text for message in result.new_messages if message.role == "user"][1:]
    assert [text[:8] for text in texts] == ["steer 0 ", "steer 1 ", "steer 2 "]
    assert all(text.endswith("s" * 2_500) for text in texts)
    assert not any("steer" in message.text for message in result.new_messages if message.role == "tool")


async def test_a_steer_during_the_final_text_gets_a_step_and_one_after_the_end_says_so(fake_server: FakeServer) -> None:
    # S13 (b, d)
    fake_server.on("chat", D({"content": "half "}), gate("more"), D({"content": "done"}), FIN("stop"), U(10, 5), DONE)
    fake_server.respond(Reply("and that"))
    async with an_agent(provider_for("chat", fake_server), []) as agent:
        run = agent.stream("Go")
        steer = None
        async for event in run:
            if event.type == "text.delta" and steer is None:
                steer = run.steer("And this?")
                fake_server.release("more")
        result = await run.result
        assert steer is not None
        assert (await steer.applied, result.text, result.steps) == (True, "and that", 2)
        late = run.steer("Too late.")
        assert await late.applied is False
    assert [message["content"] for message in fake_server.bodies[1]["messages"][-2:]] == ["half done", "And this?"]


@pytest.mark.parametrize("queued", [0, 3])
async def test_an_abort_before_the_first_request_ends_the_run_and_tells_what_was_not_taken(
    fake_server: FakeServer, queued: int
) -> None:
    # S16
    fake_server.respond(Reply("never"))
    async with an_agent(provider_for("chat", fake_server), []) as agent:
        run = agent.stream("Go")
        inputs = [run.enqueue(f"more {number}") for number in range(queued)]
        run.abort("stop")
        result = await run.result
        assert result.finish_reason == "aborted"
        assert [await item.applied for item in inputs] == [False] * queued
        run.abort("again")  # nothing to interrupt: the result stands
        assert await run.result is result
    assert fake_server.requests == []


async def test_the_turn_after_an_interrupt_has_events_of_its_own_alone(fake_server: FakeServer) -> None:
    # S17
    fake_server.on("chat", D({"content": "old "}), gate("never"), D({"content": "old"}), FIN("stop"), DONE)
    fake_server.respond(Reply("hello"))
    async with memory_store() as store, an_agent(provider_for("chat", fake_server), [], store=store) as agent:
        session = agent.session("s")
        first = session.stream("Go")
        seen: list[Any] = []
        async for event in first:
            seen.append(event)
            if event.type == "text.delta":
                first.abort("stop")
                second = session.stream("hello")
        assert (await first.result).finish_reason == "aborted"
        after = [event async for event in second]
        assert (await second.result).text == "hello"
    assert {event.run_id for event in after} == {second.run_id}
    assert {event.run_id for event in seen} == {first.run_id}
    assert "old" not in "".join(getattr(event, "text", "") for event in after)
    assert [event.seq for event in after] == list(range(len(after)))
