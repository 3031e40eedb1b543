"""What a tool takes: a JSON schema for the model, and the validation of the arguments it sends back.

Four kinds of input become one `InputSchema`: a function's signature (`signature.py`), a pydantic model, any other type pydantic
knows, and a raw JSON schema. All work that can fail because of the tool's author happens when the tool is defined.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pydantic import ConfigDict, Field, TypeAdapter, create_model
from pydantic import ValidationError as PydanticValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticSerializationError

from lousho_ray.errors import ConfigurationError, suggest
from lousho_ray.tools.text import clip, replace_surrogates

Issue = dict[str, str]
"""`{"path": "items.0.name", "message": "..."}`; the path is empty for the arguments as a whole."""

WRAPPED_KEY = "input"
"""The one property of a tool whose input type is not an object."""

_MAX_ISSUES = 20
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class ParsedArguments:
    """Validated arguments.

    Attributes:
        value: What the tool's function gets: a pydantic instance, keyword arguments, or plain data.
        plain: The same with defaults and coercions applied, as a JSON-safe dict for events, hooks and rules.
    """

    value: Any
    plain: dict[str, Any]


class InvalidArguments(Exception):  # noqa: N818 - becomes a ToolArgumentsValidationError where the tool's name is known
    """Raised by `InputSchema.validate` with every issue found."""

    def __init__(self, issues: list[Issue]) -> None:
        super().__init__(f"{len(issues)} issues")
        self.issues = issues


class InputSchema(Protocol):
    """A tool's input: `parameters` is a JSON schema of type object."""

    @property
    def parameters(self) -> dict[str, Any]: ...

    def validate(self, data: dict[str, Any]) -> ParsedArguments:
        """Raises `InvalidArguments` when `data` does not match."""
        ...


# ------------------------------------------------------------------------------------------------------------- pydantic inputs


class _CompactSchema(GenerateJsonSchema):
    """Leaves out the titles pydantic makes up: they cost tokens and say nothing."""

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}  # noqa: RUF012 - pydantic's own declaration

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class PydanticInput:
    """Input described by a type; `unwrap` turns the validated value into what the tool's function gets."""

    def __init__(self, type_: Any, unwrap: Callable[[Any], Any] | None = None) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(type_)
        self._unwrap = unwrap
        self.parameters = object_schema(self._adapter.json_schema(schema_generator=_CompactSchema))

    def validate(self, data: dict[str, Any]) -> ParsedArguments:
        try:
            value = self._adapter.validate_python(data)
        except PydanticValidationError as error:
            value = self._validate_repaired(data, error)
        plain = self._plain(value, data)
        return ParsedArguments(value if self._unwrap is None else self._unwrap(value), plain)

    def _validate_repaired(self, data: dict[str, Any], error: PydanticValidationError) -> Any:
        """Some providers only take enums of strings: a number or `null` of an enum comes back as text."""
        details = error.errors(include_url=False, include_context=False)
        paths = [detail["loc"] for detail in details if detail["type"] in {"literal_error", "enum"}]
        repaired = decode_texts(data, paths)
        if repaired is not None:
            try:
                return self._adapter.validate_python(repaired)
            except PydanticValidationError:
                pass
        raise InvalidArguments(
            [_pydantic_issue(cast("dict[str, Any]", d), self.parameters) for d in details[:_MAX_ISSUES]]
        ) from error

    def _plain(self, value: Any, data: dict[str, Any]) -> dict[str, Any]:
        """The dumped value, or the data as sent where a dump is impossible or would not validate again."""
        try:
            dumped = self._adapter.dump_python(value, mode="json", by_alias=True, round_trip=True, warnings=False)
        except (PydanticSerializationError, ValueError, TypeError):
            return data
        if not isinstance(dumped, dict):
            return data
        known = self.parameters.get("properties", {})
        return dumped if all(key in known or key in data for key in dumped) else data


