"""Structured output: the schema that is sent, how a reply is read and validated, and what a repair asks for.

A reply is read strictly first, then as the one JSON value in it (reasoning tags dropped, a fenced value first). Two candidates
count as none: guessing which one was meant would be worse than asking again.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticValidationError
from pydantic.errors import PydanticUserError

from lousho_ray.errors import ConfigurationError
from lousho_ray.loop.nulls import without_nulls
from lousho_ray.messages import Message
from lousho_ray.ports import ResponseFormat
from lousho_ray.tools.results import to_json
from lousho_ray.tools.schema import InvalidArguments, JsonSchemaInput, ParsedArguments, PydanticInput, object_schema

WRAPPED_KEY = "result"
"""The one property of an output type that is no object, since an API that takes a schema wants an object on top."""

MAX_ISSUES = 20

_PARTS = frozenset({"allOf", "not", "if", "then", "else"})
_NO_OBJECT = frozenset({"anyOf", "oneOf", "allOf", "$ref", "enum", "const"})
"""Keys with which the top of a schema may describe something else than an object."""
_OPEN = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "if", "then", "else"})
"""The keys with which a node says itself what other properties it has."""

_FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Valid:
    """A reply that holds the wanted value. `plain` is its JSON form."""

    value: Any
    plain: Any


@dataclass(frozen=True, slots=True)
class Invalid:
    """A reply that does not; `issues` are `{"path", "message"}`."""

    issues: tuple[Mapping[str, str], ...]
    is_schema: bool = False

    @property
    def message(self) -> str:
        return f"The reply does not match the output schema: {len(self.issues)} issue{'' if len(self.issues) == 1 else 's'}."

    def to_dict(self) -> dict[str, Any]:
        return {"message": self.message, "issues": [dict(issue) for issue in self.issues]}


@dataclass(frozen=True, slots=True)
class OutputContext:
    """What `output_validate(object, ctx)` gets besides the object: the conversation, and what the run's tools returned."""

    messages: Sequence[Message]
    tool_results: Sequence[Mapping[str, Any]]


