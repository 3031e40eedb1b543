"""Tools with `ray_options`: each call is a Ray task that asks for the resources its tool wants."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import fields
from typing import Any

import ray
from ray.cloudpickle import cloudpickle
from ray.exceptions import RayError

from lousho_ray.actors.cluster import attached, live, unwrapped
from lousho_ray.actors.shipping import portable
from lousho_ray.errors import ToolExecutionError, message_of
from lousho_ray.ports import ToolContext
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.tool import Tool

KEPT_TOOLS = 64
"""Pickled tools that a process keeps, and unpickled ones that a task's process keeps."""

LOOK_S = 30.0
"""How often a task that has not ended is looked after."""

GRACE_S = 5.0
"""How long a cancelled task may take to clean up before its process is killed."""

log = logging.getLogger("lousho_ray.tools")


async def run_as_task(tool: Tool[..., Any], value: Any, ctx: ToolContext) -> Any:
    """Runs one call as a Ray task, once. Waits as long as it takes: for free resources, too.

    Cancelling the caller cancels the task; one that goes on regardless loses its process.

    Raises:
        ToolExecutionError: `LOUSHO_TOOL_EXECUTION_FAILED`: the task's process died, or the tool, its arguments or its result cannot
            be sent. What the tool raises is raised here.
    """
    await attached()
    options = {"num_cpus": 1, **(tool.ray_options or {}), "max_retries": 0, "name": f"tool {tool.name}"}
    try:
        call = live(_run).options(**options).remote(_PARCELS.of(tool), cloudpickle.dumps((value, _portable(ctx))))
    except Exception as error:
        raise ToolExecutionError(f"The call cannot be sent to a Ray task: {message_of(error)}", tool_name=tool.name) from error
    answer = asyncio.ensure_future(_answer(call, tool.name))
    try:
        await _watched(answer, tool)
    except asyncio.CancelledError:
        await _end(call, answer)
        raise
    return answer.result()


def _portable(ctx: ToolContext) -> dict[str, Any]:
    """What of a context goes along. The rest belongs to this process: an abort reaches the task as its cancellation."""
    return {item.name: getattr(ctx, item.name) for item in fields(ctx) if item.name not in ("run", "abort_signal")}


async def _answer(call: Any, name: str) -> Any:
    try:
        return await call
    except RayError as error:
        cause = unwrapped(error)
        if isinstance(cause, Exception) and not isinstance(cause, RayError):
            raise cause from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ToolExecutionError(
            f"The Ray task of tool {name!r} was lost ({type(error).__name__}: {lines[0]}). "
            "It is not run again; what it had done by then may have taken effect.",
            tool_name=name,
        ) from error


async def _watched(answer: asyncio.Future[Any], tool: Tool[..., Any]) -> None:
    """Waits for the end, and says so when the cluster has not got what the task asks for."""
    warned = False
    while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
        lacking = None if warned else await asyncio.to_thread(_lacking, tool)
        if lacking:
            warned = True
            log.warning("Tool %r asks for %s, which no node of the cluster has: it waits for one that does.", tool.name, lacking)


def _lacking(tool: Tool[..., Any]) -> str:
    """The wishes that no node can grant as it is."""
    options = dict(tool.ray_options or {})
    wishes = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0), "memory": options.get("memory", 0)}
    wishes |= options.get("resources") or {}
    every_node: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [node["Resources"] for node in every_node if node["Alive"]]
    return ", ".join(f"{name}={wish:g}" for name, wish in wishes.items() if all(node.get(name, 0) < wish for node in nodes))


async def _end(call: Any, answer: asyncio.Future[Any]) -> None:
    """Cancels a task, and kills its process when it does not end."""
    for force in (False, True):
        with suppress(Exception):
            await asyncio.to_thread(ray.cancel, call, force=force)
        done, _ = await asyncio.wait({answer}, timeout=GRACE_S)
        if done:
            break
    if answer.done() and not answer.cancelled():
        answer.exception()


@ray.remote(max_retries=0)
def _run(parcel: tuple[str, bytes], call: bytes) -> Any:
    """Runs in the task's process."""
    tool = _unpack(*parcel)
    value, ctx = cloudpickle.loads(call)
    try:
        return asyncio.run(call_tool(tool, value, ToolContext(**ctx)))
    except Exception as error:
        if portable(error) is error:
            raise
        raise ToolExecutionError(f"{type(error).__name__}: {message_of(error)}") from None


@functools.lru_cache(maxsize=KEPT_TOOLS)
def _unpack(digest: str, data: bytes) -> Tool[..., Any]:
    tool: Tool[..., Any] = cloudpickle.loads(data)
    return tool


class _Parcels:
    """Tools as they are sent, each pickled once by a process."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, tuple[Tool[..., Any], tuple[str, bytes]]] = OrderedDict()

    def of(self, tool: Tool[..., Any]) -> tuple[str, bytes]:
        known = self._made.get(id(tool))
        if known is None or known[0] is not tool:
            data = cloudpickle.dumps(tool)
            known = self._made[id(tool)] = tool, (hashlib.sha256(data).hexdigest(), data)
            while len(self._made) > KEPT_TOOLS:
                self._made.popitem(last=False)
        return known[1]


_PARCELS = _Parcels()
