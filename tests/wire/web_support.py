"""Parts of a small internet for tests: web sites, a name server that answers by script, and a client that asks it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import socket
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TYPES = {"A": 1, "CNAME": 5, "AAAA": 28}
SERVFAIL, NXDOMAIN = 2, 3


@dataclass
class Got:
    """A request that came in. `address` is the one the client connected to, `sni` the name it asked for in TLS."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    address: str = ""
    sni: str | None = None


@dataclass
class Site:
    """Answers with `pages[path]`, or `pages[host + path]`: raw bytes or a function of the request; everything else is a 404."""

    pages: dict[str, bytes | Callable[[Got], bytes]] = field(default_factory=dict)
    got: list[Got] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    connected: list[str] = field(default_factory=list)
    names: dict[ssl.SSLObject, str | None] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        address = writer.get_extra_info("sockname")[0]
        self.connected.append(address)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            sni = self.names.get(writer.get_extra_info("ssl_object"))
            self.got.append(Got(method, path, headers, body, address, sni))
            host = headers.get("host", "").partition(":")[0]
            page = self.pages.get(host + path, self.pages.get(path, answer(b"nothing here", status="404 Not Found")))
            writer.write(page(self.got[-1]) if callable(page) else page)
            await writer.drain()
            if page != b"":
                writer.close()
            await reader.read()
        writer.close()

    def secure(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Makes the server side of TLS note the names it is asked for."""

        def note(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            self.names[connection] = name

        context.sni_callback = note  # type: ignore[assignment]
        return context


def answer(body: bytes = b"", kind: str = "text/plain", status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return answer(status=status, Location=to)


# --------------------------------------------------------------------------------------------------------------------- names

Answer = str | Sequence[str]
"""An address, several, `CNAME other.name`, or `SERVFAIL`."""


class NameServer(asyncio.DatagramProtocol):
    """Answers A and AAAA questions by script: the n-th look-up of a name gets its n-th answer, later ones the last.

    A name that the script does not know does not exist. `asked` is every question, `lookups` each name once per pair of questions.
    """

    def __init__(self, script: Mapping[str, Sequence[Answer]]) -> None:
        self.script = dict(script)
        self.asked: list[tuple[str, str]] = []
        self._transport: asyncio.DatagramTransport | None = None
        self.port = 0

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> NameServer:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(host, port))
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    async def __aenter__(self) -> NameServer:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def lookups(self) -> list[str]:
        return [name for name, kind in self.asked if kind == "A"]

    def datagram_received(self, data: bytes, addr: Any) -> None:
        number, flags = struct.unpack_from("!HH", data)
        name, end = read_name(data, 12)
        kind = {code: text for text, code in TYPES.items()}.get(struct.unpack_from("!H", data, end)[0], "?")
        self.asked.append((name, kind))
        records, status = self._answers(name, kind, self.asked.count((name, kind)) - 1)
        head = struct.pack("!HHHHHH", number, 0x8180 | (flags & 0x0100) | status, 1, len(records), 0, 0)
        assert self._transport is not None
        self._transport.sendto(head + data[12 : end + 4] + b"".join(records), addr)

    def _answers(self, name: str, kind: str, turn: int) -> tuple[list[bytes], int]:
        if name not in self.script:
            return [], NXDOMAIN
        answers = self.script[name][min(turn, len(self.script[name]) - 1)]
        records: list[bytes] = []
        for text in [answers] if isinstance(answers, str) else answers:
            if text == "SERVFAIL":
                return [], SERVFAIL
            if text.startswith("CNAME "):
                other = text.removeprefix("CNAME ")
                records.append(record(name, "CNAME", write_name(other)))
                records += self._answers(other, kind, turn)[0]
            elif ipaddress.ip_address(text).version == {"A": 4, "AAAA": 6}.get(kind):
                records.append(record(name, kind, ipaddress.ip_address(text).packed))
        return records, 0


def write_name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.split(".")) + b"\0"


def read_name(data: bytes, at: int) -> tuple[str, int]:
    labels: list[str] = []
    while (length := data[at]) != 0:
        labels.append(data[at + 1 : at + 1 + length].decode("ascii").lower())
        at += 1 + length
    return ".".join(labels), at + 1


def record(name: str, kind: str, data: bytes) -> bytes:
    return write_name(name) + struct.pack("!HHIH", TYPES[kind], 1, 0, len(data)) + data


class _Reply(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.data: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if not self.data.done():
            self.data.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self.data.done():
            self.data.set_exception(exc)


@dataclass
class DnsClient:
    """A resolver, as the tools take one, that asks a name server: one A and one AAAA question a look-up, aliases followed."""

    port: int
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def __call__(self, host: str, port: int) -> list[str]:
        return [*await self._ask(host, "A"), *await self._ask(host, "AAAA")]

    async def _ask(self, host: str, kind: str) -> list[str]:
        question = struct.pack("!HHHHHH", next(self.numbers), 0x0100, 1, 0, 0, 0) + write_name(host)
        loop = asyncio.get_running_loop()
        transport, reply = await loop.create_datagram_endpoint(_Reply, remote_addr=("127.0.0.1", self.port))
        try:
            transport.sendto(question + struct.pack("!HH", TYPES[kind], 1))
            data = await reply.data
        finally:
            transport.close()
        _, flags, _, answers = struct.unpack_from("!HHHH", data)
        if flags & 0x000F:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        _, at = read_name(data, 12)
        at += 4
        found: list[str] = []
        for _ in range(answers):
            _, at = read_name(data, at)
            code, _, _, length = struct.unpack_from("!HHIH", data, at)
            if code == TYPES[kind]:
                found.append(str(ipaddress.ip_address(data[at + 10 : at + 10 + length])))
            at += 10 + length
        return found
