"""`http_request` through a sandbox: checked in this process, connected by a program of the sandbox."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lousho_ray.errors import ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools.builtin import create_http_tool
from lousho_ray.tools.execute import call_tool
from lousho_ray.tools.workspace import (
    NoopSandbox,
    ShellOutput,
    SubprocessSandbox,
    broker_exchange,
    create_credential_broker,
)
from tests.wire.tls_support import Authority
from tests.wire.web_support import DnsClient, Got, NameServer, Site, answer, redirect


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A site on two addresses of this machine."""
    made = Site({"/": answer(b"hello", X_Id="7")})
    servers = [await asyncio.start_server(made.serve, "127.0.0.2", 0)]
    made.port = servers[0].sockets[0].getsockname()[1]
    servers.append(await asyncio.start_server(made.serve, "127.0.0.3", made.port))
    yield made
    for server in servers:
        server.close()
        await server.wait_closed()


class Watching(NoopSandbox):
    """Notes what the programs were told."""

    def __init__(self, answers: Any = None) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.answers = answers

    async def run(self, command: str, args: Any = (), *, stdin: bytes | None = None, **options: Any) -> ShellOutput:
        self.jobs.append(json.loads(stdin or b""))
        return self.answers or await super().run(command, args, stdin=stdin, **options)


