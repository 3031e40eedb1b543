"""Results that were cut for the model, kept whole: `create_agent(spill_tool_results=True)` and its tool `read_result`.

They are kept in the memory of the process where the run runs, for the session they came up in, and are read by a handle that the
cut text names. When the area is full the oldest go, when the process ends all do; reading one then is a tool error that says so.
A durable run keeps them in its checkpoint store, too: each as a record of its own, written before the checkpoint that names it.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from typing import Annotated, Any

from pydantic import Field

from lousho_ray.errors import ToolExecutionError
from lousho_ray.ids import new_id
from lousho_ray.messages import Message, user
from lousho_ray.ports import CheckpointStore
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


_HANDLE = re.compile(r"res_[0-9a-f]{32}")

_LONGEST_NAME = 100
"""How long a name may be to stand in a record's id, which has room for 160 characters."""


def result_prefix(name: str) -> str:
    """What the ids of the records of a session's (or a durable run's) results begin with."""
    short = name if len(name) <= _LONGEST_NAME else hashlib.sha256(name.encode()).hexdigest()
    return f"{short}.result-"


class KeptResults:
    """Where one run keeps its results.

    Args:
        session_id: The session or durable run they belong to; no other can read them.
        store: Where they outlive the process; `None` for a run that leaves nothing in a store.
        area: The memory of the process.
    """

    def __init__(self, session_id: str | None, store: CheckpointStore | None = None, area: SpillArea = AREA) -> None:
        self._session_id = session_id
        self._store = None if session_id is None else store
        self._area = area
        self._unsaved: dict[str, str] = {}

    def keep(self, text: str) -> str:
        """Keeps a text and returns its handle. It is in the store after the next `save()`."""
        handle = self._area.keep(text, self._session_id)
        if self._store is not None:
            self._unsaved[handle] = text
        return handle

    async def save(self) -> None:
        """Returns once everything kept so far is in the store."""
        while self._unsaved and self._store is not None:
            handle, text = next(iter(self._unsaved.items()))
            await self._store.save({"sessionId": self._key(handle), "status": "finished", "messages": [user(text).to_dict()]})
            self._unsaved.pop(handle, None)

    async def read(self, handle: str) -> str | None:
        """The text, or `None`: unknown, dropped, or of another session."""
        text = self._area.read(handle, self._session_id)
        if text is not None or self._store is None or not _HANDLE.fullmatch(handle):
            return text
        saved = await self._store.load(self._key(handle))
        return None if saved is None else Message.from_dict(saved["messages"][0]).text

    def _key(self, handle: str) -> str:
        return f"{result_prefix(str(self._session_id))}{handle}"


def read_result_tool(cap_chars: float, results: KeptResults) -> Tool[..., Any]:
    """The `read_result` tool of a run whose results are capped at `cap_chars`: what it returns is never cut."""
    most = int(max(1, min(MAX_READ_CHARS, cap_chars - _POSITION_CHARS)))

    async def read_result(
        handle: Annotated[str, Field(description="The handle that the cut result names.")],
        offset: Annotated[int, Field(ge=0, description="The first character to read, from 0.")] = 0,
        limit: Annotated[int, Field(ge=1, description=f"How many characters to read, at most {most}.")] = most,
    ) -> str:
        """Reads a part of an earlier tool result that was too long to be shown whole."""
        text = await results.read(handle)
        if text is None:
            raise ToolExecutionError(
                f"There is no result {handle!r} any more: results are kept for a while only. Call the tool again.",
                tool_name=READ_RESULT,
            )
        end = min(len(text), offset + min(limit, most))
        more = f"; go on with offset={end}" if end < len(text) else ""
        return f"{text[offset:end]}\n[characters {min(offset, end)} to {end} of {len(text)}{more}]"

    return tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))(read_result)
