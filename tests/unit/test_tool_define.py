"""Defining tools: names, descriptions, schemas, options and what a decorated function keeps."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, assert_type

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import ToolContext, ToolDefinition
from lousho_ray.tools import Tool, ToolAnnotations, define_tool, tool


class Node(BaseModel):
    name: str
    children: list[Node] = []


class Query(TypedDict):
    text: str


@dataclass
class Point:
    x: int
    y: int = 0


def nothing() -> None:
    """Does nothing."""


def refused(make: Callable[[], Any]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"
    return caught.value


def test_decorated_and_defined_tools_are_the_same_kind() -> None:  # TOOL-01
    @tool
    def add(a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    defined = define_tool(name="add", description="Adds.", input=Point, execute=lambda point: point.x)
    assert isinstance(add, Tool)
    assert isinstance(defined, Tool)
    assert add.definition == ToolDefinition("add", "Adds.", add.parameters)
    assert add.definition is add.definition


def test_schema_name_and_description_come_from_the_function() -> None:  # TOOL-05
    @tool
    def search(
        query: str,
        ctx: ToolContext,
        limit: Annotated[int, Field(ge=1, description="From the annotation.")] = 5,
        mode: Literal["a", "b"] = "a",
        site: Annotated[str | None, "A bare text."] = None,
    ) -> str:
        """Searches the web.

        Twice.

        Args:
            query: What to look for,
                over two lines.
            limit: Not this one.
        """
        return query

    assert search.name == search.display_name == "search"
    assert search.description == "Searches the web.\n\nTwice."
    properties = search.parameters["properties"]
    assert list(properties) == ["query", "limit", "mode", "site"]
    assert properties["query"] == {"type": "string", "description": "What to look for, over two lines."}
    assert properties["limit"] == {"type": "integer", "minimum": 1, "default": 5, "description": "From the annotation."}
    assert properties["mode"]["enum"] == ["a", "b"]
    assert properties["site"]["description"] == "A bare text."
    assert search.parameters["required"] == ["query"]
    assert search.parameters["additionalProperties"] is False


@pytest.mark.parametrize("annotation", ["ToolContext", "ToolContext | None", "Annotated[ToolContext, 'x']"])
def test_context_is_known_by_its_annotation(annotation: str) -> None:  # TOOL-05
    def look(c, text: str) -> str:  # type: ignore[no-untyped-def]
        """Looks."""
        return text

    look.__annotations__["c"] = annotation
    assert list(tool(look).parameters["properties"]) == ["text"]


def test_numpy_and_rest_docstrings_are_read() -> None:
    def numpy(city: str) -> str:
        """Tells the weather.

        Parameters
        ----------
        city : str
            Where.
        """
        return city

    def rest(city: str) -> str:
        """Tells the weather.

        :param city: Where.
        """
        return city

    for function in (numpy, rest):
        made = tool(function)
        assert made.description == "Tells the weather."
        assert made.parameters["properties"]["city"]["description"] == "Where."


def test_local_types_and_odd_parameter_names_work() -> None:
    class Local(BaseModel):
        n: int

    @tool
    def odd(model_config: int, copy: str, _x: int, schema: Local, json: bool = False) -> Any:
        """Odd names."""
        return model_config, copy, _x, schema, json

    parsed = odd.parse('{"model_config": 1, "copy": "c", "_x": 2, "schema": {"n": 3}}')
    assert parsed.value == {"model_config": 1, "copy": "c", "_x": 2, "schema": Local(n=3), "json": False}
    assert parsed.plain == {"model_config": 1, "copy": "c", "_x": 2, "schema": {"n": 3}, "json": False}


def test_options_are_taken_in_both_forms_of_the_decorator() -> None:  # TOOL-04
    @tool(name="pay", description="Pays.", display_name="Pay a bill", needs_approval=True, edits_files=True, max_calls_per_run=2)
    def whatever(amount: float) -> None: ...

    assert (whatever.name, whatever.description, whatever.display_name) == ("pay", "Pays.", "Pay a bill")
    assert whatever.needs_approval is True
    assert whatever.max_calls_per_run == 2
    assert whatever.edits_files
    assert whatever.metadata == {"editsFiles": True}


@pytest.mark.parametrize("given", [{"read_only_hint": True}, {"readOnlyHint": True}, ToolAnnotations(read_only_hint=True)])
def test_annotations_are_kept_as_mcp_metadata(given: Any) -> None:  # TOOL-04
    made = define_tool(name="look", description="Looks.", execute=nothing, annotations=given)
    assert made.metadata == {"mcp": {"annotations": {"readOnlyHint": True}}}
    assert made.read_only


def test_effect_read_makes_a_tool_read_only() -> None:  # DEC-R7
    assert define_tool(name="look", description="Looks.", execute=nothing, effect="read").read_only
    assert not define_tool(name="look", description="Looks.", execute=nothing, effect="idempotent").read_only
    assert not define_tool(name="look", description="Looks.", execute=nothing).read_only


@pytest.mark.parametrize("name", ["", "has space", "a" * 65, "täg", "a.b", "a\n", 3])
def test_bad_name_is_refused_at_definition(name: Any) -> None:  # TOOL-02
    error = refused(lambda: define_tool(name=name, description="d", execute=nothing))
    assert repr(name) in error.message
    assert "letters" in error.message


def test_longest_name_is_taken() -> None:
    assert define_tool(name="a" * 64, description="d", execute=nothing).name == "a" * 64


@pytest.mark.parametrize("description", ["", "  \n", None])
def test_empty_description_is_refused(description: Any) -> None:  # TOOL-02
    assert "description" in refused(lambda: define_tool(name="x", description=description, execute=nothing)).message


def test_function_without_docstring_is_refused_and_told_how_to_fix_it() -> None:  # TOOL-02
    def bare(a: int) -> int:
        return a

    assert "docstring" in refused(lambda: tool(bare)).message
    assert tool(description="Given.")(bare).description == "Given."


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string"}, "object"),
        ({"anyOf": [{"type": "object"}]}, "object"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "strin"),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.com/x.json"}}}, "https://example.com/x.json"),
        ({"type": "object", "properties": {"default": {"$ref": "other.json"}}}, "other.json"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}}, "Missing"),
        ({"type": "object", "properties": {"a": {"default": object()}}}, "JSON"),
        ({"type": "object", "properties": {"a": {"default": float("nan")}}}, "JSON"),
    ],
)
def test_unusable_json_schema_is_refused_at_definition(schema: dict[str, Any], says: str) -> None:  # TOOL-02
    assert says in refused(lambda: define_tool(name="x", description="d", input=schema, execute=nothing)).message


def test_type_without_json_schema_is_refused() -> None:  # TOOL-02
    class Opaque:
        pass

    def take(a: int, thing: Opaque) -> None:
        """Takes."""

    assert "'thing'" in refused(lambda: tool(take)).message
    refused(lambda: define_tool(name="x", description="d", input=Opaque, execute=nothing))
    refused(lambda: define_tool(name="x", description="d", input=Callable[[], int], execute=nothing))


def test_unannotated_and_star_parameters_are_refused() -> None:  # chapter 20, Defining
    def unannotated(a, b: int) -> None:  # type: ignore[no-untyped-def]
        """Does."""

    def star(*args: int) -> None:
        """Does."""

    def unknown(a: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Does."""

    assert "'a'" in refused(lambda: tool(unannotated)).message
    assert "*args" in refused(lambda: tool(star)).message
    assert "Missing" in refused(lambda: tool(unknown)).message


