"""Which hosts are this machine's own, and no other's.

The invariant: what is called loopback here leads every machine to itself, and a socket bound to it is closed to the network:
an address of all interfaces (0.0.0.0) is not loopback.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


def is_loopback(host: str) -> bool:
    """Whether an address or a name means this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOOPBACK_NAMES


def leads_to_itself(url: str) -> bool:
    """Whether a URL, given to another machine, leads that one to itself: its host is loopback, all interfaces, or none."""
    host = urlsplit(url).hostname or ""
    try:
        return is_loopback(host) or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host or host.endswith(".localhost")
