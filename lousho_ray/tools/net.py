"""Which hosts and addresses a tool may reach. The model chooses the URLs, so a tool must not become a way into private networks.

Pure rules, apart from `resolve`. A literal address is judged before any I/O; a name is looked up once per connection, all answers
are judged, and the connection goes to a judged address, so a name whose answer changes gets no second look.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, TypeAlias

from lousho_ray.errors import ConfigurationError, ToolExecutionError

if TYPE_CHECKING:
    from httpx2 import URL

IPAddress: TypeAlias = IPv4Address | IPv6Address
Resolver: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Looks a name up: `(host, port)` to addresses as text."""

DEFAULT_PORTS = {"http": 80, "https": 443}

# Prefixes that carry an IPv4 address, and where it begins (bytes): NAT64 (RFC 6052), 6to4 (RFC 3056), IPv4-compatible (RFC 4291).
_EMBEDDED = ((IPv6Network("64:ff9b::/96"), 12), (IPv6Network("2002::/16"), 2), (IPv6Network("::/96"), 12))
# Teredo (RFC 4380) hides an address of either kind; local-use NAT64 (RFC 8215) translates to private networks.
_REFUSED = (IPv6Network("2001::/32"), IPv6Network("64:ff9b:1::/48"))

_IPV4_SPELLING = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+)){0,3}")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


class RefusedHostError(ToolExecutionError):
    """A destination that a tool may not reach. The message names the host."""

    without_effect = True


@dataclass(frozen=True, slots=True)
class Host:
    """A normalised host: lower case, IDNA, no trailing dot; `address` is set for a literal IP however it was spelled."""

    name: str
    address: IPAddress | None = None


def parse_host(text: str) -> Host:
    """Normalises a host: odd spellings of IPv4 (`0x7f.1`, `2130706433`, `0177.0.0.1`), brackets, a trailing dot, IDNA.

    Raises:
        RefusedHostError: For what cannot be read, which another program might read as something else.
    """
    if text.startswith("[") or ":" in text:
        return _literal(text.removeprefix("[").removesuffix("]"), text)
    name = _ascii(text)
    name = name[:-1] if name.endswith(".") else name
    last = name.rsplit(".", 1)[-1]
    if last.isdigit() or last.startswith("0x"):
        # A host whose last label is a number is an IPv4 address for every resolver, or nothing.
        if not _IPV4_SPELLING.fullmatch(name):
            raise _unreadable(text)
        try:
            return _literal(str(IPv4Address(socket.inet_aton(name))), text)
        except OSError:
            raise _unreadable(text) from None
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise _unreadable(text)
    return Host(name)


def _ascii(text: str) -> str:
    if text.isascii():
        return text.lower()
    import idna

    try:
        # With the mapping of UTS 46, by which full-width digits and dots become plain ones, as they do in other programs.
        return idna.encode(text, uts46=True).decode("ascii").lower()
    except idna.IDNAError:
        raise _unreadable(text) from None


def _literal(address: str, text: str) -> Host:
    try:
        parsed = ip_address(address)
    except ValueError:
        raise _unreadable(text) from None
    return Host(str(parsed), parsed)


def _unreadable(text: str) -> RefusedHostError:
    return RefusedHostError(f"{text[:200]!r} is not a host name or address that can be checked.")


def is_public(address: IPAddress) -> bool:
    """Whether an address is a public one: not loopback, private, link-local, CGNAT, multicast, reserved or unspecified.

    An IPv6 address that carries an IPv4 address is judged by that as well.
    """
    if isinstance(address, IPv6Address):
        inner = _inner(address)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local or any(address in network for network in _REFUSED):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    for network, start in _EMBEDDED:
        if address in network:
            return IPv4Address(address.packed[start : start + 4])
    return None


