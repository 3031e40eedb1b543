"""Collections of tools: what an agent's `tools` option may be, and `ToolRegistry`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from lousho_ray.hosted_tools import HostedTool, code_interpreter, file_search, hosted_tool, web_search
from lousho_ray.tools.attributes import invalid
from lousho_ray.tools.results import ErrorResult, error_result
from lousho_ray.tools.tool import Tool, is_unbound_method, tool

AnyTool: TypeAlias = Tool[..., Any]

_CONSTRUCTORS = (web_search, code_interpreter, file_search, hosted_tool)

MAX_LISTED = 50
"""How many names an unknown tool's error lists."""


def collect_tools(spec: Any) -> dict[str, AnyTool]:
    """The tools of a list, a mapping (its keys are the model-facing names), a registry, or any nesting of them, by name.

    A plain function in a list is made a tool.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` for two tools of one name, naming both, for a hosted tool, and for what is no
            tool.
    """
    tools, hosted = collect_all_tools(spec)
    for item in hosted:
        raise invalid(f"{item.name!r} is a hosted tool: it has nothing to run, so give it to create_agent(tools=) itself.", "tools")
    return tools


def collect_all_tools(spec: Any) -> tuple[dict[str, AnyTool], tuple[HostedTool, ...]]:
    """What `collect_tools` finds, and the hosted tools among them.

    Raises:
        ConfigurationError: `LOUSHO_CONFIG_INVALID` as `collect_tools`, and for a hosted tool whose name is taken.
    """
    collected: dict[str, AnyTool] = {}
    hosted: dict[str, HostedTool] = {}
    for item in _walk(spec, "tools"):
        if isinstance(item, HostedTool):
            if item.name in hosted:
                raise invalid(f"Two hosted tools are called {item.name!r}: keep one of them.", "tools")
            hosted[item.name] = item
        else:
            add_tool(collected, item)
    check_hosted_names(hosted.values(), collected)
    return collected, tuple(hosted.values())


def check_hosted_names(hosted: Iterable[HostedTool], tools: Mapping[str, AnyTool]) -> None:
    """Raises `ConfigurationError` (`LOUSHO_CONFIG_INVALID`) when a hosted tool and another tool have one name."""
    for item in hosted:
        if item.name in tools:
            other = _shown(tools[item.name])
            raise invalid(f"The hosted tool {item.name!r} and the tool {other} have one name. Rename your tool.", "tools")


def add_tool(collected: dict[str, AnyTool], item: AnyTool) -> None:
    """Adds a tool under its name. Raises `ConfigurationError` (`LOUSHO_CONFIG_INVALID`) when the name is taken by another tool."""
    present = collected.get(item.name)
    if present is not None:
        raise invalid(
            f"Two tools are called {item.name!r}: {_shown(present)} and {_shown(item)}. Rename one of them, "
            'for example {"other_name": the_tool}.',
            "tools",
        )
    collected[item.name] = item


def find_tool(tools: Mapping[str, AnyTool], name: str) -> AnyTool | None:
    """The tool a model called: only the exact name counts, apart from blanks around it."""
    return tools.get(name) or tools.get(name.strip())


def not_found(tools: Mapping[str, AnyTool], name: str) -> ErrorResult:
    """The result of a call of an unknown tool: it lists the tools there are (at most 50)."""
    names = list(tools)
    listed = ", ".join(names[:MAX_LISTED]) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
    known = f"Call one of: {listed}." if names else "There are no tools in this run."
    shown = name if len(name) <= 100 else name[:100] + "..."
    return error_result(shown, "not-found", f"There is no tool {shown!r}. {known}")


def _walk(spec: Any, place: str) -> Iterator[AnyTool | HostedTool]:
    if spec is None:
        return
    if isinstance(spec, HostedTool):
        yield spec
    elif isinstance(spec, Tool):
        yield _bound(spec)
    elif isinstance(spec, Mapping):
        for name, item in spec.items():
            if not isinstance(item, Tool | HostedTool) and not callable(item):
                raise _no_tool(item, f"{place}[{name!r}]")
            yield from (_named(found, name) for found in _walk(item, f"{place}[{name!r}]"))
    elif isinstance(spec, ToolRegistry):
        yield from spec.list()
    elif isinstance(spec, Sequence) and not isinstance(spec, str | bytes):
        for index, item in enumerate(spec):
            yield from _walk(item, f"{place}[{index}]")
    elif callable(spec) and not isinstance(spec, type):
        if any(spec is constructor for constructor in _CONSTRUCTORS):
            name = spec.__name__
            raise invalid(f"{place} is the function {name}: call it, as in `tools=[{name}(...)]`.", "tools")
        yield tool(spec)
    else:
        raise _no_tool(spec, place)


def _named(item: AnyTool | HostedTool, name: str) -> AnyTool | HostedTool:
    if not isinstance(item, HostedTool):
        return item.with_name(name)
    if item.name != name:
        raise invalid(f"The hosted tool {item.name!r} stands under the key {name!r}: its provider knows no other name.", "tools")
    return item


def _bound(item: AnyTool) -> AnyTool:
    if is_unbound_method(item):
        raise invalid(
            f"Tool {item.name!r} is a method of a class: pass it from an instance, as in `tools=[thing.{item.name}]`.", "tools"
        )
    return item


def _no_tool(item: Any, place: str) -> Exception:
    kind = f"the class {item.__name__}" if isinstance(item, type) else repr(item)
    return invalid(f"{place} is {kind}, which is no tool: use @tool or define_tool().", "tools")


def _shown(item: AnyTool) -> str:
    function = getattr(item.function, "__qualname__", type(item.function).__name__)
    name = item.display_name if item.display_name != item.name else item.name
    return f"{name!r} ({item.function.__module__}.{function})" if hasattr(item.function, "__module__") else repr(name)


class ToolRegistry:
    """Named tools. Register in one place, give the registry to agents as `tools`."""

    def __init__(self, tools: Any = None) -> None:
        self._tools: dict[str, AnyTool] = collect_tools(tools)

    def register(self, tool: Any) -> None:
        """Adds one tool. Raises `ConfigurationError` (`LOUSHO_CONFIG_INVALID`) when its name is taken."""
        self.register_many([tool])

    def register_many(self, tools: Any) -> None:
        """Adds all tools of a list or mapping, or none of them. Raises like `register`."""
        merged = dict(self._tools)
        for item in collect_tools(tools).values():
            add_tool(merged, item)
        self._tools = merged

    def get(self, name: str) -> AnyTool | None:
        return self._tools.get(name)

    def has(self, name: str) -> bool:
        return name in self._tools

    def list(self) -> list[AnyTool]:
        """The tools in the order in which they were registered."""
        return [*self._tools.values()]

    def unregister(self, name: str) -> bool:
        """Removes a tool. Returns whether it was there."""
        return self._tools.pop(name, None) is not None

    def clear(self) -> None:
        self._tools = {}

    def size(self) -> int:
        return len(self._tools)
