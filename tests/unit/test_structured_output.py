"""Structured output: what is sent, how replies are read, the repair step, the forced answer, and how a run with `output` ends."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError, LoushoError
from lousho_ray.events import RunDone
from lousho_ray.loop.output import Invalid, OutputContext, OutputContract, Valid, close_objects
from lousho_ray.ports import GenerateOptions
from lousho_ray.stores.memory import memory_store
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.tool import define_tool
from tests.unit.loop_support import (
    Gate,
    agent_of,
    calls,
    check_transcript,
    collect,
    kinds,
    names,
    plain,
    results,
    shape,
)


class City(BaseModel):
    name: str
    people: int = Field(default=0, ge=0)

    @field_validator("name")
    @classmethod
    def _tidy(cls, name: str) -> str:
        return name.strip().title()


class Place(TypedDict):
    x: int
    y: int


@dataclass
class Point:
    x: int
    y: int = 7


class Node(BaseModel):
    """A tree."""

    label: str
    children: list[Node] = []


CITY_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "people": {"type": "integer"}}, "required": ["name"]}
LISTS = {"type": "array", "items": {"$ref": "#"}}
BAD, GOOD = '{"name": 5, "people": -1}', '{"name": "rome", "people": 3}'
ROME = City(name="Rome", people=3)

# ------------------------------------------------------------------------------------------------------------- what a value is


@pytest.mark.parametrize(
    ("output", "reply", "value"),
    [
        (City, '{"name": "rome", "people": 3}', ROME),
        (Place, '{"x": 1, "y": 2}', {"x": 1, "y": 2}),
        (Point, '{"x": 1}', Point(1, 7)),
        (Node, '{"label": "a", "children": [{"label": "b"}]}', Node(label="a", children=[Node(label="b")])),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (list[int], "[1, 2]", [1, 2]),
        (list[City], '[{"name": "rome", "people": 3}]', [ROME]),
        (Literal["yes", "no"], '"yes"', "yes"),
        (int, "5", 5),
        (City | Place, '{"x": 1, "y": 2}', {"x": 1, "y": 2}),
        (City | None, "null", None),
        (CITY_SCHEMA, '{"name": "rome"}', {"name": "rome"}),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "integer"}, '{"result": 3}', 3),
        ({"type": ["string", "null"]}, "null", None),
        ({"enum": ["yes", "no"]}, '"no"', "no"),
        ({"const": 7}, "7", 7),
        ({"anyOf": [{"type": "integer"}, CITY_SCHEMA]}, '{"name": "rome"}', {"name": "rome"}),
        ({"$ref": "#/$defs/City", "$defs": {"City": CITY_SCHEMA}}, '{"name": "rome"}', {"name": "rome"}),
        (LISTS, "[[], [[]]]", [[], [[]]]),
    ],
)
async def test_the_object_is_the_validated_python_value_and_the_text_stays_raw(output: Any, reply: str, value: Any) -> None:
    # RUN-73
    result = await create_agent(provider=mock_model([reply]), output=output).send("Which?")
    assert (result.finish_reason, result.object, result.text) == ("stop", value, reply)
    assert type(result.object) is type(value)
    assert (result.output_error, result.steps, result.output_repaired) == (None, 1, False)


async def test_a_type_that_is_no_object_may_come_wrapped_as_its_sent_schema_says() -> None:
    # RUN-73: an API that takes a schema wants an object on top
    model = mock_model(['{"result": [1, 2]}'])
    result = await create_agent(provider=model, output=list[int]).send("Which?")
    assert result.object == [1, 2]
    sent = model.calls[0].response_format
    assert sent is not None
    assert sent.schema == {
        "type": "object",
        "properties": {"result": {"type": "array", "items": {"type": "integer"}}},
        "required": ["result"],
        "additionalProperties": False,
    }


async def test_a_schema_whose_top_is_no_object_is_wrapped_and_its_references_follow() -> None:
    # RUN-73: as with list[int]
    model = mock_model(['{"result": [["x"]]}', '{"result": []}'])
    nested = {"type": "array", "items": {"$ref": "#"}, "$defs": {"Name": {"type": "string"}}, "description": "Lists."}
    result = await create_agent(provider=model, output=nested).send("Which?")
    assert (result.object, result.output_repaired) == ([], True)
    assert result.output_repair_issues == [{"path": "result.0.0", "message": "must be of type array (got string)"}]
    sent = model.calls[0].response_format
    assert sent is not None
    assert sent.schema == {
        "type": "object",
        "properties": {"result": {"type": "array", "items": {"$ref": "#/properties/result"}, "description": "Lists."}},
        "required": ["result"],
        "additionalProperties": False,
        "$defs": {"Name": {"type": "string"}},
    }


@pytest.mark.parametrize(
    "output",
    [
        42,
        "City",
        [int],
        object(),
        City(name="rome"),
        lambda reply: reply,
        print,
        {"type": "nonsense"},
        {"type": "array", "items": 3},
        {"type": "object", "properties": 3},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}},
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}},
    ],
)
def test_what_is_no_schema_is_refused_when_the_agent_is_made(output: Any) -> None:
    # RUN-73
    with pytest.raises(ConfigurationError, match="output") as caught:
        create_agent(provider=mock_model(["x"]), output=output)
    assert (caught.value.code, caught.value.field) == ("LOUSHO_CONFIG_INVALID", "output")
    assert "`input`" not in str(caught.value)


async def test_a_call_cannot_bring_its_own_output() -> None:
    # RUN-73
    agent: Any = agent_of(GOOD, output=City)
    with pytest.raises((ConfigurationError, TypeError), match="output"):
        await agent.send("Which?", output=Place)


# ---------------------------------------------------------------------------------------------------------------- what is sent


async def test_the_schema_is_in_the_prompt_and_in_every_request_of_the_run() -> None:
    # RUN-11, RUN-74
    model = mock_model([calls("look"), BAD, GOOD])
    await create_agent(provider=model, output=City, tools=[plain("look")], instructions="Be brief.").send("Which?")
    assert len(model.calls) == 3
    for request in model.calls:
        assert request.response_format is not None
        schema = request.response_format.schema
        assert schema is not None
        assert set(schema["properties"]) == {"name", "people"}
        prompt = request.messages[0].text
        assert prompt.startswith("Be brief.")
        head, _, block = prompt.partition("## Output format")
        assert head
        assert json.loads(block[block.index("{") :]) == schema  # it is the last block


async def test_the_schema_is_also_sent_with_the_forced_answer() -> None:
    # RUN-74, RUN-79
    model = mock_model([calls("look"), GOOD])
    await create_agent(provider=model, output=City, tools=[plain("look")], max_steps=1).send("Which?")
    assert model.calls[1].response_format == model.calls[0].response_format


def test_every_object_node_is_closed_unless_it_says_otherwise() -> None:
    # RUN-75
    one = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {
            "inner": one,
            "maybe": {"type": ["object", "null"], "properties": {}},
            "rows": {"type": "array", "items": one},
            "either": {"anyOf": [one, {"type": "null"}]},
            "open": {**one, "additionalProperties": True},
            "texts": {"type": "object", "additionalProperties": {"type": "string"}},
            "free": {"type": "object"},
            "properties": one,
            "given": {"enum": [{"type": "object", "properties": {}}], "default": {"type": "object", "properties": {}}},
        },
        "$defs": {"one": one},
    }
    closed = close_objects(schema)
    shut = {**one, "additionalProperties": False}
    inner = closed["properties"]
    assert closed["additionalProperties"] is False
    assert (inner["inner"], inner["rows"]["items"], inner["either"]["anyOf"][0], inner["properties"]) == (shut, shut, shut, shut)
    assert inner["maybe"]["additionalProperties"] is False
    assert closed["$defs"]["one"] == shut
    assert (inner["open"]["additionalProperties"], inner["texts"]["additionalProperties"]) == (True, {"type": "string"})
    assert inner["free"] == {"type": "object"}  # closed, it could hold nothing at all
    assert inner["given"] == schema["properties"]["given"]  # type: ignore[index]
    assert "additionalProperties" not in schema  # the caller's own schema is not touched


def test_the_parts_of_a_combination_stay_open() -> None:
    # RUN-75: each knows only some of the properties, closed ones would exclude each other
    part = {"type": "object", "properties": {"a": {"type": "string"}}}
    schema = {"type": "object", "properties": {"both": {"allOf": [part, part]}}, "allOf": [part]}
    assert close_objects(schema) == schema


# ---------------------------------------------------------------------------------------------------------- how a reply is read


@pytest.mark.parametrize(
    "reply",
    [
        GOOD,
        f"```json\n{GOOD}\n```",
        f"```\n{GOOD}\n```",
        f"  \n```JSON\n{GOOD}\n```\n",
        f"Here it is:\n```json\n{GOOD}\n```\nAnything else?",
        f"<think>Is it {{}}?</think>{GOOD}",
        f"The city is {GOOD}.",
        f"\ufeff{GOOD}",
    ],
)
async def test_a_fence_or_words_around_the_one_value_do_not_matter(reply: str) -> None:
    # RUN-76, LES-56
    result = await agent_of(reply, output=City).send("Which?")
    assert (result.object, result.text, result.steps) == (ROME, reply, 1)


@pytest.mark.parametrize("reply", [f"{GOOD} or {GOOD}", f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```", '{"name": NaN}', "Rome", ""])
async def test_a_reply_without_exactly_one_value_is_not_guessed_at(reply: str) -> None:
    # RUN-76, RUN-77
    result = await agent_of(reply, GOOD, output=City).send("Which?")
    assert (result.object, result.steps, result.output_repaired) == (ROME, 2, True)
    check_transcript(result.messages)


async def test_defaults_and_validators_apply_to_the_object() -> None:
    # RUN-76
    result = await agent_of('{"name": " new york "}', output=City).send("Which?")
    assert result.object == City(name="New York", people=0)
    assert result.text == '{"name": " new york "}'


async def test_the_text_beside_tool_calls_is_not_validated() -> None:
    # RUN-76
    result = await agent_of(calls("look", text="Let me see"), GOOD, output=City, tools=[plain("look")]).send("Which?")
    assert (result.object, result.steps, result.output_repaired) == (ROME, 2, False)


# ------------------------------------------------------------------------------------------------------------------- the repair


async def test_an_invalid_reply_is_sent_back_once_with_every_issue() -> None:
    # RUN-77, LES-10
    model = mock_model([BAD, GOOD])
    run = create_agent(provider=model, output=City).stream("Which?")
    events = await collect(run)
    result = await run.result
    message = model.calls[1].messages[-1]
    assert message.role == "user"
    head, *issues = message.text.split("\n\n")[0].splitlines()
    assert head == "[output-invalid] 2 issues in your last reply:"
    assert [line.split(":")[0] for line in issues] == ["- name", "- people"]
    assert (result.finish_reason, result.object, result.steps) == ("stop", ROME, 2)
    assert result.output_repair_issues is not None
    assert [issue["path"] for issue in result.output_repair_issues] == ["name", "people"]
    assert result.output_error is None
    assert shape(result.messages)[2] == f"assistant:{BAD}"
    assert [name for name in names(events) if name.startswith("step.")] == [
        "step.start 1",
        "step.done 1 stop",
        "step.start 2",
        "step.done 2 stop",
    ]
    assert events[-1].output_repaired is True
    check_transcript(result.messages)


async def test_a_second_invalid_reply_ends_the_run_without_raising() -> None:
    # RUN-77, RUN-78, EVT-20
    model = mock_model([BAD, '{"people": 1}', GOOD])
    run = create_agent(provider=model, output=City).stream("Which?")
    events = await collect(run)
    result = await run.result
    assert len(model.calls) == 2
    assert (result.finish_reason, result.object, result.text, result.ok) == ("output-invalid", None, '{"people": 1}', False)
    assert result.output_error == {
        "message": "The reply does not match the output schema: 1 issue.",
        "issues": [{"path": "name", "message": "required, but missing"}],
    }
    assert "object" not in events[-1].to_dict()
    assert events[-1].to_dict()["finishReason"] == "output-invalid"


async def test_issues_name_the_path_of_what_is_wrong() -> None:
    # RUN-78
    reply = '{"label": "a", "children": [{"label": "b"}, {"label": 1}]}'
    result = await agent_of(reply, output=Node, max_steps=1).send("Which?")
    assert result.output_error is not None
    assert [issue["path"] for issue in result.output_error["issues"]] == ["children.1.label"]
    by_schema = await agent_of('{"name": 1, "more": 2}', output={**CITY_SCHEMA, "additionalProperties": False}, max_steps=1).send(
        "?"
    )
    assert by_schema.output_error is not None
    assert sorted(issue["path"] for issue in by_schema.output_error["issues"]) == ["more", "name"]


@pytest.mark.parametrize("options", [{"max_steps": 1}, {"limits": {"max_steps": 1}}], ids=["max_steps", "limits.max_steps"])
async def test_without_a_step_left_there_is_no_repair(options: dict[str, Any]) -> None:
    # RUN-77, RUN-79: the model gave its final reply, so no answer is forced either
    model = mock_model([BAD, GOOD])
    result = await create_agent(provider=model, output=City, **options).send("Which?")
    assert len(model.calls) == 1
    assert (result.finish_reason, result.steps, result.text) == ("output-invalid", 1, BAD)
    assert result.output_error is not None
    assert shape(result.messages)[-1] == f"assistant:{BAD}"  # no request for a repair that nobody answers


async def test_a_spend_limit_leaves_no_repair() -> None:
    # BUD-13, RUN-59
    model = mock_model([{"text": BAD, "usage": {"input_tokens": 5, "output_tokens": 5}}, GOOD])
    result = await create_agent(provider=model, output=City, limits={"max_tokens": 10}).send("Which?")
    assert len(model.calls) == 1
    assert (result.finish_reason, result.text, result.object) == ("budget-exceeded", BAD, None)
    assert result.budget is not None
    assert result.budget.limit == "maxTokens"
    assert result.output_error is not None
    assert shape(result.messages)[-1] == f"assistant:{BAD}"


async def test_the_repair_step_may_call_tools() -> None:
    # RUN-77: one repair, whatever comes between
    log: list[str] = []
    model = mock_model([BAD, calls("look"), BAD, GOOD])
    result = await create_agent(provider=model, output=City, tools=[plain("look", log=log)]).send("Which?")
    assert (result.finish_reason, result.steps, log) == ("output-invalid", 3, ["look"])


async def test_a_reply_that_is_the_schema_gets_an_example() -> None:
    # LES-11
    model = mock_model([json.dumps(City.model_json_schema()), GOOD])
    result = await create_agent(provider=model, output=City).send("Which?")
    assert result.object == ROME
    text = model.calls[1].messages[-1].text
    assert text.startswith("[output-invalid] 1 issue ")
    assert json.loads(text.splitlines()[-1]) == {"name": "text", "people": 0}


async def test_a_validator_sees_the_conversation_and_what_tools_returned() -> None:
    # LES-12
    seen: list[Any] = []

    async def validate(city: City, ctx: Any) -> list[dict[str, str]]:
        seen.append((list(ctx.tool_results), shape(ctx.messages)[1:]))
        return [] if city.people == 3 else [{"path": "people", "message": "count again"}]

    look = define_tool(name="look", description="Looks.", execute=lambda args: {"people": 3}, input=Place)
    turns = [calls(("look", {"x": 1, "y": 2})), '{"name": "rome", "people": 2}', GOOD]
    result = await agent_of(*turns, output=City, output_validate=validate, tools=[look]).send("Which?")
    assert result.object == ROME
    assert result.output_repair_issues == [{"path": "people", "message": "count again"}]
    assert seen[0] == (
        [{"name": "look", "args": {"x": 1, "y": 2}, "result": {"people": 3}}],
        ["user:Which?", "assistant:+look", "tool:look", 'assistant:{"name": "rome", "people": 2}'],
    )


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_a_reply_that_the_model_did_not_finish_keeps_its_reason(reason: str) -> None:
    # RUN-19: a repair would ask for what was cut or refused just now
    model = mock_model([{"text": '{"name": "ro', "finish_reason": reason}, GOOD])
    result = await create_agent(provider=model, output=City).send("Which?")
    assert (result.finish_reason, result.object, len(model.calls)) == (reason, None, 1)


# ------------------------------------------------------------------------------------------------------------ the forced answer


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_steps": 2}, "max-steps"),
        ({"limits": {"max_steps": 2}}, "budget-exceeded"),
        ({"max_steps": 2, "limits": {"max_steps": 5}}, "max-steps"),
    ],
)
async def test_out_of_steps_one_answer_is_asked_for(options: dict[str, Any], reason: str) -> None:
    # RUN-79, RUN-80, RUN-D4, EVT-38
    model = mock_model(
        [calls("look"), calls("look", text="So far"), {"text": GOOD, "usage": {"input_tokens": 4, "output_tokens": 2}}, GOOD]
    )
    settings = {"tool_choice": "required"}
    run = create_agent(provider=model, output=City, tools=[plain("look")], model_settings=settings, **options).stream("Which?")
    events = await collect(run)
    result = await run.result
    assert len(model.calls) == 3
    forced: GenerateOptions = model.calls[2]
    assert forced.tools == ()
    assert "tool_choice" not in forced.settings  # CA-30
    assert forced.messages[-1].role == "user"
    assert forced.messages[-1].text.startswith("[final-answer]")
    assert (result.finish_reason, result.object, result.text, result.steps) == (reason, ROME, GOOD, 3)
    assert result.output_error is None
    assert (result.step_usage[-1].step, result.step_usage[-1].usage.prompt_tokens) == (3, 4)
    assert result.usage.model_calls == 3
    assert ("budget.exceeded maxSteps" in names(events)) == (reason == "budget-exceeded")
    assert [name for name in names(events) if name.startswith("step.")][-2:] == ["step.start 3", "step.done 3 stop"]
    done = events[-1]
    assert isinstance(done, RunDone)
    assert done.to_dict()["object"] == {"name": "Rome", "people": 3}  # EVT-20
    check_transcript(result.messages)


@pytest.mark.parametrize(
    ("options", "reason"), [({"max_steps": 1}, "max-steps"), ({"limits": {"max_steps": 1}}, "budget-exceeded")]
)
async def test_an_invalid_forced_answer_is_not_repaired(options: dict[str, Any], reason: str) -> None:
    # RUN-D4, RUN-80
    model = mock_model([calls("look"), BAD, GOOD])
    result = await create_agent(provider=model, output=City, tools=[plain("look")], **options).send("Which?")
    assert len(model.calls) == 2
    assert (result.finish_reason, result.object, result.text, result.steps) == (reason, None, BAD, 2)
    assert result.output_error is not None
    assert [issue["path"] for issue in result.output_error["issues"]] == ["name", "people"]


async def test_a_forced_answer_that_calls_tools_all_the_same_runs_none() -> None:
    # RUN-D4, RUN-45
    log: list[str] = []
    agent = agent_of(calls("look"), calls("look"), output=City, tools=[plain("look", log=log)], max_steps=1)
    result = await agent.send("Which?")
    assert (result.finish_reason, result.steps, log) == ("max-steps", 2, ["look"])
    assert kinds(result.messages) == ["ok", "not-run"]
    assert result.output_error is not None
    check_transcript(result.messages)


async def test_without_output_no_answer_is_forced() -> None:
    # RUN-79
    model = mock_model([calls("look"), GOOD])
    assert (await create_agent(provider=model, tools=[plain("look")], max_steps=1).send("Go")).finish_reason == "max-steps"
    assert len(model.calls) == 1


@pytest.mark.parametrize("limits", [{"max_tokens": 10}, {"max_input_tokens": 5}, {"max_output_tokens": 5}, {"max_tool_errors": 1}])
async def test_a_limit_that_is_not_of_steps_forces_no_answer(limits: dict[str, Any]) -> None:
    # RUN-79, BUD-13
    turns: list[Any] = [calls("missing", usage={"input_tokens": 5, "output_tokens": 5}), GOOD, GOOD]
    model = mock_model(turns)
    result = await create_agent(provider=model, output=City, tools=[plain("look")], limits=limits).send("Which?")
    assert len(model.calls) == 1
    assert (result.finish_reason, result.object, result.output_error) == ("budget-exceeded", None, None)


async def test_a_limit_reached_in_the_last_step_forces_no_answer() -> None:
    # RUN-65, RUN-79, BUD-13: what a sub-agent spent is seen before the forced call, as before any other
    child = agent_of({"text": "Found", "usage": {"input_tokens": 50, "output_tokens": 50}}, name="w", description="Works.")
    asked = calls(("task", {"agent": "w", "prompt": "Do it", "description": "d"}), usage={"input_tokens": 1, "output_tokens": 1})
    turns: list[Any] = [asked, GOOD]
    model = mock_model(turns)
    lead = create_agent(provider=model, output=City, subagents={"w": child}, max_steps=1, limits={"max_tokens": 50})
    result = await lead.send("Which?")
    assert len(model.calls) == 1
    assert (result.object, result.steps) == (None, 1)
    assert not shape(result.messages)[-1].startswith("user:")


async def test_an_aborted_run_forces_no_answer() -> None:
    # RUN-79
    gate = Gate("slow")
    model = mock_model([calls("slow"), GOOD])
    run = create_agent(provider=model, output=City, tools=[gate.tool], max_steps=1).stream("Which?")
    await gate.running.wait()
    run.abort("enough")
    result = await run.result
    assert (result.finish_reason, result.object, len(model.calls)) == ("aborted", None, 1)


@pytest.mark.parametrize("where", ["validate", "post_generate", "pre_generate"])
async def test_an_abort_during_the_forced_answer_ends_the_run_as_aborted(where: str) -> None:
    # RUN-53, RUN-54, EVT-27
    waiting, forever = asyncio.Event(), asyncio.Event()

    async def wait(*args: Any) -> None:
        if where == "validate" or args[0].messages[-1].text.startswith("[final-answer]") or args[0].messages[-1].text == GOOD:
            waiting.set()
            await forever.wait()

    class Hook:
        name = "hook"

    hook: Any = Hook()
    if where != "validate":
        setattr(hook, where, wait)
    options = {"output_validate": wait} if where == "validate" else {"hooks": [hook]}
    agent: Any = agent_of(calls("look"), GOOD, output=City, tools=[plain("look")], max_steps=1, **options)
    run = agent.stream("Which?")
    await waiting.wait()
    run.abort("enough")
    result = await run.result
    assert (result.finish_reason, result.object) == ("aborted", None)
    assert names(await collect(run))[-2:] == ["step.done 2 aborted", "run.done aborted"]


# -------------------------------------------------------------------------------------------------------------------- sub-agents


def asking(lead_turns: list[Any], child: Any, **options: Any) -> Any:
    asked = calls(("task", {"agent": "w", "prompt": "Do it", "description": "d"}))
    return agent_of(asked, *lead_turns, subagents={"w": child}, **options)


async def test_a_subagent_has_its_own_output_or_none() -> None:
    # RUN-81
    model = mock_model(["Just words."])
    child = create_agent(provider=model, name="w", description="Works.")
    result = await asking([GOOD], child, output=City).send("Go")
    assert result.object == ROME
    assert model.calls[0].response_format is None
    assert "## Output format" not in model.calls[0].messages[0].text
    assert "Just words." in json.loads(next(m.text for m in result.messages if m.role == "tool"))


async def test_a_subagents_object_comes_back_as_json() -> None:
    # RUN-81
    child = agent_of('```json\n{"name": " rome "}\n```', name="w", description="Works.", output=City)
    result = await asking(["Done"], child).send("Go")
    text: str = json.loads(next(m.text for m in result.messages if m.role == "tool"))
    assert json.loads(text.split("\n\n")[0]) == {"name": "Rome", "people": 0}
    assert (result.text, result.object) == ("Done", None)


async def test_a_subagents_invalid_output_is_a_tool_error_that_names_the_issues() -> None:
    # RUN-81, SUB-10
    child = agent_of(BAD, BAD, name="w", description="Works.", output=City)
    result = await asking(["Done"], child).send("Go")
    error = results(result.messages)[0]
    assert error["kind"] == "execution"
    assert "name:" in error["message"]
    assert "people:" in error["message"]
    assert result.ok


async def test_a_forced_answer_of_a_subagent_counts_as_success() -> None:
    # RUN-81, SUB-10
    child = agent_of(calls("look"), GOOD, name="w", description="Works.", output=City, tools=[plain("look")], max_steps=1)
    result = await asking(["Done"], child).send("Go")
    text = next(m.text for m in result.messages if m.role == "tool")
    assert kinds(result.messages) == ["ok"]
    assert "max-steps" in text


# ---------------------------------------------------------------------------------------------------------------------- sessions


async def test_an_invalid_turn_of_a_session_is_saved() -> None:
    # RUN-47, SES-21
    session = agent_of(BAD, BAD, GOOD, output=City).session()
    assert (await session.send("One?")).finish_reason == "output-invalid"
    assert [message.role for message in session.messages] == ["user", "assistant", "user", "assistant"]
    assert (await session.send("Two?")).object == ROME


async def test_a_resumed_run_has_no_second_repair() -> None:
    # RUN-77: the one repair counts for the run, not for the process
    store = memory_store()
    model = mock_model([BAD, calls("look"), RuntimeError("broken"), BAD, GOOD])
    agent = create_agent(provider=model, output=City, store=store, retry={"max_retries": 0}, tools=[plain("look")])
    with pytest.raises(LoushoError, match="broken"):
        await agent.send("Which?", session_id="r")
    result: Any = await agent.resume("r")
    assert result is not None
    assert (result.finish_reason, result.object) == ("output-invalid", None)


@pytest.mark.parametrize(
    ("output", "good", "bad"),
    [(City, GOOD, "[]"), (list[int], "[1]", "{}"), (CITY_SCHEMA, GOOD, "[]"), (Literal["yes"], '"yes"', "5")],
)
async def test_a_contract_travels_after_it_was_used(output: Any, good: str, bad: str) -> None:
    # DEC-R5
    contract, context = OutputContract(output), OutputContext((), ())
    for _ in range(2):
        assert isinstance(await contract.check(good, context), Valid)
        assert isinstance(await contract.check(bad, context), Invalid)
        contract = pickle.loads(pickle.dumps(contract))
