"""The to-do list."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from lousho_ray.errors import ToolArgumentsValidationError, ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools import Tool
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.todo import create_todo_tools


def item(content: str, status: str = "pending", id: str | None = None) -> dict[str, Any]:
    return {"content": content, "status": status, **({} if id is None else {"id": id})}


async def write(made: Tool[..., Any], *items: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = await call_tool(made, made.parse_plain({"todos": list(items)}).value, ToolContext("c"))
    return result


async def test_list_is_replaced_and_read() -> None:  # TOOL-40
    todo_write, todo_read = create_todo_tools()
    expected = {
        "todos": [
            {"id": "todo_1", "content": "a", "status": "completed"},
            {"id": "todo_2", "content": "b", "status": "in_progress"},
        ],
        "counts": {"pending": 0, "in_progress": 1, "completed": 1, "total": 2},
    }
    assert await write(todo_write, item("a", "completed"), item("b", "in_progress")) == expected
    assert await call_tool(todo_read, {}, ToolContext("c")) == expected
    assert (await write(todo_write))["counts"] == {"pending": 0, "in_progress": 0, "completed": 0, "total": 0}
    assert todo_read.read_only
    assert not todo_write.read_only
    assert todo_write.metadata["event"] == "todo.updated"


async def test_ids_stay_with_their_content() -> None:  # TOOL-41
    todo_write, _ = create_todo_tools()
    await write(todo_write, item("a"), item("b"), item("c"))
    changed = await write(todo_write, item("new"), item("c", "completed"), item("a"), item("renamed", id="todo_2"), item("a"))
    assert [(t["id"], t["content"]) for t in changed["todos"]] == [
        ("todo_4", "new"),
        ("todo_3", "c"),
        ("todo_1", "a"),
        ("todo_2", "renamed"),
        ("todo_5", "a"),
    ]


@pytest.mark.parametrize(
    "items",
    [
        [item("a", "in_progress"), item("b", "in_progress")],
        [item("a", id="x"), item("b", id="x")],
        [item("a", "done")],
        [item("")],
        [{"content": "a"}],
        [{**item("a"), "priority": 1}],
    ],
)
async def test_invalid_list_is_an_error_and_the_old_one_stays(items: list[dict[str, Any]]) -> None:  # TOOL-40
    changes: list[Any] = []
    todo_write, todo_read = create_todo_tools(on_change=changes.append)
    await write(todo_write, item("old"))
    with pytest.raises((ToolExecutionError, ToolArgumentsValidationError)):
        await write(todo_write, *items)
    assert [t["content"] for t in (await call_tool(todo_read, {}, ToolContext("c")))["todos"]] == ["old"]
    assert len(changes) == 1


async def test_store_and_listener_may_be_async() -> None:  # TOOL-41
    class Store:
        kept: Any = [{"id": "todo_7", "content": "a", "status": "pending"}]

        async def get(self) -> Any:
            return self.kept

        async def set(self, todos: Any) -> None:
            self.kept = todos

    changes: list[Any] = []

    async def changed(todos: Any) -> None:
        changes.append(todos)

    store = Store()
    todo_write, _ = create_todo_tools(store=store, on_change=changed)
    result = await write(todo_write, item("a", "completed"), item("b"))
    assert [t["id"] for t in result["todos"]] == ["todo_7", "todo_1"]
    assert store.kept == result["todos"] == changes[0]


async def test_two_pairs_of_tools_have_two_lists_and_travel() -> None:  # TOOL-41
    first, _ = create_todo_tools()
    _, other = create_todo_tools()
    await write(first, item("a"))
    assert (await call_tool(other, {}, ToolContext("c")))["todos"] == []
    assert (await write(pickle.loads(pickle.dumps(first)), item("b")))["counts"]["total"] == 1
