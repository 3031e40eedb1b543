"""`Tool`, `define_tool()` and `@tool`: a function a model may call, with everything the loop must know about it."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from lousho_ray.errors import ToolArgumentsValidationError, message_of, suggest
from lousho_ray.ports import ToolContext, ToolDefinition
from lousho_ray.tools.attributes import Effect, NeedsApproval, ToolAnnotations, check_name, check_options, invalid
from lousho_ray.tools.schema import (
    InputSchema,
    InvalidArguments,
    JsonSchemaInput,
    ParsedArguments,
    clean,
    parse_object,
    type_input,
)
from lousho_ray.tools.signature import Signature, display_name, read_docstring, read_signature, takes_context

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Tool(Generic[P, R]):
    """A tool. Make one with `@tool` or `define_tool()`; calling it calls the function itself.

    Attributes:
        name: What the model calls it, `^[a-zA-Z0-9_-]{1,64}$`.
        description: What the model reads about it.
        display_name: What people read; the name by default.
        needs_approval: `True`, `False`, or a sync or async function of the validated arguments (and a context).
        annotations: The MCP hints.
        metadata: `mcp.annotations` and `editsFiles` besides the author's own keys.
        edits_files: Changes files of the workspace: mode `acceptEdits` runs it unasked.
        requires_sandbox: Never runs outside `sandbox_execute`.
        sandbox_execute: `fn(args, sandbox, ctx)`, used instead of the function where a tool runs sandboxed.
        max_calls_per_run: How many calls of it one run executes.
        effect: What a repeated call does; `once` is not repeated after a crash.
        ray_options: Runs it as a Ray task that asks for these resources (`num_gpus`, `num_cpus`, `memory`, `resources`, ...), once:
            a task that is lost is a failed call. With `runtime="local"` it runs in the process like any tool.
    """

    name: str
    description: str
    function: Callable[P, R]
    spec: Signature | Mapping[str, Any] | type | Any = None
    display_name: str = ""
    needs_approval: NeedsApproval = False
    annotations: ToolAnnotations = field(default_factory=ToolAnnotations)
    metadata: dict[str, Any] = field(default_factory=dict)
    edits_files: bool = False
    requires_sandbox: bool = False
    sandbox_execute: Callable[..., Any] | None = None
    max_calls_per_run: int | None = None
    effect: Effect | None = None
    ray_options: Mapping[str, Any] | None = None
    bound_to: Any = None

    def __post_init__(self) -> None:
        if not self.display_name:
            object.__setattr__(self, "display_name", self.name)
        self._look_like_function()

    def _look_like_function(self) -> None:
        """What `inspect` and `help()` look at."""
        for attribute in ("__module__", "__name__", "__qualname__"):
            self.__dict__[attribute] = getattr(self.function, attribute, self.name)
        self.__dict__.update(__doc__=self.description, __wrapped__=self.function)

    @functools.cached_property
    def input(self) -> InputSchema:
        """The validation of arguments; made when the tool is defined, and again in a process it was sent to."""
        if isinstance(self.spec, Signature):
            return self.spec.input()
        if isinstance(self.spec, Mapping):
            return JsonSchemaInput(self.spec)
        return type_input(self.spec)

    @functools.cached_property
    def definition(self) -> ToolDefinition:
        """The tool as a model sees it."""
        return ToolDefinition(self.name, self.description, self.input.parameters)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments, of type object."""
        return self.definition.parameters

    @property
    def read_only(self) -> bool:
        """Whether it changes nothing: plan mode runs it."""
        return bool(self.annotations.read_only_hint) or self.effect == "read"

    @functools.cached_property
    def streams(self) -> bool:
        """Whether it is an async generator, whose yields are partial results."""
        return inspect.isasyncgenfunction(_code_of(self.function))

    @functools.cached_property
    def runs_in_thread(self) -> bool:
        """Whether it is a sync function. A thread cannot be cancelled: it learns of an abort through `ctx.abort_signal`."""
        code = _code_of(self.function)
        return not (inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code))

    def parse(self, arguments: str) -> ParsedArguments:
        """Validates the JSON text a model sent; blank text is `{}`.

        Raises:
            ToolArgumentsValidationError: `LOUSHO_TOOL_ARGS_INVALID` with every issue: no JSON object (path `""`), or no match.
        """
        return self._validated(lambda: parse_object(arguments))

    def parse_plain(self, arguments: Mapping[str, Any]) -> ParsedArguments:
        """Validates arguments that are data already, such as those a hook changed. Raises like `parse`."""
        return self._validated(lambda: cast("dict[str, Any]", clean(dict(arguments))))

    def _validated(self, read: Callable[[], dict[str, Any]]) -> ParsedArguments:
        cause: Exception | None = None
        try:
            return self.input.validate(read())
        except InvalidArguments as refused:
            issues = refused.issues
        except Exception as error:  # of a validator the tool's author wrote
            issues, cause = [{"path": "", "message": f"validation failed: {type(error).__name__}: {message_of(error)}"}], error
        listed = "; ".join(f"{issue['path'] or 'arguments'}: {issue['message']}" for issue in issues)
        count = f"{len(issues)} {'issue' if len(issues) == 1 else 'issues'}"
        message = f"The arguments of tool {self.name!r} are invalid ({count}): {listed}"
        raise ToolArgumentsValidationError(message, tool_name=self.name, issues=issues) from cause

    def call_arguments(self, value: Any, ctx: ToolContext | None) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments with which the function is called for a validated `value`."""
        if isinstance(self.spec, Signature):
            positional, keywords = self.spec.bind(value, ctx)
            return ([self.bound_to, *positional] if self.bound_to is not None else positional), keywords
        takes_value, place = self._call_shape
        positional = ([value] if takes_value else []) + ([ctx] if isinstance(place, int) else [])
        return positional, {place: ctx} if isinstance(place, str) else {}

    @functools.cached_property
    def _call_shape(self) -> tuple[bool, str | int | None]:
        """Whether a defined tool's function takes the arguments, and how it gets the context."""
        takes_value = not _takes_nothing(self.function)
        return takes_value, takes_context(self.function, 1) if takes_value else None

    def with_name(self, name: str) -> Tool[P, R]:
        """The same tool under another model-facing name."""
        check_name(name)
        shown = self.display_name if self.display_name != self.name else name
        return self if name == self.name else replace(self, name=name, display_name=shown)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.bound_to is not None:
            return cast("Callable[..., R]", self.function)(self.bound_to, *args, **kwargs)
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Tool[..., R]:
        if instance is None or not isinstance(self.spec, Signature) or not _is_method(self.function):
            return self
        return cast("Tool[..., R]", replace(self, bound_to=instance))

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        # The validator is compiled again where it is needed: compiled ones of local classes do not pickle.
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look_like_function()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A decorated function of an importable module travels by its name, like an undecorated one: its module may hold
        # clients and locks that cannot travel.
        found = _importable(self.function)
        if found is None:
            return super().__reduce_ex__(protocol)
        changes = {
            item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not getattr(found, item.name)
        }
        return _from_import, (self.function.__module__, self.function.__qualname__, changes)


