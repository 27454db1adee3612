"""Tells which hosts are this machine's own, which are in a private network, and which the gateway may call.

The invariant: a loopback address leads every machine to itself, and a socket bound to it is closed to the network: an address
of all interfaces (0.0.0.0) is not loopback.

An address that is not allowed is never connected to. Names are compared as they are written and never looked up, so that an
answer of the DNS cannot change what a name means here.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from lightning.errors import ConfigError, GatewayError

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


def is_loopback(host: str) -> bool:
    """Whether an address or a name means this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def leads_to_itself(url: str) -> bool:
    """Whether a URL that is given to another machine would lead that machine to itself: the host is loopback, all interfaces,
    or none."""
    host = urlsplit(url).hostname or ""
    try:
        return is_loopback(host) or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host or host.endswith(".localhost")


def reachable(host: str) -> str:
    """Return the host by which a client on this machine reaches a server bound to `host`."""
    if host in {"0.0.0.0", ""}:  # noqa: S104 — compared, not bound
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


LOOPBACK, PRIVATE = "loopback", "private"
ALLOWED = (LOOPBACK, PRIVATE)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PRIVATE_NETWORKS: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)
"""Private networks, where the machines of one owner are. Link-local addresses are left out, because clouds serve a machine's
credentials there."""


class Allowed:
    """The hosts that `gateway.allowed_upstreams` allows. Raises `ConfigError` for a pattern that is neither a word, a network
    nor a name."""

    def __init__(self, patterns: Sequence[str] = ALLOWED) -> None:
        self._patterns = tuple(patterns)
        self._loopback = LOOPBACK in patterns
        self._networks: list[Network] = [*PRIVATE_NETWORKS] if PRIVATE in patterns else []
        self._names: list[str] = []
        for pattern in patterns:
            if pattern in ALLOWED:
                continue
            half = "*" in pattern and not pattern.strip("*.:0123456789")  # such as 10.*, which no name is like
            try:
                self._networks.append(ipaddress.ip_network(pattern, strict=False))
            except ValueError:
                if not pattern.strip() or half or ":" in pattern or "/" in pattern:
                    raise ConfigError(
                        f"gateway.allowed_upstreams has {pattern!r}: write loopback, private, a network such as "
                        "203.0.113.0/24, or a host's name, in which * stands for any letters (gpu-*.example.org)"
                    ) from None
                self._names.append(pattern.lower().rstrip("."))

    def check(self, url: str) -> None:
        """Raise `GatewayError` unless calls may go to this URL."""
        host = (urlsplit(url).hostname or "").lower().rstrip(".")
        if not self._allows(host):
            raise GatewayError(
                f"the policy server {url!r} is not among those that this gateway may use ({', '.join(self._patterns)}); if it "
                "is yours, add its host to gateway.allowed_upstreams"
            )

    def _allows(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            if host == "localhost":
                return self._loopback
            return bool(host) and any(fnmatch.fnmatchcase(host, name) for name in self._names)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if address.is_loopback:
            return self._loopback
        return any(address in network for network in self._networks if network.version == address.version)
