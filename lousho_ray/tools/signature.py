"""A function as a tool: what its name, docstring and signature say, and how it is called."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from lousho_ray.errors import ConfigurationError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.schema import PydanticInput, first_line

CONTEXT_NAME = "ctx"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter the model fills in. Holds resolved types, so that it can be rebuilt where the function's module is unknown."""

    name: str
    annotation: Any
    default: Any
    description: str | None
    positional_only: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's parameters as a tool sees them.

    Attributes:
        parameters: What the model fills in.
        context: The name of the parameter that gets the `ToolContext`, if any.
        context_index: Its place when it can only be passed by position.
        extra: The annotation of `**kwargs`, when the function has them.
        takes_extra: Whether it has.
    """

    parameters: tuple[Parameter, ...]
    context: str | None = None
    context_index: int | None = None
    takes_extra: bool = False
    extra: Any = Any

    def input(self) -> PydanticInput:
        """The validation of these parameters.

        Raises:
            ConfigurationError: `LOUSHO_CONFIG_INVALID` naming the parameter no JSON schema can be made of.
        """
        try:
            return PydanticInput(self._model(), self._keywords)
        except (PydanticUserError, TypeError, NameError) as error:
            raise self._culprit(error) from error

    def _model(self) -> type[BaseModel]:
        """A model with one field per parameter. Fields have made-up names, since a parameter may be called `copy` or `_x`."""
        config = ConfigDict(extra="allow" if self.takes_extra else "forbid", protected_namespaces=())
        namespace = {"__annotations__": {"__pydantic_extra__": dict.__class_getitem__((str, self.extra))}, "__module__": __name__}
        base = type("Base", (BaseModel,), {**namespace, "model_config": config})
        fields: dict[str, Any] = {}
        for index, parameter in enumerate(self.parameters):
            field = Field(alias=parameter.name) if parameter.description is None else _described(parameter)
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[f"p{index}"] = (Annotated[parameter.annotation, field], default)
        return create_model("Arguments", __base__=base, **fields)

    def _keywords(self, arguments: BaseModel) -> dict[str, Any]:
        values = {parameter.name: getattr(arguments, f"p{index}") for index, parameter in enumerate(self.parameters)}
        return {**values, **(arguments.__pydantic_extra__ or {})}

    def _culprit(self, error: Exception) -> ConfigurationError:
        for parameter in self.parameters:
            try:
                TypeAdapter(parameter.annotation).json_schema()
            except (PydanticUserError, TypeError, NameError) as cause:
                return _bad_parameter(parameter.name, f"has a type no JSON schema can be made of ({first_line(cause)})")
        return ConfigurationError(f"No schema can be made of the tool's parameters: {first_line(error)}.", field="tools")

    def bind(self, keywords: Mapping[str, Any], ctx: ToolContext | None) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments of a call."""
        named = dict(keywords)
        positional = [named.pop(parameter.name) for parameter in self.parameters if parameter.positional_only]
        if self.context_index is not None:
            positional.insert(self.context_index, ctx)
        elif self.context is not None:
            named[self.context] = ctx
        return positional, named


def _described(parameter: Parameter) -> Any:
    return Field(alias=parameter.name, description=parameter.description)


def read_signature(
    function: Callable[..., Any], docs: Mapping[str, str], frame: types.FrameType | None, *, method: bool
) -> Signature:
    """Reads a function's parameters. `docs` are its docstring's parameter lines, `frame` where it was made a tool.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for a parameter without annotation, `*args`, or an unknown annotation.
    """
    hints = _type_hints(function, frame)
    fixed = set(function.keywords) if isinstance(function, functools.partial) else set[str]()
    declared = [p for p in inspect.signature(function).parameters.values() if p.name not in fixed][1 if method else 0 :]
    parameters: list[Parameter] = []
    context: inspect.Parameter | None = None
    context_index, extra, takes_extra = 0, Any, False
    for index, item in enumerate(declared):
        annotation = hints.get(item.name, item.annotation)
        if item.kind is inspect.Parameter.VAR_POSITIONAL:
            raise _bad_parameter(f"*{item.name}", "cannot be filled by a model: use a list parameter")
        if item.kind is inspect.Parameter.VAR_KEYWORD:
            takes_extra, extra = True, Any if annotation is inspect.Parameter.empty else annotation
        elif item.name == CONTEXT_NAME or is_context(annotation):
            context, context_index = item, index
        elif annotation is inspect.Parameter.empty:
            raise _bad_parameter(item.name, "has no type annotation: annotate it, for example `city: str`")
        else:
            parameters.append(_parameter(item, annotation, docs))
    by_position = context is not None and context.kind is inspect.Parameter.POSITIONAL_ONLY
    return Signature(
        tuple(parameters), context.name if context else None, context_index if by_position else None, takes_extra, extra
    )


