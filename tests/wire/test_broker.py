"""The credential broker against real servers, by hand-written requests and from inside a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import pickle
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.create import create_agent
from lousho_ray.errors import ConfigurationError
from lousho_ray.testing.mock_model import mock_model
from lousho_ray.tools.workspace import (
    CredentialBroker,
    SandboxShell,
    SubprocessSandbox,
    broker_exchange,
    create_credential_broker,
    create_shell_tool,
)
from lousho_ray.tools.workspace import broker as broker_module
from tests.wire.tls_support import Authority
from tests.wire.web_support import Answer, DnsClient, Got, NameServer, Site, answer

SECRET = "Bearer s3cr3t-t0ken"
RULES = {"api.example": {"Authorization": SECRET, "X-Extra": "more"}}


@dataclass
class World:
    """Two sites, one of them with TLS, and names for both."""

    plain: Site
    secure: Site
    names: NameServer
    authority: Authority

    def broker(self, **options: Any) -> CredentialBroker:
        settings = {
            "rules": RULES,
            "allow": ["open.example"],
            "allow_private": ["*.example"],
            "resolver": DnsClient(self.names.port),
        }
        return create_credential_broker(**{**settings, **options})


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
async def world(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(broker_exchange, "tls_context", authority.client)
    plain, secure = Site({"/": answer(b"plain")}), Site({"/": answer(b"secure")})
    context = secure.secure(authority.server("api.example", "open.example"))
    servers = [
        await asyncio.start_server(plain.serve, "127.0.0.2", 0),
        await asyncio.start_server(secure.serve, "127.0.0.2", 0, ssl=context),
    ]
    plain.port, secure.port = (server.sockets[0].getsockname()[1] for server in servers)
    script: dict[str, list[Answer]] = {
        name: ["127.0.0.2"] for name in ("api.example", "open.example", "other.example", "hidden.test")
    }
    async with NameServer(script) as names:
        yield World(plain, secure, names, authority)
    for server in servers:
        server.close()
        await server.wait_closed()


async def send(broker: CredentialBroker, request: str | bytes, body: bytes = b"") -> bytes:
    """The whole answer to a request; lines of `request` end in CRLF."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(broker.url.rpartition(":")[2]))
    head = request.encode() if isinstance(request, str) else request
    writer.write(head.replace(b"\n", b"\r\n") + b"\r\n\r\n" + body)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


async def status(broker: CredentialBroker, request: str, body: bytes = b"") -> int:
    return int((await send(broker, request, body)).split(b" ")[1])


def path_form(world: World, host: str = "api.example", path: str = "/", *headers: str) -> str:
    return "\n".join([f"GET /__broker/{host}:{world.secure.port}{path} HTTP/1.1", "Host: 127.0.0.1", *headers])


# --------------------------------------------------------------------------------------------------------------- three forms


async def test_path_form_goes_to_https_with_the_headers_of_the_host(world: World) -> None:  # WS-20, WS-25
    async with world.broker() as broker:
        reply = await send(
            broker,
            path_form(
                world, "api.example", "/v1/a?b=c%20d", "Authorization: Bearer fake", "authorization: Basic fake", "X-Mine: 1"
            ),
        )
        assert b"404 Not Found" in reply
        await send(broker, path_form(world, "open.example", "/", "Authorization: Bearer own"))
    got, other = world.secure.got
    assert (got.method, got.path, got.sni) == ("GET", "/v1/a?b=c%20d", "api.example")
    assert got.headers["host"] == f"api.example:{world.secure.port}"
    assert (got.headers["authorization"], got.headers["x-extra"], got.headers["x-mine"]) == (SECRET, "more", "1")
    assert (other.sni, other.headers["authorization"]) == ("open.example", "Bearer own")


async def test_proxy_form_goes_to_http_and_adds_headers_for_listed_private_hosts(world: World) -> None:  # WS-20
    async with world.broker() as broker:
        reply = await send(broker, f"GET http://api.example:{world.plain.port}/ HTTP/1.1\nHost: evil.example\nProxy-Connection: x")
        assert reply.endswith(b"plain")
    (got,) = world.plain.got
    assert got.headers["authorization"] == SECRET
    assert got.headers["host"] == f"api.example:{world.plain.port}"
    assert "proxy-connection" not in got.headers


async def test_credentials_never_cross_a_public_network_in_clear() -> None:  # WS-25
    async def public(host: str, port: int) -> list[str]:
        return ["93.184.215.14"]

    async with create_credential_broker(rules=RULES, resolver=public) as broker:
        reply = await send(broker, "GET http://api.example/ HTTP/1.1\nHost: api.example")
    assert b" 403 " in reply
    assert b"/__broker/api.example/<path>" in reply