def test_double_star_allows_extra_keys() -> None:  # chapter 20, Defining
    @tool
    def note(text: str, **labels: int) -> Any:
        """Notes."""
        return text, labels

    assert note.parse('{"text": "t", "p0": 3, "b": "4"}').value == {"text": "t", "p0": 3, "b": 4}
    with pytest.raises(Exception, match="b: Input"):
        note.parse('{"text": "t", "b": "x"}')


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"needs_aproval": True}, "Did you mean 'needs_approval'?"),
        ({"needs_approval": "always"}, "needs_approval"),
        ({"max_calls_per_run": 0}, "max_calls_per_run"),
        ({"max_calls_per_run": True}, "max_calls_per_run"),
        ({"effect": "reads"}, "Did you mean 'read'?"),
        ({"annotations": {"readonly_hint": True}}, "Did you mean 'read_only_hint'?"),
        ({"sandbox_execute": 3}, "sandbox_execute"),
        ({"ray_options": 1}, "{'num_gpus': 1}"),
        ({"ray_options": {"num_gpu": 1}}, "Did you mean 'num_gpus'?"),
        ({"ray_options": {"max_retries": 3}}, "no option 'max_retries'"),
        ({"ray_options": {"num_cpus": -1}}, "num_cpus is -1"),
        ({"ray_options": {"memory": "2GB"}}, "memory is '2GB'"),
        ({"ray_options": {"resources": {"tpu": True}}}, "tpu is True"),
        ({"ray_options": {"resources": ["tpu"]}}, "resources is ['tpu']"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], says: str) -> None:  # TOOL-04, LES-13, DEC-R7
    assert says in refused(lambda: define_tool(name="x", description="d", execute=nothing, **options)).message
    assert says in refused(lambda: tool(**options)(nothing)).message