def _importable(function: Callable[..., Any]) -> Tool[..., Any] | None:
    """The tool that a function's own name leads to, where that is a tool of this function."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module in {None, "__main__"} or module not in sys.modules or not isinstance(path, str) or _by_value(module):
        return None
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Tool) and found.function is function else None


def _from_import(module: str, path: str, changes: dict[str, Any]) -> Tool[..., Any]:
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return cast("Tool[..., Any]", replace(found, **changes) if changes else found)


def _by_value(module: str) -> bool:
    picklers = [sys.modules[name] for name in ("cloudpickle", "ray.cloudpickle") if name in sys.modules]
    return any(
        module == name or module.startswith(f"{name}.") for pickler in picklers for name in pickler.list_registry_pickle_by_value()
    )


# -------------------------------------------------------------------------------------------------------------------- defining


def define_tool(
    *,
    name: str,
    description: str,
    execute: Callable[..., Any],
    input: Any = None,
    display_name: str | None = None,
    needs_approval: NeedsApproval = False,
    annotations: ToolAnnotations | Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    edits_files: bool = False,
    requires_sandbox: bool = False,
    sandbox_execute: Callable[..., Any] | None = None,
    max_calls_per_run: int | None = None,
    effect: Effect | None = None,
    ray_options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Tool[..., Any]:
    """Defines a tool from its parts.

    Args:
        name: What the model calls it.
        description: What the model reads about it.
        execute: `fn(args)` or `fn(args, ctx)`, sync (runs in a thread), async, or an async generator (streams snapshots).
        input: A pydantic model or another type (`args` is the parsed value), a JSON schema `dict` (`args` is validated plain
            data), or nothing for a tool without arguments.

    The other options are the attributes of `Tool`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for a bad name, an empty description, an unusable schema or an unknown option.
    """
    _refuse_unknown(unknown)
    if not callable(execute):
        raise invalid(f"`execute` of tool {name!r} is {execute!r}, which cannot be called: pass a function.", "execute")
    options = {key: given for key, given in locals().items() if key not in {"name", "description", "execute", "input", "unknown"}}
    spec = {"type": "object", "properties": {}, "additionalProperties": False} if input is None else input
    return _make(name, description, execute, spec, options)


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    display_name: str | None = None,
    needs_approval: NeedsApproval = False,
    annotations: ToolAnnotations | Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    edits_files: bool = False,
    requires_sandbox: bool = False,
    sandbox_execute: Callable[..., Any] | None = None,
    max_calls_per_run: int | None = None,
    effect: Effect | None = None,
    ray_options: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Makes a tool of a function: `@tool`, or `@tool(needs_approval=True, ...)`.

    Name, description and schema come from the function: its name, its docstring and parameter lines, its annotations
    (`Annotated[int, Field(ge=1)]` too). A parameter named `ctx`, or annotated `ToolContext`, gets the context and is not in the
    schema; `**kwargs` allows extra arguments. Options are the attributes of `Tool`.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for a parameter without annotation, `*args`, a type without a JSON schema, a
            missing docstring, a bad name or an unknown option.
    """
    _refuse_unknown({key: value for key, value in options.items() if key not in _OPTIONS})
    if function is None:
        return lambda decorated: _from_function(decorated, options, sys._getframe(1))
    return _from_function(function, options, sys._getframe(1))