def object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` as a schema of type object: a reference on top (a recursive model) is replaced by what it names."""
    definitions = {
        name: {key: value for key, value in body.items() if (key, value) != ("title", name)}
        for name, body in schema.get("$defs", {}).items()
    }
    schema = {**schema, "$defs": definitions} if definitions else schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        schema = {**definitions[reference.removeprefix("#/$defs/")], "$defs": definitions}
    schema = {key: value for key, value in schema.items() if key != "title"}
    if schema.get("type") == "object":
        schema.setdefault("properties", {})
    return schema


def type_input(type_: Any) -> InputSchema:
    """The input of a tool declared by a pydantic model or another type.

    A type that is no object (`list[int]`, a union) is put under the single property `input`, since models can only send objects;
    the tool's function gets the bare value.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` when no JSON schema can be made of the type.
    """
    try:
        direct = PydanticInput(type_)
        if direct.parameters.get("type") == "object":
            return direct
        config = ConfigDict(extra="forbid")
        wrapper = create_model("Arguments", __config__=config, value=(type_, Field(alias=WRAPPED_KEY)))
        return PydanticInput(wrapper, lambda arguments: arguments.value)
    except (PydanticUserError, TypeError, NameError) as error:
        raise ConfigurationError(
            f"`input` is not a usable schema: {first_line(error)}. Pass a pydantic model, another type, or a JSON schema.",
            field="input",
        ) from error


def _pydantic_issue(detail: dict[str, Any], parameters: Mapping[str, Any]) -> Issue:
    location = detail["loc"]
    path, kind, message = _join(location), detail["type"], str(detail["msg"])
    if kind in {"missing", "missing_argument"}:
        message = "required, but missing"
    elif kind in {"extra_forbidden", "unexpected_keyword_argument"}:
        known = list(parameters.get("properties", {})) if len(location) == 1 else []
        message = "unknown argument." + (suggest(str(location[-1]), known) or (f" Known: {', '.join(known)}." if known else ""))
    else:
        message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
        message += f" (got {_kind(detail.get('input'))})" if kind.endswith("_type") else ""
    return {"path": path, "message": replace_surrogates(message)}


# ----------------------------------------------------------------------------------------------------------- JSON schema inputs


class JsonSchemaInput:
    """Input described by a raw JSON schema (draft 2020-12 unless `$schema` names another). The tool gets the validated plain data.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` when the schema is not valid, not of type object, or refers to other documents.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.parameters = _checked_schema(schema)
        self._validator: Any = None

    def validate(self, data: dict[str, Any]) -> ParsedArguments:
        errors = self._errors(data)
        if errors:
            repaired = decode_texts(data, [error.absolute_path for error in errors if error.validator in {"enum", "const"}])
            if repaired is None or self._errors(repaired):
                raise InvalidArguments([issue for error in errors for issue in _schema_issues(error)][:_MAX_ISSUES])
            data = repaired
        return ParsedArguments(data, json.loads(json.dumps(data)))

    def _errors(self, data: dict[str, Any]) -> list[Any]:
        if self._validator is None:
            self._validator = _schema_validator(self.parameters)
        return sorted(self._validator.iter_errors(data), key=lambda error: [str(part) for part in error.absolute_path])

    def __getstate__(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "_validator": None}


def _checked_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    try:
        checked: dict[str, Any] = json.loads(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise _bad_schema(f"it cannot be written as JSON ({error})") from error
    if "type" not in checked and not ({"anyOf", "oneOf", "allOf", "$ref", "enum"} & checked.keys()):
        checked["type"] = "object"
    if checked.get("type") != "object":
        shown = checked.get("type", "a combination of schemas")
        raise _bad_schema(f"its type is {shown!r}, but the arguments of a tool are an object")
    checked.setdefault("properties", {})
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]

    validator = _schema_validator(checked)
    try:
        validator.check_schema(checked)
    except SchemaError as error:
        raise _bad_schema(f"{clip(error.message, 300)} (at {_join(error.absolute_path) or 'the top'})") from error
    for reference in _references(checked):
        _check_reference(validator, reference)
    return checked


def _check_reference(validator: Any, reference: str) -> None:
    from referencing.exceptions import Unresolvable

    if not reference.startswith("#"):
        raise _bad_schema(f"$ref {reference!r} leads out of the schema; only references that start with '#' are followed")
    try:
        validator._resolver.lookup(reference)
    except Unresolvable as error:
        raise _bad_schema(f"$ref {reference!r} leads nowhere") from error


def _schema_validator(schema: dict[str, Any]) -> Any:
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]
    from referencing import Registry

    # An empty registry: the default one would fetch a remote $ref over the network.
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


def _references(node: Any) -> Iterable[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from _references(child)
    elif isinstance(node, list):
        for child in node:
            yield from _references(child)


def _bad_schema(reason: str) -> ConfigurationError:
    return ConfigurationError(f"`input` is not a usable JSON schema: {reason}.", field="input")


def _schema_issues(error: Any) -> list[Issue]:
    path, instance = list(error.absolute_path), error.instance
    if error.validator == "required" and isinstance(instance, dict):
        # jsonschema reports each missing name as an error of its own, whose message begins with the quoted name.
        name = next((n for n in error.validator_value if error.message.startswith(repr(n))), "")
        return [{"path": _join([*path, name]), "message": "required, but missing"}]
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = list(error.schema.get("properties", {}))
        unknown = [key for key in instance if key not in known]
        return [{"path": _join([*path, key]), "message": f"unknown argument.{suggest(key, known)}"} for key in unknown]
    message = {
        "type": f"must be of type {error.validator_value} (got {_kind(instance)})",
        "enum": f"must be one of {_shown(error.validator_value)}",
        "const": f"must be {_shown(error.validator_value)}",
    }.get(error.validator)
    if message is None:
        message = error.message.replace(repr(instance), "the value", 1)  # its own text begins with the value
    return [{"path": _join(path), "message": replace_surrogates(clip(message, 300))}]


# -------------------------------------------------------------------------------------------------------------------- JSON text


def parse_object(text: str) -> dict[str, Any]:
    """The object that the JSON `text` of a model holds. Blank text and `null` are an empty object; of a repeated key the last wins.

    Lone surrogates become U+FFFD. Raises `InvalidArguments` (path `""`) for anything else: text that is no JSON, `NaN`, a number
    too large for a float, an array, a bare value.
    """
    if not text.strip():
        return {}
    try:
        data = _decode(text)
        if "\\ud" in text.lower() or not text.isascii():
            data = clean(data)
    except RecursionError:
        raise _not_an_object("nested too deeply") from None
    except ValueError as error:
        raise _not_an_object(f"not valid JSON: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise _not_an_object(f"must be a JSON object (got {_kind(data)})")
    return data


def clean(value: Any) -> Any:
    """`value` with lone surrogates replaced in every text and key."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {replace_surrogates(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    return value


def _not_an_object(message: str) -> InvalidArguments:
    return InvalidArguments([{"path": "", "message": replace_surrogates(message)}])


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {clip(text, 40)} is out of range")
    return number


_decode = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite).decode
"""One decoder for all calls: `json.loads` with options makes a new one each time."""


def decode_texts(data: dict[str, Any], paths: Iterable[Iterable[Any]]) -> dict[str, Any] | None:
    """A copy of `data` in which the texts at `paths` are replaced by the JSON scalar they spell; `None` when nothing changed."""
    copy, changed = json.loads(json.dumps(data)), False
    for path in paths:
        *parents, last = path
        node = copy
        try:
            for key in parents:
                node = node[key]
            scalar = json.loads(node[last], parse_constant=_refuse_constant)
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        if not isinstance(scalar, str | dict | list):
            node[last], changed = scalar, True
    return copy if changed else None


def _join(path: Iterable[Any]) -> str:
    return ".".join(str(part) for part in path)


def _kind(value: Any) -> str:
    """What an argument is, in JSON's words. Its value is not repeated: errors are logged, and it may be a secret."""
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null" if value is None else type(value).__name__)


_KINDS: tuple[tuple[Any, str], ...] = (
    (bool, "boolean"),
    (str, "string"),
    (int, "integer"),
    (float, "number"),
    (Mapping, "object"),
    (Sequence, "array"),
)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return clip(text, _SHOWN_CHARS)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, without a final stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