def test_a_tool_that_streams_cannot_be_a_ray_task() -> None:  # DEC-R8
    async def counts() -> AsyncIterator[int]:
        """Counts."""
        yield 1

    assert "async generator" in refused(lambda: tool(ray_options={"num_gpus": 1})(counts)).message


def test_what_is_no_function_is_refused() -> None:
    refused(lambda: define_tool(name="x", description="d", execute="no"))  # type: ignore[arg-type]
    refused(lambda: tool(Node))
    refused(lambda: tool(tool(nothing)))


def test_recursive_model_and_typed_dict_become_object_schemas() -> None:  # TOOL-03
    recursive = define_tool(name="x", description="d", input=Node, execute=nothing)
    assert recursive.parameters["type"] == "object"
    assert set(recursive.parameters["properties"]) == {"name", "children"}
    assert define_tool(name="x", description="d", input=Query, execute=nothing).parse('{"text": "t"}').value == {"text": "t"}
    assert define_tool(name="x", description="d", input=Point, execute=nothing).parse('{"x": "1"}').value == Point(1, 0)


@pytest.mark.parametrize(
    ("type_", "sent", "value"), [(list[int], "[1, 2]", [1, 2]), (int | None, "null", None), (Point | Node, '{"x": 1}', Point(1))]
)
def test_type_that_is_no_object_is_wrapped_and_unwrapped(type_: Any, sent: str, value: Any) -> None:  # TOOL-03
    made = define_tool(name="x", description="d", input=type_, execute=nothing)
    assert list(made.parameters["properties"]) == ["input"]
    assert made.parse(f'{{"input": {sent}}}').value == value


def test_schemas_carry_no_made_up_titles() -> None:
    assert "title" not in str(define_tool(name="x", description="d", input=Node, execute=nothing).parameters)


def test_partial_leaves_out_what_it_fixes() -> None:
    def convert(amount: float, unit: str, *, factor: float) -> str:
        """Converts."""
        return f"{amount} {unit} {factor}"

    made = tool(functools.partial(convert, 2.0, factor=3.0))
    assert (made.name, made.description) == ("convert", "Converts.")
    assert list(made.parameters["properties"]) == ["unit"]
    positional, keywords = made.call_arguments(made.parse('{"unit": "m"}').value, None)
    assert made.function(*positional, **keywords) == "2.0 m 3.0"


def test_methods_are_bound_by_their_instance() -> None:
    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        @tool
        def price(self, item: str) -> str:
            """Tells the price."""
            return f"{item} at {self.name}"

        @tool
        @staticmethod
        def greet(who: str) -> str:
            """Greets."""
            return f"hi {who}"

    first, second = Shop("A"), Shop("B")
    assert list(first.price.parameters["properties"]) == ["item"]
    assert first.price("tea") == "tea at A"
    assert second.price("tea") == "tea at B"
    assert first.greet("you") == "hi you"
    assert second.price.call_arguments({"item": "x"}, None) == ([second], {"item": "x"})


def test_decorated_function_keeps_its_types_and_can_be_called() -> None:  # LES-50
    @tool
    def double(n: int) -> int:
        """Doubles."""
        return n * 2

    @tool(effect="read")
    async def later(n: int) -> str:
        """Later."""
        return str(n)

    assert_type(double(2), int)
    assert double(2) == 4
    assert double.__name__ == "double"  # type: ignore[attr-defined]
    coroutine = later(3)
    coroutine.close()
    assert later.runs_in_thread is False
    assert double.runs_in_thread is True


def test_tool_cannot_be_changed_by_accident() -> None:
    made = define_tool(name="x", description="d", execute=nothing)
    with pytest.raises(AttributeError):
        made.name = "y"  # type: ignore[misc]
    assert made.with_name("y").name == "y"
    assert made.with_name("y").display_name == "y"
    assert made.name == "x"