def _parameter(item: inspect.Parameter, annotation: Any, docs: Mapping[str, str]) -> Parameter:
    own = [meta for meta in get_args(annotation)[1:] if get_origin(annotation) is Annotated]
    description = next((meta for meta in own if isinstance(meta, str)), None)
    declared = [*own, item.default]
    if not any(isinstance(meta, FieldInfo) and meta.description for meta in declared):
        description = description or docs.get(item.name)
    return Parameter(item.name, annotation, item.default, description, item.kind is inspect.Parameter.POSITIONAL_ONLY)


def _type_hints(function: Callable[..., Any], frame: types.FrameType | None) -> dict[str, Any]:
    target = unwrapped(function)
    if not isinstance(target, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        target = type(target).__call__
    nested = "." in getattr(target, "__qualname__", "")
    failure: NameError | None = None
    while True:
        try:
            return get_type_hints(
                target, localns=dict(frame.f_locals) if frame is not None and nested else None, include_extras=True
            )
        except NameError as error:
            # A local type: look for it where the function was made a tool, then in the frames around that.
            failure = failure or error
            frame, nested = (frame.f_back, True) if frame is not None and nested else (frame, True)
            if frame is None:
                break
    raise ConfigurationError(
        f"An annotation of the tool function {display_name(function)!r} names something that is not defined there: {failure}. "
        "Import it at module level, outside `if TYPE_CHECKING:`.",
        field="tools",
    ) from failure


def is_context(annotation: Any) -> bool:
    """Whether an annotation is `ToolContext`, `ToolContext | None` or an `Annotated` form of it."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in {Union, types.UnionType}:
        return any(is_context(option) for option in get_args(annotation))
    return annotation is ToolContext or annotation in {"ToolContext", "ToolContext | None"}


def takes_context(function: Callable[..., Any], after: int) -> str | int | None:
    """How a function called with `after` positional arguments gets the context: `ctx` by name, its place, or not at all."""
    try:
        declared = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(item.name == CONTEXT_NAME and item.kind is inspect.Parameter.KEYWORD_ONLY for item in declared):
        return CONTEXT_NAME
    if any(item.kind is inspect.Parameter.VAR_POSITIONAL for item in declared):
        return after
    positional = [item for item in declared if item.kind in _POSITIONAL]
    if len(positional) <= after:
        return None
    candidate = positional[after]
    wanted = candidate.default is inspect.Parameter.empty or candidate.name == CONTEXT_NAME or is_context(candidate.annotation)
    return after if wanted else None


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside `functools.partial` objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def display_name(function: Callable[..., Any]) -> str:
    target = unwrapped(function)
    return cast("str", getattr(target, "__name__", type(target).__name__))


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description in a function's docstring (all text above the sections) and its parameter lines."""
    import docstring_parser

    target = unwrapped(function)
    text = target.__doc__ if hasattr(target, "__name__") else (type(target).__call__.__doc__ or type(target).__doc__)
    if not text:
        return "", {}
    parsed = docstring_parser.parse(inspect.cleandoc(text))
    gap = "\n\n" if parsed.blank_after_short_description else "\n"
    description = gap.join(part.strip() for part in (parsed.short_description, parsed.long_description) if part and part.strip())
    lines = {item.arg_name: " ".join(item.description.split()) for item in parsed.params if item.description}
    return description, lines


def _bad_parameter(name: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"Parameter {name!r} of the tool function {problem}.", field="tools")