def _from_function(function: Any, options: Mapping[str, Any], frame: FrameType) -> Tool[..., Any]:
    if isinstance(function, staticmethod):
        function = function.__func__
    if not callable(function) or isinstance(function, Tool):
        raise invalid(f"@tool needs a function, not {function!r}.", "tools")
    if isinstance(inspect.unwrap(function), type):
        raise invalid(f"@tool needs a function, not the class {function.__name__}.", "tools")
    summary, lines = read_docstring(function)
    name = options.get("name") or display_name(function)
    description = options.get("description") or summary
    signature = read_signature(function, lines, frame, method=_is_method(function))
    rest = {key: given for key, given in options.items() if key not in {"name", "description"}}
    return _make(name, description, function, signature, rest)


def _make(name: str, description: str, function: Callable[..., Any], spec: Any, options: Mapping[str, Any]) -> Tool[..., Any]:
    check_name(name)
    if not isinstance(description, str) or not description.strip():
        raise invalid(
            f"Tool {name!r} has no description: give it a docstring or `description=`, for the model to read.", "description"
        )
    check_options(name, options)
    hints = ToolAnnotations.of(options.get("annotations"))
    metadata = dict(options.get("metadata") or {})
    if hints.to_dict():
        metadata["mcp"] = {**metadata.get("mcp", {}), "annotations": hints.to_dict()}
    if options.get("edits_files"):
        metadata["editsFiles"] = True
    given = {key: value for key, value in options.items() if value is not None}
    made: Tool[..., Any] = Tool(
        name=name,
        description=description.strip(),
        function=function,
        spec=spec,
        **{**given, "annotations": hints, "metadata": metadata},
    )
    if made.ray_options is not None and made.streams:
        problem = "is an async generator, whose partial results cannot leave a Ray task: return the result, or drop `ray_options`"
        raise invalid(f"Tool {name!r} {problem}.", "ray_options")
    made.definition  # noqa: B018 - a schema that cannot be made is an error of the definition
    return made


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    for key in options:
        raise invalid(f"A tool has no option {key!r}.{suggest(key, _OPTIONS)} Known: {', '.join(sorted(_OPTIONS))}.", key)


_OPTIONS = frozenset(inspect.signature(define_tool).parameters) - {"unknown", "input", "execute"}


def _code_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What tells whether a callable is async: the function inside a partial, or the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def is_unbound_method(tool: Tool[..., Any]) -> bool:
    """Whether a tool is a method taken from its class instead of an instance."""
    return tool.bound_to is None and isinstance(tool.spec, Signature) and _is_method(tool.function)


def _is_method(function: Callable[..., Any]) -> bool:
    """Whether a function is a method that is not bound yet: its first parameter is a bare `self` or `cls`."""
    if not inspect.isfunction(function):
        return False
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return first is not None and first.name in {"self", "cls"} and first.annotation is inspect.Parameter.empty


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