async def request(
    names: NameServer, url: str, sandbox: Any, tool_options: dict[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    options: dict[str, Any] = {"resolver": DnsClient(names.port), "allow_private": ["*.example"], **(tool_options or {})}
    made = create_http_tool(sandbox=sandbox, **options)
    result: dict[str, Any] = await call_tool(made, made.parse(json.dumps({"url": url, **arguments})).value, ToolContext("c"))
    return result


async def test_program_connects_to_the_address_that_was_checked_here(site: Site) -> None:  # HTTP-09
    site.pages |= {"a.example/start?x=%C3%A4": redirect("/end"), "a.example/end": answer(b"end", X_Id="7")}
    sandbox = Watching()
    async with NameServer({"a.example": ["127.0.0.2", "127.0.0.3"]}) as names:
        url = f"http://a.example:{site.port}/start?x=ä"
        result = await request(names, url, sandbox, method="POST", body={"a": "ä"}, headers={"X-Key": "k"})
    assert (result["status"], result["statusText"], result["body"], result["truncated"]) == (200, "OK", "end", False)
    assert result["headers"]["x-id"] == "7"
    assert site.connected == ["127.0.0.2", "127.0.0.3"]
    assert [job["addresses"] for job in sandbox.jobs] == [["127.0.0.2"], ["127.0.0.3"]]
    assert names.lookups == ["a.example", "a.example"]
    first, second = site.got
    assert (first.method, json.loads(first.body), first.headers["x-key"]) == ("POST", {"a": "ä"}, "k")
    assert first.headers["host"] == f"a.example:{site.port}"
    assert (second.method, second.path, second.body) == ("GET", "/end", b"")


async def test_refused_hosts_start_no_program(site: Site) -> None:  # HTTP-09
    site.pages["a.example/"] = redirect("http://turn.test/")
    sandbox = Watching()
    async with NameServer({"a.example": ["127.0.0.2"], "turn.test": [["8.8.8.8", "10.0.0.1"]]}) as names:
        for url in ("http://127.0.0.2/", "http://turn.test/", "http://169.254.169.254/"):
            with pytest.raises(ToolExecutionError, match="not a public address"):
                await request(names, url, sandbox)
        assert sandbox.jobs == []
        with pytest.raises(ToolExecutionError, match="redirected to where it may not"):
            await request(names, f"http://a.example:{site.port}/", sandbox)
    assert len(sandbox.jobs) == 1


async def test_sandbox_without_network_makes_no_exchange(site: Site) -> None:  # HTTP-09, WS-19
    async with NameServer({"a.example": ["127.0.0.2"]}) as names:
        url = f"http://a.example:{site.port}/"
        with pytest.raises(ToolExecutionError, match=r"a\.example failed: .*refused"):
            await request(names, url, SubprocessSandbox())
        assert (await request(names, url, SubprocessSandbox(network="default")))["body"] == "hello"
    assert site.connections == 1


async def test_sandbox_of_the_call_is_used(site: Site) -> None:  # HTTP-09, TOOL-18
    sandbox = Watching()
    async with NameServer({"a.example": ["127.0.0.2"]}) as names:
        made = create_http_tool(resolver=DnsClient(names.port), allow_private=["a.example"])
        arguments = made.parse(json.dumps({"url": f"http://a.example:{site.port}/"})).value
        for given in (None, sandbox):
            assert (await call_tool(made, arguments, ToolContext("c"), sandbox=given))["body"] == "hello"
    assert len(sandbox.jobs) == 1


async def test_request_goes_through_the_broker_that_is_the_only_way_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:  # HTTP-09, WS-25
    authority, secure = Authority(), Site({"/a?b=c": answer(b"secure")})
    monkeypatch.setattr(broker_exchange, "tls_context", authority.client)
    context = secure.secure(authority.server("api.example"))
    server = await asyncio.start_server(secure.serve, "127.0.0.2", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server, NameServer({"api.example": ["127.0.0.2"], "other.example": ["127.0.0.2"]}) as names:
        broker = create_credential_broker(
            rules={"api.example": {"Authorization": "Bearer s3cr3t"}}, allow_private=["*.example"], resolver=DnsClient(names.port)
        )
        sandbox = SubprocessSandbox(network={"allow": ["api.example"]}, broker=broker)
        result = await request(names, f"https://api.example:{port}/a?b=c", sandbox)
        plain = await request(names, f"http://api.example:{site.port}/", sandbox)
        refused = await request(names, f"http://other.example:{site.port}/", sandbox)
    assert (result["body"], plain["body"], refused["status"]) == ("secure", "hello", 403)
    assert [got.headers["authorization"] for got in (*secure.got, *site.got)] == ["Bearer s3cr3t"] * 2
    assert "s3cr3t" not in json.dumps([result, plain, refused])


async def test_answer_is_cut_and_unpacked_like_one_of_this_process(site: Site) -> None:  # HTTP-09
    def echo(got: Got) -> bytes:
        return answer(got.method.encode())

    site.pages |= {
        "/big": answer(b"x" * 10_000),
        "/zip": answer(gzip.compress(b"packed"), Content_Encoding="gzip"),
        "/bomb": answer(gzip.compress(bytes(5_000_000)), Content_Encoding="gzip", kind="text/plain"),
        "/chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "/twice": b"HTTP/1.1 200 OK\r\nX-A: 1\r\nX-A: 2\r\nContent-Length: 0\r\n\r\n",
        "/head": echo,
    }
    base, exact = f"http://a.example:{site.port}", {"max_bytes": 10_000}
    async with NameServer({"a.example": ["127.0.0.2"]}) as names:
        cut = await request(names, f"{base}/big", NoopSandbox(), {"max_bytes": 1_000})
        assert (len(cut["body"]), cut["truncated"]) == (1_000, True)
        whole = await request(names, f"{base}/big", NoopSandbox(), exact)
        assert (len(whole["body"]), whole["truncated"]) == (10_000, False)
        assert (await request(names, f"{base}/zip", NoopSandbox()))["body"] == "packed"
        assert (await request(names, f"{base}/bomb", NoopSandbox(), exact))["truncated"] is True
        assert (await request(names, f"{base}/chunked", NoopSandbox()))["body"] == "abc"
        assert (await request(names, f"{base}/twice", NoopSandbox()))["headers"]["x-a"] == "1, 2"
        assert (await request(names, f"{base}/head", NoopSandbox(), method="HEAD"))["body"] == ""


@pytest.mark.parametrize("page", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", b""])
async def test_broken_answers_are_tool_errors_naming_the_host(site: Site, page: bytes) -> None:  # HTTP-09, HTTP-08
    site.pages["/"] = page
    async with NameServer({"a.example": ["127.0.0.2"]}) as names:
        with pytest.raises(ToolExecutionError, match=r"a\.example"):
            await request(names, f"http://a.example:{site.port}/", NoopSandbox(), {"timeout_ms": 2_000})


async def test_sandbox_without_python_is_a_tool_error(site: Site) -> None:  # HTTP-09
    async with NameServer({"a.example": ["127.0.0.2"]}) as names:
        for output in (ShellOutput(127, "", "python3: not found"), ShellOutput(1)):
            with pytest.raises(ToolExecutionError, match=r"in the sandbox: (python3: not found|exit code 1)"):
                await request(names, f"http://a.example:{site.port}/", Watching(output))
