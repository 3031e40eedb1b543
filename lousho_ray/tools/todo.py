"""A to-do list that the model keeps for itself: `todo_write` and `todo_read`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from lousho_ray.errors import ToolExecutionError
from lousho_ray.tools.attributes import ToolAnnotations
from lousho_ray.tools.tool import Tool, tool

Status: TypeAlias = Literal["pending", "in_progress", "completed"]
STATUSES: tuple[Status, ...] = ("pending", "in_progress", "completed")

TODO_EVENT = "todo.updated"
"""Marks `todo_write` in its metadata (`event`): its result holds what the event of this name tells."""


class TodoItem(BaseModel):
    """One item. Without `id` it gets one, or keeps that of the present item with the same content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str | None = None
    content: Annotated[str, Field(min_length=1)]
    status: Status


Item: TypeAlias = dict[str, str]
"""`{"id", "content", "status"}`."""


class TodoStore(Protocol):
    """Where a list is kept. Both methods may be async."""

    def get(self) -> Sequence[Item] | Awaitable[Sequence[Item]]: ...

    def set(self, todos: Sequence[Item], /) -> Any: ...


@dataclass(slots=True)
class MemoryTodoStore:
    """Keeps the list in memory."""

    todos: tuple[Item, ...] = ()

    def get(self) -> Sequence[Item]:
        return self.todos

    def set(self, todos: Sequence[Item], /) -> None:
        self.todos = tuple(todos)


@dataclass(slots=True)
class TodoTools:
    """What the two tools run."""

    store: TodoStore = field(default_factory=MemoryTodoStore)
    on_change: Callable[[list[Item]], Any] | None = None

    async def todo_write(
        self, todos: Annotated[list[TodoItem], Field(description="The whole list: what is left out is removed.")]
    ) -> dict[str, Any]:
        """Replaces your to-do list. At most one item is in_progress. Keep it up to date while you work on a long task."""
        if sum(item.status == "in_progress" for item in todos) > 1:
            raise ToolExecutionError("More than one item is in_progress; the list was not changed.", tool_name="todo_write")
        listed = assign_ids(todos, await _awaited(self.store.get()))
        await _awaited(self.store.set(listed))
        if self.on_change is not None:
            await _awaited(self.on_change([dict(item) for item in listed]))
        return _answer(listed)

    async def todo_read(self) -> dict[str, Any]:
        """Returns your to-do list."""
        return _answer(await _awaited(self.store.get()))


def assign_ids(todos: Sequence[TodoItem], present: Iterable[Item]) -> list[Item]:
    """The new list: items without an id get that of the present item with the same content, else the next `todo_<n>`.

    Raises:
        ToolExecutionError: When two items have the same id.
    """
    given = [item.id for item in todos if item.id is not None]
    if len(set(given)) < len(given):
        raise ToolExecutionError("Two items have the same id; the list was not changed.", tool_name="todo_write")
    known = {item["content"]: item["id"] for item in present if item["id"] not in given}
    taken = {*given, *(item["id"] for item in present)}
    numbers = (f"todo_{number}" for number in range(1, len(todos) + len(taken) + 1))
    fresh = (name for name in numbers if name not in taken)
    listed = []
    for item in todos:
        name = item.id or known.pop(item.content, None) or next(fresh)
        listed.append({"id": name, "content": item.content, "status": item.status})
    return listed


def _answer(todos: Sequence[Item]) -> dict[str, Any]:
    counts = {status: sum(item["status"] == status for item in todos) for status in STATUSES}
    return {"todos": [dict(item) for item in todos], "counts": {**counts, "total": len(todos)}}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def create_todo_tools(
    *, store: TodoStore | None = None, on_change: Callable[[list[Item]], Any] | None = None
) -> list[Tool[..., Any]]:
    """`todo_write` and `todo_read` over one list.

    Args:
        store: Where the list is kept (`get()` and `set(todos)`, sync or async); without it in memory, one list per call of this.
        on_change: Called with the list after every successful write, sync or async.
    """
    tools = TodoTools(MemoryTodoStore() if store is None else store, on_change)
    return [
        tool(metadata={"event": TODO_EVENT}, annotations=ToolAnnotations(read_only_hint=False, open_world_hint=False))(
            tools.todo_write
        ),
        tool(annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))(tools.todo_read),
    ]
