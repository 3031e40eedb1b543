"""Collections of tools and the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lousho_ray.errors import ConfigurationError
from lousho_ray.tools import Tool, ToolRegistry, collect_tools, define_tool, tool
from lousho_ray.tools.registry import find_tool, not_found


def made(name: str, **options: Any) -> Tool[..., Any]:
    return define_tool(name=name, description="Does.", execute=lambda: name, **options)


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.code == "LOUSHO_CONFIG_INVALID"
    return caught.value.message


def test_lists_mappings_nested_ones_and_registries_are_collected_in_order() -> None:  # TOOL-06
    collected = collect_tools([made("a"), [made("b"), [made("c")]], (made("d"),), {"e": made("other")}, ToolRegistry([made("f")])])
    assert list(collected) == ["a", "b", "c", "d", "e", "f"]
    assert collected["e"].definition.name == "e"
    assert collect_tools(None) == {}
    assert collect_tools(made("a")).keys() == {"a"}


def test_plain_function_in_a_list_becomes_a_tool() -> None:
    class Local:
        pass

    def greet(name: str) -> str:
        """Greets."""
        return name

    assert collect_tools([greet])["greet"].description == "Greets."


def test_mapping_key_is_the_model_facing_name() -> None:  # TOOL-09
    collected = collect_tools({"today": made("current_date")})
    assert collected["today"].name == "today"
    assert "no tool name" in refused(lambda: collect_tools({"to day": made("x")}))


@pytest.mark.parametrize(
    "tools",
    [
        lambda: [made("a", display_name="First"), made("a", display_name="Second")],
        lambda: [made("a", display_name="First"), [made("a", display_name="Second")]],
        lambda: [{"a": made("x", display_name="First")}, made("a", display_name="Second")],
    ],
)
def test_two_tools_of_one_name_are_refused_naming_both(tools: Callable[[], Any]) -> None:  # TOOL-08
    message = refused(lambda: collect_tools(tools()))
    assert "'a'" in message
    assert "First" in message
    assert "Second" in message


@pytest.mark.parametrize("odd", [3, "search", {"a": "b"}, [None, 3], Tool, {"a": [made("x")]}])
def test_what_is_no_tool_is_refused_with_its_place(odd: Any) -> None:
    assert "tools" in refused(lambda: collect_tools(odd))


def test_method_taken_from_its_class_is_refused() -> None:
    class Shop:
        @tool
        def price(self, item: str) -> str:
            """Tells the price."""
            return item

    assert "instance" in refused(lambda: collect_tools([Shop.price]))
    assert list(collect_tools([Shop().price])) == ["price"]


def test_registry_registers_looks_up_and_removes() -> None:  # TOOL-09
    registry = ToolRegistry()
    first = made("a")
    registry.register(first)
    registry.register_many([made("b"), made("c")])
    assert (registry.size(), registry.has("b"), registry.has("x")) == (3, True, False)
    assert registry.get("a") is first
    assert registry.get("x") is None
    assert [item.name for item in registry.list()] == ["a", "b", "c"]
    assert registry.unregister("b")
    assert not registry.unregister("b")
    registry.clear()
    assert registry.size() == 0


def test_registry_takes_all_of_a_list_or_nothing() -> None:  # TOOL-08
    registry = ToolRegistry([made("a")])
    assert "'a'" in refused(lambda: registry.register_many([made("b"), made("a")]))
    assert "'a'" in refused(lambda: registry.register(made("a")))
    assert [item.name for item in registry.list()] == ["a"]


def test_only_the_exact_name_apart_from_blanks_finds_a_tool() -> None:  # T04
    tools = collect_tools([made("search")])
    assert find_tool(tools, "search") is tools["search"]
    assert find_tool(tools, " search\n") is tools["search"]
    for name in ("Search", "functions.search", "", "nope", "searc"):
        assert find_tool(tools, name) is None


def test_unknown_name_is_answered_with_a_bounded_list_of_the_tools() -> None:  # TOOL-17, T04
    tools = collect_tools([made(f"tool_{n}") for n in range(200)])
    payload = not_found(tools, "nope").payload
    assert (payload["error"], payload["kind"], payload["toolName"]) == ("ToolNotFoundError", "not-found", "nope")
    assert "tool_0, tool_1" in payload["message"]
    assert "150 more" in payload["message"]
    assert len(not_found(tools, "x" * 10_000).text) < 2_000
    assert "no tools" in not_found({}, "nope").payload["message"]
