"""Output schemas of any shape on every route: the strict fake server, which knows the vendors' rules for schemas, takes them."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from lousho_ray.testing.fake_server import FakeServer, RecordedRequest, Reply
from tests.wire.matrix_support import Route, Toolbox, an_agent, play, provider_for

ROUTES: tuple[Route, ...] = ("chat", "responses", "messages", "ollama", "openrouter", "compatible")


class Wide(BaseModel):
    """What strict modes stumble over: optional fields, defaults, unions, limits, texts of a format."""

    name: str = Field(min_length=1)
    note: str | None = None
    size: int | Literal["big", "small"] = Field(default=1, description="How big.")
    parts: list[Part] = Field(default=[], max_length=5)
    share: float = Field(default=0.5, ge=0, le=1)


class Part(BaseModel):
    kind: Literal["a", "b"] = "a"


class Tree(BaseModel):
    label: str
    children: list[Tree] = []


class Free(BaseModel):
    known: str
    more: dict[str, Any] = {}


WIDE = {"name": "x", "size": "big", "parts": [{"kind": "b"}]}
NULLABLE = {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "object"}}}
CASES: list[Any] = [
    pytest.param(Wide, WIDE, Wide.model_validate(WIDE), id="optional-union-limits"),
    pytest.param(Tree, {"label": "a", "children": [{"label": "b"}]}, Tree(label="a", children=[Tree(label="b")]), id="recursive"),
    pytest.param(Free, {"known": "k", "more": {"x": 1}}, Free(known="k", more={"x": 1}), id="free-form"),
    pytest.param(dict[str, int], {"a": 1}, {"a": 1}, id="dict"),
    pytest.param(list[Part], {"result": [{"kind": "b"}]}, [Part(kind="b")], id="list"),
    pytest.param(Wide | Part, {"result": {"kind": "b"}}, Part(kind="b"), id="union"),
    pytest.param(NULLABLE, {"a": None, "b": {"c": 1}}, {"a": None, "b": {"c": 1}}, id="json-schema"),
]


def sent_schema(request: RecordedRequest) -> Any:
    """The schema that a request asks its server to enforce."""
    body = request.body
    match request.route:
        case "chat":
            assert body["response_format"]["json_schema"]["strict"] is False  # PRV-30b
            return body["response_format"]["json_schema"]["schema"]
        case "responses":
            assert body["text"]["format"]["strict"] is False  # PRV-39b
            return body["text"]["format"]["schema"]
        case "messages":
            return body.get("output_config", {}).get("format", {}).get("schema")
        case _:
            return body["format"]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("output", "reply", "value"), CASES)
async def test_a_schema_of_any_shape_is_accepted_and_its_reply_validated(
    fake_server: FakeServer, route: Route, output: Any, reply: Any, value: Any, streamed: bool
) -> None:
    # RUN-73, RUN-74, RUN-75, PRV-D6
    options = {"structured_outputs": True} if route == "messages" else {}
    fake_server.respond([Reply("Hm."), Reply(json.dumps(reply))])
    async with an_agent(provider_for(route, fake_server, **options), [], output=output) as agent:
        played = await play(agent, "Which?", streamed=streamed)
        wanted = agent.definition.output.schema  # type: ignore[union-attr]
    assert played.error is None
    assert played.result is not None
    assert (played.result.finish_reason, played.result.object, played.result.steps) == ("stop", value, 2)
    first, second = (sent_schema(request) for request in fake_server.requests)
    assert first == second
    if route != "messages":
        assert first == wanted
    repair = json.dumps(fake_server.requests[1].body)
    assert "[output-invalid]" in repair


class Firm(BaseModel):
    """Every field is required: OpenAI's strict mode takes it."""

    name: str
    rooms: list[Room]
    note: str | None


class Room(BaseModel):
    number: int = Field(ge=1, description="From 1.")
    kind: Literal["single", "double"]