class OutputContract:
    """The `output` option of an agent.

    Args:
        spec: A pydantic model, another type, or a JSON schema.
        validate: `fn(object, ctx)`, sync or async; the issues it returns (texts or `{"path", "message"}`) are repaired like the
            schema's own.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID`, `field="output"`: no schema can be made of it.
    """

    def __init__(self, spec: Any, validate: Callable[..., Any] | None = None) -> None:
        self.spec = spec
        self._validate = validate
        self.schema: Mapping[str, Any] = close_objects(self._reader.parameters)

    @property
    def response_format(self) -> ResponseFormat:
        return ResponseFormat(self.schema)

    def block(self, *, with_schema: bool) -> str:
        """The `## Output format` paragraph of the system prompt."""
        text = "## Output format\n\nYour final reply must be one JSON value and nothing else: no prose, no code fence."
        return f"{text} It must match this JSON schema:\n\n{to_json(self.schema)}" if with_schema else text

    async def check(self, text: str, context: OutputContext) -> Valid | Invalid:
        """Reads and validates a reply."""
        try:
            data = read_json(text)
        except ValueError as error:
            return Invalid(({"path": "", "message": str(error)},))
        if self._is_the_schema(data):
            return Invalid(({"path": "", "message": "this is the schema itself, not a value that matches it"},), is_schema=True)
        try:
            parsed = self._validated(self._wrap(data))
        except InvalidArguments as error:
            return Invalid(tuple(error.issues[:MAX_ISSUES]))
        plain = parsed.plain[WRAPPED_KEY] if self._wrapped else parsed.plain
        value = parsed.value[WRAPPED_KEY] if self._wrapped and isinstance(self.spec, Mapping) else parsed.value
        issues = await self._own_issues(value, context)
        return Invalid(issues) if issues else Valid(value, plain)

    def repair_message(self, invalid: Invalid) -> str:
        """The user message of the one repair step."""
        listed = "\n".join(f"- {issue['path'] or '(whole reply)'}: {issue['message']}" for issue in invalid.issues)
        count = len(invalid.issues)
        text = f"[output-invalid] {count} issue{'' if count == 1 else 's'} in your last reply:\n{listed}\n\n"
        if invalid.is_schema:
            filled = to_json(example(self.schema))
            return f"{text}Reply with a value that matches the schema, filled in like this example:\n{filled}"
        return f"{text}Reply again with the corrected JSON value alone."

    @functools.cached_property
    def _wrapped(self) -> bool:
        return not (_is_object_schema(self.spec) if isinstance(self.spec, Mapping) else _is_object_type(self.spec))

    @functools.cached_property
    def _reader(self) -> JsonSchemaInput | PydanticInput:
        if inspect.isroutine(self.spec):  # pydantic would describe its parameters
            raise _no_schema(f"{self.spec!r} is a function, not a type.")
        try:
            if isinstance(self.spec, Mapping):
                return JsonSchemaInput(_wrapping_schema(self.spec) if self._wrapped else self.spec)
            return PydanticInput(self.spec) if not self._wrapped else _wrapping(self.spec)
        except (PydanticUserError, ConfigurationError, TypeError, NameError) as error:
            detail = getattr(error, "detail", None) or str(error).splitlines()[0]
            detail = detail.removeprefix("`input` is not a usable JSON schema: ").replace(
                "the arguments of a tool are", "it must be"
            )
            raise _no_schema(detail) from error

    def _validated(self, data: Any) -> ParsedArguments:
        """Validates the value as it came, else without the nulls that stand for what was left out."""
        try:
            return self._reader.validate(data)
        except InvalidArguments:
            less = without_nulls(data, self.schema)
            if less == data:
                raise
            return self._reader.validate(less)

    def _wrap(self, data: Any) -> Any:
        if self._wrapped:
            return data if isinstance(data, dict) and set(data) == {WRAPPED_KEY} else {WRAPPED_KEY: data}
        if not isinstance(data, dict):
            raise InvalidArguments([{"path": "", "message": f"must be a JSON object, not {type(data).__name__}"}])
        return data

    def _is_the_schema(self, data: Any) -> bool:
        wanted = set(self.schema.get("properties", {}))
        return isinstance(data, dict) and bool({"properties", "$defs", "$schema"} & (set(data) - wanted)) and not wanted & set(data)

    async def _own_issues(self, value: Any, context: OutputContext) -> tuple[Mapping[str, str], ...]:
        if self._validate is None:
            return ()
        found = self._validate(value, context)
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, str):
            found = [found]
        return tuple(issue if isinstance(issue, Mapping) else {"path": "", "message": str(issue)} for issue in found or ())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_reader"}


def _no_schema(why: str) -> ConfigurationError:
    advice = "Pass a pydantic model, a type or a JSON schema."
    return ConfigurationError(f"output cannot be used as a schema: {why} {advice}", field="output")


