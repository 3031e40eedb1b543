"""Which hosts and addresses a tool may reach."""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lousho_ray.errors import ConfigurationError
from lousho_ray.tools.net import Host, HostRules, RefusedHostError, is_public, parse_host, resolve

PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "169.254.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "0.0.0.0",
    "0.1.2.3",
    "192.0.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "fc00::1",
    "fd12:3456::1",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::127.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2002:c0a8:101::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
]
PUBLIC = [
    "8.8.8.8",
    "172.32.0.1",
    "100.128.0.1",
    "169.253.255.255",
    "2606:4700:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "2002:808:808::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str) -> None:  # HTTP-02
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are(address: str) -> None:  # HTTP-02
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "spelling",
    [
        "127.0.0.1",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0x7F.1",
        "0177.0.0.1",
        "017700000001",
        "127.0.0.1.",
        "127.0.0.01",
        "0x7f.0x0.0x0.0x1",
        "\uff11\uff12\uff17.0.0.1",
        "127\u30020.0.1",
    ],
)
def test_odd_spellings_of_an_address_are_that_address(spelling: str) -> None:  # HTTP-02, open point "odd spellings"
    assert parse_host(spelling) == Host("127.0.0.1", ip_address("127.0.0.1"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("a_b.example", "a_b.example"),
        ("localhost", "localhost"),
        ("[::1]", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
    ],
)
def test_names_are_normalised(text: str, name: str) -> None:
    assert parse_host(text).name == name


BAD_IPV4 = ["1.2.3.4.5", "256.0.0.1", "0x", "0xg", "example.0x7f"]
BAD_IPV6 = ["::g", "fe80::1::2", "a:b"]
BAD_NAMES = ["", ".", "a..b", "exa mple.com", "a%20b", "-a.example", "a" * 64 + ".example", "a." * 200 + "example", "a/b", "a@b"]
BAD_UNICODE = ["ex\u2100mple.com", "\U0001f600.\ufffe", "\ud83d.example"]


@pytest.mark.parametrize("text", [*BAD_IPV4, *BAD_IPV6, *BAD_NAMES, *BAD_UNICODE], ids=ascii)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(RefusedHostError):
        parse_host(text)


@given(st.text(max_size=40))
def test_any_host_is_refused_or_normalised_for_good(text: str) -> None:
    try:
        host = parse_host(text)
    except RefusedHostError:
        return
    assert host.name.isascii()
    assert parse_host(host.name) == host


# ---------------------------------------------------------------------------------------------------------------- rules


def refusal(rules: HostRules, url: str) -> str:
    with pytest.raises(RefusedHostError) as caught:
        rules.check_url(httpx2.URL(url))
    return caught.value.message


@pytest.mark.parametrize(
    "url", ["ftp://example.com/", "file:///etc/passwd", "gopher://example.com", "//example.com/x", "example.com"]
)
def test_only_http_urls_pass(url: str) -> None:  # HTTP-01
    assert "http" in refusal(HostRules.of(), url)


def test_credentials_in_a_url_are_refused_without_repeating_them() -> None:  # HTTP-01
    for url in ("https://user:hunter2@example.com/", "https://hunter2@example.com/"):
        message = refusal(HostRules.of(), url)
        assert "example.com" in message
        assert "hunter2" not in message


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/", "http://0x7f.1/", "http://[::1]:80/", "http://169.254.169.254/latest/", "http://2130706433/"]
)
def test_literal_addresses_are_judged_before_any_lookup(url: str) -> None:  # HTTP-03
    assert "not a public address" in refusal(HostRules.of(), url)


def test_blocked_and_allowed_hosts() -> None:  # HTTP-10
    assert "blocked" in refusal(HostRules.of(blocked_hosts=["Example.com"]), "https://EXAMPLE.com./x")
    assert "allowed" in refusal(HostRules.of(allowed_hosts=["docs.example"]), "https://other.example/")
    assert "allowed" in refusal(HostRules.of(allowed_hosts=[]), "https://other.example/")
    assert "blocked" in refusal(HostRules.of(allowed_hosts=["*.example"], blocked_hosts=["bad.example"]), "https://bad.example/")
    HostRules.of(allowed_hosts=["docs.example"]).check_url(httpx2.URL("https://docs.example/a"))


def test_star_means_sub_domains_only() -> None:  # HTTP-05
    rules = HostRules.of(allowed_hosts=["*.corp.example"])
    rules.check(parse_host("a.corp.example"))
    rules.check(parse_host("a.b.corp.example"))
    for other in ("corp.example", "evilcorp.example", "corp.example.evil.com"):
        with pytest.raises(RefusedHostError):
            rules.check(parse_host(other))


@pytest.mark.parametrize("pattern", ["http://a.example", "a.example:80", "a.example/x", "*", "*.", "a.*.example", ""])
@pytest.mark.parametrize("option", ["allow_private", "allowed_hosts", "blocked_hosts"])
def test_bad_pattern_is_refused_when_the_tool_is_made(option: str, pattern: str) -> None:
    for value in ([pattern], pattern or "a.example"):
        with pytest.raises(ConfigurationError) as caught:
            HostRules.of(**{option: value})  # type: ignore[arg-type]
        assert caught.value.field == option
        assert caught.value.code == "LOUSHO_CONFIG_INVALID"


# --------------------------------------------------------------------------------------------------------------- lookups


def answering(*answers: Any) -> tuple[Callable[..., Any], list[str]]:
    asked: list[str] = []

    async def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return list(answers)

    return resolver, asked


async def test_name_is_looked_up_once_and_all_answers_judged() -> None:  # HTTP-03
    resolver, asked = answering("8.8.8.8", "2606:4700:4700::1111")
    assert [str(a) for a in await resolve(parse_host("a.example"), 443, HostRules.of(), resolver)] == [
        "8.8.8.8",
        "2606:4700:4700::1111",
    ]
    assert asked == ["a.example"]
    mixed, _ = answering("8.8.8.8", "10.0.0.1")
    with pytest.raises(RefusedHostError, match=r"a\.example \(10\.0\.0\.1\)"):
        await resolve(parse_host("a.example"), 443, HostRules.of(), mixed)


async def test_listed_hosts_may_be_private() -> None:  # HTTP-05
    resolver, _ = answering("10.0.0.1", "fe80::1%2")
    rules = HostRules.of(allow_private=["*.corp.example"])
    assert len(await resolve(parse_host("wiki.corp.example"), 80, rules, resolver)) == 2
    with pytest.raises(RefusedHostError):
        await resolve(parse_host("corp.example"), 80, rules, resolver)
    HostRules.of(allow_private=["10.0.0.5"]).check(parse_host("10.0.0.5"))


async def test_literal_address_is_not_looked_up() -> None:
    resolver, asked = answering("10.0.0.1")
    assert [str(a) for a in await resolve(parse_host("8.8.8.8"), 80, HostRules.of(), resolver)] == ["8.8.8.8"]
    assert asked == []


async def test_unknown_name_is_a_refusal_that_names_it() -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(RefusedHostError, match=r"nowhere\.example was not found"):
        await resolve(parse_host("nowhere.example"), 80, HostRules.of(), unknown)
    nothing, _ = answering()
    with pytest.raises(RefusedHostError, match="no address"):
        await resolve(parse_host("nowhere.example"), 80, HostRules.of(), nothing)
