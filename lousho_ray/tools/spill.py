"""Results that were cut for the model, kept whole: `create_agent(spill_tool_results=True)` and its tool `read_result`.

They are kept in the memory of the process where the run runs, for the session they came up in, and are read by a handle that the
cut text names. When the area is full the oldest go, when the process ends all do; reading one then is a tool error that says so.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Annotated, Any

from pydantic import Field

from lousho_ray.errors import ToolExecutionError
from lousho_ray.ids import new_id
from lousho_ray.ports import ToolContext
from lousho_ray.tools.attributes import ToolAnnotations
from lousho_ray.tools.tool import Tool, tool

READ_RESULT = "read_result"

MAX_KEPT_CHARS = 64_000_000
"""How much one process keeps."""

MAX_READ_CHARS = 40_000
"""The most that one call of `read_result` returns, when the cap on results allows it."""

_POSITION_CHARS = 120
"""Room for the line that says where a piece is."""


class SpillArea:
    """Texts by handle, the oldest of which make room for new ones. Usable from several threads.

    Args:
        max_chars: How much is kept; a text longer than that alone is not.
    """

    def __init__(self, max_chars: int = MAX_KEPT_CHARS) -> None:
        self._max_chars = max_chars
        self._texts: OrderedDict[str, tuple[str | None, str]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def keep(self, text: str, session_id: str | None) -> str:
        """Keeps a text for a session (or for runs without one) and returns its handle."""
        handle = new_id("res_")
        with self._lock:
            self._texts[handle] = (session_id, text)
            self._size += len(text)
            while self._size > self._max_chars:
                _, (_, dropped) = self._texts.popitem(last=False)
                self._size -= len(dropped)
        return handle

    def read(self, handle: str, session_id: str | None) -> str | None:
        """The text, or `None`: unknown, dropped, or of another session."""
        with self._lock:
            owner, text = self._texts.get(handle, (None, None))
        return text if owner == session_id else None


AREA = SpillArea()
"""The area of this process."""


def read_result_tool(cap_chars: float, area: SpillArea = AREA) -> Tool[..., Any]:
    """The `read_result` tool of a run whose results are capped at `cap_chars`: what it returns is never cut."""
    most = int(max(1, min(MAX_READ_CHARS, cap_chars - _POSITION_CHARS)))

    async def read_result(
        ctx: ToolContext,
        handle: Annotated[str, Field(description="The handle that the cut result names.")],
        offset: Annotated[int, Field(ge=0, description="The first character to read, from 0.")] = 0,
        limit: Annotated[int, Field(ge=1, description=f"How many characters to read, at most {most}.")] = most,
    ) -> str:
        """Reads a part of an earlier tool result that was too long to be shown whole."""
        text = area.read(handle, ctx.session_id)
        if text is None:
            raise ToolExecutionError(
                f"There is no result {handle!r} any more: results are kept for a while only, in the process that made them. "
                "Call the tool again.",
                tool_name=READ_RESULT,
            )
        end = min(len(text), offset + min(limit, most))
        more = f"; go on with offset={end}" if end < len(text) else ""
        return f"{text[offset:end]}\n[characters {min(offset, end)} to {end} of {len(text)}{more}]"

    return tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))(read_result)
