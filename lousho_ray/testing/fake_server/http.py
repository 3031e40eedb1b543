"""A small HTTP/1.1 server side on raw sockets: every byte and every way to end a connection is under control.

A `Connection` reads requests with keep-alive; an `Exchange` writes the answer to one of them. When the client closes, the task that
serves the connection is cancelled wherever it stands, so a scenario never outlives its client.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

HeaderPairs = Iterable[tuple[str, str]]


class MalformedRequestError(Exception):
    """The client sent something that is not HTTP/1.1."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request as read from the socket; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """One TCP connection of a client. `serve` runs as a task of its own and is cancelled when the client closes."""

    def __init__(self, number: int, serve: Callable[[Connection], Awaitable[None]]) -> None:
        self.number = number
        self.client_closed = False
        self._closing = False
        self._serve = serve
        self._buffer = bytearray()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport
        self.task: asyncio.Task[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        self._socket().setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.task = asyncio.get_running_loop().create_task(self._run())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._readable.set()

    def eof_received(self) -> None:
        self._gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def read_request(self) -> HttpRequest:
        """Waits for the next request of the connection. Raises `MalformedRequestError`."""
        head = (await self._read_until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        try:
            method, path, _version = head[0].split(" ")
            headers = dict(_header(line) for line in head[1:] if line)
            if headers.get("expect", "").lower() == "100-continue":
                await self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return HttpRequest(method, path, headers, await self._read_body(headers))
        except ValueError as error:
            raise MalformedRequestError(str(error)) from error

    def feed(self, data: bytes) -> None:
        """Hands bytes to the socket without waiting until it took them."""
        self._transport.write(data)

    async def drained(self) -> None:
        """Waits until the socket took everything."""
        await self._writable.wait()

    async def write(self, data: bytes) -> None:
        self.feed(data)
        await self.drained()

    def close(self) -> None:
        """Closes in the normal way (FIN)."""
        self._closing = True
        self._transport.close()

    def reset(self) -> None:
        """Closes at once with a TCP reset."""
        self._closing = True
        self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    async def _run(self) -> None:
        try:
            await self._serve(self)
        except asyncio.CancelledError:
            if not self.client_closed:
                raise
        finally:
            self.close()

    def _gone(self) -> None:
        if not self.client_closed and not self._closing:
            self.client_closed = True
            self.task.cancel()

    def _socket(self) -> socket.socket:
        found: socket.socket = self._transport.get_extra_info("socket")
        return found

    async def _read_body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            return await self._read_exactly(int(headers.get("content-length", "0")))
        body = bytearray()
        while size := int((await self._read_until(b"\r\n")).split(b";")[0], 16):
            body += await self._read_exactly(size)
            await self._read_exactly(2)
        await self._read_until(b"\r\n")
        return bytes(body)

    async def _read_until(self, end: bytes) -> bytes:
        while (at := self._buffer.find(end)) < 0:
            await self._more()
        found = bytes(self._buffer[:at])
        del self._buffer[: at + len(end)]
        return found

    async def _read_exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._more()
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    async def _more(self) -> None:
        self._readable.clear()
        await self._readable.wait()


class Exchange:
    """The answer to one request: head first, then the body in pieces.

    A body without a `content-length` goes out chunked, or as it is when the headers say `connection: close`. While `piece_bytes` is
    set, body bytes go out that many at a time, each piece in a write (and HTTP chunk) of its own.
    """

    def __init__(self, connection: Connection, on_finished: Callable[[], None]) -> None:
        self.status: int | None = None
        self.piece_bytes: int | None = None
        self.keep_alive = True
        self.closed = False
        self._connection = connection
        self._on_finished = on_finished
        self._chunked = False
        self._finished = False

    @property
    def started(self) -> bool:
        return self.status is not None

    async def start(self, status: int, headers: HeaderPairs) -> None:
        if self.started:
            raise RuntimeError("the status line has been sent already")
        pairs = [(name.lower(), value) for name, value in headers]
        names = {name for name, _ in pairs}
        self.status = status
        if ("connection", "close") in pairs:
            self.keep_alive = False
        elif "content-length" not in names:
            self._chunked = True
            pairs.append(("transfer-encoding", "chunked"))
        lines = [f"HTTP/1.1 {status} {_reason(status)}", *(f"{name}: {value}" for name, value in pairs), "", ""]
        await self._connection.write("\r\n".join(lines).encode("latin-1"))

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Sends body bytes; with `last` the end of the body leaves in the same write."""
        if self._finished:
            raise RuntimeError("the body has been sent already")
        size = self.piece_bytes or max(len(data), 1)
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        for piece in pieces[:-1] if last else pieces:
            await self._connection.write(self._frame(piece))
            await asyncio.sleep(0)
        if last:
            self._connection.feed(b"".join(self._frame(piece) for piece in pieces[-1:]) + self._ending())
            await self._connection.drained()

    async def finish(self) -> None:
        """Ends the body in the regular way; a second call changes nothing."""
        self._connection.feed(self._ending())
        await self._connection.drained()

    def close(self) -> None:
        """Closes the connection wherever the answer stands."""
        self.closed = True
        self._connection.close()

    def reset(self) -> None:
        self.closed = True
        self._connection.reset()

    def _ending(self) -> bytes:
        """What ends the body, once. The answer counts as complete from here on: who has these bytes may close."""
        if self._finished:
            return b""
        self._finished = True
        self._on_finished()
        return b"0\r\n\r\n" if self._chunked else b""

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data


def _header(line: str) -> tuple[str, str]:
    name, value = line.split(":", 1)
    return name.strip().lower(), value.strip()


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
