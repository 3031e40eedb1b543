"""What the web tools connect to when names, redirects and name servers play tricks: real sockets, real look-ups.

The first half asks a scripted name server through the tools' `resolver` option. The second runs in a network of its own (Linux
namespaces) in which every address is reachable, public ones and those of private networks alike, with the system's resolver: what a
tool connects to there is what it would have connected to anywhere.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lousho_ray.errors import ToolExecutionError
from lousho_ray.ports import ToolContext
from lousho_ray.tools import fetch
from lousho_ray.tools.builtin import create_http_tool, create_web_fetch_tool
from lousho_ray.tools.execute import call_tool
from tests.wire.tls_support import Authority
from tests.wire.web_support import Answer, DnsClient, NameServer, Site, answer, redirect

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """One site on three loopback addresses, all with the same port."""
    made = Site()
    servers = [await asyncio.start_server(made.serve, HOSTS[0], 0)]
    made.port = servers[0].sockets[0].getsockname()[1]
    servers += [await asyncio.start_server(made.serve, host, made.port) for host in HOSTS[1:]]
    yield made
    for server in servers:
        server.close()
        await server.wait_closed()


async def call(make: Any, names: NameServer, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    tool = make(**{"resolver": DnsClient(names.port), "allow_private": ["*.example"], **options})
    result: dict[str, Any] = await call_tool(tool, tool.parse(json.dumps(arguments)).value, ToolContext("c"))
    return result


async def test_each_hop_connects_to_the_address_of_its_own_only_lookup(site: Site) -> None:  # HTTP-03, HTTP-04
    script: dict[str, list[Answer]] = {
        "a.example": ["127.0.0.2", "127.0.0.1"],
        "b.example": [["CNAME c.example"]],
        "c.example": ["127.0.0.3"],
    }
    site.pages |= {
        "a.example/": redirect(f"http://b.example:{site.port}/2"),
        "b.example/2": redirect(f"http://a.example:{site.port}/3", "307 Temporary Redirect"),
        "a.example/3": redirect("/4"),
        "a.example/4": answer(b"end"),
    }
    for make in (create_web_fetch_tool, create_http_tool):
        site.connected.clear()
        site.got.clear()
        async with NameServer(script) as names:
            result = await call(make, names, {"url": f"http://a.example:{site.port}/"})
        assert result.get("content", result.get("body")) == "end"
        assert names.lookups == ["a.example", "b.example", "a.example", "a.example"]
        assert site.connected == ["127.0.0.2", "127.0.0.3", "127.0.0.1", "127.0.0.1"]
        hosts = [got.headers["host"].partition(":")[0] for got in site.got]
        assert hosts == ["a.example", "b.example", "a.example", "a.example"]


async def test_name_that_turns_private_between_hops_is_refused_at_the_second(site: Site) -> None:  # HTTP-03, HTTP-04
    async with NameServer({"a.example": ["127.0.0.1"], "turn.test": [["8.8.8.8", "10.0.0.1"]]}) as names:
        site.pages["/"] = redirect("http://turn.test/")
        with pytest.raises(ToolExecutionError, match=r"turn\.test \(10\.0\.0\.1\)"):
            await call(create_web_fetch_tool, names, {"url": f"http://a.example:{site.port}/"})
    assert site.connected == ["127.0.0.1"]


@pytest.mark.parametrize("answers", ["SERVFAIL", []])
async def test_name_without_an_answer_is_a_tool_error_that_names_it(answers: Answer) -> None:  # HTTP-08
    async with NameServer({"a.example": [answers]}) as names:
        for url in ("http://a.example/", "http://unknown.example/"):
            with pytest.raises(ToolExecutionError, match=url[7:-1]):
                await call(create_web_fetch_tool, names, {"url": url})


async def test_tls_keeps_the_name_of_each_hop_and_checks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # chapter 20: SNI, certificate
    authority = Authority()
    monkeypatch.setattr(fetch, "tls_context", authority.client)
    secure = Site()
    context = secure.secure(authority.server("a.example", "b.example"))
    server = await asyncio.start_server(secure.serve, "127.0.0.2", 0, ssl=context)
    secure.port = server.sockets[0].getsockname()[1]
    secure.pages |= {"a.example/": redirect(f"https://b.example:{secure.port}/"), "b.example/": answer(b"end")}
    async with server, NameServer({name: ["127.0.0.2"] for name in ("a.example", "b.example", "other.example")}) as names:
        result = await call(create_web_fetch_tool, names, {"url": f"https://a.example:{secure.port}/"})
        for host in ("other.example", "127.0.0.2"):
            url = {"url": f"https://{host}:{secure.port}/"}
            with pytest.raises(ToolExecutionError, match=f"{host}.*CERTIFICATE_VERIFY_FAILED"):
                await call(create_web_fetch_tool, names, url, allow_private=["127.0.0.2", "*.example"])
    assert result["content"] == "end"
    assert [(got.sni, got.headers["host"]) for got in secure.got] == [
        ("a.example", f"a.example:{secure.port}"),
        ("b.example", f"b.example:{secure.port}"),
    ]


async def test_a_name_server_that_is_silent_counts_against_the_time(site: Site) -> None:  # HTTP-06
    class Silent(NameServer):
        def datagram_received(self, data: bytes, addr: Any) -> None:
            self.asked.append(("?", "?"))

    async with Silent({}) as names:
        with pytest.raises(ToolExecutionError, match="50 ms"):
            await call(create_web_fetch_tool, names, {"url": "http://a.example/"}, timeout_ms=50)
    assert names.asked


# ------------------------------------------------------------------------------------------------------ the whole internet

PUBLIC, PUBLIC6 = "93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"
OTHER = "8.8.8.8"
METADATA = "169.254.169.254"

PRIVATE_ANSWERS = {
    "loopback": "127.0.0.1",
    "rfc1918": "192.168.0.10",
    "metadata": METADATA,
    "cgnat": "100.64.0.1",
    "loopback6": "::1",
    "ula": "fd00::1",
    "mapped": "::ffff:10.0.0.1",
    "nat64": "64:ff9b::a9fe:a9fe",
    "6to4": "2002:c0a8:1::1",
    "teredo": "2001:0:4136:e378:8000:63bf:3fff:fdd2",
}
ODD_SPELLINGS = [
    *("2130706433", "0x7f.1", "0177.0.0.1", "127.1", "127.0.0.1.", "[::ffff:169.254.169.254]", "[64:ff9b::7f00:1]"),
    *("[2002:7f00:1::]", "\uff11\uff12\uff17.0.0.1", "[::ffff:7f00:1]", "0xa9fea9fe", "[fe80::1%25lo]"),
]

CASES: dict[str, dict[str, Any]] = {
    "public": {"names": {"a.test": [[PUBLIC, PUBLIC6]]}, "pages": {"/": "hello"}, "arguments": {"url": "http://a.test/"}},
    "public6": {"names": {"a.test": [PUBLIC6]}, "pages": {"/": "hello"}, "arguments": {"url": "http://a.test/"}},
    "literal": {"names": {}, "pages": {"/": "hello"}, "arguments": {"url": f"http://[{PUBLIC6}]:8080/"}},
    "alias": {
        "names": {"a.test": ["CNAME b.test"], "b.test": ["CNAME c.test"], "c.test": ["10.0.0.1"]},
        "pages": {"/": "secret"},
        "arguments": {"url": "http://a.test/"},
    },
    "rebinding": {
        "names": {"a.test": [PUBLIC, METADATA]},
        "pages": {"/": "-> http://a.test/latest/meta-data/", "/latest/meta-data/": "secret"},
        "arguments": {"url": "http://a.test/"},
    },
    "hops": {
        "names": {"a.test": [PUBLIC, OTHER], "b.test": ["CNAME a.test"]},
        "pages": {"a.test/": "-> http://b.test:8080/2", "b.test/2": "-> http://a.test/3", "a.test/3": "end"},
        "arguments": {"url": "http://a.test/"},
        "tool": "http_request",
    },
    "listed": {
        "names": {"wiki.corp.test": ["10.0.0.1"], "corp.test": ["10.0.0.1"]},
        "pages": {"/": "-> http://corp.test/"},
        "arguments": {"url": "http://wiki.corp.test/"},
        "options": {"allow_private": ["*.corp.test"]},
    },
    "proxy": {
        "names": {"a.test": [PUBLIC], "proxy.test": ["10.0.0.1"]},
        "pages": {"a.test/": "-> http://a.test/2", "a.test/2": "direct"},
        "arguments": {"url": "http://a.test/"},
        "env": {name: "http://127.0.0.1:8080" for low in ("http_proxy", "https_proxy", "all_proxy") for name in (low, low.upper())},
    },
    **{
        f"private {kind}": {"names": {"a.test": [address]}, "pages": {"/": "secret"}, "arguments": {"url": "http://a.test/"}}
        for kind, address in PRIVATE_ANSWERS.items()
    },
    **{
        f"redirect to {kind}": {
            "names": {"a.test": [PUBLIC], "b.test": [[OTHER, address]]},
            "pages": {"a.test/": "-> http://b.test/", "b.test/": "secret"},
            "arguments": {"url": "http://a.test/"},
            "tool": "http_request",
        }
        for kind, address in PRIVATE_ANSWERS.items()
    },
    **{
        f"odd {host}": {
            "names": {"a.test": [PUBLIC]},
            "pages": {"a.test/": f"-> http://{host}/", "/": "secret"},
            "arguments": {"url": "http://a.test/"},
        }
        for host in ODD_SPELLINGS
        if host.isascii()
    },
    **{
        f"direct {host}": {"names": {}, "pages": {"/": "secret"}, "arguments": {"url": f"http://{host}/"}} for host in ODD_SPELLINGS
    },
}


@pytest.fixture(scope="module")
def internet() -> dict[str, dict[str, Any]]:
    """What happened in every case."""
    child = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--net",
            "--mount",
            sys.executable,
            str(Path(__file__).with_name("whole_internet.py")),
        ],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert child.returncode == 0, child.stderr
    happened: dict[str, dict[str, Any]] = json.loads(child.stdout)
    return happened


def test_public_names_and_addresses_are_reached_through_the_system_resolver(internet: dict[str, Any]) -> None:  # HTTP-03
    for case, address in (("public", PUBLIC), ("public6", PUBLIC6), ("literal", PUBLIC6)):
        assert internet[case]["result"]["content"] == "hello"
        assert internet[case]["connected"] == [address]
    assert internet["literal"]["sent"][0]["host"] == f"[{PUBLIC6}]:8080"
    assert internet["public"]["lookups"] == ["a.test"]


@pytest.mark.parametrize("kind", PRIVATE_ANSWERS)
def test_name_of_a_private_address_is_never_connected_to(internet: dict[str, Any], kind: str) -> None:  # HTTP-02, HTTP-03
    happened = internet[f"private {kind}"]
    assert "a.test" in happened["error"]
    assert "not a public address" in happened["error"]
    assert happened["connected"] == []
    assert happened["lookups"] == ["a.test"]


@pytest.mark.parametrize("kind", PRIVATE_ANSWERS)
def test_redirect_to_a_name_with_a_private_address_stops_there(internet: dict[str, Any], kind: str) -> None:  # HTTP-04
    happened = internet[f"redirect to {kind}"]
    assert "redirected to where it may not: b.test" in happened["error"]
    assert happened["connected"] == [PUBLIC]


@pytest.mark.parametrize("host", ODD_SPELLINGS, ids=ascii)
def test_odd_spellings_of_private_addresses_are_not_reached(internet: dict[str, Any], host: str) -> None:  # HTTP-02
    happened = internet[f"direct {host}"]
    assert "error" in happened
    assert (happened["connected"], happened["lookups"]) == ([], [])
    if host.isascii():
        happened = internet[f"odd {host}"]
        assert "error" in happened
        assert (happened["connected"], happened["lookups"]) == ([PUBLIC], ["a.test"])


def test_alias_is_followed_to_the_address_that_is_judged(internet: dict[str, Any]) -> None:  # HTTP-03
    assert "a.test (10.0.0.1)" in internet["alias"]["error"]
    assert internet["alias"]["connected"] == []


def test_rebinding_name_is_judged_anew_for_the_next_hop(internet: dict[str, Any]) -> None:  # HTTP-03, HTTP-04
    happened = internet["rebinding"]
    assert METADATA in happened["error"]
    assert happened["connected"] == [PUBLIC]
    assert happened["lookups"] == ["a.test", "a.test"]


def test_every_hop_goes_where_its_own_answer_says_and_keeps_the_name(internet: dict[str, Any]) -> None:  # HTTP-03, HTTP-04
    happened = internet["hops"]
    assert happened["result"]["body"] == "end"
    assert [(sent["address"], sent["host"]) for sent in happened["sent"]] == [
        (PUBLIC, "a.test"),
        (PUBLIC, "b.test:8080"),
        (OTHER, "a.test"),
    ]


def test_only_listed_hosts_lead_to_private_addresses(internet: dict[str, Any]) -> None:  # HTTP-05
    assert "corp.test (10.0.0.1)" in internet["listed"]["error"]
    assert internet["listed"]["connected"] == ["10.0.0.1"]


def test_proxy_of_the_environment_is_passed_by_on_every_hop(internet: dict[str, Any]) -> None:  # trust_env=False
    assert internet["proxy"]["result"]["content"] == "direct"
    assert internet["proxy"]["connected"] == [PUBLIC, PUBLIC]
