"""Repeated reads: a call that a run has made before is answered from its earlier result, which may be pruned by now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

NOTE = "Answered from the earlier identical call of this run."


class ToolRun(Protocol):
    """What the hook needs of a call: see `ToolHookContext`."""

    @property
    def tool(self) -> Any: ...
    @property
    def args(self) -> dict[str, Any]: ...


class MemoizeHook:
    """Remembers the results of tools with `effect="read"` within one run, until a tool of another kind has run.

    Tools that ask for approval are left out: each of their calls is decided by itself.
    """

    name = "memoize_tools"

    def __init__(self) -> None:
        self._results: dict[str, Any] = {}

    def for_run(self) -> MemoizeHook:
        """A hook with a memory of its own."""
        return MemoizeHook()

    def pre_tool_call(self, ctx: ToolRun) -> Mapping[str, Any] | None:
        key = _key(ctx)
        if key is None or key not in self._results:
            return None
        return {"result": {"note": NOTE, "result": self._results[key]}}

    def post_tool_call(self, ctx: ToolRun, outcome: Any) -> None:
        key = _key(ctx)
        if key is None:
            if not ctx.tool.read_only:
                self._results.clear()  # what was read may have changed
        elif outcome.error is None and not outcome.requires_approval:
            self._results[key] = outcome.result


def _key(ctx: ToolRun) -> str | None:
    if ctx.tool.effect != "read" or ctx.tool.needs_approval not in (False, None):
        return None
    return f"{ctx.tool.name} {json.dumps(ctx.args, sort_keys=True, default=str)}"
