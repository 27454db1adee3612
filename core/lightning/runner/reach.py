"""Whether a URL means this machine only, to be asked before it is given to another one.

The invariant: what is called loopback here leads another machine to itself, never to us.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Whether the host of a URL is this machine's own name or address for itself, or none at all."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("", "localhost") or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