async def test_tunnel_leads_to_allowed_hosts_and_is_not_looked_into(world: World) -> None:  # WS-25
    async with world.broker() as broker:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(broker.url.rpartition(":")[2]))
        writer.write(f"CONNECT api.example:{world.secure.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await writer.start_tls(world.authority.client(), server_hostname="api.example")
        writer.write(b"GET / HTTP/1.1\r\nHost: inner\r\n\r\n")
        assert (await reader.read()).endswith(b"secure")
        writer.close()
        assert await status(broker, "CONNECT other.example:443 HTTP/1.1\nHost: other.example") == 403
        assert await status(broker, "CONNECT other.example/:443 HTTP/1.1\nHost: other.example") == 400
    assert "authorization" not in world.secure.got[0].headers
    assert world.secure.got[0].headers["host"] == "inner"


# ------------------------------------------------------------------------------------------------------------------ refusals


async def test_other_hosts_get_403_before_a_lookup_and_a_connection(world: World) -> None:  # WS-20
    async with world.broker() as broker:
        for request in (
            path_form(world, "other.example"),
            path_form(world, "xapi.example"),
            path_form(world, "127.0.0.2"),
            f"GET http://other.example:{world.plain.port}/ HTTP/1.1\nHost: api.example",
            f"GET http://other.example:{world.plain.port}/@api.example/ HTTP/1.1\nHost: api.example",
            f"CONNECT 127.0.0.2:{world.plain.port} HTTP/1.1\nHost: api.example",
        ):
            reply = await send(broker, request)
            assert b" 403 " in reply
            assert b"not among the allowed hosts" in reply
    assert world.names.asked == []
    assert world.plain.connections == world.secure.connections == 0


async def test_private_targets_are_refused_unless_listed(world: World) -> None:  # WS-20
    async with world.broker(allow=["hidden.test", "127.0.0.2"]) as broker:
        for request in (
            f"GET http://hidden.test:{world.plain.port}/ HTTP/1.1\nHost: x",
            f"CONNECT hidden.test:{world.plain.port} HTTP/1.1\nHost: x",
            f"CONNECT 0x7f.2:{world.plain.port} HTTP/1.1\nHost: x",
            path_form(world, "hidden.test"),
        ):
            reply = await send(broker, request)
            assert b" 403 " in reply
            assert b"not a public address" in reply
    assert world.plain.connections == world.secure.connections == 0
    assert world.names.lookups == ["hidden.test"] * 3


async def test_name_is_looked_up_once_and_the_connection_goes_to_that_address(world: World) -> None:  # WS-20: DNS rebinding
    world.names.script |= {"api.example": ["127.0.0.2", "127.0.0.3"], "open.example": [["8.8.8.8", "127.0.0.2"]]}
    async with world.broker(allow_private=["api.example"]) as broker:
        assert (await send(broker, path_form(world))).endswith(b"secure")
        assert await status(broker, path_form(world)) == 502  # nobody listens at its second address
        assert await status(broker, path_form(world, "open.example")) == 403
    assert world.names.lookups == ["api.example", "api.example", "open.example"]
    assert world.secure.connected == ["127.0.0.2"]


@pytest.mark.parametrize(
    ("request_line", "expected"),
    [
        ("GET / HTTP/1.1", 404),
        ("GET /other HTTP/1.1", 404),
        ("OPTIONS * HTTP/1.1", 404),
        ("GET ftp://api.example/ HTTP/1.1", 404),
        ("GET http://user:pw@api.example/ HTTP/1.1", 400),
        ("GET http:///x HTTP/1.1", 400),
        ("GET /__broker/ HTTP/1.1", 400),
        ("GET /__broker/api.example@other.example/ HTTP/1.1", 400),
        ("GET /__broker/api%2eexample/ HTTP/1.1", 400),
        ("GET /__broker/api.example:99999/ HTTP/1.1", 403),
        ("TRACE /__broker/api.example/ HTTP/1.1", 405),
        ("TRACK http://api.example/ HTTP/1.1", 405),
        ("nonsense", 400),
        ("GET http://api.example/ HTTP/1.1\nContent-Length: 3\nContent-Length: 4", 400),
        ("GET http://api.example/ HTTP/1.1\nBad Header: x", 400),
    ],
)
async def test_what_is_no_request_for_a_proxy_is_refused(world: World, request_line: str, expected: int) -> None:
    async with world.broker() as broker:
        assert await status(broker, f"{request_line}\nHost: 127.0.0.1") == expected
    assert world.plain.connections == world.secure.connections == 0


@pytest.mark.parametrize("headers", ["Host: evil.example", "Host: localhost\nOrigin: http://evil.example"])
async def test_pages_in_a_browser_cannot_use_the_path_form(world: World, headers: str) -> None:
    async with world.broker() as broker:
        assert await status(broker, f"GET /__broker/api.example:{world.secure.port}/ HTTP/1.1\n{headers}") == 403
    assert world.secure.connections == 0


async def test_certificate_is_checked_for_the_name(world: World) -> None:  # WS-25
    world.names.script["other.example"] = ["127.0.0.2"]
    async with world.broker(rules={"other.example": {"X-Key": "k"}}) as broker:
        reply = await send(broker, path_form(world, "other.example"))
    assert b" 502 " in reply
    assert world.secure.got == []


# ------------------------------------------------------------------------------------------------------------------- passage


async def test_hop_by_hop_headers_are_dropped_in_both_directions(world: World) -> None:  # WS-20
    world.secure.pages["/"] = answer(b"x", Connection="close, X-Hop", X_Hop="1", Keep_Alive="timeout=5", X_End="2", Upgrade="h2c")
    async with world.broker() as broker:
        sent = ("Connection: keep-alive, X-Secret-Hop", "X-Secret-Hop: 1", "Keep-Alive: 3", "TE: trailers", "Upgrade: h2c")
        reply = await send(broker, path_form(world, "api.example", "/", *sent, "Proxy-Authorization: Basic x", "X-End: 1"))
    got = world.secure.got[0].headers
    assert got["connection"] == "close"
    assert got["x-end"] == "1"
    assert not got.keys() & {"x-secret-hop", "keep-alive", "te", "upgrade", "proxy-authorization", "proxy-connection"}
    head = reply.partition(b"\r\n\r\n")[0].lower()
    assert b"x-end: 2" in head
    for name in (b"x-hop:", b"keep-alive:", b"upgrade:"):
        assert name not in head


async def test_bodies_pass_in_both_directions(world: World) -> None:
    big = bytes(range(256)) * 8_000

    def echo(got: Got) -> bytes:
        return answer(got.body, kind="application/octet-stream")

    world.secure.pages["/"] = echo
    async with world.broker() as broker:
        post = path_form(world).replace("GET", "POST")
        reply = await send(broker, f"{post}\nContent-Length: {len(big)}", big)
        assert reply.partition(b"\r\n\r\n")[2] == big
        world.secure.pages["/"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        assert (await send(broker, path_form(world))).endswith(b"\r\n3\r\nabc\r\n0\r\n\r\n")
        assert (await send(broker, path_form(world).replace("HTTP/1.1", "HTTP/1.0"))).endswith(b"\r\n\r\nabc")
        world.secure.pages["/"] = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
        assert (await send(broker, path_form(world).replace("GET", "HEAD"))).endswith(b"\r\n\r\n")


async def test_chunked_upload_is_sent_on_as_it_comes(world: World) -> None:
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await arrived.put(head)
        await arrived.put(await reader.readuntil(b"one\r\n"))
        await arrived.put(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(answer(b"done"))
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.2", 0) as server, world.broker() as broker:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", int(broker.url.rpartition(":")[2]))
        head = f"PUT http://open.example:{port}/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        writer.write(head.encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(b"3\r\none\r\n")
        assert b"transfer-encoding: chunked" in (await arrived.get()).lower()
        assert await arrived.get() == b"3\r\none\r\n"
        writer.write(b"0\r\n\r\n")
        assert await arrived.get() == b"0\r\n\r\n"
        assert (await reader.read()).endswith(b"done")
        writer.close()


@pytest.mark.parametrize(
    ("location", "seen"),
    [
        ("/next?a=1", "/__broker/{host}/next?a=1"),
        ("https://{host}/next", "/__broker/{host}/next"),
        ("https://elsewhere.example/next", "https://elsewhere.example/next"),
        ("http://{host}/next", "http://{host}/next"),
    ],
)
async def test_redirect_within_the_host_leads_through_the_broker(world: World, location: str, seen: str) -> None:
    host = f"api.example:{world.secure.port}"
    world.secure.pages["/"] = answer(status="302 Found", Location=location.format(host=host))
    async with world.broker() as broker:
        reply = await send(broker, path_form(world))
    assert f"location: {seen.format(host=host)}\r\n".encode() in reply.lower()


async def test_answer_that_breaks_off_is_not_taken_for_a_whole_one(world: World) -> None:
    world.secure.pages["/"] = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort"
    async with world.broker() as broker:
        head, _, body = (await send(broker, path_form(world))).partition(b"\r\n\r\n")
        assert b"content-length: 10" in head.lower()
        assert body == b"short"
        world.secure.pages["/"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
        assert (await send(broker, path_form(world))).endswith(b"\r\n3\r\nabc\r\n")
        for page in (b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nBad"):
            world.secure.pages["/"] = page
            assert await status(broker, path_form(world)) == 502


async def test_server_that_is_silent_or_away_is_an_answer(world: World) -> None:
    world.secure.pages["/"] = b""
    async with world.broker(timeout_ms=100) as broker:
        assert await status(broker, path_form(world)) == 504
    async with world.broker() as broker:
        assert await status(broker, "GET http://open.example:1/ HTTP/1.1\nHost: x") == 502
        assert await status(broker, "CONNECT open.example:1 HTTP/1.1\nHost: x") == 502


async def test_whole_name_comes_before_a_pattern(world: World) -> None:  # WS-20
    rules = {"*.example": {"X-A": "star", "X-B": "star"}, "api.example": {"x-a": "whole"}}
    async with world.broker(rules=rules) as broker:
        await send(broker, path_form(world))
        await send(broker, path_form(world, "open.example"))
    api, other = (got.headers for got in world.secure.got)
    assert (api["x-a"], api["x-b"]) == ("whole", "star")
    assert (other["x-a"], other["x-b"]) == ("star", "star")


# ------------------------------------------------------------------------------------------------------------------- secrecy


async def test_values_appear_in_no_text_of_the_broker(world: World, caplog: pytest.LogCaptureFixture) -> None:  # WS-25
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    async with world.broker(timeout_ms=200) as broker:
        texts += [repr(broker), str(vars(broker)), json.dumps(broker.env())]
        for request in (
            path_form(world, "other.example"),
            path_form(world, "api.example", "/", "Bad Header: x"),
            "GET http://api.example:1/ HTTP/1.1\nHost: x",
            f"GET http://api.example:{world.secure.port}/ HTTP/1.1\nHost: x",
            f"TRACE http://api.example:{world.plain.port}/ HTTP/1.1\nHost: x",
            f"GET /__broker/api.example:{world.plain.port}/ HTTP/1.1\nHost: localhost",
        ):
            texts.append((await send(broker, request)).decode())
    texts.append(caplog.text)
    assert all("s3cr3t" not in text for text in texts)


def test_broker_stays_in_its_process() -> None:  # WS-25
    broker = create_credential_broker(rules=RULES)
    for travel in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in the process"):
            travel(broker)
    with pytest.raises(ConfigurationError, match="enter it first"):
        broker.env()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rules": {"https://a.example": {}}}, "rules"),
        ({"rules": {"a.example": "x"}}, "rules"),
        ({"rules": [("a.example", {})]}, "rules"),
        ({"rules": {"a.example": {"A B": "s3cr3t"}}}, "rules"),
        ({"rules": {"a.example": {"Host": "s3cr3t"}}}, "rules"),
        ({"rules": {"a.example": {"Proxy-Authorization": "s3cr3t"}}}, "rules"),
        ({"rules": {"a.example": {"A": "s3cr3t\r\nB: c"}}}, "rules"),
        ({"rules": {"a.example": {"A": "s3cr3tä"}}}, "rules"),
        ({"rules": {"a.example": {"A": 3}}}, "rules"),
        ({"allow": ["a.example/x"]}, "allow"),
        ({"allow": "a.example"}, "allow"),
        ({"allow_private": ["a.example:80"]}, "allow_private"),
        ({"timeout_ms": 0}, "timeout_ms"),
    ],
)
def test_bad_options_are_refused_without_repeating_a_value(options: dict[str, Any], field: str) -> None:  # WS-20, WS-25
    with pytest.raises(ConfigurationError) as caught:
        create_credential_broker(**options)
    assert caught.value.field == field
    assert "s3cr3t" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- from a sandbox

FETCH = """
import os, sys, urllib.request, urllib.error
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url.replace("BROKER", os.environ["LOUSHO_BROKER"]), timeout=5).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print(error)
"""


async def test_sandbox_reaches_only_allowed_hosts_and_only_through_the_broker(world: World) -> None:  # WS-19
    sandbox = SubprocessSandbox(network={"allow": ["api.example"]}, broker=world.broker())
    urls = [
        f"http://api.example:{world.plain.port}/",
        f"BROKER/api.example:{world.secure.port}/",
        f"http://open.example:{world.plain.port}/",  # the broker allows it, the sandbox does not
        f"http://other.example:{world.plain.port}/",
        f"http://127.0.0.1:{world.plain.port}/",
    ]
    output = await sandbox.run(sys.executable, ("-c", FETCH, *urls))
    plain, secure, not_here, nowhere, direct = output.stdout.splitlines()
    assert (plain, secure) == ("plain", "secure")
    assert not_here.startswith("403 The host open.example is not among the allowed hosts: api.example")
    assert nowhere.startswith("403 The host other.example is not among the allowed hosts")
    assert "Connection refused" in direct
    assert [site.got[0].headers["authorization"] for site in (world.plain, world.secure)] == [SECRET, SECRET]
    unproxied = f"import socket; socket.create_connection(('127.0.0.2', {world.plain.port}), 5)"
    assert "Connection refused" in (await sandbox.run(sys.executable, ("-c", unproxied))).stderr
    assert (world.plain.connections, world.secure.connections) == (1, 1)


async def test_sandbox_speaks_tls_with_the_host_through_the_tunnel(world: World, tmp_path: Path) -> None:  # WS-25
    (tmp_path / "ca.pem").write_text(world.authority.pem)
    sandbox = SubprocessSandbox(network={"allow": ["*.example"]}, broker=world.broker(), cwd=tmp_path)
    command = f"SSL_CERT_FILE=ca.pem {sys.executable} -c '{FETCH}' https://open.example:{world.secure.port}/"
    assert (await sandbox.exec(command)).stdout == "secure\n"
    assert (world.secure.got[0].sni, "authorization" in world.secure.got[0].headers) == ("open.example", False)


async def test_values_appear_nowhere_in_a_run(world: World, caplog: pytest.LogCaptureFixture) -> None:  # WS-25
    caplog.set_level(logging.DEBUG)
    sandbox = SubprocessSandbox(network={"allow": ["api.example"]}, broker=world.broker())
    shell = create_shell_tool(SandboxShell(sandbox), needs_approval=False)
    look = "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'"
    fetch = f"{sys.executable} -c '{FETCH}' BROKER/api.example:{world.secure.port}/ BROKER/other.example/"
    model = mock_model([{"tool_calls": [{"name": "shell", "args": {"command": command}} for command in (look, fetch)]}, "Done"])
    agent = create_agent(provider=model, tools=[shell])
    events = [event.to_dict() async for event in agent.stream("Go")]
    told = json.dumps(events)
    assert "LOUSHO_BROKER=http://127.0.0.1:" in told
    assert "secure" in told
    assert world.secure.got[0].headers["authorization"] == SECRET
    assert "s3cr3t" not in told
    assert "s3cr3t" not in caplog.text


async def test_stopped_command_leaves_no_connection_of_the_broker(world: World) -> None:  # WS-14, WS-19
    world.plain.pages["/"] = b""
    sandbox = SubprocessSandbox(network={"allow": ["api.example"]}, broker=world.broker())
    command = f"{sys.executable} -c '{FETCH}' http://api.example:{world.plain.port}/"
    task = asyncio.create_task(sandbox.exec(command))
    async with asyncio.timeout(20):
        while not world.plain.got:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [left for left in asyncio.all_tasks() if "Exchange" in repr(left.get_coro()) or "_listen" in repr(left.get_coro())]


async def test_leaving_the_broker_ends_its_connections(world: World) -> None:
    world.secure.pages["/"] = b""
    async with world.broker() as broker:
        waiting = asyncio.create_task(send(broker, path_form(world)))
        async with asyncio.timeout(20):
            while not world.secure.got:
                await asyncio.sleep(0.005)
    assert await waiting == b""


async def test_more_connections_than_are_served_at_once_are_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MAX_CONNECTIONS", 2)
    async with world.broker() as broker:
        port = int(broker.url.rpartition(":")[2])
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await opened[2][0].read() == b""
        opened[0][1].close()
        opened[2][1].close()
        reply = b""
        async with asyncio.timeout(20):
            while not reply:  # until it has noticed that one of them left
                with contextlib.suppress(ConnectionError):
                    reply = await send(broker, path_form(world))
        assert reply.endswith(b"secure")
        for _, writer in opened:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_broken_client_is_forgotten(world: World) -> None:
    async with world.broker() as broker:
        port = int(broker.url.rpartition(":")[2])
        for data in (b"", b"GET", b"\x16\x03\x01\x02", path_form(world).encode().replace(b"\n", b"\r\n") + b"\r\n\r\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            await writer.drain()
            writer.transport.abort()
        assert (await send(broker, path_form(world))).endswith(b"secure")