FIRM = {"name": "x", "rooms": [{"number": 1, "kind": "double"}], "note": None}


def at_openai(server: FakeServer, route: Route, **options: Any) -> Any:
    """A provider that takes the server for OpenAI's own."""
    provider: Any = provider_for(route, server, **options)
    provider.is_vendor = True
    return provider


def system_prompt(request: RecordedRequest) -> str:
    body = request.body
    if request.route == "responses":
        return str(body["instructions"])
    return json.dumps(body["system"] if request.route == "messages" else body["messages"][0])


async def sent_for(server: FakeServer, provider: Any, output: Any, reply: Any, **options: Any) -> RecordedRequest:
    """The one request of a run with this output schema."""
    server.respond(Reply(json.dumps(reply)))
    async with an_agent(provider, [], output=output, **options) as agent:
        assert (await agent.send("Which?")).finish_reason == "stop"
    return server.requests[-1]


@pytest.mark.parametrize(("output", "reply"), [(Firm, FIRM), (list[Room], {"result": FIRM["rooms"]})], ids=["model", "list"])
@pytest.mark.parametrize("route", ["chat", "responses"])
async def test_what_openai_enforces_is_sent_strict_and_left_out_of_the_prompt(
    fake_server: FakeServer, route: Route, output: Any, reply: Any
) -> None:
    # LES-55, RUN-74: the strict fake server takes it
    request = await sent_for(fake_server, at_openai(fake_server, route), output, reply)
    sent = request.body["response_format"]["json_schema"] if route == "chat" else request.body["text"]["format"]
    assert sent["strict"] is True
    assert "## Output format" in system_prompt(request)
    assert "single" not in system_prompt(request)
    told = await sent_for(fake_server, at_openai(fake_server, route), output, reply, output_prompt=True)
    assert "single" in system_prompt(told)


class Loose(BaseModel):
    """Optional fields of every kind, which strict mode does not know."""

    name: str
    size: int = 1
    note: str | None = "none"
    kind: Literal["single", "double"] = "single"
    rooms: list[Room] = []
    main: Room | None = None
    first: Room = Room(number=1, kind="single")


LOOSE = {"name": "x", "size": None, "note": None, "kind": None, "rooms": None, "main": None, "first": None}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ["chat", "responses"])
@pytest.mark.parametrize(
    ("output", "reply", "value"),
    [(Loose, LOOSE, Loose(name="x", note=None)), (Tree, {"label": "a", "children": None}, Tree(label="a"))],
    ids=["optional", "recursive"],
)
async def test_optional_fields_are_enforced_as_ones_that_may_be_null(
    fake_server: FakeServer, route: Route, output: Any, reply: Any, value: Any, streamed: bool
) -> None:
    # LES-55, RUN-74, PRV-30b, PRV-39b: the strict fake server takes it
    fake_server.respond(Reply(json.dumps(reply)))
    async with an_agent(at_openai(fake_server, route), [], output=output) as agent:
        played = await play(agent, "Which?", streamed=streamed)
    assert played.error is None
    assert played.result is not None
    assert (played.result.object, played.result.steps, played.result.finish_reason) == (value, 1, "stop")
    [request] = fake_server.requests
    sent = request.body["response_format"]["json_schema"] if route == "chat" else request.body["text"]["format"]
    assert sent["strict"] is True
    assert sorted(sent["schema"]["required"]) == sorted(sent["schema"]["properties"])
    assert "properties" not in system_prompt(request)


@pytest.mark.parametrize("route", ["chat", "responses"])
@pytest.mark.parametrize(("output", "reply", "told"), [(Wide, WIDE, "How big."), (Free, {"known": "k"}, "known")])
async def test_a_schema_that_strict_mode_cannot_say_stays_a_hint_and_in_the_prompt(
    fake_server: FakeServer, route: Route, output: Any, reply: Any, told: str
) -> None:
    # LES-55, PRV-30b, PRV-39b
    request = await sent_for(fake_server, at_openai(fake_server, route), output, reply)
    sent = request.body["response_format"]["json_schema"] if route == "chat" else request.body["text"]["format"]
    assert sent["strict"] is False
    assert told in system_prompt(request)