@dataclass(frozen=True, slots=True)
class HostRules:
    """Which hosts may be reached.

    Attributes:
        allow_private: Hosts that may lead to private addresses.
        allowed: With any of these, no other host is reached.
        blocked: Never reached.

    A pattern is a host or `*.example.com`, which means the sub-domains of `example.com` and not itself. Build with `of`.
    """

    allow_private: tuple[str, ...] = ()
    allowed: tuple[str, ...] | None = None
    blocked: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, allow_private: Iterable[str] = (), allowed_hosts: Iterable[str] | None = None, blocked_hosts: Iterable[str] = ()
    ) -> HostRules:
        """Raises `ConfigurationError` (`LOUSHO_CONFIG_INVALID`) for what is no host pattern."""
        return cls(
            _patterns("allow_private", allow_private),
            None if allowed_hosts is None else _patterns("allowed_hosts", allowed_hosts),
            _patterns("blocked_hosts", blocked_hosts),
        )

    def check(self, host: Host) -> None:
        """Everything that can be said of a host before a look-up. Raises `RefusedHostError`."""
        if host_matches(self.blocked, host.name):
            raise RefusedHostError(f"The host {host.name} is blocked.")
        if self.allowed is not None and not host_matches(self.allowed, host.name):
            raise RefusedHostError(f"The host {host.name} is not among the allowed hosts: {', '.join(self.allowed) or 'none'}.")
        if host.address is not None:
            self.check_address(host, host.address)

    def check_address(self, host: Host, address: IPAddress) -> None:
        """Raises `RefusedHostError` when `host` leads to a private address and may not."""
        if not is_public(address) and not host_matches(self.allow_private, host.name):
            shown = host.name if str(address) == host.name else f"{host.name} ({address})"
            raise RefusedHostError(f"{shown} is not a public address, so it is not reached.")

    def check_url(self, url: URL) -> Host:
        """The host of a URL whose scheme, credentials and host are in order. Raises `RefusedHostError`."""
        if url.scheme not in DEFAULT_PORTS:
            raise RefusedHostError(
                f"Only http and https URLs are fetched, not {url.scheme or 'one without a scheme'!r} ({url.host})."
            )
        if url.userinfo:
            raise RefusedHostError(f"The URL carries a user name or password for {url.host}; leave it out.")
        if url.port is not None and not 0 < url.port < 65_536:
            raise RefusedHostError(f"{url.host} has no port {url.port}.")
        host = parse_host(url.host)
        self.check(host)
        return host


def _patterns(option: str, patterns: Iterable[str]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise ConfigurationError(f"`{option}` is {patterns!r}; it is a list of hosts such as ['{patterns}'].", field=option)
    return tuple(_pattern(option, pattern) for pattern in patterns)


def _pattern(option: str, pattern: str) -> str:
    stars, rest = ("*.", pattern[2:]) if pattern.startswith("*.") else ("", pattern)
    try:
        return stars + parse_host(rest).name
    except RefusedHostError:
        raise ConfigurationError(
            f"`{option}` has {pattern!r}, which is no host: write 'a.example' or '*.a.example', without scheme, port and path.",
            field=option,
        ) from None


def host_matches(patterns: Iterable[str], name: str) -> bool:
    """Whether any of the patterns means the host `name`."""
    return any(name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern for pattern in patterns)


async def system_resolver(host: str, port: int) -> list[str]:
    """The addresses the system's resolver gives."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def resolve(host: Host, port: int, rules: HostRules, resolver: Resolver = system_resolver) -> list[IPAddress]:
    """The addresses to connect to, from one look-up.

    Raises:
        RefusedHostError: When any of them is private and the host may not lead there, or when there is none.
    """
    if host.address is not None:
        return [host.address]
    try:
        answers = await resolver(host.name, port)
    except OSError as error:
        raise RefusedHostError(f"The host {host.name} was not found ({error.strerror or error}).") from error
    addresses = [ip_address(answer) for answer in answers]
    if not addresses:
        raise RefusedHostError(f"The host {host.name} has no address.")
    for address in addresses:
        rules.check_address(host, address)
    return addresses