def read_json(text: str) -> Any:
    """The JSON value of a reply. Raises `ValueError` saying why there is none."""
    stripped = text.strip().removeprefix("\ufeff").strip()
    try:
        return _loads(stripped)
    except ValueError as error:
        first = error
    stripped = _THINKING.sub("", stripped)
    fenced = [value for match in _FENCE.finditer(stripped) if (value := _maybe(match.group(1))) is not None]
    found = fenced or _balanced(stripped)
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{len(found)} JSON values in the reply; exactly one is wanted")
    raise ValueError(f"not valid JSON: {first}" if stripped else "the reply is empty")


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` on every object node that does not set it.

    An object without properties takes any, and the parts of an `allOf` know only some of them: both stay as they are.
    """

    def close(node: Any) -> Any:
        if isinstance(node, list):
            return [close(item) for item in node]
        if not isinstance(node, Mapping):
            return node
        closed = {key: _close_child(key, value, close) for key, value in node.items()}
        if "properties" in closed and not _OPEN & closed.keys():
            closed["additionalProperties"] = False
        return closed

    result: dict[str, Any] = close(schema)
    return result


def example(schema: Mapping[str, Any]) -> Any:
    """A value of the schema's shape, for a model that answered with the schema itself."""
    definitions = schema.get("$defs", {})

    def fill(node: Mapping[str, Any], depth: int) -> Any:
        reference = str(node.get("$ref", "")).rpartition("/")[2]
        if reference:
            return fill(definitions.get(reference, {}), depth + 1) if depth < 5 else {}
        for key in ("default", "const"):
            if key in node:
                return node[key]
        if node.get("enum"):
            return node["enum"][0]
        options = node.get("anyOf") or node.get("oneOf") or node.get("allOf")
        if options:
            return fill(options[0], depth + 1)
        kind = node.get("type")
        if kind == "object":
            return {name: fill(child, depth + 1) for name, child in node.get("properties", {}).items()} if depth < 5 else {}
        if kind == "array":
            return [fill(node["items"], depth + 1)] if isinstance(node.get("items"), Mapping) and depth < 5 else []
        return {"string": "text", "integer": 1, "number": 1.5, "boolean": True}.get(str(kind))

    return fill(schema, 0)


def _close_child(key: str, value: Any, close: Callable[[Any], Any]) -> Any:
    """Children that are schemas; the values of `enum`, `const`, `default` and `examples` are data."""
    if key in {"enum", "const", "default", "examples", "required", *_PARTS}:
        return value
    if key in {"properties", "$defs", "definitions", "patternProperties"} and isinstance(value, Mapping):
        return {name: close(child) for name, child in value.items()}
    return close(value)


def _wrapping(type_: Any) -> PydanticInput:
    from pydantic import ConfigDict, Field, create_model

    wrapper = create_model("Output", __config__=ConfigDict(extra="forbid"), value=(type_, Field(alias=WRAPPED_KEY)))
    return PydanticInput(wrapper, lambda wrapped: wrapped.value)


def _is_object_schema(schema: Mapping[str, Any]) -> bool:
    """Whether the top of a JSON schema is an object, as an API that takes a schema wants it. One that says nothing counts."""
    kind: object = schema.get("type", None if _NO_OBJECT & schema.keys() else "object")
    return kind == "object"


def _wrapping_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object that holds the wanted value. References to the old top, or to a place in it, follow it down."""
    definitions = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in definitions}

    def follow(node: Any) -> Any:
        if isinstance(node, list):
            return [follow(item) for item in node]
        if not isinstance(node, Mapping):
            return node
        moved = {key: follow(value) for key, value in node.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str) and re.fullmatch(r"#(?!/\$defs/|/definitions/)(/.*)?", reference):
            moved["$ref"] = f"#/properties/{WRAPPED_KEY}{reference[1:]}"
        return moved

    wrapper = {"type": "object", "properties": {WRAPPED_KEY: inner}, "required": [WRAPPED_KEY], "additionalProperties": False}
    followed: dict[str, Any] = follow({**wrapper, **definitions})
    return followed


def _is_object_type(spec: Any) -> bool:
    try:
        schema = object_schema(TypeAdapter(spec).json_schema())
    except (PydanticUserError, PydanticValidationError, TypeError, NameError):
        return True
    return schema.get("type") == "object"


def _balanced(text: str) -> list[Any]:
    """The objects and arrays that stand in a text, outermost ones only."""
    decoder, found, at = json.JSONDecoder(parse_constant=_refuse), [], 0
    while at < len(text):
        if text[at] in "{[":
            try:
                value, at = decoder.raw_decode(text, at)
                found.append(value)
                continue
            except ValueError:
                pass
        at += 1
    return found


def _maybe(text: str) -> Any:
    try:
        return _loads(text.strip())
    except ValueError:
        return None


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not allowed in JSON")