@pytest.mark.parametrize("route", ROUTES)
async def test_where_nothing_is_enforced_the_schema_stands_in_the_prompt(fake_server: FakeServer, route: Route) -> None:
    # LES-55, RUN-74
    request = await sent_for(fake_server, provider_for(route, fake_server), Firm, FIRM)
    assert "single" in system_prompt(request)


@pytest.mark.parametrize(
    ("structured_outputs", "output", "reply", "told"),
    [(True, Firm, FIRM, False), (False, Firm, FIRM, True), (True, Tree, {"label": "a"}, True)],
    ids=["on", "off", "recursive"],
)
async def test_anthropic_enforces_what_its_structured_outputs_can_say(
    fake_server: FakeServer, structured_outputs: bool, output: Any, reply: Any, told: bool
) -> None:
    # LES-55, PRV-D6
    provider = provider_for("messages", fake_server, structured_outputs=structured_outputs)
    request = await sent_for(fake_server, provider, output, reply)
    assert ("properties" in system_prompt(request)) is told
    assert ("output_config" in request.body) is not told


@pytest.mark.parametrize(("fallback", "told"), [("responses", False), ("ollama", True)])
async def test_with_fallbacks_each_provider_has_to_enforce_it(fake_server: FakeServer, fallback: Route, told: bool) -> None:
    # LES-55: whoever answers was told, or is held to it
    behind = at_openai(fake_server, fallback) if fallback == "responses" else provider_for(fallback, fake_server)
    request = await sent_for(fake_server, at_openai(fake_server, "chat"), Firm, FIRM, fallback_models=[behind])
    assert ("single" in system_prompt(request)) is told


CLAUDES: dict[str, tuple[Route, str]] = {
    "messages": ("messages", "claude-haiku-4-5"),
    "openrouter": ("openrouter", "anthropic/claude-haiku-4.5"),
    "gateway": ("compatible", "bedrock/anthropic.claude-haiku-4-5"),
}


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "messages"])
async def test_a_forced_answer_is_accepted_without_tools(fake_server: FakeServer, route: Route) -> None:
    # RUN-79
    second = await forced_answer(fake_server, provider_for(route, fake_server))
    assert not second.get("tools")


@pytest.mark.parametrize(("route", "model"), list(CLAUDES.values()), ids=list(CLAUDES))
async def test_claude_is_told_of_the_tools_that_were_called(fake_server: FakeServer, route: Route, model: str) -> None:
    # RUN-79, RUN-D4: it refuses a transcript with calls when no tools are defined, also behind a router or a gateway
    second = await forced_answer(fake_server, provider_for(route, fake_server, default_model=model))
    names = [tool["name"] if route == "messages" else tool["function"]["name"] for tool in second["tools"]]
    assert (names, second["tool_choice"]) == (["f"], {"type": "none"} if route == "messages" else "none")


async def forced_answer(fake_server: FakeServer, provider: Any) -> Any:
    """The body of the request that asks for the answer when no steps are left."""
    box = Toolbox()
    fake_server.respond([Reply(tool_calls=[("f", {"x": 1})]), Reply('{"kind": "b"}')])
    async with an_agent(provider, box.tools, output=Part, max_steps=1) as agent:
        played = await play(agent, "Which?", streamed=True)
    assert played.result is not None, played.error
    assert (played.result.finish_reason, played.result.object, len(box.runs)) == ("max-steps", Part(kind="b"), 1)
    first, second = (request.body for request in fake_server.requests)
    assert len(first["tools"]) > 1
    assert "[final-answer]" in json.dumps(second)
    return second
