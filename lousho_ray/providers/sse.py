"""Server-sent events: an incremental parser of the WHATWG `text/event-stream` grammar over bytes.

Lines are split before anything is decoded, so a character cut by a network read is never seen in halves. `id` and `retry` fields
are ignored: a model's answer cannot be resumed by reconnecting.
"""

from __future__ import annotations

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """One event: its joined `data` lines, and its `event` name (`""` when the server gave none)."""

    data: str
    event: str = ""


class SSEDecoder:
    """Turns the bytes of a response into events.

    Attributes:
        comments: How many comment lines (keep-alives) were seen: signs of life that are no events.
    """

    __slots__ = ("_data", "_event", "_rest", "_skip_lf", "_start", "comments")

    def __init__(self) -> None:
        self.comments = 0
        self._rest: list[bytes] = []  # pieces of the line that is not complete yet
        self._data: list[bytes] = []
        self._event = b""
        self._skip_lf = False  # the last read ended in CR: an LF that follows belongs to it
        self._start = True

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that `data` completes, in order."""
        if self._skip_lf and data:
            self._skip_lf = False
            if data.startswith(b"\n"):
                data = data[1:]
        if b"\n" not in data and b"\r" not in data:
            if data:
                self._rest.append(data)
            return []
        if self._rest:
            self._rest.append(data)
            data = b"".join(self._rest)
            self._rest.clear()
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            # Only CR, LF and CRLF end a line here: `bytes.splitlines` knows no others.
            lines = data.splitlines()
            rest = b"" if data.endswith((b"\n", b"\r")) else lines.pop()
        else:
            lines = data.split(b"\n")
            rest = lines.pop()
        if rest:
            self._rest.append(rest)
        return self._read(lines)

    def close(self) -> list[ServerSentEvent]:
        """The event that the end of the body leaves open, when all of its lines are complete.

        The grammar drops it; servers that forget the last blank line would then lose the event that says how the answer ended.
        """
        events = self._read([b""]) if not self._rest else []
        self._rest.clear()
        self._data.clear()
        return events

    def _read(self, lines: list[bytes]) -> list[ServerSentEvent]:
        events: list[ServerSentEvent] = []
        if self._start and lines:
            self._start = False
            lines[0] = lines[0].removeprefix(_BOM)
        for line in lines:
            if not line:
                if self._data:
                    text = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                    events.append(ServerSentEvent(text.decode("utf-8", "replace"), self._event.decode("utf-8", "replace")))
                    self._data.clear()
                self._event = b""
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line.startswith(b":"):
                self.comments += 1
            else:
                self._field(line)
        return events

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._event = value
        elif name == b"data":
            self._data.append(value)
